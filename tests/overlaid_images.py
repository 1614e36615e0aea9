"""The images of one set of libraries for `overlays.py`, in an interpreter of its own.

    python tests/overlaid_images.py FOLDER '{"nvfp4": "path/to/checkpoint"}'

Prints one line of JSON: versions, and the SHA-256 of each image's pixels. No package of the extra `all` is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import transformers

import fluxq

PROMPT = "a red three on black"


def main(out: Path, folders: dict[str, str]) -> None:
    from overlays import PLAIN, file_of, sha_of

    shas = {}
    for name, folder in folders.items():
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
        pipe.set_progress_bar_config(disable=True)
        made = {name: image(pipe)}
        if name != PLAIN:
            fluxq.prepare(pipe)
        fluxq.optimize(pipe)
        made[f"{name} optimized"] = image(pipe)
        for key, picture in made.items():
            picture.save(out / f"{file_of(key)}.png")
            shas[key] = sha_of(picture.tobytes())
    versions = {each.__name__: each.__version__ for each in (torch, diffusers, transformers, accelerate)}
    print(json.dumps({"versions": versions, "images": shas}))


def image(pipe: Any) -> Any:
    """Return an image of the embedded pipeline, PIL."""
    return pipe(PROMPT, generator=torch.Generator().manual_seed(0), **fluxq.tiny.CALL_KWARGS).images[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
