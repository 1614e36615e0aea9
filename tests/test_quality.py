"""What the formats cost on the embedded pipeline: their order must be right, and the committed figures true."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxq import tiny
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.eval.fidelity import fidelity, paired_interval
from fluxq.eval.generate import generate, items_for

COMMITTED = json.loads((Path(__file__).parent.parent / "benchmarks" / "tiny_quality.json").read_text())
ROWS = {row["recipe"]: row for row in COMMITTED["recipes"]}
ORDER = ("fp8", "mxfp8", "nvfp4")


@pytest.mark.parametrize(("better", "worse"), [ORDER[:2], ORDER[1:]])
def test_committed_intervals_of_neighbours_do_not_overlap(better: str, worse: str) -> None:
    assert COMMITTED["images"] >= 256
    assert ROWS[better]["psnr_db"][1] > ROWS[worse]["psnr_db"][2]


@pytest.mark.slow
def test_paired_psnr_orders_the_formats(checkpoint: Callable[[str], Path]) -> None:
    items = items_for(tiny.PROMPTS, 256, 5000)
    reference = generate(load_pipeline(resolve_model("tiny")), items, tiny.CALL_KWARGS)
    intervals = []
    for name in ORDER:
        images = generate(load_pipeline(ModelFolder(name, checkpoint(name))), items, tiny.CALL_KWARGS)
        intervals.append(paired_interval(fidelity(reference, images).psnr_db))
    for better, worse in zip(intervals, intervals[1:], strict=False):
        assert better.low > worse.high
