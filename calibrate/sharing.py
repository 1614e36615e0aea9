"""Check that the Linears of an input group read the same values, made while the pipeline runs anyway.

Rows of FAMILIES are tested on a model of their class. Groups of `generic` rest on names, so the first call of such a
model is watched before anything is fitted to one Linear's input on behalf of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.recipes.family import in_every_block


def watch_shared_inputs(model: nn.Module, groups: Iterable[Iterable[str]]) -> None:
    """Let the next call of `model` raise ValueError if a group reads two tensors; later calls are not watched.

    groups: paths of the Linears of each. Two inputs count as one if they are the same memory, unchanged, or equal in
    every element.
    """
    handles: list[Any] = []

    def remove(*_: object) -> None:
        while handles:
            handles.pop().remove()

    for paths in map(tuple, groups):
        watch = _Watch(len(paths), remove)
        if len(paths) > 1:
            handles += [model.get_submodule(path).register_forward_pre_hook(watch.hook(path)) for path in paths]
    handles.append(model.register_forward_hook(remove))


class _Watch:
    """The inputs of one group in one call, kept from its first reader to its last."""

    def __init__(self, readers: int, stop: Callable[[], None]) -> None:
        self.readers, self.stop = readers, stop
        self.seen: dict[str, tuple[Tensor, int]] = {}

    def hook(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(_module: nn.Module, args: tuple[Any, ...]) -> None:
            x, version = args[0], _version(args[0])
            for other, (tensor, then) in self.seen.items():
                if not _same(x, tensor, _version(tensor) == then):
                    self.stop()
                    raise ValueError(
                        f"{path} and {other} read different values, though their names say that they share an input. "
                        f"--exclude '{in_every_block(path)}' keeps such Linears in 16 bit; --profile rtn quantizes "
                        "all without looking at inputs; a row in recipes/all_families.py says what shares one "
                        "(CONTRIBUTING.md, 'Adding a model family')"
                    )
            self.seen = {} if len(self.seen) == self.readers - 1 else {**self.seen, path: (x, version)}

        return look


def _version(x: Tensor) -> int:
    """Return the number of writes into a tensor; tensors of inference mode count none."""
    return 0 if x.is_inference() else x._version


def _same(x: Tensor, y: Tensor, y_unchanged: bool) -> bool:
    if not y_unchanged or x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    return (x.data_ptr() == y.data_ptr() and x.stride() == y.stride()) or torch.equal(x, y)
