"""Launch plans: what a first call of an op did is done again by later ones, without its checks and choices.

A first call with operands of some kind (shapes, strides, dtypes, devices, alignment) is watched: which torch ops it
called and kernels it launched, and on what. Nothing in kernels/ reads values, so with operands of the same kind it
would do the same again: a plan does, with other operands. A tensor that nothing reads is not made again, and each is
let go behind the step that reads it last.

launch.py plans single ops; runtime/block_plans.py a whole block, in whose watch an op's own steps are noted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


class _Place(NamedTuple):
    """A tensor of a plan, by its number: the operands come first, then what the steps make."""

    number: int


class _Descriptor(NamedTuple):
    """A TensorDescriptor on a tensor of a plan."""

    base: _Place
    rest: tuple[Any, ...]


class _Sequence(NamedTuple):
    """A list or tuple with tensors of a plan: what makes it of its values, those, and the places among them."""

    make: Callable[[Iterable[Any]], Any]
    values: list[Any]
    places: list[tuple[int, Any]]


class Step(NamedTuple):
    """A call: function, its arguments with places for tensors, and where those stand.

    tensors: (index of an argument, number of the tensor that it is).
    nested, named_tensors: (index or name, value) of arguments that hold tensors otherwise.
    makes: number of the tensor that it makes, or None; of a call with several results one for each.
    ends: numbers of tensors that no later step reads.
    """

    function: Callable[..., Any]
    arguments: list[Any]
    tensors: list[tuple[int, int]]
    nested: list[tuple[int, Any]]
    options: dict[str, Any]
    named_tensors: list[tuple[str, Any]]
    makes: int | tuple[int | None, ...] | None
    ends: tuple[int, ...] = ()

    @property
    def reads(self) -> set[int]:
        """Numbers of the tensors among the arguments."""
        nested = {number for _, value in (*self.nested, *self.named_tensors) for number in _numbers(value)}
        return nested | {number for _, number in self.tensors}

    @property
    def made(self) -> tuple[int | None, ...]:
        """Numbers of the tensors among the results."""
        return self.makes if isinstance(self.makes, tuple) else (self.makes,)


class Plan(NamedTuple):
    """Steps of a call, its result (a place, or a tuple of them), and how many tensors it makes."""

    steps: list[Step]
    result: Any
    made: int

    def __call__(self, operands: Iterable[Tensor]) -> Any:
        """Do the steps with operands of the same kind."""
        tensors: list[Any] = [*operands, *(None,) * self.made]
        for function, arguments, places, nested, options, names, makes, ends in self.steps:
            arguments = arguments.copy()
            for index, number in places:
                arguments[index] = tensors[number]
            for index, value in nested:
                arguments[index] = _at(value, tensors)
            if names:
                options = options | {name: _at(value, tensors) for name, value in names}
            result = function(*arguments, **options)
            if isinstance(makes, int):
                tensors[makes] = result
            elif makes is not None:
                for number, each in zip(makes, result, strict=True):
                    if number is not None:
                        tensors[number] = each
            for number in ends:
                tensors[number] = None
        return _at(self.result, tensors)


def watched(call: Callable[[], Any], operands: Sequence[Tensor]) -> tuple[Any, Plan | None]:
    """Call; return the result and a plan of how it came about, None where a plan could not do it again."""
    watch, before = _Watch(operands), watching()
    with _ONE_AT_A_TIME, watch, mock.patch.object(JITFunction, "run", watch.launch_by(JITFunction.run)):
        _HERE.watch = watch
        try:
            result = call()
        finally:
            _HERE.watch = before
    made = watch.taken(result)
    return result, _plan(watch.steps, made, len(operands), watch.made) if watch.repeatable else None


def watching() -> _Watch | None:
    """Return the watch of which the present call is part, in this thread."""
    return getattr(_HERE, "watch", None)


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide the block from a watch, which would not see all that it launches: a call of which it is part has no plan."""
    with _disable_current_modes():
        yield


def _plan(steps: Sequence[Step], result: Any, operands: int, made: int) -> Plan:
    """Leave out what makes tensors that nothing reads, and say where each tensor is read last."""
    needed = {*_numbers(result)}
    kept: list[Step] = []
    for step in reversed(steps):
        if step.makes is None or not needed.isdisjoint(step.made):
            ends = tuple(number for number in step.reads - needed if number >= operands)
            kept.insert(0, step._replace(ends=ends))
            needed |= step.reads
    return Plan(kept, result, made)


class _Watch(TorchDispatchMode):
    """Notes the steps of a call.

    repeatable: whether all of it was seen. made: how many tensors it made. seen_within: how many ops were noted by what
    they do themselves.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.device = operands[0].device
        self.operands = len(operands)
        self.places = {id(tensor): _Place(number) for number, tensor in enumerate(operands)}
        self.alive: list[weakref.ref[Tensor]] = []
        self.steps: list[Step] = []
        self.made = self.seen_within = 0
        self.repeatable = len(self.places) == self.operands

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is CHOOSING:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        seen = self.seen_within
        result = func(*args, **(kwargs or {}))
        if self.seen_within != seen:  # an op's launches, one by one
            return result
        kind = func._schema.name.removeprefix("aten::")
        if isinstance(result, (list, tuple)) and _may_be_repeated(func):
            makes = tuple(map(self.numbered, result))
            self.note(QUICK[kind] if kind in QUICK else func, args, kwargs or {}, makes)
            self.put_all(result, makes)
            return result
        if not isinstance(result, Tensor) or result.device != self.device or not _may_be_repeated(func, len(args)):
            self.repeatable = False
            return result
        if id(result) in self.places:
            if func._schema.is_mutable:  # it was changed in place
                self.note(func, args, kwargs or {}, None)
            return result
        if kind == "detach" and id(args[0]) in self.places:  # of the same memory
            self.put(result, self.places[id(args[0])])
            return result
        number = self.numbered(result)
        if kind in ("empty", "new_empty") and result.is_contiguous():
            self.note(torch.empty, (result.shape,), {"dtype": result.dtype, "device": result.device}, number)
        else:
            self.note(QUICK[kind] if kind in QUICK else func, args, kwargs or {}, number)
        self.put_all([result], [number])
        return result

    def numbered(self, result: Any) -> int | None:
        """Return the number of a new tensor; None for what a plan does not know, like a state of random numbers."""
        if not isinstance(result, Tensor) or result.device != self.device:
            return None
        if id(result) in self.places:
            self.repeatable = False
        self.made += 1
        return self.operands + self.made - 1

    @contextmanager
    def within(self) -> Iterator[None]:
        """See what an op does itself, of which this watch otherwise sees the call alone."""
        self.seen_within += 1
        with nullcontext() if self in _get_current_dispatch_mode_stack() else self:
            yield

    def put_all(self, tensors: Sequence[Any], numbers: Sequence[int | None]) -> None:
        for tensor, number in zip(tensors, numbers, strict=True):
            if number is not None:
                self.put(tensor, _Place(number))

    def put(self, tensor: Tensor, place: _Place) -> None:
        """Know a tensor by its identity as long as it lives, and no longer: another may get the same one."""
        key = id(tensor)
        self.places[key] = place
        self.alive.append(weakref.ref(tensor, lambda _: self.places.pop(key, None)))

    def launch_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method in place of JITFunction.run, which notes launches."""

        thread = threading.get_ident()

        def launch(kernel: Any, *args: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return run(kernel, *args, **options)
            self.note(partial(_launch, kernel), args, options, None)
            with _disable_current_modes():  # what a launcher does is its own
                return run(kernel, *args, **options)

        launch.__module__ = run.__module__  # by which an interpreter is known
        return launch

    def note(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        options: dict[str, Any],
        makes: int | tuple[int | None, ...] | None,
    ) -> None:
        if not self.repeatable:
            return
        taken = [self.taken(value) for value in args]
        named = {name: self.taken(value) for name, value in options.items()}
        places = [(index, value.number) for index, value in enumerate(taken) if type(value) is _Place]
        nested = [
            (index, value) for index, value in enumerate(taken) if type(value) is not _Place and _holds_tensor(value)
        ]
        names = [(name, value) for name, value in named.items() if _holds_tensor(value)]
        self.steps.append(Step(function, taken, places, nested, named, names, makes))

    def taken(self, value: Any) -> Any:
        """Return an argument with places for its tensors."""
        if isinstance(value, Tensor):
            if id(value) not in self.places:
                self.repeatable = False  # neither an operand nor made of them
                return None
            return self.places[id(value)]
        if isinstance(value, TensorDescriptor):
            return _Descriptor(self.taken(value.base), (value.shape, value.strides, value.block_shape, value.padding))
        if type(value) is list or (isinstance(value, tuple) and type(value) is not torch.Size):
            values = [self.taken(each) for each in value]
            places = [(index, each) for index, each in enumerate(values) if _holds_tensor(each)]
            return _Sequence(getattr(value, "_make", type(value)), values, places) if places else value
        if isinstance(value, (list, dict)):
            self.repeatable = False  # with tensors inside, perhaps
        return value


def _launch(kernel: Any, *arguments: Any, **options: Any) -> None:
    kernel.run(*arguments, **options)  # looked up now: an interpreter puts its own there


def _may_be_repeated(func: Any, arguments: int = 0) -> bool:
    """Tell whether an op does the same with every tensor of a kind; a number of the memory's start is an address."""
    name = func._schema.name
    if func.namespace not in ("aten", "fluxq") or (name == "aten::as_strided" and arguments > 3):
        return False
    return "scaled_dot_product" in name or READS_OR_DRAWS.isdisjoint(func.tags)


def _holds_tensor(value: Any) -> bool:
    return type(value) in (_Place, _Descriptor, _Sequence)


def _at(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) is _Place:
        return tensors[value.number]
    if type(value) is _Descriptor:
        return TensorDescriptor(tensors[value.base.number], *value.rest)
    if type(value) is _Sequence:
        values = value.values.copy()
        for index, place in value.places:
            values[index] = _at(place, tensors)
        return value.make(values)
    return value


def _numbers(value: Any) -> Iterator[int]:
    """Yield the numbers of the tensors in an argument."""
    if type(value) is _Place:
        yield value.number
    elif type(value) is _Descriptor:
        yield value.base.number
    elif type(value) is _Sequence:
        for _, place in value.places:
            yield from _numbers(place)


_ONE_AT_A_TIME = threading.RLock()  # a watch puts its own launcher in the place of Triton's
_HERE = threading.local()  # watch: of the present call
CHOOSING = torch.ops.aten.scaled_dot_product_attention.default  # by settings of a context that plans do not enter
READS_OR_DRAWS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
QUICK: dict[str, Callable[..., Any]] = {  # quicker than the ops behind them, and of the same arguments
    **{
        name: getattr(Tensor, name)
        for name in (
            *("view", "reshape", "unsqueeze", "squeeze", "t", "transpose", "permute", "select", "split_with_sizes"),
            *("as_strided", "mm", "addmm"),
        )
    },
    "cat": torch.cat,
    "_scaled_mm": torch._scaled_mm,
    "_int_mm": torch._int_mm,
}
