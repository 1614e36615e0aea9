"""The kernels of attention from 8-bit codes on the interpreter: codes byte for byte, attention within its bound.

Each check takes the kernel file as an argument: the tests hand it the real one, the last test one with a fault.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attention_bounds import as_kernels_keep, bounds
from kernel_tests import with_fault
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels.attention import kernel as kernels_attention
from fluxq.kernels.attention import op as reference
from fluxq.kernels.attention.op import KEY_BLOCK, Operands
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.tiles import MatmulTile, Tile

QUANTIZE = Tile(rows=64, columns=64, warps=4)
TILE = MatmulTile(m=64, n=KEY_BLOCK, k=64, warps=4, stages=2)
Shape = tuple[int, int, int, int]  # B, S, Skv, H
Heads = tuple[Tensor, Tensor, Tensor]  # q, k, v
GUARD = 64  # bytes before and after each new tensor that no kernel may touch
SCALE = 0.3  # of logits, which then are a few units large
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # infinity and NaN are among x


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def heads(b: int, s: int, h: int, d: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random heads, a view into one projection of q, k and v."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(b, s, 3 * h * d, generator=noise).to(dtype)[:, :, h * d : 2 * h * d].unflatten(-1, (h, d))


def inputs(b: int, s: int, skv: int, h: int, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> Heads:
    """q, k, v as views with gaps; keys share a mean, tokens and channels differ in size."""
    q, k, v = (heads(b, n, h, d, dtype, seed) for seed, n in enumerate((s, skv, skv)))
    k = k + torch.linspace(-3, 3, d).to(dtype)
    v = v * torch.logspace(-2, 1, d).to(dtype) * torch.linspace(1, 3, h)[:, None].to(dtype)
    return q * torch.logspace(-1, 0.5, s)[:, None, None].to(dtype), k, v


@contextmanager
def poisoned(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold bytes 0x7F, NaN in fp8 and a huge number elsewhere, and so do guards around them, which stay."""
    guards = []

    def empty(shape, dtype, device):
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.full((GUARD + size + GUARD,), 0x7F, dtype=torch.uint8)
        guards.append((memory, size, tuple(shape)))
        return memory[GUARD : GUARD + size].view(dtype).view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(kernels.torch, "empty", empty)
        yield
    for memory, size, shape in guards:
        for name, guard in (("before", memory[:GUARD]), ("after", memory[GUARD + size :])):
            assert (guard == 0x7F).all(), f"bytes {name} a tensor {shape} differ"


def check_codes(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    shape: Shape = (2, 130, 257, 2),
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile = QUANTIZE,
    codes: str = "fp8",
) -> None:
    """The mean within the rounding of its sum; codes and scales are the reference's bytes for that mean."""
    q, k, v = inputs(*shape, d=tile.columns, dtype=dtype)
    with poisoned(kernels, monkeypatch):
        found = kernels.quantize_operands(q, k, v, codes, tile=tile)
    keys = k.shape[1]
    excess = (found.k_mean - k.double().mean(1)).abs() - (keys + 2) * 2.0**-24 * k.double().abs().mean(1)
    assert (excess <= 0).all(), f"k_mean: {int((excess > 0).sum())} differ"
    with monkeypatch.context() as patch:
        patch.setattr(reference, "key_mean", lambda k: found.k_mean)
        assert_same_bytes(found, as_kernels_keep(reference.quantize_operands(q, k, v, codes)))


def assert_same_bytes(found: Operands, expected: Operands) -> None:
    for name in ("q_scale", "k_scale", "v_scale", "q", "k", "v"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.is_contiguous()
        if ours.dtype == torch.float32:
            wrong = ~((ours == theirs) | (ours.isnan() & theirs.isnan()))
        else:
            bits = torch.int16 if ours.dtype == torch.float16 else torch.uint8
            wrong = ours.view(bits) != theirs.view(bits)
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at {(at := wrong.nonzero()[0].tolist())}: "
            f"{float(ours[tuple(at)])} instead of {float(theirs[tuple(at)])}"
        )


def check_attention(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    shape: Shape = (2, 130, 257, 2),
    dtype: torch.dtype = torch.bfloat16,
    tile: MatmulTile = TILE,
    codes: str = "fp8",
) -> None:
    """o of the reference's codes is within the bound, and bytes around it stay."""
    operands = reference.quantize_operands(*inputs(*shape, d=tile.k, dtype=dtype), codes)
    with poisoned(kernels, monkeypatch):
        o = kernels.attend(as_kernels_keep(operands), *shape[1:3], SCALE, dtype, tile=tile)
    assert o.shape == (shape[0], shape[1], shape[3], tile.k) and o.dtype == dtype and o.is_contiguous()
    expected, bound = bounds(operands, *shape[1:3], SCALE, dtype)
    wrong = ~((o - expected).abs() <= bound)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ, first at (image, query, head, column) = "
        f"{(at := wrong.nonzero()[0].tolist())}, query {at[1] % tile.m} of its tile: {o[tuple(at)]} instead of "
        f"{expected[tuple(at)]} ± {bound[tuple(at)]:.3g}"
    )


def check_distant_heads(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third token of q, k and v is 2^31 elements from the first, an offset that does not fit into 32 bits."""
    whole = inputs(1, 3, 3, 1)
    apart = []
    for x in whole:
        far = torch.empty(2**31 + 64, dtype=x.dtype).as_strided(x.shape, (1, 2**30, 1, 1))
        apart.append(far.copy_(x))  # only what is written is resident
    found = kernels.quantize_operands(*apart, tile=QUANTIZE)
    assert_same_bytes(found, kernels.quantize_operands(*whole, tile=QUANTIZE))


def check_vanishing(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of the scales of q and k is below fp32's smallest number: all keys count alike, and no others."""
    q, k, v = inputs(1, 17, 17, 2)
    operands = reference.quantize_operands(q * 1e-25, k * 1e-25, v)
    with poisoned(kernels, monkeypatch):
        o = kernels.attend(as_kernels_keep(operands), 17, 17, SCALE, torch.float32, tile=TILE)
    wrong = ~((o - reference.attend(operands, 17, 17, SCALE, torch.float32)).abs() < 1e-3)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ"


SHAPES = [(1, 1, 1, 1), (1, 17, 130, 2), (2, 130, 128, 1), (1, 128, 17, 3)]


@pytest.mark.often(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["int8", "int8-16bit"])
def test_codes_of_int8_are_the_references_bytes(name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    check_codes(kernels_attention, monkeypatch, shape, codes=name)


@pytest.mark.often(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["int8", "int8-16bit"])
def test_attention_from_int8_is_within_its_bound_of_float64(
    name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_attention(kernels_attention, monkeypatch, shape, codes=name)


@pytest.mark.often(4)
@pytest.mark.parametrize("dtype", reference.FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_the_references_bytes(shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check_codes(kernels_attention, monkeypatch, shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 128])
def test_codes_of_heads_of_128_by_other_numbers_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_codes(kernels_attention, monkeypatch, (1, 130, 257, 2), tile=Tile(rows, 128, 4))


@pytest.mark.parametrize("dtype", reference.FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_within_its_bound_of_float64(
    shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_attention(kernels_attention, monkeypatch, shape, dtype)


def test_scales_that_vanish_leave_the_mean_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    check_vanishing(kernels_attention, monkeypatch)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_not_above_0_is_refused(scale: float) -> None:
    x = torch.ones(1, 4, 2, 64)
    for op in (reference.attention_fp8, partial(kernels_attention.attention_fp8, tile=TILE, quantize_tile=QUANTIZE)):
        with pytest.raises(ValueError, match="expected a finite number above 0"):
            op(x, x, x, scale=scale)


TILES = {
    "sums split": replace(TILE, acc_split=KEY_BLOCK),
    "as tall as a block": replace(TILE, m=128),
    "short": replace(TILE, m=32),
    "heads of 128": replace(TILE, k=128),
    "unit scales": replace(TILE, unit_scales=True),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("codes", reference.CODES)
@pytest.mark.parametrize("tile", TILES)
def test_every_form_of_the_kernel_is_within_the_bound(tile: str, codes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_attention(kernels_attention, monkeypatch, (1, 130, 257, 2), tile=TILES[tile], codes=codes)


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("scale", "codes"), [(None, "fp8"), (SCALE, "fp8"), (SCALE, "int8"), (SCALE, "int8-16bit")], ids=str
)
def test_all_launches_together_are_near_the_op(
    scale: float | None, codes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(2, 17, 130, 2)
    with poisoned(kernels_attention, monkeypatch):
        found = kernels_attention.attention_fp8(q, k, v, scale, codes, tile=TILE, quantize_tile=QUANTIZE)
    expected = reference.attention_fp8(q, k, v, scale, codes)
    assert float((found - expected).float().norm() / expected.float().norm()) < 2.0**-8


def test_keys_far_below_the_maximum_add_nothing() -> None:
    q, k, v = inputs(1, 17, 257, 1)
    k = k.clone()
    k[:, 200] += 50 * q[:, 3]  # after the smoothing still by far the most alike
    found = kernels_attention.attention_fp8(q, k, v, 1.0, tile=TILE, quantize_tile=QUANTIZE)
    torch.testing.assert_close(found[:, 3], v[:, 200], rtol=2.0**-4, atol=1e-4)
    assert found.isfinite().all()


@pytest.mark.often(2)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("codes", reference.CODES)
def test_nan_and_infinity_go_where_the_references_go(codes: str, name: str, value: float) -> None:
    x = dict(zip("qkv", inputs(1, 130, 130, 2), strict=True))
    x[name] = x[name].clone()
    x[name][0, 3, 1, 5] = value
    found = kernels_attention.attention_fp8(**x, scale=SCALE, codes=codes, tile=TILE, quantize_tile=QUANTIZE)
    bad = reference.attention_fp8(*x.values(), SCALE, codes).isnan()
    assert bad.any() and not bad.all() and torch.equal(found.isnan(), bad)


def test_zeros_stay_zeros() -> None:
    q = torch.zeros(1, 5, 2, 64)
    assert not kernels_attention.attention_fp8(q, q, q, None, tile=TILE, quantize_tile=QUANTIZE).any()


def test_tokens_may_be_any_distance_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    check_distant_heads(kernels_attention, monkeypatch)


@pytest.mark.parametrize("chip", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_each_chip_keeps_values_and_weights_in_one_order(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreting(chip):
        check_codes(kernels_attention, monkeypatch, (1, 17, 130, 1))
        check_attention(kernels_attention, monkeypatch, (1, 17, 130, 1))


X = torch.ones(1, 4, 2, 64)
BAD_INPUT = {
    "heads of 32": (dict.fromkeys("qkv", X[..., :32]), {}, "heads have 32 elements, expected one of 64, 128"),
    "last axis strided": ({"k": torch.ones(1, 4, 64, 2).mT}, {}, r"k has strides .*contiguous"),
    "no tokens": ({"q": X[:, :0]}, {}, r"q \(1, 0, 2, 64\) is empty"),
    "k of other heads": ({"k": X[:, :, :1]}, {}, r"k is .*\(1, 4, 1, 64\)"),
    "rows that divide no block": ({}, {"quantize_tile": Tile(256, 64, 4)}, "the quantizing tile is 256 x 64"),
    "rows of no block of 16": ({}, {"quantize_tile": Tile(8, 64, 4)}, "8 x 64, expected .* 16 or more"),
    "columns of other heads": ({}, {"quantize_tile": Tile(64, 128, 4)}, "expected 64 columns"),
    "fewer keys than a block": ({}, {"tile": replace(TILE, n=64)}, r"n = 128 and k = D = 64"),
    "a tile of other heads": ({}, {"tile": replace(TILE, k=128)}, "the tile is 64 x 128 x 128"),
    "sums of half a block": ({}, {"tile": replace(TILE, acc_split=64)}, "acc_split 64"),
    "a tile over two blocks": ({}, {"tile": replace(TILE, m=256)}, "m that divides 128"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_input_that_the_kernels_do_not_take_is_named(case: str) -> None:
    changed, tiles, message = BAD_INPUT[case]
    with pytest.raises(ValueError, match=message):
        kernels_attention.attention_fp8(
            **{"q": X, "k": X, "v": X} | changed, scale=None, **{"tile": TILE, "quantize_tile": QUANTIZE} | tiles
        )


# Faults: the text `old` (which must occur once) becomes `new`, and the check must notice.
even = partial(check_attention, shape=(1, 17, 256, 2))
split = partial(even, tile=replace(TILE, acc_split=KEY_BLOCK))
vanishing = check_vanishing
codes, far = check_codes, check_distant_heads
int8_codes, int8 = partial(check_codes, codes="int8"), partial(check_attention, codes="int8")
fp16_codes, fp16 = partial(check_codes, codes="int8-16bit"), partial(even, codes="int8-16bit")
one = partial(check_attention, shape=(1, 17, 17, 2))
FAULTS: dict[str, tuple[str, str, Callable]] = {
    "mean of the tile": ("tl.full((), S, tl.float32)", "tl.full((), 128, tl.float32)", codes),
    "mean not subtracted": ("if mean is not None:", "if False:", codes),
    "mean of another head": ("tl.load(mean + head * D + columns)", "tl.load(mean + columns)", codes),
    "mean in the padding": ("tl.where(here, values", "tl.where(here | True, values", codes),
    "amax of values": ("magnitude_bits(values), 1)", "magnitude_bits(tl.maximum(values, 0.0)), 1)", int8_codes),
    "amax of the last rows": ("amax_bits(parts, BLOCK // ROWS)", "amax_bits((parts[-1],), 1)", codes),
    "a smaller largest code": ("127.0 if INT8 else 448.0", "127.0 if INT8 else 416.0", codes),
    "a larger scale of int8": ("127.0 if INT8 else 448.0", "120.0 if INT8 else 448.0", int8_codes),
    "int8 scale of one token": ("+ tokens[:, None], step)", "+ tokens[:, None] * 0, step)", int8_codes),
    "int8 codes of fp8": ('"int8" if INT8 else "e4m3"', '"e4m3"', int8_codes),
    "values in 8 bit": ("values.to(tl.float16).T", "values.to(tl.float8e4nv).to(tl.float16).T", fp16_codes),
    "int8 scale of the first token": ("* QUERY_BLOCK + rows)", "* QUERY_BLOCK + rows * 0)", int8),
    "int8 scale of the last token": ("by[:, None] if INT8 else by", "tl.max(by, 0) if INT8 else by", int8),
    "weights in 8 bit": (
        "weights = p.to(values.dtype)",
        "weights = p.to(tl.float8e4nv).to(values.dtype)",
        fp16,
    ),
    "scale of the first block": ("tl.num_programs(0) + block, step)", "tl.num_programs(0), step)", codes),
    "tokens unwritten": ("code.to(tl.uint8))", "code.to(tl.uint8), mask=(tokens < S)[:, None])", codes),
    "values of another head": ("tl.load(scale + head * D + columns)", "tl.load(scale + columns)", codes),
    "values not turned": (".to(tl.uint8).T, D, ROWS)", ".to(tl.uint8), D, ROWS)", codes),
    "no mask of tokens": ("here = (tokens < S)[:, None]", "here = (tokens > -1)[:, None]", codes),
    "no mask of keys": ("if MASKED:", "if False:", one),
    "the last block twice": ("blocks = key_blocks - 1", "blocks = key_blocks", one),
    "keys masked early": ("tokens < SKV)[None", "tokens < SKV - 1)[None", one),
    "q's scale of the first block": ("+ tl.program_id(0) * BLOCK_M // QUERY_BLOCK)", "+ 0)", check_attention),
    "k's scale of the first block": ("tl.load(k_scale + block)", "tl.load(k_scale)", check_attention),
    "v's scale of another head": ("tl.load(v_scale + head * D", "tl.load(v_scale + head % H * D", check_attention),
    "scale of the logits twice": ("* log2_scale\n", "* log2_scale * log2_scale\n", check_attention),
    "maximum of this block": ("tl.maximum(highest, tl.max(t, 1) * by)", "tl.max(t, 1) * by", check_attention),
    "sum not corrected": ("total = total * correction + ", "total = total + ", check_attention),
    "products not corrected": ("else acc * correction[:, None]", "else acc * 1.0", even),
    "p not scaled": ("(P_EXPONENT - new)", "(0.0 - new)", check_attention),
    "weights in 16 bit": (
        "add_product(part, weights, values,",
        "add_product(part, in_order(p.to(tl.float16), BLOCK_M, BLOCK_N), values.to(tl.float16),",
        even,
    ),
    "products of a block not corrected": ("tl.fma(acc, correction[:, None], part)", "acc + part", split),
    "a block's products lost": ("acc = tl.fma(acc, correction[:, None], part) if", "acc = part if", split),
    "another order of values": ("(0, 1, 3, 2, 4)", "(0, 1, 2, 3, 4)", codes),
    "weights in their own order": ("weights = in_order(weights, BLOCK_M, BLOCK_N)", "pass", even),
    "no guard of -inf": ("tl.where(by == 0, LEAST, by)", "by", vanishing),
    "base e": ("p = tl.exp2(", "p = tl.exp(", check_attention),
    "o by head": ("((head // H * S + rows)[:, None] * H + head % H)", "(head * S + rows)[:, None]", check_attention),
    "no mask of queries": ("mask=(rows < S)[:, None])", "mask=(rows >= 0)[:, None])", check_attention),
    "queries unwritten": ("mask=(rows < S)[:, None])", "mask=(rows < S - 1)[:, None])", check_attention),
    "32-bit offsets": ("tokens[:, None] * stride_s + ", "tokens.to(tl.int32)[:, None] * stride_s + ", far),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, check = FAULTS[fault]
    faulty = with_fault(kernels_attention, old, new, tmp_path)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty, monkeypatch)
