"""int8 and fp8 codes multiplied on the GPU's matrix units, with scales, bias and what follows in one pass.

    v = (float(xq · wq^T) · x_scale) · w_scale + b        int8 accumulates in int32, exactly; fp8 in fp32
    v = v + h · up^T                                      low-rank branch, h = x · down^T
    v = gelu(v)                                           tanh form
    y = residual + gate · v

The first line is the reference in quantize/ops.py, operation by operation; for int8 the result is its bits. The others
follow in fp32, so that y is rounded once where separate layers round after each step.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.cells import Cell
from fluxq.kernels.checks import EXACT, check_device, check_tensor
from fluxq.kernels.dequantize import check_stored
from fluxq.kernels.tiles import MatmulTile
from fluxq.quantize.tensor import QuantizedTensor

LARGEST_RANK = 256  # one tile of the low-rank branch holds every rank
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def scaled_matmul(
    x: QuantizedTensor,
    w: QuantizedTensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    gelu: bool = False,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: MatmulTile,
    out: Tensor | None = None,
) -> Tensor:
    """x (M, K) times w (N, K), both int8 or both fp8 with a scale per row; returns (M, N) of `dtype`.

    bias (N,). low_rank: h (M, R) and up (N, R), both bfloat16 or both float16, R at most 256. gate (B, N): a row for
    each of B images whose M / B tokens follow one another. residual (M, N). out (M, N): written instead of a new
    tensor. Raises ValueError for operands that do not fit.
    """
    (m, k), n, device = x.shape, w.shape[0], x.codes.device
    _check_operands(x, w)
    rank = 0
    h = up = None
    if low_rank is not None:
        h, up = low_rank
        rank = h.shape[-1]
        if not 1 <= rank <= LARGEST_RANK:
            raise ValueError(f"scaled_matmul: low_rank has rank {rank}, expected 1 to {LARGEST_RANK}: merge it into w")
        check_tensor("scaled_matmul: low_rank h", h, (m, rank), _FLOATS[:2], device)
        check_tensor("scaled_matmul: low_rank up", up, (n, rank), (h.dtype,), device)
    if bias is not None:
        check_tensor("scaled_matmul: bias", bias, (n,), _FLOATS, device)
    if residual is not None:
        check_tensor("scaled_matmul: residual", residual, (m, n), _FLOATS, device)
    images = 1
    if gate is not None:
        images = gate.shape[0] if gate.ndim == 2 else 0
        if images == 0 or m % images:
            raise ValueError(f"scaled_matmul: gate {(*gate.shape,)} does not split {m} tokens into equal images (B, N)")
        check_tensor("scaled_matmul: gate", gate, (images, n), _FLOATS, device)
    if dtype not in _FLOATS:
        raise ValueError(f"scaled_matmul: dtype is {dtype}, expected bfloat16, float16 or float32")
    if out is None:
        out = torch.empty(m, n, dtype=dtype, device=device)
    check_tensor("scaled_matmul: out", out, (m, n), (dtype,), device)
    check_device("scaled_matmul", device)
    grid = (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)
    scaled_matmul_kernel[grid](
        x.codes,
        w.codes,
        x.scale,
        w.scale,
        bias,
        h,
        up,
        gate,
        residual,
        out,
        m,
        n,
        k,
        rank,
        m // images,
        INTEGER=x.format.name == "int8",
        GELU=gelu,
        EVEN_K=k % tile.k == 0,
        ACC_SPLIT=tile.acc_split,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
        GROUP_M=tile.group_m,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    return out


def _check_operands(x: QuantizedTensor, w: QuantizedTensor) -> None:
    (m, k), name = x.shape, "scaled_matmul"
    if x.format != w.format or x.format.name not in ("int8", "fp8"):
        raise ValueError(
            f"{name}: x is {x.format.name} and w {w.format.name}, expected both int8 or both fp8; "
            "re-encode the weight, or dequantize both"
        )
    if m == 0:
        raise ValueError(f"{name}: x (0, {k}) has no rows, so there is nothing to launch; return an empty result")
    if w.shape[1] != k:
        raise ValueError(f"{name}: x (M, K) = {x.shape} does not fit w (N, K) = {w.shape}: K differs")
    if x.format.name == "int8" and k >= 2**17:
        raise ValueError(
            f"{name}: K is {k}, expected less than 131072, or int32 sums can overflow: split K, or use fp8"
        )
    check_stored(x, f"{name}: x")
    check_stored(w, f"{name}: w")
    if x.codes.device != w.codes.device:
        raise ValueError(f"{name}: x is on {x.codes.device} and w on {w.codes.device}: move one of them")


@triton.jit
def scaled_matmul_kernel(
    x,  # (M, K) int8 or fp8
    w,  # (N, K)
    x_scale,  # (M,) fp32
    w_scale,  # (N,) fp32
    bias,  # (N,) or None
    h,  # (M, R) or None
    up,  # (N, R) or None
    gate,  # (M / tokens, N) or None
    residual,  # (M, N) or None
    y,  # (M, N)
    M,
    N,
    K,
    R,
    tokens,  # of one image: rows that share a row of gate
    INTEGER: tl.constexpr,
    GELU: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One (BLOCK_M, BLOCK_N) tile of y = residual + gate · gelu((x · w^T) · x_scale · w_scale + bias + h · up^T)."""
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # Tiles over the edge read the last row again, which costs no mask; what they compute of it is not stored.
    x_rows = x + tl.minimum(rows, M - 1)[:, None] * K
    w_rows = w + tl.minimum(columns, N - 1)[:, None] * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGER else tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            left = tl.load(x_rows + ks[None, :])  # (BLOCK_M, BLOCK_K)
            right = tl.load(w_rows + ks[None, :])  # (BLOCK_N, BLOCK_K)
        else:
            left = tl.load(x_rows + ks[None, :], mask=(ks < K)[None, :], other=0.0)
            right = tl.load(w_rows + ks[None, :], mask=(ks < K)[None, :], other=0.0)
        if INTEGER:
            acc = tl.dot(left, right.T, acc, out_dtype=tl.int32)
        elif ACC_SPLIT:
            acc = tl.dot(left, right.T, acc, max_num_imprecise_acc=ACC_SPLIT)
        else:
            acc = tl.dot(left, right.T, acc)
    row_mask, column_mask = rows < M, columns < N
    mask = row_mask[:, None] & column_mask[None, :]
    value = acc.to(tl.float32) * tl.load(x_scale + rows, mask=row_mask, other=0.0)[:, None]
    value = value * tl.load(w_scale + columns, mask=column_mask, other=0.0)[None, :]
    if bias is not None:
        value = value + tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if h is not None:
        ranks = tl.arange(0, BLOCK_R)
        rank_mask = (ranks < R)[None, :]
        left = tl.load(h + rows[:, None] * R + ranks[None, :], mask=row_mask[:, None] & rank_mask, other=0.0)
        right = tl.load(up + columns[:, None] * R + ranks[None, :], mask=column_mask[:, None] & rank_mask, other=0.0)
        value = tl.dot(left, right.T, value)
    if GELU:
        value = gelu_tanh(value)
    if gate is not None:
        gates = tl.load(gate + (rows // tokens)[:, None] * N + columns[None, :], mask=mask, other=0.0)
        value = value * gates.to(tl.float32)
    if residual is not None:
        added = tl.load(residual + rows[:, None] * N + columns[None, :], mask=mask, other=0.0)
        value = value + added.to(tl.float32)
    tl.store(y + rows[:, None] * N + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def grouped_tile(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile_m, tile_n) of a program: down GROUP_M tiles of rows, then on to the next tile of columns."""
    in_group = GROUP_M * tiles_n
    first = program // in_group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + program % in_group % height, program % in_group // height


@triton.jit
def gelu_tanh(v):
    """v / 2 · (1 + tanh u), u = √(2/π) (v + 0.044715 v³), as v / (1 + e^(-2u))."""
    u = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    return tl.div_rn(v, 1.0 + tl.exp(-2.0 * u))


def _cell(code: str, m: int, n: int, *, fused: bool, targets: tuple[str, ...] = (), acc_split: int = 0) -> Cell:
    """8-bit codes with only a bias, or `fused` with everything that may follow at once."""
    name = {"i8": "int8", "fp8e4nv": "fp8"}[code]
    optional = dict.fromkeys(("h", "up", "gate", "residual"), "*bf16")
    arguments = {
        "x": f"*{code}",
        "w": f"*{code}",
        "x_scale": "*fp32",
        "w_scale": "*fp32",
        "bias": "*bf16",
        "y": "*bf16",
    }
    sizes = {"M": "i32", "N": "i32:16", "K": "i32:16", "R": "i32:16", "tokens": "i32"}
    tile = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128, "BLOCK_R": 32, "GROUP_M": 8}
    how = {"INTEGER": name == "int8", "GELU": fused, "EVEN_K": True, "ACC_SPLIT": acc_split}
    return Cell(
        scaled_matmul_kernel,
        f"{name} {m}x{n}" + " fused" * fused + f" split {acc_split}" * bool(acc_split),
        arguments | sizes | (optional if fused else {}),
        tile | how | ({} if fused else dict.fromkeys(optional)),
        {"num_warps": 8, "num_stages": 3} | EXACT,
        tensor_core=name,
        targets=targets,
    )


CELLS = (
    _cell("i8", 128, 128, fused=False),
    _cell("i8", 128, 128, fused=True),
    _cell("i8", 128, 256, fused=False, targets=("sm_90",)),
    _cell("fp8e4nv", 128, 128, fused=False),
    _cell("fp8e4nv", 128, 128, fused=True),
    _cell("fp8e4nv", 128, 128, fused=True, targets=("sm_90",), acc_split=128),
    _cell("fp8e4nv", 128, 256, fused=False, targets=("sm_90",)),
)
