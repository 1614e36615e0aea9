"""The queue: which image runs next, and whether one more can be promised.

    due = arrived + STRETCH × predicted seconds, or sooner where the request says so
    key = due - AGEING × (now - arrived)

The image of the least key runs, for one quantum; then the queue is asked again. So a short image passes a long one that
has not waited, and is passed by nobody in the end. All age alike, so `now` falls out when two are compared: no two
images change places again and again.

A request is taken only if neither it nor one that it passes is predicted to wait longer than was promised.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fluxq.serve.orders import Order

STRETCH = 4.0
AGEING = 1.0


@dataclass(eq=False)
class Entry:
    """An image in the queue.

    arrived, due: seconds of the queue's clock.
    steps: finished by now. has_begun: whether a worker holds its state.
    computed: seconds that it has taken.
    predicted: seconds that it takes, as foretold when it came.
    promised: longest wait that it may come to, as foretold then.
    is_again: whether a worker has ended before its first step. is_alone: whether a call that it shared has failed.
    owner: of the caller.
    """

    order: Order
    arrived: float
    due: float
    owner: Any = None
    steps: int = 0
    has_begun: bool = False
    computed: float = 0.0
    predicted: float = 0.0
    promised: float = 0.0
    is_cancelled: bool = False
    is_again: bool = False
    is_alone: bool = False

    @property
    def key(self) -> tuple[float, int]:
        """Place in the order of all images."""
        return self.due + AGEING * self.arrived, self.order.number


class Full(RuntimeError):
    """A request that the queue does not take. retry_after: seconds until it would, as predicted."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = max(1, math.ceil(retry_after))


@dataclass
class Queue:
    """Images that wait or run.

    remaining: (order, finished steps) to predicted seconds.
    delay: predicted seconds until the worker goes on with these images: it is started, or is in the middle of a step of
    one that nobody waits for (a shadow's is not foretold).
    loading: of a checkpoint, predicted seconds until it is in memory; the first image that needs it waits for it.
    longest: images at most. patience: seconds that an image may wait, as predicted. begun: images at most whose state
    a worker holds. servers: that share it.
    """

    remaining: Callable[[Order, int], float]
    longest: int = 64
    patience: float = 60.0
    begun: int = 4
    delay: Callable[[], float] = lambda: 0.0
    loading: Callable[[str], float] = lambda model: 0.0
    servers: int = 1
    _entries: list[Entry] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self):
        return iter(tuple(self._entries))

    def add(self, orders: Iterable[Order], now: float, owner: Any = None, within: float | None = None) -> list[Entry]:
        """Take all images of a request, or none: `Full` says when to come again.

        within: seconds from now in which it is due, sooner than by its own length.
        """
        new = self._entries_of(orders, now, owner, within)
        waiting = [each for each in self._entries if not each.is_cancelled]
        if len(waiting) + len(new) > self.longest:
            soonest = min(self._finishes(waiting).values(), default=0.0)
            raise Full(f"the queue is full: {self.longest} images at most", soonest)
        waits = self._waits([*waiting, *new], now)
        if waits[new[0]] > self.patience:
            raise Full(
                f"the predicted wait is {waits[new[0]]:.1f} s, and {self.patience:g} s at most",
                waits[new[0]] - self.patience,
            )
        late = [waits[each] - each.promised for each in waiting if each.key > new[0].key]
        if max(late, default=0.0) > 0:
            raise Full("another image would wait longer than it was promised", max(late))
        for each in new:
            each.promised = max(self.patience, waits[each])
        self._entries += new
        return new

    def accept(self, entry: Entry) -> None:
        """Take an image that was promised elsewhere."""
        self._entries.append(entry)

    def wait_of_new(self, orders: Iterable[Order], now: float, within: float | None = None) -> float:
        """Return the predicted seconds that the first image of a request would wait, were it taken."""
        new = self._entries_of(orders, now, None, within)
        waiting = [each for each in self._entries if not each.is_cancelled]
        return self._waits([*waiting, *new], now)[new[0]]

    def _entries_of(self, orders: Iterable[Order], now: float, owner: Any, within: float | None) -> list[Entry]:
        entries = []
        for order in orders:
            seconds = self.remaining(order, 0)
            due = now + min(STRETCH * seconds, math.inf if within is None else within)
            entries.append(Entry(order, now, due, owner, predicted=seconds))
        return entries

    def pick(self, may_begin: Callable[[str, set[str]], bool] = lambda model, busy: True) -> Entry | None:
        """Return the image to run for a quantum, None without any; cancelled ones come first, to be let go.

        may_begin: whether an image of this model may begin beside begun ones of these.
        """
        gone = next((each for each in self._entries if each.is_cancelled), None)
        if gone is not None or not self._entries:
            return gone
        begun = [each for each in self._entries if each.has_begun]
        busy = {each.order.model for each in begun}
        first = min(self._entries, key=_by_key)
        waits = len(begun) >= self.begun or not may_begin(first.order.model, busy)
        if begun and not first.has_begun and waits:
            return min(begun, key=_by_key)
        return first

    def in_turn(self) -> list[Entry]:
        """Return the images that are not cancelled, the next first."""
        return sorted((each for each in self._entries if not each.is_cancelled), key=_by_key)

    def remove(self, entry: Entry) -> None:
        """Forget an image that is finished, lost or cancelled."""
        if entry in self._entries:
            self._entries.remove(entry)

    def wait_of(self, entry: Entry) -> tuple[int, float]:
        """Return the number of images before one, and the predicted seconds until it is finished."""
        waiting = [each for each in self._entries if not each.is_cancelled]
        return sum(each.key < entry.key for each in waiting), self._finishes(waiting).get(entry, self._left(entry))

    def backlog(self) -> float:
        """Return the predicted seconds until all that is in the queue is finished."""
        left = [self._left(each) for each in self._entries if not each.is_cancelled]
        return self.delay() * bool(self._entries) + sum(left)

    def _left(self, entry: Entry) -> float:
        return self.remaining(entry.order, entry.steps)

    def _waits(self, entries: list[Entry], now: float) -> dict[Entry, float]:
        """Return the predicted seconds from arrival to finish of each image in which it does not run."""
        finishes = self._finishes(entries)
        return {
            each: max(0.0, now + finish - self._left(each) - each.arrived - each.computed)
            for each, finish in finishes.items()
        }

    def _finishes(self, entries: list[Entry]) -> dict[Entry, float]:
        """Return the predicted seconds from now until each image is finished, in the order of their keys."""
        finishes, loaded = dict[Entry, float](), set[str]()
        free = [self.delay()] * self.servers  # seconds until each server has nothing more to do
        for each in sorted(entries, key=_by_key):
            model = each.order.model
            finish = free[0] + self._left(each) + (0.0 if model in loaded else self.loading(model))
            heapq.heapreplace(free, finish)
            loaded.add(model)
            finishes[each] = finish
        return finishes


def _by_key(entry: Entry) -> tuple[float, int]:
    return entry.key
