"""nunchaku's single file of FLUX.1: which of diffusers' Linears make which of its own, and how.

nunchaku runs blocks of its own. q, k and v are one Linear there, a modulation's rows lie channel by channel, and what
follows GELU is rounded without a sign. A single block's `proj_out`, which reads attention and feed-forward side by
side, is two Linears whose outputs are added: the first has a bias of zeros. Every Linear of a block is quantized.
Source: nunchaku 1.2's conversion of FLUX.1 state dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fluxq.quantize.exchange.layer import QuantTensors

MODEL_CLASS = "NunchakuFluxTransformer2dModel"


@dataclass(frozen=True)
class Row:
    """A Linear of nunchaku's blocks. parts: of diffusers' block. columns: "first", those of the attention, or "rest"
    of the only part; chunks: of a modulation. after_gelu: its input follows GELU.
    """

    parts: tuple[str, ...]
    columns: Literal["", "first", "rest"] = ""
    chunks: int = 0
    after_gelu: bool = False


AS_IT_IS = Row(())  # of every other program
_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
BLOCKS = {
    "transformer_blocks": {
        "norm1.linear": Row(("norm1.linear",), chunks=6),
        "norm1_context.linear": Row(("norm1_context.linear",), chunks=6),
        "qkv_proj": Row(_QKV),
        "qkv_proj_context": Row(_ADDED_QKV),
        "out_proj": Row(("attn.to_out.0",)),
        "out_proj_context": Row(("attn.to_add_out",)),
        "mlp_fc1": Row(("ff.net.0.proj",)),
        "mlp_fc2": Row(("ff.net.2",), after_gelu=True),
        "mlp_context_fc1": Row(("ff_context.net.0.proj",)),
        "mlp_context_fc2": Row(("ff_context.net.2",), after_gelu=True),
    },
    "single_transformer_blocks": {
        "norm.linear": Row(("norm.linear",), chunks=3),
        "qkv_proj": Row(_QKV),
        "out_proj": Row(("proj_out",), "first"),
        "mlp_fc1": Row(("proj_mlp",)),
        "mlp_fc2": Row(("proj_out",), "rest", after_gelu=True),
    },
}


def rows_of(linears: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...], Row]]:
    """(name in the file, modules of diffusers, row) of every Linear of nunchaku's. linears: of the model."""
    blocks = dict.fromkeys(tuple(name.split(".")[:2]) for name in linears if name.split(".")[0] in BLOCKS)
    for stack, index in blocks:
        for name, row in BLOCKS[stack].items():
            block = f"{stack}.{index}"
            yield f"{block}.{name}", tuple(f"{block}.{part}" for part in row.parts), row


def plain_name(name: str) -> str:
    """What nunchaku calls a tensor that is in 16 bit: norms of heads stand beside the Linears."""
    stack, dot, rest = name.partition(".")
    return f"{stack}.{rest.replace('.attn.', '.')}" if stack in BLOCKS and dot else name


def columns_of(layer: QuantTensors, which: Literal["first", "rest"]) -> QuantTensors:
    """The layer that reads the first N of its K columns, or the others; the bias goes with the others."""
    n, k = layer.shape
    start, stop = (0, n) if which == "first" else (n, k)
    group = layer.scheme.weights.group_size
    step = {"weight": 2, "weight_scale": group, "pre_quant_scale": 1, "svdquant_lora_a": 1}
    tensors = dict(layer.tensors)
    for name, size in step.items():
        if name in tensors:
            tensors[name] = tensors[name][..., start // size : stop // size].contiguous()
    if which == "first" and "bias" in tensors:
        tensors["bias"] = torch.zeros_like(tensors["bias"])
    return replace(layer, tensors=tensors, shape=(n, stop - start))
