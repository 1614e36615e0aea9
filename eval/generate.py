"""Images and final latents of a pipeline, one per (prompt, seed), as the metrics want them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluxq.base.console import progress
from fluxq.base.files import sha256_json
from fluxq.calibrate.capture import run_pipeline


@dataclass(frozen=True)
class Generated:
    """What a pipeline made of `items`, in their order.

    images: uint8 (N, 3, H, W), the bytes that `output_type="pil"` holds. latents: fp32 (N, ...), as they
    leave the last denoising step. finite: bool (N,), False where the image or its latents held NaN or
    infinity before they became bytes. seconds: wall time of the whole run, first-call warm-up included.
    device: where it ran.
    """

    items: tuple[tuple[str, int], ...]
    images: Tensor
    latents: Tensor
    finite: Tensor
    seconds: float
    device: str

    @property
    def items_digest(self) -> str:
        """SHA-256 of prompts and seeds in order."""
        return sha256_json(self.items)


def items_for(prompts: Sequence[str], count: int, seed: int) -> list[tuple[str, int]]:
    """`count` pairs (prompt, seed + i); a shorter list of prompts starts over, each repeat with its own noise."""
    return [(prompts[i % len(prompts)], seed + i) for i in range(count)]


def generate(
    pipe: Any,
    items: Sequence[tuple[str, int]],
    call: Mapping[str, Any],
    batch_size: int | None = None,
    description: str = "Generating",
) -> Generated:
    """Run `pipe` on every (prompt, seed) under a progress bar that counts images.

    call: pipeline arguments such as height, width and num_inference_steps. Raises ValueError without items.
    """
    if not items:
        raise ValueError("nothing to generate: the list of (prompt, seed) is empty")
    pixels, latents, finite = [], [], []
    start = time.perf_counter()
    run = _one_by_one(run_pipeline(pipe, items, call, output_type="pt", batch_size=batch_size))
    for image, latent in progress(run, description, total=len(items)):
        finite.append(bool(torch.isfinite(image).all()) and bool(torch.isfinite(latent).all()))
        pixels.append(to_uint8(image))
        latents.append(latent.float().cpu())
    seconds = time.perf_counter() - start
    return Generated(
        items=tuple((prompt, seed) for prompt, seed in items),
        images=torch.stack(pixels),
        latents=torch.stack(latents),
        finite=torch.tensor(finite),
        seconds=seconds,
        device=_device_name(torch.device(pipe.device)),
    )


def to_uint8(image: Tensor) -> Tensor:
    """[0, 1] floats as bytes on the CPU, rounded half to even as diffusers does for PIL; NaN becomes 0."""
    return image.float().mul(255).round().nan_to_num(0).clamp(0, 255).to(torch.uint8).cpu()


def _one_by_one(run: Iterator[tuple[Any, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    for output, latents in run:
        yield from zip(output.images, latents, strict=True)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
