"""Best shipped recipe, and the placement that lets it fit a card, by bytes alone: `fluxq plan --vram`, `families`.

`fluxq auto --vram` chooses formats layer by layer instead: see seat.py.

    choices     16 bit or a recipe for the denoisers, 16 bit or the same recipe for the text encoders, VAEs in 16 bit
    order       bytes of the denoisers, then of the text encoders, the most first: that is the order of quality
    answer      the first choice that a way without moving weights at every step lets fit, else the first that any does

Bytes of weights are those of the plan, with all that a recipe may try. A chip's instructions are not asked for:
where 4 bits are re-encoded to 8, `fluxq.prepare(pipe, prefer="memory")` keeps them as small (recipes/cost.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from fluxq.base import console
from fluxq.base.model import ModelFolder
from fluxq.quantize.structure import component_family, shapes_of
from fluxq.recipes.cards import EVERY_STEP, ONCE, PartSize, Way, fit, in_words, least
from fluxq.recipes.family import Family
from fluxq.recipes.plan import LinearShape, Plan, component_recipe, plan_of
from fluxq.recipes.recipe import load_recipe, shipped_recipes
from fluxq.runtime.modulation import MAX_ROWS
from fluxq.runtime.place import Placement, activations_of, part_of, rows_of
from fluxq.runtime.placed import models_of

IN_16_BIT, AS_STORED = "16 bit", "as stored"
_QUANTIZED = ("transformer", "text_encoder")  # kinds of components


@dataclass
class Component:
    """Component of a pipeline, on the meta device in 16 bit; bytes are of a call.

    family: None for one that no recipe quantizes.
    """

    name: str
    model: nn.Module
    family: Family | None
    activations: float = 0.0
    in_tiles: float | None = None
    rows: int = MAX_ROWS
    _parts: dict[str, PartSize] = field(default_factory=dict)

    def part(self, recipe: str) -> PartSize:
        """Return its bytes under a recipe, or in 16 bit."""
        if recipe not in self._parts:
            stored: dict[str, float] = {}
            if self.family is not None and recipe != IN_16_BIT:
                stored = most_bytes(plan_under(recipe, self.family, self.name, shapes_of(self.model)))
            self._parts[recipe] = self.part_with(stored)
        return self._parts[recipe]

    def part_with(self, stored: Mapping[str, float]) -> PartSize:
        """Return its bytes where Linears take others than in 16 bit. stored: layer -> bytes of its weight."""
        how: dict[str, Any] = {"activations": self.activations, "in_tiles": self.in_tiles, "rows": self.rows}
        return part_of(self.name, self.model, **how, stored=stored)

    def own_bytes(self, layer: str) -> int:
        """Return the bytes of a Linear's weight that is not quantized."""
        return self.model.get_parameter(f"{layer}.weight").nbytes


@dataclass(frozen=True)
class Choice:
    """Recipe of each component, and its bytes."""

    recipes: Mapping[str, str]
    parts: Sequence[PartSize]


@dataclass(frozen=True)
class Fit:
    """Answer for a card: the recipe of each component, and the placement; `command` quantizes, empty for none."""

    recipes: Mapping[str, str]
    placement: Placement
    command: str

    def describe(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        return {"recipes": dict(self.recipes), "command": self.command, **self.placement.describe()}


def best_fit(
    folder: ModelFolder,
    room: float,
    call: Mapping[str, Any],
    recipes: Iterable[str] = (),
    *,
    model: str = "",
    revision: str | None = None,
) -> Fit:
    """Return the best recipe and placement of a pipeline's folder whose whole call fits into a card of `room` bytes.

    call: arguments of the pipeline. recipes: names or files to choose from, by default all that are shipped; a
    component that is quantized already stays as it is. model, revision: as they are called in the lines of the answer,
    by default by its path. No weights are read, and nothing is computed with them.

    Raises ValueError that names the least bytes where nothing fits.
    """
    from fluxq.integrations.bounded import load_empty  # these import diffusers' pipelines

    pipe = load_empty(folder, "bfloat16")
    components = components_of(folder, pipe, call)
    options = choices(components, tuple(recipes) or tuple(shipped_recipes()))
    answer = best(options, room)
    if answer is None:
        needed = in_words(min(least(choice.parts) for choice in options))
        raise ValueError(
            f"{folder.name}: nothing fits into {console.size(room)}; the least is {needed}. Take a card with "
            "that, or a smaller --height and --width"
        )
    choice, way, peaks = answer
    stored = {name: in_words_of(folder, name, recipe) for name, recipe in choice.recipes.items()}
    quantized = {name: recipe for name, recipe in choice.recipes.items() if recipe != IN_16_BIT}
    source, command = model if model and not revision else str(folder.path), ""
    if quantized:
        recipe = next(iter(quantized.values()))
        words = [model, "--revision", revision] if model and revision else [source]
        words += ["--recipe", recipe, "--components", ",".join(quantized)]
        source = f"{Path(folder.name).name}-{Path(recipe).stem}"
        command = shlex.join(["fluxq", "quantize", *words, "-o", source])
    return Fit(stored, Placement(way, room, peaks, type(pipe).__name__, source), command)


def most_bytes(plan: Plan) -> dict[str, float]:
    """Return layer -> most bytes of its weight, of the quantized layers of a plan."""
    return {layer.name: layer.most_stored_bits / 8 for layer in plan.quantized}


def choices(components: Sequence[Component], recipes: Iterable[str]) -> list[Choice]:
    """Return the choices of recipes for denoisers and text encoders, in the order of quality."""
    pairs = {(IN_16_BIT, IN_16_BIT): None}
    pairs |= {pair: None for one in recipes for pair in ((IN_16_BIT, one), (one, IN_16_BIT), (one, one))}
    possible = [_choice(components, dict(zip(_QUANTIZED, pair, strict=True))) for pair in pairs]
    different = {tuple(choice.recipes.values()): choice for choice in possible}  # there may be no text encoder
    kinds = {each.name: each.family.kind if each.family else "" for each in components}

    def quality(choice: Choice) -> tuple[float, ...]:
        return tuple(-sum(part.weights for part in choice.parts if kinds[part.name] == kind) for kind in _QUANTIZED)

    return sorted(different.values(), key=quality)


def best(options: Sequence[Choice], room: float) -> tuple[Choice, Way, dict[str, float]] | None:
    """Return the first choice that fits, its way and peaks; None if none does."""
    for ways in (ONCE, EVERY_STEP):
        for choice in options:
            if fitting := fit(choice.parts, room, ways):
                return choice, *fitting
    return None


def plan_under(recipe_name: str, family: Family, component: str, linears: Sequence[LinearShape]) -> Plan:
    """Return the plan of a component under a recipe; ValueError for a recipe that this kind of model cannot have."""
    recipe = recipe_of(recipe_name)[1]
    return plan_of(family, component, linears, recipe, component_recipe(recipe, component, family))


recipe_of = cache(load_recipe)


def _choice(components: Sequence[Component], recipes: Mapping[str, str]) -> Choice:
    of_kind = {each.name: recipes.get(each.family.kind, IN_16_BIT) if each.family else IN_16_BIT for each in components}
    return Choice(of_kind, [each.part(of_kind[each.name]) for each in components])


def components_of(folder: ModelFolder, pipe: Any, call: Mapping[str, Any]) -> list[Component]:
    """Return the components of a pipeline without weights, with what a call takes beside them."""
    plain, tiled = activations_of(pipe, call)
    rows, models = rows_of(pipe, call), models_of(pipe)
    return [
        Component(name, models[name], _family(folder, name), took, tiled.get(name), rows)
        for name, took in plain.items()
    ]


def _family(folder: ModelFolder, component: str) -> Family | None:
    """Return the family of a component that a recipe can quantize, None for others."""
    if "quantization_config" in folder.config(component):
        return None
    try:
        family = component_family(folder, component)
    except ValueError:
        return None
    return family if family.kind in _QUANTIZED else None


def in_words_of(folder: ModelFolder, component: str, recipe: str) -> str:
    """Return the recipe of a component as the answer has it."""
    is_stored = recipe == IN_16_BIT and "quantization_config" in folder.config(component)
    return AS_STORED if is_stored else recipe
