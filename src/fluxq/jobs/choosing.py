"""Choose a format for every input group of a model under a budget: proposed by a table of errors, decided by runs.

    measure   the error of each option of each unit at the final latents, alone (calibrate/errors.py); kept in a file
    propose   plans of least error within the budget, by each measure and with interactions (recipes/budget.py)
    decide    run them on images that measured nothing; of plans whose errors cannot be told apart the cheapest
    swap      run changes that the table says pay, until two in a row do not
    write     a recipe that gives exactly the plan, and what was measured beside it

Layers in runs are rounded to nearest; `fluxq quantize` fits those of the recipe.

A gate is met by the cheapest plan whose predicted error is at most p, run after run; p is corrected by what was
measured: p <- p · error of the gate / measured error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

import fluxq
from fluxq.base.console import logger, progress, without_cure
from fluxq.base.files import (
    clear_parts,
    read_json,
    read_sealed_json,
    sha256_json,
    write_json,
    write_sealed_json,
    write_text,
)
from fluxq.base.output import Output, atomic_output, job_digest, plain_path, seal
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.adjoint import PROBES
from fluxq.calibrate.capture import Item, number_of_steps, run_pipeline
from fluxq.calibrate.errors import SIXTEEN_BIT, ErrorTable, Measure, measure_errors
from fluxq.calibrate.stand_ins import Menu, module_of, replaced
from fluxq.eval.debug.patch import improved
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.jobs import memory
from fluxq.jobs.job import Job, JobOptions, Run, clear_leftovers, decisive, require_no_other, work_of
from fluxq.jobs.making import sampling_of
from fluxq.jobs.menu import Costs, Offer, modelled_ms, offer_of, stored_bits, stored_size
from fluxq.jobs.planning import job_of
from fluxq.jobs.requirements import reads_of, require_steps
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.recipes.budget import Choice, Numbers, best, extremes, front, improved_together, paying_moves, total
from fluxq.recipes.devices import find_device
from fluxq.recipes.plan import component_recipe
from fluxq.recipes.recipe import gate_holds, load_recipe, parse_gate
from fluxq.recipes.writing import recipe_with

Kind = Literal["bits", "size", "ms", "gate"]
IMAGES = 8  # that errors are measured on; twice as many decide
MOST_PLANS = 8  # that are run before swaps, and swaps or corrections of a gate
_FAILURES = 2  # in a row that end the swaps
_JUDGING_SEEDS = 1 << 21  # calibration's begin at 1 << 20, those of evaluation at 0
_AGREES = 1.5  # a factor
_RUNS, _KIND = "runs.json", "fluxq auto"


@dataclass(frozen=True)
class AutoOptions:
    """Options of a search beside those of its job.

    bits: most bits per weight, over the Linears whose format is chosen, before fitting.
    size: most bytes of all weights of the checkpoint, whatever fitting keeps.
    ms: most modelled milliseconds of a forward pass on `gpu`.
    gate: on the final latents, as "latent_sqnr>=30"; the cheapest plan that holds it, by time on `gpu`, else by size.
    menu: formats, and "16bit"; () for the usual ones.
    dialect: program that shall read the checkpoint, a key of WRITERS as commands spell it.
    measure: None measures in every way that the model allows.
    count: images that errors are measured on.
    """

    bits: float | None = None
    size: int | None = None
    ms: float | None = None
    gate: str | None = None
    gpu: str | None = None
    menu: tuple[str, ...] = ()
    dialect: str | None = None
    measure: Measure | None = None
    count: int = IMAGES

    @property
    def budget(self) -> tuple[Kind, Any]:
        """Kind and value of the budget; ValueError unless there is exactly one."""
        given = {kind: value for kind in get_args(Kind) if (value := getattr(self, kind)) is not None}
        if len(given) != 1:
            ways = "--bits, --size, --ms or --gate"
            raise ValueError(
                f"{' and '.join(f'--{kind}' for kind in given)} are {len(given)} budgets: give one"
                if given
                else f"no budget: give one of {ways}"
            )
        return next(iter(given.items()))


@dataclass(frozen=True)
class Search:
    """All inputs of a search, read and checked.

    job: of which the base recipe is; its output is the recipe's file.
    costs: of options, in the unit of the budget: bits, bytes · 8 or milliseconds.
    limit: of the cost, infinite under a gate.
    """

    job: Job
    options: AutoOptions
    offer: Offer
    costs: Costs
    limit: float

    @cached_property
    def measuring(self) -> Sequence[Item]:
        """Images that errors are measured on."""
        count = self.options.count
        return self.job.prompts.items(count, self.job.calibration_items[0][1])

    @cached_property
    def judging(self) -> Sequence[Item]:
        """Images that decide: of other noise, and of other prompts where there are any."""
        count, prompts = self.options.count, self.job.prompts
        others = prompts.rows[count:] or prompts.rows
        seed = _JUDGING_SEEDS + self.job.calibration.seed
        return [(others[index % len(others)], seed + index) for index in range(2 * count)]

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Measures to take, the one that predicts first."""
        return (self.options.measure,) if self.options.measure else ("adjoint", "velocity")

    def table_file(self, measure: Measure) -> Path:
        """Return the place of a table, beside the recipe."""
        return self.job.output.with_name(f"{self.job.folder.name}-{measure}-errors.safetensors")

    def table_digest(self, measure: Measure) -> str:
        """Return the digest of all that decides a table."""
        names = ("fluxq", "model", "units", "prompts", "call", "dtype", "seed", "count")
        return job_digest([measure, {name: self.job.identity[name] for name in names}])

    def cost(self, choice: Mapping[str, str]) -> float:
        """Return the cost of a choice and of all else."""
        return total(self.costs.numbers, choice) + self.costs.fixed

    def in_words(self, cost: float, digits: int = 2) -> str:
        """Return a cost as people read it, rounded up."""
        kind, per = self.unit
        up = 10**digits
        return f"{math.ceil(up * cost / per - 1e-9) / up:.{digits}f} {kind}"

    @property
    def unit(self) -> tuple[str, float]:
        """Unit of costs, and the cost that it is."""
        kind, _ = self.options.budget
        if kind == "bits":
            return "bits", sum(self.offer.weights.values())
        return ("ms", 1) if kind == "ms" or (kind == "gate" and self.options.gpu) else ("GB", 8e9)


def search_of(job_options: JobOptions, options: AutoOptions, *, writes: bool = True, ranks: Ranks = ALONE) -> Search:
    """Read and check a request; ValueError or FileNotFoundError, before anything is computed, if it cannot work."""
    _require_sound(options)
    job = job_of(replace(job_options, check=False), writes=False, runs=False, ranks=ranks)
    require_steps(job.folder)
    offer = offer_of(job, options.menu, _dialect(options))
    place = plain_path(job_options.output or recipe_file(job.folder.name, options))
    place = Output(place).place if place.is_symlink() else place  # both files have the name of what is written
    if place.suffix != ".yaml":
        raise ValueError(f"output {place}: a recipe is a .yaml file; call it {place.stem}.yaml, say")
    output = Output(place, True, (".json",))
    search = _with_budget(Search(replace(job, output=place), options, offer, Costs({}, 0), math.inf))
    output.require(reads_of(job.folder.path, vars(job_options)), overwrite=job_options.overwrite, exists_ok=True)
    if not writes:
        return search
    weights = memory.weight_bytes(job.folder, job_options.dtype)
    device, in_turns = memory.settle_pipeline(job.folder, job.run.device, weights, job_options.device)
    if in_turns:
        raise ValueError(f"{job.folder.name} does not fit on {device}: give --device cpu, or a GPU with more memory")
    job = replace(search.job, run=Run(device, ranks), identity=ranks.agree(_identity(search) if ranks.leads else None))
    search = replace(search, job=job)
    if ranks.leads and _is_finished(search):
        search = replace(search, job=replace(job, finished=True))
    elif ranks.leads:
        require_no_other(job)
        _require_own_tables(search)
    return replace(search, job=replace(search.job, finished=ranks.agree(search.job.finished)))


def _require_sound(options: AutoOptions) -> None:
    """Raise ValueError for options that mean nothing, or contradict each other."""
    kind, value = options.budget
    if kind == "gate":
        condition = parse_gate(str(value))
        ((comparison, _), *others) = condition.bounds
        if condition.metric != "latent_sqnr" or others or comparison not in (">", ">="):
            raise ValueError(f"--gate {value!r}: runs measure the final latents alone; write 'latent_sqnr>=30', say")
    elif not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ValueError(f"--{kind} {value!r}: expected a number above 0")
    if kind == "ms" and options.gpu is None:
        raise ValueError("--ms is modelled time on a GPU: give --gpu too, as in --gpu h200")
    if options.gpu is not None:
        find_device(options.gpu)
    if options.count < 1:
        raise ValueError(f"--count {options.count}: expected at least one image to measure errors on")


def _dialect(options: AutoOptions) -> str | None:
    """Return the key of the dialect; ValueError for one that is not written."""
    if options.dialect is None:
        return None
    names = {DIALECTS[name].option or name: name for name in WRITERS}
    dialect = names.get(options.dialect, options.dialect.replace("-", "_"))
    if dialect not in WRITERS:
        raise ValueError(f"--for {options.dialect}: expected one of {', '.join(names)}")
    return dialect


def recipe_file(model: str, options: AutoOptions) -> str:
    """Return the name of the file that a search writes unless told where."""
    kind, value = options.budget
    bound = parse_gate(value).bounds[0][1] if kind == "gate" else value / 1e9 if kind == "size" else value
    return f"{Path(model).name}-{bound:g}{ {'gate': 'dB', 'size': 'GB'}.get(kind, kind) }.yaml"


def _with_budget(search: Search) -> Search:
    """Return the search with costs and limits; ValueError for a budget that no plan fits, or that all do."""
    job, offer, options = search.job, search.offer, search.options
    kind, value = options.budget
    if kind == "bits":
        search = replace(search, costs=stored_bits(offer))
        limit = math.floor(value * search.unit[1])
    elif kind == "ms" or (kind == "gate" and options.gpu):
        search = replace(search, costs=modelled_ms(job, offer, str(options.gpu)))
        limit = value
    else:
        search, limit = replace(search, costs=stored_size(job, offer)), 8 * value if kind == "size" else 0
    if kind == "gate":
        return search
    least, largest = (cost + search.costs.fixed for cost in extremes(search.costs.numbers))
    if limit < least:
        raise ValueError(
            f"--{kind}: the smallest plan takes {search.in_words(least, 4)}; give at least that, or a --menu with a "
            "smaller format"
        )
    if limit > largest and len(offer.options) > 1:
        raise ValueError(
            f"--{kind}: the largest plan takes {search.in_words(largest, 4)}, so there is no choice; give less, or a "
            "--menu with a larger format"
        )
    return replace(search, limit=limit)


def _identity(search: Search) -> dict[str, Any]:
    """Return all that decides what a search writes."""
    job, offer = search.job, search.offer
    layers = {option: {n: str(la.scheme) for n, la in plans.items()} for option, plans in offer.layers.items()}
    return {
        "fluxq": fluxq.__version__,
        "recipe": job.recipe.digest,
        "model": {component: job.folder.digest(component) for component in job.calibrated},
        "units": sha256_json([dict(offer.units), dict(offer.choices), layers]),
        "prompts": job.prompts.digest,
        "call": job.call,
        "dtype": job.options.dtype,
        "seed": job.calibration.seed,
        "count": search.options.count,
        "budget": list(search.options.budget),
        "gpu": search.options.gpu,
        "measure": search.options.measure,
    }


def _is_finished(search: Search) -> bool:
    """Tell whether this search's recipe is at the output; ValueError for another file."""
    output, job = Output(search.job.output, True, (".json",)), search.job
    if job.options.overwrite:
        return False
    output.require_free(overwrite=False, job=job_digest(decisive(job)))
    return output.holds(job_digest(decisive(job)))


def _require_own_tables(search: Search) -> None:
    """Raise ValueError for a table of another request in this one's place, unless it may be replaced."""
    for measure in search.measures:
        file = search.table_file(measure)
        if not file.exists():
            continue
        digest = _job_of(file)
        if digest is None:
            raise ValueError(f"{file} is no table of errors, and would be replaced; move it, or give another --output")
        if digest != search.table_digest(measure) and not search.job.options.overwrite:
            raise ValueError(
                f"{file}: errors of another model, recipe, menu, call, set of prompts, seed or count; give an --output "
                "in another folder, or --overwrite to measure again"
            )


def _job_of(table: Path) -> str | None:
    """Return the request of a table; None for all that is none, folders and half a file too."""
    with suppress(ValueError):
        return ErrorTable.stored_job(table) if table.is_file() else None


@dataclass(frozen=True)
class Tried:
    """A plan that ran.

    proposed_by: its measures.
    squares: squared error of each image's final latents.
    signals: squared norm of each image's latents in 16 bit.
    """

    proposed_by: tuple[str, ...]
    choice: Choice
    cost: float
    squares: tuple[float, ...]
    signals: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        """Squared error of each image by the mean signal: their mean is the NMSE of all."""
        mean = math.fsum(self.signals) / len(self.signals)
        return [square / mean for square in self.squares]

    @property
    def error(self) -> float:
        """NMSE of the final latents of all images."""
        return math.fsum(self.squares) / math.fsum(self.signals)

    @property
    def decibels(self) -> float:
        """Mean SQNR of the final latents of images, as the metric `latent_sqnr` has it."""
        pairs = zip(self.signals, self.squares, strict=True)
        return math.fsum(10 * math.log10(z / e) if e > 0 else math.inf for z, e in pairs) / len(self.squares)


class _Bench:
    """Runs of plans with a pipeline, each once; squared errors are kept in a file of the work folder."""

    def __init__(self, search: Search, pipe: Any, file: Path) -> None:
        self.search, self.pipe, self.file = search, pipe, file
        self.originals = {name: module_of(pipe, name) for names in search.offer.units.values() for name in names}
        self.tried: list[Tried] = []
        self.kept: dict[str, list[float | None]] = {}
        try:
            self.kept = read_sealed_json(file) if file.is_file() else {}
        except ValueError as error:
            logger.warning("%s: run again", without_cure(error))

    def layers(self, unit: str, option: str) -> dict[str, Any]:
        """Return layer -> itself rounded to nearest in an option."""
        return {
            name: improved(self.originals[name], scheme and replace(scheme, static_input=False))
            for name, scheme in self.search.offer.schemes({unit: option}).items()
        }

    def run(self, choice: Choice, *proposed_by: str) -> Tried:
        """Return the plan with its errors, run once."""
        key = sha256_json(sorted(choice.items()))
        signals = self._kept("signals", lambda: [float(z.square().sum()) for z in self.reference])
        squares = self._kept(key, lambda: self._squares(choice))
        self.tried.append(Tried(proposed_by, choice, self.search.cost(choice), squares, signals))
        return self.tried[-1]

    def _kept(self, key: str, measured: Callable[[], list[float]]) -> tuple[float, ...]:
        if key not in self.kept:
            self.kept[key] = [value if math.isfinite(value) else None for value in measured()]
            write_sealed_json(self.file, self.kept)
        return tuple(math.inf if value is None else value for value in self.kept[key])

    def _squares(self, choice: Choice) -> list[float]:
        plain = self.reference
        layers = {n: la for u, o in choice.items() if o != SIXTEEN_BIT for n, la in self.layers(u, o).items()}
        with replaced(self.pipe, layers):
            latents = self._latents()
        return [float((q - z).square().sum()) for q, z in zip(latents, plain, strict=True)]

    @cached_property
    def reference(self) -> list[Tensor]:
        """Final latents of the 16-bit pipeline."""
        return self._latents()

    def _latents(self) -> list[Tensor]:
        """Return the final latents of each image, fp64 on the CPU."""
        with torch.no_grad():
            batches = [z.double().cpu() for _, z in run_pipeline(self.pipe, self.search.judging, self.search.job.call)]
        return [image for batch in batches for image in batch]


def choose(search: Search) -> dict[str, Any] | None:
    """Search, write the recipe and what was measured, and return that; None in processes that only helped."""
    job = search.job
    if job.finished:
        if job.run.ranks.leads:
            clear_leftovers(job)
        return read_json(job.output.with_suffix(".json")) if job.run.ranks.leads else None
    started = time.perf_counter()
    with work_of(job) as work:
        pipe = job.load_reference()
        bench = _Bench(search, pipe, work / _RUNS)
        tables = _tables(search, bench, work)
        if not job.run.ranks.leads:
            return None
        table = next(iter(tables.values()))
        errors = _errors(search, table)
        winner = (_hold if search.options.gate else _decide)(search, bench, tables)
        text = _recipe(search, winner.choice, errors)
        _require_same_plan(search, winner.choice, text, work)
        result = _result(search, bench, tables, winner, round(time.perf_counter() - started, 1))
        digest = job_digest(decisive(job))
        with atomic_output(Output(job.output, True, (".json",)), work, overwrite=job.options.overwrite) as part:
            write_json(part / job.output.with_suffix(".json").name, result)
            write_text(part / job.output.name, seal(text, ".yaml", digest))
    return result


def _tables(search: Search, bench: _Bench, work: Path) -> dict[str, ErrorTable]:
    """Return measure -> table, read from beside the output or measured and kept there; the first one predicts."""
    job, ranks, offer = search.job, search.job.run.ranks, search.offer
    options = {unit: tuple(o for o in of_unit if o != SIXTEEN_BIT) for unit, of_unit in offer.choices.items()}
    menu = Menu(offer.units, options, bench.layers)
    tables: dict[str, ErrorTable] = {}
    for measure in search.measures:
        file = search.table_file(measure)
        kept = ranks.agree(_is_kept(file, search.table_digest(measure)) if ranks.leads else None)
        if kept:
            tables[measure] = ErrorTable.load(file)
            continue
        sampling = sampling_of(job, bench.pipe, job.calibrated)
        try:
            tables[measure] = measure_errors(
                bench.pipe, menu, search.measuring, sampling, measure=measure, folder=work / measure, ranks=ranks
            )
        except ValueError as error:
            if len(search.measures) == 1 or measure == search.measures[-1]:
                raise
            logger.warning("%s; %s is measured alone", without_cure(error), search.measures[-1])
            continue
        if ranks.leads:
            clear_parts(file.parent, file.name)  # of a killed process
            tables[measure].save(file, search.table_digest(measure))
    return tables


def _is_kept(file: Path, digest: str) -> bool:
    """Tell whether a table is there, whole and of this request; of a damaged one, the log says so."""
    try:
        return _job_of(file) == digest and bool(ErrorTable.load(file))
    except ValueError as error:
        logger.warning("%s: measured again", without_cure(error))
        return False


def _errors(search: Search, table: ErrorTable) -> Numbers:
    """Return unit -> option -> its error; RuntimeError for a unit without an option of finite error."""
    errors = {
        unit: {option: table.predicted({unit: option}) for option in options}
        for unit, options in search.offer.choices.items()
    }
    for unit, options in errors.items():
        if not any(map(math.isfinite, options.values())):
            raise RuntimeError(
                f"{unit}: the latents are not finite in any of {', '.join(options)}; add 16bit to --menu"
            )
    return errors


def _weight_errors(search: Search, bench: _Bench) -> Numbers:
    """Return unit -> option -> squared error of its weights, which needs no run at all."""
    return {
        unit: {option: _weight_error(bench, unit, option) for option in options}
        for unit, options in progress(search.offer.choices.items(), "Rounding weights")
    }


def _weight_error(bench: _Bench, unit: str, option: str) -> float:
    if option == SIXTEEN_BIT:
        return 0.0
    return math.fsum(
        float(
            (layer.quantized_weight.dequantize().double() - bench.originals[name].weight.detach().flatten(1).double())
            .square()
            .sum()
        )
        for name, layer in bench.layers(unit, option).items()
    )


def _gram(search: Search, table: ErrorTable) -> Any:
    """Return ⟨r, r'⟩ of the residuals of all options, in the order of the costs; only errors where there are none."""
    import numpy as np

    pairs = [(unit, option) for unit, options in search.costs.numbers.items() for option in options]
    if table.residuals is None:
        return np.diag([table.predicted({unit: option}) for unit, option in pairs])
    size = table.residuals.shape[-1]
    rows = [
        np.zeros(size)
        if option == SIXTEEN_BIT
        else table.residuals[table.units.index(unit), table.options.index(option)].numpy()
        for unit, option in pairs
    ]
    stacked = np.stack(rows)
    return stacked @ stacked.T / size


def _candidates(search: Search, bench: _Bench, tables: Mapping[str, ErrorTable]) -> dict[str, Choice]:
    """Return measure -> its plan of least error within the budget."""
    costs, limit = search.costs.numbers, search.limit - search.costs.fixed
    proposals = {measure: best(_errors(search, table), costs, limit) for measure, table in tables.items()}
    proposals["weight error"] = best(_weight_errors(search, bench), costs, limit)
    first, table = next(iter(tables.items()))
    start = proposals[first]
    if table.residuals is not None and start is not None:
        proposals["interactions"] = improved_together(_gram(search, table), costs, limit, start)
    return {measure: choice for measure, choice in proposals.items() if choice is not None}


def _decide(search: Search, bench: _Bench, tables: Mapping[str, ErrorTable]) -> Tried:
    """Return the plan of least error within the budget, by runs of proposals and of changes that should pay."""
    alike: dict[str, tuple[list[str], Choice]] = {}
    for measure, choice in _candidates(search, bench, tables).items():
        alike.setdefault(sha256_json(sorted(choice.items())), ([], choice))[0].append(measure)
    proposals = list(alike.values())[:MOST_PLANS]
    winner = better_of([bench.run(choice, *names) for names, choice in progress(proposals, "Running plans")])
    gram, failures = _gram(search, next(iter(tables.values()))), 0
    costs, limit = search.costs.numbers, search.limit - search.costs.fixed
    for _ in range(MOST_PLANS):
        known = [each.choice for each in bench.tried]
        moves = (winner.choice | move for move in paying_moves(gram, costs, limit, winner.choice))
        choice = next((choice for choice in moves if choice not in known), None)
        if choice is None or failures == _FAILURES:
            break
        swapped = bench.run(choice, "swap")
        failures = 0 if better_of([winner, swapped]) is swapped else failures + 1
        winner = better_of([winner, swapped])
    return winner


def better_of(tried: Sequence[Tried]) -> Tried:
    """Return the plan of least error; of those whose difference from it may be 0 (95 %), the cheapest."""
    least = min(tried, key=lambda each: each.error)
    return min(
        (each for each in tried if each is least or _is_level(each, least)), key=lambda each: (each.cost, each.error)
    )


def _is_level(one: Tried, least: Tried) -> bool:
    """Tell whether images leave open which of two plans has less error."""
    differences = [a - b for a, b in zip(one.errors, least.errors, strict=True)]
    return all(map(math.isfinite, differences)) and not paired_interval(differences).low > 0


def _hold(search: Search, bench: _Bench, tables: Mapping[str, ErrorTable]) -> Tried:
    """Return the cheapest plan that holds the gate, by runs; RuntimeError if none of those tried does."""
    gate = str(search.options.gate)
    costs, bound = search.costs.numbers, parse_gate(gate).bounds[0][1]
    for measure, table in tables.items():
        errors, most = _errors(search, table), 10 ** (-bound / 10)
        for _ in range(MOST_PLANS):
            choice = best(costs, errors, most)
            if choice is None or choice in [each.choice for each in bench.tried]:
                break
            decibels = bench.run(choice, measure).decibels
            if not math.isfinite(decibels):
                break
            most *= 10 ** ((decibels - bound) / 10)
    holding = [each for each in bench.tried if gate_holds(gate, {"latent_sqnr": each.decibels})]
    if not holding:
        highest = max((each.decibels for each in bench.tried), default=-math.inf)
        raise RuntimeError(
            f"no plan that was tried holds {gate} (the best has {highest:.1f} dB); lower the gate, or add 16bit to "
            "--menu"
        )
    return min(holding, key=lambda each: (each.cost, each.error))


def _recipe(search: Search, choice: Choice, errors: Numbers) -> str:
    """Return the recipe of a choice: an override for each role whose layers agree, and for each option of the rest."""
    job, parts = search.job, search.offer.parts
    overrides = {component: _overrides(search, component, choice, errors) for component in parts}
    families = {component: part.family for component, part in parts.items()}
    budget = search.options.gate or search.in_words(search.limit)
    about = f"with formats chosen for {budget}"
    return recipe_with(job.recipe_name, job.recipe, {c: o for c, o in overrides.items() if o}, families, about)


def _overrides(search: Search, component: str, choice: Choice, errors: Numbers) -> list[dict[str, Any]]:
    """Return the overrides that make the choice of the base recipe's plan of a component."""
    offer, part = search.offer, search.offer.parts[component]
    option_of = {name: option for unit, option in choice.items() for name in offer.units[unit]}
    unit_of = {name: unit for unit, names in offer.units.items() for name in names}
    roles: dict[str, dict[str, str]] = {}  # role -> layer -> option, "" for a layer that may not change
    for layer in part.base.quantized:
        name = f"{component}.{layer.name}"
        option = option_of.get(name, "")
        is_changed = option and offer.layers[option][name].scheme != layer.scheme
        roles.setdefault(layer.role, {})[name] = option if is_changed else ""
    added, rest = [], dict[str, list[str]]()
    for role, options in roles.items():
        first, *others = dict.fromkeys(options.values())
        if first and not others:
            reason = _reason(search, (unit_of[name] for name in options), first, errors)
            added.append(part.override({"role": role}, first, reason))
            continue
        for name, option in options.items():
            rest.setdefault(option, []).append(name)
    rest.pop("", None)
    for option, names in rest.items():
        reason = _reason(search, (unit_of[name] for name in names), option, errors)
        added.append(part.override({"match": [name.partition(".")[2] for name in names]}, option, reason))
    return added


def _reason(search: Search, units: Iterable[str], option: str, errors: Numbers) -> str:
    """Return the figures that speak for an option."""
    units, weights = dict.fromkeys(units), search.offer.weights
    first = search.offer.options[0]
    whole = math.fsum(of_unit[first] for of_unit in errors.values() if math.isfinite(of_unit.get(first, math.inf)))
    share = sum(weights[unit] for unit in units) / sum(weights.values())

    def of(name: str) -> str:
        error = math.fsum(errors[unit].get(name, math.inf) for unit in units)
        return f"{error / whole:.1%} of the error" if whole and math.isfinite(error) else "an unknown part of the error"

    return f"in {first} {of(first)}, in {option} {of(option)}; {share:.1%} of the weights"


def _require_same_plan(search: Search, choice: Choice, text: str, work: Path) -> None:
    """Raise RuntimeError if the recipe gives another plan than the choice."""
    file = work / search.job.output.name
    write_text(file, text)
    _, recipe = load_recipe(str(file))
    meant = search.offer.schemes(choice)
    for component, part in search.offer.parts.items():
        entry = component_recipe(recipe, component, part.family)
        plan = replace(part, recipe=recipe, entry=entry).plan([])
        for layer, before in zip(plan.layers, part.base.layers, strict=True):
            name = f"{component}.{layer.name}"
            if layer.scheme != meant.get(name, before.scheme):
                raise RuntimeError(
                    f"{name}: the recipe written gives {layer.scheme or '16bit'}, not {meant.get(name, before.scheme)}"
                )


def _result(
    search: Search, bench: _Bench, tables: Mapping[str, ErrorTable], winner: Tried, seconds: float
) -> dict[str, Any]:
    """Return what was chosen and measured, as JSON has it."""
    job, offer, table = search.job, search.offer, next(iter(tables.values()))
    errors, per = _errors(search, table), search.unit[1]
    kind, value = search.options.budget
    predicted = table.predicted_together(winner.choice)
    interval = paired_interval(winner.errors)
    agrees = winner.error <= _AGREES * predicted and predicted <= _AGREES * winner.error
    points = front(errors, search.costs.numbers)
    return {
        "kind": _KIND,
        "model": job.folder.name,
        "recipe": job.recipe_name,
        "budget": {"kind": kind, "value": value, "gpu": search.options.gpu, "for": search.options.dialect},
        "cost_unit": search.unit[0],
        "cost": winner.cost / per,
        "menu": list(offer.options),
        "measures": list(tables),
        "units": [
            {
                "unit": unit,
                "layers": list(offer.units[unit]),
                "option": winner.choice[unit],
                "weights": offer.weights[unit],
                "nmse": {o: error if math.isfinite(error) else None for o, error in errors[unit].items()},
            }
            for unit in offer.units
        ],
        "tried": [
            {
                "proposed_by": list(each.proposed_by),
                "chosen": each is winner,
                "cost": each.cost / per,
                "predicted_nmse": table.predicted_together(each.choice),
                "nmse": each.error if math.isfinite(each.error) else None,
                "sqnr_db": each.decibels if math.isfinite(each.decibels) else None,
                "changes": {u: o for u, o in each.choice.items() if o != winner.choice[u]},
            }
            for each in bench.tried
        ],
        "front": [
            {"cost": search.cost(choice) / per, "predicted_nmse": table.predicted_together(choice)} for choice in points
        ],
        "predicted_nmse": predicted,
        "measured_nmse": winner.error if math.isfinite(winner.error) else None,
        "measured_interval": [interval.low, interval.high] if math.isfinite(interval.low + interval.high) else None,
        "agrees": agrees,
        "images": {"measured": len(search.measuring), "judged": len(search.judging)},
        "statistics": {measure: each.content_digest for measure, each in tables.items()},
        "identity": job.identity,
        "seconds": seconds,
    }


@dataclass(frozen=True)
class Outline:
    """Cost of a search, and bounds of its budget.

    least, largest: cost of the smallest and the largest plan, in words.
    passes: name of a part -> forward passes of the transformers with one image; of the adjoint about, with backward.
    runs: of the pipeline over the judging images, at most.
    seconds: modelled on the GPU, None without one.
    """

    least: str
    largest: str
    passes: Mapping[str, int]
    runs: int
    seconds: float | None


def outline(search: Search) -> Outline:
    """Return the cost of a search, without computing anything."""
    low, high = extremes(search.costs.numbers)
    steps = number_of_steps(search.job.folder.pipeline_class, search.job.call)
    images = len(search.measuring)
    options = sum(option != SIXTEEN_BIT for of_unit in search.offer.choices.values() for option in of_unit)
    seen = min(steps, search.job.calibration.steps)
    again = 3 + sum(option != SIXTEEN_BIT for option in search.offer.options)  # forward: call and block twice, options
    each = {"velocity": images * (steps + options * seen), "adjoint": images * steps * (again + PROBES)}
    runs = 1 + 2 * MOST_PLANS
    passes = {measure: each[measure] for measure in search.measures} | {"runs": runs * len(search.judging) * steps}
    seconds = None
    if search.options.gpu:
        plain = modelled_ms(search.job, search.offer, search.options.gpu)
        seconds = sum(passes.values()) * (extremes(plain.numbers)[1] + plain.fixed) / 1e3
    least, largest = (search.in_words(cost + search.costs.fixed) for cost in (low, high))
    return Outline(least, largest, passes, runs, seconds)
