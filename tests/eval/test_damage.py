"""Damages of a model whose errors add up exactly, and modules that are swapped and put back."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fluxq import tiny
from fluxq.calibrate.stand_ins import replaced
from fluxq.eval.debug.damage import Damages, blocks_of, locate, measure_damage, squared_error
from fluxq.eval.images.sides import Side, quantized_layers

X = torch.tensor([[1.0, 2.0]])
ERRORS = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 0.5}
BLOCKS = {"one": ("model.a", "model.b"), "two": ("model.c", "model.d")}


class Parallel(nn.Module):
    """Four Linears side by side: each alone decides one number of the output."""

    def __init__(self, errors: dict[str, float]) -> None:
        super().__init__()
        for name in ERRORS:
            layer = nn.Linear(2, 1, bias=False)
            layer.weight.data = torch.tensor([[1.0 + errors.get(name, 0.0), 1.0]])
            self.add_module(name, layer)

    def forward(self, x):
        return torch.cat([self.get_submodule(name)(x) for name in ERRORS], 1)


def pair(**errors: float):
    return SimpleNamespace(model=Parallel({})), SimpleNamespace(model=Parallel({**ERRORS, **errors}))


def run(pipe) -> torch.Tensor:
    with torch.no_grad():
        return pipe.model(X).double()


def measured(budget: int = 12, floor: float = 0.0, **errors: float) -> Damages:
    reference, quantized = pair(**errors)
    before = [list(pipe.model.children()) for pipe in (reference, quantized)]
    found = measure_damage(reference, quantized, BLOCKS, run, run(reference), budget=budget, floor=floor)
    assert [list(pipe.model.children()) for pipe in (reference, quantized)] == before
    return found


def test_damages_and_gains_are_shares_of_the_whole_error():
    found = measured()
    whole = sum(error**2 for error in ERRORS.values())
    assert found.signal == 4 * 9 and found.total == whole
    for name, error in ERRORS.items():
        assert found.damage((f"model.{name}",)) == pytest.approx(error**2 / whole)
        assert found.gain((f"model.{name}",)) == pytest.approx(error**2 / whole)
    assert found.damage(BLOCKS["one"]) == pytest.approx(10 / whole)
    assert found.sum_of_damages == pytest.approx(1)


def test_the_floor_is_no_damage():
    found = measured(floor=1.0)
    above = sum(error**2 for error in ERRORS.values()) - 1
    assert found.damage(("model.a",)) == pytest.approx((9 - 1) / above)
    assert found.damage(("model.d",)) == 0  # 0.25, less than two 16-bit runs differ by
    assert found.gain(("model.a",)) == pytest.approx(9 / above)
    nothing = measured(floor=100.0)
    assert nothing.above_floor == 0 and nothing.damage(("model.a",)) is None and nothing.gain(("model.a",)) is None


@pytest.mark.parametrize(("budget", "opened"), [(4, ""), (7, ""), (8, "ab"), (11, "ab"), (12, "abcd")])
def test_budget_opens_the_worst_blocks(budget, opened):
    found = measured(budget)
    assert {unit for unit in found.only if len(unit) == 1} == {(f"model.{name}",) for name in opened}
    assert found.only.keys() == found.kept.keys()
    units = [(f"model.{name}",) for name in opened] + [u for u in BLOCKS.values() if u[0][-1] not in opened]
    assert sorted(found.finest) == sorted(units)
    assert found.sum_of_damages == pytest.approx(1)


def test_budget_that_does_not_reach_for_the_blocks():
    with pytest.raises(ValueError, match="a budget of 3 runs is too small for 2 blocks: give 4"):
        measured(3)


def test_a_layer_that_makes_nan_has_all_of_the_damage():
    found = measured(c=math.nan)
    assert found.total == math.inf
    assert [found.damage((f"model.{name}",)) for name in "acd"] == [0, 1, 0]
    assert [found.gain((f"model.{name}",)) for name in "acd"] == [0, 1, 0]


def test_squared_error():
    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert squared_error(a + 2, a) == 8
    assert squared_error(a * math.nan, a) == squared_error(a * math.inf, a) == math.inf


def test_modules_are_put_back_after_an_error():
    reference, quantized = pair()
    own, other = reference.model.a, quantized.model.a
    with pytest.raises(RuntimeError, match="in the middle"), replaced(reference, {"model.a": other}):
        assert reference.model.a is other
        raise RuntimeError("in the middle")
    assert reference.model.a is own


def test_blocks_and_roles_are_the_familys(plain_checkpoint):
    pipe = Side("int8", str(plain_checkpoint("int8")), "").open()
    blocks = blocks_of(pipe, list(quantized_layers(pipe)))
    assert list(blocks) == [
        "transformer.transformer_blocks.0",
        *(f"transformer.single_transformer_blocks.{i}" for i in range(4)),
    ]
    assert len(blocks["transformer.transformer_blocks.0"]) == 14
    name = "transformer.single_transformer_blocks.2.proj_mlp"
    block = "transformer.single_transformer_blocks.2"
    assert locate(pipe, name) == ("single_in", block, f"{block}.attn.to_q")
    assert locate(tiny.load(), "transformer.x_embedder") == (
        "other",
        "transformer.x_embedder",
        "transformer.x_embedder",
    )
