import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fluxq.eval.distribution import fid, fid_difference


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """LAPACK's eigenvalues take a hundred times as long when their threads fight for busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Lookup(nn.Module):
    """A feature network that answers with chosen features: an image's first two bytes are its row in the table."""

    def __init__(self, *sets):
        super().__init__()
        self.table = torch.from_numpy(np.concatenate(sets))
        self.num_features = self.table.shape[1]

    def forward(self, images):
        return self.table[images[:, 0, 0, 0].long() + 256 * images[:, 1, 0, 0].long()]


def score(a, b, batch_size=64):
    """FID of two sets of feature vectors (N, D)."""
    rows = torch.arange(len(a) + len(b))
    images = torch.zeros(len(rows), 3, 2, 2, dtype=torch.uint8)
    images[:, 0] = (rows % 256).view(-1, 1, 1)
    images[:, 1] = (rows // 256).view(-1, 1, 1)
    split = images.split([len(a), len(b)])
    return fid(*split, Lookup(a, b), name="table", label="held-out", batch_size=batch_size)


def cross_polytope(scales, mean=0.0, rotation=None):
    """2 D points whose sample mean and covariance (over N - 1) are exactly `mean` and diag(scales²), rotated."""
    d = len(scales)
    points = np.concatenate([np.eye(d), -np.eye(d)]) * math.sqrt((2 * d - 1) / 2) * np.asarray(scales)
    return points @ (np.eye(d) if rotation is None else rotation.T) + mean


def test_shifted_and_scaled_gaussians():  # F1
    shift = np.array([3.0] + [0.0] * 7)
    assert score(cross_polytope([1.0] * 8), cross_polytope([2.0] * 8, shift)).value == pytest.approx(17.0, abs=1e-9)


def test_a_set_against_itself():  # F2
    points = np.random.default_rng(0).normal(size=(40, 8))
    assert score(points, points).value == pytest.approx(0.0, abs=1e-9)


def test_commuting_covariances():  # F3
    sd = np.arange(1.0, 9.0)
    assert score(cross_polytope(sd), cross_polytope(sd[::-1])).value == pytest.approx(168.0, abs=1e-9)


def test_covariances_that_do_not_commute():  # F4
    sd = np.arange(1.0, 9.0)
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))
    got = score(cross_polytope(sd), cross_polytope(sd[::-1], rotation=rotation)).value
    assert got == pytest.approx(54.40060993613, rel=1e-9)


def test_fewer_images_than_features():  # F5
    rng = np.random.default_rng(0)
    rng.normal(size=(8, 8))
    a, b = rng.normal(size=(100, 512)), rng.normal(size=(100, 512)) + 0.1
    result = score(a, b)
    assert result.value == pytest.approx(666.68865631, rel=1e-6)
    assert "100 images" in result.bias and "512" in result.bias


def test_large_offset_does_not_cancel():  # F6
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(200, 6)), rng.normal(size=(200, 6)) * 1.1
    assert score(a + 1e3, b + 1e3).value == pytest.approx(score(a, b).value, rel=1e-6)


def test_order_and_batches_do_not_matter():  # F7
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(30, 5)), rng.normal(size=(30, 5)) + 0.2
    values = [score(a, b, size).value for size in (1, 7, 30)] + [score(a[::-1].copy(), rng.permutation(b), 4).value]
    assert values == pytest.approx([values[0]] * 4, rel=1e-10)


def test_float32_features_do_not_round_the_result():
    a, b = np.random.default_rng(7).normal(size=(2, 20, 4)).astype(np.float32)
    exact = score(a.astype(np.float64), b.astype(np.float64)).value
    assert score(a, b).value == pytest.approx(exact, rel=1e-12)
    assert abs(float(np.float32(exact)) / exact - 1) > 1e-12


def test_result_names_what_it_depends_on():
    rng = np.random.default_rng(5)
    result = score(rng.normal(size=(20, 4)), rng.normal(size=(30, 4)))
    assert (result.n, result.n_reference, result.features, result.network) == (20, 30, 4, "table")
    assert result.reference == "held-out" and "float64" in result.variant
    assert "compare only at N = 20" in result.bias


def test_unlike_values_are_not_subtracted():  # B3
    first = score(*np.random.default_rng(6).normal(size=(2, 20, 4)))
    assert fid_difference(replace(first, value=first.value + 1.5), first) == pytest.approx(1.5)
    changes = {
        "n": 21,
        "n_reference": 19,
        "network": "inception",
        "features": 5,
        "variant": "clean-fid",
        "reference": "16-bit images",
        "reference_digest": "other images",
    }
    for field, value in changes.items():
        with pytest.raises(ValueError, match=f"{field} is "):
            fid_difference(first, replace(first, **{field: value}))


def test_a_damaged_network_gives_an_error_and_no_zero():
    points = np.random.default_rng(8).normal(size=(20, 4))
    points[3, 2] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        score(points, points)


def test_one_image_or_floats_are_refused():
    images = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    network = Lookup(np.zeros((1, 2)))
    with pytest.raises(ValueError, match="got 1 generated"):
        fid(images[:1], images, network, name="t", label="held-out")
    with pytest.raises(ValueError, match="got 1 held-out"):
        fid(images, images[:1], network, name="t", label="held-out")
    with pytest.raises(ValueError, match="uint8"):
        fid(images / 255, images, network, name="t", label="held-out")
