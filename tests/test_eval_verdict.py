"""Verdicts, from the figures of a report alone."""

import random
import statistics

import pytest

from fluxq.eval.schema import Estimate, Image, Item, Margin, Metric, Run, Size, Verdict
from fluxq.eval.verdict import with_verdicts

MARGINS = {"psnr": Margin(on="value", low=30), "clip_score": Margin(on="change", low=-0.3, high=0.3)}

SIZE = Size(
    components=("transformer",), bytes_before=2, bytes_after=1, bits_per_weight=4.5, bits_per_quantized_weight=4.5
)


def run(name="a", status="measured", **values) -> Run:
    """A run with per-image values of `psnr` and changes of `clip_score`."""
    count = len(next(iter(values.values())))
    estimate = Estimate(mean=0.0, n=count)
    metrics = {
        key: Metric(
            name=key, unit="dB" if key == "psnr" else "", digits=".2f", better="higher", how="", value=estimate,
            margin=MARGINS[key],
        )
        for key in values
    }  # fmt: skip
    images = tuple(
        Image(
            finite=status != "broken",
            identical=values["psnr"][index] is None,
            values={"psnr": values["psnr"][index]},
            changes={"clip_score": values["clip_score"][index]} if "clip_score" in values else {},
        )
        for index in range(count)
    )
    return Run(
        name=name, recipe="r", recipe_digest="d", backend="native", cache=None, status=status,
        size=SIZE,
        verdict=Verdict(outcome="inconclusive", text=""), gates=(), metrics=metrics, images=images, drift=None,
        wall=None,
    )  # fmt: skip


def verdict(*runs: Run) -> Verdict:
    items = [Item(prompt=f"p{index}", seed=index) for index in range(len(runs[0].images))]
    return with_verdicts(runs, items)[0].verdict


def around(mean: float, spread: float, count: int = 64, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, spread) for _ in range(count)]


def test_inside_every_margin_is_equivalent() -> None:
    found = verdict(run(psnr=around(39, 2), clip_score=around(0, 0.2)))
    assert found.outcome == "equivalent" and found.more_images is None
    assert "psnr 3" in found.text and "asked at least 30 dB" in found.text and "within ±0.3" in found.text


def test_the_worst_metric_decides_and_says_by_how_much() -> None:
    found = verdict(run(psnr=around(39, 2), clip_score=around(-0.8, 0.2)))
    assert found.outcome == "worse" and "clip_score change -0.8" in found.text and "beyond it by 0.5" in found.text
    assert "psnr" not in found.text


def test_too_few_images_are_inconclusive_and_how_many_are_needed_is_said() -> None:
    found = verdict(run(psnr=around(31, 5, count=8)))
    assert found.outcome == "inconclusive" and 20 < found.more_images < 400
    assert f"about {found.more_images} more images needed" in found.text


def test_looking_at_more_recipes_asks_for_more_certainty() -> None:
    drawn = around(0, 1, seed=3)
    error = statistics.stdev(drawn) / len(drawn) ** 0.5
    values = [30 + (value - statistics.mean(drawn)) / error + 2.4 for value in drawn]  # 2.4 standard errors inside
    alone = verdict(run(psnr=values))
    among = verdict(run(psnr=values), *(run(name=str(k), psnr=around(30.1, 4, seed=k)) for k in range(9)))
    assert (alone.outcome, among.outcome) == ("equivalent", "inconclusive")


def test_identical_and_broken_runs_need_no_interval() -> None:
    assert verdict(run(status="identical", psnr=[None] * 4)).text.startswith("All 4 images are identical")
    assert verdict(run(status="broken", psnr=around(39, 1, count=4))).outcome == "broken"


def test_some_identical_images_do_not_spoil_the_mean() -> None:
    assert verdict(run(psnr=[None, *around(39, 1)])).outcome == "equivalent"


def test_without_a_margin_nothing_is_claimed() -> None:
    bare = run(psnr=around(39, 1))
    metrics = {"psnr": bare.metrics["psnr"].model_copy(update={"margin": None})}
    assert "no metric with a margin" in verdict(bare.model_copy(update={"metrics": metrics})).text


@pytest.mark.parametrize(
    ("margin", "words"),
    [
        (Margin(on="value", low=30), "at least 30 dB"),
        (Margin(on="value", high=0.1), "at most 0.1 dB"),
        (Margin(on="change", low=-0.3, high=0.3), "within ±0.3 dB"),
        (Margin(on="value", low=1, high=2), "1 to 2 dB"),
    ],
)
def test_a_margin_in_words(margin: Margin, words: str) -> None:
    assert margin.describe("dB") == words
