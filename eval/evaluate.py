"""One evaluation: two pipelines, the same prompts and noise, every metric that can be taken, one report.

METRICS at the end of the file has a row per metric; the report, its table and its per-image values iterate
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fluxq.eval.alignment import ClipScorer
from fluxq.eval.distribution import VARIANT, Fid, fid, fid_difference
from fluxq.eval.fidelity import Fidelity, Interval, fidelity, paired_interval
from fluxq.eval.generate import Generated, generate
from fluxq.eval.report import Facts, Row, make_report


@dataclass(frozen=True)
class MetricNetworks:
    """Networks and images that some metrics need; a metric whose piece is None is reported as not measured.

    feature_network: uint8 (B, 3, H, W) -> (B, D), with `num_features`. feature_name: what reports call it.
    clip_folder: an open_clip model for `local-dir:`. held_out_images: real images, uint8 (M, 3, H, W).
    """

    feature_network: nn.Module | None = None
    feature_name: str = ""
    clip_folder: Path | None = None
    held_out_images: Tensor | None = None


@dataclass(frozen=True)
class Sample:
    """What metrics look at: both sides' images and the networks."""

    reference: Generated
    quantized: Generated
    networks: MetricNetworks

    @cached_property
    def fidelity(self) -> Fidelity:
        """Image by image comparison."""
        return fidelity(self.reference, self.quantized)

    @property
    def broken(self) -> str | None:
        """Why no mean over these images means anything, or None."""
        bad = int((~self.quantized.finite).sum())
        return f"{bad} of {len(self.quantized.items)} quantized images hold NaN or infinity" if bad else None


def evaluate(
    reference: Any,
    quantized: Any,
    items: Sequence[tuple[str, int]],
    call: Mapping[str, Any],
    *,
    metric_networks: MetricNetworks | None,
    facts: Facts,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Generate with both pipelines and return the report (see `report.make_report`), ready for `write_report`."""
    before = generate(reference, items, call, batch_size, "Generating with the 16-bit model")
    after = generate(quantized, items, call, batch_size, "Generating with the quantized model")
    return measure(before, after, call, metric_networks=metric_networks, facts=facts)


def measure(
    reference: Generated,
    quantized: Generated,
    call: Mapping[str, Any],
    *,
    metric_networks: MetricNetworks | None,
    facts: Facts,
) -> dict[str, Any]:
    """The report on images that are already there, for callers who hold one pipeline in memory at a time.

    Raises ValueError if the two sides differ in items or size, or if the 16-bit images are not finite.
    """
    if not reference.finite.all():
        prompt, seed = reference.items[int((~reference.finite).nonzero()[0])]
        raise ValueError(f"the 16-bit model gives NaN or infinity for {prompt!r}, seed {seed}: nothing to compare with")
    sample = Sample(reference, quantized, metric_networks or MetricNetworks())
    rows = {key: _take(template, metric, sample) for key, (template, metric) in METRICS.items()}
    return make_report(reference, quantized, sample.fidelity, rows, call=call, facts=facts)


class Unmeasured(Exception):
    """Raised by a metric that cannot be taken; its text goes into the report."""


def _take(template: Row, metric: Callable[[Row, Sample], Row], sample: Sample) -> Row:
    try:
        return metric(template, sample)
    except Unmeasured as reason:
        return replace(template, missing=str(reason))


def _psnr(row: Row, sample: Sample) -> Row:
    return _paired(row, sample, sample.fidelity.psnr_db)


def _latent_sqnr(row: Row, sample: Sample) -> Row:
    return _paired(row, sample, sample.fidelity.latent_sqnr_db)


def _latent_cosine(row: Row, sample: Sample) -> Row:
    return _paired(row, sample, sample.fidelity.latent_cosine)


def _paired(row: Row, sample: Sample, values: tuple[float, ...]) -> Row:
    if sample.broken:
        return replace(row, missing=sample.broken, per_image=values)  # the images that are whole keep their values
    return replace(row, value=paired_interval(values), per_image=values)


def _fid_to_reference(row: Row, sample: Sample) -> Row:
    result = _fid(sample, sample.quantized.images, sample.reference.images, "16-bit images")
    note = "both sides share prompts and noise, so far below what two independent sets would give"
    return replace(row, value=_alone(result), how=_how(result), notes=_notes(note, result.bias))


def _fid_to_held_out(row: Row, sample: Sample) -> Row:
    real = sample.networks.held_out_images
    if real is None:
        raise Unmeasured("no held-out images were given")
    before = _fid(sample, sample.reference.images, real, "held-out")
    after = _fid(sample, sample.quantized.images, real, "held-out")
    return replace(
        row,
        value=_alone(after),
        baseline=_alone(before),
        change=Interval(fid_difference(after, before), math.nan, math.nan, after.n),
        how=f"{_how(after)}; {after.n_reference} held-out images",
        notes=_notes(after.bias),
    )


def _clip_score(row: Row, sample: Sample) -> Row:
    if sample.broken or sample.networks.clip_folder is None:
        raise Unmeasured(sample.broken or "no CLIP folder was given")
    scorer = ClipScorer(sample.networks.clip_folder)
    prompts = [prompt for prompt, _ in sample.quantized.items]
    before, after = (scorer.score(side.images, prompts) for side in (sample.reference, sample.quantized))
    differences = [b - a for a, b in zip(before.scores, after.scores, strict=True)]
    cut = f"{after.truncated} of {len(prompts)} prompts are longer than the text encoder reads: their ends do not count"
    return replace(
        row,
        value=paired_interval(after.scores),
        baseline=paired_interval(before.scores),
        change=paired_interval(differences),
        how=f"{row.how}, model {after.network}",
        notes=_notes(cut if after.truncated else None),
        per_image=after.scores,
    )


def _fid(sample: Sample, images: Tensor, reference: Tensor, label: str) -> Fid:
    network = sample.networks.feature_network
    if sample.broken or network is None:
        raise Unmeasured(sample.broken or "no feature network was given")
    if min(len(images), len(reference)) < 2:
        raise Unmeasured("needs at least two images on either side")
    return fid(images, reference, network, name=sample.networks.feature_name, label=label)


def _alone(result: Fid) -> Interval:
    """A FID is one number about all images: it has no per-image values to take an interval of."""
    return Interval(result.value, math.nan, math.nan, result.n)


def _how(result: Fid) -> str:
    return f"{result.network} ({result.features} features); {result.variant}"


def _notes(*notes: str | None) -> tuple[str, ...]:
    return tuple(note for note in notes if note)


METRICS: dict[str, tuple[Row, Callable[[Row, Sample], Row]]] = {
    "psnr_db": (
        Row("PSNR to the 16-bit images", "dB", ".2f", "higher", "uint8, peak 255, mean of per-image values"),
        _psnr,
    ),
    "latent_sqnr_db": (
        Row("SQNR of the final latents", "dB", ".2f", "higher", "against the 16-bit latents, mean of per-image values"),
        _latent_sqnr,
    ),
    "latent_cosine": (
        Row("Cosine of the final latents", "", ".5f", "higher", "to the 16-bit latents, mean of per-image values"),
        _latent_cosine,
    ),
    "fid_to_16bit": (Row("FID to the 16-bit images", "", ".4g", "lower", VARIANT), _fid_to_reference),
    "fid_to_held_out": (Row("FID to held-out images", "", ".4g", "lower", VARIANT), _fid_to_held_out),
    "clip_score": (Row("CLIP score", "", ".2f", "higher", "100 × cosine of image and prompt, open_clip"), _clip_score),
}
