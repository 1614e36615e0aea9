"""A history: one JSON line for each run of `fluxq gate` or `fluxq bench`, in one file of a folder.

    DIR/history.jsonl

A line is added whole under a lock, so that writers may work at once. One that was cut off by a kill is the last,
without its end: it is passed over, and the next writer removes it. Any other line that cannot be read is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from fluxq.base.console import first_fault
from fluxq.base.files import require_regular
from fluxq.base.git import git
from fluxq.base.output import Output, sole_writer
from fluxq.eval.metrics.schema import Strict

HISTORY_FILE = "history.jsonl"
SCHEMA_VERSION = 1
KIND = "fluxq history"
_WAIT = 60.0  # seconds for other writers, which write for moments
_GIT = 20.0  # seconds for an answer of git
Bounded = Annotated[float, Field(ge=-1e15, le=1e15)]  # what times, ratios and metrics keep far below
_LONGEST = 1 << 28  # bytes of a history


def _is_time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


Time = Annotated[str, AfterValidator(_is_time)]  # of a clock somewhere, with its distance from UTC


class Commit(Strict):
    """Commit of the repository of the current folder. is_changed: whether files differ from it."""

    revision: str
    time: Time
    is_changed: bool


class Point(Strict):
    """One number of a run, in `unit`. low, high: its limits. n: images, pairs or rounds.

    limit: up to which it is fine. distance, floor: of a metric, mean d(A, B) and d(A, A2), whose difference `value` is.
    """

    value: Bounded | None
    low: Bounded | None = None
    high: Bounded | None = None
    n: int
    unit: str
    limit: Bounded | None = None
    distance: Bounded | None = None
    floor: Bounded | None = None


class HistoryRow(Strict):
    """One run.

    subject: what was judged, in words. setting: digest of prompts and call; rows of two settings do not compare.
    digests: of what was judged, by name. metrics, speed: by name.
    """

    kind: Literal["fluxq history"] = KIND
    schema_version: Literal[1] = SCHEMA_VERSION
    command: Literal["gate", "bench"]
    created: Time
    commit: Commit | None
    subject: str
    setting: str
    machine: str
    versions: dict[str, str]
    digests: dict[str, str]
    verdict: str | None
    metrics: dict[str, Point]
    speed: dict[str, Point]
    seconds: float

    @property
    def time(self) -> str:
        """Time of its commit; without one, of the run."""
        return self.commit.time if self.commit else self.created


def require_history(folder: Path, reads: Mapping[str, str | Path | None]) -> None:
    """Raise ValueError where no row can be added: a place that takes no files, or a history that cannot be read.

    reads: inputs of the command, by their names for people.
    """
    Output(folder).require_addable(reads, "--history", pattern=HISTORY_FILE)
    if (folder / HISTORY_FILE).exists():
        read_history(folder)


def read_history(folder: Path) -> tuple[HistoryRow, ...]:
    """Read all rows, in the order in which they were added.

    Raises ValueError naming the line that is damaged or of another version, FileNotFoundError where there is none.
    """
    path = folder / HISTORY_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no history ({HISTORY_FILE}); `fluxq gate --history {folder}` begins one")
    require_regular(path)
    if path.stat().st_size > _LONGEST:
        raise ValueError(f"{path}: larger than {_LONGEST >> 20} MiB; begin another history")
    *lines, last = path.read_bytes().split(b"\n")
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    return (*rows, *_whole(last, f"{path}:{len(lines) + 1}"))


def append(folder: Path, row: HistoryRow) -> None:
    """Add a row, on the disk when this returns."""
    path = folder / HISTORY_FILE
    folder.mkdir(parents=True, exist_ok=True)
    line = row.model_dump_json(exclude_defaults=False).encode() + b"\n"
    with sole_writer(path, _WAIT):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            end = _mend(path, handle)
            os.lseek(handle, end, os.SEEK_SET)
            _write(handle, line, end)
            os.fsync(handle)
        finally:
            os.close(handle)


def _write(handle: int, line: bytes, end: int) -> None:
    """Write all of a line, or, where the disk is full, nothing."""
    left = line
    try:
        while left:
            left = left[os.write(handle, left) :]
    except OSError:
        os.ftruncate(handle, end)
        raise


def _mend(path: Path, handle: int) -> int:
    """Remove a line that was cut off, end one that only lacks its end; return the file's length."""
    *_, last = path.read_bytes().split(b"\n")
    end = os.fstat(handle).st_size
    if not last:
        return end
    if any(_whole(last, str(path))):
        os.lseek(handle, 0, os.SEEK_END)
        os.write(handle, b"\n")
        return end + 1
    os.ftruncate(handle, end - len(last))
    return end - len(last)


def _whole(line: bytes, where: str) -> Iterator[HistoryRow]:
    """Yield the row of a line without an end, unless it was cut off."""
    try:
        json.loads(line)
    except ValueError:
        return
    yield _row(line, where)


def _row(line: bytes, where: str) -> HistoryRow:
    try:
        content = json.loads(line)
    except ValueError:
        raise ValueError(f"{where}: damaged, no JSON; remove this line, or give another history") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ValueError(f"{where}: no row of a history of fluxq; remove this line, or give another history")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{where}: schema {content.get('schema_version')!r}, and this fluxq reads {SCHEMA_VERSION}: read it with "
            "the fluxq that wrote it, and give another folder here"
        )
    try:
        return HistoryRow.model_validate_json(line)
    except ValidationError as error:
        raise ValueError(f"{where}: {first_fault(error)}; remove this line, or give another history") from None


def current_commit(folder: Path | None = None) -> Commit | None:
    """Return the commit of the repository that a folder, the current one by default, lies in; None without one."""
    commit = commit_at(folder, "HEAD")
    if commit is None:
        return None
    changed = _git_output(folder, "status", "--porcelain", "--untracked-files=no")
    return commit.model_copy(update={"is_changed": bool(changed)})


def commit_at(folder: Path | None, revision: str) -> Commit | None:
    """Return a commit of a folder's repository, unchanged; None where it has none of that name."""
    fields = _git_output(folder, "log", "-1", "--no-show-signature", "--format=%H %cI", revision).split()
    return Commit(revision=fields[0], time=fields[1], is_changed=False) if fields else None


def _git_output(folder: Path | None, *words: str) -> str:
    """Return what git says, in one piece; "" where it fails or is absent."""
    try:
        return git(folder, *words, timeout=_GIT).strip()
    except RuntimeError:
        return ""
