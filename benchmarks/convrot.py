"""Rotations before int8, side by side: Hadamard's regular matrix and Sylvester's, block sizes, centring.

    python -m benchmarks.convrot                writes convrot.json and the table in ../docs/exchange.md
    python -m benchmarks.convrot --tables       only the table

Drawn layers (layers/synthetic.py): SQNR of a layer's output on tokens that nothing else saw. The embedded pipeline, and
the same with outliers (rescaled.py): paired SQNR of the final latents. K of its Linears is 128, 512 and 640, so that
blocks of 256 are 64 in most of them; on drawn layers all are as they are called.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import yaml

from benchmarks.layers.compare import COMPONENT, MADE_BY, Row, Synthetic, measure
from benchmarks.pages import between
from benchmarks.rescaled import write_rescaled
from benchmarks.tiny_quality import SEED, limits
from fluxq import tiny
from fluxq.base.console import progress
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.eval.images.generate import generate
from fluxq.eval.images.protocols import items_of
from fluxq.eval.metrics.fidelity import fidelity
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.jobs import making
from fluxq.recipes.devices import find_device
from fluxq.recipes.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "convrot.json", ROOT / "docs" / "exchange.md"
PLAIN = {"transforms": [], "rounding": {"method": "rtn", "scales": "amax"}}
CENTRED = PLAIN | {"transforms": ["center"]}
SIZES = {"regular": (16, 64, 256), "sylvester": (16, 64, 128)}
GPU, TOKENS = "h200", 4608


def settings() -> dict[str, dict[str, Any]]:
    """Name of each row -> the recipe's keys over int8-convrot's, whose rows without transforms see no data."""
    rows: dict[str, dict[str, Any]] = {"int8 rtn": _recipe(PLAIN | {"hadamard": None}, "rtn")}
    for kind, sizes in SIZES.items():
        for size in sizes:
            rows[f"{kind} {size} rtn"] = _recipe(PLAIN | {"hadamard": {"kind": kind, "size": size}}, "rtn")
    for kind, sizes in SIZES.items():
        centred = CENTRED | {"hadamard": {"kind": kind, "size": sizes[-1]}}
        rows[f"{kind} {sizes[-1]}, centred"] = _recipe(centred, "balanced")
    feedback = _recipe(PLAIN | {"rounding": {"method": "gptq", "scales": "search"}}, "balanced")
    return rows | {"regular 256, GPTQ": feedback} | {name: {"extends": name} for name in ("int8", "int8-convrot")}


def _recipe(part: Mapping[str, Any], profile: str) -> dict[str, Any]:
    return {"extends": "int8-convrot", "profile": profile, "compat": "full", "components": {COMPONENT: dict(part)}}


@click.command()
@click.option("--prompts", default=32, show_default=True, help="Images of each pipeline.")
@click.option("--drawings", default=3, show_default=True, help="Of each drawn layer.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
@click.option("--tables", is_flag=True, help="Only write the table, from the result file.")
def main(prompts: int, drawings: int, output: Path, tables: bool) -> None:
    """Measure every row and write the result file and the table."""
    if not tables:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            files = written(Path(folder))
            layers = drawn_layers(files, drawings)
            outliers = write_rescaled(Path(tiny.path()), Path(folder) / "tiny-with-outliers")
            latents = {
                name: pipeline(files, model, prompts) for name, model in (("tiny", "tiny"), ("outliers", outliers))
            }
        rows = [{"row": name, "layers_db": layers[name], **{at: latents[at][name] for at in latents}} for name in files]
        over = {at: differences(latents[at]) for at in latents}
        about = {"commit": commit(), "versions": versions(), "cpu": cpu_name(), "threads": 1}
        write_json(output, about | {"images": prompts, "drawings": drawings, "rows": rows, "over_int8_db": over})
    if output == RESULT:
        page = PAGE.read_text(encoding="utf-8")
        write_text(PAGE, between(page, "<!-- convrot: begin -->\n", "<!-- convrot: end -->", table(read_json(output))))


def written(folder: Path) -> dict[str, str]:
    """Name of each row -> its recipe's file."""
    files = {}
    for name, settings_of in settings().items():
        files[name] = str(folder / f"{name.replace(' ', '_').replace(',', '')}.yaml")
        write_text(Path(files[name]), yaml.safe_dump(settings_of))
    return files


def drawn_layers(files: Mapping[str, str], drawings: int) -> dict[str, dict[str, float]]:
    """Row -> family of layers -> mean SQNR of the output, dB."""
    rows = [Row("int8-int8", name, load_recipe(file)[1]) for name, file in files.items()]
    source, found = Synthetic(drawings, 512, "cpu"), {row.name: {family: [] for family in MADE_BY} for row in rows}
    planned = {row: source.planned(row.recipe) for row in rows}
    for batch in source.batches(planned):
        for case in batch:
            for row in rows:
                for one in measure(row, planned[row][case.group], case, find_device(GPU), TOKENS):
                    found[row.name][case.column].append(one.db)
    return {name: {at: round(statistics.mean(db), 2) for at, db in by.items()} for name, by in found.items()}


def pipeline(files: Mapping[str, str], model: Any, prompts: int) -> dict[str, list[float]]:
    """Row -> SQNR of the final latents of each image, dB, beside those of 16 bit."""
    items = items_of(tiny.PROMPTS[:prompts], prompts, first_seed=SEED)
    reference = generate(load_pipeline(resolve_model(str(model))), items, tiny.CALL_KWARGS)
    found = {}
    for name, file in progress(list(files.items()), "Comparing"):
        with tempfile.TemporaryDirectory() as folder:
            options = making.JobOptions(model=str(model), recipe=file, output=f"{folder}/made", check=False)
            making.quantize(making.job_of(options))
            images = generate(load_pipeline(ModelFolder(name, Path(folder) / "made")), items, tiny.CALL_KWARGS)
        found[name] = [round(value, 3) for value in fidelity(reference, images)[1]]
        click.echo(f"{name}: {statistics.mean(found[name]):.2f} dB")
    return found


def differences(latents: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Fitted and data-free convrot over int8 of the same kind: paired difference with its 95 % interval, dB."""
    pairs = (("int8-convrot", "int8"), ("regular 256 rtn", "int8 rtn"))
    return {
        name: limits(paired_interval([a - b for a, b in zip(latents[name], latents[other], strict=True)]))
        for name, other in pairs
    }


def table(found: Mapping[str, Any]) -> str:
    """The table in docs/exchange.md."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    families = list(MADE_BY)
    yield f"| row | {' | '.join(f'drawn: {name}' for name in families)} | embedded: latents | with outliers: latents |"
    yield "|---" * (len(families) + 3) + "|"
    for row in found["rows"]:
        cells = [f"{row['layers_db'][name]:.1f}" for name in families]
        cells += [f"{statistics.mean(row[at]):.1f}" for at in ("tiny", "outliers")]
        yield f"| {row['row']} | {' | '.join(cells)} |"
    yield ""
    for at, words in (("tiny", "the embedded pipeline"), ("outliers", "the same with outliers")):
        for name, other in (("int8-convrot", "int8"), ("regular 256 rtn", "int8 rtn")):
            mean, low, high = found["over_int8_db"][at][name]
            yield f"- {name} over {other}, {words}: {mean:+.2f} dB [{low:+.2f}, {high:+.2f}]"
    yield ""
    yield f"{found['images']} images, {found['drawings']} drawings of each layer, commit {found['commit']}."


if __name__ == "__main__":
    main()
