"""Sides: what a pipeline to compare is, and that each of its fields changes what it computes."""

from dataclasses import replace

import pytest
import torch

from fluxq import tiny
from fluxq.base.model import ModelFolder
from fluxq.calibrate.capture import run_pipeline
from fluxq.eval.images.sides import BACKENDS, Side, quantized_layers, reencode_pipeline, variants
from fluxq.runtime.step_caches import cache_of

CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 2}
ITEMS = [(tiny.PROMPTS[0], 7), (tiny.PROMPTS[1], 8)]


def latents(pipe) -> torch.Tensor:
    return torch.cat([batch for _, batch in run_pipeline(pipe, ITEMS, CALL)]).float()


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def side(checkpoint):
    return Side("tiny-nvfp4", str(checkpoint("nvfp4")), "digest")


@pytest.fixture(scope="module")
def native(side):
    return latents(side.open())


@pytest.mark.slow
def test_a_side_is_the_pipeline_of_its_folder(side, native):
    assert torch.equal(latents(side.open()), native)
    sixteen = Side("16-bit", str(tiny.path()), "other").open()
    assert 0.001 < error(native, latents(sixteen)) < 0.2
    assert quantized_layers(sixteen) == {}


@pytest.mark.often(1)
@pytest.mark.parametrize("backend", ["int8", "8bit"])
def test_each_re_encoding_is_another_arithmetic_that_is_as_good(side, native, backend):
    pipe = replace(side, backend=backend).open()
    formats = {layer.scheme.activations.name for layer in quantized_layers(pipe).values() if layer.scheme.activations}
    assert formats <= set(BACKENDS[backend]) and formats
    sixteen = latents(tiny.load())
    assert not torch.equal(latents(pipe), native)
    assert error(latents(pipe), sixteen) < 1.1 * error(native, sixteen)


def test_layers_that_are_as_asked_already_are_left(checkpoint):
    pipe = Side("int8", str(checkpoint("int8")), "digest").open()
    reencode_pipeline(pipe, ("int8",), ModelFolder("int8", checkpoint("int8")))
    assert all(layer.prepared is None for layer in quantized_layers(pipe).values())


def test_a_step_cache_skips_blocks_and_no_cache_none(side, native):
    calls = []
    pipe = replace(side, cache=cache_of("1e6")).open()
    pipe.transformer.single_transformer_blocks[-1].proj_out.register_forward_pre_hook(lambda *_: calls.append(1))
    cached = latents(pipe)
    assert len(calls) == 1  # of two steps: so high a threshold lets every later one be skipped
    assert not torch.equal(cached, native)
    assert torch.equal(latents(pipe), cached) and len(calls) == 2  # nothing is left over from one call to the next


def test_another_attention_backend_is_the_same_function(side, native):
    other = latents(replace(side, attention="_native_math").open())
    assert error(other, native) < 0.05


def test_what_decides_bits_is_described_and_nothing_else(side):
    described = side.describe()
    assert described == replace(side, name="x", folder="elsewhere").describe()
    for change in (
        {"digest": "d"},
        {"backend": "int8"},
        {"cache": cache_of("0.1")},
        {"attention": "native"},
        {"dtype": "float32"},
    ):
        assert replace(side, **change).describe() != described


def test_variants_are_named_after_what_differs(side):
    caches = [cache_of("0.1"), cache_of("taylor_lite=3")]
    found = variants(side, ["native", "int8"], caches)
    assert [(each.name, each.backend, each.cache) for each in found] == [
        ("tiny-nvfp4", "native", None),
        ("tiny-nvfp4 as int8", "int8", None),
        ("tiny-nvfp4, FirstBlockCache 0.1", "native", caches[0]),
        ("tiny-nvfp4, TaylorSeer lite 3", "native", caches[1]),
        ("tiny-nvfp4 as int8, FirstBlockCache 0.1", "int8", caches[0]),
        ("tiny-nvfp4 as int8, TaylorSeer lite 3", "int8", caches[1]),
    ]


def test_an_unknown_backend_is_named(side):
    with pytest.raises(ValueError, match="backend 'fp4' is unknown; known: native, int8, 8bit"):
        replace(side, backend="fp4").open()
