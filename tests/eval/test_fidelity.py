import math
from collections.abc import Sequence

import pytest
import torch

from benchmarks.tiny_quality import within_item_intervals
from fluxq.eval.images.generate import Generated, images_digest
from fluxq.eval.images.protocols import items_of
from fluxq.eval.metrics.fidelity import cosine, fidelity, flat_images, psnr, sqnr
from fluxq.eval.metrics.statistics import paired_interval


def generated(images, latents=None, finite=None, seed=0):
    count = len(images)
    latents = torch.ones(count, 4) if latents is None else latents
    finite = torch.ones(count, dtype=torch.bool) if finite is None else finite
    return Generated(tuple(items_of(["p"], count, first_seed=seed)), images, latents, finite)


def flat(*levels):
    return torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous()


def test_P1_psnr_of_one_level():
    assert psnr(flat(100), flat(101)).item() == pytest.approx(48.130804, abs=1e-6)


def test_psnr_does_not_wrap_around_in_uint8():
    assert psnr(flat(10), flat(250)).item() == pytest.approx(20 * math.log10(255 / 240))


def off_by(levels, share, other):
    """An image that differs from black by `levels`, and in a share of its values by `other`."""
    image = torch.full((30000,), levels, dtype=torch.uint8)
    image[: round(share * 30000)] = other
    return image.reshape(3, 100, 100)


def test_P2_mean_is_of_decibels_not_of_squared_errors():
    """Root mean square differences of .1 and .01, that is of 25.5 and 2.55 levels."""
    images = [off_by(25, 0.4951, 26), off_by(2, 0.5005, 3)]
    values = psnr([torch.zeros(3, 100, 100, dtype=torch.uint8)] * 2, images)
    assert values.tolist() == pytest.approx([20, 40], abs=1e-4)
    assert paired_interval(values.tolist()).mean == pytest.approx(30.0000, abs=1e-4)
    pooled = 10 * math.log10(255**2 / torch.stack(images).double().square().mean())
    assert pooled == pytest.approx(22.9671, abs=1e-4)


def test_psnr_equals_torchmetrics():
    from torchmetrics.functional.image import peak_signal_noise_ratio

    a, b = torch.randint(0, 256, (2, 4, 3, 20, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    theirs = peak_signal_noise_ratio(a.float(), b.float(), data_range=255.0, reduction="none", dim=(1, 2, 3))
    assert psnr(a, b).tolist() == pytest.approx(theirs.tolist(), rel=1e-5)


class Lazy(Sequence):
    """Images that are read one at a time, as from a folder; `asked` says which."""

    def __init__(self, images):
        self.images, self.asked = images, []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if not isinstance(index, int) or index >= len(self):
            raise IndexError(index)
        self.asked.append(index)
        return self.images[index].clone()


def test_sets_that_are_read_from_disk_are_measured_one_by_one():
    before, after = flat(10, 20, 30), flat(11, 22, 33)
    lazy = Lazy(after)
    found, _ = fidelity(generated(Lazy(before), torch.rand(3, 4)), generated(lazy, torch.rand(3, 4)))
    assert found == tuple(psnr(before, after).tolist()) and lazy.asked == [0, 1, 2]
    assert images_digest(Lazy(before)) == images_digest(before)
    with pytest.raises(ValueError, match="3 images with 2"):
        psnr(before, after[:2])


def test_P3_identical_images_are_counted_apart():
    interval = paired_interval(psnr(flat(7, 7, 7), flat(7, 8, 9)).tolist())
    assert interval.infinite == 1 and interval.n == 2 and math.isfinite(interval.mean)


def test_sqnr_and_cosine_of_known_vectors():
    a, b = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[3.0, 3.5], [0.0, 1.0]])
    assert sqnr(a, b).tolist() == pytest.approx([20.0, 10 * math.log10(0.5)])
    assert cosine(a, b).tolist() == pytest.approx([23 / (5 * math.hypot(3, 3.5)), 0.0])


def test_floats_and_other_sizes_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        psnr(flat(1).float(), flat(1))
    with pytest.raises(ValueError, match="one size"):
        psnr(flat(1), flat(1)[..., :2])


def test_a_broken_image_poisons_the_mean_and_only_its_own_values():
    broken = generated(flat(9, 9), finite=torch.tensor([True, False]))
    result, _ = fidelity(generated(flat(10, 10)), broken)
    assert [math.isnan(value) for value in result] == [False, True]
    assert not paired_interval(result).mean >= 0  # so a gate fails


def test_other_seeds_are_refused():
    with pytest.raises(ValueError, match="prompts or seeds"):
        fidelity(generated(flat(1)), generated(flat(1), seed=1))


def test_digest_tells_images_apart_by_pixel_and_shape():
    images = flat(1, 2)
    assert images_digest(images) == images_digest(images.clone())
    changed = images.clone()
    changed[1, 2, 3, 3] += 1
    assert images_digest(images) != images_digest(changed)
    assert images_digest(images) != images_digest(images.reshape(2, 3, 8, 2))


def test_two_values_and_one_outlier_still_give_finite_limits():
    for values in ([1.0, 2.0], [1.0, 1.0, 1.0, 50.0]):
        got = paired_interval(values)
        assert min(values) <= got.low <= got.mean <= got.high <= max(values)


def test_within_item_intervals_leave_out_what_all_recipes_share():
    generator = torch.Generator().manual_seed(0)
    items = 10 * torch.randn(200, generator=generator)
    first = (items + 1 + 0.1 * torch.randn(200, generator=generator)).tolist()
    second = (items + 0.1 * torch.randn(200, generator=generator)).tolist()
    plain = [paired_interval(values) for values in (first, second)]
    within = within_item_intervals([first, second])
    assert plain[0].low < plain[1].high  # the items' own spread hides a difference of 1
    assert within[0].low > within[1].high
    assert [w.mean for w in within] == pytest.approx([p.mean for p in plain])
    # Two recipes: each half-width is that of their difference over sqrt(2).
    difference = paired_interval([a - b for a, b in zip(first, second, strict=True)])
    assert within[0].high - within[0].low == pytest.approx((difference.high - difference.low) / 2**0.5, rel=0.1)


def test_within_item_intervals_refuse_one_recipe_and_infinite_values():
    for conditions in ([[1.0, 2.0]], [[1.0, math.inf], [1.0, 2.0]]):
        with pytest.raises(ValueError, match="at least two recipes whose values are all finite"):
            within_item_intervals(conditions)


def test_images_of_one_colour_are_counted_where_16_bit_has_a_picture():
    picture = torch.randint(0, 256, (3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    nearly_white = torch.full((3, 4, 4), 255, dtype=torch.uint8)
    nearly_white[:, 0] = 253  # last bits
    blue = torch.tensor([0, 0, 255], dtype=torch.uint8).view(3, 1, 1).expand(3, 4, 4)
    before = generated(torch.stack([picture, picture, picture, blue]))
    after = generated(torch.stack([nearly_white, blue, picture, blue]))
    assert flat_images(before, after) == 2  # the last one is blue in 16 bit too
    gradient = torch.arange(16, dtype=torch.uint8).view(1, 4, 4).expand(3, 4, 4)
    assert flat_images(generated(picture[None]), generated(gradient[None])) == 0
