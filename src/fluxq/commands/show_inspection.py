"""Output of `fluxq inspect` and `fluxq import` for people."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import click
from click import style

from fluxq.base.console import size as _size
from fluxq.base.console import visible_name
from fluxq.commands.show import echo, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fluxq.quantize.exchange.importing import Imported
    from fluxq.quantize.exchange.inspect import Fault, Inspection, LayerReport

_NAMED = 3  # layers of a fault, before it says how many more


def inspections(reports: dict[str, Inspection], *, every_layer: bool) -> None:
    """Print each model: its kind, its scope by role, the layers, proofs by the base, and faults."""
    for component, report in reports.items():
        if component:
            click.echo(style(visible_name(component), bold=True))
        _one(report, every_layer)


def _one(report: Inspection, every_layer: bool) -> None:
    family = f", {report.family} by its {report.names} names" if report.family else ", of no family that is known"
    click.echo(
        f"{style(visible_name(report.dialect), bold=True)}: {visible_name(report.about)}; {report.container}{family}"
    )
    for words in report.evidence:
        click.echo(f"  because {visible_name(words)}")
    for words in report.contradictions:
        click.echo(f"  {style('but', fg='yellow')} {visible_name(words)}")
    formats = Counter(layer.format for layer in report.layers)
    counts = visible_name(", ".join(f"{count} {name}" for name, count in sorted(formats.items())) or "none")
    bits = f"{report.bits_per_weight:.2f} bits per weight" if report.layers or report.in_16_bit else "no Linears"
    click.echo(
        f"layers: {counts}; {len(report.in_16_bit)} Linears and {report.plain} other tensors are not quantized; "
        f"{bits}, {_size(report.nbytes)}"
    )
    if report.metadata:
        first = list(report.metadata.items())[:12]
        entries = (f"{key}={value if len(value) <= 60 else value[:57] + '…'}" for key, value in first)
        click.echo(f"header: {visible_name(', '.join(entries))}")
    if report.layers:
        _scope(report)
        if every_layer:
            _layers(report.layers)
    for words in report.proofs:
        click.echo(f"{style('proved', fg='green')}  {visible_name(words)}")
    for line in _faults(report.faults):
        click.echo(line)
    for words in report.unproved:
        click.echo(f"{style('not proved', fg='yellow')}  {visible_name(words)}")
    if report.is_sound:
        click.echo(style(_sound(report), fg="green"))


def _sound(report: Inspection) -> str:
    """Return the last line of a report without errors, which claims no more than was looked at."""
    if not report.base:
        return "nothing is wrong as far as the file alone tells; --base proves it" + (
            ", all but what is not proved" if report.unproved else ""
        )
    return "nothing is wrong" + (" in what the base can prove; the rest is named above" if report.unproved else "")


def _scope(report: Inspection) -> None:
    formats = sorted({name for formats in report.scope.values() for name in formats})
    rows = [(role, *(str(counts.get(name, "")) for name in formats)) for role, counts in report.scope.items()]
    print_table(("role", *formats), rows)


def _layers(layers: Iterable[LayerReport]) -> None:
    rows = []
    for layer in layers:
        error = "" if layer.against is None else f"{layer.against.error:.3g}"
        if layer.against is not None and (layer.against.best or not layer.against.plausible):
            error += " wrong"
        size, bits = f"{layer.shape[0]}×{layer.shape[1]}", f"{layer.bits_per_weight:.2f}"
        rows.append((layer.name, size, layer.format, layer.scheme, bits, error, layer.role))
    print_table(("layer", "N×K", "format", "scheme", "bits", "error", "role"), rows)


def _faults(faults: Iterable[Fault]) -> Iterable[str]:
    """Yield a line for each kind, errors first, and lines for its first layers."""
    from fluxq.quantize.exchange.inspect import FAULTS

    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        kinds[fault.kind].append(fault)
    for kind, kind_faults in sorted(kinds.items(), key=lambda item: not FAULTS[item[0]].is_error):
        row = FAULTS[kind]
        word = f"{style('wrong', fg='red')} " if row.is_error else f"{style('note', fg='yellow')}  "
        layers = [fault.layer for fault in kind_faults if fault.layer]
        count = f", {len(layers)} layers" if len(layers) > 1 else ""
        yield f"{word}  {style(kind, bold=True)}{count}: {visible_name(row.about)}"
        for fault in kind_faults[:_NAMED]:
            yield f"          {visible_name(f'{fault.layer}: ' * bool(fault.layer) + fault.what)}"
        if len(kind_faults) > _NAMED:
            yield f"          … and {len(kind_faults) - _NAMED} more"
        if row.cure != "none is needed":
            yield f"          cure: {visible_name(row.cure)}"


def imported(reports: Iterable[Imported]) -> None:
    """Print the fate of each component, its faults, and the checkpoint's path."""
    output = ""
    for report in reports:
        output = report.output
        if report.was_written:
            echo(f"{report.component or 'model'}, {report.dialect}: written before by this command")
            continue
        echo(
            f"{report.component or 'model'}, {report.dialect}: {len(report.quantized)} Linears with their codes as "
            f"they were, {len(report.dequantized)} made 16 bit"
        )
        mended: dict[str, list[str]] = defaultdict(list)
        for layer, faults in report.mended.items():
            for fault in faults:
                mended[fault].append(layer)
        for fault, layers in mended.items():
            echo(f"  mended: {fault} in {len(layers)} layers ({', '.join(layers[:_NAMED])})")
        for module, why in list(report.dequantized.items())[:_NAMED]:
            echo(f"  16 bit: {module}: {why}")
        for words in report.notes:
            echo(f"  note: {words}")
        for words in report.unproved:
            echo(f"  not proved: {words}")
    echo(f"checkpoint: {output}")
    echo(f"next: fluxq verify {shlex.quote(output)}")
