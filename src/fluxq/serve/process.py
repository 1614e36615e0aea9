"""A worker in a process of its own: what ends it, ends no request that it was not working on."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from fluxq.base.console import first_line, logger, set_verbosity
from fluxq.serve.orders import Order, Quantum, WorkerDied
from fluxq.serve.worker import Settings, Worker

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END_SECONDS = 10.0  # for a step that still runs
_HANGS = 900.0  # seconds without an answer, after which it is ended: a step of a large image takes minutes on a CPU


class Apart:
    """A worker in another process; it ends with this one, however that ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._process: Any = None
        self._threads = ThreadPoolExecutor(2, "worker")  # of its own: others encode files meanwhile

    async def start(self) -> None:
        """Start one, in place of one that has ended; raise what it raises as it begins."""
        await self.stop()
        spawning = multiprocessing.get_context("spawn")  # a copy of this process would share its sockets and threads
        self._connection, theirs = spawning.Pipe()
        arguments = theirs, self.settings, logger.level
        self._process = spawning.Process(target=_work, args=arguments, name="fluxq worker", daemon=True)
        with _deaf():
            self._process.start()
        theirs.close()
        await self._threaded(self._answer)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker; `WorkerDied` where it ends meanwhile."""
        return await self._threaded(self._call, method, arguments)

    async def run(self, orders: Sequence[Order]) -> AsyncGenerator[Quantum, None]:
        """Let it make images; yield each quantum, until all are finished or `pause` has stopped them."""
        quantum: Quantum | None = None
        try:
            await self._threaded(self._send, "run", (tuple(orders),))
            while (quantum := await self._threaded(self._answer)) is not None:
                yield quantum
        except GeneratorExit:  # whoever asked has failed: what is still to come is not for the next question
            self.pause()
            while quantum is not None:
                quantum = await self._threaded(self._answer)
            raise

    def pause(self) -> None:
        """Let it stop after a step; where it has ended, its next answer will tell."""
        with suppress(OSError):
            self._connection.send(("pause", ()))

    def kill(self) -> None:
        """End it at once; whoever waits for it is told."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._connection.close()
            await self._threaded(self._process.join, _END_SECONDS)
            self._process.kill()
            self._process = None

    async def _threaded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._send(method, arguments)
        return self._answer()

    def _send(self, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise self._died() from None

    def _answer(self) -> Any:
        try:
            if not self._connection.poll(_HANGS):
                self.kill()
            is_done, value = self._connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._died() from None
        if not is_done:
            raise value
        return value

    def _died(self) -> WorkerDied:
        self._process.join(_END_SECONDS)
        code = self._process.exitcode
        how = "does not answer" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with {code}"
        return WorkerDied(f"the worker {how}")


@contextmanager
def _deaf() -> Iterator[None]:
    """Let a process that is started meanwhile hear no signals until it ignores them: Ctrl-C is sent to it, too."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # else it starts with the process, and lets signals in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, settings: Settings, level: int) -> None:
    """Do what the front asks, until it is gone."""
    for each in _SIGNALS:  # the front ends it, when it has finished
        signal.signal(each, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_front, daemon=True).start()
    set_verbosity(0)
    logger.setLevel(level)
    try:
        worker = Worker(settings)
        connection.send((True, os.getpid()))
    except Exception as error:
        connection.send((False, portable(error)))
        return
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        if method == "pause":  # of an image that has ended meanwhile
            continue
        more = (_telling(connection), connection.poll) if method == "run" else ()
        try:
            answer = True, getattr(worker, method)(*arguments, *more)
        except Exception as error:
            answer = False, portable(error)
        try:
            connection.send(answer)
        except OSError:  # the front is gone
            return


def _end_with_front() -> None:
    """End at once where the front was killed: nobody waits for the step that still runs."""
    if (front := multiprocessing.parent_process()) is not None:
        front.join()
        os._exit(1)


def _telling(connection: Connection) -> Callable[[Quantum], None]:
    def tell(quantum: Quantum) -> None:
        error = quantum.error and portable(quantum.error)
        connection.send((True, replace(quantum, error=error)))

    return tell


def portable(error: Exception) -> Exception:
    """Return an exception that another process can read, without the frames that raised it: they keep weights."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {first_line(error)}")
