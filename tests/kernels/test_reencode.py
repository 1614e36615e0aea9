"""Re-encoding stored weights to 8-bit rows."""

import pytest
import torch

from fluxq.kernels import reencode
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.devices import KERNEL_FORMATS

SOURCES = (*KERNEL_FORMATS, "int4_g128")
COLUMNS = {"fp8": 331, "fp8_tensor": 331, "int8": 331, "int4": 320, "int4_g128": 384, "nvfp4": 336}
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # infinity and NaN are among w


def weight(format: str, n: int, *, broken: bool = False) -> QuantizedTensor:
    """(n, K) with rows of every magnitude and one of zeros; broken: also rows with a NaN scale or code."""
    noise = torch.Generator().manual_seed(n)
    k = COLUMNS.get(format, 352)
    w = torch.randn(n, k, generator=noise) * torch.logspace(-5, 3, n)[:, None]
    w[n // 2] = 0.0
    w[n // 3] *= torch.logspace(-6, 0, k)  # groups far below the row's amax
    q = QuantizedTensor.quantize(w, format)
    if broken and q.format.group_size:
        q.scale.view(torch.uint8 if q.format.scale != "bf16" else torch.int16)[n // 4, 1] = {
            "e4m3": 0x7F,
            "e8m0": 0xFF,
            "bf16": 0x7FC0,
        }[q.format.scale]
    elif broken and q.format.element.name == "e4m3":
        q.codes.view(torch.uint8)[n // 4, 5] = 0x7F
    return q


@pytest.mark.parametrize("target", reencode.TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_code_is_the_nearest_to_its_exact_product(source: str, target: str) -> None:
    w = weight(source, 17)
    q = reencode.reencode(w, target)
    assert torch.equal(q.scale, torch.where(q.scale == 1, 1.0, w.dequantize().abs().amax(1) / q.format.element.max))
    # Within half a step of the last place, and 2^-8 for rounding the multiplier.
    plain, found = w.dequantize().double(), q.dequantize().double()
    step = q.scale.double()[:, None] * (1.0 if target == "int8" else 2.0**-9)
    slack = 0.0 if target == "int8" else 2.0**-4
    assert ((found - plain).abs() <= step / 2 * 1.001 + (slack + 2.0**-7.9) * plain.abs()).all()
    assert torch.equal(q.codes[8].float(), torch.zeros(w.shape[1]))


def test_the_amax_of_a_row_becomes_the_largest_code_and_never_overflows() -> None:
    for source in ("nvfp4", "mxfp4", "int4"):
        w = QuantizedTensor.quantize(torch.randn(500, 128, generator=torch.Generator().manual_seed(2)), source)
        for target in reencode.TARGETS:
            q = reencode.reencode(w, target)
            assert (q.codes.float().abs().amax(1) == q.format.element.max).all()


def test_products_are_exact_in_fp16_too_so_that_every_chip_rounds_once() -> None:
    w = weight("nvfp4", 33)
    for target in reencode.TARGETS:
        q = reencode.reencode(w, target)
        assert w.global_scale is not None
        multiplier = w.scale.float() * w.global_scale
        m = (multiplier * (1 / q.scale)[:, None]).bfloat16()
        for code in (0.5, 1.5, 3.0, 6.0, 5.0, 7.0):
            product = (code * m.double()).float()
            normal = product.abs() >= 2.0**-14
            assert torch.equal(product.half().float()[normal], product[normal])


def test_a_broken_row_is_nan_and_nothing_else_is() -> None:
    for source in ("nvfp4", "mxfp4", "mxfp8", "int4", "fp8"):
        w = weight(source, 13, broken=True)
        for target in reencode.TARGETS:
            q = reencode.reencode(w, target)
            assert q.dequantize().isnan().all(1).nonzero().flatten().tolist() == [3]
            assert not q.dequantize()[torch.arange(13) != 3].isnan().any()


def test_a_known_row_scale_is_taken() -> None:
    w = weight("nvfp4", 9)
    scale = reencode.row_scales(w, "int8")
    assert torch.equal(reencode.reencode(w, "int8", scale).codes, reencode.reencode(w, "int8").codes)
    assert torch.equal(reencode.reencode(w, "int8", scale * 2).scale, scale * 2)
    with pytest.raises(ValueError, match=r"row_scale is torch\.float32 \(8,\), expected float32 \(9,\)"):
        reencode.reencode(w, "int8", scale[:8])
    with pytest.raises(ValueError, match="no target 'nvfp4', only int8 and fp8"):
        reencode.reencode(w, "nvfp4")


def test_the_target_that_adds_less_error_is_chosen() -> None:
    noise = torch.Generator().manual_seed(3)
    w = torch.randn(64, 256, generator=noise)
    target, errors = reencode.choose_target(QuantizedTensor.quantize(w, "nvfp4"))
    assert target == "int8" and errors["int8"] < 0.01 < 0.02 < errors["fp8"] < 0.03
    w = torch.randn(8, 4096, generator=noise)
    w[:, 7] = 50.0  # leaves few int8 codes to the others, and all of fp8's
    target, errors = reencode.choose_target(w, ["int8", "fp8"])
    assert target == "fp8" and errors["fp8"] < 0.03 < 0.06 < errors["int8"]
    with pytest.raises(ValueError, match="no candidates"):
        reencode.choose_target(w, [])


def test_added_error_is_relative_and_zero_for_zeros() -> None:
    w = QuantizedTensor.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(4)), "int8")
    assert reencode.added_error(w, w) == 0.0
    half = QuantizedTensor(w.codes, w.scale * 1.5, None, w.shape, w.format)
    assert reencode.added_error(w, half) == pytest.approx(0.5, rel=1e-6)
    zeros = QuantizedTensor.quantize(torch.zeros(2, 64), "int8")
    assert reencode.added_error(zeros, zeros) == 0.0
