"""Modules and functions in the place of a pipeline's own, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fluxq.calibrate.capture import Item, final_latents

L = TypeVar("L", bound=nn.Module)
T = TypeVar("T")
Layers = Callable[[str, str], Mapping[str, Any]]  # (unit, option) -> module "component.path" -> another in its place


@dataclass(frozen=True)
class Menu:
    """Choice of modules in the place of others of a pipeline, unit by unit.

    units: unit -> its layers "component.path", which change together; or its attention module.
    options: unit -> the options that it has, 16 bit not among them.
    layers: function that makes the modules of a unit's option, a QuantLinear for each layer.
    once: units of models that run once per image, before the others.
    """

    units: Mapping[str, tuple[str, ...]]
    options: Mapping[str, tuple[str, ...]]
    layers: Layers
    once: tuple[str, ...] = ()

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the models that run at every step and have layers of any unit."""
        names = [name for unit, names in self.units.items() if unit not in self.once for name in names]
        return tuple(dict.fromkeys(name.partition(".")[0] for name in names))


def module_of(pipe: Any, name: str) -> Any:
    """Return the module `component.path` of a pipeline."""
    component, _, path = name.partition(".")
    return getattr(pipe, component).get_submodule(path)


@contextmanager
def replaced(pipe: Any, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put other modules into a pipeline for a while, on the devices of those that they replace."""
    originals = {name: module_of(pipe, name) for name in layers}
    with ExitStack() as stack:
        for name, layer in layers.items():
            component, _, path = name.partition(".")
            device = next(originals[name].parameters()).device
            model = getattr(pipe, component)
            stack.callback(model.set_submodule, path, originals[name])
            model.set_submodule(path, stack.enter_context(moved(layer, device)))
        yield


def changes_of_runs(
    pipe: Any, menu: Menu, pairs: Sequence[tuple[str, str]], items: Sequence[Item], call: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield (unit, option) -> what it changes of the final latents of a few images, fp64 on the CPU, run by run."""

    @torch.no_grad()
    def latents() -> Tensor:
        return torch.cat([image.flatten() for image in final_latents(pipe, items, call, batch_size=1)])

    plain = latents() if pairs else torch.empty(0)
    for unit, option in pairs:
        with replaced(pipe, menu.layers(unit, option)):
            yield (unit, option), latents() - plain


class MadeAnew(nn.Module):
    """A layer made of the plain one's weights each time that it runs, where these come and go; it holds none itself.

    make: function that makes it while the weights are there.
    """

    def __init__(self, plain: nn.Linear | nn.Conv2d, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._plain, self.make = (plain,), make  # no submodule: its weights come by its own hooks

    def forward(self, x: Tensor) -> Tensor:
        return with_weights(*self._plain, lambda: self.make()(x))

    @property
    def weight(self) -> Tensor:
        return self._plain[0].weight

    @property
    def bias(self) -> Tensor | None:
        return self._plain[0].bias


def with_weights(module: nn.Module, do: Callable[[], T]) -> T:
    """Return what a function returns that is called while a module has its weights, wherever they wait otherwise."""
    with replaced_forwards({module: do}):
        return module()


@contextmanager
def moved(layer: L, device: torch.device) -> Iterator[L]:
    """Move a module to another device for a while; not one that is there, or whose weights come by themselves."""
    homes = {parameter.device for parameter in layer.parameters()}  # none of a MadeAnew
    if homes <= {device} or torch.device("meta") in homes:
        yield layer
        return
    try:
        yield layer.to(device)
    finally:
        layer.to(next(iter(homes)))


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace `forward` of each module meanwhile; that of an instance (hooks of accelerate set one) is put back."""
    instance_forwards = {module: module.__dict__["forward"] for module in forwards if "forward" in module.__dict__}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]
            if module in instance_forwards:
                module.__dict__["forward"] = instance_forwards[module]
