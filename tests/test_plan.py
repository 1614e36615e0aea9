"""The plan: what becomes of each Linear, and the reason that people read."""

import pytest

from fluxq.base.model import resolve_model
from fluxq.quantize.checkpoint import list_linears
from fluxq.recipes.families import FAMILIES
from fluxq.recipes.plan import LinearShape, component_recipe, make_plan
from fluxq.recipes.recipe import Component, Recipe, load_recipe, shipped_recipes

FLUX = FAMILIES["flux"]
LINEARS = list_linears(resolve_model("tiny"), "transformer")
FP8 = {"format": "fp8"}


def component(**keys) -> Component:
    return Component.model_validate({"weights": {"format": "nvfp4"}, "activations": {"format": "nvfp4"}, **keys})


def plan_of(recipe=None, linears=LINEARS, static_inputs=True, **how):
    return make_plan(FLUX, "transformer", recipe or component(), linears, static_inputs=static_inputs, **how)


def schemes(plan) -> dict[str, str]:
    return {layer.name: str(layer.scheme) for layer in plan.layers}


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_plans_every_linear_with_a_reason(name):
    recipe = load_recipe(name)[1].components["transformer"]
    plan = plan_of(recipe)
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


def test_a_role_that_the_family_lacks_is_noted_and_skipped():
    plan = plan_of(component(overrides=[{"role": "cross_attn", "weights": FP8, "reason": "r"}]))
    assert plan.notes == ("role 'cross_attn': the flux family has none, skipped",)
    assert plan.schemes() == plan_of().schemes()


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
    with pytest.raises(ValueError, match=r"to_qq' matches no Linear.*for example '.+'.*`fluxq plan` lists all"):
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


def test_a_shape_that_the_format_cannot_hold_names_the_layer():
    name = "transformer_blocks.0.attn.to_q"
    with pytest.raises(ValueError, match=rf"^{name}: shape \(128, 120\) does not fit nvfp4.*multiples of 16"):
        plan_of(linears=[LinearShape(name, 128, 120)])
    weight_only = component(activations={"format": "mxfp8"}, weights=FP8)
    with pytest.raises(ValueError, match=rf"^input of {name}: .*does not fit mxfp8"):
        plan_of(weight_only, linears=[LinearShape(name, 128, 120)])
    assert plan_of(component(weights=FP8, activations=FP8), linears=[LinearShape(name, 128, 120)]).quantized


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
    "said", [{"activations": FP8}, {"overrides": [{"role": "qkv", "weights": FP8, "activations": FP8, "reason": "r"}]}]
)
@pytest.mark.parametrize(("name", "family"), [("text_encoder", "clip"), ("vae", "kl")])
def test_activations_of_what_runs_once_are_refused(said, name, family):
    with pytest.raises(ValueError, match=f"{name}: it runs once per image.*write `activations: null`"):
        entry(name, family, **{name: {"weights": FP8, **said}})


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
