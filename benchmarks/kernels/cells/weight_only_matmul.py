"""Cells of `weight_only_matmul`."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles, following_types, stored_arguments
from fluxq.kernels.checks import EXACT
from fluxq.kernels.tiles import MatmulTile, Tile
from fluxq.kernels.weight_only_matmul.kernel import FUSED, weight_only_gemv_kernel, weight_only_matmul_kernel
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import find_format


def _cell(format: str, tile: MatmulTile | Tile, chips: tuple[str, ...]) -> Cell:
    """bf16 tokens, everything that may follow a matmul, a bias after one token's."""
    gemv = isinstance(tile, Tile)
    stored, constants = stored_arguments(find_format(format), words=gemv)
    arguments: dict[str, Any] = {"x": "*bf16", "M": "i32", "N": "i32:16", "K": "i32:16"} | stored
    arguments["following"] = following_types(fused=not gemv)
    constants["TILE"] = tile
    if gemv:
        del arguments["M"]
        return Cell(
            weight_only_gemv_kernel,
            f"{format} {tile.rows}x{tile.columns} gemv",
            arguments,
            constants | {"low_rank": None, "M": 1, "BLOCK_M": 1},
            {"num_warps": tile.warps} | FUSED,
            max_registers=MAX_REGISTERS,
            targets=chips,
        )
    return Cell(
        weight_only_matmul_kernel,
        f"{format} {tile.m}x{tile.n}x{tile.k}",
        arguments,
        constants | {"EVEN_K": True},
        {"num_warps": tile.warps, "num_stages": tile.stages} | EXACT,
        tensor_core="bf16",
        targets=chips,
    )


CELLS = tuple(
    _cell(name, tile, chips)
    for name in (*KERNEL_FORMATS, "int4_g128")
    for tile, chips in distinct_tiles("weight_only_matmul", name).items()
)
