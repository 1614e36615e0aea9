"""Progress bars, logging and parts of messages for people; all write to stderr, so stdout stays a program's output.

Sizes, times and work are told in three digits and the unit that needs no zeros around them.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")

_MINUTE = 60.0  # seconds
_LONGEST_PLACE = 512  # characters: a damaged file may name anything

logger = logging.getLogger("fluxq")


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate `items` under a progress bar; without a terminal, or without rich, log a line a minute.

    Nothing is drawn or logged with logging at ERROR.
    """
    if not _draws():
        count = len(items) if total is None and isinstance(items, Sized) else total
        news = _News(description, count or 0, 0)
        for done, item in enumerate(items, 1):
            yield item
            news.tell(done, f"{done} of {count}" if count else f"{done}")
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(items, description=description, total=total, console=console, disable=_quiet(), transient=True)


def without_cure(error: Exception) -> str:
    """Return an error's message up to the cure, where fluxq itself cures it."""
    return str(error).rpartition("; ")[0] or str(error)


class _News:
    """A line a minute about work of `total` parts, of which `before` were done at its start."""

    def __init__(self, description: str, total: float, before: float) -> None:
        self.description, self.total, self.before = description, total, before
        self.started = self.logged = time.monotonic()

    def tell(self, done: float, counted: str) -> None:
        """Log the state of the work and the time that is left, if the last line is a minute old."""
        now = time.monotonic()
        if now - self.logged < _MINUTE:
            return
        self.logged = now
        rate = (done - self.before) / (now - self.started)
        left = f", about {math.ceil((self.total - done) / rate / _MINUTE)} min left" if self.total > done else ""
        logger.warning("%s: %s after %d min%s", self.description, counted, (now - self.started) // _MINUTE, left)


@contextmanager
def blocks_progress(
    description: str, blocks: int, nbytes: int, known_blocks: int = 0, known_bytes: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show a bar of blocks of different sizes, and yield the function to call with each block's bytes.

    known_blocks, known_bytes: those that were there before; they are shown and do not count for the speed. Drawn or
    logged as by `progress`.
    """
    done = known_blocks
    if not _draws():
        news, read = _News(description, nbytes, known_bytes), known_bytes

        def log(size: int) -> None:
            nonlocal done, read
            done, read = done + 1, read + size
            news.tell(read, f"{done} of {blocks} blocks")

        yield log
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    texts = TextColumn("{task.description}"), TextColumn("{task.fields[done]}/{task.fields[blocks]} blocks")
    columns = texts[0], BarColumn(), texts[1], TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=_quiet(), transient=True) as bar:
        task = bar.add_task(description, total=nbytes, completed=known_bytes, done=known_blocks, blocks=blocks)

        def advance(size: int) -> None:
            nonlocal done
            done += 1
            bar.update(task, advance=size, done=done)

        yield advance


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether people watch a stream; a process without stdout or stderr has None in its place."""
    return stream is not None and stream.isatty()


def _draws() -> bool:
    """Tell whether bars are drawn: people watch, and rich of the extra `all` is installed."""
    return is_terminal(sys.stderr) and find_spec("rich") is not None


def _quiet() -> bool:
    return logger.getEffectiveLevel() >= logging.ERROR


def say_once(library: str, beginning: str) -> None:
    """Let a library's logger write a message with this beginning only once, instead of for every prompt of every image.

    library: the name of its root logger, whose handlers write the records of all its modules.
    """
    for handler in logging.getLogger(library).handlers:
        if not any(isinstance(each, _Once) and each.beginning == beginning for each in handler.filters):
            handler.addFilter(_Once(beginning))


class _Once(logging.Filter):
    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning, self.was_said = beginning, False

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(self.beginning):
            return True
        first, self.was_said = not self.was_said, True
        return first


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def first_fault(error: ValidationError) -> str:
    """Return the first fault that pydantic found, with its place."""
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    return f"{where[:_LONGEST_PLACE]}: {fault['msg']}" if where else fault["msg"]


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean 'x'?)" for the one of `names` most like `name`, whatever its case; "" if none is.

    cutoff: of difflib, how alike they must be, from 0 to 1.
    """
    by_lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def path_near(path: Path) -> str:
    """Return " (did you mean …?)" for a missing path: one of its neighbours."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.name != path.name]  # of no use if it exists
    except OSError:  # the parent is not there either, or may not be read
        return ""
    return did_you_mean(str(path), (str(path.with_name(name)) for name in names), cutoff=0.8)


def visible(text: str) -> str:
    r"""Show control characters as `\x1b`: names in a stranger's file cannot move the cursor or turn the text.

    Characters that XML or UTF-8 cannot hold are shown so too: the text may go into a drawing, a page or a file.
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def visible_name(text: str) -> str:
    """Return `visible` of a text on one line: a stranger's name cannot begin a line of its own."""
    return visible(text).replace("\n", r"\x0a").replace("\t", r"\x09")


_CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # all but \n and \t
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069"  # they turn the direction of text
    "\\ud800-\\udfff\\ufffe\\uffff]"  # half a pair, and no characters
)


def width(text: str) -> int:
    """Return the columns that a text takes in a terminal: two for a wide character, none for a combining one."""
    return sum(
        0 if unicodedata.category(each) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(each) in "WF")
        for each in text
    )


def digits(value: float) -> str:
    """Return a number with three digits, without trailing zeros."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """Return bytes in powers of 1000, as in "1.34 MB"."""
    return _scaled(nbytes, 1, _SIZES)


def bytes_of(text: str) -> int:
    """Read `5GB` as 5000000000; with an i, as in 5GiB, powers of 1024. Return 0 for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(I?)B", text.strip().upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1)) if match else 0


def duration(seconds: float) -> str:
    """Return seconds, as in "694 ns", "1.2 ms", "3 min 5 s" or "2 h 5 min"."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
    return _scaled(seconds, 1e-9, _TIMES)


def work(flops: float) -> str:
    """Return FLOPs, as in "59.5 TFLOP"."""
    return _scaled(flops, 1, _WORK)


def _scaled(value: float, unit: float, names: tuple[str, ...]) -> str:
    """Return a value in the largest of its units, each 1000 times the one before, that keeps it at 1 or more."""
    value /= unit
    for name in names[:-1]:
        if abs(value) < 999.5:
            return f"{digits(value)} {name}"
        value /= 1000
    return f"{digits(value)} {names[-1]}"


_SIZES = ("B", "kB", "MB", "GB", "TB")
_TIMES = ("ns", "µs", "ms", "s")
_WORK = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def set_verbosity(level: int) -> None:
    """Set a command's log level: -1 errors only, 0 warnings and progress, 1 and above decisions and reasons too."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(_Visible("%(message)s"))
    logger.setLevel(logging.ERROR if level < 0 else logging.WARNING if level == 0 else logging.INFO)
    if level < 1:  # diffusers' warning of its own imports, which no user can mend
        warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated", category=FutureWarning)


@contextmanager
def without_loading_bars() -> Iterator[None]:
    """Keep diffusers and transformers from drawing a bar for each component, even where no terminal is."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in libraries:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in libraries:
            log.enable_progress_bar()


@contextmanager
def without_native_output() -> Iterator[None]:
    """Drop what compiled libraries print to standard output meanwhile, past Python: it would stand in our JSON."""
    with suppress(OSError, ValueError, AttributeError):  # what Python holds back comes first
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def amount(number: int, frames: int | None) -> str:
    """Return a number of images or videos in words: `8 images`, `4 videos of 25 frames`."""
    if frames is None:
        return f"{number} image{'s' * (number != 1)}"
    return f"{number} video{'s' * (number != 1)} of {frames} frame{'s' * (frames != 1)}"


def escaped(text: str) -> str:
    """Return plain text as Markdown text: no markup, table cells, line breaks or control characters of its own."""
    text = visible(" ".join(text.split()))
    for special in "\\`*_[]<>|#":
        text = text.replace(special, f"\\{special}")
    return text


def code(text: str) -> str:
    """Return plain text as it may stand between backticks, in a table too."""
    return visible(" ".join(text.split())).replace("`", "'").replace("|", "\\|")
