"""Tests of the sentences about layers and about a patch."""

import pytest

from fluxq.eval.debug.findings import about_patch, about_shares
from fluxq.eval.metrics.schema import LayerDamage, Patch

PATCH = Patch(
    layers=("a", "b"),
    format="fp8",
    growth=0.05,
    damage=0.25,
    left_out="c, the worst single layer, is not among them: …",
    bits_before=6.29,
    bits_after=6.53,
    before_sqnr_db=28.6,
    predicted_sqnr_db=29.7,
    measured_sqnr_db=29.4,
    recipe="",
)


def row(gain: float | None) -> LayerDamage:
    return LayerDamage(name="a", role="qkv", scheme="nvfp4-nvfp4", weights=1, damage=0.1, gain=gain)


def test_a_patch_says_how_its_layers_were_chosen_and_which_figure_was_tried() -> None:
    first, second, third = about_patch(PATCH)
    assert first.startswith("2 layers in fp8, 6.29 -> 6.53 bits per weight: of what fits into 5.0% more bits, these ")
    assert "together do most damage (25.0% of the error)" in first
    assert "from 28.6 dB to 29.4 dB; 29.7 dB was predicted, by adding up damages of single layers" in second
    assert third == PATCH.left_out
    alone = about_patch(PATCH.model_copy(update={"layers": ("a",), "left_out": ""}))
    assert len(alone) == 2 and alone[0].startswith("1 layer in fp8") and "this one does most damage" in alone[0]


@pytest.mark.parametrize(("gain", "explained"), [(0.2, False), (None, False), (-0.247, True)])
def test_a_gain_below_0_is_explained_where_there_is_one(gain: float | None, explained: bool) -> None:
    said = about_shares([row(0.1), row(gain)])
    assert "damage alone: share of the final latents' error that the layer makes when only it is quantized" in said
    assert ("Below 0 the error grows" in said) == explained
