"""Values to codes and back, for every element type and scale type: round to nearest, ties to even.

Everything is computed in fp32. Outcomes that a format leaves open are fixed here and tested:
- a block, row or tensor of zeros gets scale 1 (E8M0 byte 127, global scale 1) and decodes to zeros;
- no scale is ever zero: fp32 and bf16 scales and the global scale are at least 2^-126, E4M3 scales 2^-9, E8M0
  scales 2^-126 (byte 1). Blocks too small for that lose precision, and at last become zeros;
- E8M0 bytes of finite blocks are 1 to 254; byte 0 is never written, and read as 2^-127;
- values beyond the largest code saturate; int4's -8 and int8's -128 are read, but never written;
- float elements keep the sign of zero, and of a negative that rounds to zero; integers have no -0;
- a block that holds NaN or infinity gets a NaN scale and decodes to NaN throughout, and so does all that
  shares a global scale derived from it; nothing else is touched;
- least squares over E8M0 exponents: ties go to the first of OCP's floor, floor + 1, floor - 1;
- squared errors are added up pair by pair, neighbours first, so that every device chooses the same scale.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.recipes.formats import ELEMENTS, Element, Format

SCALE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.uint8,
}
_E4M3_SMALLEST = 2.0**-9
_FP32_SMALLEST = 2.0**-126  # also bf16's smallest normal number
_FP32_EXPONENT, _FP32_MAGNITUDE = 0x7F800000, 0x7FFFFFFF  # bits as int32
_ROOM = 1.5  # of the amax, at least: for tokens that calibration did not see
_SHORT = 256  # elements of a block
_E8M0_BIAS, _E8M0_NAN, _E4M3_NAN = 127, 255, 0x7F
_E8M0_EXPONENTS = -126, 127  # bytes 1 to 254


def encode(x: Tensor, element: Element, *, used_up: bool = False) -> Tensor:
    """Round fp32 x to the nearest codes, ties to even, saturating; unpacked: uint8, or as an 8-bit element is stored.

    Integers come as int8, those of 4 bits too. NaN of either sign becomes the byte 0x7F where the element has NaN, and
    code 0 elsewhere: its block's scale is what says NaN. used_up: x may be written over.
    """
    check_known(element)
    low = -element.max if element.low is None else element.low
    x = x.clamp_(low, element.max) if used_up else x.clamp(low, element.max)
    if element.is_integer:
        return x.round_().to(torch.int8)
    if _is_cast(element):
        return x.nan_to_num_(nan=torch.nan).to(getattr(torch, element.storage))  # -NaN would become 0xFF
    return float_codes(x, element)


def round_to(v: Tensor, element: Element) -> Tensor:
    """Return the fp32 value of the nearest code, `decode(encode(v))` without the codes; NaN stays NaN."""
    check_known(element)
    if element.is_integer:
        low = -element.max if element.low is None else element.low
        return v.clamp(low, element.max).round_()
    return decode(encode(v, element), element) if _is_cast(element) else nearest_float(v, element)


def decoded_codes(x: Tensor, element: Element) -> Tensor:
    """Return `decode(encode(x))`, without the codes of an element that torch has no cast to: NaN stays NaN there.

    x is used up.
    """
    check_known(element)
    has_codes = element.is_integer or _is_cast(element)
    return decode(encode(x, element, used_up=True), element) if has_codes else round_to(x, element)


def decode(codes: Tensor, element: Element) -> Tensor:
    """Decode unpacked codes to the fp32 values they stand for."""
    check_known(element)
    if element.is_integer:
        return codes.float()
    if element.bits == 4:
        table = torch.tensor(_four_bit_values(element), device=codes.device, dtype=torch.float32)
        return table.index_select(0, codes.flatten().int()).view(codes.shape)  # several times as fast as table[codes]
    return _decode_float8(codes, element) if codes.device.type == "cpu" else codes.float()


@functools.cache
def check_known(element: Element) -> None:
    """Raise ValueError for an element that is neither rounded nor stored here."""
    is_rounded = element.is_integer or (element.exponent <= 5 and element.mantissa > 0)  # fp16 has 5 bits
    eights = element.storage == "int8" if element.is_integer else element.storage.startswith("float8")
    if not is_rounded or not (eights if element.bits == 8 else element.bits == 4 and element.storage == "uint8"):
        raise ValueError(
            f"element {element.name}: codes of {element.bits} bits ({element.exponent} of exponent, {element.mantissa} "
            f"of mantissa) stored as {element.storage} are not known; this fluxq has {', '.join(ELEMENTS)}"
        )


def decode_stored(stored: Tensor, element: Element, pairs: Tensor | None = None) -> Tensor:
    """Decode codes (rows, K) as stored to fp32 values: `decode(unpack(stored))`, several times as fast for 4 bits.

    pairs: from `stored_pairs`, where more than one part of a matrix is decoded.
    """
    if element.bits != 4:
        return decode(stored, element)
    table: Any = stored_pairs(element, stored.device) if pairs is None else pairs
    both = table.index_select(0, stored.flatten().int())
    return both.view(torch.float32).view(stored.shape[0], 2 * stored.shape[1])


def stored_pairs(element: Element, device: torch.device) -> Tensor | None:
    """Return the two fp32 values of each byte's 4-bit codes, as int64 (256,); None for other elements."""
    if element.bits != 4:
        return None
    return torch.frombuffer(bytearray(_pairs(element)), dtype=torch.int64).to(device)


@functools.cache
def _pairs(element: Element) -> bytes:
    values = _four_bit_values(element)
    return struct.pack("=512f", *(value for high in values for low in values for value in (low, high)))


def pack(codes: Tensor, element: Element) -> Tensor:
    """Pack codes (rows, K) as stored: 4-bit codes two to a byte (rows, K/2), even element in the low nibble."""
    if element.bits != 4:
        return codes
    pairs = codes.contiguous().view(torch.int16) & 0x0F0F  # of neighbours, the even one in the low byte
    pairs |= pairs >> 4
    return pairs.to(torch.uint8)  # keeps the low byte alone


def unpack(stored: Tensor, element: Element) -> Tensor:
    """Invert `pack`; integers are two's complement and come back as int8."""
    if element.bits != 4:
        return stored
    nibbles = torch.stack([stored & 0xF, stored >> 4], dim=-1).flatten(-2)
    if element.is_integer:
        return ((nibbles ^ 8).view(torch.int8) - 8).to(torch.int8)
    return nibbles


def block_scale(blocks: Tensor, format: Format, global_scale: Tensor | None) -> Tensor:
    """Return the scales of fp32 blocks (rows, G, k), as stored, shape (rows, G).

    global_scale: fp32, scalar or (rows, 1); only for two-level formats.
    """
    amax = _amax(blocks)
    if format.scale == "e8m0":
        if format.rule == "least_squares":
            return _encode_e8m0(_least_squares_exponent(blocks, amax, format.element), amax)
        return _encode_e8m0(ceil_exponent(amax, format.element.max), amax)
    return _amax_scale(amax, format.element.max, format, global_scale)


def spanning_scale(v: Tensor, format: Format) -> Tensor:
    """Return the scales (⌈N/n⌉, ⌈K/k⌉) of v (N, K) fp32 in a format whose blocks span rows, `Format.spans_rows`."""
    n, k = format.block
    padded = F.pad(v, (0, -v.shape[1] % k, 0, -v.shape[0] % n))
    blocks = padded.view(padded.shape[0] // n, n, -1, k).transpose(1, 2)
    return block_scale(blocks.flatten(2), format, None)


def spread(scale: Tensor, format: Format, rows: int, columns: int) -> Tensor:
    """Return for each element of a (rows, columns) matrix its scale, of those that `spanning_scale` gives."""
    n, k = format.block
    return scale.repeat_interleave(n, 0)[:rows].repeat_interleave(k, 1)[:, :columns]


def four_over_six(blocks: Tensor, scale: Tensor, format: Format, global_scale: Tensor) -> Tensor:
    """Return for each nvfp4 block the scale that takes its amax to 4, if that has less error: E2M1 is finer there.

    scale: from `block_scale`, which takes amax to 6; it stays in a tie. Squared errors are in units of its step:
    as they are, they would overflow or vanish in fp32.
    """
    wide = _amax_scale(_amax(blocks), 4.0, format, global_scale)
    step = divisor(scale, format, global_scale)
    least = _sum_of_squares(_rounding_error(blocks, step, format.element))
    ratio = (wide.float() / scale.float()).unsqueeze(-1)
    error = _rounding_error(blocks, divisor(wide, format, global_scale), format.element).mul_(ratio)
    better = _sum_of_squares(error) < least
    return torch.where(better, wide.view(torch.uint8), scale.view(torch.uint8)).view(scale.dtype)


def all_finite(scale: Tensor, format: Format) -> bool:
    """Tell whether stored scales come from finite values alone, neither NaN nor infinity."""
    if format.scale == "e8m0":
        return not bool((scale == _E8M0_NAN).any())
    if format.scale == "e4m3":
        return not bool(((scale.view(torch.uint8) & _E4M3_NAN) == _E4M3_NAN).any())
    return bool(torch.isfinite(scale).all())


def decode_scale(scale: Tensor, format: Format, global_scale: Tensor | None) -> Tensor:
    """Decode stored scales to fp32 multipliers, the global scale included."""
    if format.scale == "e8m0":
        value = torch.exp2(scale.float() - _E8M0_BIAS)
        return torch.where(scale == _E8M0_NAN, torch.nan, value)
    value = decode(scale, ELEMENTS["e4m3"]) if format.scale == "e4m3" else scale.float()
    return value if global_scale is None else value * global_scale


def divisor(scale: Tensor, format: Format, global_scale: Tensor | None) -> Tensor:
    """Return `decode_scale`, 2^-149 where the product with a tiny global scale is 0: no block is divided by 0."""
    return decode_scale(scale, format, global_scale).clamp(min=2.0**-149)


def global_scale_for(amax: Tensor, format: Format, four_over_six: bool = False) -> Tensor:
    """Return nvfp4's fp32 global scale, amax / (6 · 448): the largest block then gets the largest E4M3 scale.

    four_over_six: amax / (6 · 256), which leaves room for that block's larger scale, 256 · 6 / 4.
    """
    largest = 256.0 if four_over_six else 448.0
    scale = _over(amax.float(), format.element.max * largest).clamp(min=_FP32_SMALLEST)
    return torch.where(amax == 0, 1.0, scale)


def input_scale_for(amax: Tensor, format: Format, four_over_six: bool = False) -> Tensor:
    """Return the calibrated scale (fp32, ()) of all tokens of an input whose largest magnitude was `amax`.

    nvfp4: its global scale. fp8_tensor: the smallest power of two under which 1.5 · amax is not clipped. E4M3 rounds
    alike in 15 powers of two, so that this costs nothing; and programs that multiply x by 1 / scale in 16 bit, as
    comfy-kitchen does, get the same codes.
    """
    if format.two_level:
        return global_scale_for(amax, format, four_over_six)
    exponent = ceil_exponent(_ROOM * amax.float(), format.element.max)
    return torch.where(amax == 0, 1.0, torch.exp2(exponent.float()).clamp(min=_FP32_SMALLEST))


def ceil_exponent(amax: Tensor, element_max: float) -> Tensor:
    """Return the smallest integer e with amax <= element_max · 2^e, exactly: mantissas are compared, not logarithms."""
    mantissa, exponent = torch.frexp(amax)
    limit, limit_exponent = torch.frexp(torch.tensor(element_max, dtype=torch.float32))
    return exponent - int(limit_exponent) + (mantissa > float(limit)).to(torch.int32)


def _amax(blocks: Tensor) -> Tensor:
    """Return max |x| of fp32 blocks; NaN where there is one."""
    if blocks.shape[-1] > _SHORT:
        return torch.maximum(blocks.amax(-1), -blocks.amin(-1))  # without a copy of them
    # The bits of |x| are in the order of |x|, NaN last; of short rows torch finds the largest integer much faster.
    return (blocks.view(torch.int32) & _FP32_MAGNITUDE).amax(-1).view(torch.float32)


def _amax_scale(amax: Tensor, largest: float, format: Format, global_scale: Tensor | None) -> Tensor:
    """Return the scale, as stored, that takes amax to the code value `largest`."""
    scale = _over(amax, largest)
    if global_scale is not None:
        scale = (scale / global_scale).clamp(_E4M3_SMALLEST, 448.0)
    scale = torch.where(amax == 0, 1.0, scale.clamp(min=_FP32_SMALLEST))
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    return scale.to(SCALE_DTYPES[format.scale])


def _over(x: Tensor, number: float) -> Tensor:
    """Return x / number, rounded once: torch on a GPU would multiply by the reciprocal of a plain number."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def float_codes(x: Tensor, element: Element) -> Tensor:
    """Return the codes (uint8) of x within ±max for any float element; x is used up and NaN is 0."""
    x = x.nan_to_num_(nan=0.0)
    codes = (x.view(torch.int32) >> (32 - element.bits)).bitwise_and_(1 << (element.bits - 1))  # the sign
    magnitude = x.abs_()
    mantissa = element.mantissa
    counted = magnitude.add_(_many_steps(magnitude, element)).view(torch.int32)
    # In the low bits how many steps, in a binade 2^mantissa to twice as many; further up the exponent of the sum, of
    # which the steps of the smallest normal number are to count for nothing.
    codes += counted >> (23 - mantissa)
    codes += counted.bitwise_and_((4 << mantissa) - 1)
    unused = ((151 - mantissa - element.bias) << mantissa) + (1 << mantissa >> 1)
    return codes.to(torch.uint8).sub_(unused % 256)  # bytes wrap around


def nearest_float(v: Tensor, element: Element) -> Tensor:
    """Return the nearest number of any float element, with v's sign; NaN stays NaN."""
    sign = v.view(torch.int32) & ~_FP32_MAGNITUDE
    return _nearest_magnitude(v.abs(), element).view(torch.int32).bitwise_or_(sign).view(torch.float32)


def _nearest_magnitude(magnitude: Tensor, element: Element, unit: float = 1.0) -> Tensor:
    """Return the nearest of a float element's magnitudes times `unit`, a power of two; NaN stays NaN."""
    many = _many_steps(magnitude, element, unit)
    return magnitude.clamp(max=element.max * unit).add_(many).sub_(many)


def _many_steps(magnitude: Tensor, element: Element, unit: float = 1.0) -> Tensor:
    """Return 3 · 2^22 times the distance of the element's neighbours there: a sum with it is whole steps.

    That distance is the magnitude's power of two times 2^-mantissa, and stays the same below the smallest normal number
    and above the largest power of two.
    """
    power = (magnitude.view(torch.int32) & _FP32_EXPONENT).view(torch.float32)
    power.clamp_(element.smallest_normal * unit, element.largest_power * unit)
    return power.mul_(1.5 * 2.0 ** (23 - element.mantissa))


def _is_cast(element: Element) -> bool:
    """Tell whether torch has a dtype of the element: its cast takes a third of the time."""
    return getattr(torch, element.storage).is_floating_point


@functools.cache
def _four_bit_values(element: Element) -> tuple[float, ...]:
    """Return the value of each of the 16 codes of a 4-bit element."""
    if element.is_integer:
        return (*range(8), *range(-8, 0))
    return (*element.magnitudes, *(-value for value in element.magnitudes))


def _decode_float8(codes: Tensor, element: Element) -> Tensor:
    """Decode on a CPU, where torch's own cast takes ten times as long: the bits are those of fp16, but for a factor."""
    bits, largest = codes.view(torch.uint8), _largest_code(element)
    if bits.numel() and (bits & 0x7F).amax() > largest:
        return codes.float()
    # The sign comes along more than once, from the seventh bit of the code: one of them is kept.
    shift = 10 - element.mantissa
    fp16 = bits.view(torch.int8).to(torch.int16).bitwise_left_shift_(shift).bitwise_and_((0x7F << shift) - 0x8000)
    return fp16.view(torch.float16).float().mul_(2.0 ** (15 - element.bias))


@functools.cache
def _largest_code(element: Element) -> int:
    return len(element.magnitudes) - 1


def _encode_e8m0(exponent: Tensor, amax: Tensor) -> Tensor:
    byte = exponent.clamp(*_E8M0_EXPONENTS) + _E8M0_BIAS
    byte = torch.where(amax == 0, _E8M0_BIAS, byte)
    return torch.where(torch.isfinite(amax), byte, _E8M0_NAN).to(torch.uint8)


def _least_squares_exponent(blocks: Tensor, amax: Tensor, element: Element) -> Tensor:
    """Return the exponent of least squared error: OCP's floor(log2 amax) - floor(log2 max), or a neighbour.

    Errors are summed in units of the first candidate: as they are, they would overflow or vanish in fp32.
    """
    floor = torch.frexp(amax).exponent - int(torch.frexp(torch.tensor(element.max, dtype=torch.float32)).exponent)
    floor = floor.clamp(*_E8M0_EXPONENTS)
    units = blocks.mul(torch.exp2(-floor.float()).unsqueeze(-1)).abs_()  # (rows, G, k), exact
    best, least = floor, _sum_of_squares(_nearest(units, 1.0, element).sub_(units))
    for difference in (1, -1):
        candidate = (floor + difference).clamp(*_E8M0_EXPONENTS)
        error = _sum_of_squares(_nearest(units, 2.0**difference, element).sub_(units))
        error = torch.where(candidate == floor, least, error)  # there is no such exponent
        best, least = torch.where(error < least, candidate, best), torch.minimum(least, error)
    return best


def _nearest(magnitude: Tensor, unit: float, element: Element) -> Tensor:
    """Return the nearest magnitude of a code times `unit`, a power of two."""
    if not element.is_integer:
        return _nearest_magnitude(magnitude, element, unit)
    return round_to(magnitude / unit, element).mul_(unit)


def _rounding_error(blocks: Tensor, step: Tensor, element: Element) -> Tensor:
    """Return the nearest magnitude of a code less |v|, for v = blocks (rows, G, k) over their step (rows, G)."""
    magnitude = blocks.div(step.unsqueeze(-1)).abs_()
    return _nearest(magnitude, 1.0, element).sub_(magnitude)


def _sum_of_squares(error: Tensor) -> Tensor:
    """Sum error's squares over each block (rows, G, k) pair by pair, an order for all devices. error is used up."""
    error.square_()
    while error.shape[-1] > 1:
        error = error[..., 0::2] + error[..., 1::2]
    return error.squeeze(-1)
