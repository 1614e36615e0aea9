"""The backward pass of quantized layers: the op against float64, its launches compared, and which way is taken."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kernel_tests import sibling

from fluxq.base import settings
from fluxq.kernels import dispatch, launch, proofs
from fluxq.kernels.compare import Sample
from fluxq.kernels.input_gradient import kernel as input_gradient
from fluxq.kernels.input_gradient.op import CODES, OP, formats_of
from fluxq.kernels.input_gradient.op import input_gradient as op
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.ops import LinearTensors, quantized_linear
from fluxq.kernels.tensor import QuantizedTensor, pack_named

kernels = sibling("test_input_gradient_kernel", "gradients")
operands, stored, BF16, CHIP = kernels.operands, kernels.stored, kernels.BF16, kernels.CHIP


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
@pytest.mark.parametrize("formats", [*OP.formats, *(formats_of(name, in_8_bit=True) for name in CODES)])
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
        assert wrong[-1][1].is_wrong and not any(verdict.is_wrong for _, verdict in wrong[:-1])
    kernels = [cell[0] for cell, _ in judged]
    assert kernels == (["quantize_activation", "scaled_matmul"] if "-" in formats and dtype != BF16 else kernels)
    assert ("-" in formats) == (OP.name not in kernels)


@pytest.mark.parametrize("weights", CODES)
def test_codes_cost_a_gradient_what_8_bit_cost(weights: str) -> None:
    grad, w = operands(weights, (64, 48, 256), BF16)
    plain, coded = (op(grad, *stored(w), formats_of(weights, in_8_bit=each), torch.float32) for each in (False, True))
    error = ((coded - plain).norm() / plain.norm()).item()
    assert 1e-4 < error < (0.012 if weights == "int8" else 0.04)


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


@pytest.mark.slow
def test_a_wrong_product_of_codes_does_not_blame_the_quantizer() -> None:
    w, grad = stored(operands("int8", (34, 48, 64), BF16)[1]), torch.randn(34, 48).bfloat16()
    arguments = grad, *w, "int8-int8", torch.bfloat16
    found = launch.launcher(OP.name)(*arguments, chip=CHIP)
    for times, wrong in ((1.0, [False, False]), (1.5, [False, True])):
        judged = proofs.judge(OP.name, arguments, found * times, chip=CHIP, sample=Sample())
        assert [verdict.is_wrong for _, verdict in judged] == wrong
        assert judged[0][0][0] == "quantize_activation"


def test_gradients_of_long_sums_are_compared_all_together() -> None:
    """Each number may be off by what its long sum may lose, all of them by far less."""
    w, grad = stored(operands("fp8", (1, 3072, 32), BF16)[1]), torch.randn(8, 3072).bfloat16()
    arguments = grad, *w, "fp8", torch.bfloat16
    found = launch.launcher(OP.name)(*arguments, chip=CHIP)
    for times in (1.0, 1.02):
        judged = proofs.judge(OP.name, arguments, found * times, chip=CHIP, sample=Sample())
        assert judged[0][1].is_wrong is (times > 1)


@pytest.mark.parametrize("formats", ["fp8", "fp8-fp8", "int8-int8"])
def test_no_tokens_have_no_gradient_rows(formats: str) -> None:
    w = stored(operands(formats.partition("-")[0], (1, 48, 64), BF16)[1])
    found = launch.launcher(OP.name)(torch.randn(0, 48).bfloat16(), *w, formats, torch.bfloat16, chip=CHIP)
    assert found.shape == (0, 64)


def test_the_shape_that_a_comparison_speaks_of_is_that_of_the_product() -> None:
    for weights, k in (("fp8", 64), ("nvfp4", 256)):
        w = stored(operands(weights, (20, 48, k), BF16)[1])
        arguments = torch.randn(20, 48).bfloat16(), *w, weights, torch.bfloat16
        assert proofs.shape_of(OP.name, arguments, (OP.name, weights, CHIP)) == (20, k, 48)
