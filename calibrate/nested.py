"""Arguments and outputs of a module as a JSON layout, and the tensors that it names.

    (x, {"mask": None})  ->  {"tuple": [{"tensor": "0", "shape": …}, {"dict": {"mask": null}}]}  and  {"0": x}

Strides are part of the layout: a matrix product over rows that lie apart rounds otherwise than over rows that touch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import DTYPES

_MOST = 1 << 33  # elements of a tensor; inputs and outputs of a video model's block have a tenth of them
_FARTHEST, _SPREAD = 1 << 26, 64  # elements, and times as many as there are, that the strides of a tensor reach over


def pack(value: Any, name: str, device: torch.device, to: torch.device | str) -> tuple[Any, dict[str, Tensor]]:
    """Return the layout of `value`, and contiguous copies of its tensors on the device `to`. device: the model's.

    ValueError with `name`, that of the value, for anything but tensors, plain values, tuples, lists and dicts.
    """
    tensors: dict[str, Tensor] = {}
    layout = _layout(value, name, device, tensors)
    return layout, {key: torch.empty(t.shape, dtype=t.dtype, device=to).copy_(t.detach()) for key, t in tensors.items()}


def layout_of(value: Any, name: str, device: torch.device) -> Any:
    """Return the layout alone."""
    return _layout(value, name, device, {})


def require_sound(layout: Any) -> None:
    """Raise ValueError for a layout, from a file, that `pack` cannot have made."""
    if not isinstance(layout, dict):
        if layout is not None and not isinstance(layout, (bool, int, float, str)):
            raise ValueError(f"its layout has a {type(layout).__name__}")
        return
    (word, content), *others = layout.items() or [("", None)]
    if not others and word in ("tuple", "list", "dict"):
        kind = dict if word == "dict" else list
        if not isinstance(content, kind):
            raise ValueError(f"its layout has a {word} that is a {type(content).__name__}")
        for item in content.values() if isinstance(content, dict) else content:
            require_sound(item)
        return
    if layout.keys() != {"tensor", "shape", "strides", "dtype", "host"} or not isinstance(layout["tensor"], str):
        raise ValueError(f"its layout has {', '.join(layout)[:80]!r}, which is no tensor's")
    _require_place(layout["shape"], layout["strides"])
    if layout["dtype"] not in [name for name, _ in DTYPES.values()] or type(layout["host"]) is not bool:
        raise ValueError(f"its layout has a tensor of dtype {str(layout['dtype'])[:80]!r}")


def _require_place(shape: Any, strides: Any) -> None:
    """Raise ValueError unless shape and strides are sizes, and of a tensor that fits a memory."""
    for sizes in (shape, strides):
        if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError(f"its layout has {str(sizes)[:80]} in place of sizes")
    if len(shape) != len(strides) or prod(max(size, 1) for size in shape) > _MOST:
        raise ValueError(f"its layout has a tensor of shape {str(shape)[:80]} and strides {str(strides)[:80]}")
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    if reach > max(_FARTHEST, _SPREAD * prod(shape)):
        raise ValueError(f"its layout spreads {prod(shape)} elements over {reach}")


def unpack(layout: Any, tensor: Callable[[dict[str, Any]], Tensor]) -> Any:
    """Return the value of a layout, its tensors made by tensor(entry); see `stored` and `blank`."""
    if not isinstance(layout, dict):
        return layout
    if "tuple" in layout:
        return tuple(unpack(item, tensor) for item in layout["tuple"])
    if "list" in layout:
        return [unpack(item, tensor) for item in layout["list"]]
    if "dict" in layout:
        return {key: unpack(item, tensor) for key, item in layout["dict"].items()}
    return tensor(layout)


def stored(tensors: Mapping[str, Tensor], device: torch.device) -> Callable[[dict[str, Any]], Tensor]:
    """Return, for `unpack`, copies of packed tensors with their devices and strides, which the caller may write to.

    ValueError where the layout is another one's.
    """

    def make(entry: dict[str, Any]) -> Tensor:
        tensor, strides = tensors.get(entry["tensor"]), entry["strides"]
        if tensor is None or list(tensor.shape) != entry["shape"]:
            raise ValueError(f"its tensor {entry['tensor']!r} of shape {entry['shape']} is not there")
        sizes = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides, strict=True)]
        place = torch.device("cpu") if entry["host"] else device
        copy = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=place)
        copy.copy_(tensor[tuple(slice(size) for size in sizes)])
        return copy.expand(tensor.shape)  # a dimension of stride 0 is one row seen often

    return make


def blank(device: torch.device) -> Callable[[dict[str, Any]], Tensor]:
    """Return, for `unpack`, tensors of the right shape but no use, NaN where the dtype has it; equal shapes share."""
    tensors: dict[tuple[Any, ...], Tensor] = {}

    def make(entry: dict[str, Any]) -> Tensor:
        dtype = getattr(torch, entry["dtype"])
        place = torch.device("cpu") if entry["host"] else device
        key = (*entry["shape"], dtype, place)
        if key not in tensors:
            value = torch.nan if dtype.is_floating_point else 0
            tensors[key] = torch.full(entry["shape"], value, dtype=dtype, device=place)
        return tensors[key]

    return make


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor in tuples, lists and dicts, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (tuple, list)) else []


def _layout(value: Any, name: str, device: torch.device, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value
        return {
            "tensor": key,
            "shape": list(value.shape),
            "strides": list(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "host": value.device.type == "cpu" and device.type != "cpu",
        }
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_layout(item, f"{name}[{i}]", device, tensors) for i, item in enumerate(value)]}
    if type(value) is list:
        return {"list": [_layout(item, f"{name}[{i}]", device, tensors) for i, item in enumerate(value)]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _layout(item, f"{name}[{key!r}]", device, tensors) for key, item in value.items()}}
    raise ValueError(
        f"{name} is a {type(value).__name__}, which cannot be kept on disk; tensors, numbers, text, None and tuples, "
        "lists and dicts of these can: leave the argument out of the pipeline's call"
    )
