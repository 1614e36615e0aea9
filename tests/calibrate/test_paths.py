"""Lists of steps: the shortest path is the best of all lists, and what is predicted is what a run makes."""

from itertools import combinations
from typing import Any

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
    factors = -np.diff([*LEVELS, 0.0])
    return Velocities(outputs @ outputs.T, factors, denoisers, LEVELS, 3.0), outputs


def error(outputs: np.ndarray, steps: tuple[int, ...], order: int) -> float:
    """Sum over gaps of the squared error of the latents, by the outputs themselves."""
    lengths, total = -np.diff([*LEVELS, 0.0]), 0.0
    for index, step in enumerate(steps[1:], 1):
        nodes, change = [*steps[:index]][-order - 1 :], np.zeros(40)
        for skipped in range(nodes[-1] + 1, step):
            factors = extrapolation([LEVELS[node] for node in nodes], LEVELS[skipped])
            change += lengths[skipped] * (factors @ outputs[nodes] - outputs[skipped])
        total += float(change @ change)
    return total / 3.0


@pytest.mark.parametrize("order", [0, 1])
def test_the_shortest_path_is_the_best_of_all_lists(order: int) -> None:
    velocities, outputs = drawn()
    ways = velocities.paths(order)
    assert [*ways] == [*range(2, 9)]
    for count, way in ways.items():
        lists: list[tuple[int, ...]] = [(0, *inner, 7) for inner in combinations(range(1, 7), count - 2)]
        errors = {steps: error(outputs, steps, order) for steps in lists}
        assert way.nmse == pytest.approx(min(errors.values()), abs=1e-12)
        assert errors[way.steps] == pytest.approx(way.nmse, abs=1e-12)
    assert ways[8] == (0.0, tuple(range(8)))


def test_required_steps_are_in_every_list_and_the_rest_is_the_best() -> None:
    velocities, outputs = drawn()
    ways = velocities.paths(1, {2, 6})
    assert [*ways] == [4, 5, 6, 7, 8]
    for count, way in ways.items():
        lists = [(0, *inner, 7) for inner in combinations(range(1, 7), count - 2) if {2, 6} <= {*inner}]
        assert way.nmse == pytest.approx(min(error(outputs, steps, 1) for steps in lists), abs=1e-12)
        assert {2, 6} <= {*way.steps}


def test_a_path_of_order_2_costs_what_it_says() -> None:
    velocities, outputs = drawn()
    for way in velocities.paths(2).values():
        assert way.nmse == pytest.approx(error(outputs, way.steps, 2), abs=1e-12)


def test_outputs_go_on_level_straight_and_with_half_of_their_curvature() -> None:
    nodes, x = [1.0, 0.7, 0.6], 0.2
    line = 0.6**2 + (x - 0.6) * (0.7**2 - 0.6**2) / 0.1  # through the last two values of a parabola
    assert extrapolation(nodes[2:], x) == [1.0]
    assert np.dot(extrapolation(nodes[1:], x), [3 * node - 1 for node in nodes[1:]]) == pytest.approx(3 * x - 1)
    assert np.dot(extrapolation(nodes, x), [3 * node - 1 for node in nodes]) == pytest.approx(3 * x - 1)
    assert np.dot(extrapolation(nodes, x), [node**2 for node in nodes]) == pytest.approx((line + x**2) / 2)


def test_each_of_two_denoisers_begins_with_a_step_of_its_own() -> None:
    velocities, _ = drawn(("transformer",) * 3 + ("transformer_2",) * 5)
    for order in range(3):
        ways = velocities.paths(order)
        assert min(ways) == 3
        assert all(3 in way.steps for way in ways.values())
        assert ways[3].steps == (0, 3, 7)


def test_measured_inner_products_predict_a_run() -> None:
    """A list of 4 of 6 steps changes the latents of the images that were measured nearly as predicted."""
    pipe, items = tiny.load("float32"), [(prompt, 7) for prompt in tiny.PROMPTS[:4]]
    velocities = measure_velocities(pipe, ("transformer",), items, CALL)
    assert velocities.gram.shape == (6, 6) and velocities.denoisers == ("transformer",) * 6
    assert velocities.levels == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert velocities.factors == pytest.approx([1 / 6] * 6)
    assert "step" not in vars(pipe.scheduler)
    plain = torch.cat([latents for _, latents in run_pipeline(pipe, items, CALL)])
    for order in range(3):
        way = velocities.paths(order)[4]
        steps = list_of(pipe.scheduler, way.steps, order, velocities.levels)
        with skip_steps(pipe, steps):
            listed = torch.cat([latents for _, latents in run_pipeline(pipe, items, CALL)])
        error = float((listed - plain).square().sum() / plain.square().sum())
        assert way.nmse / 5 < error < 5 * way.nmse, order
        assert velocities.signal == pytest.approx(float(plain.double().square().sum()), rel=1e-5)


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


def test_schedulers_of_other_kinds_are_weighed_by_what_noise_does(monkeypatch) -> None:
    monkeypatch.setattr(paths, "is_flow", lambda scheduler: False)
    pipe, items = tiny.load("float32"), [(prompt, 7) for prompt in tiny.PROMPTS[:4]]
    velocities = measure_velocities(pipe, ("transformer",), items, CALL)
    assert velocities.levels == pytest.approx([1000 * step / 6 for step in (6, 5, 4, 3, 2, 1)])
    assert len({*velocities.factors.round(6)}) == 6 and (velocities.factors > 0).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"computed": (0, 2)}, "the first and the last step, 0 and 3, have to be computed"),
        ({"computed": (0, 2, 1, 3)}, "expected whole numbers, rising"),
        ({"order": 3}, "order 3: expected one of 0, 1, 2"),
        ({"levels": (1.0, 0.5, 0.5, 0.1)}, "do not fall from step to step"),
        ({"levels": ()}, "a call of 1 to 1000 steps"),
    ],
)
def test_a_list_that_cannot_be_is_refused(changed: dict, message: str) -> None:
    facts: dict[str, Any] = {"computed": (0, 1, 3), "order": 1, "levels": (1.0, 0.7, 0.4, 0.2), "scheduler": "Euler"}
    assert StepList.from_dict(StepList(**facts).to_dict()) == StepList(**facts)
    with pytest.raises(ValueError, match=message):
        StepList(**facts | changed)


@pytest.mark.parametrize("name", ["scheduler", "settings", "compute", "order", "levels", "models"])
def test_a_malformed_list_names_what_is_wrong(name: str) -> None:
    whole = StepList((0, 1, 3), 1, (1.0, 0.7, 0.4, 0.2), "Euler").to_dict()
    with pytest.raises(ValueError, match=f"a list of steps has {name}"):
        StepList.from_dict({**whole, name: None})
    with pytest.raises(ValueError, match="no numbers"):
        StepList.from_dict({**whole, "levels": ["high", "low"]})
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
