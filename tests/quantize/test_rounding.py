"""Codes and scales: searched ones are never worse, feedback is GPTQ, and nothing breaks on odd inputs."""

from __future__ import annotations

import pytest
import torch

from fluxq.kernels import encode
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.rounding import feedback, round_searched, round_with_feedback, search_scales
from fluxq.recipes.formats import ELEMENTS, FORMATS, find_format

FOUR_BIT = ("nvfp4", "mxfp4", "int4")


def correlated(m: int, k: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=g) * torch.arange(1, k + 1) ** -0.7
    return torch.randn(m, k, generator=g) @ mixing.T


def weight(n: int = 48, k: int = 256, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


def global_scale(w: torch.Tensor, name: str) -> torch.Tensor | None:
    row = find_format(name)
    return encode.global_scale_for(w.abs().amax(), row, True) if row.two_level else None


def output_error(w, q, x) -> float:
    return float((x @ (q.dequantize() - w).T).square().sum() / (x @ w.T).square().sum())


@pytest.mark.parametrize("name", ELEMENTS)
def test_round_to_is_decode_of_encode_bit_for_bit(name):
    element = ELEMENTS[name]
    ties = torch.arange(-64, 65) / 8
    v = torch.cat([torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 4, ties, torch.tensor([0.0, -0.0])])
    v = torch.cat([v, v * 100])
    before = v.clone()
    assert torch.equal(encode.round_to(v, element), encode.decode(encode.encode(v, element), element))
    assert torch.equal(v, before)


@pytest.mark.parametrize("name", FOUR_BIT)
def test_search_weighs_errors_and_never_loses_to_the_plain_scale(name):
    row, w = FORMATS[name], weight()
    blocks = w.reshape(w.shape[0], -1, row.group_size)
    importance = torch.rand(1, *blocks.shape[1:], generator=torch.Generator().manual_seed(3)) ** 4
    scale = global_scale(w, name)

    def errors(chosen):
        step = encode.decode_scale(chosen, row, scale).unsqueeze(-1)
        return ((encode.round_to(blocks / step, row.element) * step - blocks).square() * importance).sum(-1)

    plain = errors(encode.block_scale(blocks, row, scale))
    searched = errors(search_scales(blocks, importance, row, scale))
    assert (searched <= plain).all()
    assert searched.sum() < 0.97 * plain.sum()


@pytest.mark.parametrize("name", [*FOUR_BIT, "int4_g128", "int8", "fp8", "fp8_128x128"])
def test_feedback_beats_nearest_on_outputs(name):
    row, w = find_format(name), weight()
    fit, held = correlated(4096, 256).split([3072, 1024])
    feed = feedback(fit.T @ fit / len(fit), 0 if row.spans_rows else row.group_size)
    scale = global_scale(w, name)
    plain = QuantizedTensor.quantize(w, row, global_scale=scale)
    fed = round_with_feedback(w, row, scale, feed)
    assert fed.codes.shape == plain.codes.shape and fed.scale.shape == plain.scale.shape
    assert fed.scale.dtype == plain.scale.dtype and fed.codes.dtype == plain.codes.dtype
    assert output_error(w, fed, held) < 0.8 * output_error(w, plain, held)


@pytest.mark.parametrize("n", [1, 48])
@pytest.mark.parametrize("name", FOUR_BIT)
def test_feedback_without_correlation_is_nearest(name, n):
    row, w = FORMATS[name], weight(n)
    scale = global_scale(w, name)
    feed = feedback(torch.eye(256), row.group_size)
    fed, plain = (
        round_with_feedback(w, row, scale, feed, search=False),
        QuantizedTensor.quantize(w, row, global_scale=scale),
    )
    assert torch.equal(fed.codes, plain.codes) and torch.equal(fed.scale, plain.scale)


def test_feedback_is_gptq_by_its_textbook_form():
    """The published loop: Cholesky of the inverse, weights updated in place."""
    w, x = weight(16, 64), correlated(512, 64)
    gram = x.T @ x / len(x)
    feed = feedback(gram, 0, 0.01)
    row = FORMATS["int8"]
    scale = encode.block_scale(w.unsqueeze(1), row, None)
    fed = round_with_feedback(w, row, None, feed, search=False)

    order = feed.order.flip(0)  # the textbook goes from the first to the last
    h = gram[order][:, order].double()
    h.diagonal().add_(0.01 * gram.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    left, codes = w[:, order].double(), torch.empty(16, 64)
    for column in range(64):
        step = scale[:, 0].double()
        codes[:, column] = (left[:, column] / step).round().clamp(-127, 127).float()
        error = (left[:, column] - codes[:, column] * step) / upper[column, column]
        left[:, column:] -= error.unsqueeze(1) * upper[column, column:]
    ordered = torch.empty(16, 64)
    ordered[:, order] = codes
    assert (fed.codes.float() != ordered).float().mean() < 0.005  # fp32 against float64: ties


def test_factor_gives_the_gram_back():
    x = correlated(1000, 96)
    gram = x.T @ x / 1000
    feed = feedback(gram, 16, 0.01)
    assert sorted(feed.order.tolist()) == list(range(96))
    assert (feed.order.reshape(-1, 16) // 16 == feed.order.reshape(-1, 16)[:, :1] // 16).all()  # whole blocks
    eye = torch.eye(96)
    assert torch.equal(feed.lower.tril(-1) + eye, feed.lower)
    back = feed.lower @ torch.diag(feed.diagonal) @ feed.lower.T
    wanted = gram[feed.order][:, feed.order] + 0.01 * gram.diagonal().mean() * eye
    assert torch.allclose(back, wanted, atol=1e-4 * float(gram.abs().max()))


def test_columns_of_large_inputs_are_rounded_first():
    """Rounded are they from the last of the order on, and whole blocks at a time."""
    gram = torch.diag(torch.tensor([3.0, 9.0, 1.0, 7.0]))
    assert feedback(gram, 0).order.tolist() == [2, 0, 3, 1]
    assert feedback(gram, 2).order.tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("kind", ["dead channels", "fewer tokens than channels", "one direction"])
def test_singular_grams_are_damped(kind):
    x = correlated(512, 128)
    x = {"dead channels": x * (torch.arange(128) % 3 > 0), "fewer tokens than channels": x[:40]}.get(
        kind, x[:, :1].expand(-1, 128)
    )
    w, row = weight(8, 128), FORMATS["nvfp4"]
    q = round_with_feedback(w, row, global_scale(w, "nvfp4"), feedback(x.T @ x / len(x), 16))
    assert q.dequantize().isfinite().all()
    assert output_error(w, q, x) < 0.1


@pytest.mark.parametrize("gram", [torch.zeros(32, 32), torch.full((32, 32), torch.nan)])
def test_useless_grams_are_refused(gram):
    with pytest.raises(ValueError, match="zero or not finite"):
        feedback(gram, 16)


def test_a_gram_that_is_made_anew_is_used_up_and_made_again_where_damping_was_too_small():
    x = correlated(512, 64)
    gram = x.T @ x
    feed, made = feedback(gram, 16), []

    def make() -> torch.Tensor:
        made.append(gram.clone())
        return made[-1]

    same = feedback(make, 16)
    assert torch.equal(same.lower, feed.lower) and torch.equal(same.order, feed.order)
    assert len(made) == 1 and same.lower.data_ptr() == made[0].data_ptr()
    gram[0, 1:] = gram[1:, 0] = gram.diagonal().max() * 0.5  # not a Gram matrix of anything
    made.clear()
    same, feed = feedback(make, 16), feedback(gram, 16)
    assert len(made) > 1 and torch.equal(same.lower, feed.lower)


def test_rounding_leaves_its_input_alone():
    w = weight()
    before = w.clone()
    x = correlated(512, 256)
    gram = x.T @ x
    kept = gram.clone()
    feed = feedback(gram, 16)
    round_with_feedback(w, FORMATS["nvfp4"], global_scale(w, "nvfp4"), feed)
    round_searched(w, FORMATS["nvfp4"], global_scale(w, "nvfp4"), gram.diagonal())
    assert torch.equal(w, before) and torch.equal(gram, kept)


def test_rows_cut_along_k_keep_their_scale():
    w, x = weight(16, 256), correlated(2000, 256)
    row = FORMATS["int8"]
    whole = encode.block_scale(w.unsqueeze(1), row, None)
    part = x[:, :128]
    q = round_with_feedback(w[:, :128], row, None, feedback(part.T @ part, 0), row_scale=whole)
    assert torch.equal(q.scale, whole.reshape(-1))
    assert isinstance(q, QuantizedTensor)
