"""Run plans of number formats on the images that decide, and compare them.

Layers in runs are rounded to nearest, or as checkpoints have them. Squared errors are kept in a file: an interrupted
search runs no plan twice.

Plans are compared image by image, in dB: of a sum of squares a few images make most. A few dozen images cannot tell
plans apart that differ by less than half a dB. Predictions can, where they are right. So runs refute plans, and
prediction chooses among those that are left.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.files import sha256_json
from fluxq.calibrate.capture import Item, batches, final_latents
from fluxq.calibrate.errors import SIXTEEN_BIT
from fluxq.calibrate.runs import Judged, KeptRuns, mean_of, squares_of
from fluxq.calibrate.stand_ins import MadeAnew, module_of, replaced, with_weights
from fluxq.eval.debug.patch import improved
from fluxq.eval.metrics.statistics import Interval, clustered_interval
from fluxq.jobs.search import Search
from fluxq.kernels.linear import in_place_of
from fluxq.recipes.budget import Choice, Numbers, total
from fluxq.recipes.formats import Scheme
from fluxq.runtime.attention_choice import with_attention
from fluxq.runtime.skipped import SkippedSteps
from fluxq.runtime.step_trials import TriedList

LEVEL = 0.1  # dB


@dataclass
class Tried(Judged):
    """A plan that ran, and what it did to the images of its rounds.

    proposed_by: its measures. prompts: of each image. listed: steps that were computed, None for all.
    """

    proposed_by: tuple[str, ...]
    choice: Choice
    cost: float
    listed: TriedList | None = None
    squares: list[float] = field(default_factory=list)
    signals: list[float] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    rounds: int = 0

    @property
    def predicted_of_list(self) -> float:
        """Predicted NMSE by the steps that are left out, alone; errors of list and formats add."""
        return self.listed.predicted if self.listed else 0.0

    @property
    def errors(self) -> list[float]:
        """Squared error of each image by the mean signal: their mean is the NMSE of all."""
        mean = math.fsum(self.signals) / len(self.signals)
        return [square / mean for square in self.squares]


class Bench:
    """Runs of plans with a pipeline, each once; squared errors are kept in a file of the work folder."""

    def __init__(self, search: Search, pipe: Any, file: Path) -> None:
        self.search, self.pipe, self.runs = search, pipe, KeptRuns(file)
        self.originals = {name: module_of(pipe, name) for names in search.offer.modules.values() for name in names}
        self.tried: list[Tried] = []
        self.references: dict[int, list[Tensor]] = {}  # round -> final latents of the 16-bit pipeline

    def layers(self, unit: str, option: str) -> dict[str, Any]:
        """Return layer -> itself in an option, rounded to nearest or as it was fitted; an attention -> itself in it."""
        if not self.search.offer.units[unit]:
            return {unit: with_attention(self.originals[unit], option)}  # pyright: ignore[reportArgumentType]
        schemes = self.search.offer.schemes({unit: option})
        makes = {name: partial(self._made, name, option, scheme) for name, scheme in schemes.items()}
        if self.search.job.run.memory is not None:
            return {
                name: MadeAnew(self.originals[name], make) if schemes[name] else self.originals[name]
                for name, make in makes.items()
            }
        layers = {name: make() for name, make in makes.items()}
        for layer in layers.values() if unit in self.search.offer.once else ():
            layer.weight.data = layer.weight.data.view(torch.int8)  # T5 casts inputs to any other dtype of a weight
        return layers

    def _made(self, name: str, option: str, scheme: Scheme | None) -> Any:
        """Return a layer in an option, made while the plain one's weights are there."""
        plain, fitted = self.originals[name], self.search.offer.fitted
        if option in fitted:
            return in_place_of(plain, fitted[option].layer(name)).to(plain.weight.device)
        return improved(plain, scheme and replace(scheme, static_input=False))

    def weight_error(self, unit: str, option: str) -> float:
        """Return the squared error of a unit's weights in an option."""

        def error(name: str, scheme: Scheme) -> float:
            rounded = self._made(name, option, scheme).collapsed()[0]
            weight = self.originals[name].weight.detach().flatten(1)
            return float((rounded.double() - weight.double()).square().sum())

        schemes = self.search.offer.schemes({unit: option})
        return math.fsum(
            with_weights(self.originals[name], partial(error, name, scheme))
            for name, scheme in schemes.items()
            if scheme is not None
        )

    def run(self, choice: Choice, *proposed_by: str, listed: TriedList | None = None) -> Tried:
        """Return the plan, with a list of steps if there is one, with its errors on the images of the first round."""
        cost = self.search.cost(choice)
        cost = cost * len(listed.steps.computed) / listed.steps.total if listed else cost
        self.tried.append(Tried(proposed_by, choice, cost, listed))
        self.run_again(self.tried[-1])
        return self.tried[-1]

    def run_again(self, tried: Tried) -> None:
        """Run a plan on the images of its next round."""
        number, key = tried.rounds, sha256_json(sorted(tried.choice.items()))
        key += f" {sha256_json(tried.listed.steps.to_dict())}" if tried.listed else ""
        signals = self.runs.once(f"signals {number}", lambda: squares_of(self._reference(number)))
        squares = self.runs.once(f"{key} {number}", lambda: self._squares(tried.choice, number, tried.listed))
        tried.squares += squares
        tried.signals += signals
        tried.prompts += [prompt for prompt, _ in self._items(number)]
        tried.rounds += 1

    def better_of(self, tried: Sequence[Tried], errors: Numbers) -> Tried:
        """Return the plan of least predicted error that no other one is better than for sure.

        A cheaper one is returned instead if what it loses is less than LEVEL for sure. Where images leave any of this
        open, the plans run on more, as long as there are any.

        errors: unit -> option -> its predicted error.
        """
        left = list(tried)
        while True:
            count = min(len(each.squares) for each in left)
            best = max(left, key=lambda each: mean_of(each.ratios[:count]))
            left = [each for each in left if each is best or not loss(each, best).low > 0]
            least = min(left, key=lambda each: (total(errors, each.choice) + each.predicted_of_list, each.cost))
            level = [each for each in left if each is least or loss(each, least).high <= LEVEL]
            rounds = min(each.rounds for each in left)
            if len(level) == len(left) or rounds == len(self.search.judging):
                return min(level, key=lambda each: (each.cost, each is not least))
            for each in left:
                if each.rounds == rounds:
                    self.run_again(each)

    def _squares(self, choice: Choice, number: int, listed: TriedList | None) -> list[float]:
        plain = self._reference(number)
        layers = {n: la for u, o in choice.items() if o != SIXTEEN_BIT for n, la in self.layers(u, o).items()}
        skipped = SkippedSteps(self.pipe, listed.steps) if listed else nullcontext()
        with replaced(self.pipe, layers), skipped:
            return squares_of(self._latents(number), plain)

    def _reference(self, number: int) -> list[Tensor]:
        if number not in self.references:
            self.references[number] = self._latents(number)
        return self.references[number]

    def _latents(self, number: int) -> list[Tensor]:
        """Return the final latents of each image of a round."""
        with torch.no_grad():
            return final_latents(self.pipe, self.search.judging[number], self.search.job.call)

    def _items(self, number: int) -> list[Item]:
        """Return the images of a round in the order in which the pipeline makes them."""
        return [item for batch in batches(self.search.judging[number], None, self.search.job.call) for item in batch]


def loss(one: Tried, other: Tried) -> Interval:
    """Return the mean dB by which a plan is worse than another on the images that both ran on, with its 95 % interval.

    Infinite where an image of one of them is not finite, or exact, and that of the other is not.
    """
    pairs = zip(one.ratios, other.ratios, one.prompts, strict=False)
    differences, prompts = zip(*((0.0 if a == b else b - a, prompt) for a, b, prompt in pairs), strict=True)
    endless = [each for each in differences if math.isinf(each)]
    if endless:
        return Interval(endless[0], endless[0], endless[0], len(differences))
    return clustered_interval(differences, prompts)
