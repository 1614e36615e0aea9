"""comfy-kitchen's layers of 4-bit codes in ComfyUI's files: what they hold of ours, and what becomes of the others.

    svdquant_w4a4   weight I8 [N, K/2], the even column in the low nibble; in 16 bit weight_scale [K/64, N],
                    weight_smooth_factor [K], weight_proj_down [K, r], weight_proj_up [N, r]. x / smooth_factor is
                    rounded in blocks of 64, the low-rank pair reads x. `act_unsigned`: x + 0.171875 is rounded to codes
                    without sign, the pair reads x. `layout` kitchen_tile_packed_w4a4: weight [N/128, K/64, 32, 128],
                    weight_scale [N/128, K/64, 128], weight_proj_up [N/128, r, 128]
    convrot_w4a4    weight as above, weight_scale F32 [N]; columns of both and x are rotated in blocks of
                    `convrot_groupsize`, and x is rounded to int4, or int8 (`linear_dtype`), with a scale for each row
    asym_w4a8_int8  weight I8 [N, K/2], or [N, 3K/4] with the upper two bits of 6-bit codes behind the nibbles,
                    weight_s_rel E4M3 or F32 [N, K/group_size], weight_s_channel F32 [N], weight_codebook F32 [16];
                    rotated, W = clamp(round(level · s_rel), ±127) · s_channel, where level is codebook[code], code - 8
                    or code - 32; weight_correction [K/group_size, N] is added. x is rounded to int8

So `asym_w4a8_int8` multiplies in int8, with just these codes: as `int8` they are ours, and so are those of convrot_w4a4
whose scales bf16 does not hold. ComfyUI 0.33.0 has no svdquant_w4a4; comfy-kitchen has it, and forks of ComfyUI load it
under these names. comfy-quants writes it without `weight_` before smooth_factor and the pair.
Source: comfy-kitchen 0.2.40's tensor/ and backends/eager, ComfyUI's comfy/ops.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.kernels.encode import unpack
from fluxq.kernels.transforms import rotate
from fluxq.quantize.checkpoint import LARGEST
from fluxq.quantize.exchange.layer import Decoded, Plain, QuantTensors, without_idle_ranks
from fluxq.quantize.exchange.layouts import padded
from fluxq.quantize.exchange.marks import weight_of
from fluxq.quantize.exchange.nunchaku import GELU_SHIFT, RANKS
from fluxq.quantize.exchange.rows import FLOATS, Row, Tensors, native, not_finite, positive
from fluxq.recipes.formats import ELEMENTS, REGULAR_HADAMARDS, find_format

CONVROT_SIZE = 256  # of an entry that says none
_GROUP = 64  # of svdquant_w4a4 and, its readers' only one, convrot_w4a4
_TILED = "kitchen_tile_packed_w4a4"
_BYTES = (torch.int8, torch.uint8)
_INT4 = ELEMENTS["int4"]
_BY_ROWS = replace(find_format("int8"), name="int4 by rows", element=_INT4)  # as convrot_w4a4 rounds


def encode_svdquant(layer: QuantTensors) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors of an int4 layer of groups of 64, and notes; the bias is not among them.

    A low-rank pair is filled up to a multiple of 16 with zeros. ValueError where numbers leave 16 bit.
    """
    tensors, (n, k) = layer.tensors, layer.shape
    dtype = layer.dtype if layer.dtype == torch.float16 else torch.bfloat16
    factors, notes = torch.ones(k, dtype=torch.float32), (_UNREAD_SVD,)
    if "pre_quant_scale" in tensors:
        factors = 1 / tensors["pre_quant_scale"].float()
    smooth = _halved(factors, dtype, "weight_smooth_factor")
    if not torch.equal(smooth.float(), factors):
        notes += ("weight_smooth_factor is the reciprocal of pre_quant_scale in 16 bit, within 2^-8",)
    rank = layer.scheme.rank
    filled = padded(max(rank, 1), RANKS)
    down, up = torch.zeros(k, filled, dtype=dtype), torch.zeros(n, filled, dtype=dtype)
    if rank:
        down[:, :rank], up[:, :rank] = tensors["svdquant_lora_a"].T.to(dtype), tensors["svdquant_lora_b"].to(dtype)
    done = {"weight": tensors["weight"].view(torch.int8), "weight_smooth_factor": smooth}
    done["weight_scale"] = _halved(tensors["weight_scale"], dtype, "weight_scale").T.contiguous()
    return done | {"weight_proj_down": down, "weight_proj_up": up}, notes


def encode_convrot(layer: QuantTensors) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a rotated int4 layer each of whose rows has one scale, and what its entry says of the rotation."""
    scale = layer.tensors["weight_scale"].float()
    if not (scale == scale[:, :1]).all():
        raise ValueError(f"comfy: {_ONE_SCALE}")
    tensors = {"weight": layer.tensors["weight"].view(torch.int8), "weight_scale": scale[:, 0].contiguous()}
    return tensors, {"convrot_groupsize": layer.scheme.hadamard}


def decode(row: Row, parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    """The layer of a row of ROWS. parts: its tensors but `comfy_quant`; ValueError for what no reader of it takes."""
    if "pre_quant_scale" in parts:
        raise ValueError(
            f"comfy: the layer is {row.name} and has pre_quant_scale, and no reader says which comes first"
        )
    return _READERS[row.name](row, parts, shape, entry)


def rotation(entry: Mapping[str, Any], k: int) -> int:
    """Size of the blocks of K columns that an entry says are rotated; ValueError for one that cannot be so."""
    size = entry.get("convrot_groupsize", CONVROT_SIZE)
    if type(size) is not int or size not in (4**power for power in range(1, 16)):
        raise ValueError(
            f"comfy: convrot_groupsize {size!r} is no power of 4, as 16, 64 and 256 are; get the file again"
        )
    if k % size:
        raise ValueError(f"comfy: convrot_groupsize {size} does not divide K = {k}; get the file again")
    return size


def size_of(stored: Mapping[str, Stored], entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """(N, K) of a layer whose codes lie in tiles or may have 6 bits; None for others.

    ValueError for tensors of asym_w4a8_int8 that do not fit each other, before they are read.
    """
    weight = weight_of(stored).shape
    if len(weight) == 4:
        return weight[0] * 128, weight[1] * _GROUP
    if entry.get("format") != "asym_w4a8_int8" or "weight_s_rel" not in stored or len(weight) != 2:
        return None
    n, relative = weight[0], stored["weight_s_rel"].shape
    groups = relative[-1] if relative else 0
    k = groups * _group_size(entry)
    fits = {"weight_s_rel": [(n, groups)], "weight": [(n, k // 2), (n, 3 * k // 4)]}
    for name, sizes in (fits | {"weight_codebook": [(16,)], "weight_correction": [(groups, n)]}).items():
        if name in stored and stored[name].shape not in sizes:
            expected = "(N, K / group_size)" if name == "weight_s_rel" else " or ".join(map(str, sizes))
            raise ValueError(f"comfy: {name} is {stored[name].shape}, expected {expected}; get the file again")
    return n, k


# --- one reader for each format


def _read_svdquant(row: Row, parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    n, k = shape
    unsigned = _is_unsigned(row, entry)
    codes, scale, down, up = _svdquant_in_rows(parts, shape, entry.get("layout"))
    smooth = parts.scale(_named(parts, "smooth_factor"), FLOATS, (k,))
    done = rest(parts, n)
    _require_computable(entry, smooth, down, up)
    weight = (unpack(codes, _INT4).reshape(n, -1, _GROUP) * scale.float().unsqueeze(-1)).reshape(n, k) / smooth.float()
    if unsigned:
        if "bias" not in done:
            raise ValueError("comfy: act_unsigned, and the layer has no bias to hold what the shift of x adds")
        done["bias"] = (done["bias"].float() + GELU_SHIFT * weight.sum(1)).to(done["bias"].dtype)
    if not torch.equal(scale.bfloat16().float(), scale.float()):
        weight = weight + up.float() @ down.float().T
        return Plain(weight, done.get("bias"), f"its scales are {scale.dtype} numbers that bf16 does not hold")
    done |= {"weight": codes, "weight_scale": scale.bfloat16()}
    if (smooth != 1).any():
        done["pre_quant_scale"] = (1 / smooth.float()).to(smooth.dtype)
    if down.shape[1]:
        done |= {"svdquant_lora_a": down.T.contiguous(), "svdquant_lora_b": up.contiguous()}
    return replace(native(row, shape, without_idle_ranks(done)), notes=(_UNSIGNED,) if unsigned else ())


def _is_unsigned(row: Row, entry: Mapping[str, Any]) -> bool:
    """Tell whether x has codes without sign; ValueError for another word, and where x is not rounded."""
    unsigned = entry.get("act_unsigned", False)
    if type(unsigned) is not bool:
        raise ValueError(f"comfy: act_unsigned is {unsigned!r}, expected true or false")
    if unsigned and row.activations is None:
        raise ValueError(
            "comfy: act_unsigned with full_precision_matrix_mult, where nothing adds the shift that it means"
        )
    return unsigned


def _svdquant_in_rows(parts: Tensors, shape: tuple[int, int], layout: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (N, K/2) uint8, scales (N, K/64), and the pair, (K, r) and (N, r), of rows or of tiles.

    layout: of the entry. ValueError for another layout, and for shapes that are not of it.
    """
    (n, k), tiles, groups = shape, shape[0] // 128, shape[1] // _GROUP
    if k % _GROUP:
        raise ValueError(f"comfy: svdquant_w4a4 has groups of 64, which do not divide K = {k}; get the file again")
    if layout not in (None, _TILED):
        raise ValueError(f"comfy: layout {layout!r} is none of svdquant_w4a4 that is read here; known is {_TILED}")
    if layout and n % 128:
        raise ValueError(f"comfy: layout {layout} has rows in tiles of 128, not N = {n}; get the file again")
    in_rows, in_tiles = [] if layout else [(n, k // 2)], [] if n % 128 else [(tiles, groups, 32, 128)]
    packed = parts.take("weight", _BYTES, *in_rows, *in_tiles)
    is_tiled = packed.ndim == 4
    scale = parts.scale("weight_scale", FLOATS, (tiles, groups, 128) if is_tiled else (groups, n))
    down = parts.take(_named(parts, "proj_down"), FLOATS)
    if down.ndim != 2 or down.shape[0] != k:
        raise ValueError(f"comfy: weight_proj_down is {(*down.shape,)}, expected ({k}, rank)")
    r = down.shape[1]
    up = parts.take(_named(parts, "proj_up"), FLOATS, (tiles, r, 128) if is_tiled else (n, r))
    if is_tiled:
        packed = packed.reshape(tiles, groups, 32, 4, 32).permute(0, 2, 3, 1, 4).reshape(n, k // 2)
        scale, up = scale.permute(1, 0, 2).reshape(groups, n), up.permute(0, 2, 1).reshape(n, r)
    return packed.contiguous().view(torch.uint8), scale.T.contiguous(), down, up


def _require_computable(entry: Mapping[str, Any], smooth: Tensor, down: Tensor, up: Tensor) -> None:
    """Raise ValueError for factors of 0, for numbers that are none, and for a pair that reads smoothed x."""
    if (smooth == 0).any():
        raise ValueError("comfy: weight_smooth_factor holds zeros, by which x would be divided; get the file again")
    if bad := not_finite(down) + not_finite(up):
        raise ValueError(f"comfy: {bad} numbers of the low-rank pair are NaN or infinite; get the file again")
    basis = entry.get("lowrank_branch_input_basis", "raw")
    if basis != "raw" and (smooth != 1).any():
        raise ValueError(
            f"comfy: lowrank_branch_input_basis is {basis!r}, and comfy-kitchen's low-rank pair reads x before it is "
            "smoothed; get a file that says raw"
        )


def _read_convrot(row: Row, parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    n, k = shape
    size = _rotated(row, entry, k)
    group, kind = entry.get("quant_group_size", _GROUP), entry.get("linear_dtype", "int4")
    if type(group) is not int or group != _GROUP or k % group:
        raise ValueError(f"comfy: convrot_w4a4 has quant_group_size 64 dividing K, not {group!r} with K = {k}")
    if kind not in ("int4", "int8"):
        raise ValueError(f"comfy: linear_dtype is {kind!r}, convrot_w4a4 has int4 and int8")
    codes = parts.take("weight", _BYTES, (n, k // 2)).contiguous().view(torch.uint8)
    scale = parts.scale("weight_scale", FLOATS, (n,), (n, 1)).float().reshape(n)
    done = rest(parts, n)
    if size not in REGULAR_HADAMARDS:
        weight = unpack(codes, _INT4).float() * scale.unsqueeze(1)
        return Plain(rotate(weight, size, regular=True), done.get("bias"), _other_size(size))
    if kind == "int4" and torch.equal(scale.bfloat16().float(), scale):
        done |= {"weight": codes, "weight_scale": scale.bfloat16().unsqueeze(1).expand(n, k // _GROUP).contiguous()}
        note = () if row.activations is None else (_BY_BLOCKS,)
        return replace(native(row, shape, done, regular=size), coarser=_BY_ROWS, notes=note)
    done |= {"weight": unpack(codes, _INT4).to(torch.int8), "weight_scale": scale}
    as_int8 = replace(row, weights="int8", activations=row.activations and "int8")
    layer = native(as_int8, shape, done, regular=size)
    return replace(layer, coarser=_BY_ROWS, notes=(_FINER if kind == "int4" and row.activations else _HELD_IN_INT8,))


def _read_asym(row: Row, parts: Tensors, shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    n, k = shape
    size, group = _rotated(row, entry, k), _group_size(entry)
    if k % 16 or k % group:
        raise ValueError(f"comfy: group_size {group} does not divide K = {k} in multiples of 16; get the file again")
    packed = parts.take("weight", _BYTES, (n, k // 2), (n, 3 * k // 4)).contiguous().view(torch.uint8)
    s_rel = parts.take("weight_s_rel", (torch.float8_e4m3fn, torch.uint8, *FLOATS), (n, k // group))
    s_rel = positive(s_rel.view(torch.float8_e4m3fn) if s_rel.dtype == torch.uint8 else s_rel, "comfy: weight_s_rel")
    s_channel = parts.scale("weight_s_channel", FLOATS, (n,)).float()
    codebook = parts.take("weight_codebook", FLOATS, (16,)).float() if "weight_codebook" in parts else None
    offset = parts.take("weight_correction", FLOATS, (k // group, n)) if "weight_correction" in parts else None
    for name, tensor in (("weight_codebook", codebook), ("weight_correction", offset)):
        if tensor is not None and not_finite(tensor):
            raise ValueError(f"comfy: {name} holds NaN or infinite numbers; get the file again")
        if tensor is not None and tensor.abs().max() > LARGEST:
            raise ValueError(
                f"comfy: {name} is up to {float(tensor.abs().max()):.3g}, which no weight is; get the file again"
            )
    done = rest(parts, n)
    has_6_bits = packed.shape[1] != k // 2
    if has_6_bits and (codebook is not None or offset is not None or k % 32 or group % 16):
        raise ValueError(
            f"comfy: 6-bit codes have neither codebook nor correction, K in 32s and groups in 16s, not K = {k}"
        )
    codes = unpack(packed[:, : k // 2], ELEMENTS["e2m1"])  # uint8: from 0 to 15
    if has_6_bits:
        upper = packed[:, k // 2 :].unsqueeze(-1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
        codes = codes | upper.reshape(n, k) << 4
    levels = codebook[codes.int()] if codebook is not None else codes.float() - (32 if has_6_bits else 8)
    grouped = (levels.reshape(n, -1, group) * s_rel.float().unsqueeze(-1)).round().clamp(-127, 127)
    if size in REGULAR_HADAMARDS and offset is None:
        done |= {"weight": grouped.reshape(n, k).to(torch.int8), "weight_scale": s_channel}
        coarser = None if has_6_bits else find_format("int4") if k % 64 == 0 else _BY_ROWS
        return replace(native(row, shape, done, regular=size), coarser=coarser, notes=(_HELD_IN_INT8,))
    weight = grouped * s_channel.reshape(n, 1, 1)
    weight = weight if offset is None else weight + offset.float().T.unsqueeze(-1)
    why = _other_size(size) if offset is None else "each group of its columns has an offset"
    return Plain(rotate(weight.reshape(n, k), size, regular=True), done.get("bias"), why)


_READERS = {"svdquant_w4a4": _read_svdquant, "convrot_w4a4": _read_convrot, "asym_w4a8_int8": _read_asym}


def _rotated(row: Row, entry: Mapping[str, Any], k: int) -> int:
    """As `rotation`, of a format whose reader rotates whether the entry says so or not."""
    if entry.get("convrot", True) is not True:
        raise ValueError(f"comfy: convrot is {entry['convrot']!r}, and every reader of {row.name} rotates x")
    return rotation(entry, k)


def _group_size(entry: Mapping[str, Any]) -> int:
    group = entry.get("group_size", 16)
    if type(group) is not int or group < 4 or (16 % group and group % 16):
        raise ValueError(f"comfy: group_size {group!r} is none that asym_w4a8_int8 has: 4, 8 or a multiple of 16")
    return group


def rest(parts: Tensors, n: int) -> dict[str, Tensor]:
    """Bias and input_scale, those that are there; ValueError for whatever else is left."""
    done = parts.bias(n)
    if "input_scale" in parts:
        done["input_scale"] = parts.scale("input_scale", torch.float32, (), (1,)).reshape(())
    parts.finish()
    return done


def _named(parts: Tensors, name: str) -> str:
    """The name of a tensor of svdquant_w4a4: comfy-kitchen's, or that of comfy-quants."""
    return name if name in parts and f"weight_{name}" not in parts else f"weight_{name}"


def _halved(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = tensor.to(dtype)
    if not torch.isfinite(cast).all() or ((cast == 0) & (tensor != 0)).any():
        raise ValueError(f"comfy: {name} leaves the range of {dtype}; make the checkpoint of the model in bfloat16")
    return cast


def _other_size(size: int) -> str:
    return f"its columns are rotated in blocks of {size}"


_UNREAD_SVD = "ComfyUI 0.33.0 does not load svdquant_w4a4: forks of it do, by comfy-kitchen"
_ONE_SCALE = "convrot_w4a4 has one scale for each row, int4 here one for each 64 columns of it"
_UNSIGNED = (
    "x behind GELU is rounded to 4 bits with sign here, to 4 bits without there; what its shift adds is in the bias"
)
_BY_BLOCKS = "x is rounded to int4 with a scale for each 64 columns here, for each row there"
_HELD_IN_INT8 = "codes are held as the int8 codes that its reader multiplies, in more bits than the file has"
_FINER = "codes are held in int8, in more bits than the file has; x is rounded to int8 here, to int4 there"
_SGLANG = "ComfyUI, SGLang-Diffusion"
ROWS = (
    Row("svdquant_w4a4", "int4", "int4", smooth=True, low_rank=True, factors_stay=True, only_moved=True),
    Row("convrot_w4a4", "int4", "int4", regular=True, read_by=_SGLANG, unread=_ONE_SCALE),
    Row("asym_w4a8_int8", "int8", "int8", regular=True, read_by=_SGLANG, unread="int8_tensorwise holds the same codes"),
)
FORMATS = tuple(row.name for row in ROWS)
SUFFIXES = (  # comfy-quants' names are nunchaku's
    *("weight_s_rel", "weight_s_channel", "weight_codebook", "weight_correction"),
    *("weight_proj_down", "weight_proj_up", "weight_smooth_factor"),
)
