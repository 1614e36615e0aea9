"""`fluxq` in a process of its own that is killed where a test wants it, and that says what it held and read.

This file is also the program of that process, see `main`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import forked


def run(folder: Path, *arguments: str, kill_after: float | None = None, **how: Any) -> dict[str, Any]:
    """Run `fluxq` in a folder: its exit code, its messages, and what it said of itself unless it was killed.

    die_at of (a function's module, its name, n) kills it in that function's n-th call. die_at_write of (n, seconds)
    kills it so long after it began its n-th change of files at the output. kill_after: seconds from its start.
    """
    folder.mkdir(exist_ok=True)
    process = forked.start(__file__, json.dumps(how), *arguments, cwd=folder)
    if kill_after is not None:
        time.sleep(kill_after)
        process.kill()
    _, messages = process.communicate()
    answer: dict[str, Any] = {"code": process.wait(), "err": messages}
    report = folder / "report.json"
    if report.is_file():
        answer |= json.loads(report.read_text())
        report.unlink()
    return answer


# The program


def main(order: dict[str, Any], *arguments: str) -> None:
    """Run `fluxq`, and end where `order` says so.

    How often the function of die_at was called, the files of die_at_write, and what the process held and read, is in
    report.json afterwards.
    """
    import fluxq.cli

    calls = 0
    if "die_at" in order:
        module, name, last = order["die_at"]
        owner = sys.modules[module]
        own = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **kwargs)

        setattr(owner, name, counted)
    written: list[str] = []
    if "die_at_write" in order:
        sys.addaudithook(partial(_watch, written, *order["die_at_write"]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
    before, code = _counts(), 0
    sys.argv = ["fluxq", *arguments]
    try:
        fluxq.cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    used = {name: value - before[name] for name, value in _counts().items()}
    Path("report.json").write_text(json.dumps({"calls": calls, "written": written, **used}))
    sys.exit(code)


def _watch(written: list[str], last: int, seconds: float, event: str, arguments: tuple[Any, ...]) -> None:
    """Note a file that is about to be made, changed, renamed or removed; SIGKILL at the `last` one."""
    writes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
    if event == "open":
        writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if not writes or not isinstance(arguments[0], str | Path) or "/.out." not in str(arguments[0]):
        return
    written.append(str(arguments[0]).partition(".work/")[2])
    if len(written) == last:
        if seconds:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def _counts() -> dict[str, float]:
    """Return the most that this process held and what it read, both in bytes, and its seconds of computing."""
    held = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    return {"peak": 1024 * int(held), "read": int(counts["rchar"]), "cpu": cpu}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
