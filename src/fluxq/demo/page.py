"""`fluxq demo`: the page over `Pairs`, and its server.

Nothing of it leaves this machine or comes from elsewhere: no share link, no telemetry, no history in the browser, fonts
of the system, and a policy that keeps the browser from asking other servers. Images that were shown are files of a
folder that ends with the server.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from PIL import Image
from torch import Tensor

from fluxq.base.console import first_line, logger
from fluxq.base.devices import machine_name
from fluxq.demo.pairs import SIXTEEN_BIT, Pair, Pairs
from fluxq.eval.images.generate import as_picture
from fluxq.serve.api import Limits
from fluxq.serve.app import UNTRACED
from fluxq.serve.server import Uvicorn, address_of, bound, is_loopback

_SHOWN = 512  # pixels of the shorter side up to which images are shown in larger pixels
_ENVIRONMENT = {"GRADIO_ANALYTICS_ENABLED": "False"}
_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"
_FONTS: Any = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
_LARGEST = 4096  # pixels of a side in larger pixels
_FAREWELL = 2  # seconds for pages that are open, which never end their connection
_EXPECTED = (ValueError, RuntimeError, OSError, MemoryError)
_CSS = "footer {display: none !important} .problem {color: var(--error-text-color); font-weight: 600}"


@dataclass(frozen=True)
class DemoOptions:
    """Options of `fluxq demo`, as the command has them."""

    outputs: Sequence[str]
    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 7860
    device: str = "auto"
    dtype: str = "bfloat16"
    max_memory: int | None = None
    max_steps: int = 100
    max_pixels: int = 1 << 22
    allow_unrecorded: bool = False


class Demo:
    """The page, bound to its port, with all models loaded; `run` serves until a signal or `end` ends it."""

    def __init__(self, options: DemoOptions) -> None:
        """Raise ValueError, FileNotFoundError or OSError for what cannot work; see `Pairs`."""
        self._socket = bound(options.host, options.port)
        if not is_loopback(options.host):
            logger.warning("--host %s: whoever reaches this address can make images; there are no keys", options.host)
        try:
            limits = Limits(pixels=options.max_pixels, steps=options.max_steps, pixel_steps=float("inf"))
            self.pairs = Pairs(
                options.outputs,
                options.model,
                device=options.device,
                dtype=options.dtype,
                max_memory=options.max_memory,
                limits=limits,
                allow_unrecorded=options.allow_unrecorded,
            )
        except BaseException:
            self._socket.close()
            raise
        self._uvicorn: Uvicorn | None = None

    @property
    def address(self) -> str:
        """Address, as browsers have it."""
        return f"{address_of(self._socket)}/"

    def run(self) -> None:
        """Serve the page."""
        import uvicorn

        with tempfile.TemporaryDirectory(prefix="fluxq-demo-") as folder, _settings(GRADIO_TEMP_DIR=folder):
            app = _Alone(application(self.pairs))
            how: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
            self._uvicorn = _Server(uvicorn.Config(app, timeout_graceful_shutdown=_FAREWELL, **how))
            self._uvicorn.pairs = self.pairs
            try:
                asyncio.run(self._uvicorn.serve(sockets=[self._socket]))
            finally:
                self._socket.close()

    def end(self) -> None:
        """Let it end as a signal does."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True


class _Server(Uvicorn):
    """uvicorn, which also lets an image go that is being made when it ends."""

    pairs: Pairs

    async def shutdown(self, sockets: Any = None) -> None:
        self.pairs.end()
        await super().shutdown(sockets)


def application(pairs: Pairs) -> Any:
    """Return the page as an ASGI application."""
    import gradio
    from fastapi import FastAPI

    theme = gradio.themes.Default(**_FONTS)
    return gradio.mount_gradio_app(
        FastAPI(openapi_url=None, telemetry=UNTRACED),
        page(pairs),
        "/",
        theme=theme,
        css=_CSS,
        footer_links=[],
        run_history=False,
        max_file_size=1,
        app_kwargs={"telemetry": UNTRACED},
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
    )


def page(pairs: Pairs) -> Any:
    """Return the page, as gradio's Blocks."""
    import gradio as gr

    names = [*pairs.facts]
    usual = pairs.facts[names[0]].defaults
    with gr.Blocks(title="fluxq demo", analytics_enabled=False, delete_cache=(3600, 86400)) as blocks:
        shown = gr.State(None)
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                prompt = gr.Textbox(label="Prompt", placeholder="what the image shows", lines=3, submit_btn=False)
                name = gr.Radio(names, value=names[0], label="Checkpoint")
                with gr.Row():
                    seed = _number("Seed", 0)
                    steps = _number("Steps", usual["num_inference_steps"])
                with gr.Row():
                    width, height = (_number(each.title(), usual[each]) for each in ("width", "height"))
                button = gr.Button("Make both images", variant="primary")
                problem = gr.Markdown(elem_id="problem", elem_classes="problem")
            with gr.Column(scale=3):
                with gr.Row():
                    images = gr.ImageSlider(
                        label=f"{SIXTEEN_BIT} | checkpoint",
                        format="png",
                        type="pil",
                        elem_id="images",
                        interactive=False,
                        max_height=700,
                    )
                    errors = gr.Image(
                        label="Error map",
                        format="png",
                        type="pil",
                        elem_id="errors",
                        interactive=False,
                        buttons=["download", "fullscreen"],
                    )
                figures = gr.Markdown(elem_id="figures")
        outputs = [problem, images, errors, figures, shown]

        def make(name: str, *asked: Any, progress: Any = gr.Progress()) -> tuple[Any, ...]:  # noqa: B008
            try:
                pair = pairs.make(name, *asked, tell=_telling(progress))
            except _EXPECTED as error:
                return _sentence(error), *[gr.skip()] * (len(outputs) - 1)
            return "", *_contents(gr, pair, machine_name(pairs.device), pairs.device), _asked(pair)

        def switch(name: str, shown: tuple[Any, ...] | None, progress: Any = gr.Progress()) -> Any:  # noqa: B008
            return make(name, *shown, progress=progress) if shown else gr.skip()

        how: dict[str, Any] = {"outputs": outputs, "concurrency_id": "worker", "api_visibility": "private"}
        how["show_progress_on"] = images
        gr.on([button.click, prompt.submit], make, [name, prompt, seed, steps, width, height], **how)
        name.change(switch, [name, shown], trigger_mode="always_last", **how)
    return blocks.queue(max_size=16, default_concurrency_limit=1)


def figures_of(pair: Pair, machine: str, device: str) -> str:
    """Return what the numbers say, in Markdown. machine: name of what computed; device: in torch's words."""
    order, name = pair.order, pair.order.model
    width, height = order.size
    rows = []
    for each, side in ((SIXTEEN_BIT, pair.original), (name, pair.quantized)):
        step = _time(side.stepping / (order.steps - 1)) if side.stepping else ""
        rows.append(f"| {each} | {_time(side.seconds)} | {step} |")
    speed = "" if pair.speed is None else f"**{pair.speed:.2f} times as fast as {SIXTEEN_BIT}**, after the first step; "
    note = " On a CPU most formats are computed by reference code: this says nothing of a GPU." * (device == "cpu")
    same = " The images are the same bytes." * (pair.psnr == float("inf"))
    return "\n".join(
        [
            f"**PSNR {pair.psnr:.1f} dB, latent SQNR {pair.latent_sqnr:.1f} dB**, largest difference "
            f"{int(pair.difference.max())} of 255.{same} Seed {order.seed}, {order.steps} steps, {width} × {height}.",
            "",
            "| | computing time | a step after the first |",
            "|---|---|---|",
            *rows,
            "",
            f"{speed}each side was measured once, on this machine ({machine}).{note}",
            "",
            "Error map: |16 bit − checkpoint|, black is equal; brightness is log₂(1 + difference) / 8.",
        ]
    )


def _contents(gr: Any, pair: Pair, machine: str, device: str) -> tuple[Any, ...]:
    """Return images, error map and figures of a pair."""
    images = gr.ImageSlider(
        (_larger(pair.original.image), _larger(pair.quantized.image)), label=f"{SIXTEEN_BIT} | {pair.order.model}"
    )
    return images, _larger(pair.error_map), figures_of(pair, machine, device)


def _asked(pair: Pair) -> tuple[Any, ...]:
    """Return what was asked, for the same of another checkpoint."""
    order = pair.order
    return order.prompt, order.seed, int(order.call["num_inference_steps"]), *order.size


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _number(label: str, value: int) -> Any:
    import gradio as gr

    return gr.Number(value, label=label, precision=0, min_width=80)


def _sentence(error: BaseException) -> str:
    """Return an error for the page, in its fields' names."""
    text = first_line(error).replace("num_inference_steps", "steps")
    return f"{text[:1].upper()}{text[1:]}." if text else f"{type(error).__name__}."


def _telling(progress: Any) -> Callable[[str, int, int], None]:
    """Return what shows each step; the worker tells of it in a thread without gradio's context."""
    context = contextvars.copy_context()
    return lambda side, step, steps: context.run(progress, (step, steps), desc=side, unit="steps")


def _larger(image: Tensor) -> Image.Image:
    """Return an image as a picture; a small one in larger pixels, which browsers would blur."""
    picture = as_picture(image)
    factor = ceil(min(_SHOWN / min(picture.size), max(1, _LARGEST / max(picture.size))))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


class _Alone:
    """An ASGI application whose pages may ask no other server."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", _POLICY.encode())]
            await send(message)

        await self.app(scope, receive, answer)


@contextmanager
def _settings(**more: str) -> Iterator[None]:
    """Set what gradio reads from the environment alone, while the block lasts."""
    names = _ENVIRONMENT | more
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
