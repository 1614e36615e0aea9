"""Torch reference of the ops that multiply quantized matrices, all folders that end in _matmul; kernels are faster.

Each computes x (M, K) times w (N, K) and then

    v = gelu(x · w^T + bias + h · up^T)      in fp32, rounded once to `dtype`
    y = residual + gate · v                  rounded as torch does, to `dtype` in the end

bias: (N,).
h, up: (M, R) and (N, R), the low-rank branch, h = x · down^T.
gelu: tanh form.
gate: (B, N), a row for each of B images whose M / B tokens follow one another.
residual: (M, N).

The product is F.linear of the decoded matrices in fp32, which sums from the bias on; of int8 codes it is exact, and
scales and bias come afterwards: both as in ops.py, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels.op import Op, launches_on_gpu
from fluxq.kernels.ops import fp32, no_autocast, scaled_int8_product
from fluxq.kernels.reencode import reencode
from fluxq.kernels.tensor import QuantizedTensor, unpack_named
from fluxq.recipes.formats import Format, find_format


class ProductTensors(NamedTuple):
    """The tensors of a product beside x, in the ops' order; those that it lacks are None.

    w: codes (N, K), with the scales w_scale and w_scale_2.
    x_scale, x_scale_2: scales of x.
    row_scale: (N,) fp32, of the 8-bit codes that a 4-bit weight is decoded to.
    bias, h, up, gate, residual: as at the top of this file.
    """

    w: Tensor
    w_scale: Tensor
    x_scale: Tensor | None = None
    w_scale_2: Tensor | None = None
    x_scale_2: Tensor | None = None
    row_scale: Tensor | None = None
    bias: Tensor | None = None
    h: Tensor | None = None
    up: Tensor | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None


def product_op(op: Op, accepted: tuple[str, ...], *, plain: bool = False) -> Any:
    """Register the torch.library op of a product: its torch reference, its fake and its kernel.

    accepted: formats that the reference takes, WEIGHTS or, if they differ, WEIGHTS-ACTIVATIONS. plain: whether x is no
        codes.
    """

    def reference(x: Tensor, tensors: Sequence[Tensor], formats: str, gelu: bool, dtype: torch.dtype) -> Tensor:
        operands, names = unpack_named(ProductTensors, tensors, formats)
        if names not in accepted:
            raise ValueError(f"{op.name}: formats are {names!r}, expected one of {', '.join(accepted)}")
        w_format, x_format = formats_of(names)
        with no_autocast(x):
            w = QuantizedTensor.stored(operands.w, operands.w_scale, operands.w_scale_2, w_format).unswizzled()
            if plain:
                return _finish(F.linear(x.float(), w.operand(), fp32(operands.bias)), operands, gelu, dtype)
            w = as_multiplied(w, x_format, operands.row_scale)
            left = QuantizedTensor.stored(x, operands.x_scale, operands.x_scale_2, x_format).unswizzled()
            return _finish(_product(left, w, operands.bias), operands, gelu, dtype)

    custom_op = torch.library.custom_op(f"fluxq::{op.name}", reference, mutates_args=())
    custom_op.register_fake(_fake)
    launches_on_gpu(op.name, custom_op)
    return custom_op


def _fake(x, tensors, formats, gelu, dtype):
    return x.new_empty(x.shape[0], tensors[0].shape[0], dtype=dtype)


def formats_of(names: str) -> tuple[Format, Format]:
    """Return (format of w, format of x) of a product of codes, from "WEIGHTS" or "WEIGHTS-ACTIVATIONS"."""
    weights, _, activations = names.partition("-")
    return find_format(weights), find_format(activations or weights)


def as_multiplied(w: QuantizedTensor, x: Format, row_scale: Tensor | None) -> QuantizedTensor:
    """Return w (N, K) as codes of x's element: 4-bit ones become 8-bit under row_scale, as `reencode` makes them."""
    return w if w.format.element == x.element else reencode(w, x.name, row_scale)


def _product(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Return x · w^T + bias (M, N) in fp32."""
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"x (M, K) = {x.shape} does not fit w (N, K) = {w.shape}: K differs")
    if x.shape[0] == 0:
        return x.codes.new_zeros(0, w.shape[0], dtype=torch.float32)
    if x.format.name == "int8":
        return scaled_int8_product(x, w, bias)
    return F.linear(x.dequantize(), w.operand(), fp32(bias))


def _finish(value: Tensor, operands: ProductTensors, gelu: bool, dtype: torch.dtype) -> Tensor:
    """Compute the epilogue of a product with its bias (M, N) in fp32, as the top of this file says."""
    if operands.h is not None and operands.up is not None:
        value = value + F.linear(operands.h.float(), operands.up.float())
    if gelu:
        value = F.gelu(value, approximate="tanh")
    return gated(value.to(dtype), operands.gate, operands.residual)


def gated(value: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return residual + gate · value (M, N), in value's dtype; those that are None are left out."""
    y = value
    if gate is not None:
        y = (y.unflatten(0, (gate.shape[0], -1)) * gate.unsqueeze(1)).view(value.shape)
    if residual is not None:
        y = residual + y
    return y.to(value.dtype)
