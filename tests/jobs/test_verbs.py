"""Python's verbs: what `fluxq quantize`, `calibrate` and `eval` do, as functions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fluxq
from fluxq import tiny
from fluxq.jobs import making

CALL = {"num_inference_steps": 2, "height": 64, "width": 64}


def test_a_pipeline_in_memory_is_quantized_as_its_folder_is(tmp_path, pipe, plain_checkpoint) -> None:
    made = fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "made", call=CALL)
    assert made.passed and made.path == tmp_path / "made" and made.record["recipe"]["name"] == "int8"
    assert [path.name for path in tmp_path.iterdir()] == ["made"], "the pipeline's 16-bit copy is left behind"
    from_folder = fluxq.quantize_pipeline("tiny", "int8", profile="rtn", output=tmp_path / "folder", check=False)
    assert from_folder.passed is None
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (made.path / weights).read_bytes() == (from_folder.path / weights).read_bytes()
    loaded: Any = made.load()
    image = loaded("a red circle", **CALL, output_type="pt", generator=torch.Generator().manual_seed(0)).images
    assert torch.isfinite(image).all()
    reopened = fluxq.Checkpoint.open(made.path)
    assert reopened == made


def test_a_job_that_failed_is_resumed_by_the_same_call(tmp_path, pipe, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(making, "_copy_rest", fail)
        with pytest.raises(OSError, match="no space"):
            fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "made", check=False)
    assert not (tmp_path / "made").exists()
    seen = []
    real = making.quantize_component
    monkeypatch.setattr(making, "quantize_component", lambda *args, **how: seen.append(1) or real(*args, **how))
    made = fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "made", check=False)
    again = fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "made", check=False)
    assert again == made and seen == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_checkpoint_is_evaluated_against_a_pipeline_in_memory(tmp_path, pipe, plain_checkpoint) -> None:
    made = fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "made", call=CALL, check=False)
    report = fluxq.evaluate_pipeline(made, pipeline=pipe, count=2, call=CALL, gates=["psnr>=20"], metrics=["psnr"])
    gates = [gate for run in report.runs for gate in run.gates]
    assert gates and all(gate.passed for gate in gates)
    assert json.loads((made.path / "eval" / "report.json").read_text())["call"] == report.call


def test_statistics_are_gathered_and_used(tmp_path, quick_recipe) -> None:
    recipe = quick_recipe("nvfp4", False)
    statistics = fluxq.calibrate_pipeline("tiny", recipe, output=tmp_path / "s.safetensors", call=CALL)
    made = fluxq.quantize_pipeline(
        "tiny", recipe, statistics=tmp_path / "s.safetensors", output=tmp_path / "made", call=CALL, check=False
    )
    assert made.record["statistics_digest"] == statistics.content_digest


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"profil": "rtn"}, TypeError, "profil: no such option; there are .*profile"),
        ({"components": "transformer"}, TypeError, "components='transformer': give a list"),
        ({"prompts": "none.txt"}, FileNotFoundError, "none.txt"),
        ({"recipe": "nvfp"}, FileNotFoundError, "nvfp"),
        ({"call": {"heigth": 64}}, ValueError, "heigth"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, options, error, message) -> None:
    with pytest.raises(error, match=message):
        fluxq.quantize_pipeline("tiny", output=tmp_path / "made", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_pipeline_is_not_quantized_again(tmp_path, plain_checkpoint) -> None:
    loaded = fluxq.Checkpoint.open(plain_checkpoint("int8")).load()
    with pytest.raises(ValueError, match="quantized"):
        fluxq.quantize_pipeline(loaded, "int8", profile="rtn", output=tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_the_source_of_a_pipeline_in_memory_is_where_it_came_from(tmp_path) -> None:
    pipe = tiny.load()
    made = fluxq.quantize_pipeline(pipe, "fp8", profile="rtn", output=tmp_path / "made", check=False)
    assert made.record["model"]["source"] == str(Path(tiny.path()).resolve())
