"""Compiles what a checkpoint will launch, before anyone waits for an image: `fluxq warmup OUT`.

Triton compiles a kernel at its first launch and keeps it on disk. Each kind of layer is therefore launched for each
number of tokens, with random codes, in the arithmetic that `dispatch.choose` picks: nothing is read but config.json.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fluxq.kernels import launch
from fluxq.kernels.dispatch import choose, prepare
from fluxq.quantize.linear import QuantLinear
from fluxq.recipes.formats import Scheme


@dataclass(frozen=True)
class LayerKind:
    """What layers must share to launch the same kernels: scheme, shape (N, K), and whether there is a bias."""

    scheme: Scheme
    n: int
    k: int
    bias: bool


@dataclass(frozen=True)
class Warmed:
    """A kind of layer at m tokens. first_s, again_s: seconds of its first launch, compiling included, and of a next."""

    scheme: str
    shape: tuple[int, int]
    m: int
    implementation: str
    first_s: float
    again_s: float


def kinds_of(model: nn.Module) -> list[LayerKind]:
    """The distinct kinds among a model's quantized layers; it may be on the meta device."""
    layers = (module for module in model.modules() if isinstance(module, QuantLinear))
    kinds = (LayerKind(m.scheme, m.out_features, m.in_features, m.bias is not None) for m in layers)
    return list(dict.fromkeys(kinds))


def warm_up(
    kinds: Iterable[LayerKind], tokens: Iterable[int], device: torch.device, chip: str, prefer: str, dtype: torch.dtype
) -> list[Warmed]:
    """Launch every kind of layer at every number of tokens, prepared for the chip as `fluxq.prepare` would."""
    done = []
    for kind in kinds:
        layer = _random_layer(kind, device, dtype)
        prepare(layer, chip, prefer, None)
        for m in dict.fromkeys(tokens):
            x = torch.randn(m, kind.k, dtype=dtype, device=device)
            first, again = _seconds(layer, x, chip), _seconds(layer, x, chip)
            row_scale = "weight_row_scale" in layer.scale_names
            choice = choose(layer.scheme, chip, m, kind.n, kind.k, dtype, row_scale)
            done.append(Warmed(str(kind.scheme), (kind.n, kind.k), m, choice.implementation, first, again))
    return done


def _random_layer(kind: LayerKind, device: torch.device, dtype: torch.dtype) -> QuantLinear:
    """Codes of random bits; scales of 1, so that nothing overflows."""
    with torch.device(device):
        layer = QuantLinear(kind.k, kind.n, kind.bias, kind.scheme, dtype)
    with torch.no_grad():
        for name, tensor in layer.named_parameters():
            if name == "weight":
                tensor.view(torch.uint8).random_(0, 64)  # no NaN of any format
            elif tensor.dtype == torch.uint8:  # E8M0
                tensor.fill_(127)
            else:
                tensor.fill_(1.0)
    return layer


def _seconds(layer: QuantLinear, x: torch.Tensor, chip: str) -> float:
    start = time.perf_counter()
    launch.quantized_linear(x, *layer.operands, chip=chip)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
