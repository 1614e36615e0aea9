"""The engines' own code finds and calls fluxq's plug-ins, in a process of its own.

    FLUXQ_VLLM_OMNI_PYTHON=… FLUXQ_SGLANG_PYTHON=… pytest tests/exchange/test_plug_ins.py

The interpreter needs the engine and what `fluxq` needs to run a checkpoint; fluxq itself is this checkout.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import diffusers
import pytest
import torch
from shared import said_by
from tiny_configs import TINY_CONFIGS

from fluxq import FluxqConfig
from fluxq.integrations.engine import SGLANG, VLLM_OMNI

ROOT = Path(__file__).parents[2]
# A family that vLLM-Omni has a model of -> diffusers' class, and Linears that compute with fluxq's ops in the tiny one.
OWN_MODELS = {
    "flux": ("FluxTransformer2DModel", 18),
    "qwen_image": ("QwenImageTransformer2DModel", 18),
    "z_image": ("ZImageTransformer2DModel", 16),
    "wan": ("WanTransformer3DModel", 20),
}
RECIPES = ("fp8", "nvfp4", "int8")
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
    return installed_in(tmp_path_factory.mktemp("installed"))


def installed_in(folder: Path) -> list[str]:
    """Return folders to put on the path: this checkout, and metadata as an installer writes them of pyproject.toml."""
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


def beside_diffusers(installed, folder: Path, runs: list[dict[str, str]], ranks: int = 1) -> list[dict]:
    """Return what vllm_omni_models.py says of each run, the same on every rank."""
    words = []
    for rank in range(ranks):
        given = {"path": installed, "meet": str(folder / f"meet_{ranks}"), "rank": rank, "ranks": ranks, "runs": runs}
        (folder / f"{ranks}_{rank}.json").write_text(json.dumps(given), encoding="utf-8")
        words.append([OMNI, str(Path(__file__).with_name("vllm_omni_models.py")), str(folder / f"{ranks}_{rank}.json")])
    with ThreadPoolExecutor(ranks) as pool:
        first, *others = (json.loads(said.splitlines()[-1]) for said in pool.map(lambda w: said_by(w, folder), words))
    assert all(other == first for other in others)
    return first


@pytest.fixture(scope="module", params=[*OWN_MODELS])
def own_model(request, tmp_path_factory) -> tuple[str, Path]:
    """Name of a family, and a folder of its model of few blocks in 16 bit and in recipes."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    write_models(family, folder, {recipe: recipe for recipe in RECIPES})
    return family, folder


def write_models(family: str, folder: Path, recipes: Mapping[str, str]) -> None:
    """Write a family's model of few blocks as `16bit`, and quantized by each recipe: name -> a recipe or its file."""
    model = getattr(diffusers, OWN_MODELS[family][0])
    torch.manual_seed(0)
    model(**TINY_CONFIGS[family]).to(torch.bfloat16).save_pretrained(folder / "16bit")
    for name, recipe in recipes.items():
        how = FluxqConfig(recipe, profile="rtn")
        quantized = model.from_pretrained(folder / "16bit", dtype=torch.bfloat16, quantization_config=how)
        quantized.save_pretrained(folder / name)


def runs_of(folder: Path, names: Iterable[str]) -> list[dict[str, str]]:
    """Return runs of a family's models in fp32 and in bf16, first the plain one of each."""
    plain = str(folder / "16bit")
    return [
        {"folder": str(folder / name), "plain": plain, "dtype": dtype}
        for dtype in ("float32", "bfloat16")
        for name in ("16bit", *names)
    ]


@with_omni
@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_omnis_own_models_compute_with_our_layers(installed, own_model, ranks) -> None:
    """As near to diffusers' as the engine's 16-bit model is; noise of that size moves diffusers' own as far.

    Rounding turns a difference of an ulp into one of a code, so it grows where inputs are rounded. In fp32 there is
    next to none to start from.
    """
    family, folder = own_model
    runs = runs_of(folder, RECIPES)
    said = beside_diffusers(installed, folder, runs, ranks)
    for run, found in zip(runs, said, strict=True):
        is_plain, dtype = run["folder"] == run["plain"], run["dtype"]
        assert found["config"] == ("NoneType" if is_plain else "FluxqVllmConfig")
        assert found["methods"].get("FluxqLinearMethod", 0) == (0 if is_plain else OWN_MODELS[family][1]), run
        assert found["difference"] < 2 * found["alike"] + 1e-6, run
        if is_plain:
            assert found["difference"] < (1e-4 if dtype == "float32" else 0.01), run
        elif ranks == 1 and dtype == "float32" and family in ("flux", "qwen_image"):
            assert found["difference"] == 0, run
