"""Tests of the comparison of rotations: its page, and the goals that the committed figures hold."""

import statistics

from benchmarks import convrot
from benchmarks.pages import between
from fluxq.base.files import read_json

COMMITTED = read_json(convrot.RESULT)
ROWS = {row["row"]: row for row in COMMITTED["rows"]}


def test_the_table_of_the_page_is_that_of_the_committed_result() -> None:
    page = convrot.PAGE.read_text(encoding="utf-8")
    marks = "<!-- convrot: begin -->\n", "<!-- convrot: end -->"
    assert between(page, *marks, convrot.table(COMMITTED)) == page
    assert list(ROWS) == list(convrot.settings())


def test_int8_convrot_is_not_below_int8_and_above_it_with_outliers() -> None:
    """Fitted and data-free; 0.3 dB is what it may lose where there are no outliers."""
    for name, other in (("int8-convrot", "int8"), ("regular 256 rtn", "int8 rtn")):
        assert COMMITTED["over_int8_db"]["tiny"][name][0] > -0.3
        assert COMMITTED["over_int8_db"]["outliers"][name][1] > 0
        gains = [ROWS[name]["layers_db"][family] - ROWS[other]["layers_db"][family] for family in convrot.MADE_BY]
        assert min(gains) > 2


def test_larger_blocks_of_the_regular_matrix_spread_more_on_drawn_layers() -> None:
    means = [statistics.mean(ROWS[f"regular {size} rtn"]["layers_db"].values()) for size in (16, 64, 256)]
    assert means == sorted(means)
