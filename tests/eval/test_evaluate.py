"""From two sets of images to the runs of a report."""

import math
from dataclasses import replace

import pytest
import torch

from fluxq import tiny
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.images.protocols import items_of
from fluxq.eval.images.sides import Side
from fluxq.eval.metrics.evaluate import Candidate, judge_gates, measure_floor, measure_runs
from fluxq.eval.metrics.fidelity import psnr
from fluxq.eval.metrics.metrics import METRICS
from fluxq.eval.metrics.networks import Networks
from fluxq.eval.metrics.schema import CheckpointSize
from fluxq.eval.metrics.statistics import clustered_interval

CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 2}
ITEMS = items_of(tiny.PROMPTS, 5, first_seed=3)
SIZE = CheckpointSize(
    components=("transformer",), bytes_before=4000, bytes_after=1000, bits_per_weight=4.5, bits_per_quantized_weight=4.5
)
NEED_WEIGHTS = {"lpips", "image_reward", "hpsv2"}
OF_IMAGES = tuple(key for key, row in METRICS.items() if not row.only_video)


@pytest.fixture(scope="module")
def sides():
    """Images of the embedded pipeline, and of a copy whose last layer is disturbed."""
    before, after = tiny.load("float32"), tiny.load("float32")
    weight = after.transformer.proj_out.weight
    with torch.no_grad():
        weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return tuple(generate(pipe, ITEMS, CALL) for pipe in (before, after))


@pytest.fixture(scope="module")
def networks():
    images, _ = tiny.held_out()
    return Networks(
        feature_network=tiny.feature_network(),
        feature_name="tiny features",
        clip=str(tiny.clip_path()),
        reference_images=images[:40],
    )


def measure(reference, *sets, networks=None, gates=(), floor=({}, None), keys=OF_IMAGES):
    candidates = [
        Candidate(Side(f"side {k}", "", "d"), "made", "noise", "digest", SIZE, gates=gates) for k in range(len(sets))
    ]
    return measure_runs(candidates, reference, sets, keys=keys, networks=networks or Networks(), floor=floor)


def first(made: Generated, count: int) -> Generated:
    return Generated(made.items[:count], made.images[:count], made.latents[:count], made.finite[:count])


@pytest.mark.slow
def test_every_metric_is_a_row_with_its_interval(sides, networks):
    (run,) = measure(*sides, networks=networks)
    assert tuple(run.metrics) == OF_IMAGES
    assert {key for key, row in run.metrics.items() if row.missing} == NEED_WEIGHTS | {"fid_infinity"}
    values = psnr(sides[0].images, sides[1].images).tolist()
    expected = clustered_interval(values, [prompt for prompt, _ in ITEMS])
    got = run.metrics["psnr"].value
    assert (got.mean, got.low, got.high, got.n) == (expected.mean, expected.low, expected.high, 5)
    assert [image.values["psnr"] for image in run.images] == values
    for key in ("fid", "clip_score"):
        row = run.metrics[key]
        assert row.change.mean == pytest.approx(row.value.mean - row.baseline.mean)
    assert run.images[2].changes["clip_score"] is not None and "psnr" not in run.images[2].changes
    assert run.status == "measured" and run.wall.groups
    assert run.metrics["psnr"].margin.low == 17.5 and run.checkpoint == "made"


def test_a_missing_network_is_said_not_replaced(sides):
    (run,) = measure(*sides)
    missing = {key: row.missing for key, row in run.metrics.items() if row.missing}
    assert NEED_WEIGHTS | {"fid", "kid", "clip_score", "feature_distance"} <= missing.keys()
    assert "alexnet-owt-7be5be79.pth" in missing["lpips"] and "--clip" in missing["clip_score"]
    assert run.metrics["clip_score"].value is None and run.metrics["psnr"].value is not None


def test_broken_images_stop_every_mean_and_keep_what_is_whole(sides, networks):
    finite = torch.tensor([True, False, True, True, False])
    (run,) = measure(sides[0], replace(sides[1], finite=finite), networks=networks)
    assert run.status == "broken" and run.verdict.outcome == "broken" and run.verdict.text.startswith("2 of 5 images")
    assert all(row.value is None and row.missing for row in run.metrics.values())
    assert [image.values["psnr"] is None for image in run.images] == (~finite).tolist()


def test_a_broken_reference_is_an_error_that_names_the_image(sides):
    reference = replace(sides[0], finite=torch.tensor([True, True, False, True, True]))
    with pytest.raises(ValueError, match="seed 5"):
        measure(reference, sides[1])


def test_other_prompts_are_not_compared(sides):
    with pytest.raises(ValueError, match="5 16-bit images and 4 quantized ones come from different prompts"):
        measure(sides[0], first(sides[1], 4))
    with pytest.raises(ValueError, match="5 16-bit images and 5 quantized ones come from different prompts or seeds"):
        measure(sides[0], replace(sides[1], items=sides[1].items[::-1]))


def test_a_model_against_itself(sides, networks):  # Q1 of the conformance cases
    (run,) = measure(sides[0], sides[0], networks=networks)
    assert run.status == "identical" and run.verdict.outcome == "identical"
    value = run.metrics["psnr"].value
    assert (value.mean, value.low, value.high, value.n, value.infinite) == (None, None, None, 0, 5)
    assert run.metrics["fid_to_16bit"].value.mean == pytest.approx(0, abs=1e-6)
    change = run.metrics["clip_score"].change
    assert change.mean == 0 and change.low <= 0 <= change.high
    assert math.isclose(run.metrics["latent_cosine"].value.mean, 1.0)


def test_the_noise_floor_has_what_is_paired_and_nothing_else(sides, networks):
    floor, _ = measure_floor(*(first(side, 3) for side in sides), tuple(METRICS), networks)
    assert set(floor) == {"psnr", "ssim", "latent_sqnr", "latent_cosine", "feature_distance"}
    assert floor["psnr"].n == 3
    (run,) = measure(*sides, networks=networks, floor=(floor, None))
    assert run.metrics["psnr"].floor.mean == floor["psnr"].mean and run.metrics["fid"].floor is None


@pytest.mark.parametrize(
    ("gate", "value", "passed"),
    [
        ("psnr>=20", 25.0, True),
        ("psnr>=30", 25.0, False),
        ("24<=psnr<=26", 25.0, True),
        ("20<=psnr<=24", 25.0, False),  # too good is a failure too
        ("psnr>=30", math.inf, True),  # identical images
        ("psnr>=30", math.nan, False),
    ],
)
def test_gates(gate, value, passed):
    (judged,) = judge_gates([gate], {"psnr": value})
    assert judged.passed is passed and judged.value == (value if math.isfinite(value) else None)


def test_a_gate_on_what_was_not_measured_does_not_pass():
    assert [gate.passed for gate in judge_gates(["lpips<=0.5"], {})] == [False]


def test_runs_of_one_evaluation_show_the_same_images(sides):
    """Chosen by the worst that any of them makes of each, so that a row of pictures is whole."""
    many = tuple((f"prompt {index}", index) for index in range(20))
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(60, 190, (20, 3, 8, 8), dtype=torch.uint8, generator=draw)

    def noisy(strong: int):
        noise = torch.randint(-2, 3, images.shape, generator=draw)
        noise[strong] *= 25
        made = (images.int() + noise).clamp(0, 255).to(torch.uint8)
        return Generated(many, made, torch.ones(20, 4), torch.ones(20, dtype=torch.bool))

    reference = Generated(many, images, torch.ones(20, 4), torch.ones(20, dtype=torch.bool))
    first, second = measure(reference, noisy(4), noisy(11), keys=("psnr",))
    shown = [
        {name: [picture.index for picture in pictures] for name, pictures in run.wall.groups.items()}
        for run in (first, second)
    ]
    assert shown[0] == shown[1] and {4, 11} <= set(shown[0]["worst"])
