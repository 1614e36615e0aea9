"""Layers in the layouts of other programs: to and fro, against files that those programs wrote, and each known trap."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fluxq.quantize.encode import pack, unpack
from fluxq.quantize.exchange import bfl, comfy, compressed_tensors, layouts, modelopt, nunchaku, torchao
from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.layer import Plain, QuantTensors, join, split
from fluxq.quantize.linear import branch_shapes
from fluxq.quantize.tensor import QuantizedTensor
from fluxq.recipes.formats import ELEMENTS, Scheme

GOLDEN = Path(__file__).parent / "golden"
N, K = 160, 192

# What each dialect holds; every other scheme of SCHEMES it must refuse.
HOLDS = {
    "bfl": "fp8-fp8 nvfp4-nvfp4-static",
    "modelopt": (
        "fp8-fp8 fp8_tensor-fp8_tensor mxfp8-mxfp8 mxfp4-mxfp4 nvfp4-nvfp4-static nvfp4-nvfp4-static-smooth "
        "nvfp4-nvfp4-static-r16 nvfp4-nvfp4-static-smooth-r16 nvfp4-16bit int8-int8 int8-int8-smooth int8-16bit "
        "int4_g128-16bit int4_g128-16bit-smooth"
    ),
    "comfy": (
        "fp8_tensor-fp8_tensor fp8_tensor-16bit mxfp8-mxfp8 mxfp8-16bit nvfp4-nvfp4 nvfp4-nvfp4-static "
        "nvfp4-nvfp4-static-smooth nvfp4-16bit int8-int8 int8-16bit int4-16bit int4_g128-16bit"
    ),
    "torchao": (
        "fp8-fp8 fp8-16bit fp8_tensor-fp8_tensor fp8_tensor-16bit mxfp8-mxfp8 mxfp4-mxfp4 nvfp4-nvfp4 "
        "nvfp4-nvfp4-static nvfp4-16bit int8-int8 int8-int8-smooth int8-16bit"
    ),
    "nunchaku": "nvfp4-nvfp4 nvfp4-nvfp4-smooth-r32 int4-int4 int4-int4-smooth-r32 int4-16bit",
    "compressed_tensors": (
        "fp8-fp8 fp8-16bit fp8_tensor-fp8_tensor fp8_tensor-16bit mxfp8-mxfp8 mxfp8-16bit mxfp4-mxfp4 mxfp4-16bit "
        "nvfp4-nvfp4-static nvfp4-16bit int8-int8 int8-16bit int4-16bit int4_g128-16bit"
    ),
}
HOLDS["nunchaku_lite"] = HOLDS["nunchaku"]
# Held too, but what comes back is another scheme, and a note says why.
HOLDS_OTHERWISE = {
    "bfl": {"fp8-16bit": "fp8-fp8"},
    "modelopt": {"fp8-16bit": "fp8-fp8"},
    "comfy": {"fp8_tensor-fp8": "fp8_tensor-fp8_tensor"},
    "nunchaku": {
        "nvfp4-nvfp4-static": "nvfp4-nvfp4-smooth",
        "nvfp4-nvfp4-static-smooth": "nvfp4-nvfp4-smooth",
        "nvfp4-nvfp4-static-r16": "nvfp4-nvfp4-smooth-r16",
        "nvfp4-nvfp4-static-smooth-r16": "nvfp4-nvfp4-smooth-r16",
    },
}
HOLDS_OTHERWISE["nunchaku_lite"] = HOLDS_OTHERWISE["nunchaku"]
SCHEMES = sorted(
    {scheme for held in HOLDS.values() for scheme in held.split()}
    | {
        "fp8_tensor-fp8",
        "fp8-fp8-h64",
        "int8-int8-center",
        "mxfp4-mxfp4-d16",
        "nvfp4-nvfp4-static-46",
        "int8-int8-r16",
        "fp8-fp8-smooth",
    }
)


def quantized(text: str, n: int = N, k: int = K, seed: int = 0, bias: bool = True, weight: Tensor | None = None) -> Any:
    """A layer under a scheme, of a random weight; factors are powers of two, which 16 bit and reciprocals hold."""
    g, scheme = torch.Generator().manual_seed(seed), Scheme.parse(text)
    w = torch.randn(n, k, generator=g).bfloat16() if weight is None else weight
    q = QuantizedTensor.quantize(w, scheme.weights)
    tensors = q.tensors()
    for name, shape in branch_shapes(scheme, n, k).items():
        tensors[name] = torch.randn(shape, generator=g).bfloat16()
    if scheme.smooth:
        tensors["pre_quant_scale"] = torch.exp2(torch.randint(-4, 5, (k,), generator=g)).bfloat16()
    if bias or scheme.center:
        tensors["bias"] = torch.randn(n, generator=g).bfloat16()
    if scheme.static_input:
        tensors["input_scale"] = torch.tensor(0.00390625 * 1.3)
    return QuantTensors(tensors, (n, k), scheme)


def with_needs(dialect: str, layer: QuantTensors) -> QuantTensors:
    """With the input_scale that ModelOpt's per-tensor formats ask for and no scheme of ours stores."""
    if dialect == "modelopt" and str(layer.scheme).split("-smooth")[0] in ("fp8_tensor-fp8_tensor", "int8-int8"):
        return replace(layer, beside={"input_scale": torch.tensor(0.0125)})
    return layer


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def there_and_back(dialect: str, layer: QuantTensors) -> Any:
    row = DIALECTS[dialect]
    assert row.encode is not None
    encoded = row.encode(layer)
    entry = json.loads(json.dumps(encoded.entry))
    return row.decode(encoded.tensors, layer.shape, entry)


def effective(layer: Any) -> Tensor:
    """W (N, K) that the layer multiplies x by, in fp64 of fp32 tensors."""
    return layer.weight.double() if isinstance(layer, Plain) else layer.linear().collapsed()[0].double()


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# --- native -> dialect -> native


def shapes_for(dialect: str, scheme: str) -> list[tuple[int, int]]:
    if dialect.startswith("nunchaku"):
        return [(128, 128), (256, 384)]
    if scheme.startswith("int4_g128"):
        return [(40, 384)]
    if scheme.startswith("int4"):
        return [(40, 64), (N, K)]
    return [(N, K), (48, 32), (40, 96)]


@pytest.mark.parametrize("dialect", HOLDS)
def test_what_a_dialect_holds_comes_back_byte_for_byte_and_the_rest_is_refused(dialect: str) -> None:
    held, otherwise = HOLDS[dialect].split(), HOLDS_OTHERWISE.get(dialect, {})
    for text in SCHEMES:
        for shape in shapes_for(dialect, text):
            layer = with_needs(dialect, quantized(text, *shape, bias=shape != (48, 32)))
            if text not in held and text not in otherwise:
                with pytest.raises(ValueError, match=r"no format for|activations, not|scheme"):
                    there_and_back(dialect, layer)
                continue
            back = there_and_back(dialect, layer)
            assert isinstance(back, QuantTensors), (text, back)
            assert str(back.scheme) == otherwise.get(text, text)
            rounded = {name for row in DIALECTS[dialect].rows for name in row.rounds if row.weights in text}
            rounded -= set() if text in otherwise else {"pre_quant_scale"}  # powers of two, whose reciprocals are exact
            for name in (layer.tensors.keys() | back.tensors.keys()) - rounded:
                assert same_bytes(back.tensors[name], layer.tensors[name]), (text, shape, name)
            for name, value in layer.beside.items():
                assert same_bytes(back.beside[name], value), (text, name)
            assert relative(effective(back), effective(layer)) < 2e-4 if rounded else True
            again = there_and_back(dialect, back)
            assert again.scheme == back.scheme
            for name in back.tensors:
                assert same_bytes(again.tensors[name], back.tensors[name]), (text, name)


def test_a_dialect_names_what_it_cannot_hold() -> None:
    for dialect, text, words in (
        ("bfl", "nvfp4-nvfp4", "needs a calibrated input_scale"),
        ("bfl", "int8-int8", "no format for int8 weights; it holds fp8, nvfp4"),
        ("bfl", "fp8_tensor-fp8_tensor", "no format for fp8_tensor"),
        ("comfy", "fp8-fp8", "no format for fp8 weights"),
        ("comfy", "int8-int8-center", "subtracts a mean from x at run time"),
        ("torchao", "fp8-fp8-h64", "rotates x at run time"),
        ("torchao", "nvfp4-nvfp4-static-r16", "has a low-rank branch"),
        ("torchao", "mxfp8-16bit", "with mxfp8 activations, not as mxfp8-16bit"),
        ("modelopt", "int8-int8", "needs input_scale, which the scheme int8-int8 does not store"),
        ("compressed_tensors", "nvfp4-nvfp4-static-46", "chooses between two scales"),
    ):
        with pytest.raises(ValueError, match=words):
            there_and_back(dialect, quantized(text))
    with pytest.raises(ValueError, match="N in multiples of 128, this layer has N = 160"):
        there_and_back("nunchaku", quantized("int4-int4"))
    with pytest.raises(ValueError, match="K in multiples of 128, this layer has K = 192"):
        there_and_back("nunchaku", quantized("int4-int4", 128, 192))


def test_notes_say_what_a_reader_computes_otherwise() -> None:
    encode = DIALECTS["bfl"].encode
    assert encode is not None
    assert encode(quantized("fp8-fp8")).notes == ()
    assert "x is computed in fp8 there" in encode(quantized("fp8-16bit")).notes[0]


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
    assert any("input_scale became the power of two" in note for note in encoded.notes)
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


# --- files that the other programs wrote


def golden(name: str) -> dict[str, Tensor]:
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    return {key.removeprefix("layer.").removeprefix("0."): t for key, t in tensors.items()}


def notes_of(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def header_of(name: str) -> dict[str, str]:
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as stream:
        return stream.metadata() or {}


def layer_of(file: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in file.items() if not name.startswith("__")}


def entry_of(name: str) -> tuple[str, dict[str, Any]]:
    """(dialect, entry of its layer) of a golden file."""
    if name.startswith("comfy"):
        return "comfy", {}
    if name.startswith("torchao"):
        return "torchao", json.loads(header_of(name)["0.weight"])
    if name.startswith("ct"):
        described = notes_of(name)["config"]["quantization_config"]
        return "compressed_tensors", {**described["config_groups"]["group_0"], "format": described["format"]}
    if name.startswith("bfl"):
        return "bfl", {}
    return "modelopt", {"quant_algo": notes_of(name)["config"]["quantization_config"]["quant_algo"]}


SCHEME_OF = {
    "bfl_fp8r": "fp8-fp8",
    "bfl_nvfp4": "nvfp4-nvfp4-static",
    "comfy_fp8_e4m3": "fp8_tensor-fp8_tensor",
    "comfy_mxfp8": "mxfp8-mxfp8",
    "comfy_nvfp4": "nvfp4-nvfp4-static",
    "ct_mxfp4": "mxfp4-mxfp4",
    "ct_mxfp8": "mxfp8-mxfp8",
    "ct_nvfp4": "nvfp4-nvfp4-static",
    "modelopt_fp8": "fp8_tensor-fp8_tensor",
    "modelopt_fp8_pc_pt": "fp8-fp8",
    "modelopt_int8": "int8-int8",
    "modelopt_mxfp8": "mxfp8-mxfp8",
    "modelopt_nvfp4": "nvfp4-nvfp4-static",
    "modelopt_nvfp4_svdquant_r16": "nvfp4-nvfp4-static-smooth-r16",
    "torchao_fp8_dyn_pr": "fp8-fp8",
    "torchao_int8": "int8-int8",
    "torchao_mxfp8": "mxfp8-mxfp8",
    "torchao_nvfp4": "nvfp4-16bit",
}


@pytest.mark.parametrize("name", SCHEME_OF)
def test_a_golden_decodes_to_its_producers_values_and_goes_back_to_its_bytes(name: str) -> None:
    file, (dialect, entry) = golden(name), entry_of(name)
    layer = DIALECTS[dialect].decode(layer_of(file), (N, K), entry)
    assert isinstance(layer, QuantTensors) and str(layer.scheme) == SCHEME_OF[name]
    weight = effective(layer).float()
    if name == "torchao_int8":  # which torchao computes in bf16, as comfy-kitchen does nvfp4
        assert relative(weight, file["__dequant_ref"]) < 2.0**-8
    elif "__dequant_ref" in file and name != "comfy_nvfp4":
        assert torch.equal(weight.to(file["__dequant_ref"].dtype), file["__dequant_ref"])
    source = golden("input_linear")["weight"]
    if name == "comfy_nvfp4":
        assert relative(weight, file["__dequant_ref"]) < 2.0**-8
    if "svdquant" in name:
        assert relative(weight, source) == pytest.approx(0.070647, abs=2e-5)  # A is rounded to bf16 once more
    else:
        assert relative(weight, source) < {"fp8": 0.03, "mxf": 0.11, "nvf": 0.0925, "int": 0.03}[str(layer.scheme)[:3]]
    encode = DIALECTS[dialect].encode
    assert encode is not None
    back = encode(layer).tensors
    differ = {key for key, tensor in layer_of(file).items() if not same_bytes(back.pop(key, torch.empty(0)), tensor)}
    assert differ == DIFFERS.get(name, set()) and not back


# What is not the producer's byte for byte: scales of blocks of zeros (and, in comfy_nvfp4, the codes beneath them);
# the branch, which bf16 rounds as it changes sides; and numbers of a bf16 model that are held in fp32.
DIFFERS = {
    "bfl_nvfp4": {"weight_scale"},
    "comfy_mxfp8": {"weight_scale"},
    "comfy_nvfp4": {"weight_scale"},
    "ct_mxfp4": {"weight_scale"},
    "ct_mxfp8": {"weight_scale"},
    "modelopt_mxfp8": {"weight_scale"},
    "modelopt_nvfp4_svdquant_r16": {"svdquant_lora_a"},
    "torchao_mxfp8": {"_weight_scale"},
}
OURS = {  # goldens of the producers' own rounding, and where ours differs
    "bfl_fp8r": set(),
    "bfl_nvfp4": {"weight", "weight_scale"},
    "modelopt_fp8_pc_pt": set(),
    "modelopt_int8": {"input_scale"},
    "modelopt_mxfp8": {"weight_scale"},
    "modelopt_nvfp4": {"weight"},
    "comfy_mxfp8": {"weight_scale"},
    "torchao_mxfp8": {"_weight_scale"},
    "ct_nvfp4": {"weight_packed", "weight_scale"},
}


@pytest.mark.parametrize("name", OURS)
def test_the_golden_input_quantized_and_exported_is_the_producers_file(name: str) -> None:
    file, (dialect, _), source = golden(name), entry_of(name), golden("input_linear")
    layer = quantized(SCHEME_OF[name], weight=source["weight"])
    layer.tensors["bias"] = source["bias"]
    if layer.scheme.static_input:
        scale = file["input_scale"] if "input_scale" in file else 1 / file["input_global_scale"]
        layer.tensors["input_scale"] = scale.reshape(())
    beside = {"input_scale": torch.tensor(1.0)} if name == "modelopt_int8" else {}
    encode = DIALECTS[dialect].encode
    assert encode is not None
    ours = encode(replace(layer, beside=beside)).tensors
    theirs = layer_of(file)
    assert ours.keys() == theirs.keys()
    assert {key for key in theirs if not same_bytes(ours[key], theirs[key])} == OURS[name]
    assert all(ours[key].dtype == theirs[key].dtype and ours[key].shape == theirs[key].shape for key in theirs)
    back = DIALECTS[dialect].decode(theirs, (N, K), entry_of(name)[1])
    assert torch.equal(effective(back), effective(layer))  # what differs decodes the same


def test_what_files_say_beside_tensors_is_what_the_producers_say() -> None:
    for name in ("modelopt_fp8", "modelopt_fp8_pc_pt", "modelopt_int8", "modelopt_mxfp8", "modelopt_nvfp4"):
        layer = modelopt.decode(layer_of(golden(name)), (N, K), entry_of(name)[1])
        ours = modelopt.config({"layer": modelopt.encode(layer).entry}, [], "0.47.0")
        theirs = notes_of(name)["config"]["quantization_config"]
        layout = {
            "group_size",
            "swap_weight_nibbles",
            "checkpoint_weight_scale_layout",
            "checkpoint_uses_packed_qkv",
        }
        added = ours.keys() - theirs.keys()
        if name == "modelopt_nvfp4":
            assert (ours["swap_weight_nibbles"], ours["checkpoint_weight_scale_layout"]) == (False, "linear")
            assert (ours["group_size"], ours["checkpoint_uses_packed_qkv"]) == (16, False)
        assert added == (layout if name == "modelopt_nvfp4" else {"config_groups"} & added), name
        assert all(ours[key] == value for key, value in theirs.items()), name
    for name in ("comfy_fp8_e4m3", "comfy_mxfp8", "comfy_nvfp4"):
        encoded = comfy.encode(comfy.decode(layer_of(golden(name)), (N, K)))
        assert comfy.metadata({"layer": encoded.entry}) == header_of(name)
    assert bfl.metadata({"layer": bfl.encode(quantized("fp8-fp8")).entry}) == header_of("bfl_fp8r")
    assert bfl.metadata({"layer": bfl.encode(quantized("nvfp4-nvfp4-static")).entry}) == {}
    for name in ("torchao_fp8_dyn_pr", "torchao_mxfp8"):
        layer = torchao.decode(layer_of(golden(name)), (N, K), entry_of(name)[1])
        assert isinstance(layer, QuantTensors)
        ours = torchao.metadata({"0": torchao.encode(layer).entry}, ["0.bias"])
        theirs = header_of(name)
        assert {key: text.replace('"AUTO"', '""') for key, text in ours.items()} == {
            key: text.replace('"TORCH"', '""').replace('"EMULATED"', '""') for key, text in theirs.items()
        }
    for name in ("ct_mxfp4", "ct_mxfp8", "ct_nvfp4"):
        layer = compressed_tensors.decode(layer_of(golden(name)), (N, K), entry_of(name)[1])
        assert isinstance(layer, QuantTensors)
        ours = compressed_tensors.config({"layer": compressed_tensors.encode(layer).entry}, ["proj_out"])
        theirs = notes_of(name)["config"]["quantization_config"]
        for side in ("weights", "input_activations"):
            said = {k: v for k, v in theirs["config_groups"]["group_0"][side].items() if k != "observer"}
            assert ours["config_groups"]["group_0"][side] == said, (name, side)
        assert all(ours[key] == theirs[key] for key in ("format", "quant_method", "ignore", "quantization_status"))


def test_configurations_of_several_kinds_of_layers() -> None:
    entries = {}
    for name, text in (("a", "nvfp4-nvfp4-static"), ("b", "fp8-fp8"), ("c", "nvfp4-nvfp4-static")):
        entries[name] = modelopt.encode(quantized(text)).entry
    mixed = modelopt.config(entries, ["d"], "0.47.0")
    assert mixed["quant_algo"] == "MIXED_PRECISION" and mixed["quantized_layers"] == entries
    assert [group["targets"] for group in mixed["config_groups"].values()] == [["a", "c"], ["b"]]
    lite = {
        "a": nunchaku.encode(quantized("int4-int4-smooth-r32", 128, 128)).entry,
        "b": nunchaku.encode(quantized("int4-16bit", 128, 128)).entry,
    }
    described = nunchaku.config(lite)
    assert described == {
        "quant_method": "nunchaku_lite",
        "compute_dtype": "bfloat16",
        "svdq_w4a4": {"precision": "int4", "group_size": 64, "rank": 32, "targets": ["a"]},
        "awq_w4a16": {"precision": "int4", "group_size": 64, "targets": ["b"]},
    }
    with pytest.raises(ValueError, match="one precision and rank"):
        nunchaku.config(lite | {"c": nunchaku.encode(quantized("nvfp4-nvfp4", 128, 128)).entry})
    with pytest.raises(ValueError, match="no layer is quantized"):
        nunchaku.config({})
    header = nunchaku.metadata(lite, "NunchakuFluxTransformer2dModel", {"num_layers": 19})
    assert json.loads(header["quantization_config"])["rank"] == 32
    assert json.loads(header["config"]) == {"num_layers": 19}


# --- the traps: each fault gives another weight or is refused, and is never written


def in_comfy(**planted: Tensor) -> tuple[Any, Tensor]:
    source = golden("input_linear")["weight"]
    encoded = comfy.encode(quantized("nvfp4-nvfp4-static", weight=source))
    return encoded.tensors | planted, source


def error_in_comfy(tensors: dict[str, Tensor], source: Tensor) -> float:
    return relative(effective(comfy.decode(tensors, (N, K))), source)


def test_trap_nibble_order() -> None:
    tensors, source = in_comfy()
    assert error_in_comfy(tensors, source) == pytest.approx(0.0924, abs=1e-4)
    low_first = tensors | {"weight": layouts.swap_nibbles(tensors["weight"])}
    assert error_in_comfy(low_first, source) == pytest.approx(1.554, abs=2e-3)
    high_first = layer_of(golden("modelopt_nvfp4"))
    high_first["weight"] = layouts.swap_nibbles(high_first["weight"])
    assert relative(effective(modelopt.decode(high_first, (N, K), {"quant_algo": "NVFP4"})), source) > 1.5


def test_trap_modelopts_own_comfy_export_swizzles_without_swapping() -> None:
    file, source = layer_of(golden("modelopt_nvfp4")), golden("input_linear")["weight"]
    as_exported = file | {"weight_scale": layouts.block_scales(file["weight_scale"])}
    entry = {"format": "nvfp4"}
    assert relative(effective(comfy.decode(as_exported, (N, K), entry)), source) > 1.5
    as_exported["weight"] = layouts.swap_nibbles(file["weight"])
    assert relative(effective(comfy.decode(as_exported, (N, K), entry)), source) < 0.0925


def test_trap_scale_columns_padded_out_of_step() -> None:
    encoded = comfy.encode(quantized("nvfp4-nvfp4-static", 48, 32))
    assert encoded.tensors["weight_scale"].shape == (128, 4)
    padded = layouts.pad(encoded.tensors["weight_scale"], 1, 16)
    with pytest.raises(ValueError, match=r"swizzled scales have 2048 elements, \(48, 2\) block scales .* take 512"):
        comfy.decode(encoded.tensors | {"weight_scale": padded}, (48, 32))


def test_trap_scales_that_are_linear_where_swizzled_ones_have_the_same_shape() -> None:
    layer = quantized("nvfp4-nvfp4-static", 128, 64)
    layer.tensors["weight_scale"] = (torch.rand(128, 4) * 100 + 1).to(torch.float8_e4m3fn)
    encoded = comfy.encode(layer)
    linear = layer.tensors["weight_scale"]
    assert linear.shape == encoded.tensors["weight_scale"].shape
    assert relative(effective(comfy.decode(encoded.tensors, (128, 64))), effective(layer)) == 0
    wrong = comfy.decode(encoded.tensors | {"weight_scale": linear}, (128, 64))
    assert relative(effective(wrong), effective(layer)) > 0.3
    swizzled = dict(layer.tensors) | {"weight_scale": encoded.tensors["weight_scale"]}
    assert relative(effective(DIALECTS["bfl"].decode(swizzled, (128, 64), {})), effective(layer)) > 0.3


def test_trap_the_format_stands_in_the_tensor_and_in_the_header() -> None:
    encoded = comfy.encode(quantized("nvfp4-16bit"))
    assert comfy.read_entry(encoded.tensors["comfy_quant"]) == encoded.entry
    assert encoded.entry == {"format": "nvfp4", "full_precision_matrix_mult": True}
    header = json.loads(comfy.metadata({"blocks.0.qkv": encoded.entry})["_quantization_metadata"])
    assert header == {"format_version": "1.0", "layers": {"blocks.0.qkv": encoded.entry}}


def test_trap_reciprocal_global_scale() -> None:
    layer = quantized("nvfp4-nvfp4-static")
    encoded = compressed_tensors.encode(layer)
    stored = encoded.tensors["weight_global_scale"]
    assert stored.shape == (1,) and torch.equal(stored[0], 1 / layer.tensors["weight_scale_2"])
    assert torch.equal(encoded.tensors["input_global_scale"][0], 1 / layer.tensors["input_scale"])
    planted = encoded.tensors | {"weight_global_scale": 1 / stored}
    wrong = compressed_tensors.decode(planted, (N, K), encoded.entry)
    assert relative(effective(wrong), effective(layer)) > 1e3


def test_trap_scales_are_written_in_fp32() -> None:
    source = golden("input_linear")["weight"]
    amax = source.float().abs().max()
    for dialect, text, name, expected in (
        ("comfy", "fp8_tensor-fp8_tensor", "weight_scale", amax / 448),
        ("comfy", "nvfp4-nvfp4-static", "weight_scale_2", amax / 2688),
        ("torchao", "fp8_tensor-fp8_tensor", "_weight_scale", (amax / 448).reshape(1, 1)),
    ):
        encode = DIALECTS[dialect].encode
        assert encode is not None
        written = encode(quantized(text, weight=source)).tensors[name]
        assert same_bytes(written, expected) and written.bfloat16().float() != written
    scales = compressed_tensors.encode(quantized("fp8-16bit", weight=source)).tensors["weight_scale"]
    assert scales.dtype == torch.float32 and (scales.bfloat16().float() != scales).any()


def test_trap_a_scale_per_tensor_is_no_scale_per_row() -> None:
    encoded = bfl.encode(quantized("fp8-fp8"))
    assert encoded.tensors["weight_scale"].shape == (N,)
    with pytest.raises(ValueError, match=r"weight_scale is torch.float32 \(\), expected"):
        DIALECTS["bfl"].decode(encoded.tensors | {"weight_scale": torch.tensor(0.5)}, (N, K), {})


def test_trap_missing_input_scale() -> None:
    encoded = bfl.encode(quantized("nvfp4-nvfp4-static"))
    assert encoded.tensors["input_scale"].shape == ()
    del encoded.tensors["input_scale"]
    with pytest.raises(ValueError, match="no input_scale, which diffusers requires"):
        DIALECTS["bfl"].decode(encoded.tensors, (N, K), {})
    flux2_mixed, _ = in_comfy()
    del flux2_mixed["input_scale"]
    assert str(comfy.decode(flux2_mixed, (N, K)).scheme) == "nvfp4-nvfp4"


def test_trap_blocks_of_zeros() -> None:
    layer = comfy.decode(layer_of(golden("comfy_nvfp4")), (N, K))
    assert isinstance(layer, QuantTensors)
    scale = layer.tensors["weight_scale"].float()
    assert (scale > 0).all() and scale[:2, :2].eq(1).all()  # bytes 0 in the file
    zeroed = quantized("nvfp4-nvfp4-static")
    zeroed.tensors["weight_scale"][3, 5] = 0  # over codes that are not zero
    back = comfy.decode(comfy.encode(zeroed).tensors, (N, K))
    assert isinstance(back, QuantTensors)
    assert torch.equal(effective(back), effective(zeroed)) and effective(back)[3, 80:96].eq(0).all()
    tiny = quantized("nvfp4-nvfp4-static", weight=golden("input_linear")["weight"])
    for dialect in ("bfl", "comfy", "modelopt", "torchao", "compressed_tensors"):
        assert same_bytes(there_and_back(dialect, tiny).tensors["weight_scale"], tiny.tensors["weight_scale"])


@pytest.mark.parametrize(("dialect", "name"), [("bfl", "weight_scale"), ("torchao", "_weight_scale")])
def test_scales_of_zero_become_codes_of_zero(dialect: str, name: str) -> None:
    layer = quantized("fp8-fp8")
    row = DIALECTS[dialect]
    assert row.encode is not None
    encoded = row.encode(layer)
    encoded.tensors[name] = encoded.tensors[name].clone()
    encoded.tensors[name][7] = 0
    back = row.decode(encoded.tensors, (N, K), encoded.entry)
    assert isinstance(back, QuantTensors)
    expected = effective(layer)
    expected[7] = 0
    assert torch.equal(effective(back), expected) and back.tensors["weight_scale"][7] == 1
    encoded = bfl.encode(quantized("nvfp4-nvfp4-static"))
    for scalar in ("weight_scale_2", "input_scale"):
        with pytest.raises(ValueError, match=f"{scalar} is 0 or infinite"):
            DIALECTS["bfl"].decode(encoded.tensors | {scalar: torch.zeros(())}, (N, K), {})


def test_trap_e8m0_byte_zero() -> None:
    layer = quantized("mxfp8-mxfp8")
    layer.tensors["weight_scale"][2, 3] = 0
    back = comfy.decode(comfy.encode(layer).tensors, (N, K))
    assert isinstance(back, QuantTensors)
    assert effective(back)[2, 96:128].eq(0).all() and back.tensors["weight_scale"][2, 3] == 127
    for dialect in ("modelopt", "torchao", "compressed_tensors"):
        with pytest.raises(ValueError, match="E8M0 byte 0"):
            there_and_back(dialect, layer)
    layer.tensors["weight"][2, 96:128] = -0.0
    assert there_and_back("torchao", layer).tensors["weight_scale"][2, 3] == 127


# --- files that may be anything


@pytest.mark.parametrize("dialect", HOLDS)
def test_a_layer_that_is_not_as_its_dialect_has_it_is_refused(dialect: str) -> None:
    text = HOLDS[dialect].split()[1]
    layer = with_needs(dialect, quantized(text, 128, 128))
    row = DIALECTS[dialect]
    assert row.encode is not None
    encoded = row.encode(layer)
    optional = {"bias", "input_scale", "weight_shape", "wcscales", "wtscale", "_weight_zero_point", "comfy_quant"}
    optional |= {"smooth_orig"}
    newer = {old: name for name, old in nunchaku._OLDER.items()}
    for name, tensor in encoded.tensors.items():
        if name not in optional:
            with pytest.raises(ValueError):
                row.decode({k: v for k, v in encoded.tensors.items() if k != name}, layer.shape, encoded.entry)
        for wrong in (tensor.to(torch.float64), torch.cat([raw(tensor)] * 3).view(tensor.dtype)):
            with pytest.raises(ValueError, match=newer.get(name, name.removeprefix("_weight_"))):
                row.decode(encoded.tensors | {name: wrong}, layer.shape, encoded.entry)
    with pytest.raises(ValueError, match="nothing reads strange"):
        row.decode(encoded.tensors | {"strange": torch.ones(1)}, layer.shape, encoded.entry)
    with pytest.raises(ValueError):
        row.decode(encoded.tensors, (128, 64), encoded.entry)


def test_scales_that_are_no_scales_are_refused() -> None:
    for dialect, text, name in (
        ("bfl", "fp8-fp8", "weight_scale"),
        ("comfy", "nvfp4-nvfp4-static", "weight_scale"),
        ("comfy", "fp8_tensor-16bit", "weight_scale"),
        ("torchao", "nvfp4-16bit", "_weight_scale"),
        ("torchao", "int8-int8-smooth", "_weight_act_pre_scale"),
        ("compressed_tensors", "fp8-fp8", "weight_scale"),
        ("nunchaku_lite", "int4-int4", "smooth_factor"),
    ):
        row = DIALECTS[dialect]
        assert row.encode is not None
        encoded = row.encode(quantized(text, 128, 128))
        for bad in (torch.nan, -1.0):
            planted = encoded.tensors[name].clone().float()
            planted.reshape(-1)[0] = bad
            with pytest.raises(ValueError, match="NaN, infinite or negative"):
                row.decode(encoded.tensors | {name: planted.to(encoded.tensors[name].dtype)}, (128, 128), encoded.entry)
    mx = comfy.encode(quantized("mxfp8-mxfp8")).tensors
    raw(mx["weight_scale"])[0] = 255
    with pytest.raises(ValueError, match="byte 255"):
        comfy.decode(mx, (N, K))


def test_texts_in_tensors_may_be_anything() -> None:
    tensors = comfy.encode(quantized("int8-int8")).tensors
    for text in ("{", "[]", '{"format": "fp3"}', '{"format": ["nvfp4"]}', "{}", "x" * 5000, "[" * 4000):
        planted = tensors | {"comfy_quant": torch.tensor(list(text.encode()), dtype=torch.uint8)}
        with pytest.raises(ValueError, match="comfy"):
            comfy.decode(planted, (N, K))
    for entry in ({}, {"_type": "Float8Tensor"}, {"_type": "os.system", "_data": {}}, {"_type": [], "_data": {}}):
        with pytest.raises(ValueError, match="torchao: tensor class"):
            torchao.decode({}, (N, K), entry)


def planted(value: Any) -> list[Any]:
    """A JSON value with each part of it in turn left out, or replaced by what nobody expects there."""
    odd: tuple[Any, ...] = (None, True, -1, 4.0, 1 << 70, "", "x", [], {}, [[]], {"_type": "x", "_data": {}})
    if isinstance(value, dict):
        found: list[Any] = [{k: v for k, v in value.items() if k != key} for key in value]
        return found + [{**value, key: part} for key in value for part in (*odd, *planted(value[key]))]
    return list(odd)


@pytest.mark.parametrize("dialect", HOLDS)
def test_entries_may_be_anything(dialect: str) -> None:
    row = DIALECTS[dialect]
    assert row.encode is not None
    for text in HOLDS[dialect].split()[:6]:
        layer = with_needs(dialect, quantized(text, 128, 128))
        encoded = row.encode(layer)
        entries = planted(encoded.entry)
        tensors = {name: tensor for name, tensor in encoded.tensors.items() if name != "comfy_quant"}
        read = 0
        for entry in entries:
            try:
                row.decode(tensors, layer.shape, entry if isinstance(entry, dict) else {})
                read += 1
            except ValueError:
                pass
        assert read < len(entries) or dialect in ("bfl", "nunchaku", "nunchaku_lite")  # where tensors say it all


# --- what is only read, or has no format of ours


def test_fp8_files_of_before_comfy_quant() -> None:
    layer = quantized("fp8_tensor-fp8_tensor")
    old = {"weight": layer.tensors["weight"], "bias": layer.tensors["bias"]}
    old |= {"scale_weight": layer.tensors["weight_scale"], "scale_input": torch.tensor(0.5)}
    decode = DIALECTS["legacy"].decode
    back = decode(old, (N, K), {"scaled_fp8": 0})
    assert isinstance(back, QuantTensors) and str(back.scheme) == "fp8_tensor-fp8_tensor"
    assert torch.equal(effective(back), effective(layer)) and back.beside["input_scale"] == 0.5
    assert str(decode(old, (N, K), {"scaled_fp8": 2}).scheme) == "fp8_tensor-16bit"
    cast = decode({"weight": old["weight"]}, (N, K), {})
    assert torch.equal(effective(cast).float(), old["weight"].float())
    five = decode({"weight": torch.ones(2, 2).to(torch.float8_e5m2), "scale_weight": torch.tensor([3.0])}, (2, 2), {})
    assert isinstance(five, Plain) and five.weight.tolist() == [[3, 3], [3, 3]]
    assert effective(decode(old | {"scale_weight": torch.zeros(())}, (N, K), {})).eq(0).all()


def test_bitsandbytes_nf4_by_its_definition() -> None:
    g = torch.Generator().manual_seed(0)
    n, k, block = 24, 48, 64
    table = torch.linspace(-1, 1, 16)
    codes = torch.randint(0, 16, (n * k,), generator=g)
    absmax = torch.rand(n * k // block, generator=g)
    state = {"shape": [n, k], "blocksize": block, "dtype": "bfloat16", "quant_type": "nf4"}

    def tensors(said: dict[str, Any], **more: Tensor) -> dict[str, Tensor]:
        named = {f"weight.{name}": tensor for name, tensor in more.items()}
        text = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        packed = (codes[0::2] * 16 + codes[1::2]).to(torch.uint8).unsqueeze(1)
        rest = {"weight": packed, "weight.quant_map": table, "weight.quant_state.bitsandbytes__nf4": text}
        return rest | named

    decode = DIALECTS["bnb"].decode
    expected = (table[codes] * absmax.repeat_interleave(block)).reshape(n, k)
    assert torch.equal(decode(tensors(state, absmax=absmax), (n, k), {}).weight, expected)
    numbers, indices = torch.rand(256, generator=g), torch.randint(0, 256, (18,), generator=g)
    nested = state | {"nested_blocksize": 16, "nested_offset": 0.25}
    outer = torch.tensor([2.0, 3.0])
    double = numbers[indices] * torch.tensor([2.0] * 16 + [3.0] * 2) + 0.25
    planted = tensors(nested, absmax=indices.to(torch.uint8), nested_absmax=outer, nested_quant_map=numbers)
    expected = (table[codes] * double.repeat_interleave(block)).reshape(n, k)
    assert torch.equal(decode(planted, (n, k), {}).weight, expected)
    for wrong in ({"shape": [k, n]}, {"blocksize": 0}, {"blocksize": 1 << 40}, {"blocksize": "64"}):
        with pytest.raises(ValueError, match="bnb"):
            decode(tensors(state | wrong, absmax=absmax), (n, k), {})
    with pytest.raises(ValueError, match="quant_state"):
        decode({"weight": torch.zeros(4, 4, dtype=torch.int8)}, (4, 4), {})


def test_codes_that_no_format_of_ours_holds_become_a_plain_weight() -> None:
    layer = quantized("int8-int8", 32, 64)
    layer.tensors["weight"][0, 0] = -128
    for dialect in ("comfy", "torchao", "compressed_tensors"):
        back = there_and_back(dialect, layer)
        assert isinstance(back, Plain) and "-128" in back.why
        assert torch.equal(back.weight, layer.linear().quantized_weight.dequantize())
        assert back.bias is not None and same_bytes(back.bias, layer.tensors["bias"])
    int4 = quantized("int4-16bit", 32, 64)
    encoded = comfy.encode(int4)
    zeros = encoded.tensors["weight_zeros"] + 0.5
    back = comfy.decode(encoded.tensors | {"weight_zeros": zeros}, (32, 64))
    assert isinstance(back, Plain) and torch.equal(back.weight, effective(int4).float() + 0.5)
    awq = nunchaku.encode(quantized("int4-16bit", 128, 64)).tensors
    back = nunchaku.decode(awq | {"wzeros": awq["wzeros"] + 1}, (128, 64))
    assert isinstance(back, Plain)


# --- the programs themselves, where they are installed


def exported(dialect: str, text: str, n: int, k: int) -> tuple[QuantTensors, Any]:
    layer = quantized(text, n, k)
    encode = DIALECTS[dialect].encode
    assert encode is not None
    return layer, encode(layer)


def codes_alone(layer: QuantTensors) -> Tensor:
    """What the codes stand for, without factors of x."""
    return layer.linear().quantized_weight.dequantize()


@pytest.mark.parametrize("text", HOLDS["bfl"].split())
def test_diffusers_reads_bfl_layers(text: str) -> None:
    from diffusers.quantizers.bfl.bfl_quantizer import BFLQuantizer
    from diffusers.quantizers.bfl.utils import _dequantize_weight
    from diffusers.quantizers.quantization_config import BFLQuantizationConfig

    for n, k in ((N, K), (48, 32)):
        layer, encoded = exported("bfl", text, n, k)
        state = {f"block.{name}": tensor for name, tensor in encoded.tensors.items()}
        read = BFLQuantizer(BFLQuantizationConfig()).maybe_update_state_dict(state)
        assert read.keys() == {"block.weight", "block.bias"}
        assert torch.equal(_dequantize_weight(read["block.weight"]), codes_alone(layer))


def test_comfy_kitchen_reads_comfy_layers() -> None:
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    layouts_of = {
        "float8_e4m3fn": ("TensorCoreFP8Layout", {"scale": "weight_scale"}),
        "nvfp4": ("TensorCoreNVFP4Layout", {"scale": "weight_scale_2", "block_scale": "weight_scale"}),
        "mxfp8": ("TensorCoreMXFP8Layout", {"scale": "weight_scale"}),
        "int8_tensorwise": ("TensorWiseINT8Layout", {"scale": "weight_scale"}),
        "awq_w4a16": ("TensorCoreAWQW4A16Layout", {"scale": "weight_scale", "zeros": "weight_zeros"}),
    }
    for text in HOLDS["comfy"].split():
        for n, k in ((N, 384), (40, 384)):
            layer, encoded = exported("comfy", text, n, k)
            name, parts = layouts_of[encoded.entry["format"]]
            params = {part: encoded.tensors[key] for part, key in parts.items()}
            if "group_size" in encoded.entry:
                params["group_size"] = encoded.entry["group_size"]
            built = get_layout_class(name).Params(**params, orig_dtype=torch.float32, orig_shape=(n, k))
            weight = QuantizedTensor(encoded.tensors["weight"], name, built).dequantize()[:n, :k]
            assert torch.equal(weight, codes_alone(layer)), text


def test_torchao_reads_torchao_layers() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.core.config import config_from_dict, config_to_dict
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )

    for text in HOLDS["torchao"].split():
        for n, k in ((N, K), (48, 32)):
            layer, encoded = exported("torchao", text, n, k)
            file = {f"block.{name}": tensor for name, tensor in encoded.tensors.items()}
            header = torchao.metadata({"block": encoded.entry}, ["block.bias"])
            state, left = unflatten_tensor_state_dict(file, header)
            assert not left
            values = state["block.weight"].dequantize(torch.float32).float()
            if encoded.entry["_type"] == "Int8Tensor":  # which multiplies in the dtype of the model
                assert relative(values, codes_alone(layer)) < 2.0**-8
            else:
                assert torch.equal(values, codes_alone(layer)), text
            assert flatten_tensor_state_dict(state)[1] == header
            written = torchao.config({"block": encoded.entry}, ["proj_out"])["quant_type"]["default"]
            assert config_to_dict(config_from_dict(written)) == written


def test_compressed_tensors_reads_its_layers() -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    for text in HOLDS["compressed_tensors"].split():
        layer, encoded = exported("compressed_tensors", text, 48, 384)
        described = compressed_tensors.config({"block": encoded.entry}, [])
        QuantizationConfig.model_validate(described)
        group = {key: value for key, value in described["config_groups"]["group_0"].items() if key != "format"}
        scheme = QuantizationScheme.model_validate(group)
        compressor = BaseCompressor.get_value_from_registry(encoded.entry["format"])
        assert infer_module_format(torch.nn.Linear, scheme).value == encoded.entry["format"], text
        weight = compressor.decompress(dict(encoded.tensors), scheme)["weight"]
        loss = 2.0**-8 if weight.dtype == torch.bfloat16 else 2.0**-22
        assert relative(weight, codes_alone(layer)) < loss, text


def test_modelopt_reads_its_layers() -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    layer, encoded = exported("modelopt", "nvfp4-nvfp4-static", N, K)
    t = encoded.tensors
    tensor = NVFP4QTensor(torch.Size((N, K)), torch.float32, t["weight"])
    read = tensor.dequantize(scale=t["weight_scale"], double_scale=t["weight_scale_2"], block_sizes={-1: 16})
    assert torch.equal(read, codes_alone(layer))
    entries = {"a": encoded.entry, "b": exported("modelopt", "fp8-fp8", N, K)[1].entry}
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": entries, "exclude_modules": ["c"]}
    producer = {"name": "modelopt", "version": "0.47.0"}
    theirs = convert_hf_quant_config_format({"producer": producer, "quantization": quantization})
    ours = modelopt.config(entries, ["c"], "0.47.0")
    assert {key: ours[key] for key in theirs} == theirs


@pytest.mark.parametrize("name", ["gguf_q8_0", "gguf_q4_0", "gguf_q4_k", "gguf_q6_k"])
def test_gguf_blocks_decode_to_what_their_definition_says(name: str) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    file, kind = golden(name), header_of(name)["type"]
    reference = file.pop("__dequant_ref")
    n, k = reference.shape
    decoded = DIALECTS["gguf"].decode(file, (n, k), {"type": kind})
    assert isinstance(decoded, Plain) and torch.equal(decoded.weight, reference)
    by_hand = {"gguf_q8_0": q8_0, "gguf_q4_0": q4_0, "gguf_q4_k": q4_k, "gguf_q6_k": q6_k}[name]
    blocks = file["weight"].reshape(n * k // (256 if kind.endswith("K") else 32), -1)
    assert torch.allclose(decoded.weight, by_hand(blocks).reshape(n, k), rtol=1e-6)
    with pytest.raises(ValueError, match=f"bytes of {kind} are no weight"):
        DIALECTS["gguf"].decode(file, (n, 2 * k), {"type": kind})
    with pytest.raises(ValueError, match="'IQ1_S' are not read here"):
        DIALECTS["gguf"].decode(file, (n, k), {"type": "IQ1_S"})


def halves(block: Tensor, at: int) -> Tensor:
    return block[:, at : at + 2].contiguous().view(torch.float16).float()


def q8_0(block: Tensor) -> Tensor:
    return halves(block, 0) * block[:, 2:].contiguous().view(torch.int8)


def q4_0(block: Tensor) -> Tensor:
    return halves(block, 0) * (torch.cat([block[:, 2:] & 15, block[:, 2:] >> 4], dim=1).float() - 8)


def q4_k(block: Tensor) -> Tensor:
    """Eight runs of 32: 6-bit scales and minima, packed in 12 bytes, times one fp16 number each."""
    six = block[:, 4:16].int()
    low, mid, high = six[:, 0:4], six[:, 4:8], six[:, 8:12]
    scale = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    minimum = torch.cat([mid & 63, (high >> 4) | (mid >> 6 << 4)], dim=1)
    quants = block[:, 16:].reshape(-1, 4, 1, 32) >> torch.tensor([0, 4]).reshape(1, 1, 2, 1) & 15
    runs = quants.reshape(-1, 8, 32).float()
    return (halves(block, 0) * scale).unsqueeze(-1) * runs - (halves(block, 2) * minimum).unsqueeze(-1)


def q6_k(block: Tensor) -> Tensor:
    """Sixteen runs of 16: 4 low and 2 high bits of each code + 32, int8 scales, one fp16 number."""
    low = block[:, :128].reshape(-1, 2, 1, 64) >> torch.tensor([0, 4]).reshape(1, 1, 2, 1) & 15
    high = block[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6]).reshape(1, 1, 4, 1) & 3
    codes = (low.reshape(-1, 16, 16).int() | high.reshape(-1, 16, 16).int() << 4) - 32
    scale = halves(block, 208) * block[:, 192:208].contiguous().view(torch.int8)
    return scale.unsqueeze(-1) * codes


def test_bitsandbytes_golden_decodes_to_its_producers_values() -> None:
    file = golden("bnb_nf4")
    reference = file.pop("__dequant_ref")
    decoded = DIALECTS["bnb"].decode(file, (N, K), {})
    assert isinstance(decoded, Plain) and decoded.bias is not None
    assert torch.equal(decoded.weight.bfloat16(), reference)
    assert relative(decoded.weight, golden("input_linear")["weight"]) < 0.1


def test_comfys_int8_golden_has_codes_that_are_not_ours() -> None:
    file = golden("comfy_int8")
    decoded = comfy.decode(layer_of(file), (N, K))
    assert isinstance(decoded, Plain) and "-128" in decoded.why
    assert torch.equal(decoded.weight.bfloat16(), file["__dequant_ref"])
