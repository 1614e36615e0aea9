"""`--queue redis://…`: one queue for several servers, which keeps what was accepted when one of them ends.

Each server takes requests and makes images. It takes an image by a lease, which it renews, and tells Redis what becomes
of it; whoever waits for a request hears news of it, and fetches its images.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis.exceptions import OutOfMemoryError

from fluxq.base.console import first_line, logger
from fluxq.serve import api
from fluxq.serve.dispatcher import Dispatcher, Job, Made, Unavailable
from fluxq.serve.orders import Facts, Failed, NotLoaded, Order, Picture, Refused
from fluxq.serve.queue import AGEING, Entry, Queue
from fluxq.serve.redis_store import (
    AWAY,
    Failure,
    Finished,
    Progress,
    RequestSpec,
    Row,
    Secret,
    Store,
    Unreadable,
    Value,
    pixels_of,
    png,
    read,
)
from fluxq.serve.videos import KEPT_BYTES, KEPT_SECONDS, Video, file_of, no_video

LEASE = 15.0  # seconds after which a server that is not heard of has lost its images
POLL = 1.0  # seconds after which the queue is looked at without news
_TRIES = 3  # servers that may end while they make one image
_AGAIN = 100  # times that a request is looked at anew because another one was taken meanwhile
_NEARER = 1e-3  # by which an image comes before those that were begun, if it does
_RECHECK = 5.0  # seconds after which a request's images are looked for without news
_TIDY = 60.0  # seconds after which what is too old is looked for
_Answer = TypeVar("_Answer")
NO_CLAIM = ("", "")  # of a request without an Idempotency-Key
_STEP = ("image", "step", "steps", "position", "remaining_ms")  # what news tell of a step


@dataclass(eq=False)
class SharedJob(Job):
    """A request in Redis, as the server sees it whose client waits. outlives: whether it goes on without one."""

    name: str = ""
    fps: int | None = None
    outlives: bool = False
    news_of_it: asyncio.Queue[Mapping[str, Any]] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class _Lease:
    """An image that this server makes."""

    entry: str
    row: Row
    spec: RequestSpec
    job: Job
    relaying: asyncio.Task[None] | None = None


class RedisQueue:
    """Requests of all servers, in front of a dispatcher that makes this one's share of their images."""

    def __init__(self, url: str, dispatcher: Dispatcher, limits: api.Limits, adapters: Mapping[str, str]) -> None:
        self.dispatcher, self.limits, self.adapters = dispatcher, limits, adapters
        self.name = secrets.token_hex(8)
        self._store = Store(url)
        self._offset = 0.0  # of Redis's clock, to this process's
        self._leases: dict[str, _Lease] = {}
        self._watched: set[SharedJob] = set()
        self._connected, self._wake = asyncio.Event(), asyncio.Event()
        self._trouble = ""  # why Redis did not answer the last time, which is told once
        self._ends, self._tidied = False, 0.0
        self._is_over = False  # a task is told so as well as cancelled: the client may swallow a cancellation
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_connected(self) -> bool:
        """True while Redis answers."""
        return self._connected.is_set()

    async def start(self) -> None:
        """Begin to take images of the queue, and wait until it answers; the dispatcher is ready."""
        for what in (self._listen, self._take_what_comes, self._beat):
            self._spawn(self._repeat(what))
        await self._connected.wait()

    async def stop(self) -> None:
        """Finish what was begun, and leave the rest to other servers."""
        self._ends = True
        relaying = [lease.relaying for lease in self._leases.values() if lease.relaying is not None]
        await asyncio.gather(*relaying, return_exceptions=True)
        with suppress(*AWAY):
            await self._store.do("leave", self.name)
        await self.break_off()
        await self._store.close()

    async def break_off(self) -> None:
        """End all that goes on, wherever it is."""
        self._is_over = True
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_of(self, orders: Sequence[Order], within: float | None = None) -> float:
        """Return the predicted seconds that a request would wait."""
        queue, _, _ = await self._answered(self._snapshot())
        return queue.wait_of_new(orders, self._now(), within)

    async def submit(
        self,
        orders: Sequence[Order],
        within: float | None = None,
        setting: Mapping[str, Any] | None = None,
        claim: tuple[str, str] = NO_CLAIM,
        fps: int | None = None,
    ) -> SharedJob:
        """Take a request, or find the one that came with the same key; raise `Full`, `Unavailable` or `Refused`.

        Where servers take requests at the same time, each is looked at anew until none came between: what is promised
        holds for all.
        claim: digests of the Idempotency-Key and whose it is, and of that with the request.
        fps: of a video, whose client asks for it later.
        """
        self.dispatcher.require_open()
        name, first, (key, _) = secrets.token_hex(16), orders[0], claim
        spec = self._specify(orders, setting, claim, fps)
        negative = first.call.get("negative_prompt")
        secret = Secret(prompt=first.prompt, negative_prompt=negative, sources=len(first.sources))
        sources = await asyncio.gather(*(asyncio.to_thread(png, each) for each in first.sources))
        for _ in range(_AGAIN):
            queue, version, outcome = await self._answered(self._snapshot(key))
            if not outcome:
                entries = queue.add(orders, self._now(), None, within)
                rows = [_row(name, index, spec, entry) for index, entry in enumerate(entries)]
                texts = spec.model_dump_json(), secret.model_dump_json()
                outcome = await self._admit(name, version, key, *texts, len(entries), *sum(rows, ()), *sources)
            if outcome == "taken":
                return self._watch(SharedJob(tuple(orders), setting, name=name, fps=fps, outlives=spec.outlives))
            if outcome != "again":
                return await self._find_job(outcome, spec.fingerprint)
        raise Unavailable("too many requests at the same time")

    @property
    def is_awaited(self) -> bool:
        """True while clients of this server wait for images, wherever these are made."""
        return bool(self._watched) and self.is_connected

    def give_up(self) -> None:
        """Answer the clients that wait, at once: what they can find again, another server makes."""
        self._ends = True  # nothing more is taken
        for job in list(self._watched):
            self.cancel(job)
            job.end_at_once()

    def cancel(self, job: Job) -> None:
        """Let a client go; what nobody waits for and nobody can find is let go too, wherever it is made."""
        if not isinstance(job, SharedJob):
            raise TypeError("a request of another queue")
        self._watched.discard(job)
        job.news_of_it.put_nowait({"kind": "left"})
        if not job.outlives:
            self._let_go(job.name)

    async def figures(self) -> tuple[int, float]:
        """Return images and predicted seconds of what is made here, and of this server's share of what waits."""
        queue = self.dispatcher.queue
        images, seconds = len(queue), queue.backlog()
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(POLL):
                entries, _, servers, _ = await self._answered(self._list_entries())
            waiting = [row for entry, (row, begun) in entries.items() if begun is None and entry not in self._leases]
            images += round(len(waiting) / servers)
            seconds += sum(row.predicted for row in waiting) / servers
        return images, seconds

    async def keep_video(self, job: SharedJob, fps: int) -> Video:
        """Return a video that was just taken, or found."""
        return await self.video(f"video_{job.name}")

    async def video(self, name: str, *, whole: bool = False) -> Video:
        """Return a video; 404 for a name that there is not, or no more. whole: with its file."""
        names = ["job", "entries", "made:0", "failed:0", "completed", *(["file:0"] if whole else [])]
        fields = self._store.fields(name.removeprefix("video_"), names)
        text, entry, made, failed, completed, *file = await self._answered(fields)
        spec = None if text is None or not name.startswith("video_") else read(RequestSpec, text)
        if spec is None or spec.fps is None:
            raise no_video()
        (order,) = self._orders_of(spec)
        video = Video(name, Job((order,)), spec.fps, spec.created)
        if made is None and failed is None:
            progress = await self._answered(self._store.progress((entry or b"").decode()))
            if progress is not None:
                video.status, video.progress = "in_progress", min(99, 100 * progress.steps // order.steps)
            return video
        video.completed = float(completed or 0)
        if failed is not None:
            video.fail(_error_of(read(Failure, failed)))
        elif made is not None:
            video.status, video.progress, video.file = "completed", 100, file[0] if whole else None
            video.describe(_made(order, read(Finished, made), b"", spec))
        return video

    async def forget_video(self, name: str) -> None:
        """Forget a video; one that is not finished is let go at the next step, wherever it is made."""
        await self.video(name)
        await self._answered(self._store.do("forget", name.removeprefix("video_")))

    # ---- what the front does

    def _specify(
        self, orders: Sequence[Order], setting: Mapping[str, Any] | None, claim: tuple[str, str], fps: int | None
    ) -> RequestSpec:
        first = orders[0]
        return RequestSpec(
            model=first.model,
            digest=self.dispatcher.facts[first.model].digest,
            seeds=[order.seed for order in orders],
            call={key: value for key, value in first.call.items() if key != "negative_prompt"},
            lora=first.lora,
            frames=first.frames,
            setting=None if setting is None else dict(setting),
            fps=fps,
            created=self._now(),
            outlives=claim != NO_CLAIM or fps is not None,
            fingerprint=claim[1],
        )

    async def _admit(self, name: str, version: str, key: str, *words: str | float | bytes) -> str:
        """Return "taken", "again" where another request came between, or the name of the one with the same key."""
        try:
            return (await self._answered(self._store.do("admit", name, version, key, *words))).decode()
        except Unavailable:
            if not key:  # it may have been taken, and nobody can ask for it
                self._let_go(name)
            raise

    async def _list_entries(self, key: str = "") -> tuple[dict[str, tuple[Row, Progress | None]], str, int, str]:
        """Return what `Store.known` does, of the checkpoints that are here."""
        entries, version, servers, request = await self._store.known(self._now() - LEASE, key)
        digests = {facts.digest for facts in self.dispatcher.facts.values()}
        return {entry: each for entry, each in entries.items() if each[0].digest in digests}, version, servers, request

    async def _snapshot(self, key: str = "") -> tuple[Queue, str, str]:
        """Return the queue of all servers as it is now, its version, and the request of a key ("" for none)."""
        entries, version, servers, request = await self._list_entries(key)
        here, times = self.dispatcher.queue, self.dispatcher.times
        left: dict[int, float] = {}

        def remaining(order: Order, steps: int) -> float:
            return left[order.number] if order.number in left else times.remaining(order, steps)

        queue = Queue(remaining, here.longest, here.patience, here.begun, loading=here.loading, servers=servers)
        queue.delay = here.delay if servers == 1 else queue.delay
        for number, (row, progress) in enumerate(entries.values(), -len(entries)):
            entry = Entry(Order(number, row.model, "", 0, {}), row.arrived, row.due, predicted=row.predicted)
            entry.promised, entry.computed = row.promised, 0.0 if progress is None else progress.computed
            left[number] = row.predicted if progress is None else progress.left
            queue.accept(entry)
        return queue, version, request

    async def _find_job(self, name: str, fingerprint: str) -> SharedJob:
        """Return a request that was taken before."""
        (text,) = await self._answered(self._store.fields(name, ["job"]))
        if text is None:
            raise Unavailable("this Idempotency-Key was just let go; ask again")
        spec = read(RequestSpec, text)
        if spec.fingerprint != fingerprint:
            raise Refused("Idempotency-Key came with another request before: give each request its own")
        orders = self._orders_of(spec)
        return self._watch(SharedJob(orders, spec.setting, name=name, fps=spec.fps, outlives=True))

    def _watch(self, job: SharedJob) -> SharedJob:
        if self._ends:
            job.end_at_once()
        elif job.fps is None:
            self._watched.add(job)
            self._spawn(self._follow(job))
        return job

    async def _follow(self, job: SharedJob) -> None:
        """Tell a client's request what becomes of it, until it is finished or the client has left."""
        kind: object = ""
        while job in self._watched and not self._is_over:
            try:
                if kind != "step":
                    await self._collect(job)
            except AWAY:
                await asyncio.sleep(POLL)
            except Unreadable as error:
                job.error = error
            if job.is_finished:
                break
            news = {}
            with suppress(TimeoutError):
                news = await asyncio.wait_for(job.news_of_it.get(), _RECHECK)
            if (kind := news.get("kind")) == "step":
                with suppress(KeyError, ValueError):
                    job.news.put_nowait({name: int(news[name]) for name in _STEP})
        if job not in self._watched or self._is_over:
            return
        self._watched.remove(job)
        job.news.put_nowait(None)
        if not job.outlives:
            self._let_go(job.name)

    async def _collect(self, job: SharedJob) -> None:
        """Fetch the images of a request that have been finished since."""
        missing = [index for index, order in enumerate(job.orders) if order.number not in job.made]
        names = [f"{kind}:{index}" for index in missing for kind in ("made", "failed", "file")]
        text, *values = await self._store.fields(job.name, ["job", *names])
        if text is None:
            job.error = Unavailable("the queue has lost this request; ask again")
            return
        spec = read(RequestSpec, text)
        for index, made, failed, file in zip(missing, values[::3], values[1::3], values[2::3], strict=True):
            order = job.orders[index]
            if failed is not None:
                job.error = _error_of(read(Failure, failed))
                return
            if made is not None and file is not None:
                finished = read(Finished, made)
                pixels = await asyncio.to_thread(pixels_of, file, finished)
                job.made[order.number] = one = _made(order, finished, pixels, spec)
                job.news.put_nowait({"made": one})

    def _let_go(self, name: str) -> None:
        self._spawn(self._insist(self._store.do, "forget", name))

    # ---- what the worker's side does

    async def _take_what_comes(self) -> None:
        """Take images when there is news of some, or a place for one, and look every second."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), POLL)
        self._wake.clear()
        while await self._take():
            pass

    async def _take(self) -> bool:
        """Take the image that would run next here, were there one queue; tell whether there was one."""
        if not (limits := self._may_take()):
            return False
        answer = await self._store.do("take", self.name, int(1000 * LEASE), *limits)
        if answer is None:
            return False
        entry, job, image = (word.decode() for word in answer[:3])
        if entry in self._leases:  # the lease had lapsed; this has renewed it
            return False
        text, rest = await self._store.fields(job, ["job", "secret"])
        try:
            if answer[4] >= _TRIES:
                raise Unavailable(f"{answer[4]} servers ended while they made this image")
            row, spec, secret = read(Row, answer[3] or b""), read(RequestSpec, text or b""), read(Secret, rest or b"")
            order = await self._order_of(row, spec, secret)
        except (Unavailable, Unreadable, ValueError) as error:
            await self._fail(entry, job, image, error)  # which does nothing where it was let go meanwhile
            return True
        taken = Entry(order, row.arrived - self._offset, row.due - self._offset)
        taken.predicted, taken.promised = row.predicted, row.promised
        self._leases[entry] = lease = _Lease(entry, row, spec, self.dispatcher.accept(taken, spec.setting))
        lease.relaying = self._spawn(self._relay(lease))
        return True

    def _may_take(self) -> list[str | int]:
        """Return the key below which an image is taken, how many of this server's share it has, and digests.

        Below the key an image would run next here; where calls are joined, any is taken up to the share. [] for none.
        """
        dispatcher, queue = self.dispatcher, self.dispatcher.queue
        is_needed = not dispatcher.is_draining or self._watched
        entries = [each for each in queue if not each.is_cancelled]
        if self._ends or not dispatcher.is_ready or not is_needed or len(entries) >= queue.begun:
            return []
        joins = dispatcher.would_join()
        if not joins and not all(each.has_begun for each in entries):
            return []
        busy = {each.order.model for each in entries}
        digests = [facts.digest for name, facts in dispatcher.facts.items() if dispatcher.may_begin(name, busy)]
        below = "+inf"
        if entries and not joins:
            first = min(each.key[0] for each in entries)
            below = f"({first + (1 + AGEING) * self._offset - _NEARER!r}"
        return [below, len(entries) if joins else 0, *digests] if digests else []

    async def _order_of(self, row: Row, spec: RequestSpec, secret: Secret) -> Order:
        """Return an image as this server makes it; ValueError for what its limits do not admit."""
        if row.image >= len(spec.seeds):
            raise Refused("there is no such image in the request")
        facts = next((each for each in self.dispatcher.facts.values() if each.digest == spec.digest), None)
        if facts is None:
            raise Unavailable("the checkpoint was unloaded; ask again")
        _require(spec, facts, self.limits, self.adapters)
        contents = await self._store.fields(row.job, [f"source:{index}" for index in range(secret.sources)])
        sources = [await asyncio.to_thread(api.source_of, content or b"", self.limits) for content in contents]
        negative = {} if secret.negative_prompt is None else {"negative_prompt": secret.negative_prompt}
        number, seed = self.dispatcher.next_number(), spec.seeds[row.image]
        call = {**spec.call, **negative}
        return Order(number, facts.name, secret.prompt, seed, call, spec.lora, tuple(sources), spec.frames)

    async def _relay(self, lease: _Lease) -> None:
        """Tell Redis what becomes of an image that is made here."""
        job, image = lease.job, (lease.entry, lease.row.job, lease.row.image)
        try:
            while (news := await job.news.get()) is not None:
                if "step" in news and self._is_mine(lease) and self.is_connected:
                    with suppress(*AWAY):  # the next one tells more
                        await self._tell_step(lease, news)
            self._wake.set()
            if not self._is_mine(lease):
                return
            if isinstance(job.error, Unavailable):  # the worker ended: whoever is ready makes it
                del self._leases[lease.entry]  # first: it may come back at once
                await self._insist(self._store.do, "give_back", lease.entry, self.name)
            elif job.error is not None:
                await self._insist(self._fail, *image, job.error)
            else:
                (made,) = job.made.values()
                await self._insist(self._finish, lease, made)
        finally:
            if self._is_mine(lease):
                del self._leases[lease.entry]
            self._wake.set()

    def _is_mine(self, lease: _Lease) -> bool:
        return self._leases.get(lease.entry) is lease

    async def _tell_step(self, lease: _Lease, news: Mapping[str, Any]) -> None:
        entry = next((each for each in self.dispatcher.queue if each.owner is lease.job), None)
        if entry is None:
            return
        left = self.dispatcher.times.remaining(entry.order, entry.steps)
        progress = Progress(steps=entry.steps, computed=entry.computed, left=left)
        fields = {**news, "image": lease.row.image}
        words = [word for name in _STEP for word in (name, fields[name])]
        await self._store.do("step", lease.entry, progress.model_dump_json(), lease.row.job, *words)

    async def _finish(self, lease: _Lease, made: Made) -> None:
        picture, fps = made.picture, lease.spec.fps
        value = Finished(
            width=picture.width,
            height=picture.height,
            frames=picture.frames,
            steps_computed=picture.computed,
            queued=made.queued,
            computed=made.computed,
            predicted=made.predicted,
        )
        file = await asyncio.to_thread(png, picture) if fps is None else await asyncio.to_thread(file_of, made, fps)
        await self._end(lease.entry, lease.row.job, lease.row.image, "made", value, file)

    async def _fail(self, entry: str, job: str, image: int | str, error: Exception) -> None:
        is_passing = isinstance(error, (Unavailable, NotLoaded))
        kind = "unavailable" if is_passing else "refused" if isinstance(error, Refused) else "failed"
        message = type(error).__name__ if kind == "failed" else str(error)[:2000]
        value = Failure(kind=kind, message=message, param=getattr(error, "param", None))
        await self._end(entry, job, image, "failed", value)

    async def _end(self, entry: str, job: str, image: int | str, kind: str, value: Value, file: bytes = b"") -> None:
        kept = int(KEPT_SECONDS), KEPT_BYTES
        await self._store.do("finish", entry, job, image, kind, value.model_dump_json(), file, *kept)

    async def _insist(self, what: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        """Do something as soon as Redis answers; a server that ends waits for it as long as its lease."""
        until = math.inf
        while time.monotonic() < until and not self._is_over:
            try:
                await what(*arguments)
                return
            except AWAY:
                until = min(until, time.monotonic() + LEASE) if self._ends else math.inf
                await asyncio.sleep(POLL)

    def _drop(self, entry: str) -> None:
        """Let an image go that is not this server's any more."""
        if lease := self._leases.pop(entry, None):
            self.dispatcher.cancel(lease.job)
            lease.job.news.put_nowait(None)
            self._wake.set()

    # ---- news and leases

    async def _beat(self) -> None:
        """Renew leases, and let go of what was lost; now and then tidy up."""
        await self._renew()
        if time.monotonic() - self._tidied > _TIDY:
            given_up = Failure(kind="unavailable", message="no server made this image in time", param=None)
            await self._store.do("tidy", int(KEPT_SECONDS), KEPT_BYTES, given_up.model_dump_json())
            self._tidied = time.monotonic()
        await asyncio.sleep(LEASE / 4)

    async def _renew(self) -> None:
        for entry in await self._store.do("renew", self.name, LEASE, *self._leases):
            self._drop(entry.decode())

    async def _listen(self) -> None:
        """Hear what other servers do, until Redis does not answer."""
        try:
            last = await self._connect()
            while not self._is_over:
                last, heard = await self._store.news(last, POLL)
                for news in heard:
                    self._hear(news)
        except AWAY as error:  # of questions that have no prompt in them
            reason = first_line(error) or type(error).__name__
            if reason != self._trouble:
                logger.warning("the queue does not answer: %s; it is asked again", reason)
            self._trouble = reason
            raise
        finally:
            self._connected.clear()

    async def _connect(self) -> bytes:
        """Read Redis's clock, and look at all that may have changed; return the place of the last news."""
        self._offset = await self._store.clock() - time.monotonic()
        await self._renew()
        newest, self._trouble = await self._store.newest(), ""
        self._connected.set()
        self._wake.set()
        for job in self._watched:
            job.news_of_it.put_nowait({"kind": "again"})
        return newest

    def _hear(self, news: Mapping[str, str]) -> None:
        """Take note of what a server did."""
        kind, name = news.get("kind"), news.get("job")
        if kind == "new":
            self._wake.set()
            return
        for job in self._watched:
            if job.name == name:
                job.news_of_it.put_nowait(news)
        if kind != "step":
            for entry, lease in [*self._leases.items()]:
                is_over = entry == news.get("entry") or kind in ("gone", "failed")
                if lease.row.job == name and is_over and not lease.job.is_finished:
                    self._drop(entry)

    # ---- Redis

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _orders_of(self, spec: RequestSpec) -> tuple[Order, ...]:
        """Return the images of a request without its prompt."""
        number = self.dispatcher.next_number
        return tuple(
            Order(number(), spec.model, "", seed, spec.call, spec.lora, (), spec.frames) for seed in spec.seeds
        )

    async def _answered(self, asking: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Return what Redis answers; `Unavailable` where it does not, at once where it did not the last time."""
        if not self.is_connected:
            asking.close()
            raise Unavailable("the queue does not answer")
        try:
            return await asking
        except OutOfMemoryError:
            raise Unavailable("the queue has no memory left") from None
        except AWAY as error:
            logger.debug("the queue: %s", type(error).__name__)
            raise Unavailable("the queue does not answer") from None

    async def _repeat(self, what: Callable[[], Awaitable[None]]) -> None:
        """Do something again and again; what goes wrong is tried again after a second."""
        while not self._is_over:
            try:
                await what()
            except Exception as error:
                if not isinstance(error, AWAY):
                    logger.error("the shared queue: %s", type(error).__name__)
                await asyncio.sleep(POLL)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the shared queue: %s", type(error).__name__)


def _row(job: str, index: int, spec: RequestSpec, entry: Entry) -> tuple[str, str]:
    """Return the place in the order of an image that was promised, and what everybody may know of it."""
    seconds = {name: getattr(entry, name) for name in ("arrived", "due", "predicted", "promised")}
    row = Row(job=job, image=index, model=spec.model, digest=spec.digest, **seconds)
    return repr(entry.key[0]), row.model_dump_json()


def _require(spec: RequestSpec, facts: Facts, limits: api.Limits, adapters: Mapping[str, str]) -> None:
    """Raise `Refused` for a request that this server would not have taken."""
    call = spec.call
    for name in ("width", "height", "num_inference_steps"):
        if not isinstance(call.get(name), int):
            raise Refused(f"{name} is missing", name)
    if unknown := sorted({*call} - facts.accepts - {*facts.defaults, "strength"}):
        raise Refused(f"{facts.name} takes no {unknown[0][:80]}", unknown[0][:80])
    width, height, steps = (int(str(call[name])) for name in ("width", "height", "num_inference_steps"))
    if width < 1 or height < 1 or width * height > limits.pixels or not 1 <= steps <= limits.steps:
        raise Refused("the request is beyond this server's limits: give all servers the same")
    if spec.lora is not None and spec.lora[0] not in adapters:
        raise Refused("this server lacks the adapter: give all servers the same", "lora")


def _made(order: Order, finished: Finished, pixels: bytes, spec: RequestSpec) -> Made:
    picture = Picture(finished.width, finished.height, pixels, finished.steps_computed, finished.frames)
    seconds = finished.queued, finished.computed, finished.predicted
    return Made(order, picture, spec.digest, *seconds, spec.setting)


def _error_of(failed: Failure) -> Exception:
    if failed.kind == "refused":
        return Refused(failed.message, failed.param)
    return Unavailable(failed.message) if failed.kind == "unavailable" else Failed(failed.message)
