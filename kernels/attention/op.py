"""Attention with 8-bit codes as a torch.library op, with its torch reference: softmax(scale · q k^T) v, no mask.

    mean  = mean of k over its tokens           of each head and channel
    q     = q_scale · q codes                   E4M3; fp32 scale = amax / 448 of a head and QUERY_BLOCK tokens
    k     = mean + k_scale · k codes            of a head and KEY_BLOCK tokens
    v     = v_scale · v codes                   of a head and channel, all tokens

    t     = (q codes · k codes) · ((q_scale · (scale · log2 e)) · k_scale)     fp32; of one block of keys
    m     = max(m, t)                           of a query, over the blocks so far
    p     = 2^((t - m) + 8)                     from 0 to 256; the kernel: t + (8 - m) by one fma
    sum   = sum · 2^(m before - m) + Σ p
    acc   = acc · 2^(m before - m) + E4M3(p) · v codes
    o     = (acc / sum) · v_scale               after the last block, rounded to q's dtype

Subtracting any vector from all keys adds the same number to all logits of a query, so the softmax does not change; what
keys have in common then takes no codes. This smoothing, scales per block, and fp8 for p and v with scales per channel
are SageAttention2's (arXiv 2411.10958); blocks with a running maximum are FlashAttention's. p is at most 1 and E4M3
reaches 448: the factor 256 puts all but its smallest values among E4M3's normal numbers and, as a power of two, changes
none of them.

That is the row "fp8" of CODES. "int8" takes q and k in int8, scale = amax / 127, and sums their products exactly. Its
codes have equal steps, so that an outlier costs others more than in fp8: q has a scale for each token, which multiplies
a query's sums as that of a block does. "int8-16bit" also takes p and v in fp16, v by the same scale, for chips that do
not multiply fp8.

Rounded are, once each: the codes; t and its factors, p, sum, acc and o in fp32; p to the element of v; o to q's dtype.
The order in which fp32 sums are added up is left open, and so are the last bits of 2^x: with codes given, o has no bits
to compare but a bound, which tests/attention_bounds.py states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels.encode import block_scale, decode, encode
from fluxq.kernels.op import Op, launches_on_gpu
from fluxq.kernels.ops import no_autocast
from fluxq.recipes.formats import FORMATS, Format


class Codes(NamedTuple):
    """Codes that q, k, v and p become.

    qk: format of q and k.
    queries: tokens of q that share a scale.
    pv: dtype of v and p.
    """

    qk: Format
    queries: int
    pv: torch.dtype


QUERY_BLOCK = 128  # tokens of a head that share a scale
KEY_BLOCK = 128  # and that share a running maximum: the numbers of keys of the kernel's tiles
P_EXPONENT = 8.0  # p is stored times 2^8
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = FORMATS["fp8"]
CODES = {
    "fp8": Codes(_FP8, QUERY_BLOCK, torch.float8_e4m3fn),
    "int8": Codes(FORMATS["int8"], 1, torch.float8_e4m3fn),
    "int8-16bit": Codes(FORMATS["int8"], 1, torch.float16),
}
CHOICES = {"fp8": ("fp8",), "int8": ("int8", "int8-16bit")}  # attention that is asked for -> rows, the preferred first
HEAD_SIZES = (64, 128)  # that the kernel takes


def format_of(codes: str, head_size: int) -> str:
    """Return the format of the op: the size of the heads, behind `codes` unless they are fp8."""
    return str(head_size) if codes == "fp8" else f"{codes}-{head_size}"


OP = Op(
    "attention_fp8",
    tuple(format_of(codes, size) for codes in CODES for size in HEAD_SIZES),
    "native",
    elsewhere="no tile for that chip was compiled with this Triton",
    folder="attention",
)


@dataclass(frozen=True)
class Operands:
    """q (B, S, H, D), k and v (B, Skv, H, D) as codes; tokens are padded to whole blocks, with zeros.

    q: (B, H, S padded, D) and k: (B, H, Skv padded, D) in float8_e4m3fn or int8.
    v: (B, H, D, Skv padded) in float8_e4m3fn or float16; fp8 matrix units read both operands along the axis they sum
        over. Kernels keep 16 tokens in another order on some chips (`in_order` in kernel.py).
    q_scale, k_scale: (B, H, blocks) fp32; with int8 each token of q is a block.
    v_scale: (B, H, D) fp32.
    k_mean: (B, H, D) fp32, subtracted from k.
    """

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    k_mean: Tensor
    v: Tensor
    v_scale: Tensor


@torch.library.custom_op("fluxq::attention_fp8", mutates_args=())
def attention_fp8(q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str = "fp8") -> Tensor:
    """Compute attention of q (B, S, H, D) to k and v (B, Skv, H, D), of one float dtype; contiguous (B, S, H, D).

    scale: of the logits, None for 1 / √D.
    codes: a row of CODES.
    NaN or infinity in q makes NaN of the queries that share its scale, in k of its head, in v of its channel.
    """
    check_attention(q, k, v, codes)
    with no_autocast(q):
        return attend(quantize_operands(q, k, v, codes), q.shape[1], k.shape[1], logit_scale(q, scale), q.dtype)


@attention_fp8.register_fake
def _(q, k, v, scale, codes="fp8"):
    check_attention(q, k, v, codes)
    return q.new_empty(q.shape)


launches_on_gpu(OP.name, attention_fp8)


def check_attention(q: Tensor, k: Tensor, v: Tensor, codes: str = "fp8") -> None:
    """Raise ValueError for tensors that do not fit, and for unknown codes."""
    name = "attention_fp8"
    if codes not in CODES:
        raise ValueError(f"{name}: codes are {codes!r}, expected one of {', '.join(CODES)}")
    if q.ndim != 4 or q.dtype not in FLOATS:
        raise ValueError(
            f"{name}: q is {q.dtype} {(*q.shape,)}, expected (B, S, heads, D) of bfloat16, float16 or float32: "
            ".unflatten(-1, (heads, D)) splits heads"
        )
    b, _, heads, d = q.shape
    for part, x in (("k", k), ("v", v)):
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (b, heads, d) or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name}: {part} is {x.dtype} {(*x.shape,)} on {x.device}, q {q.dtype} {(*q.shape,)} on {q.device}: "
                "only their tokens may differ in number; repeat heads that several queries share"
            )
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"{name}: k has {k.shape[1]} tokens and v {v.shape[1]}, expected the same number")
    if k.shape[1] == 0 or d == 0:
        raise ValueError(f"{name}: k is {(*k.shape,)}: without keys there is no softmax")


def logit_scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of q k^T that lets softmax take 2^t of it: the scale of the logits times log2(e).

    Raises ValueError for a scale that is not above 0.
    """
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(
            f"attention_fp8: the logits' scale is {scale}, expected a finite number above 0; compute it in 16 bit: "
            "fluxq.set_attention(model, '16bit')"
        )
    return (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * math.log2(math.e)


def quantize_operands(q: Tensor, k: Tensor, v: Tensor, codes: str = "fp8") -> Operands:
    """Return the codes and scales at the top of this file."""
    how, mean = CODES[codes], key_mean(k)
    q_codes, q_scale = quantize_tokens(q, None, QUERY_BLOCK, how.queries, how.qk)
    k_codes, k_scale = quantize_tokens(k, mean, KEY_BLOCK, KEY_BLOCK, how.qk)
    v_codes, v_scale = quantize_values(v, how.pv)
    return Operands(q_codes, q_scale, k_codes, k_scale, mean, v_codes, v_scale)


def key_mean(k: Tensor) -> Tensor:
    """Return the mean (B, H, D) fp32 of k (B, Skv, H, D), in any order of sums: any vector near it serves."""
    return k.float().mean(1)


def quantize_tokens(x: Tensor, mean: Tensor | None, padding: int, block: int, format: Format) -> tuple[Tensor, Tensor]:
    """Quantize x (B, S, H, D), less mean (B, H, D), to codes (B, H, S padded, D) and a scale per `block` tokens.

    padding: that the tokens are filled up to a multiple of, with zeros.
    """
    values = x.float().transpose(1, 2)  # (B, H, S, D)
    if mean is not None:
        values = values - mean[:, :, None]
    values = _padded(values, padding)
    blocks = values.unflatten(2, (-1, block)).flatten(3).contiguous()  # (B, H, blocks, block · D)
    scale = block_scale(blocks, format, None)
    codes = encode(blocks / scale[..., None], format.element)
    return codes.view(values.shape), scale


def quantize_values(v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize v (B, Skv, H, D) to codes (B, H, D, Skv padded) of a dtype of CODES, and scales (B, H, D)."""
    values = _padded(v.float().transpose(1, 2), KEY_BLOCK).mT.contiguous()  # (B, H, D, Skv padded)
    scale = block_scale(values, _FP8, None)
    return _encoded(values / scale[..., None], dtype), scale


def attend(operands: Operands, queries: int, keys: int, log2_scale: float, dtype: torch.dtype) -> Tensor:
    """Return o (B, S, H, D) in dtype, for the first `queries` and `keys` tokens. log2_scale: from `logit_scale`."""
    q, k, v = (_decoded(codes) for codes in (operands.q[:, :, :queries], operands.k, operands.v))  # q: (B, H, S, D)
    block = 1 if operands.q.dtype == torch.int8 else QUERY_BLOCK
    factor = torch.repeat_interleave(operands.q_scale * log2_scale, block, 2)[:, :, :queries, None]
    highest = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, acc = torch.zeros_like(highest), torch.zeros_like(q)
    blocks = [*range(operands.k_scale.shape[2])]
    if keys % KEY_BLOCK:  # the one that is not full comes first
        blocks.insert(0, blocks.pop())
    for block in blocks:
        begin, end = block * KEY_BLOCK, min((block + 1) * KEY_BLOCK, keys)
        t = (q @ k[:, :, begin:end].mT) * (factor * operands.k_scale[:, :, block, None, None])  # (B, H, S, keys)
        new = torch.maximum(highest, t.amax(-1, keepdim=True))
        p = torch.exp2(t - new + P_EXPONENT)
        correction = torch.exp2(highest - new)
        total = total * correction + p.sum(-1, keepdim=True)
        acc = acc * correction + _decoded(_encoded(p, operands.v.dtype)) @ v[:, :, :, begin:end].mT
        highest = new
    o = acc / total * operands.v_scale[:, :, None]
    return o.to(dtype).transpose(1, 2).contiguous()


def _padded(values: Tensor, block: int) -> Tensor:
    """Pad (B, H, S, D) with zeros after the last token, to a multiple of `block`."""
    return F.pad(values, (0, 0, 0, -values.shape[2] % block))


def _encoded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values, of which none lies outside it, to float8_e4m3fn or float16."""
    return encode(values, _FP8.element) if dtype == torch.float8_e4m3fn else values.to(dtype)


def _decoded(codes: Tensor) -> Tensor:
    return decode(codes, _FP8.element) if codes.dtype == torch.float8_e4m3fn else codes.float()
