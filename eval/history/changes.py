"""Find changes of level in a series of numbers: binary segmentation of means (Scott & Knott 1974).

The cut that takes most off the squared error, in units of the noise, is kept where that is more than PENALTY · ln n,
and both parts are cut on. The noise is taken from differences of neighbours, which a step hardly touches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

PENALTY = 4.0
LEAST = 3  # values on each side of a cut
_NORMAL = 0.6745 * math.sqrt(2)  # median of |difference| of two normal values, in standard deviations of one
_ROUNDING = 1e-3  # of the greatest value: below it nothing is a change


def change_points(values: Sequence[float]) -> list[int]:
    """Return the index of the first value of each new level, in order. values: finite."""
    if len(values) < 2 * LEAST:
        return []
    steps = [abs(after - before) for before, after in pairwise(values)]
    noise = max(median(steps) / _NORMAL, _ROUNDING * max(map(abs, values)))
    return sorted(_cuts(values, 0, PENALTY * math.log(len(values)) * noise**2)) if noise else []


def _cuts(values: Sequence[float], start: int, penalty: float) -> Iterator[int]:
    gains = [(_gain(values, cut), cut) for cut in range(LEAST, len(values) - LEAST + 1)]
    gain, cut = max(gains, default=(0.0, 0))
    if gain > penalty:
        yield start + cut
        yield from _cuts(values[:cut], start, penalty)
        yield from _cuts(values[cut:], start + cut, penalty)


def _gain(values: Sequence[float], cut: int) -> float:
    """Return by how much two means have less squared error than one."""
    left, right = values[:cut], values[cut:]
    return len(left) * len(right) / len(values) * (fmean(left) - fmean(right)) ** 2
