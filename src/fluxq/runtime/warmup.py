"""Compilation of a checkpoint's kernels before anyone waits for an image: `fluxq warmup OUT`.

Triton compiles a kernel at its first launch and keeps it on disk. Each kind of layer is therefore launched for each
number of tokens, with random codes, in the arithmetic that `dispatch.choose` picks, and so is attention where the
checkpoint has it in fp8: nothing is read but config.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fluxq.kernels.all_ops import ATTENTION_FP8
from fluxq.kernels.dispatch import choose
from fluxq.kernels.launch import quantized_linear
from fluxq.kernels.linear import QuantLinear
from fluxq.recipes.computing import attention_by
from fluxq.recipes.formats import Scheme
from fluxq.runtime.attention_choice import codes_on
from fluxq.runtime.layout import lay_out


@dataclass(frozen=True)
class LayerKind:
    """Properties shared by layers that launch the same kernels: scheme, shape (N, K), and whether there is a bias."""

    scheme: Scheme
    n: int
    k: int
    bias: bool


@dataclass(frozen=True)
class AttentionKind:
    """Attention from codes ("fp8" or "int8") of so many heads, each of `head_size` channels."""

    heads: int
    head_size: int
    attention: str = "fp8"


@dataclass(frozen=True)
class Warmed:
    """A kind of layer at m tokens, or of attention, whose shape is (heads, head size).

    first_s, again_s: seconds of its first launch, compiling included, and of a next.
    """

    scheme: str
    shape: tuple[int, int]
    m: int
    implementation: str
    first_s: float
    again_s: float


def kinds_of(model: nn.Module) -> list[LayerKind | AttentionKind]:
    """List the distinct kinds among a model's quantized layers and attention; it may be on the meta device."""
    kinds: dict[LayerKind | AttentionKind, None] = {}
    for module in model.modules():
        processor: Any = getattr(module, "processor", None)
        if isinstance(module, QuantLinear):
            kind = LayerKind(module.scheme, module.out_features, module.in_features, module.bias is not None)
            kinds[kind] = None
        elif chosen := attention_by(processor):
            attention: Any = module
            kinds[AttentionKind(attention.heads, attention.inner_dim // attention.heads, chosen)] = None
    return list(kinds)


def warm_up(
    kinds: Iterable[LayerKind | AttentionKind],
    tokens: Iterable[int],
    device: torch.device,
    chip: str,
    prefer: str,
    dtype: torch.dtype,
) -> list[Warmed]:
    """Launch every kind of layer at every number of tokens, prepared for the chip as `fluxq.prepare` would.

    Attention that the chip has no kernel for is passed over: it will be computed in 16 bit.
    """
    done = []
    for kind in kinds:
        if isinstance(kind, AttentionKind):
            codes, refused = codes_on(kind.attention, kind.head_size, chip)
            if not refused:
                for m in dict.fromkeys(tokens):
                    done += _warm_attention(kind, codes, m, device, chip, dtype)
            continue
        layer = _random_layer(kind, device, dtype)
        lay_out(layer, chip, prefer, None)
        for m in dict.fromkeys(tokens):
            x = torch.randn(m, kind.k, dtype=dtype, device=device)
            call = partial(quantized_linear, x, *layer.operands, chip=chip)
            first, again = _seconds(call, device), _seconds(call, device)
            layout = layer.prepared.kind if layer.prepared else ""
            choice = choose(layer.scheme, chip, m, kind.n, kind.k, dtype, layout)
            done.append(Warmed(str(kind.scheme), (kind.n, kind.k), m, choice.implementation, first, again))
    return done


def _random_layer(kind: LayerKind, device: torch.device, dtype: torch.dtype) -> QuantLinear:
    """Make a layer of random codes, with scales of 1, so that nothing overflows."""
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


def _warm_attention(
    kind: AttentionKind, codes: str, m: int, device: torch.device, chip: str, dtype: torch.dtype
) -> list[Warmed]:
    """Launch our kernel, and the package that the dispatcher takes in its place, which may be withdrawn later."""
    kernel = ATTENTION_FP8.kernel
    x = torch.randn(1, m, kind.heads, kind.head_size, dtype=dtype, device=device)
    call = x, x, x, None, codes
    launches = {ATTENTION_FP8.name: partial(kernel.by_kernel, *call, chip=chip)}
    for name, _ in kernel.cells(*call, chip=chip):
        launches.setdefault(name, partial(kernel.launch, *call, chip=chip))
    shape = kind.heads, kind.head_size
    return [
        Warmed(f"attention {codes}", shape, m, name, _seconds(each, device), _seconds(each, device))
        for name, each in launches.items()
    ]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
