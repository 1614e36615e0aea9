"""FAMILIES against the diffusers and transformers classes they describe, on the meta device and in forward passes."""

import copy
import dataclasses
import json
from functools import cache

import diffusers
import pytest
import torch
import transformers
from torch import nn

from fluxq.quantize.checkpoint import build_on_meta
from fluxq.recipes.families import FAMILIES, family_of
from fluxq.recipes.patterns import matches


def linears(family, config) -> dict[str, nn.Linear]:
    return _linears(family.library, family.model, json.dumps(config))


@cache
def _linears(library, model_class, config) -> dict[str, nn.Linear]:
    modules = build_on_meta(library, model_class, json.loads(config)).named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.Linear)}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request):
    return request.param


@pytest.mark.parametrize("size", ["tiny_config", "the class's own default"])
def test_every_linear_is_either_located_or_kept(family, size):
    names = linears(family, family.tiny_config if size == "tiny_config" else {})
    assert names
    for name in names:
        assert (family.locate(name) is None) != (family.kept(name) is None), name


def test_every_name_of_the_row_is_a_linear_of_the_class(family):
    variant = {"feed_forward_proj": "relu"} if "feed_forward_proj" in family.tiny_config else {}  # T5 without a gate
    names = {*linears(family, family.tiny_config), *linears(family, variant)}
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


def test_sd3_takes_every_kind_of_block():
    family = FAMILIES["sd3"]
    medium = linears(family, {"dual_attention_layers": list(range(13)), "qk_norm": "rms_norm", "num_layers": 24})
    roles = [family.locate(name)[0].role for name in medium if name.startswith("transformer_blocks.0.")]
    assert roles.count("qkv") == 6 and roles.count("attn_out") == 2 and roles.count("modulation") == 2
    last = {name.removeprefix("transformer_blocks.23.") for name in medium if name.startswith("transformer_blocks.23.")}
    assert "attn.add_q_proj" in last and not last & {"attn.to_add_out", "ff_context.net.2", "attn2.to_q"}


def test_wan_without_an_image_has_no_image_keys():
    family = FAMILIES["wan"]
    text_only = linears(family, {**family.tiny_config, "image_dim": None, "added_kv_proj_dim": None})
    assert not any(name.endswith(("add_k_proj", "add_v_proj")) for name in text_only)
    assert all((family.locate(name) is None) != (family.kept(name) is None) for name in text_only)


@pytest.mark.parametrize("name", [row.name for row in FAMILIES.values() if row.kind == "text_encoder"])
def test_only_the_language_model_of_a_text_encoder_is_quantized(name):
    family = FAMILIES[name]
    located = [path for path in linears(family, {}) if family.locate(path)]
    assert located and not any("visual" in path or "vision" in path or "lm_head" in path for path in located)


def test_an_unknown_class_says_how_to_add_a_family():
    assert family_of("FluxTransformer2DModel") is FAMILIES["flux"]
    with pytest.raises(ValueError, match=r"LTXVideoTransformer3DModel has no row in recipes/families\.py .*CONTRIB"):
        family_of("LTXVideoTransformer3DModel")


# Input groups in a forward pass


def tiny_model(family) -> nn.Module:
    torch.manual_seed(0)
    library = {"diffusers": diffusers, "transformers": transformers}[family.library]
    model_class = getattr(library, family.model)
    if family.library == "diffusers":
        return model_class.from_config(family.tiny_config)
    return model_class(model_class.config_class.from_dict(family.tiny_config))


def test_a_group_is_what_reads_one_tensor_and_no_less(family, family_inputs):
    """Linears of one block are in the same group if and only if a forward pass hands them the same tensor."""
    model = tiny_model(family)
    seen = {}  # the tensors are held, so that no later one can take over an address

    def look(name):
        return lambda _module, args: seen.update({name: args[0]})

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and family.locate(name):
            module.register_forward_pre_hook(look(name))
    with torch.no_grad():
        model(**family_inputs(family))
    readers, groups = {}, {}
    for name, x in seen.items():
        group, block = family.locate(name)
        assert x.shape[-1] == model.get_submodule(name).in_features
        readers.setdefault((block, x.data_ptr(), x.shape, x.stride()), set()).add(name)
        groups.setdefault((block, group.members), set()).add(name)
    assert seen.keys() == {name for name in linears(family, family.tiny_config) if family.locate(name)}
    assert sorted(map(sorted, readers.values())) == sorted(map(sorted, groups.values()))


# What makes a group's input

TRANSFORMERS = [row for row in FAMILIES.values() if row.kind == "transformer"]


@torch.no_grad()
def inputs_of(model: nn.Module, family, arguments: dict) -> dict[str, torch.Tensor]:
    """Linear that names a group -> the input of the group in a forward pass, in the order of the pass."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        found = family.locate(name) if isinstance(module, nn.Linear) else None
        if found and name.endswith(found[0].members[0]) and found[0].role != "modulation":
            hooks.append(
                module.register_forward_pre_hook(lambda _m, args, name=name: seen.update({name: args[0].clone()}))
            )
    model(**arguments)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def folded_into(model: nn.Module, block: str, group, mean: torch.Tensor, smooth: torch.Tensor) -> nn.Module:
    """A copy of the model whose modulation makes (x - mean) * smooth of the group's input x."""
    model = copy.deepcopy(model)
    linear = model.get_submodule(f"{block}.{group.modulation.linear}")
    shift, scale = group.modulation.rows(linear.out_features, mean.numel())
    linear.weight[scale] *= smooth[:, None]
    linear.bias[scale] = (1 + linear.bias[scale]) * smooth - 1
    linear.weight[shift] *= smooth[:, None]
    linear.bias[shift] = (linear.bias[shift] - mean) * smooth
    return model


@pytest.mark.parametrize("row", TRANSFORMERS, ids=lambda row: row.name)
def test_mean_and_factors_fold_into_the_modulation_of_a_foldable_group_and_nothing_before_it_changes(
    row, family_inputs
):
    model, arguments = tiny_model(row), family_inputs(row)
    plain = inputs_of(model, row, arguments)
    folded = 0
    for index, (name, x) in enumerate(plain.items()):
        group, block = row.locate(name)
        if not group.foldable:
            continue
        folded += 1
        mean, smooth = x.flatten(0, -2).mean(0), torch.rand(x.shape[-1]) + 0.5
        found = inputs_of(folded_into(model, block, group, mean, smooth), row, arguments)
        torch.testing.assert_close(found[name], (x - mean) * smooth, rtol=1e-4, atol=1e-5)
        for before in list(plain)[:index]:
            sibling = row.locate(before)[0].modulation
            if sibling != group.modulation:  # text and image come in either order
                assert torch.equal(found[before], plain[before]), (name, before)
    assert (folded > 0) == (row.name != "wan")


def test_a_wrong_chunk_is_found(family_inputs):
    row = FAMILIES["flux"]
    model, arguments = tiny_model(row), family_inputs(row)
    group, block = row.locate("transformer_blocks.0.attn.to_q")
    wrong = dataclasses.replace(group, modulation=dataclasses.replace(group.modulation, chunk=3))
    x = inputs_of(model, row, arguments)["transformer_blocks.0.attn.to_q"]
    moved = folded_into(model, block, wrong, x.flatten(0, -2).mean(0), torch.full((x.shape[-1],), 2.0))
    assert torch.equal(inputs_of(moved, row, arguments)["transformer_blocks.0.attn.to_q"], x)


def test_every_modulation_that_a_row_names_is_one(family):
    names = linears(family, family.tiny_config)
    for name, linear in names.items():
        found = family.locate(name)
        if found and found[0].modulation:
            modulation = names[f"{found[1]}.{found[0].modulation.linear}"]
            assert family.locate(f"{found[1]}.{found[0].modulation.linear}")[0].role == "modulation"
            shift, scale = found[0].modulation.rows(modulation.out_features, linear.in_features)
            assert max(shift.stop, scale.stop) <= modulation.out_features


def test_marks_follow_from_what_makes_the_input(family):
    for group in family.groups:
        assert group.normalised == (group.made_by == "norm") and group.split == (group.made_by == "concatenation")
        assert group.normalised or not group.foldable
        assert group.foldable == (group.normalised and family.name in ("flux", "sd3", "qwen_image"))
    assert [group.role for group in family.groups if group.split] == (["mixed_out"] if family.name == "flux" else [])


def test_what_is_split_has_the_attention_first(family_inputs):
    row = FAMILIES["flux"]
    model, seen = tiny_model(row), {}
    block = model.single_transformer_blocks[0]
    block.attn.register_forward_hook(lambda _m, _args, out: seen.update(attention=out))
    block.proj_out.register_forward_pre_hook(lambda _m, args: seen.update(x=args[0]))
    with torch.no_grad():
        model(**family_inputs(row))
    assert torch.equal(seen["x"][..., : block.proj_out.out_features], seen["attention"])
