"""Checks on the Python side of every kernel before it launches: a wrong pointer is silent, a ValueError is not."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from fluxq.kernels.tensor import QuantizedTensor, stored_shapes
from fluxq.kernels.tiles import Tile
from fluxq.recipes.formats import Format

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
            f"{name}: Triton kernels run on CUDA and ROCm devices, the tensors are on {device}: move them, or call the "
            "op of torch.ops.fluxq, which has a torch reference"
        )


def check_stored(q: QuantizedTensor, name: str) -> None:
    """Raise ValueError unless q's tensors have the shapes and types that its format stores, on one device."""
    n, k = q.shape
    q.format.check_shape(n, k, name)
    for part, tensor in q.tensors().items():
        shape, dtype = stored_shapes(q.format, n, k)[part]
        if part == "weight_scale_2" and tensor.ndim == 2:
            shape = (n, 1)  # a global scale for each token
        check_tensor(f"{name}: {part}", tensor, shape, (dtype,), q.codes.device)


def check_tile(name: str, tile: Tile, format: Format) -> None:
    """Raise ValueError if a tile's edge would lie within a block or a byte."""
    unit = format.group_size or (2 if format.element.bits == 4 else 1)
    if tile.columns % unit:
        raise ValueError(f"{name}: tile.columns is {tile.columns}, expected a multiple of {format.name}'s {unit}")


def as_bytes(stored: Tensor) -> Tensor:
    """Return the same memory, with fp8 read as bytes."""
    return stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored


def check_fit(name: str, x: tuple[int, ...], w: tuple[int, int]) -> None:
    """Raise ValueError unless x (M, K) times w (N, K) is a product to launch."""
    if x[0] == 0:
        raise ValueError(f"{name}: x (0, {x[1]}) has no rows, so there is nothing to launch; return an empty result")
    if w[1] != x[1]:
        raise ValueError(f"{name}: x (M, K) = {(*x,)} does not fit w (N, K) = {w}: K differs")


def check_codes(name: str, x: QuantizedTensor, w: QuantizedTensor) -> None:
    """Raise ValueError unless x (M, K) and w (N, K) are as they are stored, on one device, and fit."""
    check_fit(name, x.shape, w.shape)
    if x.format.name == "int8" and x.shape[1] >= 2**17:
        raise ValueError(
            f"{name}: K is {x.shape[1]}, expected less than 131072, or int32 sums can overflow: split K, or use fp8"
        )
    check_stored(x, f"{name}: x")
    check_stored(w, f"{name}: w")
    check_same_device(name, x.codes, w.codes)


def check_same_device(name: str, x: Tensor, w: Tensor) -> None:
    """Raise ValueError unless two operands are on one device."""
    if x.device != w.device:
        raise ValueError(f"{name}: x is on {x.device} and w on {w.device}: move one of them")
