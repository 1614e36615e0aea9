"""Cells of `qk_norm_rope`."""

from __future__ import annotations

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles
from fluxq.kernels.checks import EXACT
from fluxq.kernels.qk_norm_rope.kernel import qk_norm_rope_kernel
from fluxq.kernels.tiles import Tile


def _cell(d: str, how: str, tile: Tile, targets: tuple[str, ...]) -> Cell:
    """bf16 heads of d elements, with weights, as Flux has them: of one stream without v, or of two with it."""
    two, rotated = "two" in how, "plain" not in how
    strides = ("i32:16",) * 3
    v = ("*bf16", strides) if two else (None, None)
    stream = "*bf16", "*bf16", v[0], "*bf16", "*bf16", strides, strides, v[1]
    arguments = {
        "first": stream,
        "second": stream if two else None,
        "table": ("*fp32", "*fp32") if rotated else (None, None),
        "outputs": ("*bf16", "*bf16", v[0]),
    }
    sizes = {"S": "i32", "S_FIRST": "i32", "H": "i32", "HK": "i32", "eps": "fp32"}
    constants = {"TWO": two, "D": int(d), "INTERLEAVED": "halves" not in how, "ROUND_BEFORE_WEIGHT": not rotated}
    return Cell(
        qk_norm_rope_kernel,
        f"16bit {d} {how}",
        arguments | sizes,
        constants | {"ROWS": tile.rows, "COLUMNS": tile.columns},
        {"num_warps": tile.warps} | EXACT,
        max_registers=MAX_REGISTERS,
        targets=targets,
    )


CELLS = tuple(
    _cell(d, how, tile, chips)
    for d, how in (
        ("64", "neighbours"),
        ("64", "plain two"),  # SD3.5, which rotates nothing
        ("128", "neighbours"),
        ("128", "neighbours two"),
        ("128", "halves two"),
        ("256", "neighbours two"),
    )
    for tile, chips in distinct_tiles("qk_norm_rope", d).items()
)
