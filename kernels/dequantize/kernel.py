"""Codes and scales to values on the GPU, every format, bit for bit what `QuantizedTensor.dequantize` computes.

    value = code · scale            or            value = code · (scale · global scale)

in fp32, cast once. Codes and E4M3 scales are read as bytes and decoded by shifts, so the kernel compiles for chips
that have no fp8 type: with the bits of a small float moved to where fp32 keeps its own, what is left to correct is the
exponent's bias, and that is an exact multiplication by a power of two, subnormal numbers included.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import EXACT, as_bytes, check_device, check_stored, check_tile
from fluxq.kernels.compare import Sample, Verdict, picked, same, taken
from fluxq.kernels.dequantize.op import OP
from fluxq.kernels.dispatch import require
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import Tile, cdiv, find_memory_tile
from fluxq.recipes.formats import find_format


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32, *, tile: Tile) -> Tensor:
    """Return the matrix (N, K) that q stands for, as float32, bfloat16 or float16.

    tile: its columns a multiple of the format's group. Raises ValueError for tensors that are not as stored.
    """
    n, k = q.shape
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dequantize: dtype is {dtype}, expected float32, bfloat16 or float16")
    check_tile("dequantize", tile, q.format)
    check_stored(q, "dequantize")
    out = torch.empty(n, k, dtype=dtype, device=q.codes.device)
    check_device("dequantize", q.codes.device)
    grid = (cdiv(n, tile.rows), cdiv(k, tile.columns))
    sizes = {"N": n, "K": k, "ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps}
    dequantize_kernel[grid](y=out, **stored_arguments(q), **sizes, **EXACT)
    return out


def launch(
    w: Tensor, w_scale: Tensor, w_scale_2: Tensor | None, format: str, dtype: torch.dtype, *, chip: str
) -> Tensor:
    """Launch the op on a chip; ValueError where it has no kernel."""
    require(*cells(w, w_scale, w_scale_2, format, dtype, chip=chip)[0], chip)
    q = QuantizedTensor.stored(w, w_scale, w_scale_2, find_format(format))
    return dequantize(q, dtype, tile=find_memory_tile(OP.file, format, chip, w.shape[0]))


def cells(
    w: Tensor, w_scale: Tensor, w_scale_2: Tensor | None, format: str, dtype: torch.dtype, *, chip: str
) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) that a chip must have for a call."""
    return ((OP.name, format),)


def compare(result: Tensor, *arguments: Any, chip: str, sample: Sample) -> Verdict:
    """Compare bits of the result of a call with the reference's. arguments: those of the op."""
    w, w_scale, w_scale_2, name, dtype = arguments
    rows = picked(w.shape[0], sample.tokens, w.device)
    q = taken(QuantizedTensor.stored(w, w_scale, w_scale_2, find_format(name)), rows)
    return same("values", result[rows], q.dequantize(dtype))


class Stored(NamedTuple):
    """A stored matrix (N, K) as a kernel takes it; of one-level formats the global scale and its stride are None.

    codes: (N, K) bytes, (N, K/2) with two codes to a byte, or int32 words of so many. scale: (N, G), (N,) or ().
    global_scale: (N, 1) or () fp32. stride_scale, stride_global: between rows; 0 where they share a scale.
    """

    codes: Any
    scale: Any
    global_scale: Any
    stride_scale: Any
    stride_global: Any


def stored_arguments(q: QuantizedTensor, *, words: bool = False) -> dict[str, Any]:
    """Return the kernel arguments of a stored matrix; words: with codes as int32, whose rows are whole words."""
    k, group, of_all = q.shape[1], q.format.group_size, q.global_scale
    stored = Stored(
        q.codes.view(torch.int32) if words else as_bytes(q.codes),
        as_bytes(q.scale),
        of_all,
        0 if q.scale.ndim == 0 else k // group if group else 1,
        None if of_all is None else int(of_all.ndim == 2),
    )
    return {"w": stored, "ELEMENT": q.format.element.name, "SCALE": q.format.scale, "GROUP": group}


@triton.jit
def dequantize_kernel(
    w,  # (N, K) as stored
    y,  # (N, K)
    N,
    K,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # 0 is the whole row
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = decode(codes) · multiplier. Reads every code and scale once, writes y once."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_mask = rows < N
    tile = tl.program_id(1)
    multiplier = load_scales(w.scale, rows, row_mask, tile, K, w.stride_scale, SCALE, GROUP, COLUMNS)
    if w.global_scale is not None:
        multiplier *= tl.load(w.global_scale + rows * w.stride_global, mask=row_mask, other=0)[:, None]
    value = load_codes(w.codes, rows, row_mask, tile, K, ELEMENT, ROWS, COLUMNS)  # (ROWS, COLUMNS)
    value = times_groups(value, multiplier, GROUP, ROWS, COLUMNS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = row_mask[:, None] & (columns < K)[None, :]
    tl.store(y + rows[:, None] * K + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def load_scales(
    scale, rows, row_mask, tile, K, stride_scale, SCALE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load block scales of `rows` in the tile'th COLUMNS columns as fp32: (ROWS, COLUMNS / GROUP), or (ROWS, 1)."""
    if GROUP == 0:
        stored = tl.load(scale + rows * stride_scale, mask=row_mask, other=0)[:, None]
    else:
        groups = tile * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
        mask = row_mask[:, None] & (groups < K // GROUP)[None, :]
        stored = tl.load(scale + rows[:, None] * stride_scale + groups[None, :], mask=mask, other=0)
    return decode_scale(stored, SCALE)


@triton.jit
def load_codes(codes, rows, row_mask, tile, K, ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load codes of `rows` in the tile'th COLUMNS columns as fp32 (ROWS, COLUMNS); even columns are in low nibbles."""
    PER_BYTE: tl.constexpr = 2 if ELEMENT == "e2m1" or ELEMENT == "int4" else 1
    columns = tile * (COLUMNS // PER_BYTE) + tl.arange(0, COLUMNS // PER_BYTE)
    mask = row_mask[:, None] & (columns < K // PER_BYTE)[None, :]
    stored = tl.load(codes + rows[:, None] * (K // PER_BYTE) + columns[None, :], mask=mask, other=0)
    return unpack_codes(stored, ELEMENT, ROWS, COLUMNS)


@triton.jit
def unpack_codes(stored, ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Unpack codes (ROWS, COLUMNS), or pairs of them (ROWS, COLUMNS / 2), to fp32 (ROWS, COLUMNS)."""
    code = stored.to(tl.int32)
    if ELEMENT == "e2m1" or ELEMENT == "int4":
        code = tl.reshape(tl.join(code & 0xF, code >> 4), (ROWS, COLUMNS))
    return decode_codes(code, ELEMENT)


@triton.jit
def unpack_words(words, ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Unpack codes in int32 words, eight of 4 bits or four of 8 bits each, to fp32 (ROWS, COLUMNS).

    For kernels that wait for arithmetic: fewer instructions than `unpack_codes`. Small floats are moved, two at a
    time, to where fp16 keeps its bits, and are to be multiplied with `word_unit`; NaN of e4m3 comes out as 480.
    """
    if ELEMENT == "e2m1":
        c0, c4 = fp16_halves((words << 12) & -0x7FFF8000 | (words << 9) & 0x0E000E00)
        c1, c5 = fp16_halves((words << 8) & -0x7FFF8000 | (words << 5) & 0x0E000E00)
        c2, c6 = fp16_halves((words << 4) & -0x7FFF8000 | (words << 1) & 0x0E000E00)
        c3, c7 = fp16_halves(words & -0x7FFF8000 | (words >> 3) & 0x0E000E00)
    elif ELEMENT == "e4m3":
        c0, c2 = fp16_halves((words << 8) & -0x7FFF8000 | (words << 7) & 0x3F803F80)
        c1, c3 = fp16_halves(words & -0x7FFF8000 | (words >> 1) & 0x3F803F80)
    elif ELEMENT == "int4":
        c0, c4 = fp16_halves(words & 0x000F000F ^ 0x64086408)  # 1024 + 8 + code
        c1, c5 = fp16_halves((words >> 4) & 0x000F000F ^ 0x64086408)
        c2, c6 = fp16_halves((words >> 8) & 0x000F000F ^ 0x64086408)
        c3, c7 = fp16_halves((words >> 12) & 0x000F000F ^ 0x64086408)
    else:
        c0, c1, c2, c3 = (
            int8_of_word(words, 0),
            int8_of_word(words, 8),
            int8_of_word(words, 16),
            int8_of_word(words, 24),
        )
    # `join` makes a last axis of two: what is joined last alternates first.
    if ELEMENT == "e2m1" or ELEMENT == "int4":
        even, odd = tl.join(tl.join(c0, c4), tl.join(c2, c6)), tl.join(tl.join(c1, c5), tl.join(c3, c7))
    else:
        even, odd = tl.join(c0, c2), tl.join(c1, c3)
    codes = tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))
    return codes - 1032.0 if ELEMENT == "int4" else codes


@triton.jit
def word_unit(ELEMENT: tl.constexpr):
    """Return the factor that the codes of `unpack_words` are still to be multiplied by."""
    return 2.0**14 if ELEMENT == "e2m1" else 2.0**8 if ELEMENT == "e4m3" else 1.0


@triton.jit
def fp16_halves(words):
    """Return the fp16 numbers in the low and the high halves of words, as fp32."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def int8_of_word(words, SHIFT: tl.constexpr):
    """Return eight bits, two's complement, as fp32: as the last bits of 2^23 + 128 + code."""
    return (((words >> SHIFT) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True) - (2.0**23 + 128)


@triton.jit
def times_groups(value, multiplier, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply value (ROWS, COLUMNS) with the multiplier of each group, in the shape of `load_scales`."""
    if GROUP == 0:
        return value * multiplier
    else:
        blocks = tl.reshape(value, (ROWS, COLUMNS // GROUP, GROUP)) * multiplier[:, :, None]
        return tl.reshape(blocks, (ROWS, COLUMNS))


@triton.jit
def decode_codes(code, ELEMENT: tl.constexpr):
    """Decode unpacked codes (int32) to fp32."""
    if ELEMENT == "e4m3":
        return decode_e4m3(code)
    elif ELEMENT == "e2m1":
        return decode_e2m1(code)
    elif ELEMENT == "int4":
        return ((code ^ 8) - 8).to(tl.float32)
    else:
        return code.to(tl.float32)


@triton.jit
def decode_scale(stored, SCALE: tl.constexpr):
    """Decode stored block scales to fp32."""
    if SCALE == "e4m3":
        return decode_e4m3(stored.to(tl.int32))
    elif SCALE == "e8m0":
        return decode_e8m0(stored.to(tl.int32))
    else:
        return stored.to(tl.float32)


@triton.jit
def decode_e4m3(byte):
    """Decode E4M3 bytes (int32) to fp32; 0x7F and 0xFF are NaN, there is no infinity."""
    if tl.target_info.cuda_capability_geq(8, 9):
        return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = (byte & 0x80) << 24 | (byte & 0x7F) << 20
        value = bits.to(tl.float32, bitcast=True) * 2.0**120
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_e2m1(code):
    """Decode E2M1 codes 0 to 15 (int32) to fp32."""
    bits = (code & 8) << 28 | (code & 7) << 22
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def decode_e8m0(byte):
    """Decode E8M0 bytes (int32) to 2^(byte - 127), subnormal for byte 0; 255 is NaN."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), value)
