"""The page of a history: each number of its runs over commits or time, with limits and changes of level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from fluxq.eval.history.changes import change_points
from fluxq.eval.history.rows import HistoryRow, Point
from fluxq.eval.report.charts import Drawing, past_chart
from fluxq.eval.report.report import write_page

_DIGITS = 8  # of a commit


@dataclass(frozen=True)
class Series:
    """One number of the runs that compare: of one subject, setting and machine, in the order of their commits.

    changes: index of the first run of each new level.
    """

    subject: str
    machine: str
    name: str
    rows: tuple[HistoryRow, ...]
    points: tuple[Point, ...]
    changes: tuple[int, ...]

    @property
    def unit(self) -> str:
        return self.points[-1].unit

    @property
    def sentences(self) -> list[str]:
        """Changes of level, a sentence each."""
        ends = [0, *self.changes, len(self.points)]
        values = [point.value or 0.0 for point in self.points]
        means = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
        return [
            f"{self.name}: from {before:.4g} to {after:.4g} {self.unit}".rstrip() + f" at {label(self.rows[index])}"
            for index, before, after in zip(self.changes, means, means[1:], strict=False)
        ]


def label(row: HistoryRow) -> str:
    """Return a run's place on the axis: its commit, * where files differed from it, or the time."""
    commit = row.commit
    return row.created if commit is None else commit.revision[:_DIGITS] + "*" * commit.is_changed


def series_of(rows: Sequence[HistoryRow]) -> list[Series]:
    """Sort the numbers of all runs into series. Numbers that there are not, as of a refused speed, are left out."""
    groups: dict[tuple[str, str, str, str], list[tuple[HistoryRow, Point]]] = {}
    for row in sorted(rows, key=_when):
        for name, point in {**row.metrics, **row.speed}.items():
            if point.value is not None:
                groups.setdefault((row.subject, row.setting, row.machine, name), []).append((row, point))
    return [
        Series(
            subject,
            machine,
            name,
            tuple(row for row, _ in pairs),
            tuple(point for _, point in pairs),
            tuple(change_points([point.value or 0.0 for _, point in pairs])),
        )
        for (subject, _, machine, name), pairs in groups.items()
    ]


def write_past(target: Path, rows: Sequence[HistoryRow], job: str = "") -> Path:
    """Write the page of a history, an .html file, atomically; returns it. job: that the page says it was written by."""
    groups: dict[tuple[str, str, str], list[tuple[Series, Drawing]]] = {}
    for index, each in enumerate(series_of(rows)):
        key = each.subject, each.machine, each.rows[0].setting
        groups.setdefault(key, []).append((each, past_chart(each, index)))
    charts = [chart for pairs in groups.values() for _, chart in pairs]
    newest_first = sorted(rows, key=_when, reverse=True)
    return write_page(target, "past.html", job, charts, groups=groups, rows=newest_first, label=label)


def _when(row: HistoryRow) -> tuple[datetime, str]:
    """Return the time to sort a run by: that of its commit, whose zone is the committer's."""
    return datetime.fromisoformat(row.time), row.created
