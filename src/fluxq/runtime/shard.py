"""Tensor parallelism: a QuantLinear cut over the ranks of a process group.

    column parallel   every rank holds some rows (N) of W and computes those outputs:    y_r = x W_r^T
    row parallel      every rank holds some columns (K) of W, and y is a sum over ranks:  y = Σ_r x_r W_r^T + b

Codes and block scales are cut where blocks end, so that every shard is a QuantLinear of the same scheme and no number
in it changes. A token's scale depends on its whole row, so row parallel ranks agree on the amax first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fluxq.kernels import encode, ops
from fluxq.kernels.linear import QuantLinear, QuantPointwise
from fluxq.kernels.tensor import QuantizedTensor, pack_named
from fluxq.recipes.formats import Scheme


def shard(
    layer: QuantLinear, axis: Literal["N", "K"], rank: int, world_size: int, parts: Sequence[int] = ()
) -> QuantLinear:
    """Cut rank `rank`'s share out of a layer (K in, N out): (K, N / world_size) on axis N, (K / world_size, N) on K.

    The share is a copy. Global scale and `input_scale` stay whole. The bias is cut on N and stays with rank 0 on K.
    parts: sizes along the axis of the tensors that are joined there, each cut by itself (a FLUX single block's proj_out
    reads [attention, MLP]). Raises ValueError where a share would not be whole blocks of the scheme, on K for a layer
    that deflates its input, for a 1x1 convolution and for a layer that fluxq.prepare changed; shards can be prepared,
    on every rank for the same chip.
    """
    if layer.prepared is not None:
        raise ValueError(
            f"this layer is prepared for one GPU ({layer.prepared.how}): load the model again, shard first, then "
            "prepare"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}: expected 0 to {world_size - 1}")
    if axis == "K" and layer.scheme.deflate:
        raise ValueError(
            f"this {layer.scheme} layer deflates its input, along directions that cross all of K: shard it on axis N"
        )
    if isinstance(layer, QuantPointwise):
        raise ValueError("this layer is a 1x1 convolution and takes images: only layers that take tokens are sharded")
    q = layer.quantized_weight
    n, k = q.shape
    size, unit = (n, layer.scheme.weights.block[0] or 1) if axis == "N" else (k, _block(layer.scheme))
    spans = _spans(size, parts, rank, world_size, unit, f"axis {axis} of a {layer.scheme} layer")

    def cut(tensor: Tensor, dim: int) -> Tensor:
        """Cut the share out of a tensor with shape[dim] / size entries for each of the axis."""
        entries = tensor.shape[dim]
        slices = [tensor.narrow(dim, start * entries // size, length * entries // size) for start, length in spans]
        return torch.cat(slices, dim)

    share = sum(length for _, length in spans)
    bias = None if layer.bias is None else layer.bias.data
    if axis == "N":
        scale = cut(q.scale, 0) if q.scale.ndim else q.scale.clone()
        codes, shape = cut(q.codes, 0), (share, k)
        bias = None if bias is None else cut(bias, 0)
        along = {"deflate_out": 0, "svdquant_lora_b": 0}  # branch -> the axis of it that is cut
    else:
        scale = cut(q.scale, 1) if q.scale.ndim == 2 else q.scale.clone()
        codes, shape = cut(q.codes, 1), (n, share)
        if rank and bias is not None:
            bias = torch.zeros_like(bias) if layer.scheme.center else None  # a layer that centers always has one
        bias = _copy(bias)
        along = {"pre_quant_mean": 0, "pre_quant_scale": 0, "svdquant_lora_a": 1}
    part = QuantLinear.from_quantized(
        QuantizedTensor(codes, scale, _copy(q.global_scale), shape, q.format),
        bias,
        layer.scheme,
        _copy(layer.stored("input_scale")),
        {name: cut(t, along[name]) if name in along else t.clone() for name, t in layer.branches.items()},
    )
    part.compute_dtype = layer.compute_dtype
    return part


class ColumnParallel(nn.Module):
    """A layer whose shards on axis N are spread over `group`; x (…, K) whole on every rank gives (…, N).

    gather=False leaves every rank its own outputs (…, N / world_size), as a RowParallel that follows wants them.
    For inference: gradients do not pass through.
    """

    def __init__(self, part: QuantLinear, group: dist.ProcessGroup | None = None, gather: bool = True) -> None:
        super().__init__()
        self.part, self.group, self.gather = part, group, gather

    def forward(self, x: Tensor) -> Tensor:
        _require_no_gradient(x)
        y = self.part(x).contiguous()
        if not self.gather:
            return y
        gathered = [torch.empty_like(y) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, y, group=self.group)
        return torch.cat(gathered, dim=-1)


class RowParallel(nn.Module):
    """A layer whose shards on axis K are spread over `group`; every rank's own x (…, K / world_size) gives (…, N).

    Partial sums are added in fp32 and rounded once, so the result is the whole layer's up to the order of that sum.
    For inference: gradients do not pass through.
    """

    def __init__(self, part: QuantLinear, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        require_row_parallel(part.scheme)
        self.part, self.group = part, group

    def forward(self, x: Tensor) -> Tensor:
        y = partial_product(self.part, x, self.group)
        dist.all_reduce(y, group=self.group)
        return y.to(x.dtype)


def require_row_parallel(scheme: Scheme) -> None:
    """Raise ValueError for a scheme whose shards on axis K would not compute what the whole layer does."""
    activations = scheme.activations
    if activations is not None and activations.block[0] == 0 and not scheme.static_input:
        raise ValueError(
            f"{activations.name} activations have one scale for all tokens, which ranks do not agree on; calibrate "
            "it, use fp8 with a scale per token, or shard this layer on axis N"
        )


def partial_product(part: QuantLinear, x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return a rank's summand (…, N) in fp32 of a layer cut on axis K, for its own x (…, K / world_size).

    All ranks of `group` call it together: they agree on the scales of tokens.
    """
    _require_no_gradient(x)
    operands = part.tensors._replace(input_scale=_input_scale(part, x, group))
    return ops.quantized_linear(x.float(), *pack_named(operands, part.scheme))


def _input_scale(part: QuantLinear, x: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """Return the op's `input_scale`: the stored one, or one of each token's whole row (M, 1), over all ranks.

    None where the format needs neither.
    """
    scheme, activations = part.scheme, part.scheme.activations
    is_by_row = activations is not None and (activations.two_level or activations.group_size == 0)
    if activations is None or scheme.static_input or not is_by_row:
        return part.stored("input_scale") if scheme.static_input else None
    mean, smooth = (getattr(part, name, None) for name in ("pre_quant_mean", "pre_quant_scale"))
    z, _ = ops.transformed(x.reshape(-1, x.shape[-1]), scheme, mean, smooth, None)
    amax = z.abs().amax(-1, keepdim=True).float()  # (M, 1)
    amax.nan_to_num_(nan=math.inf, posinf=math.inf)  # a maximum over ranks may lose NaN, but not infinity
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    if activations.two_level:
        return encode.global_scale_for(amax, activations, scheme.four_over_six)
    return encode.block_scale(amax.unsqueeze(-1), activations, None)


def _block(scheme: Scheme) -> int:
    """Return the elements along K that a share must hold whole multiples of."""
    codes_per_byte = 8 // scheme.weights.element.bits
    formats = [scheme.weights] if scheme.activations is None else [scheme.weights, scheme.activations]
    return math.lcm(codes_per_byte, scheme.hadamard or 1, *(row.group_size or 1 for row in formats))


def _spans(size: int, parts: Sequence[int], rank: int, world_size: int, unit: int, what: str) -> list[tuple[int, int]]:
    """Return (start, length) of a rank's share of every part."""
    parts = parts or [size]
    if sum(parts) != size or min(parts) < 1:
        raise ValueError(f"parts {list(parts)} do not add up to the {size} of {what}")
    for part in parts:
        if part % (world_size * unit):
            raise ValueError(
                f"{what}: {part} does not split over {world_size} ranks in blocks of {unit}; it needs a multiple of "
                f"{world_size * unit}: use fewer ranks, or the other axis"
            )
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return [(start + part // world_size * rank, part // world_size) for start, part in zip(starts, parts, strict=True)]


def _require_no_gradient(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("a sharded layer has no backward pass; run it under torch.no_grad()")


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.data.clone()
