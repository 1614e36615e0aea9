"""Launch plans: what a first call of an op did is done again by later ones, without its checks and choices.

A first call with operands of some kind (shapes, strides, dtypes, devices, alignment) is watched: which torch ops it
called and kernels it launched, and on what. Nothing in kernels/ reads values, so with operands of the same kind it
would do the same again: a plan does, with other operands. A tensor that nothing reads is not made again, and each is
let go behind the step that reads it last.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
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

    makes: number of the tensor that it makes, or None.
    ends: numbers of tensors that no later step reads.
    """

    function: Callable[..., Any]
    arguments: list[Any]
    tensors: list[tuple[int, Any]]
    options: dict[str, Any]
    named_tensors: list[tuple[str, Any]]
    makes: int | None
    ends: tuple[int, ...] = ()

    @property
    def reads(self) -> set[int]:
        """Numbers of the tensors among the arguments."""
        return {number for _, value in (*self.tensors, *self.named_tensors) for number in _numbers(value)}


class Plan(NamedTuple):
    """Steps of a call, its result (a place, or a tuple of them), and how many tensors it makes."""

    steps: list[Step]
    result: Any
    made: int

    def __call__(self, operands: Iterable[Tensor]) -> Any:
        """Do the steps with operands of the same kind."""
        tensors: list[Any] = [*operands, *(None,) * self.made]
        for function, arguments, places, options, names, makes, ends in self.steps:
            arguments, options = arguments.copy(), options.copy()
            for index, place in places:
                arguments[index] = _at(place, tensors)
            for name, place in names:
                options[name] = _at(place, tensors)
            if makes is None:
                function(*arguments, **options)
            else:
                tensors[makes] = function(*arguments, **options)
            for number in ends:
                tensors[number] = None
        return _at(self.result, tensors)


def watched(call: Callable[[], Any], operands: Sequence[Tensor]) -> tuple[Any, Plan | None]:
    """Call; return the result and a plan of how it came about, None where a plan could not do it again."""
    watch = _Watch(operands)
    with _ONE_AT_A_TIME, watch, mock.patch.object(JITFunction, "run", watch.launch_by(JITFunction.run)):
        result = call()
    made = watch.taken(result)
    return result, _plan(watch.steps, made, len(operands), watch.made) if watch.repeatable else None


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
        if step.makes is None or step.makes in needed:
            ends = tuple(number for number in step.reads - needed if number >= operands)
            kept.insert(0, step._replace(ends=ends))
            needed |= step.reads
    return Plan(kept, result, made)


def kind_of(arguments: Sequence[Any], operands: list[Tensor]) -> tuple[Any, ...]:
    """Return what a plan depends on of arguments, tensors also in lists, hashable; add the tensors to `operands`."""
    kinds: list[Any] = []
    for value in arguments:
        if isinstance(value, Tensor):
            kinds += value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() % 16
            operands.append(value)
        elif type(value) is list:
            kinds.append(kind_of(value, operands))
        else:
            kinds.append(value)
    return tuple(kinds)


class _Watch(TorchDispatchMode):
    """Notes the steps of a call. repeatable: whether all of it was seen; made: how many tensors it made."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.device = operands[0].device
        self.operands = len(operands)
        self.places = {id(tensor): _Place(number) for number, tensor in enumerate(operands)}
        self.alive: list[weakref.ref[Tensor]] = []
        self.steps: list[Step] = []
        self.made = 0
        self.repeatable = len(self.places) == self.operands

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = func._schema.name.removeprefix("aten::")
        if not isinstance(result, Tensor) or result.device != self.device or kind == "as_strided":
            self.repeatable = False  # several results, a value, or an address
            return result
        if id(result) in self.places:  # it was changed in place
            self.note(func, args, kwargs or {}, None)
            return result
        if kind == "detach" and id(args[0]) in self.places:  # of the same memory
            self.put(result, self.places[id(args[0])])
            return result
        number = self.operands + self.made
        if kind in ("empty", "new_empty") and result.is_contiguous():
            self.note(torch.empty, (result.shape,), {"dtype": result.dtype, "device": result.device}, number)
        else:
            self.note(QUICK.get(kind, func), args, kwargs or {}, number)
        self.put(result, _Place(number))
        self.made += 1
        return result

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
        self, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any], makes: int | None
    ) -> None:
        if not self.repeatable:
            return
        taken = [self.taken(value) for value in args]
        named = {name: self.taken(value) for name, value in options.items()}
        places = _places(taken)
        names = [(name, value) for name, value in named.items() if _holds_tensor(value)]
        self.steps.append(Step(function, taken, places, named, names, makes))

    def taken(self, value: Any) -> Any:
        """Return an argument with places for its tensors."""
        if isinstance(value, Tensor):
            if id(value) not in self.places:
                self.repeatable = False  # neither an operand nor made of them
                return None
            return self.places[id(value)]
        if isinstance(value, TensorDescriptor):
            return _Descriptor(self.taken(value.base), (value.shape, value.strides, value.block_shape, value.padding))
        if type(value) in (list, tuple) or hasattr(value, "_fields"):
            values = [self.taken(each) for each in value]
            places = _places(values)
            return _Sequence(getattr(value, "_make", type(value)), values, places) if places else value
        if type(value) is not torch.Size and isinstance(value, (tuple, list, dict)):
            self.repeatable = False  # with tensors inside, perhaps
        return value


def _launch(kernel: Any, *arguments: Any, **options: Any) -> None:
    kernel.run(*arguments, **options)  # looked up now: an interpreter puts its own there


def _holds_tensor(value: Any) -> bool:
    return type(value) in (_Place, _Descriptor, _Sequence)


def _places(values: Sequence[Any]) -> list[tuple[int, Any]]:
    return [(index, value) for index, value in enumerate(values) if _holds_tensor(value)]


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
QUICK = {"view": Tensor.view, "unsqueeze": Tensor.unsqueeze, "t": Tensor.t}  # quicker than the ops behind them
