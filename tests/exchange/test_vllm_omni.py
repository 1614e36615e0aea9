"""vLLM-Omni itself on our ModelOpt folders, in a process of its own, which imports no fluxq.

    FLUXQ_VLLM_OMNI_PYTHON=/its/venv/bin/python pytest tests/exchange/test_vllm_omni.py

On a CPU it reads the configuration, makes the model's parameters, loads the files into them and prepares them for its
own reference kernels. An operator that its build for CUDA lacks there is declared, and not called.
"""

import json
import os
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from exchange_files import export
from exchange_readers import READERS
from safetensors.torch import load_file
from shared import quick, said_by
from tiny_configs import TINY_CONFIGS

import fluxq
from fluxq.base.model import resolve_model
from fluxq.jobs import making
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.exchange import modelopt
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.computing import QuantizationConfig, Steps
from fluxq.recipes.formats import Scheme

PYTHON = os.environ.get("FLUXQ_VLLM_OMNI_PYTHON", "")
given = pytest.mark.skipif(not PYTHON, reason="FLUXQ_VLLM_OMNI_PYTHON names no interpreter that has vLLM-Omni")

# argv: JSON of [folder, file of the model's class, what was read].
READ = """
import importlib, importlib.metadata, json, os, sys
os.environ["VLLM_BATCH_INVARIANT"] = "1"  # nvfp4 by its reference in torch, where there is no GPU
from pathlib import Path
from types import SimpleNamespace
import torch
torch.set_num_threads(1)
declared = torch.library.Library("_C", "FRAGMENT")
declared.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()
import vllm_omni.platforms
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.diffusion.data import TransformerConfig
from vllm_omni.diffusion.distributed import parallel_state
from vllm_omni.diffusion.model_loader.checkpoint_adapters import get_checkpoint_adapter
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs
sdpa = DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()
type(vllm_omni.platforms.current_omni_platform).get_diffusion_attn_backend_cls = classmethod(lambda *a, **k: sdpa)

def weight_of(module):
    values = dict(module.named_parameters())
    if isinstance(module.quant_method, UnquantizedLinearMethod):
        return values["weight"].float()
    if values["weight"].dtype == torch.uint8:
        parts = values["weight"], values["weight_scale"], values["weight_global_scale"]
        return dequantize_to_dtype(*parts, torch.float32, swizzle=False)
    return values["weight"].t().float() * values["weight_scale"].reshape(-1, 1)

def read(folder, file, out):
    described = json.loads((folder / "config.json").read_text())
    transformer = TransformerConfig.from_dict(described)
    config = transformer.quant_config
    kind = getattr(importlib.import_module("vllm_omni.diffusion.models." + file), described["_class_name"])
    arguments = get_transformer_config_kwargs(transformer, kind)
    if kind.__name__ == "QwenImageTransformer2DModel":
        parallel = SimpleNamespace(sequence_parallel_size=1, use_hsdp=False, tensor_parallel_size=1)
        arguments["od_config"] = SimpleNamespace(
            tf_model_config=transformer, parallel_config=parallel, dtype=torch.bfloat16, quantization_config=config
        )
    torch.set_default_dtype(torch.bfloat16)
    model = kind(quant_config=config, **arguments)
    torch.set_default_dtype(torch.float32)
    source = SimpleNamespace(subfolder="transformer", prefix="")
    adapter = get_checkpoint_adapter(model=model, source=source, quant_config=config, use_safetensors=True)
    def weights():
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as handle:
                for name in handle.keys():
                    yield name, handle.get_tensor(name)
    missing = set(dict(model.named_parameters())) - model.load_weights(adapter.adapt(weights()))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}
    quantized = [name for name, m in linears.items() if not isinstance(m.quant_method, UnquantizedLinearMethod)]
    for name in quantized:
        linears[name].quant_method.process_weights_after_loading(linears[name])
    save_file({name: weight_of(module).contiguous() for name, module in linears.items()}, out)
    scales = {name: getattr(linears[name], "input_global_scale", None) for name in quantized}
    scales = {name: scale.item() for name, scale in scales.items() if scale is not None}
    return {"config": type(config).__name__, "algo": config.quant_method, "adapter": type(adapter).__name__,
            "quantized": quantized, "missing": sorted(missing), "input_scales": scales}

with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, "file://" + sys.argv[1], 0, "gloo")
    initialize_model_parallel(1)
    parallel_state._PP = parallel_state._SP = get_pp_group()  # of one process; its own count devices
    models = []
    for folder, file, out in json.loads(sys.argv[2]):
        try:
            models.append(read(Path(folder) / "transformer", file, out))
        except Exception as error:
            torch.set_default_dtype(torch.float32)
            models.append({"error": f"{type(error).__name__}: {error}"})
assert "fluxq" not in sys.modules
print(json.dumps({"version": importlib.metadata.version("vllm-omni"), "models": models}))
"""

# argv: JSON of a quantization_config. The files that read a policy need nothing of the rest, which wants a GPU's vLLM.
POLICY = """
import importlib, importlib.util, json, sys
from types import ModuleType, SimpleNamespace
(package,) = importlib.util.find_spec("vllm_omni").submodule_search_locations
policies = sys.modules["policies"] = ModuleType("policies")
policies.__path__ = [package + "/diffusion/models/cosmos3/mixed_precision"]
config = SimpleNamespace(get_name=lambda: "modelopt_fp4", is_checkpoint_nvfp4_serialized=True)
model = SimpleNamespace(params={"quantization_config": json.loads(sys.argv[1])}, quant_config=config)
read = importlib.import_module("policies.checkpoint").read_checkpoint_policy(SimpleNamespace(tf_model_config=model))
print(json.dumps([read.first_steps, read.last_steps, read.reasoner]))
"""

MODELS = [  # family, recipe, excluded, the file of vLLM-Omni's class, and what is to be read there
    ("flux", "nvfp4", ("transformer_blocks.**",), "flux.flux_transformer", "NVFP4"),
    ("flux", "fp8", ("transformer_blocks.**",), "flux.flux_transformer", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("flux", "nvfp4", (), "flux.flux_transformer", None),  # blocks that it makes in 16 bit
    ("qwen_image", "fp8", (), "qwen_image.qwen_image_transformer", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("z_image", "fp8", (), "z_image.z_image_transformer", "FP8_PER_CHANNEL_PER_TOKEN"),
]
IDS = [f"{family}-{recipe}{'' if algo else '-refused'}" for family, recipe, _, _, algo in MODELS]
JOINED = {  # a Linear of theirs -> those of ours, in order
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "w13": ("w1", "w3"),
}


def exported(family: str, recipe: str, exclude: tuple[str, ...], folder: Path) -> torch.nn.Module:
    """Writes folder/out; the model it was made from, with our layers."""
    folder.mkdir(parents=True)
    file = quick(recipe, folder, fitted=False)
    said = yaml.safe_load(file.read_text())
    said["components"]["transformer"]["exclude"] = list(exclude)
    file.write_text(yaml.safe_dump(said))
    row = FAMILIES[family]
    kind = getattr(diffusers, row.model)
    if family == "flux":  # a pipeline, which calibrates
        making.quantize(
            making.job_of(making.JobOptions("tiny", recipe=str(file), output=str(folder / "model"), check=False))
        )
        model = kind.from_pretrained(folder / "model" / "transformer", dtype=torch.bfloat16)
    else:
        torch.manual_seed(0)
        kind.from_config(dict(TINY_CONFIGS[row.name])).to(torch.bfloat16).save_pretrained(folder / "16bit")
        rules = fluxq.FluxqConfig(recipe=str(file), profile="rtn")
        model = kind.from_pretrained(folder / "16bit", dtype=torch.bfloat16, quantization_config=rules)
        model.save_pretrained(folder / "model" / "transformer")
        index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", row.model]}
        (folder / "model" / "model_index.json").write_text(json.dumps(index))
    export(resolve_model(str(folder / "model")), "modelopt", folder / "out")
    return model


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Of every model: (ours, the folder that was written, the weights vLLM-Omni has, what it said)."""
    root, models, asked = tmp_path_factory.mktemp("omni"), [], []
    for number, (family, recipe, exclude, file, _) in enumerate(MODELS):
        models.append((exported(family, recipe, exclude, root / str(number)), root / str(number) / "out"))
        asked.append([str(root / str(number) / "out"), file, str(root / f"{number}.safetensors")])
    said = json.loads(said_by([PYTHON, "-c", READ, str(root / "rendezvous"), json.dumps(asked)], root).splitlines()[-1])
    held = [load_file(job[2]) if Path(job[2]).exists() else {} for job in asked]
    return said["version"], [(*m, h, s) for m, h, s in zip(models, held, said["models"], strict=True)]


def parts_of(name: str, names: set[str]) -> list[str]:
    """Our Linears that one of theirs is made of."""
    parent, _, last = name.rpartition(".")
    found = [f"{parent}.{part}" for part in JOINED.get(last, (last,))] if parent else [name]
    return [part if part in names else f"{part}.0" for part in found]


@given
@pytest.mark.reader("vLLM-Omni", "modelopt")
@pytest.mark.parametrize("number", range(len(MODELS)), ids=IDS)
def test_vllm_omni_loads_what_was_exported(read, number) -> None:
    model, folder, held, said = read[1][number]
    algo = MODELS[number][-1]
    if algo is None:
        assert said["error"].startswith("AssertionError")  # of a loader that has room for 16 bit there
        return
    assert "error" not in said, said["error"]
    assert said["algo"] == algo and said["missing"] == []
    described = json.loads((folder / "transformer" / "config.json").read_text())["quantization_config"]
    file: dict[str, Any] = {}
    for path in (folder / "transformer").glob("*.safetensors"):
        file |= load_file(path)
    names = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | QuantLinear)}
    in_codes = {name for name in names if f"{name}.weight_scale" in file}
    assert {part for name in said["quantized"] for part in parts_of(name, names)} == in_codes and in_codes
    assert described["quant_algo"] == algo
    for name, weight in held.items():
        rows = []
        for part in parts_of(name, names):
            layer = model.get_submodule(part)
            own = layer.collapsed()[0].float() if isinstance(layer, QuantLinear) else layer.weight.float()
            rows.append(own if part in in_codes else own.bfloat16().float())
        assert torch.equal(weight, torch.cat(rows)), name
        if name in said["input_scales"]:
            scales = {file[f"{part}.input_scale"].item() for part in parts_of(name, names)}
            assert scales == {said["input_scales"][name]}, name


@given
def test_vllm_omni_reads_the_policy_of_steps(tmp_path) -> None:
    steps = Steps(first=1, last=2, components="a16")
    ours = QuantizationConfig.of({"a": Scheme.parse("nvfp4-nvfp4-static")}.items(), steps=steps).to_dict()
    said = said_by([PYTHON, "-c", POLICY, json.dumps(modelopt.runtime(ours))], tmp_path)
    assert json.loads(said) == [1, 2, "native"]


@given
def test_the_version_that_was_run_and_its_formats_are_the_tables(read) -> None:
    (reader,) = [each for each in READERS if each.program == "vLLM-Omni"]
    assert reader.version == read[0]
    assert set(reader.formats) == {algo for *_, algo in MODELS if algo}
