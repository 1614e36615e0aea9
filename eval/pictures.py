"""The picture wall: which images a report shows, and how they are stored in it.

Chosen by figures and by a seeded draw, never by eye. Differences are taken of the lossless images, then amplified,
then reduced, so that no codec's artefacts are shown as the model's.
"""

from __future__ import annotations

import base64
import io
import math
import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from fluxq.eval.schema import Picture, Wall

_PER_GROUP = 3
_MAX_GAIN = 64
_LOSSLESS_PIXELS = 128  # longest side up to which pictures are PNG
_SHOWN_PIXELS = 512  # longest side of what is shown; larger images are reduced
_WEBP_QUALITY = 90


class Images(Protocol):
    """What a wall needs of an image set."""

    @property
    def images(self) -> Sequence[Tensor]: ...


def wall(reference: Images, quantized: Images, values: Sequence[float], *, better: str = "higher") -> Wall:
    """Worst, median and randomly drawn images of two sets of the same items.

    values: per image, what worst and median are chosen by; NaN is worst of all, an infinite one best. One gain for
    all differences, so that they compare by eye. ValueError if counts or sizes differ, or there is nothing to show.
    """
    before, after = reference.images, quantized.images
    if not len(before) == len(after) == len(values) or not values:
        raise ValueError(f"a wall of {len(before)} and {len(after)} images by {len(values)} values: needs one of each")
    groups = choose(values, better=better)
    chosen = sorted({index for indices in groups.values() for index in indices})
    pairs = {index: (_array(before[index]), _array(after[index])) for index in chosen}
    for index, (first, second) in pairs.items():
        if first.shape != second.shape:
            raise ValueError(
                f"image {index}: {first.shape[:2]} against {second.shape[:2]} pixels: generate at one size"
            )
    height, width, _ = pairs[chosen[0]][0].shape
    lossless = max(height, width) <= _LOSSLESS_PIXELS
    differences = {index: np.abs(a.astype(int) - b.astype(int)) for index, (a, b) in pairs.items()}
    gain = _gain(list(differences.values()))
    pictures = {
        index: Picture(
            index=index,
            reference=_uri(pairs[index][0], lossless),
            quantized=_uri(pairs[index][1], lossless),
            difference=_uri((differences[index] * gain).clip(max=255).astype(np.uint8), lossless),
        )
        for index in chosen
    }
    return Wall(
        gain=gain,
        height=height,
        width=width,
        shown_pixels=min(max(height, width), _SHOWN_PIXELS),
        encoding="PNG, lossless" if lossless else f"WebP, quality {_WEBP_QUALITY}",
        groups={name: tuple(pictures[index] for index in indices) for name, indices in groups.items()},
    )


def choose(values: Sequence[float], *, better: str = "higher", seed: int = 0) -> dict[str, list[int]]:
    """Indices of the images to show: worst and median by their values, and some drawn by `seed` from all.

    The draw depends on the number of images alone: several runs show the same ones. All are shown if there are few.
    """

    def quality(index: int) -> float:
        value = values[index]
        return -math.inf if math.isnan(value) else value if better == "higher" else -value

    order = sorted(range(len(values)), key=quality)
    if len(order) <= 3 * _PER_GROUP:
        return {"all": order}
    middle = (len(order) - _PER_GROUP) // 2
    drawn = random.Random(seed).sample(range(len(order)), _PER_GROUP)
    return {"worst": order[:_PER_GROUP], "median": order[middle : middle + _PER_GROUP], "random": sorted(drawn)}


def _gain(differences: Sequence[np.ndarray]) -> int:
    """The largest power of two up to 64 that keeps 99 % of the differences below full scale."""
    high = max(1.0, float(np.percentile(np.concatenate([each.ravel() for each in differences]), 99)))
    return max(1, min(_MAX_GAIN, 2 ** int(math.log2(255 / high))))


def _array(image: Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).cpu().numpy()  # (H, W, 3)


def _uri(pixels: np.ndarray, lossless: bool) -> str:
    """uint8 (H, W, 3) as a data URI, reduced by averaging if it is large."""
    picture = Image.fromarray(pixels)
    if max(picture.size) > _SHOWN_PIXELS:
        picture.thumbnail((_SHOWN_PIXELS, _SHOWN_PIXELS), Image.Resampling.BOX)
    stream = io.BytesIO()
    if lossless:
        picture.save(stream, "PNG", optimize=True)
    else:
        picture.save(stream, "WEBP", quality=_WEBP_QUALITY)
    kind = "png" if lossless else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
