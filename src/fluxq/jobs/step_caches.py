"""Step caches of an evaluation: what is refused early, what is measured beforehand, and fewer steps beside each.

    N = fewest steps of all T with N / T >= share that a cache computes

So many steps without a cache are a side of their own, with the same prompts and noise, made once for equal N.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch

from fluxq.base.console import logger, without_cure
from fluxq.base.devices import versions
from fluxq.base.files import read_sealed_json, sha256_json, write_sealed_json
from fluxq.base.model import ModelFolder
from fluxq.base.output import sole_writer
from fluxq.calibrate.capture import number_of_steps
from fluxq.calibrate.prompts import load_prompts
from fluxq.eval.images.executor import Engine, ImageFolder, one_thread
from fluxq.eval.images.sides import Side, shortened
from fluxq.jobs.listing import listed_call, trials_of
from fluxq.quantize.structure import denoisers_of
from fluxq.recipes.step_list import StepList
from fluxq.runtime.skipped import require_own
from fluxq.runtime.step_caches import CACHES, LIST, StepCache, caches_of, fewer_steps, measured_for
from fluxq.runtime.step_trials import FORMS, IMAGES, SEED, computed_of

_SLACK = 1e-6  # of a share: sums of multiplications are exact


def require_caches(texts: Sequence[str], folder: ModelFolder, call: Mapping[str, Any]) -> tuple[StepCache, ...]:
    """Read step caches; ValueError for one that this model's denoiser or scheduler cannot have."""
    caches = caches_of(texts)
    for cache in caches:
        if cache.kind == LIST:
            scheduler, _ = listed_call(folder, call)
            if cache.made is not None:
                require_own(cache.steps, scheduler)
            continue
        for name in denoisers_of(folder):
            if not hasattr(getattr(diffusers, folder.components[name], None), "enable_cache"):
                raise ValueError(
                    f"{folder.name}: its {folder.components[name]} takes no step cache in this diffusers: leave out "
                    f"{cache.label}; a list of steps works, --cache list={CACHES[LIST].usual:g}"
                )
    return caches


def measured_caches(
    caches: Sequence[StepCache],
    folder: ModelFolder,
    reference: Side,
    call: Mapping[str, Any],
    prompt: str,
    device: str,
    root: Path,
    engine: Engine,
) -> list[StepCache]:
    """Return caches with what is measured beforehand on the 16-bit model, by the process that leads, and kept."""
    made = []
    for cache in caches:
        if cache.is_unmeasured:
            decides = [cache.value] if cache.kind == LIST else [prompt]
            facts = [cache.kind, decides, reference.describe(), call, torch.device(device).type, versions()]
            work = root / f"{cache.kind}-{sha256_json(facts)[:16]}.work"
            measurement = _measure(cache, folder, reference, call, prompt, device, work) if engine.leads else None
            cache = cache.having(engine.agree(measurement))
        made.append(cache)
    return made


def images_to_measure(caches: Sequence[StepCache]) -> int:
    """Return how many images of all steps take as long as what is made for caches beforehand."""
    shares = ((cache.value or 1) if cache.kind == LIST else None for cache in caches if cache.is_unmeasured)
    return sum(1 if share is None else round(IMAGES * (2 + FORMS * share)) for share in shares)


def sides_of_fewer(
    sides: Sequence[Side], sets: Sequence[ImageFolder | None], total: int, engine: Engine
) -> dict[str, Side]:
    """Return name of a side that leaves steps out -> side of fewer steps at no less compute; none where it does not."""
    counts = engine.agree([_least(images, total) for images in sets])
    plain = {side.backend: side for side in sides if side.cache is None}
    return {
        side.name: shortened(plain[side.backend], fewer_steps(count))
        for side, count in zip(sides, counts, strict=True)
        if count < total
    }


def share_of(side: Side, images: ImageFolder, total: int) -> float | None:
    """Return the share of the multiplications of all steps that a side computes, None where that is all."""
    return images.computed if side.fewer is None else side.fewer / total


def arguments_of(side: Side, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a side's calls."""
    return dict(call) if side.fewer is None else {**call, "num_inference_steps": side.fewer}


def _least(images: ImageFolder | None, total: int) -> int:
    share = images.computed if images is not None else None
    return total if share is None else math.ceil(total * (share - _SLACK))


def _measure(
    cache: StepCache,
    folder: ModelFolder,
    reference: Side,
    call: Mapping[str, Any],
    prompt: str,
    device: str,
    work: Path,
) -> str:
    """Return what is measured for a cache, which a work folder keeps for the next run."""
    file = work / "made.json"
    try:
        if file.is_file():
            return read_sealed_json(file)["made"]
    except ValueError as error:
        logger.warning("%s: measured again", without_cure(error))
    work.mkdir(parents=True, exist_ok=True)
    with sole_writer(work), one_thread(torch.device(device).type):  # as images are made
        pipe = reference.open(device)
        if cache.kind == LIST:
            made = json.dumps(_list(folder, pipe, cache.value or 1, call, work).to_dict())
        else:
            made = measured_for(cache, pipe, call, (prompt, SEED))
        write_sealed_json(file, {"made": made})
    return made


def _list(folder: ModelFolder, pipe: Any, share: float, call: Mapping[str, Any], work: Path) -> StepList:
    """Return the list of a share of the steps, made as `fluxq steps` makes it."""
    items = load_prompts("default", folder).alike.items(2 * IMAGES, SEED)
    trials = trials_of(pipe, denoisers_of(folder), items, call, work)
    return trials.best(computed_of(share, number_of_steps(pipe, call))).steps
