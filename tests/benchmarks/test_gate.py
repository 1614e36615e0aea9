"""Tests of benchmarks/gate.py that measure nothing."""

from __future__ import annotations

import pytest

from benchmarks import gate
from benchmarks.pages import between
from fluxq.base.files import read_json
from fluxq.eval.gate.speed import Call


def test_the_page_shows_what_the_result_files_hold():
    page = gate.PAGE.read_text(encoding="utf-8")
    table = gate.tables_of(read_json(gate.RESULT), read_json(gate.QUIET_RESULT))
    assert between(page, gate.BEGIN, gate.END, table) == page


def test_quiet_sets_are_told_from_the_others_and_a_machine_without_them_is_refused(monkeypatch):
    monkeypatch.setattr(gate, "MOST_SETS", 3)

    def pairs(noise: float):
        return lambda draw: ([Call(draw.gauss(1, noise)) for _ in range(30)] for _ in range(2))

    row = gate.quiet_row(pairs(0.001), 2)
    assert row["of"] == 2 and row["others"]["of"] == 0 and row["median_spread"] < gate.QUIET
    with pytest.raises(RuntimeError, match="0 of 6 sets of times spread by 1% at most"):
        gate.quiet_row(pairs(0.08), 2)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("products of matrices, the same", "worse"), ("products of matrices, 2 % slower", "equivalent")],
)
def test_a_wrong_verdict_between_quiet_sets_misses_a_goal(name, verdict):
    report, quiet = read_json(gate.RESULT), read_json(gate.QUIET_RESULT)
    before = gate.goals(report, quiet)
    quiet["speed"][name]["others"]["verdicts"][verdict] = 1
    after = gate.goals(report, quiet)
    assert [goal for goal in before if before[goal] != after[goal]] == [f"{name}, between quiet ones: never {verdict}"]
