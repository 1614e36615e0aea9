"""Plans of `fluxq auto` beside others of the same bits, on images that the search never saw.

    python -m benchmarks.auto               measure, then write auto.json and the tables of ../docs/auto.md
    python -m benchmarks.auto --tables      the tables again, from the result file

The embedded pipeline in fp32, its layers rounded to nearest, modulation in 16 bit. The job searches (jobs/choosing.py),
as the command does; it measures errors on the first 8 prompts of the pipeline and decides on the next 16 or 32. The
last 256 of its 336 prompts judge, one image each, with noise that nothing else draws. These prompts had judged before,
with other noise, while an earlier rule decided; the rule of today was chosen on prompts 24 to 79. Two plans are
compared on the same images:

    difference = mean over images of PSNR of one - PSNR of the other, in dB, with the 95 % interval of the paired mean

Opponents, each within the same bits:

    weight error             least sum of |W^ - W|², solved exactly
    relative weight error    least sum of |W^ - W|² / |W|² of a unit, solved exactly
    role rule                8 bits for the second layers of feed-forward networks first, then in the model's order
    first and last           8 bits for the first block first, then the last one, the second, the last but one, …
    random plans             the mean of 20: drawn option by option, made cheaper or dearer at random until they fit

The rules go on with what still fits where a unit does not. Of a part of the model every plan is judged, with the last
ALL_PLANS_IMAGES prompts. GOALS and MOST_BEHIND were fixed before anything was measured.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from benchmarks.pages import between, goals_in_words
from benchmarks.sources import sources
from fluxq.base.console import progress
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.calibrate.stand_ins import module_of, replaced
from fluxq.eval.debug.damage import locate
from fluxq.eval.debug.patch import improved
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.metrics.fidelity import fidelity
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.jobs.choosing import choose
from fluxq.jobs.job import JobOptions
from fluxq.jobs.menu import Offer
from fluxq.jobs.search import AutoOptions, Search, search_of
from fluxq.recipes.budget import Choice, Numbers, best, total
from fluxq.recipes.formats import Scheme

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks" / "auto.json", ROOT / "docs" / "auto.md"
BEGIN, END = "<!-- auto: begin -->\n", "<!-- auto: end -->"
FIRST_SEED = 7 << 20  # evaluation begins at 0, calibration at 1 << 20, runs that decide at 2 << 20
PART = """
extends: nvfp4
components:
  transformer:
    exclude: ["transformer_blocks.**"]
"""  # leaves 8 units, of which every plan is tried
ALL_PLANS_IMAGES = 128
MOST_BEHIND = 0.2  # dB
FACTOR = 1.5  # by which predicted and measured NMSE may differ
DELICATE = ("ff_down", "text_ff_down", "mixed_out")  # roles of the rule


@click.command()
@click.option("--prompts", default=256, show_default=True, help="Prompts that judge.")
@click.option("--plans", default=20, show_default=True, help="Random plans of each budget.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
@click.option("--tables", is_flag=True, help="Only write the tables, from the result file.")
def main(prompts: int, plans: int, output: Path, tables: bool) -> None:
    """Judge searches and write the result file, after each row, and the tables; rows of the same code are kept."""
    if not tables:
        torch.set_num_threads(1)
        measure(output, prompts, plans)
    if output == RESULT:
        page = PAGE.read_text(encoding="utf-8")
        write_text(PAGE, between(page, BEGIN, END, tables_of(read_json(RESULT))))


def measure(file: Path, prompts: int, plans: int) -> None:
    """Measure what the file lacks."""
    settings = {"sources": sources(), "prompts": prompts, "first_seed": FIRST_SEED, "random_plans": plans}
    report = read_json(file) if file.is_file() else {}
    if any(report.get(name) != value for name, value in settings.items()):
        report = {"commit": commit(), "versions": versions(), "cpu": cpu_name(), **settings, "rows": []}
    with TemporaryDirectory() as folder:
        judge: Judge | None = None
        for menu, bits in list(GOALS)[len(report["rows"]) :]:
            search = searching(Path(folder), menu, bits)
            judge = judge or Judge(search, prompts)
            report["rows"].append(judged_row(search, judge, plans))
            write_json(file, report)
        if "all_plans" not in report:
            menu = next(iter(GOALS))[0]
            recipe = Path(folder) / "part.yaml"
            write_text(recipe, PART)
            searches = [searching(Path(folder) / "part", menu, bits, recipe) for each, bits in GOALS if each == menu]
            report["all_plans"] = all_plans(searches, Judge(searches[0], min(prompts, ALL_PLANS_IMAGES)))
            write_json(file, report)


def searching(folder: Path, menu: Sequence[str], bits: float, recipe: Path | str = "nvfp4") -> Search:
    """Return the search of the command; those in one folder share the tables of errors of a menu."""
    place = folder / "-".join(menu)
    place.mkdir(parents=True, exist_ok=True)
    output = str(place / f"{bits:g}.yaml")
    options = JobOptions(model="tiny", recipe=str(recipe), dtype="float32", device="cpu", output=output)
    return search_of(options, AutoOptions(bits=bits, menu=tuple(menu)))


@dataclass(frozen=True)
class Judged:
    """Images of a plan beside those in 16 bit.

    psnr, sqnr: of each image and of its final latents, in dB.
    nmse: of the latents of all images.
    """

    psnr: tuple[float, ...]
    sqnr: tuple[float, ...]
    nmse: float


class Judge:
    """The 16-bit pipeline, and its images of prompts that a search did not see."""

    def __init__(self, search: Search, prompts: int) -> None:
        self.pipe, self.call = search.job.load_reference(), search.job.call
        self.items = fresh(search, prompts)
        self.reference = self._images("16 bit")
        self.known: dict[tuple[str, ...], Judged] = {}

    def judged(self, offer: Offer, choice: Choice) -> Judged:
        """Return what a plan does to the images, run once."""
        schemes = {name: scheme for name, scheme in offer.schemes(choice).items() if scheme}
        key = tuple(f"{name} {scheme}" for name, scheme in sorted(schemes.items()))
        if key not in self.known:
            with replaced(self.pipe, {name: self.layer(name, scheme) for name, scheme in schemes.items()}):
                images = self._images("Judging")
            psnr, sqnr = fidelity(self.reference, images)
            plain, error = self.reference.latents.double(), images.latents.double() - self.reference.latents.double()
            self.known[key] = Judged(psnr, sqnr, float(error.square().sum() / plain.square().sum()))
        return self.known[key]

    def layer(self, name: str, scheme: Scheme) -> Any:
        """Return a layer rounded to nearest, as runs of the search have it."""
        return improved(module_of(self.pipe, name), replace(scheme, static_input=False))

    def weight_error(self, name: str, scheme: Scheme | None) -> float:
        """Return the squared error of a layer's weights, 0 in 16 bit."""
        weight = module_of(self.pipe, name).weight.detach()
        rounded = self.layer(name, scheme).quantized_weight.dequantize() if scheme else weight
        return float((rounded.double() - weight.double()).square().sum())

    def _images(self, description: str) -> Generated:
        return generate(self.pipe, self.items, self.call, description=description)


def fresh(search: Search, count: int) -> list[tuple[str, int]]:
    """Return the last prompts of the model, with noise of their own; ValueError if the search sees one of them."""
    prompts = [row.prompt for row in search.job.prompts.rows][-count:]
    known = {getattr(row, "prompt", row) for row, _ in itertools.chain(search.measuring, *search.judging)}
    if len(prompts) < count or not known.isdisjoint(prompts):
        raise ValueError(f"{count} prompts: the model has fewer that the search does not see; give fewer --prompts")
    return [(prompt, FIRST_SEED + index) for index, prompt in enumerate(prompts)]


def judged_row(search: Search, judge: Judge, plans: int) -> dict[str, Any]:
    """Return the plan of a search, judged beside its opponents, as JSON has it."""
    result, choice = decided(search)
    chosen = judge.judged(search.offer, choice)
    return {
        "menu": list(search.options.menu),
        "bits": search.options.bits,
        "proposed_by": next(each["proposed_by"] for each in result["tried"] if each["chosen"]),
        "cost": round(result["cost"], 4),
        "psnr_db": limits(chosen.psnr),
        "latent_sqnr_db": limits(chosen.sqnr),
        "predicted_nmse": result["predicted_nmse"],
        "measured_nmse": result["measured_nmse"],
        "agrees": result["agrees"],
        "nmse": chosen.nmse,
        "tried": [judged_again(search, judge, choice, each) for each in result["tried"]],
        "opponents": {
            name: compared(search, judge, chosen, others) for name, others in opponents_of(search, judge, plans).items()
        },
    }


def decided(search: Search) -> tuple[dict[str, Any], Choice]:
    """Return what the job writes beside its recipe, and its plan."""
    result = choose(search)
    if result is None:
        raise RuntimeError("the search gave no result in this process; run it alone")
    return result, {each["unit"]: each["option"] for each in result["units"]}


def judged_again(search: Search, judge: Judge, choice: Choice, tried: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan that the search ran, with what it does to these images."""
    judged = judge.judged(search.offer, choice | tried["changes"])
    kept = {name: tried[name] for name in ("proposed_by", "chosen", "cost", "predicted_nmse")}
    return kept | {"measured_nmse": tried["nmse"], "nmse": judged.nmse, "psnr_db": limits(judged.psnr)}


def compared(search: Search, judge: Judge, chosen: Judged, plans: Sequence[Choice]) -> dict[str, Any]:
    """Return an opponent as JSON has it; of several plans the mean of each image."""
    judged = [judge.judged(search.offer, plan) for plan in progress(plans, "Judging plans")]
    psnr, sqnr = ([fmean(row) for row in zip(*rows, strict=True)] for rows in zip(*map(values, judged), strict=True))
    return {
        "cost": round(fmean(search.cost(plan) / search.unit[1] for plan in plans), 4),
        "psnr_db": limits(psnr),
        "best_psnr_db": round(max(fmean(each.psnr) for each in judged), 3),
        "better_by_db": limits(differences(chosen.psnr, psnr)),
        "better_by_latent_db": limits(differences(chosen.sqnr, sqnr)),
    }


def all_plans(searches: Sequence[Search], judge: Judge) -> dict[str, Any]:
    """Return the plans of searches in one menu beside the best of all that their bits allow, as JSON has it."""
    offer, costs = searches[0].offer, searches[0].costs.numbers
    choices = [dict(zip(costs, options, strict=True)) for options in itertools.product(*costs.values())]
    judged = [judge.judged(offer, choice) for choice in progress(choices, "Judging all plans")]
    rows = []
    for search in searches:
        chosen = judge.judged(offer, decided(search)[1])
        within = [each for each, choice in zip(judged, choices, strict=True) if search.cost(choice) <= search.limit]
        most = max(within, key=lambda each: fmean(each.psnr))
        row = {"bits": search.options.bits, "plans": len(within), "psnr_db": limits(chosen.psnr)}
        row |= {"best_psnr_db": limits(most.psnr), "behind_db": limits(differences(most.psnr, chosen.psnr))}
        rows.append(row | {"above": sum(fmean(each.psnr) > fmean(chosen.psnr) for each in within)})
    units, options = list(costs), list(searches[0].options.menu)
    return {"units": units, "menu": options, "plans": len(choices), "images": len(judge.items), "rows": rows}


def opponents_of(search: Search, judge: Judge, plans: int) -> dict[str, list[Choice]]:
    """Return name -> plans within the bits of a search."""
    units, costs, limit = search.offer.units, search.costs.numbers, search.limit - search.costs.fixed
    places = {unit: locate(judge.pipe, names[0]) for unit, names in units.items()}
    blocks = from_both_ends(list(dict.fromkeys(block for _, block, _ in places.values())))
    high = next(name for name in EIGHT_BITS if name in search.options.menu)
    errors, relative = weight_errors(search.offer, judge)
    dice = random.Random(0)
    proposed = (
        [solved(errors, costs, limit)],
        [solved(relative, costs, limit)],
        [filled(costs, limit, sorted(units, key=lambda unit: places[unit][0] not in DELICATE), high)],
        [filled(costs, limit, sorted(units, key=lambda unit: blocks.index(places[unit][1])), high)],
        [random_plan(costs, limit, dice) for _ in range(plans)],
    )
    return dict(zip(OPPONENTS, proposed, strict=True))


def weight_errors(offer: Offer, judge: Judge) -> tuple[Numbers, Numbers]:
    """Return unit -> option -> squared error of the weights, and the same by the squares of the weights."""
    errors: dict[str, dict[str, float]] = {unit: {} for unit in offer.units}
    relative: dict[str, dict[str, float]] = {unit: {} for unit in offer.units}
    for unit, names in offer.units.items():
        size = sum(float(module_of(judge.pipe, name).weight.detach().double().square().sum()) for name in names)
        for option in offer.choices[unit]:
            schemes = offer.schemes({unit: option})
            errors[unit][option] = sum(judge.weight_error(name, scheme) for name, scheme in schemes.items())
            relative[unit][option] = errors[unit][option] / size
    return errors, relative


def solved(errors: Numbers, costs: Numbers, limit: float) -> Choice:
    """Return the plan of least error; RuntimeError where none fits."""
    choice = best(errors, costs, limit)
    if choice is None:
        raise RuntimeError(f"no plan fits {limit:.0f} bits, though the search began; measure again")
    return choice


def filled(costs: Numbers, limit: float, order: Sequence[str], high: str) -> Choice:
    """Return the plan that gives units the high format in their order, each that still fits, and the rest nvfp4."""
    choice = dict.fromkeys(costs, LOW)
    for unit in order:
        if total(costs, choice | {unit: high}) <= limit:
            choice[unit] = high
    return choice


def from_both_ends(blocks: Sequence[str]) -> list[str]:
    """Return the first, the last, the second, the last but one, …"""
    ends = itertools.chain.from_iterable(zip(blocks, reversed(blocks), strict=True))
    return list(dict.fromkeys(ends))


def random_plan(costs: Numbers, limit: float, dice: random.Random) -> Choice:
    """Draw an option of each unit; then make units cheaper until the plan fits, and dearer until none fits any more."""
    choice = {unit: dice.choice(list(options)) for unit, options in costs.items()}
    while total(costs, choice) > limit:
        unit = dice.choice([unit for unit in costs if others(costs, choice, unit, -1)])
        choice[unit] = dice.choice(others(costs, choice, unit, -1))
    while dearer := [
        {unit: option}
        for unit in costs
        for option in others(costs, choice, unit, 1)
        if total(costs, choice | {unit: option}) <= limit
    ]:
        choice |= dice.choice(dearer)
    return choice


def others(costs: Numbers, choice: Choice, unit: str, sign: int) -> list[str]:
    """Return the options of a unit that cost more than the chosen one (sign 1), or less (-1)."""
    return [option for option, cost in costs[unit].items() if sign * (cost - costs[unit][choice[unit]]) > 0]


def values(judged: Judged) -> tuple[Sequence[float], Sequence[float]]:
    """Return what images are compared by: PSNR, and SQNR of the latents."""
    return judged.psnr, judged.sqnr


def differences(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return paired differences."""
    return [one - other for one, other in zip(ones, others, strict=True)]


def limits(numbers: Sequence[float]) -> list[float]:
    """Return [mean, low, high] as the file has them."""
    interval = paired_interval(numbers)
    return [round(value, 3) for value in (interval.mean, interval.low, interval.high)]


def goals(report: Mapping[str, Any]) -> dict[str, bool]:
    """Return goal, in words -> whether it is met."""
    met: dict[str, bool] = {}
    for row in report["rows"]:
        where = f"{'/'.join(row['menu'])} at {row['bits']:.1f} bits"
        of_row = GOALS[tuple(row["menu"]), row["bits"]]
        for name, goal in of_row.items():
            met[f"{where}, {name}: {goal}"] = goal.is_met(row["opponents"][name]["better_by_db"])
        met[f"{where}: predicted NMSE within a factor {FACTOR}"] = 1 / FACTOR <= _factor(row) <= FACTOR
    for row in report["all_plans"]["rows"]:
        text = f"of all plans at {row['bits']:.1f} bits: at most {MOST_BEHIND} dB behind the best"
        met[text] = row["behind_db"][0] <= MOST_BEHIND
    return met


def tables_of(report: Mapping[str, Any]) -> str:
    """Return what the page shows of a report."""
    part = report["all_plans"]
    images = f"{report['prompts']} images, 95 % intervals of paired means over images, commit {report['commit']}."
    tried = (
        f"Where all {part['plans']} plans of {len(part['units'])} units can be tried ({' or '.join(part['menu'])}, "
        f"the other units in 16 bit; {part['images']} images):"
    )
    return "\n".join(
        [
            *comparison_table(report),
            "",
            f"dB by which the plan is better than another of the same bits. {images}",
            "",
            tried,
            "",
            *all_plans_table(part),
            "",
            "Errors of the final latents:",
            "",
            *errors_table(report),
            "",
            *goals_in_words(goals(report)),
        ]
    )


def comparison_table(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each search: PSNR, and the difference from each opponent."""
    names = [*OPPONENTS[:-1], f"mean of {report['random_plans']} random plans"]
    lines = [f"| menu | bits | proposed by | PSNR, dB | {' | '.join(f'over {name}' for name in names)} |"]
    lines.append("|" + "---|" * (4 + len(names)))
    for row in report["rows"]:
        cells = ["/".join(row["menu"]), f"{row['bits']:.1f}", ", ".join(row["proposed_by"]), f"{row['psnr_db'][0]:.1f}"]
        cells += [_interval(row["opponents"][name]["better_by_db"]) for name in OPPONENTS]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def all_plans_table(part: Mapping[str, Any]) -> list[str]:
    """Return a line for each budget."""
    lines = ["| bits | plans that fit | PSNR, dB | of the best plan | behind by | better plans |", "|" + "---|" * 6]
    for row in part["rows"]:
        cells = [f"{row['bits']:.1f}", str(row["plans"]), f"{row['psnr_db'][0]:.2f}", f"{row['best_psnr_db'][0]:.2f}"]
        cells += [f"{row['behind_db'][0]:.2f}", str(row["above"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def errors_table(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each search: NMSE predicted, measured by the search and on the images that judge, and its loss.

    The loss is the PSNR of the best plan that the search ran, less that of the plan it chose.
    """
    header = ("menu", "bits", "predicted NMSE", "measured by the search", "measured / predicted", "on these images")
    lines = [f"| {' | '.join(header)} | behind the best plan that ran, dB |", "|" + "---|" * (1 + len(header))]
    for row in report["rows"]:
        numbers = (f"{row[name]:.2e}" for name in ("predicted_nmse", "measured_nmse"))
        cells = ["/".join(row["menu"]), f"{row['bits']:.1f}", *numbers, f"{_factor(row):.2f}", f"{row['nmse']:.2e}"]
        loss = max(each["psnr_db"][0] for each in row["tried"]) - row["psnr_db"][0]
        lines.append(f"| {' | '.join(cells)} | {loss:.2f} |")
    return lines


def _factor(row: Mapping[str, Any]) -> float:
    return row["measured_nmse"] / row["predicted_nmse"]


def _interval(numbers: Sequence[float]) -> str:
    mean, low, high = numbers
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


@dataclass(frozen=True)
class Goal:
    """Least mean difference from an opponent in dB. proven: whether the whole interval has to be above 0, too."""

    least: float
    proven: bool = True

    def is_met(self, difference: Sequence[float]) -> bool:
        """Tell whether [mean, low, high] is enough."""
        mean, low, _ = difference
        return mean >= self.least and (low > 0 or not self.proven)

    def __str__(self) -> str:
        least = f"at least {self.least:+.1f} dB" if self.least else "not below 0"
        return f"{least}, the interval above 0" if self.proven else least


OPPONENTS = ("weight error", "relative weight error", "role rule", "first and last", "random plans")
LOW, EIGHT_BITS = "nvfp4", ("fp8", "int8")  # of the rules
_TWO, _FOUR = ("nvfp4", "fp8"), ("mxfp4", "nvfp4", "int8", "16bit")
_LEVEL, _ABOVE = Goal(0, proven=False), Goal(0)
# (menu, bits) -> goals, in the order of OPPONENTS
GOALS: dict[tuple[tuple[str, ...], float], dict[str, Goal]] = {
    budget: dict(zip(OPPONENTS, row, strict=True))
    for budget, row in {
        (_TWO, 5.0): (_ABOVE, _LEVEL, _LEVEL, _LEVEL, Goal(0.3, proven=False)),
        (_TWO, 5.5): (_ABOVE, _ABOVE, _ABOVE, _ABOVE, Goal(1.0)),
        (_TWO, 6.0): (_LEVEL, _ABOVE, _ABOVE, _ABOVE, Goal(1.2)),
        (_TWO, 7.0): (_ABOVE, _ABOVE, _ABOVE, _ABOVE, Goal(3.5)),
        (_FOUR, 6.0): (Goal(2.0), *[Goal(4.0)] * 4),
    }.items()
}

if __name__ == "__main__":
    main()
