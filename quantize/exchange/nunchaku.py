"""nunchaku's layers, packed for the fragments of its kernels: diffusers' `nunchaku_lite` and nunchaku's single files.

    y = wtscale · wcscales[n] · Σ_g s_x[m, g] · s_w[n, g] · (q_x · q_w) + (x · proj_down) · proj_upᵀ + bias

    svdq_w4a4   qweight I8 [N, K/2], wscales 16-bit [K/64, N] (int4) or E4M3 [K/16, N] (nvfp4), smooth_factor [K],
                proj_down [K, r], proj_up [N, r], bias [N]; nvfp4 also wtscale [1] and wcscales [N]
    awq_w4a16   qweight I32 [N/4, K/2] of code + 8, wscales and wzeros [K/64, N]: q · s + z with z = -8 · s

x / smooth_factor is rounded to blocks of 64 (int4, amax / 7) or 16 (nvfp4, no global scale); the low-rank pair reads x.
So codes and pair are ours, but two things are rounded to 16 bit: smooth_factor, the reciprocal of ours, and the global
scale, the product of wtscale and wcscales; their error is below 2^-8, and about 2^-15 where a layer has one scale. A
calibrated input_scale becomes a power of two that moves from x into the weight, which changes no product and keeps the
blocks of x in E4M3's range.

How an index of 128 rows and 64 columns is cut: see the tables at the end. Single files of FLUX.1 have older names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.kernels.encode import pack, unpack
from fluxq.quantize.exchange.containers import pipeline_writer
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Decoded, Encoded, Plain, QuantTensors, without_idle_ranks
from fluxq.quantize.exchange.layouts import padded
from fluxq.quantize.exchange.marks import FileLayer, by_config, by_tensor, codes_of, matrix_shape
from fluxq.quantize.exchange.rows import Row, Tensors, native, positive, row_for
from fluxq.recipes.formats import ELEMENTS

GELU_SHIFT = 0.171875  # what nunchaku's kernel adds behind GELU, so that 4-bit codes without a sign hold it
RANKS = 16  # the low-rank kernel takes so many at a time
_INT4 = ELEMENTS["int4"]


def encode(
    layer: QuantTensors,
    *,
    rank: int | None = None,
    dtype: torch.dtype | None = None,
    single_file: bool = False,
    after_gelu: bool = False,
) -> Encoded:
    """Tensors and entry of a layer; ValueError that says why nunchaku has no layer for it.

    rank: to which the low-rank pair is filled up with zeros, since all layers of a file have one; by default the next
    multiple of 16. dtype: of what is in 16 bit, by default that of the bias. single_file: the older names.
    after_gelu: the layer reads GELU + GELU_SHIFT in codes without sign, as nunchaku's fused int4 MLP gives it; what the
    shift adds is taken from the bias.
    """
    row, notes = row_for(layer, ROWS, "nunchaku")
    tensors, (n, k) = dict(layer.tensors), layer.shape
    dtype = dtype or layer.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"nunchaku computes in 16 bit, the layer's bias is {dtype}; give dtype=torch.bfloat16")
    if row.name == "awq_w4a16":
        return Encoded(_awq(tensors, dtype), {"op": "awq_w4a16", "precision": "int4", "group_size": 64}, notes)
    layer_rank, r = layer.scheme.rank, padded(max(layer.scheme.rank, 1), RANKS)
    if rank is not None and (rank % RANKS or rank < layer_rank):
        raise ValueError(f"nunchaku: rank {rank} is no multiple of {RANKS} of at least the layer's {layer_rank}")
    r = r if rank is None else rank
    precision = "int4" if row.weights == "int4" else "nvfp4"
    if after_gelu:
        if precision != "int4":
            raise ValueError("nunchaku shifts what follows GELU for int4 alone, this layer is nvfp4")
        tensors["bias"] = _bias_without_shift(layer, -1)
        notes += ("what GELU's shift adds was taken from the bias, which rounds it to 16 bit",)
    factors, scale = torch.ones(k, dtype=torch.float32), tensors["weight_scale"]
    if "pre_quant_scale" in tensors:
        factors = 1 / tensors["pre_quant_scale"].float()
    done = {"qweight": pack_codes(tensors["weight"])}
    if precision == "nvfp4":
        moved = torch.ones((), dtype=torch.float32)
        if layer.scheme.static_input:
            moved = torch.exp2(torch.log2(tensors["input_scale"]).ceil())
            notes += ("input_scale became a power of two between x and the weight",)
        product = tensors["weight_scale_2"] * moved
        rows = product.expand(n, 1).reshape(-1)
        wt, wc = two_factors(rows, dtype)
        factors = factors * moved
        if not torch.equal(wt.float() * wc.float(), rows):
            notes += ("weight_scale_2 became the product of two 16-bit numbers, the nearest of 256 pairs",)
        done |= {"wscales": tile(scale, _FP4_SCALES), "wtscale": wt, "wcscales": tile(wc, _VECTOR).reshape(n)}
    else:
        done["wscales"] = tile(_cast(scale, dtype, "weight_scale"), _INT4_SCALES)
    smooth = _cast(factors, dtype, "smooth_factor")
    if not torch.equal(smooth.float(), factors):
        notes += ("smooth_factor is the reciprocal of pre_quant_scale in 16 bit, within 2^-8",)
    done["smooth_factor"] = tile(smooth, _VECTOR).reshape(k)
    a, b = torch.zeros(r, k, dtype=dtype), torch.zeros(n, r, dtype=dtype)
    if layer_rank:
        a[:layer_rank], b[:, :layer_rank] = tensors["svdquant_lora_a"].to(dtype), tensors["svdquant_lora_b"].to(dtype)
    done |= {"proj_down": tile(a, _DOWN).reshape(k, r), "proj_up": tile(b, _UP).reshape(n, r)}
    if "bias" in tensors:
        done["bias"] = tile(tensors["bias"].to(dtype), _VECTOR).reshape(n)
    if single_file:
        done["smooth_factor_orig"] = done["smooth_factor"].clone()
        done = {_OLDER.get(name, name): tensor for name, tensor in done.items()}
    entry = {"op": "svdq_w4a4", "precision": precision, "group_size": layer.scheme.weights.group_size, "rank": r}
    return Encoded(done, entry | ({"act_unsigned": True} if after_gelu else {}), notes)


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any] = {}) -> Decoded:
    """The layer whose weight is (N, K) = shape, by either names. entry: {"act_unsigned": True} if it follows GELU."""
    n, k = shape
    newer = {old: name for name, old in _OLDER.items()}
    parts = Tensors({newer.get(name, name): tensor for name, tensor in tensors.items()}, "nunchaku")
    awq = "wzeros" in parts
    is_e4m3 = "wscales" in tensors and tensors["wscales"].dtype == torch.float8_e4m3fn
    row = ROWS[2] if awq else ROWS[1] if is_e4m3 else ROWS[0]
    for letter, size, unit in zip("NK", shape, row.multiples, strict=True):
        if size % unit:
            raise ValueError(f"nunchaku: {row.name} has {letter} in multiples of {unit}, not {letter} = {size}")
    if awq:
        return _from_awq(parts, shape)
    done = {"weight": unpack_codes(parts.take("qweight", (torch.int8, torch.uint8), (n, k // 2)))}
    if row.weights == "nvfp4":
        scale = parts.scale("wscales", torch.float8_e4m3fn, (k // 16, n))
        done["weight_scale"] = untile(scale, _FP4_SCALES, (n, k // 16))
        product = torch.ones(n, dtype=torch.float32)
        if "wcscales" in parts:
            product = untile(parts.scale("wcscales", _HALVES, (n,)).float(), _VECTOR, (n,))
        if "wtscale" in parts:
            product = product * parts.scale("wtscale", _HALVES, (1,), ()).float().reshape(())
        same = (product == product[0]).all()
        done["weight_scale_2"] = product[0].clone() if same else product.reshape(n, 1)
    else:
        done["weight_scale"] = untile(parts.scale("wscales", _HALVES, (k // 64, n)), _INT4_SCALES, (n, k // 64))
    smooth = untile(parts.scale("smooth_factor", _HALVES, (k,)), _VECTOR, (k,))
    if (smooth == 0).any():
        raise ValueError("nunchaku: smooth_factor holds zeros, by which x would be divided; get the file again")
    if not (smooth == 1).all():
        done["pre_quant_scale"] = (1 / smooth.float()).to(smooth.dtype)
    if "smooth_factor_orig" in parts:
        parts.take("smooth_factor_orig", _HALVES, (k,))  # no kernel reads it
    down = parts.take("proj_down", _HALVES)
    r = down.shape[-1]
    if tuple(down.shape) != (k, r) or r % RANKS:
        raise ValueError(f"nunchaku: proj_down is {(*down.shape,)}, expected ({k}, a multiple of {RANKS})")
    up = parts.take("proj_up", down.dtype, (n, r))
    done |= {"svdquant_lora_a": untile(down, _DOWN, (r, k)), "svdquant_lora_b": untile(up, _UP, (n, r))}
    if "bias" in parts:
        done["bias"] = untile(parts.take("bias", _HALVES, (n,)), _VECTOR, (n,))
    parts.finish()
    done = without_idle_ranks(done)
    precise = done["weight_scale"]
    if row.weights == "int4":
        done["weight_scale"] = precise.bfloat16()
    layer = native(row, shape, done)
    if not torch.equal(done["weight_scale"].float(), precise.float()):
        return _widened(layer, precise, entry.get("act_unsigned", False))
    return _with_bias(layer, _bias_without_shift(layer, 1)) if entry.get("act_unsigned") else layer


def _widened(layer: QuantTensors, scale: Tensor, act_unsigned: bool) -> Plain:
    """An int4 layer whose scales (N, K/64) are fp16 numbers that bf16, in which ours are, does not hold."""
    codes = unpack(layer.tensors["weight"], _INT4)
    weight = (codes.reshape(len(codes), -1, 64) * scale.float().unsqueeze(-1)).reshape(layer.shape)
    if "pre_quant_scale" in layer.tensors:
        weight = weight * layer.tensors["pre_quant_scale"].float()
    if layer.scheme.rank:
        weight += layer.tensors["svdquant_lora_b"].float() @ layer.tensors["svdquant_lora_a"].float()
    bias = layer.tensors.get("bias")
    if act_unsigned:
        bias = GELU_SHIFT * weight.sum(1) + (0 if bias is None else bias.float())
    return Plain(weight, bias, "its scales are fp16 numbers that bf16 does not hold")


def two_factors(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(t (1,), c (N,)) in 16 bit whose products come nearest to positive fp32 `values` (N,).

    One 16-bit number alone would be off by up to 2^-9 for the whole layer; of 256 neighbours of it as t, the one is
    taken whose largest error, with the best c for each value, is least. ValueError where 16 bit do not reach.
    """
    near = values[:1].to(dtype).float() * (1 + torch.arange(256) / 256)
    t = near.to(dtype)
    distinct = values.unique().unsqueeze(1)
    c = (distinct / t.float()).to(dtype)
    error = (t.float() * c.float() / distinct - 1).abs().nan_to_num(torch.inf).amax(0)
    best = error.argmin()
    if error[best] > 2.0**-8:
        raise ValueError(f"nunchaku: a global scale of {values[0]:g} is out of the range of {dtype}; use bfloat16")
    return t[best].reshape(1), (values / t[best].float()).to(dtype)


def pack_codes(weight: Tensor) -> Tensor:
    """4-bit codes as stored, U8 (N, K/2), as qweight I8 (N, K/2): two neighbours stay in one byte."""
    return tile(weight, _CODES).reshape(weight.shape).view(torch.int8)


def unpack_codes(qweight: Tensor) -> Tensor:
    """Inverse of `pack_codes`."""
    return untile(qweight.view(torch.uint8), _CODES, tuple(qweight.shape))


def tile(tensor: Tensor, tiling: Tiling) -> Tensor:
    """Values in the order that kernels read; a matrix comes out as (columns, rows), which is how files declare it."""
    cut, order = tiling
    wide = tensor if tensor.ndim > 1 else tensor.unsqueeze(1)
    bits = wide.view(torch.uint8) if wide.element_size() == 1 else wide
    tiled = bits.reshape(_sizes(wide.shape, cut)).permute(order)
    return tiled.reshape(wide.shape[1], wide.shape[0]).contiguous().view(tensor.dtype)


def untile(tensor: Tensor, tiling: Tiling, shape: tuple[int, ...]) -> Tensor:
    """Inverse of `tile`; shape: of what it was given."""
    cut, order = tiling
    sizes = _sizes(torch.Size((shape[0], shape[1] if len(shape) > 1 else 1)), cut)
    bits = tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor
    back = sorted(range(len(order)), key=order.__getitem__)
    tiled = bits.reshape([sizes[axis] for axis in order]).permute(back)
    return tiled.reshape(shape).contiguous().view(tensor.dtype)


def config(entries: Mapping[str, Mapping[str, Any]], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """`quantization_config` of nunchaku_lite. entries: by module; ValueError where their precisions or ranks differ."""
    described: dict[str, Any] = {"quant_method": "nunchaku_lite", "compute_dtype": str(dtype).removeprefix("torch.")}
    for op in ("svdq_w4a4", "awq_w4a16"):
        of_op = {name: entry for name, entry in entries.items() if entry["op"] == op}
        if not of_op:
            continue
        first = {key: value for key, value in next(iter(of_op.values())).items() if key != "op"}
        for name, entry in of_op.items():
            if {key: value for key, value in entry.items() if key != "op"} != first or "act_unsigned" in entry:
                raise ValueError(
                    f"nunchaku_lite has one precision and rank for all of {op}, {name} has another: {entry}"
                )
        described[op] = {**first, "targets": list(of_op)}
    if len(described) == 2:
        raise ValueError("nunchaku_lite: no layer is quantized")
    return described


def metadata(
    entries: Mapping[str, Mapping[str, Any]], model_class: str, model_config: Mapping[str, Any]
) -> dict[str, str]:
    """The header of a single file. model_class: as nunchaku names it; model_config: diffusers' config.json."""
    settings = {(e["precision"], e["group_size"], e["rank"]) for e in entries.values() if e["op"] == "svdq_w4a4"}
    if len(settings) != 1:
        raise ValueError(f"a file of nunchaku has one precision and rank, these layers have {sorted(settings)}")
    precision, group, rank = settings.pop()
    number = {"dtype": "int4", "scale_dtype": None, "group_size": group}
    if precision == "nvfp4":
        number = {"dtype": "fp4_e2m1_all", "scale_dtype": [None, "fp8_e4m3_nan"], "group_size": group}
    described = {"method": "svdquant", "weight": number, "activation": number, "rank": rank}
    texts = {"config": model_config, "comfy_config": {}, "quantization_config": described}
    return {"model_class": model_class, **{name: json.dumps(value) for name, value in texts.items()}}


def interleaved(layer: QuantTensors, chunks: int) -> QuantTensors:
    """A modulation's rows in the order of nunchaku's own blocks: channel by channel, with its chunks side by side.

    1 is added to the bias of the chunks that scale, the second and the last but one: those blocks multiply by the chunk
    itself. nunchaku_lite runs diffusers' blocks and takes the layer as it is. ValueError without a bias.
    """
    bias, ones = _modulating(layer, chunks)
    rows = torch.arange(len(bias)).reshape(chunks, -1).T.reshape(-1)
    return _with_bias(layer.reordered(rows), (bias.float() + ones)[rows].to(bias.dtype))


def chunked(layer: Decoded, chunks: int) -> Decoded:
    """Inverse of `interleaved`, but for what the sum with 1 rounded off the bias."""
    bias, ones = _modulating(layer, chunks)
    rows = torch.arange(len(bias)).reshape(-1, chunks).T.reshape(-1)
    moved, bias = layer.reordered(rows), (bias.float()[rows] - ones).to(bias.dtype)
    return replace(moved, bias=bias) if isinstance(moved, Plain) else _with_bias(moved, bias)


def _modulating(layer: Decoded, chunks: int) -> tuple[Tensor, Tensor]:
    """The bias (N,) of a modulation, and (N,) 1 for each row of a chunk that scales, 0 elsewhere."""
    is_plain = isinstance(layer, Plain)
    bias = layer.bias if is_plain else layer.tensors.get("bias")
    if bias is None or len(bias) % chunks or (not is_plain and layer.scheme.rank):
        description = layer.why if is_plain else layer.scheme
        raise ValueError(f"nunchaku: no modulation of {chunks} chunks with a bias: {description}")
    ones = torch.zeros(chunks, len(bias) // chunks, dtype=torch.float32)
    ones[[1, chunks - 2]] = 1
    return bias, ones.reshape(-1)


def _with_bias(layer: QuantTensors, bias: Tensor) -> QuantTensors:
    return replace(layer, tensors={**layer.tensors, "bias": bias})


def _bias_without_shift(layer: QuantTensors, sign: int) -> Tensor:
    weight, bias = layer.collapsed()
    moved = sign * GELU_SHIFT * weight.sum(1)
    dtype = bias.dtype if bias is not None else torch.bfloat16
    return (moved if bias is None else bias.float() + moved).to(dtype)


def _awq(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    codes = unpack(tensors["weight"] ^ 0x88, ELEMENTS["e2m1"])  # uint8: code + 8
    n, k = codes.shape
    quads = codes.reshape(n // 4, 4, k // 64, 2, 4, 8).permute(0, 2, 1, 3, 5, 4)  # k: 64, half, nibble, place
    words = quads[..., 0::2] | quads[..., 1::2] << 4  # two bytes, the lower first
    scale = _cast(tensors["weight_scale"], dtype, "weight_scale").T.contiguous()
    done = {"qweight": words.contiguous().reshape(n // 4, 2 * k).view(torch.int32)}
    done |= {"wscales": scale, "wzeros": scale * -8}
    return done | ({"bias": tensors["bias"].to(dtype)} if "bias" in tensors else {})


def _from_awq(parts: Tensors, shape: tuple[int, int]) -> Decoded:
    n, k = shape
    words = parts.take("qweight", torch.int32, (n // 4, k // 2)).contiguous().view(torch.uint8)
    quads = unpack(words, ELEMENTS["e2m1"]).reshape(n // 4, k // 64, 4, 2, 8, 4)
    codes = quads.permute(0, 2, 1, 3, 5, 4).reshape(n, k)
    scale, zeros = (parts.take(name, _HALVES, (k // 64, n)) for name in ("wscales", "wzeros"))
    done = {"bias": parts.take("bias", _HALVES, (n,))} if "bias" in parts else {}
    parts.finish()
    for zero in (8, 7):  # that of what is exported here, and deepcompressor's, whose product is rounded to 16 bit
        signed_codes, exact = codes.view(torch.int8) - zero, scale.float() * -zero
        is_near = ((zeros.float() - exact).abs() <= 2.0**-8 * exact.abs()).all()  # product and scale were rounded
        if scale.dtype == torch.bfloat16 and is_near and signed_codes.max() <= _INT4.max:
            done["weight"] = pack(signed_codes, _INT4)
            done["weight_scale"] = positive(scale.T.contiguous(), "nunchaku: wscales")
            beside = {} if torch.equal(zeros.float(), exact) else {"wzeros": zeros}
            return native(ROWS[2], shape, done, beside)
    dense = codes.reshape(n, -1, 64) * scale.float().T.unsqueeze(-1) + zeros.float().T.unsqueeze(-1)
    return Plain(dense.reshape(shape), done.get("bias"), f"its int4 has zero points, or scales in {scale.dtype}")


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """In 16 bit; ValueError where numbers leave its range."""
    cast = tensor.to(dtype)
    if not torch.isfinite(cast).all() or (cast == 0).any():
        raise ValueError(f"nunchaku: {name} leaves the range of {dtype}; use bfloat16")
    return cast


def _sizes(shape: torch.Size, cut: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
    """Sizes of the axes into which rows and columns are cut; the 0 of each is what is left."""
    sizes = []
    for size, axes in zip(shape, cut, strict=True):
        rest = size
        for axis in axes:
            rest //= axis or 1
        sizes += [axis or rest for axis in axes]
    return sizes


# Axes of the rows and of the columns (bytes, for codes), the slowest first and 0 for what is left, and their order in
# the file. A fragment of mma.m16n8k64 has lanes of 8 rows and 4 columns; 128 rows are 8 pairs of fragments.
Tiling = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]
_CODES: Tiling = (((0, 8, 2, 8), (0, 2, 4, 4)), (0, 4, 1, 3, 6, 2, 5, 7))
_INT4_SCALES: Tiling = (((0, 8, 2, 4, 2), (0,)), (0, 5, 1, 3, 2, 4))
_VECTOR = _INT4_SCALES
_FP4_SCALES: Tiling = (((0, 4, 4, 8), (0, 4)), (0, 4, 3, 2, 1, 5))
_DOWN: Tiling = (((0, 2, 8), (0, 2, 4, 2)), (3, 0, 2, 5, 1, 4, 6))
_UP: Tiling = (((0, 2, 8), (0, 2, 4, 2)), (0, 3, 2, 5, 1, 4, 6))
_OLDER = {
    "smooth_factor": "smooth",
    "smooth_factor_orig": "smooth_orig",
    "proj_down": "lora_down",
    "proj_up": "lora_up",
}
_HALVES = (torch.bfloat16, torch.float16)
_READER = "nunchaku, diffusers"
_SVDQ: dict[str, Any] = {"smooth": True, "low_rank": True, "multiples": (128, 128), "factors_stay": True}
ROWS = (
    Row("svdq_w4a4 int4", "int4", "int4", read_by=_READER, **_SVDQ),
    Row("svdq_w4a4 nvfp4", "nvfp4", "nvfp4", input_scale="optional", row_scales=True, read_by=_READER, **_SVDQ),
    Row("awq_w4a16", "int4", None, multiples=(4, 64), read_by=_READER),
)

# --- files


def shape_of(stored: Mapping[str, Stored], entry: Mapping[str, Any]) -> tuple[int, int]:
    """(N, K) of a layer, of either names."""
    suffix, codes, rows, columns = codes_of(stored)
    if suffix != "qweight":
        return matrix_shape(stored, entry)
    return (4 * rows, 2 * columns) if codes.dtype == "I32" else (rows, 2 * columns)


def format_of(layer: FileLayer) -> str:
    """The op of a layer, of either names."""
    if "wzeros" in layer.parts:
        return "awq_w4a16"
    scales = [stored.dtype for suffix, stored in layer.stored.items() if suffix.endswith("wscales")]
    return f"svdq_w4a4 {'nvfp4' if 'F8_E4M3' in scales else 'int4'}"


SUFFIXES = (
    *("qweight", "wscales", "wzeros", "wcscales", "wtscale"),
    *("smooth_factor", "smooth_factor_orig", "smooth", "smooth_orig", "proj_down", "proj_up", "lora_down", "lora_up"),
)
DIALECT = Dialect(
    "nunchaku_lite",
    "nunchaku's kernels under diffusers' own blocks",
    decode,
    marks=(by_config("nunchaku_lite", "svdquant"), by_tensor("qweight", "proj_down")),
    methods=("nunchaku_lite", "svdquant"),
    suffixes=SUFFIXES,
    shape=shape_of,
    format_of=format_of,
    rows=ROWS,
    bias_shift=GELU_SHIFT,
    encode=encode,
    writer=pipeline_writer(lambda one: config(one.entries, one.source.dtype)),
    takes_dtype=True,
    ranks=RANKS,
    format_key="op",
)
