"""Guess what a misspelt name was meant to be, for the end of an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean 'x'?)" for the known name most like `name`, whatever its case; "" if none is.

    cutoff: of difflib, how alike they must be, from 0 to 1.
    """
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def path_near(path: Path) -> str:
    """Return the same for a path that is not there: one of its neighbours."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.name != path.name]  # which is there, but of no use
    except OSError:  # the parent is not there either, or may not be read
        return ""
    return did_you_mean(str(path), (str(path.with_name(name)) for name in names), cutoff=0.8)
