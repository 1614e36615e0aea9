"""One function per command: joins recipes, calibrate, quantize and eval.

`prepare_*` reads what a user gave and refuses what cannot work, before anything is computed or written; the
function that takes its result does the work. Output folders appear complete or not at all.
"""

from __future__ import annotations

import inspect
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch

import fluxq
from fluxq.base.console import first_line, logger, progress
from fluxq.base.files import atomic_folder, sha256_json, write_json, write_text
from fluxq.base.model import DEFAULT_MODEL, GENERATION_FILE, ModelFolder, check_weights, load_pipeline, resolve_model
from fluxq.base.provenance import versions
from fluxq.calibrate.capture import capture_statistics, number_of_steps
from fluxq.calibrate.prompts import PromptSet, load_prompts
from fluxq.calibrate.statistics import Statistics
from fluxq.eval import card, fidelity
from fluxq.eval.generate import Generated, generate, items_for
from fluxq.quantize import checkpoint
from fluxq.quantize.checkpoint import PLAN_FILE, SourceWeights, list_linears, read_plan_file
from fluxq.quantize.run import quantize_component, require_finite_weights
from fluxq.recipes.families import family_of
from fluxq.recipes.plan import Plan, make_plan
from fluxq.recipes.recipe import Calibration, Recipe, gate_holds, load_recipe

if TYPE_CHECKING:
    from fluxq.eval.evaluate import MetricNetworks
    from fluxq.eval.report import Facts

CHECK_IMAGES = 4
# Calibration and evaluation draw noise from seeds that never meet.
_CALIBRATION_SEEDS = 1 << 20


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
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    statistics: str | None = None
    revision: str | None = None
    local_files_only: bool = False
    overwrite: bool = False
    check: bool = True


@dataclass(frozen=True)
class Prepared:
    """Everything a job needs, read and checked: one plan per component of the recipe."""

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
    finished: dict[str, Any] | None = None

    @property
    def call(self) -> dict[str, Any]:
        """Pipeline arguments: the folder's defaults, overridden by the command line."""
        return {**self.folder.generation_defaults, **self.options.call}


def prepare(options: Options, *, default_output: str = "{model}-{recipe}", writes: bool = True) -> Prepared:
    """Read recipe, model, prompts and statistics; ValueError or FileNotFoundError for what cannot work."""
    recipe_name, recipe = load_recipe(options.recipe, profile=options.profile)
    model = options.model or recipe.model or DEFAULT_MODEL
    folder = resolve_model(model, revision=options.revision, local_files_only=options.local_files_only)
    check_weights(folder)
    _require_device(options.device)
    calibration = recipe.calibration or Calibration()
    if options.seed is not None:
        calibration = calibration.model_copy(update={"seed": options.seed})
    plans = tuple(_plan(folder, name, recipe, options) for name in recipe.components)
    if len(recipe.components) > 1:
        raise ValueError(f"recipe {recipe_name} names {len(recipe.components)} components; this version quantizes one")
    prompts = load_prompts(options.prompts or calibration.prompts, folder)
    statistics = Statistics.load(Path(options.statistics)) if options.statistics else None
    output = Path(options.output or default_output.format(model=Path(folder.name).name, recipe=recipe_name))
    prepared = Prepared(options, folder, recipe_name, recipe, calibration, plans, prompts, statistics, output, {})
    _require_call(folder, prepared.call)
    if statistics is not None:
        if recipe.profile == "rtn":
            raise ValueError("profile rtn takes no data: leave out --statistics, or choose another --profile")
        _require_same_model(statistics, folder, plans)
    if not writes:
        return prepared
    _require_folder(prepared)
    prepared = replace(prepared, identity=_identity(prepared))
    return replace(prepared, finished=_finished(prepared))


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
    pipe = load_pipeline(prepared.folder, prepared.options.dtype, prepared.options.device)
    _calibrate(prepared, pipe).save(prepared.output)
    return prepared.output


def quantize(prepared: Prepared) -> dict[str, Any]:
    """Calibrate, quantize, check and write the checkpoint; returns what fluxq_plan.json holds.

    The result's `check.passed` is False where the closing check found NaN or missed a gate; the checkpoint is
    written all the same and its card says so.
    """
    if prepared.finished is not None:
        return prepared.finished
    options, folder = prepared.options, prepared.folder
    started = time.perf_counter()
    _require_space(prepared)
    reference: Generated | None = None
    statistics = prepared.statistics
    needs_statistics = statistics is None and any(plan.static_groups() for plan in prepared.plans)
    if needs_statistics or options.check:
        pipe = load_pipeline(folder, options.dtype, options.device)
        if needs_statistics:
            statistics = _calibrate(prepared, pipe)
        if options.check:
            reference = generate(pipe, _check_items(prepared), prepared.call, description="16-bit images")
        del pipe
    with atomic_folder(prepared.output, overwrite=options.overwrite) as part:
        written = [_write(part, prepared, plan, statistics) for plan in prepared.plans]
        checkpoint.copy_rest(part, folder, [plan.component for plan in prepared.plans])
        record = _record(prepared, statistics, written)
        if reference is not None:
            record["check"] = _check(part, prepared, reference)
        record["seconds"] = round(time.perf_counter() - started, 1)
        write_json(part / PLAN_FILE, record)
        write_text(part / "README.md", card.model_card(record))
    return record


@dataclass(frozen=True)
class PreparedEvaluation:
    """A checkpoint, the 16-bit model it was made from and the images to make with both."""

    options: Options
    reference: ModelFolder
    quantized: ModelFolder
    record: dict[str, Any]
    items: Sequence[tuple[str, int]]
    call: dict[str, Any]


def prepare_evaluation(output: Path, options: Options, count: int) -> PreparedEvaluation:
    """Find both pipelines; ValueError if the model is not the one that the checkpoint was made from."""
    record = read_plan_file(output)
    if record is None:
        raise ValueError(f"{output}: not a fluxq checkpoint (it has no {PLAN_FILE}); `fluxq quantize` writes one")
    if not {"model", "recipe", "prompts", "components", "identity"} <= record.keys():
        raise ValueError(f"{output / PLAN_FILE}: damaged, it does not say how the checkpoint was made; quantize again")
    reference = resolve_model(
        options.model or record["model"]["source"],
        revision=options.revision or record["model"]["revision"],
        local_files_only=options.local_files_only,
    )
    for component, digest in record["model"]["digests"].items():
        if reference.digest(component) != digest:
            raise ValueError(f"{reference.name}: its {component} is not what {output} was made from; give --model")
    quantized = ModelFolder(output.name, output)
    call = {**quantized.generation_defaults, **options.call}
    prompts = load_prompts(options.prompts or "default", quantized)
    items = items_for(prompts.prompts, count, options.seed or 0)
    return PreparedEvaluation(options, reference, quantized, record, items, call)


def evaluate_checkpoint(prepared: PreparedEvaluation) -> dict[str, Any]:
    """Make the same images with the 16-bit and the quantized pipeline; writes OUT/eval/, returns the report.

    One pipeline is in memory at a time.
    """
    from fluxq.eval.evaluate import measure  # brings torchmetrics and open_clip, which only this command needs
    from fluxq.eval.report import write_report

    def images(folder: ModelFolder, description: str) -> Generated:
        pipe = load_pipeline(folder, prepared.options.dtype, prepared.options.device)
        return generate(pipe, prepared.items, prepared.call, description=description)

    report = measure(
        images(prepared.reference, "16-bit images"),
        images(prepared.quantized, "Quantized images"),
        prepared.call,
        metric_networks=_metric_networks(prepared.reference),
        facts=_facts(prepared.record),
    )
    write_report(prepared.quantized.path / "eval", report)
    return report


def _plan(folder: ModelFolder, component: str, recipe: Recipe, options: Options) -> Plan:
    linears = list_linears(folder, component)
    family = family_of(folder.components[component])
    plan = make_plan(
        family,
        component,
        recipe.components[component],
        linears,
        static_inputs=recipe.profile != "rtn" and (recipe.uses_data or options.statistics is not None),
        include=options.include,
        exclude=options.exclude,
    )
    for note in plan.notes:
        logger.warning(note)
    return plan


def _calibrate(prepared: Prepared, pipe: Any) -> Statistics:
    plan = prepared.plans[0]
    digest = prepared.identity.get("model", {}).get(plan.component) or prepared.folder.digest(plan.component)
    groups = {name: members[0].name for name, members in plan.statistics_groups().items()}
    seed = _CALIBRATION_SEEDS + prepared.calibration.seed
    try:
        return capture_statistics(
            pipe,
            plan.component,
            groups,
            items_for(prepared.prompts.prompts, prepared.calibration.count, seed),
            prepared.call,
            steps=prepared.calibration.steps,
            model_digest=digest,
        )
    except ValueError:
        require_finite_weights(SourceWeights(prepared.folder, plan.component))  # the cause, where there is one
        raise


def _write(part: Path, prepared: Prepared, plan: Plan, statistics: Statistics | None) -> dict[str, Any]:
    source = SourceWeights(prepared.folder, plan.component)
    weight_sqnr: dict[str, float] = {}
    dtype = getattr(torch, prepared.options.dtype)
    tensors = quantize_component(plan, source, statistics, dtype, weight_sqnr)
    shown = progress(tensors, f"Quantizing {plan.component}")
    size = checkpoint.write_component(part / plan.component, prepared.folder, plan, shown)
    return {
        "component": plan.component,
        "family": plan.family,
        "bytes_before": source.nbytes,
        "bytes_after": size,
        "bits_per_weight": round(plan.bits_per_weight, 4),
        "layers": [
            {
                **layer.describe(),
                "bits_per_weight": round(layer.bits_per_weight, 4),
                "weight_sqnr_db": _rounded(weight_sqnr.get(layer.name)),
            }
            for layer in plan.layers
        ],
    }


def _record(prepared: Prepared, statistics: Statistics | None, written: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "fluxq_version": fluxq.__version__,
        "identity": prepared.identity,
        "model": {
            "name": prepared.folder.name,
            "source": _source(prepared),
            "revision": prepared.options.revision,
            "license": prepared.folder.license,
            "digests": prepared.identity["model"],
        },
        "recipe": {"name": prepared.recipe_name, **prepared.recipe.model_dump(mode="json")},
        "prompts": {"source": prepared.prompts.source, "digest": prepared.prompts.digest},
        "trajectory": statistics.trajectory if statistics else None,
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
    pipe = load_pipeline(ModelFolder(prepared.output.name, part), options.dtype, options.device)
    images = generate(pipe, _check_items(prepared), prepared.call, description="Quantized images")
    agreement = fidelity.fidelity(reference, images)
    finite = bool(reference.finite.all()) and bool(images.finite.all())
    measured = {
        "psnr": fidelity.paired_interval(agreement.psnr_db).mean,
        "latent_sqnr": fidelity.paired_interval(agreement.latent_sqnr_db).mean,
    }
    missed = [gate for gate in prepared.recipe.gates if not gate_holds(gate, measured)]
    return {
        "images": len(reference.items),
        "seeds": [seed for _, seed in reference.items],
        "steps": number_of_steps(pipe, prepared.call),
        "finite": finite,
        "psnr_db": [_rounded(value) for value in agreement.psnr_db],
        "mean_psnr_db": _rounded(measured["psnr"]),
        "mean_latent_sqnr_db": _rounded(measured["latent_sqnr"]),
        "gates": prepared.recipe.gates,
        "missed": missed,
        "passed": finite and not missed,
    }


def _check_items(prepared: Prepared) -> Sequence[tuple[str, int]]:
    return items_for(prepared.prompts.prompts, CHECK_IMAGES, prepared.calibration.seed)


def _identity(prepared: Prepared) -> dict[str, Any]:
    """What makes a finished checkpoint the same as the one asked for."""
    options = prepared.options
    return {
        "fluxq": fluxq.__version__,
        "recipe": prepared.recipe.digest,
        "model": {plan.component: prepared.folder.digest(plan.component) for plan in prepared.plans},
        "plans": sha256_json([[[layer.name, str(layer.scheme)] for layer in plan.layers] for plan in prepared.plans]),
        "prompts": prepared.prompts.digest,
        "calibration": prepared.calibration.model_dump(mode="json"),
        "statistics": prepared.statistics.content_digest if prepared.statistics else None,
        "call": prepared.call,
        "dtype": options.dtype,
    }


def _finished(prepared: Prepared) -> dict[str, Any] | None:
    """The record of a finished checkpoint at the output that is just what was asked for."""
    output = prepared.output
    if prepared.options.overwrite or not output.exists():
        return None
    if not any(output.iterdir()):
        return None
    record = read_plan_file(output)
    if record is None:
        raise ValueError(f"output folder {output} is not empty; give another --output, or --overwrite to replace it")
    differing = sorted(key for key, value in prepared.identity.items() if record.get("identity", {}).get(key) != value)
    if differing:
        raise ValueError(
            f"output folder {output} holds a checkpoint with another {', '.join(differing)}; "
            "give another --output, or --overwrite to replace it"
        )
    if prepared.options.check and record["check"] is None:
        raise ValueError(f"{output} was made with --no-check; pass it again to accept that, or --overwrite to check")
    return record


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


def _require_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {device!r} cannot be used: {first_line(error)}; give --device cpu, or cuda with a GPU"
        ) from None


def _require_call(folder: ModelFolder, call: dict[str, Any]) -> None:
    """Refuse generation defaults that the pipeline does not take, before it is loaded."""
    pipeline = getattr(diffusers, folder.index["_class_name"], None)
    if pipeline is None:
        name = folder.index["_class_name"]
        raise ValueError(f"{folder.path}: a {name}, which this diffusers ({diffusers.__version__}) does not have")
    unknown = sorted(call.keys() - inspect.signature(pipeline.__call__).parameters.keys())
    if unknown:
        raise ValueError(
            f"{folder.path / GENERATION_FILE}: {pipeline.__name__} takes no {', '.join(unknown)}; remove it"
        )


def _require_same_model(statistics: Statistics, folder: ModelFolder, plans: Sequence[Plan]) -> None:
    digest = folder.digest(plans[0].component)
    if statistics.trajectory.get("model") != digest:
        raise ValueError("the statistics were gathered on another model; run `fluxq calibrate` on this one")


def _require_space(prepared: Prepared) -> None:
    """Refuse before the start what would run out of disk: the source's size is an upper bound."""
    parent = _existing_parent(prepared.output)
    parts = [prepared.folder.path / component for component in prepared.folder.components]
    needed = sum(path.stat().st_size for part in parts for path in part.rglob("*") if path.is_file())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            f"not enough space in {parent}: the checkpoint may need {needed / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB are free; give another --output"
        )


def _metric_networks(folder: ModelFolder) -> MetricNetworks | None:
    """Feature and CLIP networks for a model; only the embedded one brings its own."""
    from fluxq import tiny
    from fluxq.eval.evaluate import MetricNetworks

    if folder.path.resolve() != Path(tiny.path()).resolve():
        return None
    images, _captions = tiny.held_out()
    return MetricNetworks(tiny.feature_network(), "fluxq-tiny-features", tiny.clip_path(), images)


def _facts(record: dict[str, Any]) -> Facts:
    """What the report says about the checkpoint besides its images."""
    from fluxq.eval.report import Facts

    parts = record["components"]
    done = [layer for part in parts for layer in part["layers"] if layer["scheme"] != "16bit"]
    weights = [layer["shape"][0] * layer["shape"][1] for layer in done]
    bits = sum(layer["bits_per_weight"] * count for layer, count in zip(done, weights, strict=True))
    return Facts(
        model=record["model"]["name"],
        recipe=record["recipe"]["name"],
        bytes_before=sum(part["bytes_before"] for part in parts),
        bytes_after=sum(part["bytes_after"] for part in parts),
        bits_per_weight=bits / sum(weights),
        provenance={
            "licence of the base model": card.license_text(record["model"]["license"]) or "not stated",
            **{f"{part} weights (SHA-256)": digest for part, digest in record["model"]["digests"].items()},
            "recipe (SHA-256)": record["identity"]["recipe"],
            "calibration prompts": f"{record['prompts']['source']} ({record['prompts']['digest'][:16]})",
            "statistics (SHA-256)": record["statistics_digest"] or "none: the recipe needs no data",
        },
    )


def _rounded(value: float | None) -> float | None:
    """For JSON, which has no infinity: None stands for identical images too."""
    return None if value is None or value in (float("inf"), float("-inf")) or value != value else round(value, 3)
