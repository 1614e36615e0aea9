"""GGUF's blocks, to read from: llama.cpp's integers of 32 or 256 neighbours, which no format of ours holds.

A weight becomes 16 bit, or whatever a recipe then makes of it. The blocks are taken apart by the `gguf` package.
Source: gguf 0.19, and the type names of ggml.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.gguf_file import BLOCKS
from fluxq.quantize.exchange.layer import Plain
from fluxq.quantize.exchange.layouts import NeedsPackage
from fluxq.quantize.exchange.marks import FLOATS as PLAIN_FLOATS
from fluxq.quantize.exchange.marks import codes_in, weight_of
from fluxq.quantize.exchange.rows import FLOATS, Tensors


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any]) -> Plain:
    """The weight (N, K) = shape in fp32. weight: its bytes, U8 in any shape. entry: {"type": "Q8_0", "Q4_K", …}."""
    try:
        package, quants = import_module("gguf"), import_module("gguf.quants")
    except ImportError:
        raise NeedsPackage("gguf: reading GGUF needs its package: python -m pip install gguf") from None
    parts, name, (n, k) = Tensors(tensors, "gguf"), entry.get("type"), shape
    kinds = {kind.name: kind for kind in package.GGMLQuantizationType if kind.name in TYPES}
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"gguf: blocks of {name!r} are not read here; known are {', '.join(TYPES)}")
    elements, size = package.GGML_QUANT_SIZES[kinds[name]]
    data = parts.take("weight", torch.uint8).contiguous()
    bias = parts.take("bias", FLOATS, (n,)) if "bias" in parts else None
    parts.finish()
    if k % elements or data.numel() != n * k // elements * size:
        raise ValueError(
            f"gguf: {data.numel()} bytes of {name} are no weight of ({n}, {k}), which takes {n * k // elements * size}"
        )
    weight = torch.from_numpy(quants.dequantize(data.reshape(n, -1).numpy(), kinds[name]).copy()).reshape(shape)
    if not torch.isfinite(weight).all():
        raise ValueError(f"gguf: {name} blocks hold NaN or infinite scales; get the file again")
    return Plain(weight.float(), bias, f"{name} has blocks of {elements}")


TYPES = ("F32", "F16", "BF16", *(name for name, _, _ in BLOCKS.values()))


def _has_codes(stored: Mapping[str, Stored]) -> bool:
    codes = codes_in(stored)
    return codes is not None and len(codes.shape) == 2 and codes.dtype not in PLAIN_FLOATS


DIALECT = Dialect(
    "gguf",
    "llama.cpp's blocks",
    decode,
    "original",
    marks=(lambda model: "it begins with GGUF" if model.container == "GGUF file" else "",),
    methods=("gguf",),
    has_codes=_has_codes,
    entry=lambda model, name, stored: {"type": weight_of(stored).dtype},
    has_nibbles=False,
)
