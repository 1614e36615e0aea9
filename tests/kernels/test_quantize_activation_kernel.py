"""The kernels that quantize and dequantize against the torch reference, byte for byte, on Triton's interpreter.

Each check takes the kernel file as an argument: the tests hand it the real one, the last test one with a fault.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_tests import load_module
from poison import poisoned
from rounding import packed, steps
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels import encode, ops
from fluxq.kernels.dequantize import kernel as dequantize
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.quantize_activation import kernel as quantize_activation
from fluxq.kernels.quantize_activation import op as quantizer
from fluxq.kernels.quantize_activation.op import PRODUCED
from fluxq.kernels.tensor import QuantizedTensor, quantize_blocks, stored_shapes, swizzle_scales
from fluxq.kernels.tiles import Tile
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS, find_format

TILE = Tile(rows=16, columns=256, warps=4)
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # infinity and NaN are among x
COLUMNS = {
    "int8": 331,
    "fp8": 331,
    "fp8_tensor": 331,
    "fp8_1x128": 384,
    "mxfp8": 352,
    "mxfp4": 352,
    "nvfp4": 336,
}  # never a multiple of the tile's


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def takes_a_scale(format: str) -> bool:
    """True if scales can be given: those of rows and tensors, and the global one."""
    return FORMATS[format].two_level or not FORMATS[format].group_size


def awkward(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(m, k) of every magnitude; as far as there are rows, some of what formats treat apart."""
    noise = torch.Generator().manual_seed(m * k)
    limits = torch.finfo(dtype)
    x = torch.randn(m, k, generator=noise, dtype=torch.float64) * torch.logspace(-7, 3, m).roll(1)[:, None]
    powers = 2.0 ** torch.randint(0, 3, (k,), generator=noise)
    special = (
        0.0 * x[0],  # with either sign
        powers,  # two candidates of mxfp4 fit without error
        limits.max * x[0].sign(),
        limits.smallest_normal * x[0] / x[0].abs().max(),  # subnormal numbers
        torch.where(torch.arange(k) == k - 1, torch.inf, x[0]),
        torch.where(torch.arange(k) == 3, torch.nan, x[0]),
        torch.where(torch.arange(k) < k // 2, 0.0, x[0]),
        torch.arange(k) % 33 / 4 - 4,  # ties
    )
    for row, values in zip(range(1, m, 2), special, strict=False):
        x[row] = values
    return x.to(dtype)


def assert_same_bytes(found: QuantizedTensor, reference: QuantizedTensor) -> None:
    """Equal codes and scales; NaN's code is one byte, NaN as a scale of fp32 any."""
    for name, tensor in reference.tensors().items():
        assert_equal_codes(found.tensors()[name], tensor)


def assert_equal_codes(found: Tensor, expected: Tensor) -> None:
    if expected.element_size() == 1:
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    assert_equal_values(found.float(), expected.float())


# Checks of quantize_activation


def check_quantize(kernels: ModuleType, format: str, m: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x = awkward(m, COLUMNS[format], dtype)
    if format == "fp8_tensor":
        x = x.nan_to_num(0.0, 0.0, 0.0)  # one NaN would be everything
    with poisoned():
        out, _ = kernels.quantize_activation(x, *steps(format), tile=TILE)
    assert_same_bytes(out, ops.quantize_activation(x, FORMATS[format]))


def check_given_scale(kernels: ModuleType, format: str, per_token: bool) -> None:
    x = awkward(33, COLUMNS[format])
    scale = torch.linspace(0.01, 3, 33)[:, None] if per_token else torch.tensor(0.037)
    q, _ = kernels.quantize_activation(x, *steps(format, input_scale=scale), tile=TILE)
    row = FORMATS[format]
    reference = quantize_blocks(x, row, scale, "x") if row.two_level else quantize_blocks(x, row, None, "x", scale)
    assert_same_bytes(q, reference)


def check_every_bf16_number(kernels: ModuleType, format: str) -> None:
    """And the fp32 numbers right beside each: near-ties must not be rounded twice."""
    bits = torch.arange(2**16, dtype=torch.int32) << 16
    numbers = torch.cat([bits, bits + 1, bits - 1]).view(torch.float32)
    x = numbers[numbers.isfinite() & (numbers.abs() < 600)]
    x = x[: len(x) // 4096 * 4096].reshape(-1, 4096)
    q, _ = kernels.quantize_activation(x, *steps(format, input_scale=torch.ones(len(x), 1)), tile=Tile(16, 4096, 4))
    expected = encode.encode(x.clone(), FORMATS[format].element)
    assert_equal_values(q.codes.float(), expected.float())


def check_swizzled(kernels: ModuleType, format: str, m: int) -> None:
    x = awkward(m, COLUMNS[format])
    given = torch.tensor(0.02) if FORMATS[format].two_level else None
    expected = swizzle_scales(ops.quantize_activation(x, FORMATS[format], given).scale)
    with poisoned():
        out, _ = kernels.quantize_activation(x, *steps(format, input_scale=given, swizzled=True), tile=TILE)
    assert_equal_values(out.scale.view(torch.uint8), expected.view(torch.uint8))


def check_signs_of_nan(kernels: ModuleType, format: str) -> None:
    """NaN has one code whatever its sign, and so have the finite numbers of its block."""
    x = torch.linspace(-9, 9, 384).reshape(3, 128).bfloat16()
    x.view(torch.int16)[1, 5], x.view(torch.int16)[1, 38] = 0x7FC0, -0x40  # NaN and -NaN
    given = torch.ones(()) if FORMATS[format].two_level else None
    q, _ = kernels.quantize_activation(x, *steps(format, input_scale=given), tile=TILE)
    assert_same_bytes(q, quantize_blocks(x, FORMATS[format], given, "x"))


def check_distant_rows(kernels: ModuleType) -> None:
    """The third row is 2^31 elements from the first, an offset that does not fit into 32 bits."""
    k = 32
    x = torch.empty(2**31 + k, dtype=torch.bfloat16).as_strided((3, k), (2**30, 1))  # only what is written is resident
    x.copy_(awkward(3, k))
    q, _ = kernels.quantize_activation(x, *steps("mxfp8"), tile=Tile(4, 32, 1))
    assert_same_bytes(q, ops.quantize_activation(x.clone(), FORMATS["mxfp8"]))


def check_steps(
    kernels: ModuleType,
    format: str,
    m: int = 17,
    dtype: torch.dtype = torch.bfloat16,
    *,
    act: str = "",
    beside: int = 0,
    given: bool = False,
    hadamard: int = 0,
    regular: bool = False,
    rank: int = 0,
    four_over_six: bool = False,
    swizzled: bool = False,
    tile: Tile = TILE,
) -> None:
    """mean and smooth, then the other steps: the bytes of the reference, of the kernel's own act(x) if there is one.

    beside: that many columns are another matrix's, which is part of a wider one.
    """
    k, row = 768 if hadamard == 256 else 640, FORMATS[format]
    x, left = awkward(m, (k - beside) * (1 + (act in quantizer.GATED)), dtype), awkward(m, 2 * beside + 1, dtype)
    if rank or format == "fp8_tensor":  # one NaN would be everything, and sums are not to overflow
        x, left = (t.nan_to_num(0.0, 0.0, 0.0).clamp(-1e4, 1e4) for t in (x, left))
    left = left[:, :beside]
    noise = torch.Generator().manual_seed(m)
    mean, smooth = 9 * torch.randn(k, generator=noise), torch.randn(k, generator=noise).exp()
    given_scale = None
    if given:
        given_scale = torch.rand(m, 1, generator=noise) if row.block[0] else torch.tensor(0.37)
    a = torch.cat([left, kernels.activate(x, act, tile=TILE) if act else x], dim=1)
    options: dict = {"input_scale": given_scale, "smooth": smooth, "mean": mean}
    options |= {"hadamard": hadamard, "regular": regular, "four_over_six": four_over_six, "swizzled": swizzled}
    expected = quantizer.quantize_activation(a, *packed(format, **options))
    down = None
    if rank:
        narrow = torch.float16 if dtype == torch.float16 else torch.bfloat16
        down = torch.randn(rank, k, generator=noise).to(narrow)
    options |= {"act": act, "beside": left if beside else None, "down": down}
    with poisoned():
        out, h = kernels.quantize_activation(x, *steps(format, **options), tile=tile)
    assert_equal_codes(out.codes, expected[0])
    if not given or row.two_level:
        assert_equal_values(out.scale.float(), expected[1].float())
    if not given and out.global_scale is not None:
        assert_equal_values(out.global_scale, expected[2])
    assert (h is None) == (down is None)
    if h is not None and down is not None:
        check_low_rank(h, a.to(down.dtype), down)


def check_low_rank(h: Tensor, a: Tensor, down: Tensor) -> None:
    """h = a · down^T within what fp32 sums and one rounding may lose."""
    a64, down64 = a.double(), down.double()
    value = a64 @ down64.T
    bound = 1.01 * (a.shape[1] * 2.0**-24 * (a64.abs() @ down64.abs().T) + torch.finfo(h.dtype).eps / 2 * value.abs())
    wrong = ~((h.double() - value).abs() <= bound + torch.finfo(h.dtype).smallest_normal)
    assert not wrong.any(), f"h: {int(wrong.sum())} differ, first at {wrong.nonzero()[0].tolist()}"


def check_order_of_sums(kernels: ModuleType) -> None:
    """Neighbours first: 2^24 + 1 loses the 1, which would come back if 2^24 - 2^24 were first."""
    x, one = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0]).repeat(3, 16), torch.ones(3, 1)
    q, _ = kernels.quantize_activation(x, *steps("fp8", input_scale=one, hadamard=64), tile=TILE)
    codes, *_ = quantizer.quantize_activation(x, *packed("fp8", input_scale=one, hadamard=64))
    assert_equal_values(q.codes.float(), codes.float())


def check_rows_that_are_not_there(kernels: ModuleType) -> None:
    """Of the tile's 16 rows 13 lie beyond x: they hold 0 - mean, which is not the tensor's amax."""
    x, mean = torch.full((3, 32), 5.0), torch.full((32,), 4.0)
    q, _ = kernels.quantize_activation(x, *steps("fp8_tensor", mean=mean), tile=TILE)
    assert_equal_values(q.scale, torch.tensor(1.0) / 448)


def check_tie_of_four_and_six(kernels: ModuleType) -> None:
    """Blocks that both scales hold exactly keep the one for 6; one that only 4 holds exactly takes that."""
    x = torch.tensor([6.0, 0.0, 3.0, 0.0, -6.0, *[0.0] * 11, 6.0, 4.5, *[0.0] * 14]).repeat(1, 2)
    given = steps("nvfp4", input_scale=torch.tensor(1.0), four_over_six=True)
    q, _ = kernels.quantize_activation(x, *given, tile=Tile(1, 64, 1))
    assert_equal_values(q.scale.float(), torch.tensor([[1.0, 1.5, 1.0, 1.5]]))
    assert_equal_values(q.dequantize(), x)


def check_quotients(kernels: ModuleType, format: str, exponent: int) -> None:
    """Each pair (v, step) whose quotient could come out so wrong that its code changes, both times 2^exponent.

    Before it is rounded the corrected quotient is off by less than 2 · 2^-24 of its last place. It can come out as the
    wrong one of two neighbours only that near to the middle between them, and the code changes only if one of the two
    is a tie of codes. With v, step, m integers of 24, 24, 25 bits and the middle m · 2^e, the distance from it is
    (v · 2^j - step · m) / step in units of 2^(e - j): here are all pairs with a numerator of at most 8.
    """
    row = FORMATS[format]
    if row.two_level:
        codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    else:
        dtype = torch.float8_e4m3fn if format == "fp8" else torch.int8
        codes = encode.decode(torch.arange(127, dtype=torch.uint8).view(dtype), row.element).double()
    pairs = []
    for tie in ((codes[:-1] + codes[1:]) / 2).tolist():
        fraction, e = math.frexp(tie)
        m = int(math.ldexp(fraction, 25))
        below = (m - 1, e - 25) if fraction > 0.5 else (2**25 - 1, e - 26)  # numbers are denser below a power of two
        for middle, place in ((m + 1, e - 25), below):
            for j, rest in itertools.product((24, 25), (*range(-8, 0), *range(1, 9))):
                step = -rest * pow(middle, -1, 2**j) % 2**j
                v, nothing = divmod(step * middle + rest, 2**j)
                assert nothing == 0
                if 2**23 <= step < 2**24 and 2**23 <= v < 2**24 and j + place + exponent >= -149:
                    pairs.append((math.ldexp(v, j + place + exponent), math.ldexp(step, exponent)))
    assert len(pairs) > 4 * len(codes)
    v, step = torch.tensor(pairs, dtype=torch.float64).float().T[:, :, None].contiguous()
    if row.two_level:
        v = torch.cat([v, 6 * step, torch.zeros(len(v), 14)], 1)  # a block scale of 1
    q, _ = kernels.quantize_activation(v, *steps(format, input_scale=step), tile=Tile(256, 32, 4))
    if row.two_level:
        assert_same_bytes(q, quantize_blocks(v, row, step, "v"))
    else:
        assert_equal_codes(q.codes, encode.encode(v / step, row.element))


def check_tiny_global_scales(kernels: ModuleType) -> None:
    """Steps of which a block's scale times the global one is subnormal, or 0."""
    g = torch.tensor([2.0**-149, 2.0**-145, 2.0**-141, 2.0**-133, 2.0**-126])[:, None]
    x = torch.linspace(-9, 9, 5 * 64).reshape(5, 64) * g * torch.tensor([1.0, 3, 50, 448]).repeat_interleave(16)
    x[:, 5] = torch.tensor([torch.nan, 0.0, -0.0, torch.nan, torch.inf])
    x[2, 48:] = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-148)]).repeat(4)  # 2^-9 · 2^-141 is 0
    q, _ = kernels.quantize_activation(x, *steps("nvfp4", input_scale=g), tile=TILE)
    assert_same_bytes(q, quantize_blocks(x, FORMATS["nvfp4"], g, "x"))


def check_every_amax(kernels: ModuleType, format: str) -> None:
    x = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)[:, None]
    q, _ = kernels.quantize_activation(x, *steps(format), tile=Tile(1024, 32, 4))
    assert_same_bytes(q, ops.quantize_activation(x, FORMATS[format]))


# Checks of dequantize


def check_dequantize(kernels: ModuleType, format: str, dtype: torch.dtype) -> None:
    row = find_format(format)
    x = torch.randn(21, 640, generator=torch.Generator().manual_seed(5)) * torch.logspace(-4, 2, 21)[:, None]
    x[3], x[5] = 0.0, -0.0
    q = QuantizedTensor.quantize(x, row)
    with poisoned():
        out = kernels.dequantize(q, dtype, tile=Tile(8, 256, 4))
    assert_equal_values(out, q.dequantize(dtype))


def check_every_code_and_scale(kernels: ModuleType, format: str) -> None:
    """All bytes of codes, in each row under another scale: all there are of one byte, some of the wider ones."""
    row = FORMATS[format]
    k = 256 * 8 // row.element.bits
    scales = torch.arange(256, dtype=torch.uint8)
    if row.scale in ("fp32", "bf16"):
        scales = torch.tensor([2.0**-126, 0.3, 3e4, torch.nan]).to(encode.SCALE_DTYPES[row.scale])
    n = len(scales)
    (_, dtype), (shape, scale_dtype) = list(stored_shapes(row, n, k).values())[:2]
    scale = scales.view(scale_dtype)[:, None].repeat(1, k // (row.group_size or k)).reshape(shape)
    codes = torch.arange(256, dtype=torch.uint8).repeat(n, 1).view(dtype)
    global_scale = torch.linspace(1e-3, 10, n)[:, None] if row.two_level else None
    q = QuantizedTensor(codes, scale, global_scale, (n, k), row)
    assert_equal_values(kernels.dequantize(q, tile=Tile(64, 128, 4)), q.dequantize())


def assert_equal_values(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    wrong = ~((found == expected) & (found.signbit() == expected.signbit()) | (found.isnan() & expected.isnan()))
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        tile = [i // size for i, size in zip(first, (TILE.rows, TILE.columns), strict=False)]
        values = [t.flatten()[wrong.flatten()][0].item() for t in (found, expected)]
        raise AssertionError(
            f"{int(wrong.sum())} differ, first at {first} (tile {tile}): {values[0]:.9g}, expected {values[1]:.9g}"
        )


@pytest.mark.often(2)
@pytest.mark.parametrize("m", [1, 5, 17, 130])
@pytest.mark.parametrize("format", PRODUCED)
def test_codes_and_scales_are_the_reference_byte_for_byte(format: str, m: int) -> None:
    check_quantize(quantize_activation, format, m)


@pytest.mark.often(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format", PRODUCED)
def test_other_input_types_are_quantized_alike(format: str, dtype: torch.dtype) -> None:
    check_quantize(quantize_activation, format, 17, dtype)


@pytest.mark.parametrize(
    ("format", "per_token"),
    [("int8", True), ("fp8", True), ("fp8_tensor", False), ("nvfp4", True), ("nvfp4", False)],
)
def test_a_given_scale_takes_the_place_of_the_amax(format: str, per_token: bool) -> None:
    check_given_scale(quantize_activation, format, per_token)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_every_bf16_number_and_its_neighbours_round_to_the_nearest_even_code(format: str) -> None:
    check_every_bf16_number(quantize_activation, format)


@pytest.mark.parametrize("format", PRODUCED)
def test_nan_has_the_code_of_the_reference_whatever_its_sign(format: str) -> None:
    check_signs_of_nan(quantize_activation, format)


@pytest.mark.often(1)
@pytest.mark.parametrize(("format", "m"), [("mxfp8", 5), ("mxfp4", 5), ("nvfp4", 5), ("nvfp4", 130)])
def test_swizzled_scales_lie_in_128x4_tiles_padded_with_zeros(format: str, m: int) -> None:
    check_swizzled(quantize_activation, format, m)


@pytest.mark.slow
def test_mxfp4_chooses_the_exponent_of_the_reference_in_many_blocks() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, _ = quantize_activation.quantize_activation(x, *steps("mxfp4"), tile=Tile(16, 512, 8))
    assert_same_bytes(q, ops.quantize_activation(x, FORMATS["mxfp4"]))


def test_four_over_six_chooses_the_scale_of_the_reference_in_many_blocks() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, _ = quantize_activation.quantize_activation(x, *steps("nvfp4", four_over_six=True), tile=Tile(16, 512, 8))
    codes, scale, global_scale, _ = quantizer.quantize_activation(x, *packed("nvfp4", four_over_six=True))
    assert_same_bytes(q, QuantizedTensor(codes, scale, global_scale, q.shape, q.format))


def test_ties_between_four_and_six_go_to_six() -> None:
    check_tie_of_four_and_six(quantize_activation)


@pytest.mark.often(1)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("format", ["int8", "fp8", "fp8_tensor", "nvfp4"])
def test_mean_smoothing_and_hadamard_come_first(format: str, given: bool) -> None:
    check_steps(quantize_activation, format, given=given, hadamard=32)


@pytest.mark.often(5)
@pytest.mark.parametrize("hadamard", [0, 16, 32, 64, 128])
@pytest.mark.parametrize("m", [1, 5, 130])
def test_every_hadamard_size_gives_the_bits_of_the_reference(hadamard: int, m: int) -> None:
    check_steps(quantize_activation, "mxfp8", m, hadamard=hadamard)


@pytest.mark.often(5)
@pytest.mark.parametrize("hadamard", [16, 64, 256])
@pytest.mark.parametrize(("format", "m", "columns"), [("int8", 1, 256), ("int8", 130, 512), ("mxfp8", 5, 512)])
def test_the_regular_matrix_of_every_size_gives_the_bits_of_the_reference(
    hadamard: int, format: str, m: int, columns: int
) -> None:
    check_steps(quantize_activation, format, m, hadamard=hadamard, regular=True, tile=Tile(4, columns, 4))


def test_a_tuned_tile_holds_whole_blocks_of_the_regular_matrix() -> None:
    """A tile with `down` has 128 columns."""
    x, down = awkward(16, 256).nan_to_num(0.0, 0.0, 0.0), torch.ones(2, 256, dtype=torch.bfloat16)
    options: dict = {"hadamard": 256, "regular": True}
    q, _ = quantize_activation.quantize_tuned(x, *steps("int8", down=down, **options), "sm_90")
    codes, *_ = quantizer.quantize_activation(x, *packed("int8", **options))
    assert_equal_codes(q.codes, codes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "given"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
)
def test_four_over_six_with_every_step(dtype: torch.dtype, given: bool) -> None:
    check_steps(quantize_activation, "nvfp4", 5, dtype, given=given, hadamard=64, four_over_six=True, swizzled=True)


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("format", "given"),
    [(name, given) for name in PRODUCED for given in (False, True) if not given or takes_a_scale(name)],
)
def test_the_low_rank_product_comes_from_x_and_leaves_the_codes_alone(format: str, given: bool) -> None:
    check_steps(quantize_activation, format, given=given, hadamard=16, rank=33)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_low_rank_product_of_other_types(dtype: torch.dtype) -> None:
    check_steps(quantize_activation, "int8", 5, dtype, rank=1)


@pytest.mark.often(1)
@pytest.mark.parametrize(("beside", "act", "m"), [(1, None, 5), (192, "gelu_tanh", 33), (333, "silu_mul", 5)])
@pytest.mark.parametrize("format", PRODUCED)
def test_what_stands_beside_x_makes_the_first_columns(format: str, beside: int, act: str | None, m: int) -> None:
    check_steps(quantize_activation, format, m, act=act, beside=beside, hadamard=128)


@pytest.mark.often(2)
@pytest.mark.parametrize("format", PRODUCED)
def test_beside_with_every_step_and_the_low_rank_product(format: str) -> None:
    block, nvfp4 = FORMATS[format].has_byte_scales, format == "nvfp4"
    options = {"hadamard": 16, "rank": 17, "four_over_six": nvfp4, "swizzled": block}
    check_steps(quantize_activation, format, 5, act="mul_silu", beside=256, **options)


@pytest.mark.parametrize("format", ["int8", "fp8", "fp8_tensor", "nvfp4"])
def test_beside_under_a_given_scale(format: str) -> None:
    check_steps(quantize_activation, format, 5, act="gelu", beside=160, given=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_beside_in_other_types_and_in_one_tile(dtype: torch.dtype) -> None:
    check_steps(quantize_activation, "int8", 5, dtype, act="gelu_tanh", beside=639, tile=Tile(1, 1024, 4))


@pytest.mark.parametrize("format", ["int8", "mxfp4", "nvfp4"])
def test_a_row_in_one_tile_is_quantized_alike(format: str) -> None:
    check_steps(quantize_activation, format, 5, hadamard=128, tile=Tile(1, 1024, 4))


def test_sums_of_the_hadamard_transform_are_in_the_order_of_the_reference() -> None:
    check_order_of_sums(quantize_activation)


def test_rows_beyond_x_do_not_count_for_the_scale_of_a_tensor() -> None:
    check_rows_that_are_not_there(quantize_activation)


def test_one_nan_is_the_whole_tensor() -> None:
    x = torch.ones(3, 32)
    x[1, 5] = torch.nan
    q, _ = quantize_activation.quantize_activation(x, *steps("fp8_tensor"), tile=TILE)
    assert q.scale.isnan() and q.dequantize().isnan().all()


def test_rows_may_be_any_distance_apart() -> None:
    check_distant_rows(quantize_activation)


@pytest.mark.often(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", [*KERNEL_FORMATS, "int4_g128"])
def test_dequantized_matrices_are_the_references_bits(format: str, dtype: torch.dtype) -> None:
    check_dequantize(dequantize, format, dtype)


@pytest.mark.parametrize("format", [name for name in KERNEL_FORMATS if name != "fp8_tensor"])
def test_every_code_decodes_under_every_scale(format: str) -> None:
    check_every_code_and_scale(dequantize, format)


@pytest.mark.often(5)
@pytest.mark.parametrize("chip", ["sm_80", "sm_100"])  # without instructions for codes, and with those for E2M1 too
@pytest.mark.parametrize("format", PRODUCED)
def test_other_chips_give_the_same_bytes(format: str, chip: str) -> None:
    with interpreting(chip):
        check_quantize(quantize_activation, format, 17)
        check_steps(quantize_activation, format, 5, act="gelu_tanh", four_over_six=format == "nvfp4")
        if FORMATS[format].group_size:
            check_signs_of_nan(quantize_activation, format)
        elif FORMATS[format].block[0]:
            check_every_bf16_number(quantize_activation, format)


@pytest.mark.parametrize("format", [name for name in KERNEL_FORMATS if name != "fp8_tensor"])
def test_chips_without_an_instruction_for_e4m3_decode_the_same_values(format: str) -> None:
    with interpreting("sm_80"):
        check_every_code_and_scale(dequantize, format)


@pytest.mark.parametrize("exponent", [0, -149])
@pytest.mark.parametrize("format", ["fp8", "int8", "nvfp4"])
def test_quotients_beside_the_middle_of_two_numbers_have_the_code_of_a_division(format: str, exponent: int) -> None:
    check_quotients(quantize_activation, format, exponent)


@pytest.mark.parametrize("chip", ["sm_80", "sm_100"])
def test_global_scales_next_to_zero(chip: str) -> None:
    with interpreting(chip):
        check_tiny_global_scales(quantize_activation)


@pytest.mark.often(1)
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_the_scale_of_every_amax_is_that_of_a_division(format: str) -> None:
    check_every_amax(quantize_activation, format)


X, WIDE = torch.ones(4, 64), torch.ones(4, 128)
BAD_INPUT = {
    "no rows": ((X[:0], "fp8"), {}, r"x \(0, 64\) is empty"),
    "three axes": ((X[None], "fp8"), {}, r"expected \(M, K\)"),
    "integers": ((X.int(), "fp8"), {}, "x is torch.int32"),
    "K tail": ((X[:, :40], "mxfp8"), {}, "multiples of 32"),
    "column stride": ((torch.ones(64, 32).t(), "nvfp4"), {}, r"strides \(1, 32\).*\.contiguous"),
    "a weight format": ((X, "int4"), {}, "not quantized to int4, only to int8"),
    "a scale of a block": ((WIDE, "fp8_1x128"), {"input_scale": torch.ones(4, 1)}, "give no input_scale"),
    "bytes in tiles": ((WIDE, "fp8_1x128"), {"swizzled": True}, "of a byte, fp8_1x128 has none"),
    "an mx scale": ((X, "mxfp8"), {"input_scale": torch.ones(4, 1)}, "give no input_scale"),
    "scale of another shape": ((X, "int8"), {"input_scale": torch.ones(4)}, r"input_scale is .* \(4,\), expected"),
    "scale of another type": ((X, "nvfp4"), {"input_scale": torch.tensor(1.0).half()}, "expected float32"),
    "scale elsewhere": ((X, "nvfp4"), {"input_scale": torch.ones((), device="meta")}, "on meta.*move it"),
    "smoothing of another length": ((X, "fp8"), {"smooth": torch.ones(32)}, r"smooth is .* \(32,\), expected"),
    "mean of another type": ((X, "fp8"), {"mean": torch.ones(64).half()}, "mean is torch.float16"),
    "a Hadamard size": ((X, "fp8"), {"hadamard": 48}, "hadamard is 48, expected one of 0, 16"),
    "a Hadamard tail": ((X, "fp8"), {"hadamard": 128}, "K is 64, no multiple of hadamard 128"),
    "a tile that splits Hadamard blocks": (
        (X, "fp8"),
        {"hadamard": 64, "tile": Tile(4, 32, 1)},
        "tile.columns is 32, expected a multiple of hadamard 64",
    ),
    "4-over-6 elsewhere": ((X, "mxfp4"), {"four_over_six": True}, "mxfp4 has none: leave it out"),
    "swizzled rows": ((X, "int8"), {"swizzled": True}, "int8 has none: leave it out"),
    "swizzled in narrow tiles": (
        (X, "nvfp4"),
        {"swizzled": True, "tile": Tile(4, 32, 1)},
        "tile.columns is 32, expected a multiple of 64",
    ),
    "a rank too large": (
        (X.half(), "fp8"),
        {"down": torch.ones(257, 64).half()},
        r"down is \(257, 64\), expected .* R from 1 to 128",
    ),
    "down of another type": ((X.half(), "fp8"), {"down": torch.ones(4, 64)}, "down is torch.float32"),
    "down for few rows": (
        (X.half(), "fp8"),
        {"down": torch.ones(4, 64).half(), "tile": Tile(4, 64, 1)},
        "tile.rows is 4, expected at least 16",
    ),
    "an unknown act": ((X, "fp8"), {"act": "relu"}, "act is 'relu', expected one of gelu, gelu_tanh"),
    "an act of two halves": ((X[:, :63], "fp8"), {"act": "silu_mul"}, r"no two halves, expected \(M, 2K\)"),
    "beside of other rows": ((X, "fp8"), {"beside": X[:3]}, r"beside is torch.float32 \(3, 64\), expected .* \(4, D\)"),
    "beside of another type": ((X, "fp8"), {"beside": X.half()}, "beside is torch.float16"),
    "beside elsewhere": ((X, "fp8"), {"beside": X.to("meta")}, "beside is on meta, x on cpu: move it"),
    "beside by columns": ((X, "fp8"), {"beside": torch.ones(64, 4).t()}, r"beside has strides \(1, 4\)"),
    "a K tail beside": ((X, "mxfp8"), {"beside": X[:, :40]}, "multiples of 32"),
    "a tile that splits blocks": ((X, "mxfp8"), {"tile": Tile(4, 16, 1)}, "multiple of mxfp8's 32"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_input_that_the_kernel_does_not_take_is_named(case: str) -> None:
    (x, name), options, message = BAD_INPUT[case]
    with pytest.raises(ValueError, match=message):
        tile = options.get("tile", TILE)
        given = steps(name, **{key: value for key, value in options.items() if key != "tile"})
        quantize_activation.quantize_activation(x, *given, tile=tile)


def test_buffers_that_do_not_fit_are_named() -> None:
    q = QuantizedTensor.quantize(torch.ones(4, 64), "nvfp4")
    bad = {
        r"weight is .* \(4, 64\), expected uint8 \(4, 32\)": QuantizedTensor(
            torch.zeros(4, 64, dtype=torch.uint8), q.scale, q.global_scale, q.shape, q.format
        ),
        r"weight_scale has strides \(1, 4\).*contiguous": QuantizedTensor(
            q.codes, q.scale.t().contiguous().t(), q.global_scale, q.shape, q.format
        ),
    }
    for message, broken in bad.items():
        with pytest.raises(ValueError, match=message):
            dequantize.dequantize(broken, tile=TILE)
    with pytest.raises(ValueError, match=r"dtype is torch\.float64"):
        dequantize.dequantize(q, torch.float64, tile=TILE)


def on(chip: str, check: Callable) -> Callable[[ModuleType], None]:
    """The check, by kernels that are told they run on another chip."""

    def run(kernels: ModuleType) -> None:
        with interpreting(chip):
            check(kernels)

    return run


# Faults: in `file`, the text `old` (which must occur once) becomes `new`, and the check must notice.
QUANTIZE, CODES, DEQUANTIZE = "quantize_activation.py", "codes.py", "dequantize.py"
every_number = partial(check_every_bf16_number, format="fp8")
nvfp4 = partial(check_quantize, format="nvfp4", m=17)
mxfp4 = partial(check_quantize, format="mxfp4", m=17)
mxfp8 = partial(check_quantize, format="mxfp8", m=17)
in_128s = partial(check_quantize, format="fp8_1x128", m=17)
int8 = partial(check_quantize, format="int8", m=17)
swizzled = partial(check_swizzled, format="nvfp4", m=130)
four_over_six = partial(check_steps, format="nvfp4", four_over_six=True)
with_steps = partial(check_steps, format="mxfp8", hadamard=32)
with_regular = partial(check_steps, format="int8", hadamard=64, regular=True)
tensor_scale = partial(check_steps, format="fp8_tensor", m=130)
low_rank = partial(check_steps, format="int8", rank=33)
beside = partial(check_steps, format="int8", m=5, act="silu_mul", beside=192)
fp8 = partial(check_quantize, format="fp8", m=17)
small = partial(check_quotients, format="int8", exponent=-149)
every_amax = partial(check_every_amax, format="int8")
given = partial(check_given_scale, format="fp8", per_token=True)
nan = partial(check_signs_of_nan, format="mxfp8")
codes_of = {name: partial(check_every_code_and_scale, format=name) for name in KERNEL_FORMATS}
FAULTS: dict[str, tuple[str, str, str, Callable]] = {
    "nibbles swapped": (CODES, "float_code(low, 1, 1, 6.0) |", "float_code(high, 1, 1, 6.0) |", nvfp4),
    "scales transposed": (CODES, "(K // GROUP) + groups[None, :]", "1 + groups[None, :] * M", mxfp8),
    "scales one group off": (CODES, "groups = tile * (COLUMNS // GROUP) +", "groups = 1 +", mxfp8),
    "blocks in 447ths": (CODES, "row_step(amax, 448.0)", "row_step(amax, 447.0)", in_128s),
    "blocks under the scale of a row": (
        CODES,
        "block_scale = row_step(amax",
        "block_scale = row_step(tl.max(amax, 1)[:, None]",
        in_128s,
    ),
    "no mask of rows": (CODES, "(rows < M)[:, None] & (groups <", "(rows < M + 1)[:, None] & (groups <", mxfp8),
    "no mask of columns": (CODES, "(rows < M)[:, None] & (pairs < K // 2)", "(rows < M)[:, None] & (pairs < K)", nvfp4),
    "a tile unwritten": (QUANTIZE, "first = tl.program_id(1)\n", "first = tl.program_id(1) + 1\n", mxfp4),
    "amax of one tile": (QUANTIZE, "tl.maximum(largest, magnitude_bits(values))", "magnitude_bits(values)", low_rank),
    "amax without sign": (CODES, "tl.abs(tl.reshape(values", "(tl.reshape(values", mxfp8),
    "held: amax of the first tile": (CODES, "largest, tl.abs(tiles[tile])", "largest, largest", int8),
    "held: amax without sign": (CODES, "largest = tl.abs(tiles[0])", "largest = tiles[0]", int8),
    "held: NaN is no maximum": (CODES, ", propagate_nan=tl.PropagateNan.ALL", "", int8),
    "global scale of 4-over-6": (CODES, "256.0 if FOUR_OVER_SIX else 448.0", "256.0", nvfp4),
    "global scale not of 4-over-6": (CODES, "256.0 if FOUR_OVER_SIX else 448.0", "448.0", four_over_six),
    "4-over-6: errors in other units": (CODES, "ratio[:, :, None], ROWS", "1.0, ROWS", four_over_six),
    "4-over-6: codes of the other scale": (CODES, "wide, scaled)", "scaled, scaled)", four_over_six),
    "4-over-6: ties go to 4": (CODES, "GROUP) < least", "GROUP) <= least", check_tie_of_four_and_six),
    "global scale ignored": (
        CODES,
        "step = decode_e4m3(block_scale) * g[:, None]",
        "step = decode_e4m3(block_scale)",
        nvfp4,
    ),
    "a step of 0": (CODES, "tl.where(step == 0, 2.0**-149, step)", "step", check_tiny_global_scales),
    "ceil limit": (CODES, "0x600000", "0x7FFFFF", mxfp8),
    "least squares: ties go up": (CODES, "error < least, floor + 1", "error <= least, floor + 1", mxfp4),
    "least squares: not squared": (CODES, "error = error * error", "error = tl.abs(error)", mxfp4),
    "quotient: not corrected": (CODES, "tl.fma(tl.fma(first, step, negative), inverse, first)", "first", int8),
    "quotient: sign of zero": (CODES, "if OVERFLOWS else second", "if OVERFLOWS else second + 0.0", fp8),
    "quotient: infinity": (CODES, "first, second) if", "second, second) if", given),
    "quotient: subnormal steps": (CODES, "step < 2.0**-90, 2.0**60", "step < 0.0, 2.0**60", small),
    "a part: not corrected": (
        CODES,
        "tl.fma(tl.fma(first, WHOLE, v * -1.0), -1.0 / WHOLE, first)",
        "first",
        every_amax,
    ),
    "no subnormal codes": (CODES, "(128 - BIAS) << 23", "(100 - BIAS) << 23", on("sm_80", every_number)),
    "no saturation": (CODES, "tl.minimum(tl.abs(v), LARGEST)", "tl.abs(v)", on("sm_80", every_number)),
    "sign of NaN kept": (CODES, "tl.where(v == v, float_code(v, 3", "tl.where(True, float_code(v, 3", on("sm_80", nan)),
    "NaN in a block": (
        CODES,
        "tl.where((step == step)[:, :, None], encode_pairs(low, high), 0)",
        "encode_pairs(low, high)",
        partial(nan, format="nvfp4"),
    ),
    "sign of zero dropped": (CODES, "(sign & SIGN)", "tl.where(v < 0, SIGN, 0)", nvfp4),
    "infinity is a number": (CODES, "amax >= 0x7F800000, float", "amax > 0x7F800000, float", int8),
    "swizzle: lines": (CODES, "((row & 31) << 4) + ((row >> 5 & 3) << 2)", "((row & 127) << 2)", swizzled),
    "swizzle: padding unwritten": (CODES, "mask=padded", "mask=mask", swizzled),
    "32-bit offsets": (
        QUANTIZE,
        "    g = tl.full(",
        "    rows = rows.to(tl.int32)\n    g = tl.full(",
        check_distant_rows,
    ),
    "mean added": (CODES, "values - tl.load(mean", "values + tl.load(mean", with_steps),
    "one smoothing factor": (CODES, "smooth + columns", "smooth + columns * 0", with_steps),
    "hadamard: not normalised": (CODES, "2.0 ** (-0.5 * HADAMARD)", "1.0", with_steps),
    "hadamard: a sign": (CODES, "tl.join(a + b, a - b)", "tl.join(a + b, b - a)", with_steps),
    "regular hadamard: a sign": (CODES, "c + d + (a - b)", "c + d + (b - a)", with_regular),
    "regular hadamard: not normalised": (CODES, "2.0 ** (-0.5 * LEVELS)", "1.0", with_regular),
    "regular hadamard: order of the sums": (CODES, "a + b + (c - d)", "a + (b + (c - d))", with_regular),
    "regular hadamard: columns of a block": (CODES, "(0, 1, 4, 3, 2)", "(0, 1, 4, 2, 3)", with_regular),
    "regular hadamard: Sylvester's": (
        QUANTIZE,
        "levels_of(hadamard, how.regular)",
        "levels_of(hadamard, 0)",
        with_regular,
    ),
    "hadamard: order of the sums": (
        CODES,
        "COLUMNS >> (level + 1), 2, 1 << level)",
        "COLUMNS >> (HADAMARD - level), 2, 1 << (HADAMARD - 1 - level))",
        check_order_of_sums,
    ),
    "tensor: rows that are not there": (QUANTIZE, "tl.where(rows < M, bits, 0)", "bits", check_rows_that_are_not_there),
    "tensor: amax of the last rows": (QUANTIZE, "tl.atomic_max(amax,", "tl.store(amax,", tensor_scale),
    "beside: in the rows of x": (QUANTIZE, "rows[:, None] * stride_beside", "rows[:, None] * stride_x", beside),
    "beside: one column more": (QUANTIZE, "first = (columns < D)", "first = (columns <= D)", beside),
    "beside: columns of x that are under it": (QUANTIZE, "stride_x + (columns - D)", "stride_x + columns", beside),
    "beside: halves as if it were x": (QUANTIZE, "(columns - D)[None, :], K - D", "(columns - D)[None, :], K", beside),
    "beside: activated": (
        QUANTIZE,
        "tl.where(first, left,",
        "tl.where(first, silu(left),",
        beside,
    ),
    "low rank: one tile": (QUANTIZE, "weights.T, product)", "weights.T)", low_rank),
    "low rank: columns of the first tile": (
        QUANTIZE,
        "if down is not None:\n            product = add_down(product, inputs, down, tile",
        "if down is not None:\n            product = add_down(product, inputs, down, 0",
        low_rank,
    ),
    "low rank: no mask": (QUANTIZE, "(ranks < R)[None, :]", "(ranks < R + 1)[None, :]", low_rank),
    "decode: nibbles swapped": (
        DEQUANTIZE,
        "tl.join(code & 0xF, code >> 4)",
        "tl.join(code >> 4, code & 0xF)",
        codes_of["nvfp4"],
    ),
    "decode: no NaN in e4m3": (DEQUANTIZE, "(byte & 0x7F) == 0x7F", "byte == 256", on("sm_80", codes_of["mxfp8"])),
    "decode: -0 is 0": (DEQUANTIZE, "bitcast=True) * 2.0**126", "bitcast=True) * 2.0**126 + 0.0", codes_of["nvfp4"]),
    "decode: E8M0 zero": (DEQUANTIZE, "byte == 0, 1 << 22", "byte == 0, 0", codes_of["mxfp4"]),
    "decode: int4 without sign": (DEQUANTIZE, "(code ^ 8) - 8", "code", codes_of["int4"]),
    "decode: one global scale": (DEQUANTIZE, "rows * w.stride_global", "rows * 0", codes_of["nvfp4"]),
    "decode: one scale": (DEQUANTIZE, "rows * stride_scale", "rows * 0", codes_of["int8"]),
}


@pytest.mark.often(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_turns_its_check_red(fault: str, tmp_path: Path) -> None:
    file, old, new, check = FAULTS[fault]
    faulty = with_fault(file, old, new, tmp_path)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)


def with_fault(file: str, old: str, new: str, folder: Path) -> ModuleType:
    """A kernel file as a module of its own, with one text replaced; of codes.py, the quantizers on top of it."""
    kernels = Path(quantize_activation.__file__).parents[1]
    shared, op = kernels / file, kernels / Path(file).stem / "kernel.py"
    text = (shared if shared.is_file() else op).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} does not hold {old!r} once"
    faulty = load_module(f"faulty_{Path(file).stem}", text.replace(old, new), folder)
    if file != CODES:
        return faulty
    above = Path(quantize_activation.__file__).read_text(encoding="utf-8")
    return load_module(
        "above_faulty_codes", above.replace("from fluxq.kernels.codes", f"from {faulty.__name__}"), folder
    )
