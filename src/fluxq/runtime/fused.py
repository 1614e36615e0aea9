"""Blocks of a denoising transformer whose forward calls fluxq's ops: what an input group shares is computed once.

    codes = quantize(norm(x + gate · branch) · (1 + scale) + shift)      one pass, for q, k, v and what else reads it
    q, k  = rope(norm(q)), rope(norm(k))                                 one pass, text and image side by side, and v
    codes = quantize(gelu(up)), quantize(silu(gate) · up)                one pass
    codes = quantize([attention, gelu(up)])                              one pass, of single blocks
    y     = codes · W^T                                                  for each layer of the group, on a GPU at once
    y     = x + gate · (codes · W^T)                                     for the last one of the block

A block keeps its modules and gets a subclass of its own class: copies, moves, hooks, adapters and saving find what they
know. The fused forward computes the bits that the block's own would: only what rounds alike is joined. A low-rank
branch is added in x's dtype after the product, as kernels/ops.py does; gates and residuals round where diffusers does.

Two rules decide, anew at every call, because adapters, hooks and processors come and go:

    the block's own forward    where something stands in its way that the fused one does not know (`_why_plain`)
    a layer's own forward      for a layer that cannot take the codes of its group (`why_alone` in fused_forms.py)

Here it is decided what is fused, and told; fused_calls.py reads a call, fused_forms.py computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from torch import nn

from fluxq.base.modules import uncompiled_path
from fluxq.kernels import findings
from fluxq.kernels.linear import QuantLinear
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Family, Maker, matches
from fluxq.recipes.fusable import FusableBlock, Stream
from fluxq.runtime.block_plans import FUSION_ATTRIBUTE, are_planned
from fluxq.runtime.fused_calls import CALLS, BlockInputs
from fluxq.runtime.fused_forms import Fusion, at, form_of, is_hooked, layers_of, takers_of, why_alone
from fluxq.runtime.side_by_side import lay_side_by_side


@dataclass(frozen=True)
class FusedPart:
    """Report of `optimize` on one part of a block.

    block: its path.
    part: role of an input group, "attention", or "block" for one that keeps its own forward.
    fused: the steps that became one pass.
    layers: those that take the same codes.
    why_not: the steps that were left as they are, with the reason; or empty.
    """

    block: str
    part: str
    fused: str = ""
    layers: tuple[str, ...] = ()
    why_not: str = ""


def optimize(
    model: nn.Module,
    family: Family,
    device: str,
    lacks: Callable[[QuantLinear, Maker], str] = lambda layer, made_by: "",
    *,
    side_by_side: bool = False,
) -> list[FusedPart]:
    """Fuse the blocks of a transformer of that family, in place; return what was done, block by block.

    Called again, it decides all of it anew. Raises ValueError for a family without a fused form, and where no block can
    be fused.

    device: type of the device that will compute.
    lacks: function of a layer and the maker of its input: why the device does not make or multiply its codes, or empty.
    side_by_side: whether one product computes all layers that take the same codes; sums in fp32 may come out otherwise.
    """
    if not family.fusable:
        raise ValueError(
            f"{family.model} has no fused form: recipes/families describes the blocks of {fusable_models()}"
        )
    parts: list[FusedPart] = []
    for path, block, row in fusable_blocks(model, family):
        fusion = _describe(block, row, family, device, lacks)
        why = _why_not_fused(block, row)
        if why:
            _restore_block(block)
            parts.append(FusedPart(path, "block", why_not=why))
            continue
        if side_by_side:
            for first in fusion.groups:
                lay_side_by_side([*takers_of(layers_of(block, fusion, first), fusion, first).values()])
        if _keeps_its_own(block):
            del block.__dict__["forward"]  # or it would be called in the place of the fused one
        block.__dict__[FUSION_ATTRIBUTE] = fusion
        block.__class__ = fused_class(_stock(block))
        parts += _parts(path, block, fusion)
    if all(part.part == "block" for part in parts):
        raise _none_fused(model, *((parts[0].block, parts[0].why_not) if parts else ("", "")))
    return parts


def require_fusable(model: nn.Module, family: Family) -> None:
    """Raise the ValueError of `optimize` where no block can be fused; nothing is changed."""
    whys = [(path, _why_not_fused(block, row)) for path, block, row in fusable_blocks(model, family)]
    if all(why for _, why in whys):
        raise _none_fused(model, *(whys[0] if whys else ("", "")))


def _none_fused(model: nn.Module, path: str, why: str) -> ValueError:
    return ValueError(
        f"no block of this {type(model).__name__} can be fused: " + (f"{path}: {why}" if why else "it has none")
    )


def fusable_blocks(model: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module, FusableBlock]]:
    """Yield (path, block, its row) of the blocks of a model that have a fused form."""
    for path, block in model.named_modules():
        row = next((row for row in family.fusable if matches(row.block, uncompiled_path(path))), None)
        if row is not None:
            yield path, block, row


def restore(model: nn.Module) -> int:
    """Give every fused block its own class and forward back; return how many there were."""
    return sum(_restore_block(module) for module in model.modules())


def fusable_models() -> str:
    """List the classes of models that have a fused form, for messages."""
    return ", ".join(sorted(family.model for family in FAMILIES.values() if family.fusable))


def _restore_block(block: nn.Module) -> bool:
    was_fused = FUSION_ATTRIBUTE in block.__dict__
    if was_fused:
        block.__class__ = _stock(block)
        del block.__dict__[FUSION_ATTRIBUTE]  # a hook that kept the fused forward runs the block's own from now on
    return was_fused


def _stock(block: nn.Module) -> type[nn.Module]:
    """Return a block's class as diffusers has it."""
    return getattr(type(block), "fused_from", type(block))


@functools.cache
def fused_class(stock: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of a block's class, of the same name, with the fused forward.

    The name is what device maps and `compile_repeated_blocks` look for; diffusers' step caches look for the class.
    """

    read = CALLS[stock.__name__]

    def computed(self, fusion: Fusion, *args, **kwargs) -> tuple[Any, bool]:
        """Compute a call; tell whether in the fused form."""
        inputs = read(self, *args, **kwargs)
        if _why_plain(self, fusion, inputs):
            return stock.forward(self, *args, **kwargs), False
        return form_of(fusion.row)(self, fusion, inputs), True

    @functools.wraps(stock.forward)
    def forward(self, *args, **kwargs):
        fusion: Fusion | None = getattr(self, FUSION_ATTRIBUTE, None)
        if fusion is None:
            return stock.forward(self, *args, **kwargs)
        call = functools.partial(computed, self, fusion)
        if torch.compiler.is_compiling() or not are_planned(fusion.device):
            return call(*args, **kwargs)[0]
        return fusion.plans.run(self, call, args, kwargs)

    def reduce(self, protocol):
        return _empty, (stock,), stock.__reduce_ex__(self, 2)[2]

    members = {"forward": forward, "__reduce_ex__": reduce, "fused_from": stock, "__module__": stock.__module__}
    subclass = type(stock.__name__, (stock,), members)
    with suppress(ValueError):  # diffusers before 0.42 does not know FLUX.2's blocks, and its step caches refuse them
        TransformerBlockRegistry.register(subclass, copy(TransformerBlockRegistry.get(stock)))
    return subclass


def _empty(stock: type[nn.Module]) -> nn.Module:
    """Make an empty fused block for pickle and copy, which would look up the stock class by its name."""
    subclass = fused_class(stock)
    return subclass.__new__(subclass)


# --- when


def _why_not_fused(block: nn.Module, row: FusableBlock) -> str:
    return _why_not_replaced(block, row) or _why_not_callable(block, row)


def _why_not_replaced(block: nn.Module, row: FusableBlock) -> str:
    """Return the reason why a block cannot get a fused forward at all; empty if it can."""
    stock = _stock(block)
    if not _is_library_class(stock, row.model):
        return f"is a {stock.__module__}.{stock.__name__}, expected diffusers' {row.model}"
    expected, actual = (list(signature(call).parameters) for call in (CALLS[row.model], stock.forward))
    if expected[1:] != actual[1:]:
        return f"its forward takes {', '.join(actual[1:])}; the fused form knows {', '.join(expected[1:])}"
    if "forward" in block.__dict__ and FUSION_ATTRIBUTE not in block.__dict__ and not _keeps_its_own(block):
        return "its forward was replaced already (offloading, a step cache or another library): optimize before that"
    if any(parameter.is_meta for parameter in block.parameters()):
        return "its weights are offloaded: optimize before offloading"
    return ""


def _keeps_its_own(block: nn.Module) -> bool:
    """Tell whether the forward in a block's attributes is its class's own: diffusers' hooks, taken out, leave that."""
    placed = block.__dict__.get("forward")
    forwards = _stock(block).forward, fused_class(_stock(block)).forward
    return getattr(placed, "__self__", None) is block and getattr(placed, "__func__", None) in forwards


def _why_not_callable(block: nn.Module, row: FusableBlock) -> str:
    """Return the reason why the fused form cannot stand for the modules that it passes over; empty if it can."""
    for path, expected in row.passed_over.items():
        module = at(block, path)
        if not _is_stock(module, expected):
            return f"its {path} is a {type(module).__name__}, expected {expected} as it comes with the library"
        if module is not None and is_hooked(module):
            return f"its {path} has a hook, which a fused form would pass over: optimize before offloading"
    for path, expected in row.attentions.items():
        attention = at(block, path)
        if attention is None:
            continue
        if not _is_stock(attention.processor, expected):
            return f"its {path} has a {type(attention.processor).__name__}, expected diffusers' {expected}"
        if getattr(attention, "fused_projections", False):
            return "its projections are fused (fuse_qkv_projections): unfuse them"
    return ""


def _why_plain(block: nn.Module, fusion: Fusion, inputs: BlockInputs) -> str:
    """Return the reason why this call runs the block's own forward; empty if the fused one computes the same."""
    if torch.is_grad_enabled():
        return "gradients: the fused ops have none"
    if inputs.unknown:
        return inputs.unknown
    if fusion.withdrawals != findings.withdrawals():
        return "a kernel was found wrong since: call fluxq.optimize again"
    x = inputs.x
    for table in inputs.rope or ():
        if table.device != x.device:
            return "a rotary embedding on another device"
        if fusion.row.per_head and table.dtype != torch.float32:
            return "a rotary embedding in another type than fp32"
    if x.device.type != fusion.device:
        return f"optimized for {fusion.device}"
    modulated = torch.float32 if fusion.row.fp32_modulation else x.dtype
    dtypes = [(tokens, x.dtype) for tokens in inputs.streams.values()]
    dtypes += [(chunks, modulated) for chunks in inputs.modulation.values()]
    if any(tensor.dtype != expected for tensor, expected in dtypes):
        return "inputs of different dtypes"
    if any(chunks.shape[0] not in (1, x.shape[0]) for chunks in inputs.modulation.values()):
        return "modulation of another number of images"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast"
    return _why_not_callable(block, fusion.row) or _why_other_norms(block, fusion.row, x.dtype)


def _why_other_norms(block: nn.Module, row: FusableBlock, dtype: torch.dtype) -> str:
    """Return the reason why the norms of heads round otherwise than in a model of one dtype; empty if they do not.

    One launch takes all norms of an attention, so they are of one kind.
    """
    attentions = [(stream.own_attention,) for stream in row.streams if stream.own_attention]
    for parts in (row.streams, *attentions) if row.per_head else ():
        norms = {path: at(block, path) for part in parts for path in (part.q_norm, part.k_norm)}
        for path, norm in norms.items():
            weight = getattr(norm, "weight", None)
            if weight is not None and weight.dtype != dtype:
                return f"its {path} is in {weight.dtype}, its input in {dtype}"
        if len({(type(norm), getattr(norm, "eps", None)) for norm in norms.values()}) > 1:
            return f"its {', '.join(norms)} are of several classes, or have several eps"
    return ""


def _is_stock(module: Any, names: str) -> bool:
    """Tell whether a module's class is one of the library's; "None" among the names allows for a block without it."""
    if module is None:
        return "None" in names.split("|")
    return any(_is_library_class(type(module), name) for name in names.split("|"))


@torch.compiler.assume_constant_result  # a class is guarded; of some, dynamo cannot take the module's name apart
def _is_library_class(kind: type, name: str) -> bool:
    return kind.__name__ == name and kind.__module__.split(".")[0] in ("torch", "diffusers")


# --- what is known, and what is told


def _describe(
    block: nn.Module, row: FusableBlock, family: Family, device: str, lacks: Callable[[QuantLinear, Maker], str]
) -> Fusion:
    groups = {
        group.members[0]: group
        for group in family.groups
        if group.block == row.block and all(at(block, path) is not None for path in group.members)
    }
    layers = {
        first: {path: _below_adapters(at(block, path)) for path in group.members} for first, group in groups.items()
    }
    refused = {
        path: why
        for first, members in layers.items()
        for path, layer in members.items()
        if isinstance(layer, QuantLinear) and not layer.weight.is_meta and (why := lacks(layer, groups[first].made_by))
    }
    return Fusion(
        row,
        groups,
        {first: _alike(members) for first, members in layers.items()},
        refused,
        {p: la.scheme.rank for members in layers.values() for p, la in members.items() if isinstance(la, QuantLinear)},
        device,
        findings.withdrawals(),
    )


def _below_adapters(layer: Any) -> nn.Module:
    return getattr(layer, "base_layer", layer)


def _alike(layers: dict[str, nn.Module]) -> tuple[str, ...]:
    """List the layers that treat their input as the first quantized one does, value by value."""
    quantized = {path: layer for path, layer in layers.items() if isinstance(layer, QuantLinear)}
    quantized = {path: layer for path, layer in quantized.items() if not layer.weight.is_meta}
    first = next(iter(quantized.values()), None)
    return tuple(path for path, layer in quantized.items() if first is not None and _same_input(first, layer))


def _same_input(a: QuantLinear, b: QuantLinear) -> bool:
    for name in ("input_scale", "pre_quant_mean", "pre_quant_scale"):
        left, right = getattr(a, name, None), getattr(b, name, None)
        if left is None or right is None:
            if left is not right:
                return False
        elif not torch.equal(left, right):
            return False
    return True


def _parts(path: str, block: nn.Module, fusion: Fusion) -> list[FusedPart]:
    parts = [_attention_part(path, block, fusion.row)]
    for stream in fusion.row.streams:
        behind_norms = (stream.qkv, stream.own_attention.qkv if stream.own_attention else "", stream.up)
        read = (stream.cross.kv, stream.cross.image_kv) if stream.cross else ()
        if stream.cross:
            role = fusion.groups[stream.cross.q].role
            parts.append(FusedPart(path, role, why_not=f"{stream.cross.q}: the norm before it has a bias"))
        parts += [_behind_norm_part(path, block, fusion, first) for first in behind_norms if first in fusion.groups]
        parts += [_shared_part(path, block, fusion, first) for first in read if first in fusion.groups]
        if stream.down in fusion.groups:
            parts.append(_down_part(path, block, fusion, stream))
    return parts


def _attention_part(path: str, block: nn.Module, row: FusableBlock) -> FusedPart:
    if not row.per_head:
        return FusedPart(path, "attention", why_not="q and k are normalised over all heads, then rotated")
    if at(block, row.streams[0].q_norm) is None:
        return FusedPart(path, "attention", why_not="q and k are neither normalised nor rotated")
    return FusedPart(path, "attention", "q/k norm + rope" if row.rotary else "q/k norm")


def _behind_norm_part(path: str, block: nn.Module, fusion: Fusion, first: str) -> FusedPart:
    part, layers = _shared_part(path, block, fusion, first), layers_of(block, fusion, first)
    branches = [f"{name}: its low-rank branch reads the input" for name in part.layers if layers[name].scheme.rank]
    fused = "norm + modulation"
    if part.layers:
        reads_input = len(part.layers) < len(layers) or branches
        fused += f"{', then ' if reads_input else ' + '}{part.fused}"
    return replace(part, fused=fused, why_not="; ".join(filter(None, (part.why_not, *branches))))


def _shared_part(path: str, block: nn.Module, fusion: Fusion, first: str) -> FusedPart:
    layers = layers_of(block, fusion, first)
    takers = takers_of(layers, fusion, first)
    fused = f"{_format_of(takers)} codes" if takers else ""
    alone = [
        f"{name}: {why_alone(fusion, name, layer) or 'its input is rounded in another way'}"
        for name, layer in layers.items()
        if name not in takers
    ]
    return FusedPart(path, fusion.groups[first].role, fused, tuple(takers), "; ".join(alone))


def _down_part(path: str, block: nn.Module, fusion: Fusion, stream: Stream) -> FusedPart:
    ((name, layer),) = layers_of(block, fusion, stream.down).items()
    role, act = fusion.groups[stream.down].role, stream.act.removesuffix("_tanh").replace("_mul", " · up")
    why = why_alone(fusion, name, layer)
    if why:
        return FusedPart(path, role, why_not=f"{name}: {why}")
    joined = act if stream.out else f"attention beside {act}"
    return FusedPart(path, role, f"{joined} + {_format_of({name: layer})} codes", (name,))


def _format_of(takers: dict[str, QuantLinear]) -> str:
    return next(iter(takers.values())).rounding.format
