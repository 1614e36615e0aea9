"""Cells of `reencode`."""

from __future__ import annotations

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles, stored_arguments
from fluxq.kernels.checks import EXACT
from fluxq.kernels.reencode.kernel import reencode_kernel
from fluxq.kernels.reencode.op import TARGETS
from fluxq.kernels.tiles import Tile
from fluxq.recipes.formats import FORMATS


def _cell(pair: str, tile: Tile, chips: tuple[str, ...]) -> Cell:
    """ "nvfp4-int8": weights in nvfp4 to int8 rows."""
    source, target = (FORMATS[name] for name in pair.split("-"))
    arguments, constants = stored_arguments(source)
    arguments |= {"row_codes": "*i8" if target.name == "int8" else "*u8", "row_scale": "*fp32"}
    constants |= {"TARGET": target.element.name, "LARGEST": target.element.max}
    return Cell(
        reencode_kernel,
        pair,
        arguments | {"N": "i32", "K": "i32:16"},
        constants | {"TILES": 6, "ROWS": tile.rows, "COLUMNS": tile.columns},
        {"num_warps": tile.warps} | EXACT,
        max_registers=MAX_REGISTERS,
        targets=chips,
    )


CELLS = tuple(
    _cell(f"{source}-{target}", tile, chips)
    for source in ("fp8", "mxfp8", "mxfp4", "nvfp4", "int4")
    for target in TARGETS
    for tile, chips in distinct_tiles("reencode", f"{source}-{target}").items()
)
