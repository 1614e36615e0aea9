"""fluxq::input_gradient: the backward pass of a product with stored weights W = wq · w_scale, as an op of torch.

    dL/dx (M, K) = grad (M, N) · W (N, K)       grad keeps its bits
    dL/dx (M, K) = (zq · wq) · z_scale          z = grad · w_scale, each row rounded to int8 or fp8 codes

in fp32, cast once. The sum is over rows of W, so in the second form their scales go into grad before it is rounded, and
W's codes are multiplied as they are, of int8 exactly. It is for weights with a scale for each row, or one for all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels.op import Op, launches_on_gpu
from fluxq.kernels.ops import int8_product, no_autocast, quantize_activation
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS, find_format

OP = Op("input_gradient", (*KERNEL_FORMATS, "int4_g128"), "decode", or_reference=True)


@torch.library.custom_op("fluxq::input_gradient", mutates_args=())
def input_gradient(
    grad: Tensor, w: Tensor, w_scale: Tensor, w_scale_2: Tensor | None, formats: str, dtype: torch.dtype
) -> Tensor:
    """Return grad (M, N) of a float dtype times W (N, K), as (M, K) of `dtype`.

    formats: that of the stored W, or "WEIGHTS-CODES" with the `codes_of` W.
    """
    q, codes = operands(grad, w, w_scale, w_scale_2, formats)
    with no_autocast(grad):
        if not codes or grad.shape[0] == 0:
            return (grad.float() @ q.operand()).to(dtype)
        z = quantize_activation(grad.float() * row_scale(q), FORMATS[codes])
        if codes == "int8":
            sums = int8_product(z.codes, q.codes.t().contiguous()).float()
        else:
            sums = z.codes.float() @ q.codes.float()
        return (sums * z.scale[:, None]).to(dtype)


@input_gradient.register_fake
def _(grad, w, w_scale, w_scale_2, formats, dtype):
    q, _ = operands(grad, w, w_scale, w_scale_2, formats)
    return grad.new_empty(grad.shape[0], q.shape[1], dtype=dtype)


launches_on_gpu(OP.name, input_gradient)


def _save_for_backward(ctx, inputs, output) -> None:
    grad, *stored, ctx.formats, _ = inputs
    ctx.dtype = grad.dtype
    ctx.save_for_backward(*stored)


def _backward(ctx, twice):
    """Return the gradient with respect to `grad`, twice (M, K) · W^T; rounding to codes counts as the identity."""
    w, w_scale, w_scale_2 = ctx.saved_tensors
    q, _ = operands(None, w, w_scale, w_scale_2, ctx.formats)
    with no_autocast(twice):
        return F.linear(twice.float(), q.operand()).to(ctx.dtype), None, None, None, None, None


input_gradient.register_autograd(_backward, setup_context=_save_for_backward)


def operands(
    grad: Tensor | None, w: Tensor, w_scale: Tensor, w_scale_2: Tensor | None, formats: str
) -> tuple[QuantizedTensor, str]:
    """Return (W, format of the codes that grad is rounded to, or ""); ValueError for what does not fit."""
    weights, _, codes = formats.partition("-")
    q = QuantizedTensor.stored(w, w_scale, w_scale_2, find_format(weights)).unswizzled()
    if grad is not None and (grad.ndim != 2 or grad.shape[1] != q.shape[0]):
        raise ValueError(f"input_gradient: grad {(*grad.shape,)} does not fit w (N, K) = {q.shape}: expected (M, N)")
    if codes and codes != CODES.get(weights):
        coded = ", ".join(formats_of(name, in_8_bit=True) for name in CODES)
        raise ValueError(f"input_gradient: formats is {formats!r}, expected a format of weights, or one of {coded}")
    return q, codes


def formats_of(weights: str, *, in_8_bit: bool = False) -> str:
    """Return the op's text for weights of a format. in_8_bit: round the gradient where CODES has these weights."""
    return f"{weights}-{CODES[weights]}" if in_8_bit and weights in CODES else weights


def row_scale(q: QuantizedTensor) -> Tensor:
    """Return the scale of each row of W, (N,)."""
    return q.scale.expand(q.shape[0])


CODES = {"int8": "int8", "fp8": "fp8", "fp8_tensor": "fp8"}  # weights with a scale for each row, or one for all
