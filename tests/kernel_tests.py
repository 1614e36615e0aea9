"""Test files of tests/kernels, for what they define: checks, operands, planted faults."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def sibling(name: str, prefix: str = "beside") -> ModuleType:
    """Execute a test file of tests/kernels anew, as the module PREFIX_NAME; its tests are then plain functions."""
    file = Path(__file__).parent / "kernels" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{prefix}_{name}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
