"""Tests of what the interpreter cannot see: kernels divide exactly and fuse no multiplication with an addition."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks.kernels import sass
from benchmarks.kernels.aot import all_cells, compile_for
from benchmarks.kernels.compile_launches import compiling_for
from fluxq.kernels.attention import warp_specialized
from fluxq.kernels.attention.op import quantize_operands
from fluxq.kernels.dispatch import PROVEN, accepted_files

CELLS = {f"{cell.name} {cell.format}": cell for cell in all_cells()}
EXACT = (
    "quantize_rows_kernel int8 plain 3072",
    "quantize_blocks_kernel mxfp4",
    "quantize_blocks_kernel nvfp4 plain 3072 own global",
    "dequantize_kernel nvfp4",
    "scaled_matmul_kernel int8 128x128x128",
    "adaln_quantize_kernel nvfp4 fused 3072",
    "qk_norm_rope_kernel 16bit 128 neighbours",
    "key_statistics_kernel 64 quantize",
    "quantize_tokens_kernel 128 quantize",
    "quantize_values_kernel 64 quantize",
)
INEXACT = r"\b(?:div\.full|div\.approx|rcp\.approx)\b[\w.]*|\b\w+(?:\.\w+)*\.ftz\b[\w.]*"


def fused(asm: dict[str, str]) -> int:
    """Count multiply-adds that the kernel's text does not ask for."""
    asked = re.findall(r"call (?:<(\d+) x )?float>? @llvm\.fma", asm["llir"])
    return len(re.findall(r"\bfma\.rn", asm["ptx"])) - sum(int(width or 1) for width in asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_kernels_that_promise_bits_hold_no_instruction_that_rounds_otherwise(name: str) -> None:
    """No approximate division, no subnormal number flushed to zero, no multiply-add but those of the text."""
    asm = compile_for(CELLS[name], "sm_90").asm
    assert set(re.findall(INEXACT, asm["ptx"])) == set() and fused(asm) == 0


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_89", "sm_100", "sm_120"])
def test_codes_of_e4m3_are_rounded_once(chip: str) -> None:
    """Not to fp16 before, as a cast of Triton 3.8 does for sm_89."""
    ptx = compile_for(CELLS["quantize_rows_kernel fp8 plain 3072"], chip).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "e4m3x2.f16x2" not in ptx


def test_no_row_was_accepted_because_a_tool_failed() -> None:
    """But of Triton 3.6, whose disassembler does not know one chip that it is not to be used on."""
    failed = {
        (version, row["target"])
        for version in PROVEN
        for _, row in accepted_files(version)
        if (row["reason"] or "").startswith("RuntimeError")
    }
    assert failed <= {("3.6", "sm_103")}


@pytest.mark.slow
def test_with_fusion_switched_on_multiply_adds_are_found() -> None:
    cell = CELLS["scaled_matmul_kernel int8 128x128x128"]
    cell = dataclasses.replace(cell, options=cell.options | {"enable_fp_fusion": True})
    assert fused(compile_for(cell, "sm_90").asm) > 0


@pytest.mark.slow
def test_fp8_sums_on_hopper_move_to_true_fp32_in_a_loop_of_their_own() -> None:
    cell = CELLS["scaled_matmul_descriptors_kernel fp8 128x128x128 descriptors split 512"]
    never = dataclasses.replace(cell, constants=cell.constants | {"ACC_SPLIT": 0})
    additions = [len(re.findall(r"\badd\.(?:rn\.)?f32", compile_for(c, "sm_90").asm["ptx"])) for c in (never, cell)]
    assert additions[1] - additions[0] == 128 * 128 // (8 * 32)  # one for each sum that a thread holds


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(130, 257), (64, 128), (1, 1)])
def test_a_launch_of_gluon_compiles_its_cell(
    tokens: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With descriptors of tensors, and whatever Triton makes of their numbers of tokens."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # the user's may hold the same source of another checkout
    queries, keys = tokens
    q, k = (torch.randn(1, n, 1, 64).bfloat16() for n in tokens)
    operands, compiled, run = quantize_operands(q, k, k), [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *x, **how: compiled.append(run(*x, **how | {"warmup": True})))
    with compiling_for("sm_90"):
        warp_specialized.attend(operands, queries, keys, 1.0, torch.bfloat16)
    cell = "attention_warps_kernel warps-64 128x128" + " ragged" * (keys % 128 > 0)
    assert compiled[0].asm["ptx"] == compile_for(CELLS[cell], "sm_90").asm["ptx"]


@pytest.mark.slow
def test_warps_of_a_group_meet_before_one_says_that_they_have_read() -> None:
    """The interpreter takes a group for one; its products end warp by warp."""
    asm = compile_for(CELLS["attention_warps_kernel warps-128 128x128 ragged"], "sm_90").asm
    names = [i.operation for i in sass.parse(sass.disassemble(asm["cubin"]))]
    events = [n for n in names if n.startswith(("WARPGROUP.DEPBAR", "BAR.SYNC", "SYNCS.ARRIVE.TRANS64.A1T0"))]
    arrivals = [i for i, name in enumerate(events) if name.startswith("SYNCS")]
    assert len(arrivals) == 8 and all(events[i - 1].startswith("BAR.SYNC") for i in arrivals)
    assert all(events[i - 2].startswith("WARPGROUP.DEPBAR") for i in arrivals)
