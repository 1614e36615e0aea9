"""Tests of what computes a pipeline, and of its memory: the same for equal arithmetic, and for nothing else."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import fluxq
from fluxq import tiny
from fluxq.eval.images.sides import BACKENDS, NATIVE, Side, quantized_layers
from fluxq.eval.metrics.figures import ARITHMETICS, computed
from fluxq.eval.speed.served import model_bytes, rounded_to, served, stored_bits
from fluxq.kernels import ops, tiles
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.record import bits_per_weight, read_record
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.runtime.layout import lay_out
from fluxq.runtime.prepare import prepare


@pytest.fixture(scope="module")
def side(checkpoint):
    return Side("tiny-nvfp4", str(checkpoint("nvfp4")), "digest")


@pytest.fixture(scope="module")
def native(side):
    return served(side.open(), "cpu")


def test_as_stored_it_takes_the_bits_of_the_record(side, native, checkpoint):
    record = read_record(checkpoint("nvfp4"))
    assert native.arithmetic == NATIVE and computed(native) == "as stored"
    assert native.bits_per_weight == pytest.approx(bits_per_weight(record.components), abs=1e-3)
    assert native.resident_bytes == record.components[0].bytes_after
    pipe = side.open()
    assert native.pipeline_bytes == model_bytes(pipe.components) > native.resident_bytes
    bits, weights = stored_bits(pipe)
    assert bits / weights == pytest.approx(native.bits_per_weight)
    assert sum(native.layers.values()) == len(quantized_layers(pipe)) == 38
    assert served(side.open(), "cpu") == native


@pytest.mark.often(1)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != NATIVE])
def test_another_arithmetic_is_named_and_takes_its_own_memory(side, native, backend):
    pipe = replace(side, backend=backend).open()
    found = served(pipe, "cpu")
    formats = {layer.scheme.weights.name for layer in quantized_layers(pipe).values() if layer.prepared}
    assert found.arithmetic == ("int8" if formats == {"int8"} else "8bit")
    assert found.digest != native.digest and found.layers != native.layers
    assert found.bits_per_weight > native.bits_per_weight + 2 and found.resident_bytes > native.resident_bytes
    bits, weights = stored_bits(pipe)  # the files stay what they are
    assert bits / weights == pytest.approx(native.bits_per_weight)


@pytest.mark.slow
def test_what_prepare_makes_is_the_side_with_that_arithmetic_and_no_other(side, native):
    pipe = side.open()
    prepare(pipe, device="cpu")
    expected = served(replace(side, backend="int8").open(), "cpu") if ops.int_mm_is_exact("cpu") else native
    assert served(pipe, "cpu") == expected


def test_one_layer_computed_otherwise_is_another_arithmetic(side, native):
    pipe = side.open()
    name, layer = next((n, each) for n, each in quantized_layers(pipe).items() if each.scheme.activations)
    layer.scheme = replace(layer.scheme, activations=None, static_input=False)
    found = served(pipe, "cpu")
    assert found.digest != native.digest and sum(found.layers.values()) == 38, name


def test_attention_counts_too(side, native):
    pipe = side.open()
    fluxq.set_attention(pipe.transformer, "fp8")
    assert served(pipe, "cpu").digest != native.digest


@pytest.mark.parametrize(
    ("chip", "backend", "words"), [("sm_90", NATIVE, "activations in 16 bit"), ("sm_100", NATIVE, NATIVE)]
)
def test_a_gpu_without_a_product_for_the_codes_computes_something_else(side, native, monkeypatch, chip, backend, words):
    """NVFP4 codes that nobody prepared: Hopper decodes them, Blackwell multiplies them."""
    monkeypatch.setattr(tiles, "chip_of", lambda device: chip)
    found = served(replace(side, backend=backend).open(), "cuda")
    assert found.arithmetic == words and (found.digest == native.digest) == (words == NATIVE)


@pytest.mark.parametrize("name", ["nvfp4", None])
def test_without_triton_a_gpu_computes_as_the_scheme_says(monkeypatch, name):
    monkeypatch.setattr(sys.modules["fluxq.eval.speed.served"], "find_spec", lambda name: None)
    scheme = Scheme(FORMATS["nvfp4"], FORMATS[name] if name else None)
    layer = QuantLinear.from_quantized(QuantizedTensor.quantize(torch.ones(8, 64), scheme.weights), None, scheme)
    assert rounded_to(layer, torch.device("cuda"), 64, torch.bfloat16) == name


def test_a_gpu_computes_re_encoded_layers_as_the_cpu_does(side, monkeypatch):
    pipe = replace(side, backend="8bit").open()
    on_cpu = served(pipe, "cpu")
    monkeypatch.setattr(tiles, "chip_of", lambda device: "sm_90")
    assert served(pipe, "cuda") == on_cpu


@pytest.mark.slow
def test_codes_that_are_decoded_in_the_kernel_are_named_as_that(side, native):
    pipe = side.open()
    for layer in quantized_layers(pipe).values():
        lay_out(layer, "sm_90", "memory", None)
    found = served(pipe, "cpu")
    assert "in the kernel" in found.arithmetic and computed(found) == found.arithmetic
    assert native.bits_per_weight < found.bits_per_weight < native.bits_per_weight + 1  # 4 bits stay


def test_a_pipeline_in_16_bit_is_not_served_quantized():
    assert served(tiny.load(), "cpu") is None


def test_every_backend_has_its_words():
    assert list(ARITHMETICS) == list(BACKENDS)


def test_model_bytes_count_shared_tensors_once():
    linear = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    twice = nn.ModuleList([linear, linear])
    assert model_bytes({"a": twice, "b": linear, "c": None, "d": "text"}) == 128
