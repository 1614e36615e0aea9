"""Every row of METRICS on images of the embedded pipeline, and what is said where one cannot be taken."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fluxq import tiny
from fluxq.eval.images.generate import Generated, to_uint8
from fluxq.eval.metrics import metrics as module
from fluxq.eval.metrics import plugins
from fluxq.eval.metrics.distribution import Moments
from fluxq.eval.metrics.fidelity import psnr
from fluxq.eval.metrics.metrics import METRICS, Measured, MetricRow, Sample, metric_rows, missing
from fluxq.eval.metrics.networks import NEEDS, Networks
from fluxq.eval.metrics.perceptual import Lpips
from fluxq.eval.metrics.plugins import PluginSource, Unmeasured
from fluxq.eval.metrics.statistics import clustered_interval
from fluxq.recipes.recipe import GATE_METRICS

COUNT = 100  # more than the 64 features of the embedded network
PER_IMAGE = {"psnr", "ssim", "latent_sqnr", "latent_cosine", "feature_distance", "clip_score"}
OF_SETS = {"fid", "fid_to_16bit", "fid_infinity", "kid", "cmmd"}
FOREIGN = {"lpips", "image_reward", "hpsv2"}  # their weights are not in the package
OF_VIDEOS = {"worst_frame_psnr", "temporal_psnr", "flicker", "video_distance"}  # see test_video.py


def some(images, seed=0, finite=None):
    """A set of images: two of each prompt, and latents that are theirs."""
    latents = images.float() / 255 + 0.01 * seed
    items = tuple((tiny.PROMPTS[index // 2], 7 + index % 2) for index in range(len(images)))
    finite = torch.ones(len(images), dtype=torch.bool) if finite is None else finite
    return Generated(items, images, latents, finite)


@pytest.fixture(scope="module")
def pictures():
    """Images that no training saw: real ones, and two disturbed copies of others."""
    images, _ = tiny.held_out()
    noise = torch.randint(-9, 10, images[:COUNT].shape, generator=torch.Generator().manual_seed(0))
    return images[-300:], images[:COUNT], (images[:COUNT].int() + noise).clamp(0, 255).to(torch.uint8)


@pytest.fixture
def networks(pictures):
    return Networks(
        feature_network=tiny.feature_network(),
        feature_name="tiny features",
        clip=str(tiny.clip_path()),
        reference_images=pictures[0],
    )


@pytest.fixture
def sample(pictures, networks):
    return Sample(some(pictures[1]), some(pictures[2], seed=1), networks)


@pytest.mark.slow
def test_every_metric_is_taken(sample):
    taken = {key: METRICS[key].measure(sample) for key in METRICS.keys() - FOREIGN - OF_VIDEOS}
    assert set(taken) == PER_IMAGE | OF_SETS
    for key, found in taken.items():
        assert found.value.n == COUNT and math.isfinite(found.value.mean) and found.missing is None
        if key in PER_IMAGE:
            assert len(found.per_image) == COUNT and found.value.low < found.value.mean < found.value.high
        else:
            assert found.per_image is None and math.isnan(found.value.low)
    changed = {key for key, found in taken.items() if found.change}
    assert changed == {"fid", "fid_infinity", "kid", "cmmd", "clip_score"}
    for key in changed:
        found = taken[key]
        assert found.change.mean == pytest.approx(found.value.mean - found.baseline.mean)
    assert len(taken["clip_score"].change_per_image) == COUNT
    assert taken["psnr"].per_image == tuple(psnr(sample.reference.images, sample.quantized.images).tolist())
    assert "tiny features (64 features; uint8 input" in taken["fid"].how and "300 held-out images" in taken["fid"].how
    assert "compare only at N = 100" in taken["fid"].notes[0]
    assert "share prompts and noise" in taken["fid_to_16bit"].notes[0]
    assert "too few for 64 features" in taken["fid_infinity"].notes[-1]
    assert "subsets of 50 images" in taken["kid"].notes[0]
    assert "36 places" in taken["ssim"].notes[0]
    assert "LPIPS" not in METRICS["feature_distance"].name + str(taken["feature_distance"].how)


def test_images_of_one_prompt_stay_together_in_the_interval(sample):
    found = METRICS["psnr"].measure(sample)
    assert found.value == clustered_interval(found.per_image, sample.prompts)
    assert len(set(sample.prompts)) == COUNT // 2


@pytest.mark.slow
def test_Q1_a_model_against_itself(pictures, networks):
    same = Sample(some(pictures[1]), some(pictures[1].clone()), networks)
    taken = {key: METRICS[key].measure(same) for key in METRICS.keys() - FOREIGN - OF_VIDEOS}
    assert taken["psnr"].value.infinite == COUNT and math.isinf(taken["psnr"].value.mean)
    assert taken["ssim"].value.mean == pytest.approx(1, abs=1e-12) and taken["feature_distance"].value.mean == 0
    assert taken["latent_cosine"].value.mean == pytest.approx(1)
    assert taken["fid_to_16bit"].value.mean == pytest.approx(0, abs=1e-6)
    for key in ("fid", "fid_infinity", "kid", "cmmd", "clip_score"):
        assert taken[key].change.mean == 0
    assert taken["clip_score"].change.low <= 0 <= taken["clip_score"].change.high


@pytest.mark.slow
def test_Q1_lpips_of_identical_images_is_zero_and_small_ones_have_none(networks, pictures):
    from torchvision.models import alexnet

    torch.manual_seed(0)
    backbone = alexnet(weights=None).features.state_dict(prefix="features.")
    networks = replace(networks, lpips=Path("alexnet.pth"))
    networks.__dict__["lpips_network"] = Lpips(backbone)  # as the checked file would have given it
    large = torch.randint(0, 256, (4, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = METRICS["lpips"].measure(Sample(some(large), some(large.clone()), networks))
    assert found.per_image == (0, 0, 0, 0) and found.value.high == 0
    other = METRICS["lpips"].measure(Sample(some(large), some(large.flip(0)), networks))
    assert other.value.mean > 0.01
    with pytest.raises(Unmeasured, match="AlexNet needs 31 pixels a side, the images are 16 x 16"):
        METRICS["lpips"].measure(Sample(some(pictures[1]), some(pictures[2]), networks))


def test_a_missing_piece_is_said_with_its_cure(sample):
    bare = Sample(sample.reference, sample.quantized, Networks())
    for key, row in METRICS.items():
        if row.needs and key not in OF_VIDEOS:
            reason = missing(key, bare.networks)
            assert reason and any(word in reason for word in ("--clip", "--fid-reference", "put ")), key
            with pytest.raises(Unmeasured) as caught:
                row.measure(bare)
            assert str(caught.value) == reason
    assert missing("psnr", bare.networks) is None and missing("fid", sample.networks) is None


def test_needs_are_known():
    assert {need for row in METRICS.values() for need in row.needs} == set(NEEDS)


def test_gates_name_metrics():
    assert set(METRICS) <= set(GATE_METRICS)


def test_broken_images_stop_every_mean_and_keep_the_whole_ones(sample):
    finite = torch.arange(COUNT) % 5 != 1
    broken = Sample(sample.reference, replace(sample.quantized, finite=finite), sample.networks)
    for key in PER_IMAGE - {"clip_score"}:
        found = METRICS[key].measure(broken)
        assert found.value is None and found.missing == "20 of 100 quantized images hold NaN or infinity"
        assert [math.isnan(value) for value in found.per_image] == (~finite).tolist()
    for key in OF_SETS | {"clip_score"}:
        with pytest.raises(Unmeasured, match="20 of 100 quantized images hold NaN"):
            METRICS[key].measure(broken)


def test_too_few_images_are_said(pictures, networks):
    one = Sample(some(pictures[1][:1]), some(pictures[2][:1]), networks)
    assert math.isnan(METRICS["psnr"].measure(one).value.low)
    for key in ("fid", "fid_to_16bit", "fid_infinity", "kid"):
        with pytest.raises(Unmeasured, match="at least two images"):
            METRICS[key].measure(one)
    few = Sample(some(pictures[1][:60]), some(pictures[2][:60]), networks)
    with pytest.raises(Unmeasured, match="more than 64 images a side, got 60"):
        METRICS["fid_infinity"].measure(few)
    alone = replace(networks, reference_images=pictures[0][:1])
    with pytest.raises(Unmeasured, match="got 1 held-out images"):
        METRICS["kid"].measure(Sample(some(pictures[1]), some(pictures[2]), alone))


def test_images_smaller_than_the_window_have_no_ssim(networks):
    small = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(Unmeasured, match="its window is 11 pixels wide, the images are 8 x 8"):
        METRICS["ssim"].measure(Sample(some(small), some(small), networks))


def test_features_are_taken_once_for_all_metrics_and_runs(pictures, networks, monkeypatch):
    taken = []
    real = module.extract
    monkeypatch.setattr(module, "extract", lambda images, *a, **k: taken.append(len(images)) or real(images, *a, **k))
    reference = some(pictures[1])
    for run in (some(pictures[2], seed=1), some(pictures[1].flip(3), seed=2)):
        sample = Sample(reference, run, networks)
        for key in ("feature_distance", "fid", "fid_to_16bit", "fid_infinity", "kid"):
            METRICS[key].measure(sample)
    assert sorted(taken) == [COUNT, COUNT, COUNT, 300]


def test_statistics_of_a_file_stand_for_images(sample, networks):
    features = sample.features(networks.reference_images)
    moments = Moments(features.moments.mu, features.moments.sigma, None, None, None)
    bare = replace(networks, reference_images=None, reference_statistics=moments, reference_name="val.npz")
    held = Sample(sample.reference, sample.quantized, bare)
    found = METRICS["fid"].measure(held)
    assert found.value.mean == pytest.approx(METRICS["fid"].measure(sample).value.mean)
    assert "an unknown number of val.npz" in found.how
    assert "does not say which network and resize" in found.notes[-1]
    assert "stays in it" in METRICS["fid_infinity"].measure(held).notes[-1]
    with pytest.raises(Unmeasured, match="a mean and a covariance only"):
        METRICS["kid"].measure(held)
    wrong = replace(bare, reference_statistics=replace(moments, mu=moments.mu[:3], sigma=moments.sigma[:3, :3]))
    with pytest.raises(Unmeasured, match="64 and 3 dimensions"):
        METRICS["fid"].measure(Sample(sample.reference, sample.quantized, wrong))


def test_truncated_prompts_and_doubts_are_noted(sample, monkeypatch):
    items = tuple(
        (prompt + " red" * 50 * (index < 3), seed) for index, (prompt, seed) in enumerate(sample.quantized.items)
    )
    long = Sample(replace(sample.reference, items=items), replace(sample.quantized, items=items), sample.networks)
    scorer = sample.networks.clip_scorer
    monkeypatch.setattr(scorer, "warnings", ("trained with QuickGELU",))
    notes = METRICS["clip_score"].measure(long).notes
    assert notes[0].startswith("3 of 100 prompts are longer") and notes[1] == "trained with QuickGELU"


class Brightness:
    """A plug-in's class."""

    name, unit, digits, better, how = "Brightness", "", ".2f", "higher", "mean of all values"

    def __init__(self, device):
        self.device = device

    def score(self, images, prompts):
        return [float(image.float().mean()) for image in images]


def test_a_plug_in_is_a_metric_like_any_other(sample, monkeypatch):
    offers = {**plugins.ADAPTERS, "brightness": PluginSource("brightness", "bright 1.0", lambda: Brightness)}
    monkeypatch.setattr(module, "find_plugins", lambda: offers)
    rows = metric_rows()
    assert list(rows) == [*METRICS, "brightness"] and isinstance(rows["brightness"], MetricRow)
    found = rows["brightness"].measure(sample)
    assert isinstance(found, Measured) and found.value.mean == pytest.approx(np.mean(found.per_image))
    assert found.per_image == tuple(sample.quantized.images.float().mean((1, 2, 3)).tolist())
    assert found.change.mean == pytest.approx(found.value.mean - found.baseline.mean)
    assert missing("brightness", sample.networks) is None


def test_a_plug_in_is_loaded_once_for_all_runs(monkeypatch):
    loaded = []

    class Counted(Brightness):
        def __init__(self, device):
            loaded.append(device)

    def offers():  # made anew by each look, as of entry points
        return {"brightness": PluginSource("brightness", "bright 1.0", lambda: Counted)}

    monkeypatch.setattr(module, "find_plugins", offers)
    images, networks = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), Networks()
    for seed in (1, 2):
        metric_rows()["brightness"].measure(Sample(some(images), some(images, seed), networks))
    assert loaded == ["cpu"]


def test_a_broken_plug_in_takes_no_other_metric_with_it(sample, monkeypatch):
    def fail():
        raise ImportError("no library")

    offers = {**plugins.ADAPTERS, "bad": PluginSource("bad", "bad 1.0", fail)}
    monkeypatch.setattr(module, "find_plugins", lambda: offers)
    row = metric_rows()["bad"]
    with pytest.raises(Unmeasured, match=r"plug-in 'bad' of bad 1\.0 cannot be imported: ImportError: no library"):
        row.measure(sample)
    assert "cannot be imported" in missing("bad", sample.networks) and METRICS["psnr"].measure(sample).value
    monkeypatch.setattr(module, "find_plugins", lambda: {"fid": PluginSource("fid", "bad 1.0", fail)})
    with pytest.raises(ValueError, match=r"bad 1\.0 offers a metric 'fid', which is one of fluxq's own"):
        metric_rows()


@pytest.mark.parametrize("key, package", [("image_reward", "image-reward"), ("hpsv2", "hpsv2")])
def test_an_absent_package_is_named_before_any_image_is_made(sample, monkeypatch, key, package):
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    assert missing(key, sample.networks) == f"the package {package} is not installed: pip install {package}"
    with pytest.raises(Unmeasured, match=f"pip install {package}"):
        METRICS[key].measure(sample)


def test_U1_floats_are_rounded_to_bytes_as_pil_images_are():
    from diffusers.image_processor import VaeImageProcessor

    generator = torch.Generator().manual_seed(0)
    floats = torch.cat([torch.rand(3 * 64 * 64 - 512, generator=generator), torch.arange(512) / 511]).reshape(3, 64, 64)
    (pil,) = VaeImageProcessor.numpy_to_pil(floats.permute(1, 2, 0).numpy()[None])
    assert torch.equal(to_uint8(floats), torch.from_numpy(np.array(pil)).permute(2, 0, 1))
    assert not torch.equal(to_uint8(floats), (floats * 255).byte())  # truncation, half a level darker
