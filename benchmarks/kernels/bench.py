"""Times of quantized Linears and kernels, each against what it replaces and against what the hardware attains.

    python -m benchmarks.kernels.bench --json bench.json          on a GPU, every kernel at the shapes of FLUX.1
    python -m benchmarks.kernels.bench --rates --json rates.json  what a step of FLUX.1-dev is made of, in a minute
    python -m benchmarks.kernels.bench --cpu --json bench.json    int8 against bf16 on one CPU thread
    python -m benchmarks.kernels.bench --write-tables             the tables of kernels/README.md anew

On a GPU (workloads.py says what, timing.py how) correctness comes first: of every case at one shape, then
again at each shape where it is timed. If one is wrong there is no report. Shares of the roofline are of peaks that were
measured in the same run. report.py makes tables of the result, and holds what the figures ought to be. `--rates` leaves
that first shape to `same_bits first`.

On a CPU pairs are timed in turns: other work on a shared machine slows both halves of a pair about equally, so their
ratio (baseline over ours: above 1 we are faster) is steadier than either time. Its median is reported with quartiles.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from benchmarks.kernels import workloads
from benchmarks.kernels.report import CASE_FIELDS, KIND, README, report, with_tables
from benchmarks.kernels.same_bits import not_proven
from benchmarks.kernels.tune import tuned_from
from benchmarks.kernels.workloads import Case, Shape
from benchmarks.sources import sources
from fluxq.base.console import first_line
from fluxq.base.devices import commit, versions
from fluxq.base.files import write_json, write_text
from fluxq.eval.speed.machine import describe
from fluxq.kernels import timing
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import NoTile, chip_of
from fluxq.recipes.formats import Scheme

DRY_CHIP = "sm_90"  # that a dry run takes the tiles of
RATES = "rates of a GPU"  # KIND of what --rates writes


@click.command()
@click.option("--cpu", is_flag=True, help="int8 against bf16 on one CPU thread, instead of everything on a GPU.")
@click.option("--size", type=(int, int, int), default=(1024, 3072, 3072), show_default=True, help="--cpu: M, K and N.")
@click.option("--rates", is_flag=True, help="GPU: products, attention and passes of a step of FLUX.1-dev alone.")
@click.option("--proofs", type=click.Path(exists=True, path_type=Path), help="--rates: folder of `same_bits first`.")
@click.option("--pairs", type=click.IntRange(min=2), default=15, show_default=True, help="--cpu: timed pairs.")
@click.option("--minutes", type=float, default=10.0, show_default=True, help="GPU: start no shape after this long.")
@click.option("--tuned", type=click.Path(exists=True, path_type=Path), help="GPU: a folder in place of kernels/tuned.")
@click.option("--dry-run", is_flag=True, help="Tiny shapes on the interpreter: that it runs, not how fast.")
@click.option("--write-tables", is_flag=True, help="Only write the tables of kernels/README.md, from result files.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write JSON here.")
def main(
    cpu: bool,
    size: tuple[int, int, int],
    rates: bool,
    proofs: Path | None,
    pairs: int,
    minutes: float,
    tuned: Path | None,
    dry_run: bool,
    write_tables: bool,
    json_file: Path | None,
) -> None:
    """Time quantized Linears and kernels, with quantization of the activations and bias included."""
    if write_tables:
        write_text(README, with_tables(README.read_text(encoding="utf-8")))
    elif cpu:
        results = [cpu_int8(*size, pairs)]
        click.echo(table(results))
        if json_file:
            summary = {
                "commit": commit(),
                "versions": versions(),
                "threads": 1,
                "results": [asdict(r) for r in results],
            }
            write_json(json_file, summary)
    else:
        if not dry_run and not torch.cuda.is_available():
            raise click.UsageError("there is no CUDA device: --cpu times a CPU, --dry-run only tries everything out")

        def note(summary: dict[str, Any]) -> None:
            if json_file:
                write_json(json_file, summary)

        with tuned_from(tuned):
            summary = run(60 * minutes, note, dry_run=dry_run, rates=rates, proofs=proofs)
        note(summary)
        if summary["wrong"]:
            raise click.ClickException("no report, these are wrong:\n" + "\n".join(map(str, summary["wrong"])))
        click.echo("\n".join(rate_lines(summary)) if rates else report(summary))


def run(
    seconds: float,
    note: Callable[[dict[str, Any]], None],
    *,
    dry_run: bool,
    rates: bool = False,
    proofs: Path | None = None,
) -> dict[str, Any]:
    """Everything measured, as the JSON file has it. note: called with what there is after each shape.

    "wrong" lists what gave wrong results or failed; what is in "results" was right. A dry run is one on the
    interpreter, its times are worth nothing. rates: instead of everything, and without the gate. proofs: a folder of
    `same_bits first`; kernels that it did not find right are left out.
    """
    begun = time.monotonic()
    device = torch.device("cpu" if dry_run else "cuda")
    chip = DRY_CHIP if dry_run else chip_of(device)
    repeats = 2 if dry_run else timing.REPEATS
    summary: dict[str, Any] = {"kind": RATES if rates else KIND, "dry_run": dry_run, "commit": commit(), "chip": chip}
    summary |= {"sources": sources(), "device": describe(device), "complete": False}
    summary |= {"peaks": {}, "results": [], "left_out": [], "wrong": []}
    with interpreting() if dry_run else contextlib.nullcontext(), torch.inference_mode():
        torch.manual_seed(0)
        summary["wrong"] = [] if rates else gate(device, chip)
        note(summary)
        if summary["wrong"]:
            return summary
        summary["peaks"] = timing.peaks(device, repeats)
        note(summary)
        for shape, cases in swept(dry_run, rates):
            if time.monotonic() - begun > seconds:
                return summary
            ours = [case for case in cases if proofs and not workloads.is_library(case)]
            refused = {case: why for case in ours if proofs and (why := not_proven([case], proofs, chip))}
            place = {"shape": "x".join(map(str, shape))}
            summary["left_out"] += [{"case": case.name, **place, "reason": why} for case, why in refused.items()]
            proven = [case for case in cases if case not in refused]
            for part, rows in measure_shape(shape, proven, device, chip, repeats, summary["peaks"]).items():
                summary[part] += rows
            note(summary)
    summary["complete"] = True
    summary["device_after"] = describe(device)
    return summary


def swept(dry_run: bool, rates: bool) -> Iterable[tuple[Shape, tuple[Case, ...]]]:
    """Shapes, each with the cases that are timed in turns there."""
    return workloads.tiny_sweep() if dry_run else workloads.rates_sweep() if rates else workloads.sweep()


def gate(device: torch.device, chip: str) -> list[dict[str, str]]:
    """Return the wrong results of every case at one shape."""
    wrong = []
    for shape, cases in workloads.tiny_sweep() if device.type == "cpu" else workloads.gate_sweep():
        for case in cases:
            _, verdict = checked(case, shape, device, chip)
            wrong += verdict.get("wrong", [])
    return wrong


def checked(case: Case, shape: Shape, device: torch.device, chip: str) -> tuple[workloads.Work | None, dict[str, list]]:
    """Operands of a case that is offered and right; otherwise a row for "left_out" or "wrong" that says why not."""
    place = {"case": case.name, "shape": "x".join(map(str, shape))}
    why_not = "" if device.type == "cpu" else workloads.why_not(case, chip)
    if why_not:
        return None, {"left_out": [place | {"reason": why_not}]}
    try:
        work = workloads.prepare(case, shape, device, chip)
        error = workloads.error(work)
    except (NoTile, torch.OutOfMemoryError) as problem:
        return None, {"left_out": [place | {"reason": first_line(problem)}]}
    except Exception as problem:  # whatever a kernel raises is its result here
        kind = "left_out" if workloads.is_library(case) else "wrong"
        return None, {kind: [place | {"reason": f"{type(problem).__name__}: {first_line(problem)}"}]}
    if not error <= workloads.TOLERANCE:
        return None, {"wrong": [place | {"reason": f"relative error {error:.2g}, at most {workloads.TOLERANCE}"}]}
    return work, {}


def measure_shape(
    shape: Shape, cases: Sequence[Case], device: torch.device, chip: str, repeats: int, peaks: dict[str, float]
) -> dict[str, list[dict]]:
    """Rows for "results", "left_out" and "wrong": the cases of a shape, timed in turns; if that fails, each alone."""
    try:
        return _in_turns(shape, cases, device, chip, repeats, peaks)
    except RuntimeError as problem:  # out of memory is one, what cannot be recorded as a graph another
        why = first_line(problem)
    if len(cases) == 1:
        place = {"case": cases[0].name, "shape": "x".join(map(str, shape))}
        return {"results": [], "left_out": [place | {"reason": why}], "wrong": []}
    alone = [measure_shape(shape, (case,), device, chip, repeats, peaks) for case in cases]
    return {part: [row for found in alone for row in found[part]] for part in alone[0]}


def _in_turns(
    shape: Shape, cases: Sequence[Case], device: torch.device, chip: str, repeats: int, peaks: dict[str, float]
) -> dict[str, list[dict]]:
    outcome: dict[str, list[dict]] = {"results": [], "left_out": [], "wrong": []}
    works: dict[Case, list[workloads.Work]] = {}
    for case in cases:
        first, verdict = checked(case, shape, device, chip)
        for part, rows in verdict.items():
            outcome[part] += rows
        if first:
            more = timing.sets_of_operands(first.bytes, device) - 1
            works[case] = [first, *(workloads.prepare(case, shape, device, chip) for _ in range(more))]
    calls = {case.name: [work.call for work in sets] for case, sets in works.items()}
    times = timing.measure(calls, device, repeats) if calls else {}
    outcome["results"] = [_row(case, shape, works[case][0], times[case.name], peaks) for case in works]
    return outcome


def _row(case: Case, shape: Shape, work: workloads.Work, timed: timing.Times, peaks: dict[str, float]) -> dict:
    """roofline: share of what peaks allow, None where the peak of its arithmetic is not known."""
    floor = work.bytes / peaks["copy"] / 1e3  # us
    if work.arithmetic:
        peak = peaks.get(work.arithmetic)
        floor = max(floor, work.flops / peak / 1e6) if peak else math.nan
    return {
        **asdict(case),
        **dict(zip("mnk", shape, strict=True)),
        "us": timed.us,
        "us_low": timed.low,
        "us_high": timed.high,
        "repeats": timed.repeats,
        "tflops": work.flops / timed.us / 1e6,
        "gb_per_s": work.bytes / timed.us / 1e3,
        "mb": work.bytes / 1e6,
        "roofline": None if math.isnan(floor) else floor / timed.us,
    }


def rate_lines(summary: dict[str, Any]) -> Iterator[str]:
    """Peaks, then a line for each case that was timed or left out."""
    yield ", ".join(f"{name} {rate:.0f}" for name, rate in summary["peaks"].items())
    for row in summary["results"]:
        shape, case = (" x ".join(str(row[axis]) for axis in "mnk")), Case(*(row[field] for field in CASE_FIELDS))
        yield f"{case.name:58} {shape:22} {row['us']:9.1f} us {row['tflops']:7.0f} TFLOP/s {row['gb_per_s']:6.0f} GB/s"
    yield from (f"{row['case']:58} {row['reason']}" for row in summary["left_out"])


# What follows is for --cpu.


@dataclass(frozen=True)
class Comparison:
    """Ours against a baseline on one shape: median milliseconds, and the quartiles of the pairs' ratios."""

    name: str
    baseline: str
    shape: tuple[int, int, int]  # (M, K, N)
    pairs: int
    ours_ms: float
    baseline_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float


@torch.inference_mode()
def cpu_int8(m: int, k: int, n: int, pairs: int) -> Comparison:
    """int8 weights and activations against bf16, (M, K) by (N, K), on one thread."""
    baseline = nn.Linear(k, n, dtype=torch.bfloat16)
    weight = QuantizedTensor.quantize(baseline.weight, "int8")
    ours = QuantLinear.from_quantized(weight, baseline.bias, Scheme.parse("int8-int8"))
    x = torch.randn(m, k, dtype=torch.bfloat16)  # (M, K)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = time_pairs(lambda: ours(x), lambda: baseline(x), pairs)
    finally:
        torch.set_num_threads(threads)
    return summarize("int8-int8", "bf16", (m, k, n), times)


def time_pairs(ours: Callable[[], object], baseline: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """(ours, baseline) in seconds, `pairs` times, after an untimed call of each; the order alternates."""

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    ours()
    baseline()
    times = []
    for pair in range(pairs):
        if pair % 2:
            late = seconds(baseline)
            times.append((seconds(ours), late))
        else:
            times.append((seconds(ours), seconds(baseline)))
    return times


def summarize(name: str, baseline: str, shape: tuple[int, int, int], times: list[tuple[float, float]]) -> Comparison:
    """Medians and quartiles of pairs of (ours, baseline) seconds."""
    low, ratio, high = statistics.quantiles([theirs / ours for ours, theirs in times], n=4, method="inclusive")
    ours_ms, baseline_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return Comparison(name, baseline, shape, len(times), ours_ms, baseline_ms, ratio, low, high)


def table(results: list[Comparison]) -> str:
    """Results as lines of text, one per comparison, under a heading."""
    lines = [f"{'scheme':<12} {'M x K x N':<18} {'ours ms':>9} {'baseline ms':>18} {'speedup (quartiles)':>22}"]
    for r in results:
        shape = " x ".join(map(str, r.shape))
        baseline = f"{r.baseline} {r.baseline_ms:.2f}"
        speedup = f"{r.ratio:.2f} ({r.ratio_low:.2f} to {r.ratio_high:.2f})"
        lines.append(f"{r.name:<12} {shape:<18} {r.ours_ms:>9.2f} {baseline:>18} {speedup:>22}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
