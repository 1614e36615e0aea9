"""Check of a stored weight: it has to be its 16-bit source, rounded, and nothing else.

Both are compared where the codes are: the source smoothed and rotated as the layer was, the difference in units of the
distance from the stored code to its neighbour.

    plain rounding       no difference above half a step; where scales were chosen to clip, little above
    error feedback       (GPTQ) some steps; its size is learnt from the other rows of the same column
    a block's factor     <stored, source> / <source, source> is near 1; a wrong scale gives its own error

Of faults planted at random in the embedded pipeline these were found: a block's scale times 2, 1.5 or 0.5, 97 % under
nvfp4 and 85 % with low rank and rotation too; two swapped nibbles of a byte, 91 % in nvfp4 rounded plainly and about
half in nvfp4 fitted with feedback. A swap of neighbouring codes is what feedback does too, and cannot be told from it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels.encode import decode, unpack
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.transforms import rotate
from fluxq.recipes.formats import Element

_LAYER_FACTOR = 0.05  # of a whole layer; rounding leaves it within 0.01 of 1
_BLOCK_FACTOR = 0.4  # of one block; up to 0.2 were seen in sound checkpoints
_EXPLAINED = 0.8  # share of a block's error that a wrong factor explains
_PLAIN_STEPS = 0.76  # plain rounding stays below, but for what is clipped
_PLAIN_LIMIT, _FITTED_LIMIT = 1.25, 14.0  # steps; times a column's usual number of steps, of which 10 was seen
_CLIPPED_LIMIT = 4.0  # how much farther the largest codes may be from what a searched scale has clipped
_LEAST_SPREAD = 0.2  # steps: no column's usual difference counts for less


def stored_fault(layer: QuantLinear, weight: Tensor) -> str:
    """Return a sentence about the fault in a layer's stored weight beside its source (N, K); "" if there is none.

    A layer that was re-encoded for a GPU holds other codes than its checkpoint and is passed over.
    """
    if layer.prepared is not None and layer.prepared.kind == "re-encoded":
        return ""
    source = source_of(layer, weight)
    difference, codes, step = _difference(layer, source)
    if not torch.isfinite(difference).all():
        return "stored weights decode to NaN or infinity"
    group = layer.scheme.weights.group_size or source.shape[1]
    factor, explained = _factors(source, difference, group)
    usual = float(factor.median())
    if abs(usual - 1) > _LAYER_FACTOR:
        return f"stored weights are {usual:.3g} times those of the source"
    off = (factor - usual).abs() * (explained > _EXPLAINED)
    if off.max() > _BLOCK_FACTOR:
        row, block = divmod(int(off.argmax()), factor.shape[1])
        where = f"row {row}"
        if group < source.shape[1]:
            where += f", columns {block * group} to {(block + 1) * group - 1}"
        return f"a scale is wrong: stored weights of {where} are {float(factor[row, block]):.3g} times the source's"
    steps = (difference / step).abs()
    clipped = (codes.abs() >= layer.scheme.weights.element.max) & (difference * codes < 0)
    steps = torch.where(clipped, steps / _CLIPPED_LIMIT, steps)
    plain = float((steps > _PLAIN_STEPS).float().mean()) < 1e-3
    if plain:
        excess = steps / _PLAIN_LIMIT
    else:
        spread = steps.median(0).values.div_(_NORMAL).clamp_(min=_LEAST_SPREAD)
        size = difference.square().mean(0).sqrt().clamp_(min=torch.finfo(torch.float32).tiny)
        # Feedback is many steps of a small e4m3 code, and no more than the column's other differences: of n normal
        # numbers of unit variance the largest is about √(2 ln n).
        excess = torch.minimum(
            steps / spread / _FITTED_LIMIT, difference.abs() / size / math.sqrt(2 * math.log(steps.numel()))
        )
    if excess.max() > 1:
        row, column = divmod(int(excess.argmax()), steps.shape[1])
        count = int((excess > 1).sum())
        return (
            f"{count} stored code{'s are' if count > 1 else ' is'} not what rounding gives, most at row {row}, "
            f"column {column}: {float((difference / step)[row, column].abs()):.1f} steps from the source"
        )
    return ""


def source_of(layer: QuantLinear, weight: Tensor) -> Tensor:
    """Return the 16-bit weight (N, K) as the layer's codes would hold it, fp32: smoothed and rotated."""
    smooth = getattr(layer, "pre_quant_scale", None)
    smoothed = weight.float() if smooth is None else weight.float() / smooth.data.float()
    return rotate(smoothed, layer.scheme.hadamard, layer.scheme.regular)


def _difference(layer: QuantLinear, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (stored minus source with all branches counted, codes, step of each code), all (N, K)."""
    q = layer.quantized_weight
    codes = decode(unpack(q.codes, q.format.element), q.format.element)
    blocks = q.multipliers().unsqueeze(-1)
    step = code_step(codes, q.format.element).reshape(q.shape[0], blocks.shape[1], -1) * blocks
    stored = rotate(layer.merged()[0], layer.scheme.hadamard, layer.scheme.regular)
    return stored - source, codes, step.reshape(q.shape)


def code_step(codes: Tensor, element: Element) -> Tensor:
    """Return the distance from each code to its neighbour away from 0, fp32; for the largest code to the one below."""
    if element.is_integer:
        return torch.ones_like(codes)
    exponent = torch.frexp(codes.abs().clamp(min=element.smallest_normal)).exponent - 1
    return torch.exp2(exponent.float() - element.mantissa)


def _factors(source: Tensor, difference: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return (f, share of the error that it explains) of each block (N, G) for stored ≈ f · source; f is 1 for 0."""
    padding = (0, -source.shape[1] % group)
    s, d = (F.pad(t, padding).reshape(t.shape[0], -1, group) for t in (source, difference))
    size, along, error = s.square().sum(-1), (s * d).sum(-1), d.square().sum(-1)
    slope = torch.where(size > 0, along / size, 0)
    return 1 + slope, torch.where(error > 0, slope * along / error, 0)


_NORMAL = 0.6745  # median of |z| for z of unit variance
