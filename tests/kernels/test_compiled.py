"""Tests of what the interpreter cannot see: kernels divide exactly and fuse no multiplication with an addition."""

import dataclasses
import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from benchmarks.kernels.aot import all_cells
from benchmarks.kernels.cells.cell import Cell

CELLS = {f"{cell.name} {cell.format}": cell for cell in all_cells()}
EXACT = (
    "quantize_rows_kernel int8",
    "quantize_blocks_kernel mxfp4",
    "quantize_blocks_kernel nvfp4 own global",
    "dequantize_kernel nvfp4",
    "scaled_matmul_kernel int8 128x128x128",
    "adaln_quantize_kernel nvfp4 fused 4096",
    "qk_norm_rope_kernel 16bit 128 neighbours",
    "key_statistics_kernel 64 quantize",
    "quantize_tokens_kernel 128 quantize",
    "quantize_values_kernel 64 quantize",
)
INEXACT = r"\b(?:div\.full|div\.approx|rcp\.approx|fma)\b[\w.]*|\b\w+(?:\.\w+)*\.ftz\b[\w.]*"


def hopper_ptx(cell: Cell) -> str:
    arguments = {name: cell.arguments.get(name, "constexpr") for name in cell.kernel.arg_names}
    types = {name: text.removesuffix(":16") for name, text in arguments.items()}
    source = ASTSource(cell.kernel, types, constexprs=cell.constants)
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options=cell.options).asm["ptx"]


def inexact_instructions(cell: Cell) -> set[str]:
    """Of the PTX for an H100: approximate division, fused multiply-adds, subnormal numbers flushed to zero."""
    return set(re.findall(INEXACT, hopper_ptx(cell)))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_kernels_that_promise_bits_hold_no_instruction_that_rounds_otherwise(name: str) -> None:
    assert inexact_instructions(CELLS[name]) == set()


def test_with_fusion_switched_on_multiply_adds_are_found() -> None:
    cell = CELLS["scaled_matmul_kernel int8 128x128x128"]
    fused = dataclasses.replace(cell, options=cell.options | {"enable_fp_fusion": True})
    assert "fma.rn.f32" in inexact_instructions(fused)


@pytest.mark.slow
def test_fp8_sums_on_hopper_move_to_true_fp32_at_each_step_of_k() -> None:
    cell = CELLS["scaled_matmul_descriptors_kernel fp8 128x128x128 descriptors split 128"]
    never = dataclasses.replace(cell, constants=cell.constants | {"ACC_SPLIT": 0})
    additions = [len(re.findall(r"\badd\.(?:rn\.)?f32", hopper_ptx(c))) for c in (never, cell)]
    assert additions[1] - additions[0] == 128 * 128 // (8 * 32)  # one for each sum that a thread holds
