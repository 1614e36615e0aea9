"""Tests of what hooks see along a run, and of what one layer's arithmetic does to its input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fluxq import tiny
from fluxq.eval.debug.arithmetic import KERNEL_TOLERANCE, health, kernel_error
from fluxq.eval.debug.trace import LayerCall, Outputs, Powers, decibels, watch
from fluxq.eval.images.protocols import items_of
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS, Scheme

ITEMS = tuple(items_of(list(tiny.PROMPTS[:3]), 3, first_seed=0))
CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 3}
NAMES = (
    "transformer.transformer_blocks.0.norm1.linear",
    "transformer.transformer_blocks.0.attn.add_q_proj",
    "transformer.single_transformer_blocks.3.proj_out",
    "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q",
)


def layer_of(name: str, n: int = 128, k: int = 128, **how) -> QuantLinear:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    row = FORMATS[name]
    scheme = Scheme(row, row, static_input="input_scale" in how)
    return QuantLinear.from_quantized(QuantizedTensor.quantize(w, row), None, scheme, **how)


def test_watch_sees_the_steps_asked_for(pipe):
    seen: list[LayerCall] = []
    latents = watch(pipe, NAMES, ITEMS, CALL, (0, 2), 2, seen.append)
    assert latents.shape[0] == 3 and latents.dtype == torch.float64
    found = [(each.name, each.step, each.batch, each.images) for each in seen]
    transformer = {(name, step, *batch) for name in NAMES[:3] for step in (0, 2) for batch in ((0, 2), (1, 1))}
    assert set(found) == transformer | {(NAMES[3], 0, 0, 2), (NAMES[3], 0, 1, 1)}  # text is read before step 0
    assert torch.equal(latents, watch(pipe, (), ITEMS, CALL, (), 2))  # hooks change nothing, and are gone
    assert len(seen) == len(found)


def test_rows_are_the_same_images_whatever_the_batch(pipe):
    """Of another image a row would have nothing in common with the reference's."""
    together, apart = Outputs(), Outputs()
    watch(pipe, NAMES, ITEMS, CALL, (0, 2), 3, together)
    watch(pipe, NAMES, ITEMS, CALL, (0, 2), 1, apart)
    powers = apart.against(together)
    assert all(powers.noise(name, step) < 1e-3 for name in NAMES[:3] for step in (0, 2))
    assert powers.noise(NAMES[0], 1) is None
    assert together.order == (NAMES[3], *NAMES[:3])


def test_images_under_guidance_are_told_apart():
    """Twice the batch: all images without, then all with a prompt."""
    y = torch.arange(2 * 3 * 4.0).reshape(6, 4, 1)
    rows = Outputs()
    rows(LayerCall("a", 0, 0, 3, nn.Identity(), y, y))
    alone = Outputs()
    for image in range(3):
        own = y[[image, image + 3]]
        alone(LayerCall("a", 0, image, 1, nn.Identity(), own, own))
    assert alone.against(rows).noise("a", 0) == 0


def test_powers_and_decibels():
    powers = Powers()
    powers.add("a", 0, torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    powers.add("a", 0, torch.tensor([5.0]), torch.tensor([5.0]))
    assert powers.noise("a", 0) == 0.25 / 50
    assert powers.sqnr_db("a", (0, 1)) == (pytest.approx(10 * math.log10(200)), None)
    powers.add("a", 1, torch.ones(2), torch.tensor([1.0, math.nan]))
    assert math.isnan(powers.noise("a", 1)) and powers.sqnr_db("a", (1,)) == (None,)
    assert decibels(0.0) is None and decibels(None) is None and decibels(math.inf) is None


def test_health_of_a_static_scale():
    """g = 1 / 448: a block may reach 6; one value in 128 is 12, and one is far too small for the block it is in."""
    layer = layer_of("nvfp4", input_scale=torch.tensor(1 / 448))
    x = torch.full((4, 128), 1.0)
    x[0, 0], x[1, 20] = 12.0, 1e-3
    counts = health(layer, x, layer(x))
    assert counts["range"] == pytest.approx(2)
    assert counts["clipped"] == 1 / 512
    assert counts["underflow"] == 1 / 512
    assert counts["largest"] == pytest.approx((512 - 15 - 1) / 512)  # every 1 is its block's largest, but beside 12
    assert counts["not_finite"] == counts["input_not_finite"] == 0


def test_health_of_a_static_scale_of_fp8():
    """s = 1 / 448: codes reach 1."""
    layer = layer_of("fp8_tensor", input_scale=torch.tensor(1 / 448))
    x = torch.full((4, 128), 0.5)
    x[0, 0] = 3.0
    counts = health(layer, x, layer(x))
    assert counts["range"] == pytest.approx(3) and counts["clipped"] == counts["largest"] == 1 / 512


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8_e5m2", "mxfp8", "nvfp4"])
def test_scales_that_follow_from_the_values_clip_nothing(name):
    layer = layer_of(name)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)) * 100
    counts = health(layer, x, layer(x))
    assert counts["clipped"] == 0 and 0 < counts["largest"] < 0.2 and "range" not in counts


def test_health_of_what_is_not_finite():
    layer, x = layer_of("int8"), torch.ones(4, 128)
    x[1, 3] = math.nan
    counts = health(layer, x, layer(x))
    assert counts["input_not_finite"] == 1 / 512 and counts["not_finite"] > 0
    plain = health(nn.Linear(128, 2), torch.ones(1, 128), torch.tensor([[1.0, math.inf]]))
    assert plain == {"not_finite": 0.5, "input_not_finite": 0}


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_a_kernel_is_judged_by_its_worst_tile(name):
    layer = layer_of(name, n=256)
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(3))
    y = layer(x)
    assert kernel_error(layer, x, y) < 1e-6
    assert kernel_error(layer, x, y.bfloat16()) < KERNEL_TOLERANCE / 5
    wrong = y.clone()
    wrong[128:192, 64:128] = 0  # one tile of 16, 6 % of the whole
    assert kernel_error(layer, x, wrong) > 0.9
    assert kernel_error(layer, x, y * math.nan) == math.inf


def test_a_kernel_may_pass_on_nan():
    layer, x = layer_of("nvfp4"), torch.ones(64, 128)
    x[1, 3] = math.nan
    assert kernel_error(layer, x, layer(x)) == 0
