"""Patterns over module paths: `*` is one path segment (or part of one), `**` any number of segments.

Anchored at both ends, so `proj_out` is the module at the top and never `single_transformer_blocks.0.proj_out`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


def matches(pattern: str, path: str) -> bool:
    """Tell whether the module path `path` matches `pattern` as a whole."""
    return _compile(pattern).fullmatch("." + path) is not None


def compact(paths: Iterable[str]) -> str:
    """Return module paths as people read them: by their blocks, with * for indices."""
    starred = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", path) for path in paths)
    blocks: dict[str, list[str]] = {}
    for path in starred:
        block, star, rest = path.partition(".*.")
        blocks.setdefault(block if star else "", []).append(rest if star else path)
    return ", ".join(
        ", ".join(rest) if not block else f"{block}.*.{rest[0] if len(rest) == 1 else '{' + ', '.join(rest) + '}'}"
        for block, rest in blocks.items()
    )


def in_every_block(path: str) -> str:
    """Return the pattern of a module's path and of those in its place in other blocks: * for indices."""
    return ".".join("*" if segment.isdigit() else segment for segment in path.split("."))


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    if "" in pattern.split("."):
        raise ValueError(f"pattern {pattern!r} is no module path; write for example 'transformer_blocks.*.attn.to_q'")
    return re.compile("".join(_segment(segment) for segment in pattern.split(".")))


def _segment(segment: str) -> str:
    if segment == "**":
        return r"(?:\.[^.]+)*"
    return r"\." + (r"[^.]+" if segment == "*" else "[^.]*".join(map(re.escape, segment.split("*"))))
