"""Every command that writes, as small as it can be: one row for each way to write."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fluxq import tiny
from fluxq.cli import cli

_MODELS = {"model": 1.0, "other": 1.02}  # the factor of their weights
PROMPTS = "a red three on black\na blue seven on white\n"
SIZES = "--num-inference-steps 1 --height 16 --width 16"


@dataclass(frozen=True)
class Command:
    """words: after `fluxq`; {base} is the folder that `make` fills. before: what stands at its place when it begins.

    in_place: it adds files to a folder, one by one, so that some may be new where others are not.
    """

    words: str
    before: tuple[tuple[str, str], ...] = ()  # of the base, at the place
    in_place: bool = False


def needs(command: Command) -> set[str]:
    """The names in the base that a command reads, or finds at its place."""
    read = re.findall(r"(?<!-o )(?<!--images )\{base\}/([^\s,]+)", command.words)
    warm = ["model-evaluated"] if command.in_place else []  # which imports what the command does
    return {*read, *warm, *(source for source, _ in command.before)}


def make(base: Path, name: str) -> None:
    """Make something in the base, and before it what that is made of."""
    if (base / name).exists():
        return
    stem, kind = next((name.removesuffix(kind), kind) for kind in (*_MADE, "") if name.endswith(kind))
    if name in _MODELS:
        _model(base / name, _MODELS[name])
    elif name == "prompts.txt":
        (base / name).write_text(PROMPTS, encoding="utf-8")
    elif name == "lora.safetensors":
        down = {"lora_A": torch.ones(2, 128) * 0.01, "lora_B": torch.ones(128, 2) * 0.01}
        layer = "transformer.transformer_blocks.0.attn.to_q"
        save_file({f"{layer}.{part}.weight": value for part, value in down.items()}, base / name)
    else:
        words = _MADE[kind].replace("STEM", stem)
        for other in needs(Command(words)) - {name}:
            make(base, other)
        if kind == "-evaluated":
            make(base, f"{stem}-fp8")
            shutil.copytree(base / f"{stem}-fp8", base / name)
        cli.main(words.format(base=base).split(), standalone_mode=False)


def _model(folder: Path, factor: float) -> None:
    """The embedded pipeline with one block of each kind, its transformer's weights scaled."""
    from diffusers import FluxTransformer2DModel

    shutil.copytree(tiny.path(), folder, ignore=shutil.ignore_patterns("transformer", "README.md", "LICENSE*"))
    whole: Any = FluxTransformer2DModel.from_pretrained(tiny.path(), subfolder="transformer")
    cut: Any = FluxTransformer2DModel.from_config({**whole.config, "num_single_layers": 1})
    weights = whole.state_dict()
    cut.load_state_dict({name: weights[name] * factor for name in cut.state_dict()})
    cut.to(torch.bfloat16).save_pretrained(folder / "transformer")


_QUANTIZE = "quantize {base}/model --recipe fp8 --profile rtn --no-check -o out"
_CALIBRATED = "--recipe nvfp4 --prompts {base}/prompts.txt " + SIZES
_EVAL = "--prompts {base}/prompts.txt --metrics psnr --backends native " + SIZES
_AUTO = " --bits 6 --count 1 --measure velocity --menu nvfp4,fp8 --prompts {base}/prompts.txt " + SIZES
_FROM = _AUTO.replace("--bits 6", "--bits 9").replace("nvfp4,fp8", "fp8,int8,16bit")
_TABLE = "model-velocity-errors.safetensors"
_STEPS = " --compute 0.9 --count 4 --num-inference-steps 2 --height 16 --width 16 --prompts {base}/prompts.txt"
_EVALUATED = (("model-evaluated", "out"),)
_MADE = {  # by the end of the name
    "-fp8": "quantize {base}/STEM --recipe fp8 --profile rtn --no-check -o {base}/STEM-fp8 -q",
    "-int8": "quantize {base}/STEM --recipe int8 --profile rtn --no-check -o {base}/STEM-int8 -q",
    "-torchao": "export {base}/STEM-fp8 --format torchao -o {base}/STEM-torchao -q",
    "-imported": "import {base}/STEM.safetensors --base {base}/STEM -o {base}/STEM-imported -q",
    "-evaluated": "eval {base}/STEM-evaluated --count 2 --images {base}/STEM-images -q " + _EVAL,
    "-auto.yaml": "auto {base}/STEM" + _AUTO + " -o {base}/STEM-auto.yaml -q",
    "-velocity-errors.safetensors": "auto {base}/STEM" + _AUTO + " -o {base}/STEM-auto.yaml -q",
    "-steps.json": "steps {base}/STEM" + _STEPS + " -o {base}/STEM-steps.json -q",
    "-auto.json": "auto {base}/STEM" + _AUTO + " -o {base}/STEM-auto.yaml -q",
    ".statistics": "calibrate {base}/STEM " + _CALIBRATED + " -o {base}/STEM.statistics -q",
    ".safetensors": "export {base}/STEM-fp8 --format bfl -o {base}/STEM.safetensors -q",
    ".config.json": "export {base}/STEM-fp8 --format bfl -o {base}/STEM.safetensors -q",
    ".history": "bench {base}/STEM-evaluated --rounds 3 --prompts {base}/prompts.txt --history {base}/STEM.history -q "
    + SIZES,
    ".html": "report {base}/STEM-evaluated -o {base}/STEM.html -q",
    ".json": "report {base}/STEM-evaluated -o {base}/STEM.html -q",
    ".md": "report {base}/STEM-evaluated -o {base}/STEM.html -q",
}
COMMANDS = {
    "auto": Command("auto {base}/model" + _AUTO + " -o out.yaml", in_place=True),
    "auto, replacing": Command(
        "auto {base}/model" + _AUTO + " -o out.yaml --overwrite",
        (("other-auto.yaml", "out.yaml"), ("other-auto.json", "out.json"), (_TABLE, _TABLE)),
    ),
    "steps": Command("steps {base}/model" + _STEPS + " -o out.json"),
    "steps, replacing": Command(
        "steps {base}/model" + _STEPS + " -o out.json --overwrite", (("other-steps.json", "out.json"),)
    ),
    "auto, putting a checkpoint together": Command(
        "auto {base}/model" + _FROM + " --from {base}/model-fp8,{base}/model-int8 --assemble out -o out.yaml",
        in_place=True,
    ),
    "quantize": Command(_QUANTIZE),
    "quantize into shards": Command(_QUANTIZE + " --max-shard-size 300KB"),
    "quantize, replacing": Command(_QUANTIZE + " --overwrite", (("other-fp8", "out"),)),
    "quantize, a text encoder too": Command(_QUANTIZE + " --components transformer,text_encoder_2"),
    "quantize with a LoRA": Command(_QUANTIZE + " --lora {base}/lora.safetensors"),
    "quantize, fitted": Command(
        "quantize {base}/model --profile fast --include **.to_v --no-check -o out " + _CALIBRATED
    ),
    "recipe new": Command("recipe new --gpu 4070 --want quality --model SANA-0.6B -o out.yaml", in_place=True),
    "calibrate": Command("calibrate {base}/model " + _CALIBRATED + " -o out.safetensors"),
    "calibrate, replacing": Command(
        "calibrate {base}/model " + _CALIBRATED + " -o out.safetensors --overwrite",
        (("other.statistics", "out.safetensors"),),
    ),
    "export to a file": Command("export {base}/model-int8 --format comfy -o out.safetensors"),
    "export to a file and one beside": Command("export {base}/model-fp8 --format bfl -o out.safetensors"),
    "export to a file and one beside, replacing": Command(
        "export {base}/model-fp8 --format bfl -o out.safetensors --overwrite",
        (("other.safetensors", "out.safetensors"), ("other.config.json", "out.config.json")),
    ),
    "export a list of steps": Command("export {base}/model-steps.json --format cache-dit -o out.yaml"),
    "export to a folder": Command("export {base}/model-fp8 --format torchao -o out"),
    "export to a folder, replacing": Command(
        "export {base}/model-fp8 --format torchao -o out --overwrite", (("other-torchao", "out"),)
    ),
    "import": Command("import {base}/model.safetensors --base {base}/model -o out"),
    "import, replacing": Command(
        "import {base}/model.safetensors --base {base}/model -o out --overwrite", (("other-imported", "out"),)
    ),
    "eval": Command("eval out --count 2 --images images " + _EVAL, (("model-fp8", "out"),), in_place=True),
    "bench": Command(
        "bench out --rounds 3 --warmup 1 --prompts {base}/prompts.txt " + SIZES, _EVALUATED, in_place=True
    ),
    "debug": Command(
        "debug out --count 1 --budget 24 --growth 1 --prompts {base}/prompts.txt --patch patch.yaml " + SIZES + "",
        _EVALUATED,
        in_place=True,
    ),
    "gate": Command(
        "gate {base}/model model-fp8 --images 2 --batch-size 1 --prompts {base}/prompts.txt --work images "
        "--margin psnr=60 --margin latent_sqnr=60 --markdown out.md " + SIZES,
        (("model-fp8", "model-fp8"),),
        in_place=True,
    ),
    "history": Command("history {base}/model.history -o out.html"),
    "report": Command("report {base}/model-evaluated -o out.html"),
    "report, replacing": Command(
        "report {base}/model-evaluated -o out.html --overwrite",
        (("other.html", "out.html"), ("other.json", "out.json"), ("other.md", "out.md")),
    ),
}
