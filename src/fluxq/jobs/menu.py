"""Units of a search, the options that each may take, and their costs.

A unit is all Linears that read one input, and, for another program's files, those that share a tensor there; a Linear
of the modulation, the self-attention of a block, or a whole text encoder, if these are asked for. The base recipe keeps
its word on all else: layers that it leaves in 16 bit or that an override of it names, and other components. An option
is a format of the menu, computed as the shipped recipe of its name computes it, for modulation weight-only; the base
recipe's main format is computed as that recipe says. Options that a plan or the dialect refuses are left out. Where
layers are fitted already, each checkpoint is an option (fitted.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from fluxq.base.console import did_you_mean
from fluxq.calibrate.errors import SIXTEEN_BIT
from fluxq.jobs import memory
from fluxq.jobs.fitted import Fitted, tied_layers
from fluxq.jobs.job import Job
from fluxq.jobs.making import model_costs
from fluxq.kernels.findings import times_in
from fluxq.quantize.exchange.dialects import DIALECTS, joined_modules, misfit, misfit_beside
from fluxq.quantize.structure import component_family, list_linears
from fluxq.recipes.budget import Numbers
from fluxq.recipes.computing import Attention, Attentions, gathered
from fluxq.recipes.cost import seconds_of_groups
from fluxq.recipes.devices import find_device, is_called
from fluxq.recipes.family import Family, matches
from fluxq.recipes.formats import FORMATS, Product, Scheme, find_format
from fluxq.recipes.plan import (
    MODULATION_ROLE,
    LayerPlan,
    LinearShape,
    Method,
    Plan,
    attention_paths,
    component_recipe,
    override_for,
    plan_of,
)
from fluxq.recipes.recipe import Component, Operand, Override, Recipe
from fluxq.recipes.writing import override_of

_EIGHT_BITS = ("fp8", "fp8_tensor", "mxfp8", "int8")  # the first that a dialect takes is on the usual menu
_WEIGHT_ONLY = ("int4",)  # elements whose shipped recipe leaves activations in 16 bit

Unit = tuple[str, ...]  # layers, "component.path"
ATTENTION_OPTIONS: tuple[Attention, ...] = ("fp8", "16bit")


@dataclass(frozen=True)
class Part:
    """A component before any choice: its family, its Linears, the base recipe's entry for it, and that plan.

    formats: option -> formats of weights and activations, of options that checkpoints have.
    """

    family: Family
    linears: Sequence[LinearShape]
    recipe: Recipe
    entry: Component
    base: Plan
    formats: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)

    def plan(self, overrides: Sequence[Mapping[str, Any]]) -> Plan:
        """Return the plan with further overrides."""
        added = [Override.model_validate(override) for override in overrides]
        entry = self.entry.model_copy(update={"overrides": [*self.entry.overrides, *added]})
        return plan_of(self.family, self.base.component, self.linears, self.recipe, entry)

    def plan_in(self, option: str, names: Collection[str]) -> Plan:
        """Return the plan with those of `names`, "component.layer", that are its own in one option."""
        paths = [path for path in self.roles if f"{self.base.component}.{path}" in names]
        if option == SIXTEEN_BIT:  # of all layers, it would be a plan of nothing
            plain = (replace(layer, scheme=None, method=Method()) for layer in self.base.layers if layer.name in paths)
            return replace(self.base, layers=tuple({la.name: la for la in (*self.base.layers, *plain)}.values()))
        return self.plan([self.override([path], option, option) for path in paths])

    @property
    def runs_once(self) -> bool:
        """True for a component that runs once per image: it is one unit, quantized weight-only."""
        return self.family.kind != "transformer"

    @cached_property
    def roles(self) -> dict[str, str]:
        """Layer, without its component -> role."""
        return {layer.name: layer.role for layer in self.base.layers}

    @staticmethod
    def path(name: str) -> str:
        """Return the layer of "component.layer"."""
        return name.partition(".")[2]

    def override(self, names: Sequence[str], option: str, reason: str, *, whole_role: bool = False) -> dict[str, Any]:
        """Return an entry of `Override` that gives an option to layers that are or are not modulation, or to a role."""
        role = self.roles[names[0]]
        selector = {"role": role} if whole_role else {"match": [*names]}
        return override_of(selector, self.operands(option, role), reason)

    def operands(self, option: str, role: str) -> tuple[Operand | None, Operand | None]:
        """Return weights and activations of an option for layers of a role, None for 16 bit."""
        if option == SIXTEEN_BIT:
            return None, None
        if self.runs_once and option != self.entry.weights.row.name:
            return Operand(format=option), None
        if role == MODULATION_ROLE:
            kept = self.entry.modulation
            return kept if kept and kept.row.name == option else Operand(format=option), None
        if option == self.entry.weights.row.name:
            return self.entry.weights, self.entry.activations
        if option in self.formats:
            weights, activations = self.formats[option]
            return _operand(weights), None if activations is None else _operand(activations)
        operand = Operand(format=option)
        return operand, None if operand.row.element.name in _WEIGHT_ONLY else operand


def _operand(name: str) -> Operand:
    row = find_format(name)
    plain, _, group = name.partition("_g")
    return Operand(format=plain, group_size=row.group_size) if group else Operand(format=name)


@dataclass(frozen=True)
class Offer:
    """Units, and what each may be.

    options: names, the base recipe's main format first.
    parts: component -> what is there before any choice.
    units: name of the unit, "component.group" -> its layers; "component.path" of an attention, which has none here;
        "component" of one that runs once per image.
    choices: unit -> options that it may take.
    plans: option -> component -> plan with every unit in that option that can be.
    fitted: option -> checkpoint that has its layers; empty where they are rounded to nearest.
    """

    options: tuple[str, ...]
    parts: Mapping[str, Part]
    units: Mapping[str, Unit]
    choices: Mapping[str, tuple[str, ...]]
    plans: Mapping[str, Mapping[str, Plan]]
    fitted: Mapping[str, Fitted] = field(default_factory=dict)

    @cached_property
    def layers(self) -> dict[str, dict[str, LayerPlan]]:
        """Option -> layer "component.path" -> its plan there."""
        return {option: _layers(of_option) for option, of_option in self.plans.items()}

    @property
    def once(self) -> tuple[str, ...]:
        """Units of components that run once per image."""
        return tuple(unit for unit in self.units if unit in self.parts and self.parts[unit].runs_once)

    @property
    def modules(self) -> dict[str, Unit]:
        """Unit -> modules whose outputs its options change."""
        return {unit: names or (unit,) for unit, names in self.units.items()}

    def attention(self, component: str, choice: Mapping[str, str]) -> Attentions:
        """Return the attention of a component under a choice; the base recipe's where it is none of the units."""
        chosen: dict[str, Any] = {
            unit.partition(".")[2]: option
            for unit, option in choice.items()
            if not self.units[unit] and unit.partition(".")[0] == component
        }
        return gathered(chosen) if chosen else self.parts[component].base.attention

    def schemes(self, choice: Mapping[str, str]) -> dict[str, Scheme | None]:
        """Return layer -> scheme, of the layers of all units in `choice`."""
        return {name: self.layers[option][name].scheme for unit, option in choice.items() for name in self.units[unit]}

    def sums(self, cost: Callable[[str, str], float]) -> Numbers:
        """Return unit -> option -> sum of what its layers take. cost: function of an option and a layer."""
        return {
            unit: {option: sum(cost(option, name) for name in self.units[unit]) for option in options}
            for unit, options in self.choices.items()
        }

    @property
    def weights(self) -> dict[str, int]:
        """Number of weights of each unit."""
        layers = next(iter(self.layers.values()))
        return {unit: sum(layers[name].n * layers[name].k for name in names) for unit, names in self.units.items()}


def offer_of(
    job: Job, names: Sequence[str], dialect: str | None, fitted: Mapping[str, Fitted], extra: Collection[str] = ()
) -> Offer:
    """Return the units of a job's transformers and their options.

    names: formats and "16bit"; by default the recipe's main one, and of 8 and of 16 bits what the dialect holds, or all
        that are fitted.
    dialect: a key of WRITERS, None for fluxq's own checkpoints.
    fitted: option -> checkpoint; empty for layers that are rounded to nearest.
    extra: units beside the input groups: "modulation", "attention", components that run once per image.

    ValueError for a format that is unknown, or that no unit can take.
    """
    if not job.calibrated:
        raise ValueError(f"recipe {job.recipe_name} quantizes no transformer of {job.folder.name}; give another one")
    others = {plan.component: plan for plan in job.plans if plan.component in extra}
    parts = {component: _part(job, plan) for component, plan in {**job.calibrated, **others}.items()}
    main = next(iter(parts.values())).entry.weights.row.name
    for name in names:
        _require_format(name)
    if fitted:
        return _fitted_menu(job, parts, names or tuple(fitted), fitted)
    if names:
        return _menu(parts, tuple(sorted(dict.fromkeys(names), key=lambda name: name != main)), dialect, extra=extra)
    usual = [
        (*eight, *sixteen) for sixteen in ((SIXTEEN_BIT,), ()) for eight in (*((name,) for name in _EIGHT_BITS), ())
    ]
    for others in usual:
        with suppress(ValueError):
            return _menu(parts, tuple(dict.fromkeys((main, *others))), dialect, extra=extra)
    return _menu(parts, (main,), dialect, extra=extra)


def _part(job: Job, plan: Plan) -> Part:
    family = component_family(job.folder, plan.component)
    entry = component_recipe(job.recipe, plan.component, family)
    return Part(family, list_linears(job.folder, plan.component), job.recipe, entry, plan)


def _require_format(name: str) -> None:
    try:
        _ = name == SIXTEEN_BIT or find_format(name)
    except ValueError:
        hint = did_you_mean(name, (*FORMATS, SIXTEEN_BIT))
        raise ValueError(f"--menu: unknown format {name!r}{hint}; formats: {', '.join(FORMATS)}, 16bit") from None


def _fitted_menu(job: Job, parts: Mapping[str, Part], names: Sequence[str], fitted: Mapping[str, Fitted]) -> Offer:
    """Return the menu of the layers that checkpoints have; ValueError for a format that none of them is.

    Layers that no unit changes are those of the first checkpoint.
    """
    if unknown := [name for name in names if name not in (*fitted, SIXTEEN_BIT)]:
        there = ", ".join([*fitted, SIXTEEN_BIT])
        raise ValueError(
            f"--menu: no checkpoint of --from is {unknown[0]}; choose of {there}, or give a checkpoint of it"
        )
    formats = {option: one.formats for option, one in fitted.items()}
    parts = {component: replace(part, formats=formats) for component, part in parts.items()}
    first, options = next(iter(fitted.values())), tuple(sorted(dict.fromkeys(names), key=[*fitted, SIXTEEN_BIT].index))
    offer = _menu(parts, options, None, tied_layers(job, fitted))
    chosen = {name for names in offer.units.values() for name in names}

    def as_fitted(option: str, plan: Plan) -> Plan:
        if option not in fitted:
            return plan
        names = [f"{plan.component}.{layer.name}" for layer in plan.layers]
        schemes = [(fitted[option] if name in chosen else first).schemes.get(name) for name in names]
        return replace(plan, layers=tuple(replace(la, scheme=s) for la, s in zip(plan.layers, schemes, strict=True)))

    plans = {o: {name: as_fitted(o, plan) for name, plan in of_option.items()} for o, of_option in offer.plans.items()}
    made = replace(offer, plans=plans, fitted=fitted)
    choices = {
        unit: tuple(
            option
            for option in of_unit
            if all(is_like(made.layers[option][n].scheme, offer.layers[option][n].scheme) for n in offer.units[unit])
        )
        for unit, of_unit in offer.choices.items()
    }
    return replace(
        made,
        units={unit: names for unit, names in offer.units.items() if choices[unit]},
        choices={unit: of_unit for unit, of_unit in choices.items() if of_unit},
    )


def _layers(plans: Mapping[str, Plan]) -> dict[str, LayerPlan]:
    return {f"{component}.{layer.name}": layer for component, plan in plans.items() for layer in plan.layers}


def is_like(one: Scheme | None, other: Scheme | None) -> bool:
    """Tell whether schemes, None for 16 bit, have the same formats; fitting may have added to one of them."""
    return (one and one.formats) == (other and other.formats)


def _menu(
    parts: Mapping[str, Part],
    options: tuple[str, ...],
    dialect: str | None,
    ties: Sequence[Sequence[str]] = (),
    extra: Collection[str] = (),
) -> Offer:
    """Return the menu; ValueError for an option that no unit can take, with the first reason. ties: as `_units`."""
    units = _units(parts, dialect, ties, "modulation" in extra)
    shapes = {f"{name}.{linear.name}": linear for name, part in parts.items() for linear in part.linears}
    refused = {
        option: {unit: why for unit, names in units.items() if (why := _too_odd(parts, option, names, shapes))}
        for option in options
    }
    plans = {
        option: {
            component: part.plan_in(option, [n for unit in units if unit not in refused[option] for n in units[unit]])
            for component, part in parts.items()
        }
        for option in options
    }
    layers = {option: _layers(of_option) for option, of_option in plans.items()}
    for option in options if dialect else ():
        for unit in [unit for unit in units if unit not in refused[option]]:
            of_layers = [{each: layers[each][name] for each in options} for name in units[unit]]
            why = _no_room(str(dialect), option, of_layers)
            refused[option] |= {unit: why} if why else {}
    for option in options:
        if len(refused[option]) == len(units):
            why = next(iter(refused[option].values()), "no Linear may change its format")
            raise ValueError(f"--menu: no unit can be {option}: {why}; leave it out of the menu")
    choices = {unit: tuple(option for option in options if unit not in refused[option]) for unit in units}
    kept = {unit: names for unit, names in units.items() if choices[unit]}  # the others follow the base recipe
    attention = _attention_units(parts) if "attention" in extra else {}
    choices = {unit: choices[unit] for unit in kept} | attention
    return Offer(options, parts, kept | dict.fromkeys(attention, ()), choices, plans)


def _attention_units(parts: Mapping[str, Part]) -> dict[str, tuple[str, ...]]:
    """Return the attention modules that can be replaced, with their options; ValueError where none can."""
    units = [
        f"{component}.{path}"
        for component, part in parts.items()
        for path in attention_paths(part.family, [linear.name for linear in part.linears])
    ]
    if not units:
        models = ", ".join(part.family.model for part in parts.values())
        raise ValueError(f"--attention: that of {models} cannot be replaced; leave out --attention")
    for part in parts.values():
        base = part.base.attention
        others = {*([base] if isinstance(base, str) else base)} - {*ATTENTION_OPTIONS}
        if others:
            raise ValueError(
                f"--attention chooses between {' and '.join(ATTENTION_OPTIONS)}, and the recipe has attention in "
                f"{min(others)}; write `attention: 16bit` there, or leave out --attention"
            )
    return dict.fromkeys(units, ATTENTION_OPTIONS)


def _units(
    parts: Mapping[str, Part], dialect: str | None, ties: Sequence[Sequence[str]], with_modulation: bool
) -> dict[str, Unit]:
    """Return unit -> layers that may change their format, in the model's order. ties: layers that change together."""
    home: dict[str, str] = {}  # layer -> unit
    for component, part in parts.items():
        free = [layer for layer in part.base.layers if _is_free(layer, part, with_modulation)]
        home |= {
            f"{component}.{layer.name}": component if part.runs_once else f"{component}.{layer.group}" for layer in free
        }
        names = [linear.name for linear in part.linears]
        joined = joined_modules(dialect, part.family.name, names) if dialect else ()
        ties = [*ties, *([f"{component}.{path}" for path in paths] for paths in joined)]
    for names in ties:
        tied = [home[name] for name in names if name in home]
        home |= {name: tied[0] for name, unit in home.items() if unit in tied}
    units: dict[str, Unit] = {}
    for name, unit in home.items():
        units[unit] = (*units.get(unit, ()), name)
    return units


def _is_free(layer: LayerPlan, part: Part, with_modulation: bool) -> bool:
    """Tell whether a layer may change its format: the recipe does not set it apart."""
    entry = part.entry
    if override_for(layer, entry.overrides) is not None:
        return False
    if part.runs_once:
        return layer.scheme is not None
    if layer.role == MODULATION_ROLE:  # which a recipe may leave in 16 bit without a word
        return with_modulation and not any(matches(pattern, layer.name) for pattern in entry.exclude)
    return layer.scheme is not None and layer.is_observed


def _too_odd(parts: Mapping[str, Part], option: str, names: Unit, shapes: Mapping[str, LinearShape]) -> str:
    """Return why a format cannot hold the shape of a layer; "" if it holds all."""
    for name in names:
        part = parts[name.partition(".")[0]]
        for operand in part.operands(option, part.roles[part.path(name)]):
            try:
                if operand is not None:
                    operand.row.check_shape(shapes[name].n, shapes[name].k, name)
            except ValueError as error:
                return str(error).partition(";")[0]
    return ""


def _no_room(dialect: str, option: str, plans: Sequence[Mapping[str, LayerPlan]]) -> str:
    """Return why a dialect does not hold a unit in an option, beside the options before it; "" if it does.

    plans: option -> plan, of each layer.
    """
    if option == SIXTEEN_BIT and DIALECTS[dialect].units:
        return f"{dialect} has blocks of its own, without Linears in 16 bit"
    for of_layer in plans:
        layer, scheme = of_layer[option], of_layer[option].scheme
        why = misfit(scheme, (layer.n, layer.k), dialect) if scheme else ""
        before = (of_layer[other].scheme for other in list(of_layer)[: list(of_layer).index(option)])
        for main in before:
            if scheme and main and not why and not misfit(main, (layer.n, layer.k), dialect):
                why = misfit_beside(scheme, main, (layer.n, layer.k), dialect)
        if why:
            return why
    return ""


@dataclass(frozen=True)
class Costs:
    """Costs of the options of each unit, and of all that no unit changes.

    measured: units whose times are no model's.
    """

    numbers: Numbers
    fixed: float
    measured: tuple[str, ...] = ()


def stored_bits(offer: Offer) -> Costs:
    """Return the bits of the Linears of all units before fitting, as `fluxq plan` says them."""
    return Costs(offer.sums(lambda option, name: offer.layers[option][name].stored_bits), 0)


def stored_size(job: Job, offer: Offer) -> Costs:
    """Return the bits of all weights of the checkpoint at most, if fitting keeps all that it may try.

    Components that are not planned are copied as they are.
    """
    if offer.fitted:
        return _fitted_size(job, offer)
    itemsize, most = getattr(torch, job.options.dtype).itemsize, most_bits(job, offer)

    def bits(layer: LayerPlan) -> int:
        return 8 * itemsize * layer.n * layer.k if layer.scheme is None else most(layer)

    planned = {plan.component: plan for plan in job.plans}
    chosen = {name for layers in offer.units.values() for name in layers}
    fixed = 8 * sum(size for name, size in memory.part_bytes(job.folder).items() if name not in planned)
    fixed += sum(bits(la) for plan in job.plans for la in plan.layers if f"{plan.component}.{la.name}" not in chosen)
    for component, plan in planned.items():
        source, linears = job.weights(component), {f"{layer.name}.weight" for layer in plan.layers}
        for stored, stays in ((source.stored(n), source.stays_fp32(n)) for n in source.names if n not in linears):
            fixed += 8 * (stored.nbytes if stays else prod(stored.shape) * itemsize)
    return Costs(offer.sums(lambda option, name: bits(offer.layers[option][name])), fixed)


def most_bits(job: Job, offer: Offer) -> Callable[[LayerPlan], int]:
    """Return the function that says what a layer takes if fitting keeps all that it may try."""
    tries = {name for part in offer.parts.values() for name in part.entry.transforms if job.recipe.profile != "rtn"}

    def most(layer: LayerPlan) -> int:
        if layer.scheme is None:
            return layer.stored_bits
        # Formats of other layers decide whether mean and factors are tried.
        vectors = {name: name in tries and layer.is_observed for name in ("center", "smooth")}
        scheme = replace(layer.scheme, rank=layer.method.rank, **vectors)
        return max(scheme.stored_bits(layer.n, layer.k), layer.most_stored_bits)

    return most


def _fitted_size(job: Job, offer: Offer) -> Costs:
    """Return the bits of all weights of a checkpoint that is put together of fitted layers, exactly."""
    first, itemsize = next(iter(offer.fitted.values())), getattr(torch, job.options.dtype).itemsize

    def bits(option: str, name: str) -> int:
        if option != SIXTEEN_BIT:
            return 8 * offer.fitted[option].nbytes(name)
        component, _, path = name.partition(".")
        source = job.weights(component)
        names = [each for each in source.names if each.rpartition(".")[0] == path]
        return 8 * itemsize * sum(prod(source.stored(each).shape) for each in names)

    others = sum(size for name, size in memory.part_bytes(first.folder).items() if name not in first.components)
    kept = sum(stored.nbytes for part in first.components.values() for stored in part.stored.values())
    replaced = sum(first.nbytes(name) for names in offer.units.values() for name in names)
    return Costs(offer.sums(bits), 8 * (others + kept - replaced))


def modelled_ms(job: Job, offer: Offer, gpu: str, times: Path | None = None) -> Costs:
    """Return the modelled milliseconds of a forward pass of every transformer with one image, fused.

    times: file of `fluxq doctor`. Units that it has in all their options take its times in place of the model's: one
    clock compares options. ValueError for a file of another GPU, or one that is damaged.
    """
    measured = _times_of(times, gpu) if times else {}
    costs = model_costs(job, gpu, "speed", memory.call_size(job.call).frames, 1)
    forwards = {name: cost.forward for name, cost in costs.items()}

    def of(plans: Mapping[str, Plan], times: Mapping[Product, float] | None) -> dict[tuple[str, str], float]:
        return {
            (component, group): 1e3 * seconds
            for component, plan in plans.items()
            if component in forwards
            for group, seconds in seconds_of_groups(plan, forwards[component], find_device(gpu), measured=times).items()
        }

    of_option = {option: of(plans, None) for option, plans in offer.plans.items()}
    timed = {option: of(plans, measured) for option, plans in offer.plans.items()} if measured else {}
    first, layers = offer.options[0], offer.layers[offer.options[0]]
    attended = {
        word: of({name: replace(plan, attention=word) for name, plan in offer.plans[first].items()}, None)
        for word in ATTENTION_OPTIONS
    }
    groups = {
        unit: dict.fromkeys((name.partition(".")[0], layers[name].group) for name in names)
        for unit, names in offer.units.items()
    }
    clocks = {
        unit: attended
        if not groups[unit]
        else timed
        if measured and all(group in timed[option] for option in options for group in groups[unit])
        else of_option
        for unit, options in offer.choices.items()
    }
    groups = {u: names or {(u.partition(".")[0], u.partition(".")[2]): None} for u, names in groups.items()}
    numbers = {
        unit: {option: sum(clocks[unit][option].get(group, 0) for group in groups[unit]) for option in options}
        for unit, options in offer.choices.items()
    }
    changing = {group for of_unit in groups.values() for group in of_unit}
    fixed = sum(ms for group, ms in of_option[first].items() if group not in changing)
    return Costs(numbers, fixed, tuple(unit for unit, clock in clocks.items() if clock is timed))


def _times_of(file: Path, gpu: str) -> dict[Product, float]:
    """Return the times of products that `fluxq doctor` measured on a GPU; ValueError for a file of another one."""
    there, seconds = times_in(file)
    if not is_called(find_device(gpu), there):
        raise ValueError(
            f"--times {file}: it was measured on {there}, not on {find_device(gpu).name}: run `fluxq doctor` there, or "
            "give that --gpu"
        )
    return seconds
