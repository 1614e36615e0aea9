"""The proof of 16-bit activations at edge steps: the page has the figures, and the rule decides by both."""

import pytest

from benchmarks import a16
from benchmarks.pages import between
from fluxq.base.files import read_json


@pytest.mark.slow
def test_the_page_has_the_table_of_the_committed_result() -> None:
    report, page = read_json(a16.RESULT), a16.PAGE.read_text(encoding="utf-8")
    assert between(page, a16.BEGIN, a16.END, a16.table(report)) == page, "python -m benchmarks.a16 --tables"
    measured = [(row["recipe"], row["steps"]) for row in report["rows"]]
    wanted = [(name, steps) for name in a16.RECIPES for steps, names in a16.STEPS.items() if name in names]
    assert measured == [each for each in wanted for _ in range(1 + len(a16.EDGES))]
    assert report["prompts"] == 256 and "dirty" not in report["commit"]


@pytest.mark.slow
def test_an_edge_pays_where_it_brings_more_for_its_time_than_the_next_format() -> None:
    best = max(map(a16.next_format, a16.NATIVE))
    row = {"gain_db": [1.01 * best, 0.0, 0.0], "added_time_percent": dict.fromkeys(a16.NATIVE, 1.0)}
    assert a16.pays(row)
    assert not a16.pays(row | {"gain_db": [0.99 * best, 0.0, 0.0]})
    assert not a16.pays(row | {"added_time_percent": dict.fromkeys(a16.NATIVE, 2.0)})
