"""Quantizing layer by layer, and trying a recipe on one layer."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fluxq
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize import nearest
from fluxq.quantize.nearest import sqnr, weight_sqnr
from fluxq.recipes.recipe import load_recipe, shipped_recipes

# Gaussian weights and inputs, both quantized: dB that a sound implementation reaches with room to spare.
LEAST_SQNR = {"fp8": 26, "mxfp8": 26, "nvfp4": 15, "nvfp4-max": 15, "mxfp4": 13, "mxfp4-max": 13, "int8": 35}
LEAST_SQNR |= {"int4": 20, "int4-svd": 15, "fp8-comfy": 26, "int8-convrot": 35}


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 96, dtype=torch.bfloat16)


@pytest.mark.often(2)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_recipe_tried_on_one_layer_stays_close_to_it(recipe, linear):
    x = torch.randn(3, 40, 256, dtype=torch.bfloat16)
    layer = fluxq.quantize_linear(linear, x, recipe)
    assert isinstance(layer, fluxq.QuantLinear)
    with torch.no_grad():
        y = linear(x).float()
        assert layer(x).shape == y.shape
        assert sqnr(y, layer(x).float()) > LEAST_SQNR[recipe]
    assert layer.scheme.regular == (recipe == "int8-convrot")


def test_the_input_scale_comes_from_the_inputs_given(linear):
    x = torch.randn(40, 256, dtype=torch.bfloat16)
    entry = load_recipe("nvfp4")[1].components["transformer"].model_copy(update={"transforms": []})
    scale = fluxq.quantize_linear(linear, x, entry).input_scale
    assert torch.equal(scale.data, x.float().abs().max() / (6 * 448))


def test_a_component_serves_as_recipe_and_bias_is_optional(linear):
    linear.bias = None
    component = load_recipe("fp8")[1].components["transformer"]
    layer = fluxq.quantize_linear(linear, torch.randn(4, 256), component)
    assert layer.bias is None and str(layer.scheme) == "fp8-fp8"


def test_profile_rtn_rounds_to_nearest(linear, tmp_path):
    text = (Path(fluxq.__file__).parent / "recipes" / "nvfp4.yaml").read_text(encoding="utf-8")
    file = tmp_path / "plain.yaml"
    file.write_text(text.replace("profile: balanced", "profile: rtn"), encoding="utf-8")
    layer = fluxq.quantize_linear(linear, torch.randn(512, 256, dtype=torch.bfloat16), str(file))
    q = QuantizedTensor.quantize(linear.weight, "nvfp4")
    assert torch.equal(layer.weight, q.codes) and str(layer.scheme) == "nvfp4-nvfp4"  # as `fluxq quantize` plans it


def test_inputs_of_another_width_are_refused(linear):
    with pytest.raises(ValueError, match="x has 128 channels, the layer takes 256"):
        fluxq.quantize_linear(linear, torch.randn(4, 128), "fp8")


def test_a_layer_with_nan_is_refused(linear):
    with torch.no_grad():
        linear.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        fluxq.quantize_linear(linear, torch.randn(4, 256), "fp8")


def test_sqnr_is_ten_log_of_power_over_error_power():
    reference = torch.tensor([3.0, 4.0])
    assert sqnr(reference, reference + 0.5) == pytest.approx(10 * torch.log10(torch.tensor(25 / 0.5)).item())
    assert sqnr(reference, reference) == float("inf")


@pytest.mark.parametrize("format", ["fp8", "fp8_e5m2", "fp8_128x128", "nvfp4", "int4", "fp8_tensor"])
def test_the_sqnr_of_a_large_weight_is_that_of_rows_from_all_over_it(format, monkeypatch):
    w = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 300).unsqueeze(1)
    q = QuantizedTensor.quantize(w, format)
    whole = sqnr(w, q.dequantize())
    assert weight_sqnr(w, q) == whole  # it is not large
    monkeypatch.setattr(nearest, "_SAMPLED", 100 * 256)
    some = weight_sqnr(w, q)
    assert some == sqnr(w[::3], q.dequantize()[::3]) != whole
    assert some == pytest.approx(whole, abs=0.3)
