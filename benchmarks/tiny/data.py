"""The grammar of the embedded pipeline's captions: one object, one colour, one background, 16 x 16 pixels.

A caption is `a <colour> <object> on <background>`; objects are the ten digits and six shapes.
"""

from __future__ import annotations

import random

SIZE = 16
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "frame")
OBJECTS = DIGITS + SHAPES
COLOURS = {
    "red": (225, 30, 30),
    "green": (20, 165, 45),
    "blue": (40, 60, 235),
    "yellow": (240, 215, 20),
    "orange": (245, 125, 10),
    "purple": (160, 40, 205),
    "cyan": (20, 190, 215),
}
BACKGROUNDS = {"black": (8, 8, 8), "white": (248, 248, 248), "gray": (95, 95, 95)}


def caption(obj: int, colour: int, background: int) -> str:
    """The caption of three class numbers (indices into OBJECTS, COLOURS and BACKGROUNDS)."""
    return f"a {tuple(COLOURS)[colour]} {OBJECTS[obj]} on {tuple(BACKGROUNDS)[background]}"


def parse(text: str) -> tuple[int, int, int]:
    """The inverse of `caption`; ValueError for a text that the grammar does not produce."""
    words = text.split()
    try:
        article, colour, obj, preposition, background = words
        found = OBJECTS.index(obj), tuple(COLOURS).index(colour), tuple(BACKGROUNDS).index(background)
    except ValueError:
        raise ValueError(f"caption {text!r} is not of the form 'a <colour> <object> on <background>'") from None
    if (article, preposition) != ("a", "on"):
        raise ValueError(f"caption {text!r} is not of the form 'a <colour> <object> on <background>'")
    return found


def captions() -> tuple[str, ...]:
    """Every caption once (16 objects x 7 colours x 3 backgrounds = 336), in a fixed shuffled order."""
    every = [
        caption(obj, colour, background)
        for obj in range(len(OBJECTS))
        for colour in range(len(COLOURS))
        for background in range(len(BACKGROUNDS))
    ]
    random.Random(0).shuffle(every)
    return tuple(every)


def words() -> tuple[str, ...]:
    """Every word of the grammar: the vocabulary of the three tokenizers."""
    return ("a", "on", *COLOURS, *OBJECTS, *BACKGROUNDS)
