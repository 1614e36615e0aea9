"""Compilation of a checkpoint's kernels before anyone waits for an image: `fluxq warmup OUT`.

Triton compiles a kernel at its first launch and keeps it on disk. Each kind of layer is therefore launched for each
number of tokens, with random weights, in the arithmetic that `dispatch.choose` picks, and so is attention where the
checkpoint has it in fp8: nothing is read but config.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.kernels import encode
from fluxq.kernels.all_ops import ATTENTION_FP8
from fluxq.kernels.dispatch import choose
from fluxq.kernels.launch import quantized_linear
from fluxq.kernels.linear import QuantLinear, branch_shapes
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.computing import attention_by
from fluxq.recipes.formats import Scheme
from fluxq.runtime.attention_choice import codes_on
from fluxq.runtime.layout import lay_out

LARGEST = 5.0  # of an activation; more are rare among normal numbers


@dataclass(frozen=True)
class Machine:
    """Device that computes, chip that layers are laid out for, `prefer` of fluxq.prepare, dtype of activations."""

    device: torch.device
    chip: str
    prefer: str
    dtype: torch.dtype


@dataclass(frozen=True)
class LayerKind:
    """Properties shared by layers that launch the same kernels: scheme, shape (N, K), and whether there is a bias."""

    scheme: Scheme
    n: int
    k: int
    bias: bool

    @classmethod
    def of(cls, layer: QuantLinear) -> LayerKind:
        return cls(layer.scheme, layer.out_features, layer.in_features, layer.bias is not None)


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
            kinds[LayerKind.of(module)] = None
        elif chosen := attention_by(processor):
            attention: Any = module
            kinds[AttentionKind(attention.heads, attention.inner_dim // attention.heads, chosen)] = None
    return list(kinds)


def warm_up(kinds: Iterable[LayerKind | AttentionKind], tokens: Iterable[int], machine: Machine) -> list[Warmed]:
    """Launch every kind of layer at every number of tokens, prepared for the chip as `fluxq.prepare` would.

    Attention that the chip has no kernel for is passed over: it will be computed in 16 bit.
    """
    done, chip, dtype = [], machine.chip, machine.dtype
    for kind in kinds:
        if isinstance(kind, AttentionKind):
            codes, refused = codes_on(kind.attention, kind.head_size, chip)
            if not refused:
                for m in dict.fromkeys(tokens):
                    done += _warm_attention(kind, codes, m, machine)
            continue
        layer = random_layer(kind, machine.device, dtype)
        lay_out(layer, chip, machine.prefer, None)
        for m in dict.fromkeys(tokens):
            x = torch.randn(m, kind.k, dtype=dtype, device=machine.device)
            call = partial(quantized_linear, x, *layer.operands, chip=chip)
            first, again = _seconds(call, machine.device), _seconds(call, machine.device)
            layout = layer.prepared.kind if layer.prepared else ""
            choice = choose(layer.scheme, chip, m, kind.n, kind.k, dtype, layout)
            done.append(Warmed(str(kind.scheme), (kind.n, kind.k), m, choice.implementation, first, again))
    return done


def random_layer(kind: LayerKind, device: torch.device, dtype: torch.dtype) -> QuantLinear:
    """Make a layer with weights as after training and scales that fit them."""
    n, k, scheme = kind.n, kind.k, kind.scheme
    noise = torch.Generator(device).manual_seed(k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, device=device)

    makers: dict[str, Callable[[], Tensor]] = {  # first those of the input, the same for all layers of k inputs
        "pre_quant_mean": lambda: normal(k) / 4,
        "pre_quant_scale": lambda: (normal(k) / 4).exp(),
        "deflate_basis": lambda: torch.linalg.qr(normal(k, scheme.deflate)).Q.T,
        "deflate_out": lambda: normal(n, scheme.deflate) * k**-0.5,
        "svdquant_lora_a": lambda: normal(scheme.rank, k) * k**-0.5,
        "svdquant_lora_b": lambda: normal(n, scheme.rank) / 8,
    }
    wanted = branch_shapes(scheme, n, k)
    branches = {name: make().to(dtype).contiguous() for name, make in makers.items() if name in wanted}
    noise.manual_seed((n << 32) + k)  # weights of one stream would be those of a norm's, which x would be aligned with
    w = QuantizedTensor.quantize(normal(n, k) * k**-0.5, scheme.weights)
    bias = normal(n).to(dtype) if kind.bias else None
    layer = QuantLinear.from_quantized(w, bias, scheme, _input_scale(scheme, device), branches)
    layer.compute_dtype = dtype
    return layer


def _input_scale(scheme: Scheme, device: torch.device) -> Tensor | None:
    if scheme.activations is None or not scheme.static_input:
        return None
    return encode.input_scale_for(torch.tensor(LARGEST, device=device), scheme.activations, scheme.four_over_six)


def _warm_attention(kind: AttentionKind, codes: str, m: int, machine: Machine) -> list[Warmed]:
    """Launch our kernel, and the package that the dispatcher takes in its place, which may be withdrawn later."""
    kernel, device, chip = ATTENTION_FP8.kernel, machine.device, machine.chip
    x = torch.randn(1, m, kind.heads, kind.head_size, dtype=machine.dtype, device=device)
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
