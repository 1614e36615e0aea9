"""Step caches as data: how they are written, that each of diffusers' runs, and what share of the steps it computes."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import fluxq
from fluxq import tiny
from fluxq.calibrate.capture import run_pipeline
from fluxq.runtime.skip import KIND
from fluxq.runtime.step_caches import (
    CACHES,
    LIST,
    StepCache,
    cache_of,
    caches_of,
    counted,
    enable_cache,
    fewer_steps,
    measured_for,
    naming,
)

CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 6}
ITEM = (tiny.PROMPTS[0], 7)
OF_DIFFUSERS = {name: row for name, row in CACHES.items() if row.config is not None}


@pytest.fixture(scope="module")
def sixteen() -> diffusers.FluxPipeline:
    return tiny.load()


@pytest.fixture
def pipe(sixteen) -> diffusers.FluxPipeline:
    """The 16-bit pipeline with a transformer of its own."""
    made = diffusers.FluxPipeline(**{**sixteen.components, "transformer": copy.deepcopy(sixteen.transformer)})
    made.register_to_config(_name_or_path=sixteen.config._name_or_path)
    made.set_progress_bar_config(disable=True)
    return made


def run(pipe: Any) -> tuple[Tensor, float]:
    """Return the final latents of an image, and the share that was computed."""
    with counted([pipe.transformer]) as computed:
        ((_, latents),) = run_pipeline(pipe, [ITEM], CALL)
    return latents, computed()


@pytest.mark.parametrize(
    ("text", "kind", "label", "value"),
    [
        ("0.1", "first_block", "FirstBlockCache 0.1", 0.1),
        ("first_block=1e-1", "first_block", "FirstBlockCache 0.1", 0.1),
        ("taylor=3", "taylor", "TaylorSeer 3", 3),
        ("taylor_lite=2", "taylor_lite", "TaylorSeer lite 2", 2),
        ("list=0.5", "list", "list 0.5", 0.5),
    ],
)
def test_a_cache_is_written_as_its_kind_and_one_number(text, kind, label, value):
    assert cache_of(text) == StepCache(kind, label, value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tailor=3", ("'tailor=3' is unknown", "taylor", "first_block=0.1", "list=FILE")),
        ("first_block", ("X is the threshold", "above 0", "first_block=0.1")),
        ("mag=0", ("X is the threshold",)),
        ("inf", ("X is the threshold",)),
        ("taylor=2.5", ("interval", "whole number from 2 up", "taylor=3")),
        ("pab=1", ("interval", "whole number from 2 up")),
        ("list=1.5", ("share", "at most 1", "fluxq steps")),
        ("list=", ("share", "at most 1", "fluxq steps")),
        ("steps=3", ("is unknown",)),
    ],
)
def test_what_is_no_cache_is_refused_with_kinds_and_cure(text, words):
    with pytest.raises(ValueError) as error:
        cache_of(text)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_list_from_a_file_is_read_and_named_after_it(tmp_path, pipe):
    with fluxq.skip_steps(pipe, [0, 1, 3, 5]) as skipped:
        steps = skipped.steps
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"kind": KIND, "list": steps.to_dict()}), encoding="utf-8")
    cache = cache_of(f"list={file}")
    assert (cache.label, cache.value, cache.steps, cache.is_unmeasured) == ("list mine", None, steps, False)
    with pytest.raises(FileNotFoundError, match="no such list of steps"):
        cache_of(f"list={tmp_path / 'other.json'}")
    with pytest.raises(ValueError, match="two step caches would be called list mine"):
        caches_of([f"list={file}", f"list={file}"])


@pytest.mark.parametrize("kind", OF_DIFFUSERS)
def test_each_cache_of_diffusers_leaves_out_a_share_that_is_counted(pipe, kind):
    plain, whole = run(pipe)
    assert whole == 1
    cache = cache_of(f"{kind}={'0.4' if CACHES[kind].usual < 1 else '2'}")
    if cache.is_unmeasured:
        cache = cache.having(measured_for(cache, pipe, CALL, ITEM))
    enable_cache(pipe, cache)
    latents, share = run(pipe)
    if kind == "sea":  # which asks pipelines for what this one does not tell
        assert share == 1
        return
    assert 0.2 < share < 1 and not torch.equal(latents, plain)
    assert torch.equal(run(pipe)[0], latents)  # nothing is left over from one call to the next


def test_a_share_is_of_whole_steps_also_where_guidance_makes_two_calls_of_them():
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 2)])

        def forward(self, x: Tensor, timestep: Tensor, is_whole: bool) -> Tensor:
            x = self.blocks[0](self.embed(x))
            return self.blocks[1](x) if is_whole else x

    with counted([model := Denoiser(), Denoiser()]) as computed:
        for timestep, is_whole in ((3, True), (2, False)):
            for tokens in (5, 3):
                model(torch.zeros(1, tokens, 4), torch.tensor([timestep]), is_whole)
    assert computed() == pytest.approx(8 * (48 + 32) / (2 * 8 * 48))  # 4 · 8 + 8 · 2 of a token, of both calls together


def test_lite_mode_computes_whole_steps_and_nothing_of_the_others(pipe):
    enable_cache(pipe, cache_of("taylor_lite=3"))
    assert run(pipe)[1] == pytest.approx(4 / 6)


def test_a_list_is_skip_steps_and_refuses_a_cache_beside_it(pipe):
    with fluxq.skip_steps(pipe, [0, 1, 3, 5]) as skipped:
        expected, steps = run(pipe)[0], skipped.steps
    cache = StepCache(LIST, "list mine", made=json.dumps(steps.to_dict()))
    enable_cache(pipe, cache)
    latents, share = run(pipe)
    assert torch.equal(latents, expected) and share == pytest.approx(4 / 6)
    with pytest.raises(ValueError, match="skipped already"):
        enable_cache(pipe, cache_of("0.1"))


def test_fewer_steps_change_the_call_and_not_the_pipeline(pipe):
    enable_cache(pipe, fewer_steps(3))
    assert not pipe.transformer.is_cache_enabled and run(pipe)[1] == 1
    assert fewer_steps(3).label == "3 steps" and not fewer_steps(3).is_unmeasured


def test_a_denoiser_without_caches_and_an_error_inside_one_are_told_by_name():
    class Denoiser(nn.Module):
        pass

    pipe = SimpleNamespace(components={"transformer": Denoiser()})
    with pytest.raises(RuntimeError, match=r"PAB 2 does not work .*Denoiser takes no step cache.*leave out"):
        with naming(cache_of("pab=2")):
            enable_cache(pipe, cache_of("pab=2"))
    with pytest.raises(RuntimeError, match=r"PAB 2 does not work with this model \(KeyError: "):
        with naming(cache_of("pab=2")):
            raise KeyError("timestep")
    with pytest.raises(KeyError), naming(None):
        raise KeyError("timestep")
    with pytest.raises(FileNotFoundError), naming(cache_of("pab=2")):
        raise FileNotFoundError("gone")
