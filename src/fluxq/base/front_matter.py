"""The front matter of a model card: YAML of strangers, of which little is read and nothing is expanded without end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fluxq.base.console import first_line, logger, visible_name
from fluxq.base.modest_yaml import require_modest

_LONGEST = 1 << 18  # bytes of a card that are looked at; with hundreds of results its front matter has some thousand
_MOST_VALUES = 20_000  # of the front matter, aliases expanded
_DEEPEST = 20  # lists and tables in each other; a model-index has seven
_LONGEST_VALUE = 300  # characters of a licence, its name or its address
_BETWEEN = re.compile(r"---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*$", re.DOTALL | re.MULTILINE)
_FIELDS = ("license", "license_name", "license_link")


def license_of(card: Path) -> dict[str, str]:
    """`license`, `license_name` and `license_link` of a card, those that are there; a warning if it cannot be read."""
    if not card.is_file():
        return {}
    try:
        with card.open("rb") as stream:
            data = front_matter(stream.read(_LONGEST).decode("utf-8", "replace"))
        found = {field: _text(field, data[field]) for field in _FIELDS if data.get(field)}
    except ValueError as error:
        logger.warning("%s: front matter cannot be read (%s); the licence is not carried over", card, error)
        return {}
    for field in [field for field, text in found.items() if len(text) > _LONGEST_VALUE]:
        logger.warning("%s: %s has %d characters; cut to %d", card, field, len(found[field]), _LONGEST_VALUE)
        found[field] = found[field][: _LONGEST_VALUE - 1] + "…"
    return found


def front_matter(text: str) -> dict[str, Any]:
    """The table that a card begins with; empty without one. ValueError for one that is none, or stands for too much."""
    text = text.removeprefix("\ufeff").lstrip()
    if not text.startswith("---"):
        return {}
    between = _BETWEEN.match(text[:_LONGEST])
    if between is None:
        raise ValueError(f"no second line of --- within {_LONGEST >> 10} KiB")
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
