"""Cells of `attention_fp8`."""

from __future__ import annotations

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles
from fluxq.kernels.attention.kernel import (
    CHANNELS,
    attention_fp8_kernel,
    constants_of,
    key_statistics_kernel,
    quantize_tokens_kernel,
    quantize_values_kernel,
)
from fluxq.kernels.attention.op import KEY_BLOCK
from fluxq.kernels.checks import EXACT
from fluxq.kernels.tiles import MatmulTile, Tile

_STRIDES = {"stride_b": "i32:16", "stride_s": "i32:16", "stride_h": "i32:16"}


def _attention_cell(d: str, tile: MatmulTile, chips: tuple[str, ...], *, even: bool) -> Cell:
    """One head size, with or without a last block of keys that is not full."""
    how = f" split {tile.acc_split}" * bool(tile.acc_split) + " unit scales" * tile.unit_scales
    return Cell(
        attention_fp8_kernel,
        f"{d} {tile.m}x{tile.n}" + how + " ragged" * (not even),
        dict.fromkeys(("q", "k", "v"), "*fp8e4nv")
        | dict.fromkeys(("q_scale", "k_scale", "v_scale"), "*fp32")
        | {"o": "*bf16", "S": "i32", "SKV": "i32:16" if even else "i32", "H": "i32", "log2_scale": "fp32"},
        {"EVEN_KEYS": even} | constants_of(tile),
        {"num_warps": tile.warps, "num_stages": tile.stages} | EXACT,
        tensor_core="mxfp8" if tile.unit_scales else "fp8",
        targets=chips,
    )


def _quantize_cells(d: str, tile: Tile, chips: tuple[str, ...]) -> list[Cell]:
    constants = {"D": int(d), "ROWS": tile.rows}
    sizes = {"S": "i32", "H": "i32"}
    both = {f"stride_{x}{axis}": "i32:16" for x in "kv" for axis in "bsh"}
    statistics = {"k": "*bf16", "v": "*bf16", "mean": "*fp32", "scale": "*fp32"} | sizes | both
    tokens = {"x": "*bf16", "mean": "*fp32", "codes": "*u8", "scale": "*fp32"} | sizes | _STRIDES
    values = {"v": "*bf16", "scale": "*fp32", "codes": "*u8", "padded": "i32:16"} | sizes | _STRIDES
    return [
        Cell(
            kernel,
            f"{d} quantize",
            arguments,
            constants | more,
            {"num_warps": tile.warps} | EXACT,
            max_registers=MAX_REGISTERS,
            targets=chips,
        )
        for kernel, arguments, more in (
            (key_statistics_kernel, statistics, {"CHANNELS": CHANNELS}),
            (quantize_tokens_kernel, tokens, {"BLOCK": KEY_BLOCK}),
            (quantize_values_kernel, values, {}),
        )
    ]


CELLS = (
    *(
        _attention_cell(d, tile, chips, even=even)
        for d in ("64", "128")
        for tile, chips in distinct_tiles("attention", d).items()
        if isinstance(tile, MatmulTile)
        for even in (True, False)
    ),
    *(
        cell
        for d in ("64", "128")
        for tile, chips in distinct_tiles("attention", f"quantize {d}").items()
        if isinstance(tile, Tile)
        for cell in _quantize_cells(d, tile, chips)
    ),
)
