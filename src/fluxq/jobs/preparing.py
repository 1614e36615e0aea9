"""Read what a user gave, and refuse what cannot work before anything is computed or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxq.base import devices
from fluxq.base.console import logger
from fluxq.base.model import DEFAULT_MODEL, ModelFolder, check_weights, resolve_model
from fluxq.base.output import Output
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.prompts import load_prompts
from fluxq.calibrate.statistics import Statistics
from fluxq.jobs import footprint, memory, placement
from fluxq.jobs.hub import require_pushable
from fluxq.jobs.memory import Demand
from fluxq.jobs.prepared import Options, Prepared
from fluxq.jobs.requirements import (
    output_for,
    reads_of,
    require_call,
    require_no_adapter,
    require_pictures,
    scheduler_of,
)
from fluxq.jobs.work_folder import finished_checkpoint, identity_of, require_no_other, require_same_statistics
from fluxq.quantize.checkpoint import SourceWeights, list_linears
from fluxq.quantize.lora import LoraFile, Updates, of_component, updates_of
from fluxq.quantize.structure import component_family, denoisers_of
from fluxq.recipes.patterns import matches
from fluxq.recipes.plan import Plan, component_recipe, make_plan, require_matches
from fluxq.recipes.recipe import Calibration, Recipe, load_recipe
from fluxq.recipes.shapes import LinearShape
from fluxq.runtime.steps import require_followed


def prepare(
    options: Options,
    *,
    writes: bool = True,
    runs: bool = True,
    ranks: Ranks = ALONE,
) -> Prepared:
    """Read recipe, model, prompts and statistics; ValueError or FileNotFoundError for what cannot work.

    writes: whether a checkpoint is written. runs: whether anything is computed, so that the model has to fit.
    ranks: processes that do the job together and call the same functions. The first one prepares before the others, so
    that it alone says what is wrong, and hashes the model for all of them.
    """
    if not ranks.leads:
        return _prepare(options, writes, runs, ranks, ranks.agree())
    prepared = _prepare(options, writes, runs, ranks, None)
    if (writes or runs) and not prepared.finished:
        require_no_other(prepared)
    ranks.agree(prepared.identity)
    return prepared


def _prepare(options: Options, writes: bool, runs: bool, ranks: Ranks, identity: dict[str, Any] | None) -> Prepared:
    asked_device, options = options.device, replace(options, device=devices.choose(options.device))
    recipe_name, recipe = load_recipe(options.recipe, profile=options.profile)
    model = options.model or recipe.model or DEFAULT_MODEL
    folder = resolve_model(model, revision=options.revision, local_files_only=options.local_files_only)
    check_weights(folder)
    ranks.device(options.device)  # refuses more processes than GPUs
    calibration = recipe.calibration or Calibration()
    if options.seed is not None:
        calibration = calibration.model_copy(update={"seed": options.seed})
    plans = _plans(folder, recipe, options)
    pipeline = folder.pipeline_class
    prompts = load_prompts(options.prompts or calibration.prompts, folder, pipeline=pipeline)
    statistics = Statistics.load(Path(options.statistics)) if options.statistics else None
    output = output_for(options.output, folder.name, recipe_name, is_file=not writes)
    loras, updates = _loras(folder, plans, options)
    prepared = Prepared(
        options,
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
        ranks=ranks,
        stamps={plan.component: folder.stamps(plan.component) for plan in plans},
    )
    require_call(folder, prepared.call, options.call)
    if any(plan.steps for plan in plans):
        require_followed(scheduler_of(folder))
    if statistics is not None:
        if recipe.profile == "rtn":
            raise ValueError("profile rtn takes no data: leave out --statistics, or choose another --profile")
        _require_useful_statistics(statistics, prepared)
    if options.max_memory is not None:
        asked = demand(prepared, prepared.device, writes=writes)
        prepared = replace(prepared, bound=asked and asked.bound(options.max_memory))
    elif runs:
        prepared = placement.settle(prepared, lambda device: demand(prepared, device, writes=writes), asked_device)
    if not writes and not runs:
        return prepared
    Output(output, not writes).require(
        reads_of(folder.path, vars(options)), overwrite=options.overwrite, exists_ok=True
    )
    if not writes and not prepared.calibrated:
        planned = ", ".join(plan.component for plan in plans)
        raise ValueError(f"{planned}: quantized weight-only, which needs no statistics; give --components transformer")
    if not writes and (options.overwrite or not output.exists()):
        return prepared
    if not writes:
        prepared = replace(prepared, identity=identity or identity_of(prepared))
        require_same_statistics(prepared)
        return replace(prepared, finished=True)
    if options.push_to_hub:
        require_pushable(options.push_to_hub, folder, options.check)
    if options.check:
        require_pictures(folder, "pass --no-check")
    prepared = replace(prepared, identity=identity or identity_of(prepared))
    return replace(prepared, finished=finished_checkpoint(prepared))


def _plans(folder: ModelFolder, recipe: Recipe, options: Options) -> tuple[Plan, ...]:
    components = _components(folder, recipe, options)
    for component in components:
        require_no_adapter(folder, component)
    linears = {component: list_linears(folder, component) for component in components}
    names = {component: [linear.name for linear in part] for component, part in linears.items()}
    require_matches([*options.include, *options.exclude], [name for part in names.values() for name in part])
    return tuple(_plan(folder, component, part, recipe, options) for component, part in linears.items())


def _components(folder: ModelFolder, recipe: Recipe, options: Options) -> tuple[str, ...]:
    """Return the components that the command line names, else the recipe's.

    A recipe's `transformer` means all components that run at every step.
    """
    if options.components:
        return options.components
    found = denoisers_of(folder)
    named = {name: found if name == "transformer" and found else [name] for name in recipe.components}
    return tuple(dict.fromkeys(component for components in named.values() for component in components))


def _plan(
    folder: ModelFolder, component: str, linears: Sequence[LinearShape], recipe: Recipe, options: Options
) -> Plan:
    family = component_family(folder, component)
    entry = component_recipe(recipe, component, family)
    include, exclude = ([p for p in given if _matches_any(p, linears)] for given in (options.include, options.exclude))
    if options.include and not include:
        raise ValueError(f"{component}: no --include pattern matches a Linear of it; leave it out of --components")
    plan = make_plan(
        family,
        component,
        entry.without(exclude),
        linears,
        static_inputs=recipe.profile != "rtn" and (recipe.needs_data(entry) or options.statistics is not None),
        profile=recipe.profile,
        compat=recipe.compat,
        include=include,
    )
    for note in plan.notes:
        logger.warning(note)
    if family.kind == "transformer":
        plan = replace(plan, steps=recipe.steps)
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
    folder: ModelFolder, plans: Sequence[Plan], options: Options
) -> tuple[tuple[LoraFile, ...], dict[str, tuple[Updates, ...]]]:
    """The files, each with the component that it changes, and component -> what they add to its weights."""
    loras = tuple(of_component(LoraFile.parse(text), folder, denoisers_of(folder)) for text in options.lora)
    planned = [plan.component for plan in plans]
    for lora in loras:
        if lora.component not in planned:
            raise ValueError(f"{lora.path}: changes the {lora.component}, which is not among the components quantized")
    return loras, updates_of(loras, folder)


def _matches_any(pattern: str, linears: Sequence[LinearShape]) -> bool:
    return any(matches(pattern, linear.name) for linear in linears)


def demand(prepared: Prepared, device: str, *, writes: bool) -> Demand | None:
    """Return the demand of quantizing on a device, or of gathering statistics unless it `writes`.

    None if no pipeline runs.
    """
    fitted = prepared.fitted.values() if writes else ()
    checks, runs = writes and prepared.options.check, any(plan.static_groups() for plan in prepared.plans)
    if not (checks or prepared.fitted or runs):
        return None
    calibrating = footprint.sizes(prepared.calibration_items, prepared.call) if prepared.fitted or runs else ()
    return memory.demand_of(
        device,
        prepared.options.dtype,
        prepared.folder,
        sizes=calibrating,
        shown=footprint.sizes(prepared.check_items, prepared.check_call) if checks else (),
        fitted=fitted,
        fused=prepared.updates.keys(),
    )


def _require_useful_statistics(statistics: Statistics, prepared: Prepared) -> None:
    """Refuse statistics that were gathered on other weights, that lack a layer, or that nothing here can use."""
    if not prepared.calibrated:
        raise ValueError("what is quantized here is weight-only and uses no statistics: leave out --statistics")
    if not any(plan.static_groups() for plan in prepared.plans):
        raise ValueError(
            f"recipe {prepared.recipe_name} stores no input scale, which is all that statistics are used for: "
            "leave out --statistics"
        )
    model = statistics.trajectory.get("model")
    for component in prepared.calibrated:
        digest = model.get(component) if isinstance(model, dict) else model
        if digest != prepared.digest(component):
            raise ValueError(
                f"{component}: the statistics were gathered on another model; run `fluxq calibrate` on this one"
            )
    for component, plan in prepared.calibrated.items():
        for group in plan.static_groups():
            statistics.of_component(component).amax(group)  # refuses what it lacks before anything is computed
