"""An image folder: pictures, and `prompts.jsonl` that says of which prompt and seed each one is.

    {"prompt": "a red bicycle", "seed": 7, "image": "0001.png", "machine": "NVIDIA H200"}

A line for each image. `machine` may be left out. This is what other programs hand to `fluxq gate`, and what a server's
answers are kept as. Images are PNG, JPEG, WebP, BMP, PPM or TIFF in 8-bit RGB; latents there are none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fluxq.base.console import first_fault, first_line
from fluxq.base.files import require_regular
from fluxq.eval.images.executor import FORMATS, read_image
from fluxq.eval.images.generate import Lazy

PROMPTS_FILE = "prompts.jsonl"
LONGEST = 1 << 26  # bytes of prompts.jsonl


class PictureLine(BaseModel):
    """Line of `prompts.jsonl`. image: path below the folder. machine: name of the device that made it."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    prompt: str
    seed: int = Field(ge=0, lt=1 << 63)
    image: str
    machine: str | None = None


@dataclass(frozen=True)
class Pictures:
    """Image folder: a source of a gate, and its images as metrics want them (see `generate.Generated`)."""

    folder: Path
    rows: tuple[PictureLine, ...]
    latents: None = None
    frames: None = None
    has_latents: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def items(self) -> tuple[tuple[str, int], ...]:
        return tuple((row.prompt, row.seed) for row in self.rows)

    @cached_property
    def images(self) -> Sequence[Tensor]:
        """uint8 (3, H, W) each, read when asked for."""
        return Lazy(len(self.rows), lambda index: read_image(self.folder / self.rows[index].image))

    @property
    def sizes(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Item -> width and height."""
        return {(row.prompt, row.seed): _size_of(self.folder / row.image) for row in self.rows}

    @property
    def finite(self) -> Tensor:
        return torch.ones(len(self.rows), dtype=torch.bool)  # bytes are

    @property
    def machine(self) -> str | None:
        """Names of the devices that made them; None where nobody says."""
        return ", ".join(sorted({row.machine for row in self.rows if row.machine})) or None

    def make(self, items: Sequence[tuple[str, int]]) -> Pictures:
        """Return the images of these (prompt, seed); ValueError naming one that is not there."""
        by_item = {(row.prompt, row.seed): row for row in self.rows}
        for prompt, seed in items:
            if (prompt, seed) not in by_item:
                raise ValueError(f"{self.folder}: no image of {prompt!r} with seed {seed}; its {PROMPTS_FILE} lacks it")
        return Pictures(self.folder, tuple(by_item[item] for item in items))

    def again(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"kind": "images", "count": len(self.rows)}


def is_picture_folder(folder: Path) -> bool:
    return (folder / PROMPTS_FILE).is_file()


def read_pictures(folder: Path) -> Pictures:
    """Read `prompts.jsonl`, and check that each image is there.

    Raises ValueError naming the line that cannot be read, comes twice, or leaves the folder; FileNotFoundError for a
    missing image. Of images only headers are read.
    """
    path = folder / PROMPTS_FILE
    require_regular(path)
    if path.stat().st_size > LONGEST:
        raise ValueError(f"{path}: larger than {LONGEST >> 20} MiB, which no list of prompts is")
    lines = path.read_bytes().split(b"\n")
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ValueError(f"{path}: holds no images")
    ((prompt, seed), count) = Counter((row.prompt, row.seed) for row in rows).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{path}: {prompt!r} with seed {seed} comes {count} times; give each image its own seed")
    (image, count) = Counter(row.image for row in rows).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{path}: {image!r} is the image of {count} lines; give each line its own")
    for row in rows:
        place = (folder / row.image).resolve()
        if not place.is_relative_to(folder.resolve()):
            raise ValueError(f"{path}: image {row.image!r} leaves the folder")
        if not place.is_file():
            raise FileNotFoundError(f"{place} is missing, which {PROMPTS_FILE} names")
        _size_of(place)
    return Pictures(folder, tuple(rows))


def _size_of(place: Path) -> tuple[int, int]:
    """Return width and height of a picture by its header; ValueError for one that cannot be compared."""
    try:
        with Image.open(place, formats=FORMATS) as image:
            size, mode = image.size, image.mode
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{place}: no picture in {', '.join(FORMATS)} ({first_line(error)}); write it anew") from None
    if mode != "RGB":
        raise ValueError(f"{place}: a picture of mode {mode}, expected 8-bit RGB; convert it")
    return size


def _row(line: bytes, where: str) -> PictureLine:
    try:
        return PictureLine.model_validate_json(line)
    except ValidationError as error:
        raise ValueError(
            f'{where}: {first_fault(error)}; a line is {{"prompt": "…", "seed": 0, "image": "0.png"}}'
        ) from None


def line_of(prompt: str, seed: int, image: str, machine: str | None = None) -> str:
    """Return a line of `prompts.jsonl`, with its end."""
    row: dict[str, Any] = {"prompt": prompt, "seed": seed, "image": image}
    return json.dumps(row | ({"machine": machine} if machine else {}), ensure_ascii=False) + "\n"
