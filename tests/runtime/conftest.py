"""The embedded pipeline to capture, with a stand-in for CUDA graphs (tests/recorder.py)."""

import copy
import functools
from collections.abc import Callable, Iterator

import diffusers
import pytest
import torch
from recorder import Recorder

from fluxq import tiny
from fluxq.runtime import graphs


@pytest.fixture
def recorded(monkeypatch, request) -> Iterator[None]:
    """Stand in for CUDA graphs in tests that need no GPU."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(graphs, "CudaGraphs", Recorder)
        monkeypatch.setattr(graphs, "WARM_UPS", 2)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def loaded(plain_checkpoint) -> Callable[[str], diffusers.FluxPipeline]:
    return functools.cache(lambda recipe: tiny.load(folder=plain_checkpoint(recipe)))


@pytest.fixture
def quantized(loaded) -> Callable[[str], diffusers.FluxPipeline]:
    """The embedded pipeline under a recipe, with a transformer of its own."""

    def load(recipe: str) -> diffusers.FluxPipeline:
        parts = loaded(recipe).components
        pipe = diffusers.FluxPipeline(**parts | {"transformer": copy.deepcopy(parts["transformer"])})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return load


@pytest.fixture
def flux(quantized) -> diffusers.FluxPipeline:
    return quantized("16 bit")
