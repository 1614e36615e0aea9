"""Layers in the layouts of other programs: to and fro, against files that those programs wrote, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchange_readers import rounds
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fluxq.kernels.linear import branch_shapes
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.exchange import bfl, comfy, compressed_tensors, modelopt, nunchaku, torchao
from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.layer import CrossedBlocks, Plain, QuantTensors, join, split
from fluxq.recipes.formats import Scheme

GOLDEN = Path(__file__).parents[1] / "golden"
N, K = 160, 192

# What each dialect holds; every other scheme of SCHEMES it must refuse.
HOLDS = {
    "bfl": "fp8-fp8 nvfp4-nvfp4-static",
    "modelopt": (
        "fp8-fp8 fp8_tensor-fp8_tensor-static mxfp8-mxfp8 mxfp4-mxfp4 nvfp4-nvfp4-static nvfp4-nvfp4-static-smooth "
        "nvfp4-nvfp4-static-r16 nvfp4-nvfp4-static-smooth-r16 nvfp4-16bit int8-int8 int8-int8-smooth int8-16bit "
        "int4_g128-16bit int4_g128-16bit-smooth fp8_128x128-16bit"
    ),
    "fp8_blocks": "fp8_128x128-fp8_1x128",
    "comfy": (
        "fp8_tensor-fp8_tensor fp8_tensor-fp8_tensor-static fp8_tensor-16bit mxfp8-mxfp8 mxfp8-16bit nvfp4-nvfp4 "
        "nvfp4-nvfp4-static nvfp4-nvfp4-static-smooth nvfp4-16bit int8-int8 int8-16bit int4-16bit int4_g128-16bit "
        "int8-int8-hr16 int8-16bit-hr16 int4-int4 int4-int4-smooth-r32"
    ),
    "torchao": (
        "fp8-fp8 fp8-16bit fp8_tensor-fp8_tensor fp8_tensor-16bit mxfp8-mxfp8 mxfp4-mxfp4 nvfp4-nvfp4 "
        "nvfp4-nvfp4-static nvfp4-16bit int8-int8 int8-int8-smooth int8-16bit"
    ),
    "nunchaku": "nvfp4-nvfp4 nvfp4-nvfp4-smooth-r32 int4-int4 int4-int4-smooth-r32 int4-16bit",
    "compressed_tensors": (
        "fp8-fp8 fp8-16bit fp8_tensor-fp8_tensor fp8_tensor-fp8_tensor-static fp8_tensor-16bit mxfp8-mxfp8 mxfp8-16bit "
        "mxfp4-mxfp4 mxfp4-16bit "
        "nvfp4-nvfp4-static nvfp4-16bit int8-int8 int8-16bit int4-16bit int4_g128-16bit "
        "fp8_128x128-fp8_1x128 fp8_128x128-16bit"
    ),
}
HOLDS["nunchaku_lite"] = HOLDS["nunchaku"]
# Held too, but what comes back is another scheme, and a note says why.
HOLDS_OTHERWISE = {
    "bfl": {"fp8-16bit": "fp8-fp8"},
    "modelopt": {"fp8-16bit": "fp8-fp8"},
    "fp8_blocks": {"fp8_128x128-16bit": "fp8_128x128-fp8_1x128"},
    "comfy": {"fp8_tensor-fp8": "fp8_tensor-fp8_tensor"},
    "torchao": {"fp8_tensor-fp8_tensor-static": "fp8_tensor-fp8_tensor"},
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
        "int8-int8-h32",
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
    """With the input_scale that ModelOpt's int8 asks for and no scheme of ours stores."""
    if dialect == "modelopt" and str(layer.scheme).split("-smooth")[0] == "int8-int8":
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


def codes_alone(layer: QuantTensors) -> Tensor:
    """Return the weight that the codes stand for, without factors of x."""
    return layer.linear().quantized_weight.dequantize()


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# --- native -> dialect -> native


def shapes_for(dialect: str, scheme: str) -> list[tuple[int, int]]:
    if dialect.startswith("nunchaku"):
        return [(128, 128), (256, 384)]
    if scheme.startswith("int4_g128"):
        return [(40, 384)]
    if scheme.startswith("fp8_128x128"):
        return [(N, 256), (40, 128), (300, 384)]
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
            rounded = {name for row in DIALECTS[dialect].rows for name in rounds(row) if row.weights in text}
            rounded -= set() if text in otherwise else {"pre_quant_scale"}  # powers of two, whose reciprocals are exact
            rounded |= {"input_scale"} if "-static" in text and "-static" not in str(back.scheme) else set()
            for name in (layer.tensors.keys() | back.tensors.keys()) - rounded:
                assert same_bytes(back.tensors[name], layer.tensors[name]), (text, shape, name)
            for name, value in layer.beside.items():
                assert same_bytes(back.beside[name], value), (text, name)
            assert relative(effective(back), effective(layer)) < 2e-4 if rounded else True
            again = there_and_back(dialect, back)
            assert again.scheme == back.scheme
            for name in back.tensors:
                assert same_bytes(again.tensors[name], back.tensors[name]), (text, name)


def in_blocks(n: int = 200, k: int = 256, **tensors: Any) -> dict[str, Tensor]:
    """A layer as transformers and DeepSeek write it."""
    q = QuantizedTensor.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), "fp8_128x128")
    return {"weight": q.codes, "weight_scale_inv": q.scale, **tensors}


@pytest.mark.parametrize(
    ("k", "entry", "tensors", "scheme"),
    [
        (256, {"activations": "dynamic", "block": [128, 128]}, {}, "fp8_128x128-fp8_1x128"),
        (200, {}, {}, "fp8_128x128-16bit"),  # K is not in groups of x
        (256, {"activations": "static"}, {"activation_scale": torch.tensor(0.5)}, "fp8_128x128-fp8_tensor-static"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_of_128_by_128_keep_their_codes(k: int, entry: dict, tensors: dict, scheme: str, dtype: Any) -> None:
    held = in_blocks(k=k, **tensors)
    held["weight_scale_inv"] = held["weight_scale_inv"].to(dtype)
    layer = DIALECTS["fp8_blocks"].decode(held, (200, k), entry)
    assert isinstance(layer, QuantTensors) and str(layer.scheme) == scheme
    assert same_bytes(layer.tensors["weight"], held["weight"])
    scale = held["weight_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :k]
    assert torch.equal(codes_alone(layer), held["weight"].float() * scale)


def test_blocks_that_cannot_be_are_refused_by_name() -> None:
    lost, zero = in_blocks(), in_blocks()
    lost["weight_scale_inv"][0, 1] = 0
    zero["weight_scale_inv"][1, 0] = 0
    zero["weight"][128:, :128] = 0
    for held, entry, words in (
        (in_blocks(), {"block": [64, 128]}, r"weight_block_size \[64, 128\] is not read"),
        (in_blocks(), {"fmt": "e5m2"}, "fmt 'e5m2' is not read here, e4m3 is"),
        (in_blocks(), {"activations": "static"}, "is static, and the layer has no activation_scale"),
        (in_blocks(activation_scale=torch.ones(())), {"activations": "dynamic"}, "is dynamic, and the layer has an"),
        (in_blocks(weight_scale_inv=torch.ones(2, 3)), {}, r"weight_scale_inv is .*\(2, 3\), expected .*\(2, 2\)"),
        (in_blocks(weight_scale_inv=-torch.ones(2, 2)), {}, "NaN, infinite or negative"),
        (lost, {}, "scales of 0 over codes that are not"),
    ):
        with pytest.raises(ValueError, match=words):
            DIALECTS["fp8_blocks"].decode(held, (200, 256), entry)
    layer = DIALECTS["fp8_blocks"].decode(zero, (200, 256), {})
    assert isinstance(layer, QuantTensors) and layer.tensors["weight_scale"][1, 0] == 1


def test_rows_that_share_scales_stay_together() -> None:
    layer = quantized("fp8_128x128-fp8_1x128", 384, 256)
    q, k, v = split(layer, [128, 128, 128])
    assert torch.equal(torch.cat([codes_alone(part) for part in (q, k, v)]), codes_alone(layer))
    assert same_bytes(join([q, k, v]).tensors["weight_scale"], layer.tensors["weight_scale"])
    order = torch.cat([torch.arange(128, 384), torch.arange(128)])
    assert torch.equal(codes_alone(layer.reordered(order)), codes_alone(layer)[order])
    short = quantized("fp8_128x128-fp8_1x128", 100, 256)
    for crossing in (
        lambda: split(layer, [192, 192]),
        lambda: layer.reordered(torch.arange(383, -1, -1)),
        lambda: layer.reordered(torch.arange(384).roll(64)),
        lambda: join([short, q]),
    ):
        with pytest.raises(CrossedBlocks, match=r"blocks? of 128 rows"):
            crossing()
    assert join([q, short]).shape == (228, 256)


def test_a_dialect_names_what_it_cannot_hold() -> None:
    for dialect, text, words in (
        ("bfl", "nvfp4-nvfp4", "needs a calibrated input_scale"),
        ("bfl", "int8-int8", "no format for int8 weights; it holds fp8, nvfp4"),
        ("bfl", "fp8_tensor-fp8_tensor", "no format for fp8_tensor"),
        ("comfy", "fp8-fp8", "no format for fp8 weights"),
        ("comfy", "int8-int8-center", "subtracts a mean from x at run time"),
        ("torchao", "fp8-fp8-h64", "rotates x by Sylvester's Hadamard matrix at run time"),
        ("torchao", "int8-int8-hr64", "rotates x by the regular Hadamard matrix at run time"),
        ("comfy", "int8-int8-h64", "rotates x by Sylvester's Hadamard matrix at run time"),
        ("torchao", "nvfp4-nvfp4-static-r16", "has a low-rank branch"),
        ("torchao", "mxfp8-16bit", "with mxfp8 activations, not as mxfp8-16bit"),
        ("modelopt", "int8-int8", "needs input_scale, which the scheme int8-int8 does not store"),
        ("compressed_tensors", "nvfp4-nvfp4-static-46", "chooses between two scales"),
    ):
        with pytest.raises(ValueError, match=words):
            there_and_back(dialect, quantized(text))
    for dialect, row in DIALECTS.items():
        if row.encode is not None:
            with pytest.raises(ValueError, match=r"no format for fp8_e5m2 weights; it holds "):
                there_and_back(dialect, quantized("fp8_e5m2-fp8_e5m2"))
    with pytest.raises(ValueError, match="N in multiples of 128, this layer has N = 160"):
        there_and_back("nunchaku", quantized("int4-int4"))
    with pytest.raises(ValueError, match="K in multiples of 128, this layer has K = 192"):
        there_and_back("nunchaku", quantized("int4-int4", 128, 192))


def test_notes_say_what_a_reader_computes_otherwise() -> None:
    encode = DIALECTS["bfl"].encode
    assert encode is not None
    assert encode(quantized("fp8-fp8")).notes == ()
    assert "x is computed in fp8 there" in encode(quantized("fp8-16bit")).notes[0]


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
    "comfy_fp8_e4m3": "fp8_tensor-fp8_tensor-static",
    "comfy_mxfp8": "mxfp8-mxfp8",
    "comfy_nvfp4": "nvfp4-nvfp4-static",
    "ct_mxfp4": "mxfp4-mxfp4",
    "ct_mxfp8": "mxfp8-mxfp8",
    "ct_nvfp4": "nvfp4-nvfp4-static",
    "modelopt_fp8": "fp8_tensor-fp8_tensor-static",
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
    fp8, nvfp4 = (bfl.encode(quantized(text)).entry for text in ("fp8-fp8", "nvfp4-nvfp4-static"))
    assert bfl.metadata({"layer": nvfp4}) == {"quantization": "nvfp4", "format": "pt"}  # as SGLang's own tests have it
    assert bfl.metadata({"a": fp8, "b": nvfp4}) == {"quantization": "nvfp4+fp8r", "format": "pt"}
    assert bfl.said_formats(bfl.metadata({"a": fp8, "b": nvfp4})) == {"fp8r", "nvfp4"}
    for other in ({}, {"quantization": "int8"}, {"quantization": "nvfp4+int8"}, {"quantization": ""}):
        assert not bfl.said_formats(other)
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


def test_a_group_that_names_a_layer_comes_before_one_of_all_linears() -> None:
    groups = {"all": {"targets": ["Linear"], "format": "a"}, "some": {"targets": ["re:.*wo$"], "format": "b"}}
    model: Any = SimpleNamespace(quantization={"config_groups": groups})
    entry = DIALECTS["compressed_tensors"].entry
    assert [entry(model, name, {})["format"] for name in ("block.wi", "block.wo")] == ["a", "b"]


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


@pytest.mark.parametrize(("dialect", "name"), [("bfl", "weight_scale"), ("torchao", "_weight_scale")])
def test_scales_of_zero_are_of_codes_of_zero(dialect: str, name: str) -> None:
    layer = quantized("fp8-fp8")
    row = DIALECTS[dialect]
    assert row.encode is not None
    encoded = row.encode(layer)
    encoded.tensors[name] = encoded.tensors[name].clone()
    encoded.tensors[name][7] = 0
    with pytest.raises(ValueError, match="scales of 0 over codes that are not, in "):
        row.decode(encoded.tensors, (N, K), encoded.entry)
    encoded.tensors["_weight_qdata" if dialect == "torchao" else "weight"][7] = -0.0
    back = row.decode(encoded.tensors, (N, K), encoded.entry)
    assert isinstance(back, QuantTensors)
    expected = effective(layer)
    expected[7] = 0
    assert torch.equal(effective(back), expected) and back.tensors["weight_scale"][7] == 1
    encoded = bfl.encode(quantized("nvfp4-nvfp4-static"))
    for scalar in ("weight_scale_2", "input_scale"):
        with pytest.raises(ValueError, match=f"{scalar} is 0 or infinite"):
            DIALECTS["bfl"].decode(encoded.tensors | {scalar: torch.zeros(())}, (N, K), {})


# --- files that may be anything


@pytest.mark.parametrize("dialect", HOLDS)
def test_a_layer_that_is_not_as_its_dialect_has_it_is_refused(dialect: str) -> None:
    held = HOLDS[dialect].split()
    text = held[1 % len(held)]
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


def marked(layer: QuantTensors, entry: dict[str, Any]) -> dict[str, Tensor]:
    """Return ComfyUI's tensors of a layer, whose marker says something else."""
    return comfy.encode(layer).tensors | {
        "comfy_quant": torch.tensor(list(json.dumps(entry).encode()), dtype=torch.uint8)
    }


def test_a_rotated_layer_of_comfyui_says_the_size_of_its_blocks() -> None:
    encoded = comfy.encode(quantized("int8-int8-hr64"))
    assert encoded.entry == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    assert comfy.encode(quantized("int8-int8")).entry == {"format": "int8_tensorwise"}
    plain = quantized("int8-int8", k=512)
    for said, scheme in (
        ({"convrot": True}, "int8-int8-hr256"),  # the size that ComfyUI takes where none is said
        ({"params": {"convrot": True, "convrot_groupsize": 16}}, "int8-int8-hr16"),
        ({"convrot": False, "convrot_groupsize": 3}, "int8-int8"),
        ({"convrot": True, "full_precision_matrix_mult": True}, "int8-16bit-hr256"),
        ({"convrot": True, "orig_dtype": "torch.bfloat16", "per_row": True}, "int8-int8-hr256"),
    ):
        assert str(comfy.decode(marked(plain, {"format": "int8_tensorwise", **said}), (N, 512)).scheme) == scheme


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"convrot_groupsize": 128}, "convrot_groupsize 128 is no power of 4, as 16, 64 and 256 are"),
        ({"convrot_groupsize": 0}, "convrot_groupsize 0 is no power of 4"),
        ({"convrot_groupsize": -16}, "convrot_groupsize -16 is no power of 4"),
        ({"convrot_groupsize": "256"}, "convrot_groupsize '256' is no power of 4"),
        ({"convrot_groupsize": 16.0}, r"convrot_groupsize 16\.0 is no power of 4"),
        ({"convrot_groupsize": True}, "convrot_groupsize True is no power of 4"),
        ({"convrot_groupsize": 256}, "convrot_groupsize 256 does not divide K = 192"),
        ({}, "convrot_groupsize 256 does not divide K = 192"),
        ({"convrot": "yes", "convrot_groupsize": 64}, "convrot is 'yes', expected true or false"),
        ({"convrot": 1, "convrot_groupsize": 64}, "convrot is 1, expected true or false"),
        ({"format": "mxfp8", "convrot_groupsize": 64}, "mxfp8 with convrot is none that ComfyUI has"),
        ({"convrot_groupsize": float("nan")}, "convrot_groupsize nan is no power of 4"),
        ({"convrot_groupsize": 4**16}, "convrot_groupsize 4294967296 is no power of 4"),
        ({"convrot_groupsize": 64, "params": {"convrot": False}}, "says convrot True, and in params False"),
        ({"convrot_groupsize": 64, "full_precision_matrix_mult": "false"}, "mult 'false', expected true or false"),
        ({"convrot_groupsize": 64, "orig_shape": [N, 2 * K]}, r"orig_shape \[\d+, 384\] is not that of the weight"),
        ({"convrot_groupsize": 64, "transposed": True}, "says transposed True, which nothing here reads"),
        ({"convrot_groupsize": 64, "rotation": "sylvester"}, "says rotation 'sylvester', which nothing here reads"),
        ({"convrot_groupsize": 64, "convr0t": True}, r"unknown key 'convr0t' \(did you mean 'convrot'\?\)"),
        ({"convrot_groupsizo": 64}, r"unknown key 'convrot_groupsizo' \(did you mean 'convrot_groupsize'\?\)"),
    ],
)
def test_a_marker_of_rotation_that_cannot_be_so_is_refused(said: dict[str, Any], words: str) -> None:
    layer = quantized("mxfp8-mxfp8" if said.get("format") == "mxfp8" else "int8-int8")
    with pytest.raises(ValueError, match=words):
        comfy.decode(marked(layer, {"format": "int8_tensorwise", "convrot": True, **said}), (N, K))
    factors = marked(layer, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64})
    if layer.scheme.weights.name == "int8":
        with pytest.raises(ValueError, match="convrot and pre_quant_scale"):
            comfy.decode(factors | {"pre_quant_scale": torch.ones(K)}, (N, K))


def test_a_rotation_of_another_size_is_read_as_a_weight() -> None:
    """In blocks of 4, which comfy-kitchen multiplies and no kernel of ours does."""
    layer = quantized("int8-int8")
    found = comfy.decode(marked(layer, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 4}), (N, K))
    assert isinstance(found, Plain) and found.why == "its columns are rotated in blocks of 4"
    h = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    assert relative(found.weight, (codes_alone(layer).reshape(-1, 4) @ h).reshape(N, K)) < 1e-6


def test_texts_in_tensors_may_be_anything() -> None:
    tensors = comfy.encode(quantized("int8-int8")).tensors
    twice = '{"format": "int8_tensorwise", "convrot": true, "convrot": false}'
    for text in ("{", "[]", '{"format": "fp3"}', '{"format": ["nvfp4"]}', "{}", "x" * 5000, "[" * 4000, twice):
        planted = tensors | {"comfy_quant": torch.tensor(list(text.encode()), dtype=torch.uint8)}
        with pytest.raises(ValueError, match="'convrot' stands twice" if text == twice else "comfy"):
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


@pytest.mark.often(1)
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
    assert isinstance(back, QuantTensors) and str(back.scheme) == "fp8_tensor-fp8_tensor-static"
    assert torch.equal(effective(back), effective(layer)) and back.tensors["input_scale"] == 0.5
    widened = decode(old, (N, K), {"scaled_fp8": 2})
    assert str(widened.scheme) == "fp8_tensor-16bit" and widened.beside["input_scale"] == 0.5
    cast = decode({"weight": old["weight"]}, (N, K), {})
    assert torch.equal(effective(cast).float(), old["weight"].float())
    five = decode({"weight": torch.ones(2, 2).to(torch.float8_e5m2), "scale_weight": torch.tensor([3.0])}, (2, 2), {})
    assert isinstance(five, Plain) and five.weight.tolist() == [[3, 3], [3, 3]]
    with pytest.raises(ValueError, match="scales of 0 over codes"):
        decode(old | {"scale_weight": torch.zeros(())}, (N, K), {})


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


def test_an_int8_code_of_minus_128_stays_and_is_computed_with() -> None:
    layer = quantized("int8-int8", 32, 64)
    layer.tensors["weight"][0, 0] = -128
    for dialect in ("comfy", "torchao", "compressed_tensors"):
        back = there_and_back(dialect, layer)
        assert isinstance(back, QuantTensors) and same_bytes(back.tensors["weight"], layer.tensors["weight"])
        weight = back.linear().quantized_weight.dequantize()
        assert weight[0, 0] == -128 * layer.tensors["weight_scale"][0]
        x = torch.zeros(1, 64, dtype=torch.bfloat16)
        x[0, 0] = 127  # whose code is 127, of scale 1
        expected = -127 * 128 * layer.tensors["weight_scale"][0] + layer.tensors["bias"][0].float()
        assert back.linear()(x)[0, 0] == expected.bfloat16()


def test_codes_that_no_format_of_ours_holds_become_a_plain_weight() -> None:
    int4 = quantized("int4-16bit", 32, 64)
    encoded = comfy.encode(int4)
    zeros = encoded.tensors["weight_zeros"] + 0.5
    back = comfy.decode(encoded.tensors | {"weight_zeros": zeros}, (32, 64))
    assert isinstance(back, Plain) and torch.equal(back.weight, effective(int4).float() + 0.5)
    awq = nunchaku.encode(quantized("int4-16bit", 128, 64)).tensors
    back = nunchaku.decode(awq | {"wzeros": awq["wzeros"] + 1}, (128, 64))
    assert isinstance(back, Plain)


def test_scales_of_other_groups_and_dtypes_become_a_plain_weight() -> None:
    g = torch.Generator().manual_seed(0)
    layer = quantized("int4_g128-16bit", 32, 256)
    encoded = modelopt.encode(layer)
    scale = encoded.tensors["weight_scale"] * 1.001  # no numbers of bf16
    back = modelopt.decode(encoded.tensors | {"weight_scale": scale}, (32, 256), encoded.entry)
    assert isinstance(back, Plain) and torch.allclose(back.weight, effective(layer).float() * 1.001, rtol=1e-5)

    codes = torch.randn(200, 320, generator=g).to(torch.float8_e4m3fn)
    blocks = torch.rand(2, 3, generator=g) + 0.5
    entry = {"format": "float-quantized", "weights": {"strategy": "block", "block_structure": [128, 128]}}
    back = compressed_tensors.decode({"weight": codes, "weight_scale": blocks}, (200, 320), entry)
    assert isinstance(back, QuantTensors) and str(back.scheme) == "fp8_128x128-16bit"
    weight = codes_alone(back)
    assert weight[127, 127] == codes[127, 127].float() * blocks[0, 0]
    assert weight[128, 319] == codes[128, 319].float() * blocks[1, 2]
    for changed, words in (
        ({"weights": {"strategy": "block", "block_structure": [64, 128]}}, r"blocks of \[64, 128\] are not read"),
        ({"input_activations": {"strategy": "token", "dynamic": True}}, "blocks with inputs of .*'token'.* not read"),
    ):
        with pytest.raises(ValueError, match=words):
            compressed_tensors.decode({"weight": codes, "weight_scale": blocks}, (200, 320), entry | changed)

    encoded = compressed_tensors.encode(layer)
    rounded = encoded.entry | {"input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}
    back = compressed_tensors.decode(encoded.tensors, (32, 256), rounded)
    assert isinstance(back, Plain) and torch.equal(back.weight, effective(layer).float())
    assert back.bias is not None and "rounded activations" in back.why

    encoded = torchao.encode(quantized("int8-int8", 32, 64))
    scale = torch.rand(32, 4, generator=g)
    grouped = {"_weight_scale": scale, "_weight_zero_point": torch.zeros(32, 4, dtype=torch.int8)}
    back = torchao.decode(encoded.tensors | grouped, (32, 64), encoded.entry)
    assert isinstance(back, Plain) and back.bias is not None
    assert torch.equal(back.weight, encoded.tensors["_weight_qdata"].float() * scale.repeat_interleave(16, 1))
