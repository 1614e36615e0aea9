import re
from pathlib import Path

import example_report
import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from fluxq.base.files import write_text
from fluxq.base.output import unsealed
from fluxq.commands.show import _facts
from fluxq.eval.metrics.schema import Verdict
from fluxq.eval.report.card import eval_results, model_card, with_evaluation
from fluxq.jobs.judge import _write
from fluxq.quantize.record import read_record
from fluxq.quantize.verify import verify


@pytest.fixture(scope="module")
def report():
    """A checkpoint as it is stored and re-encoded."""
    found = example_report.example(2)
    runs = (found.runs[0], found.runs[1].model_copy(update={"backend": "int8", "name": "schnell-nvfp4 as int8"}))
    return found.model_copy(update={"runs": runs})


@pytest.fixture(scope="module")
def card(plain_checkpoint):
    return (plain_checkpoint("int8") / "README.md").read_text(encoding="utf-8")


def test_card_is_made_from_the_plan_file_alone(plain_checkpoint, card):
    assert card == model_card(read_record(plain_checkpoint("int8")))
    assert ModelCard(card).data.library_name == "diffusers"


@pytest.mark.slow
def test_fitting_is_shown_by_what_outputs_gained(checkpoint, plain_checkpoint):
    """Fitted weights lie farther from the originals than rounded ones: that figure alone would say the opposite."""
    fitted, plain = (read_record(make("nvfp4")) for make in (checkpoint, plain_checkpoint))
    weights = [sum(layer.weight_sqnr_db or 0 for layer in record.components[0].layers) for record in (fitted, plain)]
    assert weights[0] < weights[1]
    text = model_card(fitted)
    line = next(line for line in text.splitlines() if "| ff_up |" in line)
    before, after = map(float, re.search(r"([0-9.]+) → ([0-9.]+) dB", line).groups())
    assert after > before + 1 and "Fitting moves weights away from the originals so that outputs come nearer" in text
    assert "→" not in model_card(plain) and "Fitting moves" not in model_card(plain)
    shown = [_facts([record.components[0]])["layers' SQNR"] for record in (fitted, plain)]
    before, after = map(float, re.search(r"([0-9.]+) -> ([0-9.]+) dB by fitting", shown[0]).groups())
    assert after > before + 1 and shown[1].endswith("dB (weights)")


def test_h2_model_index_round_trips(card, report):
    parsed = ModelCard(with_evaluation(card, report)).data
    assert parsed.model_name == "schnell-nvfp4" and parsed.license == ModelCard(card).data.license
    found = {(each.metric_type, each.metric_config): each for each in parsed.eval_results}
    measured = {
        (key, run.backend): metric
        for run in report.runs
        for key, metric in run.metrics.items()
        if metric.value is not None and metric.value.mean is not None
    }
    assert found.keys() == measured.keys() and ("lpips", "native") not in found
    for key, metric in measured.items():
        assert found[key].metric_value == metric.value.mean and found[key].task_type == "text-to-image"
        assert found[key].metric_args["n"] == metric.value.n and found[key].metric_args["how"] == metric.how
    assert found["psnr", "native"].dataset_name == "bundled, 16 prompts × 1 seeds"


def test_card_says_the_verdict_and_the_metrics_and_keeps_the_rest(card, report):
    text = with_evaluation(card, report)
    assert (
        "**schnell-nvfp4:** ? Undecided: PSNR" in text and "**schnell-nvfp4 as int8:** ✓ As good as published" in text
    )
    assert f"{report.runs[0].metrics['psnr'].value.mean:.2f}" in text and "not measured: needs alexnet" in text
    body = ModelCard(card).text
    before, after = body.split("\n## How it was made\n")
    assert before.strip() in text and unsealed(text).endswith(f"\n## How it was made\n{unsealed(after)}")
    assert text.index("## Measured quality") < text.index("## Evaluation") < text.index("## How it was made")


def test_evaluating_again_replaces(card, report):
    first = with_evaluation(card, report)
    assert with_evaluation(first, report) == first
    changed = report.runs[0].model_copy(update={"verdict": Verdict(outcome="worse", text="much worse now")})
    again = with_evaluation(first, report.model_copy(update={"runs": (changed,)}))
    assert again.count("## Evaluation") == 1 and "much worse now" in again and "as int8" not in again
    assert len(ModelCard(again).data.eval_results) == 4


def test_a_card_of_ones_own_gets_a_section_too(report):
    text = with_evaluation("# mine\n\nno front matter", report)
    assert "# mine\n\nno front matter\n\n<!-- fluxq eval: begin -->" in text
    assert ModelCard(text).data.model_name == "schnell-nvfp4"
    with pytest.raises(ValueError, match="should be a dict"):
        with_evaluation("---\n- a list\n---\n# mine\n", report)


def test_h2_eval_results_round_trip(report):
    protocol = report.protocol.model_copy(update={"dataset": "example-org/Prompts-30K"})
    (name, text), *others = eval_results(report.model_copy(update={"protocol": protocol})).items()
    assert name == "prompts-30k.yaml" and not others
    entries = {entry.task_id: entry for entry in parse_eval_result_entries(yaml.safe_load(text))}
    assert list(entries) == ["psnr", "ssim", "fid", "clip_score"]
    psnr = report.runs[0].metrics["psnr"]
    assert entries["psnr"].value == psnr.value.mean and entries["psnr"].dataset_id == "example-org/Prompts-30K"
    assert entries["psnr"].date == report.created
    assert (
        "16 images" in entries["psnr"].notes and psnr.how in entries["psnr"].notes and "nvfp4" in entries["psnr"].notes
    )


def test_eval_results_are_of_hub_datasets_and_stored_arithmetic_only(report):
    assert eval_results(report) == {}
    protocol = report.protocol.model_copy(update={"dataset": "example-org/Prompts-30K"})
    cached = report.runs[0].model_copy(update={"cache": 0.1})
    assert eval_results(report.model_copy(update={"protocol": protocol, "runs": (cached, report.runs[1])})) == {}


def test_verify_still_holds_after_an_evaluation(plain_checkpoint, card, report, tmp_path):
    from shutil import copytree

    folder = Path(copytree(plain_checkpoint("int8"), tmp_path / "checkpoint"))
    write_text(folder / "README.md", with_evaluation(card, report))
    write_text(folder / ".eval_results" / "prompts.yaml", "- {}\n")
    write_text(folder / "eval" / "report.html", "<!doctype html>")
    assert [finding for result in verify(folder) for finding in result.findings] == []


@pytest.mark.parametrize(
    "text", ["Foo: community licence", 'x"\nbase_model: evil/evil\n---\n<img src=x>', "- [a](javascript:b)"]
)
def test_what_a_stranger_wrote_stays_text_in_the_card(plain_checkpoint, text):
    record = read_record(plain_checkpoint("int8"))
    record.model.name, record.model.license = text, {"license": "other", "license_name": text}
    record.recipe.name = text
    card = model_card(record)
    parsed = ModelCard(card).data.to_dict()
    assert parsed["license_name"] == text and "base_model" not in parsed and parsed["tags"][-1] == text
    body = ModelCard(card).text
    assert not re.search(r"(?<!\\)(<img|\]\(javascript)", re.sub("`[^`]*`", "", body))


@pytest.mark.slow
@pytest.mark.parametrize(
    "written",
    [
        "license_name: Foo: community licence",  # as fluxq itself once wrote it
        "model-index: 3",
        "ignore_metadata_errors: 3",
        "3: 4",
        "tags: 3",
    ],
)
def test_front_matter_that_is_none_is_named_and_the_card_left_as_it_is(report, written, tmp_path, caplog, monkeypatch):
    """R17: of an older fluxq, or of somebody else; what was measured is written all the same."""
    monkeypatch.setattr("fluxq.eval.report.charts._svg", lambda _: "<svg/>")
    text = f"---\n{written}\n---\n\n# Mine\n"
    with pytest.raises(ValueError):
        with_evaluation(text, report)
    write_text(tmp_path / "README.md", text)
    _write(tmp_path, report)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text
    assert (tmp_path / "eval" / "report.json").is_file()
    (said,) = [message for message in caplog.messages if "README.md" in message]
    assert said.startswith(f"{tmp_path / 'README.md'} is left without the evaluation: its front matter")
