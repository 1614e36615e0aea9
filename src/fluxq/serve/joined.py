"""Join denoiser calls: images in the making, each a call of a stock pipeline in its thread, meet at the denoiser.

One lock is the turn: the thread that computes holds it. At the denoiser's call a thread gives it up and waits; the last
one to come makes one call of all whose arguments allow it, and each gets its rows. All else, schedulers, encoders and
decoders, runs one thread at a time, as without joining.

Arguments allow it where tensors have the same shapes but for their rows, and all else is equal. Tensors without rows,
as position ids are, have to be equal too.

Sums of integers do not depend on the number of rows, sums in floating point do: a product picks its order of summation
by its shape. So beside layers of int8 all other Linears and convolutions compute each image of a joined call alone.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

_here = threading.local()


class Meeting:
    """Meeting of so many threads; each calls `enter` and `leave` around what it computes."""

    def __init__(self, members: int) -> None:
        self._members, self._calls = members, list[_Call]()
        self._turn = threading.Condition()

    def enter(self) -> None:
        """Wait for the turn, and meet the others at the denoiser from now on."""
        self._turn.acquire()
        _here.meeting = self

    def leave(self) -> None:
        """Give up the turn; the others wait for this thread no longer."""
        _here.meeting = None
        self._members -= 1
        self._serve()
        self._turn.release()

    def call(self, denoiser: Any, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a denoiser, by its own `plain`, together with the others, who are on their way to it."""
        call = _Call(denoiser, plain, inspect.signature(plain).bind(*args, **kwargs).arguments)
        self._calls.append(call)
        self._serve()
        self._turn.wait_for(lambda: call.is_made)
        _here.shared = call.shared
        if call.error is not None:
            raise call.error
        return call.result

    def _serve(self) -> None:
        """Make all calls, once every member waits for one."""
        if self._calls and len(self._calls) == self._members:
            for group in _groups(self._calls):
                _make(group)
            self._calls = []
            self._turn.notify_all()


def meet(denoiser: Any) -> None:
    """Let the calls of a denoiser be joined where its caller is in a meeting."""
    plain = denoiser.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        meeting = getattr(_here, "meeting", None)
        return plain(*args, **kwargs) if meeting is None else meeting.call(denoiser, plain, args, kwargs)

    denoiser.forward = forward


def shared_by() -> int:
    """Return by how many images the last call of this thread was shared, and begin anew; 1 for alone."""
    shared, _here.shared = getattr(_here, "shared", 1), 1
    return shared


@dataclass(eq=False)
class _Call:
    """A call of a denoiser. arguments: by name. shared: number of calls that were made as one."""

    denoiser: Any
    plain: Callable[..., Any]
    arguments: Mapping[str, Any]
    is_made: bool = False
    shared: int = 1
    result: Any = None
    error: Exception | None = None

    @property
    def rows(self) -> int:
        """Rows of the first argument, a tensor with rows or a list of them."""
        return len(next(iter(self.arguments.values())))


def _groups(calls: Sequence[_Call]) -> list[list[_Call]]:
    groups: list[list[_Call]] = []
    for call in calls:
        group = next((each for each in groups if _fit(each[0], call)), None)
        groups.append([call]) if group is None else group.append(call)
    return groups


def _fit(call: _Call, other: _Call) -> bool:
    same = call.plain == other.plain and call.arguments.keys() == other.arguments.keys() and call.rows == other.rows
    return same and all(_alike(name, value, other.arguments[name], call) for name, value in call.arguments.items())


def _alike(name: str, value: Any, other: Any, call: _Call) -> bool:
    if not _has_rows(name, value, call):
        return _equal(value, other)
    if not _has_rows(name, other, call):
        return False
    values, others = ([each] if hasattr(each, "shape") else each for each in (value, other))
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(values, others, strict=True))


def _has_rows(name: str, value: Any, call: _Call) -> bool:
    """Tell whether an argument has a row for each image: a tensor, or a list of tensors."""
    if name.endswith("_ids"):
        return False
    if hasattr(value, "shape"):
        return value.ndim > 0 and len(value) == call.rows
    return isinstance(value, list) and len(value) == call.rows and all(hasattr(each, "shape") for each in value)


def _equal(value: Any, other: Any) -> bool:
    import torch

    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value.shape == other.shape and bool(torch.equal(value, other))
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_equal(each, other[name]) for name, each in value.items())
    return bool(value == other)


def _make(group: Sequence[_Call]) -> None:
    """Make calls as one, and hand out what comes of it."""
    import torch

    first, rows = group[0], group[0].rows
    arguments = {
        name: _together([each.arguments[name] for each in group]) if _has_rows(name, value, first) else value
        for name, value in first.arguments.items()
    }
    try:
        # no_grad, because whoever comes last makes it, be it one that is finished
        with torch.no_grad(), _apart(first.denoiser, len(group)):
            result = first.plain(**arguments)
        for index, each in enumerate(group):
            each.result = _rows_of(result, slice(index * rows, (index + 1) * rows)) if group[1:] else result
    except Exception as error:
        for each in group:
            each.error = error
    for each in group:
        each.is_made, each.shared = True, len(group)


@contextmanager
def _apart(denoiser: Any, images: int) -> Iterator[None]:
    """Let layers that sum in floating point compute each image alone, in a denoiser whose others sum integers."""
    layers = _inexact(denoiser) if images > 1 else []
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(_one_by_one, layer.forward, images)
    try:
        yield
    finally:
        for layer, plain in zip(layers, before, strict=True):
            del layer.forward
            if plain is not None:
                layer.forward = plain


def _inexact(denoiser: Any) -> list[Any]:
    """Return the Linears and convolutions that do not sum integers; none where no layer does."""
    from torch import nn

    layers = [module for module in denoiser.modules() if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d))]
    inexact = [layer for layer in layers if not _sums_integers(layer)]
    return inexact if len(inexact) < len(layers) else []


def _sums_integers(layer: Any) -> bool:
    """Tell whether nothing but integers is summed: not where a 16-bit branch or a rotation takes part."""
    scheme = getattr(layer, "scheme", None)
    if scheme is None or scheme.formats != ("int8", "int8"):
        return False
    return not (scheme.rank or scheme.deflate or scheme.hadamard)


def _one_by_one(plain: Callable[..., Any], images: int, x: Any) -> Any:
    """Call a layer for each image, whose rows come first in x; an input without rows for all of them goes as it is."""
    import torch

    return plain(x) if len(x) % images else torch.cat([plain(each) for each in x.chunk(images)])


def _together(values: Sequence[Any]) -> Any:
    import torch

    return torch.cat(list(values)) if isinstance(values[0], torch.Tensor) else [row for each in values for row in each]


def _rows_of(result: Any, rows: slice) -> Any:
    """Return the rows of an output: a tensor, a list of them, or a tuple or diffusers' output of such."""
    if hasattr(result, "shape") or isinstance(result, list):
        return result[rows]
    if isinstance(result, tuple):
        return tuple(_rows_of(each, rows) for each in result)
    return type(result)(**{name: _rows_of(each, rows) for name, each in result.items()})
