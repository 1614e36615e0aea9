"""The plan: what becomes of every Linear of a model, and why. One LayerPlan each.

    family row says what a layer is  ->  recipe says what to do with that role  ->  LayerPlan

Nothing here reads weights or imports torch: a model is a list of `LinearShape`s (see quantize/checkpoint.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fluxq.recipes.families import Family
from fluxq.recipes.formats import Scheme
from fluxq.recipes.patterns import matches
from fluxq.recipes.recipe import Component, Operand, Override, Recipe

UNKNOWN_ROLE = "other"
KEPT_ROLE = "kept"


@dataclass(frozen=True)
class LinearShape:
    """A Linear of the model: module path, out features N, in features K."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one Linear.

    role: of the family row. group: which Linears share its input, "" if it is not known. joined: they also share
    NVFP4's global weight scale. scheme: None keeps 16 bit. reason: for people.
    """

    name: str
    n: int
    k: int
    role: str
    group: str
    joined: bool
    scheme: Scheme | None
    reason: str

    @property
    def is_observed(self) -> bool:
        """Whether calibration looks at its input: modulation reads one row per image and is left out."""
        return self.group != "" and self.role != "modulation"

    @property
    def shares_global_scale(self) -> bool:
        """Whether its weight has one global scale with the other joined members of its group."""
        return self.joined and self.scheme is not None and self.scheme.weights.two_level

    def describe(self) -> dict[str, object]:
        """The layer as JSON."""
        return {
            "name": self.name,
            "shape": [self.n, self.k],
            "role": self.role,
            "scheme": str(self.scheme) if self.scheme else "16bit",
            "bits_per_weight": self.bits_per_weight,
            "reason": self.reason,
        }

    @property
    def stored_bits(self) -> int:
        """Bits this layer's weight takes in the checkpoint."""
        if self.scheme is None:
            return 16 * self.n * self.k
        return self.scheme.stored_bits(self.n, self.k)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights."""
        return self.stored_bits / (self.n * self.k)


@dataclass(frozen=True)
class Plan:
    """The plan of one component. `notes` says what a recipe asked for that the family does not have."""

    family: str
    component: str
    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[LayerPlan, ...]:
        """The layers that leave 16 bit."""
        return tuple(layer for layer in self.layers if layer.scheme is not None)

    @property
    def bits_per_weight(self) -> float:
        """Mean over the weights of all Linears, 16-bit ones included."""
        return sum(layer.stored_bits for layer in self.layers) / sum(layer.n * layer.k for layer in self.layers)

    def schemes(self) -> list[tuple[str, Scheme]]:
        """(layer name, scheme) of what leaves 16 bit, in the model's order."""
        return [(layer.name, layer.scheme) for layer in self.layers if layer.scheme is not None]

    def statistics_groups(self) -> dict[str, tuple[LayerPlan, ...]]:
        """Input group -> its quantized layers, for the inputs that calibration looks at."""
        groups: dict[str, list[LayerPlan]] = {}
        for layer in self.quantized:
            if layer.is_observed:
                groups.setdefault(layer.group, []).append(layer)
        return {name: tuple(members) for name, members in groups.items()}

    def static_groups(self) -> dict[str, tuple[LayerPlan, ...]]:
        """Input groups that need a calibrated `input_scale`, with the layers that share it."""
        groups = self.statistics_groups().items()
        static = {g: tuple(m for m in members if m.scheme and m.scheme.static_input) for g, members in groups}
        return {group: members for group, members in static.items() if members}


def component_recipe(recipe: Recipe, component: str | None, family: Family) -> Component:
    """What a recipe says about a component of the class that `family` describes.

    Its own entry, where the recipe names the component; else a transformer takes the entry `transformer`, and a text
    encoder or VAE that entry's weight format, weight-only. component: None where the name is not known, as in a class
    loaded by itself. Raises ValueError where the recipe says nothing, and for activations of a component whose
    activations are not worth quantizing.
    """
    own = recipe.components.get(component or ("vae" if family.kind == "vae" else ""))
    if own is not None:
        if family.kind != "transformer" and any(part.activations for part in (own, *own.overrides)):
            raise ValueError(
                f"{component or 'vae'}: it runs once per image, so quantizing its activations saves no time worth the "
                "error; write `activations: null`"
            )
        return own
    main = recipe.components.get("transformer")
    if main is None or (component is None and family.kind == "vae"):
        raise ValueError(f"the recipe says nothing about {component or family.model}: give it an entry in `components`")
    return main if family.kind == "transformer" else Component(weights=main.weights)


def make_plan(
    family: Family,
    component_name: str,
    recipe: Component,
    linears: Sequence[LinearShape],
    *,
    static_inputs: bool,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> Plan:
    """Plan every Linear in the model's own order.

    static_inputs: two-level activations get a calibrated global scale. include, exclude: patterns from the command
    line. Raises ValueError for a pattern or role that matches nothing and for shapes that a format cannot hold.
    """
    names = [linear.name for linear in linears]
    excluded = [*recipe.exclude, *exclude]
    included = list(include)
    require_matches([*excluded, *included, *(o.match for o in recipe.overrides if o.match)], names)
    notes = _absent_roles(family, recipe)
    layers = []
    for linear in linears:
        layer = _located(family, linear)
        layer = _decide(layer, family, recipe, static_inputs)
        if layer.scheme is not None:
            pattern = next((p for p in excluded if matches(p, layer.name)), None)
            if pattern is not None:
                layer = replace(layer, scheme=None, reason=f"excluded by {pattern!r}")
            elif included and not any(matches(p, layer.name) for p in included):
                layer = replace(layer, scheme=None, reason="not among the included layers")
        if layer.scheme is not None:
            layer.scheme.weights.check_shape(layer.n, layer.k, layer.name)
            if layer.scheme.activations is not None:
                layer.scheme.activations.check_shape(1, layer.k, f"input of {layer.name}")
        layers.append(layer)
    if not any(layer.scheme for layer in layers):
        which = "the recipe leaves every Linear in 16 bit" if layers else "the model has no Linears"
        raise ValueError(f"{component_name}: {which}; there is nothing to quantize")
    return Plan(family.name, component_name, tuple(layers), tuple(notes))


def require_matches(patterns: Iterable[str], names: Sequence[str]) -> None:
    """ValueError naming the first pattern that matches none of the Linears called `names`, with a near one."""
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            tail = pattern.rpartition(".")[2]
            same_tail = [name for name in names if tail in name.split(".")]
            near = (same_tail or difflib.get_close_matches(pattern, names, n=1, cutoff=0) or ["none"])[0]
            raise ValueError(
                f"pattern {pattern!r} matches no Linear of this model; patterns are whole paths with * for one segment "
                f"and ** for any number, for example {near!r} (`fluxq plan` lists all)"
            )


def _located(family: Family, linear: LinearShape) -> LayerPlan:
    found = family.locate(linear.name)
    if found is None:
        role = KEPT_ROLE if family.kept(linear.name) else UNKNOWN_ROLE
        return LayerPlan(linear.name, linear.n, linear.k, role, "", False, None, "")
    group, block = found
    name = f"{block}.{group.members[0]}"  # the first member names the group
    return LayerPlan(linear.name, linear.n, linear.k, group.role, name, group.joined, None, "")


def _decide(layer: LayerPlan, family: Family, recipe: Component, static_inputs: bool) -> LayerPlan:
    """The scheme and the reason, before include and exclude."""
    override = _override_for(layer, recipe.overrides)
    if override is not None:
        scheme = _scheme(override.weights, override.activations, static_inputs and layer.is_observed)
        return replace(layer, scheme=scheme, reason=override.reason)
    if layer.role == KEPT_ROLE:
        return replace(layer, reason=f"16 bit: {family.kept(layer.name)}")
    if layer.role == UNKNOWN_ROLE:
        return replace(layer, reason=f"16 bit: the {family.name} row does not name it")
    if layer.role == "modulation":
        reason = "weight-only: its input is one row per image, so quantizing that saves nothing"
        if recipe.modulation is None:
            return replace(layer, reason="16 bit: modulation scales every token, and the recipe leaves it alone")
        return replace(layer, scheme=_scheme(recipe.modulation, None, False), reason=reason)
    reason = f"{layer.role}: the recipe's main format"
    return replace(layer, scheme=_scheme(recipe.weights, recipe.activations, static_inputs), reason=reason)


def _scheme(weights: Operand | None, activations: Operand | None, static_inputs: bool) -> Scheme | None:
    if weights is None:
        return None
    row = activations.row if activations else None
    return Scheme(weights.row, row, static_input=bool(row and row.two_level and static_inputs))


def _override_for(layer: LayerPlan, overrides: Sequence[Override]) -> Override | None:
    for override in reversed(overrides):
        if override.role == layer.role or (override.match and matches(override.match, layer.name)):
            return override
    return None


def _absent_roles(family: Family, recipe: Component) -> list[str]:
    roles = [override.role for override in recipe.overrides if override.role]
    return [f"role {role!r}: the {family.name} family has none, skipped" for role in roles if role not in family.roles]
