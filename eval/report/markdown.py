"""The report as Markdown: everything but charts and pictures, for pull requests, terminals and model cards."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from fluxq.base.console import code, escaped
from fluxq.eval.debug.findings import about_shares
from fluxq.eval.metrics import figures
from fluxq.eval.metrics.figures import (
    NONE,
    bits,
    computed,
    duration,
    durations,
    figure,
    mark,
    plain,
    shape,
    share,
    size,
    stated,
)
from fluxq.eval.metrics.schema import STEPS, Debug, GateOutcome, Metric, Patch, Report, Run, Speed
from fluxq.eval.report.advice import advice
from fluxq.eval.report.summary import (
    CACHES_HEAD,
    CACHES_NOTE,
    CACHES_TITLE,
    SummaryMetric,
    caches,
    psnr_of,
    speeds,
    summary,
    summary_metrics,
    undebugged,
    untimed,
)

_MAX_LAYERS = 10


def markdown(report: Report) -> str:
    """Return the report as GitHub-flavoured Markdown. Prompts do not occur in it; names are escaped."""
    lines = [
        f"# {escaped(', '.join(dict.fromkeys(run.recipe for run in report.runs)))} on {escaped(report.model)}",
        "",
        f"**{escaped(advice(report))}**",
        "",
        *summary_table(report),
        "",
        *(line for run in report.runs for line in (*verdict_lines(run), *map(_gate, run.gates), "")),
        *(f"> **Warning:** {escaped(warning)}\n" for warning in report.warnings),
        "## Quality",
        "",
        *metric_table(report.runs),
        "",
        f"95 % BCa intervals, prompts resampled with their seeds. Noise floor: {escaped(report.noise_floor)}.",
        "",
        *_caches(report),
        *_comparisons(report),
        *_drift(report.runs),
        *(line for name, speed in speeds(report) for line in _speed(name, speed)),
        *(line for run in report.runs if run.debug for line in _debug(run.name, run.debug)),
        *_unmeasured(report),
        "## Provenance",
        "",
        *_lines(("", ""), [(escaped(label), f"`{code(text)}`") for label, text in _provenance(report)]),
        "",
        "```sh",
        report.command.replace("```", "'''"),
        "```",
    ]
    return "\n".join(lines) + "\n"


def facts(run: Run) -> list[str]:
    """Return the gains of a run in short sentences: size, bits, speed."""
    before, after = run.size.bytes_before, run.size.bytes_after
    ratio = f", {before / after:.2f} times less" if before > after else ""
    parts = ", ".join(run.size.components)
    sentences = [
        f"{parts}: {size(after)} on disk instead of {size(before)}{ratio}",
        f"{run.size.bits_per_weight:.2f} bits per weight",
    ]
    served = run.in_memory
    if served is not None and (served.arithmetic != "native" or served.resident_bytes > 1.01 * after):
        in_memory = f"{size(served.resident_bytes)}, {served.bits_per_weight:.2f} bits for each weight"
        sentences.append(f"{computed(served)}, in memory {in_memory}")
    whole = [each for each in run.speed.speedups if each.stage == "end to end"] if run.speed else []
    for each in whole[:1]:
        if each.ratio is not None:
            than = "" if each.over == "16-bit" else f" as {each.over}"
            sentences.append(
                f"{stated(each.ratio, '.2f')} times as fast{than} end to end, {each.mode}{_on_cpu(run.speed)}"
            )
        else:
            sentences.append(f"no speed-up is given: {each.refused}")
    if STEPS in run.provenance:
        sentences.append(run.provenance[STEPS])
    if run.cache is not None:
        sentences.append(f"{run.cache}: computes {share(run.computed)} of all steps")
    return sentences


def summary_table(report: Report) -> list[str]:
    """Return the table to decide by: a row for each way to compute each checkpoint."""
    head = ("run", "computed", "verdict", "PSNR, dB", "on disk", "in memory", "bits per weight")
    rows = [
        (
            *(row.name, row.computed, row.verdict or NONE),
            *(stated(row.psnr, ".2f"), size(row.disk), size(row.resident), bits(row.bits, row.resident_bits)),
            f"{durations(row.seconds)}, {row.about_time}" if row.seconds else row.unmeasured,
            f"{stated(row.speed_up, '.2f')} × {row.over}" if row.speed_up else NONE,
        )
        for row in summary(report)
    ]
    return _table((*head, f"time per {report.noun}", "speed"), rows)


def _on_cpu(speed: Speed | None) -> str:
    """Return the instructions with which a CPU was timed; empty for a GPU."""
    words = speed.conditions.get("instruction set") if speed else None
    return f", on a CPU with {words}" if words else ""


def metric_table(runs: Sequence[Run]) -> list[str]:
    """Return a row for each metric, with a column for each run."""
    noun = f"{runs[0].noun}s" if runs else "images"
    head = ("metric", "16-bit", *(run.name for run in runs), "noise floor", noun, "how it is measured")
    return _table(head, [_metric_row(row) for row in summary_metrics(runs)])


def _metric_row(row: SummaryMetric) -> tuple[str, ...]:
    named = row.named
    arrow = "↑" if named.better == "higher" else "↓"
    measured = [cell for cell in row.cells if cell is not None and not cell.missing]
    hows = dict.fromkeys(text for cell in measured for text in (cell.how, *cell.notes))
    return (
        f"{named.name}{f', {named.unit}' if named.unit else ''} {arrow}",
        stated(row.baseline, named.digits),
        *(_cell(cell) for cell in row.cells),
        stated(row.floor, named.digits),
        row.count,
        "; ".join(hows or [named.how]),
    )


def _cell(metric: Metric | None) -> str:
    if metric is None:
        return NONE
    if metric.missing:
        return f"not measured: {metric.missing}"
    value = metric.value
    text = stated(value, metric.digits)
    if value is not None and value.infinite and value.mean is not None:
        text += f" + {value.infinite} identical"
    if metric.change is not None:
        text += f"; change {stated(metric.change, metric.digits, sign='+')}"
    return text


def verdict_lines(run: Run) -> list[str]:
    """Return a run's verdict and its gains."""
    opening = f"**{escaped(run.name)}:** {mark(run.verdict)} {escaped(run.verdict.text)}"
    return [opening, "", *(f"- {escaped(fact)}" for fact in facts(run))]


def _gate(gate: GateOutcome) -> str:
    text = gate.absent if gate.value is None else f"{gate.value:.5g}"
    return f"- gate `{code(gate.gate)}`: {'passed' if gate.passed else '**FAILED**'} ({text})"


def _caches(report: Report) -> list[str]:
    rows = [
        (
            *(run.name, share(run.computed), stated(psnr_of(run), ".2f")),
            *(fewer.name, share(fewer.computed), stated(psnr_of(fewer), ".2f")),
            stated(difference, ".2f", sign="+"),
        )
        for run, fewer, difference in caches(report)
    ]
    return [f"## {CACHES_TITLE}", "", *_table(CACHES_HEAD, rows), "", CACHES_NOTE, ""] if rows else []


def _comparisons(report: Report) -> list[str]:
    rows = [
        (each.first, each.second, stated(each.difference, ".2f", sign="+"), f"{each.p:.2g}", f"{each.p_holm:.2g}")
        for each in report.comparisons
    ]
    head = ("first", "second", "PSNR, first − second, dB", "p", "p, Holm")
    return [f"## Runs compared {report.noun} by {report.noun}", "", *_table(head, rows), ""] if rows else []


def _drift(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        for curve in run.drift.curves.values() if run.drift else ():
            middle = len(curve.values) // 2
            floor = figure(curve.floor[-1], curve.digits) if curve.floor else NONE
            picked = [figure(curve.values[i], curve.digits) for i in (0, middle, -1)]
            rows.append((run.name, f"{curve.name}{f', {curve.unit}' if curve.unit else ''}", *picked, floor))
    head = ("run", "curve", "first step", "middle", "last step", "noise floor, last")
    return ["## Along the denoising steps", "", *_table(head, rows), ""] if rows else []


def _speed(name: str, speed: Speed) -> list[str]:
    rows = []
    for row in speed.rows:
        where = (row.label, row.mode, shape(row))
        if row.missing:
            rows.append((*where, "", f"not measured: {row.missing}", "", ""))
            continue
        for stage, t in row.stages.items():
            spread = share(t.iqr / t.p50 if t.p50 else None)
            rows.append((*where, stage, f"{duration(t.p50)} / {duration(t.p95)}", spread, size(row.peak_bytes)))
    sizes = figures.sizes(speed)
    head = ("side", "mode", sizes, "stage", "p50 / p95", "IQR / p50", "peak memory")
    ratios = [
        (
            *(each.stage, each.mode, shape(each), each.baseline),
            stated(each.ratio, ".3g") if each.ratio else f"not given: {each.refused or ''}",
        )
        for each in speed.speedups
    ]
    cards = [
        (card.side, f"{card.gigabytes} GB", size(card.needed), "fits" if card.fits else "does not fit")
        for card in speed.cards
    ]
    return [
        f"## Speed: {escaped(name)}",
        "",
        escaped(speed.measured_on),
        "",
        *_table(head, rows),
        "",
        *(_table(("stage", "mode", sizes, "over", "its time / quantized time"), ratios) if ratios else []),
        "",
        *(_table(("side", "card", "needs", ""), cards) if cards else []),
        "",
        *(f"> **Warning:** {escaped(warning)}\n" for warning in speed.warnings),
    ]


def _debug(name: str, debug: Debug) -> list[str]:
    layers = [
        (
            *(f"`{code(layer.name)}`", escaped(layer.scheme), share(layer.damage), share(layer.gain)),
            plain(min((value for value in layer.local_sqnr_db if value is not None), default=None), ".1f"),
        )
        for layer in debug.layers[:_MAX_LAYERS]
    ]
    head = ("layer", "stored as", "damage alone", "gone when kept in 16 bit", "lowest local SQNR, dB")
    return [
        f"## Layers: {escaped(name)}",
        "",
        *(f"- {escaped(finding)}" for finding in debug.findings),
        "",
        *_lines(head, layers),
        "",
        f"{about_shares(debug.layers[:_MAX_LAYERS])}.",
        "",
        *(_patch(debug.patch) if debug.patch else []),
    ]


def _patch(patch: Patch) -> list[str]:
    opening = f"A recipe that keeps {len(patch.layers)} of them in {escaped(patch.format)}:"
    return [opening, "", "```yaml", patch.recipe.rstrip().replace("```", "'''"), "```", ""]


def _unmeasured(report: Report) -> list[str]:
    lines = [f"- speed of {escaped(name)}: run `fluxq bench {code(shlex.quote(name))}`" for name in untimed(report)]
    lines += [f"- layers of {escaped(n)}: run `fluxq debug {code(shlex.quote(n))}`" for n in undebugged(report)]
    return ["## Not measured", "", *lines, ""] if lines else []


def _provenance(report: Report) -> list[tuple[str, str]]:
    shared = {"made": report.created, "licence of the base model": report.license}
    call = ", ".join(f"{key}={value}" for key, value in report.call.items()) or "defaults"
    prompts = f"{report.protocol.prompts} ({report.protocol.prompts_digest[:16]})"
    protocol = f"{report.protocol.name}: {report.protocol.count} × {report.protocol.seeds} {report.noun}s"
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    per_run = {f"{run.checkpoint}: {label}": text for run in report.runs for label, text in run.provenance.items()}
    return [
        *(shared | report.reference | report.provenance).items(),
        ("pipeline call", call),
        ("protocol", protocol),
        ("prompts", prompts),
        *per_run.items(),
        ("versions", versions),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return _lines([*map(escaped, head)], [[*map(escaped, row)] for row in rows])


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]
