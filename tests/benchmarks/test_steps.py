"""The proof of lists of steps: opponents compute as much, a missed goal is named, and the page has the figures."""

import copy

import pytest
import torch

from benchmarks import steps
from fluxq.base.files import read_json
from fluxq.eval.images.generate import Generated


def test_the_pages_have_the_tables_of_the_committed_result() -> None:
    report = read_json(steps.RESULT)
    for file, table in steps.TABLES.items():
        page = file.read_text(encoding="utf-8")
        assert steps.between(page, steps.BEGIN, steps.END, table(report)) == page, "python -m benchmarks.steps --tables"
    assert [(row["kind"], row["computed"]) for row in report["rows"]] == [
        (kind, count) for kind in steps.KINDS for count in steps.COMPUTED
    ]
    assert report["prompts"] == report["rows"][0]["images"] == 256
    assert "dirty" not in report["commit"]
    for row in report["rows"]:
        assert row["others"].keys() == {"fewer steps", *steps.CACHES}
        share = row["computed"] / steps.STEPS
        assert all(other.get("share", 1) > share - 0.04 for other in row["others"].values())


def test_a_goal_that_is_missed_is_named() -> None:
    report = read_json(steps.RESULT)
    before = steps.goals(report)
    changed = copy.deepcopy(report)
    first, last = changed["rows"][0], changed["rows"][-2]
    first["others"]["fewer steps"]["better"] = [7.0, -0.1, 14.0]
    first["others"]["MagCache"]["better"] = [1.4, 1.3, 1.5]
    first["nmse"] = changed["lists"]["16 bit"][0]["predicted"] * 2.6
    last["together_nmse"] *= 2
    missed = {goal for goal, is_met in steps.goals(changed).items() if not is_met}
    where = "16 bit, 15 of 28 steps"
    assert missed - {goal for goal, is_met in before.items() if not is_met} == {
        f"{where}: at least +6 dB over fewer steps, the interval above 0",
        f"{where}: at least +1.5 dB over MagCache, the interval above 0",
        f"{where}: predicted NMSE within a factor 2.5",
        "nvfp4, 11 of 28 steps: errors add within a factor 1.3",
    }
    lines = steps.tables_of(changed).splitlines()
    assert {f"- missed: {goal}" for goal in missed} <= {*lines}


@pytest.mark.parametrize(
    ("settings", "share", "chosen"),
    [
        ({"low": 0.3, "near": 0.52, "also": 0.523, "high": 0.9}, 0.5, ("also", "")),
        ({"low": 0.3}, 0.5, ("", "no setting computes so much")),
        ({}, 0.5, ("", "leaves out no step of this pipeline")),
        ({"odd": "KeyError: 'x'"}, 0.5, ("", "KeyError: 'x'")),
    ],
)
def test_the_opponent_is_the_best_of_the_settings_that_compute_least_but_enough(settings, share, chosen) -> None:
    scans = {
        name: each if isinstance(each, str) else {"share": each, "psnr_db": index}
        for index, (name, each) in enumerate(settings.items())
    }
    assert steps.opponent_of(scans, share) == chosen


def test_identical_images_count_as_one_wrong_level() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    full = Generated((("a", 0), ("b", 1)), images, torch.zeros(2, 1), torch.ones(2, dtype=torch.bool))
    other = images.clone()
    other[1, 0, 0, 0] = 1
    made = Generated(full.items, other, full.latents, full.finite)
    same, one_level = steps.psnr_of(full, made)
    assert same == pytest.approx(one_level)
