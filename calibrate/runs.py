"""Runs of a pipeline, and what they did to the final latents of its images.

error = Σ ‖latents of the run − of the reference‖² / Σ ‖latents of the reference‖²
SQNR of an image = 10 · log10(‖latents of the reference‖² / ‖latents of the run − of the reference‖²)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from fluxq.base.console import logger, without_cure
from fluxq.base.files import read_sealed_json, write_sealed_json


class Judged:
    """Errors of a run in the images that judge it.

    squares: squared error of each image's final latents. signals: squared norm of each image's, of the reference.
    """

    squares: Sequence[float]
    signals: Sequence[float]

    @property
    def error(self) -> float:
        """NMSE of the final latents of all images."""
        return math.fsum(self.squares) / math.fsum(self.signals)

    @property
    def ratios(self) -> list[float]:
        """SQNR of the final latents of each image in dB."""
        return [_decibels(z, e) for z, e in zip(self.signals, self.squares, strict=True)]

    @property
    def decibels(self) -> float:
        """Mean SQNR of the final latents of images, as the metric `latent_sqnr` has it."""
        return mean_of(self.ratios)


class KeptRuns:
    """Numbers of each image of runs, each measured once; what is not finite counts as infinite.

    file: where they are kept for interrupted work to go on with, None for nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.kept: dict[str, list[float | None]] = {}
        try:
            self.kept = read_sealed_json(file) if file and file.is_file() else {}
        except ValueError as error:
            logger.warning("%s: run again", without_cure(error))

    def once(self, key: str, measured: Callable[[], list[float]]) -> list[float]:
        """Return the numbers of a run, measured if they are not kept."""
        if key not in self.kept:
            self.kept[key] = [value if math.isfinite(value) else None for value in measured()]
            if self.file is not None:
                write_sealed_json(self.file, self.kept)
        return [math.inf if value is None else value for value in self.kept[key]]


def squares_of(latents: Iterable[Tensor], reference: Iterable[Tensor] | None = None) -> list[float]:
    """Return the squared norm of each image's latents, or of their difference to those of a reference."""
    if reference is not None:
        latents = (x - z for x, z in zip(latents, reference, strict=True))
    return [float(each.square().sum()) for each in latents]


def mean_of(decibels: Sequence[float]) -> float:
    """Return the mean of some dB, of which some may be infinite."""
    return -math.inf if -math.inf in decibels else math.fsum(decibels) / len(decibels)


def _decibels(signal: float, square: float) -> float:
    if square == 0:
        return math.inf
    return 10 * math.log10(signal / square) if square < math.inf else -math.inf
