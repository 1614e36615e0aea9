"""Offloaded to memory or disk, layer by layer or model by model, a checkpoint computes the same bits.

Without an accelerator the CPU is both ends of every move: tensors still leave their modules and come back through the
code of accelerate and diffusers. What needs a second device is marked `gpu`.
"""

import accelerate
import diffusers
import pytest
import torch
from accelerate.utils import align_module_device
from safetensors.torch import load_file
from torch import Tensor, nn

from fluxq import tiny
from fluxq.recipes.recipe import shipped_recipes

CPU = torch.device("cpu")
LAYER = "single_transformer_blocks.3.attn.to_q"


COLUMNS = ["16 bit", *shipped_recipes()]


@pytest.fixture(params=COLUMNS)
def folder(request, checkpoint):
    return checkpoint(request.param) / "transformer"


def to_memory(model: nn.Module, tmp_path) -> None:
    accelerate.cpu_offload(model, CPU)


def to_disk(model: nn.Module, tmp_path) -> None:
    accelerate.disk_offload(model, tmp_path, CPU)


def as_a_whole(model: nn.Module, tmp_path) -> None:
    accelerate.cpu_offload_with_hook(model, CPU)


def over_cpu_and_disk(model: nn.Module, tmp_path) -> None:
    accelerate.dispatch_model(model, split(model), main_device="cpu", offload_dir=tmp_path)


@pytest.mark.often(4)
@pytest.mark.feature("accelerate: offload to memory or disk, dispatch over both")
@pytest.mark.parametrize("offload", [to_memory, to_disk, as_a_whole, over_cpu_and_disk])
def test_accelerate_brings_every_bit_back(folder, tmp_path, offload):
    model = load(folder)
    want = output(model)
    offload(model, tmp_path)
    assert model.get_submodule(LAYER).weight.is_meta == (offload is not as_a_whole)
    for _ in range(2):
        assert torch.equal(output(model), want)
    assert_holds_what_the_file_holds(model, folder)


@pytest.mark.often(1)
@pytest.mark.feature("device_map over cpu and disk")
@pytest.mark.parametrize("how", [{}, {"offload_state_dict": True}, {"low_cpu_mem_usage": True}], ids=str)
def test_a_model_loaded_over_cpu_and_disk_holds_what_the_file_holds(folder, tmp_path, how):
    """The loader casts floats on their way to disk and asks no backend: fp32 scales must come back whole."""
    want = output(load(folder))
    model = load(folder, device_map=split(load(folder)), offload_folder=tmp_path, **how)
    assert model.get_submodule(LAYER).weight.is_meta
    for _ in range(2):
        assert torch.equal(output(model), want)
    assert_holds_what_the_file_holds(model, folder)


@pytest.mark.often(2)
@pytest.mark.feature("device_map='auto' with a memory limit")
def test_a_memory_limit_sends_layers_to_disk(folder, tmp_path):
    want = output(load(folder))
    model = load(folder, device_map="auto", max_memory={"cpu": "500KB"}, offload_folder=tmp_path)
    assert "disk" in model.hf_device_map.values()
    assert torch.equal(output(model), want)
    assert_holds_what_the_file_holds(model, folder)


@pytest.mark.often(1)
@pytest.mark.feature("pipeline: model and sequential CPU offload")
@pytest.mark.parametrize("how", ["model", "sequential"])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_pipeline_offloaded_to_memory_paints_the_same_image(checkpoint, column, how):
    want = image(pipeline(checkpoint(column)))
    pipe = pipeline(checkpoint(column))
    if how == "model":
        pipe.enable_model_cpu_offload(device="cpu")
    else:  # the pipeline's own call names the device cpu:0, which accelerate takes for another one
        for model in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
            accelerate.cpu_offload(model, CPU, offload_buffers=True)
    for _ in range(2):
        assert torch.equal(image(pipe), want)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leaves", "blocks", "leaves on disk", "blocks on disk"])
def test_a_pipeline_offloaded_in_groups_paints_the_same_image(checkpoint, tmp_path, how):
    want = image(pipeline(checkpoint("nvfp4")))
    pipe = pipeline(checkpoint("nvfp4"))
    pipe.enable_group_offload(
        CPU,
        offload_type="block_level" if "blocks" in how else "leaf_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(tmp_path) if "disk" in how else None,
        exclude_modules=["text_encoder_2"] if how == "leaves on disk" else None,  # tied weights: NaN in 16 bit too
    )
    for _ in range(2):
        assert torch.equal(image(pipe), want)


def test_streams_are_refused_where_the_device_has_none(checkpoint):
    model = load(checkpoint("fp8") / "transformer")
    want = output(model)
    with pytest.raises(ValueError, match="use_stream=False"):
        model.enable_group_offload(CPU, offload_type="leaf_level", use_stream=True)
    assert torch.equal(output(model), want)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["leaf_level", "block_level"])
@pytest.mark.parametrize("how", [{}, {"record_stream": True}, {"low_cpu_mem_usage": True}], ids=str)
def test_streams_bring_every_bit_to_a_gpu(folder, level, how):
    want = output(load(folder).cuda(), "cuda")
    model = load(folder)
    model.enable_group_offload(torch.device("cuda"), offload_type=level, num_blocks_per_group=1, use_stream=True, **how)
    for _ in range(2):
        assert torch.equal(output(model, "cuda"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_a_pipeline_offloaded_from_a_gpu_paints_the_same_image(folder, how):
    want = image(pipeline(folder.parent).to("cuda"))
    pipe = pipeline(folder.parent)
    getattr(pipe, how)()
    for _ in range(2):
        assert torch.equal(image(pipe), want)


def load(folder, **how) -> diffusers.FluxTransformer2DModel:
    return diffusers.FluxTransformer2DModel.from_pretrained(folder, **{"dtype": torch.bfloat16, **how})


@torch.no_grad()
def output(model: nn.Module, device: str = "cpu") -> Tensor:
    """The velocity of a fixed input."""
    noise = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(2, 16, 16, generator=noise).bfloat16(),
        "encoder_hidden_states": torch.randn(2, 8, 64, generator=noise).bfloat16(),
        "pooled_projections": torch.randn(2, 64, generator=noise).bfloat16(),
        "timestep": torch.tensor([0.3, 0.8]).bfloat16(),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    return model(**{name: tensor.to(device) for name, tensor in inputs.items()}, return_dict=False)[0]


def pipeline(folder) -> diffusers.FluxPipeline:
    pipe = diffusers.FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: diffusers.FluxPipeline) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    how = {**tiny.CALL_KWARGS, "num_inference_steps": 2, "output_type": "pt"}
    return pipe("a red three on black", generator=noise, **how).images


def split(model: nn.Module) -> dict[str, str]:
    """A device map that leaves the last two single blocks on disk."""
    blocks = len(model.single_transformer_blocks)
    parts = [name for name, _ in model.named_children() if name != "single_transformer_blocks"]
    parts += [f"single_transformer_blocks.{i}" for i in range(blocks)]
    return {part: "disk" if part in parts[-2:] else "cpu" for part in parts}


def assert_holds_what_the_file_holds(model: nn.Module, folder) -> None:
    """Every parameter that a layer computes with, brought in as its forward would, bit for bit."""
    file = load_file(folder / "diffusion_pytorch_model.safetensors")
    seen = set()
    for module_name, module in model.named_modules():
        with align_module_device(module):
            for name, held in module.named_parameters(module_name, recurse=False):
                assert torch.equal(raw(held.data), raw(file[name])), name
                seen.add(name)
    assert seen == set(file)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
