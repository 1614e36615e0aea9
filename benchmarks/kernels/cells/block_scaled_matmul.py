"""Cells of `block_scaled_matmul`."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cells.cell import Cell, distinct_tiles, following_types
from fluxq.kernels.block_scaled_matmul.kernel import block_scaled_matmul_kernel
from fluxq.kernels.block_scaled_matmul.op import OP
from fluxq.kernels.checks import EXACT
from fluxq.kernels.tiles import MatmulTile
from fluxq.recipes.formats import FORMATS, Format


def _cell(format: Format, tile: MatmulTile, targets: tuple[str, ...], *, swizzled: bool) -> Cell:
    """With everything that may follow at once."""
    code = "fp8e4nv" if format.element.name == "e4m3" else "u8"
    scale = "*fp8e4nv" if format.scale == "e4m3" else "*u8"
    columns = tile.k * format.element.bits // 8
    arguments: dict[str, Any] = {
        part: f"tensordesc<{code}[{rows}, {columns}]>" if tile.descriptors else f"*{code}"
        for part, rows in (("x", tile.m), ("w", tile.n))
    }
    arguments |= {"x_scale": scale, "w_scale": scale, "M": "i32", "N": "i32:16", "K": "i32:16"}
    arguments["following"] = following_types(fused=True)
    constants: dict[str, Any] = {"ELEMENT": format.element.name, "GROUP": format.group_size, "SWIZZLED": swizzled}
    constants |= {"EVEN_K": True, "TILE": tile}
    if format.two_level:
        arguments |= {"x_scale_2": "*fp32", "w_scale_2": "*fp32", "stride_x_scale_2": "i32"}
    else:
        constants |= {"x_scale_2": None, "w_scale_2": None, "stride_x_scale_2": 0}
    how = " descriptors" * tile.descriptors + " swizzled" * swizzled
    return Cell(
        block_scaled_matmul_kernel,
        f"{format.name} {tile.m}x{tile.n}x{tile.k}{how} fused",
        arguments,
        constants,
        {"num_warps": tile.warps, "num_stages": tile.stages} | EXACT,
        tensor_core=format.name,
        targets=targets,
    )


CELLS = tuple(
    _cell(FORMATS[name], tile, targets, swizzled=swizzled)
    for name in OP.formats
    for tile, targets in distinct_tiles("block_scaled_matmul", name).items()
    for swizzled in ((False, True) if tile.m % 128 == 0 else (False,))
)
