"""Python's verbs: what `fluxq quantize`, `calibrate` and `eval` do, as functions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig

import fluxq
from fluxq import tiny, verbs
from fluxq.base.output import job_digest
from fluxq.jobs import making

CALL = {"num_inference_steps": 2, "height": 64, "width": 64}


@pytest.mark.slow
def test_a_pipeline_in_memory_is_quantized_as_its_folder_is(tmp_path, pipe, plain_checkpoint, monkeypatch) -> None:
    made = fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "made", call=CALL)
    assert made.passed and made.path == tmp_path / "made" and made.record.recipe.name == "int8"
    assert [path.name for path in tmp_path.iterdir()] == ["made"], "the pipeline's 16-bit copy is left behind"
    from_folder = fluxq.quantize_pipeline("tiny", "int8", profile="rtn", output=tmp_path / "folder", check=False)
    assert from_folder.passed is None
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (made.path / weights).read_bytes() == (from_folder.path / weights).read_bytes()
    loaded: Any = made.load()
    image = loaded("a red circle", **CALL, output_type="pt", generator=torch.Generator().manual_seed(0)).images
    assert torch.isfinite(image).all()
    monkeypatch.chdir(tmp_path)
    reopened = fluxq.Checkpoint.open("made")
    monkeypatch.chdir("/")
    assert reopened == made and reopened.load()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_against_a_pipeline_in_memory(tmp_path, pipe, plain_checkpoint) -> None:
    made = fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "made", call=CALL, check=False)
    report = fluxq.evaluate_pipeline(
        made, pipeline=pipe, count=2, call=CALL, metrics=["psnr"], gates=["psnr>=20"], images=str(tmp_path / "images")
    )
    gates = [gate for run in report.runs for gate in run.gates]
    assert gates and all(gate.passed for gate in gates)
    assert "--model" not in report.command and report.provenance["16-bit model"] == "a pipeline in memory"
    assert json.loads((made.path / "eval" / "report.json").read_text())["call"] == report.call


@pytest.mark.slow
def test_statistics_are_gathered_and_used(tmp_path, quick_recipe) -> None:
    recipe = quick_recipe("nvfp4", False)
    statistics = fluxq.calibrate_pipeline("tiny", recipe, output=tmp_path / "s.safetensors", call=CALL)
    made = fluxq.quantize_pipeline(
        "tiny", recipe, statistics=tmp_path / "s.safetensors", output=tmp_path / "made", call=CALL, check=False
    )
    assert made.record.statistics_digest == statistics.content_digest


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"profil": "rtn"}, TypeError, "profil: no such option; there are .*profile"),
        ({"components": "transformer"}, TypeError, "components='transformer': expected a list of texts"),
        ({"max_shard_bytes": 1.5}, TypeError, "max_shard_bytes=1.5: expected int"),
        ({"seed": "3"}, TypeError, "seed='3': expected"),
        ({"prompts": ["a"]}, TypeError, "prompts=.'a'.: expected"),
        ({"profile": "quick"}, ValueError, "profile='quick': expected one of rtn, fast"),
        ({"call": {"prompt": "x"}}, ValueError, "the call: prompt: fluxq says that itself"),
        ({"prompts": "none.txt"}, FileNotFoundError, "none.txt"),
        ({"recipe": "nvfp"}, FileNotFoundError, "nvfp"),
        ({"call": {"heigth": 64}}, ValueError, "heigth"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, options, error, message) -> None:
    with pytest.raises(error, match=message):
        fluxq.quantize_pipeline("tiny", output=tmp_path / "made", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cache", "expected"),
    [(0.1, ("0.1",)), ("list=0.5", ("list=0.5",)), (["pab=2", 0.2], ("pab=2", "0.2")), (None, ()), ((), ())],
)
def test_one_step_cache_may_stand_alone(cache, expected) -> None:
    assert verbs._checked({"cache": cache}, gates=())["cache"] == expected


def test_a_quantized_pipeline_is_not_quantized_again(tmp_path, plain_checkpoint) -> None:
    loaded = fluxq.Checkpoint.open(plain_checkpoint("int8")).load()
    with pytest.raises(ValueError, match="quantized"):
        fluxq.quantize_pipeline(loaded, "int8", profile="rtn", output=tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.often(3)
@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda pipe: pipe.transformer, TypeError, "pipeline is a FluxTransformer2DModel"),
        (lambda pipe: pipe.transformer.add_adapter(LoraConfig(target_modules=["to_q"])) or pipe, ValueError, "adapter"),
        (lambda pipe: pipe.transformer.fuse_qkv_projections() or pipe, ValueError, "unfuse_qkv_projections"),
        (
            lambda pipe: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16) or pipe,
            ValueError,
            "stored in 8 bits",
        ),
        (lambda pipe: pipe.text_encoder.to("meta") and pipe, ValueError, "text_encoder: offloaded"),
        (lambda pipe: None, TypeError, "pipeline is a NoneType"),
    ],
)
def test_a_pipeline_that_is_not_all_there_in_16_bit_is_refused(tmp_path, damage, error, message) -> None:
    with pytest.raises(error, match=message):
        fluxq.quantize_pipeline(damage(tiny.load()), "fp8", profile="rtn", output=tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_for_a_pipeline_in_memory_before_all_else_was_checked(tmp_path, pipe, monkeypatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    monkeypatch.setattr(type(pipe), "save_pretrained", lambda *_: pytest.fail("written"))
    for options in ({"recipe": "nvfp"}, {"prompts": "none.txt"}, {"profile": "x"}, {"seed": -1}, {"dtype": "bf16"}):
        with pytest.raises((ValueError, FileNotFoundError)):
            fluxq.quantize_pipeline(pipe, output=tmp_path / "made", **options)
    with pytest.raises(ValueError, match="mine"):
        fluxq.quantize_pipeline(pipe, "fp8", output=tmp_path / "mine")


def test_a_copy_that_a_kill_left_goes_and_the_next_asks_for_its_space(tmp_path, pipe, monkeypatch) -> None:
    (tmp_path / ".made.pipeline").mkdir()  # which fluxq did not make
    left = tmp_path / f".{job_digest('made')[:16]}.pipeline"
    (left / "tiny" / "transformer").mkdir(parents=True)
    (left / "tiny" / "transformer" / "half.safetensors").write_bytes(b"x")
    fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "made", check=False)
    assert not left.exists()
    (tmp_path / ".made.pipeline").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    little = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: little)
    with pytest.raises(OSError, match=r"a copy of the pipeline in memory may need .*, 1 MB are free"):
        fluxq.quantize_pipeline(pipe, "int8", profile="rtn", output=tmp_path / "other", check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.slow
def test_a_pipeline_from_the_folder_above_has_a_name_of_its_own(tmp_path, monkeypatch) -> None:
    """Its path's last part is "..", which would be the output's folder."""
    (tmp_path / "model" / "here").mkdir(parents=True)
    tiny.load().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model" / "here")
    pipe = DiffusionPipeline.from_pretrained("..", dtype=torch.bfloat16)
    (tmp_path / "model" / "model_index.json").unlink()  # in a pipeline's folder nothing is written
    made = fluxq.quantize_pipeline(pipe, "fp8", profile="rtn", check=False, dtype=torch.bfloat16)
    assert made.path == Path.cwd() / "model-fp8" and made.record.model.name == "model"
    assert made.record.model.source is None
    assert [path.name for path in Path.cwd().iterdir()] == ["model-fp8"]
    with pytest.raises(ValueError, match=r"made of a pipeline in memory.*give it"):
        fluxq.evaluate_pipeline(made)
