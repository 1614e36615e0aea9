"""The page of a search for formats, drawn from the JSON that `fluxq auto` writes beside its recipe alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxq.base.files import read_json
from fluxq.eval.report.charts import decibels, front_chart
from fluxq.eval.report.report import write_page

SEARCH = "fluxq auto"  # `kind` of its files


def is_search(file: Path) -> bool:
    """Tell whether a file is what a search wrote; ValueError for one that is no JSON."""
    return file.is_file() and read_json(file, longest=1 << 28).get("kind") == SEARCH


def write_front(target: Path, searches: Sequence[Mapping[str, Any]], job: str = "") -> Path:
    """Write the page of searches, an .html file, atomically; returns it. job: that the page says it was written by."""
    charts = [front_chart(search, index) for index, search in enumerate(searches)]
    pairs = list(zip(searches, charts, strict=True))
    return write_page(target, "front.html", job, charts, searches=pairs, decibels=decibels, shown=shown)


def shown(value: float | None) -> str:
    """Return decibels as the page has them."""
    return "–" if value is None else "exact" if value == math.inf else f"{value:.2f}"
