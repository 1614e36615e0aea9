"""Images or videos, and final latents, of a pipeline, one per (prompt, seed), as the metrics want them.

A set of images, in memory (`Generated`) or on disk (`executor.ImageFolder`), has `items`, `images`, `latents` and
`finite` in one order. A video is an image with an axis of frames before the others; in one set all have as many. The
last bits of an image depend on the others of its batch, so a batch is made in one place only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from fluxq.base.console import progress
from fluxq.calibrate.capture import batches, run_pipeline

Images = Sequence[Tensor] | Tensor  # images or videos of a set, read one by one or stacked


@dataclass(frozen=True)
class Generated:
    """Output of a pipeline for `items`, in their order, on the CPU.

    images: uint8 (N, 3, H, W), the bytes that `output_type="pil"` holds; of videos (N, F, 3, H, W).
    latents: fp32 (N, ...), as they leave the last denoising step.
    finite: bool (N,), False where images, frames or latents held NaN or infinity before they became bytes.
    """

    items: tuple[tuple[str, int], ...]
    images: Tensor
    latents: Tensor
    finite: Tensor

    @property
    def frames(self) -> int | None:
        """Frames of each video; None for images."""
        return self.images.shape[1] if self.images.ndim == 5 else None


class Lazy(Sequence[Tensor]):
    """`count` images or videos, each read when it is asked for, by its index."""

    def __init__(self, count: int, read: Callable[[int], Tensor]) -> None:
        self.indices, self.read = range(count), read

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        places = self.indices[index]
        return self.read(places) if isinstance(places, int) else [self.read(place) for place in places]


def generate(
    pipe: Any,
    items: Sequence[tuple[str, int]],
    call: Mapping[str, Any],
    batch_size: int | None = None,
    description: str = "Generating",
) -> Generated:
    """Run `pipe` on every (prompt, seed) under a progress bar that counts images.

    call: pipeline arguments such as height, width and num_inference_steps. batch_size: by default as many as make
    one megapixel. Raises ValueError without items.
    """
    if not items:
        raise ValueError("nothing to generate: the list of (prompt, seed) is empty")
    made = (generate_batch(pipe, batch, call) for batch in batches(items, batch_size, call))
    rows = (row for each in made for row in zip(each.images, each.latents, each.finite, strict=True))
    images, latents, finite = map(torch.stack, zip(*progress(rows, description, len(items)), strict=True))
    return Generated(tuple((prompt, seed) for prompt, seed in items), images, latents, finite)


def generate_batch(pipe: Any, batch: Sequence[tuple[str, int]], call: Mapping[str, Any]) -> Generated:
    """Make the images or videos of these (prompt, seed) in one call of the pipeline."""
    ((output, latents),) = run_pipeline(pipe, batch, call, output_type="pt", batch_size=len(batch))
    pairs = list(zip(pictures(output), latents, strict=True))
    return Generated(
        items=tuple(batch),
        images=torch.stack([to_uint8(image) for image, _ in pairs]),
        latents=torch.stack([latent.float().cpu() for _, latent in pairs]),
        finite=torch.tensor([bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all()) for a, b in pairs]),
    )


def pictures(output: Any) -> Sequence[Tensor]:
    """Return the output of a pipeline with `output_type="pt"`: (3, H, W) of each image, (F, 3, H, W) of each video.

    ValueError for an output that holds neither.
    """
    tensors = next((value for name in PICTURES if (value := getattr(output, name, None)) is not None), ())
    if not len(tensors) or not all(isinstance(each, Tensor) and each.ndim in (3, 4) for each in tensors):
        raise ValueError(
            f"a {type(output).__name__} without {', '.join(PICTURES)} as tensors: neither images nor video"
        )
    # Of some, such as Cosmos with its guardrail, channels come before frames.
    tensors = [each.transpose(0, 1) if each.ndim == 4 and len(each) == 3 != each.shape[1] else each for each in tensors]
    if any(each.shape[-3] != 3 for each in tensors):
        raise ValueError(f"a {type(output).__name__} of {tuple(tensors[0].shape)}, expected (3, H, W) or (F, 3, H, W)")
    return tensors


def to_uint8(image: Tensor) -> Tensor:
    """Convert [0, 1] floats to bytes on the CPU, rounded half to even as diffusers does for PIL; NaN becomes 0."""
    return image.float().mul(255).round().nan_to_num(0).clamp(0, 255).to(torch.uint8).cpu()


def as_picture(image: Tensor) -> Any:
    """Return a uint8 image (3, H, W) as PIL holds it."""
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def images_digest(images: Images) -> str:
    """Return the SHA-256 of the shape (N, ...) and bytes of N uint8 images or videos, read one at a time."""
    shape = (len(images), *images[0].shape) if len(images) else (0,)
    digest = hashlib.sha256(repr(shape).encode())
    for image in images:
        digest.update(image.contiguous().numpy().data)
    return digest.hexdigest()


PICTURES = ("images", "image", "frames")  # fields of pipelines' outputs that can be compared
