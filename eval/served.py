"""What computes the quantized layers of a pipeline in memory, and what its weights take there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fluxq.base.linears import linear_size, linears_of
from fluxq.quantize.linear import QuantLinear


def stored_bits(pipe: Any) -> tuple[float, int]:
    """Return (bits, weights): what a checkpoint stores for all Linears of the quantized components, and how many."""
    bits = weights = 0
    for _, layer in _linears(pipe):
        n, k = linear_size(layer)
        bits += layer.bits_per_weight * n * k if isinstance(layer, QuantLinear) else 16 * n * k
        weights += n * k
    return bits, weights


def quantized_parts(pipe: Any) -> dict[str, nn.Module]:
    """Return the components that hold a quantized layer, by name."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {name: part for name, part in parts.items() if any(isinstance(m, QuantLinear) for m in part.modules())}


def _linears(pipe: Any) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    """(`component.path`, layer) of every Linear of the quantized components."""
    for component, part in quantized_parts(pipe).items():
        for path, layer in linears_of(part).items():
            yield f"{component}.{path}", layer
