"""int8 and fp8 codes multiplied on the GPU's matrix units, with scales, bias and what follows in one pass.

    v = (float(xq · wq^T) · x_scale) · w_scale            int8 accumulates in int32, exactly; fp8 in fp32
    v = (Σ_b xq_b · wq_b^T · x_scale_b) · w_scale         x in fp8_1x128, of 128 columns b each

With a bias this is the reference in kernels/ops.py, operation by operation; for int8 the result is its bits.
The epilogue is in kernels/epilogue.py.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fluxq.kernels.checks import EXACT, check_codes, check_device
from fluxq.kernels.epilogue import (
    NOTHING,
    Epilogue,
    compare_product,
    finish,
    gate_in_place,
    launch_product,
    product_cells,
)
from fluxq.kernels.scaled_matmul.op import OP
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import MatmulTile, cdiv, find_matmul_tile


def scaled_matmul(
    x: QuantizedTensor,
    w: QuantizedTensor,
    *,
    epilogue: Epilogue = NOTHING,
    tile: MatmulTile,
) -> Tensor:
    """Return x (M, K) times w (N, K), both int8 or both fp8: (M, N) of the epilogue's dtype.

    Scales are one for each row or, for fp8, () for all; x in fp8_1x128 has (M, K/128). Raises ValueError for operands
    that do not fit.
    """
    (m, k), n, device = x.shape, w.shape[0], x.codes.device
    _check_operands(x, w)
    if tile.unit_scales and (x.format.name == "int8" or tile.k % 32):
        raise ValueError(
            f"scaled_matmul: tile.unit_scales is for fp8 and k in multiples of 32, not for {x.format.name} at "
            f"{tile.k}: take a tile without"
        )
    if tile.acc_split and max(tile.acc_split, tile.k) % min(tile.acc_split, tile.k):
        raise ValueError(
            f"scaled_matmul: tile.acc_split is {tile.acc_split}, expected a divisor or a multiple of k = {tile.k}"
        )
    group = x.format.group_size
    if group and (group % tile.k or tile.acc_split):
        raise ValueError(
            f"scaled_matmul: tile.k is {tile.k} and acc_split {tile.acc_split}, expected a divisor of the "
            f"{group} columns that share a scale of {x.format.name}, and 0: sums move to fp32 with each scale"
        )
    following = epilogue.following("scaled_matmul", m, n, device)
    if tile.descriptors:
        check_copyable("scaled_matmul", x=x.codes, w=w.codes)
    check_device("scaled_matmul", device)
    is_integer = x.codes.dtype == torch.int8
    arguments = {"x_scale": x.scale, "w_scale": w.scale, "following": following, "M": m, "N": n, "K": k}
    arguments |= {"stride_x_scale": min(x.scale.ndim, 1), "stride_w_scale": min(w.scale.ndim, 1)}
    arguments |= {
        "INTEGER": is_integer,
        "GROUP": group,
        "TILE": tile,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    } | EXACT
    arguments["ACC_SPLIT"] = 0 if is_integer else tile.acc_split if tile.descriptors else min(tile.acc_split, tile.k)
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    if tile.descriptors:
        left = TensorDescriptor.from_tensor(x.codes, [tile.m, tile.k])
        right = TensorDescriptor.from_tensor(w.codes, [tile.n, tile.k])
        grid = (min(tiles, processors(device)),)
        scaled_matmul_descriptors_kernel[grid](left, right, **arguments)
    else:
        scaled_matmul_kernel[tiles,](x.codes, w.codes, **arguments, EVEN_K=k % tile.k == 0)
    return following.y


def multiply(x: QuantizedTensor, w: QuantizedTensor, row_scale: None, epilogue: Epilogue, chip: str) -> Tensor:
    """Call `scaled_matmul` with the tile that was tuned for the chip.

    Gate and residual take a pass of their own behind a tile that leaves no registers for them.
    """
    formats = x.format.name if x.format == w.format else f"{w.format.name}-{x.format.name}"
    find = partial(find_matmul_tile, OP.file, formats, chip, x.shape[0], w.codes)
    tile, plain = find(), find(plain=True)
    if tile == plain or not epilogue.is_rounded_first:
        return scaled_matmul(x, w, epilogue=epilogue, tile=tile)
    y = scaled_matmul(x, w, epilogue=replace(epilogue, gate=None, residual=None), tile=plain)
    return gate_in_place(y, epilogue)


launch = partial(launch_product, OP)
cells = partial(product_cells, OP)
compare = partial(compare_product, OP)


def check_copyable(name: str, **codes: Tensor) -> None:
    """Raise ValueError unless the copy engine can fetch tiles of these matrices."""
    for part, tensor in codes.items():
        size = tensor.shape[1] * tensor.element_size()
        if size % 16 or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name}: {part} has rows of {size} bytes at address {tensor.data_ptr() % 16} modulo 16, expected "
                "multiples of 16: take a tile without descriptors"
            )


def processors(device: torch.device) -> int:
    """Count the programs that stay: one for each multiprocessor; 2 on the interpreter, each for several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _check_operands(x: QuantizedTensor, w: QuantizedTensor) -> None:
    name = "scaled_matmul"
    both = {x.format.name, w.format.name}
    in_blocks = (x.format.name, w.format.name) == ("fp8_1x128", "fp8")
    if both != {"int8"} and not both <= {"fp8", "fp8_tensor"} and not in_blocks:
        raise ValueError(
            f"{name}: x is {x.format.name} and w {w.format.name}, expected both int8 or both fp8, w without blocks; "
            "re-encode the weight, or dequantize both"
        )
    check_codes(name, x, w)


@triton.jit
def scaled_matmul_kernel(
    x,  # (M, K) int8 or fp8
    w,  # (N, K)
    x_scale,  # (M,), () or, with GROUP, (M, K / GROUP) fp32
    w_scale,  # (N,) or () fp32
    following,  # with y (M, N)
    M,
    N,
    K,
    stride_x_scale,  # 1, or 0 where rows share a scale
    stride_w_scale,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale of x, or 0
    EVEN_K: tl.constexpr,
    ACC_SPLIT: tl.constexpr,
    TILE: tl.constexpr,  # a MatmulTile
):
    """One (BLOCK_M, BLOCK_N) tile of y = residual + gate · gelu((x · w^T) · x_scale · w_scale + bias + h · up^T)."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), TILE.group_m)
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # Tiles over the edge read the last row again, which costs no mask; what they compute of it is not stored.
    x_rows = x + tl.minimum(rows, M - 1)[:, None] * K
    w_rows = w + tl.minimum(columns, N - 1)[:, None] * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGER else tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            left = tl.load(x_rows + ks[None, :])  # (BLOCK_M, BLOCK_K)
            right = tl.load(w_rows + ks[None, :])  # (BLOCK_N, BLOCK_K)
        else:
            left = tl.load(x_rows + ks[None, :], mask=(ks < K)[None, :], other=0.0)
            right = tl.load(w_rows + ks[None, :], mask=(ks < K)[None, :], other=0.0)
        if GROUP:
            step = load_step(x_scale, rows, start, M, K, GROUP)
            acc = add_scaled_product(acc, left, right, step, TILE.unit_scales, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            acc = add_product(acc, left, right, INTEGER, ACC_SPLIT, TILE.unit_scales, BLOCK_M, BLOCK_N, BLOCK_K)
    finish_tile(
        acc, tile_m, tile_n, M, N, None if GROUP else x_scale, w_scale, stride_x_scale, stride_w_scale, following, TILE
    )


@triton.jit
def scaled_matmul_descriptors_kernel(
    x,  # descriptor of (M, K) int8 or fp8, in blocks of (BLOCK_M, BLOCK_K)
    w,  # descriptor of (N, K), in blocks of (BLOCK_N, BLOCK_K)
    x_scale,  # (M,), () or, with GROUP, (M, K / GROUP) fp32
    w_scale,  # (N,) or () fp32
    following,  # with y (M, N)
    M,
    N,
    K,
    stride_x_scale,
    stride_w_scale,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    ACC_SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """As scaled_matmul_kernel, for tiles that are num_programs apart; what lies past an edge is read as zeros.

    Sums that move to fp32 after several steps have a loop of their own, in which one product is under way while the
    next begins. On Hopper ptxas would serialize fp8 products in a loop that what follows is flattened into.
    """
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    FLATTEN: tl.constexpr = INTEGER or tl.target_info.cuda_capability_geq(10, 0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, TILE.group_m)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGER else tl.float32)
        if GROUP:
            rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
            for start in range(0, K, BLOCK_K):
                left = x.load([tile_m * BLOCK_M, start])
                right = w.load([tile_n * BLOCK_N, start])
                step = load_step(x_scale, rows, start, M, K, GROUP)
                acc = add_scaled_product(acc, left, right, step, TILE.unit_scales, BLOCK_M, BLOCK_N, BLOCK_K)
        elif ACC_SPLIT > BLOCK_K:
            for first in range(0, K, ACC_SPLIT):
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for start in range(first, first + ACC_SPLIT, BLOCK_K):
                    left = x.load([tile_m * BLOCK_M, start])
                    right = w.load([tile_n * BLOCK_N, start])
                    part = add_product(part, left, right, INTEGER, 0, TILE.unit_scales, BLOCK_M, BLOCK_N, BLOCK_K)
                acc += part
        else:
            for start in range(0, K, BLOCK_K):
                left = x.load([tile_m * BLOCK_M, start])
                right = w.load([tile_n * BLOCK_N, start])
                acc = add_product(acc, left, right, INTEGER, ACC_SPLIT, TILE.unit_scales, BLOCK_M, BLOCK_N, BLOCK_K)
        finish_tile(
            acc, tile_m, tile_n, M, N, None if GROUP else x_scale, w_scale, stride_x_scale, stride_w_scale, following,
            TILE,
        )  # fmt: skip


@triton.jit
def add_product(
    acc,  # (BLOCK_M, BLOCK_N)
    left,  # (BLOCK_M, BLOCK_K)
    right,  # (BLOCK_N, BLOCK_K)
    INTEGER: tl.constexpr,
    ACC_SPLIT: tl.constexpr,
    UNIT_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return acc + left · right^T."""
    if INTEGER:
        return tl.dot(left, right.T, acc, out_dtype=tl.int32)
    elif UNIT_SCALES:
        left_ones = tl.full((BLOCK_M, BLOCK_K // 32), 127, tl.uint8)  # E8M0 bytes
        right_ones = tl.full((BLOCK_N, BLOCK_K // 32), 127, tl.uint8)
        return tl.dot_scaled(left, left_ones, "e4m3", right.T, right_ones, "e4m3", acc)
    elif ACC_SPLIT:
        return tl.dot(left, right.T, acc, max_num_imprecise_acc=ACC_SPLIT)
    else:
        return tl.dot(left, right.T, acc)


@triton.jit
def load_step(x_scale, rows, start, M, K, GROUP: tl.constexpr):
    """Load the scales (BLOCK_M,) of `rows` for the columns from `start` on."""
    return tl.load(x_scale + rows * (K // GROUP) + start // GROUP, mask=rows < M, other=0.0)


@triton.jit
def add_scaled_product(
    acc,  # (BLOCK_M, BLOCK_N) fp32
    left,  # (BLOCK_M, BLOCK_K)
    right,  # (BLOCK_N, BLOCK_K)
    step,  # (BLOCK_M,) fp32
    UNIT_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return acc + (left · right^T) · step: one multiply-add moves a matrix unit's sums to fp32 and scales them."""
    part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    part = add_product(part, left, right, False, 0, UNIT_SCALES, BLOCK_M, BLOCK_N, BLOCK_K)
    return tl.fma(part, step[:, None], acc)


@triton.jit
def finish_tile(
    acc, tile_m, tile_n, M, N, x_scale, w_scale, stride_x_scale, stride_w_scale, following, TILE: tl.constexpr
):
    """Scale sums (BLOCK_M, BLOCK_N), where there are scales, and finish them, with halves first the left columns."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    HALVES: tl.constexpr = TILE.halves
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    PARTS: tl.constexpr = 2 if HALVES else 1
    parts = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))) if HALVES else (acc,)
    for part in tl.static_range(PARTS):
        columns = (tile_n * BLOCK_N + part * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)).to(tl.int64)
        value = parts[part].to(tl.float32)
        if x_scale is not None:
            value = value * tl.load(x_scale + rows * stride_x_scale, mask=rows < M, other=0.0)[:, None]
        if w_scale is not None:
            value = value * tl.load(w_scale + columns * stride_w_scale, mask=columns < N, other=0.0)[None, :]
        finish(value, rows, columns, M, N, following)


@triton.jit
def grouped_tile(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (tile_m, tile_n) of a program: down GROUP_M tiles of rows, then on to the next tile of columns."""
    in_group = GROUP_M * tiles_n
    first = program // in_group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + program % in_group % height, program % in_group // height
