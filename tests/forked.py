"""Real processes that start at once: forked from one that has imported what takes seconds to import.

`run` and `start` take what `python` would: `-m MODULE`, `-c CODE` or a file, and arguments. Such a process has a
number, streams, a folder and an environment of its own, is killed and ends as any other. It is no fresh interpreter:
what reads the environment while it is imported, counts imports or computes on a GPU, needs `subprocess`.

This file is also the program that forks, one for each process that runs tests; it ends with that one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

# Read while packages are imported, so a fork would not heed them; those of torch do not count, for it sets some later.
READ_AT_IMPORT = ("ATEN_", "HF_", "MKL_", "OMP_", "ONEDNN_", "PYTHONPATH")

WITHOUT_A_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # which is not to be shared with a fork


def run(*words: object, encoding: str = "utf-8", **how: Any) -> subprocess.CompletedProcess[str]:
    """Run `python` with these words to its end, and read what it wrote in an encoding. how: as `start` takes."""
    process = start(*words, **how)
    out, err = process.communicate(encoding)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def start(*words: object, cwd: Path | str = ".", env: Mapping[str, str] | None = None) -> Process:
    """Begin `python` with these words in the folder `cwd`; there is nothing on its stdin."""
    texts = tuple(map(str, words))
    umask = os.umask(0)
    os.umask(umask)
    environment = {**(os.environ if env is None else env), **WITHOUT_A_GPU}
    order = {"words": texts, "cwd": os.path.abspath(cwd), "env": environment, "umask": umask}
    return Process(_server(), texts, order)


class Process:
    """A process that `start` began: a subprocess.Popen with files in place of pipes."""

    def __init__(self, server: _Server, words: tuple[str, ...], order: dict[str, Any]) -> None:
        self.args, self.returncode = words, None
        self._server = server
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        with open(os.devnull, "rb") as nothing:
            self.pid = server.fork(order, (nothing, self._out, self._err))

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ended(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float = 3600) -> int:
        """Kill it and raise TimeoutExpired where it does not end in time."""
        if self.returncode is None:
            self.returncode = self._server.ended(self.pid, timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, encoding: str = "utf-8", timeout: float = 3600) -> tuple[str, str]:
        """Wait for its end; return what it wrote to stdout and to stderr."""
        self.wait(timeout)
        texts = []
        for stream in (self._out, self._err):
            stream.seek(0)
            texts.append(stream.read().decode(encoding, errors="replace"))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> _Server:
    return _Server()


class _Server:
    """The program below, as seen from the process that runs tests."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._environment = dict(os.environ)
        self._unread, self._codes = b"", {}
        with theirs:
            command = [sys.executable, __file__]
            self._process = subprocess.Popen(command, stdin=theirs, env={**os.environ, **WITHOUT_A_GPU})

    def fork(self, order: dict[str, Any], streams: Sequence[IO[bytes]]) -> int:
        """Return the number of the process."""
        for name in order["env"].keys() | self._environment.keys():
            if name.startswith(READ_AT_IMPORT) and order["env"].get(name) != self._environment.get(name):
                raise ValueError(f"{name} is read at import: start a fresh process")
        text = json.dumps(order).encode()
        socket.send_fds(self._socket, [len(text).to_bytes(8)], [stream.fileno() for stream in streams])
        self._socket.sendall(text)
        while True:
            kind, pid, _ = self._heard(None)
            if kind == "began":
                return pid

    def ended(self, pid: int, timeout: float) -> int | None:
        """Return the exit code, minus a signal's number; None where it still runs."""
        until = time.monotonic() + timeout
        while pid not in self._codes:
            if self._heard(max(0.0, until - time.monotonic())) is None:
                return None
        return self._codes[pid]

    def _heard(self, timeout: float | None) -> Any:
        """Return the next that the program says, (kind, process, code); None where it says nothing in time."""
        while b"\n" not in self._unread:
            if not select.select([self._socket], [], [], timeout)[0]:
                return None
            said = self._socket.recv(4096)
            if not said:
                raise RuntimeError(f"the process that forks ended with {self._process.wait()}")
            self._unread += said
        line, _, self._unread = self._unread.partition(b"\n")
        kind, pid, code = json.loads(line)
        if kind == "ended":
            self._codes[pid] = code
        else:  # its number may be that of one that ended long ago
            self._codes.pop(pid, None)
        return kind, pid, code


# The program


def main() -> None:
    warm_up()
    do_not_sync()
    gc.collect()
    gc.freeze()
    words = serve(socket.socket(fileno=os.dup(0)))
    if words:
        end(lambda: act_as_python(words))


def warm_up() -> None:
    """Import what commands and tests import, with one thread: a fork has no threads but the one that forked."""
    import torch

    torch.set_num_threads(1)
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    import fluxq.cli
    import fluxq.commands.show
    import fluxq.jobs.exchange
    import fluxq.jobs.judge
    import fluxq.jobs.making  # noqa: F401


def do_not_sync() -> None:
    """Leave files of this process to the system to write: a disk takes 20 ms for each, and no test cuts the power."""

    def look(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())  # of one that is closed it raises what fsync would

    os.fsync = os.fdatasync = look


def serve(orders: socket.socket) -> list[str] | None:
    """Fork for every order and say when each fork ends. Return its words in the fork, None at the end of orders."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the tests
    running: set[int] = set()
    while True:
        ready = select.select([orders, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                say(orders, "ended", pid, os.waitstatus_to_exitcode(status))
        if orders in ready:
            size, streams, *_ = socket.recv_fds(orders, 8, 3)
            if not size:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return None
            text = orders.recv(int.from_bytes(size), socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                orders.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return become(json.loads(text), streams)
            running.add(pid)
            say(orders, "began", pid, 0)
            for stream in streams:
                os.close(stream)


def say(orders: socket.socket, *what: str | int) -> None:
    orders.sendall(json.dumps(what).encode() + b"\n")


def become(order: Mapping[str, Any], streams: Sequence[int]) -> list[str]:
    """Take what an order says, in the fork; return its words."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    take(*streams)
    return order["words"]


def take(given: int, out: int, err: int) -> None:
    """Make these files the standard streams of this process, and have torch make its threads anew.

    torch makes them when they are first asked for, and of two threads that ask at the same time one gets none
    ("Invalid thread pool"): this asks first.
    """
    import torch

    for number, stream in enumerate((given, out, err)):
        os.dup2(stream, number)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdin = os.fdopen(0, "r", encoding=encoding, errors=errors or "strict", closefd=False)
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    written = os.fdopen(1, "wb", 0 if is_unbuffered else -1, closefd=False)
    sys.stdout = io.TextIOWrapper(written, encoding, errors or "strict", write_through=is_unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)
    torch.set_num_threads(1)


def act_as_python(words: Sequence[str]) -> None:
    """Do what `python` does with these words; the helpers of tests can be imported."""
    first, *rest = words
    sys.path.append(str(Path(__file__).parent))
    sys.path[0] = str(Path(first).resolve().parent) if first[:1] != "-" else "" if first == "-c" else os.getcwd()
    if first == "-c":
        program = sys.modules["__main__"] = ModuleType("__main__")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(program))
    elif first == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(first, run_name="__main__")


def end(program: Callable[[], object]) -> NoReturn:
    """Run a program and end this process as `python` does, but without taking all objects apart, which takes long."""
    code = 0
    try:
        program()
    except SystemExit as error:
        if isinstance(error.code, int | None):
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(OSError, ValueError):  # what it wrote to is gone
            last()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
