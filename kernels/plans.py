"""Launch plans: what a first call of an op did is done again by later ones, without its checks and choices.

A first call with operands of some kind (shapes, strides, dtypes, alignment) is watched: which torch ops it called and
kernels it launched, and on what. Nothing in kernels/ reads values, so with operands of the same kind it would do the
same again: a plan does, with other operands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
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


class Step(NamedTuple):
    """A call: function, its arguments with None for tensors, where those belong, and whether it makes a tensor."""

    function: Callable[..., Any]
    arguments: list[Any]
    tensors: list[tuple[int, Any]]
    options: dict[str, Any]
    named_tensors: list[tuple[str, Any]]
    makes: bool


class Plan(NamedTuple):
    """Steps of a call, and its result: a place, or a tuple of them."""

    steps: list[Step]
    result: Any

    def __call__(self, operands: Iterable[Tensor]) -> Any:
        """Do the steps with operands of the same kind."""
        tensors = [*operands]
        for function, arguments, places, options, names, makes in self.steps:
            arguments, options = arguments.copy(), options.copy()
            for index, place in places:
                arguments[index] = _at(place, tensors)
            for name, place in names:
                options[name] = _at(place, tensors)
            made = function(*arguments, **options)
            if makes:
                tensors.append(made)
        return _at(self.result, tensors)


def watched(call: Callable[[], Any], operands: Sequence[Tensor]) -> tuple[Any, Plan | None]:
    """Call; return the result and a plan of how it came about, None where a plan could not do it again."""
    watch = _Watch(operands)
    with _ONE_AT_A_TIME, watch, mock.patch.object(JITFunction, "run", watch.launch_by(JITFunction.run)):
        result = call()
    made = watch.taken(result)
    return result, Plan(watch.steps, made) if watch.repeatable else None


def kind_of(arguments: Sequence[Any], operands: list[Tensor]) -> tuple[Any, ...]:
    """Return what a plan depends on of arguments, tensors also in lists, hashable; add the tensors to `operands`."""
    kinds: list[Any] = []
    for value in arguments:
        if isinstance(value, Tensor):
            kinds += value.shape, value.stride(), value.dtype, value.data_ptr() % 16
            operands.append(value)
        elif type(value) is list:
            kinds.append(kind_of(value, operands))
        else:
            kinds.append(value)
    return tuple(kinds)


class _Watch(TorchDispatchMode):
    """Notes the steps of a call. repeatable: whether all of it was seen, and no value read."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = list(operands)  # kept alive, so that no other has the identity of one
        self.places = {id(tensor): _Place(number) for number, tensor in enumerate(self.tensors)}
        self.kept: list[Tensor] = []
        self.steps: list[Step] = []
        self.repeatable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            self.repeatable = False
            return result
        kind = func._schema.name.removeprefix("aten::")
        if id(result) in self.places:  # it was changed in place
            self.note(func, args, kwargs or {}, makes=False)
            return result
        if kind == "detach" and id(args[0]) in self.places:  # of the same memory
            self.places[id(result)] = self.places[id(args[0])]
            self.kept.append(result)
            return result
        if kind in ("empty", "new_empty") and result.is_contiguous():
            self.note(torch.empty, (result.shape,), {"dtype": result.dtype, "device": result.device}, makes=True)
        else:
            self.note(QUICK.get(kind, func), args, kwargs or {}, makes=True)
        self.places[id(result)] = _Place(len(self.tensors))
        self.tensors.append(result)
        return result

    def launch_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method in place of JITFunction.run, which notes launches."""

        thread = threading.get_ident()

        def launch(kernel: Any, *args: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return run(kernel, *args, **options)
            self.note(partial(_launch, kernel), args, options, makes=False)
            with _disable_current_modes():  # what a launcher does is its own
                return run(kernel, *args, **options)

        launch.__module__ = run.__module__  # by which an interpreter is known
        return launch

    def note(self, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any], makes: bool) -> None:
        taken = [self.taken(value) for value in args]
        named = {name: self.taken(value) for name, value in options.items()}
        places = [(index, value) for index, value in enumerate(taken) if _holds_tensor(value)]
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
        return type(value)(map(self.taken, value)) if type(value) in (list, tuple) else value


def _launch(kernel: Any, *arguments: Any, **options: Any) -> None:
    kernel.run(*arguments, **options)  # looked up now: an interpreter puts its own there


def _holds_tensor(value: Any) -> bool:
    return type(value) in (_Place, _Descriptor) or (type(value) in (list, tuple) and any(map(_holds_tensor, value)))


def _at(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) is _Place:
        return tensors[value.number]
    if type(value) is _Descriptor:
        return TensorDescriptor(tensors[value.base.number], *value.rest)
    return type(value)(_at(each, tensors) for each in value) if type(value) in (list, tuple) else value


_ONE_AT_A_TIME = threading.RLock()  # a watch puts its own launcher in the place of Triton's
QUICK = {"view": Tensor.view, "unsqueeze": Tensor.unsqueeze, "t": Tensor.t}  # quicker than the ops behind them
