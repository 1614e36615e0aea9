"""Tests of the kernels chosen for a scheme and a chip, and that they compute the scheme, on Triton's interpreter."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import norm_packed
from rounding import packed as packed_steps
from torch import Tensor

from benchmarks.kernels import report
from fluxq.base import settings
from fluxq.kernels import dispatch, epilogue, findings, launch, ops
from fluxq.kernels.adaln_quantize import op as adaln
from fluxq.kernels.all_ops import OPS
from fluxq.kernels.attention import op as attention
from fluxq.kernels.block_scaled_matmul.op import block_scaled_matmul
from fluxq.kernels.dequantize.op import dequantize
from fluxq.kernels.dispatch import choose
from fluxq.kernels.epilogue import Epilogue
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.products import ProductTensors
from fluxq.kernels.qk_norm_rope import op as rope
from fluxq.kernels.quantize_activation import op as quantizer
from fluxq.kernels.quantize_activation.kernel import quantize_tuned
from fluxq.kernels.quantize_activation.op import PRODUCED, Rounding, RoundingTensors
from fluxq.kernels.reencode import row_scales
from fluxq.kernels.scaled_matmul.op import scaled_matmul
from fluxq.kernels.tensor import QuantizedTensor, pack_named, swizzle_scales
from fluxq.kernels.tiles import CHIPS, cdiv, is_held, whole_row_tile
from fluxq.kernels.w4a8_matmul.op import w4a8_matmul
from fluxq.kernels.weight_only_matmul.op import weight_only_matmul
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS, Scheme, find_format, for_tokens
from fluxq.recipes.recipe import load_recipe, shipped_recipes

N, K = 96, 256


@pytest.fixture
def offers(monkeypatch):
    """offers(op=formats, …): only these are offered, whatever was compiled; no timings."""

    def fake(op: str, name: str, chip: str) -> str:
        return "" if name in offered.get(op, ()) else "no unit"

    def use(**formats: tuple[str, ...]) -> None:
        offered.clear()
        offered.update(formats)
        forget()

    def forget() -> None:
        choose.cache_clear()
        dispatch.choose_product.cache_clear()

    offered: dict[str, tuple[str, ...]] = {}
    monkeypatch.setattr(dispatch, "refusal", fake)
    monkeypatch.setattr(findings, "timings", lambda scheme, chip: [])
    forget()
    yield use
    forget()


ALL = {op.name: op.formats for op in OPS.values()}


def timings_in(rows: list[dict]) -> Callable[[str, str], list[dict]]:
    """Rows in the place of those in files."""
    return lambda scheme, chip: [row for row in rows if (row["scheme"], row["chip"]) == (scheme, chip)]


@pytest.mark.parametrize(
    ("scheme", "implementation", "activations"),
    [
        ("int8-int8", "scaled_matmul", "int8"),
        ("fp8-fp8", "F.scaled_mm", "fp8"),
        ("fp8_tensor-fp8_tensor-static", "F.scaled_mm", "fp8_tensor"),
        ("fp8-fp8_1x128", "scaled_matmul", "fp8_1x128"),
        ("nvfp4-nvfp4-static", "block_scaled_matmul", "nvfp4"),
        ("mxfp8-mxfp8", "block_scaled_matmul", "mxfp8"),
        ("mxfp4-mxfp4", "block_scaled_matmul", "mxfp4"),
        ("fp8-16bit", "weight_only_matmul", None),
        ("int4_g128-16bit", "weight_only_matmul", None),
        ("int4-16bit-r32", "weight_only_matmul", None),
    ],
)
def test_with_everything_offered_a_scheme_runs_its_own_arithmetic(offers, scheme, implementation, activations):
    offers(**ALL)
    choice = choose(Scheme.parse(scheme), "sm_90", 4096, 3072, 3072)
    assert (choice.implementation, choice.activations) == (implementation, activations)
    assert choice.fallback == (implementation == "torch reference") and choice.reason


def test_a_scheme_that_a_chip_lacks_keeps_16_bit_activations_and_says_why(offers):
    offers(weight_only_matmul=("nvfp4", "int4"))
    choice = choose(Scheme.parse("nvfp4-nvfp4"), "sm_90", 4096, 3072, 3072)
    assert choice == dispatch.Choice(
        "weight_only_matmul",
        None,
        "weights are decoded in the kernel, activations keep 16 bit; not block_scaled_matmul: no unit; "
        "not F.scaled_mm: the library has no nvfp4 product for sm_90",
        fallback=True,
    )


def test_w4a8_needs_the_scale_per_row(offers):
    offers(**ALL)
    scheme = Scheme.parse("nvfp4-int8")
    assert choose(scheme, "sm_90", 64, N, K, layout="row scale").implementation == "w4a8_matmul"
    assert choose(scheme, "sm_90", 64, N, K).implementation == "weight_only_matmul"


def test_the_library_serves_what_it_can(offers):
    offers(scaled_matmul=("fp8",), quantize_activation=("fp8",))
    fp8 = Scheme.parse("fp8-fp8")
    assert choose(fp8, "sm_90", 64, N, K).implementation == "F.scaled_mm"
    assert choose(fp8, "sm_90", 64, N + 8, K).implementation == "scaled_matmul"
    assert choose(fp8, "sm_90", 64, N, K, torch.float16).implementation == "scaled_matmul"
    assert choose(fp8, "sm_89", 64, N, K).implementation == "scaled_matmul"
    offers(quantize_activation=("int8",))
    assert choose(Scheme.parse("int8-int8"), "sm_90", 17, N, K).implementation == "torch._int_mm"
    assert choose(Scheme.parse("int8-int8"), "sm_90", 16, N, K).implementation == "torch reference"
    assert choose(Scheme.parse("int8-int8"), "gfx942", 17, N, K).implementation == "torch reference"


def test_block_scales_go_to_the_library_where_it_was_measured_to_be_faster(offers, monkeypatch) -> None:
    shape = {"chip": "sm_100", "gpu": "G", "m": 64, "n": N, "k": K}
    times = {"block_scaled_matmul": 2.0, "F.scaled_mm": 1.0}
    rows = [shape | {"scheme": "mxfp8-mxfp8", "op": name, "us": us} for name, us in times.items()]
    rows += [row | {"scheme": "nvfp4-nvfp4"} for row in rows]
    offers(**ALL)
    choice = choose(Scheme.parse("mxfp8-mxfp8"), "sm_100", 64, N, K, layout="swizzled")
    assert choice.implementation == "block_scaled_matmul"
    choose.cache_clear()
    monkeypatch.setattr(findings, "timings", timings_in(rows))
    for scheme, layout, implementation in (
        ("mxfp8-mxfp8", "swizzled", "F.scaled_mm"),
        ("mxfp8-mxfp8", "", "block_scaled_matmul"),
        ("nvfp4-nvfp4-static", "swizzled", "F.scaled_mm"),
        ("nvfp4-nvfp4", "swizzled", "block_scaled_matmul"),  # a global scale for each token
    ):
        assert choose(Scheme.parse(scheme), "sm_100", 64, N, K, layout=layout).implementation == implementation


def test_an_older_torch_has_no_fp8_product_with_scales_per_row_on_blackwell(offers, monkeypatch) -> None:
    offers(**ALL)
    monkeypatch.setattr(torch, "__version__", "2.11.1+cu130")
    choice = choose(Scheme.parse("fp8-fp8"), "sm_100", 64, N, K)
    assert choice.implementation == "scaled_matmul" and "another stream" in choice.reason
    assert choose(Scheme.parse("fp8-fp8"), "sm_90", 64, N, K).implementation == "F.scaled_mm"


def test_fp32_tokens_are_not_rounded_by_a_matrix_unit(offers):
    offers(**ALL)
    weight_only = Scheme.parse("fp8-16bit")
    assert choose(weight_only, "sm_90", 16, N, K, torch.float32).implementation == "weight_only_matmul"
    assert choose(weight_only, "sm_90", 17, N, K, torch.float32).implementation == "torch reference"


def test_timings_decide_between_ways_to_compute_the_same_but_never_change_the_arithmetic(offers, monkeypatch):
    def row(implementation: str, m: int, us: float) -> dict:
        shape = {"m": m, "n": N, "k": K}
        return {"chip": "sm_90", "gpu": "G", "scheme": "fp8-fp8", "op": implementation, "us": us, **shape}

    rows = [row("F.scaled_mm", 4096, 9.0), row("scaled_matmul", 4096, 8.0), row("weight_only_matmul", 4096, 1.0)]
    rows += [row("F.scaled_mm", 16, 2.0), row("scaled_matmul", 16, 3.0)]
    offers(**ALL)
    monkeypatch.setattr(findings, "timings", timings_in(rows))
    choice = choose(Scheme.parse("fp8-fp8"), "sm_90", 5000, N, K)
    assert choice.implementation == "scaled_matmul" and "8 us measured on G at M, N, K = 4096, 96, 256" in choice.reason
    assert choose(Scheme.parse("fp8-fp8"), "sm_90", 30, N, K).implementation == "F.scaled_mm"
    assert choose(Scheme.parse("fp8-fp8"), "sm_100", 5000, N, K).implementation == "F.scaled_mm"  # not that chip's


@pytest.fixture
def fresh_rows():
    """Forget what was read of kernels/compiled, before and after the test."""

    def forget() -> None:
        dispatch.refusal.cache_clear()
        dispatch._refusals.cache_clear()

    forget()
    yield forget
    forget()


def test_what_was_not_compiled_or_spills_is_not_offered(tmp_path, monkeypatch, fresh_rows):
    good = {"kernel": "k", "format": "fp8 128x128", "target": "sm_90", "ok": True, "spills": 0}
    bad = good | {"format": "fp8 128x128 fused", "ok": False, "reason": "9 spills"}
    monkeypatch.setattr(dispatch, "COMPILED", tmp_path)
    version = dispatch.minor(dispatch.triton.__version__)
    for rows, expected in (
        ([good], ""),
        ([good, bad], "9 spills"),
        ([], f"no tile for sm_90 was compiled with Triton {dispatch.compiled_with()}"),
    ):
        (tmp_path / "scaled_matmul.json").write_text(json.dumps({version: rows}))
        fresh_rows()
        assert dispatch.refusal("scaled_matmul", "fp8", "sm_90") == expected
    assert dispatch.refusal("scaled_matmul", "nvfp4", "sm_90") == "scaled_matmul has no nvfp4"
    assert dispatch.refusal("scaled_matmul", "fp8", "sm_70") == "never compiled for sm_70"


def test_a_triton_that_has_tiles_for_a_chip_is_named(monkeypatch, fresh_rows):
    monkeypatch.setattr(dispatch, "compiled_with", lambda: "3.6")
    newer = "no tile for sm_120 was compiled with Triton 3.6, but with 3.8: update torch, which brings it"
    assert {dispatch.refusal(op, "nvfp4", "sm_120") for op in ("block_scaled_matmul", "weight_only_matmul")} == {newer}
    assert dispatch.refusal("block_scaled_matmul", "nvfp4", "sm_80") == OPS["block_scaled_matmul"].elsewhere
    assert "update" not in dispatch.refusal("scaled_matmul", "fp8", "gfx942")  # which no Triton compiles


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in (*KERNEL_FORMATS, *PRODUCED)])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_format_without_kernels_is_offered_nowhere_and_says_so(name, chip):
    """Its layers run as torch's reference, or fluxq.prepare makes them 8 bit; an op that is one kernel refuses it."""
    for op in OPS.values():
        assert name not in op.formats
        assert dispatch.refusal(op.name, name, chip) == f"no kernel was written for {name}"
    for scheme in (f"{name}-{for_tokens(FORMATS[name]).name}", f"{name}-16bit", f"{name}-fp8"):
        choice = choose(Scheme.parse(scheme), chip, 4096, 3072, 3072)
        assert (choice.implementation, choice.fallback) == ("torch reference", True)
        assert f"no kernel was written for {name}" in choice.reason
    w = QuantizedTensor.quantize(torch.ones(N, K), name)
    with pytest.raises(ValueError, match=rf"dequantize: no kernel for {name} on {chip} \(no kernel was written for"):
        launch.launcher("dequantize")(w.codes, w.scale, None, name, torch.bfloat16, chip=chip)
    with pytest.raises(ValueError, match=rf"quantize_activation: no kernel for {name} on {chip} \(no kernel was"):
        launch.launcher("quantize_activation")(torch.ones(4, K), *packed_steps(name), chip=chip)


@pytest.mark.parametrize("name", [name for name in PRODUCED if name not in KERNEL_FORMATS])
def test_weights_in_a_format_of_activations_alone_are_torchs_reference_and_say_so(name):
    for scheme in (f"{name}-{for_tokens(FORMATS[name]).name}", f"{name}-16bit", f"{name}-fp8"):
        choice = choose(Scheme.parse(scheme), "sm_90", 4096, 3072, 3072)
        assert (choice.implementation, choice.fallback) == ("torch reference", True)
        assert f"no kernel was written for {name}" in choice.reason


# --- launching what was chosen


def operands(scheme: str, m: int, rank: int = 0) -> tuple[Tensor, dict]:
    """x (m, K) and the other arguments of the op."""
    noise = torch.Generator().manual_seed(m)
    parsed = Scheme.parse(scheme)
    w = QuantizedTensor.quantize(torch.randn(N, K, generator=noise) / 16, parsed.weights)
    x = torch.randn(m, K, generator=noise).bfloat16()
    rest = {
        "weight": w.codes,
        "weight_scale": w.scale,
        "weight_scale_2": w.global_scale,
        "input_scale": torch.tensor(0.002) if parsed.static_input else None,
        "bias": torch.randn(N, generator=noise).bfloat16(),
        "lora_a": torch.randn(rank, K, generator=noise).bfloat16() / 16 if rank else None,
        "lora_b": torch.randn(N, rank, generator=noise).bfloat16() if rank else None,
        "scheme": scheme,
    }
    return x, rest


def packed(named: dict[str, Any]) -> tuple[list[Tensor], str]:
    """Operands by name as the op takes them."""
    tensors = {name: value for name, value in named.items() if name != "scheme"}
    return pack_named(ops.LinearTensors(**tensors), named["scheme"])


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within what bfloat16 rounds, and fp32 sums and a branch rounded elsewhere add to it."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    worst = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert worst < 2**-7, worst


CHOSEN = [
    ("int8-int8", "sm_80", "scaled_matmul"),
    ("int8-int8-r8", "sm_90", "scaled_matmul"),
    ("fp8-fp8", "sm_89", "scaled_matmul"),
    ("fp8_tensor-fp8_tensor-static", "sm_89", "F.scaled_mm"),
    ("fp8-fp8_1x128", "sm_89", "scaled_matmul"),
    ("fp8-fp8_1x128-r8", "sm_90", "scaled_matmul"),
    ("nvfp4-nvfp4-static", "sm_100", "block_scaled_matmul"),
    ("nvfp4-nvfp4", "sm_120", "block_scaled_matmul"),
    ("mxfp8-mxfp8", "sm_120", "block_scaled_matmul"),
    ("nvfp4-16bit", "sm_80", "weight_only_matmul"),
    ("int4-16bit-r8", "sm_90", "weight_only_matmul"),
    ("fp8-16bit", "sm_80", "weight_only_matmul"),
]


@pytest.mark.often(2)
@pytest.mark.parametrize(("scheme", "chip", "implementation"), CHOSEN)
@pytest.mark.parametrize("m", [1, 33])
def test_what_is_chosen_computes_the_scheme(offers, scheme: str, chip: str, implementation: str, m: int) -> None:
    offers(**ALL)
    parsed = Scheme.parse(scheme)
    assert choose(parsed, chip, m, N, K).implementation == implementation
    x, rest = operands(scheme, m, parsed.rank)
    with interpreting():
        found = launch.quantized_linear(x.reshape(1, m, K), *packed(rest), chip=chip)
    assert_near(found, ops.quantized_linear(x.reshape(1, m, K), *packed(rest)))


@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_4_bit_weights_with_a_scale_per_row_are_decoded_to_8_bit(offers, activations: str) -> None:
    offers(**ALL)
    x, rest = operands("nvfp4-nvfp4", 33)
    w = QuantizedTensor(
        rest["weight"], rest["weight_scale"], rest["weight_scale_2"], (N, K), Scheme.parse("nvfp4-16bit").weights
    )
    rest |= {"scheme": f"nvfp4-{activations}", "row_scale": row_scales(w, activations)}
    with interpreting():
        found = launch.quantized_linear(x, *packed(rest), chip="sm_90")
    assert_near(found, ops.quantized_linear(x, *packed(rest)))


@pytest.mark.slow
def test_swizzled_scales_are_passed_on(offers) -> None:
    offers(**ALL)
    x, rest = operands("nvfp4-nvfp4", 33)
    swizzled = rest | {"weight_scale": swizzle_scales(rest["weight_scale"])}
    with interpreting():
        found = launch.quantized_linear(x, *packed(swizzled), chip="sm_100")
    assert_near(found, ops.quantized_linear(x, *packed(rest)))


def test_weights_with_swizzled_scales_are_decoded_where_nothing_multiplies_them(offers) -> None:
    offers(weight_only_matmul=("nvfp4",))
    x, rest = operands("nvfp4-nvfp4", 33)
    swizzled = rest | {"weight_scale": swizzle_scales(rest["weight_scale"])}
    with interpreting():
        found = launch.quantized_linear(x, *packed(swizzled), chip="sm_100")
    assert_near(found, ops.quantized_linear(x, *packed(rest | {"scheme": "nvfp4-16bit"})))


def test_no_tokens_and_bad_input() -> None:
    x, rest = operands("fp8-16bit", 4)
    assert launch.quantized_linear(x[:0].reshape(2, 0, K), *packed(rest), chip="sm_90").shape == (2, 0, N)
    with pytest.raises(ValueError, match=r"input is torch\.bfloat16 \(4, 128\), expected .* K = 256"):
        launch.quantized_linear(x[:, :128], *packed(rest), chip="sm_90")
    with pytest.raises(ValueError, match=r"input is torch\.int8"):
        launch.quantized_linear(x.to(torch.int8), *packed(rest), chip="sm_90")


def test_a_fallback_is_said_once_and_is_an_error_when_strict(offers, caplog, monkeypatch) -> None:
    offers()
    launch._say.cache_clear()
    x, rest = operands("nvfp4-nvfp4", 4)
    with caplog.at_level(logging.WARNING, "fluxq"):
        for _ in range(3):
            found = launch.quantized_linear(x, *packed(rest), chip="sm_70")
            assert torch.equal(found, ops.quantized_linear(x, *packed(rest)))
    (said,) = caplog.messages
    assert said.startswith("nvfp4-nvfp4 on sm_70: torch reference (not block_scaled_matmul: no unit")
    assert "fluxq.prepare" in said
    monkeypatch.setattr(settings, "_set", {})
    monkeypatch.setenv("FLUXQ_STRICT", "1")
    with pytest.raises(ValueError, match="Strict mode takes only a kernel of the scheme's own arithmetic"):
        launch.quantized_linear(x, *packed(rest), chip="sm_70")  # though it ran before
    settings.configure(strict=False)
    launch.quantized_linear(x, *packed(rest), chip="sm_70")


def test_the_table_covers_every_kernel_and_chip() -> None:
    rows = list(report.offered())
    assert {(op.name, name) for op, name, _ in rows} == {(op, name) for op, formats in ALL.items() for name in formats}
    assert all(tuple(chips) == CHIPS for _, _, chips in rows)


# --- the ops that are one kernel each


def check_op(op, on_gpu, arguments: tuple, *, exact: bool = True) -> None:
    """Check that what a GPU runs gives what the torch reference gives, in shapes and dtypes too."""
    with interpreting():
        found = on_gpu(*arguments, chip="sm_100")
    expected = op(*arguments)
    together = (found, expected) if isinstance(found, tuple) else ((found,), (expected,))
    for left, right in zip(*together, strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        if exact or left.element_size() == 1 or left.numel() == 0:
            assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
        else:
            assert_near(left, right)


def matrices(kind: str, m: int = 33) -> tuple[QuantizedTensor, QuantizedTensor]:
    noise = torch.Generator().manual_seed(m)
    x, w = (torch.randn(rows, K, generator=noise) for rows in (m, N))
    return ops.quantize_activation(x, find_format(kind)), QuantizedTensor.quantize(w, kind)


GIVEN = {"fp8_tensor": torch.tensor(0.01), "nvfp4": torch.tensor(0.002), "fp8": torch.full((17, 1), 0.01)}
QUANTIZERS = [(kind, None) for kind in PRODUCED]


@pytest.mark.often(1)
@pytest.mark.parametrize(("kind", "scale"), QUANTIZERS + list(GIVEN.items()))
def test_quantizers_on_a_gpu(offers, kind: str, scale: Tensor | None) -> None:
    offers(**ALL)
    x = torch.randn(17, K, generator=torch.Generator().manual_seed(2)).bfloat16()
    ops_of = quantizer.quantize_activation, launch.launcher("quantize_activation")
    down = torch.randn(16, K).bfloat16() / 16
    steps = packed_steps(kind, input_scale=scale, smooth=torch.rand(K) + 0.5, down=down, hadamard=16)
    check_op(*ops_of, (x, *steps), exact=False)
    check_op(*ops_of, (x.abs().round(), *packed_steps(kind, input_scale=scale, act="gelu_tanh")), exact=False)
    beside = packed_steps(kind, input_scale=scale, act="gelu_tanh", beside=x[:, :128])
    check_op(*ops_of, (x.abs().round(), *beside), exact=False)
    offers(quantize_activation=(kind,))
    with pytest.raises(ValueError, match=f"quantize_activation: no kernel for {kind}-beside on sm_100"):
        launch.launcher("quantize_activation")(x, *beside, chip="sm_100")


@pytest.mark.parametrize("kind", ["", "fp8", "nvfp4"])
def test_norms_on_a_gpu(offers, kind: str) -> None:
    offers(**ALL)
    noise = torch.Generator().manual_seed(4)
    x, branch = (torch.randn(6, 64, generator=noise).bfloat16() for _ in range(2))
    scale, shift, gate = (torch.randn(2, 64, generator=noise).bfloat16() for _ in range(3))
    given = norm_packed(kind, scale=scale, shift=shift, branch=branch, gate=gate)
    arguments = x, *given, "layer", 1e-6
    with interpreting():
        found = launch.launcher("adaln_quantize")(*arguments, chip="sm_90")
    expected = adaln.adaln_quantize(*arguments)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
    assert torch.equal(found[3], expected[3])
    if not kind:
        assert_near(found[0], expected[0])
    q, k = (torch.randn(1, 5, heads, 64, generator=noise).bfloat16() for heads in (3, 2))
    cos, sin = torch.randn(5, 64, generator=noise), torch.randn(5, 64, generator=noise)
    check_op(
        rope.qk_norm_rope,
        launch.launcher("qk_norm_rope"),
        (q, k, *pack_named(rope.RopeTensors(cos, sin)), 1e-6, True, False),
        exact=False,
    )


@pytest.mark.often(1)
@pytest.mark.parametrize(("d", "scale"), [(64, None), (128, 0.1)])
def test_attention_on_a_gpu(offers, d: int, scale: float | None) -> None:
    offers(**ALL)
    noise = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 17, d, generator=noise).bfloat16().transpose(1, 2) for _ in range(3))
    check_op(attention.attention_fp8, launch.launcher("attention_fp8"), (q, k, v, scale), exact=False)
    apart = torch.stack([q, k], -1)[..., 0]  # elements of a head with gaps between them
    with interpreting():
        found = launch.launcher("attention_fp8")(apart, k, v, scale, chip="sm_100")
        assert torch.equal(found, launch.launcher("attention_fp8")(q, k, v, scale, chip="sm_100"))
        assert launch.launcher("attention_fp8")(q[:, :0], k, v, scale, chip="sm_100").shape == (1, 0, 2, d)


@pytest.mark.parametrize(
    ("d", "chip", "why"),
    [(96, "sm_90", "attention_fp8 has no 96"), (128, "sm_80", "type fp8e4nv"), (64, "gfx942", "no fp8 matrix")],
)
def test_attention_without_a_kernel_names_heads_and_chip(d: int, chip: str, why: str) -> None:
    q = torch.ones(1, 4, 2, d)
    with pytest.raises(ValueError, match=f"heads of {d} elements on {chip} .*{why}.*set_attention"):
        launch.launcher("attention_fp8")(q, q, q, None, chip=chip)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8_tensor"])
def test_scaled_matmul_on_a_gpu(offers, kind: str, gelu: bool) -> None:
    offers(**ALL)
    x, w = matrices(kind)
    given = ProductTensors(w.codes, w.scale, x.scale)
    arguments = (x.codes, *pack_named(given, kind), gelu, torch.bfloat16)
    check_op(scaled_matmul, launch.launcher("scaled_matmul"), arguments, exact=False)


@pytest.mark.slow
def test_codes_that_a_block_made_are_multiplied_as_a_layer_multiplies_its_own(offers, monkeypatch) -> None:
    """By the library where it is chosen for the layer, unless something follows that is computed in fp32."""
    offers(**ALL)
    x, rest = operands("fp8-fp8", 33)
    called: list[str] = []
    library, kernel = epilogue.library_product, launch.OPS["scaled_matmul"].kernel.multiply
    for module in (launch, epilogue):
        monkeypatch.setattr(module, "library_product", lambda *a: called.append("library") or library(*a))
    monkeypatch.setattr(OPS["scaled_matmul"].kernel, "multiply", lambda *a: called.append("kernel") or kernel(*a))
    product = launch.launcher("scaled_matmul")
    with interpreting():
        y = launch.quantized_linear(x, *packed(rest), chip="sm_90")
        q, _ = quantize_tuned(x, RoundingTensors(), Rounding("fp8"), "sm_90")
        given = ProductTensors(rest["weight"], rest["weight_scale"], q.scale, bias=rest["bias"])
        assert torch.equal(product(q.codes, *pack_named(given, "fp8"), False, torch.bfloat16, chip="sm_90"), y)
        assert called == ["library", "library"]
        product(q.codes, *pack_named(given, "fp8"), True, torch.bfloat16, chip="sm_90")
        gated = given._replace(gate=y[:1], residual=y)
        found = product(q.codes, *pack_named(gated, "fp8"), False, torch.bfloat16, chip="sm_90")
        assert torch.equal(found, y + y * y[:1])
        product(q.codes, *pack_named(given, "fp8"), False, torch.float16, chip="sm_90")
    assert called[2:] == ["kernel", "library", "kernel"]


def test_a_tile_that_leaves_no_registers_for_gate_and_residual_has_them_in_a_pass_behind(offers, monkeypatch) -> None:
    offers(**ALL)
    x, w = matrices("int8", 70)
    noise = torch.Generator().manual_seed(4)
    residual, gate = (torch.randn(m, w.shape[0], generator=noise).bfloat16() for m in (x.shape[0], 1))
    kernel, tiles = OPS["scaled_matmul"].kernel, []
    alone = kernel.scaled_matmul
    monkeypatch.setattr(
        kernel, "scaled_matmul", lambda *a, tile, **by: tiles.append(tile) or alone(*a, tile=tile, **by)
    )
    with interpreting():
        y = kernel.multiply(x, w, None, Epilogue(), "sm_90")
        found = kernel.multiply(x, w, None, Epilogue(gate=gate, residual=residual), "sm_90")
    assert torch.equal(found, residual + y * gate) and tiles[0] == tiles[1] and tiles[0].n == 256


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "mxfp4"])
def test_block_scaled_matmul_on_a_gpu(offers, kind: str) -> None:
    offers(**ALL)
    x, w = matrices(kind)
    given = ProductTensors(w.codes, w.scale, x.scale, w.global_scale, x.global_scale)
    arguments = (x.codes, *pack_named(given, kind), False, torch.bfloat16)
    check_op(block_scaled_matmul, launch.launcher("block_scaled_matmul"), arguments, exact=False)


@pytest.mark.parametrize("kind", ["nvfp4", "int4"])
def test_decoding_ops_on_a_gpu(offers, kind: str) -> None:
    offers(**ALL)
    w, x = matrices(kind)[1], matrices("int8")[0]
    stored = (w.codes, w.scale, w.global_scale)
    given = ProductTensors(w.codes, w.scale, x.scale, w.global_scale, row_scale=row_scales(w, "int8"))
    arguments = (x.codes, *pack_named(given, f"{kind}-int8"), False, torch.float32)
    check_op(w4a8_matmul, launch.launcher("w4a8_matmul"), arguments)
    tokens = torch.randn(3, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    arguments = (tokens, *pack_named(given._replace(x_scale=None, row_scale=None), kind), False, tokens.dtype)
    check_op(weight_only_matmul, launch.launcher("weight_only_matmul"), arguments, exact=False)
    check_op(dequantize, launch.launcher("dequantize"), (*stored, kind, torch.bfloat16))


def test_an_op_without_a_kernel_on_a_chip_says_so(offers) -> None:
    offers()
    x, w = matrices("nvfp4")
    given = ProductTensors(w.codes, w.scale, x.scale, w.global_scale, x.global_scale)
    with pytest.raises(ValueError, match=r"block_scaled_matmul: no kernel for nvfp4 on sm_90 \(no unit\)"):
        launch.launcher("block_scaled_matmul")(
            x.codes, *pack_named(given, "nvfp4"), False, torch.bfloat16, chip="sm_90"
        )


def test_every_op_of_the_table_has_a_form_for_a_gpu() -> None:
    every = torch._C._dispatch_get_all_op_names()
    registered = {name.removeprefix("fluxq::") for name in every if name.startswith("fluxq::")}
    assert registered == {*OPS, "quantized_linear"}
    for name in registered:
        assert callable(launch.launcher(name))
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fluxq::{name}", "CUDA")


def test_what_is_compiled_offers_every_shipped_recipe_a_kernel_of_its_own_on_blackwell() -> None:
    for recipe in shipped_recipes():
        for scheme in schemes_of(recipe):
            for chip in ("sm_100", "sm_120"):
                choice = choose(scheme, chip, 4096, 3072, 3072)
                assert choice.implementation != "torch reference", (recipe, str(scheme), chip, choice.reason)
                is_4_bit_integer = scheme.activations is not None and scheme.activations.name.startswith("int4")
                assert not choice.fallback or is_4_bit_integer, (recipe, str(scheme), chip, choice.reason)


@pytest.mark.parametrize("chip", ["sm_80", "sm_86", "sm_89", "sm_90", "gfx942", "gfx950", "gfx1201"])
def test_what_is_compiled_offers_every_shipped_recipe_some_kernel_elsewhere(chip: str) -> None:
    without = set()
    for recipe in shipped_recipes():
        for scheme in schemes_of(recipe):
            choice = choose(scheme, chip, 4096, 3072, 3072)
            if choice.implementation == "torch reference":
                assert "weight_only_matmul: " in choice.reason and " spills" in choice.reason, (
                    str(scheme),
                    choice.reason,
                )
                without.add(scheme.weights.name)
    assert without == ({"mxfp4", "nvfp4"} if (dispatch.compiled_with(), chip) == ("3.8", "gfx1201") else set())


def schemes_of(recipe: str) -> list[Scheme]:
    """The main scheme and that of the modulation."""
    component = load_recipe(recipe)[1].components["transformer"]
    activations = component.activations.row if component.activations else None
    found = [Scheme(component.weights.row, activations)]
    return found + ([Scheme(component.modulation.row, None)] if component.modulation else [])


@pytest.mark.parametrize("m", [1, 2, 16, 17])
@pytest.mark.parametrize("k", [64, 66])
def test_fp32_tokens_of_weight_only_layers_are_multiplied_in_fp32(offers, m: int, k: int) -> None:
    offers(**ALL)
    noise = torch.Generator().manual_seed(m)
    w = QuantizedTensor.quantize(torch.randn(8, k, generator=noise), "fp8")
    x = torch.randn(m, k, generator=noise)
    arguments = (x, *pack_named(ops.LinearTensors(w.codes, w.scale), "fp8-16bit"))
    with interpreting():
        found = launch.quantized_linear(*arguments, chip="sm_90")
    torch.testing.assert_close(found, ops.quantized_linear(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.often(1)
@pytest.mark.parametrize("rank", [64, 65, 200])
def test_a_branch_of_any_rank_is_added(offers, rank: int) -> None:
    offers(**ALL)
    x, rest = operands("int8-int8", 33, rank)
    with interpreting():
        found = launch.quantized_linear(x, *packed(rest), chip="sm_90")
    assert_near(found, ops.quantized_linear(x, *packed(rest)))


@pytest.mark.slow
def test_weights_at_odd_addresses_take_a_tile_that_reads_them(offers) -> None:
    offers(**ALL)
    for scheme, m in (("int8-int8", 130), ("fp8-16bit", 1)):
        x, rest = operands(scheme, m)
        moved = torch.empty(rest["weight"].numel() + 1, dtype=torch.uint8)[1:].view(rest["weight"].shape)
        moved = moved.copy_(rest["weight"].view(torch.uint8)).view(rest["weight"].dtype)
        with interpreting():
            found = launch.quantized_linear(x, *packed(rest | {"weight": moved}), chip="sm_90")
        assert_near(found, ops.quantized_linear(x, *packed(rest)))


def test_without_rows_an_op_returns_what_its_reference_does() -> None:
    x, w = matrices("fp8")
    given = ProductTensors(w.codes, w.scale, x.scale[:0])
    arguments = (x.codes[:0], *pack_named(given, "fp8"), False, torch.bfloat16)
    assert launch.run("scaled_matmul", *arguments).shape == (0, N)
    found = launch.run("quantize_activation", torch.zeros(0, K), *packed_steps("nvfp4"))
    assert [tuple(t.shape) for t in found] == [(0, K // 2), (0, K // 16), (0, 1), (0,)]


def test_a_library_product_needs_a_kernel_that_quantizes(offers) -> None:
    offers()
    choice = choose(Scheme.parse("int8-int8"), "sm_75", 64, N, K)
    assert choice.implementation == "torch reference" and "activations cannot be quantized there" in choice.reason


def test_another_triton_takes_the_newest_rows_and_says_so(monkeypatch, caplog) -> None:
    monkeypatch.setattr(dispatch.triton, "__version__", "3.7.1")
    dispatch.compiled_with.cache_clear()
    with caplog.at_level(logging.WARNING, "fluxq"):
        assert dispatch.compiled_with() == "3.9"
    assert "never compiled with Triton 3.7: what runs where is taken from Triton 3.9" in caplog.text
    dispatch.compiled_with.cache_clear()


IMPORTED_FIRST = [
    "fluxq.kernels.launch",
    "benchmarks.kernels.bench",
    "fluxq.kernels.adaln_quantize.op",
    "fluxq.jobs.environment",
]


IN_ITS_OWN_PROCESS = f"""
import importlib, os, sys, torch

for module in {IMPORTED_FIRST}:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, module
        continue
    importlib.import_module(module)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith('fluxq::'):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, 'CUDA'), name
            print(module, name)
    sys.exit()
"""


@pytest.mark.slow
def test_kernels_are_registered_whatever_is_imported_first() -> None:
    """Each in a process of its own, forked once torch is there; the ops say which devices have kernels of their own."""
    done = subprocess.run([sys.executable, "-c", IN_ITS_OWN_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines() if "fluxq::" in line} == set(IMPORTED_FIRST)


def test_an_op_on_a_gpu_is_launched_there(monkeypatch) -> None:
    """Whatever the current device is; a tensor that says it is on the second GPU stands in for one."""
    entered = []

    class Guard:
        def __init__(self, device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *error: object) -> None:
            entered.append(None)

    fake = SimpleNamespace(device=torch.device("cuda", 1), is_cuda=True, shape=(4, 8))
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_planned", lambda name, arguments, chip: entered.append(f"{name} on {chip}"))
    monkeypatch.setattr(launch, "chip_of", lambda device: "sm_90")
    launch.run("dequantize", fake)
    assert entered == [torch.device("cuda", 1), "dequantize on sm_90", None]


@pytest.mark.parametrize("k", [64, 331, 1152, 1536, 2432, 3072, 3840, 5120, 8960, 12288, 13824, 15360, 24576, 32768])
def test_a_program_that_holds_a_row_wastes_few_lanes_and_has_enough_registers(k: int) -> None:
    tile = whole_row_tile(k, "sm_90")
    padded = cdiv(k, tile.columns) * tile.columns
    assert tile.rows == 1 and padded >= k and padded <= 56 * 32 * tile.warps
    assert padded <= k * 14 / 13 or (k < 2048 and padded < 2 * k)
    many = whole_row_tile(k, "sm_90", many=True)
    padded = cdiv(k, many.columns) * many.columns
    assert padded <= 28 * 32 * many.warps or (many.warps, is_held(padded, True)) in ((16, True), (8, False))
    for chip, lanes in (("gfx942", 64), ("gfx950", 64), ("gfx1201", 32)):
        assert all(whole_row_tile(k, chip, many=many).warps * lanes <= 1024 for many in (False, True))
