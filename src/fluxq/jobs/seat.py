"""Room of a card for a search: the placement of the pipeline, and what it then holds: `fluxq auto --vram`.

    cost of a plan = context + weights on the card while a denoiser runs + activations <= room

Bytes are those of `fluxq plan --vram` and `fluxq.place` (fits.py, runtime/place.py): a quantized layer takes what the
checkpoint stores of it, if fitting keeps all that it may try, and `fluxq.prepare(pipe, prefer="memory")` keeps that on
every chip. The placement is the fastest under which the smallest plan fits; text encoders stay in 16 bit if they can
beside it, else they get the base recipe. Other stages of the call do not depend on the choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fluxq.base.model import ModelFolder
from fluxq.integrations.bounded import load_empty
from fluxq.jobs.fits import IN_16_BIT, Component, Fit, components_of, in_words_of, most_bytes
from fluxq.jobs.job import Job
from fluxq.jobs.menu import Costs, Offer, most_bits
from fluxq.quantize.structure import shapes_of
from fluxq.recipes.budget import extremes
from fluxq.recipes.cards import CONTEXT, ONCE, PartSize, Way, fit, least
from fluxq.recipes.family import Family
from fluxq.recipes.plan import Plan, component_recipe, plan_of
from fluxq.runtime.place import Placement

_Layers = Mapping[str, float]  # "component.path" -> bytes of its weight


@dataclass(frozen=True)
class Seat:
    """Placement of a pipeline whose denoisers have no formats yet.

    recipes: component -> recipe or "16 bit", of all but the denoisers.
    settled: layers that are quantized whatever is chosen.
    units: option -> layers of all units that may take it.
    """

    folder: ModelFolder
    pipeline: str
    components: Sequence[Component]
    recipes: Mapping[str, str]
    settled: _Layers
    units: Mapping[str, _Layers]
    way: Way
    room: float

    @property
    def encoders(self) -> dict[str, Family]:
        """Text encoders that are quantized, and their families."""
        return {n: family for n, family in _encoders(self.components).items() if self.recipes[n] != IN_16_BIT}

    def fit(self, options: Mapping[str, str], recipe: str, command: str) -> Fit:
        """Return the answer for the options of all layers of units.

        recipe: file, for the denoisers; command: the one that makes the folder of that name, "" for none.
        """
        sizes = _parts(self.components, {**self.settled, **{name: self.units[o][name] for name, o in options.items()}})
        recipes = {each.name: self.recipes.get(each.name, recipe) for each in self.components}
        stored = {name: in_words_of(self.folder, name, each) for name, each in recipes.items()}
        peaks = self.way.peaks(sizes) or {}
        return Fit(stored, Placement(self.way, self.room, peaks, self.pipeline, Path(recipe).stem), command)


def seat_of(job: Job, offer: Offer, room: float) -> tuple[Costs, Seat]:
    """Return the bits on a card of `room` bytes while a denoiser runs, and the placement.

    Ways that move weights at every step are left out, and turns of several denoisers: what counts there is the largest
    block or denoiser, which no sum bounds.

    Raises ValueError that names the least bytes where nothing fits.
    """
    pipe = load_empty(job.folder, "bfloat16")
    components = components_of(job.folder, pipe, job.call)
    units = _units(job, offer, components)
    numbers = offer.sums(lambda option, name: 8 * units[option][name])
    smallest = {
        name: units[min(options, key=lambda option: options[option])][name]
        for unit, options in numbers.items()
        for name in offer.units[unit]
    }
    ways = [way for way in ONCE if way.moves == "everything" or len(offer.parts) == 1]
    beside = _beside(job, offer, components)
    sizes = [_parts(components, {**settled, **smallest}) for _, settled in beside]
    for way in ways:
        for (recipes, settled), parts in zip(beside, sizes, strict=True):
            if fitting := fit(parts, room, [way]):
                peaks = fitting[1]
                stage = max(peaks.values()) if way.moves == "everything" else peaks[next(iter(offer.parts))]
                seat = Seat(job.folder, type(pipe).__name__, components, recipes, settled, units, way, room)
                return Costs(numbers, 8 * (CONTEXT + stage) - extremes(numbers)[0]), seat
    needed = math.ceil(min(least(parts, ways) for parts in sizes) / 1e5) / 1e4
    raise ValueError(
        f"--vram: the smallest plan takes {needed:.4f} GB of a card, without weights that move at every step; give at "
        "least that, a --menu with a smaller format, or see `fluxq plan MODEL --vram SIZE`"
    )


def _units(job: Job, offer: Offer, components: Sequence[Component]) -> dict[str, _Layers]:
    """Return option -> layer -> bytes of its weight, of the layers of all units that may take the option."""
    bits, models = most_bits(job, offer), {each.name: each for each in components}

    def size(option: str, name: str) -> float:
        layer, (component, _, path) = offer.layers[option][name], name.partition(".")
        return models[component].own_bytes(path) if layer.scheme is None else bits(layer) / 8

    able = {option: [unit for unit, options in offer.choices.items() if option in options] for option in offer.options}
    return {o: {name: size(o, name) for unit in units for name in offer.units[unit]} for o, units in able.items()}


def _parts(components: Sequence[Component], layers: _Layers) -> list[PartSize]:
    """Return the bytes of components. layers: those that take others than in 16 bit."""
    of: dict[str, dict[str, float]] = {each.name: {} for each in components}
    for name, size in layers.items():
        component, _, path = name.partition(".")
        of[component][path] = size
    return [each.part_with(of[each.name]) for each in components]


def _beside(job: Job, offer: Offer, components: Sequence[Component]) -> list[tuple[dict[str, str], _Layers]]:
    """Return the recipes and layers that are no choice of the search, with text encoders in 16 bit first."""
    chosen, bits = {name for names in offer.units.values() for name in names}, most_bits(job, offer)
    settled = {
        name: bits(layer) / 8
        for plan in job.plans
        for layer in plan.quantized
        if (name := f"{plan.component}.{layer.name}") not in chosen
    }
    planned = {plan.component for plan in job.plans}
    others = [each for each in components if each.name not in offer.parts]
    recipes = {each.name: job.recipe_name if each.name in planned else IN_16_BIT for each in others}
    encoders = {name: family for name, family in _encoders(others).items() if name not in planned}
    layers = {
        f"{each.name}.{layer}": size
        for each in others
        if each.name in encoders
        for layer, size in most_bytes(_plan(job, each, encoders[each.name])).items()
    }
    return [(recipes, settled), ({**recipes, **dict.fromkeys(encoders, job.recipe_name)}, {**settled, **layers})]


def _encoders(components: Sequence[Component]) -> dict[str, Family]:
    """Return the text encoders that a recipe can quantize, and their families."""
    return {each.name: each.family for each in components if each.family and each.family.kind == "text_encoder"}


def _plan(job: Job, component: Component, family: Family) -> Plan:
    """Return the plan of a component under the base recipe, which may not name it."""
    entry = component_recipe(job.recipe, component.name, family)
    return plan_of(family, component.name, shapes_of(component.model), job.recipe, entry)
