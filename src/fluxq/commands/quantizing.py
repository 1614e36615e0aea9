"""Commands that make a checkpoint: plan, auto, steps, calibrate, quantize."""

from __future__ import annotations

from pathlib import Path

import click

from fluxq.commands import show
from fluxq.commands.exchanging import EXPORTS
from fluxq.commands.options import (
    RECIPES,
    bytes_option,
    count_option,
    finite_in,
    fitting_options,
    max_memory_option,
    model_options,
    names_in,
    output_option,
    overwrite_option,
    pattern_options,
    recipe_options,
    run_options,
    size_options,
    statistics_option,
)
from fluxq.commands.session import Session, command


@command(short_help="Print what a recipe makes of every layer of a model, or what a step costs on a GPU.")
@model_options
@recipe_options
@statistics_option
@click.option("--gpu", metavar="NAME", help="Print memory and modelled time on this GPU instead: h200, 4060ti, …")
@click.option(
    "--prefer",
    type=click.Choice(["speed", "memory"]),
    help="With --gpu: weights that it cannot multiply in 4 bits become 8 bits (speed) or stay 4 (memory).",
)
@bytes_option(
    "--vram",
    help="Print the best recipe and placement for a card of this memory instead, as in 12GB; --recipe takes one.",
)
@click.option("--layers", "every_layer", is_flag=True, help="Print every layer by its name.")
@size_options
@count_option("--frames", help="With --gpu or --vram: frames of a video.")
@count_option("--batch", help="With --gpu: sequences in a batch; guidance makes two of each image.")
def plan(
    session: Session,
    gpu: str | None,
    prefer: str | None,
    frames: int | None,
    batch: int | None,
    vram: int | None,
    every_layer: bool,
) -> None:
    """Print what a recipe makes of every Linear of MODEL and why, or what a step costs on a GPU.

    Nothing is computed and nothing is written.

    With --vram: the best shipped recipe for the denoiser and the text encoders, and the fastest placement, with which a
    whole call fits into a card of that memory, by bytes. Exits with 2 where nothing fits.

    \b
    Example:
      fluxq plan tiny --recipe fp8
      fluxq plan tiny --recipe nvfp4 --gpu h200
      fluxq plan tiny --vram 12GB
    """
    if vram is not None:
        others = {"gpu": gpu, "prefer": prefer, "batch": batch, "layers": every_layer or None}
        answer = session.fit(vram, frames, others)
        session.print(answer.describe(), lambda: show.fit(answer.describe()))
        return
    session.require_gpu(gpu, prefer=prefer, frames=frames, batch=batch)
    session.announce()
    job = session.jobs.job_of(session.options, writes=False, runs=False)
    costs = session.jobs.model_costs(job, gpu, prefer or "speed", frames, batch or 1) if gpu else {}
    ways = (prefer or "speed", "memory") if gpu else ()
    holdings = [session.jobs.holding_on(job, gpu, costs, each) for each in ways]
    devices = () if gpu else ("cpu", "cuda")
    session.print(
        show.plan_json(job, costs, holdings),
        lambda: show.plan(
            job,
            costs,
            [session.jobs.demand(job, each, writes=True) for each in devices],
            holdings,
            every_layer=every_layer,
        ),
    )


@command(short_help="Choose a format for every layer under a budget of bits, bytes or time; write a recipe.")
@model_options
@click.option(
    "--recipe", metavar="NAME|FILE", help="The base; by default nvfp4, or with --from the first checkpoint's recipe."
)
@pattern_options
@click.option("--bits", type=float, callback=finite_in, metavar="X", help="Budget: bits per weight of what is chosen.")
@bytes_option("--size", help="Budget: size of the checkpoint's weights, as in 9GB.")
@bytes_option("--vram", help="Budget: memory of the card that a whole call has to fit, as 12GB.")
@click.option("--ms", type=float, callback=finite_in, metavar="X", help="Budget: modelled time of a step on --gpu.")
@click.option("--gate", metavar="GATE", help="No budget, the cheapest that holds this: 'latent_sqnr>=30', in dB.")
@click.option("--gpu", metavar="NAME", help="Model the time on this GPU: h200, 4060ti, …")
@click.option(
    "--times",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of `fluxq doctor` on that GPU; where it timed a product, that replaces the model's time.",
)
@click.option(
    "--menu",
    callback=names_in,
    metavar="FORMAT,…",
    help="Formats to choose from, 16bit too; by default the recipe's, one of 8 bits and 16bit.",
)
@click.option(
    "--for", "dialect", type=click.Choice(EXPORTS), help="Choose only what this format of `fluxq export` can hold."
)
@click.option(
    "--measure",
    type=click.Choice(["velocity", "adjoint"]),
    help="Measure errors in this way only; velocity needs no backward passes.",
)
@click.option(
    "--count",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Images that errors are measured on, by default 8; two to four times as many decide.",
)
@click.option("--modulation", is_flag=True, help="Choose formats of the modulation's Linears too, weight-only.")
@click.option("--attention", is_flag=True, help="With --ms or --gpu: choose blocks whose self-attention is in fp8.")
@click.option(
    "--steps",
    is_flag=True,
    help="With --ms or --gpu: choose how many steps are computed, too; --ms is then the mean of all steps.",
)
@click.option(
    "--components",
    callback=names_in,
    metavar="NAME,NAME",
    help="Components to choose for, text encoders too under --size or --gate alone; by default the denoisers.",
)
@click.option(
    "--from",
    "fitted",
    callback=names_in,
    metavar="OUT,…",
    help="Choose from the fitted layers of these checkpoints of MODEL, one for each format.",
)
@click.option("--assemble", metavar="FOLDER", help="With --from: write the checkpoint that is chosen here.")
@click.option("--dry-run", is_flag=True, help="Print what may be chosen and what it will take; compute nothing.")
@run_options
@max_memory_option
@output_option("<model>-<budget>.yaml")
@overwrite_option
def auto(session: Session, dry_run: bool) -> None:
    """Choose a format for every group of layers of MODEL that reads one input, and write a recipe for it.

    Errors of formats at the final latents propose plans, runs of the model decide between them. Layers that the recipe
    sets apart stay as it has them. `fluxq quantize --recipe FILE` then fits the layers; with --from they were fitted
    before, and --assemble writes the checkpoint.

    With --vram: also the placement, and text encoders' recipe, with which a whole call fits into a card.

    \b
    Example:
      fluxq auto tiny --bits 5.5
      fluxq auto tiny --gate 'latent_sqnr>=30' --gpu b200
      fluxq auto tiny --gate 'latent_sqnr>=30' --gpu b200 --steps --num-inference-steps 28
      fluxq auto tiny --bits 6 --from tiny-nvfp4,tiny-fp8 --assemble tiny-6bits
    """
    names = ("bits", "size", "vram", "ms", "gate", "gpu", "times", "menu", "dialect", "measure", "count")
    names += ("fitted", "assemble")
    names += ("modulation", "attention", "steps")
    given = {name: session.arguments.pop(name) for name in names}
    with session.together() as ranks:
        session.arguments["recipe"] = session.requirements.base_recipe(session.arguments["recipe"], given["fitted"])
        recipe = session.announce()
        from fluxq.jobs import assembling
        from fluxq.jobs.search import auto_options, outline_of, search_of

        search = search_of(session.options, auto_options(recipe, given), writes=not dry_run, ranks=ranks)
        if dry_run:
            outline = outline_of(search)
            session.print(show.outline_json(search, outline), lambda: show.outline(search, outline))
            return
        result = session.choose(search)
        if result is not None:
            record = assembling.assemble(search, result) if given["assemble"] else None
            places = {"output": str(search.job.output), **({"checkpoint": given["assemble"]} if record else {})}
            session.print({**result, **places}, lambda: show.chosen(result, places, session.options))
            if record and record.check and not record.check.passed:
                raise RuntimeError(show.why_failed(search.job, record.check))


@command(short_help="List the steps of a call to compute; the others are extrapolated.")
@model_options
@click.option(
    "--compute", type=float, callback=finite_in, metavar="X", help="Share of the steps to compute, as in 0.5."
)
@click.option("--gate", metavar="GATE", help="The fewest steps that hold this: 'latent_sqnr>=30', in dB.")
@click.option(
    "--mask",
    metavar="1,0,…|FILE",
    help="Judge this list: 1 for each step that it computes, or a file of cache-dit.",
)
@count_option("--count", default=12, help="Images that are measured; as many others decide.")
@run_options
@max_memory_option
@output_option("<model>-steps.json")
@overwrite_option
def steps(session: Session) -> None:
    """List the steps of a call that MODEL's denoiser computes, for `fluxq.skip_steps(pipe, FILE)`.

    At the others its output is extrapolated. The list is made in 16 bit; it is for checkpoints of MODEL as well.

    \b
    Example:
      fluxq steps tiny --compute 0.5 --num-inference-steps 28
      fluxq steps tiny --gate 'latent_sqnr>=40' --num-inference-steps 28
    """
    given = {name: session.arguments.pop(name) for name in ("compute", "gate", "count", "mask")}
    session.arguments["recipe"] = RECIPES[0]  # a job has one; a list depends on none
    session.announce(has_recipe=False)
    from fluxq.jobs import forecast, stepping

    request = stepping.request_of(session.options, **given)
    passes = stepping.passes_of(request)
    session.start_work(None if request.job.finished else forecast.of_choosing(request.job, passes))
    result = stepping.make_list(request)
    output = str(request.job.output)
    session.print({**result, "output": output}, lambda: show.listed_steps(result, output))


@command(short_help="Gather statistics of a model's activations, for wider input scales.")
@fitting_options
@output_option("<model>-<recipe>-statistics.safetensors")
@overwrite_option
def calibrate(session: Session) -> None:
    """Run MODEL on prompts and write statistics of the inputs of its Linears.

    `fluxq quantize` needs none: it captures what it fits layers to. These widen input scales to more prompts.

    \b
    Example:
      fluxq calibrate tiny --recipe nvfp4 --output statistics.safetensors
    """
    with session.together() as ranks:
        session.announce("file")
        job = session.jobs.job_of(session.options, writes=False, ranks=ranks)
        session.forecast(job, "of_calibrating")
        session.start_work()
        path = session.jobs.calibrate(job)
        session.print({"statistics": str(path)}, lambda: show.calibrated(job, path))


@command(short_help="Quantize a model, and check the checkpoint against 16 bit.")
@fitting_options
@output_option("<model>-<recipe>")
@overwrite_option
@statistics_option
@click.option(
    *("--no-check", "check"),
    is_flag=True,
    callback=lambda _context, _option, is_given: not is_given,  # click 8.3.0 to 8.3.2 misread flag_value=False
    help="Make no images to compare at the end.",
)
@click.option("--parallel-blocks", is_flag=True, help="Fit blocks independently of each other; slightly less accurate.")
@bytes_option("--max-shard-size", "max_shard_bytes", default="10GB", help="Largest size of a weight file.")
@click.option(
    "--push-to-hub", metavar="REPO", help="Upload the checkpoint to this hub repository if it passes the closing check."
)
@click.option("--private", is_flag=True, help="With --push-to-hub: make a new repository private.")
def quantize(session: Session) -> None:
    """Quantize MODEL (a pipeline folder, a hub id or `tiny`) and check it against the 16-bit pipeline.

    An interrupted run is resumed by the same command. Where the recipe says `auto`, formats are chosen first, as `fluxq
    auto` does, and the recipe of what is chosen is kept beside the checkpoint.

    \b
    Example:
      fluxq quantize --recipe nvfp4.yaml
    """
    repo, private = session.arguments["push_to_hub"], session.arguments["private"]
    with session.together() as ranks:
        if private and not repo:
            raise ValueError("--private says what a new --push-to-hub REPO is; give that too")
        session.announce("folder")
        session.choose_first(ranks)
        job = session.jobs.job_of(session.options, ranks=ranks)
        session.forecast(job, "of_quantizing")
        session.start_work()
        record = session.jobs.quantize(job)
        if not ranks.leads:
            return
        session.print({**record.to_json(), "output": str(job.output)}, lambda: show.quantized(job, record))
        if record.check and not record.check.passed:
            raise RuntimeError(show.why_failed(job, record.check))
        if repo:
            from fluxq.jobs.hub import push

            click.echo(f"uploaded: {push(job.output, record, repo, private)}", err=True)


COMMANDS = (plan, auto, steps, calibrate, quantize)
