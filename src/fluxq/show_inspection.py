"""What `fluxq inspect` and `fluxq import` print for people."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import click

from fluxq.base import units

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table

    from fluxq.quantize.exchange.importing import Imported
    from fluxq.quantize.exchange.inspect import Fault, Inspection, LayerReport

_NAMED = 3  # layers of a fault, before it says how many more


def inspections(found: dict[str, Inspection], *, every_layer: bool) -> None:
    """Each model: what it is, its scope by role, the layers, what the base proved, and what is wrong."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    for component, report in found.items():
        if component:
            console.print(f"[bold]{component}[/]")
        _one(console, report, every_layer)


def _one(console: Console, report: Inspection, every_layer: bool) -> None:
    from rich.markup import escape

    family = f", {report.family} by its {report.names} names" if report.family else ", of no family that is known"
    console.print(f"[bold]{escape(report.dialect)}[/]: {escape(report.about)}; {report.container}{family}")
    for words in report.evidence:
        console.print(f"  because {escape(words)}")
    for words in report.contradictions:
        console.print(f"  [yellow]but[/] {escape(words)}")
    formats: dict[str, int] = defaultdict(int)
    for layer in report.layers:
        formats[layer.format] += 1
    held = ", ".join(f"{count} {name}" for name, count in sorted(formats.items())) or "none"
    console.print(
        f"layers: {escape(held)}; {len(report.in_16_bit)} Linears and {report.plain} other tensors are not quantized; "
        f"{report.bits_per_weight:.2f} bits per weight, {units.size(report.nbytes)}"
    )
    if report.metadata:
        console.print(f"header: {escape(', '.join(_short(key, value) for key, value in _first(report.metadata)))}")
    if report.layers:
        console.print(_scope(report))
        if every_layer:
            console.print(_layers(report.layers))
    for words in report.proofs:
        console.print(f"[green]proved[/]  {escape(words)}")
    for line in _faults(report.faults):
        console.print(line)
    if not any(fault.is_error for fault in report.faults):
        said = (
            "nothing is wrong" if report.base else "nothing is wrong as far as the file alone tells; --base proves it"
        )
        console.print(f"[green]{said}[/]")


def _scope(report: Inspection) -> Table:
    formats = sorted({name for formats in report.scope.values() for name in formats})
    table = _table("role", *formats)
    for role, counts in report.scope.items():
        table.add_row(role, *(str(counts.get(name, "")) for name in formats))
    return table


def _layers(layers: Iterable[LayerReport]) -> Table:
    from rich.markup import escape

    table = _table("layer", "N×K", "format", "scheme", "bits", "error", "role")
    for layer in layers:
        error = "" if layer.against is None else f"{layer.against.error:.3g}"
        colour = "" if layer.against is None or (layer.against.plausible and not layer.against.best) else "[red]"
        size = f"{layer.shape[0]}×{layer.shape[1]}"
        bits = f"{layer.bits_per_weight:.2f}"
        table.add_row(escape(layer.name), size, layer.format, layer.scheme, bits, colour + error, layer.role)
    return table


def _faults(faults: Iterable[Fault]) -> Iterable[str]:
    """A line for each kind, errors first, and what was found in the first layers of it."""
    from rich.markup import escape

    from fluxq.quantize.exchange.inspect import FAULTS

    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        kinds[fault.kind].append(fault)
    for kind, found in sorted(kinds.items(), key=lambda item: not FAULTS[item[0]].is_error):
        row = FAULTS[kind]
        word = "[red]wrong[/] " if row.is_error else "[yellow]note[/]  "
        layers = [fault.layer for fault in found if fault.layer]
        count = f", {len(layers)} layers" if len(layers) > 1 else ""
        yield f"{word}  [bold]{kind}[/]{count}: {escape(row.about)}"
        for fault in found[:_NAMED]:
            yield f"          {escape(f'{fault.layer}: ' * bool(fault.layer) + fault.what)}"
        if len(found) > _NAMED:
            yield f"          … and {len(found) - _NAMED} more"
        if row.cure != "none is needed":
            yield f"          cure: {escape(row.cure)}"


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(first, box=None, pad_edge=False, header_style="bold")
    for name in others:
        table.add_column(name)
    return table


def _first(metadata: dict[str, str]) -> list[tuple[str, str]]:
    return list(metadata.items())[:12]


def _short(key: str, value: str) -> str:
    return f"{key}={value if len(value) <= 60 else value[:57] + '…'}"


def imported(reports: Iterable[Imported]) -> None:
    """What became of each component, what was wrong with it, and where it is."""
    output = ""
    for report in reports:
        output = report.output
        click.echo(
            f"{report.component or 'model'}, {report.dialect}: {len(report.quantized)} Linears with their codes as "
            f"they were, {len(report.dequantized)} made 16 bit"
        )
        mended: dict[str, list[str]] = defaultdict(list)
        for layer, faults in report.mended.items():
            for fault in faults:
                mended[fault].append(layer)
        for fault, layers in mended.items():
            click.echo(f"  mended: {fault} in {len(layers)} layers ({', '.join(layers[:_NAMED])})")
        for module, why in list(report.dequantized.items())[:_NAMED]:
            click.echo(f"  16 bit: {module}: {why}")
        for words in report.notes:
            click.echo(f"  note: {words}")
    click.echo(f"checkpoint: {output}")
    click.echo(f"next: fluxq verify {output}")
