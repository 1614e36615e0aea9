"""Memory of a job's pipelines: `--max-memory`, the device that has room for a model, the error where memory runs out.

The least bound that would do follows from shapes (footprint.py) before anything is computed. Weights have the rest of
it; on a GPU the allocator keeps to the bound too. Parts of a pipeline that is judged take turns on a GPU that has no
room for all of them, as diffusers' offload does it.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fluxq.base.console import first_line, logger
from fluxq.base.devices import AUTO, free_bytes
from fluxq.base.model import ModelFolder
from fluxq.base.residence import Residence, residence_of
from fluxq.integrations.bounded import load_bounded
from fluxq.jobs import footprint
from fluxq.quantize.checkpoint import is_model
from fluxq.quantize.lora import Updates
from fluxq.quantize.structure import denoisers_of
from fluxq.recipes.plan import Plan
from fluxq.recipes.workloads import CallSize

_OF_GPU = 0.95  # of the bound: the allocator hands out memory in pieces, and some of each is left over
_OF_HOST = 64 << 20  # bytes that libraries keep: code that oneDNN compiles for each shape, small pieces of memory
_M_MMAP_THRESHOLD, _GIVEN_BACK, _KEPT = (
    -3,
    1 << 17,
    1 << 25,
)  # of malloc.h; bytes within a bound, and without
_NO_MEMORY = "can't allocate memory"  # torch's words about the host's memory
_SMALLER = "a smaller --height and --width"
FREE = 0.9  # of free memory, that a job may plan with: others on the machine want some, too


@dataclass(frozen=True)
class Bound:
    """Bound on the memory of a job.

    limit: bytes that weights and computing may take together.
    working: component -> bytes beside its weights while it runs.
    fitting: component -> bytes beside its weights while it is fitted.
    """

    limit: int
    device: str
    dtype: str
    working: Mapping[str, int]
    fitting: Mapping[str, int]

    def load(self, folder: ModelFolder, updates: Mapping[str, Sequence[Updates]]) -> Any:
        """Load a pipeline within the bound. updates: component -> LoRA updates that are fused into it."""
        on_gpu = torch.device(self.device).type == "cuda"
        residence = Residence(self.device, int(self.limit * _OF_GPU) if on_gpu else self.limit - _OF_HOST)
        every_step = dict.fromkeys(denoisers_of(folder), 1)
        return load_bounded(folder, self.dtype, residence, ranks=every_step, working=self.working, updates=updates)

    def begin_fitting(self, pipe: Any) -> None:
        """Set aside the memory of fitting, block by block, in place of that of running."""
        for component, working in self.fitting.items():
            model = getattr(pipe, component)
            residence = residence_of(model)
            if residence is not None:
                residence.set_working(model, working)


@dataclass(frozen=True)
class Demand:
    """Demand of a job on a device; `working` and `fitting` are those of a Bound.

    needs: work in words -> bytes that it takes at once.
    """

    device: str
    dtype: str
    working: Mapping[str, int]
    fitting: Mapping[str, int]
    needs: Mapping[str, int]

    @property
    def most(self) -> str:
        """Work that needs most."""
        return max(self.needs, key=lambda each: self.needs[each])

    @property
    def least(self) -> int:
        """Bytes of the smallest bound that would do."""
        return self._with_overhead(self.needs[self.most])

    def unbounded(self, weights: int) -> int:
        """Return the bytes that the job takes without a bound: all `weights`, and the largest work on them."""
        return self._with_overhead(weights + max([0, *self.working.values(), *self.fitting.values()]))

    def _with_overhead(self, nbytes: int) -> int:
        return math.ceil(nbytes / _OF_GPU) if torch.device(self.device).type == "cuda" else nbytes + _OF_HOST

    def __str__(self) -> str:
        return f"{in_words(self.least)}, for {self.most}"

    def bound(self, limit: int) -> Bound:
        """Return the bound for the job; ValueError naming the least memory that would do if that is above `limit`."""
        if self.least > limit:
            smaller = f", or {_SMALLER}" if self.most.startswith("running") else ""
            fewer = ", or fewer --frames" if smaller and "video" in self.most else ""
            raise ValueError(
                f"--max-memory {in_words(limit)}: {self.most} needs {in_words(self.least)}; give at least that"
                f"{smaller}{fewer}"
            )
        return Bound(limit, self.device, self.dtype, self.working, self.fitting)


def demand_of(
    device: str,
    dtype: str,
    folder: ModelFolder,
    *,
    sizes: Iterable[CallSize],
    shown: Iterable[CallSize],
    fitted: Iterable[Plan],
    fused: Collection[str],
) -> Demand:
    """Return the demand of a job on `device`, from shapes.

    sizes: calls that end with latents.
    shown: calls whose latents are decoded too.
    fitted: plans with layers that are fitted.
    fused: components with LoRA updates.
    """
    itemsize, on_gpu = getattr(torch, dtype).itemsize, torch.device(device).type == "cuda"
    working, fitting, needs = {}, {}, {}
    decoded, every = {*shown}, {*sizes, *shown}
    for component in filter(lambda name: is_model(folder, name), folder.components):
        coming = 2 * footprint.largest(folder, component, itemsize)
        calls = decoded or every if component == "vae" else every
        took = {size: footprint.activations(folder, component, size, itemsize) for size in calls}
        size = max(calls, key=lambda size: took[size])
        working[component] = took[size]
        if decoded or component != "vae":
            needs[f"running {component} on {size}"] = took[size] + coming
    for plan in fitted:
        blocks = footprint.fitting(
            plan, working[plan.component], itemsize, widened=plan.component in fused, on_gpu=on_gpu
        )
        fitting[plan.component] = max(blocks.values())
        coming = 2 * footprint.largest(folder, plan.component, itemsize)
        for block, needed in blocks.items():
            widest = max(layer.k for layer in plan.quantized if layer.block == block)
            needs[f"fitting {block} ({widest} channels)"] = needed + coming
    return Demand(device, dtype, working, fitting, needs)


def weight_bytes(folder: ModelFolder, dtype: str) -> int:
    """Return the bytes of all weights of a pipeline as it is loaded."""
    itemsize = getattr(torch, dtype).itemsize
    return sum(
        footprint.weight_bytes(folder, component, itemsize)
        for component in folder.components
        if is_model(folder, component)
    )


def settle_pipeline(folder: ModelFolder, device: str, nbytes: int, device_option: str) -> tuple[str, bool]:
    """Return (device, whether its parts take turns on it) for a pipeline that makes images to be judged.

    nbytes: bytes of its weights as they are loaded.
    device_option: the value of `--device`.

    Raises ValueError for a pipeline that does not fit.
    """
    place = torch.device(device)
    free = free_bytes(place) if place.type in ("cpu", "cuda") else None
    if free is None or nbytes <= (FREE * free if place.type == "cuda" else free):
        return device, False
    needs = f"weights of {folder.name} take {in_words(nbytes)}, {in_words(free)} are free on {device}"
    if place.type == "cpu":
        raise ValueError(f"{needs}: it does not fit on this machine; evaluate it on one with more memory")
    if device_option != AUTO:
        raise ValueError(f"{needs}; leave out --device: its parts then take turns on the GPU")
    if max(_part_bytes(folder).values(), default=0) <= FREE * free:
        logger.warning("%s: its parts take turns there (offload), which takes longer", needs)
        return device, True
    logger.warning("%s, too little even for its largest part: the CPU is used", needs)
    return settle_pipeline(folder, "cpu", nbytes, AUTO)


def stored_bytes(folder: ModelFolder) -> int:
    """Return the bytes of all weights of a pipeline as they are stored."""
    return sum(_part_bytes(folder).values())


def _part_bytes(folder: ModelFolder) -> dict[str, int]:
    """Return the bytes of each component's weights as they are stored."""
    return {
        name: sum(path.stat().st_size for path in folder.weight_files(name))
        for name in folder.components
        if is_model(folder, name)
    }


def in_words(nbytes: int) -> str:
    """Return a size as `--max-memory` takes it, rounded up."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{math.ceil(10 * nbytes / size) / 10:g}{unit}"
    return f"{math.ceil(nbytes / 1024)}KiB"


@contextmanager
def within(limit: int | None, device: str) -> Iterator[None]:
    """Hold the device's allocator to `limit`; where memory runs out, name the cure."""
    place = torch.device(device)
    if limit is not None:
        _bind(place, limit)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            if _NO_MEMORY not in str(error):
                raise
        cure = (
            "--max-memory SIZE, as in 8GiB, reads weights when it is their turn"
            if limit is None
            else f"more was needed than --max-memory {in_words(limit)}, or than the machine has: give another one, or "
            f"{_SMALLER}"
        )
        raise RuntimeError(f"out of memory on {device} ({first_line(error) or 'MemoryError'}): {cure}") from error
    finally:
        if limit is not None:
            _bind(place, None)


def _bind(device: torch.device, limit: int | None) -> None:
    """Set or lift the limit of a GPU's allocator; on a CPU have glibc's give freed memory back at once.

    Else glibc would keep, for each thread, several times what the bound leaves for weights.
    """
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole) if limit else 1.0, device)
    elif device.type == "cpu" and sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK if limit else _KEPT)


def let_go(pipe: Any) -> None:
    """Let go of all weights of a pipeline within a bound; they come again when it runs."""
    for model in pipe.components.values():
        residence = residence_of(model)
        if residence is not None:
            residence.rest()
