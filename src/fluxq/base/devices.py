"""The device that `--device` means, and its description in the first line of a command."""

from __future__ import annotations

from textwrap import shorten

from fluxq.base.console import first_line
from fluxq.base.memory import free_bytes

AUTO = "auto"


def choose(device: str) -> str:
    """Return torch's name for `device`; "auto" is the GPU if torch finds one, else the CPU.

    Raises ValueError for a device that torch cannot use.
    """
    import torch

    if device == AUTO:
        return "cuda" if there_is_a_gpu() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = shorten(first_line(error), 160)
        raise ValueError(f"device {device!r} cannot be used: {why}; give --device cpu, or cuda with a GPU") from None
    return device


def there_is_a_gpu() -> bool:
    """Return whether torch finds a CUDA or ROCm GPU."""
    import torch

    return torch.cuda.is_available()


def describe(device: str, option: str) -> str:
    """Return the words about the device in a command's first line. option: the value of `--device`."""
    import torch

    place = torch.device(device)
    if place.type == "cuda":
        free = free_bytes(place) or 0
        return f"{device} ({torch.cuda.get_device_name(place)}, {free / 1e9:.1f} GB free)"
    return f"{device} (torch finds no GPU)" if option == AUTO else device
