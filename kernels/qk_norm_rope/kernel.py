"""Query and key heads through RMSNorm and rotary position embedding in one launch, of one stream or of two.

    r = 1 / √(mean(x²) + eps)            of each head
    v = x · r · weight                   rounded to x's dtype
    y = v · cos + rotate(v) · sin        rotate: each pair (a, b) becomes (-b, a)

in fp32 but for the rounding of v. A pair is two neighbours (Flux; the same arithmetic as the complex product of
Qwen-Image) or an element of either half. Bits are those of the reference in op.py but for the order in which x² is
added up: where these sums are exact, all of them are.

The tokens of two streams are written one stream after the other, and so is the attention's v, which is copied.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import EXACT, check_device, check_tensor
from fluxq.kernels.codes import rounded, widened
from fluxq.kernels.compare import Sample, Verdict, picked, same, within, worst
from fluxq.kernels.dispatch import require
from fluxq.kernels.qk_norm_rope.op import OP, Heads, RopeTensors, check_rows, rotate, streams_of, tokens_of
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
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Apply RMSNorm and rotary embedding to q (B, S, H, D) and k (B, S, Hk, D), any strides but the last.

    The op of this name describes the tensors. Returns q, k and v of all streams, v None without one. Raises ValueError
    for tensors that do not fit.

    interleaved: pairs are neighbours; otherwise elements D / 2 apart.
    round_before_weight: also round x · r, as diffusers' RMSNorm does and torch.nn.RMSNorm does not.
    tile: rows are heads of a token, its columns hold a whole head.
    """
    streams = streams_of(q, k, tensors)
    _check_input(streams, tensors, tile)
    (b, first, heads, d), k_heads = q.shape, k.shape[2]
    tokens = sum(stream.q.shape[1] for stream in streams)
    q_out = torch.empty(b, tokens, heads, d, dtype=q.dtype, device=q.device)
    k_out = torch.empty(b, tokens, k_heads, d, dtype=k.dtype, device=k.device)
    v_out = None if tensors.v is None else torch.empty(b, tokens, k_heads, d, dtype=k.dtype, device=k.device)
    qk_norm_rope_kernel[(b * tokens, 2 if v_out is None else 3)](
        _arguments(streams[0]),
        _arguments(streams[1]) if len(streams) == 2 else None,
        (tensors.cos, tensors.sin),
        (q_out, k_out, v_out),
        tokens,
        first,
        heads,
        k_heads,
        eps,
        TWO=len(streams) == 2,
        D=d,
        INTERLEAVED=interleaved,
        ROUND_BEFORE_WEIGHT=round_before_weight,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        **EXACT,
    )
    return q_out, k_out, v_out


def _arguments(stream: Heads) -> tuple[Any, ...]:
    """Return a stream as the kernel takes it: q, k, v, both weights, strides of q, k and v."""
    q, k, v, q_weight, k_weight = stream
    return q, k, v, q_weight, k_weight, q.stride()[:3], k.stride()[:3], None if v is None else v.stride()[:3]


def launch(
    q: Tensor, k: Tensor, tensors: Sequence[Tensor], names: str, *how: Any, chip: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the op on a chip; ValueError where it has no kernel. how: the op's other arguments."""
    require(*CELL, chip)
    heads = tokens_of(q, tensors, names) * q.shape[2]
    tile = find_memory_tile(OP.file, tuned_name(q.shape[-1]), chip, heads)
    named = dict(zip(("eps", "interleaved", "round_before_weight"), how, strict=True))
    q, k, v = qk_norm_rope(q, k, unpack_named(RopeTensors, tensors, names)[0], **named, tile=tile)
    return q, k, q.new_empty(0) if v is None else v


def cells(*arguments: Any, chip: str) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) that a chip must have for a call."""
    return (CELL,)


def compare(
    results: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    tensors: Sequence[Tensor],
    names: str,
    *how: Any,
    chip: str,
    sample: Sample,
) -> Verdict:
    """Compare results of a call with float64, within (roundings · u + 2^-20) · (|v · cos| + |rotate(v) · sin|).

    u: half the spacing of the dtype at 1. Rounded are v and y, and v twice more before a weight. The attention's v is
    compared by its bytes.
    """
    operands = unpack_named(RopeTensors, tensors, names)[0]
    eps, interleaved, round_before_weight = how
    streams = streams_of(q, k, operands)
    counts = [stream.q.shape[1] for stream in streams]
    rows = picked(sum(counts), sample.tokens, q.device)
    places = [rows[rows < counts[0]], *(rows[rows >= counts[0]] - counts[0] for _ in streams[1:])]
    cos, sin = (None if table is None else table[rows, None].double() for table in (operands.cos, operands.sin))
    verdicts = []
    for name, y in zip(("q", "k"), results, strict=False):
        parts = [
            _normed_64(getattr(stream, name)[:, at], getattr(stream, f"{name}_weight"), eps)
            for stream, at in zip(streams, places, strict=True)
        ]
        v = torch.cat(parts, 1)
        terms, kind = (v, 0 * v), torch.finfo(q.dtype)
        if cos is not None and sin is not None:
            terms = v * cos, rotate(v, interleaved) * sin
        unit = (4 if round_before_weight else 2) * kind.eps / 2 + 2.0**-20
        bound = unit * (terms[0].abs() + terms[1].abs()) + 2 * kind.smallest_normal * kind.eps
        verdicts.append(within(name, y[:, rows], terms[0] + terms[1], bound))
    if operands.v is not None:
        vs = [stream.v[:, at] for stream, at in zip(streams, places, strict=True) if stream.v is not None]
        verdicts.append(same("v", results[2][:, rows], torch.cat(vs, 1)))
    return worst(*verdicts)


def _normed_64(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    v = x.double()
    v = v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    return v if weight is None else v * weight.double()


def tuned_name(d: int) -> str:
    """Return the name in kernels/tuned of the tile for heads of d: its columns."""
    return str(max(64, triton.next_power_of_2(d)))


def _check_input(streams: Sequence[Heads], tensors: RopeTensors, tile: Tile) -> None:
    first = streams[0]
    _check_stream(first, first, "")
    for second in streams[1:]:
        _check_stream(second, first, "2")
    tokens, d, device = sum(stream.q.shape[1] for stream in streams), first.q.shape[3], first.q.device
    for name, table in (("cos", tensors.cos), ("sin", tensors.sin)):
        if table is not None:
            check_tensor(f"qk_norm_rope: {name}", table, (table.shape[0], d), (torch.float32,), device)
    check_rows(tensors, tokens)
    if tile.columns < d:
        raise ValueError(f"qk_norm_rope: tile.columns is {tile.columns}, expected a power of two from D = {d} on")
    check_device("qk_norm_rope", device)


def _check_stream(stream: Heads, first: Heads, number: str) -> None:
    """Raise ValueError unless the tensors of a stream fit each other and those of the first one."""
    dtype, device = first.q.dtype, first.q.device
    for name, x in (("q", stream.q), ("k", stream.k), ("v", stream.v)):
        if x is None:
            continue
        if x.ndim != 4 or x.dtype not in FLOATS or 0 in x.shape or x.shape[-1] % 2:
            raise ValueError(
                f"qk_norm_rope: {name}{number} is {x.dtype} {(*x.shape,)}, expected (B, S, heads, D) of bfloat16, "
                "float16 or float32, no axis empty and D even: .unflatten(-1, (heads, D)) splits heads"
            )
        if x.stride(3) != 1:
            raise ValueError(
                f"qk_norm_rope: {name}{number} has strides {x.stride()}, expected a last axis of 1: pass .contiguous()"
            )
        heads = (first.q if name == "q" else first.k).shape[2]
        shape = first.q.shape[0], stream.q.shape[1], heads, first.q.shape[3]
        if (*x.shape,) != shape or x.dtype != dtype or x.device != device:
            raise ValueError(
                f"qk_norm_rope: {name}{number} is {x.dtype} {(*x.shape,)} on {x.device}, expected {dtype} {shape} on "
                f"{device}: only heads of k and v may differ from q's in number, and tokens of a second stream"
            )
    for name, weight in (("q", stream.q_weight), ("k", stream.k_weight)):
        if weight is not None:
            check_tensor(f"qk_norm_rope: {name}{number}_weight", weight, (first.q.shape[3],), (dtype,), device)


@triton.jit
def qk_norm_rope_kernel(
    first,  # a stream's q (B, S, H, D), k and v (B, S, HK, D), weights of q and k (D,), strides of q, k and v
    second,  # the same of a second one, or None
    table,  # cos and sin (S, D) fp32
    outputs,  # q, k and v of both, contiguous
    S,  # tokens of both
    S_FIRST,
    H,
    HK,
    eps,
    TWO: tl.constexpr,  # whether there is a second: of a tuple that holds None the compiler cannot tell
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute all heads of one token, of q, k or v; reads each once, writes it once. Weights, table and v may be None.

    y = v · cos + rotate(v) · sin of q and k.
    """
    token = tl.program_id(0).to(tl.int64)
    image, s = token // S, token % S
    cos, sin = table
    if cos is not None:
        cos += s * D
        sin += s * D
    q_out, k_out, v_out = outputs
    q_out += token * H * D
    k_out += token * HK * D
    if v_out is not None:
        v_out += token * HK * D
    angles, out = (cos, sin), (q_out, k_out, v_out)
    if not TWO:
        stream_heads(first, image, s, angles, out, H, HK, eps, D, INTERLEAVED, ROUND_BEFORE_WEIGHT, ROWS, COLUMNS)
    elif s < S_FIRST:
        stream_heads(first, image, s, angles, out, H, HK, eps, D, INTERLEAVED, ROUND_BEFORE_WEIGHT, ROWS, COLUMNS)
    else:
        stream_heads(
            second, image, s - S_FIRST, angles, out, H, HK, eps, D, INTERLEAVED, ROUND_BEFORE_WEIGHT, ROWS, COLUMNS
        )


@triton.jit
def stream_heads(
    stream,
    image,
    s,  # of the stream's tokens
    angles,  # cos and sin (D,)
    out,  # q (H, D), k and v (HK, D), contiguous
    H,
    HK,
    eps,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the heads of one token of a stream: of q, k or v by the program's second number."""
    q, k, v, q_weight, k_weight, q_strides, k_strides, v_strides = stream
    part = tl.program_id(1)
    if part == 0:
        x = q + image * q_strides[0] + s * q_strides[1]
        norm_rope_heads(
            x, q_weight, angles, out[0], H, q_strides[2], eps, D, INTERLEAVED, ROUND_BEFORE_WEIGHT, ROWS, COLUMNS
        )
    elif part == 1:
        x = k + image * k_strides[0] + s * k_strides[1]
        norm_rope_heads(
            x, k_weight, angles, out[1], HK, k_strides[2], eps, D, INTERLEAVED, ROUND_BEFORE_WEIGHT, ROWS, COLUMNS
        )
    elif v is not None:
        copy_heads(v + image * v_strides[0] + s * v_strides[1], out[2], HK, v_strides[2], D, ROWS, COLUMNS)


@triton.jit
def copy_heads(x, y, heads, stride_x, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy heads of D from x to y (heads, D), contiguous."""
    columns = tl.arange(0, COLUMNS)[None, :]
    for begin in range(0, heads, ROWS):
        rows = (begin + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (rows < heads) & (columns < D)
        tl.store(y + rows * D + columns, tl.load(x + rows * stride_x + columns, mask=mask), mask=mask)


@triton.jit
def norm_rope_heads(
    x,  # (heads, D)
    weight,  # (D,) or None
    angles,  # cos and sin (D,), or None and None
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
    cos, sin = angles
    if cos is not None:
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
        if cos is not None:
            a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        store_pairs(y + rows * D, a, b, rows < heads, D, INTERLEAVED, ROWS, COLUMNS)


@triton.jit
def load_pairs(x, row_mask, D: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load first and second elements, fp32 (ROWS, COLUMNS / 2) each, of the pairs in rows of D from x (ROWS,) on."""
    if INTERLEAVED:
        columns = tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (columns < D)[None, :]
        values = widened(tl.load(x[:, None] + columns[None, :], mask=mask, other=0.0))
        a, b = tl.split(tl.reshape(values, (ROWS, COLUMNS // 2, 2)))
    else:
        columns = tl.arange(0, COLUMNS // 2)
        mask = row_mask[:, None] & (columns < D // 2)[None, :]
        a = widened(tl.load(x[:, None] + columns[None, :], mask=mask, other=0.0))
        b = widened(tl.load(x[:, None] + D // 2 + columns[None, :], mask=mask, other=0.0))
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
