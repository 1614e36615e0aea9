"""Cells, the kernels compiled ahead of time: a file here lists the CELLS of a kernel, `aot.py` compiles them for every
chip."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from triton.runtime.jit import JITFunction

from fluxq.kernels.dequantize.kernel import Stored
from fluxq.kernels.epilogue import Following, Gate, LowRank
from fluxq.kernels.tiles import CHIPS, MatmulTile, Tile, tuned_rows
from fluxq.recipes.formats import Format

MAX_REGISTERS = 128  # of a memory-bound kernel: with more, too few warps fit on a chip to hide its loads


@dataclass(frozen=True)
class Cell:
    """One kernel at one tile, as it is launched.

    format: number format, or any word that tells this cell from the kernel's others.
    arguments: run-time arguments and their types as Triton spells them: "*bf16", "fp32", "i64"; "i32:16" promises a
    multiple of 16. Pointers are taken to be 16-byte aligned, as torch's are. A tuple holds types, and constants.
    constants: values of the others: tl.constexpr parameters, and arguments that are None or 1 in the launch.
    options: what else is passed in the launch: num_warps, num_stages, …
    tensor_core: what its matrix instructions multiply ("int8", "fp8", "bf16", "fp16", "mxfp8", "mxfp4", "nvfp4"), words
    apart where there are two kinds; None for no matmul.
    max_registers: per thread; None for as many as the chip has.
    elements: that a program of a pass over memory reads, in a turn of its loop if it has one, to count instructions by;
        0 for no such count.
    turns: of that loop, which the compiler may unroll.
    targets: the chips that this tile is meant for, by their names in CHIPS; empty for all.
    """

    kernel: JITFunction
    format: str
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    tensor_core: str | None = None
    max_registers: int | None = None
    elements: int = 0
    turns: int = 1
    targets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As kernels/compiled spells it: `scaled_matmul_kernel`."""
        return self.kernel.fn.__name__


def distinct_tiles(kernel: str, format: str, *, plain: bool = False) -> dict[Any, tuple[str, ...]]:
    """Each tile that `find_tile` can return for a format, with the chips it is returned for: what CELLS compile."""
    tile_chips: dict[Tile | MatmulTile, tuple[str, ...]] = {}
    for chip in CHIPS:
        covered = 0.0  # the largest M for which an earlier row is taken
        for row in tuned_rows(kernel):
            limit = float("inf") if row.max_m is None else row.max_m
            if row.fits(format, chip, 1, plain) and limit > covered:
                covered = limit
                tile_chips[row.tile] = tuple(dict.fromkeys((*tile_chips.get(row.tile, ()), chip)))
    return tile_chips


def summed_both_ways(tiles: dict[Any, tuple[str, ...]]) -> dict[Any, tuple[str, ...]]:
    """Add each tile whose sums move to fp32 as `accumulate: fast` takes it."""
    both = dict(tiles)
    for tile, chips in tiles.items():
        if tile.acc_split:
            fast = replace(tile, acc_split=0)
            both[fast] = (*both.get(fast, ()), *chips)
    return both


def following_types(*, fused: bool, gated: bool = True) -> Following:
    """Of a Cell, the types of what follows, to bf16: a bias, `gated` a gate and a residual, or `fused` all that may."""
    low_rank = LowRank("*bf16", "*bf16", "i32:16", 32) if fused else None
    gate, residual = (Gate("*bf16", "i32"), "*bf16") if gated else (None, None)
    return Following("*bf16", low_rank, True if fused else None, gate, residual, "*bf16")


def stored_arguments(format: Format, *, words: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a Cell, the argument types and the constants of a weight in `format`, as `dequantize` passes them."""
    types = {"int8": "*i8", "fp32": "*fp32", "bf16": "*bf16"}  # the others are read as bytes
    codes = "*i32" if words else types.get(format.element.name, "*u8")
    of_all = ("*fp32", "i32") if format.two_level else (None, None)
    stored = Stored(codes, types.get(format.scale, "*u8"), of_all[0], "i32", of_all[1])
    return {"w": stored}, {"ELEMENT": format.element.name, "SCALE": format.scale, "GROUP": format.group_size}
