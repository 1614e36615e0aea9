"""The gradient with respect to the input: 16-bit gradients times stored weights, which are decoded in the main loop.

    w16 = grad's dtype(code · scale)           v = float(grad · w16) · what is left of the scales

The sum is over rows of W, so a scale that a row has to itself, of fp8, int8 and nvfp4's (N, 1), is part of w16 and is
rounded with it: by at most 2^-8 of a weight in bfloat16, as int4 always is. One scale for all rows is applied to the
sums in fp32, and then w16 is exact; for float16 see weight_only_matmul. The tile of W is that of the forward pass, read
and decoded alike, and multiplied without being transposed; W is never in memory but as its codes.

Gradients as codes are two launches of kernels that exist: the quantizer, which multiplies with W's scales as it does
with `smooth`, and the product of 8-bit codes. That takes the second matrix by rows of K: a copy of W's codes in that
order, a byte for each weight, lasts as long as the call.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.base.console import logger
from fluxq.base.settings import is_strict
from fluxq.kernels.checks import (
    EXACT,
    as_bytes,
    check_device,
    check_same_device,
    check_stored,
    check_tensor,
    check_tile,
)
from fluxq.kernels.compare import Product, Sample, Verdict, picked, product, taken
from fluxq.kernels.dequantize.kernel import Stored, decode_scale, stored_arguments, times_groups, unpack_codes
from fluxq.kernels.dispatch import Choice, NoKernel, choose_product, require
from fluxq.kernels.epilogue import FLOATS, ROUNDED_WEIGHTS, Epilogue, rounds_weights
from fluxq.kernels.input_gradient.op import OP, operands, row_scale
from fluxq.kernels.library import library_product
from fluxq.kernels.ops import quantize_activation
from fluxq.kernels.quantize_activation.kernel import quantize_tuned
from fluxq.kernels.quantize_activation.op import OP as QUANTIZE_ACTIVATION
from fluxq.kernels.quantize_activation.op import Rounding, RoundingTensors
from fluxq.kernels.scaled_matmul.kernel import grouped_tile
from fluxq.kernels.scaled_matmul.op import OP as SCALED_MATMUL
from fluxq.kernels.tensor import QuantizedTensor, pack_named
from fluxq.kernels.tiles import MatmulTile, Tile, cdiv, find_matmul_tile
from fluxq.recipes.formats import FORMATS, Scheme


def input_gradient(
    grad: Tensor, w: QuantizedTensor, dtype: torch.dtype = torch.bfloat16, *, tile: MatmulTile
) -> Tensor:
    """Return grad (M, N) in bfloat16 or float16 times w (N, K) of any format, as (M, K) of a float dtype.

    tile: (m, n) of the result, with k rows of w a step. Raises ValueError for operands that do not fit.
    """
    name, (n, k) = "input_gradient", w.shape
    m = grad.shape[0]
    check_tensor(f"{name}: grad", grad, (m, n), FLOATS[:2], grad.device)
    check_tile(name, Tile(tile.k, tile.n, tile.warps), w.format)
    check_stored(w, f"{name}: w")
    check_same_device(name, grad, w.codes)
    if dtype not in FLOATS:
        raise ValueError(f"{name}: dtype is {dtype}, expected bfloat16, float16 or float32")
    check_device(name, grad.device)
    out = torch.empty(m, k, dtype=dtype, device=grad.device)
    arguments = stored_arguments(w)
    stored: Stored = arguments["w"]
    input_gradient_kernel[(cdiv(m, tile.m) * cdiv(k, tile.n),)](
        grad=grad,
        out=out,
        **arguments,
        M=m,
        N=n,
        K=k,
        SCALE_OF_ROW=stored.stride_scale != 0,
        GLOBAL_OF_ROW=bool(stored.stride_global),
        EVEN=n % tile.k == 0 and k % tile.n == 0,
        TILE=tile,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    return out


def launch(
    grad: Tensor, w: Tensor, w_scale: Tensor, w_scale_2: Tensor | None, formats: str, dtype: torch.dtype, *, chip: str
) -> Tensor:
    """Launch the op on a chip; gradients as codes keep 16 bit where it does not multiply those.

    Raises NoKernel where it has no kernel for the weights or the gradient, and in strict mode also for the codes.
    """
    q, codes = operands(grad, w, w_scale, w_scale_2, formats)
    if grad.shape[0] == 0:
        return grad.new_empty(0, q.shape[1], dtype=dtype)
    grad = grad.contiguous()
    choice = _choice_for_codes(q, codes, grad.shape[0], dtype, chip)
    if choice is None:
        _require(grad, q, chip)
        return input_gradient(grad, q, dtype, tile=find_matmul_tile(OP.file, q.format.name, chip, grad.shape[0]))
    z, _ = quantize_tuned(grad, *_rounding(q, codes), chip)
    if choice.implementation == SCALED_MATMUL.name:
        return SCALED_MATMUL.kernel.multiply(z, _by_columns(q, codes), None, Epilogue(dtype=dtype), chip)
    return library_product(z, _by_columns(q, codes), None, dtype)


def _rounding(q: QuantizedTensor, codes: str) -> tuple[RoundingTensors, Rounding]:
    """Return the steps that round a gradient to codes, the scales of W in it."""
    return RoundingTensors(smooth=row_scale(q).contiguous()), Rounding(codes)


def cells(
    grad: Tensor, w: Tensor, w_scale: Tensor, w_scale_2: Tensor | None, formats: str, dtype: torch.dtype, *, chip: str
) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) of each kernel that a call launches: of codes the quantizer's and the product's."""
    q, codes = operands(grad, w, w_scale, w_scale_2, formats)
    choice = _choice_for_codes(q, codes, grad.shape[0], dtype, chip)
    if choice is not None:
        return (QUANTIZE_ACTIVATION.name, codes), choice.cell
    _require(grad, q, chip)
    return ((OP.name, q.format.name),)


def compare(result: Tensor, *arguments: Any, chip: str, sample: Sample) -> Verdict:
    """Compare the result of a call with float64. arguments: those of the op."""
    grad, w, w_scale, w_scale_2, formats, dtype = arguments
    q, codes = operands(grad, w, w_scale, w_scale_2, formats)
    m, k = result.shape
    rows, columns = picked(m, sample.tokens, grad.device), picked(k, sample.outputs, grad.device)
    if _choice_for_codes(q, codes, m, dtype, chip) is not None:
        z = quantize_activation(grad[rows].float() * row_scale(q), FORMATS[codes])
        what = Product(z, taken(_by_columns(q, codes), columns))
    else:
        rounded = ROUNDED_WEIGHTS if rounds_decoded(q, grad.dtype) else 0
        what = Product(grad[rows], q.dequantize()[:, columns].T, terms=rounded)
    return product(OP.name, result[rows][:, columns], what)


def compare_quantizer(*arguments: Any, chip: str, sample: Sample) -> Verdict:
    """Compare what the quantizer alone makes of the gradient of a call whose gradient becomes codes."""
    grad, w, w_scale, w_scale_2, formats, _ = arguments
    q, codes = operands(grad, w, w_scale, w_scale_2, formats)
    call = grad.contiguous(), *pack_named(*_rounding(q, codes))
    kernel = QUANTIZE_ACTIVATION.kernel
    return kernel.compare(kernel.launch(*call, chip=chip), *call, chip=chip, sample=sample)


def rounds_decoded(q: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Tell whether w16 has fewer bits than code · scale: where a row has a scale to itself, and as in the forward."""
    of_row = q.scale.ndim == 1 or (q.global_scale is not None and q.global_scale.ndim == 2)
    return of_row or rounds_weights(q.format, dtype)


def _require(grad: Tensor, q: QuantizedTensor, chip: str) -> None:
    """Raise NoKernel unless the chip has a kernel for these weights, and grad the 16 bit that it multiplies."""
    require(OP.name, q.format.name, chip)
    if grad.dtype not in FLOATS[:2]:
        kind = str(grad.dtype).removeprefix("torch.")
        raise NoKernel(
            f"{OP.name}: matrix units would round a gradient in {kind}; train in bfloat16 or float16 for the kernel",
            was_wrong=False,
        )


def _choice_for_codes(q: QuantizedTensor, codes: str, m: int, dtype: torch.dtype, chip: str) -> Choice | None:
    """Return what multiplies codes (m, N) of a gradient with those of W (N, K); None where they keep 16 bit."""
    if not codes:
        return None
    n, k = q.shape
    try:
        return choose_product(Scheme(FORMATS[codes], FORMATS[codes]), chip, m, k, n, dtype, "", n % 16 == 0)
    except NoKernel as error:
        if is_strict():
            raise
        _say_16_bit(codes, chip, str(error))
        return None


@functools.lru_cache(1024)
def _say_16_bit(codes: str, chip: str, why: str) -> None:
    logger.warning("gradients keep 16 bit on %s, not %s: %s", chip, codes, why)


def _by_columns(q: QuantizedTensor, codes: str) -> QuantizedTensor:
    """Return the codes of W (N, K) as a matrix (K, N) with scales of 1: those of W are in the gradient."""
    n, k = q.shape
    transposed = as_bytes(q.codes).t().contiguous().view(q.codes.dtype)
    return QuantizedTensor(
        transposed, torch.ones(k, dtype=torch.float32, device=q.codes.device), None, (k, n), FORMATS[codes]
    )


@triton.jit
def input_gradient_kernel(
    grad,  # (M, N) bf16 or fp16
    w,  # (N, K) as stored
    out,  # (M, K)
    M,
    N,
    K,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # 0 is the whole row
    SCALE_OF_ROW: tl.constexpr,  # whether rows have scales of their own
    GLOBAL_OF_ROW: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles of W end with it
    TILE: tl.constexpr,  # a MatmulTile, whose n are columns of W and k rows
):
    """One (BLOCK_M, BLOCK_K) tile of (grad · w16) · scales; reads grad, codes and scales."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.k
    BLOCK_K: tl.constexpr = TILE.n
    PER_BYTE: tl.constexpr = 2 if ELEMENT == "e2m1" or ELEMENT == "int4" else 1
    tile_m, tile_k = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K), TILE.group_m)
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    # Tiles over the edge read the last row of grad again, which costs no mask; what they compute of it is not stored.
    grad_rows = grad + tl.minimum(rows, M - 1)[:, None] * N
    places = tile_k * (BLOCK_K // PER_BYTE) + tl.arange(0, BLOCK_K // PER_BYTE)
    if GROUP:
        groups = tile_k * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        ns = start + tl.arange(0, BLOCK_N)
        w_rows = ns.to(tl.int64)
        pointers = w.codes + w_rows[:, None] * (K // PER_BYTE) + places[None, :]
        if EVEN:
            left = tl.load(grad_rows + ns[None, :])  # (BLOCK_M, BLOCK_N)
            stored = tl.load(pointers)  # (BLOCK_N, BLOCK_K / PER_BYTE)
        else:
            left = tl.load(grad_rows + ns[None, :], mask=(ns < N)[None, :], other=0.0)
            stored = tl.load(pointers, mask=(ns < N)[:, None] & (places < K // PER_BYTE)[None, :], other=0)
        right = unpack_codes(stored, ELEMENT, BLOCK_N, BLOCK_K)
        if GROUP:
            pointers_of_scale = w.scale + w_rows[:, None] * w.stride_scale + groups[None, :]
            if EVEN:
                block_scale = tl.load(pointers_of_scale)  # (BLOCK_N, BLOCK_K / GROUP)
            else:
                mask = (ns < N)[:, None] & (groups < K // GROUP)[None, :]
                block_scale = tl.load(pointers_of_scale, mask=mask, other=0)
            multiplier = decode_scale(block_scale, SCALE)
            if GLOBAL_OF_ROW:
                multiplier = multiplier * tl.load(w.global_scale + w_rows, mask=ns < N, other=0.0)[:, None]
            right = times_groups(right, multiplier, GROUP, BLOCK_N, BLOCK_K)
        elif SCALE_OF_ROW:
            right = right * tl.load(w.scale + w_rows, mask=ns < N, other=0.0)[:, None]
        acc = tl.dot(left, right.to(grad.dtype.element_ty), acc)
    if GROUP == 0 and not SCALE_OF_ROW:
        acc = acc * tl.load(w.scale)
    if w.global_scale is not None and not GLOBAL_OF_ROW:
        acc = acc * tl.load(w.global_scale)
    columns = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    tl.store(out + rows[:, None] * K + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)
