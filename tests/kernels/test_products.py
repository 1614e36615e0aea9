"""The ops that multiply quantized matrices: their references against float64, their contract with torch.compile."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels import ops, reencode
from fluxq.kernels.block_scaled_matmul.op import block_scaled_matmul
from fluxq.kernels.products import ProductTensors
from fluxq.kernels.scaled_matmul.op import scaled_matmul
from fluxq.kernels.tensor import QuantizedTensor, pack_named, swizzle_scales, unswizzle_scales
from fluxq.kernels.w4a8_matmul.op import w4a8_matmul
from fluxq.kernels.weight_only_matmul.op import weight_only_matmul
from fluxq.recipes.formats import FORMATS, find_format

M, N, K = 6, 10, 128


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def activation(format: str) -> QuantizedTensor:
    return ops.quantize_activation(noise(M, K) * torch.logspace(-2, 1, M)[:, None], find_format(format))


def weight(format: str) -> QuantizedTensor:
    return QuantizedTensor.quantize(noise(N, K) * torch.logspace(0, -2, N)[:, None], find_format(format))


def following(**changes) -> dict:
    """All that may follow a product, with some of it changed."""
    every = {
        "bias": noise(N, dtype=torch.bfloat16),
        "h": noise(M, 4, dtype=torch.bfloat16),
        "up": noise(N, 4, dtype=torch.bfloat16),
        "gate": noise(2, N, dtype=torch.bfloat16),
        "residual": noise(M, N, dtype=torch.bfloat16),
        "gelu": True,
    }
    return every | changes


NOTHING = dict.fromkeys(("bias", "h", "up", "gate", "residual")) | {"gelu": False}


@dataclass(frozen=True)
class Case:
    """An op, its operands and the names of their formats."""

    op: Any
    x: Tensor
    given: ProductTensors
    formats: str
    dtype: torch.dtype = torch.float32

    def arguments(self, by: dict[str, Any]) -> tuple[Any, ...]:
        """As the op takes them. by: what follows the product."""
        tensors = {name: value for name, value in by.items() if name != "gelu"}
        return (
            self.x,
            *pack_named(self.given._replace(**(tensors if by is not NOTHING else {})), self.formats),
            by["gelu"],
            self.dtype,
        )

    def __call__(self, by: dict[str, Any] = NOTHING) -> Tensor:
        return self.op(*self.arguments(by))


def scaled(format: str, x_scale: str = "row", w_scale: str = "row") -> Case:
    """For fp8_tensor the codes of fp8 under one scale or several."""
    name = "int8" if format == "int8" else "fp8"
    x, w = activation(name), weight(name)
    scales = [q.scale.mean() if which == "tensor" else q.scale for q, which in ((x, x_scale), (w, w_scale))]
    return Case(scaled_matmul, x.codes, ProductTensors(w.codes, scales[1], scales[0]), format)


def in_128s() -> Case:
    x, w = activation("fp8_1x128"), weight("fp8")
    return Case(scaled_matmul, x.codes, ProductTensors(w.codes, w.scale, x.scale), "fp8-fp8_1x128")


def block_scaled(format: str, swizzled: bool = False) -> Case:
    x, w = activation(format), weight(format)
    scales = [swizzle_scales(q.scale) if swizzled else q.scale for q in (x, w)]
    given = ProductTensors(w.codes, scales[1], scales[0], w.global_scale, x.global_scale)
    return Case(block_scaled_matmul, x.codes, given, format)


def w4a8(weights: str, activations: str) -> Case:
    x, w = activation(activations), weight(weights)
    row_scale = reencode.row_scales(w, activations)
    given = ProductTensors(w.codes, w.scale, x.scale, w.global_scale, row_scale=row_scale)
    return Case(w4a8_matmul, x.codes, given, f"{weights}-{activations}")


def weight_only(weights: str, dtype: torch.dtype = torch.float32) -> Case:
    w = weight(weights)
    given = ProductTensors(w.codes, w.scale, w_scale_2=w.global_scale)
    return Case(weight_only_matmul, noise(M, K, dtype=dtype), given, weights, dtype)


CASES = {
    "int8": scaled("int8"),
    "fp8": scaled("fp8"),
    "fp8_tensor": scaled("fp8_tensor", "tensor", "tensor"),
    "fp8 by fp8_1x128": in_128s(),
    "fp8 rows by a tensor": scaled("fp8_tensor", "row", "tensor"),
    "fp8 tensor by rows": scaled("fp8_tensor", "tensor", "row"),
    **{name: block_scaled(name) for name in ("nvfp4", "mxfp8", "mxfp4")},
    **{f"{name} swizzled": block_scaled(name, True) for name in ("nvfp4", "mxfp8", "mxfp4")},
    **{f"{w} by {a}": w4a8(w, a) for w in ("nvfp4", "mxfp4", "int4", "int4_g128") for a in ("int8", "fp8")},
    **{f"{name} weights": weight_only(name) for name in (*FORMATS, "int4_g128")},
}


def operands(name: str) -> tuple[Tensor, Tensor]:
    """x and w of a case in float64, from the codes and not by the functions under test."""
    case = CASES[name]
    weights, _, activations = case.formats.partition("-")
    if activations == "fp8_1x128":
        return activation(activations).dequantize().double(), weight(weights).dequantize().double()
    if activations:
        w8 = reencode.reencode(weight(weights), activations)
        return activation(activations).dequantize().double(), w8.dequantize().double()
    if case.op is weight_only_matmul:
        return case.x.double(), weight(weights).dequantize().double()
    if case.op is block_scaled_matmul:
        return activation(weights).dequantize().double(), weight(weights).dequantize().double()
    x_scale, w_scale = (scale.double().reshape(-1, 1) for scale in case.given[2:0:-1] if scale is not None)
    return case.x.double() * x_scale, case.given.w.double() * w_scale


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_that_of_the_decoded_matrices(name: str) -> None:
    x, w = operands(name)
    y = CASES[name]().double()
    assert ((y - x @ w.T).abs() <= (K + 4) * 2.0**-24 * (x.abs() @ w.abs().T)).all()


@pytest.mark.parametrize("name", ["int8", "fp8_tensor", "nvfp4", "nvfp4 by int8", "int4 weights"])
def test_what_follows_is_computed_in_fp32_up_to_the_gate(name: str) -> None:
    case, by = CASES[name], following()
    value = case() + by["bias"].float() + by["h"].float() @ by["up"].float().T
    value = F.gelu(value, approximate="tanh")
    gates = by["gate"].repeat_interleave(M // 2, dim=0)
    torch.testing.assert_close(case(by), by["residual"].float() + value * gates.float(), rtol=1e-6, atol=1e-6)
    plain = following(gate=None, residual=None)
    rounded = replace(case, dtype=torch.bfloat16)
    assert torch.equal(rounded(plain), case(plain).bfloat16())
    assert torch.equal(rounded(by), by["residual"] + rounded(plain) * gates)


def test_int8_is_quantized_linear_to_the_bit() -> None:
    x, w, bias = noise(M, K), weight("int8"), noise(N)
    q = ops.quantize_activation(x, FORMATS["int8"])
    y = Case(scaled_matmul, q.codes, ProductTensors(w.codes, w.scale, q.scale, bias=bias), "int8")()
    assert torch.equal(
        y, ops.quantized_linear(x, *pack_named(ops.LinearTensors(w.codes, w.scale, bias=bias), "int8-int8"))
    )


@pytest.mark.parametrize("name", CASES)
def test_no_tokens_give_no_rows(name: str) -> None:
    case = CASES[name]
    scales = {}
    for part in ("x_scale", "x_scale_2"):
        scale = getattr(case.given, part)
        if scale is not None and (scale.shape[:1] == (M,) or (part == "x_scale" and name.endswith("swizzled"))):
            scales[part] = scale[:0]
    assert replace(case, x=case.x[:0], given=case.given._replace(**scales))().shape == (0, N)


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["int8", "fp8_tensor", "nvfp4", "mxfp8 swizzled", "int4 by fp8", "nvfp4 weights"])
def test_the_ops_keep_their_contract_with_torch(name: str) -> None:
    case = CASES[name]
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    if all(t is None or t.dtype != torch.float8_e4m3fn for t in (case.x, *case.given)):
        checks.append("test_schema")  # compares its inputs with allclose, which torch lacks for float8
    for by in (NOTHING, following()):
        torch.library.opcheck(case.op, case.arguments(by), test_utils=checks)


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "int4 by int8", "fp8 weights"])
def test_the_ops_compile_without_a_graph_break(name: str) -> None:
    case, by = CASES[name], following()

    def call(x: Tensor) -> Tensor:
        return replace(case, x=x)(by) * 2

    def traced(x: Tensor, tensors: list[Tensor]) -> Tensor:
        return case.op(x, tensors, *rest) * 2

    x, tensors, *rest = case.arguments(by)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, tensors), call(x))


def test_autocast_does_not_reach_the_reference() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        inside = CASES["fp8"](following())
    assert torch.equal(inside, CASES["fp8"](following()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_only_products_keep_the_dtype_of_x(dtype: torch.dtype) -> None:
    assert weight_only("int4", dtype)(following()).dtype == dtype


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (5, 21), (128, 4), (130, 5), (257, 12)])
def test_swizzled_scales_lie_where_the_matrix_unit_reads_them(rows: int, groups: int) -> None:
    scale = torch.randint(1, 255, (rows, groups), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)
    flat = swizzle_scales(scale)
    expected = torch.zeros_like(flat)
    for r in range(rows):
        for g in range(groups):
            tile = r // 128 * -(-groups // 4) + g // 4
            expected[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4] = scale[r, g]
    assert flat.shape == (-(-rows // 128) * 128 * -(-groups // 4) * 4,) and torch.equal(flat, expected)
    assert torch.equal(unswizzle_scales(flat, rows, groups), scale)
    for bad, what in ((scale.bfloat16(), r"bfloat16 \(\d+, \d+\)"), (scale.flatten(), r"uint8 \(\d+,\)")):
        with pytest.raises(ValueError, match=rf"scale is torch\.{what}, expected block scales \(rows, G\) of one byte"):
            swizzle_scales(bad)
    encoded = swizzle_scales(scale.view(torch.float8_e4m3fn))
    assert encoded.dtype == torch.float8_e4m3fn and torch.equal(encoded.view(torch.uint8), expected)


def test_what_does_not_fit_is_named() -> None:
    case = CASES["fp8"]
    with pytest.raises(ValueError, match=r"scaled_matmul: formats are 'nvfp4', expected one of int8, fp8"):
        replace(case, formats="nvfp4")()
    with pytest.raises(ValueError, match=r"x \(M, K\) = \(6, 64\) does not fit .* K differs"):
        replace(case, x=case.x[:, :64])()
    with pytest.raises(ValueError, match="codes of fp8 need a scale"):
        replace(case, given=case.given._replace(x_scale=None))()
    case = CASES["mxfp4 swizzled"]
    scale: Any = case.given.x_scale
    with pytest.raises(ValueError, match=r"swizzled scales are \(500,\), expected \(512,\) for \(6, 4\)"):
        replace(case, given=case.given._replace(x_scale=scale[:500]))()
    case = CASES["int4 by fp8"]
    with pytest.raises(ValueError, match="w4a8_matmul: formats are 'mxfp8-fp8', expected one of nvfp4-int8"):
        replace(case, formats="mxfp8-fp8")()
    with pytest.raises(ValueError, match="w4a8_matmul: formats are 'int4-nvfp4', expected one of nvfp4-int8"):
        replace(case, formats="int4-nvfp4")()
