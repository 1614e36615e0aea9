"""Gradients times stored weights on Triton's interpreter: within the rounding of the sums, and of w16."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_tests import sibling
from poison import poisoned
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels import launch
from fluxq.kernels.input_gradient import kernel as input_gradient
from fluxq.kernels.input_gradient.op import OP
from fluxq.kernels.input_gradient.op import input_gradient as op
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.tensor import QuantizedTensor, swizzle_scales
from fluxq.kernels.tiles import MatmulTile
from fluxq.recipes.devices import KERNEL_FORMATS

beside = sibling("test_quantize_activation_kernel", "before")
matmul = sibling("test_scaled_matmul_kernel", "before")
TILE = MatmulTile(m=32, n=128, k=32, warps=4, stages=3, group_m=2)
WEIGHTS = (*KERNEL_FORMATS, "int4_g128")
CHIP, BF16 = "sm_90", torch.bfloat16
SHARED = ("fp8_tensor", "mxfp8", "mxfp4", "nvfp4")  # whose decoded weights have no more bits than bfloat16


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def operands(weights: str, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, QuantizedTensor]:
    """Gradient (m, n) and w (n, k); rows differ in scale by up to 1000."""
    m, n, k = shape
    noise = torch.Generator().manual_seed(m + n + k)
    grad = torch.randn(m, n, generator=noise) * torch.logspace(-2, 1, m)[:, None]
    w = torch.randn(n, k, generator=noise) * torch.logspace(0, -2, n)[:, None]
    return grad.to(dtype), QuantizedTensor.quantize(w, weights)


def check(
    kernels: ModuleType,
    weights: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    change: Callable[[QuantizedTensor], QuantizedTensor] = lambda w: w,
) -> None:
    """Against float64, each element within the rounding of its own sum and, where they are rounded, of its weights."""
    grad, w = operands(weights, shape, dtype)
    w = change(w)
    a, b = grad.double(), w.dequantize().double()
    terms = shape[1] + 8 + 2**16 * kernels.rounds_decoded(w, dtype)  # in units of 2^-24: 2^-8 of each weight
    with poisoned():
        out = kernels.input_gradient(grad, w, torch.float32, tile=TILE)
    matmul.assert_within(out.double(), a @ b, terms * 2.0**-24 * (a.abs() @ b.abs()) + 2.0**-23 * (a @ b).abs())


def stored(w: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return w.codes, w.scale, w.global_scale


@pytest.mark.often(2)
@pytest.mark.parametrize("shape", [(1, 33, 128), (5, 64, 384), (40, 70, 640)])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_kernel_is_within_the_rounding_of_its_sums(weights: str, shape: tuple[int, int, int]) -> None:
    check(input_gradient, weights, shape)


def test_formats_whose_weights_are_exact_in_16_bit_are_held_to_the_sums_alone() -> None:
    found = {name for name in WEIGHTS if not input_gradient.rounds_decoded(operands(name, (1, 8, 128), BF16)[1], BF16)}
    assert found == set(SHARED)


@pytest.mark.parametrize("weights", ["nvfp4", "fp8"])
def test_many_tiles_in_groups(weights: str) -> None:
    check(input_gradient, weights, (130, 96, 256))


@pytest.mark.parametrize("weights", ["fp8", "fp8_tensor", "int8"])
def test_formats_without_groups_take_every_k(weights: str) -> None:
    check(input_gradient, weights, (5, 33, 45))


@pytest.mark.often(2)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradients_in_float16(weights: str) -> None:
    check(input_gradient, weights, (5, 33, 256), dtype=torch.float16)


def test_a_global_scale_of_each_row_is_part_of_the_weight() -> None:
    check(
        input_gradient,
        "nvfp4",
        (5, 40, 128),
        change=lambda w: replace(w, global_scale=torch.linspace(0.001, 0.1, 40)[:, None]),
    )


@pytest.mark.often(2)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_weight_is_that_of_the_decoder_to_the_bit(weights: str) -> None:
    """Gradients that are rows of the identity show w16; what is applied to the sums is applied once."""
    w = operands(weights, (1, 32, 256), BF16)[1]
    out = input_gradient.input_gradient(torch.eye(32, dtype=BF16), w, torch.float32, tile=TILE)
    if w.global_scale is None:
        expected = w.dequantize()
    else:  # which is applied last
        expected = replace(w, global_scale=torch.ones(())).dequantize() * w.global_scale
    assert torch.equal(out, expected if weights in SHARED else expected.bfloat16().float())


@pytest.mark.parametrize("weights", ["fp8", "mxfp8", "nvfp4"])
def test_a_nan_of_a_weight_spoils_its_own_column_alone(weights: str) -> None:
    grad, w = operands(weights, (3, 40, 384), BF16)
    last = w.shape[0] - 1  # the row that a mask of N could read once more
    if w.format.element.name == "e4m3":
        w.codes.view(torch.uint8)[last, 301] = 0xFF
        spoilt = [301]
    else:
        w.scale.view(torch.uint8)[last, 2] = 0xFF
        spoilt = [*range(32, 48)]
    out = input_gradient.input_gradient(grad, w, torch.float32, tile=TILE)
    assert out.isnan().all(0).nonzero().flatten().tolist() == spoilt == out.isnan().any(0).nonzero().flatten().tolist()


def test_operands_that_do_not_fit_are_named() -> None:
    grad, w = operands("nvfp4", (4, 8, 128), BF16)
    call = partial(input_gradient.input_gradient, tile=TILE)
    bad: list[tuple[Callable[[], Any], str]] = [
        (partial(call, grad[:, :4].contiguous(), w), r"grad is torch\.bfloat16 \(4, 4\), expected bfloat16 or float16"),
        (partial(call, grad.float(), w), r"grad is torch\.float32"),
        (partial(call, grad.repeat(1, 2)[:, :8], w), r"grad has strides .*contiguous"),
        (partial(call, grad, w, tile=replace(TILE, n=8)), "tile.columns is 8, expected a multiple of nvfp4's 16"),
        (partial(call, grad, replace(w, scale=w.scale[:, :3])), r"weight_scale is .* \(8, 3\), expected"),
        (partial(call, grad, w, torch.float64), r"dtype is torch\.float64, expected bfloat16, float16 or float32"),
        (partial(call, grad.to("meta"), w), "x is on meta and w on cpu"),
        (partial(op, grad[:, :4], *stored(w), "nvfp4", BF16), r"grad \(4, 4\) does not fit w \(N, K\) = \(8, 128\)"),
        (
            partial(op, grad, *stored(w), "nvfp4-int8", BF16),
            "formats is 'nvfp4-int8', expected a format of weights, or one of int8-int8, fp8-fp8, fp8_tensor-fp8",
        ),
    ]
    for each, message in bad:
        with pytest.raises(ValueError, match=message):
            each()


# --- launches of the op


def test_int8_codes_of_a_gradient_are_multiplied_exactly() -> None:
    grad, w = operands("int8", (20, 48, 256), BF16)
    arguments = (grad, *stored(w), "int8-int8", torch.float32)
    assert torch.equal(launch.launcher(OP.name)(*arguments, chip=CHIP), op(*arguments))


def test_swizzled_scales_are_read() -> None:
    grad, w = operands("nvfp4", (20, 128, 128), BF16)
    swizzled = replace(w, scale=swizzle_scales(w.scale))
    call = partial(launch.launcher(OP.name), chip=CHIP)
    assert torch.equal(call(grad, *stored(swizzled), "nvfp4", BF16), call(grad, *stored(w), "nvfp4", BF16))


def test_a_gradient_with_strides_of_its_own_is_taken() -> None:
    """As that of a sum, whose numbers are one number."""
    _, w = operands("fp8", (20, 48, 256), BF16)
    grad = torch.ones((), dtype=BF16).expand(20, 48)
    found = launch.launcher(OP.name)(grad, *stored(w), "fp8", torch.float32, chip=CHIP)
    assert torch.equal(found, launch.launcher(OP.name)(grad.contiguous(), *stored(w), "fp8", torch.float32, chip=CHIP))


# Faults: in a kernel file, the text `old` (which must occur once) becomes `new`, and the check must notice.
OURS, DECODER = "input_gradient.py", "dequantize.py"
nvfp4, mxfp4, int8, fp8, int4, ragged = (
    partial(check, weights=weights, shape=shape)
    for weights, shape in (
        *((name, (40, 64, 256)) for name in ("nvfp4", "mxfp4", "int8", "fp8", "int4")),
        ("int8", (40, 70, 200)),
    )
)
of_rows = partial(nvfp4, change=lambda w: replace(w, global_scale=torch.linspace(0.001, 0.1, 64)[:, None]))
FAULTS: dict[str, tuple[str, str, str, Callable]] = {
    "nibbles swapped": (DECODER, "tl.join(code & 0xF, code >> 4)", "tl.join(code >> 4, code & 0xF)", nvfp4),
    "weights are rounded": (OURS, "right.to(grad.dtype.element_ty)", "(right * 1.01).to(grad.dtype.element_ty)", nvfp4),
    "scale of a row dropped": (OURS, "right * tl.load(w.scale + w_rows", "right + 0 * tl.load(w.scale + w_rows", int8),
    "scale of the first rows for all": (OURS, "tl.load(w.scale + w_rows,", "tl.load(w.scale + w_rows - start,", fp8),
    "scale of the result's column": (
        OURS,
        "stored.stride_scale != 0",
        "stored.stride_scale == 1 and False",
        fp8,
    ),
    "global scale dropped": (OURS, "acc * tl.load(w.global_scale)", "acc + 0 * tl.load(w.global_scale)", nvfp4),
    "global scale of the first row for all": (
        OURS,
        "tl.load(w.global_scale + w_rows,",
        "tl.load(w.global_scale + w_rows * 0,",
        of_rows,
    ),
    "block scales of the first tile for all": (
        OURS,
        "groups = tile_k * (BLOCK_K // GROUP) + tl.arange",
        "groups = tl.arange",
        mxfp4,
    ),
    "codes of the first tile for all": (OURS, "places = tile_k * (BLOCK_K // PER_BYTE) + tl", "places = tl", int4),
    "no mask of N and K": (OURS, "EVEN=n % tile.k == 0 and k % tile.n == 0", "EVEN=True", ragged),
    "no mask of the gradient": (
        OURS,
        "mask=(ns < N)[None, :], other=0.0)\n            stored",
        "mask=(ns < N + 16)[None, :], other=0.0)\n            stored",
        ragged,
    ),
    "rows past the end": (OURS, "tl.minimum(rows, M - 1)", "rows", nvfp4),
    "last rows of W dropped": (OURS, "range(0, N, BLOCK_N)", "range(0, N - BLOCK_N, BLOCK_N)", nvfp4),
    "stored past the last column": (
        OURS,
        "(columns < K)[None, :]\n    tl.store",
        "(columns < K + 9)[None, :]\n    tl.store",
        ragged,
    ),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, red = FAULTS[fault]
    faulty = beside.with_fault(file, old, new, tmp_path)
    red(input_gradient)
    if file == DECODER:
        monkeypatch.setattr(input_gradient, "unpack_codes", faulty.unpack_codes)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        red(faulty if file == OURS else input_gradient)
