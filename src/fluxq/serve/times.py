"""The time of an image before it is made: medians of measured quanta, by kind and size.

    seconds = begin + (T - 1) × step + finish

`begin` is the prompt and the first step, `finish` the decoding. A size that was not measured is interpolated between
its neighbours by pixels; above the largest, time grows as between the two largest, below the smallest it is that one's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from itertools import product
from statistics import median
from typing import Any

from fluxq.serve.orders import Order, Quantum

JOINED = 4  # images at most whose calls are joined; with --join a worker holds the states of so many
PAYS = 0.95  # share of its own time that a step in a joined call may take
_KEPT = 15  # measurements of one kind and size
_SIZES = 64  # of one kind; clients choose sizes
_UNKNOWN = 1.0  # second, of a quantum of which nothing like it was measured
_GUIDED = 2  # calls of the denoiser in a step


class Times:
    """Measured seconds of quanta, and predictions from them."""

    def __init__(self) -> None:
        self._measured: dict[tuple[tuple[Any, ...], str], dict[int, deque[float]]] = {}

    def add(self, order: Order, quantum: Quantum) -> None:
        """Take a measurement, without what loading took. Beside other images only joined steps count."""
        part = "finish" if quantum.picture else "begin" if quantum.steps == 1 else "step"
        if not quantum.is_alone:
            if part != "step" or quantum.shared == 1:
                return
            part = f"step of {quantum.shared}"
        self._keep(order, part, quantum.seconds - quantum.loading)

    def fail(self, order: Order, images: int) -> None:
        """Take note that joined calls of so many images fail, for want of memory say: they never pay."""
        self._keep(order, f"step of {images}", math.inf)

    def _keep(self, order: Order, part: str, seconds: float) -> None:
        by_size = self._measured.setdefault((order.kind, part), {})
        values = by_size.pop(order.pixels, deque(maxlen=_KEPT))
        values.append(seconds)
        by_size[order.pixels] = values  # the last: the first is forgotten
        if len(by_size) > _SIZES:
            del by_size[next(iter(by_size))]

    def forget(self, model: str) -> None:
        """Forget the measurements of a model."""
        self._measured = {key: by_size for key, by_size in self._measured.items() if key[0][0] != model}

    def remaining(self, order: Order, steps: int = 0) -> float:
        """Return the predicted seconds of what is left of an image of which so many steps are made."""
        begin = self._seconds(order, "begin") if steps == 0 else 0.0
        left = order.steps - max(steps, 1)
        return begin + left * self._seconds(order, "step") + self._seconds(order, "finish")

    def quantum(self, order: Order, steps: int) -> float:
        """Return the predicted seconds of the quantum that comes after so many steps."""
        return self._seconds(order, "begin" if steps == 0 else "step" if steps < order.steps else "finish")

    def joined(self, order: Order, images: int) -> int:
        """Return how many of so many images, all of an order's kind and size, to make in joined calls; 1 for alone.

        Most where that was not measured, or takes less than PAYS of the time; so what does not pay is tried once. One
        where only joined steps were measured: predictions are of images alone.
        """
        alone = self._at_size(order, "step")
        for count in range(min(images, JOINED), 1, -1):
            together = self._at_size(order, f"step of {count}")
            if together is None:
                return count
            if alone is None:
                return 1
            if together < PAYS * count * alone:
                return count
        return 1

    def _at_size(self, order: Order, part: str) -> float | None:
        """Return the measured seconds of just this size."""
        values = self._measured.get((order.kind, part), {}).get(order.pixels)
        return None if values is None else median(values)

    def _seconds(self, order: Order, part: str) -> float:
        """Return the seconds of a quantum; of a kind that was not measured, those of a plainer one of the model."""
        model, guided, adapted, sources, scaled = order.kind
        plainer = ((guided, False), (adapted, False), (sources, 0), (scaled, not scaled))
        for kind in product(*plainer):
            if by_size := self._measured.get(((model, *kind), part)):
                factor = _GUIDED if part == "step" and kind[0] != guided else 1
                return factor * _at(by_size, order.pixels)
        return _UNKNOWN


def _at(by_size: dict[int, deque[float]], pixels: int) -> float:
    """Return the seconds at a number of pixels."""
    sizes = sorted(by_size)
    if pixels >= sizes[-1]:
        largest = [(size, median(by_size[size])) for size in sizes[-2:]]
        return largest[-1][1] * (pixels / sizes[-1]) ** _growth(largest)
    place = bisect_right(sizes, pixels)
    if place == 0:
        return median(by_size[sizes[0]])
    below, above = sizes[place - 1], sizes[place]
    share = (pixels - below) / (above - below)
    return (1 - share) * median(by_size[below]) + share * median(by_size[above])


def _growth(largest: list[tuple[int, float]]) -> float:
    """Return the power of the pixels with which seconds grow, by the two largest sizes: 1 to 2, as attention has it.

    1 for one size: more would refuse images that are soon made.
    """
    (pixels, seconds), (more, longer) = largest[0], largest[-1]
    if pixels == more or min(seconds, longer) <= 0:
        return 1.0
    return min(2.0, max(1.0, math.log(longer / seconds) / math.log(more / pixels)))
