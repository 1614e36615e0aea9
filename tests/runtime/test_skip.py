"""Steps that are not computed: what stands for them, in which calls, and beside what else changes a pipeline."""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.configuration_utils import FrozenDict
from family_pipelines import chroma, flux2, ltx, pixart, sana, sdxl, wan, z_image
from torch import Tensor, nn

import fluxq
from fluxq import tiny
from fluxq.recipes.step_list import StepList, extrapolation
from fluxq.runtime.skip import skip_steps
from fluxq.runtime.skipped import architectures, skipped_in
from fluxq.runtime.steps import keep_steps

SIZE = {**tiny.CALL_KWARGS, "num_inference_steps": 6}
COMPUTED = [0, 1, 3, 5]


@pytest.fixture(scope="module")
def sixteen() -> diffusers.FluxPipeline:
    return tiny.load()


@pytest.fixture
def pipe(sixteen) -> diffusers.FluxPipeline:
    """The 16-bit pipeline with a transformer and a scheduler of its own."""
    parts = sixteen.components
    own = {name: copy.deepcopy(parts[name]) for name in ("transformer", "scheduler")}
    made = diffusers.FluxPipeline(**{**parts, **own})
    made.register_to_config(_name_or_path=sixteen.config._name_or_path)
    made.set_progress_bar_config(disable=True)
    return made


def run(pipe: Any, **how: Any) -> Tensor:
    """Final latents of two images."""
    with torch.no_grad():
        noise = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
        return pipe(["a red circle", "a blue seven"], generator=noise, output_type="latent", **SIZE | how).images


def outputs(pipe: Any, **how: Any) -> list[Tensor]:
    """Return the denoiser's outputs, call by call."""
    seen: list[Tensor] = []
    hook = pipe.transformer.register_forward_hook(lambda _m, _a, output: seen.append(output[0].clone()))
    run(pipe, **how)
    hook.remove()
    return seen


# --- what is returned


def test_a_list_of_all_steps_changes_no_bit(pipe) -> None:
    plain = run(pipe)
    with fluxq.skip_steps(pipe, range(6)) as skipped:
        assert torch.equal(run(pipe), plain)
        assert (skipped.calls, skipped.computed) == (6, 6)
    assert torch.equal(run(pipe), plain) and "forward" not in vars(pipe.transformer)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_skipped_steps_return_what_the_last_ones_extrapolate_to(pipe, order) -> None:
    levels = tuple(float(6 - step) / 6 for step in range(6))
    steps = StepList(tuple(COMPUTED), order, levels, "FlowMatchEulerDiscreteScheduler", settings(pipe))
    with skip_steps(pipe, steps) as skipped:
        for _ in range(2):
            seen = outputs(pipe)
    assert (skipped.calls, skipped.computed) == (12, 8)
    for step in (2, 4):
        nodes = [each for each in COMPUTED if each < step][-order - 1 :]
        factors = extrapolation([levels[node] for node in nodes], levels[step])
        expected = sum(f * seen[node].float() for f, node in zip(factors, nodes, strict=True))
        torch.testing.assert_close(seen[step].float(), expected, rtol=0.01, atol=0.01)
        assert seen[step].dtype == torch.bfloat16


def test_a_fit_multiplies_outputs_at_skipped_and_at_computed_steps(pipe) -> None:
    """In calls of other noise levels, and in steps that are kept beside those of the list, it does not."""
    levels, rows = tuple(float(6 - step) / 6 for step in range(6)), ((1.0,), (0.0, 1.0), (-0.7, 1.5), (0.2, -0.5, 1.2))
    rows = (*rows, (0.0, -1.0, 2.0), (0.1, 0.2, 0.3, 0.4))
    steps = StepList((*COMPUTED,), 1, levels, "FlowMatchEulerDiscreteScheduler", settings(pipe), fitted=rows)
    ran: list[Tensor] = []
    forward = pipe.transformer.forward
    pipe.transformer.forward = lambda *args, **kwargs: (ran.append(made := forward(*args, **kwargs)), made)[1]
    with skip_steps(pipe, steps) as skipped:
        seen = outputs(pipe, true_cfg_scale=2.0, negative_prompt=["a white ground"] * 2)
        assert (skipped.calls, skipped.computed) == (12, 8)
        for number in (0, 1):
            computed = [made[0].float() for made in ran[number::2]]
            for step, row in enumerate(rows):
                expected = sum(factor * output for factor, output in zip(row, computed, strict=False))
                torch.testing.assert_close(seen[number::2][step].float(), expected, rtol=0.01, atol=0.01)
        fitted = run(pipe)
        other = run(pipe, num_inference_steps=12)
    with skip_steps(pipe, replace(steps, fitted=())):
        assert torch.equal(run(pipe, num_inference_steps=12), other) and not torch.equal(run(pipe), fitted)


def settings(pipe: Any) -> dict[str, Any]:
    with skip_steps(pipe, [0, 1]) as skipped:
        return dict(skipped.steps.settings)


def test_guidance_with_two_calls_computes_both_or_none(pipe) -> None:
    with skip_steps(pipe, COMPUTED) as skipped:
        seen = outputs(pipe, true_cfg_scale=3.0, negative_prompt=["a white ground"] * 2)
    assert (skipped.calls, skipped.computed) == (12, 8)
    for number in (0, 1):
        own = seen[number::2]
        torch.testing.assert_close(own[2], 2 * own[1].float() - own[0].float(), check_dtype=False, rtol=0.02, atol=0.02)
    assert not torch.equal(seen[4], seen[5])


def test_a_second_call_that_was_not_there_at_the_last_computed_step_is_computed(pipe) -> None:
    """As of guidance that is left out for some steps."""
    seen: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda _m, _a, how: seen.append(how), with_kwargs=True)
    run(pipe)
    hook.remove()
    with skip_steps(pipe, COMPUTED) as skipped, torch.no_grad():
        pipe.scheduler.set_timesteps(6)
        computed = []
        for step, calls in enumerate((2, 1, 2)):
            for _ in range(calls):
                output = pipe.transformer(**seen[step])[0]
                computed.append(skipped.computed)
            pipe.scheduler.step(output, pipe.scheduler.timesteps[step], seen[step]["hidden_states"])
    assert computed == [1, 2, 3, 3, 4]


def test_a_call_that_begins_at_an_image_computes_the_nearest_levels(pipe) -> None:
    from_image = diffusers.FluxImg2ImgPipeline(**pipe.components)
    from_image.set_progress_bar_config(disable=True)
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    how = {"height": 16, "width": 16, "image": image, "strength": 0.7}
    with skip_steps(from_image, COMPUTED) as skipped:
        run(from_image, **how)
    assert (skipped.calls, skipped.computed) == (5, 3)


def test_a_call_that_begins_at_an_image_with_as_many_steps_is_not_the_lists_own(pipe, caplog) -> None:
    from_image = diffusers.FluxImg2ImgPipeline(**pipe.components)
    from_image.set_progress_bar_config(disable=True)
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    how = {"height": 16, "width": 16, "image": image, "strength": 0.5, "num_inference_steps": 12}
    with caplog.at_level(logging.WARNING), skip_steps(from_image, [0, 1, 2, 3, 5]) as skipped:
        run(from_image, **how)
    assert (skipped.calls, skipped.computed) == (6, 3)  # of levels 6/12 to 1/12, nearest to 3/6 and 1/6
    assert "of this one of 6, 3 are computed, by the nearest noise levels" in caplog.text


def test_a_controlnet_is_computed_in_all_steps_and_heard_in_computed_ones(pipe) -> None:
    torch.manual_seed(0)
    control: Any = diffusers.FluxControlNetModel.from_transformer(
        pipe.transformer, num_layers=1, num_single_layers=1, attention_head_dim=64, num_attention_heads=2
    )
    control.to(torch.bfloat16)
    for layer in (*control.controlnet_blocks, *control.controlnet_single_blocks):
        nn.init.normal_(layer.weight, std=0.1)
    controlled = diffusers.FluxControlNetPipeline(**pipe.components, controlnet=control)
    controlled.set_progress_bar_config(disable=True)
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    ran: list[int] = []
    hook = control.register_forward_hook(lambda *_: ran.append(1))
    how = {"height": 16, "width": 16, "control_image": image}
    plain = run(controlled, **how)
    with skip_steps(controlled, range(6)):
        assert torch.equal(run(controlled, **how), plain)
    with skip_steps(controlled, COMPUTED) as skipped:
        listed = run(controlled, **how)
        assert not torch.equal(listed, run(controlled, **how, controlnet_conditioning_scale=0.0))
    hook.remove()
    assert (skipped.calls, skipped.computed, len(ran)) == (12, 8, 24)
    assert 0 < (listed - plain).norm() < 0.5 * plain.norm()


def test_calls_outside_the_pipelines_steps_are_refused(pipe) -> None:
    """As of a second pipeline with the same denoiser and a scheduler of its own."""
    other = diffusers.FluxPipeline(**{**pipe.components, "scheduler": copy.deepcopy(pipe.scheduler)})
    other.set_progress_bar_config(disable=True)
    with skip_steps(pipe, COMPUTED):
        listed = run(pipe)
        with pytest.raises(ValueError, match=r"outside the 6 steps of the pipeline with the list.*remove"):
            run(other)
        assert torch.equal(run(pipe), listed)


def test_calls_of_another_pipeline_are_refused_before_the_first_one_ran() -> None:
    first = tiny.load()
    other = diffusers.FluxPipeline(**{**first.components, "scheduler": copy.deepcopy(first.scheduler)})
    for made in (first, other):
        made.set_progress_bar_config(disable=True)
    with skip_steps(first, COMPUTED) as skipped:
        with pytest.raises(ValueError, match=r"at several timesteps, and the scheduler .*makes none: give other"):
            run(other, true_cfg_scale=3.0, negative_prompt=["a white ground"] * 2)
        run(first, true_cfg_scale=3.0, negative_prompt=["a white ground"] * 2)
    assert skipped.computed == 4 + 8


def test_a_call_whose_noise_levels_do_not_fall_is_refused(pipe) -> None:
    with skip_steps(pipe, COMPUTED), pytest.raises(ValueError, match="do not fall from step to step"):
        run(pipe, sigmas=[1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_another_number_of_steps_is_said_and_takes_the_nearest_levels(pipe, caplog) -> None:
    with caplog.at_level(logging.WARNING), skip_steps(pipe, COMPUTED) as skipped:
        for _ in range(2):
            run(pipe, num_inference_steps=12)
    assert (skipped.calls, skipped.computed) == (24, 8)
    assert [record.getMessage() for record in caplog.records if "the list is of" in record.getMessage()] == [
        "the list is of a call of 6 steps; of this one of 12, 4 are computed, by the nearest noise levels"
    ]


def test_each_of_two_denoisers_computes_its_first_step(two_denoisers) -> None:
    pipe, call = two_denoisers
    calls = {"transformer": 0, "transformer_2": 0}
    for name in calls:
        forward = getattr(pipe, name).forward

        def counting(*args: Any, name: str = name, forward: Callable = forward, **kwargs: Any) -> Any:
            calls[name] += 1
            return forward(*args, **kwargs)

        getattr(pipe, name).forward = counting
    call = {**call, "num_inference_steps": 8}
    pipe(prompt="a", output_type="latent", **call)
    every = dict(calls)
    with skip_steps(pipe, [0, 7]) as skipped:
        pipe(prompt="a", output_type="latent", **call)
    assert every["transformer"] and every["transformer_2"]
    branches = sum(every.values()) // 8
    added = {name: calls[name] - every[name] for name in calls}
    assert added == {"transformer": branches, "transformer_2": 2 * branches}
    assert skipped.computed == 3 * branches


@pytest.fixture
def two_denoisers() -> tuple[Any, dict]:
    torch.manual_seed(0)
    pipe, call = wan()
    pipe = diffusers.WanPipeline(
        **{**pipe.components, "transformer_2": copy.deepcopy(pipe.transformer)}, boundary_ratio=0.5
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe, call


@pytest.mark.often(1)
@pytest.mark.parametrize("make", [sana, sdxl, z_image, chroma, flux2, ltx, pixart, wan])
def test_pipelines_of_all_kinds_run_with_a_list(make) -> None:
    torch.manual_seed(0)
    pipe, call = make()
    pipe.set_progress_bar_config(disable=True)
    if make is pixart:
        call = {**call, "use_resolution_binning": False}
    how = {**call, "num_inference_steps": 6, "generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    with skip_steps(pipe, COMPUTED) as skipped:
        made = pipe(prompt="a red circle", **how)[0]
    assert torch.isfinite(torch.as_tensor(made[0] if isinstance(made, list) else made).float()).all()
    assert skipped.computed == skipped.calls * 4 // 6 < skipped.calls


# --- beside what else changes a pipeline


@pytest.mark.usefixtures("recorded")
def test_a_captured_step_is_replayed_in_computed_steps_alone_with_the_same_bytes(pipe) -> None:
    with skip_steps(pipe, COMPUTED):
        eager = run(pipe)
    with fluxq.capture(pipe) as captured, skip_steps(pipe, COMPUTED):
        for _ in range(2):
            assert torch.equal(run(pipe), eager)
        assert [row.replays for row in captured.captured] == [8]


@pytest.mark.usefixtures("recorded")
def test_capturing_comes_first(pipe) -> None:
    with (
        skip_steps(pipe, COMPUTED),
        pytest.raises(ValueError, match=r"steps of it are skipped.*capture, and skip again"),
    ):
        fluxq.capture(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", "whole", "wrapped"])
def test_a_compiled_model_skips_steps(pipe, how) -> None:
    torch._dynamo.reset()
    with skip_steps(pipe, COMPUTED):
        eager = run(pipe)
    if how == "blocks":
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    elif how == "whole":
        pipe.transformer.compile(backend="eager")
    else:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with skip_steps(pipe, COMPUTED) as skipped:
        torch.testing.assert_close(run(pipe), eager, rtol=0.02, atol=0.02)
    assert (skipped.calls, skipped.computed) == (6, 4)
    denoiser: Any = pipe.transformer
    assert skipped_in(denoiser) is None


@pytest.mark.slow
def test_optimized_blocks_compute(quantized) -> None:
    small = quantized("nvfp4")
    plain = run(small)
    with skip_steps(small, COMPUTED) as skipped:
        assert fluxq.optimize(small)
        assert not torch.equal(run(small), plain)
        fluxq.restore(small)
    assert skipped.computed == 4 and torch.equal(run(small), plain)


def test_an_adapter_counts_in_computed_steps(pipe, lora_file) -> None:
    plain = run(pipe)
    pipe.load_lora_weights(lora_file("style.safetensors", ("to_q", "proj_out")))
    adapted = run(pipe)
    with skip_steps(pipe, range(6)):
        assert torch.equal(run(pipe), adapted) and not torch.equal(adapted, plain)


def test_an_offloaded_model_rests_in_skipped_steps(pipe) -> None:
    with skip_steps(pipe, COMPUTED):
        expected = run(pipe)
    pipe.transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    loads: list[int] = []
    forward = pipe.transformer.forward
    pipe.transformer.forward = lambda *args, **kwargs: (loads.append(1), forward(*args, **kwargs))[1]
    with skip_steps(pipe, COMPUTED):
        assert torch.equal(run(pipe), expected)
    assert len(loads) == 4


def test_steps_in_16_bit_are_computed_as_the_list_says(quantized, tiny_folder) -> None:
    small = quantized("nvfp4")
    with keep_steps(small, first=1, source=str(tiny_folder)) as kept, skip_steps(small, [0, 2, 5]) as skipped:
        run(small)
    assert (kept.calls, kept.calls_in_16_bit, skipped.computed) == (6, 1, 3)


def test_steps_that_are_kept_in_16_bit_are_computed_beside_the_list(quantized, tiny_folder) -> None:
    small = quantized("nvfp4")
    with keep_steps(small, first=2, last=2, source=str(tiny_folder)) as kept:
        with skip_steps(small, [0, 3, 5]) as skipped:
            run(small)
            run(small, num_inference_steps=7)
        assert (kept.calls_in_16_bit, skipped.computed) == (8, 5 + 5)
        made = skip_steps(small, compute=0.7, call=SIZE)
        assert {0, 1, 4, 5} == {*made.steps.computed}
        made.remove()
        with pytest.raises(ValueError, match=r"3 computed steps are too few: this pipeline needs 4"):
            skip_steps(small, compute=0.5, call=SIZE)


def test_a_copy_computes_every_step(pipe) -> None:
    with skip_steps(pipe, COMPUTED) as skipped:
        pipe.transformer = copy.deepcopy(pipe.transformer)
        run(pipe)
    assert skipped.calls == 0


# --- where lists come from


@pytest.mark.slow
def test_a_list_is_made_on_the_spot(pipe) -> None:
    with fluxq.skip_steps(pipe, compute=0.5, call={"num_inference_steps": 8}) as skipped:
        assert len(skipped.steps.computed) == 4 and skipped.steps.total == 8
        run(pipe, num_inference_steps=8)
    assert (skipped.calls, skipped.computed) == (8, 4)
    assert "step" not in vars(pipe.scheduler)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "this pipeline's checkpoint has no list of steps: give one"),
        ({"steps": [0, 5], "compute": 0.5}, "compute= makes another: give one of them"),
        ({"steps": [0, 5], "call": {}}, "leave it out"),
        ({"compute": 0}, "above 0 and at most 1"),
        ({"compute": True}, "above 0 and at most 1"),
        ({"steps": []}, "expected the numbers of the steps to compute"),
        ({"steps": [1, 5]}, "the first and the last step, 0 and 5, have to be computed"),
        ({"steps": ["0"]}, "expected the numbers of the steps to compute"),
        ({"steps": 3}, "steps 3: expected the numbers of the steps to compute"),
    ],
)
def test_what_is_no_list_is_refused(pipe, how, message) -> None:
    with pytest.raises(ValueError, match=message):
        skip_steps(pipe, **how)
    assert "forward" not in vars(pipe.transformer)


def test_numbers_of_an_array_are_taken(pipe) -> None:
    numbers: Any = torch.tensor(COMPUTED).numpy()
    with skip_steps(pipe, numbers) as skipped:
        assert skipped.steps.computed == (*COMPUTED,)


def test_a_file_that_holds_no_list_is_refused(pipe, tmp_path) -> None:
    file = tmp_path / "list.json"
    for missing in (file, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no such list of steps; `fluxq steps MODEL` writes one"):
            skip_steps(pipe, missing)
    file.write_text(json.dumps({"kind": "fluxq auto"}))
    with pytest.raises(ValueError, match=r"list\.json: not a list of steps"):
        skip_steps(pipe, file)
    file.write_text(json.dumps({"kind": "fluxq steps", "list": {"scheduler": 3}}))
    with pytest.raises(ValueError, match=r"list\.json: a list of steps has scheduler: 3"):
        skip_steps(pipe, str(file))


def test_a_list_of_another_scheduler_or_shift_is_refused(pipe) -> None:
    with skip_steps(pipe, COMPUTED) as skipped:
        steps, config = skipped.steps, pipe.scheduler.config
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config, shift=3.0)
        with pytest.raises(
            ValueError, match=r"with shift 1\.0, and the pipeline's has 3\.0: make one with `fluxq steps`"
        ):
            run(pipe)
    pipe.scheduler = diffusers.FlowMatchLCMScheduler.from_config(config)
    with pytest.raises(ValueError, match=r"of a FlowMatchEuler.*the pipeline has a FlowMatchLCMScheduler"):
        skip_steps(pipe, steps)
    pipe.scheduler = diffusers.PNDMScheduler()
    with pytest.raises(ValueError, match="steps of a PNDMScheduler cannot be followed"):
        skip_steps(pipe, COMPUTED)
    pipe.scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    with pytest.raises(ValueError, match="evaluates the denoiser twice a step"):
        skip_steps(pipe, COMPUTED)


def test_a_list_of_another_model_is_refused_but_not_of_its_checkpoints(pipe, quantized) -> None:
    with skip_steps(pipe, COMPUTED) as skipped:
        plain = skipped.steps
    steps = replace(plain, models=architectures(pipe))
    for each in (pipe, quantized("nvfp4")):
        skip_steps(each, steps).remove()
    other = type(pipe.transformer).from_config({**pipe.transformer.config, "num_single_layers": 1})
    pipe.transformer = other
    with pytest.raises(ValueError, match=r"of another model: its transformer has another class or configuration"):
        skip_steps(pipe, steps)
    skip_steps(pipe, plain).remove()


def test_a_setting_at_its_default_makes_no_other_model(pipe) -> None:
    before, config = architectures(pipe), pipe.transformer._internal_dict
    assert config["patch_size"] == 1  # the default, as a newer version of the class would add it
    pipe.transformer._internal_dict = FrozenDict({key: config[key] for key in config if key != "patch_size"})
    without = architectures(pipe)
    pipe.transformer._internal_dict = FrozenDict({**config, "patch_size": 2})
    other = architectures(pipe)
    pipe.transformer._internal_dict = config
    assert before == without != other


def test_a_cache_and_a_list_at_once_are_refused(pipe) -> None:
    with skip_steps(pipe, COMPUTED):
        with pytest.raises(ValueError, match="are skipped already: remove"):
            skip_steps(pipe, COMPUTED)
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
        with pytest.raises(ValueError, match=r"has a step cache.*disable_cache\(\), or leave the list of steps out"):
            run(pipe)
    with pytest.raises(ValueError, match="has a step cache"):
        skip_steps(pipe, COMPUTED)


def test_timesteps_of_single_tokens_are_refused(pipe) -> None:
    own = pipe.transformer.forward

    class PerToken(nn.Module):
        dtype, config, _compiled_call_impl = torch.bfloat16, pipe.transformer.config, None

        def forward(self, hidden_states: Tensor, timestep: Tensor, **kwargs: Any) -> Any:
            return own(hidden_states=hidden_states, timestep=timestep[:, 0], **kwargs)

    model = PerToken()
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "timestep": kwargs["timestep"][:, None].expand(-1, 64)}),
        with_kwargs=True,
    )
    with skip_steps(pipe, COMPUTED) as skipped:
        pipe.scheduler.set_timesteps(6, mu=0.0)
        with pytest.raises(ValueError, match=r"timesteps \(2, 64\), one for each token"):
            skipped.step(model, (torch.zeros(2, 64, 4),), {"timestep": torch.ones(2, 64)})
    hook.remove()


def test_a_pipeline_without_scheduler_or_denoiser_is_refused(pipe) -> None:
    with pytest.raises(ValueError, match="needs a pipeline with a scheduler and a denoiser"):
        skip_steps(pipe.transformer, COMPUTED)
