"""Measure how far vLLM-Omni's own models are from diffusers', by the script of the tests that load both.

    python -m benchmarks.engine_models               writes engine_models.json and the table in ../docs/engines.md
    python -m benchmarks.engine_models --tables      only the table

FLUXQ_VLLM_OMNI_PYTHON names an interpreter that has vLLM-Omni. Models have few blocks and random weights, on one
rank of a CPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.pages import between
from fluxq.base.console import progress
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.integrations.engine import VLLM_OMNI

ROOT = Path(__file__).parents[1]
RESULT, PAGE = Path(__file__).with_suffix(".json"), ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->"
WEIGHTS = "only weights in nvfp4"
SHOWN = {"flux": "FLUX.1", "qwen_image": "Qwen-Image", "z_image": "Z-Image", "wan": "Wan"}


@click.command()
@click.option("--tables", is_flag=True, help="Only write the table, from the result file.")
def main(tables: bool) -> None:
    """Measure, then write the table."""
    if not tables:
        write_json(RESULT, measured())
    page = PAGE.read_text(encoding="utf-8")
    write_text(PAGE, between(page, BEGIN, END, table_of(read_json(RESULT)["families"])))


def measured() -> dict[str, Any]:
    """Return what the script says of every family, model and dtype."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "exchange")]
    import test_plug_ins as tests

    families = {}
    with tempfile.TemporaryDirectory() as folder:
        by_weights = Path(folder, "weights.yaml")
        by_weights.write_text("extends: nvfp4\ncomponents: {transformer: {activations: null}}\n", encoding="utf-8")
        recipes = {recipe: recipe for recipe in tests.RECIPES} | {WEIGHTS: str(by_weights)}
        installed = tests.installed_in(Path(folder))
        for family in progress(SHOWN, "families"):
            models = Path(folder, family)
            tests.write_models(family, models, recipes)
            runs = tests.runs_of(models, recipes)
            said = tests.beside_diffusers(installed, models, runs)
            families[family] = [
                {"model": Path(run["folder"]).name, "dtype": run["dtype"], **found}
                for run, found in zip(runs, said, strict=True)
            ]
    about = {"commit": commit(), "versions": versions(), "cpu": cpu_name(), "vllm-omni": VLLM_OMNI.tried}
    return about | {"families": families}


def table_of(families: Mapping[str, Any]) -> str:
    """Return distances in %, in brackets those of diffusers' own models under noise of the engine's size."""
    lines = ["| | " + " | ".join(SHOWN.values()) + " |", "|---" * (len(SHOWN) + 1) + "|"]
    rows = {(row["dtype"], row["model"]): None for row in families["flux"]}
    for dtype, model in sorted(rows, key=lambda row: row[0]):
        cells = []
        for family in SHOWN:
            row = next(row for row in families[family] if (row["dtype"], row["model"]) == (dtype, model))
            alike = "" if model == "16bit" else f" ({_percent(row['alike'])})"
            cells.append(_percent(row["difference"]) + alike)
        name = "not quantized" if model == "16bit" else model
        lines.append(f"| {name}, {'fp32' if dtype == 'float32' else 'bf16'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}".removeprefix("0") or "0"


if __name__ == "__main__":
    main()
