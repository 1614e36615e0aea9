"""Findings about kernels on the GPU at hand: those that `fluxq doctor` wrote down, and those of this process.

A cell is an op, a format and a chip, as dispatch.py offers them; products of torch's library are ops here too. A cell
that was wrong is not offered, and measured times order what computes the same. The file of doctor's

    {"kind": "fluxq doctor", "machine": {gpu, chip, driver, fluxq, torch, triton},
     "rows": [{op, format, scheme, m, n, k, share, why, us, beside, chosen}, …]}

holds for that GPU with that driver and those versions alone. share: of its bound that the error takes, None where it is
not finite. why: the cell is wrong, or empty. scheme: weights and activations of a Linear, whose times the dispatcher
reads. us: microseconds of
a call, None where none were measured. beside: other implementation -> its microseconds. The folder kernels/measured
holds such files of other people's GPUs, for their times.

Without a file nothing is read but the name of its folder.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fluxq.base import FLUXQ_VERSION
from fluxq.base.console import logger
from fluxq.base.devices import driver, package_version
from fluxq.base.files import read_json, write_json
from fluxq.kernels.tiles import chip_of

KIND = "fluxq doctor"
MEASURED = Path(__file__).parent / "measured"  # files of this form, by GPU
Cell = tuple[str, str, str]  # (op, format, chip)
_withdrawn: dict[Cell, str] = {}  # in this process, with the reason
_instead: list[tuple[dict[str, Any], ...]] = []  # the last of them counts in place of this GPU's file


def wrong(op: str, format: str, chip: str) -> str:
    """Return the reason why results of a cell are wrong on the GPU at hand; empty if nothing is known against it."""
    return _withdrawn.get((op, format, chip)) or next(
        (row["why"] for row in _rows_here(chip) if row["why"] and (row["op"], row["format"]) == (op, format)), ""
    )


def vouched(op: str, format: str, chip: str) -> bool:
    """Tell whether the file of this GPU has the cell, and nothing against it."""
    rows = [row for row in _rows_here(chip) if (row["op"], row["format"]) == (op, format)]
    return bool(rows) and not any(row["why"] for row in rows)


def withdraw(op: str, format: str, chip: str, why: str) -> None:
    """Note that a cell was wrong in this process; `dispatch.withdraw` also forgets what was chosen before."""
    _withdrawn[op, format, chip] = why


def withdrawals() -> int:
    """Count the cells that were withdrawn in this process: what was decided before the last may be wrong."""
    return len(_withdrawn)


def timings(scheme: str, chip: str) -> list[dict[str, Any]]:
    """Return the times of Linears under a scheme on this GPU; without any those in kernels/measured of the same chip.

    They are rows of a file with the name of the gpu, each timed.
    """
    own, others = (
        [
            row | {"gpu": document["machine"]["gpu"]}
            for document in documents
            for row in document["rows"]
            if document["machine"]["chip"] == chip and row["scheme"] == scheme and row["us"]
        ]
        for documents in (_here(chip), _shipped())
    )
    return own or others


@contextmanager
def instead(*documents: dict[str, Any]) -> Iterator[None]:
    """Take other documents in the block in place of the file of this GPU; none, where its cells are proved anew.

    `dispatch.forget` has to follow at the begin of the block and after its end.
    """
    _instead.append(documents)
    try:
        yield
    finally:
        _instead.pop()


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
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fluxq"


def keep(machine: dict[str, str], rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows to the file of a machine and return it. Of earlier ones those stay whose launch is not among them."""
    file, before = file_of(machine), read(machine)
    kept = {_launch_of(row): row for row in (*(before["rows"] if before else ()), *rows)}
    write_json(file, document(machine, [*kept.values()]))
    forget()
    return file


def document(machine: dict[str, str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a file."""
    return {"kind": KIND, "machine": machine, "rows": rows}


def read(machine: dict[str, str]) -> dict[str, Any] | None:
    """Return the content of a machine's file; None without one, and with a warning for one that cannot be used."""
    file = file_of(machine)
    try:
        if not file.is_file():
            return None
        found = _checked(read_json(file))
        if found["machine"] != machine:
            raise ValueError(f"it is of {found['machine']}, this is {machine}")
    except (ValueError, OSError) as error:
        logger.warning(
            "%s is no file of `fluxq doctor` for this GPU and is left out of account (%s); remove it, or run `fluxq "
            "doctor` again",
            *(file, error),
        )
        return None
    return found


def forget() -> None:
    """Forget what was read of files."""
    _read_here.cache_clear()
    _shipped.cache_clear()


def _launch_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("op", "format", "scheme", "m", "n", "k"))


def _checked(found: dict[str, Any], texts: tuple[str, ...] = ("op", "format", "scheme", "why")) -> dict[str, Any]:
    """Return the content of a file; ValueError unless it has the parts that are read."""
    machine, rows = found.get("machine"), found.get("rows")
    if not isinstance(machine, dict) or not isinstance(rows, list) or {"gpu", "chip"} - machine.keys():
        raise ValueError("it has no machine and no rows")
    numbers = "m", "n", "k"
    for row in rows:
        sound = isinstance(row, dict) and all(isinstance(row.get(name), str) for name in texts)
        sound = sound and all(type(row.get(name)) is int and 0 < row[name] <= LARGEST for name in numbers)
        if not sound or not (row.get("us") is None or (isinstance(row["us"], float) and 0 < row["us"] < math.inf)):
            raise ValueError(f"one of its rows is {row}")
    return found


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
    return tuple(found for machine in _distinct(machines) if (found := read(machine)))


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
    found = []
    for file in sorted(MEASURED.glob("*.json")):
        try:
            found.append(_checked(read_json(file), ("op", "scheme")))  # times alone are read
        except (ValueError, OSError) as error:
            logger.warning("%s is no file of `fluxq doctor` and is left out of account (%s)", file, error)
    return tuple(found)


INTERPRETER = "the interpreter"
LARGEST = 1 << 40  # tokens, outputs or inputs of a launch
