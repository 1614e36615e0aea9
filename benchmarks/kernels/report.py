"""Results of kernel timings: goals, tables, and the rows by which the dispatcher chooses.

GOALS are the figures that the kernels were built for. A goal is reached, missed, or not measured; of a figure that was
measured in several places the least counts. The tables of kernels/README.md come from the result files in benchmarks/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernels.workloads import ATTENTIONS, BASELINE, FLUX_STEP, LAYERS, PRODUCTS, Case, Shape
from benchmarks.pages import between
from fluxq.kernels import dispatch, findings
from fluxq.kernels.all_ops import OPS
from fluxq.kernels.op import Op
from fluxq.kernels.tiles import CHIPS

KIND = "fluxq kernels on a GPU"  # of result files
CASE_FIELDS = ("op", "scheme", "implementation", "shared")
RESULTS = Path(__file__).resolve().parent.parent
README = RESULTS.parent / "kernels" / "README.md"


class Figures:
    """Times of a result by case and shape."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.peaks = results["peaks"]
        self.rows = {
            (Case(*(row[f] for f in CASE_FIELDS)), (row["m"], row["n"], row["k"])): row for row in results["results"]
        }

    def us(self, case: Case, shape: Shape) -> float | None:
        row = self.rows.get((case, shape))
        return row["us"] if row else None

    def fastest(self, scheme: str, shape: Shape) -> Case | None:
        """The Linear of a scheme that is fastest at a shape, as the dispatcher would choose it."""
        timed = [(us, case) for case in _linears(scheme) if (us := self.us(case, shape)) is not None]
        return min(timed, key=lambda pair: pair[0])[1] if timed else None

    def ratio(self, above: Case | None, below: Case | None, shape: Shape) -> float | None:
        times = [self.us(case, shape) if case else None for case in (above, below)]
        return times[0] / times[1] if times[0] and times[1] else None


def _linears(scheme: str) -> list[Case]:
    return [Case("linear", *product) for product in PRODUCTS if product[0] == scheme]


@dataclass(frozen=True)
class Goal:
    """values: a figure for each place where it was measured, of which the least counts."""

    about: str
    least: float
    values: Callable[[Figures], dict[str, float]]


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal with its figure, where that is, and whether it is reached."""
    rows, figures = [], Figures(results)
    for goal in GOALS:
        values = goal.values(figures)
        row: dict[str, Any] = {"goal": goal.about, "least": goal.least, "verdict": "not measured"}
        if values:
            where = min(values, key=lambda place: values[place])
            verdict = "reached" if values[where] >= goal.least else "missed"
            row |= {"figure": values[where], "where": where, "verdict": verdict}
        rows.append(row)
    return rows


def _over_shapes(
    pair: Callable[[Figures, Shape], tuple[Case | None, Case | None]], tokens: Sequence[int], least_n: int = 0
) -> Callable[[Figures], dict[str, float]]:
    """The ratio of the times of two cases at each of FLUX.1's layers."""

    def values(figures: Figures) -> dict[str, float]:
        shapes = [(m, n, k) for m in tokens for n, k in LAYERS if n >= least_n]
        ratios = {_place(shape): figures.ratio(*pair(figures, shape), shape) for shape in shapes}
        return {place: ratio for place, ratio in ratios.items() if ratio is not None}

    return values


def _quantization_costs(scheme: str) -> Callable[[Figures, Shape], tuple[Case | None, Case | None]]:
    """The product alone, and the Linear around it."""

    def pair(figures: Figures, shape: Shape) -> tuple[Case | None, Case | None]:
        return Case("matmul", scheme, "scaled_matmul"), Case("linear", scheme, "scaled_matmul")

    return pair


def _over_a_step(scheme: str) -> Callable[[Figures], dict[str, float]]:
    """Time of all products of a step of FLUX.1 over that of all its Linears."""

    def values(figures: Figures) -> dict[str, float]:
        totals = [0.0, 0.0]
        for which, op in enumerate(("matmul", "linear")):
            for count, shape in FLUX_STEP:
                us = figures.us(Case(op, scheme, "scaled_matmul"), shape)
                if us is None:
                    return {}
                totals[which] += count * us
        return {"a step of FLUX.1": totals[0] / totals[1]}

    return values


def _bandwidth(
    ops: Sequence[str], least_mb: float, tokens: Sequence[int] = ()
) -> Callable[[Figures], dict[str, float]]:
    """Share of the copy bandwidth, where at least so many MB move.

    Not of fp8_tensor: x is read twice, once for the scale of all of it.
    """

    def values(figures: Figures) -> dict[str, float]:
        return {
            f"{case.op} {case.scheme} {_place(shape)}": row["gb_per_s"] / figures.peaks["copy"]
            for (case, shape), row in figures.rows.items()
            if case.op in ops and row["mb"] >= least_mb and (not tokens or shape[0] in tokens)
            if case.op == "dequantize" or case.scheme != "fp8_tensor"
        }

    return values


def _attention(figures: Figures) -> dict[str, float]:
    """Codes included; below 1 nobody should choose it."""
    shapes = [(m, 3072, 3072) for m in LARGE]
    ratios = {_place(shape): figures.ratio(*ATTENTIONS, shape) for shape in shapes}
    return {place: ratio for place, ratio in ratios.items() if ratio is not None}


def _weight_only(figures: Figures) -> dict[str, float]:
    """Of few tokens, where only weights count, and those not too small."""
    rows = _bandwidth(("linear",), 25, (1,))(figures)
    return {place: share for place, share in rows.items() if "-16bit" in place}


def _place(shape: Shape) -> str:
    return "M x N x K = " + " x ".join(map(str, shape))


LARGE = (4096, 4608, 16384)
GOALS = (
    Goal(
        "fp8 product: speed over F.scaled_mm, M = 4096",
        0.95,
        _over_shapes(
            lambda f, s: (Case("matmul", "fp8-fp8", "F.scaled_mm"), Case("matmul", "fp8-fp8", "scaled_matmul")), (4096,)
        ),
    ),
    *(
        Goal(f"{name}: speed with quantization over without, FLUX.1", 0.92, _over_a_step(f"{name}-{name}"))
        for name in ("fp8", "int8")
    ),
    *(
        Goal(
            f"{name}: speed with quantization over without, N >= 9216",
            0.95,
            _over_shapes(_quantization_costs(f"{name}-{name}"), LARGE, 9216),
        )
        for name in ("fp8", "int8")
    ),
    *(
        Goal(
            f"{name} Linear: speed over bf16, N >= 9216",
            1.6,
            _over_shapes(lambda f, s, name=name: (BASELINE, f.fastest(f"{name}-{name}", s)), LARGE, 9216),
        )
        for name in ("fp8", "int8")
    ),
    *(
        Goal(
            f"{scheme} (W4A8): speed over fp8, M >= 4096",
            0.9,
            _over_shapes(
                lambda f, s, scheme=scheme: (
                    Case("matmul", "fp8-fp8", "scaled_matmul"),
                    Case("matmul", scheme, "w4a8_matmul"),
                ),
                LARGE,
            ),
        )
        for scheme in ("nvfp4-fp8", "nvfp4-int8")
    ),
    Goal("quantizers: share of copy bandwidth, >= 25 MB", 0.8, _bandwidth(("quantize_activation",), 25)),
    Goal("act_quantize: share of copy bandwidth, >= 25 MB", 0.8, _bandwidth(("act_quantize",), 25)),
    Goal("adaln_quantize: share of copy bandwidth, >= 25 MB", 0.8, _bandwidth(("adaln_quantize",), 25)),
    Goal("dequantize: share of copy bandwidth, >= 25 MB", 0.85, _bandwidth(("dequantize",), 25)),
    Goal("attention in fp8: speed over bf16, M >= 4096", 1.0, _attention),
    Goal("weight-only, M = 1: share of copy bandwidth, >= 25 MB", 0.75, _weight_only),
)


def measured(results: dict[str, Any]) -> dict[str, Any]:
    """Return a file for kernels/measured of a result: its Linears, for the dispatcher to choose by."""
    rows = [
        {"op": row["implementation"], **{name: row[name] for name in ("scheme", "m", "n", "k")}}
        | {"us": round(row["us"], 2)}
        for row in results["results"]
        if row["op"] == "linear" and row["shared"] == 1 and row["scheme"] != "16bit"
    ]
    return findings.document({"gpu": results["device"]["gpu"], "chip": results["chip"]}, rows)


def report(results: dict[str, Any]) -> str:
    """A result in Markdown: goals, then times."""
    device = results["device"]
    about = [device["gpu"], *(f"{name} {device[name]}" for name in ("torch", "triton")), f"commit {results['commit']}"]
    peaks = ", ".join(
        f"{name} {value:.0f} {'GB/s' if name == 'copy' else 'TFLOP/s'}" for name, value in results["peaks"].items()
    )
    lines = ["**Dry run: no GPU. These times mean nothing.**", ""] if results["dry_run"] else []
    lines += ["; ".join(about) + ".", f"Attained in the same run: {peaks}."]
    lines += [] if results["complete"] else ["The time ran out before every shape was measured."]
    return "\n".join([*lines, "", goal_table(results), "", time_table(results)])


def goal_table(results: dict[str, Any]) -> str:
    lines = ["| goal | at least | least measured | where | |", "|---|---|---|---|---|"]
    for row in goals(results):
        figure = f"{row['figure']:.2f}" if "figure" in row else "-"
        lines.append(f"| {row['goal']} | {row['least']} | {figure} | {row.get('where', '-')} | {row['verdict']} |")
    return "\n".join(lines)


def time_table(results: dict[str, Any], only: Callable[[dict], bool] = lambda row: True) -> str:
    """A line for each case and shape; speed-up: of Linears and attention over bf16."""
    figures = Figures(results)
    lines = ["| case | M x N x K | us (quartiles) | TFLOP/s | GB/s | of the roofline | over bf16 |", "|" + "---|" * 7]
    for (case, shape), row in figures.rows.items():
        if not only(row):
            continue
        baseline = Case("linear", "16bit", "F.linear", case.shared) if case.op in ("linear", "matmul") else None
        baseline = ATTENTIONS[0] if case.op == "attention" else baseline
        faster = figures.ratio(baseline, case, shape)
        cells = [
            case.name,
            " x ".join(map(str, shape)),
            f"{row['us']:.1f} ({row['us_low']:.1f} to {row['us_high']:.1f})",
            f"{row['tflops']:.0f}" if row["tflops"] else "",
            f"{row['gb_per_s']:.0f}",
            "" if row["roofline"] is None else f"{row['roofline']:.2f}",
            f"{faster:.2f}" if faster else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """kernels/README.md with its tables made anew."""
    for name, make in (("kernels", offered_table), ("measured", measured_tables)):
        text = between(text, f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->", make())
    return text


def offered_table() -> str:
    """Return a table of the kernel that runs in each format on each chip, as kernels/dispatch.py offers it.

    Formats that agree share a line. Under the table stands why others are not offered.
    """
    lines: dict[tuple[str, ...], list[str]] = {}
    refused: dict[tuple[str, str, str], list[str]] = {}  # (op, reason, chips) -> formats
    for op, name, why_not in offered():
        lines.setdefault((op.name, *("-" if why_not[chip] else op.how for chip in CHIPS)), []).append(name)
        reasons: dict[str, list[str]] = {}
        for chip, reason in why_not.items():
            if reason:
                reasons.setdefault(_in_short(reason), []).append(chip)
        for reason, chips in reasons.items():
            refused.setdefault((op.name, reason, ", ".join(chips)), []).append(name)
    table = [f"| op | formats | {' | '.join(CHIPS)} |", "|---|---|" + "---|" * len(CHIPS)]
    table += [f"| {op} | {', '.join(names)} | {' | '.join(hows)} |" for (op, *hows), names in lines.items()]
    why = [f"- `{op}` {', '.join(names)} on {chips}: {reason}" for (op, reason, chips), names in refused.items()]
    return "\n".join([*table, "", "Not offered:", "", *why])


def offered() -> Iterator[tuple[Op, str, dict[str, str]]]:
    """(op, format, chip -> why it is not offered there, or empty) of all ops."""
    for op in OPS.values():
        for name in op.formats:
            yield op, name, {chip: dispatch.refusal(op.name, name, chip) for chip in CHIPS}


def _in_short(reason: str) -> str:
    """A compiler's exception as what it says; the rest as it is."""
    match = re.search(r"type (\w+) not supported in this architecture", reason)
    return f"the chip has no type {match[1]}" if match else reason


def measured_tables(folder: Path | None = None) -> str:
    """Goals and the times at 4096 tokens of every result file of a GPU in benchmarks/."""
    parts = []
    for file, results in _result_files(folder or RESULTS):
        parts += [f"### {results['device']['gpu']} ({file.name})", ""]
        only_4096 = time_table(results, lambda row: row["m"] == 4096 and row["op"] == "linear")
        parts += [goal_table(results), "", only_4096, ""]
    return "\n".join(parts).rstrip() or "Not measured: benchmarks/ holds no result of `bench.py` on a GPU."


def _result_files(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(folder.glob("*.json")):
        summary = json.loads(file.read_text(encoding="utf-8"))
        if (
            isinstance(summary, dict)
            and summary.get("kind") == KIND
            and not summary["dry_run"]
            and not summary["wrong"]
        ):
            yield file, summary
