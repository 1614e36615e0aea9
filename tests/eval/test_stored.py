"""A stored weight is its source rounded, or what is wrong is said and where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fluxq.eval.debug.stored import code_step, stored_fault
from fluxq.kernels.encode import decode, decode_scale, encode, pack
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.transforms import rotate
from fluxq.quantize.run import quantize_linear
from fluxq.recipes.formats import ELEMENTS, FORMATS, Scheme
from fluxq.recipes.recipe import Component, Operand, Rounding
from fluxq.runtime.layout import reencode_layer

N, K = 128, 256


def weight() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)) / K**0.5


def plain(name: str) -> QuantLinear:
    row = FORMATS[name]
    return QuantLinear.from_quantized(QuantizedTensor.quantize(weight(), row), None, Scheme(row, None))


@pytest.fixture(scope="module")
def fitted() -> QuantLinear:
    """By GPTQ, under searched scales, centred and smoothed."""
    linear = nn.Linear(K, N, bias=False)
    linear.weight.data.copy_(weight())
    x = torch.randn(512, K, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 3, K) + 0.5
    layer = quantize_linear(linear, x, "nvfp4")
    assert layer.scheme.smooth and not torch.equal(layer.quantized_weight.codes, plain("nvfp4").quantized_weight.codes)
    return layer


@pytest.mark.parametrize("name", FORMATS)
def test_plain_rounding_is_sound(name):
    assert stored_fault(plain(name), weight()) == ""


def test_fitted_rounding_is_sound(fitted):
    assert stored_fault(fitted, weight()) == ""


@pytest.mark.parametrize("recipe", ["nvfp4-max", "int4-svd"])
def test_low_rank_and_all_else_is_sound(recipe):
    linear = nn.Linear(K, N)
    linear.weight.data.copy_(weight())
    x = torch.randn(512, K, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 3, K)
    assert stored_fault(quantize_linear(linear, x, recipe), weight()) == ""


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "int8"])
def test_feedback_is_many_steps_of_a_small_code(name):
    linear = nn.Linear(K, N)
    linear.weight.data.copy_(weight())
    random = torch.Generator().manual_seed(1)
    x = torch.randn(512, K, generator=random) @ torch.randn(K, K, generator=random).mul_(0.1).cumsum(1)
    operand = Operand(format=name)
    recipe = Component(weights=operand, activations=operand, rounding=Rounding(method="gptq"))
    layer = quantize_linear(linear, x, recipe)
    assert not torch.equal(layer.collapsed()[0], plain(name).collapsed()[0])
    assert stored_fault(layer, weight()) == ""


def test_of_many_weights_some_are_far_from_their_source():
    """Feedback is about as large in every row, and many steps of rows with small scales."""
    random, row = torch.Generator().manual_seed(3), FORMATS["nvfp4"]
    codes = torch.randn(4096, K, generator=random) * torch.exp2(3 * torch.rand(4096, 1, generator=random) - 3)
    layer = QuantLinear.from_quantized(QuantizedTensor.quantize(codes, row), None, Scheme(row, row))
    noise = 0.03 * torch.randn(4096, K, generator=random)
    source = layer.quantized_weight.dequantize() + noise
    assert stored_fault(layer, source) == ""
    source[7, 9] += 0.25
    assert "1 stored code is not what rounding gives, most at row 7, column 9" in stored_fault(layer, source)


def test_rotated_weights_are_compared_rotated():
    row = FORMATS["nvfp4"]
    q = QuantizedTensor.quantize(rotate(weight(), 128), row)
    layer = QuantLinear.from_quantized(q, None, Scheme(row, row, hadamard=128))
    assert stored_fault(layer, weight()) == ""
    _halve(layer.get_parameter("weight_scale").data, 9, 2)
    assert "row 9, columns 32 to 47" in stored_fault(layer, weight())


def test_a_block_that_was_chosen_to_clip_is_sound():
    """Half its scale, as a search may choose: the largest codes are then steps away, the others are rounded."""
    layer, w = plain("mxfp4"), weight()
    scale = layer.get_parameter("weight_scale").data
    scale[9, 2] -= 1
    block = w[9:10, 64:96]
    step = decode_scale(scale[9:10, 2:3], FORMATS["mxfp4"], None)
    codes = encode(block / step, ELEMENTS["e2m1"])
    layer.weight.data[9:10, 32:48] = pack(codes, ELEMENTS["e2m1"])
    assert (block.abs() > 8 * step).any()
    assert stored_fault(layer, w) == ""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("factor", [1.5, 0.9])
def test_another_size_of_all_weights(name, factor):
    fault = stored_fault(plain(name), weight() / factor)
    assert fault.startswith("stored weights are ") and fault.endswith(" times those of the source")
    assert factor_in(fault) == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize(("name", "where"), [("nvfp4", "row 9, columns 32 to 47"), ("int8", "row 9"), ("fp8", "row 9")])
def test_one_wrong_scale(name, where):
    layer = plain(name)
    scale = layer.get_parameter("weight_scale").data
    at = (9, 2) if scale.ndim == 2 else (9,)
    scale[at] = (scale[at].float() / 2).to(scale.dtype)
    fault = stored_fault(layer, weight())
    assert fault.startswith(f"a scale is wrong: stored weights of {where} are ")
    assert factor_in(fault) == pytest.approx(0.5, rel=0.05)


def test_one_wrong_scale_of_a_fitted_layer(fitted):
    assert _with(fitted, "weight_scale", lambda t: _halve(t, 9, 2)).startswith(
        "a scale is wrong: stored weights of row 9"
    )


def test_a_code_that_is_not_a_number(fitted):
    fault = _with(fitted, "weight_scale", lambda t: t.__setitem__((9, 2), torch.nan))
    assert fault == "stored weights decode to NaN or infinity"


@pytest.mark.parametrize(("kind", "found"), [("plain", 0.85), ("fitted", 0.5)])
def test_swapped_nibbles(fitted, kind, found):
    """As stored.py says: nearly all are found in plainly rounded layers, those of distant codes in fitted ones."""
    layer, random = {"plain": plain("nvfp4"), "fitted": fitted}[kind], torch.Generator().manual_seed(2)
    hits = tries = 0
    while tries < 40:
        row, byte = (int(torch.randint(size, (), generator=random)) for size in (N, K // 2))
        value = int(layer.weight[row, byte])
        swapped = (value >> 4) | ((value & 15) << 4)
        if swapped == value:
            continue
        fault = _with(layer, "weight", lambda t, to=(row, byte), code=swapped: t.__setitem__(to, code))
        tries += 1
        hits += f"row {row}, column {2 * byte}:" in fault or f"row {row}, column {2 * byte + 1}:" in fault
    assert hits / tries > found


def test_reencoded_layers_are_passed_over():
    layer = plain("nvfp4")
    layer.scheme = Scheme(FORMATS["nvfp4"], FORMATS["nvfp4"])
    reencode_layer(layer, ("int8",))
    assert stored_fault(layer, weight()) == ""


@pytest.mark.parametrize("name", ELEMENTS)
def test_step_is_the_distance_to_the_next_code(name):
    element = ELEMENTS[name]
    values = torch.cat([torch.linspace(0, size, 10_001) for size in (2.0**-6, 1.0, 64.0, element.max)])
    codes = decode(encode(values, element), element).unique()
    assert torch.equal(code_step(codes[:-1], element), codes.diff())


def factor_in(fault: str) -> float:
    return float(fault.split(" are ")[1].split(" times")[0])


def _with(layer: QuantLinear, name: str, change) -> str:
    """The fault with a tensor changed, which is then put back."""
    tensor = layer.get_parameter(name).data
    own = tensor.clone()
    change(tensor)
    fault = stored_fault(layer, weight())
    tensor.copy_(own)
    return fault


def _halve(scale: torch.Tensor, row: int, block: int) -> None:
    scale[row, block] = (scale[row, block].float() / 2).to(scale.dtype)
