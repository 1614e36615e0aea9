"""Checks on the Python side of every kernel before it launches: a wrong pointer is silent, a ValueError is not."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

# Launch option of kernels that compute their reference's bits: a fused multiply-add rounds once where it rounds twice.
EXACT = {"enable_fp_fusion": False}


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise ValueError unless `tensor` is contiguous, of that shape, one of the dtypes, and on `device`."""
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype} {(*tensor.shape,)}, expected {expected} {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the rest on {device}: move it with .to({str(device)!r})")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()} for shape {shape}: pass .contiguous()")


def check_device(name: str, device: torch.device) -> None:
    """Raise ValueError for tensors where no compiled kernel can run; the interpreter takes them from anywhere."""
    interpreted = JITFunction.run.__module__ != JITFunction.__module__
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f"{name}: Triton kernels run on CUDA and ROCm devices, the tensors are on {device}: move them, or use the "
            "torch reference in fluxq.quantize"
        )
