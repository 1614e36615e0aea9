"""Facts that `fluxq env` prints and a bug report needs: versions, devices, and what computes each scheme on them.

It is pasted into public reports: no paths, host or user names, and no value that could be a secret.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils import collect_env

import fluxq
from fluxq.base.devices import cpu_name, instructions, package_version
from fluxq.base.extras import NEWER, missing_of_all, too_old_for
from fluxq.kernels.ops import implementation
from fluxq.recipes.formats import Scheme
from fluxq.recipes.recipe import Component, Recipe, load_recipe, shipped_recipes

_PACKAGES = ("triton", "diffusers", "transformers", "accelerate", "peft", "safetensors")
_VARIABLES = ("HF_HUB_OFFLINE", "HF_ENABLE_PARALLEL_LOADING", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")
_SHORT_VALUE = re.compile(r"[\w.,:-]{0,16}")  # switches and lists of devices; paths and tokens are longer


def environment() -> dict[str, Any]:
    """Return the report as JSON: `versions`, `driver`, `devices`, `implementations`, `variables` and `lacking`.

    driver: None without an NVIDIA driver.
    implementations: a row for each scheme of the shipped recipes and kind of device, with the implementation that 4096
        tokens run on before `fluxq.prepare`.
    variables: environment variables that are set and change fluxq's behaviour.
    lacking: sentences, each with its cure, about packages of the extra `all` that are not installed, and libraries
        that are too old for a feature.
    """
    devices = _devices()
    return {
        "versions": _versions(),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        "devices": devices,
        "implementations": _implementations(dict.fromkeys((device["type"], device["chip"]) for device in devices)),
        "variables": _variables(),
        "lacking": [*filter(None, (missing_of_all(), *map(too_old_for, NEWER)))],
    }


def _versions() -> dict[str, str]:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    return {
        "fluxq": fluxq.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "torch": torch.__version__,
        "torch built for": built_for if torch.version.cuda or torch.version.hip else "CPU",
        **{name: package_version(name) for name in _PACKAGES},
    }


def _devices() -> list[dict[str, Any]]:
    """Return the processor and every accelerator that torch can use."""
    devices = [_device("cpu", "cpu", cpu_name(), None, f"{os.cpu_count()} cores, {instructions()}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        chip = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:
            capability = properties.gcnArchName
            chip = capability.partition(":")[0]
        devices.append(_device("cuda", f"cuda:{index}", properties.name, properties.total_memory, capability, chip))
    for index in range(torch.xpu.device_count()):
        properties = torch.xpu.get_device_properties(index)
        devices.append(_device("xpu", f"xpu:{index}", properties.name, properties.total_memory, ""))
    if torch.backends.mps.is_available():
        devices.append(_device("mps", "mps", "Apple GPU", torch.mps.recommended_max_memory(), ""))
    return devices


def _device(
    type: str, device: str, name: str, memory_bytes: int | None, capability: str, chip: str = ""
) -> dict[str, Any]:
    facts = {"type": type, "device": device, "name": name, "memory_bytes": memory_bytes, "capability": capability}
    return facts | {"chip": chip}


def _implementation(scheme: Scheme, device: str, chip: str) -> tuple[str, str]:
    """Return the implementation of a scheme, and the reason: on a GPU with Triton the choice of kernels/dispatch.py."""
    if device != "cuda" or find_spec("triton") is None:
        return implementation(scheme, device)
    from fluxq.kernels.dispatch import choose
    from fluxq.kernels.tiles import SAME_AS

    choice = choose(scheme, SAME_AS.get(chip, chip), 4096, 3072, 3072)
    return choice.implementation, choice.reason


def _implementations(devices: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    rows = []
    for device, chip in devices:
        for scheme, recipes in _shipped_schemes().items():
            name, reason = _implementation(scheme, device, chip)
            rows.append(
                {
                    "op": "quantized_linear",
                    "scheme": str(scheme),
                    "recipes": ", ".join(recipes),
                    "device": chip or device,
                    "implementation": name,
                    "reason": reason,
                }
            )
    return rows


def _shipped_schemes() -> dict[Scheme, list[str]]:
    """Return scheme -> shipped recipes that can give it to a layer."""
    recipes_of: dict[Scheme, list[str]] = {}
    for name in shipped_recipes():
        _, recipe = load_recipe(name)
        schemes = [scheme for component in recipe.components.values() for scheme in _schemes(recipe, component)]
        for scheme in dict.fromkeys(schemes):
            recipes_of.setdefault(scheme, []).append(name)
    return recipes_of


def _schemes(recipe: Recipe, component: Component) -> Iterator[Scheme]:
    is_static = recipe.needs_data(component)
    operands = [
        (component.weights, component.activations),
        (component.weights, None),  # text encoders are weight-only
        (component.modulation, None),
        *((override.weights, override.activations) for override in component.overrides),
    ]
    for weights, activations in operands:
        if weights is not None:
            row = activations.row if activations else None
            yield Scheme(weights.row, row, static_input=is_static and row is not None and row.has_tensor_scale)


def _variables() -> dict[str, str]:
    """Return the set variables that change behaviour; only short words are shown as they are."""
    names = [name for name in sorted(os.environ) if name.startswith("FLUXQ_") or name in _VARIABLES]
    values = {name: os.environ[name] for name in names}
    return {
        name: value if _SHORT_VALUE.fullmatch(value) else f"set ({len(value)} characters, not shown)"
        for name, value in values.items()
    }
