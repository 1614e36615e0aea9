"""Capture on the embedded pipeline, against hooks and sums written here."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import diffusers
import pytest
import torch

from fluxq import tiny
from fluxq.calibrate.capture import (
    Sampling,
    Trajectory,
    capture_statistics,
    images_per_batch,
    noise_levels,
    number_of_steps,
    run_pipeline,
    scheduler_settings,
    spread,
)

STEPS = 4
CALL = {**tiny.CALL_KWARGS, "num_inference_steps": STEPS}
ITEMS = [(prompt, 100 + i) for i, prompt in enumerate(tiny.PROMPTS[:4])]
GROUPS = {
    "transformer_blocks.0.attn.to_q": "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.ff.net.2": "transformer_blocks.0.ff.net.2",
    "single": "single_transformer_blocks.1.proj_mlp",
}


@pytest.fixture(scope="module")
def pipe32():
    """fp32, so that arithmetic differs little between batch sizes and seeds show."""
    return tiny.load(dtype="float32")


def captured(pipe, steps=STEPS, batch_size=None, groups=GROUPS, call=CALL, items=ITEMS):
    sampling = Sampling(call, steps, {"transformer": "m"}, batch_size)
    with TemporaryDirectory() as folder:
        return capture_statistics(pipe, {"transformer": groups}, items, sampling, folder=Path(folder))


def inputs_seen(pipe) -> dict[str, list[torch.Tensor]]:
    """Every input of the groups' layers in an ordinary call of the pipeline, one (M, K) a step."""
    seen = {name: [] for name in GROUPS}
    handles = [
        pipe.transformer.get_submodule(path).register_forward_hook(
            lambda _module, args, _output, name=name: seen[name].append(args[0].flatten(0, -2).double())
        )
        for name, path in GROUPS.items()
    ]
    noise = [torch.Generator().manual_seed(seed) for _, seed in ITEMS]
    pipe(prompt=[prompt for prompt, _ in ITEMS], generator=noise, output_type="latent", **CALL)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("steps", "chosen"), [(STEPS, [0, 1, 2, 3]), (2, [0, 3]), (1, [0])])
def test_statistics_are_those_of_what_flows(pipe, steps, chosen):
    stats = captured(pipe, steps)
    assert stats.trajectory["steps_seen"] == tuple(chosen)
    for name, seen in inputs_seen(pipe).items():
        assert len(seen) == STEPS
        sums = stats.groups[name]
        assert sums.amax.shape == (len(chosen), seen[0].shape[-1])
        for index, step in enumerate(chosen):
            x = seen[step]
            assert torch.equal(sums.amax[index], x.abs().amax(0).float())
            assert sums.count[index] == x.shape[0] > 0
            torch.testing.assert_close(sums.sum[index], x.sum(0), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(sums.sum_of_squares[index], x.square().sum(0), rtol=1e-12, atol=0)
        assert stats.amax(name) == max(seen[step].abs().max() for step in chosen)


def test_the_same_run_gives_the_same_bytes(pipe, tmp_path):
    for name in ("1", "2"):
        captured(pipe, steps=2).save(tmp_path / name)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_batch_size_changes_nothing_but_the_last_bits(pipe32):
    whole = captured(pipe32)
    for size in (1, 3):
        parts = captured(pipe32, batch_size=size)
        assert (parts.digest, parts.trajectory) == (whole.digest, whole.trajectory)
        for name, sums in whole.groups.items():
            assert torch.equal(parts.groups[name].count, sums.count)
            torch.testing.assert_close(parts.groups[name].amax, sums.amax, rtol=1e-3, atol=1e-4)
            squares = parts.groups[name].sum_of_squares.sum(0), sums.sum_of_squares.sum(0)
            torch.testing.assert_close(*(each / sums.count.sum() for each in squares), rtol=1e-3, atol=1e-6)


def test_statistics_of_two_halves_merge_to_those_of_all(pipe32):
    whole = captured(pipe32, batch_size=2)
    merged = captured(pipe32, items=ITEMS[:2]).merge(captured(pipe32, items=ITEMS[2:]))
    assert json.dumps(merged.trajectory, sort_keys=True) == json.dumps(whole.trajectory, sort_keys=True)
    assert merged.digest == whole.digest
    for name, sums in whole.groups.items():
        assert torch.equal(merged.groups[name].amax, sums.amax)
        torch.testing.assert_close(merged.groups[name].sum, sums.sum, rtol=1e-12, atol=1e-12)


def test_shares_of_another_run_in_the_folder_are_not_taken(pipe, tmp_path):
    sampling = Sampling(CALL, 1, {"transformer": "m"})
    one, two = (
        capture_statistics(pipe, {"transformer": GROUPS}, [item], sampling, folder=tmp_path) for item in ITEMS[:2]
    )
    assert not torch.equal(one.groups["single"].sum, two.groups["single"].sum)


def test_a_damaged_share_is_gathered_again(pipe, tmp_path, caplog):
    how = (pipe, {"transformer": GROUPS}, ITEMS[:2], Sampling(CALL, 1, {"transformer": "m"}, 1))
    whole = capture_statistics(*how, folder=tmp_path).content_digest
    one, two = tmp_path.iterdir()
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    one.write_bytes(data)
    two.write_bytes(b"")
    assert capture_statistics(*how, folder=tmp_path).content_digest == whole
    assert caplog.text.count("these images are run again") == 2


def test_no_hook_is_left_behind(pipe):
    captured(pipe, steps=1)
    assert not any(module._forward_pre_hooks for module in pipe.transformer.modules())


def test_nan_is_named_with_layer_and_step(pipe):
    layer = pipe.transformer.single_transformer_blocks[0].proj_mlp

    def poison(_module, args):
        poison.calls += 1
        return (args[0] * float("nan"),) if poison.calls == 3 else None

    poison.calls = 0
    handle = layer.register_forward_pre_hook(poison)
    try:
        with pytest.raises(ValueError, match=r"^single: its input holds NaN or infinity at step 2 of the 16-bit model"):
            captured(pipe, groups={"single": "single_transformer_blocks.0.proj_mlp"})
    finally:
        handle.remove()
    assert not any(module._forward_pre_hooks for module in pipe.transformer.modules())


def test_a_layer_that_nothing_reaches_is_named(pipe, monkeypatch):
    monkeypatch.setattr(pipe.transformer, "unused", torch.nn.Linear(4, 4), raising=False)
    with pytest.raises(ValueError, match="unused: no activation reached this layer during calibration"):
        captured(pipe, steps=1, groups={**GROUPS, "unused": "unused"})


def test_a_trajectory_s_digest_covers_all_of_it():
    parts = {
        "model": "m",
        "items": (("p", 0),),
        "call": {"height": 16},
        "scheduler": {"class": "S"},
        "steps_seen": (0, 3),
        "sigmas": (1.0, 0.25),
        "dtype": "bfloat16",
    }
    other = {
        "model": "n",
        "items": (("p", 1),),
        "call": {"height": 32},
        "scheduler": {"class": "T"},
        "steps_seen": (0, 2),
        "sigmas": (1.0, 0.5),
        "dtype": "float16",
    }
    digests = {Trajectory(**{**parts, key: value}).digest for key, value in other.items()}
    assert len(digests | {Trajectory(**parts).digest}) == len(parts) + 1


def test_the_trajectory_says_how_the_data_was_made(pipe):
    made = captured(pipe, steps=2).trajectory
    assert made["items"] == tuple(ITEMS) and made["call"] == CALL and made["dtype"] == "bfloat16"
    assert made["scheduler"]["class"] == "FlowMatchEulerDiscreteScheduler"
    assert made["sigmas"][0] == 1.0 and 0 < made["sigmas"][1] < 0.5


@pytest.mark.parametrize("name", ["DDIM", "DDPM", "PNDM", "LCM", "TCD", "SCM"])
def test_noise_levels_of_schedulers_that_keep_none_are_those_of_one_that_does(name):
    scheduler = getattr(diffusers, f"{name}Scheduler")()
    scheduler.set_timesteps(2 if name == "SCM" else 4)
    levels = noise_levels(SimpleNamespace(scheduler=scheduler))
    assert levels[-1] == 0 and list(levels) == sorted(levels, reverse=True) and len(levels) > 2
    if name != "SCM":  # which measures time by another clock
        euler = diffusers.EulerDiscreteScheduler(trained_betas=scheduler.betas.tolist())
        euler.set_timesteps(timesteps=scheduler.timesteps.tolist())
        assert levels == pytest.approx(euler.sigmas.tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("steps", "total", "seen"),
    [(1, 8, (0,)), (2, 8, (0, 7)), (3, 8, (0, 4, 7)), (8, 8, tuple(range(8))), (99, 4, (0, 1, 2, 3)), (3, 1, (0,))],
)
def test_steps_are_spread_evenly(steps, total, seen):
    assert spread(steps, total) == seen


@pytest.mark.parametrize("total", [1, 2, 7, 28, 50])
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_spread_gives_as_many_steps_as_asked_for(steps, total):
    seen = spread(steps, total)
    assert len(seen) == min(steps, total) and sorted(set(seen)) == list(seen)
    assert seen[0] == 0 and seen[-1] < total and (len(seen) == 1 or seen[-1] == total - 1)


def test_number_of_steps_is_the_call_s_or_the_pipeline_s(pipe):
    assert number_of_steps(pipe, {"num_inference_steps": 3}) == 3
    assert number_of_steps(pipe, {}) == 28
    assert number_of_steps(pipe, {"sigmas": [1.0, 0.5], "num_inference_steps": 3}) == 2


def latents_of(pipe, batch_size, items=ITEMS, **call):
    batches = run_pipeline(pipe, items, {**CALL, **call}, batch_size=batch_size)
    return torch.cat([latents for _, latents in batches])


def test_an_image_is_the_same_whatever_the_batch(pipe32):
    whole = latents_of(pipe32, 4)
    for size in (1, 3):
        torch.testing.assert_close(latents_of(pipe32, size), whole, rtol=1e-3, atol=1e-3)
    assert torch.equal(latents_of(pipe32, 4), whole)
    assert all((whole[i] - whole[j]).abs().max() > 0.1 for i in range(4) for j in range(i))


def test_noise_follows_the_seed_and_nothing_else(pipe32, monkeypatch):
    starts = []
    forward = pipe32.transformer.forward
    watch = lambda *args, **kwargs: (starts.append(kwargs["hidden_states"].clone()), forward(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(pipe32.transformer, "forward", watch)
    for size, items in ((4, ITEMS), (1, ITEMS), (3, ITEMS)):
        starts.clear()
        latents_of(pipe32, size, items, num_inference_steps=1)
        noise = torch.cat(starts)
        expected = torch.cat(
            [
                pipe32.prepare_latents(
                    1, pipe32.transformer.config.in_channels // 4, 16, 16, torch.float32, "cpu",
                    torch.Generator().manual_seed(seed),
                )[0]
                for _, seed in items
            ]
        )  # fmt: skip
        assert torch.equal(noise, expected)


def test_settings_of_a_scheduler_are_the_same_in_every_process():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config({"shift": 3.0})
    assert "_use_default_values" in scheduler.config  # in the order of a set
    settings = scheduler_settings(scheduler)
    assert settings["class"] == "FlowMatchEulerDiscreteScheduler" and settings["shift"] == 3.0
    assert not any(name.startswith("_") for name in settings)


def test_sizes_of_none_are_those_of_a_call_without():
    assert images_per_batch({"height": None, "width": None}) == images_per_batch({})


def test_steps_are_announced_before_they_run_in_every_batch(pipe):
    announced = []
    for _ in run_pipeline(pipe, ITEMS[:3], CALL, batch_size=2, on_step=announced.append):
        pass
    assert announced == [0, 1, 2, 3, 4] * 2


class Silent:
    """The pipeline without the argument by which it tells of its steps."""

    def __init__(self, pipe):
        self.pipe, self.scheduler, self.device = pipe, pipe.scheduler, pipe.device

    def __call__(self, prompt, generator, output_type, num_inference_steps=STEPS, **call):
        return self.pipe(
            prompt, generator=generator, output_type=output_type, num_inference_steps=num_inference_steps, **call
        )


def test_where_the_pipeline_does_not_tell_of_its_steps_the_scheduler_does(pipe):
    def followed(pipe):
        steps, latents = [], []
        run = run_pipeline(
            pipe, ITEMS, CALL, batch_size=3, on_step=steps.append, on_latents=lambda step, x: latents.append((step, x))
        )
        return steps, latents, [final for _, final in run]

    told, seen = followed(pipe), followed(Silent(pipe))
    assert told[0] == seen[0] == [0, 1, 2, 3, 4] * 2
    assert [step for step, _ in told[1]] == [step for step, _ in seen[1]] == [0, 1, 2, 3] * 2
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(told[1], seen[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(told[2], seen[2], strict=True))
    assert "step" not in vars(pipe.scheduler)  # and it is as before


def test_a_scheduler_is_given_back_where_a_call_fails(pipe):
    silent = Silent(pipe)
    silent.scheduler.step = plain = silent.scheduler.step  # as another wrapper would have it
    try:
        with pytest.raises(TypeError):
            list(run_pipeline(silent, ITEMS[:1], {**CALL, "nonsense": 1}))
        assert vars(pipe.scheduler)["step"] is plain
    finally:
        del pipe.scheduler.step


@pytest.mark.parametrize(
    "call",
    [
        lambda _self, prompt, image=None, callback_on_step_end=None, **_: image.size,
        lambda _self, control_image, prompt, **_: control_image,
    ],
    ids=["image", "control_image"],
)
def test_an_image_that_a_pipeline_begins_with_is_asked_for(call, request):
    pipe = type("Edits", (), {"__call__": call, "scheduler": SimpleNamespace(step=None)})()
    name = request.node.callspec.id
    with pytest.raises(RuntimeError, match=rf"call failed \(.*Error: .*, with no {name}; rows .* a column `{name}`"):
        list(run_pipeline(pipe, ITEMS[:1], {}))


def test_an_image_that_a_pipeline_may_begin_with_is_blamed_for_nothing_else():
    def call(_self, prompt, image=None, callback_on_step_end=None, **_):
        return prompt + 3

    with pytest.raises(TypeError, match="can only concatenate list"):
        list(run_pipeline(type("Edits", (), {"__call__": call})(), ITEMS[:1], {}))


@pytest.mark.parametrize(
    ("size", "area"),
    [({"width": 1536, "height": 1024}, 1536 * 1024), ({"width": 32, "height": 16, "max_area": 256}, 256), ({}, None)],
)
def test_a_pipeline_that_has_an_area_of_its_own_keeps_the_size_that_is_asked_for(size, area):
    areas = []

    def call(_self, prompt, width=None, height=None, max_area=None, callback_on_step_end=None, **_):
        areas.append(max_area)
        callback_on_step_end(None, 0, None, {"latents": None})

    list(run_pipeline(type("Kontext", (), {"__call__": call})(), ITEMS[:1], size))
    assert areas == [area]


def test_a_negative_prompt_of_the_call_is_that_of_every_image():
    seen = []

    def call(pipe, prompt, negative_prompt, callback_on_step_end, **_):
        seen.append(negative_prompt)
        callback_on_step_end(pipe, 0, 0, {"latents": torch.zeros(len(prompt), 1)})

    list(run_pipeline(type("Guided", (), {"__call__": call})(), ITEMS[:3], {"negative_prompt": "blue"}, batch_size=2))
    assert seen == [["blue", "blue"], ["blue"]]


def test_no_machine_path_gets_into_a_trajectory(pipe):
    text = json.dumps(captured(pipe, steps=1).trajectory)
    assert not re.search(r'"/|\\\\', text) and str(Path.home()) not in text
