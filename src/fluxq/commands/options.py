"""Options that several commands take, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click

_MAX_SEED = (1 << 63) - 1  # torch takes 64 bits, and images count up from here
DTYPES = ("bfloat16", "float16", "float32")


def option_group(*decorators: Callable) -> Callable:
    def apply(function: Callable) -> Callable:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def names_in(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...]:
    """`a, b` as ("a", "b"); a name given twice counts once."""
    names = tuple(dict.fromkeys(name.strip() for name in (value or "").split(",")))
    if value is not None and "" in names:
        raise click.BadParameter("give names with one comma between them, as in transformer,text_encoder")
    return () if value is None else names


def sizes_in(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """`512x768` as (512, 768), of a video `512x768x25` as (512, 768, 25)."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", value) for value in values]
    if None in found:
        raise click.BadParameter("write height x width in pixels, as in 1024x768, and of a video x frames: 480x832x25")
    return tuple(tuple(int(number) for number in size.groups() if number) for size in found if size)


def bytes_in(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """`5GB` as 5000000000; with an i, as in 5GiB, powers of 1024."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(I?)B", value.strip().upper())
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2]) + 1)) if found else 0
    if not size:
        raise click.BadParameter("write a size with its unit, as in 5GB or 800MB")
    return size


PATH = click.Path(path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
model_options = option_group(
    click.argument("model", required=False),
    click.option("--revision", help="Revision of a hub model."),
    click.option("--local-files-only", is_flag=True, help="Use only what is on this machine."),
)
recipe_options = option_group(
    click.option("--recipe", default="nvfp4", show_default=True, help="A recipe file, or a shipped recipe's name."),
    click.option(
        "--profile",
        type=click.Choice(["rtn", "fast", "balanced", "best"]),
        help="Overrides the recipe's effort.",
    ),
    click.option(
        "--components",
        callback=names_in,
        metavar="NAME,NAME",
        help="Components to quantize; by default what the recipe names, its transformer being all denoisers.",
    ),
    click.option("--include", multiple=True, metavar="PATTERN", help="Quantize only these layers (repeatable)."),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="Keep these layers in 16 bit (repeatable)."),
)
size_options = option_group(
    click.option("--height", type=click.IntRange(min=1), help="Image height in pixels."),
    click.option("--width", type=click.IntRange(min=1), help="Image width in pixels."),
)
run_options = option_group(
    click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="16-bit dtype."),
    click.option("--device", default="cpu", show_default=True, help="Torch device that runs the pipeline."),
    click.option("--seed", type=click.IntRange(0, _MAX_SEED), help="First seed; by default recipe's or protocol's."),
    click.option(
        "--prompts", help="A file (.txt, .jsonl, .csv, .parquet, …), MJHQ-30K and its like, or a datasets id."
    ),
    click.option("--num-inference-steps", type=click.IntRange(min=1), help="Denoising steps of each image."),
    click.option("--guidance-scale", type=float, help="Guidance of each image."),
    size_options,
    click.option("--frames", "num_frames", type=click.IntRange(min=1), help="Frames of each video."),
)
output_option = click.option("--output", "-o", help="Where to write; by default ./<model>-<recipe>.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what stands at the output.")
fitting_options = option_group(
    model_options,
    recipe_options,
    run_options,
    click.option(
        "--max-memory",
        callback=bytes_in,
        metavar="SIZE",
        help="What weights and activations may take on --device, as in 8GiB; weights that do not fit are read in turn.",
    ),
    click.option(
        "--lora",
        multiple=True,
        metavar="[COMPONENT=]FILE[:WEIGHT]",
        help="Fuse this LoRA before quantizing (repeatable); into what its keys name, of two transformers the first.",
    ),
    output_option,
    overwrite_option,
)
statistics_option = click.option(
    "--statistics", metavar="FILE", help="Input scales cover what this file of `fluxq calibrate` saw."
)
checkpoint_options = option_group(
    click.argument("output"),
    click.option("--model", help="The 16-bit model; by default the one that OUTPUT was made from."),
    click.option("--revision", help="Revision of a hub model; by default the one that was quantized."),
    click.option("--local-files-only", is_flag=True, help="Use only what is on this machine."),
)
batch_size_option = click.option(
    "--batch-size", type=click.IntRange(min=1), help="Images made together; by default a megapixel of them."
)
protocol_options = option_group(
    click.option(
        "--protocol", default="smoke", show_default=True, help="Prompts, counts and metrics that belong together."
    ),
    click.option("--count", type=click.IntRange(min=1), help="Prompts; by default the protocol's."),
    click.option("--seeds", type=click.IntRange(min=1), help="Images of each prompt; by default the protocol's."),
    batch_size_option,
)
common_options = option_group(
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    click.option("-v", "--verbose", count=True, help="Say what is decided and why; show tracebacks."),
    click.option("-q", "--quiet", is_flag=True, help="Errors only."),
)
