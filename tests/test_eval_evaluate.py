import math
from dataclasses import replace

import pytest
import torch

from fluxq import tiny
from fluxq.eval.evaluate import METRICS, MetricNetworks, evaluate, measure
from fluxq.eval.fidelity import paired_interval, psnr
from fluxq.eval.generate import Generated, generate, items_for
from fluxq.eval.report import Facts

CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 2}
FACTS = Facts(model="tiny", recipe="noise", bytes_before=4000, bytes_after=1000, bits_per_weight=4.5)


@pytest.fixture(scope="module")
def pipes():
    """The embedded pipeline, and a copy whose last layer is disturbed."""
    before, after = tiny.load("float32"), tiny.load("float32")
    weight = after.transformer.proj_out.weight
    with torch.no_grad():
        weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return before, after


@pytest.fixture(scope="module")
def networks():
    images, _ = tiny.held_out()
    return MetricNetworks(tiny.feature_network(), "tiny features", tiny.clip_path(), images[:40])


@pytest.fixture(scope="module")
def sides(pipes):
    items = items_for(tiny.PROMPTS, 5, seed=3)
    return tuple(generate(pipe, items, CALL) for pipe in pipes)


def test_every_metric_is_taken(pipes, networks, sides):
    report = evaluate(*pipes, items_for(tiny.PROMPTS, 5, seed=3), CALL, metric_networks=networks, facts=FACTS)
    assert list(report["metrics"]) == list(METRICS)
    assert all(row["missing"] is None for row in report["metrics"].values())
    expected = paired_interval(psnr(sides[0].images, sides[1].images).tolist())
    got = report["metrics"]["psnr_db"]["value"]
    assert (got["mean"], got["low"], got["high"], got["n"]) == pytest.approx(
        (expected.mean, expected.low, expected.high, 5), abs=0.05
    )
    held_out = report["metrics"]["fid_to_held_out"]
    assert held_out["change"]["mean"] == pytest.approx(held_out["value"]["mean"] - held_out["baseline"]["mean"])
    assert "40 held-out images" in held_out["how"] and "5 images cannot fill" in held_out["notes"][0]
    clip = report["metrics"]["clip_score"]
    assert clip["change"]["mean"] == pytest.approx(clip["value"]["mean"] - clip["baseline"]["mean"])
    assert report["images"][2]["clip_score"] is not None
    assert f"{expected.mean:.1f} dB PSNR" in report["headline"] and "4.00 times less" in report["headline"]


def test_a_missing_network_is_said_not_replaced(sides):
    report = measure(*sides, CALL, metric_networks=None, facts=FACTS)
    missing = {key: row["missing"] for key, row in report["metrics"].items()}
    assert missing == {
        "psnr_db": None,
        "latent_sqnr_db": None,
        "latent_cosine": None,
        "fid_to_16bit": "no feature network was given",
        "fid_to_held_out": "no held-out images were given",
        "clip_score": "no CLIP folder was given",
    }
    assert report["metrics"]["clip_score"]["value"] is None


def test_one_image_has_no_fid(sides, networks):
    one = [Generated(side.items[:1], side.images[:1], side.latents[:1], side.finite[:1], 1.0, "cpu") for side in sides]
    report = measure(*one, CALL, metric_networks=networks, facts=FACTS)
    assert "two images" in report["metrics"]["fid_to_16bit"]["missing"]
    assert report["metrics"]["psnr_db"]["value"]["low"] is None
    assert "one image" in report["headline"]


def test_broken_images_stop_every_mean(sides, networks):
    finite = torch.tensor([True, False, True, True, False])
    report = measure(sides[0], replace(sides[1], finite=finite), CALL, metric_networks=networks, facts=FACTS)
    assert report["status"] == "broken" and report["headline"].startswith("2 of 5 images")
    assert all("2 of 5" in row["missing"] for row in report["metrics"].values() if row["missing"])
    assert all(row["value"] is None and row["missing"] for row in report["metrics"].values())
    assert [image["psnr_db"] is None for image in report["images"]] == (~finite).tolist()


def test_broken_reference_is_an_error(sides):
    reference = replace(sides[0], finite=torch.tensor([True, True, False, True, True]))
    with pytest.raises(ValueError, match="seed 5"):
        measure(reference, sides[1], CALL, metric_networks=None, facts=FACTS)


def test_a_model_against_itself(sides, networks):
    report = measure(sides[0], sides[0], CALL, metric_networks=networks, facts=FACTS)
    assert report["status"] == "identical" and "identical" in report["headline"]
    assert report["metrics"]["psnr_db"]["value"] == {"mean": None, "low": None, "high": None, "n": 0, "infinite": 5}
    assert report["metrics"]["fid_to_16bit"]["value"]["mean"] == pytest.approx(0, abs=1e-6)
    assert report["metrics"]["clip_score"]["change"]["mean"] == 0
    assert math.isclose(report["metrics"]["latent_cosine"]["value"]["mean"], 1.0)
