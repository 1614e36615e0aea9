"""Facts of a file that are known before a tensor is read, and marks of the program that wrote it, made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored, TensorFile
from fluxq.base.tensors import by_tensor as file_of_each
from fluxq.quantize.exchange.gguf_file import GGUFFile
from fluxq.recipes.formats import Scheme

NATIVE, PLAIN = "fluxq", "16 bit"  # beside the keys of DIALECTS
CODES = ("weight", "qweight", "weight_packed", "_weight_qdata")
GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale", "_weight_per_tensor_scale")
FLOATS = ("BF16", "F16", "F32", "F64")
_LONGEST = 1 << 12  # bytes of JSON in a tensor; they are some dozens or hundreds
_CODED = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")


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


class Headers:
    """The facts of a model's files that a dialect may ask for; `ModelFile` in files.py says what they are."""

    groups: dict[str, dict[str, str]]
    layers: dict[str, FileLayer]
    faults: dict[str, str]
    schemes: dict[str, Scheme]

    def __init__(
        self, path: Path, files: Sequence[TensorFile | GGUFFile], container: str, config: dict[str, Any]
    ) -> None:
        self.path, self.container, self.config = path, container, config
        self._files = file_of_each(files)
        self.metadata = {key: text for file in files for key, text in file.metadata().items()}
        self.stored = {name: file.stored[name] for name, file in self._files.items()}

    @property
    def quantization(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        config = self.config.get("quantization_config")
        return config if isinstance(config, dict) else {}

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        return self._files[name].get_tensor(name)


Mark = Callable[[Headers], str]  # what tells a dialect, in words; "" where nothing does


def by_config(*methods: str) -> Mark:
    """A mark: config.json has one of these as quant_method."""

    def mark(model: Headers) -> str:
        method = model.quantization.get("quant_method")
        return f"config.json says quant_method {method}" if method in methods else ""

    return mark


def by_tensor(*suffixes: str) -> Mark:
    """A mark: layers have tensors of all these suffixes."""

    def mark(model: Headers) -> str:
        count = sum(all(suffix in parts for suffix in suffixes) for parts in model.groups.values())
        return f"{count} layers have {' and '.join(suffixes)}" if count else ""

    return mark


def has_codes(stored: Mapping[str, Stored], sizes: tuple[int, ...] = (2,)) -> bool:
    """Tell whether tensors are a quantized layer's, by dtype and shape. sizes: numbers of them that codes may have."""
    codes = codes_in(stored)
    return codes is not None and len(codes.shape) in sizes and codes.dtype in _CODED


def codes_in(stored: Mapping[str, Stored]) -> Stored | None:
    """The tensor of a layer that its codes would be, or a weight in 16 bit; None where there is neither."""
    return next((stored[suffix] for suffix in CODES if suffix in stored), None)


def codes_of(stored: Mapping[str, Stored]) -> tuple[str, Stored, int, int]:
    """(suffix, codes, rows, columns) of a layer's codes, as they are stored; ValueError for what is no matrix."""
    suffix = next(suffix for suffix in CODES if suffix in stored)
    codes = stored[suffix]
    if len(codes.shape) not in (2, 3):
        raise ValueError(f"{suffix} has the shape {codes.shape}, and that of a weight has 2 sizes")
    return suffix, codes, codes.shape[0], codes.shape[1]


def matrix_shape(stored: Mapping[str, Stored], entry: Mapping[str, Any]) -> tuple[int, int]:
    """(N, K) of a layer whose codes lie row by row, two of 4 bits to a byte."""
    _, codes, rows, columns = codes_of(stored)
    return rows, columns * 2 if codes.dtype == "U8" else columns


def format_in_entry(layer: FileLayer) -> str:
    """The dialect's word for a layer's format, where its entry has one."""
    for key in ("scheme", "quant_algo", "format", "type", "_type"):
        if isinstance(layer.entry.get(key), str):
            return layer.entry[key]
    return "unknown"


def guess_format(stored: Mapping[str, Stored]) -> str:
    """A format of ours that a layer's dtypes and shapes look like; int8 may be "int8 static"."""
    weight, scale = weight_of(stored), stored.get("weight_scale")
    if "weight_scale_2" in stored:
        return "nvfp4"
    if weight.dtype == "I8":
        return "int8 static" if "input_scale" in stored else "int8"
    if scale is None:
        raise ValueError("the layer has no weight_scale; it is not of this dialect, or not whole")
    if weight.dtype == "U8":
        return "mxfp4" if scale.dtype == "U8" else "int4"
    in_blocks = scale.dtype in ("U8", "F8_E8M0")
    return "mxfp8" if in_blocks else "fp8" if len(scale.shape) and scale.shape[0] > 1 else "fp8_tensor"


def guess_word(stored: Mapping[str, Stored], words: Mapping[str, str]) -> str:
    """A dialect's word for `guess_format`; ValueError where it has none."""
    kind = guess_format(stored)
    if kind not in words:
        raise ValueError(f"nothing says the layer's format, and its tensors look like {kind}, which is not read here")
    return words[kind]


def weight_of(stored: Mapping[str, Stored]) -> Stored:
    """The layer's weight; ValueError where there is none."""
    if "weight" not in stored:
        raise ValueError("the layer has no weight; it is not of this dialect, or not whole")
    return stored["weight"]


def json_tensor(tensor: Tensor, what: str) -> dict[str, Any]:
    """The JSON object that the bytes of a tensor are; ValueError naming it."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or tensor.numel() > _LONGEST:
        raise ValueError(f"{what} is {tensor.dtype} {(*tensor.shape,)}, expected up to {_LONGEST} bytes of JSON")
    return json_object(bytes(tensor.tolist()), what)


def json_object(text: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object from a header; ValueError naming it, also where a key stands twice."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON ({error}); get the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object; get the file again")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in members if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return members
