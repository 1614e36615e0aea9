"""Lists of steps beside fewer steps and the caches of diffusers, at equal or more compute.

    python -m benchmarks.steps               measure, then write steps.json, the tables, the picture
    python -m benchmarks.steps --tables      the tables again, from the result file

The embedded pipeline in fp32, 28 steps; in 16 bit, and its layers rounded to nearest in fp8 and in nvfp4. A list is
made as `fluxq.skip_steps(pipe, compute=…)` makes it, in 16 bit, of the first 24 of its prompts; it is the list of all
three, and beside it stands what one of the quantized pipeline's own does. The last 256 prompts judge (128 of them the
quantized pipelines), one image each, with noise that nothing else draws. Images are compared with those that the same
pipeline makes with all steps, so that what is seen is what leaving out costs:

    difference = mean over images of PSNR with the list - PSNR with another way, in dB, 95 % interval of the paired mean

One wrong level in one value of an image is the least that PSNR counts: identical images have that much.

What a way computes is measured: multiplications of Linears in the blocks, by those of all steps. Each cache has a grid
of settings. On the first SCANNED images those that compute at least as much as the list are found, of them those that
compute least, and of these the one nearest to all steps, which is the opponent. What has to be met (`goals`) was fixed
before anything was measured.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
import diffusers
import torch

import fluxq
from benchmarks.pages import between, goals_in_words
from benchmarks.sources import sources
from benchmarks.tiny_quality import draw_grid
from fluxq import tiny
from fluxq.base.console import first_line, progress
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.calibrate.prompts import load_prompts
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.metrics.fidelity import psnr
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.recipes.step_list import StepList
from fluxq.runtime.step_caches import CACHES as STEP_CACHES
from fluxq.runtime.step_caches import counted
from fluxq.runtime.step_trials import FORMS, IMAGES, measured_steps

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks" / "steps.json", ROOT / "docs" / "steps.md"
PICTURE = ROOT / "docs" / "steps_grid.png"
BEGIN, END = "<!-- steps: begin -->\n", "<!-- steps: end -->"
STEPS, COMPUTED = 28, (15, 11, 9)
KINDS = ("16 bit", "fp8", "nvfp4")
FIRST_SEED = 11 << 20  # evaluation begins at 0, calibration at 1 << 20, lists of steps at 5 << 20
SCANNED = 8
SHARE = {"16 bit": 1.0, "fp8": 0.5, "nvfp4": 0.5}  # of the prompts
OVER_FEWER, OVER_CACHES, FACTOR, ADDS = 6.0, 1.5, 2.5, 1.3
FLOW = {
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
}


@click.command()
@click.option("--prompts", default=256, show_default=True, help="Prompts that judge.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
@click.option("--tables", is_flag=True, help="Only write the tables, from the result file.")
def main(prompts: int, output: Path, tables: bool) -> None:
    """Judge lists and write the result file, after each part, and the tables; parts of the same code are kept."""
    if not tables:
        torch.set_num_threads(1)
        measure(output, prompts)
    for page, table in TABLES.items() if output == RESULT else ():
        write_text(page, between(page.read_text(encoding="utf-8"), BEGIN, END, table(read_json(RESULT))))


def measure(file: Path, prompts: int) -> None:
    """Measure what the file lacks."""
    settings = {"sources": sources(), "prompts": prompts, "first_seed": FIRST_SEED}
    report = read_json(file) if file.is_file() else {}
    if any(report.get(name) != value for name, value in settings.items()):
        report = {"commit": commit(), "versions": versions(), "cpu": cpu_name(), **settings, "rows": []}
    folder = resolve_model("tiny")
    items = [(prompt, FIRST_SEED + index) for index, prompt in enumerate(tiny.PROMPTS[-prompts:])]
    if not {prompt for prompt, _ in items}.isdisjoint(tiny.PROMPTS[: 2 * IMAGES]):
        raise ValueError(f"{prompts} prompts: the model has fewer that the lists do not see; give fewer --prompts")
    plain = load_pipeline(folder, "float32")
    if "lists" not in report:
        report["lists"] = {KINDS[0]: made_lists(plain, folder)}
        report["settings"] = scanned(plain, items[:SCANNED])
        write_json(file, report)
    whole = images_of(plain, items)
    for kind in KINDS[len({row["kind"] for row in report["rows"]}) :]:
        some = items[: round(SHARE[kind] * prompts)]
        with pipeline_of(kind, plain) as pipe:
            if kind not in report["lists"]:
                report["lists"][kind] = made_lists(pipe, folder)
            report["rows"] += judged(kind, pipe, some, first_of(whole, len(some)), report)
        write_json(file, report)
    if "held_out" not in report:
        report["held_out"] = held_out(plain, items[: 4 * SCANNED])
        write_json(file, report)
    draw(plain, items[:14], report, file.with_name("steps_grid.png") if file != RESULT else PICTURE)


def made_lists(pipe: Any, folder: ModelFolder) -> list[dict[str, Any]]:
    """Return the list of each number of computed steps, with what was predicted and measured of all orders."""
    trials = measured_steps(pipe, ("transformer",), load_prompts("default", folder), CALL)
    lists = []
    for count in COMPUTED:
        best = trials.best(count)
        tried = [
            {
                "order": t.steps.order,
                "fitted": bool(t.steps.fitted),
                "predicted": t.predicted,
                "measured": t.error,
            }
            for t in trials.tried[-FORMS:]
        ]
        lists.append(
            {"list": best.steps.to_dict(), "predicted": best.predicted, "measured": best.error, "tried": tried}
        )
    return lists


@contextmanager
def pipeline_of(kind: str, plain: Any) -> Iterator[Any]:
    """Yield the pipeline in 16 bit, or with its layers rounded to nearest."""
    if kind == "16 bit":
        yield plain
        return
    with TemporaryDirectory() as folder:
        checkpoint = fluxq.quantize_pipeline("tiny", kind, profile="rtn", check=False, output=f"{folder}/{kind}")
        yield load_pipeline(ModelFolder(kind, checkpoint.path), "float32")


def judged(kind: str, pipe: Any, items: Items, whole: Generated, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each number of computed steps: the list, and what it is better by than every other way.

    whole: images in 16 bit with all steps.
    """
    full = whole if kind == "16 bit" else images_of(pipe, items)
    alone, rows = nmse(whole, full), []
    ran: dict[tuple[str, str], tuple[Generated, float]] = {}
    for index, count in enumerate(COMPUTED):
        images = listed_images(pipe, items, report["lists"][KINDS[0]][index])
        own = images if kind == KINDS[0] else listed_images(pipe, items, report["lists"][kind][index])
        listed, others = psnr_of(full, images), {}
        fewer = images_of(pipe, items, num_inference_steps=count)
        others["fewer steps"] = compared(listed, full, fewer, count / STEPS, f"{count} steps")
        for cache, settings in report["settings"].items():
            setting, why_not = opponent_of(settings, count / STEPS)
            if setting and (cache, setting) not in ran:
                ran[cache, setting] = run_cached(pipe, CACHES[cache][setting], items)
            others[cache] = compared(listed, full, *ran[cache, setting], setting) if setting else {"error": why_not}
        rows.append(
            {
                "kind": kind,
                "computed": count,
                "images": len(items),
                "psnr_db": fmean(listed),
                "nmse": nmse(full, images),
                "alone_nmse": alone,
                "together_nmse": nmse(whole, images),
                "first_nmse": nmse(*(first_of(each, round(SHARE[KINDS[-1]] * len(items))) for each in (full, images))),
                "own": {"psnr_db": fmean(psnr_of(full, own)), "nmse": nmse(full, own)},
                "others": others,
            }
        )
    return rows


def listed_images(pipe: Any, items: Items, made: Mapping[str, Any]) -> Generated:
    with fluxq.skip_steps(pipe, StepList.from_dict(made["list"])):
        return images_of(pipe, items)


def compared(listed: Sequence[float], full: Generated, images: Generated, share: float, setting: str) -> dict[str, Any]:
    """Return another way's figures, and what the list is better by."""
    other = psnr_of(full, images)
    interval = paired_interval([a - b for a, b in zip(listed, other, strict=True)])
    better = [interval.mean, interval.low, interval.high]
    return {"setting": setting, "share": share, "psnr_db": fmean(other), "nmse": nmse(full, images), "better": better}


def opponent_of(settings: Mapping[str, Any], share: float) -> tuple[str, str]:
    """Return the setting of a cache that is judged beside a list, and why there is none."""
    shares = {name: each for name, each in settings.items() if not isinstance(each, str)}
    enough = {name: each for name, each in shares.items() if each["share"] >= share - 1e-3}
    if not enough:
        errors = [each for each in settings.values() if isinstance(each, str)]
        return "", (errors or ["no setting computes so much" if shares else "leaves out no step of this pipeline"])[0]
    least = min(each["share"] for each in enough.values())
    alike = {name: each for name, each in enough.items() if each["share"] <= least + 5e-3}
    return max(alike, key=lambda name: alike[name]["psnr_db"]), ""


def scanned(pipe: Any, items: Items) -> dict[str, dict[str, Any]]:
    """Return cache -> setting -> what it computes and its PSNR, or its error; settings that leave out nothing not."""
    full, scans = images_of(pipe, items), dict[str, dict[str, Any]]()
    for cache, settings in progress(CACHES.items(), "Settings of caches"):
        scans[cache] = {}
        for name, config in settings.items():
            try:
                images, share = run_cached(pipe, config, items)
            except Exception as error:  # whatever a cache makes of this model is its row
                scans[cache][name] = f"{type(error).__name__}: {first_line(error)}"
                continue
            if share < 0.999:
                scans[cache][name] = {"share": share, "psnr_db": fmean(psnr_of(full, images))}
    return scans


def run_cached(pipe: Any, config: Callable[[Any], Any], items: Items) -> tuple[Generated, float]:
    """Return images with a cache, and what it computed."""
    with cached(pipe, config), counted([pipe.transformer]) as computed:
        return images_of(pipe, items), computed()


def first_of(images: Generated, count: int) -> Generated:
    return Generated(images.items[:count], images.images[:count], images.latents[:count], images.finite[:count])


@contextmanager
def cached(pipe: Any, config: Callable[[Any], Any]) -> Iterator[None]:
    """Enable a cache meanwhile."""
    pipe.transformer.enable_cache(config(pipe))
    try:
        yield
    finally:
        pipe.transformer.disable_cache()


def images_of(pipe: Any, items: Items, **how: Any) -> Generated:
    return generate(pipe, items, {**CALL, **how}, description="Images")


def psnr_of(full: Generated, images: Generated) -> list[float]:
    """Return the PSNR of each image, in dB; of identical ones what one level in one value leaves."""
    most = 10 * math.log10(255**2 * full.images[0].numel())
    return [min(value, most) for value in psnr(full.images, images.images).tolist()]


def nmse(full: Generated, images: Generated) -> float:
    plain, error = full.latents.double(), images.latents.double() - full.latents.double()
    return float(error.square().sum() / plain.square().sum())


def held_out(pipe: Any, items: Items) -> list[dict[str, Any]]:
    """Return NMSE with a list and with fewer steps, for other schedulers, numbers of steps and guidance scales."""
    rows: list[dict[str, Any]] = []
    euler, prompts = pipe.scheduler, load_prompts("default", resolve_model("tiny"))
    of_28 = measured_steps(pipe, ("transformer",), prompts, CALL).best(COMPUTED[0]).steps

    def row(what: str, steps: StepList | Callable[[], StepList], count: int | None = None, **how: Any) -> None:
        try:
            chosen = steps() if callable(steps) else steps
            full = images_of(pipe, items, **how)
            with fluxq.skip_steps(pipe, chosen) as skipped:
                error = nmse(full, images_of(pipe, items, **how))
                share = skipped.computed / skipped.calls
            total = how.get("num_inference_steps", STEPS)
            fewer = nmse(full, images_of(pipe, items, **how | {"num_inference_steps": round(share * total)}))
            goes_on = _goes_on(chosen.order, bool(skipped.factors))
            rows.append({"what": what, "share": share, "others": goes_on, "nmse": error, "fewer_nmse": fewer})
        except (ValueError, RuntimeError, AssertionError) as why:  # the pipeline refuses schedulers, too
            rows.append({"what": what, "error": first_line(why.__cause__ or why)})

    def own(**how: Any) -> Callable[[], StepList]:
        return lambda: (
            measured_steps(pipe, ("transformer",), prompts, {**CALL, **how})
            .best(round(COMPUTED[0] / STEPS * how.get("num_inference_steps", STEPS)))
            .steps
        )

    for total in (14, 20, 40, 50):
        row(f"{total} steps, the list of {STEPS}", of_28, num_inference_steps=total)
        row(f"{total} steps, a list of its own", own(num_inference_steps=total), num_inference_steps=total)
    for scale in (1.5, 3.0):
        guidance = {"true_cfg_scale": scale, "negative_prompt": [""] * len(items)}
        row(f"guidance of {scale:g} in two calls, the list without", of_28, **guidance)
        row(
            f"guidance of {scale:g} in two calls, a list of its own",
            own(**guidance | {"negative_prompt": ""}),
            **guidance,
        )
    try:
        for name, settings in SCHEDULERS.items():
            pipe.scheduler = getattr(diffusers, name)(**settings)
            row(f"{name}, a list of its own", own())
    finally:
        pipe.scheduler = euler
    pipe.scheduler = type(euler).from_config(euler.config, shift=3.0)
    try:
        row("a shift of 3, the list of 1", of_28)
        row("a shift of 3, a list of its own", own())
    finally:
        pipe.scheduler = euler
    return rows


def draw(pipe: Any, items: Items, report: Mapping[str, Any], target: Path) -> None:
    """Draw images of all steps, of half and a third of them, of fewer steps and of a cache, top to bottom."""
    rows = [images_of(pipe, items).images]
    for index in (0, -1):
        rows.append(listed_images(pipe, items, report["lists"][KINDS[0]][index]).images)
    rows.append(images_of(pipe, items, num_inference_steps=COMPUTED[-1]).images)
    with cached(pipe, CACHES["FirstBlockCache"]["threshold 0.4"]):
        rows.append(images_of(pipe, items).images)
    draw_grid(rows, target)


def goals(report: Mapping[str, Any]) -> dict[str, bool]:
    """Return each goal, and whether it is met."""
    met: dict[str, bool] = {}
    for row in report["rows"]:
        where = f"{row['kind']}, {row['computed']} of {STEPS} steps"
        for name, other in row["others"].items():
            if "better" in other:
                least = OVER_FEWER if name == "fewer steps" else OVER_CACHES
                mean, low, _ = other["better"]
                met[f"{where}: at least +{least:g} dB over {name}, the interval above 0"] = mean >= least and low > 0
        if row["kind"] == "16 bit":
            met[f"{where}: predicted NMSE within a factor {FACTOR:g}"] = 1 / FACTOR <= _factor(report, row) <= FACTOR
        else:
            met[f"{where}: errors add within a factor {ADDS:g}"] = 1 / ADDS <= _added(report, row) <= ADDS
    return met


def tables_of(report: Mapping[str, Any]) -> str:
    """Return what the page shows of a report."""
    return "\n".join(
        [
            *comparison_table(report),
            "",
            f"dB by which the list is better, and what the other computes, by all {STEPS} steps. {_images(report)}, "
            f"95 % intervals of paired means, commit {report['commit']}.",
            "",
            *(f"- {line}" for line in _absent(report)),
            "",
            "NMSE of the final latents:",
            "",
            *errors_table(report),
            "",
            "Other calls, 54 % of the steps computed where the list is its own:",
            "",
            *held_out_table(report),
            "",
            *goals_in_words(goals(report)),
        ]
    )


def readme_table(report: Mapping[str, Any]) -> str:
    """Return a line for each kind: PSNR of lists and of fewer steps, against all steps of the same pipeline."""
    shares = [f"{count} of {STEPS}" for count in COMPUTED]
    lines = ["| layers | " + " | ".join(f"list, {each} | {each.split()[0]} steps" for each in shares) + " |"]
    lines.append("|" + "---|" * (1 + 2 * len(shares)))
    for kind in KINDS:
        rows = [row for row in report["rows"] if row["kind"] == kind]
        cells = [f"{value:.1f}" for row in rows for value in (row["psnr_db"], row["others"]["fewer steps"]["psnr_db"])]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def comparison_table(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind and number of steps."""
    names = [name for name in report["rows"][0]["others"] if any(_better(row, name) for row in report["rows"])]
    lines = [f"| layers | computed | PSNR, dB | {' | '.join(f'over {name}' for name in names)} |"]
    lines.append("|" + "---|" * (3 + len(names)))
    for row in report["rows"]:
        cells = [row["kind"], f"{row['computed'] / STEPS:.2f}", f"{row['psnr_db']:.1f}"]
        for name in names:
            other = row["others"][name]
            cells.append(f"{_interval(other['better'])} at {other['share']:.2f}" if "better" in other else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def errors_table(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind and number of steps: predicted, measured, and together with quantization."""
    header = ("layers", "computed", "others", "predicted", "measured", "measured / predicted", "together / sum of both")
    lines = [f"| {' | '.join(header)} | by a list of its own |", "|" + "---|" * (1 + len(header))]
    for row in report["rows"]:
        made, steps, is_plain = _made(report, row), _made(report, row)["list"], row["kind"] == KINDS[0]
        cells = [row["kind"], f"{row['computed'] / STEPS:.2f}", _goes_on(steps["order"], bool(steps.get("fitted")))]
        cells += [f"{made['predicted']:.2e}" if is_plain else "–", f"{row['nmse']:.2e}"]
        cells += [f"{_factor(report, row):.2f}", "–", "–"] if is_plain else ["–", *_quantized(report, row)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def held_out_table(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each other call."""
    lines = ["| call | computed | others | NMSE | with fewer steps |", "|" + "---|" * 5]
    for row in report["held_out"]:
        if "error" in row:
            lines.append(f"| {row['what']} | refused: {row['error']} | | | |")
            continue
        cells = [
            row["what"],
            f"{row['share']:.2f}",
            row["others"],
            f"{row['nmse']:.1e}",
            f"{row['fewer_nmse']:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _absent(report: Mapping[str, Any]) -> list[str]:
    """Return why caches, or numbers of steps of them, have no figures."""
    lines: dict[str, list[str]] = {}
    for row in report["rows"]:
        for name, other in row["others"].items():
            if "error" in other:
                lines.setdefault(f"{name}: {other['error']}", []).append(f"{row['computed'] / STEPS:.2f}")
    return [f"{line} (at {', '.join(dict.fromkeys(shares))})" for line, shares in lines.items()]


def _images(report: Mapping[str, Any]) -> str:
    numbers = {row["kind"]: row["images"] for row in report["rows"]}
    return ", ".join(f"{count} images of {kind}" for kind, count in numbers.items())


def _better(row: Mapping[str, Any], name: str) -> bool:
    return "better" in row["others"].get(name, {})


def _made(report: Mapping[str, Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    return report["lists"][KINDS[0]][COMPUTED.index(row["computed"])]


def _goes_on(order: int, is_fitted: bool) -> str:
    return "fitted" if is_fitted else f"order {order}"


def _quantized(report: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    return [f"{_added(report, row):.2f}", f"{row['own']['nmse']:.2e}"]


def _factor(report: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    return row["nmse"] / _made(report, row)["predicted"]


def _added(report: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the error of list and quantization together, by the sum of both alone, all against 16 bit.

    Of the same images, which are the first of those of 16 bit.
    """
    plain = next(r for r in report["rows"] if (r["kind"], r["computed"]) == (KINDS[0], row["computed"]))
    return row["together_nmse"] / (plain["first_nmse"] + row["alone_nmse"])


def _interval(numbers: Sequence[float]) -> str:
    mean, low, high = numbers
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _setting(kind: str, value: float, **others: Any) -> Callable[[Any], Any]:
    """Return the function of a pipeline that makes the configuration of a cache that `fluxq eval --cache` judges."""
    return lambda pipe: STEP_CACHES[kind].config(pipe, value, _measured(pipe, kind), **others)  # pyright: ignore[reportOptionalCall]


@functools.cache
def _measured(pipe: Any, kind: str) -> Any:
    """Return what a kind of cache measures beforehand."""
    measure = STEP_CACHES[kind].measure
    return measure and measure(pipe, CALL, (tiny.PROMPTS[0], 0))


def _taylor(kind: str) -> dict[str, Callable[[Any], Any]]:
    return {
        f"every {interval}, from step {begin}, order {order}": _setting(
            kind, interval, disable_cache_before_step=begin, max_order=order
        )
        for interval, begin, order in itertools.product((2, 3, 4, 5), (2, 3), (1, 2))
    }


Items = Sequence[tuple[str, int]]
CALL = {**tiny.CALL_KWARGS, "num_inference_steps": STEPS}
# cache -> setting -> function of the pipeline that makes its configuration
CACHES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "FirstBlockCache": {
        f"threshold {threshold:g}": _setting("first_block", threshold)
        for threshold in (0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4)
    },
    "TaylorSeer": _taylor("taylor"),
    "TaylorSeer lite": _taylor("taylor_lite"),
    "MagCache": {
        f"threshold {threshold:g}, at most {most} in a row, after {kept:g}": _setting(
            "mag", threshold, max_skip_steps=most, retention_ratio=kept
        )
        for threshold, most, kept in itertools.product((0.06, 0.12, 0.24, 1.0), (1, 2, 3, 5), (0.1, 0.2))
    },
    "FasterCache": {f"every {every}": _setting("faster", every) for every in (2, 3, 4)},
    "PAB": {f"every {every}": _setting("pab", every) for every in (2, 3, 4, 8)},
    "SeaCache": {"threshold 0.25": _setting("sea", 0.25)},
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "DPMSolverMultistepScheduler": FLOW,
    "UniPCMultistepScheduler": FLOW,
    "FlowMatchHeunDiscreteScheduler": {},
}

TABLES = {PAGE: tables_of, ROOT / "README.md": readme_table}

if __name__ == "__main__":
    main()
