"""A process that has imported fluxq and forks for every command, so that thousands run in minutes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked

TIMEOUT = 120.0  # seconds
CRASHED = 99  # exit code for a traceback


@dataclass(frozen=True)
class Disturbance:
    """The call of this number below `folder` is disturbed, as interposer.c says. log: of all calls, or ""."""

    folder: Path
    number: int
    how: str
    log: str = ""


@dataclass(frozen=True)
class Ended:
    """code: the exit code, minus a signal's number, None where it hung."""

    code: int | None
    said: str
    seconds: float


def warm_up() -> None:
    """Import what commands import, and take out what they do not write by: clocks, memory, the engine of charts."""
    warnings.filterwarnings("ignore")
    forked.warm_up()
    from fluxq.base import devices
    from fluxq.eval.report import charts
    from fluxq.eval.speed import machine

    charts._svg = lambda *_, **__: "<svg></svg>"  # its threads do not live on in a fork
    ticks = itertools.count()  # seconds are written down, and two runs are compared byte for byte
    time.perf_counter = lambda: next(ticks) * 1e-9
    machine._process_peak = lambda: None  # a fork begins with what its parent has held
    devices.datetime = SimpleNamespace(now=lambda _: datetime(2026, 1, 1, tzinfo=UTC))
    assert devices.utc_now().startswith("2026-01-01"), "files record the time by another clock"


def run(words: list[str], place: Path, disturbance: Disturbance | None = None) -> Ended:
    """Run `fluxq` with these words in the folder `place`, in a process of its own."""
    with tempfile.TemporaryFile() as said:
        began = time.monotonic()
        process = os.fork()
        if process == 0:
            _become(words, place, disturbance, said.fileno())
        status = _wait(process, began)
        said.seek(0)
        text = said.read().decode(errors="replace")
    code = None if status is None else os.waitstatus_to_exitcode(status)
    return Ended(code, text, time.monotonic() - began)


def _wait(process: int, began: float) -> int | None:
    while time.monotonic() - began < TIMEOUT:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.003)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _become(words: list[str], place: Path, disturbance: Disturbance | None, said: int) -> None:
    """Run the command in this process and end it."""
    code = CRASHED
    try:
        os.chdir(place)
        forked.take(os.open(os.devnull, os.O_RDONLY), said, said)
        import fluxq.cli

        if disturbance is not None:
            _disturb(disturbance)
        sys.argv = ["fluxq", *words]
        fluxq.cli.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def is_interposed() -> bool:
    """Tell whether interposer.c was loaded into this process."""
    return hasattr(ctypes.CDLL(None), "disturb")


def _disturb(asked: Disturbance) -> None:
    if is_interposed():
        words = (str(asked.folder).encode(), ctypes.c_long(asked.number), asked.how.encode(), asked.log.encode())
        ctypes.CDLL(None).disturb(*words)
    else:
        _disturb_by_audit(asked)


_EVENTS = {
    "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.utime",
}  # fmt: skip


def _disturb_by_audit(asked: Disturbance) -> None:
    """Without a compiler: what Python itself announces before it is done, all but write, fsync and sendfile."""
    count, log = 0, open(asked.log, "a") if asked.log else None

    def met(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        changes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
        if not (changes or event in _EVENTS) or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(arguments[1 if event == "os.rename" else 0]))
        if not path.startswith(f"{asked.folder}/"):
            return
        count += 1
        if log is not None:
            name = event.removeprefix("os.").replace("remove", "unlink").replace("symlink", "link")
            print(count, name, os.path.relpath(path, asked.folder), file=log, flush=True)
        if count == asked.number:
            if asked.how in ("EIO", "ENOSPC"):
                code = getattr(errno, asked.how)
                raise OSError(code, os.strerror(code), path)
            os.kill(os.getpid(), {"kill": signal.SIGKILL}.get(asked.how) or getattr(signal, asked.how))

    sys.addaudithook(met)


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
