"""One image per recipe with the libraries that engines pin: the bytes of the newest, or no further off than 16 bit.

    python tests/overlays.py WORK [--set sglang]

WORK gets a checkpoint of the embedded pipeline per shipped recipe, rounded to nearest, and a folder per set of
libraries, which pip fills and which stands first on a fresh interpreter's path. torch is this environment's. Each set
makes the same images, as loaded and after `prepare` and `optimize`. Where an image is not that of the newest set byte
by byte, its mean squared difference may be at most that of the 16-bit pipeline between the same two sets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEWEST, PLAIN = "newest", "16bit"
# Set -> what it pins, as the metadata of the engine's wheel says it.
SETS = {
    "vllm-omni-0.30": ("diffusers==0.40.0", "transformers>=5.13,<5.15", "accelerate==1.12.0"),
    "sglang-0.5.23": ("diffusers==0.37.0", "transformers==5.19.0", "tokenizers==0.23.2"),
    "oldest": ("diffusers==0.37.*", "transformers==5.13.*", "accelerate==1.10.*"),
}


def main(arguments: Sequence[str]) -> int:
    """Return 0 where every image of every set is near enough, 1 elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--set", dest="sets", action="append", choices=SETS)
    parser.add_argument("--recipe", dest="recipes", action="append")
    chosen = parser.parse_args(arguments)
    work = chosen.work.absolute()
    folders = checkpoints(work, chosen.recipes)
    found = {NEWEST: images(work, NEWEST, folders)}
    for name in chosen.sets or SETS:
        install(work / name / "site", SETS[name])
        found[name] = images(work, name, folders)
    wrong = [line for name in found if name != NEWEST for line in compared(work, name, found)]
    print("\n".join(wrong) or "every image is as near as 16 bit is")
    return bool(wrong)


def checkpoints(work: Path, recipes: Sequence[str] | None) -> dict[str, str]:
    """Make a checkpoint per recipe, unless it is there; return name -> folder, that of the 16-bit pipeline first."""
    import fluxq
    from fluxq.base.model import resolve_model
    from fluxq.recipes.recipe import shipped_recipes

    folders = {PLAIN: str(resolve_model("tiny").path)}
    for recipe in recipes or shipped_recipes():
        output = work / "checkpoints" / recipe
        fluxq.quantize_pipeline("tiny", recipe, output=output, profile="rtn", check=False, dtype="bfloat16")
        folders[recipe] = str(output)
    return folders


def install(site: Path, pins: Sequence[str]) -> None:
    """Fill a folder with the pinned libraries and what they need; numpy and torch stay those of the environment.

    A folder that was filled with the same pins is taken as it is.
    """
    filled = site.with_name("pins.json")
    if filled.is_file() and json.loads(filled.read_text(encoding="utf-8")) == [*pins]:
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(site)]
    beside = [pin for pin in pins if not pin.startswith("accelerate")]  # which would bring a torch of its own
    subprocess.run([*pip, *beside, f"numpy=={version('numpy')}"], check=True)
    for pin in set(pins) - {*beside}:
        subprocess.run([*pip, "--no-deps", pin], check=True)
    filled.write_text(json.dumps(pins), encoding="utf-8")


def images(work: Path, name: str, folders: dict[str, str]) -> dict[str, str]:
    """Make a set's images in a fresh interpreter; return name -> SHA-256 of the pixels."""
    site = [str(work / name / "site")] if name != NEWEST else []
    out = work / name / "images"
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([*site, str(ROOT / "src"), *filter(None, sys.path)])
    command = [sys.executable, str(Path(__file__).with_name("overlaid_images.py")), str(out), json.dumps(folders)]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    said = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {said['versions']}")
    return said["images"]


def compared(work: Path, name: str, found: dict[str, dict[str, str]]) -> list[str]:
    """Print how many images of a set are the newest's; return a line for each that is too far off."""
    differing = [key for key, sha in found[name].items() if sha != found[NEWEST].get(key)]
    print(f"{name}: {len(found[name]) - len(differing)} of {len(found[name])} images have the newest's bytes")
    wrong = []
    for key in differing:
        off, allowed = (
            distance(work, name, each) for each in (key, f"{PLAIN}{key[key.find(' ') :] if ' ' in key else ''}")
        )
        print(f"  {key}: mean squared difference {off:.3g}, of 16 bit {allowed:.3g}")
        if off > allowed:
            wrong.append(f"{name}: {key} is {off:.3g} from the newest's image, 16 bit {allowed:.3g}")
    return wrong


def distance(work: Path, name: str, key: str) -> float:
    """Return the mean squared difference of an image between a set and the newest, in levels of 255."""
    import numpy as np
    from PIL import Image

    a, b = (np.asarray(Image.open(work / each / "images" / f"{file_of(key)}.png"), float) for each in (NEWEST, name))
    return float(((a - b) ** 2).mean())


def file_of(key: str) -> str:
    return key.replace(" ", "_")


def sha_of(pixels: bytes) -> str:
    return hashlib.sha256(pixels).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
