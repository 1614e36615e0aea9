"""Errors of options by the velocity: quantize a unit alone, and compare what the transformer returns.

    d[u, o] = ‖Σ_t n_t √W_t (v_t(u, o) − v_t)‖² / Σ ‖latents‖²

Every call sees the arguments that it had in the 16-bit run. W_t is the effect of an error at step t on the final
latents (sensitivity.py), n_t the number of steps that step t stands for: where not all are looked at, each of the
others counts to the nearest of those. Steps are summed before squaring, because a unit errs alike at each of them: on
the embedded pipeline the sum of squares, Σ n_t W_t ‖·‖², comes out a third smaller and orders units less well. Calls of
one step, as of guidance, are squared one by one.

W_t was measured with noise that knows nothing of the image, so d is nearer the true error in order than in size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fluxq.calibrate import nested
from fluxq.calibrate.capture import Item, Sampling, noise_levels, number_of_steps, run_pipeline, spread
from fluxq.calibrate.sensitivity import IMAGES, noise_level_effects, require_finite
from fluxq.calibrate.stand_ins import Menu, changes_of_runs, replaced, replaced_forwards


class VelocityErrors:
    """Errors of all units, a part for each of them. options: those of any unit, in the order of the table."""

    def __init__(
        self, pipe: Any, menu: Menu, options: Sequence[str], items: Sequence[Item], sampling: Sampling
    ) -> None:
        self.pipe, self.menu, self.options, self.items, self.sampling = pipe, menu, options, items, sampling
        self.units = list(menu.units)
        self.parts = len(self.units)
        self.total = number_of_steps(pipe, sampling.call)
        self.steps = spread(sampling.steps, self.total)

    @torch.no_grad()
    def part(self, index: int) -> dict[str, Tensor]:
        """Return the errors of one unit's options, (options,) fp64."""
        unit, run, weights = self.units[index], self._run, self._weights  # before any layer is replaced
        error = torch.full((len(self.options),), math.inf, dtype=torch.float64)
        options = self.menu.options.get(unit, ())
        pairs = [(unit, option) for option in options] if unit in self.menu.once else []
        runs = changes_of_runs(self.pipe, self.menu, pairs, self.items, self.sampling.call)
        for (_, option), change in runs:
            square = float(change.square().sum())
            if math.isfinite(square):
                error[self.options.index(option)] = square / run.signal
        for option in options if unit not in self.menu.once else ():
            with replaced(self.pipe, self.menu.layers(unit, option)):
                change = run.change(weights)
            if math.isfinite(change):
                error[self.options.index(option)] = change / run.signal
        return {"error": error, "sigmas": torch.tensor(run.sigmas, dtype=torch.float64)}

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, None]:
        """Return the errors of all units, (units, options)."""
        return torch.stack([part["error"] for part in parts]), None

    @cached_property
    def _run(self) -> _Run:
        return _recorded(self.pipe, self.menu.components, self.items, self.sampling, self.steps)

    @cached_property
    def _weights(self) -> dict[int, float]:
        """Step -> what an error at it is multiplied by in the final latents, for all steps that it stands for."""
        steps = sorted({call.step for call in self._run.calls})
        nearest = Counter(min(steps, key=lambda seen: abs(seen - step)) for step in range(self.total))
        effects = noise_level_effects(self.pipe, self.menu.components, self.items[:IMAGES], self.sampling.call, steps)
        return {step: nearest[step] * math.sqrt(effect) for step, effect in effects.items()}


@dataclass(frozen=True)
class _Call:
    """A call of a transformer, and the floating-point tensors among its outputs.

    place: number of the batch, and of the call among those of its step.
    """

    model: nn.Module
    step: int
    place: tuple[int, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]

    def errors(self) -> list[Tensor]:
        """Return the difference that the model, as it is now, makes to each output, fp64 where the device has it."""
        args, kwargs = _copied((self.args, self.kwargs))
        outputs = _velocities(self.model(*args, **kwargs))
        return [_wide(new) - _wide(old) for new, old in zip(outputs, self.outputs, strict=True)]


@dataclass(frozen=True)
class _Run:
    """The calls at the steps looked at, Σ ‖final latents‖², and the noise levels of the steps."""

    calls: list[_Call]
    signal: float
    sigmas: tuple[float, ...]

    def change(self, weights: Mapping[int, float]) -> float:
        """Return the estimated squared change of the final latents by the models as they are now. weights: of steps."""
        sums: dict[tuple[int, ...], Tensor] = {}
        for call in self.calls:
            for index, error in enumerate(call.errors()):
                place = (*call.place, index, *error.shape)
                sums[place] = sums.get(place, 0.0) + weights[call.step] * error
        return math.fsum(float(total.square().sum()) for total in sums.values())


def _recorded(
    pipe: Any, components: Sequence[str], items: Sequence[Item], sampling: Sampling, steps: Sequence[int]
) -> _Run:
    """Run the pipeline and keep what its transformers are given and return, in memory."""
    calls: list[_Call] = []
    now = {"batch": -1, "step": 0, "call": 0}

    def at_step(step: int) -> None:
        now.update(batch=now["batch"] + (step == 0), step=step, call=0)

    def recording(model: nn.Module, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if now["step"] not in steps:
                return original(*args, **kwargs)
            kept_args, kept_kwargs = _copied((args, kwargs))
            output = original(*args, **kwargs)
            place = (now["batch"], now["call"])
            calls.append(_Call(model, now["step"], place, kept_args, kept_kwargs, _copied(_velocities(output))))
            now["call"] += 1
            return output

        return forward

    models: list[nn.Module] = [getattr(pipe, component) for component in components]
    signal, sigmas = 0.0, ()
    with replaced_forwards({model: recording(model, model.forward) for model in models}):
        for _, latents in run_pipeline(pipe, items, sampling.call, batch_size=sampling.batch_size, on_step=at_step):
            require_finite(latents)
            signal += float(_wide(latents).square().sum())
            sigmas = sigmas or tuple(noise_levels(pipe)[step] for step in steps)
    if not calls:
        raise ValueError(f"{', '.join(components)}: not called at the steps looked at; look at more steps")
    return _Run(calls, signal, sigmas)


def _copied(value: Any) -> Any:
    """Return arguments with copies of their tensors: pipelines and models may write into theirs."""
    return tree_map_only(Tensor, Tensor.clone, value)


def _velocities(output: Any) -> list[Tensor]:
    return [tensor for tensor in nested.tensors_in(output) if tensor.is_floating_point()]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()  # which has no float64
