"""Decide from paired distances whether B is as near to A as A is to itself.

    d      distance of two images in a metric's unit: 0 where they are the same, see `Rule.distance`
    x_i    d(A, B)_i - d(A, A2)_i     of image i; A2 is another run of A, the floor
    limit  max(margin, c · mean d(A, A2))

B is worse where the mean of x is above the limit, and equivalent where it is below. Both are said only where a
one-sided t interval, over prompts, lies on that side: that of the mean of x, or, where the limit is c · mean d(A, A2),
that of the mean of x_i - c · d(A, A2)_i, which has the scatter of the limit too.

"Worse" may be said after 8, 16, 32, … images. Each look spends a part of ALPHA, spent(t) = alpha · ln(1 + (e - 1) t)
at the share t of all images (Lan & DeMets 1983, in the shape of Pocock's boundary); it is divided among the metrics,
and the parts add up, so that ALPHA bounds the rate of false alarms over all looks and metrics. A gross fault is
found by the first look. "Equivalent" is said by the last look alone, and not where an image of B is an outlier, far
beyond all of the floor's: a mean hides one broken image of many.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fluxq.eval.gate.floor import ENOUGH_IMAGES, Modes, modes_of
from fluxq.eval.metrics.statistics import more_images, t_limits

Verdict = Literal["equivalent", "worse", "cannot tell"]

ALPHA = 0.01  # rate of "worse" where nothing is, over all looks; and of "equivalent" at the limit
FIRST_LOOK = 8
OUTLIER = 5.0  # margins beyond the floor's farthest image, and three times as far as that: where an image is one


@dataclass(frozen=True)
class Rule:
    """Bounds on the distance from A in one metric.

    same: value from which on two images are the same; of a metric of which more is better, the distance is counted from
    it downwards, else from it upwards.
    margin: distance beyond the floor's that is always allowed, in the metric's unit.
    c: distance beyond the floor's that is allowed, as a share of the floor's.
    """

    better: Literal["higher", "lower"]
    same: float
    margin: float
    c: float

    def distance(self, value: float) -> float:
        """Return the distance of two images that a metric's value stands for; NaN for NaN."""
        beyond = self.same - value if self.better == "higher" else value - self.same
        return beyond if math.isnan(beyond) else max(0.0, beyond)


@dataclass(frozen=True)
class Finding:
    """Result of one metric at one look.

    images: number that were looked at.
    difference, low, high: mean of x, in the metric's unit, and one-sided limits of it, beyond `limit` of what is beyond
        it.
    limit: of the mean.
    floor, distance: mean d(A, A2), of the worse mode where there are two, and mean d(A, B).
    modes: of the floor, None for one.
    more_images: about how many more would decide; None where it is decided, or where no number can be given.
    outliers: images, by their index, that are far beyond all of the floor's.
    """

    verdict: Verdict
    images: int
    difference: float
    low: float
    high: float
    limit: float
    floor: float
    distance: float
    modes: Modes | None = None
    more_images: int | None = None
    outliers: tuple[int, ...] = ()


def looks_of(images: int) -> tuple[int, ...]:
    """Return the numbers of images after which to look: 8, 16, 32, … and all."""
    looks, count = [], FIRST_LOOK
    while count < images:
        looks.append(count)
        count *= 2
    return (*looks, images)


def spent_at(look: int, looks: Sequence[int]) -> float:
    """Return the part of ALPHA that a look spends. look: one of `looks`, in images."""
    index = looks.index(look)
    before = looks[index - 1] if index else 0
    return _spent(look / looks[-1]) - _spent(before / looks[-1])


def _spent(share: float) -> float:
    return ALPHA * math.log(1 + (math.e - 1) * share)


def judge(
    rule: Rule,
    values: Sequence[float],
    floor: Sequence[float] | None,
    prompts: Sequence[Hashable],
    looks: Sequence[int],
    metrics: int = 1,
) -> Finding:
    """Judge one metric at the look that has as many images as there are values.

    values, floor: of the metric, per image; None for a floor that was not measured, where A counts as the same as
    itself. prompts: of the images. looks: of `looks_of`. metrics: number that share ALPHA.

    An image that is not finite, a NaN in `values`, makes B worse. Raises ValueError for a NaN in `floor`.
    """
    distances = [rule.distance(value) for value in values]
    floor_distances = [0.0] * len(values) if floor is None else [rule.distance(value) for value in floor]
    if any(map(math.isnan, floor_distances)):
        raise ValueError("the floor has an image that is not finite: nothing can be compared with it")
    beyond_all = max(3 * max(floor_distances), max(floor_distances) + OUTLIER * rule.margin)
    outliers = tuple(index for index, value in enumerate(distances) if value > beyond_all)
    modes = modes_of(floor_distances, at_least=rule.margin)
    if modes is not None:
        floor_distances = [max(value, modes.worse) for value in floor_distances]
    floor_mean = fmean(floor_distances)
    share = rule.c if rule.c * floor_mean > rule.margin else 0.0
    counted = share * floor_mean  # of the limit, in what is taken off each distance
    limit = counted or rule.margin
    allowed = limit - counted
    if any(map(math.isnan, distances)):
        nan = math.nan
        return Finding("worse", len(values), nan, nan, nan, limit, floor_mean, nan, modes)
    beyond, unlucky = (
        [distance - (1 + share) * value for distance, value in zip(distances, each, strict=True)]
        for each in (floor_distances, _farthest(floor_distances, rule))
    )
    is_last = len(values) == looks[-1]
    alpha = spent_at(len(values), looks) / metrics
    low, high = t_limits(beyond, prompts, alpha)[0], t_limits(beyond, prompts, ALPHA)[1]
    is_worse = low > allowed and t_limits(unlucky, prompts, alpha)[0] > allowed
    is_equivalent = is_last and high <= allowed and not outliers
    verdict = "worse" if is_worse else "equivalent" if is_equivalent else "cannot tell"
    mean, more = fmean(beyond), None
    if verdict == "cannot tell" and high > allowed:
        level = 1 - 2 * (ALPHA if mean <= allowed else alpha)
        more = more_images(beyond, prompts, high=allowed, level=level)
    numbers = (mean + counted, low + counted, high + counted, limit, floor_mean, fmean(distances))
    return Finding(verdict, len(values), *numbers, modes, more, outliers)


def _farthest(floors: Sequence[float], rule: Rule) -> Sequence[float]:
    """Return the floor of each image, the farthest of all where so few images do not show whether it has two modes."""
    farthest = max(floors)
    return [farthest] * len(floors) if len(floors) < ENOUGH_IMAGES and farthest - min(floors) > rule.margin else floors


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on several metrics, and on speed: worse where one is, equivalent where all are."""
    return max(verdicts, key=("equivalent", "cannot tell", "worse").index)


# Metric -> its rule. Margins: docs/gate.md says where they come from.
RULES: dict[str, Rule] = {
    "latent_sqnr": Rule("higher", same=90.0, margin=3.0, c=0.06),
    "psnr": Rule("higher", same=60.0, margin=3.0, c=0.15),
    "ssim": Rule("higher", same=1.0, margin=0.005, c=0.25),
    "lpips": Rule("lower", same=0.0, margin=0.005, c=0.25),
    "feature_distance": Rule("lower", same=0.0, margin=0.01, c=0.25),
    "latent_cosine": Rule("higher", same=1.0, margin=0.001, c=0.25),
}
