"""One run of a command: its exit code for errors so far, how it prints, what it calls."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import click

_EXPECTED = (ValueError, RuntimeError, OSError)


@contextmanager
def session_of(arguments: dict[str, Any]) -> Iterator[Session]:
    """What a command does within it; errors that users can mend become messages with the exit code of the moment."""
    from fluxq.base.console import set_verbosity

    session = Session(arguments)
    set_verbosity(-1 if session.quiet else session.verbose)
    try:
        yield session
    except BrokenPipeError:
        raise
    except _EXPECTED as error:
        if session.verbose:
            traceback.print_exc()
        raise Failure(session.who + str(error), session.exit_code) from None


class Session:
    """One command's options, its exit code for errors so far, and how it prints."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.verbose, self.quiet = arguments.pop("verbose"), arguments.pop("quiet")
        self.as_json = arguments.pop("as_json")
        self.arguments = arguments
        self.exit_code = 2
        self.who = ""

    @cached_property
    def jobs(self) -> Any:
        from fluxq import jobs

        return jobs

    @cached_property
    def judge(self) -> Any:
        from fluxq import judge

        return judge

    @cached_property
    def options(self) -> Any:
        return self.jobs.Options(**self._with_call())

    def subject(self, output: str) -> Any:
        """The checkpoint to judge, what it was made from and what to ask of both."""
        return self.judge.subject(Path(output), self.judge.Options(**self._with_call()))

    def _with_call(self) -> dict[str, Any]:
        """The arguments, those of the pipeline together under `call`."""
        call_keys = ("num_inference_steps", "guidance_scale", "height", "width", "num_frames")
        call = {key: self.arguments.get(key) for key in call_keys}
        rest = {key: value for key, value in self.arguments.items() if key not in call_keys}
        return {**rest, "call": {key: value for key, value in call.items() if value is not None}}

    def announce(self) -> None:
        """The first line: what is about to be worked on, said before anything slow happens."""
        if self.who:
            return  # the first process says it
        from fluxq.base.model import DEFAULT_MODEL
        from fluxq.recipes.recipe import load_recipe

        recipe_name, recipe = load_recipe(self.arguments["recipe"])
        model = self.arguments["model"] or recipe.model
        chosen = model or f"{DEFAULT_MODEL} (no MODEL given: the small FLUX pipeline that comes with fluxq)"
        if not self.quiet and not self.as_json:
            click.echo(f"model {chosen}, recipe {recipe_name}")

    def require_gpu(self, gpu: str | None, **needing: Any) -> None:
        """ValueError for an unknown GPU, and without one for options that only it gives a meaning."""
        from fluxq.recipes.devices import find_device

        if gpu is not None:
            find_device(gpu)
            return
        needing |= {name: self.arguments[name] for name in ("height", "width")}
        given = [f"--{name}" for name, value in needing.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: only the cost on a GPU depends on it; give --gpu too")

    def prepare(self, **how: Any) -> Any:
        return self.jobs.prepare(self.options, **how)

    @contextmanager
    def together(self) -> Iterator[Any]:
        """The processes that torchrun started for this command; the first one speaks, the others only of errors."""
        from fluxq.base.console import set_verbosity
        from fluxq.base.ranks import ranks_of_launch

        with ranks_of_launch() as ranks:
            if not ranks.leads:
                self.quiet, self.as_json, self.who = True, False, f"process {ranks.rank}: "
                set_verbosity(-1)
            yield ranks

    def start_work(self) -> None:
        """From here on an error is a failure of the work, no longer of what was asked for."""
        self.exit_code = 1

    def print(self, value: object, for_people: Callable[[], None]) -> None:
        if self.as_json:
            click.echo(json.dumps(value, indent=2))
        elif not self.quiet:
            for_people()


class Failure(click.ClickException):
    """A message for people, with the exit code of the moment."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # pyright: ignore[reportAttributeAccessIssue]  click reads it from the instance
