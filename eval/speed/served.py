"""Arithmetic of the quantized layers of a pipeline in memory, and the memory that its weights take there.

One checkpoint is different arithmetic on different chips: `fluxq.prepare` may turn its codes into others, and a GPU
without a product for them multiplies with 16-bit activations. Quality, time and memory of one of these say nothing of
another, so each evaluation and each timing carries what it was taken of, and only equal ones are joined.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fluxq.base.files import sha256_json
from fluxq.eval.images.sides import BACKENDS, NATIVE, quantized_layers
from fluxq.eval.metrics.schema import Served
from fluxq.kernels.linear import QuantLinear, linear_size, linears_of, quant_layers
from fluxq.quantize.structure import attention_of

_MANY_TOKENS = 4096  # of an image of 1024x1024; few tokens may take another kernel


def served(pipe: Any, device: str | torch.device) -> Served | None:
    """Return the arithmetic and memory of a pipeline on a device; None if no layer of it is quantized."""
    layers = quantized_layers(pipe)
    if not layers:
        return None
    descriptions = {name: (str(layer.scheme), _instead(layer, torch.device(device))) for name, layer in layers.items()}
    computed = {name: ", ".join(filter(None, words)) for name, words in descriptions.items()}
    parts = quantized_parts(pipe)
    attention = {name: attention_of(part) for name, part in parts.items()}
    bits = 8 * sum(tensor.nbytes for layer in _linears(pipe) for tensor in _of_weight(layer))
    return Served(
        arithmetic=_arithmetic(layers.values(), torch.device(device)),
        layers=dict(Counter(computed.values())),
        digest=sha256_json([computed, attention]),
        bits_per_weight=bits / sum(math.prod(linear_size(layer)) for layer in _linears(pipe)),
        resident_bytes=model_bytes(parts),
        pipeline_bytes=model_bytes(pipe.components),
        beside=", ".join(dict.fromkeys(map(_beside, layers.values()))).strip(", "),
    )


def stored_bits(pipe: Any) -> tuple[float, int]:
    """Return (bits, weights): what a checkpoint stores for all Linears of the quantized components, and how many."""
    bits = weights = 0
    for layer in _linears(pipe):
        n, k = linear_size(layer)
        bits += layer.bits_per_weight * n * k if isinstance(layer, QuantLinear) else 16 * n * k
        weights += n * k
    return bits, weights


def quantized_parts(pipe: Any) -> dict[str, nn.Module]:
    """Return the components that hold a quantized layer, by name."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {name: part for name, part in parts.items() if quant_layers(part)}


def model_bytes(components: Mapping[str, Any]) -> int:
    """Return the bytes of all parameters and buffers of components, shared ones once."""
    parts = [part for part in components.values() if isinstance(part, nn.Module)]
    tensors = {id(tensor): tensor for part in parts for tensor in (*part.parameters(), *part.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def _instead(layer: QuantLinear, device: torch.device) -> str:
    """Return the format that the device rounds a layer's input to, if it is not its scheme's; else empty."""
    if device.type != "cuda":
        return ""
    rounded = rounded_to(layer, device, _MANY_TOKENS, layer.compute_dtype)
    by_scheme = layer.scheme.activations.name if layer.scheme.activations else None
    return "" if rounded == by_scheme else f"activations in {rounded or '16 bit'}"


def rounded_to(layer: QuantLinear, device: torch.device, tokens: int, dtype: torch.dtype) -> str | None:
    """Return the format of the activations in a GPU's product for a layer; the torch reference has all."""
    if find_spec("triton") is None:  # torch's reference computes
        return layer.scheme.activations.name if layer.scheme.activations else None
    from fluxq.kernels.dispatch import choose
    from fluxq.kernels.tiles import chip_of  # needs Triton

    shape = tokens, layer.out_features, layer.in_features
    layout = layer.prepared.kind if layer.prepared else ""
    return choose(layer.scheme, chip_of(device), *shape, dtype, layout).activations


def _arithmetic(layers: Iterable[QuantLinear], device: torch.device) -> str:
    """Return NATIVE, another key of BACKENDS for what its re-encoding gives, or in words what was done."""
    changes = {layer: _change(layer, device) for layer in layers}
    changed = [layer for layer, words in changes.items() if words]
    if not changed:
        return NATIVE
    if all(layer.prepared is not None and layer.prepared.kind == "re-encoded" for layer in changed):
        formats = {layer.scheme.weights.name for layer in changed}
        for name, targets in BACKENDS.items():
            if targets and formats <= set(targets):
                return name
    return ", ".join(dict.fromkeys(changes[layer] for layer in changed))


def _change(layer: QuantLinear, device: torch.device) -> str:
    """Return how a layer's arithmetic differs from that of its stored codes; empty if it does not."""
    if layer.prepared is not None and layer.scheme != layer.stored_scheme:
        return layer.prepared.how
    return _instead(layer, device)


def _beside(layer: QuantLinear) -> str:
    """Return what `fluxq.prepare` keeps in memory beside a layer's own codes; empty for nothing."""
    return layer.prepared.how if layer.prepared is not None and layer.prepared.kind == "decoded" else ""


def _of_weight(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of a Linear's weight; the bias too where centring makes it part of this (`stored_bits`)."""
    centers = isinstance(layer, QuantLinear) and layer.scheme.center
    for name, tensor in layer.named_parameters(recurse=False):
        if name != "bias" or centers:
            yield tensor


def _linears(pipe: Any) -> list[nn.Module]:
    return [layer for part in quantized_parts(pipe).values() for layer in linears_of(part).values()]
