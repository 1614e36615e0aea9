"""The embedded pipeline with outliers: other numbers in its weights, the same function.

Every input that the Linears before it can scale gets a factor for each channel: rows of the modulation that makes it,
or of the values that attention averages, are multiplied, and the columns of the Linears that read it are divided. Most
factors are near 1, and a few channels are as far out as those of trained networks (`OUTLIERS`). So each image is the
same, and rounding finds what it finds in networks that others trained.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fluxq.base.tensors import save_weights
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Family, Modulation, Producer

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
OUTLIERS = (4.0, 15.0)  # with their own sizes up to 30 times the median channel: minilm has 16, mpnet 40
SHARE = 0.01  # of the channels of an input, and two at least
SPREAD = 0.3  # of the logarithm of all other factors

State = dict[str, Tensor]


def write_rescaled(source: Path, target: Path, seed: int = 0) -> Path:
    """Write a FLUX pipeline folder again, with outliers; its transformer's weights are fp32, so that nothing is lost.

    source, target: folders; the target is made. seed: of the factors.
    """
    shutil.copytree(source, target)
    state = {name: tensor.float() for name, tensor in load_file(source / WEIGHTS).items()}
    save_weights(rescaled(state, FAMILIES["flux"], torch.Generator().manual_seed(seed)), target / WEIGHTS, {})
    return target


def rescaled(state: State, family: Family, random: torch.Generator) -> State:
    """Return the weights of a model (fp32) with outliers in the inputs of its Linears."""
    made, done = dict(state), set[tuple[str, object]]()
    for name in state:
        place = family.locate(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if place is None:
            continue
        group, block = place
        makers: Modulation | tuple[Producer, ...] | None = group.modulation or group.producers or None
        key = (block, group if group.modulation else makers)
        if makers is None or key in done:
            continue
        done.add(key)
        readers = [path for path in family.sharing_vectors(group, block) if f"{path}.weight" in state]
        n, k = state[name].shape
        width = group.segments(n, k)[0]  # of an input of two parts, attention's alone
        factors = _factors(width, random)
        if isinstance(makers, Modulation):
            maker = f"{block}.{makers.linear}"
            shift, scale = makers.rows(made[f"{maker}.weight"].shape[0], k)
            _multiply(made, maker, shift, factors)
            _multiply(made, maker, scale, factors, one=1.0)
        else:
            for producer in makers:
                maker = f"{block}.{producer.linear}"
                if producer.segment == 0 and f"{maker}.weight" in made:
                    _multiply(made, maker, producer.rows(made[f"{maker}.weight"].shape[0], width), factors)
        for reader in readers:
            weight = made[f"{reader}.weight"].clone()
            weight[:, :width] /= factors
            made[f"{reader}.weight"] = weight
    return made


def _factors(width: int, random: torch.Generator) -> Tensor:
    factors = (SPREAD * torch.randn(width, generator=random)).exp()
    low, high = (torch.tensor(bound).log() for bound in OUTLIERS)
    count = max(2, round(SHARE * width))
    outliers = torch.randperm(width, generator=random)[:count]
    factors[outliers] = (low + (high - low) * torch.rand(count, generator=random)).exp()
    return factors


def _multiply(state: State, maker: str, rows: slice, factors: Tensor, one: float = 0.0) -> None:
    """Multiply rows of a Linear; `one` is added to what its bias makes, as a modulation adds 1 to its scale."""
    weight, bias = state[f"{maker}.weight"].clone(), state[f"{maker}.bias"].clone()
    weight[rows] *= factors[:, None]
    bias[rows] = factors * (bias[rows] + one) - one
    state[f"{maker}.weight"], state[f"{maker}.bias"] = weight, bias
