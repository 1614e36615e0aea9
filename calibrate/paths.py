"""Lists of steps to compute: which steps, and what their outputs are multiplied by at every step.

The scheduler is given Σ_c W[t, c] v_c at step t: v_c are the outputs computed so far, guidance included. The latents
after step n are linear in what the scheduler is given,

    x_{n+1} = … + Σ_{t≤n} B[n, t] v_t

B is read off the scheduler itself; in flow matching B[n, t] = σ_{t+1} − σ_t, the length of the step. W[n] is the least
squares solution for the error of these latents, over images:

    e_n = Σ_{t≤n} B[n, t] (Σ_c W[t, c] v_c − v_t),    E ‖e_n‖² → min

so that a skipped step is extrapolated, and a computed one also puts right what is known now of the error before it.
All follows from inner products of the v_t, which are kept, and no outputs:

    G[s, t] = Σ ⟨v_s, v_t⟩ over images

A list changes the final latents by e_T, and by what comes back through the denoiser: at level σ an error e of the
latents changes the output by about e / σ, as the clean image that it points to stays.

    predicted = E ‖e_T‖² + Σ_c w_c² E ‖e_{c−1}‖² / σ_c²,    w_c: what v_c is multiplied by in the final latents

Steps are left out one by one, each time that which predicts the least error; of a list that runs, steps are exchanged
for others while that predicts less. A model that has computed nothing yet computes, and of two denoisers in one call
each takes outputs of its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fluxq.calibrate.capture import Item, number_of_steps, run_pipeline
from fluxq.calibrate.sensitivity import require_finite
from fluxq.calibrate.stand_ins import replaced_forwards
from fluxq.recipes.step_list import StepList, extrapolation, placing, require_falling

FEWEST_IMAGES = 4
_MOST_STEPS = 100  # of a call: lists of more take long
_RIDGE = 3e-5  # of the diagonal, in a fit: factors stay small, for other guidance and noise of codes
_LEAST_RIDGE = 1e-9  # where lists are compared: triangles exist


@dataclass(frozen=True)
class Velocities:
    """Inner products of what a scheduler is given at the steps of a call.

    gram: (T, T) fp64, summed over images.
    effects: (T, T) B, what the output of a step, in a column, adds to the latents after a step, in a row.
    denoisers: component that is called at each step.
    levels: noise level of each step.
    signal: Σ ‖final latents‖² of the images.
    """

    gram: np.ndarray
    effects: np.ndarray
    denoisers: tuple[str, ...]
    levels: tuple[float, ...]
    signal: float

    @property
    def begins(self) -> dict[int, str]:
        """Steps at which a denoiser is called for the first time, and which."""
        return {self.denoisers.index(name): name for name in dict.fromkeys(self.denoisers)}

    def ways(self, required: Collection[int] = ()) -> dict[int, Way]:
        """Return number of computed steps -> the list that is left of one more, of those that are possible.

        required: steps that every list computes, beside the first and the last.
        """
        steps, total = frozenset(range(len(self.levels))), len(self.levels)
        least, ways = self._least(required), {total: Way(0.0, tuple(range(total)))}
        while steps - least:
            way = min(self._way(steps - {step}) for step in steps - least)
            steps = frozenset(way.steps)
            ways[len(steps)] = way
        return ways

    def exchanged(self, way: Way, required: Collection[int] = ()) -> Way:
        """Return a list of as many steps, each in the place of another while that predicts less error."""
        least, every = self._least(required), frozenset(range(len(self.levels)))
        while way.nmse > 0:
            steps = frozenset(way.steps)
            others = (self._way(steps - {out} | {taken}) for out in steps - least for taken in every - steps)
            better = min(others, default=way)
            if better.nmse > 0.999 * way.nmse:
                break
            way = better
        return way

    def fitted(self, steps: Collection[int]) -> np.ndarray:
        """Return W, (T, T): what outputs of computed steps, in columns, are multiplied by at each step."""
        total, rows, regular = len(self.levels), np.zeros_like(self.gram), self._regular(_RIDGE)
        for step in range(total):
            before = [each for each in range(step + 1) if each in steps]
            peers = [each for each in before if self.denoisers[each] == self.denoisers[step]]
            if len(before) == step + 1:
                rows[step, step] = 1  # nothing has been left out
                continue
            there = self.effects[step, step]
            missing = self.effects[step] - self.effects[step, :step] @ rows[:step] if there else np.eye(total)[step]
            factors = np.linalg.solve(regular[np.ix_(peers, peers)], self.gram[peers] @ missing)
            rows[step, peers] = factors / (there or 1)
        return rows

    def extrapolated(self, steps: Collection[int], order: int) -> np.ndarray:
        """Return W of outputs that go on over noise levels, of an order."""
        rows = np.zeros_like(self.gram)
        for step, name in enumerate(self.denoisers):
            peers = [each for each in range(step) if each in steps and self.denoisers[each] == name][-order - 1 :]
            nodes = [step] if step in steps else peers
            rows[step, nodes] = extrapolation([self.levels[node] for node in nodes], self.levels[step])
        return rows

    def predicted(self, steps: Iterable[int], rows: np.ndarray) -> float:
        """Return the NMSE of the final latents that a list does, with what is multiplied by at each step."""
        made = self.effects @ rows
        errors = np.einsum("ns,st,nt->n", made - self.effects, self.gram, made - self.effects)
        nodes = sorted(steps)
        return self._nmse(nodes, made[-1][nodes], np.array([*errors[np.array(nodes[1:], int) - 1], errors[-1]]))

    def _way(self, steps: Iterable[int]) -> Way:
        """Return a list with what it is predicted to cost, as if the denoisers of a call were one."""
        from scipy.linalg import cholesky, solve_triangular

        nodes = tuple(sorted(steps))
        after = np.array([*nodes[1:], len(self.levels)]) - 1
        lower = cholesky(self._comparable[np.ix_(nodes, nodes)], lower=True, check_finite=False)
        parts = solve_triangular(lower, self._products[np.ix_(nodes, after.tolist())], lower=True, check_finite=False)
        errors = self._squares[after] - np.triu(parts**2).sum(0)  # latents before a step, of the nodes before it
        weights = solve_triangular(lower, parts[:, -1], lower=True, trans=1, check_finite=False)
        return Way(self._nmse(nodes, weights, errors), nodes)

    def _nmse(self, nodes: Sequence[int], weights: np.ndarray, errors: np.ndarray) -> float:
        """Return the predicted NMSE.

        errors: of the latents before each node but the first, and of the final ones.
        """
        gains = weights[1:] * self.levels[0] / np.array([self.levels[node] for node in nodes[1:]])
        return float(np.maximum(errors, 0) @ [*gains**2, 1.0]) / self.signal

    def _least(self, required: Collection[int]) -> frozenset[int]:
        return frozenset({0, len(self.levels) - 1, *self.begins, *required})

    def _regular(self, ridge: float) -> np.ndarray:
        diagonal = np.diag(self.gram)
        return self.gram + ridge * np.diag(diagonal + 1e-3 * diagonal.mean())

    @cached_property
    def _comparable(self) -> np.ndarray:
        return self._regular(_LEAST_RIDGE)

    @cached_property
    def _products(self) -> np.ndarray:
        """Inner products of outputs, in rows, with what all of them do to the latents after each step."""
        return self.gram @ self.effects.T

    @cached_property
    def _squares(self) -> np.ndarray:
        return np.einsum("nt,tn->n", self.effects, self._products)


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
    fresh: list[Any] = []
    with _calls_noted(pipe, denoisers, called) as at_step, _outputs(pipe.scheduler, fresh) as outputs:
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
    require_falling(levels, type(pipe.scheduler).__name__)
    effects = _effects(fresh[0], total)
    if effects is None:
        effects = np.tril(np.tile(np.diff([*levels, 0.0]) / levels[0], (total, 1)))
    return Velocities(gram.numpy(), effects, tuple(called[step] for step in range(total)), levels, signal)


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
        raise ValueError(
            f"a call of {total} step{'s' * (total != 1)}: a list is of 2 to {_MOST_STEPS}; give another "
            "num_inference_steps"
        )


def levels_of(scheduler: Any) -> tuple[float, ...]:
    """Return the noise level of each step of a scheduler's present schedule: sigma in flow matching, else timestep."""
    count = len(scheduler.timesteps)
    levels = scheduler.sigmas[:count] if _is_flow(scheduler) else scheduler.timesteps
    return tuple(map(float, levels.tolist()))  # waits for the device once


def _is_flow(scheduler: Any) -> bool:
    """Tell whether a scheduler's sigmas are shares of noise, at most 1, by which outputs go on most evenly."""
    sigmas = getattr(scheduler, "sigmas", None)
    return sigmas is not None and len(sigmas) >= len(scheduler.timesteps) and float(sigmas.max()) <= 1


def _effects(scheduler: Any, total: int) -> np.ndarray | None:
    """Return what the output of each step, in a column, adds to the latents after a step, in a row.

    scheduler: as it is before the first step. None for one that adds noise, whose latents are not linear in outputs,
        or which cannot be called alone.
    """
    probes = torch.zeros(2 * total + 1, 1, 1, 1, device=scheduler.timesteps.device)
    outputs = torch.cat([torch.zeros(1, total), torch.eye(total), 2 * torch.eye(total)]).to(probes)
    latents = []
    try:
        for output, timestep in zip(outputs.T, scheduler.timesteps[:total], strict=True):
            if hasattr(scheduler, "scale_model_input"):
                scheduler.scale_model_input(probes, timestep)  # some count on it
            probes = scheduler.step(output.reshape(probes.shape), timestep, probes, return_dict=False)[0]
            latents.append(probes.flatten())
    except (TypeError, ValueError, RuntimeError):
        return None
    rows = torch.stack(latents).double().cpu().numpy()
    effects, doubled = rows[:, 1 : total + 1] - rows[:, :1], rows[:, total + 1 :] - rows[:, :1]
    is_linear = np.allclose(doubled, 2 * effects, rtol=1e-3, atol=1e-5) and np.allclose(
        np.triu(effects, 1), 0, atol=1e-6
    )
    return np.tril(effects) if is_linear and np.isfinite(effects).all() else None


@contextmanager
def _outputs(scheduler: Any, fresh: list[Any]) -> Iterator[list[Tensor]]:
    """Yield a list that the scheduler's `step` adds what it is given to.

    fresh: gets a copy of the scheduler as it is before its first step.
    """
    given: list[Tensor] = []
    plain, is_own = scheduler.step, "step" in vars(scheduler)

    @functools.wraps(plain)  # pipelines look at its signature
    def step(model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not fresh:
            fresh.append(copy.deepcopy(scheduler))
            del fresh[0].step
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
