"""Cells of `input_gradient`."""

from __future__ import annotations

from benchmarks.kernels.cells.cell import Cell, distinct_tiles, stored_arguments
from fluxq.kernels.checks import EXACT
from fluxq.kernels.input_gradient.kernel import input_gradient_kernel
from fluxq.kernels.input_gradient.op import OP
from fluxq.kernels.tiles import MatmulTile
from fluxq.recipes.formats import Format, find_format


def _cell(format: Format, tile: MatmulTile, chips: tuple[str, ...]) -> Cell:
    """bf16 gradients of weights in `format`, of which nvfp4 has one global scale."""
    stored, constants = stored_arguments(format)
    rows = {"SCALE_OF_ROW": format.block[0] != 0, "GLOBAL_OF_ROW": False}
    return Cell(
        input_gradient_kernel,
        f"{format.name} {tile.m}x{tile.n}x{tile.k}",
        {"grad": "*bf16", "out": "*bf16", "M": "i32", "N": "i32:16", "K": "i32:16"} | stored,
        constants | rows | {"EVEN": True, "TILE": tile},
        {"num_warps": tile.warps, "num_stages": tile.stages} | EXACT,
        tensor_core="bf16",
        targets=chips,
    )


CELLS = tuple(
    _cell(find_format(name), tile, chips)
    for name in OP.formats
    for tile, chips in distinct_tiles(OP.file, name).items()
)
