"""`fluxq serve --engine ray`: two replicas of the embedded pipeline, one is killed; choice and refusals without any."""

import asyncio
import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hidden
import psutil
import pytest
from click.testing import CliRunner
from PIL import Image
from served import ask, events, until

from fluxq.cli import cli

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("ray.serve", exc_type=ImportError)
from ray.exceptions import ActorDiedError

from fluxq.serve.ray_engine import replicas_in
from fluxq.serve.ray_front import Front, merged
from fluxq.serve.ray_replica import Nearest, State, replicas_wanted

IMAGES = "/v1/images/generations"
PROMPT = "a red three on black"


def pixels(row: dict[str, Any]) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(row["b64_json"]))).tobytes()


class Cluster:
    """The command with two replicas, as a process, and questions to it."""

    def __init__(self, folder: Path, keys: Path) -> None:
        words = [str(folder), "--port", "0", "--device", "cpu", "--engine", "ray", "--replicas", "2"]
        command = [sys.executable, "-m", "fluxq", "serve", *words, "--api-key-file", str(keys)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.address = next(match[1] for line in lines if (match := re.match(r"ready: (http://.*)/v1", line)))
        until(lambda: ask(self.address, "/ready")[2].get("replicas") == 2)

    def make(self, **body: Any) -> tuple[int, Any, Any]:
        return ask(self.address, IMAGES, {"prompt": PROMPT, "num_inference_steps": 3, **body}, "key")

    def figures(self, name: str) -> list[float]:
        """One value of each replica."""
        lines = ask(self.address, "/metrics")[2].splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]

    def replicas(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in below if "ray::ServeReplica" in " ".join(each.cmdline())]


@pytest.fixture(scope="module")
def cluster(int8: Path, tmp_path_factory) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("key", encoding="utf-8")
    one = Cluster(int8, keys)
    yield one
    one.process.terminate()
    one.process.wait(120)


@pytest.mark.long
def test_replicas_share_requests_and_make_the_bytes_of_the_pipeline_alone(cluster: Cluster, alone: Any) -> None:
    with ThreadPoolExecutor() as pool:
        answers = [*pool.map(lambda seed: cluster.make(seed=seed, n=2), (1, 3, 5, 7))]
    assert [status for status, _, _ in answers] == [200] * 4
    for row in (row for _, _, answer in answers for row in answer["data"]):
        assert pixels(row) == alone(PROMPT, row["seed"], 3).tobytes()
    assert sorted(cluster.figures("fluxq_images_total")) == [4, 4]
    status, headers, text = cluster.make(seed=3, stream=True)
    *steps, last = events(text)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert [each["step"] for each in steps] == [1, 2, 3] and pixels(last) == alone(PROMPT, 3, 3).tobytes()


@pytest.mark.slow
def test_what_is_refused_without_replicas_is_refused_with_them(cluster: Cluster) -> None:
    address = cluster.address
    assert ask(address, "/v1/models")[0] == ask(address, IMAGES, {"prompt": "a"})[0] == 401
    assert ask(address, IMAGES, {"prompt": "a" * (9 << 20)}, "key")[0] == 413
    assert ask(address, IMAGES, {"prompt": "a", "seeed": 1}, "key")[0] == 400
    assert ask(address, "/v1/videos/none", None, "key")[0] == ask(address, "/v1/none", None, "key")[0] == 404
    assert ask(address, "/admin/drain", {}, "key")[0] == 401
    assert ask(address, "/health")[0] == 200 and ask(address, "/v1/models", None, "key")[2]["data"][0]["loaded"]


@pytest.mark.slow
def test_an_image_is_let_go_when_its_client_leaves(cluster: Cluster) -> None:
    body = json.dumps({"prompt": PROMPT, "num_inference_steps": 100, "seed": 1})
    command = ["curl", "-s", f"{cluster.address}{IMAGES}", "-H", "Authorization: Bearer key"]
    client = subprocess.Popen([*command, "-H", "Content-Type: application/json", "-d", body])
    until(lambda: sum(cluster.figures("fluxq_queue_images")) == 1)
    client.kill()
    client.wait()
    until(lambda: sum(cluster.figures("fluxq_cancelled_images_total")) == 1)
    assert not sum(cluster.figures("fluxq_queue_images"))


@pytest.mark.long
def test_a_replica_that_is_killed_loses_no_accepted_request_and_a_signal_none(cluster: Cluster, alone: Any) -> None:
    asked: list[dict[str, Any]] = [{"seed": 10 * index} for index in range(8)]
    asked += [{"seed": 200, "n": 3, "stream": True}, {"seed": 300, "n": 3, "stream": True}, {}, {}]
    time.sleep(1.5)  # the front looks at the replicas: it believes in an image whose client has left until then
    with ThreadPoolExecutor(len(asked)) as pool:
        waiting = [pool.submit(cluster.make, num_inference_steps=30, **body) for body in asked]
        until(lambda: sum(cluster.figures("fluxq_queue_images")) + sum(each.done() for each in waiting) >= 12)
        assert all(cluster.figures("fluxq_queue_images")) and not any(each.done() for each in waiting[8:10])
        (victim, other) = cluster.replicas()
        os.kill(victim.pid, signal.SIGKILL)
        answers = [each.result() for each in waiting]
    assert [status for status, _, _ in answers] == [200] * 12
    for body, (_, _, answer) in zip(asked, answers, strict=True):
        rows = answer["data"] if not body.get("stream") else [each for each in events(answer) if "b64_json" in each]
        first = body.get("seed", rows[0]["seed"])
        assert [row["seed"] for row in rows] == [first + index for index in range(body.get("n", 1))]
        assert all(pixels(row) == alone(PROMPT, row["seed"], 30).tobytes() for row in rows)
    until(lambda: ask(cluster.address, "/ready")[2].get("replicas") == 2)
    assert other.is_running() and len(cluster.replicas()) == 2

    with ThreadPoolExecutor() as pool:
        waiting: list[Future[Any]] = [pool.submit(cluster.make, num_inference_steps=30) for _ in range(4)]
        until(lambda: sum(cluster.figures("fluxq_queue_images")) == 4)
        gone = [each.pid for each in cluster.replicas()]
        cluster.process.send_signal(signal.SIGTERM)
        assert [each.result()[0] for each in waiting] == [200] * 4
    said = cluster.process.stderr.read() if cluster.process.stderr else ""
    assert cluster.process.wait(120) == 0 and not said
    until(lambda: not any(psutil.pid_exists(pid) for pid in gone))  # Ray ends them, and they take a moment


class FakeReplies:
    """The replies of a replica: its state, messages, then the end, or its death."""

    def __init__(self, news: list[Any]) -> None:
        self.news = news

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        if not self.news:
            raise StopAsyncIteration
        if isinstance(first := self.news.pop(0), Exception):
            raise first
        return first

    def cancel(self) -> None:
        pass


class FakeHandle:
    """Replicas by name, each with what it replies the next time, and whom the front has asked."""

    def __init__(self, **replies: list[list[Any]]) -> None:
        self.replies, self.asked, self.seeds = replies, list[str](), set[int]()
        self.answer = SimpleNamespace(remote=self.remote)

    def options(self, stream: bool) -> Any:
        return self

    def remote(self, asked: Any, order: list[str]) -> FakeReplies:
        self.asked.append(order[0])
        self.seeds.add(asked.seed)
        return FakeReplies([State(order[0], True, 0.0, 1.0, None), *self.replies[order[0]].pop(0)])


def answered(status: int, content: bytes = b"{}", retry: int | None = None, kind: bytes = b"application/json") -> list:
    headers = [(b"content-type", kind), *([(b"retry-after", b"%d" % retry)] if retry else [])]
    start = {"type": "http.response.start", "status": status, "headers": headers}
    return [start, {"type": "http.response.body", "body": content, "more_body": False}]


def told(handle: FakeHandle, waits: dict[str, float], path: str = IMAGES, **options: Any) -> tuple[int, dict, bytes]:
    """Return the answer of a front with these replicas: status, headers, content."""
    front, sent = Front(handle, **options), list[Any]()
    front.free = {name: time.monotonic() + wait for name, wait in waits.items()}
    bodies = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        await front._forward(scope, receive, send)

    asyncio.run(run())
    first, *rest = sent
    return first["status"], dict(first["headers"]), b"".join(each["body"] for each in rest)


DEATH = ActorDiedError()


def test_the_soonest_free_replica_is_asked_and_others_where_it_refuses() -> None:
    handle = FakeHandle(a=[answered(200, b"a")], b=[answered(429, b"b", 7)], c=[answered(503, b"c", 1)])
    assert told(handle, {"a": 9, "b": 1, "c": 5})[::2] == (200, b"a") and handle.asked == ["b", "c", "a"]
    handle = FakeHandle(a=[answered(429, b"a", 9)], b=[answered(429, b"b", 4)], c=[answered(429, b"c", 6)])
    status, headers, content = told(handle, {"a": 1, "b": 2, "c": 3})
    assert (status, headers[b"retry-after"], content) == (429, b"4", b"b")
    assert told(FakeHandle(), {})[0] == 503
    assert told(FakeHandle(a=[answered(404)], b=[answered(200)]), {"a": 1, "b": 2}, "/v1/videos/x")[0] == 200
    assert told(FakeHandle(a=[answered(404)], b=[answered(200)]), {"a": 1, "b": 2})[0] == 404
    status, _, content = told(FakeHandle(), {"a": 1}, "/v1/videos", keeps_videos=False)
    assert status == 400 and b"fixed number" in content


def test_a_request_whose_replica_ended_is_repeated_and_not_refused_for_lack_of_room(monkeypatch) -> None:
    monkeypatch.setattr("fluxq.serve.ray_front._AGAIN", 0.01)
    handle = FakeHandle(a=[[DEATH]], b=[answered(429, b"", 60), answered(429, b"", 60), answered(200, b"b")])
    assert told(handle, {"a": 1, "b": 2})[::2] == (200, b"b") and handle.asked == ["a", "b", "b", "b"]
    assert len(handle.seeds) == 1
    handle = FakeHandle(**{name: [[DEATH]] for name in "abcd"})
    assert told(handle, dict.fromkeys("abcd", 0.0))[0] == 503 and len(handle.asked) == 3


def test_a_stream_that_is_repeated_tells_of_each_image_once() -> None:
    done = [b'event: image_generation.completed\ndata: {"seed": %d}\n\n' % seed for seed in (5, 6)]
    start, end = answered(200, b"", kind=b"text/event-stream")
    bodies = [{"type": "http.response.body", "body": each, "more_body": True} for each in done]
    handle = FakeHandle(a=[[start, bodies[0], DEATH]], b=[[start, *bodies, end]])
    assert told(handle, {"a": 1, "b": 2})[::2] == (200, b"".join(done))
    handle = FakeHandle(**{name: [[start, bodies[0], DEATH]] for name in "abc"})
    status, _, content = told(handle, dict.fromkeys("abc", 0.0))
    *rest, last = events(content.decode())
    assert status == 200 and [each["seed"] for each in rest] == [5]
    assert last["status"] == 503 and "3 replicas ended" in last["error"]["message"]


def test_the_router_takes_the_replicas_in_the_order_of_the_call() -> None:
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]
    asked = SimpleNamespace(kwargs={"order": ["c", "gone", "a"]})
    chosen = asyncio.run(Nearest.choose_replicas(None, replicas, asked))  # pyright: ignore[reportArgumentType]
    assert [[each.replica_id.unique_id for each in rank] for rank in chosen] == [["c"], ["a"], ["b"]]


@pytest.mark.parametrize(("seconds", "count"), [((), 1), ((0, 0), 1), ((15, 10), 2), ((45, 30, 6), 5)])
def test_the_number_of_replicas_follows_predicted_seconds(seconds: tuple[float, ...], count: int) -> None:
    told = SimpleNamespace(aggregated_metrics={"backlog": dict(enumerate(seconds))} if seconds else None)
    assert replicas_wanted(told)[0] == count


def test_figures_of_replicas_are_one_page() -> None:
    page = b'# HELP x_total Things\n# TYPE x_total counter\nx_total{y="z"} %d\n'
    lines = merged([("a", page % 1), ("b", page % 2)]).decode().splitlines()
    assert lines[:2] == ["# HELP x_total Things", "# TYPE x_total counter"]
    assert sorted(lines[2:]) == ['x_total{replica="a",y="z"} 1.0', 'x_total{replica="b",y="z"} 2.0']


@pytest.mark.parametrize(("text", "bounds"), [("1", (1, 1)), ("2", (2, 2)), ("1-4", (1, 4)), ("3-3", (3, 3))])
def test_replicas_are_a_number_or_bounds(text: str, bounds: tuple[int, int]) -> None:
    assert replicas_in(text) == bounds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--replicas", "2"), "give that too"),
        *[(("--engine", "ray", "--replicas", text), f"--replicas {text}: write") for text in ("0", "4-1", "x", "1-")],
        (("--engine", "ray", "--in-process"), "--in-process: not with --engine ray"),
        (("--engine", "ray", "--queue", "redis://localhost"), "--queue: not with"),
        (("--engine", "ray", "--root", "."), "--root: not with"),
        (("--engine", "ray", "--admin-key-file", "x"), "--admin-key-file: not with"),
        (("--engine", "ray", "--device", "cuda:1"), "--device cuda:1"),
        (("--engine", "ray", "--port", "TAKEN"), "is in use: give another --port"),
        (("--engine", "ray"), "no Ray cluster answers at RAY_ADDRESS 127.0.0.1:1"),
        (("--engine", "ray", "--host", "0.0.0.0"), "--api-key-file"),
    ],
)
def test_what_cannot_be_with_replicas_ends_with_one_sentence(words, said: str, int8: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in words]
        free = [] if "--port" in words else ["--port", "0"]
        done = CliRunner().invoke(cli, ["serve", str(int8), *words, *free, "-q"])
    assert done.exit_code == 2 and said in done.output and done.output.count("\n") == 1, done.output


def test_the_address_of_rays_client_is_refused(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    done = CliRunner().invoke(cli, ["serve", str(int8), "--engine", "ray", "--port", "0", "-q"])
    assert done.exit_code == 2 and "ray://head:10001: give HOST:PORT" in done.output, done.output


@pytest.mark.slow
def test_without_ray_the_engine_names_its_package(int8: Path) -> None:
    code = "from fluxq.cli import main; import sys; sys.argv = ['fluxq', *sys.argv[1:]]; main()"
    done = hidden.run(code, "serve", str(int8), "--engine", "ray", "--port", "0", without=["ray"])
    assert done.returncode == 2 and 'pip install "fluxq[ray]"' in done.stderr and "Traceback" not in done.stderr
