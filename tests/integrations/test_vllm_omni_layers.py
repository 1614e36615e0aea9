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
EXPERTS = {"transformer": "int8-int8", "transformer_2": "fp8-fp8"}


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
    source = SimpleNamespace(prefix="transformer.", subfolder="transformer")
    given = dict(layers.adapter_of(outer, source, config).adapt(iter(files)))
    kept = {name for name, _ in files if ".norm." not in name}
    assert given.keys() == kept | {"transformer.norm.weight", "transformer.norm.bias"}
    assert torch.equal(given["transformer.norm.weight"], ours["norm"].dequantized(torch.float32).weight)
    assert "makes 1 layers of this checkpoint in 16 bit" in caplog.text
    less = [(name, tensor) for name, tensor in files if name != "transformer.norm.weight"]
    with pytest.raises(ValueError, match=r"the weight files lack weight of norm: copy them again"):
        dict(layers.adapter_of(outer, source, config).adapt(iter(less)))


def test_layers_are_found_whatever_the_engine_calls_them(layers) -> None:
    stored = ["blocks.0.ffn.net.0.proj", "blocks.0.ffn.net.2", "blocks.0.attn1.to_out.0"]
    config = config_of(dict.fromkeys(stored, "int8-int8"))
    called = ["blocks.0.ffn.net_0.proj", "transformer_2.blocks.0.ffn.net_2", "transformer.blocks.0.attn1.to_out"]
    assert [config.get_quant_method(LinearBase([N]), name).names for name in called] == [[name] for name in stored]
    assert config.stored_name("transformer_blocks.0.attn1.to_out") is None


def test_experts_of_a_pipeline_have_their_own_configurations(layers) -> None:
    """Wan has two, and vLLM-Omni hands over that of the first with the weights of both."""
    pipe = nn.Module()
    configs = {each: config_of({"proj": scheme}) for each, scheme in EXPERTS.items()}
    for name, config in configs.items():
        model = nn.Module()
        model.proj = LinearBase([N])
        model.proj.quant_method = config.get_quant_method(model.proj, "proj")
        pipe.add_module(name, model)
    pipe.transformer_3 = nn.Module()
    pipe.transformer_3.proj = nn.Linear(K, N)
    first = configs["transformer"]

    def adapter(name: str, config=first):
        return layers.adapter_of(pipe, SimpleNamespace(prefix=f"{name}.", subfolder=name), config)

    assert [adapter(name).config for name in configs] == [*configs.values()]
    assert adapter("transformer_2", None).config is configs["transformer_2"]
    assert adapter("transformer_3", None) is None
    plain = [("transformer_3.proj.weight", torch.ones(N, K))]
    assert [*adapter("transformer_3").adapt(plain)] == plain
    with pytest.raises(
        ValueError, match=r"transformer_3\.proj\.weight_scale is of a quantized model.*diffusion-load-format"
    ):
        dict(adapter("transformer_3").adapt([("transformer_3.proj.weight_scale", torch.ones(N))]))


@pytest.mark.parametrize("axis", ["N", "K"])
def test_a_centered_layer_brings_its_bias_where_the_engine_has_none(layers, axis) -> None:
    scheme, whole = "int8-int8-center", quantized("int8-int8-center")
    config, x = config_of({"proj": scheme}), torch.randn(3, K, dtype=torch.bfloat16)
    made = []
    for rank in range(2):
        model = nn.Module()
        model.proj = LinearBase([N], axis, rank, 2, bias=False)
        model.proj.quant_method = config.get_quant_method(model.proj, "proj")
        model.proj.create(model.proj.quant_method)
        adapter = layers.adapter_of(model, SimpleNamespace(prefix="", subfolder="transformer"), config)
        for name, tensor in adapter.adapt([(f"proj.{name}", tensor) for name, tensor in whole.state_dict().items()]):
            parameter = model.get_parameter(name)
            parameter.weight_loader(parameter, tensor)
        model.proj.quant_method.process_weights_after_loading(model.proj)
        made.append(model.proj)
    expected = [shard(whole, axis, rank, 2) for rank in range(2)]
    for layer, share in zip(made, expected, strict=True):
        assert torch.equal(layer.fluxq_parts[0].bias, share.bias)
    if axis == "N":
        computed = torch.cat([layer.quant_method.apply(layer, x) for layer in made], -1)
        assert torch.equal(computed, whole(x))


def test_a_bias_that_has_no_place_is_refused(layers) -> None:
    model, whole = nn.Module(), quantized("int8-int8-center")
    model.to_qkv = LinearBase([N] * 3, bias=False)
    config = config_of({"to_q": "int8-int8-center"})  # of three that are one Linear
    adapter = layers.adapter_of(model, SimpleNamespace(prefix="", subfolder="transformer"), config)
    with pytest.raises(ValueError, match="to_q centers its inputs, and vLLM-Omni's to_qkv has no bias: serve it with"):
        dict(adapter.adapt([(f"to_q.{name}", tensor) for name, tensor in whole.state_dict().items()]))


@pytest.mark.parametrize(
    ("runtime", "prefer", "said"),
    [
        ({}, "speed", ""),
        ({"prefer": "memory", "of_next_year": 1}, "memory", ""),
        ({"prefer": "sped"}, "", "does not lay layers out for a GPU: quantization_config.runtime.prefer"),
        ({"prefer": "decoded"}, "", "is for products of a CPU"),
        ({"attention": "fp8"}, "speed", "asks for attention, which vLLM-Omni's own models do not know"),
    ],
)
def test_runtime_chooses_how_a_gpu_lays_layers_out(layers, caplog, monkeypatch, runtime, prefer, said) -> None:
    stored = QuantizationConfig.of([("proj", Scheme.parse("int8-int8"))], runtime=runtime)
    config = layers.FluxqVllmConfig(stored)
    assert config.prefer == prefer and said in caplog.text and bool(said) == bool(caplog.text)


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
    with pytest.raises(ValueError, match=r"proj\.weight is in the weight files.*copy them again"):
        parameter.weight_loader(parameter, whole.weight)
    with pytest.raises(ValueError, match="no part 'k'"):
        parameter.weight_loader(parameter, whole.weight, "k")
    with pytest.raises(ValueError, match="the weight files lack weight_scale of proj"):
        method.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match=r"proj\.weight is torch\.int8 \(64, 128\), and a layer of .*\(32, 128\) has"):
        load(created(config, [N // 2]), {None: whole})
    small = config_of({"proj": "nvfp4-nvfp4"})
    with pytest.raises(ValueError, match=r"proj on rank 1 of 16: .*fewer ranks.*--diffusion-load-format diffusers"):
        load(created(small, [N], "K", 1, 16), {None: quantized("nvfp4-nvfp4")})


def created(config, *how) -> LinearBase:
    layer = LinearBase(*how)
    layer.create(config.get_quant_method(layer, "proj"))
    return layer


@pytest.mark.parametrize("is_made_in_16_bit", [False, True])
@pytest.mark.parametrize("scheme", ["int8-int8", "nvfp4-nvfp4-static-center", "mxfp8-mxfp8", "fp8_128x128-fp8_1x128"])
def test_another_dtype_is_refused_and_never_read_as_numbers(layers, scheme, is_made_in_16_bit) -> None:
    config, whole = config_of({"proj": scheme}), quantized(scheme)

    def loaded(tensors) -> None:
        if is_made_in_16_bit:
            dict(layers.FluxqCheckpointAdapter({}, config, "", set()).adapt((f"proj.{k}", v) for k, v in tensors))
            return
        layer = created(config, [N])
        for name, tensor in tensors:
            if name != "bias":
                parameter = layer.get_parameter(name)
                parameter.weight_loader(parameter, tensor)

    stored = whole.state_dict()
    loaded(stored.items())
    with pytest.raises(ValueError, match=r"proj\.weight.* twice: copy"):
        loaded([*stored.items(), ("weight", stored["weight"])])
    for name, tensor in stored.items():
        of_one_byte = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]
        wrong = [tensor.to(torch.int32), tensor.double()]
        if tensor.element_size() == 1:
            wrong = [tensor.view(dtype) for dtype in of_one_byte if dtype != tensor.dtype] + [tensor.float()]
        for other in wrong if name != "bias" or is_made_in_16_bit else ():
            with pytest.raises(ValueError, match=rf"proj\.{name} is {other.dtype} .*copy the weight files"):
                loaded([*(stored | {name: other}).items()])


@pytest.mark.parametrize("part", ["weight", "weight_scale", "svdquant_lora_a"])
def test_codes_and_branches_of_a_layer_without_a_scheme_are_refused(layers, part) -> None:
    adapter = layers.FluxqCheckpointAdapter({}, config_of({"proj": "int8-int8"}), "", set())
    with pytest.raises(ValueError, match=f"other.{part} is of a quantized model"):
        list(adapter.adapt([(f"other.{part}", torch.ones(2, 2, dtype=torch.int8))]))
