"""A server with OpenAI's images API in a thread: what tests answer, and a stock diffusers pipeline."""

import base64
import io
import json
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

Make = Callable[[dict[str, Any]], Image.Image]
Reply = tuple[int, dict[str, str], bytes]  # status, headers, content
Answer = Callable[[dict[str, Any]], Reply]


def as_json(image: bytes) -> Reply:
    """Return a reply with an image's file."""
    return 200, {}, json.dumps({"data": [{"b64_json": base64.b64encode(image).decode()}]}).encode()


def bomb(side: int) -> bytes:
    """Return a PNG of a few bytes that says it has so many pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    small = io.BytesIO()
    Image.new("RGB", (8, 8)).save(small, "PNG")
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13)
    return start + head + struct.pack(">I", zlib.crc32(head)) + small.getvalue()[33:]


@contextmanager
def serving(answer: Answer, file: bytes = b"") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve answers to requests for images; yield the address and the list of requests so far, each with its "key".

    file: what any address but the list of models holds. A header `Trickle` sends the content byte by byte.
    """
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"key": self.headers.get("Authorization")})
            self.reply(*answer(body))

        def do_GET(self) -> None:
            self.reply(200, {}, b'{"data": [{"id": "first"}]}' if self.path == "/v1/models" else file)

        def reply(self, code: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if "Trickle" in headers:
                for byte in content[:40]:
                    time.sleep(0.05)
                    self.wfile.write(bytes([byte]))
            with suppress(OSError):
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def images_server(make: Make) -> AbstractContextManager[tuple[str, list[dict[str, Any]]]]:
    """Serve what `make` makes of a request, one at a time."""
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> Reply:
        file = io.BytesIO()
        with lock:
            make(body).save(file, "PNG")
        return as_json(file.getvalue())

    return serving(answer)


def stock_diffusers(folder: str, **changes: Any) -> Make:
    """Return what makes images with a pipeline as diffusers loads it. changes: arguments that replace a request's."""
    import torch
    from diffusers import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)

    def make(body: dict[str, Any]) -> Image.Image:
        width, height = map(int, body["size"].split("x"))
        names = {"model", "n", "size", "response_format", "seed"}
        call = {name: value for name, value in body.items() if name not in names} | changes
        noise = torch.Generator().manual_seed(body["seed"])
        return pipeline(**call, width=width, height=height, generator=noise).images[0]

    return make
