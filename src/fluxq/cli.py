"""The `fluxq` command: each subcommand parses, calls one function of jobs/ and prints.

Exit codes: 0 done, 1 something failed while working, 2 the request cannot work, 3 a gate or passport cannot tell, 130
interrupted, 143 and 129 by SIGTERM and SIGHUP. Results go to stdout, everything else to stderr. Heavy imports happen
inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import difflib
import io
import os
import signal
import sys

import click

from fluxq import __version__
from fluxq.commands import exchanging, gating, judging, looking_up, quantizing, serving, writing_recipes

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}
_SIGNALLED = 128  # and the number of the signal, as shells have it


class _Commands(click.Group):
    """Lists of commands by purpose, with whole summaries."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(command.name or "", command.short_help or "") for command in commands])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            if ctx.invoked_subcommand in _WITHOUT_OUTPUT:
                error.add_note("this command has no output")
            raise


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="fluxq")
def cli() -> None:
    """Quantize diffusion transformers to FP8, MXFP8, NVFP4, INT8 or INT4 checkpoints that load in diffusers.

    \b
    Example:
      fluxq quantize --recipe nvfp4.yaml
    """


_SECTIONS = {
    "Quantize": (*quantizing.COMMANDS, *writing_recipes.COMMANDS),
    "Judge a checkpoint": (*judging.COMMANDS, *gating.COMMANDS),
    "Serve": serving.COMMANDS,
    "Work with other programs": exchanging.COMMANDS,
    "Look up": looking_up.COMMANDS,
}
_WITHOUT_OUTPUT = ("plan", "inspect", "verify", "families", "env", "demo")
for _command in (command for commands in _SECTIONS.values() for command in commands):
    cli.add_command(_command)


def _meant(error: click.NoSuchOption) -> str:
    """Return the argument, recipe or option that an unknown option was meant to be; "" if none is near."""
    parameters = error.ctx.command.params if error.ctx else []
    names = [name for each in parameters for name in (*each.opts, each.metavar or each.name.upper())]
    meant = _ELSEWHERE.get(error.option_name, "")
    if meant and meant.split()[0] in names:
        return meant
    names = [name for name in names if name.startswith("-")]
    near = difflib.get_close_matches(error.option_name, names, n=1, cutoff=0.82)
    return near[0] if near else ""


_ELSEWHERE = {
    "--model": "MODEL",
    "--format": "--recipe",
    "--bits": "--recipe",
    "--steps": "--num-inference-steps",
    "--output-dir": "--output",
    "--cpu": "--device cpu",
    "--gpu": "--device cuda",
}


def main() -> None:
    """Run the command line: turn exceptions into one message and an exit code."""
    ended: list[int] = []
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in another encoding a terminal shows `?` for signs that it lacks
            stream.reconfigure(errors="replace")
    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C: unfinished work is tidied up, finished work is kept
        number = getattr(signal, name, None)  # a system may have none, and nohup has this one ignored
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: (ended.append(number), signal.default_int_handler(number, _)))
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            near = f". Did you mean {meant!r}?" if (meant := _meant(error)) else "."
            error = click.UsageError(f"No such option {error.option_name!r}{near}", error.ctx)
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt) as error:
        if isinstance(error.__cause__, EOFError):  # click's sign of an answer that did not come
            raise error.__cause__ from None
        kept = "every output, and what interrupted runs had done before, is as it was or whole"
        click.echo(f"interrupted; {_note(error) or kept}", err=True)
        sys.exit(_SIGNALLED + (ended or [signal.SIGINT])[0])


def _note(error: BaseException | None) -> str:
    """Return the note of an interruption, or of one that it interrupted in turn; "" without one."""
    while error is not None:
        if notes := getattr(error, "__notes__", None):
            return notes[0]
        error = error.__cause__ or error.__context__  # click raises its Abort from Ctrl-C's exception
    return ""
