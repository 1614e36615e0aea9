"""Metrics that only videos have: change from frame to frame, and features of a whole video.

    temporal PSNR  = 10 log10(255² / mean (Δb - Δa)²)  dB     Δx = x[t + 1] - x[t], over all of a video's pixels
    flicker        = mean |Δb| / mean |Δa|                    1 where b changes as much as a
    video distance = Fréchet distance of videos in the features of a network that was trained to tell actions apart

PSNR sees an error that stays where it is (another colour, another shape), temporal PSNR does not. Of errors that come
and go two meet in each change: the temporal PSNR is then 3 dB below PSNR. It is the error of temporal derivatives that
Erofeev et al. (2015) call dtSSD, of colours in place of mattes and in dB. The mean change of a video by itself is what
VBench scores as temporal flickering (Huang et al., 2024).

The video distance is made as FVD is (Unterthiner et al., 2019), but through S3D (Xie et al., 2018) as torchvision
publishes it, whose file holds tensors alone, where FVD looks through I3D. The two do not compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.eval.images.generate import Images, Lazy
from fluxq.eval.metrics.distribution import FeatureNetwork
from fluxq.eval.metrics.fidelity import per_pair
from fluxq.eval.metrics.plugins import Unmeasured

VIDEO_FRAMES = 14  # that S3D needs


def temporal_psnr(reference: Images, other: Images) -> Tensor:
    """Return dB per pair of uint8 videos (F, 3, H, W), float64 (N,); infinite where both change alike.

    Raises Unmeasured for videos of one frame.
    """

    def measure(a: Tensor, b: Tensor) -> Tensor:
        _require_changes(a)
        total = torch.zeros((), dtype=torch.float64)
        before = b[0].double() - a[0].double()
        for x, y in zip(a[1:], b[1:], strict=True):  # a frame at a time: a video in fp64 would be gigabytes
            error = y.double() - x.double()
            total += (error - before).square().mean()
            before = error
        return 10 * torch.log10(255**2 * (len(a) - 1) / total)

    return per_pair(reference, other, measure)


def mean_change(videos: Images) -> Tensor:
    """Return the mean |x[t + 1] - x[t]| of each uint8 video (F, 3, H, W), float64 (N,); Unmeasured for one frame."""

    def measure(video: Tensor) -> Tensor:
        _require_changes(video)
        changes = [(y.short() - x.short()).abs().double().mean() for x, y in pairwise(video)]
        return torch.stack(changes).mean()

    return torch.stack([measure(video) for video in videos])


def _require_changes(video: Tensor) -> None:
    if video.ndim != 4 or len(video) < 2:
        raise Unmeasured("a video of one frame has no change in time")


def all_frames(images: Images) -> Images:
    """Return the pictures of a set for a network that looks at pictures: its images, or the frames of its videos.

    Frames come one after the other, uint8 (3, H, W) each; one video is held at a time.
    """
    count = frames_in_each(images)
    if count is None:
        return images
    video = lru_cache(maxsize=1)(images.__getitem__)
    return Lazy(len(images) * count, lambda index: video(index // count)[index % count])


def frames_in_each(images: Images) -> int | None:
    """Return the frames of each video of a set, which all have as many; None for images and for an empty set."""
    return len(images[0]) if len(images) and images[0].ndim == 4 else None


def by_video(values: Tensor, frames: int | None) -> Tensor:
    """Return the mean of each video's frames (N · F, …) -> (N, …); of images (frames None) the values as they are."""
    return values if frames is None else values.unflatten(0, (-1, frames)).mean(1)


def s3d(state: Mapping[str, Tensor], digest: str) -> FeatureNetwork:
    """Build S3D up to its 1024 pooled features of a whole video, prepared as torchvision does it for Kinetics-400.

    state: what `s3d-d76dad2f.pth` holds; digest: the file's SHA-256. ValueError for weights that do not fit.
    """
    from torchvision.models.video import S3D

    with torch.random.fork_rng(devices=[]):  # it draws weights first, all of which are replaced
        network: Any = S3D()
    try:
        network.load_state_dict(dict(state))
    except RuntimeError as error:
        raise ValueError(f"these are not the weights of torchvision's S3D: {error}") from None
    layers = nn.Sequential(network.features, network.avgpool, nn.AdaptiveAvgPool3d(1), nn.Flatten())
    return FeatureNetwork(layers, "S3D", "all frames at once, resized and cropped to 224 x 224", _prepared, digest)


def _prepared(video: Tensor) -> Tensor:
    """Convert uint8 (F, 3, H, W) to S3D's input (3, F, 224, 224)."""
    from torchvision.models.video import S3D_Weights

    return S3D_Weights.KINETICS400_V1.transforms()(video)
