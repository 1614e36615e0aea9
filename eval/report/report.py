"""The report: one HTML page drawn from a `schema.Report` alone; it opens offline and is readable without JavaScript.

    report.json -> report.html (verdicts, charts, tables, pictures, provenance), report.md (without charts and pictures)

Several evaluations against the same 16-bit images become one report (`merge`), whose runs are compared image by image.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fluxq.base.files import write_text
from fluxq.base.output import seal
from fluxq.eval.debug.findings import about_shares
from fluxq.eval.metrics import figures
from fluxq.eval.metrics.schema import Comparison, Estimate, Image, Item, Picture, Report, Run
from fluxq.eval.metrics.statistics import clustered_interval, holm, p_value
from fluxq.eval.metrics.verdict import with_verdicts
from fluxq.eval.report.advice import advice
from fluxq.eval.report.charts import (
    Drawing,
    alike,
    cost_charts,
    damage_charts,
    drift_charts,
    frame_chart,
    image_chart,
    javascript,
    stage_chart,
)
from fluxq.eval.report.markdown import facts, markdown
from fluxq.eval.report.summary import (
    CACHES_HEAD,
    CACHES_NOTE,
    CACHES_TITLE,
    caches,
    psnr_of,
    speeds,
    summary,
    summary_metrics,
    undebugged,
    untimed,
)
from fluxq.eval.report.words import GLOSSARY

_PICTURE_BYTES = 11_000_000  # of data URIs on one page; with scripts, charts and tables it stays below 15 MB
_TABLE_IMAGES = 200
_LAYERS = 40  # of each run's table
_SHOWN_ROWS = 3  # of pictures, before more are asked for


def write_report(target: Path, report: Report, job: str = "") -> Path:
    """Write `target`, an .html file, and beside it the same stem as .json and .md, each atomically; returns it.

    job: that the page says it was written by.
    """
    write_text(target.with_suffix(".json"), report.model_dump_json(indent=2) + "\n")
    write_text(target.with_suffix(".md"), seal(markdown(report), ".md"))
    write_text(target, seal(render(report), ".html", job))
    return target


def write_page(target: Path, template: str, job: str, charts: Sequence[Drawing], **values: Any) -> Path:
    """Write another page with its charts, an .html file, atomically; returns it. values: what the template names."""
    specs = {chart.key: chart.spec for chart in charts}
    body = environment().get_template(template).render(specs=specs, script=javascript(), **values)
    write_text(target, seal(body, ".html", job))
    return target


def render(report: Report) -> str:
    """Render the page as one HTML text below 15 MB: scripts, charts and pictures inline, prompts escaped."""
    return environment().get_template("report.html").render(page=_page(report), report=report)


def environment() -> jinja2.Environment:
    """Return the templates of pages, and what they may call on values."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    names = ("figure", "limits", "mark", "plain", "shape", "short", "size", "sizes", "computed")
    names += ("duration", "durations", "share")
    made.filters.update({name: getattr(figures, name) for name in names})
    made.filters["psnr_of"] = psnr_of
    made.filters["quoted"] = shlex.quote
    return made


def merge(reports: Sequence[Report]) -> Report:
    """Merge reports into one of all runs, in the order given; comparisons and verdicts are made anew, over all of them.

    Raises ValueError naming what differs if they were not measured on the same 16-bit images, or if two runs share a
    name. Figures that were measured in different ways (another FID variant) stay, with a warning, and are not drawn
    together.
    """
    first = reports[0]
    for other in reports[1:]:
        _require_same_reference(first, other)
    runs = tuple(run for report in reports for run in report.runs)
    twice = sorted({run.name for run in runs if [other.name for other in runs].count(run.name) > 1})
    if twice:
        raise ValueError(
            f"two runs are called {twice[0]!r}: a run is named after its checkpoint's folder; rename one "
            "of the folders and evaluate it again"
        )
    items = [(item.prompt, item.seed) for item in first.items]
    warnings = dict.fromkeys(text for report in reports for text in report.warnings)
    return first.model_copy(
        update={
            "created": max(report.created for report in reports),
            "noise_floor": "; ".join(dict.fromkeys(report.noise_floor for report in reports)),
            "runs": with_verdicts(runs, first.items),
            "timed": tuple(timed for report in reports for timed in report.timed),
            "comparisons": compare_runs(runs, items),
            "warnings": (*warnings, *_unlike(runs)),
            "provenance": _joined(report.provenance for report in reports),
            "versions": _joined(report.versions for report in reports),
            "command": "\n".join(dict.fromkeys(report.command for report in reports)),
            "time": {", ".join(run.name for run in report.runs): report.time for report in reports},
        }
    )


def compare_runs(runs: Sequence[Run], items: Sequence[tuple[str, int]]) -> tuple[Comparison, ...]:
    """Compare every pair of runs by PSNR of their images: first minus second, prompts resampled, Holm over all pairs.

    Two identical images differ by 0. An image that only one run gives identically has no finite difference and is
    counted in `difference.infinite`. Runs with broken images are left out, as are pairs without two prompts to compare.
    """
    prompts = [prompt for prompt, _ in items]
    whole = [run for run in runs if run.status != "broken"]
    pairs = []
    for first, second in itertools.combinations(whole, 2):
        images = zip(first.images, second.images, strict=True)
        differences = [0.0 if a.psnr == b.psnr else a.psnr - b.psnr for a, b in images]
        p = p_value(differences, prompts)
        if not math.isnan(p):
            difference = Estimate.of(clustered_interval(differences, prompts))
            pairs.append({"first": first.name, "second": second.name, "difference": difference, "p": p})
    corrected = holm([each["p"] for each in pairs])
    return tuple(
        Comparison(**each, metric="psnr", p_holm=p_holm) for each, p_holm in zip(pairs, corrected, strict=True)
    )


def _require_same_reference(first: Report, other: Report) -> None:
    names = " and ".join(", ".join(run.name for run in report.runs) for report in (first, other))
    few, many = sorted((first, other), key=lambda report: len(report.items))
    for label in dict.fromkeys([*first.reference, *other.reference]):
        one, two = first.reference.get(label), other.reference.get(label)
        if one != two and label.startswith("prompts and seeds") and len(few.items) < len(many.items):
            counts = f"{len(few.items)} and {len(many.items)} {first.noun}s"
            again = f"fluxq eval {shlex.quote(few.runs[0].checkpoint)} --count {many.protocol.count}"
            raise ValueError(f"{names} were measured on {counts}; evaluate both on as many: {again}")
        if one != two:
            raise ValueError(
                f"{names} were not measured on the same 16-bit images: {label} is {one} and {two}; evaluate both with "
                "the same model, prompts, seeds and call"
            )
    if first.items != other.items:
        raise ValueError(f"{names} were measured on different prompts or seeds; evaluate both on the same")


def _unlike(runs: Sequence[Run]) -> list[str]:
    """Return a warning for each metric that not all runs measured alike."""
    warnings = []
    for row in summary_metrics(runs):
        measured = [cell for cell in row.cells if cell is not None and cell.value is not None]
        if not alike(measured):
            hows = dict.fromkeys(f"{each.how}, {figures.count([each.value])} {runs[0].noun}s" for each in measured)
            opening = f"{measured[0].name} was not measured alike in all runs and does not compare"
            warnings.append(f"{opening}: {'; '.join(hows)}")
    return warnings


def _joined(tables: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return label -> text; texts that differ are all given."""
    texts: dict[str, dict[str, None]] = {}
    for table in tables:
        for label, text in table.items():
            texts.setdefault(label, {})[text] = None
    return {label: " · ".join(each) for label, each in texts.items()}


# ---------------------------------------------------------------------------------------------------------------------
# values of the template besides the report


def _page(report: Report) -> dict[str, Any]:
    runs = report.runs
    kept = _pictures_kept(runs)
    timed = speeds(report)
    charts: dict[str, list[Any]] = {
        "cost": cost_charts(report) if len(runs) > 1 else [],
        "images": list(filter(None, (image_chart(report), frame_chart(report)))),
        "drift": drift_charts(report),
        "damage": [damage_charts(i, run.debug) if run.debug else [] for i, run in enumerate(runs)],
        "stages": [stage_chart(i, speed) for i, (_, speed) in enumerate(timed)],
    }
    shown = [*charts["cost"], *charts["images"], *charts["drift"], *itertools.chain(*charts["damage"])]
    shown += filter(None, charts["stages"])
    metrics = summary_metrics(runs)
    return {
        "advice": advice(report),
        "summary": summary(report),
        "caches": caches(report),
        "caches_title": CACHES_TITLE,
        "caches_head": CACHES_HEAD,
        "caches_note": CACHES_NOTE,
        "sections": SECTIONS,
        "charts": charts,
        "specs": {chart.key: chart.spec for chart in shown},
        "script": javascript() if shown else "",
        "choices": {key: name for chart in charts["cost"] for key, name in chart.choices.items()},
        "facts": [facts(run) for run in runs],
        "metrics": [row for row in metrics if row.count],
        "unmeasured": [row for row in metrics if row.missing],
        "speeds": timed,
        "untimed": untimed(report),
        "undebugged": undebugged(report),
        "about_shares": [about_shares(run.debug.layers[:_LAYERS]) if run.debug else "" for run in runs],
        "groups": _picture_groups(report, kept),
        "pictures_kept": kept,
        "pictures_full": max((len(group) for run in runs if run.wall for group in run.wall.groups.values()), default=0),
        "wall": next((run.wall for run in runs if run.wall is not None), None),
        "image_rows": _image_rows(report),
        "time": list(_flat(report.time)),
        "run_provenance": _run_provenance(runs),
        "glossary": GLOSSARY,
    }


def _pictures_kept(runs: Sequence[Run]) -> int:
    """Return the number of pictures of each group that fit on the page, 0 if not one of each fits."""
    walls = [run.wall for run in runs if run.wall is not None]
    groups = [group for each in walls for group in each.groups.values()]
    for count in range(max(map(len, groups), default=0), 0, -1):
        total = sum(_bytes(picture) for group in groups for picture in group[:count])
        if total <= _PICTURE_BYTES:
            return count
    return 0


def _bytes(picture: Picture) -> int:
    return sum(map(len, (picture.reference, picture.quantized, picture.difference, picture.motion or "")))


def _picture_groups(report: Report, kept: int) -> list[tuple[str, list[dict[str, Any]], int]]:
    """Return the groups of all runs' walls: a row for each item, with the pictures of all runs that have it.

    Of each group its title, its rows, and how many of them are seen at once, the rest when asked for.
    """
    walls: dict[str, dict[int, Picture]] = {run.name: {} for run in report.runs}
    groups: dict[str, dict[int, None]] = {}
    for run in report.runs:
        for name, pictures in (run.wall.groups if run.wall else {}).items():
            for picture in pictures[:kept]:
                walls[run.name][picture.index] = picture
                groups.setdefault(name, {})[picture.index] = None
    shown = []
    for name, indices in groups.items():
        rows = [row for index in indices for row in _picture_rows(report, walls, index)]
        rows.sort(key=lambda row: sum(shot["picture"] is None for shot in row["shots"]))  # whole rows first
        if rows:
            shown.append((PICTURE_GROUPS.get(name, name), rows, 0 if shown else _SHOWN_ROWS))
    return shown


def _picture_rows(report: Report, walls: Mapping[str, Mapping[int, Picture]], index: int) -> list[dict[str, Any]]:
    """Return an item with its 16-bit picture and a shot of every run, whose picture may be None.

    Several rows of a video of which runs show different frames, each with its own worst one.
    """
    shots = []
    for run in report.runs:
        picture, gain = walls[run.name].get(index), run.wall.gain if run.wall else 1
        shots.append({"run": run, "gain": gain, "picture": picture, "image": run.images[index]})
    pictures = [shot["picture"] for shot in reversed(shots) if shot["picture"] is not None]
    shown = {picture.frames: picture.reference for picture in pictures}
    rows = []
    for frames, reference in shown.items():
        pictured = [shot for shot in shots if len(shown) == 1 or (shot["picture"] and shot["picture"].frames == frames)]
        rows.append({"item": report.items[index], "reference": reference, "shots": pictured, "frames": frames})
    return rows


def _image_rows(report: Report) -> list[tuple[Item, list[Image]]]:
    """Return every image of every run, worst first by the first run; of very many, the worst."""
    rows = [(item, [run.images[index] for run in report.runs]) for index, item in enumerate(report.items)]
    return sorted(rows, key=lambda row: -math.inf if math.isnan(row[1][0].psnr) else row[1][0].psnr)[:_TABLE_IMAGES]


def _run_provenance(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return label and text; what is the same in all runs is said once, and of the runs of one checkpoint too."""
    rows = []
    for label in dict.fromkeys(label for run in runs for label in run.provenance):
        texts = {(run.checkpoint, run.provenance[label]): None for run in runs if label in run.provenance}
        if len({text for _, text in texts}) == 1 and all(label in run.provenance for run in runs):
            rows.append((label, runs[0].provenance[label]))
        else:
            rows += [(f"{label}, {name}", text) for name, text in texts]
    return rows


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{path}, {key}" if path else str(key))
    else:
        yield path.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# place on the page -> its heading, in the navigation too
SECTIONS = {
    "quality": "Quality",
    "cost": "Quality and cost",
    "pictures": "Pictures",
    "steps": "Along the denoising steps",
    "layers": "Where it breaks",
    "speed": "Speed",
    "words": "Glossary",
    "provenance": "Provenance",
}

# group of a wall -> its title on the page
PICTURE_GROUPS = {
    "all": "Worst first",
    "worst": "Worst by PSNR",
    "median": "Median by PSNR",
    "random": "Drawn by seed from all",
}
