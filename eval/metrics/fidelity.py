"""Difference between images of a quantized pipeline and of the 16-bit one, from the same prompts and noise.

    PSNR = 10 log10(255² / mean (a - b)²)  dB, of one image, or of one frame of a video
    SQNR = 10 log10(Σ a² / Σ (a - b)²)     dB, of its final latents, of a video all of them

These paired figures rank recipes: the same noise on both sides cancels most of what differs between images.
All are kept per image; a mean is a mean of decibels over images (pooling squared errors first is another
metric). A video counts as one image: its value is the mean over its frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fluxq.eval.images.generate import Images

_LAST_BITS = 2  # levels of 255


def fidelity(reference: Any, quantized: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return PSNR and SQNR of the final latents in dB, of each pair of two image sets (as `generate.Generated`).

    NaN for an image that was not finite. Raises ValueError if the two were not made from the same items at the same
    size.
    """
    if tuple(reference.items) != tuple(quantized.items):
        raise ValueError("the images to compare come from different prompts or seeds: generate both from one list")
    figures = psnr(reference.images, quantized.images), sqnr(reference.latents, quantized.latents)
    of_images, of_latents = (whole_only(each, reference, quantized) for each in figures)
    return of_images, of_latents


def flat_images(reference: Any, quantized: Any) -> int:
    """Return how many quantized images, or videos with such a frame, are of one colour where the 16-bit one is not.

    A picture on a white ground can be nearer to a white one, by PSNR, than two pictures of one model are to each other.
    """
    pairs = zip(reference.images, quantized.images, strict=True)
    return sum(bool((_is_flat(after) & ~_is_flat(before)).any()) for before, after in pairs)


def _is_flat(image: Tensor) -> Tensor:
    """Tell whether all pixels of a uint8 image (3, H, W) are the same but for their last bits.

    Of a video (F, 3, H, W), tell it of each frame.
    """
    pixels = image.flatten(-2).int()
    return (pixels.amax(-1) - pixels.amin(-1) <= _LAST_BITS).all(-1)


def psnr(reference: Images, other: Images) -> Tensor:
    """Return the PSNR in dB per pair of uint8 images (3, H, W) or videos (F, 3, H, W), peak 255, float64 (N,).

    Infinite where the two are identical; identical frames of a video that has others are left out of its mean.
    """
    return over_frames(frame_psnr(reference, other))


def frame_psnr(reference: Images, other: Images) -> list[Tensor]:
    """Return the PSNR in dB of each frame of each pair, float64 (F,); of images F is 1."""

    def measure(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype != torch.uint8 or b.dtype != torch.uint8:
            raise ValueError(f"PSNR is taken of uint8 images, got {a.dtype} and {b.dtype}")
        return 10 * torch.log10(255**2 / (a.double() - b.double()).square().mean())

    return per_frame(reference, other, measure)


def sqnr(reference: Images, other: Images) -> Tensor:
    """Return the signal to noise ratio in dB per pair of latents, float64 (N,)."""

    def measure(a: Tensor, b: Tensor) -> Tensor:
        return 10 * torch.log10(a.double().square().sum() / (a.double() - b.double()).square().sum())

    return per_pair(reference, other, measure)


def cosine(reference: Images, other: Images) -> Tensor:
    """Return the cosine similarity per pair of latents, float64 (N,)."""

    def measure(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.double(), b.double()
        return (a * b).sum() / (a.norm() * b.norm())

    return per_pair(reference, other, measure)


def per_pair(reference: Images, other: Images, measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return `measure` of each pair, float64 (N,), one pair at a time to bound memory; ValueError for other shapes."""
    return torch.tensor([float(measure(a, b)) for a, b in _pairs(reference, other)], dtype=torch.float64)


def per_frame(reference: Images, other: Images, measure: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Return `measure` of each frame of each pair, float64 (F,), one frame at a time; of images F is 1."""
    return [
        torch.stack([measure(x, y).double() for x, y in zip(frames_of(a), frames_of(b), strict=True)])
        for a, b in _pairs(reference, other)
    ]


def over_frames(values: Sequence[Tensor]) -> Tensor:
    """Return each video's mean over finite values (F,), float64 (N,); infinite if none is finite, NaN if one is NaN."""
    return torch.tensor([float(_mean(each)) for each in values], dtype=torch.float64)


def _mean(values: Tensor) -> Tensor:
    finite = values[~values.isinf()]
    return (finite if len(finite) else values).mean()


def _pairs(reference: Images, other: Images) -> Iterator[tuple[Tensor, Tensor]]:
    if len(reference) != len(other):
        raise ValueError(f"cannot compare {len(reference)} images with {len(other)}: generate both from one list")
    for a, b in zip(reference, other, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"cannot compare {tuple(a.shape)} with {tuple(b.shape)}: generate at one size")
        yield a, b


def frames_of(image: Tensor) -> Tensor:
    """Return (F, 3, H, W) of a video, or of an image as a video of one frame."""
    return image if image.ndim == 4 else image[None]


def whole_only(values: Tensor, *sides: Any) -> tuple[float, ...]:
    """Return the values as numbers, NaN where the image of a side was not finite."""
    finite = torch.stack([side.finite for side in sides]).all(0)
    return tuple(torch.where(finite, values, torch.nan).tolist())
