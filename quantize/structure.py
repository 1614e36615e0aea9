"""The structure of a component or of a model in memory: its Linears, convolutions and attention, and its family.

Only denoisers may go without a row for their class: those that are defined in diffusers' transformers and UNets. A text
encoder or VAE without a row stays in 16 bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fluxq.base.model import ModelFolder
from fluxq.base.modules import uncompiled, uncompiled_path
from fluxq.kernels.linear import is_linear, linear_size, linears_of
from fluxq.quantize.checkpoint import library_of, model_class_of, model_on_meta
from fluxq.recipes.all_families import BY_CLASS, family_of
from fluxq.recipes.computing import Attention, Attentions, attention_by, gathered
from fluxq.recipes.family import Family, matches
from fluxq.recipes.generic import ModuleTree
from fluxq.recipes.plan import LinearShape
from fluxq.recipes.workloads import Convolution

_DENOISERS = ("diffusers.models.transformers.", "diffusers.models.unets.")
_families: WeakKeyDictionary[nn.Module, Family] = WeakKeyDictionary()  # of classes without a row


def list_linears(folder: ModelFolder, component: str) -> list[LinearShape]:
    """List every Linear of a component in the model's order, from its configuration: no weights are read."""
    return shapes_of(model_on_meta(folder, component))


def shapes_of(model: nn.Module) -> list[LinearShape]:
    """List every Linear of a model in its order, 1x1 convolutions included."""
    return [
        LinearShape(name, *linear_size(module), getattr(module, "bias", None) is not None)
        for name, module in linears_of(model).items()
    ]


def convolutions_of(model: nn.Module) -> tuple[Convolution, ...]:
    """List every convolution of a model that is no Linear, in its order, for `forward_pass`."""
    convolutions = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and not is_linear(m)]
    return tuple(
        Convolution(
            name,
            m.out_channels,
            m.in_channels // m.groups * prod(m.kernel_size),
            m.in_channels,
            stride=m.stride[0],
            depthwise=m.groups == m.in_channels,
        )
        for name, m in convolutions
    )


def tree_of(model: nn.Module) -> ModuleTree:
    """Return a model's module tree without weights; it may be on the meta device."""
    return ModuleTree({name: type(module).__name__ for name, module in model.named_modules()}, tuple(shapes_of(model)))


def model_family(model: nn.Module) -> Family:
    """Return the family of a model in memory; ValueError for an unknown one, or one too hard to tell."""
    model_class = type(model)
    if model_class.__name__ in BY_CLASS or not _is_denoiser(model_class):
        return family_of(model_class.__name__)
    if model not in _families:
        _families[model] = family_of(model_class.__name__, tree_of(model))
    return _families[model]


def attention_of(model: nn.Module) -> Attentions:
    """Return the arithmetic of a model's self-attention, by the backends of its processors."""
    family = BY_CLASS.get(type(uncompiled(model)).__name__)
    rows = family.self_attention if family and family.self_attention else ("**",)
    words: dict[str, Attention] = {}
    for name, module in model.named_modules():
        processor, path = getattr(module, "processor", None), uncompiled_path(name)
        if hasattr(processor, "_attention_backend") and any(matches(row, path) for row in rows):
            words[path] = attention_by(processor) or "16bit"
    return gathered(words)


def component_family(folder: ModelFolder, component: str) -> Family:
    """Return the family of a component on disk; ValueError for an unknown one, or one too hard to tell."""
    class_name = folder.components[component]
    if class_name in BY_CLASS or not _is_denoiser(model_class_of(library_of(folder, component), class_name)):
        return family_of(class_name)
    return family_of(class_name, tree_of(model_on_meta(folder, component)))


def denoisers_of(folder: ModelFolder) -> tuple[str, ...]:
    """List the components that a pipeline calls at every step: by a row for transformers, else by class and name."""
    kinds = {name: family.kind for name, family in BY_CLASS.items()}
    return tuple(
        name
        for name, class_name in folder.components.items()
        if kinds.get(class_name) == "transformer" or (class_name not in kinds and _is_called_denoiser(folder, name))
    )


def denoisers_in(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield component -> module that a pipeline calls at its steps."""
    parts = {} if isinstance(pipe, nn.Module) else getattr(pipe, "components", {})
    for name, part in parts.items():
        if isinstance(part, nn.Module) and has_name_of_denoiser(name):
            yield name, part


def _is_called_denoiser(folder: ModelFolder, component: str) -> bool:
    if not has_name_of_denoiser(component):
        return False
    try:
        return _is_denoiser(model_class_of(library_of(folder, component), folder.components[component]))
    except ValueError:
        return False


def has_name_of_denoiser(component: str) -> bool:
    """Tell whether pipelines call their denoisers so."""
    return component == "unet" or component.startswith("transformer")


def _is_denoiser(model_class: type) -> bool:
    return model_class.__module__.startswith(_DENOISERS)
