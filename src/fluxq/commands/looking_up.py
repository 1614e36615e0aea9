"""Commands about models and machines: families, env, and warmup, which makes a machine ready."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from fluxq.commands import show
from fluxq.commands.options import DTYPES, common_options
from fluxq.commands.session import session_of


@click.command(short_help="Print what recipes make of published models: bits, sizes, memory.")
@click.argument("name", required=False)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="NAME",
    help="Recipe to show (repeatable); by default two, or with NAME all.",
)
@common_options
def families(name: str | None, recipes: tuple[str, ...], **arguments: Any) -> None:
    """Print published models and what recipes make of them: bits, checkpoint, memory.

    Nothing is downloaded and nothing is computed.

    NAME is a model, a family or a model's class. With it, or with --json, every shipped recipe is shown.

    \b
    Example:
      fluxq families FLUX.1-dev --recipe nvfp4
      fluxq families
    """
    with session_of(arguments) as session:
        from fluxq.jobs import catalogue  # not through jobs/making.py, which imports diffusers' pipelines

        chosen = catalogue.recipes_for(recipes, all_of_them=name is not None or session.as_json)
        models = list(catalogue.models(name))
        session.print(
            [model.describe(chosen) for model in models] if session.as_json else None,
            lambda: show.families(models, chosen, in_detail=name is not None),
        )


@click.command(short_help="Print versions, devices and what computes each scheme, for bug reports.")
@common_options
def env(**arguments: Any) -> None:
    """Print versions, devices and what computes each scheme on them; paste it into a bug report.

    \b
    Example:
      fluxq env --json
    """
    with session_of(arguments) as session:
        from fluxq.jobs.environment import environment  # not through jobs/making.py, which imports diffusers

        report = environment()
        session.print(report, lambda: show.environment(report))


@click.command(short_help="Compile the kernels that a checkpoint needs on this GPU.")
@click.argument("output", metavar="CHECKPOINT")
@click.option("--device", default="cuda", show_default=True, metavar="NAME", help="The GPU that will serve.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Number of tokens that layers will see (repeatable).",
)
@click.option(
    "--prefer",
    type=click.Choice(["speed", "memory"]),
    default="speed",
    show_default=True,
    help="Form of the weights where the GPU cannot multiply 4 bits, as in fluxq.prepare.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="Dtype of activations.")
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), help="Folder for compiled kernels, to ship.")
@common_options
def warmup(
    output: str,
    device: str,
    tokens: tuple[int, ...],
    prefer: str,
    dtype: str,
    cache: Path | None,
    **arguments: Any,
) -> None:
    """Compile the kernels that CHECKPOINT launches on this GPU.

    No weights are read.

    Without --tokens those of a 1024 x 1024 image of FLUX.1: 1, 512, 4096 and 4608. Set TRITON_CACHE_DIR to the folder
    given as --cache where images are made.

    \b
    Example:
      fluxq warmup tiny-nvfp4 --cache kernels
    """
    with session_of(arguments) as session:
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = str(cache.resolve())
        session.requirements.require_local(output)
        rows = session.jobs.warm_up(output, device, tokens or (1, 512, 4096, 4608), prefer, dtype)
        session.print(rows, lambda: show.warmed(rows))


COMMANDS = (families, env, warmup)
