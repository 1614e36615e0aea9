"""Tests of the stages tried on an input group, of the gate, and that the result says what it computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.layers.synthetic import draw
from fluxq.calibrate.inputs import GroupInputs, InputsBuilder
from fluxq.quantize import group as fitting
from fluxq.quantize.group import GroupLayer, GroupToFit, fit_group, fit_groups
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.recipes.plan import Method

K = 256
ALL = Method(
    ("center", "smooth", "hadamard"),
    hadamard=128,
    rank=6,
    deflate=True,
    gptq=True,
    search=True,
    weights_46=True,
    activations_46=True,
)


def gathered(fit: torch.Tensor, held: torch.Tensor, segments: tuple[int, ...] = ()) -> GroupInputs:
    builder = InputsBuilder("x", fit.shape[1], segments, calls=(1, 1))
    builder.add(fit)
    builder.add(held, held_out=True)
    return builder.finish()


def scheme(name: str, weight_only: bool = False) -> Scheme:
    row = FORMATS[name]
    return Scheme(row, None if weight_only else row, static_input=row.two_level and not weight_only)


@pytest.fixture(scope="module")
def layer():
    return draw("adaln", k=K, n=96, fit=4096, held=512)


@pytest.fixture(scope="module")
def inputs(layer):
    return gathered(layer.fit, layer.held)


def tensors(group, name: str = "a") -> dict[str, torch.Tensor]:
    return {key: parameter.data for key, parameter in group.layers[name].named_parameters()}


def kept(group) -> set[str]:
    return {stage.name for stage in group.stages if stage.kept}


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4", "int8"])
def test_all_stages_together_gain_much_and_say_so(layer, inputs, name):
    method = ALL if name == "nvfp4" else replace(ALL, activations_46=False)
    group = fit_group([GroupLayer("a", layer.weight, None, scheme(name))], inputs, method)
    assert group.fitted.total > group.rounded.total + 4
    assert {"smooth", "gptq"} <= kept(group)
    final = group.layers["a"].scheme
    assert final.smooth and final.hadamard == 128 * ("hadamard" in kept(group))
    assert final.rank + final.deflate == 6
    assert all("dB" in stage.reason for stage in group.stages)
    assert tensors(group)["pre_quant_scale"].dtype == torch.bfloat16


def test_plain_method_is_rounding_to_nearest(layer, inputs):
    from fluxq.kernels.tensor import QuantizedTensor

    group = fit_group([GroupLayer("a", layer.weight, None, scheme("nvfp4"))], inputs, Method())
    q = QuantizedTensor.quantize(layer.weight, "nvfp4")
    assert torch.equal(tensors(group)["weight"], q.codes)
    assert group.stages == () and group.fitted.total == group.rounded.total
    assert set(tensors(group)) == {"weight", "weight_scale", "weight_scale_2", "input_scale"}


@pytest.mark.slow
def test_layers_of_a_group_share_what_is_done_to_x(layer, inputs):
    other = draw("attn", k=K, n=64, seed=3).weight
    joined = [GroupLayer(name, w, None, scheme("nvfp4"), True) for name, w in (("a", layer.weight), ("b", other))]
    a, b = (tensors(fit_group(joined, inputs, ALL), name) for name in "ab")
    for name in ("pre_quant_scale", "deflate_basis", "input_scale", "weight_scale_2"):
        assert torch.equal(a[name], b[name])
        assert a[name].data_ptr() != b[name].data_ptr()  # safetensors stores no tensor twice


@pytest.mark.parametrize("gptq", [False, True])
def test_joined_weights_with_one_scale_each_share_it(layer, inputs, gptq):
    own = Scheme(FORMATS["fp8_tensor"], FORMATS["fp8_tensor"], static_input=True)
    other = 3 * draw("attn", k=K, n=64, seed=3).weight
    joined = [GroupLayer(name, w, None, own, True) for name, w in (("a", layer.weight), ("b", other))]
    group = fit_group(joined, inputs, Method(gptq=gptq))
    a, b = (tensors(group, name) for name in "ab")
    assert a["weight_scale"] == b["weight_scale"] == other.abs().max() / 448 > layer.weight.abs().max() / 448
    assert a["input_scale"] == b["input_scale"] and group.fitted.total > 25


@pytest.mark.slow
def test_a_price_that_is_too_high_is_not_paid(layer, inputs):
    def price(before, after):
        return 50.0 if after[0].rank or after[0].deflate else 0.0

    one = [GroupLayer("a", layer.weight, None, scheme("nvfp4"))]
    free = fit_group(one, inputs, ALL, price=price, rate=0.0)
    dear = fit_group(one, inputs, ALL, price=price, rate=1.0)
    assert "low rank" in kept(free) and "low rank" not in kept(dear)
    assert dear.layers["a"].scheme.rank == dear.layers["a"].scheme.deflate == 0
    refused = next(stage for stage in dear.stages if stage.name == "low rank")
    assert refused.percent == 50 and "50.00 dB asked" in refused.reason


@pytest.mark.parametrize(
    ("stage", "method"),
    [
        ("smooth", Method(("smooth",))),
        ("center", Method(("center",))),
        ("hadamard", Method(("hadamard",), hadamard=128)),
        ("low rank", Method(rank=2)),
        ("low rank", Method(rank=2, deflate=True)),
    ],
)
def test_the_gate_rejects_what_does_not_help(stage, method):
    """Independent normal numbers: nothing to centre or smooth, all directions and weights alike."""
    g = draw("gauss", k=K, n=64, fit=4096, held=512)
    if stage == "hadamard":  # an outlier in a block of its own, which a rotation would spread over others
        g.fit[:, 7] *= 60
        g.held[:, 7] *= 60
    group = fit_group(
        [GroupLayer("a", g.weight, None, scheme("nvfp4"))],
        gathered(g.fit, g.held),
        method,
        price=lambda before, after: 1.0,
        rate=0.3,
    )
    assert kept(group) == set()
    assert group.stages[0].name == stage and not group.layers["a"].scheme.is_transformed
    assert group.fitted.total == group.rounded.total


def test_held_out_tokens_decide_and_are_not_fitted_to(layer):
    """A mean that only the fitting tokens have must not be subtracted."""
    inputs = gathered(layer.fit + 3 * layer.fit.std(), layer.held - layer.held.mean(0))
    group = fit_group([GroupLayer("a", layer.weight, None, scheme("nvfp4"))], inputs, Method(("center",)))
    assert kept(group) == set()


def test_too_few_tokens_for_gptq_is_said(layer):
    inputs = gathered(layer.fit[: K // 2], layer.held)
    group = fit_group([GroupLayer("a", layer.weight, None, scheme("nvfp4"))], inputs, Method(gptq=True, search=True))
    assert kept(group) == {"scale search"}
    assert group.stages[0].reason == f"skipped: {K // 2} tokens for {K} channels, 1 for each is asked"


def test_a_dead_input_is_rounded_to_nearest(layer):
    inputs = gathered(torch.zeros(64, K), torch.zeros(8, K))
    group = fit_group([GroupLayer("a", layer.weight, None, scheme("nvfp4"))], inputs, ALL)
    assert "always zero" in group.stages[0].reason
    assert all(t.float().isfinite().all() for t in tensors(group).values())


def test_dead_channels_and_zero_columns_give_no_nan(layer):
    fit, held, w = layer.fit.clone(), layer.held.clone(), layer.weight.clone()
    fit[:, :40] = held[:, :40] = 0
    w[:, 60:100] = 0
    w[5] = 0
    group = fit_group([GroupLayer("a", w, None, scheme("nvfp4"))], gathered(fit, held), ALL)
    assert all(t.float().isfinite().all() for t in tensors(group).values())
    assert group.fitted.total > group.rounded.total


def test_segments_are_smoothed_and_fed_back_apart(layer):
    fit, held = layer.fit.clone(), layer.held.clone()
    fit[:, 64:] *= 30
    held[:, 64:] *= 30
    inputs = gathered(fit, held, (64, K - 64))
    assert [gram.shape[0] for gram in inputs.grams] == [64, K - 64]
    for name in ("nvfp4", "int8"):
        method = Method(("smooth",), gptq=True, search=True)
        group = fit_group([GroupLayer("a", layer.weight, None, scheme(name))], inputs, method)
        assert {"smooth", "gptq"} <= kept(group)


def test_bad_weights_are_named(layer, inputs):
    w = layer.weight.clone()
    w[3, 3] = torch.inf
    with pytest.raises(ValueError, match=r"blocks\.0\.a\.weight: holds NaN or infinity"):
        fit_group([GroupLayer("blocks.0.a", w, None, scheme("nvfp4"))], inputs, ALL)


@pytest.mark.slow
def test_the_same_twice(layer, inputs):
    one = [GroupLayer("a", layer.weight, torch.ones(96), scheme("nvfp4"))]
    first, second = fit_group(one, inputs, ALL), fit_group(one, inputs, ALL)
    assert first.stages == second.stages
    for name, tensor in tensors(first).items():
        assert torch.equal(tensor.float(), tensors(second)[name].float())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "int8"])
def test_a_few_rows_at_a_time_give_the_same_layer(layer, inputs, name, monkeypatch):
    one = [GroupLayer("a", layer.weight, torch.ones(96), scheme(name))]
    method = replace(ALL, rank=0, activations_46=False)
    whole = fit_group(one, inputs, method)
    monkeypatch.setattr(fitting, "_LEAST_ROWS", 20)
    monkeypatch.setattr(fitting, "_SHARE_OF_GRAM", K)
    chunked = fit_group(one, inputs, method)
    assert kept(chunked) == kept(whole)
    assert chunked.fitted.total == pytest.approx(whole.fitted.total, abs=0.02)
    codes, again = (tensors(found)["weight"].view(torch.uint8) for found in (whole, chunked))
    assert (codes != again).float().mean() < 0.01  # sums of other products, rounded in fp32


def test_weight_only_layers_are_fitted_too(layer, inputs):
    group = fit_group(
        [GroupLayer("a", layer.weight, None, scheme("int4", weight_only=True))],
        inputs,
        Method(("center", "smooth"), gptq=True, search=True),
    )
    assert group.fitted.total > group.rounded.total + 4
    assert str(group.layers["a"].scheme).startswith("int4-16bit")


def test_joint_descent_needs_tokens_and_is_gated(layer, inputs):
    method = replace(ALL, joint=True)
    one = [GroupLayer("a", layer.weight, None, scheme("int4"))]
    without = fit_group(one, inputs, replace(method, activations_46=False))
    assert any(stage.name == "joint" and "all tokens again" in stage.reason for stage in without.stages)
    again = replace(inputs, tokens=lambda: iter([(layer.fit, 1.0)]))
    with_it = fit_group(one, again, replace(method, activations_46=False))
    stage = next(stage for stage in with_it.stages if stage.name == "joint")
    assert stage.kept == (stage.gain_db > 0) and "free at run time" in stage.reason
    assert with_it.fitted.total >= without.fitted.total


def test_joint_descent_wins_where_rounding_of_x_is_large():
    """Strongly correlated inputs of few directions: what rounding adds to x can be told from x."""
    g = torch.Generator().manual_seed(0)
    basis = torch.randn(12, K, generator=g)
    x = torch.randn(8192 + 512, 12, generator=g) @ basis + 0.05 * torch.randn(8192 + 512, K, generator=g)
    fit, held = x.split([8192, 512])
    w = torch.randn(64, K, generator=g)
    inputs = replace(gathered(fit, held), tokens=lambda: iter([(fit, 1.0)]))
    method = Method(gptq=True, search=True, joint=True, rank=4)
    group = fit_group([GroupLayer("a", w, None, scheme("int4"))], inputs, method)
    assert "joint" in kept(group)
    assert next(stage.gain_db for stage in group.stages if stage.name == "joint") > 0.3


def test_four_over_six_of_weights_alone(layer, inputs):
    one = [GroupLayer("a", layer.weight, None, scheme("nvfp4"))]
    plain, chosen = (fit_group(one, inputs, method) for method in (Method(), Method(weights_46=True)))
    assert chosen.fitted.total != plain.rounded.total
    assert not torch.equal(tensors(chosen)["weight_scale"].float(), tensors(plain)["weight_scale"].float())


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4", "int8"])
def test_the_layer_computes_what_was_judged(layer, inputs, name):
    """The held-out dB again, by the layer that is stored and the op that runs it."""
    method = ALL if name == "nvfp4" else replace(ALL, activations_46=False)
    bias = torch.randn(96, generator=torch.Generator().manual_seed(1))
    group = fit_group([GroupLayer("a", layer.weight, bias, scheme(name))], inputs, method, dtype=torch.float32)
    y = layer.held @ layer.weight.T
    lost = group.layers["a"](layer.held) - bias - y
    total = -10 * torch.log10(lost.square().sum() / y.square().sum()).item()
    assert total == pytest.approx(group.fitted.total, abs=0.05)
    of_tokens = (-10 * torch.log10(lost.square().sum(1) / y.square().sum(1))).sort().values
    assert of_tokens[len(y) // 2].item() == pytest.approx(group.fitted.median, abs=0.1)
    assert of_tokens[len(y) // 10].item() == pytest.approx(group.fitted.low, abs=0.1)


def test_a_massive_token_does_not_decide_for_the_others():
    """Smoothing serves the one token that holds most of the power, and coarsens the weights for all others."""
    random = torch.Generator().manual_seed(0)
    fit, held = (torch.randn(count, K, generator=random) for count in (2048, 512))
    weight = torch.randn(96, K, generator=random)
    for x in (fit, held):
        x[::256, :8] *= 2000
    method = Method(("center", "smooth"), gptq=True)
    group = fit_group([GroupLayer("a", weight, None, scheme("int8"))], gathered(fit, held), method)
    smooth = next(stage for stage in group.stages if stage.name == "smooth")
    assert smooth.gain_db > 3 and not smooth.kept and "the median token is" in smooth.reason
    for of in ("total", "median", "low"):
        assert getattr(group.fitted, of) >= getattr(group.rounded, of) - fitting.MOST_LOST


# Mean and factors that other Linears take in


def ridden(seed: int, segments: tuple[int, ...] = ()) -> GroupInputs:
    """Inputs whose channels have other sizes and means."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 1, K)[torch.randperm(K, generator=torch.Generator().manual_seed(0))]
    fit, held = ((torch.randn(count, K, generator=random) + 0.7) * sizes for count in (2048, 512))
    return gathered(fit, held, segments)


def test_groups_that_share_a_maker_have_one_mean_and_factors_that_are_powers_of_two(layer):
    method = Method(("center", "smooth"), folding=("factors and mean",), powers_of_two=True, gptq=True)
    groups = [
        GroupToFit([GroupLayer(name, layer.weight, None, scheme("int8"))], ridden(i), method)
        for i, name in enumerate("ab")
    ]
    first, second = fit_groups(groups)
    a, b = tensors(first, "a"), tensors(second, "b")
    assert torch.equal(a["pre_quant_scale"], b["pre_quant_scale"]) and torch.equal(
        a["pre_quant_mean"], b["pre_quant_mean"]
    )
    assert all(group.fitted.total > group.rounded.total + 3 for group in (first, second))
    factors = a["pre_quant_scale"].float()
    assert torch.equal(factors.log2().round(), factors.log2()) and factors.max() == 1 and factors.min() >= 2**-8
    assert [stage.gain_db for stage in first.stages[:2]] == [stage.gain_db for stage in second.stages[:2]]


def test_rows_with_fp32_scales_take_factors_of_least_error_in(layer):
    method = Method(("center", "smooth"), folding=("factors and mean",))
    x, layers = ridden(0), [GroupLayer("a", layer.weight, None, scheme("int8"))]
    free, bound = (fit_group(layers, x, replace(method, powers_of_two=each)) for each in (False, True))
    assert free.fitted.total > bound.fitted.total + 0.1
    factors = tensors(free)["pre_quant_scale"].float().log2()
    assert (factors != factors.round()).float().mean() > 0.9


def test_only_what_can_be_taken_in_is_left_out_of_x(layer):
    half = K // 2
    method = Method(("center", "smooth"), folding=("factors and mean", "nothing"), powers_of_two=True)
    group = fit_group([GroupLayer("a", layer.weight, None, scheme("int8"))], ridden(0, (half, half)), method)
    assert {"smooth", "center"} <= kept(group)
    made = tensors(group)
    assert (made["pre_quant_scale"][half:] == 1).all() and (made["pre_quant_mean"][half:] == 0).all()
    assert (made["pre_quant_scale"][:half] != 1).any() and (made["pre_quant_mean"][:half] != 0).all()


def test_a_group_that_loses_keeps_the_others_from_sharing(layer, inputs):
    """Factors that serve one input and harm the other stay out of both."""
    flat = gathered(torch.randn(2048, K, generator=torch.Generator().manual_seed(1)), torch.randn(512, K))
    method = Method(("smooth",), folding=("factors",), powers_of_two=True)
    groups = [
        GroupToFit([GroupLayer(name, layer.weight, None, scheme("int8"))], x, method)
        for name, x in (("a", ridden(0)), ("b", flat))
    ]
    alone = fit_group(groups[0].layers, groups[0].inputs, method)
    assert "smooth" in kept(alone)
    assert all("smooth" not in kept(group) for group in fit_groups(groups))


def test_a_gain_in_one_half_of_the_held_out_tokens_may_be_chance(layer):
    """Outliers in the first half alone."""
    random = torch.Generator().manual_seed(0)
    fit, held = (torch.randn(count, K, generator=random) for count in (2048, 512))
    fit[:, :4] *= 30
    held[:256, :4] *= 30
    group = fit_group([GroupLayer("a", layer.weight, None, scheme("int8"))], gathered(fit, held), Method(("smooth",)))
    (smooth,) = group.stages
    assert smooth.gain_db > 1 and not smooth.kept and "not in both halves" in smooth.reason


def test_tokens_without_power_decide_nothing():
    random = torch.Generator().manual_seed(0)
    fit, held = (torch.randn(count, K, generator=random) + 2 for count in (2048, 512))
    held[::5] = 0
    weight = torch.randn(96, K, generator=random)
    group = fit_group([GroupLayer("a", weight, None, scheme("int8"))], gathered(fit, held), Method(("center",)))
    assert kept(group) == {"center"} and group.fitted.low < 100 and group.fitted.tokens == 512 - 103


def test_one_held_out_token_is_judged_as_a_whole(layer):
    group = fit_group([GroupLayer("a", layer.weight, None, scheme("int8"))], gathered(layer.fit, layer.held[:1]), ALL)
    assert kept(group) and group.fitted.halves[1] is None


def test_vectors_that_all_rows_refuse_leave_no_stage(layer, monkeypatch):
    method = Method(("center", "smooth"), folding=("factors and mean",))
    groups = [
        GroupToFit([GroupLayer(n, layer.weight, None, scheme("int8"))], ridden(i), method) for i, n in enumerate("ab")
    ]
    monkeypatch.setattr(fitting._Fit, "why_not_kept", lambda fit, state, parts: ("some reason", None))
    for group in fit_groups(groups):
        assert not kept(group) and "some reason" in group.stages[0].reason
        assert not next(iter(group.layers.values())).scheme.smooth


def test_an_input_that_cannot_be_judged_says_why_the_others_share_nothing(layer):
    method = Method(("center", "smooth"), folding=("factors and mean",))
    dead = gathered(torch.zeros(2048, K), torch.zeros(512, K))
    groups = [
        GroupToFit([GroupLayer(name, layer.weight, None, scheme("int8"))], x, method)
        for name, x in (("a", ridden(0)), ("b", dead))
    ]
    a, b = fit_groups(groups)
    assert "its input is always zero (b)" in a.stages[0].reason and "its input is always zero" in b.stages[0].reason


def test_factors_beside_another_segment_are_at_most_one(layer):
    method = Method(("smooth",), folding=("factors", "nothing"), powers_of_two=True)
    group = fit_group([GroupLayer("a", layer.weight, None, scheme("nvfp4"))], ridden(0, (K // 2, K // 2)), method)
    if "smooth" in kept(group):
        assert tensors(group)["pre_quant_scale"].max() == 1


@pytest.mark.slow
def test_outputs_too_small_for_fp32_are_not_judged(layer):
    """Squares of 1e-20 have few bits left, and their errors none: any figure would be made up."""
    tiny_inputs = gathered(layer.fit * 1e-20, layer.held * 1e-20)
    group = fit_group([GroupLayer("a", layer.weight, None, scheme("int8"))], tiny_inputs, ALL)
    assert group.rounded is group.fitted is None and "too small" in group.stages[0].reason


def test_linears_that_round_one_input_in_two_ways_have_their_own_scales(layer):
    """Of them one may have a calibrated scale and the other none."""
    formats = {"a": scheme("int8"), "b": replace(scheme("nvfp4"), static_input=True)}
    for names in ("ab", "ba"):
        layers = [GroupLayer(name, layer.weight, None, formats[name]) for name in names]
        group = fit_group(layers, gathered(layer.fit, layer.held), Method())
        assert "input_scale" in tensors(group, "b") and "input_scale" not in tensors(group, "a")
