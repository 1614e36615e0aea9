"""Query and key heads through RMSNorm and rotary position embedding, as a torch.library op with its torch reference.

    v = x / √(mean(x²) + eps) · weight                 for each head of q and of k
    y = v · cos + rotate(v) · sin

It is composed as diffusers composes its layers, and rounded where these round. Of two streams that share an attention
(text and image) it writes q, k and v side by side, so that nothing copies them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels.adaln_quantize.op import rms_norm
from fluxq.kernels.op import Op, launches_on_gpu
from fluxq.kernels.ops import no_autocast
from fluxq.kernels.tensor import unpack_named

OP = Op("qk_norm_rope", ("16bit",), "memory")


class RopeTensors(NamedTuple):
    """The tensors of `qk_norm_rope` beside q and k of the first stream.

    cos, sin: (S, D) fp32, a row for each token of all streams; or None, and nothing is rotated.
    q_weight, k_weight: (D,) in q's dtype, or None.
    v: (B, S, Hk, D) in q's dtype, only to be copied; or None.
    q2, k2, v2, q2_weight, k2_weight: of a second stream, whose tokens follow; or None.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    v: Tensor | None = None
    q2: Tensor | None = None
    k2: Tensor | None = None
    v2: Tensor | None = None
    q2_weight: Tensor | None = None
    k2_weight: Tensor | None = None


class Heads(NamedTuple):
    """The heads of one stream: q (B, S, H, D), k and v (B, S, Hk, D), weights (D,)."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None


@torch.library.custom_op("fluxq::qk_norm_rope", mutates_args=())
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    tensors: Sequence[Tensor],
    names: str,
    eps: float,
    interleaved: bool,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply RMSNorm and rotary embedding to q (B, S, H, D) and k (B, S, Hk, D); returns new contiguous q, k and v.

    They hold the tokens of all streams, one stream after the other. Without a v the third comes back empty, (0,).

    tensors, names: of `pack_named(RopeTensors(…))`.
    interleaved: pairs are neighbours (Flux; as complex numbers Qwen-Image), otherwise elements D / 2 apart.
    round_before_weight: as diffusers' RMSNorm; torch.nn.RMSNorm rounds once.
    """
    given, _ = unpack_named(RopeTensors, tensors, names)
    streams = streams_of(q, k, given)
    check_rows(given, sum(stream.q.shape[1] for stream in streams))
    with no_autocast(q):
        parts = [
            (
                _head_norm(stream.q, stream.q_weight, eps, round_before_weight),
                _head_norm(stream.k, stream.k_weight, eps, round_before_weight),
            )
            for stream in streams
        ]
        q, k = (torch.cat(both, 1) for both in zip(*parts, strict=True))
        if given.cos is not None and given.sin is not None:
            cos, sin = given.cos[:, None], given.sin[:, None]  # (S, 1, D)
            q, k = ((v.float() * cos + rotate(v, interleaved).float() * sin).to(v.dtype) for v in (q, k))
        vs = [stream.v for stream in streams if stream.v is not None]
        return q.contiguous(), k.contiguous(), torch.cat(vs, 1).contiguous() if vs else q.new_empty(0)


@qk_norm_rope.register_fake
def _(q, k, tensors, names, eps, interleaved, round_before_weight):
    streams = streams_of(q, k, unpack_named(RopeTensors, tensors, names)[0])
    tokens = sum(stream.q.shape[1] for stream in streams)
    q, k = (x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in (q, k))
    return q, k, k.new_empty(0 if streams[0].v is None else k.shape)


launches_on_gpu(OP.name, qk_norm_rope)


def streams_of(q: Tensor, k: Tensor, given: RopeTensors) -> list[Heads]:
    """Return the heads of each stream. Raises ValueError for a second stream of which one tensor is lacking."""
    first = Heads(q, k, given.v, given.q_weight, given.k_weight)
    if given.q2 is None and given.k2 is None and given.v2 is None:
        return [first]
    if given.q2 is None or given.k2 is None or (given.v2 is None) != (given.v is None):
        raise ValueError("qk_norm_rope: of a second stream pass q2 and k2, and v2 if there is v")
    return [first, Heads(given.q2, given.k2, given.v2, given.q2_weight, given.k2_weight)]


def tokens_of(q: Tensor, tensors: Sequence[Tensor], names: str) -> int:
    """Count the tokens of all streams of a call."""
    second = unpack_named(RopeTensors, tensors, names)[0].q2
    return q.shape[0] * (q.shape[1] + (0 if second is None else second.shape[1]))


def check_rows(given: RopeTensors, tokens: int) -> None:
    """Raise ValueError unless cos and sin are both None, or have a row for each of so many tokens."""
    rows = [None if table is None else table.shape[0] for table in (given.cos, given.sin)]
    if rows not in ([None, None], [tokens, tokens]):
        raise ValueError(
            f"qk_norm_rope: {tokens} tokens, but cos and sin have {rows[0]} and {rows[1]} rows: pass one for each "
            "token of all streams, or neither"
        )


def _head_norm(x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool) -> Tensor:
    if round_before_weight:
        return rms_norm(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(v: Tensor, interleaved: bool) -> Tensor:
    """Return (-b, a) for each pair (a, b) along the last axis."""
    if interleaved:
        a, b = v.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([-b, a], -1).flatten(-2)
    a, b = v.chunk(2, -1)
    return torch.cat([-b, a], -1)
