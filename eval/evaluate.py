"""One evaluation: the images of quantized sides beside those of the 16-bit one become the runs of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluxq.eval.metrics import Measured, MetricRow, Sample, Unmeasured, metric_rows
from fluxq.eval.networks import Networks
from fluxq.eval.pictures import wall
from fluxq.eval.schema import Drift, Estimate, Gate, Image, Item, Metric, Run, Served, Size, Verdict, number
from fluxq.eval.sides import Side
from fluxq.eval.statistics import Interval
from fluxq.eval.verdict import with_verdicts
from fluxq.recipes.recipe import gate_holds, parse_gate

# Of the 16-bit model's error against itself, which has to be known roughly: a run's own needs more images.
FLOOR_IMAGES = 64
DRIFT_IMAGES = 8
VELOCITY_ERROR = "velocity_error"  # a metric that is taken on the way, not of images


@dataclass(frozen=True)
class Candidate:
    """A quantized side, and what its report says besides its images.

    checkpoint: name of its folder. served: what computes it. gates: conditions such as `psnr>=30`.
    """

    side: Side
    checkpoint: str
    recipe: str
    recipe_digest: str
    size: Size
    served: Served | None = None
    gates: tuple[str, ...] = ()
    provenance: Mapping[str, str] | None = None


def measure_floor(reference: Any, again: Any, keys: Sequence[str], networks: Networks) -> dict[str, Interval]:
    """Paired metrics between two 16-bit runs that differ in batch size and attention backend only.

    again: the second run, of the first items of `reference`. A metric without values per image has no floor.
    """
    sample, rows = Sample(reference.head(len(again.items)), again, networks), metric_rows()
    measured = {key: _take(rows[key], sample) for key in keys}
    return {
        key: taken.value
        for key, taken in measured.items()
        if isinstance(taken, Measured) and taken.per_image is not None and taken.value and taken.baseline is None
    }


def measure_runs(
    candidates: Sequence[Candidate],
    reference: Any,
    sets: Sequence[Any],
    *,
    keys: Sequence[str],
    networks: Networks,
    floor: Mapping[str, Interval],
    drifts: Mapping[str, Drift],
) -> tuple[Run, ...]:
    """All metrics of every side, judged together.

    sets: the images of each candidate. floor: see `measure_floor`. drifts: side's name -> errors along its steps.
    Raises ValueError if the 16-bit images are not finite, or the items of two sides differ.
    """
    for images in sets:
        _require_comparable(reference, images)
    runs = [
        _measure(candidate, Sample(reference, images, networks), keys, floor, drifts.get(candidate.side.name))
        for candidate, images in zip(candidates, sets, strict=True)
    ]
    shown = _worst_of(runs)
    runs = [
        run.model_copy(update={"wall": wall(reference, images, shown)}) for run, images in zip(runs, sets, strict=True)
    ]
    return with_verdicts(runs, [Item(prompt=prompt, seed=seed) for prompt, seed in reference.items])


def _worst_of(runs: Sequence[Run]) -> list[float]:
    """The least PSNR of each image over all runs, so that all of them show the same images; NaN where one has none."""
    table = [[_psnr_of(image) for image in run.images] for run in runs]
    return [math.nan if any(map(math.isnan, values)) else min(values) for values in zip(*table, strict=True)]


def _psnr_of(image: Image) -> float:
    value = image.values.get("psnr")
    return math.inf if image.identical else math.nan if value is None else value


def _measure(
    candidate: Candidate, sample: Sample, keys: Sequence[str], floor: Mapping[str, Interval], drift: Drift | None
) -> Run:
    rows = metric_rows()
    taken = {key: _take(rows[key], sample) for key in keys}
    status = _status(sample, taken)
    metrics = {key: _row(rows[key], found, floor.get(key)) for key, found in taken.items()}
    if drift is not None:
        metrics[VELOCITY_ERROR] = _velocity_error(drift)
    side = candidate.side
    return Run(
        name=side.name,
        checkpoint=candidate.checkpoint,
        recipe=candidate.recipe,
        recipe_digest=candidate.recipe_digest,
        backend=side.backend,
        cache=side.cache,
        status=status,
        size=candidate.size,
        verdict=Verdict(outcome="inconclusive", text="not judged yet"),
        gates=judge_gates(candidate.gates, _means(taken, drift)),
        metrics=metrics,
        images=_images(sample.quantized, taken),
        drift=drift,
        served=candidate.served,
        wall=None,
        provenance=dict(candidate.provenance or {}),
    )


def judge_gates(gates: Sequence[str], means: Mapping[str, float]) -> tuple[Gate, ...]:
    """Every gate against its metric's mean; one that was not measured does not pass."""
    return tuple(
        Gate(gate=gate, value=number(means.get(parse_gate(gate).metric)), passed=gate_holds(gate, means))
        for gate in gates
    )


def _means(taken: Mapping[str, Measured | str], drift: Drift | None) -> dict[str, float]:
    found = {key: each.value for key, each in taken.items() if isinstance(each, Measured)}
    means = {key: value.mean for key, value in found.items() if value is not None}
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


def _take(row: MetricRow, sample: Sample) -> Measured | str:
    """What was measured, or why nothing was."""
    try:
        return row.measure(sample)
    except Unmeasured as reason:
        return str(reason)


def _status(sample: Sample, taken: Mapping[str, Measured | str]) -> Any:
    if not sample.quantized.finite.all():
        return "broken"
    return "identical" if all(math.isinf(value) for value in _values(taken["psnr"])) else "measured"


def _values(found: Measured | str) -> tuple[float, ...]:
    return () if isinstance(found, str) else found.per_image or ()


def _row(row: MetricRow, found: Measured | str, floor: Interval | None) -> Metric:
    fixed: dict[str, Any] = {"name": row.name, "unit": row.unit, "digits": row.digits, "better": row.better}
    if isinstance(found, str):
        return Metric(**fixed, how=row.how, missing=found)
    return Metric(
        **fixed,
        how=found.how or row.how,
        value=_estimate(found.value),
        baseline=_estimate(found.baseline),
        change=_estimate(found.change),
        floor=_estimate(floor),
        notes=found.notes,
        missing=None if found.value is not None else found.broken,
    )


def _estimate(interval: Interval | None) -> Estimate | None:
    return None if interval is None else Estimate.of(interval)


def _velocity_error(drift: Drift) -> Metric:
    curve = drift.curves[VELOCITY_ERROR]
    return Metric(
        name=curve.name,
        unit=curve.unit,
        digits=curve.digits,
        better=curve.better,
        how=f"{curve.how}; mean over {len(drift.steps)} steps",
        value=drift.velocity_error,
        floor=drift.velocity_floor,
    )


def _images(quantized: Any, taken: Mapping[str, Measured | str]) -> tuple[Image, ...]:
    per_image = {key: values for key, found in taken.items() if (values := _values(found))}
    measured = {key: found for key, found in taken.items() if isinstance(found, Measured)}
    changes = {key: found.change_per_image for key, found in measured.items() if found.change_per_image}
    return tuple(
        Image(
            finite=bool(quantized.finite[index]),
            identical=per_image["psnr"][index] == math.inf,
            values={key: number(values[index]) for key, values in per_image.items()},
            changes={key: number(values[index]) for key, values in changes.items()},
        )
        for index in range(len(quantized.items))
    )
