"""The page of a search for formats, drawn from the JSON that `fluxq auto` writes beside its recipe alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxq.base.files import read_json, write_text
from fluxq.base.output import seal
from fluxq.eval.report.charts import decibels, front_chart, javascript
from fluxq.eval.report.report import environment

SEARCH = "fluxq auto"  # `kind` of its files


def is_search(file: Path) -> bool:
    """Tell whether a file is what a search wrote; ValueError for one that is no JSON."""
    return file.is_file() and read_json(file, longest=1 << 28).get("kind") == SEARCH


def write_front(target: Path, searches: Sequence[Mapping[str, Any]], job: str = "") -> Path:
    """Write the page of searches, an .html file, atomically; returns it. job: that the page says it was written by."""
    charts = [front_chart(found, index) for index, found in enumerate(searches)]
    templates = environment()
    templates.filters |= {"shown": shown, "sqnr": lambda nmse: shown(decibels(nmse))}
    body = templates.get_template("front.html").render(
        searches=[(found, chart, _units(found), _tried(found)) for found, chart in zip(searches, charts, strict=True)],
        specs={chart.key: chart.spec for chart in charts},
        script=javascript(),
    )
    write_text(target, seal(body, ".html", job))
    return target


def _units(found: Mapping[str, Any]) -> list[tuple[str, str, float, list[float | None]]]:
    """Return name, option, share of the weights, and the SQNR in dB of each option of the menu, of each unit."""
    whole = sum(unit["weights"] for unit in found["units"])
    return [
        (
            unit["unit"],
            unit["option"],
            unit["weights"] / whole,
            [decibels(unit["nmse"].get(option)) for option in found["menu"]],
        )
        for unit in found["units"]
    ]


def _tried(found: Mapping[str, Any]) -> list[tuple[str, bool, float, float | None, float | None, int]]:
    """Return proposer, whether it was chosen, cost, predicted and measured SQNR in dB, images, of each plan.

    Beside the proposer stands the number of computed steps, where that was chosen.
    """
    steps = found.get("steps")
    return [
        (
            ", ".join(plan["proposed_by"]) + (f", {plan['computed']} of {steps['total']} steps" if steps else ""),
            plan["chosen"],
            plan["cost"],
            decibels(plan["predicted_nmse"]),
            decibels(plan["nmse"]),
            plan["images"],
        )
        for plan in found["tried"]
    ]


def shown(value: float | None) -> str:
    """Return decibels as the page has them."""
    return "–" if value is None else "exact" if value == math.inf else f"{value:.2f}"
