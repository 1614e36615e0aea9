"""Make a list of the steps that a pipeline's denoiser computes: `fluxq steps`.

    measure   inner products of what the scheduler is given at each step (calibrate/paths.py)
    propose   as many computed steps as asked for, of which least error is predicted
    decide    run them on images that measured nothing; the least error is taken

Under a gate the number of computed steps is found: the fewest whose predicted error is at most p are run, again and
again, between those that failed and those that held; p is corrected by what was measured: p <- p · error of the gate /
measured error. A mask of another program is proposed as it is, and runs decide what stands for its other steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

import fluxq
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import resolve_model
from fluxq.base.output import Output, atomic_output, job_digest, plain_path, seal, with_seal, writing
from fluxq.calibrate.capture import number_of_steps, scheduler_settings
from fluxq.calibrate.paths import FEWEST_IMAGES
from fluxq.eval.metrics.schema import number
from fluxq.jobs import memory
from fluxq.jobs.job import Job, JobOptions, Run, clear_leftovers, decisive, is_finished, require_no_other, work_of
from fluxq.jobs.listing import listed_call, lists_of_checkpoint, trials_of
from fluxq.jobs.planning import job_of, settle_by
from fluxq.jobs.requirements import reads_of, scheduler_of
from fluxq.quantize.checkpoint import digest_rest
from fluxq.quantize.structure import denoisers_of
from fluxq.recipes.recipe import gate_holds, latent_bound
from fluxq.recipes.step_exports import STEP_EXPORTS, read_mask
from fluxq.recipes.step_list import StepList
from fluxq.runtime.skip import KIND, read_list
from fluxq.runtime.step_trials import FORMS, IMAGES, SEED, Trials, TriedList, computed_of, require_share

_MOST_COUNTS = 8  # numbers of steps that are run for a gate


@dataclass(frozen=True)
class Request:
    """All inputs of a list, read and checked.

    job: whose output is the file.
    compute: share of steps to compute, None under a gate.
    gate: on the final latents, as "latent_sqnr>=30".
    count: images that are measured; as many others decide.
    mask: of a list that is judged, 1 for each step that it computes.
    """

    job: Job
    compute: float | None
    gate: str | None
    count: int
    denoisers: tuple[str, ...]
    mask: tuple[int, ...] | None = None

    @cached_property
    def items(self) -> Sequence[Any]:
        """Images to measure, and after them those that decide."""
        return self.job.prompts.alike.items(2 * self.count, SEED + self.job.calibration.seed)


def request_of(
    options: JobOptions,
    compute: float | None = None,
    gate: str | None = None,
    count: int = IMAGES,
    mask: str | PathLike[str] | Sequence[int] | None = None,
) -> Request:
    """Read and check a request; ValueError or FileNotFoundError, before anything is computed, if it cannot work."""
    if [compute, gate, mask].count(None) != 2:
        raise ValueError("give --compute, --gate or --mask, and one of them alone")
    if compute is not None:
        require_share(compute)
    if gate is not None:
        latent_bound(gate)
    if count < FEWEST_IMAGES:
        raise ValueError(f"--count {count}: so few images say too little of others; take {FEWEST_IMAGES} or more")
    numbers = None if mask is None else read_mask(mask)
    if numbers:
        options = replace(options, call={"num_inference_steps": len(numbers), **options.call})
    job = job_of(replace(options, check=False, max_memory=None), writes=False, runs=False)
    _, total = listed_call(job.folder, job.call)
    if numbers and len(numbers) != total:
        raise ValueError(
            f"the mask is of {len(numbers)} steps, and the call has {total}: give --num-inference-steps {len(numbers)}"
        )
    place = plain_path(options.output or f"{Path(job.folder.name).name}-steps.json")
    place = Output(place).place if place.is_symlink() else place
    if place.suffix != ".json":
        raise ValueError(f"output {place}: a list of steps is a .json file; call it {place.stem}.json, say")
    output = Output(place, True)
    output.require(reads_of(job.folder.path, vars(options)), overwrite=options.overwrite, exists_ok=True)
    request = Request(replace(job, output=place), compute, gate, count, denoisers_of(job.folder), numbers)
    job = replace(request.job, identity=_identity(request), run=_run(request, options))
    finished = is_finished(job, output)
    if not finished:
        require_no_other(job)
    return replace(request, job=replace(job, finished=finished))


def _run(request: Request, options: JobOptions) -> Run:
    """Return where the list can be made; ValueError for memory in which it cannot."""
    job = request.job
    sizes = memory.sizes_of(request.items, job.call)
    needs = partial(memory.demand_of, dtype=options.dtype, folder=job.folder, sizes=sizes)
    return settle_by(needs, job, options, "smaller images (--height, --width) take less")


def make_list(request: Request) -> dict[str, Any]:
    """Make the list, write it and what was measured, and return that."""
    job = request.job
    if job.finished:
        clear_leftovers(job)
        return read_json(job.output)
    with memory.within(job.run.limit, job.run.device), work_of(job) as work:
        pipe = job.load_reference()
        trials = trials_of(pipe, request.denoisers, request.items, job.call, work)
        best = _best(request, trials)
        digest = job_digest(decisive(job))
        result = with_seal(_result(request, trials, best) | {"job": digest})
        with atomic_output(Output(job.output, True), work, overwrite=job.options.overwrite) as part:
            write_json(part / job.output.name, result)
    return result


def export_list(
    file: Path,
    format: str,
    target: Path | None = None,
    *,
    overwrite: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> Path:
    """Write a list for another program, a key of STEP_EXPORTS, and return the place; ValueError if it cannot take it.

    file: that `fluxq steps` wrote, or a checkpoint that records a list.
    target: a .yaml file, by default ./<name of the list>-<format>.yaml.
    """
    settings, use = STEP_EXPORTS[format]
    name = file.resolve().name.removesuffix(".json")
    steps, place = _list_at(file), plain_path(target or f"{name}-{format}.yaml")
    if place.suffix != ".yaml":
        raise ValueError(f"output {place}: what {format} reads is a .yaml file; call it {place.stem}.yaml, say")
    lines = [f"# {steps}, of {file.name}", *(f"#   {line.replace('FILE', place.name)}" for line in use)]
    text = "\n".join([*lines, yaml.safe_dump(settings(steps), sort_keys=False, default_flow_style=None, width=110)])
    output, digest = Output(place, True), job_digest([fluxq.__version__, format, text])
    output.require({"the list": file}, overwrite=overwrite, exists_ok=True)
    on_start()
    with writing(output, digest, overwrite=overwrite) as part:
        if part:
            write_text(part / output.place.name, seal(text, ".yaml", digest))
    return place


def _list_at(path: Path) -> StepList:
    """Return the list of a file, or the one that a checkpoint records."""
    if not (path / "model_index.json").is_file():
        return read_list(path)
    lists = lists_of_checkpoint(resolve_model(str(path)))
    if len(lists) != 1:
        raise ValueError(f"{path} records {len(lists)} lists of steps: give the file of one, as `fluxq steps` makes")
    return lists[0]


def passes_of(request: Request) -> dict[str, int]:
    """Return name of a part -> forward passes of the denoisers with one image."""
    steps = number_of_steps(request.job.folder.pipeline_class, request.job.call)
    runs = 1 + FORMS * (_MOST_COUNTS if request.gate else 1)
    return {"velocities": request.count * steps, "runs": runs * request.count * steps}


def _identity(request: Request) -> dict[str, Any]:
    """Return all that decides what is written."""
    job = request.job
    return {
        "fluxq": fluxq.__version__,
        "model": {component: job.folder.digest(component) for component in request.denoisers},
        "copied": digest_rest(job.folder, request.denoisers),  # what text encoders give decides, too
        "scheduler": scheduler_settings(scheduler_of(job.folder)),
        "prompts": job.prompts.digest,
        "call": job.call,
        "dtype": job.options.dtype,
        "seed": job.calibration.seed,
        "count": request.count,
        "compute": request.compute,
        "gate": request.gate,
        "mask": request.mask,
    }


def _best(request: Request, trials: Trials) -> TriedList:
    """Return the list that was asked for."""
    if request.gate:
        return _under_gate(request, trials)
    if request.mask:
        return trials.judged([step for step, number in enumerate(request.mask) if number])
    return trials.best(computed_of(request.compute or 1, len(trials.velocities.levels)))


def _under_gate(request: Request, trials: Trials) -> TriedList:
    """Return the list of fewest computed steps that holds the gate, by runs; RuntimeError if none tried does."""
    gate, total = str(request.gate), len(trials.velocities.levels)
    bound = latent_bound(gate)
    most, ran = 10 ** (-bound / 10), dict[int, TriedList]()
    fails, holds = min(trials.ways) - 1, total
    while holds - fails > 1 and len(ran) < _MOST_COUNTS:
        counts = (count for count, way in sorted(trials.ways.items()) if way.nmse <= most)
        count = min(max(next(counts, total), fails + 1), holds - 1)
        ran[count] = trials.best(count)
        if gate_holds(gate, {"latent_sqnr": ran[count].decibels}):
            holds = count
        else:
            fails = count
        most *= 10 ** ((ran[count].decibels - bound) / 10)
    if holds == total:
        best = max((each.decibels for each in ran.values()), default=-math.inf)
        raise RuntimeError(
            f"no list that was tried holds {gate} (the best has {best:.1f} dB), and all {total} steps save nothing; "
            "lower the gate, or give more --num-inference-steps"
        )
    return ran[holds]


def _result(request: Request, trials: Trials, best: TriedList) -> dict[str, Any]:
    """Return what was made and measured, as JSON has it."""
    return {
        "kind": KIND,
        "model": request.job.folder.name,
        "list": best.steps.to_dict(),
        "predicted_nmse": best.predicted,
        "measured_nmse": number(best.error),
        "sqnr_db": number(best.decibels),
        "tried": [
            {
                "computed": len(each.steps.computed),
                "order": each.steps.order,
                "fitted": bool(each.steps.fitted),
                "predicted_nmse": each.predicted,
                "measured_nmse": number(each.error),
            }
            for each in trials.tried
        ],
        "curve": [{"computed": count, "predicted_nmse": way.nmse} for count, way in sorted(trials.ways.items())],
        "images": {"measured": request.count, "judged": request.count},
        "identity": request.job.identity,
    }
