"""Arguments and outputs of a module as a layout, which JSON holds, and the tensors that it names.

    (x, {"mask": None})  ->  {"tuple": [{"tensor": "0", "shape": …}, {"dict": {"mask": null}}]}  and  {"0": x}

Strides are part of the layout: a matrix product over rows that lie apart rounds otherwise than over rows that touch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def pack(value: Any, name: str, device: torch.device, to: torch.device | str) -> tuple[Any, dict[str, Tensor]]:
    """Layout of `value`, and contiguous copies of its tensors on the device `to`. device: the model's.

    ValueError, in which `name` is what the value is called, for anything but tensors, plain values, tuples, lists and
    dicts.
    """
    tensors: dict[str, Tensor] = {}
    layout = _layout(value, name, device, tensors)
    return layout, {key: torch.empty(t.shape, dtype=t.dtype, device=to).copy_(t.detach()) for key, t in tensors.items()}


def layout_of(value: Any, name: str, device: torch.device) -> Any:
    """The layout alone."""
    return _layout(value, name, device, {})


def unpack(layout: Any, tensor: Callable[[dict[str, Any]], Tensor]) -> Any:
    """The value of a layout, its tensors made by tensor(entry); see `stored` and `blank`."""
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
    """For `unpack`: copies of packed tensors where and as they lay, which the caller may write to."""

    def make(entry: dict[str, Any]) -> Tensor:
        tensor, strides = tensors[entry["tensor"]], entry["strides"]
        sizes = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides, strict=True)]
        place = torch.device("cpu") if entry["host"] else device
        copy = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=place)
        copy.copy_(tensor[tuple(slice(size) for size in sizes)])
        return copy.expand(tensor.shape)  # a dimension of stride 0 is one row seen often

    return make


def blank(device: torch.device) -> Callable[[dict[str, Any]], Tensor]:
    """For `unpack`: tensors of the right shape that nobody may use, NaN where the dtype has it; equal shapes share."""
    made: dict[tuple[Any, ...], Tensor] = {}

    def make(entry: dict[str, Any]) -> Tensor:
        dtype = getattr(torch, entry["dtype"])
        place = torch.device("cpu") if entry["host"] else device
        key = (*entry["shape"], dtype, place)
        if key not in made:
            value = torch.nan if dtype.is_floating_point else 0
            made[key] = torch.full(entry["shape"], value, dtype=dtype, device=place)
        return made[key]

    return make


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in tuples, lists and dicts, at any depth."""
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
