"""The loop between the queue and the worker: pick an image, let it run for a quantum, look again.

It runs in the front's event loop alone, so nothing here is locked but the worker, which does one thing at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fluxq.base.console import first_line, logger
from fluxq.serve.metrics import Metrics
from fluxq.serve.orders import Busy, Facts, Failed, Order, Picture, Quantum, Refused, Source, WorkerDied
from fluxq.serve.queue import Entry, Queue
from fluxq.serve.shadow import Shadows
from fluxq.serve.times import JOINED, Times
from fluxq.serve.traces import Spans

_AT_ONCE = "the server was told to end at once"
_RETRIES = 5.0  # seconds between tries to start a worker
_LATER = 0.25  # of the time that a restart has taken: what is late already takes longer still
_WARM_STEPS = 3
_NEAR = 30.0  # dB of latents in joined calls, from which on calls are joined
_SHADOWS = 16  # that wait to be made; the worker keeps the images that they are compared with


class Hands(Protocol):
    """A worker, asked from an event loop; `WorkerDied` where its process ended."""

    async def start(self) -> None: ...

    async def ask(self, method: str, *arguments: Any) -> Any: ...

    def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]: ...

    def pause(self) -> None: ...

    def kill(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True)
class Made:
    """An image as its answer tells of it.

    queued, computed, predicted: seconds; predicted: of computing, beforehand.
    setting: the one that it was made in under a backlog, with what that costs.
    """

    order: Order
    picture: Picture
    digest: str
    queued: float
    computed: float
    predicted: float
    setting: Mapping[str, Any] | None = None


@dataclass(eq=False)
class Job:
    """A request: images that are taken together. setting: as of Made. news: of every step, None at the end."""

    orders: tuple[Order, ...]
    setting: Mapping[str, Any] | None = None
    news: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)
    made: dict[int, Made] = field(default_factory=dict)
    error: Exception | None = None
    spans: Spans = field(default_factory=Spans)

    @property
    def is_finished(self) -> bool:
        return self.error is not None or len(self.made) == len(self.orders)

    async def images(self) -> list[Made]:
        """Wait for all images and return them; the error of one is the request's."""
        while await self.news.get() is not None:
            pass
        if isinstance(self.error, (ValueError, RuntimeError, OSError)):
            raise self.error
        if self.error is not None:  # of others uvicorn would log the text, which may quote a prompt
            raise Failed(type(self.error).__name__)
        return [self.made[order.number] for order in self.orders]

    def end_at_once(self) -> None:
        """Tell who waits that the server was told to end at once."""
        self.error = Unavailable(_AT_ONCE)
        self.news.put_nowait(None)


class Unavailable(RuntimeError):
    """A request that cannot be served now. retry_after: seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = max(1, round(retry_after))


class Dispatcher:
    """Images of all requests, the worker that makes them, and what is known of its checkpoints."""

    def __init__(
        self,
        hands: Hands,
        names: Sequence[str],
        metrics: Metrics,
        shadows: Shadows | None = None,
        *,
        joins: bool = False,
        **limits: Any,
    ) -> None:
        """Take requests once `start` has been awaited. joins: whether denoiser calls are joined. limits: of Queue."""
        self.hands, self.names, self.metrics, self.shadows = hands, list(names), metrics, shadows or Shadows()
        self.originals: dict[str, str] = {}  # checkpoint -> name of its 16-bit pipeline, of those with shadows
        self._waiting: deque[tuple[str, Order]] = deque()  # shadows, each with its checkpoint
        self.times, self._adding, self._folders = Times(), set[str](), dict[str, str]()
        self.tracer: Any = None  # of OpenTelemetry
        if joins:
            limits.setdefault("begun", JOINED)
        self.queue = Queue(self.times.remaining, delay=self._delay, loading=self._loading, **limits)
        self._loads: dict[str, float] = {}  # checkpoint -> seconds that it took to load
        self._starting = 0.0  # seconds that the worker took to start
        self._died, self._restart = 0.0, 0.0  # when it ended; seconds until the next one goes on, as foretold then
        self._returning: Collection[str] = ()  # checkpoints that a new worker loads again
        self._is_dead = False  # it ended while it was asked something
        self._running: Collection[Entry] = ()
        self._since = -math.inf  # when their quantum began
        self.facts: dict[str, Facts] = {}
        self.memory: dict[str, int] = {}
        self.joins = joins
        self.is_draining = self.is_ready = self._has_given_up = False
        self._ending = asyncio.Event()
        self.next_number = itertools.count(1).__next__  # of a new order
        self._awake, self._worker = asyncio.Event(), asyncio.Lock()
        self._asking = 0  # questions that wait for the worker
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the worker, load and warm up every checkpoint; ValueError for one that is refused."""
        await self._start_worker()
        for name in reversed(self.names):  # where they do not fit together, the first stays
            await self._load(name)
        self.is_ready = True
        self._loop = asyncio.create_task(self._run())

    async def _start_worker(self) -> None:
        async with self._worker:  # of whom somebody may be asking something
            began = time.monotonic()
            await self.hands.start()
            self._starting = time.monotonic() - began

    def give_up(self) -> None:
        """End the worker at once, and what it makes."""
        self.is_draining = self._has_given_up = True
        self._ending.set()
        for entry in self.queue:
            self._fail(entry, Unavailable(_AT_ONCE))
        self.hands.kill()

    async def stop(self) -> None:
        """Finish what was taken, then end the worker."""
        self.is_draining = True
        self._ending.set()
        self._awake.set()
        if self._loop is not None:
            await asyncio.gather(self._loop, return_exceptions=True)
        await self.hands.stop()

    @property
    def is_alive(self) -> bool:
        """False where the loop has ended by an error of its own: the server is to be started again."""
        return self._loop is None or not self._loop.done() or self._ending.is_set()

    async def wait_of(self, orders: Sequence[Order], within: float | None = None) -> float:
        """Return the predicted seconds that a request would wait."""
        return self.queue.wait_of_new(orders, time.monotonic(), within)

    def submit(
        self, orders: Sequence[Order], within: float | None = None, setting: Mapping[str, Any] | None = None
    ) -> Job:
        """Take a request, or raise `Full` or `Unavailable`.

        within: seconds in which it is due. setting: for the answer.
        """
        self.require_open()
        orders = [self._drawn(order) for order in orders]
        now = time.monotonic()
        job = Job(tuple(orders), setting)
        self.queue.add(orders, now, job, within)
        job.spans = Spans(self.tracer, job.orders)
        self._awake.set()
        return job

    def require_open(self) -> None:
        """Raise `Unavailable` unless requests are taken."""
        if self.is_draining or self._loop is None:
            raise Unavailable("the server is ending" if self.is_draining else "the server is not ready")

    def accept(self, entry: Entry, setting: Mapping[str, Any] | None) -> Job:
        """Take an image that was promised elsewhere."""
        entry.order = self._drawn(entry.order)
        entry.owner = job = Job((entry.order,), setting)
        if self._has_given_up:  # the loop has ended: another server makes it
            job.end_at_once()
            return job
        self.queue.accept(entry)
        self._awake.set()
        return job

    def cancel(self, job: Job) -> None:
        """Let go of what nobody waits for, at the next step."""
        for entry in self.queue:
            if entry.owner is job:
                entry.is_cancelled = True
        self._awake.set()

    async def add(self, name: str, folder: str) -> Facts:
        """Load one more checkpoint; `Busy` where one of that name is there or on its way."""
        if name in self.names or name in self._adding:
            raise Busy(f"there is a model {name!r} already; give another name, or unload it")
        self._adding.add(name)
        self._folders[name] = folder  # for a worker that is started later
        try:
            await self._ask("know", name, folder)
            facts = await self._load(name)
            self.names.append(name)
        except Exception:
            await self._forget(name)
            raise
        finally:
            self._adding.remove(name)
        return facts

    async def remove(self, name: str) -> None:
        """Unload a checkpoint and forget it; `Busy` while it has images in the queue, or where it is the last."""
        if any(entry.order.model == name for entry in self.queue):
            raise Busy(f"{name} has images in the queue; try again when they are finished")
        if self.names == [name]:
            raise Busy(f"{name} is the only model: load another one first")
        self.names.remove(name)
        await self._forget(name)

    async def _forget(self, name: str) -> None:
        """Forget all of a model: another may come under its name."""
        for table in (self.facts, self.originals, self._loads, self._folders):
            table.pop(name, None)
        self.times.forget(name)
        self.shadows.forget(name)
        self.metrics.forget(name)
        with suppress(WorkerDied):  # with which it went
            await self._ask("unload", name, True)
            self.memory = await self._ask("memory")

    async def _load(self, name: str) -> Facts:
        facts = await self._timed_load(name)
        await self._warm_up(facts)
        return facts

    async def _timed_load(self, name: str) -> Facts:
        """Load a checkpoint, and keep how long that took."""
        async with self._between_steps():
            began = time.monotonic()
            facts = await self.hands.ask("load", name)
            self._loads[name] = time.monotonic() - began
        return facts

    def _delay(self) -> float:
        """Return the predicted seconds until the worker has started, or has finished a step that nobody waits for."""
        now = time.monotonic()
        if not self.is_ready:
            gone = now - self._died if self._died else 0.0
            return max(self._restart - gone, _LATER * gone)
        if self._running and all(each.is_cancelled for each in self._running):
            step = sum(self.times.quantum(each.order, each.steps) for each in self._running)
            loading = max(self._loading(each.order.model) for each in self._running)
            return max(0.0, self._since + loading + step - now)
        return 0.0

    def _loading(self, model: str) -> float:
        is_there = model in self.memory or model in self._returning  # which `_delay` counts
        return 0.0 if is_there else self._loads.get(model, 0.0)

    async def _warm_up(self, facts: Facts) -> None:
        """Make a small part of an image twice: first calls compile and allocate, later ones are measured."""
        call = {**facts.defaults, "num_inference_steps": min(_WARM_STEPS, facts.defaults["num_inference_steps"])}
        try:
            await self._measure(facts.name, call)
        except Exception as error:  # Qwen-Image-Edit's pipeline looks at its image first
            is_of_arguments = type(error) in (AttributeError, Refused, RuntimeError)  # none of memory, or of a worker
            if not is_of_arguments or facts.edits != "image" or facts.frames:
                raise
            width, height = call["width"], call["height"]
            await self._measure(facts.name, call, (Source(width, height, bytes(3 * width * height)),))
            facts = replace(facts, edits="only")
        if self.joins and not facts.is_alone:
            orders = [Order(self.next_number(), facts.name, str(seed), seed, call) for seed in range(JOINED)]
            facts = replace(facts, joined=await self._proved(facts.name, orders))
        self.facts[facts.name] = facts
        self.shadows.of(facts.name, facts.gates)
        self.memory = await self._ask("memory")

    async def _measure(self, name: str, call: Mapping[str, Any], sources: tuple[Source, ...] = ()) -> None:
        for prompt in ("a", "b"):  # a prompt that is kept would take no time
            order = Order(self.next_number(), name, prompt, 0, call, sources=sources)
            async with self._worker, aclosing(self.hands.run([order])) as quanta:
                async for quantum in quanta:
                    quantum.check()
                    if prompt == "b":
                        self.times.add(order, quantum)

    async def _proved(self, name: str, orders: Sequence[Order]) -> float | None:
        """Return how near images of joined calls are, in dB; None where they cannot be made."""
        try:
            return await self._ask("prove_joined", orders)
        except WorkerDied:
            raise
        except Exception as error:  # of memory, say: alone they can
            logger.warning("calls of %s are not joined: %s", name, first_line(error))
            return None

    async def _run(self) -> None:
        while (len(self.queue) or not self._ending.is_set()) and not self._has_given_up:
            try:
                await self._next()
            except WorkerDied as error:
                if not self._has_given_up:
                    await self._recover(error)

    async def _next(self) -> None:
        """Let one image run, else a shadow, else wait."""
        entry = self.queue.pick(self.may_begin)
        try:
            if entry is not None:
                await self._turn(entry)
            elif self._is_dead:
                raise WorkerDied("the worker ended")
            elif self._waiting:
                await self._shadow(*self._waiting[0])
            else:
                self._awake.clear()
                await self._awake.wait()
        except WorkerDied:
            raise
        except Exception as error:  # of one image: the others go on
            if entry is not None:
                self._fail(entry, error)
            else:
                logger.warning("a shadow failed: %s", type(error).__name__)
                await self._forget_shadow()

    def _drawn(self, order: Order) -> Order:
        """Return an order, or one whose image is kept to be made again; none is drawn where too many wait."""
        if order.model not in self.originals or self._kept() >= _SHADOWS or not self.shadows.is_drawn():
            return order
        return replace(order, is_kept=True)

    def _kept(self) -> int:
        """Return how many images are kept, or will be, for a shadow."""
        return len(self._waiting) + sum(each.order.is_kept for each in self.queue)

    async def _shadow(self, model: str, order: Order) -> None:
        """Let a shadow run until it is finished or an image comes."""
        async with self._worker, aclosing(self.hands.run([order])) as quanta:
            async for quantum in quanta:
                quantum.check()
                if quantum.measured is not None:
                    self._waiting.popleft()
                    self.shadows.add(model, quantum.measured)
                    self.metrics.shadow(model, quantum.measured, model in self.shadows.alerts)
                elif len(self.queue) or self._asking or self._ending.is_set():
                    self.hands.pause()

    async def _forget_shadow(self) -> None:
        """Give up the first shadow, which cannot be made."""
        _, order = self._waiting.popleft()
        await self._ask("drop", order.number)
        await self._ask("drop", order.shadow_of)

    def may_begin(self, model: str, busy: set[str]) -> bool:
        """Tell whether an image of a model may begin: not where that would unload another in the middle of one."""
        if model in busy and self.facts[model].is_alone:
            return False
        return model in self.memory or not busy

    async def _turn(self, entry: Entry) -> None:
        """Let an image run until another one is to."""
        if entry.is_cancelled:
            if entry.has_begun:
                await self._ask("drop", entry.order.number)
            self.queue.remove(entry)
            self.metrics.cancelled.inc()
            entry.owner.spans.ended(entry.order)
            return
        group = self._group(entry)
        running = {each.order.number: each for each in group}
        orders, failed, joined = [_without_sources(each) for each in group], list[Entry](), list[Entry]()
        is_refused = False  # a wrong request says nothing of joined calls
        for each in group:
            each.has_begun = True
        async with self._worker, self._runs(running.values()), aclosing(self.hands.run(orders)) as quanta:
            async for quantum in quanta:
                self._since = time.monotonic()
                each = running[quantum.number]
                try:
                    self._take(each, quantum)
                except Exception as error:
                    if quantum.error is None or not group[1:]:
                        self._fail(each, error)
                        failed.append(each)
                    else:  # of all that shared the call, or of this image alone
                        joined.append(each)
                        is_refused |= isinstance(error, Refused)
                if quantum.picture is not None or quantum.error is not None:
                    del running[quantum.number]
                elif self._asking or each.order.model not in self.memory or not self._goes_on(running.values()):
                    self.hands.pause()  # also to learn what loading this one's model has unloaded
        if len(joined) == len(group) and not is_refused:
            self.times.fail(entry.order, len(group))
        for each in joined:  # again from the start, where an error of its own ends it
            each.is_alone, each.steps = True, 0
        for each in (*failed, *joined):
            await self._ask("drop", each.order.number)
        if entry.order.model not in self.memory:
            self.memory = await self._ask("memory")

    @asynccontextmanager
    async def _runs(self, running: Collection[Entry]) -> AsyncIterator[None]:
        """Take note of what the worker makes while the block lasts. running: loses what is finished."""
        self._running, self._since = running, time.monotonic()
        try:
            yield
        finally:
            self._running = ()

    def _group(self, entry: Entry) -> list[Entry]:
        """Return an image and those whose denoiser calls are joined with its."""
        order = entry.order
        if entry.is_alone or not self._may_join(order):
            return [entry]
        others = (each for each in self.queue.in_turn() if each is not entry and not each.is_alone)
        like = [each for each in others if _joins(order, each.order)]
        count = self.times.joined(order, 1 + len(like))
        room = self.queue.begun - sum(each.has_begun or each is entry for each in self.queue)
        group = [entry]
        for each in like:
            if len(group) < count and (each.has_begun or room > 0):
                room -= not each.has_begun
                group.append(each)
        return group

    def _may_join(self, order: Order) -> bool:
        joined = self.facts[order.model].joined if order.model in self.facts else None
        return joined is not None and joined >= _NEAR and not order.sources

    def would_join(self) -> bool:
        """Tell whether denoiser calls of all images here are joined, and one more would be if it is like them."""
        waiting = self.queue.in_turn()
        if not waiting or waiting[0].is_alone or not self._may_join(waiting[0].order):
            return False
        if len(self._group(waiting[0])) < len(waiting):
            return False
        return self.times.joined(waiting[0].order, 1 + len(waiting)) > len(waiting)

    def _goes_on(self, running: Collection[Entry]) -> bool:
        """Tell whether these images run on together: the next one is among them, and no other would be."""
        entry = self.queue.pick(self.may_begin)
        if entry is None or entry.is_cancelled or entry not in running:
            return False
        return {*self._group(entry)} == {*running}

    def _take(self, entry: Entry, quantum: Quantum) -> None:
        """Take note of what an image has come to."""
        quantum.check()
        self.times.add(entry.order, quantum)
        self.metrics.quantum(entry.order, quantum)
        entry.owner.spans.quantum(entry.order, quantum)
        entry.steps, entry.computed = quantum.steps, entry.computed + quantum.seconds
        if quantum.loading and entry.order.model not in self.memory:
            self._loads[entry.order.model] = quantum.loading
        if quantum.picture is None:
            entry.owner.news.put_nowait(self._step(entry))
        else:
            self._finish(entry, quantum.picture)

    def _step(self, entry: Entry) -> dict[str, Any]:
        position, seconds = self.queue.wait_of(entry)
        return {
            "image": entry.owner.orders.index(entry.order),
            "position": position,
            "remaining_ms": round(1000 * seconds),
            "step": entry.steps,
            "steps": entry.order.steps,
        }

    def _finish(self, entry: Entry, picture: Picture) -> None:
        self.queue.remove(entry)
        job, order = entry.owner, entry.order
        queued = max(0.0, time.monotonic() - entry.arrived - entry.computed)
        digest = self.facts[order.model].digest
        job.made[order.number] = made = Made(
            order, picture, digest, queued, entry.computed, entry.predicted, job.setting
        )
        self.metrics.made(made)
        job.news.put_nowait({"made": made})
        if job.is_finished:
            job.news.put_nowait(None)
        if order.is_kept:
            number, original = self.next_number(), self.originals[order.model]
            shadow = replace(order, number=number, model=original, is_kept=False, shadow_of=order.number)
            self._waiting.append((order.model, shadow))

    def _fail(self, entry: Entry, error: Exception) -> None:
        """End a request whose image cannot be made, and let its other images go."""
        if not isinstance(error, (Refused, Unavailable)):
            logger.warning("an image failed: %s", type(error).__name__)
        self.queue.remove(entry)
        entry.owner.spans.ended(entry.order, error)
        if entry.owner.error is None:
            entry.owner.error = error
            self.cancel(entry.owner)
            entry.owner.news.put_nowait(None)

    async def _recover(self, error: WorkerDied) -> None:
        """Answer what the worker was making, start another one, and go on with what waits."""
        logger.warning("%s; it is started again", error)
        self.is_ready = False
        self._returning = [*self.memory]  # which an admin's question changes meanwhile
        seconds = self._starting + sum(self._loads.get(name, 0.0) for name in self._returning)
        self._died, self._restart = time.monotonic(), seconds
        self.metrics.restarts.inc()
        self._waiting.clear()
        for entry in self.queue:
            if entry.has_begun and entry.steps == 0 and not entry.is_again:
                entry.has_begun, entry.is_again = False, True  # the worker may have ended before it came
            elif entry.has_begun:
                self._fail(entry, Unavailable("the worker ended while it made this image; ask again"))
        while not self.is_ready:
            try:
                await self._start_worker()
                for name in {**self._folders, **self.facts}:  # also one that is being added
                    facts = self.facts.get(name)
                    await self._ask("know", name, self._folders.get(name), facts and facts.digest)
                for name in self._returning:
                    if name in self.names:
                        await self._load_again(name)
                self.memory = await self._ask("memory")
                self._returning, self._is_dead, self.is_ready = (), False, True
            except Exception as problem:  # whatever keeps it from starting may pass
                logger.warning("no worker: %s; the next try in %g s", first_line(problem), _RETRIES)
                self._died, self._restart = time.monotonic(), _RETRIES + seconds
                for entry in self.queue:
                    self._fail(entry, Unavailable("the worker cannot be started", _RETRIES))
                if self._ending.is_set():
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), _RETRIES)

    async def _load_again(self, name: str) -> None:
        """Load a model; one that cannot be is tried again when somebody asks for it."""
        try:
            await self._timed_load(name)
        except (ValueError, OSError) as error:
            logger.warning("%s cannot be loaded: %s", name, first_line(error))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Ask the worker between two steps."""
        async with self._between_steps():
            return await self.hands.ask(method, *arguments)

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """Have the worker to oneself while the block lasts; an end of it wakes the loop, which starts another."""
        self._asking += 1
        try:
            async with self._worker:
                yield
        except WorkerDied:
            self._is_dead = True
            self._awake.set()
            raise
        finally:
            self._asking -= 1


def _joins(order: Order, other: Order) -> bool:
    """Tell whether two images may be made in joined calls; those of other text lengths meet and call alone."""
    one, two = ((*each.kind, each.size, each.frames, each.lora) for each in (order, other))
    return one == two and not other.sources


def _without_sources(entry: Entry) -> Order:
    """Return an order as the worker needs it: of an image that has begun it has the sources."""
    return replace(entry.order, sources=()) if entry.has_begun else entry.order


class Here:
    """A worker in this process."""

    def __init__(self, settings: Any) -> None:
        self.settings, self._pauses = settings, threading.Event()
        self._threads = ThreadPoolExecutor(1, "worker")  # of its own: others encode files meanwhile

    async def start(self) -> None:
        from fluxq.serve.worker import Worker

        self._worker: Any = await self._threaded(Worker, self.settings)

    async def ask(self, method: str, *arguments: Any) -> Any:
        return await self._threaded(getattr(self._worker, method), *arguments)

    async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
        news: asyncio.Queue[Quantum | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._pauses.clear()

        def tell(quantum: Quantum) -> None:
            loop.call_soon_threadsafe(news.put_nowait, quantum)

        running = asyncio.ensure_future(self._threaded(self._worker.run, orders, tell, self._pauses.is_set))
        running.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (quantum := await news.get()) is not None:
                yield quantum
        finally:
            self._pauses.set()
            await running

    async def _threaded(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def pause(self) -> None:
        self._pauses.set()

    def kill(self) -> None:
        self.pause()

    async def stop(self) -> None:
        self.pause()
