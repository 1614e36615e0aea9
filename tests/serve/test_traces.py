"""Spans of a server with the embedded pipeline: whose they are, what they tell, and what they must not."""

from pathlib import Path
from typing import Any

import pytest
from served import ask, running, until

from fluxq.serve import traces

pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk, of the extra `test`")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

IMAGES = "/v1/images/generations"
PROMPT = "a red three on black"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch) -> Any:
    from opentelemetry import trace

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.mark.slow
def test_an_image_is_below_the_client_s_span_and_its_parts_are_its_time(exporter: Any, plain_checkpoint) -> None:
    int8: Path = plain_checkpoint("int8")
    with running(int8, max_steps=10) as server:
        body = {"prompt": PROMPT, "seed": 7, "num_inference_steps": 3, "n": 2}
        status, _, answer = ask(server, IMAGES, body, traceparent=f"00-{TRACE}-{PARENT}-01")
        assert status == 200
        assert ask(server, IMAGES, body | {"num_inference_steps": 11})[0] == 400
        assert ask(server, "/v1/nothing", {"prompt": PROMPT})[0] == 404
        assert ask(server, "/health")[0] == 200
        until(lambda: len(exporter.get_finished_spans()) >= 13)
    spans = exporter.get_finished_spans()
    assert len(spans) == 13
    request, refused, nothing = (each for each in spans if each.kind.name == "SERVER")
    assert (request.name, request.attributes["http.response.status_code"]) == (f"POST {IMAGES}", 200)
    assert (refused.attributes["http.response.status_code"], refused.parent) == (400, None)
    assert (nothing.name, nothing.attributes["http.response.status_code"]) == ("POST", 404)
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == PARENT

    images = sorted((each for each in spans if each.name == "image"), key=lambda each: each.start_time)
    assert [each.attributes["gen_ai.request.seed"] for each in images] == [7, 8]
    for image, row in zip(images, answer["data"], strict=True):
        assert image.parent.span_id == request.context.span_id and image.attributes["gen_ai.request.model"] == int8.name
        parts = {each.name: each for each in spans if each.parent and each.parent.span_id == image.context.span_id}
        assert [*parts] == ["queue", "encode", "steps", "decode"]
        assert parts["steps"].attributes["fluxq.steps_computed"] == 3
        assert parts["encode"].attributes["fluxq.cached"] == (row["seed"] == 8)
        milliseconds = {name: (each.end_time - each.start_time) / 1e6 for name, each in parts.items()}
        computed = sum(milliseconds[name] for name in ("encode", "steps", "decode"))
        paused = parts["steps"].attributes["fluxq.paused_ms"]
        assert computed - paused == pytest.approx(row["compute_ms"], rel=0.05, abs=5)  # news come late
        assert image.start_time <= parts["queue"].start_time and parts["decode"].end_time == image.end_time
    assert PROMPT not in "".join(each.to_json() for each in spans) and "red" not in str([s.to_json() for s in spans])


@pytest.mark.slow
def test_an_image_that_is_lost_ends_its_span(exporter: Any, plain_checkpoint, monkeypatch) -> None:
    with running(plain_checkpoint("int8")) as server:

        def fail(*_: Any) -> None:
            raise OSError(f"a disk, at {PROMPT}")

        monkeypatch.setattr(server.dispatcher.hands._worker, "run", fail)
        assert ask(server, IMAGES, {"prompt": PROMPT})[0] == 500
        until(lambda: len(exporter.get_finished_spans()) == 2)
    image, request = exporter.get_finished_spans()
    assert image.name == "image" and image.attributes["error.type"] == "OSError"
    assert {image.status.status_code.name, request.status.status_code.name} == {"ERROR"}
    assert PROMPT not in image.to_json() + request.to_json()


@pytest.mark.parametrize("kind", ["nobody listens", "endpoint", "no package", "no exporter"])
def test_spans_are_made_where_something_receives_them(kind: str, monkeypatch, caplog) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "" if kind == "nobody listens" else "http://127.0.0.1:9")
    if kind == "no package":
        monkeypatch.setattr(traces, "find_spec", lambda name: None)

    def find(_: str) -> Any:
        if kind == "no exporter":
            raise ImportError
        return InMemorySpanExporter()

    monkeypatch.setattr(traces, "_exporter", find)
    provider = traces.provider_here()
    assert (provider is not None) == (kind == "endpoint")
    assert ("OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text) == kind.startswith("no ")
    if provider is not None:
        assert provider.resource.attributes["service.name"] == "fluxq"
        provider.shutdown()
