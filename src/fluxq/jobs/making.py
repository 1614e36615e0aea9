"""One function per command: joins recipes, calibrate, quantize and eval.

`job_of` reads the options and refuses jobs that cannot work; the function that takes the job does the work. Output
folders appear complete or not at all. Until then each stage keeps its results in the work folder, whose name has the
job's digest, and an interrupted run goes on with all that is whole there:

    statistics   statistics.safetensors
    list         velocities.safetensors, runs.json
    calls        calls/, with the digests of the weights that they were captured with; levels.json
    blocks       <component>/0000.safetensors …, those of rounded blocks with hashes of their source weights
    checkpoint   the output itself, with the closing check in its record

All of them have a hash of themselves, and what was damaged is made again.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import fluxq
from fluxq.base.console import logger, without_cure
from fluxq.base.devices import there_is_a_gpu, versions
from fluxq.base.files import place_in_work, read_sealed_json, sha256_file, write_sealed_json, write_text
from fluxq.base.model import DEFAULT_MODEL, ModelFolder, load_pipeline, resolve_model
from fluxq.base.output import Output, atomic_output, job_digest, remove
from fluxq.base.ranks import Ranks
from fluxq.calibrate.blocks import Replay
from fluxq.calibrate.calls import Calls, capture_calls
from fluxq.calibrate.capture import Item, Sampling, capture_statistics, number_of_steps, steps_to_see
from fluxq.calibrate.sensitivity import IMAGES, noise_level_weights
from fluxq.calibrate.statistics import Statistics
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.images.sides import pipeline_digests
from fluxq.eval.metrics import fidelity
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.eval.report import card
from fluxq.jobs import memory, passports
from fluxq.jobs.job import (
    RUNS,
    Job,
    clear_leftovers,
    decisive,
    finished_checkpoint,
    identity_of,
    require_same_statistics,
    require_space,
    with_digests,
    work_folder,
    work_of,
)
from fluxq.jobs.job import JobOptions as JobOptions  # with these the commands reach all of a job through this file
from fluxq.jobs.listing import VELOCITIES, list_of_recipe, lists_of_checkpoint
from fluxq.jobs.planning import demand as demand
from fluxq.jobs.planning import job_of as job_of
from fluxq.quantize import checkpoint
from fluxq.quantize.checkpoint import is_model, model_on_meta
from fluxq.quantize.record import (
    Check,
    Group,
    Identity,
    Layer,
    Lora,
    Prompts,
    Record,
    RecordedComponent,
    RecordedModel,
    RecordedRecipe,
    RecordedStage,
    hash_files,
    read_record,
    write_digests,
    write_record,
)
from fluxq.quantize.run import Fitting, Outcome, quantize_component, require_finite_weights
from fluxq.quantize.structure import convolutions_of
from fluxq.recipes.cards import Holding, PartSize, holding, weights_on
from fluxq.recipes.cost import Cost, Prefer, activation_bytes, cost, forward_pass
from fluxq.recipes.devices import find_device
from fluxq.recipes.plan import Plan
from fluxq.recipes.recipe import gate_holds, split_gates
from fluxq.recipes.step_list import StepList
from fluxq.runtime.skipped import SkippedSteps
from fluxq.runtime.steps import KeptSteps, about_to_keep

_STATISTICS, _SHARES = "statistics.safetensors", "statistics"  # in the work folder
MOST_CALLS = 128  # of a transformer, that layers are fitted to; batches times steps
_OF_16_BIT = 2  # bytes
_HELD_OUT = 10  # one image in so many decides, and is never fitted to


def model_costs(job: Job, gpu: str, prefer: Prefer, frames: int | None, batch: int) -> dict[str, Cost]:
    """Return component -> modelled cost of its plan on a GPU; only transformers, which run at every step, have one.

    Raises ValueError for an unknown GPU, and where no transformer is planned.
    """
    if not job.calibrated:
        planned = ", ".join(plan.component for plan in job.plans)
        raise ValueError(f"{planned}: runs once per image and is not modelled; --gpu needs a transformer")
    device, folder = find_device(gpu), job.folder
    size = replace(memory.call_size(job.call, batch), frames=frames)
    vae = folder.config("vae") if "vae" in folder.components else None
    costs = {}
    for component, plan in job.calibrated.items():
        forward = forward_pass(
            plan.family,
            folder.config(component),
            size,
            vae=vae,
            convolutions=convolutions_of(model_on_meta(folder, component)),
        )
        costs[component] = cost(plan, forward, device, prefer)
    return costs


def holding_on(job: Job, gpu: str, costs: dict[str, Cost], prefer: Prefer) -> Holding:
    """Return the bytes that the whole pipeline takes of a GPU. costs: of its transformers, from `model_costs`."""
    folder, device = job.folder, find_device(gpu)
    plans = {plan.component: plan for plan in job.plans}
    size, pieces = memory.call_size(job.call), []
    for name in folder.components:
        if not is_model(folder, name):
            continue
        weights: float = memory.served_bytes(folder, name)
        if name in plans:
            others = weights - sum(_OF_16_BIT * layer.n * layer.k for layer in plans[name].layers)
            weights = weights_on(plans[name].layers, others, device.chip, prefer)
        activations = memory.activations(folder, name, size, _OF_16_BIT)
        if name in costs:
            activations = activation_bytes(plans[name], costs[name].forward)
        pieces.append(PartSize(name, weights, activations))
    return holding(pieces, device)


def calibrate(job: Job) -> Path:
    """Gather statistics of every planned input group into one file, and return its path."""
    if job.finished:
        if job.run.ranks.leads:
            clear_leftovers(job)
        return job.output
    identity = job.run.ranks.agree(identity_of(job) if job.run.ranks.leads else None)
    job = replace(job, identity=identity)
    with memory.within(job.run.limit, job.run.device), work_of(job) as work:
        ranks = job.run.ranks
        if not ranks.agree(ranks.leads and _require_own_statistics(job)):
            statistics = _calibrate(job, job.load_reference(), work)
            if ranks.leads:
                _write_statistics(job, statistics, work)
    return job.output


def _write_statistics(job: Job, statistics: Statistics, work: Path) -> None:
    """Write the output; RuntimeError for one that appeared since this job began and may not be replaced."""
    output = Output(job.output, True)
    for component in job.calibrated:
        _require_unchanged(job, component, work)
    if not _require_own_statistics(job):
        with atomic_output(output, work, overwrite=job.options.overwrite) as part:
            statistics.save(part / output.place.name, job_digest(decisive(job)))


def _require_unchanged(job: Job, component: str, work: Path) -> None:
    """Raise RuntimeError, as `Job.require_unchanged`; what was measured may be of other weights, and is removed."""
    try:
        job.require_unchanged(component)
    except RuntimeError:
        measured = [work / name for name in (_SHARES, _STATISTICS, "calls", "levels.json", VELOCITIES, RUNS)]
        measured += work.glob("*-outputs")
        for path in measured if job.run.ranks.leads else ():
            remove(path)
        raise


def _require_own_statistics(job: Job) -> bool:
    """Tell whether the output stands already; RuntimeError if it is another run's, and not to be replaced."""
    if job.options.overwrite or not job.output.exists():
        return False
    try:
        require_same_statistics(job)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    return True


def quantize(job: Job) -> Record:
    """Calibrate, quantize, check and write the checkpoint, and return its record.

    `check.passed` is False where the closing check found NaN or missed a gate; the checkpoint is written all the same
    and its card says so.
    """
    if job.finished:
        if job.run.ranks.leads:
            clear_leftovers(job)
        return read_record(job.output)
    ranks = job.run.ranks
    with memory.within(job.run.limit, job.run.device), work_of(job) as work:
        record = _written_meanwhile(job) if ranks.leads else None
        if not ranks.agree(record is not None):
            record = _quantize(job, work)
        return Record.model_validate(ranks.agree(record and record.to_json()))


def _written_meanwhile(job: Job) -> Record | None:
    """Return the record of a checkpoint that another run wrote since this job began; None if there is nothing.

    Raises RuntimeError, which costs no block, where something else stands there.
    """
    try:
        return read_record(job.output) if finished_checkpoint(job) else None
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def _quantize(job: Job, work: Path) -> Record | None:
    """Return the record of the checkpoint in the first process; None in those that helped it."""
    options, ranks = job.options, job.run.ranks
    started = time.perf_counter()
    if ranks.leads:
        require_space(job, work)
    reference: Generated | None = None
    steps: StepList | None = None
    statistics = job.statistics or _kept_statistics(work, ranks)
    fittings: dict[str, Fitting] = {}
    static = [plan for plan in job.plans if plan.static_groups() and plan.component not in job.fitted]
    listed = ranks.leads and job.is_listed
    if job.fitted or listed or (options.check and ranks.leads) or (static and statistics is None):
        pipe = job.load_reference()
        if static and statistics is None:
            statistics = _calibrate(job, pipe, work)
            if ranks.leads:
                statistics.save(work / _STATISTICS, place_in_work(work / _STATISTICS))
                shutil.rmtree(work / _SHARES)
        if options.check and ranks.leads:
            reference = generate(pipe, job.check_items, job.check_call, description="16-bit pipeline")
        if listed:
            steps = list_of_recipe(job, pipe, work)
        if job.fitted:
            fittings = _fittings(job, pipe, statistics)
        if job.run.memory is not None:
            memory.let_go(pipe)
        del pipe
    trajectory = statistics.trajectory if statistics else None
    for fitting in fittings.values():
        trajectory = fitting.replay.calls.trajectory  # one for all components
    done = [_quantize_component(job, plan, statistics, fittings.pop(plan.component, None), work) for plan in job.plans]
    if not ranks.leads:
        return None
    with atomic_output(Output(job.output), work, overwrite=options.overwrite) as part:
        outcomes, hashes = [Outcome.read(files) for _, files, _ in done], dict[Path, str]()
        written = [_write(part, job, *one, outcome, hashes) for one, outcome in zip(done, outcomes, strict=True)]
        read = {plan.component: outcome.fingerprints for plan, outcome in zip(job.plans, outcomes, strict=True)}
        job = replace(job, identity=with_digests(job, read))
        _copy_rest(part, job, hashes)
        if steps is not None:
            _record_list(part, job, steps)
        write_digests(part)
        record = _record(job, statistics, trajectory, written)
        record.files = hash_files(part, hashes)
        if reference is not None:
            record.check = closing_check(part, job, reference)
        record.seconds = round(time.perf_counter() - started, 1)
        write_record(part, record)
        write_text(part / "README.md", card.model_card(record))
    return record


def _copy_rest(part: Path, job: Job, hashes: dict[Path, str]) -> None:
    """Copy the components that are not quantized; RuntimeError if they are not those that the job began with.

    hashes: takes those of the files.
    """
    quantized = [plan.component for plan in job.plans]
    checkpoint.copy_rest(part, job.folder, quantized)
    copied = checkpoint.digest_rest(ModelFolder(job.output.name, part), quantized, hashes)
    meant = job.identity["copied"]
    differing = sorted(name for name in meant.keys() | copied if meant.get(name) != copied.get(name))
    configs = {name: sha256_file(job.folder.path / name / "config.json") for name in quantized}
    differing += [f"{name}/config.json" for name in quantized if configs[name] != job.configs.get(name, configs[name])]
    if differing:
        raise RuntimeError(
            f"{job.folder.path}: {', '.join(differing)} changed since this run began, and the checkpoint would be "
            "recorded with what was there before. Put that back, or start again when nothing writes there any more"
        )


def _record_list(part: Path, job: Job, steps: StepList) -> None:
    """Write a list of steps into the config.json of quantized denoisers."""
    for plan in job.plans:
        if plan.compute:
            checkpoint.add_runtime(part / plan.component, {"steps": {str(steps.total): steps.to_dict()}})


def warm_up(output: str, device: str, tokens: Sequence[int], prefer: str, dtype: str) -> list[dict[str, Any]]:
    """Compile the kernels that the checkpoint `output` launches on a GPU; return a row for each launch."""
    where = torch.device(device)
    if where.type != "cuda" or not there_is_a_gpu(where.index or 0):
        raise ValueError(
            f"--device {device}: kernels are compiled for the GPU that is there, and torch finds no such CUDA or ROCm "
            "device; run this on the machine that will serve"
        )
    from fluxq.kernels.tiles import chip_of
    from fluxq.runtime.warmup import Machine, kinds_of, warm_up

    kinds = dict.fromkeys(kind for model in quantized_components(output).values() for kind in kinds_of(model))
    machine = Machine(where, chip_of(where), prefer, getattr(torch, dtype))
    with torch.cuda.device(where):  # Triton launches on the current one
        return [asdict(row) for row in warm_up(kinds, tokens, machine)]


def quantized_components(output: str) -> dict[str, torch.nn.Module]:
    """Return name -> model of the quantized components of a checkpoint folder, on the meta device."""
    folder = resolve_model(output, local_files_only=True, one_model=True)
    names = [name for name in folder.components if (folder.path / name / "config.json").is_file()]
    quantized = [name for name in names if "quantization_config" in folder.config(name)]
    if not quantized:
        raise ValueError(f"{output} holds no component that fluxq quantized: give a folder that `fluxq quantize` wrote")
    models = {name: checkpoint.quantized_on_meta(folder, name) for name in quantized}
    for name, model in models.items():
        attention = folder.config(name)["quantization_config"].get("attention", "16bit")
        if attention != "16bit":
            fluxq.set_attention(model, attention)
    return models


def sampling_of(job: Job, pipe: Any, components: Iterable[str]) -> Sampling:
    """Return how calibration runs the pipeline and which steps it looks at."""
    steps = steps_to_see(job.calibration.steps, number_of_steps(pipe, job.call))
    return Sampling(job.call, steps, {name: job.digest(name) for name in components})


def _calibrate(job: Job, pipe: Any, work: Path) -> Statistics:
    try:
        return capture_statistics(
            pipe,
            {
                component: {group: members[0].name for group, members in plan.statistics_groups().items()}
                for component, plan in job.calibrated.items()
            },
            job.calibration_items,
            sampling_of(job, pipe, job.calibrated),
            folder=work / _SHARES,
            ranks=job.run.ranks,
        )
    except ValueError:
        for component in job.calibrated:
            require_finite_weights(job.weights(component))  # the cause, where there is one
        raise


def _fittings(job: Job, pipe: Any, statistics: Statistics | None) -> dict[str, Fitting]:
    """Return component -> the calls that its blocks are fitted to, kept on disk until the checkpoint stands."""
    folder, plans = work_folder(job), job.fitted
    items = job.calibration_items
    held_out = -(-len(items) // _HELD_OUT) if len(items) > 1 else 0
    blocks = {name: plan.blocks for name, plan in plans.items()}
    try:
        calls = capture_calls(
            pipe,
            blocks,
            items[: len(items) - held_out],
            items[len(items) - held_out :],
            sampling_of(job, pipe, plans),
            folder=folder / "calls",
            most=MOST_CALLS,
            ranks=job.run.ranks,
        )
        weights = _level_weights(job, pipe, items[:IMAGES], calls, folder / "levels.json")
    except ValueError:
        for component in plans:
            require_finite_weights(job.weights(component))  # the cause, where there is one
        raise
    of_component = {name: statistics.of_component(name) if statistics else None for name in plans}
    if job.run.memory is not None:
        job.run.memory.begin_fitting(pipe)
    return {
        name: Fitting(
            Replay(getattr(pipe, name), calls[name], folder / f"{name}-outputs", weights=weights, ranks=job.run.ranks),
            job.recipe.gate,
            job.options.parallel_blocks,
            of_component[name],
        )
        for name in plans
    }


def _level_weights(job: Job, pipe: Any, items: Sequence[Item], calls: dict[str, Calls], file: Path) -> dict[int, float]:
    """Return denoising step -> effect of an error at it on the final latents; measured once and kept."""
    ranks = job.run.ranks
    kept = ranks.agree(_kept_levels(file) if ranks.leads else None)
    if kept is None:
        steps = sorted({call.step for component_calls in calls.values() for call in component_calls.calls})
        weights = noise_level_weights(pipe, list(calls), items, job.call, steps, ranks)
        if ranks.leads:
            write_sealed_json(file, {str(step): weight for step, weight in weights.items()})
        return weights
    return {int(step): weight for step, weight in kept.items()}


def _kept_levels(file: Path) -> dict[str, float] | None:
    """Read the weights of steps that an interrupted run measured; None where there are none, or they were damaged."""
    try:
        weights = read_sealed_json(file) if file.is_file() else None
    except ValueError as error:
        logger.warning("%s: measured again", without_cure(error))
        return None
    if weights is None or all(
        re.fullmatch("[0-9]{1,8}", key) and type(each) is float and each >= 0 for key, each in weights.items()
    ):
        return weights
    logger.warning("%s: not the weight of each step; measured again", file)
    return None


def _kept_statistics(work: Path, ranks: Ranks) -> Statistics | None:
    """Read the statistics that an interrupted run gathered; None where there are none, or they were damaged."""
    file, statistics = work / _STATISTICS, None
    try:
        statistics = Statistics.load(file, place_in_work(file)) if ranks.leads and file.is_file() else None
    except ValueError as error:
        logger.warning("%s: gathered again", without_cure(error))
    are_kept = ranks.agree(statistics is not None)  # as the first process finds
    return statistics or (Statistics.load(file) if are_kept else None)


def _quantize_component(
    job: Job, plan: Plan, statistics: Statistics | None, fitting: Fitting | None, work: Path
) -> tuple[Plan, list[Path], float]:
    """Quantize a component; return its plan, the files of its finished blocks and the seconds that this run took."""
    started = time.perf_counter()
    component_statistics = statistics.of_component(plan.component) if statistics else None
    dtype = getattr(torch, job.options.dtype)
    source = job.weights(plan.component)
    _require_unchanged(job, plan.component, work)  # from here on each read compares with these files
    files = quantize_component(
        plan, source, component_statistics, dtype, work / plan.component, fitting, ranks=job.run.ranks
    )
    return plan, files, time.perf_counter() - started


def _write(
    part: Path,
    job: Job,
    plan: Plan,
    files: Sequence[Path],
    seconds: float,
    outcome: Outcome,
    hashes: dict[Path, str],
) -> RecordedComponent:
    """Make a component of its finished blocks, and return its record. hashes: takes those of its files."""
    started = time.perf_counter()
    plan = outcome.applied_to(plan)
    size = checkpoint.write_component(
        part / plan.component, job.folder, plan, files, job.options.max_shard_bytes, hashes.__setitem__
    )
    seconds += time.perf_counter() - started
    return RecordedComponent(
        component=plan.component,
        family=plan.family,
        notes=list(plan.notes),
        attention=plan.attention,
        bytes_before=job.weights(plan.component).nbytes,
        bytes_after=size,
        bits_per_weight=round(plan.bits_per_weight, 4),
        seconds=round(seconds, 1),
        layers=[Layer.of(layer, _rounded(outcome.weight_sqnr.get(layer.name))) for layer in plan.layers],
        groups=[
            Group(
                group=name,
                layers=list(group.layers),
                sqnr_before_db=_rounded(group.rounded and group.rounded.total),
                sqnr_db=_rounded(group.fitted and group.fitted.total),
                median_before_db=_rounded(group.rounded and group.rounded.median),
                median_db=_rounded(group.fitted and group.fitted.median),
                low_before_db=_rounded(group.rounded and group.rounded.low),
                low_db=_rounded(group.fitted and group.fitted.low),
                stages=[RecordedStage(**asdict(stage)) for stage in group.stages],
            )
            for name, group in outcome.groups.items()
        ],
    )


def _record(
    job: Job,
    statistics: Statistics | None,
    trajectory: dict[str, Any] | None,
    written: list[RecordedComponent],
) -> Record:
    folder, prompts = job.folder, job.prompts
    return Record(
        fluxq_version=fluxq.__version__,
        identity=Identity.model_validate(job.identity),
        model=RecordedModel(
            name=folder.name,
            source=_source(job),
            revision=folder.commit or job.options.revision,
            license=folder.license,
            digests=job.identity["model"],
        ),
        recipe=RecordedRecipe.model_validate({"name": job.recipe_name, **job.recipe.model_dump(mode="json")}),
        loras=[Lora(**lora.describe()) for lora in job.loras],
        prompts=Prompts(source=prompts.source, digest=prompts.digest),
        trajectory=trajectory,
        statistics_digest=statistics.content_digest if statistics else None,
        components=written,
        versions=versions(),
        check=None,
    )


def _source(job: Job) -> str | None:
    """Return MODEL such that it means the same from any folder; None of a pipeline in memory."""
    if job.options.in_memory:
        return None
    model = job.options.model or job.recipe.model or DEFAULT_MODEL
    return str(job.folder.path.resolve()) if Path(model).expanduser().is_dir() and model != "tiny" else model


def closing_check(part: Path, job: Job, reference: Generated) -> Check:
    """Compare a few paired images or videos with the 16-bit pipeline's, and apply the recipe's gates.

    Also write the checkpoint's passport.
    """
    digests = pipeline_digests(ModelFolder(job.output.name, part))  # before the pipeline takes its memory
    pipe = _quantized(part, job)
    lists = lists_of_checkpoint(ModelFolder(job.output.name, part))  # a model within a bound does not know of them
    skipped = SkippedSteps(pipe, *lists) if lists else None
    images = generate(pipe, job.check_items, job.check_call, description="Quantized pipeline")
    psnr_db, latent_sqnr_db = fidelity.fidelity(reference, images)
    finite = bool(reference.finite.all()) and bool(images.finite.all())
    figures = {"psnr": paired_interval(psnr_db), "latent_sqnr": paired_interval(latent_sqnr_db)}
    measured = {name: interval.mean for name, interval in figures.items()}
    flat = fidelity.flat_images(reference, images)
    gates, for_eval = split_gates(job.recipe.gates, measured)
    missed = [gate for gate in gates if not gate_holds(gate, measured)]
    check = Check(
        images=len(reference.items),
        frames=reference.frames,
        seeds=[seed for _, seed in reference.items],
        steps=number_of_steps(pipe, job.call),
        listed=str(skipped.steps) if skipped else None,
        finite=finite,
        flat=flat,
        psnr_db=[_rounded(value) for value in psnr_db],
        mean_psnr_db=_rounded(measured["psnr"]),
        mean_latent_sqnr_db=_rounded(measured["latent_sqnr"]),
        gates=gates,
        gates_for_eval=for_eval,
        missed=missed,
        passed=finite and not flat and not missed,
    )
    passports.write_from_check(part, job, pipe, images, figures, check, digests)
    return check


def _quantized(part: Path, job: Job) -> Any:
    """Load the pipeline of a checkpoint, the steps that it keeps in 16 bit included."""
    folder, run = ModelFolder(job.output.name, part), job.run
    with about_to_keep():
        pipe = run.memory.load(folder, {}) if run.memory else load_pipeline(folder, job.options.dtype, run.device)
    if job.recipe.steps and any(plan.steps for plan in job.plans):
        KeptSteps(pipe, job.recipe.steps, job.weights, {})
    return pipe


def _rounded(value: float | None) -> float | None:
    """Return a number for JSON, which has no infinity: None stands for identical images too."""
    return None if value is None or value in (float("inf"), float("-inf")) or value != value else round(value, 3)
