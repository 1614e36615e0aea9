"""Compiles every launch of the kernels' tests for a GPU, without one: the interpreter takes what no compiler does.

    pytest -p benchmarks.kernels.compile_launches tests/kernels/test_*_kernel.py

A pytest plugin. Launches are interpreted as ever. When the block of `interpreting` ends, which for most test files is
the fixture around the file, each is compiled once for the block's chip, or for FOR_OTHERS where the kernel is not
offered on that; what does not compile is an error of the test, or of its file's last test. Compiled rows
(benchmarks/kernels/aot.py) hold each kernel at the tiles that are offered; this takes the arguments that tests take:
one row, one stream, no bias, tensors that are not aligned. Kernels with a planted fault are interpreted alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fluxq.kernels import dispatch, interpreter
from fluxq.kernels.all_ops import OPS

FOR_OTHERS = "sm_100"  # chip of kernels that the block's chip is not offered
FAULT = "_fault_"  # in the names of tests that plant one


class Launch(NamedTuple):
    """Arguments and options of a kernel's launch, as the compiler specializes it."""

    kernel: JITFunction
    chip: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> None:
        with compiling_for(self.chip):
            self.kernel.warmup(*self.arguments, grid=(1,), **self.options)


_interpreting = interpreter.interpreting
_known: set[tuple[Any, ...]] = set()  # keys of launches noted in this process
_waiting: list[Launch] = []
_depth = 0
_faulty = False  # the test that runs now plants a fault


@contextmanager
def compiling(chip: str = "sm_90") -> Iterator[None]:
    """Interpret the block's launches as `interpreting` does; behind the outermost block, compile them.

    Raises:
        AssertionError: launches do not compile; it names each with the compiler's first cause.
    """
    global _depth
    _depth += 1
    try:
        with _interpreting(chip), _noting(chip):
            yield
    finally:
        _depth -= 1
    if not _depth:  # inside another block Triton's language is still the interpreter's
        launches = _waiting[:]
        _waiting.clear()
        wrong = [f"{it.kernel.__name__} for {it.chip}: {why}" for it in launches if (why := _failure(it))]
        assert not wrong, "\n".join([f"{len(wrong)} of {len(launches)} launches do not compile:", *wrong])


@contextmanager
def _noting(chip: str) -> Iterator[None]:
    below = JITFunction.run

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not _faulty:
            _note(Launch(kernel, _chip_for(kernel, chip), args, options))
        return below(kernel, *args, grid=grid, warmup=warmup, **options)

    with mock.patch.object(JITFunction, "run", run):
        yield


def _note(launch: Launch) -> None:
    key = _key(launch)
    if key not in _known:
        _known.add(key)
        _waiting.append(launch)


def _chip_for(kernel: JITFunction, chip: str) -> str:
    """Return the chip, or FOR_OTHERS if no format of the kernel's op is offered on it."""
    folder = Path(kernel.fn.__code__.co_filename).parent.name
    formats = OPS[folder].formats if folder in OPS else ()
    refused = [dispatch.refusal(folder, row, chip) for row in formats]
    return FOR_OTHERS if refused and all(refused) else chip


def _key(launch: Launch) -> tuple[Any, ...]:
    """Return what Triton knows a compiled kernel by: equal keys, one compilation."""
    with compiling_for(launch.chip):
        binder = launch.kernel.device_caches[_device(launch.chip)][-1]
        _, specialization, options = binder(*launch.arguments, **launch.options)
    return launch.kernel, launch.chip, str(specialization), str(options)


def _failure(launch: Launch) -> str:
    """Return the first cause of what the compiler raises; empty if the launch compiles."""
    try:
        launch.compile()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return f"{type(cause).__name__}: {str(cause)[:600]}"
    return ""


def _device(chip: str) -> int:
    """Return a chip's number, which is also that of the device under which Triton keeps what it compiled for it."""
    return int(chip.removeprefix("sm_"))


@contextmanager
def compiling_for(chip: str) -> Iterator[None]:
    """Name a chip to Triton, which then compiles for it and can launch nothing."""
    target = GPUTarget("cuda", _device(chip), 32)
    gpu = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: _device(chip),
        get_current_stream=lambda device: 0,
    )
    with mock.patch.object(triton.runtime.driver, "_active", gpu):
        yield


# What follows is the pytest plugin.


def pytest_configure() -> None:
    """Before the test files are imported, which take `interpreting` from its module."""
    interpreter.interpreting = compiling


def pytest_runtest_setup(item: Any) -> None:
    global _faulty
    _faulty = FAULT in item.name
