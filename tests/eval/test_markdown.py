import functools
import json
import operator
import re
from collections.abc import Iterator

import example_report
import pytest
from pydantic import ValidationError

from fluxq.base.console import escaped
from fluxq.commands import show
from fluxq.eval.metrics.figures import count, duration, figure, limits, mark, share, size, stated
from fluxq.eval.metrics.schema import Estimate, GateOutcome, Report, Verdict
from fluxq.eval.report.markdown import markdown


@pytest.fixture(scope="module")
def three():
    return example_report.example(3)


def test_markdown_says_what_the_report_holds(three):
    text = markdown(three)
    psnr = three.runs[0].metrics["psnr"].value
    assert f"{psnr.mean:.2f} ({psnr.low:.2f} to {psnr.high:.2f})" in text
    assert "**schnell-nvfp4:** ? Undecided: PSNR" in text and "**schnell-int8:** ✓ As good as published 8-bit" in text
    assert "47.10 (46.00 to 48.20)" in text and "not measured: needs alexnet-owt-7be5be79.pth" in text
    assert "gate `psnr>=20`: passed" in text and "gate `lpips<=0.1`: **FAILED** (not measured)" in text
    assert "| 16 bit | compiled | 1 × 1024 × 1024 | denoiser step | 170 ms / 180 ms | 2 % | 33.7 GB |" in text
    assert "not given: the spread of 16 bit is 8 % of its median, above 5 %" in text
    assert "fluxq eval schnell-nvfp4 --protocol smoke" in text and "extends: nvfp4" in text and "abab" in text
    assert "> **Warning:** 16 prompts are a quick look" in text and "data:image" not in text


def test_a_gate_that_identical_images_pass_is_not_called_unmeasured(three):
    gates = tuple(GateOutcome(gate="psnr>=30", value=None, passed=passed) for passed in (True, False))
    text = markdown(three.model_copy(update={"runs": (three.runs[0].model_copy(update={"gates": gates}),)}))
    assert "gate `psnr>=30`: passed (identical)" in text and "gate `psnr>=30`: **FAILED** (not measured)" in text
    assert [show.judged(gate) for gate in gates] == ["psnr>=30 (identical)", "psnr>=30 (not measured)"]


def test_caches_stand_beside_fewer_steps_with_the_difference_in_their_order(three):
    plain, cached, fewer = three.runs
    cached = cached.model_copy(update={"cache": "list 0.5", "computed": 0.54, "fewer": fewer.name})
    fewer = fewer.model_copy(update={"cache": "15 steps", "computed": 15 / 28})
    report = three.model_copy(update={"runs": (plain, cached, fewer)})
    (difference,) = (e.difference for e in three.comparisons if (e.first, e.second) == (cached.name, fewer.name))
    text = markdown(report)
    assert "## Step caches beside fewer steps" in text and "list 0.5: computes 54 % of all steps" in text
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {cached.name} | 54 % |")]
    assert f"| {fewer.name} | 53.6 % |" in row and row.endswith(f"| {stated(difference, '.2f', sign='+')} |")
    swapped = [each.model_copy(update={"first": each.second, "second": each.first}) for each in three.comparisons]
    text = markdown(report.model_copy(update={"comparisons": tuple(swapped)}))
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {cached.name} | 54 % |")]
    assert row.endswith(f"| {stated(difference.negated, '.2f', sign='+')} |")
    assert (difference.negated.mean, difference.negated.low) == (-difference.mean, -difference.high)
    assert "Step caches" not in markdown(three)


def test_every_row_of_a_table_has_the_cells_of_its_head(three):
    name, width = "a|b", 0
    runs = tuple(run.model_copy(update={"name": f"{name} {i}"}) for i, run in enumerate(three.runs))
    for line in markdown(three.model_copy(update={"runs": runs})).splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.replace("\\|", "").count("|")
        assert width in (0, cells), line
        width = cells


def test_parts_that_were_not_measured_say_so():
    text = markdown(example_report.example(1, speed=None, debug=None, drift=None, wall=None))
    assert "- speed of schnell-nvfp4: run `fluxq bench schnell-nvfp4`" in text
    assert "- layers of schnell-nvfp4: run `fluxq debug schnell-nvfp4`" in text
    assert "Not measured" not in markdown(example_report.example(1))


def test_names_and_verdicts_cannot_inject_markup():
    evil = "<script>|`x`[a](http://b.c)\n# head"
    verdict = Verdict(outcome="worse", text=evil)
    text = markdown(
        example_report.example(1, name=evil, recipe=evil, verdict=verdict, model=evil, command="```\n# head")
    )
    assert "<script>" not in text.replace("\\<script\\>", "") and "\n# head" not in text.replace("'''\n# head", "")
    assert escaped("a_b*c") == r"a\_b\*c"


def test_mark_says_the_word_once():
    assert mark(Verdict(outcome="worse", text="Worse than 16 bit: PSNR")) == "▼"
    assert mark(Verdict(outcome="identical", text="All 8 images are the same.")) == "= Identical."


def test_figures():
    estimate = Estimate(mean=-0.123, low=-0.2, high=0.01, n=8)
    assert figure(estimate, ".2f", "+") == "−0.12" and limits(estimate, ".2f", "+") == "−0.20 to +0.01"
    assert stated(estimate, ".2f") == "−0.12 (−0.20 to 0.01)"
    assert figure(None, ".2f") == "–" and limits(None, ".2f") == ""
    assert figure(Estimate(mean=None, n=0, infinite=4), ".2f") == "identical"
    assert figure(Estimate(mean=None, n=0), ".2f") == "–"
    assert count([estimate, None, Estimate(mean=1.0, n=5, infinite=1)]) == "6 to 8" and count([None]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000012, "1.2 µs"),
        (0.00000012, "120 ns"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (119.0, "119 s"),
        (200.4, "3 min 20 s"),
        (None, "–"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_sizes_and_shares():
    assert [size(value) for value in (0, 999, 12_000, 6_400_000_000, None)] == [
        "0 B",
        "999 B",
        "12 kB",
        "6.4 GB",
        "–",
    ]
    assert [share(value) for value in (0.123, -0.05, 19.704, None)] == ["12.3 %", "−5 %", "1970 %", "–"]


@pytest.mark.long
def test_no_text_of_a_report_is_markup_in_its_markdown(three):
    """R21p: whatever a stranger's report.json says, each of its texts and names in turn."""
    evil, text, names, tried = "<img src=x>", three.model_dump_json(), set(), 0
    for where in _places(json.loads(text)):
        name = tuple("" if isinstance(key, int) else key for key in where)
        if name in names:
            continue
        names.add(name)
        for as_key in (False, True):
            changed = json.loads(text)
            held = functools.reduce(operator.getitem, where[:-1], changed)
            if as_key and isinstance(held, dict):
                held[evil] = held.pop(where[-1])
            else:
                held[where[-1]] = evil
            try:
                shown = markdown(Report.model_validate(changed))
            except ValidationError:
                continue  # as reading it would
            tried += 1
            outside = re.sub(r"```.*?```|`[^`\n]*`", "", shown, flags=re.DOTALL)
            assert evil not in outside, name
    assert tried > 90


def _places(value: object, at: tuple = ()) -> Iterator[tuple]:
    """The keys that lead to each text, and to each table in tables."""
    for key, held in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if isinstance(held, (str, dict)):
            yield (*at, key)
        yield from _places(held, (*at, key))
