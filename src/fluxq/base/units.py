"""Sizes, times and work as people read them: three digits and the unit that needs no zeros around them."""

from __future__ import annotations


def digits(value: float) -> str:
    """Return a number with three digits, without trailing zeros."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """Return bytes in powers of 1000, as in "1.34 MB"."""
    return _scaled(nbytes, 1, _SIZES)


def duration(seconds: float) -> str:
    """Return seconds, as in "694 ns", "1.2 ms", "3 min 5 s" or "2 h 5 min"."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
    return _scaled(seconds, 1e-9, _TIMES)


def work(flops: float) -> str:
    """Return FLOPs, as in "59.5 TFLOP"."""
    return _scaled(flops, 1, _WORK)


def _scaled(value: float, unit: float, names: tuple[str, ...]) -> str:
    """Return a value in the largest of its units, each 1000 times the one before, that keeps it at 1 or more."""
    value /= unit
    for name in names[:-1]:
        if abs(value) < 999.5:
            return f"{digits(value)} {name}"
        value /= 1000
    return f"{digits(value)} {names[-1]}"


_SIZES = ("B", "kB", "MB", "GB", "TB")
_TIMES = ("ns", "µs", "ms", "s")
_WORK = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
