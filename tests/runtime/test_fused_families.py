"""Fused blocks of every family that has a form: byte for byte what the blocks' own forward computes.

What holds for all models alike (adapters, copies, offloading, files) is in test_fused.py, on FLUX.1. Every comparison
says how many blocks were fused, so that an equality that comes from falling back does not count.
"""

import copy
import pickle
from collections import Counter

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.models import attention_processor
from diffusers.models.transformers import transformer_flux2
from fused_models import (
    BLOCKS,
    FULL,
    FUSABLE,
    LARGE,
    Calls,
    adapt,
    family,
    fused_calls,
    layers,
    ops,
    output,
    put,
    quantized,
)
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fluxq
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.recipes.all_families import FAMILIES
from fluxq.runtime import fused, fused_forms

OTHERS = [name for name in FUSABLE if name != "flux"]
SCHEMES = ("16 bit", "int8-int8", "fp8-fp8", "nvfp4-nvfp4-static", FULL)
MORE_SCHEMES = ("mxfp8-mxfp8", "nvfp4-nvfp4", "int8-int8-center-smooth-h64-r4", "int4-int4-smooth-r4", "int4-16bit")
CALLS = (
    {},
    {"prompt": 2},  # guidance in two calls
    {"images": 2, "prompt": 3},  # guidance in one
    {"images": 3, "size": LARGE},
)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("scheme", [*SCHEMES, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE_SCHEMES)])
def test_fused_is_unfused_byte_for_byte(scheme: str, name: str) -> None:
    assert_same(quantized(scheme, family=name), BLOCKS[name])


@pytest.mark.often(1)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("scheme", ["16 bit", *(pytest.param(s, marks=pytest.mark.slow) for s in SCHEMES[1:])])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_in_other_dtypes(dtype: torch.dtype, scheme: str, name: str) -> None:
    assert_same(quantized(scheme, dtype, name), BLOCKS[name])


def assert_same(model: nn.Module, blocks: int, calls: tuple = CALLS) -> None:
    want = [output(model, **call) for call in calls]
    assert all(bool(made.isfinite().all()) for made in want)
    fluxq.optimize(model)
    for call, before in zip(calls, want, strict=True):
        with Calls() as counted:
            assert torch.equal(output(model, **call), before), call
        assert counted.fused == blocks and not counted.reasons
    assert fluxq.restore(model) == blocks


# --- what is shared

OPS = {  # of int8 layers; each QuantLinear that is called by itself is a quantized_linear
    # attention outputs of the double block: nothing to share
    "flux2": {
        "adaln_quantize": 4 + 2,
        "quantize_activation": 2 + 2,
        "scaled_matmul": 6 + 2 + 2 + 4,
        "quantized_linear": 2,
    },
    # the first block has a second attention, the second one ends the text
    "sd3": {
        "adaln_quantize": 5 + 3,
        "quantize_activation": 2 + 1,
        "scaled_matmul": 9 + 4 + 6 + 2,
        "quantized_linear": 3 + 1,
    },
    "qwen_image": {
        "adaln_quantize": 2 * 4,
        "quantize_activation": 2 * 2,
        "scaled_matmul": 2 * 10,
        "quantized_linear": 2 * 2,
    },
    # q of the cross-attention and both outputs; the text's and the image's k and v share codes
    "wan": {"adaln_quantize": 2 * 2, "quantize_activation": 2, "scaled_matmul": 2 * 9, "quantized_linear": 2 * 3},
}
OPS["sd3"]["quantized_linear"] += 4  # the modulation of both streams
OPS["qwen_image"]["quantized_linear"] += 4
OPS["wan"]["quantize_activation"] += 2 * 2
ROTATED = {"flux2": 1 + 2, "sd3": 2 + 1, "qwen_image": 2}  # qk_norm_rope, once for each attention


@pytest.mark.parametrize("name", OTHERS)
def test_every_input_is_quantized_once(name: str) -> None:
    model = quantized("int8-int8", family=name)
    before = ops(model)
    assert before == {"quantized_linear": len(layers(model))}
    fluxq.optimize(model)
    wanted = Counter(OPS[name]) + Counter(qk_norm_rope=ROTATED.get(name, 0))
    assert ops(model) == wanted
    assert wanted["scaled_matmul"] + wanted["quantized_linear"] == len(layers(model))


@pytest.mark.parametrize("path", ["attn2.to_k", "attn2.add_v_proj"])
@pytest.mark.parametrize("scheme", ["16 bit", "fp8-fp8"])
def test_what_reads_the_text_alone_does_not_share(scheme: str, path: str) -> None:
    model = quantized("int8-int8", family="wan")
    put(model, f"blocks.0.{path}", scheme)
    rows = {(row.block, row.part): row for row in fluxq.optimize(model)}
    row = rows["blocks.0", "cross_kv" if "to_k" in path else "image_kv"]
    assert len(row.layers) == 1 and row.why_not
    fluxq.restore(model)
    assert_same(model, BLOCKS["wan"], CALLS[:3])


def test_the_rows_say_what_was_done() -> None:
    done = {
        name: {(row.part, row.fused, row.why_not) for row in fluxq.optimize(quantized("int8-int8", family=name))}
        for name in OTHERS
    }
    assert ("text_ff_down", "silu · up + int8 codes", "") in done["flux2"]
    assert ("attention", "q/k norm", "") in done["sd3"]
    assert ("cross_kv", "int8 codes", "") in done["wan"]
    assert ("cross_q", "", "attn2.to_q: the norm before it has a bias") in done["wan"]
    assert ("attention", "", "q and k are normalised over all heads, then rotated") in done["wan"]


# --- configurations, masks and residuals


@pytest.mark.parametrize("scheme", ["16 bit", "int8-int8"])
def test_sd3_without_norms_of_heads_and_with_other_attentions(scheme: str) -> None:
    assert_same(quantized(scheme, family="sd3", qk_norm=None, dual_attention_layers=[]), 2, CALLS[2:])
    assert_same(quantized(scheme, family="sd3", num_layers=3, dual_attention_layers=[1, 2]), 3, CALLS[2:])


@pytest.mark.parametrize("scheme", ["16 bit", "int8-int8"])
def test_wan_without_an_image_and_with_everything_in_16_bit(scheme: str) -> None:
    text_only = quantized(scheme, family="wan", added_kv_proj_dim=None, image_dim=None)
    fluxq.optimize(text_only)
    got = output(text_only, images=2, encoder_hidden_states_image=None)
    assert fluxq.restore(text_only) == 2
    assert torch.equal(got, output(text_only, images=2, encoder_hidden_states_image=None))
    cast = quantized(scheme, family="wan")
    for module in cast.modules():
        if type(module).__name__ in ("FP32LayerNorm", "WanRotaryPosEmbed"):
            module.bfloat16()
    assert_same(cast, 2, CALLS[2:])


def test_a_mask_of_text_is_obeyed() -> None:
    model = quantized("int8-int8", family="qwen_image")
    fluxq.optimize(model)
    some = torch.tensor([[True, True, False, True, False]])
    got = {str(mask): output(model, encoder_hidden_states_mask=mask) for mask in (None, some)}
    assert not torch.equal(got["None"], got[str(some)]) and fused_calls(model) == 2
    fluxq.restore(model)
    for mask in (None, some):
        assert torch.equal(got[str(mask)], output(model, encoder_hidden_states_mask=mask))


@pytest.mark.parametrize("name", ["flux2", "qwen_image", "wan"])
def test_attention_in_fp8_is_taken(name: str) -> None:
    model, given = quantized("int8-int8", family=name), {}
    if name == "qwen_image":
        given = {"encoder_hidden_states_mask": None}  # fp8 attention takes none
    in_16_bit = output(model, **given)
    fluxq.set_attention(model, "fp8")
    want = output(model, **given)
    assert not torch.equal(want, in_16_bit)
    fluxq.optimize(model)
    assert fused_calls(model, **given) == BLOCKS[name]
    assert torch.equal(output(model, **given), want)


RESIDUALS = {
    "sd3": lambda: {"block_controlnet_hidden_states": [torch.ones(1, 7, 128).bfloat16()]},
    "qwen_image": lambda: {"controlnet_block_samples": [torch.ones(1, 7, 128).bfloat16()] * 2},
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals_of_a_controlnet_are_added_between_blocks(name: str) -> None:
    model, residuals = quantized("int8-int8", family=name), RESIDUALS[name]()
    want = output(model, **residuals)
    assert not torch.equal(want, output(model))
    fluxq.optimize(model)
    assert fused_calls(model, **residuals) == BLOCKS[name]
    assert torch.equal(output(model, **residuals), want)


@pytest.mark.parametrize("name", ["flux", "flux2", "qwen_image"])
def test_what_overflows_in_fp16_is_clipped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("16 bit", torch.float16, name)
    for path, linear in model.named_modules():
        group = FAMILIES[name].locate(path)
        if group and group[0].role in ("ff_down", "text_ff_down", "mixed_out"):
            linear.weight.data *= 2e5
    made = []
    for block in (module for module in model.modules() if type(module).__name__.endswith("TransformerBlock")):
        block.register_forward_hook(lambda *given: made.append(given[-1]))

    def blocks() -> Tensor:
        """Return the outputs of all blocks in a call, of which much is not finite."""
        made.clear()
        output(model)
        parts = [part for one in made for part in (one if isinstance(one, tuple) else (one,))]
        return torch.cat([part.flatten() for part in parts]).nan_to_num(nan=0.5, posinf=1.5, neginf=-1.5)

    want = blocks()
    assert bool((want.abs() == 65504).any())
    fluxq.optimize(model)
    assert torch.equal(blocks(), want)
    monkeypatch.setattr(fused_forms, "_clipped", lambda x, stream: x)
    assert not torch.equal(blocks(), want)


# --- planted faults: the comparisons above see them


def swapped(chunks: tuple, i: int, j: int) -> tuple:
    """Chunks of modulation with two of them exchanged, where there are so many."""
    return tuple(chunks[{i: j, j: i}.get(n, n)] if max(i, j) < len(chunks) else c for n, c in enumerate(chunks))


def chunks_swapped(i: int, j: int):
    own = fused_forms._modulation
    return "_modulation", lambda *given: swapped(own(*given), i, j)


def wrong(name: str, change):
    """A function of the forms, with what it returns changed."""
    own = getattr(fused_forms, name)
    return name, lambda *given: change(own(*given))


def streams_swapped():
    own = fused_forms._normed
    return "_normed", lambda block, streams, heads, rope: own(block, streams[::-1], heads[::-1], rope)


def weights_swapped():
    own = fused_forms._normed
    return "_normed", lambda block, streams, heads, rope: own(block, streams[::-1], heads, rope)


FAULTS = {
    "shift and scale": lambda: chunks_swapped(0, 1),
    "gate and shift": lambda: chunks_swapped(0, 2),
    "k and v": lambda: wrong("_heads", lambda heads: (heads[0], heads[2], heads[1])),
    "q and k not normed": lambda: (
        "_normed",
        lambda block, streams, heads, rope: tuple(torch.cat(parts, 1) for parts in zip(*heads, strict=True)),
    ),
    "rotation": lambda: ("_rotated", lambda x, cos, sin: x),
    "text's k and v": lambda: wrong("_shared", lambda made: made[::-1]),
    "order of streams": streams_swapped,
    "weights of the other stream": weights_swapped,
    "second modulation": lambda: chunks_swapped(0, 6),
    "later gate": lambda: chunks_swapped(2, 5),
}
HEADS = ("q and k not normed", "order of streams", "weights of the other stream")
SEEN = {
    "flux2": ("shift and scale", "gate and shift", "k and v", *HEADS, "later gate"),
    "sd3": ("shift and scale", "k and v", *HEADS, "second modulation", "later gate"),
    "qwen_image": ("gate and shift", "k and v", *HEADS),
    "wan": ("shift and scale", "gate and shift", "rotation", "text's k and v", "later gate"),
}


@pytest.mark.often(2)
@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in SEEN.items() for fault in faults])
def test_a_fault_is_seen(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("16 bit", family=name)
    want = output(model)
    fluxq.optimize(model)
    monkeypatch.setattr(fused_forms, *FAULTS[fault]())
    assert not torch.equal(output(model), want)


# --- what a fused form does not know


@pytest.mark.often(1)
@pytest.mark.parametrize("name", OTHERS)
def test_gradients_autocast_and_other_processors_are_the_blocks_own(name: str) -> None:
    model = quantized("int8-int8", family=name)
    want = output(model)
    fluxq.optimize(model)
    assert reasons(model, grad=True) == {"gradients: the fused ops have none"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reasons(model) == {"autocast"}
    blocks = [module for module in model.modules() if hasattr(module, fused.FUSION_ATTRIBUTE)]
    row = next(row for row in family(model).fusable if type(blocks[0]).__name__ == row.model)
    for path in row.attentions:
        attention = blocks[0].get_submodule(path)
        processor = attention.processor
        attention.processor = type("Mine", (type(processor),), {})()
        with Calls() as calls:
            assert torch.equal(output(model), want)
        assert calls.fused == BLOCKS[name] - 1 and "Mine, expected diffusers'" in calls.reasons.pop()
        attention.processor = processor
    assert fused_calls(model) == BLOCKS[name]


@pytest.mark.parametrize("path", ["attn.norm_k", "attn.norm_added_q", "attn2.norm_k"])
def test_norms_that_one_launch_cannot_take_are_the_blocks_own(path: str) -> None:
    model = quantized("int8-int8", family="sd3")
    model.get_submodule(f"transformer_blocks.0.{path}").eps = 1e-2
    want = output(model)
    fluxq.optimize(model)
    with Calls() as calls:
        assert torch.equal(output(model), want)
    assert calls.fused == 1 and "have several eps" in calls.reasons.pop()


@pytest.mark.often(1)
@pytest.mark.parametrize("name", OTHERS)
def test_hooks_on_what_is_passed_over_are_heard(name: str) -> None:
    model = quantized("16 bit", family=name)
    want = output(model)
    fluxq.optimize(model)
    block = next(module for module in model.modules() if hasattr(module, fused.FUSION_ATTRIBUTE))
    row = next(row for row in family(model).fusable if type(block).__name__ == row.model)
    paths = [path for path in row.passed_over if fused_forms.at(block, path) is not None]
    paths += [path for path, module in block.named_modules() if isinstance(module, nn.Linear)]
    heard = Counter()
    for path in paths:
        handle = block.get_submodule(path).register_forward_hook(lambda *_, path=path: heard.update([path]))
        assert torch.equal(output(model), want), path
        handle.remove()
    assert set(heard) == set(paths)


@pytest.mark.often(1)
@pytest.mark.parametrize("name", OTHERS)
def test_adapters_copies_and_pickles(name: str) -> None:
    model = quantized("int8-int8", family=name)
    fluxq.optimize(model)
    adapt(model, ["to_k", "attn.to_qkv_mlp_proj", "ff.net.2", "ffn.net.2", "ff.linear_out", "img_mlp.net.0.proj"])
    got = [output(model, **call) for call in CALLS[2:]]
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert all(fused_calls(other) == BLOCKS[name] for other in (model, *others))
    assert all(torch.equal(output(other, **CALLS[2]), got[0]) for other in others)
    fluxq.restore(model)
    assert all(torch.equal(output(model, **call), before) for call, before in zip(CALLS[2:], got, strict=True))


@pytest.mark.parametrize("name", ["flux2", "sd3", "wan"])
def test_fused_projections_keep_the_blocks_own_forward(name: str) -> None:
    model = quantized("16 bit", family=name)
    fluxq.optimize(model)
    if name == "sd3":  # refuses a model with another kind of attention processor than its first one had
        for module in model.modules():
            if isinstance(module, attention_processor.Attention):
                module.fuse_projections(fuse=True)
    else:
        model.fuse_qkv_projections()
    with Calls() as calls:
        got = output(model)
    assert any("fuse_qkv_projections" in why for why in calls.reasons)
    assert calls.fused == (2 if name == "flux2" else 0)  # single blocks of FLUX.2 have one projection anyway
    fluxq.restore(model)
    assert torch.equal(got, output(model))


def test_a_step_cache_knows_the_blocks() -> None:
    model = quantized("int8-int8", family="wan")
    fluxq.optimize(model)
    want = output(model)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with model.cache_context("a"), Calls() as calls:
        assert torch.equal(output(model), want)
    assert calls.fused == BLOCKS["wan"]


def test_keys_and_values_that_flux2_caches_are_the_blocks_own() -> None:
    model = quantized("int8-int8", family="flux2")
    fluxq.optimize(model)
    told = {"kv_cache_mode": "extract", "num_ref_tokens": 2, "return_dict": False}
    assert any("kv_cache" in why for why in reasons(model, joint_attention_kwargs={}, **told))
    for block in model.transformer_blocks:
        block.attn.set_processor(transformer_flux2.Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(transformer_flux2.Flux2KVParallelSelfAttnProcessor())
    with Calls() as calls:
        got = output(model, joint_attention_kwargs={}, **told), output(model)
    assert calls.fused == 0 and any("a Flux2KVAttnProcessor, expected" in why for why in calls.reasons)
    fluxq.restore(model)
    assert torch.equal(got[0], output(model, joint_attention_kwargs={}, **told))
    assert torch.equal(got[1], output(model))


def test_modulation_of_tokens_is_the_blocks_own() -> None:
    edit = quantized("int8-int8", family="qwen_image", zero_cond_t=True)
    fluxq.optimize(edit)
    assert reasons(edit, img_shapes=[[(1, 1, 3), (1, 1, 4)]]) == {"modulation that differs from token to token"}
    video = quantized("int8-int8", family="wan")
    fluxq.optimize(video)
    assert reasons(video, timestep=torch.linspace(0, 900, 7)[None]) == {"modulation that differs from token to token"}


@torch.no_grad()
def test_a_call_of_wans_block_without_rotary_embedding_is_its_own() -> None:
    model = quantized("int8-int8", family="wan")
    fluxq.optimize(model)
    block, width = model.blocks[0], model.blocks[0].scale_shift_table.shape[-1]
    x, text, temb = (torch.randn(1, count, width) for count in (5, 518, 6))  # text and an image
    given = x.bfloat16(), text.bfloat16(), temb.bfloat16(), None
    with Calls() as calls:
        got = block(*given)
    assert calls.reasons == {"no rotary embedding"}
    fluxq.restore(model)
    assert torch.equal(got, block(*given))


def test_a_feed_forward_in_chunks_and_an_ip_adapter_of_sd3_are_the_blocks_own() -> None:
    model = quantized("int8-int8", family="sd3")
    fluxq.optimize(model)
    model.enable_forward_chunking(1, dim=1)
    assert reasons(model) == {"a feed-forward in chunks (enable_forward_chunking)"}
    model.disable_forward_chunking()
    adapter = attention_processor.SD3IPAdapterJointAttnProcessor2_0(128, 32, 64, timesteps_emb_dim=64)
    model.transformer_blocks[0].attn.set_processor(adapter.bfloat16().requires_grad_(False))
    given = {"ip_hidden_states": torch.ones(1, 4, 32).bfloat16(), "temb": torch.ones(1, 64).bfloat16()}
    with Calls() as calls:
        got = output(model)
    assert calls.fused == 1 and "a SD3IPAdapterJointAttnProcessor2_0, expected" in calls.reasons.pop()
    assert reasons(model, joint_attention_kwargs=given) == {"joint_attention_kwargs ip_hidden_states, temb"}
    fluxq.restore(model)
    assert torch.equal(got, output(model))


def reasons(model: nn.Module, **call) -> set[str]:
    """Return why no block of a call was fused; check the result of that call."""
    with Calls() as calls:
        got = output(model, **call)
    assert calls.fused == 0
    fluxq.restore(model)
    assert torch.equal(got, output(model, **call))
    fluxq.optimize(model)
    return calls.reasons


def test_a_forward_with_other_arguments_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("16 bit", family="wan")
    stock = type(model.blocks[0])
    own = stock.forward
    monkeypatch.setattr(stock, "forward", lambda self, hidden_states, later=None: own(self, hidden_states))
    with pytest.raises(ValueError, match="takes hidden_states, later; the fused form knows hidden_states, encoder"):
        fluxq.optimize(model)


def test_the_families_with_a_form_are_named() -> None:
    with pytest.raises(ValueError, match=", ".join(sorted(row.model for row in FUSABLE.values()))):
        fluxq.optimize(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"CLIPTextModel has no fused form.*Flux2Transformer2DModel"):
        fused.optimize(nn.Linear(2, 2), next(row for row in FAMILIES.values() if row.model == "CLIPTextModel"), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSABLE)
def test_it_compiles_without_a_graph_break(name: str) -> None:
    model = quantized("int8-int8", family=name)
    fluxq.optimize(model)
    want = output(model)
    torch._dynamo.reset()
    with Calls() as calls:
        assert torch.equal(output(torch.compile(model, fullgraph=True, backend="eager")), want)
    assert calls.fused == BLOCKS[name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), [*((name, "16 bit") for name in OTHERS), ("flux2", "int8-int8")])
def test_the_kernels_take_what_the_forms_give_them(name: str, scheme: str) -> None:
    """On Triton's interpreter, in fp32: their sums have another order, and nothing else differs."""
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from fluxq.kernels import launch
    from fluxq.kernels.interpreter import interpreting

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kernel = func._schema.name.removeprefix("fluxq::")
            if func.namespace != "fluxq" or kernel == "quantized_linear":
                return func(*args, **(kwargs or {}))
            return launch.launcher(kernel)(*args, chip="sm_89")

    model = quantized(scheme, torch.float32, name)
    fluxq.optimize(model)
    want = output(model, images=2)
    with interpreting(), Kernels():
        got = output(model, images=2)
    assert float((got - want).norm() / want.norm()) < 2.0**-20
    assert not torch.equal(got, want)  # the references were not asked again


@pytest.mark.parametrize("name", FUSABLE)
def test_a_row_names_what_the_class_has(name: str) -> None:
    """Every module that is passed over, every group and every path, against blocks of diffusers' class."""
    row_of = FUSABLE[name]
    model = build_on_meta(row_of.library, row_of.model, dict(TINY_CONFIGS[row_of.name]))
    for row in row_of.fusable:
        blocks = list(model.get_submodule(row.block.removesuffix(".*")))
        assert {type(block).__name__ for block in blocks} == {row.model}
        for path, kinds in row.passed_over.items():
            found = {type(fused_forms.at(block, path)).__name__.removesuffix("Type") for block in blocks}
            assert found <= set(kinds.split("|")) and found != {"None"}, path
        groups = {group.members[0]: group for group in row_of.groups if group.block == row.block}
        paths = [row.attention, *row.attentions]
        for stream in row.streams:
            assert stream.qkv in groups and stream.down in groups and (not stream.up or stream.up in groups)
            assert len(groups[stream.down].members) == 1 and (not stream.up or len(groups[stream.up].members) == 1)
            paths += [stream.norm, stream.q_norm, stream.k_norm, *stream.modulation]
            paths += filter(None, (stream.out, stream.second_norm))
            assert not groups[stream.qkv].modulation or groups[stream.qkv].modulation.linear.startswith(
                stream.modulation[-1]
            )
            if stream.own_attention:
                assert stream.own_attention.qkv in groups
                paths += [
                    stream.own_attention.path,
                    stream.own_attention.q_norm,
                    stream.own_attention.k_norm,
                    stream.own_attention.out,
                ]
            if stream.cross:
                assert {stream.cross.q, stream.cross.kv, stream.cross.image_kv} <= set(groups)
                paths += [stream.cross.path, stream.cross.norm, stream.cross.out]
                paths += [stream.cross.q_norm, stream.cross.k_norm, stream.cross.image_k_norm]
        for path in paths:
            assert any(fused_forms.at(block, path) is not None for block in blocks), path
