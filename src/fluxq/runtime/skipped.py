"""Denoisers that compute some steps and extrapolate the others: what `fluxq.skip_steps` puts into a pipeline.

Our stand-in for the denoiser's forward comes before all that was there: a CUDA graph, a compiled forward,
or weights that are fetched for it, rest in a skipped step. Calls of one step, as those of guidance, are told apart by
their order; all are computed, or none.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fluxq.base.console import logger
from fluxq.base.files import sha256_json
from fluxq.base.modules import uncompiled
from fluxq.calibrate.paths import levels_of
from fluxq.quantize.structure import denoisers_in
from fluxq.recipes.step_list import StepList, extrapolation, nearest_list, placing, require_falling
from fluxq.runtime.first_block import first_block_of
from fluxq.runtime.placed import Handle, Placed
from fluxq.runtime.steps import Follower, kept_steps_of, require_followed, timestep_of


class SkippedSteps(Handle):
    """Handle of what `skip_steps` put into a pipeline; `remove()`, or leaving its `with` block, takes it out.

    steps: the list; of several that of the number of steps nearest to that of the call.
    calls, computed: of denoisers, since it was put in.

    Steps that `keep_steps` keeps are computed, too.
    """

    def __init__(self, pipe: Any, steps: StepList, *others: StepList) -> None:
        self.pipe, self.steps, self._lists = pipe, steps, (steps, *others)
        self.calls = self.computed = 0
        require_followed(pipe.scheduler)
        for each in self._lists:
            require_own(each, pipe.scheduler)
            _require_own_model(each, pipe)
        self._follower = Follower(lambda: pipe.scheduler)
        self._chosen: tuple[Any, ...] = (None, frozenset[int](), ())
        self.factors: tuple[dict[int, float], ...] = ()
        self._told: set[int] = set()
        self._put = [SkippedCalls(self, outer) for _, outer in denoisers_in(pipe)]

    def step(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int, bool, tuple[float, ...]]:
        """Return of this call of a denoiser its schedule, its step, whether that is computed, and all noise levels."""
        step, total = self._follower.step(model, args, kwargs)
        schedule, begin = self._follower.schedule, self._follower.begin or 0
        key, computed, levels = self._chosen
        if key is None or key[0] is not schedule or key[1:] != (begin, total):
            scheduler = self.pipe.scheduler
            self.steps = nearest_list(self._lists, total)
            require_own(self.steps, scheduler)
            _require_one_level(model, timestep_of(model, args, kwargs))
            levels = levels_of(scheduler)[begin : begin + total]
            require_falling(levels, type(scheduler).__name__)
            computed = self.steps.at(levels)
            self._tell(computed, total)
            computed |= kept_in(self.pipe, total)
            self.factors = self.steps.factors(levels, computed)
            self._chosen = (schedule, begin, total), computed, levels
        if step not in range(total):
            raise ValueError(
                f"this {type(model).__name__} is called outside the {total} steps of the pipeline with the list, whose "
                "scheduler says which step it is: give other pipelines of it that scheduler, or remove() the list"
            )
        return schedule, step, step in computed, levels

    def _tell(self, computed: frozenset[int], total: int) -> None:
        """Log, once for each number of steps, what a list makes of a call that is not as its own."""
        is_own = total == self.steps.total and computed == {*self.steps.computed}
        if not is_own and total not in self._told:
            self._told.add(total)
            logger.warning(
                "the list is of a call of %d steps; of this one of %d, %d are computed, by the nearest noise levels",
                *(self.steps.total, total, len(computed)),
            )


class SkippedCalls(Placed):
    """Callable in the place of a denoiser's forward: computes, and returns a sum of what has been computed."""

    def __init__(self, skipped: SkippedSteps, outer: nn.Module) -> None:
        self.skipped, self.model, self._on = skipped, uncompiled(outer), True
        self._schedule: Any = None
        self._step = self._number = self._last = -1
        self._outputs: dict[int, dict[int, list[Any]]] = {}  # number of a call in its step -> computed step -> leaves
        super().__init__(outer, place_of(outer))

    @torch.compiler.disable(reason="which step it is is found out before a graph runs: compile, then fluxq.skip_steps")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._on:
            return self.plain(*args, **kwargs)
        _require_no_cache(self.model)
        schedule, step, is_computed, levels = self.skipped.step(self.model, args, kwargs)
        if schedule is not self._schedule or step < self._step:
            self._schedule, self._outputs, self._step = schedule, {}, -1
        self._step, self._number = step, self._number + 1 if step == self._step else 0
        before = self._outputs.setdefault(self._number, {})
        self.skipped.calls += 1
        fitted = self.skipped.factors[step] if self.skipped.factors else {}
        if is_computed or not before or max(before) != self._last:
            output = self._computed(before, step, args, kwargs)
            return self._combined(fitted, before) if {*fitted} > {step} and {*fitted} <= {*before} else output
        if not fitted or not {*fitted} <= {*before}:
            nodes = [*before][-self.skipped.steps.order - 1 :]
            factors = extrapolation([levels[node] for node in nodes], levels[step])
            fitted = dict(zip(nodes, factors, strict=True))
        return self._combined(fitted, before)

    def _computed(self, before: dict[int, list[Any]], step: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the denoiser's output, which is kept as long as later steps may need it."""
        output = self.plain(*args, **kwargs)
        self.skipped.computed += 1
        self._last = step
        leaves, self._returns = tree_flatten(output)
        before[step] = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if not self.skipped.factors and len(before) > self.skipped.steps.order + 1:
            del before[min(before)]
        return output

    def _combined(self, factors: Mapping[int, float], outputs: Mapping[int, list[Any]]) -> Any:
        """Return outputs of computed steps, each times its factor, added."""
        columns = zip(*(outputs[node] for node in factors), strict=True)
        return tree_unflatten([_sum(list(factors.values()), column) for column in columns], self._returns)

    @property
    def is_replayed(self) -> bool:
        return getattr(self.plain, "is_replayed", False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the forward that it stands for: a copy of the model computes every step."""
        return copy.deepcopy(self.plain, memo)

    def remove(self) -> None:
        """Take it out; where something has been put around it since, it stays and passes everything on."""
        self._on, self._outputs = False, {}
        super().remove()


def place_of(model: nn.Module) -> str:
    """Return the attribute that a call of the model runs: `compile()` puts one in front of `forward`."""
    return "forward" if model._compiled_call_impl is None else "_compiled_call_impl"


def skipped_in(model: nn.Module) -> SkippedCalls | None:
    """Return what skips steps of a denoiser, if anything does."""
    placed = vars(model).get(place_of(model))
    return placed if isinstance(placed, SkippedCalls) and placed._on else None


def _sum(factors: Sequence[float], values: Sequence[Any]) -> Any:
    last = values[-1]
    if not isinstance(last, Tensor) or not last.is_floating_point():
        return last
    wide = torch.promote_types(last.dtype, torch.float32)
    terms = [factor * value.to(wide) for factor, value in zip(factors, values, strict=True)]
    return functools.reduce(torch.add, terms).to(last.dtype)


def require_own(steps: StepList, scheduler: Any) -> None:
    """Raise ValueError for a list of another scheduler, or of another shift."""
    name, settings = type(scheduler).__name__, placing(scheduler)
    if name != steps.scheduler:
        raise ValueError(
            f"the list is of a {steps.scheduler}, and the pipeline has a {name}: make one with `fluxq steps`, or "
            "exchange the scheduler"
        )
    others = [key for key in {*settings, *steps.settings} if settings.get(key) != steps.settings.get(key)]
    if others:
        key = min(others)
        theirs, ours = steps.settings.get(key), settings.get(key)
        raise ValueError(
            f"the list is of a {name} with {key} {theirs}, and the pipeline's has {ours}: make one with `fluxq steps`, "
            "or set that"
        )


def _require_own_model(steps: StepList, pipe: Any) -> None:
    """Raise ValueError for a list of another model."""
    present = architectures(pipe)
    others = [name for name in {*present, *steps.models} if present.get(name) != steps.models.get(name)]
    if steps.models and others:
        raise ValueError(
            f"the list is of another model: its {min(others)} has another class or configuration; make one with "
            "`fluxq steps`"
        )


def architectures(pipe: Any) -> dict[str, str]:
    """Return component -> digest of class and configuration of each denoiser, the same for checkpoints of a model.

    Defaults of the class do not count: another version of it may have more of them.
    """
    digests = {}
    for name, outer in denoisers_in(pipe):
        model = uncompiled(outer)
        parameters = inspect.signature(type(model).__init__).parameters
        defaults = {key: _plain(each.default) for key, each in parameters.items()}
        config = {key: _plain(value) for key, value in model.config.items() if key[:1] != "_"}
        config = {key: value for key, value in config.items() if key not in defaults or value != defaults[key]}
        config.pop("quantization_config", None)
        digests[name] = sha256_json([type(model).__name__, config])
    return digests


def _plain(value: Any) -> Any:
    """Return a value of a configuration as JSON has it, which knows no tuples."""
    return json.loads(json.dumps(value, default=str))


def _require_one_level(model: nn.Module, timestep: Any) -> None:
    """Raise ValueError for timesteps of single tokens or frames."""
    if isinstance(timestep, Tensor) and timestep.ndim > 1 and timestep[0].numel() > 1:
        raise ValueError(
            f"this {type(model).__name__} is called with timesteps {(*timestep.shape,)}, one for each token: a list of "
            "steps is for calls of one noise level; remove() it"
        )


def require_free(outer: nn.Module) -> None:
    """Raise ValueError for a denoiser whose steps are skipped already, or with a step cache."""
    model = uncompiled(outer)
    if skipped_in(outer):
        raise ValueError(f"steps of this {type(model).__name__} are skipped already: remove() that first")
    _require_no_cache(model)
    if first_block_of(model) is not None:
        raise _cached(model)


def _require_no_cache(model: nn.Module) -> None:
    if getattr(model, "is_cache_enabled", False):
        raise _cached(model)


def _cached(model: nn.Module) -> ValueError:
    return ValueError(
        f"this {type(model).__name__} has a step cache, which would count steps that are not there: disable_cache(), "
        "or leave the list of steps out"
    )


def kept_in(pipe: Any, total: int) -> frozenset[int]:
    """Return the steps of a call of `total` that `keep_steps` keeps in a pipeline."""
    kept = (kept_steps_of(outer) for _, outer in denoisers_in(pipe))
    return frozenset[int]().union(*(each.kept_of(total) for each in kept if each is not None))
