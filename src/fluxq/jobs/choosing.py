"""Choose a format for every input group of a model under a budget: proposed by a table of errors, decided by runs.

    measure   the error of each option of each unit at the final latents, alone (calibrate/errors.py); kept in a file
    propose   plans of least error within the budget, by each measure and with interactions (recipes/budget.py)
    decide    run them on images that measured nothing; of plans that runs do not refute the one of least prediction
    swap      run changes that the table says pay, until two in a row do not
    write     a recipe that gives exactly the plan, and what was measured beside it

Layers in runs are rounded to nearest; `fluxq quantize` fits those of the recipe.

A gate is met by the cheapest plan whose predicted error is at most p, run after run; p is corrected by what was
measured: p <- p · error of the gate / measured error.

With `--steps` a plan is of formats and of a list of the steps that are computed (shares.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxq.base.console import logger, progress, without_cure
from fluxq.base.files import read_json, sha256_json, sync, write_json, write_text
from fluxq.base.output import Output, atomic_output, job_digest, seal
from fluxq.calibrate.errors import SIXTEEN_BIT, ErrorTable, measure_errors
from fluxq.calibrate.stand_ins import Menu
from fluxq.jobs import memory
from fluxq.jobs.chosen import chosen_recipe, chosen_result, require_same_plan
from fluxq.jobs.job import RUNS, clear_leftovers, decisive, work_of
from fluxq.jobs.making import sampling_of
from fluxq.jobs.search import MOST_PLANS, Search, table_job
from fluxq.jobs.shares import Lists
from fluxq.jobs.trials import Bench, Tried
from fluxq.recipes.budget import Choice, Numbers, best, improved_together, paying_moves
from fluxq.recipes.recipe import gate_holds, latent_bound
from fluxq.runtime.step_trials import TriedList

_FAILURES = 2  # in a row that end the swaps


def choose(search: Search) -> dict[str, Any] | None:
    """Search, write the recipe and what was measured, and return that; None in processes that only helped."""
    job = search.job
    if job.finished:
        if job.run.ranks.leads:
            clear_leftovers(job)
        return read_json(job.output.with_suffix(".json")) if job.run.ranks.leads else None
    started = time.perf_counter()
    with memory.within(job.run.limit, job.run.device), work_of(job) as work:
        pipe = job.load_reference()
        bench = Bench(search, pipe, work / RUNS)
        tables = _tables(search, bench, work)
        if not job.run.ranks.leads:
            return None
        table = next(iter(tables.values()))
        errors = _errors(search, table)
        lists = Lists(search, pipe, work / "lists") if search.options.steps else None
        winner = (_hold if search.options.gate else _decide)(search, bench, tables, lists)
        text = chosen_recipe(search, winner.choice, errors, winner.listed)
        require_same_plan(search, winner.choice, text, work, winner.listed)
        seconds = round(time.perf_counter() - started, 1)
        result = chosen_result(search, bench, tables, errors, winner, seconds, lists)
        digest = job_digest(decisive(job))
        with atomic_output(Output(job.output, True, (".json",)), work, overwrite=job.options.overwrite) as part:
            write_json(part / job.output.with_suffix(".json").name, result)
            write_text(part / job.output.name, seal(text, ".yaml", digest))
    return result


def _tables(search: Search, bench: Bench, work: Path) -> dict[str, ErrorTable]:
    """Return measure -> table, read from beside the output or measured and kept there; the first one predicts."""
    job, ranks, offer = search.job, search.job.run.ranks, search.offer
    options = {unit: tuple(o for o in of_unit if o != SIXTEEN_BIT) for unit, of_unit in offer.choices.items()}
    menu = Menu(offer.modules, options, bench.layers, offer.once)
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
            tables[measure].save(work / file.name, search.table_digest(measure))
            (work / file.name).replace(file)  # beside it another search may be writing the same
            sync(file.parent, deep=False)
    return tables


def _is_kept(file: Path, digest: str) -> bool:
    """Tell whether a table is there, whole and of this request; of a damaged one, the log says so."""
    try:
        return table_job(file) == digest and bool(ErrorTable.load(file))
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


def _weight_errors(search: Search, bench: Bench) -> Numbers:
    """Return unit -> option -> squared error of its weights, which needs no run at all."""
    return {
        unit: {option: bench.weight_error(unit, option) for option in options}
        for unit, options in progress(search.offer.choices.items(), "Rounding weights")
    }


def _candidates(search: Search, bench: Bench, tables: Mapping[str, ErrorTable], limit: float) -> dict[str, Choice]:
    """Return measure -> its plan of least error, whose options cost at most so much."""
    costs = search.costs.numbers
    proposals = {measure: best(_errors(search, table), costs, limit) for measure, table in tables.items()}
    proposals["weight error"] = best(_weight_errors(search, bench), costs, limit)
    first, table = next(iter(tables.items()))
    start = proposals[first]
    if table.residuals is not None and start is not None:
        proposals["interactions"] = improved_together(table.gram(costs), costs, limit, start)
    return {measure: choice for measure, choice in proposals.items() if choice is not None}


def _proposals(
    search: Search, bench: Bench, tables: Mapping[str, ErrorTable], lists: Lists | None
) -> list[tuple[list[str], Choice, TriedList | None]]:
    """Return what measures propose, each plan once, with its list of steps; with lists also fewer and more steps."""
    shares = lists.to_run(_errors(search, next(iter(tables.values())))) if lists else []
    first = lists.of(shares[0].computed) if lists else None
    plans = [(m, choice, first) for m, choice in _candidates(search, bench, tables, _room(search, first)).items()]
    if lists:
        plans += [(next(iter(tables)), share.choice, lists.of(share.computed)) for share in shares[1:]]
    alike: dict[str, tuple[list[str], Choice, TriedList | None]] = {}
    for measure, choice, listed in plans:
        key = sha256_json([sorted(choice.items()), listed.steps.computed if listed else None])
        alike.setdefault(key, ([], choice, listed))[0].append(measure)
    return list(alike.values())[:MOST_PLANS]


def _room(search: Search, listed: TriedList | None) -> float:
    """Return what the options of a plan may cost at most, in each step that is computed."""
    return (search.limit / listed.steps.share if listed else search.limit) - search.costs.fixed


def _decide(search: Search, bench: Bench, tables: Mapping[str, ErrorTable], lists: Lists | None = None) -> Tried:
    """Return the plan of least error within the budget, by runs of proposals and of changes that should pay."""
    table, costs = next(iter(tables.values())), search.costs.numbers
    errors = _errors(search, table)
    proposals = _proposals(search, bench, tables, lists)
    tried = [bench.run(choice, *names, listed=listed) for names, choice, listed in progress(proposals, "Running plans")]
    winner = bench.better_of(tried, errors)
    gram, failures = table.gram(costs), 0
    for _ in range(MOST_PLANS):
        known = [each.choice for each in bench.tried if each.listed == winner.listed]
        limit = _room(search, winner.listed)
        moves = (winner.choice | move for move in paying_moves(gram, costs, limit, winner.choice))
        choice = next((choice for choice in moves if choice not in known), None)
        if choice is None or failures == _FAILURES:
            break
        swapped = bench.run(choice, "swap", listed=winner.listed)
        better = bench.better_of([winner, swapped], errors)
        failures = 0 if better is swapped else failures + 1
        winner = better
    return winner


def _hold(search: Search, bench: Bench, tables: Mapping[str, ErrorTable], lists: Lists | None = None) -> Tried:
    """Return the cheapest plan that holds the gate, by runs; RuntimeError if none of those tried does."""
    gate = str(search.options.gate)
    bound = latent_bound(gate)
    for measure, table in tables.items():
        errors, most = _errors(search, table), 10 ** (-bound / 10)
        for _ in range(MOST_PLANS):
            choice, listed = _cheapest(search, errors, most, lists)
            if choice is None or (choice, listed) in [(each.choice, each.listed) for each in bench.tried]:
                break
            decibels = bench.run(choice, measure, listed=listed).decibels
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


def _cheapest(
    search: Search, errors: Numbers, most: float, lists: Lists | None
) -> tuple[Choice | None, TriedList | None]:
    """Return the cheapest plan of at most so much predicted error, with its list of steps; None where there is none."""
    if lists is None:
        return best(search.costs.numbers, errors, most), None
    share = next(iter(lists.cheapest(errors, most)), None)
    return (share.choice, lists.of(share.computed)) if share else (None, None)
