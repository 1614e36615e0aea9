"""The native checkpoint: a diffusers pipeline folder whose quantized components say all that loading needs.

    <component>/config.json      quantization_config = {quant_method, format_version, required_features, layers}
    <component>/*.safetensors    the tensors of QuantizedTensor, under the names NVIDIA ModelOpt gave the field
    fluxq_plan.json              for people: plan, reasons, trajectory, hashes, versions, the closing check

Source weights are read lazily, one tensor at a time; nothing here holds a whole model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.files import read_json, write_json
from fluxq.base.model import PICKLES, ModelFolder, open_weights, save_weights
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LinearShape, Plan

QUANT_METHOD = "fluxq"
FORMAT_VERSION = 1
KNOWN_FEATURES = frozenset({"static_input_scale"})
PLAN_FILE = "fluxq_plan.json"

_WEIGHTS_NAME = "diffusion_pytorch_model"


@dataclass(frozen=True)
class QuantizationConfig:
    """`quantization_config` of a component's config.json. layers: scheme -> full module names."""

    layers: dict[str, list[str]]
    required_features: tuple[str, ...]
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, plan: Plan) -> QuantizationConfig:
        """What the checkpoint of a plan says."""
        static = any(layer.scheme and layer.scheme.static_input for layer in plan.layers)
        return cls(plan.schemes(), ("static_input_scale",) if static else ())

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Read and check; ValueError if a newer fluxq is needed or the dictionary is malformed."""
        version, listed = config.get("format_version"), config.get("required_features", [])
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise ValueError(
                f"checkpoint has format version {version!r}, this fluxq reads up to {FORMAT_VERSION}: update fluxq"
            )
        features = tuple(map(str, listed if isinstance(listed, (list, tuple)) else [listed]))
        unknown = sorted(set(features) - KNOWN_FEATURES)
        if unknown:
            raise ValueError(f"checkpoint requires {', '.join(unknown)}, unknown to this version: update fluxq")
        layers = config.get("layers")
        if not isinstance(layers, dict) or not layers or not all(isinstance(m, list) for m in layers.values()):
            raise ValueError("quantization_config names no layers; the checkpoint's config.json is damaged")
        names = [name for members in layers.values() for name in members]
        if len(names) != len(set(names)):
            raise ValueError("quantization_config names a layer under two schemes; config.json is damaged")
        return cls({str(scheme): list(members) for scheme, members in layers.items()}, features, version)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, `quant_method` included."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": self.format_version,
            "required_features": list(self.required_features),
            "layers": self.layers,
        }

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Module name -> scheme."""
        return {name: Scheme.parse(text) for text, members in self.layers.items() for name in members}


class SourceWeights:
    """The tensors of a component's safetensors files, read one at a time by name."""

    def __init__(self, folder: ModelFolder, component: str) -> None:
        self.folder, self._files = folder.path / component, {}
        self._paths = folder.weight_files(component)
        for path in self._paths:
            stream = open_weights(path)
            for name in stream.keys():
                if name in self._files:
                    raise ValueError(f"{path}: tensor {name!r} is in two files; remove the copy that is not meant")
                self._files[name] = stream

    @property
    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self.folder}: the weights lack {name!r}, which the model's config.json implies")
        return self._files[name].get_tensor(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, from the files' headers."""
        return sum(map(_tensor_bytes, self._paths))


def list_linears(folder: ModelFolder, component: str) -> list[LinearShape]:
    """Every nn.Linear of a component in the model's order, from its configuration: no weights are read."""
    import diffusers
    from torch import nn

    class_name = folder.components.get(component)
    if class_name is None:
        raise ValueError(f"{folder.name} has no component {component!r}; it has {', '.join(folder.components)}")
    model_class = getattr(diffusers, class_name, None)
    if model_class is None:
        raise ValueError(f"{component} is a {class_name}, which this diffusers ({diffusers.__version__}) does not have")
    config = folder.config(component)
    if "quantization_config" in config:
        raise ValueError(f"{folder.path / component} is already quantized; start from the 16-bit model")
    try:
        with torch.device("meta"):
            modules = model_class.from_config(config).named_modules()
    except Exception as error:  # whatever a constructor makes of values that it did not expect
        raise ValueError(
            f"{folder.path / component / 'config.json'}: no {class_name} can be built from it "
            f"({type(error).__name__}: {error}); the file is damaged, copy it again"
        ) from error
    return [LinearShape(name, m.out_features, m.in_features) for name, m in modules if isinstance(m, nn.Linear)]


def write_component(
    target: Path,
    source: ModelFolder,
    plan: Plan,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 10 * 10**9,
) -> int:
    """Write a quantized component's config and weight shards into the folder `target`; returns bytes of tensors."""
    target.mkdir(parents=True)
    config = source.config(plan.component)
    write_json(target / "config.json", {**config, "quantization_config": QuantizationConfig.of(plan).to_dict()})
    shards = []
    weight_map: dict[str, int] = {}
    total = 0
    for number, shard in enumerate(_shards(tensors, max_shard_bytes)):
        path = target / f"{number}.safetensors"
        save_weights(shard, path, {"format": "pt"})
        shards.append(path)
        weight_map.update(dict.fromkeys(shard, number))
        total += sum(map(_nbytes, shard.values()))
    if len(shards) == 1:
        shards[0].rename(target / f"{_WEIGHTS_NAME}.safetensors")
        return total
    names = [f"{_WEIGHTS_NAME}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for path, name in zip(shards, names, strict=True):
        path.rename(target / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {k: names[v] for k, v in sorted(weight_map.items())},
    }
    write_json(target / f"{_WEIGHTS_NAME}.safetensors.index.json", index)
    return total


def copy_rest(target: Path, source: ModelFolder, components: Iterable[str]) -> None:
    """Copy everything of a pipeline folder that is not quantized: other components, index, licences, defaults."""
    quantized = set(components)
    for component in source.components:
        if component not in quantized and (source.path / component).is_dir():
            shutil.copytree(source.path / component, target / component, ignore=_never_copied)
    for path in sorted(source.path.iterdir()):
        if path.is_file() and (
            path.name == "model_index.json" or path.name.lower().startswith(("license", "notice", "fluxq_"))
        ):
            if path.name != PLAN_FILE:
                shutil.copyfile(path, target / path.name)


def read_plan_file(folder: Path) -> dict[str, Any] | None:
    """`fluxq_plan.json` of a checkpoint folder, or None if it is not one."""
    path = folder / PLAN_FILE
    return read_json(path) if path.is_file() else None


def _never_copied(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith((*PICKLES, ".py"))]


def _shards(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + _nbytes(tensor) > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += _nbytes(tensor)
    if shard:
        yield shard


def _tensor_bytes(path: Path) -> int:
    """What follows the header: 8 bytes that hold the header's length, the header, the tensors."""
    with path.open("rb") as stream:
        return path.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
