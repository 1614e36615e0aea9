"""`fluxq.prepare(pipe)`: a loaded checkpoint laid out for the GPU that will run it.

The files stay what they are: `save_pretrained` writes the checkpoint's own tensors again.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from fluxq.base.console import logger
from fluxq.base.devices import free_bytes
from fluxq.base.files import read_json
from fluxq.base.modules import path_in_file
from fluxq.kernels import ops
from fluxq.kernels.linear import Layout, QuantLinear, quant_layers
from fluxq.recipes.computing import QUANT_METHOD
from fluxq.runtime.layout import StoredLayer, add_decoded, lay_out, reencode_layer, targets_on_cpu
from fluxq.runtime.placed import is_grouped, models_of, target_device

MANY_TOKENS = 4096  # of an image of 1024x1024
Prefer = Literal["speed", "memory", "decoded"]


@dataclass(frozen=True)
class PreparedLayer:
    """A layer that `prepare` changed. how: in words. added_error: relative to the stored weight, 0 if none."""

    name: str
    stored: str
    runs_as: str
    how: str
    added_error: float


def prepare(
    model: Any,
    *,
    prefer: Prefer = "speed",
    device: str | torch.device | None = None,
    source: str | Path | None = None,
) -> list[PreparedLayer]:
    """Lay out a quantized model, or all models of a pipeline, for one device; return what was changed, layer by layer.

    Formats that the device's matrix units know are at most permuted. Other weights become int8 or fp8, whichever adds
    less error in a layer ("speed"), or stay in 4 bits and are decoded in the kernel ("memory"). Layers with 16-bit
    activations stay as they are. A warning names layers that the device has no product for. Called again, it changes
    nothing.

    On a CPU "speed" turns layers into int8 where it multiplies that; "memory" leaves codes, which each product decodes;
    "decoded" keeps fp32 weights beside the codes, 32 bits more for each weight, and computes the same bits sooner.

    device: that will compute; by default where the weights are, or the first GPU if they are on the CPU. source: the
    checkpoint's folder, where it cannot be told from the model; without one, re-encoded layers cannot be saved.
    Raises ValueError for a model that holds no quantized layer, is offloaded, or was prepared for another chip or with
    another preference, for a source that is not the model's, for a GPU without Triton, and for "decoded" on a GPU.
    """
    if prefer not in get_args(Prefer):
        raise ValueError(f"prefer is {prefer!r}, expected 'speed', 'memory' or 'decoded'")
    models = {name: part for name, part in models_of(model).items() if quant_layers(part)}
    if not models:
        raise ValueError(f"this {type(model).__name__} holds no layer that fluxq quantized")
    _require_present(models)
    target = target_device(quant_layers(next(iter(models.values())))[0][1].weight.device, device)
    if target.type == "cuda" and prefer == "decoded":
        raise ValueError(
            f"prefer='decoded' keeps fp32 weights for products of a CPU; kernels on {target} decode on their way: take "
            "'speed' or 'memory', or device='cpu'"
        )
    chip = _chip(target)
    _require_not_prepared_otherwise(models, chip, prefer)
    if prefer == "decoded":
        _require_room(models)
    folders = _folders(model, models, source)
    changed = []
    for component, part in models.items():
        folder = folders[component]
        for name, layer in quant_layers(part):
            if layer.prepared:
                continue
            stored = layer.scheme
            origin = StoredLayer(folder, path_in_file(name)) if folder else None
            done = prepare_layer(layer, target, chip, prefer, origin)
            if done:
                full = f"{component}.{name}" if component else name
                changed.append(PreparedLayer(full, str(stored), str(layer.scheme), done.how, done.added_error))
    _report(changed, target)
    _warn_of_fallbacks(models, target, chip)
    return changed


def _require_present(models: dict[str, nn.Module]) -> None:
    """Raise ValueError for weights that are elsewhere, or that a hook of diffusers keeps a copy of."""
    for part in models.values():
        if is_grouped(part) or any(layer.weight.is_meta for _, layer in quant_layers(part)):
            raise ValueError(
                f"this {type(part).__name__} is offloaded, and what is done to it would be lost: load it again, call "
                "fluxq.prepare first, then offload"
            )


def _chip(device: torch.device) -> str:
    """Return the name of a GPU's chip; of other devices their type."""
    if device.type != "cuda":
        return device.type
    if find_spec("triton") is None:
        raise ValueError(
            f"fluxq.prepare lays a model out for kernels in Triton, which is not there for {device}: install triton, "
            "or prepare for device='cpu'"
        )
    from fluxq.kernels.tiles import chip_of

    return chip_of(device)


def _require_not_prepared_otherwise(models: dict[str, nn.Module], chip: str, prefer: str) -> None:
    for part in models.values():
        for name, layer in quant_layers(part):
            done = layer.prepared
            if done and (done.chip, done.prefer) != (chip, prefer):
                raise ValueError(
                    f"{name} is prepared already, for {done.chip} and prefer={done.prefer!r} ({done.how}): load the "
                    f"model again to prepare it for {chip} and prefer={prefer!r}"
                )


def _require_room(models: dict[str, nn.Module]) -> None:
    """Raise ValueError where the decoded weights do not fit into the free memory beside the codes."""
    layers = [layer for part in models.values() for _, layer in quant_layers(part) if _is_to_decode(layer)]
    needed = sum(4 * layer.in_features * layer.out_features for layer in layers)
    free = free_bytes(layers[0].weight.device) if layers else None
    if free is not None and needed > free:
        raise ValueError(
            f"prefer='decoded' takes {needed / 1e9:.1f} GB beside the codes and {free / 1e9:.1f} GB are free: take "
            "prefer='memory', which decodes for each product"
        )


def _is_to_decode(layer: QuantLinear) -> bool:
    return not layer.prepared and not ops.multiplies_codes(layer.scheme.weights, layer.scheme.activations)


def prepare_layer(
    layer: QuantLinear, device: torch.device, chip: str, prefer: str, origin: StoredLayer | None
) -> Layout | None:
    """Prepare a layer, and return how; None if nothing was to be done."""
    if device.type == "cuda":
        lay_out(layer, chip, prefer, origin)
    elif prefer == "decoded" and _is_to_decode(layer):
        add_decoded(layer)
    elif device.type == "cpu" and prefer == "speed" and (targets := targets_on_cpu(layer.scheme)):
        reencode_layer(layer, targets, origin)
    if layer.prepared:
        layer.prepared = replace(layer.prepared, chip=chip, prefer=prefer)
    return layer.prepared


def _folders(model: Any, models: dict[str, nn.Module], source: str | Path | None) -> dict[str, Path | None]:
    """Return the folder of safetensors files that each component was loaded from, None if it cannot be told."""
    homes = {name: _checkpoint(str(source or ""), name, part) for name, part in models.items()}
    if source is not None and not any(homes.values()):
        classes = ", ".join(type(part).__name__ for part in models.values())
        raise ValueError(
            f"source {source} holds no checkpoint of fluxq for {classes}: expected the folder that the model was "
            "loaded from, with config.json"
        )
    return {  # a component may come from elsewhere than its pipeline
        name: homes[name] or _checkpoint(_loaded_from(part), name, part) or _checkpoint(_loaded_from(model), name, part)
        for name, part in models.items()
    }


def _loaded_from(model: Any) -> str:
    """Return the folder or repository that was given to `from_pretrained`."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def _checkpoint(named: str, component: str, part: nn.Module) -> Path | None:
    """Return the folder of a model's checkpoint, `named` or inside it; None if none, or more than one, might be it."""
    root = Path(named) if named and os.path.isdir(named) else _in_hub_cache(named)
    if root is None:
        return None
    if _is_checkpoint(root, part):
        return root
    inside = [folder for folder in root.iterdir() if folder.is_dir() and _is_checkpoint(folder, part)]
    if root / component in inside:
        return root / component
    return inside[0] if len(inside) == 1 else None


def _is_checkpoint(folder: Path, part: nn.Module) -> bool:
    """Tell whether a folder's config.json is that of a model of this class under fluxq."""
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    classes = (config.get("_class_name"), *(config.get("architectures") or ()))
    method = (config.get("quantization_config") or {}).get("quant_method")
    return type(part).__name__ in classes and method == QUANT_METHOD


def _in_hub_cache(repository: str) -> Path | None:
    """Return the folder where huggingface_hub keeps a repository's main branch, None if nothing of it was downloaded.

    Its own look-up takes the name of a file, or wants all files of the repository to be there.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    kept = Path(HF_HUB_CACHE, f"models--{repository.replace('/', '--')}")
    main = kept / "refs" / "main"
    if not os.path.isfile(main):  # pathlib's would raise for a name that is too long
        return None
    snapshot = kept / "snapshots" / main.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def _report(changed: list[PreparedLayer], device: torch.device) -> None:
    kinds: dict[tuple[str, str], list[float]] = {}
    for row in changed:
        kinds.setdefault((row.stored, row.how), []).append(row.added_error)
    for (stored, how), errors in kinds.items():
        added = f", adds {max(errors):.2%} of the weight's size at most" if max(errors) else ""
        logger.info("%d layers of %s %s for %s%s", len(errors), stored, how, device, added)


def _warn_of_fallbacks(models: dict[str, nn.Module], device: torch.device, chip: str) -> None:
    """Warn of layers that stayed as they are with codes that the device cannot multiply, and say how they compute."""
    left = [layer for part in models.values() for _, layer in quant_layers(part) if layer.prepared is None]
    ways = ((layer.scheme, _fallback(layer, device, chip)) for layer in left if layer.scheme.activations)
    for (scheme, way), count in Counter((str(scheme), way) for scheme, way in ways if way).items():
        logger.warning("%d layers of %s stay as they are on %s: %s", count, scheme, chip, way)


def _fallback(layer: QuantLinear, device: torch.device, chip: str) -> str:
    """Return the implementation and its reason, if it is not the device's own product of the codes; else empty."""
    if device.type != "cuda":
        name, why = ops.implementation(layer.scheme, device.type)
        return f"{name} ({why})" if name == ops.TORCH else ""
    from fluxq.kernels.dispatch import choose

    choice = choose(layer.scheme, chip, MANY_TOKENS, layer.out_features, layer.in_features, layer.compute_dtype)
    return f"{choice.implementation} ({choice.reason})" if choice.fallback else ""
