"""Verdicts: is a run good enough? All runs of a report are judged together, from the report's own figures.

No quantizer is equivalent to 16 bit in every pixel: a small error at an early step becomes another picture. So two
things are asked of the paired figures, PSNR and LPIPS, each with its whole interval:

    within its noise    no farther from 16 bit than a second 16-bit run is, by NOISE: equivalent
    as published        no worse than what the best published quantizers of as many bits reach, by TOLERANCE, on models
                        of as many steps (a model of few steps has no time to repair an error)

Nothing is asked that no run can reach because 16 bit differs more from itself. Figures that describe images as a whole
(GUARDS) can show that something broke, and cannot show that nothing did. The more figures are held against a margin on
one page, the more each has to show (Holm's correction, `statistics.decide`), so that one wrong word among all stays as
rare as 5 %; what is printed beside a figure is its own 95 % interval, everywhere the same.

A figure that could not be decided, or was not measured, is named and changes no verdict: who measures more never gets
a worse word for it, unless something is shown to be worse. Below LEAST_PROMPTS nothing is decided at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fluxq.eval.metrics.figures import figure, short, stated
from fluxq.eval.metrics.schema import Estimate, Item, Margin, Metric, Run, Verdict
from fluxq.eval.metrics.statistics import Decision, Interval, decide, equivalence

LEAST_PROMPTS = 30  # a bootstrap interval over fewer is narrower than it says
FEW_STEPS = 8
_FEW_BITS = 7.5  # per quantized weight: below are 4-bit formats, and mixes, which are no better than their worst layers
_NAMED = 4
_UNPUBLISHED = "farther from 16 bit than its own noise, and nobody has published what quantizers of videos reach"


@dataclass(frozen=True)
class PublishedResult:
    """Figures of the best published quantizer of a model against that model's own 16-bit images.

    bits: of weights and activations.
    steps: denoising steps of each image.
    source: publication, and number of images.
    psnr, lpips: None where they were not published.
    clip_score, image_reward: changes against 16 bit.
    """

    model: str
    bits: int
    steps: int
    method: str
    source: str
    psnr: float | None
    lpips: float | None
    image_reward: float | None = None
    clip_score: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """Metric -> its published figure."""
        figures = {key: getattr(self, key) for key in ("psnr", "lpips", "image_reward", "clip_score")}
        return {key: value for key, value in figures.items() if value is not None}


def with_verdicts(runs: Sequence[Run], items: Sequence[Item]) -> tuple[Run, ...]:
    """Return the runs, each with the margins of its size and kind, and with what its metrics say together."""
    prompts = [item.prompt for item in items]
    runs = [_with_margins(run) for run in runs]
    if len(set(prompts)) < LEAST_PROMPTS:
        return tuple(run.model_copy(update={"verdict": _fixed(run) or _look(run)}) for run in runs)
    cases = [
        (run, key, (values, *_ends(metric.margin)))
        for run in runs
        if run.status == "measured"
        for key, metric in run.metrics.items()
        if metric.margin is not None and (values := _values(run, key, metric.margin))
    ]
    decisions = decide([case for *_, case in cases], prompts)
    by_run: dict[str, dict[str, Decision]] = {run.name: {} for run in runs}
    for (run, key, _), decision in zip(cases, decisions, strict=True):
        by_run[run.name][key] = decision
    judged = [_fixed(run) or _judged(run, by_run[run.name]) for run in runs]
    return tuple(run.model_copy(update={"verdict": verdict}) for run, verdict in zip(runs, judged, strict=True))


def published(run: Run) -> list[PublishedResult]:
    """Return the rows that a run is held against: as many bits, and as many steps where the run's are known.

    None for videos: no row is of a model that makes them.
    """
    if run.noun == "video":
        return []
    rows = [row for row in PUBLISHED if row.bits == _bits(run)]
    if run.drift is None:
        return rows
    return [row for row in rows if (row.steps <= FEW_STEPS) == (len(run.drift.steps) <= FEW_STEPS)]


def reached(rows: Sequence[PublishedResult], key: str, better: str) -> float | None:
    """Return the figure of a metric that all of these models reach: the worst of the best."""
    values = [row.figures[key] for row in rows if key in row.figures]
    return (min if better == "higher" else max)(values) if values else None


def _bits(run: Run) -> int:
    return 4 if run.size.bits_per_quantized_weight < _FEW_BITS else 8


def _with_margins(run: Run) -> Run:
    """Return the run with margins of PSNR and LPIPS by bits and steps, and GUARDS; no other metric has one."""
    metrics = {
        key: metric.model_copy(update={"margin": _margin(run, key, metric)}) for key, metric in run.metrics.items()
    }
    return run.model_copy(update={"metrics": metrics})


def _margin(run: Run, key: str, metric: Metric) -> Margin | None:
    if key not in TOLERANCE:
        return GUARDS.get(key)
    best = reached(published(run), key, metric.better)
    if best is None:
        return _around(metric, _noise(metric), NOISE[key]) if metric.floor and metric.floor.mean is not None else None
    worst = min if metric.better == "higher" else max  # 16 bit may differ more from itself than the published best do
    return _around(metric, worst(_noise(metric), best), TOLERANCE[key])


def _around(metric: Metric, figure: float, by: float) -> Margin:
    """Return the margin of a figure that is no worse than another, by so much."""
    digits = 2 if metric.unit == "dB" else 4
    if metric.better == "higher":
        return Margin(on="value", low=round(figure - by, digits))
    return Margin(on="value", high=round(figure + by, digits))


def _noise(metric: Metric) -> float:
    """Return a second 16-bit run's figure; that of identical images where there is none."""
    mean = metric.floor.mean if metric.floor else None
    return mean if mean is not None else math.inf if metric.better == "higher" else 0.0


def _ends(margin: Margin | None) -> tuple[float, float]:
    low, high = (margin.low, margin.high) if margin else (None, None)
    return -math.inf if low is None else low, math.inf if high is None else high


def _values(run: Run, key: str, margin: Margin) -> list[float]:
    """Return values per image, infinite where identical images have no finite value; empty where there are none."""
    rows = [(image, image.values if margin.on == "value" else image.changes) for image in run.images]
    if not all(key in row for _, row in rows):
        return []
    absent = {True: math.inf, False: math.nan}
    return [absent[image.identical] if (value := row[key]) is None else value for image, row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# from decisions to words


def _fixed(run: Run) -> Verdict | None:
    """Return a verdict that needs no interval, else None."""
    count = len(run.images)
    if run.status == "broken":
        bad = sum(not image.finite for image in run.images)
        text = f"{bad} of {count} {run.noun}s hold NaN or infinity: this checkpoint is broken."
        return Verdict(outcome="broken", text=text)
    if run.status == "identical":
        return Verdict(outcome="identical", text=f"All {count} {run.noun}s are identical to the 16-bit model's.")
    return None


def _look(run: Run) -> Verdict:
    """Return the verdict on so few images: what they show, without a judgement."""
    metric = run.metrics.get("psnr")
    margin = metric.margin if metric else None
    if metric is None or metric.value is None or metric.value.mean is None:
        text = f"Undecided: {len(run.images)} {run.noun}s and no PSNR.{_missing(run)}"
        return Verdict(outcome="inconclusive", text=text)
    if margin is None or margin.low is None or not published(run):
        shown = f"{len(run.images)} {run.noun}s, {_shown(run, 'psnr')}{_floor(metric)}"
        is_far = margin is None or margin.low is None or metric.value.mean < margin.low
        why = _UNPUBLISHED if is_far else f"a judgement takes {LEAST_PROMPTS} prompts or more (--count)"
        return Verdict(outcome="inconclusive", text=f"Undecided: {shown}; {why}.{_missing(run)}")
    is_near = metric.value.mean >= margin.low
    opening = "Looks as good as published" if is_near else "Looks worse than published"
    floor = _floor(metric) if is_near else f", {_theirs(run, 'psnr')}"
    text = (
        f"{opening}: {len(run.images)} {run.noun}s, PSNR {stated(metric.value, metric.digits, metric.unit)}{floor}; "
        f"a judgement takes {LEAST_PROMPTS} prompts or more (--count).{_missing(run)}"
    )
    return Verdict(outcome="alike" if is_near else "unlike", text=text)


def _judged(run: Run, decisions: Mapping[str, Decision]) -> Verdict:
    size = f"{_bits(run)}-bit models"
    outside, within, still_open = (
        {key: each for key, each in decisions.items() if each.outcome == outcome}
        for outcome in ("worse", "equivalent", "inconclusive")
    )
    # Without published figures no paired metric is worse: any quantizer is farther off than noise.
    worse = [key for key in outside if published(run) or key not in TOLERANCE]
    if worse:
        than = f"published {size}" if any(key in TOLERANCE for key in worse) else "16 bit"
        shown = "; ".join(f"{_shown(run, key)}, {_margin_text(run, key)} asked" for key in worse)
        return Verdict(outcome="worse", text=f"Worse than {than}: {shown}.{_missing(run)}")
    undecided = _undecided(run, still_open)
    inside = [key for key in TOLERANCE if key in within]  # paired metrics alone can say that a run is good
    if inside:
        if _is_noise(run, inside[0], within[inside[0]].interval):
            shown = "; ".join(f"{_shown(run, key)}{_floor(run.metrics[key])}" for key in inside)
            return Verdict(outcome="equivalent", text=f"Equivalent to 16 bit: {shown}{undecided}.{_missing(run)}")
        shown = "; ".join(f"{_shown(run, key)}, {_theirs(run, key)}" for key in inside)
        text = f"As good as published {size}: {shown}{undecided}.{_missing(run)}"
        return Verdict(outcome="comparable", text=text)
    if outside:
        shown = "; ".join(f"{_shown(run, key)}{_floor(run.metrics[key])}" for key in outside)
        text = f"Undecided: {shown}; {_UNPUBLISHED}{undecided}.{_missing(run)}"
        return Verdict(outcome="inconclusive", text=text)
    needed = [each.more_images for each in still_open.values() if each.more_images is not None]
    what = undecided.replace("; undecided", "", 1) or ": no metric with a margin was measured"
    text = f"Undecided{what}.{_missing(run)}"
    return Verdict(outcome="inconclusive", text=text, more_images=max(needed, default=None))


def _is_noise(run: Run, key: str, interval: Interval) -> bool:
    """Tell whether PSNR, or else LPIPS, lies within the noise of a second 16-bit run, with all of its interval."""
    metric = run.metrics[key]
    if metric.floor is None:
        return False
    if metric.better == "higher":
        return interval.low >= _noise(metric) - NOISE[key]
    return interval.high <= _noise(metric) + NOISE[key]


def _undecided(run: Run, still_open: Mapping[str, Decision]) -> str:
    parts = []
    for key, decision in still_open.items():
        more = decision.more_images
        about = f", about {more} more {run.noun}s would decide" if more and key in TOLERANCE else ""
        alone = ", which it would be alone on a page" if _decided_alone(run, key) else ""
        parts.append(f"{_shown(run, key)}, {_margin_text(run, key)} asked{about}{alone}")
    return f"; undecided: {'; '.join(parts)}" if parts else ""


def _decided_alone(run: Run, key: str) -> bool:
    """Tell whether the printed interval lies on one side of the margin, and only the correction leaves it open."""
    estimate, margin = _estimate(run.metrics[key]), run.metrics[key].margin
    if estimate is None or estimate.mean is None or estimate.low is None or estimate.high is None:
        return False
    interval = Interval(estimate.mean, estimate.low, estimate.high, estimate.n)
    return equivalence(interval, *_ends(margin)) != "inconclusive"


def _estimate(metric: Metric) -> Estimate | None:
    return metric.change if metric.margin and metric.margin.on == "change" else metric.value


def _shown(run: Run, key: str) -> str:
    """Return a metric's name, figure and 95 % interval: the same that every table prints."""
    metric = run.metrics[key]
    on_change = metric.margin is not None and metric.margin.on == "change"
    figure = stated(_estimate(metric), metric.digits, metric.unit, "+" if on_change else "")
    return f"{short(metric.name)}{' change' if on_change else ''} {figure}"


def _margin_text(run: Run, key: str) -> str:
    metric = run.metrics[key]
    return metric.margin.describe(metric.unit) if metric.margin else ""


def _theirs(run: Run, key: str) -> str:
    """Return the figure that published models of as many bits reach, in words."""
    metric = run.metrics[key]
    best = reached(published(run), key, metric.better)
    more = "more" if metric.better == "higher" else "less"
    return f"theirs {best:g}{f' {metric.unit}' if metric.unit else ''} or {more}"


def _floor(metric: Metric) -> str:
    if metric.floor is None or (metric.floor.mean is None and not metric.floor.infinite):
        return ""
    unit = f" {metric.unit}" if metric.unit and metric.floor.mean is not None else ""
    return f", two runs of 16 bit {figure(metric.floor, metric.digits)}{unit}"


def _missing(run: Run) -> str:
    """Return a sentence about what was not measured; "" if all was.

    It names the metrics that could have changed the verdict, and all that were asked for.
    """
    keys = [key for key in DECISIVE if key not in run.metrics or run.metrics[key].missing]
    names = [DECISIVE[key] for key in keys]
    names += [short(metric.name) for key, metric in run.metrics.items() if metric.missing and key not in DECISIVE]
    if not names:
        return ""
    listed = ", ".join(names[:_NAMED])
    return f" Not measured: {listed}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}."


DECISIVE = {"psnr": "PSNR", "lpips": "LPIPS", "clip_score": "CLIP score"}

# metric -> largest difference that counts as none. GPTQ on top of SVDQuant, one step of the algorithm, moves PSNR by
# 0.4 to 0.9 dB and LPIPS by 0.014 to 0.033 in the tables that PUBLISHED quotes.
TOLERANCE = {"psnr": 1.0, "lpips": 0.03}

# metric -> distance of an equivalent run from a second 16-bit run: at most twice its squared error
NOISE = {"psnr": 3.0, "lpips": 0.03}

# Limits of losses of the images as a whole. The largest change among the published best is -0.29 of CLIP score and
# -0.022 of ImageReward (ModelOpt, below); CLIP score gets 0.2 on top, ImageReward 0.03.
GUARDS = {
    "clip_score": Margin(on="change", low=-0.5, high=0.5),
    "image_reward": Margin(on="change", low=-0.05),
}

_DEEPCOMPRESSOR = "mit-han-lab/deepcompressor@69f3473, examples/diffusion/README.md, 5000 prompts of MJHQ-30K"
_FLUXDISTILL = "Mercity/FluxDistill, RESULTS.md, 512 prompts of MJHQ-30K at 512 pixels"
_MODELOPT = "NVIDIA/TensorRT-Model-Optimizer@5a4242f, examples/diffusers/README.md, 1000 prompts"

PUBLISHED = (
    PublishedResult("FLUX.1-dev", 8, 50, "INT W8A8, SVDQuant", _DEEPCOMPRESSOR, 27.0, 0.089, -0.005),
    PublishedResult("PixArt-Sigma", 8, 20, "INT W8A8, SVDQuant", _DEEPCOMPRESSOR, 23.7, 0.109, 0.011),
    PublishedResult("FLUX.1-schnell", 8, 4, "INT W8A8, SVDQuant", _DEEPCOMPRESSOR, 22.9, 0.120, 0.028),
    PublishedResult("FLUX.2-klein-4B", 8, 4, "FP8 of its authors", _FLUXDISTILL, 23.02, 0.0798),
    PublishedResult("FLUX.1-dev", 4, 50, "NVFP4, SVDQuant + GPTQ", _DEEPCOMPRESSOR, 21.5, 0.203, -0.008),
    PublishedResult("FLUX.1-dev", 4, 30, "FP4, ModelOpt", _MODELOPT, None, None, -0.022, clip_score=-0.29),
    PublishedResult("SANA-1.6b", 4, 20, "NVFP4, SVDQuant + GPTQ", _DEEPCOMPRESSOR, 19.0, 0.176, -0.011),
    PublishedResult("PixArt-Sigma", 4, 20, "NVFP4, SVDQuant + GPTQ", _DEEPCOMPRESSOR, 18.5, 0.271, -0.004),
    PublishedResult("FLUX.1-schnell", 4, 4, "NVFP4, SVDQuant + GPTQ", _DEEPCOMPRESSOR, 19.0, 0.228, 0.028),
    PublishedResult("FLUX.2-klein-4B", 4, 4, "NVFP4, SVD of rank 128, Nunchaku's kernel", _FLUXDISTILL, 18.71, 0.1668),
)
