"""Attention from codes beside exact attention: the committed figures are those of the code."""

import pytest

from benchmarks import attention_codes
from fluxq.base.files import read_json
from fluxq.kernels.attention.op import CODES

FOUND = read_json(attention_codes.RESULT)


@pytest.mark.slow
def test_figures_of_drawn_heads_are_found_again() -> None:
    rows = {row["inputs"]: row for row in FOUND["rows"]}
    for name, heads in attention_codes.drawn():
        for codes, value in attention_codes.sqnr([heads]).items():
            assert rows[name][codes] == pytest.approx(value, abs=0.1), (name, codes)


def test_the_page_has_the_table() -> None:
    assert attention_codes.table(FOUND) in attention_codes.PAGE.read_text(encoding="utf-8")
    assert all(CODES.keys() <= row.keys() for row in FOUND["rows"])
