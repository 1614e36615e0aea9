"""Gives the ops of fluxq their kernels on CUDA and ROCm devices, as soon as the module that holds an op is imported.

Nothing of Triton is imported before the first call with tensors on a GPU. Without a Triton the torch references stay:
exact, but slow.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.util import find_spec
from typing import Any

# Modules, and the ops in them that kernels/launch.py has under the same names, but for the "_op" at the end of some.
OPS = {
    "fluxq.quantize.ops": ("quantized_linear",),
    "fluxq.quantize.producers": ("quantize_activation", "act_quantize"),
    "fluxq.quantize.norms": ("adaln_quantize", "qk_norm_rope"),
    "fluxq.quantize.attention": ("attention_fp8",),
    "fluxq.quantize.products": ("scaled_matmul", "block_scaled_matmul", "w4a8_matmul", "weight_only_matmul"),
    "fluxq.quantize.reencode": ("reencode_op", "dequantize_op", "swizzle_scales_op"),
}


def register(module: str) -> None:
    """Called once one of OPS is imported."""
    if find_spec("triton") is None:
        return
    for name in OPS[module]:
        op = getattr(sys.modules[module], name)
        op.register_kernel("cuda")(functools.partial(_launch, name.removesuffix("_op")))


def _launch(name: str, *arguments: Any) -> Any:
    return importlib.import_module("fluxq.kernels.launch").run(name, *arguments)
