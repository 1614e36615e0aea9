"""Ahead-of-time compilation for chips that are not here: what it measures, refuses and survives; the accepted rows."""

import dataclasses
import json
import os
import signal
import time

import pytest
import triton
import triton.language as tl
from click.testing import CliRunner

from benchmarks.kernels import aot
from benchmarks.kernels.aot import CompiledCell, compile_cell
from benchmarks.kernels.cells.cell import Cell
from fluxq.kernels.dispatch import PROVEN, minor
from fluxq.kernels.tiles import CHIPS

compiles = pytest.mark.slow


@triton.jit
def matmul_kernel(a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for start in range(0, K, BLOCK_K):
        x = tl.load(a + m * K + start + k[None, :])
        y = tl.load(b + n[:, None] * K + start + k[None, :])
        acc = tl.dot(x, y.T, acc, out_dtype=ACC)
    tl.store(c + m * BLOCK_N + n[None, :], acc.to(tl.bfloat16))


def matmul(kind: str, element: str, acc: tl.dtype, size: int = 128, **options: int) -> Cell:
    return Cell(
        matmul_kernel,
        kind,
        {"a": f"*{element}", "b": f"*{element}", "c": "*bf16", "K": "i32:16"},
        {"BLOCK_M": size, "BLOCK_N": size, "BLOCK_K": 64, "ACC": acc},
        {"num_warps": 8, "num_stages": 3} | options,
        tensor_core=kind,
    )


BF16 = matmul("bf16", "bf16", tl.float32)
INT8 = matmul("int8", "i8", tl.int32)
FP8 = matmul("fp8", "fp8e4nv", tl.float32)


@compiles
@pytest.mark.parametrize(
    ("cell", "target", "instruction"),
    [
        (INT8, "sm_80", "IMMA"),
        (FP8, "sm_89", "QMMA"),
        (BF16, "sm_90", "HGMMA"),
        (FP8, "sm_90", "QGMMA"),
        (BF16, "sm_100", "UTCHMMA"),
        (FP8, "sm_120", "QMMA"),
        (INT8, "gfx942", "v_mfma_i32"),
        (FP8, "gfx1201", "v_wmma_f32"),
    ],
    ids=lambda value: value.format if isinstance(value, Cell) else value,
)
def test_a_matmul_uses_the_matrix_unit(cell, target, instruction):
    row = compile_cell(cell, target)
    assert row.ok, row.reason
    assert row.instruction and row.instruction.startswith(instruction)
    assert row.spills == 0 and 16 < (row.registers or 0) <= 255
    assert row.shared is not None and 0 < row.shared <= aot.TARGETS[target].shared


@compiles
def test_what_the_chip_lacks_is_the_reason():
    row = compile_cell(FP8, "sm_80")
    assert not row.ok and "fp8e4nv not supported" in (row.reason or "")


@compiles
def test_too_much_shared_memory_is_the_reason():
    cell = dataclasses.replace(BF16, options={"num_warps": 8, "num_stages": 5})
    row = compile_cell(cell, "sm_89")
    assert not row.ok and row.reason == f"{row.shared} bytes of shared memory, limit {99 * 1024}"
    assert compile_cell(cell, "sm_90").ok


@compiles
def test_spills_and_registers_are_the_reason():
    row = compile_cell(matmul("bf16", "bf16", tl.float32, num_warps=1), "sm_80")
    assert not row.ok and row.spills and f"{row.spills} spills" in (row.reason or "")
    row = compile_cell(dataclasses.replace(BF16, max_registers=32), "sm_90")
    assert not row.ok and row.reason == f"{row.registers} registers, limit 32"


@compiles
def test_a_wrong_matrix_instruction_is_the_reason():
    row = compile_cell(dataclasses.replace(BF16, tensor_core="fp8"), "sm_90")
    assert not row.ok and row.reason == "no fp8 matrix instruction"


@compiles
def test_an_argument_without_a_type_is_named():
    row = compile_cell(dataclasses.replace(BF16, arguments={"a": "*bf16", "b": "*bf16", "c": "*bf16"}), "sm_90")
    assert not row.ok and "cell matmul_kernel bf16 says nothing of K" in (row.reason or "")


def test_a_compiler_that_aborts_or_hangs_is_a_row(monkeypatch):
    monkeypatch.setattr(aot, "compile_for", lambda cell, target: os.kill(os.getpid(), signal.SIGKILL))
    assert compile_cell(BF16, "sm_90").reason == "the compiler: the process ended without a result (exit code -9)"
    monkeypatch.setattr(aot, "compile_for", lambda cell, target: time.sleep(60))
    assert compile_cell(BF16, "sm_90", seconds=0.2).reason == "the compiler: no result after 0.2 s"


# --- the comparison with what was accepted, and the command

ROW = CompiledCell("matmul_kernel", "bf16", "sm_90", "HGMMA.64x128x16", registers=90, spills=0, shared=65536, ok=True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"registers": 98}, None),
        ({"registers": 80, "shared": 0}, None),
        ({"registers": 99}, "registers is 99, accepted 90"),
        ({"spills": 1}, "spills is 1, accepted 0"),
        ({"shared": 65537}, "shared is 65537, accepted 65536"),
        ({"instruction": "HMMA.16816"}, "instruction is HMMA.16816, accepted HGMMA.64x128x16"),
        ({"ok": False, "reason": "no luck"}, "ok is False, accepted True (no luck)"),
    ],
)
def test_what_is_worse_than_accepted_is_named(changes, complaint):
    found = aot.compare(dataclasses.replace(ROW, **changes), ROW)
    assert found == ([f"matmul_kernel bf16 sm_90: {complaint}"] if complaint else [])


def test_a_cell_that_starts_to_run_must_be_accepted():
    """Else a dispatcher would go on avoiding it."""
    failed = dataclasses.replace(ROW, ok=False, reason="9 spills", spills=9)
    assert aot.compare(ROW, failed) == ["matmul_kernel bf16 sm_90: ok is True, accepted False (9 spills)"]
    assert aot.compare(failed, failed) == []


@pytest.fixture
def accepted(tmp_path, monkeypatch):
    """The command with one file of one cell, and a compiler that knows its row; another version's row is there."""
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"2.0": [dataclasses.asdict(ROW)]}))
    monkeypatch.setattr(aot, "COMPILED", tmp_path)
    monkeypatch.setattr("fluxq.kernels.dispatch.COMPILED", tmp_path)
    monkeypatch.setattr(aot, "REQUIRED", {})
    monkeypatch.setattr(aot, "KERNEL_FILES", ("file",))
    monkeypatch.setattr(aot, "all_cells", lambda files: [dataclasses.replace(BF16, targets=("sm_89", "sm_90"))])
    monkeypatch.setattr(aot, "compile_cell", lambda cell, target: dataclasses.replace(ROW, target=target))
    return file


def test_the_command_accepts_once_told_to_and_then_compares(accepted, tmp_path, monkeypatch):
    call = CliRunner().invoke
    new = call(aot.main, [])
    assert new.exit_code == 1 and "! matmul_kernel bf16 sm_89: not in kernels/" in new.output
    assert call(aot.main, ["--write"]).exit_code == 0
    rows = json.loads(accepted.read_text())
    assert [row["target"] for row in rows[minor(triton.__version__)]] == ["sm_89", "sm_90"] and len(rows) == 2
    assert call(aot.main, []).exit_code == 0
    monkeypatch.setattr(aot, "compile_cell", lambda cell, target: dataclasses.replace(ROW, target=target, spills=3))
    (tmp_path / "out").mkdir()
    worse = call(aot.main, ["--target", "sm_90", "--kernel", "file", "--json", str(tmp_path / "out" / "rows.json")])
    assert worse.exit_code == 1 and "sm_90: spills is 3, accepted 0" in worse.output and "sm_89" not in worse.output
    (row,) = json.loads((tmp_path / "out" / "rows.json").read_text())["rows"]
    assert row["spills"] == 3 and row["target"] == "sm_90"


def test_writing_some_rows_keeps_the_others(accepted, monkeypatch):
    call = CliRunner().invoke
    call(aot.main, ["--write"])
    monkeypatch.setattr(aot, "compile_cell", lambda cell, target: dataclasses.replace(ROW, target=target, registers=7))
    call(aot.main, ["--write", "--target", "sm_89"])
    rows = aot.accepted_rows(triton.__version__).values()
    assert [(row.target, row.registers) for row in rows] == [("sm_89", 7), ("sm_90", 90)]


@pytest.mark.parametrize(("option", "cure"), [("--target", "sm_100, sm_103"), ("--kernel", "file")])
def test_an_unknown_name_lists_the_known_ones(accepted, option, cure):
    done = CliRunner().invoke(aot.main, [option, "sm_91"])
    assert done.exit_code == 2 and "'sm_91' is none of" in done.output and cure in done.output.replace("\n", " ")


# --- the cells of the kernel files


def test_every_cell_is_accepted_for_every_chip_it_is_meant_for():
    assert tuple(aot.TARGETS) == CHIPS
    cells = aot.all_cells()
    names = [(cell.name, cell.format, target) for cell in cells for target in cell.targets or CHIPS]
    assert len(names) == len(set(names)), "two cells of a kernel need two formats"
    for version in PROVEN:
        accepted = aot.accepted_rows(version)
        chips = aot.REQUIRED.get(version, CHIPS)
        assert {name for name in names if name[2] in chips} <= set(accepted), "python -m benchmarks.kernels.aot --write"
        assert set(accepted) <= set(names), "python -m benchmarks.kernels.aot --write drops cells that are gone"
        for row in accepted.values():
            assert row.ok == (row.reason is None)
            assert not row.ok or row.spills == 0


REQUIRED = aot.REQUIRED.get(minor(triton.__version__), CHIPS)
ONE_CELL_EACH = {
    f"{file} {target}": cell
    for file in aot.KERNEL_FILES
    for target in ("sm_80", "sm_90", "sm_120", "gfx942")
    for cell in reversed(aot.all_cells([file]))  # the first stays
    if target in REQUIRED and target in (cell.targets or CHIPS)
}


@compiles
@pytest.mark.parametrize("name", ONE_CELL_EACH)
def test_a_cell_of_each_file_compiles_to_what_was_accepted(name):
    cell, target = ONE_CELL_EACH[name], name.split()[1]
    row = compile_cell(cell, target)
    assert aot.compare(row, aot.accepted_rows(triton.__version__)[aot.key(row)]) == []
