"""The matmul of block-scaled codes on Triton's interpreter: within what fp32 sums may lose, which may be nothing.

Each check takes the kernel file as an argument: the tests hand it the real one, the last test one with a fault.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_tests import sibling
from poison import poisoned
from rounding import steps
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels import encode, ops
from fluxq.kernels.block_scaled_matmul import kernel as block_scaled_matmul
from fluxq.kernels.block_scaled_matmul.op import block_scaled_matmul as reference
from fluxq.kernels.epilogue import Epilogue
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.products import ProductTensors
from fluxq.kernels.quantize_activation import kernel as quantize_activation
from fluxq.kernels.tensor import QuantizedTensor, pack_named, swizzle_scales
from fluxq.kernels.tiles import MatmulTile, Tile
from fluxq.recipes.formats import FORMATS

matmul = sibling("test_scaled_matmul_kernel")
beside = matmul.beside
SUPPORTED = block_scaled_matmul.OP.formats
TILE = MatmulTile(m=32, n=32, k=64, warps=4, stages=3, group_m=2)
LARGE = MatmulTile(m=128, n=128, k=128, warps=8, stages=3, group_m=2)
SHAPES = [(1, 33, 64), (5, 64, 96), (17, 130, 160), (130, 70, 128)]  # (M, N, K): tails of every axis, 5 tiles of rows
FP32 = torch.float32
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # as gelu(-100) does


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def operands(format: str, m: int, n: int, k: int, *, one_global: bool = False):
    """Codes of x (m, k) and of a weight (n, k), a bias (n,); rows differ in scale by up to 1000."""
    noise = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=noise) * torch.logspace(-2, 1, m)[:, None]
    w = torch.randn(n, k, generator=noise) * torch.logspace(0, -2, n)[:, None]
    given = torch.tensor(0.005) if one_global and format == "nvfp4" else None
    q = ops.quantize_activation(x, FORMATS[format], given)
    return q, QuantizedTensor.quantize(w, format), torch.randn(n, generator=noise)


def swizzled(q: QuantizedTensor) -> QuantizedTensor:
    """The same with scales in the 128x4 layout, whose padding decodes to NaN: nothing may come of it."""
    ones = swizzle_scales(torch.ones_like(q.scale.view(torch.uint8)))
    flat = swizzle_scales(q.scale).view(torch.uint8).where(ones == 1, 255)
    return dataclasses.replace(q, scale=flat.view(q.scale.dtype))


def check(
    kernels: ModuleType,
    format: str,
    shape: tuple[int, int, int],
    tile: MatmulTile = TILE,
    *,
    dtype: torch.dtype = FP32,
    layout: Callable = lambda q: q,
    one_global: bool = False,
    **follows: Any,
) -> None:
    """Against float64, each element within the rounding of its own sum; follows: as `followed_by` takes them."""
    m, n, k = shape
    q, w, bias = operands(format, m, n, k, one_global=one_global)
    a, b = decoded(q), decoded(w)
    epilogue, value, bound = matmul.followed_by(a @ b.T, a.abs() @ b.abs().T, k, bias, dtype, **follows)
    with poisoned():
        out = kernels.block_scaled_matmul(layout(q), layout(w), epilogue=epilogue, tile=tile)
    matmul.assert_within(out.double(), value, bound, tile)


def decoded(q: QuantizedTensor) -> Tensor:
    """q in float64 with no rounding: code · scale · global scale."""
    codes = encode.decode(encode.unpack(q.codes, q.format.element), q.format.element).double()
    scale = encode.decode_scale(q.scale, q.format, None).double()
    blocks = codes.reshape(*scale.shape, -1) * scale[:, :, None]
    return blocks.reshape(q.shape) * (1.0 if q.global_scale is None else q.global_scale.double())


@pytest.mark.often(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", SUPPORTED)
def test_products_are_within_the_rounding_of_their_sums(format: str, shape: tuple[int, int, int]) -> None:
    check(block_scaled_matmul, format, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_is_rounded_once(dtype: torch.dtype) -> None:
    check(block_scaled_matmul, "nvfp4", (17, 40, 80), dtype=dtype)


def test_tokens_may_share_one_global_scale() -> None:
    check(block_scaled_matmul, "nvfp4", (17, 40, 80), one_global=True)


@pytest.mark.slow
@pytest.mark.parametrize("follows", matmul.FOLLOWS)
def test_what_follows_the_product_is_computed_in_fp32(follows: str) -> None:
    check(block_scaled_matmul, "nvfp4", (130, 70, 96), **matmul.FOLLOWS[follows])


VARIANTS = {
    "descriptors": dataclasses.replace(TILE, descriptors=True),
    "halves": dataclasses.replace(TILE, halves=True),
    "both": dataclasses.replace(TILE, descriptors=True, halves=True),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("format", SUPPORTED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_to_load_and_store_computes_the_same(variant: str, format: str) -> None:
    q, w, _ = operands(format, 17, 70, 160)
    plain, other = (block_scaled_matmul.block_scaled_matmul(q, w, tile=t) for t in (TILE, VARIANTS[variant]))
    assert torch.equal(plain, other)
    check(block_scaled_matmul, format, (17, 70, 160), VARIANTS[variant], rank=5, gelu=True, residual=True)


@pytest.mark.parametrize("shape", [(5, 33, 96), (130, 140, 160)])
@pytest.mark.parametrize("format", SUPPORTED)
def test_swizzled_scales_give_the_same_bits(format: str, shape: tuple[int, int, int]) -> None:
    q, w, _ = operands(format, *shape)
    y = [
        block_scaled_matmul.block_scaled_matmul(layout(q), layout(w), tile=LARGE) for layout in (lambda q: q, swizzled)
    ]
    assert torch.equal(*y)
    check(block_scaled_matmul, format, shape, LARGE, layout=swizzled)


@pytest.mark.slow
def test_it_multiplies_what_the_quantizer_wrote_swizzled() -> None:
    """Fused equals composed: the quantizer's codes and scales, in its own layout, by the weight."""
    x = torch.randn(130, 160, generator=torch.Generator().manual_seed(3))
    plain = ops.quantize_activation(x, FORMATS["nvfp4"])
    given = steps("nvfp4", input_scale=plain.global_scale, swizzled=True)
    q, _ = quantize_activation.quantize_activation(x, *given, tile=Tile(16, 64, 4))
    w = QuantizedTensor.quantize(torch.randn(40, 160, generator=torch.Generator().manual_seed(4)), "nvfp4")
    y = [block_scaled_matmul.block_scaled_matmul(a, b, tile=LARGE) for a, b in ((plain, w), (q, swizzled(w)))]
    assert torch.equal(*y)


@pytest.mark.parametrize("format", SUPPORTED)
def test_sums_that_fp32_holds_are_exact_and_those_of_the_reference(format: str) -> None:
    """Small integers under scales of powers of two: every sum is exact in any order."""
    noise = torch.Generator().manual_seed(11)
    row = FORMATS[format]
    pairs = []
    for rows in (33, 70):
        values = torch.randint(-3, 4, (rows, 160), generator=noise).float()
        codes = encode.pack(encode.encode(values, row.element), row.element)
        power = torch.randint(-2, 3, (rows, 160 // row.group_size), generator=noise)
        scale = torch.exp2(power.float()).to(torch.float8_e4m3fn) if row.two_level else (power + 127).to(torch.uint8)
        global_scale = torch.tensor(0.25) if row.two_level else None
        pairs.append(QuantizedTensor(codes, scale, global_scale, (rows, 160), row))
    q, w = pairs
    y = block_scaled_matmul.block_scaled_matmul(q, w, epilogue=Epilogue(dtype=FP32), tile=TILE)
    assert torch.equal(y.double(), decoded(q) @ decoded(w).T)
    given = ProductTensors(w.codes, w.scale, q.scale, w.global_scale, q.global_scale)
    assert torch.equal(y, reference(q.codes, *pack_named(given, format), False, FP32))


def test_a_block_of_nan_reaches_its_row_and_no_other() -> None:
    q, w, _ = operands("mxfp8", 17, 40, 96)
    q.scale[3, 1] = 255
    y = block_scaled_matmul.block_scaled_matmul(q, w, tile=TILE)
    assert y[3].isnan().all() and y[torch.arange(17) != 3].isfinite().all()


def bad_input() -> dict[str, tuple[Callable, str]]:
    q, w, bias = operands("nvfp4", 4, 8, 64)
    mx, _, _ = operands("mxfp4", 4, 8, 64)
    fp8 = ops.quantize_activation(torch.ones(4, 64), FORMATS["fp8"])
    short = QuantizedTensor.quantize(torch.ones(8, 32), "nvfp4")
    odd = QuantizedTensor.quantize(torch.ones(4, 80), "nvfp4")
    empty = QuantizedTensor(q.codes[:0], q.scale[:0], q.global_scale, (0, 64), q.format)
    cut = dataclasses.replace(swizzled(q), scale=swizzled(q).scale[:256])
    other_type = dataclasses.replace(q, scale=q.scale.view(torch.uint8))

    def call(x: QuantizedTensor = q, w: QuantizedTensor = w, tile: MatmulTile = TILE, **options) -> Callable:
        return partial(block_scaled_matmul.block_scaled_matmul, x, w, tile=tile, **options)

    return {
        "formats": (call(mx), "x is mxfp4 and w nvfp4, expected both"),
        "a format of rows": (call(fp8, fp8), "x is fp8 and w fp8, expected both to be one of nvfp4"),
        "no rows": (call(empty), r"x \(0, 64\) has no rows"),
        "K": (call(w=short), "K differs"),
        "one layout": (call(swizzled(q)), "scales of x are 1-D and of w 2-D: swizzle both or neither"),
        "size": (call(cut, swizzled(w), LARGE), r"x: weight_scale is .* \(256,\), expected float8_e4m3fn \(512,\)"),
        "type": (call(other_type), r"x: weight_scale is torch\.uint8 .* expected float8_e4m3fn"),
        "tile.k": (call(tile=MatmulTile(32, 32, 8, 4, 3)), "tile.k is 8, expected a multiple of 16"),
        "tile.m": (call(swizzled(q), swizzled(w)), "the tile is 32x32, expected multiples of 128 for swizzled"),
        "descriptors": (call(odd, odd, VARIANTS["both"]), "x has rows of 40 bytes .* take a tile without descriptors"),
        "bias": (call(epilogue=Epilogue(bias=bias[:7])), r"block_scaled_matmul: bias is .* \(7,\)"),
    }


def test_operands_that_do_not_fit_are_named() -> None:
    for call, message in bad_input().values():
        with pytest.raises(ValueError, match=message):
            call()


# Faults: in the kernel file, the text `old` (which must occur once) becomes `new`, and the check must notice.
nvfp4 = partial(check, format="nvfp4", shape=(130, 70, 96), images=5, residual=True)
mxfp8 = partial(check, format="mxfp8", shape=(130, 70, 96))
in_layout = partial(check, format="nvfp4", shape=(130, 140, 160), tile=LARGE, layout=swizzled)
by_descriptors = partial(nvfp4, tile=VARIANTS["both"])
LOAD_W, GLOBALS = "load_scales(w_scale, tile_n, ", "M, N, x_scale_2, w_scale_2,"
DOT, CLAMP = "acc = tl.dot_scaled(left, scale_x,", "to(tl.int64), ROWS_ALL - 1)\n    columns"
FAULTS: dict[str, tuple[str, str, Callable]] = {
    "scales of the other operand": (DOT, DOT.replace("scale_x", "scale_w"), mxfp8),
    "the first scales throughout": (LOAD_W + "start // GROUP", LOAD_W + "0", nvfp4),
    "nibbles swapped": (DOT, DOT.replace("left", "(left >> 4) | (left << 4)"), nvfp4),
    "no global scale of x": (GLOBALS, GLOBALS.replace("x_scale_2", "None"), nvfp4),
    "no global scale of w": (GLOBALS, GLOBALS.replace("w_scale_2", "None"), nvfp4),
    "one global scale": ("min(x.global_scale.ndim, 1)", "0", nvfp4),
    "no mask of K": ("EVEN_K=k % tile.k == 0", "EVEN_K=True", mxfp8),
    "last K tile dropped": ("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)", mxfp8),
    "rows past the end": (CLAMP, CLAMP.replace("- 1", "+ BLOCK"), mxfp8),
    "swizzle: quarters": ("(0, 3, 2, 1, 4)", "(0, 2, 3, 1, 4)", in_layout),
    "swizzle: tiles of groups": ("start // 4 * 512 + lines", "lines", in_layout),
    "swizzle: padding read": ("mask=(groups < G)", "mask=(groups < G + 4)", in_layout),
    "descriptors: rows": ("w.load([tile_n * BLOCK_N,", "w.load([tile_m * BLOCK_N,", by_descriptors),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path) -> None:
    old, new, check = FAULTS[fault]
    faulty = beside.with_fault("block_scaled_matmul.py", old, new, tmp_path)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)
