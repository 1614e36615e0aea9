"""The server of `fluxq demo`: what is open of it, by which names, and how a signal ends it."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

if find_spec("gradio") is None:  # which takes seconds to import, in each process that collects tests
    pytest.skip("needs gradio, of the extra `demo`", allow_module_level=True)
from fluxq.demo.door import hosts_of
from fluxq.demo.page import Demo, DemoOptions
from fluxq.serve.server import bound

UPLOAD = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhello\r\n--x--\r\n'


@pytest.fixture(scope="module")
def demo(plain_checkpoint) -> Iterator[Demo]:
    one, before = Demo(DemoOptions([str(plain_checkpoint("int8"))], port=0, device="cpu")), environment()
    thread = threading.Thread(target=one.run)
    thread.start()
    yield one
    one.end()
    thread.join()
    assert environment() == before


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def answer(port: int, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, b"" if "heartbeat" in path else response.read()
    finally:
        connection.close()


@pytest.mark.slow
def test_only_what_the_page_needs_is_open(demo: Demo) -> None:
    port = urlsplit(demo.address).port or 0
    status, page = answer(port, "/")
    assert status == 200 and b"tiny-int8 - fluxq demo" in page
    kind = "multipart/form-data; boundary=x"
    assert answer(port, "/gradio_api/upload", "POST", UPLOAD, Content_Type=kind)[0] == 404
    for path in (
        "/config",
        "/monitoring",
        "/gradio_api/info",
        "/gradio_api/openapi.json",
        "/gradio_api/proxy=http://127.0.0.1/",
        "/gradio_api/file=http://127.0.0.1/",
        f"/gradio_api/file={quote(__file__)}",
        f"/gradio_api/queue/../file={quote(__file__)}",
        "/gradio_api/run/predict",
        "/gradio_api/component_server",
        "/gradio_api/queue/join/",
    ):
        for method in ("GET", "POST"):
            status, said = answer(port, path, method)
            assert (status, said) == (404, b"there is nothing here\n"), (method, path)
    assert answer(port, "/gradio_api/heartbeat/abc")[0] == 200 and answer(port, "/theme.css")[0] == 200


@pytest.mark.slow
def test_a_loopback_address_is_asked_by_this_machines_names(demo: Demo) -> None:
    port = urlsplit(demo.address).port or 0
    for host in ("localhost", "LOCALHOST:7860", f"127.0.0.1:{port}", "[::1]", "[::1]:80"):
        assert answer(port, "/", Host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "", "127.0.0.1:80:80", "[::1]x"):
        for path, method in (("/", "GET"), ("/gradio_api/queue/join", "POST")):
            status, said = answer(port, path, method, Host=host)
            assert status == 421 and said.count(b"\n") == 1 and b"localhost, 127.0.0.1, [::1]" in said, host
    assert answer(port, "/", Origin=f"http://127.0.0.1:{port}")[0] == 200
    for page in ("http://evil.example", "https://localhost.evil.example:7860", "null", "http://127.0.0.1:3000"):
        assert answer(port, "/gradio_api/queue/join", "POST", Origin=page)[0] == 421, page


def test_what_other_machines_reach_has_names_of_its_own_and_loopback_those_of_this_machine() -> None:
    assert hosts_of("0.0.0.0") == hosts_of("::", "localhost") == ()
    assert hosts_of("127.0.0.2")[-1] == "127.0.0.2" and hosts_of("::1")[-1] == "[::1]"
    assert hosts_of("127.0.1.1", "VM")[-2:] == ("127.0.1.1", "vm") and hosts_of("::ffff:127.0.0.1")
    with bound("LOCALHOST", 0) as taken:
        assert "localhost" in hosts_of(taken.getsockname()[0], "LOCALHOST")


def begin(port: int) -> None:
    """Begin an image of many steps, as the page does."""
    config = json.loads(answer(port, "/")[1].split(b"window.gradio_config = ")[1].split(b";</script>")[0])
    index = next(each["id"] for each in config["dependencies"] if len(each["inputs"]) == 9)
    data = [None, None, "tiny-int8", "x", 0, 100, 192, 192, time.time() * 1000]
    body = json.dumps({"data": data, "fn_index": index, "session_hash": "abc"}).encode()
    status, said = answer(port, "/gradio_api/queue/join", "POST", body, Content_Type="application/json")
    assert status == 200, said


@pytest.mark.long
@pytest.mark.parametrize("state", ["loading", "idle", "page", "image"])
def test_ctrl_c_ends_it_in_a_line(plain_checkpoint, state: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "fluxq", "demo", str(plain_checkpoint("int8")), "--device", "cpu"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "--port", str(port)], **pipes)
    try:
        connection = _when_it_listens(port)
        if state != "loading":
            connection.close()
            answer(port, "/")
        if state in ("page", "image"):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"GET /gradio_api/heartbeat/abc HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(1000)
        if state == "image":
            begin(port)
            time.sleep(2)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        connection.close()
    finally:
        process.kill()
    assert process.returncode == 130 and said.strip() == "interrupted; this command has no output", said


def _when_it_listens(port: int) -> socket.socket:
    for _ in range(1200):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError
