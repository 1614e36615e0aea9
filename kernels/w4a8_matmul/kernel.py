"""4-bit weights times 8-bit activations: weights stay in 4 bits and become 8-bit codes inside the main loop.

    m    = bfloat16(multiplier · (1 / row_scale))         one for each group of the weight
    w8   = RNE(code · m)                                  int8 or e4m3, as x is
    v    = (float(xq · w8^T) · x_scale) · row_scale       int8 accumulates in int32, exactly; fp8 in fp32

w8 are the bytes that `reencode` gives (kernels/reencode.py says why it rounds once), so this is `reencode`
and then `scaled_matmul`; for int8 the result is their bits. It reads half the bytes, and nothing in 8 bits is kept.

Decoding is what such a kernel spends its time on, so it is cheap: eight codes of a word are moved, two at a time, to
where fp16 keeps its bits, and for int8 one multiply-add both scales and rounds.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import EXACT, check_codes, check_device, check_tensor
from fluxq.kernels.dequantize.kernel import decode_scale, stored_arguments, times_groups, unpack_words, word_unit
from fluxq.kernels.epilogue import NOTHING, Epilogue, compare_product, finish, launch_product, product_cells
from fluxq.kernels.scaled_matmul.kernel import grouped_tile
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import MatmulTile, cdiv, find_matmul_tile
from fluxq.kernels.w4a8_matmul.op import ACTIVATIONS, OP, WEIGHTS


def w4a8_matmul(
    x: QuantizedTensor,
    w: QuantizedTensor,
    row_scale: Tensor,
    *,
    epilogue: Epilogue = NOTHING,
    tile: MatmulTile,
) -> Tensor:
    """Return x (M, K), int8 or fp8 with a scale per row, times w (N, K), nvfp4, mxfp4 or int4: (M, N).

    row_scale (N,) fp32: `row_scales` in kernels/reencode.py of w for x's format; with smaller ones codes overflow
    their 8 bits. tile: its k a multiple of w's group. Raises ValueError for operands that do not fit.
    """
    (m, k), n, device = x.shape, w.shape[0], x.codes.device
    _check_operands(x, w, row_scale, tile)
    following = epilogue.following("w4a8_matmul", m, n, device)
    check_device("w4a8_matmul", device)
    w4a8_matmul_kernel[(cdiv(m, tile.m) * cdiv(n, tile.n),)](
        x=x.codes,
        x_scale=x.scale,
        row_scale=row_scale,
        following=following,
        M=m,
        N=n,
        K=k,
        INTEGER=x.format.name == "int8",
        EVEN_K=k % tile.k == 0,
        TILE=tile,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **stored_arguments(w, words=True),
        **EXACT,
    )
    return following.y


def multiply(x: QuantizedTensor, w: QuantizedTensor, row_scale: Tensor, epilogue: Epilogue, chip: str) -> Tensor:
    """Call `w4a8_matmul` with the tile that was tuned for the chip."""
    tile = find_matmul_tile(OP.file, f"{w.format.name}-{x.format.name}", chip, x.shape[0], w.codes)
    return w4a8_matmul(x, w, row_scale, epilogue=epilogue, tile=tile)


launch = partial(launch_product, OP)
cells = partial(product_cells, OP)
compare = partial(compare_product, OP)


def _check_operands(x: QuantizedTensor, w: QuantizedTensor, row_scale: Tensor, tile: MatmulTile) -> None:
    name = "w4a8_matmul"
    if x.format.name not in ACTIVATIONS or w.format.name not in WEIGHTS:
        raise ValueError(
            f"{name}: x is {x.format.name} and w {w.format.name}, expected x in {' or '.join(ACTIVATIONS)} and w in "
            f"{', '.join(WEIGHTS)}; 8-bit weights are for scaled_matmul"
        )
    check_codes(name, x, w)
    if tile.k % w.format.group_size:
        raise ValueError(f"{name}: tile.k is {tile.k}, expected a multiple of {w.format.name}'s {w.format.group_size}")
    check_tensor(f"{name}: row_scale", row_scale, w.shape[:1], (torch.float32,), x.codes.device)


@triton.jit
def w4a8_matmul_kernel(
    x,  # (M, K) int8 or fp8
    w,  # (N, K) as stored, codes as words of eight
    x_scale,  # (M,) fp32
    row_scale,  # (N,) fp32
    following,  # with y (M, N)
    M,
    N,
    K,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE: tl.constexpr,  # a MatmulTile
):
    """One (BLOCK_M, BLOCK_N) tile of (x · w8^T) · x_scale · row_scale and what follows; reads w in 4 bits."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    ACC_SPLIT: tl.constexpr = TILE.acc_split
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), TILE.group_m)
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # Tiles over the edge read the last row again, which costs no mask; what they compute of it is not stored.
    w_rows = tl.minimum(columns, N - 1)
    x_pointers = x + tl.minimum(rows, M - 1)[:, None] * K
    w_pointers = w.codes + w_rows[:, None] * (K // 8)
    scale_pointers = w.scale + w_rows[:, None] * w.stride_scale
    step = tl.load(row_scale + w_rows)  # (BLOCK_N,)
    inverse = tl.div_rn(1.0, step)
    g = tl.full((BLOCK_N,), 1.0, tl.float32)
    if w.global_scale is not None:
        g = tl.load(w.global_scale + w_rows * w.stride_global)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGER else tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        places = start // 8 + tl.arange(0, BLOCK_K // 8)
        groups = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        if EVEN_K:
            left = tl.load(x_pointers + ks[None, :])  # (BLOCK_M, BLOCK_K)
            packed = tl.load(w_pointers + places[None, :])  # (BLOCK_N, BLOCK_K / 8)
            stored = tl.load(scale_pointers + groups[None, :])  # (BLOCK_N, BLOCK_K / GROUP)
        else:
            left = tl.load(x_pointers + ks[None, :], mask=(ks < K)[None, :], other=0.0)
            packed = tl.load(w_pointers + places[None, :], mask=(places < K // 8)[None, :], other=0)
            stored = tl.load(scale_pointers + groups[None, :], mask=(groups < K // GROUP)[None, :], other=0)
        m = eight_bit_multiplier(decode_scale(stored, SCALE) * g[:, None], inverse[:, None]) * word_unit(ELEMENT)
        code = unpack_words(packed, ELEMENT, BLOCK_N, BLOCK_K)
        if INTEGER:
            right = to_int8(code, m, GROUP, BLOCK_N, BLOCK_K)  # (BLOCK_N, BLOCK_K)
            acc = tl.dot(left, right.T, acc, out_dtype=tl.int32)
        else:
            right = to_fp8(code, m, GROUP, BLOCK_N, BLOCK_K)
            if ACC_SPLIT:
                acc = tl.dot(left, right.T, acc, max_num_imprecise_acc=ACC_SPLIT)
            else:
                acc = tl.dot(left, right.T, acc)
    value = acc.to(tl.float32) * tl.load(x_scale + rows, mask=rows < M, other=0.0)[:, None]
    value = value * step[None, :]
    finish(value, rows, columns, M, N, following)


@triton.jit
def eight_bit_multiplier(multiplier, inverse):
    """Return the factor that makes 8-bit codes of codes: so few bits that the product is exact; 0 for NaN."""
    m = (multiplier * inverse).to(tl.bfloat16).to(tl.float32)
    return tl.where(m == m, m, 0.0)


@triton.jit
def to_int8(code, m, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return RNE(code · m) as int8 (ROWS, COLUMNS): the last eight bits of its sum with a number that ends in 1."""
    blocks = tl.reshape(code, (ROWS, COLUMNS // GROUP, GROUP))
    factor = tl.broadcast_to(m[:, :, None], blocks.shape)
    total = tl.fma(blocks, factor, tl.full(blocks.shape, 1.5 * 2.0**23, tl.float32))
    return tl.reshape(total, (ROWS, COLUMNS)).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_fp8(code, m, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return RNE(code · m) as e4m3 (ROWS, COLUMNS).

    The product has at most 11 bits: a chip that converts by way of fp16 rounds only once, too.
    """
    return times_groups(code, m, GROUP, ROWS, COLUMNS).to(tl.float8e4nv)
