"""Choice of a weight's codes and scales: nearest, searched, or with error feedback (GPTQ).

    search   of several scales for a block the one with the least Σ h_k (w_k - q_k)^2, h the diagonal of E[z z^T]
    gptq     columns from the last to the first; each is rounded from w_k + Σ_j (w_j - q_j) l_jk over the columns j
             behind it, where E[z z^T] = L D L^T with L unit lower triangular. The error of y is then
             Σ_k D_k · (rounding error of column k)^2, and D_k is what scales are searched with

The feedback form needs no inverse of the Gram; it is GPTQ (arXiv 2210.17323) by the equivalence in QuIP (2307.13304).
Columns of blocks with large inputs are rounded first, as GPTQ's act-order has it, but whole blocks at a time: a scale
belongs to neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxq.kernels import encode
from fluxq.kernels.encode import SCALE_DTYPES, decode_scale, round_to
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import Format

DAMPING = 0.01  # of the mean diagonal, added to the diagonal
_COLUMNS = 128  # rounded between two products with all other columns
_ROWS = 1 << 22  # elements of a weight that are searched at a time


@dataclass(frozen=True)
class Feedback:
    """The Gram as GPTQ uses it. order (K,): columns, rounded from the last on; lower (K, K): L; diagonal (K,): D."""

    order: Tensor
    lower: Tensor
    diagonal: Tensor


class UselessGram(ValueError):
    """Error for a Gram matrix with which nothing can be fed back."""


def feedback(gram: Tensor | Callable[[], Tensor], group: int, damping: float = DAMPING) -> Feedback:
    """Factor E[z z^T] (K, K) for blocks of `group` columns; 0 is a row.

    Channels that are always zero get the damping only. Raises UselessGram for one that is not finite or all zero.

    gram: the matrix, or a function that returns it as a new tensor at each call; L takes the memory of that.
    """
    make = gram.clone if isinstance(gram, Tensor) else gram
    gram = make()
    diagonal = gram.diagonal().clone()
    mean = diagonal.mean()
    if not mean > 0 or not all(torch.isfinite(rows).all() for rows in gram.split(_COLUMNS)):
        raise UselessGram("the Gram matrix of this input is zero or not finite: calibrate with other prompts")
    size = group or 1
    blocks = diagonal.reshape(-1, size)
    inside = blocks.argsort(dim=1, stable=True) + torch.arange(blocks.shape[0], device=gram.device).unsqueeze(1) * size
    order = inside[blocks.mean(1).argsort(stable=True)].flatten()
    lower = gram.T  # LAPACK counts by columns: in place, because a Gram may be most of the memory
    for attempt in range(8):
        if attempt:
            del gram, lower  # before another one is made
            gram = make()
            lower = gram.T
        for columns in gram.split(_COLUMNS, 1):
            columns.copy_(columns[order])
        for rows in gram.split(_COLUMNS):
            rows.copy_(rows[:, order])
        lower.diagonal().add_(damping * 10**attempt * mean)
        info = torch.empty((), dtype=torch.int32, device=gram.device)
        torch.linalg.cholesky_ex(lower, out=(lower, info))
        if not info:
            break
    else:
        raise UselessGram("the Gram matrix of this input has no Cholesky factor: it is not symmetric")
    pivots = lower.diagonal().clone()
    return Feedback(order, lower.div_(pivots), pivots.square())


def round_searched(w: Tensor, format: Format, global_scale: Tensor | None, importance: Tensor) -> QuantizedTensor:
    """Round w (N, K) fp32 under the scales of the least error, weighted by importance (K,)."""
    if not _searches(format):
        return QuantizedTensor.quantize(w, format, global_scale=global_scale)
    n, k = w.shape
    blocks = w.reshape(n, -1, format.group_size)
    weights = importance.reshape(1, -1, format.group_size)
    rows = max(1, _ROWS // k)
    scale = torch.cat([search_scales(part, weights, format, global_scale) for part in blocks.split(rows)])
    step = decode_scale(scale, format, global_scale)
    codes = encode.encode(blocks / step.unsqueeze(-1), format.element).reshape(n, k)
    return QuantizedTensor(encode.pack(codes, format.element), scale, global_scale, (n, k), format)


def round_with_feedback(
    w: Tensor,
    format: Format,
    global_scale: Tensor | None,
    feed: Feedback,
    *,
    search: bool = True,
    row_scale: Tensor | None = None,
) -> QuantizedTensor:
    """Round w (N, K) fp32 by GPTQ; a block's scales are those of its values after feedback.

    row_scale (N, 1): the scales of a format with one for each row, where w is a part of those rows. Where blocks span
    rows their scales are fixed before: (N, K) as `encode.spread` gives them, and the result then holds none.
    """
    n, k = w.shape
    group = 0 if format.spans_rows else format.group_size
    columns = w.T[feed.order]  # (K, N): a column's numbers lie together
    error = torch.zeros_like(columns)  # w - q of the columns done
    codes = torch.empty(k, n, dtype=encode.encode(w[:0], format.element).dtype, device=w.device)
    scales = torch.empty(n, k // group if group else 1, dtype=SCALE_DTYPES[format.scale], device=w.device)
    steps = None
    if format.spans_rows:
        scales = encode.spanning_scale(w, format) if row_scale is None else row_scale.new_empty(0, 0)
        steps = encode.spread(scales, format, n, k) if row_scale is None else row_scale
    elif not group:
        scales = encode.block_scale(w.unsqueeze(1), format, None) if row_scale is None else row_scale
        step = decode_scale(scales, format, None).squeeze(1)
    for stop in range(k, 0, -_COLUMNS):  # a multiple of every group
        start = max(stop - _COLUMNS, 0)
        target = columns[start:stop] + feed.lower[stop:, start:stop].T @ error[stop:]
        for column in range(stop - 1, start - 1, -1):
            at = column - start
            if group and (column + 1) % group == 0:
                block = target[at + 1 - group : at + 1].T.unsqueeze(1)  # (N, 1, group)
                weights = feed.diagonal[column + 1 - group : column + 1].reshape(1, 1, -1)
                scale = _scale_of(block, weights, format, global_scale, search)
                scales[:, int(feed.order[column]) // group] = scale.squeeze(1)
                step = decode_scale(scale, format, global_scale).reshape(n)
            if steps is not None:
                step = steps[:, feed.order[column]]
            value = round_to(target[at] / step, format.element)
            codes[feed.order[column]] = encode.encode(value, format.element)
            error[column] = columns[column] - value * step
            target[:at].addr_(feed.lower[column, start:column], error[column])
    if format.block[1] == 0:
        scales = scales.reshape(format.scale_shape(n, k))
    codes = codes.T.clone(memory_format=torch.contiguous_format)  # `contiguous` leaves a single row its strides
    return QuantizedTensor(encode.pack(codes, format.element), scales, global_scale, (n, k), format)


def search_scales(blocks: Tensor, importance: Tensor, format: Format, global_scale: Tensor | None) -> Tensor:
    """Choose the stored scale with the least weighted squared error for each of the blocks (N, G, k).

    importance (1 or N, G, k). The scale that plain rounding takes is among them and wins a tie.
    """
    plain = encode.block_scale(blocks, format, global_scale)
    best, least = plain, None
    for scale in _candidates(plain, format):
        step = decode_scale(scale, format, global_scale).unsqueeze(-1)
        total = round_to(blocks / step, format.element).mul_(step).sub_(blocks).square_().mul_(importance).sum(-1)
        if least is None:
            best, least = scale, total
        else:
            better = total < least
            least = torch.where(better, total, least)
            best = torch.where(better, _bits(scale), _bits(best)).view(best.dtype)
    return best


def _scale_of(block: Tensor, importance: Tensor, format: Format, global_scale: Tensor | None, search: bool) -> Tensor:
    if search and _searches(format):
        return search_scales(block, importance, format, global_scale)
    return encode.block_scale(block, format, global_scale)


def _searches(format: Format) -> bool:
    """Tell whether scales are searched: rows of 8 bits have so many codes that clipping gains nothing."""
    return format.element.bits == 4


def _candidates(plain: Tensor, format: Format) -> list[Tensor]:
    """Return stored scales near the plain ones, which come first."""
    if format.scale == "bf16":
        return [plain, *((plain.float() * ratio).to(plain.dtype) for ratio in _CLIPS)]
    low, high = (1, 126) if format.scale == "e4m3" else (1, 254)
    byte = plain.view(torch.uint8).int()
    steps = _E4M3_STEPS if format.scale == "e4m3" else _E8M0_STEPS
    return [plain, *((byte + step).clamp(low, high).to(torch.uint8).view(plain.dtype) for step in steps)]


def _bits(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8 if scale.element_size() == 1 else torch.int16)


_E4M3_STEPS = (-3, -2, -1, 1, 2, 3, 4, 5)  # eighths of an octave, more or less; 4-over-6 is about + 5
_E8M0_STEPS = (-1, 1)
_CLIPS = (0.98, 0.95, 0.92, 0.89, 0.86, 0.82, 0.78, 0.74, 0.7, 0.65, 1.03)
