"""Paired quality of every shipped recipe on the embedded pipeline: writes tiny_quality.json beside this file.

    python benchmarks/tiny_quality.py [--count 256]

The same prompts and noise go through the 16-bit pipeline and each quantized one; also with modulation left in
16 bit, which separates the core's error from modulation's.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click

from fluxq import jobs, tiny
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.eval.fidelity import fidelity, paired_interval
from fluxq.eval.generate import Generated, generate, items_for
from fluxq.recipes.recipe import shipped_recipes

HERE = Path(__file__).parent
SEED = 1000


@click.command()
@click.option("--count", default=256, show_default=True, help="Images per recipe.")
@click.option("--output", type=click.Path(path_type=Path), default=HERE / "tiny_quality.json", show_default=True)
def main(count: int, output: Path) -> None:
    """Measure every shipped recipe and write the result file."""
    items = items_for(tiny.PROMPTS, count, SEED)
    reference = generate(load_pipeline(resolve_model("tiny")), items, tiny.CALL_KWARGS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in shipped_recipes():
            rows.append(measure(name, name, reference, Path(folder)))
            variant = Path(folder) / f"{name}-modulation-16bit.yaml"
            variant.write_text(f"extends: {name}\ncomponents: {{transformer: {{modulation: null}}}}\n")
            rows.append(measure(variant.stem, str(variant), reference, Path(folder)))
            click.echo(json.dumps(rows[-2:]))
    result = {"commit": commit(), "versions": jobs.versions(), "images": count, "first_seed": SEED, "recipes": rows}
    write_json(output, result)


def measure(label: str, recipe: str, reference: Generated, folder: Path) -> dict[str, Any]:
    """Quantize, generate the same images, compare."""
    output = folder / f"out-{label}"
    record = jobs.quantize(jobs.prepare(jobs.Options(recipe=recipe, output=str(output), check=False)))
    images = generate(load_pipeline(ModelFolder(label, output)), reference.items, tiny.CALL_KWARGS)
    agreement = fidelity(reference, images)
    psnr, sqnr = paired_interval(agreement.psnr_db), paired_interval(agreement.latent_sqnr_db)
    part = record["components"][0]
    return {
        "recipe": label,
        "bits_per_weight": part["bits_per_weight"],
        "bytes_before": part["bytes_before"],
        "bytes_after": part["bytes_after"],
        "psnr_db": [round(value, 3) for value in (psnr.mean, psnr.low, psnr.high)],
        "identical_images": psnr.infinite,
        "latent_sqnr_db": [round(value, 3) for value in (sqnr.mean, sqnr.low, sqnr.high)],
    }


def commit() -> str:
    """The commit measured, with a mark if files had changed."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
