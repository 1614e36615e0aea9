"""Products of torch's library: on a CPU those that it computes there, the others by a stand-in that reads the call."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.base import settings
from fluxq.kernels import library, ops
from fluxq.kernels.library import library_product, library_refusal
from fluxq.kernels.tensor import QuantizedTensor, swizzle_scales
from fluxq.kernels.tiles import find_matmul_tile
from fluxq.recipes.formats import FORMATS

M, N, K = 40, 96, 256


def operands(format: str) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
    noise = torch.Generator().manual_seed(1)
    row, given = FORMATS[format], torch.tensor(0.003) if format == "nvfp4" else None
    x = ops.quantize_activation(torch.randn(M, K, generator=noise), row, given)
    w = QuantizedTensor.quantize(torch.randn(N, K, generator=noise) / 16, row)
    return x, w, torch.randn(N, generator=noise).bfloat16()


def expected(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor) -> Tensor:
    return F.linear(x.dequantize(), w.dequantize(), bias.float()).bfloat16()


@pytest.mark.parametrize("format", ["int8", "fp8", "fp8_tensor"])
def test_the_library_computes_what_is_stored(format: str) -> None:
    x, w, bias = operands(format)
    found = library_product(x, w, bias, torch.bfloat16)
    torch.testing.assert_close(found, expected(x, w, bias), rtol=2**-7, atol=2**-7)


def stand_in(left, right, scales_of_left, recipe_of_left, scales_of_right, recipe_of_right, **options) -> Tensor:
    """Multiply as the documentation of F.scaled_mm says of block scales in the 128x4 layout."""
    kinds = F.ScalingType
    blocks = {kinds.BlockWise1x16: 16, kinds.BlockWise1x32: 32}

    def decoded(codes, scales, recipe, swizzles):
        group = blocks[recipe[0]]
        assert swizzles == [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE][: len(recipe)]
        assert recipe[1:] == [kinds.TensorWise] * (len(scales) - 1) and scales[0].ndim == 1
        row = FORMATS["nvfp4" if group == 16 else "mxfp8"]
        assert codes.dtype == (torch.float4_e2m1fn_x2 if group == 16 else torch.float8_e4m3fn)
        assert scales[0].dtype == (torch.float8_e4m3fn if group == 16 else torch.float8_e8m0fnu)
        plain = codes.view(torch.uint8) if group == 16 else codes
        stored = scales[0] if group == 16 else scales[0].view(torch.uint8)
        outer = scales[1] if len(scales) == 2 else None
        return QuantizedTensor.stored(plain, stored, outer, row).unswizzled().dequantize()

    a = decoded(left, scales_of_left, recipe_of_left, options["swizzle_a"])
    b = decoded(right.t(), scales_of_right, recipe_of_right, options["swizzle_b"])
    return F.linear(a, b, options["bias"].float()).to(options["output_dtype"])


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_block_scales_are_passed_as_the_library_reads_them(format: str, monkeypatch) -> None:
    x, w, bias = operands(format)
    want = expected(x, w, bias)
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    swizzled = [QuantizedTensor(q.codes, swizzle_scales(q.scale), q.global_scale, q.shape, q.format) for q in (x, w)]
    assert library.library_takes(*swizzled) and not library.library_takes(x, w)
    assert torch.equal(library_product(*swizzled, bias, torch.bfloat16), want)


def test_scales_of_128_columns_are_passed_beside_each_row_of_the_weight_as_often(monkeypatch) -> None:
    """As torch's call checks it: (rows, K / 128) in fp32, rows adjacent; without a choice of sums."""
    x, w, bias = operands("fp8")
    for m in (M, 1):
        x = ops.quantize_activation(x.dequantize()[:m], FORMATS["fp8_1x128"])

        def reads(left, right, scales_of_left, recipe_of_left, scales_of_right, recipe_of_right, **options) -> Tensor:
            assert recipe_of_left == recipe_of_right == [F.ScalingType.BlockWise1x128]
            matrices = []
            for codes, (scale,) in ((left, scales_of_left), (right.t(), scales_of_right)):
                rows, k = codes.shape
                assert (scale.shape, scale.stride(), scale.dtype) == ((rows, k // 128), (1, rows), torch.float32)
                matrices.append((codes.float().view(rows, -1, 128) * scale[:, :, None]).view(rows, k))
            assert options.keys() == {"bias", "output_dtype"}
            return F.linear(*matrices, options["bias"].float()).to(options["output_dtype"])

        monkeypatch.setattr(F, "scaled_mm", reads)
        assert library.library_takes(x, w) and not library.library_takes(x, x)
        assert torch.equal(library_product(x, w, bias, torch.bfloat16), expected(x, w, bias))
    name = library.IN_128S
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert not library_refusal(name, "", "sm_90", M, N, K, torch.bfloat16)
    assert "no fp8-fp8_1x128 product for sm_100" in library_refusal(name, "", "sm_100", M, N, K, torch.bfloat16)
    assert "not for torch.float16" in library_refusal(name, "", "sm_90", M, N, K, torch.float16)
    assert "multiples of 4 tokens, not 1" in library_refusal(name, "", "sm_90", 1, N, K, torch.bfloat16)


@pytest.mark.parametrize(("configured", "fast"), [(None, True), ("exact", False), ("fast", True)])
def test_accumulation_is_a_setting_of_the_process(configured: str | None, fast: bool, monkeypatch) -> None:
    x, w, bias = operands("fp8")
    monkeypatch.setattr(settings, "_set", {})
    calls = []
    monkeypatch.setattr(F, "scaled_mm", lambda *given, **options: calls.append(options["use_fast_accum"]))
    settings.configure(accumulate=configured)
    library_product(x, w, bias, torch.bfloat16)
    assert calls == [fast]


@pytest.mark.parametrize(("accumulate", "columns"), [("fast", 0), ("exact", 512)])
def test_sums_of_our_own_kernels_follow_the_setting(accumulate: str, columns: int, monkeypatch) -> None:
    monkeypatch.setattr(settings, "_set", {"accumulate": accumulate})
    codes = torch.zeros(128, 256, dtype=torch.float8_e4m3fn)
    assert find_matmul_tile("scaled_matmul", "fp8", "sm_90", 4096, codes).acc_split == columns
    assert find_matmul_tile("attention", "128", "sm_90", 4096).acc_split, "attention has a bound of its own"


def test_another_accumulation_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(settings, "_set", {})
    with pytest.raises(ValueError, match="accumulate is 'quick', expected one of fast, exact"):
        settings.configure(strict=True, accumulate="quick")
    assert not settings.is_strict()
    monkeypatch.setenv("FLUXQ_ACCUMULATE", "quick")
    with pytest.raises(ValueError, match="FLUXQ_ACCUMULATE is 'quick'"):
        settings.accumulation()
    monkeypatch.setenv("FLUXQ_ACCUMULATE", "exact")
    assert settings.accumulation() == "exact"
    settings.configure(accumulate="fast")
    assert settings.accumulation() == "fast"


@pytest.mark.parametrize(("cuda", "takes"), [("12.8", False), ("12.9", True), ("13.0", True), (None, True)])
def test_scales_of_128_columns_need_a_torch_built_on_cuda_12_9(cuda: str | None, takes: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    why = library_refusal(library.IN_128S, "", "sm_90", M, N, K, torch.bfloat16)
    assert takes == (not why)
    assert takes or (f"torch {torch.__version__} is built on CUDA {cuda}" in why and "install one built on 12.9" in why)
    assert not library_refusal("fp8", "", "sm_90", M, N, K, torch.bfloat16)


@pytest.mark.parametrize(
    ("format", "layout", "chip", "sizes", "dtype", "why"),
    [
        ("fp8", "", "sm_89", (64, N, K), torch.bfloat16, "no fp8 product for sm_89"),
        ("fp8", "", "sm_90", (64, N + 8, K), torch.bfloat16, "multiples of 16, they are 104 and 256"),
        ("fp8", "", "sm_90", (64, N, K), torch.float16, "not for torch.float16"),
        ("fp8_tensor", "", "sm_90", (64, N, K), torch.float16, ""),
        ("fp8_tensor", "", "sm_90", (64, N, K), torch.float32, "not for torch.float32"),
        ("int8", "", "gfx942", (64, N, K), torch.bfloat16, "no int8 product for gfx942"),
        ("int8", "", "sm_75", (16, N, K), torch.bfloat16, "more than 16 tokens"),
        ("mxfp8", "", "sm_100", (64, N, K), torch.bfloat16, "128x4 layout"),
        ("mxfp8", "swizzled", "sm_100", (64, N, K), torch.bfloat16, ""),
        ("nvfp4", "swizzled", "sm_120", (64, N, K), torch.bfloat16, "no nvfp4 product for sm_120"),
    ],
)
def test_what_the_library_lacks_is_said(format, layout, chip, sizes, dtype, why) -> None:
    found = library_refusal(format, layout, chip, *sizes, dtype)
    assert why in found and bool(why) == bool(found)
