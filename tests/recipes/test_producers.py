"""Factors and means that the Linears which make an input take in: real classes compute the same with and without."""

from __future__ import annotations

import diffusers
import pytest
import torch
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

from fluxq.quantize.structure import shapes_of
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Family, matches
from fluxq.recipes.plan import LayerPlan, make_plan
from fluxq.recipes.recipe import Component

WITH_PRODUCERS = [family for family in FAMILIES.values() if any(group.producers for group in family.groups)]
RECIPE = Component.model_validate(
    {"weights": {"format": "int8"}, "activations": {"format": "int8"}, "transforms": ["center", "smooth"]}
)


def planned(family: Family, model: nn.Module) -> list[LayerPlan]:
    """The layers whose mean and factors other Linears take in, the first of each set."""
    plan = make_plan(family, "transformer", RECIPE, shapes_of(model), static_inputs=False, compat="portable")
    firsts = {layer.together: layer for layer in reversed(plan.layers) if layer.method.folding}
    return list(firsts.values())


@torch.no_grad()
def fold(family: Family, model: nn.Module, layer: LayerPlan, draw: torch.Generator, readers: bool = True) -> set[str]:
    """Fold a drawn mean and factors, as `Producer` says. readers: of the input take them back. Returns the makers."""
    group, block = family.locate(layer.name)
    k, makers = layer.k, set()
    factors, mean = torch.ones(k), torch.zeros(k)
    start = 0
    for index, (width, word) in enumerate(zip(layer.segments, layer.method.folding, strict=True)):
        part = slice(start, start + width)
        start += width
        if word == "nothing":
            continue
        factors[part] = torch.exp2(torch.randint(-3, 3, (width,), generator=draw).float())
        if word == "factors and mean":
            mean[part] = torch.randn(width, generator=draw)
        linears = dict(model.named_modules())
        for producer in (one for one in group.producers if one.segment == index):
            linear = linears.get(f"{block}.{producer.linear}")
            if linear is None:
                continue
            makers.add(producer.linear)
            rows = producer.rows(linear.out_features, width)
            linear.weight[rows] *= factors[part, None]
            if linear.bias is not None:
                shift = mean[part] if producer.shifts else 0
                linear.bias[rows] = factors[part] * (linear.bias[rows] - shift)
    for other in family.groups if readers else ():
        if other.producers == group.producers and matches(other.block, block):
            for linear in (dict(model.named_modules()).get(f"{block}.{member}") for member in other.members):
                if linear is not None:
                    if linear.bias is not None:
                        linear.bias += linear.weight @ mean
                    linear.weight /= factors
    return makers


@torch.no_grad()
def output(model: nn.Module, inputs: dict) -> Tensor:
    made = model(**inputs, return_dict=False)[0]
    return torch.stack(list(made)) if isinstance(made, list | tuple) else made


def with_biases(model: nn.Module) -> nn.Module:
    """Drawn anew, biases and norms too, which classes begin with zeros and ones."""
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


@pytest.mark.often(5)
@pytest.mark.parametrize("family", WITH_PRODUCERS, ids=lambda family: family.name)
def test_what_is_folded_changes_nothing(family, family_inputs):
    torch.manual_seed(0)
    model = with_biases(getattr(diffusers, family.model)(**TINY_CONFIGS[family.name]).eval())
    inputs = family_inputs(family)
    expected = output(model, inputs)
    layers, draw = planned(family, model), torch.Generator().manual_seed(0)
    assert layers, "no input has a fold"
    for layer in layers:
        assert fold(family, model, layer, draw)
    off = (output(model, inputs) - expected).norm() / expected.norm()
    assert off < 2e-5, off
    for layer in layers:
        fold(family, model, layer, draw, readers=False)
    assert (output(model, inputs) - expected).norm() / expected.norm() > 1e-3
