"""Networks and images that metrics compare with, and where their weights come from.

A file of weights is looked for in the folder that was given (`--weights`), then in torch hub's checkpoints, and is
read only if its SHA-256 begins as published. Nothing is downloaded unasked, and random weights never stand in.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fluxq.base.files import sha256_file
from fluxq.eval.images.generate import Images, Lazy
from fluxq.eval.metrics import distribution
from fluxq.eval.metrics.alignment import ClipScorer, locate
from fluxq.eval.metrics.distribution import FeatureNetwork, Features, Moments
from fluxq.eval.metrics.perceptual import Lpips
from fluxq.eval.metrics.video import s3d

DEFAULT_RESIZE = "clean"  # that of published tables of quantized diffusion models

_Result = TypeVar("_Result")
_NO_CLIP = "no CLIP model was given: --clip takes a folder of open_clip's, or a name: ViT-B-32-quickgelu/openai"
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Weights:
    """A published file of weights.

    files: its names.
    sha256: beginning of its SHA-256.
    what: its name for readers.
    url: its address.
    """

    files: tuple[str, ...]
    sha256: str
    what: str
    url: str


@dataclass(frozen=True)
class Networks:
    """Networks and files for metrics, beside two sets of images; reports say what is None, nothing replaces it.

    feature_network: uint8 (B, 3, H, W) -> (B, D).
    feature_name: its name in reports.
    clip: network that scores images for their prompts, as `ClipScorer` takes it.
    cmmd_clip: network of CMMD's embeddings, None for `clip`.
    reference_images: images that the model did not make, uint8 (3, H, W) each.
    reference_name: their name in reports.
    reference_statistics: statistics of such images' features, in their place.
    lpips, inception, video: checked files of weights; the last is of metrics of whole videos.
    fid_resize: key of `distribution.RESIZES`.
    weights: folder that was searched.
    """

    feature_network: nn.Module | None = None
    feature_name: str = ""
    clip: str | None = None
    cmmd_clip: str | None = None
    reference_images: Images | None = None
    reference_name: str = "held-out images"
    reference_statistics: Features | Moments | None = None
    lpips: Path | None = None
    inception: Path | None = None
    video: Path | None = None
    fid_resize: str = DEFAULT_RESIZE
    weights: Path | None = None
    device: str = "cpu"
    results: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def features(self) -> FeatureNetwork | None:
        """Network of FID, KID and feature distance: Inception where its weights are, else the model's own, or None."""
        if self.inception is not None:
            return distribution.inception(
                read_weights(self.inception, WEIGHTS["inception"]), self.fid_resize, sha256_file(self.inception)
            )
        if self.feature_network is not None:
            return FeatureNetwork(self.feature_network, self.feature_name)
        return None

    @cached_property
    def video_features(self) -> FeatureNetwork | None:
        """Network of the video distance: uint8 videos (F, 3, H, W), prepared -> features (B, D), or None."""
        return None if self.video is None else s3d(read_weights(self.video, WEIGHTS["video"]), sha256_file(self.video))

    @cached_property
    def clip_scorer(self) -> ClipScorer | None:
        """CLIP of the scores."""
        return ClipScorer(self.clip, self.device) if self.clip else None

    @cached_property
    def cmmd_scorer(self) -> ClipScorer | None:
        """CLIP of CMMD's embeddings."""
        if self.cmmd_clip is None or self.cmmd_clip == self.clip:
            return self.clip_scorer
        return ClipScorer(self.cmmd_clip, self.device)

    @cached_property
    def lpips_network(self) -> Lpips | None:
        """LPIPS on the given AlexNet."""
        return None if self.lpips is None else Lpips(read_weights(self.lpips, WEIGHTS["lpips"]), self.device)

    def kept(self, images: Any, what: str, compute: Callable[[], _Result]) -> _Result:
        """Return `compute()`, or its earlier value for the same object and word: sets are compared more than once."""
        key = id(images), what
        if key not in self.results:
            self.results[key] = (images, compute())  # the set is kept, so that no other object takes its id
        return self.results[key][1]

    def lacks(self, need: str) -> str | None:
        """Return the reason why `need` (a key of NEEDS) is not there, naming file and cure, or None."""
        return NEEDS[need](self)


def find_networks(
    defaults: Networks,
    *,
    weights: Path | None = None,
    clip: str | None = None,
    fid_resize: str | None = None,
    fid_reference: Path | None = None,
    device: str = "cpu",
    download: bool = False,
    is_video: bool = False,
) -> Networks:
    """Return `defaults` with files of WEIGHTS, CLIP folders, and images or statistics to compare images with.

    weights: folder that may hold files of WEIGHTS and folders `clip` and `cmmd_clip` for open_clip's `local-dir:`.
    clip: as `ClipScorer` takes it.
    fid_reference: folder of images, or an npz of statistics.
    download: whether missing files of WEIGHTS are fetched into torch hub's checkpoints.
    is_video: whether videos are compared.

    A model's own feature network stays in use unless `weights` holds Inception. Raises FileNotFoundError and ValueError
    naming what cannot be had.
    """
    if weights is not None and not weights.is_dir():
        raise FileNotFoundError(f"--weights {weights}: no such folder")
    resize = fid_resize or defaults.fid_resize
    distribution.inception_variant(resize)  # refuses an unknown one
    wanted = [key for key in WEIGHTS if key != "video" or is_video]
    files = {key: find_weights(key, weights) or (fetch_weights(key) if download else None) for key in wanted}
    folders = {name: str(weights / name) for name in ("clip", "cmmd_clip") if weights and (weights / name).is_dir()}
    is_in_folder = weights is not None and files["inception"] is not None and files["inception"].parent == weights
    networks = replace(
        defaults,
        clip=clip or folders.get("clip") or defaults.clip,
        cmmd_clip=folders.get("cmmd_clip") or defaults.cmmd_clip,
        lpips=files["lpips"] or defaults.lpips,
        video=files.get("video") or defaults.video,
        inception=files["inception"]
        if is_in_folder or download or defaults.feature_network is None
        else defaults.inception,
        fid_resize=resize,
        weights=weights,
        device=device,
    )
    for source in {networks.clip, networks.cmmd_clip} - {None}:
        locate(str(source))  # a wrong name is an error now, not after hours of images
    return networks if fid_reference is None else _with_reference(networks, fid_reference)


def find_weights(key: str, folder: Path | None) -> Path | None:
    """Find and check the file of WEIGHTS[key] in `folder` or torch hub's checkpoints; None if it is in neither."""
    row = WEIGHTS[key]
    for path in (place / name for place in _places(folder) for name in row.files):
        if path.is_file():
            check_weights(path, row)
            return path
    return None


def fetch_weights(key: str) -> Path:
    """Download the file of WEIGHTS[key] to torch hub's checkpoints, checked by its hash."""
    row = WEIGHTS[key]
    target = _hub() / row.files[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(row.url, str(target), hash_prefix=row.sha256, progress=False)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(f"{row.url} cannot be had ({error}); {_cure(row, None)}") from None
    return target


def check_weights(path: Path, row: Weights) -> None:
    """Raise ValueError naming the file unless its SHA-256 begins as published."""
    digest = sha256_file(path)
    if not digest.startswith(row.sha256):
        raise ValueError(
            f"{path}: its SHA-256 is {digest[:16]}…, that of the {row.what} begins with {row.sha256}: another file, or "
            f"a damaged one; get it from {row.url}"
        )


def read_weights(path: Path, row: Weights) -> dict[str, Tensor]:
    """Read the tensors of a published file after checking its hash; nothing but tensors is unpickled."""
    check_weights(path, row)
    return torch.load(path, map_location="cpu", weights_only=True)


def image_files(folder: Path) -> Lazy:
    """Return the images in a folder as uint8 (3, H, W), in the order of their names; ValueError if it holds none."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGE_SUFFIXES)
    if not paths:
        raise ValueError(f"{folder} holds no images; known are {', '.join(_IMAGE_SUFFIXES)}")
    return Lazy(len(paths), lambda index: _read_image(paths[index]))


def _read_image(path: Path) -> Tensor:
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # a damaged PNG raises any
        raise ValueError(f"{path}: not a readable image ({error})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _with_reference(networks: Networks, path: Path) -> Networks:
    if path.is_dir():
        return replace(
            networks,
            reference_images=image_files(path),
            reference_name=f"images of {path.name}",
            reference_statistics=None,
        )
    if not path.is_file():
        raise FileNotFoundError(f"--fid-reference {path}: no such folder of images or npz file")
    statistics = distribution.read_statistics(path)
    return replace(networks, reference_images=None, reference_name=path.name, reference_statistics=statistics)


def _places(folder: Path | None) -> list[Path]:
    return [*([folder] if folder else []), _hub()]


def _hub() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints"


def _cure(row: Weights, folder: Path | None) -> str:
    places = " or ".join(map(without_home, _places(folder)))
    other = "" if folder else ", or into a folder that you give as --weights"
    return f"put {row.files[0]} (SHA-256 {row.sha256}…), published at {row.url}, into {places}{other}"


def without_home(place: str | Path) -> str:
    """Return a path without the name of the home folder, since reports are passed on, and another text as it is."""
    path, home = Path(place), os.path.expanduser("~")
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else str(place)


def _no_features(networks: Networks) -> str | None:
    if networks.inception is not None and find_spec("torch_fidelity") is None:
        return "FID's Inception needs torch-fidelity: pip install 'fluxq[fid]'"
    if networks.inception is None and networks.feature_network is None:
        return _no_file(networks, None, "inception", "no feature network was given and FID's Inception is missing")
    return None


def _no_file(networks: Networks, file: Path | None, key: str, message: str) -> str | None:
    return None if file else f"{message}: {_cure(WEIGHTS[key], networks.weights)}"


def _no_reference(networks: Networks) -> str | None:
    if networks.reference_images is None and networks.reference_statistics is None:
        return "no images to compare with were given: --fid-reference takes a folder of them, or an npz of statistics"
    if networks.reference_statistics is not None and networks.features is not None:
        network = networks.features
        return distribution.unlike(network.name, network.variant, network.digest, networks.reference_statistics)
    return None


def _no_reference_features(networks: Networks) -> str | None:
    if networks.reference_images is None and isinstance(networks.reference_statistics, Moments):
        return f"{networks.reference_name} holds a mean and a covariance only: give the images, or their features too"
    return _no_reference(networks)


def _no_reference_images(networks: Networks) -> str | None:
    if networks.reference_images is None and networks.reference_statistics is not None:
        return f"{networks.reference_name} holds no images: --fid-reference takes a folder of them"
    return _no_reference(networks)


# need -> function that returns why it is missing, or None.
NEEDS: dict[str, Callable[[Networks], str | None]] = {
    "features": _no_features,
    "lpips": lambda networks: _no_file(networks, networks.lpips, "lpips", "its AlexNet is missing"),
    "video_features": lambda networks: _no_file(
        networks, networks.video, "video", "no network that looks at whole videos was given"
    ),
    "clip": lambda networks: None if networks.clip else _NO_CLIP,
    "cmmd_clip": lambda networks: None if networks.cmmd_clip or networks.clip else _NO_CLIP,
    "reference": _no_reference,
    "reference_features": _no_reference_features,
    "reference_images": _no_reference_images,
}

WEIGHTS: dict[str, Weights] = {
    "lpips": Weights(
        ("alexnet-owt-7be5be79.pth",),
        "7be5be79",
        "AlexNet of LPIPS",
        "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth",
    ),
    "inception": Weights(
        ("weights-inception-2015-12-05-6726825d.pth", "pt_inception-2015-12-05-6726825d.pth"),
        "6726825d",
        "Inception of FID",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    ),
    "video": Weights(
        ("s3d-d76dad2f.pth",),
        "d76dad2f",
        "S3D of the video distance",
        "https://download.pytorch.org/models/s3d-d76dad2f.pth",
    ),
}
