"""The `fluxq` command: each subcommand parses, calls one function of jobs.py or its like and prints.

Exit codes: 0 done, 1 something failed while working, 2 what was asked for cannot work, 130 interrupted. Results go to
stdout, everything else to stderr. Heavy imports happen inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import os
import sys

import click

from fluxq import __version__
from fluxq.commands import exchanging, judging, looking_up, quantizing

_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fluxq")
def cli() -> None:
    """Quantize diffusion transformers to FP8, MXFP8, NVFP4, INT8 or INT4 checkpoints that load in diffusers.

    \b
    Example:
      fluxq quantize --recipe nvfp4.yaml
    """


for _command in (*quantizing.COMMANDS, *judging.COMMANDS, *exchanging.COMMANDS, *looking_up.COMMANDS):
    cli.add_command(_command)


def main() -> None:
    """Entry point: turns exceptions into one message and an exit code."""
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt) as error:
        notes = getattr(error.__cause__ or error, "__notes__", None)  # click raises its Abort from what Ctrl-C raised
        click.echo(f"interrupted; {notes[0] if notes else 'nothing half-written was left behind'}", err=True)
        sys.exit(_INTERRUPTED)
