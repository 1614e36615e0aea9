"""Distance between the distributions of generated images and of others, in a network's features.

    FID  = |μ₁ - μ₂|² + tr(Σ₁ + Σ₂ - 2 (Σ₁ Σ₂)^½)             (Heusel et al., 2017)
    FID∞ = the FID at 1/N = 0, by a line through FIDs of subsets  (Chong & Forsyth, 2020)
    KID  = MMD² with the kernel (x·y / D + 1)³, unbiased          (Bińkowski et al., 2018)
    CMMD = 1000 MMD² with exp(-|x - y|² / 2·10²) on CLIP's normalized image embeddings, the biased estimator that
           keeps each image's kernel with itself (Jayasumana et al., 2024; google-research/cmmd/distance.py)

A FID is one number with many variants: network, resizing, precision and above all N, whose bias dwarfs the
differences between recipes. So every value carries what it depends on. Features are taken once and shared;
torchmetrics' FID and KID take images only and draw unseeded subsets, so the few lines of algebra are here and tests
hold them against torchmetrics, torch-fidelity, pytorch-fid and scipy.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

from fluxq.eval.images.generate import Images
from fluxq.eval.metrics.plugins import Unmeasured

CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
KID_SUBSETS = 20

_SIZE = (299, 299)  # of what Inception sees
_POINTS = 12  # of the line that FID∞ is read from
_KID_SUBSET = 1000
_BLOCK = 2048  # rows of a kernel matrix that exist at a time


@dataclass(frozen=True)
class FeatureNetwork:
    """Network in whose features images are compared.

    module: uint8 images (3, H, W), prepared and stacked -> features (B, D).
    name: name in reports.
    variant: way of an image to the network, in words.
    prepare: function from an image to the module's input, None for the image itself.
    digest: SHA-256 of its weights file, where it has one.
    """

    module: nn.Module
    name: str
    variant: str = "uint8 input, no resize before the network"
    prepare: Callable[[Tensor], Tensor] | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Moments:
    """Mean (D,) and covariance (D, D) of features, float64; n is None where a statistics file does not say.

    network, variant, extractor: of the `FeatureNetwork` that made them, None where a file does not say.
    """

    mu: Tensor
    sigma: Tensor
    n: int | None
    network: str | None
    variant: str | None
    extractor: str | None = None

    @cached_property
    def root(self) -> Tensor:
        """The symmetric square root of `sigma`, (D, D)."""
        values, vectors = torch.linalg.eigh(self.sigma)
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


@dataclass(frozen=True)
class Features:
    """Features of a set of images: values (N, D), in the images' order. The rest as in `Moments`."""

    values: Tensor
    network: str | None
    variant: str | None
    extractor: str | None = None

    @cached_property
    def moments(self) -> Moments:
        """Mean and covariance over N - 1, in two passes, which large offsets do not cancel."""
        values = self.values.double()
        sigma = torch.cov(values.T).reshape(values.shape[1], values.shape[1])
        return Moments(values.mean(0), sigma, len(values), self.network, self.variant, self.extractor)

    @property
    def n(self) -> int:
        """Number of images."""
        return len(self.values)


def extract(images: Images, network: FeatureNetwork, *, device: str = "cpu", batch_size: int = 64) -> Features:
    """Extract features of uint8 images (3, H, W), `batch_size` of them in memory at a time.

    Raises ValueError for images that are not uint8, for images that the network cannot take together, and for
    features that are not finite.
    """
    module = network.module.eval().to(device)
    values: list[Tensor] = []
    for start in range(0, len(images), batch_size):
        batch = [images[i] for i in range(start, min(start + batch_size, len(images)))]
        for image in batch:
            if image.dtype != torch.uint8:
                raise ValueError(f"FID and its kin are taken of uint8 images, got {image.dtype}")
        values.append(_forward(module, network, batch, device))
    if not values:
        raise ValueError("there are no images to take features of")
    return Features(torch.cat(values), network.name, network.variant, network.digest)


def fid(images: Features, reference: Features | Moments, label: str) -> float:
    """Return the FID between generated images and a reference, called `label` in words, such as "held-out images".

    Raises Unmeasured for fewer than two images a side, or sides whose features were made in different ways.
    """
    _require_alike(images, reference)
    for n, what in ((images.n, "generated"), (reference.n, label)):
        if n is not None and n < 2:
            raise Unmeasured(f"FID needs at least two images a side, got {n} {what}: raise the image count")
    return frechet_distance(images.moments, reference.moments if isinstance(reference, Features) else reference)


def fid_bias(images: Features, reference: Features | Moments) -> str:
    """Return the effect of this number of images on the FID, in words (Chong & Forsyth, 2020)."""
    fewest, width = min(images.n, reference.n or images.n), images.values.shape[1]
    if fewest > width:
        return f"biased upwards by a finite number of images: compare only at N = {images.n}"
    return (
        f"{fewest} images cannot fill a covariance of {width} features, which adds more to the FID than recipes differ "
        f"by: use well over {width}"
    )


def frechet_distance(first: Moments, second: Moments) -> float:
    """Return the squared Fréchet distance of two Gaussians, by eigenvalues of Σ₂^½ Σ₁ Σ₂^½, never below 0."""
    if first.mu.shape != second.mu.shape:
        raise Unmeasured(f"features of {len(first.mu)} and {len(second.mu)} dimensions have no Fréchet distance")
    cross = torch.linalg.eigvalsh(second.root @ first.sigma @ second.root).clamp(min=0).sqrt().sum()
    distance = (first.mu - second.mu).square().sum() + first.sigma.trace() + second.sigma.trace() - 2 * cross
    return max(0.0, float(distance))  # rounding may leave -1e-11 where the two are equal


def fid_infinity(
    images: Features, reference: Features | Moments, seed: int = 0
) -> tuple[float, float, tuple[int, ...]]:
    """Compute the FID at infinitely many images: the intercept of a line over 1/N through FIDs of 12 random subsets.

    Returns it, its standard error, which is too small, as subsets share images, and the sizes of the subsets.

    Subsets are a fifth of the images to all of them. A reference whose features are at hand is cut to the same
    share, so that its own bias falls with 1/N too; that of bare statistics stays in the value.
    Raises Unmeasured unless there are more images than features: below, the bias is no line over 1/N.
    """
    from scipy.stats import linregress

    _require_alike(images, reference)
    total, width = images.values.shape
    others = reference.n or math.inf
    if min(total, others) <= width:
        raise Unmeasured(f"FID∞ in {width} features needs more than {width} images a side, got {min(total, others)}")
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.linspace(total / 5, total, _POINTS).round().long().tolist()
    values = []
    for size in sizes:
        part = _drawn(images, size, generator).moments
        if isinstance(reference, Features):
            against = _drawn(reference, round(size * reference.n / total), generator).moments
        else:
            against = reference
        values.append(frechet_distance(part, against))
    line: Any = linregress([1 / size for size in sizes], values)
    return float(line.intercept), float(line.intercept_stderr), tuple(sizes)


def _drawn(images: Features, count: int, generator: torch.Generator) -> Features:
    return replace(images, values=images.values[torch.randperm(images.n, generator=generator)[:count]])


def kid(images: Features, reference: Features, seed: int = 0) -> tuple[float, float, int]:
    """Compute the KID of all images, and its spread over seeded subsets of 1,000, or of half the images if fewer.

    Returns it, the standard deviation over KID_SUBSETS subsets, NaN below 4 images, and their size. Raises Unmeasured
    for fewer than two images a side, or sides whose features were made in different ways.
    """
    _require_alike(images, reference)
    fewest = min(images.n, reference.n)
    if fewest < 2:
        raise Unmeasured(f"KID needs at least two images a side, got {fewest}: raise the image count")
    size = min(_KID_SUBSET, fewest // 2)
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        kernel_distance(_drawn(images, size, generator).values, _drawn(reference, size, generator).values)
        for _ in range(KID_SUBSETS if size > 1 else 0)
    ]
    sd = float(torch.tensor(drawn, dtype=torch.float64).std(unbiased=False)) if drawn else math.nan
    return kernel_distance(images.values, reference.values), sd, size


def kernel_distance(x: Tensor, y: Tensor) -> float:
    """Return the unbiased MMD² of features (N, D) and (M, D), cubic kernel: no image is paired with itself."""
    if x.shape[1] != y.shape[1]:
        raise Unmeasured(f"features of {x.shape[1]} and {y.shape[1]} dimensions have no kernel distance")
    x, y = x.double(), y.double()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / x.shape[1] + 1) ** 3

    def within(rows: Tensor) -> float:
        alone = ((rows.square().sum(1) / x.shape[1] + 1) ** 3).sum()
        return (_kernel_sum(rows, rows, kernel) - float(alone)) / (len(rows) * (len(rows) - 1))

    return within(x) + within(y) - 2 * _kernel_sum(x, y, kernel) / (len(x) * len(y))


def cmmd(images: Tensor, reference: Tensor) -> float:
    """Return the CMMD of normalized CLIP image embeddings (N, D) and (M, D): 1000 times the biased MMD², see above."""
    x, y = images.double(), reference.double()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squared = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
        return torch.exp(-squared / (2 * CMMD_SIGMA**2))

    within = _kernel_sum(x, x, kernel) / len(x) ** 2 + _kernel_sum(y, y, kernel) / len(y) ** 2
    return CMMD_SCALE * (within - 2 * _kernel_sum(x, y, kernel) / (len(x) * len(y)))


def read_statistics(path: Path) -> Features | Moments:
    """Read reference statistics from an npz file: `mu` and `sigma`, as pytorch-fid, clean-fid and MLPerf write them.

    Optional keys, of which the last two are checked against those in use:

    n: number of images.
    features: (N, D); without them there is no KID and FID∞ keeps the reference's bias.
    extractor_sha256: SHA-256 of the network's weights file.
    resize: key of RESIZES.

    Pickled arrays are refused. Raises ValueError for a file that is not so.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, BadZipFile, zlib.error, TypeError) as error:  # TypeError: one array
        raise ValueError(f"{path}: not an npz file of plain arrays ({error})") from None
    resize = str(stored["resize"]) if "resize" in stored else None
    facts: dict[str, Any] = {
        "network": None,
        "variant": resize and inception_variant(resize),
        "extractor": str(stored["extractor_sha256"]) if "extractor_sha256" in stored else None,
    }
    if "features" in stored:
        if stored["features"].ndim != 2:
            raise ValueError(f"{path}: features is {stored['features'].shape}, expected (N, D)")
        return Features(torch.from_numpy(stored["features"]), **facts)
    if not {"mu", "sigma"} <= stored.keys():
        raise ValueError(f"{path}: holds {', '.join(sorted(stored)) or 'nothing'}, expected the arrays mu and sigma")
    mu, sigma = (torch.from_numpy(stored[name]).double() for name in ("mu", "sigma"))
    if mu.ndim != 1 or sigma.shape != (len(mu), len(mu)):
        raise ValueError(f"{path}: mu is {tuple(mu.shape)} and sigma {tuple(sigma.shape)}, expected (D,) and (D, D)")
    return Moments(mu, sigma, int(stored["n"]) if "n" in stored else None, **facts)


def inception_variant(resize: str) -> str:
    """Return how images are resized for Inception, in words; ValueError for an unknown resize."""
    if resize not in RESIZES:
        raise ValueError(f"FID resize {resize!r} is unknown; known: {', '.join(RESIZES)}")
    return f"uint8 input, {resize} resize to {_SIZE[0]} x {_SIZE[1]}"


def inception(state: Mapping[str, Tensor], resize: str, digest: str) -> FeatureNetwork:
    """Build FID's Inception up to its pooled 2048 features, after the resizing that `resize` names (RESIZES).

    state: what `weights-inception-2015-12-05-6726825d.pth` holds; digest: the file's SHA-256. The architecture is
    torch-fidelity's. Raises RuntimeError without that package, ValueError for an unknown resize or unfit weights.
    """
    variant = inception_variant(resize)
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError:
        raise RuntimeError("FID's Inception needs torch-fidelity: pip install 'fluxq[fid]'") from None
    # It insists on reading a file itself, and would unpickle anything: it gets the tensors, packed by ourselves.
    packed = io.BytesIO()
    torch.save(dict(state), packed)
    packed.seek(0)
    try:
        with torch.random.fork_rng(devices=[]):  # it draws weights first, all of which are replaced
            whole: Any = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=packed)
    except RuntimeError as error:
        raise ValueError(f"these are not the weights of FID's Inception: {error}") from None
    layers = nn.Sequential(*(getattr(whole, name) for name in _INCEPTION_LAYERS), nn.Flatten())
    return FeatureNetwork(layers, "Inception", variant, RESIZES[resize], digest)


@torch.no_grad()
def _forward(module: nn.Module, network: FeatureNetwork, batch: Sequence[Tensor], device: str) -> Tensor:
    prepared = [network.prepare(image) if network.prepare else image for image in batch]
    sizes = {tuple(image.shape) for image in prepared}
    if len(sizes) > 1:
        raise ValueError(f"{network.name} takes images of one size, got {' and '.join(map(str, sorted(sizes)))}")
    features = module(torch.stack(prepared).to(device)).cpu()  # (B, D)
    if not torch.isfinite(features).all():
        raise ValueError("the feature network answers with NaN or infinity: its weights or its input are damaged")
    return features


def unlike(
    network: str | None, variant: str | None, extractor: str | None, reference: Features | Moments
) -> str | None:
    """Return the reason why features made so cannot be compared with a reference, or None.

    Fields that a statistics file leaves out cannot be checked.
    """
    fields = {"network": network, "variant": variant, "extractor": extractor}
    for field, a in fields.items():
        b = getattr(reference, field)
        if b is not None and a != b:
            return f"features of the two sides cannot be compared: {field} is {a!r} for one and {b!r} for the other"
    return None


def _require_alike(images: Features, reference: Features | Moments) -> None:
    reason = unlike(images.network, images.variant, images.extractor, reference)
    if reason is not None:
        raise Unmeasured(reason)


def _kernel_sum(x: Tensor, y: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the kernel's sum over all pairs, a block of rows at a time."""
    return math.fsum(float(kernel(rows, y).sum()) for rows in x.split(_BLOCK))


def _tf1(image: Tensor) -> Tensor:
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

    return _centred(interpolate_bilinear_2d_like_tensorflow1x(image.float()[None], size=_SIZE, align_corners=False)[0])


def _clean(image: Tensor) -> Tensor:
    from PIL import Image

    channels = [Image.fromarray(channel.float().numpy()).resize(_SIZE, Image.Resampling.BICUBIC) for channel in image]
    return _centred(torch.from_numpy(np.stack([np.asarray(channel) for channel in channels])).clamp(0, 255))


def _interpolate(image: Tensor, antialias: bool) -> Tensor:
    resize: Any = nn.functional.interpolate
    return resize(image[None], size=_SIZE, mode="bilinear", align_corners=False, antialias=antialias)[0]


def _centred(pixels: Tensor) -> Tensor:
    return (pixels - 128) / 128


_INCEPTION_LAYERS = (
    *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "MaxPool_2"),
    *("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"),
    *("Mixed_7a", "Mixed_7b", "Mixed_7c", "AvgPool"),
)

# name -> uint8 (3, H, W) to Inception's input (3, 299, 299). One image, four FIDs: the resizings alone move features of
# a 1024 pixel image by up to a tenth.
RESIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "tf1": _tf1,  # torch-fidelity, and the TensorFlow original: bilinear without antialiasing
    # torchmetrics' default: bilinear with antialiasing
    "antialias": lambda image: _centred(_interpolate(image.float(), antialias=True)),
    "clean": _clean,  # clean-fid: PIL's bicubic on floats
    # pytorch-fid and MLPerf: bilinear, half-pixel centres, no antialiasing
    "pytorch-fid": lambda image: 2 * _interpolate(image.float() / 255, antialias=False) - 1,
}
