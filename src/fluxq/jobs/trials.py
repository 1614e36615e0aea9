"""Run plans of number formats on the images that decide, each once, and compare them.

Layers in runs are rounded to nearest. Squared errors are kept in a file: an interrupted search runs no plan twice.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.console import logger, without_cure
from fluxq.base.files import (
    read_sealed_json,
    sha256_json,
    write_sealed_json,
)
from fluxq.calibrate.capture import run_pipeline
from fluxq.calibrate.errors import SIXTEEN_BIT
from fluxq.calibrate.stand_ins import MadeAnew, module_of, replaced, with_weights
from fluxq.eval.debug.patch import improved
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.jobs.search import Search
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.budget import Choice
from fluxq.recipes.formats import Format, Scheme


@dataclass(frozen=True)
class Tried:
    """A plan that ran.

    proposed_by: its measures.
    squares: squared error of each image's final latents.
    signals: squared norm of each image's latents in 16 bit.
    """

    proposed_by: tuple[str, ...]
    choice: Choice
    cost: float
    squares: tuple[float, ...]
    signals: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        """Squared error of each image by the mean signal: their mean is the NMSE of all."""
        mean = math.fsum(self.signals) / len(self.signals)
        return [square / mean for square in self.squares]

    @property
    def error(self) -> float:
        """NMSE of the final latents of all images."""
        return math.fsum(self.squares) / math.fsum(self.signals)

    @property
    def decibels(self) -> float:
        """Mean SQNR of the final latents of images, as the metric `latent_sqnr` has it."""
        pairs = zip(self.signals, self.squares, strict=True)
        return math.fsum(10 * math.log10(z / e) if e > 0 else math.inf for z, e in pairs) / len(self.squares)


class Bench:
    """Runs of plans with a pipeline, each once; squared errors are kept in a file of the work folder."""

    def __init__(self, search: Search, pipe: Any, file: Path) -> None:
        self.search, self.pipe, self.file = search, pipe, file
        self.originals = {name: module_of(pipe, name) for names in search.offer.units.values() for name in names}
        self.tried: list[Tried] = []
        self.kept: dict[str, list[float | None]] = {}
        try:
            self.kept = read_sealed_json(file) if file.is_file() else {}
        except ValueError as error:
            logger.warning("%s: run again", without_cure(error))

    def layers(self, unit: str, option: str) -> dict[str, Any]:
        """Return layer -> itself rounded to nearest in an option."""
        return {name: self._layer(name, scheme) for name, scheme in self.search.offer.schemes({unit: option}).items()}

    def _layer(self, name: str, scheme: Scheme | None) -> Any:
        plain = self.originals[name]
        if scheme is None:
            return plain
        scheme = replace(scheme, static_input=False)
        if self.search.job.run.memory is None:
            return improved(plain, scheme)
        return MadeAnew(plain, lambda: improved(plain, scheme))

    def weight_error(self, unit: str, option: str) -> float:
        """Return the squared error of a unit's weights rounded to nearest in an option."""

        def error(plain: Any, form: Format) -> float:
            weight = plain.weight.detach().flatten(1)
            rounded = QuantizedTensor.quantize(weight, form).dequantize()
            return float((rounded.double() - weight.double()).square().sum())

        schemes, plain = self.search.offer.schemes({unit: option}), self.originals
        return math.fsum(
            with_weights(plain[name], partial(error, plain[name], scheme.weights))
            for name, scheme in schemes.items()
            if scheme is not None
        )

    def run(self, choice: Choice, *proposed_by: str) -> Tried:
        """Return the plan with its errors, run once."""
        key = sha256_json(sorted(choice.items()))
        signals = self._kept("signals", lambda: [float(z.square().sum()) for z in self.reference])
        squares = self._kept(key, lambda: self._squares(choice))
        self.tried.append(Tried(proposed_by, choice, self.search.cost(choice), squares, signals))
        return self.tried[-1]

    def _kept(self, key: str, measured: Callable[[], list[float]]) -> tuple[float, ...]:
        if key not in self.kept:
            self.kept[key] = [value if math.isfinite(value) else None for value in measured()]
            write_sealed_json(self.file, self.kept)
        return tuple(math.inf if value is None else value for value in self.kept[key])

    def _squares(self, choice: Choice) -> list[float]:
        plain = self.reference
        layers = {n: la for u, o in choice.items() if o != SIXTEEN_BIT for n, la in self.layers(u, o).items()}
        with replaced(self.pipe, layers):
            latents = self._latents()
        return [float((q - z).square().sum()) for q, z in zip(latents, plain, strict=True)]

    @cached_property
    def reference(self) -> list[Tensor]:
        """Final latents of the 16-bit pipeline."""
        return self._latents()

    def _latents(self) -> list[Tensor]:
        """Return the final latents of each image, fp64 on the CPU."""
        with torch.no_grad():
            batches = [z.double().cpu() for _, z in run_pipeline(self.pipe, self.search.judging, self.search.job.call)]
        return [image for batch in batches for image in batch]


def better_of(tried: Sequence[Tried]) -> Tried:
    """Return the plan of least error; of those whose difference from it may be 0 (95 %), the cheapest."""
    least = min(tried, key=lambda each: each.error)
    return min(
        (each for each in tried if each is least or _is_level(each, least)), key=lambda each: (each.cost, each.error)
    )


def _is_level(one: Tried, least: Tried) -> bool:
    """Tell whether images leave open which of two plans has less error."""
    differences = [a - b for a, b in zip(one.errors, least.errors, strict=True)]
    return all(map(math.isfinite, differences)) and not paired_interval(differences).low > 0
