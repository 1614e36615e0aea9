"""Activations to codes and scales on the GPU, byte for byte what `quantize_activation` in quantize/ops.py computes.

    fp8, int8   s = amax(row) / largest                                 code = RNE(x / s)
    mxfp8       s = 2^e, the smallest that does not saturate            code = RNE(x / s)
    mxfp4       s = 2^e, of three the least squared error               code = RNE(x / s)
    nvfp4       s = E4M3(amax(block) / 6 / g), g given or amax(row) / (6 · 448)     code = RNE(x / (s · g))

One launch reads x and writes codes and scales; a row that fits into one tile is read once. Nothing is left to a
conversion instruction, because chips differ in them: rounding is fp32 addition of a number so large that the sum's last
bit is the code's last bit. Maxima are taken of the bits of |x| as integers, where NaN > infinity > every number.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.cells import Cell
from fluxq.kernels.checks import EXACT, check_device, check_tensor
from fluxq.kernels.dequantize import MAX_REGISTERS, as_bytes, check_tile, decode_e4m3
from fluxq.kernels.tiles import Tile
from fluxq.quantize.tensor import QuantizedTensor, stored_shapes
from fluxq.recipes.formats import FORMATS, Format

SUPPORTED = ("int8", "fp8", "mxfp8", "mxfp4", "nvfp4")


def quantize_activation(x: Tensor, format: Format, input_scale: Tensor | None = None, *, tile: Tile) -> QuantizedTensor:
    """x (M, K) in bfloat16, float16 or float32, rows any distance apart, to codes per token.

    input_scale: fp32. For fp8 and int8 (M, 1), the scale of each row; for nvfp4 () or (M, 1), its global scale. By
    default both follow from each token's amax. Raises ValueError for input that the kernels do not take.
    """
    m, k = _check_input(x, format)
    stored = stored_shapes(format, m, k)
    codes, scale = (torch.empty(*shape, dtype=dtype, device=x.device) for shape, dtype in list(stored.values())[:2])
    global_scale = None
    if format.two_level:
        global_scale = x.new_empty(m, 1, dtype=torch.float32) if input_scale is None else input_scale
    elif input_scale is not None and not format.group_size:
        check_tensor("quantize_activation: input_scale", input_scale, (m, 1), (torch.float32,), x.device)
        scale = input_scale.reshape(m)
    out = QuantizedTensor(codes, scale, global_scale, (m, k), format)
    quantize_into(out, x, scale_given=input_scale is not None, tile=tile)
    return out


def quantize_into(
    out: QuantizedTensor, x: Tensor, *, scale_given: bool = False, swizzled: bool = False, tile: Tile
) -> None:
    """Quantize x (M, K) into the tensors of `out`, all of them contiguous.

    scale_given: `out.scale` of fp8 and int8, and `out.global_scale` of nvfp4, are read instead of written.
    swizzled: block scales are written in the 128x4 layout of Blackwell's matrix units; `out.scale` then is flat, of
    `swizzled_size` elements, and those that pad it are left as they are: allocate it as zeros.
    tile: powers of two, its columns a multiple of the format's group. Raises ValueError as `quantize_activation` does.
    """
    row = out.format
    group = row.group_size
    m, k = _check_input(x, row)
    _check_output(out, x, scale_given, swizzled)
    check_tile("quantize_activation", tile, row)
    check_device("quantize_activation", x.device)
    tiles = triton.cdiv(k, tile.columns)
    size = {"TILES": tiles, "ROWS": tile.rows, "COLUMNS": tile.columns}
    options = {"num_warps": tile.warps} | EXACT
    if not group:
        quantize_rows_kernel[(triton.cdiv(m, tile.rows),)](
            x,
            as_bytes(out.codes),
            out.scale,
            m,
            k,
            x.stride(0),
            ELEMENT=row.element.name,
            LARGEST=row.element.max,
            SCALE_GIVEN=scale_given,
            **size,
            **options,
        )
        return
    # Tokens that take their own global scale need the whole row first; otherwise every tile stands alone.
    own_global = row.two_level and not scale_given
    per_token = out.global_scale is not None and out.global_scale.ndim == 2
    quantize_blocks_kernel[(triton.cdiv(m, tile.rows), 1 if own_global else tiles)](
        x,
        as_bytes(out.codes),
        as_bytes(out.scale),
        out.global_scale,
        m,
        k,
        x.stride(0),
        int(per_token),
        FORMAT=row.name,
        GROUP=group,
        OWN_GLOBAL=own_global,
        SWIZZLED=swizzled,
        **size,
        **options,
    )


def swizzled_size(rows: int, groups: int) -> int:
    """Elements of the 128x4 layout of (rows, groups) block scales: both axes are padded."""
    return triton.cdiv(rows, 128) * 128 * triton.cdiv(groups, 4) * 4


def _check_input(x: Tensor, format: Format) -> tuple[int, int]:
    name = "quantize_activation"
    if format.name not in SUPPORTED or FORMATS[format.name] != format:
        raise ValueError(f"{name}: no kernel for {format.name}, only for {', '.join(SUPPORTED)}; use quantize/ops.py")
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name}: x is {x.dtype} {(*x.shape,)}, expected (M, K) of bfloat16, float16 or float32")
    m, k = x.shape
    if m == 0:
        raise ValueError(f"{name}: x (0, {k}) has no rows, so there is nothing to launch; return an empty result")
    format.check_shape(m, k, f"{name}: x")
    if k > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: x has strides {x.stride()}, expected rows of adjacent elements: pass .contiguous()")
    return m, k


def _check_output(out: QuantizedTensor, x: Tensor, scale_given: bool, swizzled: bool) -> None:
    m, k = x.shape
    row = out.format
    if out.shape != (m, k):
        raise ValueError(f"quantize_activation: out is for a matrix {out.shape}, x is {(m, k)}")
    shapes = stored_shapes(row, m, k)
    if swizzled:
        if not row.group_size:
            raise ValueError(f"quantize_activation: {row.name} has a scale per row; only block scales are swizzled")
        shapes["weight_scale"] = (swizzled_size(m, k // row.group_size),), shapes["weight_scale"][1]
    if scale_given and row.scale == "e8m0":
        raise ValueError(f"quantize_activation: {row.name} takes its scales from each block; give no input_scale")
    names = {"weight": "codes", "weight_scale": "scale", "weight_scale_2": "global scale"}
    tensors = out.tensors()
    for part, (shape, dtype) in shapes.items():
        if part not in tensors:
            raise ValueError(f"quantize_activation: {row.name} needs a global scale, out has none")
        if part == "weight_scale_2" and not (scale_given and tensors[part].ndim == 0):
            shape = (m, 1)
        check_tensor(f"quantize_activation: {names[part]}", tensors[part], shape, (dtype,), x.device)


@triton.jit
def quantize_rows_kernel(
    x,  # (M, K)
    codes,  # (M, K) bytes
    scale,  # (M,) fp32
    M,
    K,
    stride_x,  # between rows
    ELEMENT: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_GIVEN: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """code = RNE(x / s) with s = amax(row) / LARGEST; reads x, writes codes and scale (reads scale if given)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_mask = rows < M
    if SCALE_GIVEN:
        step = tl.load(scale + rows, mask=row_mask, other=1.0)  # (ROWS,)
    else:
        amax = row_amax(x, rows, row_mask, K, stride_x, TILES, ROWS, COLUMNS)
        step = nan_unless_finite(amax, amax_scale(amax, LARGEST))
    for tile in range(TILES):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (columns < K)[None, :]
        values = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        code = encode(tl.div_rn(values, step[:, None]), ELEMENT)
        tl.store(codes + rows[:, None] * K + columns[None, :], code.to(codes.dtype.element_ty), mask=mask)
    if not SCALE_GIVEN:
        # Last: a store between the two loads of x would keep the compiler from reading x once.
        tl.store(scale + rows, step, mask=row_mask)


@triton.jit
def quantize_blocks_kernel(
    x,  # (M, K)
    codes,  # (M, K) bytes, or (M, K/2) with two codes to a byte
    scale,  # (M, G) bytes, or the 128x4 layout
    global_scale,  # () or (M, 1) fp32, for nvfp4
    M,
    K,
    stride_x,  # between rows
    stride_global,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OWN_GLOBAL: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """code = RNE(x / step), one step for each GROUP of a row; reads x, writes codes and scale.

    OWN_GLOBAL: also writes global_scale, from the amax of each row; only for grids of one program per row.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_mask = rows < M
    g = tl.full((ROWS,), 1.0, tl.float32)
    if OWN_GLOBAL:
        g = amax_scale(row_amax(x, rows, row_mask, K, stride_x, TILES, ROWS, COLUMNS), 6.0 * 448.0)
    elif FORMAT == "nvfp4":
        g = tl.load(global_scale + rows * stride_global, mask=row_mask, other=1.0)
    for tile in range(tl.program_id(1), TILES, tl.num_programs(1)):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (columns < K)[None, :]
        values = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        blocks = tl.reshape(values, (ROWS, COLUMNS // GROUP, GROUP))
        amax = tl.max(magnitude_bits(blocks), 2)  # (ROWS, COLUMNS / GROUP)
        if FORMAT == "nvfp4":
            byte = nvfp4_scale(amax, g[:, None])
            scaled = tl.div_rn(blocks, (decode_e4m3(byte) * g[:, None])[:, :, None])
        else:
            byte = ceil_scale(amax) if FORMAT == "mxfp8" else least_squares_scale(blocks, amax, ROWS, COLUMNS, GROUP)
            scaled = blocks * nan_unless_finite(amax, power_of_two(254 - byte))[:, :, None]  # exact, as x / s is
        groups = tile * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
        if SWIZZLED:
            offset = swizzled_offset(rows[:, None], groups[None, :], K // GROUP)
        else:
            offset = rows[:, None] * (K // GROUP) + groups[None, :]
        tl.store(scale + offset, byte.to(tl.uint8), mask=row_mask[:, None] & (groups < K // GROUP)[None, :])
        scaled = tl.reshape(scaled, (ROWS, COLUMNS))
        if FORMAT == "mxfp8":
            code = encode(scaled, "e4m3").to(tl.uint8)
            tl.store(codes + rows[:, None] * K + columns[None, :], code, mask=mask)
        else:
            low, high = tl.split(tl.reshape(encode(scaled, "e2m1"), (ROWS, COLUMNS // 2, 2)))
            pairs = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            mask = row_mask[:, None] & (pairs < K // 2)[None, :]
            tl.store(codes + rows[:, None] * (K // 2) + pairs[None, :], (low | (high << 4)).to(tl.uint8), mask=mask)
    if OWN_GLOBAL:
        tl.store(global_scale + rows, g, mask=row_mask)


@triton.jit
def row_amax(x, rows, row_mask, K, stride_x, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bits of max |x| of each row (ROWS,)."""
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tile in range(TILES):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (columns < K)[None, :]
        values = tl.load(x + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(values))
    return tl.max(largest, 1)


@triton.jit
def magnitude_bits(x):
    """The bits of |x| in fp32, as int32: in the order of |x|, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_scale(amax, LARGEST: tl.constexpr):
    """amax / LARGEST from amax's bits; 1 for zeros, at least 2^-126, NaN stays NaN."""
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST)
    scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def nan_unless_finite(amax, scale):
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


@triton.jit
def nvfp4_scale(amax, g):
    """E4M3 bytes (int32) of amax / 6 / g, between 2^-9 and 448; 1 for zeros."""
    scale = tl.div_rn(tl.div_rn(amax.to(tl.float32, bitcast=True), 6.0), g)
    scale = tl.where(scale < 2.0**-9, 2.0**-9, scale)  # encode stops at 448
    scale = tl.where(amax == 0, 1.0, scale)
    return encode(nan_unless_finite(amax, scale), "e4m3")


@triton.jit
def ceil_scale(amax):
    """E8M0 bytes (int32) of the smallest power of two 2^e with amax <= 448 · 2^e; 448 is 1.75 · 2^8."""
    byte = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    return e8m0_byte(amax, byte)


@triton.jit
def least_squares_scale(blocks, amax, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """E8M0 bytes (int32) of the power of two, of OCP's floor and its neighbours, with the least squared error.

    Errors are summed in units of the first candidate; ties go to it, then to the larger neighbour.
    """
    floor = tl.maximum((amax >> 23) - 2, 1)
    units = blocks * power_of_two(254 - floor)[:, :, None]
    byte = floor
    least = squared_error(units, 1.0, ROWS, COLUMNS, GROUP)
    error = squared_error(units, 2.0, ROWS, COLUMNS, GROUP)
    byte = tl.where(error < least, floor + 1, byte)
    least = tl.minimum(error, least)
    error = squared_error(units, 0.5, ROWS, COLUMNS, GROUP)
    byte = tl.where((error < least) & (floor > 1), floor - 1, byte)
    return e8m0_byte(amax, byte)


@triton.jit
def squared_error(units, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Sum over each group of (RNE(u / STEP) · STEP - u)^2 for E2M1 codes (ROWS, COLUMNS / GROUP).

    Summed pair by pair, in one order on every chip: in another, candidates that nearly tie could change places.
    """
    magnitude = tl.abs(units)
    error = round_magnitude(magnitude * (1.0 / STEP), 1, 1, 6.0) * STEP - magnitude
    error = error * error
    for level in tl.static_range(5):  # GROUP is 32
        left, right = tl.split(tl.reshape(error, (ROWS, COLUMNS // GROUP, GROUP >> (level + 1), 2)))
        error = left + right
    return tl.reshape(error, (ROWS, COLUMNS // GROUP))


@triton.jit
def e8m0_byte(amax, byte):
    """A block's exponent as it is stored: 1 to 254, 127 for zeros, 255 (NaN) for infinity and NaN."""
    byte = tl.minimum(tl.maximum(byte, 1), 254)
    byte = tl.where(amax == 0, 127, byte)
    return tl.where(amax >= 0x7F800000, 255, byte)


@triton.jit
def power_of_two(byte):
    """2^(byte - 127) for bytes 1 to 254 (int32)."""
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(v, ELEMENT: tl.constexpr):
    """fp32 to unpacked codes (int32): nearest, ties to even, saturating. NaN is 0x7F in e4m3, 0 elsewhere."""
    if ELEMENT == "int8":
        clamped = tl.where(v > 127.0, 127.0, tl.where(v < -127.0, -127.0, v))
        code = (clamped + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 · 2^23: the sum's last bit is 1
        return tl.where(v == v, code, 0)
    elif ELEMENT == "e4m3":
        magnitude = round_magnitude(tl.abs(v), 3, 7, 448.0)
        code = (magnitude * 2.0**-120).to(tl.int32, bitcast=True) >> 20
        code |= tl.where(v.to(tl.int32, bitcast=True) < 0, 0x80, 0)
        return tl.where(v == v, code, 0x7F)
    else:
        magnitude = round_magnitude(tl.abs(v), 1, 1, 6.0)
        code = (magnitude * 2.0**-126).to(tl.int32, bitcast=True) >> 22
        code |= tl.where(v.to(tl.int32, bitcast=True) < 0, 8, 0)
        return tl.where(v == v, code, 0)


@triton.jit
def round_magnitude(a, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """a >= 0 (fp32) to the nearest value of a float with MANTISSA bits, ties to even, at most LARGEST.

    Adding 2^(e + 23 - MANTISSA) to a number with exponent e rounds it in the last place of its mantissa, and numbers
    below the smallest normal one, 2^(1 - BIAS), round as that one does.
    """
    a = tl.minimum(a, LARGEST)
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, (128 - BIAS) << 23)
    large = (exponent + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    return (a + large) - large


@triton.jit
def swizzled_offset(row, group, groups):
    """Where block scale (row, group) lies in the 128x4 layout: tiles of 128 rows and 4 groups, in 32 lines of 16."""
    tile = (row // 128) * ((groups + 3) // 4) + group // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4


def _row_cell(format: Format, tiles: int) -> Cell:
    """bf16 rows of up to 4096 columns in one tile, or longer ones in several."""
    codes = "*i8" if format.element.name == "int8" else "*u8"
    sizes = {"M": "i32", "K": "i32:16", "stride_x": "i32:16"}
    constants = {"ELEMENT": format.element.name, "LARGEST": format.element.max, "SCALE_GIVEN": False}
    return Cell(
        quantize_rows_kernel,
        f"{format.name} {tiles} tile" + "s" * (tiles > 1),
        {"x": "*bf16", "codes": codes, "scale": "*fp32"} | sizes,
        constants | {"TILES": tiles, "ROWS": 1, "COLUMNS": 4096},
        {"num_warps": 8} | EXACT,
        max_registers=MAX_REGISTERS,
    )


def _block_cell(format: Format, rows: int, columns: int, *, own_global: bool = False, swizzled: bool = False) -> Cell:
    arguments = {"x": "*bf16", "codes": "*u8", "scale": "*u8", "M": "i32", "K": "i32:16", "stride_x": "i32:16"}
    constants = {"FORMAT": format.name, "GROUP": format.group_size, "OWN_GLOBAL": own_global, "SWIZZLED": swizzled}
    constants |= {"TILES": 1 if own_global else 6, "ROWS": rows, "COLUMNS": columns}
    if format.two_level:
        arguments |= {"global_scale": "*fp32", "stride_global": "i32"}
    else:
        constants |= {"global_scale": None, "stride_global": 0}
    return Cell(
        quantize_blocks_kernel,
        format.name + " own global" * own_global + " swizzled" * swizzled,
        arguments,
        constants,
        {"num_warps": 4 if rows > 1 else 8} | EXACT,
        max_registers=MAX_REGISTERS,
    )


CELLS = (
    *(_row_cell(FORMATS[name], tiles) for name in ("int8", "fp8") for tiles in (1, 3)),
    *(_block_cell(FORMATS[name], 4, 512) for name in ("mxfp8", "mxfp4", "nvfp4")),
    _block_cell(FORMATS["nvfp4"], 4, 512, swizzled=True),
    _block_cell(FORMATS["nvfp4"], 1, 4096, own_global=True),
)
