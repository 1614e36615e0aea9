"""Synthetic layers: the same seed gives the same numbers, and each family has what its name promises."""

from __future__ import annotations

import pytest
import torch

from benchmarks.layers.synthetic import FAMILIES, LEVELS, draw

K = 512


def drawn(family: str, seed: int = 0):
    return draw(family, k=K, n=96, fit=2048, held=256, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_seeds(family):
    layer, again, other = drawn(family), drawn(family), drawn(family, seed=1)
    assert layer.family == family
    assert layer.weight.shape == (96, K) and layer.fit.shape == (2048, K) and layer.held.shape == (256, K)
    for name in ("weight", "fit", "held"):
        tensor = getattr(layer, name)
        assert tensor.dtype == torch.float32 and torch.isfinite(tensor).all()
        assert torch.equal(tensor, getattr(again, name))
        assert not torch.equal(tensor, getattr(other, name))


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match="no family 'conv' of synthetic layers, only adaln, ffn, attn, gauss"):
        draw("conv")


@pytest.mark.parametrize(("family", "share", "least"), [("adaln", 0.006, 5), ("ffn", 0.003, 20)])
def test_some_channels_are_much_larger_than_the_others(family, share, least):
    size = drawn(family).fit.square().mean(0).sqrt()
    large = size.topk(round(share * K)).values
    assert (large > least * size.median()).all()
    assert size.topk(K // 10).values.min() < 4 * size.median()  # and they are few


def test_weights_of_large_channels_are_smaller():
    layer = drawn("ffn")
    large = layer.fit.square().mean(0).argmax()
    columns = layer.weight.norm(dim=0)
    assert columns[large] < columns.median()


@pytest.mark.slow
def test_adaln_has_noise_levels():
    """Tokens of one level share scale and shift, so means of levels differ more than by chance."""
    layer = draw("adaln", k=K, n=8, fit=4096, held=8)
    centred = layer.fit - layer.fit.mean(0)
    nearest = torch.linalg.svd(centred / centred.std(0), full_matrices=False)[2][: LEVELS - 1]
    spread = (centred / centred.std(0) @ nearest.T).square().mean(0)
    assert spread.sum() / K > 0.02  # seven directions of 512 have that much of the energy


def test_ffn_is_one_sided_and_attn_has_means():
    ffn, attn, gauss = (drawn(family).fit for family in ("ffn", "attn", "gauss"))
    assert ffn.amin(0).median() > -0.2 < 1 < ffn.amax(0).median()
    assert (attn.mean(0).abs() / attn.std(0)).median() > 0.2
    assert (gauss.mean(0).abs() / gauss.std(0)).median() < 0.05


def test_weights_have_heavy_tails_and_a_low_rank_part():
    for family in ("adaln", "ffn", "attn"):
        w = draw(family, k=K, n=K, fit=8, held=8).weight
        values = torch.linalg.svdvals(w)
        gauss = torch.linalg.svdvals(torch.randn(K, K, generator=torch.Generator().manual_seed(0)) * w.std())
        assert values[0] > 1.5 * gauss[0], family
        assert (w / w.std()).abs().amax() > 7, family  # normal numbers as many reach about 5
        assert w.square().sum() / w.shape[0] == pytest.approx(1, rel=0.3), family  # rows of norm about 1


def test_small_layers_can_be_drawn():
    for family in FAMILIES:
        layer = draw(family, k=32, n=16, fit=16, held=4)
        assert layer.weight.shape == (16, 32) and torch.isfinite(layer.fit).all()
