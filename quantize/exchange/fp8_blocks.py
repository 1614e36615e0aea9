"""fp8 with a scale for each block of 128 rows by 128 columns, as DeepSeek, Qwen and transformers write it; read only.

    weight E4M3 [N, K], weight_scale_inv F32, BF16 or E8M0 [⌈N/128⌉, ⌈K/128⌉], which multiplies in spite of its name

No format of ours has such blocks, so that its layers are read as 16 bit. Source: transformers' finegrained_fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Plain
from fluxq.quantize.exchange.layouts import BLOCK, over_blocks
from fluxq.quantize.exchange.marks import by_config, by_tensor
from fluxq.quantize.exchange.rows import FLOATS, Tensors


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any]) -> Plain:
    """The layer whose weight is (N, K) = shape. entry: {"block": `weight_block_size` of config.json, or None}."""
    size = entry.get("block")
    if size not in (None, [BLOCK, BLOCK]):
        raise ValueError(f"fp8_blocks: weight_block_size {size!r} is not read here, [{BLOCK}, {BLOCK}] is")
    held = Tensors(tensors, "fp8_blocks")
    if "activation_scale" in held:  # of x, which is in 16 bit where the weight is
        held.scale("activation_scale", FLOATS)
    return read_blocks(held, shape, "weight_scale_inv", (*FLOATS, torch.float8_e8m0fnu))


def read_blocks(held: Tensors, shape: tuple[int, int], name: str, dtypes: tuple[torch.dtype, ...]) -> Plain:
    """The layer of `weight` and the block scales `name`, (⌈N/128⌉, ⌈K/128⌉) or ModelOpt's (⌈N/128⌉, 1, ⌈K/128⌉, 1).

    A layer of one block may have its scale as (). Nothing else may be left in `held`.
    """
    codes, bias = held.take("weight", torch.float8_e4m3fn, shape), held.bias(shape[0]).get("bias")
    rows, columns = (-(-size // BLOCK) for size in shape)
    one = [()] if rows == columns == 1 else []
    scale = held.scale(name, dtypes, (rows, columns), (rows, 1, columns, 1), *one)
    held.finish()
    weight = over_blocks(codes, scale.reshape(rows, columns))
    return Plain(weight, bias, f"it has a scale for each block of {BLOCK} by {BLOCK}")


DIALECT = Dialect(
    "fp8_blocks",
    "fp8 in blocks of 128 by 128, of transformers",
    decode,
    marks=(by_config("fp8"), by_tensor("weight_scale_inv")),
    methods=("fp8",),
    suffixes=("weight_scale_inv", "activation_scale"),
    entry=lambda model, name, stored: {"block": model.quantization.get("weight_block_size")},
)
