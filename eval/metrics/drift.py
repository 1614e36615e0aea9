"""Drift of a pipeline from the 16-bit one at each denoising step, and of one 16-bit run from another.

    velocity error  |v̂ - v| / |v|                          both transformers at the 16-bit pipeline's latents
    SQNR            10 log10(Σ x² / Σ (x - x̂)²)  dB         of latents, each pipeline on its own path
    cosine          Σ x x̂ / (|x| |x̂|)                      of the same

`follow` runs the 16-bit pipeline once and keeps what its transformer said and the latents after each step. `drift` runs
another pipeline on the same prompts and noise twice: once on its own, and once steered (teacher forcing): its
transformer's outputs are noted and then replaced by the recorded ones, so that the scheduler takes it along the 16-bit
path and each step's error stands alone. The transformer's other arguments (text, guidance, a step
cache's memory) come from the pipeline itself: an error of quantized text encoders is in the velocity error too.

The noise floor is the drift of a second 16-bit pipeline, with another batch size and another attention backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.console import progress
from fluxq.calibrate.capture import noise_levels, run_pipeline
from fluxq.eval.images.denoiser import denoisers, hooked, prediction, with_prediction
from fluxq.eval.metrics.fidelity import cosine, sqnr
from fluxq.eval.metrics.schema import Curve, Drift, Estimate, Figure
from fluxq.eval.metrics.statistics import clustered_interval

_ASTRAY = 1e-2  # relative distance of steered latents from the recorded ones that no rounding explains


@dataclass(frozen=True)
class Followed:
    """Path of the 16-bit pipeline, on the CPU in the dtypes that it computed in.

    velocities: image, step, call of the transformer within the step -> (rows of this image, ...); two rows or two calls
        with guidance.
    latents: image, step -> latents after it.
    sigmas: noise level of each step.

    Bytes: images x steps x (latents + velocities). FLUX.1 at 1024 x 1024, 28 steps and 8 prompts: 235 MB, with true
    guidance 352 MB; Wan 2.1 at 480 x 832 and 81 frames, 50 steps, guided, 8 prompts: about 7 GB.
    """

    items: tuple[tuple[str, int], ...]
    call: Mapping[str, Any]
    sigmas: tuple[float, ...]
    velocities: tuple[tuple[tuple[Tensor, ...], ...], ...]
    latents: tuple[tuple[Tensor, ...], ...]
    batch_size: int


def follow(pipe: Any, items: Sequence[tuple[str, int]], call: Mapping[str, Any], batch_size: int) -> Followed:
    """Run the 16-bit pipeline on a few (prompt, seed) and keep its path; ValueError where that is not finite."""
    velocities: list[list[list[Tensor]]] = [[] for _ in items]
    latents: list[list[Tensor]] = [[] for _ in items]

    def see_velocity(image: int, step: int, _call: int, v: Tensor) -> None:
        while len(velocities[image]) <= step:
            velocities[image].append([])
        velocities[image][step].append(_kept(v, "velocity", items[image], step))

    def see_latents(image: int, step: int, x: Tensor) -> None:
        latents[image].append(_kept(x, "latents", items[image], step))

    _walk(pipe, items, call, batch_size, see_latents, see_velocity, description="Following the 16-bit model")
    return Followed(
        items=tuple(items),
        call=dict(call),
        sigmas=noise_levels(pipe)[: len(latents[0])],
        velocities=tuple(tuple(map(tuple, steps)) for steps in velocities),
        latents=tuple(map(tuple, latents)),
        batch_size=batch_size,
    )


def drift(followed: Followed, pipe: Any, batch_size: int | None = None, floor: Drift | None = None) -> Drift:
    """Return the drift of `pipe` from the run that was followed, with intervals that resample prompts.

    batch_size: by default that of the followed run. floor: drift of a second 16-bit pipeline. ValueError if the
    pipeline takes other steps, asks its transformer another number of times or, steered, still leaves the path: another
    scheduler, guidance or model.
    """
    size = batch_size or followed.batch_size
    velocity = _velocity_errors(followed, pipe, size)
    decibels, cosines = _latent_errors(followed, pipe, size)
    prompts = [prompt for prompt, _ in followed.items]

    def interval(values: Sequence[float]) -> Estimate:
        return Estimate.of(clustered_interval(values, prompts))

    steps = range(len(followed.sigmas))
    figures = {"velocity_error": velocity, "latent_sqnr": decibels, "latent_cosine": cosines}
    curves = {}
    for key, curve in CURVES.items():
        values = tuple(interval([row[step] for row in figures[key]]) for step in steps)
        curves[key] = Curve(**dict(curve), values=values, floor=floor and floor.curves[key].values)
    return Drift(
        steps=tuple(steps),
        sigmas=followed.sigmas,
        images=len(followed.items),
        curves=curves,
        velocity_error=interval([math.fsum(row) / len(row) for row in velocity]),
        velocity_floor=floor and floor.velocity_error,
    )


def _velocity_errors(followed: Followed, pipe: Any, size: int) -> list[list[float]]:
    """Return image, step -> |v̂ - v| / |v| over all calls of the step."""
    lost = [[0.0 for _ in steps] for steps in followed.velocities]
    whole = [[0.0 for _ in steps] for steps in followed.velocities]

    def see(image: int, step: int, at: int, velocity: Tensor) -> Tensor:
        v = _recorded(followed, image, step, at)
        if v.shape != velocity.shape:
            raise ValueError(
                f"step {step}: the transformer returned {tuple(velocity.shape)}, the 16-bit one {tuple(v.shape)}: "
                "give both pipelines one size and guidance"
            )
        lost[image][step] += float((velocity.cpu().double() - v.double()).square().sum())
        whole[image][step] += float(v.double().square().sum())
        return v

    def stays(image: int, step: int, latents: Tensor) -> None:
        x = _recorded_latents(followed, image, step, latents)
        away = float((latents.cpu().double() - x.double()).norm() / x.double().norm())
        if not away <= _ASTRAY:
            raise ValueError(
                f"step {step}: fed with the 16-bit model's velocities the latents still differ by {away:.1%}: the two "
                "pipelines differ in scheduler, steps or guidance, so their images cannot be compared"
            )

    _walk(pipe, followed.items, followed.call, size, stays, see, description="Steering")
    return [
        [math.sqrt(a / b) if b else math.nan for a, b in zip(*rows, strict=True)]
        for rows in zip(lost, whole, strict=True)
    ]


def _latent_errors(followed: Followed, pipe: Any, size: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return image, step -> SQNR in dB, and the cosines likewise."""
    decibels: list[list[float]] = [[] for _ in followed.items]
    cosines: list[list[float]] = [[] for _ in followed.items]

    def see(image: int, step: int, latents: Tensor) -> None:
        pair = [_recorded_latents(followed, image, step, latents)], [latents.cpu()]
        decibels[image] += sqnr(*pair).tolist()
        cosines[image] += cosine(*pair).tolist()

    _walk(pipe, followed.items, followed.call, size, see, description="Running free")
    short = [len(row) for row in decibels if len(row) != len(followed.sigmas)]
    if short:
        raise ValueError(f"the pipeline takes {short[0]} steps, the 16-bit one {len(followed.sigmas)}: give both one")
    return decibels, cosines


def _recorded(followed: Followed, image: int, step: int, at: int) -> Tensor:
    try:
        return followed.velocities[image][step][at]
    except IndexError:
        raise ValueError(
            f"step {step}, call {at}: the 16-bit pipeline did not call its transformer there: the two pipelines differ "
            "in steps or guidance"
        ) from None


def _recorded_latents(followed: Followed, image: int, step: int, latents: Tensor) -> Tensor:
    steps = followed.latents[image]
    if step >= len(steps) or steps[step].shape != latents.shape:
        raise ValueError(
            f"step {step}: latents {tuple(latents.shape)}, the 16-bit pipeline made {len(steps)} steps of "
            f"{tuple(steps[0].shape)}: give both one size and number of steps"
        )
    return steps[step]


def _kept(tensor: Tensor, what: str, item: tuple[str, int], step: int) -> Tensor:
    if not torch.isfinite(tensor).all():
        prompt, seed = item
        raise ValueError(f"the 16-bit model's {what} at step {step} holds NaN or infinity for {prompt!r}, seed {seed}")
    return tensor.detach().to("cpu", copy=True)


def _walk(
    pipe: Any,
    items: Sequence[tuple[str, int]],
    call: Mapping[str, Any],
    size: int,
    see_latents: Callable[[int, int, Tensor], None],
    see_velocity: Callable[[int, int, int, Tensor], Tensor | None] | None = None,
    *,
    description: str,
) -> None:
    """Run `pipe` on all items and look at each image alone.

    see_latents(image, step, latents). see_velocity(image, step, call, rows of this image): what it returns, unless it
    is None, goes on in their place.
    """
    starts = range(0, len(items), size)
    for first in progress(starts, description, len(starts)):
        batch = items[first : first + size]
        listener = _Listener(range(first, first + len(batch)), see_latents, see_velocity)
        with hooked(denoisers(pipe).values(), after=listener.hook if see_velocity else None):
            for _ in run_pipeline(
                pipe, batch, call, batch_size=len(batch), on_step=listener.at_step, on_latents=listener.at_latents
            ):
                pass


class _Listener:
    """Listener to what transformers return in one run of the pipeline; it may replace their outputs.

    Row r of an output belongs to image r mod B, however many rows guidance makes of an image.
    """

    def __init__(self, images: range, see_latents: Callable[..., None], see_velocity: Any) -> None:
        self.images, self.see_latents, self.see_velocity = images, see_latents, see_velocity
        self.step = self.calls = 0

    def at_step(self, step: int) -> None:
        self.step, self.calls = step, 0

    def at_latents(self, step: int, latents: Tensor) -> None:
        for image, x in zip(self.images, latents, strict=True):
            self.see_latents(image, step, x)

    def hook(self, model: nn.Module, _args: Any, output: Any) -> Any:
        v, count = prediction(output, model), len(self.images)
        if len(v) % count:
            raise ValueError(f"{type(model).__name__} returned {len(v)} rows for {count} images")
        rows = v.unflatten(0, (-1, count))  # (rows of an image, B, ...)
        answers = [self.see_velocity(image, self.step, self.calls, rows[:, at]) for at, image in enumerate(self.images)]
        self.calls += 1
        replacements = [each for each in answers if each is not None]
        return with_prediction(output, torch.stack(replacements, 1).flatten(0, 1).to(v)) if replacements else None


CURVES = {
    "velocity_error": Figure(
        name="Velocity error",
        unit="",
        digits=".3g",
        better="lower",
        how="|v̂ - v| / |v| of the transformer's output, both at the 16-bit latents",
    ),
    "latent_sqnr": Figure(
        name="SQNR of the latents",
        unit="dB",
        digits=".2f",
        better="higher",
        how="after the step, against the 16-bit latents, each pipeline on its own path; mean of per-image values",
    ),
    "latent_cosine": Figure(
        name="Cosine of the latents",
        unit="",
        digits=".5f",
        better="higher",
        how="after the step, to the 16-bit latents, each pipeline on its own path; mean of per-image values",
    ),
}
