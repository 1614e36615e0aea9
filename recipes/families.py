"""Model families: one row says what every Linear of a model is, what shares an input and what stays in 16 bit.

A row is one class of diffusers or transformers. Adding a family means adding a row to DENOISERS or ENCODERS; plan,
calibration, loader and tests iterate the table. A denoiser without a row gets what `generic` makes of its structure.
"""

from __future__ import annotations

from fluxq.recipes.denoisers import DENOISERS
from fluxq.recipes.encoders import ENCODERS
from fluxq.recipes.family import Family
from fluxq.recipes.generic import ModuleTree, generic_family

FAMILIES = {row.name: row for row in (*DENOISERS, *ENCODERS)}


def family_of(model_class: str, tree: ModuleTree | None = None) -> Family:
    """The row for a class of diffusers or transformers; for another one what the structure `tree` of its model says.

    ValueError that says how to add a row: without a tree, and for a structure that says too little.
    """
    for family in FAMILIES.values():
        if family.model == model_class:
            return family
    if tree is not None:
        return generic_family(model_class, tree)
    known = ", ".join(family.model for family in FAMILIES.values())
    raise ValueError(
        f"unknown model family: {model_class} has no row in recipes/families.py (known: {known}); "
        "CONTRIBUTING.md, 'Adding a model family', shows how to add one"
    )
