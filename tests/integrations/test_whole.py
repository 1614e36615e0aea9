"""All or nothing: what a quantized model refuses has changed nothing of it; its weights are counted as weights."""

import copy
import io
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import accelerate
import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

import fluxq
from fluxq import FluxqConfig, tiny
from fluxq.integrations import diffusers as backend
from fluxq.integrations import whole
from fluxq.kernels.linear import placeholder
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.formats import Scheme

FP8 = FluxqConfig("fp8")
RECIPES = ("fp8", "nvfp4", "int4-svd", "mxfp8", "int8")
TOKENS = torch.arange(1, 7)[None]


def transformer(recipe: str = "fp8") -> diffusers.FluxTransformer2DModel:
    how = FluxqConfig(recipe, profile="rtn")
    return diffusers.FluxTransformer2DModel.from_pretrained(
        tiny.path() / "transformer", quantization_config=how, dtype=torch.bfloat16
    )


def clip(recipe: str = "fp8") -> transformers.CLIPTextModel:
    how = FluxqConfig(recipe, profile="rtn")
    return transformers.CLIPTextModel.from_pretrained(
        tiny.path() / "text_encoder", quantization_config=how, dtype=torch.bfloat16
    )


def t5(recipe: str = "fp8") -> transformers.T5EncoderModel:
    how = FluxqConfig(recipe, profile="rtn")
    return transformers.T5EncoderModel.from_pretrained(
        tiny.path() / "text_encoder_2", quantization_config=how, dtype=torch.bfloat16
    )


MODELS = {"transformer": transformer, "clip": clip, "t5": t5}
CASTS = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "to": lambda m: m.to(torch.float16),
    "to a device and a dtype": lambda m: m.to("cpu", torch.float16),
    "type": lambda m: m.type(torch.float16),
    "_apply": lambda m: m._apply(lambda t: t.half() if t.is_floating_point() else t),
    "of a module around it": lambda m: nn.Sequential(m).double(),
}


def held(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(
        now[name].dtype == tensor.dtype and torch.equal(raw(now[name]), raw(tensor)) for name, tensor in before.items()
    )


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> nn.Module:
    return MODELS[request.param]()


@pytest.mark.parametrize("cast", CASTS)
def test_a_refused_cast_changes_nothing(model, cast):
    before = held(model)
    with pytest.raises(ValueError, match=r"[Cc]ast|not supported for quantized"):
        CASTS[cast](model)
    assert unchanged(model, before)


def test_moves_and_casts_to_the_dtype_that_it_has_are_none(model):
    before = held(model)
    model._apply(lambda t: t.to("cpu", torch.bfloat16 if t.is_floating_point() else None))
    model.to("cpu")
    assert model.to(dtype=torch.bfloat16, device="cpu") is model.to(dtype=None) is model
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert unchanged(model, before)
    assert unchanged(again, before)
    with pytest.raises(ValueError, match="cannot be cast"):
        again.double()
    assert unchanged(again, before)


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_other_dtypes_is_refused_whole(model, strict):
    before = held(model)
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"state dict has torch\.bfloat16, .* nothing was loaded"):
        model.load_state_dict(state, strict=strict)
    assert unchanged(model, before)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert unchanged(model, before)


def test_a_copy_refuses_for_itself(model):
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="cannot be cast"):
        twin.double()
    assert unchanged(twin, held(model))


def test_layerwise_casting_is_refused_before_a_layer_has_it():
    model = transformer()
    before = held(model)
    with pytest.raises(ValueError, match="layerwise casting"):
        model.enable_layerwise_casting(torch.float8_e5m2, torch.bfloat16)
    assert unchanged(model, before)
    assert not any(hasattr(module, "_diffusers_hook") for module in model.modules())


@pytest.mark.parametrize("to", [(torch.float16,), ("cpu", torch.float16), (torch.bfloat16,)], ids=str)
def test_a_refused_cast_of_a_pipeline_casts_no_component(to):
    how = diffusers.PipelineQuantizationConfig(quant_mapping={"transformer": FP8, "text_encoder_2": FP8})
    pipe = diffusers.FluxPipeline.from_pretrained(
        tiny.path(), quantization_config=how, dtype={"default": torch.bfloat16, "vae": torch.float32}
    )
    models = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    before = {name: held(part) for name, part in models.items()}
    with pytest.raises(ValueError, match=r"(transformer|text_encoder_2) is quantized and computes in torch\.bfloat16"):
        pipe.to(*to)
    with pytest.raises(ValueError, match=r"in from_pretrained\(…, dtype=\) and from_pipe\(…, dtype=\)"):
        diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    assert all(unchanged(part, before[name]) for name, part in models.items())
    pipe.to("cpu")


def test_a_pipeline_with_quantized_text_encoders_takes_their_dtype():
    how = diffusers.PipelineQuantizationConfig(quant_mapping={"text_encoder": FP8})
    pipe = diffusers.FluxPipeline.from_pretrained(
        tiny.path(), quantization_config=how, dtype={"default": torch.bfloat16, "vae": torch.float32}
    )
    with pytest.raises(ValueError, match="text_encoder is quantized"):
        pipe.to(dtype=torch.float16)
    pipe.to(torch.bfloat16)
    assert pipe.vae.dtype == torch.bfloat16
    twin = diffusers.FluxImg2ImgPipeline.from_pipe(pipe, dtype=pipe.dtype)
    assert twin.text_encoder is pipe.text_encoder


@pytest.mark.parametrize(
    ("kind", "recipe"), [*(("transformer", recipe) for recipe in RECIPES), ("clip", "nvfp4"), ("t5", "int8")]
)
def test_weights_are_counted_whatever_they_are_stored_as(kind, recipe):
    model = MODELS[kind](recipe)
    plain = type(model)(model.config) if kind != "transformer" else type(model).from_config(model.config)
    assert any(isinstance(module, fluxq.QuantLinear) for module in model.modules())
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    model.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == 0


@pytest.mark.slow
def test_low_rank_factors_and_smoothing_are_no_weights(checkpoint):
    want = transformer().num_parameters()
    model = diffusers.FluxTransformer2DModel.from_pretrained(
        checkpoint("int4-svd") / "transformer", dtype=torch.bfloat16
    )
    assert any(layer.branches for layer in model.modules() if isinstance(layer, fluxq.QuantLinear))
    assert model.num_parameters() == want
    assert model.dequantize().num_parameters() == want


def test_a_bias_that_comes_of_centering_is_no_weight():
    layer = placeholder(nn.Linear(64, 32, bias=False), Scheme.parse("int8-int8-center"), torch.bfloat16)
    assert layer.bias is not None
    assert layer.weights == 32 * 64


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "int8"])
def test_fusing_quantized_projections_is_refused_by_name(recipe):
    model = transformer(recipe)
    before, modules = held(model), [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match=r"transformer_blocks\.0\.attn\.to_q is quantized as .*; nothing was fused"):
        model.fuse_qkv_projections()
    with pytest.raises(ValueError, match="to_q is quantized"):
        model.transformer_blocks[0].attn.fuse_projections()
    assert unchanged(model, before)
    assert [name for name, _ in model.named_modules()] == modules


def test_attention_with_a_way_of_its_own_to_fuse_refuses_too(tmp_path):
    row = FAMILIES["wan"]
    wan = getattr(diffusers, row.model)
    torch.manual_seed(0)
    wan(**TINY_CONFIGS[row.name]).bfloat16().save_pretrained(tmp_path)
    model = wan.from_pretrained(tmp_path, quantization_config=FP8, dtype=torch.bfloat16)
    before = held(model)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1\.to_q is quantized"):
        model.fuse_qkv_projections()
    assert unchanged(model, before)


def test_fusing_where_some_blocks_are_quantized_fuses_none():
    how = FluxqConfig("fp8", exclude=["transformer_blocks.0.**"])
    model = diffusers.FluxTransformer2DModel.from_pretrained(
        tiny.path() / "transformer", quantization_config=how, dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match="nothing was fused"):
        model.fuse_qkv_projections()
    assert not any("to_qkv" in name for name, _ in model.named_modules())
    how = FluxqConfig("fp8", exclude=["**.attn.**"])
    model = diffusers.FluxTransformer2DModel.from_pretrained(
        tiny.path() / "transformer", quantization_config=how, dtype=torch.bfloat16
    )
    model.fuse_qkv_projections()
    assert any("to_qkv" in name for name, _ in model.named_modules())


def test_what_is_left_without_values_is_named(checkpoint, monkeypatch):
    """By modules that register parameters while something else holds them back on the meta device."""
    folder = checkpoint("fp8") / "transformer"

    def registering(layer: nn.Module, name: str, tensor: Tensor) -> None:
        with accelerate.init_empty_weights():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    monkeypatch.setattr(backend, "put_tensor", registering)
    with pytest.raises(ValueError, match=r"tensors without values.*\.weight.* and \d+ more"):
        diffusers.FluxTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16)


def forgetful(folder: Path, target: Path, forget: Callable[[dict], None], shards: bool) -> Path:
    """A checkpoint whose config.json does not say all that its files hold."""
    target.mkdir()
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    if shards:
        names = sorted(tensors)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        places = {name: part for part, own in parts.items() for name in own}
        for part, own in parts.items():
            save_file({name: tensors[name] for name in own}, target / part, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (target / f"{file.name}.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    forget(config["quantization_config"])
    (target / "config.json").write_text(json.dumps(config))
    return target


def without_layer(said: dict) -> None:
    said["layers"] = {scheme: names[1:] for scheme, names in said["layers"].items()}


def without_branches(said: dict) -> None:
    said["layers"] = {
        re.sub("-(smooth|svd|center|h|r)[^-]*", "", scheme): names for scheme, names in said["layers"].items()
    }
    said["required_features"] = []


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("kind", ["transformer", "text_encoder_2"])
def test_codes_of_a_layer_that_the_config_forgets_are_refused(checkpoint, tmp_path, kind, shards):
    folder = encoder(tmp_path) if kind == "text_encoder_2" else checkpoint("fp8") / kind
    model_class = diffusers.FluxTransformer2DModel if kind == "transformer" else transformers.T5EncoderModel
    broken = forgetful(folder, tmp_path / "broken", without_layer, shards)
    with pytest.raises(
        ValueError, match=r"does not announce: \S+\.weight(_scale)?, .*copy config\.json and the weights"
    ):
        model_class.from_pretrained(broken, dtype=torch.bfloat16)
    model_class.from_pretrained(forgetful(folder, tmp_path / "whole", lambda _: None, shards), dtype=torch.bfloat16)


def test_factors_that_the_config_forgets_are_refused(checkpoint, tmp_path):
    broken = forgetful(checkpoint("int4-svd") / "transformer", tmp_path / "broken", without_branches, shards=False)
    with pytest.raises(ValueError, match=r"does not announce: \S+\.(svdquant_lora_a|pre_quant_scale)"):
        diffusers.FluxTransformer2DModel.from_pretrained(broken, dtype=torch.bfloat16)


def encoder(root: Path) -> Path:
    """A T5 in fp8, as save_pretrained writes it."""
    t5().save_pretrained(root / "t5")
    return root / "t5"


def test_pipelines_load_in_threads_beside_one_another(plain_checkpoint) -> None:
    """Components that are not quantized too: nothing of any is left on meta, and the default dtype is as it was."""
    folder, before = plain_checkpoint("fp8"), torch.get_default_dtype()
    with ThreadPoolExecutor(4) as pool:
        pipes = list(pool.map(lambda _: diffusers.FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16), range(4)))
    assert torch.get_default_dtype() == before
    for pipe in pipes:
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module):
                held = [*part.parameters(), *part.buffers()]
                assert not any(tensor.is_meta for tensor in held), name


@pytest.mark.parametrize(("version", "word"), [("0.40.0.dev0", "dtype"), ("0.39.2", "torch_dtype")])
def test_dtype_is_called_as_an_older_diffusers_calls_it(version, word, monkeypatch):
    monkeypatch.setattr(diffusers, "__version__", version)
    given = {"dtype": torch.bfloat16, "device_map": "cpu"}
    assert whole.in_words_of_diffusers(given) == {word: torch.bfloat16, "device_map": "cpu"}
    assert whole.in_words_of_diffusers({"device_map": "cpu"}) == {"device_map": "cpu"}
