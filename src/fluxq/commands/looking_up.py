"""Commands about models and machines: families, env, warmup, which makes a machine ready, and doctor."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fluxq.commands import show
from fluxq.commands.options import DTYPES, FOLDER, PATH, count_option, prefer_option
from fluxq.commands.session import Session, command

if TYPE_CHECKING:
    from fluxq.jobs.doctor import Examination


@command(short_help="Print what recipes make of published models: bits, sizes, memory.")
@click.argument("name", required=False)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="NAME",
    help="Recipe to show (repeatable); by default two, or with NAME all.",
)
def families(session: Session, name: str | None, recipes: tuple[str, ...]) -> None:
    """Print published models and what recipes make of them: bits, checkpoint, memory.

    Nothing is downloaded and nothing is computed.

    NAME is a model, a family or a model's class. With it, or with --json, every shipped recipe is shown.

    \b
    Example:
      fluxq families FLUX.1-dev --recipe nvfp4
      fluxq families
    """
    from fluxq.jobs import catalogue  # not through jobs/making.py, which imports diffusers' pipelines

    chosen = catalogue.recipes_for(recipes, all_of_them=name is not None or session.as_json)
    models = list(catalogue.models(name))
    session.print(
        [model.describe(chosen) for model in models] if session.as_json else None,
        lambda: show.families(models, chosen, in_detail=name is not None),
    )


@command(short_help="Print versions, devices and what computes each scheme, for bug reports.")
def env(session: Session) -> None:
    """Print versions, devices and what computes each scheme on them; paste it into a bug report.

    \b
    Example:
      fluxq env --json
    """
    from fluxq.jobs.environment import environment  # not through jobs/making.py, which imports diffusers

    report = environment()
    session.print(report, lambda: show.environment(report))


@command(short_help="Compile the kernels that a checkpoint needs on this GPU.")
@click.argument("output", metavar="CHECKPOINT")
@click.option("--device", default="cuda", metavar="NAME", help="The GPU that will serve.")
@count_option("--tokens", multiple=True, help="Number of tokens that layers will see (repeatable).")
@prefer_option
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Dtype of activations.")
@click.option("--cache", type=FOLDER, help="Folder for compiled kernels, to ship.")
def warmup(session: Session, output: str, tokens: tuple[int, ...], cache: Path | None) -> None:
    """Compile the kernels that CHECKPOINT launches on this GPU.

    No weights are read.

    Without --tokens those of a 1024 x 1024 image of FLUX.1: 1, 512, 4096 and 4608. Set TRITON_CACHE_DIR to the folder
    given as --cache where images are made.

    \b
    Example:
      fluxq warmup tiny-nvfp4 --cache kernels
    """
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache.resolve())
    session.requirements.require_local(output)
    rows = session.jobs.warm_up(output, tokens=tokens or (1, 512, 4096, 4608), **session.arguments)
    session.print(rows, lambda: show.warmed(rows))


@command(short_help="Prove and time the kernels on this GPU; wrong ones are not used again.")
@click.argument("output", metavar="[CHECKPOINT]", required=False)
@click.option("--device", default="cuda", metavar="NAME", help="The GPU to prove.")
@prefer_option
@click.option("--chip", metavar="NAME", help="With --interpret: the chip to prove for, as in sm_90.")
@click.option("--interpret", is_flag=True, help="Run the kernels on the CPU, in the interpreter; nothing is timed.")
@click.option("--share", type=PATH, metavar="FILE", help="Also write the findings as JSON for a bug report, anonymous.")
@click.option("--candidate", metavar="MODULE:FUNCTION", help="Judge and time an outside kernel beside ours.")
@click.option("--op", metavar="NAME", help="The op whose arguments the candidate takes.")
def doctor(session: Session, output: str | None, interpret: bool, share: Path | None) -> None:
    """Prove on this GPU each kernel that CHECKPOINT launches, at its shapes, and time it.

    Results are compared with the torch reference, times stand beside the library's and bf16's. Findings are kept in
    ~/.cache/fluxq for this GPU, driver and versions: a kernel that was wrong is not used there, and times decide
    between kernels of one arithmetic.

    Without CHECKPOINT the shapes are those of FLUX.1-dev under every shipped recipe; in the interpreter, of the
    embedded pipeline. Exits with 0 if all is within its bounds, 1 if something was wrong or could not be compared, 2 if
    the request cannot work, as without a GPU.

    \b
    Example:
      fluxq doctor tiny-nvfp4
      fluxq doctor tiny-nvfp4 --chip sm_90 --interpret
    """
    if interpret != (session.arguments["chip"] is not None):
        raise ValueError("--chip names the chip that --interpret stands for: give both, or neither for the GPU")
    if find_spec("triton") is None:  # before what imports it
        raise ValueError("doctor proves kernels in Triton, which is not there: install triton")
    from fluxq.jobs import sharing

    if share is not None:
        sharing.require_place(share, output)
    if output is not None:
        session.requirements.require_local(output)
    from fluxq.jobs import doctor as job

    request = job.request_of(output, **session.arguments)
    session.start_work()
    examination = job.examine(request)
    session.print(asdict(examination), lambda: show.examined(examination))
    if share is not None:
        sharing.share(examination, share)
    if complaint := _complaint(examination):
        raise RuntimeError(complaint)


def _complaint(examination: Examination) -> str:
    """Return why an examination is not the proof that was asked for; empty if it is."""
    ours, others = (
        [row for row in examination.wrong if row["candidate"] is is_outside] for is_outside in (False, True)
    )
    parts = []
    if ours:
        names = ", ".join(dict.fromkeys(f"{row['op']} {row['format']}" for row in ours))
        parts.append(
            f"wrong here: {names}; {'fluxq does without on this GPU' if examination.file else 'nothing is kept of it'}"
        )
    if others:
        parts.append(f"wrong: the candidate {examination.outside}")
    if examination.uncompared:
        parts.append(f"{len(examination.uncompared)} not compared, each with its reason above")
    if not examination.rows:
        parts.append("nothing was compared, because nothing is launched")
    cure = ". Please report it with the file that --share FILE writes" if ours else ""
    return "; ".join(parts) + cure


COMMANDS = (families, env, warmup, doctor)
