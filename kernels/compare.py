"""Comparison of what kernels compute with the torch reference, number by number.

Codes, scales, decoded weights and int8 products are the reference's to the bit. Other numbers lie within the rounding
of their sums, in float64: with S = Σ |a · b| + |bias| + Σ |h · up| over `terms` products, ε the spacing of their dtype,

    |y - exact| <= (terms + 8) · 2^-24 · S + 2^-23 · |exact| + ε / 2 · |exact|

The tests of each kernel state the same bounds. Where a GPU adds up products of fp8, of which Ada and Hopper drop bits
below the 13th of the largest, each number may be off by `lost_in_fp8` more, and by 2^-8 · S where decoded weights are
rounded to 16 bit, but all of them together by no more than GATE, beside what a residual loses in rounding. NaN is
wrong. Of many tokens, and of the outputs of a layer, some are compared: the first, the last and others at equal
distances, so that each tile has a few.

Where numbers are the sums of another launch, which a GPU may add up in another order, few of them go to the other side
of a rounding (`same_but_few`).
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.base.console import digits
from fluxq.kernels.encode import decode_scale, decode_stored
from fluxq.kernels.tensor import QuantizedTensor

FP8_SUMS = 2.0**-7  # of Σ |a · b|: what one sum of fp8 products may lose on a GPU, as beside one that is far larger
FP8_STEP = 2.0**-11  # of |Σ a · b|: what it loses with every 32 products, which fall below the bits of a sum that grows
FEW_CODES, FEW_SCALES = 2.0**-12, 2.0**-8  # of all: so near to a rounding that another order of sums moves them
SAME_SCALE = 2.0**-16  # of a scale: what another order of sums makes of it; a step of bfloat16 is 2^-8
FEW_BITS = ((8, 9), (9, 0))  # compute capabilities whose matrix units keep 13 bits of fp8 sums
GATE = 1e-2  # |result - reference| / |reference| where numbers have no bound of their own


class Verdict(NamedTuple):
    """Outcome of a comparison.

    share: of its bound, that the largest error takes; above 1 it is wrong.
    what: in words.
    """

    share: float
    what: str

    @property
    def is_wrong(self) -> bool:
        return not self.share <= 1  # NaN is wrong


class Sample(NamedTuple):
    """Numbers of tokens, and of outputs of a layer, that are compared at most; None for all."""

    tokens: int | None = None
    outputs: int | None = None


def picked(count: int, most: int | None, device: torch.device) -> Tensor:
    """Return the numbers of `most` of so many rows: all, or at equal distances with the first and the last."""
    if most is None or count <= most:
        return torch.arange(count, device=device)
    return torch.arange(most, device=device) * (count - 1) // (most - 1)


def worst(*verdicts: Verdict) -> Verdict:
    """Return the verdict that is farthest from right."""
    return max(verdicts, key=lambda verdict: math.inf if math.isnan(verdict.share) else verdict.share)


def same(what: str, result: Tensor, expected: Tensor) -> Verdict:
    """Compare bytes."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return Verdict(math.inf, f"{what}: {_kind(result)}, expected {_kind(expected)}")
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (result, expected))
    wrong = int((left != right).view(-1, result.element_size()).any(1).sum()) if left.numel() else 0
    return Verdict(math.inf if wrong else 0.0, f"{what}: {wrong} of {result.numel()} differ, expected the same bits")


def same_but_few(result: QuantizedTensor, expected: QuantizedTensor) -> Verdict:
    """Compare codes of numbers that two launches summed, each in an order of its own.

    A share of FEW_CODES of the codes, or one, may be the neighbour. A share of FEW_SCALES of the scales, or one, may be
    that of another amax: the numbers of its block are then within a step and a half of the larger one. Scales of
    numbers that were not rounded before may differ in their last bits: up to SAME_SCALE they are alike.
    """
    element = result.format.element
    (ours, step), (theirs, other) = (_by_block(q) for q in (result, expected))
    alike = (step - other).abs() <= SAME_SCALE * other
    ours, theirs = ours * torch.where(alike, 1.0, step), theirs * torch.where(alike, 1.0, other)
    largest = torch.where(alike, 1.0, torch.maximum(step, other))
    magnitude = torch.maximum(ours.abs(), theirs.abs())
    floating = 2.0**-element.mantissa * torch.maximum(magnitude, element.smallest_normal * largest)
    spacing = (largest if element.is_integer else floating) * torch.where(alike, 1.0, 1.5)
    if not bool(((ours - theirs).abs() <= spacing).all()):  # NaN is not
        return Verdict(math.inf, "numbers: some are off by more than a step")
    codes, scales = int(((ours != theirs) & alike).sum()), int((~alike).sum())
    share = max(codes / max(1.0, FEW_CODES * ours.numel()), scales / max(1.0, FEW_SCALES * alike.numel()))
    return Verdict(share, f"codes: {codes} of {ours.numel()} are neighbours, {scales} of {alike.numel()} scales differ")


def _by_block(q: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return the values of codes (N, G, k), and the step (N, G, 1) of each of their blocks, in float64."""
    n, _ = q.shape
    step = decode_scale(q.scale, q.format, q.global_scale).double()
    step = (step.expand(n, 1) if step.ndim == 0 else step.reshape(n, -1)).unsqueeze(-1)
    return decode_stored(q.codes, q.format.element).double().view(n, step.shape[1], -1), step


def within(what: str, result: Tensor, exact: Tensor, bound: Tensor) -> Verdict:
    """Compare with float64 numbers, each within its bound."""
    if result.shape != exact.shape:
        return Verdict(math.inf, f"{what}: {(*result.shape,)}, expected {(*exact.shape,)}")
    off = (result.double() - exact).abs()
    shares = torch.where(off == 0, 0.0, off / bound).nan_to_num(nan=math.inf)
    if not shares.numel():
        return Verdict(0.0, f"{what}: empty")
    at = int(shares.argmax())
    error, allowed = float(off.reshape(-1)[at]), float(bound.expand_as(off).reshape(-1)[at])
    return Verdict(float(shares.reshape(-1)[at]), f"{what}: off by {digits(error)}, at most {digits(allowed)} expected")


def near(what: str, result: Tensor, expected: Tensor, axes: tuple[int, ...]) -> Verdict:
    """Compare norms over `axes`: |result - expected| is at most GATE of |expected|."""
    norm = (result.double() - expected.double()).square().sum(axes).sqrt()
    return within(what, norm, torch.zeros_like(norm), GATE * expected.double().square().sum(axes).sqrt())


def of_dtype(numbers: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bound of float64 numbers that are rounded to a dtype in the end."""
    kind = torch.finfo(dtype)
    return bound + kind.eps / 2 * (numbers.abs() + bound) + kind.smallest_normal


class Product(NamedTuple):
    """A product x (M, K) w^T (K, N) and what follows it, as kernels/epilogue.py has it, of the rows to compare.

    x, w: codes, or numbers in 16 or 32 bit.
    gate: (M, N), a row for each token.
    terms: further ones in the sums, in units of 2^-24.
    separate: whether branch and product are rounded one by one.
    """

    x: QuantizedTensor | Tensor
    w: QuantizedTensor | Tensor
    bias: Tensor | None = None
    low_rank: tuple[Tensor, Tensor] | None = None
    gelu: bool = False
    gate: Tensor | None = None
    residual: Tensor | None = None
    terms: int = 0
    separate: bool = False


def product(what: str, result: Tensor, given: Product) -> Verdict:
    """Compare a product (M, N): of int8 codes that only a bias follows to the bit, else within the bound."""
    x, w, bias, low_rank = given.x, given.w, given.bias, given.low_rank
    follows = low_rank is not None or given.gelu or given.gate is not None or given.residual is not None
    if _is_int8(x) and _is_int8(w) and not follows:
        sums = (x.codes.double() @ w.codes.double().T).float() * x.scale[:, None] * w.scale
        return same(what, result, (sums if bias is None else sums + bias.float()).to(result.dtype))
    a, b = (_numbers(operand) for operand in (x, w))
    value, size, terms = a @ b.T, a.abs() @ b.abs().T, a.shape[1] + 8 + given.terms
    in_fp8 = result.is_cuda and isinstance(x, QuantizedTensor) and x.format.name[:3] == "fp8"
    keeps_few = in_fp8 and torch.cuda.get_device_capability(result.device) in FEW_BITS
    lost = lost_in_fp8(value, size, a.shape[1] if keeps_few else 0) if in_fp8 else 0
    if bias is not None:
        value, size = value + bias.double(), size + bias.double().abs()
    if low_rank is not None:
        h, up = (part.double() for part in low_rank)
        branch = h @ up.T
        if given.separate:
            lost = lost + torch.finfo(result.dtype).eps * (value.abs() + branch.abs())
        value, size, terms = value + branch, size + h.abs() @ up.abs().T, terms + h.shape[1]
    bound = terms * 2.0**-24 * size + lost
    if given.gelu:
        value, bound = F.gelu(value, approximate="tanh"), 1.13 * bound + 2.0**-20 * size  # 1.13: its steepest slope
    bound = bound + 2.0**-23 * value.abs()
    if given.gate is not None:
        value, bound = value * given.gate.double(), of_dtype(value, bound, result.dtype) * given.gate.double().abs()
    if given.residual is not None:
        value, bound = value + given.residual.double(), of_dtype(value, bound, result.dtype)
    verdict = within(what, result, value, of_dtype(value, bound, result.dtype))
    return worst(verdict, _all_together(what, result, value, given.residual)) if in_fp8 or given.terms else verdict


def lost_in_fp8(value: Tensor, size: Tensor, k: int) -> Tensor:
    """Return what sums `value` of k products of fp8, and `size` of their magnitudes, may lose in a matrix unit.

    k: 0 for one that keeps all bits of a sum. benchmarks/accumulation.py emulates one that does not: of products of one
    sign .042, .163 and .193 of the sum are lost at k = 3072, 12288 and 15360, less than FP8_STEP for every 32.
    """
    return FP8_SUMS * size + FP8_STEP * -(-k // 32) * value.abs()


def _all_together(what: str, result: Tensor, value: Tensor, residual: Tensor | None) -> Verdict:
    """Compare norms: |result - value| is at most GATE of |value - residual|, and what rounding to a dtype loses."""
    made = value if residual is None else value - residual.double()
    rounded = torch.finfo(result.dtype).eps / 2 * value.norm()
    off = (result.double() - value).norm()
    return within(f"{what}, all together", off, torch.zeros_like(off), GATE * made.norm() + rounded)


def taken(q: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    """Return rows of a matrix by their numbers."""
    q = q.unswizzled()
    scale, global_scale = q.scale, q.global_scale
    if scale.ndim:
        scale = at(scale, rows)
    if global_scale is not None and global_scale.ndim:
        global_scale = at(global_scale, rows)
    return QuantizedTensor(at(q.codes, rows), scale, global_scale, (len(rows), q.shape[1]), q.format)


def at(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a tensor of any dtype."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]


def _is_int8(x: QuantizedTensor | Tensor) -> TypeGuard[QuantizedTensor]:
    return isinstance(x, QuantizedTensor) and x.format.name == "int8"


def _numbers(x: QuantizedTensor | Tensor) -> Tensor:
    return (x.dequantize() if isinstance(x, QuantizedTensor) else x).double()


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {(*tensor.shape,)}"
