"""Epilogue of a product, in the same pass.

    v = v + b
    v = v + h · up^T          low-rank branch, h = x · down^T
    v = gelu(v)               tanh form
    y = residual + gate · v

v is fp32 up to gelu and rounded once; gate and residual round as torch does when it multiplies and adds.

A matmul's wrapper takes an `Epilogue`, its kernel a `Following`, with which it ends in `finish`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import EXACT, check_tensor
from fluxq.kernels.codes import rounded
from fluxq.kernels.compare import Product, Sample, Verdict, picked, product, taken
from fluxq.kernels.dispatch import Choice, choose_product, layout_of, require
from fluxq.kernels.library import library_product, library_takes
from fluxq.kernels.op import Op
from fluxq.kernels.products import ProductTensors, as_multiplied, formats_of
from fluxq.kernels.tensor import QuantizedTensor, unpack_named
from fluxq.kernels.tiles import cdiv
from fluxq.recipes.formats import Format, Scheme

ROUNDED_WEIGHTS = 2**16  # roundings of fp32 that one to bfloat16 counts as
LARGEST_RANK = 64  # one tile of the low-rank branch holds every rank
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class LowRank(NamedTuple):
    """h (M, R) and up (N, R) of a low-rank branch, as a kernel takes them; BLOCK_R: a power of two, at least R."""

    h: Any
    up: Any
    R: Any
    BLOCK_R: Any


class Gate(NamedTuple):
    """A gate (M / tokens, N) as a kernel takes it: one of its rows for so many tokens."""

    rows: Any
    tokens: Any


class Following(NamedTuple):
    """Steps behind a product, as one argument of its kernel. One that is None costs kernel and launch nothing.

    bias: (N,). gelu: True or None. residual: (M, N). y: (M, N), which is written.
    """

    bias: Any
    low_rank: Any
    gelu: Any
    gate: Any
    residual: Any
    y: Any


@dataclass(frozen=True)
class Epilogue:
    """Steps that follow a product (M, N), and the dtype of the result; all tensors contiguous.

    bias: (N,).
    low_rank: h (M, R) and up (N, R), both bfloat16 or both float16, R at most 64.
    gate: (B, N), a row for each of B images whose M / B tokens follow one another.
    residual: (M, N).
    """

    bias: Tensor | None = None
    low_rank: tuple[Tensor, Tensor] | None = None
    gelu: bool = False
    gate: Tensor | None = None
    residual: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def is_rounded_first(self) -> bool:
        """Tell whether what follows a bias, if anything, comes after the rounding: gate and residual."""
        return not self.gelu and self.low_rank is None

    @property
    def is_gated(self) -> bool:
        """Tell whether a gate or a residual follows."""
        return self.gate is not None or self.residual is not None

    def following(self, name: str, m: int, n: int, device: torch.device, y: Tensor | None = None) -> Following:
        """Return the argument of a kernel that ends in `finish`; y (M, N) is a new tensor if none is given.

        name: of the matmul, for errors. Raises ValueError for tensors that do not fit.
        """
        if self.bias is not None:
            check_tensor(f"{name}: bias", self.bias, (n,), FLOATS, device)
        if self.residual is not None:
            check_tensor(f"{name}: residual", self.residual, (m, n), FLOATS, device)
        if self.dtype not in FLOATS:
            raise ValueError(f"{name}: dtype is {self.dtype}, expected bfloat16, float16 or float32")
        low_rank, gate = self._low_rank(name, m, n, device), self._gate(name, m, n, device)
        y = torch.empty(m, n, dtype=self.dtype, device=device) if y is None else y
        return Following(self.bias, low_rank, YES if self.gelu else None, gate, self.residual, y)

    def _low_rank(self, name: str, m: int, n: int, device: torch.device) -> LowRank | None:
        if self.low_rank is None:
            return None
        h, up = self.low_rank
        rank = h.shape[-1]
        if not 1 <= rank <= LARGEST_RANK:
            raise ValueError(f"{name}: low_rank has rank {rank}, expected 1 to {LARGEST_RANK}: merge it into w")
        check_tensor(f"{name}: low_rank h", h, (m, rank), FLOATS[:2], device)
        check_tensor(f"{name}: low_rank up", up, (n, rank), (h.dtype,), device)
        return LowRank(h, up, rank, tl.constexpr(max(16, triton.next_power_of_2(rank))))

    def _gate(self, name: str, m: int, n: int, device: torch.device) -> Gate | None:
        if self.gate is None:
            return None
        images = self.gate.shape[0] if self.gate.ndim == 2 else 0
        if images == 0 or m % images:
            raise ValueError(f"{name}: gate {(*self.gate.shape,)} does not split {m} tokens into equal images (B, N)")
        check_tensor(f"{name}: gate", self.gate, (images, n), FLOATS, device)
        return Gate(self.gate, m // images)


YES = tl.constexpr(True)
NOTHING = Epilogue()
GATED_TILE = {"ROWS": 4, "COLUMNS": 512}  # of `gate_kernel`, for 4 warps


def launch_product(
    op: Op,
    x: Tensor,
    tensors: Sequence[Tensor],
    formats: str,
    gelu: bool,
    dtype: torch.dtype,
    *,
    chip: str,
    in_16_bit: bool = False,
) -> Tensor:
    """Launch an op of products.py: the `multiply` of its kernel's file, or of codes the library's product.

    in_16_bit: whether x is values, not codes.
    """
    operands, names = unpack_named(ProductTensors, tensors, formats)
    epilogue = _following(operands, gelu, dtype)
    if in_16_bit or names not in op.formats:
        require(op.name, names, chip)
        return op.kernel.multiply(x, _weight(operands, names), None, epilogue, chip)
    left, w = _codes(x, operands, names), _weight(operands, names)
    if _chosen(left, w, operands.row_scale, epilogue, chip).implementation != op.name:
        return gate_in_place(library_product(left, w, operands.bias, dtype), epilogue)
    return op.kernel.multiply(left, w, operands.row_scale, epilogue, chip)


def gate_in_place(y: Tensor, epilogue: Epilogue) -> Tensor:
    """Compute residual + gate · y in place of a product y (M, N) whose kernel does not add them."""
    if not epilogue.is_gated:
        return y
    (m, n), columns = y.shape, GATED_TILE["COLUMNS"]
    last = Epilogue(gate=epilogue.gate, residual=epilogue.residual, dtype=epilogue.dtype)
    following = last.following("gate_in_place", m, n, y.device, y)
    grid = cdiv(m, GATED_TILE["ROWS"]), cdiv(n, columns)
    gate_kernel[grid](following, m, n, **GATED_TILE, num_warps=4, **EXACT)
    return y


def _weight(operands: ProductTensors, names: str) -> QuantizedTensor:
    """Return w (N, K) of a product. names: of its formats, "weights" or "weights-activations"."""
    return QuantizedTensor.stored(operands.w, operands.w_scale, operands.w_scale_2, formats_of(names)[0])


def _codes(x: Tensor, operands: ProductTensors, names: str) -> QuantizedTensor:
    """Return x (M, K) of a product of codes."""
    return QuantizedTensor.stored(x, operands.x_scale, operands.x_scale_2, formats_of(names)[1])


def _following(operands: ProductTensors, gelu: bool, dtype: torch.dtype) -> Epilogue:
    low_rank = None if operands.h is None or operands.up is None else (operands.h, operands.up)
    return Epilogue(operands.bias, low_rank, gelu, operands.gate, operands.residual, dtype)


def _chosen(x: QuantizedTensor, w: QuantizedTensor, row_scale: Tensor | None, epilogue: Epilogue, chip: str) -> Choice:
    """Return the choice of what multiplies codes."""
    scheme = Scheme(w.format, x.format, static_input=x.global_scale is not None)
    library = epilogue.is_rounded_first and library_takes(x, w)
    return choose_product(scheme, chip, x.shape[0], *w.shape, epilogue.dtype, layout_of(w, row_scale), library)


def product_cells(
    op: Op,
    x: Tensor,
    tensors: Sequence[Tensor],
    formats: str,
    gelu: bool,
    dtype: torch.dtype,
    *,
    chip: str,
    in_16_bit: bool = False,
) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) that `launch_product` launches: that of the kernel, or of the library's product."""
    operands, names = unpack_named(ProductTensors, tensors, formats)
    if in_16_bit or names not in op.formats:
        return ((op.name, names),)
    left, w = _codes(x, operands, names), _weight(operands, names)
    return (_chosen(left, w, operands.row_scale, _following(operands, gelu, dtype), chip).cell,)


def compare_product(
    op: Op, result: Tensor, *arguments: Any, chip: str, sample: Sample, in_16_bit: bool = False
) -> Verdict:
    """Compare the result of a call of an op of products.py with float64. arguments: those of the op."""
    x, tensors, formats, gelu, _ = arguments
    operands, names = unpack_named(ProductTensors, tensors, formats)
    m, n = result.shape
    rows, outputs = picked(m, sample.tokens, x.device), picked(n, sample.outputs, x.device)
    w = taken(_weight(operands, names), outputs)
    left: Tensor | QuantizedTensor = x[rows]
    if not in_16_bit:
        left = taken(_codes(x, operands, names), rows)
        w = as_multiplied(w, left.format, None if operands.row_scale is None else operands.row_scale[outputs])
    low_rank = None if operands.h is None or operands.up is None else (operands.h[rows], operands.up[outputs])
    what = Product(
        left,
        w,
        None if operands.bias is None else operands.bias[outputs],
        low_rank,
        gelu,
        None if operands.gate is None else operands.gate[rows // (m // operands.gate.shape[0])][:, outputs],
        None if operands.residual is None else operands.residual[rows][:, outputs],
        terms=ROUNDED_WEIGHTS if in_16_bit and rounds_weights(w.format, x.dtype) else 0,
    )
    return product(op.name, result[rows][:, outputs], what)


def rounds_weights(weights: Format, dtype: torch.dtype) -> bool:
    """Tell whether decoded weights are rounded to the type of 16-bit activations: of int4 scales take all its bits."""
    return weights.element.name == "int4" and dtype == torch.bfloat16


@triton.jit
def gate_kernel(
    following,  # of its steps a gate, a residual or both
    M,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = residual + gate · y."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    value = tl.load(following.y + rows[:, None] * N + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    finish(value, rows, columns, M, N, following)


@triton.jit
def finish(
    value,  # fp32, for `rows` and `columns`
    rows,  # int64
    columns,  # int64
    M,
    N,
    following,
):
    """y = residual + gate · gelu(value + bias + h · up^T), for the rows below M and the columns below N.

    Gate and residual round where torch does.
    """
    y = following.y
    row_mask, column_mask = rows < M, columns < N
    mask = row_mask[:, None] & column_mask[None, :]
    if following.bias is not None:
        value = value + tl.load(following.bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if following.low_rank is not None:
        value = add_low_rank(value, rows, columns, row_mask, column_mask, following.low_rank)
    if following.gelu:
        value = gelu_tanh(value)
    if following.gate is not None or following.residual is not None:
        value = rounded(value, y)
    if following.gate is not None:
        gate = following.gate.rows
        places = (rows // following.gate.tokens)[:, None] * N + columns[None, :]
        value = value * tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
        if gate.dtype.element_ty == y.dtype.element_ty:  # of two types torch makes fp32
            value = rounded(value, y)
    if following.residual is not None:
        added = tl.load(following.residual + rows[:, None] * N + columns[None, :], mask=mask, other=0.0)
        value = value + added.to(tl.float32)
    tl.store(y + rows[:, None] * N + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def add_low_rank(value, rows, columns, row_mask, column_mask, low_rank):
    """Return value + h · up^T."""
    h, up, R = low_rank.h, low_rank.up, low_rank.R
    ranks = tl.arange(0, low_rank.BLOCK_R)
    rank_mask = (ranks < R)[None, :]
    left = tl.load(h + rows[:, None] * R + ranks[None, :], mask=row_mask[:, None] & rank_mask, other=0.0)
    right = tl.load(up + columns[:, None] * R + ranks[None, :], mask=column_mask[:, None] & rank_mask, other=0.0)
    return tl.dot(left, right.T, value)


@triton.jit
def gelu_tanh(v):
    """v / 2 · (1 + tanh u), u = √(2/π) (v + 0.044715 v³), as v / (1 + e^(-2u)).

    By a true division, unlike the passes over memory: its slow path keeps the compiler from working on all elements of
    a tile at once, for which there are no registers beside the sums.
    """
    u = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    return tl.div_rn(v, 1.0 + tl.exp(-2.0 * u))
