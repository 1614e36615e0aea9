"""One function per command: joins recipes, calibrate, quantize and eval.

`prepare` reads what a user gave and refuses what cannot work; the function that takes its result does the work. Output
folders appear complete or not at all.
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
from fluxq.base.console import logger
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import DEFAULT_MODEL, ModelFolder, load_pipeline, resolve_model
from fluxq.base.output import Output, atomic_folder, job_digest
from fluxq.base.provenance import versions
from fluxq.calibrate.blocks import Replay
from fluxq.calibrate.calls import Calls, capture_calls
from fluxq.calibrate.capture import Item, Sampling, capture_statistics, number_of_steps, steps_to_see
from fluxq.calibrate.sensitivity import IMAGES, noise_level_weights
from fluxq.calibrate.statistics import Statistics
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.metrics import fidelity
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.eval.report import card
from fluxq.jobs import footprint, memory
from fluxq.jobs.prepared import Options, Prepared
from fluxq.jobs.preparing import demand, prepare
from fluxq.jobs.work_folder import (
    clear_leftovers,
    decisive,
    finished_checkpoint,
    finished_statistics,
    identity_of,
    require_space,
    with_digests,
    work_folder,
    work_of,
)
from fluxq.quantize import checkpoint
from fluxq.quantize.checkpoint import PLAN_FILE, convolutions_of, is_model, model_on_meta
from fluxq.quantize.digests import hash_files, write_digests
from fluxq.quantize.finished import Outcome
from fluxq.quantize.run import Fitting, quantize_component, require_finite_weights
from fluxq.recipes.cards import Holding, Piece, holding, weights_on
from fluxq.recipes.cost import Cost, Prefer, activation_bytes, cost, forward_pass
from fluxq.recipes.devices import find_device
from fluxq.recipes.plan import Plan
from fluxq.recipes.recipe import gate_holds, split_gates
from fluxq.recipes.workloads import CallSize
from fluxq.runtime.steps import KeptSteps, about_to_keep

__all__ = [  # what the commands need of a job, whichever file it is in
    "Options",
    "Prepared",
    "calibrate",
    "demand",
    "held_by",
    "model_costs",
    "prepare",
    "quantize",
    "quantized_models",
    "warm_up",
]
_STATISTICS, _SHARES = "statistics.safetensors", "statistics"  # in the work folder
MOST_CALLS = 128  # of a transformer, that layers are fitted to; batches times steps
_OF_16_BIT = 2  # bytes
_HELD_OUT = 10  # one image in so many decides, and is never fitted to


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
            CallSize(batch, call.get("height"), call.get("width"), frames, call.get("max_sequence_length")),
            vae=vae,
            convolutions=convolutions_of(model_on_meta(folder, component)),
        )
        costs[component] = cost(plan, forward, device, prefer)
    return costs


def held_by(prepared: Prepared, gpu: str, costs: dict[str, Cost], prefer: Prefer) -> Holding:
    """Return the bytes that the whole pipeline takes of a GPU. costs: of its transformers, from `model_costs`."""
    folder, device, call = prepared.folder, find_device(gpu), prepared.call
    plans = {plan.component: plan for plan in prepared.plans}
    shape = (call.get(name) for name in ("height", "width", "num_frames", "max_sequence_length"))
    size, pieces = CallSize(1, *shape), []
    for name in folder.components:
        if not is_model(folder, name):
            continue
        weights: float = footprint.served_bytes(folder, name)
        if name in plans:
            others = weights - sum(_OF_16_BIT * layer.n * layer.k for layer in plans[name].layers)
            weights = weights_on(plans[name].layers, others, device.chip, prefer)
        made = footprint.activations(folder, name, size, _OF_16_BIT)
        if name in costs:
            made = activation_bytes(plans[name], costs[name].forward)
        pieces.append(Piece(name, weights, made))
    return holding(pieces, device)


def calibrate(prepared: Prepared) -> Path:
    """Gather statistics of every planned input group into one file; returns its path."""
    if prepared.finished is not None:
        if prepared.ranks.leads:
            clear_leftovers(prepared)
        return prepared.output
    identity = prepared.ranks.agree(identity_of(prepared) if prepared.ranks.leads else None)
    prepared = replace(prepared, identity=identity)
    with memory.within(prepared.max_memory, prepared.device), work_of(prepared) as work:
        statistics = _calibrate(prepared, prepared.load_reference(), work)
        if prepared.ranks.leads:
            _require_free(prepared)
            statistics.save(prepared.output.resolve(), job_digest(decisive(prepared)), folder=work)
    return prepared.output


def _require_free(prepared: Prepared) -> None:
    """Raise RuntimeError for what was put at the output since this was prepared, and may not be replaced."""
    try:
        Output(prepared.output, True).require_free(overwrite=prepared.options.overwrite, exists_ok=True)
        if not prepared.options.overwrite and prepared.output.exists():
            finished_statistics(prepared)
    except ValueError as error:
        raise RuntimeError(f"{error} (it was put there meanwhile)") from None


def quantize(prepared: Prepared) -> dict[str, Any]:
    """Calibrate, quantize, check and write the checkpoint; returns what fluxq_plan.json holds.

    The result's `check.passed` is False where the closing check found NaN or missed a gate; the checkpoint is
    written all the same and its card says so.
    """
    if prepared.finished is not None:
        if prepared.ranks.leads:
            clear_leftovers(prepared)
        return prepared.finished
    ranks = prepared.ranks
    with memory.within(prepared.max_memory, prepared.device), work_of(prepared) as work:
        finished = _written_meanwhile(prepared) if ranks.leads else None
        return ranks.agree(finished) or ranks.agree(_quantize(prepared, work))


def _written_meanwhile(prepared: Prepared) -> dict[str, Any] | None:
    """Return the record of what another run wrote since this one was prepared; None if there is nothing.

    Raises RuntimeError, which costs no block, where something else stands there.
    """
    try:
        return finished_checkpoint(prepared)
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def _quantize(prepared: Prepared, work: Path) -> dict[str, Any] | None:
    """The record of what the first process wrote; None in those that helped it."""
    options, ranks = prepared.options, prepared.ranks
    started = time.perf_counter()
    if ranks.leads:
        require_space(prepared, work)
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
            reference = generate(pipe, prepared.check_items, prepared.check_call, description="16-bit pipeline")
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
    with atomic_folder(prepared.output, work, overwrite=options.overwrite) as part:
        outcomes, hashes = [Outcome.read(files) for _, files, _ in done], dict[Path, str]()
        written = [_write(part, prepared, *one, outcome, hashes) for one, outcome in zip(done, outcomes, strict=True)]
        read = {plan.component: outcome.fingerprints for plan, outcome in zip(prepared.plans, outcomes, strict=True)}
        prepared = replace(prepared, identity=with_digests(prepared, read))
        _copy_rest(part, prepared, hashes)
        write_digests(part)
        record = _record(prepared, statistics, trajectory, written)
        record["files"] = hash_files(part, hashes)
        if reference is not None:
            record["check"] = _check(part, prepared, reference)
        record["seconds"] = round(time.perf_counter() - started, 1)
        write_json(part / PLAN_FILE, record)
        write_text(part / "README.md", card.model_card(record))
    return record


def _copy_rest(part: Path, prepared: Prepared, hashes: dict[Path, str]) -> None:
    """Copy what is not quantized; RuntimeError if it is not what this was prepared with, and what the record names.

    hashes: takes those of the files.
    """
    quantized = [plan.component for plan in prepared.plans]
    checkpoint.copy_rest(part, prepared.folder, quantized)
    copied = checkpoint.digest_rest(ModelFolder(prepared.output.name, part), quantized, hashes)
    meant = prepared.identity["copied"]
    if differing := sorted(name for name in meant.keys() | copied if meant.get(name) != copied.get(name)):
        raise RuntimeError(
            f"{prepared.folder.path}: {', '.join(differing)} changed since this run began, and the checkpoint would be "
            "recorded with what was there before. Put that back, or start again when nothing writes there any more"
        )


def warm_up(output: str, device: str, tokens: Sequence[int], prefer: str, dtype: str) -> list[dict[str, Any]]:
    """Compile what the checkpoint `output` launches on a GPU; a row of runtime/warmup.py for each launch."""
    where = torch.device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            f"--device {device}: kernels are compiled for the GPU that is there, and torch finds no such CUDA or ROCm "
            "device; run this on the machine that will serve"
        )
    from fluxq.kernels.chips import chip_of
    from fluxq.runtime.warmup import kinds_of, warm_up

    kinds = dict.fromkeys(kind for model in quantized_models(output) for kind in kinds_of(model))
    return [asdict(row) for row in warm_up(kinds, tokens, where, chip_of(where), prefer, getattr(torch, dtype))]


def quantized_models(output: str) -> list[torch.nn.Module]:
    """The quantized components of a checkpoint folder, on the meta device."""
    folder = resolve_model(output, local_files_only=True, one_model=True)
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


def _sampling(prepared: Prepared, pipe: Any, components: Iterable[str]) -> Sampling:
    steps = steps_to_see(prepared.calibration.steps, number_of_steps(pipe, prepared.call))
    return Sampling(prepared.call, steps, {name: prepared.digest(name) for name in components})


def _calibrate(prepared: Prepared, pipe: Any, work: Path) -> Statistics:
    try:
        return capture_statistics(
            pipe,
            {
                component: {group: members[0].name for group, members in plan.statistics_groups().items()}
                for component, plan in prepared.calibrated.items()
            },
            prepared.calibration_items,
            _sampling(prepared, pipe, prepared.calibrated),
            folder=work / _SHARES,
            ranks=prepared.ranks,
        )
    except ValueError:
        for component in prepared.calibrated:
            require_finite_weights(prepared.weights(component))  # the cause, where there is one
        raise


def _fittings(prepared: Prepared, pipe: Any, statistics: Statistics | None) -> dict[str, Fitting]:
    """Component -> the calls that its blocks are fitted to, kept on disk until the checkpoint stands."""
    folder, plans = work_folder(prepared), prepared.fitted
    items = prepared.calibration_items
    held = -(-len(items) // _HELD_OUT) if len(items) > 1 else 0
    blocks = {name: plan.blocks for name, plan in plans.items()}
    try:
        calls = capture_calls(
            pipe,
            blocks,
            items[: len(items) - held],
            items[len(items) - held :],
            _sampling(prepared, pipe, plans),
            folder=folder / "calls",
            most=MOST_CALLS,
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


def _level_weights(
    prepared: Prepared, pipe: Any, items: Sequence[Item], calls: dict[str, Calls], file: Path
) -> dict[int, float]:
    """Denoising step -> what an error at it does to the final latents; measured once and kept."""
    ranks = prepared.ranks
    kept = ranks.agree(_kept_levels(file) if ranks.leads else None)
    if kept is None:
        steps = sorted({call.step for found in calls.values() for call in found.calls})
        weights = noise_level_weights(pipe, list(calls), items, prepared.call, steps, ranks)
        if ranks.leads:
            write_json(file, {str(step): weight for step, weight in weights.items()})
        return weights
    return {int(step): weight for step, weight in kept.items()}


def _kept_levels(file: Path) -> dict[str, float] | None:
    """Those that an interrupted run measured; None where there are none, or they were damaged."""
    try:
        weights = read_json(file) if file.is_file() else None
    except ValueError as error:
        logger.warning("%s: measured again", error)
        return None
    if weights is None or all(
        re.fullmatch("[0-9]{1,8}", key) and type(each) is float and each >= 0 for key, each in weights.items()
    ):
        return weights
    logger.warning("%s: not the weight of each step; measured again", file)
    return None


def _kept_statistics(work: Path) -> Statistics | None:
    """Those that an interrupted run gathered; None where there are none, or they were damaged."""
    try:
        return Statistics.load(work / _STATISTICS) if (work / _STATISTICS).is_file() else None
    except ValueError as error:
        logger.warning("%s: gathered again", error)
        return None


def _quantize_component(
    prepared: Prepared, plan: Plan, statistics: Statistics | None, fitting: Fitting | None, work: Path
) -> tuple[Plan, list[Path], float]:
    """(its plan, files of its finished blocks, seconds that this run took)."""
    started = time.perf_counter()
    own = statistics.of_component(plan.component) if statistics else None
    dtype = getattr(torch, prepared.options.dtype)
    source = prepared.weights(plan.component)
    prepared.require_unchanged(plan.component)  # from here on each read compares with these files
    files = quantize_component(plan, source, own, dtype, work / plan.component, fitting, ranks=prepared.ranks)
    return plan, files, time.perf_counter() - started


def _write(
    part: Path,
    prepared: Prepared,
    plan: Plan,
    files: Sequence[Path],
    seconds: float,
    outcome: Outcome,
    hashes: dict[Path, str],
) -> dict[str, Any]:
    """Make a component of its finished blocks; returns what is recorded of it. hashes: takes those of its files."""
    started = time.perf_counter()
    plan = outcome.applied_to(plan)
    size = checkpoint.write_component(
        part / plan.component, prepared.folder, plan, files, prepared.options.max_shard_bytes, hashes.__setitem__
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


def _source(prepared: Prepared) -> str | None:
    """MODEL such that it means the same from any folder; None of a pipeline in memory."""
    if prepared.options.in_memory:
        return None
    model = prepared.options.model or prepared.recipe.model or DEFAULT_MODEL
    return str(prepared.folder.path.resolve()) if Path(model).expanduser().is_dir() and model != "tiny" else model


def _check(part: Path, prepared: Prepared, reference: Generated) -> dict[str, Any]:
    """A few paired images or videos against the 16-bit pipeline's, and the recipe's gates."""
    options = prepared.options
    with about_to_keep():
        folder = ModelFolder(prepared.output.name, part)
    pipe = prepared.bound.load(folder, {}) if prepared.bound else load_pipeline(folder, options.dtype, prepared.device)
    if prepared.recipe.steps and any(plan.steps for plan in prepared.plans):
        KeptSteps(pipe, prepared.recipe.steps, prepared.weights, {})
    images = generate(pipe, prepared.check_items, prepared.check_call, description="Quantized pipeline")
    psnr_db, latent_sqnr_db = fidelity.fidelity(reference, images)
    finite = bool(reference.finite.all()) and bool(images.finite.all())
    measured = {
        "psnr": paired_interval(psnr_db).mean,
        "latent_sqnr": paired_interval(latent_sqnr_db).mean,
    }
    flat = fidelity.flat_images(reference, images)
    gates, for_eval = split_gates(prepared.recipe.gates, measured)
    missed = [gate for gate in gates if not gate_holds(gate, measured)]
    return {
        "images": len(reference.items),
        "frames": reference.frames,
        "seeds": [seed for _, seed in reference.items],
        "steps": number_of_steps(pipe, prepared.call),
        "finite": finite,
        "flat": flat,
        "psnr_db": [_rounded(value) for value in psnr_db],
        "mean_psnr_db": _rounded(measured["psnr"]),
        "mean_latent_sqnr_db": _rounded(measured["latent_sqnr"]),
        "gates": gates,
        "gates_for_eval": for_eval,
        "missed": missed,
        "passed": finite and not flat and not missed,
    }


def _rounded(value: float | None) -> float | None:
    """For JSON, which has no infinity: None stands for identical images too."""
    return None if value is None or value in (float("inf"), float("-inf")) or value != value else round(value, 3)
