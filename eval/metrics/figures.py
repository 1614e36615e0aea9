"""Numbers as reports, cards and terminals write them: an estimate, its limits, a size, a duration, a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from fluxq.base import console
from fluxq.eval.metrics.schema import Estimate, Served, Speed, SpeedRow, Speedup, Verdict

NONE = "–"


def figure(estimate: Estimate | None, digits: str, sign: str = "") -> str:
    """Return the mean, "identical" where all values are infinite, a dash where there is none. sign: "+" for changes."""
    if estimate is None:
        return NONE
    if estimate.mean is None:
        return "identical" if estimate.infinite else NONE
    return plain(estimate.mean, sign + digits)


def limits(estimate: Estimate | None, digits: str, sign: str = "") -> str:
    """Return the 95 % limits, empty where there are none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"{plain(estimate.low, sign + digits)} to {plain(estimate.high, sign + digits)}"


def stated(estimate: Estimate | None, digits: str, unit: str = "", sign: str = "") -> str:
    """Return the mean with its unit, and limits, as in a sentence: `38.38 dB (37.90 to 38.90)`."""
    between = limits(estimate, digits, sign)
    return f"{figure(estimate, digits, sign)}{f' {unit}' if unit else ''}" + (f" ({between})" if between else "")


def plain(value: float | None, digits: str) -> str:
    """Return a number with a real minus sign, a dash for None."""
    return NONE if value is None else format(value, digits).replace("-", "−")


def short(name: str) -> str:
    """Return a paired metric's name without its reference, the 16-bit images or videos."""
    return name.removesuffix(" to the 16-bit images").removesuffix(" to the 16-bit videos")


def count(estimates: Sequence[Estimate | None]) -> str:
    """Return the number of values that the estimates rest on: "256", "250 to 256" where they differ."""
    counts = sorted({each.n + each.infinite for each in estimates if each is not None})
    return "" if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def shape(row: SpeedRow | Speedup) -> str:
    """Return the shape of one call: batch, height, width, of videos frames, and a length of the text that was given."""
    size = " × ".join(str(each) for each in (row.batch, row.height, row.width, row.frames) if each is not None)
    return size + _tokens(row)


def plain_shape(row: SpeedRow | Speedup) -> str:
    """Return `shape` in plain letters, the size as `--size` takes it: `1 x 480x832x25`."""
    size = "x".join(str(each) for each in (row.height, row.width, row.frames) if each is not None)
    return f"{row.batch} x {size}{_tokens(row)}"


def _tokens(row: SpeedRow | Speedup) -> str:
    return "" if row.length is None else f", {row.length} tokens"


def sizes(speed: Speed) -> str:
    """Return the heading of a column that holds `shape` of these rows."""
    return "batch × height × width" + " × frames" * any(row.frames is not None for row in speed.rows)


def size(count: float | None) -> str:
    """Return bytes in decimal units, as disks and cards are sold."""
    return NONE if count is None else console.size(count)


def bits(stored: float, resident: float) -> str:
    """Return bits per weight on disk, and in memory where they differ."""
    on_disk, in_memory = f"{stored:.2f}", f"{resident:.2f}"
    return on_disk if on_disk == in_memory else f"{on_disk}, in memory {in_memory}"


def durations(seconds: Sequence[float]) -> str:
    """Return a time, or the least and the greatest of several; empty without any."""
    ends = (min(seconds), max(seconds)) if seconds else ()
    return " to ".join(dict.fromkeys(map(duration, ends)))


def duration(seconds: float | None) -> str:
    """Return a time in three significant digits and the unit that suits."""
    return NONE if seconds is None else console.duration(seconds)


def share(value: float | None) -> str:
    """Return a share in per cent."""
    if value is None:
        return NONE
    return f"{value * 100:{'.3g' if abs(value) < 9.995 else '.0f'}} %".replace("-", "−")


def computed(served: Served | None, backend: str = "native") -> str:
    """Return the arithmetic of a run's layers, in a few words."""
    name = served.arithmetic if served else backend
    text = ARITHMETICS[name][0] if name in ARITHMETICS else name
    return f"{text}, {served.beside}" if served and served.beside else text


def mark(verdict: Verdict) -> str:
    """Return the sign of a verdict, and its word where the verdict's own text does not begin with it."""
    sign, word = OUTCOMES[verdict.outcome]
    return sign if verdict.text.lower().startswith(word) else f"{sign} {word.capitalize()}."


# outcome of a verdict -> (sign, word): never told by colour alone
OUTCOMES = {
    "identical": ("=", "identical"),
    "equivalent": ("✓", "equivalent to 16 bit"),
    "comparable": ("✓", "as good as published"),
    "alike": ("≈", "looks as good as published"),
    "unlike": ("≠", "looks worse than published"),
    "worse": ("▼", "worse"),
    "inconclusive": ("?", "undecided"),
    "broken": ("✕", "broken"),
}

# arithmetic of a run or timing -> what it is, and where `fluxq.prepare` makes it
ARITHMETICS = {
    "native": ("as stored", "the file's own codes are multiplied"),
    "int8": ("re-encoded to int8", "what fluxq.prepare makes of the file on CPUs, and on GPUs that multiply int8 only"),
    "8bit": ("re-encoded to int8 or fp8", "what fluxq.prepare makes of the file on GPUs that multiply int8 and fp8"),
}
