"""Layers drawn at random with what makes diffusion transformers hard to quantize; no model is needed.

    adaln   x = norm(stream) · (1 + scale_t) + shift_t: a power-law spectrum, channels of log-normal size of which .6 %
            are 10 to 40 times larger, and 8 noise levels with a scale and shift each; large channels have small weights
    ffn     x = GELU(tokens of heavy-tailed size): one-sided, .3 % of channels 30 to 100 times larger
    attn    x = averages over tokens: sizes differ by head, every channel has a mean
    gauss   nothing of it: independent normal numbers

Weights (but gauss's) are Student's t with 5 degrees of freedom, rows and columns of log-normal size, and a quarter of
their energy in 128 directions of power-law size. What is measured on these says which method is better where, not how
many dB a model gains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 8  # of noise
SMALLER = {"adaln": 0.5, "ffn": 0.3, "attn": 1.0}  # weights of large channels


@dataclass(frozen=True)
class SyntheticLayer:
    """weight (N, K) and tokens, all fp32: fit (M, K) to quantize with, held (M', K) to judge by."""

    family: str
    weight: Tensor
    fit: Tensor
    held: Tensor


def draw(
    family: str, *, k: int = 512, n: int = 512, fit: int = 8192, held: int = 1024, seed: int = 0
) -> SyntheticLayer:
    """One layer of a family; the same seed gives the same numbers."""
    if family not in FAMILIES:
        raise ValueError(f"no family {family!r} of synthetic layers, only {', '.join(FAMILIES)}")
    generator = torch.Generator().manual_seed(1_000_003 * seed + list(FAMILIES).index(family))
    x, large = FAMILIES[family](fit + held, k, generator)
    w = _normal(generator, n, k) / k**0.5 if family == "gauss" else _weight(family, n, k, large, generator)
    order = torch.randperm(fit + held, generator=generator)
    return SyntheticLayer(family, w, x[order[:fit]], x[order[fit:]])


def _adaln(m: int, k: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    stream = F.layer_norm(_power_law(m, k, 1.0, g), (k,))
    large = _choose(k, 0.006, g)
    gain = torch.exp(0.6 * _normal(g, k))
    gain[large] *= _uniform(g, 10, 40, len(large))
    level = torch.arange(m) % LEVELS
    scale, shift = 0.2 * _normal(g, LEVELS, k), 0.15 * _normal(g, LEVELS, k)
    return (stream * (1 + scale[level]) + shift[level]) * gain, large


def _ffn(m: int, k: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    size = torch.exp(0.4 * _normal(g, m, 1))
    large = _choose(k, 0.003, g)
    x = F.gelu(_power_law(m, k, 0.3, g) * size * torch.exp(0.3 * _normal(g, k)), approximate="tanh")
    x[:, large] *= _uniform(g, 30, 100, len(large))
    return x, large


def _attn(m: int, k: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    heads = torch.exp(0.5 * _normal(g, max(k // 64, 1))).repeat_interleave(min(k, 64))[:k]
    return (_power_law(m, k, 0.8, g) + 0.65 * _normal(g, k)) * heads, torch.empty(0, dtype=torch.long)


def _gauss(m: int, k: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return _normal(g, m, k), torch.empty(0, dtype=torch.long)


def _weight(family: str, n: int, k: int, large: Tensor, g: torch.Generator) -> Tensor:
    chi = torch.stack([_normal(g, n, k).square() for _ in range(5)]).mean(0)
    w = _normal(g, n, k) / chi.sqrt()
    w *= torch.exp(0.25 * _normal(g, n, 1)) * torch.exp(0.4 * _normal(g, k))
    rank = min(128, n, k)
    sizes = torch.arange(1, rank + 1).float() ** -1.0
    low = (_normal(g, n, rank) * sizes) @ _normal(g, rank, k)
    w = w * (0.75**0.5 / w.norm()) + low * (0.25**0.5 / low.norm())
    w[:, large] *= SMALLER[family]
    return w * n**0.5


def _power_law(m: int, k: int, exponent: float, g: torch.Generator) -> Tensor:
    """Rows (m, k) of variance about 1 whose covariance has eigenvalues i^-exponent in directions drawn at random."""
    values = torch.arange(1, k + 1).float() ** -exponent
    basis = torch.linalg.qr(_normal(g, k, k))[0]
    return (_normal(g, m, k) * (values / values.mean()).sqrt()) @ basis.T


def _choose(k: int, share: float, g: torch.Generator) -> Tensor:
    return torch.randperm(k, generator=g)[: max(1, round(share * k))]


def _normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def _uniform(g: torch.Generator, low: float, high: float, count: int) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=g)


FAMILIES = {"adaln": _adaln, "ffn": _ffn, "attn": _attn, "gauss": _gauss}
