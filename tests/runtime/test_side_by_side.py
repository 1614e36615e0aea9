"""Layers whose tensors lie side by side: the same bytes, and one product for all of a group."""

import copy
from collections.abc import Sequence

import pytest
import torch
from fused_models import Count, output, quantized
from torch import Tensor

from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.formats import Scheme
from fluxq.runtime import fused, layout
from fluxq.runtime.side_by_side import STORED, are_neighbours, lay_side_by_side, operands_of, whole

K = 256


def layers_of(scheme: str, sizes: Sequence[int] = (128, 64, 96), *, bias: bool = True) -> list[QuantLinear]:
    noise = torch.Generator().manual_seed(3)
    parsed, layers = Scheme.parse(scheme), []
    for n in sizes:
        w = QuantizedTensor.quantize(torch.randn(n, K, generator=noise), parsed.weights)
        given = torch.randn(n, generator=noise).bfloat16() if bias else None
        layers.append(QuantLinear.from_quantized(w, given, parsed, torch.tensor(0.01) if parsed.static_input else None))
    return layers


def stored(layer: QuantLinear) -> dict[str, Tensor]:
    """Copies of its tensors as bytes."""
    return {name: each.detach().clone().reshape(-1).view(torch.uint8) for name, each in layer.named_parameters()}


@pytest.mark.parametrize("scheme", ["int8-int8", "fp8-fp8", "mxfp8-mxfp8", "mxfp4-mxfp4", "int4-int8", "int8-16bit"])
def test_layers_keep_their_bytes_and_lie_in_one_matrix(scheme: str) -> None:
    layers = layers_of(scheme)
    before, x = [stored(layer) for layer in layers], torch.randn(5, K).bfloat16()
    expected = [layer(x) for layer in layers]
    assert operands_of(layers) is None and lay_side_by_side(layers)
    for layer, tensors, y in zip(layers, before, expected, strict=True):
        after = stored(layer)
        assert after.keys() == tensors.keys() and all(torch.equal(after[name], tensors[name]) for name in tensors)
        assert torch.equal(layer(x), y)
    found = operands_of(layers)
    assert found is not None and found.keys() == set(STORED)
    for name, joined in found.items():
        parts = [part for layer in layers if (part := layer.stored(name)) is not None]
        assert (joined is None) == (not parts)
        if joined is not None:
            assert joined.data_ptr() == parts[0].data_ptr()  # no copy
            assert torch.equal(joined.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in parts]))
    addresses = [layer.weight.data_ptr() for layer in layers]
    assert lay_side_by_side(layers) and addresses == [layer.weight.data_ptr() for layer in layers]


def test_a_global_scale_of_one_value_is_one_tensor() -> None:
    layers = layers_of("nvfp4-nvfp4-static")
    assert not lay_side_by_side(layers) and operands_of(layers) is None
    for layer in layers:
        layer.get_parameter("weight_scale_2").data = torch.tensor(0.5)
    assert lay_side_by_side(layers)
    found = operands_of(layers)
    assert found is not None and found["weight_scale_2"] == 0.5
    assert len({layer.get_parameter("weight_scale_2").data_ptr() for layer in layers}) == 3
    for number, layer in enumerate(layers):
        state = layer.state_dict() | {"weight_scale_2": torch.tensor(0.1 * (number + 1))}
        layer.load_state_dict(state)
    assert [round(float(layer.weight_scale_2), 4) for layer in layers] == [0.1, 0.2, 0.3]
    assert operands_of(layers) is None and not lay_side_by_side(layers) and operands_of(layers) is None


@pytest.mark.parametrize(("sizes", "fits"), [((128, 256, 96), True), ((128, 64, 96), False)])
def test_swizzled_scales_follow_one_another_in_whole_tiles(sizes: Sequence[int], fits: bool) -> None:
    layers = layers_of("mxfp8-mxfp8", sizes)
    whole_weight = torch.cat([layer.quantized_weight.dequantize() for layer in layers])
    for layer in layers:
        layout.swizzle(layer)
    assert lay_side_by_side(layers) is fits
    found = operands_of(layers)
    assert (found is not None) is fits
    if found is not None:
        weight, scale = found["weight"], found["weight_scale"]
        assert weight is not None and scale is not None
        joined = QuantizedTensor.stored(weight, scale, None, layers[0].scheme.weights).unswizzled()
        assert torch.equal(joined.dequantize(), whole_weight)


def test_layers_that_differ_stay_apart() -> None:
    different = {
        "one scale each": layers_of("fp8_tensor-fp8_tensor"),
        "schemes": [*layers_of("int8-int8", (64,)), *layers_of("fp8-fp8", (64,))],
        "biases": [*layers_of("int8-int8", (64,)), *layers_of("int8-int8", (64,), bias=False)],
        "one layer": layers_of("int8-int8", (64,)),
    }
    for why, layers in different.items():
        before = [layer.weight.data_ptr() for layer in layers]
        assert not lay_side_by_side(layers), why
        assert before == [layer.weight.data_ptr() for layer in layers], why


def test_a_layer_that_moved_ends_it() -> None:
    layers = layers_of("int8-int8")
    assert lay_side_by_side(layers)
    layers[1].weight.data = layers[1].weight.data.clone()
    assert operands_of(layers) is None and lay_side_by_side(layers) and operands_of(layers) is not None
    assert operands_of([layers[0], layers[2]]) is None  # another lies between
    plain = layers_of("int8-int8", bias=False)
    assert lay_side_by_side(plain)
    plain[1].bias = torch.nn.Parameter(torch.ones(64).bfloat16(), requires_grad=False)
    assert operands_of(plain) is None


def test_a_layer_laid_in_inference_mode_can_be_trained_through() -> None:
    layers, x = layers_of("int8-int8"), torch.randn(5, K).bfloat16().requires_grad_()
    with torch.inference_mode():
        assert lay_side_by_side(layers)
    layers[0](x).sum().backward()
    assert x.grad is not None


def test_neighbours_are_of_one_memory() -> None:
    y = torch.arange(48.0).view(2, 6, 4)
    text, image = y[:, :2], y[:, 2:]
    assert are_neighbours([text, image], 1) and torch.equal(whole([text, image], 1), y)
    assert whole([text, image], 1).data_ptr() == y.data_ptr()
    assert not are_neighbours([image, text], 1) and not are_neighbours([text, y.clone()[:, 2:]], 1)
    assert not are_neighbours([y[:, :2], y[:, 3:]], 1) and not are_neighbours([text, image.transpose(1, 2)], 1)


@torch.no_grad()
@pytest.mark.parametrize("family", ["flux", "flux2", "sd3", "qwen_image", "wan"])
def test_a_group_is_one_product(family: str) -> None:
    model = quantized("int8-int8", family=family)
    fused.optimize(model, FAMILIES[family], "cpu")
    with Count() as apart:
        expected = output(model)
    before = {name: stored(module) for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    fused.optimize(model, FAMILIES[family], "cpu", side_by_side=True)
    with Count() as together:
        found = output(model)
    assert torch.equal(found, expected)  # sums of int8 are exact
    fewer = apart.found["scaled_matmul"] - together.found["scaled_matmul"]
    groups = [
        len(takers)
        for block in model.modules()
        if (fusion := block.__dict__.get(fused.FUSION_ATTRIBUTE))
        for first in fusion.groups
        if (takers := fused.takers_of(fused.layers_of(block, fusion, first), fusion, first))
    ]
    assert fewer == sum(count - 1 for count in groups) > 0
    assert apart.found - together.found == {"scaled_matmul": fewer}
    for name, tensors in before.items():
        after = stored(model.get_submodule(name))
        assert all(torch.equal(after[part], tensors[part]) for part in tensors), name


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["fp8-fp8", "nvfp4-nvfp4-static"])
def test_copies_and_saved_files_are_as_before(scheme: str, tmp_path) -> None:
    model = quantized(scheme)
    for name, parameter in model.named_parameters():
        if name.endswith("weight_scale_2"):
            parameter.data.fill_(0.0005)
    fused.optimize(model, FAMILIES["flux"], "cpu")
    model.save_pretrained(tmp_path / "before")
    expected = output(model)
    fused.optimize(model, FAMILIES["flux"], "cpu", side_by_side=True)
    model.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()
    for other in (model, copy.deepcopy(model)):
        torch.testing.assert_close(output(other), expected, rtol=0.02, atol=0.02)
