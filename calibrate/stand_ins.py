"""Modules and functions in the place of a pipeline's own, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

L = TypeVar("L", bound=nn.Module)
Layers = Callable[[str, str], Mapping[str, Any]]  # (unit, option) -> module "component.path" -> another in its place


@dataclass(frozen=True)
class Menu:
    """Choice of modules in the place of others of a pipeline, unit by unit.

    units: unit -> its layers "component.path", which change together; or its attention module.
    options: unit -> the options that it has, 16 bit not among them.
    layers: function that makes the modules of a unit's option, a QuantLinear for each layer.
    """

    units: Mapping[str, tuple[str, ...]]
    options: Mapping[str, tuple[str, ...]]
    layers: Layers

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the models with layers of any unit."""
        return tuple(dict.fromkeys(name.partition(".")[0] for names in self.units.values() for name in names))


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


@contextmanager
def moved(layer: L, device: torch.device) -> Iterator[L]:
    """Move a module to another device for a while."""
    home = next(layer.parameters()).device
    try:
        yield layer.to(device)
    finally:
        layer.to(home)


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
