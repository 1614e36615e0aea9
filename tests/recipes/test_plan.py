"""The plan: what becomes of each Linear, and the reason that people read."""

from dataclasses import replace

import pytest

from fluxq.base.model import resolve_model
from fluxq.quantize.structure import list_linears
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.plan import LinearShape, Method, component_recipe, make_plan
from fluxq.recipes.recipe import Component, Recipe, load_recipe, shipped_recipes

FLUX = FAMILIES["flux"]
LINEARS = list_linears(resolve_model("tiny"), "transformer")
FP8 = {"format": "fp8"}


def component(**keys) -> Component:
    return Component.model_validate({"weights": {"format": "nvfp4"}, "activations": {"format": "nvfp4"}, **keys})


def plan_of(recipe=None, linears=LINEARS, static_inputs=True, **how):
    recipe = (recipe or component()).without(how.pop("exclude", ()))
    return make_plan(FLUX, "transformer", recipe, linears, static_inputs=static_inputs, **how)


def schemes(plan) -> dict[str, str]:
    return {layer.name: str(layer.scheme) for layer in plan.layers}


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_plans_every_linear_with_a_reason(name):
    recipe = load_recipe(name)[1]
    plan = plan_of(recipe.components["transformer"], profile=recipe.profile, compat=recipe.compat)
    assert [layer.name for layer in plan.layers] == [linear.name for linear in LINEARS]
    assert all(layer.reason for layer in plan.layers)
    assert 4 < plan.bits_per_weight < 16 and plan.notes == ()
    kept = {layer.name for layer in plan.layers if layer.scheme is None}
    assert kept == {linear.name for linear in LINEARS if FLUX.kept(linear.name)}


def test_main_format_modulation_and_kept_layers():
    plan = plan_of(component(modulation=FP8))
    found = schemes(plan)
    assert found["transformer_blocks.0.attn.to_q"] == "nvfp4-nvfp4-static"
    assert found["transformer_blocks.0.norm1.linear"] == "fp8-16bit"
    assert found["proj_out"] == found["x_embedder"] == "None"
    reasons = {layer.name: layer.reason for layer in plan.layers}
    assert reasons["proj_out"].startswith("16 bit: last projection")
    assert reasons["transformer_blocks.0.norm1.linear"].startswith("weight-only")
    bare = schemes(plan_of(component(modulation=None)))
    assert bare["transformer_blocks.0.norm1.linear"] == "None"


def test_without_data_scales_are_dynamic():
    assert {str(scheme) for _, scheme in plan_of(static_inputs=False).schemes()} == {"nvfp4-nvfp4"}
    assert plan_of(static_inputs=False).static_groups() == {}


def test_one_level_activations_are_never_static():
    assert {str(scheme) for _, scheme in plan_of(component(weights=FP8, activations=FP8)).schemes()} == {"fp8-fp8"}


def test_a_pattern_for_the_top_does_not_catch_blocks_of_that_name():
    plan = plan_of(component(overrides=[{"match": "proj_out", "weights": FP8, "reason": "tried"}]))
    found = schemes(plan)
    assert found["proj_out"] == "fp8-16bit"
    assert found["single_transformer_blocks.0.proj_out"] == "nvfp4-nvfp4-static"


def test_the_last_override_that_matches_wins():
    by_role = {"role": "mixed_out", "weights": FP8, "reason": "by role"}
    by_name = {"match": "single_transformer_blocks.0.proj_out", "reason": "by name"}
    first, second = "single_transformer_blocks.0.proj_out", "single_transformer_blocks.1.proj_out"
    layers = {la.name: la for la in plan_of(component(overrides=[by_role, by_name])).layers}
    assert (layers[first].scheme, layers[first].reason) == (None, "by name")
    assert (str(layers[second].scheme), layers[second].reason) == ("fp8-16bit", "by role")
    assert schemes(plan_of(component(overrides=[by_name, by_role])))[first] == "fp8-16bit"


def test_an_override_may_list_patterns():
    names = ["proj_out", "single_transformer_blocks.*.proj_out"]
    listed = schemes(plan_of(component(overrides=[{"match": names, "weights": FP8, "reason": "r"}])))
    single = [{"match": name, "weights": FP8, "reason": "r"} for name in names]
    assert listed == schemes(plan_of(component(overrides=single))) != schemes(plan_of(component()))
    with pytest.raises(ValueError, match="pattern 'nothing' matches no Linear"):
        plan_of(component(overrides=[{"match": [*names, "nothing"], "weights": FP8, "reason": "r"}]))


@pytest.mark.parametrize("role", ["cross_attn", "kept"])
def test_a_role_that_the_family_lacks_is_noted_and_skipped(role):
    plan = plan_of(component(overrides=[{"role": role, "weights": FP8, "reason": "r"}]))
    assert plan.notes[0] == f"role {role!r}: the flux family has none, skipped"
    assert plan.schemes() == plan_of().schemes()


def test_a_recipe_that_does_not_speak_of_modulation_is_told_what_that_leaves_in_16_bit():
    (note,) = plan_of(component()).notes
    assert note.startswith(
        "the recipe says nothing of modulation, so that stays in 16 bit, 23% of the weights: add `mod"
    )
    for said in (None, FP8):
        assert plan_of(component(modulation=said)).notes == ()


@pytest.mark.parametrize("where", ["override", "recipe exclude", "exclude", "include"])
def test_a_pattern_that_matches_nothing_is_an_error_with_a_suggestion(where):
    pattern = "transformer_blocks.*.attn.to_qq"
    recipe, how = component(), {}
    if where == "override":
        recipe = component(overrides=[{"match": pattern, "weights": FP8, "reason": "r"}])
    elif where == "recipe exclude":
        recipe = component(exclude=[pattern])
    else:
        how = {where: [pattern]}
    with pytest.raises(ValueError, match=r"to_qq' matches no Linear.*for example '.+'.*plan --layers` lists all"):
        plan_of(recipe, **how)


def test_the_suggestion_is_a_layer_of_that_name():
    with pytest.raises(ValueError, match=r"for example 'transformer_blocks\.0\.attn\.to_q'"):
        plan_of(exclude=["attn.to_q"])
    with pytest.raises(ValueError, match=r"for example 'transformer_blocks\.0\.attn\.to_q'"):
        plan_of(exclude=["transformer_blocks.*.attn.to_qq"])


def test_include_and_exclude():
    plan = plan_of(include=["single_transformer_blocks.**"], exclude=["**.to_q"])
    for layer in plan.layers:
        wanted = layer.name.startswith("single_") and not layer.name.endswith(("to_q", "norm.linear"))
        assert (layer.scheme is not None) == wanted, layer
    reasons = {layer.reason for layer in plan.layers}
    assert {"excluded by '**.to_q'", "not among the included layers"} <= reasons


def test_nothing_left_to_quantize_is_an_error():
    with pytest.raises(ValueError, match="leaves every Linear in 16 bit"):
        plan_of(exclude=["**"])


def test_a_shape_that_the_format_of_an_override_cannot_hold_names_the_layer():
    name = "transformer_blocks.0.attn.to_q"
    for operands, refused in (
        ({"weights": {"format": "nvfp4"}}, rf"^{name}: shape \(128, 120\) does not fit nvfp4.*multiples of 16"),
        ({"weights": FP8, "activations": {"format": "mxfp8"}}, rf"^input of {name}: .*does not fit mxfp8"),
    ):
        asked = component(overrides=[{"match": name, "reason": "because", **operands}])
        with pytest.raises(ValueError, match=refused):
            plan_of(asked, linears=[LinearShape(name, 128, 120)])


@pytest.mark.parametrize(
    ("operand", "k", "scheme", "needs"),
    [
        ({"format": "int4"}, 5600, "int8-int8", "int8, not int4: K = 5600 is not in multiples of 64"),  # of SANA 1.6B
        ({"format": "int4", "group_size": 128}, 2240, "int4-int4", "int4, not int4_g128: K = 2240"),
        ({"format": "int4", "group_size": 128}, 5600, "int8-int8", "int8, not int4_g128: K = 5600"),
        ({"format": "nvfp4", "four_over_six": True}, 120, "fp8-fp8", "fp8, not nvfp4: K = 120"),
        ({"format": "mxfp4"}, 48, "fp8-fp8", "fp8, not mxfp4: K = 48"),
        ({"format": "mxfp8"}, 48, "fp8-fp8", "fp8, not mxfp8: K = 48"),
        ({"format": "fp8_1x128"}, 5600, "fp8-fp8", "fp8, not fp8_1x128: K = 5600"),
        ({"format": "nvfp4"}, 5600, "nvfp4-nvfp4-static", ""),
        ({"format": "mxfp4"}, 5600, "mxfp4-mxfp4", ""),
        (FP8, 5, "fp8-fp8", ""),
    ],
)
def test_a_k_that_is_not_in_whole_groups_takes_the_next_format_that_holds_it(operand, k, scheme, needs):
    shapes = [
        LinearShape("single_transformer_blocks.0.attn.to_q", 128, k),
        LinearShape("single_transformer_blocks.0.norm.linear", 128, k),
    ]
    main = component(weights=operand, activations=operand, modulation={"format": operand["format"]})
    plan = plan_of(main, linears=shapes)
    layer, modulation = plan.layers
    assert str(layer.scheme) == scheme and modulation.scheme.weights.name == scheme.split("-")[0]
    assert needs in layer.reason and layer.method.weights_46 == layer.method.activations_46 == ("46" in scheme)
    assert any(note.startswith(needs) for note in plan.notes) == bool(needs)
    assert len(plan.notes) == 0 or plan.notes[0].endswith(" of 2 Linears)")


def test_a_k_that_the_format_holds_in_other_layers_changes_nothing_there():
    name = "single_transformer_blocks.0.attn.to_{}"
    plan = plan_of(component(weights={"format": "int4"}), linears=[LinearShape(name.format("q"), 128, 128)])
    assert plan.notes == () and str(plan.layers[0].scheme).startswith("int4") and ";" not in plan.layers[0].reason


def test_a_linear_that_no_row_names_is_reported():
    stranger = LinearShape("transformer_blocks.0.adapter", 8, 8)
    plan = plan_of(linears=[*LINEARS, stranger])
    assert plan.layers[-1].scheme is None
    assert plan.layers[-1].reason == "16 bit: the flux row does not name it"


def test_groups_share_an_input_and_leave_modulation_out():
    groups = {
        name: [layer.name for layer in members]
        for name, members in plan_of(component(modulation=FP8)).statistics_groups().items()
    }
    block = "single_transformer_blocks.0"
    single = [f"{block}.attn.to_q", f"{block}.attn.to_k", f"{block}.attn.to_v", f"{block}.proj_mlp"]
    assert sorted(groups[f"{block}.attn.to_q"]) == sorted(single)
    assert groups[f"{block}.proj_out"] == [f"{block}.proj_out"]
    assert not any("norm" in name for name in groups)


def test_bits_are_those_of_what_is_stored():
    layer = next(la for la in plan_of().layers if la.name == "transformer_blocks.0.attn.to_q")
    assert layer.stored_bits == 128 * 128 * 4.5 + 32 + 32  # codes and block scales, weight_scale_2, input_scale
    kept = next(la for la in plan_of().layers if la.scheme is None)
    assert kept.bits_per_weight == 16


def test_modulation_inputs_are_never_calibrated():
    """Statistics leave modulation out, so an override there must not ask for a static input scale."""
    operand = {"format": "nvfp4"}
    component = Component.model_validate(
        {
            "weights": operand,
            "activations": operand,
            "overrides": [{"role": "modulation", "weights": operand, "activations": operand, "reason": "tried"}],
        }
    )
    linears = [LinearShape("transformer_blocks.0.norm1.linear", 768, 128), LinearShape(f"{BLOCK}.attn.to_q", 128, 128)]
    plan = make_plan(FAMILIES["flux"], "transformer", component, linears, static_inputs=True)
    assert [str(layer.scheme) for layer in plan.layers] == ["nvfp4-nvfp4", "nvfp4-nvfp4-static"]


# What may be tried

FULL = {
    "weights": {"format": "nvfp4", "four_over_six": True},
    "activations": {"format": "nvfp4", "four_over_six": True},
    "transforms": ["center", "smooth", "hadamard"],
    "low_rank": {"rank": "1/96", "deflate": True},
    "rounding": {"method": "gptq", "scales": "search"},
    "modulation": FP8,
}
ALL = ("center", "smooth", "hadamard")


def full(**keys) -> Component:
    return Component.model_validate({**FULL, **keys})


def methods(recipe, linears=LINEARS, compat="full", **how) -> dict[str, Method]:
    plan = plan_of(recipe, linears, compat=compat, **how)
    return {layer.name: layer.method for layer in plan.layers}


def reason(recipe, name, linears=LINEARS, compat="full", **how) -> str:
    plan = plan_of(recipe, linears, compat=compat, **how)
    return next(layer.reason for layer in plan.layers if layer.name == name)


def test_what_the_keys_say_may_be_tried():
    tried = methods(full())
    assert tried[f"{BLOCK}.attn.to_q"] == Method(
        transforms=ALL, hadamard=128, rank=1, deflate=True, gptq=True, search=True, weights_46=True, activations_46=True
    )
    assert not tried[f"{BLOCK}.attn.to_out.0"].deflate  # what attention makes is not normalised
    plan = plan_of(full(), compat="full")
    for layer in plan.layers:
        assert layer.method.is_plain == (layer.scheme is None or layer.role == "modulation"), layer
        assert layer.describe()["may_try"] == str(layer.method)
    assert str(tried[f"{BLOCK}.attn.to_q"]) == (
        "center, smooth, hadamard 128, rank 1, deflate, gptq, search, 4/6 of weights, 4/6 of activations"
    )
    assert str(Method()) == "plain" and Method().is_plain


def test_a_plain_recipe_tries_nothing():
    assert set(methods(component())) == {linear.name for linear in LINEARS}
    assert set(methods(component(), profile="best").values()) == {Method()}


@pytest.mark.parametrize(
    ("profile", "gptq", "best"), [("fast", False, False), ("balanced", True, False), ("best", True, True)]
)
def test_a_profile_limits_the_effort(profile, gptq, best):
    tried = methods(full(), profile=profile)[f"{BLOCK}.attn.to_q"]
    assert (tried.gptq, tried.joint, tried.wide) == (gptq, best, best)
    assert (tried.transforms, tried.search, tried.rank) == (ALL, True, 1)


def test_rtn_tries_nothing_and_says_nothing_of_it():
    assert set(methods(full(), profile="rtn").values()) == {Method()}
    plain = plan_of(component(modulation=FP8))
    assert [layer.reason for layer in plan_of(full(), profile="rtn").layers] == [la.reason for la in plain.layers]


def test_joint_needs_gptq():
    tried = methods(full(rounding={"method": "rtn", "scales": "search"}), profile="best")[f"{BLOCK}.attn.to_q"]
    assert not tried.joint and tried.wide


def test_an_override_keeps_the_transforms_and_brings_its_own_scales():
    eight = {"weights": FP8, "activations": FP8, "reason": "r"}
    name = "single_transformer_blocks.0.proj_out"
    tried = methods(full(overrides=[{"role": "mixed_out", **eight}, {"match": "proj_out", **eight}]))
    assert tried[name] == Method(transforms=ALL, hadamard=128, rank=1, gptq=True, search=True)
    assert tried["proj_out"].is_plain  # nobody looks at what it reads
    weight_only = methods(full(overrides=[{"role": "mixed_out", "weights": FP8, "reason": "r"}]))
    assert weight_only[name].transforms == ALL


@pytest.mark.parametrize(
    "other",
    [
        {"weights": FP8, "activations": FP8},
        {"weights": {"format": "nvfp4"}},
        {"weights": {"format": "nvfp4"}, "activations": {"format": "nvfp4"}},  # one scale a block, not two
    ],
)
def test_linears_that_quantize_one_input_in_different_ways_share_no_transforms(other):
    name = f"{BLOCK}.attn.to_v"
    recipe = full(overrides=[{"match": name, **other, "reason": "r"}])
    tried = methods(recipe)
    assert all(tried[f"{BLOCK}.attn.{to}"].is_plain for to in ("to_q", "to_k", "to_v"))
    assert "plainly rounded: the Linears that share its input quantize it in" in reason(recipe, f"{BLOCK}.attn.to_q")
    assert tried[f"{BLOCK}.attn.add_q_proj"].transforms == ALL


@pytest.mark.parametrize("how", [{"exclude": ["**.to_v"]}, {"include": ["**.to_q", "**.to_k", "**.norm1.linear"]}])
def test_what_stays_in_16_bit_takes_no_part_in_its_group(how):
    tried = methods(full(), **how)
    assert tried[f"{BLOCK}.attn.to_v"].is_plain
    assert tried[f"{BLOCK}.attn.to_q"].transforms == tried[f"{BLOCK}.attn.to_k"].transforms == ALL


# Where a mean and factors fold into what makes the input


def portable(**keys) -> Component:
    return full(
        **{"activations": {"format": "nvfp4"}, "transforms": ["center", "smooth"], "low_rank": None, "modulation": FP8}
        | keys
    )


FOLDABLE = ("qkv", "text_qkv", "ff_up", "text_ff_up", "single_in", "attn_out", "text_attn_out", "mixed_out")


@pytest.mark.parametrize("modulation", [None, FP8, {"format": "int8"}])
def test_portable_smooths_what_folds_into_a_modulation_with_a_scale_for_each_row(modulation):
    plan = plan_of(portable(modulation=modulation), compat="portable")
    for layer in plan.quantized:
        if layer.role != "modulation":
            assert layer.method.transforms == (("center", "smooth") if layer.role in FOLDABLE else ()), layer
            assert ("not centred or smoothed" in layer.reason) == (layer.role not in FOLDABLE)
            assert layer.method.gptq and layer.method.search and layer.method.weights_46
    down = next(layer.reason for layer in plan.layers if layer.name == f"{BLOCK}.ff.net.2")
    assert down.endswith("its input is made by an activation function, which nothing can be folded into")


def test_portable_folds_what_attention_makes_into_its_values():
    plan = {layer.name: layer for layer in plan_of(portable(), compat="portable").layers}
    out, text_out = plan[f"{BLOCK}.attn.to_out.0"], plan[f"{BLOCK}.attn.to_add_out"]
    assert out.method.folding == text_out.method.folding == ("factors and mean",)
    assert out.together == text_out.together == out.name and plan[f"{BLOCK}.attn.to_q"].together == ""
    assert plan["single_transformer_blocks.0.proj_out"].method.folding == ("factors and mean", "nothing")
    assert "powers of two" in out.reason and "powers of two" in str(out.method) and out.method.powers_of_two


@pytest.mark.parametrize("value, powers_of_two", [("int8", False), ("nvfp4", True), (None, True)])
def test_values_with_an_fp32_scale_for_each_row_take_any_factor_in(value, powers_of_two):
    weights = {"format": value} if value else None
    override = {"match": f"{BLOCK}.attn.to_v", "weights": weights, "reason": "as its rows have it"}
    if value != "int8":  # the text's values are in int8 then, and share the factors
        override["activations"] = {"format": "int8"} if value else None
    recipe = portable(weights=FP8, activations={"format": "int8"}, overrides=[override] if value != "int8" else [])
    method = methods(recipe, compat="portable")[f"{BLOCK}.attn.to_out.0"]
    assert method.folding and method.powers_of_two is powers_of_two


@pytest.mark.parametrize(
    "name, changes, folding",
    [
        ("attn.to_v", {"bias": False}, ("factors",)),
        ("attn.add_v_proj", {"bias": False}, ("factors",)),
        ("attn.to_add_out", {"bias": False}, ("factors",)),
        ("attn.to_v", {"n": 64}, ()),  # a head of values for two of queries
    ],
)
def test_what_values_cannot_take_in_is_not_tried(name, changes, folding):
    linears = [replace(one, **changes) if one.name == f"{BLOCK}.{name}" else one for one in LINEARS]
    method = methods(portable(), linears, compat="portable")[f"{BLOCK}.attn.to_out.0"]
    assert method.folding == folding
    assert method.transforms == (("smooth",) if folding else ())


def test_values_whose_rows_have_no_scale_of_their_own_take_no_factors():
    override = {"match": f"{BLOCK}.attn.to_v", "weights": {"format": "fp8_tensor"}, "reason": "one scale for all rows"}
    assert methods(portable(overrides=[override]), compat="portable")[f"{BLOCK}.attn.to_out.0"].folding == ()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_tensor", "int4"])
def test_portable_smooths_nothing_that_would_not_fold_exactly(format):
    recipe = portable(modulation={"format": format})
    assert methods(recipe, compat="portable")[f"{BLOCK}.attn.to_q"].transforms == ()
    assert f"modulated by {BLOCK}.norm1.linear in {format}, which has no scale for each row" in reason(
        recipe, f"{BLOCK}.attn.to_q", compat="portable"
    )
    assert methods(recipe, compat="full")[f"{BLOCK}.attn.to_q"].transforms == ("center", "smooth")


def test_an_override_or_exclusion_of_the_modulation_decides_for_its_groups():
    into_int4 = {"match": f"{BLOCK}.norm1.linear", "weights": {"format": "int4"}, "reason": "r"}
    tried = methods(portable(overrides=[into_int4]), compat="portable")
    assert tried[f"{BLOCK}.attn.to_q"].transforms == tried[f"{BLOCK}.ff.net.0.proj"].transforms == ()
    assert tried[f"{BLOCK}.attn.add_q_proj"].transforms == ("center", "smooth")
    kept = methods(portable(modulation={"format": "int4"}), compat="portable", exclude=["**.norm1.linear"])
    assert kept[f"{BLOCK}.attn.to_q"].transforms == ("center", "smooth")
    alone = [LinearShape(f"{BLOCK}.attn.to_q", 128, 128)]
    assert "norm1.linear, which is not among the layers" in reason(portable(), alone[0].name, alone, compat="portable")


def test_nothing_of_wan_folds_and_all_of_it_may_be_smoothed_in_full():
    names = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "ffn.net.0.proj")
    linears = [LinearShape(f"blocks.0.{name}", 128, 128) for name in names]
    for compat, transforms in (("portable", ()), ("nunchaku", ALL[:2]), ("full", ALL[:2])):
        plan = make_plan(FAMILIES["wan"], "transformer", portable(), linears, static_inputs=True, compat=compat)
        assert {layer.method.transforms for layer in plan.layers} == {transforms}
        assert ("a norm without a modulation of its own" in plan.layers[0].reason) == (compat == "portable")


# Shapes


@pytest.mark.parametrize(
    ("k", "size", "said"),
    [
        (256, 128, None),
        (192, 64, "Hadamard blocks of 64: K = 192 is not in multiples of 128"),
        (5600, 32, "Hadamard blocks of 32: K = 5600 is not in multiples of 64"),
        (48, 16, "Hadamard blocks of 16: K = 48 is not in multiples of 32"),
        (120, 0, "no Hadamard: K = 120 is not in multiples of 16"),
    ],
)
def test_the_hadamard_size_is_the_largest_that_divides(k, size, said):
    linears = [LinearShape(f"{BLOCK}.attn.to_q", 64, k)]
    recipe = full(weights=FP8, activations=FP8, low_rank=None)
    layer = plan_of(recipe, linears, compat="full").layers[0]
    assert layer.method.hadamard == size and layer.method.transforms == (ALL if size else ALL[:2])
    assert layer.reason.endswith(said) if said else "Hadamard" not in layer.reason


@pytest.mark.parametrize("profile", ["rtn", "balanced"])
@pytest.mark.parametrize(
    ("k", "scheme", "said"),
    [
        (512, "int8-int8-hr256", None),
        (192, "int8-int8-hr64", "Hadamard blocks of 64: K = 192 is not in multiples of 256"),
        (48, "int8-int8-hr16", "Hadamard blocks of 16: K = 48 is not in multiples of 64"),
        (120, "int8-int8", "no Hadamard: K = 120 is not in multiples of 16"),
    ],
)
def test_a_recipes_rotation_is_made_in_the_largest_blocks_that_divide(k, scheme, said, profile):
    linears = [LinearShape(f"{BLOCK}.attn.to_q", 64, k)]
    recipe = load_recipe("int8-convrot")[1].components["transformer"]
    (layer,) = plan_of(recipe, linears, compat="comfy", profile=profile).layers
    assert str(layer.scheme) == scheme and layer.method.hadamard == 0
    assert said in layer.reason if said else "Hadamard" not in layer.reason


def test_a_rotation_is_of_quantized_inputs_alone():
    kept = {"match": "transformer_blocks.0.ff.**", "weights": {"format": "int8"}, "reason": "weight-only"}
    wide = {"match": "**.attn.to_k", "weights": {"format": "fp8"}, "activations": {"format": "fp8"}, "reason": "wide"}
    own = load_recipe("int8-convrot")[1].components["transformer"].model_dump()
    found = schemes(plan_of(Component.model_validate(own | {"overrides": [kept, wide]}), compat="comfy"))
    assert found["transformer_blocks.0.ff.net.2"] == found["transformer_blocks.0.norm1.linear"] == "int8-16bit"
    assert found["transformer_blocks.0.attn.to_k"] == "fp8-fp8-hr64"
    assert found["single_transformer_blocks.0.proj_out"] == "int8-int8-hr64"  # 128 + 512 of K


def test_a_hadamard_block_never_spans_attention_and_feed_forward():
    linears = [LinearShape("single_transformer_blocks.0.proj_out", 192, 192 + 768)]
    layer = plan_of(full(low_rank=None), linears, compat="full").layers[0]
    assert layer.segments == (192, 768) and layer.method.hadamard == 64
    assert layer.reason.endswith("Hadamard blocks of 64: K = 192 + 768 is not in multiples of 128")
    assert plan_of().layers[0].segments == (plan_of().layers[0].k,)


@pytest.mark.parametrize(("k", "deflate"), [(6144, True), (6272, False)])
def test_deflation_takes_normalised_inputs_up_to_a_width(k, deflate):
    name = f"{BLOCK}.attn.to_q"
    layer = plan_of(full(), [LinearShape(name, 128, k)], compat="full").layers[0]
    assert (layer.method.rank, layer.method.deflate) == (1, deflate)
    assert ("no deflation: K is above 6144" in layer.reason) != deflate
    assert "no deflation: its input is not normalised" in reason(full(), f"{BLOCK}.ff.net.2")


def test_a_rank_that_a_layer_does_not_have_is_refused_by_name():
    name = f"{BLOCK}.attn.to_q"
    recipe = full(low_rank={"rank": 65})
    with pytest.raises(
        ValueError, match=rf"^{name}: low_rank asks for rank 65, and its weight \(64, 128\) has at most 64"
    ):
        plan_of(recipe, [LinearShape(name, 64, 128)])
    assert methods(full(low_rank={"rank": 64}), [LinearShape(name, 64, 128)])[name].rank == 64
    assert methods(recipe, [LinearShape(name, 64, 128)], profile="rtn")[name].rank == 0


# Which entry of a recipe a component takes

NVFP4 = {"weights": {"format": "nvfp4"}, "activations": {"format": "nvfp4"}, "modulation": FP8, "exclude": ["a"]}


def entry(component, family, **components) -> Component:
    recipe = Recipe.model_validate({"version": 1, "components": {"transformer": NVFP4, **components}})
    return component_recipe(recipe, component, FAMILIES[family])


@pytest.mark.parametrize("name", ["transformer", "transformer_2", None])
def test_every_transformer_takes_the_transformer_s_entry_unless_it_has_its_own(name):
    assert entry(name, "wan") == Component.model_validate(NVFP4)
    assert entry("transformer_2", "wan", transformer_2={"weights": FP8}) == Component(weights={"format": "fp8"})


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_3", None])
def test_a_text_encoder_takes_the_weights_alone(name):
    assert entry(name, "t5") == Component.model_validate({"weights": {"format": "nvfp4"}})
    assert entry(name, "t5", text_encoder_2={"weights": FP8}).weights.format == "nvfp4"
    assert entry("text_encoder", "t5", text_encoder={"weights": FP8, "exclude": ["x"]}).exclude == ["x"]


def test_a_vae_by_itself_needs_an_entry():
    assert entry("vae", "kl") == Component.model_validate({"weights": {"format": "nvfp4"}})
    assert entry(None, "kl", vae={"weights": FP8}).weights.format == "fp8"
    with pytest.raises(ValueError, match="says nothing about AutoencoderKL: give it an entry"):
        entry(None, "kl")


@pytest.mark.parametrize(
    "said",
    [
        {"transforms": ["smooth"]},
        {"low_rank": {"rank": 8}},
        {"rounding": {"method": "gptq"}},
        {"rounding": {"scales": "search"}},
    ],
)
@pytest.mark.parametrize(("name", "family"), [("text_encoder", "clip"), ("vae", "kl")])
def test_what_needs_calibration_is_refused_where_none_looks(said, name, family):
    recipe = {"version": 1, "components": {name: {"weights": FP8, **said}}, "calibration": {}, "compat": "full"}
    with pytest.raises(ValueError, match=f"{name}: calibration looks at transformers only.*write `transforms: \\[\\]`"):
        component_recipe(Recipe.model_validate(recipe), name, FAMILIES[family])


def test_a_text_encoder_leaves_two_scales_and_all_that_is_fitted_to_the_transformer():
    recipe = Recipe.model_validate(
        {"version": 1, "components": {"transformer": FULL}, "calibration": {}, "compat": "full"}
    )
    assert component_recipe(recipe, "text_encoder", FAMILIES["t5"]) == Component.model_validate(
        {"weights": {"format": "nvfp4"}}
    )


@pytest.mark.parametrize(
    "said", [{"activations": FP8}, {"overrides": [{"role": "qkv", "weights": FP8, "activations": FP8, "reason": "r"}]}]
)
@pytest.mark.parametrize(("name", "family"), [("text_encoder", "clip"), ("vae", "kl")])
def test_activations_of_what_runs_once_are_refused(said, name, family):
    with pytest.raises(ValueError, match=f"{name}: it runs once per image.*write `activations: null`"):
        entry(name, family, **{name: {"weights": FP8, **said}})


def test_attention_may_be_that_of_some_blocks():
    single = "single_transformer_blocks.*.attn"
    some = plan_of(component(attention={"fp8": [single], "int8": ["transformer_blocks.0.**"]}))
    assert some.attention == {
        "fp8": [f"single_transformer_blocks.{index}.attn" for index in range(4)],
        "int8": ["transformer_blocks.0.attn"],
    }
    assert plan_of(component(attention={"fp8": ["**.attn"]})).attention == "fp8"
    for patterns, words in (
        ({"fp8": ["transformer_blocks.9.attn"]}, r"blocks.9.attn' matches no self-attention .* '\w+\.\d+\.attn'$"),
        ({"fp8": ["**.attn"], "int8": [single]}, "blocks.0.attn is named under fp8 and under int8; name it once"),
    ):
        with pytest.raises(ValueError, match=words):
            plan_of(component(attention=patterns))


def test_attention_in_fp8_is_of_transformers_whose_attention_can_be_replaced():
    asked = component(attention="fp8")
    assert plan_of(asked).attention == "fp8" and plan_of().attention == "16bit"
    with pytest.raises(ValueError, match=r"attention in fp8: not in SD3Transformer2DModel.*write `attention: 16bit`"):
        make_plan(FAMILIES["sd3"], "transformer", asked, LINEARS, static_inputs=True)
    for name, family in (("text_encoder", "clip"), ("vae", "kl")):
        with pytest.raises(ValueError, match=f"{name}: it runs once per image, so attention in fp8"):
            entry(name, family, **{name: {"weights": FP8, "attention": "fp8"}})
    main = Recipe.model_validate({"version": 1, "components": {"transformer": {"weights": FP8, "attention": "fp8"}}})
    assert component_recipe(main, "text_encoder", FAMILIES["clip"]).attention == "16bit"
    assert component_recipe(main, "transformer_2", FAMILIES["wan"]).attention == "fp8"


def test_a_recipe_without_a_transformer_serves_what_it_names():
    recipe = Recipe.model_validate({"version": 1, "components": {"text_encoder": {"weights": FP8}}})
    assert component_recipe(recipe, "text_encoder", FAMILIES["clip"]).weights.format == "fp8"
    for name, family in (("transformer", "flux"), ("text_encoder_2", "t5")):
        with pytest.raises(ValueError, match=f"says nothing about {name}"):
            component_recipe(recipe, name, FAMILIES[family])


def test_a_model_without_linears_is_named():
    with pytest.raises(ValueError, match="vae: the model has no Linears; there is nothing to quantize"):
        make_plan(FAMILIES["kl"], "vae", Component.model_validate({"weights": FP8}), [], static_inputs=False)


BLOCK = "transformer_blocks.0"


def test_two_scales_of_weights_alone_need_no_data():
    """They are chosen by the weights themselves; those of activations cost time, so held-out tokens judge them."""
    assert not Method().needs_data and not Method(weights_46=True, wide=True).needs_data
    for fitted in (
        {"transforms": ("center",)},
        {"rank": 1},
        {"gptq": True},
        {"search": True},
        {"activations_46": True},
    ):
        assert Method(**fitted).needs_data
    nvfp4 = {"format": "nvfp4", "four_over_six": True}
    recipe = {"version": 1, "compat": "full", "components": {"transformer": {"weights": nvfp4}}}
    read = Recipe.model_validate(recipe)
    assert not read.needs_data(read.components["transformer"])
    recipe["components"]["transformer"]["activations"] = nvfp4
    with pytest.raises(ValueError, match="what transformer says is fitted to data, and there is none"):
        Recipe.model_validate(recipe)
