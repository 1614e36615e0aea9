"""YAML of strangers is counted before anything is built of it.

A few hundred bytes can stand for gigabytes: an alias of a list of aliases, tables merged into others.
"""

from __future__ import annotations

from typing import Any

import yaml


def require_modest(
    text: str, most: int, deepest: int, *, loader: Any = yaml.SafeLoader, aliases: bool = True, cure: str = ""
) -> None:
    """Raise yaml.MarkedYAMLError for YAML of more than `most` values, or of more than `deepest` in each other.

    Values that aliases stand for count too. aliases: whether anchors and aliases are taken at all. cure: said behind
    "more than `most` values".
    """
    inside: list[tuple[str | None, int]] = []  # anchor of each collection that is open, values before it
    sizes: dict[str, int] = {}  # of what an anchor names
    count, wrong = 0, ""
    for event in yaml.parse(text, Loader=loader):
        anchor = getattr(event, "anchor", None)
        if anchor and not aliases:
            wrong = "anchors and aliases are not allowed; write the value out"
        elif isinstance(event, yaml.CollectionStartEvent):
            inside.append((anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            name, before = inside.pop()
            sizes |= {name: count - before} if name else {}
        elif isinstance(event, yaml.AliasEvent):
            if anchor in [name for name, _ in inside]:
                wrong = f"{str(anchor)[:80]!r} holds itself"
            count += sizes.get(str(anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            sizes |= {anchor: 1} if anchor else {}
        if len(inside) > deepest:
            wrong = f"nested more than {deepest} deep"
        if count > most:
            wrong = f"more than {most} values, with what its aliases stand for{cure}"
        if wrong:
            raise yaml.MarkedYAMLError(problem=wrong, problem_mark=event.start_mark)
