"""How far a quantized pipeline drifts from the 16-bit one when both start from the same prompts and noise.

    PSNR = 10 log10(255² / mean (a - b)²)  dB, of one image
    SQNR = 10 log10(Σ a² / Σ (a - b)²)     dB, of its final latents

These paired figures rank recipes: the same noise on both sides cancels most of what differs between images.
All are kept per image; a mean is a mean of decibels over images (pooling squared errors first is another
metric).
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxq.eval.generate import Generated

_BATCH_VALUES = 1 << 22


@dataclass(frozen=True)
class Interval:
    """A mean over `n` values and its 95 % confidence limits.

    infinite: how many more values were infinite (identical images) and are left out of the mean. The mean
    is infinite if all were, and NaN if there were none or if any was NaN, so that a comparison `mean >=
    gate` fails for broken images. low and high are NaN where the values say nothing about them (fewer than
    two).
    """

    mean: float
    low: float
    high: float
    n: int
    infinite: int = 0


@dataclass(frozen=True)
class Fidelity:
    """Per-image agreement with the 16-bit pipeline, in the order of `items`.

    psnr_db: over uint8 pixels, infinite for identical images. latent_sqnr_db, latent_cosine: over final
    latents. All are NaN for an image that was not finite. reference: SHA-256 of the 16-bit images.
    """

    items: tuple[tuple[str, int], ...]
    psnr_db: tuple[float, ...]
    latent_sqnr_db: tuple[float, ...]
    latent_cosine: tuple[float, ...]
    reference: str


@dataclass(frozen=True)
class Comparison:
    """Two recipes on the same images: `difference` is first minus second in dB, image by image.

    wins, losses, ties: on how many images the first is closer to 16 bit, farther from it, or equally close.
    """

    difference: Interval
    wins: int
    losses: int
    ties: int

    @property
    def decided(self) -> bool:
        """Whether the interval of the mean difference leaves out 0."""
        return self.difference.low > 0 or self.difference.high < 0


def fidelity(reference: Generated, quantized: Generated) -> Fidelity:
    """Compare image by image; ValueError if the two were not made from the same items at the same size."""
    if reference.items != quantized.items:
        raise ValueError("the images to compare come from different prompts or seeds: generate both from one list")
    return Fidelity(
        items=reference.items,
        psnr_db=_finite_only(psnr(reference.images, quantized.images), reference, quantized),
        latent_sqnr_db=_finite_only(sqnr(reference.latents, quantized.latents), reference, quantized),
        latent_cosine=_finite_only(cosine(reference.latents, quantized.latents), reference, quantized),
        reference=images_digest(reference.images),
    )


def compare(first: Fidelity, second: Fidelity) -> Comparison:
    """Compare two recipes by PSNR; ValueError unless both were measured against the same 16-bit images."""
    if first.items != second.items or first.reference != second.reference:
        raise ValueError("these recipes were not measured on the same 16-bit images: evaluate both with one seed")
    pairs = list(zip(first.psnr_db, second.psnr_db, strict=True))
    differences = [0.0 if a == b else a - b for a, b in pairs]  # two identical images differ by 0, not by inf - inf
    return Comparison(
        difference=paired_interval(differences),
        wins=sum(d > 0 for d in differences),
        losses=sum(d < 0 for d in differences),
        ties=sum(d == 0 for d in differences),
    )


def within_item_intervals(conditions: Sequence[Sequence[float]]) -> list[Interval]:
    """Means of several recipes on the same items, with intervals that leave out how items differ in general.

    Some prompts are fragile under every recipe; that spread widens each recipe's own interval and says nothing
    about their order. Each item's mean over the recipes is replaced by the grand mean and what remains widened
    by sqrt(C / (C - 1)) (Cousineau 2005, corrected by Morey 2008). conditions: C lists of equal length, finite.
    """
    table = torch.tensor(conditions, dtype=torch.float64)  # (C, items)
    if len(table) < 2 or not torch.isfinite(table).all():
        raise ValueError("within-item intervals compare at least two recipes whose values are all finite")
    means = table.mean(1, keepdim=True)
    centred = table - table.mean(0) + table.mean() - means  # deviations from each recipe's mean, items alike
    corrected = means + centred * math.sqrt(len(table) / (len(table) - 1))
    return [paired_interval(row) for row in corrected.tolist()]


def psnr(reference: Tensor, other: Tensor) -> Tensor:
    """dB per image of uint8 (N, 3, H, W) with peak 255, float64 (N,); infinite where the images are identical."""
    if reference.dtype != torch.uint8 or other.dtype != torch.uint8:
        raise ValueError(f"PSNR is taken of uint8 images, got {reference.dtype} and {other.dtype}")
    return _per_image(reference, other, lambda a, b: 10 * torch.log10(255**2 / (a - b).square().mean()))


def sqnr(reference: Tensor, other: Tensor) -> Tensor:
    """Signal to noise ratio in dB per row of (N, ...), float64 (N,)."""
    return _per_image(reference, other, lambda a, b: 10 * torch.log10(a.square().sum() / (a - b).square().sum()))


def cosine(reference: Tensor, other: Tensor) -> Tensor:
    """Cosine similarity per row of (N, ...), float64 (N,)."""
    return _per_image(reference, other, lambda a, b: (a * b).sum() / (a.norm() * b.norm()))


def paired_interval(values: Sequence[float], resamples: int = 9999, seed: int = 0) -> Interval:
    """Mean of per-image values with its 95 % BCa bootstrap interval (Efron 1987, `scipy.stats.bootstrap`).

    For a comparison pass per-image differences: pairing is what makes the interval narrow.
    """
    from scipy.stats import bootstrap

    if not values or any(math.isnan(value) for value in values):
        return Interval(math.nan, math.nan, math.nan, n=0)
    kept = [value for value in values if math.isfinite(value)]
    infinite = len(values) - len(kept)
    if not kept:
        return Interval(values[0], math.nan, math.nan, n=0, infinite=infinite)
    mean = math.fsum(kept) / len(kept)
    if len(kept) == 1:
        return Interval(mean, math.nan, math.nan, n=1, infinite=infinite)
    if min(kept) == max(kept):
        return Interval(mean, mean, mean, n=len(kept), infinite=infinite)
    batch = max(1, _BATCH_VALUES // len(kept))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BCa warns where its correction is undefined; the percentile one then serves
        result = bootstrap((kept,), _mean, n_resamples=resamples, batch=batch, rng=seed, method="BCa")
        low, high = result.confidence_interval
        if math.isnan(low) or math.isnan(high):
            result = bootstrap((kept,), _mean, n_resamples=0, bootstrap_result=result, method="percentile")
            low, high = result.confidence_interval
    return Interval(mean, float(low), float(high), n=len(kept), infinite=infinite)


def images_digest(images: Tensor) -> str:
    """SHA-256 of the shape and bytes of uint8 images."""
    digest = hashlib.sha256(repr(tuple(images.shape)).encode())
    for image in images:
        digest.update(image.contiguous().numpy().data)
    return digest.hexdigest()


def _mean(values, axis: int):
    return values.mean(axis=axis)


def _per_image(reference: Tensor, other: Tensor, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`measure` of each pair in float64, one pair at a time to bound memory."""
    if reference.shape != other.shape:
        raise ValueError(f"cannot compare {tuple(reference.shape)} with {tuple(other.shape)}: generate at one size")
    return torch.stack([measure(a.double(), b.double()) for a, b in zip(reference, other, strict=True)])


def _finite_only(values: Tensor, *sides: Generated) -> tuple[float, ...]:
    finite = torch.stack([side.finite for side in sides]).all(0)
    return tuple(torch.where(finite, values, torch.nan).tolist())
