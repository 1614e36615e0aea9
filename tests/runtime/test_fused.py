"""Fused blocks of Flux: the same bits as the blocks' own forward, whatever is loaded, hooked or quantized.

Every comparison is byte for byte. `fused_calls` says how many blocks of a call were fused, so that an equality that
comes from falling back does not count.
"""

import copy
import functools
import pickle
from collections import Counter

import accelerate
import diffusers
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, apply_group_offloading
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.transformers import transformer_flux as stock
from fused_models import FULL, TEXT_TOKENS, Calls, adapt, family, fused_calls, layers, ops, output, put, quantized
from torch import Tensor, nn

import fluxq
from fluxq import tiny
from fluxq.kernels import findings
from fluxq.kernels.qk_norm_rope import op as rope
from fluxq.kernels.tensor import pack_named, unpack_named
from fluxq.runtime import fused, fused_forms, layout
from fluxq.runtime.fused import fused_class

BLOCKS = 3
SCHEMES = (
    "16 bit",
    "int8-int8",
    "fp8-fp8",
    "fp8_tensor-fp8_tensor",
    "fp8_tensor-fp8_tensor-static",
    "mxfp8-mxfp8",
    "mxfp4-mxfp4",
    "nvfp4-nvfp4",
    "nvfp4-nvfp4-static",
    "nvfp4-nvfp4-static-smooth-h64",
    FULL,
    "nvfp4-nvfp4-static-smooth-d4-r4",
    "int8-int8-center-smooth-h64-r4",
    "mxfp8-mxfp8-smooth-h128",
    "int4-int4-smooth-r4",
    "int4-16bit",
)
SOME = ("int8-int8", "nvfp4-nvfp4-static")


@pytest.mark.often(6)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_is_unfused_byte_for_byte(scheme: str) -> None:
    model = quantized(scheme)
    want = output(model)
    fluxq.optimize(model)
    assert fused_calls(model) == BLOCKS
    assert torch.equal(output(model), want)


@pytest.mark.often(1)
@pytest.mark.parametrize("scheme", ["16 bit", FULL, *(pytest.param(s, marks=pytest.mark.slow) for s in SOME)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_in_every_dtype_batch_and_size(scheme: str, dtype: torch.dtype) -> None:
    model = quantized(scheme, dtype)
    calls = [{"images": images, "size": size} for images in (1, 3) for size in ((1, 1), (3, 11))]
    want = [output(model, **call) for call in calls]
    fluxq.optimize(model)
    for call, before in zip(calls, want, strict=True):
        assert fused_calls(model, **call) == BLOCKS
        assert torch.equal(output(model, **call), before), call


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", ["16 bit", "int8", "fp8", "nvfp4"])
def test_the_embedded_pipeline_draws_the_same_images(recipe: str, plain_checkpoint) -> None:
    assert_same_images(tiny.load(folder=plain_checkpoint(recipe)))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4-max", "int4-svd"])
def test_so_does_one_that_was_fitted(recipe: str, checkpoint) -> None:
    assert_same_images(tiny.load(folder=checkpoint(recipe)))


def assert_same_images(pipe: diffusers.FluxPipeline) -> None:
    for prompts, size in ((1, 16), (3, 16), (1, 32)):
        call = {"prompt": list(tiny.PROMPTS[:prompts]), "height": size, "width": size, "output_type": "latent"}
        call = tiny.CALL_KWARGS | call | {"num_inference_steps": 2}
        fluxq.restore(pipe)
        want = pipe(**call, generator=torch.Generator().manual_seed(0)).images
        fluxq.optimize(pipe)
        with Calls() as calls:
            got = pipe(**call, generator=torch.Generator().manual_seed(0)).images
        assert calls.fused == 2 * 5
        assert torch.equal(got, want)


# --- what is shared


def test_every_input_is_quantized_once() -> None:
    model = quantized("int8-int8")
    before = ops(model)
    fluxq.optimize(model)
    after = ops(model)
    own = 2  # a double block's attention outputs: nothing to share
    modulations = 2 + 2  # the adaLN Linears
    assert before["quantized_linear"] == 12 + 2 * 5 + modulations
    assert after["quantized_linear"] == own + modulations
    assert after["adaln_quantize"] == 2 + 2 + 2  # before attention and feed-forward of both streams; single blocks
    assert after["quantize_activation"] == 2 + 2  # of the feed-forwards; of single blocks, with attention beside it
    assert after["scaled_matmul"] == 6 + 2 + 2 + 2 * 5
    assert after["qk_norm_rope"] == 1 + 2  # once for each attention


def test_with_a_low_rank_branch_the_codes_are_still_shared() -> None:
    model = quantized("nvfp4-nvfp4-static-smooth-r4")
    fluxq.optimize(model)
    after = ops(model)
    assert after["adaln_quantize"] == 6 and after["quantize_activation"] == 6 + 2 + 2
    assert after["block_scaled_matmul"] == 6 + 2 + 2 + 2 * 5


def test_the_rows_say_what_was_done() -> None:
    model = quantized("int8-int8")
    put(model, "transformer_blocks.0.attn.to_k", "fp8-fp8")
    put(model, "single_transformer_blocks.0.proj_mlp", "16 bit")
    want = output(model)
    rows = {(row.block, row.part): row for row in fluxq.optimize(model)}
    assert torch.equal(output(model), want)
    qkv = rows["transformer_blocks.0", "qkv"]
    assert qkv.layers == ("attn.to_q", "attn.to_v")
    assert qkv.why_not == "attn.to_k: its input is rounded in another way"
    assert rows["transformer_blocks.0", "text_qkv"].fused == "norm + modulation + int8 codes"
    assert rows["transformer_blocks.0", "ff_down"].layers == ("ff.net.2",)
    single = rows["single_transformer_blocks.0", "single_in"]
    assert single.layers == ("attn.to_q", "attn.to_k", "attn.to_v") and single.why_not == "proj_mlp: 16 bit"
    assert rows["single_transformer_blocks.1", "mixed_out"].fused == "attention beside gelu + int8 codes"


def test_other_vectors_or_scales_are_not_shared() -> None:
    for name in ("input_scale", "pre_quant_scale"):
        model = quantized("nvfp4-nvfp4-static-smooth")
        layer = model.get_submodule("transformer_blocks.0.attn.to_v")
        layer.get_parameter(name).data *= 2
        want = output(model)
        rows = fluxq.optimize(model)
        assert next(row for row in rows if row.part == "qkv").layers == ("attn.to_q", "attn.to_k")
        assert torch.equal(output(model), want)


@pytest.mark.often(1)
@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_weights_of_four_bits_under_codes_of_eight(activations: str) -> None:
    model = quantized("nvfp4-nvfp4-static-smooth")
    for layer in layers(model):
        layout.add_row_scale(layer, (activations,))
    want = output(model)
    fluxq.optimize(model)
    assert ops(model)["w4a8_matmul"] == 6 + 2 + 2 + 2 * 5
    assert torch.equal(output(model), want)


def test_a_branch_that_has_grown_since_is_left_to_the_layer() -> None:
    """Quantizers of GPUs multiply by few ranks, as `optimize` looked; an adapter may be fused and unloaded after it."""
    model = quantized("int8-int8-r4")
    fluxq.optimize(model)
    before, layer = ops(model)["quantized_linear"], model.transformer_blocks[0].ff.net[2]
    layer.append_low_rank(torch.randn(200, layer.in_features), torch.randn(layer.out_features, 200))
    got = output(model)
    assert ops(model)["quantized_linear"] == before + 1
    fluxq.optimize(model)
    assert ops(model)["quantized_linear"] == before and torch.equal(output(model), got)


def test_a_model_prepared_for_the_cpu() -> None:
    model = quantized("nvfp4-nvfp4-static-smooth-h16")
    fluxq.prepare(model, device="cpu")
    want = output(model)
    fluxq.optimize(model)
    assert ops(model)["scaled_matmul"] == 6 + 2 + 2 + 2 * 5
    assert torch.equal(output(model), want)


def test_preparing_after_optimizing_keeps_the_bits() -> None:
    model = quantized("nvfp4-nvfp4-static-smooth-h16")
    fluxq.optimize(model)
    fluxq.prepare(model, device="cpu")
    got = output(model)
    fluxq.restore(model)
    assert torch.equal(got, output(model))


# --- planted faults: the comparison above sees them


def wrong_gate(block, stream, given):
    chunks = list(MODULATION(block, stream, given))
    chunks[2] = chunks[0]
    return tuple(chunks)


def no_shift(block, stream, given):
    shift, *rest = MODULATION(block, stream, given)
    return (torch.zeros_like(shift), *rest)


def swapped_k_and_v(attention, qkv, images):
    q, k, v = HEADS(attention, qkv, images)
    return q, v, k


def no_rope(q, k, tensors, names, *rest):
    given = unpack_named(rope.RopeTensors, tensors, names)[0]
    given = given._replace(cos=torch.ones_like(given.cos), sin=torch.zeros_like(given.sin))
    return ROPE(q, k, *pack_named(given), *rest)


MODULATION, HEADS, ROPE = fused_forms._modulation, fused_forms._heads, rope.qk_norm_rope


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (fused_forms, "_modulation", wrong_gate),
        (fused_forms, "_modulation", no_shift),
        (fused_forms, "_heads", swapped_k_and_v),
        (fused_forms, "qk_norm_rope", no_rope),
    ],
)
@pytest.mark.parametrize("scheme", ["16 bit", "int8-int8"])
def test_a_fault_is_seen(scheme: str, place, name: str, fault, monkeypatch) -> None:
    model = quantized(scheme)
    want = output(model)
    fluxq.optimize(model)
    monkeypatch.setattr(place, name, fault)
    assert not torch.equal(output(model), want)


# --- adapters


@pytest.mark.often(1)
@pytest.mark.parametrize("scheme", ["16 bit", "int8-int8", FULL])
def test_adapters_come_and_go(scheme: str) -> None:
    """Loaded before or after, scaled, fused, unfused, deleted: always what the block's own forward computes."""
    model = quantized(scheme)
    fluxq.optimize(model)
    adapt(model, ["attn.to_q", "proj_mlp", "ff.net.2", "norm1.linear"])
    assert fused_calls(model) == BLOCKS
    states = [lambda: None, lambda: model.set_adapters("a", 0.5), model.fuse_lora, model.unfuse_lora]
    for change in (*states, lambda: fluxq.optimize(model), lambda: model.delete_adapters("a")):
        change()
        got = output(model)
        fluxq.restore(model)
        assert torch.equal(got, output(model))
        fluxq.optimize(model)
    assert fused_calls(model) == BLOCKS


def test_kernels_that_a_device_lacks_are_known_of_layers_with_an_adapter() -> None:
    model = quantized("int8-int8")
    adapt(model, ["ff.net.2"])
    fused.optimize(model, family(model), "cpu", lambda layer, made_by: "no kernel there")
    model.unload_lora()
    assert fused_calls(model) == BLOCKS and not ops(model)["scaled_matmul"]


def test_layers_without_an_adapter_still_share_codes() -> None:
    model = quantized("int8-int8")
    adapt(model, ["attn.to_q"])
    rows = {(row.block, row.part): row for row in fluxq.optimize(model)}
    qkv = rows["transformer_blocks.0", "qkv"]
    assert qkv.layers == ("attn.to_k", "attn.to_v") and "computes with the input itself" in qkv.why_not
    assert fluxq.restore(model) == BLOCKS
    want = output(model)
    fluxq.optimize(model)
    assert torch.equal(output(model), want)


# --- restoring, copying, saving, compiling


def test_restore_brings_classes_and_attributes_back() -> None:
    model = quantized("int8-int8")
    before = {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()}
    fluxq.optimize(model)
    assert type(model.transformer_blocks[0]) is not stock.FluxTransformerBlock
    assert isinstance(model.transformer_blocks[0], stock.FluxTransformerBlock)
    fluxq.optimize(model)
    assert fluxq.restore(model) == BLOCKS and fluxq.restore(model) == 0
    assert {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()} == before


@pytest.mark.slow
def test_a_copy_is_fused_by_itself() -> None:
    model = quantized("nvfp4-nvfp4-static")
    want = output(model)
    fluxq.optimize(model)
    other = copy.deepcopy(model)
    fluxq.restore(model)
    assert fused_calls(model) == 0 and fused_calls(other) == BLOCKS
    nn.init.zeros_(model.transformer_blocks[0].attn.to_out[0].bias)
    assert torch.equal(output(other), want)


def test_pickle_keeps_the_forms() -> None:
    model = quantized("int8-int8")
    fluxq.optimize(model)
    other = pickle.loads(pickle.dumps(model))
    assert fused_calls(other) == BLOCKS and torch.equal(output(other), output(model))
    assert fluxq.restore(other) == BLOCKS and torch.equal(output(other), output(model))


def test_a_pipeline_saves_and_moves_as_before(plain_checkpoint, tmp_path) -> None:
    pipe = tiny.load(folder=plain_checkpoint("nvfp4"))
    pipe.transformer.save_pretrained(tmp_path / "before")
    fluxq.optimize(pipe)
    pipe.to("cpu").transformer.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()


def test_a_16_bit_model_may_be_cast_afterwards() -> None:
    model = quantized("16 bit")
    fluxq.optimize(model)
    model.to(torch.float32)
    got = output(model)
    assert fused_calls(model) == BLOCKS
    fluxq.restore(model)
    assert torch.equal(got, output(model))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["16 bit", "int8-int8", FULL])
def test_it_compiles_without_a_graph_break(scheme: str) -> None:
    model = quantized(scheme)
    fluxq.optimize(model)
    want, eager = output(model), ops(model)
    traced: Counter = Counter()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        traced.update(str(node.target).split(".")[1] for node in graph.graph.nodes if "fluxq" in str(node.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(output(compiled), want)
    assert traced == eager
    assert fluxq.restore(compiled) == BLOCKS


def test_a_step_cache_knows_the_blocks() -> None:
    model = quantized("int8-int8")
    fluxq.optimize(model)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with model.cache_context("a"), Calls() as calls:
        first = output(model)
    assert calls.fused == BLOCKS
    model.disable_cache()
    assert torch.equal(first, output(model))


# --- offloading


def sequential(model: nn.Module) -> None:
    accelerate.cpu_offload(model, torch.device("cpu"))


def as_a_whole(model: nn.Module) -> None:
    accelerate.cpu_offload_with_hook(model, torch.device("cpu"))


def by_block(model: nn.Module) -> None:
    how = {"offload_type": "block_level", "num_blocks_per_group": 1}
    apply_group_offloading(model, torch.device("cpu"), **how)


def by_leaf(model: nn.Module) -> None:
    apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level")


@pytest.mark.often(1)
@pytest.mark.parametrize("scheme", ["16 bit", "int8-int8"])
@pytest.mark.parametrize("offload", [sequential, as_a_whole, by_block, by_leaf])
def test_offloading_after_optimizing_works_and_before_is_refused_by_name(scheme: str, offload) -> None:
    model = quantized(scheme)
    want = output(model)
    other = copy.deepcopy(model)
    fluxq.optimize(model)
    offload(model)
    assert torch.equal(output(model), want)
    assert fluxq.restore(model) == BLOCKS
    assert torch.equal(output(model), want)
    offload(other)
    if offload is as_a_whole:
        fluxq.optimize(other)
    else:
        with pytest.raises(ValueError, match="optimize before"):
            fluxq.optimize(other)
    assert torch.equal(output(other), want)


# --- what the fused form does not know


def test_where_it_falls_back_the_result_is_the_blocks_own() -> None:
    model = quantized("int8-int8")
    fluxq.optimize(model)

    def falls_back(**call) -> str:
        with Calls() as calls:
            got = output(model, **call)
        assert calls.fused == 0
        fluxq.restore(model)
        assert torch.equal(got, output(model, **call))
        fluxq.optimize(model)
        return calls.reasons.pop()

    assert "gradients" in falls_back(grad=True)
    mask = torch.ones(1, 1, 1, TEXT_TOKENS + 7, dtype=torch.bool)
    mask[..., 0] = False
    assert "attention_mask" in falls_back(joint_attention_kwargs={"attention_mask": mask})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in falls_back()
    with_scale = {"joint_attention_kwargs": {"scale": 0.5}}
    assert fused_calls(model, **with_scale) == BLOCKS


def test_gradients_reach_an_adapter_through_an_optimized_model() -> None:
    model = quantized("int8-int8")
    adapt(model, ["attn.to_q"])
    fluxq.optimize(model)
    output(model, grad=True).float().square().sum().backward()
    grads = [parameter.grad for name, parameter in model.named_parameters() if "lora_B" in name]
    assert grads and all(grad is not None for grad in grads)


def test_a_processor_of_another_kind_keeps_the_blocks_own_forward() -> None:
    class Custom(stock.FluxAttnProcessor):
        pass

    model = quantized("int8-int8")
    fluxq.optimize(model)
    model.single_transformer_blocks[0].attn.set_processor(Custom())
    with Calls() as calls:
        output(model)
    assert calls.fused == BLOCKS - 1 and "a Custom" in calls.reasons.pop()
    rows = fluxq.optimize(model)
    kept = [row for row in rows if row.part == "block"]
    assert [row.block for row in kept] == ["single_transformer_blocks.0"] and "Custom" in kept[0].why_not
    assert type(model.single_transformer_blocks[0]) is stock.FluxSingleTransformerBlock


def test_an_ip_adapter_keeps_the_blocks_own_forward() -> None:
    model = quantized("int8-int8")
    fluxq.optimize(model)
    without = output(model)
    attention = model.transformer_blocks[0].attn
    adapter = stock.FluxIPAdapterAttnProcessor(128, 32, num_tokens=(4,), dtype=torch.bfloat16)
    attention.set_processor(adapter.requires_grad_(False))
    call = {"joint_attention_kwargs": {"ip_hidden_states": [torch.ones(1, 4, 32).bfloat16()]}}
    with Calls() as calls:
        got = output(model, **call)
    assert calls.fused == 0 and not torch.equal(got, without)
    fluxq.restore(model)
    assert torch.equal(got, output(model, **call))


def test_the_backend_of_the_processor_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)  # of all models: set back afterwards
    model = quantized("int8-int8")
    fluxq.optimize(model)
    model.set_attention_backend("_native_math")
    got = output(model)
    assert fused_calls(model) == BLOCKS
    fluxq.restore(model)
    assert torch.equal(got, output(model))


def test_fused_projections_keep_the_blocks_own_forward() -> None:
    model = quantized("16 bit")
    fluxq.optimize(model)
    model.fuse_qkv_projections()
    got = output(model)
    assert fused_calls(model) == 0
    fluxq.restore(model)
    assert torch.equal(got, output(model))
    with pytest.raises(ValueError, match="fuse_qkv_projections"):
        fluxq.optimize(model)


def test_hooks_are_heard() -> None:
    model = quantized("int8-int8")
    fluxq.optimize(model)
    block, seen = model.transformer_blocks[0], []
    paths = ("attn", "norm1", "attn.to_q", "ff.net.2", "attn.to_out.0", "norm1.linear")
    want = output(model)
    for path in paths:
        handle = block.get_submodule(path).register_forward_hook(lambda *_: seen.append(1))
        assert torch.equal(output(model), want)
        handle.remove()
    assert len(seen) == len(paths)


def test_residuals_of_a_controlnet_are_added_between_blocks() -> None:
    model = quantized("int8-int8")
    residuals = {
        "controlnet_block_samples": [torch.ones(1, 7, 128).bfloat16()],
        "controlnet_single_block_samples": [torch.ones(1, 7, 128).bfloat16()] * 2,
    }
    want = output(model, **residuals)
    assert not torch.equal(want, output(model))
    fluxq.optimize(model)
    assert fused_calls(model, **residuals) == BLOCKS
    assert torch.equal(output(model, **residuals), want)


@pytest.mark.parametrize(("scheme", "chip", "shares"), [("int8-int8", "sm_90", 4), ("nvfp4-nvfp4", "sm_90", 0)])
def test_on_a_gpu_only_what_it_multiplies_is_shared(scheme: str, chip: str, shares: int, monkeypatch) -> None:
    """Nothing runs there: only the decision is looked at, and that a call elsewhere is the blocks' own."""
    pytest.importorskip("triton", reason="what a chip offers is in the tables of the Triton kernels")
    monkeypatch.setattr("fluxq.kernels.tiles.chip_of", lambda device: chip)
    model = quantized(scheme)
    want = output(model)
    rows = {(row.block, row.part): row for row in fluxq.optimize(model, device="cuda")}
    single = rows["single_transformer_blocks.0", "single_in"]
    assert len(single.layers) == shares and (f"on {chip}" in single.why_not) == (shares == 0)
    with Calls() as calls:
        assert torch.equal(output(model), want)
    assert calls.fused == 0 and calls.reasons == {"optimized for cuda"}


def test_after_a_kernel_was_found_wrong_blocks_run_their_own_forward_until_optimized_again(monkeypatch) -> None:
    monkeypatch.setattr(findings, "_withdrawn", {})
    model = quantized("int8-int8")
    want = output(model)
    fluxq.optimize(model)
    findings.withdraw("scaled_matmul", "int8", "sm_90", "off by 3")
    with Calls() as calls:
        assert torch.equal(output(model), want)
    assert calls.fused == 0 and calls.reasons == {"a kernel was found wrong since: call fluxq.optimize again"}
    fluxq.optimize(model)
    assert fused_calls(model) == BLOCKS


def test_where_the_norms_kernel_is_wrong_blocks_are_left_as_they_are(monkeypatch) -> None:
    pytest.importorskip("triton", reason="what a chip offers is in the tables of the Triton kernels")
    monkeypatch.setattr("fluxq.kernels.tiles.chip_of", lambda device: "sm_90")
    monkeypatch.setattr(findings, "_withdrawn", {("adaln_quantize", "16bit", "sm_90"): "off by 3"})
    model = quantized("int8-int8")
    fluxq.optimize(model)
    (row,) = fluxq.optimize(model, device="cuda")
    assert row.why_not == "adaln_quantize was wrong on this GPU: off by 3" and fused_calls(model) == 0


@pytest.mark.parametrize(
    ("scheme", "chip", "said"),
    [
        ("int8-int8", "sm_90", ""),
        ("int8-int8-r4", "sm_90", ""),
        ("int8-int8-r4", "gfx942", "158 registers, limit 128"),  # of the kernel that multiplies by the branch as well
        ("int8-int8-r5", "sm_90", "its low-rank branch has 5 ranks, the quantizers take 4"),
        ("int8-int8", "without it", "no such kernel"),
    ],
)
def test_on_a_gpu_attention_is_read_beside_the_feed_forward_where_a_kernel_can(
    scheme: str, chip: str, said: str, monkeypatch
) -> None:
    pytest.importorskip("triton", reason="what a chip offers is in the tables of the Triton kernels")
    from fluxq.kernels import dispatch

    def without_beside(op: str, name: str, chip: str) -> str:
        return "no such kernel" if "beside" in name else refusal(op, name, chip)

    refusal = dispatch.refusal
    if chip == "without it":
        chip = "sm_90"
        monkeypatch.setattr(dispatch, "refusal", without_beside)
    monkeypatch.setattr("fluxq.kernels.tiles.chip_of", lambda device: chip)
    monkeypatch.setattr("fluxq.kernels.quantize_activation.kernel.LARGEST_RANK", 4)
    rows = {row.part: row for row in fluxq.optimize(quantized(scheme), device="cuda")}
    row = rows["mixed_out"]
    assert row.fused == ("" if said else "attention beside gelu + int8 codes") and said in row.why_not
    assert rows["ff_down"].fused == ("" if "branch" in said or "registers" in said else "gelu + int8 codes")
    assert len(rows["qkv"].layers) == 3


def test_what_cannot_be_fused_is_refused_by_name(pipe) -> None:
    with pytest.raises(ValueError, match=r"Linear: no fused form is known, only of .*, FluxTransformer2DModel"):
        fluxq.optimize(nn.Linear(2, 2))

    class Mine(stock.FluxTransformerBlock):
        pass

    model = quantized("16 bit")
    model.transformer_blocks[0].__class__ = Mine
    row = next(row for row in fluxq.optimize(model) if row.part == "block")
    assert "Mine, expected diffusers' FluxTransformerBlock" in row.why_not
    for block in model.single_transformer_blocks:
        block.forward = functools.partial(block.forward)  # as an offloader or another library does
    fluxq.restore(model)
    with pytest.raises(ValueError, match=r"no block of this FluxTransformer2DModel can be fused: transformer_blocks.0"):
        fluxq.optimize(model)
    assert fluxq.restore(pipe) == 0


def test_blocks_that_diffusers_does_not_register_are_fused_all_the_same(monkeypatch):
    def get(_class: type) -> None:
        raise ValueError("not registered")

    monkeypatch.setattr(TransformerBlockRegistry, "get", get)
    block = stock.FluxTransformerBlock
    assert issubclass(fused_class.__wrapped__(block), block)
