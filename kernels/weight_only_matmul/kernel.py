"""16-bit activations times stored weights of every format: weights are decoded in the main loop, x is not quantized.

    matmul    w16 = x's dtype(code · block scale)     v = float(x · w16^T) · what is left of the scales
    gemv      w = code · block scale, in fp32         v = sum(x · w) · what is left of the scales

The scale of a row or a tensor, or nvfp4's global scale, is applied to the sums in fp32. `matmul` needs the matrix
units' 16-bit form and nothing else, so it runs on every chip. Its w16 is exact but for int4 in bfloat16, which rounds
each weight by at most 2^-8 of itself (code and scale have 11 bits between them), and for mxfp8, mxfp4 and int4 in
float16, where weights beyond 65504 are infinite and those below 2^-14 lose bits, as they would in a float16 layer.

`gemv` is for a few tokens, where time is that of reading the weights: no matrix units, each weight decoded once and
multiplied in fp32 with each token.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import (
    EXACT,
    check_device,
    check_fit,
    check_same_device,
    check_stored,
    check_tensor,
    check_tile,
)
from fluxq.kernels.dequantize.kernel import (
    decode_scale,
    stored_arguments,
    times_groups,
    unpack_codes,
    unpack_words,
    word_unit,
)
from fluxq.kernels.epilogue import FLOATS, NOTHING, Epilogue, compare_product, finish, launch_product, product_cells
from fluxq.kernels.scaled_matmul.kernel import grouped_tile
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import MatmulTile, Tile, cdiv, find_tile, rows_are_at
from fluxq.kernels.weight_only_matmul.op import LARGEST_GEMV, OP

FUSED = {"enable_fp_fusion": True}  # gemv promises a bound, no bits: multiply-adds may round once


def weight_only_matmul(
    x: Tensor,
    w: QuantizedTensor,
    *,
    epilogue: Epilogue = NOTHING,
    tile: MatmulTile | Tile,
) -> Tensor:
    """Return x (M, K) times w (N, K) of any format: (M, N) of the epilogue's dtype.

    tile: a MatmulTile multiplies on matrix units and takes x in bfloat16 or float16. A Tile, of rows of w and columns
    of K, is the form for up to 16 tokens, which takes float32 too. Raises ValueError for operands that do not fit.
    """
    name = "weight_only_matmul"
    gemv = isinstance(tile, Tile)
    _check_operands(x, w, tile)
    (m, k), n = x.shape, w.shape[0]
    following = epilogue.following(name, m, n, x.device)
    check_device(name, x.device)
    arguments = stored_arguments(w, words=gemv) | {"x": x, "M": m, "N": n, "K": k}
    arguments |= {"TILE": tile, "num_warps": tile.warps}
    if gemv:
        weight_only_gemv_kernel[(cdiv(n, tile.rows),)](
            low_rank=following.low_rank,
            following=following._replace(low_rank=None),
            **arguments,
            BLOCK_M=triton.next_power_of_2(m),
            **FUSED,
        )
    else:
        weight_only_matmul_kernel[(cdiv(m, tile.m) * cdiv(n, tile.n),)](
            following=following,
            **arguments,
            EVEN_K=k % tile.k == 0,
            num_stages=tile.stages,
            **EXACT,
        )
    return following.y


def multiply(x: Tensor, w: QuantizedTensor, row_scale: None, epilogue: Epilogue, chip: str) -> Tensor:
    """Call `weight_only_matmul` with the tile that was tuned for the chip; float32 takes the exact one of one token.

    That form reads words of 4 bytes: where rows of codes are not at multiples of 4, few tokens take the form of many.
    """
    m = x.shape[0]
    if not rows_are_at(w.codes, 4):
        m = LARGEST_GEMV + 1
    elif x.dtype == torch.float32 and m <= LARGEST_GEMV:
        m = 1
    return weight_only_matmul(x, w, epilogue=epilogue, tile=find_tile(OP.file, w.format.name, chip, m))


launch = partial(launch_product, OP, in_16_bit=True)
cells = partial(product_cells, OP, in_16_bit=True)
compare = partial(compare_product, OP, in_16_bit=True)


def _check_operands(x: Tensor, w: QuantizedTensor, tile: MatmulTile | Tile) -> None:
    name = "weight_only_matmul"
    if x.ndim != 2:
        raise ValueError(f"{name}: x is {x.dtype} {(*x.shape,)}, expected (M, K)")
    m, k = x.shape
    check_fit(name, (m, k), w.shape)
    if isinstance(tile, Tile):
        check_tensor(f"{name}: x", x, (m, k), FLOATS, x.device)
        check_tile(name, tile, w.format)
        if m > LARGEST_GEMV:
            raise ValueError(f"{name}: a Tile is for up to {LARGEST_GEMV} tokens, x has {m}: give a MatmulTile")
        if k % 4:
            raise ValueError(f"{name}: with a Tile weights are read in words of 4 bytes, K is {k}: give a MatmulTile")
    else:
        if x.dtype == torch.float32:
            raise ValueError(f"{name}: x is float32, which matrix units would round: cast it to bfloat16 or float16")
        check_tensor(f"{name}: x", x, (m, k), FLOATS[:2], x.device)
        check_tile(name, Tile(tile.n, tile.k, tile.warps), w.format)
    check_stored(w, f"{name}: w")
    check_same_device(name, x, w.codes)


@triton.jit
def weight_only_matmul_kernel(
    x,  # (M, K) bf16 or fp16
    w,  # (N, K) as stored
    following,  # with y (M, N)
    M,
    N,
    K,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # 0 is the whole row
    EVEN_K: tl.constexpr,
    TILE: tl.constexpr,  # a MatmulTile
):
    """One (BLOCK_M, BLOCK_N) tile of (x · w16^T) · scales and what follows; reads x, codes and scales."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    PER_BYTE: tl.constexpr = 2 if ELEMENT == "e2m1" or ELEMENT == "int4" else 1
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), TILE.group_m)
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # Tiles over the edge read the last row again, which costs no mask; what they compute of it is not stored.
    w_rows = tl.minimum(columns, N - 1)
    x_pointers = x + tl.minimum(rows, M - 1)[:, None] * K
    w_pointers = w.codes + w_rows[:, None] * (K // PER_BYTE)
    scale_pointers = w.scale + w_rows[:, None] * w.stride_scale
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        places = start // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE)
        if EVEN_K:
            left = tl.load(x_pointers + ks[None, :])  # (BLOCK_M, BLOCK_K)
            stored = tl.load(w_pointers + places[None, :])  # (BLOCK_N, BLOCK_K / PER_BYTE)
        else:
            left = tl.load(x_pointers + ks[None, :], mask=(ks < K)[None, :], other=0.0)
            stored = tl.load(w_pointers + places[None, :], mask=(places < K // PER_BYTE)[None, :], other=0)
        right = unpack_codes(stored, ELEMENT, BLOCK_N, BLOCK_K)
        if GROUP:
            groups = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
            if EVEN_K:
                block_scale = tl.load(scale_pointers + groups[None, :])  # (BLOCK_N, BLOCK_K / GROUP)
            else:
                block_scale = tl.load(scale_pointers + groups[None, :], mask=(groups < K // GROUP)[None, :], other=0)
            right = times_groups(right, decode_scale(block_scale, SCALE), GROUP, BLOCK_N, BLOCK_K)
        acc = tl.dot(left, right.to(x.dtype.element_ty).T, acc)
    value = acc
    if GROUP == 0:
        value = value * tl.load(w.scale + w_rows * w.stride_scale)[None, :]
    if w.global_scale is not None:
        value = value * tl.load(w.global_scale + w_rows * w.stride_global)[None, :]
    finish(value, rows, columns, M, N, following)


@triton.jit
def weight_only_gemv_kernel(
    x,  # (M, K)
    w,  # (N, K) as stored, codes as words of four or eight
    low_rank,  # that of what follows, or None
    following,  # the rest of it, with y (M, N)
    M,
    N,
    K,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # 0 is the whole row
    BLOCK_M: tl.constexpr,  # at least M
    TILE: tl.constexpr,  # a Tile
):
    """All tokens of ROWS columns of y = sum(x · code · block scale) · scales; reads codes and scales once."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    PER_WORD: tl.constexpr = 8 if ELEMENT == "e2m1" or ELEMENT == "int4" else 4
    columns = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    w_rows = tl.minimum(columns, N - 1)  # tiles over the edge read the last row again
    acc = tl.zeros((BLOCK_M, ROWS), tl.float32)
    nans = tl.zeros((ROWS, COLUMNS // PER_WORD), tl.int32)
    for start in tl.range(0, K, COLUMNS, num_stages=3):
        places = start // PER_WORD + tl.arange(0, COLUMNS // PER_WORD)
        pointers = w.codes + w_rows[:, None] * (K // PER_WORD) + places[None, :]
        stored = tl.load(pointers, mask=(places < K // PER_WORD)[None, :], other=0)
        code = unpack_words(stored, ELEMENT, ROWS, COLUMNS)  # (ROWS, COLUMNS), in small units
        if ELEMENT == "e4m3":
            nans |= (stored & 0x7F7F7F7F) + 0x01010101  # carries into the top bit of bytes 0x7F and 0xFF
        ks = start + tl.arange(0, COLUMNS)
        if GROUP:
            groups = start // GROUP + tl.arange(0, COLUMNS // GROUP)
            pointers = w.scale + w_rows[:, None] * w.stride_scale + groups[None, :]
            block_scale = tl.load(pointers, mask=(groups < K // GROUP)[None, :], other=0)
            multiplier = decode_scale(block_scale, SCALE)
        for token in tl.static_range(BLOCK_M):
            x_row = x + tl.minimum(token, M - 1) * K  # tokens over the edge are the last one again, not stored
            values = tl.load(x_row + ks, mask=ks < K, other=0.0).to(tl.float32)
            products = code * values[None, :]
            if GROUP:
                # A scale multiplies the sum of its group: one multiplication, where each weight would have had one.
                sums = tl.sum(tl.reshape(products, (ROWS, COLUMNS // GROUP, GROUP)), 2)
                part = tl.sum(sums * multiplier, 1)
            else:
                part = tl.sum(products, 1)
            acc = add_to_token(acc, part, token, BLOCK_M)
    acc = acc * word_unit(ELEMENT)
    if ELEMENT == "e4m3":
        bad = tl.max(((nans & -0x7F7F7F80) != 0).to(tl.int32), 1)  # (ROWS,), of the bits 0x80808080
        acc = tl.where(bad[None, :] != 0, float("nan"), acc)
    if GROUP == 0:
        acc = acc * tl.load(w.scale + w_rows * w.stride_scale)[None, :]
    if w.global_scale is not None:
        acc = acc * tl.load(w.global_scale + w_rows * w.stride_global)[None, :]
    if low_rank is not None:
        h, up, R = low_rank.h, low_rank.up, low_rank.R
        ranks = tl.arange(0, low_rank.BLOCK_R)
        ups = tl.load(up + w_rows[:, None] * R + ranks[None, :], mask=(ranks < R)[None, :], other=0.0).to(tl.float32)
        for token in tl.static_range(BLOCK_M):
            downs = tl.load(h + tl.minimum(token, M - 1) * R + ranks, mask=ranks < R, other=0.0).to(tl.float32)
            acc = add_to_token(acc, tl.sum(ups * downs[None, :], 1), token, BLOCK_M)
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    finish(acc, rows, columns, M, N, following)


@triton.jit
def add_to_token(acc, part, token: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return acc (BLOCK_M, ROWS) with part (ROWS,) added to one token."""
    return acc + tl.where((tl.arange(0, BLOCK_M) == token)[:, None], part[None, :], 0.0)
