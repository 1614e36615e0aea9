"""The picture wall: which images a report shows, and how they are stored in it.

Chosen by figures and by a seeded draw, never by eye. Differences are taken of the lossless images, then amplified,
then reduced, so that no codec's artefacts are shown as the model's.

Of a video the first, middle and last frame lie one below the other, and the one with the lowest PSNR. The first video
of each group is also kept as an animation of both sides, which is shown only where a reader opens it.
"""

from __future__ import annotations

import base64
import io
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from fluxq.eval.metrics.fidelity import frame_psnr
from fluxq.eval.metrics.schema import Picture, Wall

_PER_GROUP = 3
_MAX_GAIN = 64
_LOSSLESS_PIXELS = 128  # longest side up to which pictures are PNG
_SHOWN_PIXELS = 512  # longest side of what is shown; larger images are reduced
_SHOWN_FRAME = 320  # the same of a frame of a video, of which there are several
_WEBP_QUALITY = 90
_MOTION_FRAMES, _MOTION_PIXELS, _MOTION_QUALITY = 24, 192, 75  # of an animation: at most so many, so large, each side
_MOTION_MS = 125  # for which a frame of it stays


def wall(reference: Any, quantized: Any, values: Sequence[float]) -> Wall:
    """Build the wall of two sets of images or videos (as `generate.Generated`): worst, median and drawn at random.

    values: per image, what worst and median are chosen by; NaN is worst of all, an infinite one best. One gain for all
    differences, so that they compare by eye.
    """
    before, after = reference.images, quantized.images
    groups = choose(values)
    chosen = sorted({index for indices in groups.values() for index in indices})
    moving = {indices[0] for indices in groups.values()}
    pairs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    frames: dict[int, tuple[int, ...]] = {}
    motions: dict[int, str] = {}
    for index in chosen:
        first, second = before[index], after[index]
        if first.ndim == 4:
            frames[index] = _frames_to_show(first, second)
            if index in moving:
                motions[index] = _motion(first, second)
            first, second = first[list(frames[index])], second[list(frames[index])]
        pairs[index] = _array(first), _array(second)
    height, width, _ = pairs[chosen[0]][0].shape[-3:]
    lossless, largest = max(height, width) <= _LOSSLESS_PIXELS, _SHOWN_FRAME if frames else _SHOWN_PIXELS
    differences = {index: np.abs(a.astype(int) - b.astype(int)) for index, (a, b) in pairs.items()}
    gain = _gain(list(differences.values()))
    pictures = {
        index: Picture(
            index=index,
            reference=_uri(pairs[index][0], lossless, largest),
            quantized=_uri(pairs[index][1], lossless, largest),
            difference=_uri((differences[index] * gain).clip(max=255).astype(np.uint8), lossless, largest),
            frames=frames.get(index, ()),
            motion=motions.get(index),
        )
        for index in chosen
    }
    return Wall(
        gain=gain,
        height=height,
        width=width,
        shown_pixels=min(max(height, width), largest),
        encoding="PNG, lossless" if lossless else f"WebP, quality {_WEBP_QUALITY}",
        groups={name: tuple(pictures[index] for index in indices) for name, indices in groups.items()},
    )


def choose(values: Sequence[float]) -> dict[str, list[int]]:
    """Choose images to show, by index: worst and median by their values, and some drawn by a fixed seed from all.

    The draw depends on the number of images alone: several runs show the same ones. All are shown if there are few.
    """
    order = sorted(range(len(values)), key=lambda index: -math.inf if math.isnan(values[index]) else values[index])
    if len(order) <= 3 * _PER_GROUP:
        return {"all": order}
    middle = (len(order) - _PER_GROUP) // 2
    drawn = random.Random(0).sample(range(len(order)), _PER_GROUP)
    return {"worst": order[:_PER_GROUP], "median": order[middle : middle + _PER_GROUP], "random": sorted(drawn)}


def _gain(differences: Sequence[np.ndarray]) -> int:
    """Return the largest power of two up to 64 that keeps 99 % of the differences below full scale."""
    high = max(1.0, float(np.percentile(np.concatenate([each.ravel() for each in differences]), 99)))
    return max(1, min(_MAX_GAIN, 2 ** int(math.log2(255 / high))))


def _frames_to_show(reference: Tensor, quantized: Tensor) -> tuple[int, ...]:
    """Return the first, middle and last frame of a video (F, 3, H, W), and at the end the one farthest off."""
    worst = int(frame_psnr([reference], [quantized])[0].argmin())
    plain = dict.fromkeys((0, (len(reference) - 1) // 2, len(reference) - 1))
    return (*(index for index in plain if index != worst), worst)


def _array(image: Tensor) -> np.ndarray:
    return image.movedim(-3, -1).cpu().numpy()  # (H, W, 3), or (F, H, W, 3)


def _uri(pixels: np.ndarray, lossless: bool, largest: int) -> str:
    """Return uint8 (H, W, 3), or frames (F, H, W, 3) one below the other, as a data URI, averaged down if large."""
    parts = [_reduced(each, largest) for each in (pixels if pixels.ndim == 4 else [pixels])]
    picture = _joined(parts, is_row=False)
    stream = io.BytesIO()
    if lossless:
        picture.save(stream, "PNG", optimize=True)
    else:
        picture.save(stream, "WEBP", quality=_WEBP_QUALITY)
    return _data(stream, "png" if lossless else "webp")


def _motion(reference: Tensor, quantized: Tensor) -> str:
    """Return both videos side by side as one animation, so that they keep step, as a data URI."""
    shown = sorted({round(place) for place in np.linspace(0, len(reference) - 1, _MOTION_FRAMES)})
    pictures = []
    for index in shown:
        sides = [_reduced(_array(video[index]), _MOTION_PIXELS) for video in (reference, quantized)]
        pictures.append(_joined(sides, is_row=True))
    stream = io.BytesIO()
    small = max(reference.shape[-2:]) <= _LOSSLESS_PIXELS
    how = {"lossless": True} if small else {"quality": _MOTION_QUALITY}
    pictures[0].save(stream, "WEBP", save_all=True, append_images=pictures[1:], duration=_MOTION_MS, loop=0, **how)
    return _data(stream, "webp")


def _reduced(pixels: np.ndarray, largest: int) -> Image.Image:
    picture = Image.fromarray(pixels)
    if max(picture.size) > largest:
        picture.thumbnail((largest, largest), Image.Resampling.BOX)
    return picture


def _joined(parts: Sequence[Image.Image], is_row: bool) -> Image.Image:
    """Return pictures of one size as one, in a row or a column, with grey between them."""
    width, height = parts[0].size
    gap, more = max(1, height // 40), len(parts) - 1
    right, down = (width + gap, 0) if is_row else (0, height + gap)
    whole = Image.new("RGB", (width + right * more, height + down * more), _GREY)
    for number, part in enumerate(parts):
        whole.paste(part, (right * number, down * number))
    return whole


def _data(stream: io.BytesIO, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


_GREY = (128, 128, 128)  # between frames, seen on light and dark pages
