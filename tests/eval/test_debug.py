"""Faults that are planted in a quantized pipeline are named, and ranked first; a sound one is taken apart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fluxq import tiny
from fluxq.base.model import ModelFolder
from fluxq.eval.debug.arithmetic import KERNEL_TOLERANCE
from fluxq.eval.debug.debug import Search, debug, debug_pipelines
from fluxq.eval.images.protocols import items_of
from fluxq.eval.images.sides import Side, quantized_layers
from fluxq.eval.metrics.schema import Debug
from fluxq.kernels import ops
from fluxq.kernels.encode import decode
from fluxq.quantize.checkpoint import read_plan_file
from fluxq.quantize.record import bits_per_weight, read_record
from fluxq.quantize.structure import list_linears
from fluxq.recipes.all_families import family_of
from fluxq.recipes.formats import FORMATS
from fluxq.recipes.plan import component_recipe, make_plan
from fluxq.recipes.recipe import Recipe, load_recipe
from fluxq.runtime.step_caches import cache_of

ITEMS = tuple(items_of(list(tiny.PROMPTS[:2]), 2, first_seed=0))
CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 4}
SHORT_CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 2}
BLOCKS_ONLY = Search(steps=1, budget=10)  # two runs for each of five blocks
LAYER = "transformer.single_transformer_blocks.1.proj_out"
SIXTEEN_BIT = Side("16 bit", str(tiny.path()), "")


@pytest.fixture(scope="module")
def folder(plain_checkpoint) -> Path:
    return plain_checkpoint("nvfp4")


@pytest.fixture(scope="module")
def sound(folder) -> Debug:
    """All that there is to know about a checkpoint without faults."""
    return debug(SIXTEEN_BIT, Side("nvfp4", str(folder), ""), ITEMS, CALL, Search(2, growth=0.1))


@pytest.fixture
def quantized(folder):
    """The quantized pipeline, for a test to damage."""
    return Side("nvfp4", str(folder), "").open()


def broken(pipe, quantized, **how) -> Debug:
    return debug_pipelines(pipe, quantized, ITEMS[:1], SHORT_CALL, how.pop("search", BLOCKS_ONLY), **how)


@pytest.mark.long
def test_sound_checkpoint_has_no_faults(sound):
    assert not any(layer.fault for layer in sound.layers)
    assert len(sound.layers) == 38
    assert {layer.kernel_error for layer in sound.layers} == {0.0}  # the reference itself
    assert not any(max(layer.health["not_finite"]) for layer in sound.layers)
    assert "kernels were not run, a CPU has none" in sound.findings
    assert Debug.model_validate_json(sound.model_dump_json()) == sound


def test_layers_are_ranked_by_what_they_do_to_the_latents(sound):
    damages = [layer.damage for layer in sound.layers]
    assert damages == sorted(damages, reverse=True)
    assert damages[0] > 0.05 and damages[-1] >= 0
    assert all(math.isfinite(layer.gain) and layer.gain < 1 for layer in sound.layers)


def test_restoring_what_does_most_damage_gains(sound):
    """Check that the worst block gains far more than the order of a CPU's sums changes.

    The gain of one small layer would be within that.
    """
    worst = max(sound.blocks, key=lambda block: block.damage)
    assert worst.gain > 0.1


def test_damages_add_up(sound):
    assert sound.additivity == pytest.approx(sum(layer.damage for layer in sound.layers), rel=1e-6)
    assert 0.5 < sound.additivity < 2  # conformance case Q3
    assert any(f"add up to {sound.additivity:.2f} of the whole error" in words for words in sound.findings)


def test_blocks_in_the_order_in_which_they_run(sound):
    names = [block.name for block in sound.blocks]
    assert names == [
        "transformer.transformer_blocks.0",
        *(f"transformer.single_transformer_blocks.{i}" for i in range(4)),
    ]
    assert all(block.damage > 0.02 for block in sound.blocks)
    assert sum(block.weights for block in sound.blocks) == sum(layer.weights for layer in sound.layers)


def test_errors_by_step(sound):
    assert sound.steps == (0, 3) and sound.sigmas == (1.0, 0.25)
    four_bit = [layer for layer in sound.layers if layer.scheme.startswith("nvfp4")]
    assert all(10 < db < 35 for layer in four_bit for db in layer.local_sqnr_db)
    first = next(layer for layer in sound.layers if layer.name.endswith("transformer_blocks.0.norm1.linear"))
    # Nothing before it is quantized, so at step 0 its input is the 16-bit one in either run.
    assert first.free_sqnr_db[0] == pytest.approx(first.local_sqnr_db[0], abs=1e-3)
    deep = next(layer for layer in sound.layers if layer.name.endswith("blocks.3.attn.to_k"))
    assert all(free < local for free, local in zip(deep.free_sqnr_db, deep.local_sqnr_db, strict=True))


def test_first_divergence_is_the_first_layer_in_4_bits(sound):
    """The modulation before it is in 8 bits, and within what two 16-bit runs differ by."""
    assert sound.first_divergence.startswith("step 0, transformer.transformer_blocks.0.attn.to_q: ")
    assert sound.sqnr_db + 10 < sound.floor_sqnr_db < 70


def test_patch_gains_within_its_growth(sound, folder):
    patch = sound.patch
    parts = read_record(folder).components
    assert patch.bits_before == pytest.approx(bits_per_weight(parts), abs=1e-3)  # as every other command counts them
    assert patch.bits_before < patch.bits_after <= patch.bits_before * 1.1
    assert patch.measured_sqnr_db > patch.before_sqnr_db + 0.5
    assert patch.before_sqnr_db == pytest.approx(sound.sqnr_db)
    floor, before = (10 ** (-db / 10) for db in (sound.floor_sqnr_db, sound.sqnr_db))
    share = patch.damage / sum(layer.damage for layer in sound.layers)
    predicted = floor + (before - floor) * (1 - share)
    assert patch.predicted_sqnr_db == pytest.approx(-10 * math.log10(predicted))
    weights = sum(layer.shape[0] * layer.shape[1] for part in parts for layer in part.layers)
    named = [layer for layer in sound.layers if layer.name in patch.layers]
    grown = sum((8 - 4.5) * layer.weights for layer in named)  # and a scale per row, and what nvfp4 has per tensor
    assert patch.bits_after - patch.bits_before == pytest.approx(grown / weights, rel=0.1)


def test_patch_is_a_recipe_that_changes_those_layers_only(sound, folder, tmp_path):
    file = tmp_path / "better.yaml"
    file.write_text(sound.patch.recipe, encoding="utf-8")
    before, after = (_schemes(recipe) for recipe in (_recorded(folder), load_recipe(str(file))[1]))
    changed = {f"transformer.{name}" for name in before if before[name] != after[name]}
    assert changed == set(sound.patch.layers)
    assert {after[name.partition(".")[2]] for name in changed} == {"fp8-fp8"}


def _recorded(folder: Path) -> Recipe:
    said = dict(read_plan_file(folder)["recipe"])
    del said["name"]
    return Recipe.model_validate(said)


def _schemes(recipe: Recipe) -> dict[str, str]:
    family = family_of("FluxTransformer2DModel")
    linears = list_linears(ModelFolder("tiny", tiny.path()), "transformer")
    entry = component_recipe(recipe, "transformer", family)
    plan = make_plan(family, "transformer", entry, linears, static_inputs=True)
    return {layer.name: str(layer.scheme) for layer in plan.layers}


@pytest.mark.slow
def test_weights_times_one_and_a_half(pipe, plain_checkpoint):
    """Conformance case Q2."""
    quantized = Side("int8", str(plain_checkpoint("int8")), "").open()
    quantized_layers(quantized)[LAYER].weight_scale.data.mul_(1.5)
    found = broken(pipe, quantized, search=Search(1, 22, 0.1), recipe=("int8", load_recipe("int8")[1]))
    worst, block = found.layers[0], LAYER.rpartition(".")[0]
    assert worst.name == LAYER
    assert worst.gain > 0.9 and worst.damage > 0.9
    assert worst.damage == max(row.damage for row in found.layers if row.damage is not None)
    assert worst.fault == "stored weights are 1.5 times those of the source"
    assert found.findings[0] == f"{LAYER}: {worst.fault}"
    assert found.findings[1].startswith(f"{LAYER}: quantized alone it makes ")
    assert max(found.blocks, key=lambda row: row.damage).name == block
    # A budget of 22 runs opens one block, the faulty one, and says so.
    opened = {row.name for row in found.layers if row.damage is not None}
    assert opened == {name for name in quantized_layers(quantized) if name.startswith(f"{block}.")}
    assert "layers of 4 of 5 blocks were not measured one by one: the budget is used" in found.findings
    assert LAYER in found.patch.layers
    assert found.patch.measured_sqnr_db > found.patch.before_sqnr_db + 10
    assert "extends: int8\n" in found.patch.recipe


@pytest.mark.slow
def test_a_swapped_nibble_is_ranked_first(pipe, quantized):
    weight = quantized_layers(quantized)[LAYER].weight.data
    element = FORMATS["nvfp4"].element
    low, high = (decode(nibble, element) for nibble in (weight & 0xF, weight >> 4))
    row, byte = divmod(int((low - high).abs().argmax()), weight.shape[1])
    weight[row, byte] = (weight[row, byte] >> 4) | (weight[row, byte] << 4)
    found = broken(pipe, quantized)
    assert found.layers[0].name == LAYER
    assert f"codes are not what rounding gives, most at row {row}, column {2 * byte}" in found.findings[0] or (
        f"column {2 * byte + 1}" in found.findings[0]
    )
    assert [layer.name for layer in found.layers if layer.fault] == [LAYER]


@pytest.mark.slow
def test_a_wrong_scale_is_ranked_first(pipe, quantized):
    scale = quantized_layers(quantized)[LAYER].weight_scale.data
    scale[7, 3] = scale[7, 3].float().mul(2).to(scale.dtype)
    found = broken(pipe, quantized)
    assert found.layers[0].name == LAYER
    assert found.findings[0].startswith(f"{LAYER}: a scale is wrong: stored weights of row 7, columns 48 to 63 are ")


@pytest.mark.slow
def test_nan_is_traced_to_the_layer_that_makes_it(pipe, quantized):
    scale = quantized_layers(quantized)[LAYER].weight_scale.data
    scale[7, 3] = torch.nan
    found = broken(pipe, quantized, search=Search(1, 22))
    assert found.layers[0].name == LAYER
    assert "at step 0 NaN or infinity comes out of it, from an input that is finite" in found.findings[0]
    assert found.layers[0].gain == found.layers[0].damage == 1
    assert sum("NaN or infinity" in words for words in found.findings) == 1  # not of the layers behind it
    assert (
        f"the final latents are not finite; {LAYER}: kept in 16 bit, this layer alone makes them so" in found.findings
    )
    assert found.sqnr_db is None and found.additivity is None


@pytest.mark.slow
def test_a_static_scale_that_is_too_small(pipe, quantized):
    quantized_layers(quantized)[LAYER].input_scale.data.div_(8)
    found = broken(pipe, quantized)
    assert found.layers[0].name == LAYER
    assert "times what its static input scale reaches" in found.findings[0]
    assert max(found.layers[0].health["range"]) > 2 and max(found.layers[0].health["clipped"]) > 0.01


@pytest.mark.slow
def test_a_faulty_kernel_is_no_quantization_error(pipe, quantized, monkeypatch):
    """A device kernel that loses the last 64 columns of one layer; codes, scales and reference are sound."""
    own, codes = ops.quantized_linear, quantized_layers(quantized)[LAYER].weight

    def kernel(x, tensors, scheme):
        y = own(x, tensors, scheme)
        if tensors[0].data_ptr() == codes.data_ptr():
            y[..., -64:] = 0
        return y

    monkeypatch.setattr(ops, "quantized_linear", kernel)
    found = broken(pipe, quantized)
    assert found.layers[0].name == LAYER
    assert found.layers[0].kernel_error > 10 * KERNEL_TOLERANCE
    assert "off the torch reference on the same input, which is no quantization error" in found.findings[0]
    assert [layer.name for layer in found.layers if layer.fault] == [LAYER]


@pytest.mark.slow
def test_a_library_that_saturates_int8_products(pipe, plain_checkpoint, monkeypatch):
    own = ops.int8_product
    monkeypatch.setattr(ops, "int8_product", lambda a, b: own(a, b).clamp(-30000, 30000))
    found = broken(pipe, Side("int8", str(plain_checkpoint("int8")), "").open())
    assert sum("its kernel is" in layer.fault for layer in found.layers) > 10


@pytest.mark.slow
def test_refusals(pipe, quantized, folder):
    with pytest.raises(ValueError, match="step cache"):
        debug(SIXTEEN_BIT, Side("q", str(folder), "", cache=cache_of("0.1")), ITEMS, CALL)
    with pytest.raises(ValueError, match="a budget of 9 runs is too small for 5 blocks: give 10"):
        broken(pipe, quantized, search=Search(1, 9))
    with pytest.raises(ValueError, match="no layer that makes the latents is quantized"):
        debug_pipelines(pipe, pipe, ITEMS, CALL)
