"""Compiled cells of kernels/compiled: the outcome of compiling each kernel at each tile, by chip and version of Triton.

`python -m benchmarks.kernels.aot --write` writes them. The dispatcher does not choose a cell that is not `ok`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMPILED = Path(__file__).parent / "compiled"
PROVEN = ("3.6", "3.8", "3.9")  # Triton versions that tests/kernels/test_interpreter.py passes on


def accepted_files(version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of the kernel file, fields of a `CompiledCell` of benchmarks/kernels/aot.py) for a Triton version."""
    for file in sorted(COMPILED.glob("*.json")):
        for fields in json.loads(file.read_text(encoding="utf-8")).get(minor(version), []):
            yield file.stem, fields


def minor(version: str) -> str:
    """Return the first two numbers of a version, which tell compilers apart."""
    return ".".join(version.split(".")[:2])
