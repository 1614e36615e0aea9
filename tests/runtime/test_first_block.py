"""FirstBlockCache with a graph for each decision: the images and decisions of diffusers alone."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from recorder import Answer, Recorder, guided, latents, velocity

import fluxq
from fluxq.runtime import graphs
from fluxq.runtime.first_block import FirstBlock
from fluxq.runtime.modulation import hoist_modulation

pytestmark = pytest.mark.usefixtures("recorded")


@contextmanager
def first_block_cached(pipe, threshold: float = 0.31) -> Iterator[None]:
    """Of six steps of the embedded pipeline this threshold takes some from the cache."""
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    yield
    pipe.transformer.disable_cache()


@contextmanager
def decisions() -> Iterator[list[bool]]:
    """Collect what diffusers itself decides, step by step: True computes all blocks."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        plain = vars(FBCHeadBlockHook)["_should_compute_remaining_blocks"]
        decide = lambda hook, added: made.append(plain(hook, added)) or made[-1]  # noqa: E731
        patch.setattr(FBCHeadBlockHook, "_should_compute_remaining_blocks", decide)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("then", ["as loaded", "optimized", "hoisted"])
@pytest.mark.parametrize("recipe", ["16 bit", "int8"])
def test_a_step_cache_has_a_graph_for_each_decision(quantized, recipe, then, caplog):
    pipe = quantized(recipe)
    if then == "optimized":
        fluxq.optimize(pipe)
    calls = [{}, {}, guided(prompt="a star"), {"prompt": ["a red circle", "a star"]}]
    calls = [{"num_inference_steps": 6} | call for call in calls]
    with hoist_modulation(pipe) if then == "hoisted" else nullcontext(), first_block_cached(pipe):
        with decisions() as made:
            want = [latents(pipe, **call) for call in calls]
        assert True in made[1:6] and False in made[1:6]
        with decisions() as decided, fluxq.capture(pipe) as captured:
            for number, (call, image) in enumerate(zip(calls, want, strict=True), 1):
                assert torch.equal(latents(pipe, **call), image), call
                if number == 2:
                    computed, from_cache = captured.captured
                    assert from_cache.from_cache and from_cache.replays == 2 * 5  # all but the first step of a call
                    assert computed.replays == sum(made[: 2 * 6])
        assert decided == []  # diffusers was never asked, and nothing waited in the middle of a step
    assert "without a CUDA graph" not in caplog.text


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", ["always near enough", "never", "what is kept lies in shared memory"])
def test_a_wrong_decision_or_residual_would_be_seen(flux, monkeypatch, fault):
    call = guided(num_inference_steps=6)
    with first_block_cached(flux):
        want = latents(flux, **call)
        if fault == "what is kept lies in shared memory":
            keep = lambda call, cache, kept: (call(), kept.__setitem__(slice(None), cache.read()))[0]  # noqa: E731
            monkeypatch.setattr(graphs, "_keep", keep)
        else:
            monkeypatch.setattr(Answer, "read", lambda answer: fault != "never")
        with fluxq.capture(flux):
            assert not torch.equal(latents(flux, **call), want)


@pytest.mark.parametrize("fails", ["at the first step", "between steps"])
def test_a_recording_that_fails_leaves_the_cache_what_it_had(flux, monkeypatch, fails):
    broken = 2 if fails == "between steps" else 1
    call: dict = guided(num_inference_steps=6) if fails == "between steps" else {"num_inference_steps": 6}
    record, tried = Recorder.record, []

    def fail(recorder, call, beside):
        tried.append(1)
        made = record(recorder, call, beside)
        if len(tried) == broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        return made

    with first_block_cached(flux):
        want = latents(flux, **call)
        monkeypatch.setattr(Recorder, "record", fail)
        with fluxq.capture(flux):
            assert torch.equal(latents(flux, **call), want) and len(tried) == broken


@pytest.mark.parametrize("optimized_before", [False, True])
def test_after_a_cache_that_was_taken_out_blocks_are_fused_and_under_one_refused(flux, optimized_before):
    if optimized_before:
        fluxq.optimize(flux)
    with first_block_cached(flux):
        fluxq.restore(flux)
        with pytest.raises(ValueError, match="its forward was replaced already"):
            fluxq.optimize(flux)
    want = latents(flux)
    fluxq.optimize(flux)
    blocks = [*flux.transformer.transformer_blocks, *flux.transformer.single_transformer_blocks]
    assert not any("forward" in vars(block) for block in blocks)  # which would run in the place of the fused one
    assert torch.equal(latents(flux), want)
    assert fluxq.restore(flux) == 5 and torch.equal(latents(flux), want)


@pytest.mark.slow
def test_another_threshold_and_no_cache_are_other_graphs(flux):
    plain = latents(flux, num_inference_steps=6)
    with fluxq.capture(flux) as captured:
        made = []
        for threshold, captures in ((0.31, 2), (0.0, 4), (9.0, 6)):
            with first_block_cached(flux, threshold):
                made.append(latents(flux, num_inference_steps=6))
            assert captured.captures == captures
        assert torch.equal(made[1], plain) and not torch.equal(made[0], made[2])
        assert torch.equal(latents(flux, num_inference_steps=6), plain) and captured.captures == 7


def test_diffusers_before_0_41_has_the_name_of_a_context_alone():
    class Manager:
        _current_context: str | None = None

    manager = Manager()
    cache = FirstBlock(SimpleNamespace(state_manager=manager, threshold=0.1))
    with pytest.raises(ValueError, match="no context is set"):
        _ = cache.kind
    manager._current_context = "cond"
    assert cache.kind == ("cond", 0.1)


def test_a_step_cache_outside_of_a_context_is_refused_as_diffusers_does(flux):
    with first_block_cached(flux), fluxq.capture(flux), pytest.raises(ValueError, match="No cache context is set"):
        velocity(flux.transformer)


@pytest.mark.gpu
@pytest.mark.parametrize("then", ["as loaded", "optimized"])
def test_on_a_gpu_decisions_and_images_are_the_same(quantized, then):
    pipe = quantized("fp8").to("cuda")
    fluxq.prepare(pipe)
    if then == "optimized":
        fluxq.optimize(pipe)
    calls = [{}, guided(), {"prompt": ["a red circle", "a star"]}, {}]
    calls = [call | {"num_inference_steps": 6} for call in calls]
    with first_block_cached(pipe):
        with decisions() as made:
            want = [latents(pipe, **call) for call in calls]
        assert True in made and False in made
        with decisions() as decided, fluxq.capture(pipe):
            for call, image in zip(calls, want, strict=True):
                assert torch.equal(latents(pipe, **call), image), call
        assert decided == []
