"""Is a run good enough? Said of all runs of a report together, from the report's own figures.

Every metric with a margin must lie inside it with its whole interval. The intervals are those of `statistics.decide`:
the more recipes one looks at, the wider, so that one wrong word among all of them stays as rare as alpha says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fluxq.eval.schema import Image, Item, Margin, Metric, Run, Verdict
from fluxq.eval.statistics import Decision, Interval, decide


def with_verdicts(runs: Sequence[Run], items: Sequence[Item]) -> tuple[Run, ...]:
    """The runs, each with what its metrics say together."""
    prompts = [item.prompt for item in items]
    found: dict[str, list[Verdict]] = {run.name: [] for run in runs}
    for key, margin in _margins(runs):
        judged = [run for run in runs if run.status == "measured" and key in run.metrics and _values(run, key, margin)]
        low = -math.inf if margin.low is None else margin.low
        high = math.inf if margin.high is None else margin.high
        decisions = decide([_values(run, key, margin) for run in judged], prompts, low, high)
        for run, decision in zip(judged, decisions, strict=True):
            found[run.name].append(_of_metric(run.metrics[key], margin, decision, run.noun))
    return tuple(run.model_copy(update={"verdict": _together(run, found[run.name])}) for run in runs)


def _margins(runs: Sequence[Run]) -> list[tuple[str, Margin]]:
    """Every metric of any run that has a margin."""
    found = {key: metric.margin for run in runs for key, metric in run.metrics.items() if metric.margin}
    return list(found.items())


def _values(run: Run, key: str, margin: Margin) -> list[float]:
    """Per image; infinite where identical images have no finite value. Empty where there are none per image."""
    rows = [_row(image, margin) for image in run.images]
    if not all(key in row for row in rows):
        return []
    absent = [math.inf if image.identical else math.nan for image in run.images]
    found = [row[key] for row in rows]
    return [none if value is None else value for value, none in zip(found, absent, strict=True)]


def _row(image: Image, margin: Margin) -> dict[str, float | None]:
    return image.values if margin.on == "value" else image.changes


def _of_metric(metric: Metric, margin: Margin, decision: Decision, noun: str) -> Verdict:
    what = f"{metric.name}{' change' if margin.on == 'change' else ''} {_shown(decision.interval, metric, margin)}"
    asked = margin.describe(metric.unit)
    if decision.outcome == "equivalent":
        return Verdict(outcome="equivalent", text=f"{what}, asked {asked}")
    if decision.outcome == "worse":
        mean = decision.interval.mean
        off = max((margin.low or -math.inf) - mean, mean - (math.inf if margin.high is None else margin.high))
        return Verdict(outcome="worse", text=f"{what}, asked {asked}: beyond it by {off:{metric.digits}}")
    more = decision.more_images
    about = f"about {more} more {noun}s needed" if more else "no number of images can be given that would decide"
    return Verdict(outcome="inconclusive", text=f"{what}, asked {asked}: {about}", more_images=more)


def _shown(interval: Interval, metric: Metric, margin: Margin) -> str:
    digits = ("+" if margin.on == "change" else "") + metric.digits
    limits = "" if math.isnan(interval.low) else f" [{interval.low:{digits}}, {interval.high:{digits}}]"
    return f"{interval.mean:{digits}}{limits}{f' {metric.unit}' if metric.unit else ''}"


def _together(run: Run, found: Sequence[Verdict]) -> Verdict:
    count = len(run.images)
    if run.status == "broken":
        bad = sum(not image.finite for image in run.images)
        text = f"{bad} of {count} {run.noun}s hold NaN or infinity: this checkpoint is broken."
        return Verdict(outcome="broken", text=text)
    if run.status == "identical":
        return Verdict(outcome="identical", text=f"All {count} {run.noun}s are identical to the 16-bit model's.")
    for outcome, opening in _OPENINGS.items():
        named = [each for each in found if each.outcome == outcome]
        if named:
            needed = [each.more_images for each in named if each.more_images is not None]
            text = f"{opening}: {'; '.join(each.text for each in named)}."
            return Verdict(outcome=named[0].outcome, text=text, more_images=max(needed, default=None))
    return Verdict(outcome="inconclusive", text="Inconclusive: no metric with a margin was measured.")


# The worst that any metric says is what is said of the run.
_OPENINGS = {
    "worse": "Worse than 16 bit",
    "inconclusive": "Inconclusive",
    "equivalent": "Equivalent to 16 bit within the margins",
}
