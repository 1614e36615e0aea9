"""Layers that make the error of the final latents: quantize one alone, or keep one alone in 16 bit, and run.

    error of a run    = Σ ‖latents - 16-bit latents‖² over a few prompts, with the same noise
    damage of a layer = (error with only this layer quantized - floor) / (error with all of them - floor)
    gain of a layer   = (error with all of them - error with all but this one) / (error with all of them - floor)

The floor is the error of a second 16-bit run: in bfloat16 whatever changes a result at all costs about that much, and
counted once for each layer it would be most of the sum. Errors of single layers at one step say little about the image:
on a small DiT their rank correlation with damage was 0.2. Damages nearly add up; their sum, the additivity ratio, says
how nearly.

A run for each of 500 layers is too much. So blocks come first, each quantized or kept as a whole; then the layers of
the worst blocks, as far as a budget of runs reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fluxq.base.console import progress
from fluxq.calibrate.stand_ins import module_of, replaced
from fluxq.quantize.structure import model_family

Unit = tuple[str, ...]  # layers that are quantized, or kept, together
Run = Callable[[Any], Tensor]


@dataclass
class Damages:
    """Squared errors of the final latents, infinite where they are not finite.

    signal: Σ ‖16-bit latents‖².
    floor: error of a second 16-bit run.
    total: error with all layers quantized.
    only: unit -> error with its layers alone quantized.
    kept: unit -> error with all but its layers quantized.
    """

    signal: float
    floor: float
    total: float
    only: dict[Unit, float] = field(default_factory=dict)
    kept: dict[Unit, float] = field(default_factory=dict)

    @property
    def above_floor(self) -> float:
        """Error that quantization adds, 0 where it cannot be told from the floor."""
        return max(self.total - self.floor, 0.0)

    def damage(self, unit: Unit) -> float | None:
        """Return the share of the error that these layers alone make, at least 0.

        None if it was not measured, and where no error is above the floor. Where the latents of the whole are not
        finite it is 1 for layers that make them so, and 0 for others.
        """
        error = self.only.get(unit)
        if error is None or not self.above_floor:
            return None
        if math.isinf(self.total):
            return float(math.isinf(error))
        return max(error - self.floor, 0.0) / self.above_floor if math.isfinite(error) else None

    def gain(self, unit: Unit) -> float | None:
        """Return the share of the error that goes when these layers stay in 16 bit; None as in `damage`."""
        error = self.kept.get(unit)
        if error is None or not self.above_floor:
            return None
        if math.isinf(self.total):
            return float(math.isfinite(error))
        return (self.total - error) / self.above_floor if math.isfinite(error) else None

    @property
    def finest(self) -> tuple[Unit, ...]:
        """Units that together are all layers, each once: single layers where they were measured, else their block."""
        single = {name for unit in self.only if len(unit) == 1 for name in unit}
        return tuple(unit for unit in self.only if len(unit) == 1 or not single.issuperset(unit))

    @property
    def sum_of_damages(self) -> float:
        """Additivity ratio, the sum over the finest units: 1 where errors neither cancel nor feed on one another."""
        return math.fsum(self.damage(unit) or 0.0 for unit in self.finest)


def measure_damage(
    reference: Any,
    quantized: Any,
    blocks: Mapping[str, Unit],
    run: Run,
    latents: Tensor,
    *,
    floor: float = 0.0,
    device: str | torch.device = "cpu",
    budget: int = 256,
) -> Damages:
    """Measure damage and gain of every block, then of the layers of the worst blocks.

    reference, quantized: pipelines on the CPU; one at a time is on the device, with one block of the other.
    blocks: name -> its quantized layers, "component.path".
    run: function from a pipeline to its final latents (images, …).
    latents: final latents of the 16-bit pipeline.
    floor: `squared_error` of a second 16-bit run.
    budget: largest number of runs, two for each block and for each layer; ValueError if it does not reach for the
        blocks.
    """
    if budget < 2 * len(blocks):
        raise ValueError(f"a budget of {budget} runs is too small for {len(blocks)} blocks: give {2 * len(blocks)}")
    names = [name for unit in blocks.values() for name in unit]
    originals = {name: module_of(reference, name) for name in names}
    quantized_layers = {name: module_of(quantized, name) for name in names}

    def measure(
        errors: dict[Unit, float], units: Collection[Unit], pipe: Any, others: Mapping[str, Any], description: str
    ) -> None:
        for unit in progress(units, description):
            with replaced(pipe, {name: others[name] for name in unit}):
                errors[unit] = squared_error(run(pipe), latents)

    with placed(quantized, device):
        damages = Damages(float(latents.square().sum()), floor, squared_error(run(quantized), latents))
        measure(damages.kept, blocks.values(), quantized, originals, "Keeping blocks in 16 bit")
    with placed(reference, device):
        measure(damages.only, blocks.values(), reference, quantized_layers, "Quantizing single blocks")
    layers = _layers_of_worst(damages, list(blocks.values()), budget - 2 * len(blocks))
    with placed(reference, device):
        measure(damages.only, layers, reference, quantized_layers, "Quantizing single layers")
    with placed(quantized, device):
        measure(damages.kept, layers, quantized, originals, "Keeping layers in 16 bit")
    return damages


def squared_error(latents: Tensor, reference: Tensor) -> float:
    """Return Σ ‖latents - reference‖², infinite where latents are not finite."""
    error = float((latents - reference).square().sum())
    return error if math.isfinite(error) else math.inf


def blocks_of(pipe: Any, names: Sequence[str]) -> dict[str, Unit]:
    """Return block ("component.path") -> those of the layers `names` in it, both in the order of `names`.

    A layer that the family's row does not name is a block of its own.
    """
    blocks: dict[str, list[str]] = {}
    for name in names:
        block = locate(pipe, name)[1]
        blocks.setdefault(block, []).append(name)
    return {block: tuple(members) for block, members in blocks.items()}


def locate(pipe: Any, name: str) -> tuple[str, str, str]:
    """Return (role, block, name of the input group) of a layer "component.path", from its family's row."""
    component, _, path = name.partition(".")
    position = model_family(getattr(pipe, component)).locate(path)
    if position is None:
        return "other", name, name
    group, block = position
    return group.role, f"{component}.{block}", f"{component}.{block}.{group.members[0]}"


@contextmanager
def placed(pipe: Any, device: str | torch.device) -> Iterator[None]:
    """Place a pipeline on a device for a while, and on the CPU again."""
    if torch.device(device).type == "cpu":
        yield
        return
    pipe.to(device)
    try:
        yield
    finally:
        pipe.to("cpu")
        torch.cuda.empty_cache()


def _layers_of_worst(damages: Damages, blocks: Sequence[Unit], budget: int) -> list[Unit]:
    """Return single layers of the worst blocks, two runs each; a block of one layer is measured already."""

    def badness(unit: Unit) -> float:
        return max(damages.damage(unit) or 0.0, damages.gain(unit) or 0.0)

    layers: list[Unit] = []
    for block in sorted(blocks, key=badness, reverse=True):
        if len(block) > 1 and 2 * (len(layers) + len(block)) <= budget:
            layers += [(name,) for name in block]
    return layers
