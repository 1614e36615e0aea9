"""Tests of what the formats cost on the embedded pipeline: their order, and that the committed figures hold it.

Prompts differ far more from each other than fp8 from mxfp8, so order is judged on the same prompts and noise: by
intervals without the prompts' own spread, which do not overlap, and by the paired difference.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.tiny_quality import within_item_intervals
from fluxq import tiny
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.eval.images.generate import generate
from fluxq.eval.images.protocols import items_of
from fluxq.eval.metrics.fidelity import fidelity
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.recipes.recipe import shipped_recipes

COMMITTED = json.loads((Path(__file__).parents[2] / "benchmarks" / "tiny_quality.json").read_text(encoding="utf-8"))
ORDER = ("fp8", "mxfp8", "nvfp4")
PROMPTS, SEEDS = 256, 4


def test_the_committed_result_is_about_every_shipped_recipe() -> None:
    rows = {row["recipe"]: row for row in COMMITTED["recipes"]}
    assert set(shipped_recipes()) <= rows.keys()
    assert COMMITTED["prompts"] >= PROMPTS
    means = [rows[name]["psnr_db"][0] for name in ORDER]
    assert means == sorted(means, reverse=True)


def test_committed_neighbours_differ_by_the_interval_of_their_difference() -> None:
    """Paired on the same prompts; intervals of each alone may touch, as those of fp8 and mxfp8 do by .01 dB."""
    differences = {tuple(found["recipes"]): found for found in COMMITTED["differences"]}
    assert ("fp8", "mxfp8") in differences
    for found in differences.values():
        if set(found["recipes"]) <= set(ORDER):
            assert found["difference_db"][1] > 0


@pytest.mark.parametrize(
    ("better", "worse", "least"),
    [
        ("nvfp4", "nvfp4 rtn", 2.0),
        ("int4", "int4 rtn", 2.0),
        ("nvfp4-max", "nvfp4", 0.0),
        ("nvfp4-max as int8", "nvfp4-max", 0.0),
    ],
)
def test_fitting_gains_what_it_should(better: str, worse: str, least: float) -> None:
    """Paired PSNR on the committed images, by the whole interval; at equal bits but for a few vectors."""
    found = next(row for row in COMMITTED["differences"] if row["recipes"] == [better, worse])
    assert found["difference_db"][1] > least
    rows = {row["recipe"]: row for row in COMMITTED["recipes"]}
    if worse.endswith("rtn"):
        assert rows[better]["bits_per_weight"] - rows[worse]["bits_per_weight"] < 0.42


@pytest.mark.parametrize(("recipe", "most"), [("fp8", 2.0), ("nvfp4", 1.0)])
def test_attention_in_fp8_costs_more_than_nothing_and_little(recipe: str, most: float) -> None:
    """Paired PSNR on the committed images; nothing else of the two rows differs."""
    pair = [recipe, f"{recipe} + fp8 attention"]
    found = next(row for row in COMMITTED["differences"] if row["recipes"] == pair)
    assert 0 < found["difference_db"][1] < found["difference_db"][2] < most
    first, second = (next(row for row in COMMITTED["recipes"] if row["recipe"] == name) for name in pair)
    assert all(first[key] == second[key] for key in ("bytes_after", "bits_per_weight", "modelled_ms"))


@pytest.mark.slow
def test_paired_psnr_orders_the_formats(checkpoint: Callable[[str], Path]) -> None:
    items = items_of(tiny.PROMPTS[:PROMPTS], PROMPTS * SEEDS, first_seed=5000)
    reference = generate(load_pipeline(resolve_model("tiny")), items, tiny.CALL_KWARGS)
    psnr = []
    for name in ORDER:
        images = generate(load_pipeline(ModelFolder(name, checkpoint(name))), items, tiny.CALL_KWARGS)
        psnr.append(torch.tensor(fidelity(reference, images)[0]).reshape(SEEDS, PROMPTS).mean(0).tolist())
    for better, worse in pairwise(psnr):
        upper, lower = within_item_intervals([better, worse])
        assert upper.low > lower.high
        assert paired_interval([a - b for a, b in zip(better, worse, strict=True)]).low > 0
