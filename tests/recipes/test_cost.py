"""The cost of a plan: FLOPs against torch's own counter, bytes against closed forms, times against the literature."""

import dataclasses
import json
import math
from functools import cache

import diffusers
import pytest
import torch
from tiny_configs import TINY_CONFIGS
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fluxq.kernels.all_ops import SCALED_MATMUL
from fluxq.kernels.dispatch import choose, compiled_with, refusal
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.quantize.structure import convolutions_of, shapes_of
from fluxq.recipes.all_families import FAMILIES, PUBLISHED
from fluxq.recipes.cost import (
    EIGHT_BIT,
    LEVELS,
    NATIVE,
    REFERENCE,
    Step,
    attention_route,
    cost,
    group_seconds,
    in_16_bit,
    resident_bytes,
    route,
    seconds_of_groups,
    steps,
)
from fluxq.recipes.devices import DEVICES, INSTRUCTIONS, KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS, Scheme, for_tokens
from fluxq.recipes.plan import LayerPlan, LinearShape, Plan, make_plan
from fluxq.recipes.recipe import Component, load_recipe, shipped_recipes
from fluxq.recipes.workloads import WORKLOADS, CallSize, ForwardPass, forward_pass

TRANSFORMERS = [row for row in FAMILIES.values() if row.kind == "transformer"]
MODELLED = [row for row in TRANSFORMERS if row.name in WORKLOADS]
S, D = 4096 + 512, 3072  # tokens and channels of FLUX.1-dev at 1024 x 1024
FLUX_DEV = {"guidance_embeds": True}  # the published configuration; the rest of it is the class's own default
H200, RTX5090 = DEVICES["h200"], DEVICES["rtx5090"]
ONE_EACH = {key: DEVICES[key] for key in {device.chip: key for key, device in reversed(DEVICES.items())}.values()}
WITH_KERNELS = {key: device for key, device in ONE_EACH.items() if device.chip not in REFERENCE}


@cache
def model(family: str, config: str = "{}") -> nn.Module:
    return build_on_meta("diffusers", FAMILIES[family].model, json.loads(config))


def full_size(family: str) -> dict:
    return dict(next(found.config for found in PUBLISHED if found.family == family))


@cache
def plan_of(recipe: str, family: str = "flux") -> Plan:
    module = model(family, json.dumps(FLUX_DEV if family == "flux" else {}))
    return planned(load_recipe(recipe)[1].components["transformer"], family, module)


def planned(recipe: Component, family: str, module: nn.Module) -> Plan:
    return make_plan(FAMILIES[family], "transformer", recipe, shapes_of(module), static_inputs=True)


FLUX = forward_pass("flux", FLUX_DEV)


def part(found, name):
    return next(row for row in (*found.parts, found.total) if row.name == name)


def of_kind(plan: Plan, kind: str, chip: str = "sm_90", forward: ForwardPass = FLUX):
    return [step for step in steps(plan, forward, chip) if step.kind == kind]


# FLOPs


def test_flux_dev_in_numbers():
    assert sum(p.numel() for p in model("flux", json.dumps(FLUX_DEV)).parameters()) == pytest.approx(11.9e9, rel=0.001)
    assert FLUX == ForwardPass("flux", image=4096, text=512)
    found = cost(plan_of("fp8"), FLUX, H200)
    blocks = sum(part(found, name).flops for name in ("attention projections", "feed-forward", "single blocks"))
    assert round(blocks / 1e12, 1) == 59.5
    assert round(part(found, "attention").flops / 1e12, 1) == 14.9
    modulation = [layer for layer in plan_of("fp8").layers if layer.role == "modulation"]
    assert round(sum(layer.n * layer.k for layer in modulation) / 1e9, 2) == 3.23
    assert part(found, "modulation").layers == len(modulation) == 76


TINY_PASSES = {  # tokens of shared.py's family_inputs
    "flux": ForwardPass("flux", image=4, text=5),
    "flux2": ForwardPass("flux2", image=4, text=5),
    "sd3": ForwardPass("sd3", image=16, text=5),
    "qwen_image": ForwardPass("qwen_image", image=4, text=5),
    "wan": ForwardPass("wan", image=4, text=512, vision=6),
    "chroma": ForwardPass("chroma", image=4, text=5, modulations=20),
    "z_image": ForwardPass("z_image", image=32, text=32),  # both are padded
    "pixart": ForwardPass("pixart", image=16, text=5, normalised=False),
    "ltx": ForwardPass("ltx", image=4, text=5),
    "hunyuan_video": ForwardPass("hunyuan_video", image=4, text=5),
    "sana": ForwardPass("sana", image=16, text=5, normalised=False, head=32),
    "hidream": ForwardPass("hidream", image=16, text=15, prompt=5, routed=0.5),
    "unet": ForwardPass("unet", image=64, text=5, levels=(64, 16), normalised=False),
}


@pytest.mark.often(2)
@pytest.mark.parametrize("row", MODELLED, ids=lambda row: row.name)
def test_flops_are_those_that_torch_counts_in_a_forward_pass(row, family_inputs):
    """Linears and attention, of every layer and stream; convolutions where they are much of the work."""
    tiny = getattr(diffusers, row.model).from_config(TINY_CONFIGS[row.name])
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            tiny(**family_inputs(row), return_dict=False)
    with_convolutions = WORKLOADS[row.name].convolutions
    counts = counter.get_flop_counts()["Global"].items()
    counted = sum(n for op, n in counts if with_convolutions or "convolution" not in str(op))
    forward = TINY_PASSES[row.name]
    routers = [module for module in tiny.modules() if type(module).__name__ == "MoEGate"]
    for stream, router in zip(("image", "both"), routers, strict=False):  # of a double and a single block; left out
        counted -= 2 * forward.tokens(stream) * router.weight.numel()
    if with_convolutions:
        forward = dataclasses.replace(forward, convolutions=convolutions_of(tiny))
    plan = in_16_bit(planned(Component.model_validate({"weights": {"format": "fp8"}}), row.name, tiny))
    modelled = list(steps(plan, forward, "sm_90"))
    assert {step.name for step in modelled if step.kind == "matmul"} == {layer.name for layer in plan.layers}
    assert sum(step.flops + step.scalar_flops for step in modelled) == counted


@pytest.mark.often(1)
@pytest.mark.parametrize("side", [8, 12])
def test_flops_of_a_unet_with_more_levels_and_convolutions_for_its_ends(side, family_inputs):
    """Stable Diffusion 1.5's kind; 12, 6, 3 and 2 pixels on a side: a level rounds up."""
    row = FAMILIES["unet"]
    blocks = {
        "block_out_channels": [128, 128, 128, 128],
        "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
        "use_linear_projection": False,
        "addition_embed_type": None,
    }
    config = {**TINY_CONFIGS[row.name], **blocks}
    tiny = diffusers.UNet2DConditionModel.from_config(config)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            tiny(**{**family_inputs(row), "sample": torch.randn(1, 4, side, side)}, return_dict=False)
    size = CallSize(height=8 * side, width=8 * side, text=5)
    forward = forward_pass("unet", dict(tiny.config), size, convolutions=convolutions_of(tiny))
    plan = in_16_bit(planned(Component.model_validate({"weights": {"format": "fp8"}}), "unet", tiny))
    assert sum(step.flops for step in steps(plan, forward, "sm_90")) == counter.get_total_flops()


def test_every_denoiser_has_a_workload():
    assert set(WORKLOADS) == set(TINY_PASSES) == {row.name for row in TRANSFORMERS}


@pytest.mark.often(1)
@pytest.mark.parametrize("row", MODELLED, ids=lambda row: row.name)
def test_in_full_size_no_layer_is_left_without_a_part(row):
    module = model(row.name, json.dumps(full_size(row.name)))
    forward = forward_pass(row.name, dict(module.config), convolutions=convolutions_of(module))
    plan = planned(load_recipe("nvfp4")[1].components["transformer"], row.name, module)
    found = cost(plan, forward, RTX5090)
    assert "other" not in [row.name for row in found.parts]
    assert part(found, "total").layers == len(plan.layers) + len(forward.convolutions)
    assert part(found, "attention").seconds["fused"] > 0


# Tokens


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("family", "how", "image", "text"),
    [
        ("flux", {}, 4096, 512),
        ("flux", {"height": 768, "width": 1360, "text": 256}, 48 * 85, 256),
        ("flux", {"height": 1000, "width": 1000}, 62 * 62, 512),  # the pipeline cuts off what fills no token
        ("flux", {"height": 16, "width": 16, "vae": {"block_out_channels": [16, 32]}, "text": 8}, 16, 8),
        ("flux2", {"vae": {"block_out_channels": [128, 256, 512, 512]}}, 4096, 512),
        ("sd3", {}, 4096, 333),
        ("qwen_image", {"vae": {"temperal_downsample": [False, True, True]}}, 4096, 512),
        ("wan", {}, 21 * 30 * 52, 512),
        ("chroma", {}, 4096, 512),
        ("z_image", {"height": 1280, "width": 720}, 80 * 45, 512),
        ("pixart", {}, 4096, 300),
        ("ltx", {}, 21 * 16 * 22, 128),
        ("ltx", {"vae": {"patch_size": 4, "spatio_temporal_scaling": [True, True, True, False]}}, 21 * 16 * 22, 128),
        ("hunyuan_video", {"frames": 61}, 16 * 45 * 80, 256),
        ("wan", {"height": 704, "width": 1280, "frames": 121, "vae": {"scale_factor_spatial": 16}}, 31 * 22 * 40, 512),
        ("sana", {"vae": {"encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024]}}, 32 * 32, 300),
        ("hidream", {}, 4096, 3 * 128),
        ("hidream", {"height": 768, "width": 1360, "text": 64}, 4096, 3 * 64),  # what is not square is padded
        ("unet", {}, 128 * 128, 77),  # the configuration's size
    ],
)
def test_tokens_of_an_image(family, how, image, text):
    module = model(family, json.dumps(full_size(family)))
    size = CallSize(**{name: value for name, value in how.items() if name != "vae"})
    found = forward_pass(family, dict(module.config), size, vae=how.get("vae"), convolutions=convolutions_of(module))
    assert (found.image, found.text) == (image, text)


def test_levels_of_a_unet_and_tokens_of_an_expert():
    module = model("unet", json.dumps(full_size("unet")))
    found = forward_pass("unet", dict(module.config), CallSize(1, 1000, 1016), convolutions=convolutions_of(module))
    assert found.levels == (125 * 127, 63 * 64, 32 * 32)
    assert [found.tokens(f"level {level}") for level in (0, 1, -1)] == [125 * 127, 63 * 64, 32 * 32]
    expert = forward_pass("hidream", full_size("hidream"))
    assert [expert.tokens(f"routed {stream}") for stream in ("image", "both")] == [2048, (4096 + 384) / 2]
    assert expert.tokens("prompt") == 128


def test_convolutions_of_sdxl_are_a_part_and_are_priced_in_16_bit():
    """A quarter of SDXL's FLOPs, which no recipe makes faster."""
    module = model("unet", json.dumps(full_size("unet")))
    forward = forward_pass("unet", dict(module.config), convolutions=convolutions_of(module))
    found = cost(planned(load_recipe("fp8")[1].components["transformer"], "unet", module), forward, H200)
    row = part(found, "convolutions")
    weights = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1))
    assert row.stored_bytes == row.resident_bytes == 2 * weights
    assert row.seconds["fused"] == row.seconds_16bit > 0 and row.speedup == 1
    assert 0.2 < row.flops / found.total.flops < 0.5


def test_linear_attention_grows_with_the_tokens_and_not_with_their_square():
    module = model("sana", json.dumps(full_size("sana")))
    plan = planned(load_recipe("fp8")[1].components["transformer"], "sana", module)
    flops = []
    for side in (1024, 2048):
        size = CallSize(1, side, side)
        forward = forward_pass("sana", dict(module.config), size, convolutions=convolutions_of(module))
        found = [s for s in steps(plan, forward, "sm_90") if s.kind == "attention" and s.name.endswith("attn1.to_q")]
        flops.append(sum(step.scalar_flops for step in found))
    assert flops[1] == 4 * flops[0] == 4 * 28 * 4 * 1024 * 1152 * 33


def test_a_group_takes_its_time_whatever_others_take_and_all_take_that_of_the_plan():
    mixed = plan_of("nvfp4")
    other = {layer.name: layer for layer in plan_of("fp8").layers}
    group = "transformer_blocks.3.attn.to_q"
    layers = tuple(other[layer.name] if layer.group == group else layer for layer in mixed.layers)
    plan = dataclasses.replace(mixed, layers=layers)
    found, plain = (seconds_of_groups(each, FLUX, RTX5090) for each in (plan, mixed))
    assert sum(found.values()) == pytest.approx(cost(plan, FLUX, RTX5090).total.seconds["fused"])
    assert found[group] == seconds_of_groups(plan_of("fp8"), FLUX, RTX5090)[group] > plain[group]
    assert {**found, group: plain[group]} == plain


def test_what_makes_no_forward_pass_is_refused():
    with pytest.raises(ValueError, match="unet: much of its work is convolutions, and none were given"):
        forward_pass("unet", full_size("unet"))
    with pytest.raises(ValueError, match="clip: its cost is not modelled; known: flux, flux2, sd3"):
        forward_pass("clip", {})
    with pytest.raises(ValueError, match="flux makes images, not video: leave out the frames"):
        forward_pass("flux", {}, CallSize(frames=9))
    with pytest.raises(ValueError, match="flux: 8x1024, 1 images of 1 frames make no token; one is 16 pixels"):
        forward_pass("flux", {}, CallSize(height=8, width=1024))


def test_sd3_normalises_queries_only_where_its_configuration_says_so():
    assert not forward_pass("sd3", {"qk_norm": None}).normalised
    assert forward_pass("sd3", {"qk_norm": "rms_norm"}).normalised and forward_pass("flux", {}).normalised


def test_a_batch_multiplies_tokens_but_not_weights():
    one, four = (cost(plan_of("fp8"), dataclasses.replace(FLUX, batch=batch), H200) for batch in (1, 4))
    assert four.total.flops == 4 * one.total.flops
    assert four.total.resident_bytes == one.total.resident_bytes
    assert part(four, "modulation").seconds["fused"] == pytest.approx(
        part(one, "modulation").seconds["fused"], rel=0.01
    )


# Bytes


@pytest.mark.often(2)
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4", "int8", "16 bit"])
def test_bytes_of_the_passes_between_the_matmuls(recipe):
    """In units of one (S, D) tensor in 16 bit; q is what a quantized one is of it."""
    plan = in_16_bit(plan_of("fp8")) if recipe == "16 bit" else plan_of(recipe)
    q = 0 if recipe == "16 bit" else FORMATS[recipe].stored_bits(S, D) / (16 * S * D)
    found = [step for step in steps(plan, FLUX, "sm_100") if step.part == "elementwise"]
    unit = 2 * S * D
    total = {level: sum(step.bytes[level] for step in found) / unit for level in LEVELS}
    # norm r1 w1, twice; q and k r2 w2; gate and residual r2 w1, twice; activation r4 w4
    double, single = 2 * 2 + 4 + 2 * 3 + 8, 2 + 4 + 3 + 8 + 10  # the single blocks concatenate: r5 w5
    passes = (7, 6) if q else (0, 0)  # inputs to quantize, in units
    assert total["unfused"] == pytest.approx(
        19 * (double + passes[0] * (1 + q)) + 38 * (single + passes[1] * (1 + q)), rel=1e-3
    )
    norm = 1 + (q or 1)
    attended = 1 + q if q else 0  # attention writes 16 bit
    assert total["ideal"] == pytest.approx(19 * (2 * norm + 2 + attended) + 38 * (norm + 1 + attended), rel=1e-3)
    activated = 4 * (1 + q) if q else 0
    assert total["fused"] == pytest.approx(total["ideal"] + 57 * (4 + activated), rel=1e-3)


@pytest.mark.slow
def test_bytes_where_a_gate_is_fused_with_what_it_multiplies():
    """FLUX.2 in 16 bit, in units of one (S, D) tensor; its feed-forward is 3 D wide."""
    forward, unit = forward_pass("flux2", dict(model("flux2").config)), 2 * S * 6144
    found = [s for s in steps(in_16_bit(plan_of("fp8", "flux2")), forward, "sm_100") if s.part == "elementwise"]
    total = sum(step.bytes["unfused"] for step in found) / unit
    # norm r1 w1, twice; q and k r2 w2; gate and residual r2 w1, twice; activation r6 w3
    double, single = 2 * 2 + 4 + 2 * 3 + 9, 2 + 4 + 3 + 9 + 8  # the single blocks concatenate: r4 w4
    assert total == pytest.approx(8 * double + 48 * single, rel=1e-3)


@pytest.mark.parametrize(
    ("other", "times"), [({}, 2), ({"weights": {"format": "int8"}, "activations": {"format": "int8"}}, 1)]
)
def test_an_input_is_written_once_for_each_format_that_reads_it(other, times):
    """All of fp8, but v in 16 bit or in int8."""
    eight = {"weights": {"format": "fp8"}, "activations": {"format": "fp8"}}
    override = {"match": "**.attn.to_v", **other, "reason": "r"}
    recipes = [Component.model_validate({**eight, "overrides": found}) for found in ([], [override])]
    flux = model("flux", json.dumps(FLUX_DEV))
    once, again = (
        sum(s.bytes["fused"] for kind in ("norm", "quantize") for s in of_kind(planned(r, "flux", flux), kind))
        for r in recipes
    )
    assert again - once == pytest.approx(times * (4096 * D * 19 + S * D * 38), rel=2e-3)


def test_memory_in_the_checkpoint_and_at_run_time():
    plan = plan_of("nvfp4")
    stored = sum(layer.stored_bits for layer in plan.layers) / 8
    found = {name: cost(plan, FLUX, DEVICES[name]).total for name in ("b200", "h200")}
    assert found["b200"].stored_bytes == found["b200"].resident_bytes == stored
    eight = sum(layer.n * layer.k for layer in plan.quantized)
    assert found["h200"].resident_bytes == pytest.approx(
        eight + part(cost(plan, FLUX, H200), "kept in 16 bit").stored_bytes,
        rel=2e-3,  # and a scale a row
    )
    assert cost(plan, FLUX, H200, prefer="memory").total.resident_bytes == stored


# Which arithmetic a chip computes a scheme with


@pytest.mark.parametrize(
    ("chip", "scheme", "arithmetic", "words"),
    [
        ("sm_80", "fp8-fp8", "int8", "re-encoded at load to int8"),
        ("sm_80", "nvfp4-nvfp4-static", "int8", "re-encoded at load to int8"),
        ("sm_89", "fp8-fp8", "fp8", "native"),
        (
            "sm_89",
            "nvfp4-nvfp4",
            "int8",
            "re-encoded at load to int8 or fp8, timed as int8",
        ),  # twice the rate of fp8 there
        ("sm_89", "mxfp8-mxfp8", "int8", "re-encoded at load to int8 or fp8, timed as int8"),
        ("sm_90", "fp8_tensor-fp8_tensor", "fp8", "native"),
        ("sm_90", "fp8-fp8_1x128", "fp8_1x128", "native"),
        ("sm_120", "fp8-fp8_1x128", "mxfp8", "native, by the chip's mxfp8 instruction"),
        ("sm_80", "fp8-fp8_1x128", "int8", "re-encoded at load to int8"),
        ("sm_90", "fp8_1x128-fp8_1x128", "fp8", "re-encoded at load to int8 or fp8"),
        ("sm_90", "nvfp4-fp8_1x128", "fp8", "re-encoded at load to int8 or fp8"),
        ("sm_90", "nvfp4-nvfp4-static", "fp8", "re-encoded at load to int8 or fp8, timed as fp8"),
        ("sm_90", "int8-int8", "int8", "native"),
        ("sm_100", "nvfp4-nvfp4-static", "nvfp4", "native"),
        ("sm_100", "int4-int8", "int8", "re-encoded at load to int8 or fp8, timed as int8"),
        ("sm_120", "fp8-fp8", "mxfp8", "native, by the chip's mxfp8 instruction"),
        ("sm_120", "nvfp4-nvfp4", "nvfp4", "native"),
        ("sm_120", "int4-int4", "int8", "re-encoded at load to int8 or fp8, timed as int8"),
        ("gfx942", "fp8-fp8", "int8", "re-encoded at load to int8"),
        ("gfx950", "mxfp4-mxfp4", "mxfp4", "native"),
        ("gfx950", "nvfp4-nvfp4", "fp8", "re-encoded at load to int8 or fp8, timed as fp8"),
        ("sm_90", "int4-16bit", "bf16", "weight-only"),
        ("sm_100", "nvfp4-16bit", "bf16", "weight-only"),
    ],
)
def test_what_a_chip_multiplies(chip, scheme, arithmetic, words):
    found = route(Scheme.parse(scheme), chip)
    assert found.arithmetic == arithmetic and words in found.about


def test_who_prefers_memory_keeps_four_bits_and_the_low_rank_branch():
    scheme = Scheme.parse("nvfp4-nvfp4-static-r32")
    fast, small = (route(scheme, "sm_90", prefer) for prefer in ("speed", "memory"))
    assert (fast.arithmetic, fast.weights, fast.is_collapsed) == ("fp8", FORMATS["fp8"], True)
    assert (small.arithmetic, small.weights, small.is_collapsed) == ("fp8", FORMATS["nvfp4"], False)
    assert small.about == "4 bits in memory, decoded in the kernel to int8 or fp8, timed as fp8"
    for eight in ("mxfp8-mxfp8", "fp8-fp8"):
        assert route(Scheme.parse(eight), "sm_90", "memory") == route(Scheme.parse(eight), "sm_90")


def test_a_low_rank_branch_costs_until_it_is_added_to_the_weight():
    layer = next(layer for layer in plan_of("nvfp4").layers if layer.name == "single_transformer_blocks.0.attn.to_q")
    layer = dataclasses.replace(layer, scheme=Scheme.parse("nvfp4-nvfp4-static-r32"))
    plan = Plan("flux", "transformer", (layer,))
    (branch,) = of_kind(plan, "low rank", "sm_100")
    assert branch.flops == 2 * S * 32 * (D + D) and branch.arithmetic == "bf16"
    assert branch.bytes["unfused"] - branch.bytes["fused"] == 2 * S * D + 4 * S * D  # x again, y read and written
    assert of_kind(plan, "low rank", "sm_90") == []
    kept = resident_bytes(layer, "sm_100")
    assert kept == layer.stored_bits / 8 and kept - 2 * 32 * (D + D) == pytest.approx(D * D * 4.5 / 8, rel=1e-5)
    assert resident_bytes(layer, "sm_90") == D * D + 4 * D
    smoothed = dataclasses.replace(layer, scheme=Scheme.parse("nvfp4-nvfp4-static-smooth-h128-r32"))
    assert resident_bytes(smoothed, "sm_90") == D * D + 4 * D + 2 * D


@pytest.mark.parametrize("device", ONE_EACH.values(), ids=ONE_EACH)
def test_what_a_chip_computes_is_what_dispatch_would_choose(device):
    """Of every format by itself: multiplied as it is, or decoded to 16 bit until `prepare` makes it 8 bit."""
    chip = device.chip
    targets = [name for name in ("int8", "fp8") if not refusal("scaled_matmul", name, chip)]
    for name in FORMATS:
        scheme = Scheme.parse(f"{name}-{for_tokens(FORMATS[name]).name}")
        found, choice = route(scheme, chip), choose(scheme, chip, 4608, 3072, 3072)
        if chip in REFERENCE:
            assert choice.implementation == "torch reference" and REFERENCE[chip] in found.about
            assert (found.arithmetic, found.weights, found.is_collapsed) == ("fp32", scheme.weights, False)
            continue
        if name not in KERNEL_FORMATS:
            assert choice.implementation == "torch reference" and f"written for {name}" in choice.reason
            alone, kept = route(Scheme.parse(f"{name}-16bit"), chip), route(scheme, chip, "memory")
            assert alone.arithmetic == "fp32" and f"no kernel was written for {name}" in alone.about
            assert found.is_collapsed and kept.is_collapsed  # loading makes it 8 bit, which the chip multiplies
            continue
        if (compiled_with(), chip) == ("3.8", "gfx1201") and name in ("mxfp4", "nvfp4"):
            assert " spills" in choice.reason  # one Triton's, which the model of costs does not know
            continue
        assert (choice.activations == name) == (found.weights is scheme.weights) == (not found.is_collapsed), name
        assert choice.implementation != "torch reference"
        if found.is_collapsed:
            assert found.weights is not None and found.weights.name in targets and EIGHT_BIT[chip] in targets
            assert ("int8 or fp8" in found.about) == (len(targets) == 2)
        if found.is_collapsed and scheme.weights.element.bits == 4:
            decoded = route(scheme, chip, "memory")
            assert decoded.weights is scheme.weights and decoded.activations is not None
            assert not refusal("w4a8_matmul", f"{name}-{decoded.activations.name}", chip)


@pytest.mark.parametrize("device", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_int8_is_priced_by_itself_and_our_kernel_multiplies_it(device):
    """The library's product has neither scales nor a bias: it is taken only where a timing says so."""
    found = choose(Scheme.parse("int8-int8"), device.chip, 4608, 3072, 3072)
    assert (
        found.implementation == SCALED_MATMUL.name
        and route(Scheme.parse("int8-int8"), device.chip).arithmetic == "int8"
    )
    of_int8 = device.matmul["int8"]
    assert of_int8.measured or of_int8.why != "as fp8"


def test_where_there_is_no_kernel_torch_decodes_each_weight_and_multiplies_in_fp32():
    device = DEVICES["rx7900xtx"]
    found, fp32 = cost(plan_of("nvfp4"), FLUX, device), device.flops("fp32")
    assert found.total.resident_bytes == cost(plan_of("nvfp4"), FLUX, RTX5090).total.resident_bytes
    [layer] = [each for each in plan_of("nvfp4").layers if each.name == "transformer_blocks.0.attn.to_q"]
    [step] = [each for each in of_kind(plan_of("nvfp4"), "matmul", device.chip) if each.name == layer.name]
    assert step.seconds(device, "fused") == pytest.approx(2 * 4096 * D * D / fp32)
    assert step.bytes["fused"] == pytest.approx(layer.stored_bits / 8 + 8 * D * D + 2 * 2 * 4096 * D)
    assert found.total.seconds["fused"] > 2 * found.total.seconds_16bit
    assert list(found.efficiencies()) == ["bf16", "fp32", "attention", "memory bandwidth"]


def test_weights_alone_that_no_kernel_decodes_are_timed_in_fp32_on_every_gpu():
    recipe = Component.model_validate({"weights": {"format": "fp8_128x128"}})
    price = cost(planned(recipe, "flux", model("flux", json.dumps(FLUX_DEV))), FLUX, H200)
    assert list(price.efficiencies()) == ["bf16", "fp32", "attention", "memory bandwidth"]
    for device in WITH_KERNELS.values():
        seconds = group_seconds([(D, D)], [Scheme.parse("fp8_e5m2-16bit")], device, S)
        assert seconds == pytest.approx(2 * S * D * D / (1e12 * device.scalar_peak * 0.8)), device.name


# Times


@pytest.mark.often(2)
@pytest.mark.parametrize("device", ONE_EACH.values(), ids=ONE_EACH)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_fusing_never_costs_time_and_the_total_is_the_sum(recipe, device):
    found = cost(plan_of(recipe), FLUX, device)
    for row in (*found.parts, found.total):
        assert 0 < row.seconds["ideal"] <= row.seconds["fused"] <= row.seconds["unfused"] < math.inf, row.name
    for level in LEVELS:
        assert found.total.seconds[level] == pytest.approx(sum(row.seconds[level] for row in found.parts))
    assert found.total.flops == pytest.approx(74.4e12, rel=0.001)  # in every format the same products
    json.dumps(found.describe(), allow_nan=False)


def test_published_speeds_of_flux_follow_from_the_efficiencies():
    """Against 16 bit with one kernel a step; the literature's bound has fusions that the kernels here do not have."""
    h200, rtx5090 = cost(plan_of("fp8"), FLUX, H200).total, cost(plan_of("nvfp4"), FLUX, RTX5090).total
    assert 1.74 <= h200.seconds_16bit / h200.seconds["ideal"] <= 1.78
    assert 2.25 <= rtx5090.seconds_16bit / rtx5090.seconds["ideal"] <= 2.45
    # What is lost to it: q and k pass memory once more, and activations do before they are quantized; at the rate that
    # an H200 reached, a norm takes the time of its bytes, not of its instructions.
    passes = 57 * (4 + 4 * 1.5) * 2 * S * D / H200.bytes_per_second
    assert INSTRUCTIONS["norm", "fp8"]["sm_90"] / H200.instructions_per_second < 3 / H200.bytes_per_second
    assert h200.seconds["fused"] - h200.seconds["ideal"] == pytest.approx(passes, rel=1e-2)
    assert 1.6 < h200.speedup < 1.66


@pytest.mark.parametrize(("n", "low", "high"), [(3072, 0.80, 0.84), (9216, 0.92, 0.95), (12288, 0.94, 0.96)])
def test_what_a_separate_quantization_costs_a_matmul(n, low, high):
    """fp8 on an H200, K = 3072: three bytes an element against 2N FLOPs; .84 and .95 were measured of the ends."""
    linear = LinearShape("transformer_blocks.0.ff.net.0.proj", n, 3072)
    recipe = Component.model_validate({"weights": {"format": "fp8"}, "activations": {"format": "fp8"}})
    plan = make_plan(FAMILIES["flux"], "transformer", recipe, [linear], static_inputs=False)
    (product,), (passed,) = of_kind(plan, "matmul"), of_kind(plan, "quantize")
    seconds = product.seconds(H200, "unfused")
    assert low <= seconds / (seconds + passed.seconds(H200, "unfused")) <= high


@pytest.mark.parametrize("device", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_weight_only_saves_memory_and_no_time(device):
    found = cost(plan_of("int4"), FLUX, device).total
    assert found.resident_bytes < 0.35 * 2 * 11.9e9
    assert 1 <= found.seconds_16bit / found.seconds["unfused"] < 1.02


@pytest.mark.parametrize("device", ONE_EACH.values(), ids=ONE_EACH)
def test_a_block_s_matmuls_are_bound_by_arithmetic_and_modulation_by_memory(device):
    plan = plan_of("nvfp4")
    roles = {layer.name: layer.role for layer in plan.layers}
    for step in of_kind(plan, "matmul", device.chip):
        bound = step.compute_seconds(device) == step.seconds(device, "fused")
        if roles[step.name] == "modulation":
            assert not bound, step.name
        elif roles[step.name] in ("single_in", "mixed_out", "ff_up"):
            assert bound, step.name


@pytest.mark.parametrize(("chip", "name", "arithmetic"), [("sm_80", "16 bit", "bf16"), ("sm_90", "fp8", "fp8")])
def test_attention_in_int8_is_priced_as_its_product_with_v(chip, name, arithmetic):
    found = attention_route("int8", chip)
    assert found.about == f"int8, p and v in {name}, timed as {name}"
    assert (found.arithmetic, found.activations) == (arithmetic, FORMATS["int8"])


@pytest.mark.often(2)
@pytest.mark.parametrize("device", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_attention_in_fp8_where_the_chip_multiplies_it(device):
    plan = plan_of("fp8")
    chosen = dataclasses.replace(plan, attention="fp8")
    before, after = (cost(which, FLUX, device) for which in (plan, chosen))
    was, now = ({part.name: part.seconds["fused"] for part in found.parts} for found in (before, after))
    assert [found.total.flops for found in (before, after)] == [before.total.flops] * 2
    assert before.attention_in_words == "16 bit"
    if "fp8" not in NATIVE[device.chip]:
        assert after.attention_in_words == "16 bit: the chip does not multiply fp8"
        assert (now, after.efficiencies()) == (was, before.efficiencies())
        return
    arithmetic = NATIVE[device.chip]["fp8"]
    assert after.efficiencies()["attention"] == device.attention_fp8
    rates = [peak * found.fraction for peak, found in (
        (device.peaks["bf16"], device.attention), (device.peaks[arithmetic], device.attention_fp8),
    )]  # fmt: skip
    assert was["attention"] / now["attention"] == pytest.approx(rates[1] / rates[0])
    pays = rates[1] > rates[0]  # by published rates it does not on Hopper
    assert pays == (device.chip != "sm_90") == (after.total.seconds["fused"] < before.total.seconds["fused"])
    codes = [step for step in steps(chosen, FLUX, device.chip) if step.kind == "quantize q, k and v"]
    assert len(codes) == 57 and {step.part for step in codes} == {"elementwise"}
    unit = S * D  # bytes of codes: q r2 w1, k and v r4 w1
    assert codes[0].bytes == {"unfused": 13 * unit, "fused": 13 * unit, "ideal": 3 * unit}
    assert now["elementwise"] - was["elementwise"] == pytest.approx(57 * 13 * unit / device.bytes_per_second)
    assert {name for name in was if was[name] != now[name]} == {"attention", "elementwise"}


def test_attention_of_a_few_blocks_is_priced_by_block():
    every, device = plan_of("fp8"), DEVICES["rtx5090"]
    path, other = (f"transformer_blocks.{index}.attn" for index in (3, 4))
    some = dataclasses.replace(every, attention={"fp8": [path]})
    found, coded, plain = (
        seconds_of_groups(plan, FLUX, device) for plan in (some, dataclasses.replace(every, attention="fp8"), every)
    )
    assert found[path] == coded[path] != plain[path] and {**found, path: plain[path]} == plain
    assert found[other] == plain[other]
    assert cost(some, FLUX, device).attention_in_words == "fp8, by the chip's mxfp8 instruction; 16 bit"
    assert {"attention", "attention in fp8"} <= cost(some, FLUX, device).efficiencies().keys()


def test_cross_attention_stays_in_16_bit_and_16_bit_is_all_16_bit():
    forward = forward_pass("wan", dict(model("wan").config))
    chosen = dataclasses.replace(plan_of("fp8", "wan"), attention="fp8")
    found = {step.name: step.arithmetic for step in steps(chosen, forward, "sm_90") if step.kind == "attention"}
    assert {name.split(".")[2]: arithmetic for name, arithmetic in found.items()} == {"attn1": "fp8", "attn2": "bf16"}
    assert in_16_bit(chosen).attention == "16bit"


def test_the_sources_of_a_cost_are_those_of_what_it_multiplies():
    found = cost(plan_of("int8"), FLUX, H200)
    assert list(found.efficiencies()) == ["bf16", "int8", "attention", "memory bandwidth"]
    assert all(efficiency.measured for efficiency in found.efficiencies().values())
    on_h100 = cost(plan_of("int8"), FLUX, DEVICES["h100"])
    assert [name for name, e in on_h100.efficiencies().items() if not e.measured] == ["memory bandwidth"]
    told = on_h100.describe()
    assert told["modelled"] is True and told["efficiencies"]["memory bandwidth"] == {"fraction": 0.85, "measured": None}
    measured = on_h100.efficiencies()["int8"].measured
    assert told["efficiencies"]["int8"] == {"fraction": 0.668, "measured": measured} and "sglang#3035" in measured
    assert told["routes"] == {"int8-int8": "native", "int8-16bit": "weight-only: decoded to 16 bit in the kernel"}


# What transforms and low-rank branches cost

B200 = DEVICES["b200"]
STAGES = ("-center", "-smooth", "-center-smooth", "-h128", "-46", "-r32", "-d32", "-center-smooth-d16-h64-46-r16")


def group(scheme: str, device=B200, shapes=((3072, 3072),), **how) -> float:
    return group_seconds(shapes, [Scheme.parse(scheme)] * len(shapes), device, 4608, **how)


def test_instructions_take_a_pass_s_time_where_its_bytes_take_less():
    """A step of few and of many; where none were counted, as on AMD's chips, bytes alone."""
    sizes = dict.fromkeys(LEVELS, H200.bytes_per_second)  # a second
    step = Step("elementwise", "quantize", "x", "", 0, sizes)
    for begun, expected in ((0, 1), (0.5, 1), (3, 3)):
        counted = dataclasses.replace(step, instructions={"fused": begun * H200.instructions_per_second})
        assert counted.seconds(H200, "fused") == pytest.approx(expected) and counted.seconds(H200, "ideal") == 1
    both = dataclasses.replace(counted, scalar_flops=2 * H200.scalar_flops)  # 4-over-6, on top of rounding once
    assert both.seconds(H200, "fused") == pytest.approx(3 + 2)
    found = {chip: of_kind(plan_of("int8"), "quantize", chip)[0].instructions for chip in ("sm_90", "gfx942")}
    assert not any(found["gfx942"].values()) and found["sm_90"]["fused"] > found["sm_90"]["unfused"] > 0


@pytest.mark.parametrize("made_by", ["norm", "activation", "attention", "concatenation"])
def test_a_fused_pass_executes_the_instructions_of_what_it_joins(made_by):
    """Unfused, the quantization stands alone."""
    k = 3072
    layer = LayerPlan("x", k, k, "", "", False, Scheme.parse("int8-int8"), "", made_by=made_by)
    found = of_kind(Plan("flux", "transformer", (layer,)), "quantize")[0].instructions
    counts = {each: counts["sm_90"] for (each, name), counts in INSTRUCTIONS.items() if name == "int8"}
    assert found["unfused"] == pytest.approx(4096 * k * counts["quantize"])
    assert found["fused"] == pytest.approx(4096 * k * counts.get(made_by, counts["quantize"]))


def test_a_norm_that_also_writes_16_bit_is_counted_with_that():
    schemes = [Scheme.parse("fp8-fp8"), None]
    layers = [
        LayerPlan(f"x{index}", 3072, 3072, "", "g", False, scheme, "", made_by="norm")
        for index, scheme in enumerate(schemes)
    ]
    plan = Plan("flux", "transformer", tuple(layers))
    (norm,), (codes,) = of_kind(plan, "norm"), of_kind(plan, "quantize")
    assert norm.instructions["fused"] == pytest.approx(4096 * 3072 * INSTRUCTIONS["norm", "16bit"]["sm_90"])
    assert codes.instructions["fused"] == pytest.approx(4096 * 3072 * INSTRUCTIONS["quantize", "fp8"]["sm_90"])


def test_a_group_is_one_quantization_and_its_products():
    m, n, k = 4608, 3072, 3072
    shapes = [(n, k)] * 3 + [(4 * n, k)]
    passed = (2 * m * k + FORMATS["nvfp4"].stored_bits(m, k) / 8) / B200.bytes_per_second
    products = 2 * m * 7 * n * k / B200.flops("nvfp4")
    assert group("nvfp4-nvfp4-static", shapes=shapes) == pytest.approx(passed + products)
    assert group("nvfp4-nvfp4-static", shapes=shapes, made_by="attention") == pytest.approx(passed + products)
    with pytest.raises(ValueError, match=r"2 shapes and 1 schemes of widths \[64, 128\]: want one K"):
        group_seconds([(8, 64), (8, 128)], [None], B200, 16)


@pytest.mark.parametrize("made_by", ["outside", "norm", "activation", "attention", "concatenation"])
@pytest.mark.parametrize("device", ONE_EACH.values(), ids=ONE_EACH)
def test_a_stage_is_never_cheaper_than_none_and_all_but_free_where_the_weight_is_re_encoded(device, made_by):
    """There the quantizer still reads mean and factors; the rest went into the weight."""
    shapes = [(3072, 15360)] if made_by == "concatenation" else [(3072, 3072)] * 3
    for level in LEVELS:
        how = {"device": device, "shapes": shapes, "level": level, "made_by": made_by}
        plain = group("nvfp4-nvfp4-static", **how)
        collapsed = route(Scheme.parse("nvfp4-nvfp4-static"), device.chip).is_collapsed
        for stage in STAGES:
            seconds = group(f"nvfp4-nvfp4-static{stage}", **how)
            vectors = ("center" in stage) + ("smooth" in stage)
            read = (1 + len(shapes)) * vectors * 2 * shapes[0][1] / device.bytes_per_second  # with x, and with weights
            assert seconds >= plain and (not collapsed or seconds <= plain + 1.001 * read), (stage, level)
            if collapsed and level != "ideal":  # whose quantization may be no pass of its own
                assert (seconds > plain) == bool(vectors), (stage, level)


def test_stages_cost_what_their_parts_do():
    m, n, k = 4608, 3072, 3072
    x, plain = 2 * m * k, group("nvfp4-nvfp4")
    codes = FORMATS["nvfp4"].stored_bits(m, k) / 8
    quantized = (x + codes) / B200.bytes_per_second
    more = {stage: group(f"nvfp4-nvfp4{stage}") - plain for stage in STAGES}
    assert more["-center"] == pytest.approx(2 * k / B200.bytes_per_second, rel=1e-3)
    assert more["-center-smooth"] == pytest.approx(2 * more["-center"], rel=1e-3)
    assert more["-h128"] == 0  # its product on the matrix units hides behind the bytes of the pass
    assert more["-46"] == pytest.approx(20 * m * k / B200.scalar_flops - quantized)
    branch = max(2 * m * 32 * (n + k) / B200.flops("bf16"), 4 * m * 32 / B200.bytes_per_second)
    matrices = 2 * 32 * (n + k) / B200.bytes_per_second  # counted with the weight, whose bytes hide here
    assert branch <= more["-r32"] <= branch + matrices
    t = 2 * m * 32
    again = (x + t) / B200.bytes_per_second + t / B200.bytes_per_second  # x once more, t written and read
    assert more["-d32"] == pytest.approx(again + 2 * m * 32 * n / B200.flops("bf16"), rel=0.01)


def test_deflation_stays_on_chip_only_in_the_ideal_norm():
    for made_by in ("norm", "activation"):
        plain, deflated = (
            {level: group(f"nvfp4-nvfp4{stage}", level=level, made_by=made_by) for level in LEVELS}
            for stage in ("", "-d32")
        )
        fused, ideal = (deflated[level] / plain[level] - 1 for level in ("fused", "ideal"))
        assert fused > 0.15 and (ideal < 0.1) == (made_by == "norm")


def test_a_weight_only_layer_transforms_x_in_a_pass_of_its_own_unless_a_norm_makes_it():
    plain, smoothed = (group(f"int4-16bit{stage}") for stage in ("", "-smooth"))
    assert smoothed - plain == pytest.approx(2 * 2 * 4608 * 3072 / B200.bytes_per_second, rel=1e-3)
    plain, smoothed = (group(f"int4-16bit{stage}", made_by="norm") for stage in ("", "-smooth"))
    assert smoothed - plain == pytest.approx(2 * 3072 / B200.bytes_per_second, rel=1e-3)


@pytest.mark.parametrize("k", [128, 512, 1536])
def test_a_narrow_layer_is_priced_at_3072(k):
    times = 3072 // k
    small = group(f"nvfp4-nvfp4-smooth-d3-h128-r{96 // times}", shapes=[(2 * k, k)] * 2)
    real = group(f"nvfp4-nvfp4-smooth-d{3 * times}-h128-r96", shapes=[(6144, 3072)] * 2)
    assert small == pytest.approx(real)
    assert group("nvfp4-nvfp4", shapes=[(4096, 4096)]) > group("nvfp4-nvfp4", shapes=[(3072, 3072)])


def test_a_finished_plan_counts_its_stages(monkeypatch):
    """`fluxq plan --gpu` and the gate share their arithmetic but for instructions."""
    monkeypatch.setattr("fluxq.recipes.cost.INSTRUCTIONS", {})
    plan = plan_of("nvfp4")
    name = "single_transformer_blocks.0.attn.to_q"
    named = next(layer for layer in plan.layers if layer.name == name)
    members = [layer for layer in plan.layers if layer.group == named.group]

    def with_scheme(text: str) -> Plan:
        return Plan("flux", "transformer", tuple(dataclasses.replace(la, scheme=Scheme.parse(text)) for la in members))

    shapes, made_by = [(layer.n, layer.k) for layer in members], named.made_by
    assert len(shapes) == 4 and made_by == "norm"
    texts = ("nvfp4-nvfp4-static", "nvfp4-nvfp4-static-center-smooth-d16-h128-46-r16")
    for level in LEVELS:
        plain, whole = (cost(with_scheme(text), FLUX, B200).total.seconds[level] for text in texts)
        gate = [group(text, shapes=shapes, made_by=made_by, level=level) for text in texts]
        assert whole - plain == pytest.approx(gate[1] - gate[0])
    found = cost(with_scheme(texts[1]), FLUX, B200)
    assert "fp32" in found.efficiencies() and "fp32" not in cost(plan, FLUX, B200).efficiencies()


def test_linears_that_read_x_in_two_forms_pay_for_both():
    shapes = [(3072, 3072)] * 2
    same = group("nvfp4-nvfp4-smooth", shapes=shapes)
    mixed = group_seconds(shapes, [Scheme.parse("nvfp4-nvfp4-smooth"), Scheme.parse("nvfp4-nvfp4")], B200, 4608)
    assert mixed - same == pytest.approx(FORMATS["nvfp4"].stored_bits(4608, 3072) / 8 / B200.bytes_per_second, rel=1e-3)


def test_decoding_to_8_bits_in_the_kernel_keeps_transforms_but_not_4_over_6():
    layer = next(layer for layer in plan_of("nvfp4").layers if layer.role == "attn_out")
    scheme = Scheme.parse("nvfp4-nvfp4-static-smooth-h128-46-r32")
    plan = Plan("flux", "transformer", (dataclasses.replace(layer, scheme=scheme),))
    for prefer, branches in (("speed", 0), ("memory", 1)):
        found = list(steps(plan, FLUX, "sm_90", prefer))
        assert len([step for step in found if step.kind == "low rank"]) == branches
        (quantized,) = (step for step in found if step.kind == "quantize")
        assert (quantized.flops > 0) == bool(branches) and quantized.scalar_flops == 0
