"""Formats, and how many steps of a call are computed, under one budget of time: `fluxq auto --steps`.

    measure   inner products of what the scheduler is given, beside the errors of formats (calibrate/paths.py)
    propose   for some numbers of computed steps the formats of least error in the time that each of these steps
              may take, or the cheapest that hold the gate; errors of list and formats add (recipes/budget.py)
    decide    run the best of these with their lists, as `auto` decides between formats

The list of a number of steps is that which `fluxq quantize` makes by the recipe's `steps: {compute: …}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxq.eval.metrics.schema import number
from fluxq.jobs.listing import items_of_list, trials_of
from fluxq.jobs.search import MOST_SHARES, Search
from fluxq.quantize.structure import denoisers_of
from fluxq.recipes.budget import (
    Numbers,
    Share,
    best_of_shares,
    cheapest_of_shares,
    counts_of_shares,
    front_of_shares,
)
from fluxq.runtime.step_trials import TriedList


class Lists:
    """Lists of some numbers of computed steps, each made when plans are to run with it.

    errors: number of computed steps -> predicted NMSE of the final latents; 0 of all steps. There are numbers that fall
        by a sixth, and more around the best of these.
    """

    def __init__(self, search: Search, pipe: Any, work: Path) -> None:
        """Measure the steps of the pipeline; what is measured stays in the work folder."""
        job = search.job
        work.mkdir(exist_ok=True)
        self.search = search
        self.trials = trials_of(pipe, denoisers_of(job.folder), items_of_list(job), job.call, work)
        self.total = len(self.trials.velocities.levels)
        self.coarse = counts_of_shares(self.total, min(self.trials.ways))
        self.errors = {count: self.trials.proposed(count).nmse for count in self.coarse}
        self._made: dict[int, TriedList] = {}

    def of(self, count: int) -> TriedList | None:
        """Return the list of so many computed steps, decided by runs; None where all are computed.

        Plans with it are compared by what `errors` predicts: the images that decided are few, and the list is the best
        of several on them.
        """
        if count == self.total:
            return None
        if count not in self._made:
            self._made[count] = replace(self.trials.best(count), predicted=self.errors[count])
        return self._made[count]

    def measured(self, count: int) -> float | None:
        """Return the error of a list alone; None of one that was not made, or whose latents were not finite."""
        return number(self._made[count].error) if count in self._made else None

    def best(self, errors: Numbers) -> list[Share]:
        """Return a plan for each number of computed steps within the budget, that of least predicted error first."""
        costs, limit = self.search.costs, self.search.limit
        return self._refined(lambda lists: best_of_shares(errors, costs.numbers, limit, lists, costs.fixed))

    def cheapest(self, errors: Numbers, most: float) -> list[Share]:
        """Return a plan for each number of computed steps with at most so much predicted error, the cheapest first."""
        costs = self.search.costs
        return self._refined(lambda lists: cheapest_of_shares(errors, costs.numbers, most, lists, costs.fixed))

    def front(self, errors: Numbers) -> list[Share]:
        """Return the plans of least predicted error for budgets from the least to the largest."""
        costs = self.search.costs
        return front_of_shares(errors, costs.numbers, self.errors, costs.fixed)

    def to_run(self, errors: Numbers) -> list[Share]:
        """Return the plans to run: the best, of numbers that differ by a sixth the next ones, and that of all steps.

        The latter, if it fits: what lists have to be better than.
        """
        plans = self.best(errors)
        if not plans:
            raise RuntimeError(
                "no plan whose latents are finite takes so little time; give more --ms, or add 16bit to --menu"
            )
        first, *others = plans
        others = [share for share in others if share.computed in self.coarse]
        few = others[: MOST_SHARES - 2]
        return [first, *few, *(share for share in others if share.computed == self.total and share not in few)]

    def _refined(self, solve: Callable[[Mapping[int, float]], list[Share]]) -> list[Share]:
        """Return what a solver finds with the numbers of computed steps between the best one's neighbours, too."""
        plans = solve(self.errors)
        if plans:
            more = [count for count in self.coarse if count > plans[0].computed]
            less = [count for count in self.coarse if count < plans[0].computed]
            for count in range(max(less, default=plans[0].computed), min(more, default=plans[0].computed)):
                if count not in self.errors:
                    self.errors[count] = self.trials.proposed(count).nmse
        return solve(self.errors)
