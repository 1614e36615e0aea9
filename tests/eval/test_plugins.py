"""Metrics of other packages: found, run, and named when they break."""

import importlib
import sys
import types

import pytest
import torch

from fluxq.eval.metrics import plugins
from fluxq.eval.metrics.plugins import ADAPTERS, Unmeasured, find_plugins, load_class, open_plugin, scores
from fluxq.jobs.requirements import require_measures

IMAGES = torch.arange(3 * 3 * 4 * 4, dtype=torch.uint8).reshape(3, 3, 4, 4)
PROMPTS = ["a cat", "a dog", "a cat"]

SOURCE = """
class Beauty:
    name, unit, digits, better, how = "Beauty", "points", ".1f", "higher", "mean colour"

    def __init__(self, device):
        self.device = device

    def score(self, images, prompts):
        return [float(image.float().mean()) for image in images]

class Broken(Beauty):
    def score(self, images, prompts):
        raise KeyError("weights")

class Unready(Beauty):
    def __init__(self, device):
        raise OSError("no weights here")

class Short(Beauty):
    def score(self, images, prompts):
        return [1.0]

class Nan(Beauty):
    def score(self, images, prompts):
        return [float("nan")] * len(images)

class Nothing:
    pass

class Sideways(Beauty):
    better = "sideways"

class Unitless(Beauty):
    unit = None

class Wide(Beauty):
    digits = "8.2f"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(key, target) is a distribution on the path that offers a metric."""
    (tmp_path / "beauty_metric.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(key, target, name="beauty"):
        info = tmp_path / f"{name}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[fluxq.metrics]\n{key} = {target}\n")
        importlib.invalidate_caches()

    yield add
    sys.modules.pop("beauty_metric", None)


def test_an_installed_plug_in_is_found_and_scores_each_image(install):
    install("beauty", "beauty_metric:Beauty")
    offer = find_plugins()["beauty"]
    assert offer.origin == "beauty 2.0" and load_class(offer).unit == "points"
    plugin = open_plugin(offer, "cpu")
    assert plugin.device == "cpu"
    assert scores(offer, plugin, IMAGES, PROMPTS) == tuple(IMAGES.float().mean((1, 2, 3)).tolist())


@pytest.mark.parametrize(
    "target, message",
    [
        ("beauty_metric:Broken", "failed: KeyError: 'weights'"),
        ("beauty_metric:Unready", "cannot be loaded: OSError: no weights here"),
        ("beauty_metric:Short", "gave 1 scores for 3 images"),
        ("beauty_metric:Nan", "NaN or infinite"),
        ("beauty_metric:Nothing", "lacks name, unit, digits, better, how, score"),
        ("beauty_metric:Sideways", "`better` is 'sideways'"),
        ("beauty_metric:Unitless", "no report takes what it says (unit: Input should be a valid string)"),
        ("beauty_metric:Wide", "no report takes what it says (digits: String should match pattern"),
        ("beauty_metric:Absent", "cannot be imported: AttributeError"),
        ("no_such_module:Beauty", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_broken_plug_in_names_itself(install, target, message):
    install("beauty", target)
    offer = find_plugins()["beauty"]
    with pytest.raises(Unmeasured, match=r"the metric plug-in 'beauty' of beauty 2\.0") as caught:
        scores(offer, open_plugin(offer, "cpu"), IMAGES, PROMPTS)
    assert message in str(caught.value)


def test_a_plug_in_s_metric_may_be_asked_for_by_name(install):
    with pytest.raises(ValueError, match="metric 'beauty' is unknown; known: psnr"):
        require_measures((), ["beauty"])
    install("beauty", "beauty_metric:Beauty")
    require_measures(["psnr>=20"], ["psnr", "beauty"])
    with pytest.raises(ValueError, match=r"metric 'beuty' is unknown \(did you mean 'beauty'\?\)"):
        require_measures((), ["beuty"])


def test_two_plug_ins_of_one_key_are_named(install):
    install("beauty", "beauty_metric:Beauty")
    install("beauty", "beauty_metric:Beauty", name="other")
    with pytest.raises(ValueError, match=r"'beauty' is offered by .* 2\.0 and by .* 2\.0: uninstall one"):
        find_plugins()


def test_an_adapter_is_not_silently_replaced(install):
    install("hpsv2", "beauty_metric:Beauty")
    with pytest.raises(ValueError, match="'hpsv2' is offered by fluxq and by beauty"):
        find_plugins()


@pytest.mark.parametrize("key, package", [("image_reward", "image-reward"), ("hpsv2", "hpsv2")])
def test_adapters_say_which_package_is_missing(key, package, monkeypatch):
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    assert ADAPTERS[key].absent == f"the package {package} is not installed: pip install {package}"
    with pytest.raises(Unmeasured, match=f"pip install {package}"):
        open_plugin(ADAPTERS[key], "cpu")


def test_image_reward_is_asked_image_by_image(monkeypatch):
    """Against a stand-in with the package's interface: no real weights were at hand."""
    from PIL import Image

    asked = []

    class Model:
        def score(self, prompt, image):
            assert isinstance(image, Image.Image)  # beside names of files, all that it takes
            asked.append((prompt, image.getpixel((0, 0))))
            return float(len(asked))

    fake = types.ModuleType("ImageReward")
    fake.load = lambda name, device: Model()
    monkeypatch.setitem(sys.modules, "ImageReward", fake)
    monkeypatch.setattr(plugins, "find_spec", lambda name: object())
    offer = ADAPTERS["image_reward"]
    assert scores(offer, open_plugin(offer, "cpu"), IMAGES, PROMPTS) == (1.0, 2.0, 3.0)
    assert asked == [(prompt, tuple(image[:, 0, 0].tolist())) for prompt, image in zip(PROMPTS, IMAGES, strict=True)]


def test_hpsv2_gets_the_images_of_a_prompt_together(monkeypatch):
    """Against a stand-in with the package's interface: no real weights were at hand."""
    calls = []

    def score(pictures, prompt, hps_version):
        calls.append((prompt, len(pictures), hps_version))
        return [picture.getpixel((0, 0))[0] / 1000 for picture in pictures]

    fake = types.ModuleType("hpsv2")
    fake.score = score
    monkeypatch.setitem(sys.modules, "hpsv2", fake)
    monkeypatch.setattr(plugins, "find_spec", lambda name: object())
    offer = ADAPTERS["hpsv2"]
    found = scores(offer, open_plugin(offer, "cpu"), IMAGES, PROMPTS)
    assert found == pytest.approx([float(image[0, 0, 0]) / 10 for image in IMAGES])
    assert calls == [("a cat", 2, "v2.1"), ("a dog", 1, "v2.1")]
