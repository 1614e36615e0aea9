"""The application: routes of OpenAI's images API, of probes and metrics, and of whoever runs the server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from fluxq import __version__
from fluxq.base.console import did_you_mean, logger
from fluxq.serve import api
from fluxq.serve.api import EditRequest, ImageRequest, Limits, VideoRequest
from fluxq.serve.dispatcher import Dispatcher, Job, Unavailable
from fluxq.serve.elastic import Setting
from fluxq.serve.metrics import CONTENT_TYPE
from fluxq.serve.orders import Busy, Facts, Failed, NotLoaded, Order, Refused, Source, Strict, WorkerDied
from fluxq.serve.queue import Full
from fluxq.serve.videos import MEDIA_TYPE, Videos

if TYPE_CHECKING:
    from fluxq.serve.redis_queue import RedisQueue

# FastAPI's own spans and logs, of versions that have some: they quote errors, and these may quote prompts.
UNTRACED: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
_INVALID = "invalid_request_error"
_Result = TypeVar("_Result")


class Served:
    """The dispatcher, and what bounds requests.

    adapters: name -> file of a LoRA. root: folder that /admin/load may take checkpoints from. settings: to walk down.
    shared: queue of several servers, in place of the dispatcher's own.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Limits,
        adapters: Mapping[str, str],
        root: Path | None = None,
        settings: Sequence[Setting] = (),
        shared: RedisQueue | None = None,
    ) -> None:
        self.dispatcher, self.limits, self.adapters, self.root = dispatcher, limits, adapters, root
        self.settings, self.started = settings, int(time.time())
        self.shared, self.queue = shared, shared or dispatcher
        self.videos: Any = shared or Videos(dispatcher)

    async def submit(self, body: ImageRequest, request: Request, sources: tuple[Source, ...] = ()) -> Job:
        """Take a request, in the best setting in which it need not wait longer than the next one says."""
        self.dispatcher.require_open()
        within = None if body.deadline_ms is None else body.deadline_ms / 1000
        orders, chosen = self._orders(body, sources), None
        for setting in () if body.elastic is False else self.settings:
            if await self.queue.wait_of(orders, within) <= setting.above:
                break
            if (changed := api.with_setting(body, setting)) is not None:
                with suppress(Refused, HTTPException):  # the setting does not suit what was asked for
                    orders, chosen = self._orders(changed, sources), setting
        told = None if chosen is None else {"name": chosen.name, **chosen.measured}
        if self.shared is None:
            return self.dispatcher.submit(orders, within, told)
        fps = body.fps or api.FPS if isinstance(body, VideoRequest) else None
        return await self.shared.submit(orders, within, told, _claim(body, request, sources), fps)

    @property
    def is_ready(self) -> bool:
        """True while requests are taken."""
        dispatcher = self.dispatcher
        return dispatcher.is_ready and not dispatcher.is_draining and (self.shared is None or self.shared.is_connected)

    def _orders(self, body: ImageRequest, sources: tuple[Source, ...]) -> list[Order]:
        facts = self.facts_of(body.model)
        return api.orders_of(body, facts, self.limits, self.adapters, self.dispatcher.next_number, sources)

    def facts_of(self, name: str | None) -> Facts:
        """Return a checkpoint, by default the first; 404 for a name that there is not."""
        names = self.dispatcher.names
        if not self.dispatcher.facts:
            raise Unavailable("the server is not ready")
        chosen = names[0] if name is None and names else name or ""
        if chosen not in self.dispatcher.facts:
            raise HTTPException(404, f"there is no model of that name{did_you_mean(chosen, names)}: see /v1/models")
        return self.dispatcher.facts[chosen]


def application(served: Served) -> FastAPI:
    """Return the ASGI application, without keys and limits of bytes: `Guard` is in front of it."""
    how: Any = {"docs_url": None, "redoc_url": None, "redirect_slashes": False, "telemetry": UNTRACED}
    app = FastAPI(title="fluxq", version=__version__, **how)
    _add_errors(app, served)
    _add_images(app, served)
    _add_videos(app, served)
    _add_probes(app, served)
    _add_admin(app, served)
    return app


def _add_images(app: FastAPI, served: Served) -> None:
    dispatcher = served.dispatcher

    @app.post("/v1/images/generations")
    async def generations(body: ImageRequest, request: Request) -> Response:
        return await _answer(served, await served.submit(body, request), body, request)

    @app.post("/v1/images/edits")
    async def edits(request: Request) -> Response:
        async with request.form(max_files=_FILES, max_fields=_FIELDS) as form:
            texts = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            files = [(name, await value.read()) for name, value in form.multi_items() if not isinstance(value, str)]
        if other := next((name for name, _ in files if name not in ("image", "image[]")), None):
            raise Refused(f"there is no file {other[:80]!r}: images come as image or image[]", other[:80])
        if not files:
            raise Refused("image: send a PNG, JPEG or WebP as a file of the form", "image")
        body = api.of_form(EditRequest, texts)
        reading = (asyncio.to_thread(api.source_of, content, served.limits) for _, content in files)
        sources = tuple(await asyncio.gather(*reading))
        return await _answer(served, await served.submit(body, request, sources), body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        rows = [_model_row(served, name) for name in dispatcher.names if name in dispatcher.facts]
        return {"object": "list", "data": rows}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        return _model_row(served, served.facts_of(name).name)


async def _answer(served: Served, job: Job, body: ImageRequest, request: Request) -> Response:
    """Wait for a request's images, or stream its events."""
    dispatcher = served.dispatcher
    if body.stream:
        dispatcher.metrics.answered(200)
        return StreamingResponse(_events(served, job, body), media_type="text/event-stream", headers=_UNCACHED)
    try:
        made = await unless_gone(job.images(), request)
    finally:
        if not job.is_finished:
            served.queue.cancel(job)
    if made is None:
        dispatcher.metrics.answered(499, "client_left")
        return Response(status_code=499)
    files = await asyncio.gather(*(asyncio.to_thread(api.file_of, each, body) for each in made))
    dispatcher.metrics.answered(200)
    seconds = sum(each.computed for each in made)
    logger.info("%d of %s, %s, in %.1f s", len(made), made[0].order.model, made[0].order.size, seconds)
    return JSONResponse(api.answer_of(made, files, body))


_FILES, _FIELDS = 8, 64  # of a form
_LONGEST_NAME = 200  # characters of a model's
_LONGEST_KEY = 255  # characters of an Idempotency-Key
_UNCACHED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _model_row(served: Served, name: str) -> dict[str, Any]:
    facts = served.dispatcher.facts[name]
    row = {"id": name, "object": "model", "created": served.started, "owned_by": "fluxq"}
    told: dict[str, Any] = {
        "checkpoint": facts.digest,
        "gates": list(facts.gates),
        "loaded": name in served.dispatcher.memory,
    }
    if facts.joined is not None:
        told["joined"] = "the same bits" if math.isinf(facts.joined) else f"{facts.joined:.1f} dB"
    if name in served.dispatcher.originals:
        told["shadow"] = served.dispatcher.shadows.told(name)
    return row | told | {"lora": sorted(served.adapters), "defaults": dict(facts.defaults)}


async def unless_gone(work: Coroutine[Any, Any, _Result], request: Request) -> _Result | None:
    """Return what comes of some work; None where the client leaves first, for whom it is cancelled."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def _claim(body: ImageRequest, request: Request, sources: Sequence[Source]) -> tuple[str, str]:
    """Return an Idempotency-Key as the shared queue has it."""
    from fluxq.serve.redis_queue import NO_CLAIM

    key = request.headers.get("idempotency-key")
    if key is None:
        return NO_CLAIM
    if not 1 <= len(key) <= _LONGEST_KEY:
        raise Refused(f"Idempotency-Key has {len(key)} characters, 1 to {_LONGEST_KEY} are expected")
    who = request.headers.get("authorization", "")
    texts = (type(body).__name__, body.model_dump_json(), *(each.pixels for each in sources))
    return _digest(who, key), _digest(who, key, *texts)


def _digest(*parts: str | bytes) -> str:
    """Return a digest of texts; with a key that nobody guesses in it, it tells nothing of the others."""
    whole = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        whole.update(len(content).to_bytes(8, "big") + content)
    return whole.hexdigest()


async def _left(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(served: Served, job: Job, body: ImageRequest) -> AsyncIterator[bytes]:
    """Yield the events of a stream; where the client leaves, it is closed, and its images are let go."""
    try:
        while (news := await job.news.get()) is not None:
            if (made := news.get("made")) is None:
                yield event_of(api.progress(news, body))
            else:
                yield event_of(api.completed(made, await asyncio.to_thread(api.file_of, made, body), body))
        if job.error is not None:
            status, content, _ = explained(job.error)
            yield event_of({"type": "error", "status": status, **content})
    finally:
        if not job.is_finished:
            served.queue.cancel(job)


def event_of(value: Mapping[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode()


def _add_videos(app: FastAPI, served: Served) -> None:
    videos = served.videos

    @app.post("/v1/videos")
    async def create(request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "").startswith("application/json"):
            body = VideoRequest.model_validate_json(await request.body())
        elif (await request.body()).lstrip().startswith(b"{"):
            raise Refused(api.NO_HEADER)
        else:
            async with request.form(max_files=_FILES, max_fields=_FIELDS) as form:
                if any(not isinstance(value, str) for value in form.values()):
                    raise Refused("input_reference: videos are made from texts alone", "input_reference")
                body = api.of_form(VideoRequest, {name: str(value) for name, value in form.multi_items()})
        job = await served.submit(body, request)
        served.dispatcher.metrics.answered(200)
        return (await videos.keep_video(job, body.fps or api.FPS)).told()

    @app.get("/v1/videos/{name}")
    async def status(name: str) -> dict[str, Any]:
        return (await videos.video(name)).told()

    @app.get("/v1/videos/{name}/content")
    async def content(name: str) -> Response:
        video = await videos.video(name, whole=True)
        if video.file is None:
            raise Busy(f"the video is {video.status}")
        return Response(video.file, media_type=MEDIA_TYPE)

    @app.delete("/v1/videos/{name}")
    async def delete(name: str) -> dict[str, Any]:
        await videos.forget_video(name)
        return {"id": name, "object": "video.deleted", "deleted": True}


def _add_probes(app: FastAPI, served: Served) -> None:
    dispatcher = served.dispatcher

    @app.get("/")
    @app.get("/v1")
    async def root() -> dict[str, str]:
        return {"server": f"fluxq {__version__}", "api": "/v1/images/generations", "models": "/v1/models"}

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if dispatcher.is_alive else JSONResponse({"status": "failed"}, 500)

    @app.get("/ready")
    async def ready() -> Response:
        if served.is_ready:
            return JSONResponse({"status": "ready", "models": dispatcher.names})
        return JSONResponse({"status": "draining" if dispatcher.is_draining else "not ready"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        images, seconds = len(dispatcher.queue), dispatcher.queue.backlog()
        if served.shared is not None:
            images, seconds = await served.shared.figures()
        return Response(dispatcher.metrics.page(dispatcher, images, seconds), media_type=CONTENT_TYPE)


class _Load(Strict):
    folder: str
    name: str | None = None


class _Named(Strict):
    name: str


def _add_admin(app: FastAPI, served: Served) -> None:
    dispatcher = served.dispatcher

    @app.post("/admin/load")
    async def load(body: _Load) -> dict[str, Any]:
        folder = _inside(served.root, body.folder)
        name = body.name or folder.name
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise Refused(f"name: give letters and digits, {_LONGEST_NAME} at most", "name")
        await dispatcher.add(name, str(folder))
        return _model_row(served, name)

    @app.post("/admin/unload")
    async def unload(body: _Named) -> dict[str, str]:
        await dispatcher.remove(served.facts_of(body.name).name)
        return {"status": "unloaded"}

    @app.post("/admin/drain")
    async def drain() -> dict[str, Any]:
        dispatcher.is_draining = True
        return {"status": "draining", "images": len(dispatcher.queue)}


def _inside(root: Path | None, name: str) -> Path:
    """Return a folder below the root; `Refused` for any other."""
    if root is None:
        raise Refused("checkpoints are loaded from below --root, which this server was not given", "folder")
    if "\0" in name:
        raise Refused("folder: holds a character that no path has", "folder")
    with suppress(OSError):  # a name too long, links in a circle
        folder = (root / name).resolve()
        if folder.is_relative_to(root.resolve()) and folder.is_dir():
            return folder
    raise Refused("folder: no folder below --root", "folder")


def _add_errors(app: FastAPI, served: Served) -> None:
    async def answer(_request: Request, error: Exception) -> Response:
        status, content, headers = explained(error)
        served.dispatcher.metrics.answered(status, content["error"]["code"] or content["error"]["type"])
        return JSONResponse(content, status, headers)

    for kind in (RequestValidationError, HTTPException, ValueError, RuntimeError, OSError, Exception):
        app.add_exception_handler(kind, answer)


def explained(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers of an error's answer."""
    if isinstance(error, (RequestValidationError, ValidationError)):
        error = api.problem_of(error.errors())
    if isinstance(error, HTTPException):
        code = "not_found" if error.status_code == 404 else None
        return error.status_code, api.error_of(str(error.detail), _INVALID, code=code), dict(error.headers or {})
    if isinstance(error, Full):
        content = api.error_of(str(error), "rate_limit_error", code="queue_full")
        return 429, content, {"Retry-After": str(error.retry_after)}
    if isinstance(error, WorkerDied):
        error = Unavailable("the worker ended; it is started again")
    if isinstance(error, NotLoaded):
        error = Unavailable(str(error))
    if isinstance(error, Unavailable):
        content = api.error_of(str(error), "server_error", code="unavailable")
        return 503, content, {"Retry-After": str(error.retry_after)}
    if isinstance(error, (Refused, ValueError)):
        return 400, api.error_of(str(error), _INVALID, getattr(error, "param", None)), {}
    if isinstance(error, Busy):
        return 409, api.error_of(str(error), _INVALID, code="busy"), {}
    code = error.code if isinstance(error, Failed) else type(error).__name__
    return 500, api.error_of("the image could not be made", "server_error", code=code), {}
