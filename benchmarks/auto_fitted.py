"""Plans of `fluxq auto --from`, put together of fitted layers, beside others of the same bits or bytes.

    python -m benchmarks.auto_fitted             fit, search and judge, then write auto_fitted.json and the table
    python -m benchmarks.auto_fitted --tables    the table of ../docs/auto.md again, from the result file

The embedded pipeline in fp32. `fluxq quantize` fits it in nvfp4-max and in fp8, on the first 64 of its prompts; the job
searches among these layers, on the first 24. The last 256 prompts judge, one image each, with noise that nothing else
draws, and plans are compared as in auto.py. All plans have the first checkpoint's modulation, as the checkpoint that
`--assemble` writes has it. GOALS were fixed before anything was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

import fluxq
from benchmarks.auto import (
    DELICATE,
    FIRST_SEED,
    PAGE,
    ROOT,
    Goal,
    decided,
    differences,
    filled,
    fresh,
    from_both_ends,
    limits,
)
from benchmarks.pages import between
from benchmarks.sources import sources
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.calibrate.errors import SIXTEEN_BIT
from fluxq.calibrate.stand_ins import module_of, replaced
from fluxq.eval.debug.damage import locate
from fluxq.eval.images.generate import generate
from fluxq.eval.metrics.fidelity import fidelity
from fluxq.jobs.job import JobOptions
from fluxq.jobs.menu import stored_size
from fluxq.jobs.search import AutoOptions, Search, search_of
from fluxq.kernels.linear import in_place_of
from fluxq.recipes.budget import Choice, total

RESULT = ROOT / "benchmarks" / "auto_fitted.json"
BEGIN, END = "<!-- auto fitted: begin -->\n", "<!-- auto fitted: end -->"
LOW, HIGH = "nvfp4-max", "fp8"  # recipes, of the formats nvfp4 and fp8
BITS = 6.0


@click.command()
@click.option("--prompts", default=256, show_default=True, help="Prompts that judge.")
@click.option("--tables", is_flag=True, help="Only write the table, from the result file.")
def main(prompts: int, tables: bool) -> None:
    """Judge the searches, and write the result file and the table."""
    if not tables:
        torch.set_num_threads(1)
        with TemporaryDirectory() as folder:
            report = {"commit": commit(), "versions": versions(), "cpu": cpu_name(), "sources": sources()}
            write_json(RESULT, report | measured(Path(folder), prompts))
    page = PAGE.read_text(encoding="utf-8")
    write_text(PAGE, between(page, BEGIN, END, table_of(read_json(RESULT))))


def measured(folder: Path, prompts: int) -> dict[str, Any]:
    """Return PSNR of all plans and differences, as JSON has them."""
    for recipe in (LOW, HIGH):
        fluxq.quantize_pipeline("tiny", recipe, output=folder / recipe, dtype="float32", device="cpu", check=False)
    search = searching(folder, "all.yaml", bits=BITS)
    uniform = {option: dict.fromkeys(search.offer.units, option) for option in search.offer.options}
    sizes = stored_size(search.job, search.offer)
    size = int(total(sizes.numbers, uniform["nvfp4"]) + sizes.fixed) // 8
    plans = {
        _FREE: decided(search)[1],
        _SAME: decided(searching(folder, "size.yaml", size=size))[1],
        **{f"{recipe} everywhere": plan for recipe, plan in zip((LOW, HIGH), uniform.values(), strict=True)},
        **rules(search),
    }
    psnr = judged(search, plans, prompts)
    return {
        "prompts": prompts,
        "first_seed": FIRST_SEED,
        "plans": [
            {"plan": name, "bits": round(search.cost(plan) / search.unit[1], 4), "psnr_db": limits(psnr[name])}
            for name, plan in plans.items()
        ],
        "goals": [
            {"plan": plan, "over": over, "better_by_db": limits(differences(psnr[plan], psnr[over]))}
            for plan, over in GOALS
        ],
    }


def searching(folder: Path, output: str, **budget: Any) -> Search:
    """Return the search of the command among both checkpoints."""
    options = JobOptions(
        model="tiny",
        recipe=str(folder / LOW / "fluxq_plan.json"),
        dtype="float32",
        device="cpu",
        output=str(folder / output),
    )
    return search_of(options, AutoOptions(fitted=(str(folder / LOW), str(folder / HIGH)), **budget))


def rules(search: Search) -> dict[str, Choice]:
    """Return name -> plan of the same bits by a rule, of `RULES`."""
    units, costs, limit = search.offer.units, search.costs.numbers, search.limit - search.costs.fixed
    pipe = search.job.load_reference()
    places = {unit: locate(pipe, names[0]) for unit, names in units.items()}
    blocks = from_both_ends(list(dict.fromkeys(block for _, block, _ in places.values())))
    orders = (
        sorted(units, key=lambda unit: places[unit][0] not in DELICATE),
        sorted(units, key=lambda unit: blocks.index(places[unit][1])),
    )
    return {name: filled(costs, limit, order, HIGH) for name, order in zip(RULES, orders, strict=True)}


def judged(search: Search, plans: Mapping[str, Choice], prompts: int) -> dict[str, tuple[float, ...]]:
    """Return plan -> PSNR of each image, with the layers that the checkpoint of the plan has."""
    pipe, call, fitted = search.job.load_reference(), search.job.call, search.offer.fitted
    items = fresh(search, prompts)
    reference = generate(pipe, items, call, description="16 bit")
    first, psnr = next(iter(fitted)), dict[str, tuple[float, ...]]()
    for name, plan in plans.items():
        option_of = {layer: option for unit, option in plan.items() for layer in search.offer.units[unit]}
        sources_of = {layer: option_of.get(layer, first) for layer in fitted[first].schemes}
        layers = {
            layer: in_place_of(module_of(pipe, layer), fitted[option].layer(layer))
            for layer, option in sources_of.items()
            if option != SIXTEEN_BIT
        }
        with replaced(pipe, layers):
            psnr[name] = fidelity(reference, generate(pipe, items, call, description=name))[0]
    return psnr


def goals(report: Mapping[str, Any]) -> dict[str, bool]:
    """Return goal, in words -> whether it is met."""
    return {
        f"{each['plan']} over {each['over']}: {goal}": goal.is_met(each["better_by_db"])
        for each, goal in zip(report["goals"], GOALS.values(), strict=True)
    }


def table_of(report: Mapping[str, Any]) -> str:
    """Return what the page shows of a report."""
    lines = ["| plan | bits | PSNR, dB |", "|---|---|---|"]
    for row in report["plans"]:
        mean, low, high = row["psnr_db"]
        lines.append(f"| {row['plan']} | {row['bits']:.2f} | {mean:.2f} [{low:.2f}, {high:.2f}] |")
    images = (
        f"{report['prompts']} images, 95 % intervals over images, of differences paired; commit {report['commit']}."
    )
    lines += ["", images, ""]
    for (text, is_met), each in zip(goals(report).items(), report["goals"], strict=True):
        mean, low, high = each["better_by_db"]
        measured = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}] dB"
        lines.append(f"- {text}; {'met' if is_met else 'missed'}: {measured}")
    return "\n".join(lines)


RULES = ("role rule", "first and last")
_FREE, _SAME = f"`auto --from` at {BITS:g} bits", f"`auto --from` at the bytes of {LOW}"
# (plan, opponent) -> goal
GOALS = {
    (_SAME, f"{LOW} everywhere"): Goal(0, proven=False),
    (_FREE, "role rule"): Goal(1.5),
    (_FREE, "first and last"): Goal(0),
}

if __name__ == "__main__":
    main()
