"""Quantizing while a 16-bit model loads gives, bit for bit, what `fluxq quantize` writes."""

import copy
import io
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from diffusers import FluxPipeline, FluxTransformer2DModel, PipelineQuantizationConfig
from safetensors.torch import load_file, save_file
from shared import quantization_of
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn
from transformers import T5EncoderModel

import fluxq
from fluxq import FluxqConfig, tiny
from fluxq.integrations.on_the_fly import Arrivals, plan_for
from fluxq.jobs import making
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.nearest import sqnr
from fluxq.recipes.all_families import FAMILIES, family_of
from fluxq.recipes.plan import LinearShape, component_recipe, make_plan
from fluxq.recipes.recipe import load_recipe, shipped_recipes

PARTS = ("transformer", "text_encoder", "text_encoder_2")
DATA_FREE = [("fp8", None), ("mxfp8", None), ("int8", "rtn"), ("int4", "rtn"), ("nvfp4", "rtn"), ("nvfp4-max", "rtn")]
LAYER = "single_transformer_blocks.3.attn.to_q"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[..., Path]:
    """written("nvfp4", "rtn") is what `fluxq quantize tiny --recipe nvfp4 --profile rtn --components …` writes."""
    root = tmp_path_factory.mktemp("written")

    def make(recipe: str, profile: str | None = None) -> Path:
        folder = root / recipe
        if not folder.exists():
            options = making.JobOptions(
                model="tiny", recipe=recipe, profile=profile, components=PARTS, output=str(folder), check=False
            )
            making.quantize(making.job_of(options))
        return folder

    return make


def transformer(config: FluxqConfig, folder: Path | None = None, **how) -> FluxTransformer2DModel:
    where = {"pretrained_model_name_or_path": folder or tiny.path()}
    if folder is None:
        where["subfolder"] = "transformer"
    return FluxTransformer2DModel.from_pretrained(
        **where, quantization_config=config, **{"dtype": torch.bfloat16, **how}
    )


def pipeline(config: PipelineQuantizationConfig, folder: Path | None = None) -> FluxPipeline:
    return FluxPipeline.from_pretrained(folder or tiny.path(), quantization_config=config, dtype=torch.bfloat16)


def quantized(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, QuantLinear)]


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def raw(t: Tensor) -> Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    def alike(x: Tensor, y: Tensor) -> bool:
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(raw(x), raw(y))

    return a.keys() == b.keys() and all(alike(t, b[name]) for name, t in a.items())


def quantization(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.slow
@pytest.mark.feature("quantized while loading: what fluxq quantize writes")
@pytest.mark.parametrize(("recipe", "profile"), DATA_FREE)
def test_a_pipeline_is_what_the_command_writes(recipe, profile, written, tmp_path, record_property):
    record_property("cell", f"profile {profile}" if profile else "yes")
    kwargs = {"recipe": recipe, "profile": profile}
    config = PipelineQuantizationConfig(
        quant_backend="fluxq", quant_kwargs=kwargs, components_to_quantize=["transformer", "text_encoder_2"]
    )
    pipe = pipeline(config)
    assert quantized(pipe.transformer) and quantized(pipe.text_encoder_2) and not quantized(pipe.text_encoder)
    pipe.save_pretrained(tmp_path)
    for part in ("transformer", "text_encoder_2"):
        assert same_bits(stored(tmp_path / part), stored(written(recipe, profile) / part)), part
        assert quantization_of(tmp_path / part) == quantization_of(written(recipe, profile) / part)
    again = FluxPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for part in ("transformer", "text_encoder_2"):
        assert same_bits(getattr(again, part).state_dict(), getattr(pipe, part).state_dict())


@pytest.mark.slow
def test_two_scales_for_blocks_of_weights_need_no_data(tmp_path):
    """4-over-6 of weights is chosen by the weights: what loads is what the command writes, joined scales included."""
    recipe = tmp_path / "two-scales.yaml"
    plain = "transforms: [], rounding: {method: rtn, scales: amax}, activations: null"
    recipe.write_text(f"extends: nvfp4\ncalibration: null\ncomponents: {{transformer: {{{plain}}}}}\n")
    making.quantize(
        making.job_of(making.JobOptions(model="tiny", recipe=str(recipe), output=str(tmp_path / "o"), check=False))
    )
    written = stored(tmp_path / "o" / "transformer")
    loaded = transformer(FluxqConfig(recipe=recipe))
    assert same_bits(loaded.state_dict(), written)
    one_scale = transformer(FluxqConfig(recipe=recipe, profile="rtn"))
    weight = stored(Path(tiny.path()) / "transformer")[f"{LAYER}.weight"].float()
    two, one = (sqnr(weight, m.get_submodule(LAYER).dequantized(torch.float32).weight) for m in (loaded, one_scale))
    assert two > one + 0.2


def test_every_component_but_the_vae_by_default(written, caplog):
    with caplog.at_level(logging.WARNING, logger="fluxq"):
        pipe = pipeline(PipelineQuantizationConfig(quant_backend="fluxq", quant_kwargs={"recipe": "fp8"}))
    assert all(quantized(getattr(pipe, part)) for part in PARTS)
    assert not quantized(pipe.vae)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["AutoencoderKL stays in 16 bit"]
    assert "quantization_config" not in pipe.vae.config
    pipe.vae.to(torch.float32)  # refused for a quantized model


def test_a_recipe_that_names_the_vae_quantizes_it(tmp_path):
    row = next(row for row in FAMILIES.values() if row.kind == "vae")
    getattr(diffusers, row.model)(**TINY_CONFIGS[row.name]).save_pretrained(tmp_path)
    (tmp_path / "vae.yaml").write_text("extends: fp8\ncomponents: {vae: {weights: {format: fp8}}}\n")
    config = FluxqConfig(recipe=tmp_path / "vae.yaml")
    assert quantized(getattr(diffusers, row.model).from_pretrained(tmp_path, quantization_config=config))


def test_a_mapping_gives_each_component_its_own_recipe(tmp_path):
    shared = FluxqConfig(recipe="int8", profile="rtn")
    mapping = {"transformer": shared, "text_encoder": shared, "text_encoder_2": FluxqConfig(recipe="int4")}
    pipe = pipeline(PipelineQuantizationConfig(quant_mapping=mapping))
    pipe.save_pretrained(tmp_path)
    schemes = {part: set(quantization(tmp_path / part)["layers"]) for part in PARTS}
    assert schemes == {
        "transformer": {"int8-int8", "int8-16bit"},
        "text_encoder": {"int8-16bit"},
        "text_encoder_2": {"int4-16bit"},
    }
    assert shared.to_dict()["recipe"] == "int8", "a config that was passed stays as it was"


def test_a_denoiser_goes_by_the_names_of_denoisers():
    """A pipeline calls it `unet`, or `transformer` and more: no recipe has to name it so."""
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**TINY_CONFIGS["unet"])
    plan = plan_for(unet, FluxqConfig(recipe="fp8", component="unet"))
    assert plan and plan.quantized
    with pytest.raises(ValueError, match=r"component 'text_encoder': recipe fp8 has no entry.*leave component= out"):
        plan_for(unet, FluxqConfig(recipe="fp8", component="text_encoder"))


def test_a_plain_dictionary_will_do():
    model = transformer({"quant_method": "fluxq", "recipe": "fp8"})  # pyright: ignore[reportArgumentType]
    assert len(quantized(model)) == 38


def test_a_single_file_will_do():
    file = next((Path(tiny.path()) / "transformer").glob("*.safetensors"))
    config = FluxqConfig(recipe="nvfp4", profile="rtn")
    how = {"config": str(tiny.path()), "subfolder": "transformer", "torch_dtype": torch.bfloat16}
    model = FluxTransformer2DModel.from_single_file(str(file), quantization_config=config, **how)
    assert same_bits(model.state_dict(), transformer(config).state_dict())


def test_include_and_exclude_pick_layers():
    model = transformer(FluxqConfig(recipe="fp8", include=["single_transformer_blocks.*.proj_out"]))
    assert set(quantized(model)) == {f"single_transformer_blocks.{i}.proj_out" for i in range(4)}
    model = transformer(FluxqConfig(recipe="fp8", exclude=["single_transformer_blocks.**"]))
    assert quantized(model) and not any(name.startswith("single") for name in quantized(model))


def in_fp32(model_class: type, part: str, target: Path, **how) -> None:
    """Save a component with random fp32 weights that bf16 would round."""
    model = model_class.from_pretrained(tiny.path(), subfolder=part, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-3 * torch.rand_like(parameter))
    model.save_pretrained(target, **how)


def test_shards_and_threads_change_nothing(tmp_path, monkeypatch):
    """Members of a group that shares a scale come in different files, and from different threads."""
    in_fp32(FluxTransformer2DModel, "transformer", tmp_path / "one")
    in_fp32(FluxTransformer2DModel, "transformer", tmp_path / "many", max_shard_size="200KB")
    where = json.loads((tmp_path / "many" / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    groups = [{where[f"single_transformer_blocks.{i}.attn.to_{x}.weight"] for x in "qkv"} for i in range(4)]
    assert any(len(files) > 1 for files in groups), "these files could not show it"
    config = FluxqConfig(recipe="nvfp4", profile="rtn")
    want = transformer(config, tmp_path / "one").state_dict()
    assert same_bits(transformer(config, tmp_path / "many").state_dict(), want)
    monkeypatch.setenv("HF_ENABLE_PARALLEL_LOADING", "YES")
    assert same_bits(transformer(config, tmp_path / "many").state_dict(), want)


@pytest.mark.parametrize(
    ("model_class", "part"), [(FluxTransformer2DModel, "transformer"), (T5EncoderModel, "text_encoder_2")]
)
def test_weights_are_rounded_as_they_are_in_the_file(model_class, part, tmp_path):
    """Not as they are after the cast to the model's dtype, which rounds once more."""
    in_fp32(model_class, part, tmp_path)
    model = model_class.from_pretrained(tmp_path, quantization_config=FluxqConfig(recipe="fp8"), dtype=torch.bfloat16)
    files = stored(tmp_path)
    for name in quantized(model):
        weight = files[f"{name}.weight"]
        q, cast = (fluxq.QuantizedTensor.quantize(w, "fp8") for w in (weight, weight.bfloat16()))
        assert torch.equal(model.get_submodule(name).weight_scale, q.scale)
        assert not torch.equal(cast.scale, q.scale), "this weight could not show a cast"


@pytest.mark.parametrize(
    ("model_class", "part"), [(FluxTransformer2DModel, "transformer"), (T5EncoderModel, "text_encoder_2")]
)
def test_a_device_map_loads_alike(model_class, part):
    def load(**how) -> nn.Module:
        return model_class.from_pretrained(
            tiny.path(),
            subfolder=part,
            quantization_config=FluxqConfig(recipe="int4", profile="rtn"),
            dtype=torch.bfloat16,
            **how,
        )

    want = load().state_dict()
    for device_map in ("cpu", "auto", {"": "cpu"}):
        assert same_bits(load(device_map=device_map).state_dict(), want)


@pytest.mark.parametrize(
    ("model_class", "part"), [(FluxTransformer2DModel, "transformer"), (T5EncoderModel, "text_encoder_2")]
)
def test_offloading_to_disk_is_refused(model_class, part, tmp_path):
    names = [n for n, _ in model_class.from_pretrained(tiny.path(), subfolder=part).named_children()]
    device_map = {**dict.fromkeys(names, "cpu"), names[-1]: "disk"}
    with pytest.raises(ValueError, match="`fluxq quantize`"):
        model_class.from_pretrained(
            tiny.path(),
            subfolder=part,
            quantization_config=FluxqConfig(recipe="fp8"),
            device_map=device_map,
            offload_folder=tmp_path,
        )


def test_weights_that_are_written_to_disk_behind_our_back_are_noticed(tmp_path):
    """offload_state_dict parks weights on the processor in files, and no backend sees them."""
    with pytest.raises(ValueError, match="offload_state_dict"):
        transformer(FluxqConfig(recipe="fp8"), offload_state_dict=True)


@pytest.mark.parametrize("recipe", [name for name in shipped_recipes() if load_recipe(name)[1].calibration])
def test_a_recipe_that_needs_data_is_refused(recipe):
    """Weight-only ones too, and by a message that is true of them."""
    cure = rf"`fluxq quantize MODEL --recipe {recipe}`.*or pass profile='rtn', which only rounds to nearest"
    with pytest.raises(ValueError, match=cure):
        transformer(FluxqConfig(recipe=recipe))


def test_a_recipe_file_that_needs_data_is_named_by_its_path(tmp_path):
    (file := tmp_path / "mine.yaml").write_text("extends: nvfp4\n")
    with pytest.raises(ValueError, match=re.escape(f"`fluxq quantize MODEL --recipe {file}`")):
        transformer(FluxqConfig(recipe=file))


def test_a_text_encoder_takes_such_a_recipe_for_its_activations_stay_in_16_bit():
    model = T5EncoderModel.from_pretrained(
        tiny.path(), subfolder="text_encoder_2", quantization_config=FluxqConfig(recipe="nvfp4")
    )
    assert quantized(model)


def test_a_class_without_a_row_is_refused(tmp_path):
    config = transformers.CLIPVisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    transformers.CLIPVisionModelWithProjection(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"CLIPVisionModelWithProjection.*components_to_quantize="):
        transformers.CLIPVisionModelWithProjection.from_pretrained(
            tmp_path, quantization_config=FluxqConfig(recipe="fp8")
        )


@pytest.mark.parametrize("layer", [LAYER, "single_transformer_blocks.3.proj_out"])
def test_nan_in_a_weight_is_refused_by_name(layer, tmp_path):
    folder = Path(shutil.copytree(Path(tiny.path()) / "transformer", tmp_path / "nan"))
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[f"{layer}.weight"][0, 0] = torch.nan
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{layer}.*NaN"):
        transformer(FluxqConfig(recipe="nvfp4", profile="rtn"), folder)


def test_a_missing_weight_is_refused_by_name(tmp_path):
    folder = Path(shutil.copytree(Path(tiny.path()) / "transformer", tmp_path / "missing"))
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors[f"{LAYER}.weight"]
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"lack '{LAYER}.weight'"):
        transformer(FluxqConfig(recipe="fp8"), folder)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "needs a recipe"),
        ({"recipe": "fp8", "exclud": ["x"]}, TypeError, "exclud"),
        ({"recipe": "fp8", "layers": {}}, TypeError, "layers"),
        ({"layers": {"fp8-16bit": ["a"]}, "format_version": 99}, ValueError, "format version 99"),
    ],
)
def test_a_config_that_says_nothing_or_too_much_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        FluxqConfig(**arguments)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-comfy"])
def test_only_weights_that_share_a_scale_wait_for_one_another(recipe):
    """Check that what has been rounded is let go of: a group's last member leaves nothing behind."""
    model = FluxTransformer2DModel.from_pretrained(tiny.path(), subfolder="transformer", dtype=torch.bfloat16)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    shapes = [LinearShape(name, m.out_features, m.in_features) for name, m in linears.items()]
    said, family = load_recipe(recipe, profile="rtn")[1], family_of("FluxTransformer2DModel")
    plan = make_plan(family, "transformer", component_recipe(said, None, family), shapes, static_inputs=False)
    arrivals, waiting = Arrivals(plan), []
    for layer in plan.quantized:
        done = arrivals.add(f"{layer.name}.weight", linears[layer.name].weight.data)
        assert recipe == "nvfp4" or len({float(q.scale) for q in done.values()}) <= 1
        waiting = [] if layer.name in done else [*waiting, layer.name]
        assert len(waiting) < 4 and set(done) >= ({layer.name} if not waiting else set())
    assert not waiting
    arrivals.require_all()


# What a model says of itself follows what is done to it.


@pytest.fixture
def model() -> FluxTransformer2DModel:
    return transformer(FluxqConfig(recipe="int8", profile="rtn"))


def says(model: nn.Module) -> dict[str, list[str]]:
    return model.config["quantization_config"].to_dict()["layers"]


def test_the_saved_config_follows_the_layers(model, tmp_path):
    layer = model.get_submodule(LAYER)
    layer.append_low_rank(torch.randn(3, layer.in_features), torch.randn(layer.out_features, 3))
    other = "single_transformer_blocks.3.attn.to_k"
    model.set_submodule(other, model.get_submodule(other).dequantized(torch.bfloat16))
    model.save_pretrained(tmp_path)
    saved = quantization(tmp_path)
    assert saved["layers"]["int8-int8-r3"] == [LAYER]
    assert "low_rank" in saved["required_features"]
    assert not any(name in members for name in (LAYER, other) for members in [saved["layers"]["int8-int8"]])
    again = FluxTransformer2DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert same_bits(again.state_dict(), model.state_dict())
    again.get_submodule(LAYER).drop_low_rank(3)
    again.save_pretrained(tmp_path)
    assert LAYER in quantization(tmp_path)["layers"]["int8-int8"], "a second save follows too"


def test_a_copy_speaks_for_itself(model):
    twin = copy.deepcopy(model)
    layer = twin.get_submodule(LAYER)
    layer.append_low_rank(torch.randn(1, layer.in_features), torch.randn(layer.out_features, 1))
    assert says(twin)["int8-int8-r1"] == [LAYER]
    assert "int8-int8-r1" not in says(model)
    alone = copy.deepcopy(model.config["quantization_config"])
    assert alone.to_dict() == model.config["quantization_config"].to_dict()


def test_a_pickled_model_keeps_its_config(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    assert says(twin) == says(model)
    layer = twin.get_submodule(LAYER)
    layer.append_low_rank(torch.randn(1, layer.in_features), torch.randn(layer.out_features, 1))
    assert says(twin)["int8-int8-r1"] == [LAYER] and "int8-int8-r1" not in says(model)


def test_a_pickled_text_encoder_names_layers_as_the_whole_model_does():
    """It shares its configuration with a part, which comes out of the pickle first."""
    encoder = T5EncoderModel.from_pretrained(
        Path(tiny.path()) / "text_encoder_2", quantization_config=FluxqConfig(recipe="int8"), dtype=torch.bfloat16
    )
    buffer = io.BytesIO()
    torch.save(encoder, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    assert twin.config.quantization_config.to_dict() == encoder.config.quantization_config.to_dict()


def test_dequantizing_leaves_nothing_behind(model, tmp_path):
    model.dequantize()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not quantized(FluxTransformer2DModel.from_pretrained(tmp_path))


def test_a_config_that_cannot_be_written_leaves_the_one_that_was_there(model, tmp_path, monkeypatch):
    """R10: as all that fluxq writes."""
    (tmp_path / "q.json").write_text("old")
    monkeypatch.setattr("fluxq.base.files.os.fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        model.config["quantization_config"].to_json_file(tmp_path / "q.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("q.json", "old")]


def test_it_is_written_as_any_config(model, tmp_path):
    config = model.config["quantization_config"]
    config.to_json_file(tmp_path / "q.json")
    assert json.loads((tmp_path / "q.json").read_text()) == config.to_dict() == dict(config)
    assert "int8-int8" in repr(config)
    assert re.search("int8-int8", repr(model.config))
    assert diffusers.quantizers.auto.DiffusersAutoQuantizer.from_dict(config.to_dict()).to_dict() == config.to_dict()
