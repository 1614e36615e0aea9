"""Poison in new tensors, for tests of kernels: what a kernel leaves out, or writes beside its outputs, is seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

POISON, GUARD = 0xA5, 64  # GUARD: bytes on either side


def guarded(*shape: Any, **options: Any) -> Tensor:
    """As `torch.empty` on the CPU: a poisoned tensor between guard bytes."""
    wanted = _empty(*shape, **options | {"device": "meta"})
    whole = torch.full((wanted.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8)
    return whole[GUARD : wanted.nbytes + GUARD].view(wanted.dtype).reshape(wanted.shape)


def assert_guards_untouched(*tensors: Tensor) -> None:
    for tensor in tensors:
        whole = _empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        assert (whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all(), "guard bytes differ"


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block new tensors of `torch.empty` are `guarded`; their guards must be there at its end."""
    made: list[Tensor] = []

    def noted(*shape: Any, **options: Any) -> Tensor:
        made.append(guarded(*shape, **options))
        return made[-1]

    with mock.patch.object(torch, "empty", noted):
        yield
    assert_guards_untouched(*made)


_empty = torch.empty
