"""The part of a pipeline that runs at every step: find it, listen to it, read and replace its prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from fluxq.quantize.structure import denoisers_in


def denoisers(pipe: Any) -> dict[str, nn.Module]:
    """Return the models that a pipeline calls at each step, by component: a transformer, two by noise level, or a UNet.

    ValueError if it has none.
    """
    models = dict(denoisers_in(pipe))
    if not models:
        raise ValueError(f"{type(pipe).__name__} has no transformer: its components are {', '.join(pipe.components)}")
    return models


@contextmanager
def hooked(
    models: Iterable[nn.Module], *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Register forward hooks, without keyword arguments, on modules for a while."""
    with ExitStack() as stack:
        for model in models:
            if before:
                stack.callback(model.register_forward_pre_hook(before).remove)
            if after:
                stack.callback(model.register_forward_hook(after).remove)
        yield


def prediction(output: Any, model: nn.Module) -> Tensor:
    """Return a diffusers model's prediction: the first of a tuple or `ModelOutput`. ValueError for anything else."""
    first = output if isinstance(output, Tensor) else output[0]
    if not isinstance(first, Tensor):
        raise ValueError(f"{type(model).__name__} returned a {type(first).__name__}, expected a tensor")
    return first


def with_prediction(output: Any, tensor: Tensor) -> Any:
    """Return the same output with another prediction."""
    if isinstance(output, Tensor):
        return tensor
    if isinstance(output, tuple):
        return (tensor, *output[1:])
    return type(output)(**{**output, next(iter(output)): tensor})
