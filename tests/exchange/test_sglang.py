"""SGLang-Diffusion itself on our files, in a process of its own, which imports no fluxq.

    FLUXQ_SGLANG_PYTHON=/its/venv/bin/python pytest tests/exchange/test_sglang.py

On a CPU it finds out what a file is, which layers are in 16 bit, makes parameters for the others, and brings codes and
scales into rows, in its own order; its kernels, and the models that are built around them, want a GPU.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_files import export
from exchange_readers import READERS
from safetensors.torch import load_file
from shared import copy_of, said_by

import fluxq
from fluxq.base.files import read_json, write_json
from fluxq.base.model import resolve_model
from fluxq.recipes.computing import QuantizationConfig, Steps

PYTHON = os.environ.get("FLUXQ_SGLANG_PYTHON", "")
given = pytest.mark.skipif(not PYTHON, reason="FLUXQ_SGLANG_PYTHON names no interpreter that has SGLang-Diffusion")

# argv: JSON of [folder or file, {layer: [N, K]}, what was read].
READ = """
import importlib.metadata, json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from safetensors.torch import load_file, save_file
from sglang.multimodal_gen.runtime.layers.quantization import modelopt_fp8_step_precision, modelopt_quant
from sglang.multimodal_gen.runtime.layers.linear import LinearBase
from sglang.multimodal_gen.runtime.utils import quantization_utils as utils

def read(path, layers, out):
    if path.is_dir():
        folder = path / "transformer"
        files = sorted(map(str, folder.glob("*.safetensors")))
        described = json.loads((folder / "config.json").read_text())
        config = utils.get_quant_config(described, str(folder))
        policy = modelopt_fp8_step_precision.read_checkpoint_step_policy(described["quantization_config"])
        ends = policy and [policy.first_steps, policy.last_steps, policy.reasoner_a16]
        ignored = [name for name in layers if config.is_layer_excluded(name)]
        said = {"config": type(config).__name__, "policy": ends, "ignored": ignored}
    else:
        files = [str(path)]
        markers = utils.inspect_comfy_quant_markers(files)
        config = utils.resolve_comfy_checkpoint_quantization(markers)
        said = {"config": type(config).__name__, "formats": {name: m["format"] for name, m in markers.items()}}
        for name in said["formats"] if "nvfp4" in said["formats"].values() else ():
            if said["formats"][name] == "int8_tensorwise":
                config.get_quant_method(LinearBase.__new__(LinearBase), name)  # of a Linear, which may be refused
    found = utils.build_nvfp4_config_from_safetensors_list(files)
    if found is None:
        return said
    said |= {"found ignored": [n for n in layers if found.is_layer_excluded(n)], "swap": found.swap_weight_nibbles,
             "order": found.checkpoint_weight_scale_layout, "group": found.group_size}
    held, rows, method = {}, {}, modelopt_quant.ModelOptFp4LinearMethod(found)
    for file in files:
        held |= load_file(file)
    def keep(param, value):  # what the loaders of models do, without the devices
        assert value.dtype == param.dtype, (value.dtype, param.dtype)
        param.data.copy_(value.reshape(param.shape))
    for name, (n, k) in layers.items():
        if found.is_layer_excluded(name):
            continue
        layer = torch.nn.Module()
        method.create_weights(layer, k, [n], k, n, torch.bfloat16, weight_loader=keep)
        for part, param in layer.named_parameters():
            if f"{name}.{part}" in held:
                param.weight_loader(param, held[f"{name}.{part}"])
                rows[f"{name}.{part}"] = param.data.clone()
        swap = found.swap_weight_nibbles
        rows[f"{name}.weight"] = modelopt_quant._prepare_nvfp4_weight_bytes(layer.weight.data, swap_weight_nibbles=swap)
        rows[f"{name}.weight_scale"] = method._logical_weight_scales(layer).data.clone()
    save_file(rows, out)
    return said

models = []
for path, layers, out in json.loads(sys.argv[1]):
    try:
        models.append(read(Path(path), layers, out))
    except (ValueError, NotImplementedError) as error:
        models.append({"error": str(error)})
assert "fluxq" not in sys.modules
print(json.dumps({"version": importlib.metadata.version("sglang"), "models": models}))
"""

# argv: JSON of [transformer folder, {layer: [N, K]}].
READ_BLOCKS = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from sglang.multimodal_gen.runtime.layers.quantization import fp8
from sglang.multimodal_gen.runtime.utils import quantization_utils as utils
from sglang.srt.layers.quantization.utils import is_layer_skipped

folder, layers = json.loads(sys.argv[1])
described = json.loads(Path(folder, "config.json").read_text())
config = utils.get_quant_config(described, folder)
held = {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}
fp8.get_tensor_model_parallel_world_size = lambda: 1
method = fp8.Fp8LinearMethod.__new__(fp8.Fp8LinearMethod)  # its own constructor looks for the kernels of a GPU
method.quant_config, method.per_channel_serialized, method.block_quant = config, False, True
ignored = [name for name in layers if is_layer_skipped(name, config.ignored_layers)]
for name, (n, k) in layers.items():
    if name in ignored or name == "proj_out":
        continue
    layer = torch.nn.Module()
    method.create_weights(layer, k, [n], k, n, torch.bfloat16, weight_loader=None)
    for part, param in layer.named_parameters():
        value = held.pop(f"{name}.{part}")
        assert (value.dtype, value.shape) == (param.dtype, param.shape), (name, part)
left = [name for name in held if name.endswith("weight_scale_inv")]
said = {"config": type(config).__name__, "blocks": config.weight_block_size, "ignored": ignored, "left": left}
print(json.dumps(said))
"""

MODELS = [  # recipe, dialect, side layers: with "8bit" comfy's are int8
    *(("nvfp4", "modelopt", "8bit"), ("fp8", "modelopt", "8bit"), ("int8", "comfy", "8bit")),
    *((recipe, "comfy", side_layers) for recipe in ("nvfp4", "mxfp8") for side_layers in ("8bit", "16bit")),
]


def shapes_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """The tensors, and [N, K] of every Linear."""
    files = (path / "transformer").glob("*.safetensors") if path.is_dir() else [path]
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    twice = {name for name, tensor in held.items() if tensor.dtype == torch.uint8}  # two codes a byte
    shapes = {
        name.removesuffix(".weight"): [tensor.shape[0], tensor.shape[1] * (1 + (name in twice))]
        for name, tensor in held.items()
        if name.endswith(".weight") and tensor.ndim == 2
    }
    return held, shapes


def with_policy(checkpoint: Path, target: Path) -> Path:
    """A copy of the checkpoint whose recipe asks for 16-bit activations in a step at the start and two at the end."""
    file = copy_of(checkpoint, target) / "transformer" / "config.json"
    config = read_json(file)
    stored = QuantizationConfig.from_dict(config["quantization_config"])
    config["quantization_config"] = replace(stored, steps=Steps(first=1, last=2, components="a16")).to_dict()
    write_json(file, config)
    return target


@pytest.fixture(scope="module")
def read(plain_checkpoint, tmp_path_factory):
    """Of every file: (what it holds, its Linears, what SGLang made of it, what it said)."""
    root, asked, models = tmp_path_factory.mktemp("sglang"), [], []
    for recipe, dialect, side_layers in MODELS:
        target = root / f"{recipe}-{dialect}-{side_layers}{'.safetensors' if dialect == 'comfy' else ''}"
        checkpoint = plain_checkpoint(recipe)
        if dialect == "modelopt":
            checkpoint = with_policy(checkpoint, root / recipe)
        export(resolve_model(str(checkpoint)), dialect, target, side_layers=side_layers)
        models.append(shapes_of(target))
        asked.append([str(target), models[-1][1], str(root / f"{target.name}-read.safetensors")])
    said = json.loads(said_by([PYTHON, "-c", READ, json.dumps(asked)], root).splitlines()[-1])
    held = [load_file(job[2]) if Path(job[2]).exists() else {} for job in asked]
    of_each = zip(MODELS, models, held, said["models"], strict=True)
    return said["version"], {key: (*model, rows, words) for key, model, rows, words in of_each}


@given
@pytest.mark.reader("SGLang-Diffusion", "modelopt")
def test_sglang_reads_a_folder_of_modelopts(read) -> None:
    held, linears, rows, said = read[1]["nvfp4", "modelopt", "8bit"]
    in_16_bit = [name for name in linears if f"{name}.weight_scale" not in held]
    assert said["config"] == "ModelOptFp4Config" and "proj_out" in in_16_bit
    assert said["ignored"] == said["found ignored"] == in_16_bit  # by config.json alone, and by the file
    assert (said["swap"], said["order"], said["group"]) == (False, "linear", 16)
    require_rows(rows, held, linears.keys() - set(in_16_bit))
    *_, said = read[1]["fp8", "modelopt", "8bit"]
    assert "FP8_PER_CHANNEL_PER_TOKEN" in said["error"]


@given
@pytest.mark.reader("SGLang-Diffusion", "comfy")
def test_sglang_reads_comfyuis_files(read) -> None:
    held, linears, rows, said = read[1]["nvfp4", "comfy", "16bit"]
    in_16_bit = [name for name in linears if f"{name}.weight_scale" not in held]
    assert said["config"] == "ComfyNvfp4Config" and said["found ignored"] == in_16_bit
    assert (said["swap"], said["order"]) == (True, "swizzled")
    rowwise = read[1]["nvfp4", "modelopt", "8bit"][0]  # of the same codes, by diffusers' names
    doubles = "transformer_blocks.0.attn."
    for part in ("weight", "weight_scale"):
        whole = torch.cat([rowwise[f"{doubles}to_{each}.{part}"].view(torch.uint8) for each in "qkv"])
        assert torch.equal(rows[f"double_blocks.0.img_attn.qkv.{part}"].view(torch.uint8), whole), part
    alone = (("mxfp8", "16bit", "MXFP8Config", "mxfp8"), ("int8", "8bit", "ConvRotInt8Config", "int8_tensorwise"))
    for recipe, side_layers, config, kind in alone:
        held, _, _, said = read[1][recipe, "comfy", side_layers]
        assert said["config"] == config and set(said["formats"].values()) == {kind}
        assert said["formats"].keys() == {n.removesuffix(".comfy_quant") for n in held if n.endswith(".comfy_quant")}


@given
def test_sglang_takes_no_int8_linears_beside_others(read) -> None:
    """Modulation is int8 in these recipes, unless side layers are asked for in 16 bit."""
    *_, said = read[1]["mxfp8", "comfy", "8bit"]
    assert said == {"error": "Unsupported Comfy quantization format(s): int8_tensorwise, mxfp8"}
    *_, said = read[1]["nvfp4", "comfy", "8bit"]
    assert said["error"].startswith("Unsupported quantized linear marker for 'double_blocks.0.")


@given
@pytest.mark.reader("SGLang-Diffusion", "fp8_blocks")
def test_sglang_reads_blocks_of_fp8(tmp_path) -> None:
    part = {"weights": {"format": "fp8_128x128"}, "activations": {"format": "fp8_1x128"}}
    recipe = {"version": 1, "components": {"transformer": part}, "calibration": None, "profile": "rtn"}
    write_json(tmp_path / "blocks.yaml", recipe)
    fluxq.quantize_pipeline("tiny", tmp_path / "blocks.yaml", output=tmp_path / "out", check=False)
    export(resolve_model(str(tmp_path / "out")), "fp8_blocks", tmp_path / "theirs")
    held, linears = shapes_of(tmp_path / "theirs")
    asked = json.dumps([str(tmp_path / "theirs" / "transformer"), linears])
    said = json.loads(said_by([PYTHON, "-c", READ_BLOCKS, asked], tmp_path).splitlines()[-1])
    in_16_bit = [name for name in linears if f"{name}.weight_scale_inv" not in held]
    in_16_bit.remove("proj_out")  # of which its FLUX.1 makes no quantized layer
    assert said == {"config": "Fp8Config", "blocks": [128, 128], "ignored": in_16_bit, "left": []}


@given
def test_sglang_reads_the_policy_of_steps(read) -> None:
    *_, said = read[1]["nvfp4", "modelopt", "8bit"]
    assert said["policy"] == [1, 2, False]


@given
def test_the_version_that_was_run_and_its_formats_are_the_tables(read) -> None:
    of_each = {reader.dialect: reader for reader in READERS if reader.program == "SGLang-Diffusion"}
    assert of_each["fp8_blocks"].formats == ("fp8",)
    assert {reader.version for reader in of_each.values()} == {read[0]}
    assert set(of_each["modelopt"].formats) == {"NVFP4"}
    assert set(of_each["comfy"].formats) == {"nvfp4", "mxfp8", "int8_tensorwise"}


def require_rows(rows: dict[str, Any], held: dict[str, Any], quantized: set[str]) -> None:
    """Every tensor of a quantized layer came through as it is."""
    expected = {
        name: tensor
        for name, tensor in held.items()
        if name.rpartition(".")[0] in quantized and not name.endswith(".bias")
    }
    assert rows.keys() == expected.keys() and expected
    for name, tensor in expected.items():
        assert rows[name].dtype == tensor.dtype
        assert torch.equal(rows[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
