"""The products of quantized matrices as torch.library ops, with the torch reference of each; device code is faster.

    fluxq::scaled_matmul         8-bit codes, a scale per row or per tensor
    fluxq::block_scaled_matmul   codes with a scale per block: nvfp4, mxfp8, mxfp4
    fluxq::w4a8_matmul           4-bit weights, 8-bit activations
    fluxq::weight_only_matmul    quantized weights, 16- or 32-bit activations

All of them are x (M, K) times w (N, K) and then, in fp32, rounded once to `dtype`:

    v = x · w^T + bias + h · up^T
    y = residual + gate · gelu(v)

bias (N,). h (M, R), up (N, R): the low-rank branch, h = x · down^T. gelu: tanh form. gate (B, N): a row for each of B
images whose M / B tokens follow one another. residual (M, N). The product is F.linear of the decoded matrices in fp32,
which sums from the bias on; of int8 codes it is exact, and scales and bias come afterwards: both as in ops.py, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels.device import launches_on_gpu
from fluxq.kernels.ops import no_autocast, scaled_int8_product, stored_weight
from fluxq.kernels.packing import pack, unpack
from fluxq.kernels.reencode.op import reencode
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS, Format, find_format


class ProductTensors(NamedTuple):
    """The tensors of a product beside x, in the ops' order; those that it lacks are None.

    w: codes (N, K), w_scale and w_scale_2 their scales; x_scale and x_scale_2: those of x. row_scale (N,) fp32: of the
    8-bit codes that a 4-bit weight is decoded to. bias, h, up, gate, residual: as at the top of this file.
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

    def packed(self, formats: str) -> tuple[list[Tensor], str]:
        """(tensors, formats) as the ops take them. formats: a format's name, or WEIGHTS-ACTIVATIONS."""
        return pack(self, formats)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], formats: str) -> tuple[ProductTensors, str]:
        """Take apart what `packed` made."""
        return unpack(cls, tensors, formats)


@torch.library.custom_op("fluxq::scaled_matmul", mutates_args=())
def scaled_matmul(x: Tensor, tensors: Sequence[Tensor], formats: str, gelu: bool, dtype: torch.dtype) -> Tensor:
    """Codes of int8, fp8 or fp8_tensor; fp32 scales (M,) and (N,), with fp8_tensor either may be () instead."""
    given, name = ProductTensors.of(tensors, formats)
    row = _format("scaled_matmul", name, ("int8", "fp8", "fp8_tensor"))
    left, right = stored_weight(x, given.x_scale, None, row), stored_weight(given.w, given.w_scale, None, row)
    with no_autocast(x):
        return _finish(_product(left, right, given.bias), given, gelu, dtype)


@torch.library.custom_op("fluxq::block_scaled_matmul", mutates_args=())
def block_scaled_matmul(x: Tensor, tensors: Sequence[Tensor], formats: str, gelu: bool, dtype: torch.dtype) -> Tensor:
    """Codes of nvfp4, mxfp8 or mxfp4 and their block scales, (rows, G) or flat as `swizzle_scales` makes them.

    x_scale_2 () or (M, 1) and w_scale_2 (): the global scales of nvfp4.
    """
    given, name = ProductTensors.of(tensors, formats)
    row = _format("block_scaled_matmul", name, ("nvfp4", "mxfp8", "mxfp4"))
    left = stored_weight(x, given.x_scale, given.x_scale_2, row)
    right = stored_weight(given.w, given.w_scale, given.w_scale_2, row)
    with no_autocast(x):
        return _finish(_product(left, right, given.bias), given, gelu, dtype)


@torch.library.custom_op("fluxq::w4a8_matmul", mutates_args=())
def w4a8_matmul(x: Tensor, tensors: Sequence[Tensor], formats: str, gelu: bool, dtype: torch.dtype) -> Tensor:
    """x: int8 or fp8 codes, x_scale (M,). w: nvfp4, mxfp4, int4 or int4_g128, row_scale (N,) fp32.

    w8 = reencode(w) in the activations' element under row_scale, as kernels/reencode/op.py says; then scaled_matmul.
    """
    given, names = ProductTensors.of(tensors, formats)
    weights, _, activations = names.partition("-")
    stored = _format("w4a8_matmul: weights", weights, ("nvfp4", "mxfp4", "int4", "int4_g128"))
    row = _format("w4a8_matmul: activations", activations, ("int8", "fp8"))
    with no_autocast(x):
        left = stored_weight(x, given.x_scale, None, row)
        right = reencode(stored_weight(given.w, given.w_scale, given.w_scale_2, stored), row.name, given.row_scale)
        return _finish(_product(left, right, given.bias), given, gelu, dtype)


@torch.library.custom_op("fluxq::weight_only_matmul", mutates_args=())
def weight_only_matmul(x: Tensor, tensors: Sequence[Tensor], formats: str, gelu: bool, dtype: torch.dtype) -> Tensor:
    """x in bfloat16, float16 or float32; w in any format, int4_g128 too."""
    given, weights = ProductTensors.of(tensors, formats)
    row = _format("weight_only_matmul", weights, (*FORMATS, "int4_g128"))
    with no_autocast(x):
        w = stored_weight(given.w, given.w_scale, given.w_scale_2, row).operand()
        return _finish(F.linear(x.float(), w, _fp32(given.bias)), given, gelu, dtype)


def _fake(x, tensors, formats, gelu, dtype):
    return x.new_empty(x.shape[0], tensors[0].shape[0], dtype=dtype)


for _op in (scaled_matmul, block_scaled_matmul, w4a8_matmul, weight_only_matmul):
    _op.register_fake(_fake)
launches_on_gpu(
    scaled_matmul=scaled_matmul,
    block_scaled_matmul=block_scaled_matmul,
    w4a8_matmul=w4a8_matmul,
    weight_only_matmul=weight_only_matmul,
)


def _format(name: str, format: str, offered: tuple[str, ...]) -> Format:
    if format not in offered:
        raise ValueError(f"{name}: format is {format!r}, expected one of {', '.join(offered)}")
    return find_format(format)


def _product(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """x · w^T + bias (M, N) in fp32."""
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"x (M, K) = {x.shape} does not fit w (N, K) = {w.shape}: K differs")
    if x.shape[0] == 0:
        return x.codes.new_zeros(0, w.shape[0], dtype=torch.float32)
    if x.format.name == "int8":
        return scaled_int8_product(x, w, bias)
    return F.linear(x.dequantize(), w.operand(), _fp32(bias))


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _finish(value: Tensor, given: ProductTensors, gelu: bool, dtype: torch.dtype) -> Tensor:
    """Compute the epilogue of a product with its bias (M, N), in fp32, as the top of this file says."""
    gate, residual = given.gate, given.residual
    if given.h is not None and given.up is not None:
        value = value + F.linear(given.h.float(), given.up.float())
    if gelu:
        value = F.gelu(value, approximate="tanh")
    if gate is not None:
        value = value * gate.float().repeat_interleave(value.shape[0] // gate.shape[0], dim=0)
    if residual is not None:
        value = value + residual.float()
    return value.to(dtype)
