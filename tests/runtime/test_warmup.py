"""Compiling ahead of the first image: which launches a checkpoint needs, and that each of them is made."""

from contextlib import nullcontext

import pytest
import torch
from click.testing import CliRunner

import fluxq
from fluxq.cli import cli
from fluxq.jobs import making
from fluxq.kernels import dispatch, launch
from fluxq.kernels.attention import kernel as attention
from fluxq.kernels.interpreter import interpreting
from fluxq.recipes.formats import Scheme
from fluxq.runtime import warmup
from fluxq.runtime.warmup import AttentionKind, LayerKind, Machine, kinds_of


def test_the_kinds_of_a_checkpoint_are_found_without_its_weights(checkpoint):
    (model,) = making.quantized_components(str(checkpoint("nvfp4"))).values()
    kinds = kinds_of(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert len(kinds) == len(set(kinds)) > 2
    assert {str(kind.scheme) for kind in kinds if isinstance(kind, LayerKind)} >= {"nvfp4-nvfp4-static"}


@pytest.mark.slow
def test_attention_in_fp8_is_launched_where_there_is_a_kernel(plain_checkpoint, monkeypatch) -> None:
    (model,) = making.quantized_components(str(plain_checkpoint("fp8"))).values()
    assert not any(isinstance(kind, AttentionKind) for kind in kinds_of(model))
    fluxq.set_attention(model, "fp8")
    kinds = [kind for kind in kinds_of(model) if isinstance(kind, AttentionKind)]
    assert kinds == [AttentionKind(heads=2, head_size=64)]
    launched = []
    monkeypatch.setattr(attention, "by_kernel", lambda *a, r=attention.by_kernel, **k: launched.append(r(*a, **k)))
    for chip, tokens in (("sm_90", [5, 16]), ("sm_80", [])):
        with interpreting():
            rows = warmup.warm_up(kinds, (5, 16, 5), Machine(torch.device("cpu"), chip, "speed", torch.bfloat16))
        assert [(row.implementation, row.shape) for row in rows] == [("attention_fp8", (2, 64))] * len(tokens)
        assert [row.m for row in rows] == tokens
    assert [tuple(o.shape) for o in launched] == [(1, m, 2, 64) for m in (5, 5, 16, 16)]


@pytest.mark.often(1)
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_each_kind_is_launched_at_each_number_of_tokens(monkeypatch, prefer: str) -> None:
    def fake(op: str, name: str, chip: str) -> str:
        return "" if name in offered.get(op, ()) else "no unit"

    offered = {
        "scaled_matmul": ("int8",),
        "w4a8_matmul": ("nvfp4-int8",),
        "weight_only_matmul": ("fp8",),
    }
    monkeypatch.setattr(dispatch, "refusal", fake)
    dispatch.choose.cache_clear()
    launched = []
    computed = launch.computed

    def noting(choice: dispatch.Choice, z: torch.Tensor, *rest) -> torch.Tensor:
        launched.append((choice.implementation, len(z)))
        return computed(choice, z, *rest)

    monkeypatch.setattr(launch, "computed", noting)
    kinds = [
        LayerKind(Scheme.parse("nvfp4-nvfp4-static"), 32, 128, True),
        LayerKind(Scheme.parse("fp8-16bit"), 32, 128, False),
    ]
    with interpreting():
        rows = warmup.warm_up(kinds, (2, 5, 2), Machine(torch.device("cpu"), "sm_80", prefer, torch.bfloat16))
    dispatch.choose.cache_clear()
    four_bit = "scaled_matmul" if prefer == "speed" else "w4a8_matmul"
    assert [(row.implementation, row.m) for row in rows] == [
        (four_bit, 2),
        (four_bit, 5),
        ("weight_only_matmul", 2),
        ("weight_only_matmul", 5),
    ]
    assert launched == [(row.implementation, row.m) for row in rows for _ in range(2)]
    assert all(row.first_s > 0 and row.again_s > 0 for row in rows)


def test_random_weights_give_finite_outputs() -> None:
    for scheme in ("nvfp4-nvfp4-static", "mxfp8-mxfp8", "mxfp4-mxfp4", "int4-int4", "fp8-fp8", "int8-int8"):
        layer = warmup.random_layer(LayerKind(Scheme.parse(scheme), 16, 64, True), torch.device("cpu"), torch.float32)
        assert torch.isfinite(layer(torch.randn(3, 64))).all(), scheme


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_the_command_says_where_to_run_it(checkpoint):
    done = CliRunner().invoke(cli, ["warmup", str(checkpoint("nvfp4"))])
    assert done.exit_code == 2 and "run this on the machine that will serve" in done.output
    done = CliRunner().invoke(cli, ["warmup", "tiny", "--device", "cpu"])
    assert done.exit_code == 2 and "--device cpu: kernels are compiled for the GPU" in done.output


def test_kernels_are_compiled_on_the_gpu_that_was_named(monkeypatch) -> None:
    """Triton launches on the current one, whatever the tensors are on."""
    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    monkeypatch.setattr(making, "there_is_a_gpu", lambda index: True)
    monkeypatch.setattr(making, "quantized_components", lambda output: {})
    monkeypatch.setattr("fluxq.kernels.tiles.chip_of", lambda device: "sm_90")
    monkeypatch.setattr(warmup, "warm_up", lambda *_: [] if current == [torch.device("cuda", 1)] else pytest.fail())
    assert making.warm_up("a checkpoint", "cuda:1", (1,), "speed", "bfloat16") == []


def test_a_16_bit_folder_has_nothing_to_compile():
    with pytest.raises(ValueError, match="tiny holds no component that fluxq quantized"):
        making.quantized_components("tiny")


@pytest.mark.gpu
def test_on_a_gpu_the_second_launch_is_compiled(checkpoint):
    rows = making.warm_up(str(checkpoint("int8")), "cuda", (64,), "speed", "bfloat16")
    assert rows and all(row["again_s"] < 0.1 for row in rows)
