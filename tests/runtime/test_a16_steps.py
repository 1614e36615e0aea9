"""Steps at 16-bit activations: the weight-only model's own bits in them, the quantized model's in all others."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from torch import nn

import fluxq
from fluxq import tiny
from fluxq.base.files import read_json, write_json
from fluxq.base.model import ModelFolder
from fluxq.eval.images.sides import Side
from fluxq.eval.report.card import model_card
from fluxq.jobs import making
from fluxq.kernels import launch, ops
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.linear import LOW_RANK, QuantLinear, branch_shapes
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.record import read_record
from fluxq.quantize.structure import attention_of
from fluxq.recipes.computing import QuantizationConfig, Steps
from fluxq.recipes.formats import Scheme
from fluxq.recipes.step_policy import ends_of, policy_of
from fluxq.runtime import graphs
from fluxq.runtime.layout import add_decoded, add_row_scale, reencode_layer, swizzle
from fluxq.runtime.modulation import hoist_modulation
from fluxq.runtime.steps import KeptSteps, keep_steps
from tests.exchange_files import export
from tests.runtime.test_graphs import Recorder
from tests.runtime.test_steps import ADAPTED, CPU, distance, kinds, run, with_parts
from tests.shared import quick

N, K = 64, 256
SCHEMES = [
    *("nvfp4-nvfp4-static", "fp8-fp8", "fp8_tensor-fp8_tensor-static", "mxfp8-mxfp8", "int8-int8", "mxfp4-mxfp4"),
    *("int4-int4-smooth-r8", "nvfp4-nvfp4-static-center-smooth-d4-h128-46-r8", "int8-int8-center-smooth"),
]
LAID_OUT: dict[str, Callable[[QuantLinear], Any]] = {
    "swizzled": swizzle,
    "row scale": lambda layer: add_row_scale(layer, ("int8",)),
    "decoded": add_decoded,
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def loaded(plain_checkpoint) -> Any:
    """A checkpoint of nvfp4; tests leave it as it is."""
    return tiny.load(folder=plain_checkpoint("nvfp4"))


@pytest.fixture
def pipe(loaded) -> Any:
    """The same with a transformer and a scheduler of its own."""
    return with_parts(loaded, transformer=copy.deepcopy(loaded.transformer))


@pytest.fixture(scope="module")
def weight_only(loaded) -> nn.Module:
    return weight_only_model(loaded.transformer)


def layer_of(scheme: str, dtype: torch.dtype) -> QuantLinear:
    """A layer of drawn tensors."""
    parsed, draw = Scheme.parse(scheme), torch.Generator().manual_seed(0)
    shapes = branch_shapes(parsed, N, K)
    branches = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    if parsed.smooth:
        branches["pre_quant_scale"] = branches["pre_quant_scale"].abs() + 0.5
    w = QuantizedTensor.quantize(torch.randn(N, K, generator=draw), parsed.weights)
    input_scale = torch.tensor(0.01) if parsed.static_input else None
    return QuantLinear.from_quantized(w, torch.randn(N, generator=draw).to(dtype), parsed, input_scale, branches)


def weight_only_layer(layer: QuantLinear) -> QuantLinear:
    """The layer that a checkpoint of the same codes has, had its recipe asked for 16-bit activations."""
    scheme = Scheme.parse("-".join([layer.scheme.weights.name, "16bit", *_steps_of(layer.scheme)]))
    tensors = {name: value.data.clone() for name, value in layer.named_parameters(recurse=False)}
    tensors.pop("input_scale", None)
    return QuantLinear.from_tensors(tensors, (layer.out_features, layer.in_features), scheme)


def _steps_of(scheme: Scheme) -> list[str]:
    return [part for part in str(scheme).split("-")[2:] if part not in ("static", "46")]


def weight_only_model(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for path, layer in [(path, each) for path, each in model.named_modules() if isinstance(each, QuantLinear)]:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, weight_only_layer(layer))
    return model


# --- bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_computes_the_bits_of_a_weight_only_one(scheme, dtype) -> None:
    layer = layer_of(scheme, dtype)
    other, x = weight_only_layer(layer), torch.randn(5, K).to(dtype)
    assert torch.equal(layer.without_rounding(x), other(x))
    assert not torch.equal(layer(x), other(x))
    if layer.low_rank is not None:
        layer.get_parameter(LOW_RANK[1]).data.zero_()
        assert not torch.equal(layer.without_rounding(x), other(x))


@pytest.mark.parametrize("laid_out", LAID_OUT)
def test_a_layer_laid_out_for_one_gpu_computes_them_too(laid_out) -> None:
    layer, x = layer_of("nvfp4-nvfp4-static-h128-r8", torch.bfloat16), torch.randn(5, K).bfloat16()
    other = weight_only_layer(layer)
    LAID_OUT[laid_out](layer)
    assert torch.equal(layer.without_rounding(x), other(x))


@pytest.mark.parametrize(("laid_out", "chip"), [("swizzled", "sm_100"), ("row scale", "sm_90")])
def test_a_gpu_computes_them_with_its_weight_only_kernel(monkeypatch, laid_out, chip) -> None:
    layer, x = layer_of("nvfp4-nvfp4-static-h128-r8", torch.bfloat16), torch.randn(5, K).bfloat16()
    LAID_OUT[laid_out](layer)
    reference, taken = layer.without_rounding(x), []
    monkeypatch.setattr(launch, "announce", lambda scheme, chip, choice: taken.append(choice.implementation))
    monkeypatch.setattr(ops, "quantized_linear", partial(launch.quantized_linear, chip=chip))
    with interpreting(chip):
        assert distance(layer.without_rounding(x), reference) < 0.01
    assert taken == ["weight_only_matmul"]


def test_a_layer_encoded_anew_takes_its_new_codes() -> None:
    layer, x = layer_of("nvfp4-nvfp4-static-h128-r8", torch.bfloat16), torch.randn(5, K).bfloat16()
    other = weight_only_layer(layer)
    reencode_layer(layer, ("int8",))
    assert 0 < distance(layer.without_rounding(x), other(x)) < distance(layer(x), other(x)) < 0.02


@pytest.mark.often(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["nvfp4", "int4-svd", "fp8", "mxfp8", "int8", "nvfp4-max"])
def test_all_steps_are_the_weight_only_model(checkpoint, plain_checkpoint, recipe, dtype: str) -> None:
    folder = (plain_checkpoint if recipe in ("fp8", "mxfp8", "nvfp4") else checkpoint)(recipe)
    pipe = tiny.load(dtype, folder)
    quantized, other = copy.deepcopy(pipe.transformer), weight_only_model(pipe.transformer)
    with keep_steps(pipe, first=9, components="a16") as kept:
        assert kinds(run(pipe, num_inference_steps=2), quantized, other) == "kk"
        assert (kept.placed, kept.nbytes, str(kept.steps)) == ((), 0, "the first 9 steps")
    assert kinds(run(pipe, num_inference_steps=1), quantized, other) == "q"


@pytest.mark.slow
@pytest.mark.parametrize(("first", "last", "want"), [(1, 1, "kqk"), (0, 2, "qkk"), (2, 0, "kkq")])
def test_steps_are_asked_for(pipe, loaded, weight_only, first, last, want) -> None:
    with keep_steps(pipe, first=first, last=last, components="a16") as kept:
        assert kinds(run(pipe, num_inference_steps=3), loaded.transformer, weight_only) == want
        assert kept.calls_in_16_bit == want.count("k")
        twin = with_parts(loaded, transformer=copy.deepcopy(pipe.transformer))
        assert kinds(run(twin, num_inference_steps=1), loaded.transformer, weight_only) == "q"
    assert not any("instead" in vars(module) for module in pipe.transformer.modules())


@pytest.mark.slow
def test_an_image_to_image_call_counts_its_own_steps(pipe, loaded, weight_only) -> None:
    again = diffusers.FluxImg2ImgPipeline(**pipe.components)
    again.set_progress_bar_config(disable=True)
    with keep_steps(pipe, first=1, last=1, components="a16"):
        calls = run(again, image=torch.rand(1, 3, 16, 16), strength=0.8)
    assert kinds(calls, loaded.transformer, weight_only) == "kqqk"


@pytest.mark.slow
def test_two_denoisers_share_the_steps_of_one_run(pipe, loaded, weight_only) -> None:
    """As Wan 2.2's: one for high noise, one for low."""
    second = copy.deepcopy(loaded.transformer)
    wan = SimpleNamespace(
        components={"transformer": pipe.transformer, "transformer_2": second},
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    inputs, calls = run(loaded, num_inference_steps=1)[0][1], []
    with KeptSteps(wan, Steps(first=1, last=1, components="a16")):
        wan.scheduler.set_timesteps(4)
        for index, t in enumerate(wan.scheduler.timesteps):
            output = (pipe.transformer if index < 2 else second)(**inputs)[0]
            calls.append(((), inputs, output))
            wan.scheduler.step(output, t, inputs["hidden_states"])
    assert kinds(calls, loaded.transformer, weight_only) == "kqqk"


# --- together with everything else

BESIDE: dict[str, Callable[[Any], Any]] = {
    "optimized": lambda pipe: fluxq.optimize(pipe, device="cpu"),
    "captured": fluxq.capture,
    "offloaded": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "layers offloaded": lambda pipe: accelerate.cpu_offload(pipe.transformer, CPU),
    "groups offloaded": lambda pipe: pipe.transformer.enable_group_offload(CPU, offload_type="leaf_level"),
    "blocks compiled": lambda pipe: pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager"),
    "compiled": lambda pipe: pipe.transformer.compile(fullgraph=True, backend="eager"),
}


@pytest.fixture
def graphs_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(graphs, "CudaGraphs", Recorder)
    monkeypatch.setattr(graphs, "WARM_UPS", 2)


@pytest.mark.often(1)
@pytest.mark.parametrize("beside", BESIDE)
def test_it_works_beside(pipe, loaded, weight_only, graphs_on_the_cpu, beside) -> None:
    torch._dynamo.reset()
    BESIDE[beside](pipe)
    with keep_steps(pipe, first=1, last=1, components="a16"):
        for _ in range(2):
            assert kinds(run(pipe, num_inference_steps=3), loaded.transformer, weight_only) == "kqk"
    assert kinds(run(pipe, num_inference_steps=1), loaded.transformer, weight_only) == "q"
    pipe.remove_all_hooks()  # of encoders, which other tests' pipelines have too


@pytest.mark.slow
def test_a_captured_step_is_two_graphs(pipe, graphs_on_the_cpu) -> None:
    with keep_steps(pipe, first=1, last=2, components="a16"), fluxq.capture(pipe) as captured:
        run(pipe)
        run(pipe)
        assert captured.captures == 2 and sorted(row.replays for row in captured.captured) == [4, 6]


def test_attention_in_fp8_is_16_bit_meanwhile(pipe, loaded, weight_only) -> None:
    fluxq.set_attention(pipe, "fp8")
    other = copy.deepcopy(loaded.transformer)
    fluxq.set_attention(other, "fp8")
    with keep_steps(pipe, last=1, first=0, components="a16"):
        assert kinds(run(pipe, num_inference_steps=2), other, weight_only) == "qk"
    assert attention_of(pipe.transformer) == "fp8"


@pytest.mark.often(1)
@pytest.mark.parametrize("is_fused", [False, True], ids=["beside", "fused"])
def test_an_adapter_counts_in_these_steps_too(pipe, loaded, weight_only, lora_file, is_fused) -> None:
    models, file = [], lora_file("style.safetensors", ADAPTED)
    with keep_steps(pipe, first=0, last=1, components="a16"):
        for model in (pipe.transformer, copy.deepcopy(loaded.transformer), copy.deepcopy(weight_only)):
            each = with_parts(loaded, transformer=model) if models else pipe
            each.load_lora_weights(file)
            if is_fused:
                each.fuse_lora()
            models.append(each.transformer)
        calls = run(pipe, num_inference_steps=2)
        assert kinds(calls, *models[1:]) == "qk"
        assert kinds(calls, loaded.transformer, weight_only) == "??"


@pytest.mark.slow
def test_a_prepared_model_computes_with_the_codes_it_has(pipe) -> None:
    with keep_steps(pipe, first=0, last=1, components="a16"):
        assert len(fluxq.prepare(pipe, device="cpu")) > 20
        other = copy.deepcopy(pipe.transformer)
        assert kinds(run(pipe, num_inference_steps=2), other, weight_only_model(other)) == "qk"


@pytest.mark.slow
def test_hoisted_modulation_is_made_once(pipe, loaded, weight_only) -> None:
    """It is weight-only, so that its table holds in every step."""
    block, seen = pipe.transformer.transformer_blocks[0], []
    block.register_forward_hook(lambda *_: seen.append("instead" in vars(block.norm1.linear)))
    with hoist_modulation(pipe), keep_steps(pipe, first=1, last=0, components="a16"):
        for index, (args, kwargs, output) in enumerate(run(pipe, num_inference_steps=2)):
            near, far = (loaded.transformer, weight_only) if index else (weight_only, loaded.transformer)
            off = [distance(output, model(*args, **kwargs)[0]) for model in (near, far)]
            assert off[0] < 0.2 * off[1]
    assert seen[:2] == [False, False]


# --- recipe, checkpoint, other programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("a16")
    recipe = quick("nvfp4", root, fitted=False)
    recipe.write_text(recipe.read_text() + "steps: {first: 1, last: 2, components: a16}\n")
    options = making.JobOptions(model="tiny", recipe=str(recipe), output=str(root / "out"), check=False)
    making.quantize(making.job_of(options))
    return root / "out"


@pytest.mark.slow
def test_a_checkpoint_has_the_policy_and_keep_steps_reads_it(folder, caplog, tmp_path) -> None:
    said = read_json(folder / "transformer" / "config.json")["quantization_config"]
    assert said["runtime"]["diffusion_step_policy"] == policy_of(1, 2) and "steps" not in said
    pipe = tiny.load(folder=folder)
    assert "keeps the first step and the last 2 of every call at 16-bit activations" in caplog.text
    quantized, other = copy.deepcopy(pipe.transformer), weight_only_model(pipe.transformer)
    with keep_steps(pipe) as kept:
        assert kept.steps == Steps(first=1, last=2, components="a16")
        assert kinds(run(pipe, num_inference_steps=4), quantized, other) == "kqkk"
    with keep_steps(pipe, last=0) as kept:
        assert kept.steps == Steps(first=1, components="a16")
    with keep_steps(pipe, components="16bit") as kept:
        assert kept.placed == ("resident",)
    pipe.transformer.save_pretrained(tmp_path)
    assert read_json(tmp_path / "config.json")["quantization_config"]["runtime"] == said["runtime"]
    card = model_card(read_record(folder))
    assert (
        "- kept at 16-bit activations: the first step and the last 2 of every call, by `fluxq.keep_steps(pipe)`" in card
    )


@pytest.mark.slow
def test_a_side_of_an_evaluation_keeps_them_without_a_source(folder, tmp_path) -> None:
    pipe = Side("a16", str(folder), "digest", source=str(tmp_path / "nowhere")).open()
    calls, other = run(pipe, num_inference_steps=4), tiny.load(folder=folder).transformer
    assert kinds(calls, other, weight_only_model(other)) == "kqkk"


def test_what_says_nothing_there_is_refused(pipe, tiny_folder) -> None:
    asked: list[dict[str, Any]] = [{"source": str(tiny_folder)}, {"weights": "resident"}]
    for how in asked:
        with pytest.raises(ValueError, match=r"read no 16-bit weights: leave out source= and weights="):
            keep_steps(pipe, first=1, components="a16", **how)
    with pytest.raises(ValueError, match=r"components\n.*'16bit' or 'a16'"):
        keep_steps(pipe, first=1, last=0, components="a8")  # pyright: ignore[reportArgumentType]


DAMAGED: list[Callable[[dict[str, Any]], Any]] = [
    lambda policy: policy.update(schema_version=2),
    lambda policy: policy.update(middle_steps=1),
    lambda policy: policy.pop("overlap"),
    lambda policy: policy.pop("scope"),
    lambda policy: policy.update(scope=[]),
    lambda policy: policy.update(reasoner="a8"),
    lambda policy: policy["first_steps"].update(count=-1),
    lambda policy: policy["first_steps"].update(count=True),
    lambda policy: policy["first_steps"].update(count=10**12),
    lambda policy: policy["last_steps"].update(mode="a8"),
    lambda policy: policy["last_steps"].update(more=1),
    lambda policy: policy.update(first_steps=1),
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_policy_of_another_kind_is_refused_by_name(folder, damage) -> None:
    said = read_json(folder / "transformer" / "config.json")["quantization_config"]
    damage(said["runtime"]["diffusion_step_policy"])
    with pytest.raises(ValueError, match=r"diffusion_step_policy.*: update fluxq, or remove"):
        QuantizationConfig.from_dict(said)


def test_what_other_policies_say_is_kept() -> None:
    said = {"quant_method": "fluxq", "format_version": 1, "layers": {"fp8-fp8": ["a"]}, "required_features": []}
    other = policy_of(0, 3) | {"scope": ["transformer", "vae"], "reasoner": "a16"}
    config = QuantizationConfig.from_dict(said | {"runtime": {"diffusion_step_policy": other, "more": 1}})
    assert config.steps == Steps(last=3, components="a16")
    assert config.to_dict()["runtime"] == {"diffusion_step_policy": other, "more": 1}
    assert ends_of(other | {"scope": ["vae"]}) == (0, 0)
    assert QuantizationConfig.from_dict(said | {"runtime": {"diffusion_step_policy": policy_of(0, 0)}}).steps is None


@pytest.mark.slow
def test_the_policy_goes_to_modelopt_and_comes_back(folder, tmp_path) -> None:
    checkpoint = ModelFolder("a16", folder)
    done = export(checkpoint, "modelopt", tmp_path / "modelopt")
    said = read_json(tmp_path / "modelopt" / "transformer" / "config.json")
    assert said["quantization_config"]["runtime"] == {"diffusion_step_policy": policy_of(1, 2)}
    assert any("in Cosmos3 alone" in note for note in done.notes)
    import_model(tmp_path / "modelopt", tmp_path / "back")
    back = read_json(tmp_path / "back" / "transformer" / "config.json")["quantization_config"]
    assert QuantizationConfig.from_dict(back).steps == Steps(first=1, last=2, components="a16")
    said["quantization_config"]["runtime"]["diffusion_step_policy"]["type"] = "all"
    write_json(tmp_path / "modelopt" / "transformer" / "config.json", said)
    (report,) = import_model(tmp_path / "modelopt", tmp_path / "without")
    assert any("{'type': 'all'}" in note and "all steps are computed alike" in note for note in report.notes)
    without = read_json(tmp_path / "without" / "transformer" / "config.json")["quantization_config"]
    assert QuantizationConfig.from_dict(without).steps is None
    done = export(checkpoint, "comfy", tmp_path / "comfy.safetensors")
    assert any("every step rounds its activations there" in note for note in done.notes)
