"""Layers that change x before they round it: what is computed, stored, loaded, prepared, sharded and saved.

The simulation here is written from the published arithmetic alone and starts at the 16-bit weight; nothing of fluxq
computes in it.
"""

import copy
import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from shared import quantization_of
from torch import Tensor, nn

import fluxq
from fluxq import tiny
from fluxq.base.model import ModelFolder
from fluxq.kernels import dispatch, findings, launch, ops
from fluxq.kernels.all_ops import OPS
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor, pack_named
from fluxq.kernels.transforms import InputTransform
from fluxq.quantize import checkpoint as ckpt
from fluxq.quantize.structure import list_linears
from fluxq.quantize.verify import verify
from fluxq.recipes.formats import FEATURES, Scheme
from fluxq.recipes.plan import LayerPlan, Plan
from fluxq.runtime.layout import StoredLayer, add_row_scale, as_stored, lay_out, reencode_layer, swizzle
from fluxq.runtime.shard import RowParallel, shard

N, K = 48, 128
GLOBAL = 0.004  # the static global scale of these tests
SCHEMES = [
    "nvfp4-nvfp4-static-center-smooth-d16-h128-46-r8",
    "nvfp4-nvfp4-static",
    "nvfp4-nvfp4-46",
    "nvfp4-nvfp4-static-46",
    "nvfp4-nvfp4-center",
    "nvfp4-nvfp4-h16",
    "nvfp4-nvfp4-d4-r4",
    "mxfp4-mxfp4-smooth-h32",
    "mxfp8-mxfp8-center-h64",
    "fp8-fp8-center-smooth",
    "int8-int8-center-smooth-d8-h128-r8",
    "int8-int8-h32",
    "int8-int8-hr16",
    "int8-int8-center-smooth-d8-hr64-r8",
    "int4-int4-smooth-h64-r8",
    "int4-int4",
    "int4-16bit-center-smooth-d8-h32-r4",
    "nvfp4-16bit-smooth",
]


# --- the simulation


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code."""
    distance = (x.abs().clamp(max=6).unsqueeze(-1) - E2M1).abs()
    tied = distance == distance.amin(-1, keepdim=True)
    even = tied & (torch.arange(8) % 2 == 0)
    index = torch.where(even.any(-1), even.int().argmax(-1), tied.int().argmax(-1))
    return torch.copysign(E2M1[index], x)


def nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def powers_of_two(x: Tensor, format: str) -> Tensor:
    blocks = x.reshape(x.shape[0], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True).double()
    if format == "mxfp8":
        scale = torch.exp2(torch.ceil(torch.log2(nonzero(amax) / 448))).float()
        return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)
    floor = torch.floor(torch.log2(nonzero(amax))) - 2
    rounded = [
        nearest_e2m1(blocks / torch.exp2(e).float()) * torch.exp2(e).float() for e in (floor, floor + 1, floor - 1)
    ]
    errors = torch.stack([(r.double() - blocks.double()).square().sum(-1) for r in rounded])
    best = errors.argmin(0)
    return torch.stack(rounded).gather(0, best[None, ..., None].expand(1, *blocks.shape))[0].reshape(x.shape)


def nvfp4(x: Tensor, g: Tensor, four_over_six: bool) -> Tensor:
    """Four over six: whichever scale has the least squared error, in units of the first; it stays in a tie."""
    blocks = x.reshape(x.shape[0], -1, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    scales = [torch.where(amax == 0, 1.0, (amax / n / g.reshape(-1, 1, 1)).clamp(2.0**-9, 448)) for n in (6, 4)]
    scales = [scale.to(torch.float8_e4m3fn).float() for scale in scales]
    found, errors = [], []
    for scale in scales:
        step = scale * g.reshape(-1, 1, 1)
        codes = nearest_e2m1(blocks / step)
        error = ((codes - blocks / step) * (scale / scales[0])) ** 2
        while error.shape[-1] > 1:  # neighbours first: in fp32 the order decides near ties
            error = error[..., 0::2] + error[..., 1::2]
        found.append(codes * step)
        errors.append(error)
    return (torch.where(errors[1] < errors[0], found[1], found[0]) if four_over_six else found[0]).reshape(x.shape)


def rounded(x: Tensor, format: str, g: Tensor | None = None, four_over_six: bool = False) -> Tensor:
    """x (rows, K) through a format; g: nvfp4's global scale, that of each row if None."""
    if format == "nvfp4":
        own = nonzero(x.abs().amax(-1) / (6 * (256 if four_over_six else 448)))
        return nvfp4(x, own if g is None else g, four_over_six)
    if format in ("mxfp4", "mxfp8"):
        return powers_of_two(x, format)
    if format == "fp8":
        scale = nonzero(x.abs().amax(-1, keepdim=True) / 448)
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    blocks = x.reshape(x.shape[0], -1, 64)
    scale = nonzero((blocks.abs().amax(-1, keepdim=True) / 7).bfloat16().float())
    return (torch.round(blocks / scale).clamp(-8, 7) * scale).reshape(x.shape)


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = nonzero(x.abs().amax(-1, keepdim=True) / 127)
    return torch.round(x / scale).clamp(-127, 127), scale


def butterfly(v: Tensor, size: int, regular: bool = False) -> Tensor:
    """The fast Walsh-Hadamard transform of each block of columns, over its root; the regular one four at a time."""
    if regular:
        return butterfly_of_four(v, size)
    v, columns = v.clone(), torch.arange(v.shape[1])
    half = 1
    while half < size:
        low = columns[(columns % size) & half == 0]
        a, b = v[:, low], v[:, low + half]
        v[:, low], v[:, low + half] = a + b, a - b
        half *= 2
    return v * size**-0.5


def butterfly_of_four(v: Tensor, size: int) -> Tensor:
    v, columns, step = v.clone(), torch.arange(v.shape[1]), 1
    while step < size:
        first = columns[columns // step % 4 == 0]
        a, b, c, d = (v[:, first + i * step] for i in range(4))
        sums = ((a + b) + (c - d), (a + b) - (c - d), (c + d) + (a - b), (c + d) - (a - b))
        for i, total in enumerate(sums):
            v[:, first + i * step] = total
        step *= 4
    return v * size**-0.5


def matrix(size: int, regular: bool) -> Tensor:
    h = torch.ones(1, 1)
    of_four = [[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]
    while len(h) < size:
        h = torch.kron(torch.tensor(of_four if regular else [[1.0, 1.0], [1.0, -1.0]]), h)
    return h / size**0.5


class Simulated(nn.Module):
    """A Linear (weight (N, K), bias) under a scheme, with what is known of its input."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: str, known: dict[str, Tensor]) -> None:
        super().__init__()
        self.bias, self.known = bias, known
        self.format, self.activations, *self.words = scheme.split("-")
        found = [re.fullmatch(r"(d|hr?|r)(\d+)", word) for word in self.words]
        sizes = {match[1]: int(match[2]) for match in found if match}
        self.hadamard, self.regular = sizes.get("hr", sizes.get("h", 0)), "hr" in sizes
        w = weight.float()
        if "r" in sizes:
            w = w - known["b"].float() @ known["a"].float()
        if "center" in self.words:
            self.bias = ((0 if bias is None else bias.float()) + w @ known["mean"].float()).to(known["mean"].dtype)
        if "smooth" in self.words:
            w = w / known["smooth"].float()
        if "d" in sizes:
            p = known["basis"].float()
            along = w @ p.T
            w = w - along @ p
            self.out = (2 * along - along @ (p @ p.T)).to(known["basis"].dtype)  # P P^T is not quite I in 16 bit
        if self.hadamard:
            w = (w.reshape(-1, self.hadamard) @ matrix(self.hadamard, self.regular)).reshape(w.shape)
        self.rotated = w
        if self.format == "int8":
            self.codes, self.scale = int8(w)
        else:
            self.w = rounded(w, self.format, w.abs().amax() / (6 * 448))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_empty(*x.shape[:-1], len(self.rotated))
        z, extra = rows.float(), []
        if "center" in self.words:
            z = z - self.known["mean"].float()
        if "smooth" in self.words:
            z = z * self.known["smooth"].float()
        if hasattr(self, "out"):
            p = self.known["basis"].to(x.dtype)
            t = z.to(x.dtype) @ p.T
            z = z - t.float() @ p.float()
            extra.append(t @ self.out.to(x.dtype).T)
        if self.hadamard:
            z = butterfly(z, self.hadamard, self.regular)
        bias = None if self.bias is None else self.bias.float()
        if self.activations == self.format == "int8":
            codes, scale = int8(z)
            y = (codes.double() @ self.codes.double().T).float() * scale * self.scale.T
            y = y if bias is None else y + bias
        else:
            g = torch.tensor(GLOBAL) if "static" in self.words else None
            q = z if self.activations == "16bit" else rounded(z, self.activations, g, "46" in self.words)
            y = F.linear(q, self.w, bias)
        y = y.to(x.dtype)
        if any(re.fullmatch(r"r\d+", word) for word in self.words):
            extra.append((rows @ self.known["a"].to(x.dtype).T) @ self.known["b"].to(x.dtype).T)
        for term in extra:
            y = y + term
        return y.reshape(*x.shape[:-1], -1)


# --- layers


def known_of(n: int, k: int, scheme: Scheme, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """A made-up input's mean, smoothing, principal directions, and a low-rank branch."""
    noise = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(k, max(scheme.deflate, 1), generator=noise)).Q.T
    made = {
        "mean": torch.randn(k, generator=noise) / 4,
        "smooth": torch.rand(k, generator=noise) + 0.5,
        "basis": basis,
        "a": torch.randn(scheme.rank, k, generator=noise) / 8,
        "b": torch.randn(n, scheme.rank, generator=noise) / 8,
    }
    return {name: tensor.to(dtype).contiguous() for name, tensor in made.items()}


def tensors_of(w: Tensor, bias: Tensor | None, scheme: Scheme, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint stores of a layer, made by the package's own functions."""
    dtype = known["mean"].dtype
    transform = InputTransform(
        known["mean"].float() if scheme.center else None,
        known["smooth"].float() if scheme.smooth else None,
        known["basis"].float() if scheme.deflate else None,
        scheme.hadamard,
        scheme.regular,
    )
    left = w.float()
    if scheme.rank:
        left = left - known["b"].float() @ known["a"].float()
    v, out = transform.of_weight(left)
    made = QuantizedTensor.quantize(v, scheme.weights).tensors()
    extra = transform.extra_bias(left)
    if extra is not None:
        bias = (extra if bias is None else bias.float() + extra).to(dtype)
    if bias is not None:
        made["bias"] = bias
    if scheme.static_input:
        made["input_scale"] = torch.tensor(GLOBAL)
    if scheme.center:
        made["pre_quant_mean"] = known["mean"]
    if scheme.smooth:
        made["pre_quant_scale"] = known["smooth"]
    if out is not None:
        made |= {"deflate_basis": known["basis"], "deflate_out": out.to(dtype)}
    if scheme.rank:
        made |= {"svdquant_lora_a": known["a"], "svdquant_lora_b": known["b"]}
    return made


def layer_of(scheme: str, *, n: int = N, k: int = K, bias: bool = True, dtype: torch.dtype = torch.bfloat16):
    """(QuantLinear, Simulated) of one random weight."""
    noise = torch.Generator().manual_seed(3)
    parsed = Scheme.parse(scheme)
    w = (torch.randn(n, k, generator=noise) / 8).bfloat16()
    b = torch.randn(n, generator=noise).to(dtype) if bias else None
    known = known_of(n, k, parsed, dtype)
    made = tensors_of(w, b, parsed, known)
    return QuantLinear.from_tensors(made, (n, k), parsed), Simulated(w, b, scheme, known)


def input_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Tokens around a mean, with an outlier channel."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) + 0.3
    x[..., 7] *= 10
    return x.to(dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1, K), (2, 3, K), (K,), (0, K)], ids=str)
def test_the_output_is_the_simulation_bit_for_bit(scheme: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layer, simulated = layer_of(scheme, dtype=dtype)
    x = input_of(*shape, dtype=dtype)
    kept = x.clone()
    assert torch.equal(layer(x), simulated(x))
    assert torch.equal(x, kept)


def test_the_steps_are_those_of_the_simulation_because_they_are_done_in_this_order() -> None:
    """Each fault alone turns the test above red."""
    scheme = "nvfp4-nvfp4-center-smooth-d8-h64-46"
    layer, simulated = layer_of(scheme)
    x = input_of(5, K)
    given = dict(layer.branches)
    faults = {
        "pre_quant_mean": -given["pre_quant_mean"],
        "pre_quant_scale": given["pre_quant_scale"].flip(0),
        "deflate_basis": given["deflate_basis"].flip(0),
        "deflate_out": given["deflate_out"].flip(0),
    }
    for name, wrong in faults.items():
        layer.get_parameter(name).data = wrong
        assert not torch.equal(layer(x), simulated(x)), name
        layer.get_parameter(name).data = given[name]
    for wrong in (scheme.replace("h64", "h32"), scheme.replace("-46", "")):
        layer.scheme = Scheme.parse(wrong)
        assert not torch.equal(layer(x), simulated(x)), wrong


# --- the layer


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plain_linear_computes_the_same_but_for_the_rounding_of_x(scheme: str) -> None:
    layer, _ = layer_of(scheme, dtype=torch.float32)
    x = input_of(9, K, dtype=torch.float32)
    plain = layer.dequantized(torch.float32)
    layer.scheme = Scheme.parse(re.sub(r"^(\w+)-\w+", r"\1-16bit", scheme).replace("-static", "").replace("-46", ""))
    assert relative(plain(x), layer(x)) < 2e-6
    assert plain.weight.dtype == torch.float32 and plain.bias is not None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_plain_linear(scheme: str) -> None:
    layer, _ = layer_of(scheme, dtype=torch.float32)
    x = input_of(2, 3, K, dtype=torch.float32).requires_grad_()
    pull = torch.randn(2, 3, N)
    layer(x).backward(pull)
    assert x.grad is not None
    assert relative(x.grad, pull @ layer.dequantized(torch.float32).weight) < 2e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_per_weight_count_what_is_stored(scheme: str) -> None:
    layer, _ = layer_of(scheme, bias="center" in scheme)
    stored = sum(t.numel() * t.element_size() for t in layer.state_dict().values())
    assert layer.bits_per_weight == 8 * stored / (N * K)


def test_a_layer_that_centers_has_a_bias_whatever_the_model_has() -> None:
    layer, simulated = layer_of("int8-int8-center", bias=False)
    assert layer.bias.shape == (N,) and torch.equal(layer(input_of(3, K)), simulated(input_of(3, K)))
    assert QuantLinear(K, N, False, Scheme.parse("int8-int8-center"), torch.bfloat16).bias is not None
    assert QuantLinear(K, N, False, Scheme.parse("int8-int8-smooth"), torch.bfloat16).bias is None


def test_copies_moves_and_state_dicts_keep_every_bit() -> None:
    layer, _ = layer_of(SCHEMES[0])
    x = input_of(5, K)
    twin = QuantLinear(K, N, True, layer.scheme, torch.bfloat16)
    twin.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), twin, copy.deepcopy(layer).to("cpu", torch.bfloat16)):
        assert torch.equal(other(x), layer(x))
    assert set(layer.state_dict()) == {
        *("weight", "weight_scale", "weight_scale_2", "input_scale", "bias", "pre_quant_mean", "pre_quant_scale"),
        *("deflate_basis", "deflate_out", "svdquant_lora_a", "svdquant_lora_b"),
    }
    with pytest.raises(ValueError, match=r"cannot be cast to torch\.float16"):
        layer.to(torch.float16)


def test_adapters_are_appended_to_the_branch_that_reads_x_itself() -> None:
    layer, _ = layer_of("nvfp4-nvfp4-center-smooth-d8-h64")
    x, before = input_of(5, K), {name: t.clone() for name, t in layer.state_dict().items()}
    a, b = torch.randn(4, K).bfloat16() / 8, torch.randn(N, 4).bfloat16()
    expected = layer(x) + F.linear(F.linear(x, a), b)
    layer.append_low_rank(a, b)
    assert torch.equal(layer(x), expected) and str(layer.scheme) == "nvfp4-nvfp4-center-smooth-d8-h64-r4"
    layer.drop_low_rank(4)
    after = layer.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("scheme", "without", "error"),
    [
        ("fp8-fp8-smooth", "pre_quant_scale", "needs pre_quant_scale"),
        ("fp8-fp8-center", "bias", "needs bias"),
        ("fp8-fp8-d4", "deflate_out", "needs deflate_out"),
        ("fp8-fp8-r4", "svdquant_lora_a", "needs svdquant_lora_a"),
    ],
)
def test_a_layer_is_not_made_of_too_few_or_too_many_tensors(scheme: str, without: str, error: str) -> None:
    parsed = Scheme.parse(scheme)
    made = tensors_of(torch.randn(N, K), torch.randn(N), parsed, known_of(N, K, parsed, torch.float32))
    q = QuantizedTensor(made.pop("weight"), made.pop("weight_scale"), None, (N, K), parsed.weights)
    lacking = {name: tensor for name, tensor in made.items() if name != without}
    with pytest.raises(ValueError, match=f"scheme {scheme} {error}"):
        QuantLinear.from_quantized(q, lacking.pop("bias", None), parsed, None, lacking)
    bias = made.pop("bias")
    with pytest.raises(ValueError, match=r"scheme fp8-fp8-h16 takes no "):
        QuantLinear.from_quantized(q, bias, Scheme.parse("fp8-fp8-h16"), None, {"pre_quant_mean": torch.ones(K)})
    if without != "bias":
        with pytest.raises(ValueError, match=rf"{without} is \(3,\), expected"):
            QuantLinear.from_quantized(q, bias, parsed, None, made | {without: torch.ones(3)})


def test_steps_that_do_not_fit_the_input_are_named() -> None:
    with pytest.raises(ValueError, match="K = 192 is no multiple of its Hadamard blocks of 128 columns"):
        QuantLinear(192, N, True, Scheme.parse("fp8-fp8-h128"), torch.bfloat16)
    with pytest.raises(ValueError, match="deflates 200 directions of an input that has 192"):
        QuantLinear(192, N, True, Scheme.parse("fp8-fp8-d200"), torch.bfloat16)
    layer, _ = layer_of("fp8-fp8-center-smooth")
    given, scheme = layer.tensors, layer.scheme
    with pytest.raises(ValueError, match="scheme fp8-fp8-center-smooth needs smooth"):
        ops.quantized_linear(input_of(2, K), *pack_named(given._replace(smooth=None), scheme))
    with pytest.raises(ValueError, match="scheme fp8-fp8-center-smooth takes no basis"):
        ops.quantized_linear(input_of(2, K), *pack_named(given._replace(basis=torch.ones(2, K)), scheme))


# --- the op


@pytest.mark.often(1)
@pytest.mark.parametrize("scheme", [SCHEMES[0], "int8-int8-center-smooth-d8-h128-r8", "int4-int4-smooth-h64-r8"])
def test_the_op_passes_opcheck_and_compiles_without_a_graph_break(scheme: str) -> None:
    layer, _ = layer_of(scheme)
    x = input_of(5, K)
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    checks += ["test_schema"] * ("nvfp4" not in scheme)  # compares with allclose, which torch lacks for E4M3 scales
    torch.library.opcheck(ops.quantized_linear, (x, *layer.operands), test_utils=checks)
    compiled = torch.compile(nn.Sequential(layer, nn.GELU()), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), F.gelu(layer(x)))


@pytest.mark.parametrize("scheme", [SCHEMES[0], "int8-int8-center-smooth-d8-h128-r8"])
def test_autocast_changes_no_bit(scheme: str) -> None:
    layer, _ = layer_of(scheme, dtype=torch.float32)
    x = input_of(5, K, dtype=torch.float32).requires_grad_()
    pull = torch.randn(5, N)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = layer(x)
            results.append((y, *torch.autograd.grad(y, x, pull)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_nan_in_a_token_spoils_that_token_only() -> None:
    layer, _ = layer_of("nvfp4-nvfp4-center-smooth-d8-h64-46")
    x = input_of(3, K)
    x[1, 40] = math.nan
    y = layer(x)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


# --- prepared for a device


@pytest.mark.parametrize(
    ("scheme", "kept"),
    [
        ("nvfp4-nvfp4-static-center-smooth-d16-h128-46-r8", "-center-smooth"),
        ("mxfp4-mxfp4-center-r8", "-center"),
        ("int4-int4-smooth-h64-r8", "-smooth"),
        ("nvfp4-nvfp4-center-smooth", "-center-smooth"),
        ("nvfp4-nvfp4-d4-h16-r4", ""),
        ("fp8-fp8-center", "-center"),
    ],
)
def test_a_layer_encoded_anew_only_centers_and_smooths_and_is_saved_as_it_was(
    scheme: str, kept: str, tmp_path: Path
) -> None:
    layer, _ = layer_of(scheme)
    stored = {name: t.detach().clone() for name, t in layer.state_dict().items()}
    save_file({f"block.{name}": t for name, t in stored.items()}, tmp_path / "model.safetensors")
    plain, (merged, bias), x = layer.dequantized(torch.float32), layer.merged(), input_of(9, K)
    reencode_layer(layer, ("int8", "fp8"), StoredLayer(tmp_path, "block"))
    assert layer.prepared and str(layer.scheme) in (f"int8-int8{kept}", f"fp8-fp8{kept}")
    assert str(layer.stored_scheme) == scheme and layer.scale_names == ("weight_scale",)
    vectors = {"center": "pre_quant_mean", "smooth": "pre_quant_scale"}
    expected = {"bias", "weight", "weight_scale", *(vectors[word] for word in kept.split("-") if word)}
    assert {name for name, _ in layer.named_parameters()} == expected
    assert relative(layer.quantized_weight.dequantize(), merged) == pytest.approx(layer.prepared.added_error, rel=1e-3)
    assert bias is not None and torch.equal(layer.bias, bias.bfloat16())
    found = layer.dequantized(torch.float32)
    assert relative(found.weight, plain.weight) < 0.03 and relative(found.bias, plain.bias) < 0.01
    assert relative(layer(x), plain(x.float())) < 0.05
    after = as_stored(layer)
    assert after.keys() == stored.keys()
    for name, tensor in stored.items():
        assert after[name].dtype == tensor.dtype and torch.equal(
            after[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        ), name


def test_8_bit_activations_are_better_than_the_4_bit_ones_in_whose_place_they_come() -> None:
    """With channels 60 times as large as others: in one weight for x itself, 8 bits would be worse than 4."""
    noise = torch.Generator().manual_seed(5)
    n, k, outliers = 96, 256, torch.arange(0, 256, 37)
    larger = torch.ones(k).index_fill(0, outliers, 60.0)
    w = torch.randn(n, k, generator=noise) / k**0.5 / larger  # every channel counts as much in y
    fitted, held = ((torch.randn(512, k, generator=noise) + 2) * larger for _ in range(2))
    scheme = Scheme.parse("nvfp4-nvfp4-center-smooth")
    mean = fitted.mean(0).bfloat16()
    smooth = (w.abs().amax(0) / (fitted - mean.float()).abs().amax(0)).sqrt().bfloat16()
    made = tensors_of(w, torch.zeros(n, dtype=torch.bfloat16), scheme, {"mean": mean, "smooth": smooth})
    layer = QuantLinear.from_tensors(made, (n, k), scheme)
    x = held.bfloat16()
    exact = x.float() @ w.T
    collapsed = layer.dequantized(torch.float32)
    of_x = QuantizedTensor.quantize(collapsed.weight.data, "int8")
    in_x = QuantLinear.from_quantized(of_x, collapsed.bias.data.bfloat16(), Scheme.parse("int8-int8"))
    native, worse = relative(layer(x), exact), relative(in_x(x), exact)
    reencode_layer(layer, ("int8",))
    assert str(layer.scheme) == "int8-int8-center-smooth"
    assert relative(layer(x), exact) < 0.8 * native < native < worse


def test_a_scale_per_row_leaves_the_transforms_and_static_scales_of_4_bit_activations_behind() -> None:
    layer, _ = layer_of(SCHEMES[0])
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    plain, x = layer.dequantized(torch.float32), input_of(9, K)
    add_row_scale(layer, ("int8",))
    assert str(layer.scheme) == "nvfp4-int8-center-smooth-d16-h128-r8" and str(layer.stored_scheme) == SCHEMES[0]
    assert relative(layer(x), plain(x.float())) < 0.03
    after = as_stored(layer)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_swizzled_scales_change_no_bit() -> None:
    layer, simulated = layer_of(SCHEMES[0])
    swizzle(layer)
    assert torch.equal(layer(input_of(5, K)), simulated(input_of(5, K)))


# --- on a GPU: on Triton's interpreter


ON_CHIPS = [
    ("int8-int8-center-smooth-d8-h128-r8", "sm_80", "scaled_matmul"),
    ("fp8-fp8-center-smooth", "sm_89", "scaled_matmul"),
    ("nvfp4-nvfp4-static-center-smooth-h128-46-r8", "sm_100", "block_scaled_matmul"),
    ("nvfp4-nvfp4-static-center-smooth-d16-h128-46-r8", "sm_120", "block_scaled_matmul"),
    ("nvfp4-nvfp4-46", "sm_120", "block_scaled_matmul"),
    ("mxfp8-mxfp8-center-h64", "sm_120", "block_scaled_matmul"),
    ("int4-16bit-center-smooth-d8-h32-r4", "sm_90", "weight_only_matmul"),
    ("nvfp4-16bit-smooth", "sm_80", "weight_only_matmul"),
]


@pytest.fixture
def everything_is_offered(monkeypatch):
    formats = {op.name: op.formats for op in OPS.values()}

    def refusal(op: str, name: str, chip: str) -> str:
        return "" if name in formats[op] else "no unit"

    monkeypatch.setattr(dispatch, "refusal", refusal)
    monkeypatch.setattr(findings, "timings", lambda scheme, chip: [])
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


def assert_near(found: Tensor, expected: Tensor, exact: Tensor) -> None:
    """Within what 16 bit rounds; or, where z is in 16 bit too and falls to other codes, no farther from exact."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    worst = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert worst < 2**-7 or relative(found, exact) < 1.05 * relative(expected, exact), worst


@pytest.mark.often(1)
@pytest.mark.parametrize(("scheme", "chip", "implementation"), ON_CHIPS)
@pytest.mark.parametrize("m", [1, 33])
def test_kernels_compute_the_scheme(everything_is_offered, scheme: str, chip: str, implementation: str, m: int) -> None:
    layer, _ = layer_of(scheme)
    assert dispatch.choose(layer.scheme, chip, m, N, K).implementation == implementation
    x = input_of(1, m, K)
    with interpreting():
        found = launch.quantized_linear(x, *layer.operands, chip=chip)
    assert_near(found, layer(x), layer.dequantized(torch.float32)(x.float()))


@pytest.mark.often(1)
@pytest.mark.parametrize("scheme", [SCHEMES[0], "int4-int4-smooth-h64-r8"])
def test_4_bit_weights_decoded_to_8_bit_keep_their_transforms(everything_is_offered, scheme: str) -> None:
    layer, _ = layer_of(scheme)
    add_row_scale(layer, ("int8",))
    x = input_of(33, K)
    with interpreting():
        found = launch.quantized_linear(x, *layer.operands, chip="sm_90")
    assert_near(found, layer(x), layer.dequantized(torch.float32)(x.float()))


@pytest.mark.often(1)
@pytest.mark.parametrize("chip", ["sm_80", "sm_89", "sm_90"])
def test_an_8_bit_weight_made_at_load_keeps_centering_and_smoothing(everything_is_offered, chip: str) -> None:
    layer, _ = layer_of(SCHEMES[0])
    reencode_layer(layer, ("fp8",) if chip == "sm_89" else ("int8",))
    x = input_of(33, K)
    with interpreting():
        found = launch.quantized_linear(x, *layer.operands, chip=chip)
    assert_near(found, layer(x), layer.dequantized(torch.float32)(x.float()))


def test_a_layer_of_int4_activations_becomes_one_of_8_bit(everything_is_offered) -> None:
    kept, anew = layer_of("int4-int4-smooth-h64-r8")[0], layer_of("int4-int4-smooth-h64-r8")[0]
    lay_out(kept, "sm_90", "memory", None)
    lay_out(anew, "sm_90", "speed", None)
    assert re.fullmatch(r"int4-(int8|fp8)-smooth-h64-r8", str(kept.scheme))
    assert str(anew.scheme) in ("int8-int8-smooth", "fp8-fp8-smooth")


def test_steps_that_lack_a_tensor_are_named_on_a_gpu_too(everything_is_offered) -> None:
    layer, _ = layer_of("fp8-fp8-center-smooth")
    with pytest.raises(ValueError, match="needs mean"):
        launch.quantized_linear(
            input_of(3, K), *pack_named(layer.tensors._replace(mean=None), layer.scheme), chip="sm_89"
        )


def test_a_lora_that_would_widen_a_layer_that_centers_is_refused() -> None:
    from diffusers.loaders import lora_pipeline

    widen = lora_pipeline._maybe_dequantize_weight_for_expanded_lora
    model: Any = tiny.load().transformer
    assert widen(model, layer_of("fp8-fp8-smooth")[0]).shape == (N, K)
    with pytest.raises(ValueError, match="widens a layer quantized as fp8-fp8-center"):
        widen(model, layer_of("fp8-fp8-center")[0])


# --- sharded


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_cut_over_ranks_are_those_of_the_whole_layer(scheme: str) -> None:
    layer, simulated = layer_of(scheme)
    x = input_of(5, K)
    parts = [shard(layer, "N", rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part(x) for part in parts], -1), simulated(x))
    assert all(part.scheme == layer.scheme for part in parts)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if not Scheme.parse(s).deflate])
def test_inputs_cut_over_ranks_add_up_to_the_whole_layer(scheme: str, monkeypatch) -> None:
    layer, _ = layer_of(scheme, k=256, dtype=torch.float32)
    x = input_of(5, 256, dtype=torch.float32)
    with two_ranks(monkeypatch) as run:
        parts = [RowParallel(shard(layer, "K", rank, 2)) for rank in range(2)]
        outputs = run([lambda part=part, rank=rank: part(x.chunk(2, -1)[rank]) for rank, part in enumerate(parts)])
    assert torch.equal(outputs[0], outputs[1])
    assert (outputs[0] - layer(x)).abs().max() <= 2**-19 * layer(x).abs().max()


@contextmanager
def two_ranks(monkeypatch) -> Iterator[Callable]:
    """Two threads in the place of two processes; all_reduce waits for both."""
    barrier, held = threading.Barrier(2, timeout=600), {}

    def all_reduce(tensor: Tensor, op=dist.ReduceOp.SUM, group=None) -> None:
        held[threading.get_ident()] = tensor.clone()
        barrier.wait()
        both = torch.stack(list(dict(sorted(held.items())).values()))
        barrier.wait()
        tensor.copy_(both.sum(0) if op == dist.ReduceOp.SUM else both.amax(0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with ThreadPoolExecutor(2) as pool:
        yield lambda calls: [future.result() for future in [pool.submit(call) for call in calls]]


def test_what_cannot_be_cut_along_the_input_is_refused() -> None:
    with pytest.raises(
        ValueError, match="deflates its input, along directions that cross all of K: shard it on axis N"
    ):
        shard(layer_of("fp8-fp8-d4")[0], "K", 0, 2)
    with pytest.raises(ValueError, match="128 does not split over 2 ranks in blocks of 128"):
        shard(layer_of("fp8-fp8-h128")[0], "K", 0, 2)


# --- a checkpoint, written by hand


def transformed_checkpoint(folder: Path) -> dict[str, Simulated]:
    """The embedded pipeline with a scheme of SCHEMES for each Linear of its blocks, and their simulations."""
    source = ModelFolder("tiny", tiny.path())
    weights = load_file(tiny.path() / "transformer" / "diffusion_pytorch_model.safetensors")
    linears = [shape for shape in list_linears(source, "transformer") if "blocks." in shape.name]
    layers, simulations, schemes = [], {}, []

    def tensors():
        for number, shape in enumerate(linears):
            planned, name = Scheme.parse(SCHEMES[number % len(SCHEMES)]), shape.name
            known = known_of(shape.n, shape.k, planned, torch.bfloat16, seed=number)
            w, bias = weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias")
            for part, tensor in tensors_of(w, bias, planned, known).items():
                yield f"{name}.{part}", tensor
            simulations[name] = Simulated(w, bias, str(planned), known)
            schemes.append((name, planned))
        yield from weights.items()

    block = folder.parent / "block.safetensors"
    save_file(dict(tensors()), block)
    for shape, (_, scheme) in zip(linears, schemes, strict=True):
        layers.append(LayerPlan(shape.name, shape.n, shape.k, "", "", False, scheme, "test"))
    plan = Plan("flux", "transformer", tuple(layers))
    ckpt.write_component(folder / "transformer", source, plan, [block])
    ckpt.copy_rest(folder, source, ["transformer"])
    return simulations


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> tuple[Path, dict[str, Simulated]]:
    folder = tmp_path_factory.mktemp("by hand") / "checkpoint"
    folder.mkdir()
    return folder, transformed_checkpoint(folder)


@torch.no_grad()
def latents(pipe: diffusers.DiffusionPipeline) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    noise = [torch.Generator("cpu").manual_seed(seed) for seed in (7, 8)]
    return pipe(prompt=list(tiny.PROMPTS[100:102]), generator=noise, output_type="latent", **tiny.CALL_KWARGS).images


@pytest.mark.slow
def test_latents_of_the_loaded_checkpoint_equal_the_simulation(by_hand) -> None:
    folder, simulations = by_hand
    loaded = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    assert {str(m.scheme) for m in loaded.transformer.modules() if isinstance(m, QuantLinear)} == set(SCHEMES)
    simulated = tiny.load()
    for name, simulation in simulations.items():
        simulated.transformer.set_submodule(name, simulation)
    got, want = latents(loaded), latents(simulated)
    assert torch.equal(got, want), f"{int((got != want).sum())} of {want.numel()} latents differ"
    assert want.isfinite().all() and not torch.equal(want, latents(tiny.load()))


def test_the_files_say_what_they_hold_and_are_saved_again_as_they_are(by_hand, tmp_path: Path) -> None:
    folder, _ = by_hand
    config = json.loads((folder / "transformer" / "config.json").read_text())["quantization_config"]
    assert set(config["required_features"]) == FEATURES.keys()
    assert {result.check: result.status for result in verify(folder)} == {
        **dict.fromkeys(("safe", "files", "config", "tensors"), "ok"),
        **dict.fromkeys(("hashes", "digests", "plan"), "not recorded"),
    }
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert_same_files(tmp_path, folder / "transformer")


@pytest.mark.slow
def test_a_prepared_model_is_saved_as_it_was(by_hand, tmp_path: Path) -> None:
    folder = by_hand[0] / "transformer"
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert fluxq.prepare(model, device="cpu")
    model.save_pretrained(tmp_path)
    assert_same_files(tmp_path, folder)


def assert_same_files(saved: Path, loaded: Path) -> None:
    found, expected = (load_file(folder / "diffusion_pytorch_model.safetensors") for folder in (saved, loaded))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name
    assert quantization_of(saved) == quantization_of(loaded)


@pytest.mark.parametrize(
    ("part", "change", "what"),
    [
        ("pre_quant_scale", lambda t: t.index_fill(0, torch.tensor([3]), 0.0), "not finite and above 0"),
        ("pre_quant_mean", lambda t: t.index_fill(0, torch.tensor([3]), math.inf), "not finite"),
        ("deflate_basis", lambda t: t[1:].clone(), "expected"),
        ("deflate_out", lambda t: t.to(torch.int16), "expected"),
        ("pre_quant_mean", None, "missing, though config.json implies it"),
    ],
)
def test_a_damaged_checkpoint_is_found_out(by_hand, tmp_path: Path, part: str, change, what: str) -> None:
    shutil.copytree(by_hand[0], tmp_path / "copy")
    file = tmp_path / "copy" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = min(name for name in tensors if name.endswith(part))
    tensors[name] = change(tensors[name]) if change else tensors[name]
    save_file({n: t for n, t in tensors.items() if change or n != name}, file)
    (failed,) = [result for result in verify(tmp_path / "copy") if result.status == "failed"]
    assert failed.check == "tensors" and len(failed.findings) == 1
    assert failed.findings[0].where == f"transformer: {name}" and what in failed.findings[0].what


def test_a_missing_vector_stops_the_loader(by_hand, tmp_path: Path) -> None:
    shutil.copytree(by_hand[0] / "transformer", tmp_path / "copy")
    file = tmp_path / "copy" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = min(name for name in tensors if name.endswith("pre_quant_scale"))
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"the weight files lack '{name}'"):
        diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "copy", dtype=torch.bfloat16)


def test_a_centering_layer_of_a_model_without_biases_is_loaded_with_one(tmp_path: Path) -> None:
    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=64,
        num_attention_heads=1,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pos_embed_max_size=16,
    ).bfloat16()
    name = "single_transformer_blocks.0.attn.to_q"
    assert model.get_submodule(name).bias is None
    layer, simulated = layer_of("int8-int8-center-smooth", n=64, k=64, bias=False)
    model.set_submodule(name, nn.Identity())
    model.save_config(tmp_path)
    tensors = model.state_dict() | {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "diffusion_pytorch_model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = ckpt.QuantizationConfig.of([(name, layer.scheme)]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = diffusers.AuraFlowTransformer2DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(loaded.get_submodule(name)(input_of(5, 64)), simulated(input_of(5, 64)))


def test_adapters_fuse_into_transformed_layers_and_out_again(by_hand) -> None:
    from peft import LoraConfig

    model: Any = diffusers.FluxTransformer2DModel.from_pretrained(by_hand[0] / "transformer", dtype=torch.bfloat16)
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "proj_mlp", "proj_out"], init_lora_weights=False)
    model.add_adapter(config, adapter_name="style")
    lora = model.single_transformer_blocks[0].proj_mlp
    layer = lora.get_base_layer()
    x = input_of(5, layer.in_features)
    unfused, before = lora(x), {name: t.clone() for name, t in layer.state_dict().items()}
    model.fuse_lora()
    assert relative(lora(x), unfused) < 2**-7  # a branch that is there already is added in one sum with the adapter
    model.unfuse_lora()
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
