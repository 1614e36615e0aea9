"""bitsandbytes' 4-bit layers, to read from: NF4 and FP4 codes into a table of 16 numbers, which is no format of ours.

    weight U8 [N·K/2, 1]                the first of two in the high nibble, row by row
    weight.absmax                       F32 [blocks], or U8 into weight.nested_quant_map F32 [256], whose blocks of 256
                                        have scales weight.nested_absmax F32, and nested_offset on top
    weight.quant_map F32 [16]
    weight.quant_state.bitsandbytes__nf4   U8, JSON: blocksize, shape, dtype, nested_…

Source: bitsandbytes 0.50, functional.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Plain
from fluxq.quantize.exchange.marks import Headers, by_config, has_codes, json_tensor
from fluxq.quantize.exchange.rows import Tensors

_STATE = "weight.quant_state.bitsandbytes__"


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any] = {}) -> Plain:
    """The weight (N, K) = shape in fp32."""
    parts, (n, k) = Tensors(tensors, "bnb"), shape
    kind = next((name.removeprefix(_STATE) for name in tensors if name.startswith(_STATE)), "")
    if kind not in ("nf4", "fp4"):
        raise ValueError(f"bnb: the layer has no {_STATE}nf4; 8-bit and other files of bitsandbytes are not read here")
    state = _state_of(parts.take(_STATE + kind, torch.uint8))
    if _shape_of(state) != tuple(shape):
        raise ValueError(f"bnb: quant_state says the weight is {state['shape']}, the model has {list(shape)}")
    codes = parts.take("weight", torch.uint8, (n * k // 2, 1), (n * k // 2,)).reshape(-1)
    table = parts.take("weight.quant_map", torch.float32, (16,))
    count = _blocks(n * k, state, "blocksize")
    if "weight.nested_absmax" in parts:
        indices = parts.take("weight.absmax", torch.uint8, (count,)).int()
        outer = parts.scale("weight.nested_absmax", torch.float32, (_blocks(count, state, "nested_blocksize"),))
        numbers = parts.take("weight.nested_quant_map", torch.float32, (256,))
        wide = outer.repeat_interleave(state["nested_blocksize"])[:count]
        offset = state.get("nested_offset")
        if not isinstance(offset, (int, float)):
            raise ValueError(f"bnb: nested_offset is {offset!r}, no number")
        absmax = numbers[indices] * wide + offset
    else:
        absmax = parts.scale("weight.absmax", torch.float32, (count,))
    bias = parts.bias(n).get("bias")
    parts.finish()
    values = table[torch.stack([codes >> 4, codes & 0xF], dim=-1).reshape(-1).int()]
    # An absmax of 0 is no lost scale here: bitsandbytes gives a block of zeros whatever codes its division ends at.
    weight = values * absmax.repeat_interleave(state["blocksize"])[: n * k]
    if not torch.isfinite(weight).all():
        raise ValueError("bnb: the tables hold NaN or infinity; get the file again")
    return Plain(weight.reshape(shape), bias, f"{kind} has a table of its own")


def _state_of(tensor: Tensor) -> dict[str, Any]:
    """The JSON object of a quant_state tensor, with a `shape`; ValueError if it holds none."""
    state = json_tensor(tensor, "bnb: quant_state")
    if not isinstance(state.get("shape"), list):
        raise ValueError("bnb: quant_state is no JSON object with a shape; get the file again")
    return state


def _shape_of(state: Mapping[str, Any]) -> tuple[int, int]:
    shape = state["shape"]
    if len(shape) != 2 or not all(type(size) is int and 0 < size < 1 << 24 for size in shape):
        raise ValueError(
            f"bnb: quant_state says the weight is {str(shape)[:80]}, expected two sizes; get the file again"
        )
    return shape[0], shape[1]


def _blocks(elements: int, state: Mapping[str, Any], name: str) -> int:
    size = state.get(name)
    if type(size) is not int or not 1 <= size <= 1 << 16:
        raise ValueError(f"bnb: {name} is {size!r}, no number of elements")
    return -(-elements // size)


def _by_state(model: Headers) -> str:
    count = sum(any(suffix.startswith(_STATE) for suffix in parts) for parts in model.groups.values())
    return f"{count} layers have a quant_state" if count else ""


def _has_codes(stored: Mapping[str, Stored]) -> bool:
    """Tell layers from plain casts to fp8, which may stand beside them."""
    return has_codes(stored) and not ("weight" in stored and stored["weight"].dtype.startswith("F8"))


def _entry(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    states = [suffix for suffix in stored if suffix.startswith(_STATE)]
    if not states:
        raise ValueError("has codes and no quant_state; 8-bit layers of bitsandbytes are not read here")
    return _state_of(model.read(f"{name}.{states[0]}"))


DIALECT = Dialect(
    "bnb",
    "bitsandbytes' NF4",
    decode,
    marks=(_by_state, by_config("bitsandbytes")),
    methods=("bitsandbytes",),
    suffixes=(r"weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)",),
    has_codes=_has_codes,
    entry=_entry,
    shape=lambda stored, entry: _shape_of(entry),
    format_of=lambda layer: "fp4" if any(suffix.endswith("fp4") for suffix in layer.parts) else "nf4",
)
