"""Devices: the one that `--device` means, its free memory, and scratch memory on it.

Within `used_again` the memory of freed tensors is used again: the system clears every page that it hands out, which
takes several times as long as a copy from a file in its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np

from fluxq.base.console import first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AUTO = "auto"
_MEMORY = Path("/proc/meminfo")
_LARGE = 1 << 20  # bytes; smaller pieces come from malloc, which keeps its memory
_KEPT = 1 << 28  # bytes of unused memory


def choose(device: str) -> str:
    """Return torch's name for `device`; "auto" is the GPU if torch finds one, else the CPU.

    Raises ValueError for a device that torch cannot use.
    """
    import torch

    if device == AUTO:
        return "cuda" if there_is_a_gpu() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = shorten(first_line(error), 160)
        raise ValueError(f"device {device!r} cannot be used: {why}; give --device cpu, or cuda with a GPU") from None
    return device


def there_is_a_gpu() -> bool:
    """Return whether torch finds a CUDA or ROCm GPU."""
    import torch

    return torch.cuda.is_available()


def describe(device: str, option: str) -> str:
    """Return the words about the device in a command's first line. option: the value of `--device`."""
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        free = free_bytes(place) or 0
        return f"{device} ({torch.cuda.get_device_name(place)}, {free / 1e9:.1f} GB free)"
    return f"{device} (torch finds no GPU)" if option == AUTO else device


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device, a GPU or the machine, can still give; None where the system does not say."""
    import torch

    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if not _MEMORY.is_file():
        return None  # only Linux has it
    lines = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None


@contextmanager
def used_again() -> Iterator[None]:
    """Let large tensors that are read or rounded in the block use the memory of freed ones, some of which is kept."""
    before, _FREE.most = _FREE.most, _KEPT
    try:
        yield
    finally:
        _FREE.most = before
        _FREE.trim()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return `torch.empty`, in memory of a freed tensor where there is some."""
    import torch

    nbytes = prod(shape) * dtype.itemsize
    if not _FREE.most or nbytes < _LARGE or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.asarray(_Lent(_FREE.take(nbytes)))[:nbytes]).view(dtype).reshape(shape)


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return `torch.empty` for a short while, which cannot be resized.

    On a CPU numpy asks the system for large pages where it has them, as Linux does: they are cleared several times as
    fast as the small ones that torch takes. They are gone with the tensor.
    """
    import torch

    nbytes = prod(shape) * dtype.itemsize
    if nbytes < _LARGE or torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8)).view(dtype).reshape(tuple(shape))


class _Free:
    """Unused blocks of memory by number; beyond `most` bytes the oldest go."""

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}
        self.most = 0
        self._numbers = count()
        self._lock = threading.RLock()  # Python may collect garbage anywhere: a block may come back in here

    def take(self, nbytes: int) -> np.ndarray:
        """Return a block of that size, or of up to twice."""
        with self._lock:
            fits = [(block.nbytes, n) for n, block in [*self.blocks.items()] if nbytes <= block.nbytes <= 2 * nbytes]
            block = self.blocks.pop(min(fits)[1], None) if fits else None
        return np.empty(nbytes, dtype=np.uint8) if block is None else block

    def give(self, block: np.ndarray) -> None:
        with self._lock:
            self.blocks[next(self._numbers)] = block
            self.trim()

    def trim(self) -> None:
        with self._lock:
            while sum(block.nbytes for block in [*self.blocks.values()]) > self.most:
                self.blocks.pop(min(self.blocks), None)


_FREE = _Free()


class _Lent:
    """A block of memory that its last array, and so the tensor that lives in it, gives back."""

    def __init__(self, block: np.ndarray) -> None:
        self._block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self, free: _Free = _FREE) -> None:  # a name of the module may be gone when Python ends
        free.give(self._block)
