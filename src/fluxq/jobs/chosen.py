"""Write what a search chose: a recipe that gives exactly the plan, and the figures beside it."""

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxq.base.files import write_text
from fluxq.base.model import DEFAULT_MODEL
from fluxq.calibrate.errors import SIXTEEN_BIT, ErrorTable
from fluxq.eval.metrics.schema import number
from fluxq.eval.metrics.statistics import clustered_interval
from fluxq.jobs.menu import is_like
from fluxq.jobs.search import Search
from fluxq.jobs.seat import Seat
from fluxq.jobs.shares import Lists
from fluxq.jobs.trials import Bench, Tried
from fluxq.recipes.budget import Choice, Numbers, front
from fluxq.recipes.plan import MODULATION_ROLE, component_recipe, override_for
from fluxq.recipes.recipe import latent_bound, load_recipe
from fluxq.recipes.writing import recipe_with
from fluxq.runtime.step_trials import TriedList, computed_of

_AGREES = 1.5  # a factor
_KIND = "fluxq auto"


def chosen_recipe(search: Search, choice: Choice, errors: Numbers, listed: TriedList | None = None) -> str:
    """Return the recipe of a choice: an override for each role whose layers agree, and for each option of the rest.

    listed: steps that are computed, None for all.
    """
    job, offer, parts = search.job, search.offer, search.offer.parts
    changes = {component: _changes(search, component, choice, errors) for component in parts}
    families = {component: part.family for component, part in parts.items()}
    budget = search.options.gate or search.in_words(search.limit)
    what = f"formats and {len(listed.steps.computed)} of {listed.steps.total} steps" if listed else "formats"
    about = f"with {what} chosen for {budget}{' of a card' if search.seat else ''}"
    once = {component: None if choice[component] == SIXTEEN_BIT else changes[component] for component in offer.once}
    # A component without any needs an entry beside others: it would take theirs.
    changes = (changes if any(changes.values()) else {}) | once
    if search.seat:
        families |= search.seat.encoders
        changes |= {component: {} for component in search.seat.encoders}
    steps = {"compute": round(listed.steps.share, 4), "of": listed.steps.total} if listed else None
    return recipe_with(job.recipe_name, job.recipe, changes, families, about, steps)


def _changes(search: Search, component: str, choice: Choice, errors: Numbers) -> dict[str, Any]:
    """Return the keys of a component's entry that make the choice of the base recipe's plan."""
    attention, overrides = search.offer.attention(component, choice), _overrides(search, component, choice, errors)
    changed = attention != search.offer.parts[component].base.attention
    return ({"attention": attention} if changed else {}) | ({"overrides": overrides} if overrides else {})


def _overrides(search: Search, component: str, choice: Choice, errors: Numbers) -> list[dict[str, Any]]:
    """Return the overrides that make the choice of the base recipe's plan of a component."""
    offer, part = search.offer, search.offer.parts[component]
    option_of = {name: option for unit, option in choice.items() for name in offer.units[unit]}
    unit_of = {name: unit for unit, names in offer.units.items() for name in names}
    roles: dict[str, dict[str, str]] = {}  # role -> layer -> option, "" for a layer that may not change
    for layer in part.base.layers:
        name = f"{component}.{layer.name}"
        option = option_of.get(name, "")
        if not option and layer.scheme is None and override_for(layer, part.entry.overrides) is None:
            continue  # which no override of a role reaches, or makes no difference to
        is_changed = option and not is_like(offer.layers[option][name].scheme, layer.scheme)
        roles.setdefault(layer.role, {})[name] = option if is_changed else ""
    added, rest = [], dict[tuple[str, bool], list[str]]()  # (option, whether it is modulation) -> layers
    for role, options in roles.items():
        first, *others = dict.fromkeys(options.values())
        if first and not others:
            reason = _reason(search, (unit_of[name] for name in options), first, errors)
            added.append(part.override([part.path(name) for name in options], first, reason, whole_role=True))
            continue
        for name, option in options.items():
            rest.setdefault((option, role == MODULATION_ROLE), []).append(name)
    for (option, _), names in rest.items():
        if option:
            reason = _reason(search, (unit_of[name] for name in names), option, errors)
            added.append(part.override([part.path(name) for name in names], option, reason))
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


def require_same_plan(search: Search, choice: Choice, text: str, work: Path, listed: TriedList | None = None) -> None:
    """Raise RuntimeError if the recipe gives another plan than the choice, or another number of computed steps."""
    file = work / search.job.output.name
    write_text(file, text)
    _, recipe = load_recipe(str(file))
    share, of = (recipe.steps.compute, recipe.steps.of) if recipe.steps and listed else (None, None)
    if listed and (share is None or of is None or computed_of(share, of) != len(listed.steps.computed)):
        raise RuntimeError(f"the recipe written computes {share} of {of} steps, not {listed.steps.share}")
    meant = search.offer.schemes(choice)
    for component, part in search.offer.parts.items():
        if component in search.offer.once and choice[component] == SIXTEEN_BIT:
            continue
        entry = component_recipe(recipe, component, part.family)
        plan, attention = replace(part, recipe=recipe, entry=entry).plan([]), search.offer.attention(component, choice)
        if plan.attention != attention:
            raise RuntimeError(f"{component}: the recipe written gives attention in {plan.attention}, not {attention}")
        for layer, before in zip(plan.layers, part.base.layers, strict=True):
            name = f"{component}.{layer.name}"
            if not is_like(layer.scheme, meant.get(name, before.scheme)):
                raise RuntimeError(
                    f"{name}: the recipe written gives {layer.scheme or '16bit'}, not {meant.get(name, before.scheme)}"
                )


def chosen_result(
    search: Search,
    bench: Bench,
    tables: Mapping[str, ErrorTable],
    errors: Numbers,
    winner: Tried,
    seconds: float,
    lists: Lists | None = None,
) -> dict[str, Any]:
    """Return what was chosen and measured, as JSON has it."""
    job, offer, table = search.job, search.offer, next(iter(tables.values()))
    per, (kind, value) = search.unit[1], search.options.budget
    predicted = table.predicted_together(winner.choice) + winner.predicted_of_list
    interval = clustered_interval(winner.errors, winner.prompts)
    agrees = winner.error <= _AGREES * predicted and predicted <= _AGREES * winner.error
    return {
        "kind": _KIND,
        "model": job.folder.name,
        "recipe": job.recipe_name,
        "budget": {"kind": kind, "value": value, "gpu": search.options.gpu, "for": search.options.dialect},
        **({"measured_times": list(search.costs.measured)} if search.options.times else {}),
        "cost_unit": search.unit[0],
        "cost": winner.cost / per,
        "menu": list(offer.options),
        "checkpoints": {option: one.path for option, one in offer.fitted.items()},
        "measures": list(tables),
        "units": [
            {
                "unit": unit,
                "layers": list(offer.units[unit]),
                "option": winner.choice[unit],
                "checkpoint": offer.fitted[winner.choice[unit]].path if winner.choice[unit] in offer.fitted else None,
                "weights": offer.weights[unit],
                "nmse": {o: number(error) for o, error in errors[unit].items()},
            }
            for unit in offer.units
        ],
        "tried": [
            {
                "proposed_by": list(each.proposed_by),
                "chosen": each is winner,
                "cost": each.cost / per,
                **({"computed": _computed(each, lists)} if lists else {}),
                "predicted_nmse": table.predicted_together(each.choice) + each.predicted_of_list,
                "nmse": number(each.error),
                "images": len(each.squares),
                "sqnr_db": number(each.decibels),
                "changes": {u: o for u, o in each.choice.items() if o != winner.choice[u]},
            }
            for each in bench.tried
        ],
        "front": _front(search, table, errors, per, lists),
        **({"steps": _steps(search, bench, errors, winner, lists)} if lists else {}),
        "predicted_nmse": predicted,
        "measured_nmse": number(winner.error),
        "measured_interval": [interval.low, interval.high] if math.isfinite(interval.low + interval.high) else None,
        "agrees": agrees,
        "images": {"measured": len(search.measuring), "judged": len(winner.squares)},
        "statistics": {measure: each.content_digest for measure, each in tables.items()},
        **({"card": _card(search, search.seat, winner.choice)} if search.seat else {}),
        "identity": job.identity,
        "seconds": seconds,
    }


def _front(search: Search, table: ErrorTable, errors: Numbers, per: float, lists: Lists | None) -> list[dict[str, Any]]:
    """Return the plans of least error for budgets from the least to the largest, as JSON has them."""
    if lists is None:
        points = front(errors, search.costs.numbers)
        return [{"cost": search.cost(c) / per, "predicted_nmse": table.predicted_together(c)} for c in points]
    return [
        {
            "cost": share.cost / per,
            "computed": share.computed,
            "predicted_nmse": table.predicted_together(share.choice) + lists.errors[share.computed],
        }
        for share in lists.front(errors)
    ]


def _steps(search: Search, bench: Bench, errors: Numbers, winner: Tried, lists: Lists) -> dict[str, Any]:
    """Return the steps that are computed, and the best plan of each number of them that was looked at, for JSON.

    Of a number that fits no budget, or holds no gate by prediction, the error of its list alone.
    """
    gate = search.options.gate
    plans = lists.cheapest(errors, 10 ** (-latent_bound(gate) / 10)) if gate else lists.best(errors)
    shares, measured = {share.computed: share for share in plans}, dict[int, float]()
    for each in bench.tried:
        count = _computed(each, lists)
        measured[count] = min(each.error, measured.get(count, math.inf))
    return {
        "total": lists.total,
        "computed": _computed(winner, lists),
        "list": winner.listed.steps.to_dict() if winner.listed else None,
        "shares": [
            {
                "computed": count,
                "cost": shares[count].cost if count in shares else None,
                "list_predicted_nmse": error,
                "list_nmse": lists.measured(count),
                "predicted_nmse": shares[count].error if count in shares else None,
                "nmse": measured[count] if math.isfinite(measured.get(count, math.inf)) else None,
            }
            for count, error in sorted(lists.errors.items(), reverse=True)
        ],
    }


def _computed(tried: Tried, lists: Lists) -> int:
    return len(tried.listed.steps.computed) if tried.listed else lists.total


def _card(search: Search, seat: Seat, choice: Choice) -> dict[str, Any]:
    """Return the recipe of each component, the placement, its peaks and how to make it, as JSON has them."""
    job, options = search.job, search.offer.units
    layers = {name: choice[unit] for unit, names in options.items() for name in names}
    model = "MODEL" if job.options.in_memory else job.options.model or job.recipe.model or DEFAULT_MODEL
    revision = ["--revision", job.options.revision] if job.options.revision else []
    words = ["fluxq", "quantize", model, *revision, "--recipe", str(job.output), "-o", job.output.stem]
    return seat.fit(layers, job.output.name, shlex.join(words)).describe()
