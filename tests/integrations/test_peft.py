"""LoRA on a quantized model: what loads on the 16-bit model loads here, fuses without loss and leaves no trace."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import diffusers
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

import fluxq
from fluxq import tiny
from fluxq.recipes.recipe import shipped_recipes

QUANTIZED = ("to_q", "to_v", "to_out.0", "proj_mlp", "ff.net.2", "single_transformer_blocks.*.proj_out")
MODULATION = ("norm1.linear", "norm1_context.linear", "norm.linear")
KEPT = ("x_embedder", "context_embedder", "norm_out.linear")


def load(folder: Path) -> diffusers.FluxPipeline:
    pipe = diffusers.FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


COLUMNS = ["16 bit", *shipped_recipes()]


@pytest.fixture(params=COLUMNS)
def pipe_of(request, checkpoint: Callable[[str], Path]) -> diffusers.FluxPipeline:
    return load(checkpoint(request.param))


@pytest.fixture
def nvfp4(checkpoint: Callable[[str], Path]) -> diffusers.FluxPipeline:
    return load(checkpoint("nvfp4"))


@torch.no_grad()
def velocity(pipe: diffusers.FluxPipeline, tokens: int = 16, images: int = 8) -> Tensor:
    """The transformer's output for fixed inputs (images, tokens, 16)."""
    noise = torch.Generator().manual_seed(0)
    return pipe.transformer(
        hidden_states=torch.randn(images, tokens, 16, generator=noise).bfloat16(),
        encoder_hidden_states=torch.randn(images, 8, 64, generator=noise).bfloat16(),
        pooled_projections=torch.randn(images, 64, generator=noise).bfloat16(),
        timestep=torch.linspace(0.05, 0.95, images).bfloat16(),
        img_ids=torch.zeros(tokens, 3),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0]


def error(approximation: Tensor, reference: Tensor) -> float:
    return float(((approximation.double() - reference.double()).norm() / reference.double().norm()).detach())


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone().contiguous().reshape(-1).view(torch.uint8) for n, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def adapted(model: nn.Module) -> Iterator[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))


@pytest.mark.slow
@pytest.mark.feature("LoRA: several adapters with weights (no error added), unloaded again (the same bits)")
def test_adapters_with_weights_add_no_error_and_unload_without_a_trace(pipe_of, lora_file):
    """Two adapters at 0.8 and -0.5 on attention, MLP, modulation and 16-bit layers."""
    one = lora_file("one.safetensors", QUANTIZED + MODULATION, alpha=4)
    two = lora_file("two.safetensors", ("to_q", *KEPT), rank=8, seed=1)
    reference, before, plain = tiny.load(), bits(pipe_of.transformer), velocity(pipe_of)
    own, sixteen_bit = error(plain, velocity(reference)), velocity(reference)
    for pipe in (pipe_of, reference):
        pipe.load_lora_weights(one, adapter_name="one")
        pipe.load_lora_weights(two, adapter_name="two")
        pipe.set_adapters(["one", "two"], [0.8, -0.5])
    assert error(velocity(reference), sixteen_bit) > 0.05
    assert error(velocity(pipe_of), velocity(reference)) <= own * 1.1
    pipe_of.unload_lora_weights()
    assert same(bits(pipe_of.transformer), before) and torch.equal(velocity(pipe_of), plain)


def test_every_linear_keeps_its_type_and_size_under_a_loaded_lora(nvfp4, lora_file):
    """diffusers compares adapters with the stored weight and would widen layers whose codes are two to a byte."""
    layers = {n: m.in_features for n, m in nvfp4.transformer.named_modules() if isinstance(m, fluxq.QuantLinear)}
    nvfp4.load_lora_weights(lora_file("l.safetensors", QUANTIZED))
    nvfp4.unload_lora_weights()
    after = {n: m.in_features for n, m in nvfp4.transformer.named_modules() if isinstance(m, fluxq.QuantLinear)}
    assert after == layers


@pytest.mark.often(1)
@pytest.mark.feature("LoRA: fuse (scaling 1) and unfuse")
def test_fusing_changes_no_bit_of_the_output_and_unfusing_none_of_the_model(pipe_of, lora_file, record_property):
    """The 16-bit model, as it is in diffusers, comes out of it changed.

    Where a layer has a branch of its own, both are summed before one rounding instead of two: as exact, not the same.
    """
    file = lora_file("l.safetensors", QUANTIZED + MODULATION)
    pipe_of.load_lora_weights(file, adapter_name="style")
    own = any(layer.scheme.rank for layer in pipe_of.transformer.modules() if isinstance(layer, fluxq.QuantLinear))
    unfused, before = velocity(pipe_of), bits(pipe_of.transformer)
    pipe_of.fuse_lora()
    fused, layers = velocity(pipe_of), [module.get_base_layer() for module in adapted(pipe_of.transformer)]
    pipe_of.unfuse_lora()
    restored = same(bits(pipe_of.transformer), before)
    if own:
        reference = tiny.load()
        reference.load_lora_weights(file, adapter_name="style")
        wanted = velocity(reference)
        assert error(fused, wanted) <= 1.1 * error(unfused, wanted) and restored
        record_property("cell", "as exact")
    elif isinstance(layers[0], fluxq.QuantLinear):
        assert torch.equal(fused, unfused) and restored
    else:
        assert not torch.equal(fused, unfused) and not restored
        record_property("cell", "inexact")


def test_a_fused_adapter_is_the_low_rank_branch_of_its_layer(nvfp4, lora_file):
    nvfp4.load_lora_weights(lora_file("l.safetensors", QUANTIZED + MODULATION))
    layers = [module.get_base_layer() for module in adapted(nvfp4.transformer)]
    assert {layer.scheme.rank for layer in layers} == {0}
    nvfp4.fuse_lora()
    assert {layer.scheme.rank for layer in layers} == {4}


def test_fused_adapters_with_weights_are_as_exact_as_unfused_ones(nvfp4, lora_file):
    """Scalings that are no powers of two round B once; in exchange the sum of adapters is rounded once, not twice."""
    layer = nvfp4.transformer.single_transformer_blocks[0].proj_mlp
    nvfp4.load_lora_weights(lora_file("a.safetensors", QUANTIZED, alpha=3), adapter_name="a")
    nvfp4.load_lora_weights(lora_file("b.safetensors", QUANTIZED, rank=8, seed=1), adapter_name="b")
    nvfp4.set_adapters(["a", "b"], [0.7, 0.9])
    lora = nvfp4.transformer.single_transformer_blocks[0].proj_mlp
    x = torch.randn(64, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = layer(x).double()
    for name in ("a", "b"):
        a, b = lora.lora_A[name].weight.double(), lora.lora_B[name].weight.double()
        exact += x.double() @ a.t() @ b.t() * lora.scaling[name]
    unfused = error(lora(x), exact)
    before = bits(nvfp4.transformer)
    nvfp4.fuse_lora()
    assert lora(x).dtype == torch.bfloat16 and layer.scheme.rank == 12
    assert error(lora(x), exact) <= 1.1 * unfused < 0.01
    nvfp4.unfuse_lora()
    assert same(bits(nvfp4.transformer), before)


def test_unfusing_gives_16_bit_layers_their_bytes_back(nvfp4, lora_file):
    nvfp4.load_lora_weights(lora_file("l.safetensors", KEPT))
    before, unfused = bits(nvfp4.transformer), velocity(nvfp4)
    nvfp4.fuse_lora(lora_scale=0.3)
    assert not torch.equal(velocity(nvfp4), unfused) and not same(bits(nvfp4.transformer), before)
    nvfp4.unfuse_lora()
    assert same(bits(nvfp4.transformer), before)


@pytest.mark.often(1)
@pytest.mark.feature("LoRA: fused, saved and loaded")
def test_a_fused_model_is_saved_and_loads_as_it_was(pipe_of, lora_file, tmp_path):
    pipe_of.load_lora_weights(lora_file("l.safetensors", QUANTIZED, rank=3))
    pipe_of.fuse_lora()
    pipe_of.unload_lora_weights()
    want = velocity(pipe_of)
    pipe_of.save_pretrained(tmp_path / "fused")
    again = load(tmp_path / "fused")
    assert torch.equal(velocity(again), want)
    assert same(bits(again.transformer), bits(pipe_of.transformer))


def test_a_second_lora_fuses_on_top_of_a_saved_one(nvfp4, lora_file):
    nvfp4.load_lora_weights(lora_file("one.safetensors", QUANTIZED))
    nvfp4.fuse_lora()
    nvfp4.unload_lora_weights()
    nvfp4.load_lora_weights(lora_file("two.safetensors", QUANTIZED, rank=2, seed=1))
    before, unfused = bits(nvfp4.transformer), velocity(nvfp4)
    nvfp4.fuse_lora()
    assert nvfp4.transformer.single_transformer_blocks[0].proj_mlp.get_base_layer().scheme.rank == 6
    assert error(velocity(nvfp4), unfused) < 0.1
    nvfp4.unfuse_lora()
    assert same(bits(nvfp4.transformer), before)


@pytest.mark.slow
@pytest.mark.feature("LoRA: hot swap under torch.compile, nothing compiled again (within 2 %)")
@pytest.mark.parametrize(
    "pipe_of",
    [name if name == "nvfp4" else pytest.param(name, marks=pytest.mark.slow) for name in COLUMNS],
    indirect=True,
)
def test_hot_swapping_under_compile_recompiles_nothing(pipe_of, lora_file):
    one = lora_file("one.safetensors", QUANTIZED + MODULATION + KEPT, rank=4)
    two = lora_file("two.safetensors", QUANTIZED + MODULATION + KEPT, rank=8, alpha=4, seed=1)
    swapped = {}
    for name, file in (("one", one), ("two", two)):
        pipe_of.load_lora_weights(file, adapter_name="style")
        swapped[name] = velocity(pipe_of)
        pipe_of.unload_lora_weights()
    pipe_of.enable_lora_hotswap(target_rank=8)
    pipe_of.load_lora_weights(one, adapter_name="style")
    torch._dynamo.reset()
    pipe_of.transformer = torch.compile(pipe_of.transformer, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert error(velocity(pipe_of), swapped["one"]) < 0.02
        pipe_of.load_lora_weights(two, adapter_name="style", hotswap=True)
        assert error(velocity(pipe_of), swapped["two"]) < 0.02
    assert error(swapped["one"], swapped["two"]) > 0.1


def dora_file(path: Path) -> Path:
    """A DoRA of the 16-bit model, its magnitudes changed by up to 30 %."""
    model = tiny.load().transformer
    model.add_adapter(LoraConfig(r=4, target_modules=list(QUANTIZED[:3]), init_lora_weights=False, use_dora=True))
    noise = torch.Generator().manual_seed(1)
    state = {f"transformer.{name}": t.detach().contiguous() for name, t in get_peft_model_state_dict(model).items()}
    for name, tensor in state.items():
        if "magnitude" in name:
            tensor *= 1 + 0.3 * torch.rand(tensor.shape, generator=noise)
        else:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=noise))
    save_file(state, path)
    return path


@pytest.mark.often(1)
def test_a_dora_computes_what_it_computes_on_the_dequantized_model(pipe_of, tmp_path):
    """Layer by layer, from the same input: both round W to 16 bit for the norm, and differ in the layer's own error."""
    before = bits(pipe_of.transformer)
    plain = copy.deepcopy(pipe_of.transformer)
    if any(isinstance(layer, fluxq.QuantLinear) for layer in plain.modules()):
        plain.dequantize()
    file = dora_file(tmp_path / "dora.safetensors")
    pipe_of.load_lora_weights(file, adapter_name="dora")
    other = diffusers.FluxPipeline(**{**pipe_of.components, "transformer": plain})
    other.load_lora_weights(file, adapter_name="dora")
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    layers = list(adapted(pipe_of.transformer))
    assert len(layers) == 11
    for layer, exact in zip(layers, adapted(plain), strict=True):
        own = error(layer.get_base_layer()(x), exact.get_base_layer()(x))
        assert error(layer(x), exact(x)) < 1.5 * own + 0.01
        assert error(layer(x), layer.get_base_layer()(x)) > 0.1
    pipe_of.unload_lora_weights()
    assert same(bits(pipe_of.transformer), before)


@pytest.mark.slow
def test_a_dora_trains_is_saved_and_loaded_again(nvfp4, tmp_path):
    model = nvfp4.transformer
    codes = bits(model)
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "proj_mlp"], use_dora=True))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum("magnitude" in name for name in trained) == 9
    step = torch.optim.SGD(trained.values(), lr=0.5)
    inputs = torch.Generator().manual_seed(0)
    model(
        hidden_states=torch.randn(1, 16, 16, generator=inputs).bfloat16(),
        encoder_hidden_states=torch.randn(1, 8, 64, generator=inputs).bfloat16(),
        pooled_projections=torch.randn(1, 64, generator=inputs).bfloat16(),
        timestep=torch.tensor([0.5]).bfloat16(),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
    ).sample.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    assert any(p.grad.any() for name, p in trained.items() if "magnitude" in name)
    step.step()
    want = velocity(nvfp4)
    nvfp4.save_lora_weights(tmp_path, transformer_lora_layers=get_peft_model_state_dict(model))
    nvfp4.unload_lora_weights()
    assert same(bits(model), codes)
    nvfp4.load_lora_weights(tmp_path)
    assert torch.equal(velocity(nvfp4), want)


def test_a_dora_is_not_fused_and_nothing_else_is(nvfp4, lora_file):
    model = nvfp4.transformer
    nvfp4.load_lora_weights(lora_file("l.safetensors", (*QUANTIZED, *KEPT)), adapter_name="lora")
    model.add_adapter(LoraConfig(r=4, target_modules=["single_transformer_blocks.3.proj_out"], use_dora=True), "dora")
    before = bits(model)
    with pytest.raises(ValueError, match="'dora' is a DoRA, which scales the rows"):
        nvfp4.fuse_lora(adapter_names=["lora", "dora"])
    assert same(bits(model), before)
    assert not any(layer.merged for layer in adapted(model))


def test_an_adapter_of_another_kind_is_refused(nvfp4):
    config = LoraConfig(r=4, target_modules=["to_q"], alora_invocation_tokens=[1])
    with pytest.raises(ValueError, match="ALoraLinearVariant, which needs the 16-bit weight"):
        nvfp4.transformer.add_adapter(config)


def test_an_adapter_with_a_bias_is_not_fused(nvfp4):
    nvfp4.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q"], lora_bias=True), "biased")
    with pytest.raises(ValueError, match="'biased' has a bias of its own"):
        nvfp4.fuse_lora()


def test_a_lora_with_nan_is_not_fused_safely(nvfp4, lora_file):
    nvfp4.load_lora_weights(lora_file("l.safetensors", ("to_q",)), adapter_name="bad")
    next(adapted(nvfp4.transformer)).lora_B["bad"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="'bad' holds NaN"):
        nvfp4.fuse_lora(safe_fusing=True)


def test_models_without_fluxq_layers_keep_the_stock_adapters():
    model = tiny.load().transformer
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q"]))
    assert {type(module).__module__ for module in adapted(model)} == {"peft.tuners.lora.layer"}


@pytest.mark.slow
def test_a_model_is_saved_as_itself_while_adapters_are_attached(nvfp4, lora_file, tmp_path, caplog):
    """Fused ones are part of it, others are left out with a warning; the folder stays loadable either way."""
    plain = velocity(nvfp4)
    nvfp4.load_lora_weights(lora_file("l.safetensors", (*QUANTIZED, *KEPT)))
    want = velocity(nvfp4)
    with caplog.at_level("WARNING", logger="fluxq"):
        nvfp4.save_pretrained(tmp_path / "attached")
    assert "not saved with the model" in caplog.text
    assert torch.equal(velocity(load(tmp_path / "attached")), plain)
    nvfp4.fuse_lora()
    fused = velocity(nvfp4)
    nvfp4.save_pretrained(tmp_path / "attached")
    assert torch.equal(velocity(load(tmp_path / "attached")), fused)
    assert error(fused, want) < 0.1


def test_dequantizing_waits_until_adapters_are_gone(nvfp4, lora_file):
    nvfp4.load_lora_weights(lora_file("l.safetensors", ("to_q",)))
    with pytest.raises(ValueError, match="unload them"):
        nvfp4.transformer.dequantize()
    nvfp4.fuse_lora()
    fused = velocity(nvfp4)
    nvfp4.unload_lora_weights()
    nvfp4.transformer.dequantize()
    assert error(velocity(nvfp4), fused) < 0.15


@pytest.mark.slow
def test_fusing_and_unfusing_are_refused_whole_while_layers_are_offloaded(plain_checkpoint, lora_file):
    import accelerate

    pipe = load(plain_checkpoint("nvfp4"))
    model = pipe.transformer
    pipe.load_lora_weights(lora_file("l.safetensors", ("to_q", *KEPT)))
    before = bits(model)
    for change, is_merged in ((pipe.fuse_lora, False), (pipe.unfuse_lora, True)):
        accelerate.cpu_offload(model, torch.device("cpu"))
        with pytest.raises(ValueError, match="fuse before offloading"):
            change()
        assert {layer.merged for layer in adapted(model)} == {is_merged}
        accelerate.hooks.remove_hook_from_submodules(model)
        change()
    assert same(bits(model), before)


@pytest.mark.slow
def test_an_adapter_that_went_into_codes_for_one_gpu_is_not_unfused(plain_checkpoint, lora_file):
    pipe = load(plain_checkpoint("nvfp4"))
    pipe.load_lora_weights(lora_file("l.safetensors", ("to_q", *KEPT)))
    pipe.fuse_lora()
    fluxq.prepare(pipe, device="cpu")
    prepared = bits(pipe.transformer)
    with pytest.raises(ValueError, match=r"fused before fluxq\.prepare, .*: load the checkpoint again"):
        pipe.unfuse_lora()
    assert same(bits(pipe.transformer), prepared)


@pytest.mark.parametrize("method", ["IA3Config", "OFTConfig", "HRAConfig"])
def test_other_adapters_are_not_merged_into_codes(checkpoint, method):
    import peft

    model = load(checkpoint("fp8")).transformer
    options = {"feedforward_modules": []} if method == "IA3Config" else {}
    adapted_model = peft.get_peft_model(model, getattr(peft, method)(target_modules=["to_q"], **options))
    for merge in (adapted_model.merge_and_unload, adapted_model.merge_adapter):
        with pytest.raises(ValueError, match="cannot be merged into a quantized layer"):
            merge()
    adapted_model.unload()


@pytest.mark.slow
def test_only_the_adapters_that_are_named_have_to_be_mergeable(checkpoint):
    """The DoRA beside them is active, and stays as it is."""
    import peft

    model = peft.get_peft_model(load(checkpoint("fp8")).transformer, LoraConfig(target_modules=["to_q"]), "plain")
    model.add_adapter("dora", LoraConfig(target_modules=["to_q"], use_dora=True))
    model.base_model.set_adapter(["plain", "dora"])
    with pytest.raises(ValueError, match="'dora' is a DoRA"):
        model.merge_adapter()
    model.merge_adapter(["plain"])
    assert {name for module in adapted(model) for name in module.merged_adapters} == {"plain"}


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_lora_of_a_quantized_text_encoder_loads_fuses_and_leaves_no_trace(recipe, lora_file, tmp_path):
    import fluxq.jobs.making as jobs

    out, parts = tmp_path / "out", ("transformer", "text_encoder")
    jobs.quantize(
        jobs.job_of(jobs.JobOptions("tiny", recipe, profile="rtn", output=str(out), components=parts, check=False))
    )
    pipe = load(out)
    encoder, ids = pipe.text_encoder, torch.arange(8)[None]
    q = "encoder.layers.0.self_attn.q_proj"
    layer = encoder.get_submodule(next(name for name, _ in encoder.named_modules() if name.endswith(q)))
    assert isinstance(layer, fluxq.QuantLinear)
    noise = torch.Generator().manual_seed(0)
    tensors = {
        f"text_encoder.{q}.lora_A.weight": torch.randn(4, layer.in_features, generator=noise) * 0.3,
        f"text_encoder.{q}.lora_B.weight": torch.randn(layer.out_features, 4, generator=noise) * 0.3,
    }
    from safetensors.torch import load_file, save_file

    file = lora_file("l.safetensors", ("to_q",))
    tensors |= {name: t for name, t in load_file(file).items()}
    save_file({name: t.bfloat16().contiguous() for name, t in tensors.items()}, file)

    @torch.no_grad()
    def encoded() -> Tensor:
        return encoder(ids).last_hidden_state

    plain, before = encoded(), bits(encoder)
    pipe.load_lora_weights(file, adapter_name="style")
    adapted_output = encoded()
    assert not torch.equal(adapted_output, plain)
    pipe.fuse_lora(components=["text_encoder"])
    assert torch.equal(encoded(), adapted_output)
    pipe.unfuse_lora(components=["text_encoder"])
    pipe.unload_lora_weights()
    assert same(bits(encoder), before) and torch.equal(encoded(), plain)
