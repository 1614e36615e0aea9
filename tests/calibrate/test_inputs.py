"""Tests of what is gathered of a group's input, against the formulas over all tokens at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fluxq.calibrate.inputs import GroupInputs, InputsBuilder, _exact_products


def some_calls(k: int, lengths=(40, 7, 301), dtype=torch.bfloat16, seed=0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    channels = torch.logspace(-2, 2, k)
    return [(torch.randn(n, k, generator=random) * channels + 0.3 * channels).to(dtype) for n in lengths]


def gathered(fit, held=(), weights=None, **how) -> GroupInputs:
    builder = InputsBuilder("g", fit[0].shape[-1], calls=(len(fit), len(held)), **how)
    for i, x in enumerate(fit):
        builder.add(x, weights[i] if weights else 1.0)
    for i, x in enumerate(held):
        builder.add(x, 1.0 + i, held_out=True)
    return builder.finish()


def error(gram: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error of an entry, in units of the channels' root mean squares."""
    scale = want.diagonal().sqrt()
    return float(((gram - want).abs() / (scale[:, None] * scale)).max())


@pytest.mark.parametrize("k", [1, 3, 64, 130, 1100])
@pytest.mark.parametrize("weights", [None, [0.5, 3.0, 1.25]])
def test_sums_are_those_of_all_tokens(k, weights):
    calls = some_calls(k)
    made = gathered(calls, weights=weights)
    x = torch.cat(calls).double()  # (M, K)
    w = torch.cat([torch.full((len(c),), (weights or [1.0] * 3)[i]) for i, c in enumerate(calls)]).double()
    (gram,) = made.grams
    want = (x * w[:, None]).T @ x / w.sum()
    assert error(gram, want) < len(x) * 2**-24  # of sums in fp32, whatever their order
    assert torch.equal(gram, gram.T)
    torch.testing.assert_close(made.mean.double(), (x * w[:, None]).sum(0) / w.sum(), rtol=1e-6, atol=1e-6)
    assert torch.equal(made.amax, x.abs().amax(0).float()) and made.count == len(x)
    assert (gram.dtype, made.mean.dtype, made.amax.dtype) == (torch.float32,) * 3
    assert made.segments == (k,)


def test_of_segments_there_is_a_gram_each():
    calls = some_calls(96)
    whole, parts = gathered(calls).grams[0], gathered(calls, segments=(64, 32))
    assert parts.segments == (64, 32)
    for gram, piece in zip(parts.grams, (slice(64), slice(64, 96)), strict=True):
        assert error(gram, whole[piece, piece]) < 2 * parts.count * 2**-24


def test_no_gram_is_made_where_none_is_wanted():
    made = gathered(some_calls(16), wants_gram=False)
    assert made.grams == () and made.mean.shape == (16,) and len(made.fit) == made.count == 348


def test_held_out_tokens_enter_amax_alone():
    fit, held = some_calls(32), [100 * x for x in some_calls(32, seed=1)]
    alone, both = gathered(fit), gathered(fit, held)
    assert torch.equal(alone.grams[0], both.grams[0]) and torch.equal(alone.mean, both.mean)
    assert torch.equal(alone.fit, both.fit) and alone.count == both.count and len(alone.held_out) == 0
    assert torch.equal(both.amax, torch.cat([*fit, *held]).abs().amax(0).float())
    rows = {tuple(row) for row in torch.cat(held).tolist()}
    assert all(tuple(row) in rows for row in both.held_out.tolist())
    assert both.held_weight.shape == (len(both.held_out),) and both.held_weight.mean() == pytest.approx(1)
    first = both.held_weight[0]
    assert torch.allclose(both.held_weight[-1], 3 * first)


def test_a_held_out_sample_has_the_massive_tokens_and_stands_for_all():
    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    x[[17, 2100, 3999]] *= 1000
    made = gathered([x[:100]], [x], most_held=256)
    power = made.held_out.square().sum(1)
    assert (power > 1e4).sum() == 3 and len(power) == 256
    assert (power * made.held_weight).mean() == pytest.approx(x.square().sum(1).mean().item(), rel=0.01)
    assert made.held_weight.max() / made.held_weight.min() == pytest.approx((4000 - 32) / (256 - 32))


def test_a_sample_takes_the_same_share_of_every_call_and_of_every_part_of_it():
    calls = [torch.full((1000, 2), float(i)) for i in range(8)]
    for call in calls:
        call[:, 1] = torch.arange(1000)
    made = gathered(calls, most_fit=64)
    assert made.fit.shape == (64, 2)
    for i in range(8):
        places = made.fit[made.fit[:, 0] == i][:, 1]
        assert torch.equal((places / 125).long(), torch.arange(8))  # one of each eighth
    assert len(set(made.fit[:, 1].tolist())) > 40  # not the same rows of every call


def test_a_sample_never_exceeds_its_limit_and_takes_all_of_a_few_tokens():
    assert len(gathered([torch.ones(50, 4)] * 7, most_fit=10).fit) == 10
    assert len(gathered([torch.ones(5, 4)] * 7).fit) == 35


def test_a_sample_is_the_same_each_time_and_keeps_its_dtype():
    one, two = gathered(some_calls(8), most_fit=20), gathered(some_calls(8), most_fit=20)
    assert torch.equal(one.fit, two.fit) and one.fit.dtype == torch.bfloat16


def test_rows_in_any_shape_are_the_same_tokens():
    x = torch.randn(2, 3, 5, 16)
    assert torch.equal(gathered([x]).grams[0], gathered([x.reshape(30, 16)]).grams[0])


def test_dead_channels_and_calls_without_tokens_do_no_harm():
    x = torch.randn(20, 8)
    x[:, 3] = 0
    made = gathered([x, x[:0]])
    assert made.amax[3] == 0 and not made.grams[0][3].any() and made.count == 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("held", [False, True])
def test_what_is_not_finite_is_named(bad, held):
    x = torch.ones(5000, 4)
    x[4999, 2] = bad
    builder = InputsBuilder("blocks.0.to_q", 4, calls=(1, 1))
    with pytest.raises(ValueError, match=r"^blocks\.0\.to_q: its input holds NaN or infinity at step 3$"):
        builder.add(x, held_out=held, step=3)


def test_tf32_is_allowed_meanwhile_in_whatever_way_precision_was_set():
    x: Any = SimpleNamespace(is_cuda=True, element_size=lambda: 2)
    products: Any = torch.backends.cuda.matmul
    at_first = products.fp32_precision
    try:
        for before in ("tf32", "none"):
            products.fp32_precision = before
            with _exact_products(x):
                assert products.fp32_precision == "tf32"
            assert products.fp32_precision == before
        whole: Any = torch.backends
        whole.fp32_precision = "ieee"
        assert products.fp32_precision == "ieee"  # what was not set follows that of all libraries
    finally:
        whole.fp32_precision = products.fp32_precision = at_first


def test_other_bad_input_is_named():
    with pytest.raises(ValueError, match=r"^g: segments \(8, 9\) do not add up to its 16 channels"):
        InputsBuilder("g", 16, (8, 9), calls=(1, 0))
    builder = InputsBuilder("g", 16, calls=(1, 0))
    with pytest.raises(ValueError, match=r"^g: its input has 8 channels, the layer takes 16"):
        builder.add(torch.ones(2, 8))
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^g: weight .* must be a positive number"):
            builder.add(torch.ones(2, 16), weight)
    with pytest.raises(ValueError, match=r"^g: no activation reached this layer"):
        builder.finish()
