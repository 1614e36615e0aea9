"""The chips that kernels are compiled for, by the names in kernels/tuned, and which one a device is."""

from __future__ import annotations

import functools

import torch

# A100; RTX 30 and A40; RTX 40 and L40S; H100 and H200; B200; B300; RTX 50; MI300; MI350; RX 9070.
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950", "gfx1201")
# Chips with the instructions and no less shared memory than another, which stands for them.
SAME_AS = {"sm_87": "sm_86", "sm_121": "sm_120", "gfx1200": "gfx1201"}


def chip_of(device: torch.device) -> str:
    """Return the name of the chip behind a CUDA or ROCm device; it need not be one of CHIPS."""
    return _chip(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _chip(index: int) -> str:
    if torch.version.hip:
        name = torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability(index)
        name = f"sm_{major}{minor}"
    return SAME_AS.get(name, name)
