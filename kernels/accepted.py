"""Rows of kernels/compiled: how each kernel at each tile came out of the compiler, by chip and version of Triton.

`python -m benchmarks.kernels.aot --write` wrote it. A row that is not `ok` is known not to run on its chip, so that the
dispatcher does not choose it.
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
    """Outcome of one cell on one chip. registers: per thread. spills: loads and stores of spilled registers.

    shared: bytes of shared memory. instruction: the matrix instruction that is there most often. reason: why not ok.
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
    """(name of the kernel file, row) of all rows for a Triton version."""
    for file in sorted(COMPILED.glob("*.json")):
        for fields in json.loads(file.read_text(encoding="utf-8")).get(minor(version), []):
            yield file.stem, CompiledCell(**fields)


def minor(version: str) -> str:
    """The first two numbers of a version, which tell compilers apart."""
    return ".".join(version.split(".")[:2])
