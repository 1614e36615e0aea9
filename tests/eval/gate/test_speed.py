"""Verdicts on series of times that are drawn."""

import random
import re

import pytest

from fluxq.eval.gate.speed import Call, judge_speed
from fluxq.eval.speed.machine import HARDWARE, POWER_LIMIT


def drawn(seed: int, pairs: int = 30, *, slower: float = 0.0, noise: float = 0.006, drift: float = 0.0) -> tuple:
    """Calls of A and B in ABBA order, B's `slower`; each takes longer by `drift` than the one before."""
    draws, now, sides = random.Random(seed), 0, ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds = (1 + slower * side) * draws.lognormvariate(0, noise) * (1 + drift * now)
            sides[side].append(Call(seconds, frozenset({POWER_LIMIT}), 1980.0))
            now += 1
    return sides


@pytest.mark.slow
def test_two_percent_are_found_in_thirty_pairs_and_none_in_equal_ones() -> None:
    assert [judge_speed(*drawn(seed, slower=0.02)).verdict for seed in range(10)].count("worse") >= 9
    assert {judge_speed(*drawn(seed)).verdict for seed in range(10)} == {"equivalent"}
    assert {judge_speed(*drawn(seed, slower=-0.2)).verdict for seed in range(3)} == {"equivalent"}
    drifting = [judge_speed(*drawn(seed, drift=5e-4)) for seed in range(5)]
    assert {each.verdict for each in drifting} == {"equivalent"}
    assert all(abs(each.ratio - 1) < 0.01 for each in drifting if each.ratio)


def test_at_the_limit_nothing_is_said_but_how_many_pairs_would_tell() -> None:
    found = [judge_speed(*drawn(seed, slower=0.011)) for seed in range(5)]
    unsure = [each for each in found if each.verdict == "cannot tell"]
    assert len(unsure) >= 4 and all(each.more_pairs or each.ratio == 1.01 for each in unsure)
    assert "are allowed; about" in unsure[0].sentence and unsure[0].low < 1.01 < unsure[0].high
    assert judge_speed(*drawn(0, slower=0.02), slower=0.05).verdict == "equivalent"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda index, call: Call(call.seconds * (1 + index % 4 / 10)), "times spread by .*%, over 5%"),
        (lambda index, call: Call(call.seconds, frozenset({HARDWARE})), "lowered its clocks because of a hardware"),
        (lambda index, call: Call(call.seconds, megahertz=1980.0 - 2 * index), "moved between 1922 and 1980 MHz"),
    ],
)
def test_a_noisy_machine_is_refused_with_the_reason(change, reason) -> None:
    a, b = drawn(1, slower=0.5)
    found = judge_speed([change(index, call) for index, call in enumerate(a)], b)
    assert found.verdict == "cannot tell" and found.ratio is None
    assert re.search(reason, found.sentence), found.sentence


def test_too_few_pairs_are_no_series() -> None:
    with pytest.raises(ValueError, match="give 10 pairs or more"):
        judge_speed(*drawn(0, 5))
