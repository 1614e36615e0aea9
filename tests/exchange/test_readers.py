"""Layers as we write them, read by the programs themselves where they are installed; and what is only read here."""

import json
import os
import random
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from exchange_files import export
from exchange_readers import READERS
from safetensors.torch import load_file
from shared import said_by
from torch import Tensor

from fluxq.base.model import resolve_model
from fluxq.kernels.encode import input_scale_for
from fluxq.kernels.ops import quantize_activation
from fluxq.kernels.transforms import rotate
from fluxq.quantize.exchange import comfy, compressed_tensors, modelopt, torchao
from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.layer import Plain, QuantTensors
from fluxq.quantize.nearest import quantize_weight
from fluxq.recipes.formats import FORMATS, REGULAR_HADAMARDS, Scheme
from fluxq.recipes.plan import LayerPlan
from tests.exchange.test_layers import (
    HOLDS,
    K,
    N,
    codes_alone,
    effective,
    golden,
    header_of,
    layer_of,
    quantized,
    relative,
    same_bytes,
)


def exported(dialect: str, text: str, n: int, k: int) -> tuple[QuantTensors, Any]:
    layer = quantized(text, n, k)
    encode = DIALECTS[dialect].encode
    assert encode is not None
    return layer, encode(layer)


def formats_read_by(program: str, dialect: str) -> set[str]:
    """Formats that docs/exchange.md says a program was run on."""
    (reader,) = [each for each in READERS if (each.program, each.dialect) == (program, dialect)]
    return set(reader.formats)


@pytest.mark.reader("diffusers", "bfl")
def test_diffusers_reads_bfl_layers() -> None:
    from diffusers.quantizers.bfl.bfl_quantizer import BFLQuantizer
    from diffusers.quantizers.bfl.utils import _dequantize_weight
    from diffusers.quantizers.quantization_config import BFLQuantizationConfig

    formats = set()
    for text, (n, k) in product(HOLDS["bfl"].split(), ((N, K), (48, 32))):
        layer, encoded = exported("bfl", text, n, k)
        state = {f"block.{name}": tensor for name, tensor in encoded.tensors.items()}
        read = BFLQuantizer(BFLQuantizationConfig()).maybe_update_state_dict(state)
        assert read.keys() == {"block.weight", "block.bias"}
        assert torch.equal(_dequantize_weight(read["block.weight"]), codes_alone(layer)), text
        formats.add(encoded.entry["format"])
    assert formats == formats_read_by("diffusers", "bfl")


@pytest.mark.reader("comfy-kitchen", "comfy")
def test_comfy_kitchen_reads_comfy_layers() -> None:
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    layouts_of = {
        "float8_e4m3fn": ("TensorCoreFP8Layout", {"scale": "weight_scale"}),
        "nvfp4": ("TensorCoreNVFP4Layout", {"scale": "weight_scale_2", "block_scale": "weight_scale"}),
        "mxfp8": ("TensorCoreMXFP8Layout", {"scale": "weight_scale"}),
        "int8_tensorwise": ("TensorWiseINT8Layout", {"scale": "weight_scale"}),
        "awq_w4a16": ("TensorCoreAWQW4A16Layout", {"scale": "weight_scale", "zeros": "weight_zeros"}),
        "svdquant_w4a4": ("TensorCoreSVDQuantW4A4Layout", {"scale": "weight_scale"} | SVDQUANT),
    }
    formats = set()
    for text in HOLDS["comfy"].split():
        for n, k in ((N, 384), (40, 384)):
            layer, encoded = exported("comfy", text, n, k)
            name, parts = layouts_of[encoded.entry["format"]]
            params = {part: encoded.tensors[key] for part, key in parts.items()}
            if encoded.entry["format"] == "svdquant_w4a4":  # what it makes of the dtype of the scales is not the weight
                params = {part: tensor.float() for part, tensor in params.items()}
            params |= {name: encoded.entry[name] for name in _OPTIONS if name in encoded.entry}
            built = get_layout_class(name).Params(**params, orig_dtype=torch.float32, orig_shape=(n, k))
            weight = QuantizedTensor(encoded.tensors["weight"], name, built).dequantize()[:n, :k]
            ours = rotate(codes_alone(layer), layer.scheme.hadamard, layer.scheme.regular)
            if encoded.entry["format"] == "svdquant_w4a4":  # which it decodes by its product with 1
                assert relative(weight, effective(layer)) < 2.0**-22, text
            else:
                assert torch.equal(weight, ours), text
            formats.add(encoded.entry["format"])
    assert formats | {"convrot_w4a4", "asym_w4a8_int8"} == formats_read_by("comfy-kitchen", "comfy")


SVDQUANT = {name: f"weight_{name}" for name in ("proj_down", "proj_up", "smooth_factor")}


@pytest.mark.reader("comfy-kitchen", "comfy")
def test_comfy_kitchen_decodes_its_rotated_4_bit_layers_as_we_do() -> None:
    """Drawn layers of every kind it rounds to, bit for bit in fp32, whatever of ours they become."""
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    kinds, draw, found = ({}, {"bits": 6}, {"symmetric": False}, {"codebook": False}), random.Random(0), set()
    for seed in range(60):
        size, g = draw.choice((4, 16, 64, 256)), torch.Generator().manual_seed(seed)
        n, k = draw.randint(1, 130), 64 * draw.randint(1, 6) if size < 64 else size * draw.randint(1, 2)
        w = torch.randn(n, k, generator=g) * torch.randn(n, 1, generator=g).exp()
        w[:, draw.randrange(k)] *= draw.choice((1, 30))
        w = w.to(draw.choice((torch.float32, torch.bfloat16)))
        asym = {"group_size": draw.choice((16, 32)), "scale_dtype": draw.choice((torch.float32, torch.float8_e4m3fn))}
        for layout, how in (("TensorCoreConvRotW4A4Layout", {}), ("AsymW4A8Int8Layout", asym | kinds[seed % 4])):
            codes, params = get_layout_class(layout).quantize(w, convrot_groupsize=size, **how)
            held = QuantizedTensor(codes, layout, replace(params, orig_dtype=torch.float32))
            entry = {"format": "asym_w4a8_int8" if how else "convrot_w4a4", "convrot_groupsize": size}
            entry |= {"group_size": how["group_size"]} if how else {"quant_group_size": 64}
            ours = comfy.decode(held.state_dict("weight"), (n, k), entry)
            assert torch.equal(ours.collapsed()[0], held.dequantize()), (seed, layout)
            found.add((entry["format"], "" if isinstance(ours, Plain) else str(ours.scheme).partition("-hr")[0]))
    in_8_bits = {(name, "int8-int8") for name in ("convrot_w4a4", "asym_w4a8_int8")}
    assert found == in_8_bits | {("convrot_w4a4", "int4-int4"), ("convrot_w4a4", ""), ("asym_w4a8_int8", "")}


@pytest.mark.reader("comfy-kitchen", "comfy")
def test_comfy_kitchen_multiplies_its_rotated_4_bit_layers_as_we_do() -> None:
    """asym_w4a8_int8 rounds x as ours does; the codes of x of convrot_w4a4 have other scales."""
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    from comfy_kitchen.tensor import QuantizedTensor

    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(40, 512, generator=g), torch.randn(9, 512, generator=g) + 1
    for layout, most in (("AsymW4A8Int8Layout", 1e-3), ("TensorCoreConvRotW4A4Layout", 0.25)):
        held = QuantizedTensor.from_float(w, layout, convrot_groupsize=256)
        entry = {"format": "asym_w4a8_int8" if most < 0.1 else "convrot_w4a4"}
        ours = comfy.decode(held.state_dict("weight"), (40, 512), entry)
        assert isinstance(ours, QuantTensors)
        assert relative(ours.linear()(x), torch.nn.functional.linear(x, held)) < most


_OPTIONS = ("group_size", "convrot", "convrot_groupsize")


@pytest.mark.slow
@pytest.mark.reader("comfy-kitchen", "comfy")
def test_comfy_kitchen_rotates_and_rounds_a_thousand_layers_to_our_codes() -> None:
    """From fp32 weights: those in 16 bit it rotates in 16 bit, we in fp32."""
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    from comfy_kitchen.tensor import QuantizedTensor as Theirs
    from comfy_kitchen.tensor import get_layout_class

    layout, draw = get_layout_class("TensorWiseINT8Layout"), random.Random(0)
    for seed in range(1000):
        size = draw.choice(REGULAR_HADAMARDS)
        n, k, g = draw.randint(1, 130), size * draw.randint(1, 1024 // size), torch.Generator().manual_seed(seed)
        w = torch.randn(n, k, generator=g) * torch.randn(n, 1, generator=g).exp()
        w[:, draw.randrange(k)] *= draw.choice((1, 30))
        plan = LayerPlan("layer", n, k, "", "", False, Scheme.parse(f"int8-int8-hr{size}"), "")
        layer = QuantTensors(quantize_weight(w, plan).tensors(), (n, k), Scheme.parse(f"int8-int8-hr{size}"))
        codes, params = layout.quantize(w, per_channel=True, convrot=True, convrot_groupsize=size)
        written = comfy.encode(layer)
        assert torch.equal(codes, written.tensors["weight"]), seed
        assert torch.equal(params.scale, written.tensors["weight_scale"]), seed
        marker = {"convrot": params.convrot, "convrot_groupsize": params.convrot_groupsize}
        assert written.entry == {"format": "int8_tensorwise", **marker}
        back = comfy.decode(written.tensors, (n, k))
        assert isinstance(back, QuantTensors) and same_bytes(back.tensors["weight"], codes)
        read = Theirs(codes, "TensorWiseINT8Layout", params).dequantize()
        assert torch.equal(read, back.collapsed()[0]), seed


@pytest.mark.reader("comfy-kitchen", "comfy")
def test_comfy_kitchen_multiplies_a_rotated_layer_as_ours_does() -> None:
    """In fp32; it rotates 16-bit x in 16 bit, where ours has fp32."""
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    import comfy_kitchen

    for size in REGULAR_HADAMARDS:
        layer, encoded = exported("comfy", f"int8-int8-hr{size}", 40, 512)
        x = torch.randn(9, 512, generator=torch.Generator().manual_seed(7)) + 1
        codes, scale, bias = (encoded.tensors[name] for name in ("weight", "weight_scale", "bias"))
        how = {"convrot": True, "convrot_groupsize": size}
        theirs = comfy_kitchen.int8_linear(x, codes, scale, bias.float(), torch.float32, **how)
        assert relative(layer.linear()(x), theirs) < 1e-3  # a code of x here and there


def test_comfy_kitchen_rounds_x_to_our_codes_under_a_calibrated_scale() -> None:
    """It multiplies by 1 / scale in bf16, which is exact for powers of two alone."""
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    from comfy_kitchen.tensor import get_layout_class

    x, row = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16() * 3, FORMATS["fp8_tensor"]
    for amax in (x.abs().max(), x.abs().max() / 3):  # of which the latter clips
        scale = input_scale_for(amax, row)
        theirs, _ = get_layout_class("TensorCoreFP8Layout").quantize(x, scale=scale)
        ours = quantize_activation(x, row, scale).codes
        assert torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))
    theirs, _ = get_layout_class("TensorCoreFP8Layout").quantize(x, scale=1.3 * scale)
    assert not torch.equal(theirs.float(), quantize_activation(x, row, 1.3 * scale).codes.float())


@pytest.mark.reader("diffusers", "torchao")
def test_torchao_reads_torchao_layers() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.core.config import config_from_dict, config_to_dict
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )

    formats = set()
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
            formats.add(encoded.entry["_type"])
            written = torchao.config({"block": encoded.entry}, ["proj_out"])["quant_type"]["default"]
            assert config_to_dict(config_from_dict(written)) == written
    assert formats == formats_read_by("diffusers", "torchao")


@pytest.mark.reader("transformers", "compressed_tensors")
def test_compressed_tensors_reads_its_layers() -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    formats = set()
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
        formats.add(encoded.entry["format"])
    assert formats == formats_read_by("transformers", "compressed_tensors")


@pytest.mark.reader("ModelOpt", "modelopt")
def test_modelopt_reads_its_layers() -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    layer, encoded = exported("modelopt", "nvfp4-nvfp4-static", N, K)
    t = encoded.tensors
    tensor = NVFP4QTensor(torch.Size((N, K)), torch.float32, t["weight"])
    read = tensor.dequantize(scale=t["weight_scale"], double_scale=t["weight_scale_2"], block_sizes={-1: 16})
    assert torch.equal(read, codes_alone(layer))
    assert {encoded.entry["quant_algo"]} == formats_read_by("ModelOpt", "modelopt")
    entries = {"a": encoded.entry, "b": exported("modelopt", "fp8-fp8", N, K)[1].entry}
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": entries, "exclude_modules": ["c"]}
    producer = {"name": "modelopt", "version": "0.47.0"}
    theirs = convert_hf_quant_config_format({"producer": producer, "quantization": quantization})
    ours = modelopt.config(entries, ["c"], "0.47.0")
    assert {key: ours[key] for key in theirs} == theirs


NUNCHAKU = os.environ.get("FLUXQ_NUNCHAKU", "")
READ_NUNCHAKU = """
import json, sys
from unittest.mock import MagicMock
checkout, precision, file, out = sys.argv[1:]
sys.path.insert(0, checkout)
sys.modules["nunchaku._C"] = sys.modules["nunchaku._C.ops"] = MagicMock()  # its CUDA kernels, which no loader calls
from nunchaku.__version__ import __version__
from nunchaku.models.transformers import transformer_flux_v2
from nunchaku.utils import get_precision_from_quantization_config
from safetensors import safe_open
from safetensors.torch import save_file
transformer_flux_v2.get_precision = lambda: precision  # which it takes from the GPU
model = transformer_flux_v2.NunchakuFluxTransformer2DModelV2.from_pretrained(file, device="cpu")
held = model.state_dict()
for name, module in model.named_modules():
    if getattr(module, "wtscale", None) is not None:
        held[f"{name}.wtscale"] = module.wtscale
save_file({name: tensor.contiguous() for name, tensor in held.items()}, out)
with safe_open(file, "pt") as stream:
    config = json.loads(stream.metadata()["quantization_config"])
names = transformer_flux_v2.convert_flux_state_dict({name: name for name in safe_open(file, "pt").keys()})
assert "fluxq" not in sys.modules
print(json.dumps([__version__, get_precision_from_quantization_config(config), names]))
"""


@pytest.mark.skipif(not NUNCHAKU, reason="FLUXQ_NUNCHAKU names no checkout of nunchaku")
@pytest.mark.reader("nunchaku", "nunchaku")
@pytest.mark.parametrize(("recipe", "precision"), [("int4-svd", "int4"), ("nvfp4", "nvfp4")])
def test_nunchakus_own_loader_takes_its_files(recipe, precision, plain_checkpoint, tmp_path) -> None:
    file, read = tmp_path / "x.safetensors", tmp_path / "read.safetensors"
    export(resolve_model(str(plain_checkpoint(recipe))), "nunchaku", file, requantize=recipe == "nvfp4")
    said = "fp4" if precision == "nvfp4" else "int4"
    command = [sys.executable, "-c", READ_NUNCHAKU, NUNCHAKU, said, str(file), str(read)]
    version, header, renamed = json.loads(said_by(command, tmp_path).splitlines()[-1])
    (reader,) = [each for each in READERS if each.program == "nunchaku"]
    assert (version, header) == (reader.version, precision)
    assert {f"svdq_w4a4 {precision}", "awq_w4a16"} <= formats_read_by("nunchaku", "nunchaku")
    held, written = load_file(read), load_file(file)
    assert held.keys() == renamed.keys()
    for name, own in renamed.items():
        assert same_bytes(held[name], written[own]), name


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


def test_comfys_int8_golden_has_codes_of_minus_128() -> None:
    file = golden("comfy_int8")
    decoded = comfy.decode(layer_of(file), (N, K))
    assert isinstance(decoded, QuantTensors) and (decoded.tensors["weight"] == -128).any()
    assert torch.equal(effective(decoded).bfloat16(), file["__dequant_ref"])
