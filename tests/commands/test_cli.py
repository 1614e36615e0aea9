"""The command: what it prints and writes, and how each mistake ends: one short message, an exit code, nothing left."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file, save_file

from fluxq import __version__
from fluxq.base.output import sole_writer
from fluxq.cli import cli, main
from fluxq.commands import writing_recipes
from fluxq.commands.options import PROTOCOL_NAMES, RECIPES
from fluxq.eval.images.protocols import PROTOCOLS
from fluxq.jobs import advising
from fluxq.recipes.cards import Holding
from fluxq.recipes.recipe import shipped_recipes

LAYER = "transformer_blocks.0.attn.to_k"
FEW_STEPS = ("--num-inference-steps", 2)
WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"

Result = namedtuple("Result", "code out err left")


@pytest.fixture
def fluxq(tmp_path, monkeypatch, capsys):
    """fluxq("plan", …) runs the command in this process, in tmp_path; `left` is what it added or removed there."""
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("fluxq").level

    def run(*arguments) -> Result:
        before = set(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["fluxq", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        changed = before ^ set(tmp_path.rglob("*"))
        return Result(caught.value.code or 0, out, err, sorted(str(path.relative_to(tmp_path)) for path in changed))

    yield run
    logging.getLogger("fluxq").setLevel(level)


def assert_refused(result: Result, code: int, *words: str) -> None:
    """One short message that holds all `words`, the exit code, no traceback and nothing written."""
    assert result.code == code, result
    assert "Traceback" not in result.err + result.out
    assert result.err.startswith(("Error: ", "Usage: ")) and len(result.err) < 800, result.err
    for word in words:
        assert word in result.err, result.err
    assert result.left == []


# What every command is for


def test_help_is_instant_and_names_the_commands(fluxq):
    result = fluxq("--help")
    assert result.code == 0 and "Example:" in result.out
    judging, exchanging = {"eval", "bench", "debug", "report", "gate", "history"}, {"export", "import", "inspect"}
    making = {"plan", "auto", "steps", "calibrate", "quantize", "verify", "warmup", "families", "env", "doctor"}
    assert set(cli.commands) == making | judging | exchanging | {"serve", "demo", "recipe"}
    assert all(f"  {name} " in result.out for name in cli.commands)


def test_help_names_what_may_be_given(fluxq):
    assert set(RECIPES) == set(shipped_recipes()) and tuple(PROTOCOLS) == PROTOCOL_NAMES
    assert all(cli.commands[name].short_help in " ".join(fluxq("--help").out.split()) for name in cli.commands)


def test_a_recipe_is_written_by_options_or_by_questions_and_checked(fluxq, monkeypatch):
    asked = []

    def write_recipe(wish, output, on_start):
        asked.append(wish)
        return advising.Advice("int8", "speed", False, Holding(16e9, 14e9, 12e9, "transformer"))

    monkeypatch.setattr(advising, "write_recipe", write_recipe)
    words = ("--memory", "10GB", "--for", "comfy", "--model", "Qwen-Image", "-o", "mine.yaml")
    done = fluxq("recipe", "new", "--gpu", "3060", "--want", "quality", *words)
    assert done.code == 0 and done.out.endswith("next: fluxq quantize Qwen/Qwen-Image --recipe mine.yaml\n")
    assert asked == [advising.Wish("3060", "quality", 10e9, "comfy", "Qwen-Image")]
    assert_refused(fluxq("recipe", "new"), 2, "no terminal to ask in: give --gpu and --want")
    assert_refused(fluxq("recipe", "new", "--gpu", "99", "--want", "speed"), 2, "unknown GPU '99'")
    monkeypatch.setattr(writing_recipes, "is_terminal", lambda stream: True)
    answers = iter(["5070", "12GB", "speed", "fluxq", "FLUX.1-dev"])
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda *_: next(answers))
    assert fluxq("recipe", "new").code == 0
    assert asked[1:] == [advising.Wish("5070", "speed", 12e9)] and next(answers, None) is None


@pytest.mark.slow
def test_a_recipe_that_cannot_be_written_is_a_failure_of_the_work_and_one_that_is_there_of_the_request(
    fluxq, monkeypatch
):
    def write_text(*_):
        raise OSError("Input/output error")

    words = ("recipe", "new", "--gpu", "4070", "--model", "SANA-0.6B", "-o", "mine.yaml", "--want")
    with monkeypatch.context() as patched:
        patched.setattr(advising, "write_text", write_text)
        assert_refused(fluxq(*words, "quality"), 1, "Input/output error")
    assert fluxq(*words, "quality").code == fluxq(*words, "quality").code == 0
    assert_refused(fluxq(*words, "speed"), 2, "mine.yaml")


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (KeyboardInterrupt, 130, "interrupted; nothing was written"),
        (EOFError, 2, "Error: the input ended before the last question; nothing was written"),
    ],
)
def test_a_question_without_an_answer_ends_with_one_sentence(fluxq, monkeypatch, ends, code, said):
    answers = iter(["5070"])

    def answer(prompt=""):
        return next(answers, None) or (_ for _ in ()).throw(ends)

    monkeypatch.setattr(writing_recipes, "is_terminal", lambda stream: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", answer)
    result = fluxq("recipe", "new")
    assert (result.code, result.err, result.left) == (code, f"\n{said}\n", [])
    assert next(answers, None) is None


def test_a_memory_that_is_no_size_is_asked_for_again(fluxq, monkeypatch):
    answers, questions = iter(["5070", "12", "12GB"]), []

    def answer(prompt=""):
        questions.append(prompt.split()[0])
        return next(answers, None) or (_ for _ in ()).throw(EOFError)

    monkeypatch.setattr(writing_recipes, "is_terminal", lambda stream: True)
    monkeypatch.setattr("click.termui.visible_prompt_func", answer)
    assert "write a size with its unit" in fluxq("recipe", "new").out
    assert questions == ["GPU,", "Memory", "Memory", "First"]


def test_a_recipe_with_faults_is_refused_line_by_line(fluxq, tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: nvfp4\nprofil: rtn\ngates: [psnr]\n")
    result = fluxq("recipe", "check", "mine.yaml", "fp8")
    assert_refused(result, 2, "mine.yaml:2: unknown key 'profil'", "\nmine.yaml:3: gates: ")
    assert result.out == "fp8: nothing is wrong with it\n"
    told = fluxq("recipe", "check", "mine.yaml", "fp8", "--json")
    assert told.code == 2 and [len(faults) for faults in json.loads(told.out).values()] == [2, 0]
    assert fluxq("recipe", "check", "fp8").code == 0
    both = fluxq("recipe", "check", "nowhere.yaml", "mine.yaml", "fp8")
    assert_refused(both, 2, "neither a file nor a shipped recipe", "mine.yaml:2: unknown key 'profil'")
    assert both.out == "fp8: nothing is wrong with it\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("quantize", "--model", "tiny"), "MODEL"),
        (("quantize", "--format", "fp8"), "--recipe"),
        (("quantize", "--recip", "fp8"), "--recipe"),
        (("eval", "out", "--device-map", "auto"), None),
        (("inspect", "file", "--format", "nvfp4"), None),  # which has no --recipe
        (("report", "--steps", "3"), None),
    ],
)
def test_an_unknown_option_is_answered_with_what_was_meant(fluxq, words, meant):
    result = fluxq(*words)
    assert_refused(result, 2, f"No such option '{words[-2]}'", *([f"Did you mean '{meant}'?"] if meant else []))
    assert meant or "Did you mean" not in result.err


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "--guidance-scale", "nan"),
        ("quantize", "--height", "99999999999999"),
        ("quantize", "--num-inference-steps", "100000"),
        ("eval", "out", "--cache", "inf"),
        ("debug", "out", "--growth", "nan"),
        ("quantize", ""),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_and_empty_names_are_refused(fluxq, words):
    result = fluxq(*words)
    assert result.code == 2 and result.left == [] and result.out == ""


@pytest.mark.parametrize("command", cli.commands)
def test_every_command_has_help_with_an_example(fluxq, command):
    result = fluxq(command, "--help")
    assert result.code == 0 and f"Example:\n    fluxq {command} " in result.out
    assert all(option.help for option in cli.commands[command].params if option.param_type_name == "option")


MODEL = {"--revision", "--local-files-only"}
COMMON = {"--json", "-v", "--verbose", "-q", "--quiet"}
RECIPE = {"--recipe", "--profile", "--components", "--include", "--exclude"}
SIZE = {"--height", "--width", "--frames"}
RUN = {"--dtype", "--device", "--seed", "--prompts", "--num-inference-steps", "--guidance-scale"} | SIZE
WRITES = {"--output", "-o", "--overwrite"}
FITS = {"--no-check", "--parallel-blocks", "--push-to-hub", "--private", "--max-shard-size", "--max-memory"}
BUDGET = {"--bits", "--size", "--vram", "--ms", "--gate", "--gpu", "--times"}
CHOICE = {"--menu", "--for", "--measure", "--count", "--dry-run", "--from", "--assemble", "--max-memory"}
UNITS = {"--modulation", "--attention", "--steps"}
GPU = {"--layers", "--gpu", "--prefer", "--batch", "--vram"} | SIZE


def test_a_path_behind_an_equals_sign_may_begin_with_the_home_folder(fluxq, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    context = cli.commands["history"].make_context("history", [str(tmp_path), "--output=~/history.html"])
    assert context.params["output"] == tmp_path / "history.html"
    assert_refused(fluxq("quantize", "--recipe=~/gone.yaml"), 2, str(tmp_path / "gone.yaml"))


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("plan", MODEL | RECIPE | COMMON | GPU | {"--statistics"}),
        ("auto", MODEL | RECIPE - {"--profile"} | RUN | WRITES | COMMON | BUDGET | CHOICE | UNITS),
        ("calibrate", MODEL | RECIPE | RUN | WRITES | COMMON | {"--lora", "--max-memory"}),
        ("quantize", MODEL | RECIPE | RUN | WRITES | COMMON | FITS | {"--lora", "--statistics"}),
    ],
)
def test_options_have_the_names_that_diffusers_uses(command, options):
    params = cli.commands[command].params
    assert {name for p in params if p.param_type_name == "option" for name in p.opts} == options
    assert [p.name for p in params if p.param_type_name == "argument"] == ["model"]


# The way it is meant to go


@pytest.mark.slow
def test_auto_says_what_may_be_chosen_and_then_chooses(fluxq):
    words = ("auto", "tiny", "--bits", "6", "--measure", "velocity", "--count", "1", "--num-inference-steps", "1")
    outline = fluxq(*words, "--dry-run", "--gpu", "h200")
    assert outline.code == 0 and outline.left == []
    assert "least budget 4.51 bits, largest 16.00 bits" in outline.out and "modelled on h200" in outline.out
    assert "\ntransformer.single_transformer_blocks.3.proj_out " in outline.out
    done = fluxq(*words)
    assert (
        done.code == 0
        and "(chosen)" in done.out
        and done.out.endswith("recipe: tiny-6bits.yaml\nnext: fluxq quantize tiny --recipe tiny-6bits.yaml\n")
    )
    assert done.left == ["tiny-6bits.json", "tiny-6bits.yaml", "tiny-velocity-errors.safetensors"]
    again = json.loads(fluxq(*words, "--json").out)
    assert again["output"] == "tiny-6bits.yaml" and again["cost"] <= 6
    assert_refused(fluxq("auto", "tiny"), 2, "no budget: give one of --bits")


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_plan_prints_every_layer_and_why(fluxq, recipe):
    result = fluxq("plan", "--recipe", recipe, "--layers")
    assert result.code == 0 and result.err == "" and result.left == []
    first, *_, last, on_cpu, on_gpu = result.out.splitlines()
    assert first.startswith("model tiny (no MODEL given") and first.endswith(f"recipe {recipe}")
    assert LAYER in result.out and "last projection" in result.out
    assert last.startswith("transformer: ") and "bits per weight" in last
    for device, line in (("cpu", on_cpu), ("cuda", on_gpu)):
        said = re.fullmatch(
            rf"--max-memory with --device {device}: at least ([0-9.]+)MiB, for (fitting|running) .*", line
        )
        assert said and 64 * (device == "cpu") < float(said[1]) < 150


def test_plan_has_a_row_for_each_role_and_says_each_reason_once(fluxq):
    lines = fluxq("plan", "tiny", "--exclude", "**.to_k").out.splitlines()
    rows = [line.split() for line in lines[2:18] if "16bit" in line or "nvfp4" in line]
    counts: dict[str, int] = {}
    for role, count, *_ in ([row[0] + row[1], *row[2:]] if row[0] == "16" else row for row in rows):
        counts[role] = counts.get(role, 0) + int(count)
    assert counts["qkv"] == 3 and counts["single_in"] == 16 and counts["16bit"] == 8 and sum(counts.values()) == 46
    assert LAYER not in "\n".join(lines)
    excluded = "transformer_blocks.*.attn.to_k, single_transformer_blocks.*.attn.to_k: excluded by '**.to_k'"
    assert lines.count(excluded) == 1
    reasons = [line.partition(": ")[2] for line in lines if re.match("[a-z_.*{}, ]+: ", line)]
    assert len(reasons) == len(set(reasons)) > 5 and any("made by an activation" in reason for reason in reasons)


def test_plan_as_json(fluxq):
    result = fluxq("plan", "tiny", "--recipe", "fp8", "--exclude", "**.to_k", "--json")
    layers = {layer["name"]: layer for layer in json.loads(result.out)["transformer"]}
    assert layers[LAYER]["scheme"] == "16bit" and layers[LAYER]["reason"] == "excluded by '**.to_k'"
    assert layers["transformer_blocks.0.attn.to_q"]["scheme"] == "fp8-fp8"


def test_plan_on_a_gpu_prints_memory_and_modelled_time(fluxq):
    result = fluxq("plan", "--recipe", "nvfp4", "--gpu", "H200", "--height", "1024", "--width", "1024", "--batch", "2")
    assert result.code == 0 and result.err == "" and result.left == [] and LAYER not in result.out
    lines = result.out.splitlines()
    assert (
        "transformer: 38 of 46 Linears quantized, 6.18 bits per weight before fitting, at most 6.35 with what it keeps "
        "of center, smooth"
    ) in lines
    # The VAE of `tiny` halves once, and its prompts have 8 tokens.
    assert lines[3].startswith("transformer on one H200 SXM, one step, modelled, not measured: 65536 image and 8 text")
    assert lines[3].endswith(", 2 sequences")
    assert re.split(r"\s{2,}", lines[4].strip())[1:] == [
        *("layers", "stored", "at run time", "work", "fused", "unfused", "over 16 bit"),
    ]
    rows = {line.split("  ")[0]: line.split() for line in lines[5:13]}
    assert list(rows) == [
        *("attention projections", "feed-forward", "single blocks", "modulation", "kept in 16 bit"),
        *("attention", "elementwise", "total"),
    ]
    assert rows["total"][1] == "46" and rows["total"][-1].endswith("x")
    _, _, stored, stored_unit, held, held_unit, *rest = rows["total"]
    assert (stored_unit, held_unit, rest[1], rest[3][1:], rest[5][1:]) == ("MB", "MB", "TFLOP", "s", "s")
    assert 0.8 < float(stored) < float(held) < 2.5
    assert "nvfp4-nvfp4-static: re-encoded at load to int8 or fp8, timed as fp8" in lines
    assert "peaks: NVIDIA H200 data sheet, sparse figures halved" in lines
    assert any(line.startswith("efficiency of attention: 0.66 (652 TFLOP/s, cuDNN, ") for line in lines)
    assert any("efficiency of fp8: 0.69 (1375 TFLOP/s" in line for line in lines)
    [said] = [line for line in lines if line.startswith("H200 SXM holds the pipeline at once: ")]
    assert re.fullmatch(
        r".*: [0-9.]+ GB of 151 GB; in turns \(enable_model_cpu_offload\) [0-9.]+ GB, for transformer", said
    )
    assert not any("--prefer memory" in line for line in lines)


def test_the_cost_as_json_and_what_prefer_does(fluxq):
    def total(*arguments):
        result = fluxq("plan", "tiny", "--recipe", "nvfp4", "--gpu", "h200", "--json", *arguments)
        told = json.loads(result.out)
        assert told["cost"]["transformer"]["modelled"] is True and len(told["transformer"]) == 46
        return told["cost"]["transformer"]["parts"][-1]

    fast, small = total(), total("--prefer", "memory")
    assert fast["part"] == "total" and fast["stored_gb"] == small["stored_gb"] == small["resident_gb"]
    assert fast["resident_gb"] > 1.3 * fast["stored_gb"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h20"], ["unknown GPU 'h20' (did you mean h200?); known: a100, h100, h200", "mi355x"]),
        (["--height", "512", "--batch", "2"], ["--batch, --height: only the cost on a GPU", "give --gpu too"]),
        (["--prefer", "memory"], ["--prefer: only the cost on a GPU"]),
        (["--gpu", "h100", "--frames", "9"], ["flux makes images, not video"]),
        (["--gpu", "h100", "--components", "text_encoder"], ["text_encoder: runs once per image", "a transformer"]),
        (
            ["--gpu", "h100", "--height", "3"],
            ["--height is 3, expected a multiple of 2 from 4 up"],
        ),
    ],
)
def test_a_cost_that_cannot_be_modelled_is_refused(fluxq, arguments, words):
    assert_refused(fluxq("plan", "-q", *arguments), 2, *words)


@pytest.mark.slow
def test_plan_says_what_fits_a_card(fluxq):
    """Here everything does, in 16 bit; under a recipe that is asked for, in fewer bytes."""
    peaks = []
    for recipe in ((), ("--recipe", "fp8")):
        result = fluxq("plan", "tiny", "--vram", "8GB", *recipe)
        assert result.code == 0 and result.err == "" and result.left == []
        rows = {line.split()[0]: line for line in result.out.splitlines() if line}
        assert rows["transformer"].split()[1:3] == ["16", "bit"] and 'pipe.to("cuda")' in result.out
        told = json.loads(fluxq("plan", "tiny", "--vram", "602.5MB", "--json", *recipe).out)
        peaks.append((told["recipes"]["transformer"], told["peak_gb"], told["placement"]))
    assert peaks[0][0] != "16 bit" and peaks[1][0] == "fp8" and peaks[0][2] == "each component in its turn"
    assert all(peak <= 0.6025 for _, peak, _ in peaks)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["8"], ["write a size with its unit, as in 5GB or 800MB"]),
        (["500MB"], ["vram is 500 MB, and a GPU's driver and libraries alone keep 600 MB"]),
        (["600.5MB"], ["tiny: nothing fits into 600 MB; the least is 602MB", "smaller --height and --width"]),
        (["8GB", "--gpu", "h200", "--layers"], ["--vram chooses recipes", "leave out --gpu, --layers"]),
        (["8GB", "--frames", "5"], ["a FluxPipeline makes images, which have no frames: leave out --frames"]),
        (["8GB", "--recipe", "fp9"], ["fp9"]),
    ],
)
def test_a_card_that_nothing_fits_is_refused_with_the_least(fluxq, arguments, words):
    assert_refused(fluxq("plan", "-q", "tiny", "--vram", *arguments), 2, *words)


def test_a_card_is_for_the_model_that_the_recipe_names(fluxq, tmp_path):
    (tmp_path / "r.yaml").write_text("extends: fp8\nmodel: ./nowhere\n")
    assert_refused(fluxq("plan", "--vram", "8GB", "--recipe", "r.yaml"), 2, "model './nowhere'", "no such folder")


def test_options_of_layers_are_refused_by_name_for_a_list_of_steps(fluxq):
    words = ("--component", "vae", "--max-shard-size", "1GB")
    refused = fluxq("export", "list.json", "--format", "cache-dit", *words)
    assert_refused(refused, 2, "leave out --component, --max-shard-size\n")


def test_plan_tells_of_a_role_that_the_family_lacks(fluxq, tmp_path, caplog):
    (tmp_path / "r.yaml").write_text(
        "extends: fp8\ncomponents: {transformer: {overrides: [{role: cross, weights: {format: fp8}, reason: r}]}}\n"
    )
    assert fluxq("plan", "--recipe", "r.yaml").code == 0
    assert "role 'cross': the flux family has none, skipped" in caplog.text


def test_quantize_twice_then_otherwise_then_again(fluxq, quick_recipe, tmp_path):
    arguments = ("quantize", "--recipe", quick_recipe("nvfp4", fitted=False), *FEW_STEPS)
    done = fluxq(*arguments)
    assert done.code == 0, done
    lines = done.out.splitlines()
    chosen = "model tiny (no MODEL given: the small FLUX pipeline that comes with fluxq), recipe nvfp4"
    assert lines[0] == f"{chosen}, device cpu (torch finds no GPU)"
    assert re.fullmatch(r"takes under a minute and 0\.[78] GB of memory, estimated", lines[1])
    assert lines[-2:] == ["checkpoint: tiny-nvfp4", "next: fluxq eval tiny-nvfp4"]
    for shown in ("layers quantized", "bits per weight", "size", "layers' SQNR", "paired PSNR"):
        assert shown in done.out
    record = json.loads((tmp_path / "tiny-nvfp4" / "fluxq_plan.json").read_text())
    assert record["check"]["passed"] and len(record["check"]["psnr_db"]) == 4
    assert not [name for name in done.left if ".part" in name]

    weights = tmp_path / "tiny-nvfp4" / WEIGHTS
    written = weights.stat().st_mtime_ns
    again = fluxq(*arguments)
    assert (again.code, again.left) == (
        0,
        [],
    ) and "already done: tiny-nvfp4 holds this recipe on this model" in again.out
    assert weights.stat().st_mtime_ns == written

    assert_refused(fluxq(*arguments, "--seed", 7), 2, "holds a checkpoint that differs in calibration", "--overwrite")
    assert_refused(fluxq(*arguments, "--exclude", LAYER), 2, "differs in plans; give another --output")
    assert_refused(fluxq(*arguments, "--height", 32, "--dtype", "float16"), 2, "differs in call (height), dtype")
    gates = (tmp_path / "recipes" / "nvfp4.yaml").read_text() + "gates: []\n"
    (tmp_path / "recipes" / "nvfp4.yaml").write_text(gates)
    assert_refused(fluxq(*arguments), 2, "holds a checkpoint that differs in recipe;")
    assert weights.stat().st_mtime_ns == written

    replaced = fluxq(*arguments, "--overwrite", "--no-check", "--json")
    assert replaced.code == 0 and replaced.left == ["tiny-nvfp4/passport.json"]  # which a check alone writes
    assert json.loads(replaced.out)["check"] is None and weights.stat().st_mtime_ns > written


@pytest.mark.slow
def test_calibrate_then_quantize_with_its_statistics(fluxq, quick_recipe, tmp_path):
    """Check that statistics are all that quantizing needs to know of the inputs where nothing is fitted."""
    how = ("tiny", "--recipe", quick_recipe("nvfp4", fitted=False), *FEW_STEPS)
    made = fluxq("calibrate", *how, "-o", "s.safetensors")
    assert made.code == 0 and made.left == ["s.safetensors"]
    assert made.out.splitlines()[0] == "model tiny, recipe nvfp4, device cpu (torch finds no GPU)"
    assert "statistics of 8 images in s.safetensors" in made.out
    same = fluxq("calibrate", *how, "-o", "s.safetensors")
    assert same.code == 0 and "already done: s.safetensors holds the statistics of this r" in same.out
    assert_refused(fluxq("calibrate", *how, "--seed", 1, "-o", "s.safetensors"), 2, "holds statistics of another run")
    file = Path("s.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    damaged = fluxq("calibrate", *how, "-o", "s.safetensors")
    assert_refused(damaged, 2, "s.safetensors: damaged since it was written; --overwrite makes it again")
    again = fluxq("calibrate", *how, "-o", "s.safetensors", "--overwrite", "--json")
    assert json.loads(again.out) == {"statistics": "s.safetensors"}

    used = fluxq("quantize", *how, "--statistics", "s.safetensors", "--no-check", "-o", "one")
    assert used.code == 0
    own = fluxq("quantize", *how, "--no-check", "-o", "two", "-q")
    assert (own.code, own.out, own.err) == (0, "", "")
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()


def test_quiet_is_quiet_and_json_is_json(fluxq):
    quiet = fluxq("plan", "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    failed = fluxq("plan", "-q", "--recipe", "gone")
    assert failed.code == 2 and failed.out == "" and failed.err.startswith("Error: recipe 'gone'")
    done = fluxq("quantize", "--recipe", "fp8", "--json", "--no-check", "-o", "out")
    record = json.loads(done.out)
    assert record["output"] == "out" and record["recipe"]["name"] == "fp8" and done.err == ""


def test_rtn_needs_no_data_and_its_scales_are_dynamic(fluxq, monkeypatch, tmp_path):
    monkeypatch.setattr("fluxq.jobs.job.load_pipeline", lambda *a: pytest.fail("the pipeline was loaded"))
    assert fluxq("quantize", "--recipe", "nvfp4", "--profile", "rtn", "--no-check", "-o", "out").code == 0
    said = json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())["quantization_config"]
    assert "nvfp4-nvfp4" in said["layers"] and said["required_features"] == []
    assert not any(name.endswith("input_scale") for name in load_file(tmp_path / "out" / WEIGHTS))


def test_a_recipe_without_calibration_will_do_where_the_profile_only_rounds(fluxq, tmp_path):
    entry = "{weights: {format: nvfp4}, rounding: {method: gptq}}"
    (tmp_path / "r.yaml").write_text(f"components: {{transformer: {entry}}}\n")
    assert_refused(fluxq("plan", "--recipe", "r.yaml"), 2, "calibration: what transformer says is fitted to data")
    assert fluxq("plan", "--recipe", "r.yaml", "--profile", "rtn").code == 0


def test_a_missed_gate_fails_but_keeps_the_checkpoint(fluxq, tmp_path):
    (tmp_path / "strict.yaml").write_text('extends: fp8\ngates: ["psnr<=-1", "fid<=1"]\n')
    arguments = ("quantize", "--recipe", "strict.yaml", *FEW_STEPS)
    result = fluxq(*arguments)
    assert result.code == 1 and "Traceback" not in result.err
    assert "tiny-strict: gate missed: psnr<=-1 (paired PSNR" in result.err and "the checkpoint was kept" in result.err
    assert "FAILED" in (tmp_path / "tiny-strict" / "README.md").read_text()
    assert (tmp_path / "tiny-strict" / WEIGHTS).is_file()
    check = json.loads((tmp_path / "tiny-strict" / "fluxq_plan.json").read_text())["check"]
    assert (check["gates"], check["gates_for_eval"]) == (["psnr<=-1"], ["fid<=1"])
    again = fluxq(*arguments)
    assert again.code == 1 and "gate missed" in again.err and again.left == []


@pytest.mark.slow
def test_white_images_fail_the_closing_check_whatever_the_gates(fluxq, tmp_path, monkeypatch):
    from fluxq.jobs import making

    def white(pipe, items, call, *, description):
        made = jobs_generate(pipe, items, call, description=description)
        is_quantized = description == "Quantized pipeline"
        return replace(made, images=torch.full_like(made.images, 255)) if is_quantized else made

    jobs_generate = making.generate
    monkeypatch.setattr(making, "generate", white)
    (tmp_path / "ungated.yaml").write_text("extends: fp8\ngates: []\n")
    result = fluxq("quantize", "--recipe", "ungated.yaml", *FEW_STEPS)
    assert result.code == 1 and "tiny-ungated: 4 of 4 images are of one colour (paired PSNR" in result.err
    assert "FAILED: 4 images of one colour" in (tmp_path / "tiny-ungated" / "README.md").read_text()


def test_a_model_folder_and_recipe_model(fluxq, tiny_folder, tmp_path):
    (tmp_path / "own.yaml").write_text(f"extends: fp8\nmodel: {tiny_folder}\n")
    result = fluxq("quantize", "--recipe", "own.yaml", "--no-check")
    assert result.code == 0 and result.out.startswith(f"model {tiny_folder}, recipe own, device cpu")
    assert (tmp_path / "model-own" / WEIGHTS).is_file()


# Recipes that cannot be read


@pytest.mark.parametrize("command", ["plan", "calibrate", "quantize"])
def test_a_missing_recipe_lists_the_shipped_ones(fluxq, command):
    result = fluxq(command, "--recipe", "nvfp5")
    assert_refused(result, 2, "recipe 'nvfp5' is neither a file nor a shipped recipe", *shipped_recipes())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: fp8\nprofil: rtn\n", ["r.yaml:2: unknown key 'profil' (did you mean 'profile'?)"]),
        ("extends: fp8\nprofile: 3\n", ["r.yaml:2: profile: Input should be", "got 3"]),
        (
            "extends: fp8\ncomponents:\n  transformer:\n    weights: {format: fp9}\n",
            ["r.yaml:4:", "did you mean 'fp8'?"],
        ),
        (
            "extends: fp8\ncomponents:\n  transformer:\n    transforms: [smoth]\n",
            ["r.yaml:4:", "unknown transform 'smoth'"],
        ),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", ["r.yaml:1: anchors and aliases are not allowed"]),
        (
            "extends: fp8\nmodel: !!python/object/apply:os.system [id]\n",
            ["r.yaml:2: could not determine a constructor"],
        ),
        ("extends: gone\n", ["r.yaml:1: recipe 'gone' is neither a file nor a shipped recipe"]),
        ("extends: fp8\ncomponents:\n  vea:\n    weights: {format: fp8}\n", ["no component 'vea'", "transformer, vae"]),
        (
            "extends: fp8\ncomponents:\n  scheduler:\n    weights: {format: fp8}\n",
            ["FlowMatchEulerDiscreteScheduler is no model class", "without weights"],
        ),
        ("extends: fp8\ncomponents: {transformer: {exclude: [to_q]}}\n", ["'to_q' matches no Linear", "attn.to_q'"]),
    ],
)
def test_a_bad_recipe_is_named_with_line_and_cure(fluxq, tmp_path, text, words):
    (tmp_path / "r.yaml").write_text(text)
    assert_refused(fluxq("quantize", "--recipe", "r.yaml"), 2, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--include", "blocks.*.to_q"],
            ["pattern 'blocks.*.to_q' matches no Linear", "plan --layers` lists all"],
        ),
        (["--exclude", "a..b"], ["pattern 'a..b' is no module path"]),
        (["--exclude", "**"], ["leaves every Linear in 16 bit"]),
        (["--profile", "fastest"], ["--profile", "'balanced'"]),
        (["--seed", "-1"], ["--seed", "0"]),
        (["--seed", str(1 << 63)], ["--seed", "9223372036854775807"]),
        (["--num-inference-steps", "0"], ["--num-inference-steps"]),
        (["--dtype", "float8"], ["--dtype", "bfloat16"]),
        (["--device", "warp"], ["device 'warp' cannot be used", "--device cpu"]),
        (["--prompts", "gone.txt"], ["prompt file 'gone.txt' does not exist"]),
        (["--statistics", "gone"], ["statistics file gone does not exist; `fluxq calibrate` writes one"]),
        (["--unknown"], ["No such option"]),
    ],
)
def test_an_option_that_cannot_work_is_named(fluxq, arguments, words):
    assert_refused(fluxq("quantize", "tiny", "--recipe", "fp8", *arguments), 2, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_before_any_work(fluxq):
    assert_refused(fluxq("quantize", "--device", "cuda"), 2, "device 'cuda' cannot be used", "--device cpu")


def test_a_bad_prompt_file_is_named_with_its_line(fluxq, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert_refused(fluxq("quantize", "--prompts", "p.jsonl"), 2, "p.jsonl:2: no column called prompt", "found: promt")


# Models that cannot be read


def edit_json(path: Path, **changed) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def edit_weights(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def scramble(path: Path) -> None:
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


INDEX, CONFIG = "model_index.json", "transformer/config.json"
BAD_MODELS = {
    "no pipeline": (lambda m: (m / INDEX).unlink(), ["not a diffusers pipeline folder", INDEX]),
    "index is no JSON": (lambda m: (m / INDEX).write_text("{"), [INDEX, "not valid JSON", "copy it again"]),
    "index is a list": (lambda m: (m / INDEX).write_text("[]"), [INDEX, "expected a JSON object, found list"]),
    "unknown family": (
        lambda m: (
            edit_json(m / INDEX, transformer=["diffusers", "DiTTransformer2DModel"]),
            (m / CONFIG).write_text('{"num_layers": 1}'),
        ),
        [
            "DiTTransformer2DModel has no row in recipes/all_families.py",
            "its structure says too little (certainty 0%, needed 50%)",
            "how to add a row",
        ],
    ),
    "unknown class": (
        lambda m: edit_json(m / INDEX, transformer=["diffusers", "NewTransformer"]),
        ["NewTransformer is no model class of this diffusers", "a newer diffusers has"],
    ),
    "remote pipeline": (
        lambda m: edit_json(m / INDEX, _class_name=["mine", "MyPipeline"]),
        ["pipeline class from remote code, which is never run"],
    ),
    "remote component": (
        lambda m: edit_json(m / INDEX, transformer=["foo", "Bar"]),
        ["component 'transformer' comes from 'foo'", "never run"],
    ),
    "list class": (
        lambda m: edit_json(m / INDEX, transformer=["diffusers", ["mine", "Bar"]]),
        ["model_index.json says ['diffusers', ['mine', 'Bar']] of 'transformer', not its class"],
    ),
    "no class": (lambda m: edit_json(m / INDEX, vae=[]), ["model_index.json says [] of 'vae'"]),
    "outside": (
        lambda m: edit_json(m / INDEX, **{"..": ["diffusers", "AutoencoderKL"]}),
        ["component name '..' is no name of Python"],
    ),
    "far outside": (
        lambda m: edit_json(m / INDEX, **{"../../x": ["diffusers", "AutoencoderKL"]}),
        ["component name '../../x' is no name of Python"],
    ),
    "a path elsewhere": (
        lambda m: edit_json(m / INDEX, **{"a\\b": ["diffusers", "AutoencoderKL"]}),
        ["component name 'a\\\\b' is no name of Python"],
    ),
    "a file's name": (
        lambda m: edit_json(m / INDEX, **{"fluxq_plan.json": ["diffusers", "AutoencoderKL"]}),
        ["component name 'fluxq_plan.json' is no name of Python"],
    ),
    "long": (
        lambda m: edit_json(m / INDEX, **{"a" * 100_000: ["diffusers", "AutoencoderKL"]}),
        [f"component name '{'a' * 80}' is no name of Python"],
    ),
    "no config": (lambda m: (m / CONFIG).unlink(), ["config.json", "No such file"]),
    "bad config": (
        lambda m: edit_json(m / CONFIG, num_layers="two"),
        [CONFIG, "no FluxTransformer2DModel can be built"],
    ),
    "quantized": (lambda m: edit_json(m / CONFIG, quantization_config={}), ["is already quantized; start from"]),
    "cut": (lambda m: cut(m / WEIGHTS), [str(WEIGHTS), "truncated or damaged safetensors file", "copy it again"]),
    "scrambled": (lambda m: scramble(m / WEIGHTS), [str(WEIGHTS), "truncated or damaged", "copy it again"]),
    "empty": (lambda m: (m / WEIGHTS).write_bytes(b""), [str(WEIGHTS), "truncated or damaged", "copy it again"]),
    "vae cut": (lambda m: cut(next((m / "vae").glob("*.safetensors"))), ["vae", "truncated or damaged"]),
    "pickle": (
        lambda m: (m / WEIGHTS).rename(m / WEIGHTS.with_suffix(".bin")),
        ["holds pickle weights (diffusion_pytorch_model.bin)", "convert them to safetensors"],
    ),
    "text encoder pickle": (
        lambda m: (m / "text_encoder/model.safetensors").rename(m / "text_encoder/pytorch_model.bin"),
        ["text_encoder: holds pickle weights (pytorch_model.bin)"],
    ),
    "no index": (
        lambda m: (m / WEIGHTS).rename(m / WEIGHTS.with_name("diffusion_pytorch_model-00001-of-00002.safetensors")),
        ["transformer: holds parts of weights (diffusion_pytorch_model-00001-of-00002", "no index", "copy the folder"],
    ),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), ["transformer: holds no safetensors weights"]),
}


@pytest.mark.parametrize("command", ["plan", "quantize"])
@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_model_that_cannot_work_is_refused_before_any_work(fluxq, tiny_folder, case, command):
    damage, words = BAD_MODELS[case]
    damage(tiny_folder)
    assert_refused(fluxq(command, "model", "--recipe", "nvfp4"), 2, *words)


@pytest.mark.parametrize("model", ["nowhere", "no/where", "/no/where/at/all", "recipe.safetensors", ""])
def test_a_model_that_is_not_there_is_named(fluxq, model, tmp_path):
    (tmp_path / "recipe.safetensors").write_text("")
    shown = model or "tiny (no MODEL"
    if model:
        assert_refused(fluxq("quantize", model), 2, f"model {shown!r} is neither a folder nor a hub model")


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems take no such name")
def test_a_folder_that_no_file_can_tell_of_is_named(fluxq, tiny_folder):
    os.rename(tiny_folder, b"mod\xe9l")
    assert_refused(fluxq("quantize", os.fsdecode(b"mod\xe9l"), "--recipe", "fp8"), 2, "no UTF-8", "rename it")


BAD_WEIGHTS = {
    "nan": (lambda t: t[f"{LAYER}.weight"][0, 0].fill_(float("nan")), [LAYER, "holds NaN or infinity"]),
    "infinity": (lambda t: t[f"{LAYER}.weight"][3, 5].fill_(float("inf")), [LAYER, "holds NaN or infinity"]),
    "nan in a bias": (lambda t: t[f"{LAYER}.bias"][0].fill_(float("nan")), [f"{LAYER}.bias: holds NaN or infinity"]),
    "lacks one": (lambda t: t.pop(f"{LAYER}.weight"), [f"the weights lack '{LAYER}.weight'", "config.json implies"]),
    "shape": (
        lambda t: t.update({f"{LAYER}.weight": torch.zeros(128, 64, dtype=torch.bfloat16)}),
        [f"{LAYER}: weight has shape (128, 64), config.json implies (128, 128)"],
    ),
    "integers": (
        lambda t: t.update({f"{LAYER}.weight": torch.zeros(128, 128, dtype=torch.int8)}),
        [f"{LAYER}: expected a floating-point matrix (N, K), got torch.int8"],
    ),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_cannot_be_quantized_name_the_layer_and_leave_nothing(fluxq, tiny_folder, case):
    damage, words = BAD_WEIGHTS[case]
    edit_weights(tiny_folder / WEIGHTS, damage)
    assert_refused(fluxq("quantize", "model", "--recipe", "fp8", "--no-check"), 1, *words)
    assert_refused(fluxq("quantize", "model", "--recipe", "nvfp4", "--profile", "rtn", "--no-check"), 1, *words)


@pytest.mark.slow
def test_nan_found_by_calibration_names_the_weight_that_holds_it(fluxq, tiny_folder, quick_recipe):
    edit_weights(tiny_folder / WEIGHTS, BAD_WEIGHTS["nan"][0])
    assert_refused(fluxq("quantize", "model", "--recipe", quick_recipe("nvfp4")), 1, f"{LAYER}.weight: holds NaN")
    result = fluxq("calibrate", "model", "--recipe", quick_recipe("nvfp4"))
    assert_refused(result, 1, f"{LAYER}.weight: holds NaN or infinity")


@pytest.mark.often(1)
@pytest.mark.parametrize("place", ["None.py", "transformer/diffusers.py", "vae/diffusers.py", "FluxPipeline.py"])
def test_code_beside_the_weights_is_never_run(fluxq, tiny_folder, tmp_path, place):
    (tiny_folder / place).write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\n")
    result = fluxq("quantize", "model", "--recipe", "fp8", "--num-inference-steps", 1, "-o", "out")
    assert not (tmp_path / "trace").exists() and "Traceback" not in result.err
    assert result.code == 0 or result.left == []
    assert not list(tmp_path.glob("out/**/*.py"))


def test_a_checkpoint_is_no_source(fluxq, checkpoint):
    result = fluxq("quantize", checkpoint("fp8"), "--recipe", "fp8")
    assert_refused(result, 2, "transformer is already quantized; start from the 16-bit model")


def test_statistics_of_another_model_are_refused(fluxq, tiny_folder, statistics_file):
    edit_weights(tiny_folder / WEIGHTS, lambda t: t[f"{LAYER}.weight"][0, 0].fill_(9.0))
    result = fluxq("quantize", "model", "--statistics", statistics_file)
    assert_refused(result, 2, "statistics were gathered on another model; run `fluxq calibrate`")
    (tiny_folder.parent / "s").write_text("no statistics")
    assert_refused(fluxq("quantize", "--statistics", "s"), 2, "s: truncated or damaged safetensors file")


# Outputs that cannot be written


def test_an_output_folder_that_is_not_empty_is_refused(fluxq, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    result = fluxq("quantize", "-o", "out")
    assert_refused(result, 2, "output out exists; give another --output")
    again = fluxq("quantize", "-o", "out", "--overwrite")
    assert_refused(again, 2, "output out is not replaced: nothing marks mine as fluxq's; remove it yourself")


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("file", ["output file is a file"]),
        ("file/out", ["output file/out cannot be made", "file is no folder one may write to"]),
        (".", ["output . holds", "which would be replaced"]),
        ("..", ["output .. holds"]),
        ("model", ["output model is the model, which would be replaced"]),
    ],
)
def test_an_output_that_cannot_or_must_not_be_made_is_refused(fluxq, tiny_folder, tmp_path, output, words, overwrite):
    (tmp_path / "file").write_text("mine")
    result = fluxq("quantize", "model", "--recipe", "fp8", "--no-check", "-o", output, *overwrite)
    assert_refused(result, 2, *words, "give another --output")
    assert (tmp_path / "file").read_text() == "mine"


def test_calibrate_does_not_write_over_a_folder(fluxq, tmp_path):
    (tmp_path / "out").mkdir()
    for overwrite in ([], ["--overwrite"]):
        assert_refused(fluxq("calibrate", "-o", "out", *overwrite), 2, "output out is a folder; give a file")


def test_a_full_disk_is_foreseen(fluxq, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    result = fluxq("quantize", "--recipe", "fp8", "--no-check")
    assert_refused(
        result, 1, "not enough space in", "the checkpoint may need 4.25 MB, 1 kB are free", "another --output"
    )


@pytest.mark.often(1)
@pytest.mark.parametrize("command", ["quantize", "calibrate"])
def test_a_write_that_fails_is_named_and_leaves_nothing(fluxq, quick_recipe, command):
    arguments = ["quantize", "--recipe", "fp8", "--no-check"] if command == "quantize" else ["calibrate", "--recipe"]
    if command == "calibrate":
        arguments.append(quick_recipe("nvfp4"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        result = fluxq(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_refused(result, 1, "cannot write ", "File too large")
    assert "GB are free" not in result.err  # room is not what lacks


@pytest.mark.parametrize("size", ["0GB", "5", "GB", "-1MB", "5 bananas"])
def test_a_shard_size_that_is_none_is_refused(fluxq, size):
    assert_refused(fluxq("quantize", "--max-shard-size", size), 2, "as in 5GB or 800MB")


def test_weights_are_cut_into_shards_of_the_size_asked_for(fluxq, tmp_path):
    assert fluxq("quantize", "--recipe", "fp8", "--no-check", "--max-shard-size", "0.5MiB").code == 0
    shards = sorted((tmp_path / "tiny-fp8" / "transformer").glob("*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size < (1 << 19) + 20_000 for path in shards)
    assert_refused(fluxq("quantize", "--recipe", "fp8", "--no-check"), 2, "differs in max_shard_bytes")


# How a failure is shown


def test_verbose_shows_the_traceback_and_the_message(fluxq):
    result = fluxq("plan", "-v", "--recipe", "gone")
    assert result.code == 2 and "Traceback (most recent call last)" in result.err
    assert result.err.splitlines()[-1].startswith("Error: recipe 'gone' is neither")


def test_a_fault_of_our_own_is_not_hidden(fluxq, monkeypatch, tmp_path):
    monkeypatch.setattr("fluxq.jobs.making.job_of", lambda *a, **k: {}["bug"])
    monkeypatch.setattr(sys, "argv", ["fluxq", "plan"])
    with pytest.raises(KeyError):
        main()


@pytest.mark.slow
def test_an_interruption_leaves_only_what_is_done(fluxq, monkeypatch, tmp_path, caplog):
    """Before the first block that is nothing; afterwards the blocks, which the same command goes on with."""

    def interrupt(*arguments):
        raise KeyboardInterrupt

    for place in (
        "fluxq.jobs.job.load_pipeline",
        "fluxq.jobs.making.write_text",
        "fluxq.quantize.checkpoint.copy_rest",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupt)
            result = fluxq("quantize", "--recipe", "fp8", *([] if "load" in place else ["--no-check"]))
        assert result.code == 130 and not any("what is done is kept" in said for said in caplog.messages), place
        if "load" in place:
            assert result.left == [] and result.err.endswith(
                "interrupted; every output, and what interrupted runs had done before, is as it was or whole\n"
            )
        else:
            (work,) = tmp_path.iterdir()
            kept = f"what is done is kept in {work}: the same command goes on with it"
            assert result.err.splitlines()[-1] == f"interrupted; {kept}"
            assert not list(work.rglob("*.part")) and not (work / "new").exists()
        caplog.clear()
    result = fluxq("quantize", "--recipe", "fp8", "--no-check")
    assert result.code == 0 and caplog.messages[-1] == f"going on with what an interrupted run left in {work}"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-fp8"]


@pytest.mark.parametrize("kind", ["lock", "pid"])
@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "--recipe", "fp8", "--no-check", "-o", "out"),
        ("calibrate", "--recipe", "nvfp4", "-o", "out"),
    ],
)
def test_what_lies_where_the_lock_goes_is_refused_before_any_work(fluxq, tmp_path, words, kind):
    (tmp_path / f".out.{kind}").mkdir()
    assert_refused(fluxq(*words), 2, f".out.{kind} is in the way, where fluxq needs a file of its own; remove it")


@pytest.mark.often(1)
@pytest.mark.parametrize("command", ["quantize", "calibrate"])
def test_the_work_of_another_job_is_refused_before_any_work_and_a_process_at_it_later(fluxq, tmp_path, command):
    """2 is what cannot work; that another process writes there just now is no fault of what was asked."""
    work = tmp_path / ".out.0123456789abcdef.work"
    work.mkdir()
    (work / "job.json").write_text("{}")
    words = (command, "--recipe", "nvfp4", "--num-inference-steps", 1, "-o", "out")
    assert_refused(fluxq(*words), 2, "an interrupted run that differs in ", f"is kept in {work}; go on with it ")
    with sole_writer(tmp_path / "out"):
        assert_refused(fluxq(*words), 1, "is being written by process")


@pytest.mark.parametrize("words", [("plan",), ("inspect", "out"), ("verify", "out"), ("families",)])
def test_an_interrupted_command_without_output_speaks_of_none(fluxq, monkeypatch, tmp_path, words):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    command = cli.commands[words[0]]
    monkeypatch.setattr(command, "callback", interrupted)
    result = fluxq(*words)
    assert (result.code, result.err.strip()) == (130, "interrupted; this command has no output")
    monkeypatch.setattr(cli.commands["report"], "callback", interrupted)
    assert "every output" in fluxq("report", "out").err


def test_a_stream_that_ends_early_is_an_error_and_no_interruption(fluxq, monkeypatch):
    def truncated(*_: object, **__: object) -> None:
        raise EOFError("the stream ended")

    monkeypatch.setattr(cli.commands["plan"], "callback", truncated)
    with pytest.raises(EOFError, match="the stream ended"):
        fluxq("plan")


def test_help_says_where_each_command_writes(fluxq):
    for command, place in {
        "quantize": "<model>-<recipe>",
        "calibrate": "<model>-<recipe>-statistics.safetensors",
        "import": "<PATH>-fluxq",
    }.items():
        said = re.sub(r"-\n\s+", "-", fluxq(command, "--help").out)
        assert f"by default ./{place}." in " ".join(said.split()), command


# Real processes


def test_a_real_process_ends_with_code_and_message(tmp_path):
    processes = [
        forked.start("-m", "fluxq", "quantize", "--recipe", "gone", cwd=tmp_path),
        forked.start("-m", "fluxq", "--version", cwd=tmp_path),
        forked.start("-m", "fluxq", "nonsense", cwd=tmp_path),
    ]
    (_, missing), (version, _), (_, unknown) = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [2, 0, 2]
    assert missing.startswith("Error: recipe 'gone' is neither") and len(missing.splitlines()) == 1
    assert version == f"fluxq, version {__version__}\n"
    assert "No such command 'nonsense'" in unknown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_during_work_ends_with_a_message_and_leaves_what_is_done(tmp_path):
    process = forked.start("-m", "fluxq", *"quantize --recipe fp8 --num-inference-steps 16".split(), cwd=tmp_path)
    try:
        deadline = time.monotonic() + 600
        while not list(tmp_path.glob(".tiny-fp8.*.work/new/transformer/*.safetensors")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130
    (work,) = tmp_path.iterdir()
    kept = f"interrupted; what is done is kept in {work}: the same command goes on with it"
    assert err.strip().splitlines()[-1] == kept and err.count("interrupted") == 1
    assert sorted(path.name for path in work.iterdir()) == ["job.json", "transformer"]


def test_generation_defaults_that_the_pipeline_does_not_take_are_refused(fluxq, tiny_folder):
    (tiny_folder / "fluxq_generation.json").write_text(json.dumps({"heigth": 16}))
    assert_refused(fluxq("quantize", tiny_folder), 2, "fluxq_generation.json", "heigth")


@pytest.mark.slow
def test_calibrate_says_what_its_statistics_are_for(fluxq, tiny_folder, quick_recipe):
    """A command that works from here; with a fitted recipe they widen scales, with others they may be of no use."""
    few = ("--num-inference-steps", 1, "-o", "s.safetensors", "--overwrite")
    static = quick_recipe("nvfp4", fitted=False)
    result = fluxq("calibrate", tiny_folder, "--recipe", static, "--profile", "fast", *few)
    command = result.out.splitlines()[-1]
    assert command == f"next: fluxq quantize {tiny_folder} --recipe {static} --profile fast --statistics s.safetensors"
    assert fluxq(*shlex.split(command)[2:], "--no-check").code == 0
    result = fluxq("calibrate", tiny_folder, "--recipe", quick_recipe("nvfp4"), *few)
    assert "they widen input scales; layers are fitted to calls that `fluxq quantize` captures itself" in result.out
    again = ("calibrate", tiny_folder, "--recipe", static, "--num-inference-steps", 1, "-o", "u.safetensors")
    assert "already done" not in fluxq(*again).out
    assert "already done: u.safetensors holds the statistics of this recipe and model\n" in fluxq(*again).out
    for recipe in ("int4", "fp8"):
        result = fluxq("calibrate", tiny_folder, "--recipe", quick_recipe(recipe), *few)
        assert f"recipe {recipe} stores no input scale, so `fluxq quantize` has no use for them" in result.out
        assert "next:" not in result.out
        refused = fluxq("quantize", tiny_folder, "--recipe", recipe, "--statistics", "s.safetensors")
        assert_refused(refused, 2, f"recipe {recipe} stores no input scale", "leave out --statistics")
