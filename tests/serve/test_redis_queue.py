"""One queue for several servers, in a real Redis: what was accepted is made once, whoever ends meanwhile."""

import io
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from served import ask, events, running, until

pytest.importorskip("fastapi")
redis = pytest.importorskip("redis")
PROGRAM = shutil.which("redis-server")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no redis-server: apt-get install redis-server")

IMAGES = "/v1/images/generations"
PROMPT = "a red three on black"
CALL = {"width": 16, "height": 16, "max_sequence_length": 8, "guidance_scale": 1.0}
LEASE = 2.0
# A server as the command starts it, whose leases are short.
COMMAND = f"""
import fluxq.serve.redis_queue as queue
queue.LEASE = {LEASE}
from fluxq.cli import main
main()
"""


class RealRedis:
    """A Redis on a free port, which keeps what it was told over its own end."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.url = folder, f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis.from_url(self.url)
        self.start()

    def start(self) -> None:
        words = ["--port", str(self.port), "--dir", str(self.folder), "--save", "", "--appendonly", "yes"]
        words += ["--appendfsync", "always", "--loglevel", "warning"]
        self.process = subprocess.Popen([str(PROGRAM), *words], stdout=subprocess.DEVNULL)
        until(self._answers)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            return self.client.ping()
        except redis.ConnectionError:
            return False

    def finished(self) -> list[str]:
        """Entries of the images that were finished, each as often as it was."""
        return [row[b"entry"].decode() for _, row in self.client.xrange("fluxq:news") if row[b"kind"] == b"made"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RealRedis]:
    one = RealRedis(tmp_path)
    yield one
    one.stop()


@pytest.fixture(scope="module")
def int8(plain_checkpoint) -> Path:
    return plain_checkpoint("int8")


@pytest.fixture(scope="module")
def alone(int8: Path) -> Callable[[int, int], bytes]:
    """alone(seed, steps) is the pixels that the checkpoint's pipeline makes by itself."""
    from diffusers import DiffusionPipeline

    from fluxq.eval.images.generate import as_picture, generate_batch

    pipe: Any = DiffusionPipeline.from_pretrained(int8, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return lambda seed, steps: as_picture(
        generate_batch(pipe, [(PROMPT, seed)], CALL | {"num_inference_steps": steps}).images[0]
    ).tobytes()


@pytest.fixture
def start(int8: Path, store: RealRedis) -> Iterator[Callable[..., Any]]:
    """start() starts a server as a process and returns (process, address)."""
    started = []

    def one(*words: str) -> tuple[Any, str]:
        command = [sys.executable, "-c", COMMAND, "serve", str(int8), "--port", "0", "--device", "cpu"]
        command += ["--queue", store.url, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        return process, next(found[1] for line in lines if (found := re.match(r"ready: (http://.*)/v1", line)))

    yield one
    for process in started:
        process.kill()
        process.wait()


def pixels_of(row: dict[str, Any]) -> bytes:
    import base64

    return Image.open(io.BytesIO(base64.b64decode(row["b64_json"]))).tobytes()


@pytest.mark.slow
def test_what_a_killed_server_had_accepted_is_made_by_the_next_one_exactly_once(store, start, alone) -> None:
    process, address = start()
    body = {"prompt": PROMPT, "num_inference_steps": 40}
    asked = [(body | {"seed": seed}, {"Idempotency-Key": f"key {seed}"}) for seed in range(5)]
    with ThreadPoolExecutor(8) as pool:
        first = [pool.submit(ask, address, IMAGES, each, **key) for each, key in asked]
        plain = pool.submit(ask, address, IMAGES, body | {"seed": 9})  # whose client cannot come again
        until(lambda: len(store.finished()) >= 1 and store.client.hlen("fluxq:open") + len(store.finished()) == 6)
        until(lambda: store.client.hlen("fluxq:progress"))
        process.send_signal(signal.SIGKILL)
        broken = [each.exception() for each in (*first, plain)]
    assert sum(each is not None for each in broken) >= 4 and 1 <= len(store.finished()) < 6
    _, address = start()
    for each, key in asked:
        status, _, answer = ask(address, IMAGES, each, **key)
        assert status == 200 and pixels_of(answer["data"][0]) == alone(each["seed"], 40)
    until(lambda: store.client.hlen("fluxq:open") == 0)
    entries = store.finished()
    assert len(entries) == len({*entries}) == 6
    assert store.client.xlen("fluxq:jobs") == store.client.zcard("fluxq:order") == 0
    assert PROMPT.encode() not in b"".join(dumped(store))  # only until it is finished


def dumped(store: RealRedis) -> Iterator[bytes]:
    """All that Redis holds."""
    for name in store.client.keys():
        kind = store.client.type(name)
        if kind == b"hash":
            yield from (each for pair in store.client.hgetall(name).items() for each in pair)
        elif kind == b"stream":
            yield str(store.client.xrange(name)).encode()
        elif kind == b"string":
            yield store.client.get(name)


@pytest.mark.slow
def test_two_servers_share_what_either_has_accepted(store, int8: Path, alone) -> None:
    with running(int8, queue=store.url) as one, running(int8, queue=store.url) as other, ThreadPoolExecutor() as pool:
        asked = [{"prompt": PROMPT, "seed": 10 * at, "n": 2, "num_inference_steps": 6 + at} for at in range(4)]
        answers = [*pool.map(lambda body: ask(one, IMAGES, body), asked)]
        for body, (status, _, answer) in zip(asked, answers, strict=True):
            assert status == 200, answer
            for index, row in enumerate(answer["data"]):
                assert row["seed"] == body["seed"] + index
                assert pixels_of(row) == alone(row["seed"], body["num_inference_steps"])
        made = [int(re.search(r"fluxq_images_total\{.*\} (\d+)", ask(each, "/metrics")[2])[1]) for each in (one, other)]
        assert sum(made) == len(store.finished()) == 8 and min(made) >= 2
        until(lambda: not store.client.keys("fluxq:job:*"))  # what nobody can ask for again is not kept

        body = {"prompt": PROMPT, "seed": 3, "num_inference_steps": 3, "stream": True}
        *steps, last = events(ask(other, IMAGES, body, **{"Idempotency-Key": "a"})[2])
        assert [each["step"] for each in steps] == [1, 2, 3] and pixels_of(last) == alone(3, 3)
        again = ask(one, IMAGES, body | {"stream": False}, **{"Idempotency-Key": "a"})
        assert again[0] == 400 and "another request" in again[2]["error"]["message"]
        (same,) = events(ask(one, IMAGES, body, **{"Idempotency-Key": "a"})[2])
        assert same["b64_json"] == last["b64_json"] and len(store.finished()) == 9
