"""The kernel of q/k norm and rotary embedding on Triton's interpreter, against torch and against float64.

Each check takes the kernel file as an argument: the tests hand it the real one, the last test one with a fault.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_tests import with_fault
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.qk_norm_rope import kernel as qk_norm_rope
from fluxq.kernels.qk_norm_rope import op as rope
from fluxq.kernels.tensor import pack_named
from fluxq.kernels.tiles import Tile

TILE = Tile(rows=4, columns=64, warps=4)
EPS = 1e-6
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # infinity and NaN are among x


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def angles(positions: int, d: int) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, d), every element another angle: an element taken from the wrong place shows."""
    angle = torch.linspace(-7, 9, positions * d).reshape(positions, d)
    return angle.cos(), angle.sin()


def heads(shape: tuple[int, int, int, int], dtype: torch.dtype, *, whole: bool = False, seed: int = 0) -> Tensor:
    """Random heads; `whole` numbers, some fixed by hand, whose squares add up exactly in every order."""
    noise = torch.Generator().manual_seed(seed)
    if not whole:
        return torch.randn(shape, generator=noise).mul(torch.logspace(-3, 2, shape[1])[:, None, None]).to(dtype)
    x = torch.randint(-8, 9, shape, generator=noise).to(dtype)
    x[0, 0, 0], x[-1, -1, -1] = 0.0, -0.0
    return x


def weights(d: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(d + seed)
    q, k = ((torch.randn(d, generator=noise) * 0.3 + 1).to(dtype) for _ in "qk")
    return q, k


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal, the sign of zero and where NaN is included."""
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.is_contiguous()
    wrong = ~((found == expected) & (found.signbit() == expected.signbit()) | (found.isnan() & expected.isnan()))
    assert not wrong.any(), (
        f"{int(wrong.sum())} differ, first at (image, token, head, column) = {(at := wrong.nonzero()[0].tolist())}, "
        f"head {at[2] % TILE.rows} of its tile: {found[tuple(at)]} instead of {expected[tuple(at)]}"
    )


def check_exact(
    kernels: ModuleType,
    shape=(2, 3, 6, 64),
    dtype=torch.bfloat16,
    interleaved=True,
    round_before_weight=False,
    second=5,
    with_v=True,
    rotated=True,
    weighted=(True, True),
) -> None:
    """Check that q, k and v are the reference's bits where the sums of squares are exact.

    The views leave gaps between heads. second: tokens of a second stream, or 0. weighted: by stream.
    """
    b, s, h, d = shape
    streams, cos_sin = [], angles(s + second, d) if rotated else (None, None)
    for seed, tokens in enumerate([s, second] if second else [s]):
        qkv = heads((b, tokens, 3 * h, d + 2), dtype, whole=True, seed=seed)
        q, k = qkv[:, :, :h, :d], qkv[:, :, h + 1 : 2 * h, :d]  # k and v: one head less
        v = heads((b, tokens, 2 * h, d), dtype, seed=seed)[:, :, h + 1 :] if with_v else None
        streams.append(((q, k, v), weights(d, dtype, seed) if weighted[seed] else (None, None)))
    ((q, k, v), of_first), *others = streams
    rest = (*others[0][0], *others[0][1]) if others else ()
    given = rope.RopeTensors(*cos_sin, *of_first, v, *rest)
    how = {"eps": EPS, "interleaved": interleaved, "round_before_weight": round_before_weight}
    *found, found_v = kernels.qk_norm_rope(q, k, given, **how, tile=TILE)
    *expected, expected_v = rope.qk_norm_rope(q, k, *pack_named(given), *how.values())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == (b, s + second, *ours.shape[2:])
        assert_same_bits(ours, theirs)
    if with_v:
        assert_same_bits(found_v, expected_v)
        vs = [each[0][2] for each in streams]
        assert_same_bits(found_v, torch.cat(vs, 1))
    else:
        assert found_v is None and expected_v.shape == (0,)


def check_bound(kernels: ModuleType, dtype: torch.dtype, interleaved: bool, round_before_weight: bool) -> None:
    """|y - y64| <= (roundings · u + 2^-20) · (|v · cos| + |rotate(v) · sin|), u half the spacing of dtype at 1."""
    q, k = heads((1, 5, 5, 64), dtype), heads((1, 5, 5, 64), dtype, seed=1)
    cos, sin = angles(5, 64)
    for x, weight, y in zip(
        (q, k),
        weights(64, dtype),
        kernels.qk_norm_rope(
            q,
            k,
            rope.RopeTensors(cos, sin, *weights(64, dtype)),
            eps=EPS,
            interleaved=interleaved,
            round_before_weight=round_before_weight,
            tile=TILE,
        )[:2],
        strict=True,
    ):
        v = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        terms = v * cos.double()[:, None], rope.rotate(v, interleaved) * sin.double()[:, None]
        roundings = 4 if round_before_weight else 2  # the weight's product counts twice: v and what it is made of
        unit = roundings * torch.finfo(dtype).eps / 2 + 2.0**-20
        excess = (y.double() - sum(terms)).abs() - unit * (terms[0].abs() + terms[1].abs())
        # fp16's smallest numbers have a fixed spacing
        excess -= 2 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert (excess <= 0).all(), f"beyond the bound: differ most at {excess.argmax()} by {excess.max():.3g}"


def check_every_element_is_written(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN before the launch: nothing of it is left."""
    empty = torch.empty
    monkeypatch.setattr(kernels.torch, "empty", lambda *a, **o: empty(*a, **o).fill_(torch.nan))
    q, q2 = (heads((1, tokens, 6, 48), torch.bfloat16) for tokens in (5, 3))
    given = rope.RopeTensors(*angles(8, 48), v=q, q2=q2, k2=q2, v2=q2)
    for y in kernels.qk_norm_rope(q, q, given, eps=EPS, tile=TILE):
        assert not y.isnan().any(), f"{int(y.isnan().sum())} differ: not written"


@pytest.mark.slow
@pytest.mark.parametrize("round_before_weight", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_the_references_where_sums_are_exact(
    dtype: torch.dtype, interleaved: bool, round_before_weight: bool
) -> None:
    check_exact(qk_norm_rope, dtype=dtype, interleaved=interleaved, round_before_weight=round_before_weight)


@pytest.mark.often(2)
@pytest.mark.parametrize("shape", [(1, 1, 2, 64), (1, 5, 4, 32), (3, 7, 5, 16), (1, 130, 2, 16)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_ragged_tokens_heads_and_head_sizes(shape: tuple[int, int, int, int], interleaved: bool) -> None:
    check_exact(qk_norm_rope, shape, interleaved=interleaved)


@pytest.mark.often(4)
@pytest.mark.parametrize("second", [0, 1, 4])
@pytest.mark.parametrize("with_v", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("weighted", [(True, True), (False, True), (True, False), (False, False)], ids=str)
def test_one_stream_or_two_with_and_without_weights_rope_and_v(
    second: int, with_v: bool, rotated: bool, weighted: tuple[bool, bool]
) -> None:
    how = {"second": second, "with_v": with_v, "rotated": rotated, "weighted": weighted}
    check_exact(qk_norm_rope, **how, interleaved=weighted[0], round_before_weight=rotated)


@pytest.mark.often(4)
@pytest.mark.parametrize("round_before_weight", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_heads_are_within_their_roundings_of_float64(
    dtype: torch.dtype, interleaved: bool, round_before_weight: bool
) -> None:
    check_bound(qk_norm_rope, dtype, interleaved, round_before_weight)


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_element_is_written(qk_norm_rope, monkeypatch)


def test_two_streams_are_each_of_them_by_itself() -> None:
    """Side by side, in rows of their own of cos and sin."""
    cos, sin = angles(8, 64)
    streams = [
        (heads((2, tokens, 4, 64), torch.bfloat16, seed=tokens), *weights(64, torch.bfloat16, tokens))
        for tokens in (3, 5)
    ]
    (q, *of_first), (q2, *of_second) = streams
    given = rope.RopeTensors(cos, sin, *of_first, q, q2, q2, q2, *of_second)
    *found, v = qk_norm_rope.qk_norm_rope(q, q, given, eps=EPS, tile=TILE)
    alone = [
        qk_norm_rope.qk_norm_rope(x, x, rope.RopeTensors(cos[rows], sin[rows], *own), eps=EPS, tile=TILE)
        for (x, *own), rows in zip(streams, (slice(3), slice(3, None)), strict=True)
    ]
    for ours, *parts in zip(found, *(made[:2] for made in alone), strict=True):
        assert_same_bits(ours, torch.cat(parts, 1))
    assert_same_bits(v, torch.cat([q, q2], 1))


def test_a_head_without_weights_is_only_normalized() -> None:
    q = heads((1, 3, 4, 64), torch.bfloat16, whole=True)
    given = rope.RopeTensors(*angles(3, 64))
    found = qk_norm_rope.qk_norm_rope(q, q, given, eps=EPS, tile=TILE)
    expected = rope.qk_norm_rope(q, q, *pack_named(given), EPS, True, False)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert_same_bits(ours, theirs)


def test_nan_and_infinity_stay_in_their_head() -> None:
    q = heads((1, 3, 4, 64), torch.bfloat16, whole=True)
    q[0, 0, 1, 5], q[0, 1, 2, 6], q[0, 2, 3, 7] = torch.nan, torch.inf, -torch.inf
    given = rope.RopeTensors(*angles(3, 64), *weights(64, q.dtype), v=q)
    *found, v = qk_norm_rope.qk_norm_rope(q, q, given, eps=EPS, tile=TILE)
    assert v is not None
    assert_same_bits(v, q)
    for ours, theirs in zip(found, rope.qk_norm_rope(q, q, *pack_named(given), EPS, True, False)[:2], strict=True):
        assert_same_bits(ours, theirs)
        assert ours.isnan().any(-1).nonzero().tolist() == [[0, 0, 1], [0, 1, 2], [0, 2, 3]]


def test_heads_whose_squares_overflow_become_zeros_as_in_torch() -> None:
    q = torch.full((1, 1, 2, 64), 1e30)
    given = rope.RopeTensors(*angles(1, 64))
    for ours, theirs in zip(
        qk_norm_rope.qk_norm_rope(q, q, given, eps=EPS, tile=TILE)[:2],
        rope.qk_norm_rope(q, q, *pack_named(given), EPS, True, False)[:2],
        strict=True,
    ):
        assert_same_bits(ours, theirs)


def check_distant_heads(kernels: ModuleType) -> None:
    """The third head of q and v is 2^31 elements from the first, an offset that does not fit into 32 bits."""
    q = torch.empty(2**31 + 32, dtype=torch.bfloat16).as_strided((1, 1, 3, 32), (1, 1, 2**30, 1))
    q.copy_(heads((1, 1, 3, 32), torch.bfloat16, whole=True))  # only what is written is resident
    k = q.clone(memory_format=torch.contiguous_format)
    q_out, k_out, v_out = kernels.qk_norm_rope(q, k, rope.RopeTensors(*angles(1, 32), v=q), eps=EPS, tile=TILE)
    assert_same_bits(q_out, k_out)
    assert_same_bits(v_out, k)


def test_heads_may_be_any_distance_apart() -> None:
    check_distant_heads(qk_norm_rope)


X, W, COS = torch.ones(1, 4, 2, 16), torch.ones(16), torch.ones(4, 16)
BAD_INPUT = {
    "three axes": ({"q": X[0]}, {}, r"q is torch.float32 \(4, 2, 16\), expected \(B, S, heads, D\)"),
    "no tokens": ({"q": X[:, :0]}, {}, r"q is .* \(1, 0, 2, 16\), expected"),
    "integers": ({"q": X.int()}, {}, "q is torch.int32"),
    "odd D": ({"q": X[..., :15]}, {}, "D even"),
    "last axis strided": ({"q": torch.ones(1, 4, 16, 2).mT}, {}, r"q has strides .*contiguous"),
    "k of other tokens": ({"k": X[:, :3]}, {}, r"k is .*\(1, 3, 2, 16\).*expected .*\(1, 4, 2, 16\)"),
    "k of another dtype": ({"k": X.half()}, {}, r"k is torch\.float16"),
    "k elsewhere": ({"k": X.to("meta")}, {}, "k is .* on meta"),
    "v of other heads": ({"v": X[:, :, :1]}, {}, r"v is .*\(1, 4, 1, 16\).*expected .*\(1, 4, 2, 16\)"),
    "v strided": ({"v": torch.ones(1, 4, 16, 2).mT}, {}, r"v has strides .*contiguous"),
    "half of a second stream": ({"q2": X}, {}, "of a second stream pass q2 and k2, and v2 if there is v"),
    "v of one stream": ({"q2": X, "k2": X, "v": X}, {}, "of a second stream pass"),
    "v of the second alone": ({"q2": X, "k2": X, "v2": X}, {}, "of a second stream pass"),
    "a second stream of other heads": (
        {"q2": X[:, :, :1], "k2": X},
        {},
        r"q2 is .*\(1, 4, 1, 16\) on cpu, .*tokens of",
    ),
    "a second stream of another dtype": ({"q2": X, "k2": X.half()}, {}, r"k2 is torch\.float16"),
    "weight of the second stream": ({"q2": X, "k2": X, "k2_weight": W[:8]}, {}, r"k2_weight is .* \(8,\)"),
    "weight of another size": ({"q_weight": W[:8]}, {}, r"q_weight is .* \(8,\), expected float32 \(16,\)"),
    "weight of another dtype": ({"k_weight": W.half()}, {}, r"k_weight is torch\.float16"),
    "16-bit cos": ({"cos": COS.half()}, {}, "cos is torch.float16"),
    "sin shorter than cos": ({"sin": COS[:3]}, {}, "4 tokens, but cos and sin have 4 and 3 rows"),
    "cos of one axis": ({"cos": COS[0]}, {}, r"cos is .* \(16,\)"),
    "cos alone": ({"sin": None}, {}, "4 tokens, but cos and sin have 4 and None rows"),
    "a table of the first stream": ({"q2": X, "k2": X}, {}, "8 tokens, but cos and sin have 4 and 4 rows"),
    "a narrow tile": ({}, {"tile": Tile(4, 8, 1)}, "tile.columns is 8, expected a power of two from D = 16"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_input_that_the_kernel_does_not_take_is_named(case: str) -> None:
    changed, options, message = BAD_INPUT[case]
    tensors = {"q": X, "k": X, "q_weight": W, "k_weight": W, "cos": COS, "sin": COS} | changed
    q, k = tensors.pop("q"), tensors.pop("k")
    with pytest.raises(ValueError, match=message):
        qk_norm_rope.qk_norm_rope(q, k, rope.RopeTensors(**tensors), **{"eps": EPS, "tile": TILE} | options)


# Faults: the text `old` (which must occur once) becomes `new`, and the check must notice.
halves = partial(check_exact, interleaved=False)
ragged = partial(check_exact, shape=(1, 5, 6, 32))  # heads of half a tile
twice = partial(check_exact, round_before_weight=True)
FAULTS: dict[str, tuple[str, str, Callable]] = {
    "rotated the other way": ("cos_a - b * sin_a, b * cos_b + a", "cos_a + b * sin_a, b * cos_b - a", check_exact),
    "cos of the other element": ("a * cos_a - b", "a * cos_b - b", check_exact),
    "sin of the other element": ("cos_b + a * sin_b", "cos_b + a * sin_a", halves),
    "cos of the first row": ("cos += s * D", "cos += 0 * D", check_exact),
    "sin of the batch": ("sin += s * D", "sin += token * D", check_exact),
    "angles of each stream": ("cos += s * D", "cos += s % S_FIRST * D", check_exact),
    "k with q's weight": ("x, k_weight, angles", "x, q_weight, angles", check_exact),
    "k with q's heads": ("k_out += token * HK * D", "k_out += token * H * D", check_exact),
    "k with q's stride": ("HK, k_strides[2], eps", "HK, D, eps", check_exact),
    "v with k's heads": ("copy_heads(v +", "copy_heads(k +", check_exact),
    "v with k's stride": ("HK, v_strides[2], D", "HK, k_strides[2], D", check_exact),
    "v of the first image": ("v + image * v_strides[0]", "v + 0 * v_strides[0]", check_exact),
    "v of the tile": ("(rows < heads) & (columns < D)", "(rows < heads) & (columns > -1)", ragged),
    "the first stream twice": ("second, image, s - S_FIRST", "first, image, s - S_FIRST", check_exact),
    "the second stream's tokens": ("image, s - S_FIRST, angles", "image, s, angles", check_exact),
    "one token too many": ("if s < S_FIRST:", "if s <= S_FIRST:", check_exact),
    "eps within the mean": ("mean + eps", "mean", check_exact),
    "mean of the tile": ("D * 1.0", "COLUMNS * 1.0", ragged),
    "v not rounded": ("a = rounded(a, x)\n        b = rounded(b, x)\n        if cos", "if cos", check_exact),
    "rounded once": ("if ROUND_BEFORE_WEIGHT:", "if False:", twice),
    "heads unwritten": ("start in range(0, heads, ROWS)", "start in range(0, heads - ROWS, ROWS)", check_exact),
    "heads of v unwritten": ("begin in range(0, heads, ROWS)", "begin in range(0, heads - ROWS, ROWS)", check_exact),
    "no mask of heads": ("y + rows * D, a, b, rows < heads,", "y + rows * D, a, b, rows >= 0,", check_exact),
    "no mask of columns": ("(columns < D)[None, :]\n        tl.s", "(columns > -1)[None, :]\n        tl.s", ragged),
    "halves: the second one first": ("tl.store(y[:, None] + D // 2 +", "tl.store(y[:, None] +", halves),
    "32-bit offsets": ("(start + tl.arange(0, ROWS)).to(tl.int64)", "start + tl.arange(0, ROWS)", check_distant_heads),
    "32-bit offsets of v": ("ROWS)).to(tl.int64)[", "ROWS))[", check_distant_heads),
}  # fmt: skip


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path) -> None:
    old, new, check = FAULTS[fault]
    faulty = with_fault(qk_norm_rope, old, new, tmp_path)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)
