"""Attention in fp8: a well-formed op, within its bound of float64, and near enough to 16-bit attention."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention_bounds import bounds
from torch import Tensor

from fluxq.kernels.attention import op as attention
from fluxq.kernels.attention.op import CODES, Operands

SHAPES = [(1, 1, 1, 1, 64), (2, 17, 130, 3, 64), (1, 130, 257, 2, 128), (1, 5, 128, 1, 16)]  # B, S, Skv, H, D


def heads(b: int, s: int, h: int, d: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Random heads, a view into one projection of q, k and v."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(b, s, 3 * h * d, generator=noise).to(dtype)[:, :, h * d : 2 * h * d].unflatten(-1, (h, d))


def operands(
    b: int, s: int, skv: int, h: int, d: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v whose logits are a few units large, so that some keys matter more than others."""
    return heads(b, s, h, d, dtype) * 2, heads(b, skv, h, d, dtype, 1), heads(b, skv, h, d, dtype, 2)


def assert_within_bound(o: Tensor, x: Operands, queries: int, keys: int, log2_scale: float) -> None:
    expected, bound = bounds(x, queries, keys, log2_scale, o.dtype)
    wrong = ~((o - expected).abs() <= bound)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ, first at (image, query, head, column) = "
        f"{(at := wrong.nonzero()[0].tolist())}: {o[tuple(at)]} instead of {expected[tuple(at)]} ± "
        f"{bound[tuple(at)]:.3g}"
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of these tensors in float64, (B, S, H, D)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_a_well_formed_op(scale: float | None) -> None:
    q, k, v = operands(2, 5, 130, 2, 16)
    torch.library.opcheck(attention.attention_fp8, (q, k, v, scale))
    torch._dynamo.reset()
    call: Callable = torch.compile(attention.attention_fp8, fullgraph=True, backend="aot_eager")
    found, expected = call(q, k, v, scale), attention.attention_fp8(q, k, v, scale)
    assert torch.equal(found, expected) and found.is_contiguous() and found.shape == q.shape


@pytest.mark.parametrize("dtype", attention.FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_within_its_bound_of_float64(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    q, k, v = operands(*shape, dtype=dtype)
    codes = attention.quantize_operands(q, k, v)
    o = attention.attention_fp8(q, k, v, 0.2)
    assert_within_bound(o, codes, q.shape[1], k.shape[1], 0.2 * math.log2(math.e))


def test_the_bound_is_tight_enough_to_see_one_weight_rounded_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(1, 17, 130, 1, 64, torch.float32)
    codes = attention.quantize_operands(q, k, v)
    encode = attention.encode

    def next_code(x, element):
        found = encode(x, element)
        found.view(torch.uint8)[0, 0, 3, x[0, 0, 3].argmax()] -= 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(attention, "encode", next_code)
        o = attention.attend(codes, 17, 130, 0.3, torch.float32)
    with pytest.raises(AssertionError, match=r"differ, first at \(image, query, head, column\) = \[0, 3, 0,"):
        assert_within_bound(o, codes, 17, 130, 0.3)


def test_codes_and_scales_are_of_their_blocks() -> None:
    q, k, v = operands(2, 130, 200, 3, 64, torch.float32)
    x = attention.quantize_operands(q, k, v)
    assert x.q.shape == (2, 3, 256, 64) and x.k.shape == (2, 3, 256, 64) and x.v.shape == (2, 3, 64, 256)
    assert not x.q[:, :, 130:].float().any() and not x.k[:, :, 200:].float().any() and not x.v[..., 200:].float().any()
    mean = k.mean(1)
    assert torch.allclose(x.k_mean, mean, atol=1e-6)
    for block, tokens in enumerate((slice(0, 128), slice(128, None))):
        torch.testing.assert_close(x.q_scale[:, :, block], q[:, tokens].abs().amax((1, 3)) / 448)
        left = (k - mean[:, None])[:, tokens].abs().amax((1, 3))
        torch.testing.assert_close(x.k_scale[:, :, block], left / 448)
    torch.testing.assert_close(x.v_scale, v.abs().amax(1) / 448)
    decoded = x.v.float() * x.v_scale[..., None]
    torch.testing.assert_close(decoded[..., :200], v.permute(0, 2, 3, 1), rtol=2.0**-4, atol=0.02)


# How much larger two channels of k are, and what is added there. Measured relative errors against float64: 0.052, 0.052
# and 0.053, without smoothing 0.052, 0.125 and 0.052; 16-bit SDPA has 0.002 on each.
ACCURACY = {"plain": (1.0, 0.0), "keys share a mean": (1.0, 30.0), "outlier channels": (30.0, 0.0)}


def inputs_of(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, 256, 2, 64); the logits of outlier channels are as large as others'."""
    outlier, shared = ACCURACY[case]
    q, k, v = (heads(1, 256, 2, 64, torch.float32, seed) for seed in range(3))
    k[..., 5:7] *= outlier
    q[..., 5:7] /= outlier
    k[..., 5:7] += shared
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("case", ACCURACY)
def test_relative_error_against_exact_attention(case: str) -> None:
    q, k, v = inputs_of(case)
    assert relative_error(attention.attention_fp8(q, k, v, None), exact(q, k, v)) < 0.06


def test_int8_is_nearer_and_values_in_16_bit_nearest_but_with_outlier_channels() -> None:
    for case in ACCURACY:
        q, k, v = inputs_of(case)
        errors = [relative_error(attention.attention_fp8(q, k, v, None, codes), exact(q, k, v)) for codes in CODES]
        assert (errors[0] > errors[1] > errors[2]) == (case != "outlier channels"), (case, errors)


def test_each_token_of_q_has_an_int8_scale_of_its_own() -> None:
    q, k, v = operands(2, 130, 200, 3, 64, torch.float32)
    x = attention.quantize_operands(q, k, v, "int8-16bit")
    assert x.q.dtype == x.k.dtype == torch.int8 and x.v.dtype == torch.float16
    torch.testing.assert_close(x.q_scale[..., :130], q.abs().amax(-1).transpose(1, 2) / 127)
    assert x.q_scale.shape == (2, 3, 256) and x.k_scale.shape == (2, 3, 2)
    decoded = x.v.float() * x.v_scale[..., None]
    torch.testing.assert_close(decoded[..., :200], v.permute(0, 2, 3, 1), rtol=2.0**-11, atol=1e-6)


def test_smoothing_keys_helps_where_they_share_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs_of("keys share a mean")
    smoothed = relative_error(attention.attention_fp8(q, k, v, None), exact(q, k, v))
    monkeypatch.setattr(attention, "key_mean", lambda k: torch.zeros_like(k[:, 0], dtype=torch.float32))
    assert relative_error(attention.attention_fp8(q, k, v, None), exact(q, k, v)) > 2 * smoothed


def test_keys_and_values_that_are_all_alike_give_that_value() -> None:
    q, k, v = operands(1, 5, 130, 2, 64)
    found = attention.attention_fp8(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v), None)
    torch.testing.assert_close(found, v[:, :1].expand_as(q))


def test_nan_and_infinity_stay_in_their_block_head_and_channel() -> None:
    for name, where in (("q", (0, 3, 1, 5)), ("k", (0, 3, 1, 5)), ("v", (0, 3, 1, 5))):
        for value in (torch.nan, torch.inf):
            x = dict(zip("qkv", operands(1, 130, 130, 2, 16), strict=True))
            x[name] = x[name].clone()
            x[name][where] = value
            bad = attention.attention_fp8(*x.values(), None).isnan()
            expected = torch.zeros_like(bad)
            expected[{"q": (0, slice(128), 1), "k": (0, slice(None), 1), "v": (0, slice(None), 1, 5)}[name]] = True
            assert torch.equal(bad, expected), (name, value)


def test_autocast_changes_nothing_and_without_queries_there_is_nothing() -> None:
    q, k, v = operands(1, 5, 7, 2, 16)
    expected = attention.attention_fp8(q, k, v, None)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(attention.attention_fp8(q, k, v, None), expected)
    assert attention.attention_fp8(q[:, :0], k, v, None).shape == (1, 0, 2, 16)


X = torch.ones(1, 4, 2, 16)
BAD_INPUT = {
    "three axes": ({"q": X[0]}, r"q is torch.float32 \(4, 2, 16\), expected \(B, S, heads, D\)"),
    "integers": ({"q": X.int()}, "q is torch.int32"),
    "k of other heads": ({"k": X[:, :, :1]}, r"k is .*\(1, 4, 1, 16\).*repeat heads"),
    "v of another dtype": ({"v": X.half()}, r"v is torch\.float16"),
    "k elsewhere": ({"k": X.to("meta")}, "k is .* on meta"),
    "fewer values than keys": ({"v": X[:, :3]}, "k has 4 tokens and v 3"),
    "no keys": ({"k": X[:, :0], "v": X[:, :0]}, "without keys"),
    "unknown codes": ({"codes": "int4"}, "codes are 'int4', expected one of fp8, int8, int8-16bit"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_tensors_that_do_not_fit_are_named(case: str) -> None:
    changed, message = BAD_INPUT[case]
    with pytest.raises(ValueError, match=message):
        attention.check_attention(**{"q": X, "k": X, "v": X} | changed)
