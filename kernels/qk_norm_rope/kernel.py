"""Query and key heads through RMSNorm and rotary position embedding in one launch.

    r = 1 / √(mean(x²) + eps)            of each head
    v = x · r · weight                   rounded to x's dtype
    y = v · cos + rotate(v) · sin        rotate: each pair (a, b) becomes (-b, a)

in fp32 but for the rounding of v. A pair is two neighbours (Flux; the same arithmetic as the complex product of
Qwen-Image) or an element of either half. Bits are those of the reference in op.py but for the order in which x² is
added up: where these sums are exact, all of them are.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import EXACT, check_device, check_tensor
from fluxq.kernels.codes import rounded
from fluxq.kernels.compare import Sample, Verdict, picked, within, worst
from fluxq.kernels.dispatch import require
from fluxq.kernels.qk_norm_rope.op import OP, RopeTensors, check_positions, rotate
from fluxq.kernels.tensor import unpack_named
from fluxq.kernels.tiles import Tile, find_memory_tile

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CELL = OP.name, "16bit"


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    tensors: RopeTensors,
    *,
    eps: float,
    interleaved: bool = True,
    round_before_weight: bool = False,
    position: int = 0,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm and rotary embedding to q (B, S, H, D) and k (B, S, Hk, D), any strides but the last.

    The op of this name describes the tensors. Raises ValueError for tensors that do not fit.

    interleaved: pairs are neighbours; otherwise elements D / 2 apart.
    round_before_weight: also round x · r, as diffusers' RMSNorm does and torch.nn.RMSNorm does not.
    tile: rows are heads of a token, its columns hold a whole head.
    """
    cos, sin, q_weight, k_weight = tensors
    _check_input(q, k, tensors, position, tile)
    b, s, heads, d = q.shape
    q_out = torch.empty(b, s, heads, d, dtype=q.dtype, device=q.device)
    k_out = torch.empty(b, s, k.shape[2], d, dtype=k.dtype, device=k.device)
    qk_norm_rope_kernel[(b * s, 2)](
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        q_out,
        k_out,
        s,
        heads,
        k.shape[2],
        *q.stride()[:3],
        *k.stride()[:3],
        position,
        eps,
        D=d,
        INTERLEAVED=interleaved,
        ROUND_BEFORE_WEIGHT=round_before_weight,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        **EXACT,
    )
    return q_out, k_out


def launch(q: Tensor, k: Tensor, tensors: Sequence[Tensor], names: str, *how: Any, chip: str) -> tuple[Tensor, Tensor]:
    """Launch the op on a chip; ValueError where it has no kernel. how: the op's other arguments."""
    require(*CELL, chip)
    tile = find_memory_tile(OP.file, tuned_name(q.shape[-1]), chip, q.shape[0] * q.shape[1] * q.shape[2])
    named = dict(zip(("eps", "interleaved", "round_before_weight", "position"), how, strict=True))
    return qk_norm_rope(q, k, unpack_named(RopeTensors, tensors, names)[0], **named, tile=tile)


def cells(*arguments: Any, chip: str) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) that a chip must have for a call."""
    return (CELL,)


def compare(
    found: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    tensors: Sequence[Tensor],
    names: str,
    *how: Any,
    chip: str,
    sample: Sample,
) -> Verdict:
    """Compare results of a call with float64, within (roundings · u + 2^-20) · (|v · cos| + |rotate(v) · sin|).

    u: half the spacing of the dtype at 1. Rounded are v and y, and v twice more before a weight.
    """
    cos, sin, q_weight, k_weight = unpack_named(RopeTensors, tensors, names)[0]
    eps, interleaved, round_before_weight, position = how
    rows = picked(q.shape[1], sample.tokens, q.device)
    cos, sin = (table[position + rows, None].double() for table in (cos, sin))
    verdicts = []
    for name, x, weight, y in (("q", q, q_weight, found[0]), ("k", k, k_weight, found[1])):
        v = x[:, rows].double()
        v = v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
        v = v if weight is None else v * weight.double()
        terms, kind = (v * cos, rotate(v, interleaved) * sin), torch.finfo(x.dtype)
        unit = (4 if round_before_weight else 2) * kind.eps / 2 + 2.0**-20
        bound = unit * (terms[0].abs() + terms[1].abs()) + 2 * kind.smallest_normal * kind.eps
        verdicts.append(within(name, y[:, rows], terms[0] + terms[1], bound))
    return worst(*verdicts)


def tuned_name(d: int) -> str:
    """Return the name in kernels/tuned of the tile for heads of d: its columns."""
    return str(max(64, triton.next_power_of_2(d)))


def _check_input(q: Tensor, k: Tensor, tensors: RopeTensors, position: int, tile: Tile) -> None:
    cos, sin, q_weight, k_weight = tensors
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4 or x.dtype not in FLOATS or 0 in x.shape or x.shape[-1] % 2:
            raise ValueError(
                f"qk_norm_rope: {name} is {x.dtype} {(*x.shape,)}, expected (B, S, heads, D) of bfloat16, float16 or "
                "float32, no axis empty and D even: .unflatten(-1, (heads, D)) splits heads"
            )
        if x.stride(3) != 1:
            raise ValueError(
                f"qk_norm_rope: {name} has strides {x.stride()}, expected a last axis of 1: pass .contiguous()"
            )
    b, s, _, d = q.shape
    if (k.shape[0], k.shape[1], k.shape[3]) != (b, s, d) or k.dtype != q.dtype or k.device != q.device:
        raise ValueError(
            f"qk_norm_rope: k is {k.dtype} {(*k.shape,)} on {k.device}, q {q.dtype} {(*q.shape,)} on {q.device}: "
            "only their heads may differ in number"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_tensor(f"qk_norm_rope: {name}", weight, (d,), (q.dtype,), q.device)
    positions = cos.shape[0] if cos.ndim == 2 else 0
    check_tensor("qk_norm_rope: cos", cos, (positions, d), (torch.float32,), q.device)
    check_tensor("qk_norm_rope: sin", sin, (positions, d), (torch.float32,), q.device)
    check_positions(q, cos, position)
    if tile.columns < d:
        raise ValueError(f"qk_norm_rope: tile.columns is {tile.columns}, expected a power of two from D = {d} on")
    check_device("qk_norm_rope", q.device)


@triton.jit
def qk_norm_rope_kernel(
    q,  # (B, S, H, D)
    k,  # (B, S, Hk, D)
    q_weight,  # (D,) or None
    k_weight,
    cos,  # (positions, D) fp32
    sin,
    q_out,  # (B, S, H, D), contiguous
    k_out,
    S,
    H,
    HK,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    position,  # of the first token
    eps,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = v · cos + rotate(v) · sin for all heads of one token, of q or of k; reads each once, writes it once."""
    token = tl.program_id(0).to(tl.int64)
    image, s = token // S, token % S
    cos += (position + s) * D
    sin += (position + s) * D
    if tl.program_id(1) == 0:
        x = q + image * stride_qb + s * stride_qs
        y = q_out + token * H * D
        norm_rope_heads(x, q_weight, cos, sin, y, H, stride_qh, eps, D, INTERLEAVED, ROUND_BEFORE_WEIGHT, ROWS, COLUMNS)
    else:
        x = k + image * stride_kb + s * stride_ks
        y = k_out + token * HK * D
        norm_rope_heads(
            x, k_weight, cos, sin, y, HK, stride_kh, eps, D, INTERLEAVED, ROUND_BEFORE_WEIGHT, ROWS, COLUMNS
        )


@triton.jit
def norm_rope_heads(
    x,  # (heads, D)
    weight,  # (D,) or None
    cos,  # (D,)
    sin,
    y,  # (heads, D), contiguous
    heads,
    stride_x,
    eps,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the heads of one token, ROWS at a time, all values as the first and second elements of pairs."""
    only = tl.zeros((1,), tl.int32)
    cos_a, cos_b = load_pairs(cos + only, only == 0, D, INTERLEAVED, 1, COLUMNS)  # (1, COLUMNS / 2)
    sin_a, sin_b = load_pairs(sin + only, only == 0, D, INTERLEAVED, 1, COLUMNS)
    if weight is not None:
        weight_a, weight_b = load_pairs(weight + only, only == 0, D, INTERLEAVED, 1, COLUMNS)
    for start in range(0, heads, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        a, b = load_pairs(x + rows * stride_x, rows < heads, D, INTERLEAVED, ROWS, COLUMNS)  # (ROWS, COLUMNS / 2)
        mean = tl.div_rn(tl.sum(a * a + b * b, 1), D * 1.0)
        r = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
        a = a * r
        b = b * r
        if weight is not None:
            if ROUND_BEFORE_WEIGHT:
                a = rounded(a, x)
                b = rounded(b, x)
            a = a * weight_a
            b = b * weight_b
        a = rounded(a, x)
        b = rounded(b, x)
        store_pairs(
            y + rows * D, a * cos_a - b * sin_a, b * cos_b + a * sin_b, rows < heads, D, INTERLEAVED, ROWS, COLUMNS
        )


@triton.jit
def load_pairs(x, row_mask, D: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load first and second elements, fp32 (ROWS, COLUMNS / 2) each, of the pairs in rows of D from x (ROWS,) on."""
    if INTERLEAVED:
        columns = tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (columns < D)[None, :]
        values = tl.load(x[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(values, (ROWS, COLUMNS // 2, 2)))
    else:
        columns = tl.arange(0, COLUMNS // 2)
        mask = row_mask[:, None] & (columns < D // 2)[None, :]
        a = tl.load(x[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x[:, None] + D // 2 + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(
    y, a, b, row_mask, D: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Invert `load_pairs`."""
    dtype = y.dtype.scalar.element_ty
    if INTERLEAVED:
        columns = tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (columns < D)[None, :]
        tl.store(y[:, None] + columns[None, :], tl.reshape(tl.join(a, b), (ROWS, COLUMNS)).to(dtype), mask=mask)
    else:
        columns = tl.arange(0, COLUMNS // 2)
        mask = row_mask[:, None] & (columns < D // 2)[None, :]
        tl.store(y[:, None] + columns[None, :], a.to(dtype), mask=mask)
        tl.store(y[:, None] + D // 2 + columns[None, :], b.to(dtype), mask=mask)
