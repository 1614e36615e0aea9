"""Stored weights to 8-bit rows on the GPU, byte for byte what `reencode` in kernels/reencode/op.py computes.

    r    = amax(row) / largest
    m    = bfloat16(multiplier · (1 / r))
    w8   = RNE(code · m)

Two passes over the codes of a few rows in one launch: the first finds the amax of the decoded values, the second
encodes. `eight_bit_multiplier` is the middle line; kernels/w4a8_matmul uses it for the same bytes in its main loop.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import EXACT, as_bytes, check_device, check_stored, check_tile
from fluxq.kernels.codes import amax_scale, encode, magnitude_bits, nan_unless_finite
from fluxq.kernels.dequantize.kernel import load_codes, load_scales, stored_arguments, times_groups
from fluxq.kernels.dispatch import require
from fluxq.kernels.reencode.op import OP, find_target
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import Tile, cdiv, find_memory_tile
from fluxq.recipes.formats import find_format


def reencode(w: QuantizedTensor, format: str, *, tile: Tile) -> QuantizedTensor:
    """Encode w (N, K) anew in "int8" or "fp8" with a scale per row.

    tile: its columns a multiple of w's group. Raises ValueError for what does not fit.
    """
    target, (n, k), device = find_target(format), w.shape, w.codes.device
    check_stored(w, "reencode: w")
    check_tile("reencode", tile, w.format)
    out = QuantizedTensor.empty(target, n, k, None, device)
    check_device("reencode", device)
    reencode_kernel[(cdiv(n, tile.rows),)](
        codes=as_bytes(w.codes),
        row_codes=as_bytes(out.codes),
        row_scale=out.scale,
        N=n,
        K=k,
        TARGET=target.element.name,
        LARGEST=target.element.max,
        TILES=cdiv(k, tile.columns),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        **stored_arguments(w),
        **EXACT,
    )
    return out


def launch(
    w: Tensor, w_scale: Tensor, w_scale_2: Tensor | None, source: str, target: str, *, chip: str
) -> tuple[Tensor, Tensor]:
    """Launch the op on a chip; ValueError where it has no kernel."""
    require(OP.name, f"{source}-{target}", chip)
    tile = find_memory_tile(OP.file, f"{source}-{target}", chip, w.shape[0])
    q = reencode(QuantizedTensor.stored(w, w_scale, w_scale_2, find_format(source)), target, tile=tile)
    return q.codes, q.scale


@triton.jit
def reencode_kernel(
    codes,  # (N, K) bytes, or (N, K/2) with two codes to a byte
    scale,  # (N, G), (N,) or ()
    global_scale,  # (N, 1) or () fp32, for TWO_LEVEL
    row_codes,  # (N, K) bytes
    row_scale,  # (N,) fp32
    N,
    K,
    stride_scale,  # between rows; 0 where they share a scale
    stride_global,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # 0 is the whole row
    TWO_LEVEL: tl.constexpr,
    TARGET: tl.constexpr,  # element of row_codes
    LARGEST: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """row_scale = amax / LARGEST, row_codes = RNE(codes · m); reads codes and scales twice, writes each output once."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_mask = rows < N
    g = tl.full((ROWS,), 1.0, tl.float32)
    if TWO_LEVEL:
        g = tl.load(global_scale + rows * stride_global, mask=row_mask, other=1.0)
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tile in range(TILES):
        multiplier = load_scales(scale, rows, row_mask, tile, K, stride_scale, SCALE, GROUP, COLUMNS) * g[:, None]
        value = load_codes(codes, rows, row_mask, tile, K, ELEMENT, ROWS, COLUMNS)
        largest = tl.maximum(largest, magnitude_bits(times_groups(value, multiplier, GROUP, ROWS, COLUMNS)))
    amax = tl.max(largest, 1)
    step = nan_unless_finite(amax, amax_scale(amax, LARGEST))
    inverse = tl.div_rn(1.0, step)
    for tile in range(TILES):
        multiplier = load_scales(scale, rows, row_mask, tile, K, stride_scale, SCALE, GROUP, COLUMNS) * g[:, None]
        value = load_codes(codes, rows, row_mask, tile, K, ELEMENT, ROWS, COLUMNS)
        value = times_groups(value, eight_bit_multiplier(multiplier, inverse[:, None]), GROUP, ROWS, COLUMNS)
        code = encode(tl.where(value == value, value, 0.0), TARGET)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (columns < K)[None, :]
        pointers = row_codes + rows[:, None] * K + columns[None, :]
        tl.store(pointers, code.to(row_codes.dtype.element_ty), mask=mask)
    tl.store(row_scale + rows, step, mask=row_mask)


@triton.jit
def eight_bit_multiplier(multiplier, inverse):
    """Return the factor that makes 8-bit codes of codes: so few bits that the product is exact; 0 for NaN."""
    m = (multiplier * inverse).to(tl.bfloat16).to(tl.float32)
    return tl.where(m == m, m, 0.0)
