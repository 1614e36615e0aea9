"""Compiled cells of kernels/compiled: the outcome of compiling each kernel at each tile, by chip and version of Triton.

`python -m benchmarks.kernels.aot --write` writes them. The dispatcher does not choose a cell that is not `ok`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPILED = Path(__file__).parent / "compiled"
PROVEN = ("3.6", "3.8", "3.9")  # Triton versions that tests/kernels/test_interpreter.py passes on


@dataclass(frozen=True)
class CompiledCell:
    """Outcome of compiling a cell, a kernel at one of its tiles, for one chip.

    instruction: the most frequent matrix instruction.
    registers: per thread.
    spills: loads and stores of spilled registers.
    shared: bytes of shared memory.
    reason: of a cell that is not ok.
    """

    kernel: str
    format: str
    target: str
    instruction: str | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    ok: bool = False
    reason: str | None = None


def accepted_files(version: str) -> Iterator[tuple[str, CompiledCell]]:
    """Yield (name of the kernel file, compiled cell) for a Triton version."""
    for file in sorted(COMPILED.glob("*.json")):
        for fields in json.loads(file.read_text(encoding="utf-8")).get(minor(version), []):
            yield file.stem, CompiledCell(**fields)


def minor(version: str) -> str:
    """Return the first two numbers of a version, which tell compilers apart."""
    return ".".join(version.split(".")[:2])
