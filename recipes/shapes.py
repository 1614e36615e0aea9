"""Shapes of a model's layers, which plans and costs are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """A Linear of the model, or a 1x1 convolution: module path, out features N, in features K."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Convolution:
    """Describe a convolution that is no Linear.

    n, k: output channels, and the inputs of one output channel.
    channels: of the input.
    stride: input pixels to one output pixel on a side.
    depthwise: each channel by itself.
    """

    name: str
    n: int
    k: int
    channels: int
    stride: int = 1
    depthwise: bool = False
