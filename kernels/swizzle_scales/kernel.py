"""Block scales in the order that Blackwell's matrix units read, byte for byte as kernels/tensor.py's `swizzle_scales`.

    flat[((t · W + w) · 32 + line) · 16 + quarter · 4 + group] = scale[128 t + 32 quarter + line, 4 w + group]

with W = ceil(G / 4), and 0 where there is no such scale: both axes are padded. What a tile of 128 rows writes is one
run of bytes, in order; it reads four scales of a row at a time.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import EXACT, as_bytes, check_device, check_tensor
from fluxq.kernels.dispatch import require
from fluxq.kernels.swizzle_scales.op import OP
from fluxq.kernels.tensor import check_block_scales, swizzled_size
from fluxq.kernels.tiles import Tile, cdiv, find_memory_tile

TILE_ROWS = 128  # of the layout


def swizzle_scales(scale: Tensor, *, tile: Tile) -> Tensor:
    """Return block scales (rows, G) of one byte each, flat in the 128x4 layout.

    tile: of 128 rows and a multiple of 4 columns. Raises ValueError for what does not fit.
    """
    check_block_scales(scale)
    if tile.rows != TILE_ROWS or tile.columns % 4:
        raise ValueError(
            f"swizzle_scales: the tile is {tile.rows}x{tile.columns}, expected {TILE_ROWS} rows and a multiple of 4 "
            "columns: scales lie in tiles of 128x4"
        )
    (rows, groups), size = scale.shape, swizzled_size(*scale.shape)
    check_tensor("swizzle_scales: scale", scale, (rows, groups), (scale.dtype,), scale.device)
    out = torch.empty(size, dtype=scale.dtype, device=scale.device)
    check_device("swizzle_scales", scale.device)
    grid = (cdiv(rows, TILE_ROWS), cdiv(groups, tile.columns))
    swizzle_scales_kernel[grid](
        as_bytes(scale), as_bytes(out), rows, groups, COLUMNS=tile.columns, num_warps=tile.warps, **EXACT
    )
    return out


def launch(scale: Tensor, *, chip: str) -> Tensor:
    """Launch the op on a chip; ValueError where it has no kernel."""
    require(OP.name, "8bit", chip)
    return swizzle_scales(scale, tile=find_memory_tile(OP.file, "8bit", chip, scale.shape[0]))


@triton.jit
def swizzle_scales_kernel(
    scale,  # (N, G) bytes
    flat,  # (ceil(N / 128) * ceil(G / 4) * 512,) bytes
    N,
    G,
    COLUMNS: tl.constexpr,
):
    """flat = scale in tiles of 128x4, padded with 0. Reads every scale once, writes every byte of flat once."""
    place = tl.arange(0, 128 * COLUMNS)  # in the output of this program
    rows = tl.program_id(0).to(tl.int64) * 128 + place // 4 % 4 * 32 + place // 16 % 32
    wide = tl.program_id(1) * (COLUMNS // 4) + place // 512  # tile of 4 groups
    groups = wide * 4 + place % 4
    value = tl.load(scale + rows * G + groups, mask=(rows < N) & (groups < G), other=0)
    W = tl.cdiv(G, 4)
    tiles = tl.program_id(0).to(tl.int64) * W + wide
    tl.store(flat + tiles * 512 + place % 512, value, mask=wide < W)
