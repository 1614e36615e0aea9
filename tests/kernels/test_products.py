"""The ops that multiply quantized matrices: their references against float64, their contract with torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels import ops, products
from fluxq.kernels.reencode import op as reencode
from fluxq.kernels.tensor import QuantizedTensor, swizzle_scales, unswizzle_scales
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


def scaled(format: str, x_scale: str = "row", w_scale: str = "row") -> tuple:
    """An op, its operands, its formats; for fp8_tensor the codes of fp8 under one scale or several."""
    name = "int8" if format == "int8" else "fp8"
    x, w = activation(name), weight(name)
    scales = [q.scale.mean() if which == "tensor" else q.scale for q, which in ((x, x_scale), (w, w_scale))]
    return products.scaled_matmul, (x.codes, scales[0], w.codes, scales[1]), {"dtype": torch.float32, "format": format}


def block_scaled(format: str, swizzled: bool = False) -> tuple:
    x, w = activation(format), weight(format)
    scales = [swizzle_scales(q.scale) if swizzled else q.scale for q in (x, w)]
    tensors = (x.codes, scales[0], x.global_scale, w.codes, scales[1], w.global_scale)
    return products.block_scaled_matmul, tensors, {"dtype": torch.float32, "format": format}


def w4a8(weights: str, activations: str) -> tuple:
    x, w = activation(activations), weight(weights)
    row_scale = reencode.row_scales(w, activations)
    tensors = (x.codes, x.scale, w.codes, w.scale, w.global_scale, row_scale)
    return products.w4a8_matmul, tensors, {"dtype": torch.float32, "weights": weights, "activations": activations}


def weight_only(weights: str, dtype: torch.dtype = torch.float32) -> tuple:
    w = weight(weights)
    return (
        products.weight_only_matmul,
        (noise(M, K, dtype=dtype), w.codes, w.scale, w.global_scale),
        {"weights": weights},
    )


CASES = {
    "int8": scaled("int8"),
    "fp8": scaled("fp8"),
    "fp8_tensor": scaled("fp8_tensor", "tensor", "tensor"),
    "fp8 rows by a tensor": scaled("fp8_tensor", "row", "tensor"),
    "fp8 tensor by rows": scaled("fp8_tensor", "tensor", "row"),
    **{name: block_scaled(name) for name in ("nvfp4", "mxfp8", "mxfp4")},
    **{f"{name} swizzled": block_scaled(name, True) for name in ("nvfp4", "mxfp8", "mxfp4")},
    **{f"{w} by {a}": w4a8(w, a) for w in ("nvfp4", "mxfp4", "int4", "int4_g128") for a in ("int8", "fp8")},
    **{f"{name} weights": weight_only(name) for name in (*FORMATS, "int4_g128")},
}


def operands(case: str) -> tuple[Tensor, Tensor]:
    """x and w of a case in float64, from the codes and not by the functions under test."""
    _, tensors, how = CASES[case]
    if "format" in how:
        name = how["format"]
        if name in ("nvfp4", "mxfp8", "mxfp4"):
            return activation(name).dequantize().double(), weight(name).dequantize().double()
        x, x_scale, w, w_scale = (t.double() for t in tensors)
        return x * x_scale.reshape(-1, 1), w * w_scale.reshape(-1, 1)
    w = weight(how["weights"])
    if "activations" not in how:
        return tensors[0].double(), w.dequantize().double()
    w8 = reencode.reencode(w, how["activations"])
    return activation(how["activations"]).dequantize().double(), w8.dequantize().double()


@pytest.mark.parametrize("case", CASES)
def test_the_product_is_that_of_the_decoded_matrices(case: str) -> None:
    op, tensors, how = CASES[case]
    x, w = operands(case)
    y = op(*tensors, **NOTHING, **how).double()
    assert ((y - x @ w.T).abs() <= (K + 4) * 2.0**-24 * (x.abs() @ w.abs().T)).all()


@pytest.mark.parametrize("case", ["int8", "fp8_tensor", "nvfp4", "nvfp4 by int8", "int4 weights"])
def test_what_follows_is_computed_in_fp32_and_rounded_once(case: str) -> None:
    op, tensors, how = CASES[case]
    by = following()
    product = op(*tensors, **NOTHING, **how)
    value = product + by["bias"].float() + by["h"].float() @ by["up"].float().T
    value = F.gelu(value, approximate="tanh") * by["gate"].float().repeat_interleave(M // 2, dim=0)
    value = value + by["residual"].float()
    torch.testing.assert_close(op(*tensors, **by, **how), value, rtol=1e-6, atol=1e-6)
    if "dtype" in how:
        rounded = op(*tensors, **by, **how | {"dtype": torch.bfloat16})
        assert torch.equal(rounded, op(*tensors, **by, **how).bfloat16())


def test_int8_is_quantized_linear_to_the_bit() -> None:
    x, w, bias = noise(M, K), weight("int8"), noise(N)
    q = ops.quantize_activation(x, FORMATS["int8"])
    y = products.scaled_matmul(
        q.codes, q.scale, w.codes, w.scale, **NOTHING | {"bias": bias}, dtype=torch.float32, format="int8"
    )
    assert torch.equal(y, ops.quantized_linear(x, *ops.LinearTensors(w.codes, w.scale, bias=bias).packed("int8-int8")))


@pytest.mark.parametrize("case", CASES)
def test_no_tokens_give_no_rows(case: str) -> None:
    op, tensors, how = CASES[case]
    rows = [t[:0] if t is not None and t.shape[:1] == (M,) else t for t in tensors]
    if case.endswith("swizzled"):
        rows[1] = tensors[1][:0]
    assert op(*rows, **NOTHING, **how).shape == (0, N)


@pytest.mark.parametrize("case", ["int8", "fp8_tensor", "nvfp4", "mxfp8 swizzled", "int4 by fp8", "nvfp4 weights"])
def test_the_ops_keep_their_contract_with_torch(case: str) -> None:
    op, tensors, how = CASES[case]
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    if all(t is None or t.dtype != torch.float8_e4m3fn for t in tensors):
        checks.append("test_schema")  # compares its inputs with allclose, which torch lacks for float8
    for by in (NOTHING, following()):
        torch.library.opcheck(op, tensors, by | how, test_utils=checks)


@pytest.mark.parametrize("case", ["fp8", "mxfp4", "int4 by int8", "fp8 weights"])
def test_the_ops_compile_without_a_graph_break(case: str) -> None:
    op, tensors, how = CASES[case]
    by = following()

    def call(*tensors: Tensor) -> Tensor:
        return op(*tensors, **by, **how) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), call(*tensors))


def test_autocast_does_not_reach_the_reference() -> None:
    op, tensors, how = CASES["fp8"]
    with torch.autocast("cpu", torch.bfloat16):
        inside = op(*tensors, **following(), **how)
    assert torch.equal(inside, op(*tensors, **following(), **how))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_only_products_keep_the_dtype_of_x(dtype: torch.dtype) -> None:
    op, tensors, how = weight_only("int4", dtype)
    assert op(*tensors, **following(), **how).dtype == dtype


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
    encoded = swizzle_scales(scale.view(torch.float8_e4m3fn))
    assert encoded.dtype == torch.float8_e4m3fn and torch.equal(encoded.view(torch.uint8), expected)


def test_what_does_not_fit_is_named() -> None:
    op, tensors, how = CASES["fp8"]
    with pytest.raises(ValueError, match=r"scaled_matmul: format is 'nvfp4', expected one of int8, fp8"):
        op(*tensors, **NOTHING, **how | {"format": "nvfp4"})
    with pytest.raises(ValueError, match=r"x \(M, K\) = \(6, 64\) does not fit .* K differs"):
        op(tensors[0][:, :64], *tensors[1:], **NOTHING, **how)
    op, tensors, how = CASES["mxfp4 swizzled"]
    with pytest.raises(ValueError, match=r"swizzled scales are \(500,\), expected \(512,\) for \(6, 4\)"):
        op(tensors[0], tensors[1][:500], *tensors[2:], **NOTHING, **how)
    op, tensors, how = CASES["int4 by fp8"]
    with pytest.raises(ValueError, match="weights: format is 'mxfp8', expected one of nvfp4, mxfp4, int4"):
        op(*tensors, **NOTHING, **how | {"weights": "mxfp8"})
    with pytest.raises(ValueError, match="activations: format is 'nvfp4', expected one of int8, fp8"):
        op(*tensors, **NOTHING, **how | {"activations": "nvfp4"})
