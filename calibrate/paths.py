"""Lists of steps to compute: the shortest path through the steps of a call, by what the skipped ones cost.

Between computed steps s < n the output of step t is extrapolated from those computed last (recipes/step_list.py). What
that does to the final latents is

    gap(…, s, n) = E ‖ Σ_{s<t<n} a_t (v̂_t − v_t) ‖²

v_t is what the scheduler is given at step t, guidance included. Within a gap errors are summed before they are
squared, because they point the same way; between gaps they are not. a_t is what an error there is multiplied by in the
final latents: in flow matching σ_t − σ_{t+1}, the length of the step, else √W_t (sensitivity.py). W is measured with
noise that knows nothing of the image. Of the embedded pipeline, errors of runs are .6 to 1.3 times what the length
predicts (orders 1 and 2), and 2 to 6 times what √W does, whose lists are no better.

v̂ is linear in the outputs, so a gap needs their inner products alone, which are kept, and no outputs:

    gap = cᵀ G c,    G[s, t] = Σ ⟨v_s, v_t⟩ over images

A list of K steps is a path from the first step to the last over states of the last two computed steps; of order 2 a
gap reads three, the third is that of the state's best path. A model that has computed nothing yet computes: of two
denoisers in one call each has a list of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fluxq.calibrate.capture import Item, number_of_steps, run_pipeline, spread
from fluxq.calibrate.sensitivity import IMAGES, noise_level_effects, require_finite
from fluxq.calibrate.stand_ins import replaced_forwards
from fluxq.recipes.step_list import StepList, extrapolation, placing

FEWEST_IMAGES = 4
_WEIGHED = 8  # steps whose effect is measured; between them it is interpolated
_MOST_STEPS = 100  # of a call: paths of more take long


@dataclass(frozen=True)
class Velocities:
    """Inner products of what a scheduler is given at the steps of a call.

    gram: (T, T) fp64, summed over images.
    factors: (T,) a_t, what an error at each step is multiplied by in the final latents.
    denoisers: component that is called at each step.
    levels: noise level of each step.
    signal: Σ ‖final latents‖² of the images.
    """

    gram: np.ndarray
    factors: np.ndarray
    denoisers: tuple[str, ...]
    levels: tuple[float, ...]
    signal: float

    def paths(self, order: int, required: Collection[int] = ()) -> dict[int, Way]:
        """Return number of computed steps -> the list of least predicted error, of those that are possible.

        required: steps that every list computes, beside the first and the last.
        """
        total, gap, best = len(self.levels), functools.cache(self._gap), dict[int, Way]()
        layer = {(-1, 0): Way(0.0, (0,))}
        for count in range(2, total + 1):
            following: dict[tuple[int, int], Way] = {}
            for path in layer.values():
                nodes = path.steps[-order - 1 :]
                reach = min((step for step in required if step > nodes[-1]), default=total - 1)
                for step in range(nodes[-1] + 1, reach + 1):
                    cost, state = path.nmse + gap(nodes, step) / self.signal, (nodes[-1], step)
                    if state not in following or cost < following[state].nmse:
                        following[state] = Way(cost, (*path.steps, step))
            layer = following
            ends = [path for path in layer.values() if path.steps[-1] == total - 1 and math.isfinite(path.nmse)]
            if ends:
                best[count] = min(ends)
        return best

    def _gap(self, nodes: tuple[int, ...], step: int) -> float:
        """Return the squared error of the final latents by the steps between the last of the nodes and `step`."""
        skipped, present = range(nodes[-1] + 1, step), self.denoisers[nodes[-1]]
        if not skipped:
            return 0.0
        if any(self.denoisers[each] != present for each in skipped):
            return math.inf
        own = [node for node in nodes if self.denoisers[node] == present]
        levels, sums = [self.levels[node] for node in own], np.zeros(len(self.levels))
        for each in skipped:
            sums[own] += self.factors[each] * np.array(extrapolation(levels, self.levels[each]))
            sums[each] -= self.factors[each]
        return max(float(sums @ self.gram @ sums), 0.0)


class Way(NamedTuple):
    """A list's predicted NMSE of the final latents, and the steps that it computes."""

    nmse: float
    steps: tuple[int, ...]


@torch.no_grad()
def measure_velocities(
    pipe: Any, denoisers: Sequence[str], items: Sequence[Item], call: Mapping[str, Any]
) -> Velocities:
    """Run a pipeline and return what lists of steps are made of.

    denoisers: components that run at the steps.
    Raises ValueError for too few images, and for a scheduler or pipeline whose steps cannot be told apart.
    """
    if len(items) < FEWEST_IMAGES:
        raise ValueError(f"{len(items)} images say too little about the steps of others: take {FEWEST_IMAGES} or more")
    total = number_of_steps(pipe, call)
    require_listed(pipe.scheduler, total)
    gram, signal = torch.zeros(total, total, dtype=torch.float64), 0.0
    called: dict[int, str] = {}
    with _calls_noted(pipe, denoisers, called) as at_step, _outputs(pipe.scheduler) as outputs:
        for _, latents in run_pipeline(pipe, items, call, on_step=at_step):
            require_finite(latents)
            if len(outputs) != total:
                raise ValueError(
                    f"{type(pipe).__name__} calls its scheduler {len(outputs)} times in {total} steps, so no step of "
                    "it can be left out"
                )
            rows = torch.stack([v.double().cpu().flatten() for v in outputs])
            gram += rows @ rows.T
            signal += float(latents.double().square().sum())
            outputs.clear()
    levels = levels_of(pipe.scheduler)[-total:]
    list_of(pipe.scheduler, range(total), 0, levels)  # refuses levels that do not fall
    factors = -np.diff([*levels, 0.0])
    if not is_flow(pipe.scheduler):
        effects = noise_level_effects(pipe, denoisers, items[:IMAGES], call, spread(_WEIGHED, total))
        factors = _interpolated(effects, factors)
    return Velocities(gram.numpy(), factors, tuple(called[step] for step in range(total)), levels, signal)


def list_of(scheduler: Any, computed: Iterable[int], order: int, levels: Sequence[float], **facts: Any) -> StepList:
    """Return a list for a scheduler."""
    return StepList(tuple(computed), order, tuple(levels), type(scheduler).__name__, placing(scheduler), **facts)


def require_listed(scheduler: Any, total: int) -> None:
    """Raise ValueError for a scheduler or a number of steps that no list can be of."""
    if getattr(scheduler, "order", 1) != 1:
        raise ValueError(
            f"a {type(scheduler).__name__} evaluates the denoiser twice a step, at levels of its own: lists are for "
            "those of first order, such as FlowMatchEulerDiscreteScheduler or DPMSolverMultistepScheduler"
        )
    if not 2 <= total <= _MOST_STEPS:
        raise ValueError(f"a call of {total} steps: a list is of 2 to {_MOST_STEPS}")


def levels_of(scheduler: Any) -> tuple[float, ...]:
    """Return the noise level of each step of a scheduler's present schedule: sigma in flow matching, else timestep."""
    count = len(scheduler.timesteps)
    levels = scheduler.sigmas[:count] if is_flow(scheduler) else scheduler.timesteps
    return tuple(map(float, levels.tolist()))  # waits for the device once


def is_flow(scheduler: Any) -> bool:
    """Tell whether a scheduler's sigmas are shares of noise, at most 1, by which outputs go on most evenly."""
    sigmas = getattr(scheduler, "sigmas", None)
    return sigmas is not None and len(sigmas) >= len(scheduler.timesteps) and float(sigmas.max()) <= 1


def _interpolated(effects: Mapping[int, float], lengths: np.ndarray) -> np.ndarray:
    """Return √W of every step: by the step's length it is interpolated, because lengths jump and the rest does not."""
    by_length = [math.sqrt(effect) / lengths[step] for step, effect in effects.items()]
    return np.interp(range(len(lengths)), list(effects), by_length) * lengths


@contextmanager
def _outputs(scheduler: Any) -> Iterator[list[Tensor]]:
    """Yield a list that the scheduler's `step` adds what it is given to."""
    given: list[Tensor] = []
    plain, is_own = scheduler.step, "step" in vars(scheduler)

    @functools.wraps(plain)  # pipelines look at its signature
    def step(model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(model_output.clone())
        return plain(model_output, *args, **kwargs)

    scheduler.step = step
    try:
        yield given
    finally:
        if is_own:
            scheduler.step = plain
        else:
            del scheduler.step


@contextmanager
def _calls_noted(pipe: Any, denoisers: Sequence[str], called: dict[int, str]) -> Iterator[Callable[[int], None]]:
    """Note in `called` which denoiser is called at each step; yields the function to tell of steps."""
    now = 0

    def at_step(step: int) -> None:
        nonlocal now
        now = step

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            called[now] = name
            return original(*args, **kwargs)

        return forward

    models = {name: getattr(pipe, name) for name in denoisers}
    with replaced_forwards({model: noting(name, model.forward) for name, model in models.items()}):
        yield at_step
