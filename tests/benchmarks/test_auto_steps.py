"""The proof of formats and steps in one budget: the page has its figures, opponents take no more time."""

import pytest

from benchmarks import auto_steps
from fluxq.base.files import read_json
from fluxq.jobs import listing


def test_the_page_has_the_tables_of_the_committed_result() -> None:
    report, page = read_json(auto_steps.RESULT), auto_steps.PAGE.read_text(encoding="utf-8")
    tables = auto_steps.tables_of(report)
    assert auto_steps.between(page, auto_steps.BEGIN, auto_steps.END, tables) == page, (
        "python -m benchmarks.auto_steps --tables"
    )
    assert [row["share"] for row in report["rows"]] == [*auto_steps.SHARES]
    assert report["prompts"] == 256 and "dirty" not in report["commit"]
    for row in report["rows"]:
        others = [*row["others"].values(), *row["all_fewer"]]
        assert all(cost <= row["ms"] * (1 + 1e-9) for cost in (row["cost"], *(each["cost"] for each in others)))
        best = max(each["psnr_db"][0] for each in row["all_fewer"])
        assert row["others"]["fewer steps"]["psnr_db"][0] == best  # the best of them is the opponent
        assert {each["steps"] for each in row["all_fewer"]} >= {row["computed"]}


def test_a_goal_that_is_missed_is_named() -> None:
    report = read_json(auto_steps.RESULT)
    before = auto_steps.goals(report)
    row = report["rows"][1]
    row["others"]["formats alone"]["better_by_db"] = [11.0, -0.1, 22.0]
    row["others"]["fewer steps"]["better_by_db"] = [2.9, 2.0, 3.8]
    row["predicted_nmse"], row["nmse"] = row["measured_nmse"] / 1.6, 1.4 * sum(row["alone_nmse"].values())
    now = auto_steps.goals(report)
    missed = {goal for goal, is_met in now.items() if not is_met}
    assert {
        "65% of the time, formats alone: at least +10.0 dB, the interval above 0",
        "65% of the time, fewer steps: at least +3.0 dB, the interval above 0",
        "65% of the time: predicted NMSE within a factor 1.5",
        "65% of the time: errors of list and formats add within a factor 1.3",
    } <= missed
    assert now.keys() == before.keys()
    lines = auto_steps.tables_of(report).splitlines()
    assert {f"- missed: {goal}" for goal in missed} <= {*lines}


@pytest.mark.long
def test_it_runs_and_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch) -> None:
    file = tmp_path / "auto_steps.json"
    monkeypatch.setattr(listing, "IMAGES", 4)
    monkeypatch.setattr(auto_steps, "STEPS", 5)
    monkeypatch.setattr(auto_steps, "MENU", ("fp8", "16bit"))
    monkeypatch.setattr(auto_steps, "SHARES", (0.5,))
    auto_steps.measure(file, 2)
    monkeypatch.setattr(auto_steps, "judged_row", lambda *_: 1 / 0)
    auto_steps.measure(file, 2)
    ((row,), report) = (read_json(file)["rows"], read_json(file))
    assert 2 <= row["computed"] < 5 and row["others"].keys() <= {*auto_steps.GOALS}
    assert len(auto_steps.tables_of(report).splitlines()) > 8
