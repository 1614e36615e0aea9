"""Tests of the layers that a patch takes, and of the recipe that it writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fluxq import tiny
from fluxq.eval.debug.damage import Damages
from fluxq.eval.debug.patch import (
    Promotion,
    _left_out,
    _reason,
    better_scheme,
    choose,
    improved,
    make_patch,
    patched_recipe,
    promotions,
)
from fluxq.eval.images.sides import Side, quantized_layers
from fluxq.eval.speed.served import stored_bits
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.recipes.recipe import load_recipe

FP8 = Scheme(FORMATS["fp8"], FORMATS["fp8"])
QKV = tuple(
    f"transformer.single_transformer_blocks.0.{name}" for name in ("proj_mlp", "attn.to_q", "attn.to_k", "attn.to_v")
)


def layer_of(weights: str, activations: str | None, k: int = 128) -> QuantLinear:
    scheme = Scheme(FORMATS[weights], FORMATS[activations] if activations else None)
    return QuantLinear.from_quantized(QuantizedTensor.quantize(torch.randn(64, k), scheme.weights), None, scheme)


def test_the_set_that_does_most_damage_is_chosen_and_what_brings_most_for_a_bit_comes_first():
    groups = [Promotion({name: FP8}, damage, bits) for name, damage, bits in (("a", 4, 8), ("b", 3, 2), ("c", 1, 1))]

    def names(bits: float) -> list[str]:
        return [name for group in choose(groups, bits) for name in group.schemes]

    assert names(11) == ["b", "c", "a"]
    assert names(9) == ["c", "a"]  # by damage for a bit one would begin with b, and a would not fit any more
    assert names(3) == ["b", "c"]
    assert names(1) == ["c"]
    assert names(0.5) == []


def test_room_that_is_left_is_not_filled_with_what_does_no_harm():
    groups = [Promotion({"bad": FP8}, 0.5, 10), Promotion({"harmless": FP8}, 0.002, 10)]
    assert [list(group.schemes) for group in choose(groups, 20)] == [["bad"]]


def test_a_worst_layer_that_is_left_out_is_named_with_the_reason(quantized):
    """Each of the 4 layers of a single block's input adds its bits, and one layer alone makes nearly as much error."""
    layers = quantized_layers(quantized)
    cheap = "transformer.transformer_blocks.0.attn.to_out.0"
    shares = {name: 0.0 for name in layers} | {QKV[0]: 0.3, cheap: 0.2}
    found = Damages(1.0, 0.0, 0.01, only={(name,): 0.01 * share for name, share in shares.items()})
    groups = promotions(quantized, layers, found)
    stored = stored_bits(quantized)[0]
    sizes = {name: group.extra_bits for group in groups for name in group.schemes}
    chosen = choose(groups, sizes[cheap])
    said = _left_out(groups, chosen, layers, found, stored)
    assert said.startswith(
        f"{QKV[0]}, the worst single layer (30.0% of the error), is not among them: with the 3 that "
    )
    assert "it makes 30.0%" in said and "those taken make 20.0%" in said
    enough = float(said.partition("--growth ")[2].split()[0])
    taken = {name for group in choose(groups, enough * stored) for name in group.schemes}
    assert taken == {*QKV, cheap} and _left_out(groups, choose(groups, enough * stored), layers, found, stored) == ""
    reasons = {name: _reason(name, group, found) for group in groups for name in group.schemes}
    assert reasons[QKV[1]] == "quantized alone it made 0.0% of the error; with the 3 that share its input it made 30.0%"
    assert reasons[cheap] == "quantized alone it made 20.0% of the error"


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (("nvfp4", "nvfp4"), "fp8-fp8"),
        (("int4", None), "fp8-16bit"),
        (("mxfp4", "mxfp4"), "fp8-fp8"),
        (("nvfp4", "nvfp4", 48), "fp8-fp8"),
        (("fp8", "fp8"), None),
        (("int8", None), None),
    ],
)
def test_better_format(layer, expected):
    found = better_scheme(layer_of(*layer))
    assert (str(found) if found else None) == expected


@pytest.mark.parametrize("rotation", ["", "-h64", "-hr64"])
def test_an_improved_layer_that_rotates_x_has_a_rotated_weight(rotation):
    linear = nn.Linear(128, 32)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    y, rounded = linear(x), improved(linear, Scheme.parse(f"int8-int8{rotation}"))(x)
    assert (rounded - y).norm() < 0.02 * y.norm()


def test_improved_layer_is_the_source_rounded():
    linear = nn.Linear(128, 64, dtype=torch.bfloat16)
    assert improved(linear, None) is linear
    layer = improved(linear, FP8)
    expected = QuantizedTensor.quantize(linear.weight.detach(), "fp8").dequantize()
    assert torch.equal(layer.quantized_weight.dequantize(), expected)
    assert torch.equal(layer.bias, linear.bias) and layer.compute_dtype == torch.bfloat16


@pytest.fixture(scope="module")
def quantized(plain_checkpoint):
    return Side("nvfp4", str(plain_checkpoint("nvfp4")), "").open()


def test_layers_that_share_an_input_change_together(quantized):
    layers = quantized_layers(quantized)
    found = Damages(1.0, 0.0, 0.01, only={(name,): 0.001 for name in layers})
    groups = {frozenset(group.schemes): group for group in promotions(quantized, layers, found)}
    group = groups[frozenset(QKV)]
    assert group.damage == pytest.approx(0.4)
    fp8, nvfp4 = (
        sum(s.stored_bits(layers[n].out_features, layers[n].in_features) for n in QKV)
        for s in (FP8, layers[QKV[0]].scheme)
    )
    assert group.extra_bits == fp8 - nvfp4
    assert set().union(*groups) == set(layers)
    del found.only[(QKV[1],)]  # not measured: nothing is known of the group
    assert len(promotions(quantized, layers, found)) == len(groups) - 1


def test_nothing_fits_into_no_growth(quantized):
    layers = quantized_layers(quantized)
    found = Damages(1.0, 0.0, 0.01, only={(name,): 0.001 for name in layers})
    with pytest.raises(
        ValueError, match=r"no layers that do damage can be kept in a better format for 0\.1% more bits"
    ):
        recipe = "nvfp4", load_recipe("nvfp4")[1]
        make_patch(None, quantized, layers, found, recipe, 0.001, lambda kept: 0.0)


def test_recipe_keeps_its_own_overrides(quantized, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: nvfp4\n"
        "components: {transformer: {overrides: [{role: mixed_out, weights: {format: fp8}, reason: mine}]}}\n"
    )
    schemes = {QKV[1]: FP8, QKV[2]: None}
    reasons = {QKV[1]: "it was bad", QKV[2]: "it was worse"}
    text = patched_recipe("mine", load_recipe(str(file))[1], quantized, schemes, reasons, "with two layers kept")
    assert text.startswith("# mine, with two layers kept.\nversion: 1\n")
    overrides = _read(text, tmp_path).components["transformer"].overrides
    assert [override.role or override.match for override in overrides] == [
        "mixed_out",
        "single_transformer_blocks.0.attn.to_q",
        "single_transformer_blocks.0.attn.to_k",
    ]
    assert overrides[1].activations.format == "fp8" and overrides[2].weights is None
    assert [override.reason for override in overrides] == ["mine", "it was bad", "it was worse"]


def test_a_shipped_recipe_is_extended(quantized, tmp_path):
    recipe = load_recipe("nvfp4")[1]
    text = patched_recipe("nvfp4", recipe, quantized, {QKV[1]: FP8}, {QKV[1]: "it was bad"}, "patched")
    assert "extends: nvfp4" in text and "calibration" not in text
    read = _read(text, tmp_path)
    assert read.components["transformer"].transforms == recipe.components["transformer"].transforms
    assert len(read.components["transformer"].overrides) == 1


def test_a_component_without_an_entry_gets_its_own(tmp_path):
    """A second transformer is quantized as the first; a patch of it leaves the first alone."""
    pipe = tiny.load()
    two = SimpleNamespace(transformer=pipe.transformer, transformer_2=pipe.transformer)
    recipe = load_recipe("nvfp4")[1]
    layer = QKV[1].replace("transformer", "transformer_2", 1)
    read = _read(patched_recipe("nvfp4", recipe, two, {layer: FP8}, {layer: "it was bad"}, "patched"), tmp_path)
    assert not read.components["transformer"].overrides
    assert read.components["transformer_2"].weights == recipe.components["transformer"].weights
    assert len(read.components["transformer_2"].overrides) == 1


def _read(text: str, folder):
    file = folder / "better.yaml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(str(file))[1]
