"""Fused forms of blocks, layer by layer and code by code. fused.py decides when they compute.

    two_streams       text and image share one attention (FLUX.1, FLUX.2, SD3.5, Qwen-Image)
    one_stream        attention and feed-forward side by side, over text and image (FLUX.1, FLUX.2)
    self_and_cross    attention of the image to itself, then to the text (Wan)

The `fusable` rows of a family say which modules play which role, a function of fused_calls.py reads a call. Each
step rounds where diffusers' own does; `why_alone` says which layer computes by itself, on the group's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from fluxq.kernels import all_ops
from fluxq.kernels.adaln_quantize.op import NormTensors, adaln_quantize
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.op import Op
from fluxq.kernels.products import ProductTensors, gated
from fluxq.kernels.qk_norm_rope.op import RopeTensors, qk_norm_rope
from fluxq.kernels.quantize_activation.op import ACTS, Rounding, quantize_activation
from fluxq.kernels.tensor import pack_named
from fluxq.recipes.family import InputGroup
from fluxq.recipes.fusable import FusableBlock, OwnAttention, Stream
from fluxq.runtime.block_plans import BlockPlans
from fluxq.runtime.fused_calls import BlockInputs
from fluxq.runtime.side_by_side import STORED, are_neighbours, operands_of, whole


@dataclass(frozen=True)
class Fusion:
    """State of a fused block.

    groups: first Linear -> input group, of those that the block has.
    alike: first Linear of a group -> layers with equal calibrated vectors and scales of the input.
    refused: layer -> why the device does not make or multiply its codes.
    ranks: quantized layer -> rank of its low-rank branch by then.
    device: type of the device that all this was decided for.
    withdrawals: kernels that had been found wrong in this process by then.
    plans: of its calls.
    """

    row: FusableBlock
    groups: dict[str, InputGroup]
    alike: dict[str, tuple[str, ...]]
    refused: dict[str, str]
    ranks: dict[str, int]
    device: str
    withdrawals: int = 0
    plans: BlockPlans = field(default_factory=BlockPlans, compare=False, repr=False)


class Normed(NamedTuple):
    """A norm and its modulation (B, D), of an input that a branch (B, S, D) may be added to, gated (B, D)."""

    norm: nn.LayerNorm
    shift: Tensor
    scale: Tensor
    branch: Tensor | None = None
    gate: Tensor | None = None


@dataclass(frozen=True)
class Codes:
    """An input (M, K) in a layer's format: codes, scales and nvfp4's global scale, as the products take them."""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None


def form_of(row: FusableBlock) -> Callable[[Any, Fusion, BlockInputs], Any]:
    """Return the form of a row's block: a function of the block, its `Fusion` and the inputs of a call."""
    if len(row.streams) == 2:
        return two_streams
    return self_and_cross if row.streams[0].cross else one_stream


def two_streams(block: Any, fusion: Fusion, inputs: BlockInputs) -> tuple[Tensor | None, Tensor | None]:
    """Compute text and image (B, S, D) of a block in which they share one attention; None for one that ends in it."""
    row, xs = fusion.row, inputs.streams
    chunks = {stream.name: _modulation(block, stream, inputs) for stream in row.streams}
    heads = []
    for stream in row.streams:
        shift, scale, *_ = chunks[stream.name]
        qkv, _ = _behind_norm(block, fusion, stream.qkv, xs[stream.name], Normed(at(block, stream.norm), shift, scale))
        heads.append(_heads(at(block, row.attention), qkv, inputs.x.shape[0]))
    attended = _attention(block, fusion, row.attention, _normed(block, row.streams, heads, inputs.rope), inputs.mask)
    branches = attended.split_with_sizes([xs[stream.name].shape[1] for stream in row.streams], dim=1)
    done = {
        stream.name: _after_attention(block, fusion, stream, xs[stream.name], branch, chunks[stream.name])
        for stream, branch in zip(row.streams, branches, strict=True)
    }
    return done["text"], done["image"]


def _after_attention(
    block: Any, fusion: Fusion, stream: Stream, x: Tensor, branch: Tensor, chunks: tuple[Tensor, ...]
) -> Tensor | None:
    """Add its part of the attention (B, S, D) and the feed-forward to x (B, S, D); None for a stream that ends here."""
    out = at(block, stream.out)
    if out is None:
        return None
    branch = out(branch.contiguous() if fusion.row.contiguous else branch)
    _, _, gate, *later = chunks
    if stream.own_attention is not None and at(block, stream.own_attention.path) is not None:
        *later, shift, scale, second_gate = later
        normed = Normed(at(block, stream.norm), shift, scale)
        second_branch = _second_attention(block, fusion, stream.own_attention, x, normed)
        x, branch, gate = x + gate.unsqueeze(1) * branch, second_branch, second_gate
    return _feed_forward(block, fusion, stream, x, (branch, gate), later)


def _second_attention(block: Any, fusion: Fusion, attention: OwnAttention, x: Tensor, norm: Normed) -> Tensor:
    """Apply a stream's second attention, in which no other stream takes part, to x: a branch (B, S, D)."""
    qkv, _ = _behind_norm(block, fusion, attention.qkv, x, norm)
    heads = _heads(at(block, attention.path), qkv, x.shape[0])
    attended = _attention(block, fusion, attention.path, _normed(block, [attention], [heads], None))
    return at(block, attention.out)(attended)


def one_stream(block: Any, fusion: Fusion, inputs: BlockInputs) -> tuple[Tensor, Tensor] | Tensor:
    """Compute (B, S, D) of a block with attention and feed-forward side by side: whole, or split into (text, image)."""
    (stream,) = fusion.row.streams
    attention = at(block, fusion.row.attention)
    residual = _joined([*inputs.streams.values()])
    shift, scale, gate = _modulation(block, stream, inputs)
    outputs, _ = _behind_norm(block, fusion, stream.qkv, residual, Normed(at(block, stream.norm), shift, scale))
    if len(outputs) == 1:  # one Linear for all
        d, n = attention.inner_dim, outputs[0].shape[1]
        outputs = outputs[0].split([d, d, d, n - 3 * d], dim=1)
    *qkv, up = outputs
    heads = _normed(block, [stream], [_heads(attention, qkv, residual.shape[0])], inputs.rope)
    attended = _attention(block, fusion, fusion.row.attention, heads, inputs.mask)
    y = _added(block, fusion, stream, up, (residual, gate), _tokens(attended))
    return y if inputs.text_tokens is None else (y[:, : inputs.text_tokens], y[:, inputs.text_tokens :])


def self_and_cross(block: Any, fusion: Fusion, inputs: BlockInputs) -> Tensor:
    """Compute (B, S, D) of a block whose image attends to itself, then to the text; modulation and gates are fp32.

    q and k are normalised over all heads, and the norm before the cross-attention has a bias: no op
    does either, so both stay as they are.
    """
    (stream,) = fusion.row.streams
    x, attention = inputs.x, at(block, fusion.row.attention)
    rope: Any = inputs.rope
    shift, scale, gate, *later = _modulation(block, stream, inputs)
    qkv, _ = _behind_norm(block, fusion, stream.qkv, x, Normed(at(block, stream.norm), shift, scale))
    q, k, v = (y.view(*x.shape[:2], -1) for y in qkv)
    q, k = at(block, stream.q_norm)(q), at(block, stream.k_norm)(k)
    q, k, v = (y.unflatten(2, (attention.heads, -1)) for y in (q, k, v))
    q, k = (_rotated(y, *rope) for y in (q, k))
    attended = _attention(block, fusion, fusion.row.attention, (q, k, v))
    x = (x.float() + at(block, stream.out)(attended) * gate.unsqueeze(1)).to(x.dtype)
    branch = _cross_attention(block, fusion, stream, x, inputs.streams["text"])
    return _feed_forward(block, fusion, stream, x, (branch, torch.ones_like(gate)), later)


def _cross_attention(block: Any, fusion: Fusion, stream: Stream, x: Tensor, context: Tensor) -> Tensor:
    """Attend from x (B, S, D) to text, and to an image's features, (B, L, D): a branch (B, S, D)."""
    cross: Any = stream.cross
    attention, text, image = at(block, cross.path), context, None
    if cross.image_kv in fusion.groups:
        image, text = context.split([context.shape[1] - cross.text_tokens, cross.text_tokens], dim=1)
    q = at(block, cross.q)(at(block, cross.norm)(x.float()).to(x.dtype))
    q = at(block, cross.q_norm)(q).unflatten(2, (attention.heads, -1))

    def attended(first: str, k_norm: str, read: Tensor) -> Tensor:
        k, v = _shared(block, fusion, first, read)
        k, v = (y.unflatten(2, (attention.heads, -1)) for y in (at(block, k_norm)(k), v))
        return _dispatched(attention.processor, q, k, v, None, None)

    of_image = None if image is None else attended(cross.image_kv, cross.image_k_norm, image)
    of_text = attended(cross.kv, cross.k_norm, text)
    return at(block, cross.out)(of_text if of_image is None else of_text + of_image)


def _feed_forward(
    block: Any,
    fusion: Fusion,
    stream: Stream,
    x: Tensor,
    gated: tuple[Tensor, Tensor],
    later: Sequence[Tensor],
) -> Tensor:
    """Compute n = x + gate · branch, and add its feed-forward: (B, S, D).

    gated: branch (B, S, D) and gate. later: shift, scale and gate of the feed-forward.
    """
    shift, scale, last_gate = later
    norm = Normed(at(block, stream.second_norm), shift, scale, *gated)
    (up,), n = _behind_norm(block, fusion, stream.up, x, norm)
    return _added(block, fusion, stream, up, (n, last_gate))


def _modulation(block: Any, stream: Stream, inputs: BlockInputs) -> tuple[Tensor, ...]:
    """Compute shift, scale and gate (B, D) of the attention, the feed-forward and a second attention, if any."""
    modulation = inputs.modulation[stream.name]
    for path in stream.modulation:
        modulation = at(block, path)(modulation)
    chunks = modulation.chunk(modulation.shape[1] // inputs.x.shape[2], dim=1)
    return chunks[::-1] if len(chunks) == 2 else chunks  # AdaLayerNormContinuous, which has no gate, scales first


def _behind_norm(block: Any, fusion: Fusion, first: str, x: Tensor, modulated: Normed) -> tuple[list[Tensor], Tensor]:
    """Apply the layers of a group to norm(x + gate · branch) · (1 + scale) + shift; return x + gate · branch too.

    x (B, S, D); each layer's output is (M, N).
    """
    norm, shift, scale, branch, gate = modulated
    layers = layers_of(block, fusion, first)
    takers = takers_of(layers, fusion, first)
    flat = None if branch is None else _tokens(branch)
    tensors = NormTensors(scale, shift, flat, gate, norm.weight)
    v = _tokens(x)
    if len(takers) == len(layers) and not any(layer.scheme.rank for layer in takers.values()):
        first_taker = next(iter(takers.values()))
        input_scale, smooth, mean, *_ = first_taker.rounding_tensors
        tensors = tensors._replace(input_scale=input_scale, smooth=smooth, mean=mean)
        packed = pack_named(tensors, first_taker.rounding)
        codes, *scales, n = adaln_quantize(_tokens(x), *packed, "layer", norm.eps)
        encoded = _codes(first_taker, codes, *scales)
    else:  # something reads the input itself
        v, _, _, n = adaln_quantize(_tokens(x), *pack_named(tensors, Rounding()), "layer", norm.eps)
        encoded = _quantized(next(iter(takers.values())), v) if takers else None
    products = _products(takers, encoded, v)
    ys = [products[path] if path in takers else _called(layer, v, x.shape[0]) for path, layer in layers.items()]
    return ys, x if branch is None else n.view(x.shape)


def _shared(block: Any, fusion: Fusion, first: str, x: Tensor) -> list[Tensor]:
    """Apply the layers of a group to x (B, L, D), each (B, L, N): codes are made once for those that take them."""
    layers = layers_of(block, fusion, first)
    takers = takers_of(layers, fusion, first)
    encoded = _quantized(next(iter(takers.values())), _tokens(x)) if takers else None
    products = _products(takers, encoded, _tokens(x))
    return [products[path].unflatten(0, x.shape[:2]) if path in takers else layer(x) for path, layer in layers.items()]


def _added(
    block: Any,
    fusion: Fusion,
    stream: Stream,
    up: Tensor,
    behind: tuple[Tensor, Tensor],
    attended: Tensor | None = None,
) -> Tensor:
    """Compute x + gate · y (B, S, D), of which the feed-forward's last layer makes y.

    It reads act(up), up (M, N), or [attended, act(up)], attended (M, D). behind: x (B, S, D) and gate (B, D).
    """
    ((path, layer),) = layers_of(block, fusion, stream.down).items()
    x, gate, residual = behind[0], behind[1].contiguous(), _tokens(behind[0])
    # Of a branch that has grown since it is unknown whether the device's quantizer multiplies by it.
    if why_alone(fusion, path, layer) or layer.scheme.rank > fusion.ranks.get(path, 0):
        a = ACTS[stream.act](up)
        y = _called(layer, a if attended is None else torch.cat([attended, a], dim=1), x.shape[0])
        y = gated(y, gate, residual)
    else:
        encoded, h = _activated(layer, up, stream.act, attended)
        if h is not None and layer.low_rank is not None:
            y = _multiplied(layer, encoded, up.dtype)
            y += F.linear(h, layer.low_rank[1].to(up.dtype))
            y = gated(y, gate, residual)
        else:
            y = _multiplied(layer, encoded, up.dtype, None, gate, residual)
    return _clipped(y.view(x.shape), stream)


# --- attention


def _attention(
    block: Any, fusion: Fusion, path: str, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None = None
) -> Tensor:
    """Compute the attention (B, S, D) of q, k, v (B, S, H, head)."""
    processor = at(block, path).processor
    if fusion.row.dispatched:
        return _dispatched(processor, *heads, mask, processor._parallel_config)
    q, k, v = (part.transpose(1, 2) for part in heads)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2, 3).to(q.dtype)


def _dispatched(processor: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, parallel: Any) -> Tensor:
    """Compute attention of q, k, v (B, S, H, head) by diffusers' dispatcher, in the processor's backend: (B, S, D)."""
    backend = processor._attention_backend
    attended = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend, parallel_config=parallel)
    return attended.flatten(2, 3).to(q.dtype)


def _heads(attention: Any, qkv: Sequence[Tensor], images: int) -> tuple[Tensor, Tensor, Tensor]:
    """View q, k, v (M, N) as (B, S, H, head)."""
    head = attention.inner_dim // attention.heads
    q, k, v = (y.view(images, -1, y.shape[1] // head, head) for y in qkv)
    return q, k, v


def _normed(
    block: Any,
    streams: Sequence[Stream | OwnAttention],
    heads: Sequence[tuple[Tensor, Tensor, Tensor]],
    rope: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each head of q and k (B, S, H, head), rotate them where there is a rope, and join all streams.

    heads: q, k, v of each stream, of one or two.
    """
    norms = [(at(block, stream.q_norm), at(block, stream.k_norm)) for stream in streams]
    norm = norms[0][0]
    if norm is None:  # only of blocks that rotate nothing either
        q, k, v = (_joined([*parts]) for parts in zip(*heads, strict=True))
        return q, k, v
    weights = [[each.weight for each in pair] for pair in norms]
    q, k, v = heads[0]
    second = (v, *heads[1], *weights[1]) if len(heads) == 2 else ()
    packed = pack_named(RopeTensors(*(rope or (None, None)), *weights[0], *second))
    q, k, joined = qk_norm_rope(q, k, *packed, norm.eps, True, type(norm) is not nn.RMSNorm)
    return q, k, joined if second else v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours in x (B, S, H, head); cos and sin (1, S, 1, head) name each angle twice."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the tokens of all parts (B, S, …), one part after the other."""
    if len(parts) == 1:
        return parts[0]
    return whole(parts, 1) if are_neighbours(parts, 1) else torch.cat(parts, 1)


def _clipped(x: Tensor, stream: Stream) -> Tensor:
    return x.clip(-65504, 65504) if stream.clipped and x.dtype == torch.float16 else x


def _tokens(x: Tensor) -> Tensor:
    """View (B, S, D) as (M, D)."""
    return x.reshape(-1, x.shape[-1])


# --- layers and codes


def at(block: Any, path: str) -> Any:
    """Return the module at a path below a block; None for an empty path or a block without it."""
    if not path or block is None:
        return None
    for name in path.split("."):
        children = block.__dict__.get("_modules", ())  # quicker than an attribute of a module
        block = children[name] if name in children else getattr(block, name, None)
        if block is None:
            return None
    return block


def layers_of(block: Any, fusion: Fusion, first: str) -> dict[str, Any]:
    """Return path -> layer of the group that begins with `first`."""
    return {path: at(block, path) for path in fusion.groups[first].members}


def takers_of(layers: dict[str, Any], fusion: Fusion, first: str) -> dict[str, QuantLinear]:
    """Return the layers that can take the same codes: all with the steps of the first one that takes any."""
    able = {path: layers[path] for path in fusion.alike[first] if not why_alone(fusion, path, layers[path])}
    steps = [_steps(layer) for layer in able.values()]
    return {path: layer for (path, layer), step in zip(able.items(), steps, strict=True) if step == steps[0]}


def why_alone(fusion: Fusion, path: str, layer: nn.Module) -> str:
    """Return the reason why a layer does not take codes that are made for its group; empty if it does."""
    if type(layer) is not QuantLinear:
        kind = type(layer).__name__
        return "16 bit" if kind == "Linear" else f"it is a {kind}, which computes with the input itself"
    if layer.instead is not None:
        return "it computes in 16 bit at this step"
    scheme = layer.scheme
    if scheme.activations is None:
        return "16-bit activations"
    if scheme.deflate:
        return "deflation takes directions of its own out of the input"
    if hasattr(layer, "weight_decoded"):
        return "its weight is decoded already, and fused products take codes"
    if product_of(layer) is None:
        return f"no product of {scheme.weights.name} and {scheme.activations.name} codes"
    if is_hooked(layer):
        return "it has a hook"
    return fusion.refused.get(path, "")


def product_of(layer: QuantLinear) -> tuple[Op, str] | None:
    """Return the op that multiplies a layer's codes, and in what formats; None if none does."""
    if hasattr(layer, "weight_decoded"):
        return None
    activations = layer.scheme.activations
    name = activations.name if activations else None
    return all_ops.product_of(layer.scheme.weights.name, name, hasattr(layer, "weight_row_scale"))


def is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _steps(layer: QuantLinear) -> tuple[Rounding, bool, bool, bool]:
    """Return all that decides the codes of an input, except the numbers in tensors that a group shares."""
    scheme = layer.scheme
    return layer.rounding, scheme.static_input, scheme.center, scheme.smooth


def _called(layer: nn.Module, x: Tensor, images: int) -> Tensor:
    """Call a layer's own forward with x (M, K) in the shape (B, S, K) that diffusers gives it: (M, N)."""
    return _tokens(layer(x.unflatten(0, (images, -1))))


def _quantized(layer: QuantLinear, x: Tensor) -> Codes:
    """Quantize x (M, K) in a layer's format."""
    codes, *scales, _ = quantize_activation(x, *pack_named(layer.rounding_tensors, layer.rounding))
    return _codes(layer, codes, *scales)


def _activated(layer: QuantLinear, up: Tensor, act: str, attended: Tensor | None) -> tuple[Codes, Tensor | None]:
    """Quantize act(up), or [attended, act(up)], (M, K), and multiply it by the first half of a low-rank branch."""
    down = layer.low_rank[0].to(up.dtype) if layer.low_rank is not None else None
    tensors = layer.rounding_tensors._replace(down=down, beside=attended)
    codes, *scales, h = quantize_activation(up, *pack_named(tensors, replace(layer.rounding, act=act)))
    return _codes(layer, codes, *scales), None if down is None else h


def _codes(layer: QuantLinear, codes: Tensor, scale: Tensor, global_scale: Tensor) -> Codes:
    """Complete the codes of an op that quantizes, which does not return a scale that it was given."""
    row = layer.scheme.activations
    stored_scale = layer.stored("input_scale") if layer.scheme.static_input else None
    if row is None or not row.two_level:
        return Codes(codes, scale if stored_scale is None else stored_scale, None)
    return Codes(codes, scale, global_scale if stored_scale is None else stored_scale)


def _products(layers: dict[str, QuantLinear], encoded: Codes | None, x: Tensor) -> dict[str, Tensor]:
    """Apply layers to the same codes (M, K), each (M, N); low-rank branches read x (M, K), the input before quantizing.

    One product computes all where their tensors lie side by side.
    """
    if encoded is None:
        return {}
    several = [*layers.values()]
    stored = operands_of(several) if len(several) > 1 else None
    if stored is None:
        outputs = [_multiplied(layer, encoded, x.dtype) for layer in several]
    else:
        y = _multiplied(several[0], encoded, x.dtype, stored)
        outputs = y.split([layer.out_features for layer in several], dim=1)
    for layer, y in zip(several, outputs, strict=True):
        if layer.low_rank is not None:
            a, b = layer.low_rank
            y += F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))
    return dict(zip(layers, outputs, strict=True))


def _multiplied(
    layer: QuantLinear,
    encoded: Codes,
    dtype: torch.dtype,
    stored: dict[str, Tensor | None] | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute residual + gate · y (M, N), of which a layer makes y from codes (M, K); gate is (B, N).

    stored: of several layers of its scheme side by side, in place of its own.
    """
    given: Any = {name: layer.stored(name) for name in STORED} if stored is None else stored
    weight, weight_scale, weight_scale_2, row_scale, bias = given.values()
    scales = encoded.scale, weight_scale_2, encoded.global_scale
    tensors = ProductTensors(weight, weight_scale, *scales, row_scale, bias, gate=gate, residual=residual)
    product = product_of(layer)
    if product is None:
        raise RuntimeError(f"no op multiplies codes of a {layer.scheme} layer")
    op, formats = product
    return getattr(torch.ops.fluxq, op.name)(encoded.codes, *pack_named(tensors, formats), False, dtype)
