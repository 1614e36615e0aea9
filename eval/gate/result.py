"""The result of a gate: what `--json` prints, a row of a history, a JUnit file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from xml.etree import ElementTree

from fluxq.base.console import code, escaped
from fluxq.eval.gate.decide import ALPHA, Finding, Rule, Verdict
from fluxq.eval.gate.speed import GateSpeed
from fluxq.eval.metrics.schema import Strict, number

SCHEMA_VERSION = 1
MARKDOWN_BEGIN, _SUITE = "### fluxq gate: ", "fluxq gate "  # by which a gate knows its own files, and replaces them
_XML = '<?xml version="1.0" encoding="utf-8"?>\n'
JUNIT_BEGIN = f'{_XML}<testsuites>\n  <testsuite name="{_SUITE}'
GateVerdict = Literal["equivalent", "worse", "cannot tell", "no-op"]


class MetricResult(Strict):
    """A `Finding` and its rule's numbers, in the metric's unit. None for a number that there is not."""

    name: str
    unit: str
    verdict: Verdict
    images: int
    floor: float | None
    distance: float | None
    difference: float | None
    low: float | None
    high: float | None
    limit: float
    margin: float
    c: float
    modes: tuple[float, float, float] | None = None  # better, worse, share of the worse
    more_images: int | None = None
    outliers: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, unit: str, rule: Rule, finding: Finding) -> MetricResult:
        """Return what a finding says."""
        facts: dict[str, Any] = {}
        for key, value in vars(finding).items():
            facts[key] = number(value) if isinstance(value, float) else value
        return cls(name=name, unit=unit, margin=rule.margin, c=rule.c, **facts)


class GateResult(Strict):
    """Verdict of `fluxq gate`, and all that it rests on.

    verdict: "no-op" where a change was expected and there is none. identical: whether all images are the same bits.
    images: looked at. looks: after which it may stop. values: metric -> per image, of A and B; `floor_values` of A and
    its second run.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    fluxq: str
    created: str
    verdict: GateVerdict
    reasons: tuple[str, ...]
    a: dict[str, Any]
    b: dict[str, Any]
    floor: dict[str, Any] | None
    identical: bool
    images: int
    looks: tuple[int, ...]
    alpha: float = ALPHA
    prompts_digest: str
    call: dict[str, Any]
    metrics: dict[str, MetricResult]
    values: dict[str, tuple[float | None, ...]]
    floor_values: dict[str, tuple[float | None, ...]]
    machine: str | None
    versions: dict[str, str]
    seconds: float
    speed: GateSpeed | None = None

    @property
    def more_images(self) -> int | None:
        """About how many more images would decide; None where no number can be given."""
        counts = [metric.more_images for metric in self.metrics.values() if metric.verdict == "cannot tell"]
        return max((count for count in counts if count is not None), default=None)


EXIT_CODES = {"equivalent": 0, "worse": 1, "no-op": 1, "cannot tell": 3}


def unseen_share(images: int) -> float:
    """Return the share of images that may be faulty where none of so many was, with error 5 % (Clopper & Pearson)."""
    return 1 - 0.05 ** (1 / images)


def sentences(key: str, metric: MetricResult) -> str:
    """Return a metric's result in one sentence."""
    unit = f" {metric.unit}" if metric.unit else ""
    if metric.distance is None:
        return f"{metric.name}: an image of B is not finite"
    digits = ".2f" if metric.unit == "dB" else ".4f"
    shown = {name: format(getattr(metric, name) or 0.0, digits) for name in ("difference", "low", "high", "limit")}
    if metric.verdict == "equivalent" and (metric.high or 0.0) <= 0:
        statement = "not farther from A than A is from itself"
    else:
        shown["bound"] = {
            "worse": f"at least {shown['low']}",
            "equivalent": f"at most {shown['high']}",
            "cannot tell": f"{shown['low']} to {shown['high']}",
        }[metric.verdict]
        statement = f"{shown['bound']}{unit} farther from A than A is from itself"
    return f"{key}: {statement}, {shown['limit']}{unit} are allowed"


def markdown(result: GateResult) -> str:
    """Return the verdict and a table of the metrics, as a comment on a change shows them."""
    lines = [
        f"{MARKDOWN_BEGIN}{result.verdict} after {result.images} images",
        "",
        f"A: `{code(result.a['name'])}`, B: `{code(result.b['name'])}`",
        "",
        "| metric | verdict | distance of A from itself | of B from A | beyond the floor | allowed |",
        "|---|---|---|---|---|---|",
    ]
    for key, metric in result.metrics.items():
        bounds = f"{_shown(metric.difference)} [{_shown(metric.low)}, {_shown(metric.high)}]"
        numbers = (_shown(metric.floor), _shown(metric.distance), bounds, _shown(metric.limit))
        lines.append(f"| {key}{f', {metric.unit}' * bool(metric.unit)} | {metric.verdict} | {' | '.join(numbers)} |")
    if (speed := result.speed) is not None:
        shown = ("–" if value is None else f"{value - 1:+.2%}" for value in (speed.ratio, speed.low, speed.high))
        ratio, low, high = shown
        cells = (f"{speed.a:.4g} s", f"{speed.b:.4g} s", f"{ratio} [{low}, {high}]", f"{speed.slower:+.2%}")
        lines.append(f"| speed, median | {speed.verdict} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {escaped(reason)}" for reason in result.reasons)]) + "\n"


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def junit(result: GateResult) -> str:
    """Return a JUnit file (the schema that Jenkins, GitLab and GitHub's actions read): a test case for each metric."""
    suite = f"{_SUITE}{result.a['name']} {result.b['name']}"
    cases = {key: (metric.verdict, sentences(key, metric)) for key, metric in result.metrics.items()}
    if result.verdict == "no-op":
        cases["change"] = ("worse", "; ".join(result.reasons))
    if result.speed is not None:
        cases["speed"] = (result.speed.verdict, result.speed.sentence)
    failed = sum(verdict == "worse" for verdict, _ in cases.values())
    unknown = sum(verdict == "cannot tell" for verdict, _ in cases.values())
    root = ElementTree.Element("testsuites")
    top = ElementTree.SubElement(
        root,
        "testsuite",
        name=suite,
        tests=str(len(cases)),
        failures=str(failed),
        errors="0",
        skipped=str(unknown),
        time=f"{result.seconds:.3f}",
        timestamp=result.created,
    )
    for key, (verdict, sentence) in cases.items():
        case = ElementTree.SubElement(top, "testcase", classname=suite, name=key, time="0")
        if verdict == "worse":
            ElementTree.SubElement(case, "failure", message=sentence).text = "\n".join(result.reasons)
        elif verdict == "cannot tell":
            ElementTree.SubElement(case, "skipped", message=sentence)
        else:
            ElementTree.SubElement(case, "system-out").text = sentence
    ElementTree.indent(root)
    return _XML + ElementTree.tostring(root, encoding="unicode") + "\n"


def numbers(values: Mapping[str, Any]) -> dict[str, tuple[float | None, ...]]:
    """Return per-image values as JSON holds them; None for one that is infinite or NaN."""
    return {key: tuple(map(number, each)) for key, each in values.items()}
