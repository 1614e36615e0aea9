"""Noise levels: the effect of an error of the transformer at each of them on the final latent.

    W_t = ‖latent(v + e at step t) − latent(v)‖² / ‖e‖²        e: Gaussian noise, 10 % of the transformer's output v

so that Σ W_t ‖δ_t‖² estimates the error of the final latent for errors δ_t of the outputs, and Σ w_t x xᵀ over the
tokens x of step t, with weights w_t ∝ W_t of mean 1, weighs a layer's error as the final latent does. Measured on a few
images. Steps before t are as in the undisturbed run, and its outputs are used again.

10 % is about what four bits cost, and on the embedded pipeline in fp32 it gives the weights that 1 % gives. In
bfloat16 an error of 1 % drowns in the rounding of the latents: weights come out up to ten times too large, and in
another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.console import progress
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.capture import Item, final_latents
from fluxq.calibrate.stand_ins import replaced_forwards

IMAGES = 4
_RELATIVE_NOISE = 0.1
_SEED = 5
_SMALLEST = 1e-3  # of the mean: a step never counts for nothing


def noise_level_weights(
    pipe: Any,
    components: Sequence[str],
    items: Sequence[Item],
    call: Mapping[str, Any],
    steps: Sequence[int],
    ranks: Ranks = ALONE,
) -> dict[int, float]:
    """Return the weight of each of `steps`, positive, mean 1: its effect by the mean of all.

    Arguments and errors are those of `noise_level_effects`.
    """
    measured = noise_level_effects(pipe, components, items, call, steps, ranks)
    effects = torch.tensor(list(measured.values()), dtype=torch.float64)
    weights = torch.maximum(effects, _SMALLEST * effects.mean())
    return dict(zip(steps, (weights / weights.mean()).tolist(), strict=True))


@torch.no_grad()
def noise_level_effects(
    pipe: Any,
    components: Sequence[str],
    items: Sequence[Item],
    call: Mapping[str, Any],
    steps: Sequence[int],
    ranks: Ranks = ALONE,
) -> dict[int, float]:
    """Return W_t of each of `steps`: the squared change of the final latents by the squared norm of the noise.

    ValueError if the final latents are not finite, or if no transformer is called at a step.

    components: the transformers.
    items: `IMAGES` of them are enough.
    ranks: processes that take a part of the steps each.
    """
    models = [getattr(pipe, component) for component in components]
    plain = _Run()
    undisturbed = _latents(pipe, models, items, call, plain)
    require_finite(undisturbed)
    effects = torch.zeros(len(steps), dtype=torch.float64)
    for at in progress(ranks.share(range(len(steps))), "Weighing noise levels"):
        step = steps[at]
        disturbed = _Run(step, plain.outputs)
        change = (_latents(pipe, models, items, call, disturbed) - undisturbed).square().sum()
        if not disturbed.noise > 0:
            raise ValueError(f"step {step}: no call of {', '.join(components)}, or only zeros come out of it")
        effects[at] = change / disturbed.noise
    effects = ranks.sum(effects)
    require_finite(effects)
    return dict(zip(steps, effects.tolist(), strict=True))


def require_finite(latents: Tensor) -> None:
    """Raise ValueError for final latents, or what was computed from them, that are not finite."""
    if not torch.isfinite(latents).all():
        raise ValueError("the latents of the 16-bit model hold NaN or infinity; choose another --dtype")


class _Run:
    """One run of the pipeline, with noise added at one output.

    disturbed: index of that output.
    undisturbed: outputs of the run without noise, used again up to `disturbed`.
    outputs: of the transformers, in the order of their calls.
    noise: squared norm of the added noise.
    """

    def __init__(self, disturbed: int | None = None, undisturbed: Sequence[Any] = ()) -> None:
        self.disturbed, self.undisturbed = disturbed, undisturbed
        self.step = self.calls = 0
        self.outputs: list[Any] = []
        self.noise = torch.zeros((), dtype=torch.float64)

    def at_step(self, step: int) -> None:
        self.step = step

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward for the place of a transformer's own."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            at = self.calls
            self.calls += 1
            if self.disturbed is None:
                output = original(*args, **kwargs)
                self.outputs.append(_each_tensor(output, Tensor.clone))
                return output
            if self.step > self.disturbed:
                return original(*args, **kwargs)
            if self.step < self.disturbed:
                return _each_tensor(self.undisturbed[at], Tensor.clone)
            random = torch.Generator().manual_seed(_SEED + at)
            return _each_tensor(self.undisturbed[at], lambda v: self._disturbed(v, random))

        return forward

    def _disturbed(self, v: Tensor, random: torch.Generator) -> Tensor:
        noise = torch.randn(v.shape, generator=random, dtype=torch.float32) * _RELATIVE_NOISE
        changed = (v.float() + noise.to(v.device) * v.float().square().mean().sqrt()).to(v.dtype)
        self.noise += (changed.float() - v.float()).square().sum().cpu()
        return changed


def _latents(
    pipe: Any, models: Sequence[nn.Module], items: Sequence[Item], call: Mapping[str, Any], run: _Run
) -> Tensor:
    """Return the final latents of the run, one after the other."""
    with replaced_forwards({model: run.around(model.forward) for model in models}):
        latents = final_latents(pipe, items, call, on_step=run.at_step)
    return torch.cat([image.flatten() for image in latents])


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a transformer's output with every tensor changed: a tuple, a list, or one of diffusers' outputs."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)(**{key: _each_tensor(item, change) for key, item in value.items()})
    return type(value)(_each_tensor(item, change) for item in value)
