"""What the interpreter cannot see: that compiled kernels divide exactly and fuse no multiplication with an addition."""

import dataclasses
import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from fluxq.kernels import dequantize, quantize_activation, scaled_matmul
from fluxq.kernels.cells import Cell

FILES = (dequantize, quantize_activation, scaled_matmul)
CELLS = {f"{cell.name} {cell.format}": cell for file in FILES for cell in file.CELLS}
EXACT = (
    "quantize_rows_kernel int8 1 tile",
    "quantize_blocks_kernel mxfp4",
    "quantize_blocks_kernel nvfp4 own global",
    "dequantize_kernel nvfp4",
    "scaled_matmul_kernel int8 128x128",
)
INEXACT = r"\b(?:div\.full|div\.approx|rcp\.approx|fma)\b[\w.]*|\b\w+(?:\.\w+)*\.ftz\b[\w.]*"


def inexact_instructions(cell: Cell) -> set[str]:
    """Of the PTX for an H100: approximate division, fused multiply-adds, subnormal numbers flushed to zero."""
    arguments = {name: cell.arguments.get(name, "constexpr") for name in cell.kernel.arg_names}
    types = {name: text.removesuffix(":16") for name, text in arguments.items()}
    source = ASTSource(cell.kernel, types, constexprs=cell.constants)
    compiled = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=cell.options)
    return set(re.findall(INEXACT, compiled.asm["ptx"]))


@pytest.mark.parametrize("name", EXACT)
def test_kernels_that_promise_bits_hold_no_instruction_that_rounds_otherwise(name: str) -> None:
    assert inexact_instructions(CELLS[name]) == set()


def test_with_fusion_switched_on_multiply_adds_are_found() -> None:
    cell = CELLS["scaled_matmul_kernel int8 128x128"]
    fused = dataclasses.replace(cell, options=cell.options | {"enable_fp_fusion": True})
    assert "fma.rn.f32" in inexact_instructions(fused)
