"""The dispatcher with hands that make nothing: what it remembers, forgets, tries again and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from fluxq.serve.api import ImageRequest, Limits, VideoRequest, orders_of
from fluxq.serve.dispatcher import Dispatcher, Job, Unavailable
from fluxq.serve.metrics import Metrics
from fluxq.serve.orders import Busy, Facts, Failed, NotLoaded, Order, Picture, Quantum, Refused, Source, WorkerDied
from fluxq.serve.queue import Entry, Full
from fluxq.serve.shadow import Shadows
from fluxq.serve.times import Times
from fluxq.serve.videos import Video

CALL = {"width": 16, "height": 16, "num_inference_steps": 3}


class Hands:
    """Hands with room for so many models. loads: seconds that one takes; dead: whether the worker has ended."""

    def __init__(self, room: int = 9, loads: float = 0.0) -> None:
        self.room, self.loads, self.memory = room, loads, list[str]()
        self.dead = self.starts_no_more = self.is_paused = False
        self.known: dict[str, tuple[str | None, str]] = {}
        self._steps: dict[int, int] = {}

    async def start(self) -> None:
        if self.starts_no_more:
            raise RuntimeError("no GPU")
        self.dead, self.memory = False, []

    async def ask(self, method: str, *arguments: Any) -> Any:
        if self.dead:
            raise WorkerDied("it ended")
        await asyncio.sleep(0)
        name = arguments[0] if arguments else None
        if method == "load":
            self._load(str(name))
            return Facts(str(name), "digest", frozenset(), CALL, 8, 1)
        if method == "unload" and name in self.memory:
            self.memory.remove(str(name))
        if method == "know":
            self.known[str(name)] = arguments[1:]
        return dict.fromkeys(self.memory, 1)

    async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
        if self.dead:
            raise WorkerDied("it ended")
        (order,), self.is_paused = orders, False
        loading = self._load(order.model)
        for step in range(self._steps.get(order.number, 0) + 1, order.steps + 1):
            self._steps[order.number] = step
            yield Quantum(order.number, step, 0.01 + loading, loading)
            loading = 0.0
            await asyncio.sleep(0.001)
            if self.is_paused:
                return
        yield Quantum(order.number, order.steps, 0.01, picture=Picture(1, 1, b"rgb", order.steps))

    def pause(self) -> None:
        self.is_paused = True

    def kill(self) -> None:
        self.dead = True

    async def stop(self) -> None: ...

    def _load(self, name: str) -> float:
        if name in self.memory:
            return 0.0
        self.memory = [*self.memory, name][-self.room :]
        return self.loads


@pytest.fixture
def trial() -> Callable[..., Any]:
    """trial(hands, play, …) lets `play(dispatcher, make)` run; `await make(model)` is an image's."""

    def run(hands: Hands, play: Callable[..., Coroutine[Any, Any, Any]], *names: str, **more: Any) -> Any:
        async def all_of_it() -> Any:
            dispatcher = Dispatcher(hands, names or ("A",), Metrics(), **more)

            def make(model: str = "A") -> Any:
                return dispatcher.submit([Order(dispatcher.next_number(), model, "p", 1, CALL)]).images()

            await dispatcher.start()
            result = await play(dispatcher, make)
            await dispatcher.stop()
            return result

        return asyncio.run(asyncio.wait_for(all_of_it(), 60))

    return run


def test_seconds_to_load_are_those_of_the_turn_that_loaded(trial) -> None:
    async def play(dispatcher: Dispatcher, make: Any) -> float:
        await make("B")
        await make("A")
        while "B" in dispatcher.memory:
            await asyncio.sleep(0.001)
        return dispatcher._loading("B")

    assert trial(Hands(room=1, loads=7.0), play, "A", "B") == 7.0


def test_as_many_images_begin_as_are_joined(trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxq.serve.dispatcher.JOINED", 7)

    async def play(dispatcher: Dispatcher, make: Any) -> int:
        return dispatcher.queue.begun

    class Proving(Hands):
        async def ask(self, method: str, *arguments: Any) -> Any:
            return 99.0 if method == "prove_joined" else await super().ask(method, *arguments)

    assert trial(Proving(), play, joins=True) == 7 > trial(Hands(), play)


def test_a_model_whose_joined_calls_fail_makes_images_alone(trial) -> None:
    class Failing(Hands):
        async def ask(self, method: str, *arguments: Any) -> Any:
            if method == "prove_joined":
                raise RuntimeError("out of memory")
            return await super().ask(method, *arguments)

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        assert dispatcher.facts["A"].joined is None and await make()

    trial(Failing(), play, joins=True)


def test_images_whose_joined_call_fails_are_made_in_smaller_groups_or_alone(trial) -> None:
    groups: list[int] = []

    class Small(Hands):
        async def ask(self, method: str, *arguments: Any) -> Any:
            return 99.0 if method == "prove_joined" else await super().ask(method, *arguments)

        async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
            groups.append(len(orders))
            if len(orders) > 1:
                for order in orders:
                    yield Quantum(order.number, 0, 0.0, error=RuntimeError("out of memory"))
                return
            async for quantum in super().run(orders):
                yield quantum

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        for _ in range(2):
            orders = [Order(dispatcher.next_number(), "A", "p", seed, CALL) for seed in range(3)]
            assert len(await dispatcher.submit(orders).images()) == 3

    trial(Small(), play, joins=True)
    assert sorted(group for group in groups if group > 1) == [2, 3]  # each size fails once


def test_requests_that_are_refused_keep_others_joined(trial) -> None:
    class Refusing(Hands):
        async def ask(self, method: str, *arguments: Any) -> Any:
            return 99.0 if method == "prove_joined" else await super().ask(method, *arguments)

        async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
            for order in orders:
                refused = Refused("no such length", "max_sequence_length") if order.seed else None
                yield Quantum(
                    order.number, 0, 0.0, error=refused, picture=None if refused else Picture(1, 1, b"rgb", 1)
                )

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        orders = [Order(dispatcher.next_number(), "A", "p", seed, CALL) for seed in (1, 2, 3)]
        with pytest.raises(Refused, match="no such length"):
            await dispatcher.submit(orders).images()
        assert dispatcher.times.joined(orders[0], 3) == 3

    trial(Refusing(), play, joins=True)


def test_a_worker_that_ended_before_an_image_came_costs_it_nothing(trial) -> None:
    hands = Hands()

    async def play(dispatcher: Dispatcher, make: Any) -> int:
        hands.dead = True
        return len(await make())

    assert trial(hands, play) == 1


def test_a_restart_that_is_late_is_foretold_to_take_longer_still(trial) -> None:
    class Slow(Hands):
        starts, may_start = 0, asyncio.Event()

        async def start(self) -> None:
            self.starts += 1
            if self.starts > 1:
                await self.may_start.wait()
            await super().start()

    hands = Slow()

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        hands.dead = True
        images = asyncio.create_task(make())
        while dispatcher.is_ready:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.3)
        assert dispatcher.queue.delay() >= 0.25 * 0.3
        hands.may_start.set()
        await images
        assert dispatcher.queue.delay() == 0 and dispatcher._starting >= 0.3

    trial(hands, play)


def test_a_short_image_passes_a_long_one_that_has_loaded_its_model(trial) -> None:
    hands, order = Hands(loads=7.0), []

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        hands.memory.remove("B")
        dispatcher.memory.pop("B")

        async def made(name: str, steps: int) -> None:
            call = {**CALL, "num_inference_steps": steps}
            await dispatcher.submit([Order(dispatcher.next_number(), "B", "p", 1, call)]).images()
            order.append(name)

        long = asyncio.create_task(made("long", 300))
        while not any(entry.steps for entry in dispatcher.queue):
            await asyncio.sleep(0.001)
        await asyncio.gather(long, made("short", 3))

    trial(hands, play, "A", "B")
    assert order == ["short", "long"]


def test_a_worker_that_ended_while_nothing_was_made_is_started_for_whoever_asks(trial) -> None:
    hands = Hands()

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        hands.dead = True
        with pytest.raises(WorkerDied):
            await dispatcher.add("X", "/x")
        while hands.dead or not dispatcher.is_ready:
            await asyncio.sleep(0.001)
        await dispatcher.add("X", "/x")
        assert {*dispatcher.memory} == {"A", "X"}
        hands.dead = True
        await dispatcher.remove("X")  # with the worker
        await make()
        assert {*dispatcher.memory} == {"A"}

    trial(hands, play)


def test_what_an_admin_asks_before_the_worker_has_started_waits_for_it() -> None:
    class Slow(Hands):
        async def start(self) -> None:
            await asyncio.sleep(0.01)
            await super().start()

    async def play() -> None:
        dispatcher = Dispatcher(hands := Slow(), ("A",), Metrics())
        hands.dead = True
        starting = asyncio.create_task(dispatcher.start())
        await asyncio.sleep(0)
        await dispatcher.add("X", "/x")
        await starting
        assert {*dispatcher.names} == {*dispatcher.facts} == {"A", "X"}
        await dispatcher.stop()

    asyncio.run(play())


def test_what_an_admin_asks_during_a_restart_keeps_no_model_from_returning(trial) -> None:
    class Halting(Hands):
        halts, may_start = False, asyncio.Event()

        async def start(self) -> None:
            if self.halts:
                await self.may_start.wait()
            await super().start()

    hands = Halting(loads=7.0)

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        dispatcher._loads = {"A": 7.0, "B": 7.0}
        hands.dead = hands.halts = True
        images = asyncio.create_task(make())
        while dispatcher.is_ready:
            await asyncio.sleep(0.001)
        removing = asyncio.create_task(dispatcher.remove("C"))
        await asyncio.sleep(0.01)
        hands.may_start.set()
        await removing
        assert dispatcher._loading("A") == 0  # once, by the restart
        await images
        assert dispatcher.is_ready and {*dispatcher.memory} == {"A", "B"} == {*hands.memory}

    trial(hands, play, "A", "B", "C")


def test_an_image_that_ends_the_worker_at_once_is_tried_twice(trial) -> None:
    class Ending(Hands):
        runs = 0

        async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
            self.runs += orders[0].prompt == "p"
            async for quantum in super().run(orders):
                if orders[0].prompt == "p":
                    raise WorkerDied("it ended")
                yield quantum

    hands = Ending()

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        with pytest.raises(Unavailable, match="ended while it made this image"):
            await make()

    trial(hands, play)
    assert hands.runs == 2


def test_a_server_ends_though_no_worker_starts(trial, monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()

    monkeypatch.setattr("fluxq.serve.dispatcher._RETRIES", 0.1)

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        hands.dead = hands.starts_no_more = True
        with pytest.raises(Unavailable, match="cannot be started"):
            await make()
        died = dispatcher._died
        while dispatcher._died == died:  # each try is a restart of its own: what is foretold does not grow on and on
            await asyncio.sleep(0.001)
        assert dispatcher.queue.delay() > 0 == dispatcher.queue.backlog()

    trial(hands, play)


def test_a_pipeline_that_makes_no_image_without_another_is_warmed_up_with_one(trial) -> None:
    class Editing(Hands):
        error: Exception = AttributeError("'NoneType' object has no attribute 'size'")

        async def ask(self, method: str, *arguments: Any) -> Any:
            answer = await super().ask(method, *arguments)
            return replace(answer, edits="image") if method == "load" else answer

        async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
            if not orders[0].sources:
                raise self.error
            async for quantum in super().run(orders):
                yield quantum

    async def play(dispatcher: Dispatcher, make: Any) -> Facts:
        return dispatcher.facts["A"]

    facts = trial(Editing(), play)
    with pytest.raises(Refused, match="ask /v1/images/edits"):
        orders_of(ImageRequest(prompt="a"), facts, Limits(), {}, int)
    assert orders_of(ImageRequest(prompt="a"), facts, Limits(), {}, int, (Source(8, 8, b""),))
    Editing.error = NotLoaded("its folder is away")
    with pytest.raises(NotLoaded):
        trial(Editing(), play)


def test_a_name_is_taken_once_and_nothing_of_a_model_outlives_it(trial) -> None:
    async def play(dispatcher: Dispatcher, make: Any) -> None:
        results = await asyncio.gather(dispatcher.add("X", "/a"), dispatcher.add("X", "/b"), return_exceptions=True)
        assert [type(each) for each in results] == [Facts, Busy] and dispatcher.names == ["A", "X"]
        dispatcher.originals["X"] = "16 bit"
        dispatcher.shadows.of("X", ["psnr >= 30"])
        for _ in range(9):
            dispatcher.shadows.add("X", {"psnr": 1.0})
        await dispatcher.remove("X")
        assert dispatcher.shadows.told("X") == {"images": 0, "alert": None}
        tables = (dispatcher.facts, dispatcher.originals, dispatcher.memory, dispatcher._loads)
        assert not any("X" in table for table in tables)
        assert all(kind[0] == "A" for kind, _ in dispatcher.times._measured)

    trial(Hands(), play)


def test_a_new_worker_knows_what_was_added_and_by_which_digest_models_were_loaded(trial) -> None:
    hands = Hands()

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        await dispatcher.add("X", "/x")
        hands.dead = True
        await make("X")

    trial(hands, play)
    assert hands.known == {"A": (None, "digest"), "X": ("/x", "digest")}


def test_a_step_that_nobody_waits_for_is_waited_for_by_the_next(trial) -> None:
    class Long(Hands):
        async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
            await asyncio.sleep(0.05)
            async for quantum in super().run(orders):
                yield replace(quantum, seconds=5.0)

    async def play(dispatcher: Dispatcher, make: Any) -> None:
        images = asyncio.create_task(make())
        while not any(entry.has_begun for entry in dispatcher.queue):
            await asyncio.sleep(0.001)
        for entry in dispatcher.queue:
            dispatcher.cancel(entry.owner)
        assert 4 < dispatcher.queue.backlog() <= 5
        with pytest.raises(Full, match=r"wait is [45]\.\d s, and 3 s at most"):
            dispatcher.submit([Order(0, "A", "p", 1, CALL)])
        dispatcher.memory.clear()
        dispatcher._loads["A"] = 60.0  # it was still loading
        assert dispatcher._delay() > 60
        while len(dispatcher.queue):
            await asyncio.sleep(0.001)
        assert dispatcher.queue.backlog() == 0 and dispatcher.submit([Order(0, "A", "p", 1, CALL)])
        images.cancel()

    trial(Long(), play, patience=3)


def test_of_joined_images_those_that_are_finished_keep_no_step_from_counting(trial) -> None:
    async def play(dispatcher: Dispatcher, make: Any) -> None:
        dispatcher.times = Times()  # nothing is known: a second
        left, finished = (Entry(Order(number, "A", "p", 1, CALL), 0.0, 0.0) for number in (1, 2))
        running = {1: left, 2: finished}
        left.is_cancelled = True
        async with dispatcher._runs(running.values()):
            assert dispatcher.queue.delay() == 0
            del running[2]
            assert dispatcher.queue.delay() > 0
        assert dispatcher.queue.delay() == 0

    trial(Hands(), play)


def test_at_a_second_signal_nothing_is_finished(trial) -> None:
    async def play(dispatcher: Dispatcher, make: Any) -> None:
        images = make()
        await asyncio.sleep(0)
        dispatcher.give_up()
        with pytest.raises(Unavailable, match="at once"):
            await images

    trial(Hands(), play)


def test_no_more_images_are_kept_for_shadows_than_wait(trial) -> None:
    async def play(dispatcher: Dispatcher, make: Any) -> int:
        dispatcher.originals["A"] = "16 bit"
        images = [make() for _ in range(40)]
        kept = sum(entry.order.is_kept for entry in dispatcher.queue)
        dispatcher.originals.clear()
        for entry in dispatcher.queue:
            dispatcher.cancel(entry.owner)
        for each in images:
            each.close()
        return kept

    assert trial(Hands(), play, shadows=Shadows(1.0), longest=50, patience=1e9) == 16


def test_a_kept_prompt_counts_once_in_an_image_of_one_step() -> None:
    metrics, order = Metrics(), Order(1, "A", "p", 1, CALL | {"num_inference_steps": 1})
    for picture in (None, Picture(1, 1, b"rgb", 1)):
        metrics.quantum(order, Quantum(1, 1, 0.1, picture=picture, cached=True))
    assert metrics.registry.get_sample_value("fluxq_prompts_cached_total") == 1


def test_seconds_are_a_number_or_a_text_as_openai_has_it() -> None:
    texts = [f'{{"prompt": "a", "seconds": {each}}}' for each in ("4", '"4"')]
    assert [VideoRequest.model_validate_json(text).seconds for text in texts] == [4.0, 4.0]
    for wrong in ("true", '"four"', '"nan"', "601"):
        with pytest.raises(ValidationError, match="seconds"):
            VideoRequest.model_validate_json(f'{{"prompt": "a", "seconds": {wrong}}}')


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Refused("height is no multiple of 16"), "Refused", "height is no multiple of 16"),
        (KeyError("a prompt"), "KeyError", "the video could not be made"),
        (Failed("NotFinite"), "NotFinite", "the video could not be made"),
    ],
)
def test_a_video_that_cannot_be_made_tells_why_as_an_image_does(error: Exception, code: str, message: str) -> None:
    video = Video("video_x", Job(()), 16)
    video.fail(error)
    assert video.error == {"code": code, "message": message}
