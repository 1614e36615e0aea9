"""The passport of a checkpoint: `quantize` and `eval` write it, `verify --passport` makes its images again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from fluxq.base import FLUXQ_VERSION, devices
from fluxq.base.console import logger
from fluxq.base.devices import machine_name, utc_now, versions
from fluxq.base.model import ModelFolder, require_arguments, require_safe
from fluxq.base.output import PASSPORT_FILE
from fluxq.calibrate.capture import images_per_batch
from fluxq.eval.gate.decide import RULES
from fluxq.eval.gate.passport import (
    EXIT_CODES,
    NAMED,
    Nearness,
    Passport,
    changed_parts,
    floor_of,
    named_images,
    nearness,
    read_passport,
    write_passport,
)
from fluxq.eval.images.executor import threads
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.images.sides import NATIVE, Side, floor_attention, pipeline_digests, set_attention
from fluxq.eval.metrics.schema import Estimate, GateOutcome, Report, Strict, number
from fluxq.eval.metrics.statistics import Interval
from fluxq.jobs import memory
from fluxq.jobs.job import Job
from fluxq.jobs.requirements import makes_video, require_call, require_checkpoint, require_steps
from fluxq.quantize.record import Check
from fluxq.recipes.recipe import parse_gate

_UNITS = {"psnr": "dB", "latent_sqnr": "dB"}


class PassportResult(Strict):
    """Result of `fluxq verify --passport`.

    sentence: the same for people. images, same: number made again, and of those whose latents are the same bits.
    sqnr, floor: of each image's latents in dB, to those of the passport, and of its second run; None for the same
    bits. limit: how much farther than the floor the mean may be, in dB. changed: parts of the pipeline.
    made_on, machine: where the passport was made, and where this is. versions: name -> there, here, where they differ.
    """

    verdict: Literal["bit for bit", "within the floor", "not", "cannot tell", "changed"]
    sentence: str
    images: int
    same: int = 0
    sqnr: tuple[float | None, ...] = ()
    floor: tuple[float | None, ...] = ()
    limit: float | None = None
    changed: tuple[str, ...] = ()
    made_on: str
    machine: str
    versions: dict[str, tuple[str, str]] = Field(default_factory=dict)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return 1 if self.verdict == "changed" else EXIT_CODES[self.verdict]


@dataclass(frozen=True)
class Request:
    """A passport to repeat, read and checked."""

    folder: ModelFolder
    passport: Passport
    device: str
    offload: bool


def write_from_check(
    part: Path,
    job: Job,
    pipe: Any,
    made: Generated,
    figures: Mapping[str, Interval],
    check: Check,
    digests: tuple[str, dict[str, str]],
) -> None:
    """Write the passport of a checkpoint that is being made, of the images of its closing check.

    One batch of them is made once more, for the floor. Where latents of either run are not finite, or prompts have
    images of their own, there is nothing to repeat, and no passport.

    part: its folder. made: its images. figures: metric -> paired figure against the 16-bit pipeline.
    digests: of `pipeline_digests`.
    """
    items, call, device = list(made.items), job.check_call, job.run.device
    try:
        images = named_images(items, made.latents)
    except ValueError as error:
        logger.info("no passport: %s", error)
        return
    batch = min(images_per_batch({**call, **images[0].arguments}), len(items))
    again_at, count = floor_batch(job, batch), floor_images(job, batch)
    attention = floor_attention(device) if job.run.limit is None else "native"  # the other one holds all scores at once
    set_attention(pipe, attention)
    again = generate(pipe, items[:count], call, again_at, description="Quantized pipeline again")
    try:
        floor = floor_of(images, named_images(items[:count], again.latents))
    except ValueError as error:  # of the other attention, in fp16 perhaps: the checkpoint is none the worse
        logger.warning("no passport: %s", error)
        return
    checkpoint, of_components = digests
    passport = Passport(
        fluxq=FLUXQ_VERSION,
        created=utc_now(),
        by="quantize",
        checkpoint=checkpoint,
        digests=of_components,
        metrics={name: Estimate.of(interval) for name, interval in figures.items()},
        units={name: _UNITS[name] for name in figures},
        gates=tuple(
            GateOutcome(gate=gate, value=number(figures[parse_gate(gate).metric].mean), passed=gate not in check.missed)
            for gate in check.gates
        ),
        gates_for_eval=tuple(check.gates_for_eval),
        call=dict(call),
        batch_size=batch,
        dtype=_dtype(job.options.dtype),
        device=torch.device(device).type,
        machine=machine_name(device),
        threads=torch.get_num_threads() if torch.device(device).type == "cpu" else None,
        versions=versions("fluxq"),
        shape=tuple(made.latents.shape[1:]),
        images=images,
        floor=floor,
        floor_run={"batch_size": again_at, "attention": attention},
    )
    write_passport(part, passport)


def floor_batch(job: Job, batch: int) -> int:
    """Return the images in a call of the closing check's second run; two where there is room, if it makes one."""
    has_room = job.run.limit is None and not makes_video(job.folder)
    return batch // 2 if batch > 1 else 1 + has_room


def floor_images(job: Job, batch: int) -> int:
    """Return the number of images that the closing check makes again: one call of them."""
    return min(floor_batch(job, batch), len(job.check_items))


Named = tuple[Side, tuple[tuple[str, int], ...], int]  # images to make, and how many in a call


def of_evaluation(subject: Any, batch: int, again_at: int) -> tuple[Named, Named]:
    """Return the images of a passport that an evaluation makes, which it has mostly made already; and a second run.

    subject: of `judge.subject_of`. batch, again_at: images in a call of the evaluation, and of its second 16-bit run.
    """
    items, side = subject.items[:NAMED], subject.quantized
    size = batch if batch <= NAMED or len(subject.items) <= NAMED else NAMED  # as they are cut anyway, if they are
    again = replace(side, name=f"{side.name} again", attention=floor_attention(subject.options.device))
    return (side, items, size), (again, items, again_at)


def write_from_evaluation(subject: Any, named: Sequence[Named], made: Sequence[Any], report: Report) -> None:
    """Write the passport of a checkpoint that was evaluated. named, made: of `of_evaluation`, and their images."""
    ((_, items, batch), (side, _, again_at)), (images_made, again) = named, made
    run = next(run for run in report.runs if run.backend == NATIVE and run.cache is None)
    try:
        images = named_images(items, images_made.latents)
        floor = floor_of(images, named_images(items, again.latents))
    except ValueError as error:
        logger.warning("no passport: %s", error)
        return
    paired = {name: metric for name, metric in run.metrics.items() if metric.value and metric.baseline is None}
    device = torch.device(subject.options.device).type
    passport = Passport(
        fluxq=FLUXQ_VERSION,
        created=report.created,
        by="eval",
        checkpoint=subject.quantized.digest,
        digests=dict(subject.digests),
        metrics={name: metric.value for name, metric in paired.items() if metric.value},
        units={name: metric.unit for name, metric in paired.items()},
        gates=run.gates,
        call=dict(subject.call),
        batch_size=min(batch, len(images)),
        dtype=_dtype(subject.options.dtype),
        device=device,
        machine=devices.cpu_name() if device == "cpu" else images_made.device,
        threads=1 if device == "cpu" else None,
        versions=versions("fluxq"),
        shape=tuple(images_made.latents[0].shape),
        images=images,
        floor=floor,
        floor_run={"batch_size": again_at, "attention": side.attention},
    )
    write_passport(subject.output, passport)


def request_of(output: Path, device_option: str) -> Request:
    """Read a checkpoint's passport and find room for its pipeline.

    Raises ValueError or FileNotFoundError, before anything is computed, for a checkpoint without a passport, for a
    damaged one and for one that asks for what the pipeline cannot do.
    """
    require_checkpoint(output, recorded=True)
    if not (output / PASSPORT_FILE).is_file():
        raise ValueError(
            f"{output}: has no {PASSPORT_FILE}, as of --no-check or an older fluxq; `fluxq eval {output}` writes one"
        )
    passport = read_passport(output / PASSPORT_FILE)
    folder = ModelFolder(output.resolve().name, output.resolve())
    require_safe(folder)
    require_steps(folder)
    require_arguments(output / PASSPORT_FILE, passport.call)
    require_call(folder, passport.call, file=output / PASSPORT_FILE)
    device = devices.choose(device_option)
    device, offload = memory.settle_pipeline(folder, device, memory.stored_bytes(folder), device_option)
    return Request(folder, passport, device, offload)


def repeat(request: Request) -> PassportResult:
    """Make the images of a passport again and say how near they are."""
    started, passport, folder = time.perf_counter(), request.passport, request.folder
    checkpoint, digests = pipeline_digests(folder)
    machine, here = machine_name(request.device), versions("fluxq")
    about: dict[str, Any] = {"images": len(passport.images), "made_on": passport.machine, "machine": machine}
    if changed := changed_parts(passport, checkpoint, digests):
        sentence = f"{', '.join(changed)} changed since the passport was written: `fluxq eval` writes a new one"
        return PassportResult(verdict="changed", sentence=sentence, changed=tuple(changed), **about)
    side = Side(folder.name, str(folder.path), checkpoint, passport.dtype, offload=request.offload)
    items: list[Any] = [image.item for image in passport.images]
    with threads(passport.threads if torch.device(request.device).type == "cpu" else None):
        made = generate(side.open(request.device), items, passport.call, passport.batch_size)
    if not made.finite.all():
        return PassportResult(verdict="not", sentence="an image is not finite here", **about)
    near = nearness(passport, named_images(items, made.latents))
    return PassportResult(
        verdict=near.verdict,
        sentence=sentence_of(passport, near),
        same=near.same,
        sqnr=tuple(map(number, near.sqnr)),
        floor=passport.floor,
        limit=near.finding and near.finding.limit,
        versions={key: (was, here[key]) for key, was in passport.versions.items() if here.get(key, was) != was},
        seconds=round(time.perf_counter() - started, 2),
        **about,
    )


def sentence_of(passport: Passport, near: Nearness) -> str:
    """Return how near the images of a passport are in one sentence."""
    count = len(passport.images)
    if near.finding is None:
        return f"the latents of all {count} images are the same bits"
    rule, finding = RULES["latent_sqnr"], near.finding
    mean, floor = (rule.same - distance for distance in (finding.distance, finding.floor))
    same = f"{near.same} of {count} images are the same bits, " if near.same else ""
    beyond = {"worse": f"at least {finding.low:.2f}", "equivalent": f"at most {finding.high:.2f}"}
    interval = beyond.get(finding.verdict, f"{finding.low:.2f} to {finding.high:.2f}")
    interval = f"each at most {near.farthest:.2f}" if near.is_by_image else interval
    return (
        f"{same}latents are {mean:.1f} dB (SQNR) from the passport's, its own second run was {floor:.1f} dB: "
        f"{interval} dB farther, {finding.limit:.2f} dB are allowed"
    )


def _dtype(name: str) -> Any:
    return name.removeprefix("torch.")
