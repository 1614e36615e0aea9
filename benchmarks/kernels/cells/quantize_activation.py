"""Cells of `quantize_activation`."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles
from fluxq.kernels.checks import EXACT
from fluxq.kernels.quantize_activation.kernel import (
    activate_kernel,
    quantize_blocks_kernel,
    quantize_rows_kernel,
    tensor_amax_kernel,
    tile_name,
)
from fluxq.kernels.tiles import Tile
from fluxq.recipes.formats import FORMATS

_TYPES = {
    **dict.fromkeys(("x", "beside", "y", "down", "h"), "*bf16"),
    **dict.fromkeys(("smooth", "mean", "global_scale"), "*fp32"),
    **dict.fromkeys(("K", "D", "R", "stride_x", "stride_beside"), "i32:16"),
    **dict.fromkeys(("M", "stride_scale", "stride_global"), "i32"),
    "amax": "*i32",
}
_NO_DOWN = {"down": None, "h": None, "BLOCK_R": 1}
_PLAIN = {"beside": None, "smooth": None, "mean": None, "ACT": "", "HADAMARD": 0} | _NO_DOWN
_FUSED = {"beside": None, "ACT": "gelu_tanh", "HADAMARD": 7} | _NO_DOWN
_DOWN = {"beside": None, "ACT": "", "HADAMARD": 7, "BLOCK_R": 128}
_BESIDE = {"ACT": "silu_mul", "HADAMARD": 7} | _NO_DOWN
_BESIDE_DOWN = {"ACT": "silu_mul", "HADAMARD": 7, "BLOCK_R": 128}


def _row_cells(name: str, what: str = "", tiles: int = 1, **constants: Any) -> list[Cell]:
    """Rows of an 8-bit format, of so many tiles each."""
    row = FORMATS[name]
    types = {"codes": "*i8" if row.element.name == "int8" else "*u8", "scale": "*fp32"}
    fixed = {"ELEMENT": row.element.name, "LARGEST": row.element.max, "SCALE_GIVEN": False, "TILES": tiles}
    if row.block[0]:
        fixed |= {"amax": None, "stride_scale": 1}
    return _cells(quantize_rows_kernel, name, what, types, fixed | constants)


def _block_cells(name: str, what: str = "", **constants: Any) -> list[Cell]:
    """Blocks, of which nvfp4's are swizzled; constants: what differs from tiles that stand alone."""
    row = FORMATS[name]
    fixed = {"FORMAT": name, "GROUP": row.group_size, "TILES": 6, "SWIZZLED": row.two_level}
    fixed |= {"OWN_GLOBAL": False, "FOUR_OVER_SIX": False}
    if not row.two_level:
        fixed |= {"global_scale": None, "stride_global": 0}
    return _cells(quantize_blocks_kernel, name, what, {"codes": "*u8", "scale": "*u8"}, fixed | constants)


def _cells(kernel: Any, name: str, what: str, types: dict[str, str], constants: dict[str, Any]) -> list[Cell]:
    """A cell for each tile of kernels/tuned; `what` tells it from other cells of the format."""
    down, beside = constants.get("BLOCK_R", 1) > 1, "beside" in kernel.arg_names and "beside" not in constants
    tuned = name
    if name in FORMATS:
        tuned = tile_name(FORMATS[name], down, beside, constants.get("OWN_GLOBAL", False))
    constants = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    types = {argument: kind for argument, kind in (_TYPES | types).items() if argument in kernel.arg_names}
    return [
        Cell(
            kernel,
            tuned + what,
            {argument: kind for argument, kind in types.items() if argument not in constants},
            constants | {"ROWS": tile.rows, "COLUMNS": tile.columns},
            {"num_warps": tile.warps} | EXACT,
            max_registers=MAX_REGISTERS,
            tensor_core="bf16" if down else None,
            targets=chips,
        )
        for tile, chips in distinct_tiles("quantize_activation", tuned).items()
        if isinstance(tile, Tile)
    ]


CELLS = (
    *_row_cells("int8", **_PLAIN),
    *_row_cells("int8", " fused", 4, **_FUSED),
    *_row_cells("int8", "", 24, **_DOWN),
    *_row_cells("fp8", **_PLAIN),
    *_row_cells("fp8_tensor", "", 4, **_FUSED),
    *_cells(tensor_amax_kernel, "fp8_tensor", " amax", {}, _FUSED | {"TILES": 4}),
    *_block_cells("mxfp8", **_PLAIN),
    *_block_cells("mxfp4", **_FUSED),
    *_block_cells("nvfp4", **_PLAIN),
    *_block_cells("nvfp4", " fused", **_FUSED, FOUR_OVER_SIX=True),
    *_block_cells("nvfp4", "", **_FUSED, OWN_GLOBAL=True, FOUR_OVER_SIX=True, TILES=4),
    *_block_cells("nvfp4", "", **_DOWN, FOUR_OVER_SIX=True, TILES=24),
    *_block_cells("nvfp4", "", **_DOWN, OWN_GLOBAL=True, FOUR_OVER_SIX=True, TILES=24),
    *(cell for name in ("int8", "fp8", "fp8_tensor") for cell in _row_cells(name, "", 4, **_BESIDE)),
    *_cells(tensor_amax_kernel, "fp8_tensor", " amax", {}, _BESIDE | {"TILES": 4}),
    *(cell for name in ("mxfp8", "mxfp4") for cell in _block_cells(name, **_BESIDE, SWIZZLED=True)),
    *_block_cells("nvfp4", **_BESIDE, FOUR_OVER_SIX=True),
    *_block_cells("nvfp4", **_BESIDE, OWN_GLOBAL=True, FOUR_OVER_SIX=True, TILES=4),
    *_row_cells("int8", "", 120, **_BESIDE_DOWN),
    *_block_cells("nvfp4", **_BESIDE_DOWN, FOUR_OVER_SIX=True, TILES=120),
    *_block_cells("nvfp4", **_BESIDE_DOWN, OWN_GLOBAL=True, FOUR_OVER_SIX=True, TILES=120),
    *_cells(activate_kernel, "16bit", "", {}, {"ACT": "silu_mul"}),
)
