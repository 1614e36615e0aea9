"""Limits of a dialect on the formats of a plan, before there is a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.layer import QuantTensors
from fluxq.quantize.exchange.rows import Row, row_for
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymaps import original_names


def misfit(scheme: Scheme, shape: tuple[int, int], dialect: str, rows: Sequence[Row] = (), main: str = "") -> str:
    """Return the reason why no format of the dialect, or none of `rows`, holds a layer; empty if one does.

    main: the dialect's format of the main layers beside which it would be written.
    """
    try:
        row, _ = row_for(QuantTensors({}, shape, scheme), rows or DIALECTS[dialect].rows, dialect)
    except ValueError as error:
        return str(error)
    return "" if main and row.beside == main else row.unread


def misfit_beside(scheme: Scheme, main: Scheme, shape: tuple[int, int], dialect: str) -> str:
    """Return the reason why no reader of the dialect takes a layer beside main layers; empty if one does.

    Both schemes are ones that the dialect holds.
    """
    rules = DIALECTS[dialect]
    if rules.unreadable is None:
        return ""
    name, main_name = (row_for(QuantTensors({}, shape, each), rules.rows, dialect)[0].name for each in (scheme, main))
    return rules.unreadable(name, {main_name}, False)


def joined_modules(dialect: str, family: str, modules: Collection[str]) -> list[tuple[str, ...]]:
    """Return the Linears that share a tensor, and so a format, in the dialect's files; not those that stand alone.

    modules: all of the model.
    """
    if DIALECTS[dialect].names != "original":
        return []
    return [joined.parts for joined in original_names(family, modules) if len(joined.parts) > 1]
