"""Verdicts of a gate from values alone: looks, alpha, floors with two modes."""

import math
import random
import re
from pathlib import Path

import pytest

from fluxq.eval.gate.decide import ALPHA, RULES, judge, looks_of, spent_at, together
from fluxq.eval.gate.floor import modes_of

PSNR = RULES["psnr"]


def draw(mean: float, deviation: float, count: int = 64, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, deviation) for _ in range(count)]


def at_looks(values: list[float], floor: list[float] | None, metrics: int = 1) -> tuple[str, int]:
    looks = looks_of(len(values))
    for look in looks:
        found = judge(PSNR, values[:look], floor and floor[:look], range(look), looks, metrics)
        if found.verdict == "worse":
            break
    return found.verdict, look


@pytest.mark.parametrize(
    ("images", "looks"),
    [(2, (2,)), (8, (8,)), (9, (8, 9)), (16, (8, 16)), (64, (8, 16, 32, 64)), (65, (8, 16, 32, 64, 65))],
)
def test_looks_double_and_their_parts_of_alpha_add_up(images: int, looks: tuple[int, ...]) -> None:
    assert looks_of(images) == looks
    assert math.isclose(sum(spent_at(look, looks) for look in looks), ALPHA)


def test_a_gross_fault_is_found_by_the_first_look() -> None:
    assert at_looks(draw(25, 5), draw(50, 4, seed=1)) == ("worse", 8)


def test_a_run_as_far_as_the_floor_is_equivalent_and_only_the_last_look_says_so() -> None:
    values, floor = draw(50, 2), draw(50, 2, seed=1)
    assert at_looks(values, floor) == ("equivalent", 64)
    assert judge(PSNR, values[:32], floor[:32], range(32), looks_of(64)).verdict == "cannot tell"


def test_a_mean_at_the_limit_cannot_be_told_and_the_number_that_would_grows_with_the_spread() -> None:
    floor = [50.0] * 64  # x is what B lost: 3 dB are allowed
    near, wide = ([47.0 + 0.4 + deviation * value for value in draw(0, 1)] for deviation in (4, 8))
    few, many = (judge(PSNR, values, floor, range(64), looks_of(64)) for values in (near, wide))
    assert few.verdict == many.verdict == "cannot tell"
    assert few.more_images and many.more_images and many.more_images > 3 * few.more_images


@pytest.mark.slow
def test_the_rate_of_false_alarms_over_all_looks_is_as_stated() -> None:
    count = 300
    generator = random.Random(3)
    alarms = 0
    for _ in range(count):
        floor = [generator.gauss(50, 3) for _ in range(64)]
        values = [value - PSNR.margin + generator.gauss(0, 3) for value in floor]  # the worst that is allowed
        alarms += at_looks(values, floor)[0] == "worse"
    assert alarms <= 9  # 3 expected; more than 9 have probability 0.001


@pytest.mark.parametrize(("value", "distance"), [(math.inf, 0.0), (60.0, 0.0), (42.5, 17.5), (math.nan, math.nan)])
def test_distances_are_counted_from_where_two_images_are_the_same(value: float, distance: float) -> None:
    assert PSNR.distance(value) == pytest.approx(distance, nan_ok=True)
    assert RULES["lpips"].distance(0.25) == 0.25


def test_two_modes_are_named_and_the_worse_one_is_the_floor() -> None:
    floor = [math.inf if index % 4 else 28.0 + index / 64 for index in range(64)]
    values = [floor[(7 * index + 3) % 64] for index in range(64)]  # another run of the same mixture
    found = judge(PSNR, values, floor, range(64), looks_of(64))
    assert found.modes is not None and found.modes.share == 0.25 and found.modes.better == 0
    assert found.floor == pytest.approx(60 - 28.47, abs=0.1)
    assert found.verdict == "equivalent"


def test_the_first_looks_take_the_farthest_of_a_floor_that_may_have_two_modes() -> None:
    floor, values = [45.0, 44.5, 45.5, 30.0, 44.0, 45.0, 30.5, 45.0], [30.0 + index / 8 for index in range(8)]
    assert judge(PSNR, values, floor, range(8), looks_of(64)).verdict == "cannot tell"
    assert judge(PSNR, values, [45.0] * 8, range(8), looks_of(64)).verdict == "worse"


def test_a_share_of_the_floor_is_held_image_by_image() -> None:
    rule = RULES["lpips"]
    floor = draw(0.2, 0.05)
    found = judge(rule, [(1 + rule.c) * value for value in floor], floor, range(64), (64,))
    assert found.verdict == "equivalent" and found.low == found.high == pytest.approx(found.limit)
    found = judge(rule, [(1 + rule.c) * value for value in draw(0.2, 0.05, seed=1)], floor, range(64), (64,))
    assert found.verdict == "cannot tell" and found.low < found.limit < found.high


@pytest.mark.parametrize(("floor", "broken", "named"), [(50.0, 8.0, True), (50.0, 31.0, False), (35.0, 8.0, False)])
def test_an_image_far_beyond_all_of_the_floors_forbids_equivalence(floor: float, broken: float, named: bool) -> None:
    values = [floor] * 63 + [broken]
    found = judge(PSNR, values, [floor] * 64, range(64), (64,))
    assert found.outliers == ((63,) if named else ()) and found.verdict == ("cannot tell" if named else "equivalent")


@pytest.mark.parametrize("count", [16, 32, 64])
def test_one_mode_is_one(count: int) -> None:
    found = [modes_of([20 + value for value in draw(0, 4, count, seed)], 3.0) for seed in range(100)]
    assert sum(each is not None for each in found) <= 5


def test_an_image_that_is_not_finite_is_worse_and_a_floor_of_it_an_error() -> None:
    values = [50.0] * 8
    assert judge(PSNR, [math.nan, *values[1:]], values, range(8), (8,)).verdict == "worse"
    with pytest.raises(ValueError, match="not finite"):
        judge(PSNR, values, [math.nan, *values[1:]], range(8), (8,))


def test_several_metrics_are_worse_where_one_is_and_equivalent_where_all_are() -> None:
    good, bad = [50.0] * 8, [20.0 + index for index in range(8)]
    verdicts = [judge(PSNR, values, good, range(8), (8,), 2).verdict for values in (good, bad)]
    assert together(verdicts) == "worse" and together(verdicts[:1]) == "equivalent"


def test_images_of_one_prompt_count_as_one() -> None:
    values = [50.0 - 5 * (index // 8) for index in range(16)]  # two prompts
    assert judge(PSNR, values, [50.0] * 16, [index // 8 for index in range(16)], (16,)).verdict == "cannot tell"


def test_the_page_has_the_table_of_rules() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+)(?: dB)? \| ([\d.]+)(?: dB)? \| ([\d.]+) \|$", page, re.MULTILINE)
    said = {key: tuple(map(float, numbers)) for key, *numbers in rows}
    assert said == {key: (rule.same, rule.margin, rule.c) for key, rule in RULES.items()}
