"""Tests of the solver: against every choice, to the last bit, and with errors that add up and cancel."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from fluxq.recipes.budget import (
    best,
    best_of_shares,
    cheapest_of_shares,
    counts_of_shares,
    extremes,
    front,
    front_of_shares,
    improved_together,
    paying_moves,
    total,
)

OPTIONS = ("4", "8", "16")


def drawn(seed: int, units: int = 6) -> tuple[dict, dict]:
    """Errors that fall and costs that rise from option to option."""
    random = np.random.default_rng(seed)
    errors, costs = {}, {}
    for unit in map(str, range(units)):
        size, scale = int(random.integers(1000, 9000)), 10 ** random.uniform(-6, -2)
        errors[unit] = {"4": scale, "8": scale / 200, "16": 0.0}
        costs[unit] = {"4": 4 * size + 7, "8": 8 * size + 1, "16": 16 * size}
    return errors, costs


def choices(numbers: dict) -> list[dict]:
    return [dict(zip(numbers, each, strict=True)) for each in itertools.product(*numbers.values())]


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_within_the_budget_has_less_error(seed: int) -> None:
    errors, costs = drawn(seed)
    every = choices(errors)
    low, high = extremes(costs)
    spent = sorted(total(costs, choice) for choice in every)
    for budget in (low, *spent[50::150], *(size - 1 for size in spent[100::200]), high):
        found = best(errors, costs, budget)
        assert found is not None and total(costs, found) <= budget
        least = min(total(errors, choice) for choice in every if total(costs, choice) <= budget)
        assert total(errors, found) == pytest.approx(least, rel=1e-6, abs=1e-15)
    assert best(errors, costs, low - 1) is None


def test_a_budget_of_a_byte_less_takes_another_choice() -> None:
    """Sums of 10¹² bits, of which a solver's tolerance is millions."""
    costs = {unit: {"4": 4 * 10**11, "8": 8 * 10**11 + bits} for unit, bits in (("a", 8), ("b", 16))}
    errors = {"a": {"4": 3.0, "8": 0.0}, "b": {"4": 2.0, "8": 0.0}}
    budget = 12 * 10**11 + 8
    assert best(errors, costs, budget) == {"a": "8", "b": "4"}
    assert best(errors, costs, budget - 1) == {"a": "4", "b": "4"}
    assert best(errors, costs, 16 * 10**11 + 23) == {"a": "8", "b": "4"}


def test_what_brings_nothing_costs_nothing() -> None:
    errors = {"silent": {"8": 0.0, "4": 0.0}, "loud": {"8": 0.5, "4": 1.0}}
    costs = {unit: {"8": 8, "4": 4} for unit in errors}
    assert best(errors, costs, 16) == {"silent": "4", "loud": "8"}
    assert best(costs, errors, 0.7) == {"silent": "4", "loud": "8"}  # the cheapest of so little error


def test_of_choices_with_the_same_error_the_cheaper_one_is_taken() -> None:
    errors = {unit: {"4": 1.0, "8": 0.0} for unit in "ab"}
    for cheap, dear in ("ab", "ba"):
        costs = {unit: {"4": 4, "8": 8 if unit == cheap else 9} for unit in "ab"}
        assert best(errors, costs, 13) == {cheap: "8", dear: "4"}


def test_the_solver_prints_nothing(capfd, monkeypatch) -> None:
    milp = optimize.milp

    def loud(*arguments: Any, **options: Any) -> Any:
        os.write(1, b"as compiled code prints")
        return milp(*arguments, **options)

    monkeypatch.setattr(optimize, "milp", loud)
    assert best(*drawn(0), 1e6) is not None
    os.write(1, b"said before and after")
    assert capfd.readouterr().out == "said before and after"


def test_an_option_that_was_not_measured_is_not_taken() -> None:
    errors = {"a": {"4": math.inf, "8": 0.1}}
    costs = {"a": {"4": 4, "8": 8}}
    assert best(errors, costs, 8) == {"a": "8"} and best(errors, costs, 7) is None


def test_the_front_goes_from_the_least_cost_to_the_least_error() -> None:
    errors, costs = drawn(0)
    points = [(total(costs, choice), total(errors, choice)) for choice in front(errors, costs)]
    assert points == sorted(points) and len(points) == len(set(points)) > 6
    assert [error for _, error in points] == sorted((error for _, error in points), reverse=True)
    assert points[0][0] == extremes(costs)[0] and points[-1][1] == 0.0


def test_errors_that_cancel_are_worth_keeping_together() -> None:
    """Alone each is as bad as the other; a and b cancel, c does not."""
    residuals = {"a": [1.0, 2.0], "b": [-1.0, -2.0], "c": [2.0, -1.0]}
    rows = np.array([row for unit in residuals for row in (residuals[unit], [0.0, 0.0])])
    gram = rows @ rows.T / 2
    costs = {unit: {"4": 4, "16": 16} for unit in residuals}
    start = {"a": "16", "b": "4", "c": "4"}
    assert paying_moves(gram, costs, 24, start)[0] == {"a": "4", "c": "16"}
    assert improved_together(gram, costs, 24, start) == {"a": "4", "b": "4", "c": "16"}
    assert improved_together(gram, costs, 23, dict.fromkeys(costs, "4")) == dict.fromkeys(costs, "4")


@pytest.mark.parametrize("seed", range(3))
def test_no_change_of_two_units_improves_what_is_found(seed: int) -> None:
    _, costs = drawn(seed, 5)
    random = np.random.default_rng(seed)
    pairs = [(unit, option) for unit in costs for option in costs[unit]]
    rows = random.normal(size=(len(pairs), 7)) * [[{"4": 1.0, "8": 0.2, "16": 0.0}[o]] for _, o in pairs]
    limit = sum(extremes(costs)) / 2
    found = improved_together(rows @ rows.T / 7, costs, limit, {unit: "4" for unit in costs})

    def error(choice: dict) -> float:
        return float((rows[[pairs.index(pair) for pair in choice.items()]].sum(0) ** 2).mean())

    near = [c for c in choices(costs) if sum(c[u] != found[u] for u in c) <= 2 and total(costs, c) <= limit]
    assert total(costs, found) <= limit and error(found) <= min(map(error, near)) * (1 + 1e-9)


# --- numbers of computed steps


LISTS, FIXED = {12: 0.0, 10: 1e-5, 7: 4e-4, 4: 8e-3, 2: 0.3}, 5000.0


def plans(seed: int) -> tuple[dict, dict, list[tuple[float, float, int]]]:
    """Errors and costs, and error, cost of the mean step and computed steps of all plans there are."""
    errors, costs = drawn(seed, 5)
    every = [
        (total(errors, choice) + LISTS[count], (total(costs, choice) + FIXED) * count / 12, count)
        for count in LISTS
        for choice in choices(errors)
    ]
    return errors, costs, every


@pytest.mark.often(1)
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_of_any_number_of_steps_within_the_budget_has_less_error(seed: int) -> None:
    errors, costs, every = plans(seed)
    spent = sorted(cost for _, cost, _ in every)
    for limit in (spent[0] * 1.001, *spent[100::200], spent[-1]):
        found = best_of_shares(errors, costs, limit, LISTS, FIXED)
        assert found == sorted(found, key=lambda share: share.error)
        assert {share.computed for share in found} == {count for _, cost, count in every if cost <= limit}
        for share in found:
            within = (error for error, cost, count in every if count == share.computed and cost <= limit)
            assert share.error == pytest.approx(min(within), rel=1e-6, abs=1e-15)
            assert share.cost == (total(costs, share.choice) + FIXED) * share.computed / 12 <= limit * (1 + 1e-12)
            assert share.error == total(errors, share.choice) + LISTS[share.computed]
    assert best_of_shares(errors, costs, spent[0] * 0.999, LISTS, FIXED) == []


def test_a_limit_that_a_plan_takes_exactly_holds_it_however_it_is_divided() -> None:
    noise = np.random.default_rng(0)
    for _ in range(40):
        costs = {unit: dict(zip("ab", noise.random(2).tolist(), strict=True)) for unit in "wxyz"}
        least = sum(min(each.values()) for each in costs.values()) + 0.3
        (share,) = best_of_shares(costs, costs, least * (2 / 28), {28: 0.0, 2: 1e-3}, 0.3)
        assert share.computed == 2


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_of_any_number_of_steps_with_so_little_error_is_cheaper(seed: int) -> None:
    errors, costs, every = plans(seed)
    for most in (1e-9, 2e-5, 1e-3, 1e-2, 1.0):
        found = cheapest_of_shares(errors, costs, most, LISTS, FIXED)
        assert found == sorted(found, key=lambda share: share.cost)
        assert {share.computed for share in found} == {count for error, _, count in every if error <= most}
        for share in found:
            within = (cost for error, cost, count in every if count == share.computed and error <= most)
            assert share.cost == pytest.approx(min(within)) and share.error <= most * (1 + 1e-9)


def test_the_front_of_shares_goes_from_the_fewest_steps_to_no_error() -> None:
    errors, costs = drawn(0)
    points = front_of_shares(errors, costs, LISTS, FIXED, 8)
    assert [point.cost for point in points] == sorted(point.cost for point in points)
    assert [point.error for point in points] == sorted((point.error for point in points), reverse=True)
    low, high = (cost + FIXED for cost in extremes(costs))
    assert (points[0].computed, points[0].cost) == (2, pytest.approx(low * 2 / 12))
    assert (points[-1].computed, points[-1].error, points[-1].cost) == (12, 0.0, pytest.approx(high))
    assert len(points) == len({(point.computed, *point.choice.items()) for point in points}) > 4


def test_numbers_of_steps_fall_by_about_a_sixth_to_the_least() -> None:
    assert counts_of_shares(28, 2) == [28, 23, 19, 16, 13, 11, 9, 8, 7, 6, 5, 4, 3, 2]
    assert counts_of_shares(100, 40) == [100, 83, 69, 58, 48, 40]
    assert counts_of_shares(3, 2) == [3, 2] and counts_of_shares(4, 4) == [4]
