"""Every way that users load, move, copy and train a checkpoint gives what a plain load gives."""

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from shared import quantization_of
from torch import Tensor, nn

import fluxq
from fluxq import integrations, tiny
from fluxq.recipes.recipe import shipped_recipes

LAYER = "single_transformer_blocks.3.attn.to_q"


def load(folder: Path, **how) -> diffusers.FluxTransformer2DModel:
    return diffusers.FluxTransformer2DModel.from_pretrained(folder, **{"dtype": torch.bfloat16, **how})


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    """The velocity of a fixed input."""
    noise = torch.Generator().manual_seed(0)
    return model(
        hidden_states=torch.randn(2, 16, 16, generator=noise).bfloat16(),
        encoder_hidden_states=torch.randn(2, 8, 64, generator=noise).bfloat16(),
        pooled_projections=torch.randn(2, 64, generator=noise).bfloat16(),
        timestep=torch.tensor([0.3, 0.8]).bfloat16(),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0]


COLUMNS = ["16 bit", *shipped_recipes()]


@pytest.fixture(params=COLUMNS)
def folder(request, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param) / "transformer"


@pytest.fixture(params=shipped_recipes())
def quantized(request, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param) / "transformer"


@pytest.mark.often(2)
@pytest.mark.feature("sharded files, HF_ENABLE_PARALLEL_LOADING")
def test_sharded_files_load_alike_also_in_parallel(folder, tmp_path, monkeypatch):
    model = load(folder)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    want = output(model)
    assert torch.equal(output(load(tmp_path)), want)
    monkeypatch.setenv("HF_ENABLE_PARALLEL_LOADING", "YES")
    assert torch.equal(output(load(tmp_path)), want)


@pytest.mark.often(4)
@pytest.mark.feature("device_map: cpu, auto, a dictionary")
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_maps_load_alike(folder, device_map):
    assert torch.equal(output(load(folder, device_map=device_map)), output(load(folder)))


@pytest.mark.often(1)
@pytest.mark.feature("variant")
def test_a_variant_is_saved_and_loaded(folder, tmp_path):
    model = load(folder)
    model.save_pretrained(tmp_path, variant="q")
    assert torch.equal(output(load(tmp_path, variant="q")), output(model))


@pytest.mark.feature("deepcopy")
def test_a_deep_copy_is_another_model_that_computes_alike(folder):
    model = load(folder)
    twin = copy.deepcopy(model)
    assert torch.equal(output(twin), output(model))
    assert twin.get_submodule(LAYER).weight.data_ptr() != model.get_submodule(LAYER).weight.data_ptr()


@pytest.mark.feature(".to(device)")
def test_moving_to_the_same_device_keeps_every_bit(folder):
    model = load(folder)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.to("cpu")
    after = model.state_dict()
    assert all(t.dtype == after[n].dtype and torch.equal(raw(t), raw(after[n])) for n, t in before.items())


def test_every_parameter_is_counted_and_none_is_a_buffer(quantized):
    model = load(quantized)
    for layer in model.modules():
        if isinstance(layer, fluxq.QuantLinear):
            assert not list(layer.buffers()) and all(not p.requires_grad for p in layer.parameters())


def test_a_library_whose_import_was_interrupted_learns_of_fluxq_at_the_next(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("import sys\nif sys.is_interrupted: raise KeyboardInterrupt\n")
    registered = []
    monkeypatch.setattr(sys, "is_interrupted", True, raising=False)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(integrations, "_call", registered.append)
    integrations.call_after_import({"halfway": ("whole:register",)})
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("halfway")
    assert registered == []
    monkeypatch.setattr(sys, "is_interrupted", False)
    importlib.import_module("halfway")
    assert registered == [("whole:register",)]


@pytest.mark.feature("enable_layerwise_casting")
def test_layerwise_casting_is_refused_and_harms_nothing(folder, record_property):
    """It would cast scales to fp8; the 16-bit model takes it."""
    model = load(folder)
    want = output(model)
    how = {"storage_dtype": torch.float8_e5m2, "compute_dtype": torch.bfloat16}
    if not isinstance(model.get_submodule(LAYER), fluxq.QuantLinear):
        model.enable_layerwise_casting(**how)
        assert not torch.equal(output(model), want)
        record_property("cell", "lossy")
        return
    with pytest.raises(ValueError, match="layerwise casting"):
        model.enable_layerwise_casting(**how)
    assert torch.equal(output(load(folder)), want)
    record_property("cell", "refused")


def test_a_cast_of_one_layer_is_refused_by_name(quantized):
    layer = load(quantized).get_submodule(LAYER)
    with pytest.raises(ValueError, match=r"cannot be cast to torch\.float16"):
        layer.to(torch.float16)


def test_gradients_reach_what_stands_before_a_quantized_layer(quantized):
    layer = load(quantized).get_submodule(LAYER)
    x = torch.randn(5, layer.in_features, requires_grad=True)
    weight = layer.dequantized(torch.float32).weight
    y = layer(x)
    pull = torch.randn_like(y)
    y.backward(pull)
    assert torch.allclose(x.grad, pull @ weight, rtol=1e-5, atol=1e-5)
    assert layer.weight.grad is None


@pytest.mark.often(1)
@pytest.mark.feature("LoRA: training with gradient checkpointing (every gradient is there)")
def test_a_lora_trains_with_gradient_checkpointing(folder):
    from peft import LoraConfig

    model = load(folder)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    model.enable_gradient_checkpointing()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 5
    noise = torch.Generator().manual_seed(0)
    velocity = model(
        hidden_states=torch.randn(1, 16, 16, generator=noise).bfloat16(),
        encoder_hidden_states=torch.randn(1, 8, 64, generator=noise).bfloat16(),
        pooled_projections=torch.randn(1, 64, generator=noise).bfloat16(),
        timestep=torch.tensor([0.5]).bfloat16(),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0]
    velocity.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained)


def test_the_config_survives_a_save(quantized, tmp_path):
    load(quantized).save_pretrained(tmp_path)
    assert quantization_of(tmp_path) == quantization_of(quantized) is not None


@pytest.mark.often(4)
@pytest.mark.feature("group offload: leaf, block, disk")
@pytest.mark.parametrize("how", ["leaf", "block", "leaf to disk"])
def test_group_offload_computes_alike(folder, tmp_path, how):
    model = load(folder)
    want = output(model)
    options = (
        {"offload_type": "leaf_level"} if "leaf" in how else {"offload_type": "block_level", "num_blocks_per_group": 1}
    )
    if "disk" in how:
        options["offload_to_disk_path"] = str(tmp_path)
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), **options)
    assert torch.equal(output(model), want)
    assert torch.equal(output(model), want)


@pytest.mark.often(1)
@pytest.mark.feature("LoRA: several adapters with weights (no error added), unloaded again (the same bits)")
def test_a_lora_loads_and_unloads_without_a_trace(folder):
    """Adding an adapter changes the output; removing it gives back every bit."""
    from peft import LoraConfig

    model = load(folder)
    want = output(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "proj_out"], init_lora_weights=False), "style")
    assert not torch.equal(output(model), want)
    model.unload_lora()
    after = model.state_dict()
    assert torch.equal(output(model), want) and after.keys() == before.keys()
    assert all(t.dtype == after[n].dtype and torch.equal(raw(t), raw(after[n])) for n, t in before.items())


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


TWO_WAYS = ("int8", "nvfp4")  # through the op; the others compile to the same graph as the second


@pytest.mark.slow
@pytest.mark.feature("torch.compile(fullgraph=True), one graph for every resolution")
@pytest.mark.parametrize(
    "folder",
    [name if name in TWO_WAYS else pytest.param(name, marks=pytest.mark.slow) for name in COLUMNS],
    indirect=True,
)
def test_compiled_it_is_one_graph_for_every_size(folder):
    """A second resolution, which is another number of image tokens, compiles nothing again."""
    model = shortened(load(folder))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    # 30 and 35 tokens; a first size of 16, the number of channels, would be taken for that number, in 16 bit too
    assert torch.equal(velocity(compiled, 6, 5), velocity(model, 6, 5))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(velocity(compiled, 7, 5), velocity(model, 7, 5))


@pytest.mark.long
@pytest.mark.parametrize("folder", TWO_WAYS, indirect=True)
def test_compiled_with_dynamic_left_to_torch_it_compiles_as_often_as_16_bit(folder):
    """Twice: for the first size and, once it has seen another, for all."""

    def graphs(model: nn.Module) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for size in ((6, 5), (7, 5), (8, 8)):
            velocity(compiled, *size)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert graphs(shortened(load(folder))) == graphs(shortened(load(Path(tiny.path()) / "transformer"))) == 2


@pytest.mark.long
@pytest.mark.parametrize("folder", TWO_WAYS, indirect=True)
def test_compiled_by_inductor_it_computes_closely_the_same(folder):
    model = shortened(load(folder))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for size in ((6, 5), (7, 5)):
        want = velocity(model, *size).float()
        error = (velocity(compiled, *size).float() - want).norm() / want.norm()
        assert error < 0.03, f"{size}: {error}"  # inductor rounds to bf16 at other places


def shortened(model: diffusers.FluxTransformer2DModel) -> diffusers.FluxTransformer2DModel:
    """One block of each kind, to compile sooner."""
    model.transformer_blocks, model.single_transformer_blocks = (
        model.transformer_blocks[:1],
        model.single_transformer_blocks[:1],
    )
    return model


@torch.no_grad()
def velocity(model: nn.Module, height: int, width: int) -> Tensor:
    """The output for an image of height · width tokens."""
    noise = torch.Generator().manual_seed(0)
    rows = torch.cartesian_prod(torch.zeros(1), torch.arange(float(height)), torch.arange(float(width)))
    return model(
        hidden_states=torch.randn(2, height * width, 16, generator=noise).bfloat16(),
        encoder_hidden_states=torch.randn(2, 8, 64, generator=noise).bfloat16(),
        pooled_projections=torch.randn(2, 64, generator=noise).bfloat16(),
        timestep=torch.tensor([0.3, 0.8]).bfloat16(),
        img_ids=rows,
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0]
