"""The proof of choosing among fitted layers: the page has its figures, and a missed goal is named."""

from benchmarks import auto_fitted
from fluxq.base.files import read_json


def test_the_page_has_the_table_of_the_committed_result() -> None:
    report, page = read_json(auto_fitted.RESULT), auto_fitted.PAGE.read_text(encoding="utf-8")
    table = auto_fitted.table_of(report)
    assert auto_fitted.between(page, auto_fitted.BEGIN, auto_fitted.END, table) == page, (
        "python -m benchmarks.auto_fitted --tables"
    )
    assert [(each["plan"], each["over"]) for each in report["goals"]] == list(auto_fitted.GOALS)
    assert report["prompts"] == 256 and "dirty" not in report["commit"]
    bits = {each["plan"]: each["bits"] for each in report["plans"]}
    assert all(count <= auto_fitted.BITS for name, count in bits.items() if name != "fp8 everywhere")


def test_a_goal_that_is_missed_is_named() -> None:
    report = read_json(auto_fitted.RESULT)
    for difference, is_met in (([1.6, 1.2, 2.0], True), ([1.4, 1.2, 1.6], False), ([1.6, -0.1, 3.3], False)):
        report["goals"][1]["better_by_db"] = difference
        (goal,) = (goal for goal in auto_fitted.goals(report) if "role rule" in goal)
        assert auto_fitted.goals(report)[goal] is is_met
        assert f"- {goal}; {'met' if is_met else 'missed'}" in auto_fitted.table_of(report)
