"""Fit of a pipeline on a card, from sizes alone: all parts at once, or each while it runs.

    at once    context + Σ weights + the most activations
    in turns   context + max (weights + activations)          as diffusers' enable_model_cpu_offload does it

Weights are those that a part keeps on that card: where 4 bits are re-encoded to 8 at load they are twice what the
checkpoint has, and where torch decodes them at each call the widest layer comes on top. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fluxq.base import console
from fluxq.recipes.cost import REFERENCE, Prefer, resident_bytes, route
from fluxq.recipes.devices import Device
from fluxq.recipes.plan import LayerPlan

CONTEXT = 0.6e9  # bytes that a GPU's driver and libraries keep
GIB = 1 << 30


@dataclass(frozen=True)
class PartSize:
    """Bytes that a part of a pipeline takes on a card: its weights, and its activations while it runs."""

    name: str
    weights: float
    activations: float = 0.0


@dataclass(frozen=True)
class Holding:
    """Bytes that a pipeline takes of a card.

    room: bytes of the card.
    at_once, in_turns: bytes with all parts on the card, and with one at a time.
    widest: name of the part that needs most in turns.
    """

    room: float
    at_once: float
    in_turns: float
    widest: str

    @property
    def word(self) -> str:
        """Word for the fit: "all" at once, in "turns", or "no"."""
        return "all" if self.at_once <= self.room else "turns" if self.in_turns <= self.room else "no"

    def describe(self) -> dict[str, object]:
        """Return the holding as JSON."""
        return {
            "holds": self.word,
            "memory_gb": self.room / 1e9,
            "at_once_gb": self.at_once / 1e9,
            "in_turns_gb": self.in_turns / 1e9,
            "widest": self.widest,
        }

    def __str__(self) -> str:
        at_once, in_turns, room = map(console.size, (self.at_once, self.in_turns, self.room))
        turns = f"in turns (enable_model_cpu_offload) {in_turns}, for {self.widest}"
        if self.word == "all":
            return f"holds the pipeline at once: {at_once} of {room}; {turns}"
        verb = "holds it in turns" if self.word == "turns" else "does not hold the pipeline"
        return f"{verb}: {turns}; at once it takes {at_once}, the card has {room}"


def holding(parts: Sequence[PartSize], device: Device) -> Holding:
    """Return the bytes that the parts of a pipeline take of a device, at once and in turns."""
    at_once = sum(part.weights for part in parts) + max(part.activations for part in parts)
    widest = max(parts, key=lambda part: part.weights + part.activations)
    in_turns = widest.weights + widest.activations
    return Holding(device.memory * GIB, CONTEXT + at_once, CONTEXT + in_turns, widest.name)


def weights_on(layers: Iterable[LayerPlan], others: float, chip: str, prefer: Prefer = "speed") -> float:
    """Return the bytes that a component keeps on a chip, at most. others: of tensors outside the plan, in 16 bit."""
    layers = list(layers)
    quantized = [layer.n * layer.k for layer in layers if layer.scheme is not None]
    decoded = 2 * 4 * max(quantized, default=0) if chip in REFERENCE else 0  # codes and weight, both in fp32
    return others + decoded + sum(_kept(layer, chip, prefer) for layer in layers)


def _kept(layer: LayerPlan, chip: str, prefer: Prefer) -> float:
    """Return the bytes of a layer, with everything that fitting may add to it."""
    if layer.scheme is None or route(layer.scheme, chip, prefer).is_collapsed:
        return resident_bytes(layer, chip, prefer)
    return layer.most_stored_bits / 8
