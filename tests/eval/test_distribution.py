"""Fréchet and kernel distances against closed forms and against the packages that publish them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from fluxq.eval.metrics import distribution
from fluxq.eval.metrics.distribution import (
    RESIZES,
    FeatureNetwork,
    Features,
    Moments,
    cmmd,
    extract,
    fid,
    fid_bias,
    fid_infinity,
    frechet_distance,
    inception,
    kernel_distance,
    kid,
    read_statistics,
)
from fluxq.eval.metrics.plugins import Unmeasured


def seen(values, **changes):
    """Features as if a network had given them."""
    features = Features(torch.as_tensor(np.ascontiguousarray(values)), "table", "as they are")
    return replace(features, **changes)


def score(a, b):
    return fid(seen(a), seen(b), "held-out images")


def cross_polytope(scales, mean=0.0, rotation=None):
    """2 D points whose sample mean and covariance (over N - 1) are exactly `mean` and diag(scales²), rotated."""
    d = len(scales)
    points = np.concatenate([np.eye(d), -np.eye(d)]) * math.sqrt((2 * d - 1) / 2) * np.asarray(scales)
    return points @ (np.eye(d) if rotation is None else rotation.T) + mean


def wide_sets():
    """F5: fewer images than features."""
    rng = np.random.default_rng(0)
    rng.normal(size=(8, 8))
    return rng.normal(size=(100, 512)), rng.normal(size=(100, 512)) + 0.1


def test_F1_shifted_and_scaled_gaussians():
    shift = np.array([3.0] + [0.0] * 7)
    assert score(cross_polytope([1.0] * 8), cross_polytope([2.0] * 8, shift)) == pytest.approx(17.0, abs=1e-9)


def test_F2_a_set_against_itself():
    points = np.random.default_rng(0).normal(size=(40, 8))
    assert score(points, points) == pytest.approx(0.0, abs=1e-9)


def test_F3_commuting_covariances():
    sd = np.arange(1.0, 9.0)
    assert score(cross_polytope(sd), cross_polytope(sd[::-1])) == pytest.approx(168.0, abs=1e-9)


def test_F4_covariances_that_do_not_commute():
    sd = np.arange(1.0, 9.0)
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))
    got = score(cross_polytope(sd), cross_polytope(sd[::-1], rotation=rotation))
    assert got == pytest.approx(54.40060993613, rel=1e-9)


def test_F5_fewer_images_than_features():
    few, others = map(seen, wide_sets())
    assert fid(few, others, "held-out images") == pytest.approx(666.68865631, rel=1e-6)
    assert "100 images" in fid_bias(few, others) and "512" in fid_bias(few, others)


@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_F6_large_offset_does_not_cancel(offset):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(200, 6)), rng.normal(size=(200, 6)) * 1.1
    assert score(a + offset, b + offset) == pytest.approx(score(a, b), rel=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_F7_order_and_shards_do_not_matter(shards):
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(30, 5)), rng.normal(size=(30, 5)) + 0.2
    merged = np.concatenate(np.array_split(a, shards)[::-1])
    assert score(merged, rng.permutation(b)) == pytest.approx(score(a, b), rel=1e-10)
    kernel = kid(seen(merged), seen(rng.permutation(b)))[0]
    assert kernel == pytest.approx(kid(seen(a), seen(b))[0], rel=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The `disp` argument is deprecated")
@pytest.mark.parametrize("case", ["full", "wide"])
def test_frechet_equals_the_packages(case):
    from cleanfid.fid import frechet_distance as cleanfid_distance
    from pytorch_fid.fid_score import calculate_frechet_distance
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torchmetrics.image.fid import FrechetInceptionDistance

    if case == "wide":
        a, b = wide_sets()
    else:
        rng = np.random.default_rng(1)
        mix = rng.normal(size=(12, 12))
        a, b = rng.normal(size=(300, 12)) @ mix, rng.normal(size=(200, 12)) * 1.2 + 0.3
    ours = score(a, b)
    first, second = (fid_features_to_statistics(torch.from_numpy(x)) for x in (a, b))
    moments = first["mu"], first["sigma"], second["mu"], second["sigma"]
    fidelity = fid_statistics_to_metric(first, second, verbose=False)["frechet_inception_distance"]
    root = scipy.linalg.sqrtm(first["sigma"] @ second["sigma"])
    scipy_value = np.square(moments[0] - moments[2]).sum() + np.trace(moments[1] + moments[3] - 2 * root.real)
    identity = nn.Identity()
    identity.num_features = a.shape[1]
    metric = FrechetInceptionDistance(feature=identity)
    metric.update(torch.from_numpy(a), real=False)
    metric.update(torch.from_numpy(b), real=True)
    others = [
        fidelity,
        scipy_value,
        calculate_frechet_distance(*moments),
        cleanfid_distance(*moments),
        metric.compute(),
    ]
    assert [float(other) for other in others] == pytest.approx([ours] * 5, rel=1e-6)


def test_float32_features_do_not_round_the_result():
    a, b = np.random.default_rng(7).normal(size=(2, 20, 4)).astype(np.float32)
    assert score(a, b) == pytest.approx(score(a.astype(np.float64), b.astype(np.float64)), rel=1e-12)


def test_more_images_than_features_are_compared_at_their_number():
    rng = np.random.default_rng(5)
    images, others = seen(rng.normal(size=(20, 4))), seen(rng.normal(size=(30, 4)))
    assert "compare only at N = 20" in fid_bias(images, others)
    assert "4 images cannot fill" in fid_bias(images, seen(rng.normal(size=(4, 4))))


@pytest.mark.parametrize("field", ["network", "variant", "extractor"])
def test_B3_features_made_in_different_ways_have_no_distance(field):
    values = np.random.default_rng(6).normal(size=(20, 4))
    for measure in (lambda a, b: fid(a, b, "x"), kid, fid_infinity):
        with pytest.raises(Unmeasured, match=f"{field} is "):
            measure(seen(values), seen(values, **{field: "another"}))
    assert fid(seen(values), seen(values, **{field: None}), "x") < 1e-9  # a file that does not say


@pytest.mark.slow
def test_B1_fid_at_infinity_undoes_the_bias():
    """d = 256, power-law spectrum, true FID .1664 (a shift): 5,000 images a side say about .605."""
    d, n, truth = 256, 5000, 0.1664
    sd = np.arange(1, d + 1) ** -0.5 * math.sqrt(5.27)
    shift = np.zeros(d)
    shift[:16] = math.sqrt(truth / 16)
    rng = np.random.default_rng(0)
    a, b = seen(rng.normal(size=(n, d)) * sd), seen(rng.normal(size=(n, d)) * sd + shift)
    assert fid(a, b, "x") == pytest.approx(0.605, abs=0.03)
    found, error, sizes = fid_infinity(a, b)
    assert found == pytest.approx(truth, abs=0.05) and 0 < error < 0.05
    assert (found, error, sizes) == fid_infinity(a, b) and found != fid_infinity(a, b, seed=1)[0]
    assert sizes[0] == 1000 and sizes[-1] == n
    exact = Moments(torch.from_numpy(shift), torch.diag(torch.from_numpy(sd**2)), None, None, None)
    assert fid_infinity(a, exact)[0] == pytest.approx(truth, abs=0.05)
    with pytest.raises(Unmeasured, match="more than 256 images a side, got 200"):
        fid_infinity(replace(a, values=a.values[:200]), b)


def test_K1_kernel_distance_by_hand():
    assert kernel_distance(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])) == 9.5


def test_K2_kernel_distance_of_full_sets_equals_the_packages(monkeypatch):
    from torch_fidelity.metric_kid import kernel_poly, mmd2
    from torchmetrics.image.kid import poly_mmd

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(500, 64)), 1.05 * rng.normal(size=(500, 64)) + 0.02
    ours = kid(seen(x), seen(y))[0]
    assert ours == pytest.approx(0.0051456171754642, abs=1e-12)
    assert float(poly_mmd(torch.from_numpy(x), torch.from_numpy(y))) == pytest.approx(ours, abs=1e-12)
    kernels = [kernel_poly(a, b, kid_kernel_poly_degree=3) for a, b in ((x, x), (x, y), (y, y))]
    assert mmd2(*kernels) == pytest.approx(ours, abs=1e-12)
    monkeypatch.setattr(distribution, "_BLOCK", 7)
    assert kid(seen(x), seen(y))[0] == pytest.approx(ours, abs=1e-12)


def test_kid_spread_is_seeded_and_shrinks_with_the_subsets():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(400, 8)), rng.normal(size=(300, 8))
    found, sd, size = kid(seen(x), seen(y))
    assert (found, sd, size) == kid(seen(x), seen(y)) and sd != kid(seen(x), seen(y), seed=1)[1]
    assert size == 150 and 0 < sd < kid(seen(x[:40]), seen(y[:40]))[1]
    assert math.isnan(kid(seen(x[:3]), seen(y[:3]))[1])
    with pytest.raises(Unmeasured, match="at least two images a side, got 1"):
        kid(seen(x), seen(y[:1]))


def test_cmmd_by_hand_and_by_torch_fidelity():
    from torch_fidelity.metric_kid import kernel_rbf, mmd2

    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert cmmd(x, y) == pytest.approx(2000 * (1 - math.exp(-2 / 200)), rel=1e-12)
    rng = np.random.default_rng(2)
    a, b = (
        v / np.linalg.norm(v, axis=1, keepdims=True) for v in (rng.normal(size=(50, 8)), rng.normal(size=(50, 8)) + 0.1)
    )
    kernels = [kernel_rbf(p, q, kid_kernel_rbf_sigma=10) for p, q in ((a, a), (a, b), (b, b))]
    assert cmmd(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(1000 * mmd2(*kernels, mmd_est="biased"))


class Mean(nn.Module):
    """Features that are an image's mean colours."""

    def forward(self, images):
        return images.double().mean((2, 3))


def test_features_are_taken_in_batches_of_any_sequence():
    images = torch.randint(0, 256, (10, 3, 5, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network = FeatureNetwork(Mean(), "mean")
    whole, batched = extract(images, network), extract(list(images), network, batch_size=3)
    assert torch.equal(whole.values, images.double().mean((2, 3))) and torch.equal(whole.values, batched.values)
    with pytest.raises(ValueError, match="uint8"):
        extract(images / 255, network)
    with pytest.raises(ValueError, match=r"one size, got \(3, 4, 5\) and \(3, 5, 5\)"):
        extract([images[0], images[1, :, :4]], network)
    with pytest.raises(ValueError, match="no images"):
        extract([], network)


def test_a_damaged_network_gives_an_error_and_no_zero():
    class Damaged(nn.Module):
        def forward(self, images):
            return torch.full((len(images), 2), math.nan)

    with pytest.raises(ValueError, match="NaN or infinity"):
        extract(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), FeatureNetwork(Damaged(), "damaged"))


def test_one_image_or_other_features_are_refused():
    points = np.random.default_rng(8).normal(size=(20, 4))
    with pytest.raises(Unmeasured, match="got 1 generated"):
        fid(seen(points[:1]), seen(points), "held-out images")
    with pytest.raises(Unmeasured, match="got 1 held-out images"):
        fid(seen(points), seen(points[:1]), "held-out images")
    with pytest.raises(Unmeasured, match="4 and 3 dimensions"):
        fid(seen(points), seen(points[:, :3]), "held-out images")
    with pytest.raises(Unmeasured, match="4 and 3 dimensions"):
        kid(seen(points), seen(points[:, :3]))


def test_statistics_files_of_other_tools(tmp_path):
    a, b = np.random.default_rng(9).normal(size=(2, 50, 4))
    file = tmp_path / "val.npz"
    np.savez(file, mu=b.mean(0), sigma=np.cov(b, rowvar=False))
    unstated = read_statistics(file)
    assert fid(seen(a), unstated, "val.npz") == pytest.approx(score(a, b), rel=1e-12) and unstated.n is None
    np.savez(file, features=b, resize="clean", extractor_sha256="abc", n=50)
    known = read_statistics(file)
    assert isinstance(known, Features) and known.variant == "uint8 input, clean resize to 299 x 299"
    with pytest.raises(Unmeasured, match="variant is 'as they are' for one"):
        fid(seen(a), known, "val.npz")
    ours = seen(a, variant=known.variant, extractor="abc")
    assert fid(ours, known, "val.npz") == pytest.approx(score(a, b), rel=1e-12)


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"mu": np.zeros(3)}, "holds mu, expected"),
        ({"mu": np.zeros(3), "sigma": np.zeros((2, 2))}, r"sigma \(2, 2\)"),
        ({"mu": np.zeros(2), "sigma": np.eye(2), "resize": "bicubic"}, "resize 'bicubic' is unknown"),
        ({"mu": np.array([{}]), "sigma": np.eye(1)}, "plain arrays"),
        ({"features": np.zeros(2048)}, r"features is \(2048,\), expected \(N, D\)"),
    ],
)
def test_damaged_statistics_files_are_named(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_statistics(tmp_path / "bad.npz")


def test_a_text_file_is_no_statistics(tmp_path):
    np.savez(tmp_path / "whole.npz", mu=np.zeros(64))
    np.save(tmp_path / "one.npy", np.zeros(64))
    half = (tmp_path / "whole.npz").read_bytes()[:-40]
    np.savez_compressed(tmp_path / "small.npz", mu=np.arange(4096.0))
    flipped = bytearray((tmp_path / "small.npz").read_bytes())
    flipped[1000:1040] = bytes(40)
    for content in (b"mu", half, flipped, (tmp_path / "one.npy").read_bytes()):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.npz: not an npz file"):
            read_statistics(tmp_path / "bad.npz")


def noise(size, seed=0):
    """A smooth image with noise, uint8 (3, size, size + 20)."""
    generator = torch.Generator().manual_seed(seed)
    smooth = nn.functional.interpolate(
        torch.rand(1, 3, 6, 6, generator=generator), size=(size, size + 20), mode="bicubic"
    )
    rough = smooth[0] * 200 + 40 * torch.rand(3, size, size + 20, generator=generator)
    return rough.round().clamp(0, 255).to(torch.uint8)


def published(name, image):
    """Inception's input of uint8 (3, H, W) as the package that owns the variant prepares it."""
    if name == "tf1":
        from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

        pixels = interpolate_bilinear_2d_like_tensorflow1x(image[None].float(), size=(299, 299), align_corners=False)[0]
    elif name == "clean":
        from cleanfid.resize import build_resizer

        pixels = torch.from_numpy(build_resizer("clean")(image.permute(1, 2, 0).numpy())).permute(2, 0, 1)
    elif name == "antialias":  # torchmetrics' own line
        pixels = nn.functional.interpolate(
            image[None].float(), size=(299, 299), mode="bilinear", align_corners=False, antialias=True
        )[0]
    else:  # pytorch-fid's
        unit = image[None].float() / 255
        return 2 * nn.functional.interpolate(unit, size=(299, 299), mode="bilinear", align_corners=False)[0] - 1
    return (pixels - 128) / 128


@pytest.mark.parametrize("size", [64, 299, 512])
@pytest.mark.parametrize("name", RESIZES)
def test_R1_resizes_are_the_packages_own(name, size):
    image = noise(size)
    assert torch.allclose(RESIZES[name](image), published(name, image), atol=1e-5)


def test_R1_resizes_differ_but_not_at_299():
    large, exact = noise(512), noise(512)[:, :299, :299]
    kinds = ("tf1", "antialias", "clean")
    assert all(torch.equal(RESIZES[kind](exact), RESIZES["tf1"](exact)) for kind in kinds)
    assert (RESIZES["pytorch-fid"](exact) - RESIZES["tf1"](exact)).abs().max() < 0.01  # only scaled by 127.5, not 128
    made = [RESIZES[kind](large) for kind in RESIZES]
    differences = [float((a - b).abs().mean()) for i, a in enumerate(made) for b in made[:i]]
    assert min(differences) > 0.005, differences


def test_unknown_resize_and_other_weights_are_refused():
    with pytest.raises(ValueError, match="resize 'bicubic' is unknown; known: tf1, antialias"):
        inception({}, "bicubic", "")


@pytest.fixture(scope="module")
def random_inception(tmp_path_factory):
    """A file with random weights of FID's Inception, and those weights."""
    from torchvision.models import inception_v3

    torch.manual_seed(0)
    network = inception_v3(weights=None, num_classes=1008, aux_logits=False, init_weights=False)
    state = network.state_dict()
    for name in state:
        if name.endswith("conv.weight"):
            state[name] *= 6**0.5  # so that the image is not lost on its way through 94 layers
        if name.endswith(("bn.bias", "bn.running_mean")):
            state[name] = 0.1 * torch.randn_like(state[name])
    file = tmp_path_factory.mktemp("inception") / "inception.pth"
    torch.save(state, file)
    return file, state


@pytest.mark.slow
@pytest.mark.parametrize("size", [299, 512])
def test_R1_features_equal_the_packages(random_inception, monkeypatch, size):
    import pytorch_fid.inception
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    from torchmetrics.image.fid import NoTrainInceptionV3

    file, state = random_inception
    image = noise(size)
    ours = {kind: extract([image], inception(state, kind, "sha")).values for kind in RESIZES}
    fidelity = FeatureExtractorInceptionV3("x", ["2048"], feature_extractor_weights_path=str(file))
    antialiased = NoTrainInceptionV3("x", ["2048"], str(file), antialias=True)
    monkeypatch.setattr(pytorch_fid.inception, "load_state_dict_from_url", lambda *a, **k: state)
    older = pytorch_fid.inception.InceptionV3().eval()
    with torch.no_grad():
        theirs = {
            "tf1": fidelity(image[None])[0],
            "antialias": antialiased(image[None]),
            "clean": _through(fidelity, published("clean", image)),
            "pytorch-fid": older(image[None] / 255)[0].flatten(1),
        }
    for kind, value in theirs.items():
        assert (ours[kind] - value).norm() / value.norm() < 1e-5, kind
    assert ours["tf1"].std() > 0
    if size == 512:
        assert (ours["tf1"] - ours["antialias"]).norm() / ours["tf1"].norm() > 1e-2


def _through(network, prepared):
    """clean-fid's network is another file of the same weights, and torch-fidelity's takes bytes: its layers by hand."""
    layers = nn.Sequential(*(getattr(network, name) for name in distribution._INCEPTION_LAYERS), nn.Flatten())
    return layers(prepared[None])


@pytest.mark.long
def test_a_fid_of_images_equals_torchmetrics(random_inception):
    from torchmetrics.image.fid import FrechetInceptionDistance

    file, state = random_inception
    a, b = (torch.stack([noise(80, seed) for seed in seeds]) for seeds in (range(4), range(4, 8)))
    network = inception(state, "antialias", "sha")
    ours = fid(extract(a, network), extract(b, network), "x")
    metric = FrechetInceptionDistance(feature_extractor_weights_path=str(file))
    metric.update(a, real=False)
    metric.update(b, real=True)
    assert float(metric.compute()) == pytest.approx(ours, rel=1e-3)


@pytest.mark.slow
def test_building_inception_leaves_the_global_generator_and_needs_the_right_file(random_inception):
    _, state = random_inception
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    inception(state, "tf1", "sha")
    assert torch.equal(torch.rand(1), expected)
    with pytest.raises(ValueError, match="not the weights of FID's Inception"):
        inception({name: value for name, value in state.items() if name != "fc.bias"}, "tf1", "sha")


def test_frechet_distance_takes_moments():
    moments = [seen(x).moments for x in np.random.default_rng(0).normal(size=(2, 20, 3))]
    assert frechet_distance(*moments) == pytest.approx(frechet_distance(*reversed(moments)), rel=1e-9)
