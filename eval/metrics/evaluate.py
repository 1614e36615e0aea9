"""One evaluation: the images of quantized sides beside those of the 16-bit one become the runs of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluxq.eval.images.sides import Side
from fluxq.eval.metrics.drift import CURVES
from fluxq.eval.metrics.metrics import Measured, MetricRow, Sample, metric_rows
from fluxq.eval.metrics.networks import Networks
from fluxq.eval.metrics.pictures import wall
from fluxq.eval.metrics.plugins import Unmeasured
from fluxq.eval.metrics.schema import (
    CheckpointSize,
    Curve,
    Drift,
    Estimate,
    GateOutcome,
    Image,
    Item,
    Metric,
    Run,
    Served,
    Verdict,
    number,
)
from fluxq.eval.metrics.statistics import Interval, clustered_interval
from fluxq.eval.metrics.verdict import with_verdicts
from fluxq.recipes.recipe import gate_holds, parse_gate

# Images of the noise floor, which has to be known roughly: a run's error needs more.
FLOOR_IMAGES = 64
DRIFT_IMAGES, DRIFT_VIDEOS = 8, 4  # with latents and velocities of each step in memory at once
VELOCITY_ERROR = "velocity_error"  # a metric of the denoising steps, not of images
# Metric -> its noise floor, and that of the PSNR of each frame of videos, None for images.
Floor = tuple[Mapping[str, Interval], tuple[Estimate, ...] | None]


@dataclass(frozen=True)
class Candidate:
    """Quantized side, and facts for its report.

    checkpoint: name of its folder.
    served: arithmetic and memory of its layers.
    gates: conditions such as `psnr>=30`.
    drift: errors along its steps.
    """

    side: Side
    checkpoint: str
    recipe: str
    recipe_digest: str
    size: CheckpointSize
    served: Served | None = None
    gates: tuple[str, ...] = ()
    provenance: Mapping[str, str] | None = None
    drift: Drift | None = None


def measure_floor(reference: Any, again: Any, keys: Sequence[str], networks: Networks) -> Floor:
    """Measure paired metrics between two 16-bit runs that differ in batch size and attention backend only.

    A metric without values per image has no floor.
    """
    sample, rows = Sample(reference, again, networks), metric_rows()
    measurements = {key: _take(rows[key], sample) for key in keys}
    floor = {
        key: measurement.value
        for key, measurement in measurements.items()
        if measurement.per_image is not None and measurement.value and measurement.baseline is None
    }
    return floor, None if sample.frames is None else _by_frame(sample)


def measure_runs(
    candidates: Sequence[Candidate],
    reference: Any,
    sets: Sequence[Any],
    *,
    keys: Sequence[str],
    networks: Networks,
    floor: Floor = ({}, None),
) -> tuple[Run, ...]:
    """Measure all metrics of every side and judge them together.

    sets: images or videos of each candidate.

    Raises ValueError if the 16-bit images are not finite, or the items of two sides differ.
    """
    for images in sets:
        _require_comparable(reference, images)
    runs = [
        _measure(candidate, Sample(reference, images, networks), keys, *floor)
        for candidate, images in zip(candidates, sets, strict=True)
    ]
    shown = _worst_of(runs)
    runs = [
        run.model_copy(update={"wall": wall(reference, images, shown)}) for run, images in zip(runs, sets, strict=True)
    ]
    return with_verdicts(runs, [Item(prompt=prompt, seed=seed) for prompt, seed in reference.items])


def _worst_of(runs: Sequence[Run]) -> list[float]:
    """Return the least PSNR of each image over all runs, so that all show the same images; NaN where one has none."""
    table = [[image.psnr for image in run.images] for run in runs]
    return [math.nan if any(map(math.isnan, values)) else min(values) for values in zip(*table, strict=True)]


def _measure(
    candidate: Candidate,
    sample: Sample,
    keys: Sequence[str],
    floor: Mapping[str, Interval],
    frame_floor: tuple[Estimate, ...] | None,
) -> Run:
    rows, side, drift = metric_rows(), candidate.side, candidate.drift
    measurements = {key: _take(rows[key], sample) for key in keys}
    is_identical = all(map(math.isinf, measurements["psnr"].per_image or ()))
    is_video = sample.frames is not None
    metrics = {key: _row(rows[key], measurement, floor.get(key), is_video) for key, measurement in measurements.items()}
    if drift is not None:
        metrics[VELOCITY_ERROR] = _velocity_error(drift)
    return Run(
        name=side.name,
        checkpoint=candidate.checkpoint,
        recipe=candidate.recipe,
        recipe_digest=candidate.recipe_digest,
        backend=side.backend,
        cache=side.cache.label if side.cache else None,
        status="broken" if sample.broken else "identical" if is_identical else "measured",
        size=candidate.size,
        verdict=Verdict(outcome="inconclusive", text="not judged yet"),
        gates=judge_gates(candidate.gates, _means(measurements, drift)),
        metrics=metrics,
        images=_images(sample, measurements),
        frames=_frame_curve(sample, frame_floor),
        drift=drift,
        served=candidate.served,
        wall=None,
        provenance=dict(candidate.provenance or {}),
    )


def judge_gates(gates: Sequence[str], means: Mapping[str, float]) -> tuple[GateOutcome, ...]:
    """Judge every gate by its metric's mean; one that was not measured does not pass."""
    return tuple(
        GateOutcome(gate=gate, value=number(means.get(parse_gate(gate).metric)), passed=gate_holds(gate, means))
        for gate in gates
    )


def _means(measurements: Mapping[str, Measured], drift: Drift | None) -> dict[str, float]:
    means = {key: each.value.mean for key, each in measurements.items() if each.value is not None}
    if drift is not None and drift.velocity_error is not None and drift.velocity_error.mean is not None:
        means[VELOCITY_ERROR] = drift.velocity_error.mean
    return means


def _require_comparable(reference: Any, quantized: Any) -> None:
    if not reference.finite.all():
        prompt, seed = reference.items[int((~reference.finite).nonzero()[0])]
        raise ValueError(f"the 16-bit model gives NaN or infinity for {prompt!r}, seed {seed}: nothing to compare with")
    if tuple(reference.items) != tuple(quantized.items):
        raise ValueError(
            f"{len(reference.items)} 16-bit images and {len(quantized.items)} quantized ones come from different "
            "prompts or seeds: generate both from one list"
        )


def _take(row: MetricRow, sample: Sample) -> Measured:
    try:
        return row.measure(sample)
    except Unmeasured as reason:
        return Measured(None, missing=str(reason))


def _row(row: MetricRow, measurement: Measured, floor: Interval | None, is_video: bool) -> Metric:
    was_taken = measurement.value is not None or measurement.per_image is not None
    return Metric(
        **dict(row.figure(is_video, measurement.how)),
        value=_estimate(measurement.value),
        baseline=_estimate(measurement.baseline),
        change=_estimate(measurement.change),
        floor=_estimate(floor) if was_taken else None,
        notes=measurement.notes,
        missing=None if measurement.value is not None else measurement.missing,
    )


def _estimate(interval: Interval | None) -> Estimate | None:
    return None if interval is None else Estimate.of(interval)


def _velocity_error(drift: Drift) -> Metric:
    figure = CURVES[VELOCITY_ERROR]
    how = f"{figure.how}; mean over {len(drift.steps)} steps"
    return Metric(**{**dict(figure), "how": how}, value=drift.velocity_error, floor=drift.velocity_floor)


def _frame_curve(sample: Sample, floor: tuple[Estimate, ...] | None) -> Curve | None:
    if sample.frames is None:
        return None
    return Curve(
        name="PSNR of each frame",
        unit="dB",
        digits=".2f",
        better="higher",
        how="to the same frame of the 16-bit videos, mean over videos",
        values=_by_frame(sample),
        floor=floor,
    )


def _by_frame(sample: Sample) -> tuple[Estimate, ...]:
    """Return the PSNR of each frame over whole videos."""
    finite = sample.reference.finite & sample.quantized.finite
    whole = [index for index in range(len(sample.prompts)) if finite[index]]
    prompts = [sample.prompts[index] for index in whole]
    values = [sample.frame_psnr[index].tolist() for index in whole]
    return tuple(
        Estimate.of(clustered_interval([each[frame] for each in values], prompts))
        for frame in range(sample.frames or 0)
    )


def _images(sample: Sample, measurements: Mapping[str, Measured]) -> tuple[Image, ...]:
    quantized, frames = sample.quantized, sample.frames
    per_image = {key: each.per_image for key, each in measurements.items() if each.per_image}
    changes = {key: each.change_per_image for key, each in measurements.items() if each.change_per_image}
    return tuple(
        Image(
            finite=bool(quantized.finite[index]),
            identical=per_image["psnr"][index] == math.inf,
            values={key: number(values[index]) for key, values in per_image.items()},
            changes={key: number(values[index]) for key, values in changes.items()},
            frame_psnr=() if frames is None else tuple(map(number, sample.frame_psnr[index].tolist())),
        )
        for index in range(len(quantized.items))
    )
