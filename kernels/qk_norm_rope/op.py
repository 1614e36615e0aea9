"""Query and key heads through RMSNorm and rotary position embedding, as a torch.library op with its torch reference.

    v = x / √(mean(x²) + eps) · weight                 for each head of q and of k
    y = v · cos + rotate(v) · sin

It is composed as diffusers composes its layers, and rounded where these round.
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
    """The tensors of `qk_norm_rope` beside q and k.

    cos, sin: (positions, D) fp32. q_weight, k_weight: (D,) in q's dtype, or None.
    """

    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None


@torch.library.custom_op("fluxq::qk_norm_rope", mutates_args=())
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    tensors: Sequence[Tensor],
    names: str,
    eps: float,
    interleaved: bool,
    round_before_weight: bool,
    position: int,
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm and rotary embedding to q (B, S, H, D) and k (B, S, Hk, D); returns new contiguous tensors.

    Token s takes row position + s of cos and sin.

    tensors, names: of `pack_named(RopeTensors(…))`.
    interleaved: pairs are neighbours (Flux; as complex numbers Qwen-Image), otherwise elements D / 2 apart.
    round_before_weight: as diffusers' RMSNorm; torch.nn.RMSNorm rounds once.
    """
    (cos, sin, q_weight, k_weight), _ = unpack_named(RopeTensors, tensors, names)
    check_positions(q, cos, position)
    rows = slice(position, position + q.shape[1])
    cos, sin = cos[rows, None], sin[rows, None]  # (S, 1, D)
    with no_autocast(q):
        normed = [_head_norm(x, w, eps, round_before_weight) for x, w in ((q, q_weight), (k, k_weight))]
        q, k = ((v.float() * cos + rotate(v, interleaved).float() * sin).to(v.dtype) for v in normed)
    return q.contiguous(), k.contiguous()


@qk_norm_rope.register_fake
def _(q, k, tensors, names, eps, interleaved, round_before_weight, position):
    return q.new_empty(q.shape), k.new_empty(k.shape)


launches_on_gpu(OP.name, qk_norm_rope)


def check_positions(q: Tensor, cos: Tensor, position: int) -> None:
    """Raise ValueError unless cos has a row for each token of q, the first one's at `position`."""
    if not 0 <= position <= cos.shape[0] - q.shape[1]:
        raise ValueError(
            f"qk_norm_rope: {q.shape[1]} tokens from position {position} on, but cos and sin are for {cos.shape[0]} "
            "positions: pass a longer table"
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
