"""`fluxq demo`: the page over `Pairs`, and its server.

Nothing of it leaves this machine or comes from elsewhere: no share link, no telemetry, no history in the browser, fonts
of the system, and a policy that keeps the browser from asking other servers. Images that were shown are files of a
folder that ends with the server.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, isqrt
from typing import Any

from PIL import Image
from torch import Tensor

from fluxq.base.console import first_line, logger
from fluxq.base.devices import machine_name
from fluxq.demo.door import Door, hosts_of
from fluxq.demo.pairs import SIXTEEN_BIT, DemoOptions, Pair, Pairs
from fluxq.eval.images.generate import as_picture
from fluxq.serve.api import Limits
from fluxq.serve.app import UNTRACED
from fluxq.serve.orders import Facts
from fluxq.serve.server import Uvicorn, address_of, bound

_SHOWN = 512  # pixels of the shorter side up to which images are shown in larger pixels
_ENVIRONMENT = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "True"}  # gradio sets the second too
_FONTS: Any = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
_LARGEST = 4096  # pixels of a side in larger pixels, and of one that is asked for where the limit is no larger square
_LARGEST_SEED = (1 << 53) - 1  # browsers hold larger ones inexactly
_FAREWELL = 1  # seconds for pages that are open, which never end their connection
_OLDER = " The images are those of the request before."
_EXPECTED = (ValueError, RuntimeError, OSError, MemoryError)
# In the browser, in place of the last input: milliseconds, by a clock that nobody sets back.
_NOW = "(...all) => [...all.slice(0, -1), performance.timeOrigin + performance.now()]"
_CSS = "footer {display: none !important} .problem {color: var(--error-text-color); font-weight: 600}"


class Demo:
    """The page, bound to its port, with all models loaded; `run` serves until a signal or `end` ends it."""

    def __init__(self, options: DemoOptions) -> None:
        """Raise ValueError, FileNotFoundError or OSError for what cannot work; see `Pairs`."""
        self._socket = bound(options.host, options.port)
        self._hosts = hosts_of(self._socket.getsockname()[0], options.host)
        if not self._hosts:
            logger.warning("--host %s: whoever reaches this address can make images; there are no keys", options.host)
        try:
            self.pairs = Pairs(options)
        except BaseException:
            self._socket.close()
            raise
        self._uvicorn: Uvicorn | None = None

    @property
    def address(self) -> str:
        """Address, as browsers have it."""
        return f"{address_of(self._socket)}/"

    def run(self) -> None:
        """Serve the page until a signal ends it; raise KeyboardInterrupt where that was Ctrl-C."""
        place = os.path.realpath(tempfile.gettempdir())
        with (
            tempfile.TemporaryDirectory(prefix="fluxq-demo-", dir=place) as folder,
            _settings(GRADIO_TEMP_DIR=folder),
        ):
            app = Door(application(self.pairs), folder, self._hosts)
            self._uvicorn = _Server(app, self.pairs)
            with self._socket:
                asyncio.run(self._uvicorn.serve(sockets=[self._socket]))
        if self._uvicorn.is_interrupted:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Let it end as a signal does."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True


class _Server(Uvicorn):
    """uvicorn, which also lets an image go that is being made when it ends, and then pages that are open."""

    def __init__(self, app: Any, pairs: Pairs) -> None:
        super().__init__(app, ws="none")
        self.pairs, self.is_interrupted = pairs, False

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.is_interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        self.pairs.end()
        asyncio.get_running_loop().call_later(_FAREWELL, self.hang_up)
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
    first = pairs.facts[names[0]]
    bounds = _bounds(pairs.limits, first)
    with gr.Blocks(
        title=f"{', '.join(names)} - fluxq demo", analytics_enabled=False, delete_cache=(3600, 86400)
    ) as blocks:
        shown, visit, clock = gr.State(None), gr.State(_Visit()), gr.Number(visible=False)
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                prompt = gr.Textbox(label="Prompt", placeholder="what the image shows", lines=3, submit_btn=False)
                name = gr.Radio(names, value=names[0], label="Checkpoint")
                with gr.Row():
                    seed = _number("seed", 0, bounds)
                    steps = _number("steps", first.defaults["num_inference_steps"], bounds)
                with gr.Row():
                    width, height = (
                        _number(each, first.defaults[each], bounds, first.unit) for each in ("width", "height")
                    )
                with gr.Row():
                    button = gr.Button("Make both images", variant="primary", min_width=160)
                    stop = gr.Button("Stop", min_width=80)
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

        def make(
            shown: tuple[Any, ...] | None,
            visit: _Visit,
            name: str,
            prompt: str,
            *numbers_and_time: Any,
            progress: Any = gr.Progress(),  # noqa: B008
        ) -> tuple[Any, ...]:
            *numbers, at = numbers_and_time
            try:
                _require_bounds(bounds, *numbers)
                pair = pairs.make(name, prompt, *numbers, tell=_telling(progress), stops=lambda: visit.stopped >= at)
            except _EXPECTED as error:
                return _sentence(error) + _OLDER * bool(shown), *[gr.skip()] * (len(outputs) - 1)
            return "", *_contents(gr, pair, machine_name(pairs.device), pairs.device), _collect_inputs(pair)

        def switch(
            shown: tuple[Any, ...] | None,
            visit: _Visit,
            name: str,
            at: float,
            progress: Any = gr.Progress(),  # noqa: B008
        ) -> Any:
            return make(shown, visit, name, *shown, at, progress=progress) if shown else gr.skip()

        def end(visit: _Visit, at: float) -> None:
            visit.stopped = at

        how: dict[str, Any] = {"outputs": outputs, "concurrency_id": "worker", "api_visibility": "private", "js": _NOW}
        how["show_progress_on"] = images
        begins = [button.click, prompt.submit]
        # Before the others: browsers do one after the other, and this one in themselves.
        gr.on([*begins, name.change], None, outputs=problem, js="() => ''", api_visibility="private")
        gr.on(begins, make, [shown, visit, name, prompt, seed, steps, width, height, clock], **how)
        name.change(switch, [shown, visit, name, clock], trigger_mode="always_last", **how)
        stop.click(
            end, [visit, clock], js=_NOW, concurrency_limit=None, api_visibility="private", show_progress="hidden"
        )
    return blocks.queue(max_size=16, default_concurrency_limit=1)


@dataclass
class _Visit:
    """A visitor. stopped: when the button was pressed last, by the clock of the browser; what began before ends."""

    stopped: float = 0


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


def _collect_inputs(pair: Pair) -> tuple[Any, ...]:
    """Return what was asked, for the same of another checkpoint."""
    order = pair.order
    return order.prompt, order.seed, int(order.call["num_inference_steps"]), *order.size


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _bounds(limits: Limits, facts: Facts) -> dict[str, tuple[int, int]]:
    """Return field -> least and largest value."""
    side = facts.unit, min(limits.pixels, max(_LARGEST, isqrt(limits.pixels)))
    return {"seed": (0, _LARGEST_SEED), "steps": (1, limits.steps), "width": side, "height": side}


def _number(name: str, value: int, bounds: Mapping[str, tuple[int, int]], step: int = 1) -> Any:
    import gradio as gr

    least, most = bounds[name]
    how: dict[str, Any] = {"minimum": least, "maximum": most, "step": step, "precision": 0, "min_width": 80}
    field: Any = gr.Number(min(value, most), label=name.title(), **how)
    field.preprocess = lambda value: value  # gradio's would round it
    return field


def _require_bounds(bounds: Mapping[str, tuple[int, int]], *values: Any) -> None:
    """Raise ValueError for a field that is not empty and no whole number, or out of its bounds."""
    for (name, (least, most)), value in zip(bounds.items(), values, strict=True):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{name} is {str(value)[:40]}, expected a whole number")
        if value is not None and not least <= value <= most:
            raise ValueError(
                f"{name} is {value}, {least} at least" if value < least else f"{name} is {value}, {most} at most"
            )


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
