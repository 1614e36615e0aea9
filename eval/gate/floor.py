"""Find out whether a floor has two modes: images of A's second run that are either near A's or far from them.

A kernel that adds up in one of two orders, or takes one of two algorithms, makes one of two pictures. The mean
distance of a few such images says little: the next ones may all be of the far kind. So the two modes are named, and
the farther one is the floor. Images of two kinds, of which A repeats one exactly, look the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

LEAST_SHARE = 0.1  # of images in the smaller mode
LEAST_IMAGES = 2
ENOUGH_IMAGES = 16  # of fewer, one in six normal draws looks like two modes
APART = 5.0  # distance of the modes' means, in standard deviations within


class Modes(NamedTuple):
    """Two modes of distances. better, worse: mean of each. share: of images in the worse one."""

    better: float
    worse: float
    share: float


def modes_of(distances: Sequence[float], at_least: float) -> Modes | None:
    """Return the two modes of distances, None where there is one.

    The cut is that of the least variance within (Otsu 1979). Two modes are those whose means differ by more than
    `at_least` and by APART standard deviations within, each with LEAST_SHARE and LEAST_IMAGES of the images. A normal
    distribution, cut at its mean, has 2.6, an even one 3.5. Below ENOUGH_IMAGES nothing is said.
    """
    ordered = sorted(distances)
    n = len(ordered)
    least = max(LEAST_IMAGES, math.ceil(LEAST_SHARE * n))
    cuts = range(least, n - least + 1)
    if n < ENOUGH_IMAGES:
        return None
    within, cut = min((_within(ordered[:cut]) + _within(ordered[cut:]), cut) for cut in cuts)
    better, worse = fmean(ordered[:cut]), fmean(ordered[cut:])
    deviation = math.sqrt(within / n)
    if worse - better <= max(at_least, APART * deviation):
        return None
    return Modes(better, worse, (n - cut) / n)


def _within(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)
