"""Progress bars and logging for people at a terminal; both write to stderr, so stdout stays a program's output."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger("fluxq")


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate `items` under a progress bar; without a terminal, or with logging at ERROR, no bar is drawn."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(items, description=description, total=total, console=console, disable=_quiet(), transient=True)


@contextmanager
def blocks_progress(
    description: str, blocks: int, nbytes: int, known_blocks: int = 0, known_bytes: int = 0
) -> Iterator[Callable[[int], None]]:
    """A bar of blocks of different sizes, with bytes a second and the time left; call what comes with a block's bytes.

    known: what was there before, which is shown and does not count for the speed. Drawn where `progress` draws.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    texts = TextColumn("{task.description}"), TextColumn("{task.fields[done]}/{task.fields[blocks]} blocks")
    columns = texts[0], BarColumn(), texts[1], TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=_quiet(), transient=True) as bar:
        task = bar.add_task(description, total=nbytes, completed=known_bytes, done=known_blocks, blocks=blocks)
        done = known_blocks

        def advance(size: int) -> None:
            nonlocal done
            done += 1
            bar.update(task, advance=size, done=done)

        yield advance


def _quiet() -> bool:
    return not sys.stderr.isatty() or logger.getEffectiveLevel() >= logging.ERROR


def first_line(error: BaseException) -> str:
    """What an exception says, cut to one line; the name of its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def set_verbosity(level: int) -> None:
    """-1 errors only, 0 warnings and progress, 1 and above also what was decided and why."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logger.setLevel(logging.ERROR if level < 0 else logging.WARNING if level == 0 else logging.INFO)
