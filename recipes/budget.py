"""One option for each unit: the least error within a cost, or the least cost within an error, solved exactly.

    minimize Σ goal[u, o(u)]    over one option o(u) for each unit u, with Σ bounded[u, o(u)] <= limit

An integer program. Solvers bound sums up to a tolerance, here a millionth: a solution that is over the limit after all
is forbidden, and the rest solved again, so that no budget is exceeded by a byte. Of solutions that are as good, the one
with the least Σ bounded is taken: what brings nothing costs nothing.

Errors of units also add up or cancel. With r[u, o] the signed error of an option on each image and probe,

    error of all = mean (Σ r[u, o(u)])² = Σ gram[(u, o(u)), (v, o(v))]

which `improved_together` lowers by changing one unit or two at a time.

Where K of a call's T steps are computed, each of them may cost T / K times as much, and the error of leaving out the
others adds to that of the options. K is tried number by number, and the rest is the program above:

    minimize Σ goal[u, o(u)] + list[K]    over K and o(u), with K / T · (Σ bounded[u, o(u)] + fixed) <= limit
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxq.base.console import without_native_output

Numbers = Mapping[str, Mapping[str, float]]  # unit -> option -> its error or cost
Choice = dict[str, str]  # unit -> option

FRONT_POINTS = 12
_SAME = 1e-9  # relative: sums that differ by less are equal
_LARGEST = 1e4  # of scaled goals: a solver's absolute gap of 1e-6 is then nothing


def best(goal: Numbers, bounded: Numbers, limit: float) -> Choice | None:
    """Return the choice with the least Σ goal within the limit of Σ bounded, None where no choice is within it.

    goal, bounded: of the same units and options; infinity in `goal` forbids an option.
    """
    choice = _solved(goal, bounded, limit)
    if choice is None:
        return None
    cheaper = _solved(bounded, goal, total(goal, choice) * (1 + _SAME))
    return cheaper if cheaper and total(bounded, cheaper) < total(bounded, choice) else choice


def total(numbers: Numbers, choice: Mapping[str, str]) -> float:
    """Return the sum of a choice, rounded once."""
    return math.fsum(numbers[unit][option] for unit, option in choice.items())


def extremes(costs: Numbers) -> tuple[float, float]:
    """Return the least and the largest Σ costs of any choice."""
    return (
        math.fsum(min(options.values()) for options in costs.values()),
        math.fsum(max(options.values()) for options in costs.values()),
    )


def front(errors: Numbers, costs: Numbers, points: int = FRONT_POINTS) -> list[Choice]:
    """Return the choices of least error for so many budgets, evenly from the least to the largest, each choice once."""
    low, high = extremes(costs)
    choices: list[Choice] = []
    for index in range(points):
        budget = low + (high - low) * index / (points - 1) if index < points - 1 else high
        choice = best(errors, costs, budget)
        if choice is not None and choice not in choices:
            choices.append(choice)
    return choices


@dataclass(frozen=True)
class Share:
    """A choice for a number of computed steps.

    error: of the choice and of leaving out the other steps. cost: of a step, in the mean of all steps.
    """

    computed: int
    choice: Choice
    error: float
    cost: float


def counts_of_shares(total: int, least: int) -> list[int]:
    """Return the numbers of computed steps to try, falling by about a sixth from all of them to the least."""
    counts = [total]
    while counts[-1] > least:
        counts.append(max(least, min(counts[-1] - 1, round(counts[-1] * 5 / 6))))
    return counts


def best_of_shares(
    errors: Numbers, costs: Numbers, limit: float, lists: Mapping[int, float], fixed: float = 0.0
) -> list[Share]:
    """Return the choice of least error of each number of computed steps that fits the limit, the best of all first.

    limit: of the cost of a step, in the mean of all.
    lists: number of computed steps -> error of leaving out the others; all steps, which have none, are among them.
    fixed: cost of a computed step beside the options.
    """
    limit *= 1 + _SAME
    choices = {count: best(errors, costs, limit * max(lists) / count - fixed) for count in lists}
    shares = [_share(errors, costs, lists, fixed, count, choice) for count, choice in choices.items() if choice]
    return sorted(shares, key=lambda share: (share.error, share.cost))


def cheapest_of_shares(
    errors: Numbers, costs: Numbers, most: float, lists: Mapping[int, float], fixed: float = 0.0
) -> list[Share]:
    """Return the cheapest choice of so much error for each number of computed steps, the cheapest of all first.

    most: error of choice and list together.
    lists, fixed: as `best_of_shares` has them.
    """
    choices = {count: best(costs, errors, most - error) for count, error in lists.items() if error <= most}
    shares = [_share(errors, costs, lists, fixed, count, choice) for count, choice in choices.items() if choice]
    return sorted(shares, key=lambda share: (share.cost, share.error))


def front_of_shares(
    errors: Numbers, costs: Numbers, lists: Mapping[int, float], fixed: float = 0.0, points: int = FRONT_POINTS
) -> list[Share]:
    """Return the best share for so many limits, evenly from the least cost to the largest, each share once."""
    low, high = (cost + fixed for cost in extremes(costs))
    low *= min(lists) / max(lists)
    shares: list[Share] = []
    for index in range(points):
        limit = low + (high - low) * index / (points - 1) if index < points - 1 else high
        candidates = best_of_shares(errors, costs, limit, lists, fixed)
        if candidates and candidates[0] not in shares:
            shares.append(candidates[0])
    return shares


def _share(
    errors: Numbers, costs: Numbers, lists: Mapping[int, float], fixed: float, count: int, choice: Choice
) -> Share:
    cost = (total(costs, choice) + fixed) * count / max(lists)
    return Share(count, choice, total(errors, choice) + lists[count], cost)


def improved_together(gram: Any, costs: Numbers, limit: float, start: Mapping[str, str]) -> Choice:
    """Return a choice that no change of one unit or two improves, by the error of all units together.

    gram: array (R, R), R options of all units in the order of `costs`.
    start: a choice within the limit.
    """
    choice = dict(start)
    while True:
        moves = paying_moves(gram, costs, limit, choice)
        if not moves:
            return choice
        choice |= moves[0]


def paying_moves(gram: Any, costs: Numbers, limit: float, choice: Mapping[str, str]) -> list[Choice]:
    """Return changes of one unit or two that lower the error of all within the limit, the best first.

    Arguments as `improved_together` has them.
    """
    import numpy as np

    gram = np.asarray(gram, dtype=np.float64)
    row = {pair: index for index, pair in enumerate((unit, option) for unit in costs for option in costs[unit])}
    now = [row[unit, option] for unit, option in choice.items()]
    single = [(unit, option) for unit, option in row if option != choice[unit]]
    if not single:
        return []
    to, old = ([row[pair] for pair in single], [row[unit, choice[unit]] for unit, _ in single])
    effect = gram[:, now].sum(1)
    between = gram[np.ix_(to, to)] - gram[np.ix_(to, old)] - gram[np.ix_(old, to)] + gram[np.ix_(old, old)]
    alone = 2 * (effect[to] - effect[old]) + between.diagonal()
    more = np.array([costs[unit][option] - costs[unit][choice[unit]] for unit, option in single])
    is_other = np.array([[first != second for second, _ in single] for first, _ in single])
    together = np.where(is_other, alone[:, None] + alone[None, :] + 2 * between, np.inf)
    np.fill_diagonal(together, alone)
    added = more[:, None] + more[None, :]
    np.fill_diagonal(added, more)
    error, left = float(gram[np.ix_(now, now)].sum()), limit - total(costs, choice)
    pays = np.triu((together < -_SAME * abs(error)) & (added <= left))
    places = sorted(zip(*np.nonzero(pays), strict=True), key=lambda place: together[place])
    moves = [dict((single[first], single[second])) for first, second in places]
    return [move for move in moves if total(costs, {**choice, **move}) <= limit]


def _solved(goal: Numbers, bounded: Numbers, limit: float) -> Choice | None:
    """Return a choice of least Σ goal within the limit, exactly; None for none."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    pairs = [(unit, option) for unit in goal for option in goal[unit]]
    floors = {unit: min(options.values()) for unit, options in bounded.items()}
    spare = min(limit, extremes(bounded)[1]) - math.fsum(floors.values())
    if spare < 0:
        return None
    sizes = np.array([bounded[unit][option] - floors[unit] for unit, option in pairs])
    values = np.array([goal[unit][option] for unit, option in pairs])
    allowed = np.isfinite(values) & (sizes <= spare)
    values = np.where(allowed, values, 0.0)
    one_each = np.array([[float(unit == other) for other, _ in pairs] for unit in goal])
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint((~allowed)[None].astype(float), ub=0.0)]
    if spare > 0:
        constraints.append(LinearConstraint(np.where(allowed, sizes, 0.0)[None] / spare, ub=1.0))
    while True:
        with without_native_output():  # the solver tells of its ways now and then
            solution = milp(
                values * (_LARGEST / (abs(values).max() or 1.0)),
                integrality=np.ones(len(pairs)),
                bounds=Bounds(0, 1),
                constraints=constraints,
                options={"mip_rel_gap": 0.0},
            )
        if solution.x is None:
            return None
        taken = solution.x > 0.5
        choice = {unit: option for (unit, option), is_taken in zip(pairs, taken, strict=True) if is_taken}
        if total(bounded, choice) <= limit:
            return choice
        constraints.append(LinearConstraint(taken[None].astype(float), ub=len(choice) - 1))
