"""Runs are measured once, and what is not finite is the worst there is."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from fluxq.calibrate.runs import Judged, KeptRuns, squares_of


def test_runs_are_measured_once_and_again_where_their_file_is_damaged(tmp_path: Path) -> None:
    file, measured = tmp_path / "runs.json", []

    def run() -> list[float]:
        measured.append(1)
        return [1.0, math.nan]

    assert [KeptRuns(file).once("a", run) for _ in range(2)] == [[1.0, math.inf]] * 2
    assert len(measured) == 1
    file.write_text(file.read_text().replace("1.0", "2.0"))
    assert KeptRuns(file).once("a", run) == [1.0, math.inf]
    assert len(measured) == 2


def test_an_image_that_is_not_finite_makes_a_run_the_worst() -> None:
    images = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])]
    judged = Judged()
    judged.signals, judged.squares = squares_of(images), squares_of([images[0] + 1, images[1]], images)
    assert judged.squares == [2.0, 0.0] and judged.error == 2 / 26 and judged.decibels == math.inf
    judged.squares = [2.0, math.inf]
    assert judged.error == math.inf and judged.decibels == -math.inf
