"""Read a job's options, and refuse a job that cannot work before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fluxq.base import devices
from fluxq.base.console import logger
from fluxq.base.devices import AUTO, free_bytes
from fluxq.base.extras import TEXT_ENCODERS, too_old_for
from fluxq.base.files import sha256_file
from fluxq.base.model import DEFAULT_MODEL, ModelFolder, check_weights, resolve_model
from fluxq.base.output import Output, plain_path
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.prompts import load_prompts
from fluxq.calibrate.statistics import Statistics
from fluxq.jobs import memory
from fluxq.jobs.hub import require_pushable
from fluxq.jobs.job import (
    Job,
    JobOptions,
    Run,
    finished_checkpoint,
    identity_of,
    require_no_other,
    require_same_statistics,
)
from fluxq.jobs.listing import items_of_list, require_list_of_recipe
from fluxq.jobs.memory import FREE, Bound, Demand, in_words, weight_bytes
from fluxq.jobs.requirements import (
    output_for,
    reads_of,
    require_call,
    require_no_adapter,
    require_pictures,
    scheduler_of,
)
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.lora import LoraFile, Updates, of_component, updates_of
from fluxq.quantize.structure import component_family, denoisers_of, list_linears
from fluxq.recipes.family import matches
from fluxq.recipes.plan import LinearShape, Plan, component_recipe, plan_of, require_matches
from fluxq.recipes.recipe import Calibration, Recipe, load_recipe
from fluxq.runtime.steps import require_followed


def job_of(options: JobOptions, *, writes: bool = True, runs: bool = True, ranks: Ranks = ALONE) -> Job:
    """Read recipe, model, prompts and statistics; ValueError or FileNotFoundError for requests that cannot work.

    writes: whether a checkpoint is written.
    runs: whether anything is computed, so that the model has to fit.
    ranks: processes that do the job together and call the same functions. The first one prepares before the others, so
        that it alone reports errors, and hashes the model for all of them.
    """
    if not ranks.leads:
        return _job_of(options, writes, runs, ranks, ranks.agree())
    job = _job_of(options, writes, runs, ranks, None)
    if (writes or runs) and not job.finished:
        require_no_other(job)
    ranks.agree(job.identity)
    return job


def _job_of(options: JobOptions, writes: bool, runs: bool, ranks: Ranks, identity: dict[str, Any] | None) -> Job:
    given, options = options, replace(options, device=devices.choose(options.device))
    recipe_name, recipe = load_recipe(options.recipe, profile=options.profile)
    model = options.model or recipe.model or DEFAULT_MODEL
    folder = resolve_model(model, revision=options.revision, local_files_only=options.local_files_only)
    check_weights(folder)
    run = Run(ranks.device(options.device), ranks)  # refuses more processes than GPUs
    calibration = recipe.calibration or Calibration()
    if options.seed is not None:
        calibration = calibration.model_copy(update={"seed": options.seed})
    plans = _plans(folder, recipe, options)
    pipeline = folder.pipeline_class
    prompts = load_prompts(options.prompts or calibration.prompts, folder, pipeline=pipeline)
    statistics = Statistics.load(plain_path(options.statistics)) if options.statistics else None
    output = output_for(options.output, folder.name, recipe_name, is_file=not writes)
    loras, updates = _loras(folder, plans, options)
    job = Job(
        options,
        run,
        folder,
        recipe_name,
        recipe,
        calibration,
        plans,
        prompts,
        statistics,
        output,
        {},
        loras,
        updates,
        configs={plan.component: sha256_file(folder.path / plan.component / "config.json") for plan in plans},
        stamps={plan.component: folder.stamps(plan.component) for plan in plans},
    )
    require_call(folder, job.call, options.call)
    if any(plan.steps for plan in plans):
        require_followed(scheduler_of(folder))
    if any(plan.compute for plan in plans):
        require_list_of_recipe(job)
    if statistics is not None:
        if recipe.profile == "rtn":
            raise ValueError("profile rtn takes no data: leave out --statistics, or choose another --profile")
        _require_useful_statistics(statistics, job)
    if runs or options.max_memory is not None:
        job = replace(job, run=settle(job, given, writes=writes))
    if not writes and not runs:
        return job
    Output(output, not writes).require(
        reads_of(folder.path, vars(options)), overwrite=options.overwrite, exists_ok=True
    )
    if not writes and output.suffix in (".html", ".json", ".md", ".yaml"):  # which fluxq reads as such
        raise ValueError(f"output {output} would hold safetensors; call it {output.stem}.safetensors, say")
    if not writes and not job.calibrated:
        planned = ", ".join(plan.component for plan in plans)
        raise ValueError(f"{planned}: quantized weight-only, which needs no statistics; give --components transformer")
    if not writes and (options.overwrite or not output.exists()):
        return job
    if not writes:
        job = replace(job, identity=identity or identity_of(job))
        require_same_statistics(job)
        return replace(job, finished=True)
    if options.push_to_hub:
        require_pushable(options.push_to_hub, folder, options.check)
    if options.check:
        require_pictures(folder, "pass --no-check")
    job = replace(job, identity=identity or identity_of(job))
    job = replace(job, finished=finished_checkpoint(job))
    encoders = [plan.component for plan in plans if plan.kind == "text_encoder"]
    if encoders and options.check and not job.finished and (too_old := too_old_for(TEXT_ENCODERS)):
        raise ValueError(f"{', '.join(encoders)}: {too_old}, or pass --no-check")
    return job


def _plans(folder: ModelFolder, recipe: Recipe, options: JobOptions) -> tuple[Plan, ...]:
    components = _components(folder, recipe, options)
    for component in components:
        require_no_adapter(folder, component)
    linears = {component: list_linears(folder, component) for component in components}
    names = {component: [linear.name for linear in part] for component, part in linears.items()}
    require_matches([*options.include, *options.exclude], [name for part in names.values() for name in part])
    return tuple(_plan(folder, component, part, recipe, options) for component, part in linears.items())


def _components(folder: ModelFolder, recipe: Recipe, options: JobOptions) -> tuple[str, ...]:
    """Return the components that the command line names, else the recipe's.

    A recipe's `transformer` means all components that run at every step.
    """
    if options.components:
        return options.components
    denoisers = denoisers_of(folder)
    named = {name: denoisers if name == "transformer" and denoisers else [name] for name in recipe.components}
    return tuple(dict.fromkeys(component for components in named.values() for component in components))


def _plan(
    folder: ModelFolder, component: str, linears: Sequence[LinearShape], recipe: Recipe, options: JobOptions
) -> Plan:
    include, exclude = (
        [p for p in patterns if _matches_any(p, linears)] for patterns in (options.include, options.exclude)
    )
    if options.include and not include:
        raise ValueError(f"{component}: no --include pattern matches a Linear of it; leave it out of --components")
    family = component_family(folder, component)
    entry = component_recipe(recipe, component, family).without(exclude)
    plan = plan_of(family, component, linears, recipe, entry, include, options.statistics is not None)
    for note in plan.notes:
        logger.warning(note)
    if family.kind == "vae":
        saved = sum(16 * layer.n * layer.k - layer.stored_bits for layer in plan.quantized) / 8
        logger.warning(
            "%s: quantizing it saves %.1f%% of its size, because few of its weights are Linears, and its error goes "
            "straight into the pixels; leave it in 16 bit unless you know why not",
            component,
            100 * saved / SourceWeights(folder, component).nbytes,
        )
    return plan


def _loras(
    folder: ModelFolder, plans: Sequence[Plan], options: JobOptions
) -> tuple[tuple[LoraFile, ...], dict[str, tuple[Updates, ...]]]:
    """Return the files, each with the component that it changes, and component -> updates of its weights."""
    if not options.lora:
        return (), {}
    loras = tuple(of_component(LoraFile.parse(text), folder, denoisers_of(folder)) for text in options.lora)
    planned = [plan.component for plan in plans]
    for lora in loras:
        if lora.component not in planned:
            raise ValueError(f"{lora.path}: changes the {lora.component}, which is not among the components quantized")
    return loras, updates_of(loras, folder)


def _matches_any(pattern: str, linears: Sequence[LinearShape]) -> bool:
    return any(matches(pattern, linear.name) for linear in linears)


def demand(job: Job, device: str, *, writes: bool) -> Demand | None:
    """Return the demand of quantizing on a device, or of gathering statistics unless it `writes`.

    None if no pipeline runs.
    """
    fitted = job.fitted.values() if writes else ()
    checks, runs = writes and job.options.check, any(plan.static_groups() for plan in job.plans)
    is_listed = writes and job.is_listed
    if not (checks or job.fitted or runs or is_listed):
        return None
    calibrating = memory.sizes_of(job.calibration_items, job.call) if job.fitted or runs else frozenset()
    listing = memory.sizes_of(items_of_list(job)[::2], job.call) if is_listed else frozenset()  # half at a time
    return memory.demand_of(
        device,
        job.options.dtype,
        job.folder,
        sizes=calibrating | listing,
        shown=memory.sizes_of(job.check_items, job.check_call) if checks else (),
        fitted=fitted,
        fused=job.updates.keys(),
    )


def settle(job: Job, given: JobOptions, *, writes: bool) -> Run:
    """Return where quantizing can run, or gathering statistics unless it `writes`; else as `settle_by`."""
    without = " without `steps: {compute: …}`" if job.is_listed else ""
    rounding = f"`--profile rtn --no-check`{without} only rounds, which takes a few GB"
    return settle_by(partial(demand, job, writes=writes), job, given, rounding)


def settle_by(demand_on: Callable[[str], Demand | None], job: Job, given: JobOptions, cure: str) -> Run:
    """Return where a job can run: as it is, within a bound, or on the CPU.

    With auto, weights that do not fit are read when it is their turn, and a GPU without room even for that is left for
    the CPU. Raises ValueError for a model that does not fit, or not into `--max-memory`.

    demand_on: device -> the job's demand there, None if it takes nothing.
    given: of which `device` is that of the command line.
    cure: what takes less, in the message that nothing does.
    """
    run, name, device_option = job.run, job.folder.name, given.device
    device = torch.device(run.device)
    needs = demand_on(run.device)
    if (limit := given.max_memory) is not None:
        nothing = Demand(run.device, given.dtype, {}, {}, {})
        return replace(run, memory=needs.bound(limit) if needs else Bound(limit, nothing))
    free = free_bytes(device)
    if free is None or needs is None:
        return run
    weights = weight_bytes(job.folder, job.options.dtype)
    needed, limit = needs.unbounded(weights), int(FREE * free)
    if needed <= limit or (device_option != AUTO and weights <= free):  # the other needs are estimates
        return run
    if device_option != AUTO:
        bounded = f", or give --max-memory {in_words(limit)}: either reads weights in turn" * (needs.least <= limit)
        raise ValueError(
            f"{name} does not fit on {device}: its weights take {in_words(weights)}, {in_words(free)} are free; leave "
            f"out --device{bounded}"
        )
    if needs.least <= limit:
        logger.warning(
            "%s needs %s, %s are free on %s: weights are read when it is their turn, and at most %s are used",
            *(name, in_words(needed), in_words(free), device, in_words(limit)),
        )
        return replace(run, memory=needs.bound(limit))
    if device.type == "cuda":
        logger.warning("%s needs %s on %s, %s are free: the CPU is used", name, needs, device, in_words(free))
        return settle_by(demand_on, replace(job, run=replace(run, device="cpu")), replace(given, device=AUTO), cure)
    raise ValueError(f"{name} does not fit on this machine: {needs}, and {in_words(free)} are free; {cure}")


def _require_useful_statistics(statistics: Statistics, job: Job) -> None:
    """Raise ValueError for statistics of other weights, without a layer of this job, or without use for it."""
    if not job.calibrated:
        raise ValueError("what is quantized here is weight-only and uses no statistics: leave out --statistics")
    if not any(plan.static_groups() for plan in job.plans):
        raise ValueError(
            f"recipe {job.recipe_name} stores no input scale, which is all that statistics are used for: "
            "leave out --statistics"
        )
    model = statistics.trajectory.get("model")
    for component in job.calibrated:
        digest = model.get(component) if isinstance(model, dict) else model
        if digest != job.digest(component):
            raise ValueError(
                f"{component}: the statistics were gathered on another model; run `fluxq calibrate` on this one"
            )
    for component, plan in job.calibrated.items():
        for group in plan.static_groups():
            statistics.of_component(component).amax(group)  # refuses a missing group before anything is computed
