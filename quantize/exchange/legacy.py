"""ComfyUI's fp8 files of before `comfy_quant`, to read from.

    weight E4M3 or E5M2 [N, K], scale_weight F32 [] or [1], some [N, 1], scale_input F32 [] or [1]

The file has a tensor `scaled_fp8`, and two elements of it mean that the weight is widened and x is not rounded. A file
without it, and layers without scale_weight, are plain casts: their scale is 1. Source: ComfyUI's comfy/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Decoded, Plain
from fluxq.quantize.exchange.marks import Headers, by_tensor
from fluxq.quantize.exchange.rows import FLOATS, Row, Tensors, native
from fluxq.recipes.keymaps import CHECKPOINT_PREFIX


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any] = {}) -> Decoded:
    """The layer whose weight is (N, K) = shape. entry: {"scaled_fp8": number of elements of that tensor}, if there."""
    parts = Tensors(tensors, "legacy")
    weight = parts.take("weight", (torch.float8_e4m3fn, torch.float8_e5m2), shape)
    scale = torch.ones((), dtype=torch.float32)
    if "scale_weight" in parts:
        scale = parts.scale("scale_weight", FLOATS, (), (1,), (shape[0], 1)).float()
        scale = scale if scale.ndim == 2 else scale.reshape(())
    done = parts.bias(shape[0])
    if "scale_input" in parts:
        x_scale = parts.scale("scale_input", FLOATS, (), (1,)).float().reshape(())
        done |= {} if x_scale == 1 else {"input_scale": x_scale}  # ComfyUI drops a 1 too
    parts.finish()
    if weight.dtype == torch.float8_e5m2:
        return Plain(weight.float() * scale, done.get("bias"), "it is E5M2")
    if scale.ndim:
        return Plain(weight.float() * scale, done.get("bias"), "it has a scale for each row, and ComfyUI's have one")
    row = ROWS[1] if entry.get("scaled_fp8", 2) == 2 else ROWS[0]
    return native(row, shape, done | {"weight": weight, "weight_scale": scale})


ROWS = (Row("scaled_fp8", "fp8_tensor", "fp8_tensor", input_scale="optional"), Row("scaled_fp8", "fp8_tensor", None))


def _by_sign(model: Headers) -> str:
    return next((f"it has the tensor {name}" for name in _SIGNS if name in model.stored), "")


def _entry(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    sign = next((model.stored[key] for key in _SIGNS if key in model.stored), None)
    return {"scaled_fp8": sign.shape[0] if sign and len(sign.shape) == 1 else 2}


_SIGNS = ("scaled_fp8", CHECKPOINT_PREFIX + "scaled_fp8")
DIALECT = Dialect(
    "legacy",
    "ComfyUI's fp8 of before comfy_quant",
    decode,
    "original",
    marks=(_by_sign, by_tensor("scale_weight")),
    signs=_SIGNS,
    suffixes=("scale_weight", "scale_input"),
    entry=_entry,
    format_of=lambda layer: "scaled_fp8",
    rows=ROWS,
)
