"""Commands that compare two ways to make the same images: gate."""

from __future__ import annotations

import math
from pathlib import Path

import click

from fluxq.commands import show
from fluxq.commands.options import (
    FOLDER,
    PATH,
    batch_size_option,
    count_option,
    finite_in,
    names_in,
    overwrite_option,
    run_options,
)
from fluxq.commands.session import Failure, Session, command


def margins_in(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    """Read `psnr=3` as {"psnr": 3.0}."""
    margins = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            margins[name.strip()] = margin = float(number)
        except ValueError:
            margin = math.nan
        if not 0 < margin < math.inf:
            raise click.BadParameter(f"{text!r}: write a metric and a number above 0 in its unit, as in psnr=3")
    return margins


@command("gate", short_help="Decide whether B is as near to A as A is to itself.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--floor", metavar="A2", help="Another run of A; by default one is made with another batch size.")
@click.option(
    "--metric",
    "metrics",
    callback=names_in,
    metavar="NAME,NAME",
    help="Distances to judge by; by default latent_sqnr, psnr and lpips where they can be taken.",
)
@click.option(
    "--margin",
    "margins",
    multiple=True,
    callback=margins_in,
    metavar="NAME=X",
    help="Distance beyond the floor's that is allowed, in the metric's unit (repeatable).",
)
@count_option("--images", least=2, help="Images to compare at most; by default 64, or all of an image folder.")
@batch_size_option
@click.option("--weights", metavar="DIR|hub", help="Folder with the network of LPIPS; hub fetches it.")
@click.option(
    "--expect-change", is_flag=True, help="Exit with 1 where all images are the same bits: a change did nothing."
)
@click.option("--setup", metavar="CMD", help="With git:REV: what is run once in its worktree, as 'pip install -e .'.")
@click.option(
    "--command", metavar="CMD", help="With git:REV: makes images of {prompts}, a JSONL file, in the folder {out}."
)
@click.option("--speed", is_flag=True, help="Also time both pipelines in turn, and judge how much slower B is.")
@click.option(
    "--slower",
    type=click.FloatRange(0, 1),
    callback=finite_in,
    metavar="X",
    help="With --speed: share of A's time that B may take more; by default 0.01.",
)
@count_option("--pairs", least=10, help="With --speed: timed calls of each; by default 30.")
@click.option("--history", type=FOLDER, metavar="DIR", help="Add the result to the history in this folder.")
@click.option("--junit", type=PATH, metavar="FILE", help="Also write the result as a JUnit file.")
@click.option("--markdown", type=PATH, metavar="FILE", help="Also write it as a table, for a comment on a change.")
@click.option("--work", type=FOLDER, default=Path("fluxq-gate"), metavar="DIR", help="Where to keep images.")
@run_options
def gate(session: Session, a: str, b: str) -> None:
    """Decide whether images of B are as near to those of A as A's own second run.

    A and B are pipelines, checkpoints, image folders with prompts.jsonl, servers (http://localhost:8000/v1) or commits
    (git:REV). Exits with 0 for equivalent, 1 for worse, 3 where these images cannot tell.

    \b
    Example:
      fluxq gate tiny-nvfp4 tiny-nvfp4-new
      fluxq gate images-before images-after --floor images-before-again
      fluxq gate tiny-nvfp4 http://localhost:8000 --images 16
    """
    session.requirements.require_files(session.arguments)
    session.say(f"A {a}, B {b}")
    request = session.gate(a, b)
    session.start_work()
    from fluxq.eval.gate.result import EXIT_CODES
    from fluxq.jobs import gating

    result = gating.run_gate(request)
    session.print(result.model_dump(mode="json"), lambda: show.gated(result))
    if code := EXIT_CODES[result.verdict]:
        raise Failure(f"{b}: {show.gate_in_words(result)}", code)


@command("history", short_help="Draw what gates and benches found over commits.")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--output", "-o", type=PATH, default=Path("history.html"), help="The page to write.")
@overwrite_option
def history(session: Session, folder: Path, output: Path, overwrite: bool) -> None:
    """Draw what `fluxq gate --history DIR` and `fluxq bench --history DIR` added, over commits.

    One page that works offline, with limits, and with the commits at which a level changed.

    \b
    Example:
      fluxq history DIR -o history.html
    """
    rows = session.judge.history(folder, output, overwrite=overwrite, on_start=session.start_work)
    session.print([row.model_dump(mode="json") for row in rows], lambda: show.history(rows, output))


COMMANDS = (gate, history)
