"""Tests of what a call takes, counted without weights, against a counter that watches the call itself."""

import gc
from collections.abc import Callable

import diffusers
import family_pipelines
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from fluxq import tiny
from fluxq.runtime.peaks import Alive, on_meta, peaks

CALL = {"height": 32, "width": 32, "max_sequence_length": 8}
FAMILIES = ("sdxl", "z_image", "chroma", "flux2", "ltx", "sana", "hunyuan_video", "wan")


def embedded() -> tuple[DiffusionPipeline, dict]:
    return tiny.load(), CALL


def ready(make: Callable[[], tuple[DiffusionPipeline, dict]]) -> tuple[DiffusionPipeline, dict]:
    """A pipeline as it is loaded, in bfloat16, for inference."""
    pipe, call = make()
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            nn.Module.to(part.eval(), torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe, call


@pytest.mark.slow
@pytest.mark.parametrize("make", [embedded, *(getattr(family_pipelines, name) for name in FAMILIES)])
def test_without_weights_a_call_takes_what_it_takes_with_them(make):
    """Stage by stage within 3 %; a denoiser's steps, guidance and the prompts' embeddings are part of it."""
    pipe, call = ready(make)
    call = {**call, "prompt": "a red circle"}  # the small tables of positions hold no long one
    counted, taken = peaks(on_meta(pipe), call), peaks(pipe, call)
    assert [*counted] == [*taken] and {"vae"} < {*taken}
    assert all(abs(counted[name] / taken[name] - 1) < 0.03 for name in taken), (counted, taken)


@pytest.mark.slow
def test_a_larger_image_takes_more_and_the_pipeline_stays_as_it_was():
    pipe, _ = ready(embedded)
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    small, large = (peaks(on_meta(pipe), {**CALL, "height": side}) for side in (32, 64))
    assert large["transformer"] > 1.3 * small["transformer"] and large["vae"] > 1.9 * small["vae"]
    assert large["text_encoder"] == small["text_encoder"]
    assert not any("forward" in vars(part) for part in (pipe.transformer, pipe.vae, pipe.text_encoder))
    after = pipe.transformer.state_dict()
    assert (
        all(torch.equal(after[name], tensor) for name, tensor in before.items()) and type(pipe).__module__ != __name__
    )


@pytest.mark.slow
def test_a_default_device_of_torch_changes_nothing():
    """The meta device stands for a GPU: a zero that stood there would meet others on the CPU."""
    pipe, _ = ready(embedded)
    with torch.device("meta"):
        counted = peaks(on_meta(pipe), CALL)
    assert counted == peaks(on_meta(pipe), CALL)


@pytest.mark.slow
def test_a_vae_takes_less_where_it_decodes_in_tiles():
    pipe, _ = ready(embedded)
    twin, call = on_meta(pipe), {**CALL, "height": 64, "width": 64}
    whole = peaks(twin, call)["vae"]
    twin.vae.enable_tiling()
    twin.vae.tile_sample_min_size, twin.vae.tile_latent_min_size = 32, 32 // pipe.vae_scale_factor
    assert peaks(twin, call)["vae"] < 0.6 * whole and not pipe.vae.use_tiling


@pytest.mark.slow
def test_the_counter_by_hand():
    """Two tensors of 4 kB at once, then one of them and a view; weights do not count."""
    weight = torch.ones(1024)
    with Alive([weight]) as alive:
        a = weight + 1
        b = a * 2
        del a
        c = b.view(2, 512).t()
        del b
        d = c.sum()
    gc.collect()
    assert alive.peaks == {"": 2 * 4096} and alive._now == 4096 + 4
    del c, d
    assert alive._now == 0


@pytest.mark.slow
def test_embeddings_in_place_of_a_prompt_and_latents_in_place_of_an_image_are_counted():
    """Without text encoders and a decoded image: only the transformer runs. No length means the usual one."""
    pipe, _ = ready(embedded)
    with torch.no_grad():
        prompt, pooled, _ = pipe.encode_prompt("a", None, max_sequence_length=8)
    call = {"prompt_embeds": prompt, "pooled_prompt_embeds": pooled, "output_type": "latent"}
    call |= {"height": 32, "width": 32, "max_sequence_length": None}
    assert [*peaks(on_meta(pipe), call)] == ["transformer"]
    with pytest.raises(ValueError, match=r"max_sequence_length=8 cannot be counted \(TypeError: "):
        peaks(on_meta(pipe), {"max_sequence_length": "8"})


@pytest.mark.slow
def test_a_call_that_begins_at_an_image_takes_some_steps():
    pipe = diffusers.FluxImg2ImgPipeline(**ready(embedded)[0].components)
    call = {"image": torch.zeros(1, 3, 32, 32), "height": 32, "width": 32, "max_sequence_length": 8}
    counted = peaks(on_meta(pipe), {**call, "strength": 0.3})
    assert counted["transformer"] == pytest.approx(peaks(on_meta(pipe), call)["transformer"], rel=0.001)


def test_a_call_that_fails_says_which():
    pipe, _ = ready(embedded)
    with pytest.raises(ValueError, match=r"a call with height=32, nonsense=1 cannot be counted \(TypeError: "):
        peaks(on_meta(pipe), {"height": 32, "nonsense": 1})
    assert "forward" not in vars(pipe.transformer)
