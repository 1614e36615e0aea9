"""Rows of a history from the results of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxq.base.files import sha256_json
from fluxq.eval.gate.result import GateResult
from fluxq.eval.gate.speed import GateSpeed
from fluxq.eval.history.rows import Commit, HistoryRow, Point
from fluxq.eval.metrics.figures import plain_shape
from fluxq.eval.metrics.schema import Speed, SpeedRow, number

STAGES = ("end to end", "denoiser step")  # of a bench, that a history keeps


def row_of_gate(result: GateResult, commit: Commit | None) -> HistoryRow:
    """Return the row of a gate: of each metric how much farther B is from A than A is from itself."""
    metrics = {
        key: Point(
            value=metric.difference,
            low=metric.low,
            high=metric.high,
            n=metric.images,
            unit=metric.unit,
            limit=metric.limit,
            distance=metric.distance,
            floor=metric.floor,
        )
        for key, metric in result.metrics.items()
    }
    return HistoryRow(
        command="gate",
        created=result.created,
        commit=commit,
        subject=_subject(result.a, result.b),
        setting=sha256_json([result.prompts_digest, result.call, _how_made(result.a), _how_made(result.b)])[:16],
        machine=result.machine or "unknown",
        versions=result.versions,
        digests={side: each["digest"] for side, each in (("A", result.a), ("B", result.b)) if each.get("digest")},
        verdict=result.verdict,
        metrics=metrics,
        speed={} if result.speed is None else {"speed": _ratio(result.speed)},
        seconds=result.seconds,
    )


def _how_made(side: Mapping[str, Any]) -> list[Any]:
    """Return what images depend on beside prompts, call and code."""
    return [side.get(key) for key in ("kind", "dtype", "batch_size")]


def _subject(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return what was judged, in words that are the same for every commit of a project."""
    what = f"commits of {b['project']}" if b.get("kind") == "commit" else b["name"]
    return f"{what} against {a.get('rev') or a['name']}"


def _ratio(speed: GateSpeed) -> Point:
    return Point(
        value=speed.ratio,
        low=speed.low,
        high=speed.high,
        n=speed.pairs,
        unit="time of B over A's",
        limit=1 + speed.slower,
    )


def row_of_bench(
    speed: Speed,
    commit: Commit | None,
    *,
    created: str,
    name: str,
    digests: Mapping[str, str],
    call: Mapping[str, Any],
    versions: Mapping[str, str],
    seconds: float,
) -> HistoryRow:
    """Return the row of a bench: median times of every side, mode and shape, with limits of 95 %."""
    points = {
        f"{stage}, {row.side}, {row.mode}, {plain_shape(row)}": _median(row, stage)
        for row in speed.rows
        for stage in STAGES
        if stage in row.stages
    }
    return HistoryRow(
        command="bench",
        created=created,
        commit=commit,
        subject=f"{name} beside 16 bit",
        setting=sha256_json(dict(call))[:16],
        machine=speed.measured_on,
        versions=dict(versions),
        digests=dict(digests),
        verdict=None,
        metrics={},
        speed=points,
        seconds=seconds,
    )


def _median(row: SpeedRow, stage: str) -> Point:
    times = row.stages[stage]
    low, high = median_limits(times.values)
    return Point(value=times.p50, low=low, high=high, n=times.n, unit="s")


def median_limits(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return limits of a median of at least 95 %, two of the values; None for fewer than six."""
    from scipy.stats import quantile_test

    low, high = quantile_test(values, p=0.5).confidence_interval(0.95)
    return number(float(low)), number(float(high))
