"""Gated residual, norm and modulation (adaLN), then codes, as a torch.library op with its torch reference.

    n = x + gate · branch                              the gated residual, where a branch is given
    v = norm(n) · (1 + scale) + shift                  then quantized as `quantize_activation` does

It is composed as diffusers composes its layers, and rounded where these round. Modulation in x's dtype rounds each step
to it, as AdaLayerNormZero and its kin do; fp32 modulation of 16-bit x rounds only n and v, as Wan does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels.op import Op, launches_on_gpu
from fluxq.kernels.ops import no_autocast
from fluxq.kernels.quantize_activation.op import PRODUCED, Rounding, RoundingTensors, quantize_activation
from fluxq.kernels.tensor import pack_named, unpack_named

OP = Op("adaln_quantize", (*PRODUCED, "16bit"), "memory")
NORMS = ("layer", "rms")


class NormTensors(NamedTuple):
    """The tensors of `adaln_quantize` beside x; those that are left out are None.

    scale, shift, gate: (B, D) in x's dtype or fp32, for B images whose M / B tokens follow one another.
    branch: (M, D).
    weight: (D,) of the norm.
    input_scale, smooth, mean: those of `RoundingTensors`.
    """

    scale: Tensor
    shift: Tensor
    branch: Tensor | None = None
    gate: Tensor | None = None
    weight: Tensor | None = None
    input_scale: Tensor | None = None
    smooth: Tensor | None = None
    mean: Tensor | None = None

    @property
    def of_rounding(self) -> RoundingTensors:
        """Tensors of the rounding that follows."""
        return RoundingTensors(self.input_scale, self.smooth, self.mean)


@torch.library.custom_op("fluxq::adaln_quantize", mutates_args=())
def adaln_quantize(
    x: Tensor, tensors: Sequence[Tensor], rounding: str, norm: str, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (codes, scale, global scale, n) of x (M, D); without a format v, in x's dtype, in place of codes.

    tensors, rounding: of `pack_named(NormTensors(…), Rounding(…))`. norm: "layer" or "rms". Absent results come
    back as empty tensors (0,).
    """
    operands, how = unpack_named(NormTensors, tensors, rounding, Rounding.parse)
    with no_autocast(x):
        v, new = modulated_norm(x, operands, norm, eps)
        if how.format:
            codes, step, global_scale, _ = quantize_activation(v, *pack_named(operands.of_rounding, how))
        else:
            codes, step, global_scale = v, x.new_empty(0), x.new_empty(0)
        return codes, step, global_scale, x.new_empty(0) if new is None else new


@adaln_quantize.register_fake
def _(x, tensors, rounding, norm, eps):
    operands, how = unpack_named(NormTensors, tensors, rounding, Rounding.parse)
    new = x.new_empty(0 if operands.branch is None else x.shape)
    if not how.format:
        return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0), new
    return *quantize_activation(x, *pack_named(operands.of_rounding, how))[:3], new


launches_on_gpu(OP.name, adaln_quantize)


def modulated_norm(x: Tensor, operands: NormTensors, norm: str, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return (v, n) of x (M, D), in its dtype; n is None without a branch."""
    scale, branch, gate, weight = operands.scale, operands.branch, operands.gate, operands.weight
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
    h = rms_norm(n, weight, eps) if norm == "rms" else F.layer_norm(n, n.shape[-1:], weight, None, eps)
    v = h * (1 + scale[:, None]) + operands.shift[:, None]
    return v.reshape(x.shape).to(x.dtype), None if branch is None else n.reshape(x.shape).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Apply diffusers' RMSNorm, which rounds before the weight and after it."""
    v = (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return v if weight is None else v * weight
