"""Cells of `quantize_activation`.

Whole rows are the launches of a step of FLUX.1 and Qwen-Image (3072 columns, 12288 after GELU, 15360 beside attention),
Wan 2.2 (5120 and 13824) and SD3.5 (1536).
"""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles
from fluxq.kernels.checks import EXACT
from fluxq.kernels.codes import levels_of
from fluxq.kernels.quantize_activation.kernel import (
    Beside,
    Coded,
    Down,
    Source,
    activate_kernel,
    quantize_blocks_kernel,
    quantize_rows_kernel,
    tensor_amax_kernel,
    tile_name,
)
from fluxq.kernels.tiles import CHIPS, Tile, cdiv, is_held, whole_row_tile
from fluxq.recipes.formats import FORMATS

_TYPES = {
    **dict.fromkeys(("x", "beside", "y", "down", "h"), "*bf16"),
    **dict.fromkeys(("smooth", "mean", "global_scale"), "*fp32"),
    **dict.fromkeys(("M", "K", "D", "R", "stride_x", "stride_beside"), "i32:16"),
    "stride": "i32",
    "amax": "*i32",
}
_NO_DOWN: dict[str, Any] = {"down": None}
_PLAIN: dict[str, Any] = {"beside": None, "smooth": None, "mean": None, "ACT": "", "HADAMARD": 0} | _NO_DOWN
_GELU = _PLAIN | {"ACT": "gelu_tanh"}
_FUSED: dict[str, Any] = {"beside": None, "ACT": "gelu_tanh", "HADAMARD": 7} | _NO_DOWN
_DOWN: dict[str, Any] = {"beside": None, "ACT": "", "HADAMARD": 7, "BLOCK_R": 128}
_BESIDE: dict[str, Any] = {"ACT": "silu_mul", "HADAMARD": 7} | _NO_DOWN
_BESIDE_PLAIN: dict[str, Any] = {"smooth": None, "mean": None, "ACT": "gelu_tanh", "HADAMARD": 0} | _NO_DOWN
_ROWS = ((3072, " plain", _PLAIN), (12288, " gelu", _GELU), (15360, " gelu", _BESIDE_PLAIN))
_OTHER_ROWS = ((1536, " plain", _PLAIN), (5120, " plain", _PLAIN), (13824, " gelu", _GELU), (12288, " fused", _FUSED))
_OTHER_ROWS = (*_OTHER_ROWS, (15360, " fused", _BESIDE))
_REGULAR = _PLAIN | {"HADAMARD": levels_of(256, True)}
_BESIDE_DOWN: dict[str, Any] = {"ACT": "silu_mul", "HADAMARD": 7, "BLOCK_R": 128}


def _row_cells(name: str, what: str = "", tiles: int = 1, k: int = 0, **constants: Any) -> list[Cell]:
    """Rows of an 8-bit format: whole ones of k, or so many tiles of the tuned ones."""
    row = FORMATS[name]
    types = {"codes": "*i8" if row.element.name == "int8" else "*u8", "scale": "*fp32"}
    fixed: dict[str, Any] = {
        "ELEMENT": row.element.name,
        "LARGEST": row.element.max,
        "SCALE_GIVEN": False,
        "TILES": tiles,
    }
    fixed["global_scale"] = None
    if row.block[0]:
        fixed |= {"amax": None, "stride": 1}
    return _cells(quantize_rows_kernel, name, what, types, fixed | constants, k)


def _block_cells(name: str, what: str = "", k: int = 0, **constants: Any) -> list[Cell]:
    """Blocks, of which nvfp4's are swizzled; k, constants: what differs from tiles that stand alone."""
    row = FORMATS[name]
    fixed: dict[str, Any] = {"FORMAT": name, "GROUP": row.group_size, "TILES": 6, "SWIZZLED": row.two_level}
    fixed |= {"OWN_GLOBAL": False, "FOUR_OVER_SIX": False}
    if not row.two_level:
        fixed |= {"global_scale": None, "stride": None}
    types = {"codes": "*u8", "scale": "*fp32" if row.scale == "fp32" else "*u8"}
    return _cells(quantize_blocks_kernel, name, what, types, fixed | constants, k)


def _cells(
    kernel: Any, name: str, what: str, types: dict[str, str], constants: dict[str, Any], k: int = 0
) -> list[Cell]:
    """A cell of whole rows of k, or for each tile of kernels/tuned; `what` tells it from other cells of the format."""
    down, beside = "down" not in constants, "beside" not in constants
    own_global, hadamard = constants.get("OWN_GLOBAL", False), constants.get("HADAMARD", 0)
    held = False
    if k:
        many = bool(hadamard or constants.get("GROUP"))
        tile_of = {chip: whole_row_tile(k, chip, many=many) for chip in CHIPS}
        tiles = {tile: tuple(c for c in CHIPS if tile_of[c] == tile) for tile in tile_of.values()}
        (columns,) = {tile.columns for tile in tiles}
        constants |= {"TILES": cdiv(k, columns)}
        of_row = own_global or ("amax" in constants and not constants.get("SCALE_GIVEN"))
        held = of_row and is_held(constants["TILES"] * columns, many)
    else:
        tuned = tile_name(FORMATS[name], hadamard, down, beside, own_global) if name in FORMATS else name
        tiles = distinct_tiles("quantize_activation", tuned)
    loops = own_global or kernel in (quantize_rows_kernel, tensor_amax_kernel)
    arguments = _arguments(_TYPES | types | constants)
    taken = {name: value for name, value in (arguments | constants).items() if name in kernel.arg_names}
    return [
        Cell(
            kernel,
            "down " * down + name + "-beside" * beside + what + " own global" * own_global,
            {name: kind for name, kind in taken.items() if name in arguments and kind is not None},
            {name: value for name, value in taken.items() if name not in arguments or value is None} | {"TILE": tile},
            {"num_warps": tile.warps} | EXACT,
            max_registers=MAX_REGISTERS,
            tensor_core="bf16" if down else None,
            elements=k if held else (0 if down else tile.rows * tile.columns),
            turns=constants["TILES"] if loops and not held else 1,
            targets=chips,
        )
        for tile, chips in tiles.items()
        if isinstance(tile, Tile)
    ]


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a kernel, of types and constants by the names of their parts."""
    beside = Beside(*(given[part] for part in ("beside", "D", "stride_beside"))) if given["beside"] else None
    source = Source(given["x"], given["stride_x"], beside, given["smooth"], given["mean"])
    down = Down(*(given[part] for part in ("down", "h", "R", "BLOCK_R"))) if given["down"] else None
    out = Coded(*(given.get(part) for part in ("codes", "scale", "global_scale", "stride")))
    return {part: given[part] for part in ("y", "amax", "M", "K")} | {"source": source, "down": down, "out": out}


CELLS = (
    *(
        cell
        for name, rows in (("int8", _ROWS + _OTHER_ROWS), ("fp8", _ROWS + _OTHER_ROWS), ("fp8_tensor", _ROWS))
        for k, what, constants in rows
        for cell in _row_cells(name, f"{what} {k}", k=k, **constants)
    ),
    *(cell for k in (3072, 12288) for cell in _row_cells("int8", f" regular {k}", k=k, **_REGULAR)),
    *_row_cells("fp8_tensor", " gelu given 12288", k=12288, **_GELU, SCALE_GIVEN=True, amax=None),
    *(
        cell
        for k, what, constants in _ROWS
        for cell in _cells(tensor_amax_kernel, "fp8_tensor", f"{what} {k} amax", {}, constants, k)
    ),
    *(
        cell
        for k, what, constants in _ROWS
        for cell in _block_cells("nvfp4", f"{what} {k}", k, **constants, OWN_GLOBAL=True)
    ),
    *(
        cell
        for k, what, constants in ((12288, " fused", _FUSED), (15360, " fused", _BESIDE))
        for cell in _block_cells("nvfp4", f"{what} {k}", k, **constants, OWN_GLOBAL=True, FOUR_OVER_SIX=True)
    ),
    *_row_cells("int8", "", 24, **_DOWN),
    *(cell for name in ("fp8_1x128", "mxfp8", "mxfp4", "nvfp4") for cell in _block_cells(name, **_PLAIN)),
    *(cell for name in ("fp8_1x128", "mxfp8", "mxfp4", "nvfp4") for cell in _block_cells(name, " gelu", **_GELU)),
    *_block_cells("mxfp4", " fused", **_FUSED),
    *_block_cells("nvfp4", " fused", **_FUSED, FOUR_OVER_SIX=True),
    *_block_cells("nvfp4", "", **_DOWN, FOUR_OVER_SIX=True, TILES=24),
    *_block_cells("nvfp4", "", **_DOWN, OWN_GLOBAL=True, FOUR_OVER_SIX=True, TILES=24),
    *_block_cells("fp8_1x128", **_BESIDE),
    *(cell for name in ("mxfp8", "mxfp4") for cell in _block_cells(name, **_BESIDE, SWIZZLED=True)),
    *_block_cells("nvfp4", **_BESIDE, FOUR_OVER_SIX=True),
    *_row_cells("int8", "", 120, **_BESIDE_DOWN),
    *_block_cells("nvfp4", **_BESIDE_DOWN, FOUR_OVER_SIX=True, TILES=120),
    *_block_cells("nvfp4", **_BESIDE_DOWN, OWN_GLOBAL=True, FOUR_OVER_SIX=True, TILES=120),
    *_cells(activate_kernel, "16bit", "", {}, _PLAIN | {"ACT": "silu_mul"}),
)
