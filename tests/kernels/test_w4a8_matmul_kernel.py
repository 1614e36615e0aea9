"""4-bit weights times 8-bit activations on Triton's interpreter: what `reencode` and then `scaled_matmul` give."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_tests import lost_in_the_unit, sibling
from poison import poisoned
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels import ops, reencode
from fluxq.kernels.epilogue import Epilogue
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.scaled_matmul import kernel as scaled_matmul
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import MatmulTile
from fluxq.kernels.w4a8_matmul import kernel as w4a8_matmul
from fluxq.recipes.formats import FORMATS

beside = sibling("test_quantize_activation_kernel")
matmul = sibling("test_scaled_matmul_kernel")
TILE = MatmulTile(m=32, n=32, k=128, warps=4, stages=3, group_m=2)
WEIGHTS = ("nvfp4", "mxfp4", "int4", "int4_g128")
SHAPES = [(1, 33, 128), (5, 64, 192), (17, 40, 320)]  # (M, N, K): tails of every axis
FP32 = Epilogue(dtype=torch.float32)
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # as gelu(-100) does


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def operands(weights: str, activations: str, shape: tuple[int, int, int]) -> tuple[QuantizedTensor, QuantizedTensor]:
    """x (m, k) and w (n, k); rows differ in scale by up to 1000, and groups of a row, too."""
    m, n, k = shape
    noise = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=noise) * torch.logspace(-2, 1, m)[:, None]
    w = torch.randn(n, k, generator=noise) * torch.logspace(0, -2, n)[:, None] * torch.logspace(0, -2, k)
    if weights == "int4_g128":
        k = k // 128 * 128
        x, w = x[:, :k], w[:, :k]
    return ops.quantize_activation(x, FORMATS[activations]), QuantizedTensor.quantize(w, weights)


def check_composed(
    kernels: ModuleType, weights: str, activations: str, shape: tuple[int, int, int], **follows: int
) -> None:
    """int8 to the bit; fp8 within what its sums may lose, and to the bit where both add in the same order."""
    x, w = operands(weights, activations, shape)
    n = w.shape[0]
    w8 = reencode.reencode(w, activations)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
    a, b = x.dequantize().double(), w8.dequantize().double()
    lost = lost_in_the_unit(x.shape[1], TILE.acc_split) if activations == "fp8" else 0
    sizes = a @ b.T, a.abs() @ b.abs().T, x.shape[1] + lost, bias, torch.float32
    epilogue, value, bound = matmul.followed_by(*sizes, **follows)
    with poisoned():
        out = kernels.w4a8_matmul(x, w, w8.scale, epilogue=epilogue, tile=TILE)
    expected = scaled_matmul.scaled_matmul(x, w8, epilogue=epilogue, tile=TILE)
    assert_within(out.double(), value, bound)
    assert_within(out, expected, 2 * bound if lost else torch.zeros_like(expected))


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """As that of the int8 and fp8 matmul; the tiles of both have 32 rows and columns."""
    assert (matmul.TILE.m, matmul.TILE.n) == (TILE.m, TILE.n)
    matmul.assert_within(found, expected, bound)


@pytest.mark.often(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activations", ["int8", "fp8"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_decoding_inside_is_reencoding_before(weights: str, activations: str, shape: tuple[int, int, int]) -> None:
    check_composed(w4a8_matmul, weights, activations, shape)


@pytest.mark.often(1)
@pytest.mark.parametrize(("weights", "activations"), [("nvfp4", "int8"), ("mxfp4", "fp8")])
def test_many_tiles_in_groups(weights: str, activations: str) -> None:
    check_composed(w4a8_matmul, weights, activations, (130, 70, 192))


FOLLOWS = {
    "low rank": {"rank": 5},
    "gelu": {"gelu": True},
    "gate of each image and residual": {"images": 5, "residual": True},
    "all": {"rank": 16, "gelu": True, "images": 2, "residual": True},
}


@pytest.mark.parametrize("follows", FOLLOWS)
def test_what_follows_is_that_of_the_8_bit_matmul(follows: str) -> None:
    check_composed(w4a8_matmul, "nvfp4", "int8", (50, 40, 128), **FOLLOWS[follows])


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["int8", "fp8"])
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "int4"])
def test_every_code_under_many_scales_is_the_references_byte(weights: str, activations: str) -> None:
    """Each token is one column of the identity, so that y shows the 8-bit codes, undone of their scale."""
    k, n = 256, 64
    noise = torch.Generator().manual_seed(8)
    codes = torch.randint(0, 256, (n, k // 2), generator=noise, dtype=torch.uint8)
    plain = QuantizedTensor.quantize(torch.randn(n, k, generator=noise) * torch.logspace(-3, 1, k), weights)
    w = replace(plain, codes=codes)
    eye = torch.eye(k)
    one = eye.to(torch.int8) if activations == "int8" else eye.to(torch.float8_e4m3fn)
    x = QuantizedTensor(one, torch.ones(k), None, (k, k), FORMATS[activations])
    expected = reencode.reencode(w, activations)
    y = w4a8_matmul.w4a8_matmul(x, w, expected.scale, epilogue=FP32, tile=TILE)
    assert_within(y, expected.dequantize().T, torch.zeros_like(y))


def test_a_row_that_is_nan_stays_apart() -> None:
    x, w = operands("nvfp4", "int8", (5, 40, 128))
    w.scale.view(torch.uint8)[7, 2] = 0x7F
    w8 = reencode.reencode(w, "int8")
    y = w4a8_matmul.w4a8_matmul(x, w, w8.scale, epilogue=FP32, tile=TILE)
    assert y.isnan().all(0).nonzero().flatten().tolist() == [7] == y.isnan().any(0).nonzero().flatten().tolist()


def test_a_global_scale_of_each_row_is_taken() -> None:
    x, w = operands("nvfp4", "int8", (5, 40, 128))
    w = replace(w, global_scale=torch.linspace(0.001, 0.1, 40)[:, None])
    w8 = reencode.reencode(w, "int8")
    y, expected = (
        w4a8_matmul.w4a8_matmul(x, w, w8.scale, epilogue=FP32, tile=TILE),
        scaled_matmul.scaled_matmul(x, w8, epilogue=FP32, tile=TILE),
    )
    assert torch.equal(y, expected)


def bad_input() -> dict[str, tuple[Callable, str]]:
    x, w = operands("nvfp4", "int8", (4, 8, 128))
    scale = reencode.row_scales(w, "int8")
    call = partial(w4a8_matmul.w4a8_matmul, tile=TILE)
    _, group = operands("int4_g128", "int8", (4, 8, 128))
    wide, narrow = operands("nvfp4", "fp8", (4, 8, 192))
    long = QuantizedTensor(x.codes.repeat(1, 1024), x.scale, None, (4, 2**17), x.format)
    long_w = QuantizedTensor(w.codes.repeat(1, 1024), w.scale.repeat(1, 1024), w.global_scale, (8, 2**17), w.format)
    small = replace(TILE, k=64)
    return {
        "formats": (partial(call, x, reencode.reencode(w, "int8"), scale), "x is int8 and w int8, expected x in int8"),
        "activations": (partial(call, w, w, scale), "x is nvfp4 and w nvfp4"),
        "no rows": (partial(call, replace(x, codes=x.codes[:0], shape=(0, 128)), w, scale), "has no rows"),
        "K": (partial(call, x, narrow, scale), "K differs"),
        "K of fp8": (partial(call, wide, w, scale), "K differs"),
        "long sums": (partial(call, long, long_w, scale), "K is 131072, expected less"),
        "tile": (partial(call, x, group, scale, tile=small), "tile.k is 64, expected a multiple of int4_g128's 128"),
        "row scale": (partial(call, x, w, scale[:7]), r"row_scale is .* \(7,\), expected float32 \(8,\)"),
        "row scale type": (partial(call, x, w, scale.double()), r"row_scale is torch\.float64"),
        "bias": (partial(call, x, w, scale, epilogue=Epilogue(bias=torch.ones(7))), r"w4a8_matmul: bias is .* \(7,\)"),
    }


def test_operands_that_do_not_fit_are_named() -> None:
    for call, message in bad_input().values():
        with pytest.raises(ValueError, match=message):
            call()


# Faults: in a kernel file, the text `old` (which must occur once) becomes `new`, and the check must notice.
SHAPE = (17, 40, 320)
int8 = partial(check_composed, weights="nvfp4", activations="int8", shape=SHAPE)
fp8 = partial(check_composed, weights="mxfp4", activations="fp8", shape=SHAPE)
int4 = partial(check_composed, weights="int4", activations="int8", shape=SHAPE)
OURS, SHARED = "w4a8_matmul.py", "dequantize.py"
FAULTS: dict[str, tuple[str, str, str, Callable]] = {
    "nibbles out of order": (SHARED, "tl.join(c0, c4), tl.join(c2, c6)", "tl.join(c4, c0), tl.join(c2, c6)", int8),
    "odd and even": (SHARED, "tl.join(even, odd)", "tl.join(odd, even)", int4),
    "int4 is unsigned": (SHARED, "codes - 1032.0", "codes - 1024.0", int4),
    "unit of codes": (SHARED, "return 2.0**14", "return 2.0**13", int8),
    "multiplier not rounded": (OURS, ".to(tl.bfloat16).to(tl.float32)", "", int8),
    "global scale ignored": (OURS, "SCALE) * g[:, None]", "SCALE)", int8),
    "row scale ignored": (OURS, "value * step[None, :]", "value", int8),
    "row scale not inverted": (OURS, "tl.div_rn(1.0, step)", "step", int8),
    "scales one group off": (OURS, "start // GROUP +", "1 +", fp8),
    "scales of another row": (OURS, "w.scale + w_rows[:, None] * w.stride_scale", "w.scale + w_rows[:, None]", fp8),
    "rounding one place up": (OURS, "1.5 * 2.0**23", "1.5 * 2.0**24", int8),
    "no mask of K": (OURS, "EVEN_K=k % tile.k == 0", "EVEN_K=True", fp8),
    "rows past the end": (OURS, "tl.minimum(rows, M - 1)", "rows", int8),
    "columns past the end": (OURS, "tl.minimum(columns, N - 1)", "columns", int8),
    "last K tile dropped": (OURS, "range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)", fp8),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, check = FAULTS[fault]
    faulty = beside.with_fault(file, old, new, tmp_path)
    if file == SHARED:
        for name in ("unpack_words", "word_unit"):
            monkeypatch.setattr(w4a8_matmul, name, getattr(faulty, name))
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty if file == OURS else w4a8_matmul)
