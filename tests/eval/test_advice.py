"""The first sentence of a page: which to use."""

import example_report
import pytest

from fluxq.eval.metrics.schema import Verdict
from fluxq.eval.report.advice import advice


@pytest.fixture(scope="module")
def two():
    """nvfp4 and fp8, evaluated as they are stored and not timed."""
    found = example_report.example(4, speed=None)
    first, fourth = found.runs[0], found.runs[3]
    return found.model_copy(update={"runs": (first, fourth)})


def judged(report, *outcomes, **changes):
    runs = [
        run.model_copy(update={"verdict": Verdict(outcome=outcome, text=outcome, more_images=90), **changes})
        for run, outcome in zip(report.runs, outcomes, strict=True)
    ]
    return report.model_copy(update={"runs": tuple(runs)})


def test_the_smallest_that_is_good_enough_and_what_a_closer_one_costs(two):
    decided = [each.model_copy(update={"p_holm": 0.01}) for each in two.comparisons]
    said = advice(judged(two.model_copy(update={"comparisons": tuple(decided)}), "comparable", "equivalent"))
    first, second = said.split(". ", 1)
    assert first == (
        "Use schnell-nvfp4: as good as published, and the smallest of 2 that are good enough, with 6.71 GB in memory, "
        "28% of 16 bit; its speed was not measured"
    )
    assert second.startswith("schnell-fp8 is closer to 16 bit, by ") and second.endswith("and takes 80% more memory.")


def test_a_difference_that_was_not_decided_is_no_reason(two):
    undecided = [each.model_copy(update={"p_holm": 0.4}) for each in two.comparisons]
    said = advice(judged(two.model_copy(update={"comparisons": tuple(undecided)}), "comparable", "comparable"))
    assert said.startswith("Use schnell-nvfp4") and "closer" not in said


def test_what_is_not_good_enough_is_not_chosen(two):
    assert advice(judged(two, "worse", "equivalent")).startswith(
        "Use schnell-fp8: of 2 the only one that is equivalent to 16 bit, with 12.1 GB in memory"
    )
    assert advice(judged(two, "worse", "broken")) == "Do not use schnell-nvfp4 or schnell-fp8: worse, broken."
    said = advice(judged(two, "inconclusive", "worse"))
    assert said == "Nothing says yet whether schnell-nvfp4 will do: about 90 more images would decide."


def test_a_look_at_few_images_recommends_more_of_them(two):
    said = advice(judged(two, "alike", "alike"))
    assert said.startswith(
        "Of 2 that look as good as published on 16 images, schnell-nvfp4 is the smallest, with 6.71 GB"
    )
    assert said.endswith("evaluate each on more images: fluxq eval schnell-nvfp4 --count 64.")
    alone = judged(two.model_copy(update={"runs": two.runs[:1]}), "alike", checkpoint="my sd3")
    assert advice(alone).endswith("Before you rely on it: fluxq eval 'my sd3' --count 64.")


def test_checkpoints_are_compared_as_they_are_served_where_all_were_timed():
    found = example_report.example(4)
    stored, served = found.runs[0], found.runs[3]
    again = {"speed": None, "checkpoint": served.checkpoint, "name": "schnell-fp8 in fp8"}
    report = found.model_copy(update={"runs": (stored, served, served.model_copy(update=again))})
    said = advice(judged(report, "comparable", "comparable", "comparable"))
    assert said.startswith("Use schnell-nvfp4: ") and "2.08 (2.05 to 2.11) times its speed" in said
    assert "the smallest of 2 that are" in said and "in fp8" not in said
    slower = stored.model_copy(update={"speed": None})  # timed in no arithmetic that was evaluated
    report = report.model_copy(update={"runs": (slower, *report.runs[1:])})
    assert "times its speed" not in advice(judged(report, "comparable", "comparable", "comparable"))


def test_of_two_that_take_the_same_memory_the_closer_one_is_chosen():
    found = example_report.example(2, speed=None)
    first, second = found.runs  # the second is closer to 16 bit
    alike = example_report.served(4.5)
    larger = alike.model_copy(update={"resident_bytes": round(1.02 * alike.resident_bytes)})
    runs = (first.model_copy(update={"served": alike}), second.model_copy(update={"served": larger}))
    report = found.model_copy(update={"runs": runs})
    said = advice(judged(report, "comparable", "comparable"))
    assert said.startswith(
        "Use schnell-int8: as good as published, and the closest to 16 bit and as small as any of 2 "
    )
    undecided = tuple(each.model_copy(update={"p_holm": 0.5}) for each in report.comparisons)
    said = advice(judged(report.model_copy(update={"comparisons": undecided}), "comparable", "comparable"))
    assert said.startswith("Use schnell-nvfp4: as good as published, and as small as any of 2 ")


def test_what_computes_it_here_is_said():
    made = example_report.example(1, served=example_report.served(8.25, "int8"), speed=None)
    said = advice(judged(made, "comparable"))
    assert said.startswith("Use schnell-nvfp4 (re-encoded to int8 here): as good as published, with 12.3 GB in memory")
