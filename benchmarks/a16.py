"""Effect of 16-bit activations in a call's first and last steps: a16.json, and the table in ../docs/steps.md.

    python -m benchmarks.a16 [--prompts 256]     measure what the file lacks, then write the table
    python -m benchmarks.a16 --tables           the table again, from the result file

The embedded pipeline in bf16, layers fitted by the shipped recipes; the same prompts and noise go through the 16-bit
pipeline and each quantized one, so that differences are paired. Price: what recipes/cost.py makes of a step of
FLUX.1-dev at 1024x1024 in this recipe, and of one whose activations are not rounded:

    added time = kept / steps · (ms of an a16 step / ms of a step - 1)

The rule that decides whether a recipe ships: an edge must bring, on every chip that has the recipe's own arithmetic,
more decibels a percent of time than the next format does, which is `mxfp8` in place of `nvfp4` (tiny_quality.json).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

import fluxq
from benchmarks.pages import between
from benchmarks.sources import sources
from benchmarks.tiny_quality import COMPONENT, FLUX_DEV, SEED, at_full_size, flux_dev_plan, limits
from benchmarks.tiny_quality import RESULT as QUALITY
from fluxq import tiny
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.eval.images.generate import generate
from fluxq.eval.images.protocols import items_of
from fluxq.eval.metrics.fidelity import fidelity
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.jobs import making
from fluxq.kernels.linear import quant_layers
from fluxq.recipes.cost import cost, forward_pass, weight_only
from fluxq.recipes.devices import find_device
from fluxq.recipes.plan import Plan

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks" / "a16.json", ROOT / "docs" / "steps.md"
BEGIN, END = "<!-- a16: begin -->\n", "<!-- a16: end -->"
RECIPES = ("nvfp4", "nvfp4-max")
STEPS = {8: RECIPES, 28: RECIPES[:1]}  # steps of a call -> recipes
EDGES = ((0, 1), (0, 2), (1, 2), (None, None))  # first and last steps; None: all
GPUS = ("h200", "b200", "rtx5090", "rtx4090")
NATIVE = ("b200", "rtx5090")  # chips that multiply nvfp4
NEXT = ("nvfp4", "mxfp8")  # a format, and that which is the other way to buy quality there


@click.command()
@click.option("--prompts", default=256, show_default=True, help="Prompts, each with one image.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
@click.option("--tables", is_flag=True, help="Only write the table, from the result file.")
def main(prompts: int, output: Path, tables: bool) -> None:
    """Measure every edge of each recipe and write the result file, after each recipe, and the table."""
    if not tables:
        torch.set_num_threads(1)
        measure(output, prompts)
    if output == RESULT:
        write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table(read_json(RESULT))))


def measure(file: Path, prompts: int) -> None:
    """Measure what the file lacks."""
    settings = {"sources": sources(), "prompts": prompts, "first_seed": SEED}
    report = read_json(file) if file.is_file() else {}
    if any(report.get(name) != value for name, value in settings.items()):
        report = {"commit": commit(), "versions": versions(), "cpu": cpu_name(), **settings, "rows": []}
    items = items_of(tiny.PROMPTS[:prompts], prompts, first_seed=SEED)
    known = {(row["recipe"], row["steps"]) for row in report["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        for name in RECIPES:
            wanted = [steps for steps, recipes in STEPS.items() if name in recipes and (name, steps) not in known]
            if not wanted:
                continue
            options = making.JobOptions(recipe=name, output=str(Path(folder) / name), check=False)
            making.quantize(making.job_of(options))
            for steps in wanted:
                report["rows"] += rows_of(name, ModelFolder(name, Path(folder) / name), steps, items)
                write_json(file, report)


def rows_of(name: str, checkpoint: ModelFolder, steps: int, items: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the row without kept steps, then one of each edge."""
    call = {**tiny.CALL_KWARGS, "num_inference_steps": steps}
    reference = generate(load_pipeline(resolve_model("tiny")), items, call, description="16 bit")
    pipe = load_pipeline(checkpoint)
    ms = modelled_ms(name, {path: layer.scheme for path, layer in quant_layers(getattr(pipe, COMPONENT))})
    plain, _ = fidelity(reference, generate(pipe, items, call, description=name))
    rows = [{"recipe": name, "steps": steps, "first": 0, "last": 0, "psnr_db": limits(paired_interval(plain))}]
    for first, last in EDGES:
        first, last = (steps, 0) if first is None or last is None else (first, last)
        with fluxq.keep_steps(pipe, first=first, last=last, components="a16") as kept:
            psnr, _ = fidelity(reference, generate(pipe, items, call, description=f"{name} {kept.steps}"))
        gains = [a - b for a, b in zip(psnr, plain, strict=True)]
        share = kept.calls_in_16_bit / kept.calls
        rows.append(
            {
                "recipe": name,
                "steps": steps,
                "first": first,
                "last": last,
                "psnr_db": limits(paired_interval(psnr)),
                "gain_db": limits(paired_interval(gains)),
                "share_at_16_bit_activations": round(share, 4),
                "added_time_percent": {gpu: round(100 * share * (a16 / own - 1), 2) for gpu, (own, a16) in ms.items()},
            }
        )
    return rows


def modelled_ms(name: str, schemes: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """GPU -> modelled ms of a step of FLUX.1-dev, and of one at 16-bit activations."""
    plan, forward = at_full_size(flux_dev_plan(name), schemes), forward_pass("flux", FLUX_DEV)

    def ms(plan: Plan, gpu: str) -> float:
        return 1e3 * cost(plan, forward, find_device(gpu)).total.seconds["fused"]

    return {gpu: (ms(plan, gpu), ms(weight_only(plan), gpu)) for gpu in GPUS}


def next_format(gpu: str) -> float:
    """Decibels that the next format brings for each percent of modelled time that it adds."""
    rows = {row["recipe"]: row for row in read_json(QUALITY)["recipes"]}
    forward, device = forward_pass("flux", FLUX_DEV), find_device(gpu)
    own, other = (cost(flux_dev_plan(name), forward, device).total.seconds["fused"] for name in NEXT)
    gain = rows[NEXT[1]]["psnr_db"][0] - rows[NEXT[0]]["psnr_db"][0]
    return gain / (100 * (other / own - 1))


def pays(row: Mapping[str, Any]) -> bool:
    """Tell whether an edge brings more for its time than the next format, wherever the recipe is native."""
    return all(row["gain_db"][0] / row["added_time_percent"][gpu] > next_format(gpu) for gpu in NATIVE)


def table(report: Mapping[str, Any]) -> str:
    """That of docs/steps.md."""
    header = ["recipe", "steps", "at 16-bit activations", "paired PSNR, dB", "gain, dB"]
    header += [f"time on {gpu}, modelled" for gpu in GPUS] + [f"dB a percent on {gpu}" for gpu in NATIVE] + ["pays"]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in report["rows"]:
        cells = [f"`{row['recipe']}`", str(row["steps"]), _edge(row), _interval(row["psnr_db"])]
        if "gain_db" in row:
            mean, low, high = row["gain_db"]
            added = row["added_time_percent"]
            cells += [f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]", *(f"{added[gpu]:+.1f} %" for gpu in GPUS)]
            cells += [*(f"{mean / added[gpu]:.2f}" for gpu in NATIVE), "yes" if pays(row) else "no"]
        lines.append(f"| {' | '.join([*cells, *[''] * (len(header) - len(cells))])} |")
    beside = " and ".join(f"{next_format(gpu):.2f} on {gpu}" for gpu in NATIVE)
    lines += ["", f"`{NEXT[1]}` in place of `{NEXT[0]}` brings, dB a percent: {beside}."]
    lines += [f"{report['prompts']} images, 95 % intervals of paired means, commit {report['commit'][:7]}."]
    return "\n".join(lines) + "\n"


def _edge(row: Mapping[str, Any]) -> str:
    if row["first"] == row["steps"]:
        return "all"
    return ", ".join(f"{end} {row[end]}" for end in ("first", "last") if row[end]) or "none"


def _interval(values: Sequence[float]) -> str:
    mean, low, high = values
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    main()
