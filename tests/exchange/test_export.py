"""Whole checkpoints in the layouts of other programs, read by those programs where they are installed."""

import importlib
import json
import sys
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import diffusers
import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from exchange_files import export
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shared import copy_of, said_by
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

import fluxq
from fluxq import cli, tiny
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.commands import exchanging
from fluxq.jobs import catalogue, exchange, making
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.transforms import rotate
from fluxq.quantize import group
from fluxq.quantize.exchange import export as export_module
from fluxq.quantize.exchange import native
from fluxq.quantize.exchange.dialect import Unit
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.quantize.exchange.export import MOST_ADDED, plan_of
from fluxq.quantize.exchange.inspect import inspect_path
from fluxq.quantize.exchange.layer import QuantTensors
from fluxq.quantize.exchange.native import NativeComponent
from fluxq.quantize.exchange.nunchaku import GELU_SHIFT
from fluxq.quantize.record import read_record
from fluxq.recipes.all_families import FAMILIES, family_of
from fluxq.recipes.family import gated
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymaps import ORIGINALS, diffusers_names
from fluxq.recipes.plan import MODULATION_ROLE

DENOISERS = [row for row in FAMILIES.values() if row.kind == "transformer"]
WEIGHTS = "diffusion_pytorch_model.safetensors"
FITTED = ("nvfp4", "int8", "int4-svd")  # whose layers have means, factors or a low-rank branch
FOR_COMFY = ("nvfp4", "mxfp8", "fp8-comfy", "int8", "int8-convrot")  # recipes all of whose layers ComfyUI holds
BFL = {"nvfp4": {}, "nvfp4, 16 bit beside": {"side_layers": "16bit"}, "fp8": {}}  # what the files are made with
NORMED = 6  # modulations of the embedded pipeline: two of its double block, one of each of its four single ones

# What another program does with a file, in a process that never imports fluxq: it loads the model, widens every weight
# with its own code, and computes once as it is and once as a plain bf16 model of those weights.
READ_BFL = """
import json, sys
import torch
from diffusers import BFLQuantizationConfig, FluxTransformer2DModel
from diffusers.quantizers.bfl.utils import BFLFP8RLinear, BFLNVFP4Linear, dequantize_fp8r, dequantize_nvfp4
from safetensors.torch import load_file, save_file

given = load_file(sys.argv[1])
for file, config, out in json.loads(sys.argv[2]):
    model = FluxTransformer2DModel.from_single_file(file, config=config, quantization_config=BFLQuantizationConfig())
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, BFLNVFP4Linear):
            weights[name] = dequantize_nvfp4(module.weight, module.weight_scale, module.weight_scale_2)
            weights["x:" + name] = module.input_scale
        elif isinstance(module, BFLFP8RLinear):
            weights[name] = dequantize_fp8r(module.weight, module.weight_scale)
    plain = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(config)).to(torch.bfloat16)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in plain.state_dict()}
    state |= {name + ".weight": weights[name].bfloat16() for name in weights if not name.startswith("x:")}
    plain.load_state_dict(state)
    with torch.no_grad():
        outputs = [m(**given, return_dict=False)[0] for m in (model, plain)]
    assert torch.equal(*outputs), (outputs[0] - outputs[1]).abs().max()
    rest = {"=" + name: tensor.contiguous() for name, tensor in state.items()}
    save_file({**weights, **rest, "output": outputs[0]}, out)
assert "fluxq" not in sys.modules
"""


def given(seed: int = 0) -> dict[str, Tensor]:
    """Arguments of a small forward pass of the embedded transformer."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g).bfloat16()  # noqa: E731
    return {
        "hidden_states": draw(1, 16, 16),
        "encoder_hidden_states": draw(1, 5, 64),
        "pooled_projections": draw(1, 64),
        "timestep": torch.tensor([0.5]).bfloat16(),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


@pytest.fixture(scope="session")
def fitted(checkpoint) -> Path:
    """nvfp4.yaml as shipped: modulation in fp8, means and factors where they fold."""
    return checkpoint("nvfp4")


@pytest.fixture(scope="session")
def exported(checkpoint, plain_checkpoint, tmp_path_factory):
    """exported("nvfp4", "bfl") -> (what was written, the checkpoint), made once a session."""
    root, made = tmp_path_factory.mktemp("exported"), {}

    def make(recipe: str, dialect: str, **how: Any) -> Any:
        key = recipe, dialect, *how.items()
        if key not in made:
            of = checkpoint if recipe in FITTED else plain_checkpoint
            suffix = ".safetensors" if WRITERS[dialect].is_file else ""
            target = root / ("-".join(map(str, (recipe, dialect, *how))) + suffix)
            made[key] = export(resolve_model(str(of(recipe))), dialect, target, **how), of(recipe)
        return made[key]

    return make


@pytest.fixture(scope="session")
def read_by_diffusers(exported, tmp_path_factory):
    """Key of BFL -> what stock diffusers made of that file."""
    root = tmp_path_factory.mktemp("read")
    save_file(given(), root / "given.safetensors")
    orders, found = [], {}
    for name, how in BFL.items():
        file = Path(exported(name.split(",")[0], "bfl", **how)[0].target)
        config = file.with_name(file.stem + ".config.json")
        orders.append([str(file), str(config), str(root / f"{name}.safetensors")])
    command = [sys.executable, "-c", READ_BFL, str(root / "given.safetensors"), json.dumps(orders)]
    said_by(command, root)
    for name, job in zip(BFL, orders, strict=True):
        found[name] = load_file(job[2])
    return found


def loaded(folder: Path) -> nn.Module:
    return DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16).transformer


def quantized_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def is_modulation(name: str) -> bool:
    return "norm" in name


def values_folded(layers: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights and biases of all quantized layers, with mean and factors of attentions' outputs in those of values."""
    made = {name: (layer.quantized_weight.dequantize(), layer.bias.data) for name, layer in layers.items()}
    for reader, layer in layers.items():
        if not reader.endswith((".to_out.0", ".proj_out")) or not (layer.scheme.smooth or layer.scheme.center):
            continue
        width = layer.out_features
        factors = layer.pre_quant_scale.float()[:width] if layer.scheme.smooth else torch.ones(width)
        mean = layer.pre_quant_mean.float()[:width] if layer.scheme.center else torch.zeros(width)
        block = reader.removesuffix(".attn.to_out.0").removesuffix(".proj_out")
        for name in (f"{block}.attn.to_v", f"{block}.attn.add_v_proj"):
            if name in made:
                weight, bias = made[name]
                q = layers[name].quantized_weight
                if q.format.scale == "fp32":  # the scales take any factor in, and are rounded before they multiply
                    weight = replace(q, scale=q.scale * factors).dequantize()
                else:
                    weight = weight * factors[:, None]
                made[name] = weight, (factors * (bias.float() - mean)).bfloat16()
    return made


def plain_model(state: dict[str, Tensor]) -> nn.Module:
    """The embedded transformer in fp32 with these tensors."""
    config: Any = FluxTransformer2DModel.load_config(f"{tiny.path()}/transformer")
    model: Any = FluxTransformer2DModel.from_config(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model


def as_computed(folder: Path) -> dict[str, Tensor]:
    """Tensors of a plain model that computes what a checkpoint does, but for the rounding of activations."""
    model = loaded(folder)
    layers = quantized_layers(model)
    state = {n: t for n, t in model.state_dict().items() if n.rpartition(".")[0] not in layers}
    for name, layer in layers.items():
        weight, bias = layer.collapsed()
        state |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    return state


def output_of(state: dict[str, Tensor]) -> Tensor:
    inputs = {name: tensor.float() for name, tensor in given().items()}
    with torch.no_grad():
        return plain_model(state)(**inputs, return_dict=False)[0]


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# --- bfl


@pytest.mark.long
@pytest.mark.reader("diffusers", "bfl")
def test_stock_diffusers_reads_the_same_weights_without_fluxq(exported, read_by_diffusers) -> None:
    for name, read in read_by_diffusers.items():
        recipe = name.split(",")[0]
        layers = quantized_layers(loaded(exported(recipe, "bfl")[1]))
        folded = values_folded(layers)
        if "16 bit" in name:
            layers = {name: layer for name, layer in layers.items() if not is_modulation(name)}
        assert len(layers) == 38 - NORMED * ("16 bit" in name) and read.keys() >= layers.keys()
        for name, layer in layers.items():
            if not (recipe == "nvfp4" and is_modulation(name)):  # which took a fold
                assert torch.equal(read[name], folded[name][0]), name
            if layer.scheme.static_input:
                assert torch.equal(read[f"x:{name}"], layer.stored("input_scale")), name


@pytest.mark.slow
def test_a_fold_makes_what_its_readers_made_of_their_input(fitted, exported, read_by_diffusers) -> None:
    read, layers = read_by_diffusers["nvfp4, 16 bit beside"], quantized_layers(loaded(fitted))
    g = torch.Generator().manual_seed(1)
    norm, silu = torch.randn(64, 128, generator=g), torch.randn(1, 128, generator=g)
    folded = exported("nvfp4", "bfl")[0].folded
    modulations = {name: readers for name, readers in folded.items() if is_modulation(name)}
    assert len(modulations) == NORMED and sum(map(len, modulations.values())) > len(modulations)
    values = folded["transformer_blocks.0.attn.to_v"]
    assert set(values) == {f"transformer_blocks.0.attn.{out}" for out in ("to_out.0", "to_add_out")}
    looked_at = 0
    for name, chunk, reader in (
        ("transformer_blocks.0.norm1.linear", 0, "transformer_blocks.0.attn.to_q"),
        ("transformer_blocks.0.norm1.linear", 3, "transformer_blocks.0.ff.net.0.proj"),
        ("transformer_blocks.0.norm1_context.linear", 0, "transformer_blocks.0.attn.add_k_proj"),
        ("transformer_blocks.0.norm1_context.linear", 3, "transformer_blocks.0.ff_context.net.0.proj"),
        ("single_transformer_blocks.2.norm.linear", 0, "single_transformer_blocks.2.proj_mlp"),
    ):
        scheme, before = layers[reader].scheme, layers[name]
        if not (scheme.center or scheme.smooth):
            continue
        made = [
            (silu @ weight.T + bias.float())[0]
            for weight, bias in (
                (before.quantized_weight.dequantize(), before.bias.data),
                (read[f"={name}.weight"].float(), read[f"={name}.bias"]),
            )
        ]
        (x, z) = (norm * (1 + m[(chunk + 1) * 128 :][:128]) + m[chunk * 128 :][:128] for m in made)
        mean = layers[reader].pre_quant_mean.float() if scheme.center else 0.0
        factors = layers[reader].pre_quant_scale.float() if scheme.smooth else 1.0
        assert relative(z, (x - mean) * factors) < 2.0**-7, (name, reader)
        assert relative(z, x) > 2.0**-5, (name, reader)  # the fold does something
        looked_at += 1
    assert looked_at >= 3


@pytest.mark.slow
def test_the_exported_model_computes_what_the_checkpoint_does(exported, read_by_diffusers) -> None:
    """In fp32, where nothing but what was rounded once more for the other layout is left of a difference."""
    most = dict(zip(BFL, (4e-2, 5e-3, 1e-6), strict=True))  # nvfp4's modulation in fp8, in 16 bit; fp8's as it was
    for name, read in read_by_diffusers.items():
        state = {name[1:]: tensor for name, tensor in read.items() if name.startswith("=")}
        state |= {f"{name}.weight": tensor for name, tensor in read.items() if f"{name}.weight" in state}
        off = relative(output_of(state), output_of(as_computed(exported(name.split(",")[0], "bfl")[1])))
        assert off < most[name], (name, off)


def as_written(folder: Path) -> dict[str, Tensor]:
    """Tensors of a plain model after all folds, without the rounding of activations."""
    source = NativeComponent(resolve_model(str(folder)), "transformer")
    state = {name: source.tensor(name).float() for name in source.plain}
    for name in source.schemes:
        weight, bias = source.layer(name).collapsed()
        state |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias.float()})
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    "excluded",
    [
        (),
        ("**.attn.to_v",),  # factors go into 16-bit values
        ("transformer_blocks.*.attn.to_add_out",),  # and the text's projection, in 16 bit, takes them back
        ("**.attn.add_v_proj", "**.attn.to_out.0", "single_transformer_blocks.1.proj_out"),
    ],
    ids=lambda patterns: ", ".join(patterns) or "nothing",
)
def test_values_and_projections_in_16_bit_take_part_in_a_fold(excluded, tmp_path, monkeypatch) -> None:
    # Every mean and all factors are kept.
    monkeypatch.setattr(group, "_gate", lambda fits, name, before, candidates, strict: next(iter(candidates.values())))
    monkeypatch.setattr(group._Fit, "trial_error", lambda fit, state, x: float(state.transform.smooth is None))
    monkeypatch.setattr(group._Fit, "exponents", lambda fit, near: [(1.0, 0.0)])
    monkeypatch.setattr(group._Fit, "why_not_kept", lambda fit, state, parts: ("", fit.rounded))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "extends: nvfp4\ncalibration: {count: 8, steps: 2}\ngate: {db_per_percent: 0}\n"
        "components: {transformer: {rounding: {method: rtn, scales: amax}}}\n"
    )
    out = tmp_path / "out"
    making.quantize(
        making.job_of(
            making.JobOptions(model="tiny", recipe=str(recipe), output=str(out), exclude=excluded, check=False)
        )
    )
    folds = NativeComponent(resolve_model(str(out)), "transformer").folds
    assert any("_v" in name and (fold.factors != 1).any() and fold.mean.any() for name in folds for fold in folds[name])
    off = relative(output_of(as_written(out)), output_of(as_computed(out)))
    assert off < 5e-3, off


# --- the others, by what reads them


@pytest.mark.often(2)
@pytest.mark.parametrize(
    "damage",
    [
        {},
        {("double_blocks.0.img_mod.lin", 0): 0.5},  # a shift
        {("double_blocks.0.img_mod.lin", 130): 0.5},  # a scale
        {("double_blocks.0.img_mod.lin", 260): 0.5},  # a gate, of which nothing is folded
        {("single_blocks.1.modulation.lin", 5): 0.1},
        {("single_blocks.1.linear1", 7): 0.05},  # what reads the mean
        {("single_blocks.1.modulation.lin", 5): 1.0, ("single_blocks.1.linear1", 7): -0.5},
    ],
    ids=lambda damage: ", ".join(f"{name}[{index}]" for name, index in damage) or "none",
)
def test_one_number_of_a_bias_that_carries_a_folded_mean_is_found(damage, exported, tmp_path) -> None:
    tensors = load_file(exported("nvfp4", "comfy")[0].target)
    for (layer, index), off in damage.items():
        tensors[f"{layer}.bias"][index] += off
    with safe_open(exported("nvfp4", "comfy")[0].target, "pt") as stream:
        save_file(tensors, tmp_path / "file.safetensors", stream.metadata())
    report = inspect_path(tmp_path / "file.safetensors", Path(tiny.path()))[""]
    found = {fault.layer for fault in report.faults if fault.is_error}
    assert {layer for layer, _ in damage} <= found and bool(found) == bool(damage), report.faults


FUSED = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"],
    "double_blocks.0.txt_mlp.2": ["transformer_blocks.0.ff_context.net.2"],
    "single_blocks.3.linear1": [
        *(f"single_transformer_blocks.3.attn.to_{x}" for x in "qkv"),
        "single_transformer_blocks.3.proj_mlp",
    ],
    "single_blocks.3.linear2": ["single_transformer_blocks.3.proj_out"],
}


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", ["nvfp4", "int8"])
def test_comfy_files_hold_fused_layers_under_original_names(recipe, exported) -> None:
    done, folder = exported(recipe, "comfy")
    layers = quantized_layers(loaded(folder))
    made = values_folded(layers)
    weights = {name: weight for name, (weight, _) in made.items()}
    tensors = load_file(done.target)
    shapes = {
        name: (sum(weights[p].shape[0] for p in parts), weights[parts[0]].shape[1]) for name, parts in FUSED.items()
    }
    state = load_file(f"{tiny.path()}/transformer/diffusion_pytorch_model.safetensors")
    with safe_open(done.target, "pt") as stream:
        entries = json.loads(stream.metadata()["_quantization_metadata"])["layers"]
    for name, parts in FUSED.items():
        own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        assert json.loads(bytes(own["comfy_quant"].tolist())) == entries[name]
        layer: Any = DIALECTS["comfy"].decode(own, shapes[name], {})
        assert torch.equal(layer.linear().quantized_weight.dequantize(), torch.cat([weights[p] for p in parts])), name
        assert torch.equal(own["bias"], torch.cat([made[p][1] for p in parts])), name
    scale, shift = state["norm_out.linear.weight"].chunk(2)
    assert torch.equal(tensors["final_layer.adaLN_modulation.1.weight"], torch.cat([shift, scale]))
    assert torch.equal(tensors["img_in.weight"], state["x_embedder.weight"])
    assert len(entries) == 22


def test_side_layers_move_or_go_into_the_formats_8_bits_or_into_16(exported) -> None:
    moved, rounded = exported("nvfp4", "comfy")[0], exported("nvfp4", "bfl")[0]
    assert moved.formats == {"nvfp4": 16, "int8_tensorwise": NORMED} and not moved.requantized + moved.dequantized
    assert rounded.formats == {"nvfp4": 32, "fp8r": NORMED} and not rounded.dequantized
    read = load_file(rounded.target)
    for changed in rounded.requantized:
        assert (changed.was, changed.now) == ("int8-16bit", "fp8-16bit") and "no format for int8" in changed.why
        assert 0.01 < changed.added_error < MOST_ADDED and read[f"{changed.name}.weight"].dtype == torch.float8_e4m3fn
    wide, _ = exported("nvfp4", "comfy", side_layers="16bit")
    assert len(wide.dequantized) == NORMED and wide.formats == {"nvfp4": 16}
    for changed in wide.dequantized:
        assert changed.was == "int8-16bit" and changed.now == "16bit" and "asks for it" in changed.why
        assert 0 < changed.added_error < 2.0**-8 and changed.nbytes == 2 * changed.shape[0] * changed.shape[1]
    tensors = load_file(wide.target)
    assert tensors["double_blocks.0.img_mod.lin.weight"].dtype == torch.bfloat16
    assert tensors.keys() >= {f"{changed.name}.weight" for changed in wide.dequantized}


def test_a_side_layer_that_8_bits_would_change_too_much_is_written_in_16(fitted, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(export_module, "MOST_ADDED", 0.01)
    done = export(resolve_model(str(fitted)), "bfl", tmp_path / "x.safetensors")
    assert len(done.dequantized) == NORMED and not done.requantized
    assert all("; fp8-16bit would add an error of 2." in changed.why for changed in done.dequantized)
    assert done.hint == (
        "larger than the checkpoint: 6 layers are in 16 bit; where x keeps 16 bit bfl holds fp8: "
        "`modulation: {format: fp8}`"
    )


@pytest.mark.reader("comfy-kitchen", "comfy")
@pytest.mark.parametrize("recipe", FOR_COMFY)
def test_comfy_kitchen_reads_a_whole_file(recipe, exported) -> None:
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    done, folder = exported(recipe, "comfy")
    formats = require_comfy_kitchen_reads(NativeComponent(resolve_model(str(folder)), "transformer"), done)
    assert sum(formats.values()) == sum(done.formats.values()) == 22


def require_comfy_kitchen_reads(source: NativeComponent, done: Any) -> Counter[str]:
    """Every weight of the file is ours to comfy-kitchen, bit for bit; return how many layers have which format."""
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    layouts_of = {
        "nvfp4": ("TensorCoreNVFP4Layout", {"scale": "weight_scale_2", "block_scale": "weight_scale"}),
        "mxfp8": ("TensorCoreMXFP8Layout", {"scale": "weight_scale"}),
        "float8_e4m3fn": ("TensorCoreFP8Layout", {"scale": "weight_scale"}),
        "int8_tensorwise": ("TensorWiseINT8Layout", {"scale": "weight_scale"}),
    }
    tensors, formats = load_file(done.target), Counter[str]()
    for choice in [unit for unit in plan_of(source, "comfy").choices if unit.schemes]:
        name = choice.unit.name
        layers = [source.layer(part) for part in choice.unit.parts]
        weight = torch.cat([layer.linear().quantized_weight.dequantize() for layer in layers])
        weight = rotate(weight, layers[0].scheme.hadamard, layers[0].scheme.regular)
        said = json.loads(bytes(tensors[f"{name}.comfy_quant"].tolist()))
        kind = said["format"]
        layout, parts = layouts_of[kind]
        formats[kind] += 1
        params = {part: tensors[f"{name}.{key}"] for part, key in parts.items()}
        params |= {option: said[option] for option in ("convrot", "convrot_groupsize") if option in said}
        shape = {"orig_dtype": torch.float32, "orig_shape": tuple(weight.shape)}
        built = get_layout_class(layout).Params(**params, **shape)
        read = QuantizedTensor(tensors[f"{name}.weight"], layout, built).dequantize()
        assert torch.equal(read[: weight.shape[0], : weight.shape[1]], weight), name
    return formats


@pytest.mark.parametrize("recipe", FOR_COMFY)
def test_a_file_for_comfyui_is_no_larger_than_the_checkpoint(recipe, exported) -> None:
    done, folder = exported(recipe, "comfy")
    own = sum(t.nbytes for t in load_file(folder / "transformer" / WEIGHTS).values())
    assert done.checkpoint_bytes == own and not done.dequantized + done.requantized and not done.hint
    assert done.weight_bytes == sum(tensor.nbytes for tensor in load_file(done.target).values()) <= own + 2000
    assert done.notes == {}


@pytest.mark.reader("diffusers", "torchao")
@pytest.mark.parametrize("recipe", ["nvfp4", "int8", "fp8", "mxfp8"])
def test_diffusers_loads_torchao_folders(recipe, exported) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    done, folder = exported(recipe, "torchao")
    model = FluxTransformer2DModel.from_pretrained(f"{done.target}/transformer", dtype=torch.bfloat16)
    layers, read = quantized_layers(loaded(folder)), dict(model.named_modules())
    folded, made = recipe in ("nvfp4", "int8"), values_folded(layers)
    for name in layers:
        weight: Any = read[name].weight
        assert type(weight).__name__.endswith("Tensor") and type(weight) is not nn.Parameter, name
        if folded and is_modulation(name):
            continue
        found = weight.dequantize(torch.float32) if recipe != "int8" else weight.qdata * weight.scale.float()
        assert torch.equal(found.float(), made[name][0]), name
    assert DiffusionPipeline.from_pretrained(done.target, dtype=torch.bfloat16).transformer.config.num_layers == 1


def test_modelopt_folders_hold_the_native_bytes_and_say_how(exported) -> None:
    done, folder = exported("nvfp4", "modelopt")
    config = json.loads(Path(done.target, "transformer", "config.json").read_text())
    said = config["quantization_config"]
    assert (said["quant_method"], said["quant_algo"]) == ("modelopt", "NVFP4") and "quantized_layers" not in said
    assert (said["group_size"], said["swap_weight_nibbles"]) == (16, False)
    assert said["checkpoint_weight_scale_layout"] == "linear"
    source = NativeComponent(resolve_model(str(folder)), "transformer")
    sides = {name for name in source.schemes if is_modulation(name)}
    ignored = {name for name in source.linears if any(fnmatchcase(name, pattern) for pattern in said["ignore"])}
    assert ignored == source.linears.keys() - source.schemes.keys() | sides and "x_embedder" in said["ignore"]
    assert {changed.name for changed in done.dequantized} == sides
    assert {changed.why for changed in done.dequantized} == {"vLLM-Omni computes modulation in 16 bit"}
    theirs = load_file(f"{done.target}/transformer/diffusion_pytorch_model.safetensors")
    ours = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    vectors = {name for name in ours if name.rpartition(".")[2] in ("pre_quant_mean", "pre_quant_scale")}
    assert vectors and theirs.keys() == ours.keys() - vectors - {f"{name}.weight_scale" for name in sides}
    values = set(source.folds) - sides
    assert values and all("_v" in name for name in values)
    for name, tensor in theirs.items():
        if not is_modulation(name) and name.rpartition(".")[0] not in values:
            raw = [t.reshape(-1).view(torch.uint8) for t in (tensor, ours[name])]
            assert tensor.dtype == ours[name].dtype and torch.equal(*raw), name
    rest = {path.name for path in Path(done.target).iterdir()}
    assert (
        rest >= {"model_index.json", "vae", "text_encoder", "scheduler", "LICENSE.txt"}
        and "fluxq_plan.json" not in rest
    )


@pytest.fixture
def nunchaku_utils(monkeypatch):
    """diffusers' loader of nunchaku_lite, whose module wants a package of kernels and a download to be imported."""
    name = "diffusers.quantizers.nunchaku.utils"
    stub = ModuleType("kernels")
    vars(stub)["get_kernel"] = lambda *_, **__: SimpleNamespace(ops=None)
    monkeypatch.setitem(sys.modules, "kernels", stub)
    monkeypatch.setattr("diffusers.utils.is_kernels_available", lambda: True)
    monkeypatch.setattr("diffusers.utils.is_kernels_version", lambda *_: False)
    monkeypatch.setattr("diffusers.utils.constants.DIFFUSERS_TRUST_REMOTE_KERNELS", True)
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.mark.parametrize(("recipe", "ops"), [("nvfp4", {"svdq_w4a4"}), ("int4-svd", {"svdq_w4a4", "awq_w4a16"})])
def test_nunchaku_lite_folders_have_just_the_keys_that_diffusers_asks_for(
    recipe, ops, exported, nunchaku_utils
) -> None:
    done, _ = exported(recipe, "nunchaku_lite")
    folder = Path(done.target, "transformer")
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    assert said["quant_method"] == "nunchaku_lite" and said.keys() & {"svdq_w4a4", "awq_w4a16"} == ops
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel.from_config(config)
        model = model.to(torch.bfloat16)
    assert nunchaku_utils.replace_with_nunchaku_linear(model, said, torch.bfloat16) == 32 + 6 * (len(ops) == 2)
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    nunchaku_utils.check_strict_state_dict_match(model, state)
    for name, tensor in model.state_dict().items():
        assert (tensor.shape, tensor.dtype) == (state[name].shape, state[name].dtype), (name, recipe)


@pytest.mark.slow
def test_nunchaku_files_hold_its_own_blocks(exported) -> None:
    done, folder = exported("int4-svd", "nunchaku")
    layers, tensors = quantized_layers(loaded(folder)), load_file(done.target)
    with safe_open(done.target, "pt") as stream:
        header = stream.metadata()
    said = json.loads(header["quantization_config"])
    assert header["model_class"] == "NunchakuFluxTransformer2dModel" and said["method"] == "svdquant"
    assert json.loads(header["config"])["num_single_layers"] == 4 and said["rank"] == 16
    main = {name: layer.scheme for name, layer in layers.items() if not is_modulation(name)}
    # In one group the last bits of the CPU's sums decide on the branch: the record says which groups declined it.
    groups = [group for part in read_record(folder).components for group in part.groups]
    declined = [
        group for group in groups if ("low rank", False) in [(stage.name, stage.kept) for stage in group.stages]
    ]
    without_branch = {name for name, scheme in main.items() if not scheme.rank}
    assert without_branch == {name for group in declined for name in group.layers} & main.keys()
    assert all(scheme.smooth for scheme in main.values()) and len(without_branch) <= 0.2 * len(main), without_branch
    blocks = [name.split(".")[:2] for name in tensors if name.endswith(".qweight")]
    assert Counter(map(tuple, blocks))["transformer_blocks", "0"] == 10
    assert Counter(map(tuple, blocks))["single_transformer_blocks", "3"] == 5
    block, q = "single_transformer_blocks.3", "transformer_blocks.0"
    for name, parts, columns, entry in (
        (f"{q}.qkv_proj_context", [f"{q}.attn.add_{x}_proj" for x in "qkv"], slice(None), {}),
        (f"{block}.qkv_proj", [f"{block}.attn.to_{x}" for x in "qkv"], slice(None), {}),
        (f"{block}.out_proj", [f"{block}.proj_out"], slice(0, 128), {}),
        (f"{block}.mlp_fc2", [f"{block}.proj_out"], slice(128, 640), {"act_unsigned": True}),
    ):
        own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        before = torch.cat([layers[part].quantized_weight.dequantize() for part in parts])[:, columns]
        layer: Any = DIALECTS["nunchaku"].decode(own, (before.shape[0], before.shape[1]), entry)
        assert torch.equal(layer.linear().quantized_weight.dequantize(), before), name
        merged = torch.cat([layers[part].collapsed()[0] for part in parts])[:, columns]
        assert relative(layer.linear().collapsed()[0], merged) < 2.0**-7, name
        bias = torch.cat([layers[part].bias.float() for part in parts])
        expected = torch.zeros(128) if name.endswith("out_proj") else bias
        # It goes into the bias and comes back, through factors in 16 bit that may be off by 2^-8 in each column.
        shift = GELU_SHIFT * merged.abs().sum(1) if entry else 0.0
        assert ((layer.tensors["bias"].float() - expected).abs() <= 2.0**-7 * (expected.abs() + shift)).all(), name
    assert torch.equal(
        tensors[f"{block}.norm_q.weight"],
        load_file(folder / "transformer" / WEIGHTS)[f"{block}.attn.norm_q.weight"],
    )
    name = f"{block}.norm.linear"
    own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
    mod: Any = DIALECTS["nunchaku"].decode(own, (384, 128), {})
    channel_by_channel = layers[name].quantized_weight.dequantize().reshape(3, 128, 128).transpose(0, 1)
    assert torch.equal(mod.linear().quantized_weight.dequantize(), channel_by_channel.reshape(384, 128))


def test_nunchaku_files_have_no_room_for_modulation_of_another_format(exported, tmp_path, fitted) -> None:
    folder = resolve_model(str(fitted))
    with pytest.raises(ValueError, match=r"cannot hold 6 of 38 layers; --requantize.*\n.*no format for int8 weights"):
        export(folder, "nunchaku", tmp_path / "x.safetensors")
    done = export(folder, "nunchaku", tmp_path / "x.safetensors", requantize=True)
    assert [changed.now for changed in done.requantized] == ["int4-16bit"] * NORMED
    assert all(0.01 < changed.added_error < 0.2 for changed in done.requantized) and not done.dequantized


@pytest.fixture(scope="session")
def with_text_encoder(tmp_path_factory) -> Path:
    """The embedded pipeline with transformer and T5 in fp8."""
    folder = tmp_path_factory.mktemp("encoder") / "both"
    options = making.JobOptions(
        model="tiny", recipe="fp8", output=str(folder), check=False, components=("transformer", "text_encoder_2")
    )
    making.quantize(making.job_of(options))
    return folder


@pytest.mark.slow
def test_that_stock_transformers_loads_no_t5_in_4_bit_is_said(with_text_encoder, tmp_path) -> None:
    options = making.JobOptions(
        "tiny", "mxfp4", "rtn", str(tmp_path / "t5"), check=False, components=("text_encoder_2",)
    )
    making.quantize(making.job_of(options))
    (tmp_path / "t5" / "tokenizer_2" / "chat_template.jinja").write_text("{{ messages }}")
    words = "stock transformers does not load a T5 with 4-bit layers"
    done = exchange.plan_export(str(tmp_path / "t5"), "compressed-tensors", tmp_path / "4 bit").write()
    assert sum(note.startswith(words) for note in done.notes) == 1 and "chat_template.jinja" in done.files
    done = exchange.plan_export(str(with_text_encoder), "compressed-tensors", tmp_path / "8 bit").write()
    assert not any(note.startswith(words) for note in done.notes)


@pytest.mark.reader("transformers", "compressed_tensors")
def test_compressed_tensors_loads_a_text_encoder(with_text_encoder, tmp_path) -> None:
    target = tmp_path / "t5"
    done = exchange.plan_export(str(with_text_encoder), "compressed-tensors", target).write()
    assert done.components == ["text_encoder_2"] and {"config.json", "model.safetensors", "tokenizer.json"} <= set(
        done.files
    )
    said = json.loads((target / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import T5EncoderModel

    ours = DiffusionPipeline.from_pretrained(with_text_encoder, dtype=torch.bfloat16).text_encoder_2
    theirs = T5EncoderModel.from_pretrained(target, dtype=torch.bfloat16)
    read: dict[str, Any] = dict(theirs.named_modules())
    ids = torch.tensor([[1, 5, 9, 2]])
    layers = quantized_layers(ours)
    assert layers
    with torch.no_grad():
        theirs(ids)  # which decompresses
        for name, layer in layers.items():
            assert relative(read[name].weight, layer.quantized_weight.dequantize()) < 2.0**-7, name


def test_other_quantized_components_of_a_pipeline_are_written_in_16_bit(with_text_encoder, tmp_path) -> None:
    done = exchange.plan_export(str(with_text_encoder), "modelopt", tmp_path / "out").write()
    assert done.in_16_bit == ["text_encoder_2"]
    config = json.loads((tmp_path / "out" / "text_encoder_2" / "config.json").read_text())
    assert "quantization_config" not in config
    ours = DiffusionPipeline.from_pretrained(with_text_encoder, dtype=torch.bfloat16).text_encoder_2
    theirs = DiffusionPipeline.from_pretrained(tmp_path / "out", transformer=None, dtype=torch.bfloat16).text_encoder_2
    for name, layer in quantized_layers(ours).items():
        weight: Any = theirs.get_submodule(name).weight
        assert torch.equal(weight.data, layer.quantized_weight.dequantize(torch.bfloat16)), name


# --- every family


@pytest.fixture(params=DENOISERS, ids=lambda row: row.name)
def small(request, tmp_path) -> ModelFolder:
    """A folder of a random model of each family, rounded to int8."""
    torch.manual_seed(0)
    row, model_class = request.param, getattr(diffusers, request.param.model)
    model_class.from_config(TINY_CONFIGS[row.name]).to(torch.bfloat16).save_pretrained(tmp_path / "16bit")
    config = fluxq.FluxqConfig(recipe="int8", profile="rtn")
    model = model_class.from_pretrained(tmp_path / "16bit", dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(tmp_path / "model" / "transformer")
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", row.model]}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    return resolve_model(str(tmp_path / "model"))


@pytest.mark.often(4)
def test_original_names_lead_back_to_the_same_weights_in_every_family(small, tmp_path) -> None:
    family = family_of(small.components["transformer"]).name
    target = tmp_path / "x.safetensors"
    if family not in ORIGINALS:
        with pytest.raises(ValueError, match="no original names are known"):
            export(small, "comfy", target)
        return
    convolutions = family == "sana"
    if convolutions:
        with pytest.raises(ValueError, match="1x1 convolution"):
            export(small, "comfy", target)
    done = export(small, "comfy", target, requantize=convolutions)
    model: Any = getattr(diffusers, small.components["transformer"]).from_pretrained(small.path / "transformer")
    layers, state = quantized_layers(model), load_file(small.path / "transformer" / WEIGHTS)
    expected = {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] not in layers}
    for name, layer in layers.items():
        expected[f"{name}.weight"] = layer.quantized_weight.dequantize()
        expected |= {} if layer.bias is None else {f"{name}.bias": layer.bias.data}
    found: dict[str, Tensor] = {}
    file = load_file(target)
    kept = [name for name in file if not name.endswith((".weight_scale", ".comfy_quant"))]
    for original, parts, order in diffusers_names(family, kept):
        whole = file[original]
        if f"{original}_scale" in file:
            whole = whole.float() * file[f"{original}_scale"].reshape(-1, 1)
        whole = whole if order == "as they are" else torch.cat(whole.chunk(2)[::-1])
        sizes = [expected[part].shape[0] for part in parts]
        found |= dict(zip(parts, whole.split(sizes), strict=True))
    assert found.keys() == expected.keys() and done.formats["int8_tensorwise"] > 0
    for name, tensor in found.items():
        held = expected[name].reshape(tensor.shape)
        assert torch.equal(tensor, held.to(tensor.dtype)), name


# --- what cannot be written


@pytest.mark.slow
def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(plain_checkpoint, tmp_path) -> None:
    for recipe, dialect, words in (
        (
            "fp8",
            "comfy",
            r"cannot hold 32 of 38 layers; --requantize .*\n  transformer_blocks.\*.\{attn.to_q, .*no format for fp8 "
            r"weights; .*; fp8 has a scale for each row, its fp8_tensor one scale, its mxfp8 a scale for each 32",
        ),
        ("mxfp8", "bfl", "no format for mxfp8 weights; it holds fp8, nvfp4; mxfp8 has a scale for each 32 of a row"),
        ("int8", "nunchaku_lite", "no format for int8 weights"),
        ("fp8", "nunchaku", r"cannot hold 38 of 38 layers"),  # each proj_out is one, though the file has two of it
        ("int4-svd", "torchao", "no format for int4 weights"),
        ("int8", "modelopt", "W8A8_SQ_PER_CHANNEL needs input_scale, .* does not store: one calibrated scale of x"),
    ):
        folder = resolve_model(str(plain_checkpoint(recipe)))
        with pytest.raises(ValueError, match=words):
            export(folder, dialect, tmp_path / "x.safetensors")
    folder = resolve_model(str(plain_checkpoint("fp8")))
    for how, words in (
        ("vae", "no quantized component 'vae'; quantized are transformer"),
        ("text_encoder", "no quantized component 'text_encoder'"),
    ):
        with pytest.raises(ValueError, match=words):
            export(folder, "bfl", tmp_path / "x.safetensors", component=how)
    with pytest.raises(ValueError, match="no component for compressed_tensors; quantized are transformer"):
        export(folder, "compressed_tensors", tmp_path / "x")
    with pytest.raises(ValueError, match="compressed_tensors is for models of transformers"):
        export(folder, "compressed_tensors", tmp_path / "x", component="transformer")
    with pytest.raises(ValueError, match="holds no quantized component; give a folder that `fluxq quantize` wrote"):
        export(resolve_model("tiny"), "bfl", tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_layers_with_scales_of_their_own_are_not_joined(plain_checkpoint, tmp_path) -> None:
    folder = copy_of(plain_checkpoint("nvfp4"), tmp_path / "model")
    file = folder / "transformer" / WEIGHTS
    tensors = load_file(file)
    for name in ("weight_scale_2", "input_scale"):
        key = f"transformer_blocks.0.attn.to_k.{name}"
        save_file(tensors | {key: tensors[key] * 2}, file)
        with pytest.raises(ValueError, match=f"cannot hold 3 of 38 .*\n.*the file joins layers whose {name} differ"):
            export(resolve_model(str(folder)), "comfy", tmp_path / "x.safetensors")
        export(resolve_model(str(folder)), "bfl", tmp_path / "y.safetensors")  # which keeps them apart
        for made in tmp_path.glob("y.*"):
            made.unlink()


def test_requantize_rounds_into_the_nearest_format_and_says_what_it_cost(plain_checkpoint, tmp_path) -> None:
    folder = plain_checkpoint("fp8")
    target = tmp_path / "x.safetensors"
    done = export(resolve_model(str(folder)), "comfy", target, requantize=True)
    assert done.formats == {"float8_e4m3fn": 16, "int8_tensorwise": NORMED} and not done.dequantized
    layers, tensors = quantized_layers(loaded(folder)), load_file(target)
    costs = {changed.name: changed for changed in done.requantized}
    for name, parts in FUSED.items():
        before = torch.cat([layers[part].quantized_weight.dequantize() for part in parts])
        now = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
        off = relative(now, before)
        assert costs[name].added_error == pytest.approx(off, rel=1e-4) and 0.01 < off < 0.05
        assert (costs[name].was, costs[name].now) == ("fp8-fp8", "fp8_tensor-fp8_tensor")
    beside = [changed for changed in done.requantized if changed.was == "fp8-16bit"]
    assert len(beside) == NORMED and {changed.now for changed in beside} == {"int8-16bit"}  # which adds least
    assert all(changed.added_error < 0.015 for changed in beside)


@pytest.mark.parametrize("biases", [{"x"}, set()])
def test_a_bias_that_only_centring_gave_is_not_written_where_a_layer_is_rounded_again(biases) -> None:
    g, scheme = torch.Generator().manual_seed(0), Scheme.parse("int8-int8-center")
    tensors = QuantizedTensor.quantize(torch.randn(64, 128, generator=g), scheme.weights).tensors()
    tensors |= {"pre_quant_mean": torch.ones(128).bfloat16(), "bias": torch.ones(64).bfloat16()}
    choice, source = export_module.Choice(Unit("x", ("x",)), (), "it has a mean"), SimpleNamespace(biases=biases)
    layer, _ = export_module._rounded(
        cast(Any, source), [QuantTensors(tensors, (64, 128), scheme)], choice, Scheme.parse("fp8-fp8")
    )
    assert ("bias" in layer.tensors) == bool(biases)


def test_a_checkpoint_that_is_not_as_it_says_is_refused(plain_checkpoint, tmp_path) -> None:
    folder = copy_of(plain_checkpoint("fp8"), tmp_path / "model")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    for change, words in (
        (
            {"transformer_blocks.0.attn.to_q.weight_scale": torch.ones(7)},
            "to_q.weight_scale' is F32 .7,., config.json implies",
        ),
        ({"transformer_blocks.0.attn.to_q.weight": torch.ones(128, 128)}, "to_q.weight' is F32"),
        ({"transformer_blocks.0.attn.to_q.weight_scale": None}, "lack 'transformer_blocks.0.attn.to_q.weight_scale'"),
    ):
        save_file({n: t for n, t in (tensors | change).items() if t is not None}, file)
        with pytest.raises(ValueError, match=words):
            export(resolve_model(str(folder)), "bfl", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.slow
def test_an_export_is_there_whole_or_not_at_all(plain_checkpoint, tmp_path, monkeypatch) -> None:
    folder = resolve_model(str(plain_checkpoint("fp8")))
    target = tmp_path / "x.safetensors"
    export(folder, "bfl", target)
    before = target.read_bytes()
    export(folder, "bfl", target)  # had finished
    with pytest.raises(ValueError, match="exists; give another --output, or --overwrite"):
        export(resolve_model(str(plain_checkpoint("int8"))), "bfl", target, requantize=True)
    fails = Calls(native.NativeComponent.layer, after=5)
    monkeypatch.setattr(native.NativeComponent, "layer", lambda self, name: fails(self, name))
    with pytest.raises(OSError, match="no space"):
        export(folder, "bfl", target, overwrite=True)
    with pytest.raises(OSError, match="no space"):
        export(folder, "modelopt", tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.config.json", "x.safetensors"]
    assert target.read_bytes() == before
    monkeypatch.undo()
    export(folder, "modelopt", tmp_path / "folder")
    marker = tmp_path / "folder" / "mine"
    marker.touch()
    with pytest.raises(ValueError, match="is not replaced: nothing marks mine as fluxq's; remove it yourself"):
        export(folder, "modelopt", tmp_path / "folder", overwrite=True)
    marker.unlink()
    old = (tmp_path / "folder" / "model_index.json").stat().st_ino
    export(folder, "modelopt", tmp_path / "folder", overwrite=True)
    assert (tmp_path / "folder" / "model_index.json").stat().st_ino != old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "x.config.json", "x.safetensors"]


class Calls:
    """A function that fails as a full disk does, after some calls."""

    def __init__(self, function: Any, after: int) -> None:
        self.function, self.left = function, after

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError("no space")
        return self.function(*args)


@pytest.mark.slow
def test_the_command_writes_and_reports(plain_checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    folder = str(plain_checkpoint("fp8"))
    assert exchange.FORMATS == exchanging.EXPORTS
    done = run(cli.cli, ["export", folder, "--format", "bfl", "--json"])
    said = json.loads(done.stdout)
    assert done.exit_code == 0 and said["target"] == "tiny-fp8-bfl.safetensors" and said["formats"] == {"fp8r": 38}
    assert (tmp_path / said["target"]).stat().st_size < said["nbytes"]
    again = run(cli.cli, ["export", folder, "--format", "bfl"])
    assert again.exit_code == 0 and "written before" in again.output
    shown = run(cli.cli, ["export", folder, "--format", "comfy", "--requantize", "-o", "c.safetensors"])
    assert shown.exit_code == 0 and "rounded again" in shown.stdout and "fp8-fp8 -> fp8_tensor" in shown.stdout
    wrong = run(cli.cli, ["export", folder, "--format", "comfy", "--requantize", "-o", "c"])
    assert wrong.exit_code == 2 and "end in .safetensors" in wrong.output


TABLED = ("fp8", "fp8-comfy", "mxfp8", "int8", "int8-convrot", "nvfp4", "int4", "int4-svd")
DOC = Path(__file__).parents[2] / "docs" / "exchange.md"


def recipes_table(checkpoint_of: Any, folder: Path) -> str:
    """The table "Which recipe goes where" of docs/exchange.md, from what `export` does."""
    flux = next(catalogue.models("FLUX.1-dev"))
    names = [name for name in WRITERS if name not in ("compressed_tensors", "fp8_blocks")]
    heads = [f"`{name}`" for name in names]
    lines = [f"| recipe | checkpoint, GB | {' | '.join(heads)} |", "|---" * (len(names) + 2) + "|"]
    for recipe in TABLED:
        cells = [f"{flux.size(recipe).checkpoint_bytes / 1e9:.1f}"]
        modulation = [layer for layer in flux.plan(recipe).layers if layer.role == MODULATION_ROLE]
        in_16_bit = sum(2 * layer.n * layer.k - layer.most_stored_bits / 8 for layer in modulation)
        for name in names:
            try:
                done = export(resolve_model(str(checkpoint_of(recipe))), name, folder / recipe / name / "x.safetensors")
                changed = {each.now.partition("-")[0] for each in (*done.dequantized, *done.requantized)}
                own = str(modulation[0].scheme).partition("-")[0]
                size = flux.size(recipe).checkpoint_bytes + in_16_bit * bool(done.dequantized)
                assert changed <= {"16bit"} or changed == {"fp8"}  # fp8 takes as many bits as the int8 that it was
                cells.append(f"{' '.join(changed) or own}, {size / 1e9:.1f}")
            except ValueError as error:
                assert "cannot hold" in str(error), error
                cells.append("requantize")
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.long
def test_the_table_of_the_documentation_is_what_export_does(checkpoint, tmp_path) -> None:
    text = DOC.read_text(encoding="utf-8")
    written = text.partition("<!-- recipes -->\n")[2].partition("<!-- /recipes -->")[0].strip()
    assert written == recipes_table(checkpoint, tmp_path)


def fold_of(factors: Tensor) -> native.Fold:
    vectors = native.Vectors(torch.zeros_like(factors), factors, ("out",), ())
    return vectors.fold("v", slice(0, len(factors)), None, slice(0, len(factors)))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "int4", "int8", "fp8"])
def test_scales_of_every_format_take_powers_of_two_in(format) -> None:
    g = torch.Generator().manual_seed(0)
    factors = torch.exp2(-torch.randint(0, 8, (64,), generator=g).float())
    q = QuantizedTensor.quantize(torch.randn(64, 256, generator=g), format)
    stored = q.tensors()
    assert native._takes(stored["weight_scale"], fold_of(factors))
    scaled = native._into_codes(stored, fold_of(factors))
    made = replace(q, scale=scaled["weight_scale"].view(q.scale.dtype))
    assert relative(made.dequantize(), q.dequantize() * factors[:, None]) < 2.0**-9
    others = torch.full((64,), 0.7)
    assert native._takes(stored["weight_scale"], fold_of(others)) == (format in ("int8", "fp8", "int4"))


def test_a_mean_that_a_gated_unit_cannot_take_in_is_not_dropped() -> None:
    source: Any = object.__new__(NativeComponent)
    source.linears, source.shapes = {"b.up": (256, 64), "b.down": (64, 128)}, {"b.down": (64, 128)}
    source.schemes, source.biases, source.stored = {"b.down": Scheme.parse("int8-int8-center")}, {"b.down"}, {}
    source.small = lambda name, suffix: torch.full((128,), 3.0) if suffix == "pre_quant_mean" else None
    why_not = source._into_producers(["b.down"], "b", gated("ff_down", "b", "down", "up"))
    assert why_not == "no Linear that makes its input can take in a mean"
