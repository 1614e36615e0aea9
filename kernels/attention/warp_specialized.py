"""Attention with fp8 codes on Hopper, in Gluon: some warps load keys and values while others multiply.

It computes what kernels/attention/kernel.py does from the same codes, block by block in the same order. A program has
128 queries of one head. One warp loads: TMA copies blocks of keys and of values into shared memory, STAGES of each.
Two groups of four warps compute 64 queries each. While one takes exponentials, the other's matrix products run.

Barriers in shared memory hold them together. `loaded` of a buffer completes with the bytes of its copy, `free` when
both groups have read it. A group waits for its products before it says so: until then they read the buffer.

Each block of keys has an accumulator of its own, as `acc_split` of KEY_BLOCK makes it in kernel.py.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# Kernels are written in Gluon, Triton's lower language: a constexpr parameter takes a plain number.

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fluxq.kernels.attention.op import KEY_BLOCK, P_EXPONENT, QUERY_BLOCK, Operands
from fluxq.kernels.checks import EXACT, check_device
from fluxq.kernels.tiles import cdiv

copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name before Triton 3.8


def attend(operands: Operands, queries: int, keys: int, log2_scale: float, dtype: torch.dtype) -> Tensor:
    """Compute `attend` of kernel.py from fp8 codes, whose order of values it takes: o (B, queries, H, D) in dtype."""
    b, h, _, d = operands.q.shape
    check_device("attention_fp8", operands.q.device)
    o = torch.empty((b, queries, h, d), dtype=dtype, device=operands.q.device)
    attention_warps_kernel[(cdiv(queries, QUERY_BLOCK), b * h)](
        described(operands.q, QUERY_BLOCK),
        operands.q_scale,
        described(operands.k, KEY_BLOCK),
        operands.k_scale,
        described(operands.v, d),
        operands.v_scale,
        o,
        queries,
        keys,
        h,
        log2_scale,
        **constants_of(d, keys % KEY_BLOCK == 0),
        num_warps=4,
        **EXACT,
    )
    return o


def described(codes: Tensor, rows: int) -> TensorDescriptor:
    """Describe contiguous codes (B, H, n, columns) to TMA, which copies so many rows and KEY_BLOCK or D columns."""
    flat = codes.flatten(0, 2)
    block = [rows, min(flat.shape[1], KEY_BLOCK)]
    return TensorDescriptor.from_tensor(flat, block, layout_of(block))


def layout_of(block: list[int]) -> gl.NVMMASharedLayout:
    """Return how a block of fp8 codes lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)


def constants_of(d: int, even_keys: bool) -> dict[str, int | float | bool]:
    return {"EVEN_KEYS": even_keys, "D": d, "BLOCK_N": KEY_BLOCK, "STAGES": 2, "P_EXPONENT": P_EXPONENT}


@gluon.jit(do_not_specialize=["S", "SKV", "H"])
def attention_warps_kernel(
    q,  # (B · H · S padded, D) fp8, in blocks of 2 M rows
    q_scale,  # (B, H, blocks) fp32
    k,  # (B · H · Skv padded, D) fp8, in blocks of BLOCK_N rows
    k_scale,  # (B, H, blocks) fp32
    v,  # (B · H · D, Skv padded) fp8, in blocks of BLOCK_N columns
    v_scale,  # (B, H, D) fp32
    o,  # (B, S, H, D)
    S,
    SKV,
    H,
    log2_scale,
    EVEN_KEYS: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    P_EXPONENT: gl.constexpr,
):
    """o = softmax(scale · q k^T) v for 2 M queries of one head."""
    M: gl.constexpr = 64  # rows of a matrix instruction
    tile = gl.program_id(0)
    head = gl.program_id(1)
    blocks = (SKV + BLOCK_N - 1) // BLOCK_N
    queries = gl.allocate_shared_memory(q.dtype, [2 * M, D], q.layout)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, D], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, D, BLOCK_N], v.layout)
    queries_loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(queries_loaded, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(keys_loaded.index(s), count=1)
        mbarrier.init(values_loaded.index(s), count=1)
        mbarrier.init(keys_free.index(s), count=2)
        mbarrier.init(values_free.index(s), count=2)
    place = head * ((S + 2 * M - 1) // (2 * M)) + tile
    factor = gl.load(q_scale + place) * log2_scale
    k_scale += head * blocks
    v_scale += head * D
    keyed = (keys, keys_loaded, keys_free)
    valued = (values, values_loaded, values_free)
    scales = (factor, k_scale, v_scale)
    where = (head, tile, S, SKV, H, blocks)
    gl.warp_specialize(
        [
            (compute, (
                0, queries, queries_loaded, keyed, valued, scales, o, where,
                EVEN_KEYS, D, M, BLOCK_N, STAGES, P_EXPONENT,
            )),
            (compute, (
                1, queries, queries_loaded, keyed, valued, scales, o, where,
                EVEN_KEYS, D, M, BLOCK_N, STAGES, P_EXPONENT,
            )),
            (load, (
                q, place, queries, queries_loaded, k, keyed, v, valued, head, blocks,
                EVEN_KEYS, D, M, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],  # warps of the second and third, the first has the launch's
        [240, 24],  # registers a thread
    )  # fmt: skip


@gluon.jit
def load(
    q, place, queries, queries_loaded, k, keyed, v, valued, head, blocks,
    EVEN_KEYS: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the queries, then each block of keys and of values, as soon as its buffer is free."""
    keys, keys_loaded, keys_free = keyed
    values, values_loaded, values_free = valued
    mbarrier.expect(queries_loaded, q.block_type.nbytes)
    copy_block(q, [place * (2 * M), 0], queries_loaded, queries)
    for turn in range(0, blocks):
        block = turn
        if not EVEN_KEYS:
            block = gl.where(turn == 0, blocks, turn) - 1  # the one that is not full comes first
        s = turn % STAGES
        phase = (turn // STAGES) & 1
        mbarrier.wait(keys_free.index(s), phase ^ 1)
        mbarrier.expect(keys_loaded.index(s), k.block_type.nbytes)
        copy_block(k, [(head * blocks + block) * BLOCK_N, 0], keys_loaded.index(s), keys.index(s))
        mbarrier.wait(values_free.index(s), phase ^ 1)
        mbarrier.expect(values_loaded.index(s), v.block_type.nbytes)
        copy_block(v, [head * D, block * BLOCK_N], values_loaded.index(s), values.index(s))


@gluon.jit
def compute(
    HALF: gl.constexpr, queries, queries_loaded, keyed, valued, scales, o, where,
    EVEN_KEYS: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    P_EXPONENT: gl.constexpr,
):  # fmt: skip
    """Compute M queries, from row HALF · M of the tile, over all blocks of keys, and store o."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    factor, k_scale, v_scale = scales
    head, tile, S, SKV, H, blocks = where
    highest = gl.full((M,), float("-inf"), gl.float32, gl.SliceLayout(1, SUMS))
    total = gl.zeros((M,), gl.float32, gl.SliceLayout(1, SUMS))
    acc = gl.zeros((M, D), gl.float32, SUMS)
    mbarrier.wait(queries_loaded, 0)
    rows = queries.slice(HALF * M, M, 0)
    first = 0
    if not EVEN_KEYS:
        first = 1
        acc, highest, total = attend_block(
            0, blocks - 1, rows, keyed, valued, factor, k_scale, (acc, highest, total), SKV,
            True, D, M, BLOCK_N, STAGES, P_EXPONENT,
        )  # fmt: skip
    for turn in range(first, blocks):
        acc, highest, total = attend_block(
            turn, turn - first, rows, keyed, valued, factor, k_scale, (acc, highest, total), SKV,
            False, D, M, BLOCK_N, STAGES, P_EXPONENT,
        )  # fmt: skip
    tokens = tile * (2 * M) + HALF * M + gl.arange(0, M, gl.SliceLayout(1, SUMS))
    columns = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    result = gl.div_rn(acc, total[:, None]) * gl.load(v_scale + columns)[None, :]
    place = ((head.to(gl.int64) // H * S + tokens)[:, None] * H + head % H) * D + columns[None, :]
    gl.store(o + place, result.to(o.dtype.element_ty), mask=(tokens < S)[:, None])


@gluon.jit
def attend_block(
    turn, block, rows, keyed, valued, factor, k_scale, sums, SKV,
    MASKED: gl.constexpr, D: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    P_EXPONENT: gl.constexpr,
):  # fmt: skip
    """Return sums, of acc (M, D), highest logit and total (M,), with a block of keys, loaded in a turn.

    MASKED: some of the keys are none.
    """
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    acc, highest, total = sums
    keys, keys_loaded, keys_free = keyed
    values, values_loaded, values_free = valued
    s = turn % STAGES
    phase = (turn // STAGES) & 1
    mbarrier.wait(keys_loaded.index(s), phase)
    t = gl.zeros((M, BLOCK_N), gl.float32, LOGITS)
    t = warpgroup_mma(rows, keys.index(s).permute((1, 0)), t, use_acc=False, is_async=True)
    t = warpgroup_mma_wait(0, deps=[t])
    mbarrier.arrive(keys_free.index(s), count=1)
    by = factor * gl.load(k_scale + block)
    if MASKED:
        tokens = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LOGITS))
        t = gl.where((tokens < SKV)[None, :], t, float("-inf"))
        by = gl.where(by == 0, LEAST, by)  # -inf · 0 is NaN
    new = gl.maximum(highest, gl.convert_layout(gl.max(t, 1), gl.SliceLayout(1, SUMS)) * by)
    shift = gl.convert_layout(P_EXPONENT - new, gl.SliceLayout(1, LOGITS))
    by = gl.full((M, BLOCK_N), 1.0, gl.float32, LOGITS) * by
    shift = gl.full((M, BLOCK_N), 1.0, gl.float32, LOGITS) * shift[:, None]
    p = gl.exp2(gl.fma(t, by, shift))
    correction = gl.exp2(highest - new)
    total = total * correction + gl.convert_layout(gl.sum(p, 1), gl.SliceLayout(1, SUMS))
    weights = p.to(gl.float8e4nv).reshape((M, BLOCK_N // 16, 2, 4, 2)).permute((0, 1, 3, 2, 4))  # as `in_order`
    weights = gl.convert_layout(weights.reshape((M, BLOCK_N)), gl.DotOperandLayout(0, SUMS, 4))
    mbarrier.wait(values_loaded.index(s), phase)
    part = gl.zeros((M, D), gl.float32, SUMS)
    part = warpgroup_mma(weights, values.index(s).permute((1, 0)), part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(values_free.index(s), count=1)
    acc = gl.fma(acc, gl.full((M, D), 1.0, gl.float32, SUMS) * correction[:, None], part)
    return acc, new, total


LEAST = gl.constexpr(2.0**-126)
