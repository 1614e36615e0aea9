"""Tests that torch's default dtype (`torch.set_default_dtype`) changes no bit of codes, scales and outputs."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fluxq.kernels import ops
from fluxq.kernels.linear import QuantLinear, branch_shapes
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS, Scheme, find_format

N, K = 96, 256
SCHEMES = [
    *(f"{name}-{name}" for name in ("nvfp4", "fp8", "int8", "mxfp8", "mxfp4", "int4", "fp8_tensor")),
    *("int4-16bit", "nvfp4-int8", "nvfp4-nvfp4-center-smooth-d8-h128-46-r8", "int8-int8-center-smooth-h64-r4"),
]


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_same(work: Callable[[], list[Tensor]], default: torch.dtype) -> None:
    expected = work()
    torch.set_default_dtype(default)
    found = work()
    torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (ours, theirs)))


@pytest.mark.parametrize("format", [*FORMATS, "int4_g128"])
def test_codes_and_scales_are_the_same(format: str, default: torch.dtype) -> None:
    w, row = noise(N, K), find_format(format)

    def work() -> list[Tensor]:
        q = QuantizedTensor.quantize(w, row, four_over_six=row.two_level)
        made = ops.quantize_activation(w.bfloat16(), row) if format in FORMATS else q
        return [*q.tensors().values(), *made.tensors().values(), q.dequantize(), q.dequantize(torch.bfloat16)]

    assert_same(work, default)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_compute_the_same(scheme: str, default: torch.dtype) -> None:
    parsed, bias = Scheme.parse(scheme), noise(N).bfloat16()
    branches = {name: (1 + noise(*shape) / 9).bfloat16() for name, shape in branch_shapes(parsed, N, K).items()}
    q = QuantizedTensor.quantize(noise(N, K), parsed.weights)
    layer = QuantLinear.from_quantized(q, bias, parsed, None, branches)
    inputs = noise(5, K).bfloat16(), noise(5, K)
    assert_same(lambda: [*map(layer, inputs), *layer.collapsed(), layer.dequantized(torch.bfloat16).weight], default)
