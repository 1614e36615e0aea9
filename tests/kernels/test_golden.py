"""Files of five other tools, decoded by ours, and each byte that differs from our own quantization explained.

Byte equality is asserted wherever it holds. Where it does not, the other tool's different step is written out
here and must reproduce the file exactly, with the number of bytes that it moves.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fluxq.kernels import encode
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS

N, K = 160, 192
GOLDEN = Path(__file__).parents[1] / "golden"
NEGATIVE_ZEROS = 57  # in row 4 of the input


def golden(name: str) -> dict[str, Tensor]:
    """Tensors of a file, without the module's name."""
    return {
        key.removeprefix("layer.").removeprefix("0."): t for key, t in load_file(GOLDEN / f"{name}.safetensors").items()
    }


def source() -> Tensor:
    return golden("input_linear")["weight"]  # (N, K) bf16


def negative_zeros() -> Tensor:
    return (source() == 0) & torch.signbit(source())


def held(codes: Tensor, scale: Tensor, format_name: str, global_scale: Tensor | None = None) -> QuantizedTensor:
    return QuantizedTensor(codes, scale, global_scale, (N, K), FORMATS[format_name])


def differences(a: Tensor, b: Tensor) -> Tensor:
    """Tell which elements of two tensors of one dtype and shape differ in their bytes."""
    assert a.dtype == b.dtype and a.shape == b.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.contiguous().view(integer) != b.contiguous().view(integer)


def nibbles(packed: Tensor) -> Tensor:
    """4-bit codes (N, K), even element low: written here, so that a wrong order in our pack is seen."""
    return torch.stack([packed % 16, packed // 16], dim=-1).reshape(N, K)


def e4m3(values: Tensor) -> Tensor:
    return values.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def e2m1_values(codes: Tensor) -> Tensor:
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes.int()]


def unswizzled(scale: Tensor, columns: int) -> Tensor:
    """Scales (N, columns), as bytes, from the padded 128 x 4 blocks that cuBLAS reads."""
    flat = scale.contiguous().view(torch.uint8).reshape(-1)
    assert flat.numel() == (N + 127) // 128 * 128 * ((columns + 3) // 4 * 4)
    r, c = torch.arange(N).unsqueeze(1), torch.arange(columns).unsqueeze(0)
    tile = (r // 128) * ((columns + 3) // 4) + c // 4
    return flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]


def nibbles_swapped(packed: Tensor) -> Tensor:
    return packed >> 4 | packed << 4


def relative_error(decoded: Tensor) -> float:
    w = source().double()
    return ((decoded.double() - w).norm() / w.norm()).item()


# NVIDIA ModelOpt


@pytest.mark.parametrize(("name", "format_name"), [("modelopt_fp8_pc_pt", "fp8"), ("modelopt_int8", "int8")])
def test_modelopt_per_channel_bytes_are_ours(name, format_name):
    file, ours = golden(name), QuantizedTensor.quantize(source(), format_name)
    assert not differences(ours.codes, file["weight"]).any()
    assert not differences(ours.scale, file["weight_scale"]).any()
    assert not differences(
        ours.dequantize(), held(file["weight"], file["weight_scale"], format_name).dequantize()
    ).any()


def test_modelopt_fp8_per_tensor_rounds_twice_because_it_divides_in_bf16():
    file, ours = golden("modelopt_fp8"), QuantizedTensor.quantize(source(), "fp8_tensor")
    scale = file["weight_scale"]
    assert not differences(ours.scale, scale).any()
    quotient = source() / scale  # bf16: an fp32 scalar tensor does not promote it
    assert quotient.dtype == torch.bfloat16
    assert not differences(e4m3(quotient), file["weight"]).any()
    assert not differences(e4m3(source().float() / scale), ours.codes).any()
    flips = differences(ours.codes, file["weight"])
    assert flips.sum() == 669
    step = (ours.codes.view(torch.uint8).int() - file["weight"].view(torch.uint8).int())[flips]
    assert step.abs().eq(1).all()
    assert not differences(held(file["weight"], scale, "fp8_tensor").dequantize(), file["weight"].float() * scale).any()


def test_modelopt_mxfp8_differs_only_in_the_scale_of_the_zero_block():
    file, ours = golden("modelopt_mxfp8"), QuantizedTensor.quantize(source(), "mxfp8")
    assert not differences(ours.codes, file["weight"]).any()
    differing = differences(ours.scale, file["weight_scale"])
    assert differing.nonzero().tolist() == [[0, 0]]
    assert (ours.scale[0, 0], file["weight_scale"][0, 0]) == (127, 0)
    assert not differences(ours.dequantize(), held(file["weight"], file["weight_scale"], "mxfp8").dequantize()).any()


def test_modelopt_nvfp4_differs_only_in_dropping_the_sign_of_negative_zeros():
    file, ours = golden("modelopt_nvfp4"), QuantizedTensor.quantize(source(), "nvfp4")
    assert not differences(ours.global_scale, file["weight_scale_2"]).any()
    assert not differences(ours.scale, file["weight_scale"]).any()
    codes, theirs = nibbles(ours.codes), nibbles(file["weight"])
    assert torch.equal(codes != theirs, negative_zeros())
    assert (codes != theirs).sum() == NEGATIVE_ZEROS
    assert codes[negative_zeros()].eq(8).all() and theirs[negative_zeros()].eq(0).all()
    decoded = held(file["weight"], file["weight_scale"], "nvfp4", file["weight_scale_2"]).dequantize()
    assert torch.equal(decoded, ours.dequantize())
    assert relative_error(decoded) == pytest.approx(0.092374, abs=5e-7)


def test_modelopt_svdquant_decodes_with_the_branch_added_before_the_input_scale():
    file = golden("modelopt_nvfp4_svdquant_r16")
    wq = held(file["weight"], file["weight_scale"], "nvfp4", file["weight_scale_2"]).dequantize()  # (N, K)
    a, b = file["svdquant_lora_a"].float(), file["svdquant_lora_b"].float()  # (R, K), (N, R)
    scale = file["pre_quant_scale"].float()  # (K,)
    assert relative_error((wq + b @ a) * scale) == pytest.approx(0.070647, abs=5e-7)
    for wrong in (wq * scale, wq + b @ a, (wq + b @ a) / scale, wq * scale + b @ a):
        assert relative_error(wrong) > 0.4
    blocks, residual = (
        (source().float() / scale - b @ a).abs().reshape(N, -1, 16).amax(-1),
        wq.reshape(N, -1, 16),
    )
    largest = residual.abs().amax(-1)  # (N, G): what was quantized is W / scale - B A, to within one E4M3 rounding
    assert ((largest - blocks).abs() <= blocks / 15).all()


# ComfyUI: comfy-kitchen


def test_comfy_fp8_takes_scale_reciprocal_and_product_in_bf16():
    file, ours = golden("comfy_fp8_e4m3"), QuantizedTensor.quantize(source(), "fp8_tensor")
    scale = file["weight_scale"]
    assert not differences(scale, ours.scale.bfloat16().float()).any()
    assert not differences(e4m3(source() * (1 / scale).bfloat16()), file["weight"]).any()
    assert differences(ours.codes, file["weight"]).sum() == 669
    decoded = held(file["weight"], scale, "fp8_tensor").dequantize()
    assert not differences(decoded.bfloat16(), file["__dequant_ref"]).any()


def test_comfy_mxfp8_differs_only_in_the_scale_of_the_zero_block():
    check_swizzled_mxfp8("comfy_mxfp8", "weight", "weight_scale")


def check_swizzled_mxfp8(name: str, codes_name: str, scale_name: str) -> None:
    file, ours = golden(name), QuantizedTensor.quantize(source(), "mxfp8")
    scale = unswizzled(file[scale_name], K // 32)
    assert not differences(ours.codes, file[codes_name]).any()
    assert differences(ours.scale, scale).nonzero().tolist() == [[0, 0]]
    assert scale[0, 0] == 0
    decoded = held(file[codes_name], scale, "mxfp8").dequantize()
    assert not differences(decoded.bfloat16(), file["__dequant_ref"]).any()


def test_comfy_nvfp4_decodes_after_swapping_nibbles_and_unswizzling_scales():
    file = golden("comfy_nvfp4")
    scale = unswizzled(file["weight_scale"], K // 16).view(torch.float8_e4m3fn)
    swapped = held(nibbles_swapped(file["weight"]), scale, "nvfp4", file["weight_scale_2"])
    assert relative_error(swapped.dequantize()) == pytest.approx(0.092407, abs=5e-7)
    as_found = held(file["weight"], scale, "nvfp4", file["weight_scale_2"])
    assert relative_error(as_found.dequantize()) == pytest.approx(1.554, abs=5e-4)
    step = encode.decode_scale(scale, FORMATS["nvfp4"], file["weight_scale_2"]).bfloat16()  # comfy decodes in bf16
    exact = e2m1_values(nibbles(swapped.codes)).reshape(N, -1, 16).bfloat16() * step.unsqueeze(-1)
    assert torch.equal(exact.reshape(N, K), file["__dequant_ref"])
    assert (swapped.dequantize().bfloat16() != file["__dequant_ref"]).sum() == 2868


def test_comfy_nvfp4_differs_in_a_bf16_global_scale_and_in_scales_that_underflow_to_zero():
    file = golden("comfy_nvfp4")
    global_scale = file["weight_scale_2"]
    assert not differences(global_scale, (source().abs().max() / 2688).float()).any()  # divided in bf16
    scale = unswizzled(file["weight_scale"], K // 16).view(torch.float8_e4m3fn)
    ours = QuantizedTensor.quantize(source(), "nvfp4", global_scale=global_scale)
    assert differences(ours.scale, scale).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert scale[:2, :2].float().eq(0).all()
    assert ours.scale[:2, :2].tolist() == [[1.0, 1.0], [2.0**-9, 2.0**-9]]
    codes, theirs = nibbles(ours.codes), nibbles(nibbles_swapped(file["weight"]))
    flips = codes != theirs
    assert flips.sum() == 13  # tiny negatives under the underflowed scales of row 1
    assert flips.nonzero()[:, 0].unique().tolist() == [1] and flips.nonzero()[:, 1].max() < 32
    assert codes[flips].eq(8).all() and theirs[flips].eq(0).all()
    fp32 = QuantizedTensor.quantize(source(), "nvfp4")
    assert differences(fp32.scale, scale).sum() == 24
    assert (nibbles(fp32.codes) != theirs).sum() == 119


# compressed-tensors


def test_ct_mxfp8_doubles_the_scale_of_blocks_that_fill_the_range_exactly():
    file, ours = golden("ct_mxfp8"), QuantizedTensor.quantize(source(), "mxfp8")
    scale = file["weight_scale"]
    amax = source().float().reshape(N, -1, 32).abs().amax(-1)  # (N, G)
    full = amax == 448 * torch.exp2(ours.scale.float() - 127)
    assert full.sum() == 7
    expected = torch.where(full, ours.scale + 1, ours.scale)
    expected[0, 0] = 0  # zeros
    assert not differences(expected, scale).any()
    flips = differences(ours.codes, file["weight"]).reshape(N, -1, 32)
    assert flips.sum() == 224 and torch.equal(flips.any(-1), full)  # all codes of the seven blocks: one exponent less
    decoded = held(file["weight"], scale, "mxfp8").dequantize()
    assert not differences(decoded.bfloat16(), file["__dequant_ref"]).any()


def test_ct_mxfp4_has_another_scale_rule_and_drops_the_sign_of_negative_zeros():
    file, ours = golden("ct_mxfp4"), QuantizedTensor.quantize(source(), "mxfp4")
    theirs = held(file["weight_packed"], file["weight_scale"], "mxfp4")
    assert torch.equal(theirs.dequantize().bfloat16(), file["__dequant_ref"])
    larger = file["weight_scale"].int() - ours.scale.int()
    assert larger.unique(return_counts=True)[0].tolist() == [-127, 0, 1]
    assert (larger == 1).sum() == 74 and (larger == -127).nonzero().tolist() == [[0, 0]]
    flips = (nibbles(ours.codes) != nibbles(theirs.codes)) & (larger != 1).repeat_interleave(32, dim=1)
    assert torch.equal(flips, negative_zeros() & (larger != 1).repeat_interleave(32, dim=1))
    assert flips.sum() == NEGATIVE_ZEROS

    def squared_error(q: QuantizedTensor) -> Tensor:
        return (q.dequantize().double() - source().double()).square().reshape(N, -1, 32).sum(-1)

    assert (squared_error(ours) <= squared_error(theirs)).all()
    assert (squared_error(ours) < squared_error(theirs)).sum() == 74


def test_ct_nvfp4_stores_the_reciprocal_global_scale_and_other_scales_for_vanishing_blocks():
    file, ours = golden("ct_nvfp4"), QuantizedTensor.quantize(source(), "nvfp4")
    reciprocal = file["weight_global_scale"]
    assert reciprocal.tolist() == [672.0] and torch.equal(ours.global_scale, 1 / reciprocal[0])
    scale = file["weight_scale"]
    assert differences(ours.scale, scale).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert scale[:2, :2].float().eq(0.125).all()
    assert torch.equal(nibbles(ours.codes) != nibbles(file["weight_packed"]), negative_zeros())
    theirs = held(file["weight_packed"], scale, "nvfp4", 1 / reciprocal[0])
    assert torch.equal(theirs.dequantize().bfloat16(), file["__dequant_ref"])
    assert torch.equal(theirs.dequantize(), ours.dequantize())


# torchao


def test_torchao_fp8_takes_the_scale_in_bf16():
    file, ours = golden("torchao_fp8_dyn_pr"), QuantizedTensor.quantize(source(), "fp8")
    scale = file["_weight_scale"]  # (N, 1)
    assert not differences(ours.scale.bfloat16().float().unsqueeze(1), scale).any()
    assert (ours.scale != scale[:, 0]).sum() == 134
    assert not differences(e4m3(source().float() / scale), file["_weight_qdata"]).any()
    assert differences(ours.codes, file["_weight_qdata"]).sum() == 519
    decoded = held(file["_weight_qdata"], scale[:, 0], "fp8").dequantize()
    assert not differences(decoded.bfloat16(), file["__dequant_ref"]).any()


def test_torchao_mxfp8_differs_only_in_the_scale_of_the_zero_block():
    check_swizzled_mxfp8("torchao_mxfp8", "_weight_qdata", "_weight_scale")


def test_every_golden_file_is_tested():
    names = {path.stem for path in GOLDEN.glob("*.safetensors")}
    text = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
    assert names and all(f'"{name}"' in text for name in names)
