"""`report.json`: results of an evaluation, as plain data from which every picture and page of a report is made.

A number that does not exist (an interval of one image, the PSNR of identical images) is null, never NaN. Files of
another schema version, with unknown keys or without one that belongs there are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError, model_validator

from fluxq.base.console import first_fault, visible
from fluxq.base.files import read_json
from fluxq.eval.metrics.statistics import Interval

SCHEMA_VERSION = 3
JSON_FILE = "report.json"
Digits = Annotated[str, StringConstraints(pattern=r"^(\.[0-9][efg])?$")]  # a format specification
_LONGEST, _LONGEST_NAME = 1 << 17, 1 << 9  # characters; a recipe has 64 KiB, a folder's name 255 bytes
_NAMES = frozenset(("name", "checkpoint", "model", "side", "unit", "scheme", "role", "first", "second"))
_PICTURE = "data:image/"
SPREAD = 0.05  # of times, interquartile range over median: above it no speed-up is given and no time is drawn


class Strict(BaseModel):
    """Unknown keys, NaN and infinity are errors. Texts are made `printable`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _printable(cls, data: Any) -> Any:
        return printable(data)


def printable(value: Any, longest: int = _LONGEST) -> Any:
    """Return plain data whose texts may stand on a page and in a drawing: no control characters, none without end."""
    if isinstance(value, str):
        text = visible(value)
        return text if len(text) <= longest or text.startswith(_PICTURE) else text[: longest - 1] + "…"
    if isinstance(value, dict):
        return {
            printable(key, _LONGEST_NAME): printable(each, _LONGEST_NAME if key in _NAMES else _LONGEST)
            for key, each in value.items()
        }
    return type(value)(printable(each) for each in value) if type(value) in (list, tuple) else value


class Estimate(Strict):
    """An `Interval` in JSON. mean: null if there is none, or if all values are infinite, which `infinite` counts."""

    mean: float | None
    low: float | None = None
    high: float | None = None
    n: int
    infinite: int = 0

    @classmethod
    def of(cls, interval: Interval) -> Self:
        """Return the estimate of an interval; values that are not finite become null."""
        mean, low, high = (number(value) for value in (interval.mean, interval.low, interval.high))
        return cls(mean=mean, low=low, high=high, n=interval.n, infinite=interval.infinite)

    @property
    def negated(self) -> Self:
        """The estimate of a difference taken the other way round."""
        mean, low, high = (None if value is None else -value for value in (self.mean, self.high, self.low))
        return self.model_copy(update={"mean": mean, "low": low, "high": high})


def number(value: float | None) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


class Margin(Strict):
    """Limits of a metric for a run as good as 16 bit, of its value or of its change against 16 bit.

    None: no limit on that side.
    """

    on: Literal["value", "change"]
    low: float | None = None
    high: float | None = None

    def describe(self, unit: str) -> str:
        """Return the limits for people: `at least 30 dB`, `within ±0.3`."""
        unit = f" {unit}" if unit else ""
        if self.high is None:
            return f"at least {self.low:g}{unit}"
        if self.low is None:
            return f"at most {self.high:g}{unit}"
        if self.low == -self.high:
            return f"within ±{self.high:g}{unit}"
        return f"{self.low:g} to {self.high:g}{unit}"


class Figure(Strict):
    """A figure that is measured, without values.

    digits: format specification.
    better: direction that is good.
    how: variant and implementation.
    """

    name: str
    unit: str
    digits: Digits
    better: Literal["higher", "lower"]
    how: str


class Metric(Figure):
    """One row of a run's table.

    value, baseline: over the quantized images, and over the 16-bit ones.
    change: value - baseline, paired where there are values per image.
    floor: the same metric between two 16-bit runs.
    margin: limits of the verdict, None if it has none.
    missing: reason why there is no value.
    """

    value: Estimate | None = None
    baseline: Estimate | None = None
    change: Estimate | None = None
    floor: Estimate | None = None
    margin: Margin | None = None
    notes: tuple[str, ...] = ()
    missing: str | None = None


class Image(Strict):
    """One image of a run, in the order of the report's items.

    values: metric -> its value for this image.
    changes: metric that 16-bit images have too -> value minus theirs.
    frame_psnr: dB of each frame of a video, null where it is identical.
    """

    finite: bool
    identical: bool
    values: dict[str, float | None]
    changes: dict[str, float | None] = {}
    frame_psnr: tuple[float | None, ...] = ()

    @property
    def psnr(self) -> float:
        """dB, infinite where it is identical, NaN where there is none."""
        value = self.values.get("psnr")
        return math.inf if self.identical else math.nan if value is None else value


class Verdict(Strict):
    """Judgement of a run; see verdict.py.

    outcome: "equivalent" is to 16 bit, "comparable" to the best published of as many bits; "alike" and "unlike" are
        looks at few images and no judgements.
    text: a sentence or two.
    more_images: about how many more would decide.
    """

    outcome: Literal["identical", "equivalent", "comparable", "alike", "unlike", "worse", "inconclusive", "broken"]
    text: str
    more_images: int | None = None


class GateOutcome(Strict):
    """Outcome of one gate. value: null where the metric was not measured, which does not pass, or is infinite."""

    gate: str
    value: float | None
    passed: bool

    @property
    def absent(self) -> str:
        """Word in place of a value that is null: of identical images it passes."""
        return "identical" if self.passed else "not measured"


class Curve(Figure):
    """A paired figure at each denoising step, or frame. floor: between two 16-bit runs, where it was measured."""

    values: tuple[Estimate, ...]
    floor: tuple[Estimate, ...] | None = None


class Drift(Strict):
    """Errors along the denoising steps.

    sigmas: noise level of each step.
    images: number of images that were followed.
    velocity_error: over all steps, from each image's mean of the curve of that name.
    velocity_floor: the same between two 16-bit runs, where it was measured.
    """

    steps: tuple[int, ...]
    sigmas: tuple[float, ...]
    images: int
    curves: dict[str, Curve]
    velocity_error: Estimate | None = None
    velocity_floor: Estimate | None = None


class Picture(Strict):
    """One shown image, as data URIs; of a video some of its frames, one below the other.

    index: place among the report's items.
    frames: numbers of a video's frames; the last has the lowest PSNR.
    motion: the whole video as an animation, 16 bit at the left, where it is kept.
    """

    index: int
    reference: str
    quantized: str
    difference: str
    frames: tuple[int, ...] = ()
    motion: str | None = None


class Wall(Strict):
    """Pictures by the reason for their choice. gain: factor of |difference|. encoding: format of shown pictures."""

    gain: int
    height: int
    width: int
    shown_pixels: int
    encoding: str
    groups: dict[str, tuple[Picture, ...]]


class CheckpointSize(Strict):
    """Weights on disk of the quantized components.

    bits_per_weight: all that is stored for all their Linears, as `fluxq quantize` prints it. bits_per_quantized_weight:
    of the quantized ones alone.
    """

    components: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    bits_per_quantized_weight: float


class Served(Strict):
    """A quantized pipeline in memory, as it computes; see speed/served.py.

    arithmetic: key of BACKENDS ("native" as stored), or words about what was done to its layers.
    layers: arithmetic of a layer -> number of layers.
    digest: SHA-256 of layer -> its arithmetic.
    bits_per_weight: as of `CheckpointSize`, in memory.
    resident_bytes, pipeline_bytes: parameters and buffers of the quantized components, and of all.
    beside: words about what else lies in memory for the same arithmetic.
    """

    arithmetic: str
    layers: dict[str, int]
    digest: str
    bits_per_weight: float
    resident_bytes: int
    pipeline_bytes: int
    beside: str = ""


class Times(Strict):
    """Seconds of one stage. values: every round, in the order in which they ran."""

    n: int
    p50: float
    p95: float
    iqr: float
    values: tuple[float, ...]


def in_words(reference: str) -> str:
    """Return the name of an unquantized side for people: "16 bit", "fp32"."""
    return reference.replace("16-bit", "16 bit")


class SpeedRow(Strict):
    """One pipeline in one mode at one size.

    frames: of a video, null for images.
    length: of the text, in tokens; null for the pipeline's own.
    stages: "text encoders", "denoiser step" (mean over an image's steps), "VAE", "end to end".
    peak_bytes: largest memory of a GPU in use, parameters and buffers included.
    resident_bytes: parameters and buffers.
    compile_seconds: first run less the median; little where an equal graph had been compiled.
    energy_joules: of one image.
    flops: of one denoiser step, modelled.
    roofline_share: time that the data sheet's peaks allow for a step over its time, where the device has a row.
    slowed_by: reasons for lowered clocks.
    missing: reason why there are no times, such as a compiler's error.
    """

    side: str
    is_reference: bool
    mode: Literal["eager", "compiled", "cuda graph", "captured"]
    batch: int
    height: int
    width: int
    frames: int | None = None
    length: int | None = None
    stages: dict[str, Times] = {}
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    compile_seconds: float | None = None
    energy_joules: float | None = None
    flops: float | None = None
    roofline_share: float | None = None
    slowed_by: tuple[str, ...] = ()
    missing: str | None = None

    @property
    def label(self) -> str:
        """Name of the side for readers."""
        return in_words(self.side) if self.is_reference else self.side


class Speedup(Strict):
    """Time of the unquantized baseline over quantized time of rounds that ran in turn, or why none is given.

    mode: of the quantized side.
    over: the baseline's side, "16-bit", or "fp32" where a CPU is as fast with it.
    against: the baseline's mode, the fastest that was measured.
    """

    side: str
    stage: str
    mode: str
    batch: int
    height: int
    width: int
    frames: int | None = None
    length: int | None = None
    over: str = "16-bit"
    against: str | None = None
    ratio: Estimate | None = None
    refused: str | None = None

    @property
    def baseline(self) -> str:
        """The baseline in words, with its mode: "16 bit (compiled)"."""
        return in_words(self.over) + (f" ({self.against})" if self.against else "")


class Card(Strict):
    """Judgement of whether a side runs on a card of so many gigabytes, less what driver and libraries take.

    needed: bytes. basis: origin of `needed`, the weights alone where no GPU has shown the peak.
    """

    side: str
    gigabytes: int
    needed: int
    fits: bool
    basis: str = "peak"


class Speed(Strict):
    """Results of `fluxq bench`.

    measured_on: hardware in words, with a note that a CPU is no GPU where it is none.
    first_image_seconds: from the start of loading to the first image.
    speedups: over the baseline first, then over what stands beside it.
    served: arithmetic of the quantized side; None if it could not be loaded.
    """

    device: str
    measured_on: str
    load_seconds: dict[str, float]
    first_image_seconds: dict[str, float]
    rows: tuple[SpeedRow, ...]
    speedups: tuple[Speedup, ...]
    cards: tuple[Card, ...]
    conditions: dict[str, str]
    warnings: tuple[str, ...] = ()
    served: Served | None = None


class LayerDamage(Strict):
    """One quantized layer, or one block of them. None: not measured, not finite, or in dB no error at all.

    local_sqnr_db: of the output with the 16-bit model's input, at each step that was looked at.
    free_sqnr_db: of the output in the running quantized model.
    damage: share of the whole latents' error when only this is quantized.
    gain: share that goes when only this is kept in 16 bit.
    kernel_error: relative, of the kernel's output to the torch reference's on the same input.
    health: shares of `arithmetic.health`, at each step.
    fault: faults beyond rounding, "" for none.
    """

    name: str
    role: str
    scheme: str
    weights: int
    local_sqnr_db: tuple[float | None, ...] = ()
    free_sqnr_db: tuple[float | None, ...] = ()
    damage: float | None = None
    gain: float | None = None
    kernel_error: float | None = None
    health: dict[str, tuple[float, ...]] = {}
    fault: str = ""


class Patch(Strict):
    """A recipe that keeps some layers in a better format. SQNR is of the final latents, in dB.

    format: new format of the layers.
    growth: share of bits that it might add.
    damage: sum of its layers' damages, as a share of the whole error.
    left_out: reason why the worst layer is not among them, "" if it is.
    bits_before, bits_after: per weight, as of `CheckpointSize`.
    recipe: YAML.
    """

    layers: tuple[str, ...]
    format: str
    growth: float
    damage: float
    left_out: str
    bits_before: float
    bits_after: float
    predicted_sqnr_db: float | None
    measured_sqnr_db: float | None
    before_sqnr_db: float | None
    recipe: str


class Debug(Strict):
    """Results of `fluxq debug`.

    blocks: in the order in which they run.
    layers, findings: the worst first.
    sqnr_db, floor_sqnr_db: of the final latents, and of those of a second 16-bit run.
    additivity: sum of the layers' damages, of a block's where its layers were not measured, over the damage of all.
    """

    prompts: int
    steps: tuple[int, ...]
    sigmas: tuple[float, ...]
    blocks: tuple[LayerDamage, ...]
    layers: tuple[LayerDamage, ...]
    first_divergence: str | None
    additivity: float | None
    findings: tuple[str, ...]
    sqnr_db: float | None = None
    floor_sqnr_db: float | None = None
    patch: Patch | None = None


STEPS = "steps"  # label, in what is said of a run or a timing, of a checkpoint's list of computed steps


class Run(Strict):
    """One quantized side.

    checkpoint: name of its folder.
    recipe_digest: SHA-256 of the recipe.
    backend: arithmetic that was asked for, a key of BACKENDS.
    cache: step cache, list of steps or number of steps in words; null for all steps.
    computed: share of the multiplications of all steps that it leaves; null where that is all.
    fewer: name of the run of fewer steps that computes no less, where there are any.
    served: arithmetic and memory of its layers.
    speed: of that same arithmetic.
    frames: PSNR at each frame of videos; null for images.
    """

    name: str
    checkpoint: str
    recipe: str
    recipe_digest: str
    backend: str
    cache: str | None
    status: Literal["broken", "identical", "measured"]
    size: CheckpointSize
    verdict: Verdict
    gates: tuple[GateOutcome, ...]
    metrics: dict[str, Metric]
    images: tuple[Image, ...]
    drift: Drift | None
    wall: Wall | None
    served: Served | None = None
    frames: Curve | None = None
    speed: Speed | None = None
    debug: Debug | None = None
    computed: float | None = None
    fewer: str | None = None
    provenance: dict[str, str] = {}

    @property
    def noun(self) -> str:
        """Word for one of the things that it made."""
        return "image" if self.frames is None else "video"

    @property
    def in_memory(self) -> Served | None:
        """Arithmetic and memory of its layers, as timed, else as evaluated. The arithmetic is the same."""
        return self.speed.served if self.speed and self.speed.served else self.served


class Timed(Strict):
    """A checkpoint in an arithmetic that was timed and not evaluated. name: as a run of it would be called."""

    name: str
    checkpoint: str
    recipe: str
    size: CheckpointSize
    speed: Speed


class Comparison(Strict):
    """Two runs on the same images. p: two-sided, of the paired bootstrap; p_holm: corrected for all comparisons."""

    first: str
    second: str
    metric: str
    difference: Estimate
    p: float
    p_holm: float


class Protocol(Strict):
    """Request to an evaluation. seeds: noise per prompt. dataset: hub id of the set that holds the prompts, if any."""

    name: str
    prompts: str
    prompts_digest: str
    count: int
    seeds: int
    dataset: str | None = None


class Item(Strict):
    """One image to make."""

    prompt: str
    seed: int


class Report(Strict):
    """An evaluation.

    reference: label -> fact that decides the 16-bit images' bits, and their digest; runs compare only within one.
    timed: speeds of an arithmetic that no run has.
    time: seconds by their use; two equal runs differ in `created` and `time` alone.
    """

    kind: Literal["fluxq report"] = "fluxq report"  # first in the file, and tells it from others' JSON
    schema_version: Literal[3] = SCHEMA_VERSION
    created: str
    model: str
    license: str
    call: dict[str, Any]
    reference: dict[str, str]
    noise_floor: str
    protocol: Protocol
    items: tuple[Item, ...]
    runs: tuple[Run, ...]
    comparisons: tuple[Comparison, ...]
    warnings: tuple[str, ...]
    timed: tuple[Timed, ...] = ()
    provenance: dict[str, str]
    versions: dict[str, str]
    command: str
    time: dict[str, Any]

    @property
    def noun(self) -> str:
        """Word for one of the things that all runs made."""
        return self.runs[0].noun if self.runs else "image"


def read_report(path: Path) -> Report:
    """Read the report in a file; ValueError naming what is wrong with it."""
    value = read_json(path, longest=1 << 28)  # a line for every image of every run
    version = value.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version is {version}, this fluxq reads {SCHEMA_VERSION}: run `fluxq eval` on its "
            "checkpoint again, which makes no image twice"
        )
    try:
        report = Report.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}; the file is damaged, evaluate again") from None
    for where, what in _gaps(report):
        raise ValueError(f"{path}: {where}: {what}; the file is damaged, evaluate again")
    return report


def _gaps(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the parts of a report that do not go together, each with the reason."""
    count = len(report.items)
    for where, values in (("items", report.items), ("runs", report.runs)):
        if not values:
            yield where, "is empty"
    for index, run in enumerate(report.runs):
        where = f"runs.{index}"
        if len(run.images) != count:
            yield f"{where}.images", f"{len(run.images)} of {count} items"
        pictures = [picture for group in run.wall.groups.values() for picture in group] if run.wall else []
        if not all(0 <= picture.index < count for picture in pictures):
            yield f"{where}.wall", f"a picture of none of {count} items"
        steps = len(run.drift.steps) if run.drift else 0
        curves = run.drift.curves.values() if run.drift else ()
        along = [len(each) for curve in curves for each in (curve.values, curve.floor) if each is not None]
        if run.drift and ({*along, len(run.drift.sigmas)} != {steps} or not steps):
            yield f"{where}.drift", f"curves of other lengths than its {steps} steps"
