"""Tiles of fp32 values to codes and scales: what every kernel that quantizes activations does after its load.

Every chip gives the same bytes. Rounding is fp32 addition of a number so large that the sum's last bit is the code's
last bit; NVIDIA's instructions for E4M3, from sm_89 on, and E2M1, from sm_100 on, take its place there. Quotients are
products with a reciprocal, corrected to the code of a division (`quotient`). Sums that choose a scale have one order.

`tile` counts tiles of COLUMNS columns, and `rows` (ROWS,) are int64. References: kernels/encode.py and
quantize_activation/op.py.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number.

from __future__ import annotations

import triton
import triton.language as tl

from fluxq.kernels.dequantize.kernel import decode_e4m3

TRITON_3_6 = tl.constexpr(triton.__version__.startswith("3.6."))
INTEGER = tl.constexpr(1.5 * 2.0**23)  # to which a sum's last bit counts ones
# PTX that rounds two fp32 numbers to 16 bit and back; Triton's casts take an instruction of a slow unit for each.
ROUND_BF16 = tl.constexpr("{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000; }")
ROUND_FP16 = tl.constexpr(
    "{ .reg .b32 p; .reg .b16 a, b; cvt.rn.f16x2.f32 p, $3, $2; "
    "mov.b32 {a, b}, p; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
)

# PTX that widens two bf16 numbers: Triton's cast takes an instruction more for the upper one.
WIDEN_BF16 = tl.constexpr("{ .reg .b32 p; mov.b32 p, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000; }")
# PTX for 1 / v, rounded: what ptxas makes of `rcp.rn.f32` for numbers whose reciprocals are not subnormal, without the
# branch to the others. Of zero, infinity and NaN the first step is the result.
RECIPROCAL = tl.constexpr(
    "{ .reg .f32 y, e, z; .reg .pred p; rcp.approx.ftz.f32 y, $1; fma.rn.f32 e, $1, y, 0fBF800000; neg.f32 e, e; "
    "fma.rn.f32 z, y, e, y; setp.nan.f32 p, z, z; selp.f32 $0, y, z, p; }"
)
# PTX for E4M3 from sm_89 on, where Triton's own cast may round twice: codes of four numbers.
CODE_E4M3 = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
    "mov.b32 $0, {a, b}; }"
)
# PTX for E2M1: two numbers to a byte of codes; and rounded to the values of their codes.
CODE_E2M1 = tl.constexpr("{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, $2, $1; cvt.u32.u8 $0, b; }")
ROUND_E2M1 = tl.constexpr(
    "{ .reg .b8 b; .reg .b32 p; .reg .b16 x, y; cvt.rn.satfinite.e2m1x2.f32 b, $3, $2; cvt.rn.f16x2.e2m1x2 p, b; "
    "mov.b32 {x, y}, p; cvt.f32.f16 $0, x; cvt.f32.f16 $1, y; }"
)


def levels_of(size: int, regular: bool) -> int:
    """Return the HADAMARD of kernels: log2 of the size of its blocks, below 0 for the regular matrix; 0 for none."""
    levels = size.bit_length() - 1 if size else 0
    return -levels if regular else levels


@triton.jit
def widened(v):
    """Return a floating-point tensor in fp32."""
    # From sm_100 on some instructions take 16-bit operands, and rows that a program holds take fewer registers so.
    older: tl.constexpr = not tl.target_info.cuda_capability_geq(10, 0)  # pyright: ignore[reportAssignmentType]
    if v.dtype == tl.bfloat16 and tl.target_info.cuda_capability_geq(8, 0) and older:
        return tl.inline_asm_elementwise(WIDEN_BF16, "=r,=r,r", [v], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return v.to(tl.float32)


@triton.jit
def rounded(v, x):
    """Round fp32 v as a tensor of the dtype of pointer x would."""
    dtype: tl.constexpr = x.dtype.element_ty
    if dtype == tl.float32:
        return v
    elif tl.target_info.cuda_capability_geq(8, 0):
        text: tl.constexpr = ROUND_BF16 if dtype == tl.bfloat16 else ROUND_FP16
        return tl.inline_asm_elementwise(text, "=r,=r,r,r", [v], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return v.to(dtype).to(tl.float32)


@triton.jit
def transform_tile(values, smooth, mean, tile, K, HADAMARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute v = (x - mean) · smooth of the tile'th COLUMNS columns, then Hadamard as `levels_of` says."""
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    if mean is not None:
        values = values - tl.load(mean + columns, mask=columns < K, other=0.0)[None, :]
    if smooth is not None:
        values = values * tl.load(smooth + columns, mask=columns < K, other=0.0)[None, :]
    if HADAMARD > 0:
        values = hadamard_tile(values, HADAMARD, ROWS, COLUMNS)
    elif HADAMARD < 0:
        values = regular_hadamard_tile(values, -HADAMARD, ROWS, COLUMNS)
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
def regular_hadamard_tile(values, LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply each block of 2^LEVELS columns with the regular matrix / √size: neighbours first, four at a time.

    Of a, b, c, d: (a + b) ± (c - d) and (c + d) ± (a - b), 8 sums, as many as two levels of Sylvester's take.
    """
    for stage in tl.static_range(LEVELS // 2):
        fours = tl.reshape(values, (ROWS, COLUMNS >> (2 * stage + 2), 2, 2, 1 << (2 * stage)))
        ac, bd = tl.split(tl.permute(fours, (0, 1, 4, 2, 3)))
        a, c = tl.split(ac)
        b, d = tl.split(bd)
        first, second = tl.join(a + b + (c - d), a + b - (c - d)), tl.join(c + d + (a - b), c + d - (a - b))
        values = tl.reshape(tl.permute(tl.join(first, second), (0, 1, 4, 3, 2)), (ROWS, COLUMNS))
    values = values * (2.0 ** (-0.5 * LEVELS))
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
def amax_bits(tiles, TILES: tl.constexpr):
    """Return the bits of max |v| of each row (ROWS,), int32, over all tiles (ROWS, COLUMNS): NaN is above infinity."""
    largest = tl.abs(tiles[0])
    for tile in tl.static_range(1, TILES):
        largest = nan_maximum(largest, tl.abs(tiles[tile]))
    return tl.max(largest.to(tl.int32, bitcast=True), 1)


@triton.jit
def nan_maximum(a, b):
    """Return the larger number, NaN beside one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of_blocks(values, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the bits of max |v| of each block of fp32 values (ROWS, COLUMNS): (ROWS, COLUMNS / GROUP) int32."""
    magnitudes = tl.abs(tl.reshape(values, (ROWS, COLUMNS // GROUP, GROUP)))
    return tl.reduce(magnitudes, 2, nan_maximum).to(tl.int32, bitcast=True)


@triton.jit
def amax_by_blocks(tiles, GROUP: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return `amax_bits` by way of blocks, in whose threads their scales are then computed, each once."""
    largest = amax_of_blocks(tiles[0], GROUP, ROWS, COLUMNS)
    for tile in tl.static_range(1, TILES):
        largest = tl.maximum(largest, amax_of_blocks(tiles[tile], GROUP, ROWS, COLUMNS))
    return tl.max(largest, 1)


@triton.jit
def row_step(amax, LARGEST: tl.constexpr):
    """Return the scale of int8 and fp8, also of blocks, from amax's bits: amax / LARGEST, NaN for infinity and NaN."""
    return nan_unless_finite(amax, amax_scale(amax, LARGEST))


@triton.jit
def row_global(amax, FOUR_OVER_SIX: tl.constexpr):
    """Return nvfp4's global scale from the bits of amax: the largest block gets scale 448, or 256 · 4 / 6 or 256."""
    return amax_scale(amax, 6.0 * (256.0 if FOUR_OVER_SIX else 448.0))


@triton.jit
def quantize_rows_tile(
    values, step, codes, rows, tile, M, K, ELEMENT: tl.constexpr, SCALE_GIVEN: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store RNE(v / step) for fp32 values (ROWS, COLUMNS), the tile'th columns of `rows`; step (ROWS,)."""
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    quotients = quotient(values, step[:, None], SCALE_GIVEN, False)
    if ELEMENT == "int8" and not SCALE_GIVEN:
        # |v / step| < 127.5, or NaN in all of the row: the sum's low byte is the code.
        code = (quotients + INTEGER).to(tl.int32, bitcast=True) & tl.where(step == step, 0xFF, 0)[:, None]
    else:
        code = encode(quotients, ELEMENT)
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
    SCALE_GIVEN: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store codes and block scales of fp32 values (ROWS, COLUMNS), the tile'th columns of `rows`; g (ROWS,) nvfp4's.

    Scales are bytes, and of fp8_1x128 fp32.

    Values beyond K must be zeros. SWIZZLED: also zeros for the scales that pad rows to 128 and groups to 4, if the
    tiles and `rows` cover them.
    """
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    amax = amax_of_blocks(values, GROUP, ROWS, COLUMNS)
    blocks = tl.reshape(values, (ROWS, COLUMNS // GROUP, GROUP))
    if FORMAT == "nvfp4":
        block_scale = nvfp4_scale(amax, g[:, None], 6.0)
        step = nvfp4_step(block_scale, g, SCALE_GIVEN)
        scaled = quotient(blocks, step[:, :, None], SCALE_GIVEN, True)
        if FOUR_OVER_SIX:
            block_scale, scaled = four_over_six(blocks, amax, g, block_scale, scaled, SCALE_GIVEN, ROWS, COLUMNS, GROUP)
    elif FORMAT == "fp8_1x128":
        block_scale = row_step(amax, 448.0)
        scaled = quotient(blocks, block_scale[:, :, None], False, True)
    else:
        block_scale = ceil_scale(amax) if FORMAT == "mxfp8" else least_squares_scale(blocks, amax, ROWS, COLUMNS, GROUP)
        step = nan_unless_finite(amax, power_of_two(254 - block_scale))
        scaled = blocks * step[:, :, None]  # exact, as x / s is
    groups = tile * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    mask = (rows < M)[:, None] & (groups < K // GROUP)[None, :]
    if SWIZZLED:
        padded = (rows < (M + 127) // 128 * 128)[:, None] & (groups < (K // GROUP + 3) // 4 * 4)[None, :]
        offset = swizzled_offset(rows[:, None], groups[None, :], K // GROUP)
        tl.store(scale + offset, tl.where(mask, block_scale, 0).to(tl.uint8), mask=padded)
    else:
        offset = rows[:, None] * (K // GROUP) + groups[None, :]
        tl.store(scale + offset, block_scale.to(scale.dtype.element_ty), mask=mask)
    if FORMAT == "mxfp8" or FORMAT == "fp8_1x128":
        mask = (rows < M)[:, None] & (columns < K)[None, :]
        code = encode(tl.reshape(scaled, (ROWS, COLUMNS)), "e4m3").to(tl.uint8)
        tl.store(codes + rows[:, None] * K + columns[None, :], code, mask=mask)
    else:
        low, high = tl.split(tl.reshape(scaled, (ROWS, COLUMNS // GROUP, GROUP // 2, 2)))
        code = tl.where((step == step)[:, :, None], encode_pairs(low, high), 0)  # NaN is of whole blocks
        pairs = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        mask = (rows < M)[:, None] & (pairs < K // 2)[None, :]
        code = tl.reshape(code, (ROWS, COLUMNS // 2)).to(tl.uint8)
        tl.store(codes + rows[:, None] * (K // 2) + pairs[None, :], code, mask=mask)


@triton.jit
def quotient(v, step, OVERFLOWS: tl.constexpr, MANY: tl.constexpr):
    """Return v / step: the number that a division gives, or one beside it that has the same code.

    step > 0 or NaN, of a shape that broadcasts to v's. The product with the reciprocal leaves a rest: one multiply-add
    gives it exactly, another corrects the product by it (Markstein, IBM J. Res. Dev. 34, 1990). `unit` keeps the
    reciprocal, and the rest where it matters, away from subnormal numbers; the signs keep -0 a -0. OVERFLOWS: the
    quotient may be infinite though v is not, as it may be under a given scale. MANY: of steps, whose reciprocals count.
    """
    unit = tl.where(step < 2.0**-90, 2.0**60, tl.where(step > 2.0**90, 2.0**-60, 1.0))
    step = step * unit
    inverse = -reciprocal(step) if MANY else tl.div_rn(-1.0, step)
    negative = v * -unit
    first = negative * inverse
    step = tl.where(step == float("inf"), 0.0, step)  # zeros are left, as of a division
    second = tl.fma(tl.fma(first, step, negative), inverse, first)
    return tl.where(tl.abs(first) == float("inf"), first, second) if OVERFLOWS else second


@triton.jit
def reciprocal(v):
    """Return 1 / v, rounded, of fp32 numbers between 2^-125 and 2^125, zero, infinity and NaN."""
    # On chips before sm_90 it costs kernels with a low-rank branch registers that they lack.
    if tl.target_info.cuda_capability_geq(9, 0):
        return tl.inline_asm_elementwise(RECIPROCAL, "=r,r", [v], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(1.0, v)


@triton.jit
def part_of(v, WHOLE: tl.constexpr):
    """Return v / WHOLE, rounded as a division rounds it, for an integer WHOLE: as `quotient`, by a constant."""
    first = v * (1.0 / WHOLE)
    second = tl.fma(tl.fma(first, WHOLE, v * -1.0), -1.0 / WHOLE, first)
    return tl.where(v == float("inf"), v, second)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| in fp32, as int32: in the order of |x|, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_scale(amax, LARGEST: tl.constexpr):
    """Return amax / LARGEST from amax's bits; 1 for zeros, at least 2^-126, NaN stays NaN."""
    scale = part_of(amax.to(tl.float32, bitcast=True), LARGEST)
    scale = tl.where(scale < 2.0**-126, 2.0**-126, scale)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def nan_unless_finite(amax, scale):
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


@triton.jit
def nvfp4_scale(amax, g, LARGEST: tl.constexpr):
    """Return the E4M3 bytes (int32) of amax / LARGEST / g, between 2^-9 and 448; 1 for zeros."""
    amax_value = amax.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax_value * 0.25 if LARGEST == 4.0 else tl.div_rn(amax_value, LARGEST), g)
    scale = tl.where(scale < 2.0**-9, 2.0**-9, scale)  # encode stops at 448
    scale = tl.where(amax == 0, 1.0, scale)
    return encode(nan_unless_finite(amax, scale), "e4m3")


@triton.jit
def nvfp4_step(block_scale, g, SCALE_GIVEN: tl.constexpr):
    """Return the steps of blocks from their E4M3 bytes (ROWS, G) and g (ROWS,): of a given g not 0, as in encode.py."""
    step = decode_e4m3(block_scale) * g[:, None]
    return tl.where(step == 0, 2.0**-149, step) if SCALE_GIVEN else step


@triton.jit
def four_over_six(
    blocks,
    amax,
    g,
    six,
    scaled,
    SCALE_GIVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return scale bytes and v / step of each block, with its amax at 6 or, if the squared error is less, at 4.

    six: bytes of the first scale, under which blocks are `scaled`. Errors are in units of its step; a tie goes to it.
    """
    four = nvfp4_scale(amax, g[:, None], 4.0)
    wide = quotient(blocks, nvfp4_step(four, g, SCALE_GIVEN)[:, :, None], SCALE_GIVEN, True)
    ratio = quotient(decode_e4m3(four), decode_e4m3(six), False, True)
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
    error = (round_e2m1(magnitude) - magnitude) * unit
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
    """Encode fp32 as int8 or e4m3 (int32): nearest, ties to even, saturating. NaN is 0 in int8, 0x7F in e4m3."""
    if ELEMENT == "int8":
        clamped = tl.minimum(tl.maximum(v, -127.0), 127.0)
        code = (clamped + INTEGER).to(tl.int32, bitcast=True) - 0x4B400000
        return tl.where(v == v, code, 0)
    else:
        if tl.target_info.cuda_capability_geq(8, 9):
            code = tl.inline_asm_elementwise(CODE_E4M3, "=r,r,r,r,r", [v], dtype=tl.uint8, is_pure=True, pack=4)
            return code.to(tl.int32)
        else:
            return tl.where(v == v, float_code(v, 3, 7, 448.0), 0x7F)


@triton.jit
def encode_pairs(low, high):
    """Encode fp32 to E2M1, two codes to a byte (int32); of NaN any code."""
    if tl.target_info.cuda_capability_geq(10, 0):
        return tl.inline_asm_elementwise(CODE_E2M1, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return float_code(low, 1, 1, 6.0) | (float_code(high, 1, 1, 6.0) << 4)


@triton.jit
def round_e2m1(a):
    """Round a >= 0 (fp32) to the nearest value of E2M1, ties to even, at most 6."""
    if tl.target_info.cuda_capability_geq(10, 0):
        return tl.inline_asm_elementwise(ROUND_E2M1, "=r,=r,r,r", [a], dtype=tl.float32, is_pure=True, pack=2)
    else:
        a = tl.minimum(a, 6.0)
        large = rounding_number(a, 1, 1)
        return (a + large) - large


@triton.jit
def float_code(v, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Return the code (int32) of the nearest value of a float with MANTISSA bits: sign, exponent, mantissa.

    The low bits of the sum count its mantissa's steps from 0, or from 2^MANTISSA where v is normal; each exponent above
    the lowest adds 2^MANTISSA.
    """
    a = tl.minimum(tl.abs(v), LARGEST)
    large = rounding_number(a, MANTISSA, BIAS)
    exponents = (large.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - ((151 - MANTISSA - BIAS) << MANTISSA)
    code = (a + large).to(tl.int32, bitcast=True) + exponents
    SIGN: tl.constexpr = 0x80 if MANTISSA == 3 else 8  # pyright: ignore[reportAssignmentType]
    sign = v.to(tl.int32, bitcast=True) >> (24 if MANTISSA == 3 else 28)
    return (code & (SIGN - 1)) | (sign & SIGN)


@triton.jit
def rounding_number(a, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the fp32 number that rounds a >= 0 when it is added: to MANTISSA bits, nearest, ties to even.

    Adding 2^(e + 23 - MANTISSA) to a number with exponent e rounds it in the last place of its mantissa, and numbers
    below the smallest normal one, 2^(1 - BIAS), round as that one does.
    """
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, (128 - BIAS) << 23)
    return (exponent + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def swizzled_offset(row, group, groups):
    """Return the offset of block scale (row, group) in the 128x4 layout, whose tiles are 32 lines of 16 scales."""
    tile = (row >> 7) * ((groups + 3) >> 2) + (group >> 2)
    return (tile << 9) + ((row & 31) << 4) + ((row >> 5 & 3) << 2) + (group & 3)
