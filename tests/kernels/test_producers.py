"""The ops that quantize activations: their references by hand, their contract with torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from rounding import packed
from torch import Tensor

from fluxq.kernels import ops
from fluxq.kernels.quantize_activation import op as quantizer
from fluxq.kernels.quantize_activation.op import PRODUCED
from fluxq.kernels.tensor import QuantizedTensor, unswizzle_scales
from fluxq.recipes.formats import FORMATS

M, K = 6, 256


def quantized(x: Tensor, format: str, **options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return quantizer.quantize_activation(x, *packed(format, **options))


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def everything(format: str) -> dict:
    """All arguments that the format allows, but for input_scale."""
    row = FORMATS[format]
    tensors = {"smooth": noise(K).exp(), "mean": noise(K), "down": noise(5, K, dtype=torch.bfloat16)}
    return tensors | {"hadamard": 64, "four_over_six": row.two_level, "swizzled": row.has_byte_scales}


def given_scale(format: str) -> Tensor:
    return torch.full((M, 1), 0.02) if FORMATS[format].block[0] else torch.tensor(0.02)


def sylvester(size: int) -> Tensor:
    """The Hadamard matrix by its definition: the sign of (i, j) is the parity of the bits that i and j share."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


@pytest.mark.parametrize("format", PRODUCED)
def test_without_further_steps_it_is_the_quantization_of_the_quantized_linear(format: str) -> None:
    x = noise(M, K, dtype=torch.bfloat16)
    codes, scale, global_scale, h = quantized(x, format)
    q = ops.quantize_activation(x, FORMATS[format])
    assert torch.equal(codes.view(torch.uint8), q.codes.view(torch.uint8))
    assert scale.dtype == q.scale.dtype and torch.equal(scale.float(), q.scale.float())
    assert torch.equal(global_scale, torch.empty(0) if q.global_scale is None else q.global_scale)
    assert h.shape == (0,)


@pytest.mark.parametrize("format", ["int8", "fp8", "fp8_tensor", "nvfp4"])
def test_a_given_scale_is_used_and_not_returned(format: str) -> None:
    x, given = noise(M, K), given_scale(format)
    codes, scale, global_scale, _ = quantized(x, format, input_scale=given)
    assert global_scale.shape == (0,)
    if format == "nvfp4":
        q = QuantizedTensor(codes, scale, given, (M, K), FORMATS[format])
    else:
        assert scale.shape == (0,)
        q = QuantizedTensor(codes, given.reshape(given.shape[:1]), None, (M, K), FORMATS[format])
    largest = 0.02 * FORMATS[format].element.max * (448 if format == "nvfp4" else 1)
    error = {"int8": 0.01 + 1e-6, "nvfp4": 1.1}.get(format, 0.5)  # half the largest step
    assert ((q.dequantize() - x.clamp(-largest, largest)).abs() <= error).all()


def test_every_step_is_what_the_top_of_the_file_says() -> None:
    x, smooth, mean, down = noise(M, K), noise(K).exp(), noise(K), noise(5, K, dtype=torch.bfloat16)
    codes, scale, _, h = quantized(x, "fp8", smooth=smooth, mean=mean, down=down, hadamard=32)
    matrix = torch.block_diag(*[sylvester(32).double()] * (K // 32)) / 32**0.5
    v = (x.double() - mean) * smooth @ matrix
    found = QuantizedTensor(codes, scale, None, (M, K), FORMATS["fp8"]).dequantize().double()
    assert ((found - v).abs() <= 2.0**-4 * v.abs() + v.abs().amax(1, keepdim=True) * (2.0**-10 / 448 + 1e-6)).all()
    torch.testing.assert_close(h.double(), x.bfloat16().double() @ down.double().T, rtol=2.0**-8, atol=1e-4)
    assert h.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_the_transform_is_sylvesters_hadamard_matrix_and_its_own_inverse(size: int) -> None:
    x = noise(M, K)
    matrix = torch.block_diag(*[sylvester(size)] * (K // size)).double() / size**0.5
    v = ops.hadamard_transform(x, size)
    torch.testing.assert_close(v.double(), x.double() @ matrix, rtol=0, atol=1e-5)
    torch.testing.assert_close(ops.hadamard_transform(v, size), x, rtol=0, atol=1e-5)
    unit = torch.eye(size)
    assert torch.equal(ops.hadamard_transform(unit, size) * size**0.5 > 0, sylvester(size) > 0)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_swizzled_scales_are_the_plain_ones_in_another_order(format: str) -> None:
    x = noise(M, K)
    _, plain, *_ = quantized(x, format)
    _, flat, *_ = quantized(x, format, swizzled=True)
    again = unswizzle_scales(flat, *plain.shape)
    assert torch.equal(again.view(torch.uint8), plain.view(torch.uint8))


def squared_error(x: Tensor, four_over_six: bool) -> Tensor:
    codes, scale, g, _ = quantized(x, "nvfp4", four_over_six=four_over_six)
    found = QuantizedTensor(codes, scale, g, tuple(x.shape), FORMATS["nvfp4"]).dequantize()  # pyright: ignore
    return (found.double() - x.double()).square().reshape(x.shape[0], -1, 16).sum(-1)


def test_four_over_six_lowers_the_error_and_uses_both_scales() -> None:
    x = noise(64, K)
    assert squared_error(x, True).sum() < 0.9 * squared_error(x, False).sum()


def test_four_over_six_takes_the_better_scale_of_each_block() -> None:
    """Against both candidates in float64: no block has a better one, but for ties within rounding."""
    x, g = noise(32, K), torch.tensor(0.004)
    _, scale, *_ = quantized(x, "nvfp4", input_scale=g, four_over_six=True)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    blocks = x.double().reshape(32, -1, 16)
    errors, steps = [], []
    for largest in (6, 4):
        step = (blocks.abs().amax(-1) / largest / g).float().to(torch.float8_e4m3fn)
        units = blocks.abs() / (step.double() * g.double())[..., None]
        nearest = (units[..., None] - values).abs().amin(-1) * (step.double() * g.double())[..., None]
        errors.append(nearest.square().sum(-1))
        steps.append(step.float())
    best = torch.where(errors[1] < errors[0], steps[1], steps[0])
    different = (scale.float() != best).nonzero()
    for row, group in different.tolist():
        assert abs(float(errors[0][row, group] - errors[1][row, group])) < 1e-6 * float(errors[0][row, group])
    assert {float(s) for s in (scale.float() / steps[0]).flatten()} > {1.0}


@pytest.mark.parametrize("act", quantizer.ACTS)
def test_an_activation_comes_first(act: str) -> None:
    x = noise(M, K * (1 + (act in quantizer.GATED)), dtype=torch.bfloat16)
    first, second = x[:, :K], x[:, -K:]
    layer = {
        "gelu": lambda: F.gelu(x),
        "gelu_tanh": lambda: F.gelu(x, approximate="tanh"),
        "silu_mul": lambda: F.silu(first) * second,
        "mul_silu": lambda: first * F.silu(second),
    }[act]
    options = everything("nvfp4")
    fused = quantized(x, "nvfp4", **options, act=act)
    composed = quantized(layer(), "nvfp4", **options)
    for ours, theirs in zip(fused, composed, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("act", ["gelu_tanh", "silu_mul"])
@pytest.mark.parametrize("format", PRODUCED)
def test_what_stands_beside_is_quantized_as_if_it_were_concatenated(format: str, act: str) -> None:
    left = noise(M, 160, dtype=torch.bfloat16)[:, :96]
    x = noise(M, (K - 96) * (1 + (act in quantizer.GATED)), dtype=torch.bfloat16)
    fused = quantized(x, format, **everything(format), act=act, beside=left)
    whole = torch.cat([left, quantizer.ACTS[act](x)], dim=1)
    composed = quantized(whole, format, **everything(format))
    for ours, theirs in zip(fused, composed, strict=True):
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def test_mul_silu_is_the_order_of_diffusers_and_silu_mul_that_of_flux2() -> None:
    activations = pytest.importorskip("diffusers.models.activations")
    flux2 = pytest.importorskip("diffusers.models.transformers.transformer_flux2")
    x = noise(M, 2 * K)
    swiglu = activations.SwiGLU(2 * K, K)
    with torch.no_grad():
        swiglu.proj = torch.nn.Identity()
        assert torch.equal(quantizer.ACTS["mul_silu"](x), swiglu(x))
        assert torch.equal(quantizer.ACTS["silu_mul"](x), flux2.Flux2SwiGLU()(x))


def calls() -> dict[str, dict]:
    """name -> arguments of `quantized`: every format with all steps, given scales, an activation."""
    x, gated = noise(M, K, dtype=torch.bfloat16), noise(M, 2 * K, dtype=torch.bfloat16)
    found = {}
    for name in PRODUCED:
        found[name] = {"x": x, **everything(name), "format": name}
        found[f"{name} plain"] = {"x": x, "format": name}
        if FORMATS[name].two_level or not FORMATS[name].group_size:
            given = {"input_scale": given_scale(name)}
            found[f"{name} given"] = found[name] | given
    beside = {"x": gated[:, : 2 * (K - 96)], "beside": gated[:, :96].clone()}
    found["beside"] = {**beside, **everything("int8"), "format": "int8", "act": "silu_mul"}
    found["act"] = {"x": gated, **everything("nvfp4"), "format": "nvfp4", "act": "silu_mul"}
    return found


CALLS = calls()


@pytest.mark.often(8)
@pytest.mark.parametrize("case", CALLS)
def test_the_ops_keep_their_contract_with_torch(case: str) -> None:
    arguments = CALLS[case]
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic", "test_schema"]
    if arguments["format"] in ("fp8", "fp8_tensor", "fp8_1x128", "mxfp8", "nvfp4"):
        checks = checks[:2]  # the others compare results with allclose, which torch lacks for float8
    arguments = dict(arguments)
    x = arguments.pop("x")
    torch.library.opcheck(quantizer.quantize_activation, (x, *packed(**arguments)), test_utils=checks)


@pytest.mark.often(1)
@pytest.mark.parametrize("case", ["int8", "fp8_tensor given", "nvfp4", "mxfp4", "act", "beside"])
def test_the_ops_compile_without_a_graph_break(case: str) -> None:
    arguments = CALLS[case]

    def call(x: Tensor) -> tuple[Tensor, ...]:
        return quantized(**arguments | {"x": x})

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(arguments["x"]), call(arguments["x"]), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("case", CALLS)
def test_no_tokens_give_no_codes(case: str) -> None:
    arguments = CALLS[case]
    if arguments.get("input_scale") is not None and arguments["input_scale"].ndim == 2:
        arguments = arguments | {"input_scale": arguments["input_scale"][:0]}
    rows = {name: arguments[name][:0] for name in ("x", "beside") if name in arguments}
    outputs = quantized(**arguments | rows)
    assert outputs[0].shape[0] == 0
    assert all(t.numel() == 0 for t in outputs if t.ndim)


def test_autocast_does_not_reach_the_reference() -> None:
    arguments = CALLS["int8"] | {"x": noise(M, K), "down": None}
    with torch.autocast("cpu", torch.bfloat16):
        inside = quantized(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(inside, quantized(**arguments), strict=True))


BAD = {
    "format is 'int5'": {"format": "int5"},
    "expected one of int8, fp8": {"format": "int4"},
    "hadamard is 8": {"hadamard": 8},
    "K is 256, no multiple of hadamard": {"x": noise(M, 256)[:, :200], "hadamard": 128},
    "four_over_six chooses nvfp4": {"four_over_six": True},
    "swizzled is for block scales": {"swizzled": True},
    "smooth is torch.float32": {"smooth": noise(K - 1)},
    "mean is torch.bfloat16": {"mean": noise(K, dtype=torch.bfloat16)},
    "takes its scales from each block": {"format": "mxfp8", "input_scale": torch.ones(M, 1)},
    r"expected \(M, K\) of float16": {"x": torch.ones(M, K, dtype=torch.int8)},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_named(message: str) -> None:
    arguments = {"x": noise(M, K), "format": "int8"}
    changed = BAD[message]
    if "200" in message or "no multiple" in message:
        message = message.replace("256", "200")
    with pytest.raises(ValueError, match=message):
        quantized(**arguments | changed)


def test_an_unknown_act_is_named() -> None:
    with pytest.raises(ValueError, match="act is 'relu', expected one of gelu, gelu_tanh"):
        quantized(noise(M, K), "int8", act="relu")


@pytest.mark.parametrize("beside", [noise(M - 1, K), noise(M, K).bfloat16(), noise(M), noise(M, 0)], ids=str)
def test_what_cannot_stand_beside_is_named(beside: Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"quantize_activation: beside is .*, expected torch.float32 \(6, D\), the rows of x"
    ):
        quantized(noise(M, K), "int8", act="gelu", beside=beside)
