"""Comparison of recipes by quality, bits and time: a table that anyone can make again.

    python -m benchmarks.layers.compare                                    synthetic layers, all 4-bit recipes and int8
    python -m benchmarks.layers.compare --layers tiny --recipe nvfp4 --recipe nvfp4-max --plot nvfp4.svg
    python -m benchmarks.layers.compare --peers --json rows.json           also other packages that are installed

dB is the SQNR of a layer's output, 10 log10 Σ y² / Σ (y^ - y)² with y = x Wᵀ and y^ what the quantized layer computes,
as kernels/ops.py defines it in fp32. The tokens x are three sets: one to fit on, one that the gate decides by, and one
that neither has seen, which gives the number. (One exception, in a model: NVFP4's input scale of an untransformed input
follows from the largest value of all tokens.) Means are of layers and say little of a model: `fluxq eval` compares
images.

Each recipe stands beside its formats rounded to nearest and beside what the literature calls best, made of the stages
here: SVDQuant (smoothing, rank 1/96) alone and with GPTQ for 4-bit weights and activations, Hadamard for 8-bit ones.
"""

from __future__ import annotations

import collections
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
import torch
from torch import Tensor, nn

from benchmarks.layers import peers
from benchmarks.layers.synthetic import draw
from fluxq.base.console import progress
from fluxq.base.devices import commit, versions
from fluxq.base.files import write_json, write_text
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.calibrate.blocks import Replay, block_names
from fluxq.calibrate.calls import capture_calls
from fluxq.calibrate.capture import Sampling, images_per_batch
from fluxq.calibrate.inputs import GroupInputs, InputsBuilder
from fluxq.calibrate.prompts import load_prompts
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.group import GroupLayer, fit_group, price_on
from fluxq.quantize.structure import component_family, denoisers_of, list_linears
from fluxq.recipes.cost import group_seconds
from fluxq.recipes.devices import Device, find_device
from fluxq.recipes.family import Maker
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import Folding, LayerPlan, LinearShape, component_recipe, make_plan, rotated_by, with_method
from fluxq.recipes.recipe import Component, Gate, LowRank, Recipe, Rounding, load_recipe, shipped_recipes

T = TypeVar("T")

COMPONENT = "transformer"  # the entry of a recipe that serves every denoiser
MADE_BY: dict[str, Maker] = {"adaln": "norm", "ffn": "activation", "attn": "attention"}  # the families compared
FIT_TOKENS = 8192  # of a synthetic layer
GATE_TOKENS = JUDGE_TOKENS = 1024  # at most, of a model's layer
STEPS = 4  # denoising steps of a model that are looked at
_SEED = 1 << 20


@click.command()
@click.option("--layers", default="synthetic", show_default=True, help="synthetic, tiny, a pipeline folder or hub id.")
@click.option("--recipe", "recipes", multiple=True, help="A recipe, shipped or a file (repeatable).")
@click.option("--drawings", type=click.IntRange(min=1), default=5, show_default=True, help="Of each synthetic layer.")
@click.option(
    "--size", type=click.IntRange(min=64), default=512, show_default=True, help="K and N of synthetic layers."
)
@click.option("--images", type=click.IntRange(min=2), default=32, show_default=True, help="A model is fitted on.")
@click.option("--device", default="cpu", show_default=True, help="Torch device that quantizes.")
@click.option("--gpu", default="b200", show_default=True, help="GPU that run time is modelled on.")
@click.option("--tokens", type=click.IntRange(min=1), default=4608, show_default=True, help="That it is modelled for.")
@click.option("--peers", "with_peers", is_flag=True, help="Also torchao, auto-round, optimum-quanto, nvidia-modelopt.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write JSON here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write dB over bits here, as SVG.")
@click.option("--peer", nargs=2, hidden=True, help="In a process of its own: a package, and a file of layers.")
@click.option("--configuration", "configurations", multiple=True, hidden=True, help="Those of --peer to run.")
def main(
    layers: str,
    recipes: tuple[str, ...],
    drawings: int,
    size: int,
    images: int,
    device: str,
    gpu: str,
    tokens: int,
    with_peers: bool,
    json_file: Path | None,
    plot: Path | None,
    peer: tuple[str, str] | None,
    configurations: tuple[str, ...],
) -> None:
    """Compare recipes by bits, output SQNR, seconds to quantize and modelled run time."""
    if peer is not None:
        for outcome in peers.measured_here(peer[0], Path(peer[1]), configurations):
            click.echo(outcome)
        return
    where = _checked("--gpu", lambda: find_device(gpu))
    _checked("--device", lambda: torch.empty(0, device=device))
    rows = rows_of(recipes or default_recipes())
    source = _source(layers, drawings, size, images, device)
    packages = [name for name in peers.PEERS if with_peers and peers.is_installed(name)]
    try:
        found = list(_measured(source, rows, where, tokens, packages))
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    summaries = _summaries(found)
    _print(summaries, source.columns, where)
    for name, other in peers.PEERS.items():
        if with_peers and name not in packages:
            click.echo(f"{name}: not compared, because it is not installed; `pip install {other.package}`")
    if json_file is not None:
        write_json(json_file, _report(source, where, tokens, summaries, found, packages))
    if plot is not None:
        write_text(plot, svg(summaries))


def _checked(option: str, read: Callable[[], T]) -> T:
    """Return what `read` returns; raise its errors as click.BadParameter of the option."""
    try:
        return read()
    except (ValueError, OSError, RuntimeError, AssertionError) as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def _measured(
    source: Source, rows: Sequence[Row], gpu: Device, tokens: int, packages: Sequence[str]
) -> Iterator[Measured]:
    """Every layer under every row, then by the packages."""
    planned = {row: source.planned(row.recipe) for row in rows}
    for batch in source.batches(planned):
        for case in batch:
            for row in rows:
                yield from measure(row, planned[row].get(case.group, ()), case, gpu, tokens)
        for name in packages:
            yield from _measured_by(name, batch)


# --- rows


@dataclass(frozen=True, eq=False)
class Row:
    """A line of the table: a recipe, or a reference made of one. formats: weights-activations."""

    formats: str
    name: str
    recipe: Recipe


def default_recipes() -> list[str]:
    """Return the shipped recipes in 4 bits, and int8."""
    loaded = {name: load_recipe(name)[1].components.get(COMPONENT) for name in shipped_recipes()}
    return [name for name, part in loaded.items() if part and (_bits(part) == 4 or part.weights.row.name == "int8")]


def _bits(component: Component) -> int:
    return component.weights.row.element.bits


def formats_of(component: Component) -> str:
    """Return the formats of weights and activations, in one word."""
    return f"{component.weights.row.name}-{component.activations.row.name if component.activations else '16bit'}"


def rows_of(names: Sequence[str]) -> list[Row]:
    """Return rows by formats, in the order of the recipes: rounded to nearest, references, the recipes themselves."""
    groups: dict[str, list[Row]] = {}
    for name in names:
        stem, recipe = _checked("--recipe", lambda name=name: load_recipe(name))
        if COMPONENT not in recipe.components:
            raise click.BadParameter(f"{name}: says nothing about a {COMPONENT}", param_hint="--recipe")
        formats = formats_of(recipe.components[COMPONENT])
        if formats not in groups:
            groups[formats] = [Row(formats, name, made) for name, made in _references(recipe)]
        row = Row(formats, f"{stem} {recipe.profile}", recipe)
        if any(row.name == other.name for other in groups[formats]):
            raise click.BadParameter(f"{name}: a second recipe called {stem}; rename the file", param_hint="--recipe")
        groups[formats].append(row)
    return [row for rows in groups.values() for row in rows]


def _references(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Rounding to nearest in a recipe's formats, and what is published for them; no price is put on that."""
    yield "RTN", recipe.model_copy(update={"profile": "rtn"})
    part = recipe.components[COMPONENT]
    if part.activations is None or recipe.calibration is None:
        return
    operands = {
        name: operand.model_copy(update={"four_over_six": False})
        for name, operand in (("weights", part.weights), ("activations", part.activations))
    }
    if _bits(part) == 4:
        low_rank, nearest, feedback = LowRank(rank="1/96"), Rounding(), Rounding(method="gptq")
        for name, rounding in (("SVDQuant", nearest), ("SVDQuant + GPTQ", feedback)):
            changes = {**operands, "transforms": ["smooth"], "low_rank": low_rank, "rounding": rounding}
            yield name, _changed(recipe, changes)
    else:
        changes = {"transforms": ["center", "smooth", "hadamard"], "rounding": Rounding(method="gptq")}
        yield "Hadamard + GPTQ", _changed(recipe, changes)


def _changed(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """The recipe with another transformer entry, the balanced profile and nothing that forbids or prices a stage."""
    part = recipe.components[COMPONENT].model_copy(update=dict(changes))
    free = {"profile": "balanced", "compat": "full", "gate": Gate(db_per_percent=0)}
    return recipe.model_copy(update={"components": {COMPONENT: part}, **free})


# --- layers


@dataclass(frozen=True)
class Case:
    """Linears that share an input. column: family or role. group: as plans call it. weights: name -> (N, K) fp32.

    inputs: to fit on and for the gate. fit: tokens for packages that calibrate. judge: (M, K), seen by nothing else.
    """

    column: str
    drawing: int
    group: str
    weights: Mapping[str, Tensor]
    inputs: GroupInputs
    fit: Tensor
    judge: Tensor
    judge_weight: Tensor | None = None  # (M,) of these, if they do not count alike


Planned = Mapping[str, Sequence[LayerPlan]]  # group -> what a recipe makes of its Linears


class Source(Protocol):
    """Source of layers. columns: families or roles."""

    columns: tuple[str, ...]

    def describe(self) -> dict[str, object]: ...

    def planned(self, recipe: Recipe) -> Planned: ...

    def batches(self, planned: Mapping[Row, Planned]) -> Iterator[list[Case]]: ...


def _source(layers: str, drawings: int, size: int, images: int, device: str) -> Source:
    if layers == "synthetic":
        return Synthetic(drawings, size, device)
    return _checked("--layers", lambda: Model(resolve_model(layers), images, device))


def planned_alone(
    layer: LayerPlan, recipe: Recipe, folding: tuple[Folding, ...] | str = (), name: str = ""
) -> LayerPlan:
    """Return a layer of no model with what a recipe makes of it. What makes its input is in the recipe's main format.

    folding: as `with_method` takes it.
    name: of the layer in an error, if not its own.
    """
    part = recipe.components[COMPONENT]
    row = part.activations.row if part.activations else None
    is_fitted = recipe.profile != "rtn"
    is_static = is_fitted and recipe.needs_data(part) and row is not None and row.has_tensor_scale
    scheme = Scheme(part.weights.row, row, static_input=is_static)
    scheme.weights.check_shape(layer.n, layer.k, name or layer.name)
    layer = rotated_by(replace(layer, scheme=scheme), part)
    powers_of_two = not part.weights.row.has_row_scale
    return with_method(layer, part, recipe.profile, folding, powers_of_two=powers_of_two)


class Synthetic:
    """Single layers of each family, all of them taken as foldable into what makes their input."""

    columns = tuple(MADE_BY)

    def __init__(self, drawings: int, size: int, device: str) -> None:
        self.drawings, self.size, self.device = drawings, size, device

    def describe(self) -> dict[str, object]:
        return {"layers": "synthetic", "drawings": self.drawings, "k": self.size, "n": self.size, "fit": FIT_TOKENS}

    def planned(self, recipe: Recipe) -> Planned:
        size = self.size
        layers = [LayerPlan(name, size, size, name, name, False, None, "", made_by=by) for name, by in MADE_BY.items()]
        return {layer.group: [planned_alone(layer, recipe, name="a synthetic layer")] for layer in layers}

    def batches(self, planned: Mapping[Row, Planned]) -> Iterator[list[Case]]:
        for drawing in progress(range(self.drawings), "Comparing"):
            yield [self._case(family, drawing) for family in MADE_BY]

    def _case(self, family: str, drawing: int) -> Case:
        size = self.size
        layer = draw(family, k=size, n=size, fit=FIT_TOKENS, held=GATE_TOKENS + JUDGE_TOKENS, seed=drawing)
        fit, gate, judge = (x.to(self.device) for x in (layer.fit, layer.held[:GATE_TOKENS], layer.held[GATE_TOKENS:]))
        builder = InputsBuilder(family, size, device=self.device, calls=(1, 1), most_held=GATE_TOKENS)
        builder.add(fit)
        builder.add(gate, held_out=True)
        inputs = builder.finish(lambda: iter([(fit, 1.0)]))
        return Case(family, drawing, family, {family: layer.weight.to(self.device)}, inputs, fit, judge)


class Model:
    """A model's Linears, block by block, with the inputs that they get in 16 bit. Tokens of all steps count alike."""

    def __init__(self, folder: ModelFolder, images: int, device: str) -> None:
        denoisers = denoisers_of(folder)
        if not denoisers:
            raise ValueError(f"{folder.name}: has no transformer or UNet; it has {', '.join(folder.components)}")
        self.folder, self.images, self.device = folder, images, device
        self.component = denoisers[0]  # of two experts the first
        self.family = component_family(folder, self.component)
        self.linears: list[LinearShape] = list_linears(folder, self.component)
        self.columns = tuple(role for role in self.family.roles if role != "modulation")

    def describe(self) -> dict[str, object]:
        return {"layers": self.folder.name, "images": self.images, "steps": STEPS}

    def planned(self, recipe: Recipe) -> Planned:
        part = component_recipe(recipe, self.component, self.family)
        plan = make_plan(
            self.family,
            self.component,
            part,
            self.linears,
            static_inputs=recipe.profile != "rtn" and recipe.needs_data(part),
            profile=recipe.profile,
            compat=recipe.compat,
        )
        return plan.statistics_groups()

    def batches(self, planned: Mapping[Row, Planned]) -> Iterator[list[Case]]:
        groups: dict[str, dict[str, LayerPlan]] = {}  # group -> those of its Linears that any recipe quantizes
        for plan in planned.values():
            for name, layers in plan.items():
                groups.setdefault(name, {}).update({layer.name: layer for layer in layers})
        pipe: Any = load_pipeline(self.folder, device=self.device)
        model = getattr(pipe, self.component)
        half = max(1, self.images // 4)  # of the images held out: for the gate, and to judge by
        call = self.folder.generation_defaults
        items = load_prompts("default", self.folder).items(self.images + 2 * half, _SEED)
        digests = {self.component: self.folder.digest(self.component)}
        size = math.gcd(images_per_batch(call), half)  # so that each half is whole calls
        sampling = Sampling(call, STEPS, digests, size)
        with tempfile.TemporaryDirectory() as folder:
            calls = capture_calls(
                pipe,
                {self.component: block_names(self.family, model)},
                items[: self.images],
                items[self.images :],
                sampling,
                folder=Path(folder) / "calls",
            )[self.component]
            replay = Replay(model, calls, Path(folder) / "outputs")
            for block in progress(replay, "Comparing", len(replay.blocks)):
                own = {name: list(of.values()) for name, of in groups.items() if name.startswith(f"{block.name}.")}
                inputs = block.observe(
                    {name: layers[0].name for name, layers in own.items()},
                    segments={name: layers[0].segments for name, layers in own.items()},
                    advance=True,
                    most_held=GATE_TOKENS + JUDGE_TOKENS,
                )
                yield [self._case(model, layers, inputs[name]) for name, layers in own.items()]

    def _case(self, model: nn.Module, layers: Sequence[LayerPlan], inputs: GroupInputs) -> Case:
        half = len(inputs.held_out) // 2
        weight = inputs.held_weight[:half]
        known = replace(inputs, held_out=inputs.held_out[:half], held_weight=weight / weight.mean())
        weights = {layer.name: model.get_parameter(f"{layer.name}.weight").detach().float() for layer in layers}
        group, fit, judge = layers[0].group, inputs.fit.float(), inputs.held_out[half:].float()
        return Case(layers[0].role, 0, group, weights, known, fit, judge, inputs.held_weight[half:])


# --- numbers


@dataclass(frozen=True)
class Measured:
    """One layer under one row.

    own_bits: of its format alone.
    microseconds: modelled.
    kept: stages.
    error: instead of numbers.
    median_db, low_db: median and 10th percentile of the tokens' own SQNR.
    """

    formats: str
    row: str
    column: str
    drawing: int
    layer: str = ""
    db: float | None = None
    bits: float | None = None
    own_bits: float | None = None
    seconds: float | None = None
    microseconds: float | None = None
    scheme: str = ""
    kept: tuple[str, ...] = ()
    error: str = ""
    median_db: float | None = None
    low_db: float | None = None


@torch.no_grad()
def measure(
    row: Row,
    layers: Sequence[LayerPlan],
    case: Case,
    gpu: Device,
    tokens: int,
    kept: dict[str, QuantLinear] | None = None,
) -> Iterator[Measured]:
    """Quantize and judge a row's layers of one group. kept: name -> layer, to be filled."""
    for members in _alike(layers):
        shapes = [(layer.n, layer.k) for layer in members]
        given = [
            GroupLayer(layer.name, case.weights[layer.name], None, layer.scheme, bool(layer.scale_group))
            for layer in members
            if layer.scheme is not None
        ]
        gate, made_by = row.recipe.gate, members[0].made_by
        price = price_on(find_device(gate.gpu), shapes, gate.tokens, made_by)
        start = time.perf_counter()
        group = fit_group(given, case.inputs, members[0].method, price=price, rate=gate.db_per_percent)
        seconds = (time.perf_counter() - start) / len(members)
        modelled = group_seconds(
            shapes, [layer.scheme for layer in group.layers.values()], gpu, tokens, made_by=made_by
        )
        if kept is not None:
            kept.update(group.layers)
        for (name, layer), (n, k) in zip(group.layers.items(), shapes, strict=True):
            y, approximate = case.judge @ case.weights[name].T, layer(case.judge)
            median_db, low_db = token_db(y, approximate)
            if case.judge_weight is not None:
                y, approximate = (each * case.judge_weight.sqrt().unsqueeze(1) for each in (y, approximate))
            yield Measured(
                row.formats,
                row.name,
                case.column,
                case.drawing,
                name,
                peers.output_db(y, approximate),
                layer.bits_per_weight,
                layer.scheme.weights.stored_bits(n, k) / (n * k),
                seconds,
                1e6 * modelled / len(members),
                str(layer.scheme),
                tuple(stage.name for stage in group.stages if stage.kept),
                median_db=median_db,
                low_db=low_db,
            )


def token_db(y: Tensor, approximate: Tensor) -> tuple[float, float]:
    """Return (median, 10th percentile) over the tokens of y (M, N) of each one's own SQNR, in dB."""
    lost = (approximate - y).double().square().sum(-1)
    each = 10 * torch.log10(y.double().square().sum(-1).clamp(min=1e-30) / lost.clamp(min=1e-30))
    median, low = torch.quantile(each, torch.tensor([0.5, 0.1], dtype=torch.float64)).tolist()
    return median, low


def _alike(layers: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """The layers of a group by what they make of x; only those are fitted together."""
    alike: dict[object, list[LayerPlan]] = {}
    for layer in layers:
        if layer.scheme is not None:
            alike.setdefault((layer.scheme.activations, layer.scheme.static_input), []).append(layer)
    return list(alike.values())


def _measured_by(peer: str, batch: Sequence[Case]) -> Iterator[Measured]:
    layers = [peers.PeerLayer(w, case.fit, case.judge) for case in batch for w in case.weights.values()]
    columns = [(case.column, case.drawing) for case in batch for _ in case.weights]
    for outcome in peers.measured(peer, layers):
        for (column, drawing), values in zip(columns, outcome.layers or [None] * len(columns), strict=True):
            if values is None:
                yield Measured(peer, outcome.configuration, column, drawing, error=outcome.error)
            else:
                yield Measured(
                    peer, outcome.configuration, column, drawing, "", values.db, values.bits, None, values.seconds
                )


# --- what is shown


@dataclass(frozen=True)
class Summary:
    """A row of the table. bits: mean; most_above: the largest part of them beyond the format's own.

    db: mean by column; mean, error: of all, with the standard error over drawings. seconds, microseconds: of a layer.
    """

    formats: str
    row: str
    bits: float | None
    most_above: float | None
    db: Mapping[str, float]
    mean: float | None
    error: float | None
    seconds: float | None
    microseconds: float | None
    kept: str


def _summaries(found: Sequence[Measured]) -> list[Summary]:
    rows: dict[tuple[str, str], list[Measured]] = {}
    for one in found:
        rows.setdefault((one.formats, one.row), []).append(one)
    return [_summary(formats, row, measured) for (formats, row), measured in rows.items()]


def _summary(formats: str, row: str, measured: Sequence[Measured]) -> Summary:
    columns, drawings = collections.defaultdict(list), collections.defaultdict(lambda: collections.defaultdict(list))
    for one in measured:
        if one.db is not None:
            columns[one.column].append(one.db)
            drawings[one.drawing][one.column].append(one.db)
    by_column = {column: statistics.fmean(values) for column, values in columns.items()}
    by_drawing = [statistics.fmean(map(statistics.fmean, of.values())) for of in drawings.values()]
    count = len(by_drawing)
    above = [one.bits - one.own_bits for one in measured if one.bits is not None and one.own_bits is not None]
    return Summary(
        formats,
        row,
        _mean(one.bits for one in measured),
        max(above, default=None),
        by_column,
        _mean(by_drawing),
        statistics.stdev(by_drawing) / count**0.5 if count > 1 else None,
        _mean(one.seconds for one in measured),
        _mean(one.microseconds for one in measured),
        _kept(measured),
    )


def _mean(values: Any) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if there else None


def _kept(measured: Sequence[Measured]) -> str:
    """Stages that were kept, in how many of the layers if not in all; or why there is no number."""
    errors = [one.error for one in measured if one.error]
    if errors:
        return f"failed: {errors[0]}"
    counts = collections.Counter(name for one in measured for name in one.kept)
    everywhere = len(measured)
    return ", ".join(name if n == everywhere else f"{name} {n}/{everywhere}" for name, n in counts.items())


def _print(summaries: Sequence[Summary], columns: Sequence[str], gpu: Device) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = [column for column in columns if any(column in summary.db for summary in summaries)]
    header = ["method", "bits", "above", *shown, "mean dB", "±", "s/layer", f"µs on {gpu.name}"]
    table = Table("formats", box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    table.add_column("kept")
    for row in summaries:
        numbers = [
            *((row.bits, 2), (row.most_above, 2)),
            *((row.db.get(column), 1) for column in shown),
            *((row.mean, 2), (row.error, 2), (row.seconds, 2), (row.microseconds, 0)),
        ]
        table.add_row(row.formats, row.row, *(_text(value, digits) for value, digits in numbers), _escaped(row.kept))
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a pipe has no width
    console.print(table)
    click.echo("dB: of outputs, on tokens that neither fit nor gate has seen; above: most bits beyond the format's own")
    click.echo(f"µs: modelled on {gpu.name} for one layer, narrow ones as if they were 3072 wide; not measured")


def _escaped(text: str) -> str:
    """Escape brackets, so that rich prints the text as it is."""
    return text.replace("[", r"\[")


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _report(
    source: Source,
    gpu: Device,
    tokens: int,
    summaries: Sequence[Summary],
    found: Sequence[Measured],
    packages: Sequence[str],
) -> dict[str, object]:
    return {
        "commit": commit(),
        "versions": versions(*(peers.PEERS[name].package for name in packages)),
        "threads": torch.get_num_threads(),
        **source.describe(),
        "modelled": {"gpu": gpu.name, "tokens": tokens},
        "rows": [asdict(summary) for summary in summaries],
        "layers_measured": [asdict(one) for one in found],
    }


def svg(summaries: Sequence[Summary]) -> str:
    """dB over bits per weight, one point for each row, as a picture of 960 by 640 with the names at its right."""
    points = [(row.bits, row.mean, row) for row in summaries if row.bits is not None and row.mean is not None]
    points.sort(key=lambda point: -point[1])
    width, height, left, bottom, right, top = 960, 640, 60, 50, 260, 30
    bits, dbs = [point[0] for point in points], [point[1] for point in points]
    low_x, high_x = math.floor(2 * min(bits, default=4)) / 2, math.ceil(2 * max(bits, default=8) + 0.1) / 2
    low_y, high_y = 5 * math.floor(min(dbs, default=0) / 5), 5 * math.ceil(max(dbs, default=5) / 5 + 0.01)

    def x(value: float) -> float:
        return round(left + (value - low_x) / (high_x - low_x) * (width - left - right), 1)

    def y(value: float) -> float:
        return round(height - bottom - (value - low_y) / (high_y - low_y) * (height - bottom - top), 1)

    formats = list(dict.fromkeys(row.formats for _, _, row in points))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for db in range(low_y, high_y + 1, 5):
        lines.append(f'<path d="M{left} {y(db)}H{width - right}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y(db) + 4}" text-anchor="end">{db}</text>')
    for half in range(round(2 * low_x), round(2 * high_x) + 1):
        lines.append(f'<path d="M{x(half / 2)} {top}V{height - bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{x(half / 2)}" y="{height - bottom + 16}" text-anchor="middle">{half / 2:g}</text>')
    middle = (left + width - right) / 2
    lines.append(f'<text x="{middle}" y="{height - 12}" text-anchor="middle">bits per weight, all counted</text>')
    lines.append(f'<text x="{left}" y="{top - 6}">output SQNR, dB</text>')
    at = _apart([y(db) for _, db, _ in points], height - bottom)
    for (bit, db, row), label_y in zip(points, at, strict=True):
        color = _COLORS[formats.index(row.formats) % len(_COLORS)]
        label = escape(f"{row.formats} {row.row}")
        lines.append(f'<path d="M{x(bit)} {y(db)}L{width - right + 10} {label_y}" stroke="{color}" opacity="0.3"/>')
        lines.append(f'<circle cx="{x(bit)}" cy="{y(db)}" r="4" fill="{color}"><title>{label}</title></circle>')
        lines.append(f'<text x="{width - right + 14}" y="{label_y + 4}" fill="{color}">{label}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _apart(heights: Sequence[float], lowest: float) -> list[float]:
    """Rising heights, moved so that lines of text do not cover each other; at first down, then up from the lowest."""
    moved: list[float] = []
    for value in heights:
        moved.append(max(value, moved[-1] + _LINE) if moved else value)
    for index in reversed(range(len(moved))):
        moved[index] = round(min(moved[index], lowest - _LINE * (len(moved) - 1 - index)), 1)
    return moved


_LINE = 13.0  # pixels
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")  # told apart by most eyes

if __name__ == "__main__":
    main()
