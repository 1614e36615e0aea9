"""Lists of steps: fits are least squares, lists the best of those near them, and a run makes what is predicted."""

import copy
import json
from dataclasses import replace
from itertools import combinations
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from fluxq import tiny
from fluxq.calibrate import paths
from fluxq.calibrate.capture import run_pipeline
from fluxq.calibrate.paths import Velocities, list_of, measure_velocities
from fluxq.recipes.step_list import StepList, extrapolation
from fluxq.runtime.skip import skip_steps

LEVELS = tuple(1 - (step / 8) ** 1.5 for step in range(8))
CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 6}


def drawn(denoisers: tuple[str, ...] = ("transformer",) * 8, seed: int = 0) -> tuple[Velocities, np.ndarray]:
    """Inner products of outputs that wander, and the outputs, (T, 40)."""
    outputs = np.random.default_rng(seed).normal(size=(8, 40)).cumsum(0)
    effects = np.tril(np.tile(np.diff([*LEVELS, 0.0]), (8, 1)))
    return Velocities(outputs @ outputs.T, effects, denoisers, LEVELS, 3.0), outputs


def predicted(outputs: np.ndarray, steps: tuple[int, ...], rows: np.ndarray) -> float:
    """Error of the final latents, and what comes back of errors before, by the outputs themselves."""
    lengths = np.diff([*LEVELS, 0.0])
    errors = (lengths[:, None] * (rows @ outputs - outputs)).cumsum(0)
    total = float(errors[-1] @ errors[-1])
    for step in steps[1:]:
        factor = float(lengths @ rows[:, step]) / LEVELS[step]
        total += factor**2 * float(errors[step - 1] @ errors[step - 1])
    return total / 3.0


def all_lists(count: int) -> list[tuple[int, ...]]:
    return [(0, *inner, 7) for inner in combinations(range(1, 7), count - 2)]


def test_latents_after_every_step_are_as_near_as_outputs_so_far_allow() -> None:
    velocities, outputs = drawn()
    steps, lengths = (0, 1, 3, 7), np.diff([*LEVELS, 0.0])
    rows = velocities.fitted(steps)
    assert (rows[0], rows[1]) == (pytest.approx(np.eye(8)[0]), pytest.approx(np.eye(8)[1]))
    for step in range(8):
        own = [each for each in steps if each <= step]
        wanted = lengths[: step + 1] @ outputs[: step + 1]
        best = np.linalg.lstsq(outputs[own].T, wanted, rcond=None)[0] @ outputs[own]
        assert lengths[: step + 1] @ rows[: step + 1] @ outputs == pytest.approx(best, abs=1e-3)
        assert not rows[step, [each for each in range(8) if each not in own]].any()


def test_a_fit_is_predicted_by_the_outputs_and_as_it_was_searched() -> None:
    velocities, outputs = drawn()
    for count in range(2, 9):
        for steps in all_lists(count)[:5]:
            rows = velocities.fitted(steps)
            found = velocities.predicted(steps, rows)
            assert found == pytest.approx(predicted(outputs, steps, rows), rel=1e-6, abs=1e-12)
            assert velocities._way(steps).nmse == pytest.approx(found, rel=1e-2, abs=1e-6)
            for order in range(3):
                plain = velocities.extrapolated(steps, order)
                assert velocities.predicted(steps, plain) == pytest.approx(predicted(outputs, steps, plain), abs=1e-12)
    assert velocities.predicted(range(8), velocities.fitted(range(8))) == 0


def test_lists_lose_one_step_after_another_and_exchanges_improve_them() -> None:
    velocities, _ = drawn()
    ways = velocities.ways()
    assert sorted(ways) == [*range(2, 9)] and ways[8] == (0.0, tuple(range(8)))
    for count in range(3, 8):
        errors = {steps: velocities._way(steps).nmse for steps in all_lists(count)}
        assert {*ways[count].steps} < {*ways[count + 1].steps}
        kept = [each for each in errors if {*each} < {*ways[count + 1].steps}]
        assert ways[count].nmse == min(errors[each] for each in kept)
        worst = velocities._way(max(errors, key=lambda each: errors[each]))
        better = velocities.exchanged(worst)
        near = [each for each in errors if len({*each} & {*better.steps}) == count - 1]
        assert better.nmse <= min(errors[each] for each in near) / 0.999 and len(better.steps) == count
    assert all({0, 2, 3, 7} <= {*way.steps} for way in velocities.ways({2, 3}).values())
    assert {2, 3} <= {*velocities.exchanged(velocities.ways({2, 3})[5], {2, 3}).steps}


def test_outputs_go_on_level_straight_and_with_half_of_their_curvature() -> None:
    nodes, x = [1.0, 0.7, 0.6], 0.2
    line = 0.6**2 + (x - 0.6) * (0.7**2 - 0.6**2) / 0.1  # through the last two values of a parabola
    assert extrapolation(nodes[2:], x) == [1.0]
    assert np.dot(extrapolation(nodes[1:], x), [3 * node - 1 for node in nodes[1:]]) == pytest.approx(3 * x - 1)
    assert np.dot(extrapolation(nodes, x), [3 * node - 1 for node in nodes]) == pytest.approx(3 * x - 1)
    assert np.dot(extrapolation(nodes, x), [node**2 for node in nodes]) == pytest.approx((line + x**2) / 2)


def test_each_of_two_denoisers_begins_with_a_step_of_its_own_and_takes_its_own_outputs() -> None:
    velocities, outputs = drawn(("transformer",) * 3 + ("transformer_2",) * 5)
    ways = velocities.ways()
    assert min(ways) == 3 and ways[3].steps == (0, 3, 7)
    assert all(3 in velocities.exchanged(way).steps for way in ways.values())
    rows = velocities.fitted((0, 3, 5, 7))
    assert not rows[3:, :3].any() and not rows[:3, 3:].any()
    assert velocities.predicted((0, 3, 5, 7), rows) == pytest.approx(predicted(outputs, (0, 3, 5, 7), rows))
    assert not velocities.extrapolated((0, 3, 5, 7), 2)[4, :3].any()


@pytest.mark.slow
def test_measured_inner_products_predict_a_run() -> None:
    """A list of 4 of 6 steps changes the latents of the images that were measured nearly as predicted."""
    pipe, items = tiny.load("float32"), [(prompt, 7) for prompt in tiny.PROMPTS[:4]]
    velocities = measure_velocities(pipe, ("transformer",), items, CALL)
    assert velocities.gram.shape == (6, 6) and velocities.denoisers == ("transformer",) * 6
    assert velocities.levels == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert velocities.effects == pytest.approx(np.tril(np.full((6, 6), -1 / 6)), abs=1e-6)
    assert "step" not in vars(pipe.scheduler)
    plain = torch.cat([latents for _, latents in run_pipeline(pipe, items, CALL)])
    assert velocities.signal == pytest.approx(float(plain.double().square().sum()), rel=1e-5)
    computed, errors = velocities.ways()[4].steps, {}
    fit = velocities.fitted(computed)
    for order, rows in enumerate((fit, *(velocities.extrapolated(computed, order) for order in (1, 2)))):
        steps = list_of(pipe.scheduler, computed, order, velocities.levels)
        if not order:
            steps = replace(
                steps, fitted=tuple(tuple(row[[*computed][: _before(computed, n)]]) for n, row in enumerate(fit))
            )
        with skip_steps(pipe, steps):
            listed = torch.cat([latents for _, latents in run_pipeline(pipe, items, CALL)])
        errors[order] = float((listed - plain).square().sum() / plain.square().sum())
        assert velocities.predicted(computed, rows) / 5 < errors[order] < 5 * velocities.predicted(computed, rows)
    assert 3 * errors[0] < min(errors[1], errors[2])


def _before(computed: tuple[int, ...], step: int) -> int:
    return len([each for each in computed if each <= step])


def test_bad_requests_are_refused_by_name() -> None:
    from diffusers import FlowMatchHeunDiscreteScheduler

    pipe, items = tiny.load("float32"), [(prompt, 7) for prompt in tiny.PROMPTS[:4]]
    with pytest.raises(ValueError, match=r"3 images say too little.*take 4 or more"):
        measure_velocities(pipe, ("transformer",), items[:3], CALL)
    with pytest.raises(ValueError, match="a call of 101 steps: a list is of 2 to 100"):
        measure_velocities(pipe, ("transformer",), items, {**CALL, "num_inference_steps": 101})
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    with pytest.raises(ValueError, match=r"FlowMatchHeunDiscreteScheduler evaluates the denoiser twice a step"):
        measure_velocities(pipe, ("transformer",), items, CALL)


@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "DDIMScheduler"])
def test_what_outputs_do_to_the_latents_is_read_off_the_scheduler(name: str) -> None:
    """Latents of drawn outputs are those of none, and what outputs add."""
    scheduler = getattr(diffusers, name)(**({"clip_sample": False} if name == "DDIMScheduler" else {}))
    scheduler.set_timesteps(6)
    effects = paths._effects(copy.deepcopy(scheduler), 6)
    assert effects is not None and len({*effects[-1].round(6)}) > 3
    outputs = torch.randn(6, 2, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    latents = []
    for given in (outputs, 0 * outputs):
        own, sample = copy.deepcopy(scheduler), torch.ones(2, 1, 1, 1)
        for output, timestep in zip(given, own.timesteps, strict=True):
            sample = own.step(output, timestep, sample, return_dict=False)[0]
        latents.append(sample)
    added = np.tensordot(effects[-1], outputs.double().numpy(), 1)
    assert (latents[0] - latents[1]).double().numpy() == pytest.approx(added, abs=1e-4)


def test_a_scheduler_that_adds_noise_is_taken_for_lengths_of_steps(monkeypatch) -> None:
    scheduler = diffusers.FlowMatchLCMScheduler()
    scheduler.set_timesteps(6)
    assert paths._effects(scheduler, 6) is None
    monkeypatch.setattr(paths, "_effects", lambda *_: None)
    pipe, items = tiny.load("float32"), [(prompt, 7) for prompt in tiny.PROMPTS[:4]]
    velocities = measure_velocities(pipe, ("transformer",), items, CALL)
    assert velocities.effects == pytest.approx(np.tril(np.full((6, 6), -1 / 6)), abs=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"computed": (0, 2)}, "the first and the last step, 0 and 3, have to be computed"),
        ({"computed": (0, 2, 1, 3)}, "expected whole numbers, rising"),
        ({"order": 3}, "order 3: expected one of 0, 1, 2"),
        ({"levels": (1.0, 0.5, 0.5, 0.1)}, "do not fall from step to step"),
        ({"levels": ()}, "a call of 1 to 1000 steps"),
        (
            {"fitted": ((1.0,), (1.0,), (1.0, 0.5), (1.0, 0.5, 1.0))},
            r"computed steps, expected finite ones of \[1, 2, 2, 3\]",
        ),
        ({"fitted": ((1.0,), (0.0, float("nan")), (1.0, 0.5), (1.0, 0.5, 1.0))}, "make it again with `fluxq steps`"),
        ({"fitted": ((1.0,), (0.0, 1.0), (-1e300, 0.5), (1.0, 0.5, 1.0))}, r"-1e\+300 among them, .* at most 1e\+30"),
    ],
)
def test_a_list_that_cannot_be_is_refused(changed: dict, message: str) -> None:
    facts: dict[str, Any] = {"computed": (0, 1, 3), "order": 1, "levels": (1.0, 0.7, 0.4, 0.2), "scheduler": "Euler"}
    assert StepList.from_dict(StepList(**facts).to_dict()) == StepList(**facts)
    fit = StepList(**facts, fitted=((1.0,), (0.0, 1.0), (1.0, 0.5), (1.0, 0.5, 1.0)))
    assert StepList.from_dict(json.loads(json.dumps(fit.to_dict()))) == fit
    with pytest.raises(ValueError, match=message):
        StepList(**facts | changed)


@pytest.mark.parametrize("name", ["scheduler", "settings", "compute", "order", "levels", "models"])
def test_a_malformed_list_names_what_is_wrong(name: str) -> None:
    whole = StepList((0, 1, 3), 1, (1.0, 0.7, 0.4, 0.2), "Euler").to_dict()
    with pytest.raises(ValueError, match=f"a list of steps has {name}"):
        StepList.from_dict({**whole, name: None})
    with pytest.raises(ValueError, match="no numbers"):
        StepList.from_dict({**whole, "levels": ["high", "low"]})
    for rows in (1, [1.0], [["high"]]):
        with pytest.raises(ValueError, match="a list of steps has fitted"):
            StepList.from_dict({**whole, "fitted": rows})
    with pytest.raises(ValueError, match="too large"):
        StepList.from_dict({**whole, "levels": [10**400, 1]})


def test_another_number_of_steps_takes_the_nearest_levels() -> None:
    steps = StepList((0, 4, 7), 1, LEVELS, "Euler")
    assert steps.at(LEVELS) == {0, 4, 7}
    finer = [1 - (step / 16) ** 1.5 for step in range(16)]
    assert steps.at(finer) == {0, 8, 14, 15}
    assert steps.at(LEVELS[3:]) == {0, 1, 4}  # a call that begins at an image
    assert steps.at(finer[8:]) == {0, 6, 7}  # and has as many steps as the list
    assert steps.at([level**2 for level in LEVELS]) == {0, 4, 7}  # a call of its own, of another size


def test_a_fit_is_for_calls_of_its_own_levels_and_steps() -> None:
    steps = StepList(
        (0, 1, 3), 1, (1.0, 0.7, 0.4, 0.2), "Euler", fitted=((1.0,), (0.0, 1.0), (-0.5, 1.5), (0.1, 0.0, 1.0))
    )
    factors = ({0: 1.0}, {1: 1.0}, {0: -0.5, 1: 1.5}, {0: 0.1, 3: 1.0})
    assert steps.factors([1.0, 0.7001, 0.4, 0.2], {0, 1, 3}) == factors
    assert steps.factors([1.0, 0.71, 0.4, 0.2], {0, 1, 3}) == ()
    assert steps.factors(steps.levels, {0, 1, 2, 3}) == () == steps.factors(steps.levels[1:], {0, 2})
