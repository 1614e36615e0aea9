"""`--queue redis://…`: one queue for several servers, which keeps what was accepted when one of them ends.

Each server takes requests and makes images. An image is an entry of a stream with a consumer group. It is pending from
the start: for `waiting`, which is nobody, then for the server that makes it, whose lease it renews. A lease that lapsed
is anybody's.

    jobs      stream of images; the group's pending list says whose each is, since when, and how often it was taken
    order     entry -> key of the queue: the least runs next, on whichever server
    open      entry -> what everybody may know of an image that is not finished; progress: of those that have begun
    job:ID    request, its finished images, and its prompt until the last of them is finished
    key:HASH  Idempotency-Key -> ID
    version   of what was admitted: a request is taken only by what was true when it was looked at
    kept      finished requests -> when; bytes, total: of their images
    servers   server -> when it was last heard of; news: stream of steps and ends

A change of more than one of these is a script, so that it happens whole or not at all. Values are JSON, images PNG,
videos WebP; what is read back is validated. Clocks are Redis's own.

Source of the commands: redis.io/docs/latest/develop/data-types/streams.
"""

from __future__ import annotations

import asyncio
import io
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from fluxq.base.console import first_line, logger
from fluxq.serve import api
from fluxq.serve.dispatcher import Dispatcher, Job, Made, Unavailable
from fluxq.serve.orders import Facts, Order, Picture, Refused, Source, WorkerDied
from fluxq.serve.queue import AGEING, Entry, Queue
from fluxq.serve.videos import KEPT_BYTES, KEPT_SECONDS, Video, file_of

LEASE = 15.0  # seconds after which a server that is not heard of has lost its images
_TRIES = 3  # servers that may end while they make one image
_AGAIN = 100  # times that a request is looked at anew because another one was taken meanwhile
_POLL = 1.0  # seconds after which the queue is looked at without news
_NEARER = 1e-3  # by which an image comes before those that were begun, if it does
_RECHECK = 5.0  # the same of a request's images
_TIDY = 60.0  # seconds after which what is too old is looked for
_ANSWER = 5.0  # seconds that Redis may take
_FIRST = 6, 2  # version of Redis that has all commands
_AWAY = (RedisError, OSError, TimeoutError)
_P = "fluxq:"

_LUA = """
local P, clock = 'fluxq:', redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local function tell(...) redis.call('XADD', P..'news', 'MAXLEN', '~', 10000, '*', ...) end
local function pending(...) return redis.pcall('XPENDING', P..'jobs', 'fluxq', ...) end
local function entries(job)
  local found = {}
  for each in string.gmatch(redis.call('HGET', P..'job:'..job, 'entries') or '', '%S+') do found[#found + 1] = each end
  return found
end
local function known(entry)  -- what everybody may know of an image, {} for what no server wrote
  local is_read, row = pcall(cjson.decode, redis.call('HGET', P..'open', entry) or '')
  return is_read and type(row) == 'table' and row or {}
end
local function close(entry)  -- an image that is not to be made any more; 1 where it was
  if redis.call('HDEL', P..'open', entry) == 0 then return 0 end
  redis.call('HDEL', P..'progress', entry)
  redis.call('ZREM', P..'order', entry)
  redis.call('XACK', P..'jobs', 'fluxq', entry)
  redis.call('XDEL', P..'jobs', entry)
  return 1
end
local function forget(job)
  for _, entry in ipairs(entries(job)) do close(entry) end
  local key, bytes = redis.call('HGET', P..'job:'..job, 'key'), redis.call('HGET', P..'bytes', job)
  if key then redis.call('DEL', P..'key:'..key) end
  if bytes then redis.call('DECRBY', P..'total', bytes) end
  redis.call('HDEL', P..'bytes', job)
  redis.call('ZREM', P..'kept', job)
  redis.call('DEL', P..'job:'..job)
  tell('kind', 'gone', 'job', job)
end
local function finish(entry, job, image, kind, value, file, seconds, most)
  if close(entry) == 0 then return 0 end  -- finished before, or nobody wants it
  local name = P..'job:'..job
  if redis.call('EXISTS', name) == 0 then return 0 end
  redis.call('HSET', name, kind..':'..image, value)
  if kind == 'made' then redis.call('HSET', name, 'file:'..image, file) end
  local left, all = redis.call('HINCRBY', name, 'left', -1), entries(job)
  if kind == 'failed' then
    left = 0
    for _, other in ipairs(all) do close(other) end
  end
  if left == 0 then
    redis.call('HDEL', name, 'secret')
    local bytes, source = 0, 0
    while redis.call('HDEL', name, 'source:'..source) == 1 do source = source + 1 end
    for i = 0, #all - 1 do bytes = bytes + redis.call('HSTRLEN', name, 'file:'..i) end
    local key = redis.call('HGET', name, 'key')
    redis.call('HSET', name, 'completed', now)
    redis.call('EXPIRE', name, seconds)
    if key then redis.call('EXPIRE', P..'key:'..key, seconds) end
    redis.call('ZADD', P..'kept', now, job)
    redis.call('HSET', P..'bytes', job, bytes)
    local total = redis.call('INCRBY', P..'total', bytes)
    while total > tonumber(most) do
      local oldest = redis.call('ZRANGE', P..'kept', 0, 1)
      if oldest[1] == job then table.remove(oldest, 1) end
      if not oldest[1] then break end
      forget(oldest[1])
      total = tonumber(redis.call('GET', P..'total'))
    end
  end
  tell('kind', kind, 'job', job, 'image', image, 'entry', entry)
  return 1
end
"""
_SCRIPTS = {
    # job, version, key, request, prompt, number of images, (order, what everybody may know) of each, sources…
    "admit": """
local name = P..'job:'..ARGV[1]
if redis.call('EXISTS', name) == 1 then return 'taken' end  -- by the same call, whose answer was lost
if ARGV[3] ~= '' then
  local found = redis.call('GET', P..'key:'..ARGV[3])
  if found and redis.call('EXISTS', P..'job:'..found) == 1 then return found end
end
if (redis.call('GET', P..'version') or '0') ~= ARGV[2] then return 'again' end
redis.call('INCR', P..'version')
redis.pcall('XGROUP', 'CREATE', P..'jobs', 'fluxq', '0', 'MKSTREAM')
local all, count = {}, tonumber(ARGV[6])
for i = 0, count - 1 do
  local entry = redis.call('XADD', P..'jobs', '*', 'job', ARGV[1], 'image', i)
  redis.call('XREADGROUP', 'GROUP', 'fluxq', 'waiting', 'COUNT', 1, 'STREAMS', P..'jobs', '>')
  redis.call('ZADD', P..'order', ARGV[7 + 2 * i], entry)
  redis.call('HSET', P..'open', entry, ARGV[8 + 2 * i])
  all[i + 1] = entry
end
redis.call('HSET', name, 'job', ARGV[4], 'secret', ARGV[5], 'left', count, 'entries', table.concat(all, ' '))
for i = 7 + 2 * count, #ARGV do redis.call('HSET', name, 'source:'..(i - 7 - 2 * count), ARGV[i]) end
if ARGV[3] ~= '' then
  redis.call('HSET', name, 'key', ARGV[3])
  redis.call('SET', P..'key:'..ARGV[3], ARGV[1])
end
tell('kind', 'new', 'job', ARGV[1])
return 'taken'
""",
    # server, lease in ms, key below which an image is taken, digests…; entry, job, image, what is known, times taken
    "take": """
local mine, owners, all = {}, {}, pending('-', '+', 1000000)
if all.err then return false end
for i = 4, #ARGV do mine[ARGV[i]] = true end
for _, each in ipairs(all) do owners[each[1]] = each end
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', P..'order', '-inf', ARGV[3])) do
  local owner, digest = owners[entry], known(entry).digest
  if owner and (owner[2] == 'waiting' or owner[3] > tonumber(ARGV[2])) and (not digest or mine[digest]) then
    local fields = redis.call('XCLAIM', P..'jobs', 'fluxq', ARGV[1], 0, entry)[1][2]
    redis.call('HDEL', P..'progress', entry)
    return {entry, fields[2], fields[4], redis.call('HGET', P..'open', entry), owner[4] - 1}
  end
end
return false
""",
    # server, lease in s, images that it makes…; those that are not its any more
    "renew": """
local lost = {}
for i = 3, #ARGV do
  local owner = pending(ARGV[i], ARGV[i], 1)
  if owner.err or not owner[1] or owner[1][2] ~= ARGV[1] then
    lost[#lost + 1] = ARGV[i]
  else
    redis.call('XCLAIM', P..'jobs', 'fluxq', ARGV[1], 0, ARGV[i], 'JUSTID')
  end
end
redis.call('ZADD', P..'servers', now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', P..'servers', '-inf', '('..(now - ARGV[2]))
return lost
""",
    # entry, what it has come to, job, image, step, steps, position, predicted ms
    "step": """
if redis.call('HEXISTS', P..'open', ARGV[1]) == 0 then return 0 end
redis.call('HSET', P..'progress', ARGV[1], ARGV[2])
tell('kind', 'step', 'job', ARGV[3], 'image', ARGV[4], 'step', ARGV[5], 'steps', ARGV[6], 'position', ARGV[7],
     'predicted_ms', ARGV[8])
return 1
""",
    # entry, job, image, made or failed, value, file, seconds and bytes that are kept; 1 where it was not finished yet
    "finish": "return finish(unpack(ARGV))",
    # entry, server: an image that it took and cannot make now
    "give_back": """
local owner = pending(ARGV[1], ARGV[1], 1)
if owner.err or not owner[1] or owner[1][2] ~= ARGV[2] then return 0 end
redis.call('XCLAIM', P..'jobs', 'fluxq', 'waiting', 0, ARGV[1], 'JUSTID')
redis.call('HDEL', P..'progress', ARGV[1])
tell('kind', 'new')
return 1
""",
    "forget": "forget(ARGV[1])",
    # seconds and bytes that are kept, why an image is given up: what is too old, and servers that are no more
    "tidy": """
for _, job in ipairs(redis.call('ZRANGEBYSCORE', P..'kept', '-inf', '('..(now - ARGV[1]))) do forget(job) end
local all = pending('IDLE', math.floor(1000 * ARGV[1]), '-', '+', 1000, 'waiting')
if all.err then return 0 end
for _, each in ipairs(all) do
  local row = known(each[1])
  if row.job then finish(each[1], row.job, row.image, 'failed', ARGV[3], '', ARGV[1], ARGV[2]) end
end
for _, each in ipairs(redis.call('XINFO', 'CONSUMERS', P..'jobs', 'fluxq')) do
  local known = {}
  for i = 1, #each, 2 do known[each[i]] = each[i + 1] end
  if known.name ~= 'waiting' and known.pending == 0 and known.idle > 1000 * ARGV[1] then
    redis.call('XGROUP', 'DELCONSUMER', P..'jobs', 'fluxq', known.name)
  end
end
return 1
""",
    # server
    "leave": """
redis.call('ZREM', P..'servers', ARGV[1])
local owner = pending('-', '+', 1, ARGV[1])
if not owner.err and not owner[1] then redis.call('XGROUP', 'DELCONSUMER', P..'jobs', 'fluxq', ARGV[1]) end
""",
}

_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
_Side = Annotated[int, Field(ge=1, le=1 << 16)]
_Text = Annotated[str, Field(max_length=200)]


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class _Request(_Value):
    """What is known of a request besides its prompt. call: the pipeline's arguments. fps: of a video."""

    model: _Text
    digest: _Text
    seeds: list[Annotated[int, Field(ge=0, le=api.MAX_SEED)]] = Field(min_length=1, max_length=1000)
    call: dict[str, JsonValue]
    lora: tuple[_Text, Annotated[float, Field(ge=-10, le=10)]] | None
    frames: Annotated[int, Field(ge=1, le=10_000)]
    setting: dict[str, JsonValue] | None
    fps: Annotated[int, Field(ge=1, le=120)] | None
    created: _Seconds
    outlives: bool
    fingerprint: _Text


class _Secret(_Value):
    """What is deleted when a request is finished."""

    prompt: str = Field(min_length=1, max_length=api.LONGEST)
    negative_prompt: str | None = Field(max_length=api.LONGEST)
    sources: Annotated[int, Field(ge=0, le=100)]


class _Row(_Value):
    """What every server may know of an image that is not finished; seconds as those of Entry, of Redis's clock."""

    job: _Text
    image: _Count
    model: _Text
    digest: _Text
    arrived: _Seconds
    due: _Seconds
    predicted: _Seconds
    promised: _Seconds


class _Progress(_Value):
    """What an image has come to. left: predicted seconds until it is finished."""

    steps: _Count
    computed: _Seconds
    left: _Seconds


class _Finished(_Value):
    """How an image was made; its pixels are in a file of its own."""

    width: _Side
    height: _Side
    frames: _Count | None
    steps_computed: _Count
    queued: _Seconds
    computed: _Seconds
    predicted: _Seconds


class _Failed(_Value):
    """Why an image could not be made."""

    kind: Literal["refused", "unavailable", "failed"]
    message: str = Field(max_length=2000)
    param: _Text | None


class _Step(_Value):
    """A step of an image, as news tell of it."""

    image: _Count
    step: _Count
    steps: _Count
    position: _Count
    predicted_ms: _Count


class Failed(RuntimeError):
    """An image that another server could not make."""


class Unreadable(RuntimeError):
    """A value of Redis that no server wrote."""


@dataclass(frozen=True)
class Claim:
    """An Idempotency-Key. name: digest of it and of whose it is. fingerprint: of the request that came with it."""

    name: str
    fingerprint: str


@dataclass(eq=False)
class SharedJob(Job):
    """A request in Redis, as the server sees it whose client waits. outlives: whether it goes on without one."""

    name: str = ""
    fps: int | None = None
    outlives: bool = False
    news_of_it: asyncio.Queue[Mapping[str, Any]] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class _Held:
    """An image that this server makes."""

    entry: str
    row: _Row
    request: _Request
    job: Job
    relaying: asyncio.Task[None] | None = None


def address_of(url: str) -> str:
    """Return where a URL leads, without its password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def require_redis(url: str) -> None:
    """Raise ValueError or OSError, in one sentence, where no Redis answers, or an old one."""
    try:
        client = Redis.from_url(url, socket_timeout=_ANSWER, socket_connect_timeout=_ANSWER)
        where = address_of(url)
    except ValueError:
        raise ValueError("--queue: write redis://HOST:PORT/DB, rediss:// with TLS, or unix:///SOCKET") from None
    try:
        with client:
            version = str(client.info("server")["redis_version"])
    except _AWAY as error:
        reason = first_line(error) or type(error).__name__
        raise OSError(f"--queue: no Redis answers at {where} ({reason}); start one, or give another address") from None
    if tuple(map(int, version.split(".")[:2])) < _FIRST:
        raise ValueError(f"--queue: the Redis at {where} is {version}; {'.'.join(map(str, _FIRST))} or newer is needed")


class RedisQueue:
    """Requests of all servers, in front of a dispatcher that makes this one's share of their images."""

    def __init__(self, url: str, dispatcher: Dispatcher, limits: api.Limits, adapters: Mapping[str, str]) -> None:
        self.dispatcher, self.limits, self.adapters = dispatcher, limits, adapters
        self.name = secrets.token_hex(8)
        self.is_connected = False
        self._redis = AsyncRedis.from_url(
            url, socket_timeout=_ANSWER, socket_connect_timeout=_ANSWER, retry=Retry(NoBackoff(), 1)
        )
        self._scripts = {name: self._redis.register_script(_LUA + script) for name, script in _SCRIPTS.items()}
        self._offset = 0.0  # of Redis's clock, to this process's
        self._held: dict[str, _Held] = {}
        self._watched: set[SharedJob] = set()
        self._wake = asyncio.Event()
        self._ends, self._tidied = False, 0.0
        self._is_over = False  # a task is told so as well as cancelled: the client may swallow a cancellation
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Begin to take images of the queue; the dispatcher is ready."""
        for what in (self._listen, self._take_what_comes, self._beat):
            self._spawn(self._repeat(what))

    async def stop(self) -> None:
        """Finish what was begun, and leave the rest to other servers."""
        self._ends = True
        relaying = [held.relaying for held in self._held.values() if held.relaying is not None]
        await asyncio.gather(*relaying, return_exceptions=True)
        with suppress(*_AWAY):
            await self._call("leave", self.name)
        await self.break_off()
        await self._redis.aclose()

    async def break_off(self) -> None:
        """End all that goes on, wherever it is."""
        self._is_over = True
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_of(self, orders: Sequence[Order], within: float | None = None) -> float:
        """Return the predicted seconds that a request would wait."""
        queue, _, _ = await self._answered(self._snapshot(orders[0]))
        return queue.wait_of_new(orders, self._now(), within)

    async def submit(
        self,
        orders: Sequence[Order],
        within: float | None = None,
        setting: Mapping[str, Any] | None = None,
        claim: Claim | None = None,
        fps: int | None = None,
    ) -> SharedJob:
        """Take a request, or find the one that came with the same claim; raise `Full`, `Unavailable` or `Refused`.

        Where servers take requests at the same time, each is looked at anew until none came between: what is promised
        holds for all.
        fps: of a video, whose client asks for it later.
        """
        self.dispatcher.require_open()
        if not self.is_connected:
            raise Unavailable("the queue does not answer")
        name, first = secrets.token_hex(16), orders[0]
        secret = _Secret(
            prompt=first.prompt, negative_prompt=first.call.get("negative_prompt"), sources=len(first.sources)
        )
        sources = await asyncio.gather(*(asyncio.to_thread(_png, each) for each in first.sources))
        request = _Request(
            model=first.model,
            digest=self.dispatcher.facts[first.model].digest,
            seeds=[order.seed for order in orders],
            call={key: value for key, value in first.call.items() if key != "negative_prompt"},
            lora=first.lora,
            frames=first.frames,
            setting=None if setting is None else dict(setting),
            fps=fps,
            created=self._now(),
            outlives=claim is not None or fps is not None,
            fingerprint="" if claim is None else claim.fingerprint,
        )
        for _ in range(_AGAIN):
            queue, version, found = await self._answered(self._snapshot(first, claim))
            if claim is not None and found:
                return await self._found(found, claim)
            rows = self._promised(queue, name, request, orders, within)
            key = "" if claim is None else claim.name
            words = [name, version, key, request.model_dump_json(), secret.model_dump_json(), len(rows)]
            for score, row in rows:
                words += [repr(score), row.model_dump_json()]
            answer = (await self._answered(self._call("admit", *words, *sources))).decode()
            if answer == "taken":
                return self._watch(SharedJob(tuple(orders), setting, name=name, fps=fps, outlives=request.outlives))
            if answer != "again" and claim is not None:
                return await self._found(answer, claim)
        raise Unavailable("too many requests at the same time")

    def leave(self, job: Job) -> None:
        """Let a client go; what nobody waits for and nobody can find is let go too, wherever it is made."""
        assert isinstance(job, SharedJob)
        self._watched.discard(job)
        job.news_of_it.put_nowait({"kind": "left"})
        if not job.outlives:
            self._spawn(self.forget(job.name))

    async def forget(self, name: str) -> None:
        """Let a request go at the next step, and its images."""
        await self._answered(self._call("forget", name))

    async def figures(self) -> tuple[int, float]:
        """Return images and predicted seconds of what is made here, and of this server's share of what waits."""
        queue = self.dispatcher.queue
        images, seconds = len(queue), queue.backlog()
        if not self.is_connected:
            return images, seconds
        with suppress(*_AWAY):
            rows, _, servers, _ = await self._known()
            waiting = [each for each in rows if each[2] is None and each[0] not in self._held]
            images += round(len(waiting) / servers)
            seconds += sum(row.predicted for _, row, _ in waiting) / servers
        return images, seconds

    async def video(self, name: str, *, whole: bool) -> Video | None:
        """Return a video by its request's name, None where there is none. whole: with its file."""
        fields = ["job", "entries", "made:0", "failed:0", "completed", *(["file:0"] if whole else [])]
        values = await self._answered(self._redis.hmget(f"{_P}job:{name}", fields))
        if values[0] is None or (request := _read(_Request, values[0])).fps is None:
            return None
        (order,) = self._orders_of(request)
        video = Video(f"video_{name}", Job((order,)), request.fps, request.created)
        if values[2] is None and values[3] is None:
            progress = await self._answered(self._redis.hget(f"{_P}progress", values[1]))
            if progress is not None:
                steps = _read(_Progress, progress).steps
                video.status, video.progress = "in_progress", min(99, 100 * steps // order.steps)
            return video
        video.completed = float(values[4])
        if values[2] is None:
            video.fail(_error_of(_read(_Failed, values[3])))
            return video
        finished = _read(_Finished, values[2])
        video.status, video.progress, video.file = "completed", 100, values[5] if whole else None
        video.about = api.told(_made(order, finished, b"", request))
        return video

    # ---- what the front does

    def _promised(
        self, queue: Queue, name: str, request: _Request, orders: Sequence[Order], within: float | None
    ) -> list[tuple[float, _Row]]:
        """Return (place in the order, what everybody may know) of each image of a request; `Full` for too many."""
        entries = queue.add(orders, self._now(), None, within)
        rows = []
        for index, entry in enumerate(entries):
            seconds = {key: getattr(entry, key) for key in ("arrived", "due", "predicted", "promised")}
            row = _Row(job=name, image=index, model=request.model, digest=request.digest, **seconds)
            rows.append((entry.key[0], row))
        return rows

    async def _known(
        self, claim: Claim | None = None
    ) -> tuple[list[tuple[str, _Row, _Progress | None]], str, int, str]:
        """Return images that are not finished, the version, the number of servers, and the request of a claim."""
        async with self._redis.pipeline(transaction=True) as asked:
            asked.get(f"{_P}version").hgetall(f"{_P}open").hgetall(f"{_P}progress")
            asked.zcount(f"{_P}servers", self._now() - LEASE, math.inf)
            asked.get(f"{_P}key:{'' if claim is None else claim.name}")
            version, rows, progress, servers, found = await asked.execute()
        digests = {facts.digest for facts in self.dispatcher.facts.values()}
        known = []
        for entry, text in rows.items():
            with suppress(Unreadable):  # whoever takes it lets it go
                if (row := _read(_Row, text)).digest in digests:
                    begun = progress.get(entry)
                    known.append((entry.decode(), row, None if begun is None else _read(_Progress, begun)))
        return known, (version or b"0").decode(), max(1, servers), (found or b"").decode()

    async def _snapshot(self, order: Order, claim: Claim | None = None) -> tuple[Queue, str, str]:
        """Return the queue of all servers as it is now, its version, and the request of a claim ("" for none)."""
        rows, version, servers, found = await self._known(claim)
        here, times = self.dispatcher.queue, self.dispatcher.times
        left: dict[int, float] = {}

        def remaining(order: Order, steps: int) -> float:
            return left[order.number] if order.number in left else times.remaining(order, steps)

        queue = Queue(remaining, here.longest, here.patience, here.begun, loading=here.loading, servers=servers)
        queue.delay = here.delay if servers == 1 else queue.delay
        for number, (_, row, progress) in enumerate(rows, -len(rows)):
            entry = Entry(Order(number, row.model, "", 0, {}), row.arrived, row.due, predicted=row.predicted)
            entry.promised, entry.computed = row.promised, 0.0 if progress is None else progress.computed
            left[number] = row.predicted if progress is None else progress.left
            queue.accept(entry)
        return queue, version, found

    async def _found(self, name: str, claim: Claim) -> SharedJob:
        """Return a request that was taken before."""
        text = await self._answered(self._redis.hget(f"{_P}job:{name}", "job"))
        if text is None:
            raise Unavailable("this Idempotency-Key was just let go; ask again")
        request = _read(_Request, text)
        if request.fingerprint != claim.fingerprint:
            raise Refused("Idempotency-Key came with another request before: give each request its own")
        orders = self._orders_of(request)
        return self._watch(SharedJob(orders, request.setting, name=name, fps=request.fps, outlives=True))

    def _watch(self, job: SharedJob) -> SharedJob:
        if job.fps is None:
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
            except _AWAY:
                await asyncio.sleep(_POLL)
            except Unreadable as error:
                job.error = error
            if job.is_finished:
                break
            news = {}
            with suppress(TimeoutError):
                news = await asyncio.wait_for(job.news_of_it.get(), _RECHECK)
            if (kind := news.get("kind")) == "step":
                with suppress(KeyError, ValueError):
                    job.news.put_nowait(_step_of(news))
        if job not in self._watched or self._is_over:
            return
        self._watched.remove(job)
        job.news.put_nowait(None)
        if not job.outlives:
            with suppress(Unavailable):
                await self.forget(job.name)

    async def _collect(self, job: SharedJob) -> None:
        """Fetch the images of a request that have been finished since."""
        missing = [index for index, order in enumerate(job.orders) if order.number not in job.made]
        fields = [f"{kind}:{index}" for index in missing for kind in ("made", "failed", "file")]
        stored, *values = await self._redis.hmget(f"{_P}job:{job.name}", ["job", *fields])
        if stored is None:
            job.error = Unavailable("the queue has lost this request; ask again")
            return
        request = _read(_Request, stored)
        for index in missing:
            made, failed, file, *values = values
            order = job.orders[index]
            if failed is not None:
                job.error = _error_of(_read(_Failed, failed))
                return
            if made is not None and file is not None:
                finished = _read(_Finished, made)
                pixels = await asyncio.to_thread(_pixels, file, finished)
                job.made[order.number] = one = _made(order, finished, pixels, request)
                job.news.put_nowait({"made": one})

    # ---- what the worker's side does

    async def _take_what_comes(self) -> None:
        """Take images when there is news of some, or a place for one, and look every second."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), _POLL)
        self._wake.clear()
        while await self._take():
            pass

    async def _take(self) -> bool:
        """Take the image that would run next here, were there one queue; tell whether there was one."""
        if not (limits := self._may_take()):
            return False
        answer = await self._call("take", self.name, int(1000 * LEASE), *limits)
        if answer is None:
            return False
        entry, job, image = (word.decode() for word in answer[:3])
        if entry in self._held:
            return False
        values = await self._redis.hmget(f"{_P}job:{job}", ["job", "secret"])
        if None in values:  # let go meanwhile
            return True
        try:
            row, taken = _read(_Row, answer[3]), answer[4]
            if taken >= _TRIES:
                raise Unavailable(f"{taken} servers ended while they made this image")
            request, secret = _read(_Request, values[0]), _read(_Secret, values[1])
            order = await self._order_of(row, request, secret)
        except (Unavailable, Unreadable, ValueError) as error:
            await self._failed(entry, job, image, error)
            return True
        clock = {"arrived": row.arrived - self._offset, "due": row.due - self._offset}
        making = self.dispatcher.accept(order, request.setting, predicted=row.predicted, promised=row.promised, **clock)
        self._held[entry] = held = _Held(entry, row, request, making)
        held.relaying = self._spawn(self._relay(held))
        return True

    def _may_take(self) -> list[str]:
        """Return the key below which an image would run next here, and the digests that it may be of; [] for none."""
        dispatcher, queue = self.dispatcher, self.dispatcher.queue
        is_needed = not dispatcher.is_draining or self._watched
        held = [each for each in queue if not each.is_cancelled]
        if self._ends or not dispatcher.is_ready or not is_needed or len(held) >= queue.begun:
            return []
        if not all(each.has_begun for each in held):
            return []
        busy = {each.order.model for each in held}
        digests = [facts.digest for name, facts in dispatcher.facts.items() if dispatcher.may_begin(name, busy)]
        first = min((each.key[0] for each in held), default=math.inf)
        below = f"({first + (1 + AGEING) * self._offset - _NEARER!r}" if held else "+inf"
        return [below, *digests] if digests else []

    async def _order_of(self, row: _Row, request: _Request, secret: _Secret) -> Order:
        """Return an image as this server makes it; ValueError for what its limits do not admit."""
        if row.image >= len(request.seeds):
            raise Refused("there is no such image in the request")
        facts = next((each for each in self.dispatcher.facts.values() if each.digest == request.digest), None)
        if facts is None:
            raise Unavailable("the checkpoint was unloaded; ask again")
        _require(request, facts, self.limits, self.adapters)
        files = [f"source:{index}" for index in range(secret.sources)]
        contents = await self._redis.hmget(f"{_P}job:{row.job}", files) if files else []
        sources = [await asyncio.to_thread(api.source_of, content or b"", self.limits) for content in contents]
        call = dict(request.call)
        if secret.negative_prompt is not None:
            call["negative_prompt"] = secret.negative_prompt
        number, seed = self.dispatcher.next_number(), request.seeds[row.image]
        return Order(number, facts.name, secret.prompt, seed, call, request.lora, tuple(sources), request.frames)

    async def _relay(self, held: _Held) -> None:
        """Tell Redis what becomes of an image that is made here."""
        job = held.job
        try:
            while (news := await job.news.get()) is not None:
                if "step" in news and self._is_mine(held) and self.is_connected:
                    with suppress(*_AWAY):  # the next one tells more
                        await self._tell_step(held, news)
            self._wake.set()
            if not self._is_mine(held):
                return
            if job.error is not None:
                await self._insist(self._failed, held.entry, held.row.job, held.row.image, job.error)
            else:
                (made,) = job.made.values()
                await self._insist(self._finish, held, made)
        finally:
            if self._is_mine(held):
                del self._held[held.entry]
            self._wake.set()

    def _is_mine(self, held: _Held) -> bool:
        return self._held.get(held.entry) is held

    async def _tell_step(self, held: _Held, news: Mapping[str, Any]) -> None:
        entry = next((each for each in self.dispatcher.queue if each.owner is held.job), None)
        if entry is None:
            return
        left = self.dispatcher.times.remaining(entry.order, entry.steps)
        progress = _Progress(steps=entry.steps, computed=entry.computed, left=left)
        told = [news[name] for name in ("step", "steps", "position", "predicted_ms")]
        await self._call("step", held.entry, progress.model_dump_json(), held.row.job, held.row.image, *told)

    async def _finish(self, held: _Held, made: Made) -> None:
        picture = made.picture
        value = _Finished(
            width=picture.width,
            height=picture.height,
            frames=picture.frames,
            steps_computed=picture.computed,
            queued=made.queued,
            computed=made.computed,
            predicted=made.predicted,
        )
        fps = held.request.fps
        file = await asyncio.to_thread(_png, picture) if fps is None else await asyncio.to_thread(file_of, made, fps)
        await self._end(held.entry, held.row.job, held.row.image, "made", value, file)

    async def _failed(self, entry: str, job: str, image: int | str, error: Exception) -> None:
        """Finish an image that cannot be made; one whose worker ended is another's."""
        if isinstance(error, Refused):
            value = _Failed(kind="refused", message=str(error)[:2000], param=error.param)
        elif entry in self._held and isinstance(error, (Unavailable, WorkerDied)):
            await self._call("give_back", entry, self.name)
            return
        elif isinstance(error, Unavailable):
            value = _Failed(kind="unavailable", message=str(error)[:2000], param=None)
        else:
            value = _Failed(kind="failed", message=type(error).__name__, param=None)
        await self._end(entry, job, image, "failed", value)

    async def _end(self, entry: str, job: str, image: int | str, kind: str, value: _Value, file: bytes = b"") -> None:
        kept = int(KEPT_SECONDS), KEPT_BYTES
        await self._call("finish", entry, job, image, kind, value.model_dump_json(), file, *kept)

    async def _insist(self, what: Any, *arguments: Any) -> None:
        """Do something as soon as Redis answers; a server that ends waits for it as long as its lease."""
        until = math.inf
        while time.monotonic() < until and not self._is_over:
            try:
                await what(*arguments)
                return
            except _AWAY:
                until = min(until, time.monotonic() + LEASE) if self._ends else math.inf
                await asyncio.sleep(_POLL)

    def _drop(self, entry: str) -> None:
        """Let an image go that is not this server's any more."""
        if held := self._held.pop(entry, None):
            self.dispatcher.cancel(held.job)
            held.job.news.put_nowait(None)
            self._wake.set()

    # ---- news and leases

    async def _beat(self) -> None:
        """Renew leases, and let go of what was lost; now and then tidy up."""
        for entry in await self._call("renew", self.name, LEASE, *self._held):
            self._drop(entry.decode())
        if time.monotonic() - self._tidied > _TIDY:
            given_up = _Failed(kind="unavailable", message="no server made this image in time", param=None)
            await self._call("tidy", int(KEPT_SECONDS), KEPT_BYTES, given_up.model_dump_json())
            self._tidied = time.monotonic()
        await asyncio.sleep(LEASE / 4)

    async def _listen(self) -> None:
        """Hear what other servers do, until Redis does not answer."""
        last = await self._connect()
        try:
            while not self._is_over:
                for _, rows in await self._redis.xread({f"{_P}news": last}, 256, int(1000 * _POLL)) or ():
                    for at, fields in rows:
                        last = at
                        self._hear({key.decode(): value.decode() for key, value in fields.items()})
        except _AWAY as error:
            said = first_line(error) if isinstance(error, NotConnected) else type(error).__name__
            logger.warning("the queue does not answer: %s; it is asked again", said)
            raise
        finally:
            self.is_connected = False

    async def _connect(self) -> Any:
        """Read Redis's clock, and look at all that may have changed; return the last news that are there."""
        seconds, microseconds = await self._redis.time()
        self._offset = seconds + microseconds / 1e6 - time.monotonic()
        await self._call("renew", self.name, LEASE, *self._held)
        newest = await self._redis.xrevrange(f"{_P}news", count=1)
        self.is_connected = True
        self._wake.set()
        for job in self._watched:
            job.news_of_it.put_nowait({"kind": "again"})
        return newest[0][0] if newest else "0-0"

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
            for entry, held in [*self._held.items()]:
                is_over = entry == news.get("entry") or kind in ("gone", "failed")
                if held.row.job == name and is_over and not held.job.is_finished:
                    self._drop(entry)

    # ---- Redis

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _orders_of(self, request: _Request) -> tuple[Order, ...]:
        """Return the images of a request without its prompt."""
        number = self.dispatcher.next_number
        return tuple(
            Order(number(), request.model, "", seed, request.call, request.lora, (), request.frames)
            for seed in request.seeds
        )

    async def _call(self, script: str, *arguments: Any) -> Any:
        return await self._scripts[script](args=arguments)

    async def _answered(self, asked: Awaitable[Any]) -> Any:
        """Return what Redis answers; `Unavailable` where it does not."""
        try:
            return await asked
        except _AWAY as error:
            logger.debug("the queue: %s", type(error).__name__)
            raise Unavailable("the queue does not answer") from None

    async def _repeat(self, what: Callable[[], Awaitable[None]]) -> None:
        """Do something again and again; what goes wrong is tried again after a second."""
        while not self._is_over:
            try:
                await what()
            except Exception as error:
                if not isinstance(error, _AWAY):
                    logger.error("the shared queue: %s", type(error).__name__)
                await asyncio.sleep(_POLL)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Unavailable):
            logger.error("the shared queue: %s", type(error).__name__)


class SharedVideos:
    """Videos in Redis, which every server knows."""

    def __init__(self, queue: RedisQueue) -> None:
        self.queue = queue

    async def add(self, job: SharedJob, fps: int) -> Video:
        """Return a video that was just taken, or found."""
        return await self.of(f"video_{job.name}")

    async def of(self, name: str, *, whole: bool = False) -> Video:
        """Return a video; 404 for a name that there is not, or no more. whole: with its file."""
        video = await self.queue.video(name.removeprefix("video_"), whole=whole) if name.startswith("video_") else None
        if video is None:
            raise HTTPException(404, "there is no video of that id, or no more")
        return video

    async def remove(self, name: str) -> None:
        """Forget a video; one that is not finished is let go at the next step, wherever it is made."""
        await self.of(name)
        await self.queue.forget(name.removeprefix("video_"))


_AnyValue = TypeVar("_AnyValue", bound=_Value)


def _read(kind: type[_AnyValue], text: bytes) -> _AnyValue:
    """Return a value of Redis; `Unreadable`, without what it holds, for one that cannot be."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise Unreadable(f"the queue holds a value that cannot be: {api.problem_of(error.errors())}") from None


def _step_of(news: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: int(news[name]) for name in _Step.model_fields}
    return _Step(**values).model_dump()


def _require(request: _Request, facts: Facts, limits: api.Limits, adapters: Mapping[str, str]) -> None:
    """Raise `Refused` for a request that this server would not have taken."""
    call = request.call
    for name in ("width", "height", "num_inference_steps"):
        if not isinstance(call.get(name), int):
            raise Refused(f"{name} is missing", name)
    if unknown := sorted({*call} - facts.accepts - {*facts.defaults, "strength"}):
        raise Refused(f"{facts.name} takes no {unknown[0][:80]}", unknown[0][:80])
    width, height, steps = (int(str(call[name])) for name in ("width", "height", "num_inference_steps"))
    if width < 1 or height < 1 or width * height > limits.pixels or not 1 <= steps <= limits.steps:
        raise Refused("the request is beyond this server's limits: give all servers the same")
    if request.lora is not None and request.lora[0] not in adapters:
        raise Refused("this server lacks the adapter: give all servers the same", "lora")


def _made(order: Order, finished: _Finished, pixels: bytes, request: _Request) -> Made:
    picture = Picture(finished.width, finished.height, pixels, finished.steps_computed, finished.frames)
    seconds = finished.queued, finished.computed, finished.predicted
    return Made(order, picture, request.digest, *seconds, request.setting)


def _error_of(failed: _Failed) -> Exception:
    if failed.kind == "refused":
        return Refused(failed.message, failed.param)
    return Unavailable(failed.message) if failed.kind == "unavailable" else Failed(failed.message)


def _png(picture: Source | Picture) -> bytes:
    """Return an image's file, made quickly."""
    file = io.BytesIO()
    Image.frombytes("RGB", (picture.width, picture.height), picture.pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _pixels(file: bytes, finished: _Finished) -> bytes:
    """Return the pixels of an image's file; `Unreadable` for one that is not what was said."""
    try:
        with Image.open(io.BytesIO(file), formats=("PNG",)) as image:
            if image.size == (finished.width, finished.height):
                return image.convert("RGB").tobytes()
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError, Image.DecompressionBombError):
        pass
    raise Unreadable("the queue holds an image that cannot be")
