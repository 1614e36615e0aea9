"""Files that are either complete or not there: atomic writes, hashes, safe names."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NEW, _OLD = "new", "old"  # in the work folder of an atomic_folder

_LONGEST_JSON = 1 << 24  # bytes; parsed, each may take thirty


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary path beside `target`; renamed to it when the block ends, removed when the block raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=_part_prefix(target), suffix=".part", dir=target.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        make_readable(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _part_prefix(target: Path) -> str:
    """How the name begins under which `atomic_path` writes a file."""
    return f".{target.name}."


@contextmanager
def atomic_folder(target: Path, work: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder in `work`, renamed to `target` when the block ends, removed when the block raises.

    work: on the same file system. With `overwrite`, what stood at `target` is removed only after the new folder is
    complete. What a process that was killed in here left behind is cleared away by the next one.
    """
    target = target.resolve()  # a link to a folder on a larger disk stays a link
    part, old = work / _NEW, work / _OLD
    put_back(target, work)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if overwrite and target.exists():
            target.rename(old)
            try:
                part.rename(target)
            except BaseException:
                old.rename(target)
                raise
            shutil.rmtree(old)
        else:
            part.rename(target)  # an empty folder may stand there; anything else makes this raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def put_back(target: Path, work: Path) -> None:
    """Put what a killed `atomic_folder` moved out of the way back to `target`, if nothing has taken its place."""
    old = work / _OLD
    if old.exists() and not target.exists():
        old.rename(target.resolve())
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def sole_writer(target: Path) -> Iterator[None]:
    """Only one process at a time is in this block for a target; RuntimeError in the second, naming the first.

    The lock goes with the process, however that ends. Two files beside the target serve it and are removed.
    """
    from filelock import FileLock, Timeout

    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock, owner = (target.with_name(f".{target.name}.{kind}") for kind in ("lock", "pid"))
    try:
        with FileLock(lock, timeout=0):
            # What one that was killed just here left behind.
            for left in target.parent.glob(f"{glob.escape(_part_prefix(owner))}*.part"):
                left.unlink(missing_ok=True)
            write_text(owner, f"{os.getpid()} on {platform.node()}")
            try:
                yield
            finally:
                owner.unlink(missing_ok=True)
                with suppress(OSError):  # where an open file cannot be removed, it stays
                    lock.unlink()
    except Timeout:
        who = f"process {owner.read_text(encoding='utf-8')}" if owner.is_file() else "another process"
        raise RuntimeError(f"{target} is being written by {who}: wait for it, or end it") from None


def make_readable(path: Path) -> None:
    """Give a file the permissions of an ordinary new one; mkstemp lets only its owner read."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write_text(target: Path, text: str) -> None:
    """Write a text file atomically, UTF-8."""
    with atomic_path(target) as part:
        part.write_text(text, encoding="utf-8")


def write_json(target: Path, value: object) -> None:
    """Write indented JSON atomically."""
    write_text(target, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, longest: int = _LONGEST_JSON) -> dict:
    """Read a JSON object; ValueError naming the file if it is not one or has more than `longest` bytes."""
    size = path.stat().st_size
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


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: object) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
