"""Cells, the kernels compiled ahead of time: a kernel file lists its CELLS, `aot.py` compiles them for every chip."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Cell:
    """One kernel at one tile, as it is launched.

    format: number format, or any word that tells this cell from the kernel's others.
    arguments: run-time arguments and their types as Triton spells them: "*bf16", "fp32", "i64"; "i32:16" promises a
    multiple of 16. Pointers are taken to be 16-byte aligned, as torch's are.
    constants: values of the others: tl.constexpr parameters, and arguments that are None or 1 in the launch.
    options: what else is passed in the launch: num_warps, num_stages, …
    tensor_core: what its matrix instructions multiply ("int8", "fp8", "bf16", "mxfp8", "mxfp4", "nvfp4"), None for no
    matmul.
    max_registers: per thread; None for as many as the chip has.
    targets: the chips that this tile is meant for, by their names in chips.CHIPS; empty for all.
    """

    kernel: JITFunction
    format: str
    arguments: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    tensor_core: str | None = None
    max_registers: int | None = None
    targets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As kernels/compiled spells it: `scaled_matmul_kernel`."""
        return self.kernel.fn.__name__
