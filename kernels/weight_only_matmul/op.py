"""fluxq::weight_only_matmul: stored weights and activations that are not quantized, as products.py computes it.

x in bfloat16, float16 or float32; w in any format, int4_g128 too.
"""

from __future__ import annotations

from fluxq.kernels.op import Op
from fluxq.kernels.products import product_op
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS

OP = Op("weight_only_matmul", (*KERNEL_FORMATS, "int4_g128"), "decode")
LARGEST_GEMV = 16  # tokens that the kernel takes without matrix units
weight_only_matmul = product_op(OP, (*FORMATS, "int4_g128"), plain=True)
