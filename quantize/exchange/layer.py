"""One layer between its native tensors and those of a dialect: what both sides speak of, and what every dialect checks.

    encode(QuantTensors) -> Encoded                         codes are moved, never rounded again
    decode(tensors, shape, entry) -> QuantTensors | Plain   Plain: no format of ours holds these codes

`tensors` go by what follows the layer's name in a file ("weight", "weight_scale", …), `entry` is what the file says of
the layer elsewhere: in its header, in config.json, in a tensor of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fluxq.kernels.linear import LOW_RANK, QuantLinear
from fluxq.quantize.exchange.layouts import as_bytes, concatenated
from fluxq.recipes.formats import Format, Scheme

Names = tuple[str, ...]


@dataclass(frozen=True)
class QuantTensors:
    """A quantized layer as a native checkpoint stores it.

    tensors: by the names that checkpoints use, the bias included; `weight_scale_2` is () or, in a fused layer whose
    parts have their own, (N, 1). shape: of the weight, (N, K). beside: what a file held that no scheme of ours stores,
    such as the `input_scale` () of fp8 with one scale per tensor; `encode` puts it back. notes: what a file's reader
    computes otherwise. coarser: the format to which a file's codes were rounded, where ours has more bits.
    """

    tensors: Mapping[str, Tensor]
    shape: tuple[int, int]
    scheme: Scheme
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Names = ()
    coarser: Format | None = None

    def linear(self) -> QuantLinear:
        """The layer that computes with these tensors."""
        return QuantLinear.from_tensors(self.tensors, self.shape, self.scheme)

    @property
    def dtype(self) -> torch.dtype:
        """That of what is in 16 bit: of the bias, else of the low-rank pair; bf16 where there is neither."""
        dtypes = (self.tensors[name].dtype for name in ("bias", "svdquant_lora_b") if name in self.tensors)
        return next(dtypes, torch.bfloat16)

    def collapsed(self) -> tuple[Tensor, Tensor | None]:
        """Weight (N, K) in fp32, and bias (N,): what the layer computes but for the rounding of x."""
        return self.linear().collapsed()

    def reordered(self, rows: Tensor) -> QuantTensors:
        """The same layer with these rows (N,), in this order; CrossedBlocks as `lines_of`."""
        tensors = dict(self.tensors)
        for name in tensors.keys() & BY_ROWS:
            tensor = tensors[name]
            if tensor.ndim:
                raw = as_bytes(tensor) if tensor.element_size() == 1 else tensor
                tensors[name] = raw[lines_of(name, rows, self.scheme)].view(tensor.dtype)
        return replace(self, tensors=tensors)


@dataclass(frozen=True)
class Plain:
    """A weight (N, K) in fp32, exactly what the codes of a format that is not ours stand for, and its bias (N,)."""

    weight: Tensor
    bias: Tensor | None
    why: str

    def collapsed(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, as `QuantTensors` has them."""
        return self.weight, self.bias

    def reordered(self, rows: Tensor) -> Plain:
        """The same layer with these rows (N,), in this order."""
        return replace(self, weight=self.weight[rows], bias=None if self.bias is None else self.bias[rows])


def stacked(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, in fp32, of `collapsed` layers behind one another; no bias where one has none."""
    weights, biases = [weight for weight, _ in parts], [bias.float() for _, bias in parts if bias is not None]
    bias = torch.cat(biases) if len(biases) == len(parts) else None
    return (torch.cat(weights) if len(weights) > 1 else weights[0]), bias


class CrossedBlocks(ValueError):
    """Rows of a weight leave the blocks whose scales they share, so that no layer holds their codes."""


def lines_of(name: str, rows: Tensor, scheme: Scheme) -> Tensor:
    """Return which lines of a layer's tensor belong to these rows (N,): the same, or of block scales the blocks'.

    Raises CrossedBlocks where blocks span rows and a block of theirs would hold rows from two, or not from its start.
    """
    unit = scheme.weights.block[0]
    if name != "weight_scale" or unit < 2:
        return rows
    blocks = rows[::unit] // unit
    place = torch.arange(len(rows), device=rows.device)
    if not torch.equal(blocks[place // unit] * unit + place % unit, rows):
        raise CrossedBlocks(f"its parts begin within blocks of {unit} rows, which share scales")
    return blocks


Decoded = QuantTensors | Plain
Read = tuple[str, dict[str, Tensor]] | Plain  # our format and native tensors, or what no format of ours holds


@dataclass(frozen=True)
class Encoded:
    """A layer in a dialect. notes: what a reader will compute otherwise than the scheme asks for, or could not hold
    exactly; empty if nothing.
    """

    tensors: dict[str, Tensor]
    entry: dict[str, Any]
    notes: tuple[str, ...] = ()


def join(layers: Sequence[QuantTensors]) -> QuantTensors:
    """Layers that read the same x as one, their rows behind one another, as fused files hold q, k and v.

    Global scales that differ become (N, 1). Low-rank pairs that read x by other A stand side by side, each B in its own
    rows, which is exact and adds up the ranks. All else that belongs to x must be the same. Raises ValueError that
    names a difference.
    """
    first = layers[0]
    unit = first.scheme.weights.block[0] or 1
    if any(layer.shape[0] % unit for layer in layers[:-1]):
        raise CrossedBlocks(f"cannot join layers that do not end with a block of {unit} rows")
    for layer in layers[1:]:
        if (replace(layer.scheme, rank=0), layer.shape[1]) != (replace(first.scheme, rank=0), first.shape[1]):
            raise ValueError(f"cannot join {layer.scheme} K={layer.shape[1]} to {first.scheme} K={first.shape[1]}")
    if len({"bias" in layer.tensors for layer in layers}) > 1:
        raise ValueError("cannot join layers with a bias to layers without one")
    joined: dict[str, Tensor] = {}
    for name in first.tensors.keys() - set(LOW_RANK):
        parts = [layer.tensors[name] for layer in layers]
        if name == "weight_scale_2" and not all_equal(parts):
            rows = [part.expand(layer.shape[0], 1) for part, layer in zip(parts, layers, strict=True)]
            joined[name] = torch.cat(rows)
        elif name in BY_ROWS and parts[0].ndim:
            joined[name] = concatenated(parts)
        elif all_equal(parts):
            joined[name] = parts[0]
        else:
            raise ValueError(f"cannot join layers whose {name} differ; quantize them as one group")
    if not all(all_equal([layer.beside.get(name) for layer in layers]) for layer in layers for name in layer.beside):
        raise ValueError("cannot join layers whose input_scale differ; quantize them as one group")
    joined |= joined_pairs(layers, 0)
    shape = sum(layer.shape[0] for layer in layers), first.shape[1]
    return QuantTensors(joined, shape, replace(first.scheme, rank=rank_of(joined)), first.beside)


def joined_pairs(layers: Sequence[QuantTensors], axis: Literal[0, 1]) -> dict[str, Tensor]:
    """The low-rank pair of layers behind one another along N (axis 0) or K (axis 1); nothing where none has one."""
    pairs = [layer for layer in layers if layer.scheme.rank]
    if not pairs:
        return {}
    name_a, name_b = LOW_RANK
    like = pairs[0].tensors[name_a]
    a = [layer.tensors.get(name_a, torch.zeros(0, layer.shape[1], dtype=like.dtype)).to(like) for layer in layers]
    b = [layer.tensors.get(name_b, torch.zeros(layer.shape[0], 0, dtype=like.dtype)).to(like) for layer in layers]
    if axis == 0:
        shared = all_equal(a)
        return {name_a: a[0] if shared else torch.cat(a), name_b: torch.cat(b) if shared else torch.block_diag(*b)}
    shared = all_equal(b)
    return {name_a: torch.cat(a, 1) if shared else torch.block_diag(*a), name_b: b[0] if shared else torch.cat(b, 1)}


def split(layer: QuantTensors, sizes: Sequence[int]) -> list[QuantTensors]:
    """Inverse of `join`: parts of so many rows, without the directions of the low-rank pair that a part leaves idle.

    Raises CrossedBlocks as `lines_of`.
    """
    if sum(sizes) != layer.shape[0]:
        raise ValueError(f"cannot split {layer.shape[0]} rows into {'+'.join(map(str, sizes))}")
    parts, at = [], 0
    for size in sizes:
        tensors = dict(layer.reordered(torch.arange(at, at + size)).tensors)
        if "weight_scale_2" in tensors and tensors["weight_scale_2"].ndim:
            distinct = tensors["weight_scale_2"].unique()
            if len(distinct) != 1:
                raise ValueError(
                    "weight_scale_2 has several values, where one layer has one; split the fused layer first"
                )
            tensors["weight_scale_2"] = distinct[0].clone()
        tensors = without_idle_ranks(tensors)
        scheme = replace(layer.scheme, rank=rank_of(tensors))
        parts.append(replace(layer, tensors=tensors, shape=(size, layer.shape[1]), scheme=scheme))
        at += size
    return parts


def rank_of(tensors: Mapping[str, Tensor]) -> int:
    """Rank of the low-rank pair among a layer's tensors, 0 where there is none."""
    return len(tensors.get(LOW_RANK[0], ()))


def without_idle_ranks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same without directions of the low-rank pair that add nothing: columns of B, or rows of A, of zeros."""
    if not rank_of(tensors):
        return tensors
    a, b = (tensors[name] for name in LOW_RANK)
    used = (a != 0).any(dim=1) & (b != 0).any(dim=0)
    rest = {name: tensor for name, tensor in tensors.items() if name not in LOW_RANK}
    if used.any():
        rest |= {LOW_RANK[0]: a[used].contiguous(), LOW_RANK[1]: b[:, used].contiguous()}
    return rest


def most_of_16_bit(words: Sequence[str]) -> torch.dtype:
    """Return the 16-bit dtype that most tensors have, by their words in headers; bfloat16 where neither has more."""
    return torch.float16 if words.count("F16") > words.count("BF16") else torch.bfloat16


def all_equal(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether all are there and hold the same numbers."""
    first = tensors[0]
    return all(
        t is not None and first is not None and t.shape == first.shape and torch.equal(t, first) for t in tensors
    )


BY_ROWS = {"weight", "weight_scale", "weight_scale_2", "bias", "svdquant_lora_b", "deflate_out"}
