"""Differences between two images, pair by pair: structure, learned distance, and distance in a network's features.

SSIM     structural similarity in a Gaussian window of 11 pixels, sigma 1.5 (Wang et al., 2004); torchmetrics
LPIPS    AlexNet's features of both images at full resolution, weighted by people (Zhang et al., 2018); torchmetrics
feature distance = |f(b) - f(a)| / |f(a)| in the features of a network that the caller names; this is not LPIPS
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.eval.images.generate import Images
from fluxq.eval.metrics.fidelity import over_frames, per_frame
from fluxq.eval.metrics.plugins import Unmeasured

SSIM_WINDOW = 11
LPIPS_PIXELS = 31  # least side: AlexNet's two poolings leave one pixel of it


def ssim(reference: Images, other: Images, device: str | torch.device = "cpu") -> Tensor:
    """Return the SSIM per pair of uint8 images (3, H, W), float64 (N,); about 1 for identical images; a video's mean.

    Raises Unmeasured for images smaller than the window: another window would be another metric.
    """
    where = device if torch.device(device).type == "cuda" else "cpu"  # in fp64, which others may not have

    def measure(a: Tensor, b: Tensor) -> Tensor:
        return structural_similarity(_unit(a).to(where), _unit(b).to(where)).cpu()

    return over_frames(per_frame(reference, other, measure))


def structural_similarity(a: Tensor, b: Tensor) -> Tensor:
    """Return the SSIM of two images (3, H, W) in [0, 1], a float64 scalar."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    if min(a.shape[-2:]) < SSIM_WINDOW:
        raise Unmeasured(f"its window is {SSIM_WINDOW} pixels wide, the images are {_size(a)}")
    similarity: Any = structural_similarity_index_measure(a.double()[None], b.double()[None], data_range=1.0)
    return similarity


def feature_distance(reference: Tensor, other: Tensor) -> Tensor:
    """Return |other - reference| / |reference| per row of features (N, D), float64 (N,)."""
    a, b = reference.double(), other.double()
    return (b - a).norm(dim=1) / a.norm(dim=1)


class Lpips:
    """LPIPS with an AlexNet backbone whose weights are given: torchmetrics takes no file and would download one.

    backbone: the state dict of torchvision's AlexNet (`features.0.weight`, ...), every tensor of which must fit.
    The weights on top of the backbone come with torchmetrics.
    """

    def __init__(self, backbone: Mapping[str, Tensor], device: str = "cpu") -> None:
        from torchmetrics.functional.image.lpips import _NoTrainLpips

        with torch.random.fork_rng(devices=[]):  # it draws weights, all of which are replaced below
            network: Any = _NoTrainLpips(net="alex", pnet_rand=True)
        _load_backbone(network.net, backbone)
        self.network, self.device = network.to(device), device

    def distance(self, reference: Images, other: Images) -> Tensor:
        """Return LPIPS per pair of uint8 images (3, H, W) at their own size, float64 (N,); 0 for identical images.

        Of videos the mean over frames.
        """
        return over_frames(per_frame(reference, other, self._distance))

    @torch.no_grad()
    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        if min(a.shape[-2:]) < LPIPS_PIXELS:
            raise Unmeasured(f"AlexNet needs {LPIPS_PIXELS} pixels a side, the images are {_size(a)}")
        batch = [_unit(image)[None].to(self.device) for image in (a, b)]
        return self.network(*batch, normalize=True).squeeze().cpu()


def _load_backbone(network: nn.Module, backbone: Mapping[str, Tensor]) -> None:
    """Load AlexNet's tensors, whose layer `features.N` is called `sliceK.N` here."""
    names = {name: f"features.{name.split('.', 1)[1]}" for name in network.state_dict()}
    absent = sorted(set(names.values()) - set(backbone))
    if absent:
        raise ValueError(f"the LPIPS backbone lacks {absent[0]}: these are not the weights of torchvision's AlexNet")
    network.load_state_dict({name: backbone[source] for name, source in names.items()})


def _unit(image: Tensor) -> Tensor:
    if image.dtype != torch.uint8:
        raise ValueError(f"images to compare must be uint8, got {image.dtype}")
    return image.float() / 255


def _size(image: Tensor) -> str:
    return f"{image.shape[-1]} x {image.shape[-2]}"
