"""The kernels that quantize and dequantize against the torch reference, byte for byte, on Triton's interpreter.

Each check takes the kernel file as an argument: the tests hand it the real one, the last test one with a fault.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels import dequantize, quantize_activation
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.tiles import Tile
from fluxq.quantize import encode, ops
from fluxq.quantize.tensor import QuantizedTensor, stored_shapes
from fluxq.recipes.formats import FORMATS, find_format

SUPPORTED = quantize_activation.SUPPORTED
TILE = Tile(rows=16, columns=256, warps=4)
POISON = 0xA5
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # infinity and NaN are among x
COLUMNS = {"int8": 331, "fp8": 331, "mxfp8": 352, "mxfp4": 352, "nvfp4": 336}  # never a multiple of the tile's


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def guarded(*shape: int, dtype: torch.dtype) -> Tensor:
    """A poisoned tensor between 64 poisoned bytes on either side."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.full((size + 128,), POISON, dtype=torch.uint8)[64 : size + 64].view(dtype).reshape(shape)


def assert_guards_untouched(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            assert (whole[:64] == POISON).all() and (whole[-64:] == POISON).all()


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


def buffers(format: str, m: int, k: int, global_scale: Tensor | None = None, padded: int = 0) -> QuantizedTensor:
    """Poisoned tensors that a kernel is to fill; padded: elements of a swizzled scale."""
    row = FORMATS[format]
    (codes, codes_dtype), (scale, scale_dtype) = list(stored_shapes(row, m, k).values())[:2]
    if row.two_level and global_scale is None:
        global_scale = guarded(m, 1, dtype=torch.float32)
    scale = guarded(*((padded,) if padded else scale), dtype=scale_dtype)
    return QuantizedTensor(guarded(*codes, dtype=codes_dtype), scale, global_scale, (m, k), row)


def assert_same_bytes(found: QuantizedTensor, reference: QuantizedTensor, x: Tensor) -> None:
    """Equal codes and scales; where x is NaN, codes may differ (the reference keeps NaN's sign) but decode alike."""
    for name, tensor in reference.tensors().items():
        ours, theirs = found.tensors()[name].float(), tensor.float()
        any_code = x.isnan().reshape(*ours.shape, -1).any(-1) if name == "weight" else torch.tensor(False)
        assert_equal_values(ours.where(~any_code, 0), theirs.where(~any_code, 0))
    assert torch.equal(found.dequantize().isnan(), reference.dequantize().isnan())


# Checks of quantize_activation.py


def check_quantize(kernels: ModuleType, format: str, m: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x = awkward(m, COLUMNS[format], dtype)
    out = buffers(format, m, COLUMNS[format])
    kernels.quantize_into(out, x, tile=TILE)
    assert_same_bytes(out, ops.quantize_activation(x, FORMATS[format]), x)
    assert_guards_untouched(*out.tensors().values())


def check_given_scale(kernels: ModuleType, format: str, per_token: bool) -> None:
    x = awkward(33, COLUMNS[format])
    scale = torch.linspace(0.01, 3, 33)[:, None] if per_token else torch.tensor(0.037)
    q = kernels.quantize_activation(x, FORMATS[format], scale, tile=TILE)
    assert_same_bytes(q, ops.quantize_activation(x, FORMATS[format], scale), x)


def check_every_bf16_number(kernels: ModuleType, format: str) -> None:
    """And the fp32 numbers right beside each: near-ties must not be rounded twice."""
    bits = torch.arange(2**16, dtype=torch.int32) << 16
    numbers = torch.cat([bits, bits + 1, bits - 1]).view(torch.float32)
    x = numbers[numbers.isfinite() & (numbers.abs() < 600)]
    x = x[: len(x) // 4096 * 4096].reshape(-1, 4096)
    q = kernels.quantize_activation(x, FORMATS[format], torch.ones(len(x), 1), tile=Tile(16, 4096, 4))
    expected = encode.encode(x.clone(), FORMATS[format].element)
    assert_equal_values(q.codes.float(), expected.float())


def check_swizzled(kernels: ModuleType, format: str, m: int) -> None:
    x = awkward(m, COLUMNS[format])
    given = torch.tensor(0.02) if FORMATS[format].two_level else None
    groups = x.shape[1] // FORMATS[format].group_size
    padded_m, padded_groups = -(-m // 128) * 128, -(-groups // 4) * 4
    out = buffers(format, m, COLUMNS[format], global_scale=given, padded=padded_m * padded_groups)
    kernels.quantize_into(out, x, scale_given=given is not None, swizzled=True, tile=TILE)
    plain = torch.full((padded_m, padded_groups), POISON, dtype=torch.uint8)  # padding keeps what was there
    scale = ops.quantize_activation(x, FORMATS[format], given).scale
    plain[:m, :groups] = scale.view(torch.uint8)
    # cuBLAS: tiles of 128 rows and 4 groups, each as 32 lines of 4 quarters (row // 32) of 4 groups
    expected = plain.reshape(-1, 4, 32, padded_groups // 4, 4).permute(0, 3, 2, 1, 4).flatten()
    assert_equal_values(out.scale.view(torch.uint8), expected)
    assert_guards_untouched(out.codes, out.scale)


def check_distant_rows(kernels: ModuleType) -> None:
    """The third row is 2^31 elements from the first, an offset that does not fit into 32 bits."""
    k = 32
    x = torch.empty(2**31 + k, dtype=torch.bfloat16).as_strided((3, k), (2**30, 1))  # only what is written is resident
    x.copy_(awkward(3, k))
    q = kernels.quantize_activation(x, FORMATS["mxfp8"], tile=Tile(4, 32, 1))
    assert_same_bytes(q, ops.quantize_activation(x.clone(), FORMATS["mxfp8"]), x)


# Checks of dequantize.py


def check_dequantize(kernels: ModuleType, format: str, dtype: torch.dtype) -> None:
    row = find_format(format)
    x = torch.randn(21, 640, generator=torch.Generator().manual_seed(5)) * torch.logspace(-4, 2, 21)[:, None]
    x[3], x[5] = 0.0, -0.0
    q = QuantizedTensor.quantize(x, row)
    out = guarded(21, 640, dtype=dtype)
    kernels.dequantize(q, dtype, tile=Tile(8, 256, 4), out=out)
    assert_equal_values(out, q.dequantize(dtype))
    assert_guards_untouched(out)


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
    wrong = ~((found == expected) & (found.signbit() == expected.signbit()) | (found.isnan() & expected.isnan()))
    assert not wrong.any(), f"{int(wrong.sum())} differ, first at {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize("m", [1, 5, 17, 130])
@pytest.mark.parametrize("format", SUPPORTED)
def test_codes_and_scales_are_the_reference_byte_for_byte(format: str, m: int) -> None:
    check_quantize(quantize_activation, format, m)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format", SUPPORTED)
def test_other_input_types_are_quantized_alike(format: str, dtype: torch.dtype) -> None:
    check_quantize(quantize_activation, format, 17, dtype)


@pytest.mark.parametrize(("format", "per_token"), [("int8", True), ("fp8", True), ("nvfp4", True), ("nvfp4", False)])
def test_a_given_scale_takes_the_place_of_the_amax(format: str, per_token: bool) -> None:
    check_given_scale(quantize_activation, format, per_token)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_every_bf16_number_and_its_neighbours_round_to_the_nearest_even_code(format: str) -> None:
    check_every_bf16_number(quantize_activation, format)


@pytest.mark.parametrize(("format", "m"), [("mxfp8", 5), ("mxfp4", 5), ("nvfp4", 5), ("nvfp4", 130)])
def test_swizzled_scales_lie_in_128x4_tiles_and_padding_is_not_written(format: str, m: int) -> None:
    check_swizzled(quantize_activation, format, m)


def test_mxfp4_chooses_the_exponent_of_the_reference_in_many_blocks() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    q = quantize_activation.quantize_activation(x, FORMATS["mxfp4"], tile=Tile(64, 512, 4))
    reference = ops.quantize_activation(x, FORMATS["mxfp4"])
    wrong = (q.scale != reference.scale).nonzero()
    # The order of the reference's sums is torch's own: candidates may change places where they tie to rounding.
    errors = [(t.dequantize().double() - x.double()).reshape(512, 16, 32).square().sum(-1) for t in (q, reference)]
    assert len(wrong) < 3
    torch.testing.assert_close(*errors, rtol=1e-6, atol=0)


def test_rows_may_be_any_distance_apart() -> None:
    check_distant_rows(quantize_activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", [*FORMATS, "int4_g128"])
def test_dequantized_matrices_are_the_references_bits(format: str, dtype: torch.dtype) -> None:
    check_dequantize(dequantize, format, dtype)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "fp8_tensor"])
def test_every_code_decodes_under_every_scale(format: str) -> None:
    check_every_code_and_scale(dequantize, format)


X = torch.ones(4, 64)
BAD_INPUT = {
    "no rows": ((X[:0], "fp8"), {}, r"x \(0, 64\) has no rows"),
    "three axes": ((X[None], "fp8"), {}, r"expected \(M, K\)"),
    "integers": ((X.int(), "fp8"), {}, "x is torch.int32"),
    "K tail": ((X[:, :40], "mxfp8"), {}, "multiples of 32"),
    "column stride": ((torch.ones(64, 32).t(), "nvfp4"), {}, r"strides \(1, 32\).*\.contiguous"),
    "a weight format": ((X, "int4"), {}, "no kernel for int4, only for int8"),
    "an mx scale": ((X, "mxfp8"), {"input_scale": torch.ones(4, 1)}, "give no input_scale"),
    "scale of another shape": ((X, "int8"), {"input_scale": torch.ones(4)}, r"input_scale is .* \(4,\), expected"),
    "scale of another type": ((X, "nvfp4"), {"input_scale": torch.tensor(1.0).half()}, "expected float32"),
    "scale elsewhere": ((X, "nvfp4"), {"input_scale": torch.ones((), device="meta")}, "on meta.*move it"),
    "a tile that splits blocks": ((X, "mxfp8"), {"tile": Tile(4, 16, 1)}, "multiple of mxfp8's 32"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_input_that_the_kernel_does_not_take_is_named(case: str) -> None:
    (x, name), options, message = BAD_INPUT[case]
    with pytest.raises(ValueError, match=message):
        quantize_activation.quantize_activation(x, FORMATS[name], **{"tile": TILE} | options)


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
    with pytest.raises(ValueError, match=r"out is torch\.float32"):
        dequantize.dequantize(q, torch.bfloat16, tile=TILE, out=torch.empty(4, 64))
    with pytest.raises(ValueError, match=r"dtype is torch\.float64"):
        dequantize.dequantize(q, torch.float64, tile=TILE)
    with pytest.raises(ValueError, match=r"scale is .* \(4, 4\), expected float8_e4m3fn \(512,\)"):
        quantize_activation.quantize_into(q, torch.ones(4, 64), scale_given=True, swizzled=True, tile=TILE)


# Faults: in `file`, the text `old` (which must occur once) becomes `new`, and the check must notice.
QUANTIZE, DEQUANTIZE = "quantize_activation.py", "dequantize.py"
every_number = partial(check_every_bf16_number, format="fp8")
nvfp4 = partial(check_quantize, format="nvfp4", m=17)
mxfp4 = partial(check_quantize, format="mxfp4", m=17)
mxfp8 = partial(check_quantize, format="mxfp8", m=17)
int8 = partial(check_quantize, format="int8", m=17)
swizzled = partial(check_swizzled, format="nvfp4", m=130)
codes_of = {name: partial(check_every_code_and_scale, format=name) for name in FORMATS}
FAULTS: dict[str, tuple[str, str, str, Callable]] = {
    "nibbles swapped": (QUANTIZE, "low | (high << 4)", "high | (low << 4)", nvfp4),
    "scales transposed": (QUANTIZE, "(K // GROUP) + groups[None, :]", "1 + groups[None, :] * M", mxfp8),
    "scales one group off": (QUANTIZE, "groups = tile * (COLUMNS // GROUP) +", "groups = 1 +", mxfp8),
    "no mask of rows": (QUANTIZE, "row_mask[:, None] & (groups <", "(rows[:, None] < M + 1) & (groups <", mxfp8),
    "no mask of columns": (QUANTIZE, "row_mask[:, None] & (pairs < K // 2)", "row_mask[:, None] & (pairs < K)", nvfp4),
    "a tile unwritten": (QUANTIZE, "range(tl.program_id(1), TILES,", "range(tl.program_id(1) + 1, TILES,", mxfp4),
    "amax of one tile": (
        QUANTIZE,
        "tl.int32)\n    for tile in range(TILES)",
        "tl.int32)\n    for tile in range(1)",
        int8,
    ),
    "amax without sign": (QUANTIZE, "bitcast=True) & 0x7FFFFFFF", "bitcast=True)", int8),
    "global scale of 4-over-6": (QUANTIZE, "6.0 * 448.0", "6.0 * 256.0", nvfp4),
    "global scale ignored": (QUANTIZE, "decode_e4m3(byte) * g[:, None]", "decode_e4m3(byte)", nvfp4),
    "ceil limit": (QUANTIZE, "0x600000", "0x7FFFFF", mxfp8),
    "least squares: ties go up": (QUANTIZE, "error < least, floor + 1", "error <= least, floor + 1", mxfp4),
    "least squares: not squared": (QUANTIZE, "error = error * error", "error = tl.abs(error)", mxfp4),
    "reciprocal": (QUANTIZE, "tl.div_rn(values, step[:, None])", "values * tl.div_rn(1.0, step[:, None])", int8),
    "no subnormal codes": (QUANTIZE, "(128 - BIAS) << 23", "(100 - BIAS) << 23", every_number),
    "no saturation": (QUANTIZE, "a = tl.minimum(a, LARGEST)", "a = a", every_number),
    "sign of zero dropped": (QUANTIZE, "v.to(tl.int32, bitcast=True) < 0, 8", "v < 0, 8", nvfp4),
    "infinity is a number": (QUANTIZE, "amax >= 0x7F800000, float", "amax > 0x7F800000, float", int8),
    "swizzle: lines": (QUANTIZE, "(row % 32) * 16 + (row % 128) // 32 * 4", "(row % 128) * 4", swizzled),
    "32-bit offsets": (QUANTIZE, "M\n    g =", "M\n    rows = rows.to(tl.int32)\n    g =", check_distant_rows),
    "decode: nibbles swapped": (
        DEQUANTIZE,
        "stored & 0xF, stored >> 4",
        "stored >> 4, stored & 0xF",
        codes_of["nvfp4"],
    ),
    "decode: no NaN in e4m3": (DEQUANTIZE, "(byte & 0x7F) == 0x7F", "byte == 256", codes_of["mxfp8"]),
    "decode: -0 is 0": (DEQUANTIZE, "bitcast=True) * 2.0**126", "bitcast=True) * 2.0**126 + 0.0", codes_of["nvfp4"]),
    "decode: E8M0 zero": (DEQUANTIZE, "byte == 0, 1 << 22", "byte == 0, 0", codes_of["mxfp4"]),
    "decode: int4 without sign": (DEQUANTIZE, "(code ^ 8) - 8", "code", codes_of["int4"]),
    "decode: one global scale": (DEQUANTIZE, "rows * stride_global", "rows * 0", codes_of["nvfp4"]),
    "decode: one scale": (DEQUANTIZE, "rows * stride_scale", "rows * 0", codes_of["int8"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_turns_its_check_red(fault: str, tmp_path: Path) -> None:
    file, old, new, check = FAULTS[fault]
    faulty = with_fault(file, old, new, tmp_path)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)


def with_fault(file: str, old: str, new: str, folder: Path) -> ModuleType:
    """A kernel file as a module of its own, with one text replaced."""
    text = (Path(quantize_activation.__file__).parent / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} does not hold {old!r} once"
    path = folder / file
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"faulty_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
