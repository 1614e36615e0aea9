"""16-bit part of a layer: a few directions of its weight, or of its input.

    branch    W ≈ B A: the largest singular directions of a weight, by subspace iteration with a fixed start
    deflate   P: the principal directions of z, whose share of y is computed in 16 bit and taken out of z
    joint     B A and the codes in turn, against the input that is really multiplied, rounded z^: the codes see the
              target M E[z z^T] E[z^ z^T]^-1 with M what the branch leaves, the branch is fitted to what the codes leave

SVDQuant (arXiv 2411.05007) has the branch, QERA (2410.06040) and GPTAQ (2504.02692) the two halves of the descent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_ITERATIONS = 6
_EXTRA = 8  # directions beyond those asked for, which make the iteration converge faster


@dataclass(frozen=True)
class RowChunks:
    """A matrix of n rows, a few at a time in memory. chunks: all of them, (rows, K) fp32, in their order."""

    n: int
    chunks: Callable[[], Iterable[Tensor]]

    def times(self, right: Tensor) -> Tensor:
        """Return W right (N, C)."""
        return torch.cat([chunk @ right for chunk in self.chunks()])

    def transposed_times(self, left: Tensor) -> Tensor:
        """Return W^T left (K, C)."""
        total, start = torch.zeros((), device=left.device, dtype=torch.float32), 0
        for chunk in self.chunks():
            total = total + chunk.T @ left[start : start + chunk.shape[0]]
            start += chunk.shape[0]
        return total


def branch(w: Tensor | RowChunks, rank: int, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (A (R, K), B (N, R)) fp32 with B A the best approximation of w (N, K); B has orthonormal columns.

    gram (K, K): E[z z^T]; the error of w z is then minimised, without it that of w itself.
    """
    if isinstance(w, Tensor):
        whole = w
        w = RowChunks(whole.shape[0], lambda: (whole,))
    start = _start(w.n, rank, next(iter(w.chunks())))
    for _ in range(_ITERATIONS):
        start = torch.linalg.qr(w.times(_times(gram, w.transposed_times(start))))[0]
    inner = w.transposed_times(start)  # (K, R + extra)
    values, vectors = torch.linalg.eigh(inner.T @ _times(gram, inner))
    kept = vectors[:, values.argsort(descending=True)[:rank]]
    return (inner @ kept).T.contiguous(), start @ kept


def principal_directions(gram: Tensor, count: int) -> Tensor:
    """Return P (count, K): orthonormal rows that span the largest eigenvectors of E[z z^T] (K, K)."""
    start = _start(gram.shape[0], count, gram)
    for _ in range(_ITERATIONS):
        start = torch.linalg.qr(gram @ start)[0]
    values, vectors = torch.linalg.eigh(start.T @ gram @ start)
    return (start @ vectors[:, values.argsort(descending=True)[:count]]).T.contiguous()


def balanced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Scale rows of A and columns of B to equal size, with the same B A, so that 16 bit stores both well."""
    ratio = (a.norm(dim=1) / b.norm(dim=0).clamp(min=1e-30)).clamp(min=1e-30).sqrt()
    return a / ratio.unsqueeze(1), b * ratio


def _start(rows: int, count: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, min(count + _EXTRA, rows), generator=generator, dtype=torch.float32).to(like)


def _times(gram: Tensor | None, right: Tensor) -> Tensor:
    return right if gram is None else gram @ right
