"""Commands that judge a checkpoint: eval, bench, debug, report, verify."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from fluxq.base.extras import require_for
from fluxq.commands import show
from fluxq.commands.options import (
    FOLDER,
    PATH,
    batch_size_option,
    caches_in,
    checkpoint_options,
    count_option,
    device_in,
    finite_in,
    grid_in,
    names_in,
    overwrite_option,
    protocol_options,
    run_options,
    sizes_in,
)
from fluxq.commands.session import Failure, Session, command


@command("eval", short_help="Compare a checkpoint's images with those of its 16-bit model.")
@checkpoint_options
@protocol_options
@click.option(
    "--metrics", callback=names_in, metavar="NAME,NAME", help="Measure these, and fail if one cannot be measured."
)
@click.option(
    "--weights", metavar="DIR|hub", help="Folder with the networks of LPIPS, FID, …; hub fetches what is missing."
)
@click.option("--clip", metavar="MODEL", help="CLIP model of open_clip: hub id, folder or architecture/tag.")
@click.option("--fid-resize", metavar="NAME", help="Variant of FID: tf1, antialias, clean or pytorch-fid.")
@click.option("--fid-reference", type=PATH, metavar="PATH", help="Images, or .npz statistics, to take FID to.")
@click.option(
    "--backends",
    callback=names_in,
    metavar="NAME,NAME",
    help="Ways to compute layers: native, int8, 8bit; by default those that differ here.",
)
@click.option(
    "--cache",
    multiple=True,
    callback=caches_in,
    metavar="KIND=X",
    help="Also judge a step cache beside fewer steps at equal compute (repeatable): first_block, mag or sea=THRESHOLD, "
    "taylor, taylor_lite, faster or pab=INTERVAL, list=SHARE or list=FILE. A number alone is first_block's.",
)
@click.option(
    "--gate", "gates", multiple=True, metavar="GATE", help="Exit with 1 unless this holds, as psnr>=30 (repeatable)."
)
@click.option(
    "--images", type=FOLDER, metavar="DIR", help="Where to keep images; by default fluxq-images beside CHECKPOINT."
)
@click.option(
    "--engine",
    type=click.Choice(["local", "torchrun", "ray"]),
    default="local",
    help="How to run the pipelines: in this process, under torchrun, or by Ray.",
)
@count_option("--workers", help="With --engine ray: number of actors; by default one per GPU or core.")
@click.option(
    "--address", metavar="HOST:PORT", help="With --engine ray: a running cluster; by default one is started here."
)
@run_options
def evaluate(session: Session, output: str) -> None:
    """Compare images of CHECKPOINT with those of its 16-bit model.

    Writes CHECKPOINT/eval/report.html, .json and .md.

    \b
    Example:
      fluxq eval tiny-nvfp4
      fluxq eval tiny-nvfp4 --count 256 --gate 'psnr>=35'
      fluxq eval tiny-nvfp4 --cache list=0.5 --cache taylor_lite=2
    """
    subject = session.subject(output)
    report = session.judge.evaluate(subject, session.start_work)
    if report is None:
        return  # another process of this run has all results
    session.print(report.model_dump(mode="json"), lambda: show.evaluated(Path(output) / "eval" / "report.html", report))
    missed = [show.judged(gate) for run in report.runs for gate in run.gates if not gate.passed]
    if missed:
        raise RuntimeError(f"{output}: gate missed: {', '.join(dict.fromkeys(missed))}")


@command("bench", short_help="Time a checkpoint beside its 16-bit model.")
@checkpoint_options
@run_options
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(["eager", "compiled", "cuda graph", "captured"]),
    default=["eager"],
    show_default=False,
    help="How to run (repeatable); by default eager. `cuda graph` compiles too, `captured` is fluxq.capture.",
)
@count_option(
    "--batch", "batches", multiple=True, default=[1], show_default=False, help="Images in one call (repeatable)."
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="HEIGHTxWIDTH[xFRAMES]",
    callback=sizes_in,
    help="Size of an image (repeatable); by default the pipeline's.",
)
@count_option("--length", "lengths", multiple=True, help="Tokens of the text (repeatable); by default the pipeline's.")
@click.option(
    "--grid",
    callback=grid_in,
    metavar="SIZES/LENGTHS/BATCHES",
    help="All of them together, as 512x512,1024x1024/256,512/1,4; what is left empty is not swept.",
)
@click.option("--history", type=FOLDER, metavar="DIR", help="Add the times to the history in this folder.")
@click.option(
    "--trace", type=PATH, metavar="FILE", help="Also write a trace of one call for Perfetto, .json or .json.gz."
)
@click.option("--optimize", "optimized", is_flag=True, help="Also time fused blocks (`fluxq.optimize`).")
@count_option("--rounds", least=3, default=10, help="Timed calls of each.")
@count_option("--warmup", default=2, help="Calls of each before they are timed.")
@click.option(
    "--prefer",
    type=click.Choice(["speed", "memory", "decoded"]),
    default="speed",
    help="Weights: 8 bits for speed, codes as they are, or on a CPU fp32 beside the codes.",
)
def bench(session: Session, output: str) -> None:
    """Time CHECKPOINT beside its 16-bit model, call by call in turn.

    Writes CHECKPOINT/eval/speed.json.

    \b
    Example:
      fluxq bench tiny-nvfp4 --batch 1 --batch 4
      fluxq bench tiny-nvfp4 --grid 32x32,64x64/16,32/1,4 --history DIR
      fluxq bench tiny-nvfp4 --trace trace.json.gz
    """
    names = ("modes", "batches", "sizes", "lengths", "optimized", "prefer", "rounds", "warmup", "history", "trace")
    how = {name: session.arguments.pop(name) for name in names}
    if grid := session.arguments.pop("grid"):
        for name in grid:
            source = click.get_current_context().get_parameter_source(name)
            if source is not ParameterSource.DEFAULT:
                raise click.UsageError(f"--grid has {name} too: leave out the option of them alone")
        how |= grid
    subject = session.subject(output, whole_videos=True)
    speed = session.judge.bench(subject, on_start=session.start_work, **how)
    session.print(speed.model_dump(mode="json"), lambda: show.timed(speed))


@command("debug", short_help="Find the layers that cost most quality, and write a recipe that mends them.")
@checkpoint_options
@count_option("--count", default=4, help="Number of prompts.")
@batch_size_option
@click.option("--patch", type=PATH, metavar="FILE", help="Write a recipe that keeps the worst layers in more bits.")
@click.option(
    "--growth",
    type=click.FloatRange(0, min_open=True),
    callback=finite_in,
    default=0.05,
    metavar="X",
    help="With --patch: share of bits that it may add.",
)
@count_option(
    "--budget", default=256, help="Runs to spend on finding damage: blocks first, then the layers of the worst."
)
@run_options
def debug(session: Session, output: str, patch: Path | None, growth: float, budget: int) -> None:
    """Find the layers of CHECKPOINT that cost most quality.

    Writes CHECKPOINT/eval/debug.json, and with --patch a recipe that keeps them in more bits.

    \b
    Example:
      fluxq debug tiny-nvfp4 --patch better.yaml
    """
    subject = session.subject(output)
    diagnosis = session.judge.debug(subject, patch, growth, budget, session.start_work)
    session.print(diagnosis.model_dump(mode="json"), lambda: show.debugged(diagnosis, patch))
    if patch is not None and diagnosis.patch is None:
        raise RuntimeError(f"{patch} was not written: the findings say why there is no patch")


@command("report", short_help="Write one page of several evaluations, or of searches.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=PATH)
@click.option("--output", "-o", type=PATH, default=Path("report.html"), help="The page to write.")
@overwrite_option
def report(session: Session, runs: tuple[Path, ...], output: Path, overwrite: bool) -> None:
    """Write one page of several evaluations, each a checkpoint folder or a report.json.

    JSON and Markdown are written beside it. Of files that `fluxq auto` wrote, a page with their fronts alone.

    \b
    Example:
      fluxq report tiny-nvfp4 tiny-fp8 -o report.html
    """
    for run in runs:
        session.requirements.require_path(run)
    from fluxq.eval.report.front import is_search

    searches = [run for run in runs if is_search(run)]
    if searches and len(searches) < len(runs):
        raise ValueError(f"{searches[0]} is a search and no evaluation: give searches and evaluations a page each")
    if searches:
        documents = session.judge.front(runs, output, overwrite=overwrite, on_start=session.start_work)
        session.print(documents, lambda: click.echo(f"report: {output}"))
        return
    for run in runs:
        session.requirements.require_evaluated(run)
    merged = session.judge.report(runs, output, overwrite=overwrite, on_start=session.start_work)
    session.print(merged.model_dump(mode="json"), lambda: show.evaluated(output, merged))


@command("verify", short_help="Prove that a checkpoint is whole and holds what it says.")
@click.argument("output", metavar="CHECKPOINT")
@click.option("--allow-unrecorded", is_flag=True, help="Exit with 0 where no hashes were recorded to check files by.")
@click.option(
    "--passport", is_flag=True, help="Instead, make the images of its passport again: does this machine repeat them?"
)
@click.option(
    "--device",
    default="auto",
    callback=device_in,
    metavar="NAME",
    help="With --passport: where to run: cpu, cuda, cuda:1, …",
)
def verify_checkpoint(session: Session, output: str, allow_unrecorded: bool, passport: bool, device: str) -> None:
    """Prove that CHECKPOINT is whole and holds what it says, tensor by tensor.

    No model is run. Exits with 1 if a check fails or cannot be made.

    With --passport its pipeline is run instead. Exits with 0 where its images are the same bit for bit or within the
    floor, 1 where they are not, 3 where they cannot tell.

    \b
    Example:
      fluxq verify tiny-nvfp4
      fluxq verify tiny-nvfp4 --passport
    """
    session.requirements.require_checkpoint(output)
    if passport:
        _verify_passport(session, output, device)
        return
    if device != "auto":
        raise ValueError("--device says where --passport makes images; give that too")
    from fluxq.quantize.verify import verify

    results = verify(Path(output))
    session.start_work()
    session.print([result.describe() for result in results], lambda: show.verified(results))
    failed = [result.check for result in results if result.status == "failed"]
    unmade = [result.check for result in results if result.status not in ("ok", "failed")]
    if failed:
        rest = f", {len(unmade)} could not be made ({', '.join(unmade)})" if unmade else ""
        raise RuntimeError(f"{output}: {len(failed)} of {len(results)} checks failed ({', '.join(failed)}){rest}")
    if unread := [result.check for result in results if result.status == "not made"]:
        names = ", ".join(unread)
        raise RuntimeError(
            f"{output}: {len(unread)} of {len(results)} checks could not be made ({names}): a file cannot be read; "
            "run this again"
        )
    if unmade and not allow_unrecorded:
        raise RuntimeError(
            f"{output}: {len(unmade)} of {len(results)} checks could not be made ({', '.join(unmade)}): nothing is "
            "recorded to hold the files against; --allow-unrecorded accepts that"
        )


def _verify_passport(session: Session, output: str, device: str) -> None:
    """Make the images of a checkpoint's passport again, print how near they are and exit accordingly."""
    require_for("verify --passport")
    from fluxq.jobs import passports

    request = passports.request_of(Path(output), device)
    session.say(f"checkpoint {output}, device {request.device}")
    session.start_work()
    result = passports.repeat(request)
    session.print(result.model_dump(mode="json"), lambda: show.passport_repeated(result))
    if result.exit_code:
        raise Failure(f"{output}: {show.repeated_in_words(result)}", result.exit_code)


COMMANDS = (evaluate, bench, debug, report, verify_checkpoint)
