"""fluxq::block_scaled_matmul: codes with a scale per block, as products.py computes it.

x, w: codes of nvfp4, mxfp8 or mxfp4, block scales (rows, G), or flat as `swizzle_scales` makes them. x_scale_2 () or
(M, 1) and w_scale_2 (): the global scales of nvfp4.
"""

from __future__ import annotations

from fluxq.kernels.op import Op
from fluxq.kernels.products import product_op

OP = Op(
    "block_scaled_matmul",
    ("nvfp4", "mxfp8", "mxfp4"),
    "native",
    elsewhere="no matrix unit there takes block scales of this format",
)
block_scaled_matmul = product_op(OP, OP.formats)
