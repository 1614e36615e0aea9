"""A report.json of anybody's: its texts can be drawn and its parts go together, or it is refused by name."""

import json
import time

import example_report
import pytest

from fluxq.eval.metrics.schema import Run, read_report
from fluxq.eval.report.card import with_evaluation
from fluxq.eval.report.charts import image_chart
from fluxq.eval.report.markdown import markdown
from fluxq.eval.report.report import render
from fluxq.jobs import judge

ODD = "a\x1b[31m\u202eb\uffff"  # an escape, one that turns text, and what is no character of XML
SHOWN = r"a\x1b[31m\u202eb\uffff"


def stored(path, change) -> dict:
    value = example_report.example(2, count=4).model_dump(mode="json")
    change(value)
    path.write_text(json.dumps(value))
    return value


@pytest.mark.slow
def test_control_characters_are_shown_wherever_a_text_of_a_report_goes(tmp_path):
    def change(value):
        value["runs"][0]["name"] = value["runs"][0]["verdict"]["text"] = value["items"][0]["prompt"] = ODD
        value["runs"][0]["metrics"]["psnr"]["name"] = ODD
        value["provenance"] = {ODD: ODD}

    stored(tmp_path / "report.json", change)
    report = read_report(tmp_path / "report.json")
    run = report.runs[0]
    assert {run.name, run.verdict.text, run.metrics["psnr"].name, report.items[0].prompt} == {SHOWN}
    assert report.provenance == {SHOWN: SHOWN}
    drawn = image_chart(report)  # which ended the process where a name had an escape
    assert drawn is not None and SHOWN in drawn.svg
    for text in (render(report), markdown(report), with_evaluation("# mine\n", report)):
        assert not set(ODD) - set("ab[31m") & set(text)


def test_a_run_that_is_named_after_a_folder_has_a_name_that_can_be_drawn():
    fields = dict(example_report.example(1, count=2).runs[0])
    assert Run(**{**fields, "name": ODD, "checkpoint": ODD}).name == SHOWN


def test_a_name_without_end_is_cut_before_it_is_drawn(tmp_path):
    stored(tmp_path / "report.json", lambda value: value["runs"][0].update(name="x" * 500_000))
    started = time.monotonic()
    report = read_report(tmp_path / "report.json")
    drawn = image_chart(report)
    assert report.runs[0].name == "x" * 511 + "…" and drawn is not None
    assert len(drawn.svg) < 200_000 and time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.update(runs=[]), "runs: is empty"),
        (lambda value: value.update(items=[]), "items: is empty"),
        (lambda value: value["items"].pop(), "runs.0.images: 4 of 3 items"),
        (lambda value: value["runs"][1]["wall"]["groups"]["all"][0].update(index=4), "runs.1.wall: a picture of none"),
        (lambda value: value["runs"][0]["drift"].update(steps=[]), "runs.0.drift: curves of other lengths"),
        (
            lambda value: value["runs"][0]["drift"]["curves"]["latent_sqnr"].update(values=[]),
            "runs.0.drift: curves of other",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_named(tmp_path, change, message):
    stored(tmp_path / "report.json", change)
    with pytest.raises(ValueError, match=rf"report\.json: {message}.*; the file is damaged, evaluate again"):
        read_report(tmp_path / "report.json")


def test_values_that_no_page_can_be_made_of_are_a_sentence_with_the_file(tmp_path):
    (tmp_path / "a" / "eval").mkdir(parents=True)
    path = tmp_path / "a" / "eval" / "report.json"
    stored(path, lambda value: value["runs"][0]["size"].update(bytes_after=0))
    with pytest.raises(ValueError, match=r"eval/report\.json: holds values that no page can be made of \(ZeroDivision"):
        judge.report([tmp_path / "a"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
