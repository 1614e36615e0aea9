"""Reads machine code for NVIDIA's chips: what a thread executes, what a loop holds, what ptxas remarked on.

Counts are of instructions on the common path: the slow path of a division, which ptxas puts behind a forward branch as
a CALL, is left out. No stall is known here: a count is the least time that the chip's schedulers need, not a forecast.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

MATRIX = re.compile(r"(?:H|Q|O|I|HG|QG|IG|UTC\w*)MMA\b")
WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes that a load moves a thread


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: `@P0 BRA 0x1b0` at an address has the predicate "@P0" and the operation "BRA"."""

    address: int
    predicate: str
    operation: str
    operands: str

    @property
    def target(self) -> int | None:
        """Address that a branch goes to; None for other instructions, and for branches by a register."""
        found = re.search(r"0x([0-9a-f]+)$", self.operands) if self.operation.startswith("BRA") else None
        return int(found[1], 16) if found else None


def disassemble(cubin: bytes) -> str:
    """Return what the disassembler that Triton brings prints of a binary, with its use of registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True)
    if done.returncode or "REG:" not in done.stdout:
        raise RuntimeError("cuobjdump: " + (done.stdout + done.stderr).strip().splitlines()[-1])
    return done.stdout


def remarks(ptx: str, architecture: int) -> list[str]:
    """Return the remarks of ptxas on matrix instructions that it had to serialize or wait for: "C7510" to "C7519".

    By the ptxas that Triton takes for the architecture; its versions differ in which that is.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [
            get_ptxas(architecture).path,
            f"-arch=sm_{architecture}a",
            "--fmad=false",
            "-v",
            str(source),
            "-o",
            str(source.with_suffix(".o")),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("ptxas: " + (done.stdout + done.stderr).strip().splitlines()[-1])
    return sorted(set(re.findall(r"\b(C751\d)\b", done.stdout + done.stderr)))


def parse(text: str) -> list[Instruction]:
    """Return the instructions in what `disassemble` printed; NOPs among them, to which some branches go."""
    found = []
    for line in re.finditer(r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([\w.]+)\s*([^;]*);", text):
        found.append(Instruction(int(line[1], 16), (line[2] or "").strip(), line[3], line[4].strip()))
    return found


def executed(instructions: list[Instruction]) -> int:
    """Count what a thread executes on the common path, each loop once."""
    place = {instruction.address: number for number, instruction in enumerate(instructions)}
    number = count = 0
    while number < len(instructions):
        at = instructions[number]
        count += at.operation != "NOP"
        if at.operation.startswith("EXIT") and not at.predicate:
            break
        target = at.target
        if target is not None and target > at.address:
            if not at.predicate or _is_slow_path(instructions[number + 1 : place[target]]):
                number = place[target]
                continue
        number += 1
    return count


def has_loop(instructions: list[Instruction]) -> bool:
    """Tell whether a branch goes back, to another place than its own."""
    return any(i.target is not None and i.target < i.address for i in instructions)


def _is_slow_path(block: list[Instruction]) -> bool:
    """Tell whether a block is the call of a division's slow path: a few instructions, none of memory."""
    names = [i.operation.split(".")[0] for i in block]
    return len(block) <= 16 and "CALL" in names and not {"LDG", "STG"} & set(names)


def main_loop(instructions: list[Instruction]) -> list[Instruction]:
    """Return the instructions of the innermost loop with the most matrix instructions; empty without any."""
    best: list[Instruction] = []
    for end in instructions:
        if end.target is not None and end.target < end.address:
            body = [i for i in instructions if end.target <= i.address <= end.address]
            inner = any(i.target is not None and end.target < i.target < i.address < end.address for i in body)
            if not inner and matrix_instructions(body) > matrix_instructions(best):
                best = body
    return best


def matrix_instructions(instructions: list[Instruction]) -> int:
    return sum(bool(MATRIX.match(i.operation)) for i in instructions)


def waits(instructions: list[Instruction]) -> int:
    """Count the waits for Hopper's asynchronous matrix instructions (wgmma)."""
    return sum(i.operation.startswith("WARPGROUP.DEPBAR") for i in instructions)


def bytes_per_load(instructions: list[Instruction]) -> int:
    """Return the bytes that the most frequent load of global memory moves a thread; 0 without any."""
    widths = [_width(i.operation) for i in instructions if re.match(r"LDG\b|LDGSTS\b", i.operation)]
    return max(set(widths), key=widths.count) if widths else 0


def _width(operation: str) -> int:
    return next((WIDTHS[word] for word in operation.split(".") if word in WIDTHS), 4)
