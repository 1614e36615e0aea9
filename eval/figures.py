"""How reports, cards and terminals write numbers: an estimate, its limits, a size, a duration, a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fluxq.eval.schema import Estimate, Speed, SpeedRow, Speedup, Verdict

NONE = "–"


def figure(estimate: Estimate | None, digits: str, sign: str = "") -> str:
    """The mean, "identical" where all values are infinite, a dash where there is none. sign: "+" for changes."""
    if estimate is None:
        return NONE
    if estimate.mean is None:
        return "identical" if estimate.infinite else NONE
    return plain(estimate.mean, sign + digits)


def limits(estimate: Estimate | None, digits: str, sign: str = "") -> str:
    """The 95 % limits, empty where there are none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"{plain(estimate.low, sign + digits)} to {plain(estimate.high, sign + digits)}"


def both(estimate: Estimate | None, digits: str, sign: str = "") -> str:
    """Mean and limits on one line."""
    between = limits(estimate, digits, sign)
    return figure(estimate, digits, sign) + (f" ({between})" if between else "")


def plain(value: float | None, digits: str) -> str:
    """A number with a real minus sign, a dash for None."""
    return NONE if value is None else format(value, digits).replace("-", "−")


def count(estimates: Sequence[Estimate | None]) -> str:
    """How many values the estimates rest on: "256", "250 to 256" where they differ."""
    found = sorted({each.n + each.infinite for each in estimates if each is not None})
    return "" if not found else str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def amount(number: int, frames: int | None) -> str:
    """How much was made: `8 images`, `4 videos of 25 frames`."""
    if frames is None:
        return f"{number} image{'s' * (number != 1)}"
    return f"{number} video{'s' * (number != 1)} of {frames} frame{'s' * (frames != 1)}"


def shape(row: SpeedRow | Speedup) -> str:
    """What was made at once: batch, height, width, and of videos frames."""
    return " × ".join(str(each) for each in (row.batch, row.height, row.width, row.frames) if each is not None)


def asked(row: SpeedRow | Speedup) -> str:
    """The same in plain letters, the size as `--size` takes it: `1 x 480x832x25`."""
    size = "x".join(str(each) for each in (row.height, row.width, row.frames) if each is not None)
    return f"{row.batch} x {size}"


def sizes(speed: Speed) -> str:
    """What `shape` says of its rows."""
    return "batch × height × width" + " × frames" * any(row.frames is not None for row in speed.rows)


def size(count: float | None) -> str:
    """Bytes in decimal units, as disks and cards are sold."""
    if count is None:
        return NONE
    power = min(int(math.log10(max(count, 1)) / 3), 4)
    return f"{count / 1000**power:.{2 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float | None) -> str:
    """Three significant digits in the unit that suits."""
    if seconds is None:
        return NONE
    if seconds >= 120:
        return f"{int(seconds // 60)} min {round(seconds % 60)} s"
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * s >= 1 or u == "µs")
    value = seconds * scale
    return f"{value:.3g} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def share(value: float | None) -> str:
    """A share in per cent."""
    if value is None:
        return NONE
    return f"{value * 100:{'.3g' if abs(value) < 9.995 else '.0f'}} %".replace("-", "−")


def mark(verdict: Verdict) -> str:
    """The sign of a verdict, and its word where the verdict's own text does not begin with it."""
    sign, word = OUTCOMES[verdict.outcome]
    return sign if verdict.text.lower().startswith(word) else f"{sign} {word.capitalize()}."


# outcome of a verdict -> (sign, word): never told by colour alone
OUTCOMES = {
    "identical": ("=", "identical"),
    "equivalent": ("✓", "equivalent"),
    "worse": ("▼", "worse"),
    "inconclusive": ("?", "inconclusive"),
    "broken": ("✕", "broken"),
}
