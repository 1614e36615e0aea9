"""The queue of several servers in a real Redis, with workers that only count: who is taken, by whom, what is kept."""

import asyncio
import math
import shutil
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
from real_redis import RealRedis, needs_redis, real_redis
from served import TIMEOUT

from fluxq.serve import redis_queue
from fluxq.serve.api import Limits
from fluxq.serve.app import explained
from fluxq.serve.dispatcher import Dispatcher, Job, Unavailable
from fluxq.serve.metrics import Metrics
from fluxq.serve.orders import Facts, Failed, NotFinite, NotLoaded, Order, Picture, Quantum, Refused, Source, WorkerDied
from fluxq.serve.queue import Full
from fluxq.serve.redis_queue import NO_CLAIM, RedisQueue
from fluxq.serve.redis_store import require_redis

pytestmark = needs_redis
DEFAULTS = {"width": 8, "height": 8, "num_inference_steps": 3}
PROMPT = "a heliotrope three"


class Counting:
    """A worker whose steps take a second, it says; it goes on while `goes` is set."""

    def __init__(self, digest: str = "d") -> None:
        accepts = frozenset({*DEFAULTS, "negative_prompt"})
        self.facts = Facts("tiny", digest, accepts, DEFAULTS, 8, 1, edits="image")
        self.goes, self.steps, self.began = asyncio.Event(), dict[int, int](), list[Order]()
        self.goes.set()
        self.error: Exception | None = None
        self.more_frames = 0  # than were asked for: pipelines round them

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def pause(self) -> None:
        self.is_pausing = True

    def kill(self) -> None: ...

    async def ask(self, method: str, *arguments: Any) -> Any:
        if method == "drop":
            self.steps.pop(arguments[0], None)
        return {"load": self.facts, "memory": {"tiny": 1}, "prove_joined": math.inf}.get(method)

    async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
        self.is_pausing = False
        for order in orders:
            async for quantum in self._quanta(order):
                yield quantum
                if self.is_pausing:
                    return

    async def _quanta(self, order: Order) -> AsyncGenerator[Quantum, None]:
        if order.number not in self.steps:
            self.began.append(order)
        done = self.steps.setdefault(order.number, 0)
        while done <= order.steps:
            await self.goes.wait()
            await asyncio.sleep(0.001)
            if isinstance(self.error, WorkerDied):
                raise self.error
            if self.error is not None:
                yield Quantum(order.number, done, 0.0, error=self.error)
                return
            done = self.steps[order.number] = done + 1
            yield Quantum(
                order.number,
                min(done, order.steps),
                1.0,
                picture=_picture(order, self.more_frames) if done > order.steps else None,
            )


def _picture(order: Order, more_frames: int = 0) -> Picture:
    frames = order.frames + more_frames
    return Picture(8, 8, bytes([order.seed % 256]) * (3 * 64 * frames), order.steps, frames)


@pytest.fixture(scope="module")
def redis(tmp_path_factory) -> Iterator[RealRedis]:
    yield from real_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers look often: what they look for once a second is waited for nowhere else."""
    monkeypatch.setattr(redis_queue, "POLL", 0.05)


@pytest.fixture
def store(redis: RealRedis) -> RealRedis:
    redis.client.flushall()
    return redis


@asynccontextmanager
async def servers(store: RealRedis, count: int = 2, **limits: Any) -> AsyncIterator[list[RedisQueue]]:
    """Servers that share the queue."""
    started = [await server(store, **limits) for _ in range(count)]
    try:
        yield started
    finally:
        for each in started:
            hands(each).goes.set()
            await each.stop()
            await each.dispatcher.stop()


async def server(store: RealRedis, **limits: Any) -> RedisQueue:
    limits = {"longest": 64, "patience": 1000.0} | limits
    dispatcher = Dispatcher(Counting(), ["tiny"], Metrics(), **limits)
    queue = RedisQueue(store.url, dispatcher, Limits(), {})
    await dispatcher.start()
    await queue.start()
    return queue


async def killed(server: RedisQueue) -> None:
    """End a server as SIGKILL does: it tells nobody."""
    await server.break_off()
    assert server.dispatcher._loop is not None
    server.dispatcher._loop.cancel()


def hands(server: RedisQueue) -> Counting:
    return server.dispatcher.hands  # pyright: ignore


def orders(
    server: RedisQueue, steps: int = 3, seeds: tuple[int, ...] = (1,), width: int = 8, **more: Any
) -> list[Order]:
    call = DEFAULTS | {"num_inference_steps": steps, "width": width, "negative_prompt": f"no {PROMPT}"}
    number = server.dispatcher.next_number
    return [Order(number(), "tiny", PROMPT, seed, call, **more) for seed in seeds]


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not holds():
            await asyncio.sleep(0.005)


def test_no_more_is_admitted_by_all_than_by_one_queue(store: RealRedis) -> None:
    async def test() -> None:
        async with servers(store, 2, patience=30.5) as two:
            for each in two:
                hands(each).goes.clear()
            asked = [two[at % 2].submit(orders(two[at % 2], 9, (at,))) for at in range(20)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            taken = [each for each in answers if isinstance(each, Job)]
            refused = [each for each in answers if isinstance(each, Full)]
            assert (len(taken), len(refused)) == (8, 12)  # two servers: waits of 0, 0, 10, 10, 20, 20, 30, 30 s
            assert {each.retry_after for each in refused} == {10}
            assert await two[0].wait_of(orders(two[0], 9)) == pytest.approx(40)
            for each in two:
                hands(each).goes.set()
            made = [(await each.images())[0] for each in taken]
            assert [each.picture.pixels[0] for each in made] == [each.orders[0].seed for each in taken]
            assert len(store.finished()) == len({*store.finished()}) == 8
            assert min(len(hands(each).began) for each in two) >= 2 + 2  # two of the warm-up

    asyncio.run(test())


def test_the_earliest_due_of_all_runs_next_wherever_it_was_taken(store: RealRedis) -> None:
    async def test() -> None:
        async with servers(store, 1) as (maker,), servers(store, 1) as (front,):
            front.dispatcher.is_ready = False  # it makes none
            long, waiting = [await front.submit(orders(front, 60, (seed,))) for seed in (1, 2)]
            await until(lambda: any(entry.steps > 2 for entry in maker.dispatcher.queue))
            short = await front.submit(orders(front, 2, (3,)))
            ended: list[int] = []
            news = [asyncio.create_task(noted(each, ended)) for each in (waiting, long, short)]
            await asyncio.gather(*news)
            assert ended == [3, 1, 2]
            assert [order.seed for order in hands(maker).began[2:]] == [1, 3, 2]

    async def noted(job: Any, ended: list[int]) -> None:
        (made,) = await job.images()
        ended.append(made.order.seed)

    asyncio.run(test())


def test_an_image_of_a_killed_server_is_made_once_by_another(store: RealRedis, monkeypatch) -> None:
    monkeypatch.setattr(redis_queue, "LEASE", 0.2)

    async def test() -> None:
        async with servers(store, 1) as (dead,):
            hands(dead).goes.clear()
            job = await dead.submit(orders(dead, seeds=(1, 2)), claim=("key", "print"))
            await until(lambda: dead._leases)
            (lease,) = dead._leases.values()
            await killed(dead)
            async with servers(store, 1) as (other,):
                again = await other.submit(orders(other, seeds=(1, 2)), claim=("key", "print"))
                assert again.name == job.name
                made = await again.images()
                assert [each.picture.pixels[0] for each in made] == [1, 2]
                assert len(store.finished()) == len({*store.finished()}) == 2
                await dead._finish(lease, made[1])  # it was only slow: what it tells now changes nothing
                (same, _) = await (await other.submit(orders(other, seeds=(1, 2)), claim=("key", "print"))).images()
                assert same.picture.pixels[0] == 1 and len(store.finished()) == 2
                assert store.client.xlen("fluxq:jobs") == store.client.hlen("fluxq:open") == 0

    asyncio.run(test())


def test_a_claim_finds_one_request_and_its_prompt_is_there_only_until_it_is_finished(store: RealRedis) -> None:
    source = Source(8, 8, bytes(range(192)))

    async def test() -> None:
        async with servers(store) as (one, other):
            for each in (one, other):
                hands(each).goes.clear()
            claim = "key", "print"
            asked = [each.submit(orders(each, sources=(source,)), claim=claim) for each in (one, other, one)]
            jobs = await asyncio.gather(*asked)
            assert len({job.name for job in jobs}) == 1 and PROMPT.encode() in store.dumped()
            with pytest.raises(Refused, match="another request"):
                await other.submit(orders(other), claim=("key", "of another"))
            for job in jobs[:2]:
                (one if job is jobs[0] else other).cancel(job)  # it goes on
            for each in (one, other):
                hands(each).goes.set()
            ((made,),) = await asyncio.gather(*(job.images() for job in jobs[2:]))
            assert made.picture.pixels == b"\1" * 192 and len(store.finished()) == 1
            (order,) = [each for server in (one, other) for each in hands(server).began[2:]]
            assert (order.prompt, order.sources) == (PROMPT, (source,))
            assert order.call["negative_prompt"] == f"no {PROMPT}"
            assert b"heliotrope" not in store.dumped() and b"source" not in store.dumped()
            ((same,),) = await asyncio.gather((await other.submit(orders(other), claim=claim)).images())
            assert same.picture == made.picture
            await (await one.submit(orders(one))).images()
            await until(lambda: len(store.client.keys("fluxq:job:*")) == 1)  # nobody can ask for the other again
            assert 0 < store.client.ttl(f"fluxq:job:{jobs[0].name}") <= 3600

    asyncio.run(test())


def test_who_leaves_lets_the_image_go_wherever_it_is_made(store: RealRedis) -> None:
    async def test() -> None:
        async with servers(store, 1) as (maker,), servers(store, 1) as (front,):
            front.dispatcher.is_ready = False
            job = await front.submit(orders(front, 90, (1, 2)))
            await until(lambda: any(entry.steps > 2 for entry in maker.dispatcher.queue))
            hands(maker).goes.clear()
            (entry,) = maker.dispatcher.queue
            front.cancel(job)
            await until(lambda: entry.is_cancelled)
            hands(maker).goes.set()
            await until(lambda: not len(maker.dispatcher.queue))
            assert entry.steps < 90 and len(hands(maker).began) == 3
            assert store.client.hlen("fluxq:open") == store.client.xlen("fluxq:jobs") == 0 and not store.finished()
            assert PROMPT.encode() not in store.dumped()

    asyncio.run(test())


def test_a_worker_that_ends_costs_no_image_unless_the_image_ends_it(store: RealRedis, monkeypatch) -> None:
    monkeypatch.setattr(redis_queue, "LEASE", 600.0)  # what is given back waits for none

    async def test() -> None:
        async with asyncio.timeout(TIMEOUT), servers(store, 1) as (one,):
            do = one._store.do

            async def slow(script: str, *arguments: Any) -> Any:
                answer = await do(script, *arguments)
                await asyncio.sleep(0.1 if script == "give_back" else 0)
                return answer

            monkeypatch.setattr(one._store, "do", slow)
            hands(one).error = WorkerDied("the worker ended")
            job = await one.submit(orders(one))
            with pytest.raises(Unavailable, match="3 servers ended"):
                await job.images()
            assert len(hands(one).began) - 2 <= 3
            job = await one.submit(orders(one, 90))
            await until(lambda: len(hands(one).began) > 5 or one._leases)
            hands(one).error = None
            assert (await job.images())[0].picture.pixels[0] == 1
            hands(one).error = Refused("no such thing", "size")
            with pytest.raises(Refused, match="no such thing") as told:
                await (await one.submit(orders(one))).images()
            assert told.value.param == "size"
            hands(one).error = NotFinite("tiny made values that are not finite")
            with pytest.raises(Failed) as failed:
                await (await one.submit(orders(one))).images()
            assert explained(failed.value)[1]["error"]["code"] == "NotFinite"
            hands(one).error = NotLoaded("tiny cannot be loaded now; the server's log says why")
            claim = "key", "print"
            with pytest.raises(Unavailable, match="cannot be loaded now"):
                await (await one.submit(orders(one), claim=claim)).images()
            hands(one).error = None  # who was told to ask again is not told the same again
            assert len(await (await one.submit(orders(one), claim=claim)).images()) == 1

    asyncio.run(test())


def test_a_second_signal_answers_who_waits_and_lets_the_image_go(store: RealRedis) -> None:
    async def test() -> None:
        async with asyncio.timeout(TIMEOUT), servers(store, 1) as (one,):
            hands(one).goes.clear()
            job = await one.submit(orders(one))
            assert one.is_awaited
            await until(lambda: one._leases)
            one.dispatcher.give_up()
            one.give_up()
            with pytest.raises(Unavailable, match="at once"):
                await job.images()
            hands(one).goes.set()
            await until(lambda: not one._leases)
            await asyncio.sleep(4 * redis_queue.POLL)
            assert not one._leases and not one.is_awaited

    asyncio.run(test())


@pytest.mark.slow
def test_servers_that_join_take_as_many_as_they_join_each_its_share(
    store: RealRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("dispatcher", "times"):
        monkeypatch.setattr(f"fluxq.serve.{room}.JOINED", 8)

    async def test() -> None:
        async with servers(store, 2, joins=True) as two:
            for each in two:
                hands(each).goes.clear()
            two[1].dispatcher.is_ready = False
            jobs = [await two[0].submit(orders(two[0], seeds=(seed,))) for seed in range(10)]
            await until(lambda: len(two[0]._leases) == 5)
            await asyncio.sleep(0.2)
            assert len(two[0]._leases) == 5
            two[1].dispatcher.is_ready = True
            await until(lambda: len(two[1]._leases) == 5)
            jobs += [await two[0].submit(orders(two[0], 4, width=16)) for _ in range(4)]
            await until(lambda: sum(len(each._leases) for each in two) == 12)
            await asyncio.sleep(0.2)
            assert [len(each._leases) for each in two] == [6, 6]  # what is not joined waits for whoever is free first
            for each in two:
                hands(each).goes.set()
            assert [(await job.images())[0].picture.pixels[0] for job in jobs] == [*range(10), 1, 1, 1, 1]
            assert len(store.finished()) == 14

    asyncio.run(test())


def test_a_request_whose_answer_is_lost_is_let_go_unless_it_can_be_found(store: RealRedis, monkeypatch) -> None:
    async def test() -> None:
        async with servers(store, 1) as (one,):
            hands(one).goes.clear()
            do = one._store.do

            async def lost(script: str, *arguments: Any) -> Any:
                answer = await do(script, *arguments)
                if script == "admit":
                    raise TimeoutError
                return answer

            monkeypatch.setattr(one._store, "do", lost)
            for claim in (NO_CLAIM, ("key", "print")):
                with pytest.raises(Unavailable, match="does not answer"):
                    await one.submit(orders(one), claim=claim)
            await until(lambda: len(store.client.keys("fluxq:job:*")) == 1)
            monkeypatch.setattr(one._store, "do", do)
            hands(one).goes.set()
            assert len(await (await one.submit(orders(one), claim=("key", "print"))).images()) == 1
            assert len(store.finished()) == 1 and store.client.hlen("fluxq:open") == 0

    asyncio.run(test())


def test_results_are_kept_within_a_bound_of_bytes(store: RealRedis, monkeypatch) -> None:
    monkeypatch.setattr(redis_queue, "KEPT_BYTES", 200)

    async def test() -> None:
        async with servers(store, 1) as (one,):
            for at in range(5):
                await (await one.submit(orders(one), claim=(f"key {at}", ""))).images()
            total = int(store.client.get("fluxq:total"))
            assert 0 < total <= 200 and total == sum(map(int, store.client.hvals("fluxq:bytes")))
            assert store.client.exists("fluxq:key:key 4") and not store.client.exists("fluxq:key:key 0")
            assert len(store.client.keys("fluxq:job:*")) == len(store.client.keys("fluxq:key:*")) < 5

    asyncio.run(test())


@pytest.mark.parametrize(("field", "text"), [("job", "{}"), ("job", '{"model": 1}'), ("secret", "x"), ("row", "[]")])
def test_what_no_server_wrote_is_not_made(store: RealRedis, field: str, text: str) -> None:
    async def test() -> None:
        async with servers(store, 1) as (one,):
            one.dispatcher.is_ready = False
            job = await one.submit(orders(one), claim=("key", ""))
            if field == "row":
                store.client.hset("fluxq:open", store.client.hkeys("fluxq:open")[0], text)
            else:
                store.client.hset(f"fluxq:job:{job.name}", field, text)
            one.dispatcher.is_ready = True
            await until(lambda: not store.client.hlen("fluxq:open"))
            assert len(hands(one).began) == 2 and store.client.xlen("fluxq:jobs") == 0
            with pytest.raises(RuntimeError, match=r"Unreadable|cannot be"):
                await job.images()
            assert (await (await one.submit(orders(one))).images())[0].picture.pixels[0] == 1

    asyncio.run(test())


def test_entries_and_bytes_of_others_take_nobodys_place(store: RealRedis) -> None:
    async def test() -> None:
        async with servers(store, 1) as (one,):
            await (await one.submit(orders(one))).images()
            for each in range(3):
                store.client.xadd("fluxq:jobs", {"x": each})
            store.client.xadd("fluxq:news", {b"\xff": b"\xff"})
            async with asyncio.timeout(20):
                assert (await (await one.submit(orders(one))).images())[0].picture.pixels[0] == 1
            assert store.client.xlen("fluxq:jobs") == 0

    asyncio.run(test())


@pytest.mark.parametrize("what", ["request", "image"])
def test_what_redis_has_lost_leaves_nothing_in_the_queue(store: RealRedis, what: str) -> None:
    async def test() -> None:
        async with servers(store, 1) as (one,):
            one.dispatcher.is_ready = False
            job = await one.submit(orders(one, seeds=(1, 2)), claim=("key", ""))
            store.client.delete(f"fluxq:job:{job.name}" if what == "request" else "fluxq:open")
            one.dispatcher.is_ready = True
            await until(lambda: not store.client.zcard("fluxq:order") + store.client.hlen("fluxq:open"))
            assert store.client.xlen("fluxq:jobs") == 0 and len(hands(one).began) == 2

    asyncio.run(test())


def test_a_video_is_known_to_every_server(store: RealRedis) -> None:
    async def test() -> None:
        async with servers(store, 1) as (maker,), servers(store, 1) as (front,):
            hands(maker).goes.clear()
            hands(maker).more_frames = 1
            front.dispatcher.is_ready = False
            asked = await front.keep_video(await front.submit(orders(front, frames=2), fps=8), 8)
            assert asked.status == "queued" and asked.told()["num_frames"] == 2
            hands(maker).goes.set()
            await until(lambda: store.finished())
            video = await maker.video(asked.name, whole=True)
            assert video.told()["status"] == "completed" and video.told()["steps_computed"] == 3
            assert video.told()["num_frames"] == 3 and video.told()["seconds"] == "0.375"
            assert video.file is not None and video.file[8:12] == b"WEBP"
            await maker.forget_video(asked.name)
            for each in (maker, front):
                with pytest.raises(Exception, match="no video of that id"):
                    await each.video(asked.name)

    asyncio.run(test())


def test_a_redis_that_takes_no_changes_is_named_while_a_server_waits_for_it(store: RealRedis, caplog) -> None:
    async def test() -> None:
        store.client.replicaof("127.0.0.1", 1)
        try:
            starting = asyncio.create_task(server(store))
            await until(lambda: caplog.text)
            await asyncio.sleep(4 * redis_queue.POLL)
            assert caplog.text.count("You can't write against a read only replica") == 1
        finally:
            store.client.replicaof("NO", "ONE")
        one = await starting
        await one.stop()
        await one.dispatcher.stop()

    asyncio.run(asyncio.wait_for(test(), TIMEOUT))


@pytest.mark.slow
def test_a_redis_that_goes_away_for_a_while_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(redis_queue, "LEASE", 600.0)  # whatever else the machine does

    async def test(store: RealRedis) -> None:
        async with servers(store) as (one, other):
            jobs = [await each.submit(orders(each, 90, (seed,))) for seed in (1, 2) for each in (one, other)]
            await until(lambda: one._leases and other._leases)
            for each in (one, other):
                hands(each).goes.clear()
            await asyncio.to_thread(store.stop)
            await until(lambda: not one.is_connected and not other.is_connected)
            with pytest.raises(Unavailable, match="does not answer"):
                await one.submit(orders(one))
            assert (await one.figures())[0] >= 0
            await asyncio.to_thread(store.start)
            for each in (one, other):
                hands(each).goes.set()
            made = [(await job.images())[0] for job in jobs]
            assert [each.picture.pixels[0] for each in made] == [1, 1, 2, 2] and one.is_connected
            assert len(store.finished()) == len({*store.finished()}) == 4
            assert sum(len(hands(each).began) - 2 for each in (one, other)) == 4

    for store in real_redis(tmp_path):
        asyncio.run(test(store))


def test_a_redis_with_a_password_is_asked_with_it(tmp_path: Path) -> None:
    async def test(store: RealRedis) -> None:
        async with servers(store, 1) as (one,):
            assert (await (await one.submit(orders(one))).images())[0].picture.pixels[0] == 1

    for store in real_redis(tmp_path, "geheim"):
        require_redis(store.url)
        asyncio.run(test(store))
        for given in ("", "falsch"):
            with pytest.raises(ValueError, match=r"127.0.0.1:\d+ refuses \(.*; write redis://:PASSWORD@HOST") as said:
                require_redis(store.url.replace("geheim", given))
            assert "geheim" not in str(said.value) and "falsch" not in str(said.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
def test_a_certificate_that_nobody_signed_has_to_be_named(tmp_path: Path) -> None:
    both = tmp_path / "redis.pem"
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    subprocess.run(["openssl", "req", "-x509", *words], check=True, capture_output=True)
    both.write_bytes((tmp_path / "key").read_bytes() + (tmp_path / "certificate").read_bytes())
    for store in real_redis(tmp_path, "", both):
        require_redis(store.url)
        with pytest.raises(OSError, match=r"self-signed certificate.*\?ssl_ca_certs=FILE"):
            require_redis(store.url.partition("?")[0])


def test_a_full_redis_takes_no_request_and_loses_none(store: RealRedis, monkeypatch) -> None:
    monkeypatch.setattr(redis_queue, "LEASE", 1.0)

    async def test() -> None:
        async with servers(store, 1) as (one,):
            hands(one).goes.clear()
            jobs = [
                await one.submit(orders(one, seeds=(1, 2)), claim=("key", "print")),
                await one.submit(orders(one)),
            ]
            await until(lambda: one._leases)
            store.client.config_set("maxmemory", 1)
            with pytest.raises(Unavailable, match="no memory left"):
                await one.submit(orders(one))
            async with servers(store, 1) as (other,):  # comes up, and takes its share
                hands(one).goes.set()
                made = [each.picture.pixels[0] for job in jobs for each in await job.images()]
                again = await (await other.submit(orders(other, seeds=(1, 2)), claim=("key", "print"))).images()
                assert made == [1, 2, 1] and [each.picture.pixels[0] for each in again] == [1, 2]
                assert one.is_connected and other.is_connected and len(store.finished()) == 3
            store.client.config_set("maxmemory", 0)
            assert (await (await one.submit(orders(one))).images())[0].picture.pixels[0] == 1

    try:
        asyncio.run(test())
    finally:
        store.client.config_set("maxmemory", 0)
