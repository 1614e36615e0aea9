"""Faults of a recipe file, each with its line and a cure: `fluxq recipe check`.

Beside what reading it refuses, a role that no family has: another family's is skipped by plans, and so would a misspelt
one be. `fluxq plan` says which patterns match, for it knows the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from fluxq.base.console import did_you_mean
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.generic import UNNAMED_ROLE
from fluxq.recipes.recipe import Recipe, faults_in, line_of, load_recipe


def faults_of(name_or_path: str) -> list[str]:
    """Return a line for each fault of a recipe, as `FILE:LINE: what it is; cure`; none if all is well.

    Raises FileNotFoundError where there is no such recipe.
    """
    return faults_in(name_or_path) or [*_unknown_roles(name_or_path, load_recipe(name_or_path)[1])]


def _unknown_roles(name_or_path: str, recipe: Recipe) -> Iterator[str]:
    roles = sorted({UNNAMED_ROLE, *(group.role for family in FAMILIES.values() for group in family.groups)})
    for name, component in recipe.components.items():
        for index, override in enumerate(component.overrides):
            if override.role is not None and override.role not in roles:
                where = line_of(name_or_path, ("components", name, "overrides", index, "role"))
                hint = did_you_mean(override.role, roles)
                yield f"{where}: no family has a role {override.role!r}{hint}; roles: {', '.join(roles)}"
