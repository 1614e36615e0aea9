"""Devices: the one that `--device` means, its free memory, scratch memory on it, and what a result says of the machine.

Within `used_again` the memory of freed tensors is used again: the system clears every page that it hands out, which
takes several times as long as a copy from a file in its cache.

Instructions are those that PyTorch uses in this process. Its own loops choose by ATEN_CPU_CAPABILITY, and oneDNN, which
computes products of 16-bit and int8 numbers, by ONEDNN_MAX_CPU_ISA: these may allow less than the processor has.
"""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
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


def there_is_a_gpu(number: int = 0) -> bool:
    """Return whether torch finds a CUDA or ROCm GPU of that number, and can use it."""
    import torch

    return torch.cuda.is_available() and number < torch.cuda.device_count()  # which counts for old drivers, too


def describe(device: str, option: str) -> str:
    """Return the words about the device in a command's first line. option: the value of `--device`."""
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        free = free_bytes(place) or 0
        return f"{device} ({torch.cuda.get_device_name(place)}, {free / 1e9:.1f} GB free)"
    return f"{device} (torch finds no GPU)" if option == AUTO else device


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a GPU, or for a CPU the machine, can still give; None where nothing says how many."""
    import torch

    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu" or not _MEMORY.is_file():
        return None  # only Linux has the file
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


_PACKAGES = ("torch", "diffusers", "transformers", "safetensors")
_version = cache(version)  # imported packages stay as they are, whatever is installed meanwhile
_CPUINFO = Path("/proc/cpuinfo")
_DRIVERS = (
    (Path("/proc/driver/nvidia/version"), r"Kernel Module.*?\s(\d+(?:\.\d+)+)"),
    (Path("/sys/module/amdgpu/version"), r"(\S+)"),
)


def utc_now() -> str:
    """Return the time in UTC, as files record it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, of the packages that compute and of `more`, and the kind of machine."""
    machine = f"{cpu_name()}, {os.cpu_count()} cores, {instructions()}"
    packages = {name: package_version(name) for name in (*_PACKAGES, *more)}
    return {"python": platform.python_version(), **packages, "machine": machine}


def package_version(name: str) -> str:
    """Return the version of an installed package, "not installed" for one that is not there."""
    try:
        return _version(name)
    except PackageNotFoundError:
        return "not installed"


def is_older(package: str, first: str) -> bool:
    """Tell whether an installed package is older than a version, or not installed."""
    return version_numbers(package_version(package)) < version_numbers(first)


def version_numbers(version: str) -> list[int]:
    """Return the numbers that a version begins with; of one that is not installed, none."""
    return [int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0])]  # pyright: ignore[reportOptionalSubscript]


def driver() -> str:
    """Return the version of the GPU's driver, read from where Linux has it; elsewhere the CUDA version that it knows.

    Empty where neither is known. No program is started.
    """
    import torch

    for file, pattern in _DRIVERS:
        if file.is_file() and (match := re.search(pattern, file.read_text(encoding="utf-8"))):
            return match[1]
    if not torch.version.cuda or not torch.cuda.is_available():
        return ""
    return f"CUDA {torch._C._cuda_getDriverVersion()}"  # pyright: ignore[reportAttributeAccessIssue]


def commit() -> str:
    """Return the checkout's commit, with "-dirty" if files differ from it; "unknown" outside one, and without git."""
    from fluxq.base.git import git

    try:
        return git(Path(__file__).parent, "describe", "--always", "--dirty").strip() or "unknown"
    except RuntimeError:
        return "unknown"


@dataclass(frozen=True)
class Instructions:
    """Instructions of a processor; as text: AVX512 (VNNI, BF16).

    vectors: "AVX512", "AVX2", …
    products: those that multiply numbers of 8 and 16 bits: "VNNI", "BF16", "AMX", …
    """

    vectors: str
    products: tuple[str, ...] = ()

    @property
    def multiply_bf16(self) -> bool:
        """True if PyTorch has an instruction to multiply bf16: without one bf16 becomes fp32 on its way."""
        return not {"BF16", "AMX"}.isdisjoint(self.products)

    def __str__(self) -> str:
        return f"{self.vectors} ({', '.join(self.products)})" if self.products else self.vectors


def cpu_name() -> str:
    """Return the operating system's name for the processor."""
    return _listed("model name") or platform.machine()


def machine_name(device: str) -> str:
    """Return the name of what computes on a device: that of the GPU, or of the processor."""
    import torch

    place = torch.device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else cpu_name()


def flags() -> tuple[str, ...]:
    """Return the processor's instruction sets for vectors and matrices, as Linux lists them; elsewhere none."""
    listed = {*_listed("flags").split(), *_listed("Features").split()}
    return tuple(flag for flag in (*_VECTORS, *FLAGS) if flag in listed)


def instructions(environment: Mapping[str, str] = os.environ) -> Instructions:
    """Find the instructions that PyTorch uses here."""
    import torch

    vectors = torch.backends.cpu.get_cpu_capability()
    limit = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "")).upper()
    rows = [FLAGS[flag] for flag in flags() if flag in FLAGS]
    names = [name for name, last_without in rows if limit not in _up_to(last_without)]
    return Instructions(platform.machine() if vectors == "DEFAULT" else vectors, tuple(dict.fromkeys(names)))


def _up_to(limit: str) -> tuple[str, ...]:
    """Return the values of ONEDNN_MAX_CPU_ISA that allow no more than this one."""
    return _LIMITS[: _LIMITS.index(limit) + 1] if limit else ()


def _listed(key: str) -> str:
    """Return the value of a key in /proc/cpuinfo, for the first core; empty where it is not listed."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


_VECTORS = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "asimd", "sve", "sve2")
# oneDNN's names, each allowing more than the one before.
_LIMITS = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
    *("AVX10_1_512", "AVX512_CORE_FP16"),
)
# Flag of the processor -> its name for people, and the largest of oneDNN's limits that goes without it.
FLAGS = {
    "avx_vnni": ("VNNI", "AVX2"),
    "avx512_vnni": ("VNNI", "AVX512_CORE"),
    "avx512_bf16": ("BF16", "AVX512_CORE_VNNI"),
    "amx_bf16": ("AMX", "AVX512_CORE_FP16"),
    "amx_int8": ("AMX", "AVX512_CORE_FP16"),
    "i8mm": ("I8MM", ""),
    "bf16": ("BF16", ""),
}
