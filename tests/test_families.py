"""FAMILIES against the diffusers classes they describe, on the meta device."""

import dataclasses

import diffusers
import pytest
import torch
from torch import nn

from fluxq.recipes.families import FAMILIES, family_of
from fluxq.recipes.patterns import matches


def linears(family, config) -> dict[str, nn.Linear]:
    with torch.device("meta"):
        model = getattr(diffusers, family.transformer).from_config(config)
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request):
    return request.param


@pytest.mark.parametrize("size", ["tiny_config", "the class's own default"])
def test_every_linear_is_either_located_or_kept(family, size):
    names = linears(family, family.tiny_config if size == "tiny_config" else {})
    for name in names:
        assert (family.locate(name) is None) != (family.kept(name) is None), name


def test_every_name_of_the_row_is_a_linear_of_the_class(family):
    names = linears(family, family.tiny_config)
    for group in family.groups:
        for member in group.members:
            assert any(matches(f"{group.block}.{member}", name) for name in names), (group.block, member)
    for pattern in family.keep:
        assert any(matches(pattern, name) for name in names), pattern


def test_one_wrong_name_in_a_row_is_found(family):
    first, *rest = family.groups
    renamed = dataclasses.replace(first, members=(first.members[0] + "_renamed", *first.members[1:]))
    broken = dataclasses.replace(family, groups=(renamed, *rest))
    for check in (
        test_every_name_of_the_row_is_a_linear_of_the_class,
        lambda row: test_every_linear_is_either_located_or_kept(row, "tiny_config"),
    ):
        with pytest.raises(AssertionError):
            check(broken)


def test_members_of_a_group_read_as_many_channels(family):
    groups = {}
    for name, linear in linears(family, family.tiny_config).items():
        if found := family.locate(name):
            groups.setdefault((found[1], found[0].members), set()).add(linear.in_features)
    assert groups and all(len(widths) == 1 for widths in groups.values())


def test_every_quantized_k_of_the_tiny_configuration_is_a_multiple_of_128(family):
    widths = {n: m.in_features for n, m in linears(family, family.tiny_config).items() if family.locate(n)}
    assert {name: k for name, k in widths.items() if k % 128} == {}


def test_every_row_says_why_layers_are_kept(family):
    assert all(len(reason.split()) > 4 for reason in family.keep.values())


def test_flux_in_full_size():
    family = FAMILIES["flux"]
    names = linears(family, {})
    located = {name: family.locate(name) for name in names}
    assert len({block for found in located.values() if found for block in [found[1]]}) == 57
    roles: dict[str, int] = {}
    for found in located.values():
        if found:
            roles[found[0].role] = roles.get(found[0].role, 0) + 1
    assert roles == {
        "qkv": 57,
        "text_qkv": 57,
        "attn_out": 19,
        "text_attn_out": 19,
        "ff_up": 19,
        "text_ff_up": 19,
        "ff_down": 19,
        "text_ff_down": 19,
        "single_in": 38 * 4,
        "mixed_out": 38,
        "modulation": 19 * 2 + 38,
    }
    kept = sorted(name for name in names if family.kept(name))
    assert kept[0] == "context_embedder" and {"x_embedder", "proj_out", "norm_out.linear"} <= set(kept)


def test_the_last_projection_is_not_a_single_block_s():
    family = FAMILIES["flux"]
    assert family.locate("proj_out") is None and family.kept("proj_out")
    group, block = family.locate("single_transformer_blocks.3.proj_out")
    assert (group.role, block) == ("mixed_out", "single_transformer_blocks.3")
    assert family.kept("single_transformer_blocks.3.proj_out") is None


def test_single_and_double_blocks_are_told_apart():
    family = FAMILIES["flux"]
    assert family.locate("transformer_blocks.0.attn.to_q")[0].role == "qkv"
    assert family.locate("single_transformer_blocks.0.attn.to_q")[0].role == "single_in"
    assert family.locate("single_transformer_blocks.0.attn.to_out.0") is None
    assert family.locate("transformer_blocks.0.extra.attn.to_q") is None


def test_an_unknown_class_says_how_to_add_a_family():
    assert family_of("FluxTransformer2DModel") is FAMILIES["flux"]
    with pytest.raises(ValueError, match=r"WanTransformer3DModel has no row in recipes/families\.py .*CONTRIBUTING"):
        family_of("WanTransformer3DModel")
