"""compressed-tensors' layers, as llm-compressor writes them and vLLM reads them: text encoders, for the most part.

    float-quantized       weight E4M3 [N, K]        weight_scale [N, 1], [1] or, of blocks, [⌈N/128⌉, ⌈K/128⌉];
                          naive-quantized where x is in 16 bit
    int-quantized         weight I8 [N, K]          weight_scale [N, 1]
    pack-quantized        weight_packed I32 [N, K/8] of code + 8, the first lowest, weight_scale [N, K/64],
                          weight_shape; [N, K/4] of code + 128 and [N, 1] for int8 where x is in 16 bit
    mxfp8-quantized       weight E4M3 [N, K]        weight_scale U8 [N, K/32]
    mxfp4-pack-quantized  weight_packed U8 [N, K/2] weight_scale U8 [N, K/32]
    nvfp4-pack-quantized  weight_packed U8 [N, K/2] weight_scale E4M3 [N, K/16], weight_global_scale and
                          input_global_scale F32 [1] = 1 / ours

The global scale is the reciprocal of ours, rounded to fp32: W may differ in the last bit, and comes back within 2^-23.
Scales of a bf16 model are bf16 there; ours are written in fp32. Source: compressed-tensors 0.20.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.base.model import ModelFolder
from fluxq.base.tensors import Stored
from fluxq.kernels.encode import spread, unpack
from fluxq.quantize.exchange.containers import Contents, Writer, write_component
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Decoded, Encoded, Plain, QuantTensors, Read
from fluxq.quantize.exchange.layouts import BLOCK, as_bytes, crop, scaled
from fluxq.quantize.exchange.marks import FileLayer, Headers, by_config, by_tensor, codes_of, matrix_shape
from fluxq.quantize.exchange.rows import FLOATS, Row, Tensors, named_row, native, row_for
from fluxq.recipes.formats import ELEMENTS, INT4_GROUP_SIZES, find_format

_INT4 = ELEMENTS["int4"]


def encode(layer: QuantTensors) -> Encoded:
    """Tensors and entry of a layer, {"format": …, "weights": …, "input_activations": …} of a config group."""
    row, notes = row_for(layer, ROWS, "compressed-tensors")
    tensors = dict(layer.tensors)
    weight, scale = tensors.pop("weight"), tensors["weight_scale"]
    tensors["weight_scale"] = scale.unsqueeze(1) if scale.ndim == 1 else scale.reshape(1) if scale.ndim == 0 else scale
    if row.name == "pack-quantized":
        weight = _words(weight, layer.scheme.weights.element.bits)
        tensors["weight_shape"] = torch.tensor(layer.shape)
    tensors["weight_packed" if row.name.endswith("pack-quantized") else "weight"] = weight
    if layer.scheme.static_input and not layer.scheme.weights.two_level:
        tensors["input_scale"] = tensors["input_scale"].reshape(1)
    for ours, theirs in _RECIPROCALS.items():
        if layer.scheme.weights.two_level and ours in tensors:
            value = tensors.pop(ours)
            tensors[theirs] = (1 / value).reshape(1)
            if 1 / tensors[theirs] != value:
                notes += (f"{theirs} is 1 / {ours}, from which {ours} comes back within 2^-23",)
    entry = {"format": row.name, "weights": _args(layer.scheme.weights.name, False), "input_activations": None}
    if layer.scheme.activations:
        dynamic: bool | str = "local" if row.weights == "nvfp4" else not layer.scheme.static_input
        entry["input_activations"] = _args(layer.scheme.activations.name, dynamic)
    return Encoded(tensors, entry, notes)


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    """The layer whose weight is (N, K) = shape. entry: as `encode` gives it, from config.json."""
    parts, (n, _) = Tensors(tensors, "compressed-tensors"), shape
    name = named_row(ROWS, entry.get("format"), "compressed-tensors").name
    done = parts.bias(n)
    if "weight_shape" in parts:
        weight_shape = parts.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
        if tuple(weight_shape) != shape:
            raise ValueError(f"compressed-tensors: weight_shape says {weight_shape}, the model has {list(shape)}")
    if name != "pack-quantized" and "weight_zero_point" in parts:
        if parts.take("weight_zero_point", (torch.int8, torch.int32, torch.uint8)).any():
            raise ValueError(f"compressed-tensors: zero points other than 0 are not read in {name}")
    if "input_scale" in parts:
        done["input_scale"] = parts.scale("input_scale", FLOATS, (1,), ()).float().reshape(())
    read = _read_words if name == "pack-quantized" else _read_blocks if name in _BLOCKS else _read_rows
    layer = read(parts, shape, entry)
    parts.finish()
    if isinstance(layer, Plain):
        return replace(layer, bias=done.get("bias"))
    weights, native_tensors = layer
    x = entry.get("input_activations")
    is_weight_only = x is None
    if weights == "fp8_128x128" and isinstance(x, dict):
        how = x.get("strategy"), x.get("group_size"), x.get("dynamic")
        if how != ("group", BLOCK, True):
            raise ValueError(f"compressed-tensors: blocks with inputs of {how} are not read, (group, {BLOCK}, True) is")
        is_weight_only = shape[1] % BLOCK > 0  # x has whole groups here
    rows = [row for row in ROWS if row.weights == weights and (row.activations is None) == is_weight_only]
    if not rows:
        plain = next(row for row in ROWS if row.weights == weights and row.activations is None)
        dense, bias = native(plain, shape, done | native_tensors).collapsed()
        return Plain(dense, bias, f"{weights} weights are not computed with rounded activations")
    return native(rows[0], shape, done | native_tensors)


def _read_rows(parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> Read:
    codes = parts.take("weight", (torch.float8_e4m3fn, torch.int8), shape)
    of_blocks = tuple(-(-size // BLOCK) for size in shape)
    scale = parts.scale("weight_scale", FLOATS, (shape[0], 1), (1,), (1, 1), (), of_blocks).float()
    args = entry.get("weights")
    args = args if isinstance(args, dict) else {}
    named = args.get("strategy") == "block"
    if named and args.get("block_structure") not in (None, [BLOCK, BLOCK]):
        raise ValueError(f"compressed-tensors: blocks of {args['block_structure']!r} are not read, 128 by 128 are")
    if tuple(scale.shape) == of_blocks and (named or of_blocks not in ((1, 1), (shape[0], 1))):
        if codes.dtype == torch.int8:
            wide = spread(scale, find_format("fp8_128x128"), *shape)
            return Plain(scaled(codes.float(), wide), None, f"it is int8 in blocks of {BLOCK} by {BLOCK}")
        return "fp8_128x128", {"weight": codes, "weight_scale": scale}
    if named:
        raise ValueError(f"compressed-tensors: weight_scale is {(*scale.shape,)}, expected {of_blocks} of blocks")
    if codes.dtype == torch.int8:
        return _int8(codes, scale)
    if scale.ndim == 2 and scale.numel() == shape[0]:
        return "fp8", {"weight": codes, "weight_scale": scale.reshape(-1)}
    return "fp8_tensor", {"weight": codes, "weight_scale": scale.reshape(())}


def _bits_of(entry: Mapping[str, Any]) -> int:
    """The bits of a pack-quantized layer's codes, by its entry of config.json; ValueError unless 4 or 8."""
    args = entry.get("weights")
    bits = args.get("num_bits") if isinstance(args, dict) else None
    if type(bits) is not int or bits not in (4, 8):
        raise ValueError(f"compressed-tensors: pack-quantized of {bits!r} bits is not read here, 4 and 8 are")
    return bits


def _read_words(parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> Read:
    (n, k), bits = shape, _bits_of(entry)
    words = parts.take("weight_packed", torch.int32, (n, -(-k * bits // 32)))
    codes = crop(words.contiguous().view(torch.uint8) ^ _HALF[bits], n, k * bits // 8)
    scale = parts.scale("weight_scale", FLOATS)
    if scale.ndim != 2 or scale.shape[0] != n or not scale.shape[1] or k % scale.shape[1]:
        raise ValueError(f"compressed-tensors: weight_scale {(*scale.shape,)} does not divide a weight of {shape}")
    groups, ours = scale.shape[1], scale.bfloat16()
    group, zero = k // groups, torch.zeros(n, groups, dtype=torch.float32)
    if "weight_zero_point" in parts:  # packed along N, as the codes are along K
        packed = parts.take("weight_zero_point", torch.int32, (-(-n * bits // 32), groups))
        zeros = packed.T.reshape(-1).view(torch.uint8).reshape(groups, -1) ^ _HALF[bits]
        zero = (unpack(zeros, _INT4) if bits == 4 else zeros.view(torch.int8)).float()[:, :n].T
    if "weight_g_idx" in parts:
        of = parts.take("weight_g_idx", (torch.int32, torch.int64), (k,)).long()
        if not ((of >= 0) & (of < groups)).all():
            raise ValueError(f"compressed-tensors: weight_g_idx names groups that are not there, of {groups}")
        why = "its groups go by act order"
    else:
        of, why = torch.arange(k) // group, f"it is int{bits} in groups of {group} with {scale.dtype} scales"
    in_order = torch.equal(of, torch.arange(k) // group)
    if not in_order or zero.any():
        why = f"{why}, with zero points" if zero.any() else why
    elif bits == 8 and group == k:
        return _int8(codes.view(torch.int8), scale.float())
    elif bits == 4 and group in INT4_GROUP_SIZES and torch.equal(ours.float(), scale.float()):
        weights = "int4" if group == 64 else f"int4_g{group}"
        return weights, {"weight": codes, "weight_scale": ours.contiguous()}
    values = (unpack(codes, _INT4) if bits == 4 else codes.view(torch.int8)).float()
    return Plain(scaled(values - zero[:, of], scale.float()[:, of]), None, why)


def _read_blocks(parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> Read:
    weights = _BLOCKS[entry["format"]]
    n, k = shape
    groups = k // find_format(weights).group_size
    if weights == "mxfp8":
        codes = parts.take("weight", torch.float8_e4m3fn, shape)
    else:
        codes = parts.take("weight_packed", torch.uint8, (n, k // 2))
    if weights != "nvfp4":
        return weights, {"weight": codes, "weight_scale": parts.take("weight_scale", torch.uint8, (n, groups))}
    done = {"weight": codes, "weight_scale": parts.scale("weight_scale", torch.float8_e4m3fn, (n, groups))}
    for ours, theirs in _RECIPROCALS.items():
        if theirs in parts:
            done[ours] = 1 / parts.scale(theirs, torch.float32, (1,), ()).reshape(())
    if "weight_scale_2" not in done:
        raise ValueError("compressed-tensors: the layer has no weight_global_scale; it is not whole")
    return weights, done


def _int8(codes: Tensor, scale: Tensor) -> tuple[str, dict[str, Tensor]]:
    return "int8", {"weight": codes, "weight_scale": scale.reshape(-1).expand(codes.shape[0]).contiguous()}


def config(entries: Mapping[str, Mapping[str, Any]], ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json: a group for each kind of layer. entries: by module; ignore: 16-bit ones."""
    if not entries:
        raise ValueError("compressed-tensors: no layer is quantized")
    kinds: list[Mapping[str, Any]] = []
    for entry in entries.values():
        if entry not in kinds:
            kinds.append(entry)
    groups = {}
    for index, kind in enumerate(kinds):
        targets = ["Linear"] if len(kinds) == 1 else [name for name, entry in entries.items() if entry == kind]
        groups[f"group_{index}"] = {**kind, "targets": targets, "output_activations": None}
    return {
        "config_groups": groups,
        "quant_method": "compressed-tensors",
        "format": kinds[0]["format"] if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": list(ignore),
    }


def _args(name: str, dynamic: bool | str) -> dict[str, Any]:
    """compressed-tensors' words for a format of weights or activations."""
    row = find_format(name)
    element, group = row.element, row.group_size
    per_tensor, per_token = row.block[0] == 0, bool(dynamic)
    args: dict[str, Any] = {
        "num_bits": element.bits,
        "type": "int" if element.is_integer else "float",
        "symmetric": True,
        "group_size": group or None,
        "strategy": "tensor" if per_tensor else "group" if group else "token" if per_token else "channel",
        "dynamic": dynamic,
    }
    if row.two_level:
        args |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    elif row.spans_rows:
        args |= {"strategy": "block", "block_structure": [*row.block], "group_size": None}
    elif row.scale == "e8m0":
        args["scale_dtype"] = "torch.uint8"
    return args


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes as stored, uint8 (N, K/2) or int8 (N, K), as int32 (N, ⌈K·bits/32⌉) of code + half the range.

    The first is in the lowest bits, as in memory; half the range flips the top bit of two's complement.
    """
    flipped = as_bytes(codes) ^ _HALF[bits]
    return F.pad(flipped, (0, -codes.shape[1] % 4)).view(torch.int32)


_HALF = {4: 0x88, 8: 0x80}
_BLOCKS = {"mxfp8-quantized": "mxfp8", "mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}
_RECIPROCALS = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
_VLLM = "vLLM"
ROWS = (
    Row("float-quantized", "fp8", "fp8", read_by=_VLLM),
    Row("naive-quantized", "fp8", None, read_by=_VLLM),
    Row("float-quantized", "fp8_tensor", "fp8_tensor", input_scale="optional", read_by=_VLLM),
    Row("naive-quantized", "fp8_tensor", None, read_by=_VLLM),
    Row("int-quantized", "int8", "int8", read_by=_VLLM),
    Row("pack-quantized", "int8", None, read_by=_VLLM),
    Row("pack-quantized", "int4", None, read_by=_VLLM),
    Row("pack-quantized", "int4_g128", None, read_by=_VLLM),
    Row("mxfp8-quantized", "mxfp8", "mxfp8", read_by=_VLLM),
    Row("mxfp8-quantized", "mxfp8", None, read_by=_VLLM),
    Row("mxfp4-pack-quantized", "mxfp4", "mxfp4", read_by=_VLLM),
    Row("mxfp4-pack-quantized", "mxfp4", None, read_by=_VLLM),
    Row("nvfp4-pack-quantized", "nvfp4", "nvfp4", input_scale="required", read_by=_VLLM),
    Row("nvfp4-pack-quantized", "nvfp4", None, read_by=_VLLM),
    Row("float-quantized", "fp8_128x128", "fp8_1x128", multiples=(1, BLOCK), read_by=_VLLM),
    Row("naive-quantized", "fp8_128x128", None, read_by=_VLLM),
)

# --- files


def _entry(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    config = model.quantization
    groups, of_all = config.get("config_groups"), None
    for group in groups.values() if isinstance(groups, dict) else ():
        listed = group.get("targets") if isinstance(group, dict) else None
        targets = listed if isinstance(listed, list) else []
        if any(target == name or (isinstance(target, str) and _is_target(target, name)) for target in targets):
            return _of_group(config, group)
        of_all = of_all or (group if "Linear" in targets else None)
    if of_all is not None:  # a group that names the layer comes before
        return _of_group(config, of_all)
    if not groups:
        raise ValueError(
            "its own config.json says how it is quantized, and is not there, nor does a base say it; get the folder, "
            "not the file alone"
        )
    raise ValueError(f"no config group of config.json is for {name}; the folder is not whole")


def _of_group(config: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if value is not None}
    return {"format": config.get("format"), **settings, "input_activations": group.get("input_activations")}


def _is_target(target: str, name: str) -> bool:
    if not target.startswith("re:") or len(target) > 200:
        return False
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error:
        return False


def _shape(stored: Mapping[str, Stored], entry: Mapping[str, Any]) -> tuple[int, int]:
    suffix, codes, rows, columns = codes_of(stored)
    if suffix == "weight_packed" and codes.dtype == "I32":
        bits = _bits_of(entry)
        return rows, columns * 32 // bits if "weight_scale" in stored else columns
    return matrix_shape(stored, entry)


def _row_of(layer: FileLayer) -> Row | None:
    rows = [row for row in ROWS if row.name == layer.entry.get("format")]
    is_weight_only = not layer.entry.get("input_activations")
    return next((row for row in rows if (row.activations is None) == is_weight_only), rows[0] if rows else None)


def _write(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    """Write a folder of transformers: the text encoder, and the tokenizer of the pipeline that goes with it."""
    (one,) = contents
    write_component(made, one, config(one.entries, one.in_16_bit))
    beside = one.source.component.replace("text_encoder", "tokenizer")
    tokenizer = checkpoint.path / beside
    if tokenizer.is_dir() and beside != one.source.component:
        for path in sorted(tokenizer.iterdir()):
            if path.is_file() and not (made / path.name).exists() and path.suffix in _OF_TOKENIZERS:
                shutil.copyfile(path, made / path.name)


_OF_TOKENIZERS = (".json", ".txt", ".model", ".jinja")
_NOT_BY_TRANSFORMERS = (
    "stock transformers does not load a T5 with 4-bit layers of compressed-tensors, whoever wrote them: it initializes "
    "`weight`, which they have not; fp8 and int8 load"
)
DIALECT = Dialect(
    "compressed_tensors",
    "llm-compressor's text encoders",
    decode,
    option="compressed-tensors",
    marks=(by_config("compressed-tensors"), by_tensor("weight_packed")),
    methods=("compressed-tensors",),
    suffixes=(
        *("weight_packed", "weight_global_scale", "input_global_scale", "weight_shape", "weight_zero_point"),
        "weight_g_idx",
    ),
    entry=_entry,
    shape=_shape,
    row_of=_row_of,
    rows=ROWS,
    encode=encode,
    writer=Writer(_write, library="transformers"),
    note=lambda scheme, name: _NOT_BY_TRANSFORMERS if scheme.weights.element.bits == 4 and "T5" in name else "",
    format_key="format",
)
