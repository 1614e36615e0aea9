"""nvfp4, mxfp8 and mxfp4 codes with their block scales, multiplied by the matrix units that know both.

    v = Σ (xq · x_scale) (wq · w_scale)                   over K, in fp32, by the matrix unit
    v = (v · x_scale_2) · w_scale_2                       nvfp4: the global scales

The epilogue is in kernels/epilogue.py. Only for chips whose matrix units take block scales: Blackwell, and AMD's CDNA 4
for the two mx formats; elsewhere the compiler would decode to 16 bits first. The torch reference decodes both matrices:
products of codes and scales are exact in both, sums differ in order.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

import dataclasses
from functools import partial

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fluxq.kernels.block_scaled_matmul.op import OP
from fluxq.kernels.checks import EXACT, check_codes, check_device, check_fit, check_tensor
from fluxq.kernels.epilogue import NOTHING, Epilogue, compare_product, launch_product, product_cells
from fluxq.kernels.scaled_matmul.kernel import check_copyable, finish_tile, grouped_tile
from fluxq.kernels.tensor import QuantizedTensor, swizzled_size
from fluxq.kernels.tiles import MatmulTile, cdiv, find_matmul_tile
from fluxq.recipes.formats import Format


def block_scaled_matmul(
    x: QuantizedTensor,
    w: QuantizedTensor,
    *,
    epilogue: Epilogue = NOTHING,
    tile: MatmulTile,
) -> Tensor:
    """Return x (M, K) times w (N, K), both nvfp4, mxfp8 or mxfp4: (M, N) of the epilogue's dtype.

    Block scales of both are (rows, G), or of both flat in the 128x4 layout, as `swizzle_scales` makes it; the tile's m
    and n are then multiples of 128, and its k of 4 groups. Global scales are (), that of x also (M, 1). Raises
    ValueError for operands that do not fit.
    """
    (m, k), n, device, row = x.shape, w.shape[0], x.codes.device, x.format
    swizzled = x.scale.ndim == 1
    _check_operands(x, w, swizzled)
    _check_tile(tile, x.format, swizzled)
    following = epilogue.following("block_scaled_matmul", m, n, device)
    left, right = x.codes, w.codes
    if tile.descriptors:
        check_copyable("block_scaled_matmul", x=left, w=right)
        columns = tile.k * row.element.bits // 8
        left = TensorDescriptor.from_tensor(left, [tile.m, columns])
        right = TensorDescriptor.from_tensor(right, [tile.n, columns])
    check_device("block_scaled_matmul", device)
    grid = (cdiv(m, tile.m) * cdiv(n, tile.n),)
    block_scaled_matmul_kernel[grid](
        left,
        right,
        x.scale,
        w.scale,
        x.global_scale,
        w.global_scale,
        following,
        M=m,
        N=n,
        K=k,
        stride_x_scale_2=0 if x.global_scale is None else min(x.global_scale.ndim, 1),
        ELEMENT=row.element.name,
        GROUP=row.group_size,
        SWIZZLED=swizzled,
        EVEN_K=k % tile.k == 0,
        TILE=tile,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    return following.y


def multiply(x: QuantizedTensor, w: QuantizedTensor, row_scale: None, epilogue: Epilogue, chip: str) -> Tensor:
    """Call `block_scaled_matmul` with the tile that was tuned for the chip."""
    tile = find_matmul_tile(OP.file, x.format.name, chip, x.shape[0], w.codes)
    return block_scaled_matmul(x, w, epilogue=epilogue, tile=tile)


launch = partial(launch_product, OP)
cells = partial(product_cells, OP)
compare = partial(compare_product, OP)


def _check_operands(x: QuantizedTensor, w: QuantizedTensor, swizzled: bool) -> None:
    name = "block_scaled_matmul"
    if x.format != w.format or x.format.name not in OP.formats:
        raise ValueError(
            f"{name}: x is {x.format.name} and w {w.format.name}, expected both to be one of {', '.join(OP.formats)}; "
            "re-encode the weight, or dequantize both"
        )
    if swizzled != (w.scale.ndim == 1):
        raise ValueError(f"{name}: scales of x are {x.scale.ndim}-D and of w {w.scale.ndim}-D: swizzle both or neither")
    check_fit(name, x.shape, w.shape)
    if swizzled:
        x, w = (_with_plain_scale(f"{name}: {part}", q) for part, q in (("x", x), ("w", w)))
    check_codes(name, x, w)


def _with_plain_scale(name: str, q: QuantizedTensor) -> QuantizedTensor:
    """Return q with scales (rows, G), to be checked; ValueError unless q's own can be swizzled ones."""
    rows, groups = q.shape[0], q.shape[1] // q.format.group_size
    check_tensor(f"{name}: weight_scale", q.scale, (swizzled_size(rows, groups),), (q.scale.dtype,), q.codes.device)
    return dataclasses.replace(q, scale=q.scale.new_empty(rows, groups))


def _check_tile(tile: MatmulTile, format: Format, swizzled: bool) -> None:
    name, unit = "block_scaled_matmul", format.group_size * (4 if swizzled else 1)
    if tile.k % unit:
        raise ValueError(f"{name}: tile.k is {tile.k}, expected a multiple of {unit}")
    if swizzled and (tile.m % 128 or tile.n % 128):
        raise ValueError(
            f"{name}: the tile is {tile.m}x{tile.n}, expected multiples of 128 for swizzled scales, which lie in "
            "tiles of 128 rows: unswizzle them, or take a larger tile"
        )


@triton.jit
def block_scaled_matmul_kernel(
    x,  # (M, K) fp8, (M, K/2) with two codes to a byte, or a descriptor of it in blocks of the tile
    w,  # (N, K) or (N, K/2), as x
    x_scale,  # (M, G), or the 128x4 layout
    w_scale,  # (N, G), or the 128x4 layout
    x_scale_2,  # (M, 1) or () fp32, None for one-level formats
    w_scale_2,  # () fp32, or None
    following,  # with y (M, N)
    M,
    N,
    K,
    stride_x_scale_2,  # 1, or 0 where rows share it
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    SWIZZLED: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE: tl.constexpr,  # a MatmulTile
):
    """One (BLOCK_M, BLOCK_N) tile of y = residual + gate · gelu(x · w^T · x_scale_2 · w_scale_2 + bias + h · up^T)."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    PER_BYTE: tl.constexpr = 2 if ELEMENT == "e2m1" else 1
    COLUMNS: tl.constexpr = BLOCK_K // PER_BYTE  # of codes as stored
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), TILE.group_m)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if TILE.descriptors:
            left = x.load([tile_m * BLOCK_M, start // PER_BYTE])
            right = w.load([tile_n * BLOCK_N, start // PER_BYTE])
        else:
            left = load_codes(x, tile_m, start // PER_BYTE, M, K // PER_BYTE, EVEN_K, BLOCK_M, COLUMNS)
            right = load_codes(w, tile_n, start // PER_BYTE, N, K // PER_BYTE, EVEN_K, BLOCK_N, COLUMNS)
        scale_x = load_scales(x_scale, tile_m, start // GROUP, M, K // GROUP, SWIZZLED, EVEN_K, BLOCK_M, GROUPS)
        scale_w = load_scales(w_scale, tile_n, start // GROUP, N, K // GROUP, SWIZZLED, EVEN_K, BLOCK_N, GROUPS)
        acc = tl.dot_scaled(left, scale_x, ELEMENT, right.T, scale_w, ELEMENT, acc)
    finish_tile(acc, tile_m, tile_n, M, N, x_scale_2, w_scale_2, stride_x_scale_2, 0, following, TILE)


@triton.jit
def load_codes(
    codes, tile, start, ROWS_ALL, COLUMNS_ALL, EVEN_K: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load (BLOCK, COLUMNS) of stored codes; past the last row that row again, past the last column zeros."""
    rows = tl.minimum((tile * BLOCK + tl.arange(0, BLOCK)).to(tl.int64), ROWS_ALL - 1)
    columns = start + tl.arange(0, COLUMNS)
    places = codes + rows[:, None] * COLUMNS_ALL + columns[None, :]
    if EVEN_K:
        return tl.load(places)
    else:
        return tl.load(places, mask=(columns < COLUMNS_ALL)[None, :], other=0.0)


@triton.jit
def load_scales(
    scale,
    tile,
    start,
    ROWS_ALL,
    G,
    SWIZZLED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Load (BLOCK, GROUPS) block scales; past the last row any of them, past the last group zeros."""
    if SWIZZLED:
        # Each 128 rows and 4 groups are 512 adjacent bytes: 32 lines of 4 quarters of 4 groups.
        lines = tl.arange(0, GROUPS // 4 * 512)
        tiles = (tile * (BLOCK // 128) + tl.arange(0, BLOCK // 128)).to(tl.int64)
        tiles = tl.minimum(tiles, (ROWS_ALL - 1) // 128)
        places = scale + tiles[:, None] * (tl.cdiv(G, 4) * 512) + (start // 4 * 512 + lines)[None, :]
        if EVEN_K:
            stored = tl.load(places)
        else:
            groups = start + lines // 512 * 4 + lines % 4
            stored = tl.load(places, mask=(groups < G)[None, :], other=0.0)
        blocks = tl.reshape(stored, (BLOCK // 128, GROUPS // 4, 32, 4, 4))
        return tl.reshape(tl.permute(blocks, (0, 3, 2, 1, 4)), (BLOCK, GROUPS))
    else:
        return load_codes(scale, tile, start, ROWS_ALL, G, EVEN_K, BLOCK, GROUPS)
