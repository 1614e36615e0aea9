"""safetensors files: headers that are checked before anything else is read, tensors one at a time, files out of parts.

    8 bytes    length of the header, little endian
    header     JSON: name -> {dtype, shape, data_offsets: [begin, end]}, and __metadata__: text -> text
    data       the tensors one behind the other, without a hole; offsets count from its beginning

Tensors are read into memory of their own. Every page of a mapped file that was ever looked at would count as memory of
the process, and a file that is truncated meanwhile would end the process.

Files are byte for byte those of safetensors' `save_file`: the widest dtypes first, by name among one dtype, so that
every tensor begins at a multiple of its item size. The format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from fluxq.base import devices
from fluxq.base.files import atomic_path, place_in_work, room_left, sha256_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LENGTH = 8  # bytes that say how long the header is
_LONGEST_HEADER = 10_000_000  # of some 80,000 tensors; safetensors allows ten times that, which takes 4 GB to parse
_TOO_LARGE = 1 << 63  # bytes that no memory has
_LARGE = 1 << 25  # bytes of a file, or a tensor, that do not stay in the system's memory
_BEHIND = 1 << 28  # bytes that are not on the disk yet, half of them on their way
_AT_ONCE = 1 << 23  # bytes that are copied through memory at a time
_METADATA = "__metadata__"
_SEAL = "fluxq_hash"  # key of the metadata


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    dtype: the header's word for it.
    begin, end: bytes from the beginning of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class TensorFile:
    """A safetensors file whose header was checked. The file is open only while it is read; threads may share this.

    Raises ValueError naming the file, the tensor and the cure where the file breaks the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _damage(path), _opened(path) as stream:
            self._version = _version(stream)
            self._metadata, self.stored = _read_header(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no file is kept open, and `with` is for those who are used to safetensors' own reader."""

    def keys(self) -> list[str]:
        """Return the names, in the order of the header."""
        return list(self.stored)

    def metadata(self) -> dict[str, str]:
        """Return text by key; empty where the file has none."""
        return dict(self._metadata)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.nbytes for stored in self.stored.values())

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor into memory of its own; ValueError for an unknown name, RuntimeError for a changed file."""
        import torch

        if name not in self.stored:
            raise ValueError(f"{self.path}: holds no tensor {name!r}; copy the file again")
        stored = self.stored[name]
        data = devices.empty((stored.nbytes,), torch.uint8)
        with _damage(self.path), _opened(self.path) as stream:
            is_same = _version(stream) == self._version
            if is_same:
                stream.seek(stored.begin)
                _read_into(stream, data.numpy().data)
        if not is_same:
            raise RuntimeError(f"{self.path}: it was replaced or written to while it was read; start again")
        return data.view(getattr(torch, DTYPES[stored.dtype][0])).reshape(stored.shape)

    def let_go(self, name: str) -> None:
        """Have the system forget a tensor's bytes, which it keeps after reading, where that is possible."""
        stored = self.stored[name]
        with _opened(self.path) as stream:
            _advise(stream, stored.begin, stored.nbytes, "POSIX_FADV_DONTNEED")

    def fingerprint(self, name: str) -> str:
        """Return the hex XXH3-128 of a tensor's bytes, a few of them in memory at a time.

        It tells tensors apart as surely as SHA-256 does and takes a fifteenth of the time; it does not stand up to
        someone who makes a tensor for it.
        """
        stored, hasher = self.stored[name], _hasher()
        with _damage(self.path), _opened(self.path) as stream:
            stream.seek(stored.begin)
            for at in range(0, stored.nbytes, _AT_ONCE):
                hasher.update(_exactly(stream, min(_AT_ONCE, stored.nbytes - at)))
        return hasher.hexdigest()

    def require_as_written(self) -> None:
        """Raise ValueError for a file that is not as, or not where, `save_sealed` wrote it; read all of it."""
        metadata = self.metadata()
        described = {name: [each.dtype, each.shape, self.fingerprint(name)] for name, each in self.stored.items()}
        if metadata.pop(_SEAL, None) != _seal(self.path, metadata, described):
            raise ValueError(f"{self.path}: damaged since it was written, or of another place")


class _Holder(Protocol):
    path: Path

    def keys(self) -> list[str]: ...


File = TypeVar("File", bound=_Holder)


def by_tensor(files: Iterable[File]) -> dict[str, File]:
    """Return tensor name -> the file that holds it, of the files of one model; ValueError for a name in two of them."""
    file_of: dict[str, File] = {}
    for file in files:
        for name in file.keys():
            if name in file_of:
                both = f"{file_of[name].path} and {file.path.name}"
                raise ValueError(f"{both} both hold {name!r}: copy them again, or remove the one that is not meant")
            file_of[name] = file
    return file_of


def fingerprint_of(tensor: Tensor) -> str:
    """Return the hex XXH3-128 of a tensor's bytes, as `TensorFile.fingerprint` has it."""
    hasher = _hasher()
    hasher.update(_bytes_of(tensor))
    return hasher.hexdigest()


def _hasher() -> Any:
    import xxhash  # only here: machines that run kernels alone need not have it

    return xxhash.xxh3_128()


def save_weights(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str],
    make: Callable[[str], Tensor] | None = None,
) -> None:
    """Write tensors, from any device, as safetensors' `save_file` does; OSError naming the file and the free space.

    make: makes a tensor by its name, in its turn; `tensors` are placeholders then.
    """
    stored = {name: Stored(word_for(t.dtype), tuple(t.shape), 0, t.nbytes) for name, t in tensors.items()}
    header, placed = _lay_out(stored, metadata)
    with _Written(path) as target:
        target.write(header)
        for name in placed:
            target.write(_bytes_of(make(name) if make else tensors[name]))


def save_sealed(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str], *, durable: bool = True
) -> None:
    """Write a file of the work folder atomically, with a hash in its header for `TensorFile.require_as_written`.

    durable: as in `atomic_path`; without it a power cut may damage the file, which is noticed.
    """
    described = {n: [word_for(t.dtype), tuple(t.shape), fingerprint_of(t)] for n, t in tensors.items()}
    with atomic_path(path, durable=durable) as part:
        save_weights(tensors, part, {**metadata, _SEAL: _seal(path, metadata, described)})


def _seal(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Sequence[Any]]) -> str:
    """Return the SHA-256 of a file's place in the work, its metadata, and (dtype, shape, fingerprint) by name."""
    return sha256_json([place_in_work(path), dict(metadata), tensors])


def join_weights(parts: Mapping[str, tuple[Path, Stored]], path: Path, metadata: Mapping[str, str]) -> str:
    """Write a file of tensors that lie in others, and return its hex SHA-256.

    parts: name -> the file, and the tensor's place in it; the shape written is that of the place.

    Raises OSError as `save_weights` does.
    """
    header, placed = _lay_out({name: stored for name, (_, stored) in parts.items()}, metadata)
    digest, room = hashlib.sha256(header), memoryview(bytearray(_AT_ONCE))
    with _Written(path) as target, ThreadPoolExecutor(1) as hasher:
        target.write(header)
        for name in placed:
            file, stored = parts[name]
            with _reading(file):
                source = _opened(file)  # one at a time: parts may be more than a process may have open
            with source:
                for data in _pieces(source, file, stored, room):
                    hashed = hasher.submit(digest.update, data)  # beside writing it
                    target.write(data)
                    hashed.result()
    return digest.hexdigest()


def word_for(dtype: torch.dtype) -> str:
    """Return the header's word for a dtype; ValueError for one that the format does not have."""
    name = str(dtype).removeprefix("torch.")
    word = next((word for word, (torch_name, _) in DTYPES.items() if torch_name == name), None)
    if word is None:
        raise ValueError(f"safetensors files hold no {dtype}; cast it first")
    return word


def _lay_out(tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Stored]]:
    """Return the bytes of a file before its data, and name -> place of each tensor in the data, in order."""
    order = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    described: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    placed, at = {}, 0
    for name in order:
        stored = tensors[name]
        placed[name] = replace(stored, begin=at, end=at + stored.nbytes)
        described[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [at, at + stored.nbytes]}
        at += stored.nbytes
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text, placed


# --- the header, from bytes that may be anything


def _read_header(stream: FileIO) -> tuple[dict[str, str], dict[str, Stored]]:
    size = os.fstat(stream.fileno()).st_size
    if size < _LENGTH:
        raise ValueError(f"{size} bytes are no header")
    length = int.from_bytes(_exactly(stream, _LENGTH), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"its header would be {length} bytes, more than the {_LONGEST_HEADER} that are read")
    if length > size - _LENGTH:
        raise ValueError(f"its header would be {length} bytes, and {size - _LENGTH} follow")
    described = _parsed(_exactly(stream, length))
    metadata = described.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} is not text by name")
    start = _LENGTH + length
    tensors = {name: _stored(name, entry, start) for name, entry in described.items()}
    _require_whole(tensors, start, size)
    return metadata, tensors


def _parsed(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    for name in value:
        name.encode()  # half of a surrogate pair is no text
        if not name.isprintable():
            raise ValueError(f"its header names a tensor {name!r}, with characters that are not printed")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"its header names {name!r} twice")
        entries[name] = value
    return entries


def _stored(name: str, entry: Any, start: int) -> Stored:
    """Check a tensor's entry in the header, and return its place; offsets count from `start`."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: the header does not say dtype, shape and data_offsets, and those alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r}: dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if not _are_sizes(shape):
        raise ValueError(f"tensor {name!r}: shape {shape!r} is no list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name!r}: data_offsets {offsets!r} are no beginning and end")
    width = DTYPES[dtype][1]
    _require_possible(name, shape, width)
    needed, nbytes = width * prod(shape), offsets[1] - offsets[0]
    if needed != nbytes:
        raise ValueError(f"tensor {name!r}: {dtype} {shape} takes {needed} bytes, data_offsets give it {nbytes}")
    return Stored(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _require_possible(name: str, shape: Sequence[int], width: int) -> None:
    """Raise ValueError for a shape whose strides no tensor can have, also where a dimension is 0."""
    for size in shape:
        width *= max(size, 1)
        if width >= _TOO_LARGE:
            raise ValueError(f"tensor {name!r}: a shape of more than {_TOO_LARGE} bytes")


def _require_whole(tensors: Mapping[str, Stored], start: int, size: int) -> None:
    """Raise ValueError unless the tensors follow one another from `start` to the end of the file."""
    end = start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.end > size:
            raise ValueError(f"tensor {name!r}: ends at byte {stored.end} of {size}")
        if stored.begin != end:
            what = "overlaps the one before it" if stored.begin < end else "leaves a hole before it"
            raise ValueError(f"tensor {name!r}: {what}: it begins at byte {stored.begin}, not {end}")
        end = stored.end
    if end != size:
        raise ValueError(f"{size - end} bytes follow the last tensor")


def _opened(path: Path) -> FileIO:
    """Open a file to read; ValueError for a pipe or a device, which could be waited for without end."""
    stream = FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise ValueError("it is no regular file")
    if os.name != "nt":
        os.set_blocking(stream.fileno(), True)
    return stream


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn any fault of the bytes that were read into a ValueError that names the file and the cure."""
    with _reading(path):
        try:
            yield
        except ValueError as error:  # JSON and UTF-8 have errors of their own, all of them ValueErrors
            raise ValueError(f"{path}: truncated or damaged safetensors file ({error}); copy it again") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Add the file's name to an error of reading; its number stays.

    An OSError says nothing of the file: a disk, a network or the number of open files had a trouble, which may pass.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot be read ({error.strerror}); run this again", str(path)) from None


def _version(stream: FileIO) -> tuple[int, int, int]:
    """Return a key of the file's state; another one if the file was replaced or written to."""
    status = os.fstat(stream.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


# --- bytes


def _exactly(stream: FileIO, count: int) -> bytes:
    data = bytearray(count)
    _read_into(stream, memoryview(data))
    return bytes(data)


def _read_into(stream: FileIO, view: memoryview) -> None:
    while view:
        count = stream.readinto(view)  # Linux gives 2 GiB at most
        if not count:
            raise ValueError(f"it ends {len(view)} bytes too early")
        view = view[count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class _Written:
    """A new file. Bytes of a large one go to the disk at once, and the system forgets them.

    So a file that has been renamed is whole after a power cut too, and the system's pages for it serve the next writes:
    pages that it has not had in use can cost ten times as much, on virtual machines above all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _room(path):
            self._file = FileIO(path, "w")
        self._closing = ExitStack()
        self._at = self._settled = 0
        self._settling: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._closing.enter_context(self._file)
        return self

    def __exit__(self, *error: Any) -> None:
        with _room(self._path), self._closing:
            if self._at >= _LARGE and error[0] is None:
                self._settle().result()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        with _room(self._path):
            while view:
                view = view[self._file.write(view) :]
            self._at += len(data)
            if self._at - self._settled >= _BEHIND:
                self._settle()

    def _settle(self) -> Future[None]:
        """Begin to put new bytes on the disk, when all before them are."""
        if self._thread is None:
            self._thread = self._closing.enter_context(ThreadPoolExecutor(1))
        if self._settling is not None:
            self._settling.result()
        begin, self._settled = self._settled, self._at
        self._settling = self._thread.submit(self._to_disk, begin, self._at - begin)
        return self._settling

    def _to_disk(self, begin: int, count: int) -> None:
        if hasattr(os, "fdatasync"):  # not on macOS and Windows
            os.fdatasync(self._file.fileno())
        _advise(self._file, begin, count, "POSIX_FADV_DONTNEED")


def _advise(file: FileIO, begin: int, count: int, what: str) -> None:
    """Tell the system how bytes of a file will be used, where it can be told."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, count, getattr(os, what))


def _pieces(source: FileIO, path: Path, stored: Stored, room: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, a few at a time in one place of memory; the system forgets those that were read."""
    source.seek(stored.begin)
    left = stored.nbytes
    if stored.nbytes >= _LARGE:
        _advise(source, stored.begin, stored.nbytes, "POSIX_FADV_WILLNEED")
    while left:
        with _reading(path):
            count = source.readinto(room[: min(left, len(room))])
        if not count:
            raise ValueError(f"{path}: ends {left} bytes too early; it was written to while it was copied")
        yield room[:count]
        left -= count
    if stored.nbytes >= _LARGE:
        _advise(source, stored.begin, stored.nbytes, "POSIX_FADV_DONTNEED")


@contextmanager
def _room(path: Path) -> Iterator[None]:
    """Add the file's name and the free space of its disk to an error of writing; its number stays."""
    try:
        yield
    except OSError as error:
        named = OSError(f"cannot write {path.name} ({error}){room_left(error, path.parent)}")
        named.errno = error.errno
        raise named from None


# Header's word -> (name in torch, bytes of an element), in the order of tensors in a file.
DTYPES = {
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F32": ("float32", 4),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_ORDER = {word: place for place, word in enumerate(DTYPES)}
