"""Formats under the memory of a card: placement, text encoders, and what a whole call then takes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fluxq
from fluxq.jobs import fits
from fluxq.jobs.choosing import choose
from fluxq.jobs.chosen import chosen_recipe
from fluxq.jobs.fits import IN_16_BIT
from fluxq.jobs.job import JobOptions
from fluxq.jobs.making import job_of as making_job
from fluxq.jobs.making import quantize
from fluxq.jobs.planning import job_of
from fluxq.jobs.search import AutoOptions, Search, search_of
from fluxq.jobs.seat import seat_of
from fluxq.recipes.budget import Choice, best
from fluxq.recipes.cards import CONTEXT
from fluxq.runtime.peaks import peaks
from fluxq.runtime.place import parts_of

CALL = {"num_inference_steps": 1, "height": 16, "width": 16, "max_sequence_length": 8}
STAGES = {"text_encoder": 10_000, "text_encoder_2": 9_000, "transformer": 140_000, "vae": 70_000}
MODEL = "tiny"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def counted(monkeypatch) -> None:
    """Activations that were counted before."""
    monkeypatch.setattr(fits, "activations_of", lambda pipe, call: (STAGES, {"vae": 60_000}))


def search(room: float, **options: Any) -> Search:
    how: dict[str, Any] = {"measure": "velocity", "count": 1, **options}
    return search_of(JobOptions(MODEL, call=CALL), AutoOptions(vram=room, **how), writes=False)


def planned(found: Search) -> Choice:
    """The best plan within the limit, by errors that fall with bits."""
    costs = found.costs.numbers
    goal = {
        unit: {option: loudness * 2.0 ** (-16 * size / max(options.values())) for option, size in options.items()}
        for loudness, (unit, options) in enumerate(costs.items(), 1)
    }
    choice = best(goal, costs, found.limit - found.costs.fixed)
    assert choice
    return choice


def fitted(found: Search, choice: Choice) -> fits.Fit:
    assert found.seat
    layers = {name: choice[unit] for unit, names in found.offer.units.items() for name in names}
    return found.seat.fit(layers, "x.yaml", "")


@pytest.mark.slow
def test_a_whole_call_of_the_checkpoint_takes_no_more_than_the_card(here) -> None:
    """Bytes of the loaded weights, and of a call that computes."""
    room = CONTEXT + 2.45e6
    request = search_of(JobOptions(MODEL, call=CALL), AutoOptions(vram=room, measure="velocity", count=1))
    result = choose(request)
    assert result and len({each["option"] for each in result["units"]}) > 1
    name, card = "tiny-0.60245GB-vram", result["card"]
    assert card["command"] == f"fluxq quantize tiny --recipe {name}.yaml -o {name}"
    assert f"from_pretrained('{name}', " in card["code"][2] and card["placement"] == "everything on the GPU"
    quantize(making_job(JobOptions(MODEL, f"{name}.yaml", "rtn", name, call=CALL, check=False)))
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(name, dtype=torch.bfloat16)
    assert request.seat
    stages = request.seat.way.peaks(parts_of(pipe, CALL)) or {}
    for stage, size in stages.items():  # a plan has all that fitting may add
        assert size <= 1e9 * card["stages_gb"][stage] <= 1.05 * size, stage
    weights = sum(part.weights for part in parts_of(pipe, CALL))
    assert CONTEXT + weights + max(peaks(pipe, CALL).values()) <= 1e9 * card["peak_gb"] <= room


@pytest.mark.slow
def test_every_plan_within_the_budget_fits_and_less_than_the_least_is_refused(counted) -> None:
    ways, encoders = [], []
    with pytest.raises(
        ValueError, match=r"--vram: the smallest plan takes 0\.\d+ GB of a card.*give at least"
    ) as refused:
        search(CONTEXT + 1000)
    least = 1e9 * float(re.findall(r"takes (\S+) GB", str(refused.value))[0])
    for room in (CONTEXT + 2.5e6, CONTEXT + 1.96e6, CONTEXT + 1.6e6, least, least - 1e5):
        if room < least:
            with pytest.raises(ValueError, match=f"the smallest plan takes {least / 1e9:.4f} GB"):
                search(room)
            continue
        found = search(room)
        choice = planned(found)
        placement = fitted(found, choice).placement
        assert found.seat and placement.peak <= room and found.cost(choice) <= found.limit == 8 * room
        stage = (
            max(placement.peaks.values()) if found.seat.way.moves == "everything" else placement.peaks["transformer"]
        )
        assert found.cost(choice) == 8 * (CONTEXT + stage)
        more = [max(of.values()) - of[choice[unit]] for unit, of in found.costs.numbers.items()]
        assert found.limit - found.cost(choice) < min(each for each in more if each)  # no unit can have more
        ways.append(found.seat.way.word)
        encoders.append(found.seat.recipes["text_encoder"])
    assert ways == ["everything", "everything", "turns", "turns, hoisted"]
    assert encoders == [IN_16_BIT, "nvfp4", IN_16_BIT, IN_16_BIT]


@pytest.mark.slow
def test_the_recipe_has_the_text_encoders_too(counted, here) -> None:
    found = search(CONTEXT + 1.96e6)
    choice = planned(found)
    errors = {unit: dict.fromkeys(options, 1.0) for unit, options in found.offer.choices.items()}
    (here / "x.yaml").write_text(chosen_recipe(found, choice, errors))
    job = job_of(JobOptions(MODEL, "x.yaml", call=CALL), writes=False, runs=False)
    assert [plan.component for plan in job.plans] == ["transformer", "text_encoder", "text_encoder_2"]
    assert found.seat
    for plan in job.plans[1:]:
        sizes = {f"{plan.component}.{name}": size for name, size in fits.most_bytes(plan).items()}
        assert sizes and sizes.items() <= found.seat.settled.items()
    again = search_of(  # and a base that names them has them as it says
        JobOptions(MODEL, "x.yaml", call=CALL), AutoOptions(vram=CONTEXT + 1.96e6, count=1), writes=False
    )
    assert again.seat and again.seat.recipes["text_encoder"] == "x" and again.seat.settled.keys() >= sizes.keys()


def test_turns_of_several_denoisers_are_no_sum_and_left_out(counted) -> None:
    found = search(CONTEXT + 1.5e6)
    two = replace(found.offer, parts={**found.offer.parts, "transformer_2": found.offer.parts["transformer"]})
    with pytest.raises(ValueError, match=r"the smallest plan takes 0\.6020 GB"):
        seat_of(found.job, two, CONTEXT + 1.5e6)


@pytest.mark.parametrize(
    ("vram", "words"),
    [
        ("much", "vram is 'much', expected bytes, or a size with its unit, as in '12GB'"),
        ("500MB", "a GPU's driver and libraries alone keep 600 MB"),
        ("8GB", r"fits in 16 bit already, 0\.6037 GB with everything on the GPU, so there is no choice; leave it"),
    ],
)
def test_in_python_a_card_is_a_text_and_one_without_a_choice_is_refused(vram, words, counted, here) -> None:
    with pytest.raises(ValueError, match=words):
        fluxq.auto(MODEL, vram=vram, call=CALL)
    assert not list(here.iterdir())


def test_fitted_layers_have_their_text_encoders(counted) -> None:
    with pytest.raises(ValueError, match=r"--vram also chooses .* text encoders: give --size"):
        search(CONTEXT + 2.5e6, fitted=("out",))
