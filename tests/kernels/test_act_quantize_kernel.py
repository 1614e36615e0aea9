"""The activation inside the quantizers, on Triton's interpreter: near float64, and fused to the bytes of two passes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_tests import sibling
from poison import poisoned
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.quantize_activation import kernel as quantize_activation
from fluxq.kernels.quantize_activation.op import ACTS, GATED, PRODUCED
from fluxq.kernels.tiles import Tile
from fluxq.recipes.formats import FORMATS

beside = sibling("test_quantize_activation_kernel")
TILE = Tile(rows=16, columns=256, warps=4)
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # exp(100), infinity and NaN


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def values(m: int, k: int, dtype: torch.dtype) -> Tensor:
    noise = torch.Generator().manual_seed(m + k)
    return (torch.randn(m, k, generator=noise) * torch.logspace(-2, 1.3, m)[:, None]).to(dtype)


def check_activation(kernels: ModuleType, act: str, m: int = 17, dtype: torch.dtype = torch.bfloat16) -> None:
    """Within the bound of float64; and in 16 bit almost everywhere the very bits of torch's layers, whose own gelu
    cancels where it is small.
    """
    k = 331
    x = values(m, 2 * k if act in GATED else k, dtype)
    with poisoned():
        out = kernels.activate(x, act, tile=TILE)
    y, bound = quantize_activation.exact_activation(act, x)
    bound = bound + torch.finfo(dtype).eps / 2 * (y.abs() + bound) + torch.finfo(dtype).smallest_normal
    wrong = ~((out.double() - y).abs() <= bound)
    assert not wrong.any(), f"{int(wrong.sum())} differ, first at {wrong.nonzero()[0].tolist()}"
    if dtype != torch.float32:
        differs = out != ACTS[act](x)
        if act not in GATED:
            differs &= y.abs() > 2.0**-5 * x.double().abs()
        assert differs.double().mean() < 5e-3, (
            f"{int(differs.sum())} differ from torch, first at {differs.nonzero()[0]}"
        )


def check_fused(kernels: ModuleType, format: str, act: str, **options) -> None:
    beside.check_steps(kernels, format, act=act, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("act", ACTS)
def test_activations_are_those_of_float64_and_of_torch(act: str, dtype: torch.dtype) -> None:
    check_activation(quantize_activation, act, dtype=dtype)


@pytest.mark.parametrize("m", [1, 5, 130])
def test_activations_of_ragged_rows(m: int) -> None:
    check_activation(quantize_activation, "mul_silu", m)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_every_bf16_number(act: str) -> None:
    bits = torch.arange(2**16, dtype=torch.int32)
    x = (bits << 16).view(torch.float32).bfloat16().reshape(64, 1024)
    found = quantize_activation.activate(x, act, tile=Tile(64, 1024, 4))
    expected, bound = quantize_activation.exact_activation(act, x)
    bound = bound + 2.0**-8 * (expected.abs() + bound) + torch.finfo(torch.bfloat16).smallest_normal
    assert ((found.double() - expected).abs() <= bound)[x.isfinite()].all()
    assert not found.isfinite()[~x.isfinite()].any() and found.isnan()[x.isnan()].all()


@pytest.mark.often(1)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("format", PRODUCED)
def test_fused_gives_the_bytes_of_two_passes(format: str, act: str) -> None:
    check_fused(quantize_activation, format, act)


@pytest.mark.often(2)
@pytest.mark.parametrize("format", PRODUCED)
def test_fused_with_every_step_and_the_low_rank_product(format: str) -> None:
    block, nvfp4 = FORMATS[format].has_byte_scales, format == "nvfp4"
    check_fused(
        quantize_activation, format, "mul_silu", hadamard=128, rank=17, four_over_six=nvfp4, swizzled=block, m=5
    )


@pytest.mark.parametrize("format", ["int8", "fp8_tensor", "nvfp4"])
def test_fused_with_a_given_scale(format: str) -> None:
    check_fused(quantize_activation, format, "gelu_tanh", given=True)


def test_halves_may_be_columns_of_a_wider_matrix() -> None:
    wide = values(5, 1024, torch.bfloat16)
    x = wide[:, 256:768]
    found = quantize_activation.activate(x, "silu_mul", tile=TILE)
    assert torch.equal(found, quantize_activation.activate(x.contiguous(), "silu_mul", tile=TILE))


BAD = {
    "act is 'relu', expected one of gelu": {"act": "relu"},
    r"x \(4, 63\) has no two halves": {"act": "silu_mul", "x": torch.ones(4, 63)},
    r"x \(0, 64\) is empty": {"x": torch.ones(0, 64)},
    "x is torch.int32": {"x": torch.ones(4, 64).int()},
    r"pass \.contiguous": {"x": torch.ones(64, 4).t()},
}


@pytest.mark.parametrize("message", BAD)
def test_input_that_the_activation_does_not_take_is_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_activation.activate(**{"x": torch.ones(4, 64), "act": "gelu", "tile": TILE} | BAD[message])


FILE = "quantize_activation.py"
gelu = partial(check_activation, act="gelu")
silu_mul = partial(check_activation, act="silu_mul")
FAULTS: dict[str, tuple[str, str, Callable]] = {
    "gelu without its half": ("0.5 * v * (1.0", "v * (1.0", gelu),
    "the other gelu": ("rounded(gelu_tanh(values", "rounded(gelu(values", partial(check_activation, act="gelu_tanh")),
    "silu of the sign": ("v * -1.4426950408889634", "v * 1.4426950408889634", silu_mul),
    "the other half is the gate": (
        "rounded(silu(values), x) * other",
        "values * rounded(silu(other), x)",
        silu_mul,
    ),
    "silu not rounded": (
        "rounded(silu(values), x) * other",
        "silu(values) * other",
        silu_mul,
    ),
    "a tile unwritten": ("columns = tl.program_id(1) * COLUMNS +", "columns = COLUMNS +", gelu),
    "no mask of rows": (
        "mask = (rows < M)[:, None] & (columns < K)[None, :]\n    value",
        "mask = (rows < M + 1)[:, None] & (columns < K)[None, :]\n    value",
        gelu,
    ),
    "scale of x": (
        "M, K, ACT, down is None, COLUMNS)\n        if down is not None:",
        'M, K, "", down is None, COLUMNS)\n        if down is not None:',
        partial(check_fused, format="int8", act="gelu", rank=5),
    ),
    "codes of x": (
        "M, K, ACT, True, COLUMNS)\n        values",
        'M, K, "", True, COLUMNS)\n        values',
        partial(check_fused, format="int8", act="gelu"),
    ),
}


@pytest.mark.often(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_activation_turns_its_check_red(fault: str, tmp_path: Path) -> None:
    old, new, check = FAULTS[fault]
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(beside.with_fault(FILE, old, new, tmp_path))
