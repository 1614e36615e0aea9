"""Names the code that made a result, also where there is no git: results of the same sources may share a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fluxq

BENCHMARKS = Path(__file__).parent
KINDS = (".py", ".json", ".yaml")  # code; tiles, what was compiled; recipes


@cache
def sources() -> str:
    """Return a digest of the package's files, tiles included, and of the scripts beside this one, without results."""
    package = Path(fluxq.__file__).parent
    files = dict(_files(BENCHMARKS, (".py",)))
    for room in package.iterdir():  # those that are links are followed
        files |= dict(_files(room, KINDS))
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(top: Path, kinds: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    root = top.resolve()
    for path in [root] if root.is_file() else root.rglob("*"):
        if path.suffix in kinds and path.is_file():
            yield f"{top.name}/{path.relative_to(root).as_posix()}", path
