"""Random tiny pipelines of several families through the command line: captured, fitted, written, loaded and run."""

import json
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline
from family_pipelines import (
    chroma,
    fill,
    flux2,
    hidream,
    hunyuan_video,
    ltx,
    pixart,
    qwen_image,
    sana,
    sd3,
    sdxl,
    wan,
    wan_2,
    z_image,
)
from PIL import Image
from torch import nn

from fluxq import QuantLinear
from fluxq.cli import cli
from fluxq.eval.metrics.schema import read_report
from fluxq.jobs.choosing import choose
from fluxq.jobs.job import JobOptions
from fluxq.jobs.planning import job_of
from fluxq.jobs.search import AutoOptions, search_of
from fluxq.kernels.linear import linears_of
from fluxq.recipes.all_families import FAMILIES


@pytest.fixture
def quantize(tmp_path, monkeypatch):
    """quantize(make, options…) runs `fluxq quantize` on what `make` gives, and returns click's result."""
    monkeypatch.chdir(tmp_path)

    def run(make: Callable[[], tuple[DiffusionPipeline, dict]], *options: str):
        torch.manual_seed(0)
        pipe, call = make()
        pipe.save_pretrained("model")
        Path("model", "fluxq_generation.json").write_text(json.dumps(call))
        return CliRunner().invoke(cli, ["quantize", "model", "-o", "out", *options])

    return run


def loaded(component: str = "transformer") -> nn.Module:
    """The written pipeline's denoiser, after an image has been made with it."""
    pipe = DiffusionPipeline.from_pretrained("out", dtype=torch.bfloat16)
    call = json.loads(Path("model", "fluxq_generation.json").read_text())
    pipe.set_progress_bar_config(disable=True)
    made = pipe(prompt="a red circle", output_type="latent", generator=torch.Generator().manual_seed(0), **call)
    latents = made[0] if isinstance(made[0], torch.Tensor) else torch.stack(list(made[0]))
    assert torch.isfinite(latents.float()).all()
    return getattr(pipe, component)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [sana, *(pytest.param(make, marks=pytest.mark.slow) for make in (sdxl, z_image, chroma, flux2, ltx))],
)
def test_a_pipeline_is_captured_fitted_written_and_run(make, quantize):
    Path("quick.yaml").write_text("extends: nvfp4\ncalibration: {count: 2, steps: 2}\n")
    done = quantize(make, "--recipe", "quick.yaml", "--no-check")
    assert done.exit_code == 0, done.stderr
    (part,) = json.loads(Path("out", "fluxq_plan.json").read_text())["components"]
    assert part["groups"] and all(group["sqnr_db"] > 5 for group in part["groups"])
    model = loaded(part["component"])
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    family = FAMILIES[part["family"]]
    assert set(layers) == {name for name in linears_of(model) if family.locate(name)}
    assert any(layer.scheme.features for layer in layers.values())


@pytest.mark.slow
def test_a_pipeline_that_does_not_tell_of_its_steps_is_fitted_checked_and_judged(quantize):
    Path("quick.yaml").write_text("extends: nvfp4\ncalibration: {count: 2, steps: 2}\n")
    done = quantize(pixart, "--recipe", "quick.yaml")
    assert done.exit_code == 0, done.stderr
    record = json.loads(Path("out", "fluxq_plan.json").read_text())
    (part,) = record["components"]
    assert part["groups"] and all(group["sqnr_db"] > 5 for group in part["groups"])
    assert record["trajectory"]["steps_seen"] == [0, 1] and record["trajectory"]["sigmas"][0] > 1
    assert record["check"]["passed"] and record["trajectory"]["call"]["use_resolution_binning"] is False
    few = ["--count", "2", "--backends", "native"]
    judged = CliRunner().invoke(cli, ["eval", "out", *few])
    assert judged.exit_code == 0, judged.output
    (run,) = read_report(Path("out", "eval", "report.json")).runs
    assert run.metrics["psnr"].value.mean > 20 and run.drift.steps == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (fill, {"image": "a.png", "mask": "mask.png"}),
        (wan, {"frames": 5, "negative_prompt": "a dog"}),
    ],
    ids=["fill", "wan"],
)
def test_what_rows_say_goes_through_a_whole_job(make, columns, quantize):
    for name, mode in (("a.png", "RGB"), ("mask.png", "L")):
        Image.new(mode, (16, 16), "white").save(name)
    rows = [{"prompt": f"a {word} circle", **columns} for word in ("red", "blue")]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("quick.yaml").write_text("extends: nvfp4\ncalibration: {count: 2, steps: 2}\n")
    done = quantize(make, "--recipe", "quick.yaml", "--profile", "balanced", "--prompts", "p.jsonl")
    assert done.exit_code == 0, done.stderr
    record = json.loads(Path("out", "fluxq_plan.json").read_text())
    said = {"image": "image", "mask": "mask_image", "frames": "num_frames", "negative_prompt": "negative_prompt"}
    assert [set(item[2]) for item in record["trajectory"]["items"]] == [{said[column] for column in columns}] * 2
    assert all(group["sqnr_db"] > 5 for group in record["components"][0]["groups"])
    frames = columns.get("frames")
    check = record["check"]
    assert check["finite"] and (check["images"], check["frames"]) == (4 if frames is None else 2, frames)
    assert "next: fluxq eval out" in done.stdout


def ddim() -> tuple[DiffusionPipeline, dict]:
    """Stable Diffusion XL with a scheduler that keeps no sigmas."""
    pipe, call = sdxl()
    pipe.scheduler = diffusers.DDIMScheduler()
    return pipe, call


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [wan_2, ltx, fill, wan, hunyuan_video, sd3, qwen_image, sana, pixart, flux2, chroma, z_image, hidream, ddim],
)
def test_formats_are_chosen_for_pipelines_of_every_family(make, tmp_path, monkeypatch) -> None:
    """In fp32: what bfloat16 rounds away of such images is more than a format's error."""
    monkeypatch.chdir(tmp_path)
    # It makes a megapixel of any size that it is given.
    small = property(lambda _: 8, lambda *_: None)
    monkeypatch.setattr(diffusers.HiDreamImagePipeline, "default_sample_size", small, raising=False)
    torch.manual_seed(0)
    pipe, call = make()
    pipe.save_pretrained("model")
    rows = {"prompt": "a red circle"}
    if make is fill:
        for name, mode in (("image", "RGB"), ("mask", "L")):
            Image.new(mode, (16, 16), "white").save(f"{name}.png")
            rows[name] = f"{name}.png"
    Path("p.jsonl").write_text(json.dumps(rows))
    options = {"model": "model", "call": call, "prompts": "p.jsonl", "dtype": "float32"}
    budget = AutoOptions(bits=6.0, menu=("nvfp4", "fp8"), count=1)
    result = choose(search_of(JobOptions(**options, output="chosen.yaml"), budget))
    assert result is not None and result["measures"] == ["adjoint", "velocity"]
    assert {each["option"] for each in result["units"]} == {"nvfp4", "fp8"}
    assert 1 / 5 < result["measured_nmse"] / result["predicted_nmse"] < 5
    plans = job_of(JobOptions(**options, recipe="chosen.yaml"), writes=False, runs=False).plans
    scheme_of = {f"{plan.component}.{layer.name}": str(layer.scheme) for plan in plans for layer in plan.layers}
    assert all(scheme_of[name].startswith(each["option"]) for each in result["units"] for name in each["layers"])
