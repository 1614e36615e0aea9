"""Tests that what a user named is looked for before heavy imports, and that messages name a cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import copy_of

from fluxq import tiny
from fluxq.base.console import did_you_mean, path_near
from fluxq.jobs.requirements import require_checkpoint, require_model

# Runs each list of words on stdin as a command in this process; prints its exit code, message and heavy imports.
PROGRAM = """
import contextlib, io, json, sys
from fluxq.cli import main
for line in sys.stdin:
    sys.argv, err = ["fluxq", *json.loads(line)], io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as exit:
            code = exit.code
    heavy = [name for name in ("torch", "diffusers", "transformers") if name in sys.modules]
    print(json.dumps([code, err.getvalue(), heavy]), flush=True)
"""
WRONG = [
    (["quantize", "./nope"], "model './nope' is neither a folder nor a hub model: there is no such folder"),
    (["plan", "modl"], "there is no such folder (did you mean 'model'?); hub ids are written owner/name"),
    (["quantize", "flux1-dev.safetensors"], "it is a single file; quantizing starts from a whole pipeline"),
    (["quantize", "gone.gguf"], "there is no such file, and one file would not do"),
    (
        ["calibrate", "FLUX.1-dev"],
        "is a published model's name, not a folder here: give its hub id, black-forest-labs/",
    ),
    (["quantize", "no/where"], "it is not (completely) on this machine, and HF_HUB_OFFLINE is set"),
    (["quantize", "Qwen/Qwen-Imag"], "did you mean 'Qwen/Qwen-Image'?"),
    (["quantize", "model", "--statistics", "gone"], "statistics file gone does not exist; `fluxq calibrate` writes"),
    (["quantize", "model", "--lora", "gone.safetensors:0.5"], "LoRA file gone.safetensors does not exist"),
    (["quantize", "model", "--lora", "flux1-dev.safetensors:x"], "write FILE:weight with a number as weight"),
    (["quantize", "model", "--prompts", "gone.jsonl"], "prompt file 'gone.jsonl' does not exist"),
    (["quantize", "damaged"], "model_index.json: not valid JSON"),
    (["quantize", "cut"], "truncated or damaged safetensors file"),
    (["quantize", "model", "--recipe", "nvpf4"], "(did you mean 'nvfp4'?); shipped: fp8"),
    (["quantize", "model", "--recipe", "."], "recipe '.' is no file; shipped: fp8"),
    (["eval", "out", "--metrics", "psnr,lpip"], "metric 'lpip' is unknown (did you mean 'lpips'?); known: psnr"),
    (["eval", "out", "--gate", "psnr"], "write metric, comparison and number as in 'psnr>=20'"),
    (["quantize", "model", "--device", "gpu"], "device 'gpu' cannot be used; give --device cpu, or cuda with a GPU"),
    (["eval", "nope"], "nope is no folder; give one that `fluxq quantize` wrote"),
    (["eval", "model"], "model: not a fluxq checkpoint (it has no fluxq_plan.json)"),
    (["eval", "download"], "download: its fluxq_plan.json is missing, which says what it was made from; fetch it too"),
    (["inspect", "pipe"], "pipe is a pipe or a device, which could be waited for without end; give a file or folder"),
    (["import", "pipe.safetensors"], "pipe.safetensors is a pipe or a device"),
    (["quantize", "model", "--statistics", "pipe.safetensors"], "--statistics pipe.safetensors is a pipe or a device"),
    (["quantize", "model", "--lora", "pipe.safetensors:0.5"], "LoRA file pipe.safetensors is a pipe or a device"),
    (["bench", "flux1-dev.safetensors"], "flux1-dev.safetensors is no folder"),
    (["debug", "modell"], "modell is no folder (did you mean 'model'?)"),
    (["verify", "nope"], "nope is no folder"),
    (["export", "nope", "--format", "comfy"], "nope is no folder"),
    (["report", "model", "nope"], "nope does not exist"),
    (["inspect", "nope"], "nope does not exist"),
    (["inspect", "flux1-dev.safetensors", "--base", "nope"], "model 'nope' is neither a folder nor a hub model"),
    (["import", "nope"], "nope does not exist"),
    (["warmup", "nope"], "model 'nope' is neither a folder nor a hub model"),
    (["families", "FLX.1-dev"], "no published model, family or model class of that name (did you mean 'FLUX.1-dev'?)"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int, str, list[str]]]:
    """Command -> exit code, message and what heavy packages it had imported by then."""
    place = tmp_path_factory.mktemp("given")
    for name in ("model", "damaged", "cut"):
        copy_of(tiny.path(), place / name)
    (place / "damaged" / "model_index.json").write_text("{")
    for name in ("pipe", "pipe.safetensors"):
        os.mkfifo(place / name)
    copy_of(place / "model", place / "download")
    config = place / "download" / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "fluxq"}}))
    (place / "out").mkdir()
    (place / "out" / "fluxq_plan.json").write_text("{}")
    weights = next((place / "cut" / "vae").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-9])
    (place / "flux1-dev.safetensors").write_bytes((place / "model/vae" / weights.name).read_bytes())
    lines = "".join(json.dumps(words) + "\n" for words, _ in WRONG)
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=lines, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {" ".join(words): tuple(answer) for (words, _), answer in zip(WRONG, told, strict=True)}


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_what_is_not_there_is_said_before_torch_is_imported(answers, words, message):
    code, err, heavy = answers[" ".join(words)]
    assert message in err and code == 2 and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1 or err.startswith("Usage: ")
    if words[0] != "families":  # which builds models
        assert heavy == []


def test_a_model_that_is_there_is_found_and_its_folder_returned():
    assert require_model("tiny").path == Path(tiny.path())
    assert require_model(str(tiny.path())).name == "pipeline"


def test_a_checkpoint_may_lack_its_plan_where_only_its_weights_are_read(tmp_path):
    require_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"it has no fluxq_plan\.json"):
        require_checkpoint(tmp_path, recorded=True)


def test_only_what_is_alike_is_meant():
    assert did_you_mean("NVFP5", ("nvfp4", "int8")) == " (did you mean 'nvfp4'?)"
    assert did_you_mean("nonsense", ("nvfp4", "int8")) == ""
    assert path_near(Path("no/such/folder/at/all")) == ""
