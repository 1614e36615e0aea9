"""Steps as CUDA graphs that look their modulation up: the images of hoisting without graphs, whatever changes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import diffusers
import pytest
import torch
from recorder import STEPS, Answer, guided, latents, velocity
from torch import nn

import fluxq
from fluxq.runtime import modulation
from fluxq.runtime.modulation import HoistedModulation, hoist_modulation

pytestmark = pytest.mark.usefixtures("recorded")


@contextmanager
def products(hoisted: HoistedModulation) -> Iterator[list[int]]:
    """Rows of each product that a modulation Linear computes, but for those of a replay."""
    rows: list[int] = []
    plain = modulation._Modulation._product
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modulation._Modulation, "_product", lambda layer, x: rows.append(len(x)) or plain(layer, x))
        yield rows


def test_modulation_is_looked_up_in_the_graph(flux, caplog):
    with hoist_modulation(flux) as hoisted:
        want = latents(flux)
        with fluxq.capture(flux) as captured, products(hoisted) as rows:
            assert torch.equal(latents(flux), want)
            assert captured.captures == 1 and captured.captured[0].replays == STEPS
            assert torch.equal(latents(flux), want)
            assert captured.captures == 1 and captured.captured[0].replays == 2 * STEPS
            assert rows == [STEPS] * 2 * len(hoisted.layers)  # once a call; the graph multiplies none
    assert caplog.text == ""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["as loaded", "optimized"])
@pytest.mark.parametrize("recipe", ["16 bit", "nvfp4"])
def test_hoisted_images_are_the_same_with_graphs(quantized, recipe, then):
    pipe = quantized(recipe)
    if then == "optimized":
        fluxq.optimize(pipe)
    calls = [
        {},
        {"prompt": ["a red circle", "a star"]},
        guided(),  # two prompts a step: the first call finds no rows of the second, and makes them
        {"num_inference_steps": 5, "prompt": "a star"},
        {"sigmas": [1.0, 0.6, 0.3]},
    ]
    with hoist_modulation(pipe):
        want = [latents(pipe, **call) for call in calls]
        assert not torch.equal(want[0], want[2])
        with fluxq.capture(pipe) as captured:
            for call, image in zip(calls, want, strict=True):
                assert torch.equal(latents(pipe, **call), image), call
            # One for each batch, one more with room for both prompts' rows, one with room for five steps.
            assert captured.captures <= 4


@pytest.mark.parametrize("how", ["from an image", "timesteps that repeat"])
def test_steps_that_begin_in_the_middle_or_repeat(flux, how):
    pipe = flux
    call: dict = {"sigmas": [1.0, 0.6, 0.6, 0.3]}
    if how == "from an image":
        pipe = diffusers.FluxImg2ImgPipeline(**flux.components)
        pipe.set_progress_bar_config(disable=True)
        image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        call = {"image": image, "strength": 0.5, "num_inference_steps": 4}
    with hoist_modulation(pipe) as hoisted:
        want = latents(pipe, **call)
        with fluxq.capture(pipe) as captured, products(hoisted) as rows:
            assert torch.equal(latents(pipe, **call), want)
            assert captured.captures == 1 and len(rows) == len(hoisted.layers)


def test_a_timestep_that_is_none_of_the_schedulers_has_the_right_image(flux, caplog):
    """It is found out after a replay, and computed by a graph without tables, as are that schedule's other steps."""
    model = flux.transformer
    latents(flux)
    given = [torch.full((2,), t).bfloat16() for t in (1.0, 0.123, 1.0)]
    want = [velocity(model, timestep=t) for t in given]
    with hoist_modulation(flux):
        hoisted = velocity(model, timestep=given[0])
        with fluxq.capture(flux) as captured:
            assert torch.equal(velocity(model, timestep=given[0]), hoisted)
            assert torch.equal(velocity(model, timestep=given[1]), want[1])
            assert captured.captures == 2 and caplog.text.count("is none that the scheduler makes") == 1
            assert torch.equal(velocity(model, timestep=given[2]), want[2])
            assert captured.captures == 2
            image = latents(flux)  # the next schedule is looked up again
            assert captured.captures == 3
        assert torch.equal(latents(flux), image)


def test_where_tables_have_no_room_a_graph_computes_the_modulation(flux, caplog):
    want = latents(flux)
    with hoist_modulation(flux, max_rows=1), fluxq.capture(flux) as captured:
        assert torch.equal(latents(flux), want) and torch.equal(latents(flux), want)
        assert captured.captures == 1 and captured.captured[0].replays == 2 * STEPS
    assert caplog.text.count("2 rows are more than max_rows=1") == 1


@pytest.mark.slow
def test_changed_weights_are_seen_by_the_next_call_and_fused_ones_at_once(quantized, lora_file):
    style = lora_file("l.safetensors", ("norm1.linear", "norm.linear"), alpha=16)
    made = []
    for is_captured in (False, True):
        pipe = quantized("16 bit")
        pipe.load_lora_weights(style)
        with hoist_modulation(pipe), fluxq.capture(pipe) if is_captured else nullcontext():
            images = [latents(pipe)]
            pipe.transformer.get_submodule("single_transformer_blocks.1.norm.linear.base_layer").weight.mul_(-1)
            images.append(latents(pipe))
            fuse = lambda pipe, step, _t, tensors: (pipe.fuse_lora(lora_scale=0.5), tensors)[1]  # noqa: E731
            images.append(latents(pipe, callback_on_step_end=fuse, num_inference_steps=3))
        made.append(images)
    assert all(map(torch.equal, *made)) and not torch.equal(made[0][0], made[0][1])


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_replaced_weight_or_bias_is_seen_in_the_middle_of_a_call(flux, is_captured, name):
    model, timestep = flux.transformer, torch.ones(2).bfloat16()
    latents(flux)  # makes a schedule that has this timestep
    layer = model.get_submodule("single_transformer_blocks.1.norm.linear")
    with hoist_modulation(flux), fluxq.capture(flux) if is_captured else nullcontext():
        before = velocity(model, timestep=timestep)
        held = layer.get_parameter(name)
        layer.register_parameter(name, nn.Parameter(1 - held.detach(), requires_grad=False))  # no version tells
        after = velocity(model, timestep=timestep)
    assert torch.equal(after, velocity(model, timestep=timestep)) and not torch.equal(after, before)


def test_hoisting_and_taking_it_out_are_other_forms(flux):
    plain = latents(flux)
    with fluxq.capture(flux) as captured:
        with hoist_modulation(flux):
            latents(flux)
            assert captured.captures == 1
        assert torch.equal(latents(flux), plain) and captured.captures == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["the row before", "rows of an old schedule", "nothing is asked"])
def test_a_wrong_row_would_be_seen(flux, monkeypatch, fault):
    calls = [{}, guided(sigmas=[1.0, 0.3])]
    with hoist_modulation(flux):
        want = [latents(flux, **call) for call in calls]
        if fault == "the row before":
            monkeypatch.setattr(modulation, "_equal", lambda rows, temb: (rows == temb).flatten(1).all(1).roll(1))
        else:
            monkeypatch.setattr(Answer, "read", lambda answer: True)
        if fault == "rows of an old schedule":
            monkeypatch.setattr(modulation.Rows, "are_current", True)
        with fluxq.capture(flux):
            made = [latents(flux, **call) for call in calls]
        assert torch.equal(made[0], want[0]) == (fault != "the row before")
        assert not torch.equal(made[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["16 bit", "fp8"])
def test_on_a_gpu_hoisted_images_are_the_same_with_graphs(quantized, recipe, caplog):
    pipe = quantized(recipe).to("cuda")
    calls = [{}, guided(), {"prompt": ["a red circle", "a star"]}, {"num_inference_steps": 5}, {}, guided()]
    with hoist_modulation(pipe) as hoisted:
        want = [latents(pipe, **call) for call in calls]
        with fluxq.capture(pipe, max_graphs=9) as captured, products(hoisted) as rows:
            for call, image in zip(calls, want, strict=True):
                assert torch.equal(latents(pipe, **call), image), call
            captures = captured.captures
            rows.clear()
            assert torch.equal(latents(pipe), want[0]) and captured.captures == captures
            assert len(rows) == len(hoisted.layers)
    assert "without a CUDA graph" not in caplog.text


@pytest.mark.gpu
def test_on_a_gpu_a_timestep_that_is_none_of_the_schedulers_has_the_right_image(quantized):
    pipe = quantized("16 bit").to("cuda")
    model, odd = pipe.transformer, torch.full((2,), 0.123, device="cuda").bfloat16()
    latents(pipe)
    want = velocity(model, timestep=odd)
    with hoist_modulation(pipe), fluxq.capture(pipe) as captured:
        velocity(model, timestep=torch.ones_like(odd))
        assert torch.equal(velocity(model, timestep=odd), want) and captured.captures == 2
