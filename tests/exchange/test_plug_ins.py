"""The engines' own code finds and calls fluxq's plug-ins, in a process of its own.

    FLUXQ_VLLM_OMNI_PYTHON=… FLUXQ_SGLANG_PYTHON=… pytest tests/exchange/test_plug_ins.py

The interpreter needs the engine and what `fluxq` needs to run a checkpoint; fluxq itself is this checkout.
"""

import json
import os
import tomllib
from pathlib import Path

import pytest
from shared import said_by

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
        "fused": 3,
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
        "fused": 3,
    }
