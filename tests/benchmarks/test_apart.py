"""Calls in processes of their own: what they return, and that nothing of theirs reaches this one."""

import os
import time

import pytest
import torch

from benchmarks.kernels import workloads
from benchmarks.kernels.apart import apart


@pytest.mark.slow
def test_a_call_returns_raises_ends_or_takes_too_long(capfd) -> None:
    assert apart(divmod, 7, 2, seconds=60) == (3, 1)
    with pytest.raises(RuntimeError, match="ValueError: invalid literal for int"):
        apart(int, "seven", seconds=60, method="fork")  # a server writes where it began to
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match=r"ended without a result \(exit code 3\)"):
        apart(os._exit, 3, seconds=60)
    with pytest.raises(RuntimeError, match=r"no result after 0\.2 s"):
        apart(time.sleep, 60, seconds=0.2)


@pytest.mark.slow
def test_its_process_is_no_copy_of_this_one(monkeypatch) -> None:
    """This one may hold a CUDA context, which a copy would not survive."""
    monkeypatch.setattr(workloads, "TOLERANCE", 7.0)
    tolerance = "__import__('benchmarks.kernels.workloads', fromlist=['*']).TOLERANCE"
    assert apart(eval, tolerance, seconds=60, method="fork") == 7.0
    assert apart(eval, tolerance, seconds=60) == 1e-2


@pytest.mark.gpu
def test_a_gpu_may_be_used_on_both_sides() -> None:
    ones = torch.ones(8, device="cuda")
    there = "__import__('torch').ones(8, device='cuda').sum().item()"
    assert apart(eval, there, seconds=60) == ones.sum().item()
