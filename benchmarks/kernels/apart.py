"""Calls a function in a process of its own, which may crash or hang and take nothing else with it.

forkserver   the process is forked from a server that has imported the kernels and never seen a GPU: one that holds a
             CUDA context must not be forked, and a fresh one imports for seconds. Arguments and result are pickled
fork         of this process, which must not hold a CUDA context; arguments may be anything
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

from fluxq.base.console import first_line

IMPORTED = ["benchmarks.kernels.same_bits"]  # by the server, once: all that calls need


def apart(
    call: Callable[..., Any], *arguments: Any, seconds: float, method: Literal["fork", "forkserver"] = "forkserver"
) -> Any:
    """Return the result of a call, which may take so many seconds.

    Raises RuntimeError for a process that ends without a result, or has none by then, and for what the call raises.
    """
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(IMPORTED)
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_answer, args=(sender, call, arguments))
    worker.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise RuntimeError(f"no result after {seconds:g} s")
        is_result, answer = receiver.recv()
    except EOFError:
        worker.join()
        raise RuntimeError(f"the process ended without a result (exit code {worker.exitcode})") from None
    finally:
        worker.kill()
        worker.join()
    if not is_result:
        raise RuntimeError(answer)
    return answer


def _answer(sender: Connection, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send((True, call(*arguments)))
    except Exception as problem:  # whatever it raises is the answer
        traceback.print_exc()
        sender.send((False, f"{type(problem).__name__}: {first_line(problem)}"))
