"""QuantLinear and its op against a simulation written here from the formulas, bit for bit on the CPU."""

import os
import subprocess
import sys

import forked
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluxq.kernels import encode, ops
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor, pack_named, stored_shapes
from fluxq.recipes.formats import FORMATS, Scheme, find_format

N, K = 24, 256
SCHEMES = (
    "nvfp4-nvfp4",
    "nvfp4-nvfp4-static",
    "fp8-fp8",
    "fp8_tensor-fp8_tensor",
    "fp8_tensor-fp8_tensor-static",
    "mxfp8-mxfp8",
    "mxfp4-mxfp4",
    "int8-int8",
    "int4-int4",
    "int4-16bit",
    "int4_g128-16bit",
    "fp8-16bit",
    "nvfp4-fp8",
    "fp8-fp8_1x128",
    "fp8_1x128-fp8_1x128",
    "fp8_128x128-fp8_1x128",
    "fp8_128x128-16bit",
    "fp8_e5m2-fp8_e5m2",
    "fp8_e5m2-16bit",
)
RANK = 6
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


# The formulas, once more: numpy in fp32 (or float64 where a sum must be exact), from scale rules to decoded values.

f32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=f32)
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]
)

E5M2 = np.array([m / 4 * 2.0**-14 for m in range(4)] + [(1 + m / 4) * 2.0**e for e in range(-14, 16) for m in range(4)])


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Saturating round to nearest of x to ±values, ties to the even index."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    up, down = values[above] - magnitude, magnitude - values[above - 1]
    index = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return np.copysign(values[index], x).astype(f32)


def bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy()


def simulated(x: np.ndarray, format: str, global_scale: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(codes as values, multipliers), both (rows, K) fp32, of an fp32 matrix. global_scale: or fp8_tensor's own."""
    rows, k = x.shape
    group = {"nvfp4": 16, "mxfp8": 32, "mxfp4": 32, "int4": 64}.get(format, k)
    group = 128 if format in ("int4_g128", "fp8_1x128", "fp8_128x128") else group
    blocks = x.reshape(rows, -1, group)
    amax = np.abs(blocks).max(-1, keepdims=True)  # (rows, G, 1)
    amax = np.full_like(amax, amax.max()) if format == "fp8_tensor" else amax
    for start in range(0, rows, 128) if format == "fp8_128x128" else ():
        amax[start : start + 128] = amax[start : start + 128].max(0, keepdims=True)
    if format in ("fp8", "fp8_tensor", "fp8_1x128", "fp8_128x128"):
        scale = (
            np.where(amax == 0, f32(1), amax / f32(448)) if global_scale is None else np.full_like(amax, global_scale)
        )
        codes = nearest(blocks / scale, E4M3)
    elif format == "fp8_e5m2":
        scale = np.where(amax == 0, f32(1), amax / f32(57344))
        codes = nearest(blocks / scale, E5M2)
    elif format == "int8":
        scale = np.where(amax == 0, f32(1), amax / f32(127))
        codes = np.rint(np.clip(blocks / scale, -127, 127))
    elif format.startswith("int4"):
        scale = np.where(amax == 0, f32(1), bf16(amax / f32(7)))
        codes = np.rint(np.clip(blocks / scale, -8, 7))
    elif format == "nvfp4":
        if global_scale is None:
            global_scale = np.where(amax.max() == 0, f32(1), amax.max() / f32(2688))
        block_scale = np.clip(amax / f32(6) / global_scale, f32(2**-9), f32(448))
        scale = np.where(amax == 0, f32(1), nearest(block_scale, E4M3)) * global_scale
        codes = nearest(blocks / scale, E2M1)
    elif format == "mxfp8":
        exponent = np.ceil(np.log2(amax.astype(np.float64) / 448, where=amax > 0, out=np.zeros(amax.shape)))
        scale = np.exp2(exponent).astype(f32)
        codes = nearest(blocks / scale, E4M3)
    else:
        floor = np.floor(np.log2(amax.astype(np.float64), where=amax > 0, out=np.full(amax.shape, 2.0))) - 2
        options = [np.exp2(floor + shift) for shift in (0, 1, -1)]
        errors = [np.square(nearest(blocks / s, E2M1) * s - blocks).sum(-1, keepdims=True) for s in options]
        scale = np.choose(np.argmin(errors, axis=0), options).astype(f32)
        codes = nearest(blocks / scale, E2M1)
    return codes.astype(f32).reshape(rows, k), np.broadcast_to(scale, blocks.shape).reshape(rows, k).astype(f32)


def simulated_linear(x: Tensor, w: Tensor, bias: Tensor | None, scheme: str, input_scale: Tensor | None) -> Tensor:
    weights, activations = scheme.split("-")[:2]
    rows = x.reshape(-1, x.shape[-1]).float().numpy()
    wq, w_scale = simulated(w.float().numpy(), weights)
    b = None if bias is None else bias.float()
    if len(rows) == 0:
        return x.new_empty(*x.shape[:-1], w.shape[0])
    if activations == "16bit":
        xq, x_scale = rows, np.ones_like(rows)
    elif activations == "nvfp4" and input_scale is None:  # one global scale per token
        tokens = [simulated(row[None], activations) for row in rows]
        xq, x_scale = (np.concatenate(parts) for parts in zip(*tokens, strict=True))
    else:
        xq, x_scale = simulated(rows, activations, None if input_scale is None else input_scale.numpy())
    if scheme == "int8-int8":
        product = xq.astype(np.float64) @ wq.astype(np.float64).T  # integers: exact
        y = torch.from_numpy(product.astype(f32) * x_scale[:, :1] * w_scale[:, 0])
        y = y if b is None else y + b
    else:
        y = F.linear(torch.from_numpy(xq * x_scale), torch.from_numpy(wq * w_scale), b)
    return y.to(x.dtype).reshape(*x.shape[:-1], w.shape[0])


def layer_and_input(scheme: str, bias: bool, dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0):
    """A QuantLinear, its float weight (N, K), bias and input_scale, and an input of `shape`."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(N, K, generator=generator).bfloat16()
    w[3] = 0.0
    b = torch.randn(N, generator=generator).to(dtype) if bias else None
    x = (3 * torch.randn(shape, generator=generator)).to(dtype)
    if x.numel():
        x[..., 7] *= 20
        x.view(-1, K)[0, 16:32] = 0.0
    parsed = Scheme.parse(scheme)
    input_scale = torch.tensor(0.01) if parsed.static_input else None
    layer = QuantLinear.from_quantized(QuantizedTensor.quantize(w, parsed.weights), b, parsed, input_scale)
    return layer, w, b, input_scale, x


@EVERY_SCHEME
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("shape", [(1, K), (5, K), (17, K), (2, 3, K), (K,), (0, K), (2, 0, K)], ids=str)
def test_the_output_is_the_simulation_bit_for_bit(scheme, bias, dtype, shape):
    layer, w, b, input_scale, x = layer_and_input(scheme, bias, dtype, shape)
    kept = x.clone()
    y = layer(x)
    expected = simulated_linear(x, w, b, scheme, input_scale)
    assert y.shape == (*shape[:-1], N) and y.dtype == dtype
    assert torch.equal(y, expected)
    assert torch.equal(x, kept)


@EVERY_SCHEME
def test_zero_tokens_give_the_bias(scheme):
    layer, _, b, _, _ = layer_and_input(scheme, True, torch.float32, (1, K))
    assert torch.equal(layer(torch.zeros(3, K)), b.expand(3, N))


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if "tensor" not in s])
def test_a_token_does_not_depend_on_the_others(scheme):
    layer, _, _, _, x = layer_and_input(scheme, True, torch.float32, (3, K))
    alone = layer(x[1:2])
    x[[0, 2]] *= 100
    torch.testing.assert_close(layer(x)[1:2], alone, rtol=1e-6, atol=1e-4)  # sums may be ordered otherwise


@EVERY_SCHEME
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_in_a_token_make_its_outputs_nan_or_infinite(scheme, bad):
    layer, _, _, _, x = layer_and_input(scheme, True, torch.bfloat16, (3, K))
    x[1, 40] = bad
    y = layer(x)
    clips = scheme == "fp8_tensor-fp8_tensor-static" and bad == float("inf")  # as anything that is beyond its scale
    assert y.isfinite().all() if clips else not y[1].isfinite().any()
    if "tensor" not in scheme:
        assert y[[0, 2]].isfinite().all()


@pytest.mark.often(2)
@EVERY_SCHEME
@pytest.mark.parametrize("rank", [0, RANK])
def test_the_op_passes_opcheck_and_changes_no_input(scheme, rank):
    layer, _, _, input_scale, x = layer_and_input(scheme, True, torch.bfloat16, (5, K))
    global_scale = getattr(layer, "weight_scale_2", None)
    low_rank = (torch.randn(rank, K).bfloat16(), torch.randn(N, rank).bfloat16()) if rank else (None, None)
    tensors = [x, layer.weight, layer.weight_scale, global_scale, input_scale, layer.bias, *low_rank]
    kept = [None if t is None else t.detach().clone() for t in tensors]
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    if not {layer.weight.dtype, layer.weight_scale.dtype} & {torch.float8_e4m3fn, torch.float8_e5m2}:
        checks.append("test_schema")  # compares its inputs with allclose, which torch lacks for float8
    torch.library.opcheck(
        ops.quantized_linear, (x, *pack_named(ops.LinearTensors(*tensors[1:]), scheme)), test_utils=checks
    )
    for tensor, before in zip(tensors, kept, strict=True):
        assert tensor is None or torch.equal(tensor.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))


@EVERY_SCHEME
def test_the_fake_has_the_real_shape_and_dtype(scheme):
    layer, *_ = layer_and_input(scheme, True, torch.bfloat16, (1, K))
    for shape in ((K,), (5, K), (2, 0, K)):
        y = layer.to("meta")(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        assert (y.shape, y.dtype, y.device.type) == ((*shape[:-1], N), torch.bfloat16, "meta")


@pytest.mark.often(1)
@EVERY_SCHEME
def test_it_compiles_without_a_graph_break(scheme):
    layer, _, _, _, x = layer_and_input(scheme, True, torch.bfloat16, (5, K))
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(layer, nn.GELU()), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), F.gelu(layer(x)))


@EVERY_SCHEME
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_state_dict_survives_safetensors_bit_for_bit(tmp_path, scheme, bias):
    layer, _, _, _, x = layer_and_input(scheme, bias, torch.bfloat16, (5, K))
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = QuantLinear(K, N, bias, Scheme.parse(scheme), torch.bfloat16)
    loaded = load_file(tmp_path / "layer.safetensors")
    other.load_state_dict(loaded)
    for name, tensor in layer.state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert torch.equal(other(x), layer(x))
    assert torch.equal(other.quantized_weight.dequantize(), layer.quantized_weight.dequantize())


@EVERY_SCHEME
def test_it_is_a_linear_of_frozen_parameters_without_buffers(scheme):
    layer, *_ = layer_and_input(scheme, True, torch.bfloat16, (1, K))
    assert isinstance(layer, nn.Linear) and not list(layer.buffers())
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    names = {*stored_shapes(layer.scheme.weights, N, K), *(["input_scale"] if layer.scheme.static_input else [])}
    assert set(layer.stored_names) == names and set(layer.state_dict()) == {*names, "bias"}
    assert repr(layer) == f"QuantLinear({K}, {N}, bias=True, scheme={scheme})"


def low_rank_pair(rank: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(rank)
    a, b = torch.randn(rank, K, generator=noise), torch.randn(N, rank, generator=noise)
    return a.to(dtype), b.to(dtype)


@EVERY_SCHEME
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_low_rank_branch_computes_what_two_linears_beside_the_layer_would(scheme, dtype):
    layer, _, _, _, x = layer_and_input(scheme, True, dtype, (5, K))
    (a, b), alone = low_rank_pair(RANK, dtype), layer(x)
    layer.append_low_rank(a, b)
    assert torch.equal(layer(x), alone + F.linear(F.linear(x, a), b))
    assert not torch.equal(layer(x), alone)
    assert str(layer.scheme) == f"{scheme}-r{RANK}" and set(layer.state_dict()) > {"svdquant_lora_a", "svdquant_lora_b"}
    assert layer(x[:0]).shape == (0, N)


def test_pairs_of_a_low_rank_branch_add_up_and_are_taken_away_without_a_trace():
    layer, _, _, _, x = layer_and_input("nvfp4-nvfp4-static", True, torch.bfloat16, (5, K))
    states, outputs = [{n: t.clone() for n, t in layer.state_dict().items()}], [layer(x)]
    for rank in (RANK, 3):
        layer.append_low_rank(*low_rank_pair(rank))
        states.append({n: t.clone() for n, t in layer.state_dict().items()})
        outputs.append(layer(x))
    assert layer.scheme.rank == RANK + 3 and layer.svdquant_lora_a.shape == (RANK + 3, K)
    for rank in (3, RANK):
        states.pop(), outputs.pop()
        layer.drop_low_rank(rank)
        assert layer.state_dict().keys() == states[-1].keys() and torch.equal(layer(x), outputs[-1])
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), states[-1][name].reshape(-1).view(torch.uint8))
    assert layer.low_rank is None and str(layer.scheme) == "nvfp4-nvfp4-static"


def test_a_layer_with_a_low_rank_branch_is_built_loaded_and_dequantized():
    layer, _, _, _, x = layer_and_input("fp8-16bit", True, torch.bfloat16, (5, K))
    plain = layer.dequantized(torch.float32).weight
    a, b = low_rank_pair(RANK)
    layer.append_low_rank(a, b)
    torch.testing.assert_close(layer.dequantized(torch.float32).weight, plain + b.float() @ a.float())
    other = QuantLinear(K, N, True, layer.scheme, torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_gradients_flow_through_the_low_rank_branch():
    layer, *_ = layer_and_input("int4-16bit", True, torch.float32, (5, K))
    layer.append_low_rank(*low_rank_pair(RANK, torch.float32))
    x = torch.randn(5, K, requires_grad=True)
    pull = torch.randn(5, N)
    layer(x).backward(pull)
    torch.testing.assert_close(x.grad, pull @ layer.dequantized(torch.float32).weight)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["fp8", "nvfp4", "int4"])
def test_on_a_gpu_a_backward_pass_decodes_no_weight_to_memory(weights):
    n, k = 4096, 2048
    w = QuantizedTensor.quantize(torch.randn(n, k), weights)
    layer = QuantLinear.from_quantized(w, None, Scheme.parse(f"{weights}-16bit"), None).to("cuda")
    pull = torch.randn(64, n).bfloat16()
    for _ in range(2):  # the first launch is compared, which decodes
        x = torch.zeros(64, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        y, given = layer(x), pull.to("cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y.backward(given)
    assert torch.cuda.max_memory_allocated() - before < n * k
    expected = pull.double() @ w.dequantize().double()
    assert x.grad is not None
    assert (x.grad.double().cpu() - expected).norm() < 5e-3 * expected.norm()


def test_a_low_rank_pair_that_does_not_fit_is_refused():
    layer, *_ = layer_and_input("fp8-fp8", True, torch.bfloat16, (1, K))
    a, b = low_rank_pair(RANK)
    for wrong in ((a[:, 1:], b), (a, b[1:]), (a[1:], b)):
        with pytest.raises(ValueError, match="does not fit a layer of 256 inputs and 24 outputs"):
            layer.append_low_rank(*wrong)
    with pytest.raises(ValueError, match="cannot drop 1 ranks"):
        layer.drop_low_rank(1)


@pytest.mark.parametrize("format", ["fp8", "int8", "nvfp4"])
def test_token_scales_given_from_outside_are_the_ones_used(format):
    """Twice the scale that a token would choose: half the codes, the same values up to rounding."""
    layer, _, _, _, x = layer_and_input(f"{format}-{format}", False, torch.float32, (5, K))
    amax = x.abs().amax(-1, keepdim=True)
    own = encode.block_scale(amax.unsqueeze(-1), FORMATS[format], None)
    own = encode.global_scale_for(amax, FORMATS[format]) if format == "nvfp4" else own
    given = [layer.tensors._replace(input_scale=scale) for scale in (None, own, own * 1.7)]
    y = [ops.quantized_linear(x, *pack_named(each, layer.scheme)) for each in given]
    assert torch.equal(y[0], y[1]) and not torch.equal(y[0], y[2])
    assert 0 < (y[2] - y[0]).norm() / y[0].norm() < 0.1


def test_scales_of_128_columns_keep_an_outlier_to_its_block():
    """E4M3 holds 2^18 between its largest and smallest number: a channel beyond takes all of a token's others to zero.

    Outliers below that cost a scale per token nothing, and neither do tokens that are larger than others.
    """
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(16, 512, generator=noise)
    x[:4] *= 2.0**10
    for size, least, most in ((2.0**6, -0.5, 0.5), (2.0**20, 25.0, 1e3)):
        x[:, 7] = size * x.abs().amax(1)
        decibels = []
        for name in ("fp8", "fp8_1x128"):
            rest = (ops.quantize_activation(x, FORMATS[name]).dequantize() - x)[:, 128:]
            decibels.append(float(10 * torch.log10(x[:, 128:].square().sum() / rest.square().sum())))
        assert least < decibels[1] - decibels[0] < most and decibels[1] > 30, (size, decibels)


def test_a_token_scale_for_a_block_format_is_refused():
    with pytest.raises(ValueError, match="mxfp8 takes its scales from each block"):
        ops.quantize_activation(torch.ones(2, 64), FORMATS["mxfp8"], torch.ones(2, 1))


def test_an_input_of_another_width_is_refused():
    for scheme in ("int8-int8", "nvfp4-nvfp4", "fp8-16bit"):
        layer, *_ = layer_and_input(scheme, False, torch.bfloat16, (1, K))
        with pytest.raises(ValueError, match=r"input \(2, 128\) does not fit the weight \(N, K\) = \(24, 256\)"):
            layer(torch.ones(2, 128))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_an_input_that_somebody_cast_to_the_weight_s_dtype_is_refused(dtype):
    """T5 casts what `wo` reads to the dtype of its weight."""
    layer, *_ = layer_and_input("fp8-16bit", False, torch.bfloat16, (1, K))
    with pytest.raises(ValueError, match="expected float16, bfloat16 or float32"):
        layer(torch.ones(2, K).to(dtype))


def test_a_weight_in_another_format_than_the_scheme_is_refused():
    weight = QuantizedTensor.quantize(torch.randn(N, K), "int4_g128")
    with pytest.raises(ValueError, match="scheme int4-16bit needs a weight in int4, got int4_g128"):
        QuantLinear.from_quantized(weight, None, Scheme.parse("int4-16bit"))


@pytest.mark.parametrize(("scheme", "given"), [("nvfp4-nvfp4", True), ("nvfp4-nvfp4-static", False), ("fp8-fp8", True)])
def test_input_scale_comes_exactly_with_a_static_scheme(scheme, given):
    parsed = Scheme.parse(scheme)
    weight = QuantizedTensor.quantize(torch.randn(N, K), parsed.weights)
    with pytest.raises(ValueError, match="takes no input_scale" if given else "needs input_scale"):
        QuantLinear.from_quantized(weight, None, parsed, torch.ones(()) if given else None)


def test_a_shape_that_the_format_cannot_hold_is_refused_before_loading():
    with pytest.raises(ValueError, match=r"QuantLinear: shape \(8, 40\) does not fit nvfp4"):
        QuantLinear(40, 8, True, Scheme.parse("nvfp4-nvfp4"), torch.bfloat16)


@pytest.mark.parametrize("weights", [*FORMATS, "int4_g128"])
@pytest.mark.parametrize("activations", [None, *(name for name, row in FORMATS.items() if not row.spans_rows)])
def test_every_scheme_survives_its_text_form(weights, activations):
    for static in {False, activations in ("nvfp4", "fp8_tensor")}:
        for rank in (0, 1, 128):
            scheme = Scheme(find_format(weights), activations and FORMATS[activations], static, rank)
            assert Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    "text",
    [
        *("", "nvfp4", "nvfp4-", "nvfp5-nvfp4", "nvfp4-nvfp4-dynamic", "nvfp4-nvfp4-static-x", "fp8-fp8-static"),
        *("nvfp4-16bit-static", "16bit-fp8", "int4_g32-16bit", "nvfp4_g32-nvfp4", "NVFP4-nvfp4"),
        *("fp8_128x128-fp8_128x128", "fp8-fp8_128x128"),
        *("fp8-fp8-r0", "fp8-fp8-r", "fp8-fp8-r1-r2", "nvfp4-nvfp4-r4-static", "fp8-fp8-r-4"),
    ],
)
def test_an_unknown_scheme_is_refused(text):
    why = r"unknown quantization scheme|unknown format|not offered|static input scale|blocks of rows"
    with pytest.raises(ValueError, match=why):
        Scheme.parse(text)


LARGEST_CODES = """
import torch
from fluxq.kernels.ops import int8_product
for m, k, n in ((1, 3072, 64), (17, 64, 48), (64, 3100, 256)):
    a = torch.full((m, k), 127, dtype=torch.int8)
    b = torch.full((n, k), 127, dtype=torch.int8)
    b[::2], b[::3] = -127, -128
    assert torch.equal(int8_product(a, b).double(), a.double() @ b.double().t()), f"wrong at {m} x {k} x {n}"
"""


def test_the_int8_product_is_exact_for_the_largest_codes():
    exec(LARGEST_CODES, {})


@pytest.mark.slow
def test_the_int8_product_is_exact_on_processors_without_vnni_too():
    """oneDNN, told to use AVX2 only, saturates pairs of int8 products at 16 bits."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", LARGEST_CODES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_int8_product_is_exact_without_int_mm(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-127, 128, (5, 3000), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (7, 3000), generator=generator, dtype=torch.int8)
    monkeypatch.setattr(ops, "int_mm_is_exact", lambda device_type: False)
    assert torch.equal(ops.int8_product(a, b).double(), a.double() @ b.double().t())


@pytest.fixture
def clock(monkeypatch):
    """A function that says what each exact int8 product takes by a clock that nothing else moves, and what ran."""
    ran, now, own, columns = [], [0.0], torch._int_mm, ops._product_of_columns

    def set_to(int_mm: float, by_columns: float) -> list[str]:
        def timed(name, seconds, work):
            def run(*operands):
                ran.append(name)
                now[0] += seconds * operands[0].numel()
                return work(*operands)

            return run

        monkeypatch.setattr(torch, "_int_mm", timed("int_mm", int_mm, own))
        monkeypatch.setattr(ops, "_product_of_columns", timed("columns", by_columns, columns))
        ops.int8_seconds.cache_clear()
        return ran

    monkeypatch.setattr(ops.time, "perf_counter", lambda: now[0])
    yield set_to
    ops.int8_seconds.cache_clear()


@pytest.fixture
def int_mm_is_exact(monkeypatch):
    """As on a CPU with VNNI; the codes of the tests that use it saturate nowhere."""
    monkeypatch.setattr(ops, "int_mm_is_exact", lambda device_type: True)


@pytest.mark.parametrize(("seconds", "chosen"), [((20.0, 1.0), "columns"), ((1.0, 3.0), "int_mm")])
def test_of_two_exact_products_the_faster_one_is_measured_once_and_taken(clock, int_mm_is_exact, seconds, chosen):
    ran = clock(*seconds)
    a, b = torch.ones(40, 96, dtype=torch.int8), torch.ones(8, 96, dtype=torch.int8)
    ops.int8_product(a, b)
    assert {*ran[:-1]} == {"int_mm", "columns"} and ran[-1] == chosen
    ran.clear()
    ops.int8_product(a, b)
    assert ran == [chosen]
    name, reason = ops.implementation(Scheme.parse("int8-int8"), "cpu")
    m, _, k = ops._TIMED
    assert name == (ops.INT_MM if chosen == "int_mm" else ops.COLUMNS)
    assert all(f"{1e3 * m * k * each:.2g} ms" in reason for each in seconds), reason


def test_a_product_that_saturates_is_never_taken_however_fast_it_is(clock, monkeypatch):
    ran = clock(1.0, 1000.0)
    monkeypatch.setattr(ops, "int_mm_is_exact", lambda device_type: False)
    ops.int8_product(torch.ones(40, 96, dtype=torch.int8), torch.ones(8, 96, dtype=torch.int8))
    assert ran == ["columns"]
    assert ops.implementation(Scheme.parse("int8-int8"), "cpu")[0] == ops.COLUMNS


@pytest.mark.parametrize("scheme", ["int8-int8", "int8-int8-center-smooth-h64"])
def test_which_int8_product_is_taken_changes_no_bit(clock, scheme, monkeypatch):
    """With codes that saturate nowhere, so that both products are exact on every CPU."""
    parsed, noise = Scheme.parse(scheme), torch.Generator().manual_seed(0)
    n, k = 2100, 1200 // 64 * 64  # more rows than are multiplied at a time, more columns than fp32 adds up exactly
    codes = torch.randint(-60, 61, (n, k), generator=noise, dtype=torch.int8)
    weight = QuantizedTensor(codes, torch.rand(n, generator=noise), None, (n, k), FORMATS["int8"])
    beside = {"pre_quant_mean": torch.randn(k, generator=noise), "pre_quant_scale": torch.rand(k, generator=noise)}
    layer = QuantLinear.from_quantized(weight, torch.randn(n), parsed, None, beside if parsed.smooth else None)
    x, results = torch.randn(3, 5, k, generator=noise), []
    monkeypatch.setattr(ops, "int_mm_is_exact", lambda device_type: True)
    for seconds in ((1.0, 2.0), (2.0, 1.0)):
        ran = clock(*seconds)
        results.append(layer(x))
    assert {"int_mm", "columns"} == {*ran} and torch.equal(*results)


ONLY_WHEN_IT_RUNS = """
import torch, fluxq
from fluxq.kernels import ops
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import Scheme
w = QuantizedTensor.quantize(torch.randn(32, 64), "int8")
layer = QuantLinear.from_quantized(w, None, Scheme.parse("int8-int8"))
x = torch.randn(4, 64)
ops.int_mm_is_exact = lambda device_type: True
with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fakes:
    assert layer(fakes.from_tensor(x)).shape == (4, 32)
program = torch.export.export(layer, (x,))
assert ops.int8_seconds.cache_info().currsize == 0
with torch.device("meta"):  # what a library may have around a call
    y = layer(x)
assert ops.int8_seconds.cache_info().currsize == 1
assert torch.equal(program.module()(x), y)
"""


@pytest.mark.slow
def test_products_are_measured_when_one_is_needed_and_not_at_import_or_while_tracing():
    done = forked.run("-c", ONLY_WHEN_IT_RUNS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scheme", ["fp8-fp8", "nvfp4-nvfp4", "int8-int8", "int4-16bit"])
@pytest.mark.parametrize("int_mm", [True, False])
def test_autocast_changes_no_bit(scheme, int_mm, monkeypatch):
    """Inside it, fp32 products would be taken in bf16; the fallback of the int8 product would be inexact."""
    if not int_mm:
        monkeypatch.setattr(ops, "int_mm_is_exact", lambda device_type: False)
    layer, _, _, _, x = layer_and_input(scheme, True, torch.float32, (5, K))
    x.requires_grad_()
    pull = torch.randn(5, N)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = layer(x)
            results.append((y, *torch.autograd.grad(y, x, pull)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_cast_to_the_dtype_it_computes_in_is_a_move():
    layer, _, _, _, x = layer_and_input("fp8-fp8", True, torch.bfloat16, (5, K))
    before, want = {n: t.clone() for n, t in layer.state_dict().items()}, layer(x)
    layer.to("cpu", torch.bfloat16)
    assert all(t.dtype == before[n].dtype for n, t in layer.state_dict().items()) and torch.equal(layer(x), want)
    layer.to("meta", torch.bfloat16)
    assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
    with pytest.raises(ValueError, match=r"cannot be cast to torch\.float16"):
        layer.to(torch.float16)
