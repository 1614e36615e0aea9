"""The int8 and fp8 matmul kernel on Triton's interpreter: int8 to the bit, the rest within what fp32 sums may lose."""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels import scaled_matmul
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.tiles import MatmulTile
from fluxq.quantize import ops
from fluxq.quantize.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS


def sibling(name: str) -> ModuleType:
    """Another file of this folder, for what it defines."""
    spec = importlib.util.spec_from_file_location(f"beside_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


beside = sibling("test_kernels_quantize")
TILE = MatmulTile(m=32, n=32, k=32, warps=4, stages=3, group_m=2)
SHAPES = [(1, 33, 64), (5, 64, 45), (17, 130, 80), (130, 70, 96)]  # (M, N, K): tails of every axis, groups of 5 tiles
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # as gelu(-100) does


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def operands(format: str, m: int, n: int, k: int) -> tuple[Tensor, QuantizedTensor, QuantizedTensor, Tensor]:
    """x (m, k) and its codes, codes of a weight (n, k), a bias (n,); rows differ in scale by up to 1000."""
    noise = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=noise) * torch.logspace(-2, 1, m)[:, None]
    w = torch.randn(n, k, generator=noise) * torch.logspace(0, -2, n)[:, None]
    weight = QuantizedTensor.quantize(w, format)
    return x, ops.quantize_activation(x, FORMATS[format]), weight, torch.randn(n, generator=noise)


def check_int8(kernels: ModuleType, m: int, n: int, k: int) -> None:
    """The bits of the reference op."""
    x, q, w, bias = operands("int8", m, n, k)
    out = beside.guarded(m, n, dtype=torch.float32)
    kernels.scaled_matmul(q, w, bias=bias, dtype=torch.float32, tile=TILE, out=out)
    expected = ops.quantized_linear(x, w.codes, w.scale, None, None, bias, None, None, "int8-int8")
    assert_within(out, expected, torch.zeros_like(expected))
    beside.assert_guards_untouched(out)


def check_epilogue(
    kernels: ModuleType, format: str, shape: tuple[int, int, int], dtype: torch.dtype, *, images: int = 0, **follows
) -> None:
    """Against float64, each element within the rounding of its own sum. follows: rank, gelu, residual."""
    m, n, k = shape
    _, q, w, bias = operands(format, m, n, k)
    noise = torch.Generator().manual_seed(7)
    options: dict = {"bias": bias, "gelu": follows.get("gelu", False)}
    a, b = q.dequantize().double(), w.dequantize().double()
    value, size = a @ b.T + bias, a.abs() @ b.abs().T + bias.abs()
    terms = k + 8
    if rank := follows.get("rank", 0):
        h, up = (torch.randn(rows, rank, generator=noise).bfloat16() for rows in (m, n))
        options["low_rank"] = h, up
        value += h.double() @ up.double().T
        size += h.double().abs() @ up.double().abs().T
        terms += rank
    bound = terms * 2.0**-24 * size
    if options["gelu"]:
        value = F.gelu(value, approximate="tanh")
        bound = 1.13 * bound + 2.0**-20 * size  # 1.13 is gelu's steepest slope
    if images:
        options["gate"] = torch.randn(images, n, generator=noise).bfloat16()
        gate = options["gate"].double().repeat_interleave(m // images, dim=0)
        value, bound = value * gate, bound * gate.abs() + 2.0**-24 * (value * gate).abs()
    if follows.get("residual"):
        options["residual"] = torch.randn(m, n, generator=noise).bfloat16()
        value = value + options["residual"].double()
    bound += 2.0**-23 * value.abs() + torch.finfo(dtype).eps / 2 * (value.abs() + bound)
    out = beside.guarded(m, n, dtype=dtype)
    kernels.scaled_matmul(q, w, dtype=dtype, tile=TILE, out=out, **options)
    assert_within(out.double(), value, bound)
    beside.assert_guards_untouched(out)


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """|found - expected| <= bound for each element; the message says where it first is not, and in which tiles."""
    wrong = ~((found - expected).abs() <= bound)  # NaN is wrong
    if wrong.any():
        places = wrong.nonzero()
        row, column = places[0].tolist()
        tiles = sorted({(r // TILE.m, c // TILE.n) for r, c in places.tolist()})
        raise AssertionError(
            f"{len(places)} of {wrong.numel()} differ, in tiles {tiles}; first at ({row}, {column}): "
            f"{found[row, column]:.9g}, expected {expected[row, column]:.9g} within {bound[row, column]:.2g}"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_gives_the_bits_of_the_reference(shape: tuple[int, int, int]) -> None:
    check_int8(scaled_matmul, *shape)


def test_int8_sums_are_exact_for_the_largest_codes() -> None:
    k = 2051
    codes = torch.full((16, k), 127, dtype=torch.int8)
    codes[:, 0] = torch.arange(16, dtype=torch.int8)  # odd sums beyond 2^24, which fp32 would have rounded on the way
    q = QuantizedTensor(codes, torch.ones(16), None, (16, k), FORMATS["int8"])
    y = scaled_matmul.scaled_matmul(q, q, dtype=torch.float32, tile=MatmulTile(16, 16, 512, 4, 3))
    assert torch.equal(y, (codes.long() @ codes.long().T).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_within_the_rounding_of_its_sums(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_epilogue(scaled_matmul, "fp8", shape, dtype)


FOLLOWS = {
    "low rank": {"rank": 5},
    "low rank of a full block": {"rank": 32},
    "gelu": {"gelu": True},
    "residual": {"residual": True},
    "gate": {"images": 1},
    "gate of each image and residual": {"images": 5, "residual": True},
    "all": {"rank": 16, "gelu": True, "images": 2, "residual": True},
}


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("follows", FOLLOWS)
def test_what_follows_the_product_is_computed_in_fp32(format: str, follows: str) -> None:
    check_epilogue(scaled_matmul, format, (130, 70, 64), torch.float32, **FOLLOWS[follows])


def test_promoting_partial_sums_changes_nothing_where_sums_are_fp32() -> None:
    _, q, w, _ = operands("fp8", 17, 33, 96)
    plain, promoted = (
        scaled_matmul.scaled_matmul(q, w, tile=MatmulTile(32, 32, 32, 4, 3, acc_split=split)) for split in (0, 32)
    )
    assert torch.equal(plain, promoted)


def bad_input() -> dict[str, tuple[Callable, str]]:
    _, q, w, bias = operands("int8", 4, 8, 32)
    _, fp8, _, _ = operands("fp8", 4, 8, 32)
    call = partial(scaled_matmul.scaled_matmul, q, w, tile=TILE)
    h, up = torch.ones(4, 2).bfloat16(), torch.ones(8, 2).bfloat16()
    empty = QuantizedTensor(q.codes[:0], q.scale[:0], None, (0, 32), q.format)
    long = QuantizedTensor(q.codes.repeat(1, 4096), q.scale, None, (4, 2**17), q.format)
    short = QuantizedTensor(w.codes[:, :16].contiguous(), w.scale, None, (8, 16), w.format)
    per_tensor = QuantizedTensor(q.codes, q.scale[0], None, q.shape, q.format)
    return {
        "formats": (partial(scaled_matmul.scaled_matmul, fp8, w, tile=TILE), "x is fp8 and w int8, expected both"),
        "no rows": (partial(scaled_matmul.scaled_matmul, empty, w, tile=TILE), r"x \(0, 32\) has no rows"),
        "K": (partial(scaled_matmul.scaled_matmul, q, short, tile=TILE), "K differs"),
        "long sums": (partial(scaled_matmul.scaled_matmul, long, long, tile=TILE), "K is 131072, expected less"),
        "scale": (partial(scaled_matmul.scaled_matmul, per_tensor, w, tile=TILE), r"scale is .* \(\), expected"),
        "bias": (partial(call, bias=bias[:7]), r"bias is .* \(7,\), expected .* \(8,\)"),
        "bias type": (partial(call, bias=bias.double()), r"bias is torch\.float64"),
        "low rank": (partial(call, low_rank=(h, up.half())), r"up is torch\.float16 .* expected bfloat16"),
        "rank": (partial(call, low_rank=(h.repeat(1, 200), up.repeat(1, 200))), "rank 400, expected 1 to 256"),
        "gate": (partial(call, gate=torch.ones(3, 8)), r"gate \(3, 8\) does not split 4 tokens"),
        "residual": (partial(call, residual=torch.ones(8, 4).t()), r"residual has strides .*contiguous"),
        "dtype": (partial(call, dtype=torch.float64), r"dtype is torch\.float64"),
        "out": (partial(call, out=torch.ones(4, 8)), r"out is torch\.float32 .* expected bfloat16"),
        "device": (partial(call, out=torch.ones(4, 8, device="meta").bfloat16()), "out is on meta"),
    }


def test_operands_that_do_not_fit_are_named() -> None:
    for call, message in bad_input().values():
        with pytest.raises(ValueError, match=message):
            call()


def test_outside_the_interpreter_cpu_tensors_are_refused(monkeypatch) -> None:
    from fluxq.kernels import checks

    monkeypatch.setattr(checks.JITFunction.run, "__module__", checks.JITFunction.__module__)
    _, q, w, _ = operands("int8", 4, 8, 32)
    with pytest.raises(ValueError, match="run on CUDA and ROCm devices, the tensors are on cpu"):
        scaled_matmul.scaled_matmul(q, w, tile=TILE)


# Faults: in the kernel file, the text `old` (which must occur once) becomes `new`, and the check must notice.
int8 = partial(check_int8, m=130, n=70, k=80)
fp8 = partial(check_epilogue, format="fp8", shape=(130, 70, 80), dtype=torch.bfloat16)
everything = partial(fp8, rank=5, gelu=True, images=5, residual=True)
X_SCALE = "tl.load(x_scale + rows, mask=row_mask, other=0.0)[:, None]"
W_SCALE = "tl.load(w_scale + columns, mask=column_mask, other=0.0)[None, :]"
THEN = "\n    value = value * "
FAULTS: dict[str, tuple[str, str, Callable]] = {
    "scale added": (THEN + W_SCALE, THEN.replace("*", "+") + W_SCALE, fp8),
    "scales in the other order": (X_SCALE + THEN + W_SCALE, W_SCALE + THEN + X_SCALE, int8),
    "scale of the other axis": (X_SCALE, "tl.load(x_scale + columns, mask=columns < M, other=0.0)[None, :]", fp8),
    "sums in bf16": ("value = acc.to(tl.float32)", "value = acc.to(tl.bfloat16).to(tl.float32)", int8),
    "no mask of K": ("EVEN_K=k % tile.k == 0", "EVEN_K=True", fp8),
    "no mask of the output": ("row_mask[:, None] & column_mask[None, :]\n", "row_mask[:, None]\n", fp8),
    "rows past the end": ("tl.minimum(rows, M - 1)", "rows", fp8),
    "tiles unwritten": ("first + program % in_group % height", "first", fp8),
    "last K tile dropped": ("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)", fp8),
    "bias of the wrong sign": ("value + tl.load(bias", "value - tl.load(bias", int8),
    "ranks past the end": ("(ranks < R)[None, :]", "(ranks < BLOCK_R)[None, :]", everything),
    "gate of the first image": ("rows // tokens", "rows * 0", everything),
    "gelu": ("v + 0.044715 * v * v * v", "v", everything),
    "residual dropped": ("value + added", "value + 0.0 * added", everything),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path) -> None:
    old, new, check = FAULTS[fault]
    check(scaled_matmul)
    faulty = beside.with_fault("scaled_matmul.py", old, new, tmp_path)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)
