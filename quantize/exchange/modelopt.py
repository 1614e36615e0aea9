"""NVIDIA ModelOpt's layers: the layout that ours is, under the names that ours has.

    FP8                        weight_scale F32 [], input_scale F32 [] = amax / 448
    FP8_PER_CHANNEL_PER_TOKEN  weight_scale F32 [N]
    MXFP8, mxfp4               weight_scale U8 [N, K/32]
    NVFP4, W4A16_NVFP4         weight_scale E4M3 [N, K/16], weight_scale_2 and input_scale F32 [] = amax / 2688
    NVFP4_AWQ, NVFP4_SVD       also pre_quant_scale [K], svdquant_lora_a [r, K], svdquant_lora_b [N, r]
    W8A8_SQ_PER_CHANNEL, W8A16 weight I8 [N, K], weight_scale F32 [N], input_scale F32 [] = amax / 127
    W4A16_AWQ                  weight U8 [N/2, K], two rows to a byte, weight_scale F32 [N, K/128]

Two things differ. ModelOpt's low-rank pair reads x · pre_quant_scale and ours reads x: W = (Q + B A) · diag(scale)
there and Q · diag(scale) + B A here. A / scale is written in fp32, so that it comes back as it was. And where ours
keeps the sign of -0, ModelOpt writes +0. Measured on files that ModelOpt 0.47 wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.kernels.encode import pack, unpack
from fluxq.kernels.tensor import stored_shapes
from fluxq.quantize.exchange.containers import pipeline_writer
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.fp8_blocks import read_blocks
from fluxq.quantize.exchange.layer import Decoded, Encoded, Plain, QuantTensors
from fluxq.quantize.exchange.layouts import scaled
from fluxq.quantize.exchange.marks import Headers, by_config, codes_of, guess_word, matrix_shape
from fluxq.quantize.exchange.rows import FLOATS, Row, Tensors, named_row, native, row_for
from fluxq.recipes.formats import ELEMENTS, find_format
from fluxq.recipes.step_policy import POLICY


def encode(layer: QuantTensors) -> Encoded:
    """Tensors of a layer and its entry in `quantized_layers`; ValueError that says why there is no format for it."""
    row, notes = row_for(layer, ROWS, "modelopt")
    tensors = {**layer.tensors, **{name: layer.beside[name] for name in row.needs}}
    entry: dict[str, Any] = {"quant_algo": row.name}
    if row.name in _GROUPED:
        entry["group_size"] = layer.scheme.weights.group_size
    if row.name in _ALWAYS_SMOOTH:
        tensors.setdefault("pre_quant_scale", torch.ones(layer.shape[1], dtype=layer.dtype))
        entry |= {"has_zero_point": False, "pre_quant_scale": True}
    if layer.scheme.smooth and layer.scheme.rank:
        tensors["svdquant_lora_a"] = tensors["svdquant_lora_a"].float() / tensors["pre_quant_scale"].float()
    if row.low_rank:
        entry["lora_rank"] = layer.scheme.rank
    if row.name == "W4A16_AWQ":
        codes = unpack(tensors["weight"], ELEMENTS["int4"])
        tensors["weight"] = pack(codes.T.contiguous(), ELEMENTS["int4"]).T.contiguous()
        tensors["weight_scale"] = tensors["weight_scale"].float()
    return Encoded(tensors, entry, notes)


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    """The layer whose weight is (N, K) = shape; entry: {"quant_algo": …}."""
    n, k = shape
    if entry.get("quant_algo") in _OF_BLOCKS:
        return read_blocks(Tensors(tensors, "modelopt"), shape, "weight_scale", FLOATS, BLOCKS)
    row = named_row(ROWS, entry.get("quant_algo"), "modelopt")
    weights, parts = find_format(row.weights), Tensors(tensors, "modelopt")
    weights.check_shape(n, k, "modelopt")
    done = parts.bias(n)
    if row.name == "W4A16_AWQ":
        codes = unpack(parts.take("weight", torch.uint8, (n // 2, k)).T.contiguous(), ELEMENTS["int4"])
        done["weight"] = pack(codes.T.contiguous(), ELEMENTS["int4"])
        scale = parts.scale("weight_scale", FLOATS, (n, k // weights.group_size))
        done["weight_scale"] = scale.bfloat16()
        if not torch.equal(done["weight_scale"].float(), scale.float()):
            weight = scaled(codes.T.float().reshape(n, -1, weights.group_size), scale.float().unsqueeze(-1))
            weight = weight.reshape(shape)
            if "pre_quant_scale" in parts:
                weight = weight * parts.scale("pre_quant_scale", FLOATS, (k,)).float()
            parts.finish()
            return Plain(weight, done.get("bias"), "its fp32 scales are no bf16 numbers, which ours are")
    else:
        for name, (size, dtype) in stored_shapes(weights, n, k).items():
            is_codes = name == "weight" or dtype == torch.uint8
            sizes = (size, (1,)) if size == () else (size, (*size, 1)) if len(size) == 1 else (size,)
            tensor = (parts.take if is_codes else parts.scale)(name, dtype, *sizes)
            done[name] = tensor.reshape(size)
    if "input_scale" in parts:
        done["input_scale"] = parts.scale("input_scale", torch.float32, (), (1,)).reshape(())
    if row.name in _ALWAYS_SMOOTH or (row.smooth and "pre_quant_scale" in parts):
        done["pre_quant_scale"] = parts.scale("pre_quant_scale", FLOATS, (k,))
    if row.low_rank:
        a, b = parts.take("svdquant_lora_a", FLOATS), parts.take("svdquant_lora_b", FLOATS)
        if a.ndim != 2 or a.shape[1] != k or b.shape != (n, a.shape[0]) or not a.shape[0]:
            raise ValueError(f"modelopt: low-rank pair {(*a.shape,)}, {(*b.shape,)} does not fit {(n, k)}")
        a = a.float() * done["pre_quant_scale"].float()
        done |= {"svdquant_lora_a": a.to(b.dtype), "svdquant_lora_b": b}
    if row.name in _ALWAYS_SMOOTH and (done["pre_quant_scale"] == 1).all():
        del done["pre_quant_scale"]
    parts.finish()
    return native(row, shape, done)


def config(entries: Mapping[str, Mapping[str, Any]], ignore: list[str], version: str) -> dict[str, Any]:
    """`quantization_config` of config.json. entries: by module name; ignore: modules in 16 bit.

    version: of the ModelOpt whose schema this is. One algorithm is written as ModelOpt writes it, several as
    MIXED_PRECISION with `quantized_layers`. The last four keys say what no reader should have to guess; SGLang reads
    them, others pass them over. vLLM looks for ignored names anywhere in a path, so that FLUX's `proj_out` would take
    each block's with it: a name that is part of a quantized layer's is written as a pattern of the whole, `proj_out*`,
    which SGLang matches too. Of patterns it knows the asterisk alone.
    """
    kinds = list(dict.fromkeys(tuple(sorted(entry.items())) for entry in entries.values()))
    one = dict(next(iter(entries.values()))) if len(kinds) == 1 else {"quant_algo": "MIXED_PRECISION"}
    described: dict[str, Any] = {}
    if len(kinds) == 1 and one["quant_algo"] in _DESCRIBED_ALONE:
        described["config_groups"] = {"group_0": {**_group(one), "targets": ["Linear"]}}
    elif len(kinds) > 1:
        described["config_groups"] = {}
        for index, kind in enumerate(map(dict, kinds)):
            targets = sorted(name for name, entry in entries.items() if entry == kind)
            described["config_groups"][f"group_{index}"] = {**_group(kind), "targets": targets}
        described["quantized_layers"] = {name: dict(entry) for name, entry in entries.items()}
    described |= {"ignore": [_ignored(name, entries) for name in ignore], "quant_algo": one["quant_algo"]}
    described |= {"producer": {"name": "modelopt", "version": version}, "quant_method": "modelopt"}
    if any(entry["quant_algo"] in _NVFP4 for entry in entries.values()):
        described |= {"group_size": 16, "swap_weight_nibbles": False}
        described |= {"checkpoint_weight_scale_layout": "linear", "checkpoint_uses_packed_qkv": False}
    return described


def runtime(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return what readers of ModelOpt's folders take of a checkpoint's `runtime`: its policy of steps."""
    settings = quantization.get("runtime", {})
    return {"runtime": {POLICY: settings[POLICY]}} if POLICY in settings else {}


def _ignored(name: str, quantized: Collection[str]) -> str:
    """The name, or a pattern of it that is in no quantized layer's name and matches none."""
    if not any(name in layer for layer in quantized):
        return name
    for at in range(len(name), -1, -1):
        pattern = f"{name[:at]}*{name[at:]}"
        if not any(fnmatchcase(layer, pattern) for layer in quantized):
            return pattern
    raise ValueError(f"modelopt: {name!r} is in 16 bit, and no pattern tells it from the quantized layers; quantize it")


def _group(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of `config_groups` for an algorithm."""
    described: dict[str, Any] = {}
    for side, values in _GROUPS.get(entry["quant_algo"], {}).items():
        grouped = {"group_size": entry["group_size"]} if "group_size" in entry else {}
        described[side] = {"dynamic": False, **values, **grouped}
    extra = ("has_zero_point", "pre_quant_scale", "lora_rank")
    return described | {name: entry[name] for name in extra if name in entry and entry["quant_algo"] == "NVFP4_SVD"}


_ALWAYS_SMOOTH = ("NVFP4_AWQ", "NVFP4_SVD", "W4A16_AWQ")  # by ones, where the scheme is not
_OF_BLOCKS = ("fp8_pb_wo", "FP8_PB_WO")
_NVFP4 = ("NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4")
_GROUPED = (*_NVFP4, "MXFP8", "mxfp4", "W4A16_AWQ")
_DESCRIBED_ALONE = ("FP8", "NVFP4", "W4A16_NVFP4", "NVFP4_SVD")  # by `config_groups` too
_READ_MIXED = frozenset({"FP8", "NVFP4", "W4A16_NVFP4", "MXFP8"})  # by vLLM's reader of MIXED_PRECISION
_FP8, _FP4, _INT8 = ({"num_bits": bits, "type": kind} for bits, kind in ((8, "float"), (4, "float"), (8, "int")))
_GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "FP8": {"input_activations": _FP8, "weights": _FP8},
    "FP8_PER_CHANNEL_PER_TOKEN": {"input_activations": _FP8, "weights": {**_FP8, "strategy": "channel"}},
    "NVFP4": {"input_activations": _FP4, "weights": _FP4},
    "NVFP4_AWQ": {"input_activations": _FP4, "weights": _FP4},
    "NVFP4_SVD": {"input_activations": _FP4, "weights": _FP4},
    "W4A16_NVFP4": {"weights": _FP4},
    "MXFP8": {"input_activations": _FP8, "weights": _FP8},
    "W8A8_SQ_PER_CHANNEL": {"input_activations": _INT8, "weights": {**_INT8, "strategy": "channel"}},
    "W8A16": {"weights": _INT8},
    "W4A16_AWQ": {"weights": {"num_bits": 4, "type": "int"}},
}
_BOTH = "vLLM-Omni, SGLang-Diffusion"
BLOCKS = Row("FP8_PB_WO", "fp8_128x128", None, unread="no program is known to read FP8_PB_WO for diffusion models")
ROWS = (
    Row("FP8", "fp8_tensor", "fp8_tensor", input_scale="required", read_by=_BOTH),
    Row("FP8_PER_CHANNEL_PER_TOKEN", "fp8", "fp8", also=(None,), read_by="vLLM-Omni"),
    Row("MXFP8", "mxfp8", "mxfp8"),
    Row("mxfp4", "mxfp4", "mxfp4"),
    Row("NVFP4", "nvfp4", "nvfp4", input_scale="required", read_by=_BOTH),
    Row("NVFP4_AWQ", "nvfp4", "nvfp4", input_scale="required", smooth=True),
    Row("NVFP4_SVD", "nvfp4", "nvfp4", input_scale="required", smooth=True, low_rank=True),
    Row("W4A16_NVFP4", "nvfp4", None),
    Row("W8A8_SQ_PER_CHANNEL", "int8", "int8", smooth=True, needs=("input_scale",)),
    Row("W8A16", "int8", None),
    Row("W4A16_AWQ", "int4_g128", None, smooth=True, multiples=(2, 128)),
    BLOCKS,
)


# --- files


def _by_producer(model: Headers) -> str:
    producer = model.quantization.get("producer")
    name = producer.get("name") if isinstance(producer, dict) else None
    return "config.json names modelopt as producer" if name == "modelopt" else ""


def _entry(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    config = model.quantization
    layers = config.get("quantized_layers")
    entry = layers.get(name) if isinstance(layers, dict) else None
    if isinstance(entry, dict):
        return dict(entry)
    algo = config.get("quant_algo")
    if isinstance(algo, str) and algo != "MIXED_PRECISION":
        return {"quant_algo": algo}
    guess = guess_word(stored, _WORDS)
    if guess == "NVFP4" and "svdquant_lora_a" in stored:
        guess = "NVFP4_SVD"
    elif guess == "NVFP4" and "pre_quant_scale" in stored:
        guess = "NVFP4_AWQ"
    elif guess == "NVFP4" and not any("input_scale" in parts for parts in model.groups.values()):
        guess = "W4A16_NVFP4"
    return {"quant_algo": guess}


def _shape(stored: Mapping[str, Stored], entry: Mapping[str, Any]) -> tuple[int, int]:
    if entry.get("quant_algo") == "W4A16_AWQ":
        _, _, rows, columns = codes_of(stored)
        return 2 * rows, columns
    return matrix_shape(stored, entry)


def _put_back(module: str, weight: Tensor, removed: Mapping[str, Tensor]) -> Tensor:
    """The weight of a layer whose quantizer was disabled after calibration, with what that took out."""
    left = {suffix: tensor.float() for suffix, tensor in removed.items()}
    n, k = weight.shape if weight.ndim == 2 else (0, 0)
    smooth = left.get("pre_quant_scale", torch.ones((), dtype=torch.float32))
    a = left.get("svdquant_lora_a", torch.zeros(0, k, dtype=torch.float32))
    b = left.get("svdquant_lora_b", torch.zeros(n, 0, dtype=torch.float32))
    fits = smooth.shape in ((), (k,)) and a.ndim == b.ndim == 2 and (*b.shape, *a.shape) == (n, len(a), len(a), k)
    if not fits or not all(torch.isfinite(part).all() for part in (smooth, a, b)) or not (smooth > 0).all():
        raise ValueError(f"{module}: what ModelOpt had taken out of its weight is damaged; get the file again")
    return ((weight.float() + b @ a) * smooth).to(weight.dtype)


def _faults(model: Headers) -> Iterator[tuple[str, str, str]]:
    """Yield what readers of its folders stumble over.

    SGLang-Diffusion holds each pattern of `ignore` against a layer's whole path and against its first name.
    """
    patterns = model.quantization.get("ignore")
    for pattern in patterns if isinstance(patterns, list) else ():
        if not isinstance(pattern, str):
            continue
        hit = [name for name in model.layers if fnmatchcase(name, pattern) or fnmatchcase(name.split(".")[0], pattern)]
        if hit:
            yield "ignored though quantized", hit[0], f"ignore has {pattern!r}, which matches {len(hit)} layers"
    if "folder" in model.container:
        yield "not for diffusers", "", "a folder that ModelOpt exported, with quant_method modelopt"
    if not model.quantization:
        yield "nothing says the format", "", "no quantization_config beside weights of ModelOpt's names"


def _unreadable(name: str, mains: set[str], is_modulation: bool) -> str:
    """Return why no program loads a side layer of an algorithm beside those of main layers; "" where one does.

    vLLM-Omni gives no modulation a quantized layer. SGLang-Diffusion reads folders of one algorithm, vLLM-Omni mixes of
    some. Sources: vLLM-Omni's `safe_quant_config`, `get_quant_method` of vLLM's ModelOptMixedPrecisionConfig, SGLang's
    ModelOptFp4Config and ModelOptFp8Config.
    """
    if is_modulation:
        return "vLLM-Omni computes modulation in 16 bit"
    if {name} != mains and not {name, *mains} <= _READ_MIXED:
        return f"no reader of modelopt takes {name} beside {' and '.join(sorted(mains))}"
    return ""


_SCHEMA = "0.47.0"  # the version of ModelOpt whose configuration is written
_WORDS = {
    **{"nvfp4": "NVFP4", "mxfp8": "MXFP8", "mxfp4": "mxfp4", "fp8": "FP8_PER_CHANNEL_PER_TOKEN", "fp8_tensor": "FP8"},
    **{"int8": "W8A16", "int8 static": "W8A8_SQ_PER_CHANNEL", "int4": "W4A16_AWQ"},
}
_METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
DIALECT = Dialect(
    "modelopt",
    "NVIDIA ModelOpt's unified checkpoint",
    decode,
    marks=(by_config(*_METHODS), _by_producer),
    methods=_METHODS,
    entry=_entry,
    shape=_shape,
    removed=("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "input_scale"),
    put_back=_put_back,
    rows=ROWS,
    encode=encode,
    writer=pipeline_writer(lambda one: config(one.entries, one.in_16_bit, _SCHEMA) | runtime(one.source.quantization)),
    steps="first and last steps at 16-bit activations are in config.json, and its readers do them in Cosmos3 alone",
    unreadable=_unreadable,
    format_key="quant_algo",
    why_larger="its readers compute modulation in 16 bit, whatever the recipe",
    faults=_faults,
    left_out={"proj_out": "ModelOpt's general presets leave out whatever is called proj_out"},
)
