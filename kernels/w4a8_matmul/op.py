"""fluxq::w4a8_matmul: 4-bit weights and 8-bit activations, as products.py computes it.

x: int8 or fp8 codes, x_scale (M,). w: nvfp4, mxfp4, int4 or int4_g128, row_scale (N,) fp32. w becomes what `reencode`
makes of it in the activations' element under row_scale, and then it is `scaled_matmul`.
"""

from __future__ import annotations

from fluxq.kernels.op import Op
from fluxq.kernels.products import product_op

WEIGHTS = ("nvfp4", "mxfp4", "int4", "int4_g128")
ACTIVATIONS = ("int8", "fp8")
OP = Op("w4a8_matmul", tuple(f"{w}-{a}" for w in WEIGHTS for a in ACTIVATIONS), "decode")
w4a8_matmul = product_op(OP, OP.formats)
