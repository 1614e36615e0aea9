"""Errors along the steps: of a made-up pipeline whose figures can be worked out, and of the embedded one."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from fluxq import tiny
from fluxq.eval.images.denoiser import denoisers, hooked, prediction, with_prediction
from fluxq.eval.images.generate import generate
from fluxq.eval.images.protocols import items_of
from fluxq.eval.images.sides import Side, floor_attention
from fluxq.eval.metrics import drift as drift_module
from fluxq.eval.metrics.drift import drift, follow
from fluxq.eval.metrics.fidelity import sqnr
from fluxq.eval.metrics.schema import Drift
from fluxq.runtime.step_caches import cache_of

STEPS = 4
ITEMS = [("a", 0), ("b", 1), ("a", 2), ("c", 3), ("d", 4)]


class Velocity(nn.Module):
    """v = factor x; keeps what it was asked."""

    def __init__(self, factor, wrap):
        super().__init__()
        self.factor, self.wrap, self.seen = factor, wrap, []

    def forward(self, hidden_states):
        self.seen.append(hidden_states.clone())
        return self.wrap(self.factor * hidden_states)


class FakePipe:
    """Euler steps of dx = -v / STEPS from (1 + seed) ones. guidance: none, "rows" (both in one call) or "calls"."""

    def __init__(self, factor=1.0, guidance=None, wrap=lambda v: (v, "rest"), dtype=torch.float64, scale=1.0):
        self.transformer, self.guidance, self.dtype, self.scale = Velocity(factor, wrap), guidance, dtype, scale
        self.components = {"transformer": self.transformer, "vae": nn.Identity(), "tokenizer": object()}
        self.scheduler = SimpleNamespace(sigmas=torch.linspace(1, 0, STEPS + 1))
        self.batches = []

    def __call__(self, prompt, generator, output_type, callback_on_step_end, num_inference_steps=STEPS):
        self.batches.append(len(prompt))
        x = torch.stack([torch.full((2, 3), 1.0 + g.initial_seed(), dtype=self.dtype) for g in generator])
        for step in range(num_inference_steps):
            x = x - self.scale * self._velocity(x) / STEPS
            callback_on_step_end(self, step, None, {"latents": x})
        return SimpleNamespace(images=x)

    def _velocity(self, x):
        if self.guidance == "rows":
            empty, given = prediction(self.transformer(torch.cat([0 * x, x])), self.transformer).chunk(2)
            return empty + given
        if self.guidance == "calls":
            asked = (self.transformer(hidden_states=x), self.transformer(hidden_states=x))
            return sum(prediction(each, self.transformer) for each in asked) / 2
        return prediction(self.transformer(x), self.transformer)


def means(curve):
    return [each.mean for each in curve.values]


@pytest.mark.often(2)
@pytest.mark.parametrize("guidance", [None, "rows", "calls"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_figures_that_can_be_worked_out(guidance, size):
    followed = follow(FakePipe(guidance=guidance), ITEMS, {}, 2)
    found = drift(followed, FakePipe(1.1, guidance), size)
    assert means(found.curves["velocity_error"]) == pytest.approx([0.1] * STEPS)  # at the 16-bit latents, every time
    ratios = [((1 - 1.1 / STEPS) / (1 - 1 / STEPS)) ** (step + 1) for step in range(STEPS)]
    expected = [-20 * math.log10(1 - ratio) for ratio in ratios]
    assert means(found.curves["latent_sqnr"]) == pytest.approx(expected)
    assert means(found.curves["latent_cosine"]) == pytest.approx([1] * STEPS)
    assert found.velocity_error.mean == pytest.approx(0.1) and found.velocity_error.n == len(ITEMS)
    assert found.steps == (0, 1, 2, 3) and found.sigmas == (1, 0.75, 0.5, 0.25) and found.images == 5


def test_the_other_pipeline_is_fed_what_the_16_bit_one_was_fed():
    reference, other = FakePipe(), FakePipe(1.7)
    followed = follow(reference, ITEMS, {}, 2)
    drift(followed, other, 2)
    steered = other.transformer.seen[: len(reference.transformer.seen)]
    assert all(map(torch.equal, reference.transformer.seen, steered)) and other.batches == [2, 2, 1, 2, 2, 1]
    free = other.transformer.seen[len(steered) :]
    assert torch.equal(free[0], steered[0]) and not torch.equal(free[1], steered[1])


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: (v,), lambda v: Transformer2DModelOutput(sample=v)])
def test_whatever_a_transformer_returns_its_prediction_is_replaced_in(wrap):
    followed = follow(FakePipe(), ITEMS, {}, 5)
    assert means(drift(followed, FakePipe(0.9, wrap=wrap)).curves["velocity_error"]) == pytest.approx([0.1] * STEPS)
    output = with_prediction(wrap(torch.ones(2)), torch.zeros(2))
    assert type(output) is type(wrap(torch.ones(2))) and prediction(output, nn.Identity()).sum() == 0


def test_a_fault_of_one_image_at_one_step_is_seen_there_only():
    followed = follow(FakePipe(), ITEMS, {}, 5)
    pipe = FakePipe()
    own = pipe.transformer.forward

    def faulty(x):
        v, rest = own(x)
        v = v.clone()
        if len(pipe.transformer.seen) == 3:  # step 2 of the steered run
            v[3] *= 2
        return v, rest

    pipe.transformer.forward = faulty
    found = drift(followed, pipe).curves["velocity_error"]
    assert means(found) == pytest.approx([0, 0, 1 / 5, 0])
    assert found.values[2].low < 1 / 5 < found.values[2].high


def test_intervals_resample_prompts(monkeypatch):
    asked = []
    real = drift_module.clustered_interval
    monkeypatch.setattr(drift_module, "clustered_interval", lambda v, p: asked.append(tuple(p)) or real(v, p))
    drift(follow(FakePipe(), ITEMS, {}, 2), FakePipe(1.1))
    assert set(asked) == {("a", "b", "a", "c", "d")}


def test_what_is_kept_is_the_latents_and_velocities():
    followed = follow(FakePipe(guidance="calls", dtype=torch.float32), ITEMS, {"num_inference_steps": 3}, 2)
    kept = [t for image in followed.velocities for step in image for t in step]
    kept += [t for image in followed.latents for t in image]
    assert len(kept) == 5 * 3 * (2 + 1) and sum(t.nbytes for t in kept) == 45 * 24
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in kept)  # no view that holds a whole batch


def test_two_equal_pipelines_do_not_drift():
    found = drift(follow(FakePipe(), ITEMS, {}, 2), FakePipe())
    assert means(found.curves["velocity_error"]) == [0] * STEPS
    assert [(each.mean, each.infinite) for each in found.curves["latent_sqnr"].values] == [(None, 5)] * STEPS
    assert Drift.model_validate(json.loads(found.model_dump_json())) == found


def test_a_broken_pipeline_has_no_figures_and_stops_nothing():
    found = drift(follow(FakePipe(), ITEMS, {}, 2), FakePipe(math.nan))
    assert means(found.curves["velocity_error"]) == [None] * STEPS and found.velocity_error.mean is None
    assert means(found.curves["latent_sqnr"]) == [None] * STEPS


def test_a_broken_reference_is_named():
    with pytest.raises(ValueError, match=r"16-bit model's velocity at step 0 holds NaN or infinity for 'a', seed 0"):
        follow(FakePipe(math.nan), ITEMS, {}, 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: FakePipe(scale=1.1), "differ in scheduler, steps or guidance"),
        (lambda: FakePipe(guidance="calls"), "did not call its transformer there"),
        (lambda: FakePipe(guidance="rows"), r"returned \(2, 2, 3\), the 16-bit one \(1, 2, 3\)"),
    ],
)
def test_pipelines_that_cannot_be_compared_are_refused(other, message):
    followed = follow(FakePipe(), ITEMS, {}, 2)
    with pytest.raises(ValueError, match=message):
        drift(followed, other())


def test_fewer_or_more_steps_are_refused():
    followed = follow(FakePipe(), ITEMS, {"num_inference_steps": 3}, 2)
    longer = replace(followed, call={"num_inference_steps": 4})
    with pytest.raises(ValueError, match="step 3"):
        drift(longer, FakePipe())
    shorter = replace(followed, call={"num_inference_steps": 2})
    with pytest.raises(ValueError, match="2 steps, the 16-bit one 3"):
        drift(shorter, FakePipe())


def test_hooks_are_gone_afterwards_and_after_a_fault():
    pipe = FakePipe()
    followed = follow(pipe, ITEMS, {}, 2)
    with pytest.raises(ValueError):
        drift(followed, other := FakePipe(scale=2.0))
    assert not pipe.transformer._forward_hooks and not other.transformer._forward_hooks
    with hooked([pipe.transformer], before=lambda *_: None, after=lambda *_: None):
        assert pipe.transformer._forward_hooks and pipe.transformer._forward_pre_hooks
    assert not pipe.transformer._forward_hooks and not pipe.transformer._forward_pre_hooks


def test_what_runs_at_every_step_is_found_by_name():
    part = nn.Identity()
    components = {"transformer": part, "transformer_2": part, "vae": part, "text_encoder": part, "tokenizer": 1}
    assert list(denoisers(SimpleNamespace(components=components))) == ["transformer", "transformer_2"]
    with pytest.raises(ValueError, match="no transformer: its components are vae"):
        denoisers(SimpleNamespace(components={"vae": part}))


# The embedded pipeline.

TINY_ITEMS = items_of(tiny.PROMPTS, 4, first_seed=3)
CALL = tiny.CALL_KWARGS | {"num_inference_steps": 4}


@pytest.fixture(scope="module")
def side():
    return Side("16-bit", str(tiny.path()), "")


@pytest.fixture(scope="module")
def followed(side):
    return follow(side.open(), TINY_ITEMS, CALL, 4)


@pytest.fixture(scope="module")
def quantized(plain_checkpoint):
    return Side("nvfp4", str(plain_checkpoint("nvfp4")), "").open()


@pytest.fixture(scope="module")
def found(followed, quantized):
    return drift(followed, quantized)


@pytest.mark.slow
def test_the_velocity_error_is_that_of_the_transformer_fed_the_recorded_calls(side, found, quantized):
    calls = []
    reference = side.open()
    handle = reference.transformer.register_forward_hook(
        lambda _model, args, kwargs, output: calls.append((args, kwargs, output[0].clone())), with_kwargs=True
    )
    generate(reference, TINY_ITEMS, CALL, 4)
    handle.remove()
    assert len(calls) == 4
    for step, (args, kwargs, v) in enumerate(calls):
        with torch.no_grad():
            lost = quantized.transformer(*args, **kwargs)[0].double() - v.double()
        expected = lost.flatten(1).norm(dim=1) / v.double().flatten(1).norm(dim=1)
        assert found.curves["velocity_error"].values[step].mean == pytest.approx(float(expected.mean()), rel=1e-6)


@pytest.mark.slow
def test_the_last_step_agrees_with_the_final_latents(side, found, quantized):
    a, b = (generate(pipe, TINY_ITEMS, CALL, 4) for pipe in (side.open(), quantized))
    values = sqnr(torch.stack(list(a.latents)), torch.stack(list(b.latents)))
    assert found.curves["latent_sqnr"].values[-1].mean == pytest.approx(float(values.mean()), rel=1e-6)


@pytest.mark.slow
def test_the_noise_floor_is_well_below_a_4_bit_model(side, followed, found, quantized):
    floor = drift(followed, replace(side, attention=floor_attention("cpu")).open(), 3)
    whole = drift(followed, quantized, floor=floor)
    curve = whole.curves["velocity_error"]
    for value, noise in zip(curve.values, curve.floor, strict=True):
        assert 0 < noise.mean < 0.02 < value.mean < 0.5
    assert whole.velocity_floor == floor.velocity_error and whole.velocity_error == found.velocity_error
    sqnrs = whole.curves["latent_sqnr"]
    assert all(noise.mean > value.mean + 10 for value, noise in zip(sqnrs.values, sqnrs.floor, strict=True))
    assert floor_attention("cuda:0") == "_native_efficient"


@pytest.mark.slow
def test_a_side_with_another_attention_backend_changes_no_other(side, followed):
    replace(side, attention="_native_math").open()
    assert means(drift(followed, side.open()).curves["velocity_error"]) == [0] * 4


@pytest.mark.slow
def test_true_guidance_with_two_calls_in_a_step(side, quantized):
    call = CALL | {"negative_prompt": ["a blue one"] * 2, "true_cfg_scale": 3.0}
    guided = follow(side.open(), TINY_ITEMS[:2], call, 2)
    assert [len(step) for step in guided.velocities[0]] == [2] * 4
    found = drift(guided, quantized)
    assert all(0.02 < mean < 0.5 for mean in means(found.curves["velocity_error"]))


def test_a_step_cache_has_a_velocity_error(side, followed):
    cached = replace(side, cache=cache_of("0.9")).open()
    first, *later = means(drift(followed, cached).curves["velocity_error"])
    assert first == 0 and max(later) > 0.02  # nothing to skip at the first step


def test_another_scheduler_is_refused(side, followed):
    pipe = side.open()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=7.0)
    with pytest.raises(ValueError, match="differ in scheduler, steps or guidance"):
        drift(followed, pipe)
