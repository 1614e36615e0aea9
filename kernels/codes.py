"""Tiles of fp32 values to codes and scales: what every kernel that quantizes activations does after its load.

Nothing is left to a conversion instruction, because chips differ in them: rounding is fp32 addition of a number so
large that the sum's last bit is the code's last bit. Maxima are taken of the bits of |v| as integers, where
NaN > infinity > every number. Sums that choose a scale have one order on every chip.

`tile` counts tiles of COLUMNS columns, and `rows` (ROWS,) are int64. References: kernels/encode.py and
quantize_activation/op.py.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number.

from __future__ import annotations

import triton
import triton.language as tl

from fluxq.kernels.dequantize.kernel import decode_e4m3

TRITON_3_6 = tl.constexpr(triton.__version__.startswith("3.6."))


@triton.jit
def transform_tile(values, smooth, mean, tile, K, HADAMARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute v = (x - mean) · smooth of the tile'th COLUMNS columns, then Hadamard on blocks of 2^HADAMARD columns."""
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    if mean is not None:
        values = values - tl.load(mean + columns, mask=columns < K, other=0.0)[None, :]
    if smooth is not None:
        values = values * tl.load(smooth + columns, mask=columns < K, other=0.0)[None, :]
    if HADAMARD:
        values = hadamard_tile(values, HADAMARD, ROWS, COLUMNS)
    return values


@triton.jit
def hadamard_tile(values, HADAMARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply each block of 2^HADAMARD columns with Sylvester's matrix / √size: sums of neighbours come first."""
    for level in tl.static_range(HADAMARD):
        pairs = tl.reshape(values, (ROWS, COLUMNS >> (level + 1), 2, 1 << level))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        values = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, COLUMNS))
    values = values * (2.0 ** (-0.5 * HADAMARD))
    return values


@triton.jit
def computed_once(values, HADAMARD: tl.constexpr):
    """Return the same fp32 values (ROWS, COLUMNS); after a Hadamard transform as maxima of one element, by their bits.

    Triton 3.6 computes the operations before a value anew for each layout that is wanted after it, and runs out of
    registers, but not those before a maximum. Triton 3.9, and kernels that hold whole rows, do better without.
    """
    if TRITON_3_6 and HADAMARD:
        bits = values.to(tl.int32, bitcast=True)
        values = tl.cast(tl.max(bits[:, :, None], 2), tl.float32, bitcast=True)
    return values


@triton.jit
def row_step(amax, LARGEST: tl.constexpr):
    """Return the scale of int8 and fp8 from the bits of amax: amax / LARGEST, NaN for infinity and NaN."""
    return nan_unless_finite(amax, amax_scale(amax, LARGEST))


@triton.jit
def row_global(amax, FOUR_OVER_SIX: tl.constexpr):
    """Return nvfp4's global scale from the bits of amax: the largest block gets scale 448, or 256 · 4 / 6 or 256."""
    return amax_scale(amax, 6.0 * (256.0 if FOUR_OVER_SIX else 448.0))


@triton.jit
def quantize_rows_tile(values, step, codes, rows, tile, M, K, ELEMENT: tl.constexpr, COLUMNS: tl.constexpr):
    """Store RNE(v / step) for fp32 values (ROWS, COLUMNS), the tile'th columns of `rows`; step (ROWS,)."""
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    code = encode(tl.div_rn(values, step[:, None]), ELEMENT)
    tl.store(codes + rows[:, None] * K + columns[None, :], code.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def quantize_blocks_tile(
    values,
    g,
    codes,
    scale,
    rows,
    tile,
    M,
    K,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store codes and block scales of fp32 values (ROWS, COLUMNS), the tile'th columns of `rows`; g (ROWS,) nvfp4's.

    Values beyond K must be zeros. SWIZZLED: also zeros for the scales that pad rows to 128 and groups to 4, if the
    tiles and `rows` cover them.
    """
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    blocks = tl.reshape(values, (ROWS, COLUMNS // GROUP, GROUP))
    amax = tl.max(magnitude_bits(blocks), 2)  # (ROWS, COLUMNS / GROUP)
    if FORMAT == "nvfp4":
        byte = nvfp4_scale(amax, g[:, None], 6.0)
        scaled = tl.div_rn(blocks, (decode_e4m3(byte) * g[:, None])[:, :, None])
        if FOUR_OVER_SIX:
            byte, scaled = four_over_six(blocks, amax, g, byte, scaled, ROWS, COLUMNS, GROUP)
    else:
        byte = ceil_scale(amax) if FORMAT == "mxfp8" else least_squares_scale(blocks, amax, ROWS, COLUMNS, GROUP)
        scaled = blocks * nan_unless_finite(amax, power_of_two(254 - byte))[:, :, None]  # exact, as x / s is
    groups = tile * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    mask = (rows < M)[:, None] & (groups < K // GROUP)[None, :]
    if SWIZZLED:
        padded = (rows < (M + 127) // 128 * 128)[:, None] & (groups < (K // GROUP + 3) // 4 * 4)[None, :]
        offset = swizzled_offset(rows[:, None], groups[None, :], K // GROUP)
        tl.store(scale + offset, tl.where(mask, byte, 0).to(tl.uint8), mask=padded)
    else:
        offset = rows[:, None] * (K // GROUP) + groups[None, :]
        tl.store(scale + offset, byte.to(tl.uint8), mask=mask)
    scaled = tl.reshape(scaled, (ROWS, COLUMNS))
    if FORMAT == "mxfp8":
        mask = (rows < M)[:, None] & (columns < K)[None, :]
        code = encode(scaled, "e4m3").to(tl.uint8)
        tl.store(codes + rows[:, None] * K + columns[None, :], code, mask=mask)
    else:
        low, high = tl.split(tl.reshape(encode(scaled, "e2m1"), (ROWS, COLUMNS // 2, 2)))
        pairs = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        mask = (rows < M)[:, None] & (pairs < K // 2)[None, :]
        tl.store(codes + rows[:, None] * (K // 2) + pairs[None, :], (low | (high << 4)).to(tl.uint8), mask=mask)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| in fp32, as int32: in the order of |x|, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_scale(amax, LARGEST: tl.constexpr):
    """Return amax / LARGEST from amax's bits; 1 for zeros, at least 2^-126, NaN stays NaN."""
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST)
    scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def nan_unless_finite(amax, scale):
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


@triton.jit
def nvfp4_scale(amax, g, LARGEST: tl.constexpr):
    """Return the E4M3 bytes (int32) of amax / LARGEST / g, between 2^-9 and 448; 1 for zeros."""
    scale = tl.div_rn(tl.div_rn(amax.to(tl.float32, bitcast=True), LARGEST), g)
    scale = tl.where(scale < 2.0**-9, 2.0**-9, scale)  # encode stops at 448
    scale = tl.where(amax == 0, 1.0, scale)
    return encode(nan_unless_finite(amax, scale), "e4m3")


@triton.jit
def four_over_six(blocks, amax, g, six, scaled, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return scale bytes and v / step of each block, with its amax at 6 or, if the squared error is less, at 4.

    six: bytes of the first scale, under which blocks are `scaled`. Errors are in units of its step; a tie goes to it.
    """
    four = nvfp4_scale(amax, g[:, None], 4.0)
    wide = tl.div_rn(blocks, (decode_e4m3(four) * g[:, None])[:, :, None])
    ratio = tl.div_rn(decode_e4m3(four), decode_e4m3(six))
    least = rounding_error(tl.abs(scaled), 1.0, ROWS, COLUMNS, GROUP)
    use_four = rounding_error(tl.abs(wide), ratio[:, :, None], ROWS, COLUMNS, GROUP) < least
    return tl.where(use_four, four, six), tl.where(use_four[:, :, None], wide, scaled)


@triton.jit
def ceil_scale(amax):
    """Return the E8M0 bytes (int32) of the smallest power of two 2^e with amax <= 448 · 2^e; 448 is 1.75 · 2^8."""
    byte = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    return e8m0_byte(amax, byte)


@triton.jit
def least_squares_scale(blocks, amax, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the E8M0 bytes (int32) of OCP's floor or a neighbour, the power of two with the least squared error.

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
    """Sum over each group (RNE(u / STEP) · STEP - u)^2 for E2M1 codes (ROWS, COLUMNS / GROUP); STEP is 2^e."""
    return rounding_error(tl.abs(units) * (1.0 / STEP), STEP, ROWS, COLUMNS, GROUP)


@triton.jit
def rounding_error(magnitude, unit, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Sum over each group ((RNE(m) - m) · unit)^2 for E2M1 codes (ROWS, COLUMNS / GROUP).

    Summed pair by pair, in the reference's order on every chip: in another, candidates that nearly tie could change
    places.
    """
    error = (round_magnitude(magnitude, 1, 1, 6.0) - magnitude) * unit
    error = error * error
    for level in tl.static_range(5 if GROUP == 32 else 4):
        left, right = tl.split(tl.reshape(error, (ROWS, COLUMNS // GROUP, GROUP >> (level + 1), 2)))
        error = left + right
    return tl.reshape(error, (ROWS, COLUMNS // GROUP))


@triton.jit
def e8m0_byte(amax, byte):
    """Return a block's exponent as it is stored: 1 to 254, 127 for zeros, 255 (NaN) for infinity and NaN."""
    byte = tl.minimum(tl.maximum(byte, 1), 254)
    byte = tl.where(amax == 0, 127, byte)
    return tl.where(amax >= 0x7F800000, 255, byte)


@triton.jit
def power_of_two(byte):
    """Return 2^(byte - 127) for bytes 1 to 254 (int32)."""
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(v, ELEMENT: tl.constexpr):
    """Encode fp32 to unpacked codes (int32): nearest, ties to even, saturating. NaN is 0x7F in e4m3, 0 elsewhere."""
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
    """Round a >= 0 (fp32) to the nearest value of a float with MANTISSA bits, ties to even, at most LARGEST.

    Adding 2^(e + 23 - MANTISSA) to a number with exponent e rounds it in the last place of its mantissa, and numbers
    below the smallest normal one, 2^(1 - BIAS), round as that one does.
    """
    a = tl.minimum(a, LARGEST)
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, (128 - BIAS) << 23)
    large = (exponent + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    return (a + large) - large


@triton.jit
def swizzled_offset(row, group, groups):
    """Return the offset of block scale (row, group) in the 128x4 layout, whose tiles are 32 lines of 16 scales."""
    tile = (row // 128) * ((groups + 3) // 4) + group // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4
