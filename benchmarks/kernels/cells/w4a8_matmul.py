"""Cells of `w4a8_matmul`."""

from __future__ import annotations

from benchmarks.kernels.cells.cell import (
    Cell,
    distinct_tiles,
    following_types,
    stored_arguments,
    summed_both_ways,
)
from fluxq.kernels.checks import EXACT
from fluxq.kernels.tiles import MatmulTile
from fluxq.kernels.w4a8_matmul.kernel import w4a8_matmul_kernel
from fluxq.kernels.w4a8_matmul.op import ACTIVATIONS, WEIGHTS
from fluxq.recipes.formats import find_format


def _cell(pair: str, tile: MatmulTile, chips: tuple[str, ...]) -> Cell:
    """ "nvfp4-int8": weights in nvfp4, activations in int8, everything that may follow."""
    weights, activations = (find_format(name) for name in pair.split("-"))
    stored, constants = stored_arguments(weights, words=True)
    x = {
        "x": "*i8" if activations.name == "int8" else "*fp8e4nv",
        "x_scale": "*fp32",
        "row_scale": "*fp32",
    }
    sizes = {"M": "i32", "N": "i32:16", "K": "i32:16"}
    how = {"INTEGER": activations.name == "int8", "EVEN_K": True, "TILE": tile}
    return Cell(
        w4a8_matmul_kernel,
        f"{pair} {tile.m}x{tile.n}x{tile.k}" + f" split {tile.acc_split}" * bool(tile.acc_split),
        x | stored | sizes | {"following": following_types(fused=True)},
        constants | how,
        {"num_warps": tile.warps, "num_stages": tile.stages} | EXACT,
        tensor_core=activations.name,
        targets=chips,
    )


CELLS = tuple(
    _cell(f"{weights}-{activations}", tile, chips)
    for weights in WEIGHTS
    for activations in ACTIVATIONS
    for tile, chips in summed_both_ways(distinct_tiles("w4a8_matmul", f"{weights}-{activations}")).items()
)
