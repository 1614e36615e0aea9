"""Draw images of the embedded pipeline's kind: one object, one colour, one background, 16 x 16 pixels.

Digits are images that scikit-learn ships, shapes are drawn here. An image is built from a mask `a`, 1 inside the
object and 0 outside:

    image = (1 - a) * background + a * colour

A digit is always 12 to 15 pixels tall: the transformer sees 4 x 4 tokens, and smaller strokes are lost in them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from benchmarks.tiny.data import BACKGROUNDS, COLOURS, DIGITS, OBJECTS, SHAPES, SIZE, caption

HELD_OUT_EVERY = 6  # each sixth source image of a digit is never trained on


@dataclass(frozen=True)
class Images:
    """Drawn images and what is on them."""

    pixels: np.ndarray  # (N, 3, 16, 16) uint8
    labels: np.ndarray  # (N, 3) int64: object, colour, background

    def captions(self) -> list[str]:
        return [caption(*map(int, row)) for row in self.labels]


def draw(count: int, seed: int, held_out: bool = False) -> Images:
    """`count` images with every object, colour and background equally likely.

    `held_out` draws digits from the source images that training never sees.
    """
    rng = np.random.default_rng(seed)
    labels = np.stack([rng.integers(0, n, count) for n in (len(OBJECTS), len(COLOURS), len(BACKGROUNDS))], 1)
    masks = np.empty((count, SIZE, SIZE), np.float32)
    for obj in range(len(OBJECTS)):
        (rows,) = np.nonzero(labels[:, 0] == obj)
        if obj < len(DIGITS):
            bank = _digit_masks(obj, held_out)
        else:
            bank = _shape_masks(OBJECTS[obj], rng, min(count, 384))
        masks[rows] = bank[rng.integers(0, len(bank), len(rows))]
    return Images(_composite(masks, labels, rng), labels)


def _composite(masks: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Paint masks (N, 16, 16) in their colours, each channel a little off: (N, 3, 16, 16) uint8."""
    front = np.array(tuple(COLOURS.values()), np.float32)[labels[:, 1]]  # (N, 3)
    back = np.array(tuple(BACKGROUNDS.values()), np.float32)[labels[:, 2]]  # (N, 3)
    front = front + rng.normal(0, 6, front.shape)
    back = back + rng.normal(0, 2, (len(back), 1))
    alpha = masks[:, None]  # (N, 1, 16, 16)
    pixels = (1 - alpha) * back[:, :, None, None] + alpha * front[:, :, None, None]
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


@functools.cache
def _digit_masks(digit: int, held_out: bool) -> np.ndarray:
    """Every source image of one digit at every height and place: (N, 16, 16) in [0, 1]."""
    images, target = _scans()
    sources = images[target == digit]
    unseen = np.arange(len(sources)) % HELD_OUT_EVERY == 0
    masks = []
    for source in sources[unseen if held_out else ~unseen]:
        for height in range(12, 16):
            glyph = _enlarge(source, height)
            width = glyph.shape[1]
            left = (SIZE - width) // 2
            for top in range(SIZE - height + 1):
                if abs(top - (SIZE - height) / 2) > 1:
                    continue
                mask = np.zeros((SIZE, SIZE), np.float32)
                mask[top : top + height, left : left + width] = glyph
                masks.append(mask)
    return np.stack(masks)


@functools.cache
def _scans() -> tuple[np.ndarray, np.ndarray]:
    """The 1,797 scanned digits of scikit-learn, (1797, 8, 8) from 0 to 16, and which digit each is."""
    from sklearn.datasets import load_digits

    images, target = map(np.asarray, load_digits(return_X_y=True))
    return images.reshape(-1, 8, 8), target


def _enlarge(source: np.ndarray, height: int) -> np.ndarray:
    """An 8 x 8 digit (0 to 16) cut to its ink and enlarged to `height` rows, at most 14 columns."""
    from PIL import Image

    rows, columns = np.nonzero(source.max(1) > 4)[0], np.nonzero(source.max(0) > 4)[0]
    ink = source[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.float32) / 16
    width = int(np.clip(round(height * ink.shape[1] / ink.shape[0]), 3, 14))
    large = np.asarray(Image.fromarray(ink).resize((width, height), Image.Resampling.BICUBIC))
    return np.clip((large - 0.25) / 0.5, 0, 1)  # steeper edges: 8 x 8 scans are blurred


def _shape_masks(shape: str, rng: np.random.Generator, count: int, fine: int = 4) -> np.ndarray:
    """`count` masks of one shape, `fine` x `fine` samples a pixel: (count, 16, 16) in [0, 1]."""
    axis = (np.arange(SIZE * fine) + 0.5) / fine - SIZE / 2
    masks = []
    for _ in range(count):
        half = rng.uniform(5.0, 7.0)  # half the height in pixels
        x, y = np.meshgrid(axis - rng.uniform(-0.8, 0.8), axis - rng.uniform(-0.8, 0.8))
        inside = _inside(shape, x / half, y / half)
        masks.append(inside.reshape(SIZE, fine, SIZE, fine).mean((1, 3)))
    return np.stack(masks).astype(np.float32)


def _inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Tell of each point whether it lies in the shape that fills [-1, 1]^2 (y points down)."""
    box = np.maximum(abs(x), abs(y))
    if shape == "circle":
        return x**2 + y**2 <= 1
    if shape == "square":
        return box <= 0.9
    if shape == "triangle":
        return (abs(y) <= 1) & (abs(x) <= (y + 1) / 2)
    if shape == "cross":
        return (box <= 1) & (np.minimum(abs(x), abs(y)) <= 0.3)
    if shape == "diamond":
        return abs(x) + abs(y) <= 1.05
    if shape == "frame":
        return (box <= 1) & (box >= 0.6)
    raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
