"""Lists of steps are proposed by inner products (calibrate/paths.py) and decided by runs on other images.

The reference of a list's error (calibrate/runs.py) is the same pipeline with all steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.files import sha256_json
from fluxq.base.model import ModelFolder
from fluxq.calibrate.capture import Item, final_latents
from fluxq.calibrate.paths import Velocities, Way, list_of, measure_velocities
from fluxq.calibrate.prompts import PromptSet, load_prompts
from fluxq.calibrate.runs import Judged, KeptRuns, squares_of
from fluxq.recipes.step_list import ORDERS, StepList
from fluxq.runtime.skipped import SkippedSteps, architectures, kept_in

FORMS = len(ORDERS) + 1  # that run of each list: every order, and the fit
IMAGES = 12  # that a list is made of; as many others decide
SEED = 5 << 20  # evaluation begins at 0, calibration at 1 << 20


@dataclass(frozen=True)
class TriedList(Judged):
    """A list that ran, and what it did to the images. predicted: NMSE of the final latents."""

    steps: StepList
    predicted: float
    squares: Sequence[float]
    signals: Sequence[float]


class Trials:
    """Runs of lists on images that measured nothing, each once.

    required: steps that every list computes, beside the first and the last.
    file: where squared errors are kept for an interrupted run to go on with, None for nowhere.
    """

    def __init__(
        self,
        pipe: Any,
        velocities: Velocities,
        items: Sequence[Item],
        call: Mapping[str, Any],
        file: Path | None = None,
        required: Collection[int] = (),
    ) -> None:
        self.pipe, self.velocities, self.items, self.call, self.runs = pipe, velocities, items, call, KeptRuns(file)
        self.required, self.ways = required, velocities.ways(required)
        self.tried: list[TriedList] = []

    def best(self, count: int) -> TriedList:
        """Return the list of `count` computed steps with what measures the least error: a fit, or an order.

        ValueError where so few cannot be.
        """
        least = min(self.ways)
        if count < least:
            raise ValueError(f"{count} computed steps are too few: this pipeline needs {least}")
        return self._best(self.proposed(count).steps)

    def judged(self, computed: Sequence[int]) -> TriedList:
        """Return a given list with what measures the least error: a fit, or an order.

        ValueError where a second denoiser begins with a step that it leaves out.
        """
        left_out = [f"step {step} ({name})" for step, name in self.velocities.begins.items() if step not in computed]
        if left_out:
            raise ValueError(f"the list leaves out the first step of a denoiser; compute {' and '.join(left_out)}")
        self.proposed(len(computed))  # the best of so many, for comparison
        return self._best(computed)

    def proposed(self, count: int) -> Way:
        """Return the list of `count` computed steps of which least error is predicted; `ways` has it from then on."""
        self.ways[count] = self.velocities.exchanged(self.ways[count], self.required)
        return self.ways[count]

    def _best(self, computed: Sequence[int]) -> TriedList:
        plain = min((self._run(computed, order) for order in ORDERS), key=lambda each: each.error)
        return min(plain, self._run(computed, plain.steps.order, is_fitted=True), key=lambda each: each.error)

    def _run(self, computed: Sequence[int], order: int, is_fitted: bool = False) -> TriedList:
        velocities, models = self.velocities, architectures(self.pipe)
        rows = velocities.fitted(computed) if is_fitted else velocities.extrapolated(computed, order)
        steps = list_of(self.pipe.scheduler, computed, order, velocities.levels, models=models)
        if is_fitted:
            factors = (row[[each for each in computed if each <= step]] for step, row in enumerate(rows))
            steps = replace(steps, fitted=tuple(tuple(row.tolist()) for row in factors))
        signals = self.runs.once("signals", lambda: squares_of(self._reference))
        squares = self.runs.once(sha256_json([order, is_fitted, *computed]), lambda: self._squares(steps))
        self.tried.append(TriedList(steps, velocities.predicted(computed, rows), squares, signals))
        return self.tried[-1]

    def _squares(self, steps: StepList) -> list[float]:
        plain = self._reference
        with SkippedSteps(self.pipe, steps):
            return squares_of(self._latents(), plain)

    @cached_property
    def _reference(self) -> list[Tensor]:
        return self._latents()

    @torch.no_grad()
    def _latents(self) -> list[Tensor]:
        return final_latents(self.pipe, self.items, self.call)


def made_list(pipe: Any, denoisers: Sequence[str], compute: float, call: Mapping[str, Any]) -> StepList:
    """Return a list made on the spot, with the prompts and the call of the pipeline's folder."""
    require_share(compute)
    folder = ModelFolder("", Path(str(getattr(pipe, "name_or_path", None) or "")))
    prompts = load_prompts("default", folder, pipeline=type(pipe))
    trials = measured_steps(pipe, denoisers, prompts, {**folder.generation_defaults, **call})
    return trials.best(computed_of(compute, len(trials.velocities.levels))).steps


def measured_steps(pipe: Any, denoisers: Sequence[str], prompts: PromptSet, call: Mapping[str, Any]) -> Trials:
    """Measure the steps of a pipeline on the first images of a set, and return trials on the next ones.

    Their lists compute the steps that `keep_steps` keeps in the pipeline.
    """
    items = prompts.alike.items(2 * IMAGES, SEED)
    velocities = measure_velocities(pipe, denoisers, items[:IMAGES], call)
    required = kept_in(pipe, len(velocities.levels))
    return Trials(pipe, velocities, items[IMAGES:], call, required=required)


def computed_of(compute: float, total: int) -> int:
    """Return the number of computed steps of a share of them; two at least."""
    return max(2, round(compute * total))


def require_share(compute: float) -> None:
    """Raise ValueError for a share of steps that is none."""
    if isinstance(compute, bool) or not (isinstance(compute, int | float) and 0 < compute <= 1):
        raise ValueError(f"compute {compute!r}: expected the share of steps to compute, above 0 and at most 1")
