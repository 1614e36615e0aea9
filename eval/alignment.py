"""CLIP score: 100 × the cosine between an image and its prompt in CLIP's common space (Hessel et al., 2021).

It says whether images still show what was asked for, hardly how well; see `fidelity` for drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image
from torch import Tensor

CONFIG = "open_clip_config.json"
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors")


@dataclass(frozen=True)
class Alignment:
    """scores: 100 × cosine of each image with its prompt, -100 to 100, not clamped.

    truncated: how many prompts are longer than the text encoder reads, so that their ends do not count.
    """

    scores: tuple[float, ...]
    truncated: int
    network: str


class ClipScorer:
    """An open_clip model in a local folder: `open_clip_config.json`, safetensors weights, tokenizer files.

    Raises FileNotFoundError naming the missing file; random weights never stand in.
    """

    def __init__(self, folder: Path | str, device: str = "cpu") -> None:
        folder = Path(folder)
        _require_files(folder)
        location = f"local-dir:{folder}"
        self.network = folder.name
        self.device = device
        loaded: Any = open_clip.create_model_from_pretrained(location, device=device)
        self.model, self.preprocess = loaded[0].eval(), loaded[1]
        self.tokenizer: Any = open_clip.get_tokenizer(location)

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], batch_size: int = 64) -> Alignment:
        """Score uint8 images (N, 3, H, W) against their N prompts, prepared as the model's own config says."""
        if images.dtype != torch.uint8 or len(images) != len(prompts):
            came = f"{len(images)} {images.dtype} images and {len(prompts)} prompts"
            raise ValueError(f"CLIP score needs uint8 images and one prompt for each, got {came}")
        scores: list[float] = []
        for start in range(0, len(images), batch_size):
            batch = torch.stack([self.preprocess(_pil(image)) for image in images[start : start + batch_size]])
            tokens = self.tokenizer(list(prompts[start : start + batch_size]))  # (B, context)
            seen = self.model.encode_image(batch.to(self.device), normalize=True)  # (B, D)
            asked = self.model.encode_text(tokens.to(self.device), normalize=True)  # (B, D)
            scores += (100 * (seen.double() * asked.double()).sum(-1)).tolist()
        return Alignment(tuple(scores), self.truncated(prompts), self.network)

    def truncated(self, prompts: Sequence[str]) -> int:
        """How many prompts do not fit the text encoder's context."""
        context = self.tokenizer.context_length
        room = context + max(len(text.encode()) for text in prompts)  # a token a byte at most: the last is padding
        tokens = self.tokenizer(list(prompts), context_length=room)  # (N, room)
        return int((tokens[:, context:] != tokens[:, -1:]).any(1).sum())


def _require_files(folder: Path) -> None:
    cure = "give a folder that open_clip's `local-dir:` can load"
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder / CONFIG} is missing: {cure}")
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise FileNotFoundError(f"{folder / WEIGHTS[0]} is missing: {cure}; random weights would score nothing")


def _pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())
