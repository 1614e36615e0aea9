"""The int8 and fp8 matmul kernel on Triton's interpreter: int8 to the bit, the rest within what fp32 sums may lose."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_tests import lost_in_the_unit, on_hopper, sibling
from poison import poisoned
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels import epilogue as epilogues
from fluxq.kernels import ops
from fluxq.kernels.epilogue import Epilogue
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.scaled_matmul import kernel as scaled_matmul
from fluxq.kernels.tensor import QuantizedTensor, pack_named
from fluxq.kernels.tiles import MatmulTile
from fluxq.recipes.formats import FORMATS

beside = sibling("test_quantize_activation_kernel")
TILE = MatmulTile(m=32, n=32, k=32, warps=4, stages=3, group_m=2)
SHAPES = [(1, 33, 64), (5, 64, 45), (17, 130, 80), (130, 70, 96)]  # (M, N, K): tails of every axis, groups of 5 tiles
FP32 = Epilogue(dtype=torch.float32)
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


def check_int8(kernels: ModuleType, m: int, n: int, k: int, tile: MatmulTile = TILE) -> None:
    """The bits of the reference op."""
    x, q, w, bias = operands("int8", m, n, k)
    with poisoned():
        out = kernels.scaled_matmul(q, w, epilogue=Epilogue(bias=bias, dtype=torch.float32), tile=tile)
    expected = ops.quantized_linear(x, *pack_named(ops.LinearTensors(w.codes, w.scale, bias=bias), "int8-int8"))
    assert_within(out, expected, torch.zeros_like(expected), tile)


def check_blocks(kernels: ModuleType, tile: MatmulTile = TILE, shape: tuple[int, int, int] = (130, 70, 384)) -> None:
    """x with a scale for each 128 columns, against float64; blocks differ in scale by up to 100."""
    m, n, k = shape
    x, _, w, bias = operands("fp8", m, n, k)
    q = ops.quantize_activation(x * torch.logspace(-1, 1, k // 128).repeat_interleave(128), FORMATS["fp8_1x128"])
    a, b = q.dequantize().double(), w.dequantize().double()
    terms = k + lost_in_the_unit(k, 128)
    epilogue, value, bound = followed_by(
        a @ b.T, a.abs() @ b.abs().T, terms, bias, torch.bfloat16, rank=5, gelu=True, images=5, residual=True
    )
    with poisoned():
        out = kernels.scaled_matmul(q, w, epilogue=epilogue, tile=tile)
    assert_within(out.double(), value, bound, tile)


def check_epilogue(
    kernels: ModuleType,
    format: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    tile: MatmulTile = TILE,
    x_scales: Callable = lambda q: q,
    w_scales: Callable = lambda q: q,
    **follows: Any,
) -> None:
    """Against float64, each element within the rounding of its own sum; follows: as `followed_by` takes them."""
    m, n, k = shape
    _, q, w, bias = operands(format, m, n, k)
    q, w = x_scales(q), w_scales(w)
    a, b = (t.codes.double() * t.scale.double().reshape(-1, 1) for t in (q, w))
    terms = k + lost_in_the_unit(k, tile.acc_split)
    epilogue, value, bound = followed_by(a @ b.T, a.abs() @ b.abs().T, terms, bias, dtype, **follows)
    with poisoned():
        out = kernels.scaled_matmul(q, w, epilogue=epilogue, tile=tile)
    assert_within(out.double(), value, bound, tile)


def one_scale(q: QuantizedTensor) -> QuantizedTensor:
    """The same codes under one scale."""
    return QuantizedTensor(q.codes, q.scale.mean(), None, q.shape, FORMATS["fp8_tensor"])


def followed_by(
    product: Tensor,
    size: Tensor,
    terms: int,
    bias: Tensor,
    dtype: torch.dtype,
    *,
    rank: int = 0,
    gelu: bool = False,
    images: int = 0,
    residual: bool = False,
) -> tuple[Epilogue, Tensor, Tensor]:
    """An epilogue of random tensors, what it makes of a product (M, N) in float64, and what fp32 may lose.

    size: the sum of |a| |b| over the product's `terms`, each rounded once, and so is what follows.
    """
    noise = torch.Generator().manual_seed(7)
    (m, n), low_rank, gate, added = product.shape, None, None, None
    value, size, terms = product + bias.double(), size + bias.double().abs(), terms + 8
    if rank:
        h, up = (torch.randn(rows, rank, generator=noise).bfloat16() for rows in (m, n))
        low_rank = h, up
        value += h.double() @ up.double().T
        size += h.double().abs() @ up.double().abs().T
        terms += rank
    bound = terms * 2.0**-24 * size
    if gelu:
        value = F.gelu(value, approximate="tanh")
        bound = 1.13 * bound + 2.0**-20 * size  # 1.13 is gelu's steepest slope
    half = torch.finfo(dtype).eps / 2
    bound += 2.0**-23 * value.abs()
    if images:
        gate = torch.randn(images, n, generator=noise).bfloat16()
        gates = gate.double().repeat_interleave(m // images, dim=0)
        value, bound = value * gates, (bound + half * (value.abs() + bound)) * gates.abs()
    if residual:
        added = torch.randn(m, n, generator=noise).bfloat16()
        value, bound = value + added.double(), bound + half * (value.abs() + bound)
    bound += half * (value.abs() + bound)
    return Epilogue(bias, low_rank, gelu, gate, added, dtype), value, bound


def assert_within(found: Tensor, expected: Tensor, bound: Tensor, tile: MatmulTile = TILE) -> None:
    """|found - expected| <= bound for each element; the message says where it first is not, and in which tiles."""
    wrong = ~((found - expected).abs() <= bound)  # NaN is wrong
    if wrong.any():
        places = wrong.nonzero()
        row, column = places[0].tolist()
        tiles = sorted({(r // tile.m, c // tile.n) for r, c in places.tolist()})
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
    y = scaled_matmul.scaled_matmul(q, q, epilogue=FP32, tile=MatmulTile(16, 16, 512, 4, 3))
    assert torch.equal(y, (codes.long() @ codes.long().T).float())


@pytest.mark.often(2)
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


@pytest.mark.often(4)
@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gate", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_and_residual_give_the_bits_of_torch(
    dtype: torch.dtype, gate: torch.dtype | None, residual: torch.dtype
) -> None:
    check_gated(scaled_matmul, dtype, gate, residual)


def check_gated(module: Any, dtype: torch.dtype, gate: torch.dtype | None, residual: torch.dtype) -> None:
    """A product that is gated and added in its kernel, against one that torch gates and adds."""
    _, q, w, bias = operands("int8", 34, 70, 64)
    noise = torch.Generator().manual_seed(8)
    gates = None if gate is None else torch.randn(2, 70, generator=noise).to(gate)
    added = torch.randn(34, 70, generator=noise).to(residual)
    alone = module.scaled_matmul(q, w, epilogue=Epilogue(bias, dtype=dtype), tile=TILE)
    follows = Epilogue(bias, gate=gates, residual=added, dtype=dtype)
    both = module.scaled_matmul(q, w, epilogue=follows, tile=TILE)
    gated = alone if gates is None else (alone.view(2, 17, 70) * gates[:, None]).view(34, 70)
    expected = (added + gated).to(dtype)
    wrong = int((both != expected).sum())
    assert torch.equal(both, expected), f"{wrong} of {both.numel()} differ from those of torch"
    assert torch.equal(epilogues.gate_in_place(alone, follows), expected), "those of a pass of its own differ"


def check_gate_alone(module: Any) -> None:
    """The pass behind a product of the library, of several tiles each way."""
    noise = torch.Generator().manual_seed(9)
    y, residual, gate = (torch.randn(rows, 1030, generator=noise).bfloat16() for rows in (10, 10, 2))
    expected = residual + y * gate.repeat_interleave(5, dim=0)
    found = module.gate_in_place(y, Epilogue(gate=gate, residual=residual))
    assert torch.equal(found, expected), f"{int((found != expected).sum())} differ"


def test_behind_the_product_of_a_library_they_take_one_pass() -> None:
    check_gate_alone(epilogues)


@pytest.mark.often(5)
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("follows", FOLLOWS)
def test_what_follows_the_product_is_computed_in_fp32(format: str, follows: str) -> None:
    check_epilogue(scaled_matmul, format, (130, 70, 64), torch.float32, **FOLLOWS[follows])


VARIANTS = {
    "promoted": dataclasses.replace(TILE, acc_split=32),
    "promoted each second step": dataclasses.replace(TILE, acc_split=2 * TILE.k, descriptors=True),
    "descriptors": dataclasses.replace(TILE, descriptors=True),
    "halves": dataclasses.replace(TILE, halves=True),
    "descriptors and halves": dataclasses.replace(TILE, descriptors=True, halves=True),
    "unit scales": dataclasses.replace(TILE, unit_scales=True),
    "unit scales and descriptors": dataclasses.replace(TILE, unit_scales=True, descriptors=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_to_multiply_computes_the_same(variant: str) -> None:
    """Promotion too, where sums are fp32 as here."""
    tile = VARIANTS[variant]
    _, q, w, _ = operands("fp8", 130, 70, 80)
    plain, other = (scaled_matmul.scaled_matmul(q, w, tile=t) for t in (TILE, tile))
    assert torch.equal(plain, other) or on_hopper()
    check_epilogue(
        scaled_matmul, "fp8", (130, 70, 80), torch.bfloat16, tile, rank=5, gelu=True, images=5, residual=True
    )
    if not tile.unit_scales:
        check_int8(scaled_matmul, 130, 70, 80, tile)


IN_BLOCKS = ("descriptors", "halves", "descriptors and halves", "unit scales", "unit scales and descriptors")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "whole blocks", *IN_BLOCKS])
def test_x_may_have_a_scale_for_each_128_columns(variant: str) -> None:
    tiles = {"plain": TILE, "whole blocks": dataclasses.replace(TILE, k=128), **VARIANTS}
    check_blocks(scaled_matmul, tiles[variant])


@pytest.mark.parametrize("tile", ["plain", "descriptors"])
@pytest.mark.parametrize("which", ["x", "w", "both"])
def test_fp8_codes_may_share_one_scale(which: str, tile: str) -> None:
    scales: dict[str, Any] = {f"{part}_scales": one_scale for part in ("x", "w") if which in (part, "both")}
    check_epilogue(
        scaled_matmul, "fp8", (17, 70, 80), torch.float32, {"plain": TILE, **VARIANTS}[tile], residual=True, **scales
    )


def bad_input() -> dict[str, tuple[Callable, str]]:
    _, q, w, bias = operands("int8", 4, 8, 32)
    _, fp8, _, _ = operands("fp8", 4, 8, 32)
    x, _, fp8_w, _ = operands("fp8", 4, 8, 128)
    blocks = ops.quantize_activation(x, FORMATS["fp8_1x128"])
    call = partial(scaled_matmul.scaled_matmul, q, w, tile=TILE)

    def followed(**by) -> Callable:
        return partial(call, epilogue=Epilogue(**by))

    h, up = torch.ones(4, 2).bfloat16(), torch.ones(8, 2).bfloat16()
    empty = QuantizedTensor(q.codes[:0], q.scale[:0], None, (0, 32), q.format)
    long = QuantizedTensor(q.codes.repeat(1, 4096), q.scale, None, (4, 2**17), q.format)
    short = QuantizedTensor(w.codes[:, :16].contiguous(), w.scale, None, (8, 16), w.format)
    narrow = QuantizedTensor(q.codes[:, :24].contiguous(), q.scale, None, (4, 24), q.format)
    per_tensor = QuantizedTensor(q.codes, q.scale[0], None, q.shape, q.format)
    return {
        "formats": (partial(scaled_matmul.scaled_matmul, fp8, w, tile=TILE), "x is fp8 and w int8, expected both"),
        "blocks by int8": (partial(scaled_matmul.scaled_matmul, blocks, w, tile=TILE), "x is fp8_1x128 and w int8"),
        "weights in blocks": (partial(scaled_matmul.scaled_matmul, blocks, blocks, tile=TILE), "w without blocks"),
        "a step over blocks": (
            partial(scaled_matmul.scaled_matmul, blocks, fp8_w, tile=dataclasses.replace(TILE, k=256)),
            "tile.k is 256 and acc_split 0, expected a divisor of the 128 columns",
        ),
        "sums of blocks": (
            partial(scaled_matmul.scaled_matmul, blocks, fp8_w, tile=dataclasses.replace(TILE, acc_split=32)),
            "acc_split 32, expected .* 0: sums move",
        ),
        "no rows": (partial(scaled_matmul.scaled_matmul, empty, w, tile=TILE), r"x \(0, 32\) has no rows"),
        "K": (partial(scaled_matmul.scaled_matmul, q, short, tile=TILE), "K differs"),
        "long sums": (partial(scaled_matmul.scaled_matmul, long, long, tile=TILE), "K is 131072, expected less"),
        "descriptors": (
            partial(scaled_matmul.scaled_matmul, narrow, narrow, tile=VARIANTS["descriptors"]),
            "x has rows of 24 bytes .* take a tile without descriptors",
        ),
        "unit scales": (
            partial(scaled_matmul.scaled_matmul, q, w, tile=VARIANTS["unit scales"]),
            "tile.unit_scales is for fp8 .* not for int8 at 32",
        ),
        "sums": (
            partial(scaled_matmul.scaled_matmul, fp8, fp8, tile=dataclasses.replace(TILE, acc_split=48)),
            "tile.acc_split is 48, expected a divisor or a multiple of k = 32",
        ),
        "scale": (partial(scaled_matmul.scaled_matmul, per_tensor, w, tile=TILE), r"scale is .* \(\), expected"),
        "bias": (followed(bias=bias[:7]), r"bias is .* \(7,\), expected .* \(8,\)"),
        "bias type": (followed(bias=bias.double()), r"bias is torch\.float64"),
        "low rank": (followed(low_rank=(h, up.half())), r"up is torch\.float16 .* expected bfloat16"),
        "rank": (followed(low_rank=(h.repeat(1, 200), up.repeat(1, 200))), "rank 400, expected 1 to 64"),
        "gate": (followed(gate=torch.ones(3, 8)), r"gate \(3, 8\) does not split 4 tokens"),
        "residual": (followed(residual=torch.ones(8, 4).t()), r"residual has strides .*contiguous"),
        "dtype": (followed(dtype=torch.float64), r"dtype is torch\.float64"),
    }


def test_operands_that_do_not_fit_are_named() -> None:
    for call, message in bad_input().values():
        with pytest.raises(ValueError, match=message):
            call()


def test_outside_the_interpreter_cpu_tensors_are_refused(monkeypatch) -> None:
    from fluxq.kernels import checks

    monkeypatch.setattr(checks.JITFunction.run, "__module__", checks.JITFunction.__module__)
    _, q, w, _ = operands("int8", 4, 8, 32)
    with pytest.raises(ValueError, match=r"run on CUDA and ROCm devices, the tensors are on cpu.*torch\.ops\.fluxq"):
        scaled_matmul.scaled_matmul(q, w, tile=TILE)


# Faults: in the kernel file, the text `old` (which must occur once) becomes `new`, and the check must notice.
int8 = partial(check_int8, m=130, n=70, k=80)
fp8 = partial(check_epilogue, format="fp8", shape=(130, 70, 80), dtype=torch.bfloat16)
everything = partial(fp8, rank=5, gelu=True, images=5, residual=True)
copied = partial(everything, tile=VARIANTS["descriptors and halves"])
promoted = partial(everything, tile=VARIANTS["promoted each second step"])
shared = partial(fp8, x_scales=one_scale)
added = partial(check_gated, dtype=torch.bfloat16, gate=torch.bfloat16, residual=torch.bfloat16)
mixed = partial(check_gated, dtype=torch.bfloat16, gate=torch.float32, residual=torch.float32)
MATMUL, FOLLOWING = "scaled_matmul.py", "epilogue.py"
X_SCALE = "tl.load(x_scale + rows * stride_x_scale, mask=rows < M, other=0.0)"
W_SCALE = "value * tl.load(w_scale + columns"
FAULTS: dict[str, tuple[str, str, str, Callable]] = {
    "scale added": (MATMUL, W_SCALE, W_SCALE.replace("*", "+"), fp8),
    "scale rounded": (MATMUL, X_SCALE, X_SCALE + ".to(tl.bfloat16).to(tl.float32)", int8),
    "scale of the other axis": (MATMUL, X_SCALE, X_SCALE.replace("rows", "columns"), fp8),
    "one scale for all": (MATMUL, "min(x.scale.ndim, 1)", "0", fp8),
    "a scale for each": (MATMUL, "min(x.scale.ndim, 1)", "1", shared),
    "sums in bf16": (MATMUL, "value = parts[part].to(", "value = parts[part].to(tl.bfloat16).to(", int8),
    "no mask of K": (MATMUL, "k % tile.k == 0", "True", fp8),
    "rows past the end": (MATMUL, "tl.minimum(rows, M - 1)", "rows", fp8),
    "tiles unwritten": (MATMUL, "first + program % in_group % height", "first", fp8),
    "last K tile dropped": (MATMUL, "K, BLOCK_K):\n        ks", "K - BLOCK_K, BLOCK_K):\n        ks", fp8),
    "descriptors: one tile each": (MATMUL, "tiles_m * tiles_n, tl.num_programs(0)", "1, 1", copied),
    "descriptors: rows of x": (
        MATMUL,
        "right = w.load([tile_n * BLOCK_N, start])\n                acc",
        "right = w.load([tile_m * BLOCK_M, start])\n                acc",
        copied,
    ),
    "blocks: all under the first scale": (MATMUL, "+ start // GROUP", "+ 0", check_blocks),
    "blocks: scales of other rows": (MATMUL, "rows * (K // GROUP) +", "rows +", check_blocks),
    "blocks: not scaled": (MATMUL, "tl.fma(part, step[:, None], acc)", "acc + part", check_blocks),
    "blocks: scales not masked": (
        MATMUL,
        "start // GROUP, mask=rows < M",
        "start // GROUP, mask=rows < M + 99",
        check_blocks,
    ),
    "promoted: the last part alone": (MATMUL, "acc += part", "acc = part", promoted),
    "promoted: a step left out": (MATMUL, "first + ACC_SPLIT, BLOCK_K", "first + BLOCK_K, BLOCK_K", promoted),
    "halves: the left twice": (MATMUL, "parts[part].to(", "parts[0].to(", copied),
    "no mask of the output": (FOLLOWING, "row_mask[:, None] & column_mask[None, :]\n", "row_mask[:, None]\n", fp8),
    "bias of the wrong sign": (FOLLOWING, "value + tl.load(following.bias", "value - tl.load(following.bias", int8),
    "ranks past the end": (FOLLOWING, "(ranks < R)[None, :]", "(ranks < low_rank.BLOCK_R)[None, :]", everything),
    "gate of the first image": (FOLLOWING, "rows // following.gate.tokens", "rows * 0", everything),
    "gelu": (FOLLOWING, "v + 0.044715 * v * v * v", "v", everything),
    "gate alone: tiles of columns": (FOLLOWING, "(tl.program_id(1) * COLUMNS", "(0 * COLUMNS", check_gate_alone),
    "gate alone: tiles of rows": (FOLLOWING, "(tl.program_id(0) * ROWS", "(0 * ROWS", check_gate_alone),
    "residual dropped": (FOLLOWING, "value + added", "value + 0.0 * added", everything),
    "not rounded before the gate": (
        FOLLOWING,
        "None:\n        value = rounded(value, y)",
        "None:\n        value += 0",
        added,
    ),
    "not rounded behind the gate": (
        FOLLOWING,
        "            value = rounded(value, y)",
        "            value += 0",
        added,
    ),
    "always rounded behind the gate": (
        FOLLOWING,
        "if gate.dtype.element_ty",
        "if y.dtype.element_ty",
        mixed,
    ),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("check", [int8, fp8, everything, copied, promoted, shared, added, mixed])
def test_without_a_fault_the_checks_are_green(check: Callable) -> None:
    check(scaled_matmul)


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, check = FAULTS[fault]
    faulty = beside.with_fault(file, old, new, tmp_path)
    if file == FOLLOWING and check is not check_gate_alone:
        monkeypatch.setattr(scaled_matmul, "finish", faulty.finish)
        faulty = scaled_matmul
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)
