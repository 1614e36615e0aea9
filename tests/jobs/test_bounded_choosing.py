"""`fluxq auto` of a model that does not fit: weights come in their turn, and all that is measured is the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from diffusers import FluxTransformer2DModel
from family_pipelines import flux2, ltx, sdxl, wan, z_image

from fluxq.base.residence import Residence
from fluxq.cli import cli
from fluxq.jobs import memory, planning
from fluxq.jobs.choosing import choose
from fluxq.jobs.job import JobOptions, Run
from fluxq.jobs.search import AutoOptions, Search, search_of

RECIPE = """
extends: nvfp4
components:
  transformer: {exclude: ['**.to_add_out', '**.net.**', 'single_transformer_blocks.**']}
"""
OPTIONS = AutoOptions(bits=6.0, menu=("nvfp4", "fp8"), count=1)
MIB = 1 << 20


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    """A recipe with three units of the embedded pipeline."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE)
    return "mine.yaml"


def search(recipe: str, options: AutoOptions = OPTIONS, **job: Any) -> Search:
    return search_of(JobOptions(**{"recipe": recipe, "call": {"num_inference_steps": 1}, **job}), options)


def made(folder: str, recipe: str, **job: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files that a search writes, and its result."""
    asked = search(recipe, output=f"{folder}/out.yaml", **job)
    result = choose(asked)
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix != ".json"}
    return files, {**(result or {}), "seconds": 0}


@pytest.mark.slow
def test_nothing_that_is_written_differs(recipe, tight):
    plain = made("plain", recipe)
    assert not tight
    bounded = made("bounded", recipe, max_memory=1 << 30)
    assert len(tight) == 1 and tight[0].resident_bytes == 0
    assert plain == bounded and plain[1]["measures"] == ["adjoint", "velocity"]
    assert len(plain[0]) == 3 and plain[1]["measured_nmse"] > 0


@pytest.mark.slow
def test_attention_is_measured_where_some_of_its_weights_stay(recipe, monkeypatch):
    Path(recipe).write_text(RECIPE.replace("nvfp4", "fp8"))
    options = AutoOptions(gate="latent_sqnr>=1", gpu="h200", attention=True, menu=("fp8",), count=1)
    rooms: list[Residence] = []

    def make(device: str, _limit: int) -> Residence:
        rooms.append(Residence(device, 8_800_000))  # of which running sets 8 aside; weights take 3
        return rooms[-1]

    monkeypatch.setattr(memory, "Residence", make)
    tables = []
    for bound in (None, 1 << 30):
        asked = search(recipe, options, output=f"{bound}/out.yaml", max_memory=bound)
        choose(asked)
        tables.append(asked.table_file("velocity").read_bytes())
    assert tables[0] == tables[1] and len(rooms) == 1 and 0 < rooms[0].resident_bytes


@pytest.mark.slow
def test_gradients_are_the_same_where_no_block_is_run_again(recipe, tight, monkeypatch):
    monkeypatch.setattr(FluxTransformer2DModel, "_supports_gradient_checkpointing", False)
    assert made("plain", recipe) == made("bounded", recipe, max_memory=1 << 30) and len(tight) == 1


@pytest.mark.long
@pytest.mark.parametrize("make", [z_image, ltx, flux2, sdxl, wan], ids=lambda make: make.__name__)
def test_other_families_are_measured_the_same(make: Callable, recipe, tight):
    """Models with weights of their own beside those of their modules; a VAE whose pipeline reads its numbers."""
    torch.manual_seed(0)
    pipe, call = make()
    pipe.save_pretrained("model")
    Path("model", "fluxq_generation.json").write_text(json.dumps({**call, "num_inference_steps": 2}))
    bits = {"call": {}, "model": "model"}
    assert made("plain", "nvfp4", **bits) == made("bounded", "nvfp4", **bits, max_memory=1 << 32)


def settled(recipe: str, monkeypatch, free: int, device: str = "auto") -> Run:
    """A search's run on a machine with so much free memory."""
    monkeypatch.setattr(planning, "free_bytes", lambda _: free)
    return search(recipe, device=device).job.run


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_read_in_turn(recipe, monkeypatch, caplog):
    assert settled(recipe, monkeypatch, 1 << 40).memory is None
    small = 81 * MIB
    run = settled(recipe, monkeypatch, small)
    assert run.device == "cpu" and run.limit == int(0.9 * small)
    assert "weights are read when it is their turn" in caplog.text
    assert settled(recipe, monkeypatch, small, "cpu").memory is None  # its weights fit, the rest is an estimate
    with pytest.raises(ValueError, match=r"does not fit on cpu: .*leave out --device"):
        settled(recipe, monkeypatch, 2 * MIB, "cpu")
    with pytest.raises(ValueError, match=r"for adjoint of transformer on .*; --measure velocity takes less"):
        settled(recipe, monkeypatch, 75 * MIB)


@pytest.mark.slow
def test_too_little_is_refused_with_the_least_that_does(recipe):
    words = [
        "auto",
        "tiny",
        "--bits",
        "6",
        "--recipe",
        recipe,
        "--count",
        "1",
        "--num-inference-steps",
        "1",
        "--max-memory",
    ]
    done = CliRunner().invoke(cli, [*words, "1MiB"])
    assert done.exit_code == 2 and "--max-memory 1MiB: adjoint of transformer on 1 image of 16x16 needs" in done.output
    assert "or a smaller --height and --width, or --measure velocity" in done.output
    velocity = replace(OPTIONS, measure="velocity")
    bounds = [search(recipe, options, max_memory=1 << 40).job.run.memory for options in (OPTIONS, velocity)]
    adjoint, plain = (bound.demand.working["transformer"] for bound in bounds if bound)
    assert adjoint > 2 * plain > 0
    assert not list(Path().glob("*.safetensors"))


def test_the_demand_by_hand(recipe):
    """A double block of 256 channels, in numbers of 2 bytes, and 17 times the activations of its widest Linear."""
    asked = search(recipe)
    job, size = asked.job, memory.CallSize(1, 16, 16, None, None)
    how = {"sizes": [size], "plans": job.calibrated.values(), "by_adjoint": True}
    needs = memory.demand_of_search("cpu", "bfloat16", job.folder, **how).needs
    layers = job.calibrated["transformer"].layers
    block = [layer for layer in layers if layer.block == "transformer_blocks.0"]
    tokens = memory.tokens(job.folder, "transformer", size)
    plain = memory.activations(job.folder, "transformer", size, 2)
    graph = 2 * sum(2 * tokens * (layer.n + layer.k) + layer.n * layer.k for layer in block)
    rounding = 12 * max(layer.n * layer.k for layer in job.calibrated["transformer"].quantized)
    coming = 2 * memory._largest(job.folder, "transformer", 2)
    assert needs["running transformer rounded"] == plain + rounding + coming
    rest = needs["adjoint of transformer on 1 image of 16x16"] - (graph + 17 * plain + rounding + coming)
    assert 0 < rest < 2 * tokens * 6 * 1024  # what six parts of the model are given
