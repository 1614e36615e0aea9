"""Progress bars and logging for people at a terminal; both write to stderr, so stdout stays a program's output."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger("fluxq")


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate `items` under a progress bar; without a terminal, or with logging at ERROR, no bar is drawn."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    quiet = not sys.stderr.isatty() or logger.getEffectiveLevel() >= logging.ERROR
    yield from track(items, description=description, total=total, console=console, disable=quiet, transient=True)


def first_line(error: BaseException) -> str:
    """What an exception says, cut to one line; the name of its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def set_verbosity(level: int) -> None:
    """-1 errors only, 0 warnings and progress, 1 and above also what was decided and why."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logger.setLevel(logging.ERROR if level < 0 else logging.WARNING if level == 0 else logging.INFO)
