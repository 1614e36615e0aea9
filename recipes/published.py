"""Find published models: the configuration that each is shipped with makes a plan of it without a download.

    family + configuration -> the model on the meta device -> plan, sizes, cost

Each family lists its own. A configuration says what differs from the defaults of the model's class; models of the same
one share a row. Each was read in what its authors published or in diffusers' conversion scripts, and
tests/jobs/test_catalogue.py compares the number of parameters with the published one. Imports no torch.
"""

from __future__ import annotations

import re

from fluxq.base.console import did_you_mean
from fluxq.recipes.all_families import FAMILIES, LISTED_FIRST
from fluxq.recipes.family import Published


def find_published(name: str) -> list[Published]:
    """Find the models that `name` means: a model, a family of FAMILIES or a model's class, in any case.

    ValueError naming what is near for any other name.
    """
    wanted = _plain(name)
    exact = [row for row in PUBLISHED if wanted in map(_plain, (row.name, *row.also))]
    if exact:
        return exact
    found = [row for row in PUBLISHED if wanted in (_plain(row.family), _plain(FAMILIES[row.family].model))]
    if found:
        return found
    names = [each for row in PUBLISHED for each in (row.name, *row.also)]
    near = [each for each in names if wanted and wanted in _plain(each)]
    known = f"models with that in their name: {', '.join(near)}" if near else f"families: {', '.join(FAMILIES)}"
    hint = did_you_mean(name, names) if not near else ""
    raise ValueError(f"{name}: no published model, family or model class of that name{hint or '; ' + known}")


def hub_ids(name: str) -> tuple[str, ...]:
    """Return where the hub has the published model of that name, in any case; () for a name that is none."""
    wanted = _plain(name)
    return next((repos for known, repos in HUB_IDS.items() if _plain(known) == wanted), ())


def _plain(name: str) -> str:
    return re.sub(r"[\s_.-]", "", name).lower()


_LISTED = dict.fromkeys((*(row.name for row in LISTED_FIRST), *FAMILIES))  # names of families, each once

PUBLISHED = tuple(model for name in _LISTED for model in FAMILIES[name].published)

# Published model -> its pipelines in diffusers' layout on the Hugging Face hub.
HUB_IDS = {model: repos for name in _LISTED for model, repos in FAMILIES[name].hub_ids.items()}
