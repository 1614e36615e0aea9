"""Fit of a pipeline on a card, from sizes alone: all parts at once, each while it runs, or blocks while they run.

A call goes through its parts in turn, so what it takes is a maximum over them and never a sum:

    peak = context + max over parts (weights on the card while it runs + its activations)

    everything   weights of all parts
    turns        of that part                          as diffusers' enable_model_cpu_offload does it
    blocks       what it has beside blocks, and the largest of them; the VAE stays        (enable_group_offload)
    hoisted      in turns, of the modulation the largest layer and the tables of all steps   (hoist_modulation)
    tiled        the VAE's activations are those of a tile

Weights are those that a part keeps on that card: where 4 bits are re-encoded to 8 at load they are twice what the
checkpoint has, and where torch decodes them at each call the widest layer comes on top. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fluxq.base import console
from fluxq.recipes.cost import REFERENCE, Prefer, resident_bytes, route
from fluxq.recipes.devices import Device
from fluxq.recipes.plan import LayerPlan

CONTEXT = 0.6e9  # bytes that a GPU's driver and libraries keep
GIB = 1 << 30


@dataclass(frozen=True)
class PartSize:
    """Bytes that a part of a pipeline takes on a card: its weights, and its activations while it runs.

    hoisted: of weights, with its modulation kept on the CPU, and of the tables; None where that cannot be done.
    in_blocks: of weights where its blocks take turns, None where they cannot.
    in_tiles: of activations where it decodes in tiles, None where it does not.
    """

    name: str
    weights: float
    activations: float = 0.0
    hoisted: float | None = None
    in_blocks: float | None = None
    in_tiles: float | None = None


@dataclass(frozen=True)
class Way:
    """Way to place a pipeline on a card; `WAYS` has them in order of speed."""

    moves: Literal["everything", "turns", "blocks"]
    hoisted: bool = False
    tiled: bool = False

    @property
    def lines(self) -> tuple[str, ...]:
        """Python that places the pipeline `pipe` so."""
        measures = {"tiled": self.tiled, "hoisted": self.hoisted, self.moves: True}
        return tuple(LINES[name] for name, is_done in measures.items() if is_done)

    def peaks(self, parts: Sequence[PartSize]) -> dict[str, float] | None:
        """Return part -> bytes on the card while it runs; None where no part can be placed so."""
        measures = {"hoisted": self.hoisted, "in_blocks": self.moves == "blocks", "in_tiles": self.tiled}
        for name, is_done in measures.items():
            if is_done and all(getattr(part, name) is None for part in parts):
                return None
        return {part.name: self._weights(part, parts) + self._activations(part) for part in parts}

    def _weights(self, part: PartSize, parts: Sequence[PartSize]) -> float:
        if self.moves == "everything":
            return sum(each.weights for each in parts)
        if self.moves == "turns":
            return part.hoisted if self.hoisted and part.hoisted is not None else part.weights
        staying = sum(each.weights for each in parts if each.name == STAYS)
        if part.name == STAYS:
            return staying
        return staying + (part.weights if part.in_blocks is None else part.in_blocks)

    def _activations(self, part: PartSize) -> float:
        return part.in_tiles if self.tiled and part.in_tiles is not None else part.activations

    @property
    def word(self) -> str:
        """The way in a word or two, for a table."""
        return self.moves + ", hoisted" * self.hoisted + ", tiled" * self.tiled

    def __str__(self) -> str:
        extras = ["modulation on the CPU"] * self.hoisted + ["VAE in tiles"] * self.tiled
        return ", ".join([_MOVES[self.moves], *extras])


def fit(
    parts: Sequence[PartSize], room: float, ways: Sequence[Way] | None = None
) -> tuple[Way, dict[str, float]] | None:
    """Return the fastest way that fits into `room` bytes, and its peaks without the context; None if none does.

    ways: to choose from, the fastest first; by default all.
    """
    tried = ((way, way.peaks(parts)) for way in ways or WAYS)
    return next(((way, peaks) for way, peaks in tried if peaks and CONTEXT + max(peaks.values()) <= room), None)


def least(parts: Sequence[PartSize], ways: Sequence[Way] | None = None) -> float:
    """Return the bytes of the smallest card that a way fits into. ways: to choose from, by default all."""
    return CONTEXT + min(max(peaks.values()) for peaks in (way.peaks(parts) for way in ways or WAYS) if peaks)


def in_words(nbytes: float) -> str:
    """Return a card's memory as `vram` takes it, rounded up to a megabyte: "601MB"."""
    return f"{math.ceil(nbytes / 1e6)}MB"


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
    at_once, in_turns = (Way(moves).peaks(parts) or {} for moves in ("everything", "turns"))
    widest = max(in_turns, key=lambda name: in_turns[name])
    return Holding(device.memory * GIB, CONTEXT + max(at_once.values()), CONTEXT + in_turns[widest], widest)


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


STAYS = "vae"  # the part that stays where blocks take turns: diffusers moves blocks at `forward`, and it decodes

WAYS = (
    Way("everything"),
    Way("turns"),
    Way("turns", hoisted=True),
    Way("turns", tiled=True),
    Way("turns", hoisted=True, tiled=True),
    Way("blocks"),
    Way("blocks", tiled=True),
)
# Weights move once for an image, and at every step.
ONCE, EVERY_STEP = ([way for way in WAYS if (way.moves == "blocks") is moves] for moves in (False, True))
_MOVES = {
    "everything": "everything on the GPU",
    "turns": "each component in its turn",
    "blocks": "blocks of the denoiser in turns",
}
LINES = {
    "everything": 'pipe.to("cuda")',
    "turns": "pipe.enable_model_cpu_offload()",
    "blocks": (
        'pipe.enable_group_offload("cuda", offload_type="block_level", num_blocks_per_group=1, exclude_modules="vae")'
    ),
    "hoisted": "fluxq.hoist_modulation(pipe, offload=True)",
    "tiled": "pipe.vae.enable_tiling()",
}
