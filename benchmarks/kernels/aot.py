"""Compiles kernels for ten chips without having one, and compares what came out with what was expected.

    python -m benchmarks.kernels.aot                                       every cell for every chip
    python -m benchmarks.kernels.aot --target sm_90 --kernel scaled_matmul --json rows.json
    python -m benchmarks.kernels.aot --write                               accept what came out, into kernels/compiled

A row is `ok` if the cell compiles, spills no register, fits the chip's shared memory, stays within its registers and,
for a matmul, has the chip's matrix instruction of its kind, which ptxas did not have to serialize. kernels/compiled
holds the accepted rows, a file for each kernel file, by Triton version. The command fails when a row is worse than the
accepted one, or new. With an older Triton only the chips of REQUIRED must have been compiled for.
"""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks.kernels import sass
from benchmarks.kernels.apart import apart
from benchmarks.kernels.cells.cell import Cell
from fluxq.base.files import write_json, write_text
from fluxq.kernels.dispatch import COMPILED, accepted_files, minor
from fluxq.kernels.tiles import CHIPS


@dataclass(frozen=True)
class CompiledCell:
    """Outcome of compiling a cell, a kernel at one of its tiles, for one chip.

    instruction: the most frequent matrix instruction.
    registers: per thread.
    spills: loads and stores of spilled registers.
    shared: bytes of shared memory.
    warps: that one multiprocessor holds at once, by registers and shared memory.
    executed: instructions an element on the common path, of a cell that says how many elements a program has.
    loop: instructions of the loop around the matrix instructions.
    waits: of that loop, for wgmma, each.
    load: bytes that most loads of global memory move a thread.
    remarks: of ptxas, on matrix instructions that wait or are serialized: "C7510" to "C7519".
    reason: of a cell that is not ok. NVIDIA's chips alone have the six before it.
    """

    kernel: str
    format: str
    target: str
    instruction: str | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    warps: int | None = None
    executed: float | None = None
    loop: int | None = None
    waits: float | None = None
    load: int | None = None
    remarks: str | None = None
    ok: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Target:
    """A chip as the compiler and the checks know it.

    shared: bytes of shared memory that one block may use. held: bytes of it that a multiprocessor has. warps: that a
    multiprocessor holds at most. blocks: that it holds at most.
    """

    backend: str
    architecture: int | str
    shared: int
    held: int = 0
    warps: int = 0
    blocks: int = 0
    warp_size: int = 32


@click.command()
@click.option("--target", "targets", multiple=True, help="Only this chip (repeatable).")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel file (repeatable).")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the rows here.")
@click.option("--write", is_flag=True, help="Accept the rows: write them into kernels/compiled.")
def main(targets: tuple[str, ...], kernels: tuple[str, ...], json_file: Path | None, write: bool) -> None:
    """Compile kernels ahead of time and compare with kernels/compiled."""
    _check_names("--target", targets, CHIPS)
    _check_names("--kernel", kernels, KERNEL_FILES)
    chips = targets or REQUIRED.get(minor(triton.__version__), CHIPS)
    accepted = accepted_rows(triton.__version__)
    rows, worse = [], []
    click.echo(f"triton {triton.__version__}\n{HEADING}")
    for cell in all_cells(kernels or KERNEL_FILES):
        for target in chips:
            if cell.targets and target not in cell.targets:
                continue
            row = compile_cell(cell, target)
            rows.append(row)
            complaints = compare(row, accepted.get(key(row)))
            worse += complaints
            click.echo(line(row) + "".join(f"\n  ! {text}" for text in complaints))
    if json_file:
        write_json(json_file, {"triton": triton.__version__, "rows": [asdict(row) for row in rows]})
    if write:
        write_accepted(triton.__version__, rows, kernels or KERNEL_FILES)
    elif worse:
        raise click.ClickException(f"{len(worse)} differences from kernels/{COMPILED.name}; --write accepts them")


def all_cells(files: Iterable[str] | None = None) -> list[Cell]:
    """The cells of the given kernel files, by default of all."""
    return [cell for name in files or KERNEL_FILES for cell in import_module(f"benchmarks.kernels.cells.{name}").CELLS]


def compile_cell(cell: Cell, target: str, seconds: float = 600) -> CompiledCell:
    """Compile in a process of its own: the compiler may abort, and what it prints is not for people."""
    try:
        return apart(_compiled, cell, target, seconds=seconds, method="fork")
    except RuntimeError as problem:
        return CompiledCell(cell.name, cell.format, target, reason=f"the compiler: {problem}")


def compare(row: CompiledCell, accepted: CompiledCell | None) -> list[str]:
    """Return a sentence for each way in which a row is worse than the accepted one.

    A row that was never accepted is a complaint in itself.
    """
    name = f"{row.kernel} {row.format} {row.target}"
    if accepted is None:
        return [f"{name}: not in kernels/{COMPILED.name} for Triton {minor(triton.__version__)}"]
    complaints = []
    if row.ok != accepted.ok:
        complaints.append(f"{name}: ok is {row.ok}, accepted {accepted.ok} ({row.reason or accepted.reason})")
    if row.instruction != accepted.instruction:
        complaints.append(f"{name}: instruction is {row.instruction}, accepted {accepted.instruction}")
    for field, slack in (
        ("registers", 8),
        ("spills", 0),
        ("shared", 0),
        ("executed", 0.5),
        ("loop", 8),
        ("waits", 0),
    ):
        now, then = getattr(row, field), getattr(accepted, field)
        if now is not None and then is not None and now > then + slack:
            complaints.append(f"{name}: {field} is {now}, accepted {then}")
    if more := {*_words(row.remarks)} - {*_words(accepted.remarks)}:
        complaints.append(f"{name}: ptxas remarks {', '.join(sorted(more))}, accepted {accepted.remarks or 'none'}")
    return complaints


def _words(remarks: str | None) -> list[str]:
    return remarks.split(", ") if remarks else []


def accepted_rows(version: str) -> dict[tuple[str, str, str], CompiledCell]:
    """The rows of kernels/compiled for a Triton version, by kernel, format and target."""
    return {key(row): row for row in (CompiledCell(**fields) for _, fields in accepted_files(version))}


def write_accepted(version: str, rows: list[CompiledCell], files: Iterable[str]) -> None:
    """Put rows of a Triton version into the files of their kernels, one to a line; rows of cells gone are dropped."""
    new = {key(row): row for row in rows}
    for name in files:
        file = COMPILED / f"{name}.json"
        names = {(cell.name, cell.format, target) for cell in all_cells([name]) for target in cell.targets or CHIPS}
        by_version = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        old = {key(row): row for row in (CompiledCell(**fields) for fields in by_version.get(minor(version), []))}
        by_version[minor(version)] = [asdict(row) for place, row in sorted((old | new).items()) if place in names]
        parts = [
            f"{json.dumps(v)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in by_version[v]) + "\n]"
            for v in sorted(by_version)
        ]
        write_text(file, "{\n" + ",\n".join(parts) + "\n}\n")


def key(row: CompiledCell) -> tuple[str, str, str]:
    return row.kernel, row.format, row.target


def line(row: CompiledCell) -> str:
    """A row as a line of the table under HEADING."""
    cells = (row.kernel, row.format, row.target, row.registers, row.spills, row.shared, row.instruction)
    texts = ["-" if cell is None else str(cell) for cell in cells]
    return LINE.format(*texts, "ok" if row.ok else f"no: {row.reason}")


def _compiled(cell: Cell, target: str) -> CompiledCell:
    """Compile a cell and read what came out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MLIR prints whole programs there
    try:
        return _inspect(cell, target, compile_for(cell, target))
    except Exception as error:  # whatever the compiler raises is this row's result
        text = " ".join(str(error).split()).rpartition(" ^ ")[2]  # after the line of source that Triton quotes
        return CompiledCell(cell.name, cell.format, target, reason=f"{type(error).__name__}: {text[:160]}")


def compile_for(cell: Cell, target: str) -> Any:
    """Compile a cell for a chip, as its launch would be there; `asm` of the result has the texts."""
    chip = TARGETS[target]
    names = cell.kernel.arg_names
    unknown = [name for name in names if name not in cell.arguments and name not in cell.constants]
    if unknown:
        raise ValueError(f"cell {cell.name} {cell.format} says nothing of {', '.join(unknown)}")
    types = {path: text for i, name in enumerate(names) for path, text in _leaves((i,), cell.arguments.get(name))}
    aligned = [path for path, text in types.items() if isinstance(text, str) and re.search(r"^\*|:16$", text)]
    fixed = {path: value for path, value in types.items() if len(path) > 1 and not isinstance(value, str)}
    kind = GluonASTSource if cell.kernel.is_gluon() else ASTSource
    source = kind(
        cell.kernel,
        {name: _signature(cell.arguments.get(name)) for name in names},
        constexprs=cell.constants | fixed,
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    gpu = GPUTarget(chip.backend, chip.architecture, chip.warp_size)
    here = SimpleNamespace(get_current_target=lambda: gpu)  # kernels ask for their chip
    with mock.patch.object(triton.runtime.driver, "_active", here):
        return triton.compile(source, target=gpu, options=cell.options)


def _leaves(path: tuple[int, ...], types: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield the places of a cell's argument, with types or constants: one, or those of a tuple."""
    if isinstance(types, tuple):
        for i, each in enumerate(types):
            yield from _leaves((*path, i), each)
    else:
        yield path, types


def _signature(types: Any) -> Any:
    """Return a cell's argument as ASTSource spells its type; a tuple's kind stays, by which kernels know its names."""
    if isinstance(types, tuple):
        return getattr(type(types), "_make", tuple)(map(_signature, types))
    return types.removesuffix(":16") if isinstance(types, str) else "constexpr"


def _inspect(cell: Cell, target: str, compiled: Any) -> CompiledCell:
    chip = TARGETS[target]
    measured: dict[str, Any] = {}
    if chip.backend == "cuda":
        instructions, registers, spills, measured = _read_sass(cell, chip, compiled)
    else:
        instructions, registers, spills = _read_amd(compiled.asm["amdgcn"])
    common = collections.Counter(instructions).most_common(1)
    shared = compiled.metadata.shared
    reasons = []
    if spills:
        reasons.append(f"{spills} spills")
    if cell.max_registers and registers > cell.max_registers:
        reasons.append(f"{registers} registers, limit {cell.max_registers}")
    if shared > chip.shared:
        reasons.append(f"{shared} bytes of shared memory, limit {chip.shared}")
    for kind in (cell.tensor_core or "").split():
        wanted = MATRIX_INSTRUCTIONS[chip.backend][kind]
        if not any(re.match(wanted, name) for name in instructions):
            reasons.append(f"no {kind} matrix instruction")
    if serialized := (measured.get("remarks") or "").replace(WAITS, "").strip(", "):
        reasons.append(f"ptxas serializes matrix instructions ({serialized})")
    return CompiledCell(
        kernel=cell.name,
        format=cell.format,
        target=target,
        instruction=common[0][0] if common else None,
        registers=registers,
        spills=spills,
        shared=shared,
        ok=not reasons,
        reason="; ".join(reasons) or None,
        **measured,
    )


def _read_sass(cell: Cell, chip: Target, compiled: Any) -> tuple[list[str], int, int, dict[str, Any]]:
    """Matrix instructions, registers, spills and the other counts of a CompiledCell, of an NVIDIA binary."""
    text = sass.disassemble(compiled.asm["cubin"])
    instructions = sass.parse(text)
    registers, threads = int(re.search(r"\bREG:(\d+)", text)[1]), 32 * compiled.metadata.num_warps  # pyright: ignore
    loop = sass.main_loop(instructions)
    elements = cell.elements * (1 if sass.has_loop(instructions) else cell.turns)
    matrix = sass.matrix_instructions(loop)
    measured = {
        "warps": _resident_warps(chip, registers, compiled.metadata.shared, threads // 32),
        "executed": round(sass.executed(instructions) * threads / elements, 1) if elements else None,
        "loop": len(loop) or None,
        "waits": round(sass.waits(loop) / matrix, 2) if matrix and chip.architecture == 90 else None,
        "load": sass.bytes_per_load(instructions) or None,
    }
    if cell.tensor_core and chip.architecture == 90:
        measured["remarks"] = ", ".join(sass.remarks(compiled.asm["ptx"], 90))
    noise = r"\.(tnsp[AB]|GSB\d|gdesc|reuse)\b"
    names = [re.sub(noise, "", i.operation) for i in instructions if sass.MATRIX.match(i.operation)]
    spills = sum(i.operation.split(".")[0] in ("LDL", "STL") for i in instructions)
    return names, registers, spills, measured


def _resident_warps(chip: Target, registers: int, shared: int, warps: int) -> int:
    """Warps that fit on a multiprocessor at once, of blocks of so many.

    Each of its four parts has 16384 registers, given to warps by 256; a block takes 1 KiB of shared memory of its own
    (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
    """
    by_registers = 4 * (16384 // (-(-registers * 32 // 256) * 256)) // warps
    by_shared = chip.held // (shared + 1024)
    return min(by_registers, by_shared, chip.warps // warps, chip.blocks) * warps


def _read_amd(assembly: str) -> tuple[list[str], int, int]:
    """Matrix instructions, registers and spills of AMD assembly, by its own metadata."""
    counts = {
        name: int(match[1]) if (match := re.search(rf"\.{name}:\s*(\d+)", assembly)) else 0
        for name in ("vgpr_count", "vgpr_spill_count")
    }
    return re.findall(r"\bv_(?:mfma|wmma|smfmac)\w*", assembly), counts["vgpr_count"], counts["vgpr_spill_count"]


def _check_names(option: str, names: tuple[str, ...], choices: Any) -> None:
    for name in names:
        if name not in choices:
            raise click.BadParameter(f"{name!r} is none of {', '.join(choices)}", param_hint=option)


# By kind: H.. is 16-bit, I.. int8, Q.. fp8, O.. fp4; .SF takes block scales. UTC.. is tcgen05, ..G.. is wgmma.
MATRIX_INSTRUCTIONS = {
    "cuda": {
        "bf16": r"(H|HG|UTCH)MMA",
        "fp16": r"(H|HG|UTCH)MMA",
        "int8": r"(I|IG|UTCI)MMA",
        "fp8": r"(Q|QG|UTCQ)MMA",
        "mxfp8": r"QMMA\.SF|UTCQMMA",
        "mxfp4": r"OMMA\.SF|UTCOMMA",
        "nvfp4": r"OMMA\.SF|UTCOMMA",
    },
    "hip": {
        "bf16": r"v_(mfma|wmma)_f32_\w*bf16",
        "fp16": r"v_(mfma|wmma)_f32_\w*_f16",
        "int8": r"v_(mfma|wmma)_i32_\w*i(8|u8)",
        "fp8": r"v_(mfma|wmma)_f32_\w*(fp8|f8f6f4)",
        "mxfp8": r"v_mfma_scale_f32_\w*f8f6f4",
        "mxfp4": r"v_mfma_scale_f32_\w*f8f6f4",
        "nvfp4": r"(?!)",  # no AMD chip has it
    },
}

WAITS = "C7517"  # a remark of ptxas: it waits for wgmma once a step, where partial sums move to true fp32 ones
REQUIRED = {"3.6": ("sm_80", "sm_86", "sm_89", "sm_90")}  # of other Triton versions all
# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD's LDS: CDNA 3,
# CDNA 4 and RDNA 4 instruction set guides.
KB = 1024
TARGETS = {
    "sm_80": Target("cuda", 80, 163 * KB, 164 * KB, 64, 32),
    "sm_86": Target("cuda", 86, 99 * KB, 100 * KB, 48, 16),
    "sm_89": Target("cuda", 89, 99 * KB, 100 * KB, 48, 24),
    "sm_90": Target("cuda", 90, 227 * KB, 228 * KB, 64, 32),
    "sm_100": Target("cuda", 100, 227 * KB, 228 * KB, 64, 32),
    "sm_103": Target("cuda", 103, 227 * KB, 228 * KB, 64, 32),
    "sm_120": Target("cuda", 120, 99 * KB, 100 * KB, 48, 24),
    "gfx942": Target("hip", "gfx942", 64 * KB, warp_size=64),
    "gfx950": Target("hip", "gfx950", 160 * KB, warp_size=64),
    "gfx1201": Target("hip", "gfx1201", 64 * KB),
}
CELL_FILES = Path(__file__).parent / "cells"
KERNEL_FILES = tuple(sorted({file.stem for file in CELL_FILES.glob("*.py")} - {"cell"}))  # each holds CELLS
LINE = "{:<28} {:<22} {:<8} {:>5} {:>6} {:>7}  {:<34} {}"
HEADING = LINE.format("kernel", "format", "target", "regs", "spills", "shared", "instruction", "").rstrip()

if __name__ == "__main__":
    main()
