"""The front of `--engine ray`: which replica answers a request, and what is repeated when one has ended.

All requests pass it, so it knows when each replica will be free: what that one said when it took its last request, and
once a second. A request that a replica has refused is offered to the next one. One whose replica ended is repeated with
the same seed, and so is the same image.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Message, Receive, Scope, Send

from fluxq.base.console import logger
from fluxq.serve.app import event_of, explained, unless_gone
from fluxq.serve.dispatcher import Unavailable
from fluxq.serve.metrics import CONTENT_TYPE, Metrics
from fluxq.serve.orders import Failed, Refused
from fluxq.serve.ray_replica import ReplicaRequest, State

_PATIENCE = 5.0  # seconds for answers of all replicas
_AGAIN = 1.0  # seconds between tries of a request whose replica ended
_RETURNS = 600.0  # seconds in which there must be room for it
_DEATHS = 3  # of replicas during one request, which is then given up: it may be the cause
_SCOPE = ("method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "root_path")


class Front:
    """Replicas and the choice among them.

    handle: of the deployment. keeps_videos: whether a video's replica is still there when it is asked for.
    """

    def __init__(self, handle: Any = None, keeps_videos: bool = True) -> None:
        self.handle, self.keeps_videos = handle, keeps_videos
        self.free: dict[str, float] = {}  # replica that is ready -> when it will have nothing to do
        self.metrics = Metrics()
        self.is_ending = False
        self._image = 0.0  # seconds of a plain image

    def routes(self) -> list[BaseRoute]:
        """Return the routes of the application."""
        probes = [Route("/health", self._health), Route("/ready", self._ready), Route("/metrics", self._page)]
        return [*probes, Mount("", self._forward)]

    async def ask(self, method: str, seconds: float | None = _PATIENCE) -> list[Any]:
        """Ask all replicas; return the answers of those that have some. TimeoutError where one hangs."""
        try:
            broadcast = self.handle.broadcast(method)
            answers = await broadcast.results_async(timeout_s=seconds, return_exceptions=True)
        except RayServeException:  # there is none
            return []
        return [each for each in answers if not isinstance(each, BaseException)]

    async def look(self) -> list[State]:
        """Take note of the replicas, and return what they say. Of one that hangs nothing is known: Ray will end it."""
        with contextlib.suppress(TimeoutError):
            states: list[State] = await self.ask("state")
            now = time.monotonic()
            self.free = {each.name: now + each.backlog for each in states if each.is_ready}
            self._image = max((each.image for each in states), default=0.0)
            return states
        return []

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _request: Request) -> Response:
        if self.free and not self.is_ending:
            return JSONResponse({"status": "ready", "replicas": len(self.free)})
        return JSONResponse({"status": "not ready"}, 503)

    async def _page(self, _request: Request) -> Response:
        page = generate_latest(self.metrics.registry.restricted_registry(["fluxq_requests_total"]))
        pages: list[tuple[str, bytes]] = []
        with contextlib.suppress(TimeoutError):
            pages = await self.ask("page")
        return Response(merged([*pages, ("front", page)]), media_type=CONTENT_TYPE)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by a replica; where the client leaves, the replica is told."""
        content = (await receive()).get("body", b"")  # all of it: the guard has read it
        request = ReplicaRequest({name: scope[name] for name in _SCOPE if name in scope}, content)
        await unless_gone(self._answer(request, _Delivery(send)), Request(scope, receive))

    async def _answer(self, request: ReplicaRequest, delivery: _Delivery) -> None:
        """Ask one replica after the other, the soonest free first, until one answers or all refuse.

        A request that a replica took is not refused any more because that one ended: it waits for room.
        """
        if request.scope["path"].startswith("/v1/videos") and not self.keeps_videos:
            problem = "videos are kept by their replica: start the server with a fixed number of --replicas"
            await delivery.all(_refusal(Refused(problem)))
            return
        tried, deaths, refusal, end = set[str](), 0, None, time.monotonic() + _RETURNS
        while True:
            order = [name for name in sorted(self.free, key=lambda one: self.free[one]) if name not in tried]
            if not order:
                if not deaths or (refusal and refusal.status == 404) or time.monotonic() > end:
                    break
                await asyncio.sleep(_AGAIN)
                tried.clear()
                continue
            tried.add(order[0])
            try:
                if (refused := await self._try(order, request, delivery)) is None:
                    return
            except RayTaskError as error:
                logger.warning("a replica failed: %s", type(error.cause).__name__)
                refusal = _refusal(Failed("unavailable"))
                break
            except (RayError, RayServeException):
                self.free.pop(order[0], None)
                deaths += 1
                if deaths == _DEATHS:
                    refusal = _refusal(Unavailable(f"{_DEATHS} replicas ended while they made this image"))
                    break
                continue
            refusal = min(refusal or refused, refused, key=lambda one: one.retry_after)
        await delivery.all(refusal or _refusal(Unavailable("the server is not ready")))

    async def _try(self, order: Sequence[str], request: ReplicaRequest, delivery: _Delivery) -> Answer | None:
        """Let a replica answer; return what it says where another one may be asked. RayError where it ended."""
        if request.scope["method"] == "POST":
            self.free[order[0]] = max(self.free[order[0]], time.monotonic()) + self._image
        replies = self.handle.options(stream=True).answer.remote(request, order=order)
        answer = Answer()
        try:
            state: State = await anext(replies)
            if state.name in self.free:
                self.free[state.name] = time.monotonic() + state.backlog
            async for message in replies:
                answer.messages.append(message)
                if answer.is_stream:
                    await delivery.event(message)
        finally:
            replies.cancel()
        if answer.status in (429, 503) or (answer.status == 404 and request.scope["path"].startswith("/v1/videos/")):
            return answer
        if not answer.is_stream:
            await delivery.all(answer)
        return None


@dataclass
class Answer:
    """Messages that an application sent for a request."""

    messages: list[Message] = field(default_factory=list)

    @property
    def status(self) -> int:
        return self.messages[0]["status"] if self.messages else 500

    @property
    def is_stream(self) -> bool:
        return self._header("content-type").startswith("text/event-stream")

    @property
    def retry_after(self) -> float:
        """Seconds, infinite where it says none."""
        return float(self._header("retry-after") or math.inf)

    def _header(self, name: str) -> str:
        return Headers(raw=self.messages[0]["headers"]).get(name, "") if self.messages else ""


class _Delivery:
    """Messages that a client was sent for its request. Of a stream that is repeated, it gets each image once."""

    def __init__(self, send: Send) -> None:
        self._send, self._has_begun = send, False
        self._seeds = set[int]()

    async def all(self, answer: Answer) -> None:
        """Send an answer, or end a stream with its error."""
        if not self._has_begun:
            for message in answer.messages:
                await self._send(message)
            return
        event = event_of({"type": "error", "status": answer.status, **json.loads(answer.messages[1]["body"])})
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def event(self, message: Message) -> None:
        """Send a part of a stream that was not sent before."""
        if message["type"] == "http.response.start":
            is_new, self._has_begun = not self._has_begun, True
        else:
            is_new = self._is_new(message["body"])
        if is_new:
            await self._send(message)

    def _is_new(self, content: bytes) -> bool:
        if not content.partition(b"\n")[0].endswith(b".completed"):
            return True
        seed = json.loads(content.partition(b"data: ")[2])["seed"]
        is_new = seed not in self._seeds
        self._seeds.add(seed)
        return is_new


def _refusal(error: Exception) -> Answer:
    status, content, headers = explained(error)
    answer = Response(json.dumps(content), status, headers, "application/json")
    start = {"type": "http.response.start", "status": status, "headers": answer.raw_headers}
    return Answer([start, {"type": "http.response.body", "body": answer.body}])


def merged(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """Return one page of figures, each with the replica that it is of as a label."""
    families: dict[str, Metric] = {}
    for name, page in pages:
        for family in text_string_to_metric_families(page.decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value)
    return generate_latest(SimpleNamespace(collect=families.values))  # pyright: ignore[reportArgumentType]
