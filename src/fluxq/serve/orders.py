"""Orders of the front to a worker, and what it gives back: plain values, which go from one process to another.

    quantum 1      prompt encoded, first step
    quantum 2…T    a step each
    quantum T + 1  latents decoded: the picture

A quantum is what runs without a look at the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Source:
    """An image that comes with a request. pixels: bytes of RGB, row by row."""

    width: int
    height: int
    pixels: bytes = field(repr=False)


@dataclass(frozen=True)
class Order:
    """One image to make.

    number: of no other order of this server.
    model: name of a checkpoint.
    call: arguments of the pipeline's call; width, height and num_inference_steps are always there.
    frames: of a video; 1 for an image.
    lora: (name, scale) of an adapter.
    sources: images that it begins with.
    is_kept: whether the worker keeps the image, for a shadow of it.
    shadow_of: number of the image that this one is compared with; `model` is then that of a 16-bit pipeline.
    """

    number: int
    model: str
    prompt: str
    seed: int
    call: Mapping[str, Any]
    lora: tuple[str, float] | None = None
    sources: tuple[Source, ...] = ()
    frames: int = 1
    is_kept: bool = False
    shadow_of: int | None = None

    @property
    def steps(self) -> int:
        """Denoising steps; fewer than the call says where `strength` skips the first."""
        steps = int(self.call["num_inference_steps"])
        return min(steps, steps - int(steps - steps * self.call.get("strength", 1)))

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return int(self.call["width"]), int(self.call["height"])

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return self.size[0] * self.size[1] * self.frames

    @property
    def kind(self) -> tuple[Any, ...]:
        """Facts that decide the time of a step besides the size: model, two calls of the denoiser, adapter, sources.

        The last one: whether there is guidance, for which many pipelines call the denoiser with twice the rows.
        """
        guided = float(self.call.get("true_cfg_scale") or 0) > 1 and self.call.get("negative_prompt") is not None
        scaled = float(self.call.get("guidance_scale") or 0) > 1
        return self.model, guided, self.lora is not None, len(self.sources), scaled


@dataclass(frozen=True)
class Picture:
    """A finished image, or the frames of a video.

    pixels: bytes of RGB, row by row, frame by frame. computed: steps that the denoiser computed.
    """

    width: int
    height: int
    pixels: bytes = field(repr=False)
    computed: int
    frames: int | None = None


@dataclass(frozen=True)
class Quantum:
    """Result of a quantum.

    number: of the order.
    steps: finished by now.
    seconds: that it took.
    loading: seconds of them that the checkpoint took to load.
    picture: after the last one.
    cached: whether the prompt's encoding was there.
    measured: metric -> dB, of a shadow that is finished.
    is_alone: whether no other image was in the making meanwhile; else its seconds have theirs in them.
    shared: images whose denoiser calls were one in this step.
    error: that ends the image.
    encoding: seconds that the prompt's encoding took, where the pipeline tells.
    """

    number: int
    steps: int
    seconds: float
    loading: float = 0.0
    picture: Picture | None = None
    cached: bool = False
    measured: Mapping[str, float] | None = None
    is_alone: bool = True
    shared: int = 1
    error: Exception | None = None
    encoding: float = 0.0

    def check(self) -> None:
        """Raise its error, if it has one."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Facts:
    """Facts about a checkpoint, known once it is loaded.

    digest: SHA-256 of all files that decide its images.
    accepts: arguments of its pipeline's call.
    defaults: arguments of a normal call; width, height and num_inference_steps are there.
    unit: pixels that width and height are multiples of.
    nbytes: of its weights.
    gates: that it was shipped with.
    frames: argument that says how many frames a video has; "" where images are made.
    edits: how it takes an image: "" for not, "image" as an argument of its own, "only" the same and never without one,
        "strength" by image-to-image.
    is_alone: whether its images are made one after the other, because denoisers remember their last step.
    joined: SQNR in dB of latents that were made in joined calls against the same alone, infinite for the same bits;
        None where calls are not joined.
    """

    name: str
    digest: str
    accepts: frozenset[str]
    defaults: Mapping[str, Any]
    unit: int
    nbytes: int
    gates: tuple[str, ...] = ()
    frames: str = ""
    edits: str = ""
    is_alone: bool = False
    joined: float | None = None


class Strict(BaseModel):
    """Values from outside, of which nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Refused(ValueError):
    """A request that cannot work. param: the field that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Busy(RuntimeError):
    """A change that cannot be made now."""


class NotLoaded(RuntimeError):
    """A model that is served and cannot be loaded now, because of its folder or of the memory that there is."""


class NotFinite(RuntimeError):
    """An image whose values are not finite, which would be a black one."""


class Failed(RuntimeError):
    """An image that another server could not make, or this one by a fault of its own. code: name of the error."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class WorkerDied(RuntimeError):
    """The worker's process ended; what it was making is lost."""
