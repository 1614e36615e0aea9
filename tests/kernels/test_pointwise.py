"""1x1 convolutions are Linears over channels: SANA's feed-forward, from calibration to LoRA."""

import copy
from types import SimpleNamespace

import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

import fluxq
from fluxq.base.model import ModelFolder
from fluxq.calibrate.blocks import _watched
from fluxq.calibrate.capture import _Recorder
from fluxq.eval.debug.patch import improved
from fluxq.eval.debug.trace import Health, LayerCall, Local, Outputs
from fluxq.integrations.peft import QuantPointwiseLora, _Pointwise
from fluxq.kernels import launch, ops
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.linear import (
    QuantLinear,
    QuantPointwise,
    channels_last,
    in_place_of,
    is_linear,
    is_pixelwise,
    linear_size,
    linears_of,
    placeholder,
)
from fluxq.kernels.tensor import QuantizedTensor, pack_named
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.lora import FusedWeights, LoraFile, fuse_into, read_updates
from fluxq.quantize.nearest import round_units, sqnr, units_of, weight_matrix
from fluxq.quantize.run import quantize_linear
from fluxq.quantize.structure import list_linears, shapes_of
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LayerPlan, make_plan
from fluxq.recipes.recipe import load_recipe, shipped_recipes
from fluxq.runtime.shard import shard

SANA = FAMILIES["sana"]
UP, DOWN = "transformer_blocks.0.ff.conv_inverted", "transformer_blocks.0.ff.conv_point"
N, K, H, W = 24, 128, 8, 128  # as wide as there are channels: a wrong axis would be no error


def images(batch: int = 2, seed: int = 0) -> Tensor:
    x = torch.randn(batch, K, H, W, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x.to(memory_format=torch.channels_last)


def pixels(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def convolution(bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(K, N, 1, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


def as_linear(convolution: nn.Conv2d) -> nn.Linear:
    linear = nn.Linear(K, N, convolution.bias is not None, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(convolution.weight[:, :, 0, 0])
    if convolution.bias is not None:
        linear.bias.copy_(convolution.bias)
    return linear


def quantized(scheme: str = "nvfp4-nvfp4") -> tuple[QuantPointwise, QuantLinear]:
    """A layer that takes images, and the same one that takes tokens."""
    source = convolution()
    row = Scheme.parse(scheme)
    weight = QuantizedTensor.quantize(source.weight.flatten(1), row.weights)
    made = [QuantLinear.from_quantized(weight, source.bias, row) for _ in range(2)]
    layer = in_place_of(source, made[0])
    assert isinstance(layer, QuantPointwise) and type(made[1]) is QuantLinear
    return layer, made[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A SANA transformer as diffusers stores it, in 16 bit."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("sana")
    model = diffusers.SanaTransformer2DModel.from_config(TINY_CONFIGS[SANA.name]).bfloat16()
    model.save_pretrained(path / "transformer")
    (path / "model_index.json").write_text(
        '{"_class_name": "SanaPipeline", "transformer": ["diffusers", "SanaTransformer2DModel"]}'
    )
    return path


def sana(folder, **how) -> nn.Module:
    return diffusers.SanaTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16, **how)


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    noise = torch.Generator().manual_seed(3)
    return model(
        hidden_states=torch.randn(2, 4, 4, 4, generator=noise).bfloat16(),
        encoder_hidden_states=torch.randn(2, 5, 64, generator=noise).bfloat16(),
        timestep=torch.tensor([500.0, 500.0]),
        return_dict=False,
    )[0]


# --- what counts


class Other(nn.Conv2d):
    """A subclass may do more in its forward."""


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        (nn.Conv2d(4, 6, 1), True),
        (nn.Conv2d(4, 6, 1, padding="same", bias=False), True),
        (nn.Conv2d(4, 6, 1, padding="valid"), True),
        (nn.Conv2d(4, 6, 3, padding=1), False),
        (nn.Conv2d(4, 6, (1, 3)), False),
        (nn.Conv2d(4, 6, 1, stride=2), False),
        (nn.Conv2d(4, 6, 1, padding=1), False),
        (nn.Conv2d(4, 6, 1, groups=2), False),
        (nn.Conv1d(4, 6, 1), False),
        (nn.Conv3d(4, 6, 1), False),
        (nn.ConvTranspose2d(4, 6, 1), False),
        (Other(4, 6, 1), False),
    ],
    ids=str,
)
def test_what_counts_as_a_linear(module, counts):
    assert is_pixelwise(module) == is_linear(module) == counts
    if counts:
        assert linear_size(module) == (6, 4) and list(linears_of(nn.Sequential(module))) == ["0"]
        assert weight_matrix(module.weight, LayerPlan("it", 6, 4, "", "", False, None, "")).shape == (6, 4)
    else:
        with pytest.raises(ValueError, match=r"is no Linear: expected nn\.Linear, or nn\.Conv2d of single pixels"):
            linear_size(module)


def test_a_weight_of_another_shape_is_refused():
    plan = LayerPlan("ff.conv", 6, 4, "", "", False, None, "")
    for shape in ((6, 4, 1), (6, 1, 2, 2), (4, 6, 1, 1), (6, 4, 3, 3)):
        with pytest.raises(ValueError, match=r"^ff\.conv: weight has shape .*implies \(6, 4\)"):
            weight_matrix(torch.zeros(shape), plan)


def test_the_list_of_linears_has_the_convolutions(folder):
    shapes = {linear.name: (linear.n, linear.k) for linear in list_linears(ModelFolder("sana", folder), "transformer")}
    assert shapes[UP] == (512, 128) and shapes[DOWN] == (128, 256) and shapes["patch_embed.proj"] == (128, 4)
    assert not any("conv_depth" in name for name in shapes)


# --- the layer


@pytest.mark.parametrize("scheme", ["nvfp4-nvfp4", "int8-int8", "int4-16bit", "mxfp8-mxfp8"])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_it_is_the_linear_of_the_pixels(scheme, layout):
    layer, tokens = quantized(scheme)
    x = images().to(memory_format=layout)
    y = layer(x)
    assert y.shape == (2, N, H, W) and torch.equal(pixels(y), tokens(pixels(x).contiguous()))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(layer(x[0]), y[0])
    assert layer.of_tokens(pixels(x)).shape == (2, H, W, N)


def test_an_image_with_its_channels_last_is_not_copied(monkeypatch):
    layer, _ = quantized()
    x, seen = images(), []
    monkeypatch.setattr(ops, "quantized_linear", lambda x, *_: seen.append(x) or x[..., :N])
    layer(x)
    assert seen[0].is_contiguous() and seen[0].data_ptr() == x.data_ptr()


def test_what_is_no_image_of_its_channels_is_refused():
    layer, _ = quantized()
    with pytest.raises(ValueError, match=r"input \(5, 128\) is no image: expected \(B, 128, H, W\)"):
        layer(torch.zeros(5, K).bfloat16())
    with pytest.raises(ValueError, match=r"last axis must be K"):
        layer(torch.zeros(2, 64, 4, 4).bfloat16())
    with pytest.raises(ValueError, match="1x1 convolution and takes images: only layers that take tokens"):
        shard(layer, "N", 0, 2)


@pytest.mark.parametrize("shape", [(K,), (1, 2, K, 4, 4)], ids=str)
def test_an_image_has_three_axes_or_four(shape):
    with pytest.raises(ValueError, match=rf"is no image: expected \(B, {K}, H, W\)"):
        quantized()[0](torch.zeros(shape).bfloat16())


@pytest.mark.parametrize("bias", [True, False])
def test_it_has_what_is_read_of_a_convolution(bias):
    layer, source = quantized()[0], convolution(bias)
    for name in ("kernel_size", "stride", "dilation", "padding", "groups"):
        assert getattr(layer, name) == getattr(source, name), name
    plain = layer.plain(bias, torch.float16)
    assert repr(plain) == repr(source) and plain.weight.is_meta and plain.weight.dtype == torch.float16


@pytest.mark.parametrize("bias", [True, False])
def test_what_stands_in_its_place_until_it_is_read_takes_no_memory(bias):
    """Of a convolution, of one that is quantized already, and of a Linear."""
    scheme, source = Scheme.parse("nvfp4-16bit"), convolution(bias)
    quantized_already = in_place_of(source, placeholder(source, scheme, torch.float16))
    olds = {QuantPointwise: (source, quantized_already), QuantLinear: (as_linear(source),)}
    for kind, old in ((kind, old) for kind, those in olds.items() for old in those):
        found = placeholder(old, scheme, torch.float16)
        assert type(found) is kind and (found.in_features, found.out_features) == (K, N)
        assert (found.bias is not None) == bias and found.scheme == scheme and found.compute_dtype == torch.float16
        assert all(parameter.is_meta for parameter in found.parameters())
        assert in_place_of(old, found) is found and type(found) is kind


def test_a_layer_goes_by_what_it_takes_the_place_of():
    source, (layer, tokens) = convolution(), quantized()
    assert type(in_place_of(as_linear(source), layer)) is QuantLinear
    assert type(in_place_of(source, tokens)) is QuantPointwise
    assert type(in_place_of(tokens, quantized()[1])) is QuantPointwise  # the place of a quantized one
    with pytest.raises(ValueError, match="is no Linear"):
        placeholder(nn.Conv2d(K, N, 3), Scheme.parse("fp8-fp8"), torch.bfloat16)
    with pytest.raises(ValueError, match="QuantLinear"):
        placeholder(nn.Conv2d(K + 8, N, 1), Scheme.parse("nvfp4-nvfp4"), torch.bfloat16)


def test_gradients_reach_its_input():
    layer, tokens = quantized("fp8-16bit")
    x = images().requires_grad_()
    other = images().requires_grad_()
    layer(x).float().square().sum().backward()
    tokens(pixels(other)).float().square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0 and torch.equal(x.grad, other.grad)


def test_dequantized_it_is_a_convolution():
    layer, tokens = quantized("fp8-16bit")
    plain, linear = layer.dequantized(torch.float32), tokens.dequantized(torch.float32)
    assert type(plain) is nn.Conv2d and torch.equal(plain.weight[:, :, 0, 0], linear.weight)
    torch.testing.assert_close(plain(images().float()), layer(images().float()), rtol=1e-4, atol=1e-4)


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", shipped_recipes())
@pytest.mark.parametrize("bias", [True, False])
def test_whatever_is_tried_it_ends_as_the_linear_does(recipe, bias):
    """Transforms, low rank, feedback and scales: of one convolution and of the Linear with its weight, to the bit."""
    source, x = convolution(bias), images(4)
    x = x * torch.linspace(0.2, 4, K).bfloat16()[:, None, None] + 1  # something to center and to smooth
    layer, tokens = quantize_linear(source, x, recipe), quantize_linear(as_linear(source), pixels(x), recipe)
    assert isinstance(layer, QuantPointwise) and layer.scheme == tokens.scheme
    for (name, one), (_, other) in zip(layer.named_parameters(), tokens.named_parameters(), strict=True):
        assert torch.equal(one.data.reshape(-1).view(torch.uint8), other.data.reshape(-1).view(torch.uint8)), name
    assert torch.equal(pixels(layer(x)), tokens(pixels(x)))
    assert sqnr(source(x).float(), layer(x).float()) > 12


def test_rounded_to_nearest_it_says_what_its_weight_lost(folder):
    model = sana(folder)
    shapes = [shape for shape in shapes_of(model) if shape.name in (UP, DOWN)]
    recipe = load_recipe("fp8")[1].components["transformer"]
    plan = make_plan(SANA, "transformer", recipe, shapes, static_inputs=False)
    source = SourceWeights(ModelFolder("sana", folder), "transformer")
    units = units_of(plan.quantized, [f"{name}.weight" for name in (UP, DOWN)])
    done = list(round_units(units, source, torch.bfloat16, {}, 1))
    assert [len(unit.tensors[f"{name}.weight"].shape) for unit, name in zip(done, (UP, DOWN), strict=True)] == [2, 2]
    for unit, name in zip(done, (UP, DOWN), strict=True):
        weight = model.get_submodule(name).weight.flatten(1)
        q = QuantizedTensor.quantize(weight.data, recipe.weights.row)
        assert unit.weight_sqnr[name] == pytest.approx(sqnr(weight, q.dequantize()), abs=1e-6)
        assert 28 < unit.weight_sqnr[name] < 40


# --- what looks at it


def test_calibration_sees_pixels_as_tokens():
    source, x = convolution(), images()
    seen: list[Tensor] = []
    recorder = _Recorder({0: 0})
    for layer in (source, quantized()[0]):
        recorder.sums.clear()
        handle = layer.register_forward_pre_hook(recorder.hook("it"))
        with _watched({"it": layer}, lambda _, tokens: seen.append(tokens)):
            layer(x)
        handle.remove()
        sums = recorder.sums["it"]
        assert int(sums.count.sum()) == 2 * H * W
        assert torch.equal(sums.amax[0], x.float().abs().amax((0, 2, 3)))
        assert torch.equal(seen.pop(), pixels(x))


def test_evaluation_sees_pixels_as_tokens():
    """Outputs, local errors, kernels and health of a layer, from what its hook is given."""
    source, (layer, tokens), x = convolution(), quantized("int8-int8"), images()
    y = source(x)
    seen = LayerCall("it", 0, 0, 2, source, channels_last(source, x), channels_last(source, y))
    local, outputs, health = Local({"it": layer}), Outputs(), Health()
    local(seen)
    outputs(seen)
    ours = LayerCall("it", 0, 0, 2, layer, channels_last(layer, x), channels_last(layer, layer(x)))
    health(ours)
    want = -10 * torch.log10((tokens(pixels(x)).double() - pixels(y)).square().sum() / y.double().square().sum())
    assert local.powers.sqnr_db("it", (0,))[0] == pytest.approx(float(want), rel=1e-6)
    assert local.kernel_errors["it"] < 0.02
    assert outputs._joined("it", 0).shape == (2, 32, N)
    assert health.counts["it", 0]["not_finite"] == 0 and 0 < health.counts["it", 0]["largest"] < 0.2
    better = improved(source, Scheme.parse("fp8-fp8"))
    assert isinstance(better, QuantPointwise) and sqnr(y.float(), better(x).float()) > 25


def test_a_watched_run_shows_the_channels_last(folder):
    """`watch` itself, on a pipeline of as much as it calls."""
    from fluxq.eval.debug import trace

    model, shapes = sana(folder), {}

    def run(pipe, items, call, batch_size, on_step):
        on_step(0)
        output(model)
        yield None, torch.zeros(2, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "run_pipeline", run)
        trace.watch(
            SimpleNamespace(transformer=model),
            [f"transformer.{DOWN}"],
            [("a", 0), ("b", 1)],
            {},
            (0,),
            2,
            lambda seen: shapes.update({seen.name: (seen.x.shape, seen.y.shape)}),
        )
    assert shapes == {f"transformer.{DOWN}": ((2, 4, 4, 256), (2, 4, 4, 128))}


# --- in a model


@pytest.fixture(scope="module")
def model_of(folder):
    return lambda recipe="nvfp4": sana(folder, quantization_config=fluxq.FluxqConfig(recipe=recipe, profile="rtn"))


@pytest.mark.slow
def test_a_model_is_loaded_compiled_and_made_plain_again(folder, model_of, tmp_path):
    model = model_of()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantPointwise)}
    assert sorted(layers) == sorted(name.replace(".0.", f".{i}.") for name in (UP, DOWN) for i in (0, 1))
    want, plain = output(model), output(sana(folder))
    assert 1e-4 < (want.float() - plain.float()).norm() / plain.float().norm() < 0.25
    torch._dynamo.reset()
    assert torch.equal(output(torch.compile(model, fullgraph=True, backend="eager")), want)
    model.dequantize()
    model.save_pretrained(tmp_path)
    again = diffusers.SanaTransformer2DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(again.get_submodule(UP)) is nn.Conv2d and torch.equal(output(again), output(model))


def test_a_file_has_the_tensors_of_a_linear(model_of, tmp_path):
    from fluxq.base.tensors import TensorFile

    model_of().save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    stored = TensorFile(file).stored
    assert stored[f"{UP}.weight"].shape == (512, 64) and stored[f"{UP}.weight_scale"].shape == (512, 8)
    assert f"{DOWN}.bias" not in stored and stored["transformer_blocks.0.ff.conv_depth.weight"].shape == (512, 1, 3, 3)


def test_a_3x3_convolution_is_not_taken_for_a_linear(folder, tmp_path):
    import json
    import shutil

    shutil.copytree(folder / "transformer", tmp_path / "transformer")
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    layers = {"fp8-16bit": ["transformer_blocks.0.ff.conv_depth"]}
    config["quantization_config"] = {
        "quant_method": "fluxq",
        "format_version": 1,
        "required_features": [],
        "layers": layers,
    }
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantizes 'transformer_blocks\.0\.ff\.conv_depth', which is no Linear"):
        sana(tmp_path)


# --- LoRA


def up_of(model: nn.Module) -> nn.Module:
    return model.get_submodule(UP)


def lora(folder, tmp_path):
    """A LoRA on the 16-bit model's convolutions and one Linear, as a trainer saves it; and what that model computes."""
    model = sana(folder)
    torch.manual_seed(4)
    targets = [UP, DOWN, "transformer_blocks.1.attn1.to_q"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    for name in targets:
        model.get_submodule(name).lora_B["default"].weight.data *= 8
    state = {f"transformer.{name}": t.contiguous() for name, t in get_peft_model_state_dict(model).items()}
    save_file(state, tmp_path / "style.safetensors")
    return state, model


@pytest.mark.slow
def test_a_lora_of_convolutions_loads_computes_and_fuses_without_loss(folder, model_of, tmp_path):
    state, trained = lora(folder, tmp_path)
    assert state[f"transformer.{UP}.lora_A.weight"].shape == (4, 128, 1, 1)
    model = model_of("fp8")
    plain = output(model)
    model.load_lora_adapter(state, prefix="transformer", adapter_name="style")
    assert isinstance(model.get_submodule(UP), QuantPointwiseLora)
    unfused, x = output(model), images()
    added, want = (m(x).float() - m.get_base_layer()(x).float() for m in map(up_of, (model, trained)))
    assert (added - want).norm() / want.norm() < 0.02
    model.fuse_lora()
    assert torch.equal(output(model), unfused) and model.get_submodule(UP).get_base_layer().scheme.rank == 4
    model.unfuse_lora()
    assert torch.equal(output(model), unfused)
    saved = get_peft_model_state_dict(model, adapter_name="style")
    assert all(torch.equal(t, saved[name.removeprefix("transformer.")]) for name, t in state.items())
    model.delete_adapters("style")
    assert torch.equal(output(model), plain)


def test_adapters_of_a_convolution_have_the_bits_of_a_linear_s():
    """Whatever the layout, as a convolution of the library would not; merged, they are Linears."""
    adapter, x = _Pointwise(K, 4, 1, bias=False), images().float().contiguous()
    assert torch.equal(pixels(adapter(x)), linear(pixels(x), adapter.weight[:, :, 0, 0]))


def test_a_dora_scales_the_channels_as_on_the_dequantized_model(model_of):
    """The two differ in the rounding of activations, which the layer itself has, too."""
    model, x = model_of("fp8"), images()
    plain = copy.deepcopy(model).dequantize()
    config = LoraConfig(r=4, lora_alpha=4, target_modules=[UP], use_dora=True)
    plain.add_adapter(config)
    model.add_adapter(config)
    exact, base = up_of(plain).get_base_layer()(x).float(), up_of(model).get_base_layer()(x).float()
    assert (up_of(model)(x) - base).norm() < 0.01 * base.norm()  # it begins as the layer itself, with its own norms
    model.delete_adapters("default")
    for name, p in plain.named_parameters():
        if "lora_" in name:
            p.data += 0.3 * p.abs().mean() if "magnitude" in name else 0.1 * torch.randn_like(p)
    model.load_lora_adapter(get_peft_model_state_dict(plain), prefix=None, network_alphas=None)
    got, want = up_of(model)(x).float(), up_of(plain)(x).float()
    assert (want - exact).norm() > 0.1 * exact.norm()
    assert (got - want).norm() < 1.5 * (base - exact).norm() + 0.01 * want.norm()
    with pytest.raises(ValueError, match="is a DoRA"):
        model.fuse_lora()


def test_a_lora_is_fused_before_quantizing(folder, tmp_path):
    _, trained = lora(folder, tmp_path)
    source = ModelFolder("sana", folder)
    updates = [read_updates(LoraFile(tmp_path / "style.safetensors", 0.5), source, "transformer")]
    assert set(updates[0]) == {UP, DOWN, "transformer_blocks.1.attn1.to_q"}
    weights, model = FusedWeights(source, "transformer", updates), sana(folder)
    fuse_into(model, updates)
    adapted = trained.get_submodule(UP)
    a, b = adapted.lora_A["default"].weight.float(), adapted.lora_B["default"].weight.float()
    want = adapted.get_base_layer().weight.float() + 0.5 * conv2d(a.transpose(0, 1), b).transpose(0, 1)
    torch.testing.assert_close(weights[f"{UP}.weight"], want, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.get_submodule(UP).weight, weights[f"{UP}.weight"].bfloat16())


# --- K = 5600: SANA 1.6B's conv_point


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "chip", "k"),
    [
        ("nvfp4-nvfp4", "sm_100", 5600),
        ("nvfp4-nvfp4", "sm_100", 2240),
        ("mxfp4-mxfp4", "sm_100", 5600),
        ("mxfp8-mxfp8", "sm_120", 5600),
        ("int8-int8", "sm_80", 5600),
        ("fp8-fp8", "sm_89", 5600),
        ("int8-16bit", "sm_90", 5600),
        ("nvfp4-16bit", "sm_90", 5600),
    ],
)
def test_kernels_take_rows_that_are_no_multiple_of_64(scheme, chip, k):
    """The last tile is half full, and mxfp's 175 scales of a row are an odd number."""
    noise = torch.Generator().manual_seed(k)
    parsed = Scheme.parse(scheme)
    w = QuantizedTensor.quantize(torch.randn(16, k, generator=noise) / 16, parsed.weights)
    x = torch.randn(3, k, generator=noise).bfloat16()
    operands = (x, *pack_named(ops.LinearTensors(w.codes, w.scale, w.global_scale), scheme))
    with interpreting():
        found = launch.quantized_linear(*operands, chip=chip)
    want = ops.quantized_linear(*operands).float()
    assert (found.float() - want).abs().max() / want.abs().max() < 2**-7
