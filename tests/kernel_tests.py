"""Test files of tests/kernels, for what they define: checks, operands, planted faults."""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from fluxq.kernels import interpreter


def sibling(name: str, prefix: str = "beside") -> ModuleType:
    """Execute a test file of tests/kernels anew, as the module PREFIX_NAME; its tests are then plain functions."""
    return executed(f"{prefix}_{name}", Path(__file__).parent / "kernels" / f"{name}.py")


def with_fault(kernel: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """Return a kernel's file as a module of its own, with one text replaced."""
    source = Path(str(kernel.__file__))
    text = source.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{source.name} does not hold {old!r} once"
    return load_module(f"faulty_{source.stem}", text.replace(old, new), folder)


def load_module(name: str, text: str, folder: Path) -> ModuleType:
    """Write a text into a folder, and execute it as the module NAME."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return executed(name, path)


def executed(name: str, file: Path) -> ModuleType:
    """Execute a file as the module NAME."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # imports and dataclasses look there
    spec.loader.exec_module(module)
    return module


def launches_on_a_gpu() -> bool:
    """Tell whether benchmarks/kernels/on_gpu.py runs the tests: there two launches may add up in two orders."""
    return isinstance(interpreter.interpreting, partial)


def on_hopper() -> bool:
    """Tell whether kernels may run on the matrix unit that keeps 13 bits of sums of fp8 products."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def lost_in_the_unit(k: int, acc_split: int = 0) -> int:
    """Number of fp32 roundings that Hopper's matrix unit may lose of a sum of k fp8 products; 0 elsewhere."""
    steps = -(-min(k, acc_split or k) // 32)
    return (32 + 1) * 2 ** (24 - 13) * steps if on_hopper() else 0
