"""Attention with 8-bit codes on the GPU: q, k and v to codes, then one pass over all keys for each tile of queries.

Formulas, roundings and layouts are those of kernels/attention/op.py, but for the order of values (`in_order`). Codes
and scales are the reference's bytes for the means of k that the kernels find, which differ in the order of their sums;
o is within the bound that tests/attention_bounds.py states. Logits and weights never leave the processor. The types of
q and v say which row of CODES a launch computes.

The bound takes sums of fp8 products to be fp32's. Hopper's matrix units hold fewer bits: with `acc_split` that is so
for the D products of a logit and for one block of keys at a time, and sums over blocks are fp32's. Each block of keys
then has an accumulator of its own: with one that lives through the loop ptxas lets each product wait for the last.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels import dispatch, findings, plans
from fluxq.kernels.attention import op as reference
from fluxq.kernels.attention.op import CODES, HEAD_SIZES, KEY_BLOCK, OP, P_EXPONENT, QUERY_BLOCK, Operands, format_of
from fluxq.kernels.attention_peers import peers_for
from fluxq.kernels.checks import EXACT, as_bytes, check_device
from fluxq.kernels.codes import amax_bits, encode, magnitude_bits, quotient, row_step, widened
from fluxq.kernels.compare import Sample, Verdict, near, within
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.scaled_matmul.kernel import add_product
from fluxq.kernels.tiles import MatmulTile, Tile, cdiv, find_matmul_tile, find_memory_tile


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    codes: str = "fp8",
    *,
    tile: MatmulTile,
    quantize_tile: Tile,
) -> Tensor:
    """Compute attention of q (B, S, H, D) to k and v (B, Skv, H, D), any strides but the last; contiguous (B, S, H, D).

    D is one of HEAD_SIZES. Raises ValueError for tensors that the kernels do not take.

    scale: of the logits, None for 1 / √D.
    codes: a row of CODES.
    tile: m queries, n = KEY_BLOCK keys, k = D.
    quantize_tile: rows are tokens, a divisor of both blocks; its columns hold a head.
    """
    _check_input(q, k, v, codes)
    if not q.shape[0] * q.shape[1] * q.shape[2]:
        raise ValueError(f"attention_fp8: q {(*q.shape,)} is empty, so there is nothing to launch; return it")
    operands = quantize_operands(q, k, v, codes, tile=quantize_tile)
    return attend(operands, q.shape[1], k.shape[1], reference.logit_scale(q, scale), q.dtype, tile=tile)


def launch(q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str = "fp8", *, chip: str) -> Tensor:
    """Launch the op on a chip; ValueError where it has no kernel."""
    reference.check_attention(q, k, v, codes)
    if not q.numel():
        return q.new_empty(q.shape)
    d, form = q.shape[3], format_of(codes, q.shape[3])
    if why := dispatch.refusal(OP.name, form, chip):
        raise dispatch.NoKernel(
            f"attention_fp8: no kernel for {codes} and heads of {d} elements on {chip} ({why}); compute attention in "
            "16 bit: fluxq.set_attention(model, '16bit')",
            was_wrong=bool(findings.wrong(OP.name, form, chip)),
        )
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    name = _chosen(q, k, codes, chip)
    if name == dispatch.WARPS_APART:
        return by_warps_apart(q, k, v, scale, codes, chip=chip)
    if name != OP.name:
        return by_peer(name, q, k, v, scale, codes, chip=chip)
    return by_kernel(q, k, v, scale, codes, chip=chip)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str = "fp8", *, chip: str) -> Tensor:
    """Compute by our own kernel, whatever was faster; the last axis of q, k and v has stride 1."""
    d, form = q.shape[3], format_of(codes, q.shape[3])
    tile = find_matmul_tile(OP.file, form, chip, q.shape[1])
    quantize_tile = find_memory_tile(OP.file, f"quantize {d}", chip, q.shape[1])
    return attention_fp8(q, k, v, scale, codes, tile=tile, quantize_tile=quantize_tile)


def by_warps_apart(q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str = "fp8", *, chip: str) -> Tensor:
    """Compute by warp_specialized.py, whatever was faster; ValueError where it takes no such call."""
    _check_input(q, k, v, codes)
    d = q.shape[3]
    if why := dispatch.warps_refusal(codes, d, chip, q.dtype):
        raise dispatch.NoKernel(f"{dispatch.WARPS_APART}: no kernel for it on {chip} ({why})", was_wrong=False)
    from fluxq.kernels.attention import warp_specialized  # needs Gluon, which may be another in a Triton not in PROVEN

    tile = find_memory_tile(OP.file, f"quantize {d}", chip, q.shape[1])
    with plans.unwatched():  # a plan would copy tensors from where they lay when it was made
        operands = quantize_operands(q, k, v, codes, tile=tile)
        factor = reference.logit_scale(q, scale)
        return warp_specialized.attend(operands, q.shape[1], k.shape[1], factor, q.dtype)


def cells(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str = "fp8", *, chip: str
) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) that a chip must have for a call."""
    return ((_chosen(q, k, codes, chip), format_of(codes, q.shape[3])),)


def _chosen(q: Tensor, k: Tensor, codes: str, chip: str) -> str:
    """Return the name of what computes a call: the op's, WARPS_APART, or that of a package."""
    b, s, h, d = q.shape
    return dispatch.choose_attention(codes, d, chip, b * s, h * d, k.shape[1], q.dtype).implementation


def by_peer(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str = "fp8", *, chip: str
) -> Tensor:
    """Compute by the package of a name in `peers_for`."""
    reference.logit_scale(q, scale)  # refuses a scale that no kernel takes
    with plans.unwatched():
        return peers_for(codes, chip, q.dtype)[name](q, k, v, scale)


def compare(
    result: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    codes: str = "fp8",
    *,
    chip: str,
    sample: Sample,
) -> Verdict:
    """Compare the result of a call with the reference: the norm of each head, of all its queries.

    A sample takes two heads, and of these the first block of queries.
    """
    by_us = _chosen(q, k, codes, chip) in (OP.name, dispatch.WARPS_APART)
    if sample.tokens is not None:
        q, result, k, v = q[:, :QUERY_BLOCK, :2], result[:, :QUERY_BLOCK, :2], k[:, :, :2], v[:, :, :2]
    return (compare_own if by_us else compare_peer)(result, q, k, v, scale, codes)


def compare_own(result: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str = "fp8") -> Verdict:
    """Compare the result of a kernel of ours with the reference: it is near to that, or as near to exact attention.

    Matrix units that keep few bits of fp8 sums move it away from the reference by more than the first allows.
    """
    ours = REFERENCES[OP.name](q, k, v, scale, codes)
    verdict = near("heads", result, ours, axes=(1, 3))
    return _no_farther(result, ours, q, k, v, scale, MOST_OF_OURS) if verdict.is_wrong and result.is_cuda else verdict


def compare_peer(result: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str = "fp8") -> Verdict:
    """Compare the result of a package, which rounds in other places: it may be twice as far from exact as ours.

    Norms of errors are compared, of each head.
    """
    return _no_farther(result, REFERENCES[OP.name](q, k, v, scale, codes), q, k, v, scale, 2.0)


def _no_farther(
    result: Tensor, ours: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None, most: float
) -> Verdict:
    """Compare errors of each head: those of a result are at most `most` times the reference's."""
    exact = F.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)), scale=scale)
    exact = exact.transpose(1, 2)
    error, our_error = ((x.double() - exact).square().sum((1, 3)).sqrt() for x in (result, ours))
    return within("errors of heads", error, torch.zeros_like(error), most * our_error)


def quantize_operands(q: Tensor, k: Tensor, v: Tensor, codes: str = "fp8", *, tile: Tile) -> Operands:
    """Compute `quantize_operands` of kernels/attention/op.py in four launches, v in the order of `in_order`."""
    _check_input(q, k, v, codes)
    b, s, h, d = q.shape
    keys = k.shape[1]
    if tile.columns != d or QUERY_BLOCK % tile.rows or KEY_BLOCK % tile.rows or tile.rows % 16:
        raise ValueError(
            f"attention_fp8: the quantizing tile is {tile.rows} x {tile.columns}, expected {d} columns and rows that "
            f"divide {QUERY_BLOCK} and {KEY_BLOCK}, 16 or more"
        )
    check_device("attention_fp8", q.device)
    query_blocks, key_blocks = cdiv(s, QUERY_BLOCK), cdiv(keys, KEY_BLOCK)
    how, is_int8 = CODES[codes], CODES[codes].qk.element.is_integer
    of_tokens = torch.int8 if is_int8 else torch.float8_e4m3fn

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    out = Operands(
        q=new(b, h, query_blocks * QUERY_BLOCK, d, dtype=of_tokens),
        q_scale=new(b, h, query_blocks * QUERY_BLOCK // how.queries),
        k=new(b, h, key_blocks * KEY_BLOCK, d, dtype=of_tokens),
        k_scale=new(b, h, key_blocks),
        k_mean=new(b, h, d),
        v=new(b, h, d, key_blocks * KEY_BLOCK, dtype=how.pv),
        v_scale=new(b, h, d),
    )
    options = {"ROWS": tile.rows, "num_warps": tile.warps} | EXACT
    key_statistics_kernel[(cdiv(d, CHANNELS), b * h, 2)](
        k, v, out.k_mean, out.v_scale, keys, h, *k.stride()[:3], *v.stride()[:3],
        D=d, CHANNELS=CHANNELS, **options,
    )  # fmt: skip
    for x, mean, tokens, scale, block, blocks, per_token in (
        (q, None, out.q, out.q_scale, QUERY_BLOCK, query_blocks, how.queries == 1),
        (k, out.k_mean, out.k, out.k_scale, KEY_BLOCK, key_blocks, False),
    ):
        quantize_tokens_kernel[(blocks, b * h)](
            x, mean, as_bytes(tokens), scale, x.shape[1], h, *x.stride()[:3],
            D=d, BLOCK=block, INT8=is_int8, PER_TOKEN=per_token, **options,
        )  # fmt: skip
    quantize_values_kernel[(key_blocks * KEY_BLOCK // tile.rows, b * h)](
        v, out.v_scale, as_bytes(out.v), keys, key_blocks * KEY_BLOCK, h, *v.stride()[:3], D=d, **options
    )
    return out


def attend(
    operands: Operands, queries: int, keys: int, log2_scale: float, dtype: torch.dtype, *, tile: MatmulTile
) -> Tensor:
    """Compute `attend` of kernels/attention/op.py, of v in the order of `in_order`: o (B, queries, H, D) in dtype."""
    b, h, _, d = operands.q.shape
    if tile.k != d or tile.n != KEY_BLOCK or QUERY_BLOCK % tile.m or tile.acc_split not in (0, KEY_BLOCK):
        raise ValueError(
            f"attention_fp8: the tile is {tile.m} x {tile.n} x {tile.k}, acc_split {tile.acc_split}, expected m that "
            f"divides {QUERY_BLOCK}, n = {KEY_BLOCK} and k = D = {d}, acc_split 0 or {KEY_BLOCK}"
        )
    check_device("attention_fp8", operands.q.device)
    o = torch.empty((b, queries, h, d), dtype=dtype, device=operands.q.device)
    attention_fp8_kernel[(cdiv(queries, tile.m), b * h)](
        operands.q,
        operands.q_scale,
        operands.k,
        operands.k_scale,
        operands.v,
        operands.v_scale,
        o,
        queries,
        keys,
        h,
        log2_scale,
        EVEN_KEYS=keys % tile.n == 0,
        **constants_of(tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    return o


def constants_of(tile: MatmulTile) -> dict[str, Any]:
    return {"TILE": tile, "QUERY_BLOCK": QUERY_BLOCK, "P_EXPONENT": P_EXPONENT}


def _check_input(q: Tensor, k: Tensor, v: Tensor, codes: str) -> None:
    reference.check_attention(q, k, v, codes)
    if q.shape[3] not in HEAD_SIZES:
        raise ValueError(
            f"attention_fp8: heads have {q.shape[3]} elements, expected one of {', '.join(map(str, HEAD_SIZES))}: "
            "use the torch reference in kernels/attention/op.py, or attention in 16 bit"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1:
            raise ValueError(
                f"attention_fp8: {name} has strides {x.stride()}, expected a last axis of 1: pass .contiguous()"
            )


@triton.jit
def key_statistics_kernel(
    k,  # (B, Skv, H, D)
    v,  # (B, Skv, H, D)
    mean,  # (B, H, D) fp32
    scale,  # (B, H, D) fp32
    S,  # tokens
    H,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """mean = Σ k / Skv and scale = amax(v) / 448 of CHANNELS channels of one head; a program makes one or the other."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    head = tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        x = k + head // H * stride_kb + head % H * stride_kh + channels[None, :]
        sums = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in tl.range(0, S, ROWS, num_stages=STAGES):
            tokens = (start + tl.arange(0, ROWS)).to(tl.int64)
            sums += widened(tl.load(x + tokens[:, None] * stride_ks, mask=(tokens < S)[:, None], other=0.0))
        tl.store(mean + head * D + channels, tl.div_rn(tl.sum(sums, 0), tl.full((), S, tl.float32)))
    else:
        x = v + head // H * stride_vb + head % H * stride_vh + channels[None, :]
        amax = tl.zeros((ROWS, CHANNELS), tl.int32)
        for start in tl.range(0, S, ROWS, num_stages=STAGES):
            tokens = (start + tl.arange(0, ROWS)).to(tl.int64)
            values = widened(tl.load(x + tokens[:, None] * stride_vs, mask=(tokens < S)[:, None], other=0.0))
            amax = tl.maximum(amax, magnitude_bits(values))
        tl.store(scale + head * D + channels, row_step(tl.max(amax, 0), 448.0))


@triton.jit
def quantize_tokens_kernel(
    x,  # (B, S, H, D)
    mean,  # (B, H, D) fp32 or None
    codes,  # (B, H, blocks · BLOCK, D) bytes
    scale,  # (B, H, blocks) fp32, PER_TOKEN (B, H, blocks · BLOCK)
    S,
    H,
    stride_b,
    stride_s,
    stride_h,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    INT8: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """code = RNE((x - mean) / scale) of BLOCK tokens of one head; zeros after the last token.

    scale = amax / 448, with INT8 / 127; of all the tokens, or of each one.
    """
    LARGEST: tl.constexpr = 127.0 if INT8 else 448.0
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, D)
    x += head // H * stride_b + head % H * stride_h
    parts = ()
    if not PER_TOKEN:
        for part in tl.static_range(BLOCK // ROWS):
            tokens = (block * BLOCK + part * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            parts += (load_tokens(x, mean, head, tokens, S, stride_s, D),)
        step = row_step(tl.max(amax_bits(parts, BLOCK // ROWS), 0), LARGEST)
        tl.store(scale + head * tl.num_programs(0) + block, step)
    codes += head * tl.num_programs(0) * BLOCK * D
    for part in tl.static_range(BLOCK // ROWS):
        tokens = (block * BLOCK + part * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        values = load_tokens(x, mean, head, tokens, S, stride_s, D) if PER_TOKEN else parts[part]
        if PER_TOKEN:
            step = row_step(tl.max(magnitude_bits(values), 1), LARGEST)[:, None]
            tl.store(scale + head * tl.num_programs(0) * BLOCK + tokens[:, None], step)
        code = encode(quotient(values, step, False, False), "int8" if INT8 else "e4m3")
        tl.store(codes + tokens[:, None] * D + columns[None, :], code.to(tl.uint8))


@triton.jit
def load_tokens(x, mean, head, tokens, S, stride_s, D: tl.constexpr):
    """Load fp32 (ROWS, D) of tokens (ROWS,) of a head, less their mean; zeros after the last token."""
    columns = tl.arange(0, D)
    here = (tokens < S)[:, None]
    values = tl.load(x + tokens[:, None] * stride_s + columns[None, :], mask=here, other=0.0).to(tl.float32)
    if mean is not None:
        values = tl.where(here, values - tl.load(mean + head * D + columns)[None, :], 0.0)
    return values


@triton.jit
def quantize_values_kernel(
    v,  # (B, S, H, D)
    scale,  # (B, H, D) fp32
    codes,  # (B, H, D, padded) bytes, or fp16
    S,
    padded,
    H,
    stride_b,
    stride_s,
    stride_h,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """code = RNE(v / scale) of ROWS tokens of one head, in E4M3 or fp16, stored with tokens side by side."""
    tokens = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, D)
    values = load_tokens(v + head // H * stride_b + head % H * stride_h, None, head, tokens, S, stride_s, D)
    values = quotient(values, tl.load(scale + head * D + columns)[None, :], False, True)
    if codes.dtype.element_ty == tl.float16:
        code = values.to(tl.float16).T
    else:
        code = in_order(encode(values, "e4m3").to(tl.uint8).T, D, ROWS)
    tl.store(codes + (head * D + columns)[:, None] * padded + tokens[None, :], code)


@triton.jit
def in_order(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return codes x (ROWS, COLUMNS) with the columns of each 16 in the order 0, 1, 8, 9, 2, 3, 10, 11, … 14, 15.

    A thread holds columns 0, 1, 8 and 9 of 16 sums of a matrix unit, and is to hold 0 to 3 of 16 codes that it
    multiplies next. Weights and values in the same other order have the same product, and weights stay where they are.
    On chips whose sums lie otherwise the order stays.
    """
    if tl.target_info.cuda_capability_geq(8, 9) and (
        not tl.target_info.cuda_capability_geq(10, 0) or tl.target_info.cuda_capability_geq(12, 0)
    ):
        fours = tl.reshape(x, (ROWS, COLUMNS // 16, 2, 4, 2))
        x = tl.reshape(tl.permute(fours, (0, 1, 3, 2, 4)), (ROWS, COLUMNS))
    return x


@triton.jit
def attention_fp8_kernel(
    q,  # (B, H, S padded, D) fp8 or int8
    q_scale,  # (B, H, blocks) fp32, of int8 (B, H, S padded)
    k,  # (B, H, Skv padded, D) as q
    k_scale,  # (B, H, blocks) fp32
    v,  # (B, H, D, Skv padded) fp8 or fp16
    v_scale,  # (B, H, D) fp32
    o,  # (B, S, H, D)
    S,
    SKV,
    H,
    log2_scale,
    EVEN_KEYS: tl.constexpr,
    TILE: tl.constexpr,  # a MatmulTile, whose n are keys and k is D
    QUERY_BLOCK: tl.constexpr,
    P_EXPONENT: tl.constexpr,
):
    """o = softmax(scale · q k^T) v for BLOCK_M queries of one head, a block of keys after the other; as `attend`.

    A last block that is not full comes first, apart, so that no other has a mask; on GeForce cards all have one, where
    its code would take registers that there are not.
    """
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    D: tl.constexpr = TILE.k
    GEFORCE: tl.constexpr = tl.target_info.cuda_capability_geq(12, 0) or not tl.target_info.cuda_capability_geq(9, 0)
    PEELED: tl.constexpr = not EVEN_KEYS and (tl.target_info.is_hip() or not GEFORCE)
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D)
    query_blocks = tl.cdiv(S, QUERY_BLOCK)
    key_blocks = tl.cdiv(SKV, BLOCK_N)
    q += head * query_blocks * QUERY_BLOCK * D
    k += head * key_blocks * BLOCK_N * D
    v += head * D * key_blocks * BLOCK_N
    k_scale += head * key_blocks
    queries = tl.load(q + rows[:, None] * D + columns[None, :])  # (BLOCK_M, D)
    if q.dtype.element_ty == tl.int8:
        factor = tl.load(q_scale + head * query_blocks * QUERY_BLOCK + rows) * log2_scale  # (BLOCK_M,)
    else:
        factor = tl.load(q_scale + head * query_blocks + tl.program_id(0) * BLOCK_M // QUERY_BLOCK) * log2_scale
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    blocks = key_blocks
    if PEELED:
        blocks = key_blocks - 1
        acc, highest, total = attend_block(
            blocks, queries, factor, acc, highest, total, k, k_scale, v, key_blocks, SKV,
            True, TILE, P_EXPONENT,
        )  # fmt: skip
    for turn in range(blocks):
        block = turn
        if not (EVEN_KEYS or PEELED):
            block = tl.where(turn == 0, key_blocks, turn) - 1
        acc, highest, total = attend_block(
            block, queries, factor, acc, highest, total, k, k_scale, v, key_blocks, SKV,
            not (EVEN_KEYS or PEELED), TILE, P_EXPONENT,
        )  # fmt: skip
    result = tl.div_rn(acc, total[:, None]) * tl.load(v_scale + head * D + columns)[None, :]
    place = ((head // H * S + rows)[:, None] * H + head % H) * D + columns[None, :]
    tl.store(o + place, result.to(o.dtype.element_ty), mask=(rows < S)[:, None])


@triton.jit
def attend_block(
    block, queries, factor, acc, highest, total, k, k_scale, v, key_blocks, SKV,
    MASKED: tl.constexpr, TILE: tl.constexpr, P_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Return acc (BLOCK_M, D), highest logit and total (BLOCK_M,) with a block of keys; MASKED: some are none."""
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    D: tl.constexpr = TILE.k
    columns = tl.arange(0, D)
    tokens = block * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = tl.load(k + tokens[:, None] * D + columns[None, :])  # (BLOCK_N, D)
    INT8: tl.constexpr = queries.dtype == tl.int8
    t = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INT8 else tl.float32)
    t = add_product(t, queries, keys, INT8, 0, TILE.unit_scales, BLOCK_M, BLOCK_N, D).to(tl.float32)
    by = factor * tl.load(k_scale + block)
    if MASKED:
        t = tl.where((tokens < SKV)[None, :], t, float("-inf"))
        by = tl.where(by == 0, LEAST, by)  # -inf · 0 is NaN
    new = tl.maximum(highest, tl.max(t, 1) * by)
    p = tl.exp2(tl.fma(t, by[:, None] if INT8 else by, (P_EXPONENT - new)[:, None]))
    correction = tl.exp2(highest - new)
    total = total * correction + tl.sum(p, 1)
    values = tl.load(v + columns[:, None] * (key_blocks * BLOCK_N) + tokens[None, :])  # (D, BLOCK_N)
    UNIT: tl.constexpr = TILE.unit_scales and values.dtype != tl.float16
    part = tl.zeros((BLOCK_M, D), tl.float32) if TILE.acc_split else acc * correction[:, None]
    weights = p.to(values.dtype)
    if values.dtype != tl.float16:
        weights = in_order(weights, BLOCK_M, BLOCK_N)
    part = add_product(part, weights, values, False, 0, UNIT, BLOCK_M, D, BLOCK_N)
    acc = tl.fma(acc, correction[:, None], part) if TILE.acc_split else part
    return acc, new, total


LEAST = tl.constexpr(2.0**-126)
MOST_OF_OURS = 1.1  # of the reference's error that our kernels may have where they are not near to it
CHANNELS = 32  # that one program takes statistics of: 64 bytes of a token
STAGES = tl.constexpr(5)  # of the loops for statistics: few programs take them, so each has many tiles on their way
