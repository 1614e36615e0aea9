"""Checkpoints that an earlier version wrote load, hold what they say and compute what they did."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file

import fluxq  # noqa: F401  teaches diffusers to read them
from fluxq.quantize.verify import verify
from fluxq.recipes.recipe import shipped_recipes

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINTS = GOLDEN / "checkpoints"


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    sys.path.insert(0, str(GOLDEN))  # make_checkpoints.py imports its neighbour
    try:
        spec = importlib.util.spec_from_file_location("make_checkpoints", GOLDEN / "make_checkpoints.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(GOLDEN))
    return module.inputs()


def test_every_shipped_recipe_has_one() -> None:
    assert {path.name for path in CHECKPOINTS.iterdir() if path.is_dir()} == set(shipped_recipes())


@pytest.mark.often(3)
@pytest.mark.parametrize("recipe", sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir()))
def test_an_earlier_versions_checkpoint_computes_what_it_did(recipe, inputs) -> None:
    loaded: Any = FluxTransformer2DModel.from_pretrained(CHECKPOINTS / recipe, dtype=torch.bfloat16)
    with torch.inference_mode():
        output = loaded(**inputs).sample.float()
    expected = load_file(CHECKPOINTS / "outputs.safetensors")[recipe].float()
    # Another CPU rounds its sums of bf16 otherwise; formats differ from 16 bit, and from one another, by far more.
    assert (output - expected).norm() < 0.01 * expected.norm()
    assert [result for result in verify(CHECKPOINTS / recipe) if result.status == "failed"] == []
