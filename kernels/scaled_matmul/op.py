"""fluxq::scaled_matmul: 8-bit codes with a scale per row or per tensor, as products.py computes it.

x, w: codes of int8, fp8 or fp8_tensor; scales are fp32 (M,) and (N,), with fp8_tensor either may be () instead.
"""

from __future__ import annotations

from fluxq.kernels.op import Op
from fluxq.kernels.products import product_op

OP = Op("scaled_matmul", ("int8", "fp8", "fp8_tensor"), "native")
scaled_matmul = product_op(OP, OP.formats)
