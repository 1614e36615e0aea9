"""Ops of what stands before and after a transformer's attention, with their torch references: adaLN and q/k norms.

    n = x + gate · branch                              the gated residual, where a branch is given
    v = norm(n) · (1 + scale) + shift                  then quantized as `quantize_activation` in producers.py does

    v = x / √(mean(x²) + eps) · weight                 for each head of q and of k
    y = v · cos + rotate(v) · sin

They are composed as diffusers composes its layers, and rounded where these round. Modulation in x's dtype rounds each
step to it, as AdaLayerNormZero and its kin do; fp32 modulation of 16-bit x rounds only n and v, as Wan does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels import producers
from fluxq.kernels.device import launches_on_gpu
from fluxq.kernels.ops import no_autocast
from fluxq.kernels.packing import pack, unpack
from fluxq.kernels.producers import Rounding, RoundingTensors

NORMS = ("layer", "rms")


class NormTensors(NamedTuple):
    """The tensors of `adaln_quantize` beside x; those that are left out are None.

    scale, shift, gate: (B, D) in x's dtype or fp32, for B images whose M / B tokens follow one another. branch (M, D).
    weight (D,) of the norm. input_scale, smooth, mean: as `RoundingTensors` has them.
    """

    scale: Tensor
    shift: Tensor
    branch: Tensor | None = None
    gate: Tensor | None = None
    weight: Tensor | None = None
    input_scale: Tensor | None = None
    smooth: Tensor | None = None
    mean: Tensor | None = None

    def packed(self, rounding: Rounding) -> tuple[list[Tensor], str]:
        """(tensors, rounding) as the op takes them."""
        return pack(self, rounding)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], rounding: str) -> tuple[NormTensors, Rounding]:
        """Take apart what `packed` made."""
        given, text = unpack(cls, tensors, rounding)
        return given, Rounding.parse(text)

    @property
    def of_rounding(self) -> RoundingTensors:
        """Those of the steps that follow."""
        return RoundingTensors(self.input_scale, self.smooth, self.mean)


@torch.library.custom_op("fluxq::adaln_quantize", mutates_args=())
def adaln_quantize(
    x: Tensor, tensors: Sequence[Tensor], rounding: str, norm: str, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (M, D) to (codes, scale, global scale, n); without a format v, in x's dtype, stands in place of the codes.

    tensors, rounding: of `NormTensors.packed`. norm: "layer" or "rms". What is not there comes back as an empty tensor
    (0,).
    """
    given, how = NormTensors.of(tensors, rounding)
    with no_autocast(x):
        v, new = modulated_norm(x, given, norm, eps)
        if how.format:
            codes, step, global_scale, _ = producers.quantize_activation(v, *given.of_rounding.packed(how))
        else:
            codes, step, global_scale = v, x.new_empty(0), x.new_empty(0)
        return codes, step, global_scale, x.new_empty(0) if new is None else new


@adaln_quantize.register_fake
def _(x, tensors, rounding, norm, eps):
    given, how = NormTensors.of(tensors, rounding)
    new = x.new_empty(0 if given.branch is None else x.shape)
    if not how.format:
        return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0), new
    return *torch.ops.fluxq.quantize_activation(x, *given.of_rounding.packed(how))[:3], new


def modulated_norm(x: Tensor, given: NormTensors, norm: str, eps: float) -> tuple[Tensor, Tensor | None]:
    """(v, n) of x (M, D), in its dtype; n is None without a branch."""
    scale, branch, gate = given.scale, given.branch, given.gate
    if norm not in NORMS:
        raise ValueError(f"adaln_quantize: unknown norm {norm!r}, expected one of {', '.join(NORMS)}")
    if (branch is None) != (gate is None):
        raise ValueError("adaln_quantize: of branch and gate one is given: give both, or neither")
    images = scale.shape[0]
    if images == 0 or x.shape[0] % images:
        raise ValueError(
            f"adaln_quantize: scale {(*scale.shape,)} does not split {x.shape[0]} tokens into equal images (B, D)"
        )
    n = x.reshape(images, -1, x.shape[1]).to(scale.dtype)  # (B, M / B, D)
    if branch is not None and gate is not None:
        n = (n + gate[:, None] * branch.reshape(n.shape)).to(x.dtype).to(scale.dtype)
    h = _rms_norm(n, given.weight, eps) if norm == "rms" else F.layer_norm(n, n.shape[-1:], given.weight, None, eps)
    v = h * (1 + scale[:, None]) + given.shift[:, None]
    return v.reshape(x.shape).to(x.dtype), None if branch is None else n.reshape(x.shape).to(x.dtype)


class RopeTensors(NamedTuple):
    """The tensors of `qk_norm_rope` beside q and k.

    cos, sin: (positions, D) fp32. q_weight, k_weight: (D,) in q's dtype, or None.
    """

    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None

    def packed(self) -> tuple[list[Tensor], str]:
        """(tensors, names) as the op takes them."""
        return pack(self, "")

    @classmethod
    def of(cls, tensors: Sequence[Tensor], names: str) -> RopeTensors:
        """Take apart what `packed` made."""
        return unpack(cls, tensors, names)[0]


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
    """RMSNorm and rotary embedding of q (B, S, H, D) and k (B, S, Hk, D), new contiguous tensors.

    tensors, names: of `RopeTensors.packed`. Token s takes row position + s of cos and sin. interleaved: pairs are
    neighbours (Flux; as complex numbers Qwen-Image), otherwise elements D / 2 apart. round_before_weight: as diffusers'
    RMSNorm; torch.nn.RMSNorm rounds once.
    """
    cos, sin, q_weight, k_weight = RopeTensors.of(tensors, names)
    if not 0 <= position <= cos.shape[0] - q.shape[1]:
        raise ValueError(
            f"qk_norm_rope: {q.shape[1]} tokens from position {position} on, but cos and sin are for {cos.shape[0]} "
            "positions: pass a longer table"
        )
    rows = slice(position, position + q.shape[1])
    cos, sin = cos[rows, None], sin[rows, None]  # (S, 1, D)
    with no_autocast(q):
        normed = [_head_norm(x, w, eps, round_before_weight) for x, w in ((q, q_weight), (k, k_weight))]
        q, k = ((v.float() * cos + _rotate(v, interleaved).float() * sin).to(v.dtype) for v in normed)
    return q.contiguous(), k.contiguous()


@qk_norm_rope.register_fake
def _(q, k, tensors, names, eps, interleaved, round_before_weight, position):
    return q.new_empty(q.shape), k.new_empty(k.shape)


launches_on_gpu(adaln_quantize=adaln_quantize, qk_norm_rope=qk_norm_rope)


def _head_norm(x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool) -> Tensor:
    if round_before_weight:
        return _rms_norm(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As diffusers' RMSNorm: rounded before the weight and after it."""
    v = (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return v if weight is None else v * weight


def _rotate(v: Tensor, interleaved: bool) -> Tensor:
    """(-b, a) for each pair (a, b) along the last axis."""
    if interleaved:
        a, b = v.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([-b, a], -1).flatten(-2)
    a, b = v.chunk(2, -1)
    return torch.cat([-b, a], -1)
