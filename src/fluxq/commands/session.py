"""One run of a command: its exit code for errors so far, its way to print, the modules that it calls."""

from __future__ import annotations

import inspect
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fluxq.base.console import visible
from fluxq.base.extras import cure_of, require_for
from fluxq.base.ranks import launched
from fluxq.commands import show
from fluxq.commands.options import COMMON

if TYPE_CHECKING:
    from fluxq.jobs.forecast import Forecast
    from fluxq.jobs.search import Search
    from fluxq.recipes.recipe import Recipe

_EXPECTED = (ValueError, RuntimeError, OSError)
_CANNOT_WORK = 2  # exit code


@contextmanager
def session_of(arguments: dict[str, Any]) -> Iterator[Session]:
    """Yield a command's session; errors that users can mend become messages with the exit code of the moment.

    A package of the extra `all` that is not installed is one of them, and its exit code is always 2.
    """
    from fluxq.base.console import set_verbosity

    session = Session(arguments)
    set_verbosity(-1 if session.quiet else session.verbose)
    try:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise ValueError("the current folder was removed; change to one that is there") from None
        require_for(click.get_current_context().command.name or "")
        yield session
    except BrokenPipeError:
        raise
    except click.Abort as error:  # Ctrl-C, or the end of the input, at a question: click has no words for it
        click.echo(err=True)  # the message does not go on the question's line
        if not isinstance(error.__context__, EOFError):
            error.add_note("nothing was written")
            raise
        raise Failure("the input ended before the last question; nothing was written", _CANNOT_WORK) from None
    except ModuleNotFoundError as error:
        if not (cure := cure_of(error)):
            raise
        raise Failure(session.who + cure, _CANNOT_WORK) from None
    except _EXPECTED as error:
        if session.verbose:
            traceback.print_exc()
        raise Failure(session.who + str(error), session.exit_code) from None


class Command(click.Command):
    """A command whose function gets a session, and those of the options that it names; the session has the others."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.params += COMMON

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse words as click does, `~` in front of a value for the home folder: shells leave `--option=~/x` alone."""
        return super().parse_args(ctx, [re.sub(r"^(--[\w-]+=)?(~.*)", _with_home, word, flags=re.S) for word in args])

    def invoke(self, ctx: click.Context) -> None:
        function: Any = self.callback
        named = inspect.signature(function).parameters
        with session_of({name: value for name, value in ctx.params.items() if name not in named}) as session:
            ctx.invoke(function, session, **{name: value for name, value in ctx.params.items() if name in named})


def _with_home(word: re.Match[str]) -> str:
    return (word[1] or "") + os.path.expanduser(word[2])


command = partial(click.command, cls=Command)


class Session:
    """One command's options, its exit code for errors so far, and its way to print."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.verbose, self.quiet = arguments.pop("verbose"), arguments.pop("quiet")
        self.as_json = arguments.pop("as_json")
        self.arguments = arguments
        self.exit_code = _CANNOT_WORK
        self.who = ""

    @cached_property
    def requirements(self) -> Any:
        from fluxq.jobs import requirements

        return requirements

    @cached_property
    def jobs(self) -> Any:
        from fluxq.jobs import making

        return making

    @cached_property
    def judge(self) -> Any:
        from fluxq.jobs import judge

        return judge

    @cached_property
    def options(self) -> Any:
        return self.jobs.JobOptions(**self._with_call())

    def subject(self, output: str, *, whole_videos: bool = False) -> Any:
        """Return the checkpoint to judge, with its 16-bit model; errors and the first line come before slow imports."""
        self.requirements.require_checkpoint(output, recorded=True)
        self.requirements.require_files(self.arguments)
        self.requirements.require_measures(self.arguments.get("gates", ()), self.arguments.get("metrics") or ())
        if self.arguments["model"]:
            self.requirements.require_model(
                self.arguments["model"], self.arguments["revision"], self.arguments["local_files_only"]
            )
        self.say(f"checkpoint {output}{self._device()}")
        options = self.judge.JudgeOptions(**self._with_call())
        return self.judge.subject_of(Path(output), options, whole_videos=whole_videos)

    def gate(self, a: str, b: str) -> Any:
        """Return the request to compare two sources of images."""
        from fluxq.jobs import gating

        return gating.gate_of(gating.GateOptions(a=a, b=b, **self._with_call()))

    def _with_call(self) -> dict[str, Any]:
        """Return the arguments, those of the pipeline together under `call`."""
        call_keys = ("num_inference_steps", "guidance_scale", "height", "width", "num_frames")
        call = {key: self.arguments.get(key) for key in call_keys}
        rest = {key: value for key, value in self.arguments.items() if key not in call_keys}
        return {**rest, "call": {key: value for key, value in call.items() if value is not None}}

    def announce(self, writes: str = "", *, has_recipe: bool = True) -> Recipe:
        """Check the names in the options and print the first line, before anything slow is imported; return the recipe.

        writes: "folder" or "file", where the command has an output.
        has_recipe: whether the recipe is the user's.
        """
        from fluxq.base.model import DEFAULT_MODEL
        from fluxq.base.output import Output
        from fluxq.recipes.recipe import load_recipe

        arguments = self.arguments
        recipe_name, recipe = load_recipe(arguments["recipe"], profile=arguments.get("profile"))
        if self.who:  # the first process checks
            return recipe
        for name in ("model", "output"):
            if arguments.get(name) == "":
                raise ValueError(f"{name.upper()} is empty: give a name, or leave it out")
        model = arguments["model"] or recipe.model
        self.requirements.require_files(arguments)
        folder = self.requirements.require_model(
            model or DEFAULT_MODEL,
            arguments["revision"],
            arguments["local_files_only"],
            arguments.get("components", ()),
        )
        if writes:
            is_file = writes == "file"
            place = self.requirements.output_for(arguments["output"], folder.name, recipe_name, is_file=is_file)
            reads = self.requirements.reads_of(folder.path, arguments)
            Output(place, is_file).require(reads, overwrite=arguments["overwrite"], exists_ok=True)
        chosen = model or f"{DEFAULT_MODEL} (no MODEL given: the small FLUX pipeline that comes with fluxq)"
        of_recipe = f", recipe {recipe_name}" if has_recipe else ""
        self.say(f"model {chosen}{of_recipe}{self._device()}")
        return recipe

    def _device(self) -> str:
        """Return the first line's words about the device, "" for a command without one."""
        if "device" not in self.arguments:
            return ""
        from fluxq.base import devices

        option = self.arguments["device"]
        return f", device {devices.describe(devices.choose(option), option)}"

    def say(self, line: str) -> None:
        """Print a line for people, unless --quiet or --json was given, or another process of torchrun speaks."""
        if self.speaks:
            click.echo(visible(line))

    @property
    def speaks(self) -> bool:
        """True if lines for people are printed."""
        return not (self.quiet or self.as_json) and (not launched() or os.environ["RANK"] == "0")

    def require_gpu(self, gpu: str | None, **needing: Any) -> None:
        """Raise ValueError for an unknown GPU, and for options that mean nothing without one."""
        from fluxq.recipes.devices import find_device

        if gpu is not None:
            find_device(gpu)
            return
        needing |= {name: self.arguments[name] for name in ("height", "width")}
        flags = [f"--{name}" for name, value in needing.items() if value is not None]
        if flags:
            raise ValueError(f"{', '.join(flags)}: only the cost on a GPU depends on it; give --gpu too, or --vram")

    def fit(self, vram: int, frames: int | None, others: dict[str, Any]) -> Any:
        """Return the best recipe and placement in so much memory; ValueError for options that mean nothing there."""
        from fluxq.base.model import DEFAULT_MODEL
        from fluxq.recipes.recipe import load_recipe
        from fluxq.runtime.place import room_of

        needless = ("profile", "components", "include", "exclude", "statistics")
        others |= {name: self.arguments[name] or None for name in needless}
        flags = [f"--{name}" for name, value in others.items() if value is not None]
        if flags:
            raise ValueError(f"--vram chooses recipes for whole components, by bytes: leave out {', '.join(flags)}")
        room, recipe = room_of(vram), self.arguments["recipe"]
        settings = load_recipe(recipe)[1]
        if settings.auto is not None:
            raise ValueError(f"--vram counts bytes, and recipe {recipe} chooses formats by a search: give another one")
        model = self.arguments["model"] or settings.model or DEFAULT_MODEL
        revision = self.arguments["revision"]
        folder = self.requirements.require_model(model, revision, self.arguments["local_files_only"])
        self.say(f"model {model}")
        from fluxq.jobs import fits

        given = self._with_call()["call"] | ({} if frames is None else {"num_frames": frames})
        call = self.requirements.call_of(folder, folder.generation_defaults, given)
        self.requirements.require_call(folder, call, given)
        is_chosen = click.get_current_context().get_parameter_source("recipe") is not ParameterSource.DEFAULT
        return fits.best_fit(folder, room, call, (recipe,) if is_chosen else (), model=model, revision=revision)

    @contextmanager
    def together(self) -> Iterator[Any]:
        """Yield the processes that torchrun started for this command; all but the first print only errors."""
        from fluxq.base.console import set_verbosity
        from fluxq.base.ranks import ranks_of_launch

        with ranks_of_launch() as ranks:
            if not ranks.leads:
                self.quiet, self.as_json, self.who = True, False, f"process {ranks.rank}: "
                set_verbosity(-1)
            yield ranks

    def choose(self, search: Search) -> dict[str, Any] | None:
        """Return what `choosing.choose` does, its forecast printed before; errors are failures of the work."""
        from fluxq.jobs import choosing, forecast
        from fluxq.jobs.search import outline_of

        passes = outline_of(search)["passes"]
        self.start_work(None if search.job.finished else forecast.of_choosing(search.job, passes))
        return choosing.choose(search)

    def choose_first(self, ranks: Any) -> None:
        """Search for formats where the recipe has `auto`; the options name the recipe of what is chosen then."""
        from fluxq.jobs.search import search_before

        before = search_before(self.options, ranks)
        if before is None:
            return
        search, self.options = before
        self.say(f"formats are chosen first, for {search.job.recipe.auto}")
        result = self.choose(search)
        if result is not None and self.speaks:
            show.chosen(result, {"output": str(search.job.output)})
        self.exit_code = _CANNOT_WORK

    def forecast(self, job: Any, of: str) -> None:
        """Print the job's time and memory before it starts. of: name of a function of jobs/forecast.py."""
        if self.quiet or self.as_json or self.who or job.finished:
            return
        from fluxq.jobs import forecast

        show.forecast(getattr(forecast, of)(job))

    def start_work(self, forecast: Forecast | None = None) -> None:
        """Print the forecast. From here on an error is a failure of the work, not of the request."""
        self.exit_code = 1
        if forecast is not None and self.speaks:
            show.forecast(forecast)

    def print(self, value: object, for_people: Callable[[], None]) -> None:
        if self.as_json:
            click.echo(json.dumps(value, indent=2))
        elif not self.quiet:
            for_people()


class Failure(click.ClickException):
    """A message for people, with the exit code of the moment."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(visible(message))
        self.exit_code = exit_code  # pyright: ignore[reportAttributeAccessIssue]  click reads it from the instance
