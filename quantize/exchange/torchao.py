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
from fluxq.quantize.exchange.layer import (
    FLOATS,
    Decoded,
    Encoded,
    Plain,
    QuantTensors,
    Read,
    Row,
    Tensors,
    native,
    positive,
    row_for,
)
from fluxq.quantize.exchange.layouts import block_scales, padded, scaled, unblock_scales
from fluxq.quantize.exchange.marks import Headers, by_config, by_tensor, json_object

_PREFIX = "_weight_"


def encode(layer: QuantTensors, dtype: torch.dtype = torch.bfloat16) -> Encoded:
    """Tensors and entry (the header's JSON object) of a layer; dtype: that the loaded model computes in.

    ValueError that says why torchao has no tensor for it.
    """
    row, notes = row_for(layer, ROWS, "torchao")
    tensors, (n, k) = dict(layer.tensors), layer.shape
    if tensors.get("weight_scale_2", torch.tensor(0)).ndim:
        raise ValueError("torchao: an NVFP4Tensor has one global scale; split the fused layer first")
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
    name, said = entry.get("_type"), entry.get("_data")
    if not isinstance(said, dict) or not isinstance(name, str) or name not in _READERS:
        raise ValueError(f"torchao: tensor class {name!r} is none that is read here; known are {', '.join(_READERS)}")
    held = Tensors({key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}, "torchao")
    done = held.bias(n)
    found = _READERS[name](held, shape, said)
    held.finish()
    if isinstance(found, Plain):
        return replace(found, bias=done.get("bias"))
    weights, own = found
    rounds_x = said.get("act_quant_kwargs") is not None
    rows = [row for row in ROWS if (row.weights, row.activations is not None) == (weights, rounds_x)]
    if not rows:
        raise ValueError(f"torchao: {name} of {weights} weights is not read without activations")
    return native(rows[0], shape, done | own)


def _read_float8(held: Tensors, shape: tuple[int, int], said: Mapping[str, Any]) -> Read:
    n, k = shape
    weight = held.take("qdata", torch.float8_e4m3fn, shape)
    scale = held.scale("scale", FLOATS, (n, 1), (1, 1), ()).float()
    per_row = scale.numel() == n and (n > 1 or said.get("block_size") == [1, k])
    name = "fp8" if per_row else "fp8_tensor"
    return name, {"weight": weight, "weight_scale": scale.reshape(n) if per_row else scale.reshape(())}


def _read_int8(held: Tensors, shape: tuple[int, int], said: Mapping[str, Any]) -> Read:
    n, k = shape
    weight, scale = held.take("qdata", torch.int8, shape), held.scale("scale", FLOATS).float()
    if scale.ndim != 2 or scale.shape[0] not in (1, n) or not scale.shape[1] or k % scale.shape[1]:
        raise ValueError(f"torchao: scale {(*scale.shape,)} does not divide a weight of {shape}")
    if "zero_point" in held and held.take("zero_point", torch.int8, tuple(scale.shape)).any():
        raise ValueError("torchao: an Int8Tensor with zero points other than 0 is not read here")
    if scale.shape[1] > 1:
        dense = scaled(weight.float().reshape(n, scale.shape[1], -1), scale.unsqueeze(-1)).reshape(shape)
        if "act_pre_scale" in held:
            dense = dense * held.scale("act_pre_scale", FLOATS, (k,)).float()
        return Plain(dense, None, f"it is int8 in groups of {k // scale.shape[1]}")
    scale = scale.reshape(-1).expand(n).contiguous()
    done = {"weight": weight, "weight_scale": scale}
    if "act_pre_scale" in held:
        done["pre_quant_scale"] = held.scale("act_pre_scale", FLOATS, (k,))
    return "int8", done


def _read_mx(held: Tensors, shape: tuple[int, int], said: Mapping[str, Any]) -> Read:
    (n, k), element = shape, said.get("elem_dtype")
    packed = isinstance(element, dict) and element.get("_data") == "float4_e2m1fn_x2"
    weight = held.take("qdata", torch.uint8, (n, k // 2)) if packed else held.take("qdata", torch.float8_e4m3fn, shape)
    scale = _linear(held.take("scale", torch.float8_e8m0fnu), n, k // 32, said).view(torch.uint8)
    return "mxfp4" if packed else "mxfp8", {"weight": weight, "weight_scale": scale}


def _read_nvfp4(held: Tensors, shape: tuple[int, int], said: Mapping[str, Any]) -> Read:
    n, k = shape
    scale = positive(_linear(held.take("scale", torch.float8_e4m3fn), n, k // 16, said), "torchao: scale")
    done = {"weight": held.take("qdata", torch.uint8, (n, k // 2)), "weight_scale": scale}
    done["weight_scale_2"] = torch.ones((), dtype=torch.float32)  # where block scales stand alone
    for part, name in (("per_tensor_scale", "weight_scale_2"), ("act_per_tensor_scale", "input_scale")):
        if part in held:
            done[name] = held.scale(part, torch.float32, ())
    return "nvfp4", done


def _linear(scale: Tensor, rows: int, groups: int, said: Mapping[str, Any]) -> Tensor:
    """Block scales (rows, groups) in the order of the matrix."""
    if said.get("is_swizzled_scales"):
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
    if not entries:
        raise ValueError("torchao: no layer is quantized")
    kinds = Counter(json.dumps(_config_of(entry)) for entry in entries.values())
    kind, _ = kinds.most_common(1)[0]
    return {"quant_method": "torchao", "quant_type": {"default": json.loads(kind)}, "modules_to_not_convert": ignore}


def _tiles(rows: int, groups: int) -> tuple[int, int]:
    """Return torchao's shape of swizzled scales: 32 lines of 16 bytes for each tile."""
    return padded(rows, 128) // 4, padded(groups, 4) * 4


def _entry(row: Row, layer: QuantTensors, dtype: torch.dtype, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    weights, rounds_x = layer.scheme.weights, layer.scheme.activations is not None
    name, (n, k) = row.name, layer.shape
    compute = _dtype(str(dtype).removeprefix("torch."))
    if name == "Float8Tensor":
        per_row = weights.name == "fp8"
        matmul = {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False}
        said = {
            "block_size": [1 if per_row else n, k],
            "mm_config": _object("Float8MMConfig", matmul) if rounds_x else None,
            "act_quant_kwargs": _fp8_activations(per_row) if rounds_x else None,
            "kernel_preference": _AUTO,
            "dtype": compute,
        }
    elif name == "Int8Tensor":
        symmetric = _object("MappingType", "SYMMETRIC")
        kwargs = {"granularity": _PER_ROW, "mapping_type": symmetric, "reduce_range": False}
        said = {
            "act_quant_kwargs": _object("QuantizeTensorToInt8Kwargs", kwargs) if rounds_x else None,
            "reduce_range": False,
            "block_size": [1, k],
            "dtype": compute,
        }
    elif name == "MXTensor":
        element = _dtype("float8_e4m3fn" if weights.name == "mxfp8" else "float4_e2m1fn_x2")
        kwargs = {
            "elem_dtype": element,
            "block_size": 32,
            "scaling_mode": _object("ScaleCalculationMode", "RCEIL"),
            "kernel_preference": _AUTO,
            "is_swizzled_scales": True,
        }
        said = {
            "elem_dtype": element,
            "block_size": 32,
            "orig_dtype": compute,
            "kernel_preference": _AUTO,
            "act_quant_kwargs": _object("QuantizeTensorToMXKwargs", kwargs),
            "is_swizzled_scales": True,
        }
    else:
        kwargs = {
            "block_size": 16,
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "use_dynamic_per_tensor_scale": not layer.scheme.static_input,
        }
        said = {
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "act_quant_kwargs": _object("QuantizeTensorToNVFP4Kwargs", kwargs) if rounds_x else None,
            "block_size": 16,
            "orig_dtype": compute,
        }
    return {"_type": name, "_data": said, "_tensor_data_names": [part for part in _PARTS if part in parts]}


def _config_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration under which torchao makes tensors like this one."""
    name, said = entry["_type"], entry["_data"]
    kwargs = said["act_quant_kwargs"]
    if name == "Float8Tensor":
        per_row = said["block_size"][0] == 1
        grain = _object("PerRow", {"dim": -1}, 1) if per_row else _object("PerTensor", {}, 1)
        if kwargs is None:
            data = {"weight_dtype": _dtype("float8_e4m3fn"), "set_inductor_config": True, "granularity": grain}
            return _object("Float8WeightOnlyConfig", data, 2)
        data = {
            "activation_dtype": _dtype("float8_e4m3fn"),
            "weight_dtype": _dtype("float8_e4m3fn"),
            "granularity": [grain, grain],
            "packing_format": _object("Float8PackingFormat", "PLAIN"),
            "mm_config": _object("Float8MMConfig", said["mm_config"]["_data"], 1),
            "activation_value_lb": None,
            "activation_value_ub": None,
            "kernel_preference": _AUTO,
            "set_inductor_config": True,
            "alg_id": 0,
        }
        return _object("Float8DynamicActivationFloat8WeightConfig", data, 2)
    if name == "Int8Tensor":
        grain = _object("PerRow", {"dim": -1}, 1)
        if kwargs is None:
            data = {"group_size": None, "granularity": grain, "set_inductor_config": True}
            return _object("Int8WeightOnlyConfig", data, 2)
        data = {
            "act_mapping_type": _object("MappingType", "SYMMETRIC"),
            "weight_only_decode": False,
            "granularity": grain,
            "set_inductor_config": True,
            "reduce_range": False,
        }
        return _object("Int8DynamicActivationInt8WeightConfig", data, 2)
    if name == "MXTensor":
        data = {
            "block_size": 32,
            "activation_dtype": said["elem_dtype"],
            "weight_dtype": said["elem_dtype"],
            "kernel_preference": _AUTO,
            "scaling_mode": _object("ScaleCalculationMode", "RCEIL"),
        }
        return _object("MXDynamicActivationMXWeightConfig", data, 1)
    if kwargs is None:
        return _object("NVFP4WeightOnlyConfig", {"use_dynamic_per_tensor_scale": True}, 1)
    data = {
        "use_triton_kernel": False,
        "use_dynamic_per_tensor_scale": kwargs["_data"]["use_dynamic_per_tensor_scale"],
        "step": None,
    }
    return _object("NVFP4DynamicActivationNVFP4WeightConfig", data, 1)


def _fp8_activations(per_row: bool) -> dict[str, Any]:
    data = {
        "float8_dtype": _dtype("float8_e4m3fn"),
        "granularity": _PER_ROW if per_row else _object("PerTensor", {}),
        "mm_config": None,
        "hp_value_lb": None,
        "hp_value_ub": None,
        "kernel_preference": _AUTO,
    }
    return _object("QuantizeTensorToFloat8Kwargs", data)


def _object(name: str, data: Any, version: int | None = None) -> dict[str, Any]:
    """An object as torchao writes it; configurations have a version."""
    return {"_type": name, **({} if version is None else {"_version": version}), "_data": data}


def _dtype(name: str) -> dict[str, Any]:
    return _object("torch.dtype", name)


_AUTO = _object("KernelPreference", "AUTO")
_PER_ROW = _object("PerRow", {"dim": -1})
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
    said="_type",
)
