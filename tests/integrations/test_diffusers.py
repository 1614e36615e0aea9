"""A checkpoint in stock diffusers: loads every way users load, computes the same, saves bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from shared import quantization_of

import fluxq
from fluxq import tiny
from fluxq.recipes.recipe import shipped_recipes

ITEMS = [(tiny.PROMPTS[i], 50 + i) for i in range(2)]


def load(folder: Path, pipeline: type = diffusers.FluxPipeline) -> diffusers.FluxPipeline:
    pipe = pipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def latents(pipe: diffusers.FluxPipeline) -> torch.Tensor:
    noise = [torch.Generator("cpu").manual_seed(seed) for _, seed in ITEMS]
    call = {**tiny.CALL_KWARGS, "num_inference_steps": 2}
    return pipe(prompt=[prompt for prompt, _ in ITEMS], generator=noise, output_type="latent", **call).images


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a transformer folder as bytes."""
    files = sorted((folder / "transformer").glob("*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(t.dtype == b[n].dtype and torch.equal(raw(t), raw(b[n])) for n, t in a.items())


@pytest.mark.often(1)
@pytest.mark.feature("save_pretrained again: the same bits")
@pytest.mark.parametrize("recipe", ["16 bit", *shipped_recipes()])
def test_saving_again_gives_the_same_bits(recipe: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    pipe = load(checkpoint(recipe))
    quantized = [m for m in pipe.transformer.modules() if isinstance(m, fluxq.QuantLinear)]
    assert recipe == "16 bit" or len(quantized) > 30
    pipe.save_pretrained(tmp_path)
    assert same_bits(stored(checkpoint(recipe)), stored(tmp_path))
    assert quantization_of(tmp_path / "transformer") == quantization_of(checkpoint(recipe) / "transformer")
    assert torch.equal(latents(load(tmp_path)), latents(pipe))


def test_compiled_blocks_are_saved_under_their_own_names(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    pipe = load(checkpoint("fp8"))
    model = pipe.transformer
    model.transformer_blocks[0] = torch.compile(model.transformer_blocks[0])
    model.single_transformer_blocks[0].proj_out = torch.compile(model.single_transformer_blocks[0].proj_out)
    pipe.save_pretrained(tmp_path)
    assert same_bits(stored(checkpoint("fp8")), stored(tmp_path))
    assert quantization_of(tmp_path / "transformer") == quantization_of(checkpoint("fp8") / "transformer")


@pytest.mark.slow
@pytest.mark.feature("FluxPipeline, DiffusionPipeline, AutoModel, the model class with subfolder")
@pytest.mark.parametrize("recipe", ["16 bit", *shipped_recipes()])
def test_every_stock_class_loads_it(recipe: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(recipe)
    want = latents(load(folder))
    assert torch.equal(latents(load(folder, diffusers.DiffusionPipeline)), want)
    for model_class in (diffusers.AutoModel, diffusers.FluxTransformer2DModel):
        pipe = load(folder)
        pipe.transformer = model_class.from_pretrained(str(folder), subfolder="transformer", dtype=torch.bfloat16)
        assert torch.equal(latents(pipe), want)


def test_scales_are_not_cast_with_the_model(checkpoint: Callable[[str], Path]) -> None:
    """The stock loader casts floats to the model's dtype; fp32 scales must arrive as they are in the file."""
    folder = checkpoint("fp8")
    held = load(folder).transformer.transformer_blocks[0].attn.to_q.weight_scale
    in_file = stored(folder)["transformer_blocks.0.attn.to_q.weight_scale"]
    assert held.dtype == torch.float32
    assert torch.equal(held.data, in_file)
    assert not torch.equal(in_file, in_file.bfloat16().float()), "this scale could not show a cast"


def test_the_model_computes_in_the_dtype_asked_for(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("fp8")
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer", dtype=torch.float32)
    layer = model.transformer_blocks[0].attn.to_q
    assert layer.bias.dtype == torch.float32
    assert layer(torch.randn(3, layer.in_features)).dtype == torch.float32


@pytest.mark.feature("dequantize(), saved and loaded without fluxq")
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_dequantize_leaves_a_plain_model_that_needs_no_fluxq(recipe: str, checkpoint, tmp_path: Path) -> None:
    model = load(checkpoint(recipe)).transformer
    want = model.transformer_blocks[0].attn.to_q.dequantized(torch.bfloat16).weight
    model.dequantize()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    plain = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(plain.transformer_blocks[0].attn.to_q.weight, want)
    assert not any(isinstance(m, fluxq.QuantLinear) for m in plain.modules())


def rewrite_config(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def rewrite_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = next((folder / "transformer").glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def damaged(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the nvfp4 checkpoint to damage."""
    import shutil

    return Path(shutil.copytree(checkpoint("nvfp4"), tmp_path / "damaged"))


LAYER = "transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=2), "format version 2"),
        (lambda c: c.update(required_features=["teleport"]), "requires teleport"),
        (lambda c: c["layers"].update({"nvfp9-16bit": ["proj_out"]}), "unknown format 'nvfp9'"),
        (lambda c: c["layers"].update({"fp8-16bit": ["transformer_blocks.0.attn.to_z"]}), "to_z"),
        (lambda c: c["layers"].update({"int8-16bit": ["transformer_blocks.0.norm1"]}), "no Linear"),
    ],
)
def test_a_config_that_this_version_cannot_read_is_refused(damaged: Path, change: Callable, message: str) -> None:
    rewrite_config(damaged, change)
    with pytest.raises(ValueError, match=message):
        load(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{LAYER}.weight_scale_2"), f"{LAYER}.weight_scale_2"),
        (lambda t: t.pop("proj_out.weight"), "proj_out.weight"),
        (lambda t: t.update({f"{LAYER}.input_scale": t[f"{LAYER}.input_scale"].bfloat16()}), "bfloat16"),
        (lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"][:, 1:].clone()}), "shape"),
    ],
)
def test_a_file_that_does_not_fit_its_config_is_refused(damaged: Path, change: Callable, message: str) -> None:
    rewrite_tensors(damaged, change)
    with pytest.raises(ValueError, match=message):
        load(damaged)


def test_a_layer_that_the_config_forgets_is_refused_and_not_noise(damaged: Path) -> None:
    rewrite_config(damaged, lambda c: [members.remove(LAYER) for members in c["layers"].values() if LAYER in members])
    with pytest.raises(ValueError, match=LAYER.rpartition(".")[2]):
        load(damaged)


def test_without_fluxq_the_stock_loader_says_what_is_missing(checkpoint, monkeypatch) -> None:
    monkeypatch.delitem(diffusers.quantizers.auto.AUTO_QUANTIZER_MAPPING, "fluxq")
    monkeypatch.delitem(diffusers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "fluxq")
    with pytest.raises(ValueError, match="fluxq"):
        diffusers.DiffusionPipeline.from_pretrained(checkpoint("fp8"))
