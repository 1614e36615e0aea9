"""Accuracy of images: the share in which the embedded pipeline's network sees what their captions say."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.tiny import data
from fluxq.tiny.networks import HEADS, FeatureNetwork


def classify(network: FeatureNetwork, images: Tensor) -> dict[str, Tensor]:
    """Logits of uint8 images (B, 3, 16, 16): `object` (B, 16), `colour` (B, 7), `background` (B, 3)."""
    features = torch.relu(network(images))
    return {name: head(features) for name, head in network.heads.items()}


@torch.no_grad()
def accuracy(network: FeatureNetwork, images: Tensor, captions: list[str]) -> dict[str, float]:
    """The share of images (B, 3, 16, 16) that show what their captions say, by part and in all."""
    wanted = torch.tensor([data.parse(text) for text in captions], device=images.device)  # (B, 3)
    logits = classify(network, images)
    right = {name: logits[name].argmax(1) == wanted[:, at] for at, name in enumerate(HEADS)}
    right["all"] = torch.stack(list(right.values())).all(0)
    return {name: float(hits.float().mean()) for name, hits in right.items()}
