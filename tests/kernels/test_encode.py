"""Rounding, packing and scales, against tables and references written here from the bit fields in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fluxq.kernels import encode
from fluxq.kernels.tensor import QuantizedTensor, quantize_blocks
from fluxq.recipes.formats import ELEMENTS, FORMATS, Element

NAN_CODES = {"e4m3": (0x7F, 0xFF), "e5m2": (*range(0x7D, 0x80), *range(0xFD, 0x100)), "e8m0": (0xFF,)}
FLOATS = {"e2m1": (2, 1, 1), "e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}  # bits of exponent and mantissa, bias
MAGNITUDES = {"e2m1": 8, "e4m3": 127, "e5m2": 124}  # codes of positive numbers, in rising order
INTEGERS = {"int4": (-8, 7), "int8": (-127, 127)}  # what encoding saturates to
TINIEST = 2.0**-149  # fp32's smallest subnormal number


def value_of(kind: str, code: int) -> float:
    """Return the value that the bits of a code mean."""
    if code in NAN_CODES.get(kind, ()):
        return math.nan
    if kind == "e8m0":
        return 2.0 ** (code - 127)
    if kind in INTEGERS:
        bits = {"int4": 4, "int8": 8}[kind]
        return float(code - (1 << bits) if code >> (bits - 1) else code)
    exponent_bits, mantissa_bits, bias = FLOATS[kind]
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if kind == "e5m2" and exponent == 31:
        return sign * math.inf
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def nearest_codes(kind: str, x: np.ndarray) -> np.ndarray:
    """Saturating round to nearest even of float64 x, as codes (integers: as numbers)."""
    if kind in INTEGERS:
        return np.rint(np.clip(x, *INTEGERS[kind])).astype(np.int64)
    grid = np.array([value_of(kind, code) for code in range(MAGNITUDES[kind])])
    magnitude = np.clip(np.abs(x), 0, grid[-1])
    above = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    below = above - 1
    to_above, to_below = grid[above] - magnitude, magnitude - grid[below]
    even = np.where(above % 2 == 0, above, below)
    code = np.where(to_above < to_below, above, np.where(to_below < to_above, below, even))
    return code + np.signbit(x) * (8 if kind == "e2m1" else 128)


def codes_as_integers(codes: torch.Tensor) -> np.ndarray:
    return (codes.view(torch.uint8) if codes.is_floating_point() else codes).numpy().astype(np.int64)


def all_bf16() -> torch.Tensor:
    """Every bf16 number, as fp32."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", ELEMENTS)
def test_every_code_decodes_to_what_its_bits_mean(kind):
    element = ELEMENTS[kind]
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    expected = torch.tensor([value_of(kind, int(code)) for code in codes], dtype=torch.float64)
    if kind == "int4":
        codes = ((codes ^ 8).to(torch.int16) - 8).to(torch.int8)  # unpacked int4 codes are int8
    elif kind != "e2m1":
        codes = codes.view(getattr(torch, element.storage))
    values = encode.decode(codes, element)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(values), torch.signbit(expected)) or element.has_nan  # NaN has any sign
    assert max(v for v in expected.tolist() if math.isfinite(v)) == element.max


def test_e4m3_without_nan_decodes_to_the_same_as_with_it():
    """A CPU takes the bits of fp16 numbers for them; NaN has to be looked for."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = ~codes.float().isnan()
    assert finite.sum() == 254
    values = encode.decode(codes.view(torch.uint8)[finite].view(torch.float8_e4m3fn), ELEMENTS["e4m3"])
    assert torch.equal(bytes_of(values), bytes_of(codes.float()[finite]))
    for one in (0x7F, 0xFF):
        alone = torch.tensor([one, 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert encode.decode(alone, ELEMENTS["e4m3"]).isnan().tolist() == [True, False]


@pytest.mark.parametrize("kind", ELEMENTS)
def test_stored_codes_decode_as_if_they_were_unpacked_first(kind):
    element = ELEMENTS[kind]
    stored = torch.arange(256, dtype=torch.uint8).reshape(8, 32).view(getattr(torch, element.storage))
    expected = encode.decode(encode.unpack(stored, element), element)
    pairs = encode.stored_pairs(element, stored.device)
    for found in (encode.decode_stored(stored, element), encode.decode_stored(stored[:, ::1], element, pairs)):
        assert torch.equal(bytes_of(found), bytes_of(expected)) and found.shape == expected.shape
    columns = encode.decode_stored(stored.t(), element)  # not contiguous
    assert torch.equal(
        bytes_of(columns), bytes_of(encode.decode(encode.unpack(stored.t().contiguous(), element), element))
    )


@pytest.mark.parametrize("kind", ELEMENTS)
def test_rounding_without_codes_gives_what_codes_decode_to(kind):
    x = all_bf16()
    expected = encode.decode(encode.encode(x, ELEMENTS[kind]), ELEMENTS[kind])
    found = encode.decoded_codes(x.clone(), ELEMENTS[kind])
    same = ~x.isnan() if kind == "e2m1" else slice(None)
    assert torch.equal(bytes_of(found[same]), bytes_of(expected[same]))
    assert kind != "e2m1" or found[x.isnan()].isnan().all()


def test_every_e8m0_byte_decodes_to_its_power_of_two():
    scale = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([value_of("e8m0", byte) for byte in range(256)], dtype=torch.float64)
    for name in ("mxfp8", "mxfp4"):
        multiplier = encode.decode_scale(scale, FORMATS[name], None)
        torch.testing.assert_close(multiplier.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ELEMENTS)
def test_every_bf16_number_rounds_to_the_nearest_even_code(kind):
    x = all_bf16()
    x = x[~x.isnan()]
    codes = encode.encode(x, ELEMENTS[kind])
    np.testing.assert_array_equal(codes_as_integers(codes), nearest_codes(kind, x.double().numpy()))


@pytest.mark.parametrize("kind", ELEMENTS)
def test_fp32_neighbours_of_every_tie_round_to_their_own_side(kind):
    if kind in INTEGERS:
        grid = np.arange(INTEGERS[kind][0] - 2, INTEGERS[kind][1] + 3, dtype=np.float64)
    else:
        positive = [value_of(kind, code) for code in range(MAGNITUDES[kind])]
        grid = np.array(sorted({-v for v in positive} | set(positive)))
    ties = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
    x = np.concatenate([ties, np.nextafter(ties, np.float32(-1e9)), np.nextafter(ties, np.float32(1e9))])
    codes = encode.encode(torch.from_numpy(x), ELEMENTS[kind])
    np.testing.assert_array_equal(codes_as_integers(codes), nearest_codes(kind, x.astype(np.float64)))


@pytest.mark.parametrize("kind", FLOATS)
def test_one_rounding_serves_every_float_element(kind):
    """Also those whose codes torch's cast makes: the rule must be the same where there is no cast."""
    element = ELEMENTS[kind]
    noise = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, 200_000).astype(np.int32)
    x = torch.cat([all_bf16(), torch.from_numpy(noise).view(torch.float32)])
    x = x[~x.isnan()]
    codes = nearest_codes(kind, x.double().numpy())
    within = x.clamp(-element.max, element.max)
    np.testing.assert_array_equal(codes_as_integers(encode.float_codes(within, element)), codes)
    values = np.array([value_of(kind, code) for code in range(1 << element.bits)], dtype=np.float32)[codes]
    assert torch.equal(bytes_of(encode.nearest_float(x, element)), bytes_of(torch.from_numpy(values)))
    assert torch.equal(bytes_of(encode.round_to(x, element)), bytes_of(torch.from_numpy(values)))
    assert encode.nearest_float(torch.tensor([math.nan]), element).isnan().all()


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_round_without_codes_too(kind):
    x = all_bf16()
    x = x[~x.isnan()]
    found = encode.round_to(x, ELEMENTS[kind])
    np.testing.assert_array_equal(found.numpy(), nearest_codes(kind, x.double().numpy()))


@pytest.mark.parametrize(
    "element",
    [
        Element("e3m2", bits=6, max=28.0, storage="uint8", exponent=3, mantissa=2, bias=3),
        Element("int16", bits=16, max=32767.0, storage="int16", exponent=0, mantissa=15),
        Element("uint8", bits=8, max=127.0, storage="uint8", exponent=0, mantissa=7),
        Element("e6m1", bits=8, max=2.0**32, storage="float8_e6m1", exponent=6, mantissa=1, bias=31),
        Element("e3m0", bits=4, max=16.0, storage="uint8", exponent=3, mantissa=0, bias=3),
    ],
    ids=lambda element: element.name,
)
def test_an_unknown_element_is_an_error_and_no_integer(element):
    x = torch.ones(2, 8)
    for refused in (encode.encode, encode.round_to, encode.decode, encode.decoded_codes):
        with pytest.raises(ValueError, match=f"element {element.name}: codes of .* are not known; this fluxq has e2m1"):
            refused(x, element)


def test_infinity_saturates_and_nan_stays_nan_where_the_element_has_one():
    x = torch.tensor([math.inf, -math.inf])
    for kind, element in ELEMENTS.items():
        low = {"int4": -8.0}.get(kind, -element.max)
        assert encode.decode(encode.encode(x, element), element).tolist() == [element.max, low]
    for element in (ELEMENTS["e4m3"], ELEMENTS["e5m2"]):
        assert encode.decode(encode.encode(torch.tensor([math.nan]), element), element).isnan().all()


@pytest.mark.parametrize("length", [1, 67])  # conversions of one and of many at once are different code
@pytest.mark.parametrize("kind", ELEMENTS)
def test_nan_has_one_code_whatever_its_sign(kind, length):
    bits = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -0x7FFFFF, -1], dtype=torch.int32)  # NaN, the last 3 -NaN
    nan = bits.repeat_interleave(length).view(torch.float32)
    assert nan.isnan().all() and nan[-1].signbit()
    codes = encode.encode(nan, ELEMENTS[kind]).view(torch.uint8)
    assert codes.unique().tolist() == [0x7F if kind in ("e4m3", "e5m2") else 0]


@pytest.mark.parametrize("kind", ELEMENTS)
def test_encoding_leaves_its_input_alone(kind):
    x = torch.tensor([[1000.0, -0.3, 5.5, 2.5]])
    kept = x.clone()
    encode.encode(x, ELEMENTS[kind])
    assert torch.equal(x, kept)


def test_the_even_element_is_packed_into_the_low_nibble():
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x8]], dtype=torch.uint8)
    assert encode.pack(codes, ELEMENTS["e2m1"]).tolist() == [[0x21, 0x8F]]
    signed = torch.tensor([[1, 2, -1, -8]], dtype=torch.int8)
    assert encode.pack(signed, ELEMENTS["int4"]).tolist() == [[0x21, 0x8F]]


def test_every_byte_unpacks_low_nibble_first_and_packs_again():
    stored = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    nibbles = [n for byte in range(256) for n in (byte % 16, byte // 16)]
    unsigned = encode.unpack(stored, ELEMENTS["e2m1"])
    signed = encode.unpack(stored, ELEMENTS["int4"])
    assert unsigned.shape == signed.shape == (16, 32)
    assert unsigned.flatten().tolist() == nibbles
    assert signed.flatten().tolist() == [value_of("int4", nibble) for nibble in nibbles]
    assert torch.equal(encode.pack(unsigned, ELEMENTS["e2m1"]), stored)
    assert torch.equal(encode.pack(signed, ELEMENTS["int4"]), stored)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8"])
def test_8_bit_codes_are_stored_as_they_are(kind):
    codes = encode.encode(torch.randn(4, 8), ELEMENTS[kind])
    assert encode.pack(codes, ELEMENTS[kind]) is codes
    assert encode.unpack(codes, ELEMENTS[kind]) is codes


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_get_scale_one_and_decode_to_zeros_with_their_sign(name):
    w = torch.zeros(2, 128)
    w[1] = -0.0
    q = QuantizedTensor.quantize(w, name)
    assert encode.decode_scale(q.scale, q.format, None if q.global_scale is None else torch.ones(())).eq(1).all()
    assert q.global_scale is None or q.global_scale == 1
    decoded = q.dequantize()
    assert torch.equal(decoded, torch.zeros(2, 128))
    assert not torch.signbit(decoded[0]).any()
    assert torch.signbit(decoded[1]).all() == (q.format.element.name in FLOATS)


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.block[0] == 1])
def test_a_zero_block_among_others_gets_scale_one_and_leaves_them_alone(name):
    w = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    w[0, 0] = 8.0  # the largest, wherever the zeros are
    alone = QuantizedTensor.quantize(w, name)
    w[1] = 0.0
    q = QuantizedTensor.quantize(w, name)
    one = torch.tensor(127, dtype=torch.uint8) if q.format.scale == "e8m0" else torch.ones((), dtype=q.scale.dtype)
    assert torch.equal(bytes_of(q.scale[1]), bytes_of(one.expand_as(q.scale[1])))
    for row in (0, 2):
        assert torch.equal(bytes_of(q.codes[row]), bytes_of(alone.codes[row]))
        assert torch.equal(bytes_of(q.scale[row]), bytes_of(alone.scale[row]))


@pytest.mark.parametrize("name", FORMATS)
def test_scales_stop_at_the_smallest_that_their_type_allows(name):
    w = torch.full((2, 128), TINIEST)
    w[1] = -TINIEST
    q = QuantizedTensor.quantize(w, name)
    if q.format.scale == "e8m0":
        assert q.scale.unique().tolist() == [1]
    else:
        assert q.scale.double().unique().tolist() == [2.0**-9 if q.format.scale == "e4m3" else 2.0**-126]
    assert q.global_scale is None or q.global_scale.item() == 2.0**-126
    decoded = q.dequantize()
    assert torch.equal(decoded, torch.zeros(2, 128))
    assert torch.signbit(decoded[1]).all() == (q.format.element.name in FLOATS)


def test_an_nvfp4_block_far_below_the_tensor_maximum_gets_the_smallest_e4m3_scale():
    w = torch.zeros(1, 64)
    w[0, 0] = 2688.0  # global scale 1
    w[0, 16] = 6 * 2.0**-9  # exactly the smallest scale
    w[0, 32] = 0.74 * 2.0**-9  # below it: still codes 0.5 under the smallest scale
    w[0, 48] = -0.24 * 2.0**-9  # rounds to -0
    q = QuantizedTensor.quantize(w, "nvfp4")
    assert q.scale.tolist() == [[448.0, 2.0**-9, 2.0**-9, 2.0**-9]]
    assert q.dequantize()[0, ::16].tolist() == [2688.0, 6 * 2.0**-9, 0.5 * 2.0**-9, -0.0]
    assert torch.signbit(q.dequantize()[0, 48])


def test_a_negative_that_rounds_to_zero_keeps_its_sign_in_float_codes():
    tiny = torch.tensor([-1e-7])
    for kind in FLOATS:
        expected = 0x8 if kind == "e2m1" else 0x80
        assert codes_as_integers(encode.encode(tiny, ELEMENTS[kind])) == expected
    for kind in ("int4", "int8"):
        assert encode.encode(tiny, ELEMENTS[kind]).tolist() == [0]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_e8m0_bytes_of_finite_blocks_are_1_to_254(name):
    largest = [math.ldexp(1.0, e) for e in range(-149, 128)] + [torch.finfo(torch.float32).max]
    w = torch.zeros(len(largest), 32)
    w[:, 3] = torch.tensor(largest)
    q = QuantizedTensor.quantize(w, name)
    assert q.scale.min() >= 1 and q.scale.max() <= 254
    assert q.dequantize()[:-1].isfinite().all()
    assert q.dequantize()[-1, 3] == math.inf  # the nearest number of the format is 2^128


def test_the_ceil_rule_takes_the_smallest_power_of_two_that_does_not_saturate():
    exact = torch.tensor([448 * 2.0**e for e in range(-126, 120)])
    for amax, step in ((exact, 0), (torch.nextafter(exact, torch.tensor(math.inf)), 1)):
        w = torch.zeros(len(amax), 32)
        w[:, 0] = -amax
        q = QuantizedTensor.quantize(w, "mxfp8")
        assert q.scale.flatten().tolist() == [127 + e + step for e in range(-126, 120)]
    least = torch.nextafter(torch.tensor(224.0), torch.tensor(math.inf))
    assert encode.ceil_exponent(torch.stack([torch.tensor(224.0), least]), 448.0).tolist() == [-1, 0]


@pytest.mark.parametrize("magnitude", [2.0**-100, 1.0, 2.0**100])
def test_mxfp4_takes_the_exponent_of_least_squared_error_at_every_magnitude(magnitude):
    w = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * magnitude  # (64, 32)
    q = QuantizedTensor.quantize(w, "mxfp4")
    x = w.double().numpy()
    grid = np.array([value_of("e2m1", code) for code in range(16)])

    def squared_error(exponent: np.ndarray) -> np.ndarray:  # (64,)
        units = x / 2.0 ** exponent[:, None]
        return np.square(grid[nearest_codes("e2m1", units)] - units).sum(1) * 4.0**exponent / magnitude**2

    floor = np.floor(np.log2(np.abs(x).max(1))) - 2
    errors = np.stack([squared_error(floor + shift) for shift in (0, 1, -1)])  # (3, 64)
    chosen = np.array([0, 1, -1])[errors.argmin(0)] + floor
    np.testing.assert_array_equal(q.scale.flatten().numpy().astype(np.int64), chosen + 127)
    assert len(np.unique(errors.argmin(0))) >= 2, "the data must make a choice necessary"


def test_mxfp4_ties_go_to_the_floor_exponent():
    w = torch.zeros(1, 32)
    w[0, :2] = torch.tensor([4.0, 2.0])  # exact under 2^0, 2^1 and, saturating no code, under neither below
    assert QuantizedTensor.quantize(w, "mxfp4").scale.tolist() == [[127]]


def test_the_global_scale_makes_the_largest_block_use_the_largest_block_scale():
    nvfp4 = FORMATS["nvfp4"]
    amax = torch.tensor([2688.0, 1.0, 0.0, TINIEST])
    expected = [1.0, float(np.float32(1) / np.float32(2688)), 1.0, 2.0**-126]
    assert encode.global_scale_for(amax, nvfp4).tolist() == expected
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    assert QuantizedTensor.quantize(w, nvfp4).scale.float().max() == 448


def test_a_calibrated_scale_of_fp8_is_a_power_of_two_with_room_for_half_as_much_again():
    amax = torch.tensor([448.0, 298.0, 299.0, 1e-3, 0.0, TINIEST])
    scale = encode.input_scale_for(amax, FORMATS["fp8_tensor"])
    assert scale.tolist() == [2.0, 1.0, 2.0, 2.0**-18, 1.0, 2.0**-126]
    assert (1.5 * amax[:4] <= 448 * scale[:4]).all() and (1.5 * amax[:4] > 224 * scale[:4]).all()
    nvfp4 = FORMATS["nvfp4"]
    assert torch.equal(encode.input_scale_for(amax, nvfp4, True), encode.global_scale_for(amax, nvfp4, True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_in_activations_turn_their_own_block_into_nan(name, bad):
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(3))  # (M, K)
    row = FORMATS[name]
    given = torch.tensor(0.01) if row.two_level else None
    clean = quantize_blocks(x, row, given, "activation").dequantize()
    x[1, 70] = bad
    decoded = quantize_blocks(x, row, given, "activation").dequantize()
    hit = torch.zeros(3, 128, dtype=torch.bool)
    group = row.group_size or 128
    start = 70 // group * group
    hit[1 if row.block[0] == 1 else slice(None), start : start + group] = True
    assert decoded[hit].isnan().all()
    assert torch.equal(decoded[~hit], clean[~hit])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_reach_all_that_shares_a_derived_global_scale(bad):
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(3))
    x[1, 70] = bad
    assert quantize_blocks(x, FORMATS["nvfp4"], None, "activation").dequantize().isnan().all()


class DividesAsGpus(TorchDispatchMode):
    """Multiplies by the reciprocal of a plain number in place of dividing by it, as torch does on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_plain = func is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor)
        if is_plain:
            return args[0] * (torch.ones((), dtype=args[0].dtype) / torch.full((), args[1], dtype=args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_makes_the_same_scales_and_codes(name):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = QuantizedTensor.quantize(x, name)
    with DividesAsGpus():
        found = QuantizedTensor.quantize(x, name)
    for part, tensor in expected.tensors().items():
        assert torch.equal(found.tensors()[part].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
            part
        )


def test_a_gpu_makes_the_same_scales_for_inputs():
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    for wide in (False, True):
        expected = encode.global_scale_for(amax, FORMATS["nvfp4"], wide)
        with DividesAsGpus():
            assert torch.equal(encode.global_scale_for(amax, FORMATS["nvfp4"], wide), expected)
