"""16-bit activations times stored weights on Triton's interpreter: within the rounding of the sums, and of w16."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_tests import sibling
from poison import poisoned
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels.epilogue import Epilogue
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import MatmulTile, Tile
from fluxq.kernels.weight_only_matmul import kernel as weight_only_matmul
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS

beside = sibling("test_quantize_activation_kernel")
matmul = sibling("test_scaled_matmul_kernel")
TILE = MatmulTile(m=32, n=32, k=128, warps=4, stages=3, group_m=2)
GEMV = Tile(rows=32, columns=256, warps=4)
WEIGHTS = (*KERNEL_FORMATS, "int4_g128")
FP32 = Epilogue(dtype=torch.float32)
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # as gelu(-100) does


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def operands(weights: str, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, QuantizedTensor]:
    """x (m, k) and w (n, k); rows differ in scale by up to 1000."""
    m, n, k = shape
    noise = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=noise) * torch.logspace(-2, 1, m)[:, None]
    w = torch.randn(n, k, generator=noise) * torch.logspace(0, -2, n)[:, None]
    return x.to(dtype), QuantizedTensor.quantize(w, weights)


def check(
    kernels: ModuleType,
    weights: str,
    shape: tuple[int, int, int],
    tile: MatmulTile | Tile = TILE,
    dtype: torch.dtype = torch.bfloat16,
    **follows: int,
) -> None:
    """Against float64, each element within the rounding of its own sum and, of int4 in bf16, of its weights."""
    x, w = operands(weights, shape, dtype)
    k, n = x.shape[1], w.shape[0]
    a, b = x.double(), w.dequantize().double()
    rounded = isinstance(tile, MatmulTile) and w.format.element.name == "int4" and dtype == torch.bfloat16
    terms = k + 2**16 * rounded  # in units of 2^-24: 2^-8 of each weight
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
    epilogue, value, bound = matmul.followed_by(a @ b.T, a.abs() @ b.abs().T, terms, bias, torch.float32, **follows)
    with poisoned():
        out = kernels.weight_only_matmul(x, w, epilogue=epilogue, tile=tile)
    matmul.assert_within(out.double(), value, bound)  # its tiles have 32 rows and columns, as these have


@pytest.mark.often(2)
@pytest.mark.parametrize("shape", [(1, 33, 128), (5, 64, 384), (17, 40, 640)])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_matmul_is_within_the_rounding_of_its_sums(weights: str, shape: tuple[int, int, int]) -> None:
    check(weight_only_matmul, weights, shape)


@pytest.mark.parametrize("weights", ["nvfp4", "fp8"])
def test_many_tiles_in_groups(weights: str) -> None:
    check(weight_only_matmul, weights, (130, 70, 192))


@pytest.mark.parametrize("weights", ["fp8", "fp8_tensor", "int8"])
def test_formats_without_groups_take_every_k(weights: str) -> None:
    check(weight_only_matmul, weights, (5, 33, 45))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_matmul_in_float16_rounds_no_weight_of_usual_size(weights: str) -> None:
    check(weight_only_matmul, weights, (5, 33, 256), dtype=torch.float16)


@pytest.mark.often(8)
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gemv_is_within_the_rounding_of_its_sums(weights: str, m: int) -> None:
    check(weight_only_matmul, weights, (m, 40, 384), GEMV)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gemv_takes_other_activations(dtype: torch.dtype) -> None:
    check(weight_only_matmul, "nvfp4", (2, 40, 384), GEMV, dtype)


def test_gemv_of_8_bit_weights_takes_every_multiple_of_4() -> None:
    check(weight_only_matmul, "int8", (2, 33, 44), GEMV)


FOLLOWS = {
    "low rank": {"rank": 5},
    "gelu": {"gelu": True},
    "gate of each image and residual": {"images": 2, "residual": True},
    "all": {"rank": 16, "gelu": True, "images": 2, "residual": True},
}


@pytest.mark.often(1)
@pytest.mark.parametrize("tile", [TILE, GEMV], ids=["matmul", "gemv"])
@pytest.mark.parametrize("follows", FOLLOWS)
def test_what_follows_is_computed_in_fp32(follows: str, tile: MatmulTile | Tile) -> None:
    check(weight_only_matmul, "nvfp4", (10, 40, 128), tile, **FOLLOWS[follows])


@pytest.mark.often(2)
@pytest.mark.parametrize("tile", [TILE, GEMV], ids=["matmul", "gemv"])
@pytest.mark.parametrize("weights", [name for name in KERNEL_FORMATS if name != "fp8_tensor"])
def test_every_code_decodes_under_every_scale(weights: str, tile: MatmulTile | Tile) -> None:
    """Each token is one column of the identity, so that y shows the weights; the last rows' scales are extreme."""
    row = FORMATS[weights]
    k, n = 512, 33
    noise = torch.Generator().manual_seed(2)
    w = QuantizedTensor.quantize(torch.randn(n, k, generator=noise), row)
    bytes_ = torch.arange(256, dtype=torch.uint8).repeat(n, k * row.element.bits // 8 // 256)
    codes = bytes_.view(w.codes.dtype)
    if row.scale in ("e4m3", "e8m0"):
        low, high = (0, 127) if row.scale == "e4m3" else (30, 220)  # of E8M0 what sums in fp32 can hold
        scale = torch.randint(low, high, w.scale.shape, generator=noise, dtype=torch.uint8).view(w.scale.dtype)
        w = replace(w, scale=scale)
    w = replace(w, codes=codes)
    columns = torch.tensor([0, 1, 7, 8, 126, 127, 128, 254, 255, 256, 259, 383, 384, 500, 510, 511])
    x = torch.zeros(16, k, dtype=torch.bfloat16)
    x[torch.arange(16), columns] = 1.0
    x = x[: 8 if isinstance(tile, Tile) else 16]
    y = weight_only_matmul.weight_only_matmul(x, w, epilogue=FP32, tile=tile)
    expected = w.dequantize()[:, columns[: len(x)]].T
    nan = w.dequantize().isnan().any(1)  # 0 · NaN is NaN: such a code spoils its row
    assert torch.equal(y.isnan(), nan.expand_as(y))
    slack = 2.0**-8 if row.element.name == "int4" and isinstance(tile, MatmulTile) else 2.0**-22
    matmul.assert_within(y[:, ~nan], expected[:, ~nan], slack * expected[:, ~nan].abs())


@pytest.mark.parametrize("tile", [TILE, GEMV], ids=["matmul", "gemv"])
@pytest.mark.parametrize("weights", ["fp8", "mxfp8", "nvfp4", "int4"])
def test_a_nan_spoils_its_own_row_alone(weights: str, tile: MatmulTile | Tile) -> None:
    x, w = operands(weights, (3, 40, 384), torch.bfloat16)
    if w.format.element.name == "e4m3":
        w.codes.view(torch.uint8)[7, 301] = 0xFF
    else:
        w.scale[7, 2] = torch.nan
    y = weight_only_matmul.weight_only_matmul(x, w, epilogue=FP32, tile=tile)
    assert y.isnan().all(0).nonzero().flatten().tolist() == [7] == y.isnan().any(0).nonzero().flatten().tolist()


@pytest.mark.parametrize("tile", [TILE, GEMV], ids=["matmul", "gemv"])
def test_a_global_scale_of_each_row_is_taken(tile: MatmulTile | Tile) -> None:
    x, w = operands("nvfp4", (5, 40, 128), torch.bfloat16)
    w = replace(w, global_scale=torch.linspace(0.001, 0.1, 40)[:, None])
    a, b = x.double(), w.dequantize().double()
    y = weight_only_matmul.weight_only_matmul(x, w, epilogue=FP32, tile=tile)
    matmul.assert_within(y.double(), a @ b.T, 136 * 2.0**-24 * (a.abs() @ b.abs().T))


def bad_input() -> dict[str, tuple[Callable, str]]:
    x, w = operands("nvfp4", (4, 8, 128), torch.bfloat16)
    call = partial(weight_only_matmul.weight_only_matmul, tile=TILE)
    gemv = partial(weight_only_matmul.weight_only_matmul, tile=GEMV)
    wide, odd = operands("int8", (17, 8, 50), torch.bfloat16)
    return {
        "axes": (partial(call, x[0], w), r"x is torch\.bfloat16 \(128,\), expected \(M, K\)"),
        "no rows": (partial(call, x[:0], w), r"x \(0, 128\) has no rows"),
        "K": (partial(call, x[:, :64].contiguous(), w), "K differs"),
        "float32": (partial(call, x.float(), w), "x is float32, which matrix units would round"),
        "type": (partial(call, x.to(torch.float64), w), r"x is torch\.float64"),
        "strides": (partial(call, x.repeat(1, 2)[:, :128], w), r"x has strides .*contiguous"),
        "tile": (partial(call, x, w, tile=replace(TILE, k=8)), "tile.columns is 8, expected a multiple of nvfp4's 16"),
        "many tokens": (partial(gemv, wide, odd), "a Tile is for up to 16 tokens, x has 17"),
        "words": (partial(gemv, wide[:4], odd), "words of 4 bytes, K is 50"),
        "scale": (partial(call, x, replace(w, scale=w.scale[:, :3])), r"weight_scale is .* \(8, 3\), expected"),
        "bias": (partial(call, x, w, epilogue=Epilogue(bias=torch.ones(7))), r"weight_only_matmul: bias is .* \(7,\)"),
        "device": (partial(call, x.to("meta"), w), "x is on meta and w on cpu: move one"),
    }


def test_operands_that_do_not_fit_are_named() -> None:
    for call, message in bad_input().values():
        with pytest.raises(ValueError, match=message):
            call()


# Faults: in a kernel file, the text `old` (which must occur once) becomes `new`, and the check must notice.
OURS, SHARED = "weight_only_matmul.py", "dequantize.py"
nvfp4, mxfp4, int8, fp8, int4 = (
    partial(check, weights=weights, shape=(17, 40, 320)) for weights in ("nvfp4", "mxfp4", "int8", "fp8", "int4")
)
gemv, gemv_of_fp8, gemv_of_int8, gemv_of_int4 = (
    partial(check, weights=weights, shape=(3, 40, 320), tile=GEMV) for weights in ("nvfp4", "fp8", "int8", "int4")
)
low_rank = partial(gemv, rank=5)
MATMUL_ROW = "value = value * tl.load(w.scale + w_rows * w.stride_scale)[None, :]"
MATMUL_GLOBAL, GEMV_GLOBAL = "value = value * tl.load(w.global_scale", "acc = acc * tl.load(w.global_scale"
FAULTS: dict[str, tuple[str, str, str, Callable]] = {
    "nibbles swapped": (SHARED, "tl.join(code & 0xF, code >> 4)", "tl.join(code >> 4, code & 0xF)", nvfp4),
    "weights in bf16": (OURS, "right.to(x.dtype.element_ty).T", "(right * 1.003).to(x.dtype.element_ty).T", nvfp4),
    "row scale dropped": (OURS, MATMUL_ROW, "value = value", int8),
    "row scale of the other axis": (OURS, MATMUL_ROW, MATMUL_ROW.replace("w_rows *", "0 * w_rows *"), fp8),
    "global scale dropped": (
        OURS,
        "value = value * tl.load(w.global_scale",
        "value = value + 0 * tl.load(w.global_scale",
        nvfp4,
    ),
    "scales one group off": (OURS, "start // GROUP + tl.arange(0, BLOCK_K", "1 + tl.arange(0, BLOCK_K", mxfp4),
    "no mask of K": (OURS, "EVEN_K=k % tile.k == 0", "EVEN_K=True", int8),
    "rows past the end": (OURS, "tl.minimum(rows, M - 1)", "rows", nvfp4),
    "last K tile dropped": (OURS, "range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)", nvfp4),
    "gemv: halves swapped": (SHARED, "return low.to(tl.float32), high", "return high.to(tl.float32), low", gemv),
    "gemv: odd and even": (SHARED, "tl.join(even, odd)", "tl.join(odd, even)", gemv_of_int8),
    "gemv: e4m3 sign": (SHARED, "words & -0x7FFF8000 | (words >> 1)", "(words >> 1)", gemv_of_fp8),
    "gemv: int4 is unsigned": (SHARED, "codes - 1032.0", "codes - 1024.0", gemv_of_int4),
    "gemv: unit of codes": (OURS, "acc * word_unit(ELEMENT)", "acc", gemv),
    "gemv: global scale dropped": (
        OURS,
        "acc = acc * tl.load(w.global_scale",
        "acc = acc + 0 * tl.load(w.global_scale",
        gemv,
    ),
    "gemv: scales one group off": (OURS, "start // GROUP + tl.arange(0, COLUMNS", "1 + tl.arange(0, COLUMNS", gemv),
    "gemv: no mask of K": (OURS, "mask=ks < K,", "mask=ks < K + 9,", gemv),
    "gemv: first token for all": (OURS, "x + tl.minimum(token, M - 1) * K", "x", gemv),
    "gemv: last tile dropped": (OURS, "tl.range(0, K, COLUMNS", "tl.range(0, K - COLUMNS, COLUMNS", gemv),
    "gemv: low rank dropped": (OURS, "tl.sum(ups * downs[None, :], 1)", "tl.sum(ups * 0.0, 1)", low_rank),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, red = FAULTS[fault]
    faulty = beside.with_fault(file, old, new, tmp_path)
    if file == SHARED:
        for name in ("unpack_codes", "unpack_words"):
            monkeypatch.setattr(weight_only_matmul, name, getattr(faulty, name))
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        red(faulty if file == OURS else weight_only_matmul)
