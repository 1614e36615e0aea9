"""Attention of other packages, behind the op of kernels/attention: what each takes, and its call.

    sageattention            SageAttention 2: q and k in int8, p and v in fp8, or in fp16 on chips that have none
    flash_attn_interface     FlashAttention-3: fp8 with a scale for each head
    cudnn                    cuDNN's fused attention, by nvidia-cudnn-frontend: fp8 with a scale for each tensor

None of them has to be installed, and installing one changes nothing. `fluxq doctor` compares those that are with exact
attention and times them; dispatch.py then takes one on that GPU, in that version, where it is faster than our kernel.
Keys lose their mean first where the package does not do that itself.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluxq.base.devices import package_version

Call = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


class Peer(NamedTuple):
    """Attention of a package.

    package: that is installed. module: that is imported.
    codes: rows of the op's CODES in whose place it can be taken.
    chips: that it is built for.
    call: function of q (B, S, H, D), k, v (B, Skv, H, D) and the logits' scale -> o (B, S, H, D) in q's dtype.
    """

    package: str
    module: str
    codes: tuple[str, ...]
    chips: tuple[str, ...]
    call: Call


@functools.cache
def peers_for(codes: str, chip: str, dtype: torch.dtype) -> dict[str, Call]:
    """Return package with its version -> its call, of those that are installed and take such tensors on a chip.

    They take float16 too, but `fluxq doctor` judges in bfloat16 alone, and findings know no dtype.
    """
    if dtype != torch.bfloat16:
        return {}
    peers = (row for row in PEERS if codes in row.codes and chip in row.chips and find_spec(row.module) is not None)
    return {f"{row.package} {package_version(row.package)}": row.call for row in peers}


def _sage(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    attend = importlib.import_module("sageattention").sageattn
    return attend(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=scale).contiguous()


def _flash3(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (coded(x, (1, 3)) for x in (q, smoothed(k), v))
    out = importlib.import_module("flash_attn_interface").flash_attn_func(
        q8,
        k8,
        v8,
        softmax_scale=scale,
        q_descale=q_scale[:, 0, :, 0],
        k_descale=k_scale[:, 0, :, 0],
        v_descale=v_scale[:, 0, :, 0],
    )
    return (out[0] if isinstance(out, tuple) else out).to(q.dtype).contiguous()  # first versions return sums too


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Compute by a graph of cuDNN. On Hopper its o is in fp8, too: as a mean of v's tokens it fits into v's scale."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    operands = [coded(x, (0, 1, 2, 3)) for x in (q, smoothed(k), v)]
    execute = _cudnn_graph(q.device, *q.shape, k.shape[1], scale)
    return (execute(operands).float() * operands[2][1]).to(q.dtype)


@functools.lru_cache(64)
def _cudnn_graph(
    device: torch.device, batch: int, queries: int, heads: int, size: int, keys: int, scale: float
) -> Callable[[list[tuple[Tensor, Tensor]]], Tensor]:
    """Build attention of (codes (B, S, H, D), scale) of q, k and v; return the function that gives codes of o."""
    cudnn: Any = importlib.import_module("cudnn")
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)

    def layout(tokens: int) -> dict[str, list[int]]:  # cuDNN names heads before tokens
        return {
            "dim": [batch, heads, tokens, size],
            "stride": [tokens * heads * size, size, heads * size, 1],
        }

    one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    codes = {
        name: graph.tensor(name=name, **layout(tokens), data_type=e4m3)
        for name, tokens in (("q", queries), ("k", keys), ("v", keys))
    }
    factors = {
        name: graph.tensor(name=name, **one, data_type=fp32)
        for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    }
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        **codes, **factors, generate_stats=False, attn_scale=scale, use_causal_mask=False
    )
    shape = layout(queries)
    o.set_output(True).set_dim(shape["dim"]).set_stride(shape["stride"]).set_data_type(e4m3)
    for amax in (amax_s, amax_o):
        amax.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(fp32)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    p_scale = torch.full((1, 1, 1, 1), 256.0, device=device)  # p is at most 1
    inverse = p_scale.reciprocal()

    def execute(operands: list[tuple[Tensor, Tensor]]) -> Tensor:
        (q8, q_scale), (k8, k_scale), (v8, v_scale) = operands
        o8 = torch.empty_like(q8)
        scales = q_scale, k_scale, v_scale, inverse, p_scale, v_scale.reciprocal()
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
        filled = dict(zip((*codes.values(), *factors.values()), (q8, k8, v8, *scales), strict=True))
        filled |= {o: o8, amax_s: torch.empty_like(p_scale), amax_o: torch.empty_like(p_scale)}
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(filled, workspace, handle=handle)
        return o8

    return execute


def smoothed(k: Tensor) -> Tensor:
    """Return k (B, Skv, H, D) less its mean over tokens, which changes no softmax."""
    return k - k.float().mean(1, keepdim=True).to(k.dtype)


def coded(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return contiguous E4M3 codes of x and their fp32 scales, amax / 448 over `axes`, which stay as axes of 1."""
    amax = x.abs().amax(axes, keepdim=True).float()
    scale = torch.where(amax > 0, amax / 448, 1.0)
    return (x.float() / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).contiguous(), scale


PEERS = (
    Peer("sageattention", "sageattention", ("int8",), ("sm_89", "sm_90", "sm_120"), _sage),
    Peer("sageattention", "sageattention", ("int8-16bit",), ("sm_80", "sm_86"), _sage),
    Peer("flash_attn_3", "flash_attn_interface", ("fp8",), ("sm_90",), _flash3),
    Peer("nvidia-cudnn-frontend", "cudnn", ("fp8",), ("sm_90", "sm_100", "sm_103"), _cudnn),
)
