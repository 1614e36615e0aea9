"""Options that several commands take, and functions that read their values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fluxq.base.console import bytes_of

MAX_SEED = (1 << 63) - 1  # torch takes 64 bits, and images count up from here
DTYPES = ("bfloat16", "float16", "float32")
RECIPES = (
    "fp8",
    "mxfp8",
    "int8",
    "nvfp4",
    "mxfp4",
    "int4",
    "nvfp4-max",
    "mxfp4-max",
    "fp8-comfy",
    "int4-svd",
    "int8-convrot",
)  # a test compares
PIXELS, STEPS = click.IntRange(1, 1 << 14), click.IntRange(1, 10_000)  # as of a model's own defaults
_OF_GRIDS = ("sizes", "lengths", "batches")
PROTOCOL_NAMES = ("smoke", "standard", "paper", "drawbench", "mlperf-sdxl")
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


def option_group(*decorators: Callable) -> Callable:
    def apply(function: Callable) -> Callable:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def names_in(_context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Read `a, b` as ("a", "b"); a name given twice counts once."""
    names = tuple(dict.fromkeys(name.strip() for name in (value or "").split(",")))
    if value is not None and "" in names:
        raise click.BadParameter(f"{value!r}: give names with one comma between them, as {option.metavar}")
    return () if value is None else names


def sizes_in(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Read `512x768` as (512, 768), and for a video `512x768x25` as (512, 768, 25)."""
    matches = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", value) for value in values]
    if None in matches:
        raise click.BadParameter("write height x width in pixels, as in 1024x768, and of a video x frames: 480x832x25")
    return tuple(tuple(int(number) for number in size.groups() if number) for size in matches if size)


def grid_in(context: click.Context, option: click.Parameter, value: str | None) -> dict[str, tuple]:
    """Read `64x64,96x96/256/1,4` as sizes, lengths and batches; what is empty is left out."""
    if value is None:
        return {}
    sizes, *numbers = parts = [part.split(",") if part else [] for part in value.split("/")]
    if len(parts) != len(_OF_GRIDS) or not all(re.fullmatch(r"[1-9]\d*", each) for part in numbers for each in part):
        raise click.BadParameter(f"{value!r}: write {option.metavar}, as in 512x512,1024x1024/256,512/1,4")
    axes = (sizes_in(context, option, tuple(sizes)), *(tuple(map(int, part)) for part in numbers))
    return {name: each for name, each in zip(_OF_GRIDS, axes, strict=True) if each}


def bytes_in(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """Read `5GB` as 5000000000; with an i, as in 5GiB, powers of 1024."""
    if value is None:
        return None
    size = bytes_of(value)
    if not size:
        raise click.BadParameter("write a size with its unit, as in 5GB or 800MB")
    return size


def caches_in(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names and parameters of step caches."""
    if texts:
        from fluxq.runtime.step_caches import caches_of

        try:
            caches_of(texts)
        except (ValueError, OSError) as error:
            raise click.BadParameter(str(error)) from None
    return texts


def finite_in(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Check that a number is finite."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number to compute with")
    return value


def device_in(_context: click.Context, _option: click.Parameter, value: str) -> str:
    """Check the name of a kind of device, with a number where there are several; jobs look whether it exists."""
    if not re.fullmatch(rf"({'|'.join(DEVICES)})(:\d+)?", value):
        names = ", ".join(DEVICES)
        raise click.BadParameter(f"device {value!r} cannot be used; give --device cpu, or cuda with a GPU ({names})")
    return value


def count_option(*names: str, least: int = 1, **how: Any) -> Callable:
    """Make an option that takes a whole number from `least` up. how: as `click.option` has it."""
    return click.option(*names, type=click.IntRange(min=least), metavar="N", **how)


def bytes_option(*names: str, **how: Any) -> Callable:
    """Make an option that takes a size in bytes, as `bytes_in` reads it. how: as `click.option` has it."""
    return click.option(*names, callback=bytes_in, metavar="SIZE", **how)


PATH = click.Path(path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
model_options = option_group(
    click.argument("model", required=False),
    click.option("--revision", help="Branch, tag or commit of a hub model."),
    click.option("--local-files-only", is_flag=True, help="Use only what is on this machine."),
)
pattern_options = option_group(
    click.option("--include", multiple=True, metavar="PATTERN", help="Quantize only these layers (repeatable)."),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="Keep these layers in 16 bit (repeatable)."),
)
recipe_option = click.option(
    "--recipe", default="nvfp4", metavar="NAME|FILE", help=f"A recipe file, or a shipped recipe: {', '.join(RECIPES)}."
)
recipe_options = option_group(
    recipe_option,
    click.option(
        "--profile",
        type=click.Choice(["rtn", "fast", "balanced", "best"]),
        help="Effort, overriding the recipe's profile: rtn only rounds, best takes longest.",
    ),
    click.option(
        "--components",
        callback=names_in,
        metavar="NAME,NAME",
        help="Components to quantize; by default those of the recipe, whose `transformer` means every denoiser.",
    ),
    pattern_options,
)
size_options = option_group(
    click.option("--height", type=PIXELS, metavar="PIXELS", help="Height of an image or frame."),
    click.option("--width", type=PIXELS, metavar="PIXELS", help="Width of an image or frame."),
)
device_option = click.option(
    "--device",
    default="auto",
    callback=device_in,
    metavar="NAME",
    help="Where to run: cpu, cuda, cuda:1, …; auto takes the GPU if there is one.",
)
run_options = option_group(
    click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Dtype of what is not quantized."),
    device_option,
    click.option(
        "--seed",
        type=click.IntRange(0, MAX_SEED),
        metavar="N",
        help="Seed of the first image; by default the recipe's, or the protocol's.",
    ),
    click.option(
        "--prompts",
        metavar="FILE|NAME",
        help="A file (.txt, .jsonl, .csv, .parquet, …), a known set such as MJHQ-30K, or a datasets id.",
    ),
    click.option(
        "--num-inference-steps",
        type=STEPS,
        metavar="N",
        help="Denoising steps of each image or video.",
    ),
    click.option("--guidance-scale", type=float, callback=finite_in, metavar="X", help="Guidance scale."),
    size_options,
    count_option("--frames", "num_frames", help="Frames of each video."),
)


def output_option(default: str) -> Callable:
    """Make the option --output of a command that writes to `default` in the current folder unless told where."""
    return click.option("--output", "-o", metavar="PATH", help=f"Where to write; by default ./{default}.")


overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what fluxq wrote there.")
max_memory_option = bytes_option(
    "--max-memory",
    help="Memory of the device to use at most, as in 8GiB; weights that do not fit are read when needed.",
)
fitting_options = option_group(
    model_options,
    recipe_options,
    run_options,
    max_memory_option,
    click.option(
        "--lora",
        multiple=True,
        metavar="[COMPONENT=]FILE[:WEIGHT]",
        help="Fuse a LoRA before quantizing (repeatable). Its keys say the component; of two transformers, the first.",
    ),
)
statistics_option = click.option(
    "--statistics",
    metavar="FILE",
    help="Statistics of `fluxq calibrate`; input scales then cover their ranges too.",
)
checkpoint_options = option_group(
    click.argument("output", metavar="CHECKPOINT"),
    click.option("--model", metavar="MODEL", help="The 16-bit model; by default the one that was quantized."),
    click.option("--revision", help="Branch, tag or commit of a hub model; by default the one that was quantized."),
    click.option("--local-files-only", is_flag=True, help="Use only what is on this machine."),
)
prefer_option = click.option(
    "--prefer",
    type=click.Choice(["speed", "memory"]),
    default="speed",
    help="Form of the weights where the GPU cannot multiply 4 bits, as in fluxq.prepare.",
)
batch_size_option = count_option("--batch-size", help="Images in one call; by default as many as make a megapixel.")
protocol_options = option_group(
    click.option(
        "--protocol", default="smoke", metavar="NAME", help=f"How much to measure: {', '.join(PROTOCOL_NAMES)}."
    ),
    count_option("--count", help="Number of prompts; by default the protocol's."),
    count_option("--seeds", help="Images of each prompt; by default the protocol's."),
    batch_size_option,
)
COMMON = (  # of every command, behind its own
    click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
    click.Option(
        ["-v", "--verbose"],
        count=True,
        show_default=False,
        help="Also print decisions and their reasons, and tracebacks.",
    ),
    click.Option(["-q", "--quiet"], is_flag=True, help="Print errors only."),
)
