"""Files that are either complete or not there: atomic writes, hashes, safe names."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST_JSON = 1 << 24  # bytes; parsed, each may take thirty


@contextmanager
def atomic_path(target: Path, *, durable: bool = True, folder: Path | None = None) -> Iterator[Path]:
    """A temporary path beside `target`; renamed to it when the block ends, removed when the block raises.

    durable: on the disk, under its name, when this returns; leave it out where the caller sees to that for many files.
    folder: where the temporary path lies instead, on the same disk: one that is cleared after a kill.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = (folder or target.parent) / f".{target.name}.{secrets.token_hex(4)}.part"
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))  # with the permissions of a new file
    try:
        yield part
        if durable:
            sync(part)
        part.replace(target)
        if durable:
            sync(target.parent, deep=False)
    finally:
        part.unlink(missing_ok=True)


def clear_parts(folder: Path, name: str = "") -> None:
    """Remove what killed processes left of the file of that name, or of all files; nobody else may write there now."""
    for part in folder.glob(f".{glob.escape(name)}.*.part" if name else ".*.part"):
        part.unlink(missing_ok=True)


def sync(path: Path, *, deep: bool = True) -> None:
    """Wait until a file, or a folder and with `deep` all in it, is on the disk, where the system can say so."""
    if path.is_dir():
        for child in path.iterdir() if deep else ():
            sync(child)
        if os.name == "nt":  # folders cannot be opened there
            return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of folders on file systems that know no such thing
            raise
    finally:
        os.close(handle)


def write_text(target: Path, text: str) -> None:
    """Write a text file atomically, UTF-8."""
    with atomic_path(target) as part:
        part.write_text(text, encoding="utf-8")


def write_json(target: Path, value: object) -> None:
    """Write indented JSON atomically."""
    write_text(target, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, longest: int = _LONGEST_JSON) -> dict:
    """Read a JSON object; ValueError naming the file if it is not one or has more than `longest` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: no regular file, which could be waited for without end; remove it")
    size = status.st_size
    if size > longest:
        raise ValueError(f"{path}: {size} bytes, and {longest} are read at most; copy it again")
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if re.search(r"\\u[dD]", text):  # half of a surrogate pair can be written by nobody
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a number of thousands of digits, nesting
        raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged, copy it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def is_text(value: str) -> bool:
    """Tell whether UTF-8 can hold it: JSON can name half of a surrogate pair, and a path of other bytes has such."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def room_left(error: OSError, folder: Path) -> str:
    """For the end of a message: what is free on the disk, where a write failed for want of that."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return f"; {shutil.disk_usage(folder).free / 1e9:.2f} GB are free at {folder}"


def require_no_pipe(path: Path, what: str) -> None:
    """Raise ValueError for a pipe, a socket or a device. what: the place, as messages name it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{what} is a pipe or a device, which could be waited for without end; give a file or folder")


def stamps(paths: Iterable[Path]) -> list[tuple[str, int, int, int]]:
    """Place, number, size and time of each file or folder, others where one was replaced: nothing is read."""
    statuses = [(str(path.resolve()), path.stat()) for path in paths]
    return [(name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in statuses]


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: object) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
