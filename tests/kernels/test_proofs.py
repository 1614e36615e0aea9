"""Launches compared with the reference: planted faults are seen, their cells withdrawn, and the calls computed anew."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_tests import sibling
from poison import poisoned
from torch.utils._pytree import tree_map_only

from benchmarks.accumulation import unit_product
from fluxq.base import settings
from fluxq.kernels import dispatch, findings, launch, ops, proofs
from fluxq.kernels.compare import FP8_SUMS, Product, Sample, lost_in_fp8, picked, product, same_but_few
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.qk_norm_rope.op import RopeTensors
from fluxq.kernels.tensor import pack_named
from fluxq.recipes.formats import FORMATS, Scheme

CHIP = "sm_89"  # on which our own kernel multiplies fp8
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


plans, quantizers = sibling("test_plans", "proved"), sibling("test_quantize_activation_kernel", "proved")
CALLS = plans.CALLS


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> Iterator[None]:
    """Nothing was compared or found yet; CPU tensors on the interpreter stand for those of a GPU."""
    monkeypatch.setattr(launch, "PLANS", {})
    monkeypatch.setattr(proofs, "_seen", set())
    monkeypatch.setattr(findings, "_withdrawn", {})
    monkeypatch.setattr(settings, "_set", {})
    monkeypatch.setattr(launch, "chip_of", lambda device: CHIP)
    monkeypatch.setattr(proofs, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dispatch.forget()
    with interpreting(CHIP):
        yield
    dispatch.forget()


@pytest.fixture
def plant(monkeypatch, tmp_path) -> Callable[[str, str, str], None]:
    def planted(name: str, old: str, new: str) -> None:
        faulty = quantizers.with_fault(f"{name}.py", old, new, tmp_path)
        monkeypatch.setitem(sys.modules, f"fluxq.kernels.{name}.kernel", faulty)

    return planted


ANOTHER_ROW = ("scaled_matmul", "tl.load(x_scale + rows * stride_x_scale", "tl.load(x_scale + rows * 0")
# In the kernel of the first name one text becomes another; then the call of test_plans.py that shows it.
FAULTS = {
    "the scale of another row": (*ANOTHER_ROW, "layer"),
    "columns are skipped": (
        *("scaled_matmul", "% height, program % in_group // height", "% height, 0 * program"),
        "layer",
    ),
    "codes under another scale": (
        *("adaln_quantize", "amax_bits(modulated, TILES), FORMAT.element.max)", "amax_bits(modulated, TILES), 99.0)"),
        "norm",
    ),
    "the modulation of the first image": (
        *("adaln_quantize", "images = rows // modulation.tokens", "images = rows * 0"),
        "norm",
    ),
    "rotated as if the image came first": ("qk_norm_rope", "cos += s * D", "cos += (s + 5) % S * D", "heads"),
    "a gradient without scales": (
        "input_gradient",
        "right = right * tl.load(w.scale + w_rows",
        "right = right + 0 * tl.load(w.scale + w_rows",
        "gradient",
    ),
    "another gelu": ("quantize_activation", 'if ACT == "gelu_tanh"', 'if ACT == "none"', "codes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_on_a_few_tokens(fault: str, plant) -> None:
    name, old, new, call = FAULTS[fault]
    op, arguments = CALLS[call]
    given = arguments(1)
    for is_faulty in (False, True):
        if is_faulty:
            plant(name, old, new)
        with poisoned():  # a column that is skipped holds no earlier result
            found = launch.launcher(op)(*given, chip=CHIP)
        judged = proofs.judge(op, given, found, chip=CHIP, sample=Sample(tokens=8, outputs=48))
        assert judged[-1][0][0] == name and any(each.is_wrong for _, each in judged) == is_faulty, judged


@pytest.mark.parametrize("call", [pytest.param(c, marks=[pytest.mark.slow] * (c == "blocks")) for c in CALLS])
def test_right_results_are_within_their_bounds_and_nan_is_not(call: str) -> None:
    op, arguments = CALLS[call]
    given = arguments(1)
    found = launch.launcher(op)(*given, chip=CHIP)
    assert not any(each.is_wrong for _, each in proofs.judge(op, given, found, chip=CHIP, sample=Sample()))
    first = found[0] if isinstance(found, tuple) else found
    first.view(torch.uint8).view(-1)[-first.element_size() :] = 0x7F if first.element_size() == 1 else 0xFF
    verdicts = proofs.judge(op, given, found, chip=CHIP, sample=Sample(tokens=8, outputs=48))
    assert verdicts[-1][1].is_wrong  # the last token and output are among those compared


def test_the_tokens_compared_are_the_first_the_last_and_others_between() -> None:
    cpu = torch.device("cpu")
    assert picked(3, 16, cpu).tolist() == picked(3, None, cpu).tolist() == [0, 1, 2]
    assert picked(100, 4, cpu).tolist() == [0, 33, 66, 99]


# --- verify="first" and its like


def layer_call(seed: int = 1) -> tuple[Any, ...]:
    return CALLS["layer"][1](seed)


def is_near(found: torch.Tensor, given: tuple[Any, ...]) -> bool:
    """Of 8-bit activations, or where these fell back, of 16-bit ones."""
    expected = REFERENCES["quantized_linear"](*given)
    return bool(((found - expected).norm() / expected.norm()) < 0.05)


def test_a_wrong_kernel_is_withdrawn_at_its_first_launch_and_the_call_computed_anew(plant, caplog) -> None:
    plant(*ANOTHER_ROW)
    given = layer_call()
    with caplog.at_level(logging.ERROR, "fluxq"):
        assert is_near(launch.run("quantized_linear", *given), given)
    (said,) = caplog.messages
    assert said.startswith("scaled_matmul fp8 on sm_89 computed something wrong (scaled_matmul: off by ")
    assert "fluxq doctor --share" in said
    choice = dispatch.choose(Scheme.parse("fp8-fp8"), CHIP, 20, 96, 256)
    assert (choice.implementation, choice.fallback) == ("weight_only_matmul", True)
    assert "wrong on this GPU" in choice.reason
    again = layer_call(5)
    assert is_near(launch.run("quantized_linear", *again), again)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_of_the_model_that_are_not_finite_are_no_fault_of_a_kernel(value: float, caplog) -> None:
    given = layer_call()
    given[0][0, 3, 5] = value
    with caplog.at_level(logging.WARNING, "fluxq"):
        launch.run("quantized_linear", *given)
    assert "was not compared: its input, or the reference's result, is not finite" in caplog.messages[-1]
    choice = dispatch.choose(Scheme.parse("fp8-fp8"), CHIP, 20, 96, 256)
    assert choice.implementation == "scaled_matmul" and not proofs._seen


def test_strict_mode_stops_instead(plant) -> None:
    plant(*ANOTHER_ROW)
    settings.configure(strict=True)
    with pytest.raises(RuntimeError, match="scaled_matmul fp8 on sm_89 computed something wrong"):
        launch.run("quantized_linear", *layer_call())


def test_an_op_without_another_kernel_is_computed_by_its_reference(plant) -> None:
    plant(*FAULTS["codes under another scale"][:3])
    op, arguments = CALLS["norm"]
    for seed in (1, 11):
        given = arguments(seed)
        plans.assert_same(launch.run(op, *given)[:2], REFERENCES[op](*given)[:2])
    assert dispatch.refusal(op, "fp8", CHIP).startswith("wrong on this GPU")
    settings.configure(strict=True)
    with pytest.raises(ValueError, match="adaln_quantize: no kernel for fp8 on sm_89"):
        launch.run(op, *arguments(1))


def test_a_wrong_quantizer_is_named_and_not_the_product_behind_it(plant, monkeypatch) -> None:
    right, wrong = (f"step = row_step(amax_bits(tiles, TILES), {largest})" for largest in ("LARGEST", "99.0"))
    plant("quantize_activation", right, wrong)
    monkeypatch.setattr(
        launch, "quantize_tuned", sys.modules["fluxq.kernels.quantize_activation.kernel"].quantize_tuned
    )
    given = layer_call()
    assert is_near(launch.run("quantized_linear", *given), given)
    assert {*findings._withdrawn} == {("quantize_activation", "fp8", CHIP)}


@pytest.mark.parametrize(("how", "compared"), [("first", 1), ("always", 3), ("off", 0)])
def test_which_launches_are_compared(how: str, compared: int, monkeypatch) -> None:
    settings.configure(verify=how)
    seen = []
    monkeypatch.setattr(proofs, "judge", lambda *a, r=proofs.judge, **k: seen.append(a[0]) or r(*a, **k))
    op, arguments = CALLS["integers"]
    for seed in (1, 2, 3):
        launch.run(op, *arguments(seed))
    assert seen == [op] * compared


def test_nothing_is_compared_in_a_graph_or_where_doctor_vouches(monkeypatch) -> None:
    op, arguments = CALLS["integers"]
    given = arguments(1)
    monkeypatch.setattr(proofs, "judge", lambda *a, **k: pytest.fail("it was compared"))
    with monkeypatch.context() as within:
        within.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        launch.run(op, *given)
    shape = {"m": plans.M - 1, "n": plans.N, "k": plans.K}  # so many tokens are as good as M
    row = {"op": "scaled_matmul", "format": "int8", "scheme": "", "why": "", "us": None}
    with findings.instead(findings.document({"gpu": "G", "chip": CHIP}, [row | shape])):
        launch.PLANS.clear()
        launch.run(op, *given)
    for other in ({"m": 1}, {"n": plans.N + 1}, {"k": 2 * plans.K}):
        launch.PLANS.clear()
        with (
            findings.instead(findings.document({"gpu": "G", "chip": CHIP}, [row | shape | other])),
            pytest.raises(pytest.fail.Exception),
        ):
            launch.run(op, *given)


@pytest.mark.slow
def test_another_shape_is_compared_too(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(proofs, "judge", lambda *a, r=proofs.judge, **k: seen.append(a[1][0].shape[-2]) or r(*a, **k))
    x, *rest = layer_call()
    for tokens in (1, 20, 17, 1, 33):
        launch.run("quantized_linear", x[:, :1].expand(1, tokens, -1).contiguous(), *rest)
    assert seen == [1, 20, 33]


@pytest.mark.often(4)
@pytest.mark.parametrize("call", CALLS)
def test_a_result_of_another_kind_and_inputs_that_changed_are_told(call: str) -> None:
    op, arguments = CALLS[call]
    given = arguments(1)
    before = tree_map_only(torch.Tensor, torch.clone, given)
    found = launch.launcher(op)(*given, chip=CHIP)
    assert not proofs.unlike(op, given, found) and not proofs.changed(given, before)
    first = found if isinstance(found, torch.Tensor) else found[0]
    for other in (first[..., :1], first.to(torch.float64), first.to("meta")):
        told = proofs.unlike(op, given, other if first is found else (other, *found[1:]))
        assert told.startswith("returned ") and ", expected " in told
    assert "returned NoneType" in proofs.unlike(op, given, None)
    given[0].zero_()
    assert proofs.changed(given, before) == "1 of its inputs changed in place"
    plans.assert_same(given[0], arguments(1)[0])


def test_verification_is_one_of_three(monkeypatch) -> None:
    assert settings.verification() == "first"
    monkeypatch.setenv("FLUXQ_VERIFY", "off")
    assert settings.verification() == "off"
    settings.configure(verify="always")
    assert settings.verification() == "always"
    with pytest.raises(ValueError, match="verify is 'sometimes', expected one of first, always, off"):
        settings.configure(verify="sometimes")


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, False), (0.8, True), (float("nan"), True)])
def test_a_large_residual_does_not_hide_a_wrong_product(factor: float, wrong: bool) -> None:
    """Each number has room if weights are rounded to 16 bit, all of them together have little."""
    noise = torch.Generator().manual_seed(5)
    x, w = (torch.randn(rows, 2048, generator=noise).bfloat16() for rows in (16, 64))
    gate, residual = torch.full((16, 64), 0.3), 30 * torch.randn(16, 64, generator=noise).bfloat16()
    made = (x.double() @ w.double().T).bfloat16() * factor
    found = (residual.float() + gate * made.float()).bfloat16()
    given = Product(x, w, gate=gate, residual=residual, terms=2**16)
    assert product("product", found, given).is_wrong is wrong


def test_a_comparison_of_two_streams_speaks_of_the_tokens_of_both() -> None:
    text, image = torch.randn(2, 5, 3, 64), torch.randn(2, 9, 3, 64)
    for given, tokens in ((RopeTensors(), 10), (RopeTensors(q2=image, k2=image), 28)):
        arguments = text, text, *pack_named(given), 1e-6, True, False
        assert proofs.shape_of("qk_norm_rope", arguments, ("qk_norm_rope", "16bit", CHIP)) == (tokens, 192, 192)


@pytest.mark.parametrize("name", ["fp8", "int8", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4"])
def test_few_codes_of_another_launch_may_be_neighbours(name: str) -> None:
    """Numbers beside a rounding go to its other side where sums are added up in another order; no number goes far."""
    v = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = ops.quantize_activation(v, FORMATS[name])

    def flipped(places: tuple[slice, slice], bit: int) -> Any:
        codes = expected.codes.clone()
        codes.view(torch.uint8)[places] ^= bit
        return replace(expected, codes=codes)

    bits = 1, 0x40 if expected.format.element.bits == 8 else 4
    assert same_but_few(expected, expected).share == 0
    for row in range(64):
        one = flipped((slice(row, row + 1), slice(5, 6)), bits[0])
        assert same_but_few(one, expected).is_wrong == bool(one.dequantize().isnan().any())  # beside the largest is NaN
    many = flipped((slice(None), slice(8)), bits[0])
    assert same_but_few(many, expected).is_wrong
    assert same_but_few(flipped((slice(3, 4), slice(5, 6)), bits[1]), expected).is_wrong
    if expected.scale.dtype == torch.float32:  # in its last bits, as behind sums that are not rounded
        scaled = replace(expected, scale=expected.scale * (1 + 2.0**-20))
        assert same_but_few(scaled, expected).share == 0
        assert same_but_few(replace(many, scale=scaled.scale), expected).is_wrong
        assert same_but_few(replace(expected, scale=expected.scale * (1 + 2.0**-8)), expected).is_wrong
        moved = v.clone()
        largest = moved[7].abs().argmax()
        moved[7, largest] = moved[7, largest] * (1 + 2.0**-7)
        assert not same_but_few(ops.quantize_activation(moved, FORMATS[name]), expected).is_wrong  # one amax


@pytest.mark.parametrize("k", [3072, 12288])
def test_what_a_matrix_unit_may_lose_of_fp8_products_of_one_sign_is_allowed(k: int) -> None:
    """As a row of weights that is aligned with the tokens makes them: Hopper's unit, emulated, loses .04 at 3072."""
    x = torch.randn(4, k, generator=torch.Generator().manual_seed(0))
    codes = ops.quantize_activation(x.bfloat16(), FORMATS["fp8"]).codes.float()
    exact, size = codes.double() @ codes.double().T, codes.double().abs() @ codes.double().abs().T
    lost = (unit_product(codes, codes) - exact).abs()
    allowed = lost_in_fp8(exact, size, k)
    assert (lost <= allowed).all() and (lost > FP8_SUMS * size).any() and (allowed < 0.5 * size).all()
