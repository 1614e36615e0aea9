"""Planted faults stay where they are: each text stands in its file once, and its tests are there. Nothing is run."""

import ast
import functools
from pathlib import Path

import pytest

from benchmarks.planted import FAULTS, ROOT, misplaced


def test_each_fault_can_be_planted() -> None:
    assert misplaced() == {}


def test_a_text_that_is_gone_is_named(tmp_path: Path) -> None:
    name, fault = next(iter(FAULTS.items()))
    (tmp_path / fault.file).parent.mkdir(parents=True)
    (tmp_path / fault.file).write_text(fault.old * 2)
    assert misplaced(tmp_path, [name]) == {name: f"{fault.file} has its old text 2 times, expected once"}


@pytest.mark.parametrize("name", FAULTS)
def test_its_tests_are_there(name: str) -> None:
    for test in FAULTS[name].tests:
        file, _, function = test.partition("::")
        assert function.partition("[")[0] in _functions(file), test


@functools.cache
def _functions(file: str) -> set[str]:
    body = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body
    return {part.name for part in body if isinstance(part, ast.FunctionDef)}
