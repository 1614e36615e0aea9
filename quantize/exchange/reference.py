"""The 16-bit model that layers of a quantized file are compared with, by diffusers' names whatever its own are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fluxq.quantize.exchange.files import ModelFile, open_model, open_models
from fluxq.quantize.exchange.layouts import in_order
from fluxq.quantize.exchange.marks import PLAIN
from fluxq.quantize.exchange.proof import REPAIRS, orders_of, part_sizes, prove
from fluxq.recipes.keymaps import Joined

_SETTLING = 4  # layers that decide about a dialect


class Base:
    """The 16-bit model that layers are compared with."""

    def __init__(self, model: ModelFile) -> None:
        if model.dialect != PLAIN:
            raise ValueError(f"{model.path}: is quantized itself ({model.dialect}); give the 16-bit model as base")
        self.model = model
        self._parts = {part: (name, whole) for name, whole in model.joined.items() for part in whole.parts}

    @classmethod
    def of(cls, path: Path, component: str, model: ModelFile) -> Base:
        """The base's component of that name, else the one of the model's class or names; ValueError for several."""
        models = open_models(path)
        if component in models:
            return cls(models[component])
        alike = [name for name, candidate in models.items() if model.family and candidate.family == model.family]
        if len(alike) > 1:
            raise ValueError(f"{path}: it may be {' or '.join(alike)}; give the component's own folder as --base")
        if alike:
            return cls(models[alike[0]])
        return cls(open_model(path))

    def rows(self, shape: tuple[int, int], joined: Joined) -> tuple[Tensor | None, dict[str, Tensor], str]:
        """(W (N, K) = shape as a file should hold its rows, other orders of them, why there is none)."""
        n, k = shape
        if not joined.parts:
            return None, {}, "nothing of diffusers' model is in it"
        try:
            weight = torch.cat([self.part(part, k) for part in joined.parts])
        except ValueError as error:
            return None, {}, str(error)
        if weight.ndim != 2 or tuple(weight.shape) != (n, k):
            size = "×".join(map(str, weight.shape))
            turned = " transposed" if tuple(weight.shape) == (k, n) else ""
            return None, {}, f"the layer is {n}×{k}{turned}, the base's weight {size}"
        weight = in_order(weight, joined.order)
        return weight, orders_of(joined, n, k), ""

    def other(self, joined: Joined, k: int) -> Tensor | None:
        """Return a tensor that is no Linear's weight, as a file should hold it, in fp32; None if the base lacks it.

        k: of the Linear whose bias it is; else 0.
        """
        try:
            parts = [self.part(name, k) for name in joined.parts]
        except ValueError:
            return None
        if not parts:
            return None
        return in_order((torch.cat(parts) if len(parts) > 1 else parts[0]).float(), joined.order)

    def lacking(self, names: set[str]) -> Iterator[str]:
        """Names in diffusers of its tensors of numbers that are neither among `names` nor tied to one that is."""
        for name in self._parts.keys() - names:
            tensor = self._tensor(name)
            alike = (
                n for n in self._parts.keys() & names if self.model.stored[self._parts[n][0]].shape == tensor.shape
            )
            if tensor.is_floating_point() and not any(torch.equal(tensor, self._tensor(other)) for other in alike):
                yield name

    def _tensor(self, name: str) -> Tensor:
        return self.model.read(self._parts[name][0])

    def part(self, name: str, k: int) -> Tensor:
        """The tensor, a weight as (N, K), of one module of diffusers, cut out of the original where that joins it."""
        if name not in self._parts:
            raise ValueError(f"the base has no {name}")
        tensor, (_, whole) = self._tensor(name), self._parts[name]
        if tensor.ndim > 2:  # convolutions, some of which a file holds as matrices
            tensor = tensor.reshape(tensor.shape[0], -1)
        tensor = in_order(tensor, whole.order)
        if len(whole.parts) == 1:
            return tensor
        return tensor.split(part_sizes(whole, tensor.shape[0], k))[whole.parts.index(name)]


def settled(model: ModelFile, base: Base) -> ModelFile:
    """The model in the dialect that the base proves, where nothing in the file decides among several.

    As it was, where none of them is right.
    """
    several = len(model.undecided) > 1
    for mended in ({"missing input_scale"}, *([] if several else [set(REPAIRS)])):  # one alone may have to be mended
        for dialect in model.undecided:
            other, votes = model.read_as(dialect), []
            for name, layer in list(other.layers.items())[:_SETTLING]:
                joined = other.joined.get(f"{name}.weight")
                truth, _, _ = base.rows(layer.shape, joined) if joined else (None, {}, "")
                against = prove(other, layer, other.read_layer(layer), truth, {}) if truth is not None else None
                votes.append(
                    against is not None
                    and (against.plausible or against.factors is not None)  # smoothing is folded into some
                    and set(against.best) <= mended
                )
            if votes and sum(votes) > len(votes) / 2:
                return other
    return model
