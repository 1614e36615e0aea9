"""Tables on a terminal. Nothing is ever cut: a name that one cannot copy is of no use."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

import click

from fluxq.base.console import is_terminal, visible

_GAP, _INDENT = "  ", "    "
_NARROWEST = 30  # characters that a last column may be wrapped to; else it stands below its row


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> None:
    """Print rows in columns. right: align all columns but the first, which are numbers, to the right.

    Where a terminal is too narrow for sentences in the last column, these are wrapped, or stand below their rows.
    """
    from rich.cells import cell_len

    widths = [max(cell_len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    before = sum(widths[:-1]) + len(_GAP) * (len(header) - 1)
    room = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else before + widths[-1]
    has_sentences = not right and widths[-1] > _NARROWEST and any(" " in row[-1] for row in rows)

    def padded(cells: Sequence[str]) -> str:
        parts = []
        for column, cell in enumerate(cells):
            blank = " " * (widths[column] - cell_len(cell))
            parts.append(blank + cell if right and column else cell + blank)
        return _GAP.join(parts).rstrip()

    def line(row: Sequence[str]) -> str:
        if not has_sentences or before + widths[-1] <= room:
            return padded(row)
        if room - before < _NARROWEST:
            below = textwrap.wrap(row[-1], room - len(_INDENT))
            return "\n".join([padded(row[:-1]), *(_INDENT + rest for rest in below)])
        first, *more = textwrap.wrap(row[-1], room - before) or [""]
        return "\n".join([padded([*row[:-1], first]), *(" " * before + rest for rest in more)])

    echo(line(header), bold=True)
    for row in rows:
        echo(line(row))


def echo(text: str = "", *, bold: bool = False) -> None:
    """Print text for people, which may hold names that strangers chose."""
    click.echo(click.style(visible(text), bold=True) if bold else visible(text))
