"""fluxq::scaled_matmul: 8-bit codes with a scale per row, per tensor or, for x, per 128 columns, as in products.py.

x, w: codes of int8, fp8 or fp8_tensor; scales are fp32 (M,) and (N,), with fp8_tensor either may be () instead. Beside
fp8 x may be fp8_1x128, with scales (M, K/128).
"""

from __future__ import annotations

from fluxq.kernels.op import Op
from fluxq.kernels.products import product_op

OP = Op("scaled_matmul", ("int8", "fp8", "fp8_tensor", "fp8-fp8_1x128"), "native")
scaled_matmul = product_op(OP, OP.formats)
