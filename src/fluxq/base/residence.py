"""Models that run in less memory than they take: a module's weights come when it runs, and go afterwards.

    enter   before a module runs, its own weights are read from their source and put in; then the next ones are read
    leave   after it, they stay if there is room:  resident weights <= limit - working - the coming module's

The first weights to come stay, because every pass runs the modules in the same order: the last ones would never be
there in their turn. Models have ranks, and those that run at every step push out those that run once per image.
`working` is the memory that a model needs beside its weights; it is set aside while that model runs.

accelerate and diffusers have offloading of their own, which keeps to no bound: diffusers writes a copy of offloaded
weights to disk; accelerate maps the source's files into memory, where pages count for as long as a tensor is used,
reads them unchecked and with nothing read ahead, empties the device's cache for every tensor, and decides once for all
models which weights stay. Of accelerate this takes the attribute by which pipelines of diffusers find out where an
offloaded model runs.

Weights that wait are nowhere but in their files. Where there is room, the system keeps files in memory, and gives that
memory back when it is wanted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from accelerate.hooks import ModelHook
from torch import Tensor, nn

from fluxq.base.modules import put_tensor

Read = Callable[[str], Tensor]  # name of a parameter or buffer in its model -> the tensor, on the CPU

_WHOLE = (nn.MultiheadAttention,)  # modules that use weights of the modules in them without running these
_FAVOURED = 1 << 10  # the rank of weights that `focus` names
_LOOKED_AT = 8  # modules behind the running one that are read ahead if they are missing


class Residence:
    """Weights of several models on one device. Not for several threads.

    limit: bytes for weights and the tensors that are computed with them.
    resident_bytes: bytes of weights that are on the device now.
    most_resident_bytes: the most of them at once so far.
    """

    def __init__(self, device: torch.device | str, limit: int) -> None:
        self.device, self.limit = torch.device(device), limit
        self.resident_bytes = self.most_resident_bytes = 0
        self._models: list[_Model] = []
        self._running: _Model | None = None
        self._last: _Unit | None = None
        self._idle: dict[int, dict[_Unit, None]] = {}  # rank -> units that are there and do not run
        self._ahead: dict[_Unit, Future[list[Tensor]]] = {}
        self._missed = 0  # modules in a row that were not read ahead
        self._reader = ThreadPoolExecutor(1, "fluxq-weights")
        self._favoured: list[_Unit] = []

    def add(self, model: nn.Module, read: Read, *, rank: int = 0, working: int = 0) -> None:
        """Look after a model: its tensors on the meta device come from `read`, cast to the dtype of their placeholders.

        Buffers, which are small, come at once and stay: pipelines read some, as those of FLUX.2's VAE. So do tensors
        that are there, moved to the device.

        rank: models of a higher one push out those of lower ones.
        working: bytes that the model needs beside its weights.
        """
        looked_after = _Model(read, rank, working)
        self._models.append(looked_after)
        inside: set[nn.Module] = set()
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    slot = _Slot(weakref.ref(module), name, f"{path}.{name}".strip("."))
                    slot.fill(read(slot.path).to(self.device))
                else:
                    module._buffers[name] = buffer.to(self.device)
            if module in inside:
                continue
            slots = list(_slots(path, module))
            if isinstance(module, _WHOLE):
                inside.update(module.modules())
                for below, part in module.named_modules(prefix=path):
                    slots += _slots(below, part) if part is not module else ()
            if slots:
                nbytes = sum(slot.tensor.nbytes for slot in slots)
                self._watch(module, _Unit(looked_after, slots, rank, nbytes))
        model._hf_hook = _RunsThere(self, looked_after)  # pyright: ignore[reportArgumentType]  it is no tensor

    def set_working(self, model: nn.Module, working: int) -> None:
        """Set the bytes that `model` needs beside its weights from now on."""
        hook = getattr(model, "_hf_hook", None)
        if not isinstance(hook, _RunsThere):
            raise ValueError(f"this {type(model).__name__} is not looked after; add it first")
        hook.model.working = working
        self._running = None  # so that room is made anew

    def focus(self, module: nn.Module) -> None:
        """Put the weights in `module` before all others from now on; those that are there go."""
        self.rest()
        for unit in self._favoured:
            unit.rank = unit.model.rank
        modules = set(module.modules())
        self._favoured = [unit for model in self._models for unit in model.units if unit.module() in modules]
        for unit in self._favoured:
            unit.rank = _FAVOURED

    def rest(self) -> None:
        """Let go of all weights that nothing runs with."""
        self._forget_ahead()
        while self._idle:
            self._evict(max(self._idle))

    def drop(self, module: nn.Module) -> None:
        """Let go of all tensors in `module` for good, later additions included; it cannot run again."""
        self._forget_ahead()
        gone = set(module.modules())
        for part in gone:
            for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
                if tensor is not None and not tensor.is_meta:
                    put_tensor(part, name, torch.empty_like(tensor, device="meta"))
        for model in self._models:
            for unit in model.units:
                if unit.is_loaded and unit.module() in gone:
                    self._count_out(unit)

    # --- one module at a time

    def _watch(self, module: nn.Module, unit: _Unit) -> None:
        unit.model.units.append(unit)
        unit.model.largest = max(unit.model.largest, unit.nbytes)
        unit.module = weakref.ref(module, lambda _: self._count_out(unit))  # replaced by a quantized one, for instance
        module.register_forward_pre_hook(lambda *_: self._enter(unit))
        module.register_forward_hook(lambda *_: self._leave(unit), always_call=True)

    def _enter(self, unit: _Unit) -> None:
        unit.running += 1
        if self._running is not unit.model:
            self._running = unit.model
            self._forget_ahead()
            while self._idle and self.resident_bytes > self._room():
                self._evict(min(self._idle))
        self._idle.get(unit.rank, {}).pop(unit, None)
        if not unit.is_loaded:
            self._bring(unit)
        if unit.running == 1:
            if self._last is not None:
                self._last.then = unit
            self._last = unit
            self._read_ahead(unit)

    def _leave(self, unit: _Unit) -> None:
        unit.running -= 1
        if unit.running or not unit.is_loaded:
            return
        ahead = sum(other.nbytes for other in self._ahead)  # these have room beside the weights that stay
        while self.resident_bytes - ahead > self._room():
            lowest = min((rank for rank, units in self._idle.items() if units), default=unit.rank)
            if lowest >= unit.rank:
                self._send_away(unit)
                return
            self._evict(lowest)
        self._idle.setdefault(unit.rank, {})[unit] = None

    def _room(self) -> int:
        """Return the bytes for weights that stay while a model runs: one of its modules comes, and others are read."""
        running = self._running
        return self.limit if running is None else self.limit - running.working - 2 * running.largest

    def _bring(self, unit: _Unit) -> None:
        ahead = self._ahead.pop(unit, None)
        self._missed = 0 if ahead else self._missed + 1
        if ahead is None:
            if self._missed > 1:
                self._forget_ahead()  # the order is another one
            self._count_in(unit)
        try:
            tensors = ahead.result() if ahead else unit.read()
        except BaseException:
            self.resident_bytes -= unit.nbytes
            raise
        for slot, tensor in zip(unit.slots, tensors, strict=True):
            slot.fill(tensor.to(self.device))
        unit.is_loaded = True

    def _read_ahead(self, unit: _Unit) -> None:
        """Have the modules read that ran after this one the last time, as far as there is room for them."""
        nbytes, after = sum(other.nbytes for other in self._ahead), unit.then
        for _ in range(_LOOKED_AT):
            if after is None or after.model is not unit.model:
                return
            if not after.is_loaded and after not in self._ahead and after.module() is not None:
                nbytes += after.nbytes
                if nbytes > unit.model.largest:
                    return
                self._count_in(after)
                self._ahead[after] = self._reader.submit(after.read)
            after = after.then

    def _forget_ahead(self) -> None:
        for unit, future in self._ahead.items():
            future.cancel()
            self.resident_bytes -= unit.nbytes
        if self._ahead:
            self._ahead.clear()
            self._reader.submit(int).result()  # wait until the read under way is over, too

    def _evict(self, rank: int) -> None:
        """Send away the last weights to come, of those of a rank that do not run."""
        units = self._idle[rank]
        if units:
            self._send_away(units.popitem()[0])
        if not units:
            del self._idle[rank]

    def _send_away(self, unit: _Unit) -> None:
        for slot in unit.slots:
            slot.empty()
        self._count_out(unit)

    def _count_in(self, unit: _Unit) -> None:
        self.resident_bytes += unit.nbytes
        self.most_resident_bytes = max(self.most_resident_bytes, self.resident_bytes)

    def _count_out(self, unit: _Unit) -> None:
        self._idle.get(unit.rank, {}).pop(unit, None)
        if unit.is_loaded:
            unit.is_loaded = False
            self.resident_bytes -= unit.nbytes


def residence_of(model: nn.Module) -> Residence | None:
    """Return the Residence that looks after a model's weights; None for weights that are simply in memory."""
    hook = getattr(model, "_hf_hook", None)
    return hook.residence if isinstance(hook, _RunsThere) else None


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model runs on."""
    residence = residence_of(model)
    return next(model.parameters()).device if residence is None else residence.device


class _RunsThere(ModelHook):
    """A hook with the device on which a model runs whose weights may be nowhere; diffusers makes its inputs there."""

    def __init__(self, residence: Residence, model: _Model) -> None:
        self.residence, self.model, self.execution_device = residence, model, residence.device


@dataclass(eq=False)
class _Model:
    """A model that is looked after. largest: bytes of its largest unit."""

    read: Read
    rank: int
    working: int
    units: list[_Unit] = field(default_factory=list)
    largest: int = 0


@dataclass(eq=False)
class _Unit:
    """Weights of a module, which come and go together.

    running: calls of the module under way.
    then: the unit that ran next the last time.
    """

    model: _Model
    slots: list[_Slot]
    rank: int
    nbytes: int
    is_loaded: bool = False
    running: int = 0
    then: _Unit | None = None
    module: Callable[[], nn.Module | None] = lambda: None

    def read(self) -> list[Tensor]:
        """Read the weights from their source, on the CPU, in the dtypes of their placeholders."""
        return [self.model.read(slot.path).to(slot.tensor.dtype) for slot in self.slots]


@dataclass(frozen=True)
class _Slot:
    """Place of a tensor.

    owner: the module that has it, which this does not keep alive.
    path: its name from the root of the model.
    """

    owner: Callable[[], nn.Module | None]
    name: str
    path: str

    @property
    def tensor(self) -> Tensor:
        """Tensor in that place; its placeholder while it is on the meta device."""
        owner = self.owner()
        if owner is None:
            raise RuntimeError(f"{self.path}: its module is gone")
        return getattr(owner, self.name)

    def fill(self, tensor: Tensor) -> None:
        wanted = self.tensor
        if tensor.shape != wanted.shape:
            shapes = f"shape {tuple(tensor.shape)} in the file, {tuple(wanted.shape)} by config.json"
            raise ValueError(f"{self.path}: {shapes}; copy the folder again")
        self._put(tensor.to(wanted.dtype))

    def empty(self) -> None:
        self._put(torch.empty_like(self.tensor, device="meta"))

    def _put(self, tensor: Tensor) -> None:
        owner = self.owner()
        if owner is not None:
            put_tensor(owner, self.name, tensor)


def _slots(path: str, module: nn.Module) -> Iterator[_Slot]:
    """Yield the places of a module's own parameters that are on the meta device."""
    for name, tensor in module.named_parameters(recurse=False):
        if tensor.is_meta:
            yield _Slot(weakref.ref(module), name, f"{path}.{name}".strip("."))
