"""Blocks of a denoising transformer whose forward calls fluxq's ops: what an input group shares is computed once.

    codes = quantize(norm(x + gate · branch) · (1 + scale) + shift)      one pass, for q, k, v and what else reads it
    q, k  = rope(norm(q)), rope(norm(k))                                 one pass
    codes = quantize(gelu(up))                                           one pass
    y     = codes · W^T                                                  for each layer of the group

A block keeps its modules and gets a subclass of its own class: copies, moves, hooks, adapters and saving find what they
know. The fused forward computes the bits that the block's own would: only what rounds alike is joined. A low-rank
branch is added in x's dtype after the product, as ops.py does, gates and residuals are rounded where diffusers rounds.

Two rules decide, anew at every call, because adapters, hooks and processors come and go:

    the block's own forward    where something stands in its way that the fused one does not know (`_why_plain`)
    a layer's own forward      for a layer that cannot take the codes of its group (`_why_alone`), on the same input
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from fluxq.quantize import norms, producers, products
from fluxq.quantize.linear import QuantLinear
from fluxq.recipes.family import Family, FusableBlock, InputGroup, Stream
from fluxq.recipes.formats import Scheme
from fluxq.recipes.patterns import matches

SCALED = ("int8", "fp8", "fp8_tensor")
BLOCK_SCALED = ("nvfp4", "mxfp8", "mxfp4")
DECODED = ("nvfp4", "mxfp4", "int4", "int4_g128")  # by w4a8_matmul, where a layer has scales per row


@dataclass(frozen=True)
class FusedPart:
    """What `optimize` did to one part of a block.

    block: its path. part: role of an input group, "attention", or "block" for one that keeps its own forward. fused:
    what became one pass. layers: those that take the same codes. why_not: what was left as it is, and why; or empty.
    """

    block: str
    part: str
    fused: str = ""
    layers: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class Fusion:
    """What a fused block knows of itself. groups: its input groups by role.

    alike: role -> layers whose calibrated vectors and scales of the input are the same tensors' values. refused: layer
    -> why the device has no product of its codes. device: the type of device that all this was decided for.
    """

    row: FusableBlock
    groups: dict[str, InputGroup]
    alike: dict[str, tuple[str, ...]]
    refused: dict[str, str]
    device: str


@dataclass(frozen=True)
class Steps:
    """How a layer's input becomes codes; layers of a group with equal steps share them. mean, smooth: whether given."""

    format: str
    static: bool
    mean: bool
    smooth: bool
    hadamard: int
    four_over_six: bool
    swizzled: bool


@dataclass(frozen=True)
class Codes:
    """An input (M, K) in a layer's format: codes, scales and nvfp4's global scale, as the products take them."""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None


def optimize(
    model: nn.Module, family: Family, device: str, lacks: Callable[[QuantLinear], str] = lambda layer: ""
) -> list[FusedPart]:
    """Fuse the blocks of a transformer of that family, in place; what was done to each, block by block.

    device: type of the device that will compute. lacks: why it has no product of a layer's codes, empty if it has.
    Called again, everything is decided anew. Raises ValueError for a family without a fused form, and where no block
    can be fused.
    """
    if not family.fusable:
        raise ValueError(
            f"{family.model} has no fused form: recipes/fusable.py describes the blocks of none but "
            "FluxTransformer2DModel so far"
        )
    parts: list[FusedPart] = []
    fused = 0
    for path, block in model.named_modules():
        row = next((row for row in family.fusable if matches(row.block, path.replace("_orig_mod.", ""))), None)
        if row is None:
            continue
        fusion = _describe(block, row, family, device, lacks)
        why = _why_not_replaced(block, row) or _why_not_callable(block, fusion)
        if why:
            _restore_block(block)
            parts.append(FusedPart(path, "block", why_not=why))
            continue
        block.__dict__[HELD] = fusion
        block.__class__ = fused_class(_stock(block))
        parts += _parts(path, block, fusion)
        fused += 1
    if not fused:
        raise ValueError(
            f"no block of this {type(model).__name__} can be fused: "
            + (f"{parts[0].block}: {parts[0].why_not}" if parts else "it has none")
        )
    return parts


def restore(model: nn.Module) -> int:
    """Give every fused block its own class and forward back; how many there were."""
    return sum(_restore_block(module) for module in model.modules())


def _restore_block(block: nn.Module) -> bool:
    was_fused = HELD in block.__dict__
    if was_fused:
        block.__class__ = _stock(block)
        del block.__dict__[HELD]  # a hook that kept the fused forward runs the block's own from now on
    return was_fused


def _stock(block: nn.Module) -> type[nn.Module]:
    """A block's class as diffusers has it."""
    return getattr(type(block), "fused_from", type(block))


@functools.cache
def fused_class(stock: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a block's class, of the same name, with the fused forward.

    The name is what device maps and `compile_repeated_blocks` look for; diffusers' step caches look for the class.
    """

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        given, rope, more = (hidden_states, encoder_hidden_states, temb), image_rotary_emb, joint_attention_kwargs
        fusion: Fusion | None = getattr(self, HELD, None)
        if fusion is None or rope is None or _why_plain(self, fusion, *given, rope, more):
            return stock.forward(self, *given, rope, more)
        form = two_streams if len(fusion.row.streams) == 2 else one_stream
        return form(self, fusion, *given, rope)

    def reduce(self, protocol):
        return _empty, (stock,), stock.__reduce_ex__(self, 2)[2]

    members = {"forward": forward, "__reduce_ex__": reduce, "fused_from": stock, "__module__": stock.__module__}
    made = type(stock.__name__, (stock,), members)
    _tell_step_caches(stock, made)
    return made


def _empty(stock: type[nn.Module]) -> nn.Module:
    """A fused block for pickle and copy to fill: they would find the class of that name, which is not fused."""
    made = fused_class(stock)
    return made.__new__(made)


def _tell_step_caches(stock: type[nn.Module], made: type[nn.Module]) -> None:
    TransformerBlockRegistry.register(made, copy(TransformerBlockRegistry.get(stock)))


# --- when


def _why_not_replaced(block: nn.Module, row: FusableBlock) -> str:
    """Why a block cannot get a fused forward at all; empty if it can."""
    stock = _stock(block)
    if not _is_library_class(stock, row.model):
        return f"is a {stock.__module__}.{stock.__name__}, expected diffusers' {row.model}"
    if "forward" in block.__dict__ and HELD not in block.__dict__:
        return "its forward was replaced already (offloading, a step cache or another library): optimize before that"
    if any(parameter.is_meta for parameter in block.parameters()):
        return "its weights are offloaded: optimize before offloading"
    return ""


def _why_not_callable(block: nn.Module, fusion: Fusion) -> str:
    """Why the fused form cannot stand for the modules that it passes over; empty if it can."""
    for path, expected in fusion.row.passed_over.items():
        module = _at(block, path)
        if not _is_stock(module, expected):
            return f"its {path} is a {type(module).__name__}, expected {expected} as it comes with the library"
        if _is_hooked(module):
            return f"its {path} has a hook, which a fused form would pass over: optimize before offloading"
    attention = _at(block, fusion.row.attention)
    if not _is_stock(attention.processor, fusion.row.processor):
        return f"its attention has a {type(attention.processor).__name__}, expected diffusers' {fusion.row.processor}"
    if attention.fused_projections:
        return "its projections are fused (fuse_qkv_projections): unfuse them"
    return ""


def _why_plain(
    block: nn.Module,
    fusion: Fusion,
    hidden: Tensor,
    text: Tensor,
    temb: Tensor,
    rope: tuple[Tensor, Tensor],
    attention_arguments: dict[str, Any] | None,
) -> str:
    """Why this call is the block's own forward; empty if the fused one computes the same."""
    if torch.is_grad_enabled():
        return "gradients: the fused ops have none"
    if attention_arguments:
        return f"joint_attention_kwargs {', '.join(attention_arguments)}"
    if rope[0].dtype != torch.float32 or rope[0].device != hidden.device:
        return "a rotary embedding in another type than fp32, or on another device"
    if hidden.device.type != fusion.device:
        return f"optimized for {fusion.device}"
    if not hidden.dtype == text.dtype == temb.dtype:
        return "inputs of different dtypes"
    if torch.is_autocast_enabled(hidden.device.type):
        return "autocast"
    return _why_not_callable(block, fusion)


def _why_alone(fusion: Fusion, path: str, layer: nn.Module) -> str:
    """Why a layer does not take codes that are made for its group; empty if it does."""
    if type(layer) is not QuantLinear:
        kind = type(layer).__name__
        return "16 bit" if kind == "Linear" else f"it is a {kind}, which computes with the input itself"
    scheme = layer.scheme
    if scheme.activations is None:
        return "16-bit activations"
    if scheme.deflate:
        return "deflation takes directions of its own out of the input"
    if not product_of(layer):
        return f"no product of {scheme.weights.name} and {scheme.activations.name} codes"
    if _is_hooked(layer):
        return "it has a hook"
    return fusion.refused.get(path, "")


def product_of(layer: QuantLinear) -> str:
    """The op that multiplies a layer's codes; empty if none does."""
    weights, activations = layer.scheme.weights.name, layer.scheme.activations and layer.scheme.activations.name
    if hasattr(layer, "weight_row_scale"):
        return "w4a8_matmul" if weights in DECODED and activations in ("int8", "fp8") else ""
    if weights != activations:
        return ""
    return "scaled_matmul" if weights in SCALED else "block_scaled_matmul" if weights in BLOCK_SCALED else ""


def _is_stock(module: Any, name: str) -> bool:
    return _is_library_class(type(module), name)


def _is_library_class(kind: type, name: str) -> bool:
    return kind.__name__ == name and kind.__module__.startswith(("torch.", "diffusers."))


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


# --- the forms


def two_streams(
    block: Any, fusion: Fusion, hidden: Tensor, text: Tensor, temb: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """A block whose text and image share one attention: (text, image), each (B, S, D)."""
    rows = fusion.row.streams
    xs = [_tokens(x) for x in (text, hidden)]
    chunks = [_modulation(block, row, temb, 6) for row in rows]  # shift, scale, gate; then of the feed-forward
    made = [
        _behind_norm(block, fusion, row.qkv, x, shift, scale, _at(block, row.adaln).norm)[0]
        for row, x, (shift, scale, *_) in zip(rows, xs, chunks, strict=True)
    ]
    images = hidden.shape[0]
    attended = _attention(block, fusion, [_heads(block, fusion, qkv, images) for qkv in made], rope)
    branches = attended.split_with_sizes([text.shape[1], hidden.shape[1]], dim=1)
    done = []
    for row, x, branch, (_, _, gate, shift, scale, last_gate) in zip(rows, xs, branches, chunks, strict=True):
        branch = _tokens(_at(block, row.out)(branch.contiguous()))
        norm = _at(block, row.second_norm)
        (up,), n = _behind_norm(block, fusion, row.up, x, shift, scale, norm, branch, gate)
        y = _down(block, fusion, row.down, up, images).unflatten(0, (images, -1))
        done.append(n.view(y.shape) + last_gate.unsqueeze(1) * y)
    return _clipped(done[0]), done[1]


def one_stream(
    block: Any, fusion: Fusion, hidden: Tensor, text: Tensor, temb: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """A block with attention and feed-forward side by side, over text and image: (text, image), each (B, S, D)."""
    (row,) = fusion.row.streams
    residual = torch.cat([text, hidden], dim=1)
    shift, scale, gate = _modulation(block, row, temb, 3)
    norm = _at(block, row.adaln).norm
    (*qkv, up), _ = _behind_norm(block, fusion, row.qkv, _tokens(residual), shift, scale, norm)
    attended = _attention(block, fusion, [_heads(block, fusion, qkv, hidden.shape[0])], rope)
    y = _down_side_by_side(block, fusion, row.down, _tokens(attended), up, hidden.shape[0])
    y = y.view(residual.shape)
    y = _clipped(residual + gate.unsqueeze(1) * y)
    return y[:, : text.shape[1]], y[:, text.shape[1] :]


def _modulation(block: Any, row: Stream, temb: Tensor, count: int) -> tuple[Tensor, ...]:
    """What an adaLN makes of temb (B, D): so many chunks (B, D)."""
    adaln = _at(block, row.adaln)
    return adaln.linear(adaln.silu(temb)).chunk(count, dim=1)


def _behind_norm(
    block: Any,
    fusion: Fusion,
    role: str,
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    norm: nn.LayerNorm,
    branch: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """What the layers of a group make of norm(x + gate · branch) · (1 + scale) + shift, and x + gate · branch.

    x (M, D), branch (M, D); each layer's output is (M, N).
    """
    layers = _layers(block, fusion, role)
    takers = _takers(layers, fusion, role)
    modulated = functools.partial(norms.adaln_quantize, x, scale, shift, branch, gate, norm.weight)
    v = x
    if len(takers) == len(layers) and not any(layer.scheme.rank for layer in takers.values()):
        first = next(iter(takers.values()))
        codes, *scales, n = modulated(*_vectors(first), "layer", norm.eps, *_rounding(first))
        made = _codes(first, codes, *scales)
    else:  # something reads the input itself
        v, _, _, n = modulated(None, None, None, "layer", norm.eps, "", 0, False, False)
        made = _quantized(next(iter(takers.values())), v) if takers else None
    ys = [
        _product(layer, made, v) if path in takers else _called(layer, v, scale.shape[0])
        for path, layer in layers.items()
    ]
    return ys, x if branch is None else n


def _down(block: Any, fusion: Fusion, role: str, up: Tensor, images: int) -> Tensor:
    """What the feed-forward's second layer makes of gelu(up), up (M, K)."""
    ((path, layer),) = _layers(block, fusion, role).items()
    if _why_alone(fusion, path, layer):
        return _called(layer, F.gelu(up, approximate="tanh"), images)
    made, h = _activated(layer, up, *_vectors(layer))
    y = _multiplied(layer, made, up.dtype)
    if h is not None and layer.low_rank is not None:
        y += F.linear(h, layer.low_rank[1].to(up.dtype))
    return y


def _down_side_by_side(block: Any, fusion: Fusion, role: str, attended: Tensor, up: Tensor, images: int) -> Tensor:
    """What a layer makes of [attended, gelu(up)], (M, D) and (M, K - D): codes side by side where they can be."""
    ((path, layer),) = _layers(block, fusion, role).items()
    if _why_alone(fusion, path, layer) or _why_whole(layer, attended.shape[1]):
        return _called(layer, torch.cat([attended, F.gelu(up, approximate="tanh")], dim=1), images)
    input_scale, smooth, mean = _vectors(layer)
    d = attended.shape[1]
    (smooth, later_smooth), (mean, later_mean) = (
        (None, None) if vector is None else (vector[:d], vector[d:]) for vector in (smooth, mean)
    )
    left = _quantized(layer, attended, input_scale, smooth, mean)
    right, _ = _activated(layer, up, input_scale, later_smooth, later_mean)
    both = Codes(_beside(left.codes, right.codes), _beside(left.scale, right.scale), left.global_scale)
    return _multiplied(layer, both, up.dtype)


def _why_whole(layer: QuantLinear, d: int) -> str:
    """Why a layer's input must be whole before it is quantized, not D columns and the rest; empty if it need not."""
    scheme, row = layer.scheme, layer.scheme.activations
    if row is None or not row.group_size or (row.two_level and not scheme.static_input):
        return "a token's scale depends on both of its parts"
    if scheme.rank:
        return "its low-rank branch reads both parts"
    if d % max(row.group_size, scheme.hadamard):
        return "a block would lie in both parts"
    return "block scales are reordered for the matrix units" if _is_swizzled(layer) else ""


def _attention(
    block: Any, fusion: Fusion, streams: list[tuple[Tensor, Tensor, Tensor]], rope: tuple[Tensor, Tensor]
) -> Tensor:
    """The attention (B, S, D) of all streams' q, k, v (B, S, H, head), which follow one another."""
    queries, keys, position = [], [], 0
    for row, (q, k, _) in zip(fusion.row.streams, streams, strict=True):
        q_norm, k_norm = _at(block, row.q_norm), _at(block, row.k_norm)
        weights = q_norm.weight, k_norm.weight
        q, k = norms.qk_norm_rope(q, k, *weights, *rope, q_norm.eps, True, False, position)
        queries.append(q)
        keys.append(k)
        position += q.shape[1]
    q, k, v = (_joined(parts) for parts in (queries, keys, [v for _, _, v in streams]))
    processor = _at(block, fusion.row.attention).processor
    backend, parallel = processor._attention_backend, processor._parallel_config
    return dispatch_attention_fn(q, k, v, backend=backend, parallel_config=parallel).flatten(2, 3).to(q.dtype)


def _heads(block: Any, fusion: Fusion, qkv: list[Tensor], images: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (M, N) as (B, S, H, head)."""
    head = _at(block, fusion.row.attention).head_dim
    q, k, v = (y.view(images, -1, y.shape[1] // head, head) for y in qkv)
    return q, k, v


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _beside(a: Tensor, b: Tensor) -> Tensor:
    """Codes or scales of one byte, side by side."""
    return torch.cat([a.view(torch.uint8), b.view(torch.uint8)], dim=1).view(a.dtype)


def _clipped(x: Tensor) -> Tensor:
    """As diffusers keeps fp16 from overflowing."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def _tokens(x: Tensor) -> Tensor:
    """(B, S, D) as (M, D)."""
    return x.reshape(-1, x.shape[-1])


# --- layers and codes


def _layers(block: Any, fusion: Fusion, role: str) -> dict[str, Any]:
    """The layers of a group by their paths."""
    return {path: _at(block, path) for path in fusion.groups[role].members}


def _takers(layers: dict[str, Any], fusion: Fusion, role: str) -> dict[str, QuantLinear]:
    """The layers that can take the same codes: all with the steps of the first one that takes any."""
    able = {path: layers[path] for path in fusion.alike[role] if not _why_alone(fusion, path, layers[path])}
    steps = [_steps(layer) for layer in able.values()]
    return {path: layer for (path, layer), own in zip(able.items(), steps, strict=True) if own == steps[0]}


def _steps(layer: QuantLinear) -> Steps:
    scheme = layer.scheme
    name, hadamard, four_over_six, swizzled = _rounding(layer)
    return Steps(name, scheme.static_input, scheme.center, scheme.smooth, hadamard, four_over_six, swizzled)


def _rounding(layer: QuantLinear) -> tuple[str, int, bool, bool]:
    """The last arguments of the ops that quantize."""
    scheme: Scheme = layer.scheme
    name = scheme.activations.name if scheme.activations else ""
    return name, scheme.hadamard, scheme.four_over_six, _is_swizzled(layer)


def _is_swizzled(layer: QuantLinear) -> bool:
    return bool(layer.scheme.weights.group_size) and layer.get_parameter("weight_scale").ndim == 1


def _vectors(layer: QuantLinear) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(input_scale, smooth, mean) as the ops that quantize take them."""
    smooth, mean = getattr(layer, "pre_quant_scale", None), getattr(layer, "pre_quant_mean", None)
    return (
        layer.stored("input_scale") if layer.scheme.static_input else None,
        None if smooth is None else smooth.float(),
        None if mean is None else mean.float(),
    )


def _called(layer: nn.Module, x: Tensor, images: int) -> Tensor:
    """A layer's own forward of x (M, K), in the shape (B, S, K) that diffusers gives it: (M, N)."""
    return _tokens(layer(x.unflatten(0, (images, -1))))


def _quantized(layer: QuantLinear, x: Tensor, *vectors: Tensor | None) -> Codes:
    """x (M, K) in a layer's format; vectors: input_scale, smooth and mean, by default the layer's."""
    name, *rounding = _rounding(layer)
    codes, *scales, _ = producers.quantize_activation(x, *(vectors or _vectors(layer)), None, name, *rounding)
    return _codes(layer, codes, *scales)


def _activated(layer: QuantLinear, up: Tensor, *vectors: Tensor | None) -> tuple[Codes, Tensor | None]:
    """gelu(up) (M, K) in a layer's format, and times the first half of its low-rank branch."""
    name, *rounding = _rounding(layer)
    down = layer.low_rank[0].to(up.dtype) if layer.low_rank is not None else None
    codes, *scales, h = producers.act_quantize(up, *vectors, down, name, "gelu_tanh", *rounding)
    return _codes(layer, codes, *scales), None if down is None else h


def _codes(layer: QuantLinear, codes: Tensor, scale: Tensor, global_scale: Tensor) -> Codes:
    """What an op that quantizes returns; it leaves out what it was given."""
    row = layer.scheme.activations
    if row is None or not row.two_level:
        return Codes(codes, scale, None)
    return Codes(codes, scale, layer.stored("input_scale") if layer.scheme.static_input else global_scale)


def _product(layer: QuantLinear, made: Codes | None, x: Tensor) -> Tensor:
    """What a layer makes of codes (M, K), made of x (M, K), which its low-rank branch reads."""
    if made is None:
        raise RuntimeError("no codes were made for a layer that takes them")
    y = _multiplied(layer, made, x.dtype)
    if layer.low_rank is not None:
        a, b = layer.low_rank
        y += F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))
    return y


def _multiplied(layer: QuantLinear, made: Codes, dtype: torch.dtype) -> Tensor:
    """Codes (M, K) times a layer's, with its bias: (M, N)."""
    nothing_follows = layer.bias, None, None, None, None, False, dtype
    weight = layer.stored("weight"), layer.stored("weight_scale")
    name, op = layer.scheme.weights.name, product_of(layer)
    if op == "scaled_matmul":
        return products.scaled_matmul(made.codes, made.scale, *weight, *nothing_follows, name)
    global_scale = layer.stored("weight_scale_2")
    if op == "block_scaled_matmul":
        return products.block_scaled_matmul(
            made.codes, made.scale, made.global_scale, *weight, global_scale, *nothing_follows, name
        )
    formats = name, _rounding(layer)[0]
    return products.w4a8_matmul(
        made.codes, made.scale, *weight, global_scale, layer.stored("weight_row_scale"), *nothing_follows, *formats
    )


def _at(block: Any, path: str) -> Any:
    """The module at a path below a block."""
    for name in path.split("."):
        block = getattr(block, name)
    return block


# --- what is known, and what is told


def _describe(
    block: nn.Module, row: FusableBlock, family: Family, device: str, lacks: Callable[[QuantLinear], str]
) -> Fusion:
    wanted = {role for stream in row.streams for role in (stream.qkv, stream.up, stream.down) if role}
    groups = {group.role: group for group in family.groups if group.role in wanted and group.block == row.block}
    layers = {role: _present(block, group) for role, group in groups.items()}
    refused = {
        path: why
        for held in layers.values()
        for path, layer in held.items()
        if isinstance(layer, QuantLinear) and not layer.weight.is_meta and (why := lacks(layer))
    }
    return Fusion(row, groups, {role: _alike(held) for role, held in layers.items()}, refused, device)


def _present(block: nn.Module, group: InputGroup) -> dict[str, nn.Module]:
    held = dict(block.named_modules())
    return {path: held[path] for path in group.members if path in held}


def _alike(layers: dict[str, nn.Module]) -> tuple[str, ...]:
    """Those that do to the input what the first quantized one does, value by value; adapters are looked through."""
    held = {path: getattr(layer, "base_layer", layer) for path, layer in layers.items()}
    quantized = {path: layer for path, layer in held.items() if isinstance(layer, QuantLinear)}
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
    parts = [FusedPart(path, "attention", "q/k norm + rope")]
    for stream in fusion.row.streams:
        for role in (stream.qkv, stream.up):
            if role:
                parts.append(_behind_norm_part(path, block, fusion, role))
        parts.append(_down_part(path, block, fusion, stream))
    return parts


def _behind_norm_part(path: str, block: nn.Module, fusion: Fusion, role: str) -> FusedPart:
    layers = _layers(block, fusion, role)
    takers = _takers(layers, fusion, role)
    first = next(iter(takers.values()), None)
    reads_input = len(takers) < len(layers) or any(layer.scheme.rank for layer in takers.values())
    fused = "norm + modulation"
    if first is not None:
        fused += f"{', then ' if reads_input else ' + '}{_rounding(first)[0]} codes"
    alone = [
        f"{name}: {_why_alone(fusion, name, layer) or 'its input is rounded in another way'}"
        for name, layer in layers.items()
        if name not in takers
    ]
    alone += [f"{name}: its low-rank branch reads the input" for name, layer in takers.items() if layer.scheme.rank]
    return FusedPart(path, role, fused, tuple(takers), "; ".join(alone))


def _down_part(path: str, block: nn.Module, fusion: Fusion, stream: Stream) -> FusedPart:
    ((name, layer),) = _layers(block, fusion, stream.down).items()
    why = _why_alone(fusion, name, layer)
    if not why and not stream.second_norm:
        why = _why_whole(layer, _at(block, fusion.row.attention).inner_dim)
    if why:
        return FusedPart(path, stream.down, why_not=f"{name}: {why}")
    joined = "gelu + " if stream.second_norm else "attention beside gelu, each into "
    return FusedPart(path, stream.down, f"{joined}{_rounding(layer)[0]} codes", (name,))


HELD = "fluxq_fusion"
