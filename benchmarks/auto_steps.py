"""`fluxq auto --steps` beside formats alone, and beside fewer steps, at equal modelled time.

    python -m benchmarks.auto_steps             measure, then write auto_steps.json and the tables of ../docs/auto.md
    python -m benchmarks.auto_steps --tables    the tables again, from the result file

The embedded pipeline in fp32, 28 steps, layers rounded to nearest, time modelled on GPU. The jobs search, as the
commands do: among nvfp4, fp8 and 16 bit, on the first prompts of the pipeline. The last 256 prompts judge, one image
each, with noise that nothing else draws, beside the images of the 16-bit pipeline with all 28 steps:

    formats alone    `fluxq auto` under the same budget, all steps computed; nothing where no plan fits
    fewer steps      `fluxq auto` for calls of K steps, each of which may take 28 / K times the budget; 16 bit where all
                     fits so. K rises from the number that `auto --steps` computes until one is a dB worse than another;
                     the best of these by the images that judge is the opponent
    difference       mean over images of PSNR of one - PSNR of the other, in dB, 95 % interval of the paired mean

What list and formats do alone says whether errors add. Goals were fixed before this code measured anything. Tries with
24 of the prompts then led to two rules: numbers of steps are also tried around the best one, and plans are compared by
what their lists are predicted, not by what a dozen images measured of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

import fluxq
from benchmarks.auto import PAGE, ROOT, Goal, decided, differences, fresh, limits
from benchmarks.pages import between, goals_in_words
from benchmarks.sources import sources
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.calibrate.stand_ins import module_of, replaced
from fluxq.eval.debug.patch import improved
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.metrics.fidelity import fidelity
from fluxq.jobs.job import JobOptions
from fluxq.jobs.search import AutoOptions, Search, search_of
from fluxq.recipes.budget import Choice, extremes
from fluxq.recipes.step_list import StepList

RESULT = ROOT / "benchmarks" / "auto_steps.json"
BEGIN, END = "<!-- auto steps: begin -->\n", "<!-- auto steps: end -->"
GPU, STEPS = "rtx5090", 28
MENU = ("nvfp4", "fp8", "16bit")
SHARES = (0.3, 0.65, 0.8)  # of the time of 16 bit with all steps
FIRST_SEED = 13 << 20  # of images that judge
FACTOR, ADDS = 1.5, 1.3
TRIED = ("proposed_by", "chosen", "computed", "cost", "predicted_nmse", "nmse")


@click.command()
@click.option("--prompts", default=256, show_default=True, help="Prompts that judge.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
@click.option("--tables", is_flag=True, help="Only write the tables, from the result file.")
def main(prompts: int, output: Path, tables: bool) -> None:
    """Judge searches and write the result file, after each row, and the tables; rows of the same code are kept."""
    if not tables:
        torch.set_num_threads(1)
        measure(output, prompts)
    if output == RESULT:
        page = PAGE.read_text(encoding="utf-8")
        write_text(PAGE, between(page, BEGIN, END, tables_of(read_json(RESULT))))


def measure(file: Path, prompts: int) -> None:
    """Measure what the file lacks."""
    settings = {"sources": sources(), "prompts": prompts, "first_seed": FIRST_SEED, "gpu": GPU, "steps": STEPS}
    report = read_json(file) if file.is_file() else {}
    if any(report.get(name) != value for name, value in settings.items()):
        report = {"commit": commit(), "versions": versions(), "cpu": cpu_name(), **settings, "rows": []}
    with TemporaryDirectory() as folder:
        judge: Judge | None = None
        for share in SHARES[len(report["rows"]) :]:
            judge = judge or Judge(searching(Path(folder), share, STEPS, lists=True), prompts)
            report["rows"].append(judged_row(Path(folder), share, judge))
            write_json(file, report)


def searching(folder: Path, share: float, count: int, *, lists: bool = False) -> Search:
    """Return the search of the command, for calls of `count` steps that take a share of the time of 16 bit at STEPS."""
    place = folder / f"{count}"
    place.mkdir(parents=True, exist_ok=True)
    call = {"num_inference_steps": count}
    output = str(place / f"{share:g}{'-steps' * lists}.yaml")
    job = JobOptions(model="tiny", dtype="float32", device="cpu", output=output, call=call)
    costs = search_of(job, AutoOptions(gate="latent_sqnr>=30", gpu=GPU, menu=MENU), writes=False).costs
    whole = extremes(costs.numbers)[1] + costs.fixed
    ms = min(share * STEPS / count, 1) * whole
    return search_of(job, AutoOptions(ms=ms, gpu=GPU, menu=MENU, steps=lists))


@dataclass(frozen=True)
class Judged:
    """Images beside those in 16 bit with all steps. psnr: of each, in dB. nmse: of the latents of all."""

    psnr: tuple[float, ...]
    nmse: float


class Judge:
    """The 16-bit pipeline, and its images of prompts that no search sees."""

    def __init__(self, search: Search, prompts: int) -> None:
        self.pipe, self.call = search.job.load_reference(), search.job.call
        self.items = [(prompt, FIRST_SEED + index) for index, (prompt, _) in enumerate(fresh(search, prompts))]
        self.reference = self._images("16 bit")

    def judged(self, search: Search, choice: Choice, steps: StepList | None = None) -> Judged:
        """Return what a plan does to the images, in calls of as many steps as the search's."""
        layers = {
            name: improved(module_of(self.pipe, name), replace(scheme, static_input=False))
            for name, scheme in search.offer.schemes(choice).items()
            if scheme
        }
        with replaced(self.pipe, layers), fluxq.skip_steps(self.pipe, steps) if steps else nullcontext():
            images = self._images("Judging", num_inference_steps=search.job.call["num_inference_steps"])
        plain, error = self.reference.latents.double(), images.latents.double() - self.reference.latents.double()
        return Judged(fidelity(self.reference, images)[0], float(error.square().sum() / plain.square().sum()))

    def _images(self, description: str, **how: Any) -> Generated:
        return generate(self.pipe, self.items, {**self.call, **how}, description=description)


def judged_row(folder: Path, share: float, judge: Judge) -> dict[str, Any]:
    """Return the plan of `auto --steps` under a budget, judged beside its opponents, as JSON has it."""
    search = searching(folder, share, STEPS, lists=True)
    result, choice = decided(search)
    made = result["steps"]
    steps = StepList.from_dict(made["list"]) if made["list"] else None
    chosen = judge.judged(search, choice, steps)
    plain = dict.fromkeys(choice, "16bit")
    alone = {"formats": judge.judged(search, choice).nmse, "list": judge.judged(search, plain, steps).nmse}
    fewer: list[dict[str, Any]] = []
    for count in range(made["computed"], STEPS):
        if not fits(search, count) or (fewer and fewer[-1]["psnr_db"][0] < _best(fewer)["psnr_db"][0] - 1):
            break
        fewer.append(opponent(folder, share, count, chosen, judge))
    weights = {unit["unit"]: unit["weights"] for unit in result["units"]}
    parts = {option: sum(w for unit, w in weights.items() if choice[unit] == option) for option in MENU}
    others = {"fewer steps": _best(fewer)}
    if fits(search, STEPS):
        others["formats alone"] = opponent(folder, share, STEPS, chosen, judge)
    return {
        "share": share,
        "ms": search.limit,
        "cost": result["cost"],
        "computed": made["computed"],
        "of_the_weights": {option: round(part / sum(weights.values()), 4) for option, part in parts.items()},
        "psnr_db": limits(chosen.psnr),
        "predicted_nmse": result["predicted_nmse"],
        "measured_nmse": result["measured_nmse"],
        "nmse": chosen.nmse,
        "alone_nmse": alone,
        "shares": made["shares"],
        "tried": [{name: each[name] for name in TRIED} for each in result["tried"]],
        "others": others,
        "all_fewer": [{name: each[name] for name in ("steps", "cost", "psnr_db")} for each in fewer],
    }


def _best(plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(plans, key=lambda each: each["psnr_db"][0])


def fits(search: Search, count: int) -> bool:
    """Tell whether a plan for calls of `count` steps takes no more time than the budget of a search allows."""
    return (extremes(search.costs.numbers)[0] + search.costs.fixed) * count <= search.limit * STEPS


def opponent(folder: Path, share: float, count: int, chosen: Judged, judge: Judge) -> dict[str, Any]:
    """Return the plan of `fluxq auto` for calls of `count` steps in the same time, judged, as JSON has it."""
    search = searching(folder, share, count)
    is_whole = share * STEPS >= count  # all in 16 bit
    choice = dict.fromkeys(search.offer.units, "16bit") if is_whole else decided(search)[1]
    judged = judge.judged(search, choice)
    return {
        "steps": count,
        "cost": search.cost(choice) * count / STEPS,
        "psnr_db": limits(judged.psnr),
        "nmse": judged.nmse,
        "better_by_db": limits(differences(chosen.psnr, judged.psnr)),
    }


def goals(report: Mapping[str, Any]) -> dict[str, bool]:
    """Return goal, in words -> whether it is met."""
    met: dict[str, bool] = {}
    for row in report["rows"]:
        where = f"{_budget(row)} of the time"
        for name, goal in GOALS.items():
            if name not in row["others"]:
                continue
            met[f"{where}, {name}: {goal}"] = goal.is_met(row["others"][name]["better_by_db"])
        met[f"{where}: predicted NMSE within a factor {FACTOR}"] = 1 / FACTOR <= _factor(row) <= FACTOR
        met[f"{where}: errors of list and formats add within a factor {ADDS}"] = 1 / ADDS <= _added(row) <= ADDS
    return met


def tables_of(report: Mapping[str, Any]) -> str:
    """Return what the page shows of a report."""
    return "\n".join(
        [
            *comparison_table(report),
            "",
            f"Time modelled on {report['gpu']}, by that of {report['steps']} steps in 16 bit; dB by which the plan is "
            f"better than another of no more time. {report['prompts']} images, 95 % intervals of paired means, commit "
            f"{report['commit']}.",
            "",
            "Errors of the final latents:",
            "",
            *errors_table(report),
            "",
            *goals_in_words(goals(report)),
        ]
    )


def comparison_table(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each budget: what is chosen, PSNR, and the difference from each opponent."""
    header = ("time", "computed", "formats, of the weights", "PSNR, dB", *(f"over {name}" for name in GOALS))
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in report["rows"]:
        formats = ", ".join(f"{option} {part:.0%}" for option, part in row["of_the_weights"].items() if part)
        cells = [_budget(row), f"{row['computed']} of {report['steps']}", formats, f"{row['psnr_db'][0]:.1f}"]
        alone = row["others"].get("formats alone")
        cells.append(_interval(alone["better_by_db"]) if alone else "none fits")
        fewer = row["others"]["fewer steps"]
        cells.append(f"{_interval(fewer['better_by_db'])} with {fewer['steps']} steps")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def errors_table(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each budget: NMSE predicted, measured, and together by the sum of list and formats alone."""
    header = ("time", "predicted NMSE", "measured by the search", "measured / predicted", "on these images")
    lines = [f"| {' | '.join(header)} | together / sum of both |", "|" + "---|" * (1 + len(header))]
    for row in report["rows"]:
        numbers = (f"{row[name]:.2e}" for name in ("predicted_nmse", "measured_nmse"))
        cells = [_budget(row), *numbers, f"{_factor(row):.2f}", f"{row['nmse']:.2e}", f"{_added(row):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _budget(row: Mapping[str, Any]) -> str:
    return f"{row['share']:.0%}"


def _factor(row: Mapping[str, Any]) -> float:
    return row["measured_nmse"] / row["predicted_nmse"]


def _added(row: Mapping[str, Any]) -> float:
    return row["nmse"] / (row["alone_nmse"]["formats"] + row["alone_nmse"]["list"])


def _interval(numbers: Sequence[float]) -> str:
    mean, low, high = numbers
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


GOALS = {"formats alone": Goal(10.0), "fewer steps": Goal(3.0)}

if __name__ == "__main__":
    main()
