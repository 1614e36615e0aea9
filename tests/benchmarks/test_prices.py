"""The table of prices: dearer time buys fewer stages."""

import json

import pytest
from click.testing import CliRunner

from benchmarks import prices


@pytest.mark.slow
def test_dearer_time_buys_less_of_both(tmp_path):
    file = tmp_path / "prices.json"
    sizes = ("--layers", "drawn", "--drawings", "1", "--size", "128", "--recipe", "nvfp4-max")
    done = CliRunner().invoke(prices.main, [*sizes, "--price", "0", "--price", "1000", "--json", str(file)])
    assert done.exit_code == 0, done.output
    free, dear = json.loads(file.read_text())["rows"]
    assert (free["price"], dear["price"], free["count"]) == (0, 1000, 3)
    assert free["db"] > dear["db"] + 1 and free["microseconds"] > dear["microseconds"]


def test_the_page_has_the_table_of_the_committed_result():
    report = json.loads((prices.PAGE.parents[1] / "benchmarks" / "prices.json").read_text(encoding="utf-8"))
    assert prices.PAGE.read_text(encoding="utf-8").split(prices.MARK)[1].strip() == prices.table(report)


def test_the_table_says_what_a_percent_of_time_buys():
    def row(price, db, time):
        return {"recipe": "r", "price": price, "db": db, "microseconds": time}

    report = {"rows": [row(0.0, 25.0, 120.0), row(0.1, 24.0, 100.0)]}
    assert prices.table(report).splitlines()[2:] == [
        "| `r` | 0.1 | 24.00 | +0.0% |  |",
        "| `r` | 0 | 25.00 | +20.0% | 0.050 |",
    ]
