"""Launches kernels on a GPU from tensors that lie on the CPU, so that the tests of the kernels judge a GPU unchanged.

    with launching_on(torch.device("cuda")):
        kernel[grid](x, y, BLOCK=128)  # tensors on the CPU

is the counterpart of `interpreting`. Before each launch the whole storage of every argument tensor is copied to the
GPU, with what lies around the tensor in it, so that guard bytes guard there too; after it all of them are copied back.
Tensors that share a storage share its copy.

As a pytest plugin, `pytest -p benchmarks.kernels.on_gpu --on-device cuda tests/kernels/test_*_kernel.py`, it takes
the place of the interpreter in test files. Left out are tests that plant a fault in a kernel, which then reads what is
not its own, and those of what happens without an interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia import hopper
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fluxq.kernels import dispatch, interpreter
from fluxq.kernels.tiles import chip_of


@contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Inside the block, kernels launched with tensors on the CPU run on `device`.

    For the CPU itself they run, on copies too, by what is there already: the interpreter, if it is switched on.
    """
    below = JITFunction.run

    def run(kernel: JITFunction, *args: Any, **options: Any) -> Any:
        copies = _Copies(device)
        moved, named = copies.of(args), {name: copies.of(value) for name, value in options.items()}
        result = below(kernel, *moved, **named)
        copies.write_back()
        return result

    setattr(JITFunction, "run", run)  # noqa: B010 - pyright knows the method by another type
    try:
        yield
    finally:
        setattr(JITFunction, "run", below)  # noqa: B010


class _Copies:
    """Copies of storages on a device, by the address of the original."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}  # (the original's bytes, the copy's)

    def of(self, value: Any) -> Any:
        """The value with every tensor in it on the device."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (TensorDescriptor, hopper.TensorDescriptor)):
            return replace(value, base=self._tensor(value.base))
        if isinstance(value, tuple):  # a kernel knows the parts of a named one by their names
            return getattr(value, "_make", tuple)(map(self.of, value))
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.copies:
            whole = torch.tensor((), dtype=torch.uint8, device=tensor.device).set_(storage)
            self.copies[storage.data_ptr()] = whole, whole.to(self.device, copy=True)
        copy = self.copies[storage.data_ptr()][1].untyped_storage()
        view = torch.tensor((), dtype=tensor.dtype, device=self.device)
        return view.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    def write_back(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a fault of the kernel is raised here, not at some later test
        for original, copy in self.copies.values():
            original.copy_(copy)


# What follows is the pytest plugin.

LEFT_OUT = ("_fault_", "outside_the_interpreter")  # in the names of tests
BLOCK_SCALED = "block_scaled_matmul"  # whose tests take every format of it


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--on-device", default="cuda", help="device that kernels run on; cpu is the interpreter on copies")
    parser.addoption("--shard", default="0/1", help="I/N: of the tests every N'th, from the I'th")
    parser.addoption("--outcomes", type=Path, help="file that gets a JSON line for each test begun and ended")
    parser.addoption("--at-most", type=int, help="tests of each file, from the first")


def pytest_configure(config: Any) -> None:
    """Before the test files are imported, which take `interpreting` from its module."""
    device = torch.device(config.getoption("--on-device"))
    if device.type == "cuda":
        interpreter.interpreting = partial(_launching, device)
    else:
        interpreter.interpreting = _interpreting_copies


_interpreting = interpreter.interpreting


@contextmanager
def _launching(device: torch.device, chip: str = "") -> Iterator[None]:
    """Launch on the device; a test that asks for another chip is skipped."""
    import pytest  # which launches outside of tests do without

    here = chip_of(device)
    if chip not in ("", here):
        pytest.skip(f"it is for {chip}, this is {here}")
    with launching_on(device):
        yield


@contextmanager
def _interpreting_copies() -> Iterator[None]:
    with _interpreting(), launching_on(torch.device("cpu")):
        yield


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    fit = [item for item in items if not any(part in item.name for part in LEFT_OUT)]
    on_gpu = str(config.getoption("--on-device")).startswith("cuda")
    if on_gpu and dispatch.refusal(BLOCK_SCALED, "nvfp4", chip_of(torch.device(config.getoption("--on-device")))):
        fit = [item for item in fit if BLOCK_SCALED not in Path(item.path).name]
    if config.getoption("--at-most"):
        files = dict.fromkeys(item.path for item in fit)
        fit = [item for path in files for item in [i for i in fit if i.path == path][: config.getoption("--at-most")]]
    first, step = map(int, config.getoption("--shard").split("/"))
    kept = fit[first::step]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    for item in items:
        _note(config, {"test": item.nodeid, "outcome": "not run"})


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """A line for what failed in any phase, and for what passed when its call is over."""
    if call.excinfo is not None and call.excinfo.typename != "Skipped":
        text = str(call.excinfo.value).strip().splitlines() or [call.excinfo.typename]
        outcome = {"outcome": "failed", "message": f"{call.excinfo.typename}: {text[0][:400]}"}
    elif call.excinfo is not None:
        outcome = {"outcome": "skipped"}
    elif call.when == "call":
        outcome = {"outcome": "passed", "seconds": round(call.duration, 3)}
    else:
        return
    _note(item.config, {"test": item.nodeid, **outcome})


def _note(config: Any, line: dict[str, Any]) -> None:
    file = config.getoption("--outcomes")
    if file:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
