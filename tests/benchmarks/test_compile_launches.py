"""Tests of the plug-in that compiles what the kernels' tests launch."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernels import compile_launches
from benchmarks.kernels.compile_launches import compiling


@triton.jit
def doubled_kernel(x, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(x + at, tl.load(x + at) * 2)


@triton.jit
def of_two_types_kernel(x):
    """The interpreter runs one branch; a compiler gives `y` one type."""
    at = tl.arange(0, 16)
    y = tl.load(x + at)
    if tl.load(x) > 100:
        y = tl.arange(0, 32)
    tl.store(x + at, y)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_launches, "_known", set())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_a_launch_is_computed_and_then_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each that the compiler tells apart: other values and lengths are the same, another dtype is not."""
    compiled = []
    monkeypatch.setattr(compile_launches, "_failure", lambda launch: compiled.append(launch) or "")
    with compiling():
        for x in (torch.ones(16), torch.zeros(16), torch.ones(16).half(), torch.ones(17)[1:]):
            doubled_kernel[(1,)](x, COUNT=16)
        assert x.tolist() == [2.0] * 16 and compiled == []
    assert [launch.arguments[0].dtype for launch in compiled] == [torch.float32, torch.float16, torch.float32]
    assert compiled[2].arguments[0].data_ptr() % 16 == 4
    with compiling():
        doubled_kernel[(1,)](torch.ones(16), COUNT=16)
    assert len(compiled) == 3


@pytest.mark.slow
def test_what_does_not_compile_is_named() -> None:
    x = torch.ones(16)
    with pytest.raises(AssertionError, match=r"^1 of 2 launches do not compile:\nof_two_types_kernel for sm_90: "):
        with compiling():
            doubled_kernel[(1,)](x, COUNT=16)
            with compiling():  # whose own end is too early: the interpreter is still switched on
                of_two_types_kernel[(1,)](x)
    assert x.tolist() == [2.0] * 16


def test_a_kernel_is_compiled_for_a_chip_that_is_offered_it() -> None:
    from fluxq.kernels.block_scaled_matmul import kernel as block_scaled
    from fluxq.kernels.scaled_matmul import kernel as scaled

    assert compile_launches._chip_for(block_scaled.block_scaled_matmul_kernel, "sm_90") == "sm_100"
    assert compile_launches._chip_for(scaled.scaled_matmul_kernel, "sm_90") == "sm_90"
    assert compile_launches._chip_for(doubled_kernel, "sm_90") == "sm_90"


@pytest.mark.slow
def test_pytest_reports_it_as_an_error_and_compiles_no_faults(tmp_path: Path) -> None:
    text = f"""
import pytest, torch, triton
import triton.language as tl
from fluxq.kernels.interpreter import interpreting

{inspect.getsource(of_two_types_kernel.fn)}

@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield

def test_it(): of_two_types_kernel[(1,)](torch.ones(16))
def test_a_fault_of_it(): of_two_types_kernel[(1,)](torch.ones(16).half())
"""
    (tmp_path / "test_both.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n0", "--noconftest", "-p", "benchmarks.kernels.compile_launches"]
    here = Path(__file__).parents[2]
    plain = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # options of the conftest
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=here, env=plain)
    assert "2 passed, 1 error" in done.stdout and "1 of 1 launches do not compile" in done.stdout
