"""`fluxq gate`: two sources of images, their floor, and a verdict after as few images as it takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fluxq.base import FLUXQ_VERSION, devices
from fluxq.base.devices import machine_name, utc_now, versions
from fluxq.base.files import clear_parts, sha256_json, write_text
from fluxq.base.model import ModelFolder, require_safe, resolve_model
from fluxq.base.output import Output, sole_writer
from fluxq.calibrate.capture import images_per_batch
from fluxq.calibrate.prompts import load_prompts
from fluxq.eval.gate.commits import PREFIX, CommitSource, commit_of
from fluxq.eval.gate.decide import RULES, Finding, Rule, judge, looks_of, together
from fluxq.eval.gate.endpoints import NEARER, EndpointSource, endpoint_of
from fluxq.eval.gate.pictures import Pictures, is_picture_folder, read_pictures
from fluxq.eval.gate.result import (
    JUNIT_BEGIN,
    MARKDOWN_BEGIN,
    GateResult,
    MetricResult,
    junit,
    markdown,
    numbers,
    sentences,
    unseen_share,
)
from fluxq.eval.gate.sources import PipelineSource, Source
from fluxq.eval.gate.speed import PAIRS, SLOWER, WARMUP, Call, GateSpeed, judge_speed
from fluxq.eval.history.results import row_of_gate
from fluxq.eval.history.rows import append, commit_at, current_commit, require_history
from fluxq.eval.images.executor import WORK_FILE, one_thread
from fluxq.eval.images.protocols import items_of
from fluxq.eval.images.sides import Side, pipeline_digest, side_stamps
from fluxq.eval.metrics.fidelity import psnr
from fluxq.eval.metrics.metrics import Sample, metric_rows, missing
from fluxq.eval.metrics.networks import Networks
from fluxq.eval.speed.speed import WHOLE, time_pairs
from fluxq.jobs import memory
from fluxq.jobs.judge import TimedSide, networks_of
from fluxq.jobs.requirements import call_of, require_call, require_pictures, require_prompts_suffice, require_steps

IMAGES = 64
LEAST_PROMPTS = 2
_WAIT = 60.0  # seconds for another gate that writes the same file
DEFAULT_METRICS = ("latent_sqnr", "psnr", "lpips")


@dataclass(frozen=True)
class GateOptions:
    """Options of gate; None leaves the default. margins: metric -> distance beyond the floor's that is allowed."""

    a: str
    b: str
    floor: str | None = None
    metrics: tuple[str, ...] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    images: int | None = None
    prompts: str | None = None
    seed: int | None = None
    call: dict[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    weights: str | None = None
    work: Path = Path("fluxq-gate")
    expect_change: bool = False
    setup: str | None = None
    command: str | None = None
    junit: Path | None = None
    markdown: Path | None = None
    speed: bool = False
    slower: float | None = None
    pairs: int | None = None
    history: Path | None = None


@dataclass(frozen=True)
class Gate:
    """A request, read and checked. floor: None where A is taken as the same as itself."""

    options: GateOptions
    a: Source
    b: Source
    floor: Source | None
    items: tuple[tuple[str, int], ...]
    call: Mapping[str, Any]
    rules: Mapping[str, Rule]
    networks: Networks


def gate_of(options: GateOptions) -> Gate:
    """Find both sources, their floor and the images to compare.

    Raises ValueError or FileNotFoundError, before anything is computed, for what cannot be compared.
    """
    _require_outputs(options)
    texts = [options.a, options.b, *([options.floor] if options.floor else [])]
    flags = [f"--{name}" for name in ("setup", "command") if getattr(options, name) is not None]
    if flags and not any(text.startswith(PREFIX) for text in texts):
        raise ValueError(f"{', '.join(flags)}: only commits have it; write A or B as git:REV, or leave it out")
    opener = _Opener(options)
    sources = opener.sources(texts)
    a, b, floor = sources[0], sources[1], sources[2] if options.floor else sources[0].again()
    if floor == a:
        if isinstance(a, Pictures):
            raise ValueError(f"--floor {options.floor}: these are A's own images; give those of a second run")
        floor = a.again()
    if floor is None and not options.margins:
        raise ValueError(
            f"{options.a} is a folder of images, which says nothing of how far its model is from itself: give a second "
            "run of it as --floor, or what is allowed as --margin psnr=3"
        )
    _require_one_machine(a, b, floor)
    _require_used(options, [each for each in (a, b, floor) if each is not None])
    _require_timeable(options, a, b)
    items = _items(options, [each for each in (a, b, floor) if each is not None], opener.first)
    options = replace(options, device=opener.device)
    networks = networks_of(opener.first, options.weights, options.device)
    rules = _rules(options, [a, b, *([floor] if floor else [])], networks)
    for source in (a, b, floor):
        if isinstance(source, EndpointSource) and source != a.again():
            source.require_seeds(*items[0])
    return Gate(options, a, b, floor, items, opener.call or {}, rules, networks)


def run_gate(gate: Gate) -> GateResult:
    """Make images look by look and judge them; write the files that are asked for."""
    started = time.perf_counter()
    last = _last_look(gate)
    speed = _speed(gate) if gate.options.speed else None
    result = _result_of(gate, last, speed, round(time.perf_counter() - started, 2))
    if gate.options.history is not None:
        b = gate.b
        commit = commit_at(b.project, b.commit) if isinstance(b, CommitSource) else current_commit()
        append(gate.options.history, row_of_gate(result, commit))
    _write(gate.options.junit, junit(result))
    _write(gate.options.markdown, markdown(result))
    return result


@dataclass(frozen=True)
class _Look:
    """Findings after as many images. values, floor: metric -> per image; a, b: the images themselves."""

    items: Sequence[tuple[str, int]]
    findings: Mapping[str, Finding]
    values: Mapping[str, tuple[float, ...]]
    floor: Mapping[str, tuple[float, ...]]
    a: Any
    b: Any

    @cached_property
    def identical(self) -> bool:
        """True where images and latents, if both have them, are the same bits."""
        a, b = self.a, self.b
        same = all(torch.equal(x, y) for x, y in zip(a.images, b.images, strict=True))
        if same and a.latents is not None and b.latents is not None:
            return all(torch.equal(x, y) for x, y in zip(a.latents, b.latents, strict=True))
        return same


def _last_look(gate: Gate) -> _Look:
    """Make images look by look until B is worse, or all are there."""
    looks = looks_of(len(gate.items))
    look = _look(gate, looks[0], looks)
    for count in looks[1:]:
        if together(each.verdict for each in look.findings.values()) == "worse":
            break
        look = _look(gate, count, looks)
    if look.identical:
        same = {key: replace(each, verdict="equivalent", more_images=None) for key, each in look.findings.items()}
        return replace(look, findings=same)
    return look


def _look(gate: Gate, count: int, looks: Sequence[int]) -> _Look:
    items = gate.items[:count]
    a, b = gate.a.make(items), gate.b.make(items)
    again = gate.floor.make(items) if gate.floor else None
    if again is not None and count == looks[0]:
        _require_second_run(gate, a, again)
    with one_thread(torch.device(gate.options.device).type):
        values = _values(gate, a, b)
        floor = {} if again is None else _values(gate, a, again)
    prompts = [prompt for prompt, _ in items]
    findings = {
        key: judge(rule, values[key], floor.get(key), prompts, looks, len(gate.rules))
        for key, rule in gate.rules.items()
    }
    return _Look(items, findings, values, floor, a, b)


def _result_of(gate: Gate, last: _Look, speed: GateSpeed | None, seconds: float) -> GateResult:
    table = metric_rows()
    metrics = {
        key: MetricResult.of(table[key].name, table[key].unit, gate.rules[key], finding)
        for key, finding in last.findings.items()
    }
    is_no_op = last.identical and gate.options.expect_change
    judged = [*last.findings.values(), *([speed] if speed else [])]
    return GateResult(
        fluxq=FLUXQ_VERSION,
        created=utc_now(),
        verdict="no-op" if is_no_op else together(each.verdict for each in judged),
        reasons=(*_reasons(metrics, last, is_no_op), *([speed.sentence] if speed else [])),
        a=_named(gate.a),
        b=_named(gate.b),
        floor=None if gate.floor is None else _named(gate.floor),
        identical=last.identical,
        images=len(last.items),
        looks=looks_of(len(gate.items)),
        prompts_digest=sha256_json(gate.items),
        call=dict(gate.call),
        metrics=metrics,
        values=numbers(last.values),
        floor_values=numbers(last.floor),
        machine=gate.b.machine,
        versions=versions("fluxq"),
        seconds=seconds,
        speed=speed,
    )


def _named(source: Source) -> dict[str, Any]:
    return {"name": source.name, **source.describe()}


def _write(path: Path | None, text: str) -> None:
    """Write a file that was asked for, and clear what a killed gate left beside it."""
    if path is not None:
        with sole_writer(path, _WAIT):
            clear_parts(path.parent, path.name)
            write_text(path, text)


def _reasons(metrics: Mapping[str, MetricResult], last: _Look, is_no_op: bool) -> tuple[str, ...]:
    look = len(last.items)
    if is_no_op:
        return (f"all {look} images are the same bits on both sides: what was to change them did nothing",)
    if last.identical:
        return (f"all {look} images are the same bits on both sides",)
    reasons = [sentences(key, metric) for key, metric in metrics.items()]
    reasons += [
        f"{key}: A is bistable, {metric.modes[2]:.0%} of the images of its second run are {metric.modes[1]:.3g} "
        f"{metric.unit} from its own and the others {metric.modes[0]:.3g}: the farther ones are its floor"
        for key, metric in metrics.items()
        if metric.modes
    ]
    for key, metric in metrics.items():
        for prompt, seed in [last.items[index] for index in metric.outliers[:3]]:
            reasons.append(f"{key}: the image of {prompt!r}, seed {seed}, is far beyond all of the floor's: look at it")
    if all(metric.verdict == "equivalent" for metric in metrics.values()):
        reasons.append(f"a fault in fewer than {unseen_share(look):.1%} of images may not be among these {look}")
    return tuple(reasons)


def _require_second_run(gate: Gate, a: Any, again: Any) -> None:
    """Raise ValueError for a floor whose images are no nearer to A's than other images of A are.

    Images of other seeds as the floor would let anything pass.
    """
    others = [*a.images[1:], a.images[0]]
    if any(x.shape != y.shape for other in (again.images, others) for x, y in zip(a.images, other, strict=True)):
        return  # which is said elsewhere
    same, different = (
        fmean(min(RULES["psnr"].same, value) for value in psnr(a.images, other).tolist())
        for other in (again.images, others)
    )
    if same < min(different + NEARER, RULES["psnr"].same):
        raise ValueError(
            f"{gate.floor and gate.floor.name} is no second run of {gate.a.name}: its images are {same:.1f} dB (PSNR) "
            f"from A's, and A's images of other prompts {different:.1f} dB from each other. Is the seed used?"
        )


def _values(gate: Gate, a: Any, b: Any) -> dict[str, tuple[float, ...]]:
    """Return metric -> value per image, NaN for one that is not finite."""
    _require_sizes(gate, a, b)
    if not a.finite.all():
        prompt, seed = a.items[int((~a.finite).nonzero()[0])]
        raise ValueError(f"{gate.a.name}: NaN or infinity for {prompt!r}, seed {seed}: nothing to compare with")
    sample, table = Sample(a, b, gate.networks), metric_rows()
    measured = {key: table[key].measure(sample) for key in gate.rules}
    return {key: each.per_image for key, each in measured.items() if each.per_image is not None}


def _require_sizes(gate: Gate, a: Any, b: Any) -> None:
    for (prompt, seed), x, y in zip(a.items, a.images, b.images, strict=True):
        if x.shape != y.shape:
            sizes = " and ".join(f"{image.shape[-1]} x {image.shape[-2]}" for image in (x, y))
            raise ValueError(f"images of {prompt!r}, seed {seed}, are {sizes} pixels: make both at one size")


def _items(options: GateOptions, sources: Sequence[Source], folder: ModelFolder | None) -> tuple[tuple[str, int], ...]:
    """Return (prompt, seed) of each image: those of image folders where there are any."""
    image_folders = [source for source in sources if source.items is not None]
    if not image_folders:
        prompts = load_prompts(options.prompts or "default", folder or ModelFolder("none", Path()))
        items = tuple(items_of(prompts.prompts, options.images or IMAGES, 1, options.seed or 0))
        _require_prompts(items, options.prompts or "the default prompts")
        return items
    if options.prompts:
        raise ValueError(
            f"--prompts: {image_folders[0].name} is a folder of images, whose own prompts are compared; leave it out"
        )
    first = image_folders[0].items or ()
    for source in image_folders[1:]:
        for one, other in ((image_folders[0], source), (source, image_folders[0])):
            pairs = set(other.items or ())
            if absent := [item for item in one.items or () if item not in pairs]:
                (prompt, seed), count = absent[0], len(absent)
                raise ValueError(
                    f"{other.name} lacks {count} of the {len(one.items or ())} images of {one.name}, the first of them "
                    f"{prompt!r} with seed {seed}: make both from one list"
                )
    _require_one_size([source for source in image_folders if isinstance(source, Pictures)])
    items = first[: options.images or len(first)]
    _require_prompts(items, image_folders[0].name)
    return items


def _require_one_size(sources: Sequence[Pictures]) -> None:
    """Raise ValueError where folders have images of one item in other sizes."""
    expected = sources[0].sizes if len(sources) > 1 else {}  # of which each call opens every image
    for source in sources[1:]:
        for item, size in source.sizes.items():
            if size != expected[item]:
                (prompt, seed), sizes = item, (expected[item], size)
                shown = " and ".join(f"{width} x {height}" for width, height in sizes)
                raise ValueError(f"images of {prompt!r}, seed {seed}, are {shown} pixels: make both at one size")


def _require_used(options: GateOptions, sources: Sequence[Source]) -> None:
    """Raise ValueError for options that say how to make images which are all there."""
    made = [source for source in sources if source.items is None]
    given = {"seed": options.seed} if any(source.items is not None for source in sources) else {}
    given |= {} if made else {"batch_size": options.batch_size, **options.call}
    if unused := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]:
        raise ValueError(f"{', '.join(unused)}: folders of images are compared as they are; leave it out")


def _require_prompts(items: Sequence[tuple[str, int]], name: str) -> None:
    """Raise ValueError for images of one prompt: intervals are over prompts."""
    if len({prompt for prompt, _ in items}) < LEAST_PROMPTS:
        raise ValueError(
            f"{name}: {len(items)} of one prompt, which says nothing about the next; give images of {LEAST_PROMPTS} "
            "prompts or more"
        )


def _rules(options: GateOptions, sources: Sequence[Source], networks: Networks) -> dict[str, Rule]:
    """Return metric -> its rule; ValueError for one that cannot be had here."""
    without = [source.name for source in sources if not source.has_latents]
    reasons = {
        key: f"{without[0]} has images only" if key.startswith("latent_") and without else missing(key, networks)
        for key in dict.fromkeys([*RULES, *options.metrics, *options.margins])
        if key in RULES
    }
    wanted = options.metrics or tuple(key for key in DEFAULT_METRICS if reasons[key] is None)
    for key in dict.fromkeys([*wanted, *options.margins]):
        if key not in RULES:
            raise ValueError(f"metric {key!r} is no distance of two images; known: {', '.join(RULES)}")
        if reasons[key] is not None:
            raise ValueError(f"{key} cannot be measured: {reasons[key]}")
    keys = tuple(dict.fromkeys([*wanted, *options.margins]))
    return {
        key: replace(RULES[key], margin=options.margins[key]) if key in options.margins else RULES[key] for key in keys
    }


def _require_outputs(options: GateOptions) -> None:
    """Raise ValueError for a place that cannot be written, or a file there that no gate wrote."""
    reads = {"A": options.a, "B": options.b, "the floor": options.floor}
    folders = {name: text for name, text in reads.items() if text and Path(text).expanduser().exists()}
    Output(options.work).require_addable(folders, "--work", pattern=f"*/{WORK_FILE}")
    if options.history is not None:
        require_history(options.history, folders)
    if options.junit is not None and options.junit == options.markdown:
        raise ValueError(f"--junit and --markdown are both {options.junit}: give each a file of its own")
    for path, begins in ((options.junit, JUNIT_BEGIN), (options.markdown, MARKDOWN_BEGIN)):
        if path is not None and not (path.is_file() and path.read_bytes().startswith(begins.encode())):
            Output(path, True).require(folders, overwrite=False)


def _require_timeable(options: GateOptions, a: Source, b: Source) -> None:
    """Raise ValueError for a source whose calls cannot be timed beside another's, and for options without --speed."""
    for name in ("slower", "pairs"):
        if getattr(options, name) is not None and not options.speed:
            raise ValueError(f"--{name} says how speed is judged: give --speed too")
    for source in (a, b) if options.speed else ():
        if not isinstance(source, PipelineSource):
            kind = source.describe()["kind"]
            raise ValueError(
                f"--speed: {source.name} ({kind}) is no pipeline that runs in this process, which alone can be timed "
                "in turn; leave --speed out"
            )


def _speed(gate: Gate) -> GateSpeed:
    """Time both pipelines in turn, and judge their calls."""
    options, a, b = gate.options, gate.a, gate.b
    if not (isinstance(a, PipelineSource) and isinstance(b, PipelineSource)):
        raise TypeError("only pipelines are timed, which was checked before")
    prompts = [prompt for prompt, _ in gate.items]
    pairs = options.pairs or PAIRS
    # Steps are skipped by the timer, call by call.
    one, other = (TimedSide(s.name, partial(s.open, skips=False), folder=s.folder) for s in (a.side, b.side))
    timed = time_pairs(one, other, prompts, gate.call, pairs, warmup=WARMUP, device=a.device)
    first, second = ([Call(each.stages[WHOLE], each.slowdowns, each.megahertz) for each in side] for side in timed)
    return judge_speed(first, second, SLOWER if options.slower is None else options.slower)


def _require_one_machine(a: Source, b: Source, floor: Source | None) -> None:
    """Raise ValueError where A and B come of two machines and the floor does not say what lies between them.

    A floor from a third one would excuse what lies between others.
    """
    if floor is not None and None not in (b.machine, floor.machine) and floor.machine != b.machine:
        raise ValueError(
            f"{floor.name}, the floor, was made on {floor.machine}, {b.name} on {b.machine}: give images of A from "
            f"{b.machine} as --floor"
        )
    if None in (a.machine, b.machine) or a.machine == b.machine:
        return
    if floor is None or floor.machine != b.machine:
        raise ValueError(
            f"{a.name} was made on {a.machine}, {b.name} on {b.machine}: images differ between machines. Give images "
            f"of A from {b.machine} as --floor"
        )


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))


class _Opener:
    """Opens sources, whose pipelines are called alike. first: folder of the first pipeline. call: its arguments."""

    def __init__(self, options: GateOptions) -> None:
        self.options = options
        self.device = devices.choose(options.device)
        self.first: ModelFolder | None = None
        self.call: dict[str, Any] | None = None

    def sources(self, texts: Sequence[str]) -> list[Source]:
        """Open all; pipelines before servers, which get their arguments. One that is given again is run again."""
        opened = {text: self.source(text) for text in sorted(dict.fromkeys(texts), key=_is_address)}
        sources: list[Source] = []
        for text in texts:
            source = opened[text]
            if isinstance(source, EndpointSource | CommitSource) and source in sources:
                source = replace(source, run=len(sources) + 1)
            sources.append(source)
        return sources

    def source(self, text: str) -> Source:
        """Open what the command line calls `text`."""
        if _is_address(text):
            return endpoint_of(text, self.call or self.options.call, self.options.work)
        if text.startswith(PREFIX):
            return commit_of(text, self.options.setup, self.options.command, self.options.work)
        place = Path(text).expanduser()
        if place.is_dir() and is_picture_folder(place):
            return read_pictures(place)
        if place.is_dir() and not (place / "model_index.json").is_file():
            raise ValueError(f"{text}: neither a pipeline (model_index.json) nor a folder of images (prompts.jsonl)")
        return self._pipeline(resolve_model(text))

    def _pipeline(self, folder: ModelFolder) -> PipelineSource:
        options = self.options
        require_pictures(folder, "a gate compares images")
        require_steps(folder)
        require_safe(folder)
        stored = memory.stored_bytes(folder)
        device, offload = memory.settle_pipeline(folder, self.device, stored, options.device)
        call = call_of(folder, folder.generation_defaults, options.call)
        require_call(folder, call, options.call)
        require_prompts_suffice(folder, call)
        if self.call is None:
            self.first, self.call = folder, call
        elif call != self.call:
            names = sorted(key for key in {*call, *self.call} if call.get(key) != self.call.get(key))
            raise ValueError(
                f"{folder.name} is called with other {', '.join(names)} than {self.first and self.first.name}; give "
                f"them as options ({', '.join('--' + name.replace('_', '-') for name in names)})"
            )
        side = Side(
            folder.name,
            str(folder.path.resolve()),
            pipeline_digest(folder),
            options.dtype,
            offload=offload,
            stamps=side_stamps(folder.path.resolve()),
        )
        batch = options.batch_size or images_per_batch(call)
        return PipelineSource(side, call, batch, options.work, device, machine_name(device))
