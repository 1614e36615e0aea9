"""Verdicts, from the figures of a report alone."""

import random
import statistics

import pytest
import torch

from fluxq import tiny
from fluxq.eval.metrics import verdict as module
from fluxq.eval.metrics.fidelity import psnr
from fluxq.eval.metrics.schema import CheckpointSize, Curve, Drift, Estimate, Image, Item, Margin, Metric, Run, Verdict
from fluxq.eval.metrics.statistics import clustered_interval
from fluxq.eval.metrics.verdict import FEW_STEPS, LEAST_PROMPTS, PUBLISHED, published, reached, with_verdicts
from fluxq.recipes.recipe import gate_holds, load_recipe, shipped_recipes

NAMES = {
    "psnr": ("PSNR to the 16-bit images", "dB", "higher"),
    "lpips": ("LPIPS to the 16-bit images", "", "lower"),
    "clip_score": ("CLIP score", "", "higher"),
    "feature_distance": ("Feature distance to the 16-bit images", "", "lower"),
}
CHANGES = ("clip_score", "image_reward")
FLOORS = {"psnr": 50.0, "lpips": 0.01}
ALL = dict.fromkeys(module.DECISIVE)


def run(name="a", status="measured", bits=4.5, steps=28, floors=FLOORS, missing=(), **values) -> Run:
    """A run with per-image values of each metric, or changes of those that 16-bit images have too."""
    count = len(next(iter(values.values())))
    prompts = [f"p{index}" for index in range(count)]

    def metric(key: str, of: list[float | None]) -> Metric:
        label, unit, better = NAMES.get(key, (key, "", "higher"))
        kept = [value for value in of if value is not None]
        figure = Estimate.of(clustered_interval(kept, prompts[: len(kept)]))
        at = {"change": figure} if key in CHANGES else {"value": figure}
        floor = Estimate(mean=floors[key], n=count) if floors.get(key) is not None else None
        return Metric(name=label, unit=unit, digits=".2f", better=better, how="", floor=floor, **at)

    metrics = {key: metric(key, of) for key, of in values.items()}
    for key in missing:
        label, unit, better = NAMES[key]
        metrics[key] = Metric(name=label, unit=unit, digits=".2f", better=better, how="", missing="no weights")
    paired = {key: of for key, of in values.items() if key not in CHANGES}
    images = tuple(
        Image(
            finite=status != "broken",
            identical=paired["psnr"][index] is None,
            values={key: of[index] for key, of in paired.items()},
            changes={key: of[index] for key, of in values.items() if key in CHANGES},
        )
        for index in range(count)
    )
    return Run(
        name=name, checkpoint=name, recipe="r", recipe_digest="d", backend="native", cache=None, status=status,
        size=CheckpointSize(
            components=("transformer",), bytes_before=2, bytes_after=1, bits_per_weight=bits + 1,
            bits_per_quantized_weight=bits,
        ),
        verdict=Verdict(outcome="inconclusive", text=""), gates=(), metrics=metrics, images=images,
        drift=None if steps is None else drift(steps), wall=None,
    )  # fmt: skip


def drift(steps: int) -> Drift:
    curve = Curve(name="", unit="", digits=".2f", better="lower", how="", values=())
    return Drift(steps=tuple(range(steps)), sigmas=(1.0,) * steps, images=1, curves={"velocity_error": curve})


def judged(*runs: Run) -> tuple[Run, ...]:
    return with_verdicts(runs, [Item(prompt=f"p{index}", seed=index) for index in range(len(runs[0].images))])


def verdict(*runs: Run) -> Verdict:
    return judged(*runs)[0].verdict


def around(mean: float, spread: float, count: int = 64, seed: int = 0) -> list[float]:
    """Values with just this mean and standard deviation."""
    draw = random.Random(seed)
    drawn = [draw.gauss(0, 1) for _ in range(count)]
    middle, wide = statistics.fmean(drawn), statistics.stdev(drawn)
    return [mean + spread * (value - middle) / wide for value in drawn]


# what runs are held against


@pytest.mark.often(1)
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model}-{row.bits}")
def test_no_published_best_is_judged_worse_and_those_with_a_psnr_are_as_good(row) -> None:
    """At their own figures, over 400 images of which single ones differ by 3 dB."""
    figures = {"psnr": 25.0} | dict(row.figures)
    spread = {"psnr": 3.0, "lpips": 0.1, "clip_score": 1.0, "image_reward": 0.3}
    values = {key: around(mean, spread[key], 400, seed) for seed, (key, mean) in enumerate(figures.items())}
    bits = 4.5 if row.bits == 4 else 8.2
    found = verdict(run(bits=bits, steps=row.steps, **values))
    assert found.outcome == "comparable", found.text
    assert found.text.startswith(f"As good as published {row.bits}-bit models: PSNR ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "steps", "psnr", "lpips"),
    [(8.2, 50, 14.0, 0.55), (4.5, 50, 12.0, 0.611), (4.5, 4, 16.3, 0.345), (4.5, 20, 14.8, 0.517)],
)
def test_published_failures_are_judged_worse(bits, steps, psnr, lpips) -> None:
    """W4A8 of ViDiT-Q and plain NVFP4 on PixArt-Sigma, plain INT4 on FLUX.1-schnell, in the same tables."""
    found = verdict(run(bits=bits, steps=steps, psnr=around(psnr, 3, 1000), lpips=around(lpips, 0.1, 1000)))
    assert found.outcome == "worse" and found.text.startswith("Worse than published ")
    assert f"PSNR {psnr:.2f} dB (" in found.text and f"LPIPS {lpips:.2f} (" in found.text


def test_margins_follow_bits_and_steps() -> None:
    def low(**how) -> float:
        return judged(run(psnr=around(20, 1), **how))[0].metrics["psnr"].margin.low

    assert low(bits=8.2) > low(bits=4.5)  # 8 bits have to come nearer
    assert low(bits=8.2, steps=50) > low(bits=8.2, steps=4)  # few steps cannot repair
    assert low(bits=8.2, steps=FEW_STEPS) == low(bits=8.2, steps=1) < low(bits=8.2, steps=FEW_STEPS + 1)
    assert low(bits=8.2, steps=None) == low(bits=8.2, steps=4)  # unknown: what every row allows
    assert low(bits=6.2) == low(bits=4.5)  # fp8 in a third of the layers makes no 8-bit model of a 4-bit one
    rows = published(run(bits=4.5, steps=28, psnr=[1.0]))
    assert {row.model for row in rows} == {"FLUX.1-dev", "SANA-1.6b", "PixArt-Sigma"}
    assert reached(rows, "psnr", "higher") == 18.5 and reached(rows, "lpips", "lower") == 0.271
    assert reached(rows, "ssim", "higher") is None


def test_nothing_is_asked_that_16_bit_does_not_reach_itself() -> None:
    """A model that differs from itself by 15 dB; published 4-bit models are nearer to theirs."""
    made = judged(run(psnr=around(14.8, 1, 400), lpips=around(0.4, 0.05, 400), floors={"psnr": 15.0, "lpips": 0.4}))[0]
    assert made.metrics["psnr"].margin == Margin(on="value", low=14.0)
    assert made.metrics["lpips"].margin == Margin(on="value", high=0.43)
    assert made.verdict.outcome == "equivalent" and "two runs of 16 bit 15.00 dB" in made.verdict.text
    assert "theirs" not in made.verdict.text


def test_every_row_has_a_source_and_only_metrics_that_exist() -> None:
    from fluxq.eval.metrics.metrics import METRICS

    assert {(row.bits, row.steps <= FEW_STEPS) for row in PUBLISHED} == {(8, True), (8, False), (4, True), (4, False)}
    for row in PUBLISHED:
        assert row.figures.keys() <= METRICS.keys() and "prompts" in row.source and row.bits in (4, 8)
        for key, margin in module.GUARDS.items():
            assert key not in row.figures or margin.low < row.figures[key]


# the words


def test_within_the_noise_of_16_bit_is_equivalent() -> None:
    found = verdict(run(psnr=around(49, 2), lpips=around(0.012, 0.002), clip_score=around(0, 0.2)))
    assert found.outcome == "equivalent" and found.more_images is None
    assert found.text.startswith("Equivalent to 16 bit: PSNR 49.00 dB (48.5")
    assert "two runs of 16 bit 50.00 dB; LPIPS 0.01" in found.text and "Not measured" not in found.text
    assert verdict(run(psnr=around(45, 2))).outcome == "comparable"
    assert verdict(run(psnr=around(49, 2), floors={})).outcome == "comparable"  # nothing is known of its noise


def test_the_worst_metric_decides() -> None:
    found = verdict(run(psnr=around(39, 2), lpips=around(0.1, 0.02), clip_score=around(-0.9, 0.2)))
    assert found.outcome == "worse" and found.text.startswith("Worse than 16 bit: CLIP score change −0.90 (")
    assert "within ±0.5 asked" in found.text and "PSNR" not in found.text


def test_an_open_question_says_how_many_images_would_answer_it() -> None:
    found = verdict(run(psnr=around(17.2, 4)))
    assert found.outcome == "inconclusive" and 20 < found.more_images < 1000
    assert found.text.startswith("Undecided: PSNR 17.20 dB (16.")
    assert f"at least 17.5 dB asked, about {found.more_images} more images would decide" in found.text


def test_what_was_not_measured_is_named() -> None:
    text = verdict(run(psnr=around(39, 2), missing=("lpips", "feature_distance"))).text
    assert text.endswith(" Not measured: LPIPS, CLIP score, Feature distance.")
    many = run(psnr=around(39, 2))
    more = {f"m{i}": Metric(name=f"m{i}", unit="", digits="", better="lower", how="", missing="x") for i in range(4)}
    many = many.model_copy(update={"metrics": {**many.metrics, **more}})
    assert verdict(many).text.endswith(" Not measured: LPIPS, CLIP score, m0, m1 and 2 more.")


UNDECIDED = {"lpips": around(0.3, 0.5), "clip_score": around(-0.4, 2.0)}
FINE = {"lpips": around(0.1, 0.02), "clip_score": around(0.0, 0.2)}


@pytest.mark.often(1)
@pytest.mark.parametrize("more", [UNDECIDED, FINE], ids=["undecided", "fine"])
@pytest.mark.parametrize("psnr", [39, 18.9, 17.6])
def test_measuring_more_never_gives_a_worse_word_unless_something_is_shown_to_be_worse(psnr, more) -> None:
    order = ("inconclusive", "comparable", "equivalent")
    poor = verdict(run(psnr=around(psnr, 2, 64)))
    assert "Not measured: LPIPS, CLIP score" in poor.text
    for keys in (["lpips"], ["clip_score"], ["lpips", "clip_score"]):
        rich = verdict(run(psnr=around(psnr, 2, 64), **{key: more[key] for key in keys}))
        assert order.index(rich.outcome) >= order.index(poor.outcome), rich.text
        if more is UNDECIDED:
            assert "ndecided: " in rich.text and all(NAMES[key][0].split(" to ")[0] in rich.text for key in keys)


def test_the_interval_of_a_verdict_is_the_one_of_the_table_however_many_runs_are_on_the_page() -> None:
    one = run(psnr=around(17.9, 2.0))
    others = [run(name=str(k), psnr=around(17.6, 4, seed=k)) for k in range(9)]
    alone, among = judged(one)[0], judged(one, *others)[0]
    value = one.metrics["psnr"].value
    stated = f"PSNR {value.mean:.2f} dB ({value.low:.2f} to {value.high:.2f})"
    assert stated in alone.verdict.text and stated in among.verdict.text


def test_looking_at_more_recipes_asks_for_more_certainty() -> None:
    values = around(17.5 + 2.4 / 8, 1)  # 2.4 standard errors inside
    alone = verdict(run(psnr=values))
    among = verdict(run(psnr=values), *(run(name=str(k), psnr=around(17.6, 4, seed=k)) for k in range(9)))
    assert (alone.outcome, among.outcome) == ("comparable", "inconclusive")
    assert "which it would be alone on a page" in among.text


@pytest.mark.slow
def test_all_questions_of_a_page_share_one_error() -> None:
    """Every run lies just outside by PSNR and by LPIPS; a wrong word anywhere on a page of five counts."""
    wrong = 0
    for page in range(40):
        draw = random.Random(page)
        made = [
            run(
                name=str(k),
                psnr=[17.49 + draw.gauss(0, 1) for _ in range(48)],
                lpips=[0.302 + draw.gauss(0, 0.1) for _ in range(48)],
            )
            for k in range(5)
        ]
        wrong += any(each.verdict.outcome == "comparable" for each in judged(*made))
    assert wrong <= 4  # 2 are expected at 5 %


# a look


@pytest.mark.parametrize("count", [8, LEAST_PROMPTS - 1])
def test_few_images_judge_nothing(count) -> None:
    found = verdict(run(psnr=around(38.4, 2, count), clip_score=around(-3, 1, count), missing=("lpips",)))
    assert found.outcome == "alike" and found.more_images is None
    assert found.text.startswith(f"Looks as good as published: {count} images, PSNR 38.40 dB (")
    assert ", two runs of 16 bit 50.00 dB; a judgement takes 30 prompts or more (--count)." in found.text
    assert found.text.endswith(" Not measured: LPIPS.") and "more images" not in found.text
    assert verdict(run(psnr=around(38.4, 2, LEAST_PROMPTS))).outcome == "comparable"


def test_few_bad_images_do_not_look_like_16_bit() -> None:
    found = verdict(run(psnr=around(9, 2, 8)))
    assert found.outcome == "unlike"
    assert found.text.startswith("Looks worse than published: 8 images, PSNR 9.00 dB (")
    assert "theirs 18.5 dB or more" in found.text


def test_videos_are_held_against_their_own_noise_and_never_against_models_that_make_images() -> None:
    along = Curve(name="", unit="", digits=".2f", better="higher", how="", values=())

    def of_videos(**values) -> Verdict:
        return verdict(run(**values).model_copy(update={"frames": along}))

    assert of_videos(psnr=around(49, 2)).outcome == "equivalent"
    far = of_videos(psnr=around(15, 2))  # images so far from theirs would be worse
    assert far.outcome == "inconclusive" and verdict(run(psnr=around(15, 2))).outcome == "worse"
    assert (
        far.text.startswith("Undecided: PSNR 15.00 dB (")
        and "nobody has published what quantizers of videos" in far.text
    )
    assert of_videos(psnr=around(15, 2), floors={}).outcome == "inconclusive"
    few = of_videos(psnr=around(49, 2, 8))
    assert few.outcome == "inconclusive" and few.text.startswith("Undecided: 8 videos, PSNR 49.00 dB (")
    near = of_videos(psnr=around(45, 2, 8), floors={"psnr": 38.0})
    assert (
        "two runs of 16 bit 38.00 dB; a judgement takes 30 prompts or more" in near.text and "farther" not in near.text
    )
    lost = of_videos(psnr=around(15, 2), clip_score=around(-3, 0.2))
    assert lost.outcome == "worse" and lost.text.startswith("Worse than 16 bit: CLIP score change")


def test_seeds_of_one_prompt_are_not_prompts() -> None:
    made = run(psnr=around(38.4, 2, 64))
    found = with_verdicts([made], [Item(prompt=f"p{index % 8}", seed=index) for index in range(64)])[0]
    assert found.verdict.outcome == "alike"


def test_identical_and_broken_runs_need_no_interval() -> None:
    for count in (4, 40):
        text = verdict(run(status="identical", psnr=[None] * count)).text
        assert text.startswith(f"All {count} images are identical")
        assert verdict(run(status="broken", psnr=around(39, 1, count=count))).outcome == "broken"


def test_some_identical_images_do_not_spoil_the_mean() -> None:
    assert verdict(run(psnr=[None, *around(39, 1)])).outcome == "comparable"


def test_without_anything_to_judge_by_nothing_is_claimed() -> None:
    bare = run(psnr=around(39, 1))
    bare = bare.model_copy(update={"metrics": {"feature_distance": bare.metrics["psnr"]}})
    assert "no metric with a margin" in verdict(bare).text
    assert verdict(bare.model_copy(update={"images": bare.images[:4]})).outcome == "inconclusive"


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


# gates of shipped recipes


SPREAD_DB = 3.5  # of single images' PSNR; a closing check has four


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_shipped_gate_passes_what_is_published_and_fails_what_is_broken(recipe: str) -> None:
    """2.5 standard errors of four images below the worst of the best; above every picture that is another one."""
    found = load_recipe(recipe)[1]
    assert len(found.gates) == 1
    bits = 4 if found.components["transformer"].weights.format in ("nvfp4", "mxfp4", "int4") else 8
    best = min(row.figures["psnr"] for row in PUBLISHED if row.bits == bits and "psnr" in row.figures)
    assert gate_holds(found.gates[0], {"psnr": best - 2.5 * SPREAD_DB / 4**0.5})
    images = torch.stack(list(tiny.held_out()[0][:64]))
    broken = {
        "white": torch.full_like(images, 255),
        "black": torch.zeros_like(images),
        "grey": torch.full_like(images, 128),
        "noise": torch.randint(0, 256, images.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        "another": images.roll(1, 0),
    }
    for name, wrong in broken.items():
        means = psnr(images, wrong).view(-1, 4).mean(1)
        assert not any(gate_holds(found.gates[0], {"psnr": value}) for value in means.tolist()), name
    assert not gate_holds(found.gates[0], {"psnr": float("nan")})
