"""Several processes at one job: the number of this one, and messages between them.

torchrun (or `accelerate launch` on several GPUs) starts them and numbers them in the environment. Large tensors go
through a folder that all of them see. Over the wire (gloo, on the CPU, whatever the device) go JSON values, small sums
and "I am here": no pickle, and no library of the GPU's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from fluxq.base.console import first_line

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_PATIENCE = timedelta(days=30)  # a rank with a slow device is waited for


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of one job.

    rank: number of this process.
    world: number of processes.
    local_rank: number among those of this machine.
    group: torch's process group, None for one process.

    `agree`, `meet` and `sum` are for all of them, in the same order; RuntimeError where another one has failed.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    group: Any = None

    @property
    def leads(self) -> bool:
        """True for the process that looks after the output and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's part of items, every world-th; all processes have the same items in one order."""
        return items[self.rank :: self.world]

    def agree(self, value: T | None = None) -> T:
        """Return the first process's value, which JSON can hold, in every process."""
        if self.world == 1:
            return value  # pyright: ignore[reportReturnType]
        import torch
        from torch import distributed

        text = json.dumps(value).encode() if self.leads else b""
        size = torch.tensor(len(text))
        with _others():
            distributed.broadcast(size, src=0, group=self.group)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.leads else torch.empty(int(size)).byte()
        with _others():
            distributed.broadcast(data, src=0, group=self.group)
        return json.loads(data.numpy().tobytes())

    def meet(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            from torch import distributed

            with _others():
                distributed.barrier(group=self.group)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, values on the CPU and in place; exact where at most one is not zero."""
        if self.world > 1:
            from torch import distributed

            with _others():
                distributed.all_reduce(values, group=self.group)
        return values

    def device(self, device: str) -> str:
        """Return `cuda` as this process's own GPU; ValueError where it has none."""
        if self.world == 1 or device.partition(":")[0] != "cuda":
            return device
        import torch

        if self.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {self.local_rank} of this machine has no GPU of its own: start at most "
                f"{torch.cuda.device_count()} processes here"
            )
        torch.cuda.set_device(self.local_rank)  # where kernels are launched
        return f"cuda:{self.local_rank}"


ALONE = Ranks()


def launched() -> bool:
    """Tell whether torchrun started this process as one of several.

    Schedulers set RANK and WORLD_SIZE too, for a whole allocation: those alone say nothing of this process.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def ranks_of_launch() -> AbstractContextManager[Ranks]:
    """Give the processes that torchrun started with this one to a `with` block; `ALONE` if it did not."""
    return connected() if launched() else nullcontext(ALONE)


@contextmanager
def connected() -> Iterator[Ranks]:
    """Yield the processes that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe."""
    from torch import distributed

    is_ours = not distributed.is_initialized()
    if is_ours:
        distributed.init_process_group("gloo", timeout=_PATIENCE)
    try:
        group = distributed.new_group(backend="gloo", timeout=_PATIENCE)  # the caller's own may have another backend
        rank = distributed.get_rank()
        yield Ranks(rank, distributed.get_world_size(), int(os.environ.get("LOCAL_RANK", rank)), group)
    finally:
        if is_ours:
            distributed.destroy_process_group()


@contextmanager
def _others() -> Iterator[None]:
    """Turn the error of a broken connection into one that names its meaning."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"another process of this run has failed, its own message says why ({first_line(error)})"
        ) from None
