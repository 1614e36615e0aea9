"""A model in a file or folder, whoever wrote it: container, dialect and why, layers, and what is in 16 bit.

Only headers and configurations are read until a tensor is asked for. Which dialect it is follows from the marks in
`marks.py`; every mark that speaks for another one is kept as a contradiction. The nibble order and the order of block
scales stand nowhere in a file, and `inspect` proves them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.files import read_json
from fluxq.base.model import PICKLES, ModelFolder, require_harmless
from fluxq.base.tensors import Stored, TensorFile, by_tensor
from fluxq.kernels.tensor import stored_shapes
from fluxq.quantize.checkpoint import QuantizationConfig
from fluxq.quantize.exchange import nunchaku_file
from fluxq.quantize.exchange.bnb import STATE, shape_of, state_of
from fluxq.quantize.exchange.compressed_tensors import bits_of
from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.gguf_file import GGUFFile
from fluxq.quantize.exchange.layer import Plain, QuantTensors
from fluxq.quantize.exchange.layouts import padded
from fluxq.quantize.exchange.marks import (
    CODES,
    FLOATS,
    MODELOPTS,
    NATIVE,
    PLAIN,
    SIGNS,
    UNDECIDED,
    dialect_of,
    grouped,
    is_quantized,
    json_object,
    other_program,
    said_by_comfy,
)
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Family
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymap_rows import SAME_NAMES
from fluxq.recipes.keymaps import CHECKPOINT_PREFIX, ORIGINALS, Joined, diffusers_names


@dataclass(frozen=True)
class FileLayer:
    """A quantized layer of a file.

    name: of its module, as the file has it. parts: what follows the name (as `decode` takes it) -> the whole name.
    entry: what the file says of the layer elsewhere. shape: of the weight, (N, K), from shapes and bias alone.
    """

    name: str
    parts: Mapping[str, str]
    stored: Mapping[str, Stored]
    entry: Mapping[str, Any]
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Of all that is stored for the weight, the bias too where centring makes it part of this (`stored_bits`)."""
        names = {suffix: suffix.rpartition(".")[2] for suffix in self.stored}
        left_out = () if "pre_quant_mean" in names.values() else ("bias",)
        return sum(stored.nbytes for suffix, stored in self.stored.items() if names[suffix] not in left_out)


class ModelFile:
    """One model, that is one component, in one file or several.

    container: in words. dialect: a key of DIALECTS, NATIVE or PLAIN. evidence: what tells it; contradictions: what
    speaks for another. names: of its modules, "diffusers", "original" or "nunchaku". family: None where no row knows
    them.
    disabled: module in 16 bit -> suffix -> tensor, of what calibration took out of its weight before its quantizer
    was disabled. groups: tensors that may be of a quantized layer, by module and suffix. layers: by name; plain:
    names of all other tensors. prefix: of the denoiser's names in a file that holds other components too; others:
    names of their tensors, of which nothing else here tells. faults: layer -> why it could not even be taken apart.
    undecided: dialects among which nothing in the file decides; `dialect` is the first guess.
    """

    def __init__(self, path: Path, files: list[TensorFile | GGUFFile], container: str, config: dict[str, Any]) -> None:
        self.path, self.container, self.config = path, container, config
        self._files = by_tensor(files)
        self.metadata = {key: text for file in files for key, text in file.metadata().items()}
        self.stored = {name: file.stored[name] for name, file in self._files.items()}
        is_whole = any(name.startswith(CHECKPOINT_PREFIX) for name in self.stored)
        self.prefix = CHECKPOINT_PREFIX if is_whole else ""
        own = {name: stored for name, stored in self.stored.items() if name.startswith(self.prefix)}
        self.others = [name for name in self.stored if name not in own]
        self.groups = grouped(own)
        self.undecided: tuple[str, ...] = ()
        self.dialect, self.evidence, self.contradictions = dialect_of(self)
        if self.contradictions == (UNDECIDED,):
            self.undecided = ("comfy", "bfl" if self.dialect == "comfy" else "modelopt")
        elif MODELOPTS in self.contradictions:
            self.undecided = ("comfy",)
        if self.others:
            self.container += f" with {', '.join(self.other_components())} beside the denoiser"
        self._take_apart()

    def read_as(self, dialect: str, why: str) -> ModelFile:
        """The same files, as of a dialect that something else than they told."""
        other = copy(self)
        for known in ("identity", "joined"):
            vars(other).pop(known, None)
        other.dialect, other.evidence, other.contradictions, other.undecided = dialect, (*self.evidence, why), (), ()
        other._take_apart()
        return other

    def _take_apart(self) -> None:
        self.faults: dict[str, str] = {}
        self.layers = {layer.name: layer for layer in self._read_layers()}
        if self.dialect == "nunchaku":
            self._pair_sides()
        taken = {name for layer in self.layers.values() for name in layer.parts.values()}
        plain = [name for name in self.stored if name.startswith(self.prefix) and name not in taken]
        self.disabled: dict[str, dict[str, str]] = {}
        for name in plain if self.dialect == "modelopt" else ():
            module, _, suffix = name.rpartition(".")
            if suffix in _OF_DISABLED and f"{module}.weight" in plain:
                self.disabled.setdefault(module, {})[suffix] = name
        apart = {name for parts in self.disabled.values() for name in parts.values()}
        self.plain = [name for name in plain if name not in apart]

    def other_components(self) -> dict[str, tuple[int, int]]:
        """Name -> (tensors, bytes) of what lies beside the denoiser in its file."""
        found: dict[str, tuple[int, int]] = {}
        for name in self.others:
            first, *rest = name.split(".")
            component = ".".join([first, *rest[: first in _OF_SEVERAL]])
            count, nbytes = found.get(component, (0, 0))
            found[component] = count + 1, nbytes + self.stored[name].nbytes
        return found

    @property
    def unread(self) -> dict[str, list[str]]:
        """Layer -> tensors beside its codes that its dialect does not know, and what of a layer has no codes."""
        found: dict[str, list[str]] = {}
        alone = {
            name: module
            for module, parts in self.groups.items()
            for suffix, name in parts.items()
            if module not in self.layers and module not in self.faults and suffix not in ("weight", "bias")
        }
        for name in self.plain:
            if name in alone:
                found.setdefault(alone[name], []).append(name[len(alone[name]) + 1 :])
                continue
            module, _, _ = name.removesuffix("._data").rpartition(".")
            for layer in (module, module.rpartition(".")[0]):  # some put a layer's tensors one level down
                if layer in self.layers:
                    found.setdefault(layer, []).append(name[len(layer) + 1 :])
                    break
        return found

    @property
    def unknown_method(self) -> str:
        """The program that wrote the layers, where no dialect has it; "" otherwise."""
        return other_program(self)

    @property
    def files(self) -> list[Path]:
        """Of safetensors or GGUF, those that hold the model."""
        return list(dict.fromkeys(file.path for file in self._files.values()))

    @property
    def quantization(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        said = self.config.get("quantization_config")
        return said if isinstance(said, dict) else {}

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        return self._files[name].get_tensor(name)

    def read_plain(self, name: str) -> Tensor:
        """A tensor that is not quantized; a weight with what ModelOpt had taken out of it put back."""
        tensor, (module, _, suffix) = self.read(name), name.rpartition(".")
        left = {part: self.read(held).float() for part, held in self.disabled.get(module, {}).items()}
        if suffix != "weight" or not left:
            return tensor
        n, k = tensor.shape if tensor.ndim == 2 else (0, 0)
        smooth = left.get("pre_quant_scale", torch.ones((), dtype=torch.float32))
        a = left.get("svdquant_lora_a", torch.zeros(0, k, dtype=torch.float32))
        b = left.get("svdquant_lora_b", torch.zeros(n, 0, dtype=torch.float32))
        fits = smooth.shape in ((), (k,)) and a.ndim == b.ndim == 2 and (*b.shape, *a.shape) == (n, len(a), len(a), k)
        if not fits or not all(torch.isfinite(part).all() for part in (smooth, a, b)) or not (smooth > 0).all():
            raise ValueError(f"{module}: what ModelOpt had taken out of its weight is damaged; get the file again")
        return ((tensor.float() + b @ a) * smooth).to(tensor.dtype)

    def read_layer(self, layer: FileLayer) -> dict[str, Tensor]:
        """The tensors of a layer as `decode` takes them."""
        return {suffix: self.read(name) for suffix, name in layer.parts.items()}

    def decode(
        self, layer: FileLayer, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None
    ) -> QuantTensors | Plain:
        """Decode the tensors of a layer by the file's dialect; ValueError where they are not of it."""
        shape = shape or layer.shape
        if self.dialect == NATIVE:
            held = dict(tensors)
            if "weight" in held and held["weight"].ndim == 3:  # text encoders' codes, `filed_shape`
                held["weight"] = held["weight"].squeeze(-1)
            scheme = Scheme.parse(layer.entry["scheme"])
            for suffix, (size, dtype) in stored_shapes(scheme.weights, *shape).items():
                if suffix not in held or (tuple(held[suffix].shape), held[suffix].dtype) != (size, dtype):
                    raise ValueError(f"{layer.name}: {scheme} asks for {suffix} {dtype} {size}; copy the file again")
            return QuantTensors(held, shape, scheme)
        return DIALECTS[self.dialect].decode(tensors, shape, layer.entry)

    @cached_property
    def identity(self) -> tuple[Family | None, str]:
        """The family, and whether modules go by "diffusers", "original" or "nunchaku" names."""
        return _identify(self)

    @property
    def family(self) -> Family | None:
        return self.identity[0]

    @property
    def names(self) -> str:
        return self.identity[1]

    @cached_property
    def joined(self) -> dict[str, Joined]:
        """Tensor in the file (weights of quantized layers under `<name>.weight`) -> what of diffusers it joins.

        ValueError that names the tensor that no row of recipes/families knows.
        """
        held = self.of_model()
        if self.names == "nunchaku":
            return {name: Joined(name, _of_nunchaku(name)) for name in held}
        if self.names == "diffusers" or self.family is None:
            bare = {name: name.removeprefix(self.prefix) for name in held}
            return {name: Joined(own, (own,)) for name, own in bare.items()}
        return {self.prefix + each.original: each for each in diffusers_names(self.family.name, held)}

    def of_model(self) -> list[str]:
        """Names of the tensors that it stands for: weight and bias of a quantized layer, and what is plain."""
        found = [f"{name}.weight" for name in self.layers]
        found += [f"{name}.bias" for name, layer in self.layers.items() if "bias" in layer.parts]
        return found + [name for name in self.plain if name not in SIGNS]

    def linears_in_16_bit(self) -> dict[str, tuple[int, int]]:
        """Matrices that are not quantized, by module."""
        found = {}
        for name in self.plain:
            stored = self.stored[name]
            if name.endswith(".weight") and len(stored.shape) == 2 and stored.dtype in FLOATS:
                found[name.removesuffix(".weight")] = (stored.shape[0], stored.shape[1])
        return found

    def _read_layers(self) -> Iterator[FileLayer]:
        if self.dialect == PLAIN:
            return
        schemes = QuantizationConfig.from_dict(self.quantization).schemes if self.dialect == NATIVE else {}
        for name, parts in self.groups.items():
            stored = {suffix: self.stored[whole] for suffix, whole in parts.items()}
            if not is_quantized(stored, self.dialect):
                continue
            if self.dialect == "bnb" and "weight" in stored and stored["weight"].dtype.startswith("F8"):
                continue  # a plain cast beside the codes
            if self.dialect == NATIVE:
                if name not in schemes:
                    self.faults[name] = "has codes, and config.json names no scheme for it; copy both files again"
                    continue
                entry: dict[str, Any] = {"scheme": str(schemes[name])}
            try:
                if self.dialect != NATIVE:
                    entry = _ENTRIES[self.dialect](self, name, stored)
                shape = self._shape(stored, entry, parts)
            except ValueError as error:
                self.faults[name] = str(error)
                continue
            yield FileLayer(name, parts, stored, entry, shape)

    def _pair_sides(self) -> None:
        """Make one layer of the two that stand for a single block's `proj_out`."""
        first, rest = nunchaku_file.SIDES
        for name in [name for name in self.layers if nunchaku_file.parts_of(name) and name.startswith(_SINGLE)]:
            block, _, member = name.rpartition(".")
            if member not in nunchaku_file.SIDES or name not in self.layers:
                continue
            other = self.layers.get(f"{block}.{rest if member == first else first}")
            if other is None or other.shape[0] != self.layers[name].shape[0]:
                self.faults[name] = f"is a part of proj_out without the other, {first} or {rest}; get the file again"
                continue
            sides = {side: self.layers.pop(f"{block}.{side}") for side in nunchaku_file.SIDES}
            shape = sides[first].shape[0], sides[first].shape[1] + sides[rest].shape[1]
            whole = f"{block}.{first}+{rest}"
            self.layers[whole] = FileLayer(
                whole,
                {f"{side}.{suffix}": part for side, layer in sides.items() for suffix, part in layer.parts.items()},
                {f"{side}.{suffix}": part for side, layer in sides.items() for suffix, part in layer.stored.items()},
                {**sides[rest].entry, "columns": sides[first].shape[1]},
                shape,
            )

    def _shape(
        self, stored: Mapping[str, Stored], entry: Mapping[str, Any], parts: Mapping[str, str]
    ) -> tuple[int, int]:
        """(N, K) of a layer; N is that of the bias where padding hides it."""
        if self.dialect == "bnb":
            states = [parts[suffix] for suffix in parts if suffix.startswith(STATE)]
            if not states:
                raise ValueError("has codes and no quant_state; 8-bit layers of bitsandbytes are not read here")
            return shape_of(state_of(self.read(states[0])))
        suffix = next(suffix for suffix in CODES if suffix in stored)
        codes = stored[suffix]
        if len(codes.shape) not in (2, 3):
            raise ValueError(f"{suffix} has the shape {codes.shape}, and that of a weight has 2 sizes")
        rows, columns = codes.shape[:2]
        if self.dialect == "gguf":
            return rows, columns
        if suffix == "qweight" and codes.dtype == "I32":
            return 4 * rows, 2 * columns
        if suffix == "weight_packed" and codes.dtype == "I32":
            scale = stored.get("weight_scale")
            bits = bits_of(entry)
            return rows, columns * 32 // bits if scale else columns
        if entry.get("quant_algo") == "W4A16_AWQ":
            return 2 * rows, columns
        four_bits = codes.dtype == "U8" or (codes.dtype == "I8" and (suffix == "qweight" or _is_int4(entry)))
        bias = stored.get("bias")
        if self.dialect == "comfy" and bias and len(bias.shape) == 1 and padded(bias.shape[0], 32) >= rows:
            rows = min(rows, bias.shape[0])
        return rows, columns * 2 if four_bits else columns


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
        held = {name: path / name for name in folder.components if Path(name).name == name}
        return {
            name: open_component(part, "component of a pipeline folder")
            for name, part in held.items()
            if (part / "config.json").is_file() and any(part.glob("*.safetensors"))
        }
    return {"": open_component(path, "folder of one model")}


def open_model(path: Path) -> ModelFile:
    """The one model of a file or folder; of a pipeline's, the quantized one, or else the denoiser. As `open_models`."""
    models = open_models(path)
    quantized = {name: model for name, model in models.items() if model.dialect != PLAIN}
    for found in (quantized, {name: models[name] for name in ("transformer", "unet") if name in models}, models):
        if len(found) == 1:
            return next(iter(found.values()))
    raise ValueError(f"{path}: holds {', '.join(quantized or models) or 'no models'}; give the folder of one of them")


def open_component(path: Path, container: str) -> ModelFile:
    """The model in a folder of config.json and safetensors."""
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    files = _weight_files(path)
    _require_inside(path, files)
    sharded = f", {len(files)} files" if len(files) > 1 else ""
    return ModelFile(path, [TensorFile(file) for file in files], container + sharded, config)


def _open_file(path: Path) -> ModelFile:
    if path.suffix.lower() in PICKLES:
        raise ValueError(f"{path}: a pickle, which runs code as it is read; get it as safetensors")
    with path.open("rb") as stream:
        head = stream.read(4)
    if head == b"GGUF":
        return ModelFile(path, [GGUFFile(path)], "GGUF file", {})
    index = path.name.endswith(".safetensors.index.json")
    if index:
        stem = path.name.removesuffix(".safetensors.index.json")
        files = sorted(path.parent.glob(f"{stem}*.safetensors"))
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


def _weight_files(path: Path) -> list[Path]:
    alone = sorted(path.glob("*.safetensors"))
    if len(alone) == 1 and not list(path.glob("*.safetensors.index.json")):
        return alone
    return ModelFolder(path.name, path.parent).weight_files(path.name)


def _require_inside(folder: Path, files: list[Path]) -> None:
    """ValueError for a link out of the folder, the hub's cache excepted."""
    root = folder.resolve()
    places = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    for file in files:
        if not any(Path(os.path.realpath(file)).is_relative_to(place) for place in places):
            raise ValueError(f"{file}: a link that leads out of the folder; put the file itself there")


# --- layers

_OF_DISABLED = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "input_scale")


def _is_int4(entry: Mapping[str, Any]) -> bool:
    return entry.get("format") in ("awq_w4a16", "convrot_w4a4", "asym_w4a8_int8")


def _comfy_entry(model: ModelFile, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    from fluxq.quantize.exchange.comfy import read_entry

    if "comfy_quant" in stored:
        return read_entry(model.read(f"{name}.comfy_quant"))
    said = said_by_comfy(model).get(name)
    return dict(said) if isinstance(said, dict) else {"format": _guess(stored, _COMFY_WORDS)}


def _modelopt_entry(model: ModelFile, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    config = model.quantization
    layers = config.get("quantized_layers")
    said = layers.get(name) if isinstance(layers, dict) else None
    if isinstance(said, dict):
        return dict(said)
    algo = config.get("quant_algo")
    if isinstance(algo, str) and algo != "MIXED_PRECISION":
        return {"quant_algo": algo}
    guess = _guess(stored, _MODELOPT_WORDS)
    if guess == "NVFP4" and not any("input_scale" in parts for parts in model.groups.values()):
        guess = "W4A16_NVFP4"
    return {"quant_algo": guess}


def _torchao_entry(model: ModelFile, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    text = model.metadata.get(f"{name}.weight")
    if text is None:
        raise ValueError(f"the header does not say what class {name}.weight is of; the file is not whole")
    return json_object(text, f"the header's entry for {name}.weight")


def _compressed_entry(model: ModelFile, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    config = model.quantization
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        targets = group.get("targets") if isinstance(group, dict) else None
        for target in targets if isinstance(targets, list) else ():
            if target in ("Linear", name) or (isinstance(target, str) and _is_target(target, name)):
                return {"format": config.get("format"), **{k: v for k, v in group.items() if v is not None}} | {
                    "input_activations": group.get("input_activations")
                }
    if not groups:
        raise ValueError(
            "its own config.json says how it is quantized, and is not there, nor does a base say it; get the folder, "
            "not the file alone"
        )
    raise ValueError(f"no config group of config.json is for {name}; the folder is not whole")


def _is_target(target: str, name: str) -> bool:
    if not target.startswith("re:") or len(target) > 200:
        return False
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error:
        return False


def _legacy_entry(model: ModelFile, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    sign = next((model.stored[key] for key in SIGNS if key in model.stored), None)
    return {"scaled_fp8": sign.shape[0] if sign and len(sign.shape) == 1 else 2}


def _nunchaku_entry(model: ModelFile, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    found = nunchaku_file.parts_of(name) if model.dialect == "nunchaku" else None
    if found is None:
        return {}
    _, row = found
    is_int4 = "wscales" in stored and stored["wscales"].dtype in FLOATS
    said: dict[str, Any] = {"chunks": row.chunks} if row.chunks else {}
    return said | ({"act_unsigned": True} if row.after_gelu and is_int4 else {})


def _of_nunchaku(name: str) -> tuple[str, ...]:
    """Return the names in diffusers of a tensor of nunchaku's file."""
    module, _, suffix = name.rpartition(".")
    found = nunchaku_file.parts_of(module)
    return tuple(f"{part}.{suffix}" for part in found[0]) if found else (nunchaku_file.diffusers_name(name),)


def _weight_of(stored: Mapping[str, Stored]) -> Stored:
    if "weight" not in stored:
        raise ValueError("the layer has no weight; it is not of this dialect, or not whole")
    return stored["weight"]


def _guess(stored: Mapping[str, Stored], words: Mapping[str, str]) -> str:
    """A format's name in a dialect, from dtypes and shapes alone."""
    weight, scale = _weight_of(stored), stored.get("weight_scale")
    if "weight_scale_2" in stored:
        kind = "nvfp4"
        if words is _MODELOPT_WORDS and "svdquant_lora_a" in stored:
            return "NVFP4_SVD"
        if words is _MODELOPT_WORDS and "pre_quant_scale" in stored:
            return "NVFP4_AWQ"
    elif weight.dtype == "I8":
        kind = "int8 static" if "input_scale" in stored else "int8"
    elif scale is None:
        raise ValueError("the layer has no weight_scale; it is not of this dialect, or not whole")
    elif weight.dtype == "U8":
        kind = "mxfp4" if scale.dtype == "U8" else "int4"
    else:
        in_blocks = scale.dtype in ("U8", "F8_E8M0")
        kind = "mxfp8" if in_blocks else "fp8" if len(scale.shape) and scale.shape[0] > 1 else "fp8_tensor"
    if kind not in words:
        raise ValueError(f"nothing says the layer's format, and its tensors look like {kind}, which is not read here")
    return words[kind]


_COMFY_WORDS = {
    **{"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8_tensor": "float8_e4m3fn"},
    **{"int8": "int8_tensorwise", "int8 static": "int8_tensorwise"},
}
_MODELOPT_WORDS = {
    **{"nvfp4": "NVFP4", "mxfp8": "MXFP8", "mxfp4": "mxfp4", "fp8": "FP8_PER_CHANNEL_PER_TOKEN", "fp8_tensor": "FP8"},
    **{"int8": "W8A16", "int8 static": "W8A8_SQ_PER_CHANNEL", "int4": "W4A16_AWQ"},
}
_ENTRIES: dict[str, Callable[[ModelFile, str, Mapping[str, Stored]], dict[str, Any]]] = {
    "comfy": _comfy_entry,
    "modelopt": _modelopt_entry,
    "torchao": _torchao_entry,
    "compressed_tensors": _compressed_entry,
    "legacy": _legacy_entry,
    "nunchaku": _nunchaku_entry,
    "nunchaku_lite": _nunchaku_entry,
    "bfl": lambda model, name, stored: {},
    "bnb": lambda model, name, stored: {},
    "fp8_blocks": lambda model, name, stored: {"block": model.quantization.get("weight_block_size")},
    "gguf": lambda model, name, stored: {"type": _weight_of(stored).dtype},
}


# --- families


def _identify(model: ModelFile) -> tuple[Family | None, str]:
    """(family, "diffusers", "original" or "nunchaku"), from config.json or the names."""
    if model.dialect == "nunchaku" and all(nunchaku_file.parts_of(name) for name in model.layers):
        return FAMILIES["flux"], "nunchaku"
    said = model.config.get("_class_name"), *_listed(model.config.get("architectures"))
    named = [family for family in FAMILIES.values() if family.model in said]
    modules = [*model.layers, *model.linears_in_16_bit()]
    bare = [name.removeprefix(model.prefix) for name in modules]
    tensors = [name.removeprefix(model.prefix) for name in model.of_model()]
    scores: Counter[tuple[str, str]] = Counter()
    for family in named or FAMILIES.values():
        if family.library == "diffusers" or named:
            scores[family.name, "diffusers"] = sum(_is_known(family, module) for module in bare)
        if family.name in ORIGINALS and family.originals != SAME_NAMES:
            scores[family.name, "original"] = _mapped(family.name, bare, tensors)
    (found, names), score = scores.most_common(1)[0]
    if 2 * score <= len(bare):
        return (named[0] if named else None), "diffusers"
    return FAMILIES[found], names


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_known(family: Family, module: str) -> bool:
    return family.locate(module) is not None or family.kept(module) is not None


def _mapped(family: str, modules: list[str], tensors: list[str]) -> int:
    """Count the modules that a row of the key map knows; one more where it knows every tensor.

    Linears of Sana go by the names of PixArt's, convolutions do not; a UNet's blocks are not told from Linears alone.
    """
    if _knows(family, tensors):
        return len(modules) + 1
    if _knows(family, modules):
        return len(modules)
    count = 0
    for module in modules:
        try:
            count += len(diffusers_names(family, [module]))
        except ValueError:
            continue
    return count


def _knows(family: str, names: list[str]) -> bool:
    try:
        diffusers_names(family, names)
    except ValueError:
        return False
    return bool(names)


_OF_SEVERAL = ("text_encoders", "conditioner", "cond_stage_model")  # what follows is a component's name
_SINGLE = "single_transformer_blocks."
