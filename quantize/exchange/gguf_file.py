"""GGUF files: a header that is checked before anything else is read, and tensors one at a time.

    "GGUF", version U32, tensors U64, entries U64
    entries    key, type U32, value
    tensors    name, dimensions U32, sizes U64 (K first), type U32, offset U64, of the data that begins at the next
               multiple of `general.alignment`

Blocks are returned as bytes; exchange/gguf.py takes them apart. Source: the GGUF page of ggml's documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import DTYPES, Stored

MAGIC = b"GGUF"
_LONGEST_HEADER = 1 << 26  # bytes; vocabularies of text encoders take some millions
_MOST = 1 << 20  # tensors, or entries
_KEPT = 64  # elements of an array that is kept; vocabularies are passed over


class GGUFFile:
    """A GGUF file whose header was checked; has what `TensorFile` has. ValueError naming the file and the cure."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _damage(path), path.open("rb") as stream:
            size = path.stat().st_size
            self.entries, self.stored = _Header(stream.read(_LONGEST_HEADER), size).read()

    def keys(self) -> list[str]:
        """Names, in the order of the header."""
        return list(self.stored)

    def metadata(self) -> dict[str, str]:
        """Entries as text, arrays of more than a few elements left out."""
        return {key: str(value) for key, value in self.entries.items()}

    def get_tensor(self, name: str) -> Tensor:
        """A tensor of numbers in its shape; blocks as U8 (rows, bytes of a row)."""
        if name not in self.stored:
            raise ValueError(f"{self.path}: holds no tensor {name!r}; copy the file again")
        stored = self.stored[name]
        data = torch.empty(stored.nbytes, dtype=torch.uint8)
        with _damage(self.path), self.path.open("rb") as stream:
            stream.seek(stored.begin)
            if stream.readinto(data.numpy().data) != stored.nbytes:
                raise ValueError(f"{name} ends too early")
        if stored.dtype in DTYPES:
            return data.view(getattr(torch, DTYPES[stored.dtype][0])).reshape(stored.shape)
        return data.reshape(prod(stored.shape[:-1]), -1)


class _Header:
    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.at, self.size = data, 0, size

    def read(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        if self.data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version, tensors, entries = self.take("I"), self.take("Q"), self.take("Q")
        if version not in (2, 3):
            raise ValueError(f"version {version}, and 2 and 3 are read")
        if max(tensors, entries) > _MOST:
            raise ValueError(f"{tensors} tensors and {entries} entries, and {_MOST} are read at most")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key, value = self.text(), self.value(self.take("I"))
            if key in metadata:
                raise ValueError(f"its header names {key!r} twice")
            if value is not None:
                metadata[key] = value
        described = {}
        for _ in range(tensors):
            name = self.text()
            if name in described:
                raise ValueError(f"its header names {name!r} twice")
            described[name] = self.tensor(name)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise ValueError(f"general.alignment is {alignment!r}, no multiple of 8")
        start = -(-self.at // alignment) * alignment
        return metadata, self.placed(described, start, alignment)

    def placed(self, described: dict[str, tuple[str, tuple[int, ...], int, int]], start: int, unit: int) -> Any:
        tensors, end = {}, start
        for name, (kind, shape, offset, nbytes) in sorted(described.items(), key=lambda item: item[1][2]):
            begin = start + offset
            if offset % unit or begin < end:
                raise ValueError(f"tensor {name!r}: begins at byte {begin}, in or beside the one before it")
            end = begin + nbytes
            if end > self.size:
                raise ValueError(f"tensor {name!r}: ends at byte {end} of {self.size}")
            tensors[name] = Stored(kind, shape, begin, end)
        return {name: tensors[name] for name in described}

    def tensor(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        count = self.take("I")
        if not 1 <= count <= 5:
            raise ValueError(f"tensor {name!r}: {count} dimensions")
        shape = tuple(self.take("Q") for _ in range(count))[::-1]
        kind, offset = self.take("I"), self.take("Q")
        if kind not in TYPES:
            raise NotImplementedError(
                f"tensor {name!r} is of type {_UNREAD.get(kind, kind)}, which is not read here; get it in 16 bit"
            )
        word, elements, nbytes = TYPES[kind]
        if not 0 < prod(shape) < 1 << 40 or shape[-1] % elements:
            raise ValueError(f"tensor {name!r}: {word} in the shape {shape}, whose rows are no blocks of {elements}")
        return word, shape, offset, prod(shape) // elements * nbytes

    def value(self, kind: int) -> Any:
        """A value; None for an array of which nothing is kept."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"an entry has the type {kind}")
            return self.take(_SCALARS[kind])
        inner, count = self.take("I"), self.take("Q")
        if inner == _TEXT:
            if count * 8 > len(self.data) - self.at:
                raise ValueError(f"an array of {count} texts does not fit the header")
            values = [self.text() for _ in range(count)]
        elif inner in _SCALARS:
            values = self.several(count, _SCALARS[inner])
        else:
            raise ValueError(f"an array has elements of type {inner}")
        return values if count <= _KEPT else None

    def several(self, count: int, code: str) -> list[Any]:
        width = struct.calcsize(code)
        if count * width > len(self.data) - self.at:
            raise ValueError(f"an array of {count} numbers does not fit the header")
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.at)) if count <= _KEPT else []
        self.at += count * width
        return values

    def take(self, code: str) -> int:
        width = struct.calcsize("<" + code)
        if self.at + width > len(self.data):
            raise ValueError("its header ends too early")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += width
        return value

    def text(self) -> str:
        length = self.take("Q")
        if length > len(self.data) - self.at:
            raise ValueError(f"a name of {length} bytes does not fit the header")
        self.at += length
        return self.data[self.at - length : self.at].decode()


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:  # a type of tensors that ggml has, and this has not
        raise ValueError(f"{path}: {error}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: truncated or damaged GGUF file ({error}); copy it again") from None


_TEXT, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UNREAD = {
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
# ggml's number of a type -> its name, and of blocks: (name, elements of a block, its bytes)
_PLAIN = {0: "F32", 1: "F16", 30: "BF16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
BLOCKS = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}
TYPES = {kind: (name, 1, DTYPES[name][1]) for kind, name in _PLAIN.items()} | BLOCKS
