"""The bound of attention from 8-bit codes: what fp32 sums in any order can make of the same codes.

The order in which fp32 sums are added up is left open, and so are the last bits of 2^x. With codes given, the output
has no bits to compare but a bound for each element: if fp32 makes p wrong by a relative δ at most, then

    E4M3(p (1 - δ)) <= E4M3(p computed) <= E4M3(p (1 + δ))        because rounding is monotone

and o lies between the sums that these two make, but for the rounding of sum, acc and o. fp16 in the place of E4M3
changes nothing of it.
"""

import math
from dataclasses import replace

import torch
from kernel_tests import lost_in_the_unit
from torch import Tensor
from triton.language import target_info

from fluxq.kernels.attention.op import KEY_BLOCK, P_EXPONENT, QUERY_BLOCK, Operands
from fluxq.kernels.encode import decode, encode
from fluxq.recipes.formats import ELEMENTS

E4M3 = ELEMENTS["e4m3"]
ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]  # of 16 tokens, in which kernels keep values in fp8


def as_kernels_keep(operands: Operands, *, back: bool = False) -> Operands:
    """Return operands in the reference's order of tokens as kernels of the chip at hand keep them, or back from that.

    Matrix units of sm_89, sm_90 and sm_120 hold sums and operands in other threads: values in fp8 have ORDER there.
    """
    chip = target_info.current_target()
    if operands.v.dtype == torch.float16 or chip.backend != "cuda" or not (chip.arch in (89, 90) or chip.arch >= 120):
        return operands
    order = sorted(range(16), key=ORDER.__getitem__) if back else ORDER
    v = operands.v.view(torch.uint8).unflatten(-1, (-1, 16))[..., order].flatten(-2)
    return replace(operands, v=v.view(operands.v.dtype))


def bounds(operands: Operands, queries: int, keys: int, log2_scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(o, largest error) in float64, (B, S, H, D) both: what fp32 in any order can make of these codes, in dtype.

    With u = 2^-24, the rounding of fp32, and m the running maximum of a key's block:

        e = |factor| · D · u · Σ|q k| + 4u |t|                   error of t: a sum of D exact products, and factors;
                                                                 the sum of int8's is exact
        δ = ln 2 · (e + max e + 2u (|t - m| + 8)) + 2^-21        relative error of p: t, m, two sums, 2^x itself
        ε = 2 · (blocks · (2^-21 + max e) + keys · u)            of the corrections' product, and of sums over keys

    A key adds a number in 2^(m - last m) · [E4M3(p (1 - δ)), E4M3(p (1 + δ))] · v to acc; sum and acc are wrong by ε.
    On Hopper, whose matrix units hold fewer bits of fp8 sums than fp32, e counts as many roundings more for the D
    products, and ε for those of a block of keys.
    """
    u = 2.0**-24
    q, k, v = (x.double() for x in (operands.q[:, :, :queries], operands.k[:, :, :keys], operands.v[..., :keys].mT))
    d = operands.q.shape[-1]
    share, terms = (1, 0) if operands.q.dtype == torch.int8 else (QUERY_BLOCK, d + lost_in_the_unit(d))
    q_scale = operands.q_scale.double().repeat_interleave(share, 2)[:, :, :queries, None]
    k_scale = operands.k_scale.double().repeat_interleave(KEY_BLOCK, 2)[:, :, None, :keys]
    factor = log2_scale * q_scale * k_scale  # (B, H, S, Skv), as all that follows
    t = factor * (q @ k.mT)
    e = factor.abs() * terms * u * (q.abs() @ k.abs().mT) + 4 * u * t.abs()
    worst = e.amax(-1, keepdim=True)
    blocks = -(-keys // KEY_BLOCK)
    order = sorted(range(blocks), key=lambda block: block < keys // KEY_BLOCK)  # one that is not full comes first
    m = torch.stack([t[..., block * KEY_BLOCK : (block + 1) * KEY_BLOCK].amax(-1) for block in order], -1)
    m = m.cummax(-1).values
    last, m = m[..., -1:], m[..., [order.index(block) for block in range(blocks)]]
    m = m.repeat_interleave(KEY_BLOCK, -1)[..., :keys]
    p = torch.exp2(t - m + P_EXPONENT)
    delta = math.log(2) * (e + worst + 2 * u * ((t - m).abs() + P_EXPONENT)) + 2.0**-21
    low, high = (_rounded((p * side).float(), operands.v.dtype) for side in (1 - delta, 1 + delta))
    weight = torch.exp2(m - last)
    total = (weight * p).sum(-1, keepdim=True)
    middle, half = weight * (low + high).double() / 2, weight * (high - low).double() / 2
    scale = operands.v_scale.double()[:, :, None]
    o = middle @ v / total * scale
    lost = lost_in_the_unit(KEY_BLOCK) if operands.v.dtype == torch.float8_e4m3fn else 0
    epsilon = 2 * (blocks * (2.0**-21 + worst) + (keys + lost) * u)
    error = (half @ v.abs() + epsilon * ((middle + half) @ v.abs())) / total * scale
    rounding = torch.finfo(dtype)
    error += rounding.eps / 2 * (o.abs() + error) + rounding.smallest_normal * rounding.eps
    return o.transpose(1, 2), error.transpose(1, 2)


def _rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    return decode(encode(p, E4M3), E4M3) if dtype == torch.float8_e4m3fn else p.to(dtype).float()
