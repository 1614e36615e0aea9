"""The chips that kernels are compiled for, by the names in kernels/tuned, and which one a device is."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

KB = 1024


@dataclass(frozen=True)
class Chip:
    """Properties of a chip for the compiler and the checks. shared: bytes of shared memory that one block may use."""

    backend: str
    architecture: int | str
    shared: int
    warp_size: int = 32


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD's LDS: CDNA 3,
# CDNA 4 and RDNA 4 instruction set guides.
CHIPS = {
    "sm_80": Chip("cuda", 80, 163 * KB),  # A100
    "sm_86": Chip("cuda", 86, 99 * KB),  # RTX 30, A40
    "sm_89": Chip("cuda", 89, 99 * KB),  # RTX 40, L40S
    "sm_90": Chip("cuda", 90, 227 * KB),  # H100, H200
    "sm_100": Chip("cuda", 100, 227 * KB),  # B200
    "sm_103": Chip("cuda", 103, 227 * KB),  # B300
    "sm_120": Chip("cuda", 120, 99 * KB),  # RTX 50
    "gfx942": Chip("hip", "gfx942", 64 * KB, warp_size=64),  # MI300
    "gfx950": Chip("hip", "gfx950", 160 * KB, warp_size=64),  # MI350
    "gfx1201": Chip("hip", "gfx1201", 64 * KB),  # RX 9070
}
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
