"""Collect the model families: each file of families/ describes one.

Adding a family means adding its file, and a row here; plan, calibration, loader, commands and tests iterate the table.
For a denoiser without a row `generic` makes a family from its structure.

Each family lists its published models. The configuration that one is shipped with makes a plan without a download:

    family + configuration -> the model on the meta device -> plan, sizes, cost

A configuration lists the differences from the defaults of the model's class; models of the same one share a row. Each
was read in its authors' publication or in diffusers' conversion scripts, and tests/jobs/test_catalogue.py compares the
number of parameters with the published one. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import replace

from fluxq.base.console import did_you_mean
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
from fluxq.recipes.family import Family, Published
from fluxq.recipes.generic import ModuleTree, generic_family


def family_of(model_class: str, tree: ModuleTree | None = None) -> Family:
    """Return the row for a class of diffusers or transformers.

    For another class a family is made from the structure `tree` of its model. Raises ValueError that says how to add a
    row: without a tree, and for a structure that says too little.
    """
    if model_class in BY_CLASS:
        return BY_CLASS[model_class]
    if tree is not None:
        return generic_family(model_class, tree)
    raise ValueError(
        f"unknown model family: {model_class} has no row in recipes/all_families.py (known: {', '.join(BY_CLASS)}); "
        "CONTRIBUTING.md, 'Adding a model family', shows how to add one"
    )


def find_published(name: str) -> list[Published]:
    """Find the models of a name: a model, a family of FAMILIES or a model's class, in any case.

    ValueError with near names for any other name.
    """
    wanted = _plain(name)
    exact = [row for row in PUBLISHED if wanted in map(_plain, (row.name, *row.also))]
    if exact:
        return exact
    members = [row for row in PUBLISHED if wanted in (_plain(row.family), _plain(FAMILIES[row.family].model))]
    if members:
        return members
    names = [each for row in PUBLISHED for each in (row.name, *row.also)]
    near = [each for each in names if wanted and wanted in _plain(each)]
    suggestions = f"models with that in their name: {', '.join(near)}" if near else f"families: {', '.join(FAMILIES)}"
    hint = did_you_mean(name, names) if not near else ""
    raise ValueError(f"{name}: no published model, family or model class of that name{hint or '; ' + suggestions}")


def hub_ids(name: str) -> tuple[str, ...]:
    """Return the hub's repositories of the published model of that name, in any case; () for another name."""
    wanted = _plain(name)
    return next((repos for model, repos in HUB_IDS.items() if _plain(model) == wanted), ())


def _plain(name: str) -> str:
    return re.sub(r"[\s_.-]", "", name).lower()


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
BY_CLASS = {row.model: row for row in FAMILIES.values()}

# Published models are listed in this order; those of all other families follow in the order of FAMILIES.
_LISTED_FIRST = (FLUX, FLUX2, CHROMA, SD3, PIXART, QWEN_IMAGE, Z_IMAGE, WAN, LTX, HUNYUAN_VIDEO, HIDREAM)
_LISTED = {row.name: row for row in (*_LISTED_FIRST, *FAMILIES.values())}.values()
PUBLISHED = tuple(replace(model, family=family.name) for family in _LISTED for model in family.published)
# Published model -> its pipelines in diffusers' layout on the Hugging Face hub.
HUB_IDS = {model: repos for family in _LISTED for model, repos in family.pipelines.items()}
