"""Formats, and how many steps of a call are computed, under one budget of time: `fluxq auto --steps`.

    measure   inner products of what the scheduler is given, beside the errors of formats (calibrate/paths.py)
    propose   for each of some numbers of computed steps the formats of least error in the time that is left of them, or
              the cheapest that hold the gate; errors of list and formats add (recipes/budget.py)
    decide    run the best of these with their lists, as `auto` decides between formats

The list of a number of steps is that which `fluxq quantize` makes by the recipe's `steps: {compute: …}`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from fluxq.recipes.step_list import StepList


@dataclass(frozen=True)
class Listed:
    """A list of steps under which plans run. error: NMSE of the final latents that it measured alone, in 16 bit."""

    steps: StepList
    error: float


class Lists:
    """Lists of some numbers of computed steps, each made when plans are to run with it.

    errors: number of computed steps -> predicted NMSE of the final latents; 0 of all steps.
    """

    def __init__(self, search: Search, pipe: Any, work: Path) -> None:
        """Measure the steps of the pipeline; what is measured stays in the work folder."""
        job = search.job
        work.mkdir(exist_ok=True)
        self.search = search
        self.trials = trials_of(pipe, denoisers_of(job.folder), items_of_list(job), job.call, work)
        self.total = len(self.trials.velocities.levels)
        counts = counts_of_shares(self.total, min(self.trials.ways))
        self.errors = {count: self.trials.proposed(count).nmse for count in counts}
        self._made: dict[int, Listed] = {}

    def of(self, count: int) -> Listed | None:
        """Return the list of so many computed steps, decided by runs; None where all are computed."""
        if count == self.total:
            return None
        if count not in self._made:
            best = self.trials.best(count)
            self._made[count] = Listed(best.steps, best.error)
        return self._made[count]

    def measured(self, count: int) -> float | None:
        """Return the error of a list alone; None of one that was not made, or whose latents were not finite."""
        error = self._made[count].error if count in self._made else math.inf
        return error if math.isfinite(error) else None

    def best(self, errors: Numbers) -> list[Share]:
        """Return a plan for each number of computed steps within the budget, that of least predicted error first."""
        costs = self.search.costs
        return best_of_shares(errors, costs.numbers, self.search.limit, self.errors, costs.fixed)

    def cheapest(self, errors: Numbers, most: float) -> list[Share]:
        """Return a plan for each number of computed steps with at most so much predicted error, the cheapest first."""
        costs = self.search.costs
        return cheapest_of_shares(errors, costs.numbers, most, self.errors, costs.fixed)

    def front(self, errors: Numbers) -> list[Share]:
        """Return the plans of least predicted error for budgets from the least to the largest."""
        costs = self.search.costs
        return front_of_shares(errors, costs.numbers, self.errors, costs.fixed)

    def to_run(self, errors: Numbers) -> list[Share]:
        """Return the plans to run: the best, and that of all steps if one fits, which lists have to be better than."""
        shares = self.best(errors)
        return shares[: MOST_SHARES - 1] + [s for s in shares[MOST_SHARES - 1 :] if s.computed == self.total]
