"""The passport of a checkpoint: what was measured of it, and the final latents of up to eight images that it made.

    passport.json     beside fluxq_plan.json, replaced as a whole by whoever measures again; with a SHA-256 of itself

Of each named image it has the SHA-256 of the latents' fp32 bytes, which says whether another run gives the same bits,
and a sketch, which says how far it is where it does not. Latents of up to SKETCH numbers are their own sketch. Of more,
each number gets a sign and one of SKETCH places, both drawn by its index, and the sketch is the sum at each place
(Charikar, Chen & Farach-Colton 2002). It is linear, and |S x|² has the mean |x|² and, where no few numbers make up most
of x, the relative deviation sqrt(2 / SKETCH): 0.19 dB of one image's SQNR.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fluxq.base.console import first_fault
from fluxq.base.files import read_json, sha256_json, write_json
from fluxq.base.output import PASSPORT_FILE, with_seal
from fluxq.calibrate.prompts import PromptRow
from fluxq.eval.gate.decide import RULES, Finding, judge
from fluxq.eval.images.generate import Images
from fluxq.eval.metrics.schema import Estimate, GateOutcome

KIND, SCHEMA_VERSION = "fluxq passport", 1
NAMED = 8  # images at most
SKETCH = 1024  # numbers
FINEST = 144.0  # dB: half a step of fp32
_MOST_IN_CALL, _MOST_THREADS = 64, 4096

Verdict = Literal["bit for bit", "within the floor", "not", "cannot tell"]
EXIT_CODES: dict[Verdict, int] = {"bit for bit": 0, "within the floor": 0, "not": 1, "cannot tell": 3}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NamedImage(_Part):
    """An image by its prompt and seed, and what its final latents were.

    arguments: of the call for it alone. sha256: of the latents' fp32 bytes, little endian. power: their sum of squares.
    sketch: base64 of fp32.
    """

    prompt: str
    seed: int = Field(ge=0, lt=1 << 63)
    arguments: dict[str, str | int | float] = {}
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    power: float = Field(ge=0)
    sketch: str = Field(max_length=4 * SKETCH * 4)

    @classmethod
    def of(cls, row: PromptRow | str, seed: int, latents: Tensor) -> NamedImage:
        """Return an image and its latents; ValueError for a row that has images of its own."""
        row = row if isinstance(row, PromptRow) else PromptRow(row)
        arguments = {}
        for name, value in row.arguments:
            if not isinstance(value, (str, int, float)):
                raise ValueError(f"{name} of a prompt is an image, which a passport does not hold")
            arguments[name] = value
        sha256, power, sketch = _read(latents)
        text = base64.b64encode(sketch.astype("<f4").tobytes()).decode()
        return cls(prompt=row.prompt, seed=seed, arguments=arguments, sha256=sha256, power=power, sketch=text)

    @property
    def item(self) -> tuple[PromptRow, int]:
        """The prompt and the seed, as `generate` takes them."""
        return PromptRow(self.prompt, tuple(sorted(self.arguments.items()))), self.seed

    @property
    def numbers(self) -> np.ndarray:
        """The sketch, float64."""
        return np.frombuffer(base64.b64decode(self.sketch, validate=True), "<f4").astype(np.float64)

    def sqnr(self, other: NamedImage) -> float:
        """Return the SQNR in dB of another run of it; infinite for the same bits, NaN for latents of another shape.

        Of latents whose difference the sketch's fp32 does not show it is FINEST.
        """
        if other.sha256 == self.sha256:
            return math.inf
        mine, theirs = self.numbers, other.numbers
        if mine.shape != theirs.shape:
            return math.nan
        noise = float(np.square(mine - theirs).sum())
        if not noise:
            return FINEST
        return min(FINEST, 10 * math.log10(self.power / noise)) if self.power else -math.inf


class Passport(_Part):
    """Measurements of a checkpoint, where and how they were made, and what repeats them.

    by: command that measured. checkpoint: SHA-256 of all that decides its images. digests: component -> SHA-256 of its
    weights and configuration. metrics: name -> paired figure against the 16-bit model, with its interval, in `units`.
    gates_for_eval: gates that `fluxq quantize` does not measure. floor: SQNR in dB of a second run of the first of
    `images`, None for the same bits. floor_run: how that differed. batch_size: images in one call. threads: of a CPU.
    shape: of the latents of an image. machine: name of the device.
    """

    kind: Literal["fluxq passport"] = KIND
    schema_version: Literal[1] = SCHEMA_VERSION
    fluxq: str
    created: str
    by: Literal["quantize", "eval"]
    checkpoint: str
    digests: dict[str, str]
    metrics: dict[str, Estimate]
    units: dict[str, str]
    gates: tuple[GateOutcome, ...]
    gates_for_eval: tuple[str, ...] = ()
    call: dict[str, Any]
    batch_size: int = Field(ge=1, le=_MOST_IN_CALL)
    dtype: Literal["bfloat16", "float16", "float32"]
    device: str
    machine: str
    threads: int | None = Field(default=None, ge=1, le=_MOST_THREADS)
    versions: dict[str, str]
    shape: tuple[int, ...]
    images: tuple[NamedImage, ...] = Field(min_length=1, max_length=NAMED)
    floor: tuple[float | None, ...] = Field(max_length=NAMED)
    floor_run: dict[str, Any]


@dataclass(frozen=True)
class Nearness:
    """Distance of another run of the named images.

    sqnr: in dB, infinite for the same bits. finding: of the rule. farthest: of an image, in dB beyond its floor.
    """

    verdict: Verdict
    sqnr: tuple[float, ...]
    finding: Finding | None
    farthest: float = 0.0

    @property
    def is_by_image(self) -> bool:
        """True where no image is too far by itself, though their mean over other images would be uncertain."""
        return self.verdict == "within the floor" and self.finding is not None and self.finding.verdict == "cannot tell"

    @property
    def same(self) -> int:
        """Number of images whose latents are the same bits."""
        return sum(value == math.inf for value in self.sqnr)


def named_images(items: Sequence[tuple[PromptRow | str, int]], latents: Images) -> tuple[NamedImage, ...]:
    """Return the images of a passport. latents: (...) of each, fp32, or stacked; ValueError if they are not finite."""
    if not all(bool(torch.isfinite(each).all()) for each in latents):
        raise ValueError("latents with NaN or infinity repeat nothing")
    return tuple(NamedImage.of(row, seed, each) for (row, seed), each in zip(items, latents, strict=True))


def floor_of(images: Sequence[NamedImage], again: Sequence[NamedImage]) -> tuple[float | None, ...]:
    """Return the floor of a passport: the SQNR of a second run of the first images, None for the same bits."""
    values = [one.sqnr(other) for one, other in zip(images, again, strict=False)]
    if not all(value > -math.inf for value in values):  # NaN too
        raise ValueError("a second run has latents of another shape, or the first has zeros alone")
    return tuple(None if value == math.inf else value for value in values)


def nearness(passport: Passport, images: Sequence[NamedImage]) -> Nearness:
    """Judge another run of a passport's images by the rule of the gate for latents.

    An image without a second run of its own has the mean distance of those that have one. Images that are each as near
    as their mean has to be are within the floor, however they scatter: most are the same bits on another CPU, a few are
    not, and of such a mixture an interval says nothing.
    """
    values = tuple(one.sqnr(other) for one, other in zip(passport.images, images, strict=True))
    if all(value == math.inf for value in values):
        return Nearness("bit for bit", values, None)
    rule = RULES["latent_sqnr"]
    floor = [math.inf if value is None else value for value in passport.floor]
    usual = rule.same - fmean(map(rule.distance, floor)) if floor else math.inf
    floor += [usual] * (len(values) - len(floor))
    finding = judge(rule, values, floor, range(len(values)), (len(values),))
    farthest = max(rule.distance(value) - rule.distance(second) for value, second in zip(values, floor, strict=True))
    verdicts: dict[str, Verdict] = {"equivalent": "within the floor", "worse": "not", "cannot tell": "cannot tell"}
    verdict = verdicts[finding.verdict]
    if verdict == "cannot tell" and farthest <= finding.limit:
        verdict = "within the floor"
    return Nearness(verdict, values, finding, farthest)


def write_passport(folder: Path, passport: Passport) -> None:
    """Write the passport of a checkpoint folder, in place of the one that is there."""
    write_json(folder / PASSPORT_FILE, with_seal(passport.model_dump(mode="json")))


def read_passport(file: Path) -> Passport:
    """Read a passport; ValueError naming the file where it is damaged, or of another version of fluxq."""
    content = read_json(file)
    cure = "copy it again, or let `fluxq eval` write a new one"
    seal = content.pop("sha256", None)
    if content.get("kind") != KIND or seal is None:
        raise ValueError(f"{file}: no passport of fluxq; {cure}")
    if seal != sha256_json(content):
        raise ValueError(f"{file}: changed since fluxq wrote it; {cure}")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{file}: written by another version of fluxq ({content.get('fluxq')}); {cure}")
    try:
        passport = Passport.model_validate(content)
        _require_sketches(passport)
    except ValidationError as error:
        raise ValueError(f"{file}: damaged ({first_fault(error)}); {cure}") from None
    except ValueError as error:
        raise ValueError(f"{file}: damaged ({error}); {cure}") from None
    return passport


def _require_sketches(passport: Passport) -> None:
    """Raise ValueError for sketches that are not those of latents of the passport's shape."""
    expected = min(SKETCH, math.prod(passport.shape))
    for image in passport.images:
        numbers = image.numbers
        if len(numbers) != expected or not np.isfinite(numbers).all():
            raise ValueError(f"the sketch of seed {image.seed} is not {expected} finite numbers")


def _read(latents: Tensor) -> tuple[str, float, np.ndarray]:
    """Return SHA-256, sum of squares and sketch of latents (...), fp32."""
    flat = latents.detach().float().cpu().contiguous().reshape(-1).numpy().astype("<f4", copy=False)
    exact = flat.astype(np.float64)
    return hashlib.sha256(flat.tobytes()).hexdigest(), float(np.square(exact).sum()), _sketch(exact)


def _sketch(x: np.ndarray) -> np.ndarray:
    """Return the sketch of x, float64 (n,), as (SKETCH,), or x where it has no more numbers. Same on all machines."""
    if len(x) <= SKETCH:
        return x
    drawn = _drawn(len(x))
    signs = 1.0 - 2.0 * (drawn >> np.uint64(63)).astype(np.float64)
    return np.bincount((drawn % np.uint64(SKETCH)).astype(np.int64), weights=signs * x, minlength=SKETCH)


def _drawn(count: int) -> np.ndarray:
    """Return the first numbers of SplitMix64 (Steele, Lea & Flood 2014) with the seed 0, uint64 (count,)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def changed_parts(passport: Passport, checkpoint: str, digests: Mapping[str, str]) -> list[str]:
    """Name what changed in a pipeline since its passport: components, or other files. The digests are of today."""
    names = sorted(passport.digests.keys() | digests.keys())
    changed = [name for name in names if passport.digests.get(name) != digests.get(name)]
    others = [] if changed or checkpoint == passport.checkpoint else ["files of its scheduler or tokenizers"]
    return changed or others
