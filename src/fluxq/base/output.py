"""One way to write: an output is whole or as it was before, replaces nothing but fluxq's own, and outlives a power cut.

    Output.require    before any work: the place is free, can be written, and is nothing that the command reads
    sole_writer       while writing: one process at a time
    put               at the end: all is on the disk, then one swap with a way back
    writing           all of it, for a command that starts over after a kill
    atomic_output     the swap alone, for one that goes on from finished work

Outputs identify themselves: a folder by its record, with the SHA-256 of its files; safetensors by their header, which
names those of the files beside them; a text by its last line, which has the SHA-256 of the others (`seal`). The same
place names the job, by which the same command finds its finished output again.

Imports no torch.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import secrets
import shutil
import signal
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from fluxq.base.console import logger
from fluxq.base.files import clear_parts, read_json, sha256_file, sha256_json, sync, write_text
from fluxq.base.tensors import TensorFile

PLAN_FILE = "fluxq_plan.json"  # of a checkpoint: how it was made
EXPORT_FILE = "fluxq_export.json"  # of a folder for another program: its origin
PASSPORT_FILE = "passport.json"  # of a checkpoint: what was measured, and what repeats it
MARK = "fluxq"  # with it begin keys in the header of each safetensors file that fluxq writes as an output
VERSION, JOB, BESIDE = f"{MARK}_version", f"{MARK}_job", f"{MARK}_beside"  # such keys
STATISTICS = f"{MARK}_statistics"
_LATER = re.compile(  # files of a checkpoint that its record does not list, and their leftovers of kills
    r"README\.md|passport\.json|eval/(report\.(html|json|md)|speed\.json|debug\.json)|\.eval_results/[^/]+\.yaml"
    r"|(eval/|\.eval_results/)?\.[^/]+\.part|\.eval\.(lock|pid)"
)
_LONGEST_NAME = 255 - len(".") - len(".0123456789abcdef.work")  # bytes, beside those of the folders that serve it
_LONGEST_TEXT = 1 << 26  # bytes of a page
_SMALL = 1 << 24  # bytes; larger files that nobody touched since their record was written are not read
_SEALS = {".html": ("<!--", " -->"), ".md": ("<!--", " -->"), ".yaml": ("#", "")}  # suffix -> how a comment stands
_SEAL = re.compile(r"(?:<!--|#) written by fluxq(?:, job ([0-9a-f]{64}))?, SHA-256 ([0-9a-f]{64})(?: -->)?\n\Z")
# Beginning of fluxq's JSON, also of older ones without a kind.
_KIND = re.compile(rb'\{\s*("kind":\s*"fluxq [a-z]+"|"schema_version":\s*\d+,\s*"(created|checkpoint)":)')
_WEIGHTS = (".safetensors", ".gguf", ".sft", ".bin", ".ckpt", ".pt", ".pth")
NEW, OLD = "new", "old"
_HASHES: dict[tuple[int, ...], str] = {}  # (device, inode, size, mtime, ctime) -> SHA-256
ANY_JOB = "[0-9a-f]" * 16  # glob pattern of the part of a name that `job_digest` gave
Pairs = Sequence[tuple[Path, Path]]  # new file or folder, and its place; people look for the last one


@dataclass(frozen=True)
class Output:
    """Place that a command writes to: a folder, or a file and others with it.

    target: as given; a link stays one.
    beside: suffixes of files that go with it, as ".json" in place of its own.
    """

    target: Path
    is_file: bool = False
    beside: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        """The target, links followed: on a larger disk, say."""
        try:
            return plain_path(self.target).resolve(strict=self.target.is_symlink())
        except FileNotFoundError:  # a link to a place that does not exist yet
            return plain_path(self.target).resolve()
        except (OSError, RuntimeError):
            raise ValueError(f"output {self.target} is a link that leads to itself; remove it") from None

    @property
    def places(self) -> tuple[Path, ...]:
        """All paths that are written; the target is last."""
        return (*(self.place.with_suffix(suffix) for suffix in self.beside), self.place)

    def require(self, reads: Mapping[str, str | Path | None], *, overwrite: bool, exists_ok: bool = False) -> None:
        """Raise ValueError, with the cure, for a place that cannot be written or must not be replaced.

        reads: inputs of the command, by their names for people, as {"the model": path}.
        exists_ok: accept an output of fluxq, for a command that looks whether it is its own finished work.
        """
        self._require_writable()
        require_lockable(self.place)
        here = {what: Path(path).expanduser().resolve() for what, path in reads.items() if path}
        for place in self.places:
            _require_apart(self.target, place, here)
        for parent in self.place.parents:
            if (parent / "model_index.json").is_file():
                raise ValueError(f"output {self.target} lies in the pipeline's folder {parent}; give another --output")
        if Path.cwd().is_relative_to(self.place):
            raise ValueError(f"output {self.target} holds the current folder, which would be replaced; give another")
        self.require_free(overwrite=overwrite, exists_ok=exists_ok, traces_ok=True)

    def require_free(self, *, overwrite: bool, exists_ok: bool = False, traces_ok: bool = False, job: str = "") -> None:
        """Raise ValueError for an output that is not, or may not be, replaced.

        exists_ok: as `require` has it.
        traces_ok: accept an output beside traces of a killed process; `writing` clears those, and asks again.
        job: digest (`job_digest`) of the job whose finished output is no error.
        """
        if job:
            self.settle()
            if not overwrite and self.holds(job):
                return
        standing = [place for place in self.places if os.path.lexists(place) and not _is_empty(place)]
        left = list(self.left_behind()) if traces_ok else []
        if not standing or (left and (not overwrite or any(path.with_suffix(f".{NEW}").exists() for path in left))):
            return
        if (
            exists_ok
            and not overwrite
            and (_is_marked(self.place) if self.is_file else _is_checkpoint(self.place) or _job_at(self.place))
        ):
            return
        if not overwrite:
            what = _foreign(self)
            cure = f" ({what})" if what else ", or --overwrite to replace it"
            as_given = self.target if standing[-1] == self.place else standing[-1]
            raise ValueError(f"output {as_given} exists; give another --output{cure}")
        if what := _foreign(self):
            raise ValueError(
                f"output {self.target} is not replaced: {what}; remove it yourself, or give another --output"
            )

    def require_addable(self, reads: Mapping[str, str | Path | None], what: str, *, pattern: str) -> None:
        """Raise ValueError for a place that files may not be added to: no folder, or one that is or lies in an input.

        pattern: of the added files; a folder that holds an input is refused unless some of them are there already.
        """
        place = self.place
        if os.path.lexists(place) and not place.is_dir():
            raise ValueError(f"{what} {self.target} is no folder; give another")
        parent = next(parent for parent in (place, *place.parents) if parent.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(f"{what} {self.target} cannot be made: {parent} is no folder one may write to")
        for name, path in reads.items():
            read = Path(path).expanduser().resolve() if path else None
            if read is None or not read.is_dir():
                continue
            if place.is_relative_to(read):
                is_same = "is" if place == read else "lies in"
                raise ValueError(f"{what} {self.target} {is_same} {name}, which would be changed; give another")
            if read.is_relative_to(place) and not any(place.glob(pattern)):
                raise ValueError(f"{what} {self.target} holds {name}, which others would lie beside; give another")

    def holds(self, job: str) -> bool:
        """Tell whether the output of a job is here, whole and as it was written. job: as `job_digest` has it."""
        if not self.place.exists() or _job_at(self.place) != job or _foreign(self):
            return False
        files = self.places if self.is_file else [self.place / name for name in _recorded(self.place)]
        return all(path.is_file() for path in files)

    def settle(self) -> None:
        """Undo swaps that kills ended in the middle, of any command; RuntimeError while another process writes."""
        if any(self.left_behind()):
            with sole_writer(self.place):
                self.put_back()

    def put_back(self) -> None:
        """Undo swaps as `settle` does, for the sole writer."""
        for left in sorted(self.left_behind()):
            theirs = left.with_name(NEW) if left.name == OLD else left.with_suffix(f".{NEW}")
            put_back(_pairs(self.place, theirs, left), left)
            if not any(left.iterdir()):
                left.rmdir()

    def clear(self, but: Path | None = None) -> None:
        """Remove leftovers of killed processes beside whole outputs, for the sole writer; not `but`."""
        for left in (
            *self.left_behind(),
            *self.place.parent.glob(f".{glob.escape(self.place.name)}.{ANY_JOB}.{NEW}"),
        ):
            if left != but:
                remove(left)

    def left_behind(self) -> Iterator[Path]:
        """Yield the folders of killed processes with outputs that they had moved aside."""
        name = glob.escape(self.place.name)
        yield from self.place.parent.glob(f".{name}.{ANY_JOB}.{OLD}")
        yield from self.place.parent.glob(f".{name}.{ANY_JOB}.work/{OLD}")

    def _require_writable(self) -> None:
        """Raise ValueError where nothing can be made, or not this kind of output."""
        parent = next(parent for parent in self.place.parents or (self.place,) if parent.exists())
        if self.place == parent or not parent.is_dir() or not takes_files(parent):
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


def plain_path(path: str | Path) -> Path:
    """Return a path that means the same before and after its folders are made: no `~`, no `..` of missing folders."""
    path = Path(os.path.expanduser(path))
    return path.resolve() if ".." in path.parts and not path.exists() else path


def name_of(path: Path) -> str:
    """Return the name that people know a path by: that of a link, not of its target; of `.`, its folder's."""
    return os.path.basename(os.path.abspath(path))


def require_own(folder: Path, names: Iterable[str]) -> None:
    """Raise ValueError for a file of a folder that a command replaces, if nothing marks it as fluxq's."""
    for path in (path for name in names for path in sorted(folder.glob(name))):
        if not _is_marked(path):
            raise ValueError(f"{path} would be replaced, and nothing marks it as fluxq's; move it elsewhere")


def takes_files(folder: Path) -> bool:
    """Tell whether a folder can be written to; for one that is on no disk, as /proc, try it."""
    if not os.access(folder, os.W_OK):
        return False
    if os.name == "nt" or os.statvfs(folder).f_blocks:
        return True
    probe = folder / f".fluxq.{secrets.token_hex(4)}.part"
    with suppress(OSError):
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL))
        probe.unlink()
        return True
    return False


def _require_apart(target: Path, place: Path, reads: Mapping[str, Path]) -> None:
    """Raise ValueError for a place that is, holds, or lies in an input."""
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


def _foreign(output: Output) -> str:
    """Return why an output is not as fluxq wrote it; "" if it is, or if there is none."""
    place = output.place
    if output.is_file:
        standing = [each for each in output.places if os.path.lexists(each)]  # a link that leads nowhere is a file too
        return next((_not_ours(each.name) for each in reversed(standing) if not _is_marked(each, place)), "")
    if os.path.lexists(place) and not place.is_dir():
        return _not_ours(place.name)
    names = _recorded(place)
    is_checkpoint = _is_checkpoint(place)  # only beside those does `fluxq eval` write
    if is_checkpoint and not names:
        return f"{PLAN_FILE}, its record, is damaged"
    for path in _files(place):
        name = path.relative_to(place).as_posix()
        if name in names:
            if not _is_as_recorded(path, names[name], place):
                return f"{name} was changed since fluxq wrote it"
        elif not (names and is_checkpoint and _LATER.fullmatch(name)):
            return _not_ours(name)
        elif not name.endswith((".part", ".lock", ".pid")) and not _is_marked(path):
            return f"{name} was changed since fluxq wrote it"
    return ""


def _not_ours(name: str) -> str:  # or of a fluxq that wrote no marks yet
    return f"nothing marks {name} as fluxq's"


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, links too, one folder after the other: the first of many is soon there."""
    for root, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield from (Path(root, name) for name in sorted((*files, *links)))


def _record_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of a folder's record, and its content; "" where it has none."""
    for name in (PLAN_FILE, EXPORT_FILE):
        if (folder / name).is_file() and not (folder / name).is_symlink():
            with suppress(ValueError, OSError):
                return name, read_json(folder / name)
            break
    return "", {}


def _recorded(folder: Path) -> dict[str, str]:
    """Return name -> SHA-256 of the files that fluxq wrote into a folder, by its record, whose own is ""."""
    record_name, record = _record_of(folder)
    files = record.get("files")
    return {record_name: "", **{name: str(digest) for name, digest in files.items()}} if isinstance(files, dict) else {}


def _job_at(place: Path) -> str:
    """Return the job whose output is at a place, "" for an output that does not tell."""
    if place.is_dir():
        name, record = _record_of(place)
        record = record.get("identity", {}) if name == PLAN_FILE else record
        job = record.get("job") if isinstance(record, dict) else None
    elif place.suffix in _SEALS:
        job = _sealed(place)
    elif place.suffix == ".json":
        job = _job_in(place)
    else:
        job = _header(place).get(JOB)
    return job if isinstance(job, str) else ""


def _is_as_recorded(file: Path, digest: str, folder: Path) -> bool:
    """Tell whether a file has the SHA-256 that the folder's record has of it.

    A large file that is older than the record is taken to have it, and is not read.
    """
    if file.is_symlink() or not file.is_file():
        return False
    if not digest:  # the record itself
        return True
    status, since = file.stat(), (folder / _record_of(folder)[0]).stat()
    if os.name != "nt" and status.st_size > _SMALL and status.st_ctime_ns < since.st_ctime_ns:
        return True
    return _hash_of(file) == digest


def _hash_of(file: Path) -> str:
    """Return the SHA-256 of a file; of one that has only been moved since, without reading it again."""
    status = file.stat()
    key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if key not in _HASHES:
        _HASHES[key] = sha256_file(file)
    return _HASHES[key]


def contents(folder: Path, within: Iterable[str] | None = None) -> dict[str, str]:
    """Return name -> SHA-256 of a folder's files; for large files of a checkpoint its record is believed.

    Records, cards, reports and hidden files do not count. within: subfolders, with the files beside them.
    """
    digests, parts = _recorded(folder), None if within is None else set(within)

    def one(path: Path) -> str:
        name = path.relative_to(folder).as_posix()
        is_known = digests.get(name) and _is_as_recorded(path, digests[name], folder)
        return digests[name] if is_known else _hash_of(path)

    def counts(name: str) -> bool:
        top, _, rest = name.partition("/")
        return (
            not top.startswith(".")
            and name not in (PLAN_FILE, EXPORT_FILE)
            and not _LATER.fullmatch(name)
            and (parts is None or top in parts or (not rest and Path(name).suffix not in _WEIGHTS))
        )

    paths = [path for path in _files(folder) if path.is_file() and counts(path.relative_to(folder).as_posix())]
    with ThreadPoolExecutor(4) as pool:
        names = [path.relative_to(folder).as_posix() for path in paths]
        return dict(zip(names, pool.map(one, paths), strict=True))


def job_digest(job: object) -> str:
    """Return the SHA-256 of all that decides the bytes of an output (JSON); outputs name their job by it."""
    return sha256_json(job)


def seal(text: str, suffix: str, job: str = "") -> str:
    """Return a text of an output with a last line that tells it from a user's own, and from a changed one."""
    begin, end = _SEALS[suffix]
    text = unsealed(text)
    text += "" if text.endswith("\n") else "\n"
    return f"{text}{begin} written by fluxq{f', job {job}' if job else ''}, SHA-256 {_text_hash(text, job)}{end}\n"


def unsealed(text: str) -> str:
    """Return the text without the line that `seal` wrote."""
    return _SEAL.sub("", text)


def is_sealed(text: str) -> bool:
    """Tell whether a text is unchanged since fluxq wrote it."""
    match = _SEAL.search(text)
    return match is not None and match[2] == _text_hash(text[: match.start()], match[1] or "")


def with_seal(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object of an output, which names its `job`, with a SHA-256 that tells whether it was changed."""
    return {**value, "sha256": sha256_json(value)}


def _job_in(file: Path) -> str | None:
    """Return the job of a JSON object that is unchanged since fluxq wrote it; None for another file."""
    with suppress(OSError, ValueError):
        value = read_json(file)
        return value.get("job") if value.pop("sha256", None) == sha256_json(value) else None


def _text_hash(text: str, job: str) -> str:
    return sha256((job + text).encode(errors="surrogatepass")).hexdigest()


def _sealed(file: Path) -> str | None:
    """Return the job of a text that is unchanged since fluxq wrote it, "" for none; None for another text."""
    try:
        if file.is_symlink() or file.stat().st_size > _LONGEST_TEXT:
            return None
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    match = _SEAL.search(text)
    return (match[1] or "") if match and is_sealed(text) else None


def _header(file: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file, {} for another or a damaged file."""
    try:
        return TensorFile(file).metadata()
    except (OSError, ValueError):
        return {}


def _is_marked(file: Path, main: Path | None = None) -> bool:
    """Tell whether a file is unchanged since fluxq wrote it, as far as that can be told.

    main: the file that this one goes beside, if it is another; a configuration is fluxq's if that names its SHA-256.
    """
    if file.is_symlink() or not file.is_file():
        return False
    if file.suffix in _SEALS:
        return _sealed(file) is not None
    if file.suffix == ".json" and main not in (None, file) and main.suffix not in _SEALS:
        with suppress(ValueError, OSError, AttributeError):
            digests = json.loads(_header(main).get(BESIDE, "{}"))
            return any(
                file == main.with_suffix(suffix) and _hash_of(file) == digest for suffix, digest in digests.items()
            )
        return False
    if file.suffix == ".json":
        with suppress(OSError), file.open("rb") as stream:
            return _KIND.match(stream.read(64)) is not None
        return False
    return not {VERSION, STATISTICS}.isdisjoint(_header(file))


@contextmanager
def writing(output: Output, job: str, *, overwrite: bool) -> Iterator[Path | None]:
    """Yield an empty folder; its content is put in place at the end, all of it or nothing.

    An output that is a folder: it becomes that. An output that is a file: the block makes the files of `places` in it.
    None is yielded where the finished output of the same `job` (of `job_digest`) stands already; leftovers of a killed
    process are then cleared away. With `overwrite` it is made again, unless such a process was killed just after its
    swap.

    Raises RuntimeError where another process writes there, or put there what may not be replaced, and ValueError as
    `Output.require_free` does.
    """
    place = output.place
    stem = f".{place.name}.{job[:16]}"
    new, old = place.with_name(f"{stem}.{NEW}"), place.with_name(f"{stem}.{OLD}")
    with sole_writer(place):
        output.put_back()
        is_swapped = not any(source.exists() for source, _ in _moves(output, new))
        is_done = (not overwrite or old.is_dir()) and is_swapped and output.holds(job)
        output.clear(but=old if is_done else None)
        if not is_done:
            output.require_free(overwrite=overwrite)
            with _swapping(output, new, old, overwrite=overwrite):
                yield new
        remove(old)
    if is_done:
        yield None


@contextmanager
def atomic_output(output: Output, work: Path, *, overwrite: bool = False, is_private: bool = False) -> Iterator[Path]:
    """Yield an empty folder, as `writing` does, for a process that holds the lock; the next one clears leftovers.

    work: folder on the same file system, for the new and the old files meanwhile.
    is_private: the output lies in a folder of fluxq's own; whatever stands there is replaced.
    """
    new, old = work / NEW, work / OLD
    recover(output.place, work)
    remove(new)
    with _swapping(output, new, old, overwrite=overwrite, is_private=is_private):
        yield new
    remove(old)


@contextmanager
def _swapping(output: Output, new: Path, old: Path, *, overwrite: bool, is_private: bool = False) -> Iterator[None]:
    """Make the folder `new`, put what the block makes in it in place, and remove it; old files are then in `old`."""
    new.mkdir(parents=True)
    try:
        yield
        put(_moves(output, new), old, None if is_private else output, overwrite=overwrite)
    except BaseException:
        if not old.exists():  # else the way back failed too, and the next run needs both
            remove(new)
        raise
    remove(new)


def recover(place: Path, work: Path) -> None:
    """Move what a killed `atomic_output` put aside back to its `place`, if that is free."""
    if (work / OLD).is_dir():
        put_back(_pairs(place, work / NEW, work / OLD), work / OLD)
    remove(work / OLD)


def _moves(output: Output, new: Path) -> Pairs:
    return [(new / place.name, place) for place in output.places] if output.is_file else [(new, output.place)]


def put(pairs: Pairs, aside: Path, output: Output | None = None, *, overwrite: bool = False) -> None:
    """Move all new files to their places, all or none, and the old ones of these places to `aside`.

    All of it is on the disk before the first move, and the moves are before this returns. `aside` is made here. Signals
    wait until the moves are made, or undone.

    output: whose places they are; RuntimeError, and all is as before, if the old files may not be replaced. They are
        judged when nobody finds them at their place any more.
    """
    for source, _ in pairs:
        sync(source)
    if output is not None:
        _require_replaceable(output, output.target, overwrite)  # hashes what it must before signals are held back
    with _signals_wait():
        aside.mkdir(parents=True)
        try:
            for _, place in pairs:
                if _is_empty(place) and not place.is_symlink():
                    place.rmdir()
                elif os.path.lexists(place):
                    place.rename(aside / place.name)
            if output is not None:
                _require_replaceable(output, aside / output.place.name, overwrite)
            for source, place in pairs:
                source.rename(place)
            for folder in dict.fromkeys(place.parent for _, place in pairs):
                sync(folder, deep=False)
        except BaseException:
            _undo(pairs, aside)
            aside.rmdir()
            raise


def _require_replaceable(output: Output, at: Path, overwrite: bool) -> None:
    """Raise RuntimeError if `output` may not be replaced. at: the place of its old files, moved or not."""
    old = replace(output, target=at)
    links = [path for path in at.parent.iterdir() if path.is_symlink()] if at != output.target else []
    if links or any(os.path.lexists(path) and not _is_empty(path) for path in old.places):
        what = _not_ours(links[0].name) if links else _foreign(old) if overwrite else "it exists"
        if what:
            raise RuntimeError(f"output {output.target} is not replaced: {what} (it was put there meanwhile)")


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold back signals that would end this process until the block has ended; in the main thread only."""
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        for name in ("SIGINT", "SIGTERM", "SIGHUP") if current_thread() is main_thread() else ():
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in reversed(before.items()):  # Ctrl-C's last: its exception would end this loop
            signal.signal(number, handler)
        for number in sorted(set(came), key=(signal.SIGINT).__eq__):
            signal.raise_signal(number)


def _pairs(place: Path, new: Path, old: Path) -> Pairs:
    """List the moves, (from, to), that a killed process was about to make, by its new files and those moved aside."""
    main = new / place.name
    if not main.is_file() and not any(path.is_file() for path in old.iterdir()):
        return [(new, place)]
    names = {path.name for folder in (new, old) if folder.is_dir() for path in folder.iterdir() if path.is_file()}
    if main.is_file():  # else the last move was made
        suffixes = (".json", ".md") if main.suffix == ".html" else json.loads(_header(main).get(BESIDE, "{}"))
        names |= {place.with_suffix(suffix).name for suffix in suffixes}
    return [(new / name, place.with_name(name)) for name in (*sorted(names - {place.name}), place.name)]


def put_back(pairs: Pairs, aside: Path) -> None:
    """Undo a `put` that a kill ended before its last move, or whose new files are gone."""
    is_whole = not any(source.exists() for source, _ in pairs) and os.path.lexists(pairs[-1][1])
    if aside.is_dir() and not is_whole:
        with _signals_wait():
            _undo(pairs, aside)


def _undo(pairs: Pairs, aside: Path) -> None:
    for source, place in reversed(list(pairs)):
        if not source.exists() and place.exists():
            source.parent.mkdir(parents=True, exist_ok=True)  # somebody may have cleared it away
            place.rename(source)
        if os.path.lexists(aside / place.name):
            if os.path.lexists(place):
                raise RuntimeError(
                    f"{place} was put there meanwhile, and what an interrupted command moved out of its way lies in "
                    f"{aside}; move one of them elsewhere"
                )
            (aside / place.name).rename(place)


def remove(path: Path) -> None:
    """Remove a folder of fluxq's own, if it exists; warn if it cannot be removed."""

    def retry(function: Any, name: str, _: object) -> None:
        for folder in (Path(name).parent, Path(name)):  # rights are added inside the removed folder, never around it
            if (folder == path or path in folder.parents) and folder.is_dir() and not folder.is_symlink():
                folder.chmod(folder.stat().st_mode | stat.S_IRWXU)
        function(name) if function is not os.open else shutil.rmtree(name)

    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=retry)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed (%s); it is of no more use", path, error.strerror)


def require_lockable(target: Path) -> None:
    """Raise ValueError where the lock file and the owner file of `sole_writer` cannot be made beside the target."""
    parent = target.resolve().parent
    if parent.is_dir() and not takes_files(parent):
        raise ValueError(f"{target} cannot be written to: {parent} takes no new file, as its lock is; `chmod u+w` it")
    for serving in _serving(target):
        try:
            mode = os.lstat(serving).st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise ValueError(f"{serving} is in the way, where fluxq needs a file of its own; remove it")


def is_being_written(target: Path) -> bool:
    """Tell whether another process is in `sole_writer` for a target; nothing is made."""
    from filelock import FileLock, Timeout

    lock, _ = _serving(target)
    try:
        with FileLock(lock, timeout=0) if lock.is_file() else nullcontext():
            return False
    except Timeout:
        return True


def _serving(target: Path) -> tuple[Path, Path]:
    """Return the lock file of a target, and the file that names its owner."""
    target = target.resolve()
    return target.with_name(f".{target.name}.lock"), target.with_name(f".{target.name}.pid")


def _require_locks(handle: int) -> None:
    """Raise OSError on a file system without locks, as Lustre may be: FileLock finds each file taken there."""
    if os.name != "nt":
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def sole_writer(target: Path, wait: float = 0) -> Iterator[None]:
    """Let only one process at a time into this block for a target; RuntimeError in the second, naming the first.

    The lock goes with the process, however that ends. Two files beside the target serve it and are removed.

    wait: seconds to wait for another process, where both write for moments.
    """
    from filelock import FileLock, Timeout

    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    require_lockable(target)
    lock, owner = _serving(target)
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)  # a failure here is not another process
        try:
            _require_locks(handle)
        except OSError:
            lock.unlink(missing_ok=True)  # or it would be taken for a running process
            raise
        finally:
            os.close(handle)
    except OSError as error:
        raise ValueError(
            f"{target} cannot be made: {target.parent} takes no lock file ({error.strerror}); give another --output"
        ) from None
    try:
        with FileLock(lock, timeout=wait):
            # Left behind by a process that was killed just here.
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
