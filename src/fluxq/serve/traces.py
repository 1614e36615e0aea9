"""Spans for OpenTelemetry: a request, and where the time of each of its images went. Prompts are in none of them.

    POST /v1/images/generations    its parent is the client's span, by the header `traceparent` (W3C Trace Context)
      image                        from the queue to the picture
        queue                      until it first runs
        load                       the checkpoint, where it was not in memory
        encode                     the prompt
        steps                      from the first to the last; others may have run between them
        decode                     latents to pixels

Spans are made where the packages are installed and something receives them: an SDK that is set up in this process, or
the address in OTEL_EXPORTER_OTLP_ENDPOINT. Else nothing of this runs.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fluxq.base.console import logger
from fluxq.serve.orders import Order, Quantum

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_CURE = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_LEAST = 0.001  # seconds, of a checkpoint that was loaded: looking for one that is there takes less
_NS = 1_000_000_000


def provider_here() -> Any:
    """Return the tracer provider of this process, one for the endpoint of the environment, or None."""
    endpoint = next((name for name in _ENDPOINTS if os.environ.get(name)), "")
    if find_spec("opentelemetry") is None:
        if endpoint:
            logger.warning("%s is set, and no spans are sent without the packages: %s", endpoint, _CURE)
        return None
    from opentelemetry import trace

    present = trace.get_tracer_provider()
    if not isinstance(present, trace.ProxyTracerProvider):
        return present
    return _provider_for(endpoint) if endpoint else None


def _provider_for(endpoint: str) -> Any:
    kinds = ("grpc", "http") if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc" else ("http", "grpc")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        kinds = ()
    for kind in kinds:
        try:
            exporter = _exporter(kind)
        except ImportError:
            continue
        service = os.environ.get("OTEL_SERVICE_NAME") or "fluxq"
        provider = TracerProvider(resource=Resource.create({"service.name": service}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return provider
    logger.warning("%s is set, and no spans are sent without the packages: %s", endpoint, _CURE)
    return None


def _exporter(kind: str) -> Any:
    return importlib.import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter").OTLPSpanExporter()


class Traced:
    """An ASGI application whose POST requests are spans."""

    def __init__(self, app: Any, tracer: Any) -> None:
        self.app, self.tracer = app, tracer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        from starlette.datastructures import Headers

        parent = TraceContextTextMapPropagator().extract(Headers(scope=scope))
        how = {"kind": SpanKind.SERVER, "record_exception": False}  # errors may quote prompts
        with self.tracer.start_as_current_span("POST", parent, **how, set_status_on_exception=False) as span:

            async def answer(message: Any) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            try:
                await self.app(scope, receive, answer)
            finally:
                route = getattr(scope.get("route"), "path", "")  # a path of nobody's would be as the client wrote it
                span.update_name(f"POST {route}".strip())
                span.set_attributes({"http.request.method": "POST", "http.route": route})


@dataclass
class _Open:
    """An image's span. arrived, first, last: ns: when it came, its first step began, its last one ended."""

    span: Any
    arrived: int
    first: int = 0
    last: int = 0
    ran: int = 0


class Spans:
    """Spans of the images of a request, below the span that is current; none without a tracer."""

    def __init__(self, tracer: Any = None, orders: Iterable[Order] = ()) -> None:
        self.tracer, now = tracer, time.time_ns()
        self._open = {order.number: _Open(self._begin(order, now), now) for order in orders if tracer is not None}

    def quantum(self, order: Order, quantum: Quantum) -> None:
        """Take note of a quantum that has just ended."""
        if (image := self._open.get(order.number)) is None:
            return
        now = time.time_ns()
        start = now - _ns(quantum.seconds)
        if not image.first:
            loaded = start + _ns(quantum.loading)
            image.first = loaded + _ns(quantum.encoding)
            self._part(image, "queue", image.arrived, start)
            if quantum.loading > _LEAST:
                self._part(image, "load", start, loaded)
            if quantum.encoding:
                self._part(image, "encode", loaded, image.first, {"fluxq.cached": quantum.cached})
            start = image.first
        if quantum.picture is None:
            image.last, image.ran = now, image.ran + now - start
            return
        paused = max(0, image.last - image.first - image.ran)
        counts = {"fluxq.steps": quantum.steps, "fluxq.steps_computed": quantum.picture.computed}
        self._part(image, "steps", image.first, image.last, counts | {"fluxq.paused_ms": paused // 1_000_000})
        self._part(image, "decode", start, now)
        image.span.end(now)
        del self._open[order.number]

    def ended(self, order: Order, error: BaseException | None = None) -> None:
        """End the span of an image that was not made; error: None where its client left."""
        if (image := self._open.pop(order.number, None)) is None:
            return
        from opentelemetry.trace import Status, StatusCode

        if error is not None:
            image.span.set_status(Status(StatusCode.ERROR))
        image.span.set_attribute("error.type", "cancelled" if error is None else type(error).__name__)
        image.span.end()

    def _begin(self, order: Order, now: int) -> Any:
        width, height = order.size
        about = {"gen_ai.request.model": order.model, "gen_ai.request.seed": order.seed, "fluxq.steps": order.steps}
        about |= {"fluxq.width": width, "fluxq.height": height, "fluxq.frames": order.frames}
        return self.tracer.start_span("image", start_time=now, attributes=about)

    def _part(self, image: _Open, name: str, start: int, end: int, about: Mapping[str, Any] | None = None) -> None:
        from opentelemetry.trace import set_span_in_context

        start = max(start, image.arrived)  # the clock of spans is the system's, which may be set
        part = self.tracer.start_span(name, set_span_in_context(image.span), start_time=start, attributes=about)
        part.end(max(start, end))


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
