"""Model families: one row says what every Linear of a model is, what shares an input and what stays in 16 bit.

A row is one class of diffusers or transformers. Adding a family means adding a row to DENOISERS or ENCODERS; plan,
calibration, loader and tests iterate the table.
"""

from __future__ import annotations

from fluxq.recipes.denoisers import DENOISERS
from fluxq.recipes.encoders import ENCODERS
from fluxq.recipes.family import Family

FAMILIES = {row.name: row for row in (*DENOISERS, *ENCODERS)}


def family_of(model_class: str) -> Family:
    """The row for a class of diffusers or transformers; ValueError that says how to add one."""
    for family in FAMILIES.values():
        if family.model == model_class:
            return family
    known = ", ".join(family.model for family in FAMILIES.values())
    raise ValueError(
        f"unknown model family: {model_class} has no row in recipes/families.py (known: {known}); "
        "CONTRIBUTING.md, 'Adding a model family', shows how to add one"
    )
