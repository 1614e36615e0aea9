"""nunchaku's single file of FLUX.1: which of diffusers' Linears make which of its own, and how.

nunchaku runs blocks of its own. q, k and v are one Linear there, a modulation's rows lie channel by channel, and what
follows GELU is rounded without a sign. A single block's `proj_out`, which reads attention and feed-forward side by
side, is two Linears whose outputs are added: the first has a bias of zeros. Every Linear of a block is quantized.
Source: nunchaku 1.2's conversion of FLUX.1 state dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.kernels.linear import LOW_RANK
from fluxq.quantize.exchange import nunchaku
from fluxq.quantize.exchange.containers import file_writer
from fluxq.quantize.exchange.dialect import Dialect, OwnLinear, Unit, Units
from fluxq.quantize.exchange.layer import Decoded, Plain, QuantTensors, all_equal, joined_pairs, rank_of
from fluxq.quantize.exchange.layouts import concatenated
from fluxq.quantize.exchange.marks import FLOATS, FileLayer, Headers, by_tensor
from fluxq.quantize.exchange.native import NativeComponent
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.keymaps import Joined

_MODEL_CLASS = "NunchakuFluxTransformer2dModel"
_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
SIDES = ("out_proj", "mlp_fc2")  # of a single block: the columns of diffusers' proj_out
_HEADS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
BLOCKS = {
    "transformer_blocks": {
        "norm1.linear": OwnLinear(("norm1.linear",), chunks=6),
        "norm1_context.linear": OwnLinear(("norm1_context.linear",), chunks=6),
        "qkv_proj": OwnLinear(_QKV),
        "qkv_proj_context": OwnLinear(_ADDED_QKV),
        "out_proj": OwnLinear(("attn.to_out.0",)),
        "out_proj_context": OwnLinear(("attn.to_add_out",)),
        "mlp_fc1": OwnLinear(("ff.net.0.proj",)),
        "mlp_fc2": OwnLinear(("ff.net.2",), after_gelu=True),
        "mlp_context_fc1": OwnLinear(("ff_context.net.0.proj",)),
        "mlp_context_fc2": OwnLinear(("ff_context.net.2",), after_gelu=True),
    },
    "single_transformer_blocks": {
        "norm.linear": OwnLinear(("norm.linear",), chunks=3),
        "qkv_proj": OwnLinear(_QKV),
        "out_proj": OwnLinear(("proj_out",), "first"),
        "mlp_fc1": OwnLinear(("proj_mlp",)),
        "mlp_fc2": OwnLinear(("proj_out",), "rest", after_gelu=True),
    },
}


def rows_of(linears: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...], OwnLinear]]:
    """(name in the file, modules of diffusers, row) of every Linear of nunchaku's. linears: of the model."""
    blocks = dict.fromkeys(tuple(name.split(".")[:2]) for name in linears if name.split(".")[0] in BLOCKS)
    for stack, index in blocks:
        for name, row in BLOCKS[stack].items():
            block = f"{stack}.{index}"
            yield f"{block}.{name}", tuple(f"{block}.{part}" for part in row.parts), row


def parts_of(name: str) -> tuple[tuple[str, ...], OwnLinear] | None:
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


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any] = {}) -> Decoded:
    """A layer as diffusers' blocks have it.

    entry: that of `nunchaku.decode`, and of a modulation its `chunks`. SIDES are one layer: names of their tensors
    begin with theirs, and `columns` says how many of K the first reads.
    """
    if "columns" in entry:
        (n, k), first = shape, int(entry["columns"])
        sides = [
            {name.removeprefix(f"{side}."): tensor for name, tensor in tensors.items() if name.startswith(f"{side}.")}
            for side in SIDES
        ]
        return side_by_side(nunchaku.decode(sides[0], (n, first)), nunchaku.decode(sides[1], (n, k - first), entry))
    layer = nunchaku.decode(tensors, shape, entry)
    return nunchaku.chunked(layer, entry["chunks"]) if "chunks" in entry else layer


def side_by_side(first: Decoded, rest: Decoded) -> Decoded:
    """The layer that reads side by side what two read, and gives the sum of what they give: of `columns_of` the
    inverse.

    Low-rank pairs with other B stand beside each other, which is exact. Plain where no scheme of ours holds it.
    """
    if isinstance(first, Plain) or isinstance(rest, Plain):
        return _dense(first, rest, first.why if isinstance(first, Plain) else getattr(rest, "why", ""))
    schemes = [replace(layer.scheme, rank=0, smooth=False) for layer in (first, rest)]
    if schemes[0] != schemes[1]:
        return _dense(first, rest, f"its columns are {first.scheme} and {rest.scheme}")
    scales = [layer.tensors.get("weight_scale_2") for layer in (first, rest)]
    if any(scale is not None for scale in scales) and not all_equal(scales):
        return _dense(first, rest, "its columns have two global scales, where a layer of ours has one")
    tensors = {name: tensor for name, tensor in rest.tensors.items() if name not in (*LOW_RANK, "bias")}
    for name in ("weight", "weight_scale"):
        tensors[name] = concatenated([layer.tensors[name] for layer in (first, rest)], dim=1)
    factors = [layer.tensors.get("pre_quant_scale") for layer in (first, rest)]
    dtype = next((factor.dtype for factor in factors if factor is not None), None)
    if dtype is not None:
        sides = zip(factors, (first, rest), strict=True)
        tensors["pre_quant_scale"] = torch.cat(
            [torch.ones(side.shape[1], dtype=dtype) if factor is None else factor for factor, side in sides]
        )
    pair = joined_pairs((first, rest), 1)
    biases = [layer.tensors["bias"] for layer in (first, rest) if "bias" in layer.tensors]
    scheme = replace(schemes[0], rank=rank_of(pair), smooth="pre_quant_scale" in tensors)
    shape = rest.shape[0], first.shape[1] + rest.shape[1]
    return QuantTensors(tensors | pair | _sum(biases), shape, scheme, rest.beside)


def _sum(biases: list[Tensor]) -> dict[str, Tensor]:
    """{"bias": (N,)} of what is added up; one beside zeros keeps its bits."""
    told = [bias for bias in biases if bias.any()] or biases[-1:]
    if len(told) == 2:
        told = [(told[0].float() + told[1].float()).to(told[0].dtype)]
    return {"bias": told[0]} if told else {}


def _dense(first: Decoded, rest: Decoded, why: str) -> Plain:
    pairs = [first.collapsed(), rest.collapsed()]
    added = _sum([bias.detach() for _, bias in pairs if bias is not None])
    return Plain(torch.cat([weight.float() for weight, _ in pairs], dim=1), added.get("bias"), why)


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


# --- files


def _by_header(model: Headers) -> str:
    text = model.metadata.get("quantization_config")
    return "quantization_config in the header" if text and "svdquant" in text else ""


def _entry(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    linear = parts_of(name)
    if linear is None:
        return {}
    _, row = linear
    is_int4 = "wscales" in stored and stored["wscales"].dtype in FLOATS
    entry: dict[str, Any] = {"chunks": row.chunks} if row.chunks else {}
    return entry | ({"act_unsigned": True} if row.after_gelu and is_int4 else {})


def _regroup(model: Headers) -> None:
    """Make one layer of the two that stand for a single block's `proj_out`."""
    first, rest = SIDES
    for name in [name for name in model.layers if parts_of(name) and name.startswith("single_transformer_blocks.")]:
        block, _, member = name.rpartition(".")
        if member not in SIDES or name not in model.layers:
            continue
        other = model.layers.get(f"{block}.{rest if member == first else first}")
        if other is None or other.shape[0] != model.layers[name].shape[0]:
            model.faults[name] = f"is a part of proj_out without the other, {first} or {rest}; get the file again"
            continue
        sides = {side: model.layers.pop(f"{block}.{side}") for side in SIDES}
        shape = sides[first].shape[0], sides[first].shape[1] + sides[rest].shape[1]
        whole = f"{block}.{first}+{rest}"
        model.layers[whole] = FileLayer(
            whole,
            {f"{side}.{suffix}": part for side, layer in sides.items() for suffix, part in layer.parts.items()},
            {f"{side}.{suffix}": part for side, layer in sides.items() for suffix, part in layer.stored.items()},
            {**sides[rest].entry, "columns": sides[first].shape[1]},
            shape,
        )


def _parts(name: str) -> tuple[str, ...]:
    module, _, suffix = name.rpartition(".")
    linear = parts_of(module)
    return tuple(f"{part}.{suffix}" for part in linear[0]) if linear else (diffusers_name(name),)


def _refuse(model: Headers) -> str:
    foreign = next(name for name in model.layers if not parts_of(name))
    return (
        f"{foreign} is no layer of nunchaku's FLUX.1, and of its single files only those are read; get the model as a "
        "folder that diffusers loads (nunchaku_lite)"
    )


def _units(source: NativeComponent) -> Units:
    if source.family.name != "flux":
        raise ValueError(f"nunchaku's single files are written of FLUX.1, not of {source.class_name}; nunchaku_lite is")
    units = [Unit(name, parts, block_linear=row) for name, parts, row in rows_of(source.linears)]
    taken = {part for unit in units for part in unit.parts}
    plain = [name for name in source.plain if name.rpartition(".")[0] not in taken]
    return units, [Joined(plain_name(name), (name,)) for name in plain]


def _arrange(layer: QuantTensors, row: OwnLinear) -> QuantTensors:
    """A layer of diffusers with only some of its columns, or as a modulation channel by channel."""
    layer = columns_of(layer, row.columns) if row.columns else layer
    return nunchaku.interleaved(layer, row.chunks) if row.chunks else layer


DIALECT = Dialect(
    "nunchaku",
    "nunchaku's single files",
    decode,
    "nunchaku",
    marks=(_by_header, by_tensor("qweight", "lora_down")),
    suffixes=nunchaku.SUFFIXES,
    entry=_entry,
    shape=nunchaku.shape_of,
    format_of=nunchaku.format_of,
    regroup=_regroup,
    identify=lambda model: (FAMILIES["flux"], DIALECT.names) if all(map(parts_of, model.layers)) else None,
    parts_of=_parts,
    config_key="config",
    refuse=_refuse,
    rows=nunchaku.ROWS,
    bias_shift=nunchaku.GELU_SHIFT,
    encode=partial(nunchaku.encode, single_file=True),
    writer=file_writer(lambda one: nunchaku.metadata(one.entries, _MODEL_CLASS, one.source.config)),
    takes_dtype=True,
    ranks=nunchaku.RANKS,
    units=_units,
    arrange=_arrange,
    format_key="op",
)
