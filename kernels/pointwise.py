"""A 1x1 convolution whose weight is stored in a number format: a QuantLinear that takes and returns images.

    y (B, N, H, W) = QuantLinear of the pixels of x (B, K, H, W)

Its checkpoint, its kernels and every change of its weight are a QuantLinear's; only `forward` moves an axis. An image
with its channels last in memory, as in SANA's feed-forward, is a matrix of pixels already: nothing is copied, and the
output has them last too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fluxq.base.linears import PIXELS, is_pixelwise, linear_size
from fluxq.kernels.linear import QuantLinear
from fluxq.recipes.formats import Scheme


class QuantPointwise(QuantLinear):
    """A 1x1 convolution (K channels in, N out) under a Scheme; forward takes (B, K, H, W), or (K, H, W).

    It has the attributes that libraries read of a convolution (PEFT does, to make adapters of the same kind).
    """

    channel_axis = PIXELS
    kernel_size = stride = dilation = (1, 1)
    padding, groups = (0, 0), 1

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim not in (3, 4):
            raise ValueError(f"input {(*input.shape,)} is no image: expected (B, {self.in_features}, H, W)")
        return self.of_tokens(input.movedim(PIXELS, -1)).movedim(-1, PIXELS)

    def plain(self, bias: bool, dtype: torch.dtype) -> nn.Linear | nn.Conv2d:
        return nn.Conv2d(self.in_features, self.out_features, 1, bias=bias, dtype=dtype, device="meta")


def placeholder(old: nn.Module, scheme: Scheme, dtype: torch.dtype) -> QuantLinear:
    """Return a layer on the meta device for the place of a Linear (N, K), in the sense of base/linears.py.

    dtype: of its computation. ValueError for other modules, and for shapes that the scheme does not hold.
    """
    n, k = linear_size(old)
    with torch.device("meta"):
        return _class_for(old)(k, n, old.bias is not None, scheme, dtype)


def in_place_of(old: nn.Module, layer: QuantLinear) -> QuantLinear:
    """Return `layer` itself, from now on called with tokens or images, as `old` is."""
    layer.__class__ = _class_for(old)
    return layer


def _class_for(old: nn.Module) -> type[QuantLinear]:
    return QuantPointwise if is_pixelwise(old) or isinstance(old, QuantPointwise) else QuantLinear
