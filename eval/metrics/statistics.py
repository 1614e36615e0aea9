"""Intervals and decisions: conclusions from a handful of images about all of them.

Images of one prompt are alike, so prompts are resampled, and the images of a prompt, which differ in their seeds, go
with it (the cluster bootstrap). The mean is over images: with prompts j, sums S_j and counts n_j it is
sum S_j / sum n_j. A recipe is good enough where it is equivalent: its interval lies within a margin.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

Outcome = Literal["equivalent", "worse", "inconclusive"]

_LEVEL, _ALPHA = 0.95, 0.05
_RESAMPLES = 9999
_BATCH_VALUES = 1 << 18  # values of a resampling that stay in cache


@dataclass(frozen=True)
class Interval:
    """A mean over `n` values and its confidence limits, of 95 % where nothing else is said.

    infinite: how many more values were infinite (identical images) and are left out of the mean. The mean
    is infinite if all were, and NaN if there were none or if any was NaN, so that a comparison `mean >=
    gate` fails for broken images. low and high are NaN where the values say nothing about them (fewer than
    two prompts).
    """

    mean: float
    low: float
    high: float
    n: int
    infinite: int = 0


@dataclass(frozen=True)
class Decision:
    """Decision on whether a mean lies within its margin. interval: the deciding one, of confidence `level`.

    more_images: about how many would decide; None where it is decided, or where no number can be given.
    """

    outcome: Outcome
    interval: Interval
    level: float
    more_images: int | None = None


def clustered_interval(
    values: Sequence[float],
    prompts: Sequence[Hashable],
    resamples: int = _RESAMPLES,
    seed: int = 0,
    level: float = _LEVEL,
) -> Interval:
    """Return the mean of per-image values and its BCa bootstrap interval (Efron 1987), resampling whole prompts.

    prompts: the prompt of each value, in any order and with any number of images each. For a comparison pass
    per-image differences: pairing is what makes the interval narrow. Raises ValueError if the two differ in length.
    """
    if not values or any(math.isnan(value) for value in values):
        return Interval(math.nan, math.nan, math.nan, n=0)
    sums, counts = _by_prompt(values, prompts)
    n = int(sum(counts))
    infinite = len(values) - n
    if not n:
        return Interval(values[0], math.nan, math.nan, n=0, infinite=infinite)
    kept = [value for value in values if math.isfinite(value)]
    mean = math.fsum(kept) / n
    if len(sums) == 1:
        return Interval(mean, math.nan, math.nan, n, infinite)
    if min(kept) == max(kept):
        return Interval(mean, mean, mean, n, infinite)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BCa warns where its correction is undefined; the percentile one then serves
        result = _bootstrap(sums, counts, resamples, seed, method="BCa", confidence_level=level)
        if math.isnan(result.confidence_interval.low) or math.isnan(result.confidence_interval.high):
            result = _bootstrap(sums, counts, resamples, seed, method="percentile", confidence_level=level)
    low, high = result.confidence_interval
    return Interval(mean, float(low), float(high), n, infinite)


def paired_interval(values: Sequence[float], resamples: int = _RESAMPLES) -> Interval:
    """Return `clustered_interval` for one image of each prompt."""
    return clustered_interval(values, range(len(values)), resamples)


def p_value(differences: Sequence[float], prompts: Sequence[Hashable]) -> float:
    """Return the two-sided p of the hypothesis that paired per-image differences have mean 0.

    The bootstrap distribution of the mean, prompts resampled with their images, is shifted to 0; p is the share of it
    that lies at least as far out as the mean, both in their own standard errors, without which few prompts would differ
    too often by chance (Davison & Hinkley 1997, §4.4). It is never below 1 / 10,000. Infinite differences are left out.
    NaN if any is NaN or fewer than two prompts remain.
    """
    sums, counts = _by_prompt(differences, prompts)
    if any(math.isnan(value) for value in differences) or len(sums) < 2:
        return math.nan
    mean, error = _ratio_and_error(np.array(sums), np.array(counts), axis=-1)
    if error <= 1e-12 * abs(mean):  # all alike, but for rounding
        return 1 / (1 + _RESAMPLES) if mean else 1.0
    resampled = _bootstrap(sums, counts, _RESAMPLES, statistic=_ratio_and_error, method="percentile")
    means, errors = resampled.bootstrap_distribution
    as_far = int((abs(means - mean) * error >= abs(mean) * errors).sum())
    return (1 + as_far) / (1 + _RESAMPLES)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, in the order given (Holm 1979): below alpha is significant at alpha.

    Holds for tests that depend on each other, as those of recipes on the same images do. ValueError for NaN.
    """
    if any(math.isnan(p) for p in p_values):
        raise ValueError("Holm's correction needs every p-value; NaN is none: leave that comparison out")
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for done, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - done) * p_values[index]))
        corrected[index] = largest
    return corrected


def decide(
    cases: Sequence[tuple[Sequence[float], float, float]], prompts: Sequence[Hashable], resamples: int = _RESAMPLES
) -> list[Decision]:
    """Decide which means lie within their margins; a wrong decision among all has probability alpha = 5 % at most.

    cases: values per image, and the margin's ends, low and high.

    Each of the k cases has two hypotheses that can be rejected, that its mean is outside and that it is within, and a
    one-sided test of half the interval's error does it. Holm's procedure over these 2k: intervals of level
    1 - 2 alpha / 2k first; once r cases are decided, the rest is looked at again with 1 - 2 alpha / (2k - r), until no
    further one is. A single case gets its 95 % interval. An interval holds for every threshold at once, so what else
    is asked of the same mean costs nothing more.
    """
    decisions: dict[int, Decision] = {}
    while True:
        decided = sum(decision.outcome != "inconclusive" for decision in decisions.values())
        level = 1 - 2 * _ALPHA / (2 * len(cases) - decided) if cases else _LEVEL
        before = decided
        for index, (values, low, high) in enumerate(cases):
            if index not in decisions or decisions[index].outcome == "inconclusive":
                interval = clustered_interval(values, prompts, resamples, level=level)
                outcome = equivalence(interval, low, high)
                is_open = outcome == "inconclusive"
                more = more_images(values, prompts, low, high, level) if is_open else None
                decisions[index] = Decision(outcome, interval, level, more)
                decided += not is_open
        if decided in (before, len(cases)):
            return [decisions[index] for index in range(len(cases))]


def equivalence(interval: Interval, low: float = -math.inf, high: float = math.inf) -> Outcome:
    """Return "equivalent" where the interval lies within the margin [low, high], "worse" where wholly outside.

    A 95 % interval within the margin is two one-sided tests (TOST, Schuirmann 1987) at 2.5 % each. That is stricter
    than the usual 5 %, which a 90 % interval would be; in return the one interval that is shown decides both ways.
    "inconclusive" otherwise, and where there are no limits. ValueError for a margin without room.
    """
    if not low < high:
        raise ValueError(f"a margin goes from a lower to a higher value, got [{low}, {high}]")
    if low <= interval.low and interval.high <= high:
        return "equivalent"
    if interval.high < low or interval.low > high:
        return "worse"
    return "inconclusive"


def more_images(
    values: Sequence[float],
    prompts: Sequence[Hashable],
    low: float = -math.inf,
    high: float = math.inf,
    level: float = _LEVEL,
) -> int | None:
    """Estimate how many more images, of new prompts with as many seeds each, would let `equivalence` decide.

    If mean and spread of the prompts stay as they are, N images give a half width that falls with 1 / sqrt(N); at the
    N that is needed it equals the distance from the mean to the nearest end of the margin. None where the mean lies on
    that end, or where fewer than two prompts tell a spread.
    """
    sums, counts = _by_prompt(values, prompts)
    if any(math.isnan(value) for value in values) or len(sums) < 2:
        return None
    n = sum(counts)
    mean = sum(sums) / n
    distance = min(abs(mean - low), abs(mean - high))
    if distance == 0:
        return None
    half_width = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(_variance(sums, counts))
    return max(1, math.ceil(n * ((half_width / distance) ** 2 - 1)))


def t_limits(values: Sequence[float], prompts: Sequence[Hashable], alpha: float) -> tuple[float, float]:
    """Return a lower and an upper limit of the mean, each one-sided with error `alpha`, by t over prompts.

    At a small alpha a bootstrap of a few values has no tail; t does. The limits are the mean where all prompts have
    the same one, and infinite for fewer than two prompts. ValueError for values that are not finite.
    """
    from scipy.stats import t

    if not all(map(math.isfinite, values)):
        raise ValueError("limits of a mean are of finite values")
    sums, counts = _by_prompt(values, prompts)
    mean = math.fsum(sums) / math.fsum(counts)
    if len(sums) < 2:
        return -math.inf, math.inf
    half_width = float(t.isf(alpha, len(sums) - 1)) * math.sqrt(_variance(sums, counts))
    return mean - half_width, mean + half_width


def _variance(sums: Sequence[float], counts: Sequence[float]) -> float:
    """Return the variance of the mean over two or more prompts."""
    n = math.fsum(counts)
    mean = math.fsum(sums) / n
    residuals = [total - mean * count for total, count in zip(sums, counts, strict=True)]
    return len(sums) / (len(sums) - 1) * math.fsum(value**2 for value in residuals) / n**2


def _by_prompt(values: Sequence[float], prompts: Sequence[Hashable]) -> tuple[list[float], list[float]]:
    """Return sum and number of the finite values of each prompt that has any, in order of first appearance."""
    groups: dict[Hashable, list[float]] = {}
    for value, prompt in zip(values, prompts, strict=True):
        if math.isfinite(value):
            groups.setdefault(prompt, []).append(value)
    return [math.fsum(group) for group in groups.values()], [float(len(group)) for group in groups.values()]


def _ratio(sums, counts, axis: int):
    return sums.sum(axis=axis) / counts.sum(axis=axis)


def _ratio_and_error(sums, counts, axis: int):
    """Return the ratio, and its standard error but for a factor that the number of prompts alone decides."""
    n, ratio = counts.sum(axis=axis), _ratio(sums, counts, axis)
    residuals = sums - np.expand_dims(ratio, axis) * counts
    return np.stack([ratio, np.sqrt(np.square(residuals).sum(axis=axis)) / n])


def _bootstrap(
    sums: list[float], counts: list[float], resamples: int, seed: int = 0, statistic: Any = _ratio, **how: Any
) -> Any:
    from scipy.stats import bootstrap

    batch = max(1, _BATCH_VALUES // len(sums))
    return bootstrap((sums, counts), statistic, paired=True, n_resamples=resamples, batch=batch, rng=seed, **how)
