"""Intervals cover what they say, prompts are what is resampled, and decisions follow textbook procedures."""

import math
import statistics

import numpy as np
import pytest
from scipy.stats import bootstrap

from fluxq.eval.metrics.statistics import (
    Decision,
    Interval,
    clustered_interval,
    decide,
    equivalence,
    holm,
    more_images,
    p_value,
    paired_interval,
)


def test_one_image_of_each_prompt_gives_scipy_s_interval():
    values = np.random.default_rng(1).lognormal(size=40)
    expected = bootstrap((values,), np.mean, n_resamples=9999, rng=0, method="BCa").confidence_interval
    got = clustered_interval(values.tolist(), [f"prompt {i}" for i in range(40)])
    assert got == paired_interval(values.tolist())
    assert (got.low, got.high) == pytest.approx(tuple(expected), rel=1e-12)
    assert got != clustered_interval(values.tolist(), range(40), seed=1)


def test_images_of_one_prompt_count_as_one_observation():
    values = np.random.default_rng(2).normal(size=30).tolist()
    thrice = clustered_interval(values * 3, list(range(30)) * 3)
    once = paired_interval(values)
    assert (thrice.mean, thrice.low, thrice.high) == pytest.approx((once.mean, once.low, once.high))
    assert (thrice.n, once.n) == (90, 30)


def test_the_mean_is_over_images_where_prompts_have_different_numbers_of_them():
    values, prompts = [1.0, 2.0, 3.0, 10.0, 4.0, 5.0], ["a", "a", "a", "b", "c", "c"]
    got = clustered_interval(values, prompts)
    assert got.mean == pytest.approx(statistics.fmean(values)) and got.n == 6
    means = []
    rng = np.random.default_rng(0)
    groups = [values[:3], values[3:4], values[4:]]
    for _ in range(4000):
        drawn = [value for j in rng.integers(0, 3, 3) for value in groups[j]]
        means.append(statistics.fmean(drawn))
    assert min(means) <= got.low < got.mean < got.high <= max(means)
    order = [5, 3, 0, 4, 1, 2]
    shuffled = clustered_interval([values[i] for i in order], [prompts[i] for i in order])
    assert (shuffled.mean, shuffled.n) == (got.mean, got.n)


def test_prompts_with_many_images_weigh_as_much_in_the_limits_as_in_the_mean():
    many, few = [0.0, 0.1, 0.2] * 3, [10.0]  # images of a prompt of either kind
    values = (many + few) * 20
    prompts = [f"{kind} {i}" for i in range(20) for kind in ["many"] * 9 + ["few"]]
    got = clustered_interval(values, prompts)
    assert got.mean == pytest.approx(1.09)
    assert 0.4 < got.low < 1.09 < got.high < 2.5  # prompts taken alike would give about 5


@pytest.mark.parametrize(
    "values, prompts, mean, low, high, n, infinite",
    [
        ([], "", math.nan, math.nan, math.nan, 0, 0),
        ([1.0, 2.0], "aa", 1.5, math.nan, math.nan, 2, 0),  # one prompt says nothing about others
        ([math.inf, 4.0, 6.0], "aaa", 5.0, math.nan, math.nan, 2, 1),
        ([math.inf, 4.0, math.inf, 6.0], "aabb", 5.0, 4.0, 6.0, 2, 2),
        ([math.inf, math.inf], "ab", math.inf, math.nan, math.nan, 0, 2),
        ([2.0, 2.0, 2.0], "aab", 2.0, 2.0, 2.0, 3, 0),
        ([1.0, math.nan], "ab", math.nan, math.nan, math.nan, 0, 0),
    ],
)
def test_degenerate_intervals(values, prompts, mean, low, high, n, infinite):
    got = clustered_interval(values, prompts)
    assert (got.mean, got.low, got.high) == pytest.approx((mean, low, high), nan_ok=True)
    assert (got.n, got.infinite) == (n, infinite)


@pytest.mark.parametrize("function", [clustered_interval, p_value, more_images])
def test_a_value_without_a_prompt_is_refused(function):
    with pytest.raises(ValueError, match="zip"):
        function([1.0, 2.0], ["a"])


def coverage(rng, trials: int, prompts: int, seeds: int, resamples: int) -> tuple[float, float]:
    """Share of intervals that hold the true mean difference: ours, and with every image taken for its own prompt.

    Skewed as LPIPS is: gamma values whose difference has mean 0.004; half of the variance belongs to the prompt.
    """
    ours = naive = 0
    keys = np.repeat(np.arange(prompts), seeds).tolist()
    for _ in range(trials):
        shared = rng.gamma(1.0, 0.02, size=(prompts, 1))
        own = rng.gamma(1.0, 0.02, size=(prompts, seeds))
        values = (shared + own - 0.036).ravel().tolist()  # of mean 2 * 0.02 - 0.036
        got = clustered_interval(values, keys, resamples)
        ours += got.low <= 0.004 <= got.high
        plain = paired_interval(values, resamples)
        naive += plain.low <= 0.004 <= plain.high
    return ours / trials, naive / trials


@pytest.mark.slow
def test_coverage_of_skewed_data():
    ours, _ = coverage(np.random.default_rng(0), trials=300, prompts=64, seeds=1, resamples=399)
    assert 0.92 <= ours <= 0.98


@pytest.mark.slow
def test_coverage_where_seeds_share_a_prompt():
    ours, naive = coverage(np.random.default_rng(0), trials=300, prompts=64, seeds=4, resamples=399)
    assert 0.92 <= ours <= 0.98
    assert naive < 0.88  # four images of a prompt are not four observations


@pytest.mark.long
@pytest.mark.parametrize("prompts, seeds", [(256, 1), (64, 8)])
def test_coverage_at_full_size(prompts, seeds):
    ours, naive = coverage(np.random.default_rng(prompts), trials=1000, prompts=prompts, seeds=seeds, resamples=1999)
    assert 0.92 <= ours <= 0.98
    assert seeds == 1 or naive < 0.88


def test_p_value_of_a_difference():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=200)
    noise -= noise.mean()
    prompts = range(200)
    shifts = [0.0, 1.0, 1.959964, 3.0]  # in standard errors
    found = [p_value((noise + z * noise.std() / 200**0.5).tolist(), prompts) for z in shifts]
    expected = [2 * (1 - statistics.NormalDist().cdf(z)) for z in shifts]
    assert found == pytest.approx(expected, abs=0.01) and found[0] == 1.0
    assert p_value((noise + 9).tolist(), prompts) == 1 / 10_000  # as small as 9999 resamples can tell
    assert p_value((-noise - 9).tolist(), prompts) == 1 / 10_000


def test_p_value_counts_prompts_and_not_images():
    noise = np.random.default_rng(3).normal(0.3, 1, size=40)
    once = p_value(noise.tolist(), range(40))
    assert p_value(noise.tolist() * 5, list(range(40)) * 5) == pytest.approx(once, abs=0.005)
    assert p_value(noise.tolist() * 5, range(200)) < once / 5


@pytest.mark.parametrize("differences", [[1.0, 1.1], [-0.3, 2.6, 1.2, 0.2, 1.5, 2.4, -0.9, 1.1]])
def test_p_value_of_few_prompts_is_no_smaller_than_students(differences):
    from scipy.stats import ttest_1samp

    least = {2: 0.45, 8: 0.8 * ttest_1samp(differences, 0).pvalue}  # two prompts alike by chance are half of all
    assert p_value(differences, range(len(differences))) > least[len(differences)]


@pytest.mark.parametrize(
    "differences, prompts, expected",
    [
        ([0.0, 0.0, 0.0], "abc", 1.0),
        ([0.0, 0.0, math.inf], "abc", 1.0),
        ([0.5, 0.5, 0.5], "abc", 1 / 10_000),
        ([1.0, math.nan, 2.0], "abc", math.nan),
        ([1.0, 2.0], "aa", math.nan),
        ([], "", math.nan),
    ],
)
def test_degenerate_p_values(differences, prompts, expected):
    assert p_value(differences, prompts) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "p_values, corrected",
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # 4 x .005, 3 x .01, 2 x .03, then no less
        ([0.5, 0.9], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([], []),
    ],
)
def test_holm(p_values, corrected):
    assert holm(p_values) == pytest.approx(corrected)


def test_holm_refuses_what_is_no_p_value():
    with pytest.raises(ValueError, match="NaN"):
        holm([0.1, math.nan])


@pytest.mark.parametrize(
    "low, high, margin, outcome",
    [
        (-0.01, 0.02, (-math.inf, 0.02), "equivalent"),
        (-0.01, 0.021, (-math.inf, 0.02), "inconclusive"),
        (0.021, 0.05, (-math.inf, 0.02), "worse"),
        (0.02, 0.05, (-math.inf, 0.02), "inconclusive"),  # touches
        (29.0, 31.0, (30.0, math.inf), "inconclusive"),
        (30.0, 31.0, (30.0, math.inf), "equivalent"),
        (20.0, 29.0, (30.0, math.inf), "worse"),
        (23.1, 23.9, (23.01, 23.95), "equivalent"),
        (22.0, 22.5, (23.01, 23.95), "worse"),  # too good leaves a two-sided window too
        (22.0, 25.0, (23.01, 23.95), "inconclusive"),
        (math.nan, math.nan, (0.0, 1.0), "inconclusive"),
    ],
)
def test_equivalence(low, high, margin, outcome):
    assert equivalence(Interval((low + high) / 2, low, high, n=8), *margin) == outcome


@pytest.mark.parametrize("margin", [(1.0, 1.0), (2.0, 1.0), (math.nan, 1.0)])
def test_a_margin_without_room_is_refused(margin):
    with pytest.raises(ValueError, match="from a lower to a higher value"):
        equivalence(Interval(0.0, -1.0, 1.0, n=8), *margin)


def sample(mean: float, deviation: float, n: int, seed: int = 0) -> list[float]:
    """n values of exactly this mean and standard deviation (of a sample)."""
    values = np.random.default_rng(seed).normal(size=n)
    return (mean + deviation * (values - values.mean()) / values.std(ddof=1)).tolist()


def test_more_images_by_hand():
    values = sample(0.5, 2.0, 50)
    # 1.96 * 2 / sqrt(N) = 0.5 at N = 61.5
    assert more_images(values, range(50), high=1.0) == 12
    assert more_images(values, range(50), low=-3.0, high=1.0) == 12  # the nearer end
    assert more_images(values, range(50), low=0.0) == 12
    # two images a prompt, alike: as many prompts are needed, twice as many images
    assert more_images(values * 2, list(range(50)) * 2, high=1.0) == pytest.approx(23, abs=1)
    assert more_images(values, range(50), high=0.9, level=0.99) > more_images(values, range(50), high=0.9)


def test_more_images_really_decide():
    rng = np.random.default_rng(5)
    values = rng.normal(0.0, 1.0, size=20).tolist()
    mean = statistics.fmean(values)
    assert equivalence(paired_interval(values), high=mean + 0.1) == "inconclusive"
    more = more_images(values, range(20), high=mean + 0.1)
    assert more is not None
    enough = sample(mean, statistics.stdev(values), 20 + more)
    assert equivalence(paired_interval(enough), high=mean + 0.105) == "equivalent"
    assert equivalence(paired_interval(enough[: (20 + more) // 2]), high=mean + 0.105) == "inconclusive"


@pytest.mark.parametrize("values, prompts", [([1.0, 3.0], "ab"), ([1.0, 2.5], "aa"), ([1.0, math.nan], "ab"), ([], "")])
def test_no_number_of_images_where_none_can_be_given(values, prompts):
    assert more_images(values, prompts, high=2.0) is None


def test_one_recipe_is_decided_by_its_95_percent_interval():
    values = sample(0.0, 1.0, 100)
    [decision] = decide([(values, -math.inf, 0.25)], range(100))
    assert decision.level == pytest.approx(0.95) and decision.interval == paired_interval(values)
    assert decision.outcome == "equivalent" and decision.more_images is None


def test_recipes_are_decided_step_by_step():
    close = sample(0.0, 1.0, 100)  # 95 % interval about +-0.196, 98.3 % about +-0.239, 98 % about 0.233
    clear, lost = sample(-5.0, 1.0, 100, seed=1), sample(5.0, 1.0, 100, seed=2)
    margin = 0.215

    def together(*recipes: list[float], high: float) -> list[Decision]:
        return decide([(values, -math.inf, high) for values in recipes], range(100))

    assert together(close, high=margin)[0].outcome == "equivalent"
    decisions = together(clear, close, lost, high=margin)
    assert [decision.outcome for decision in decisions] == ["equivalent", "inconclusive", "worse"]
    # three recipes: 0.1 / 6 each; two decided: 0.1 / 4 for the last
    assert [decision.level for decision in decisions] == pytest.approx([1 - 0.1 / 6, 1 - 0.1 / 4, 1 - 0.1 / 6])
    assert decisions[1].more_images is not None and decisions[1].more_images > 0
    wider = together(clear, close, lost, high=0.235)[1]  # decided at the second step only
    assert (wider.outcome, wider.level) == ("equivalent", pytest.approx(1 - 0.1 / 4))
    assert together(close, close, close, high=0.235)[1].outcome == "inconclusive"


@pytest.mark.slow
def test_wrong_decisions_anywhere_stay_below_alpha():
    rng = np.random.default_rng(0)
    wrong = naive = 0
    for _ in range(80):
        shared = rng.normal(size=(1, 100))
        table = 0.5 * shared + rng.normal(size=(5, 100)) + 0.001  # just outside the margin, every one of them
        decisions = decide([(row, -math.inf, 0.0) for row in table.tolist()], range(100), resamples=999)
        wrong += any(decision.outcome == "equivalent" for decision in decisions)
        naive += any(paired_interval(row, 999).high <= 0.0 for row in table.tolist())
    assert wrong / 80 <= 0.05 < naive / 80


def test_no_recipes_no_decisions():
    assert decide([], []) == []
