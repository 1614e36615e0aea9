"""Stored weights to the numbers that they stand for, as a torch.library op with its torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxq.kernels.op import Op, launches_on_gpu
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import find_format

OP = Op("dequantize", KERNEL_FORMATS, "memory")


@torch.library.custom_op("fluxq::dequantize", mutates_args=())
def dequantize(w: Tensor, w_scale: Tensor, w_scale_2: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    """Return the matrix (N, K) that weight tensors stored as `format` stand for."""
    return QuantizedTensor.stored(w, w_scale, w_scale_2, find_format(format)).dequantize(dtype)


@dequantize.register_fake
def _(w, w_scale, w_scale_2, format, dtype):
    return w.new_empty(QuantizedTensor.stored(w, w_scale, w_scale_2, find_format(format)).shape, dtype=dtype)


launches_on_gpu(OP.name, dequantize)
