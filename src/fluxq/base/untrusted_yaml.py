"""YAML that others wrote: recipes, prompts, and the front matter of model cards, of which only the licence is used.

Its values are counted before anything is built of them: a few hundred bytes can stand for gigabytes, by an alias of a
list of aliases, or tables merged into others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fluxq.base.console import first_line, logger, visible_name

_LONGEST_CARD = 1 << 18  # bytes of a card that are read; with hundreds of results its front matter has some thousand
_MOST_VALUES = 20_000  # of the front matter, aliases expanded
_DEEPEST = 20  # lists and tables in each other; a model-index has seven
_LONGEST_VALUE = 300  # characters of a licence, its name or its address
_BETWEEN = re.compile(r"---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*$", re.DOTALL | re.MULTILINE)
_FIELDS = ("license", "license_name", "license_link")


def require_modest(
    text: str, most: int, deepest: int, *, loader: Any = yaml.SafeLoader, aliases: bool = True, cure: str = ""
) -> None:
    """Raise yaml.MarkedYAMLError for YAML of more than `most` values, or of more than `deepest` in each other.

    Values that aliases stand for count too.

    aliases: whether anchors and aliases are allowed at all.
    cure: words behind "more than `most` values".
    """
    inside: list[tuple[str | None, int]] = []  # anchor of each collection that is open, values before it
    sizes: dict[str, int] = {}  # anchor -> number of its values
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


def license_of(card: Path) -> dict[str, str]:
    """Read `license`, `license_name` and `license_link` of a card, where present; warn if it cannot be read."""
    if not card.is_file():
        return {}
    try:
        with card.open("rb") as stream:
            data = front_matter(stream.read(_LONGEST_CARD).decode("utf-8", "replace"))
        fields = {field: _text(field, data[field]) for field in _FIELDS if data.get(field)}
    except ValueError as error:
        logger.warning("%s: front matter cannot be read (%s); the licence is not carried over", card, error)
        return {}
    for field in [field for field, text in fields.items() if len(text) > _LONGEST_VALUE]:
        logger.warning("%s: %s has %d characters; cut to %d", card, field, len(fields[field]), _LONGEST_VALUE)
        fields[field] = fields[field][: _LONGEST_VALUE - 1] + "…"
    return fields


def front_matter(text: str) -> dict[str, Any]:
    """Read the table that a card begins with; empty without one. ValueError for one that is damaged or too large."""
    text = text.removeprefix("\ufeff").lstrip()
    if not text.startswith("---"):
        return {}
    between = _BETWEEN.match(text[:_LONGEST_CARD])
    if between is None:
        raise ValueError(f"no second line of --- within {_LONGEST_CARD >> 10} KiB")
    try:
        require_modest(between[1], _MOST_VALUES, _DEEPEST)
        value = yaml.safe_load(between[1])
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError) as error:  # of numbers and dates too
        raise ValueError(first_line(error)) from None
    if not isinstance(value, (dict, type(None))):
        raise ValueError(f"it should be a dict of names and values, found {type(value).__name__}")
    return value or {}


def _text(field: str, value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, (str, int, float)) for each in values):
        raise ValueError(f"{field} is a {type(value).__name__}, expected a text")
    return visible_name(", ".join(map(str, values)))
