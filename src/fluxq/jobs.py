"""One function per command: joins recipes, calibrate, quantize and eval.

`prepare_*` reads what a user gave and refuses what cannot work, before anything is computed or written; the
function that takes its result does the work. Output folders appear complete or not at all.
"""

from __future__ import annotations

import glob
import inspect
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import torch

import fluxq
from fluxq import memory
from fluxq.base.console import first_line, logger
from fluxq.base.files import (
    atomic_folder,
    put_back,
    read_json,
    sha256_file,
    sha256_json,
    sole_writer,
    write_json,
    write_text,
)
from fluxq.base.model import (
    DEFAULT_MODEL,
    GENERATION_FILE,
    HASHED_AT_ONCE,
    ModelFolder,
    check_weights,
    load_pipeline,
    resolve_model,
)
from fluxq.base.provenance import versions
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.blocks import Replay
from fluxq.calibrate.calls import Calls, capture_calls
from fluxq.calibrate.capture import Item, capture_statistics, number_of_steps, steps_to_see
from fluxq.calibrate.prompts import PromptSet, load_prompts
from fluxq.calibrate.sensitivity import IMAGES, noise_level_weights
from fluxq.calibrate.sharing import watch_shared_inputs
from fluxq.calibrate.statistics import Statistics
from fluxq.eval import card, fidelity
from fluxq.eval.generate import Generated, generate
from fluxq.eval.statistics import paired_interval
from fluxq.hub import require_pushable
from fluxq.memory import Bound
from fluxq.quantize import checkpoint
from fluxq.quantize.checkpoint import (
    PLAN_FILE,
    SourceWeights,
    convolutions_of,
    list_linears,
    model_on_meta,
    read_plan_file,
)
from fluxq.quantize.finished import Outcome
from fluxq.quantize.lora import FusedWeights, LoraFile, Updates, fuse_into, of_component, updates_of
from fluxq.quantize.run import Fitting, quantize_component, require_finite_weights
from fluxq.quantize.steps import KeptSteps, about_to_keep, require_followed
from fluxq.quantize.structure import component_family, denoisers_of
from fluxq.quantize.verify import hash_files
from fluxq.recipes.cost import Cost, Prefer, cost, forward_pass
from fluxq.recipes.devices import find_device
from fluxq.recipes.patterns import matches
from fluxq.recipes.plan import GENERIC, LinearShape, Plan, component_recipe, make_plan, require_matches
from fluxq.recipes.recipe import Calibration, Recipe, gate_holds, load_recipe, split_gates

CHECK_IMAGES = 4
_MANIFEST, _STATISTICS, _SHARES = "job.json", "statistics.safetensors", "statistics"  # in the work folder
# Calibration and evaluation draw noise from seeds that never meet.
_CALIBRATION_SEEDS = 1 << 20
_HELD_OUT = 10  # one image in so many decides, and is never fitted to
_MOST_CALLS = 128  # of a transformer, that layers are fitted to; batches times steps


@dataclass(frozen=True)
class Options:
    """What every command takes; None leaves the recipe's, the folder's or the pipeline's own value."""

    model: str | None = None
    recipe: str = "nvfp4"
    profile: Any = None
    output: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int | None = None
    prompts: str | None = None
    call: dict[str, Any] = field(default_factory=dict)
    components: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    statistics: str | None = None
    lora: tuple[str, ...] = ()
    revision: str | None = None
    local_files_only: bool = False
    overwrite: bool = False
    check: bool = True
    parallel_blocks: bool = False
    push_to_hub: str | None = None
    private: bool = False
    max_shard_bytes: int = checkpoint.MAX_SHARD_BYTES
    max_memory: int | None = None


@dataclass(frozen=True)
class Prepared:
    """Everything a job needs, read and checked: one plan per component asked for, by default the recipe's."""

    options: Options
    folder: ModelFolder
    recipe_name: str
    recipe: Recipe
    calibration: Calibration
    plans: tuple[Plan, ...]
    prompts: PromptSet
    statistics: Statistics | None
    output: Path
    identity: dict[str, Any]
    loras: tuple[LoraFile, ...] = ()
    updates: dict[str, tuple[Updates, ...]] = field(default_factory=dict)
    finished: dict[str, Any] | None = None
    ranks: Ranks = ALONE
    bound: Bound | None = None

    @property
    def device(self) -> str:
        """What this process computes on: of several, each takes a GPU of its own."""
        return self.ranks.device(self.options.device)

    @property
    def calibrated(self) -> dict[str, Plan]:
        """Component -> plan, of those whose activations calibration looks at: the transformers."""
        return {plan.component: plan for plan in self.plans if plan.kind == "transformer"}

    @property
    def fitted(self) -> dict[str, Plan]:
        """Component -> plan, of those with layers that are fitted to their inputs."""
        plans = self.calibrated.items()
        return {name: plan for name, plan in plans if any(la.method.needs_data for la in plan.quantized)}

    @property
    def call(self) -> dict[str, Any]:
        """Pipeline arguments: the folder's defaults, overridden by the command line."""
        return {**self.folder.generation_defaults, **self.options.call}

    def weights(self, component: str) -> SourceWeights:
        """The component's 16-bit weights, LoRA files fused."""
        if component in self.updates:
            return FusedWeights(self.folder, component, self.updates[component])
        return SourceWeights(self.folder, component)

    def digest(self, component: str) -> str:
        """SHA-256 of the component's weights, LoRA files included."""
        own = self.identity.get("model", {}).get(component)
        own = own if isinstance(own, str) else self.folder.digest(component)
        if component not in self.updates:
            return own
        return sha256_json([own, *([lora.digest, lora.weight] for lora in self.loras if lora.component == component)])

    def load_reference(self) -> Any:
        """The 16-bit pipeline that the checkpoint is made from and measured against."""
        require_steps(self.folder)
        if self.bound is not None:
            pipe = self.bound.load(self.folder, self.updates)
        else:
            memory.warn_of_size(self.folder, self.options.dtype, self.device)
            pipe: Any = load_pipeline(self.folder, self.options.dtype, self.device)
            for component, updates in self.updates.items():
                fuse_into(getattr(pipe, component), updates)
        for component, plan in self.calibrated.items():
            if plan.family == GENERIC and (component in self.fitted or plan.static_groups()):
                groups = plan.statistics_groups().values()
                watch_shared_inputs(getattr(pipe, component), [[layer.name for layer in group] for group in groups])
        return pipe


def prepare(
    options: Options, *, default_output: str = "{model}-{recipe}", writes: bool = True, ranks: Ranks = ALONE
) -> Prepared:
    """Read recipe, model, prompts and statistics; ValueError or FileNotFoundError for what cannot work.

    ranks: processes that do the job together and call the same functions. The first one prepares before the others, so
    that it alone says what is wrong, and hashes the model for all of them.
    """
    if not ranks.leads:
        return _prepare(options, default_output, writes, ranks, ranks.agree())
    prepared = _prepare(options, default_output, writes, ranks, None)
    ranks.agree(prepared.identity)
    return prepared


def _prepare(
    options: Options, default_output: str, writes: bool, ranks: Ranks, identity: dict[str, Any] | None
) -> Prepared:
    recipe_name, recipe = load_recipe(options.recipe, profile=options.profile)
    model = options.model or recipe.model or DEFAULT_MODEL
    folder = resolve_model(model, revision=options.revision, local_files_only=options.local_files_only)
    check_weights(folder)
    require_device(ranks.device(options.device))
    calibration = recipe.calibration or Calibration()
    if options.seed is not None:
        calibration = calibration.model_copy(update={"seed": options.seed})
    plans = _plans(folder, recipe, options)
    pipeline = folder.pipeline_class
    prompts = load_prompts(options.prompts or calibration.prompts, folder, pipeline=pipeline)
    statistics = Statistics.load(Path(options.statistics)) if options.statistics else None
    output = Path(options.output or default_output.format(model=Path(folder.name).name, recipe=recipe_name))
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
    )
    require_call(folder, prepared.call)
    if any(plan.steps for plan in plans):
        require_followed(_scheduler(folder))
    if statistics is not None:
        if recipe.profile == "rtn":
            raise ValueError("profile rtn takes no data: leave out --statistics, or choose another --profile")
        _require_useful_statistics(statistics, prepared)
    if options.max_memory is not None:
        prepared = replace(prepared, bound=_bound(prepared, options.max_memory, writes))
    if not writes:
        return prepared
    if options.push_to_hub:
        require_pushable(options.push_to_hub, folder, options.check)
    if options.check:
        require_images(folder, "pass --no-check")
    _require_folder(prepared)
    prepared = replace(prepared, identity=identity or _identity(prepared))
    return replace(prepared, finished=_finished(prepared))


def model_costs(prepared: Prepared, gpu: str, prefer: Prefer, frames: int | None, batch: int) -> dict[str, Cost]:
    """Component -> what its plan costs on a GPU, modelled; only transformers run at every step.

    ValueError for an unknown GPU, and where no transformer is planned.
    """
    if not prepared.calibrated:
        planned = ", ".join(plan.component for plan in prepared.plans)
        raise ValueError(f"{planned}: runs once per image and is not modelled; --gpu needs a transformer")
    device, folder, call = find_device(gpu), prepared.folder, prepared.call
    vae = folder.config("vae") if "vae" in folder.components else None
    costs = {}
    for component, plan in prepared.calibrated.items():
        forward = forward_pass(
            plan.family,
            folder.config(component),
            height=call.get("height"),
            width=call.get("width"),
            frames=frames,
            text=call.get("max_sequence_length"),
            batch=batch,
            vae=vae,
            convolutions=convolutions_of(model_on_meta(folder, component)),
        )
        costs[component] = cost(plan, forward, device, prefer)
    return costs


def require_free_file(prepared: Prepared) -> None:
    """ValueError unless the output may be written as a file."""
    output = prepared.output
    _require_parent(output)
    if output.is_dir():
        raise ValueError(f"output {output} is a folder; give a file as --output")
    if output.exists() and not prepared.options.overwrite:
        raise ValueError(f"{output} exists; give another --output, or --overwrite to replace it")


def calibrate(prepared: Prepared) -> Path:
    """Gather statistics of every planned input group into one file; returns its path."""
    if not prepared.calibrated:
        planned = ", ".join(plan.component for plan in prepared.plans)
        raise ValueError(f"{planned}: quantized weight-only, which needs no statistics; give --components transformer")
    identity = prepared.ranks.agree(_identity(prepared) if prepared.ranks.leads else None)
    prepared = replace(prepared, identity=identity)
    with memory.within(prepared.options.max_memory, prepared.device), _work_of(prepared) as work:
        statistics = _calibrate(prepared, prepared.load_reference(), work)
        if prepared.ranks.leads:
            statistics.save(prepared.output)
    return prepared.output


def quantize(prepared: Prepared) -> dict[str, Any]:
    """Calibrate, quantize, check and write the checkpoint; returns what fluxq_plan.json holds.

    The result's `check.passed` is False where the closing check found NaN or missed a gate; the checkpoint is
    written all the same and its card says so.
    """
    if prepared.finished is not None:
        if prepared.ranks.leads:
            _clear_away(prepared)
        return prepared.finished
    ranks = prepared.ranks
    with memory.within(prepared.options.max_memory, prepared.device), _work_of(prepared) as work:
        finished = _finished(prepared) if ranks.leads else None  # another run may have written it meanwhile
        return ranks.agree(finished) or ranks.agree(_quantize(prepared, work))


def _quantize(prepared: Prepared, work: Path) -> dict[str, Any] | None:
    """The record of what the first process wrote; None in those that helped it."""
    options, folder, ranks = prepared.options, prepared.folder, prepared.ranks
    started = time.perf_counter()
    if ranks.leads:
        _require_space(prepared, work)
    reference: Generated | None = None
    statistics = prepared.statistics or _kept_statistics(work)
    fittings: dict[str, Fitting] = {}
    static = [plan for plan in prepared.plans if plan.static_groups() and plan.component not in prepared.fitted]
    if prepared.fitted or (options.check and ranks.leads) or (static and statistics is None):
        pipe = prepared.load_reference()
        if static and statistics is None:
            statistics = _calibrate(prepared, pipe, work)
            if ranks.leads:
                statistics.save(work / _STATISTICS)
                shutil.rmtree(work / _SHARES)
        if options.check and ranks.leads:
            reference = generate(pipe, _check_items(prepared), prepared.call, description="16-bit images")
        if prepared.fitted:
            fittings = _fittings(prepared, pipe, statistics)
        memory.let_go(pipe)
        del pipe
    trajectory = statistics.trajectory if statistics else None
    for fitting in fittings.values():
        trajectory = fitting.replay.calls.trajectory  # one for all components
    done = [
        _quantize_component(prepared, plan, statistics, fittings.pop(plan.component, None), work)
        for plan in prepared.plans
    ]
    if not ranks.leads:
        return None
    with (
        atomic_folder(prepared.output, work, overwrite=options.overwrite) as part,
        ThreadPoolExecutor(HASHED_AT_ONCE) as pool,
    ):
        hashes: dict[Path, Future[str]] = {}

        def hash_now(file: Path) -> None:
            hashes[file] = pool.submit(sha256_file, file)  # while the next one is written

        outcomes = [Outcome.read(files) for _, files, _ in done]
        written = [_write(part, prepared, *one, outcome, hash_now) for one, outcome in zip(done, outcomes, strict=True)]
        read = {plan.component: outcome.fingerprints for plan, outcome in zip(prepared.plans, outcomes, strict=True)}
        prepared = replace(prepared, identity=_hashed(prepared, read))
        checkpoint.copy_rest(part, folder, [plan.component for plan in prepared.plans])
        record = _record(prepared, statistics, trajectory, written)
        record["files"] = hash_files(part, hashes)
        if reference is not None:
            record["check"] = _check(part, prepared, reference)
        record["seconds"] = round(time.perf_counter() - started, 1)
        write_json(part / PLAN_FILE, record)
        write_text(part / "README.md", card.model_card(record))
    return record


def warm_up(output: str, device: str, tokens: Sequence[int], prefer: str, dtype: str) -> list[dict[str, Any]]:
    """Compile what the checkpoint `output` launches on a GPU; a row of kernels/warmup.py for each launch."""
    where = torch.device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            f"--device {device}: kernels are compiled for the GPU that is there, and torch finds no such CUDA or ROCm "
            "device; run this on the machine that will serve"
        )
    from fluxq.kernels.chips import chip_of
    from fluxq.kernels.warmup import kinds_of, warm_up

    kinds = dict.fromkeys(kind for model in quantized_models(output) for kind in kinds_of(model))
    return [asdict(row) for row in warm_up(kinds, tokens, where, chip_of(where), prefer, getattr(torch, dtype))]


def quantized_models(output: str) -> list[torch.nn.Module]:
    """The quantized components of a checkpoint folder, on the meta device."""
    folder = resolve_model(output, local_files_only=True)
    names = [name for name in folder.components if (folder.path / name / "config.json").is_file()]
    quantized = [name for name in names if "quantization_config" in folder.config(name)]
    if not quantized:
        raise ValueError(f"{output} holds no component that fluxq quantized: give a folder that `fluxq quantize` wrote")
    models = [checkpoint.quantized_on_meta(folder, name) for name in quantized]
    for name, model in zip(quantized, models, strict=True):
        attention = folder.config(name)["quantization_config"].get("attention", "16bit")
        if attention != "16bit":
            fluxq.set_attention(model, attention)
    return models


def _plans(folder: ModelFolder, recipe: Recipe, options: Options) -> tuple[Plan, ...]:
    linears = {component: list_linears(folder, component) for component in _components(folder, recipe, options)}
    names = {component: [linear.name for linear in part] for component, part in linears.items()}
    require_matches([*options.include, *options.exclude], [name for part in names.values() for name in part])
    return tuple(_plan(folder, component, part, recipe, options) for component, part in linears.items())


def _components(folder: ModelFolder, recipe: Recipe, options: Options) -> tuple[str, ...]:
    """What the command line names, else what the recipe does; its `transformer` is all that runs at every step."""
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
        entry,
        linears,
        static_inputs=recipe.profile != "rtn" and (recipe.needs_data(entry) or options.statistics is not None),
        profile=recipe.profile,
        compat=recipe.compat,
        include=include,
        exclude=exclude,
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


def _calibrate(prepared: Prepared, pipe: Any, work: Path) -> Statistics:
    seed = _CALIBRATION_SEEDS + prepared.calibration.seed
    try:
        return capture_statistics(
            pipe,
            {
                component: {group: members[0].name for group, members in plan.statistics_groups().items()}
                for component, plan in prepared.calibrated.items()
            },
            prepared.prompts.items(prepared.calibration.count, seed),
            prepared.call,
            steps=steps_to_see(prepared.calibration.steps, number_of_steps(pipe, prepared.call)),
            digests={name: prepared.digest(name) for name in prepared.calibrated},
            folder=work / _SHARES,
            ranks=prepared.ranks,
        )
    except ValueError:
        for component in prepared.calibrated:
            require_finite_weights(prepared.weights(component))  # the cause, where there is one
        raise


def _fittings(prepared: Prepared, pipe: Any, statistics: Statistics | None) -> dict[str, Fitting]:
    """Component -> the calls that its blocks are fitted to, kept on disk until the checkpoint stands."""
    folder, calibration, plans = _work_folder(prepared), prepared.calibration, prepared.fitted
    items = prepared.prompts.items(calibration.count, _CALIBRATION_SEEDS + calibration.seed)
    held = -(-len(items) // _HELD_OUT) if len(items) > 1 else 0
    blocks = {name: plan.blocks for name, plan in plans.items()}
    try:
        calls = capture_calls(
            pipe,
            blocks,
            items[: len(items) - held],
            items[len(items) - held :],
            prepared.call,
            steps=steps_to_see(calibration.steps, number_of_steps(pipe, prepared.call)),
            digests={name: prepared.digest(name) for name in plans},
            folder=folder / "calls",
            most=_MOST_CALLS,
            ranks=prepared.ranks,
        )
        weights = _level_weights(prepared, pipe, items[:IMAGES], calls, folder / "levels.json")
    except ValueError:
        for component in plans:
            require_finite_weights(prepared.weights(component))  # the cause, where there is one
        raise
    own = {name: statistics.of_component(name) if statistics else None for name in plans}
    if prepared.bound is not None:
        prepared.bound.begin_fitting(pipe)
    return {
        name: Fitting(
            Replay(getattr(pipe, name), calls[name], folder / f"{name}-outputs", weights=weights, ranks=prepared.ranks),
            prepared.recipe.gate,
            prepared.options.parallel_blocks,
            own[name],
        )
        for name in plans
    }


def _bound(prepared: Prepared, limit: int, writes: bool) -> Bound | None:
    """What the pipelines of this job keep to, None if it runs none; ValueError if it could not."""
    options, fitted, seed = prepared.options, prepared.fitted.values() if writes else (), prepared.calibration.seed
    shows_images = writes and options.check
    if not (shows_images or prepared.fitted or any(plan.static_groups() for plan in prepared.plans)):
        return None
    items = prepared.prompts.items(prepared.calibration.count, _CALIBRATION_SEEDS + seed)
    return memory.bound_of(
        limit,
        prepared.device,
        options.dtype,
        prepared.folder,
        items=[*items, *_check_items(prepared)] if shows_images else items,
        call=prepared.call,
        fitted=fitted,
        fused=prepared.updates.keys(),
        shows_images=shows_images,
    )


def _level_weights(
    prepared: Prepared, pipe: Any, items: Sequence[Item], calls: dict[str, Calls], file: Path
) -> dict[int, float]:
    """Denoising step -> what an error at it does to the final latents; measured once and kept."""
    ranks = prepared.ranks
    if not ranks.agree(file.is_file()):
        steps = sorted({call.step for found in calls.values() for call in found.calls})
        weights = noise_level_weights(pipe, list(calls), items, prepared.call, steps, ranks)
        if ranks.leads:
            write_json(file, {str(step): weight for step, weight in weights.items()})
        return weights
    weights = read_json(file)
    if not all(re.fullmatch("[0-9]{1,8}", key) and type(each) is float and each >= 0 for key, each in weights.items()):
        raise ValueError(f"{file}: not the weight of each step; remove it, and the same command measures them again")
    return {int(step): weight for step, weight in weights.items()}


def _work_folder(prepared: Prepared) -> Path:
    """Beside the output: what an interrupted run of the same job goes on with. Another job has one of its own."""
    output = prepared.output.resolve()
    return output.parent / f".{output.name}.{sha256_json(_job(prepared))[:16]}.work"


def _job(prepared: Prepared) -> dict[str, Any]:
    """What decides the bytes of finished blocks; how they are cut into shards does not."""
    decisive = {key: value for key, value in prepared.identity.items() if key != "max_shard_bytes"}
    return {**decisive, "parallel_blocks": prepared.options.parallel_blocks}


@contextmanager
def _work_of(prepared: Prepared) -> Iterator[Path]:
    """The work folder, for the processes of one job; removed when that is done, kept when it is stopped."""
    ranks, work = prepared.ranks, _work_folder(prepared)
    with sole_writer(prepared.output) if ranks.leads else nullcontext():
        if ranks.leads:
            _begin(prepared, work)
        ranks.meet()
        if not (work / _MANIFEST).is_file():
            raise RuntimeError(f"{platform.node()}: {work} is not here; use an output that every process can see")
        try:
            yield work
        except BaseException as error:
            if isinstance(error, ValueError) and ranks.world == 1:  # it would fail again: what was begun is of no use
                shutil.rmtree(work, ignore_errors=True)
            elif ranks.leads:
                _keep_what_is_done(work)
            raise
        if ranks.leads:
            shutil.rmtree(work, ignore_errors=True)


def _begin(prepared: Prepared, work: Path) -> None:
    """Make the work folder, or clear what a killed process left half-made in it.

    ValueError for one of another job, naming what differs; with `overwrite` that is removed.
    """
    output, job = prepared.output.resolve(), _job(prepared)
    for other in sorted(output.parent.glob(f".{glob.escape(output.name)}.*.work")):
        manifest = other / _MANIFEST
        if other == work or not manifest.is_file():
            continue
        differing = _differing(job, read_json(manifest))
        put_back(output, other)
        if not prepared.options.overwrite:
            raise ValueError(
                f"{prepared.output}: an interrupted run with another {differing} is kept in {other}; go on with it by "
                "its own command, give another --output, or --overwrite to remove what it has done"
            )
        logger.warning("what an interrupted run with another %s had done is removed: %s", differing, other)
        shutil.rmtree(other)
    put_back(output, work)
    for half in work.rglob(".*.part"):
        half.unlink()
    if (work / _MANIFEST).is_file():
        logger.warning("going on with what an interrupted run left in %s", work)
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / _MANIFEST, job)


def _clear_away(prepared: Prepared) -> None:
    """Remove what a process left beside a finished checkpoint because it was killed just then."""
    output = prepared.output.resolve()
    if not any(output.parent.glob(f".{glob.escape(output.name)}.*")):
        return
    stamps = {component: prepared.folder.stamp(component) for component in prepared.identity["model"]}
    with suppress(RuntimeError), sole_writer(output):  # whoever else holds the lock clears away itself
        for model in (prepared.identity["model"], stamps):
            job = replace(prepared, identity={**prepared.identity, "model": model})
            shutil.rmtree(_work_folder(job), ignore_errors=True)


def _keep_what_is_done(work: Path) -> None:
    """And say so; a work folder with nothing that took time to make is removed."""
    if any(work.rglob("*.safetensors")):
        logger.warning("what is done is kept in %s: the same command goes on with it", work)
    else:
        shutil.rmtree(work, ignore_errors=True)


def _kept_statistics(work: Path) -> Statistics | None:
    """Those that an interrupted run gathered."""
    return Statistics.load(work / _STATISTICS) if (work / _STATISTICS).is_file() else None


def _quantize_component(
    prepared: Prepared, plan: Plan, statistics: Statistics | None, fitting: Fitting | None, work: Path
) -> tuple[Plan, list[Path], float]:
    """(its plan, files of its finished blocks, seconds that this run took)."""
    started = time.perf_counter()
    own = statistics.of_component(plan.component) if statistics else None
    dtype = getattr(torch, prepared.options.dtype)
    source = prepared.weights(plan.component)
    files = quantize_component(plan, source, own, dtype, work / plan.component, fitting, ranks=prepared.ranks)
    return plan, files, time.perf_counter() - started


def _write(
    part: Path,
    prepared: Prepared,
    plan: Plan,
    files: Sequence[Path],
    seconds: float,
    outcome: Outcome,
    written: Callable[[Path], None],
) -> dict[str, Any]:
    """Make a component of its finished blocks; returns what is recorded of it. written: as `write_component` has it."""
    started = time.perf_counter()
    plan = outcome.applied_to(plan)
    size = checkpoint.write_component(
        part / plan.component, prepared.folder, plan, files, prepared.options.max_shard_bytes, written
    )
    seconds += time.perf_counter() - started
    return {
        "component": plan.component,
        "family": plan.family,
        "notes": list(plan.notes),
        "attention": plan.attention,
        "bytes_before": prepared.weights(plan.component).nbytes,
        "bytes_after": size,
        "bits_per_weight": round(plan.bits_per_weight, 4),
        "seconds": round(seconds, 1),
        "layers": [
            {
                **layer.describe(),
                "bits_per_weight": round(layer.bits_per_weight, 4),
                "weight_sqnr_db": _rounded(outcome.weight_sqnr.get(layer.name)),
            }
            for layer in plan.layers
        ],
        "groups": [
            {
                "group": name,
                "layers": list(group.layers),
                "sqnr_before_db": _rounded(group.plain_db),
                "sqnr_db": _rounded(group.db),
                "stages": [asdict(stage) for stage in group.stages],
            }
            for name, group in outcome.groups.items()
        ],
    }


def _record(
    prepared: Prepared,
    statistics: Statistics | None,
    trajectory: dict[str, Any] | None,
    written: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "fluxq_version": fluxq.__version__,
        "identity": prepared.identity,
        "model": {
            "name": prepared.folder.name,
            "source": _source(prepared),
            "revision": prepared.folder.commit or prepared.options.revision,
            "license": prepared.folder.license,
            "digests": prepared.identity["model"],
        },
        "recipe": {"name": prepared.recipe_name, **prepared.recipe.model_dump(mode="json")},
        "loras": [lora.describe() for lora in prepared.loras],
        "prompts": {"source": prepared.prompts.source, "digest": prepared.prompts.digest},
        "trajectory": trajectory,
        "statistics_digest": statistics.content_digest if statistics else None,
        "components": written,
        "versions": versions(),
        "check": None,
    }


def _source(prepared: Prepared) -> str:
    """MODEL such that it means the same from any folder."""
    model = prepared.options.model or prepared.recipe.model or DEFAULT_MODEL
    return str(prepared.folder.path.resolve()) if Path(model).expanduser().is_dir() and model != "tiny" else model


def _check(part: Path, prepared: Prepared, reference: Generated) -> dict[str, Any]:
    """A few paired images against the 16-bit pipeline, and the recipe's gates."""
    options = prepared.options
    with about_to_keep():
        folder = ModelFolder(prepared.output.name, part)
    pipe = prepared.bound.load(folder, {}) if prepared.bound else load_pipeline(folder, options.dtype, prepared.device)
    if prepared.recipe.steps and any(plan.steps for plan in prepared.plans):
        KeptSteps(pipe, prepared.recipe.steps, prepared.weights, {})
    images = generate(pipe, _check_items(prepared), prepared.call, description="Quantized images")
    agreement = fidelity.fidelity(reference, images)
    finite = bool(reference.finite.all()) and bool(images.finite.all())
    measured = {
        "psnr": paired_interval(agreement.psnr_db).mean,
        "latent_sqnr": paired_interval(agreement.latent_sqnr_db).mean,
    }
    gates, for_eval = split_gates(prepared.recipe.gates, measured)
    missed = [gate for gate in gates if not gate_holds(gate, measured)]
    return {
        "images": len(reference.items),
        "seeds": [seed for _, seed in reference.items],
        "steps": number_of_steps(pipe, prepared.call),
        "finite": finite,
        "psnr_db": [_rounded(value) for value in agreement.psnr_db],
        "mean_psnr_db": _rounded(measured["psnr"]),
        "mean_latent_sqnr_db": _rounded(measured["latent_sqnr"]),
        "gates": gates,
        "gates_for_eval": for_eval,
        "missed": missed,
        "passed": finite and not missed,
    }


def _check_items(prepared: Prepared) -> Sequence[Any]:
    """(row, seed) of each image: of rows with sizes or images of their own those that compare with the first."""
    return prepared.prompts.alike.items(CHECK_IMAGES, prepared.calibration.seed)


def _identity(prepared: Prepared) -> dict[str, Any]:
    """What makes a finished checkpoint the same as the one asked for.

    Where layers are only rounded and there is no checkpoint to compare with, models go by the stamps of their files:
    they are hashed as they are read, and `_hashed` is what is recorded.
    """
    options = prepared.options
    hashed_first = prepared.recipe.profile != "rtn" or prepared.loras or _is_taken(prepared)
    name_of = prepared.folder.digest if hashed_first else prepared.folder.stamp
    return {
        "fluxq": fluxq.__version__,
        "recipe": prepared.recipe.digest,
        "model": {plan.component: name_of(plan.component) for plan in prepared.plans},
        "copied": checkpoint.digest_rest(prepared.folder, [plan.component for plan in prepared.plans]),
        "loras": [[lora.component, lora.digest, lora.weight] for lora in prepared.loras],
        "components": sorted(plan.component for plan in prepared.plans),
        "plans": sha256_json({p.component: [[la.name, str(la.scheme)] for la in p.layers] for p in prepared.plans}),
        "prompts": prepared.prompts.digest,
        "calibration": prepared.calibration.model_dump(mode="json"),
        "statistics": prepared.statistics.content_digest if prepared.statistics else None,
        "call": prepared.call,
        "dtype": options.dtype,
        "max_shard_bytes": options.max_shard_bytes,
    }


def _finished(prepared: Prepared) -> dict[str, Any] | None:
    """The record of a finished checkpoint at the output that is just what was asked for."""
    output = prepared.output
    if not _is_taken(prepared):
        return None
    record = read_plan_file(output)
    if record is None:
        raise ValueError(f"output folder {output} is not empty; give another --output, or --overwrite to replace it")
    differing = _differing(_hashed(prepared), record.get("identity", {}))
    if differing:
        raise ValueError(
            f"output folder {output} holds a checkpoint with another {differing}; "
            "give another --output, or --overwrite to replace it"
        )
    if prepared.options.check and record["check"] is None:
        raise ValueError(f"{output} was made with --no-check; pass it again to accept that, or --overwrite to check")
    return record


def _is_taken(prepared: Prepared) -> bool:
    """Whether something stands at the output that may not be replaced."""
    output = prepared.output
    return not prepared.options.overwrite and output.exists() and any(output.iterdir())


def _hashed(prepared: Prepared, read: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, Any]:
    """The identity with digests in place of stamps; read: by component, the tensors that were hashed already."""
    known, folder = read or {}, prepared.folder
    model = {
        component: name if isinstance(name, str) else folder.digest(component, known.get(component))
        for component, name in prepared.identity["model"].items()
    }
    return {**prepared.identity, "model": model}


def _differing(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The keys of `mine` that have another value in `theirs`; of objects in both, which of their keys."""
    found = []
    for key in sorted(key for key, value in mine.items() if theirs.get(key) != value):
        one, other, parts = mine[key], theirs.get(key), []
        if isinstance(one, dict) and isinstance(other, dict):
            parts = sorted(part for part in one.keys() | other.keys() if one.get(part) != other.get(part))
        found.append(f"{key} ({', '.join(parts)})" if parts else key)
    return ", ".join(found)


def _require_folder(prepared: Prepared) -> None:
    """Refuse an output that is a file, or whose replacement would delete the model or the working folder."""
    output = prepared.output
    _require_parent(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output {output} is a file; give another --output")
    for what, path in (("the model", prepared.folder.path), ("the current folder", Path())):
        if path.resolve().is_relative_to(output.resolve()):
            raise ValueError(f"output {output} holds {what}, which would be replaced; give another --output")


def _require_parent(output: Path) -> None:
    parent = _existing_parent(output)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(
            f"output {output} cannot be made: {parent} is no folder one may write to; give another --output"
        )


def _existing_parent(output: Path) -> Path:
    return next(parent for parent in output.resolve().parents if parent.exists())


def require_device(device: str) -> None:
    """ValueError for a device that torch cannot use."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {device!r} cannot be used: {first_line(error)}; give --device cpu, or cuda with a GPU"
        ) from None


def require_call(folder: ModelFolder, call: dict[str, Any]) -> None:
    """Refuse generation defaults that the pipeline does not take, before it is loaded."""
    pipeline = folder.pipeline_class
    if pipeline is None:
        name = folder.index["_class_name"]
        raise ValueError(f"{folder.path}: a {name}, which this diffusers ({diffusers.__version__}) does not have")
    unknown = sorted(call.keys() - inspect.signature(pipeline.__call__).parameters.keys())
    if unknown:
        raise ValueError(
            f"{folder.path / GENERATION_FILE}: {pipeline.__name__} takes no {', '.join(unknown)}; remove it"
        )


def require_steps(folder: ModelFolder) -> None:
    """ValueError for a pipeline that does not tell of its steps, which a run of it is followed by."""
    pipeline = folder.pipeline_class
    if pipeline is not None and "callback_on_step_end" not in inspect.signature(pipeline.__call__).parameters:
        raise ValueError(
            f"{folder.name}: a {pipeline.__name__} takes no callback_on_step_end in this diffusers, so it cannot be "
            "calibrated or checked; --profile rtn --no-check quantizes it without running it"
        )


def _scheduler(folder: ModelFolder) -> Any:
    """The pipeline's, from its files; ValueError for one that this diffusers does not have."""
    name = folder.components.get("scheduler", "")
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise ValueError(f"{folder.name}: this diffusers has no scheduler {name!r}; leave `steps` out of the recipe")
    return kind.from_pretrained(folder.path / "scheduler", local_files_only=True)


def require_images(folder: ModelFolder, cure: str) -> None:
    """ValueError for a pipeline that makes video."""
    pipeline = folder.pipeline_class
    if pipeline is not None and "num_frames" in inspect.signature(pipeline.__call__).parameters:
        raise ValueError(f"{folder.name}: a {pipeline.__name__} makes video, and only images can be compared; {cure}")


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


def _require_space(prepared: Prepared, work: Path) -> None:
    """Refuse before the start what would run out of disk."""
    parent, needed = _existing_parent(prepared.output), _space_needed(prepared, work)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            f"not enough space in {parent}: finished blocks and the checkpoint may need {needed / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB are free; give another --output"
        )


def _space_needed(prepared: Prepared, work: Path) -> int:
    """Bytes that are still to be written, without the calls that layers are fitted to."""
    folder = prepared.folder
    planned = {plan.component: plan for plan in prepared.plans}
    dtype = getattr(torch, prepared.options.dtype)
    quantized = sum(_most_bytes(plan, prepared.weights(name), dtype) for name, plan in planned.items())
    copied = sum(_size(folder.path / component) for component in folder.components if component not in planned)
    there = sum(_size(work / component) for component in planned)
    return 2 * quantized + copied - there


def _most_bytes(plan: Plan, source: SourceWeights, dtype: torch.dtype) -> int:
    """What a quantized component takes, if its layers end with all that may be tried."""
    bits = {f"{layer.name}.weight": layer.most_stored_bits for layer in plan.quantized}
    plain = [name for name in source.names if name not in bits]
    stored = [(source.stored(name), source.stays_fp32(name)) for name in plain]
    return sum(bits.values()) // 8 + sum(s.nbytes if as_is else prod(s.shape) * dtype.itemsize for s, as_is in stored)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _rounded(value: float | None) -> float | None:
    """For JSON, which has no infinity: None stands for identical images too."""
    return None if value is None or value in (float("inf"), float("-inf")) or value != value else round(value, 3)
