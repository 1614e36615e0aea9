"""A server with OpenAI's images API in a thread: what tests answer, and a stock diffusers pipeline."""

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

Make = Callable[[dict[str, Any]], Image.Image]


@contextmanager
def images_server(make: Make) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve what `make` makes of a request, one at a time; yield the address and the list of requests so far."""
    asked: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "first"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            file = io.BytesIO()
            with lock:
                make(body).save(file, "PNG")
            self.reply({"data": [{"b64_json": base64.b64encode(file.getvalue()).decode()}]})

        def reply(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
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
