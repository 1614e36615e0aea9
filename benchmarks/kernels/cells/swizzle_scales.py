"""Cells of `swizzle_scales`."""

from __future__ import annotations

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles
from fluxq.kernels.checks import EXACT
from fluxq.kernels.swizzle_scales.kernel import swizzle_scales_kernel
from fluxq.kernels.tiles import Tile


def _cell(tile: Tile, chips: tuple[str, ...]) -> Cell:
    return Cell(
        swizzle_scales_kernel,
        "8bit",
        {"scale": "*u8", "flat": "*u8", "N": "i32", "G": "i32"},
        {"COLUMNS": tile.columns},
        {"num_warps": tile.warps} | EXACT,
        max_registers=MAX_REGISTERS,
        targets=chips,
    )


CELLS = tuple(_cell(tile, chips) for tile, chips in distinct_tiles("swizzle_scales", "8bit").items())
