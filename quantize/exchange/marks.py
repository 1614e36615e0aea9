"""Marks of the program that wrote a file, and what names and shapes tell where there are none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fluxq.base.tensors import Stored
from fluxq.quantize.checkpoint import QUANT_METHOD
from fluxq.quantize.exchange.bfl import said_formats
from fluxq.quantize.exchange.bnb import STATE
from fluxq.quantize.exchange.layouts import padded
from fluxq.recipes.keymaps import CHECKPOINT_PREFIX

NATIVE, PLAIN = "fluxq", "16 bit"  # beside the keys of DIALECTS


class Headers(Protocol):
    """Facts of a file that are known before a tensor is read: `ModelFile` in files.py."""

    path: Path
    container: str
    metadata: dict[str, str]
    stored: dict[str, Stored]
    groups: dict[str, dict[str, str]]

    @property
    def quantization(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        ...


def dialect_of(model: Headers) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(dialect, what tells it, what speaks for another)."""
    found = [(dialect, words) for dialect, mark in MARKS if (words := mark(model))]
    if not found:
        return _unmarked(model)
    dialect = found[0][0]
    mine = tuple(words for other, words in found if other == dialect)
    others = tuple(f"{words}, as {other} has it" for other, words in found if other != dialect)
    if dialect == "comfy":
        tensors = sum("comfy_quant" in parts for parts in model.groups.values())
        if not tensors:
            others += (
                "no comfy_quant tensors: ComfyUI reads the header instead, SGLang-Diffusion takes the file for linear "
                "scales and low nibbles first",
            )
            if any(other == "modelopt" for other, _ in found):
                others += (MODELOPTS,)
        elif not said_by_comfy(model):
            others += ("no _quantization_metadata beside the comfy_quant tensors",)
    return dialect, mine, others


def _unmarked(model: Headers) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Find the dialect by names and shapes, where nothing else tells it."""
    quantized = [
        stored
        for parts in model.groups.values()
        if is_quantized(stored := {suffix: model.stored[name] for suffix, name in parts.items()}, "")
    ]
    if not quantized:
        return PLAIN, ("no tensor has codes",), ()
    if not any("weight_scale" in stored for stored in quantized):
        scales = sorted({suffix for parts in model.groups.values() for suffix in parts} - {"weight", "bias"})
        said = f"8-bit floats, and nothing that is known as their scale{f': {scales}' if scales else ''}: a plain cast"
        return "legacy", (said,), ()
    linear = padding = False
    for stored in quantized:
        scale, weight = stored.get("weight_scale"), stored.get("weight")
        if "weight_scale_2" in stored and scale and weight and len(scale.shape) == len(weight.shape) == 2:
            rows, groups = weight.shape[0], weight.shape[1] // 8
            padding |= scale.shape != (rows, groups)
            linear |= scale.shape != (padded(rows, 128), padded(groups, 4))
    original = any(map(_PACKED.search, model.groups))
    if padding and not linear:
        return "comfy", ("no mark; block scales have the shapes of padded tiles",), ()
    if linear and not padding:
        dialect = "bfl" if original else "modelopt"
        return dialect, ("no mark; block scales have the shapes of the weights",), ()
    whole = [s for s in quantized if "weight_scale" in s and "weight" in s]
    columns = [s for s in whole if s["weight"].shape and s["weight_scale"].shape == (s["weight"].shape[0], 1)]
    if columns and not original:
        return "compressed_tensors", ("no mark; scales have the shape of a column",), ()
    if not any("weight_scale_2" in stored for stored in quantized):
        by_rows = any(
            len(s["weight_scale"].shape) == 1 and s["weight_scale"].shape[0] > 1
            for s in quantized
            if "weight_scale" in s
        )
        dialect = ("bfl" if by_rows else "comfy") if original else "modelopt"
        return dialect, ("no mark; by names and shapes alone",), ()
    dialect = "comfy" if original else "modelopt"
    return dialect, ("no mark; by names alone",), (UNDECIDED,)


def _by_config(*methods: str) -> Callable[[Headers], str]:
    def mark(model: Headers) -> str:
        method = model.quantization.get("quant_method")
        return f"config.json says quant_method {method}" if method in methods else ""

    return mark


def _by_tensor(*suffixes: str) -> Callable[[Headers], str]:
    def mark(model: Headers) -> str:
        count = sum(all(suffix in parts for suffix in suffixes) for parts in model.groups.values())
        return f"{count} layers have {' and '.join(suffixes)}" if count else ""

    return mark


def _by_sign(model: Headers) -> str:
    return next((f"it has the tensor {name}" for name in SIGNS if name in model.stored), "")


def _by_state(model: Headers) -> str:
    count = sum(any(suffix.startswith(STATE) for suffix in parts) for parts in model.groups.values())
    return f"{count} layers have a quant_state" if count else ""


def _by_producer(model: Headers) -> str:
    producer = model.quantization.get("producer")
    name = producer.get("name") if isinstance(producer, dict) else None
    return "config.json names modelopt as producer" if name == "modelopt" else ""


def _by_svdquant(model: Headers) -> str:
    text = model.metadata.get("quantization_config")
    return "quantization_config in the header" if text and "svdquant" in text else ""


def _by_header(model: Headers) -> str:
    """BFL's words; nvfp4 beside fused projections is what converters to ComfyUI's layout write too."""
    said = said_formats(model.metadata)
    if not said or ("nvfp4" in said and any(map(_FUSED.search, model.groups))):
        return ""
    return f"the header says {model.metadata['quantization']}"


MARKS: tuple[tuple[str, Callable[[Headers], str]], ...] = (
    (NATIVE, _by_config(QUANT_METHOD)),
    ("gguf", lambda model: "it begins with GGUF" if model.container == "GGUF file" else ""),
    ("nunchaku", _by_svdquant),
    ("nunchaku", _by_tensor("qweight", "lora_down")),
    ("nunchaku_lite", _by_config("nunchaku_lite", "svdquant")),
    ("nunchaku_lite", _by_tensor("qweight", "proj_down")),
    ("torchao", _by_config("torchao")),
    ("torchao", _by_tensor("_weight_qdata")),
    ("compressed_tensors", _by_config("compressed-tensors")),
    ("compressed_tensors", _by_tensor("weight_packed")),
    ("fp8_blocks", _by_config("fp8")),
    ("fp8_blocks", _by_tensor("weight_scale_inv")),
    ("bnb", _by_state),
    ("bnb", _by_config("bitsandbytes")),
    ("comfy", _by_tensor("comfy_quant")),
    ("comfy", lambda model: "_quantization_metadata in the header" if said_by_comfy(model) else ""),
    ("legacy", _by_sign),
    ("legacy", _by_tensor("scale_weight")),
    ("modelopt", _by_config("modelopt", "modelopt_fp4", "modelopt_mixed")),
    ("modelopt", _by_producer),
    ("bfl", _by_header),
)


def other_program(model: Headers) -> str:
    """The program whose layers no dialect has, by `quant_method` of config.json or by its tensors; "" if none is."""
    method = model.quantization.get("quant_method")
    if method is not None and method not in METHODS:
        return str(method)[:80]
    for program, (first, *others) in _OTHERS:
        layers = [name.removesuffix(first) for name in model.stored if name.endswith(first)]
        if any(all(layer + other in model.stored for other in others) for layer in layers):
            return program
    return ""


def grouped(stored: Mapping[str, Stored]) -> dict[str, dict[str, str]]:
    """Module -> suffix -> name of the tensor, of all tensors that a quantized layer may have."""
    found: dict[str, dict[str, str]] = {}
    for name in stored:
        hit = _NAME.fullmatch(name)
        if hit:
            found.setdefault(hit["module"], {})[hit["suffix"]] = name
    return found


def is_quantized(stored: Mapping[str, Stored], dialect: str) -> bool:
    codes = next((stored[suffix] for suffix in CODES if suffix in stored), None)
    if codes is None or len(codes.shape) not in ((2, 3) if dialect == NATIVE else (2,)):
        return False
    return codes.dtype not in FLOATS if dialect == "gguf" else codes.dtype in _CODED


def json_object(text: str, what: str) -> dict[str, Any]:
    """A JSON object from a header; ValueError naming it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON ({error}); get the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object; get the file again")
    return value


def said_by_comfy(model: Headers) -> dict[str, Any]:
    """Layer -> entry, of `_quantization_metadata`."""
    text = model.metadata.get("_quantization_metadata")
    layers = json_object(text, f"{model.path}: _quantization_metadata").get("layers") if text else None
    return layers if isinstance(layers, dict) else {}


METHODS = (  # values of quant_method that a dialect has
    *(QUANT_METHOD, "nunchaku_lite", "svdquant", "torchao", "compressed-tensors", "bitsandbytes"),
    *("modelopt", "modelopt_fp4", "modelopt_mixed", "gguf", "fp8"),
)
_OTHERS = (  # programs whose layers are not read here, by what follows a layer's name
    ("GPTQ or AWQ", (".qweight", ".qzeros")),
    ("quanto", (".weight._data", ".weight._scale")),
)
MODELOPTS = "ModelOpt writes low nibbles first whatever the layout, ComfyUI reads high ones first; `--base` proves them"
UNDECIDED = "nothing in the file says the order of nibbles and block scales; `--base` proves them"
SIGNS = ("scaled_fp8", CHECKPOINT_PREFIX + "scaled_fp8")  # no tensor of the model
FLOATS = ("BF16", "F16", "F32", "F64")
_CODED = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")
CODES = ("weight", "qweight", "weight_packed", "_weight_qdata")
_SUFFIXES = (
    *("weight", "bias", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "pre_quant_mean"),
    *("deflate_basis", "deflate_out", "svdquant_lora_a", "svdquant_lora_b", "comfy_quant", "weight_zeros"),
    *("weight_s_rel", "weight_s_channel", "weight_codebook"),
    *("weight_packed", "weight_global_scale", "input_global_scale", "weight_shape", "weight_zero_point"),
    *("weight_g_idx", "weight_scale_inv", "activation_scale"),
    *("scale_weight", "scale_input", "qweight", "wscales", "wzeros", "wcscales", "wtscale"),
    *("smooth_factor", "smooth_factor_orig", "smooth", "smooth_orig", "proj_down", "proj_up", "lora_down", "lora_up"),
)
_NAME = re.compile(
    r"(?P<module>.+)\.(?P<suffix>weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)"
    r"|_weight_\w+|" + "|".join(_SUFFIXES) + ")"
)
_FUSED = re.compile(r"\.(?:qkv|linear1)$")
_PACKED = re.compile(r"(?:^|\.)(?:double_blocks|single_blocks|joint_blocks)\.|\.qkv$")
