"""Op: a torch.library op with a Triton kernel, and the way from one to the other.

An op's folder holds op.py, with its `OP`, its torch reference and its fake, and kernel.py, with the kernel and
`launch`, which takes the arguments of the op and the chip. all_ops.py is the table of all of them.

Nothing of Triton is imported before the first call with tensors on a GPU. Without a Triton the torch references stay:
exact, but slow.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Op:
    """A torch.library op with a kernel.

    formats: names of its tuned tiles.
    how: "native" multiplies codes on matrix units of their own kind, "decode" turns them into another type first,
        "memory" moves data and multiplies little.
    elsewhere: reason why some chips have no tiles.
    folder: its name unless given.
    or_reference: whether its torch reference takes the place of a kernel that a chip lacks; others raise ValueError.
    """

    name: str
    formats: tuple[str, ...]
    how: str
    elsewhere: str = ""
    folder: str = ""
    or_reference: bool = False

    @property
    def file(self) -> str:
        """The folder, and the name of its files in kernels/tuned and kernels/compiled."""
        return self.folder or self.name

    @property
    def kernel(self) -> Any:
        """The module kernels/<folder>/kernel.py; it needs Triton."""
        return importlib.import_module(f"fluxq.kernels.{self.file}.kernel")


def launches_on_gpu(name: str, op: Any) -> None:
    """Let a `torch.library.custom_op` of that name run its kernel for tensors on a GPU.

    By its name in the dispatcher: `op.register_kernel` would put another Python function into each call, and a check
    that results do not alias arguments. Dynamo is not to trace it, where a frame that it gave up on calls the op.
    """
    REFERENCES[name] = op._init_fn
    if find_spec("triton") is not None:
        _LIBRARY.impl(name, untraced(functools.partial(_launch, name)), "CUDA")


def kind_of(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return what a plan depends on of arguments, tensors also in lists, hashable; add the tensors to `tensors`.

    Raises TypeError for an argument that cannot be compared.
    """
    kinds: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            kinds += value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() % 16
            tensors.append(value)
        elif type(value) in (list, tuple):
            kinds.append((type(value), kind_of(value, tensors)))
        elif type(value) in VALUES:
            kinds.append((type(value), value))
        elif type(value) is dict and not value:
            kinds.append(dict)
        else:
            raise TypeError(f"an argument is a {type(value).__name__}")
    return tuple(kinds)


def untraced(function: Any) -> Any:
    """Return the function, hidden from Dynamo, which is not imported before the first call."""
    return torch._disable_dynamo(function)


def _launch(name: str, *arguments: Any) -> Any:
    return importlib.import_module("fluxq.kernels.launch").run(name, *arguments)


VALUES = (type(None), bool, int, float, str, torch.dtype)  # that arguments are compared by
REFERENCES: dict[str, Callable[..., Any]] = {}  # name of an op -> its torch reference, for tensors on every device
_LIBRARY = torch.library.Library("fluxq", "IMPL")  # what it registers lasts as long as it does
