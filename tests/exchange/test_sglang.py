"""SGLang-Diffusion itself on our files, in a process of its own, which imports no fluxq.

    FLUXQ_SGLANG_PYTHON=/its/venv/bin/python pytest tests/exchange/test_sglang.py

On a CPU it finds out what a file is, which layers are in 16 bit, makes parameters for the others, and brings codes and
scales into rows, in its own order; its kernels, and the models that are built around them, want a GPU.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_files import export
from exchange_readers import READERS
from safetensors.torch import load_file
from shared import said_by

from fluxq.base.model import resolve_model

PYTHON = os.environ.get("FLUXQ_SGLANG_PYTHON", "")
given = pytest.mark.skipif(not PYTHON, reason="FLUXQ_SGLANG_PYTHON names no interpreter that has SGLang-Diffusion")

# argv: JSON of [folder or file, {layer: [N, K]}, what was read].
READ = """
import importlib.metadata, json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from safetensors.torch import load_file, save_file
from sglang.multimodal_gen.runtime.layers.quantization import modelopt_quant
from sglang.multimodal_gen.runtime.utils import quantization_utils as utils

def read(path, layers, out):
    if path.is_dir():
        folder = path / "transformer"
        files = sorted(map(str, folder.glob("*.safetensors")))
        config = utils.get_quant_config(json.loads((folder / "config.json").read_text()), str(folder))
        said = {"config": type(config).__name__, "ignored": [n for n in layers if config.is_layer_excluded(n)]}
    else:
        files = [str(path)]
        markers = utils.inspect_comfy_quant_markers(files)
        said = {"config": type(utils.resolve_comfy_checkpoint_quantization(markers)).__name__,
                "formats": {name: marker["format"] for name, marker in markers.items()}}
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
    except ValueError as error:
        models.append({"error": str(error)})
assert "fluxq" not in sys.modules
print(json.dumps({"version": importlib.metadata.version("sglang"), "models": models}))
"""

MODELS = [("nvfp4", "modelopt"), ("fp8", "modelopt"), ("nvfp4", "comfy"), ("mxfp8", "comfy"), ("int8", "comfy")]


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


@pytest.fixture(scope="module")
def read(plain_checkpoint, tmp_path_factory):
    """Of every file: (what it holds, its Linears, what SGLang made of it, what it said)."""
    root, asked, models = tmp_path_factory.mktemp("sglang"), [], []
    for recipe, dialect in MODELS:
        target = root / f"{recipe}-{dialect}{'.safetensors' if dialect == 'comfy' else ''}"
        export(resolve_model(str(plain_checkpoint(recipe))), dialect, target)
        models.append(shapes_of(target))
        asked.append([str(target), models[-1][1], str(root / f"{recipe}-{dialect}-read.safetensors")])
    said = json.loads(said_by([PYTHON, "-c", READ, json.dumps(asked)], root).splitlines()[-1])
    held = [load_file(job[2]) if Path(job[2]).exists() else {} for job in asked]
    of_each = zip(MODELS, models, held, said["models"], strict=True)
    return said["version"], {key: (*model, rows, words) for key, model, rows, words in of_each}


@given
@pytest.mark.reader("SGLang-Diffusion", "modelopt")
def test_sglang_reads_a_folder_of_modelopts(read) -> None:
    held, linears, rows, said = read[1]["nvfp4", "modelopt"]
    in_16_bit = [name for name in linears if f"{name}.weight_scale" not in held]
    assert said["config"] == "ModelOptFp4Config" and "proj_out" in in_16_bit
    assert said["ignored"] == said["found ignored"] == in_16_bit  # by config.json alone, and by the file
    assert (said["swap"], said["order"], said["group"]) == (False, "linear", 16)
    require_rows(rows, held, linears.keys() - set(in_16_bit))
    *_, said = read[1]["fp8", "modelopt"]
    assert "FP8_PER_CHANNEL_PER_TOKEN" in said["error"]


@given
@pytest.mark.reader("SGLang-Diffusion", "comfy")
def test_sglang_reads_comfyuis_files(read) -> None:
    held, linears, rows, said = read[1]["nvfp4", "comfy"]
    in_16_bit = [name for name in linears if f"{name}.weight_scale" not in held]
    assert said["config"] == "ComfyNvfp4Config" and said["found ignored"] == in_16_bit
    assert (said["swap"], said["order"]) == (True, "swizzled")
    rowwise = read[1]["nvfp4", "modelopt"][0]  # of the same codes, by diffusers' names
    doubles = "transformer_blocks.0.attn."
    for part in ("weight", "weight_scale"):
        whole = torch.cat([rowwise[f"{doubles}to_{each}.{part}"].view(torch.uint8) for each in "qkv"])
        assert torch.equal(rows[f"double_blocks.0.img_attn.qkv.{part}"].view(torch.uint8), whole), part
    for recipe, config, kind in (("mxfp8", "MXFP8Config", "mxfp8"), ("int8", "ConvRotInt8Config", "int8_tensorwise")):
        held, _, _, said = read[1][recipe, "comfy"]
        assert said["config"] == config and set(said["formats"].values()) == {kind}
        assert said["formats"].keys() == {n.removesuffix(".comfy_quant") for n in held if n.endswith(".comfy_quant")}


@given
def test_the_version_that_was_run_and_its_formats_are_the_tables(read) -> None:
    of_each = {reader.dialect: reader for reader in READERS if reader.program == "SGLang-Diffusion"}
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
