"""`fluxq.prepare(pipe)`: a loaded checkpoint laid out for the GPU that will run it.

The files stay what they are: `save_pretrained` writes the checkpoint's own tensors again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fluxq.base.console import logger
from fluxq.base.files import read_json
from fluxq.integrations.loading import quant_layers
from fluxq.quantize.checkpoint import QUANT_METHOD
from fluxq.quantize.linear import QuantLinear
from fluxq.quantize.prepare import Origin, reencode_layer, targets_on_cpu


@dataclass(frozen=True)
class PreparedLayer:
    """A layer that `prepare` changed. how: what was done. added_error: relative to the stored weight, 0 if none."""

    name: str
    stored: str
    runs_as: str
    how: str
    added_error: float


def prepare(
    model: Any,
    *,
    prefer: Literal["speed", "memory"] = "speed",
    device: str | torch.device | None = None,
    source: str | Path | None = None,
) -> list[PreparedLayer]:
    """Lay out a quantized model, or all models of a pipeline, for one device; what was changed, layer by layer.

    What the device's matrix units know is at most permuted. Other weights become int8 or fp8, each layer what adds the
    less error ("speed"), or stay in 4 bits and are decoded in the kernel ("memory"). Layers with 16-bit activations
    stay as they are.

    device: that will compute; by default where the weights are, or the first GPU if they are on the CPU. source: the
    checkpoint's folder, where it cannot be told from the model; without one, re-encoded layers cannot be saved.
    Raises ValueError for a model that holds no quantized layer, is offloaded, or was prepared for another device.
    """
    if prefer not in ("speed", "memory"):
        raise ValueError(f"prefer is {prefer!r}, expected 'speed' or 'memory'")
    models = dict(_quantized_models(model))
    if not models:
        raise ValueError(f"this {type(model).__name__} holds no layer that fluxq quantized")
    target = _device(next(iter(models.values())), device)
    changed = []
    for component, part in models.items():
        folder = _folder(model, component, part, source)
        for name, layer in quant_layers(part):
            stored = layer.scheme
            origin = Origin(folder, name.removesuffix(".base_layer")) if folder else None
            if _prepare_layer(layer, target, prefer, origin) and layer.prepared:
                done = layer.prepared
                full = f"{component}.{name}" if component else name
                changed.append(PreparedLayer(full, str(stored), str(layer.scheme), done.how, done.added_error))
    _report(changed, target)
    return changed


def _prepare_layer(layer: QuantLinear, device: torch.device, prefer: str, origin: Origin | None) -> bool:
    if device.type == "cuda":
        from fluxq.kernels.chips import chip_of
        from fluxq.kernels.dispatch import prepare as prepare_for_chip

        return prepare_for_chip(layer, chip_of(device), prefer, origin)
    targets = targets_on_cpu(layer.scheme) if device.type == "cpu" and prefer == "speed" else ()
    if targets:
        reencode_layer(layer, targets, origin)
    return bool(targets)


def _quantized_models(model: Any):
    """(component's name, empty for a model by itself; model) of all that hold a QuantLinear."""
    parts = {"": model} if isinstance(model, nn.Module) else dict(model.components)
    return ((name, part) for name, part in parts.items() if isinstance(part, nn.Module) and quant_layers(part))


def _device(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    held = next(model.parameters()).device
    return torch.device("cuda", 0) if held.type == "cpu" and torch.cuda.is_available() else held


def _folder(model: Any, component: str, part: nn.Module, source: str | Path | None) -> Path | None:
    """The folder of safetensors files that a component was loaded from, None if it cannot be told."""
    named = str(source or getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    root = Path(named)
    if not named or not root.is_dir():
        root = _in_hub_cache(named, component) if named else None
    if root is None:
        return None
    for folder in [root / component] if component else [root, *sorted(p for p in root.iterdir() if p.is_dir())]:
        if (folder / "config.json").is_file():
            found = read_json(folder / "config.json")
            classes = (found.get("_class_name"), *(found.get("architectures") or ()))
            method = (found.get("quantization_config") or {}).get("quant_method")
            if type(part).__name__ in classes and method == QUANT_METHOD:
                return folder
    return None


def _in_hub_cache(repository: str, component: str) -> Path | None:
    """The folder where huggingface_hub keeps a repository that it downloaded, None if it did not."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repository, "model_index.json" if component else "config.json")
    return Path(file).parent if isinstance(file, str) else None


def _report(changed: list[PreparedLayer], device: torch.device) -> None:
    kinds: dict[tuple[str, str], list[float]] = {}
    for row in changed:
        kinds.setdefault((row.stored, row.how), []).append(row.added_error)
    for (stored, how), errors in kinds.items():
        added = f", adds {max(errors):.2%} of the weight's size at most" if max(errors) else ""
        logger.info("%d layers of %s %s for %s%s", len(errors), stored, how, device, added)
