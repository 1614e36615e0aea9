"""Tests of other programs' layouts: permutations and nunchaku's arithmetic by closed formulas, and joined layers."""

import pytest
import torch

from fluxq.kernels.encode import pack, unpack
from fluxq.quantize.exchange import layouts, nunchaku
from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.layer import QuantTensors, join, split
from fluxq.recipes.formats import ELEMENTS
from tests.exchange.test_layers import K, effective, quantized, relative, same_bytes, there_and_back

# --- the permutations, against their formulas


@pytest.mark.parametrize(("rows", "groups"), [(160, 12), (1, 1), (300, 10), (128, 4)])
def test_block_scales_follow_the_formula(rows: int, groups: int) -> None:
    scale = torch.randint(0, 256, (rows, groups), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    blocked = layouts.block_scales(scale)
    assert blocked.shape == (-(-rows // 128) * 128, -(-groups // 4) * 4)
    r, c = torch.arange(rows).unsqueeze(1), torch.arange(groups).unsqueeze(0)
    offset = ((r // 128) * -(-groups // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    assert torch.equal(blocked.reshape(-1)[offset], scale)
    assert blocked.count_nonzero() == scale.count_nonzero()
    assert torch.equal(layouts.unblock_scales(blocked, rows, groups), scale)


def test_nibbles_and_padding_have_inverses() -> None:
    packed = torch.randint(0, 256, (7, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layouts.swap_nibbles(packed), packed % 16 * 16 + packed // 16)
    assert torch.equal(layouts.swap_nibbles(layouts.swap_nibbles(packed)), packed)
    for matrix in (packed, packed.view(torch.float8_e4m3fn), packed.float()):
        wide = layouts.pad(matrix, 16, 8)
        assert wide.shape == (16, 8) and wide.dtype == matrix.dtype
        assert same_bytes(layouts.crop(wide, 7, 5), matrix)
        assert wide.float().nan_to_num().abs().sum() == matrix.float().nan_to_num().abs().sum()


def test_nunchaku_tiles_follow_the_closed_formulas() -> None:
    n_rows, k_cols, g = 256, 192, torch.Generator().manual_seed(2)
    n, k = torch.arange(n_rows).unsqueeze(1), torch.arange(k_cols).unsqueeze(0)
    nt, a, h, l = n // 128, n % 128 // 16, n % 16 // 8, n % 8  # noqa: E741
    kt, p, c, e = k // 64, k % 64 // 32, k % 32 // 8, k % 8
    codes = torch.randint(-8, 8, (n_rows, k_cols), dtype=torch.int8, generator=g)
    packed = nunchaku.pack_codes(pack(codes, ELEMENTS["int4"]))
    assert packed.shape == (n_rows, k_cols // 2) and packed.dtype == torch.int8
    at = (((((nt * (k_cols // 64) + kt) * 8 + a) * 8 + l) * 4 + c) * 4 + (2 * h + p)) * 8 + e
    unpacked = packed.reshape(-1).int()[at // 2] >> (4 * (at % 2)) & 15
    assert torch.equal(unpacked, codes.int() & 15)
    assert torch.equal(unpack(nunchaku.unpack_codes(packed), ELEMENTS["int4"]), codes)

    groups = torch.arange(k_cols // 64).unsqueeze(0)
    scale = torch.randn(n_rows, k_cols // 64, generator=g)
    at = ((((nt * (k_cols // 64) + groups) * 8 + a) * 4 + n % 8 // 2) * 2 + n % 16 // 8) * 2 + n % 2
    assert torch.equal(nunchaku.tile(scale, nunchaku._INT4_SCALES).reshape(-1)[at], scale)
    vector = torch.randn(n_rows, generator=g)
    at = (((nt * 8 + a) * 4 + n % 8 // 2) * 2 + n % 16 // 8) * 2 + n % 2
    assert torch.equal(nunchaku.tile(vector, nunchaku._VECTOR).reshape(-1)[at.reshape(-1)], vector)

    groups = torch.arange(k_cols // 16).unsqueeze(0)
    scale = torch.randn(n_rows, k_cols // 16, generator=g)
    sp, a4 = n % 128 // 32, n % 32 // 8
    at = ((((nt * (k_cols // 64) + groups // 4) * 8 + n % 8) * 4 + a4) * 4 + sp) * 4 + groups % 4
    assert torch.equal(nunchaku.tile(scale, nunchaku._FP4_SCALES).reshape(-1)[at], scale)

    ranks = 48
    r, channel = torch.arange(ranks).unsqueeze(1), torch.arange(k_cols).unsqueeze(0)
    down = torch.randn(ranks, k_cols, generator=g)
    inside = (((r % 8 * 4 + channel % 8 // 2) * 2 + r % 16 // 8) * 2 + channel % 16 // 8) * 2 + channel % 2
    at = (channel // 16 * (ranks // 16) + r // 16) * 256 + inside
    assert torch.equal(nunchaku.tile(down, nunchaku._DOWN).reshape(-1)[at], down)
    up = torch.randn(n_rows, ranks, generator=g)
    r = r.T
    inside = (((n % 8 * 4 + r % 8 // 2) * 2 + n % 16 // 8) * 2 + r % 16 // 8) * 2 + r % 2
    at = (n // 16 * (ranks // 16) + r // 16) * 256 + inside
    assert torch.equal(nunchaku.tile(up, nunchaku._UP).reshape(-1)[at], up)


def test_nunchaku_awq_words_follow_the_closed_formula() -> None:
    layer = quantized("int4-16bit", 128, 192)
    encoded = nunchaku.encode(layer)
    n, k = torch.arange(128).unsqueeze(1), torch.arange(192).unsqueeze(0)
    at = (n // 4 * (192 // 64) + k // 64) * 64 + n % 4 * 16 + k % 64 // 32 * 8 + k % 8
    words = encoded.tensors["qweight"].view(torch.int16).reshape(-1).int()
    codes = words[at] >> (4 * (k % 32 // 8)) & 15
    scale, zeros = (encoded.tensors[name].float().T.repeat_interleave(64, dim=1) for name in ("wscales", "wzeros"))
    assert torch.equal(codes * scale + zeros, layer.linear().quantized_weight.dequantize())


# --- nunchaku's arithmetic


@pytest.mark.parametrize("text", ["int4-int4-smooth-r32", "nvfp4-nvfp4-static-smooth-r16", "nvfp4-nvfp4-static"])
def test_nunchaku_computes_the_same_weight_from_its_own_tensors(text: str) -> None:
    layer = quantized(text, 128, 256)
    if "pre_quant_scale" in layer.tensors:  # no powers of two: their reciprocals are rounded
        layer.tensors["pre_quant_scale"] = (torch.rand(256) + 0.5).bfloat16()
    encoded = nunchaku.encode(layer)
    t = encoded.tensors
    n, k = layer.shape
    codes = unpack(nunchaku.unpack_codes(t["qweight"]), ELEMENTS["int4"])
    if text.startswith("int4"):
        weight = codes * nunchaku.untile(t["wscales"], nunchaku._INT4_SCALES, (n, k // 64)).repeat_interleave(64, 1)
    else:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        weight = torch.cat([values, -values])[codes.int() & 15]
        blocks = nunchaku.untile(t["wscales"], nunchaku._FP4_SCALES, (n, k // 16)).float()
        weight = weight * blocks.repeat_interleave(16, 1)
        weight = weight * t["wtscale"].float() * nunchaku.untile(t["wcscales"], nunchaku._VECTOR, (n,)).float()[:, None]
    weight = weight / nunchaku.untile(t["smooth_factor"], nunchaku._VECTOR, (k,)).float()
    r = t["proj_down"].shape[1]
    down = nunchaku.untile(t["proj_down"], nunchaku._DOWN, (r, k))
    up = nunchaku.untile(t["proj_up"], nunchaku._UP, (n, r))
    weight = weight + up.float() @ down.float()
    assert relative(weight, effective(layer)) < 2.0**-8
    if "smooth" not in text:
        assert relative(weight, effective(layer)) < 2.0**-14  # what the global scale alone loses
    assert relative(effective(nunchaku.decode(t, layer.shape)), effective(layer)) < 2.0**-8


def test_nunchaku_moves_a_calibrated_scale_into_the_factors_as_a_power_of_two() -> None:
    layer = quantized("nvfp4-nvfp4-static", 128, 128)
    encoded = nunchaku.encode(layer)
    smooth = encoded.tensors["smooth_factor"].float()
    assert (smooth == 2.0**-7).all()  # the next above 0.0051
    assert any("input_scale became a power of two" in note for note in encoded.notes)
    amax = 2688 * layer.tensors["input_scale"] / smooth[0]
    assert 2688 / 2 < amax <= 2688  # so block scales amax / 6 fill E4M3's range


def test_nunchaku_fills_ranks_up_and_names_them_as_flux_files_do() -> None:
    layer = quantized("int4-int4-smooth-r32", 128, 128)
    encoded = nunchaku.encode(layer, rank=64, single_file=True)
    assert {"smooth", "smooth_orig", "lora_down", "lora_up", "qweight", "wscales", "bias"} == encoded.tensors.keys()
    assert encoded.tensors["lora_down"].shape == (128, 64) and encoded.entry["rank"] == 64
    back = nunchaku.decode(encoded.tensors, layer.shape)
    assert isinstance(back, QuantTensors) and back.scheme == layer.scheme
    assert all(same_bytes(back.tensors[name], layer.tensors[name]) for name in layer.tensors)
    for dialect, name in (("nunchaku", "lora_down"), ("nunchaku_lite", "proj_down")):
        encode = DIALECTS[dialect].encode
        assert encode is not None and name in encode(layer).tensors
    for rank in (16, 40):
        with pytest.raises(ValueError, match=f"rank {rank} is no multiple of 16 of at least"):
            nunchaku.encode(layer, rank=rank)
    fp4 = nunchaku.encode(quantized("nvfp4-nvfp4", 128, 128)).tensors
    bare = {name: tensor for name, tensor in fp4.items() if name not in ("wtscale", "wcscales")}
    assert nunchaku.decode(bare, (128, 128)).tensors["weight_scale_2"] == 1
    plain = nunchaku.encode(quantized("int4-int4", 128, 128))
    assert plain.tensors["proj_down"].shape == (128, 16) and not plain.tensors["proj_down"].any()


def test_nunchaku_takes_the_shift_behind_gelu_from_the_bias() -> None:
    layer = quantized("int4-int4-smooth-r32", 128, 128)
    encoded = nunchaku.encode(layer, after_gelu=True)
    assert encoded.entry["act_unsigned"] is True
    bias = nunchaku.untile(encoded.tensors["bias"], nunchaku._VECTOR, (128,)).float()
    weight = effective(layer).float()
    x = torch.rand(5, 128)
    expected = x @ weight.T + layer.tensors["bias"].float()
    shifted = (x + 0.171875) @ weight.T + bias
    assert relative(shifted, expected) < 2.0**-8
    assert relative((x + 0.171875) @ weight.T + layer.tensors["bias"].float(), expected) > 2.0**-5
    back = nunchaku.decode(encoded.tensors, layer.shape, encoded.entry)
    before, after = layer.tensors["bias"].float(), back.tensors["bias"].float()
    assert ((after - before).abs() <= 2.0**-8 * (bias.abs() + before.abs())).all()  # rounded to 16 bit twice


@pytest.mark.parametrize("chunks", [3, 6])
def test_nunchaku_interleaves_modulation_and_adds_one_to_what_scales(chunks: int) -> None:
    layer = quantized("int4-16bit", 48, 64)
    turned = nunchaku.interleaved(layer, chunks)
    weight, channels = layer.tensors["weight"], 48 // chunks
    for s in range(chunks):
        for c in (0, channels - 1):
            assert torch.equal(turned.tensors["weight"][c * chunks + s], weight[s * channels + c])
            one = 1.0 if s in (1, chunks - 2) else 0.0
            expected = (layer.tensors["bias"][s * channels + c].float() + one).bfloat16()
            assert turned.tensors["bias"][c * chunks + s] == expected
    back = nunchaku.chunked(turned, chunks)
    assert all(same_bytes(back.tensors[name], layer.tensors[name]) for name in ("weight", "weight_scale"))
    assert (back.tensors["bias"] - layer.tensors["bias"]).abs().max() <= 2.0**-7
    with pytest.raises(ValueError, match="no modulation of 5 chunks"):
        nunchaku.interleaved(layer, 5)


# --- fused layers


def test_joined_layers_split_into_the_same_bytes() -> None:
    for text in ("fp8-fp8", "int4-int4-smooth-r32", "mxfp8-mxfp8", "nvfp4-nvfp4-static-r16"):
        parts = [quantized(text, n, K, seed) for seed, n in enumerate((160, 32, 48))]
        for part in parts[1:]:
            shared = {name: parts[0].tensors[name] for name in ("pre_quant_scale",) if name in part.tensors}
            part.tensors.update(shared)
        fused = join(parts)
        assert fused.shape == (240, K)
        whole = torch.cat([effective(part) for part in parts])
        assert relative(fused.linear().collapsed()[0], whole) < 1e-6
        for before, after in zip(parts, split(fused, [160, 32, 48]), strict=True):
            assert before.scheme == after.scheme
            assert all(same_bytes(before.tensors[name], after.tensors[name]) for name in before.tensors), text


def test_global_scales_that_differ_need_a_dialect_with_row_scales() -> None:
    parts = [quantized("nvfp4-nvfp4-smooth-r32", 128, 128, seed) for seed in range(3)]
    for part in parts:
        part.tensors["pre_quant_scale"] = parts[0].tensors["pre_quant_scale"]
    fused = join(parts)
    assert fused.tensors["weight_scale_2"].shape == (384, 1) and fused.scheme.rank == 96
    back = there_and_back("nunchaku", fused)
    assert back.tensors["weight_scale_2"].shape == (384, 1)
    for before, after in zip(parts, split(back, [128] * 3), strict=True):
        assert relative(after.tensors["weight_scale_2"], before.tensors["weight_scale_2"]) < 2.0**-9
        assert same_bytes(after.tensors["weight"], before.tensors["weight"])
        assert same_bytes(after.tensors["svdquant_lora_a"], before.tensors["svdquant_lora_a"])
    static = join([quantized("nvfp4-nvfp4-static", 32, 64, seed) for seed in range(2)])
    for dialect in ("bfl", "comfy", "modelopt", "torchao", "compressed_tensors"):
        with pytest.raises(ValueError, match="one global scale"):
            there_and_back(dialect, static)
    with pytest.raises(ValueError, match="split the fused layer first"):
        split(static, [48, 16])


def test_layers_that_read_x_differently_are_not_joined() -> None:
    with pytest.raises(ValueError, match="cannot join fp8-fp8 K=64 to fp8-fp8 K=32"):
        join([quantized("fp8-fp8", 16, 32), quantized("fp8-fp8", 16, 64)])
    with pytest.raises(ValueError, match="whose pre_quant_scale differ"):
        join([quantized("int8-int8-smooth", 16, 32, seed) for seed in range(2)])
    with pytest.raises(ValueError, match="without one"):
        join([quantized("fp8-fp8", 16, 32), quantized("fp8-fp8", 16, 32, bias=False)])
    with pytest.raises(ValueError, match="split 16 rows into 8\\+9"):
        split(quantized("fp8-fp8", 16, 32), [8, 9])
