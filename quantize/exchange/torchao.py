"""torchao's tensor subclasses in safetensors, written without torchao: what stock diffusers loads by `from_pretrained`.

A weight `<layer>.weight` becomes tensors `<layer>._weight_<part>` and a text of JSON in the header, under the weight's
name, that says how to build the subclass of them:

    Float8Tensor   qdata E4M3 [N, K]          scale F32 [N, 1] or [1, 1]
    Int8Tensor     qdata I8 [N, K]            scale F32 [N, 1], zero_point I8 [N, 1] of 0; act_pre_scale [K]
    MXTensor       qdata E4M3 or U8 low first  scale E8M0 [32⌈N/128⌉, 16⌈K/128⌉], swizzled
    NVFP4Tensor    qdata U8 low first         scale E4M3 [32⌈N/128⌉, 16⌈K/64⌉] swizzled, per_tensor_scale F32 [],
                                              act_per_tensor_scale F32 [] where it was calibrated

Source: torchao 0.18, prototype/safetensors; the texts here are compared with those that it writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.quantize.exchange.containers import pipeline_writer
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Decoded, Encoded, Plain, QuantTensors, Read
from fluxq.quantize.exchange.layouts import block_scales, padded, scaled, unblock_scales
from fluxq.quantize.exchange.marks import Headers, by_config, by_tensor, json_object
from fluxq.quantize.exchange.rows import FLOATS, Row, Tensors, native, positive, row_for

_PREFIX = "_weight_"


def encode(layer: QuantTensors, dtype: torch.dtype = torch.bfloat16) -> Encoded:
    """Tensors and entry (the header's JSON object) of a layer; dtype: that the loaded model computes in."""
    row, notes = row_for(layer, ROWS, "torchao")
    tensors, (n, k) = dict(layer.tensors), layer.shape
    bias = {"bias": tensors["bias"]} if "bias" in tensors else {}
    parts: dict[str, Tensor] = {"qdata": tensors["weight"], "scale": tensors["weight_scale"]}
    if row.name in ("Float8Tensor", "Int8Tensor"):
        parts["scale"] = parts["scale"].reshape(-1, 1)
        if row.name == "Int8Tensor":
            parts["zero_point"] = torch.zeros(n, 1, dtype=torch.int8)
            if layer.scheme.smooth:
                parts["act_pre_scale"] = tensors["pre_quant_scale"]
    else:
        parts["scale"] = block_scales(parts["scale"], _tiles(n, k // layer.scheme.weights.group_size))
        if row.name == "MXTensor":
            parts["scale"] = parts["scale"].view(torch.float8_e8m0fnu)
        else:
            parts["per_tensor_scale"] = tensors["weight_scale_2"]
            if layer.scheme.static_input:
                parts["act_per_tensor_scale"] = tensors["input_scale"]
    return Encoded(
        {_PREFIX + name: part for name, part in parts.items()} | bias, _entry(row, layer, dtype, parts), notes
    )


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    """The layer whose weight is (N, K) = shape. entry: the header's JSON object for it."""
    n, _ = shape
    name, data = entry.get("_type"), entry.get("_data")
    if not isinstance(data, dict) or not isinstance(name, str) or name not in _READERS:
        raise ValueError(f"torchao: tensor class {name!r} is none that is read here; known are {', '.join(_READERS)}")
    parts = Tensors({key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}, "torchao")
    done = parts.bias(n)
    layer = _READERS[name](parts, shape, data)
    parts.finish()
    if isinstance(layer, Plain):
        return replace(layer, bias=done.get("bias"))
    weights, native_tensors = layer
    rounds_x = data.get("act_quant_kwargs") is not None
    rows = [row for row in ROWS if (row.weights, row.activations is not None) == (weights, rounds_x)]
    if not rows:
        raise ValueError(f"torchao: {name} of {weights} weights is not read without activations")
    return native(rows[0], shape, done | native_tensors)


def _read_float8(parts: Tensors, shape: tuple[int, int], data: Mapping[str, Any]) -> Read:
    n, k = shape
    weight = parts.take("qdata", torch.float8_e4m3fn, shape)
    scale = parts.scale("scale", FLOATS, (n, 1), (1, 1), ()).float()
    per_row = scale.numel() == n and (n > 1 or data.get("block_size") == [1, k])
    name = "fp8" if per_row else "fp8_tensor"
    return name, {"weight": weight, "weight_scale": scale.reshape(n) if per_row else scale.reshape(())}


def _read_int8(parts: Tensors, shape: tuple[int, int], data: Mapping[str, Any]) -> Read:
    n, k = shape
    weight, scale = parts.take("qdata", torch.int8, shape), parts.scale("scale", FLOATS).float()
    if scale.ndim != 2 or scale.shape[0] not in (1, n) or not scale.shape[1] or k % scale.shape[1]:
        raise ValueError(f"torchao: scale {(*scale.shape,)} does not divide a weight of {shape}")
    if "zero_point" in parts and parts.take("zero_point", torch.int8, tuple(scale.shape)).any():
        raise ValueError("torchao: an Int8Tensor with zero points other than 0 is not read here")
    if scale.shape[1] > 1:
        dense = scaled(weight.float().reshape(n, scale.shape[1], -1), scale.unsqueeze(-1)).reshape(shape)
        if "act_pre_scale" in parts:
            dense = dense * parts.scale("act_pre_scale", FLOATS, (k,)).float()
        return Plain(dense, None, f"it is int8 in groups of {k // scale.shape[1]}")
    scale = scale.reshape(-1).expand(n).contiguous()
    done = {"weight": weight, "weight_scale": scale}
    if "act_pre_scale" in parts:
        done["pre_quant_scale"] = parts.scale("act_pre_scale", FLOATS, (k,))
    return "int8", done


def _read_mx(parts: Tensors, shape: tuple[int, int], data: Mapping[str, Any]) -> Read:
    (n, k), element = shape, data.get("elem_dtype")
    packed = isinstance(element, dict) and element.get("_data") == "float4_e2m1fn_x2"
    codes = parts.take("qdata", torch.uint8, (n, k // 2)) if packed else parts.take("qdata", torch.float8_e4m3fn, shape)
    scale = _linear(parts.take("scale", torch.float8_e8m0fnu), n, k // 32, data).view(torch.uint8)
    return "mxfp4" if packed else "mxfp8", {"weight": codes, "weight_scale": scale}


def _read_nvfp4(parts: Tensors, shape: tuple[int, int], data: Mapping[str, Any]) -> Read:
    n, k = shape
    scale = positive(_linear(parts.take("scale", torch.float8_e4m3fn), n, k // 16, data), "torchao: scale")
    done = {"weight": parts.take("qdata", torch.uint8, (n, k // 2)), "weight_scale": scale}
    done["weight_scale_2"] = torch.ones((), dtype=torch.float32)  # where block scales stand alone
    for part, name in (("per_tensor_scale", "weight_scale_2"), ("act_per_tensor_scale", "input_scale")):
        if part in parts:
            done[name] = parts.scale(part, torch.float32, ())
    return "nvfp4", done


def _linear(scale: Tensor, rows: int, groups: int, data: Mapping[str, Any]) -> Tensor:
    """Block scales (rows, groups) in the order of the matrix."""
    if data.get("is_swizzled_scales"):
        return unblock_scales(scale, rows, groups)
    if tuple(scale.shape) != (rows, groups):
        raise ValueError(f"torchao: scale is {(*scale.shape,)}, expected {(rows, groups)} where it is not swizzled")
    return scale.contiguous()


_READERS = {"Float8Tensor": _read_float8, "Int8Tensor": _read_int8, "MXTensor": _read_mx, "NVFP4Tensor": _read_nvfp4}


def metadata(entries: Mapping[str, Mapping[str, Any]], plain: Iterable[str]) -> dict[str, str]:
    """The header of a file. entries: by layer; plain: full names of the tensors that are in 16 bit, biases included."""
    texts = {f"{name}.weight": json.dumps(entry) for name, entry in entries.items()}
    texts |= {name: json.dumps({"_type": "Tensor"}) for name in plain}
    return texts | {"tensor_names": json.dumps(list(texts))}


def config(entries: Mapping[str, Mapping[str, Any]], ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. diffusers takes one torchao configuration for a model, that of most layers;
    what each weight is stands in the header. entries: by layer; ignore: modules in 16 bit.
    """
    kinds = Counter(json.dumps(_config_of(entry)) for entry in entries.values())
    kind, _ = kinds.most_common(1)[0]
    return {"quant_method": "torchao", "quant_type": {"default": json.loads(kind)}, "modules_to_not_convert": ignore}


def _tiles(rows: int, groups: int) -> tuple[int, int]:
    """Return torchao's shape of swizzled scales: 32 lines of 16 bytes for each tile."""
    return padded(rows, 128) // 4, padded(groups, 4) * 4


def _entry(row: Row, layer: QuantTensors, dtype: torch.dtype, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    name, (n, k), per_row = row.name, layer.shape, row.weights == "fp8"
    compute, blocked = _dtype(str(dtype).removeprefix("torch.")), {"is_swizzled_scales": True}
    if name == "Float8Tensor":
        matmul = _object("Float8MMConfig", emulate=False, use_fast_accum=True, pad_inner_dim=False)
        data = {
            "block_size": [1 if per_row else n, k],
            "mm_config": matmul if row.activations else None,
            "act_quant_kwargs": _object(
                "QuantizeTensorToFloat8Kwargs",
                float8_dtype=_E4M3,
                granularity=_object("PerRow", dim=-1) if per_row else _object("PerTensor"),
                mm_config=None,
                hp_value_lb=None,
                hp_value_ub=None,
                kernel_preference=_AUTO,
            ),
            "kernel_preference": _AUTO,
            "dtype": compute,
        }
    elif name == "Int8Tensor":
        grain: dict[str, Any] = {"granularity": _object("PerRow", dim=-1), "mapping_type": _SYMMETRIC}
        data = {
            "act_quant_kwargs": _object("QuantizeTensorToInt8Kwargs", **grain, reduce_range=False),
            "reduce_range": False,
            "block_size": [1, k],
            "dtype": compute,
        }
    elif name == "MXTensor":
        element = {"elem_dtype": _E4M3 if row.weights == "mxfp8" else _dtype("float4_e2m1fn_x2"), "block_size": 32}
        rounding = {"scaling_mode": _RCEIL, "kernel_preference": _AUTO}
        data = {
            **element,
            "orig_dtype": compute,
            "kernel_preference": _AUTO,
            "act_quant_kwargs": _object("QuantizeTensorToMXKwargs", **element, **rounding, **blocked),
            **blocked,
        }
    else:
        blocked |= {"use_triton_kernel": False}
        dynamic = {"use_dynamic_per_tensor_scale": not layer.scheme.static_input}
        data = {
            **blocked,
            "act_quant_kwargs": _object("QuantizeTensorToNVFP4Kwargs", block_size=16, **blocked, **dynamic),
            "block_size": 16,
            "orig_dtype": compute,
        }
    if row.activations is None:
        data["act_quant_kwargs"] = None
    return {"_type": name, "_data": data, "_tensor_data_names": [part for part in _PARTS if part in parts]}


def _config_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration under which torchao makes tensors like this one."""
    name, data = entry["_type"], entry["_data"]
    kwargs = data["act_quant_kwargs"]
    inductor = {"set_inductor_config": True}
    if name == "Float8Tensor":
        per_row = data["block_size"][0] == 1
        grain = _object("PerRow", 1, dim=-1) if per_row else _object("PerTensor", 1)
        if kwargs is None:
            return _object("Float8WeightOnlyConfig", 2, weight_dtype=_E4M3, **inductor, granularity=grain)
        return _object(
            "Float8DynamicActivationFloat8WeightConfig",
            2,
            activation_dtype=_E4M3,
            weight_dtype=_E4M3,
            granularity=[grain, grain],
            packing_format=_word("Float8PackingFormat", "PLAIN"),
            mm_config=_object("Float8MMConfig", 1, **data["mm_config"]["_data"]),
            activation_value_lb=None,
            activation_value_ub=None,
            kernel_preference=_AUTO,
            **inductor,
            alg_id=0,
        )
    if name == "Int8Tensor":
        grain = {"granularity": _object("PerRow", 1, dim=-1), **inductor}
        if kwargs is None:
            return _object("Int8WeightOnlyConfig", 2, group_size=None, **grain)
        mapping = {"act_mapping_type": _SYMMETRIC, "weight_only_decode": False}
        return _object("Int8DynamicActivationInt8WeightConfig", 2, **mapping, **grain, reduce_range=False)
    if name == "MXTensor":
        dtypes = {f"{of}_dtype": data["elem_dtype"] for of in ("activation", "weight")}
        rounding = {"kernel_preference": _AUTO, "scaling_mode": _RCEIL}
        return _object("MXDynamicActivationMXWeightConfig", 1, block_size=32, **dtypes, **rounding)
    if kwargs is None:
        return _object("NVFP4WeightOnlyConfig", 1, use_dynamic_per_tensor_scale=True)
    same = {key: kwargs["_data"][key] for key in ("use_triton_kernel", "use_dynamic_per_tensor_scale")}
    return _object("NVFP4DynamicActivationNVFP4WeightConfig", 1, **same, step=None)


def _object(name: str, version: int | None = None, **data: Any) -> dict[str, Any]:
    """An object as torchao writes it; configurations have a version."""
    return {"_type": name, **({} if version is None else {"_version": version}), "_data": data}


def _word(name: str, value: str) -> dict[str, Any]:
    return {"_type": name, "_data": value}


def _dtype(name: str) -> dict[str, Any]:
    return _word("torch.dtype", name)


_AUTO, _E4M3 = _word("KernelPreference", "AUTO"), _dtype("float8_e4m3fn")
_SYMMETRIC, _RCEIL = _word("MappingType", "SYMMETRIC"), _word("ScaleCalculationMode", "RCEIL")
_PARTS = ("zero_point", "act_pre_scale", "per_tensor_scale", "act_per_tensor_scale", "qdata", "scale")
_READER = "diffusers"
ROWS = (
    Row("Float8Tensor", "fp8", "fp8", read_by=_READER),
    Row("Float8Tensor", "fp8", None, read_by=_READER),
    Row("Float8Tensor", "fp8_tensor", "fp8_tensor", read_by=_READER),
    Row("Float8Tensor", "fp8_tensor", None, read_by=_READER),
    Row("Int8Tensor", "int8", "int8", smooth=True, read_by=_READER),
    Row("Int8Tensor", "int8", None, smooth=True, read_by=_READER),
    Row("MXTensor", "mxfp8", "mxfp8", read_by=_READER),
    Row("MXTensor", "mxfp4", "mxfp4", read_by=_READER),
    Row("NVFP4Tensor", "nvfp4", "nvfp4", input_scale="optional", read_by=_READER),
    Row("NVFP4Tensor", "nvfp4", None, read_by=_READER),
)


# --- files


def _header(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    text = model.metadata.get(f"{name}.weight")
    if text is None:
        raise ValueError(f"the header does not say what class {name}.weight is of; the file is not whole")
    return json_object(text, f"the header's entry for {name}.weight")


DIALECT = Dialect(
    "torchao",
    "torchao's tensor subclasses, for diffusers' from_pretrained",
    decode,
    marks=(by_config("torchao"), by_tensor("_weight_qdata")),
    methods=("torchao",),
    suffixes=(r"_weight_\w+",),
    entry=_header,
    rows=ROWS,
    tiles=_tiles,
    encode=encode,
    writer=pipeline_writer(
        lambda one: config(one.entries, one.in_16_bit), lambda one: metadata(one.entries, one.plain)
    ),
    takes_dtype=True,
    format_key="_type",
)
