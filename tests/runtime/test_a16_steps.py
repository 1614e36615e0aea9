"""Steps at 16-bit activations: the weight-only model's own bits in them, the quantized model's in all others."""

import copy
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

import fluxq
from fluxq import tiny
from fluxq.kernels.linear import LOW_RANK, QuantLinear, branch_shapes
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.computing import Steps
from fluxq.recipes.formats import Scheme
from fluxq.runtime import graphs
from fluxq.runtime.layout import add_decoded, add_row_scale, reencode_layer, swizzle
from fluxq.runtime.modulation import hoist_modulation
from fluxq.runtime.steps import KeptSteps, keep_steps
from tests.runtime.test_graphs import Recorder
from tests.runtime.test_steps import ADAPTED, distance, kinds, run, with_parts

N, K = 64, 256
SCHEMES = [
    *("nvfp4-nvfp4-static", "fp8-fp8", "fp8_tensor-fp8_tensor-static", "mxfp8-mxfp8", "int8-int8", "mxfp4-mxfp4"),
    *("int4-int4-smooth-r8", "nvfp4-nvfp4-static-center-smooth-d4-h128-46-r8", "int8-int8-center-smooth"),
]
LAID_OUT: dict[str, Callable[[QuantLinear], Any]] = {
    "swizzled": swizzle,
    "row scale": lambda layer: add_row_scale(layer, ("int8",)),
    "decoded": add_decoded,
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def loaded(plain_checkpoint) -> Any:
    """A checkpoint of nvfp4; tests leave it as it is."""
    return tiny.load(folder=plain_checkpoint("nvfp4"))


@pytest.fixture
def pipe(loaded) -> Any:
    """The same with a transformer and a scheduler of its own."""
    return with_parts(loaded, transformer=copy.deepcopy(loaded.transformer))


@pytest.fixture(scope="module")
def weight_only(loaded) -> nn.Module:
    return weight_only_model(loaded.transformer)


def layer_of(scheme: str, dtype: torch.dtype) -> QuantLinear:
    """A layer of drawn tensors."""
    parsed, draw = Scheme.parse(scheme), torch.Generator().manual_seed(0)
    shapes = branch_shapes(parsed, N, K)
    branches = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    if parsed.smooth:
        branches["pre_quant_scale"] = branches["pre_quant_scale"].abs() + 0.5
    w = QuantizedTensor.quantize(torch.randn(N, K, generator=draw), parsed.weights)
    input_scale = torch.tensor(0.01) if parsed.static_input else None
    return QuantLinear.from_quantized(w, torch.randn(N, generator=draw).to(dtype), parsed, input_scale, branches)


def weight_only_layer(layer: QuantLinear) -> QuantLinear:
    """The layer that a checkpoint of the same codes has, had its recipe asked for 16-bit activations."""
    scheme = Scheme.parse("-".join([layer.scheme.weights.name, "16bit", *_steps_of(layer.scheme)]))
    tensors = {name: value.data.clone() for name, value in layer.named_parameters(recurse=False) if name != "input_scale"}
    return QuantLinear.from_tensors(tensors, (layer.out_features, layer.in_features), scheme)


def _steps_of(scheme: Scheme) -> list[str]:
    return [part for part in str(scheme).split("-")[2:] if part not in ("static", "46")]


def weight_only_model(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for path, layer in [(path, each) for path, each in model.named_modules() if isinstance(each, QuantLinear)]:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, weight_only_layer(layer))
    return model


# --- bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_computes_the_bits_of_a_weight_only_one(scheme, dtype) -> None:
    layer = layer_of(scheme, dtype)
    other, x = weight_only_layer(layer), torch.randn(5, K).to(dtype)
    assert torch.equal(layer.without_rounding(x), other(x))
    assert not torch.equal(layer(x), other(x))
    if layer.low_rank is not None:
        layer.get_parameter(LOW_RANK[1]).data.zero_()
        assert not torch.equal(layer.without_rounding(x), other(x))


@pytest.mark.parametrize("laid_out", LAID_OUT)
def test_a_layer_laid_out_for_one_gpu_computes_them_too(laid_out) -> None:
    layer, x = layer_of("nvfp4-nvfp4-static-h128-r8", torch.bfloat16), torch.randn(5, K).bfloat16()
    other = weight_only_layer(layer)
    LAID_OUT[laid_out](layer)
    assert torch.equal(layer.without_rounding(x), other(x))


def test_a_layer_encoded_anew_takes_its_new_codes() -> None:
    layer, x = layer_of("nvfp4-nvfp4-static-h128-r8", torch.bfloat16), torch.randn(5, K).bfloat16()
    other = weight_only_layer(layer)
    reencode_layer(layer, ("int8",))
    assert 0 < distance(layer.without_rounding(x), other(x)) < distance(layer(x), other(x)) < 0.02


@pytest.mark.often(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["nvfp4", "int4-svd", "fp8", "mxfp8", "int8", "nvfp4-max"])
def test_all_steps_are_the_weight_only_model(checkpoint, plain_checkpoint, recipe, dtype: str) -> None:
    folder = (plain_checkpoint if recipe in ("fp8", "mxfp8", "nvfp4") else checkpoint)(recipe)
    pipe = tiny.load(dtype, folder)
    quantized, other = copy.deepcopy(pipe.transformer), weight_only_model(pipe.transformer)
    with keep_steps(pipe, first=9, components="a16") as kept:
        assert kinds(run(pipe, num_inference_steps=2), quantized, other) == "kk"
        assert (kept.placed, kept.nbytes, str(kept.steps)) == ((), 0, "the first 9 steps")
    assert kinds(run(pipe, num_inference_steps=1), quantized, other) == "q"
