"""Block scales in the order that Blackwell's matrix units read, as a torch.library op with its torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxq.kernels import tensor
from fluxq.kernels.op import Op, launches_on_gpu

OP = Op("swizzle_scales", ("8bit",), "memory")


@torch.library.custom_op("fluxq::swizzle_scales", mutates_args=())
def swizzle_scales(scale: Tensor) -> Tensor:
    """Return block scales (rows, G), of one byte each, flat in the order that Blackwell's matrix units read."""
    return tensor.swizzle_scales(scale)


@swizzle_scales.register_fake
def _(scale):
    tensor.check_block_scales(scale)
    return scale.new_empty(tensor.swizzled_size(*scale.shape))


launches_on_gpu(OP.name, swizzle_scales)
