"""Collect the model families: each file of families/ says all that is known of one.

Adding a family means adding its file, and a row here; plan, calibration, loader, commands and tests iterate the table.
A denoiser without a row gets what `generic` makes of its structure.
"""

from __future__ import annotations

from fluxq.recipes.families.chroma import CHROMA
from fluxq.recipes.families.flux import FLUX
from fluxq.recipes.families.flux2 import FLUX2
from fluxq.recipes.families.hidream import HIDREAM
from fluxq.recipes.families.hunyuan_video import HUNYUAN_VIDEO
from fluxq.recipes.families.ltx import LTX
from fluxq.recipes.families.pixart import PIXART
from fluxq.recipes.families.qwen_image import QWEN_IMAGE
from fluxq.recipes.families.sana import SANA
from fluxq.recipes.families.sd3 import SD3
from fluxq.recipes.families.text_encoders import TEXT_ENCODERS
from fluxq.recipes.families.unet import UNET
from fluxq.recipes.families.vaes import VAES
from fluxq.recipes.families.wan import WAN
from fluxq.recipes.families.z_image import Z_IMAGE
from fluxq.recipes.family import Family
from fluxq.recipes.generic import ModuleTree, generic_family


def family_of(model_class: str, tree: ModuleTree | None = None) -> Family:
    """Return the row for a class of diffusers or transformers.

    For another class it is made of what the structure `tree` of its model says. ValueError that says how to add a
    row: without a tree, and for a structure that says too little.
    """
    for family in FAMILIES.values():
        if family.model == model_class:
            return family
    if tree is not None:
        return generic_family(model_class, tree)
    known = ", ".join(family.model for family in FAMILIES.values())
    raise ValueError(
        f"unknown model family: {model_class} has no row in recipes/all_families.py (known: {known}); "
        "CONTRIBUTING.md, 'Adding a model family', shows how to add one"
    )


_DENOISERS = (
    FLUX,
    FLUX2,
    SD3,
    QWEN_IMAGE,
    WAN,
    CHROMA,
    Z_IMAGE,
    PIXART,
    LTX,
    HUNYUAN_VIDEO,
    SANA,
    HIDREAM,
    UNET,
)
FAMILIES = {row.name: row for row in (*_DENOISERS, *TEXT_ENCODERS, *VAES)}

# Published models are listed in this order; those of all other families follow in the order of FAMILIES.
LISTED_FIRST = (FLUX, FLUX2, CHROMA, SD3, PIXART, QWEN_IMAGE, Z_IMAGE, WAN, LTX, HUNYUAN_VIDEO, HIDREAM)
