"""FAMILIES against the diffusers and transformers classes they describe, on the meta device and in forward passes."""

import ast
import copy
import dataclasses
import json
from functools import cache
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from tiny_configs import TINY_CONFIGS
from torch import nn

from fluxq.kernels.linear import channels_last, is_linear, linear_size, linears_of
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.quantize.structure import shapes_of
from fluxq.recipes.all_families import FAMILIES, PUBLISHED, family_of
from fluxq.recipes.family import matches
from fluxq.recipes.plan import component_recipe, make_plan
from fluxq.recipes.recipe import load_recipe, shipped_recipes
from tests.house.test_house import our_modules

VARIANTS = [  # published models whose configuration makes other layers than the tiny one does
    ("t5", {"feed_forward_proj": "relu"}),
    ("umt5", {"feed_forward_proj": "relu"}),
    ("flux", {"guidance_embeds": True}),  # dev; schnell has none
    ("flux", {"in_channels": 96, "out_channels": 16}),  # Fill, and Depth and Canny
    ("flux2", {"guidance_embeds": False}),  # klein
    ("qwen_image", {"zero_cond_t": True}),  # Edit, from 2511 on
    ("wan", {"image_dim": None, "added_kv_proj_dim": None}),  # text to video, and 2.2
    ("z_image", {"siglip_feat_dim": 64}),  # Omni
    ("pixart", {"num_attention_heads": 6, "use_additional_conditions": True}),  # alpha at 1024 x 1024
    ("hunyuan_video", {"image_condition_type": "latent_concat", "in_channels": 9}),
    ("hunyuan_video", {"image_condition_type": "token_replace", "guidance_embeds": False}),
    ("sana", {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}),  # Sprint
    (
        "kl",
        {
            "block_out_channels": [64, 128],
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
        },
    ),
    ("unet", {"use_linear_projection": False, "addition_embed_type": None}),  # Stable Diffusion 1.5
]
FULL_SIZE = {  # where the class has no defaults, or those of an older model
    "hidream": {"patch_size": 2, "caption_channels": [4096, 4096], "llama_layers": [*range(32), *[31] * 16]},
    "sd3": {"num_layers": 38, "attention_head_dim": 64, "num_attention_heads": 38, "caption_projection_dim": 2432},
    "unet": {
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


def linears(family, config) -> dict[str, nn.Linear | nn.Conv2d]:
    return linears_of(on_meta(family, config))


def on_meta(family, config) -> nn.Module:
    return _on_meta(family.library, family.model, json.dumps(config))


@cache
def _on_meta(library, model_class, config) -> nn.Module:
    return build_on_meta(library, model_class, json.loads(config))


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request):
    return request.param


@pytest.mark.parametrize("size", ["tiny_config", "the class's own default"])
def test_every_linear_is_either_located_or_kept(family, size):
    names = linears(family, TINY_CONFIGS[family.name] if size == "tiny_config" else FULL_SIZE.get(family.name, {}))
    assert names
    for name in names:
        assert (family.locate(name) is None) != (family.kept(name) is None), name


def test_every_name_of_the_row_is_a_linear_of_the_class(family):
    variants = [variant for name, variant in VARIANTS if name == family.name]
    names = {name for config in ({}, *variants) for name in linears(family, {**TINY_CONFIGS[family.name], **config})}
    for group in family.groups:
        for member in group.members:
            assert any(matches(f"{group.block}.{member}", name) for name in names), (group.block, member)
    for pattern in (pattern for patterns in family.keep.values() for pattern in patterns):
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
    for name, linear in linears(family, TINY_CONFIGS[family.name]).items():
        if found := family.locate(name):
            groups.setdefault((found[1], found[0].members), set()).add(linear_size(linear)[1])
    assert groups and all(len(widths) == 1 for widths in groups.values())


def test_every_quantized_k_of_the_tiny_configuration_is_a_multiple_of_128(family):
    widths = {n: linear_size(m)[1] for n, m in linears(family, TINY_CONFIGS[family.name]).items() if family.locate(n)}
    assert {name: k for name, k in widths.items() if k % 128} == {}


def test_up_widens_what_down_narrows_again(family):
    """Of each feed-forward; a gate doubles what `up` puts out."""
    names, ups, downs = linears(family, TINY_CONFIGS[family.name]), {}, {}
    for name, linear in names.items():
        found = family.locate(name)
        role, way = found[0].role.rpartition("_")[::2] if found else ("", "")
        if way in ("up", "down"):
            path = name.rpartition(".")[0] if role == "expert" else role  # of several each by itself
            {"up": ups, "down": downs}[way].setdefault((found[1], path), linear_size(linear))
    assert ups.keys() == downs.keys()
    for key, up in ups.items():
        (up_n, up_k), (down_n, down_k) = up, downs[key]
        assert up_n in (down_k, 2 * down_k) and down_n == up_k < down_k, key


def test_every_row_says_why_layers_are_kept(family):
    assert all(len(reason.split()) > 4 for reason in family.keep)


@pytest.mark.often(1)
def test_every_shipped_recipe_fits_every_linear_in_full_size(family):
    shapes = shapes_of(on_meta(family, FULL_SIZE.get(family.name, {})))
    for name in shipped_recipes():
        component = component_recipe(load_recipe(name)[1], "any", family)
        plan = make_plan(family, "it", component, shapes, static_inputs=True)
        assert {layer.name for layer in plan.quantized} == {shape.name for shape in shapes if family.locate(shape.name)}


def test_the_table_in_the_docs_says_how_much_of_each_denoiser_is_quantized():
    text = (Path(__file__).parents[2] / "recipes" / "README.md").read_text(encoding="utf-8")
    table = text.split("<!-- denoisers -->\n")[1].splitlines()[2:]
    said = {
        row: shares for row, _, *shares, _ in ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    }
    found = {}
    for family in (row for row in FAMILIES.values() if row.kind == "transformer"):
        model = on_meta(family, FULL_SIZE.get(family.name, {}))
        weights = {"core": 0, "modulation": 0}
        for name, module in model.named_modules():
            if is_linear(module) and (located := family.locate(name)):
                kind = "modulation" if located[0].role == "modulation" else "core"
                weights[kind] += module.weight.numel()
        total = sum(p.numel() for p in model.parameters())
        found[f"`{family.name}`"] = [f"{count / total:.0%}".replace("%", " %") for count in weights.values()]
    assert {row: [share or "0 %" for share in shares] for row, shares in said.items()} == found


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


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_linear_of_a_variant_is_either_located_or_kept(name, variant):
    family = FAMILIES[name]
    names = linears(family, {**TINY_CONFIGS[family.name], **variant})
    assert names and all((family.locate(name) is None) != (family.kept(name) is None) for name in names)


def test_wan_without_an_image_has_no_image_keys():
    family = FAMILIES["wan"]
    text_only = linears(family, {**TINY_CONFIGS[family.name], "image_dim": None, "added_kv_proj_dim": None})
    assert not any(name.endswith(("add_k_proj", "add_v_proj")) for name in text_only)


@pytest.mark.parametrize("name", [row.name for row in FAMILIES.values() if row.kind == "text_encoder"])
def test_only_the_language_model_of_a_text_encoder_is_quantized(name):
    family = FAMILIES[name]
    located = [path for path in linears(family, {}) if family.locate(path)]
    assert located and not any("visual" in path or "vision" in path or "lm_head" in path for path in located)


def test_an_unknown_class_says_how_to_add_a_family():
    assert family_of("FluxTransformer2DModel") is FAMILIES["flux"]
    with pytest.raises(ValueError, match=r"MyTransformer2DModel has no row in recipes/all_families\.py .*CONTRIB"):
        family_of("MyTransformer2DModel")


# One file for each family

TABLE = "fluxq.recipes.all_families"
NAMED_ELSEWHERE = {  # module -> families that it names outside comments and docstrings
    # The arguments of a block's forward, which need torch: a function for each class of blocks.
    "fluxq.runtime.fused_calls": {"flux", "flux2", "qwen_image", "sd3", "wan"},
    # "AutoencoderKL" is a class that makes sizes of eight pixels, whatever its tensors are called.
    "fluxq.jobs.requirements": {"kl"},
    # nunchaku's single files hold FLUX.1 only.
    "fluxq.quantize.exchange.nunchaku_file": {"flux"},
}
OTHER_WORDS = ("clip", "unet")  # also a metric and an operation, and a component of pipelines


def named(source: str) -> set[str]:
    """Families that a source text names: by a string, by the name of a function or variable, or by their class."""
    values = (value for node in ast.walk(ast.parse(source)) for value in vars(node).values())
    texts = {value for value in values if isinstance(value, str)}
    by_name = {text.strip("_") for text in texts} & FAMILIES.keys() - set(OTHER_WORDS)
    return by_name | {family.name for family in FAMILIES.values() if family.model in texts}


@pytest.mark.slow
def test_no_family_is_named_outside_its_file_and_the_table():
    outside = {name: path for name, path in our_modules().items() if not name.startswith("fluxq.recipes.families.")}
    found = {name: named(path.read_text(encoding="utf-8")) for name, path in outside.items() if name != TABLE}
    assert {name: families for name, families in found.items() if families} == NAMED_ELSEWHERE


def test_a_name_outside_is_found():
    assert named('if family == "qwen_image": pass') == {"qwen_image"}
    assert named("def _wan(block): pass") == {"wan"}
    assert named('"QwenImageTransformer2DModel" in names') == {"qwen_image"}
    assert named("part = pipe.unet  # of qwen_image") == set()


def test_a_file_names_no_other_family():
    """The module whose rows it shares is imported, and encoders and VAEs go by the names of published models."""
    files = {name: path for name, path in our_modules().items() if name.startswith("fluxq.recipes.families.")}
    families_of = {name: named(path.read_text(encoding="utf-8")) for name, path in files.items()}
    owners = {family: [name for name, families in families_of.items() if family in families] for family in FAMILIES}
    assert [family for family, names in owners.items() if family not in OTHER_WORDS and len(names) != 1] == []


def test_published_models_stand_in_their_family(family):
    listed = [dataclasses.replace(model, family="") for model in PUBLISHED if model.family == family.name]
    assert family.published and listed == [*family.published]
    names = {name for model in family.published for name in (model.name, *model.also)}
    assert family.pipelines.keys() <= names and not (family.hub_owner and family.hub_ids)


# Input groups in a forward pass


def tiny_model(family, **variant) -> nn.Module:
    torch.manual_seed(0)
    library = {"diffusers": diffusers, "transformers": transformers}[family.library]
    model_class = getattr(library, family.model)
    if family.library == "diffusers":
        return model_class.from_config({**TINY_CONFIGS[family.name], **variant})
    return model_class(model_class.config_class.from_dict(TINY_CONFIGS[family.name]))


def test_a_group_is_what_reads_the_same_values_and_no_less(family, family_inputs):
    """Linears of one block are in the same group if and only if a forward pass hands them the same values.

    Modulation is left out: image and text have each its own Linear, but the same embedding.
    """
    model = tiny_model(family)
    seen = {}

    def look(name):
        return lambda module, args: seen.update({name: channels_last(module, args[0]).clone()})

    for name, module in model.named_modules():
        if is_linear(module) and family.locate(name):
            module.register_forward_pre_hook(look(name))
    with torch.no_grad():
        model(**family_inputs(family))
    readers, groups = {}, {}
    for name, x in seen.items():
        group, block = family.locate(name)
        assert x.shape[-1] == linear_size(model.get_submodule(name))[1]
        if group.role != "modulation":
            readers.setdefault((block, x.shape, x.numpy().tobytes()), set()).add(name)
            groups.setdefault((block, group.members), set()).add(name)
    assert seen.keys() == {name for name in linears(family, TINY_CONFIGS[family.name]) if family.locate(name)}
    assert sorted(map(sorted, readers.values())) == sorted(map(sorted, groups.values()))


# What makes a group's input

TRANSFORMERS = [row for row in FAMILIES.values() if row.kind == "transformer"]
FOLDABLE = ("flux", "sd3", "qwen_image", "hunyuan_video", "hidream")  # a Linear of the same block modulates norms
# Family -> the activation below the block of which `mixed_out` reads the output, behind what attention made.
MIXED = {"flux": "act_mlp", "flux2": "attn.mlp_act_fn", "chroma": "act_mlp", "hunyuan_video": "act_mlp"}


@torch.no_grad()
def inputs_of(model: nn.Module, family, arguments: dict) -> dict[str, torch.Tensor]:
    """Linear that names a group -> the input of the group in a forward pass, in the order of the pass."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        found = family.locate(name) if is_linear(module) else None
        if found and name.endswith(found[0].members[0]) and found[0].role != "modulation":
            hooks.append(
                module.register_forward_pre_hook(
                    lambda m, args, name=name: seen.update({name: channels_last(m, args[0]).clone()})
                )
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


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("name", "variant", "changed"),
    [
        *((row.name, {}, {}) for row in TRANSFORMERS),
        # Two images, the second one modulated as if it were clean; and the first frame, likewise.
        (
            "qwen_image",
            {"zero_cond_t": True},
            {"hidden_states": torch.randn(1, 8, 16), "img_shapes": [[(1, 2, 2), (1, 2, 2)]]},
        ),
        ("hunyuan_video", {"image_condition_type": "token_replace"}, {"hidden_states": torch.randn(1, 4, 2, 4, 4)}),
    ],
)
def test_mean_and_factors_fold_into_the_modulation_of_a_foldable_group_and_nothing_before_it_changes(
    name, variant, changed, family_inputs
):
    row = FAMILIES[name]
    model, arguments = tiny_model(row, **variant), {**family_inputs(row), **changed}
    plain = inputs_of(model, row, arguments)
    folded = 0
    for index, (name, x) in enumerate(plain.items()):
        group, block = row.locate(name)
        if group.modulation is None:
            continue
        folded += 1
        mean, smooth = x.flatten(0, -2).mean(0), torch.rand(x.shape[-1]) + 0.5
        found = inputs_of(folded_into(model, block, group, mean, smooth), row, arguments)
        torch.testing.assert_close(found[name], (x - mean) * smooth, rtol=1e-4, atol=1e-5)
        for before in list(plain)[:index]:
            sibling = row.locate(before)[0].modulation
            if sibling != group.modulation:  # text and image come in either order
                assert torch.equal(found[before], plain[before]), (name, before)
    assert (folded > 0) == (row.name in FOLDABLE)


def test_a_wrong_chunk_is_found(family_inputs):
    row = FAMILIES["flux"]
    model, arguments = tiny_model(row), family_inputs(row)
    group, block = row.locate("transformer_blocks.0.attn.to_q")
    wrong = dataclasses.replace(group, modulation=dataclasses.replace(group.modulation, chunk=3))
    x = inputs_of(model, row, arguments)["transformer_blocks.0.attn.to_q"]
    moved = folded_into(model, block, wrong, x.flatten(0, -2).mean(0), torch.full((x.shape[-1],), 2.0))
    assert torch.equal(inputs_of(moved, row, arguments)["transformer_blocks.0.attn.to_q"], x)


def test_every_modulation_that_a_row_names_is_one(family):
    names = linears(family, TINY_CONFIGS[family.name])
    for name, linear in names.items():
        found = family.locate(name)
        if found and found[0].modulation:
            modulation = names[f"{found[1]}.{found[0].modulation.linear}"]
            assert family.locate(f"{found[1]}.{found[0].modulation.linear}")[0].role == "modulation"
            shift, scale = found[0].modulation.rows(modulation.out_features, linear.in_features)
            assert max(shift.stop, scale.stop) <= modulation.out_features


def test_marks_follow_from_what_makes_the_input(family):
    for group in family.groups:
        assert group.split == (group.made_by == "concatenation")
        assert group.made_by == "norm" or group.modulation is None
        is_routed = group.role == "expert_up"  # the router reads its input too
        assert (group.modulation is not None) == (group.made_by == "norm" and family.name in FOLDABLE and not is_routed)
    assert [group.role for group in family.groups if group.split] == ["mixed_out"] * (family.name in MIXED)


@pytest.mark.parametrize("name", MIXED)
def test_what_is_split_has_the_feed_forward_behind_the_attention(name, family_inputs):
    row = FAMILIES[name]
    model, seen = tiny_model(row), {}
    group = next(group for group in row.groups if group.split)
    block = model.get_submodule(group.block.replace("*", "0"))
    down = block.get_submodule(group.members[0])
    block.get_submodule(MIXED[name]).register_forward_hook(lambda _m, _args, out: seen.update(activation=out))
    down.register_forward_pre_hook(lambda _m, args: seen.update(x=args[0]))
    with torch.no_grad():
        model(**family_inputs(row))
    assert torch.equal(seen["x"][..., down.out_features :], seen["activation"])
