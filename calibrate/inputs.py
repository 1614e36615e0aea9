"""Statistics of one input group's x: its Gram matrix, mean and amax, and samples of its tokens.

    gram = Σ w x xᵀ / Σ w        mean = Σ w x / Σ w        over the fitting tokens, w the weight of their noise level

Held-out tokens enter neither; they are sampled separately, to judge the result of a fit. Memory holds one Gram and a
chunk of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 4096  # rows widened to fp32 at once, at most
_STRIPES = 4  # of the Gram; the part left of a stripe's own columns is not computed, it is the transpose
_SAMPLING_SEED = 20
_LARGEST = 8  # one in so many of the held-out sample is a token of the largest power


@dataclass(frozen=True)
class GroupInputs:
    """One input group; tensors are on the device of the tokens.

    grams: fp32, uncentred, one (k, k) per segment, symmetric to the bit; none where no Gram was wanted.
    mean: (K,) fp32.
    amax: (K,) fp32, of fitting and held-out tokens.
    count: of fitting tokens.
    fit, held_out: (M1, K) and (M2, K) samples in the dtype of the tokens, spread evenly over calls and a call's rows;
        of those held out an eighth are the tokens of largest power.
    held_weight: (M2,) fp32, mean 1, of the held-out tokens that each one stands for.
    segments: sizes along K that the Gram is block-diagonal over, (K,) if it is whole.
    tokens: all fitting tokens again, in chunks (M, K) with the weight of each; None where they cannot be repeated.
    """

    grams: tuple[Tensor, ...]
    mean: Tensor
    amax: Tensor
    count: int
    fit: Tensor
    held_out: Tensor
    held_weight: Tensor
    segments: tuple[int, ...]
    tokens: Callable[[], Iterator[tuple[Tensor, float]]] | None = None


class InputsBuilder:
    """Builder of the `GroupInputs` of the group `name`, one call of `add` for each activation.

    calls: number of activations to come, (fitting, held-out): the samples of at most `most_fit` and `most_held` rows
        are spread over them. They are drawn on the CPU from a fixed seed, so every device takes the same rows, but for
        tokens of almost the same power.
    """

    def __init__(
        self,
        name: str,
        k: int,
        segments: Sequence[int] = (),
        *,
        device: torch.device | str = "cpu",
        wants_gram: bool = True,
        calls: tuple[int, int],
        most_fit: int = 2048,
        most_held: int = 1024,
    ) -> None:
        self.name, self.k, self.segments = name, k, tuple(segments) or (k,)
        if sum(self.segments) != k or min(self.segments) < 1:
            raise ValueError(f"{name}: segments {self.segments} do not add up to its {k} channels")
        self.grams = (
            tuple(torch.zeros(size, size, device=device, dtype=torch.float32) for size in self.segments)
            if wants_gram
            else ()
        )
        self.amax = torch.zeros(k, device=device, dtype=torch.float32)
        self.sum = torch.zeros(k, dtype=torch.float64)
        self.total_weight, self.count = 0.0, 0
        self._fit = _Sample(most_fit, calls[0])
        self._held_out = _Sample(most_held, calls[1], _LARGEST)

    @torch.no_grad()
    def add(self, x: Tensor, weight: float = 1.0, held_out: bool = False, step: int | None = None) -> None:
        """Add tokens x (..., K) of one call. ValueError naming group and step if they are not finite."""
        if x.shape[-1] != self.k:
            raise ValueError(f"{self.name}: its input has {x.shape[-1]} channels, the layer takes {self.k}")
        if not 0 < weight < math.inf:
            raise ValueError(f"{self.name}: weight {weight} of a noise level; it must be a positive number")
        x = x.reshape(-1, self.k)  # (M, K)
        if x.shape[0] == 0:
            return
        rows = max(256, min(_CHUNK, self.k // 4))  # a chunk is then a quarter of a large Gram
        for chunk in x.split(rows):
            amax = chunk.abs().amax(0).float()
            if not torch.isfinite(amax).all():
                at = "" if step is None else f" at step {step}"
                raise ValueError(f"{self.name}: its input holds NaN or infinity{at}")
            torch.maximum(self.amax, amax, out=self.amax)
            if not held_out:
                self._add_products(chunk, weight)
        (self._held_out if held_out else self._fit).add(x, weight)
        if not held_out:
            self.count += x.shape[0]
            self.total_weight += weight * x.shape[0]

    def finish(self, tokens: Callable[[], Iterator[tuple[Tensor, float]]] | None = None) -> GroupInputs:
        """Return the inputs; the builder is used up. ValueError if no fitting token came."""
        if self.count == 0:
            raise ValueError(f"{self.name}: no activation reached this layer during calibration; look at more steps")
        for gram in self.grams:
            _mirror(gram.div_(self.total_weight))
        fit, _ = self._fit.rows(self.k, self.amax.device)
        held_out, held_weight = self._held_out.rows(self.k, self.amax.device)
        mean = (self.sum / self.total_weight).float().to(self.amax.device)
        return GroupInputs(
            self.grams, mean, self.amax, self.count, fit, held_out.to(fit.dtype), held_weight, self.segments, tokens
        )

    def _add_products(self, x: Tensor, weight: float) -> None:
        """Add the sums of x (m, K); of each Gram only the upper triangle of stripes."""
        wide = x.float()
        self.sum += weight * wide.sum(0).cpu().double()
        if not self.grams:
            return
        with _exact_products(x):
            for gram, part in zip(self.grams, wide.split(self.segments, 1), strict=True):
                width = -(-gram.shape[0] // _STRIPES)
                for start in range(0, gram.shape[0], width):
                    stop = start + width
                    gram[start:stop, start:].addmm_(part[:, start:stop].T, part[:, start:], alpha=weight)


class _Sample:
    """At most `most` rows, the same share of each of `calls` calls: one row at random of each equal run of rows.

    largest: one in so many is a row of the call's largest power instead, 0 for none. A few massive tokens can hold most
    of all power, and a random sample may hold none of them.
    """

    def __init__(self, most: int, calls: int, largest: int = 0) -> None:
        self.most, self.share, self.largest = most, -(-most // max(calls, 1)), largest
        self.parts: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.random = torch.Generator().manual_seed(_SAMPLING_SEED)

    def add(self, x: Tensor, weight: float) -> None:
        count, total = min(self.share, x.shape[0]), x.shape[0]
        top = count // self.largest if self.largest and count < total else 0
        order = torch.arange(total)
        if top:
            power = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).cpu()
            largest = power.argsort(descending=True, stable=True)[:top]
            is_largest = torch.zeros(total, dtype=torch.bool).index_fill(0, largest, True)
            order = torch.cat([order[is_largest], order[~is_largest]])
        drawn, rest = count - top, total - top
        ends = torch.arange(drawn + 1) * rest // drawn
        within = torch.rand(drawn, generator=self.random, dtype=torch.float64) * (ends[1:] - ends[:-1])
        rows, by_row = torch.cat([order[:top], order[top:][ends[:-1] + within.long()]]).sort()
        stands_for = torch.cat([torch.ones(top), torch.full((drawn,), rest / drawn)])[by_row]  # tokens of the call
        self.parts.append(x[rows.to(x.device)])
        self.weights.append(weight * stands_for.float() * count / total)

    def rows(self, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sample (M, K) and its weights (M,), mean 1; empty if nothing came."""
        if not self.parts:
            return torch.empty(0, k, device=device, dtype=torch.float32), torch.empty(
                0, device=device, dtype=torch.float32
            )
        rows, weights = torch.cat(self.parts), torch.cat(self.weights)
        if len(rows) > self.most:  # shares are rounded up
            kept = torch.arange(self.most) * len(rows) // self.most
            rows, weights = rows[kept.to(rows.device)], weights[kept]
        return rows, (weights / weights.mean()).to(device)


def _mirror(gram: Tensor) -> Tensor:
    """Fill the part below the diagonal with that above, in place and stripe by stripe."""
    width = -(-gram.shape[0] // _STRIPES)
    for start in range(0, gram.shape[0], width):
        stop = start + width
        block = gram[start:stop, start:stop]
        block.copy_(block.triu() + block.triu(1).T)
        gram[start:stop, :start] = gram[:start, start:stop].T
    return gram


@contextmanager
def _exact_products(x: Tensor) -> Iterator[None]:
    """Allow TF32 on a GPU meanwhile: its matrix units hold products of 16-bit numbers whole, and sums stay fp32."""
    if not x.is_cuda or x.element_size() != 2:
        yield
        return
    libraries: Any = torch.backends
    products = libraries.cuda.matmul
    before = products.fp32_precision  # torch.get_float32_matmul_precision raises where the user has set this
    if before == libraries.fp32_precision:
        before = "none"  # as that of all libraries, also later
    products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before
