"""Files that are either complete or absent: atomic writes, hashes, safe names; JSON."""

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
from contextlib import contextmanager, suppress
from pathlib import Path

_SEAL = "sha256"  # key of a JSON object of fluxq's own
_LONGEST_JSON = 1 << 24  # bytes; parsed, each may take thirty


@contextmanager
def atomic_path(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `target`; it is renamed to that after the block, and removed if the block raises.

    durable: whether the file is on the disk, under its name, at the end; False where the caller syncs many at once.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
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
    """Remove temporary files of killed processes for the file of that name, or for all files; for the sole writer."""
    for part in folder.glob(f".{glob.escape(name) or '*'}.{'[0-9a-f]' * 8}.part"):
        if part.is_file():
            part.unlink(missing_ok=True)


def sync(path: Path, *, deep: bool = True) -> None:
    """Wait until a file or a folder, with `deep` its content too, is on the disk, where the system can tell."""
    if path.is_dir():
        for child in path.iterdir() if deep else ():
            sync(child)
        if os.name == "nt":  # folders cannot be opened there
            return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of folders on file systems without fsync
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


def place_in_work(path: Path) -> str:
    """Return a path from the work folder around it, whose name is that of the job; else the file's name."""
    parts = path.parts
    begin = max((i for i, part in enumerate(parts) if part.endswith(".work")), default=len(parts) - 1)
    return "/".join(parts[begin:]).casefold()  # as some disks have it


def write_sealed_json(target: Path, value: dict) -> None:
    """Write a JSON object with a SHA-256 of itself and of its place in the work, for `read_sealed_json`."""
    write_text(target, json.dumps({**value, _SEAL: sha256_json([place_in_work(target), value])}))


def read_sealed_json(path: Path) -> dict:
    """Read what `write_sealed_json` wrote; ValueError naming the file if it is not as it was written."""
    value = read_json(path)
    digest = None
    with suppress(RecursionError):  # of what is nested a thousandfold
        digest = sha256_json([place_in_work(path), {name: each for name, each in value.items() if name != _SEAL}])
    if value.pop(_SEAL, None) != digest or digest is None:
        raise ValueError(f"{path}: damaged since it was written, or of another place")
    return value


def read_json(path: Path, longest: int = _LONGEST_JSON) -> dict:
    """Read a JSON object; ValueError naming the file if it is not one or has more than `longest` bytes."""
    require_regular(path)
    size = path.stat().st_size
    if size > longest:
        raise ValueError(f"{path}: {size} bytes, and {longest} are read at most; copy it again")
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if re.search(r"\\u[dD]", text):  # half of a surrogate pair cannot be written
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a number of thousands of digits, nesting
        raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged, copy it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def is_text(value: str) -> bool:
    """Tell whether UTF-8 can hold a text: JSON can name half of a surrogate pair, and paths may have other bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def room_left(error: OSError, folder: Path) -> str:
    """Return the end of a message about a write that failed because the disk is full: its free space; else ""."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return f"; {shutil.disk_usage(folder).free / 1e9:.2f} GB are free at {folder}"


def require_no_pipe(path: Path, what: str) -> None:
    """Raise ValueError for a pipe, a socket or a device. what: the place, as messages name it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{what} is a pipe or a device, which could be waited for without end; give a file or folder")


def read_text(path: Path, what: str, cure: str, longest: int = 1 << 20) -> str:
    """Read a text file of at most `longest` bytes that a user has named; ValueError or FileNotFoundError for any other.

    what: the file, as messages name it. cure: their end.
    """
    require_no_pipe(path, what)
    if not path.is_file():
        raise FileNotFoundError(f"{what} does not exist; {cure}")
    if path.stat().st_size > longest:
        raise ValueError(f"{what} has more than {longest} bytes; {cure}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{what} is no text; {cure}") from None


def stamps(paths: Iterable[Path]) -> list[tuple[str, int, int, int]]:
    """Return place, number, size and time of each file or folder, which differ if one is replaced; nothing is read."""
    statuses = [(str(path.resolve()), path.stat()) for path in paths]
    return [(name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in statuses]


def require_regular(path: Path) -> None:
    """Raise ValueError for a pipe, a device or a folder; FileNotFoundError for nothing."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path}: no regular file, which could be waited for without end; remove it")


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes; ValueError as of `require_regular`."""
    require_regular(path)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: object) -> str:
    """Return the hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def require_one_set(folder: Path) -> None:
    """Raise ValueError if a quantized model's folder has two sets of weights, of which programs choose differently."""
    sets = sets_of_weights(folder, False)
    if len(sets) > 1:
        raise ValueError(
            f"{folder}: has two sets of weights, {sets[0].name} and {sets[1].name}, and programs differ in which they "
            "read; remove the one that is not meant"
        )


def sets_of_weights(folder: Path, is_of_transformers: bool) -> list[Path]:
    """List the indices and single files of a model's folder, first the one that its library takes."""
    ends = (".safetensors", INDEX) if is_of_transformers else (INDEX, ".safetensors")
    stems = reversed(WEIGHT_STEMS) if is_of_transformers else WEIGHT_STEMS
    return [path for stem in stems for end in ends if (path := folder / f"{stem}{end}").is_file()]


WEIGHT_STEMS = ("diffusion_pytorch_model", "model")  # of diffusers, of transformers
INDEX = ".safetensors.index.json"
