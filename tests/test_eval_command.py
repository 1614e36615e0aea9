"""`fluxq eval` from the command line to the report, and how its mistakes end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from fluxq.cli import cli


def run(*arguments: object):
    return CliRunner().invoke(cli, ["eval", *map(str, arguments)])


@pytest.fixture
def quantized(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("fp8"), tmp_path / "out"))


def test_eval_writes_report_and_page(quantized: Path) -> None:
    done = run(quantized, "--count", 6, "--num-inference-steps", 2)
    assert done.exit_code == 0, done.output
    assert "dB PSNR" in done.output and str(quantized / "eval" / "report.html") in done.output
    report = json.loads((quantized / "eval" / "report.json").read_text(encoding="utf-8"))
    assert report["model"] == "tiny" and report["call"]["num_inference_steps"] == 2
    assert [len(report["images"]), report["time"]["images"]] == [6, 6]
    for metric in ("psnr_db", "latent_sqnr_db"):
        value = report["metrics"][metric]["value"]
        assert value["low"] <= value["mean"] <= value["high"] and value["n"] == 6
    measured = {key: row["missing"] for key, row in report["metrics"].items()}
    assert set(measured.values()) == {None}, measured
    assert "http://" not in (quantized / "eval" / "report.html").read_text(encoding="utf-8").replace(
        "http://www.w3.org", ""
    )


def test_eval_is_the_same_again(quantized: Path) -> None:
    reports = [json.loads(run(quantized, "--count", 2, "--num-inference-steps", 1, "--json").output) for _ in range(2)]
    assert reports[0]["images"] == reports[1]["images"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "fluxq_plan.json").unlink(), ("not a fluxq checkpoint", "fluxq quantize")),
        (lambda folder: shutil.rmtree(folder), ("not a fluxq checkpoint",)),
        (lambda folder: (folder / "fluxq_plan.json").write_text("{"), ("not valid JSON",)),
    ],
)
def test_what_is_no_checkpoint_is_refused(quantized: Path, damage: Callable, words: tuple[str, ...]) -> None:
    damage(quantized)
    done = run(quantized)
    assert done.exit_code == 2 and all(word in done.output for word in words), done.output


def test_another_model_is_not_compared_with(quantized: Path, tiny_folder: Path) -> None:
    file = next((tiny_folder / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["proj_out.bias"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    done = run(quantized, "--model", tiny_folder)
    assert done.exit_code == 2 and "is not what" in done.output and "--model" in done.output
    assert not (quantized / "eval").exists()


def test_a_damaged_plan_is_refused(quantized: Path) -> None:
    (quantized / "fluxq_plan.json").write_text("{}")
    done = run(quantized)
    assert done.exit_code == 2 and "damaged" in done.output and "Traceback" not in done.output
