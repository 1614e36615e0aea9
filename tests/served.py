"""A server of `fluxq serve` in this process, on a free port, and questions to it."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

TIMEOUT = 240.0  # seconds for all that is waited for, on a machine that does much else


@contextmanager
def running(*outputs: object, **options: Any) -> Iterator[Any]:
    """Serve these checkpoints on the CPU; yield the `Server` once it is ready."""
    from fluxq.serve.server import ServeOptions, Server

    options = {"in_process": True, "device": "cpu", **options}
    server = Server(ServeOptions([*map(str, outputs)], port=0, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.is_ready or not thread.is_alive())
        yield server
    finally:
        server.end()
        thread.join(TIMEOUT)


def until(holds: Any, seconds: float = TIMEOUT) -> None:
    """Wait until something holds; TimeoutError if it never does."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("it never came to hold")
        time.sleep(0.005)


def ask(
    server: Any, path: str, body: object = None, key: str = "", method: str | None = None, **headers: str
) -> tuple[int, Message, Any]:
    """Ask a server, or an address; return status, headers and what the answer's JSON says, else its text."""
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers | ({"Authorization": f"Bearer {key}"} if key else {})
    request = Request(f"{getattr(server, 'address', server)}{path}", content, headers, method=method)
    try:
        with urlopen(request, timeout=TIMEOUT) as answer:
            status, said, text = answer.status, answer.headers, answer.read().decode()
    except HTTPError as error:
        with error:
            status, said, text = error.code, error.headers, error.read().decode()
    try:
        return status, said, json.loads(text)
    except ValueError:
        return status, said, text


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
