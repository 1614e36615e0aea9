"""Steps that a denoiser does not compute: `fluxq.skip_steps(pipe)`.

A list says which steps of a call are computed (recipes/step_list.py). At the others the denoiser returns a sum of its
outputs so far, and where the list is fitted at computed steps, too; pipeline and scheduler work as ever. Nothing is
decided at run time, so that there is no threshold, and images of a batch do not depend on each other.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fluxq.base.files import read_json
from fluxq.calibrate.paths import levels_of, list_of, require_listed
from fluxq.quantize.structure import denoisers_in
from fluxq.recipes.step_list import StepList
from fluxq.runtime.skipped import SkippedSteps, require_free
from fluxq.runtime.step_trials import made_list
from fluxq.runtime.steps import recorded_in, require_followed

KIND = "fluxq steps"


def skip_steps(
    pipe: Any,
    steps: str | Path | Sequence[int] | StepList | None = None,
    *,
    compute: float | None = None,
    call: Mapping[str, Any] | None = None,
) -> SkippedSteps:
    """Let a pipeline's denoisers compute some steps of each call, and extrapolate the others.

    Without arguments as its checkpoint says, where the recipe's `steps: {compute: …}` made a list.

    Stays until `remove()` of the handle, or the end of its `with` block. Works with quantized and other denoisers, with
    adapters, ControlNets, offloading, `keep_steps`, `fluxq.optimize`, and with `fluxq.capture` and torch.compile, of
    which both come first.

    steps: file that `fluxq steps` wrote, a list, or the numbers of the steps to compute, the first and the last one
        among them, which are extrapolated from in a straight line.
    compute: share of the steps to compute; a list is made on the spot, with the prompts of the pipeline's folder.
    call: arguments of the calls that such a list is for, such as num_inference_steps; by default the folder's.

    Raises ValueError for a pipeline without scheduler or denoiser, or whose steps are skipped already, for a checkpoint
    without a list, for a step cache beside the list, and for a list of another model, scheduler or shift; at a call
    also for timesteps of single tokens.
    """
    if steps is not None and compute is not None:
        raise ValueError("steps= is a list, and compute= makes another: give one of them")
    if call is not None and compute is None:
        raise ValueError("call= says what a list is made for, and here is one already: leave it out")
    denoisers = dict(denoisers_in(pipe))
    if getattr(pipe, "scheduler", None) is None or not denoisers:
        raise ValueError(f"skip_steps needs a pipeline with a scheduler and a denoiser, got {type(pipe).__name__}")
    for outer in denoisers.values():
        require_free(outer)
    if compute is not None:
        chosen = made_list(pipe, tuple(denoisers), compute, call or {})
    elif steps is None:
        return SkippedSteps(pipe, *_of_checkpoint(denoisers.values()))
    elif isinstance(steps, StepList):
        chosen = steps
    elif isinstance(steps, str | Path):
        chosen = read_list(Path(steps))
    else:
        chosen = _by_hand(pipe.scheduler, steps)
    return SkippedSteps(pipe, chosen)


def skip_recorded_steps(pipe: Any) -> SkippedSteps | None:
    """Call `skip_steps` as the pipeline's checkpoint says; None where it says nothing."""
    are_recorded = any(recorded_lists(outer) for _, outer in denoisers_in(pipe))
    return skip_steps(pipe) if are_recorded else None


def recorded_lists(outer: Any) -> list[StepList]:
    """Return the lists of steps that a denoiser's checkpoint records."""
    stored = recorded_in(outer)
    return [*stored.step_lists.values()] if stored else []


def read_list(path: Path) -> StepList:
    """Read what `fluxq steps` wrote; ValueError or FileNotFoundError naming the file if it is something else."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such list of steps; `fluxq steps MODEL` writes one")
    value = read_json(path)
    if value.get("kind") != KIND or not isinstance(value.get("list"), dict):
        raise ValueError(f"{path}: not a list of steps; `fluxq steps` writes one")
    try:
        return StepList.from_dict(value["list"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of_checkpoint(denoisers: Iterable[nn.Module]) -> list[StepList]:
    """Return the lists that a pipeline's quantized denoisers agree on."""
    recorded = [lists for outer in denoisers if (lists := recorded_lists(outer))]
    if not recorded:
        raise ValueError(
            "this pipeline's checkpoint has no list of steps: give one (`fluxq steps MODEL` writes it), or "
            "compute=0.5, or quantize with `steps: {compute: 0.5}` in the recipe"
        )
    if any(lists != recorded[0] for lists in recorded):
        raise ValueError(
            "the pipeline's denoisers are of checkpoints with different lists of steps: give one as steps="
        )
    return recorded[0]


def _by_hand(scheduler: Any, steps: Any) -> StepList:
    """Return the list of steps by their numbers, for a scheduler as it is."""
    try:
        computed = [operator.index(step) for step in steps]
    except TypeError:
        computed = []
    if not computed:
        raise ValueError(f"steps {str(steps)[:80]}: expected the numbers of the steps to compute, or a file")
    total = max(computed) + 1
    probe = copy.deepcopy(scheduler)
    require_listed(probe, total)
    require_followed(probe)
    shift = {"mu": 0.0} if probe.config.get("use_dynamic_shifting") else {}
    probe.set_timesteps(total, **shift)
    return list_of(probe, computed, 1, levels_of(probe))
