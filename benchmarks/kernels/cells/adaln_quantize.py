"""Cells of `adaln_quantize`."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell
from fluxq.kernels.adaln_quantize.kernel import adaln_quantize_kernel
from fluxq.kernels.checks import EXACT
from fluxq.kernels.tiles import CHIPS, cdiv, whole_row_tile
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
FIRST = dict.fromkeys(("branch", "gate", "new", "stride_branch", "stride_gate"))  # of a block: no residual before it


def _cells(d: int, format: str, what: str = "", **constants: Any) -> list[Cell]:
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
    many = bool(constants["HADAMARD"] or fixed["GROUP"])
    (tile,) = {whole_row_tile(d, chip, many=many) for chip in CHIPS}  # rows of a model's width, no longer ones
    fixed |= {"EVEN": d % tile.columns == 0, "TILES": cdiv(d, tile.columns)} | constants
    return [
        Cell(
            adaln_quantize_kernel,
            f"{format or '16bit'}{what} {d}",
            {name: types[name] for name in adaln_quantize_kernel.arg_names if name in types and name not in fixed},
            fixed | {"ROWS": tile.rows, "COLUMNS": tile.columns},
            {"num_warps": tile.warps} | EXACT,
            max_registers=MAX_REGISTERS,
            elements=d,
        )
    ]


CELLS = (
    *_cells(3072, "", **PLAIN),
    *_cells(3072, "int8", **PLAIN),
    *_cells(3072, "fp8", **PLAIN),
    *_cells(3072, "fp8", " first", **PLAIN, **FIRST),
    *_cells(5120, "fp8", **PLAIN),
    *_cells(3072, "fp8_tensor", **PLAIN, SCALE_GIVEN=True),
    *_cells(3072, "mxfp8", **PLAIN, SWIZZLED=True),
    *_cells(3072, "mxfp4", " fused", **FUSED, SWIZZLED=True),
    *_cells(3072, "nvfp4", **PLAIN, SWIZZLED=True, SCALE_GIVEN=True),
    *_cells(3072, "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
    *_cells(1536, "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
    *_cells(1152, "fp8", " fused", **FUSED),
    *_cells(5120, "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
)
