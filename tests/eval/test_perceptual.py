"""SSIM, LPIPS and feature distance against closed forms and against the packages."""

import math

import pytest
import torch
from torch import nn

from fluxq.eval.metrics.perceptual import Lpips, feature_distance, ssim, structural_similarity


def images(count, size, seed=0):
    return torch.randint(
        0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_S1_ssim_of_constant_images():
    expected = (2 * 0.5 * 0.6 + 1e-4) / (0.25 + 0.36 + 1e-4)
    a, b = torch.full((3, 32, 32), 0.5), torch.full((3, 32, 32), 0.6)
    assert float(structural_similarity(a, b)) == pytest.approx(0.983609, abs=1e-6) == pytest.approx(expected, abs=1e-6)


def test_ssim_of_bytes_has_a_data_range_of_one():
    a, b = torch.full((1, 3, 16, 16), 102, dtype=torch.uint8), torch.full((1, 3, 16, 16), 153, dtype=torch.uint8)
    assert ssim(a, b).item() == pytest.approx((2 * 0.4 * 0.6 + 1e-4) / (0.16 + 0.36 + 1e-4), abs=1e-6)


def test_ssim_is_per_image_and_equals_torchmetrics():
    from torchmetrics.functional.image import structural_similarity_index_measure

    a, noise = images(3, 40), images(3, 40, seed=1)
    b = (a.float() * 0.8 + noise.float() * 0.2).round().to(torch.uint8)
    b[2] = a[2]
    theirs = structural_similarity_index_measure(a / 255, b / 255, data_range=1.0, reduction="none")
    found = ssim(a, b)
    assert found.tolist() == pytest.approx(theirs.tolist(), abs=1e-5)
    assert found[2] == 1 and found[0] < 0.999


def test_ssim_of_images_smaller_than_its_window_is_refused():
    assert ssim(images(1, 11), images(1, 11)).tolist() == [1.0]
    with pytest.raises(ValueError, match="window is 11 pixels wide, the images are 10 x 10"):
        ssim(images(1, 10), images(1, 10))


def test_feature_distance_is_relative():
    a, b = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert feature_distance(a, b).tolist() == pytest.approx([0.0, math.sqrt(2)])


@pytest.fixture(scope="module")
def backbone():
    """Random weights of torchvision's AlexNet."""
    from torchvision.models import alexnet

    torch.manual_seed(0)
    return alexnet(weights=None).features.state_dict(prefix="features.")


@pytest.fixture(scope="module")
def lpips(backbone):
    return Lpips(backbone)


@pytest.mark.slow
def test_L1_identical_images_have_no_distance(lpips):
    assert lpips.distance(images(2, 64), images(2, 64)).tolist() == [0.0, 0.0]


@pytest.mark.often(1)
@pytest.mark.filterwarnings("ignore:The parameter 'pretrained' is deprecated")
@pytest.mark.filterwarnings("ignore:Arguments other than a weight enum")
@pytest.mark.parametrize("size", [31, 64, 150])
def test_L1_equals_lpips_and_torchmetrics(lpips, backbone, size):
    from lpips import LPIPS
    from torchmetrics.functional.image.lpips import _lpips_update

    a, b = images(2, size), images(2, size, seed=1)
    theirs = LPIPS(net="alex", pnet_rand=True, verbose=False)
    names = {name: f"features.{name.split('.', 1)[1]}" for name in theirs.net.state_dict()}
    theirs.net.load_state_dict({name: backbone[source] for name, source in names.items()})
    ours = lpips.distance(a, b)
    with torch.no_grad():
        expected = theirs.eval()(a / 127.5 - 1, b / 127.5 - 1).flatten()
        torchmetrics = _lpips_update(a / 255, b / 255, lpips.network, normalize=True)
    assert ours.tolist() == pytest.approx(expected.tolist(), abs=1e-6) and ours.min() > 0.001
    assert ours.tolist() == pytest.approx(torchmetrics.tolist(), abs=1e-6)


@pytest.mark.slow
def test_L2_no_backbone_weight_is_left_random(backbone):
    torch.manual_seed(1)
    first = Lpips(backbone).distance(images(1, 64), images(1, 64, seed=1))
    torch.manual_seed(2)
    assert torch.equal(first, Lpips(backbone).distance(images(1, 64), images(1, 64, seed=1)))
    partly = {name: value for name, value in backbone.items() if name != "features.8.bias"}
    with pytest.raises(ValueError, match=r"lacks features\.8\.bias"):
        Lpips(partly)


def test_building_lpips_leaves_the_global_generator_alone(backbone):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Lpips(backbone)
    assert torch.equal(torch.rand(1), expected)


def test_small_images_and_floats_are_refused(lpips):
    with pytest.raises(ValueError, match="31 pixels a side, the images are 30 x 30"):
        lpips.distance(images(1, 30), images(1, 30))
    with pytest.raises(ValueError, match="uint8"):
        lpips.distance(images(1, 40) / 255, images(1, 40) / 255)


def test_no_network_of_ours_learns(lpips):
    assert not any(weight.requires_grad for weight in lpips.network.parameters())
    assert not any(isinstance(layer, nn.Dropout) and layer.training for layer in lpips.network.modules())
