"""Layers for vLLM-Omni's own models, against doubles of vLLM's Linears."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from fluxq.integrations import vllm_omni
from fluxq.kernels.linear import QuantLinear, branch_shapes
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.formats import Scheme
from fluxq.runtime.shard import shard

K, N = 128, 64


class LinearBase(nn.Module):
    """A Linear of vLLM as a method sees it."""

    def __init__(self, sizes: list[int], axis: str = "N", rank: int = 0, ranks: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.sizes, self.axis, self.tp_rank, self.tp_size, self.skip_bias_add = sizes, axis, rank, ranks, False
        by = ranks if axis == "N" else 1
        self.bias = nn.Parameter(torch.zeros(sum(sizes) // by, dtype=torch.bfloat16)) if bias else None

    def create(self, method) -> None:
        by_n, by_k = (self.tp_size, 1) if self.axis == "N" else (1, self.tp_size)
        sizes = [size // by_n for size in self.sizes]
        method.create_weights(self, K // by_k, sizes, K, sum(self.sizes), torch.bfloat16, weight_loader=None)


@pytest.fixture
def layers(monkeypatch):
    """The module, with vLLM's classes doubled."""
    linear, base = ModuleType("vllm.model_executor.layers.linear"), ModuleType("base_config")
    vars(linear).update(LinearBase=LinearBase, LinearMethodBase=object, UnquantizedLinearMethod=type("Plain", (), {}))
    vars(base)["QuantizationConfig"] = type("QuantizationConfig", (), {})
    inc = ModuleType("vllm.model_executor.layers.quantization.inc")
    vars(inc)["INCConfig"] = type("INCConfig", (vars(base)["QuantizationConfig"],), {})
    monkeypatch.setitem(sys.modules, inc.__name__, inc)
    for name in (
        "vllm",
        "vllm.model_executor",
        "vllm.model_executor.layers",
        "vllm.model_executor.layers.quantization",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, linear.__name__, linear)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.quantization.base_config", base)
    monkeypatch.delitem(sys.modules, "fluxq.integrations.vllm_omni_layers", raising=False)
    import fluxq.integrations.vllm_omni_layers as module

    yield module
    sys.modules.pop("fluxq.integrations.vllm_omni_layers", None)


def quantized(scheme: str, seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    parsed, weight = Scheme.parse(scheme), torch.randn(N, K)
    branches = {name: torch.rand(shape).bfloat16() + 0.5 for name, shape in branch_shapes(parsed, N, K).items()}
    q = QuantizedTensor.quantize(weight, parsed.weights)
    input_scale = torch.tensor(0.02) if parsed.static_input else None
    return QuantLinear.from_quantized(q, torch.randn(N).bfloat16(), parsed, input_scale, branches)


def config_of(schemes: dict[str, str]):
    named = ((name, Scheme.parse(scheme)) for name, scheme in schemes.items())
    return vllm_omni.build_config(
        **{k: v for k, v in QuantizationConfig.of(named).to_dict().items() if k != "quant_method"}
    )


def load(layer: LinearBase, parts: dict[object, QuantLinear]) -> None:
    for shard_id, part in parts.items():
        for name, tensor in part.state_dict().items():
            if name != "bias":
                parameter = layer.get_parameter(name)
                parameter.weight_loader(parameter, tensor, *(() if shard_id is None else (shard_id,)))


@pytest.mark.parametrize("scheme", ["int8-int8-center-smooth", "nvfp4-nvfp4-static", "fp8-fp8", "int4-int4-r8"])
def test_a_joined_linear_computes_what_its_parts_do_bit_for_bit(layers, scheme) -> None:
    parts = {shard_id: quantized(scheme, seed) for seed, shard_id in enumerate("qkv")}
    config = config_of({f"blocks.0.attn.to_{each}": scheme for each in parts})
    layer = LinearBase([N, N, N])
    method = config.get_quant_method(layer, "transformer.blocks.0.attn.to_qkv")
    layer.create(method)
    load(layer, parts)
    layer.bias.data = torch.cat([part.bias for part in parts.values()])
    method.process_weights_after_loading(layer)
    x = torch.randn(2, 5, K, dtype=torch.bfloat16)
    assert torch.equal(method.apply(layer, x, layer.bias), torch.cat([part(x) for part in parts.values()], -1))
    assert {name for name, _ in layer.named_parameters(recurse=False)} == {"bias"}


@pytest.mark.parametrize("axis", ["N", "K"])
def test_every_rank_gets_its_share_of_codes_scales_and_bias(layers, axis) -> None:
    whole = quantized("nvfp4-nvfp4")
    config = config_of({"blocks.0.ff.net.2": "nvfp4-nvfp4"})
    for rank in range(2):
        layer = LinearBase([N], axis, rank, 2)
        method = config.get_quant_method(layer, "blocks.0.ff.net.2")
        layer.create(method)
        load(layer, {None: whole})
        layer.bias.data = whole.bias.data.chunk(2)[rank] if axis == "N" else whole.bias.data
        method.process_weights_after_loading(layer)
        expected, (made,) = shard(whole, axis, rank, 2), layer.fluxq_parts
        assert layer.fluxq_is_row_parallel == (axis == "K")
        assert made.state_dict().keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            held = made.state_dict()[name]
            assert held.dtype == tensor.dtype and torch.equal(held.float(), tensor.float()), name


def test_layers_that_are_not_quantized_or_only_in_part_stay_plain(layers) -> None:
    config = config_of({"blocks.0.attn.to_q": "int8-int8", "blocks.0.proj": "int8-int8"})
    plain = layers.UnquantizedLinearMethod
    assert isinstance(config.get_quant_method(LinearBase([N] * 3), "blocks.0.attn.to_qkv"), plain)
    assert isinstance(config.get_quant_method(LinearBase([N]), "text_encoder.fc1"), plain)
    assert config.get_quant_method(nn.Linear(2, 2), "blocks.0.proj") is None


def test_layers_that_the_engine_makes_in_16_bit_get_the_weights_of_their_codes(layers, caplog) -> None:
    model = nn.Module()
    model.proj, model.norm = LinearBase([N]), nn.Linear(K, N)
    config = config_of({"proj": "int8-int8", "norm": "nvfp4-nvfp4"})
    model.proj.quant_method = config.get_quant_method(model.proj, "proj")
    ours = {"proj": quantized("int8-int8"), "norm": quantized("nvfp4-nvfp4", 1)}
    files = [
        (f"transformer.{name}.{part}", tensor)
        for name, layer in ours.items()
        for part, tensor in layer.state_dict().items()
    ]
    files.append(("transformer.scale_shift_table", torch.ones(3)))
    outer = nn.Module()
    outer.transformer = model
    given = dict(layers.adapter_of(outer, SimpleNamespace(prefix="transformer.", subfolder="transformer"), config).adapt(iter(files)))
    kept = {name for name, _ in files if ".norm." not in name}
    assert given.keys() == kept | {"transformer.norm.weight", "transformer.norm.bias"}
    assert torch.equal(given["transformer.norm.weight"], ours["norm"].dequantized(torch.bfloat16).weight)
    assert "makes 1 layers of this checkpoint in 16 bit" in caplog.text


def test_what_does_not_fit_is_named(layers) -> None:
    config = config_of({"proj": "int8-int8"})
    layer = LinearBase([N])
    method = config.get_quant_method(layer, "proj")
    with pytest.raises(ValueError, match="proj has 2 parts in vLLM-Omni and 1 in the checkpoint"):
        LinearBase([N, N]).create(method)
    cut = config_of({"proj": "fp8_tensor-fp8_tensor"}).get_quant_method(layer, "proj")
    with pytest.raises(ValueError, match="proj: fp8_tensor activations have one scale for all tokens"):
        LinearBase([N], "K", 0, 2).create(cut)
    layer.create(method)
    parameter, whole = layer.weight, quantized("int8-int8")
    parameter.weight_loader(parameter, whole.weight)
    with pytest.raises(ValueError, match=r"proj\.weight is in the weight files"):
        parameter.weight_loader(parameter, whole.weight)
    with pytest.raises(ValueError, match="no part 'k'"):
        parameter.weight_loader(parameter, whole.weight, "k")
    with pytest.raises(ValueError, match="the weight files lack weight_scale of proj"):
        method.process_weights_after_loading(layer)
