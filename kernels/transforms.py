"""Transforms of x before it is rounded, and of the weight, so that nothing but rounding changes y.

    z = (x - mean) · smooth                 center, smooth: vectors (K,)
    z = z - (z P^T) P                       deflate: P (d, K) with orthonormal rows; z P^T also goes on in 16 bit
    z = z H                                 hadamard: Sylvester's matrix or the regular one, over its root, on blocks

    y = x W^T + b = z V^T + (z P^T) out^T + x (B A)^T + bias

with W' = W - B A what the low-rank branch leaves, W1 = W' / smooth, C = W1 P^T, V = (W1 - C P) H, out = C (2 - P P^T)
and bias = b + W' mean. out makes up for rows of P that rounding has made not quite orthonormal.

The sources: SmoothQuant (arXiv 2211.10438) for smooth, QuaRot (2404.00456) for hadamard, DiRotQ (2605.16732) for
keeping the principal subspace of x in high precision, SVDQuant (2411.05007) for the branch, ConvRot (2512.03673) for
the regular matrix, whose rows all have one sum: Sylvester's gathers what all channels have in common in the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputTransform:
    """The steps above, each None or 0 where it is left out; all fp32, of values that the compute dtype holds."""

    mean: Tensor | None = None
    smooth: Tensor | None = None
    basis: Tensor | None = None
    hadamard: int = 0
    regular: bool = False

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return z (M, K) of x (M, K), in fp32."""
        z = self._before_rotation(x)
        if self.basis is not None:
            z = z - (z @ self.basis.T) @ self.basis
        return rotate(z, self.hadamard, self.regular)

    def deflated(self, x: Tensor) -> Tensor | None:
        """Return z P^T (M, d), which is computed in 16 bit beside z; None without a basis."""
        return None if self.basis is None else self._before_rotation(x) @ self.basis.T

    def of_weight(self, w: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (V (N, K), out (N, d) or None) of W' (N, K)."""
        v = w if self.smooth is None else w / self.smooth
        out = None
        if self.basis is not None:
            along = v @ self.basis.T
            v = v - along @ self.basis
            out = 2 * along - along @ (self.basis @ self.basis.T)
        return rotate(v, self.hadamard, self.regular), out

    def of_gram(self, gram: Tensor, mean: Tensor) -> Tensor:
        """Return E[z z^T] (K, K) of E[x x^T], a new tensor and no other of that size; mean (K,): E[x]."""
        z = gram.clone()
        if self.mean is not None:
            rest = mean - self.mean / 2
            z.addr_(self.mean, rest, alpha=-1).addr_(rest, self.mean, alpha=-1)
        if self.smooth is not None:
            z *= self.smooth
            z *= self.smooth.unsqueeze(1)
        if self.basis is not None:
            z.addmm_(self.basis.T, self.basis @ z, alpha=-1)
            z.addmm_(z @ self.basis.T, self.basis, alpha=-1)
        if self.hadamard:
            h = hadamard_matrix(self.hadamard, self.regular, z.device)
            for rows in z.split(self.hadamard):
                rows.copy_(h @ rotate(rows, self.hadamard, self.regular))
        return z

    def extra_bias(self, w: Tensor) -> Tensor | None:
        """Return the bias that centring adds: W' mean (N,)."""
        return None if self.mean is None else w @ self.mean

    def _before_rotation(self, x: Tensor) -> Tensor:
        z = x.float()
        if self.mean is not None:
            z = z - self.mean
        return z if self.smooth is None else z * self.smooth

    def of_columns(self, part: slice) -> InputTransform:
        """Return the transform of some columns of x: whole blocks of Hadamard; all of them with a basis."""
        if self.basis is not None:
            return self
        return replace(
            self,
            mean=None if self.mean is None else self.mean[part],
            smooth=None if self.smooth is None else self.smooth[part],
        )


def rotate(v: Tensor, size: int, regular: bool = False) -> Tensor:
    """Multiply each block of `size` columns of v (…, K) with H / sqrt(size), in fp32; 0 returns v."""
    if not size:
        return v
    h = hadamard_matrix(size, regular, v.device)
    # The same numbers, laid out as comfy-kitchen multiplies by them: sums then have its order, and its bits.
    return (v.float().reshape(-1, size) @ (h.T if regular else h)).reshape(v.shape)


def hadamard_matrix(size: int, regular: bool, device: torch.device | None = None) -> Tensor:
    """Return the orthonormal Hadamard matrix (size, size), which is its own transpose: Sylvester's, or the regular one.

    That is the Kronecker power of a 4 x 4 one, so that size is a power of 4.
    """
    first = REGULAR if regular else SYLVESTER
    h = torch.ones(1, 1, device=device, dtype=torch.float32)
    while h.shape[0] < size:
        h = torch.kron(torch.tensor(first, device=device, dtype=torch.float32), h)
    return h / size**0.5


SYLVESTER = ((1.0, 1), (1, -1))
REGULAR = ((1.0, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))
