"""Findings about kernels on the GPU at hand: those that `fluxq doctor` wrote down, and those of this process.

A cell is an op, a format and a chip, as dispatch.py offers them; products of torch's library are ops here too. A cell
that was wrong is not offered, and measured times order what computes the same. The file of doctor's

    {"kind": "fluxq doctor", "machine": {gpu, chip, driver, fluxq, torch, triton},
     "rows": [{op, format, scheme, m, n, k, share, why, us, beside, chosen}, …],
     "unended": {cell and shape: number of runs}}

holds for that GPU with that driver and those versions alone. share: of its bound that the error takes, None where it is
not finite. why: the cell is wrong, or empty. scheme: weights and activations of a Linear, or "attention" and its
format, whose times the dispatcher reads. us: microseconds of a call, None where none were measured. beside: other
implementation -> its microseconds. unended: what runs of doctor began and never ended, as one that was killed. The
folder kernels/measured holds such files of other people's GPUs, for their times.

Without a file nothing is read but the name of its folder.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fluxq.base import FLUXQ_VERSION
from fluxq.base.console import first_line, logger
from fluxq.base.devices import driver, package_version
from fluxq.base.files import read_json, write_json
from fluxq.base.output import sole_writer
from fluxq.kernels.tiles import chip_of
from fluxq.recipes.formats import BF16, Product

KIND = "fluxq doctor"
MEASURED = Path(__file__).parent / "measured"  # files of this form, by GPU
Cell = tuple[str, str, str]  # (op, format, chip)
Shape = tuple[int, int, int]  # (M, N, K): tokens, outputs and inputs of a launch
_withdrawn: dict[Cell, str] = {}  # in this process, with the reason
_instead: list[tuple[dict[str, Any], ...]] = []  # the last of them counts in place of this GPU's file


def wrong(op: str, format: str, chip: str) -> str:
    """Return the reason why results of a cell are wrong on the GPU at hand; empty if nothing is known against it."""
    return _withdrawn.get((op, format, chip)) or next(
        (row["why"] for row in _rows_here(chip) if row["why"] and (row["op"], row["format"]) == (op, format)), ""
    )


def vouched(op: str, format: str, chip: str, shape: Shape) -> bool:
    """Tell whether the file of this GPU has the cell at a shape (`alike`), and nothing is known against it at any."""
    return (op, format, chip) not in _withdrawn and (op, format, shape) in _vouched(chip)


def alike(m: int, n: int, k: int) -> Shape:
    """Return the shape that stands for all that one comparison speaks of: M up to the next power of 2, N and K.

    Every number of tokens at which a tile or a kernel gives way to another is such a power.
    """
    return 1 << max(m - 1, 0).bit_length(), n, k


def withdraw(op: str, format: str, chip: str, why: str) -> None:
    """Note that a cell was wrong in this process; `dispatch.withdraw` also forgets what was chosen before."""
    _withdrawn[op, format, chip] = why


def withdrawals() -> int:
    """Count the cells that were withdrawn in this process: what was decided before the last may be wrong."""
    return len(_withdrawn)


def withdrawn() -> tuple[Cell, ...]:
    """Return the cells that were withdrawn in this process."""
    return tuple(_withdrawn)


def timings(scheme: str, chip: str) -> list[dict[str, Any]]:
    """Return the times of Linears under a scheme on this GPU; without any those in kernels/measured of the same chip.

    They are rows of a file with the name of the gpu, each timed.
    """
    return own_timings(scheme, chip) or _timed(_shipped(), scheme, chip)


def own_timings(scheme: str, chip: str) -> list[dict[str, Any]]:
    """Return `timings` of this GPU alone."""
    return _timed(_here(chip), scheme, chip)


def times_in(file: Path) -> tuple[str, dict[Product, float]]:
    """Return the GPU of a file of `fluxq doctor`, and product -> seconds of a call of a Linear.

    Of several implementations the fastest that is right. Raises ValueError for another file, or a damaged one.
    """
    try:
        content = _checked(read_json(file))
        if content.get("kind") != KIND:
            raise ValueError(f"its kind is {content.get('kind')!r}")
        seconds: dict[Product, float] = {}
        for row in content["rows"]:
            if not row["scheme"] or row["scheme"].startswith("attention") or row["why"] or not row["us"]:
                continue
            for formats, us in ((row["scheme"], row["us"]), (BF16, row.get("beside", {}).get(BF16))):
                product = formats, row["m"], row["n"], row["k"]
                if us:
                    seconds[product] = min(seconds.get(product, math.inf), us / 1e6)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"{file} is no file of `fluxq doctor`, or is damaged ({first_line(error)}): run `fluxq doctor` on the GPU "
            "again"
        ) from None
    return str(content["machine"]["gpu"]), seconds


def _timed(documents: Iterable[dict[str, Any]], scheme: str, chip: str) -> list[dict[str, Any]]:
    return [
        row | {"gpu": document["machine"]["gpu"]}
        for document in documents
        for row in document["rows"]
        if document["machine"]["chip"] == chip and row["scheme"] == scheme and row["us"]
    ]


@contextmanager
def instead(*documents: dict[str, Any]) -> Iterator[None]:
    """Take other documents in the block in place of the file of this GPU; none, where its cells are proved anew.

    `dispatch.forget` has to follow at the begin of the block and after its end.
    """
    _instead.append(documents)
    _vouched.cache_clear()
    try:
        yield
    finally:
        _instead.pop()
        _vouched.cache_clear()


# --- the file


def machine_of(device: torch.device, chip: str) -> dict[str, str]:
    """Return what findings depend on: gpu, chip, driver and versions. On a CPU the interpreter stands for the chip."""
    if device.type == "cuda":
        where = {"gpu": torch.cuda.get_device_name(device), "chip": chip, "driver": driver()}
    else:
        where = {"gpu": INTERPRETER, "chip": chip, "driver": ""}
    versions = {"fluxq": FLUXQ_VERSION, "torch": str(torch.__version__), "triton": package_version("triton")}
    return where | versions


def file_of(machine: dict[str, str]) -> Path:
    """Return the place of a machine's file in the user's cache folder."""
    words = (re.sub(r"[^\w.+]+", "-", word).strip("-") for word in machine.values() if word)
    return folder() / f"{'_'.join(words)}.json".lower()


def folder() -> Path:
    """Return the folder for files of doctor's: fluxq in XDG_CACHE_HOME, by default ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")  # a relative path counts as none, by the specification
    return Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")) / "fluxq"


class Keeper:
    """Writer of a machine's file during a run of doctor: a run that is killed loses what it was at, and names it.

    why_not: the reason why nothing is written; empty while it is.
    unended: what runs began and never ended -> number of runs.
    """

    def __init__(self, machine: dict[str, str], why_not: str = "") -> None:
        self.machine, self.why_not, self.inside = machine, why_not, ""
        self.ended: set[str] = set()
        before = None if why_not else read(machine)
        self.unended: dict[str, int] = dict(before.get("unended", {})) if before else {}
        self.rows = {launch_of(row): row for row in before["rows"]} if before else {}

    def begin(self, what: str, rows: Iterable[dict[str, Any]], *, counted: bool = True) -> None:
        """Note what begins, and write the rows found until now. counted: whether it may not end in two runs."""
        self.inside = what
        if counted:
            self.unended[what] = self.unended.get(what, 0) + 1
            self.write(rows)

    def end(self) -> None:
        """Note that it ended, or was interrupted by the user, which says nothing about it."""
        times = self.unended.pop(self.inside, 0)
        if times > 1:
            self.unended[self.inside] = times - 1
        self.ended.add(self.inside)

    def settle(self) -> None:
        """Forget earlier runs of all that ended; of one name there may be several launches, so for the end of a run."""
        self.unended = {what: times for what, times in self.unended.items() if what not in self.ended}

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows to the file. Of earlier ones those stay whose launch is not among them.

        A launch that is right and was not timed keeps its earlier times.
        """
        if self.why_not:
            return
        for row in rows:
            before = self.rows.get(launch_of(row), {})
            is_untimed = not row["us"] and not row["why"] and before.get("us")
            times = {name: before[name] for name in ("us", "beside") if is_untimed and name in before}
            self.rows[launch_of(row)] = row | times
        try:
            write_json(file_of(self.machine), document(self.machine, [*self.rows.values()]) | {"unended": self.unended})
        except OSError as error:
            self.why_not = first_line(error)
        forget()


@contextmanager
def keeping(machine: dict[str, str]) -> Iterator[Keeper]:
    """Yield the only writer of a machine's file. Of the interpreter's findings, and where it cannot, it writes nothing.

    Raises RuntimeError while another run of doctor is at work on the file.
    """
    with ExitStack() as stack:
        why_not = (
            "the interpreter proves the arithmetic, not what a compiler or a GPU makes of it"
            if machine["gpu"] == INTERPRETER
            else ""
        )
        try:
            if not why_not:
                stack.enter_context(sole_writer(file_of(machine)))
        except (OSError, ValueError, NotImplementedError) as error:  # the last without locks in the file system
            why_not = first_line(error)
        yield Keeper(machine, why_not)


def document(machine: dict[str, str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a file."""
    return {"kind": KIND, "machine": machine, "rows": rows}


def read(machine: dict[str, str]) -> dict[str, Any] | None:
    """Return the content of a machine's file; None without one, and with a warning for one that cannot be used."""
    file = file_of(machine)
    try:
        if not file.is_file():
            return None
        content = _checked(read_json(file))
        if content["machine"] != machine:
            raise ValueError(f"it is of {content['machine']}, this is {machine}")
    except (ValueError, OSError) as error:
        logger.warning(
            "%s is no file of `fluxq doctor` for this GPU and is left out of account (%s); remove it, or run `fluxq "
            "doctor` again",
            *(file, error),
        )
        return None
    return content


def forget() -> None:
    """Forget what was read of files."""
    _vouched.cache_clear()
    _read_here.cache_clear()
    _shipped.cache_clear()


def told(row: dict[str, Any]) -> str:
    """Return what a row is about in words, as "scaled_matmul fp8 fp8-fp8 at 24 x 128 x 640"."""
    names = filter(None, (row["op"], row["format"], row["scheme"]))
    return f"{' '.join(names)} at {row['m']} x {row['n']} x {row['k']}"


def launch_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a row is about, cell and shape."""
    return tuple(row[name] for name in ("op", "format", "scheme", "m", "n", "k"))


def _checked(content: dict[str, Any], texts: tuple[str, ...] = ("op", "format", "scheme", "why")) -> dict[str, Any]:
    """Return the content of a file; ValueError unless it has the parts that are read."""
    machine, rows = content.get("machine"), content.get("rows")
    if not isinstance(machine, dict) or not isinstance(rows, list) or {"gpu", "chip"} - machine.keys():
        raise ValueError("it has no machine and no rows")
    numbers = "m", "n", "k"
    for row in rows:
        sound = isinstance(row, dict) and all(isinstance(row.get(name), str) for name in texts)
        sound = sound and all(type(row.get(name)) is int and 0 < row[name] <= LARGEST for name in numbers)
        if not sound or not (row.get("us") is None or (isinstance(row["us"], float) and 0 < row["us"] < math.inf)):
            raise ValueError(f"one of its rows is {row}")
    unended = content.get("unended", {})
    if not isinstance(unended, dict) or any(type(times) is not int for times in unended.values()):
        raise ValueError(f"unended is {unended}")
    return content


@functools.cache
def _vouched(chip: str) -> frozenset[tuple[str, str, Shape]]:
    rows = _rows_here(chip)
    wrong = {(row["op"], row["format"]) for row in rows if row["why"]}
    return frozenset(
        (row["op"], row["format"], alike(row["m"], row["n"], row["k"]))
        for row in rows
        if (row["op"], row["format"]) not in wrong
    )


def _rows_here(chip: str) -> list[dict[str, Any]]:
    return [row for document in _here(chip) for row in document["rows"]]


def _here(chip: str) -> tuple[dict[str, Any], ...]:
    return _instead[-1] if _instead else _read_here(chip)


@functools.cache
def _read_here(chip: str) -> tuple[dict[str, Any], ...]:
    """Read the files of the GPUs at hand that have this chip."""
    try:
        if not any(folder().glob("*.json")):
            return ()
    except OSError:  # a folder of others
        return ()
    machines = (machine_of(device, chip) for device in devices_of(chip))
    return tuple(content for machine in _distinct(machines) if (content := read(machine)))


def devices_of(chip: str) -> list[torch.device]:
    """Return the GPUs at hand that have a chip."""
    if not torch.cuda.is_available():
        return []
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return [device for device in devices if chip_of(device) == chip]


def _distinct(machines: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    return [*{json.dumps(machine): machine for machine in machines}.values()]


@functools.cache
def _shipped() -> tuple[dict[str, Any], ...]:
    documents = []
    for file in sorted(MEASURED.glob("*.json")):
        try:
            documents.append(_checked(read_json(file), ("op", "scheme")))  # times alone are read
        except (ValueError, OSError) as error:
            logger.warning("%s is no file of `fluxq doctor` and is left out of account (%s)", file, error)
    return tuple(documents)


INTERPRETER = "the interpreter"
LARGEST = 1 << 40  # tokens, outputs or inputs of a launch
