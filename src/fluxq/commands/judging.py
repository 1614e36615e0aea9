"""Commands that judge a checkpoint: eval, bench, debug, report, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fluxq import show
from fluxq.commands.options import (
    FOLDER,
    PATH,
    batch_size_option,
    checkpoint_options,
    common_options,
    names_in,
    protocol_options,
    run_options,
    sizes_in,
)
from fluxq.commands.session import session_of


@click.command("eval")
@checkpoint_options
@protocol_options
@click.option("--metrics", callback=names_in, metavar="NAME,NAME", help="Take these, and fail if one cannot be taken.")
@click.option("--weights", metavar="DIR|hub", help="Folder with metric networks' files; hub: fetch what is missing.")
@click.option("--clip", metavar="MODEL", help="open_clip model of the CLIP score: hub id, folder or architecture/tag.")
@click.option("--fid-resize", metavar="NAME", help="Variant of FID: tf1, antialias, clean or pytorch-fid.")
@click.option("--fid-reference", type=PATH, metavar="PATH", help="Images, or .npz statistics, that FID is taken to.")
@click.option(
    "--backends", callback=names_in, metavar="NAME,NAME", help="native, int8, 8bit; by default all that differ."
)
@click.option(
    "--cache", type=click.FloatRange(min=0, min_open=True), help="Also with a first-block cache of this threshold."
)
@click.option(
    "--gate", "gates", multiple=True, metavar="GATE", help="Exit code 1 unless it holds: psnr>=30 (repeatable)."
)
@click.option(
    "--images", type=FOLDER, metavar="DIR", help="Where images are kept; by default fluxq-images beside OUTPUT."
)
@click.option(
    "--engine",
    type=click.Choice(["local", "torchrun", "ray"]),
    default="local",
    show_default=True,
    help="What runs the pipelines.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="With --engine ray: actors; by default one per GPU or core."
)
@click.option("--address", help="With --engine ray: of a running cluster; by default one is started here.")
@run_options
@common_options
def evaluate(output: str, **arguments: Any) -> None:
    """Compare the checkpoint OUTPUT with its 16-bit model; writes OUTPUT/eval/report.html, .json and .md.

    \b
    Example:
      fluxq eval tiny-nvfp4
      fluxq eval tiny-nvfp4 --count 256 --gate 'psnr>=35'
    """
    with session_of(arguments) as session:
        asked = session.subject(output)
        session.start_work()
        report = session.judge.evaluate(asked)
        if report is None:
            return  # another process of this run has all results
        session.print(
            report.model_dump(mode="json"), lambda: show.evaluated(Path(output) / "eval" / "report.html", report)
        )
        missed = [gate.gate for run in report.runs for gate in run.gates if not gate.passed]
        if missed:
            raise RuntimeError(
                f"{output}: gate missed: {', '.join(dict.fromkeys(missed))}; the report says by how much"
            )


@click.command("bench")
@checkpoint_options
@run_options
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(["eager", "compiled", "cuda graph", "captured"]),
    help="Repeatable; by default eager. cuda graph: compiled too; captured: by fluxq.capture alone.",
)
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), help="Images in a call (repeatable).")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="HEIGHTxWIDTH",
    callback=sizes_in,
    help="Repeatable; by default the pipeline's.",
)
@click.option("--optimize", "optimized", is_flag=True, help="Also with fused blocks (`fluxq.optimize`).")
@click.option(
    "--prefer",
    type=click.Choice(["speed", "memory", "decoded"]),
    default="speed",
    show_default=True,
    help="As fluxq.prepare: int8 where that is faster, codes as they are, or fp32 beside them (CPU).",
)
@click.option("--rounds", type=click.IntRange(min=3), default=10, show_default=True, help="Times that each is run.")
@click.option("--warmup", type=click.IntRange(min=1), default=2, show_default=True, help="Rounds before those.")
@common_options
def bench(
    output: str,
    modes: tuple[str, ...],
    batches: tuple[int, ...],
    sizes: Any,
    optimized: bool,
    prefer: str,
    rounds: int,
    warmup: int,
    **arguments: Any,
) -> None:
    """Time the checkpoint OUTPUT beside its 16-bit model, in turn; writes OUTPUT/eval/speed.json.

    \b
    Example:
      fluxq bench tiny-nvfp4 --batch 1 --batch 4
    """
    with session_of(arguments) as session:
        asked = session.subject(output)
        session.start_work()
        how = {
            "modes": modes or ("eager",),
            "batches": batches or (1,),
            "sizes": sizes,
            "optimized": optimized,
            "prefer": prefer,
            "rounds": rounds,
            "warmup": warmup,
        }
        speed = session.judge.bench(asked, **how)
        session.print(speed.model_dump(mode="json"), lambda: show.timed(speed))


@click.command("debug")
@checkpoint_options
@click.option("--count", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts to run.")
@batch_size_option
@click.option("--patch", type=PATH, metavar="FILE", help="Write a recipe that keeps the worst layers in more bits.")
@click.option(
    "--growth",
    type=click.FloatRange(0, min_open=True),
    default=0.05,
    show_default=True,
    help="Bits that the patch may add, as a share of all.",
)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Runs of the prompts for the damages: blocks first, then the layers of the worst.",
)
@run_options
@common_options
def debug(output: str, patch: Path | None, growth: float, budget: int, **arguments: Any) -> None:
    """Find out where the checkpoint OUTPUT loses, layer by layer; writes OUTPUT/eval/debug.json.

    \b
    Example:
      fluxq debug tiny-nvfp4 --patch better.yaml
    """
    with session_of(arguments) as session:
        asked = session.subject(output)
        session.start_work()
        found = session.judge.debug(asked, patch, growth, budget)
        session.print(found.model_dump(mode="json"), lambda: show.debugged(found, patch))
        if patch is not None and found.patch is None:
            raise RuntimeError(f"{patch} was not written: the findings say why there is no patch")


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=PATH)
@click.option("--output", "-o", type=PATH, default=Path("report.html"), show_default=True, help="The page to write.")
@common_options
def report(runs: tuple[Path, ...], output: Path, **arguments: Any) -> None:
    """One page of several evaluations, each a checkpoint folder or a report.json; beside it JSON and Markdown.

    \b
    Example:
      fluxq report tiny-nvfp4 tiny-fp8 -o report.html
    """
    with session_of(arguments) as session:
        merged = session.judge.report(runs, output)
        session.print(merged.model_dump(mode="json"), lambda: show.evaluated(output, merged))


@click.command("verify")
@click.argument("output")
@common_options
def verify_checkpoint(output: str, **arguments: Any) -> None:
    """Prove that the checkpoint OUTPUT is whole and holds what it says; runs no model, exit code 1 if it does not.

    \b
    Example:
      fluxq verify tiny-nvfp4
    """
    with session_of(arguments) as session:
        from fluxq.quantize.verify import verify

        results = verify(Path(output))
        session.start_work()
        session.print([result.describe() for result in results], lambda: show.verified(results))
        failed = [result.check for result in results if result.status == "failed"]
        if failed:
            raise RuntimeError(f"{output}: {len(failed)} of {len(results)} checks failed ({', '.join(failed)})")


COMMANDS = (evaluate, bench, debug, report, verify_checkpoint)
