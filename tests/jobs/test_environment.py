"""`fluxq env`: true, quick, and safe to paste into a public report."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from fluxq.base.devices import instructions
from fluxq.cli import cli
from fluxq.jobs import environment as env
from fluxq.kernels import dispatch, ops
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.recipes.recipe import shipped_recipes


def run(*arguments: str, **variables: str) -> tuple[str, str]:
    """(what `fluxq env` prints in a process of its own, which of diffusers and transformers are imported then)."""
    code = "import sys\nfrom fluxq.cli import cli\ncli.main(sys.argv[1:], standalone_mode=False)\n"
    code += "print({'diffusers', 'transformers'} & set(sys.modules), file=sys.stderr)"
    command = [sys.executable, "-c", code, "env", *arguments]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.strip()


def implementations(device: str = "cpu") -> dict[str, dict[str, str]]:
    return {row["scheme"]: row for row in env.environment()["implementations"] if row["device"] == device}


@pytest.mark.slow
def test_the_command_holds_no_names_paths_or_tokens_and_imports_neither_diffusers_nor_transformers():
    private = {"HOME": "/home/alice", "USER": "alice", "FLUXQ_CACHE": "/home/alice/cache", "HF_TOKEN": "hf_secret"}
    set_here = {"FLUXQ_STRICT": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    text, imported = run("--json", **private, **set_here)
    assert imported == "set()"
    assert not [word for word in ("alice", "hf_secret", os.getcwd(), sys.prefix) if word in text]
    report = json.loads(text)
    assert report["variables"] == {**set_here, "FLUXQ_CACHE": "set (17 characters, not shown)"}
    assert report["versions"]["diffusers"] == version("diffusers")


def test_for_people_it_is_lines_and_a_table():
    lines = CliRunner().invoke(cli, ["env"]).stdout.splitlines()
    assert f"torch             {torch.__version__}" in lines
    assert [line for line in lines if line.startswith("cpu ") and line.endswith(f"cores, {instructions()}")]
    assert [line for line in lines if line.startswith("quantized_linear") and "torch reference" in line]


def test_a_package_that_is_not_there_is_said_so(monkeypatch):
    monkeypatch.setattr(env, "_PACKAGES", ("peft", "no-such-package"))
    versions = env.environment()["versions"]
    assert versions["no-such-package"] == "not installed" and versions["peft"] == version("peft")


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_scheme_of_a_checkpoint_has_a_row(checkpoint, recipe):
    """Of its formats: transforms and low rank change what is multiplied, not what multiplies."""
    config = json.loads((checkpoint(recipe) / "transformer" / "config.json").read_text())
    rows = implementations()
    for scheme in map(Scheme.parse, config["quantization_config"]["layers"]):
        formats = Scheme(scheme.weights, scheme.activations, scheme.static_input)
        assert recipe in rows[str(formats)]["recipes"].split(", "), formats


@pytest.mark.parametrize(("exact", "faster"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("scheme", ["int8-int8", "int8-16bit", "fp8-fp8"])
def test_what_is_said_to_compute_is_what_computes(monkeypatch, scheme, exact, faster):
    """`torch._int_mm` is called exactly when it is named, whatever this CPU is good at."""
    parsed = Scheme.parse(scheme)
    weight = QuantizedTensor.quantize(torch.randn(32, 64), parsed.weights)
    layer = QuantLinear.from_quantized(weight, None, parsed)
    calls, real = [], torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: calls.append(1) or real(a, b))
    monkeypatch.setattr(ops, "int_mm_is_exact", lambda device: exact)
    monkeypatch.setattr(ops, "int8_seconds", lambda: (1.0, 2.0) if faster else (2.0, 1.0))
    layer(torch.randn(20, 64))
    name, reason = ops.implementation(parsed, "cpu")
    assert (name == "torch._int_mm") == bool(calls) == (exact and faster and scheme == "int8-int8")
    assert reason and implementations()[scheme]["implementation"] == name


@pytest.mark.slow
def test_an_accelerator_is_listed_and_has_its_rows(monkeypatch):
    card = SimpleNamespace(name="NVIDIA Test", total_memory=2**33, major=9, minor=0, gcnArchName="")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    report = env.environment()
    assert report["devices"][1]["device"] == "cuda:0" and report["devices"][1]["memory_bytes"] == 2**33
    found = implementations("sm_90")
    assert found.keys() == implementations("cpu").keys()
    for scheme, row in found.items():
        choice = dispatch.choose(Scheme.parse(scheme), "sm_90", 4096, 3072, 3072)
        assert (row["implementation"], row["reason"]) == (choice.implementation, choice.reason)
    assert found["int8-int8"]["implementation"] in ("scaled_matmul", "torch._int_mm")
    monkeypatch.setattr(env, "find_spec", lambda name: None)
    assert implementations("sm_90")["nvfp4-nvfp4-static"]["reason"] == "no kernel for cuda without Triton"


def test_every_format_has_an_implementation_with_a_reason_everywhere():
    for row in FORMATS.values():
        for device in ("cpu", "cuda", "mps", "xpu"):
            assert all(ops.implementation(Scheme(row, None), device))
