"""Runs Gluon kernels whose warps work apart on the CPU: interpreter.py hands them over, as Triton's own refuses them.

Warps, copies and matrix products run at once on a GPU, and only barriers in shared memory order them. Here

- each partition of `warp_specialize` is a thread, of which one runs at a time: before every step that others can see,
  the next to go on is drawn by lot, so that `scheduled(seed)` runs a kernel in another order;
- a TMA copy writes at any time after it began; until then its buffer holds NaN;
- `warpgroup_mma` reads shared memory not before it is waited for;
- an mbarrier counts arrivals and bytes, and completes a phase when none is missing.

Code that a GPU would answer with wrong numbers, or never, is a `Fault` here: partitions that all wait, a result used
before it was waited for, arrivals beyond the count, a copy that outlives its program, and any two accesses to a buffer,
one of them a write, that no barrier orders. Orders are known by vector clocks, so that the last is found though the
schedule happened to run them apart.

It knows what kernels/attention/warp_specialized.py uses. Layouts are the compiler's to check. Arithmetic is fp32's, fma
through float64, products of fp8 exact and summed in no order that a test may rely on; fp8 does not saturate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, product
from random import Random
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction


class Fault(RuntimeError):
    """A kernel did what has no defined result on a GPU, or would not end there."""


@contextmanager
def scheduled(seed: int) -> Iterator[None]:
    """Draw lots from another seed in the block, for other orders of what runs at once."""
    before, _Program.seed = _Program.seed, seed
    try:
        yield
    finally:
        _Program.seed = before


def launch(kernel: JITFunction, *args: Any, grid: Sequence[int], **named: Any) -> None:
    """Run a kernel as `kernel[grid](...)` does, its programs one after the other; compile options are ignored.

    Tensors are contiguous and on the CPU. Raises Fault, IndexError for an access outside a tensor.
    """
    given = dict(zip(kernel.arg_names, args, strict=False)) | {n: v for n, v in named.items() if n in kernel.arg_names}
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    values = {name: value if name in fixed else _argument(value) for name, value in given.items()}
    with torch.inference_mode():
        for place in product(*map(range, grid)):
            program = _Program(place)
            program.run(program.bind(kernel), values)


def _argument(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return _Descriptor(value)
    if isinstance(value, Tensor):
        return _Pointer(value.view(-1))
    return torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32)


# --- what runs at once, and in what order


class _Task:
    """One that accesses memory: a partition, a copy or a product. clock: of each task, how much of it came before."""

    numbers = count()

    def __init__(self, before: dict[int, int]) -> None:
        self.number = next(self.numbers)
        self.clock = before | {self.number: 1}

    def fork(self) -> _Task:
        """Begin a task that comes after all that this one did, and before nothing that it does from now on."""
        task = _Task(self.clock)
        self.clock[self.number] += 1
        return task

    def follow(self, clock: dict[int, int]) -> None:
        """Come after all that a clock knows."""
        self.clock |= {task: max(time, self.clock.get(task, 0)) for task, time in clock.items()}

    @property
    def now(self) -> tuple[int, int]:
        return self.number, self.clock[self.number]

    def knows(self, moment: tuple[int, int]) -> bool:
        return self.clock.get(moment[0], 0) >= moment[1]


class _Partition(_Task):
    """Warps that run one function. until: what they wait for. products: those begun and not waited for."""

    def __init__(self, before: dict[int, int]) -> None:
        super().__init__(before)
        self.turn = threading.Semaphore(0)
        self.until: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self.products: list[_Product] = []
        self.error: BaseException | None = None
        self.is_done = False


class _Ended(BaseException):
    """Ends the threads of a program in which something was wrong."""


class _Program:
    """One program of a launch: its threads, copies, and the language that its functions are given."""

    seed = 0

    def __init__(self, place: tuple[int, ...]) -> None:
        self.place = place
        self.lots = Random(f"{self.seed} {place}")
        self.back = threading.Semaphore(0)
        self.partitions: list[_Partition] = []
        self.copies: list[_Copy] = []  # on their way
        self.begun: list[_Task] = []  # of all copies
        self.now: Any = None  # the partition whose turn it is
        self.is_over = False
        self.language = _language(self)
        self.functions: dict[str, Callable[..., Any]] = {}

    def bind(self, function: Any) -> Callable[..., Any]:
        """Return a Gluon function as one of Python, of which each global name is this program's."""
        python = function.fn
        if python.__qualname__ not in self.functions:
            names = dict(python.__globals__)
            made = FunctionType(python.__code__, names, python.__name__, python.__defaults__)
            self.functions[python.__qualname__] = made
            for name in python.__code__.co_names:
                if name in names:
                    names[name] = self.stand_in(names[name])
        return self.functions[python.__qualname__]

    def stand_in(self, value: Any) -> Any:
        if value is gl:
            return self.language
        if value is mbarrier:
            return self.language.mbarrier
        if isinstance(value, gl.constexpr):
            return value.value
        if isinstance(value, JITFunction):
            return self.bind(value)
        if getattr(value, "__module__", "").startswith("triton.experimental.gluon"):
            return getattr(self.language, value.__name__)
        return value

    def run(self, kernel: Callable[..., Any], values: dict[str, Any]) -> None:
        try:
            self.start(lambda: kernel(**values), {})
            while tasks := self.ready():
                task = self.lots.choice(tasks)
                if isinstance(task, _Copy):
                    self.copies.remove(task)
                    task.land()
                else:
                    self.give_turn(task)
            self.check_end()
        finally:
            self.is_over = True
            for partition in self.partitions:
                if not partition.is_done:
                    self.give_turn(partition)

    def start(self, call: Callable[[], Any], before: dict[int, int]) -> _Partition:
        def body() -> None:
            partition.turn.acquire()
            try:
                if not self.is_over:
                    with torch.inference_mode():  # no thread inherits it
                        call()
            except _Ended:
                pass
            except BaseException as error:  # raised again where the program was run
                partition.error = error
            partition.is_done = True
            self.back.release()

        partition = _Partition(before)
        self.partitions.append(partition)
        threading.Thread(target=body, daemon=True).start()
        return partition

    def ready(self) -> list[Any]:
        return [*(p for p in self.partitions if not p.is_done and p.until()), *self.copies]

    def give_turn(self, partition: _Partition) -> None:
        self.now = partition
        partition.turn.release()
        self.back.acquire()
        if partition.error is not None:
            error, partition.error = partition.error, None
            raise error

    def step(self, until: Callable[[], bool] = lambda: True, waits_for: str = "") -> _Partition:
        """Let others go on, and come back when the lot falls on this partition and its condition holds."""
        partition: _Partition = self.now
        partition.until, partition.waits_for = until, waits_for
        self.back.release()
        partition.turn.acquire()
        if self.is_over:
            raise _Ended
        partition.until, partition.waits_for = lambda: True, ""
        return partition

    def check_end(self) -> None:
        """Raise Fault unless all partitions came to their end."""
        if waiting := [partition.waits_for for partition in self.partitions if not partition.is_done]:
            raise Fault(f"deadlock in program {self.place}: all wait, for {'; '.join(waiting)}")


# --- memory


class _Pointer:
    """Pointer into a flat tensor, or a block of them."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.tensor, self.offset + offset)

    def places(self, mask: Tensor | None = None) -> Tensor:
        places = torch.as_tensor(self.offset)
        outside = (places < 0) | (places >= self.tensor.numel())
        if (outside if mask is None else outside & mask).any():
            raise IndexError(f"access outside every argument tensor: at {int(places.max())} of {self.tensor.numel()}")
        return places.long()


class _Descriptor:
    """A tensor that TMA copies blocks of."""

    def __init__(self, given: TensorDescriptor) -> None:
        self.tensor, self.layout, self.dtype = given.base, given.layout, given.base.dtype
        self.shape = given.block_shape
        self.block_type = SimpleNamespace(nbytes=torch.Size(given.block_shape).numel() * self.dtype.itemsize)

    def block(self, start: Sequence[Any]) -> Tensor:
        """Copy the block at a place, zeros outside the tensor."""
        block = torch.zeros(self.shape, dtype=self.dtype)
        given = self.tensor[tuple(slice(int(i), int(i) + n) for i, n in zip(start, self.shape, strict=True))]
        block[tuple(map(slice, given.shape))] = given
        return block


class _Slot:
    """A buffer in shared memory, with the moments at which it was last written and read since; or a barrier in it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.written: tuple[int, int] | None = None
        self.read_at: list[tuple[int, int]] = []
        self.barrier: Any = None

    def read(self, task: _Task) -> None:
        if self.written is None or not task.knows(self.written):
            raise Fault("a buffer is read that nobody wrote, or that is being overwritten")
        self.read_at.append(task.now)

    def write(self, task: _Task) -> None:
        if not all(map(task.knows, [*self.read_at, *([self.written] if self.written else [])])):
            raise Fault("a buffer is overwritten that others may still read or write")
        self.written, self.read_at = task.now, []


class _View:
    """Part of a buffer. slots: of each first index; None where `of` is one buffer."""

    def __init__(self, of: list[_Slot] | _Slot, part: Callable[[Tensor], Tensor] = lambda data: data) -> None:
        self.of, self.part = of, part

    @property
    def slot(self) -> _Slot:
        if isinstance(self.of, list):
            raise Fault("several buffers are taken for one: choose one by .index")
        return self.of

    def index(self, i: Any) -> _View:
        if not isinstance(self.of, list):
            return _View(self.of, lambda data: self.part(data)[int(i)])
        return _View(self.of[int(i)])

    def slice(self, start: int, length: int, axis: int = 0) -> _View:
        return _View(self.slot, lambda data: self.part(data).narrow(axis, start, length))

    def permute(self, axes: Sequence[int]) -> _View:
        return _View(self.slot, lambda data: self.part(data).permute(*axes))

    @property
    def barrier(self) -> _Barrier:
        if self.slot.barrier is None:
            raise Fault("a barrier is used before mbarrier.init")
        return self.slot.barrier

    @property
    def data(self) -> Tensor:
        return self.part(self.slot.data)


class _Barrier:
    """An mbarrier. missing: arrivals of this phase. unlanded: bytes that were expected and did not come."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.unlanded = self.phase = 0
        self.before: dict[int, int] = {}  # what came before the end of the last phase
        self.so_far = _Task({})

    def arrive(self, task: _Task, arrivals: int, size: int = 0) -> None:
        self.missing -= arrivals
        self.unlanded += size
        if self.missing < 0:
            raise Fault(f"{-self.missing} arrivals beyond the {self.arrivals} of a barrier")
        self.so_far.follow(task.clock)
        if isinstance(task, _Partition):
            task.clock[task.number] += 1  # what it does from now on is no part of it
        if not self.missing and not self.unlanded:
            self.phase += 1
            self.missing, self.before = self.arrivals, dict(self.so_far.clock)


class _Copy:
    """A TMA copy on its way."""

    def __init__(self, task: _Task, source: Tensor, target: _View, barrier: _Barrier) -> None:
        self.task, self.source, self.target, self.barrier = task, source, target, barrier
        target.slot.write(task)
        target.data.copy_(torch.tensor(torch.nan))

    def land(self) -> None:
        self.target.data.copy_(self.source)
        self.barrier.arrive(self.task, 0, -self.source.nbytes)


class _Product:
    """Result of `warpgroup_mma`, which no arithmetic takes before it was waited for."""

    def __init__(self, task: _Task, a: Any, b: _View, acc: Tensor | None) -> None:
        self.task, self.a, self.b, self.acc = task, a, b, acc
        self.result: Tensor | None = None
        for operand in (a, b):
            if isinstance(operand, _View):
                operand.slot.read(task)

    def finish(self) -> None:
        a, b = (x.data if isinstance(x, _View) else x for x in (self.a, self.b))
        sums = a.float() @ b.float()
        self.result = sums if self.acc is None else sums + self.acc

    @classmethod
    def __torch_function__(cls, *call: Any) -> Any:
        raise Fault("a product is used before warpgroup_mma_wait")

    def __getattr__(self, name: str) -> Any:
        raise Fault(f"{name} of a product is used before warpgroup_mma_wait")


# --- the language


def _language(program: _Program) -> Any:
    """Return the stand-in of `gl`, with what kernels import from other modules by their names there."""
    return SimpleNamespace(
        **{name: _layout for name in ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout")},
        float32=torch.float32,
        int64=torch.int64,
        float8e4nv=torch.float8_e4m3fn,
        static_range=range,
        program_id=lambda axis: torch.tensor(program.place[axis], dtype=torch.int32),
        arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        convert_layout=lambda x, layout: x.clone(),
        where=lambda mask, x, y: torch.where(torch.as_tensor(mask), x, y),
        maximum=torch.fmax,
        max=lambda x, axis: torch.where(x.isnan(), -torch.inf, x).amax(axis),  # as the maximum, it lets no NaN through
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        div_rn=torch.div,
        fma=lambda x, y, z: (x.double() * y.double() + z.double()).float(),
        load=lambda pointer: pointer.tensor[pointer.places()],
        store=_store,
        allocate_shared_memory=_allocate,
        warp_specialize=lambda parts, warps, registers: _specialize(program, parts),
        async_load=lambda *how: _copy(program, *how),
        async_copy_global_to_shared=lambda *how: _copy(program, *how),
        warpgroup_mma=lambda a, b, acc, **how: _multiply(program, a, b, acc, **how),
        warpgroup_mma_wait=lambda left, deps: _await(program, left, deps),
        mbarrier=SimpleNamespace(
            MBarrierLayout=_layout,
            init=_init,
            expect=lambda at, size: at.barrier.arrive(program.step(), 1, size),
            arrive=lambda at, count: at.barrier.arrive(program.step(), count),
            wait=lambda at, phase: _wait(program, at.barrier, phase),
        ),
    )


def _layout(*how: Any) -> None:
    """Stand for a layout, of which no value depends."""


def _store(pointer: _Pointer, values: Tensor, mask: Tensor) -> None:
    places = pointer.places(mask)
    mask = mask.expand(places.shape)
    pointer.tensor[places[mask]] = values[mask]


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> _View:
    """Allocate a matrix or a barrier, or with one more axis several of them."""
    data = torch.zeros(shape, dtype=dtype)
    axes = 2 if dtype == torch.int64 else 3
    return _View([_Slot(part) for part in data] if len(shape) == axes else _Slot(data))


def _init(at: _View, count: int) -> None:
    at.slot.barrier = _Barrier(count)


def _specialize(program: _Program, parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """Run the partitions; go on when all have ended. The first runs in the warps that are there."""
    here = program.step()
    begun = [program.start(partial(f, *arguments), here.fork().clock) for f, arguments in parts]
    program.step(lambda: all(partition.is_done for partition in begun), "the other partitions")
    for partition in begun:
        here.follow(partition.clock)
    if late := [task for task in program.begun if not here.knows(task.now)]:
        raise Fault(f"nobody waits for {len(late)} of {len(program.begun)} copies, which may outlive the program")


def _copy(program: _Program, source: _Descriptor, start: Sequence[Any], barrier: _View, target: _View) -> None:
    task = program.step().fork()
    program.begun.append(task)
    program.copies.append(_Copy(task, source.block(start), target, barrier.barrier))


def _wait(program: _Program, barrier: _Barrier, phase: Any) -> None:
    """Wait until the barrier's phase of this parity has ended."""
    phase = int(phase)
    partition = program.step(lambda: barrier.phase % 2 != phase, f"phase {phase} of a barrier in phase {barrier.phase}")
    partition.follow(barrier.before)


def _multiply(program: _Program, a: Any, b: _View, acc: Tensor, *, use_acc: bool, is_async: bool) -> Any:
    here = program.step()
    here.products.append(_Product(here.fork(), a, b, acc if use_acc else None))
    return here.products[-1] if is_async else _await(program, 0, here.products[-1:])


def _await(program: _Program, left: int, deps: Sequence[Any]) -> Any:
    """Wait until no more than `left` products run; return the results of deps, a product for one that runs."""
    here = program.step()
    for done in here.products[: len(here.products) - left]:
        done.finish()
        here.follow(done.task.clock)
    here.products = here.products[len(here.products) - left :]
    results = [dep if dep.result is None else dep.result for dep in deps]
    return results[0] if len(results) == 1 else tuple(results)
