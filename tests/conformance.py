"""Helpers of the suites of docs/conformance.md: their subjects, how a check is listed, and the page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shared import SIXTEEN_BIT
from torch import Tensor, nn

from fluxq import QuantLinear
from fluxq.recipes.recipe import shipped_recipes

Check = Callable[..., None]
# Families beside FLUX.1, which is looked at under every recipe; these under one of each kind.
OTHERS = ("sd3", "wan", "qwen_image", "ltx", "z_image")
FEW = (SIXTEEN_BIT, "fp8", "nvfp4")
SAMPLE = ("flux", "nvfp4")  # runs by default

SUBJECTS = [
    *(("flux", recipe) for recipe in (SIXTEEN_BIT, *shipped_recipes())),
    *((family, recipe) for family in OTHERS for recipe in FEW),
]

CASTS: tuple[Callable[[Any], object], ...] = (
    lambda model: model.to(torch.float16),
    lambda model: model.to("cpu", torch.float16),
    lambda model: model.to(dtype=torch.float32),
    lambda model: model.half(),
    lambda model: model.float(),
    lambda model: model.double(),
    lambda model: model.type(torch.float16),
)


def marked(subject: tuple[str, str], check: Check, *sample: tuple[str, str]) -> Any:
    """A subject and a check as parameters of a test: slow, but for the sample."""
    marks = () if subject in sample else pytest.mark.slow
    return pytest.param(subject, check, id="-".join((*subject, check.__name__)), marks=marks)


def layers(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def state(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size, Tensor]]:
    """Every tensor of a model as it is now, buffers that are not saved too."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor.dtype, tensor.shape, raw(tensor).clone()) for name, tensor in tensors.items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        x[:2] == y[:2] and torch.equal(x[2], y[2]) for x, y in ((a[name], b[name]) for name in a)
    )


@contextlib.contextmanager
def untouched(model: nn.Module, output: Callable[[nn.Module], Tensor]) -> Iterator[None]:
    """After the block the model holds and computes what it did before."""
    before, want = state(model), output(model)
    yield
    assert same(state(model), before), "tensors changed"
    assert torch.equal(output(model), want), "another output"


@contextlib.contextmanager
def refused(model: nn.Module, message: str, output: Callable[[nn.Module], Tensor]) -> Iterator[None]:
    """The block is refused by a message, and the model is what it was. A model in 16 bit takes it."""
    if not layers(model):
        yield
        return
    with untouched(model, output), pytest.raises((ValueError, NotImplementedError), match=message):
        yield


def alike(act: Callable[[], object], stock: Callable[[], object]) -> bool:
    """Tell whether both pass; return False if both fail with the same kind of error.

    AssertionError for anything else: it is a difference to stock.
    """
    failures = []
    for run in (stock, act):
        try:
            run()
            failures.append(None)
        except Exception as error:  # whatever the library says
            failures.append(type(error))
    assert failures[0] == failures[1], f"in 16 bit {failures[0]}, quantized {failures[1]}"
    return failures[0] is None
