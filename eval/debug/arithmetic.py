"""Effect of one quantized layer's arithmetic on an input: what rounding loses, and errors of the device's kernel.

health      NaN and infinity, values beyond what codes can say, values that become 0
kernel      what the device computes against the torch reference, of the same input and codes: an error here is a
            fault of the kernel, everything else is quantization
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxq.eval.speed.served import rounded_to
from fluxq.kernels import ops
from fluxq.kernels.encode import decode, unpack
from fluxq.kernels.linear import TRANSFORMS, QuantLinear
from fluxq.kernels.tensor import pack_named
from fluxq.recipes.formats import FORMATS, Scheme

KERNEL_TOLERANCE = 0.02  # far above the rounding of 16-bit outputs and what a code that falls the other way adds
_TILE = 64


def health(layer: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the shares of values of a layer's input x (…, K) and output y (…, N) that are not finite, clipped or lost.

    not_finite: share of y.
    input_not_finite: share of x, which is another layer's fault.
    largest: share of codes of the largest magnitude.
    clipped: share of values beyond the largest code, which a static scale, or a scale at its own limit, cannot hold.
    underflow: share of values other than 0 whose code is 0.
    range: largest value over the largest that a static scale can hold; above 1 is too much.

    All but the first two are of quantized layers that round x to codes; `range` is of static scales alone.
    """
    counts = {"not_finite": _share(~torch.isfinite(y)), "input_not_finite": _share(~torch.isfinite(x))}
    if not isinstance(layer, QuantLinear) or layer.scheme.activations is None or not x.numel():
        return counts
    scheme, row = layer.scheme, layer.scheme.activations
    z = _rounded_by(layer, x)
    static = layer.stored("input_scale") if scheme.static_input else None
    q = ops.quantize_activation(z, row, static, scheme.four_over_six)
    codes, magnitude = decode(unpack(q.codes, row.element), row.element), z.float().abs()
    at_limit, beyond = codes.abs() >= row.element.max, row.element.clips_at / row.element.max
    counts |= {
        "largest": _share(at_limit),
        "clipped": _share(at_limit & (magnitude > q.dequantize().abs() * beyond)),
        "underflow": _share((codes == 0) & (magnitude > 0)),
    }
    if static is not None:
        most = static * row.element.max * (_LARGEST_SCALE if row.two_level else 1.0)
        counts["range"] = float(magnitude.nan_to_num(0, 0, 0).amax() / most)
    return counts


def kernel_error(layer: QuantLinear, x: Tensor, y: Tensor) -> float:
    """Return the relative error of y = layer(x) in its worst tile of 64 x 64, against the torch reference.

    ‖y - r‖ over ‖r‖ of the tile, or over the mean tile's where that is larger. On a GPU the arithmetic is the one that
    dispatch chose. A CPU has no kernels and runs the reference itself, but for int8: there the library's product is
    compared with an exact one in fp64. Infinite where only one of both is finite.
    """
    tensors, scheme = layer.tensors, layer.scheme
    if x.device.type == "cuda":
        scheme = _arithmetic_on(x, layer)
        tensors = tensors._replace(input_scale=layer.stored("input_scale") if scheme.static_input else None)
    with torch.no_grad():
        worst = _worst_tile(y, ops.quantized_linear_reference(x, *pack_named(tensors, scheme)))
        if multiplies_integers(layer):
            codes = ops.quantize_activation(_rounded_by(layer, x), FORMATS["int8"]).codes
            weight = layer.quantized_weight.codes
            worst = max(worst, _worst_tile(ops.int8_product(codes, weight), codes.double() @ weight.double().T))
    return worst


def multiplies_integers(layer: QuantLinear) -> bool:
    """Tell whether the layer's product is one of int8 codes, which a library computes on a CPU too."""
    return layer.scheme.weights is FORMATS["int8"] and layer.scheme.activations is FORMATS["int8"]


def _rounded_by(layer: QuantLinear, x: Tensor) -> Tensor:
    """Return the values that the layer rounds to codes, (M, K)."""
    mean, smooth, basis, _ = (getattr(layer, name, None) for name in TRANSFORMS)
    return ops.transformed(x.reshape(-1, x.shape[-1]), layer.scheme, mean, smooth, basis)[0]


def _arithmetic_on(x: Tensor, layer: QuantLinear) -> Scheme:
    """Return the scheme as this GPU computes it: activations may keep 16 bit where it has no units for them."""
    scheme = layer.scheme
    activations = rounded_to(layer, x.device, x.numel() // layer.in_features, x.dtype)
    if scheme.activations is not None and activations == scheme.activations.name:
        return scheme
    row = FORMATS[activations] if activations else None
    return replace(scheme, activations=row, static_input=False, four_over_six=False)


def _worst_tile(y: Tensor, reference: Tensor) -> float:
    """Return the relative error of the worst tile of a matrix (…, N)."""
    r = reference.reshape(-1, reference.shape[-1]).float()
    difference = y.reshape(r.shape).float() - r
    if torch.equal(torch.isnan(y), torch.isnan(reference)):
        difference, r = difference.nan_to_num(0), r.nan_to_num(0)  # NaN goes in, NaN comes out: the kernel is right
    off, size = (_tile_means(value.square()) for value in (difference, r))
    smallest = torch.finfo(torch.float32).tiny
    worst = (off / torch.maximum(size, r.square().mean()).clamp(min=smallest)).amax().sqrt()
    return float(worst) if torch.isfinite(worst) else math.inf


def _tile_means(values: Tensor) -> Tensor:
    """Return the mean of each tile of (M, N), flat; tiles at the edges are smaller."""
    return F.avg_pool2d(values[None, None], _TILE, ceil_mode=True, count_include_pad=False).flatten()


def _share(mask: Tensor) -> float:
    return float(mask.float().mean()) if mask.numel() else 0.0


_LARGEST_SCALE = 448.0  # of E4M3, which nvfp4's block scales are
