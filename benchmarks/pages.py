"""Tables of documents that benchmarks write, between marks."""

from __future__ import annotations


def between(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with another text between two marks, or between two places of one mark. begin: a line."""
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"the page has no place for a table: {begin.strip()} … {end.strip()}")
    return f"{before}{begin}{text}\n{end}{after}"
