"""The table that pages, Markdown and terminals begin with: a row for each way to compute each checkpoint.

Quality, memory and time of a row were measured of one arithmetic. An arithmetic that `fluxq bench` timed and
`fluxq eval` did not judge has a row of its own, with the command that judges it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fluxq.eval.metrics.figures import ARITHMETICS, OUTCOMES, computed, count, shape, short, stated
from fluxq.eval.metrics.schema import SPREAD, Estimate, Metric, Report, Run, Served, Speed, SpeedRow, Timed, in_words

END = "end to end"  # the stage
CACHES_TITLE = "Step caches beside fewer steps"
CACHES_HEAD = ("run", "computed", "PSNR, dB", "fewer steps", "computed", "PSNR, dB", "PSNR, first − second, dB")
CACHES_NOTE = (
    "Computed: multiplications of Linears in the denoiser's blocks, measured, by those of all steps. PSNR is against "
    "16 bit with all steps; the difference is paired, with its 95 % interval."
)
MAIN = ("psnr", "lpips", "clip_score", "image_reward", "velocity_error")


@dataclass(frozen=True)
class SummaryRow:
    """One way to compute one checkpoint, or the 16-bit model, which has no verdict.

    computed, about: the arithmetic in a few words, and in more.
    outcome: key of OUTCOMES, "" without a verdict.
    remark: words in place of the verdict.
    psnr: against 16 bit; of the 16-bit model, against a second run of it.
    disk, resident: bytes of the quantized components.
    bits, resident_bits: per weight, stored and in memory.
    seconds: of one image, several where it was timed several times.
    spread: their interquartile range over the median, the largest.
    unmeasured: reason why there are no times.
    speed_up: over the unquantized model in `over`, end to end.
    """

    name: str
    recipe: str
    computed: str
    disk: int
    resident: int
    bits: float
    resident_bits: float
    seconds: tuple[float, ...]
    spread: float
    mode: str
    peak: int | None
    about: str = ""
    outcome: str = ""
    remark: str = ""
    psnr: Estimate | None = None
    unmeasured: str = "not measured"
    speed_up: Estimate | None = None
    over: str = "16 bit"

    @property
    def about_time(self) -> str:
        """The mode, and how much the times spread where that is too much to build on."""
        return f"{self.mode}, spread by {self.spread:.0%}" if self.spread > SPREAD else self.mode

    @property
    def verdict(self) -> str:
        """Sign and word."""
        return " ".join(OUTCOMES[self.outcome]) if self.outcome else self.remark


def summary(report: Report) -> list[SummaryRow]:
    """Return rows of the 16-bit model, in fp32 too where that was timed, of every run, and of what was timed alone."""
    rows = _unquantized(report) if report.runs else []
    for checkpoint in dict.fromkeys(run.checkpoint for run in report.runs):
        rows += [_of_run(run, report) for run in report.runs if run.checkpoint == checkpoint]
        rows += [_of_timed(timed) for timed in report.timed if timed.checkpoint == checkpoint]
    return rows


@dataclass(frozen=True)
class SummaryMetric:
    """One metric over all runs.

    named: any of the cells, for name, unit, digits and direction.
    margins, how, notes, missing: each different one once.
    baseline, floor: shared, of the first run that has one.
    cells: in the order of the runs.
    """

    named: Metric
    margins: tuple[str, ...]
    how: tuple[str, ...]
    baseline: Estimate | None
    floor: Estimate | None
    count: str
    notes: tuple[str, ...]
    missing: tuple[str, ...]
    cells: tuple[Metric | None, ...]


def summary_metrics(runs: Sequence[Run]) -> list[SummaryMetric]:
    """Return a row for each metric that any run has."""
    keys = dict.fromkeys(key for run in runs for key in run.metrics)
    return [_summary_metric([run.metrics.get(key) for run in runs]) for key in keys]


def _summary_metric(cells: Sequence[Metric | None]) -> SummaryMetric:
    metrics = [cell for cell in cells if cell is not None]
    measured = [cell for cell in metrics if cell.value is not None] or metrics
    return SummaryMetric(
        named=metrics[0],
        margins=tuple(dict.fromkeys(_margin_text(cell) for cell in measured if cell.margin)),
        how=tuple(dict.fromkeys(cell.how for cell in measured)),
        baseline=next((cell.baseline for cell in metrics if cell.baseline), None),
        floor=next((cell.floor for cell in metrics if cell.floor), None),
        count=count([cell.value for cell in metrics]),
        notes=tuple(dict.fromkeys(note for cell in metrics for note in cell.notes)),
        missing=tuple(dict.fromkeys(cell.missing for cell in metrics if cell.missing)),
        cells=tuple(cells),
    )


def _margin_text(metric: Metric) -> str:
    """Return the limits of a metric's verdict, in words; "" if it has no margin."""
    if metric.margin is None:
        return ""
    return f"{'change ' if metric.margin.on == 'change' else ''}{metric.margin.describe(metric.unit)}"


def caches(report: Report) -> list[tuple[Run, Run, Estimate | None]]:
    """Return each run that leaves steps out, the one of fewer steps that computes no less, and their difference.

    It is of the PSNR of each image, first minus second, in dB; None where it was not compared.
    """
    runs = {run.name: run for run in report.runs}
    return [
        (run, runs[run.fewer], _difference(report, run.name, run.fewer))
        for run in report.runs
        if run.fewer in runs and run.fewer is not None
    ]


def psnr_of(run: Run) -> Estimate | None:
    """Return a run's PSNR against 16 bit with all steps."""
    return run.metrics["psnr"].value if "psnr" in run.metrics else None


def _difference(report: Report, first: str, second: str) -> Estimate | None:
    for each in report.comparisons:
        if (each.first, each.second) == (first, second):
            return each.difference
        if (each.first, each.second) == (second, first):
            return each.difference.negated
    return None


def untimed(report: Report) -> list[str]:
    """Return the checkpoints that nobody has timed."""
    timed = {each.checkpoint for each in (*report.timed, *(run for run in report.runs if run.speed))}
    return [name for name in dict.fromkeys(run.checkpoint for run in report.runs) if name not in timed]


def undebugged(report: Report) -> list[str]:
    """Return the checkpoints whose layers nobody has looked at."""
    looked_at = {run.checkpoint for run in report.runs if run.debug}
    return [name for name in dict.fromkeys(run.checkpoint for run in report.runs) if name not in looked_at]


def speeds(report: Report) -> list[tuple[str, Speed]]:
    """Return (name of the row, speed) of all that was timed."""
    of_runs = [(run.name, run.speed) for run in report.runs if run.speed is not None]
    return [*of_runs, *((timed.name, timed.speed) for timed in report.timed)]


def first_speed(speed: Speed | None, side: str = "") -> SpeedRow | None:
    """Return the fastest mode at the size that was timed first, by its end-to-end p50.

    side: "16-bit" or "fp32", "" for the quantized one.
    """
    rows = [row for row in first_size(speed) if END in row.stages and row.is_reference == bool(side)]
    timed = [row for row in rows if row.side == side] if side else rows
    return min(timed, key=lambda row: row.stages[END].p50, default=None)


def first_size(speed: Speed | None) -> list[SpeedRow]:
    """Return the rows of the size that was timed first."""
    return [row for row in speed.rows if shape(row) == shape(speed.rows[0])] if speed else []


def _unquantized(report: Report) -> list[SummaryRow]:
    """Return the 16-bit model, and in fp32 where that was timed: CPUs may compute sooner with it."""
    size = report.runs[0].size.bytes_before
    in_16_bit = SummaryRow(
        name="16 bit",
        recipe=report.model,
        computed=report.reference.get("dtype", "16 bit"),
        about="the model that everything is held against; its PSNR is of two runs of it",
        psnr=next((run.metrics["psnr"].floor for run in report.runs if "psnr" in run.metrics), None),
        disk=size,
        resident=size,
        bits=16.0,
        resident_bits=16.0,
        **_times(_timed_in(report, "16-bit")),
    )
    timed = _timed_in(report, "fp32")
    if not timed:
        return [in_16_bit]
    wider: dict[str, Any] = {"name": "fp32", "computed": "float32", "resident": 2 * size, "resident_bits": 32.0}
    return [in_16_bit, replace(in_16_bit, about="", psnr=None, **wider, **_times(timed))]


def _timed_in(report: Report, side: str) -> list[SpeedRow]:
    """Return the fastest row of an unquantized side in each bench that timed it."""
    rows = (first_speed(speed, side) for _, speed in speeds(report))
    return [row for row in rows if row is not None]


def _times(timed: Sequence[SpeedRow]) -> dict[str, Any]:
    return {
        "seconds": tuple(row.stages[END].p50 / row.batch for row in timed),
        "spread": max(map(_spread, timed), default=0.0),
        "mode": ", ".join(dict.fromkeys(row.mode for row in timed)),
        "peak": max((row.peak_bytes for row in timed if row.peak_bytes is not None), default=None),
    }


def _spread(row: SpeedRow) -> float:
    times = row.stages[END]
    return times.iqr / times.p50 if times.p50 else 0.0


def _of_run(run: Run, report: Report) -> SummaryRow:
    return _quantized(
        run,
        run.in_memory,
        computed=computed(run.in_memory, run.backend),
        outcome=run.verdict.outcome,
        psnr=psnr_of(run),
        unmeasured=_why_not(run, report),
    )


def _of_timed(timed: Timed) -> SummaryRow:
    served = timed.speed.served
    remark = f"quality not measured: {command_for(timed)}"
    return _quantized(timed, served, computed=computed(served), remark=remark)


def _quantized(of: Run | Timed, served: Served | None, **fields: Any) -> SummaryRow:
    return SummaryRow(
        name=of.name,
        recipe=of.recipe,
        about=ARITHMETICS[served.arithmetic][1] if served and served.arithmetic in ARITHMETICS else "",
        disk=of.size.bytes_after,
        resident=served.resident_bytes if served else of.size.bytes_after,
        bits=of.size.bits_per_weight,
        resident_bits=served.bits_per_weight if served else of.size.bits_per_weight,
        **_times_and_gain(of.speed),
        **fields,
    )


def _times_and_gain(speed: Speed | None) -> dict[str, Any]:
    row = first_speed(speed)
    if speed is None or row is None:
        return _times(())
    ratios = [each for each in speed.speedups if each.stage == END and each.mode == row.mode and each.ratio is not None]
    return _times([row]) | ({"speed_up": ratios[0].ratio, "over": in_words(ratios[0].over)} if ratios else {})


def figures_of(run: Run) -> list[str]:
    """Return a run's main figures with their intervals, for a terminal; those of every metric are in the report."""
    figures = []
    for key in MAIN:
        metric = run.metrics.get(key)
        if metric is None:
            continue
        name = short(metric.name)
        if metric.missing or metric.value is None:
            figures.append(f"{name} not measured")
            continue
        text = f"{name} {stated(metric.value, metric.digits, metric.unit)}"
        if metric.change is not None:
            text += f", change {stated(metric.change, metric.digits, metric.unit, '+')}"
        figures.append(text)
    return figures


def command_for(timed: Timed) -> str:
    """Return the command that measures the quality of the arithmetic that was timed."""
    name = timed.speed.served.arithmetic if timed.speed.served else ""
    if name not in ARITHMETICS:
        return "no --backends of fluxq eval computes so"
    backends = name if name == "native" else f"native,{name}"
    return f"fluxq eval {shlex.quote(timed.checkpoint)} --backends {backends}"


def _why_not(run: Run, report: Report) -> str:
    """Return why a run has no times: "timed as" another run of the same checkpoint, or "not measured"."""
    timed = [each for each in (*report.runs, *report.timed) if each.checkpoint == run.checkpoint and each.speed]
    others = [each.name for each in timed if each.speed is not run.speed]
    return f"timed as {others[0]}" if others else "not measured"
