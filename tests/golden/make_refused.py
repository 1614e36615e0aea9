"""Checkpoints that a reader must refuse: `python tests/golden/make_refused.py` writes docs/vectors/refused.

Each is a sound model of one layer but for one fault. refused.json says of each what is wrong, and what of fluxq finds
it: whatever loads it, or, where numbers alone are wrong, `fluxq verify`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from make_vectors import VECTORS, layer_of, write, write_config, write_json
from torch import Tensor

from fluxq.kernels.tensor import swizzle_scales
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.formats import Scheme

NAME, FILE = "layers.refused", "diffusion_pytorch_model.safetensors"
STEPPED = "nvfp4-nvfp4-static-center-smooth-h16"


@dataclass
class Model:
    """A sound model of one layer, and a Linear in 16 bit.

    said: the quantization_config. parts: tensors of the layer by their last names, more: others by their whole names.
    damage: function of the bytes of the weight file, which become others. shard: a second weight file, listed by an
    index. in_two: the layer's tensors and the others are in a file each instead, whose index this function changes;
    the second file repeats `repeated` of the layer's with other numbers.
    """

    scheme: str = STEPPED
    k: int = 32
    of_transformers: bool = False

    def __post_init__(self) -> None:
        dtype = torch.float16 if self.of_transformers else torch.bfloat16
        self.parts = layer_of("refused", self.scheme, dtype, 2, self.k)
        if self.of_transformers:
            self.parts["weight"] = self.parts["weight"].unsqueeze(-1)
        self.more = {"plain.weight": torch.ones(4, 16, dtype=dtype), "plain.bias": torch.zeros(4, dtype=dtype)}
        self.linears = {"refused": [2, self.k, "bias" in self.parts]}
        self.damage: Callable[[bytes], bytes] = bytes
        self.shard, self.repeated = "", ""
        self.in_two: Callable[[dict[str, str]], dict[str, str]] | None = None
        self.said = QuantizationConfig.of([(NAME, Scheme.parse(self.scheme))]).to_dict()

    def write(self, folder: Path) -> None:
        """Write config.json and the weight file."""
        write_config(folder, self.linears, self.said, self.of_transformers)
        parts = {f"{NAME}.{part}": tensor.contiguous() for part, tensor in self.parts.items()}
        file = folder / ("model.safetensors" if self.of_transformers else FILE)
        write(file, parts | self.more)
        file.write_bytes(self.damage(file.read_bytes()))
        if self.shard:
            write(folder / self.shard, parts | self.more)
            write_index(folder, dict.fromkeys(parts | self.more, self.shard))
        if self.in_two is not None:
            file.unlink()
            again = {name: tensor + 1 for name, tensor in parts.items() if name == f"{NAME}.{self.repeated}"}
            held = (parts, self.more | again)
            files = [f"diffusion_pytorch_model-0000{count}-of-00002.safetensors" for count in (1, 2)]
            for name, tensors in zip(files, held, strict=True):
                write(folder / name, tensors)
            write_index(folder, self.in_two(dict.fromkeys(parts, files[0]) | dict.fromkeys(self.more, files[1])))


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    write_json(folder / f"{FILE}.index.json", {"metadata": {}, "weight_map": weight_map})


Fault = Callable[[Model], object]
Case = tuple[str, Callable[[], Model], Fault]  # what is wrong, a sound model, and the fault


def says(**changes: Any) -> Fault:
    """Return the fault of a quantization_config that says otherwise."""
    return lambda model: model.said.update(changes)


def calls(*texts: str) -> Fault:
    """Return the fault of a layer under other schemes."""
    return says(layers={text: [NAME] for text in texts})


def lacks(part: str) -> Fault:
    """Return the fault of a tensor that is missing."""
    return lambda model: model.parts.pop(part)


def stores(part: str, how: Callable[[Tensor], Tensor]) -> Fault:
    """Return the fault of a tensor that is another."""
    return lambda model: model.parts.update({part: how(model.parts[part])})


def holds(part: str, value: float) -> Fault:
    """Return the fault of a first number, or byte of one that has 8 bits, that is another."""

    def with_value(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        (changed.view(torch.uint8) if changed.element_size() == 1 else changed).view(-1)[0] = value
        return changed

    return stores(part, with_value)


def adds(**more: Tensor) -> Fault:
    """Return the fault of tensors too many: MODULE__PART."""
    return lambda model: model.more.update({name.replace("__", "."): tensor for name, tensor in more.items()})


def both(*faults: Fault) -> Fault:
    return lambda model: [fault(model) for fault in faults]


def damages(how: Callable[[bytes], bytes]) -> Fault:
    """Return the fault of a weight file of other bytes."""
    return lambda model: setattr(model, "damage", how)


def moves(by: int, gap: bytes = b"", begin: int = 0) -> Fault:
    """Return the fault of offsets that are `by` higher from byte `begin` of the data on, where `gap` is put in."""

    def moved(data: bytes) -> bytes:
        first = 8 + int.from_bytes(data[:8], "little")
        header, data = json.loads(data[8:first]), data[first:]
        header.pop("__metadata__")  # so that the header keeps a length with room for other offsets
        for said in header.values():
            said["data_offsets"] = [at + by if said["data_offsets"][0] >= begin else at for at in said["data_offsets"]]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data[:begin] + gap + data[begin:]

    return damages(moved)


def second_set(model: Model) -> None:
    """Put shards and their index beside the weight file."""
    model.shard = "diffusion_pytorch_model-00001-of-00001.safetensors"


def splits(change: Callable[[dict[str, str]], dict[str, str]] = dict, repeated: str = "") -> Fault:
    """Return the fault of two weight files whose index is another, or which both hold a tensor of the layer."""
    return lambda model: vars(model).update(in_two=change, repeated=repeated)


BRANCH = {"svdquant_lora_a": torch.ones(1, 32).bfloat16(), "svdquant_lora_b": torch.ones(2, 1).bfloat16()}
CODES = {"plain__weight": torch.ones(4, 16, dtype=torch.int8), "plain__weight_scale": torch.ones(4)}
LOADING: dict[str, Case] = {
    "newer_version": ("format_version is 2", Model, says(format_version=2)),
    "version_0": ("format_version is 0", Model, says(format_version=0)),
    "version_as_float": ("format_version is 1.0, no whole number", Model, says(format_version=1.0)),
    "no_version": ("format_version is missing", Model, lambda model: model.said.pop("format_version")),
    "unknown_feature": ("required_features has `sparse`", Model, says(required_features=["sparse"])),
    "no_features": ("required_features is missing", Model, lambda model: model.said.pop("required_features")),
    "features_left_out": ("required_features lacks those of the scheme", Model, says(required_features=[])),
    "feature_too_many": (
        "required_features has one that no scheme needs",
        partial(Model, "int8-int8"),
        says(required_features=["smooth"]),
    ),
    "no_layers": ("layers is empty", Model, says(layers={})),
    "two_schemes": ("a layer has two schemes", Model, calls(STEPPED, "nvfp4-16bit")),
    "unknown_format": ("no such format of weights", Model, calls("nvfp6-16bit")),
    "unknown_activations": ("no such format of activations", Model, calls("nvfp4-nvfp6")),
    "unknown_step": ("the scheme ends in `-x3`", Model, calls(f"{STEPPED}-x3")),
    "steps_out_of_order": (
        "the scheme names smooth before center",
        Model,
        calls("nvfp4-nvfp4-static-smooth-center-h16"),
    ),
    "unknown_rotation": ("Hadamard blocks of 24 columns", Model, calls("nvfp4-nvfp4-static-center-smooth-h24")),
    "unknown_regular_rotation": (
        "blocks of 32 columns of the regular matrix",
        partial(Model, "int8-int8-hr16"),
        calls("int8-int8-hr32"),
    ),
    "leading_zero": ("the scheme says h016", Model, calls("nvfp4-nvfp4-static-center-smooth-h016")),
    "other_digits": ("the scheme says h16 in Arabic digits", Model, calls("nvfp4-nvfp4-static-center-smooth-h١٦")),
    "int4_g64": ("the scheme says int4_g64, which is int4", partial(Model, "int4-16bit", 64), calls("int4_g64-16bit")),
    "static_int8": ("int8 has no calibrated scale of x", partial(Model, "int8-int8"), calls("int8-int8-static")),
    "four_over_six_fp8": ("fp8 has no choice of two scales", partial(Model, "fp8-fp8"), calls("fp8-fp8-46")),
    "ragged_blocks": (
        "K = 48 is not in blocks of 32",
        partial(Model, "fp8-16bit", 48),
        both(calls("mxfp8-16bit"), stores("weight_scale", lambda t: t.to(torch.uint8).reshape(2, 1) + 127)),
    ),
    "ragged_rotation": (
        "K = 48 is not in blocks of 32",
        partial(Model, "nvfp4-nvfp4-h16", 48),
        calls("nvfp4-nvfp4-h32"),
    ),
    "too_many_directions": ("33 directions of 32 columns", partial(Model, "int8-int8-d33"), both()),
    "no_scale": ("weight_scale is missing", Model, lacks("weight_scale")),
    "no_global_scale": ("weight_scale_2 is missing", Model, lacks("weight_scale_2")),
    "no_mean": ("pre_quant_mean is missing", Model, lacks("pre_quant_mean")),
    "no_bias": ("bias is missing, in a layer that centers", Model, lacks("bias")),
    "surplus_branch": ("a branch that the scheme has not", Model, lambda model: model.parts.update(BRANCH)),
    "unannounced_layer": ("codes and scales of a module without a scheme", Model, adds(**CODES)),
    "unannounced_scale": ("a scale beside a 16-bit weight", Model, adds(plain__weight_scale=torch.ones(4))),
    "dtype_of_codes": ("weight is I8, not U8", Model, stores("weight", lambda t: t.view(torch.int8))),
    "dtype_of_scales": ("weight_scale is F32, not F8_E4M3", Model, stores("weight_scale", Tensor.float)),
    "dtype_of_global_scale": ("weight_scale_2 is BF16, not F32", Model, stores("weight_scale_2", Tensor.bfloat16)),
    "unpacked_codes": ("weight has a byte for each code", Model, stores("weight", lambda t: t.repeat(1, 2))),
    "swizzled_scales": ("weight_scale in the order of a matrix unit", Model, stores("weight_scale", swizzle_scales)),
    "three_axes": ("codes with an axis too many, of diffusers", Model, stores("weight", lambda t: t.unsqueeze(-1))),
    "two_axes": (
        "codes with an axis too few, of transformers",
        partial(Model, "int8-16bit", of_transformers=True),
        stores("weight", lambda t: t.squeeze(-1)),
    ),
    "cut_off": ("the weight file ends too soon", Model, damages(lambda data: data[:-8])),
    "goes_on": ("the weight file has bytes behind its tensors", Model, damages(lambda data: data + bytes(8))),
    "hole": ("8 bytes before the tensors, of none of them", Model, moves(8, bytes(8))),
    "overlap": ("all tensors but the first begin 2 bytes too soon", Model, moves(-2, begin=2)),
    "negative_offset": ("the first tensors begin before the data", Model, moves(-8)),
    "two_sets": ("a weight file, and an index of another", Model, second_set),
    "in_two_files": ("both weight files hold pre_quant_mean", Model, splits(repeated="pre_quant_mean")),
    "index_lacks": (
        "the index names no file of plain.bias",
        Model,
        splits(lambda files: {name: file for name, file in files.items() if name != "plain.bias"}),
    ),
    "index_of_more": (
        "the index names a tensor that no file holds",
        Model,
        splits(lambda files: {**files, "other.bias": files["plain.bias"]}),
    ),
    "paths_in_index": (
        "the index names files by paths",
        Model,
        splits(lambda files: {name: f"./{file}" for name, file in files.items()}),
    ),
    "long_header": (
        "the header is said to be longer than the file",
        Model,
        damages(lambda d: b"\xff" * 7 + b"\0" + d[8:]),
    ),
}
E5M2, MX = partial(Model, "fp8_e5m2-16bit"), partial(Model, "mxfp4-mxfp4")
VERIFY: dict[str, Case] = {
    "nan_code": ("a code of E4M3 is NaN", partial(Model, "fp8-fp8"), holds("weight", 0x7F)),
    "infinite_code": ("a code of E5M2 is infinite", E5M2, holds("weight", 0x7C)),
    "nan_scale": ("a scale of E4M3 is NaN", Model, holds("weight_scale", 0x7F)),
    "zero_scale": ("a scale of E4M3 is 0", Model, holds("weight_scale", 0)),
    "negative_scale": ("a scale of E4M3 is negative", Model, holds("weight_scale", 0x81)),
    "e8m0_0": ("a scale of E8M0 is byte 0", MX, holds("weight_scale", 0)),
    "e8m0_255": ("a scale of E8M0 is byte 255, NaN", MX, holds("weight_scale", 255)),
    "infinite_global_scale": ("weight_scale_2 is infinite", Model, holds("weight_scale_2", torch.inf)),
    "zero_input_scale": ("input_scale is 0", Model, holds("input_scale", 0)),
    "negative_factor": ("a factor of pre_quant_scale is negative", Model, holds("pre_quant_scale", -1)),
    "nan_mean": ("a number of pre_quant_mean is NaN", Model, holds("pre_quant_mean", torch.nan)),
    "infinite_bias": ("a number of bias is infinite", Model, holds("bias", torch.inf)),
}


def main(folder: Path = VECTORS) -> None:
    """Write all cases anew."""
    said = {}
    for found_by, cases in (("loading", LOADING), ("verify", VERIFY)):
        for name, (why, make, fault) in cases.items():
            model = make()
            fault(model)
            model.write(folder / "refused" / name)
            said[name] = {"why": why, "found_by": found_by}
    write_json(folder / "refused.json", said)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
