"""Commands that let others ask for images: serve, demo."""

from __future__ import annotations

from typing import Any

import click

from fluxq.base.extras import CURE_OF_RAY
from fluxq.commands.options import (
    DTYPES,
    FOLDER,
    PATH,
    STEPS,
    bytes_option,
    device_option,
    finite_in,
    option_group,
)
from fluxq.commands.session import Session, command

_seconds = click.FloatRange(min=0, min_open=True)
_limits_of_image = option_group(
    click.option("--max-steps", type=STEPS, default=100, metavar="N", help="Steps of an image."),
    click.option(
        "--max-pixels", type=click.IntRange(1, 1 << 28), default=1 << 22, metavar="N", help="Pixels of an image."
    ),
)
_limits = option_group(
    click.option("--max-queue", type=click.IntRange(1, 10_000), default=64, help="Images at most."),
    click.option(
        "--max-wait",
        type=_seconds,
        callback=finite_in,
        default=60.0,
        metavar="SECONDS",
        help="Predicted wait above which a request is answered with 429.",
    ),
    _limits_of_image,
    click.option(
        "--max-pixel-steps",
        type=click.FloatRange(min=1),
        callback=finite_in,
        default=6e8,
        metavar="X",
        help="Pixels times steps of all images of a request.",
    ),
)


_place = option_group(
    device_option,
    click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Dtype of the rest."),
    bytes_option(
        "--max-memory", help="Bytes of weights at most; checkpoints take turns in it. By default what is free."
    ),
)
_host = click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen at.")
_PORT = click.IntRange(0, 65535)


@command(short_help="Answer OpenAI's images API with checkpoints.")
@click.argument("outputs", metavar="CHECKPOINT…", nargs=-1, required=True)
@_host
@click.option("--port", type=_PORT, default=8000, help="0 takes any free one.")
@click.option("--api-key-file", type=PATH, metavar="FILE", help="Keys, one a line; requests need one of them.")
@click.option("--admin-key-file", type=PATH, metavar="FILE", help="Keys of /admin/, which is off without them.")
@click.option("--without-key", is_flag=True, help="Let other machines ask without a key.")
@click.option("--root", type=FOLDER, metavar="DIR", help="Folder from below which /admin/load takes checkpoints.")
@click.option("--lora", type=FOLDER, metavar="DIR", help="Folder of adapters that requests may name.")
@_place
@_limits
@click.option("--elastic", type=PATH, metavar="FILE", help="Settings to walk down under a backlog, a YAML file.")
@click.option(
    "--queue",
    envvar="FLUXQ_QUEUE",
    metavar="URL",
    help="redis://HOST:PORT/DB: keep requests over restarts, and share them with other servers. "
    "Or in the variable FLUXQ_QUEUE.",
)
@click.option(
    "--shadow",
    type=click.FloatRange(0, 1),
    callback=finite_in,
    default=0.0,
    show_default=False,
    metavar="X",
    help="Share of images to make again with the 16-bit model, for live quality.",
)
@click.option("--shadow-model", metavar="MODEL", help="The 16-bit model; by default the one that was quantized.")
@click.option("--join", is_flag=True, help="Join denoiser calls of images of one size where that is measured to pay.")
@click.option("--allow-unrecorded", is_flag=True, help="Serve checkpoints that record no hashes.")
@click.option("--in-process", is_flag=True, help="Make images in the server's own process.")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", help="Where images are made.")
@click.option("--replicas", metavar="N|MIN-MAX", help="With --engine ray: actors; by default one per GPU.")
def serve(session: Session, outputs: tuple[str, ...]) -> None:
    """Answer OpenAI's images API with CHECKPOINTs, at http://ADDRESS:PORT/v1.

    The time of a request is known before it runs: the earliest due runs next, step by step, and one that would wait too
    long is answered with 429 at once. Answers carry the seed and the checkpoint's digest, by which the image can be
    made again. SIGTERM lets it finish what it has taken.

    \b
    Example:
      fluxq serve tiny-nvfp4
      fluxq serve tiny-nvfp4 tiny-int8 --host 0.0.0.0 --api-key-file keys.txt
    """
    from fluxq.serve.server import ServeOptions, Server

    kind = _ray_server() if session.arguments["engine"] == "ray" else Server
    server = kind(ServeOptions(outputs, **session.arguments))
    session.say(f"checkpoints {', '.join(server.names)}; loading, then at {server.address}/v1")
    server.run(session.say)


@command(short_help="Show checkpoints beside 16 bit on a page.")
@click.argument("outputs", metavar="CHECKPOINT…", nargs=-1, required=True)
@click.option("--model", metavar="MODEL", help="The 16-bit model; by default the one that was quantized.")
@_host
@click.option("--port", type=_PORT, default=7860, help="0 takes any free one.")
@_place
@_limits_of_image
@click.option("--allow-unrecorded", is_flag=True, help="Show checkpoints that record no hashes.")
def demo(session: Session, outputs: tuple[str, ...]) -> None:
    """Show CHECKPOINTs beside their 16-bit model, on a page at http://ADDRESS:PORT/.

    A prompt is made by both from the same noise: a slider between the images, where they differ, by how much, and how
    long each took. Images in 16 bit are kept, so that another checkpoint shows at once what it changes. Nothing leaves
    this machine.

    \b
    Example:
      fluxq demo tiny-nvfp4
      fluxq demo tiny-nvfp4 tiny-int8 --port 8080
    """
    from fluxq.demo.page import Demo, DemoOptions

    page = Demo(DemoOptions(outputs, **session.arguments))
    session.say(f"checkpoints {', '.join(page.pairs.facts)}; open {page.address}")
    session.start_work()
    page.run()


def _ray_server() -> Any:
    try:
        from fluxq.serve.ray_engine import RayServer
    except ModuleNotFoundError as error:
        raise RuntimeError(f"--engine ray needs ray[serve], of which {error.name} is absent: {CURE_OF_RAY}") from None
    return RayServer


COMMANDS = (serve, demo)
