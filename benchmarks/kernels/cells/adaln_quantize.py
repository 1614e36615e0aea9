"""Cells of `adaln_quantize`."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell
from fluxq.kernels.adaln_quantize.kernel import Modulation, Residual, adaln_quantize_kernel
from fluxq.kernels.checks import EXACT
from fluxq.kernels.quantize_activation.kernel import Coded, Source
from fluxq.kernels.tiles import CHIPS, cdiv, whole_row_tile
from fluxq.recipes.formats import FORMATS

PLAIN: dict[str, Any] = {"smooth": None, "mean": None, "HADAMARD": 0}
FUSED: dict[str, Any] = {"HADAMARD": 7}
FIRST: dict[str, Any] = {"residual": None}  # of a block: no residual before it


def _cells(d: int, format: str, what: str = "", **constants: Any) -> list[Cell]:
    """bf16 rows behind a gated residual, as in a transformer block; what, constants: how a cell differs."""
    row = FORMATS[format] if format else None
    fixed: dict[str, Any] = {"NORM": "layer", "FORMAT": row}
    fixed |= dict.fromkeys(("SCALE_GIVEN", "FOUR_OVER_SIX", "SWIZZLED"), False)
    out = Coded("*bf16", None, None, None)
    if row is not None:
        out = Coded("*i8" if format == "int8" else "*u8", "*fp32" if row.scale == "fp32" else "*u8", None, None)
        if row.two_level:
            out = out._replace(global_scale="*fp32")
        if row.two_level or not row.group_size:
            out = out._replace(stride="i32")
    many = bool(constants["HADAMARD"] or (row and row.group_size))
    (tile,) = {whole_row_tile(d, chip, many=many) for chip in CHIPS}  # rows of a model's width, no longer ones
    fixed |= {"EVEN": d % tile.columns == 0, "TILES": cdiv(d, tile.columns)} | constants
    smooth, mean = fixed.pop("smooth", "*fp32"), fixed.pop("mean", "*fp32")
    arguments: dict[str, Any] = {"source": Source("*bf16", "i32:16", None, smooth, mean), "out": out, "eps": "fp32"}
    arguments |= {"residual": Residual("*bf16", "*bf16", "*bf16", "i32:16", "i32:16"), "M": "i32", "D": "i32:16"}
    arguments["modulation"] = Modulation("*bf16", "*bf16", None, "i32", "i32:16", "i32:16")
    return [
        Cell(
            adaln_quantize_kernel,
            f"{format or '16bit'}{what} {d}",
            {name: kind for name, kind in arguments.items() if name not in fixed},
            fixed | {"TILE": tile},
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
    *_cells(3072, "fp8_1x128", **PLAIN),
    *_cells(3072, "mxfp8", **PLAIN, SWIZZLED=True),
    *_cells(3072, "mxfp4", " fused", **FUSED, SWIZZLED=True),
    *_cells(3072, "nvfp4", **PLAIN, SWIZZLED=True, SCALE_GIVEN=True),
    *_cells(3072, "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
    *_cells(1536, "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
    *_cells(1152, "fp8", " fused", **FUSED),
    *_cells(5120, "nvfp4", " fused", **FUSED, SWIZZLED=True, FOUR_OVER_SIX=True),
)
