"""Commands that make a checkpoint: plan, calibrate, quantize."""

from __future__ import annotations

from typing import Any

import click

from fluxq import show
from fluxq.commands.options import (
    bytes_in,
    common_options,
    fitting_options,
    model_options,
    recipe_options,
    size_options,
    statistics_option,
)
from fluxq.commands.session import session_of


@click.command()
@model_options
@recipe_options
@statistics_option
@click.option("--gpu", metavar="NAME", help="Print what it costs on this GPU instead, modelled: h200, 4060ti, …")
@click.option("--prefer", type=click.Choice(["speed", "memory"]), help="With --gpu: 4-bit weights it cannot multiply.")
@size_options
@click.option("--frames", type=click.IntRange(min=1), help="With --gpu: frames of a video.")
@click.option("--batch", type=click.IntRange(min=1), help="With --gpu: sequences, two an image under guidance.")
@common_options
def plan(gpu: str | None, prefer: str | None, frames: int | None, batch: int | None, **arguments: Any) -> None:
    """Print what becomes of every Linear of MODEL, and why, or what a step costs on a GPU; computes nothing.

    \b
    Example:
      fluxq plan tiny --recipe fp8
      fluxq plan tiny --recipe nvfp4 --gpu h200
    """
    with session_of(arguments) as session:
        session.require_gpu(gpu, prefer=prefer, frames=frames, batch=batch)
        session.announce()
        prepared = session.prepare(writes=False)
        costs = session.jobs.model_costs(prepared, gpu, prefer or "speed", frames, batch or 1) if gpu else {}
        ways = (prefer or "speed", "memory") if gpu else ()
        held = [session.jobs.held_by(prepared, gpu, costs, each) for each in ways]
        devices = () if gpu else ("cpu", "cuda")
        session.print(
            show.plan_json(prepared, costs, held),
            lambda: show.plan(
                prepared, costs, [session.jobs.demand(prepared, each, writes=True) for each in devices], held
            ),
        )


@click.command()
@fitting_options
@common_options
def calibrate(**arguments: Any) -> None:
    """Run MODEL on prompts and write statistics of what flows into each group of Linears.

    \b
    Example:
      fluxq calibrate tiny --recipe nvfp4 --output statistics.safetensors
    """
    with session_of(arguments) as session, session.together() as ranks:
        session.announce()
        output = "{model}-{recipe}-statistics.safetensors"
        prepared = session.prepare(default_output=output, writes=False, ranks=ranks)
        session.jobs.require_free_file(prepared)
        session.start_work()
        path = session.jobs.calibrate(prepared)
        session.print({"statistics": str(path)}, lambda: show.calibrated(prepared, path))


@click.command()
@fitting_options
@statistics_option
@click.option("--no-check", "check", is_flag=True, flag_value=False, default=True, help="Skip the closing check.")
@click.option("--parallel-blocks", is_flag=True, help="Fit each block to what 16-bit blocks before it return.")
@click.option(
    "--max-shard-size",
    "max_shard_bytes",
    default="10GB",
    show_default=True,
    callback=bytes_in,
    metavar="SIZE",
    help="Cut the weights into files of at most this size.",
)
@click.option("--push-to-hub", metavar="REPO", help="Upload the checkpoint there once it has passed the closing check.")
@click.option("--private", is_flag=True, help="With --push-to-hub: a new REPO is private.")
@common_options
def quantize(**arguments: Any) -> None:
    """Quantize MODEL (a pipeline folder, a hub id or `tiny`) and check it against the 16-bit pipeline.

    \b
    Example:
      fluxq quantize --recipe nvfp4.yaml
    """
    repo, private = arguments["push_to_hub"], arguments["private"]
    with session_of(arguments) as session, session.together() as ranks:
        if private and not repo:
            raise ValueError("--private says what a new --push-to-hub REPO is; give that too")
        session.announce()
        prepared = session.prepare(ranks=ranks)
        session.start_work()
        record = session.jobs.quantize(prepared)
        if not ranks.leads:
            return
        session.print({**record, "output": str(prepared.output)}, lambda: show.quantized(prepared, record))
        if record["check"] and not record["check"]["passed"]:
            raise RuntimeError(show.why_failed(prepared, record["check"]))
        if repo:
            from fluxq.hub import push

            click.echo(f"uploaded: {push(prepared.output, record, repo, private)}", err=True)


COMMANDS = (plan, calibrate, quantize)
