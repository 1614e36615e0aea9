"""Tables of documents that benchmarks write, between marks."""

from __future__ import annotations

from collections.abc import Mapping


def between(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with another text between two marks, or between two places of one mark. begin: a line."""
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"the page has no place for a table: {begin.strip()} … {end.strip()}")
    return f"{before}{begin}{text}\n{end}{after}"


def goals_in_words(met: Mapping[str, bool]) -> list[str]:
    """Return a line for how many goals are met, and one for each that is missed."""
    missed = [f"- missed: {goal}" for goal, is_met in met.items() if not is_met]
    return [f"Of {len(met)} goals that were set before {sum(met.values())} are met{':' if missed else '.'}", *missed]
