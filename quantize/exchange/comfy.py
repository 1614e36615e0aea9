"""ComfyUI's layers, as comfy-kitchen's layouts store them (also read by SGLang-Diffusion).

    float8_e4m3fn    weight E4M3 [N, K], weight_scale F32 [], input_scale F32 []
    nvfp4            weight U8 [16⌈N/16⌉, 8⌈K/16⌉], the even column in the high nibble, weight_scale_2 F32 [],
                     weight_scale E4M3 [128⌈N/128⌉, 4⌈K/64⌉] swizzled, pre_quant_scale [K]
    mxfp8            weight E4M3 [32⌈N/32⌉, 32⌈K/32⌉], weight_scale E8M0 [128⌈N/128⌉, 4⌈K/128⌉] swizzled
    int8_tensorwise  weight I8 [N, K], weight_scale F32 [N, 1] or []; with `convrot` columns are rotated by the regular
                     Hadamard matrix in blocks of `convrot_groupsize`, and so is x
    awq_w4a16        weight I8 [N, K/2] of q = code + 8, weight_scale and weight_zeros [K/group, N]: (q - 8) · s + z
    svdquant_w4a4, convrot_w4a4, asym_w4a8_int8: comfy_int4.py

The format stands in `comfy_quant`, a tensor of JSON, and again in the header's `_quantization_metadata`: ComfyUI reads
either, the header where both are there; SGLang reads both and refuses what differs. Without
`full_precision_matrix_mult` x is rounded to the weight's format, with it the weight is widened. ComfyUI itself has no
awq_w4a16: it is written beside svdquant_w4a4 alone. Source: ComfyUI 0.33.0's comfy/ops.py and quant_ops.py,
comfy-kitchen 0.2.40.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.kernels.encode import unpack
from fluxq.kernels.transforms import rotate
from fluxq.quantize.exchange import comfy_int4
from fluxq.quantize.exchange.containers import file_writer
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Decoded, Encoded, Plain, QuantTensors
from fluxq.quantize.exchange.layouts import block_scales, crop, pad, padded, padded_tiles, swap_nibbles, unblock_scales
from fluxq.quantize.exchange.marks import Headers, by_tensor, codes_of, guess_word, has_codes, json_object, json_tensor
from fluxq.quantize.exchange.rows import FLOATS, Row, Tensors, named_row, native, positive, row_for
from fluxq.recipes.formats import ELEMENTS, INT4_GROUP_SIZES, REGULAR_HADAMARDS
from fluxq.recipes.keymaps import CHECKPOINT_PREFIX

_WIDENED = "full_precision_matrix_mult"
_UNSCALED = "without input_scale ComfyUI rounds x to E4M3 as it is, unscaled, and clips it at 448"
_UNREAD = "ComfyUI 0.33.0 does not load awq_w4a16, which its decoder comfy-kitchen has"


def encode(layer: QuantTensors) -> Encoded:
    """Tensors and entry of a layer; ValueError that says why there is no format for it."""
    row, notes = row_for(layer, ROWS, "comfy")
    tensors = dict(layer.tensors)
    weight, scale = tensors["weight"], tensors["weight_scale"]
    entry: dict[str, Any] = {"format": row.name}
    if row.activations is None and row.name != "awq_w4a16":
        entry[_WIDENED] = True
    if row.activations == "fp8_tensor" and not layer.scheme.static_input:
        notes += (_UNSCALED,)
    if row.name == "nvfp4":
        tensors |= {"weight": pad(swap_nibbles(weight), 16, 8), "weight_scale": block_scales(scale)}
    elif row.name == "mxfp8":
        blocked = block_scales(scale).view(torch.float8_e8m0fnu)
        tensors |= {"weight": pad(weight, 32, 32), "weight_scale": blocked}
    elif row.name == "int8_tensorwise":
        tensors["weight_scale"] = scale.reshape(-1, 1)
        entry |= {"convrot": True, "convrot_groupsize": layer.scheme.hadamard} if layer.scheme.hadamard else {}
    elif row.name == "awq_w4a16":
        entry["group_size"] = layer.scheme.weights.group_size
        turned = scale.T.contiguous()
        tensors |= {"weight": (weight ^ 0x88).view(torch.int8)}  # two's complement to code + 8: the top bits flip
        tensors |= {"weight_scale": turned, "weight_zeros": torch.zeros_like(turned)}
    elif row.name == "svdquant_w4a4":
        bias = {name: tensors[name] for name in ("bias",) if name in tensors}
        tensors, more = comfy_int4.encode_svdquant(layer)
        tensors, notes = tensors | bias, notes + more
    elif row.name == "convrot_w4a4":
        packed, rotation = comfy_int4.encode_convrot(layer)
        tensors, entry = tensors | packed, entry | rotation
    tensors |= layer.beside
    tensors["comfy_quant"] = torch.tensor(list(json.dumps(entry).encode()), dtype=torch.uint8)
    return Encoded(tensors, entry, notes)


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any] = {}) -> Decoded:
    """The layer whose weight is (N, K) = shape; entry: for files whose layers have no `comfy_quant`."""
    parts = Tensors(tensors, "comfy")
    layer_entry = read_entry(parts.take("comfy_quant", torch.uint8)) if "comfy_quant" in parts else entry
    row = named_row(ROWS, layer_entry.get("format"), "comfy")
    if layer_entry.get(_WIDENED) and row.activations is not None:
        row = replace(row, activations=None, input_scale="none")
    whole = layer_entry.get("orig_shape", [*shape])
    if whole != [*shape]:
        raise ValueError(f"comfy: orig_shape {whole!r} is not that of the weight, {[*shape]}; get the file again")
    if row.name in comfy_int4.FORMATS:
        return comfy_int4.decode(row, parts, shape, layer_entry)
    regular = _regular(row, layer_entry, shape[1])
    layer, done = _READERS[row.name](parts, shape, layer_entry), {}
    if "pre_quant_scale" in parts:
        done["pre_quant_scale"] = parts.scale("pre_quant_scale", FLOATS, (shape[1],))
    done |= comfy_int4.rest(parts, shape[0])
    if regular and "pre_quant_scale" in done:
        raise ValueError("comfy: the layer has convrot and pre_quant_scale, and no reader says which comes first")
    if regular and regular not in REGULAR_HADAMARDS and isinstance(layer, dict):
        why = f"its columns are rotated in blocks of {regular}"
        layer = rotate(layer["weight"] * layer["weight_scale"].unsqueeze(1), regular, regular=True), why
    if isinstance(layer, tuple):
        weight, why = layer
        weight = weight * done["pre_quant_scale"].float() if "pre_quant_scale" in done else weight
        return Plain(weight, done.get("bias"), why)
    if row.name == "awq_w4a16" and layer["weight_scale"].shape[1] * 128 == shape[1]:
        row = _INT4_G128
    return native(row, shape, done | layer, regular=regular)


def _regular(row: Row, entry: Mapping[str, Any], k: int) -> int:
    """Size of the blocks that an entry says are rotated, 0 for none; ValueError for one that cannot be so."""
    is_rotated = entry.get("convrot", False)
    if type(is_rotated) is not bool:
        raise ValueError(f"comfy: convrot is {is_rotated!r}, expected true or false")
    if not is_rotated:
        return 0
    if not row.regular:
        raise ValueError(f"comfy: {row.name} with convrot is none that ComfyUI has: its int8_tensorwise alone rotates")
    return comfy_int4.rotation(entry, k)


_Read = dict[str, Tensor] | tuple[Tensor, str]  # native tensors, or a weight in fp32 and why it is no more


def _read_fp8(parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> _Read:
    weight = parts.take("weight", torch.float8_e4m3fn, shape)
    return {"weight": weight, "weight_scale": parts.scale("weight_scale", torch.float32, (), (1,)).reshape(())}


def _read_nvfp4(parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> _Read:
    n, k = shape
    packed = parts.take("weight", torch.uint8, (padded(n, 16), padded(k, 16) // 2))
    blocked = parts.take("weight_scale", (torch.float8_e4m3fn, torch.uint8)).view(torch.float8_e4m3fn)
    scale = positive(unblock_scales(blocked, n, k // 16), "comfy: weight_scale")
    weight = swap_nibbles(crop(packed, n, k // 2))
    global_scale = parts.scale("weight_scale_2", torch.float32, (), (1,)).reshape(())
    return {"weight": weight, "weight_scale": scale, "weight_scale_2": global_scale}


def _read_mxfp8(parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> _Read:
    n, k = shape
    codes = crop(parts.take("weight", torch.float8_e4m3fn, (padded(n, 32), padded(k, 32))), n, k)
    blocked = parts.take("weight_scale", (torch.float8_e8m0fnu, torch.uint8)).view(torch.uint8)
    return {"weight": codes, "weight_scale": unblock_scales(blocked, n, k // 32)}


def _read_int8(parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> _Read:
    n, _ = shape
    codes = parts.take("weight", torch.int8, shape)
    scale = parts.scale("weight_scale", torch.float32, (n, 1), (n,), (), (1,)).reshape(-1)
    return {"weight": codes, "weight_scale": scale.expand(n).contiguous()}


def _read_int4(parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> _Read:
    n, k = shape
    group = entry.get("group_size", 64)
    if type(group) is not int or group < 2 or k % group:
        raise ValueError(f"comfy: group_size {group!r} does not divide K = {k}")
    packed = parts.take("weight", (torch.int8, torch.uint8), (n, k // 2)).view(torch.uint8)
    scale = parts.take("weight_scale", FLOATS, (k // group, n))
    zeros = parts.take("weight_zeros", FLOATS, (k // group, n))
    weight = packed ^ 0x88  # code + 8 to two's complement
    if group in INT4_GROUP_SIZES and scale.dtype == torch.bfloat16 and not zeros.any() and (scale > 0).all():
        return {"weight": weight, "weight_scale": scale.T.contiguous()}
    codes = unpack(weight, ELEMENTS["int4"]).reshape(n, -1, group)
    dense = codes * scale.float().T.unsqueeze(-1) + zeros.float().T.unsqueeze(-1)
    return dense.reshape(shape), f"its int4 has zero points, or scales in {scale.dtype} of groups of {group}"


_READERS = {
    "float8_e4m3fn": _read_fp8,
    "nvfp4": _read_nvfp4,
    "mxfp8": _read_mxfp8,
    "int8_tensorwise": _read_int8,
    "awq_w4a16": _read_int4,
}


def read_entry(tensor: Tensor) -> dict[str, Any]:
    """The JSON object of a `comfy_quant` tensor; ValueError if it holds none."""
    return _flat(json_tensor(tensor, "comfy: comfy_quant"), "comfy_quant")


def _flat(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An entry with its `params` among its own keys; ValueError for one that says two things, or that nobody reads."""
    params = settings.get("params")
    inner = params if isinstance(params, dict) else {}
    for key in inner.keys() & settings.keys():
        if json.dumps(inner[key]) != json.dumps(settings[key]):
            raise ValueError(
                f"comfy: {where} says {key} {settings[key]!r}, and in params {inner[key]!r}; get the file again"
            )
    entry = {**inner, **settings}
    if type(entry.get(_WIDENED, False)) is not bool:
        raise ValueError(f"comfy: {where} has {_WIDENED} {entry[_WIDENED]!r}, expected true or false")
    for key in entry.keys() - _KEYS:
        for suggestion in get_close_matches(key.strip().lower(), _MEANT, 1, 0.8):
            raise ValueError(
                f"comfy: {where} has the unknown key {key!r} (did you mean {suggestion!r}?); get the file again"
            )
        if entry[key] and _CHANGES & {*key.lower().split("_")}:
            raise ValueError(f"comfy: {where} says {key} {entry[key]!r}, which nothing here reads")
    return entry


_MEANT = ("format", "convrot", "convrot_groupsize", "group_size", _WIDENED)
_MEANT_OF_4_BITS = ("linear_dtype", "quant_group_size", "act_unsigned", "layout", "lowrank_branch_input_basis")
_KEYS = {*_MEANT, "params", "orig_dtype", "orig_shape", "per_row"}
_CHANGES = frozenset("rot rotate rotated rotation hadamard transpose transposed".split())  # words of keys that matter


def metadata(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The header of a file. entries: by the full name of each layer in it."""
    layers = {name: dict(entry) for name, entry in entries.items()}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


_SGLANG = "ComfyUI, SGLang-Diffusion"
_INT4_G128 = Row("awq_w4a16", "int4_g128", None, unread=_UNREAD, beside="svdquant_w4a4")
ROWS = (
    Row("float8_e4m3fn", "fp8_tensor", "fp8_tensor", also=("fp8",), input_scale="optional", read_by=_SGLANG),
    Row("float8_e4m3fn", "fp8_tensor", None, read_by=_SGLANG),
    Row("nvfp4", "nvfp4", "nvfp4", input_scale="optional", smooth=True, read_by=_SGLANG),
    Row("nvfp4", "nvfp4", None, smooth=True, read_by=_SGLANG),
    Row("mxfp8", "mxfp8", "mxfp8", read_by=_SGLANG),
    Row("mxfp8", "mxfp8", None, read_by=_SGLANG),
    Row("int8_tensorwise", "int8", "int8", regular=True, read_by=_SGLANG),
    Row("int8_tensorwise", "int8", None, regular=True, read_by=_SGLANG),
    Row("awq_w4a16", "int4", None, unread=_UNREAD, beside="svdquant_w4a4"),
    _INT4_G128,
    *comfy_int4.ROWS,
)


# --- files


def _entries(model: Headers) -> dict[str, Any]:
    """Layer -> entry, of `_quantization_metadata`."""
    text, what = model.metadata.get("_quantization_metadata"), f"{model.path}: _quantization_metadata"
    layers = json_object(text, what).get("layers", {}) if text else {}
    if not isinstance(layers, dict):
        raise ValueError(f"{what} has layers that are no JSON object; get the file again")
    return layers


def _doubts(model: Headers, others: Iterable[str]) -> Iterator[str]:
    if any("comfy_quant" in parts for parts in model.groups.values()):
        if not _entries(model):
            yield "no _quantization_metadata beside the comfy_quant tensors"
        return
    yield (
        "no comfy_quant tensors: ComfyUI reads the header instead, SGLang-Diffusion takes the file for linear scales "
        "and low nibbles first"
    )
    if "modelopt" in others:
        yield _LOW_NIBBLES


def _entry(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Return what tensor and header say of a layer; ValueError where they differ, or tell only of other layers."""
    entries = _entries(model)
    settings = entries.get(name, entries.get(name.removeprefix(CHECKPOINT_PREFIX)))  # ComfyUI's header knows no prefix
    if settings is not None and not isinstance(settings, dict):
        raise ValueError(f"comfy: _quantization_metadata says {settings!r} of it; get the file again")
    header = _flat(settings, "_quantization_metadata") if settings is not None else {}
    if "comfy_quant" in stored:
        entry = read_entry(model.read(f"{name}.comfy_quant"))
        for key in (*_MEANT, *_MEANT_OF_4_BITS) if settings is not None else ():
            if json.dumps(entry.get(key)) != json.dumps(header.get(key)):  # fewer in the header too: ComfyUI reads it
                differ = f"{key} {entry.get(key)!r}, and the header {header.get(key)!r}"
                raise ValueError(f"comfy: comfy_quant says {differ}; ComfyUI would read the header")
        return entry
    if settings is None and (entries or any("comfy_quant" in parts for parts in model.groups.values())):
        raise ValueError("comfy: nothing says the layer's format, and other layers have theirs; get the file again")
    return {"format": guess_word(stored, _WORDS)} if settings is None else header


def _shape(stored: Mapping[str, Stored], entry: Mapping[str, Any]) -> tuple[int, int]:
    """(N, K) of a layer; N is that of the bias where padding hides it."""
    if shape := comfy_int4.size_of(stored, entry):
        return shape
    _, codes, rows, columns = codes_of(stored)
    bias = stored.get("bias")
    if bias and len(bias.shape) == 1 and padded(bias.shape[0], 32) >= rows:
        rows = min(rows, bias.shape[0])
    four_bits = codes.dtype == "U8" or (codes.dtype == "I8" and entry.get("format") in _INT4)
    return rows, columns * 2 if four_bits else columns


_INT4 = ("awq_w4a16", *comfy_int4.FORMATS)
_LOW_NIBBLES = (
    "ModelOpt writes low nibbles first whatever the layout, ComfyUI reads high ones first; `--base` proves them"
)
_WORDS = {
    **{"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8_tensor": "float8_e4m3fn"},
    **{"int8": "int8_tensorwise", "int8 static": "int8_tensorwise"},
}
# Beside the weights of text encoders: bytes of their tokenizers, and a number that ComfyUI saves with every one.
_OF_ENCODERS = ("spiece_model", "tekken_model", "tokenizer_json", "logit_scale")
DIALECT = Dialect(
    "comfy",
    "ComfyUI's single files",
    decode,
    "original",
    marks=(by_tensor("comfy_quant"), lambda model: "_quantization_metadata in the header" if _entries(model) else ""),
    doubts=_doubts,
    unsettled=(_LOW_NIBBLES,),
    signs=_OF_ENCODERS,
    suffixes=("comfy_quant", "weight_zeros", *comfy_int4.SUFFIXES),
    has_codes=partial(has_codes, sizes=(2, 4)),  # svdquant_w4a4 in tiles has four
    entry=_entry,
    shape=_shape,
    rows=ROWS,
    tiles=padded_tiles,
    encode=encode,
    writer=file_writer(lambda one: metadata(one.entries)),
    format_key="format",
)
