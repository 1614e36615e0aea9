"""Contents of Redis that servers of one queue share: names, values, and scripts that change several of them at once.

    jobs      stream of images; the group's pending list says whose each is, since when, and how often it was taken
    order     entry -> key of the queue: the least runs next, on whichever server
    open      entry -> what everybody may know of an image that is not finished; progress: of those that have begun
    job:ID    request, its finished images, and its prompt until the last of them is finished
    key:HASH  Idempotency-Key -> ID
    version   of what was admitted: a request is taken only by what was true when it was looked at
    kept      finished requests -> when; bytes, total: of their images
    servers   server -> when it was last heard of; news: stream of steps and ends

An image is pending from the start: for `waiting`, which is nobody, then for the server that makes it, whose lease it
renews. A lease that lapsed is anybody's.

A script happens whole or not at all. Where Redis is full it refuses one whose first change takes room, and no later
change: so scripts that end something begin with what frees room. Values are JSON, images PNG, videos WebP; what is read
back is validated. Clocks are Redis's own.

Source of the commands: redis.io/docs/latest/develop/data-types/streams.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from PIL import Image
from pydantic import Field, JsonValue, ValidationError
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.exceptions import ConnectionError as NotConnected

from fluxq.base.console import first_line
from fluxq.serve import api
from fluxq.serve.orders import Picture, Source, Strict

AWAY = (RedisError, OSError, TimeoutError)
_ANSWER = 5.0  # seconds that Redis may take
_OPTIONS: dict[str, Any] = {"socket_timeout": _ANSWER, "socket_connect_timeout": _ANSWER, "protocol": 2}
_FIRST = 6, 2  # version of Redis that has all commands
_P = "fluxq:"

_LUA = """
local P, clock = 'fluxq:', redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local function tell(...) redis.call('XADD', P..'news', 'MAXLEN', '~', 10000, '*', ...) end
-- Of the stream's group; an error, before the first request has made it, has no rows.
local function pending(...) return redis.pcall('XPENDING', P..'jobs', 'fluxq', ...) end
local function is_of(entry, server)
  local owner = pending(entry, entry, 1)[1]
  return owner and owner[2] == server
end
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
  local was = redis.call('HDEL', P..'open', entry)
  redis.call('HDEL', P..'progress', entry)
  redis.call('ZREM', P..'order', entry)
  redis.call('XACK', P..'jobs', 'fluxq', entry)
  redis.call('XDEL', P..'jobs', entry)
  return was
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
local function keep(job, images, seconds, most)  -- a finished request, without its prompt
  local name, bytes, source = P..'job:'..job, 0, 0
  redis.call('HDEL', name, 'secret')
  while redis.call('HDEL', name, 'source:'..source) == 1 do source = source + 1 end
  for i = 0, images - 1 do bytes = bytes + redis.call('HSTRLEN', name, 'file:'..i) end
  local key = redis.call('HGET', name, 'key')
  redis.call('HSET', name, 'completed', now)
  redis.call('EXPIRE', name, seconds)
  if key then redis.call('EXPIRE', P..'key:'..key, seconds) end
  redis.call('ZADD', P..'kept', now, job)
  redis.call('HSET', P..'bytes', job, bytes)
  redis.call('INCRBY', P..'total', bytes)
  for _, oldest in ipairs(redis.call('ZRANGE', P..'kept', 0, -1)) do
    if tonumber(redis.call('GET', P..'total')) <= tonumber(most) then break end
    if oldest ~= job then forget(oldest) end
  end
end
local function finish(entry, job, image, kind, value, file, seconds, most)
  local name, all = P..'job:'..job, entries(job)
  if close(entry) == 0 or redis.call('EXISTS', name) == 0 then return end  -- finished before, or nobody wants it
  redis.call('HSET', name, kind..':'..image, value)
  local left = redis.call('HINCRBY', name, 'left', -1)
  if kind == 'made' then
    redis.call('HSET', name, 'file:'..image, file)
  else
    for _, other in ipairs(all) do close(other) end
    local key = redis.call('HGET', name, 'key')
    if key and cjson.decode(value).kind == 'unavailable' then  -- whoever asks again begins anew
      redis.call('DEL', P..'key:'..key)
      redis.call('HDEL', name, 'key')
    end
  end
  if left == 0 or kind == 'failed' then keep(job, #all, seconds, most) end
  tell('kind', kind, 'job', job, 'image', image, 'entry', entry)
end
"""
_SCRIPTS = {
    # when a server that counts was last heard of, key; version, open, progress, servers, ID. No MULTI: it takes room.
    "look": """
return {redis.call('GET', P..'version') or '0', redis.call('HGETALL', P..'open'), redis.call('HGETALL', P..'progress'),
        redis.call('ZCOUNT', P..'servers', ARGV[1], '+inf'), redis.call('GET', P..'key:'..ARGV[2]) or ''}
""",
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
  repeat  -- entries of others, which no server wrote, are taken out on the way
    local got = redis.call('XREADGROUP', 'GROUP', 'fluxq', 'waiting', 'COUNT', 1, 'STREAMS', P..'jobs', '>')
    local id = got and got[1][2][1][1] or entry
    if id ~= entry then
      redis.call('XACK', P..'jobs', 'fluxq', id)
      redis.call('XDEL', P..'jobs', id)
    end
  until id == entry
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
    # server, lease in ms, key below which an image is taken, images of its share that it has, digests…
    # Returns entry, job, image, what is known, times taken.
    "take": """
if ARGV[4] * redis.call('ZCARD', P..'servers') >= redis.call('ZCARD', P..'order') then return false end
local mine, owners = {}, {}
for i = 5, #ARGV do mine[ARGV[i]] = true end
for _, each in ipairs(pending('-', '+', 1000000)) do owners[each[1]] = each end
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
redis.call('ZREMRANGEBYSCORE', P..'servers', '-inf', '('..(now - ARGV[2]))
redis.call('ZADD', P..'servers', now, ARGV[1])
local lost = {}
for i = 3, #ARGV do
  if is_of(ARGV[i], ARGV[1]) then
    redis.call('XCLAIM', P..'jobs', 'fluxq', ARGV[1], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
""",
    # entry, what it has come to, job, news of it…
    "step": """
if redis.call('HEXISTS', P..'open', ARGV[1]) == 0 then return end
redis.call('HSET', P..'progress', ARGV[1], ARGV[2])
tell('kind', 'step', 'job', ARGV[3], unpack(ARGV, 4))
""",
    # entry, job, image, made or failed, value, file, seconds and bytes that are kept
    "finish": "finish(unpack(ARGV))",
    # entry, server: an image that it took and cannot make now
    "give_back": """
if not is_of(ARGV[1], ARGV[2]) then return end
redis.call('XCLAIM', P..'jobs', 'fluxq', 'waiting', 0, ARGV[1], 'JUSTID')
redis.call('HDEL', P..'progress', ARGV[1])
tell('kind', 'new')
""",
    "forget": "forget(ARGV[1])",
    # seconds and bytes that are kept, why an image is given up: what is too old, and servers that are no more
    "tidy": """
for _, job in ipairs(redis.call('ZRANGEBYSCORE', P..'kept', '-inf', '('..(now - ARGV[1]))) do forget(job) end
for _, each in ipairs(pending('IDLE', math.floor(1000 * ARGV[1]), '-', '+', 1000, 'waiting')) do
  local row = known(each[1])
  if row.job then finish(each[1], row.job, row.image, 'failed', ARGV[3], '', ARGV[1], ARGV[2]) end
end
for _, each in ipairs(redis.pcall('XINFO', 'CONSUMERS', P..'jobs', 'fluxq')) do
  local server = {}
  for i = 1, #each, 2 do server[each[i]] = each[i + 1] end
  if server.name ~= 'waiting' and server.pending == 0 and server.idle > 1000 * ARGV[1] then
    redis.call('XGROUP', 'DELCONSUMER', P..'jobs', 'fluxq', server.name)
  end
end
""",
    # server
    "leave": """
redis.call('ZREM', P..'servers', ARGV[1])
if not pending('-', '+', 1, ARGV[1])[1] then redis.pcall('XGROUP', 'DELCONSUMER', P..'jobs', 'fluxq', ARGV[1]) end
""",
}

_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
_Side = Annotated[int, Field(ge=1, le=1 << 16)]
_Text = Annotated[str, Field(max_length=200)]


class Value(Strict):
    """A value as Redis has it."""


class RequestSpec(Value):
    """Facts of a request besides its prompt. call: the pipeline's arguments. fps: of a video."""

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


class Secret(Value):
    """Parts of a request that are deleted when it is finished."""

    prompt: str = Field(min_length=1, max_length=api.LONGEST)
    negative_prompt: str | None = Field(max_length=api.LONGEST)
    sources: Annotated[int, Field(ge=0, le=100)]


class Row(Value):
    """Facts that every server may know of an image that is not finished; seconds as of Entry, of Redis's clock."""

    job: _Text
    image: _Count
    model: _Text
    digest: _Text
    arrived: _Seconds
    due: _Seconds
    predicted: _Seconds
    promised: _Seconds


class Progress(Value):
    """State of an image that is being made. left: predicted seconds until it is finished."""

    steps: _Count
    computed: _Seconds
    left: _Seconds


class Finished(Value):
    """Facts of a finished image; its pixels are in a file of their own."""

    width: _Side
    height: _Side
    frames: _Count | None
    steps_computed: _Count
    queued: _Seconds
    computed: _Seconds
    predicted: _Seconds


class Failure(Value):
    """Error of an image that could not be made."""

    kind: Literal["refused", "unavailable", "failed"]
    message: str = Field(max_length=2000)
    param: _Text | None


class Unreadable(RuntimeError):
    """A value of Redis that no server wrote."""


AnyValue = TypeVar("AnyValue", bound=Value)


class Store:
    """Redis, as a server asks it; one of `AWAY` where it does not answer within 5 s."""

    def __init__(self, url: str) -> None:
        # A connection that was closed is opened again once; a Redis that hangs is not asked again.
        retry = Retry(NoBackoff(), 1, supported_errors=(NotConnected,))
        self.client = AsyncRedis.from_url(url, retry=retry, **_OPTIONS)
        self._scripts = {name: self.client.register_script(_LUA + script) for name, script in _SCRIPTS.items()}

    async def do(self, script: str, *arguments: str | float | bytes) -> Any:
        """Run a script."""
        return await self._scripts[script](args=arguments)

    async def close(self) -> None:
        """Close its connections."""
        await self.client.aclose()

    async def clock(self) -> float:
        """Return Redis's clock, in seconds."""
        seconds, microseconds = await self.client.time()
        return seconds + microseconds / 1e6

    async def fields(self, job: str, names: Sequence[str]) -> list[bytes | None]:
        """Return values of a request, None for each that there is not."""
        values = await self.client.hmget(f"{_P}job:{job}", names) if names else []
        return cast("list[bytes | None]", values)  # nothing is decoded

    async def progress(self, entry: str) -> Progress | None:
        """Return what an image has come to, None for one that has not begun."""
        value = await self.client.hget(f"{_P}progress", entry)
        return None if value is None else read(Progress, value)

    async def known(self, since: float, key: str) -> tuple[dict[str, tuple[Row, Progress | None]], str, int, str]:
        """Return images that are not finished, the version, the number of servers, and the request of a key.

        since: when a server that counts was last heard of.
        """
        version, rows, progress, servers, request = await self.do("look", since, key)
        begun = dict(zip(progress[::2], progress[1::2], strict=True))
        images: dict[str, tuple[Row, Progress | None]] = {}
        for entry, text in zip(rows[::2], rows[1::2], strict=True):
            with suppress(Unreadable):  # whoever takes it lets it go
                images[entry.decode()] = read(Row, text), read(Progress, begun[entry]) if entry in begun else None
        return images, _text(version), max(1, servers), _text(request)

    async def newest(self) -> bytes:
        """Return the place of the last news."""
        rows: Any = await self.client.xrevrange(f"{_P}news", count=1)
        return rows[0][0] if rows else b"0-0"

    async def news(self, after: bytes, seconds: float) -> tuple[bytes, list[dict[str, str]]]:
        """Return the place of the last news, and those that have come after a place, or come within some seconds."""
        streams: Any = await self.client.xread({f"{_P}news": after}, 256, int(1000 * seconds))
        rows = [row for _, rows in streams or () for row in rows]
        told = [{_text(name): _text(value) for name, value in fields.items()} for _, fields in rows]
        return rows[-1][0] if rows else after, told


def _text(value: bytes) -> str:
    """Return a text; of one that no server wrote, a text that means nothing."""
    return value.decode(errors="replace")


def read(kind: type[AnyValue], text: bytes | str) -> AnyValue:
    """Return a value of Redis; `Unreadable`, without what it holds, for one that cannot be."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise Unreadable(f"the queue holds a value that cannot be: {api.problem_of(error.errors())}") from None


def png(picture: Source | Picture) -> bytes:
    """Return an image's file, made quickly."""
    file = io.BytesIO()
    Image.frombytes("RGB", (picture.width, picture.height), picture.pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def pixels_of(file: bytes, finished: Finished) -> bytes:
    """Return the pixels of an image's file; `Unreadable` for one that is not what was said."""
    try:
        with Image.open(io.BytesIO(file), formats=("PNG",)) as image:
            if image.size == (finished.width, finished.height):
                return image.convert("RGB").tobytes()
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError, Image.DecompressionBombError):
        pass
    raise Unreadable("the queue holds an image that cannot be")


def address_of(url: str) -> str:
    """Return where a URL leads, without its password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def require_redis(url: str) -> None:
    """Raise ValueError or OSError, in one sentence, where no Redis answers, or an old one."""
    try:
        where = address_of(url)
        with Redis.from_url(url, **_OPTIONS) as client:
            version = str(dict(client.info("server"))["redis_version"])
    except (TypeError, ValueError):
        raise ValueError("--queue: write redis://HOST:PORT/DB, rediss:// with TLS, or unix:///SOCKET") from None
    except (AuthenticationError, NoPermissionError) as error:
        raise ValueError(f"--queue: {where} refuses ({first_line(error)}); write redis://:PASSWORD@HOST:PORT") from None
    except AWAY as error:
        reason = first_line(error) or type(error).__name__
        is_unknown = "CERTIFICATE_VERIFY_FAILED" in reason
        cure = "name its certificate by ?ssl_ca_certs=FILE" if is_unknown else "start one, or give another address"
        raise OSError(f"--queue: no Redis answers at {where} ({reason}); {cure}") from None
    if tuple(map(int, version.split(".")[:2])) < _FIRST:
        raise ValueError(f"--queue: the Redis at {where} is {version}; {'.'.join(map(str, _FIRST))} or newer is needed")
