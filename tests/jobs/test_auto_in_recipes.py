"""Recipes with `auto`: what each command makes of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from diffusers import FluxTransformer2DModel

import fluxq
from fluxq.base.output import Output, job_digest
from fluxq.cli import cli
from fluxq.jobs import choosing, making
from fluxq.jobs.job import JobOptions, decisive
from fluxq.jobs.planning import job_of
from fluxq.jobs.search import AutoOptions, auto_options, search_before
from fluxq.recipes.recipe import Auto, load_recipe
from tests.jobs.test_choosing import CALL, small

MINE = "extends: nvfp4\nprofile: rtn\nauto: {bits: 5.5, measure: velocity, count: 1}\n"
ONE_STEP = ("--num-inference-steps", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return small(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE)
    return Path("mine.yaml")


def quantized(model: Path, recipe: Path, **how: Any) -> fluxq.Checkpoint:
    return fluxq.quantize_pipeline(model, recipe, output="out", call=CALL, check=False, **how)


def formats(folder: Path) -> dict[str, str]:
    """Layer -> format of its weights in a checkpoint, 16bit for the others."""
    config = json.loads((folder / "transformer" / "config.json").read_text())["quantization_config"]
    return {name: scheme.partition("-")[0] for scheme, names in config["layers"].items() for name in names}


@pytest.mark.slow
def test_quantizing_searches_first_and_a_repeat_does_nothing(model, mine, monkeypatch) -> None:
    done = quantized(model, mine)
    kept = ["out", "out-chosen.json", "out-chosen.yaml", "small-velocity-errors.safetensors"]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["mine.yaml", *kept]
    result, held = json.loads(Path("out-chosen.json").read_text()), formats(done.path)
    assert result["budget"]["value"] == 5.5 and {"nvfp4", "fp8"} <= {each["option"] for each in result["units"]}
    for each in result["units"]:
        layers = [name.removeprefix("transformer.") for name in each["layers"]]
        assert {held.get(name, "16bit") for name in layers} == {each["option"]}
    assert load_recipe("out-chosen.yaml")[1].auto is None and done.record.recipe.name == "out-chosen"
    stamps = {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*")}
    monkeypatch.setattr(choosing, "Bench", lambda *_: pytest.fail("searched again"))
    monkeypatch.setattr(making, "_quantize", lambda *_: pytest.fail("quantized again"))
    assert quantized(model, mine).record == done.record
    assert stamps == {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*")}


@pytest.mark.slow
def test_an_interrupted_job_goes_on_without_another_search(model, mine, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(making, "quantize_component", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantized(model, mine)
    assert Path("out-chosen.yaml").is_file() and not Path("out").exists()
    monkeypatch.setattr(choosing, "Bench", lambda *_: pytest.fail("searched again"))
    assert quantized(model, mine).path.is_dir()


def test_a_job_that_replaces_an_output_goes_on_without_another_search_too(model, mine, monkeypatch) -> None:
    options = JobOptions(str(model), str(mine), output="out", call=CALL, overwrite=True)
    made, _ = search_before(options) or pytest.fail("no search")
    digest = job_digest(decisive(made.job))
    monkeypatch.setattr(Output, "holds", lambda _output, job: job == digest)
    again, _ = search_before(options) or pytest.fail("no search")
    assert (made.job.finished, again.job.finished) == (False, True)


@pytest.mark.slow
def test_the_command_says_what_it_chooses_for(model, mine) -> None:
    done = CliRunner().invoke(cli, ["quantize", str(model), "--recipe", "mine.yaml", *ONE_STEP, "--no-check"])
    assert done.exit_code == 0, done.stderr
    assert "formats are chosen first, for bits: 5.5" in done.stdout
    assert "recipe: small-mine-chosen.yaml" in done.stdout and Path("small-mine").is_dir()
    assert done.stdout.index("small-mine-chosen.yaml") < done.stdout.index("bits per weight")
    as_json = ["quantize", str(model), "--recipe", "mine.yaml", *ONE_STEP, "--no-check", "--json"]
    assert json.loads(CliRunner().invoke(cli, as_json).stdout)["output"] == "small-mine"


def test_a_plan_shows_the_base_and_says_so(model, mine) -> None:
    done = CliRunner().invoke(cli, ["plan", str(model), "--recipe", "mine.yaml"])
    assert done.exit_code == 0 and "formats are chosen by a search, for bits: 5.5" in done.stdout
    said = json.loads(CliRunner().invoke(cli, ["plan", str(model), "--recipe", "mine.yaml", "--json"]).stdout)
    off = {"modulation": False, "attention": False, "steps": False}
    assert said["auto"] == {"bits": 5.5, "measure": "velocity", "count": 1, "menu": [], **off}
    Path("plain.yaml").write_text("extends: nvfp4\nprofile: rtn\n")
    plain = json.loads(CliRunner().invoke(cli, ["plan", str(model), "--recipe", "plain.yaml", "--json"]).stdout)
    assert said == plain | {"auto": said["auto"]}


def test_the_command_auto_takes_what_it_is_not_told_from_the_recipe(mine) -> None:
    recipe = load_recipe(str(mine))[1]
    nothing = dict.fromkeys(("bits", "size", "ms", "gate", "gpu", "dialect", "measure", "count")) | {"menu": ()}
    assert auto_options(recipe, nothing) == AutoOptions(bits=5.5, measure="velocity", count=1)
    given = {**nothing, "size": 10**9, "menu": ("fp8",), "count": 3}
    assert auto_options(recipe, given) == AutoOptions(size=10**9, menu=("fp8",), measure="velocity", count=3)
    assert auto_options(load_recipe("nvfp4")[1], nothing) == AutoOptions()
    command = ["auto", "tiny", "--recipe", "mine.yaml", *ONE_STEP, "--dry-run", "--json"]
    assert set(json.loads(CliRunner().invoke(cli, command).stdout)["passes"]) == {"velocity", "runs"}


def test_what_cannot_search_refuses_the_recipe(model, mine) -> None:
    with pytest.raises(ValueError, match=r"chooses formats by a search.*run `fluxq auto MODEL --recipe mine\.yaml`"):
        config = fluxq.FluxqConfig(recipe="mine.yaml")
        FluxTransformer2DModel.from_pretrained(model / "transformer", quantization_config=config, dtype=torch.bfloat16)
    Path("a.safetensors").touch()
    with pytest.raises(ValueError, match=r"chosen for the model without a LoRA: run `fluxq auto` without it"):
        search_before(JobOptions(str(model), "mine.yaml", lora=("a.safetensors",)))
    done = CliRunner().invoke(cli, ["plan", str(model), "--recipe", "mine.yaml", "--vram", "12GB"])
    assert done.exit_code == 2 and "recipe mine.yaml chooses formats by a search" in done.stderr
    assert search_before(JobOptions(str(model), "nvfp4")) is None


def test_statistics_are_those_of_the_base(model, mine) -> None:
    jobs = [job_of(JobOptions(str(model), recipe, call=CALL), writes=False) for recipe in ("mine.yaml", "nvfp4")]
    assert jobs[0].plans[0].statistics_groups().keys() == jobs[1].plans[0].statistics_groups().keys()


def test_the_key_has_the_words_of_a_search() -> None:
    assert Auto.model_fields.keys() <= {field.name for field in dataclasses.fields(AutoOptions)}
