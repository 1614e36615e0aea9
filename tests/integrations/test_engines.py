"""Plug-ins in engines, against small doubles of what they call and are called by: tests/exchange/test_plug_ins.py has
the engines themselves."""

import copy
import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import diffusers
import pytest
import torch

from fluxq import FluxqConfig, tiny
from fluxq.calibrate.paths import levels_of, list_of
from fluxq.integrations import engine, sglang, vllm_omni
from fluxq.integrations.engine import SGLANG, VLLM_OMNI, after_loading
from fluxq.runtime.attention_choice import BACKENDS

ENGINES = (VLLM_OMNI, SGLANG)
GROUPS = {VLLM_OMNI: "vllm_omni.general_plugins", SGLANG: "sglang.multimodal_gen.plugins"}  # of their entry points
DIFFUSERS = ("diffusers' pipelines", "prepares what was loaded")
OWN_MODELS = ("its own models", "computes their Linears with fluxq's ops")
BACK_ENDS = {VLLM_OMNI: (DIFFUSERS, OWN_MODELS), SGLANG: (DIFFUSERS,)}  # what the plug-in does in each
PLUG_INS = [(vllm_omni.plug_in, VLLM_OMNI), (sglang.plug_in, SGLANG)]
ROOT = Path(__file__).parents[2]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


@pytest.fixture(scope="module")
def loaded() -> diffusers.FluxTransformer2DModel:
    return diffusers.FluxTransformer2DModel.from_pretrained(
        tiny.path() / "transformer", quantization_config=FluxqConfig("int8", profile="rtn"), dtype=torch.bfloat16
    )


@pytest.fixture
def pipe(loaded):
    """A pipeline as an engine has it: its components, and a call that is not made here."""
    transformer = copy.deepcopy(loaded)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return SimpleNamespace(
        components={"transformer": transformer, "scheduler": scheduler}, transformer=transformer, scheduler=scheduler
    )


def fused(pipe: SimpleNamespace) -> int:
    """Blocks that compute in a fused form."""
    transformer = pipe.transformer
    blocks = (*transformer.transformer_blocks, *transformer.single_transformer_blocks)
    return sum(hasattr(type(block), "fused_from") for block in blocks)


def says(pipe: SimpleNamespace, **runtime: object) -> None:
    pipe.transformer.config.quantization_config._runtime = runtime


@pytest.fixture
def tried(monkeypatch):
    """The engines' packages are there, in the versions that were tried."""
    versions = {each.package: each.tried for each in ENGINES}
    monkeypatch.setattr(engine, "version", versions.__getitem__)
    return versions


def test_every_engine_has_an_entry_point() -> None:
    assert {engine: POINTS[group]["fluxq"] for engine, group in GROUPS.items()} == {
        VLLM_OMNI: "fluxq.integrations.vllm_omni:plug_in",
        SGLANG: "fluxq.integrations.sglang:plug_in",
    }


def test_entry_points_load_and_run_without_anything_heavy() -> None:
    code = (
        "import sys, importlib\n"
        f"for point in {[POINTS[group]['fluxq'] for group in GROUPS.values()]}:\n"
        "    module, name = point.split(':')\n"
        "    getattr(importlib.import_module(module), name)()\n"
        "print([name for name in ('torch', 'diffusers', 'transformers', 'pydantic', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_pipeline_is_prepared_and_optimized(pipe, caplog) -> None:
    caplog.set_level(logging.INFO, "fluxq")
    assert after_loading(pipe, VLLM_OMNI) == ["optimize"]  # int8 needs no preparing on a CPU
    assert "fluxq in vLLM-Omni, after loading: optimize" in caplog.text
    assert fused(pipe) == 5


def test_runtime_chooses_and_its_unknown_keys_are_nothing(pipe, monkeypatch, caplog) -> None:
    asked = []
    monkeypatch.setattr("fluxq.runtime.prepare.prepare", lambda pipe, **how: asked.append(how))
    says(pipe, prefer="memory", attention="int8", of_next_year={"a": 1})
    assert after_loading(pipe, SGLANG) == ["attention", "optimize"]
    assert asked == [{"prefer": "memory"}]
    backends = {block.attn.processor._attention_backend for block in pipe.transformer.transformer_blocks}
    assert {backend.value for backend in backends} == {BACKENDS["int8"]}
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_kept_and_skipped_steps_are_those_that_are_recorded(pipe) -> None:
    probe = copy.deepcopy(pipe.scheduler)
    probe.set_timesteps(6)
    steps = list_of(probe, [0, 2, 4, 5], 1, levels_of(probe)).to_dict()
    says(pipe, steps={"6": steps})
    assert after_loading(pipe, SGLANG) == ["optimize", "skipped steps"]


@pytest.mark.parametrize(
    ("runtime", "why"),
    [
        ({"prefer": "sped"}, "runtime.prefer in config.json is 'sped' (did you mean 'speed'?)"),
        ({"attention": "fp7"}, "attention is 'fp7', expected one of"),
    ],
)
def test_a_wrong_word_is_named_and_the_rest_is_done(pipe, caplog, runtime, why) -> None:
    says(pipe, **runtime)
    assert after_loading(pipe, SGLANG) == ["optimize"]
    assert why in caplog.text and "leaves out" in caplog.text


@pytest.mark.parametrize(
    "other", [None, SimpleNamespace(), SimpleNamespace(components={"transformer": torch.nn.Linear(2, 2)})]
)
def test_other_pipelines_are_left_alone(other, caplog) -> None:
    caplog.set_level(logging.INFO, "fluxq")
    assert after_loading(other, VLLM_OMNI) == [] and not caplog.records


def test_a_failing_preparation_ends_no_server(pipe, monkeypatch, caplog) -> None:
    def broken(*_, **__):
        raise RuntimeError("no room")

    monkeypatch.setattr("fluxq.runtime.optimize.optimize", broken)
    assert after_loading(pipe, VLLM_OMNI) == []
    assert "fluxq in vLLM-Omni leaves out optimize: RuntimeError: no room" in caplog.text


@pytest.mark.parametrize(("plug_in", "row"), PLUG_INS, ids=["vllm_omni", "sglang"])
@pytest.mark.parametrize("other", ["99.1", "{}.post1", "{}rc1", "{}rc1+cu129"])
def test_another_version_is_refused_by_name(plug_in, row, other, tried, monkeypatch, caplog) -> None:
    tried[row.package] = present = other.format(row.tried)
    finders = [*sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", list(finders))
    plug_in()  # SGLang's modules are not here: its plug-in would fail to import them
    assert sys.meta_path == finders
    assert f"tried with {row.name} {row.tried}, and this is {present}" in caplog.text
    assert f"{row.package}=={row.tried}" in caplog.text


@pytest.mark.parametrize("row", ENGINES, ids=lambda row: row.package)
def test_a_build_of_the_version_is_the_version(row, tried, caplog) -> None:
    tried[row.package] = f"{row.tried}+cu129"
    assert row.is_tried() and not caplog.text


@pytest.mark.parametrize("row", ENGINES, ids=lambda row: row.package)
@pytest.mark.parametrize("written", [b"", b"Metadata-Version: 2.1\nName: x\n", b"\xff\xfe"])
def test_a_damaged_installation_of_an_engine_is_an_unknown_version(row, written, tmp_path, monkeypatch, caplog) -> None:
    folder = tmp_path / f"{row.package.replace('-', '_')}-{row.tried}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(written)
    monkeypatch.syspath_prepend(tmp_path)
    assert not row.is_tried() and "this is an unknown version" in caplog.text


def test_the_page_has_a_row_for_what_each_plug_in_does() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    rows = [
        f"| {row.name} | {row.package} {row.tried} | `{GROUPS[row]}` | {back_end} | {does} |"
        for row in ENGINES
        for back_end, does in BACK_ENDS[row]
    ]
    assert page.split("|---|---|---|---|---|\n")[1].startswith("\n".join(rows) + "\n\n")


class Adapter:
    """The interface of vLLM-Omni's class that is used: a pipeline is there once its weights are loaded."""

    def load_weights(self) -> None:
        self._pipeline = self.od_config["pipe"]

    def __init__(self, pipe) -> None:
        self.od_config = {"pipe": pipe}


def test_vllm_omnis_adapter_prepares_what_it_loaded(pipe, tried, monkeypatch) -> None:
    module = ModuleType(vllm_omni.ADAPTER)
    kind = type("DiffusersAdapterPipeline", (Adapter,), {"load_weights": Adapter.load_weights})
    vars(module)["DiffusersAdapterPipeline"] = kind
    monkeypatch.setitem(sys.modules, vllm_omni.ADAPTER, module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    vllm_omni.plug_in()
    once = kind.load_weights
    vllm_omni.plug_in()
    assert kind.load_weights is once
    adapter = kind(pipe)
    assert adapter.load_weights() is None
    assert fused(pipe) == 5


def test_vllm_omni_without_that_class_is_told_of(tried, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, vllm_omni.ADAPTER, ModuleType(vllm_omni.ADAPTER))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    vllm_omni.plug_in()
    assert "DiffusersAdapterPipeline" in caplog.text


def test_sglangs_loader_gets_a_hook(pipe, tried, monkeypatch) -> None:
    hooks = {}
    name = "sglang.multimodal_gen.runtime.platforms.plugins"
    module = ModuleType(name)
    after = object()
    kinds = SimpleNamespace(AFTER=after)
    vars(module).update(
        HookType=kinds, plugin_hook=lambda target, kind: lambda hook: hooks.update({target: (kind, hook)})
    )
    for end in range(1, name.count(".") + 1):
        parent = ".".join(name.split(".")[:end])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    sglang.plug_in()
    ((target, (kind, hook)),) = hooks.items()
    assert target == sglang.LOADER and kind is after
    assert hook(pipe, "the pipeline's own object", "path", server_args=None) is None
    assert fused(pipe) == 5
