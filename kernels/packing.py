"""Named tensors as one list, for ops that take a few of many: those that are there, and a text that names them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

Named = TypeVar("Named", bound=tuple)  # a NamedTuple of tensors, None for those that are not there


def pack(named: Any, text: object) -> tuple[list[Tensor], str]:
    """Return the tensors of a NamedTuple that are there, and the text with their names behind it."""
    names = [name for name, tensor in zip(named._fields, named, strict=True) if tensor is not None]
    return [tensor for tensor in named if tensor is not None], f"{text} {','.join(names)}"


def unpack(kind: type[Named], tensors: Sequence[Tensor], text: str) -> tuple[Named, str]:
    """Take apart what `pack` made of a NamedTuple of this kind: (the tuple, the text before the names)."""
    before, names = names_in(text)
    given: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return kind(**given), before


@functools.lru_cache(1024)
def names_in(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the text before the names, and the names."""
    before, _, names = text.rpartition(" ")
    return before, tuple(filter(None, names.split(",")))
