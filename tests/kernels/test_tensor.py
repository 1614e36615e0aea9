"""Properties of QuantizedTensor that hold for every row of FORMATS; being in the table is being tested."""

import dataclasses
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fluxq.kernels import encode, tensor
from fluxq.kernels.tensor import QuantizedTensor, quantize_blocks, stored_shapes
from fluxq.recipes.formats import ELEMENTS, FORMATS, Format, find_format

ALL_FORMATS = [*FORMATS.values(), find_format("int4_g128")]
EVERY_FORMAT = pytest.mark.parametrize("row", ALL_FORMATS, ids=lambda row: row.name)
# How far a stored scale may lie from what its rule asks for, relatively. E4M3: while it is a normal number.
SCALE_ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-8, "e4m3": 2.0**-4, "e8m0": 0.0}
FP32_SLACK = 2.0**-22  # of a value: one rounding of the quotient, one of the decoded product
SEEDS = st.integers(0, 2**32 - 1)


def quickly(test):
    return settings(max_examples=40, deadline=None, derandomize=True)(test)


def matrix(row: Format, seed: int) -> Tensor:
    """(N, K) fp32 of many kinds: wide or narrow, on a coarse grid with ties or not, with zeros or not."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*options: float) -> float:
        return options[int(torch.randint(len(options), (), generator=generator))]

    n, k = int(pick(1, 2, 5)), int(pick(1, 2, 3)) * (row.group_size or 32)
    w = torch.randn(n, k, generator=generator) * 2.0 ** pick(-20, -3, 0, 9, 20)
    w *= torch.rand(n, k, generator=generator) ** pick(0, 1, 4)  # heavier and heavier tails
    if pick(0, 1):
        step = w.abs().max() / pick(3, 8, 12, 100)
        w = (w / step).round() * step
    w[torch.rand(n, k, generator=generator) < pick(0, 0.2)] = 0.0
    return w


def decoded_scales(q: QuantizedTensor) -> Tensor:
    """The multiplier of every element (N, K), in float64."""
    n, k = q.shape
    scale = encode.decode_scale(q.scale, q.format, q.global_scale).double()
    if q.format.spans_rows:
        scale = scale.repeat_interleave(q.format.block[0], dim=0)[:n]
    if q.format.block[0] == 0:
        return scale.expand(n, k)
    return scale.reshape(n, -1).repeat_interleave(q.format.group_size or k, dim=1)


def block_amax(w: Tensor, row: Format) -> Tensor:
    """The largest magnitude of every element's block (N, K), in float64."""
    n, k = w.shape
    if row.block[0] == 0:
        return w.double().abs().max().expand(n, k)
    group = row.group_size or k
    most = w.double().reshape(n, -1, group).abs().amax(-1)
    if row.spans_rows:  # of which no matrix here has two above one another
        most = most.amax(0, keepdim=True).expand_as(most)
    return most.repeat_interleave(group, dim=1)


def grid(row: Format) -> Tensor:
    """All finite values of a format's codes in float64, rising."""
    element = row.element
    if element.name in ("int4", "int8"):
        return torch.arange(-element.max if element.low is None else element.low, element.max + 1).double()
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    codes = codes.view(getattr(torch, element.storage))
    values = encode.decode(codes, element).double()
    return values[values.isfinite()].unique()


def scale_is_exact_enough(q: QuantizedTensor) -> Tensor:
    """(N, K): not in a block whose E4M3 scale is subnormal, so rounded by more than 1/16 or held at 2^-9."""
    if q.format.scale != "e4m3":
        return torch.ones(q.shape, dtype=torch.bool)
    return (q.scale.float() >= 2.0**-6).repeat_interleave(q.format.group_size, dim=1)


def hard_rows(row: Format) -> Tensor:
    """Rows of all sizes, with zeros of both signs, NaN, infinity and numbers too small for any scale."""
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(20, 6 * (row.group_size or 32), generator=noise)
    x[2:8] *= torch.exp2(torch.randint(-140, 120, (6, x.shape[1]), generator=noise).float())
    x[8], x[9], x[10, ::2], x[11, 3], x[12, 5], x[13] = 0.0, -0.0, -1e-20, math.nan, -math.inf, x[13] * 1e-44
    return x


def bits(x: Tensor) -> Tensor:
    """Equal for equal numbers, zeros of one sign, and NaN."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


@EVERY_FORMAT
@pytest.mark.parametrize("given", ["no scale", "one scale", "a scale for each row"])
def test_blocks_rounded_without_codes_are_what_their_codes_decode_to(row, given, monkeypatch):
    monkeypatch.setattr(tensor.row_chunks, "__defaults__", (7 * 96, 1))  # a few rows at a time
    x = hard_rows(row)
    scale = {"no scale": None, "one scale": torch.tensor(0.3), "a scale for each row": torch.rand(20, 1) + 0.1}[given]
    by_row = row.group_size == 0 and (given == "one scale") == (row.block[0] == 0)
    if scale is not None and not (row.two_level or by_row):
        pytest.skip("it takes no such scale")
    for four_over_six in (False, True)[: 1 + row.two_level]:
        how = (scale if row.two_level else None), "x", None if row.two_level else scale, four_over_six
        codes = quantize_blocks(x, row, *how)
        assert torch.equal(bits(tensor.round_blocks(x, row, *how)), bits(codes.dequantize()))


@EVERY_FORMAT
def test_steps_are_done_to_rows_before_they_are_rounded(row, monkeypatch):
    monkeypatch.setattr(tensor.row_chunks, "__defaults__", (7 * 96, 1))
    x, scale = hard_rows(row).bfloat16(), torch.tensor(0.3) if row.two_level or row.block[0] == 0 else None
    how = (scale if row.two_level else None), "x", None if row.two_level else scale, False

    def steps(rows: Tensor) -> None:
        rows -= 0.25
        rows *= 3.0

    kept = x.clone()
    expected = tensor.round_blocks((x.float() - 0.25) * 3.0, row, *how)
    assert torch.equal(bits(tensor.round_blocks(x, row, *how, steps)), bits(expected))
    assert torch.equal(bits(quantize_blocks(x, row, *how, steps).dequantize()), bits(expected))
    assert torch.equal(bits(x.float()), bits(kept.float()))


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_is_decoded_as_its_formula_says_however_many_rows_at_a_time(row, dtype, monkeypatch):
    q = quantize_blocks(hard_rows(row), row, None, "x")
    codes = encode.decode(encode.unpack(q.codes, row.element), row.element)
    scale = encode.decode_scale(q.scale, row, q.global_scale)
    scale = (scale.expand(20, -1) if row.spans_rows else scale).reshape(-1, 1)
    by_block = codes.reshape(len(scale), -1) * scale
    expected = by_block.reshape(20, -1).to(dtype)
    for elements in (7 * 96, 1 << 18):
        monkeypatch.setattr(tensor.row_chunks, "__defaults__", (elements, 1))
        out = torch.full(q.shape, math.nan, dtype=dtype)
        for found in (q.dequantize(dtype), q.dequantize(out=out)):
            assert found.dtype == dtype and torch.equal(bits(found.float()), bits(expected.float()))
    assert torch.equal(bits(q.operand()), bits(by_block.reshape(20, -1)))


@pytest.mark.often(2)
@EVERY_FORMAT
@given(seed=SEEDS)
@quickly
def test_every_value_takes_the_nearest_code_under_its_scale(row, seed):
    w = matrix(row, seed)
    q = QuantizedTensor.quantize(w, row)
    x, scales = w.double().unsqueeze(-1), decoded_scales(q).unsqueeze(-1)  # (N, K, 1)
    nearest = (grid(row) * scales - x).abs().amin(-1)
    error = (q.dequantize().double() - w.double()).abs()
    assert (error <= nearest + FP32_SLACK * w.double().abs()).all()


@pytest.mark.often(2)
@EVERY_FORMAT
@given(seed=SEEDS)
@quickly
def test_the_error_is_at_most_half_the_widest_step(row, seed):
    w = matrix(row, seed)
    q = QuantizedTensor.quantize(w, row)
    half_step = grid(row).diff().max().item() / 2
    exact = scale_is_exact_enough(q)
    error = (q.dequantize().double() - w.double()).abs()
    if row.rule == "least_squares":  # may saturate on purpose: the block's sum of squares is what it bounds
        without = dataclasses.replace(row, rule="ceil")
        other = (QuantizedTensor.quantize(w, without).dequantize().double() - w.double()).square()
        squared = error.square().reshape(q.scale.numel(), -1).sum(-1)
        assert (squared <= other.reshape(q.scale.numel(), -1).sum(-1) * (1 + 2.0**-20)).all()
        return
    assert (error <= half_step * decoded_scales(q) + FP32_SLACK * w.double().abs())[exact].all()
    if row.rule == "amax":  # and the step itself is no wider than the rule says
        widest = half_step * block_amax(w, row) / row.element.max * (1 + SCALE_ROUNDING[row.scale])
        assert (error <= widest * (1 + FP32_SLACK) + FP32_SLACK * w.double().abs())[exact].all()
    if row.rule == "ceil":  # a power of two less than twice amax / element max
        assert (error <= half_step * 2 * block_amax(w, row) / row.element.max)[exact].all()


@pytest.mark.often(2)
@EVERY_FORMAT
@given(seed=SEEDS)
@quickly
def test_quantizing_what_was_decoded_changes_nothing(row, seed):
    """Bytes where scales are a quotient (fp8, int8, int4), values where exponents may trade with codes (MX).

    nvfp4 needs the same global scale (6 · 448 · g is rounded, so g would not come back), and its blocks a scale
    that is a normal E4M3 number: a subnormal one is up to half off, and the block's amax then asks for another.
    """
    w = matrix(row, seed)
    q = QuantizedTensor.quantize(w, row)
    once = q.dequantize()
    again = QuantizedTensor.quantize(once, row, global_scale=q.global_scale)
    if row.scale in ("fp32", "bf16"):
        assert torch.equal(again.codes.view(torch.uint8), q.codes.view(torch.uint8))
        assert torch.equal(again.scale, q.scale)
    exact = scale_is_exact_enough(q)
    assert torch.equal(again.dequantize()[exact], once[exact])


@pytest.mark.parametrize("largest", [448.0, 127.0])
def test_an_amax_scale_survives_rounding_for_every_mantissa(largest):
    """Check that fl(fl(s · n) / n) is s for every s = fl(amax / n), so that the bytes of fp8 and int8 come back."""
    amax = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)  # all of [1, 2)
    scale = amax / largest
    assert torch.equal(scale * largest / largest, scale)


def test_what_is_not_idempotent_in_nvfp4_is_so_for_the_stated_reasons():
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16] = 2688.0, 9 * 2.0**-9  # second block: scale 1.5 · 2^-9 goes to 2 · 2^-9, code 4.5 to 4
    q = QuantizedTensor.quantize(w, "nvfp4")
    again = QuantizedTensor.quantize(q.dequantize(), "nvfp4", global_scale=q.global_scale)
    assert (q.scale[0, 1].item(), again.scale[0, 1].item()) == (2 * 2.0**-9, 2.0**-9)
    assert (q.dequantize()[0, 16].item(), again.dequantize()[0, 16].item()) == (8 * 2.0**-9, 6 * 2.0**-9)
    amax = torch.linspace(1, 2, 1000)
    global_scale = encode.global_scale_for(amax, FORMATS["nvfp4"])
    back = encode.global_scale_for(6 * (448 * global_scale), FORMATS["nvfp4"])
    assert 0 < (back != global_scale).sum() < 1000


@pytest.mark.often(2)
@EVERY_FORMAT
@given(seed=SEEDS, power=st.integers(-20, 20))
@quickly
def test_a_power_of_two_passes_through(row, seed, power):
    w = matrix(row, seed)
    q, scaled = QuantizedTensor.quantize(w, row), QuantizedTensor.quantize(w * 2.0**power, row)
    assert torch.equal(scaled.codes.view(torch.uint8), q.codes.view(torch.uint8))
    assert torch.equal(scaled.dequantize(), q.dequantize() * 2.0**power)


@pytest.mark.often(2)
@EVERY_FORMAT
@given(seed=SEEDS)
@quickly
def test_the_sign_passes_through(row, seed):
    w = matrix(row, seed)
    assert torch.equal(QuantizedTensor.quantize(-w, row).dequantize(), -QuantizedTensor.quantize(w, row).dequantize())


@EVERY_FORMAT
@given(seed=SEEDS)
@quickly
def test_order_is_kept_within_a_block(row, seed):
    w = matrix(row, seed)
    decoded = QuantizedTensor.quantize(w, row).dequantize()
    size = w.numel() if row.block[0] == 0 else row.group_size or w.shape[1]
    order = w.reshape(-1, size).argsort(dim=-1)
    assert (decoded.reshape(-1, size).gather(1, order).diff(dim=-1) >= 0).all()


@EVERY_FORMAT
def test_blocks_do_not_touch_each_other(row):
    w = torch.randn(4, 2 * (row.group_size or 32), generator=torch.Generator().manual_seed(0))
    shared = torch.tensor(0.001) if row.two_level else None
    before = QuantizedTensor.quantize(w, row, global_scale=shared).dequantize()
    w[2, -1] *= 50
    changed = QuantizedTensor.quantize(w, row, global_scale=shared).dequantize() != before
    if row.block[0] == 0:
        assert changed[[0, 1, 3]].any()
        return
    start = w.shape[1] - row.group_size if row.group_size else 0
    assert changed[2, start:].any()
    changed[slice(None) if row.spans_rows else 2, start:] = False
    assert not changed.any()


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_input_is_kept_and_its_dtype_changes_nothing(row, dtype):
    w = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    kept = w.clone()
    q = QuantizedTensor.quantize(w, row)
    assert torch.equal(w, kept)
    assert torch.equal(q.dequantize(), QuantizedTensor.quantize(w.float(), row).dequantize())
    assert torch.equal(q.dequantize(torch.bfloat16), q.dequantize().to(torch.bfloat16))


@EVERY_FORMAT
def test_a_view_quantizes_like_its_copy(row):
    w = torch.randn(128, 6, generator=torch.Generator().manual_seed(2)).t()[1:]  # (5, 128), not contiguous
    assert torch.equal(
        QuantizedTensor.quantize(w, row).dequantize(), QuantizedTensor.quantize(w.clone(), row).dequantize()
    )


@EVERY_FORMAT
@pytest.mark.parametrize(("n", "k"), [(1, 128), (7, 256), (160, 384)])
def test_stored_tensors_have_the_promised_shapes_dtypes_and_bits(row, n, k):
    q = QuantizedTensor.quantize(torch.randn(n, k), row)
    assert {name: (tuple(t.shape), t.dtype) for name, t in q.tensors().items()} == stored_shapes(row, n, k)
    stored_bytes = sum(t.numel() * t.element_size() for t in q.tensors().values())
    assert 8 * stored_bytes == row.stored_bits(n, k)
    assert q.bits_per_weight == 8 * stored_bytes / (n * k)
    assert q.scale.numel() == math.prod(row.scale_shape(n, k))
    assert (q.shape, q.format, q.dequantize().shape) == ((n, k), row, (n, k))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8", 8.125),
        ("fp8_tensor", 8 + 2**-9),
        ("fp8_e5m2", 8.125),
        ("fp8_1x128", 8.25),
        ("fp8_128x128", 8 + 32 / (64 * 128)),
        ("mxfp8", 8.25),
        ("mxfp4", 4.25),
        ("int8", 8.125),
        ("int4", 4.25),
    ],
)
def test_bits_per_weight_of_64_by_256(name, bits):
    assert QuantizedTensor.quantize(torch.randn(64, 256), name).bits_per_weight == bits


def test_nvfp4_takes_four_and_a_half_bits_and_one_global_scale():
    assert QuantizedTensor.quantize(torch.randn(64, 256), "nvfp4").bits_per_weight == 4.5 + 32 / (64 * 256)


def test_int4_groups_of_128_are_another_format_with_half_the_scales():
    w = torch.randn(4, 256)
    q = QuantizedTensor.quantize(w, "int4", group_size=128)
    assert (q.format.name, q.scale.shape, q.bits_per_weight) == ("int4_g128", (4, 2), 4.125)
    assert q.format == find_format("int4_g128") and find_format("int4_g64") is FORMATS["int4"]
    assert torch.equal(q.dequantize(), QuantizedTensor.quantize(w, "int4_g128").dequantize())
    step = (w.reshape(4, 2, 128).abs().amax(-1) / 7).bfloat16()
    assert torch.equal(q.scale, step)


@pytest.mark.parametrize(("name", "group"), [("int4", 32), ("nvfp4", 32), ("fp8", 64), ("int4_g128", 64)])
def test_other_group_sizes_are_refused_by_name(name, group):
    with pytest.raises(ValueError, match=rf"group_size {group} is not offered for {name}: it is"):
        QuantizedTensor.quantize(torch.randn(4, 256), name, group_size=group)


@pytest.mark.parametrize("row", [row for row in ALL_FORMATS if row.unit > 2], ids=lambda row: row.name)
def test_a_k_that_does_not_divide_names_the_layer_and_the_cure(row):
    k = row.group_size + row.group_size // 2
    with pytest.raises(ValueError, match=rf"blocks.0.ff: shape \(4, {k}\) .* multiples of {row.group_size}.*exclude"):
        QuantizedTensor.quantize(torch.randn(4, k), row, name="blocks.0.ff")


@EVERY_FORMAT
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_with_the_layer_and_the_cure(row, bad):
    w = torch.randn(2, 128)
    w[1, 5] = bad
    with pytest.raises(ValueError, match=r"blocks\.0\.ff: holds NaN or infinity; .*exclude this layer"):
        QuantizedTensor.quantize(w, row, name="blocks.0.ff")
    if row.two_level:  # of other weights, which are finite
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            QuantizedTensor.quantize(w, row, global_scale=torch.tensor(1.0))


@pytest.mark.parametrize(
    "w",
    [torch.randn(128), torch.randn(2, 2, 128), torch.ones(2, 128, dtype=torch.int8)],
    ids=["1d", "3d", "int8"],
)
def test_what_is_not_a_float_matrix_is_refused(w):
    with pytest.raises(ValueError, match=r"blocks\.0\.ff: expected a floating-point matrix \(N, K\), got torch"):
        QuantizedTensor.quantize(w, "fp8", name="blocks.0.ff")


@EVERY_FORMAT
@pytest.mark.parametrize("shape", [(0, 128), (2, 0)])
def test_empty_matrices_are_refused(row, shape):
    with pytest.raises(ValueError, match=r"layer: shape"):
        QuantizedTensor.quantize(torch.empty(shape), row, name="layer")


def test_a_global_scale_per_row_stands_for_that_row():
    w = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    scales = encode.global_scale_for(w.abs().amax(1, keepdim=True), FORMATS["nvfp4"])
    together = QuantizedTensor.quantize(w, "nvfp4", global_scale=scales).dequantize()
    alone = torch.cat([QuantizedTensor.quantize(row.unsqueeze(0), "nvfp4").dequantize() for row in w])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor(0.0),
        torch.tensor(-1.0),
        torch.tensor(math.inf),
        torch.ones(4),
        torch.ones((), dtype=torch.bfloat16),
    ],
)
def test_a_global_scale_that_cannot_be_is_refused(scale):
    with pytest.raises(ValueError, match=r"layer: global_scale must be positive, finite float32, \(\) or \(2, 1\)"):
        QuantizedTensor.quantize(torch.randn(2, 64), "nvfp4", global_scale=scale, name="layer")


def test_a_global_scale_for_a_one_level_format_is_refused():
    with pytest.raises(ValueError, match="layer: fp8 has no global scale"):
        QuantizedTensor.quantize(torch.randn(2, 64), "fp8", global_scale=torch.ones(()), name="layer")


@EVERY_FORMAT
def test_rows_rounded_a_few_at_a_time_are_the_same(row, monkeypatch):
    w = torch.randn(37, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    w[20, 100] = 30.0  # what rows share is not known from the first of them
    options: list[dict] = [{}]
    if row.two_level:
        each = w.float().abs().amax(1, keepdim=True) / 1000
        options += [{"global_scale": each}, {"global_scale": each.amax()}, {"four_over_six": True}]
    elif row.group_size == 0:
        options += [{"row_scale": torch.rand(37, 1) + 0.1 if row.block[0] else torch.tensor(0.2)}]

    def rounded(values: dict) -> QuantizedTensor:
        return quantize_blocks(w, row, **({"global_scale": None, "name": "w"} | values))

    whole = [rounded(values) for values in options]
    monkeypatch.setattr(tensor, "_CACHED", 1024)
    monkeypatch.setattr(tensor.torch, "get_num_threads", lambda: 1)
    for values, q in zip(options, whole, strict=True):
        again = rounded(values)
        for name, stored in q.tensors().items():
            assert torch.equal(stored.view(-1).view(torch.uint8), again.tensors()[name].view(-1).view(torch.uint8))


@pytest.mark.parametrize("row", [row for row in ALL_FORMATS if not row.spans_rows], ids=lambda row: row.name)
def test_a_matrix_is_put_together_from_parts_and_gives_its_rows(row):
    w = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    q = QuantizedTensor.quantize(w, row)
    built = QuantizedTensor.empty(row, 6, 256, q.global_scale, w.device)
    if row.group_size:
        for columns in (slice(0, 128), slice(128, 256)):
            built.put(QuantizedTensor.quantize(w[:2, columns], row, global_scale=q.global_scale), 0, columns.start)
    else:
        built.put(q.rows(0, 2))
    built.put(q.rows(2, 6), 2)
    assert torch.equal(built.dequantize(), q.dequantize())
    assert torch.equal(q.rows(2, 5).dequantize(), q.dequantize()[2:5])


@pytest.mark.parametrize(("n", "k"), [(300, 200), (256, 384), (129, 127), (1, 1)])
def test_blocks_of_rows_have_one_scale_and_are_cut_off_at_the_edges(n, k, monkeypatch):
    monkeypatch.setattr(tensor.row_chunks, "__defaults__", (k, 1))  # a block of rows at a time
    row, w = FORMATS["fp8_128x128"], torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    q = QuantizedTensor.quantize(w, row)
    expected, scale = torch.empty(n, k), torch.empty(-(-n // 128), -(-k // 128))
    for top, left in ((top, left) for top in range(0, n, 128) for left in range(0, k, 128)):
        block = w[top : top + 128, left : left + 128]
        step = scale[top // 128, left // 128] = block.abs().max() / 448
        expected[top : top + 128, left : left + 128] = (block / step).to(torch.float8_e4m3fn).float() * step
    assert torch.equal(q.scale, scale) and torch.equal(q.dequantize(), expected)
    assert torch.equal(q.rows(0, n, 7).dequantize(), expected[::7])
    built = QuantizedTensor.empty(row, n, k, None, w.device)
    for start in range(0, n, 128):
        built.put(QuantizedTensor.quantize(w[start : start + 128], row), start)
    assert torch.equal(built.dequantize(), expected)
    assert torch.equal(tensor.round_blocks(w, row, None, "w"), expected)


def test_an_unknown_format_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="unknown format 'nvpf4' \\(did you mean 'nvfp4'\\?\\)"):
        QuantizedTensor.quantize(torch.randn(2, 64), "nvpf4")


def test_every_element_is_used_by_a_format():
    assert {row.element.name for row in FORMATS.values()} == set(ELEMENTS)
    assert {row.scale for row in FORMATS.values()} == set(encode.SCALE_DTYPES)
