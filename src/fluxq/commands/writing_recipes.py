"""Commands about recipe files: recipe new, which writes one, and recipe check."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fluxq.base.console import bytes_of, is_terminal
from fluxq.commands import show
from fluxq.commands.options import PATH, bytes_option
from fluxq.commands.session import Command, Session

WANTS = ("quality", "speed")
TARGETS = ("fluxq", "comfy", "torchao", "modelopt", "bfl", "nunchaku", "nunchaku_lite")  # a test compares
_MODEL, _FILE = "FLUX.1-dev", "recipe.yaml"


@click.group(short_help="Write a recipe file by a few questions; check one.")
def recipe() -> None:
    """Write a recipe file by a few questions, or check one.

    \b
    Example:
      fluxq recipe new --gpu 4070 --want speed
      fluxq recipe check recipe.yaml
    """


@recipe.command(cls=Command, short_help="Ask a few questions, and write a commented recipe file.")
@click.option("--gpu", metavar="NAME", help="The card that will run it, as 4070 or h100; or cpu.")
@click.option("--want", type=click.Choice(WANTS), help="What comes first among what fits.")
@bytes_option("--memory", help="Memory that is free for it; by default all of the card's.")
@click.option("--for", "target", type=click.Choice(TARGETS), help="The format to export to; by default fluxq runs it.")
@click.option("--model", metavar="NAME", help=f"A model of `fluxq families`; by default {_MODEL}.")
@click.option("--output", "-o", type=PATH, default=_FILE, metavar="FILE", help="Where to write.")
def new(
    session: Session,
    gpu: str | None,
    want: str | None,
    memory: int | None,
    target: str | None,
    model: str | None,
    output: Path,
) -> None:
    """Choose a recipe for a GPU, and write it as a commented file that is yours to change.

    In a terminal, questions stand in for missing options; elsewhere --gpu and --want have to be given. An existing
    file is never replaced. Beside the file stands the schema that editors complete its keys by. Memory and times are
    computed, quality is that of the embedded pipeline; nothing is downloaded.

    \b
    Example:
      fluxq recipe new
      fluxq recipe new --gpu 4070 --want speed -o mine.yaml
      fluxq recipe new --gpu 4090 --memory 20GB --want quality --for comfy
    """
    from fluxq.recipes.devices import find_device

    asks = is_terminal(sys.stdin) and session.speaks
    if not asks and (missing := [f"--{name}" for name, value in {"gpu": gpu, "want": want}.items() if not value]):
        raise ValueError(f"there is no terminal to ask in: give {' and '.join(missing)}")
    gpu = gpu or click.prompt("GPU, as 4070 or h100, or cpu")
    capacity = None if gpu.lower() == "cpu" else f"{find_device(gpu).memory:g}GiB"
    if asks:
        memory = memory or click.prompt("Memory for it", default=capacity, value_proc=_size)
        want = want or click.prompt("First comes", type=click.Choice(WANTS), default="quality")
        target = target or click.prompt("Export to", type=click.Choice(TARGETS), default="fluxq")
        model = model or click.prompt("Model, as in `fluxq families`", default=_MODEL)
    from fluxq.jobs import advising

    wants = "speed" if want == "speed" else "quality"
    wish = advising.Wish(gpu, wants, memory, target or advising.OWN, model or _MODEL)
    advice = advising.write_recipe(wish, output, session.start_work)
    hub_id = advising.hub_id_of(wish.model)
    session.print({"output": str(output), **advice.describe()}, lambda: show.advised(output, advice, hub_id))


def _size(answer: str) -> int:
    """Read a size; for what is none the question is asked again."""
    if size := bytes_of(answer):
        return size
    raise click.UsageError("write a size with its unit, as in 8GB or 12GiB")


@recipe.command(cls=Command, short_help="Say what is wrong with recipe files, with lines and cures.")
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
def check(session: Session, files: tuple[str, ...]) -> None:
    """Say what is wrong with recipe files: each fault with its line and a cure.

    A shipped recipe's name will do, too. Exits with 0 if all can be used, with 2 if any cannot. The layers that a
    recipe reaches depend on the model: `fluxq plan MODEL --recipe FILE` lists them.

    \b
    Example:
      fluxq recipe check recipe.yaml
    """
    from fluxq.recipes.checking import faults_of

    faults_by_file = {}
    for file in files:
        try:
            faults_by_file[file] = faults_of(file)
        except FileNotFoundError as error:  # the others are checked all the same
            faults_by_file[file] = [str(error)]
    session.print(faults_by_file, lambda: show.checked([file for file, faults in faults_by_file.items() if not faults]))
    if faults := [fault for of_file in faults_by_file.values() for fault in of_file]:
        raise ValueError("\n".join(faults))


COMMANDS = (recipe,)
