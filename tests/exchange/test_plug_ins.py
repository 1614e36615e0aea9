"""The engines' own code finds and calls fluxq's plug-ins, in a process of its own.

    FLUXQ_VLLM_OMNI_PYTHON=… FLUXQ_SGLANG_PYTHON=… pytest tests/exchange/test_plug_ins.py

The interpreter needs the engine and what `fluxq` needs to run a checkpoint; fluxq itself is this checkout.
"""

import json
import os
import tomllib
from pathlib import Path

import diffusers
import pytest
import torch
import yaml
from shared import said_by

from fluxq import FluxqConfig, tiny
from fluxq.integrations.engine import SGLANG, VLLM_OMNI

ROOT = Path(__file__).parents[2]
OMNI, SGL = (os.environ.get(name, "") for name in ("FLUXQ_VLLM_OMNI_PYTHON", "FLUXQ_SGLANG_PYTHON"))
with_omni = pytest.mark.skipif(not OMNI, reason="FLUXQ_VLLM_OMNI_PYTHON names no interpreter that has vLLM-Omni")
with_sglang = pytest.mark.skipif(not SGL, reason="FLUXQ_SGLANG_PYTHON names no interpreter that has SGLang-Diffusion")

# argv: folders that hold fluxq, and its metadata; a checkpoint.
FIND_OMNI = """
import sys
sys.path[:0] = sys.argv[1:3]
import importlib.metadata, json
from types import SimpleNamespace
from vllm_omni import plugins
found = plugins.load_omni_plugins_by_group(plugins.OMNI_DEFAULT_PLUGINS_GROUP)
for plug_in in found.values():
    plug_in()
heavy = "vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter" in sys.modules
import torch
from vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter import DiffusersAdapterPipeline
adapter = DiffusersAdapterPipeline.__new__(DiffusersAdapterPipeline)
torch.nn.Module.__init__(adapter)
attention = SimpleNamespace(default=None)
adapter.device, adapter.od_config = torch.device("cpu"), SimpleNamespace(
    model=sys.argv[3], dtype=torch.bfloat16, diffusers_load_kwargs={}, quantization_config=None, model_class_name=None,
    enable_layerwise_offload=False, enable_cpu_offload=False, vae_use_slicing=False, vae_use_tiling=False,
    diffusers_pipeline_cls=None, diffusion_attention_config=attention,
)
adapter.load_weights()
blocks = adapter._pipeline.transformer.transformer_blocks
print(json.dumps({"version": importlib.metadata.version("vllm-omni"), "found": sorted(found), "heavy": heavy,
                  "fused": sum(hasattr(type(block), "fused_from") for block in blocks)}))
"""

FIND_SGLANG = """
import sys
sys.path[:0] = sys.argv[1:3]
import importlib.metadata, json
from types import SimpleNamespace
from sglang.multimodal_gen.runtime.platforms import plugins
plugins.get_selected_platform_dist = lambda: None  # it looks for a device
plugins.load_plugins()
hooks = list(plugins.HookRegistry._hooks)
heavy = "sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline" in sys.modules
plugins.apply_plugin_hooks()
import torch
from sglang.multimodal_gen.runtime.pipelines import diffusers_pipeline as engine
engine.get_local_torch_device = lambda: torch.device("cpu")
engine.maybe_download_model = lambda path, **_: path
engine.DiffusersPipeline._get_dtype = lambda self, _: torch.bfloat16
config = SimpleNamespace(quantization_config=None, vae_slicing=False, vae_tiling=False)
arguments = SimpleNamespace(
    trust_remote_code=False, revision=None, pipeline_config=config, component_residency=None, attention_backend=None,
    should_cpu_offload_component=lambda name: False, cache_dit_config=None, enable_torch_compile=False,
)
engine.resolve_diffusers_pipeline_offload = lambda residency: False
wrapper = engine.DiffusersPipeline.__new__(engine.DiffusersPipeline)
pipe = wrapper._load_diffusers_pipeline(sys.argv[3], arguments)
blocks = pipe.transformer.transformer_blocks
print(json.dumps({"version": importlib.metadata.version("sglang"), "hooks": hooks, "heavy": heavy,
                  "applied": sorted(plugins.HookRegistry._patched),
                  "fused": sum(hasattr(type(block), "fused_from") for block in blocks)}))
"""

# argv: folders that hold fluxq, and its metadata; a file for processes to meet; folders of FLUX.1 transformers.
NATIVE = """
import sys
sys.path[:0] = sys.argv[1:3]
import importlib, json, os
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
from vllm_omni import plugins
for plug_in in plugins.load_omni_plugins_by_group(plugins.OMNI_DEFAULT_PLUGINS_GROUP).values():
    plug_in()
from safetensors import safe_open
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.diffusion.data import TransformerConfig
from vllm_omni.diffusion.distributed import parallel_state
from vllm_omni.diffusion.model_loader import diffusers_loader
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs
sdpa = DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()
type(vllm_omni.platforms.current_omni_platform).get_diffusion_attn_backend_cls = classmethod(lambda *a, **k: sdpa)
from vllm_omni.diffusion.attention.backends import abstract
abstract.AttentionImpl.forward = lambda self, *a: self.forward_cuda(*a)  # torch's SDPA: it knows no platform of a CPU
import diffusers

def native(folder, file):
    described = json.loads((folder / "config.json").read_text())
    transformer = TransformerConfig.from_dict(described)
    config = transformer.quant_config
    kind = getattr(importlib.import_module("vllm_omni.diffusion.models." + file), described["_class_name"])
    torch.set_default_dtype(torch.bfloat16)
    model = kind(quant_config=config, **get_transformer_config_kwargs(transformer, kind))
    torch.set_default_dtype(torch.float32)
    def weights():
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as handle:
                for name in handle.keys():
                    yield name, handle.get_tensor(name)
    source = SimpleNamespace(subfolder="transformer", prefix="")
    choose = diffusers_loader.get_checkpoint_adapter
    adapter = choose(model=model, source=source, quant_config=config, use_safetensors=True)
    loaded = model.load_weights(adapter.adapt(weights()) if adapter else weights())
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.quant_method.process_weights_after_loading(module)
    methods = [type(m.quant_method).__name__ for m in model.modules() if isinstance(m, LinearBase)]
    return model, {m: methods.count(m) for m in sorted(set(methods))}, type(config).__name__

def inputs(config):
    g = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=g).bfloat16()
    ids = torch.zeros(16, 3); ids[:, 1] = torch.arange(16) // 4; ids[:, 2] = torch.arange(16) % 4
    return dict(hidden_states=r(1, 16, config["in_channels"]),
        encoder_hidden_states=r(1, 8, config["joint_attention_dim"]),
        pooled_projections=r(1, config["pooled_projection_dim"]), timestep=torch.tensor([0.5]).bfloat16(),
        img_ids=ids, txt_ids=torch.zeros(8, 3), return_dict=False)

with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, "file://" + sys.argv[3], 0, "gloo")
    initialize_model_parallel(1)
    parallel_state._PP = parallel_state._SP = get_pp_group()
    out = []
    for folder in map(Path, sys.argv[4:]):
        config = json.loads((folder / "config.json").read_text())
        ours = diffusers.FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        model, methods, name = native(folder, "flux.flux_transformer")
        with torch.no_grad():
            a = ours(**inputs(config))[0].float()
            b = model(**inputs(config))[0].float()
        out.append({"config": name, "methods": methods, "difference": ((a - b).norm() / a.norm()).item()})
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> list[str]:
    """Folders to put on the path: this checkout, and metadata as an installer writes them of pyproject.toml."""
    folder = tmp_path_factory.mktemp("installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"fluxq-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fluxq\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return [str(ROOT / "src"), str(folder)]


@with_omni
def test_vllm_omni_finds_the_plug_in_and_its_back_end_prepares_a_checkpoint(installed, plain_checkpoint, tmp_path):
    said = said_by([OMNI, "-c", FIND_OMNI, *installed, str(plain_checkpoint("fp8"))], tmp_path)
    assert json.loads(said.splitlines()[-1]) == {
        "version": VLLM_OMNI.tried,
        "found": ["fluxq"],
        "heavy": False,
        "fused": 1,
    }


@with_sglang
def test_sglang_finds_the_plug_in_and_its_back_end_prepares_a_checkpoint(installed, plain_checkpoint, tmp_path):
    said = said_by([SGL, "-c", FIND_SGLANG, *installed, str(plain_checkpoint("fp8"))], tmp_path)
    loader = ["sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline.DiffusersPipeline._load_diffusers_pipeline"]
    assert json.loads(said.splitlines()[-1]) == {
        "version": SGLANG.tried,
        "hooks": loader,
        "heavy": False,
        "applied": loader,
        "fused": 1,
    }


@with_omni
def test_vllm_omnis_own_flux_computes_with_our_layers(installed, tmp_path) -> None:
    """Without rounded inputs no further from diffusers than the engine is in 16 bit; rounding turns ulps into codes."""
    said = yaml.safe_load((ROOT / "recipes" / "nvfp4.yaml").read_text(encoding="utf-8"))
    said["components"]["transformer"]["activations"] = None
    (tmp_path / "weights.yaml").write_text(yaml.safe_dump(said))
    folders = []
    for recipe in (None, tmp_path / "weights.yaml", "fp8"):
        how = {} if recipe is None else {"quantization_config": FluxqConfig(recipe, profile="rtn")}
        folders.append(tmp_path / str(len(folders)))
        kind = diffusers.FluxTransformer2DModel
        kind.from_pretrained(tiny.path() / "transformer", dtype=torch.bfloat16, **how).save_pretrained(folders[-1])
    words = [OMNI, "-c", NATIVE, *installed, str(tmp_path / "rendezvous"), *map(str, folders)]
    plain, weights, rounded = json.loads(said_by(words, tmp_path).splitlines()[-1])
    assert plain["config"] == "NoneType" and weights["config"] == rounded["config"] == "FluxqVllmConfig"
    assert weights["methods"] == rounded["methods"] == {"FluxqLinearMethod": 26, "UnquantizedLinearMethod": 1}
    assert 0 < weights["difference"] < 1.5 * plain["difference"] < 0.01
    assert rounded["difference"] < 0.03
