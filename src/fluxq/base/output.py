"""One way to write: an output is whole or as it was before, replaces nothing but fluxq's own, and outlives a power cut.

    Output.require    before any work: the place is free, can be written, and is nothing that the command reads
    sole_writer       while writing: one process at a time
    put               at the end: all is on the disk, then one swap with a way back
    writing           all of it, for a command that starts over after a kill
    atomic_folder     the swap alone, for one that goes on from what was done

Imports no torch.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxq.base.console import logger
from fluxq.base.files import clear_parts, read_json, sha256_json, sync, write_text

PLAN_FILE = "fluxq_plan.json"  # of a checkpoint: how it was made
EXPORT_FILE = "fluxq_export.json"  # of a folder for another program: what wrote it
MARK = "fluxq"  # with it begin keys in the header of each safetensors file that fluxq writes as an output
GENERATOR = '<meta name="generator" content="fluxq">'  # of a page
_LATER = re.compile(  # in a checkpoint beside what its record lists, and what a kill left of it
    r"README\.md|eval/(report\.(html|json|md)|speed\.json|debug\.json)|\.eval_results/[^/]+\.yaml"
    r"|(eval/|\.eval_results/)?\.[^/]+\.part"
)
_LONGEST_NAME = 255 - len(".") - len(".0123456789abcdef.work")  # bytes, beside those of the folders that serve it
_LONGEST_HEADER = 1 << 27  # bytes
_LONGEST_TEXT = 1 << 22  # bytes in which a mark is looked for
_MARKS = {  # suffix -> what files of fluxq have: pages, their Markdown, reports and models' configurations
    ".html": (GENERATOR,),
    ".md": ("\n## Provenance\n",),
    ".json": ('"schema_version":', '"_class_name":'),
}
_NEW, _OLD, _ANY_JOB = "new", "old", "[0-9a-f]" * 16
Pairs = Sequence[tuple[Path, Path]]  # what was made, and where it goes; the last one is what people look for


@dataclass(frozen=True)
class Output:
    """Where a command writes: a folder, or a file and others with it.

    target: as given; a link stays one. beside: suffixes of files that go with it, as ".json" in place of its own.
    """

    target: Path
    is_file: bool = False
    beside: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        """The target, links followed: on a larger disk, say."""
        return self.target.expanduser().resolve()

    @property
    def places(self) -> tuple[Path, ...]:
        """All that is written; the target is last."""
        return (*(self.place.with_suffix(suffix) for suffix in self.beside), self.place)

    def require(self, reads: Mapping[str, str | Path | None], *, overwrite: bool, exists_ok: bool = False) -> None:
        """Raise ValueError, with the cure, for a place that cannot be written or must not be replaced.

        reads: what the command reads, by what it is, as {"the model": path}. exists_ok: what fluxq wrote there is no
        error, for a command that looks whether it is what was asked for.
        """
        self._require_writable()
        here = {what: Path(path).expanduser().resolve() for what, path in reads.items() if path}
        for place in self.places:
            _require_apart(self.target, place, here)
        if Path.cwd().is_relative_to(self.place):
            raise ValueError(f"output {self.target} holds the current folder, which would be replaced; give another")
        self.require_free(overwrite=overwrite, exists_ok=exists_ok)

    def require_free(self, *, overwrite: bool, exists_ok: bool = False) -> None:
        """Raise ValueError where something stands that is not, or may not be, replaced.

        Where a killed process left its traces, `writing` clears them first and asks then.
        """
        standing = [place for place in self.places if os.path.lexists(place) and not _is_empty(place)]
        left = list(self.left_behind())
        if not standing or (left and (not overwrite or any(path.with_suffix(f".{_NEW}").exists() for path in left))):
            return
        if exists_ok and not overwrite and (_is_marked(self.place) if self.is_file else _is_checkpoint(self.place)):
            return
        if not overwrite:
            cure = "" if _foreign(self) else ", or --overwrite to replace it"
            raise ValueError(f"output {_as_given(self, standing[-1])} exists; give another --output{cure}")
        if overwrite and (name := _foreign(self)):
            raise ValueError(f"output {self.target} is not replaced: fluxq did not write {name}; give another --output")

    def left_behind(self) -> Iterator[Path]:
        """Yield what killed processes moved aside in `writing`, and have not removed yet."""
        return self.place.parent.glob(f".{glob.escape(self.place.name)}.{_ANY_JOB}.{_OLD}")

    def _require_writable(self) -> None:
        """Raise ValueError where nothing can be made, or not what is to be."""
        parent = next(parent for parent in self.place.parents or (self.place,) if parent.exists())
        if self.place == parent or not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(
                f"output {self.target} cannot be made: {parent} is no folder one may write to; give another --output"
            )
        if len(os.fsencode(self.place.name)) > _LONGEST_NAME:
            raise ValueError(f"output {self.place.name[:40]}… has too long a name: {_LONGEST_NAME} bytes are the most")
        if self.is_file and self.place.is_dir():
            raise ValueError(f"output {self.target} is a folder; give a file as --output")
        if not self.is_file and self.place.exists() and not self.place.is_dir():
            raise ValueError(f"output {self.target} is a file; give another --output")
        if self.place.is_dir() and not os.access(self.place, os.W_OK):  # it could not be moved aside
            raise ValueError(f"output {self.target} is read-only; `chmod u+w` it, or give another --output")
        if os.path.ismount(self.place):
            raise ValueError(
                f"output {self.target} is a mount point, which cannot be replaced as a whole; give a folder in it"
            )


def _require_apart(target: Path, place: Path, reads: Mapping[str, Path]) -> None:
    """Raise ValueError for a place that is, holds, or lies in what is read."""
    for what, path in reads.items():
        if place == path:
            raise ValueError(f"output {target} is {what}, which would be replaced; give another --output")
        if path.is_relative_to(place):
            raise ValueError(f"output {target} holds {what}, which would be replaced; give another --output")
        if path.is_dir() and place.is_relative_to(path):
            raise ValueError(f"output {target} lies in {what}, which would be changed; give another --output")


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())


def _is_checkpoint(place: Path) -> bool:
    return (place / PLAN_FILE).is_file()


def _as_given(output: Output, place: Path) -> Path:
    return output.target if place == output.place else place


def _foreign(output: Output) -> str:
    """Return the name of something at the output that fluxq did not write; "" where there is none."""
    place = output.place
    if output.is_file:
        standing = [each for each in output.places if os.path.lexists(each)]  # a link that leads nowhere is a file too
        return next((each.name for each in reversed(standing) if not _is_marked(each)), "")
    names = _recorded(place)
    is_checkpoint = _is_checkpoint(place)  # only beside those does `fluxq eval` write
    for path in _files(place):
        name = path.relative_to(place).as_posix()
        if name not in names and not (names and is_checkpoint and _LATER.fullmatch(name)):
            return name
    return ""


def _files(folder: Path) -> Iterator[Path]:
    """Yield what a folder holds, links too, one folder after the other: the first of many is soon there."""
    for root, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield from (Path(root, name) for name in sorted((*files, *links)))


def _recorded(folder: Path) -> set[str]:
    """Return the names of the files that fluxq wrote into a folder, by its own record."""
    for record in (PLAN_FILE, EXPORT_FILE):
        if (folder / record).is_file():
            with suppress(ValueError, OSError):
                said = read_json(folder / record).get("files")
                return (
                    {record, *(name for name in said if isinstance(name, str))}
                    if isinstance(said, dict | list)
                    else set()
                )
    return set()


def _is_marked(file: Path) -> bool:
    """Return whether fluxq wrote a file: by the header of safetensors, or by words of a page and what goes with it."""
    try:
        if file.is_symlink():
            return False
        with file.open("rb") as stream:
            if file.suffix in _MARKS:
                text = stream.read(_LONGEST_TEXT).decode(errors="replace")
                return any(mark in text for mark in _MARKS[file.suffix])
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length < _LONGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return False
    said = header.get("__metadata__") if isinstance(header, dict) else None
    return isinstance(said, dict) and any(key.startswith(MARK) for key in said)


@contextmanager
def writing(output: Output, job: object, *, overwrite: bool) -> Iterator[Path | None]:
    """Yield an empty folder; what the block makes in it is put in place at the end, or nothing is.

    A folder: what is yielded becomes the output. A file: `places` of the same names are made in it. None: a process
    that was killed at its very end had done the same `job` (JSON) already, and what it left is cleared away now.

    Raises RuntimeError where another process writes there and ValueError as `Output.require_free` does.
    """
    place = output.place
    stem = f".{place.name}.{sha256_json(job)[:16]}"
    new, old = place.with_name(f"{stem}.{_NEW}"), place.with_name(f"{stem}.{_OLD}")
    pairs = [(new / each.name, each) for each in output.places] if output.is_file else [(new, place)]
    with sole_writer(place):
        is_done = (
            old.is_dir() and place.exists() and not any(made.exists() for made, _ in pairs) and not _foreign(output)
        )
        for left in sorted(output.left_behind()):
            theirs = left.with_suffix(f".{_NEW}")
            put_back([(theirs / n.name, n) for n in output.places] if output.is_file else [(theirs, place)], left)
            if left != old or not is_done:
                remove(left)
        for left in place.parent.glob(f".{glob.escape(place.name)}.{_ANY_JOB}.{_NEW}"):
            remove(left)
        if not is_done:
            output.require_free(overwrite=overwrite)
            new.mkdir(parents=True)
            try:
                yield new
                put(pairs, old)
            except BaseException:
                if not old.exists():  # else the way back failed too, and the next run needs both
                    remove(new)
                raise
            remove(new)
    remove(old)  # the last trace: until it is gone, the same command knows that it had finished
    if is_done:
        yield None


@contextmanager
def atomic_folder(target: Path, work: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder in `work`, renamed to `target` when the block ends, removed when the block raises.

    work: on the same file system. With `overwrite`, what stood at `target` is removed only after the new folder is
    complete. What a process that was killed in here left behind is cleared away by the next one.
    """
    part, old = work / _NEW, work / _OLD
    target = target.resolve()  # a link to a folder on a larger disk stays a link
    recover(target, work)
    remove(part)
    part.mkdir(parents=True)
    try:
        yield part
        if target.exists() and not overwrite and not _is_empty(target):
            raise FileExistsError(errno.EEXIST, "something was put there meanwhile", str(target))
        put([(part, target)], old)
    except BaseException:
        if not old.exists():  # else the way back failed too, and the next run needs both
            remove(part)
        raise
    remove(part)
    remove(old)


def recover(target: Path, work: Path) -> None:
    """Put what a killed `atomic_folder` moved out of the way back to `target`, if nothing has taken its place."""
    put_back([(work / _NEW, target.resolve())], work / _OLD)
    remove(work / _OLD)


def put(pairs: Pairs, aside: Path) -> None:
    """Move everything that was made to its place, all or none; what stood there lies in `aside` when this returns.

    All of it is on the disk before the first move, and the moves are before this returns. aside: is made here.
    """
    for made, _ in pairs:
        sync(made)
    aside.mkdir(parents=True)
    try:
        for made, place in pairs:
            if place.exists():
                place.rename(aside / place.name)
            made.rename(place)
        for folder in dict.fromkeys(place.parent for _, place in pairs):
            sync(folder, deep=False)
    except BaseException:
        _undo(pairs, aside)
        aside.rmdir()
        raise


def put_back(pairs: Pairs, aside: Path) -> None:
    """Undo a `put` that a kill ended in the middle; one that had made its last move stands."""
    if aside.is_dir() and any(made.exists() for made, _ in pairs):
        _undo(pairs, aside)


def _undo(pairs: Pairs, aside: Path) -> None:
    for made, place in reversed(list(pairs)):
        if not made.exists() and place.exists():
            place.rename(made)
        if (aside / place.name).exists():
            if place.exists():
                raise RuntimeError(
                    f"{place} was put there meanwhile, and what an interrupted command moved out of its way lies in "
                    f"{aside}; move one of them elsewhere"
                )
            (aside / place.name).rename(place)


def remove(path: Path) -> None:
    """Remove a folder of fluxq's own, if it is there; a warning names one that cannot be removed."""

    def retry(function: Any, name: str, _: object) -> None:
        parent = os.path.dirname(name)
        os.chmod(parent, stat.S_IRWXU)
        if os.path.isdir(name) and not os.path.islink(name):
            os.chmod(name, stat.S_IRWXU)
        function(name) if function is not os.open else shutil.rmtree(name)

    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=retry)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed (%s); it is of no more use", path, error.strerror)


@contextmanager
def sole_writer(target: Path) -> Iterator[None]:
    """Only one process at a time is in this block for a target; RuntimeError in the second, naming the first.

    The lock goes with the process, however that ends. Two files beside the target serve it and are removed.
    """
    from filelock import FileLock, Timeout

    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock, owner = (target.with_name(f".{target.name}.{kind}") for kind in ("lock", "pid"))
    for serving in (lock, owner):
        if serving.is_symlink() or (serving.exists() and not serving.is_file()):
            raise ValueError(f"{serving} is in the way, where fluxq needs a file of its own; remove it")
    try:
        with FileLock(lock, timeout=0):
            # What one that was killed just here left behind.
            clear_parts(target.parent, owner.name)
            write_text(owner, f"{os.getpid()} on {platform.node()}")
            try:
                yield
            finally:
                remove(owner)
                if os.name != "nt":  # an open file stays there
                    remove(lock)
    except Timeout:
        who = "another process"
        with suppress(OSError):  # which may just have ended
            who = f"process {owner.read_text(encoding='utf-8')}"
        raise RuntimeError(f"{target} is being written by {who}: wait for it, or end it") from None
