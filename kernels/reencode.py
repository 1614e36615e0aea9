"""Stored weights as 8-bit rows, for chips whose matrix units do not know the stored format.

    r    = amax(row) / largest                    the scale of a row, int8 or fp8
    m    = bfloat16(multiplier · (1 / r))         one for each group; multiplier is its scale, the global one included
    w8   = RNE(code · m)                          so that w ≈ code · multiplier ≈ w8 · r

`m` has few enough bits for code · m to be exact, in fp32 and in 16 bit. So w8 is rounded once, and every way to compute
it, ahead or inside a matmul, with or without fused multiply-adds, gives the same byte. Rounding `m` costs at most
2^-8 of a weight, little beside w8's own step; `added_error` measures both.

Where a layer rotates or deflates its input, or has a low-rank branch beside it, all that is put into its weight first:
`QuantLinear.merged`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fluxq.kernels import encode
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS, Format

TARGETS = ("int8", "fp8")


def reencode(w: QuantizedTensor, format: str, row_scale: Tensor | None = None) -> QuantizedTensor:
    """Encode w (N, K) anew in "int8" or "fp8" with a scale per row.

    row_scale (N,) fp32: the `row_scales` of w, if they are computed already. A row that holds NaN or infinity gets
    scale NaN, so that it decodes to NaN throughout.
    """
    target = find_target(format)
    scale = row_scales(w, format) if row_scale is None else row_scale
    n, k = w.shape
    if scale.dtype != torch.float32 or scale.shape != (n,):
        raise ValueError(f"reencode: row_scale is {scale.dtype} {(*scale.shape,)}, expected float32 ({n},)")
    codes = encode.decode(encode.unpack(w.codes, w.format.element), w.format.element)
    m = (w.multipliers() * (1 / scale)[:, None]).bfloat16().float()  # (N, G)
    m = torch.where(m.isnan(), 0.0, m)
    value = (codes.reshape(n, m.shape[1], -1) * m[:, :, None]).reshape(n, k)
    value = torch.where(value.isnan(), 0.0, value)
    return QuantizedTensor(encode.encode(value, target.element), scale, None, (n, k), target)


def row_scales(w: QuantizedTensor, format: str) -> Tensor:
    """Return the scale (N,) fp32 of each row of w in "int8" or "fp8": amax / largest, 1 for a row of zeros."""
    return encode.block_scale(w.dequantize().unsqueeze(1), find_target(format), None).squeeze(1)


def added_error(w: QuantizedTensor | Tensor, target: QuantizedTensor) -> float:
    """Return |target - w| / |w|, Frobenius norms: the error that re-encoding adds to w's; 0 for zeros."""
    plain = (w if isinstance(w, Tensor) else w.dequantize()).double()
    size = plain.norm().item()
    return (target.dequantize().double() - plain).norm().item() / size if size else 0.0


def choose_target(w: QuantizedTensor | Tensor, candidates: Sequence[str] = TARGETS) -> tuple[str, dict[str, float]]:
    """Return the candidate that adds the least error to w, the first of equals, and the error of each.

    w: as stored, or the plain matrix (N, K) that `QuantLinear.merged` gives.
    """
    if not candidates:
        raise ValueError(f"choose_target: no candidates, expected some of {', '.join(TARGETS)}")
    errors = {}
    for name in candidates:
        find_target(name)
        target = QuantizedTensor.quantize(w, name) if isinstance(w, Tensor) else reencode(w, name)
        errors[name] = added_error(w, target)
    return min(errors, key=lambda name: errors[name]), errors


def find_target(format: str) -> Format:
    """Return the format of that name; ValueError unless weights can be encoded anew in it."""
    if format not in TARGETS:
        raise ValueError(f"reencode: no target {format!r}, only {' and '.join(TARGETS)}, which have a scale per row")
    return FORMATS[format]
