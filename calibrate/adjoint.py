"""Errors of options by the adjoint: what a small change of each layer's output does to the final latents z.

Let each layer of unit u, a Linear or an attention, return y + Σ_o ε[u, o] δ_o, where δ_o = y_o − y and y_o is what
option o makes of the layer's input x in place of y. To first order the latents with option o in unit u alone are
z + ∂z/∂ε[u, o], and

    R_p[u, o] = ∂⟨r_p, z⟩ / ∂ε[u, o] = Σ ⟨∂⟨r_p, z⟩/∂y, δ_o⟩      over tokens, the unit's layers, calls and steps
    E_p R_p² = ‖∂z/∂ε[u, o]‖²                                   with Gaussian probes r_p ~ N(0, I)

One backward pass through the whole trajectory gives R_p of all units and options. The pipeline's own code is
differentiated, so there is no formula here of a scheduler, of guidance or of what lies between them. All probes of an
image go through together: what is computed again on the way, and every δ_o, is computed once for all of them.

Only ε has a gradient. Of the forward pass the arguments of the transformers' calls are kept; each call, and within it
each block of models that can, is run again when the gradient comes to it. So one block's graph is there at a time.

Models that run once per image, as text encoders do, are no part of that graph: R_p = ⟨r_p, z' − z⟩, where z' is of a
run with the option, and the probes are the same, so that its errors add up or cancel with those of all else.

From P probes of I images the estimate of an error has a relative standard deviation of about √(2 / PI), an eighth
with 8 images. Errors of options and units share the probes, so that they are compared better than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from fluxq.base.console import first_line
from fluxq.base.residence import device_of
from fluxq.calibrate import nested
from fluxq.calibrate.capture import Item, Sampling, noise_levels, number_of_steps, run_pipeline
from fluxq.calibrate.sensitivity import require_finite
from fluxq.calibrate.stand_ins import Menu, changes_of_runs, module_of, moved, replaced_forwards, with_weights

PROBES = 16  # of each image: 16 take an eighth longer than 8, and twice the memory of a block's gradients
_SEED = 11
_INSTEAD = "measure the errors by velocity instead (--measure velocity)"


class AdjointErrors:
    """Residuals of all units and options, a part for each image. options: those of any unit, as in the table."""

    def __init__(
        self, pipe: Any, menu: Menu, options: Sequence[str], items: Sequence[Item], sampling: Sampling
    ) -> None:
        self.pipe, self.menu, self.options, self.items, self.call = pipe, menu, options, items, sampling.call
        self.parts = len(items)
        self.steps = tuple(range(number_of_steps(pipe, sampling.call)))

    def part(self, index: int) -> dict[str, Tensor]:
        """Return the residuals R_p of one image, (units, options, PROBES) fp64, and ‖z‖²."""
        device = device_of(getattr(self.pipe, self.menu.components[0]))
        counts = [len(self.menu.options.get(u, ())) if u not in self.menu.once else 0 for u in self.menu.units]
        leaves = [torch.zeros(n, dtype=_wide(device), device=device, requires_grad=True) for n in counts]
        with _differentiable(self.pipe, self.menu), self._options_in_place(leaves):
            latents = self._latents(self.items[index])
            probes = _probes(latents, index)
            gradients = _gradients(latents, leaves, probes)
        residuals = torch.full((len(leaves), len(self.options), PROBES), math.inf, dtype=torch.float64)
        for row, unit, gradient in zip(residuals, self.menu.units, gradients, strict=True):
            for option, values in zip(self.menu.options.get(unit, ()), gradient.T, strict=unit not in self.menu.once):
                row[self.options.index(option)] = torch.where(values.isfinite(), values, math.inf)
        for (unit, option), values in self._by_runs(self.items[index], probes).items():
            place = list(self.menu.units).index(unit), self.options.index(option)
            residuals[place] = torch.where(values.isfinite(), values, math.inf)
        sigmas = torch.tensor(noise_levels(self.pipe)[: len(self.steps)], dtype=torch.float64)
        return {"residuals": residuals, "signal": latents.detach().cpu().double().square().sum(), "sigmas": sigmas}

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the errors, and residuals (units, options, images · PROBES) whose mean square they are."""
        signal = torch.stack([part["signal"] for part in parts]).mean()
        residuals = torch.cat([part["residuals"] for part in parts], dim=-1) / signal.sqrt()
        return residuals.square().mean(-1), residuals

    @contextmanager
    def _options_in_place(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Have every layer of a unit return y + Σ ε δ, of which only the derivative by ε is not trivial: ε is 0."""
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        with ExitStack() as stack:
            for (unit, names), leaf in zip(self.menu.units.items(), leaves, strict=True):
                for name in names if len(leaf) else ():
                    module = module_of(self.pipe, name)
                    layers = [stack.enter_context(moved(option[name], leaf.device)) for option in self._layers[unit]]
                    forwards[module] = _with_options(module.forward, layers, leaf)
            stack.enter_context(replaced_forwards(forwards))
            yield

    @cached_property
    def _layers(self) -> dict[str, list[Mapping[str, Any]]]:
        """Unit -> for each of its options the modules in the place of its layers."""
        options = self.menu.options
        units = [unit for unit in self.menu.units if unit not in self.menu.once]
        return {u: [self.menu.layers(u, option) for option in options.get(u, ())] for u in units}

    def _by_runs(self, item: Item, probes: Tensor) -> dict[tuple[str, str], Tensor]:
        """Return ⟨r_p, z' − z⟩, (PROBES,), of each option of units that no step depends on: z' is of a run with it."""
        pairs = [(unit, option) for unit in self.menu.once for option in self.menu.options.get(unit, ())]
        return {
            pair: probes.cpu().double().flatten(1) @ change
            for pair, change in changes_of_runs(self.pipe, self.menu, pairs, [item], self.call)
        }

    def _latents(self, item: Item) -> Tensor:
        """Return the final latents of one image, with the graph of how they came to be."""
        with _calls_run_again(self.pipe, self.menu) as at_step:
            run = run_pipeline(self.pipe, [item], self.call, batch_size=1, on_step=at_step, is_differentiable=True)
            ((_, latents),) = run
        if not latents.requires_grad:
            raise ValueError(f"the final latents have no gradient of what the model returns; {_INSTEAD}")
        require_finite(latents.detach())
        return latents


def _with_options(forward: Callable[..., Any], layers: Sequence[nn.Module], leaf: Tensor) -> Callable[..., Any]:
    """Return a forward that has the gradient of y + Σ ε δ by `leaf`, which is ε; y may be several tensors."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        returned = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return returned
        y, form = tree_flatten(returned)
        x, call = tree_flatten((args, kwargs))
        return tree_unflatten(_Options.apply(leaf, layers, call, len(y), *y, *x), form)

    return changed


class _Options(torch.autograd.Function):
    """(ε = 0, y, x) -> y + Σ_o ε_o (y_o − y). y and x: tensors returned, and the leaves of the arguments."""

    generate_vmap_rule = True  # it runs again within a gradient of several probes, which are no axis of its arguments

    @staticmethod
    def forward(leaf: Tensor, layers: Sequence[nn.Module], call: TreeSpec, count: int, *values: Any) -> Any:
        return tuple(y.clone() for y in values[:count])  # which models may write into

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.leaf, ctx.layers, ctx.call, ctx.count, *values = inputs
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in values))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = [other if tensor is None else tensor for tensor, other in saved]
        args, kwargs = tree_unflatten(values[ctx.count :], ctx.call)
        products = []
        for layer in ctx.layers:
            changes = zip(tree_leaves(layer(*args, **kwargs)), values[: ctx.count], gradients, strict=True)
            of_each = [((new.float() - y.float()) * g.float()).sum(dtype=ctx.leaf.dtype) for new, y, g in changes]
            products.append(torch.stack(of_each).sum())
        return torch.stack(products), None, None, None, *gradients, *(None for _ in values[ctx.count :])


def _probes(latents: Tensor, image: int) -> Tensor:
    """Return r_p, (PROBES, *latents)."""
    random = torch.Generator().manual_seed(_SEED + image)
    return torch.randn((PROBES, *latents.shape), generator=random).to(latents)


def _gradients(latents: Tensor, leaves: Sequence[Tensor], probes: Tensor) -> list[Tensor]:
    """Return ∂⟨r_p, z⟩/∂ε of each leaf, (PROBES, options) fp64 on the CPU; 0 for what does not reach the latents."""
    try:
        gradients = torch.autograd.grad(latents, leaves, probes, allow_unused=True, is_grads_batched=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"the gradient of the final latents cannot be computed ({first_line(error)}); {_INSTEAD}"
        ) from error
    zeros = torch.zeros(len(probes), 1, dtype=torch.float64)
    wide = [
        zeros.expand(-1, len(leaf)) if gradient is None else gradient.cpu().double()
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    if not any(bool(gradient.any()) for gradient in wide):
        raise ValueError(f"no layer has a gradient of the final latents other than zero; {_INSTEAD}")
    return wide


@contextmanager
def _differentiable(pipe: Any, menu: Menu) -> Iterator[None]:
    """Compute with gradients, none of them of parameters; run calls, and blocks of models that can, again."""
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    models = [getattr(pipe, name) for name in menu.components]
    parameters = [p for part in {*parts, *models} for p in part.parameters() if p.requires_grad]
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for parameter in parameters:
            stack.callback(parameter.requires_grad_, True)
            parameter.requires_grad_(False)
        for model in models:
            stack.enter_context(_blocks_run_again(model))
        yield


@contextmanager
def _blocks_run_again(model: nn.Module) -> Iterator[None]:
    """Switch on gradient checkpointing, of a model that has it, as it was not before."""
    if not runs_blocks_again(model):
        yield
        return
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    before = [(module, {n: v for n, v in vars(module).items() if n in names}) for module in model.modules()]
    model.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    try:
        yield
    finally:
        for module, values in before:
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(values)


def runs_blocks_again(model: nn.Module | type[nn.Module]) -> bool:
    """Tell whether a model, or one of a class, keeps the graph of a single block at a time; others of a whole call."""
    return getattr(model, "_supports_gradient_checkpointing", False)


@contextmanager
def _calls_run_again(pipe: Any, menu: Menu) -> Iterator[Callable[[int], None]]:
    """Run each call of a transformer again for its gradient; ValueError where one does not depend on those before it.

    Yields a function to tell of steps.
    """
    step, first = 0, math.inf

    def at_step(now: int) -> None:
        nonlocal step
        step = now

    def again(component: str, model: nn.Module) -> Callable[..., Any]:
        forward = model.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            first = min(first, step)
            if step > first and not any(tensor.requires_grad for tensor in nested.tensors_in([args, kwargs])):
                raise ValueError(
                    f"{component}: its input at step {step} has no gradient of what was returned before, because the "
                    f"pipeline, its scheduler or the model detaches a tensor; {_INSTEAD}"
                )
            return checkpoint(with_weights, model, partial(forward, *args, **kwargs), use_reentrant=False)

        return call

    models = {name: getattr(pipe, name) for name in menu.components}
    with replaced_forwards({model: again(name, model) for name, model in models.items()}):
        yield at_step


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which has no float64
