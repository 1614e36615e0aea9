"""FID: how far the distribution of generated images is from that of other images, in a network's features.

    FID = |μ₁ - μ₂|² + tr(Σ₁ + Σ₂ - 2 (Σ₁ Σ₂)^½)      (Heusel et al., 2017)

One number with many variants: network, resizing, precision and above all N, whose bias dwarfs the
differences between recipes. So every value carries what it depends on, and `fid_difference` refuses to
subtract unlike ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from fluxq.eval.fidelity import images_digest

VARIANT = "torchmetrics, uint8 input, no resize before the network, float64 statistics"


@dataclass(frozen=True)
class Fid:
    """A FID and everything it depends on.

    n, n_reference: images on either side. features: D, the width of the network's output. reference: what
    the images are held against, in words, and reference_digest the SHA-256 of its pixels.
    """

    value: float
    n: int
    n_reference: int
    features: int
    network: str
    reference: str
    reference_digest: str
    variant: str = VARIANT

    @property
    def bias(self) -> str:
        """What this number of images does to the value, in words (Chong & Forsyth, 2020)."""
        fewest = min(self.n, self.n_reference)
        if fewest > self.features:
            return f"biased upwards by a finite number of images: compare only at N = {self.n}"
        return (
            f"{fewest} images cannot fill a covariance of {self.features} features, which adds more to the FID than "
            f"recipes differ by: use well over {self.features}"
        )


def fid(images: Tensor, reference: Tensor, network: nn.Module, *, name: str, label: str, batch_size: int = 64) -> Fid:
    """FID between uint8 `images` (N, 3, H, W) and `reference` (M, 3, H, W).

    network: uint8 (B, 3, H, W) -> features (B, D), attribute `num_features` = D; it is put in eval mode.
    name: what to call it. label: what `reference` is, "held-out" or "16-bit images". Raises ValueError for
    fewer than two images.
    """
    for side, what in ((images, "generated"), (reference, label)):
        if side.dtype != torch.uint8:
            raise ValueError(f"FID is taken of uint8 images, got {side.dtype} for the {what} ones")
        if len(side) < 2:
            raise ValueError(f"FID needs at least two images a side, got {len(side)} {what}: raise the image count")
    features = _Float64Features(network)
    metric = FrechetInceptionDistance(feature=features)
    for side, real in ((reference, True), (images, False)):
        for batch in side.split(batch_size):
            metric.update(batch, real=real)
    return Fid(
        value=max(0.0, float(metric.compute())),  # rounding may leave -1e-11 where the two sides are equal
        n=len(images),
        n_reference=len(reference),
        features=features.num_features,
        network=name,
        reference=label,
        reference_digest=images_digest(reference),
    )


def fid_difference(first: Fid, second: Fid) -> float:
    """first - second; ValueError naming what differs if the two values cannot be compared."""
    for field in ("n", "n_reference", "network", "features", "variant", "reference", "reference_digest"):
        a, b = getattr(first, field), getattr(second, field)
        if a != b:
            raise ValueError(f"these FIDs cannot be compared: {field} is {a!r} for one and {b!r} for the other")
    return first.value - second.value


class _Float64Features(nn.Module):
    """The network as torchmetrics wants it; float64 features keep the result from being rounded to float32."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.eval()
        width: Any = network.num_features
        self.num_features = int(width)
        self.device = next((p.device for p in network.parameters()), torch.device("cpu"))

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        features = self.network(images.to(self.device)).double().cpu()  # (B, D)
        if not torch.isfinite(features).all():
            raise ValueError("the feature network answers with NaN or infinity: its weights or its input are damaged")
        return features
