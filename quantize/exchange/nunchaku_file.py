"""nunchaku's single file of FLUX.1: which of diffusers' Linears make which of its own, and how.

nunchaku runs blocks of its own. q, k and v are one Linear there, a modulation's rows lie channel by channel, and what
follows GELU is rounded without a sign. A single block's `proj_out`, which reads attention and feed-forward side by
side, is two Linears whose outputs are added: the first has a bias of zeros. Every Linear of a block is quantized.
Source: nunchaku 1.2's conversion of FLUX.1 state dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fluxq.kernels.linear import LOW_RANK
from fluxq.quantize.exchange import nunchaku
from fluxq.quantize.exchange.layer import Plain, QuantTensors

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
SIDES = ("out_proj", "mlp_fc2")  # of a single block: the columns of diffusers' proj_out
_HEADS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
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


def parts_of(name: str) -> tuple[tuple[str, ...], Row] | None:
    """(modules of diffusers, row) of a Linear of nunchaku's, or of SIDES in one; None for other names."""
    stack, index, member = (*name.split(".", 2), "", "")[:3]
    row = BLOCKS.get(stack, {}).get(SIDES[1] if member == "+".join(SIDES) else member)
    return (tuple(f"{stack}.{index}.{part}" for part in row.parts), row) if row and index.isdecimal() else None


def plain_name(name: str) -> str:
    """Return nunchaku's name of a tensor that is in 16 bit: norms of heads stand beside the Linears."""
    stack, dot, rest = name.partition(".")
    return f"{stack}.{rest.replace('.attn.', '.')}" if stack in BLOCKS and dot else name


def diffusers_name(name: str) -> str:
    """Inverse of `plain_name`."""
    stack, index, rest = (*name.split(".", 2), "", "")[:3]
    return f"{stack}.{index}.attn.{rest}" if stack in BLOCKS and rest.partition(".")[0] in _HEADS else name


def decode(
    tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any] | None = None
) -> QuantTensors | Plain:
    """A layer as diffusers' blocks have it.

    entry: that of `nunchaku.decode`, and of a modulation its `chunks`. SIDES are one layer: names of their tensors
    begin with theirs, and `columns` says how many of K the first reads.
    """
    entry = entry or {}
    if "columns" in entry:
        (n, k), first = shape, int(entry["columns"])
        own = [
            {name.removeprefix(f"{side}."): tensor for name, tensor in tensors.items() if name.startswith(f"{side}.")}
            for side in SIDES
        ]
        return side_by_side(nunchaku.decode(own[0], (n, first)), nunchaku.decode(own[1], (n, k - first), entry))
    layer = nunchaku.decode(tensors, shape, entry)
    return nunchaku.chunked(layer, entry["chunks"]) if "chunks" in entry else layer


def side_by_side(first: QuantTensors | Plain, rest: QuantTensors | Plain) -> QuantTensors | Plain:
    """The layer that reads side by side what two read, and gives the sum of what they give: of `columns_of` the
    inverse.

    Low-rank pairs with other B stand beside each other, which is exact. Plain where no scheme of ours holds it.
    """
    if isinstance(first, Plain) or isinstance(rest, Plain):
        return _dense(first, rest, first.why if isinstance(first, Plain) else getattr(rest, "why", ""))
    schemes = [replace(layer.scheme, rank=0, smooth=False) for layer in (first, rest)]
    if schemes[0] != schemes[1]:
        return _dense(first, rest, f"its columns are {first.scheme} and {rest.scheme}")
    if not _same(first, rest, "weight_scale_2"):
        return _dense(first, rest, "its columns have two global scales, where a layer of ours has one")
    tensors = {name: tensor for name, tensor in rest.tensors.items() if name not in (*LOW_RANK, "bias")}
    for name in ("weight", "weight_scale"):
        halves = [layer.tensors[name] for layer in (first, rest)]
        raw = [half.view(torch.uint8) if half.element_size() == 1 else half for half in halves]
        tensors[name] = torch.cat(raw, dim=1).view(halves[0].dtype)
    factors = [layer.tensors.get("pre_quant_scale") for layer in (first, rest)]
    dtype = next((held.dtype for held in factors if held is not None), None)
    if dtype is not None:
        sides = zip(factors, (first, rest), strict=True)
        tensors["pre_quant_scale"] = torch.cat(
            [torch.ones(side.shape[1], dtype=dtype) if held is None else held for held, side in sides]
        )
    pair = _low_rank(first, rest)
    biases = [layer.tensors["bias"] for layer in (first, rest) if "bias" in layer.tensors]
    rank = pair[LOW_RANK[0]].shape[0] if pair else 0
    scheme = replace(schemes[0], rank=rank, smooth="pre_quant_scale" in tensors)
    shape = rest.shape[0], first.shape[1] + rest.shape[1]
    return QuantTensors(tensors | pair | _sum(biases), shape, scheme, rest.beside)


def _low_rank(first: QuantTensors, rest: QuantTensors) -> dict[str, Tensor]:
    """The low-rank pair of both, or nothing."""
    pairs = [layer for layer in (first, rest) if layer.scheme.rank]
    if not pairs:
        return {}
    dtype = pairs[0].tensors[LOW_RANK[0]].dtype
    a, b = (
        [
            layer.tensors.get(
                name,
                torch.zeros((0, layer.shape[1]) if name == LOW_RANK[0] else (layer.shape[0], 0), dtype=torch.float32),
            )
            for layer in (first, rest)
        ]
        for name in LOW_RANK
    )
    if b[0].shape == b[1].shape and torch.equal(b[0], b[1]):
        return {LOW_RANK[0]: torch.cat(a, dim=1), LOW_RANK[1]: b[0]}
    a, b = [tensor.to(dtype) for tensor in a], [tensor.to(dtype) for tensor in b]
    return {LOW_RANK[0]: torch.block_diag(*a), LOW_RANK[1]: torch.cat(b, dim=1)}


def _sum(biases: list[Tensor]) -> dict[str, Tensor]:
    """{"bias": (N,)} of what is added up; one beside zeros keeps its bits."""
    told = [bias for bias in biases if bias.any()] or biases[-1:]
    if len(told) == 2:
        told = [(told[0].float() + told[1].float()).to(told[0].dtype)]
    return {"bias": told[0]} if told else {}


def _dense(first: QuantTensors | Plain, rest: QuantTensors | Plain, why: str) -> Plain:
    weights, biases = [], []
    for layer in (first, rest):
        weight, bias = (layer.weight, layer.bias) if isinstance(layer, Plain) else layer.linear().collapsed()
        weights.append(weight.float())
        biases += [] if bias is None else [bias.detach()]
    return Plain(torch.cat(weights, dim=1), _sum(biases).get("bias"), why)


def _same(first: QuantTensors, rest: QuantTensors, name: str) -> bool:
    a, b = first.tensors.get(name), rest.tensors.get(name)
    return a is b or (a is not None and b is not None and torch.equal(a, b))


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
