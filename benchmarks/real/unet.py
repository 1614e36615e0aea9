"""The U-Net of 21cmPSDenoiser, a score-based diffusion model of power spectra, written anew for its tensors.

Its parts have the names of the file's tensors, less the wrappers' `fn`. Convolutions are standardized as the network
was trained with them: each filter less its mean, *times* its standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 64, 128, 256)
_TIME = 128
_HEADS, _HEAD = 4, 32
_EPSILON = 1e-5


class PowerSpectra(nn.Module):
    """Denoiser of a power spectrum x (B, 1, H, W), given the noisy one; predicts the noise in x."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(pairwise(WIDTHS))
        self.init_conv = nn.Conv2d(2, WIDTHS[0], 1)
        self.time_mlp = nn.ModuleDict({"1": nn.Linear(32, _TIME), "3": nn.Linear(_TIME, _TIME)})
        self.downs = nn.ModuleList(
            nn.ModuleList([_Residual(a, a), _Residual(a, a), _Attention(a, linear=True), _down(a, b, index)])
            for index, (a, b) in enumerate(pairs)
        )
        self.mid_block1, self.mid_block2 = _Residual(WIDTHS[-1], WIDTHS[-1]), _Residual(WIDTHS[-1], WIDTHS[-1])
        self.mid_attn = _Attention(WIDTHS[-1], linear=False)
        self.ups = nn.ModuleList(
            nn.ModuleList([_Residual(a + b, b), _Residual(a + b, b), _Attention(b, linear=True), _up(b, a, index)])
            for index, (a, b) in enumerate(reversed(pairs))
        )
        self.final_res_block = _Residual(2 * WIDTHS[0], 32)
        self.final_conv = nn.ConvTranspose2d(32, 1, 1)

    def forward(self, x: Tensor, time: Tensor, noisy: Tensor) -> Tensor:
        """Predict the noise in x (B, 1, H, W) at time (B,) in [0, 1]; noisy: the spectrum to denoise, like x."""
        frequencies = torch.exp(torch.arange(16) * -(math.log(10_000) / 15))
        angles = 999 * time[:, None] * frequencies
        t = self.time_mlp["3"](F.gelu(self.time_mlp["1"](torch.cat([angles.sin(), angles.cos()], -1))))
        first = x = self.init_conv(torch.cat([x, noisy], 1))
        kept = []
        for one, two, attention, down in self.downs:  # pyright: ignore[reportGeneralTypeIssues]
            x = one(x, t)
            kept.append(x)
            x = attention(two(x, t))
            kept.append(x)
            x = down(x)
        x = self.mid_block2(self.mid_attn(self.mid_block1(x, t)), t)
        for one, two, attention, up in self.ups:  # pyright: ignore[reportGeneralTypeIssues]
            x = one(torch.cat([x, kept.pop()], 1), t)
            x = up(attention(two(torch.cat([x, kept.pop()], 1), t)))
        return self.final_conv(self.final_res_block(torch.cat([x, first], 1), t))


class _Residual(nn.Module):
    """Two convolutions around a scale and shift by time, beside the input itself or a Linear of it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"1": nn.Linear(_TIME, 2 * out)})
        self.block1, self.block2 = _convolution(width, out), _convolution(out, out)
        self.res_conv = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale, shift = self.mlp["1"](F.silu(t))[..., None, None].chunk(2, 1)
        h = _standardized(x, self.block1)
        h = _standardized(F.silu(h * (scale + 1) + shift), self.block2)
        return F.silu(h) + self.res_conv(x)


def _convolution(width: int, out: int) -> nn.ModuleDict:
    return nn.ModuleDict({"proj": nn.Conv2d(width, out, 3, padding=1), "norm": nn.GroupNorm(4, out)})


def _standardized(x: Tensor, block: nn.ModuleDict) -> Tensor:
    filters = block["proj"].weight
    variance, mean = torch.var_mean(filters, (1, 2, 3), correction=0, keepdim=True)
    filters = (filters - mean) * (variance + _EPSILON).sqrt()
    return block["norm"](F.conv2d(x, filters, block["proj"].bias, padding=1))


class _Attention(nn.Module):
    """Attention over the pixels beside its input; linear: keys and values are summed up first (Shen et al., 2018)."""

    def __init__(self, width: int, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.norm = nn.GroupNorm(1, width)
        self.to_qkv = nn.Conv2d(width, 3 * _HEADS * _HEAD, 1, bias=False)
        self.to_out = nn.Conv2d(_HEADS * _HEAD, width, 1)
        self.out_norm = nn.GroupNorm(1, width) if linear else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).flatten(2).unflatten(1, (3, _HEADS, _HEAD)).unbind(1)  # (B, heads, d, HW)
        if self.linear:
            context = k.softmax(-1) @ v.transpose(-1, -2)
            y = context.transpose(-1, -2) @ (q.softmax(-2) * _HEAD**-0.5)
        else:
            weights = (q.transpose(-1, -2) @ k * _HEAD**-0.5).softmax(-1)
            y = v @ weights.transpose(-1, -2)
        return x + self.out_norm(self.to_out(y.flatten(1, 2).unflatten(-1, x.shape[-2:])))


def _down(width: int, out: int, index: int) -> nn.Module:
    """Halve height and width, all but the last time."""
    if index == len(WIDTHS) - 2:
        return nn.Conv2d(width, out, 3, padding=1)
    return nn.Sequential(_Gathered(), nn.Conv2d(4 * width, out, 1))


class _Gathered(nn.Module):
    """Four neighbours as one pixel: (B, C, H, W) to (B, 4 C, H / 2, W / 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_unshuffle(x, 2)


def _up(width: int, out: int, index: int) -> nn.Module:
    """Double height and width, all but the last time."""
    if index == len(WIDTHS) - 2:
        return nn.Conv2d(width, out, 3, padding=1)
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(width, out, 3, padding=1))


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the file's tensors by the names of `PowerSpectra`."""
    names = {}
    for name in state:
        new = name.replace("fn.fn.", "").replace("fn.norm.", "norm.")
        linear = "to_out.0." in new or "to_out.1." in new
        names[name] = new.replace("to_out.0.", "to_out.").replace("to_out.1.", "out_norm.") if linear else new
    return {new: state[name] for name, new in names.items()}
