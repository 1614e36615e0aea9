"""Effect of a recipe's price of time (`gate: db_per_percent`): output SQNR and modelled time of single layers.

    python -m benchmarks.prices --json benchmarks/prices.json     drawn layers, and those of two trained networks
    python -m benchmarks.prices --write-table benchmarks/prices.json     the table of recipes/README.md

A low price keeps stages that bring little for their time, a high one leaves out stages that bring much. The gate judges
by tokens that it has; the table shows what time brings on tokens that neither fit nor gate has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch

from benchmarks.layers.compare import COMPONENT, Case, Measured, Row, Synthetic, formats_of, measure
from benchmarks.pages import between
from benchmarks.real.networks import NETWORKS
from benchmarks.real.packages import Unavailable
from benchmarks.real_models import cases_of, planned_in, short
from fluxq.base.console import progress
from fluxq.base.devices import commit, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.recipes.devices import find_device
from fluxq.recipes.plan import LayerPlan
from fluxq.recipes.recipe import load_recipe

PAGE = Path(__file__).parents[1] / "recipes" / "README.md"
MARK = "<!-- prices -->\n"
DRAWN = "drawn"
PRICES = (0.0, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Priced:
    """Means over layers. db: output SQNR; microseconds: modelled, a layer's share of its group; bits: per weight."""

    layers: str
    recipe: str
    price: float
    count: int
    db: float
    microseconds: float
    bits: float


@click.command()
@click.option("--layers", multiple=True, type=click.Choice([DRAWN, *NETWORKS]), default=(DRAWN, "whisper", "antiberty"))
@click.option("--recipe", "recipes", multiple=True, default=("nvfp4-max", "mxfp4-max"), help="Repeatable.")
@click.option("--price", "prices", multiple=True, type=float, default=PRICES, help="dB for a percent; repeatable.")
@click.option("--drawings", default=5, show_default=True, help="Of each drawn layer.")
@click.option("--size", default=512, show_default=True, help="K and N of drawn layers.")
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), help="Folder of the fetched packages.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write JSON here.")
@click.option(
    "--write-table",
    "results",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write the table of recipes/README.md from this JSON, and measure nothing.",
)
def main(
    layers: Sequence[str],
    recipes: Sequence[str],
    prices: Sequence[float],
    drawings: int,
    size: int,
    cache: Path | None,
    json_file: Path | None,
    results: Path | None,
) -> None:
    """Compare prices of time."""
    if results is not None:
        write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), MARK, MARK, table(read_json(results))))
        return
    torch.set_num_threads(1)
    try:
        rows = {(name, price): _row(name, price) for name in recipes for price in prices}
    except (ValueError, OSError, KeyError) as error:
        raise click.BadParameter(str(error), param_hint="--recipe") from None
    found: list[Priced] = []
    for name in layers:
        try:
            cases = list(_drawn(drawings, size, rows) if name == DRAWN else _trained(name, cache, rows))
        except Unavailable as error:
            click.echo(f"{name}: not measured: {error}")
            continue
        measured: dict[tuple[str, float], list[Measured]] = {key: [] for key in rows}
        for case, planned in cases:
            for key, row in rows.items():
                device = find_device(row.recipe.gate.gpu)
                measured[key] += measure(row, planned[key], case, device, row.recipe.gate.tokens)
        for (recipe, price), each in measured.items():
            means = (fmean(getattr(one, field) for one in each) for field in ("db", "microseconds", "bits"))
            found.append(Priced(name, recipe, price, len(each), *means))
            click.echo(f"{name:10} {recipe:12} {price:5} {found[-1].db:7.2f} dB {found[-1].microseconds:7.2f} µs")
        if json_file is not None:
            rows_of_file = [short(vars(one)) for one in found]
            write_json(json_file, {"commit": commit(), "versions": versions(), "rows": rows_of_file})


def table(report: Mapping[str, Any]) -> str:
    """Return a line for each recipe and price, as Markdown: means over the kinds of layers."""
    means: dict[tuple[str, float], tuple[float, float]] = {}
    for key in dict.fromkeys((row["recipe"], row["price"]) for row in report["rows"]):
        rows = [row for row in report["rows"] if (row["recipe"], row["price"]) == key]
        means[key] = fmean(row["db"] for row in rows), fmean(math.log(row["microseconds"]) for row in rows)
    lines = ["| recipe | price | dB | time | dB per percent of time added since the row above |", "|" + "---|" * 5]
    dearer: dict[str, tuple[float, float]] = {}
    for (recipe, price), (db, time) in sorted(means.items(), key=lambda item: (item[0][0], -item[0][1])):
        least = means[recipe, max(price for name, price in means if name == recipe)][1]
        gain, more = (db - dearer[recipe][0], time - dearer[recipe][1]) if recipe in dearer else (0.0, 0.0)
        bought = f"{gain / (100 * math.expm1(more)):.3f}" if more > 0 else ""
        lines.append(f"| `{recipe}` | {price:g} | {db:.2f} | {math.expm1(time - least):+.1%} | {bought} |")
        dearer[recipe] = db, time
    return "\n".join(lines)


Key = tuple[str, float]  # recipe, price
Planned = Mapping[Key, Sequence[LayerPlan]]


def _row(name: str, price: float) -> Row:
    recipe = load_recipe(name)[1]
    gate = recipe.gate.model_copy(update={"db_per_percent": price})
    return Row(formats_of(recipe.components[COMPONENT]), name, recipe.model_copy(update={"gate": gate}))


def _drawn(drawings: int, size: int, rows: Mapping[Key, Row]) -> Iterator[tuple[Case, Planned]]:
    source = Synthetic(drawings, size, "cpu")
    planned = {key: source.planned(row.recipe) for key, row in rows.items()}
    for batch in source.batches({}):
        for case in batch:
            yield case, {key: planned[key][case.group] for key in rows}


def _trained(name: str, cache: Path | None, rows: Mapping[Key, Row]) -> Iterator[tuple[Case, Planned]]:
    network = NETWORKS[name]
    cases = cases_of(network.open(cache), network)
    for group in progress(network.groups, name):
        case = cases[group.name]
        yield case, {key: planned_in(group, row, case) for key, row in rows.items()}


if __name__ == "__main__":
    main()
