"""The table that pages, Markdown and terminals begin with: a row for each way to compute each checkpoint.

What one row says was measured of one arithmetic: quality, memory and time are never those of different ones. So what
`fluxq bench` timed and `fluxq eval` did not look at has a row of its own, with the command that would.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fluxq.eval.metrics.figures import ARITHMETICS, OUTCOMES, computed, short, stated
from fluxq.eval.metrics.schema import SPREAD, Estimate, Report, Run, Served, Speed, SpeedRow, Timed, in_words
from fluxq.eval.report.charts import END, first_speed

MAIN = ("psnr", "lpips", "clip_score", "image_reward", "velocity_error")


@dataclass(frozen=True)
class Row:
    """One way to compute one checkpoint, or the 16-bit model, which has no verdict.

    computed: the arithmetic in a few words, about: in more. outcome: a key of OUTCOMES, "" without a verdict. remark:
    what stands in place of the verdict. psnr: of the 16-bit model, against a second run of it. disk, resident: bytes of
    the quantized components. bits: per weight, stored; resident_bits: in memory. seconds: of one image, several where
    it was timed several times. spread: their interquartile range over the median, the largest. unmeasured: why there
    are none. speed_up: over the unquantized model in `over`, end to end.
    """

    name: str
    recipe: str
    computed: str
    about: str
    outcome: str
    remark: str
    psnr: Estimate | None
    disk: int
    resident: int
    bits: float
    resident_bits: float
    seconds: tuple[float, ...]
    spread: float
    mode: str
    unmeasured: str
    peak: int | None
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


def summary(report: Report) -> list[Row]:
    """Return the 16-bit model, in fp32 too where that was timed, and every run and what was timed alone, in order."""
    rows = [_sixteen_bit(report), *_in_fp32(report)] if report.runs else []
    for checkpoint in dict.fromkeys(run.checkpoint for run in report.runs):
        rows += [_of_run(run, report) for run in report.runs if run.checkpoint == checkpoint]
        rows += [_of_timed(timed) for timed in report.timed if timed.checkpoint == checkpoint]
    return rows


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


def _sixteen_bit(report: Report) -> Row:
    first = report.runs[0]
    psnr = next((run.metrics["psnr"].floor for run in report.runs if "psnr" in run.metrics), None)
    return Row(
        name="16 bit",
        recipe=report.model,
        computed=report.reference.get("dtype", "16 bit"),
        about="the model that everything is held against; its PSNR is of two runs of it",
        outcome="",
        remark="",
        psnr=psnr,
        disk=first.size.bytes_before,
        resident=first.size.bytes_before,
        bits=16.0,
        resident_bits=16.0,
        **_times_of(_timed_in(report, "16-bit")),
    )


def _in_fp32(report: Report) -> list[Row]:
    """On CPUs that may compute sooner with it; none where nobody timed it."""
    timed, size = _timed_in(report, "fp32"), report.runs[0].size
    if not timed:
        return []
    row = Row(
        name="fp32",
        recipe=report.model,
        computed="float32",
        about="",
        outcome="",
        remark="",
        psnr=None,
        disk=size.bytes_before,
        resident=2 * size.bytes_before,
        bits=16.0,
        resident_bits=32.0,
        **_times_of(timed),
    )
    return [row]


def _timed_in(report: Report, side: str) -> list[SpeedRow]:
    """Return the fastest row of an unquantized side in each bench that timed it."""
    found = (first_speed(speed, reference=True, side=side) for _, speed in speeds(report))
    return [row for row in found if row is not None]


def _times_of(timed: Sequence[SpeedRow]) -> dict[str, Any]:
    return {
        "seconds": tuple(_seconds(row) for row in timed),
        "spread": max(map(_spread, timed), default=0.0),
        "mode": ", ".join(dict.fromkeys(row.mode for row in timed)),
        "unmeasured": "not measured",
        "peak": max((row.peak_bytes for row in timed if row.peak_bytes is not None), default=None),
    }


def _of_run(run: Run, report: Report) -> Row:
    served = run.in_memory
    return Row(
        name=run.name,
        recipe=run.recipe,
        computed=computed(served, run.backend),
        about=_about(served),
        outcome=run.verdict.outcome,
        remark="",
        psnr=run.metrics["psnr"].value if "psnr" in run.metrics else None,
        disk=run.size.bytes_after,
        resident=served.resident_bytes if served else run.size.bytes_after,
        bits=run.size.bits_per_weight,
        resident_bits=served.bits_per_weight if served else run.size.bits_per_weight,
        **_times(run.speed),
        unmeasured=_why_not(run, report),
    )


def _of_timed(timed: Timed) -> Row:
    served = timed.speed.served
    return Row(
        name=timed.name,
        recipe=timed.recipe,
        computed=computed(served),
        about=_about(served),
        outcome="",
        remark=f"quality not measured: {command_for(timed)}",
        psnr=None,
        disk=timed.size.bytes_after,
        resident=served.resident_bytes if served else timed.size.bytes_after,
        bits=timed.size.bits_per_weight,
        resident_bits=served.bits_per_weight if served else timed.size.bits_per_weight,
        **_times(timed.speed),
        unmeasured="not measured",
    )


def figures_of(run: Run) -> list[str]:
    """Return a run's main figures with their intervals, for a terminal; those of every metric are in the report."""
    found = []
    for key in MAIN:
        metric = run.metrics.get(key)
        if metric is None:
            continue
        name = short(metric.name)
        if metric.missing or metric.value is None:
            found.append(f"{name} not measured")
            continue
        text = f"{name} {stated(metric.value, metric.digits, metric.unit)}"
        if metric.change is not None:
            text += f", change {stated(metric.change, metric.digits, metric.unit, '+')}"
        found.append(text)
    return found


def command_for(timed: Timed) -> str:
    """Return what would measure the quality of the arithmetic that was timed."""
    name = timed.speed.served.arithmetic if timed.speed.served else ""
    if name not in ARITHMETICS:
        return "no --backends of fluxq eval computes so"
    backends = name if name == "native" else f"native,{name}"
    return f"fluxq eval {shlex.quote(timed.checkpoint)} --backends {backends}"


def _about(served: Served | None) -> str:
    return ARITHMETICS[served.arithmetic][1] if served and served.arithmetic in ARITHMETICS else ""


def _why_not(run: Run, report: Report) -> str:
    """Return why a run has no times: "timed as" another run of the same checkpoint, or "not measured"."""
    others = [name for name, speed in _timed_of(run.checkpoint, report) if speed is not run.speed]
    return f"timed as {others[0]}" if others else "not measured"


def _timed_of(checkpoint: str, report: Report) -> list[tuple[str, Speed | None]]:
    runs = [(run.name, run.speed) for run in report.runs if run.checkpoint == checkpoint and run.speed]
    return [*runs, *((timed.name, timed.speed) for timed in report.timed if timed.checkpoint == checkpoint)]


def _times(speed: Speed | None) -> dict[str, Any]:
    row = first_speed(speed, reference=False)
    if speed is None or row is None:
        return {"seconds": (), "spread": 0.0, "mode": "", "peak": None}
    ratios = [each for each in speed.speedups if each.stage == END and each.mode == row.mode and each.ratio is not None]
    said = {"speed_up": ratios[0].ratio, "over": in_words(ratios[0].over)} if ratios else {}
    return {"seconds": (_seconds(row),), "spread": _spread(row), "mode": row.mode, "peak": row.peak_bytes, **said}


def _seconds(row: SpeedRow) -> float:
    return row.stages[END].p50 / row.batch


def _spread(row: SpeedRow) -> float:
    times = row.stages[END]
    return times.iqr / times.p50 if times.p50 else 0.0
