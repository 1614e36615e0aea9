"""Paired quality of every shipped recipe on the embedded pipeline: tiny_quality.json and ../docs/tiny_grid.png.

    python benchmarks/tiny_quality.py [--count 256]

The same prompts and noise go through the 16-bit pipeline and each quantized one; also with modulation left in
16 bit, which separates the core's error from modulation's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image
from torch import Tensor

from fluxq import jobs, tiny
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.base.provenance import commit, versions
from fluxq.eval.fidelity import Interval, fidelity, paired_interval, within_item_intervals
from fluxq.eval.generate import Generated, generate, items_for
from fluxq.recipes.recipe import shipped_recipes

HERE = Path(__file__).parent
SEED = 1000
GRID_ROWS = ("fp8", "nvfp4", "int4")  # below the 16-bit images


@click.command()
@click.option("--prompts", default=256, show_default=True, help="Prompts per recipe.")
@click.option("--seeds", default=4, show_default=True, help="Images per prompt.")
@click.option("--output", type=click.Path(path_type=Path), default=HERE / "tiny_quality.json", show_default=True)
def main(prompts: int, seeds: int, output: Path) -> None:
    """Measure every shipped recipe and write the result file."""
    items = items_for(tiny.PROMPTS[:prompts], prompts * seeds, SEED)  # all prompts with one seed, then the next
    reference = generate(load_pipeline(resolve_model("tiny")), items, tiny.CALL_KWARGS)
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in shipped_recipes():
            measured[name] = measure(name, name, reference, Path(folder), seeds)
            variant = Path(folder) / f"{name}-modulation-16bit.yaml"
            variant.write_text(f"extends: {name}\ncomponents: {{transformer: {{modulation: null}}}}\n")
            measured[variant.stem] = measure(variant.stem, str(variant), reference, Path(folder), seeds)
            click.echo(json.dumps([measured[name].row, measured[variant.stem].row]))
    ranked = sorted(shipped_recipes(), key=lambda name: -measured[name].row["psnr_db"][0])
    result = {
        "commit": commit(),
        "versions": versions(),
        "prompts": prompts,
        "seeds_per_prompt": seeds,
        "first_seed": SEED,
        "recipes": [found.row for found in measured.values()],
        "neighbours": [neighbours(a, b, measured) for a, b in pairwise(ranked)],
    }
    write_json(output, result)
    pictures = [reference.images, *(measured[name].images for name in GRID_ROWS)]
    draw_grid(pictures, output.parent.parent / "docs" / "tiny_grid.png")


@dataclass(frozen=True)
class Measured:
    """One recipe: its row of the result, PSNR per prompt (mean over seeds) and images, uint8 (N, 3, H, W)."""

    row: dict[str, Any]
    psnr_db: list[float]
    images: Tensor


def measure(label: str, recipe: str, reference: Generated, folder: Path, seeds: int) -> Measured:
    """Quantize, generate the same images, compare."""
    output = folder / f"out-{label}"
    record = jobs.quantize(jobs.prepare(jobs.Options(recipe=recipe, output=str(output), check=False)))
    images = generate(load_pipeline(ModelFolder(label, output)), reference.items, tiny.CALL_KWARGS)
    agreement = fidelity(reference, images)
    psnr, sqnr = per_prompt(agreement.psnr_db, seeds), per_prompt(agreement.latent_sqnr_db, seeds)
    part = record["components"][0]
    row = {
        "recipe": label,
        "bits_per_weight": part["bits_per_weight"],
        "bytes_before": part["bytes_before"],
        "bytes_after": part["bytes_after"],
        "psnr_db": limits(paired_interval(psnr)),
        "latent_sqnr_db": limits(paired_interval(sqnr)),
    }
    return Measured(row, psnr, images.images)


def neighbours(better: str, worse: str, measured: dict[str, Measured]) -> dict[str, Any]:
    """Two recipes next to each other in PSNR: the paired difference and both means without the prompts' own spread."""
    first, second = measured[better].psnr_db, measured[worse].psnr_db
    difference = paired_interval([a - b for a, b in zip(first, second, strict=True)])
    within = [limits(interval) for interval in within_item_intervals([first, second])]
    return {"recipes": [better, worse], "difference_db": limits(difference), "within_prompt_psnr_db": within}


def per_prompt(values: Sequence[float], seeds: int) -> list[float]:
    """Mean over seeds of each prompt: prompts are the sample, seeds are nested in them."""
    return torch.tensor(values).reshape(seeds, -1).mean(0).tolist()


def limits(interval: Interval) -> list[float]:
    """[mean, low, high] as the file holds them."""
    return [round(value, 3) for value in (interval.mean, interval.low, interval.high)]


def draw_grid(rows: list[Tensor], target: Path, columns: int = 14, scale: int = 4, gap: int = 4) -> None:
    """One row of images per recipe, the first `columns` of each, every pixel drawn `scale` wide."""
    size = rows[0].shape[-1] * scale
    grid = Image.new("RGB", (columns * (size + gap) - gap, len(rows) * (size + gap) - gap), "white")
    for y, images in enumerate(rows):
        for x, image in enumerate(images[:columns]):
            picture = Image.fromarray(image.permute(1, 2, 0).numpy())
            grid.paste(picture.resize((size, size), Image.Resampling.NEAREST), (x * (size + gap), y * (size + gap)))
    target.parent.mkdir(exist_ok=True)
    grid.save(target, optimize=True)


if __name__ == "__main__":
    main()
