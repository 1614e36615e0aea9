"""Cells of `qk_norm_rope`."""

from __future__ import annotations

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles
from fluxq.kernels.checks import EXACT
from fluxq.kernels.qk_norm_rope.kernel import qk_norm_rope_kernel
from fluxq.kernels.tiles import Tile


def _cell(d: str, tile: Tile, targets: tuple[str, ...], *, interleaved: bool) -> Cell:
    """bf16 heads of d elements, with weights, as Flux has them."""
    pointers = dict.fromkeys(("q", "k", "q_weight", "k_weight", "q_out", "k_out"), "*bf16")
    strides = {f"stride_{x}{axis}": "i32:16" for x in "qk" for axis in "bsh"}
    sizes = {"S": "i32", "H": "i32", "HK": "i32", "position": "i32", "eps": "fp32"}
    constants = {"D": int(d), "INTERLEAVED": interleaved, "ROUND_BEFORE_WEIGHT": False}
    return Cell(
        qk_norm_rope_kernel,
        f"16bit {d} " + ("neighbours" if interleaved else "halves"),
        pointers | {"cos": "*fp32", "sin": "*fp32"} | sizes | strides,
        constants | {"ROWS": tile.rows, "COLUMNS": tile.columns},
        {"num_warps": tile.warps} | EXACT,
        max_registers=MAX_REGISTERS,
        targets=targets,
    )


CELLS = tuple(
    _cell(d, tile, chips, interleaved=interleaved)
    for d, interleaved in (("64", True), ("128", True), ("128", False), ("256", True))
    for tile, chips in distinct_tiles("qk_norm_rope", d).items()
)
