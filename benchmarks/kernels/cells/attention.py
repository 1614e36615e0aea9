"""Cells of `attention_fp8`."""

from __future__ import annotations

import torch

from benchmarks.kernels.cells.cell import MAX_REGISTERS, Cell, distinct_tiles
from fluxq.kernels.attention import warp_specialized
from fluxq.kernels.attention.kernel import (
    CHANNELS,
    attention_fp8_kernel,
    constants_of,
    key_statistics_kernel,
    quantize_tokens_kernel,
    quantize_values_kernel,
)
from fluxq.kernels.attention.op import CODES, HEAD_SIZES, KEY_BLOCK, QUERY_BLOCK, format_of
from fluxq.kernels.checks import EXACT
from fluxq.kernels.tiles import MatmulTile, Tile

_TYPES = {torch.float8_e4m3fn: "*fp8e4nv", torch.float16: "*fp16"}
_STRIDES = {"stride_b": "i32:16", "stride_s": "i32:16", "stride_h": "i32:16"}


def _attention_cell(codes: str, d: int, tile: MatmulTile, chips: tuple[str, ...], *, even: bool) -> Cell:
    """One head size and row of CODES, with or without a last block of keys that is not full."""
    is_int8, values = CODES[codes].qk.element.is_integer, _TYPES[CODES[codes].pv]
    in_fp8 = "mxfp8" if tile.unit_scales else "fp8"
    how = f" split {tile.acc_split}" * bool(tile.acc_split) + " unit scales" * tile.unit_scales
    return Cell(
        attention_fp8_kernel,
        f"{format_of(codes, d)} {tile.m}x{tile.n}" + how + " ragged" * (not even),
        dict.fromkeys(("q", "k"), "*i8" if is_int8 else "*fp8e4nv")
        | {"v": values}
        | dict.fromkeys(("q_scale", "k_scale", "v_scale"), "*fp32")
        | {"o": "*bf16", "S": "i32", "SKV": "i32:16" if even else "i32", "H": "i32", "log2_scale": "fp32"},
        {"EVEN_KEYS": even} | constants_of(tile),
        {"num_warps": tile.warps, "num_stages": tile.stages} | EXACT,
        tensor_core="int8 " * is_int8 + ("fp16" if values == "*fp16" else in_fp8),
        targets=chips,
    )


def _warps_cell(d: int, *, even: bool) -> Cell:
    """The kernel with warps apart; its q, k and v are TMA's descriptors."""

    def block(rows: int, columns: int) -> str:
        return f"tensordesc<fp8e4nv[{rows}, {columns}],{warp_specialized.layout_of([rows, columns])!r}>"

    return Cell(
        warp_specialized.attention_warps_kernel,
        f"warps-{d} {QUERY_BLOCK}x{KEY_BLOCK}" + " ragged" * (not even),
        {"q": block(QUERY_BLOCK, d), "k": block(KEY_BLOCK, d), "v": block(d, KEY_BLOCK)}
        | dict.fromkeys(("q_scale", "k_scale", "v_scale"), "*fp32")
        | {"o": "*bf16", "S": "i32", "SKV": "i32", "H": "i32", "log2_scale": "fp32"},
        warp_specialized.constants_of(d, even),
        {"num_warps": 4} | EXACT,
        tensor_core="fp8",
        targets=("sm_90",),
    )


def _quantize_cells(d: int, tile: Tile, chips: tuple[str, ...]) -> list[Cell]:
    constants = {"D": d, "ROWS": tile.rows}
    sizes = {"S": "i32", "H": "i32"}
    both = {f"stride_{x}{axis}": "i32:16" for x in "kv" for axis in "bsh"}
    statistics = {"k": "*bf16", "v": "*bf16", "mean": "*fp32", "scale": "*fp32"} | sizes | both
    tokens = {"x": "*bf16", "mean": "*fp32", "codes": "*u8", "scale": "*fp32"} | sizes | _STRIDES
    values = {"v": "*bf16", "scale": "*fp32", "codes": "*u8", "padded": "i32:16"} | sizes | _STRIDES
    in_fp8, in_int8 = ({"BLOCK": KEY_BLOCK, "INT8": int8, "PER_TOKEN": int8} for int8 in (False, True))
    return [
        Cell(
            kernel,
            f"{d} quantize{how}",
            arguments,
            constants | more,
            {"num_warps": tile.warps} | EXACT,
            max_registers=MAX_REGISTERS,
            elements=at_once * d,
            targets=chips,
        )
        for kernel, how, arguments, more, at_once in (
            (key_statistics_kernel, "", statistics, {"CHANNELS": CHANNELS}, 0),  # one of two loops
            (quantize_tokens_kernel, "", tokens, in_fp8, KEY_BLOCK),
            (quantize_tokens_kernel, " int8", tokens | {"codes": "*i8"}, in_int8 | {"PER_TOKEN": False}, KEY_BLOCK),
            (quantize_tokens_kernel, " int8 per token", tokens | {"codes": "*i8"}, in_int8 | {"mean": None}, KEY_BLOCK),
            (quantize_values_kernel, "", values, {}, tile.rows),
            (quantize_values_kernel, " fp16", values | {"codes": "*fp16"}, {}, tile.rows),
        )
    ]


CELLS = (
    *(
        _attention_cell(codes, d, tile, chips, even=even)
        for codes in CODES
        for d in HEAD_SIZES
        for tile, chips in distinct_tiles("attention", format_of(codes, d)).items()
        if isinstance(tile, MatmulTile)
        for even in (True, False)
    ),
    *(_warps_cell(d, even=even) for d in HEAD_SIZES for even in (True, False)),
    *(
        cell
        for d in HEAD_SIZES
        for tile, chips in distinct_tiles("attention", f"quantize {d}").items()
        if isinstance(tile, Tile)
        for cell in _quantize_cells(d, tile, chips)
    ),
)
