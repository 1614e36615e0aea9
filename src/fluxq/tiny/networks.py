"""The network that judges the pipeline's images: features for the FID, logits for the accuracy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZE = 16  # of an image
HEADS = {"object": 16, "colour": 7, "background": 3}  # numbers of classes


class FeatureNetwork(nn.Module):
    """A small residual CNN trained to name object, colour and background of a 16 x 16 image.

    `forward` maps uint8 images (B, 3, 16, 16) to float features (B, `num_features`), as torchmetrics'
    `FrechetInceptionDistance(feature=network)` expects.
    """

    def __init__(self, width: int = 32, num_features: int = 64) -> None:
        super().__init__()
        self.num_features = num_features
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.ModuleList(
            [
                Residual(width),
                nn.Conv2d(width, 64, 3, 2, 1),
                Residual(64),
                nn.Conv2d(64, 64, 3, 2, 1),
                Residual(64),
            ]
        )
        self.squeeze = nn.Linear(64 * 4 * 4, num_features)
        self.heads = nn.ModuleDict({name: nn.Linear(num_features, n) for name, n in HEADS.items()})

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            raise ValueError(f"FeatureNetwork expects uint8 images, got {images.dtype}")
        if images.shape[1:] != (3, SIZE, SIZE):
            raise ValueError(f"FeatureNetwork expects images (B, 3, 16, 16), got {tuple(images.shape)}")
        hidden = self.stem(images.to(self.stem.weight.dtype) / 127.5 - 1)  # (B, 32, 16, 16)
        for stage in self.stages:
            hidden = stage(hidden)
        return self.squeeze(torch.relu(hidden).flatten(1))  # (B, 64)


class Residual(nn.Module):
    """x + two 3 x 3 convolutions: (B, C, H, W) to (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(torch.relu(self.norm(x)))
        return x + self.second(torch.relu(hidden))
