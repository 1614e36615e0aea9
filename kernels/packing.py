"""Named tensors as one list, for ops with many optional tensors, and a text with the names of those given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

Named = TypeVar("Named", bound=tuple)  # a NamedTuple of tensors, None for those that are not there
How = TypeVar("How")


def pack(named: Any, text: object = "") -> tuple[list[Tensor], str]:
    """Return (tensors, text) as an op takes them: a NamedTuple's tensors but None, and the text with their names."""
    tensors = {name: tensor for name, tensor in zip(named._fields, named, strict=True) if tensor is not None}
    return [*tensors.values()], f"{text} {','.join(tensors)}"


def unpack(
    kind: type[Named], tensors: Sequence[Tensor], text: str, parse: Callable[[str], How] = str
) -> tuple[Named, How]:
    """Invert `pack` for a NamedTuple of this kind: (the tuple, the parsed text)."""
    before, names = read(text, parse)
    fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return kind(**fields), before


@functools.lru_cache(1024)
def read(text: str, parse: Callable[[str], How] = str) -> tuple[How, tuple[str, ...]]:
    """Return (the parsed text before the names, the names)."""
    before, _, names = text.rpartition(" ")
    return parse(before), tuple(filter(None, names.split(",")))
