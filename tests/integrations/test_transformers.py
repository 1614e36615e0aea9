"""A text encoder's checkpoint in stock transformers: loads every way users load, saves bit for bit, never as noise."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from shared import quantization_of
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

import fluxq
from fluxq import tiny
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder
from fluxq.jobs import making
from fluxq.quantize.checkpoint import SourceWeights, write_component
from fluxq.quantize.run import quantize_component
from fluxq.quantize.structure import list_linears
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Family
from fluxq.recipes.plan import component_recipe, make_plan
from fluxq.recipes.recipe import load_recipe, shipped_recipes

T5 = FAMILIES["t5"]
ENCODERS = [row for row in FAMILIES.values() if row.library == "transformers"]
LAYER = "encoder.block.1.layer.0.SelfAttention.q"


@pytest.fixture(scope="module")
def text_encoder(tmp_path_factory) -> Callable[..., Path]:
    """text_encoder("fp8") is a folder with a small random T5 as `fluxq quantize` files it, made once."""
    root = tmp_path_factory.mktemp("text_encoders")

    def make(recipe: str, row: Family = T5) -> Path:
        target = root / f"{row.name}-{recipe}"
        if not target.exists():
            source = sixteen_bit(row, root / row.name)
            component = component_recipe(load_recipe(recipe)[1], None, row)
            plan = make_plan(row, "encoder", component, list_linears(source, "encoder"), static_inputs=False)
            weights, work = SourceWeights(source, "encoder"), root / f"{target.name}-work"
            blocks = quantize_component(plan, weights, None, torch.bfloat16, work)
            write_component(target, source, plan, blocks)
        return target

    return make


def sixteen_bit(row: Family, root: Path) -> ModelFolder:
    """A pipeline folder of one component, `encoder`, with random weights."""
    if not root.exists():
        model_class = getattr(transformers, row.model)
        torch.manual_seed(0)
        model_class(model_class.config_class(**TINY_CONFIGS[row.name])).bfloat16().save_pretrained(root / "encoder")
        write_json(root / "model_index.json", {"_class_name": "Pipeline", "encoder": ["transformers", row.model]})
    return ModelFolder(row.name, root)


def load(folder: Path, row: Family = T5, **how) -> nn.Module:
    return getattr(transformers, row.model).from_pretrained(folder, **{"dtype": torch.bfloat16, **how})


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    return model(torch.arange(12).reshape(2, 6)).last_hidden_state


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def raw(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def alike(x: Tensor, y: Tensor) -> bool:
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(raw(x), raw(y))

    return a.keys() == b.keys() and all(alike(t, b[name]) for name, t in a.items())


def quantization(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.often(1)
@pytest.mark.parametrize("row", ENCODERS, ids=lambda row: row.name)
def test_every_text_encoder_loads_and_saves_again_bit_for_bit(row, text_encoder, tmp_path):
    folder = text_encoder("nvfp4", row)
    model = load(folder, row)
    layers = [m for m in model.modules() if isinstance(m, fluxq.QuantLinear)]
    assert len(layers) == sum(map(len, quantization(folder)["layers"].values())) >= 12
    assert all(layer.weight.ndim == 2 and not any(p.requires_grad for p in layer.parameters()) for layer in layers)
    model.save_pretrained(tmp_path)
    assert same_bits(stored(folder), stored(tmp_path))
    assert quantization_of(tmp_path) == quantization_of(folder)
    assert same_bits(load(tmp_path, row).state_dict(), model.state_dict())


@pytest.mark.feature("text encoders, loaded by transformers")
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_format_computes_with_the_weights_in_the_file(recipe, text_encoder):
    model = load(text_encoder(recipe), dtype=torch.float32)
    files = stored(text_encoder(recipe))
    layer = model.get_submodule(LAYER)
    assert files[f"{LAYER}.weight"].ndim == 3
    for name in layer.scale_names:
        assert torch.equal(raw(layer.get_parameter(name)), raw(files[f"{LAYER}.{name}"])), name
    want = output(model)
    model.dequantize()
    assert type(model.get_submodule(LAYER)) is nn.Linear
    assert torch.equal(output(model), want)


def test_scales_are_not_cast_with_the_model(text_encoder):
    in_file = stored(text_encoder("fp8"))[f"{LAYER}.weight_scale"]
    assert not torch.equal(in_file, in_file.bfloat16().float()), "this scale could not show a cast"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(load(text_encoder("fp8"), dtype=dtype).get_submodule(LAYER).weight_scale, in_file)


def test_the_model_computes_in_the_dtype_asked_for(text_encoder):
    row = FAMILIES["clip"]
    for dtype in (torch.float32, torch.bfloat16):
        model = load(text_encoder("fp8", row), row, dtype=dtype)
        layer = next(m for m in model.modules() if isinstance(m, fluxq.QuantLinear))
        assert layer.bias.dtype == layer.compute_dtype == dtype
        assert output(model).dtype == dtype


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_part_offloaded_to_disk_computes_and_saves_alike(recipe, text_encoder, tmp_path):
    split = {"shared": "cpu", "encoder.embed_tokens": "cpu", "encoder.final_layer_norm": "cpu"}
    split |= {"encoder.block.0": "cpu", "encoder.block.1": "disk"}
    model = load(text_encoder(recipe), device_map=split, offload_folder=tmp_path / "offload")
    assert model.get_submodule(LAYER).weight.is_meta
    want = output(load(text_encoder(recipe)))
    assert torch.equal(output(model), want)
    assert torch.equal(output(model), want), "a second time, after the layers went back to disk"
    model.save_pretrained(tmp_path / "saved")
    assert same_bits(stored(text_encoder(recipe)), stored(tmp_path / "saved"))


def test_sharded_files_load_alike(text_encoder, tmp_path):
    model = load(text_encoder("nvfp4"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_bits(load(tmp_path).state_dict(), model.state_dict())
    assert same_bits(stored(tmp_path), stored(text_encoder("nvfp4")))


def test_saving_in_the_names_of_the_model_keeps_the_axis(text_encoder, tmp_path):
    load(text_encoder("fp8")).save_pretrained(tmp_path, save_original_format=False)
    assert same_bits(stored(text_encoder("fp8")), stored(tmp_path))


def test_compiled_blocks_are_saved_under_their_own_names(text_encoder, tmp_path):
    model = load(text_encoder("fp8"))
    model.encoder.block[0] = torch.compile(model.encoder.block[0])
    model.save_pretrained(tmp_path)
    assert same_bits(stored(text_encoder("fp8")), stored(tmp_path))


def test_moving_passes_and_casting_is_refused(text_encoder):
    model = load(text_encoder("fp8"))
    before = copy.deepcopy(model.state_dict())
    assert same_bits(model.to("cpu").state_dict(), before)
    for cast in (lambda: model.to(torch.float16), model.half, model.float):
        with pytest.raises(ValueError, match="cast"):
            cast()


def test_a_dequantized_model_needs_no_fluxq(text_encoder, tmp_path):
    model = load(text_encoder("nvfp4"))
    want = model.get_submodule(LAYER).quantized_weight.dequantize(torch.bfloat16)
    model.dequantize()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(stored(tmp_path)[f"{LAYER}.weight"], want)
    assert torch.equal(output(load(tmp_path)), output(model))


def test_shared_embeddings_stay_shared(text_encoder, tmp_path):
    model = load(text_encoder("fp8"))
    assert model.shared.weight.data_ptr() == model.encoder.embed_tokens.weight.data_ptr()
    assert torch.equal(model.shared.weight, stored(text_encoder("fp8"))["shared.weight"])


def test_a_layer_that_shares_its_weight_is_refused(tmp_path):
    config = {**TINY_CONFIGS["qwen3"], "tie_word_embeddings": True}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).save_pretrained(tmp_path)
    rewrite_config(tmp_path, lambda c: c.update(quantization_config=wholly_fp8("lm_head")))
    with pytest.raises(ValueError, match="lm_head shares its weight"):
        transformers.Qwen3ForCausalLM.from_pretrained(tmp_path)


def wholly_fp8(*layers: str) -> dict:
    return {
        "quant_method": "fluxq",
        "format_version": 1,
        "required_features": [],
        "layers": {"fp8-16bit": list(layers)},
    }


WO = """
version: 1
components:
  encoder:
    weights: {format: nvfp4}
    overrides: [{match: encoder.block.*.layer.1.DenseReluDense.wo, weights: {format: fp8}, reason: to see it work}]
"""


def test_t5_does_not_cast_activations_to_the_dtype_of_codes(text_encoder, tmp_path):
    """T5 casts what `wo` reads to the dtype of its weight; cast to fp8 without a scale, or to uint8, that is noise."""
    (tmp_path / "wo.yaml").write_text(WO)
    config = fluxq.FluxqConfig(recipe=tmp_path / "wo.yaml", component="encoder")
    text_encoder("nvfp4")
    model = load(text_encoder("nvfp4").parent / "t5" / "encoder", quantization_config=config, dtype=torch.float32)
    assert isinstance(model.encoder.block[0].layer[1].DenseReluDense.wo, fluxq.QuantLinear)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=torch.float32)
    want = output(again)
    again.dequantize()
    assert torch.equal(output(model), want)
    assert torch.equal(output(again), want)


def rewrite_config(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def rewrite_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def damaged(text_encoder, tmp_path) -> Path:
    """A copy of a CLIP text encoder in nvfp4, which has biases too, to damage."""
    import shutil

    return Path(shutil.copytree(text_encoder("nvfp4", FAMILIES["clip"]), tmp_path / "damaged"))


@pytest.fixture(scope="module")
def clip_layer(text_encoder) -> str:
    layers = quantization(text_encoder("nvfp4", FAMILIES["clip"]))["layers"]
    return next(name for members in layers.values() for name in members)


@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_scale_2", "bias"])
def test_a_missing_tensor_is_an_error_and_no_random_number(part, damaged, clip_layer):
    rewrite_tensors(damaged, lambda t: t.pop(f"{clip_layer}.{part}"))
    with pytest.raises(ValueError, match=rf"lack '{clip_layer}.{part}'"):
        load(damaged, FAMILIES["clip"])


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weight_scale_2", Tensor.bfloat16, "bfloat16 in the file, torch.float32"),
        ("weight_scale", Tensor.float, "float32 in the file, torch.float8_e4m3fn"),
        ("weight", Tensor.bfloat16, "bfloat16 in the file, torch.uint8"),
        ("weight", lambda t: t[:, 1:].clone(), "shape"),
        ("weight", lambda t: t.squeeze(-1).clone(), "shape"),
        ("weight_scale", lambda t: t[1:].clone(), "shape"),
    ],
)
def test_a_tensor_that_does_not_fit_the_config_is_refused(part, change, message, damaged, clip_layer):
    name = f"{clip_layer}.{part}"
    rewrite_tensors(damaged, lambda t: t.update({name: change(t[name])}))
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        load(damaged, FAMILIES["clip"])


def test_a_config_that_names_no_linear_is_refused(damaged):
    rewrite_config(damaged, lambda c: c["quantization_config"]["layers"].update({"fp8-16bit": ["text_model.nothing"]}))
    with pytest.raises(ValueError, match="no Linear of this CLIPTextModel"):
        load(damaged, FAMILIES["clip"])


def test_a_layer_that_the_config_forgets_fails_to_load(damaged, clip_layer):
    layers = quantization(damaged)["layers"]
    kept = {scheme: [name for name in members if name != clip_layer] for scheme, members in layers.items()}
    rewrite_config(damaged, lambda c: c["quantization_config"].update(layers=kept))
    with pytest.raises(ValueError, match=rf"config.json does not announce: {clip_layer}.weight"):
        load(damaged, FAMILIES["clip"])


@pytest.mark.often(3)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_method_that_transformers_does_not_know_fails_to_load_and_is_not_noise(recipe, text_encoder, tmp_path):
    import shutil

    folder = Path(shutil.copytree(text_encoder(recipe), tmp_path / "next"))
    rewrite_config(folder, lambda c: c["quantization_config"].update(quant_method="fluxq_next"))
    with pytest.raises(RuntimeError):
        load(folder)


def test_without_fluxq_it_fails_to_load_and_is_not_noise(text_encoder, monkeypatch):
    """As in a process that never imported fluxq, where transformers does not know the method."""
    monkeypatch.delitem(transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "fluxq")
    with pytest.raises(RuntimeError, match="mismatched"):
        load(text_encoder("fp8"))


def test_a_transformers_that_would_cast_codes_is_refused(text_encoder, monkeypatch):
    monkeypatch.delattr(transformers.quantizers.HfQuantizer, "get_new_dtype")
    with pytest.raises(ValueError, match="update transformers"):
        load(text_encoder("fp8"))


@pytest.mark.slow
def test_a_pipeline_loads_its_text_encoders(tmp_path):
    """`fluxq quantize tiny --recipe fp8 --components …`, then the stock pipeline classes."""
    parts = ("transformer", "text_encoder", "text_encoder_2")
    options = making.JobOptions(model="tiny", recipe="fp8", components=parts, output=str(tmp_path / "out"), check=False)
    making.quantize(making.job_of(options))
    pipes = [
        c.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        for c in (diffusers.FluxPipeline, diffusers.DiffusionPipeline)
    ]
    for part in parts:
        assert any(isinstance(m, fluxq.QuantLinear) for m in getattr(pipes[0], part).modules()), part
    images = [
        pipe(
            prompt=[tiny.PROMPTS[0]],
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            **{**tiny.CALL_KWARGS, "num_inference_steps": 1},
        ).images
        for pipe in pipes
    ]
    assert torch.equal(*images)
    pipes[0].save_pretrained(tmp_path / "again")
    for part in parts:
        assert same_bits(stored(tmp_path / "again" / part), stored(tmp_path / "out" / part)), part


@pytest.mark.slow
def test_a_low_rank_branch_is_saved_and_loaded(text_encoder, tmp_path):
    model = load(text_encoder("int4"))
    layer = model.get_submodule(LAYER)
    layer.append_low_rank(torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2))
    model.save_pretrained(tmp_path)
    assert quantization(tmp_path)["layers"]["int4-16bit-r2"] == [LAYER]
    assert LAYER not in quantization(tmp_path)["layers"]["int4-16bit"]
    again = load(tmp_path)
    assert again.get_submodule(LAYER).scheme.rank == 2
    assert torch.equal(output(again), output(model))


@pytest.mark.parametrize("recipe", ["int8", "fp8", "nvfp4"])
def test_what_t5_keeps_in_fp32_does_not_overflow_in_fp16(recipe, text_encoder, tmp_path):
    """T5-XXL's `wo` reaches beyond 65,504; stock fp16 computes it in fp32."""
    folder = shutil.copytree(text_encoder(recipe), tmp_path / "t5")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("wo.weight_scale_2" if recipe == "nvfp4" else "wo.weight_scale"):
            tensors[name] = tensor * 6e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    seen = []
    half = load(folder, dtype=torch.float16)
    half.encoder.block[0].layer[1].DenseReluDense.wo.register_forward_hook(lambda _m, _i, out: seen.append(out))
    got, want = output(half).float(), output(load(folder, dtype=torch.float32))
    assert seen[0].abs().max() > 65504 and got.isfinite().all()
    assert (got - want).norm() / want.norm() < 0.05
