"""Models of a pipeline, and base classes of things that are put into one for a while, and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn

from fluxq.base.modules import uncompiled


def models_of(pipe: Any) -> dict[str, nn.Module]:
    """Return component's name, empty for a model by itself -> model, without what torch.compile puts around it."""
    return {name: uncompiled(part) for name, part in called_of(pipe).items()}


def called_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the same names -> what is called, in which torch.compile may have put the model."""
    parts = {"": pipe} if isinstance(pipe, nn.Module) else pipe.components
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def is_offloaded(model: nn.Module) -> bool:
    """Tell whether accelerate or diffusers moves a model's weights: as a whole, by layer or in groups."""
    return is_grouped(model) or any(hasattr(module, "_hf_hook") for module in model.modules())


def is_grouped(model: nn.Module) -> bool:
    """Tell whether diffusers moves a model's weights in groups."""
    return any("group_offloading" in name for module in model.modules() for name in diffusers_hooks(module))


def diffusers_hooks(module: nn.Module) -> dict[str, Any]:
    """Return the hooks of diffusers that a module has, by their names."""
    return getattr(getattr(module, "_diffusers_hook", None), "hooks", {})


def target_device(present: torch.device, device: str | torch.device | None) -> torch.device:
    """Return the device that will compute: as it was asked for, else the present one, or of the CPU the first GPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", 0) if present.type in ("cpu", "meta") and torch.cuda.is_available() else present


class Handle:
    """Handle of something put into a pipeline: `remove()`, or leaving its `with` block, takes it out."""

    _put: Sequence[Any]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Let the models be as they were, and give memory back."""
        for each in self._put:
            each.remove()


class Placed:
    """A callable put in the place of a module's own. place: the attribute that a call of the module runs."""

    def __init__(self, module: nn.Module, place: str = "forward") -> None:
        self.module, self.place = module, place
        self.plain: Callable[..., Any] = getattr(module, place)
        self.had_own = place in vars(module)  # hooks of accelerate and diffusers are placed like this too
        vars(module)[place] = self

    def remove(self) -> None:
        """Take it out; where something has been put around it since, it stays and passes everything on."""
        if vars(self.module).get(self.place) is not self:
            return
        if self.had_own:
            vars(self.module)[self.place] = self.plain
        else:
            del vars(self.module)[self.place]
