"""The report's charts, drawn with altair: a static SVG for every reader, and its specification for a live one.

Colours are CSS variables of the page, so that one drawing serves light, dark and paper. All text that a reader or a
prompt brought in travels as data, never as part of an expression.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import altair as alt
import vl_convert

from fluxq.eval.metrics.figures import duration, plain, share, stated
from fluxq.eval.metrics.schema import (
    SPREAD,
    Curve,
    Debug,
    Estimate,
    LayerDamage,
    Metric,
    Report,
    Run,
    Speed,
    SpeedRow,
)
from fluxq.eval.report.summary import END, first_size, first_speed

_Along = tuple[str, Sequence[dict[str, Any]], Curve]  # a run's name; the place of each value, its number first
FLOOR = "noise floor"
_WIDTH, _HEIGHT = 360, 240
_ROW = 17  # of layers or blocks; a step in place of a height makes Vega-Lite warn of what it drops
_MAX_DOTS = 300
_MAX_LAYERS = 30
_MAX_TEXT = 90
_LONGEST = 500  # characters of any text of a drawing
_EXPRESSIONS = ("expr", "labelExpr", "calculate", "filter", "test")


@dataclass(frozen=True)
class Drawing:
    """One chart.

    text: words for readers who cannot see it.
    note: words that everyone should read beside it.
    choices: value of its `metric` parameter -> name.
    """

    key: str
    title: str
    text: str
    note: str
    spec: dict[str, Any]
    svg: str
    wide: bool = False
    choices: Mapping[str, str] = field(default_factory=dict)


@cache
def javascript() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script without external references, about 0.9 MB."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=_vegalite())
    return bundle.replace("</script", "<\\/script")


def cost_charts(report: Report) -> list[Drawing]:
    """Draw quality against bits, time, compute and memory, of at least two runs with both; dominated ones grey."""
    metrics = _comparable(report.runs)
    has_caches = any(run.cache is not None for run in report.runs)
    shown = {key: row for key, row in COSTS.items() if metrics and (has_caches or key != "compute")}
    return list(filter(None, (_cost_chart(report.runs, metrics, key, *row) for key, row in shown.items())))


def image_chart(report: Report) -> Drawing | None:
    """Draw the PSNR of each image or video, worst to best, a line for each run."""
    rows = [row for run in report.runs for row in _ranked(run, report)]
    if not rows:
        return None
    few, noun = len(rows) <= _MAX_DOTS, report.noun
    names = [run.name for run in report.runs]
    marks = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("rank:Q", title=f"{noun}s, worst to best (%)", scale=alt.Scale(domain=[0, 100], nice=False)),
        y=alt.Y("value:Q", title="PSNR, dB", scale=alt.Scale(zero=False)),
        color=_colour("run:N", names, legend=alt.Legend() if len(names) > 1 else None),
        tooltip=[_tip("run"), _tip("PSNR"), _tip("prompt"), _tip("seed")],
    )
    dots = marks.mark_point(filled=True, size=28 if few else 10, opacity=1)
    lines = marks.mark_line(strokeWidth=1.25, opacity=0.6).encode(tooltip=alt.value(None))
    lost = sum(image.values.get("psnr") is None for run in report.runs for image in run.images)
    text = f"PSNR of every {noun} against the 16-bit model's, sorted, a line for each run."
    note = f"{lost} identical or broken {noun}s have no finite PSNR and are not drawn." if lost else ""
    return _drawing("images", f"PSNR of each {noun}", text, (lines + dots), note=note, wide=True)


def frame_chart(report: Report) -> Drawing | None:
    """Draw the PSNR along the frames of videos, a line for each run and the noise floor dashed; None for images."""
    shown = [
        (run.name, [{"frame": frame} for frame in range(len(run.frames.values))], run.frames)
        for run in report.runs
        if run.frames is not None
    ]
    return _curve_chart("frames", "frame", shown, wide=True) if shown else None


def drift_charts(report: Report) -> list[Drawing]:
    """Draw each curve along the denoising steps, a line for each run and the noise floor dashed."""
    shown: dict[str, list[_Along]] = {}
    for run in report.runs:
        if run.drift is not None:
            steps = zip(run.drift.steps, run.drift.sigmas, strict=True)
            places = [{"step": step, "sigma": f"{sigma:.3g}"} for step, sigma in steps]
            for key, curve in run.drift.curves.items():
                shown.setdefault(key, []).append((run.name, places, curve))
    return list(filter(None, (_curve_chart(f"drift-{key}", "denoising step", each) for key, each in shown.items())))


def damage_charts(index: int, debug: Debug) -> list[Drawing]:
    """Draw the damage of each block of one run, and the local SQNR of its worst layers at each step."""
    return list(filter(None, (_blocks_chart(index, debug), _layers_chart(index, debug))))


def stage_chart(index: int, speed: Speed) -> Drawing | None:
    """Draw the time of an image by stage, 16 bit and quantized, in every mode at the first size; None without times."""
    timed = first_size(speed)
    rows = [row for each in timed for row in _stage_rows(each)]
    if not rows:
        return None
    noun = "image" if timed[0].frames is None else "video"
    stages = [name for name in _STAGES if any(row["stage"] == name for row in rows)]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            y=alt.Y("side:N", title=None, sort=None, axis=alt.Axis(labelLimit=180)),
            x=alt.X("seconds:Q", title=f"seconds per {noun} (p50)"),
            color=_colour("stage:N", stages),
            order=alt.Order("order:Q"),
            tooltip=[_tip("side"), _tip("stage"), _tip("time")],
        )
    )
    words = [f"{row['side']}: {row['stage']} {row['time']}" for row in rows]
    return _drawing(
        f"stages-{index}",
        "Where the time goes",
        "; ".join(words) + ".",
        chart,
        height=26 * len({row["side"] for row in rows}),
        wide=True,
    )


def front_chart(search: Mapping[str, Any], index: int = 0) -> Drawing:
    """Draw the front of a search, mixing at random, and the plans that ran as measured.

    search: content of the JSON that `fluxq auto` writes. Mixing the ends of the front at random mixes the energy of
    their errors, so that line is straight in energy and not in dB.
    """
    unit, points = search["cost_unit"], [(each["cost"], each["predicted_nmse"]) for each in search["front"]]
    (low, worst), (high, least) = points[0], points[-1]
    shares = [step / _PIECES for step in range(_PIECES + 1)]
    mixed = [(low + (high - low) * t, worst + (least - worst) * t) for t in shares]
    lines = [
        {"line": name, unit: cost, "dB": value, "text": f"{value:.2f} dB at {cost:.4g} {unit}"}
        for name, of in ((FRONT, points), (MIXED, mixed))
        for cost, error in of
        if (value := decibels(error)) is not None and math.isfinite(value)
    ]
    plans = [
        {
            unit: each["cost"],
            "dB": value,
            "plan": CHOSEN if each["chosen"] else RAN,
            "proposed by": ", ".join(each["proposed_by"]),
            "text": f"{value:.2f} dB measured at {each['cost']:.4g} {unit}",
        }
        for each in search["tried"]
        if (value := decibels(each["nmse"])) is not None and math.isfinite(value)
    ]
    x = alt.X(f"{unit}:Q", title=unit, scale=alt.Scale(zero=False))
    y = alt.Y("dB:Q", title="SQNR of the final latents, dB", scale=alt.Scale(zero=False))
    of_lines, of_plans = (_colour(each, list(_PLANS), list(_PLANS.values())) for each in ("line:N", "plan:N"))
    line = alt.Chart(alt.Data(values=lines)).mark_line(strokeWidth=1.5)
    dots = alt.Chart(alt.Data(values=plans)).mark_point(filled=True, opacity=1)
    chart = line.encode(x=x, y=y, color=of_lines, tooltip=[_tip("line"), _tip("text")]) + dots.encode(
        x=x,
        y=y,
        color=of_plans,
        size=alt.condition(f"datum.plan === '{CHOSEN}'", alt.value(130), alt.value(50)),
        tooltip=[_tip("plan"), _tip("proposed by"), _tip("text")],
    )
    text = f"{FRONT}, {MIXED} of its ends, and {len(plans)} plans that ran, over {unit}."
    return _drawing(f"front-{index}", f"Least error for {unit}", text, chart, wide=True)


def past_chart(series: Any, index: int = 0) -> Drawing:
    """Draw one number of the runs of a history, with limits, what is allowed and each change of level.

    series: a `past.Series`. Runs stand side by side in the order of their commits, whatever lies between.
    """
    rows = [
        {
            "run": number,
            "value": point.value,
            "low": point.low,
            "high": point.high,
            "commit": row.commit.revision[:12] if row.commit else "none",
            "time": row.time,
            "verdict": row.verdict or "none",
            "text": f"{point.value:.4g} {point.unit}".rstrip(),
        }
        for number, (row, point) in enumerate(zip(series.rows, series.points, strict=True), start=1)
    ]
    names = {row["run"]: row["commit"][:8] if row["commit"] != "none" else row["time"][:16] for row in rows}
    axis = alt.Axis(labelExpr=f"{json.dumps(names)}[datum.value]", values=list(names), labelAngle=-60, grid=False)
    x = alt.X("run:Q", title=None, axis=axis, scale=alt.Scale(domain=[0.5, len(rows) + 0.5], nice=False))
    y, upward = f"{series.name}{f', {series.unit}' * bool(series.unit)}", alt.Scale(zero=False)
    value, low, limit_at = (alt.Y(f"{name}:Q", title=None, scale=upward) for name in ("value", "low", "limit"))
    base = alt.Chart(alt.Data(values=rows)).encode(x=x)
    layers = [
        base.transform_filter("isValid(datum.low) && isValid(datum.high)")
        .mark_rule(color="var(--before)", strokeWidth=1.5)
        .encode(y=low, y2="high:Q"),
        base.mark_line(color="var(--accent)", strokeWidth=1, opacity=0.5).encode(y=value),
        base.mark_point(filled=True, color="var(--accent)", size=40, opacity=1).encode(
            y=value, tooltip=[_tip(name) for name in _OF_RUNS]
        ),
    ]
    changes = [{"run": change + 0.5} for change in series.changes]
    if changes:
        mark = alt.Chart(alt.Data(values=changes)).encode(x=alt.X("run:Q", title=None))
        layers.append(mark.mark_rule(color="var(--c2)", strokeDash=[5, 3], strokeWidth=1.5))
    limit = series.points[-1].limit
    if limit is not None:
        allowed = alt.Chart(alt.Data(values=[{"limit": limit}])).mark_rule(color="var(--quiet)", strokeDash=[2, 3])
        layers.append(allowed.encode(y=limit_at))
    text = f"{y} of {len(rows)} runs" + "".join(f"; {sentence}" for sentence in series.sentences) + "."
    note = f"{limit:.4g} are allowed, the dotted line." if limit is not None else ""
    return _drawing(f"past-{index}", y, text, alt.layer(*layers), note=note)


def decibels(nmse: float | None) -> float | None:
    """Return the SQNR for a normalised squared error, infinite for none; None where it was not finite."""
    return None if nmse is None else -10 * math.log10(nmse) if nmse > 0 else math.inf


def alike(metrics: Sequence[Metric]) -> bool:
    """Tell whether one metric of several runs may be compared.

    It was measured in one way, and those without values per image (a FID) of equally many, on which their bias depends.
    """
    counts = {metric.value.n for metric in metrics if metric.value is not None and metric.value.low is None}
    return len({metric.how for metric in metrics}) <= 1 and len(counts) <= 1


def dominated(points: Sequence[tuple[float, float]], better: str) -> list[bool]:
    """Tell for each (cost, quality) whether another one is at least as good in both and better in one."""
    sign = 1 if better == "higher" else -1

    def beats(first: tuple[float, float], second: tuple[float, float]) -> bool:
        cheaper, closer = first[0] <= second[0], sign * first[1] >= sign * second[1]
        return cheaper and closer and first != second

    return [any(beats(other, point) for other in points) for point in points]


# ---------------------------------------------------------------------------------------------------------------------
# quality against cost


def _bits(run: Run, reference: bool) -> float | None:
    """Return bits per weight in memory, where re-encoded codes take more than those in the file."""
    if reference:
        return 16.0
    return run.in_memory.bits_per_weight if run.in_memory else run.size.bits_per_weight


def _seconds(run: Run, reference: bool) -> float | None:
    """Return seconds per image; None also where times spread by more than a speed-up may be given for."""
    row = first_speed(run.speed, "16-bit" if reference else "")  # a CPU may compute the same sooner in fp32
    if row is None or row.stages[END].iqr > SPREAD * row.stages[END].p50:
        return None
    return row.stages[END].p50 / row.batch


def _gigabytes(run: Run, reference: bool) -> float | None:
    row = first_speed(run.speed, "16-bit" if reference else "")
    return row.peak_bytes / 1e9 if row and row.peak_bytes is not None else None


def _share(run: Run, reference: bool) -> float | None:
    """Return the share of all steps that is computed."""
    return 1.0 if reference or (run.cache is run.computed is None) else run.computed


def _comparable(runs: Sequence[Run]) -> dict[str, Metric]:
    """Return metrics with a finite mean for two runs or more, which all measured it alike."""
    by_key: dict[str, list[Metric]] = {}
    for run in runs:
        for key, metric in run.metrics.items():
            if metric.value is not None and metric.value.mean is not None:
                by_key.setdefault(key, []).append(metric)
    return {key: metrics[0] for key, metrics in by_key.items() if len(metrics) >= 2 and alike(metrics)}


def _cost_chart(
    runs: Sequence[Run],
    metrics: Mapping[str, Metric],
    key: str,
    title: str,
    axis: str,
    digits: str,
    cost: Callable[[Run, bool], float | None],
) -> Drawing | None:
    costs = {run.name: cost(run, False) for run in runs}
    if sum(value is not None for value in costs.values()) < 2:
        return None
    before = next((value for run in runs if (value := cost(run, True)) is not None), None)
    points, floors, references = [], [], []
    for name, metric in metrics.items():
        points += _labelled(_cost_points(name, metric, runs, costs, digits))
        floor = next((run.metrics[name].floor for run in runs if name in run.metrics and run.metrics[name].floor), None)
        floors += _floor_rows(name, floor)
        if before is not None:
            references.append({"metric": name, "cost": before, "run": "16 bit"})
            baseline = next((run.metrics[name].baseline for run in runs if name in run.metrics), None)
            points += _reference_point(name, metric, baseline, before, digits)
    axis = axis.format(noun=runs[0].noun)
    names = {name: f"{metric.name}{f', {metric.unit}' if metric.unit else ''}" for name, metric in metrics.items()}
    first = "psnr" if "psnr" in names else next(iter(names))
    lower = [name for name, metric in metrics.items() if metric.better == "lower"]

    metric = alt.param(name="metric", value=first)
    spans = {name: _span(row for row in [*points, *floors] if row["metric"] == name) for name in names}
    low, high = (
        alt.ExprRef(f"{json.dumps({name: span[end] for name, span in spans.items()})}[metric]") for end in (0, 1)
    )
    reverse = alt.ExprRef(f"indexof({json.dumps(lower)}, metric) >= 0")
    across = alt.Scale(domain=_padded([row["cost"] for row in [*points, *references]]), nice=False)
    upward = alt.Scale(domain=[low, high], reverse=reverse, nice=True, zero=False)
    x = alt.X("cost:Q", title=axis, scale=across)
    y, y_low = alt.Y("value:Q", title=None, scale=upward), alt.Y("low:Q", title=None, scale=upward)
    domain, range_ = ["yes", "no", "16 bit"], ["var(--accent)", "var(--before)", "var(--quiet)"]
    colour = alt.Color("front:N", legend=None, scale=alt.Scale(domain=domain, range=range_))
    shape = alt.Shape("front:N", legend=None, scale=alt.Scale(domain=domain, range=["circle", "circle", "square"]))

    def chosen(rows: list[dict[str, Any]]) -> Any:
        return alt.Chart(alt.Data(values=rows)).transform_filter("datum.metric === metric")

    base, floor, sixteen = chosen(points).encode(x=x), chosen(floors), chosen(references).encode(x=x)
    names_beside = [
        base.transform_filter(f"datum.side === '{side}'")
        .mark_text(align=side, dx=9 if side == "left" else -9, dy=-9, fontSize=11, color="var(--ink)", limit=190)
        .encode(y=y, text="label:N")
        for side in ("left", "right")
    ]
    layers = [
        floor.mark_rect(color="var(--quiet)", opacity=0.16).encode(y=y_low, y2="high:Q"),
        floor.mark_rule(color="var(--quiet)", strokeDash=[4, 3]).encode(y=y, tooltip=[_tip("remark")]),
        sixteen.mark_rule(color="var(--before)", strokeDash=[2, 3]),
        sixteen.mark_text(align="right", dx=-4, y=8, color="var(--quiet)", fontSize=11).encode(text="run:N"),
        base.transform_filter("datum.front === 'yes'")
        .mark_line(interpolate="step-after", color="var(--accent)", strokeWidth=1, opacity=0.5)
        .encode(y=y),
        base.transform_filter("isValid(datum.low)")
        .mark_rule(strokeWidth=1.5)
        .encode(y=y_low, y2="high:Q", color=colour),
        base.mark_point(filled=True, size=70, opacity=1).encode(
            y=y, color=colour, shape=shape, tooltip=[_tip("run"), _tip("quality"), _tip("at"), _tip("remark")]
        ),
        *names_beside,
    ]
    headings = {key: f"{text}, {_DIRECTIONS[metrics[key].better]}" for key, text in names.items()}
    heading = alt.ExprRef(f"{json.dumps(headings)}[metric]")
    chart = alt.layer(*layers, title=alt.Title(text=heading)).add_params(metric)
    greyed = sorted({row["run"] for row in points if row["metric"] == first and row["front"] == "no"})
    note = f"Dominated by {names[first]}: {', '.join(greyed)}." if greyed else ""
    choices = {first: names[first]} | names
    return _drawing(
        f"cost-{key}", title, f"{names[first]} of each run against {axis}.", chart, note=note, choices=choices
    )


def _cost_points(
    name: str, metric: Metric, runs: Sequence[Run], costs: Mapping[str, float | None], digits: str
) -> list[dict[str, Any]]:
    points: list[tuple[Run, float, Estimate, float]] = []
    for run in runs:
        value, at = run.metrics[name].value if name in run.metrics else None, costs[run.name]
        if value is not None and value.mean is not None and at is not None:
            points.append((run, at, value, value.mean))
    behind = dominated([(at, mean) for _, at, _, mean in points], metric.better)
    middle = (min(at for _, at, _, _ in points) + max(at for _, at, _, _ in points)) / 2 if points else 0
    return [
        {
            "metric": name,
            "run": run.name,
            "cost": at,
            "value": mean,
            "low": value.low,
            "high": value.high,
            "front": "no" if is_behind else "yes",
            "side": "left" if at <= middle else "right",
            "quality": f"{metric.name} {stated(value, metric.digits)}",
            "at": plain(at, digits),
            "remark": "dominated: another run is as good or better and costs no more" if is_behind else "not dominated",
        }
        for (run, at, value, mean), is_behind in zip(points, behind, strict=True)
    ]


def _labelled(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return points with a `label`; where names would cover each other, the first point gets them all."""
    across, up = (_reach(points, "cost") * 0.25, _reach(points, "value") * 0.05)
    labels: dict[str, str] = {}
    leaders: list[dict[str, Any]] = []
    for point in points:
        near = (each for each in leaders if abs(each["cost"] - point["cost"]) <= across)
        leader = next((each for each in near if abs(each["value"] - point["value"]) <= up), None)
        if leader is None:
            leaders.append(point)
            labels[point["run"]] = point["run"]
        else:
            labels[leader["run"]] += f", {point['run']}"
            labels[point["run"]] = ""
    return [point | {"label": labels[point["run"]]} for point in points]


def _reach(points: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [point[key] for point in points]
    return max(values, default=0.0) - min(values, default=0.0)


def _reference_point(
    name: str, metric: Metric, baseline: Estimate | None, at: float, digits: str
) -> list[dict[str, Any]]:
    """Return the 16-bit images' own value, of metrics that have one."""
    if baseline is None or baseline.mean is None:
        return []
    where = {"metric": name, "run": "16 bit", "cost": at, "at": plain(at, digits), "front": "16 bit", "side": "none"}
    value = {"value": baseline.mean, "low": baseline.low, "high": baseline.high}
    return [{**where, **value, "quality": f"{metric.name} {stated(baseline, metric.digits)}", "remark": "16 bit"}]


def _span(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    values = [row[key] for row in rows for key in ("value", "low", "high") if row[key] is not None]
    return _padded(values)


def _padded(values: Sequence[float]) -> list[float]:
    low, high = min(values, default=0.0), max(values, default=0.0)  # of a metric that no run with this cost has
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return [low - room, high + room]


def _floor_rows(name: str, floor: Estimate | None) -> list[dict[str, Any]]:
    if floor is None or floor.mean is None:
        return []
    low, high = (floor.mean if each is None else each for each in (floor.low, floor.high))
    remark = "noise floor: 16 bit against 16 bit"
    return [{"metric": name, "value": floor.mean, "low": low, "high": high, "remark": remark}]


# ---------------------------------------------------------------------------------------------------------------------
# images and steps


def _ranked(run: Run, report: Report) -> list[dict[str, Any]]:
    """Return a row for each image with a finite PSNR, worst first; of very many, evenly spaced ranks."""
    values = [(value, i) for i, image in enumerate(run.images) if (value := image.values.get("psnr")) is not None]
    values.sort()
    count = min(len(values), _MAX_DOTS)
    ranks = [round(i * (len(values) - 1) / max(count - 1, 1)) for i in range(count)]
    return [
        {
            "run": run.name,
            "rank": 100 * (rank + 0.5) / len(values),
            "value": values[rank][0],
            "PSNR": f"{values[rank][0]:.2f} dB",
            "prompt": _shortened(report.items[values[rank][1]].prompt, _MAX_TEXT),
            "seed": str(report.items[values[rank][1]].seed),
        }
        for rank in ranks
    ]


def _curve_chart(key: str, axis: str, curves: Sequence[_Along], *, wide: bool = False) -> Drawing | None:
    _, places, first = curves[0]
    number = next(iter(places[0]))
    rows = [row for name, places, curve in curves for row in _curve_rows(name, places, curve, curve.values)]
    names = [name for name, _, _ in curves]
    shown = names
    for _, places, curve in curves:
        if curve.floor is not None:
            rows += _curve_rows(FLOOR, places, curve, curve.floor)
            shown = [*names, FLOOR]
            break
    if not rows:
        return None
    colours = [*_palette(len(names)), "var(--quiet)"][: len(shown)]
    dashes = [*([1, 0] for _ in names), [5, 4]][: len(shown)]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(f"{number}:Q", title=axis, axis=alt.Axis(tickMinStep=1, format="d")),
        color=_colour("run:N", shown, colours, legend=alt.Legend(symbolType="stroke", symbolOpacity=1, symbolSize=260)),
    )
    title, scale = f"{first.unit or 'value'}, {first.better} is better", alt.Scale(zero=False)
    y = alt.Y("value:Q", title=title, scale=scale)
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", title=title, scale=scale), y2="high:Q")
    line = base.mark_line(strokeWidth=1.75).encode(
        y=y, strokeDash=alt.StrokeDash("run:N", title=None, scale=alt.Scale(domain=shown, range=dashes))
    )
    dots = base.mark_point(filled=True, size=26, opacity=1).encode(
        y=y, tooltip=[_tip(name) for name in rows[0] if name not in ("value", "low", "high")]
    )
    last = {row["run"]: row["figure"] for row in rows}
    where = [f"{name} ends at {last[name]}" for name in shown if name in last]
    text = f"{first.how}. {'; '.join(where)}."
    return _drawing(key, first.name, text, band + line + dots, note=first.how, wide=wide)


def _curve_rows(
    name: str, places: Sequence[dict[str, Any]], curve: Curve, values: Sequence[Estimate]
) -> list[dict[str, Any]]:
    return [
        {
            "run": name,
            **place,
            "value": value.mean,
            "low": value.mean if value.low is None else value.low,
            "high": value.mean if value.high is None else value.high,
            "figure": f"{stated(value, curve.digits)} {curve.unit}".strip(),
        }
        for place, value in zip(places, values, strict=True)
        if value.mean is not None
    ]


# ---------------------------------------------------------------------------------------------------------------------
# layers


def _blocks_chart(index: int, debug: Debug) -> Drawing | None:
    shared = _shared_component(debug.blocks)
    rows = [
        {
            "block": block.name.removeprefix(shared),
            "order": order,
            "what": what,
            "share": value,
            "text": f"{what}: {share(value)}",
        }
        for order, block in enumerate(debug.blocks)
        for what, value in ((ONLY, block.damage), (RESTORED, block.gain))
        if value is not None
    ]
    if not rows:
        return None
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=60, opacity=1)
        .encode(
            y=alt.Y("block:N", title=None, sort=alt.SortField("order"), axis=alt.Axis(labelLimit=190, grid=True)),
            x=alt.X("share:Q", title="share of the final latents' error", axis=alt.Axis(format="%")),
            color=_colour("what:N", [ONLY, RESTORED]),
            shape=alt.Shape(
                "what:N", title=None, scale=alt.Scale(domain=[ONLY, RESTORED], range=["circle", "diamond"])
            ),
            tooltip=[_tip("block"), _tip("text")],
        )
    )
    damages = {block.name: block.damage for block in debug.blocks if block.damage is not None}
    worst = max(damages, key=damages.__getitem__, default="")
    text = f"Blocks in the order in which they run. {worst} does most: {share(damages[worst])}." if worst else ""
    return _drawing(f"blocks-{index}", "Damage by block", text, chart, note=text, height=_ROW * len(debug.blocks))


def _layers_chart(index: int, debug: Debug) -> Drawing | None:
    shown = [layer for layer in debug.layers if any(value is not None for value in layer.local_sqnr_db)][:_MAX_LAYERS]
    shared = _shared_component(shown)
    rows = [
        {
            "layer": layer.name.removeprefix(shared),
            "step": str(step),
            "order": order,
            "sqnr": value,
            "text": f"{value:.1f} dB",
        }
        for order, layer in enumerate(shown)
        for step, value in zip(debug.steps, layer.local_sqnr_db, strict=False)
        if value is not None
    ]
    if not rows:
        return None
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_rect(stroke="var(--paper)", strokeWidth=1)
        .encode(
            y=alt.Y("layer:N", title=None, sort=alt.SortField("order"), axis=alt.Axis(labelLimit=230)),
            x=alt.X("step:N", title="denoising step", sort=None, axis=alt.Axis(labelAngle=0)),
            color=alt.Color(
                "sqnr:Q", title="local SQNR, dB", scale=alt.Scale(range=list(_HEAT), interpolate="rgb", zero=False)
            ),
            tooltip=[_tip("layer"), _tip("step"), _tip("text")],
        )
    )
    lowest = min(rows, key=lambda row: row["sqnr"])
    note = f"The {len(shown)} worst layers, each fed with the 16-bit model's input; low is bad."
    text = f"{note} Lowest: {lowest['layer']} at step {lowest['step']}, {lowest['text']}."
    return _drawing(
        f"layers-{index}", "Local error by layer and step", text, chart, note=note, height=_ROW * len(shown)
    )


def _shared_component(layers: Sequence[LayerDamage]) -> str:
    """Return `transformer.` where all names begin with that component: without it they fit beside a chart."""
    components = {layer.name.partition(".")[0] for layer in layers}
    numbered = any(layer.name.split(".")[1].isdigit() for layer in layers if "." in layer.name)
    return f"{components.pop()}." if len(components) == 1 and not numbered else ""


# ---------------------------------------------------------------------------------------------------------------------
# speed


def _stage_rows(row: SpeedRow) -> list[dict[str, Any]]:
    """Return times of text encoders and VAE; the rest of end to end is the steps, the scheduler and the call."""
    if END not in row.stages:
        return []
    whole = {name: row.stages[name].p50 for name in _STAGES[1:] if name in row.stages}
    whole[STEPS] = max(0.0, row.stages[END].p50 - sum(whole.values()))
    parts = {name: seconds / row.batch for name, seconds in whole.items()}
    side = f"{row.label}, {row.mode}"
    return [
        {"side": side, "stage": name, "order": _STAGES.index(name), "seconds": s, "time": duration(s)}
        for name, s in parts.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# drawing


def _drawing(
    key: str,
    title: str,
    text: str,
    chart: Any,
    *,
    note: str = "",
    wide: bool = False,
    height: int = _HEIGHT,
    choices: Mapping[str, str] | None = None,
) -> Drawing:
    width = 900 if wide else _WIDTH
    chart = chart.properties(width=width, height=height, description=text).configure(**_CONFIG)
    spec = _shortened(chart.to_dict())
    return Drawing(key, title, text, note, spec, _own_ids(_svg(spec), key), wide, choices or {})


def _shortened(value: Any, longest: int = _LONGEST) -> Any:
    """Cut long texts of a specification, for Vega measures each letter of them; what it computes with stays whole."""
    if isinstance(value, dict):
        return {key: each if key in _EXPRESSIONS else _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return value if not isinstance(value, str) or len(value) <= longest else value[: longest - 1] + "…"


def _svg(spec: dict[str, Any]) -> str:
    return vl_convert.vegalite_to_svg(spec, vl_version=_vegalite())


def _own_ids(svg: str, key: str) -> str:
    """Number gradients and clip paths anew in each drawing; Vega numbers them through all drawings of a process."""
    for number, name in enumerate(dict.fromkeys(re.findall(r' id="(\w+)"', svg))):
        svg = svg.replace(f'id="{name}"', f'id="{key}-{number}"').replace(f"url(#{name})", f"url(#{key}-{number})")
    return svg


def _vegalite() -> str:
    """Return the version that altair writes, "6.4" of "v6.4.1", or the newest where vl-convert does not know it."""
    written, known = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2]), vl_convert.get_vegalite_versions()
    return written if written in known else known[-1]


def _colour(field: str, names: Sequence[str], colours: Sequence[str] = (), **how: Any) -> alt.Color:
    scale = alt.Scale(domain=names, range=colours or _palette(len(names)))
    return alt.Color(field, title=None, scale=scale, **how)


def _palette(count: int) -> list[str]:
    return [f"var(--c{index % _COLOURS})" for index in range(count)]


def _tip(name: str) -> alt.Tooltip:
    return alt.Tooltip(f"{name}:N", title=name)


FRONT, MIXED, RAN, CHOSEN = "front, predicted", "mixing at random", "ran, measured", "chosen, measured"
_PLANS = {FRONT: "var(--c1)", MIXED: "var(--quiet)", RAN: "var(--c0)", CHOSEN: "var(--c2)"}
_OF_RUNS = ("text", "commit", "time", "verdict")
_PIECES = 40  # of a line that is straight in energy
STEPS = "steps and the rest"
_STAGES = (STEPS, "text encoders", "VAE")
ONLY, RESTORED = "only this quantized", "gone when kept in 16 bit"

# key -> title, axis, digits, (run, whether of its 16-bit side) -> cost; None where it was not measured
COSTS: dict[str, tuple[str, str, str, Callable[[Run, bool], float | None]]] = {
    "bits": ("Quality and bits", "bits per weight in memory", ".2f", _bits),
    "latency": ("Quality and time", "seconds per {noun}, end to end, p50", ".4g", _seconds),
    "compute": ("Quality and compute", "multiplications, by those of all steps", ".3g", _share),
    "memory": ("Quality and memory", "peak memory, GB", ".3g", _gigabytes),
}

_DIRECTIONS = {"higher": "higher is better", "lower": "lower is better, so the axis is turned"}
_COLOURS = 8  # --c0 to --c7 of the page
_HEAT = ("#8c1d18", "#d9683c", "#f2c879", "#cfd8e6", "#7e9cc7")  # low to high
_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--quiet)",
        "titleColor": "var(--quiet)",
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "labelOverlap": True,
    },
    "axisQuantitative": {"tickCount": 6},
    "title": {"color": "var(--quiet)", "fontSize": 11, "fontWeight": "normal", "anchor": "start", "offset": 6},
    "legend": {
        "orient": "top",
        "labelColor": "var(--ink)",
        "titleColor": "var(--quiet)",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "labelLimit": 260,
        "columns": 3,
        "symbolStrokeWidth": 2,
    },
}
