"""Table of the ops that have a kernel, each in its own folder.

`fluxq::quantized_linear` (ops.py) chooses among their products.
"""

from __future__ import annotations

from fluxq.kernels.adaln_quantize.op import OP as ADALN_QUANTIZE
from fluxq.kernels.attention.op import OP as ATTENTION_FP8
from fluxq.kernels.block_scaled_matmul.op import OP as BLOCK_SCALED_MATMUL
from fluxq.kernels.dequantize.op import OP as DEQUANTIZE
from fluxq.kernels.input_gradient.op import OP as INPUT_GRADIENT
from fluxq.kernels.op import Op
from fluxq.kernels.qk_norm_rope.op import OP as QK_NORM_ROPE
from fluxq.kernels.quantize_activation.op import OP as QUANTIZE_ACTIVATION
from fluxq.kernels.scaled_matmul.op import OP as SCALED_MATMUL
from fluxq.kernels.w4a8_matmul.op import OP as W4A8_MATMUL
from fluxq.kernels.weight_only_matmul.op import OP as WEIGHT_ONLY_MATMUL

OPS = {
    op.name: op
    for op in (
        QUANTIZE_ACTIVATION,
        ADALN_QUANTIZE,
        QK_NORM_ROPE,
        ATTENTION_FP8,
        SCALED_MATMUL,
        BLOCK_SCALED_MATMUL,
        W4A8_MATMUL,
        WEIGHT_ONLY_MATMUL,
        INPUT_GRADIENT,
        DEQUANTIZE,
    )
}


def product_of(weights: str, activations: str | None, row_scale: bool) -> tuple[Op, str] | None:
    """Return the (op, format) that multiplies codes of two formats as they are stored; None if none does.

    row_scale: whether the 4-bit weights have the 8-bit scales per row that W4A8 needs.
    """
    name = weights if weights == activations else f"{weights}-{activations}"
    for op in (W4A8_MATMUL,) if row_scale else (SCALED_MATMUL, BLOCK_SCALED_MATMUL):
        if name in op.formats:
            return op, name
    return None
