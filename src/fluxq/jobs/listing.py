"""Make the list of a recipe's `steps: {compute: …}`, for the checkpoint to record.

It is made as that of `fluxq steps`, with the 16-bit pipeline: fitted to outputs with the noise of codes in them, a list
is worse for the quantized one, too (docs/steps.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fluxq.base.console import logger, without_cure
from fluxq.base.model import ModelFolder
from fluxq.base.tensors import TensorFile, save_sealed
from fluxq.calibrate.capture import Item, number_of_steps
from fluxq.calibrate.paths import Velocities, measure_velocities, require_listed
from fluxq.jobs.job import RUNS, Job
from fluxq.jobs.requirements import require_steps, scheduler_of
from fluxq.quantize.structure import denoisers_of
from fluxq.recipes.computing import QuantizationConfig, quantization_of
from fluxq.recipes.step_list import StepList
from fluxq.runtime.step_trials import FORMS, IMAGES, SEED, Trials, computed_of
from fluxq.runtime.steps import require_followed

VELOCITIES = "velocities.safetensors"  # in the work folder


def require_list_of_recipe(job: Job) -> None:
    """Raise ValueError for a recipe of which no list can be made."""
    _, total = listed_call(job.folder, job.call)
    steps, call_steps = job.recipe.steps, job.call.get("num_inference_steps")
    if steps and steps.of is not None and call_steps != steps.of:
        raise ValueError(
            f"recipe {job.recipe_name} computes {steps.compute:g} of {steps.of} steps, and this call has {call_steps}: "
            "leave out --num-inference-steps, or write another `of` into its `steps`"
        )
    count, kept = _wanted(job, total)
    least = len(kept | {0, total - 1})
    if count < least:
        raise ValueError(
            f"recipe {job.recipe_name} computes {count} of the {total} steps of a call, and {least} have to be, with "
            "those that it keeps in 16 bit: write a larger `compute` in its `steps`, or smaller `first` and `last`"
        )


def listed_call(folder: ModelFolder, call: Mapping[str, Any]) -> tuple[Any, int]:
    """Return the scheduler and the number of steps of a call; ValueError for those that no list can be of."""
    require_steps(folder)
    scheduler, total = scheduler_of(folder), number_of_steps(folder.pipeline_class, call)
    require_followed(scheduler)
    require_listed(scheduler, total)
    return scheduler, total


def list_of_recipe(job: Job, pipe: Any, work: Path) -> StepList:
    """Return the list of least measured error that computes the recipe's share of steps, and those that it keeps."""
    count, kept = _wanted(job, number_of_steps(pipe, job.call))
    trials = trials_of(pipe, denoisers_of(job.folder), items_of_list(job), job.call, work, kept)
    return trials.best(count).steps


def trials_of(
    pipe: Any,
    denoisers: Sequence[str],
    items: Sequence[Item],
    call: Mapping[str, Any],
    work: Path,
    required: Collection[int] = (),
) -> Trials:
    """Measure the steps of a pipeline on the first half of the images, and return trials on the other.

    Measurements stay in the work folder, and an interrupted run goes on with them.

    required: steps that every list computes, beside the first and the last.
    """
    half = len(items) // 2
    velocities = _velocities_of(pipe, denoisers, items[:half], call, work)
    return Trials(pipe, velocities, items[half:], call, work / RUNS, required)


def items_of_list(job: Job) -> Sequence[Item]:
    """Return the images of a recipe's list: the first half is measured, the other decides."""
    return job.prompts.alike.items(2 * IMAGES, SEED + job.calibration.seed)


def lists_of_checkpoint(folder: ModelFolder) -> list[StepList]:
    """Return the lists that a checkpoint's denoisers record."""
    configs = (quantization_of(folder.config(name)) for name in denoisers_of(folder))
    recorded = (QuantizationConfig.from_dict(config).step_lists for config in configs if config)
    return [*next(filter(None, recorded), {}).values()]


def passes_of_list(job: Job, total: int) -> float:
    """Return the steps of an image that `list_of_recipe` computes of each of its IMAGES."""
    count, _ = _wanted(job, total)
    return 2 * total + FORMS * count


def _velocities_of(
    pipe: Any, denoisers: Sequence[str], items: Sequence[Item], call: Mapping[str, Any], work: Path
) -> Velocities:
    """Return the inner products, read from the work folder or measured and kept there."""
    file = work / VELOCITIES
    try:
        if file.is_file():
            stored = TensorFile(file)
            stored.require_as_written()
            gram, effects, levels, called, signal = (stored.get_tensor(name) for name in _TENSORS)
            at_steps = tuple([denoisers[int(index)] for index in called])
            return Velocities(gram.numpy(), effects.numpy(), at_steps, tuple(levels.tolist()), float(signal))
    except ValueError as error:
        logger.warning("%s: measured again", without_cure(error))
    made = measure_velocities(pipe, denoisers, items, call)
    called = [denoisers.index(name) for name in made.denoisers]
    values = (made.gram, made.effects, np.array(made.levels), np.array(called), np.array(made.signal))
    save_sealed({name: torch.as_tensor(value) for name, value in zip(_TENSORS, values, strict=True)}, file, {})
    return made


def _wanted(job: Job, total: int) -> tuple[int, frozenset[int]]:
    """Return how many steps of a call the recipe computes, and which it keeps."""
    steps = job.recipe.steps
    if steps is None or steps.compute is None:
        return total, frozenset()
    return computed_of(steps.compute, total), steps.kept_of(total)


_TENSORS = ("gram", "effects", "levels", "called", "signal")
