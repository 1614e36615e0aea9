"""Servers that share a queue in a real Redis: the command, killed and started again, and two that share."""

import base64
import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image
from served import ask, events, running, until

from fluxq.cli import cli

pytest.importorskip("fastapi")
from real_redis import RealRedis, needs_redis, real_redis

IMAGES = "/v1/images/generations"
PROMPT = "a red three on black"
# A server as the command starts it, whose leases are short.
COMMAND = """
import fluxq.serve.redis_queue as queue
queue.LEASE = 3.0
from fluxq.cli import main
main()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RealRedis]:
    yield from real_redis(tmp_path)


@pytest.fixture
def start(int8: Path, store: RealRedis) -> Iterator[Callable[[], Any]]:
    """start() starts a server as a process and returns (process, address)."""
    started = []

    def one() -> tuple[Any, str]:
        command = [sys.executable, "-c", COMMAND, "serve", str(int8), "--port", "0", "--device", "cpu"]
        process = subprocess.Popen([*command, "--queue", store.url], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        return process, next(found[1] for line in lines if (found := re.match(r"ready: (http://.*)/v1", line)))

    yield one
    for process in started:
        process.kill()
        process.wait()


def pixels_of(row: dict[str, Any]) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(row["b64_json"]))).tobytes()


@needs_redis
@pytest.mark.long
def test_what_a_killed_server_had_accepted_is_made_by_the_next_one_exactly_once(store, start, alone) -> None:
    process, address = start()
    body = {"prompt": PROMPT, "num_inference_steps": 40}
    asked = [(body | {"seed": seed}, {"Idempotency-Key": f"key {seed}"}) for seed in range(5)]
    with ThreadPoolExecutor(8) as pool:
        first = [pool.submit(ask, address, IMAGES, each, **key) for each, key in asked]
        first.append(pool.submit(ask, address, IMAGES, body | {"seed": 9}))  # its client cannot come again
        until(lambda: store.finished() and store.client.hlen("fluxq:open") + len(store.finished()) == 6)
        until(lambda: store.client.hlen("fluxq:progress"))
        process.send_signal(signal.SIGKILL)
        broken = [each.exception() for each in first]
    assert sum(each is not None for each in broken) >= 4 and 1 <= len(store.finished()) < 6
    _, address = start()
    for each, key in asked:
        status, _, answer = ask(address, IMAGES, each, **key)
        assert status == 200 and pixels_of(answer["data"][0]) == alone(PROMPT, each["seed"], 40).tobytes()
    until(lambda: store.client.hlen("fluxq:open") == 0)
    entries = store.finished()
    assert len(entries) == len({*entries}) == 6
    assert store.client.xlen("fluxq:jobs") == store.client.zcard("fluxq:order") == 0
    assert PROMPT.encode() not in store.dumped()


@needs_redis
@pytest.mark.slow
def test_two_servers_share_what_either_has_accepted(store, int8: Path, alone) -> None:
    with running(int8, queue=store.url) as one, running(int8, queue=store.url) as other, ThreadPoolExecutor() as pool:
        asked = [{"prompt": PROMPT, "seed": 10 * at, "n": 2, "num_inference_steps": 6 + at} for at in range(4)]
        answers = [*pool.map(lambda body: ask(one, IMAGES, body), asked)]
        for body, (status, _, answer) in zip(asked, answers, strict=True):
            assert status == 200, answer
            for index, row in enumerate(answer["data"]):
                assert row["seed"] == body["seed"] + index
                assert pixels_of(row) == alone(PROMPT, row["seed"], body["num_inference_steps"]).tobytes()
        pages = [ask(each, "/metrics")[2] for each in (one, other)]
        made = [int(found[1]) for page in pages if (found := re.search(r"fluxq_images_total\{.*\} (\d+)", page))]
        assert sum(made) == len(store.finished()) == 8 and min(made) >= 2
        until(lambda: not store.client.keys("fluxq:job:*"))  # what nobody can ask for again is not kept

        body, key = {"prompt": PROMPT, "seed": 3, "num_inference_steps": 3, "stream": True}, {"Idempotency-Key": "a"}
        *steps, last = events(ask(other, IMAGES, body, **key)[2])
        assert [each["step"] for each in steps] == [1, 2, 3] and pixels_of(last) == alone(PROMPT, 3, 3).tobytes()
        status, _, answer = ask(one, IMAGES, body | {"seed": 4}, **key)
        assert status == 400 and "another request" in answer["error"]["message"]
        (same,) = events(ask(one, IMAGES, body, **key)[2])
        assert same["b64_json"] == last["b64_json"] and len(store.finished()) == 9


@needs_redis
@pytest.mark.long
def test_a_redis_that_hangs_for_a_while_loses_nothing_and_holds_up_no_probe(store, int8: Path, alone) -> None:
    body = {"prompt": PROMPT, "num_inference_steps": 40}
    with running(int8, queue=store.url) as one, ThreadPoolExecutor() as pool:
        made = [pool.submit(ask, one, IMAGES, body | {"seed": seed}) for seed in range(3)]
        until(lambda: store.client.hlen("fluxq:progress") and store.client.hlen("fluxq:open") == 3)
        store.process.send_signal(signal.SIGSTOP)
        end, statuses, longest = time.monotonic() + 20, [], {"/health": 0.0, "/metrics": 0.0, IMAGES: 0.0}
        try:
            while time.monotonic() < end:
                for path, asked in (("/health", None), ("/metrics", None), (IMAGES, body | {"seed": 9})):
                    began = time.monotonic()
                    status, _, _ = ask(one, path, asked)
                    longest[path] = max(longest[path], time.monotonic() - began)
                    statuses.append((path, status))
                time.sleep(0.1)
        finally:
            store.process.send_signal(signal.SIGCONT)
        assert {*statuses} == {("/health", 200), ("/metrics", 200), (IMAGES, 503)}
        assert longest["/health"] < 1 and longest["/metrics"] < 3 and longest[IMAGES] < 8, longest
        for seed, (status, _, answer) in enumerate(each.result() for each in made):
            assert status == 200 and pixels_of(answer["data"][0]) == alone(PROMPT, seed, 40).tobytes()
        until(lambda: one.is_ready and store.client.hlen("fluxq:open") == 0)
        assert len(store.finished()) == len({*store.finished()}) and not store.client.keys("fluxq:job:*")
        status, _, answer = ask(one, IMAGES, body | {"seed": 5})
        assert status == 200 and pixels_of(answer["data"][0]) == alone(PROMPT, 5, 40).tobytes()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:secret@127.0.0.1:1/0", "no Redis answers at 127.0.0.1:1"),
        ("http://127.0.0.1:1", "write redis://HOST:PORT/DB"),
        ("redis://127.0.0.1:x/0", "write redis://HOST:PORT/DB"),
        ("redis://127.0.0.1:1/0?unknown=1", "write redis://HOST:PORT/DB"),
    ],
)
def test_a_queue_that_cannot_be_reached_ends_with_one_sentence(url: str, said: str, int8: Path) -> None:
    done = CliRunner().invoke(cli, ["serve", str(int8), "--port", "0", "-q", "--device", "cpu", "--queue", url])
    assert done.exit_code == 2 and said in done.output and done.output.count("\n") == 1, done.output
    assert "secret" not in done.output
