"""One function per command that judges a finished checkpoint: eval, bench, debug, report.

Their results are kept beside the checkpoint in OUT/eval, one JSON file per command; the report is drawn from all files
there that were measured on these weights.
"""

from __future__ import annotations

import inspect
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from fluxq import tiny
from fluxq.base import FLUXQ_VERSION, devices
from fluxq.base.console import first_line, logger
from fluxq.base.devices import free_bytes, utc_now, versions
from fluxq.base.files import clear_parts, read_json, sha256_file, sha256_json, write_json, write_text
from fluxq.base.model import ModelFolder, require_safe, resolve_model
from fluxq.base.output import (
    PASSPORT_FILE,
    Output,
    job_digest,
    require_lockable,
    require_own,
    seal,
    sole_writer,
    takes_files,
    writing,
)
from fluxq.calibrate.capture import frames_argument, frames_in, images_per_batch, number_of_steps
from fluxq.calibrate.prompts import DATASETS, PromptSet, load_prompts
from fluxq.eval.debug.debug import Search
from fluxq.eval.debug.debug import debug as find_faults
from fluxq.eval.gate.passport import NAMED
from fluxq.eval.history.results import row_of_bench
from fluxq.eval.history.rows import HISTORY_FILE, HistoryRow, append, current_commit, read_history, require_history
from fluxq.eval.images.executor import WORK_FILE, ImageFolder, Work, ensure_images, one_thread, open_engine
from fluxq.eval.images.protocols import PROTOCOLS, items_of
from fluxq.eval.images.sides import (
    BACKENDS,
    NATIVE,
    Side,
    component_digests,
    digest_of,
    floor_attention,
    pipeline_digests,
    side_stamps,
    variants,
)
from fluxq.eval.metrics.drift import drift, follow
from fluxq.eval.metrics.evaluate import (
    DRIFT_IMAGES,
    DRIFT_VIDEOS,
    FLOOR_IMAGES,
    VELOCITY_ERROR,
    Candidate,
    measure_floor,
    measure_runs,
)
from fluxq.eval.metrics.metrics import metric_rows, missing
from fluxq.eval.metrics.networks import Networks, find_networks, without_home
from fluxq.eval.metrics.schema import (
    JSON_FILE,
    SCHEMA_VERSION,
    STEPS,
    CheckpointSize,
    Debug,
    Item,
    Protocol,
    Report,
    Speed,
    Timed,
    read_report,
)
from fluxq.eval.report import card
from fluxq.eval.speed.served import served
from fluxq.eval.speed.speed import LENGTH, Setting, Timing, measure_speed
from fluxq.eval.speed.trace import require_trace, write_trace
from fluxq.jobs import forecast, memory, passports
from fluxq.jobs.forecast import Forecast
from fluxq.jobs.listing import lists_of_checkpoint
from fluxq.jobs.requirements import (
    call_of,
    default_frames,
    makes_video,
    outputs_of,
    require_call,
    require_pictures,
    require_prompts_suffice,
    require_steps,
)
from fluxq.jobs.step_caches import (
    arguments_of,
    images_to_measure,
    measured_caches,
    require_caches,
    share_of,
    sides_of_fewer,
)
from fluxq.quantize.exchange.beside import other_small_files
from fluxq.quantize.lora import recorded_loras
from fluxq.quantize.record import Record, bits_of, bits_per_weight, read_record
from fluxq.recipes.formats import Scheme
from fluxq.recipes.recipe import parse_gate
from fluxq.recipes.step_list import nearest_list
from fluxq.runtime.optimize import optimize
from fluxq.runtime.prepare import Prefer, prepare
from fluxq.runtime.step_caches import StepCache

EVAL_FOLDER, SPEED_FILE, DEBUG_FILE = "eval", "speed.json", "debug.json"
IMAGES_FOLDER = "fluxq-images"
_RESULTS_FOLDER = ".eval_results"
_WAIT = 60.0  # seconds for another command that writes to the same checkpoint, mostly for moments
_REPLACED = tuple(f"{EVAL_FOLDER}/{name}" for name in ("report.html", JSON_FILE, "report.md"))
_PUBLISHED_PIXELS = 512
_WITH_FRAMES = 3  # numbers of a size


@dataclass(frozen=True)
class JudgeOptions:
    """Options of eval, bench and debug; None leaves the protocol's, the folder's or the pipeline's own value."""

    model: str | None = None
    revision: str | None = None
    local_files_only: bool = False
    in_memory: bool = False  # the 16-bit pipeline was, and is at `model` for this job alone
    dtype: str = "bfloat16"
    device: str = "auto"
    protocol: str = "smoke"
    prompts: str | None = None
    count: int | None = None
    seeds: int | None = None
    seed: int | None = None
    call: dict[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    metrics: tuple[str, ...] = ()
    weights: str | None = None
    fid_resize: str | None = None
    fid_reference: Path | None = None
    clip: str | None = None
    backends: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    images: Path | None = None
    engine: str = "local"
    workers: int | None = None
    address: str | None = None


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and the 16-bit model that it was made from, read and checked."""

    options: JudgeOptions
    output: Path
    record: Record
    folder: ModelFolder
    reference: Side
    quantized: Side
    prompts: PromptSet
    protocol: Protocol
    items: tuple[tuple[str, int], ...]
    call: dict[str, Any]
    caches: tuple[StepCache, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)  # of the checkpoint's components


def subject_of(output: Path, options: JudgeOptions, *, whole_videos: bool = False) -> Subject:
    """Find both pipelines and the images to compare; ValueError if the checkpoint was made from another model.

    whole_videos: as long as the pipeline makes them, instead of the protocol's length.
    """
    record = read_record(output)
    if ModelFolder(output.name, output).is_one_model:
        raise ValueError(
            f"{output}: one model without its pipeline, which makes no images; `fluxq import` of the same file with "
            "the pipeline as --base makes a whole one"
        )
    require_own(output, (*_REPLACED, PASSPORT_FILE))
    if (output / EVAL_FOLDER).exists() and not (output / EVAL_FOLDER).is_dir():
        raise ValueError(f"{output / EVAL_FOLDER} is a file, where the report's folder would be; move it elsewhere")
    require_lockable(_locked(output))
    device_option, options = options.device, replace(options, device=devices.choose(options.device))
    _require_known("protocol", [options.protocol], PROTOCOLS)
    _require_known("backend", options.backends, BACKENDS)
    source = options.model or record.model.source
    if source is None:
        raise ValueError(
            f"{output}: imported without a base, or made of a pipeline in memory, so its 16-bit model is not known; "
            "give it as --model"
        )
    revision = options.revision or (record.model.revision if source == record.model.source else None)
    folder = resolve_model(source, revision=revision, local_files_only=options.local_files_only)
    if options.images is not None:
        reads = {"the checkpoint": output, "the 16-bit model": folder.path, "--fid-reference": options.fid_reference}
        Output(options.images).require_addable(reads, "--images", pattern=f"*/{WORK_FILE}")
    require_pictures(folder, "`fluxq verify` proves what the checkpoint holds")
    require_steps(folder)
    for gate in options.gates:
        parse_gate(gate)
    if options.metrics:
        _require_known("metric", options.metrics, {**metric_rows(), VELOCITY_ERROR: None})
    quantized = ModelFolder(output.name, output)
    require_safe(quantized)
    weights = memory.weight_bytes(folder, options.dtype)
    device, offload = memory.settle_pipeline(folder, options.device, weights, device_option)
    stored = memory.stored_bytes(quantized)
    offload_quantized = offload and memory.settle_pipeline(quantized, device, stored, device_option)[1]
    options = replace(options, device=device)
    protocol = PROTOCOLS[options.protocol]
    defaults = {**quantized.generation_defaults, **protocol.call(folder)}
    call = call_of(folder, defaults, options.call, None if whole_videos else protocol.frames)
    require_call(quantized, call, options.call)
    require_prompts_suffice(folder, call)
    caches = require_caches(options.cache, folder, call)
    prompts = load_prompts(options.prompts or protocol.source(folder), folder, shuffle=protocol.shuffle)
    usual = (makes_video(folder) and protocol.videos) or protocol.count
    count, seeds = options.count or usual, options.seeds or protocol.seeds
    for name in quantized.components:
        for what in other_small_files(quantized, folder, name):
            raise ValueError(f"{folder.name}: its {name} is not what {output} has: {what}; give --model")
    loras = tuple((str(lora.path), lora.weight, lora.component) for lora in recorded_loras(record.loras))
    stamps = side_stamps(folder.path, [file for file, _, _ in loras]), side_stamps(output.resolve())
    hashed = component_digests(folder)  # reads all weights: after all cheaper checks
    for component, digest in record.model.digests.items():
        if hashed.get(component) != digest:
            raise ValueError(f"{folder.name}: its {component} is not what {output} was made from; give --model")
    digest, (quantized_digest, digests) = digest_of(folder, hashed), pipeline_digests(quantized)
    reference_digest = sha256_json([digest, [lora.model_dump() for lora in record.loras]]) if loras else digest
    return Subject(
        options=options,
        output=output,
        record=record,
        folder=folder,
        reference=Side(
            "16-bit",
            str(folder.path.resolve()),
            reference_digest,
            options.dtype,
            loras,
            offload=offload,
            stamps=stamps[0],
        ),
        quantized=Side(
            output.resolve().name,
            str(output.resolve()),
            quantized_digest,
            options.dtype,
            source=str(folder.path.resolve()),
            offload=offload_quantized,
            stamps=stamps[1],
        ),
        prompts=prompts,
        protocol=Protocol(
            name=options.protocol,
            prompts=prompts.source,
            prompts_digest=prompts.digest,
            count=count,
            seeds=seeds,
            dataset=next((row.repo for name, row in DATASETS.items() if prompts.source in (name, row.file)), None),
        ),
        items=tuple(items_of(prompts.prompts, count, seeds, options.seed or 0)),
        call=call,
        caches=caches,
        digests=digests,
    )


def _require_known(what: str, names: Sequence[str], table: Mapping[str, Any]) -> None:
    for name in names:
        if name not in table:
            raise ValueError(f"{what} {name!r} is unknown; known: {', '.join(table)}")


def evaluate(subject: Subject, on_start: Callable[[Forecast], None] = lambda _: None) -> Report | None:
    """Make every side's images, measure them and write OUT/eval/report.*; None in processes that only helped.

    on_start: called with a forecast once the whole request is known to be possible.

    Raises ValueError, before that, for a metric, backend or gate that cannot be had.
    """
    from fluxq.eval.report.report import compare_runs

    options, started = subject.options, time.perf_counter()
    networks = _networks(subject)
    keys = _metric_keys(subject, networks)
    # native first, which passports need: of sides that make the same images the first one stays
    backends = sorted(options.backends or _backends(subject.record), key=lambda name: name != NATIVE)
    batch = options.batch_size or images_per_batch(subject.call)
    floor_side = replace(subject.reference, name="16-bit again", attention=floor_attention(options.device))
    is_video = makes_video(subject.folder)  # two of which may be more than the device has room for
    floor_batch = max(1, batch // 2) if batch > 1 or is_video else 2
    root = options.images or subject.output.resolve().parent / IMAGES_FOLDER
    total = number_of_steps(subject.folder.pipeline_class, subject.call)

    def made(side: Side, items: Sequence[tuple[str, int]] = subject.items, size: int = batch) -> ImageFolder | None:
        work = Work(side, tuple(items), arguments_of(side, subject.call), size, root, options.device)
        return ensure_images(work, engine)

    with open_engine(options.engine, workers=options.workers, address=options.address) as engine:
        on_start(_forecast(subject, _runs(subject, backends, FLOOR_IMAGES)))
        prompt = subject.items[0][0]
        caches = measured_caches(
            subject.caches, subject.folder, subject.reference, subject.call, prompt, options.device, root, engine
        )
        sides = variants(subject.quantized, backends, caches)
        reference, again = made(subject.reference), made(floor_side, subject.items[:FLOOR_IMAGES], floor_batch)
        sets = [made(side) for side in sides]
        fewer = sides_of_fewer(sides, sets, total, engine) if caches else {}
        sides += dict.fromkeys(fewer.values())
        sets += [made(side) for side in sides[len(sets) :]]
        named = passports.of_evaluation(subject, batch, floor_batch) if NATIVE in backends else ()
        repeated = [made(*each) for each in named]
    available = [images for images in sets if images is not None]
    if reference is None or again is None or len(available) < len(sets):
        return None  # the process that leads the others has all of them
    sets = available
    same = _same_images(sides, sets)
    shown = {side: images for side, images in zip(sides, sets, strict=True) if side.name not in same}
    generated = time.perf_counter()
    with one_thread(torch.device(options.device).type):  # as the images were made: equal bits from every engine
        floor = measure_floor(reference.head(FLOOR_IMAGES), again, keys, networks)
        runs = measure_runs(
            _candidates(subject, list(shown), floor_side, batch, floor_batch),
            reference,
            list(shown.values()),
            keys=keys,
            networks=networks,
            floor=floor,
        )
    runs = tuple(
        run.model_copy(
            update={
                "computed": share_of(side, images, total),
                "fewer": same.get(fewer[side.name].name, fewer[side.name].name) if side.name in fewer else None,
            }
        )
        for run, (side, images) in zip(runs, shown.items(), strict=True)
    )
    noun = "image" if reference.frames is None else "video"
    report = Report(
        created=utc_now(),
        model=subject.folder.name,
        license=card.license_text(subject.folder.license) or "not stated",
        call=subject.call,
        reference={
            "16-bit weights (SHA-256)": subject.reference.digest,
            "dtype": subject.reference.dtype,
            "pipeline call (SHA-256)": sha256_json(subject.call),
            f"{noun}s in a batch": str(batch),
            "prompts and seeds (SHA-256)": sha256_json(reference.items),
            f"16-bit {noun}s (SHA-256)": reference.digest,
        },
        noise_floor=(
            f"two runs of the 16-bit model on the same {len(again.items)} prompts and noise, one with "
            f"{floor_batch} {noun}{'s' * (floor_batch > 1)} in a batch and attention computed by {floor_side.attention}"
        ),
        protocol=subject.protocol,
        items=tuple(Item(prompt=prompt, seed=seed) for prompt, seed in subject.items),
        runs=runs,
        comparisons=compare_runs(runs, subject.items),
        warnings=(
            *_warnings(subject, reference),
            *(f"{one} makes the same {noun}s as {other} and is left out" for one, other in same.items()),
        ),
        provenance={"16-bit model": _source(subject)},
        versions=versions("torchmetrics", "open_clip_torch", "scipy", "fluxq"),
        command=_command(subject),
        time={
            "engine": options.engine,
            "devices": sorted({each.device for each in (reference, *sets)}),
            "generating_seconds": round(generated - started, 1),
            "measuring_seconds": round(time.perf_counter() - generated, 1),
        },
    )
    with _sole_writer(subject):
        report = _with_records(report, subject)
        _write(subject.output, report)
        if named:
            passports.write_from_evaluation(subject, named, repeated, report)
    return report


def _runs(subject: Subject, backends: Sequence[str], again: int) -> dict[str, Any]:
    """Return what the forecast of an evaluation counts; fewer steps as all of them, for nobody knows how many yet."""
    runs: dict[str, Any] = {"16 bit": (subject.items, 1.0), "again": (subject.items[:again], 1.0)}
    if count := images_to_measure(subject.caches):
        runs["measured for caches"] = (subject.items[:1], count)
    sides = variants(subject.quantized, backends, subject.caches)
    runs |= {side.name: (subject.items, forecast.QUANTIZED) for side in sides}
    if NATIVE in backends:
        runs["passport"] = (subject.items[:NAMED], forecast.QUANTIZED)
    if subject.caches:
        runs["fewer steps"] = (subject.items, forecast.QUANTIZED * len(backends) * len(subject.caches))
    return runs


def _forecast(subject: Subject, runs: Mapping[str, Any], device: str | None = None, sides: int = 1) -> Forecast:
    return forecast.of_images(
        subject.folder, subject.call, device or subject.options.device, subject.options.dtype, runs, sides
    )


def bench(
    subject: Subject,
    *,
    optimized: bool = False,
    prefer: Prefer = "speed",
    history: Path | None = None,
    trace: Path | None = None,
    on_start: Callable[[Forecast], None] = lambda _: None,
    **how: Any,
) -> Speed:
    """Time both sides in turn, write OUT/eval/speed.json and draw the report again where there is one.

    optimized: time also the blocks that `fluxq.optimize` fuses.
    prefer: as `fluxq.prepare` takes it.
    history: folder of a history, to which a row is added. trace: file for a trace of one call of the quantized side.
    on_start: called with a forecast.
    how: fields of `Timing`.
    """
    require_own(subject.output, [f"{EVAL_FOLDER}/{SPEED_FILE}"])
    device, timing = subject.options.device, Timing(**how)
    _require_bench(subject, timing, history, trace)
    started = time.perf_counter()
    if not makes_video(subject.folder) and any(len(size) == _WITH_FRAMES for size in timing.sizes):
        raise ValueError(f"{subject.folder.name} makes images, which have no frames: write --size as HEIGHTxWIDTH")
    plain = [subject.reference, *_in_fp32(subject)]
    as_served = [_as_served(subject.quantized, is_optimized, prefer) for is_optimized in (False, True)[: 1 + optimized]]
    prompts = [prompt for prompt, _ in subject.items]
    on_start(_forecast_of_bench(subject, len(plain), len(as_served), timing))
    if (subject.output / EVAL_FOLDER / SPEED_FILE).exists():
        logger.warning("figures of an earlier bench are replaced: only sides timed in turn are compared")
    speed = measure_speed([*plain, *as_served], prompts, subject.call, timing, device=device, references=len(plain))
    layout = {"quantized layers": f"laid out for {device} by fluxq.prepare, prefer={prefer!r}"}
    offloaded = [side.name for side in (subject.reference, subject.quantized) if side.offload]
    if offloaded:
        layout["offload"] = f"parts of {' and '.join(offloaded)} take turns on the GPU"
    speed = speed.model_copy(update={"conditions": {**speed.conditions, **layout, **_listed(subject)}})
    with _sole_writer(subject, SPEED_FILE):
        _keep(subject, SPEED_FILE, speed)
    if history is not None:
        _add_to_history(history, subject, speed, time.perf_counter() - started, prefer)
    if trace is not None:
        _trace(trace, subject, as_served[0], timing)
    return speed


def _require_bench(subject: Subject, timing: Timing, history: Path | None, trace: Path | None) -> None:
    """Raise ValueError for lengths that the pipeline does not take, and places that cannot be written."""
    pipeline = subject.folder.pipeline_class or object
    if timing.lengths and LENGTH not in inspect.signature(pipeline.__call__).parameters:
        raise ValueError(f"--length: a {pipeline.__name__} takes no {LENGTH}; leave it out")
    reads = {"the checkpoint": subject.output, "the 16-bit model": subject.folder.path}
    if history is not None:
        require_history(history, reads)
    if trace is not None:
        require_trace(trace)
        if not trace.exists():
            Output(trace, True).require(reads, overwrite=False)


def _add_to_history(folder: Path, subject: Subject, speed: Speed, seconds: float, prefer: Prefer) -> None:
    row = row_of_bench(
        speed,
        current_commit(),
        created=utc_now(),
        name=_named(subject),
        digests={"checkpoint": subject.quantized.digest, "16 bit": subject.reference.digest},
        call={**subject.call, "dtype": subject.options.dtype, "prefer": prefer},
        versions=versions("fluxq"),
        seconds=round(seconds, 2),
    )
    append(folder, row)


def _trace(target: Path, subject: Subject, side: TimedSide, timing: Timing) -> None:
    """Write the trace of one call of the quantized side, of the first size, length and batch."""
    pipe = side.open(subject.options.device)
    batch = timing.batches[0]
    sized = Setting(batch, *timing.sizes[0]).arguments(pipe) if timing.sizes else {}
    sized |= {LENGTH: timing.lengths[0]} if timing.lengths else {}
    prompts = [prompt for prompt, _ in subject.items]
    write_trace(pipe, items_of(prompts, batch), {**subject.call, **sized}, target)


def _forecast_of_bench(subject: Subject, plain: int, quantized: int, timing: Timing) -> Forecast:
    """Return the forecast of every setting together; images of the first size stand for all."""
    count = (1 + timing.warmup + timing.rounds) * len(timing.modes)
    count *= max(1, len(timing.sizes)) * max(1, len(timing.lengths))
    names = ("height", "width", frames_argument(subject.folder.pipeline_class or object) or "num_frames")
    call = {**subject.call, **dict(zip(names, (timing.sizes or [()])[0], strict=False))}
    items = [item for size in timing.batches for item in (subject.items * size)[:size]]
    runs = {"16 bit": (items, count * plain), "quantized": (items, count * quantized * forecast.QUANTIZED)}
    return _forecast(replace(subject, call=call), runs, sides=plain + quantized)


@dataclass(frozen=True)
class TimedSide:
    """A side as `measure_speed` opens it. open: function of the device; folder: whose classes are imported first."""

    name: str
    open: Callable[[str], Any]
    dtype: str = ""
    folder: str = ""


def _in_fp32(subject: Subject) -> list[TimedSide]:
    """Return the 16-bit side once more in fp32, which a CPU may compute faster; elsewhere none."""
    side = replace(subject.reference, name="fp32", dtype="float32")

    def load(device: str) -> Any:
        """Load the side; MemoryError where its weights exceed free memory: the system might end the whole process."""
        needed, free = memory.weight_bytes(subject.folder, side.dtype), free_bytes(torch.device(device))
        if free is not None and needed > free:
            raise MemoryError(f"its weights take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        return side.open(device)

    is_16_bit = getattr(torch, subject.reference.dtype).itemsize == 2
    is_on_cpu = torch.device(subject.options.device).type == "cpu"
    return [TimedSide(side.name, load, side.dtype)] if is_16_bit and is_on_cpu else []


def _as_served(side: Side, is_optimized: bool, prefer: Prefer) -> TimedSide:
    """Return a quantized side as one would serve it."""

    def load(device: str) -> Any:
        pipe = side.open(skips=False)  # the list comes after graphs (speed.py)
        prepare(pipe, device=device, prefer=prefer)
        pipe = side.placed(pipe, device)
        if is_optimized:
            optimize(pipe, device=device)
        return pipe

    return TimedSide(f"{side.name}, optimized" if is_optimized else side.name, load)


def debug(
    subject: Subject,
    patch: Path | None,
    growth: float,
    budget: int,
    on_start: Callable[[Forecast], None] = lambda _: None,
) -> Debug:
    """Find the layers where the checkpoint loses quality, write OUT/eval/debug.json and draw a report again.

    patch: file for a recipe that keeps the worst layers in more bits; it is not written where no layer is worth them.
    growth: share of bits that the patch may add.
    budget: runs of the prompts that the damages may take.
    """
    options = subject.options
    inputs = [subject.reference.digest, subject.quantized.digest, subject.items, subject.call]
    job = job_digest([FLUXQ_VERSION, [*inputs, options.dtype, options.batch_size], growth, budget])
    if patch is not None:
        _require_new(patch, job)
        require_lockable(patch)
    require_own(subject.output, [f"{EVAL_FOLDER}/{DEBUG_FILE}"])
    device = options.device
    if subject.reference.offload:
        logger.warning("debug holds a whole pipeline where it runs, and %s has no room: the CPU is used", device)
        device = "cpu"
        stored = memory.stored_bytes(ModelFolder(subject.output.name, subject.output))
        both = memory.weight_bytes(subject.folder, options.dtype) + stored
        memory.settle_pipeline(subject.folder, device, both, devices.AUTO)  # may refuse it too
    on_start(
        _forecast(subject, {f"at most {budget} runs": (subject.items, budget * forecast.QUANTIZED)}, device, sides=2)
    )
    diagnosis = find_faults(
        subject.reference,
        subject.quantized,
        subject.items,
        subject.call,
        Search(budget=budget, growth=growth),
        device=device,
        batch_size=options.batch_size,
    )
    with _sole_writer(subject, DEBUG_FILE):
        _keep(subject, DEBUG_FILE, diagnosis)
        if patch is not None and diagnosis.patch is not None:
            with sole_writer(patch, _WAIT):
                _require_new(patch, job)
                clear_parts(patch.parent, patch.name)
                write_text(patch, seal(diagnosis.patch.recipe, ".yaml", job))
    return diagnosis


def _require_new(patch: Path, job: str) -> None:
    """Raise ValueError for a patch that would replace a file, unless the same job wrote it."""
    if patch.suffix != ".yaml" or (os.path.lexists(patch) and not Output(patch, True).holds(job)):
        raise ValueError(f"--patch {patch}: name a new .yaml file")


def report(
    outputs: Sequence[Path], target: Path, *, overwrite: bool = False, on_start: Callable[[], None] = lambda: None
) -> Report:
    """Write one page of several evaluations, each a checkpoint folder or a report.json, with its JSON and Markdown.

    on_start: called when all is checked and writing begins.
    """
    from fluxq.eval.report.report import merge, write_report

    if target.suffix != ".html":
        raise ValueError(f"--output {target}: a report is an .html file, as in report.html")
    reads = {f"the report of {output}": _report_of(output) for output in outputs}
    place = Output(target, True, (".json", ".md"))
    place.require(reads, overwrite=overwrite, exists_ok=True)
    reports = [read_report(_report_of(output)) for output in outputs]
    merged = merge(reports) if len(reports) > 1 else reports[0]
    job = job_digest([FLUXQ_VERSION, [sha256_file(path) for path in reads.values()]])
    place.require_free(overwrite=overwrite, job=job)
    on_start()
    with writing(place, job, overwrite=overwrite) as folder:
        if folder is not None:
            _draw(lambda: write_report(folder / place.place.name, merged, job), reads.values(), "evaluate again")
    return merged


def front(
    files: Sequence[Path], target: Path, *, overwrite: bool = False, on_start: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Write one page of searches, each the JSON that `fluxq auto` wrote, and return what they hold.

    on_start: called when all is checked and writing begins.
    """
    from fluxq.eval.report.front import write_front

    if target.suffix != ".html":
        raise ValueError(f"--output {target}: a report is an .html file, as in report.html")
    place = Output(target, True)
    place.require({f"the search {file}": file for file in files}, overwrite=overwrite, exists_ok=True)
    searches = [read_json(file, longest=1 << 28) for file in files]
    job = job_digest([FLUXQ_VERSION, [sha256_file(file) for file in files]])
    place.require_free(overwrite=overwrite, job=job)
    on_start()
    with writing(place, job, overwrite=overwrite) as folder:
        if folder is not None:
            _draw(lambda: write_front(folder / place.place.name, searches, job), files, "search again")
    return searches


def history(
    folder: Path, target: Path, *, overwrite: bool = False, on_start: Callable[[], None] = lambda: None
) -> tuple[HistoryRow, ...]:
    """Write the page of a history and return its rows.

    on_start: called when all is checked and writing begins.
    """
    from fluxq.eval.report.past import write_past

    if target.suffix != ".html":
        raise ValueError(f"--output {target}: a page is an .html file, as in history.html")
    rows = read_history(folder)
    if not rows:
        raise ValueError(f"{folder}: its history has no runs yet")
    place = Output(target, True)
    place.require({"the history": folder / HISTORY_FILE}, overwrite=overwrite, exists_ok=True)
    job = job_digest([FLUXQ_VERSION, [row.model_dump(mode="json") for row in rows]])
    place.require_free(overwrite=overwrite, job=job)
    on_start()
    with writing(place, job, overwrite=overwrite) as made:
        if made is not None:
            _draw(lambda: write_past(made / place.place.name, rows, job), [folder / HISTORY_FILE], "begin another")
    return rows


def _draw(draw: Callable[[], object], paths: Iterable[Path], cure: str) -> None:
    """Write a page; ValueError naming the files that it was read from for values that no page can be made of."""
    from jinja2 import TemplateError

    try:
        draw()
    except (LookupError, ArithmeticError, TypeError, AttributeError, ValueError, TemplateError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: holds values that no page can be made of ({reason}); {cure}") from error


def _report_of(output: Path) -> Path:
    return output / EVAL_FOLDER / JSON_FILE if output.is_dir() else output


def networks_of(
    folder: ModelFolder | None, weights: str | None, device: str, *, is_video: bool = False, **options: Any
) -> Networks:
    """Find the networks for metrics: the embedded model's own, and those that options name.

    folder: of the model, None for images of an unknown one.
    weights: a folder, or "hub" to fetch what is missing.
    options: as `find_networks` takes them.
    """
    from_hub = weights == "hub"
    if folder is not None and folder.path.resolve() == Path(tiny.path()).resolve():
        images, _captions = tiny.held_out()
        defaults = Networks(
            feature_network=tiny.feature_network(),
            feature_name="fluxq-tiny-features",
            clip=str(tiny.clip_path()),
            reference_images=images,
            reference_name="held-out images",
        )
    else:
        defaults = Networks()
    return find_networks(
        defaults,
        weights=Path(weights) if weights and not from_hub else None,
        device=device,
        download=from_hub,
        is_video=is_video,
        **options,
    )


def _networks(subject: Subject) -> Networks:
    options = subject.options
    return networks_of(
        subject.folder,
        options.weights,
        options.device,
        is_video=makes_video(subject.folder),
        clip=options.clip,
        fid_resize=options.fid_resize or PROTOCOLS[options.protocol].fid_resize,
        fid_reference=options.fid_reference,
    )


def _metric_keys(subject: Subject, networks: Networks) -> list[str]:
    """Return the metrics to take; ValueError if one that an option or a published protocol names cannot be."""
    row, options = PROTOCOLS[subject.options.protocol], subject.options
    table, is_video = metric_rows(), makes_video(subject.folder)
    keys = list(options.metrics or [key for key in row.metrics or table if is_video or not table[key].only_video])
    keys = [key for key in keys if key != VELOCITY_ERROR]  # which is taken of the steps in any case
    gated = [metric for gate in _gates(subject) if (metric := parse_gate(gate).metric) != VELOCITY_ERROR]
    for key in dict.fromkeys([*(keys if options.metrics or row.strict else ()), *gated]):
        why = missing(key, networks, is_video=is_video)
        if why is not None:
            raise ValueError(f"{key} cannot be measured: {why}")
    return list(dict.fromkeys(["psnr", *keys, *gated]))  # PSNR orders pictures and runs


def _gates(subject: Subject) -> tuple[str, ...]:
    """Return the gates of the recipe, the protocol and the command line."""
    options = subject.options
    return tuple(dict.fromkeys([*subject.record.recipe.gates, *PROTOCOLS[options.protocol].gates, *options.gates]))


def _backends(record: Record) -> tuple[str, ...]:
    """Return the backends that differ: the stored arithmetic, and every re-encoding that changes a layer."""
    schemes = {layer.scheme for part in record.components for layer in part.quantized}
    activations = {Scheme.parse(scheme).activations for scheme in schemes}
    formats = {each.name for each in activations if each is not None}
    return tuple(name for name, targets in BACKENDS.items() if not targets or formats - {*targets})


def _same_images(sides: Sequence[Side], sets: Sequence[ImageFolder]) -> dict[str, str]:
    """Return name of a side -> name of the first that makes the same bits, as where 8bit is int8 for every layer."""
    first: dict[tuple[str, ...], str] = {}
    hashes = [tuple(part for row in images.rows for part in (row.image, row.latents)) for images in sets]
    same_as = {side.name: first.setdefault(each, side.name) for side, each in zip(sides, hashes, strict=True)}
    return {name: other for name, other in same_as.items() if name != other}


def _candidates(
    subject: Subject, sides: Sequence[Side], floor_side: Side, batch: int, floor_batch: int
) -> list[Candidate]:
    """Return the sides with facts for the report, opening each once: errors along its steps, and its arithmetic.

    Errors are of the first few prompts, each beside the noise floor.
    """
    items = subject.items[: DRIFT_VIDEOS if makes_video(subject.folder) else DRIFT_IMAGES]
    device = subject.options.device
    followed = follow(subject.reference.open(device), items, subject.call, min(batch, len(items)))
    floor = drift(followed, floor_side.open(device), min(floor_batch, max(1, len(items) // 2)))
    record = subject.record
    provenance = {
        **{f"{part} weights (SHA-256)": digest for part, digest in record.model.digests.items()},
        "checkpoint (SHA-256)": subject.quantized.digest,
        **_origin(record),
    }
    identity = _named(subject), record.recipe.name, record.identity.recipe, _size(record)
    candidates, listed = [], _listed(subject)
    for side in sides:
        pipe = side.open(device)
        is_fewer = side.fewer is not None  # beside the others, at steps of its own
        along = None if is_fewer else drift(followed, pipe, floor=floor)
        gates = () if is_fewer else _gates(subject)
        about = provenance | (listed if side.cache is None else {})
        candidates.append(Candidate(side, *identity, served(pipe, device), gates, about, along))
        del pipe  # there may be room for one at a time
    return candidates


def _listed(subject: Subject) -> dict[str, str]:
    """Return what a report says of the steps that the checkpoint computes; nothing where it computes all."""
    lists = lists_of_checkpoint(ModelFolder(subject.quantized.name, Path(subject.quantized.folder)))
    if not lists:
        return {}
    total = number_of_steps(subject.folder.pipeline_class, subject.call)
    steps = nearest_list(lists, total)
    others = "" if steps.total == total else f"; here of {total}, those of the nearest noise levels"
    return {STEPS: f"{steps}{others}"}


def _size(record: Record) -> CheckpointSize:
    parts = record.components
    return CheckpointSize(
        components=tuple(part.component for part in parts),
        bytes_before=sum(part.bytes_before for part in parts),
        bytes_after=sum(part.bytes_after for part in parts),
        bits_per_weight=bits_per_weight(parts),
        bits_per_quantized_weight=bits_of([layer for part in parts for layer in part.quantized]),
    )


def _origin(record: Record) -> dict[str, str]:
    if record.imported is not None:
        files = [file for part in record.imported for file in part.files.items()]
        return {"imported files (SHA-256)": ", ".join(f"{name} ({digest[:16]})" for name, digest in files)}
    prompts = record.prompts
    unused = "none: layers were fitted to captured calls" if record.trajectory else "none: the recipe needs no data"
    return {
        "recipe (SHA-256)": record.identity.recipe,
        **({"calibration prompts": f"{prompts.source} ({prompts.digest[:16]})"} if prompts else {}),
        "statistics (SHA-256)": record.statistics_digest or unused,
    }


def _warnings(subject: Subject, reference: ImageFolder) -> list[str]:
    protocol, prompts = subject.protocol, subject.prompts
    warnings = PROTOCOLS[protocol.name].departures(
        subject.folder, prompts, protocol.count, protocol.seeds, subject.call
    )
    if prompts.duplicates:
        warnings.append(f"{prompts.duplicates} of the prompts in {prompts.source} occur more than once")
    if (whole := len(prompts.prompts)) < protocol.count:
        start_over = "they start over with other noise, and intervals are over"
        warnings.append(f"{prompts.source} has {whole} of the {protocol.count} prompts: {start_over} {whole}")
    frames, usual_frames = frames_in(subject.call), default_frames(subject.folder)
    if "audio" in outputs_of(subject.folder):
        warnings.append("the sound of the videos is not compared")
    if usual_frames is not None and frames != usual_frames:
        warnings.append(f"videos have {frames} frames, this pipeline's usually {usual_frames}")
    height, width = reference.images[0].shape[-2:]
    if max(height, width) < _PUBLISHED_PIXELS:
        warnings.append(
            f"published models are judged by images of {_PUBLISHED_PIXELS} pixels and more; these have {width} x "
            f"{height}, on which the same error looks smaller: read the verdicts as a check that everything works"
        )
    return warnings


def _source(subject: Subject) -> str:
    """Return the name under which the 16-bit model is found again."""
    if subject.options.in_memory:
        return "a pipeline in memory"
    return without_home(subject.reference.folder if subject.options.model else str(subject.record.model.source))


def _command(subject: Subject) -> str:
    """Return the command that makes this report again, without options that only say where images are made and kept."""
    options, default = subject.options, JudgeOptions()
    words = ["fluxq", "eval", _named(subject)]
    names = ("model", "revision", "protocol", "prompts", "count", "seeds", "seed", "dtype", "device", "batch_size")
    for name in (*names, "weights", "clip", "fid_resize", "fid_reference"):
        value = getattr(options, name)
        if value != getattr(default, name) and not (name == "model" and options.in_memory):
            words += [f"--{name.replace('_', '-')}", without_home(str(value))]
    words += [word for cache in options.cache for word in ("--cache", cache)]
    words += [word for gate in options.gates for word in ("--gate", gate)]
    words += ["--backends", ",".join(options.backends)] if options.backends else []
    words += ["--metrics", ",".join(options.metrics)] if options.metrics else []
    flags = {key: f"--{key.replace('_', '-')}" for key in options.call} | {"num_frames": "--frames"}
    words += [word for key, value in options.call.items() for word in (flags[key], str(value))]
    return shlex.join(words)


def _named(subject: Subject) -> str:
    """Return the checkpoint as a command takes it, an absolute path by its last name."""
    return subject.quantized.name if subject.output.is_absolute() else subject.output.as_posix()


def _locked(output: Path) -> Path:
    """Return the place to lock for a checkpoint: itself, or its eval/ where its parent takes no files."""
    return output if takes_files(output.resolve().parent) else output / EVAL_FOLDER


@contextmanager
def _sole_writer(subject: Subject, *names: str) -> Iterator[None]:
    """Keep other commands from writing to the checkpoint meanwhile, and clear half-written files of killed ones.

    names: files in OUT/eval that are replaced.

    Raises RuntimeError where the checkpoint was replaced since it was read, and ValueError where such a file is no
    longer fluxq's own.
    """
    output = subject.output
    with sole_writer(_locked(output), _WAIT):
        try:
            is_same = read_record(output) == subject.record
        except (ValueError, OSError):
            is_same = False
        if not is_same:
            raise RuntimeError(f"{output} was replaced while it was judged; run the same command again")
        require_own(output, (*_REPLACED, PASSPORT_FILE, *(f"{EVAL_FOLDER}/{name}" for name in names)))
        for folder in (output, output / EVAL_FOLDER, output / _RESULTS_FOLDER):
            clear_parts(folder)
        yield


def _keep(subject: Subject, name: str, value: BaseModel) -> None:
    folder = subject.output / EVAL_FOLDER
    kind = f"fluxq {name.removesuffix('.json')}"
    header = {"kind": kind, "schema_version": SCHEMA_VERSION, "checkpoint": subject.quantized.digest}
    write_json(folder / name, {**header, "found": value.model_dump(mode="json")})
    path = folder / JSON_FILE
    if not path.is_file():
        return
    try:
        before = read_report(path)
    except ValueError as error:  # of another version, say: these results must not be lost for that
        logger.warning("%s; what was found is kept in %s, and that evaluation will show it", error, folder / name)
        return
    _write(subject.output, _with_records(before, subject))


def _with_records(report: Report, subject: Subject) -> Report:
    """Return the report with the results of bench and debug on the same checkpoint.

    A speed belongs to the run with the arithmetic that was timed; without such a run it stands by itself. Results of
    debug are of the weights as they are stored.
    """
    if any(run.provenance.get("checkpoint (SHA-256)") != subject.quantized.digest for run in report.runs):
        return report  # of weights that were in this folder before
    speed: Speed | None = _read_result(subject, SPEED_FILE, Speed, "bench")
    debugged: Debug | None = _read_result(subject, DEBUG_FILE, Debug, "debug")
    digest = speed.served.digest if speed and speed.served else None
    runs = tuple(
        run.model_copy(
            update={
                "speed": speed if run.served and run.served.digest == digest and run.cache is None else None,
                "debug": debugged if run.backend == NATIVE and run.cache is None else None,
            }
        )
        for run in report.runs
    )
    timed = (
        () if speed is None or any(run.speed for run in runs) else (_timed(subject, speed, report.runs[0].checkpoint),)
    )
    return report.model_copy(update={"runs": runs, "timed": timed})


def _timed(subject: Subject, speed: Speed, checkpoint: str) -> Timed:
    """Return a speed whose arithmetic no run of the report has. checkpoint: its name in those runs."""
    name = subject.quantized.name
    arithmetic = speed.served.arithmetic if speed.served else NATIVE
    return Timed(
        name=name if arithmetic == NATIVE else f"{name} as {arithmetic}",
        checkpoint=checkpoint,
        recipe=subject.record.recipe.name,
        size=_size(subject.record),
        speed=speed,
    )


def _read_result(subject: Subject, name: str, kind: type[BaseModel], command: str) -> Any:
    """Read the result of `command` on this checkpoint; None if it did not run since, or in another version of fluxq."""
    path = subject.output / EVAL_FOLDER / name
    try:
        record = read_json(path) if path.is_file() else {}
        if record.get("checkpoint") != subject.quantized.digest:
            return None
        if record.get("schema_version") == SCHEMA_VERSION:
            return kind.model_validate(record.get("found"))
        why = "was written by another version of fluxq"
    except ValueError:  # pydantic's is one
        why = "is damaged"
    logger.warning("%s %s and is left out: run `fluxq %s` again", path, why, command)
    return None


def _write(output: Path, report: Report) -> None:
    """Write the report, and its excerpts for hubs: the model card's table and `.eval_results`."""
    from fluxq.eval.report.report import write_report

    write_report(output / EVAL_FOLDER / "report.html", report)
    readme = output / "README.md"
    if readme.is_file():
        try:
            write_text(readme, card.with_evaluation(readme.read_text(encoding="utf-8"), report))
        except ValueError as error:  # of an older fluxq, or the user's own: users correct it
            why = "is left without the evaluation: its front matter cannot be read"
            logger.warning("%s %s (%s); correct it, and the same command adds it", readme, why, error)
    for name, text in card.eval_results(report).items():
        try:
            require_own(output, [f"{_RESULTS_FOLDER}/{name}"])
        except ValueError as error:  # the other results must not be lost for that
            logger.warning("%s", error)
            continue
        write_text(output / _RESULTS_FOLDER / name, seal(text, ".yaml"))
