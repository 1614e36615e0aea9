"""Files that are either complete or not there: atomic writes, hashes, safe names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK = 1 << 20


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary path beside `target`; renamed to it when the block ends, removed when the block raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        make_readable(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target`; renamed to it when the block ends, removed when the block raises.

    With `overwrite`, what stood at `target` is removed only after the new folder is complete.
    """
    target = target.resolve()  # a link to a folder on a larger disk stays a link
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    part.chmod(0o755)
    try:
        yield part
        if overwrite and target.exists():
            old = part.with_suffix(".old")
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


def make_readable(path: Path) -> None:
    """Give a file the permissions of an ordinary new one; mkstemp and safetensors let only the owner read."""
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


def read_json(path: Path) -> dict:
    """Read a JSON object; ValueError naming the file if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged, copy it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_json(value: object) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
