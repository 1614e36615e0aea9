"""Gradients times stored weights: on Triton's interpreter within the rounding of the sums, the op against float64."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from poison import poisoned
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.base import settings
from fluxq.kernels import dispatch, launch, proofs
from fluxq.kernels.compare import Sample
from fluxq.kernels.input_gradient import kernel as input_gradient
from fluxq.kernels.input_gradient.op import CODES, OP, formats_of
from fluxq.kernels.input_gradient.op import input_gradient as op
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.ops import LinearTensors, quantized_linear
from fluxq.kernels.tensor import QuantizedTensor, pack_named, swizzle_scales
from fluxq.kernels.tiles import MatmulTile
from fluxq.recipes.devices import KERNEL_FORMATS


def sibling(name: str) -> ModuleType:
    """Another file of this folder, for what it defines."""
    spec = importlib.util.spec_from_file_location(f"before_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


beside = sibling("test_quantize_activation_kernel")
matmul = sibling("test_scaled_matmul_kernel")
TILE = MatmulTile(m=32, n=128, k=32, warps=4, stages=3, group_m=2)
WEIGHTS = (*KERNEL_FORMATS, "int4_g128")
CHIP, BF16 = "sm_90", torch.bfloat16
SHARED = ("fp8_tensor", "mxfp8", "mxfp4", "nvfp4")  # whose decoded weights have no more bits than bfloat16


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of another test, no plan of another call; the first comparison is that of a first launch."""
    monkeypatch.setattr(settings, "_set", {})
    monkeypatch.setattr(launch, "PLANS", {})
    monkeypatch.setattr(proofs, "_seen", set())
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


# --- the op: its reference in float64, and its launches


def stored(w: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return w.codes, w.scale, w.global_scale


SCHEMES = ("fp8-16bit", "int8-16bit-smooth", "nvfp4-16bit-h64", "mxfp8-16bit-center-smooth", "int4-16bit-d4-h32")


@pytest.mark.often(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gradient_of_a_layer_is_that_of_its_function(scheme: str) -> None:
    """gradcheck in float64: the layer is linear in x, so wide differences have fp32's rounding and no other error."""
    n, k = 3, 64
    noise = torch.Generator().manual_seed(1)
    weights = scheme.partition("-")[0]
    w = QuantizedTensor.quantize(torch.randn(n, k, generator=noise), weights)
    basis = torch.linalg.qr(torch.randn(k, 4, generator=noise))[0].T.contiguous()
    given = LinearTensors(
        *stored(w),
        mean=torch.randn(k, generator=noise) if "center" in scheme else None,
        smooth=torch.rand(k, generator=noise) + 0.5 if "smooth" in scheme else None,
        basis=basis if "-d4" in scheme else None,
        out=torch.randn(n, 4, generator=noise) if "-d4" in scheme else None,
    )
    packed = pack_named(given, scheme)
    x = torch.randn(2, k, generator=noise, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: quantized_linear(x, *packed), x, eps=0.25, atol=1e-4, rtol=1e-4)
    assert not torch.autograd.gradcheck(
        lambda x: quantized_linear(x * 1.01 - x.detach() * 0.01, *packed), x, eps=0.25, atol=1e-4, raise_exception=False
    )


@pytest.mark.parametrize("weights", ["fp8", "nvfp4"])
def test_the_gradient_of_the_gradient_is_there(weights: str) -> None:
    _, w = operands(weights, (2, 5, 64), BF16)
    grad = torch.randn(2, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda grad: op(grad, *stored(w), weights, torch.float64), grad, eps=0.25, atol=1e-4, rtol=1e-4
    )


@pytest.mark.often(3)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("formats", [*WEIGHTS, *(formats_of(name, in_8_bit=True) for name in CODES)])
def test_a_launch_is_near_the_reference_and_passes_its_comparison(formats: str, dtype: torch.dtype) -> None:
    grad, w = operands(formats.partition("-")[0], (20, 48, 256), BF16)
    arguments = (grad, *stored(w), formats, dtype)
    found = launch.launcher(OP.name)(*arguments, chip=CHIP)
    expected = op(*arguments)
    assert found.dtype == expected.dtype == dtype and found.shape == expected.shape
    assert (found.double() - expected.double()).norm() < 4e-3 * expected.double().norm()
    for sample in (Sample(), Sample(5, 40)):
        judged = proofs.judge(OP.name, arguments, found, chip=CHIP, sample=sample)
        assert not any(verdict.is_wrong for _, verdict in judged)
        wrong = proofs.judge(OP.name, arguments, found * 1.02, chip=CHIP, sample=sample)
        assert all(verdict.is_wrong for _, verdict in wrong)
    kernels = [cell[0] for cell, _ in judged]
    assert kernels == (["quantize_activation", "scaled_matmul"] if "-" in formats and dtype != BF16 else kernels)
    assert ("-" in formats) == (OP.name not in kernels)


def test_int8_codes_of_a_gradient_are_multiplied_exactly() -> None:
    grad, w = operands("int8", (20, 48, 256), BF16)
    arguments = (grad, *stored(w), "int8-int8", torch.float32)
    assert torch.equal(launch.launcher(OP.name)(*arguments, chip=CHIP), op(*arguments))


@pytest.mark.parametrize("weights", CODES)
def test_codes_cost_a_gradient_what_8_bit_cost(weights: str) -> None:
    grad, w = operands(weights, (64, 48, 256), BF16)
    plain, coded = (op(grad, *stored(w), formats_of(weights, in_8_bit=each), torch.float32) for each in (False, True))
    error = ((coded - plain).norm() / plain.norm()).item()
    assert 1e-4 < error < (0.012 if weights == "int8" else 0.04)


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


# --- which way is taken


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """CPU tensors on the interpreter stand for those of a GPU."""
    monkeypatch.setattr(launch, "chip_of", lambda device: CHIP)
    monkeypatch.setattr(proofs, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return partial(launch.run, OP.name)


def test_what_has_no_kernel_takes_the_reference_and_says_why(on_a_gpu, monkeypatch, caplog) -> None:
    grad, w = operands("fp8", (20, 48, 256), torch.float32)
    with caplog.at_level(logging.WARNING, "fluxq"):
        assert torch.equal(on_a_gpu(grad, *stored(w), "fp8", grad.dtype), op(grad, *stored(w), "fp8", grad.dtype))
    assert "input_gradient: torch reference (input_gradient: matrix units would round a gradient in float32" in (
        caplog.text
    )
    monkeypatch.setattr(dispatch, "refusal", lambda *cell: "9 spills")
    narrow = grad.bfloat16()
    assert torch.equal(on_a_gpu(narrow, *stored(w), "fp8", BF16), op(narrow, *stored(w), "fp8", BF16))
    settings.configure(strict=True)
    with pytest.raises(ValueError, match=r"input_gradient: no kernel for fp8 on sm_90 \(9 spills\)"):
        on_a_gpu(narrow, *stored(w), "fp8", BF16)


def test_codes_that_a_chip_does_not_multiply_keep_16_bit(on_a_gpu, monkeypatch, caplog) -> None:
    grad, w = operands("fp8", (20, 48, 256), BF16)
    monkeypatch.setattr(launch, "chip_of", lambda device: "sm_80")
    input_gradient._say_16_bit.cache_clear()
    with caplog.at_level(logging.WARNING, "fluxq"), interpreting("sm_80"):
        plain, coded = (on_a_gpu(grad, *stored(w), formats, BF16) for formats in ("fp8", "fp8-fp8"))
    assert torch.equal(plain, coded)
    assert "gradients keep 16 bit on sm_80, not fp8: scaled_matmul: no kernel for fp8 on sm_80" in caplog.text
    settings.configure(strict=True)
    with pytest.raises(ValueError, match="scaled_matmul: no kernel for fp8 on sm_80"):
        on_a_gpu(grad, *stored(w), "fp8-fp8", BF16)


@pytest.mark.parametrize(("weights", "formats"), [("fp8", "fp8-fp8"), ("int8", "int8-int8"), ("nvfp4", "nvfp4")])
def test_a_layer_takes_gradients_as_codes_where_it_is_told_to(weights: str, formats: str) -> None:
    _, w = operands(weights, (2, 16, 64), BF16)
    pull = torch.randn(2, 16).bfloat16()
    found = []
    for how in ("16bit", "8bit"):
        settings.configure(gradients=how)
        x = torch.randn(2, 64).bfloat16().requires_grad_()
        quantized_linear(x, *pack_named(LinearTensors(*stored(w)), f"{weights}-16bit")).backward(pull)
        found.append(x.grad)
    for given, each in zip(found, (weights, formats), strict=True):
        assert torch.equal(given, op(pull, *stored(w), each, BF16))


def test_how_gradients_are_taken_is_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.gradients() == "16bit"
    monkeypatch.setenv("FLUXQ_GRADIENTS", "8bit")
    assert settings.gradients() == "8bit"
    settings.configure(gradients="16bit")
    assert settings.gradients() == "16bit"
    with pytest.raises(ValueError, match="gradients is 'fp8', expected one of 16bit, 8bit"):
        settings.configure(gradients="fp8")


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
    "scale of a row dropped": (OURS, "right * tl.load(scale + w_rows", "right + 0 * tl.load(scale + w_rows", int8),
    "scale of the first rows for all": (OURS, "tl.load(scale + w_rows,", "tl.load(scale + w_rows - start,", fp8),
    "scale of the result's column": (
        OURS,
        'stored["stride_scale"] != 0',
        'stored["stride_scale"] == 1 and False',
        fp8,
    ),
    "global scale dropped": (OURS, "acc * tl.load(global_scale)", "acc + 0 * tl.load(global_scale)", nvfp4),
    "global scale of the first row for all": (
        OURS,
        "tl.load(global_scale + w_rows,",
        "tl.load(global_scale + w_rows * 0,",
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
