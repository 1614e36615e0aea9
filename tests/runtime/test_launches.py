"""Launches of a model that nothing was loaded of: those that the model itself makes."""

import copy
from typing import Any

import fused_models
import pytest
import torch
from torch import nn

import fluxq
from fluxq.kernels.linear import QuantLinear
from fluxq.recipes.formats import Scheme
from fluxq.recipes.workloads import ForwardPass
from fluxq.runtime import launches
from fluxq.runtime.launches import LINEAR, Launch, Machine, launches_of
from fluxq.runtime.warmup import LayerKind, random_layer

CPU = torch.device("cpu")
MACHINE = Machine(CPU, "sm_90", "speed", torch.bfloat16)


def settings(launch: Launch) -> tuple[Any, ...]:
    """Op, sizes of its tokens and what it is told in words and numbers; positions in tables are the pipeline's."""
    x, *rest = launch.arguments
    words = [value for value in rest if isinstance(value, (str, bool, torch.dtype))]
    return launch.op, x.dtype, (*x.shape[-1:], *(t.shape for t in rest[0][:1] if launch.op == LINEAR)), *words


@pytest.mark.often(1)
@pytest.mark.parametrize("family", ["flux", "flux2", "sd3", "qwen_image", "wan"])
def test_blocks_launch_what_the_model_itself_does(family: str) -> None:
    model = fused_models.quantized("int8-int8", family=family)
    row, bare = fused_models.family(model), copy.deepcopy(model).to("meta")
    fluxq.optimize(model)
    with launches._Noted("model") as noted:
        fused_models.output(model)
    tokens = ForwardPass(row.name, image=7, text=fused_models.TEXT_TOKENS)
    found = [one for make in launches_of(bare, row, tokens, MACHINE, lambda layer, made_by: "") for one in make()]
    in_blocks = {settings(one) for one in found if one.place.partition(".")[2].isdigit()}
    assert in_blocks >= {settings(one) for one in noted.launches if one.op != LINEAR}
    layers = {settings(one) for one in found if one.op == LINEAR}
    assert layers >= {settings(one) for one in noted.launches if one.op == LINEAR}
    assert {one.op for one in found} == {one.op for one in noted.launches}


def test_without_a_family_each_layer_is_launched_at_some_numbers_of_tokens() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(QuantLinear(64, 32, True, Scheme.parse("fp8-fp8"), torch.bfloat16) for _ in range(2)))
    found = [one for make in launches_of(model, None, None, MACHINE, None, (1, 5)) for one in make()]
    assert [(one.op, one.place, one.arguments[0].shape) for one in found] == [
        (LINEAR, "0", (1, 64)),
        (LINEAR, "0", (5, 64)),
    ]


def test_random_layers_of_one_input_have_its_vectors_in_common() -> None:
    scheme = Scheme.parse("nvfp4-nvfp4-static-center-smooth-d16-h128-46-r8")
    made = [random_layer(LayerKind(scheme, n, 128, True), CPU, torch.bfloat16) for n in (64, 32)]
    for name in ("pre_quant_mean", "pre_quant_scale", "deflate_basis", "input_scale"):
        assert torch.equal(*(layer.get_parameter(name) for layer in made))
    x = torch.randn(4, 128).bfloat16()
    for layer in made:
        plain = layer.dequantized(torch.float32)(x.float())
        assert (layer(x).float() - plain).norm() / plain.norm() < 0.2  # its scales fit
