"""ComfyUI itself on our files: its loader in a process of its own, which is given a checkout and imports no fluxq.

    FLUXQ_COMFYUI=/path/to/ComfyUI FLUXQ_COMFYUI_PYTHON=/its/venv/bin/python pytest tests/exchange/test_comfyui.py

It finds out by names and shapes what a model is, so that these models have few blocks and the rest as published: 16
latent channels, heads of 128 where it takes no other. On a CPU it widens weights and rounds no x, but of int8.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from exchange_files import export
from exchange_readers import READERS
from safetensors.torch import load_file, save_file
from shared import said_by
from tiny_configs import TINY_CONFIGS
from torch import Tensor

import fluxq
from fluxq.base.model import resolve_model
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.exchange import comfy
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.keymaps import original_names
from fluxq.recipes.recipe import find_recipe
from tests.exchange.test_layers import quantized

CHECKOUT = os.environ.get("FLUXQ_COMFYUI", "")
PYTHON = os.environ.get("FLUXQ_COMFYUI_PYTHON", sys.executable)
given = pytest.mark.skipif(not CHECKOUT, reason="FLUXQ_COMFYUI names no checkout of ComfyUI")

# argv: JSON of [file, inputs, what was read, formats]. What ComfyUI says of names is in its log alone.
READ = """
import io, json, logging, sys
checkout, jobs = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, checkout)
sys.argv = ["main.py", "--cpu"]
log = io.StringIO()
logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(log)], force=True)
import comfy.options
comfy.options.enable_args_parsing()
import torch
import comfy.sd
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from comfyui_version import __version__
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
torch.set_grad_enabled(False)
patchers, models = [], []  # kept: one that is collected at the end of the process complains
for file, inputs, out, formats in jobs:
    if not set(formats) <= QUANT_ALGOS.keys():
        models.append(None)
        continue
    at = log.tell()
    patchers.append(comfy.sd.load_diffusion_model(file))
    net = patchers[-1].model.diffusion_model
    said = log.getvalue()[at:].lower()
    told = [line for line in said.splitlines() if any(word in line for word in ("missing", "unexpected", "left over"))]
    formats, held = {}, dict(net.named_buffers())
    for name, value in net.named_parameters():
        held[name] = value.dequantize() if isinstance(value, QuantizedTensor) else value.data
        if isinstance(value, QuantizedTensor):
            formats[name.removesuffix(".weight")] = net.get_submodule(name.removesuffix(".weight")).quant_format
    arguments = load_file(inputs)
    held[":output"] = net(arguments.pop("x"), arguments.pop("t"), **arguments)
    save_file({name: value.float().contiguous().clone() for name, value in held.items()}, out)
    parameters = [name for name, _ in net.named_parameters()]
    models.append({"told": told, "formats": formats, "parameters": parameters, "class": type(net).__name__})
assert "fluxq" not in sys.modules
print(json.dumps({"version": __version__, "models": models}))
"""

# A layer that was exported, as a GPU would take it: x is rounded too, and comfy-kitchen's eager backend multiplies.
MULTIPLY = """
import sys
checkout, file, out = sys.argv[1:]
sys.path.insert(0, checkout)
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
import comfy.ops
from safetensors.torch import load_file, save_file
tensors = load_file(file)
x = tensors.pop("x")
layer = comfy.ops.mixed_precision_ops({}, torch.bfloat16).Linear(x.shape[1], tensors["bias"].shape[0])
layer.load_state_dict(tensors)
with torch.no_grad():
    save_file({"y": layer(x)}, out)
"""

# Family -> what differs from its tiny configuration, and ComfyUI's class of it.
LIKE_PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "flux": (
        {"in_channels": 64, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56), "guidance_embeds": True},
        "Flux",
    ),
    "flux2": (
        {
            "in_channels": 128,
            "attention_head_dim": 128,
            "axes_dims_rope": (32, 32, 32, 32),
            "timestep_guidance_channels": 256,
        },
        "Flux",
    ),
    "sd3": ({"in_channels": 16, "out_channels": 16, "patch_size": 2}, "OpenAISignatureMMDITWrapper"),
    "wan": (
        {
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "image_dim": None,
            "added_kv_proj_dim": None,
        },
        "WanModel",
    ),
}
MODELS = [  # family, recipe, ComfyUI's formats, and how far outputs may be apart
    ("flux", "nvfp4", {"nvfp4", "int8_tensorwise"}, 2e-3),  # modulation in int8, as below
    ("flux", "mxfp8", {"mxfp8", "int8_tensorwise"}, 2e-3),
    ("flux", "fp8_tensor", {"float8_e4m3fn"}, 1e-5),
    ("flux", "mixed", {"nvfp4", "mxfp8", "float8_e4m3fn"}, 1e-5),
    ("flux", "int8", {"int8_tensorwise"}, 2e-3),  # rounds each token of x to int8
    ("flux", "int8-convrot", {"int8_tensorwise"}, 2e-3),  # and rotates it before
    ("flux", "mixed with int8", {"nvfp4", "mxfp8", "float8_e4m3fn", "int8_tensorwise"}, 2e-3),
    ("sd3", "nvfp4", {"nvfp4", "int8_tensorwise"}, 2e-3),
    *((family, "nvfp4", {"nvfp4"}, 1e-5) for family in ("flux2", "wan")),
]

MIXED = {  # overrides of nvfp4.yaml, as `fluxq auto --for comfy` writes them: pattern -> format, "" for 16 bit
    "mixed": {"transformer_blocks.0.**": "mxfp8", "**.ff.**": "fp8_tensor", "**.proj_out": ""},
    "mixed with int8": {
        "transformer_blocks.0.**": "mxfp8",
        "**.ff.**": "fp8_tensor",
        "transformer_blocks.*.ff_context.**": "nvfp4",
        "single_transformer_blocks.**": "int8",
        "**.proj_out": "",
    },
}


def inputs_of(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same arguments for ComfyUI, and for diffusers."""
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    if family == "wan":
        x, t, context = draw(1, 16, 2, 8, 8), torch.tensor([500.0]), draw(1, 5, 4096)
        return {"x": x, "t": t, "context": context}, {
            "hidden_states": x,
            "timestep": t,
            "encoder_hidden_states": context,
        }
    context, y = draw(1, 5, 64), draw(1, 64)
    if family == "sd3":
        x, t = draw(1, 16, 8, 8), torch.tensor([500.0])
        theirs = {"hidden_states": x, "timestep": t, "encoder_hidden_states": context, "pooled_projections": y}
        return {"x": x, "t": t, "context": context, "y": y}, theirs
    x = draw(1, 16, 8, 6) if family == "flux" else draw(1, 128, 4, 3)
    t, guidance, axes = torch.tensor([0.5]), torch.tensor([3.5]), 3 if family == "flux" else 4
    ids, text = torch.zeros(4, 3, axes), torch.zeros(5, axes)
    ids[..., 1] += torch.arange(4).unsqueeze(1)
    ids[..., 2] += torch.arange(3)
    ours = {"x": x, "t": t, "context": context, "guidance": guidance}
    theirs = {"hidden_states": packed(x, family), "timestep": t, "encoder_hidden_states": context, "guidance": guidance}
    if family == "flux":
        ours["y"] = theirs["pooled_projections"] = y
    else:
        text[:, 3] = torch.arange(5)
    return ours, theirs | {"img_ids": ids.reshape(-1, axes), "txt_ids": text}


def packed(x: Tensor, family: str) -> Tensor:
    """Latents as diffusers' model has them, which in FLUX are a sequence of patches."""
    if not family.startswith("flux"):
        return x
    size = 2 if family == "flux" else 1
    b, c, h, w = x.shape
    return x.reshape(b, c, h // size, size, w // size, size).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * size * size)


def recipe_of(name: str, folder: Path) -> str:
    """A shipped recipe; fp8.yaml with one scale for each tensor, which ComfyUI wants; or nvfp4.yaml with overrides."""
    if name not in ("fp8_tensor", *MIXED):
        return name
    overrides = MIXED.get(name, {})
    recipe = yaml.safe_load(Path(find_recipe("nvfp4" if overrides else "fp8")).read_text(encoding="utf-8"))
    settings = recipe["components"]["transformer"]
    settings["overrides"] = [
        {"match": pattern, "reason": "mixed", **{part: {"format": to} for part in ("weights", "activations") if to}}
        for pattern, to in overrides.items()
    ]
    for part in ("modulation",) if overrides else ("weights", "activations", "modulation"):
        settings[part]["format"] = "fp8_tensor"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(folder / f"{name}.yaml")


def exported(family: str, recipe: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], Path, list[str]]:
    """Export a random model; return its weights by diffusers' names, its configuration, the file, and its formats."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    row = FAMILIES[family]
    kind, config = getattr(diffusers, row.model), {**TINY_CONFIGS[row.name], **LIKE_PUBLISHED[family][0]}
    kind.from_config(config).to(torch.bfloat16).save_pretrained(folder / "16bit")
    rules = fluxq.FluxqConfig(recipe=recipe_of(recipe, folder), profile="rtn")
    model = kind.from_pretrained(folder / "16bit", dtype=torch.bfloat16, quantization_config=rules)
    model.save_pretrained(folder / "model" / "transformer")
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", row.model]}
    (folder / "model" / "model_index.json").write_text(json.dumps(index))
    done = export(resolve_model(str(folder / "model")), "comfy", folder / "x.safetensors")
    in_16_bit = {changed.name for changed in done.dequantized}
    renamed = {part: j.original for j in original_names(family, model.state_dict().keys()) for part in j.parts}
    state = dict(model.state_dict())
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, QuantLinear)]:
        state = {key: value for key, value in state.items() if key.rpartition(".")[0] != name}
        weight, bias = layer.collapsed()
        rounded = renamed[f"{name}.weight_scale"].rpartition(".")[0] in in_16_bit
        state[f"{name}.weight"] = weight.bfloat16() if rounded else weight
        state |= {} if bias is None else {f"{name}.bias": bias}
    return {name: value.float() for name, value in state.items()}, config, folder / "x.safetensors", [*done.formats]


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Return ComfyUI's version and, of every model, [(expected weights, configuration, what it held, what it said)]."""
    root, models, jobs = tmp_path_factory.mktemp("comfyui"), [], []
    for number, (family, recipe, *_) in enumerate(MODELS):
        state, config, file, formats = exported(family, recipe, root / str(number))
        save_file(inputs_of(family)[0], root / f"{number}-inputs.safetensors")
        inputs, out = (str(root / f"{number}-{what}.safetensors") for what in ("inputs", "read"))
        jobs.append([str(file), inputs, out, formats])
        models.append((state, config))
    said = json.loads(said_by([PYTHON, "-c", READ, CHECKOUT, json.dumps(jobs)], root).splitlines()[-1])
    read = [
        (*model, load_file(job[2]) if m else {}, m) for model, job, m in zip(models, jobs, said["models"], strict=True)
    ]
    return said["version"], read


@given
@pytest.mark.reader("ComfyUI", "comfy")
@pytest.mark.parametrize("number", range(len(MODELS)), ids=[f"{family}-{recipe}" for family, recipe, *_ in MODELS])
def test_comfyui_loads_and_computes_what_was_exported(read, number) -> None:
    family, _, kinds, far = MODELS[number]
    state, config, held, said = read[1][number]
    if said is None:
        pytest.skip(f"ComfyUI {read[0]} lacks a format of this file")
    assert said["told"] == [] and said["class"] == LIKE_PUBLISHED[family][1]
    assert set(said["formats"].values()) == kinds and len(said["formats"]) >= 8
    whole = {}
    for joined in original_names(family, state.keys()):
        rows = torch.cat([state[part] for part in joined.parts])
        rows = torch.cat(rows.chunk(2)[::-1]) if joined.order == "halves swapped" else rows
        whole[joined.original.replace("_norm.scale", "_norm.weight")] = rows
    assert set(said["parameters"]) <= whole.keys() <= held.keys()
    for name, value in whole.items():
        assert torch.equal(held[name].reshape(value.shape), value), name
    model = getattr(diffusers, FAMILIES[family].model).from_config(config)
    model.load_state_dict(state)
    with torch.no_grad():
        expected = model(**inputs_of(family)[1], return_dict=False)[0]
    ours = packed(held[":output"], family)
    assert ((ours - expected).norm() / expected.norm()).item() < far


@given
def test_comfyui_rounds_x_by_our_scales_and_factors(tmp_path) -> None:
    layer = quantized("nvfp4-nvfp4-static-smooth", 128, 256)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    spread = (x * layer.tensors["pre_quant_scale"]).abs().max().float()
    layer.tensors["input_scale"] = spread / (448 * 6)
    save_file({**comfy.encode(layer).tensors, "x": x}, tmp_path / "in.safetensors")
    files = [str(tmp_path / name) for name in ("in.safetensors", "out.safetensors")]
    said_by([PYTHON, "-c", MULTIPLY, CHECKOUT, *files], tmp_path)
    theirs, ours = load_file(tmp_path / "out.safetensors")["y"].float(), layer.linear()(x).detach().float()
    weight, bias = layer.linear().collapsed()
    wide = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert ((theirs - ours).norm() / ours.norm()).item() < 0.01  # of outputs in bf16
    assert ((ours - wide).norm() / wide.norm()).item() > 0.05  # what rounding x costs


@pytest.mark.slow
def test_int4_is_not_written_for_a_program_that_has_no_such_format(plain_checkpoint, tmp_path) -> None:
    folder, target = resolve_model(str(plain_checkpoint("int4"))), tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="does not load awq_w4a16"):
        export(folder, "comfy", target)
    done = export(folder, "comfy", target, requantize=True)
    assert done.formats.keys() == {"nvfp4", "int8_tensorwise"}
    assert {changed.now for changed in done.requantized} == {"nvfp4-16bit"}  # and modulation in int8 moved as it is


def test_a_note_says_where_comfyui_rounds_x_without_a_scale() -> None:
    layer = quantized("fp8_tensor-fp8_tensor")
    (note,) = comfy.encode(layer).notes
    assert "clips it at 448" in note
    assert not comfy.encode(quantized("fp8_tensor-fp8_tensor-static")).notes
    assert not comfy.encode(quantized("fp8_tensor-16bit")).notes and not comfy.encode(quantized("mxfp8-mxfp8")).notes


@given
@pytest.mark.reader("ComfyUI", "comfy")
def test_it_is_the_comfyui_that_the_page_names(read) -> None:
    (reader,) = [each for each in READERS if (each.program, each.dialect) == ("ComfyUI", "comfy")]
    assert read[0] == reader.version
    assert {form for *_, said in read[1] if said for form in said["formats"].values()} == set(reader.formats)
