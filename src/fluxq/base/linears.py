"""Linears in the sense of fluxq: nn.Linear, and a convolution of single pixels, which is a Linear over the channels.

    y[b, n, h, w] = Σ_k W[n, k] · x[b, k, h, w] + bias[n]

SANA's feed-forward is made of those. "Linear" means both everywhere: each pixel is a token, of K channels.
"""

from __future__ import annotations

from torch import Tensor, nn

PIXELS = -3  # axis of the channels in (B, K, H, W), and in (K, H, W)


def is_pixelwise(module: nn.Module) -> bool:
    """Tell whether a module is a convolution with a 1x1 kernel over every pixel once and all channels.

    A subclass of nn.Conv2d is none: its forward may do more.
    """
    if type(module) is not nn.Conv2d or module.kernel_size != (1, 1):
        return False
    return module.stride == (1, 1) and module.groups == 1 and module.padding in ((0, 0), "valid", "same")


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a Linear in the sense of this file."""
    return isinstance(module, nn.Linear) or is_pixelwise(module)


def linears_of(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return path -> module of every Linear, in the model's order."""
    return {name: module for name, module in model.named_modules() if is_linear(module)}  # pyright: ignore[reportReturnType]


def linear_size(module: nn.Module) -> tuple[int, int]:
    """Return (N, K): out features and in features, or channels; ValueError for a module that is no Linear."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, nn.Conv2d) and is_pixelwise(module):
        return module.out_channels, module.in_channels
    what = module if isinstance(module, nn.Module) else f"a {type(module).__name__}"
    raise ValueError(f"{what} is no Linear: expected nn.Linear, or nn.Conv2d of single pixels")


def channels_last(module: nn.Module, x: Tensor) -> Tensor:
    """Return an input or output of a Linear as (…, K): an image (B, K, H, W) becomes (B, H, W, K), a view."""
    return x.movedim(channel_axis(module), -1)


def channel_axis(module: nn.Module) -> int:
    """Return the axis of the channels in a Linear's inputs and outputs; a quantized one has it as an attribute."""
    return PIXELS if is_pixelwise(module) else getattr(module, "channel_axis", -1)
