"""Cells of `dequantize`."""

from __future__ import annotations

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles, stored_arguments
from fluxq.kernels.checks import EXACT
from fluxq.kernels.dequantize.kernel import dequantize_kernel
from fluxq.kernels.tiles import Tile
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS, Format


def _cell(format: Format, tile: Tile, chips: tuple[str, ...]) -> Cell:
    """Weights in `format` to bfloat16."""
    arguments, constants = stored_arguments(format)
    return Cell(
        dequantize_kernel,
        format.name,
        arguments | {"y": "*bf16", "N": "i32", "K": "i32:16"},
        constants | {"ROWS": tile.rows, "COLUMNS": tile.columns},
        {"num_warps": tile.warps} | EXACT,
        max_registers=MAX_REGISTERS,
        targets=chips,
    )


CELLS = tuple(
    _cell(FORMATS[name], tile, chips)
    for name in KERNEL_FORMATS
    for tile, chips in distinct_tiles("dequantize", name).items()
)
