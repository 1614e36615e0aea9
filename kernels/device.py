"""Give an op of fluxq its kernel on CUDA and ROCm devices, beside its torch reference.

Nothing of Triton is imported before the first call with tensors on a GPU. Without a Triton the torch references stay:
exact, but slow.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

OPS: dict[str, Any] = {}  # name -> op (a `torch.library.custom_op`) of every module that was imported


def launches_on_gpu(**ops: Any) -> None:
    """Let each op call the function of its name in launch.py for tensors on a GPU."""
    OPS.update(ops)
    if find_spec("triton") is None:
        return
    for name, op in ops.items():
        op.register_kernel("cuda")(functools.partial(_launch, name))


def _launch(name: str, *arguments: Any) -> Any:
    return importlib.import_module("fluxq.kernels.launch").run(name, *arguments)
