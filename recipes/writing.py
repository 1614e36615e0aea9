"""Write a recipe as a YAML file that extends a shipped one, or is complete where it comes from another file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from fluxq.recipes.family import Family
from fluxq.recipes.plan import component_recipe
from fluxq.recipes.recipe import Operand, Recipe, load_recipe, shipped_recipes


def recipe_with(
    name: str,
    recipe: Recipe,
    changes: Mapping[str, Mapping[str, Any] | None],
    families: Mapping[str, Family],
    about: str,
    steps: Mapping[str, Any] | None = None,
) -> str:
    """Return a recipe in YAML with other entries.

    changes: component -> keys of its entry, None to leave it out; overrides, from `override_of`, are added to those
        that it has.
    families: component -> its family.
    about: end of the first line, which begins with the recipe's name.
    steps: keys of `steps`, which are added to the recipe's; None for what it says.

    ValueError if the recipe cannot hold them.
    """
    is_shipped = name in shipped_recipes() and load_recipe(name)[1].digest == recipe.digest and recipe.auto is None
    whole = {"version": recipe.version, **recipe.model_dump(mode="json", exclude_defaults=True, exclude={"auto"})}
    entries: dict[str, Any] = {}
    for component, changed in changes.items():
        if changed is None:
            whole["components"].pop(component, None)
            continue
        entry = component_recipe(recipe, component, families[component]).model_dump(mode="json", exclude_defaults=True)
        both = dict(changed)
        if added := changed.get("overrides"):
            both["overrides"] = [*entry.get("overrides", ()), *added]
        entries[component] = both if is_shipped and component in recipe.components else entry | both
    whole["components"] |= {c: whole["components"].get(c, {}) | entry for c, entry in entries.items()}
    document = {"extends": name, "components": entries} if is_shipped else whole
    if steps is not None:
        whole["steps"] = document["steps"] = {**whole.get("steps", {}), **steps}
    Recipe.model_validate(whole)
    body = yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None)
    return f"# {name}, {about}.\n{body}"


def override_of(
    selector: Mapping[str, str | list[str]], operands: Iterable[Operand | None], reason: str
) -> dict[str, Any]:
    """Return an entry of `Override` for the layers of {"role": …} or {"match": …}.

    operands: weights and activations, each None for 16 bit.
    """
    named = zip(("weights", "activations"), operands, strict=True)
    formats = {name: each.model_dump(exclude_defaults=True) for name, each in named if each is not None}
    return {**selector, **formats, "reason": reason}
