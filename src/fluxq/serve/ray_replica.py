"""A replica of `--engine ray`: the application in an actor, and what Ray Serve asks of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import serve
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.types import Message

from fluxq.base.console import logger, set_verbosity
from fluxq.serve.api import ImageRequest, random_seed
from fluxq.serve.app import Served, application
from fluxq.serve.dispatcher import Here, Job
from fluxq.serve.orders import Order, Source
from fluxq.serve.process import portable
from fluxq.serve.server import Checked, ServeOptions, dispatcher_of, limits_of

_KEPT = 60.0  # seconds in which the front sees an error, before Ray starts another replica
_ALONE = 600.0  # seconds without a front, after which the application removes itself
_BACKLOG = 20.0  # predicted seconds of each replica's queue, to scale by


@dataclass(frozen=True)
class ReplicaRequest:
    """A request as it goes to a replica. seed: of its first image, where it says none itself."""

    scope: Mapping[str, Any]
    content: bytes = field(repr=False)
    seed: int = field(default_factory=random_seed)


@dataclass(frozen=True)
class State:
    """A replica as the front sees it. backlog, image: predicted seconds of its queue, and of a plain image."""

    name: str
    is_ready: bool
    backlog: float
    image: float
    error: Exception | None


class _Placed(Served):
    """Contents of an application, which tells when it has taken a request, and draws no seeds."""

    async def submit(self, body: ImageRequest, request: Request, sources: tuple[Source, ...] = ()) -> Job:
        if body.seed is None:
            body = body.model_copy(update={"seed": request.scope["fluxq.seed"]})
        job = await super().submit(body, request, sources)
        request.scope["fluxq.taken"]()
        return job


class Replica:
    """The application in an actor; a checkpoint that is refused is told to the front, which ends."""

    async def __init__(self, options: ServeOptions, checked: Checked, level: int) -> None:
        set_verbosity(0)
        logger.setLevel(level)
        context = serve.get_replica_context()
        self._name, self._application = context.replica_id.unique_id, context.app_name
        self._dispatcher = dispatcher_of(options, checked, Here(checked.settings))
        bounds = limits_of(options), checked.settings.adapters, None, checked.elastic
        self._app = application(_Placed(self._dispatcher, *bounds))
        self._error: Exception | None = None
        try:
            await self._dispatcher.start()
        except Exception as error:
            self._error = portable(error)
        self._heard = time.monotonic()  # of the front

    async def answer(self, request: ReplicaRequest, order: Sequence[str]) -> AsyncGenerator[Any, None]:
        """Yield the replica's state once it has taken or refused a request, then what the application sends.

        order: of replicas, for the router. A call that is cancelled is a client that has left.
        """
        news: asyncio.Queue[Any] = asyncio.Queue()
        bodies, gone = [{"type": "http.request", "body": request.content, "more_body": False}], asyncio.Event()

        async def receive() -> Message:
            if bodies:
                return bodies.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {**request.scope, "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
        scope |= {"fluxq.seed": request.seed, "fluxq.taken": lambda: news.put_nowait({"type": "taken"})}
        running = asyncio.ensure_future(self._app(scope, receive, news.put))
        running.add_done_callback(lambda _: news.put_nowait(None))
        try:
            message = await news.get()
            yield self.state()
            while message is not None:
                if message["type"] != "taken":
                    yield message
                message = await news.get()
        finally:
            gone.set()
            await asyncio.gather(running, return_exceptions=True)

    def state(self) -> State:
        """Return what the front is to know."""
        self._heard = time.monotonic() if self._error is None else self._heard
        dispatcher, image = self._dispatcher, 0.0
        for name, facts in [*dispatcher.facts.items()][:1]:
            image = dispatcher.times.remaining(Order(0, name, "", 0, facts.defaults))
        is_ready = dispatcher.is_ready and not dispatcher.is_draining
        return State(self._name, is_ready, dispatcher.queue.backlog(), image, self._error)

    def page(self) -> tuple[str, bytes]:
        """Return its name and figures."""
        dispatcher = self._dispatcher
        return self._name, dispatcher.metrics.page(dispatcher, len(dispatcher.queue), dispatcher.queue.backlog())

    async def drain(self) -> None:
        """Finish what was taken."""
        await self._dispatcher.stop()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the number of replicas follows; Ray asks."""
        return {"backlog": self._dispatcher.queue.backlog()}

    async def check_health(self) -> None:
        """Raise where another replica is to take this one's place; Ray asks."""
        silent = time.monotonic() - self._heard
        if not self._dispatcher.is_alive or (self._error and silent > _KEPT):
            raise RuntimeError("the replica has failed")
        if silent > _ALONE:
            await asyncio.to_thread(serve.delete, self._application, _blocking=False)


class Nearest(RequestRouter):
    """Ray Serve's router, which takes the replicas in the order that a call names, and others after them."""

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        names = [*pending_request.kwargs.get("order", ())] if pending_request else []
        ranks = {name: rank for rank, name in enumerate(names)}
        return [[each] for each in sorted(candidate_replicas, key=lambda one: ranks.get(one.replica_id.unique_id, 99))]


def replicas_wanted(context: Any) -> tuple[int, dict[str, Any]]:
    """Return so many replicas that none has a long backlog; Ray keeps them within the bounds, and waits before."""
    seconds = sum((context.aggregated_metrics or {}).get("backlog", {}).values())
    return max(1, math.ceil(seconds / _BACKLOG)), {}
