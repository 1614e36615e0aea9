"""The queue and the times, with a clock of their own: who runs next, who is taken, what is foretold."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fluxq.serve.orders import Order, Picture, Quantum
from fluxq.serve.queue import AGEING, STRETCH, Entry, Full, Queue
from fluxq.serve.times import Times

SECOND = 1.0  # of each step here
PICTURE = Picture(16, 16, b"", 1)


@pytest.fixture
def queue() -> Queue:
    return Queue(lambda order, steps: (order.steps - steps) * SECOND, longest=8, patience=30, begun=2)


@pytest.fixture
def order() -> Callable[..., Order]:
    """order(steps) is one more order; order(steps, model=…) of another model."""
    numbers = iter(range(1, 1000))

    def make(steps: int, model: str = "a", size: int = 16, **call: Any) -> Order:
        call = {"width": size, "height": size, "num_inference_steps": steps} | call
        return Order(next(numbers), model, "p", 0, call)

    return make


def run(queue: Queue, until: float, arrivals: dict[float, list[Order]], now: float = 0.0) -> list[tuple[float, int]]:
    """Let a worker make a step a second; return when each order was finished."""
    finished = []
    while now < until:
        for came in arrivals.pop(now, []):
            queue.add([came], now)
        entry = queue.pick()
        now += SECOND
        if entry is not None:
            entry.steps, entry.has_begun, entry.computed = entry.steps + 1, True, entry.computed + SECOND
            if entry.steps == entry.order.steps:
                queue.remove(entry)
                finished.append((now, entry.order.number))
    return finished


def test_a_short_image_passes_a_long_one_between_steps_and_nobody_waits_forever(queue, order) -> None:
    long, short = order(20), order(2)
    assert run(queue, 30, {0: [long], 3: [short]}) == [(5, short.number), (22, long.number)]
    # A stream of short ones at three quarters of what can be made: the long one ages and comes in turn.
    arrivals = {float(t): [order(3)] for t in range(0, 200, 4)}
    arrivals[0.0].append(waiting := order(10))
    finished = dict((number, at) for at, number in run(queue, 250, arrivals))
    assert finished[waiting.number] < STRETCH * 10 / AGEING and len(finished) == 51


def test_two_begun_images_do_not_take_turns(queue, order) -> None:
    first, second = queue.add([order(5)], 0.0) + queue.add([order(5)], 0.0)
    run_of = []
    for _ in range(10):
        entry = queue.pick()
        assert entry is not None
        entry.has_begun, entry.steps = True, entry.steps + 1
        run_of.append(entry)
        if entry.steps == 5:
            queue.remove(entry)
    assert run_of == [first] * 5 + [second] * 5


def test_no_more_begin_than_are_held_and_an_earlier_deadline_comes_first(queue, order) -> None:
    one, two, three = (queue.add([order(steps)], 0.0)[0] for steps in (6, 5, 4))
    one.has_begun = two.has_begun = True
    assert queue.pick() is two
    queue.remove(two)
    assert queue.pick() is three
    (urgent,) = queue.add([order(9)], 0.0, within=1.0)
    assert queue.pick() is urgent and queue.wait_of(urgent) == (0, 9.0) and queue.wait_of(one)[0] == 2
    urgent.is_cancelled = True
    assert queue.pick() is urgent and queue.backlog() == 10


def test_another_model_waits_where_it_would_unload_one_in_use(queue, order) -> None:
    (busy,) = queue.add([order(20)], 0.0)
    busy.has_begun = True
    (other,) = queue.add([order(1, "b")], 0.0)
    assert queue.pick() is other
    assert queue.pick(lambda model, busy: model in busy) is busy


def test_what_is_taken_is_exactly_what_waits_no_longer_than_was_promised(queue, order) -> None:
    assert [len(queue.add([order(10)], 0.0)) for _ in range(4)] == [1, 1, 1, 1]  # waits 0, 10, 20, 30 s
    with pytest.raises(Full, match=r"predicted wait is 40\.0 s") as told:
        queue.add([order(10)], 0.0)
    assert told.value.retry_after == 10 and len(queue) == 4
    with pytest.raises(Full, match="longer than it was promised") as told:
        queue.add([order(2)], 0.0)  # would pass the last one, which then waited 32 s
    assert told.value.retry_after == 2
    finished = run(queue, 12, {})
    assert finished[0][0] == 10 and len(queue.add([order(10)], 12.0)) == 1
    with pytest.raises(Full, match="queue is full: 8 images"):
        queue.add([order(1) for _ in range(6)], 12.0)


def test_a_request_of_many_images_does_not_wait_for_itself(queue, order) -> None:
    taken = queue.add([order(10) for _ in range(5)], 0.0)
    assert [entry.promised for entry in taken] == [30, 30, 30, 30, 40]
    with pytest.raises(Full):
        queue.add([order(1)], 0.0)


def quantum(steps: int, seconds: float, picture: Picture | None = None, loading: float = 0.0) -> Quantum:
    return Quantum(0, steps, seconds + loading, loading, picture)


def beside(quantum: Quantum, shared: int) -> Quantum:
    """Return a quantum of an image that was made beside others, by so many of which the call was shared."""
    return replace(quantum, is_alone=False, shared=shared)


def measured(times: Times, order: Order, begin: float, step: float, finish: float) -> None:
    times.add(order, quantum(1, begin, loading=50.0))
    for steps in range(2, order.steps + 1):
        times.add(order, quantum(steps, step))
    times.add(order, quantum(order.steps, finish, PICTURE))


def test_times_are_medians_of_their_size_and_lie_between_those_of_others(order) -> None:
    times = Times()
    assert times.remaining(order(4)) == 1 + 3 + 1  # nothing is known
    for _ in range(3):
        measured(times, order(4), 0.5, 0.1, 0.2)
    measured(times, order(4), 9.0, 9.0, 9.0)
    assert times.remaining(order(28)) == pytest.approx(0.5 + 27 * 0.1 + 0.2)
    assert times.remaining(order(28), 1) == pytest.approx(27 * 0.1 + 0.2) and times.remaining(order(28), 28) == 0.2
    assert times.quantum(order(4, size=48), 1) == pytest.approx(9 * 0.1)  # as the pixels
    measured(times, order(4, size=32), 0.5, 0.4, 0.2)
    between = times.quantum(order(4, size=24), 1)
    assert 0.1 < between < 0.4 and times.quantum(order(4, size=8), 1) == 0.1
    assert times.quantum(order(4, size=64), 1) == pytest.approx(4 * 0.4)
    guided = order(4, true_cfg_scale=4.0, negative_prompt="")
    assert times.quantum(guided, 1) == pytest.approx(2 * 0.1)
    measured(times, guided, 0.5, 0.15, 0.2)
    assert times.quantum(guided, 1) == 0.15 and times.quantum(order(4, true_cfg_scale=4.0), 1) == 0.1


def test_calls_are_joined_where_that_pays_and_tried_once(order) -> None:
    times, small, large = Times(), order(4), order(4, size=64)
    assert times.joined(small, 1) == 1 and times.joined(small, 12) == 4
    for each in (small, large):
        measured(times, each, 0.5, 0.1, 0.2)
    for count, step in ((4, 0.39), (3, 0.2)):
        times.add(small, beside(quantum(2, step), count))
    for count in range(2, 5):
        times.add(large, beside(quantum(2, 0.1 * count), count))
    assert [times.joined(small, count) for count in (8, 4, 3, 2, 1)] == [3, 3, 3, 2, 1]
    assert times.joined(large, 8) == 1 and times.quantum(large, 1) == 0.1
    huge = order(4, size=128)
    times.add(huge, beside(quantum(2, 9.0), 4))
    assert times.joined(huge, 4) == 1  # until it is known alone too
    times.add(huge, quantum(2, 3.0))
    assert times.joined(huge, 4) == 4
    times.add(large, beside(quantum(1, 9.0), 2))
    times.add(large, beside(quantum(2, 9.0), 1))  # called alone, and waited for the others
    assert times.remaining(large) == pytest.approx(0.5 + 3 * 0.1 + 0.2)


def test_an_entry_is_due_by_its_own_length(queue, order) -> None:
    entries: list[Entry] = [queue.add([order(steps)], 1.0)[0] for steps in (1, 5)]
    assert [entry.due for entry in entries] == [1 + STRETCH, 1 + 5 * STRETCH]
