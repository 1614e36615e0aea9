"""Emulated sums of Hopper's matrix unit: exact where they fit, within the bound where they do not."""

import pytest
import torch

from benchmarks import accumulation
from benchmarks.accumulation import PROMOTED, bound, unit_product
from fluxq.kernels import ops
from fluxq.kernels.ops import quantized_linear
from fluxq.kernels.tensor import QuantizedTensor, pack_named


def codes(*shape: int, seed: int = 1, low: float = -448.0) -> torch.Tensor:
    values = torch.empty(*shape).uniform_(low, 448, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.float8_e4m3fn).float()


def test_sums_of_numbers_with_13_common_bits_are_exact() -> None:
    x, w = (
        torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(2)).float() for shape in ((5, 96), (7, 96))
    )
    assert torch.equal(unit_product(x, w), x @ w.T)


def test_a_bit_below_the_13th_is_lost_and_a_sum_rounds_towards_zero() -> None:
    x, w = torch.zeros(1, 64), torch.ones(1, 64)
    x[0, 0], x[0, 40] = 256.0, 256 * 2.0**-14
    assert unit_product(x, w) == 256
    assert unit_product(-x, w) == -256
    assert unit_product(x, w, promote=32) == 256 + 256 * 2.0**-14
    x[0, 40] = 256 * 1.5 * 2.0**-13
    assert unit_product(x, w) == 256 + 256 * 2.0**-13


@pytest.mark.parametrize("low", [-448.0, 0.0], ids=["both signs", "one sign"])
@pytest.mark.parametrize("sums", PROMOTED)
def test_errors_are_within_the_bound(sums: str, low: float) -> None:
    x, w = codes(9, 2080, low=low), codes(11, 2080, seed=3, low=low)  # not all of it whole promotions
    error = (unit_product(x, w, PROMOTED[sums]).double() - x.double() @ w.double().T).abs()
    largest = bound(x, w, PROMOTED[sums])
    assert (error <= largest).all() and error.max() > 1e-4 * largest.max()


def test_fewer_promotions_lose_more() -> None:
    x, w = codes(9, 4096), codes(11, 4096, seed=3)
    exact = x.double() @ w.double().T
    errors = [float((unit_product(x, w, columns) - exact).square().sum()) for columns in PROMOTED.values()]
    assert errors == sorted(errors) and errors[-1] > 4 * errors[0]


def test_in_the_block_quantized_layers_add_up_so() -> None:
    noise = torch.Generator().manual_seed(4)
    x, w = (
        torch.randn(8, 1024, generator=noise),
        QuantizedTensor.quantize(torch.randn(16, 1024, generator=noise), "fp8"),
    )
    arguments = (x, *pack_named(ops.LinearTensors(w.codes, w.scale), "fp8-fp8"))
    before = quantized_linear(*arguments)
    with accumulation.accumulating(0):
        during = quantized_linear(*arguments)
    assert torch.equal(quantized_linear(*arguments), before)
    assert not torch.equal(during, before)
    torch.testing.assert_close(during, before, rtol=0.02, atol=0.2)
