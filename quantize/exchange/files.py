"""A model in a file or folder, whoever wrote it: container, dialect and why, layers, and what is in 16 bit.

Only headers and configurations are read until a tensor is asked for. The marks of `marks.py` tell its dialect; every
mark of another dialect is kept as a contradiction. The nibble order and the order of block scales stand nowhere in a
file, and `inspect` proves them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.files import read_json
from fluxq.base.model import PICKLES, ModelFolder, indexed_files, require_harmless
from fluxq.base.tensors import TensorFile
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.dialects import RULES, SIGNS, dialect_of, grouped, other_program
from fluxq.quantize.exchange.gguf_file import GGUFFile
from fluxq.quantize.exchange.layer import Decoded, most_of_16_bit
from fluxq.quantize.exchange.marks import FLOATS, NATIVE, PLAIN, FileLayer, Headers
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.family import Family
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymap_rows import SAME_NAMES
from fluxq.recipes.keymaps import CHECKPOINT_PREFIX, ORIGINALS, Joined, diffusers_names


class ModelFile(Headers):
    """One model, that is one component, in one file or several.

    container: in words. dialect: a key of DIALECTS, NATIVE or PLAIN; rules: its own. evidence: what tells it;
    contradictions: what speaks for another. unknown_method: the program that wrote the layers, where no dialect has it,
    else "". names: of its modules, "diffusers", "original" or the dialect's own. family: None where no row knows them.
    disabled: module in 16 bit -> suffix -> tensor, of what calibration took out of its weight before its quantizer
    was disabled. groups: tensors that may be of a quantized layer, by module and suffix. layers: by name; plain:
    names of all other tensors. prefix: of the denoiser's names in a file that holds other components too; others:
    names of their tensors, of which nothing else here tells. faults: layer -> why it could not even be taken apart.
    undecided: dialects among which nothing in the file decides; `dialect` is the first guess.
    """

    def __init__(
        self, path: Path, files: Sequence[TensorFile | GGUFFile], container: str, config: dict[str, Any]
    ) -> None:
        super().__init__(path, files, container, config)
        is_whole = any(name.startswith(CHECKPOINT_PREFIX) for name in self.stored)
        self.prefix = CHECKPOINT_PREFIX if is_whole else ""
        tensors = {name: stored for name, stored in self.stored.items() if name.startswith(self.prefix)}
        self.others = [name for name in self.stored if name not in tensors]
        self.groups = grouped(tensors)
        self.dialect, self.evidence, self.contradictions, self.undecided = dialect_of(self)
        self.unknown_method = other_program(self)
        if self.others:
            self.container += f" with {', '.join(self.other_components())} beside the denoiser"
        self._take_apart()

    def read_as(self, dialect: str) -> ModelFile:
        """The same files, as of a dialect that a base proved."""
        other = copy(self)
        vars(other).pop("joined", None)
        other.dialect, other.contradictions, other.undecided = dialect, (), ()
        other.evidence = *self.evidence, "proved against the base"
        other._take_apart()
        return other

    def _take_apart(self) -> None:
        self.rules: Dialect = RULES[self.dialect]
        is_ours = self.dialect == NATIVE
        self.schemes: dict[str, Scheme] = (
            dict(QuantizationConfig.from_dict(self.quantization).schemes) if is_ours else {}
        )
        self.faults: dict[str, str] = {}
        self.layers = {layer.name: layer for layer in self._read_layers()}
        self.rules.regroup(self)
        taken = {name for layer in self.layers.values() for name in layer.parts.values()}
        plain = [name for name in self.stored if name.startswith(self.prefix) and name not in taken]
        self.disabled: dict[str, dict[str, str]] = {}
        for name in plain:
            module, _, suffix = name.rpartition(".")
            if suffix in self.rules.removed and f"{module}.weight" in plain:
                self.disabled.setdefault(module, {})[suffix] = name
        apart = {name for parts in self.disabled.values() for name in parts.values()}
        self.plain = [name for name in plain if name not in apart]
        vars(self).pop("_identity", None)

    @cached_property
    def _identity(self) -> tuple[Family | None, str]:
        return _identify(self)  # half a second for an encoder that no family has

    @property
    def family(self) -> Family | None:
        """Its family; None where no row knows its names."""
        return self._identity[0]

    @property
    def names(self) -> str:
        """Owner of its modules' names: "diffusers", "original" or the dialect itself."""
        return self._identity[1]

    def other_components(self) -> dict[str, tuple[int, int]]:
        """Name -> (tensors, bytes) of what lies beside the denoiser in its file."""
        components: dict[str, tuple[int, int]] = {}
        for name in self.others:
            first, *rest = name.split(".")
            component = ".".join([first, *rest[: first in _OF_SEVERAL]])
            count, nbytes = components.get(component, (0, 0))
            components[component] = count + 1, nbytes + self.stored[name].nbytes
        return components

    @property
    def unread(self) -> dict[str, list[str]]:
        """Layer -> tensors beside its codes that its dialect does not know, and what of a layer has no codes."""
        suffixes: dict[str, list[str]] = {}
        alone = {
            name: module
            for module, parts in self.groups.items()
            for suffix, name in parts.items()
            if module not in self.layers and module not in self.faults and suffix not in ("weight", "bias")
        }
        for name in self.plain:
            module = name.removesuffix("._data").rpartition(".")[0]
            above = (each for each in (module, module.rpartition(".")[0]) if each in self.layers)  # some put it below
            if owner := alone.get(name) or next(above, ""):
                suffixes.setdefault(owner, []).append(name[len(owner) + 1 :])
        return suffixes

    @cached_property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype that most of the denoiser's other tensors and biases have: scales may be in either."""
        plain, others = {*self.plain}, {*self.others}
        counted = (name for name in self.stored if name in plain or (name.endswith(".bias") and name not in others))
        return most_of_16_bit([self.stored[name].dtype for name in counted])

    @property
    def files(self) -> list[Path]:
        """Of safetensors or GGUF, those that hold the model."""
        return list(dict.fromkeys(file.path for file in self._files.values()))

    def read_plain(self, name: str) -> Tensor:
        """A tensor that is not quantized; a weight with what ModelOpt had taken out of it put back."""
        tensor, (module, _, suffix) = self.read(name), name.rpartition(".")
        removed = {part: self.read(tensor_name) for part, tensor_name in self.disabled.get(module, {}).items()}
        return self.rules.put_back(module, tensor, removed) if suffix == "weight" and removed else tensor

    def read_layer(self, layer: FileLayer) -> dict[str, Tensor]:
        """The tensors of a layer as `decode` takes them."""
        return {suffix: self.read(name) for suffix, name in layer.parts.items()}

    def decode(self, layer: FileLayer, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None) -> Decoded:
        """Decode the tensors of a layer by the file's dialect; ValueError where they are not of it."""
        return self.rules.decode(tensors, shape or layer.shape, layer.entry)

    @cached_property
    def joined(self) -> dict[str, Joined]:
        """Tensor in the file (weights of quantized layers under `<name>.weight`) -> what of diffusers it joins.

        ValueError that names the tensor that no row of recipes/families knows.
        """
        tensors = self.of_model()
        if self.rules.parts_of is not None and self.names == self.rules.names:
            return {name: Joined(name, self.rules.parts_of(name)) for name in tensors}
        if self.names == "diffusers" or self.family is None:
            bare = {name: name.removeprefix(self.prefix) for name in tensors}
            return {name: Joined(bare_name, (bare_name,)) for name, bare_name in bare.items()}
        return {self.prefix + each.original: each for each in diffusers_names(self.family.name, tensors)}

    def of_model(self) -> list[str]:
        """Names of the tensors that it stands for: weight and bias of a quantized layer, and what is plain."""
        names = [f"{name}.weight" for name in self.layers]
        names += [f"{name}.bias" for name, layer in self.layers.items() if "bias" in layer.parts]
        return names + [name for name in self.plain if name not in SIGNS]

    def linears_in_16_bit(self) -> dict[str, tuple[int, int]]:
        """Matrices that are not quantized, by module."""
        shapes = {}
        for name in self.plain:
            stored = self.stored[name]
            if name.endswith(".weight") and len(stored.shape) == 2 and stored.dtype in FLOATS:
                shapes[name.removesuffix(".weight")] = (stored.shape[0], stored.shape[1])
        return shapes

    def _read_layers(self) -> Iterator[FileLayer]:
        for name, parts in self.groups.items():
            stored = {suffix: self.stored[whole] for suffix, whole in parts.items()}
            if not self.rules.has_codes(stored):
                continue
            try:
                entry = self.rules.entry(self, name, stored)
                shape = self.rules.shape(stored, entry)
            except ValueError as error:
                self.faults[name] = str(error)
                continue
            yield FileLayer(name, parts, stored, entry, shape)


def open_models(path: Path) -> dict[str, ModelFile]:
    """Every model of a file, of a component's folder or of a pipeline's, by component ("" where there is just one).

    FileNotFoundError if nothing is there; ValueError for pickles, for what leads out of the folder, and for what is
    truncated or damaged.
    """
    if path.is_file():
        return {"": _open_file(path)}
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no file or folder")
    if (path / "model_index.json").is_file():
        folder = ModelFolder(path.name, path)
        parts = {name: path / name for name in folder.components if Path(name).name == name}
        return {
            name: open_component(part, "component of a pipeline folder")
            for name, part in parts.items()
            if (part / "config.json").is_file() and any(part.glob("*.safetensors"))
        }
    return {"": open_component(path, "folder of one model")}


def open_model(path: Path) -> ModelFile:
    """The one model of a file or folder; of a pipeline's, the quantized one, or else the denoiser. As `open_models`."""
    models = open_models(path)
    quantized = {name: model for name, model in models.items() if model.dialect != PLAIN}
    for candidates in (quantized, {name: models[name] for name in ("transformer", "unet") if name in models}, models):
        if len(candidates) == 1:
            return next(iter(candidates.values()))
    raise ValueError(f"{path}: holds {', '.join(quantized or models) or 'no models'}; give the folder of one of them")


def open_component(path: Path, container: str) -> ModelFile:
    """The model in a folder of config.json and safetensors."""
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1 or list(path.glob("*.safetensors.index.json")):
        files = ModelFolder(path.name, path.parent).weight_files(path.name)
    _require_inside(path, files)
    sharded = f", {len(files)} files" if len(files) > 1 else ""
    return ModelFile(path, [TensorFile(file) for file in files], container + sharded, config)


def _open_file(path: Path) -> ModelFile:
    if path.suffix.lower() in PICKLES:
        raise ValueError(f"{path}: a pickle, which runs code as it is read; get it as safetensors")
    with path.open("rb") as stream:
        head = stream.read(4)
    if head == b"GGUF":
        return ModelFile(path, [GGUFFile(path)], "GGUF file", _config_beside(path))
    if path.name.endswith(".safetensors.index.json"):
        files = indexed_files(path)
        _require_inside(path.parent, files)
        return ModelFile(path, [TensorFile(file) for file in files], f"{len(files)} safetensors files", {})
    config = _config_beside(path)
    beside = " with its configuration beside it" if config else ""
    return ModelFile(path, [TensorFile(path)], f"single safetensors file{beside}", config)


def _config_beside(path: Path) -> dict[str, Any]:
    """NAME.config.json, as an export to bfl writes it for `from_single_file`; empty where there is none."""
    beside = path.with_name(f"{path.stem}.config.json")
    if not beside.is_file():
        return {}
    _require_inside(path.parent, [beside])
    require_harmless(beside)
    config = read_json(beside)
    return config if "_class_name" in config else {}


def _require_inside(folder: Path, files: list[Path]) -> None:
    """ValueError for a link out of the folder, the hub's cache excepted."""
    root = folder.resolve()
    places = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    for file in files:
        if not any(Path(os.path.realpath(file)).is_relative_to(place) for place in places):
            raise ValueError(f"{file}: a link that leads out of the folder; put the file itself there")


# --- families


def _identify(model: ModelFile) -> tuple[Family | None, str]:
    """(family, whose names), by the dialect, config.json or the names."""
    if identity := model.rules.identify(model):
        return identity
    classes = class_names(model.config)
    named = [family for family in FAMILIES.values() if family.model in classes]
    modules = [*model.layers, *model.linears_in_16_bit()]
    bare = [name.removeprefix(model.prefix) for name in modules]
    tensors = [name.removeprefix(model.prefix) for name in model.of_model()]
    scores: Counter[tuple[str, str]] = Counter()
    for family in named or FAMILIES.values():
        if family.library == "diffusers" or named:
            matches = [module for module in bare if family.locate(module) or family.kept(module) is not None]
            scores[family.name, "diffusers"] = len(matches)
        if family.name in ORIGINALS and family.originals != SAME_NAMES:
            scores[family.name, "original"] = _mapped(family.name, bare, tensors)
    (family_name, names), score = scores.most_common(1)[0]
    if 2 * score <= len(bare):
        return (named[0] if named else None), "diffusers"
    return FAMILIES[family_name], names


def class_names(config: Mapping[str, Any]) -> list[str]:
    """Return the class names that a config.json gives, as diffusers and transformers write them."""
    listed = config.get("architectures")
    names = [config.get("_class_name"), *(listed if isinstance(listed, list) else ())]
    return [name for name in names if isinstance(name, str) and name]


def _mapped(family: str, modules: list[str], tensors: list[str]) -> int:
    """Count the modules that a row of the key map knows; one more where it knows every tensor.

    Linears of Sana go by the names of PixArt's, convolutions do not; a UNet's blocks are not told from Linears alone.
    """
    if _knows(family, tensors):
        return len(modules) + 1
    return len(modules) if _knows(family, modules) else sum(_knows(family, [module]) for module in modules)


def _knows(family: str, names: list[str]) -> bool:
    try:
        diffusers_names(family, names)
    except ValueError:
        return False
    return bool(names)


_OF_SEVERAL = ("text_encoders", "conditioner", "cond_stage_model")  # what follows is a component's name
