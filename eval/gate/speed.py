"""Decide from pairs of timed calls whether B is slower than A by more than is allowed.

    ratio = median time of B / median time of A

Calls are timed as A B B A A B B A …: a drift that is even in time cancels. The interval is a bootstrap over pairs, so
that what slowed both of a pair slows them in every resample. B is worse where its lower limit is above 1 + SLOWER, and
equivalent where its upper one is not; each limit errs once in 100.

Nothing is said where the times of either side spread by more than SPREAD, where the device lowered its clocks for heat
or a hardware slowdown, or where its clock moved by more than CLOCKS: such a ratio is one of conditions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from fluxq.eval.gate.decide import ALPHA, Verdict
from fluxq.eval.metrics.schema import SPREAD, Strict
from fluxq.eval.speed.machine import POWER_LIMIT

PAIRS = 30
WARMUP = 2  # calls of each side before
SLOWER = 0.01  # share of A's time that B may take more
CLOCKS = 0.02  # range of the clock over its median
LEAST_PAIRS = 10  # of fewer, a limit errs more often than one in 100: of 6 in 40
_RESAMPLES = 2999


@dataclass(frozen=True)
class Call:
    """One timed call. megahertz: clock of the device while it was busy, None where nobody says."""

    seconds: float
    slowdowns: frozenset[str] = frozenset()
    megahertz: float | None = None


class GateSpeed(Strict):
    """Result of timing A and B in turn, in seconds.

    verdict, sentence: what was decided, and on which grounds; "cannot tell" also where it is refused.
    ratio, low, high: of medians, and one-sided limits of it; None where it is refused.
    slower: allowed share. a, b: median times. spread: the greater interquartile range over median.
    megahertz: least and greatest clock; None where nobody says. more_pairs: about how many would decide.
    times: of the calls of A and of B, pair by pair.
    """

    verdict: Verdict
    sentence: str
    slower: float
    pairs: int
    a: float
    b: float
    spread: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    megahertz: tuple[float, float] | None = None
    more_pairs: int | None = None
    times: tuple[tuple[float, float], ...] = ()


def judge_speed(a: Sequence[Call], b: Sequence[Call], slower: float = SLOWER) -> GateSpeed:
    """Judge the calls of both sides, of which the i-th ones are a pair. ValueError for fewer than LEAST_PAIRS."""
    if len(a) != len(b) or len(a) < LEAST_PAIRS:
        raise ValueError(f"{len(a)} and {len(b)} calls: give {LEAST_PAIRS} pairs or more")
    x, y = ([call.seconds for call in side] for side in (a, b))
    spread = max(_spread(x), _spread(y))
    clocks = [call.megahertz for call in (*a, *b) if call.megahertz is not None]
    facts = {
        "slower": slower,
        "pairs": len(a),
        "a": median(x),
        "b": median(y),
        "spread": spread,
        "megahertz": (min(clocks), max(clocks)) if clocks else None,
        "times": tuple(zip(x, y, strict=True)),
    }
    if why := _why_not([*a, *b], spread, clocks):
        return GateSpeed(verdict="cannot tell", sentence=f"speed: not compared, {why}", **facts)
    low, high = _limits(x, y)
    ratio, most = median(y) / median(x), 1 + slower
    verdict = "worse" if low > most else "equivalent" if high <= most else "cannot tell"
    more = _more_pairs(len(a), ratio, low, high, most) if verdict == "cannot tell" else None
    statement = f"speed: B takes {_percent(ratio)} [{_percent(low)}, {_percent(high)}] of time more than A"
    would = f"; about {more} more pairs would tell" if more else ""
    sentence = f"{statement}, {slower:.2%} are allowed{would}"
    return GateSpeed(verdict=verdict, sentence=sentence, ratio=ratio, low=low, high=high, more_pairs=more, **facts)


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.2%}"


def _spread(times: Sequence[float]) -> float:
    low, high = torch.quantile(torch.tensor(times, dtype=torch.float64), torch.tensor([0.25, 0.75]).double()).tolist()
    return (high - low) / median(times)


def _why_not(calls: Sequence[Call], spread: float, clocks: Sequence[float]) -> str:
    """Return the reason why no ratio is given, or ""."""
    if not spread <= SPREAD:
        return f"times spread by {spread:.1%}, over {SPREAD:.0%}: run it on a machine with nothing else to do"
    reasons = sorted(frozenset().union(*(call.slowdowns for call in calls)) - {POWER_LIMIT})
    if reasons:
        return f"the GPU lowered its clocks because of {' and '.join(reasons)}"
    if clocks and max(clocks) - min(clocks) > CLOCKS * median(clocks):
        return (
            f"the clock moved between {min(clocks):.0f} and {max(clocks):.0f} MHz, over {CLOCKS:.0%}: lock it "
            "(nvidia-smi --lock-gpu-clocks)"
        )
    return ""


def _limits(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return one-sided limits of the ratio of medians, each with error ALPHA, pairs resampled."""
    draws = torch.Generator().manual_seed(0)
    index = torch.randint(len(x), (_RESAMPLES, len(x)), generator=draws)
    medians = [torch.tensor(side, dtype=torch.float64)[index].quantile(0.5, dim=1) for side in (x, y)]
    ratios = medians[1] / medians[0]
    low, high = ratios.quantile(torch.tensor([ALPHA, 1 - ALPHA], dtype=torch.float64)).tolist()
    return low, high


def _more_pairs(pairs: int, ratio: float, low: float, high: float, most: float) -> int | None:
    """Return how many more pairs would bring the limit to `most`, where it shrinks with the root of their number."""
    distance, half = abs(ratio - most), (ratio - low if ratio > most else high - ratio)
    return max(1, math.ceil(pairs * ((half / distance) ** 2 - 1))) if distance else None
