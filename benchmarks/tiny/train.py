"""Train the embedded pipeline and the networks that judge it, from nothing.

    python -m benchmarks.tiny.train --output DIR [--minutes 60] [--seed 0] [--device cpu]
    python -m benchmarks.tiny.train --output DIR --smoke          a few steps of everything

Writes into DIR: pipeline/ (diffusers), clip/ (open_clip), features.safetensors, held_out.safetensors,
training_log.json. With `--work W` each finished training is kept in W and not repeated by the next call.
Ctrl-C ends the training that is running and goes on with what it has learned.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.tiny import build, data, drawing, stages
from benchmarks.tiny.accuracy import accuracy, classify
from fluxq import tiny

# Share of the minutes, number of drawn images. The place in the order is added to the seed.
STAGES = {
    "autoencoder": (0.13, 40_000),
    "classifier": (0.04, 40_000),
    "transformer": (0.76, 60_000),
    "clip": (0.07, 40_000),
}
SMOKE = {"steps": 3, "images": 256, "held_out": 64, "generated": 16}
GENERATION = {
    "height": data.SIZE,
    "width": data.SIZE,
    "max_sequence_length": build.TEXT_TOKENS,
    "num_inference_steps": 8,
    "guidance_scale": 1.0,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiny.train", description="Train the embedded pipeline.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time of all trainings together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--work", type=Path, help="folder that keeps finished trainings")
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything: does the script run?")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = train(given.output, given.minutes, given.seed, given.device, given.work, given.smoke)
    print(json.dumps(log["results"], indent=2))


def train(
    output: Path,
    minutes: float = 60.0,
    seed: int = 0,
    device: str = "cpu",
    work: Path | None = None,
    smoke: bool = False,
) -> dict:
    """Run every stage, write `output` and return the log that is written beside the weights."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        logs = {name: stage(name, folder, minutes, seed, device, smoke) for name in STAGES}
        return assemble(folder, output, logs, seed, device, smoke)


def stage(name: str, folder: Path, minutes: float, seed: int, device: str, smoke: bool) -> dict:
    """Run one training, or read its log where `folder` already holds it."""
    done = folder / f"{name}.json"
    if done.exists():
        return json.loads(done.read_text(encoding="utf-8"))
    share, count = STAGES[name]
    seed = 10 * seed + list(STAGES).index(name)
    torch.manual_seed(seed)
    images = drawing.draw(SMOKE["images"] if smoke else count, seed)
    budget = stages.Budget(60 * minutes * share, SMOKE["steps"] if smoke else None)
    if name == "autoencoder":
        log = stages.train_autoencoder(images, budget, folder, device)
    elif name == "classifier":
        log = stages.train_classifier(images, budget, folder, device)
    elif name == "clip":
        log = stages.train_clip(images, budget, folder, device)
    else:
        log = stages.train_transformer(images, stages.load_autoencoder(folder).to(device), budget, folder, device)
    done.write_text(json.dumps(log), encoding="utf-8")
    return log


def assemble(folder: Path, output: Path, logs: dict, seed: int, device: str, smoke: bool) -> dict:
    """Write everything that ships into `output`, measure what was written, and put the log beside it."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".new-") as temporary:
        new = Path(temporary)
        write_pipeline(folder, new / "pipeline")
        shutil.copytree(folder / "clip", new / "clip")
        shutil.copy(folder / "features.safetensors", new / "features.safetensors")
        write_held_out(new / "held_out.safetensors", SMOKE["held_out"] if smoke else 1024)
        log = {
            "results": measure(new, device, SMOKE["generated"] if smoke else 512),
            "seed": seed,
            "hardware": hardware(device),
            "versions": {name: version(name) for name in LIBRARIES},
            "stages": logs,
        }
        (new / "training_log.json").write_text(dump(log), encoding="utf-8")
        for item in new.rglob("*"):
            item.chmod(0o755 if item.is_dir() else 0o644)  # safetensors writes files for their owner only
        for item in sorted(new.iterdir()):
            replace(item, output / item.name)
    return log


LIBRARIES = ("torch", "diffusers", "transformers", "open_clip_torch", "scikit-learn", "numpy")


def dump(log: dict) -> str:
    """JSON, indented, with each point of a curve on one line."""
    text = json.dumps(log, indent=1)
    return re.sub(r"\[\s+([-\d.]+),\s+([-\d.]+),\s+([-\d.eE]+)\s+\]", r"[\1, \2, \3]", text) + "\n"


def replace(new: Path, old: Path) -> None:
    """Put `new` in the place of `old`; readers see one or the other."""
    if old.is_dir():
        old.rename(new.parent / f"old-{old.name}")
    new.replace(old)


def write_pipeline(folder: Path, target: Path) -> None:
    """The stock pipeline in bfloat16 with its prompts, call arguments, licence and card."""
    vae = stages.load_autoencoder(folder)
    student = stages.Student.load(vae, folder)
    parts = (student.transformer, vae, student.t5, student.clip)
    for part in parts:
        torch.nn.Module.to(part, torch.bfloat16)  # diffusers' own `to` warns of parts kept in float32: none here
    pipe = build.pipeline(*parts)
    pipe.save_pretrained(target, safe_serialization=True)
    (target / "fluxq_generation.json").write_text(json.dumps(GENERATION, indent=2) + "\n", encoding="utf-8")
    (target / "fluxq_prompts.txt").write_text("\n".join(data.captions()) + "\n", encoding="utf-8")
    (target / "README.md").write_text(CARD, encoding="utf-8")
    shutil.copy(Path(tiny.__file__).with_name("LICENSES.txt"), target / "LICENSE.txt")


def write_held_out(file: Path, count: int) -> None:
    """Images of digits that no training saw, with captions and licence in the metadata."""
    images = drawing.draw(count, seed=1000, held_out=True)
    metadata = {
        "captions": json.dumps(images.captions()),
        "license": "CC-BY-4.0 (digits), Apache-2.0 (shapes)",
    }
    save_file({"images": torch.from_numpy(images.pixels)}, file, metadata=metadata)


def measure(folder: Path, device: str, count: int) -> dict:
    """Accuracies of the written weights on real, reconstructed and generated images; cosines of the CLIP."""
    network = tiny.feature_network(folder / "features.safetensors").to(device)
    images, captions = tiny.held_out(folder / "held_out.safetensors")
    pipe = tiny.load(folder=folder / "pipeline").to(device)
    with torch.no_grad():
        again = stages.reconstruct(pipe.vae, images.to(device))
    error = (again.float().cpu() - images.float()).square().mean((1, 2, 3))  # (N,)
    prompts = [text for _ in range(-(-count // len(data.captions()))) for text in data.captions()][:count]
    generated = generate(pipe, prompts)
    hits = classify(network, generated)["object"].argmax(1).cpu()
    wanted = torch.tensor([data.parse(text)[0] for text in prompts])
    by_object = {
        name: round(float((hits[wanted == at] == at).float().mean()), 3)
        for at, name in enumerate(data.OBJECTS)
        if (wanted == at).any()
    }
    return {
        "accuracy_held_out": rounded(accuracy(network, images.to(device), captions)),
        "accuracy_reconstructed": rounded(accuracy(network, again, captions)),
        "psnr_reconstructed_db": round(float((10 * torch.log10(255**2 / error)).mean()), 2),
        "accuracy_generated": rounded(accuracy(network, generated, prompts)),
        "accuracy_generated_by_object": by_object,
        "generated_images": count,
        "clip_cosine_held_out": cosines(folder / "clip", images, captions),
        "clip_cosine_generated": cosines(folder / "clip", generated.cpu(), prompts),
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


@torch.no_grad()
def generate(pipe, prompts: list[str], batch: int = 128) -> torch.Tensor:
    """One image per prompt, noise seeded with its place: (N, 3, 16, 16) uint8 on the pipeline's device."""
    parts = []
    for start in range(0, len(prompts), batch):
        texts = prompts[start : start + batch]
        generators = [torch.Generator().manual_seed(start + at) for at in range(len(texts))]
        images = pipe(prompt=texts, generator=generators, output_type="pt", **GENERATION).images
        parts.append((images.float() * 255).round().to(torch.uint8))
    return torch.cat(parts)


@torch.no_grad()
def cosines(folder: Path, images: torch.Tensor, captions: list[str]) -> dict[str, float]:
    """Mean cosine of images with their own caption, with one of another object, and with a wholly other one.

    `object_named` is the share of images nearest to their own caption among the 16 that differ in the object.
    """
    import open_clip

    model: Any
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    model.eval()
    image = model.encode_image(stages.pixels_to_float(images), normalize=True)  # (N, D)
    labels = torch.tensor([data.parse(text) for text in captions])  # (N, 3)
    siblings = [[data.caption(o, int(c), int(b)) for o in range(len(data.OBJECTS))] for _, c, b in labels]
    text = model.encode_text(tokenizer([t for row in siblings for t in row]), normalize=True)
    cosine = torch.einsum("nd,nod->no", image, text.unflatten(0, (len(captions), -1)))  # (N, 16)
    own = torch.nn.functional.one_hot(labels[:, 0], len(data.OBJECTS)).bool()
    other = model.encode_text(tokenizer([data.caption(*other_labels(row)) for row in labels.tolist()]), normalize=True)
    values = {
        "matched": cosine[own].mean(),
        "other_object": cosine[~own].mean(),
        "all_other": (image * other).sum(1).mean(),
        "object_named": (cosine.argmax(1) == labels[:, 0]).float().mean(),
    }
    return {name: round(float(value), 4) for name, value in values.items()}


def other_labels(labels: list[int]) -> tuple[int, int, int]:
    """Labels of which every part differs."""
    obj, colour, background = labels
    return (
        (obj + 7) % len(data.OBJECTS),
        (colour + 3) % len(data.COLOURS),
        (background + 1) % len(data.BACKGROUNDS),
    )


def hardware(device: str) -> str:
    """Such as "2 x86_64 CPU cores (AMD EPYC)"."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{os.cpu_count()} {platform.machine()} CPU cores ({model})"


CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-image
tags:
- flux
- text-to-image
- tiny
- quantization
---

# The embedded pipeline of fluxq

A `FluxPipeline` of 1.9 million weights for tests and demonstrations of quantization. It draws one object on
a plain background, 16 x 16 pixels, from captions of the form `a <colour> <object> on <background>`; all of
them are in `fluxq_prompts.txt`, and `fluxq_generation.json` holds the arguments of an ordinary call:

    import json, pathlib
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(folder)
    call = json.loads(pathlib.Path(folder, "fluxq_generation.json").read_text())
    pipe("a red three on black", **call).images[0]

Trained from nothing by `python -m benchmarks.tiny.train` on the handwritten digits of scikit-learn and on drawn
shapes. It says nothing about how well a format does on a large model: it has no outliers, 24 tokens and
five blocks. Licences: `LICENSE.txt`.
"""


if __name__ == "__main__":
    main()
