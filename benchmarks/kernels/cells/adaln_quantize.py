"""Cells of `adaln_quantize`."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles
from fluxq.kernels.adaln_quantize.kernel import adaln_quantize_kernel
from fluxq.kernels.checks import EXACT
from fluxq.kernels.tiles import Tile
from fluxq.recipes.formats import FORMATS

TYPES = {
    **dict.fromkeys(("x", "branch", "gate", "scale", "shift", "new"), "*bf16"),
    **dict.fromkeys(("smooth", "mean", "global_scale"), "*fp32"),
    **dict.fromkeys(("D", "stride_x", "stride_branch", "stride_gate", "stride_scale", "stride_shift"), "i32:16"),
    **dict.fromkeys(("M", "tokens", "stride_step"), "i32"),
    "eps": "fp32",
}
PLAIN = {"smooth": None, "mean": None, "HADAMARD": 0}
FUSED = {"HADAMARD": 7}


def _cells(width: str, format: str, what: str = "", **constants: Any) -> list[Cell]:
    """bf16 rows behind a gated residual, as in a transformer block; what, constants: how a cell differs."""
    types = TYPES | {"codes": "*i8" if format == "int8" else "*u8", "step": "*u8"}
    fixed = {"weight": None, "NORM": "layer", "FORMAT": format, "ELEMENT": "", "LARGEST": 0.0, "GROUP": 0}
    fixed |= dict.fromkeys(("SCALE_GIVEN", "FOUR_OVER_SIX", "SWIZZLED"), False)
    if format:
        row = FORMATS[format]
        fixed |= {"ELEMENT": row.element.name, "LARGEST": row.element.max, "GROUP": row.group_size}
        types["step"] = "*u8" if row.group_size else "*fp32"
    else:
        types["codes"] = "*bf16"
        fixed["step"] = None
    if format != "nvfp4":
        fixed["global_scale"] = None
    fixed |= constants
    return [
        Cell(
            adaln_quantize_kernel,
            f"{format or '16bit'}{what} {width}",
            {name: types[name] for name in adaln_quantize_kernel.arg_names if name in types and name not in fixed},
            fixed | {"ROWS": tile.rows, "COLUMNS": tile.columns},
            {"num_warps": tile.warps} | EXACT,
            max_registers=MAX_REGISTERS,
            targets=chips,
        )
        for tile, chips in distinct_tiles("adaln_quantize", width).items()
        if isinstance(tile, Tile)
    ]


CELLS = (
    *_cells("4096", "", **PLAIN),
    *_cells("4096", "int8", **PLAIN),
    *_cells("4096", "fp8", **PLAIN),
    *_cells("4096", "fp8_tensor", **PLAIN, SCALE_GIVEN=True),
    *_cells("4096", "mxfp8", **PLAIN, SWIZZLED=True),
    *_cells("4096", "mxfp4", " fused", **FUSED, SWIZZLED=True),
    *_cells("4096", "nvfp4", **PLAIN, SWIZZLED=True, SCALE_GIVEN=True),
    *_cells("4096", "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
    *_cells("2048", "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
    *_cells("8192", "fp8", " fused", **FUSED),
    *_cells("8192", "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
)
