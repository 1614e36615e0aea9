"""The native checkpoint: a diffusers pipeline folder whose quantized components say all that loading needs.

    <component>/config.json      quantization_config = {quant_method, format_version, required_features, layers}
    <component>/*.safetensors    the tensors of QuantizedTensor, under the names NVIDIA ModelOpt gave the field
    fluxq_plan.json              for people: plan, reasons, trajectory, hashes, versions, the closing check

A transformers that does not know `quant_method` only warns and would load codes as if they were weights. So the codes
of its components are stored as [N, K', 1]: no module has a weight of that shape, and loading fails (see `as_filed`).

Source weights are read lazily, one tensor at a time; nothing here holds a whole model.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.files import read_json, write_json
from fluxq.base.model import PICKLES, ModelFolder, open_weights, save_weights
from fluxq.quantize.linear import QuantLinear
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LinearShape, Plan

QUANT_METHOD = "fluxq"
FORMAT_VERSION = 1
KNOWN_FEATURES = frozenset(
    {"static_input_scale", "low_rank", "center", "smooth", "deflation", "hadamard", "four_over_six"}
)
PLAN_FILE = "fluxq_plan.json"

_WEIGHTS_NAME = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}


@dataclass(frozen=True)
class QuantizationConfig:
    """`quantization_config` of a component's config.json. layers: scheme -> full module names."""

    layers: dict[str, list[str]]
    required_features: tuple[str, ...]
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, schemes: Iterable[tuple[str, Scheme]]) -> QuantizationConfig:
        """What the checkpoint of these layers (module name, scheme) says."""
        layers: dict[str, list[str]] = {}
        features: set[str] = set()
        for name, scheme in schemes:
            layers.setdefault(str(scheme), []).append(name)
            features.update(scheme.features)
        return cls(layers, tuple(sorted(features)))

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
        if not all(isinstance(name, str) for name in names):
            raise ValueError("quantization_config names layers by something else than text; config.json is damaged")
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
    """The tensors of a component's safetensors files, read one at a time by their name in the model.

    That is their name in the file, but for old checkpoints whose tensors transformers renames as it loads them.
    """

    def __init__(self, folder: ModelFolder, component: str) -> None:
        self.folder, self._files = folder.path / component, {}
        self._paths = folder.weight_files(component)
        library = library_of(folder, component)
        kept = getattr(_model_class(library, folder.components[component]), "_keep_in_fp32_modules", None)
        self._fp32_modules = frozenset(kept or ())
        names_in = _transformers_names(folder, component) if library == "transformers" else None
        for path in self._paths:
            stream = open_weights(path)
            for name in stream.keys():
                own = names_in(name) if names_in else name
                if own in self._files:
                    raise ValueError(f"{path}: tensor {own!r} is in two files; remove the copy that is not meant")
                self._files[own] = (stream, name)

    @property
    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self.folder}: the weights lack {name!r}, which the model's config.json implies")
        stream, name_in_file = self._files[name]
        return stream.get_tensor(name_in_file)

    def stays_fp32(self, name: str) -> bool:
        """Whether the 16-bit model computes with this tensor in fp32, as its class asks for (Wan's norms, for one)."""
        return not self._fp32_modules.isdisjoint(name.split("."))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, from the files' headers."""
        return sum(map(tensor_bytes, self._paths))


def library_of(folder: ModelFolder, component: str) -> str:
    """Which library a component's class is of, "diffusers" or "transformers"; ValueError if there is no such one."""
    if component not in folder.components:
        raise ValueError(f"{folder.name} has no component {component!r}; it has {', '.join(folder.components)}")
    return folder.index[component][0]


def build_on_meta(library: str, class_name: str, config: dict[str, Any]) -> nn.Module:
    """The model that a configuration implies, without weights; ValueError if the library lacks the class."""
    model_class = _model_class(library, class_name)
    with torch.device("meta"):
        if library == "transformers":
            return model_class(model_class.config_class.from_dict(config))
        return model_class.from_config(config)


def list_linears(folder: ModelFolder, component: str) -> list[LinearShape]:
    """Every nn.Linear of a component in the model's order, from its configuration: no weights are read."""
    modules = model_on_meta(folder, component).named_modules()
    return [LinearShape(name, m.out_features, m.in_features) for name, m in modules if isinstance(m, nn.Linear)]


def as_filed(library: str, codes: Tensor) -> Tensor:
    """The codes of a quantized `weight` (N, K') as a component of `library` stores them.

    In transformers (N, K', 1): the same bytes, and a loader that does not know fluxq stops at the shape.
    """
    return codes.unsqueeze(-1) if library == "transformers" else codes


def write_component(
    target: Path,
    source: ModelFolder,
    plan: Plan,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 10 * 10**9,
    schemes: Callable[[], Iterable[tuple[str, Scheme]]] | None = None,
) -> int:
    """Write a quantized component's weight shards and config into the folder `target`; returns bytes of tensors.

    schemes: asked when all tensors have come, for what each layer became; None where that is what the plan says.
    Files are named as the component's library names them: `diffusion_pytorch_model…` or `model….safetensors`.
    """
    library = library_of(source, plan.component)
    stem, codes = _WEIGHTS_NAME[library], {f"{layer.name}.weight" for layer in plan.quantized}
    filed = ((name, as_filed(library, t) if name in codes else t) for name, t in tensors)
    target.mkdir(parents=True)
    shards = []
    weight_map: dict[str, int] = {}
    total = 0
    for number, shard in enumerate(_shards(filed, max_shard_bytes)):
        path = target / f"{number}.safetensors"
        save_weights(shard, path, {"format": "pt"})
        shards.append(path)
        weight_map.update(dict.fromkeys(shard, number))
        total += sum(map(_nbytes, shard.values()))
    quantization = QuantizationConfig.of((schemes or plan.schemes)()).to_dict()
    write_json(target / "config.json", {**source.config(plan.component), "quantization_config": quantization})
    if len(shards) == 1:
        shards[0].rename(target / f"{stem}.safetensors")
        return total
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for path, name in zip(shards, names, strict=True):
        path.rename(target / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {k: names[v] for k, v in sorted(weight_map.items())},
    }
    write_json(target / f"{stem}.safetensors.index.json", index)
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


def _model_class(library: str, class_name: str) -> Any:
    package = importlib.import_module(library)
    model_class = getattr(package, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ValueError(
            f"{class_name} is no model class of this {library} ({package.__version__}): it is a component without "
            f"weights, or one that a newer {library} has"
        )
    return model_class


def model_on_meta(folder: ModelFolder, component: str) -> nn.Module:
    """The component's 16-bit model on the meta device; ValueError naming the file that is at fault."""
    library, class_name = library_of(folder, component), folder.components[component]
    _model_class(library, class_name)  # so that its error is not taken for one of the file
    config = folder.config(component)
    if "quantization_config" in config:
        raise ValueError(f"{folder.path / component} is already quantized; start from the 16-bit model")
    try:
        return build_on_meta(library, class_name, config)
    except Exception as error:  # whatever a constructor makes of values that it did not expect
        raise ValueError(
            f"{folder.path / component / 'config.json'}: no {class_name} can be built from it "
            f"({type(error).__name__}: {error}); the file is damaged, copy it again"
        ) from error


def quantized_on_meta(folder: ModelFolder, component: str) -> nn.Module:
    """The model that a loader builds of a quantized component, on the meta device, QuantLinears in place.

    Raises ValueError naming what config.json and the class do not agree on.
    """
    library, class_name = library_of(folder, component), folder.components[component]
    where = folder.path / component / "config.json"
    config = folder.config(component)
    schemes = QuantizationConfig.from_dict(config.pop("quantization_config", {})).schemes
    try:
        model = build_on_meta(library, class_name, config)
    except Exception as error:  # whatever a constructor makes of values that it did not expect
        raise ValueError(f"{where}: no {class_name} can be built from it ({error}); copy it again") from error
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, scheme in schemes.items():
        old = linears.get(name)
        if old is None:
            raise ValueError(f"{where}: quantizes {name!r}, which is no Linear of {class_name}; copy it again")
        with torch.device("meta"):
            new = QuantLinear(old.in_features, old.out_features, old.bias is not None, scheme, torch.bfloat16)
        model.set_submodule(name, new)
    return model


def _transformers_names(folder: ModelFolder, component: str) -> Callable[[str], str]:
    """Name in a file -> name in the model, by the rules of transformers' own loader."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    model: Any = model_on_meta(folder, component)
    held = model.state_dict()
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]

    def name_in_model(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, held)
        return renamed if renamed in held else name  # what the model lacks stays as it is

    return name_in_model


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


def tensor_bytes(path: Path) -> int:
    """What follows the header: 8 bytes that hold the header's length, the header, the tensors."""
    with path.open("rb") as stream:
        return path.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
