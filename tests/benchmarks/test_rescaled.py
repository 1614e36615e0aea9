"""The embedded pipeline with outliers computes what the plain one does."""

from pathlib import Path

import pytest
import torch

from benchmarks.rescaled import write_rescaled
from fluxq import tiny
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_rescaled(Path(tiny.path()), tmp_path_factory.mktemp("rescaled") / "tiny")


def inputs_of(pipe, names) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """An image's latents, and channels' root mean squares of what some Linears read."""
    seen = {}

    def look(name, x) -> None:
        seen[name] = x.double().square().flatten(0, -2).mean(0).sqrt()

    handles = [
        pipe.transformer.get_submodule(name).register_forward_pre_hook(lambda _, given, name=name: look(name, given[0]))
        for name in names
    ]
    kwargs = {**tiny.CALL_KWARGS, "num_inference_steps": 4, "output_type": "latent"}
    made = pipe(tiny.PROMPTS[0], generator=torch.Generator().manual_seed(0), **kwargs).images
    for handle in handles:
        handle.remove()
    return made, seen


@pytest.mark.slow
def test_images_are_the_same_and_channels_are_not(folder):
    names = [
        *(f"transformer_blocks.0.{name}" for name in ("attn.to_q", "attn.to_out.0", "attn.to_add_out")),
        *(f"single_transformer_blocks.2.{name}" for name in ("proj_mlp", "proj_out")),
    ]
    plain, channels = inputs_of(load_pipeline(resolve_model("tiny"), "float32"), names)
    made, outliers = inputs_of(load_pipeline(ModelFolder("rescaled", folder), "float32"), names)
    error = (made.double() - plain.double()).square().sum() / plain.double().square().sum()
    assert -10 * torch.log10(error) > 80
    for name in names:
        attended = slice(0, 128)
        before, after = (each[name][attended] for each in (channels, outliers))
        assert after.max() / after.median() > 2 * before.max() / before.median(), name
