"""Cells of `scaled_matmul`."""

from __future__ import annotations

from typing import Any

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles, following_types, summed_both_ways
from fluxq.kernels.checks import EXACT
from fluxq.kernels.epilogue import GATED_TILE, gate_kernel
from fluxq.kernels.products import formats_of
from fluxq.kernels.scaled_matmul.kernel import scaled_matmul_descriptors_kernel, scaled_matmul_kernel
from fluxq.kernels.scaled_matmul.op import OP
from fluxq.kernels.tiles import MatmulTile


def _tiles(format: str, *, plain: bool) -> dict[MatmulTile, tuple[str, ...]]:
    return summed_both_ways(distinct_tiles("scaled_matmul", format, plain=plain))


def _cell(format: str, tile: MatmulTile, targets: tuple[str, ...], *, fused: bool) -> Cell:
    """8-bit codes with bias, gate and residual, or `fused` with everything that may follow at once.

    A tile that is only for a bias has only that.
    """
    code = "i8" if format == "int8" else "fp8e4nv"
    sizes = {"M": "i32", "N": "i32:16", "K": "i32:16"}
    gated = tile in _tiles(format, plain=False)
    following = {"following": following_types(fused=fused, gated=gated)}
    constants: dict[str, Any] = {"INTEGER": format == "int8", "ACC_SPLIT": tile.acc_split, "TILE": tile}
    constants["GROUP"] = formats_of(format)[1].group_size
    strides = ("stride_x_scale", "stride_w_scale")
    if format == "fp8_tensor":
        sizes |= dict.fromkeys(strides, "i32")
    else:
        constants |= dict.fromkeys(strides, 1)
    if tile.descriptors:
        kernel = scaled_matmul_descriptors_kernel
        codes = {part: f"tensordesc<{code}[{rows}, {tile.k}]>" for part, rows in (("x", tile.m), ("w", tile.n))}
    else:
        kernel = scaled_matmul_kernel
        codes = dict.fromkeys(("x", "w"), f"*{code}")
        constants["EVEN_K"] = True
    how = " descriptors" * tile.descriptors + f" split {tile.acc_split}" * bool(tile.acc_split)
    return Cell(
        kernel,
        f"{format} {tile.m}x{tile.n}x{tile.k}" + how + " unit scales" * tile.unit_scales + " fused" * fused,
        codes | {"x_scale": "*fp32", "w_scale": "*fp32"} | sizes | following,
        constants,
        {"num_warps": tile.warps, "num_stages": tile.stages} | EXACT,
        tensor_core="int8" if format == "int8" else "mxfp8" if tile.unit_scales else "fp8",
        targets=targets,
    )


# What follows a product of torch's library, in a pass of its own.
_GATE = Cell(
    gate_kernel,
    "16bit gate and residual",
    {"following": following_types(fused=False)._replace(bias=None), "M": "i32", "N": "i32:16"},
    GATED_TILE,
    {"num_warps": 4} | EXACT,
    max_registers=MAX_REGISTERS,
    elements=GATED_TILE["ROWS"] * GATED_TILE["COLUMNS"],
)

CELLS = (
    _GATE,
    *(
        _cell(name, tile, targets, fused=fused)
        for name in OP.formats
        for fused in (False, True)
        for tile, targets in _tiles(name, plain=not fused).items()
        # The hardest to fit is what matters; the plain one once for each large tile of a format's own codes.
        if fused or (tile.m >= 128 and name != "fp8_tensor")
    ),
)
