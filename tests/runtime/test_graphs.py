"""Steps as CUDA graphs: the same bits as plain calls, whatever moves, is swapped or loaded between them.

Without a GPU a stand-in records (tests/recorder.py): the operations on tensors and the memory that they read and write,
nothing else. What a graph would not see, it does not see either.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import diffusers
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from diffusers.hooks import FirstBlockCacheConfig, TaylorSeerCacheConfig, apply_group_offloading
from diffusers.models.attention_dispatch import attention_backend
from recorder import ADAPTED, STEPS, Recorder, arguments, assert_plain, latents, offloaded, velocity
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fluxq
from fluxq import tiny
from fluxq.runtime import graphs
from fluxq.runtime.modulation import hoist_modulation

pytestmark = pytest.mark.usefixtures("recorded")


def test_a_step_is_recorded_once_and_the_image_stays(flux):
    want = latents(flux)
    with fluxq.capture(flux) as captured:
        assert captured.captured == () and captured.captures == 0
        assert torch.equal(latents(flux), want)
        (graph,) = captured.captured
        assert captured.captures == 1 and graph.replays == STEPS and graph.model == "transformer"
        assert "hidden_states (1, 16, 16) bfloat16" in graph.arguments and len(graph.arguments) == 6
        assert torch.equal(latents(flux), want)
        assert captured.captures == 1 and captured.captured[0].replays == 2 * STEPS
    assert "forward" not in vars(flux.transformer) and captured.captured == ()
    assert torch.equal(latents(flux), want)
    captured.remove()


@pytest.mark.slow
def test_sizes_batches_prompts_and_guidance(flux):
    two = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    calls = [{}, {"height": 32}, {"prompt": ["a red circle", "a star"]}, two, {"prompt": "a star"}, two, {"height": 32}]
    want = [latents(flux, **call) for call in calls]
    assert not torch.equal(want[0], want[3])
    with fluxq.capture(flux) as captured:
        for call, image in zip(calls, want, strict=True):
            assert torch.equal(latents(flux, **call), image), call
        # The prompts of guidance follow each other with tensors of one shape.
        assert captured.captures == 3
        assert [graph.replays for graph in captured.captured] == [STEPS, STEPS * 6, STEPS * 2]


@pytest.mark.slow
def test_the_least_recently_used_graph_goes(flux):
    model = flux.transformer
    with fluxq.capture(model, max_graphs=2) as captured:
        for tokens, captures in ((4, 1), (9, 2), (4, 2), (16, 3), (4, 3), (9, 4), (16, 5)):
            assert_plain(model, tokens=tokens)
            assert captured.captures == captures, tokens
            assert len(captured.captured) <= 2
        kept = [graph.arguments[0] for graph in captured.captured]
    assert kept == [f"hidden_states (2, {tokens}, 16) bfloat16" for tokens in (9, 16)]


def test_what_was_returned_stays_when_the_next_call_replays(flux):
    model = flux.transformer
    with fluxq.capture(model):
        first = velocity(model, seed=0)
        before = first.clone()
        given = arguments(model, seed=1)
        kept = {name: tensor.clone() for name, tensor in given.items()}
        second = model(**given).sample
        assert torch.equal(velocity(model, seed=1), second)  # the first one's graph once more
        assert torch.equal(first, before) and not torch.equal(first, second)
        assert all(torch.equal(given[name], tensor) for name, tensor in kept.items())


@pytest.mark.slow
def test_arguments_that_are_no_tensors_are_kinds_of_calls(flux):
    model = flux.transformer
    calls = [{"return_dict": True}, {"return_dict": False}, {"joint_attention_kwargs": {"scale": 1.0}}]
    want = [model(**arguments(model), **call)[0] for call in calls]
    with fluxq.capture(model) as captured:
        for _ in range(2):
            for call, plain in zip(calls, want, strict=True):
                made = model(**arguments(model), **call)
                assert torch.equal(made[0], plain)
                assert isinstance(made, tuple) == (call.get("return_dict") is False)
        assert captured.captures == 3 and calls[2] == {"joint_attention_kwargs": {"scale": 1.0}}
        positional = [*arguments(model).values()]
        assert torch.equal(model(*positional).sample, want[0]) and captured.captures == 4


def test_true_is_not_one():
    device = torch.device("cpu")
    kinds = [graphs._described(value, device) for value in (1, True, 1.0, None, "1")]
    assert len({*kinds}) == 5


@pytest.mark.often(1)
@pytest.mark.parametrize("how", ["expanded", "transposed", "sliced"])
def test_strides_stay(flux, how):
    model = flux.transformer
    given = arguments(model)
    seen = []
    model.x_embedder.forward = lambda x: seen.append(x.stride()) or nn.Linear.forward(model.x_embedder, x)
    given["hidden_states"] = {
        "expanded": lambda x: x[:1].expand(2, -1, -1),
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": lambda x: torch.cat([x, x], 1)[:, :16],
    }[how](given["hidden_states"])
    want = model(**given).sample
    del model.x_embedder.forward
    with fluxq.capture(model) as captured:
        held = graphs._like(given["hidden_states"])
        assert held.stride() == seen[0]
        assert torch.equal(model(**given).sample, want)
        assert_plain(model)
        assert captured.captures == 2


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", ["int8", pytest.param("nvfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("then", ["as loaded", "prepared", "optimized"])
def test_quantized_prepared_and_optimized(quantized, recipe, then):
    pipe = quantized(recipe)
    if then == "prepared":
        fluxq.prepare(pipe, device="cpu")
    if then == "optimized":
        fluxq.optimize(pipe)
    want = latents(pipe)
    with fluxq.capture(pipe) as captured:
        assert torch.equal(latents(pipe), want)
        assert captured.captures == 1


def test_fusing_and_restoring_blocks_are_other_forms(flux):
    with fluxq.capture(flux) as captured:
        want = assert_plain(flux.transformer)
        fluxq.optimize(flux)
        assert torch.equal(assert_plain(flux.transformer), want) and captured.captures == 2
        fluxq.restore(flux)
        assert torch.equal(assert_plain(flux.transformer), want) and captured.captures == 2


# --- weights that move, and adapters


def by_data(layer: nn.Linear, new: Tensor) -> None:
    layer.weight.data = new


def by_swapping(layer: nn.Linear, new: Tensor) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(new))


def by_another_parameter(layer: nn.Linear, new: Tensor) -> None:
    layer.weight = nn.Parameter(new)


def by_writing(layer: nn.Linear, new: Tensor) -> None:
    layer.weight.data.copy_(new)


@pytest.mark.parametrize("moved", [by_data, by_swapping, by_another_parameter, by_writing])
def test_a_weight_that_moved_is_taken_back(flux, moved):
    model, layer = flux.transformer, flux.transformer.transformer_blocks[0].attn.to_q
    with fluxq.capture(model) as captured:
        before, address = assert_plain(model), layer.weight.data_ptr()
        moved(layer, layer.weight.data * -3)
        after = assert_plain(model)
        assert not torch.equal(after, before)
        assert captured.captures == 1 and layer.weight.data_ptr() == address
    assert torch.equal(velocity(model), after)


def test_a_model_that_was_moved_as_a_whole_is_taken_back(flux):
    model = flux.transformer
    with fluxq.capture(model) as captured:
        want = assert_plain(model)
        model._apply(torch.clone)
        assert torch.equal(assert_plain(model), want) and captured.captures == 1


@pytest.mark.slow
def test_a_weight_of_another_shape_or_that_is_no_longer_shared_is_another_form(flux):
    model = flux.transformer
    first, second = model.transformer_blocks[0].attn.to_q, model.transformer_blocks[0].attn.to_k
    second.weight = first.weight
    with fluxq.capture(model) as captured:
        assert_plain(model)
        second.weight = nn.Parameter(first.weight * 2)
        assert_plain(model)
        assert captured.captures == 2
        second.weight.data = second.weight.data.t().contiguous().t()
        assert_plain(model)
        assert captured.captures == 3
        second.bias = None
        assert_plain(model)
        assert captured.captures == 4


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["16 bit", "int8"])
def test_a_lora_of_the_same_rank_is_swapped_without_recording(quantized, lora_file, recipe):
    pipe = quantized(recipe)
    one, two = (lora_file(f"{seed}.safetensors", ADAPTED, seed=seed) for seed in range(2))
    pipe.load_lora_weights(one, adapter_name="style")
    with fluxq.capture(pipe) as captured:
        first = assert_plain(pipe.transformer)
        pipe.load_lora_weights(two, adapter_name="style", hotswap=True)
        second = assert_plain(pipe.transformer)
        pipe.load_lora_weights(one, adapter_name="style", hotswap=True)
        assert torch.equal(assert_plain(pipe.transformer), first)
        assert captured.captures == 1 and not torch.equal(first, second)


@pytest.mark.slow
def test_of_another_rank_and_scaling_too_where_hot_swapping_was_enabled(quantized, lora_file):
    pipe = quantized("int8")
    one = lora_file("one.safetensors", ADAPTED)
    two = lora_file("two.safetensors", ADAPTED, rank=8, alpha=4, seed=1)
    pipe.enable_lora_hotswap(target_rank=8)
    pipe.load_lora_weights(one, adapter_name="style")
    with fluxq.capture(pipe) as captured:
        first = assert_plain(pipe.transformer)
        pipe.load_lora_weights(two, adapter_name="style", hotswap=True)
        assert not torch.equal(assert_plain(pipe.transformer), first)
        assert captured.captures == 1


@pytest.mark.slow
def test_of_another_rank_otherwise_it_is_another_form(flux, lora_file):
    flux.load_lora_weights(lora_file("one.safetensors", ADAPTED), adapter_name="style")
    with fluxq.capture(flux) as captured:
        first = assert_plain(flux.transformer)
        two = lora_file("two.safetensors", ADAPTED, rank=8, alpha=4, seed=1)
        flux.load_lora_weights(two, adapter_name="style", hotswap=True)
        assert not torch.equal(assert_plain(flux.transformer), first)
        assert captured.captures == 2


@pytest.mark.slow
def test_weights_of_adapters_are_forms_and_come_back(flux, lora_file):
    for seed, name in enumerate(("one", "two")):
        flux.load_lora_weights(lora_file(f"{name}.safetensors", ADAPTED, seed=seed), adapter_name=name)
    choices = [(1.0, 0.0), (0.5, 0.0), (0.5, 0.25), (1.0, 0.0), (0.5, 0.25)]
    with fluxq.capture(flux) as captured:
        made = []
        for weights in choices:
            flux.set_adapters(["one", "two"], [*weights])
            made.append(assert_plain(flux.transformer))
        assert captured.captures == 3 and len({float(each.float().sum()) for each in made}) == 3
        assert torch.equal(made[0], made[3])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["16 bit", "int8"])
def test_adapters_that_come_and_go(quantized, lora_file, recipe):
    pipe = quantized(recipe)
    model = pipe.transformer
    with fluxq.capture(pipe, max_graphs=9) as captured:
        bare = assert_plain(model)
        pipe.load_lora_weights(lora_file("l.safetensors", ADAPTED), adapter_name="style")
        adapted = assert_plain(model)
        pipe.disable_lora()
        assert torch.equal(assert_plain(model), bare)
        pipe.enable_lora()
        assert torch.equal(assert_plain(model), adapted) and captured.captures == 3
        pipe.fuse_lora()
        assert_plain(model)
        pipe.unfuse_lora()
        assert_plain(model)
        pipe.unload_lora_weights()
        kept = captured.captures
        if recipe != "16 bit":  # whose weights come back from fusing changed, in the same memory
            assert torch.equal(velocity(model), bare)
        assert_plain(model)
        assert captured.captures == kept  # the bare form came back, with its weights
        assert len(captured.captured) == 1  # and those of the adapter's are gone with it


@pytest.mark.slow
def test_a_lora_scale_of_the_call(flux, lora_file):
    flux.load_lora_weights(lora_file("l.safetensors", ADAPTED), adapter_name="style")
    with fluxq.capture(flux) as captured:
        made = [
            assert_plain(flux.transformer, joint_attention_kwargs={"scale": scale}) for scale in (1.0, 0.5, 1.0, 0.5)
        ]
        assert captured.captures == 2 and torch.equal(made[0], made[2]) and not torch.equal(made[0], made[1])


def test_a_scale_of_the_call_that_makes_new_tensors_each_time_is_not_recorded(flux, lora_file, caplog):
    """Check a scale that hot swapping keeps as a tensor: peft multiplies it in place and divides it into a new one."""
    flux.enable_lora_hotswap(target_rank=8)
    flux.load_lora_weights(lora_file("l.safetensors", ADAPTED), adapter_name="style")
    with fluxq.capture(flux) as captured:
        assert_plain(flux.transformer, joint_attention_kwargs={"scale": 0.5})
        assert captured.captures == 0 and caplog.text.count("each call of it changes the model itself") == 1


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", ["moves are not seen", "moves are not copied", "adapters are not seen"])
def test_what_is_compared_before_a_replay_matters(flux, lora_file, monkeypatch, fault):
    flux.load_lora_weights(lora_file("one.safetensors", ADAPTED), adapter_name="style")
    model, layer = flux.transformer, flux.transformer.proj_out
    if fault == "moves are not seen":
        monkeypatch.setattr(graphs._Form, "_lies_there", lambda form, now: True)
    elif fault == "moves are not copied":
        monkeypatch.setattr(graphs._Form, "_taken_back", lambda form, now: True)
    else:
        monkeypatch.setattr(graphs._Form, "_is_alike", lambda form: True)
    with fluxq.capture(model):
        assert_plain(model)
        if fault == "adapters are not seen":
            flux.set_adapters("style", 0.5)
        else:
            layer.weight.data = layer.weight.data * 2
        with pytest.raises(AssertionError):
            assert_plain(model)


# --- what chooses kernels


@pytest.mark.slow
def test_attention_backends_and_settings_are_kinds(flux):
    model = flux.transformer
    with fluxq.capture(model) as captured:
        assert_plain(model)
        with attention_backend("_native_math"):
            assert_plain(model)
        assert captured.captures == 2
        model.set_attention_backend("_native_math")
        assert_plain(model)
        assert captured.captures == 3
        model.set_attention_backend("native")
        assert_plain(model)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert_plain(model)
    assert captured.captures == 5


def test_a_graph_keeps_the_memory_it_reads(flux):
    """A pipeline that is moved away would otherwise leave addresses to others."""
    model = flux.transformer
    with fluxq.capture(model) as captured:
        velocity(model)
        (form,) = captured._put[0]._forms
        held = {tensor.data_ptr() for tensor in form._recorded if tensor is not None}
        assert held == {parameter.data_ptr() for parameter in model.parameters()}


# --- where there can be no graph


def group_offloaded(pipe) -> None:
    apply_group_offloading(pipe.transformer, torch.device("cpu"), offload_type="leaf_level")


def cached(pipe) -> None:
    pipe.transformer.enable_cache(TaylorSeerCacheConfig())


def cached_and_compiled(pipe) -> None:
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    pipe.transformer.proj_out.compile(backend="eager")


def hoisted_and_offloaded(pipe) -> None:
    hoist_modulation(pipe, offload=True)


def cast_by_layer(pipe) -> None:
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)


def hooked(pipe) -> None:
    pipe.transformer.proj_out.register_forward_hook(lambda *_: None)


def replaced(pipe) -> None:
    pipe.transformer.proj_out.forward = lambda x: x


def spread(pipe) -> None:
    pipe.transformer.proj_out.to("meta")


def away(pipe) -> None:
    pipe.transformer.to("meta")


def subclassed(pipe) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    weight = pipe.transformer.proj_out.weight.data
    pipe.transformer.proj_out.weight = nn.Parameter(TwoTensor(weight, weight))


REFUSED = {
    offloaded: "accelerate moves its weights between calls",
    group_offloaded: "group offloading moves its weights",
    cached: "decides at each call what to compute",
    cast_by_layer: "layerwise casting makes each layer's weights anew",
    cached_and_compiled: "it is compiled, and a step cache decides",
    hoisted_and_offloaded: r"hoist_modulation\(pipe, offload=False\)",
    hooked: "proj_out has a hook",
    replaced: "the forward of proj_out was replaced",
    spread: "its weights lie on cpu, meta",
    away: "it is on meta, and graphs need a CUDA device",
    subclassed: "weights of class TwoTensor",
}


@pytest.mark.parametrize("done", REFUSED, ids=lambda done: done.__name__)
def test_refused(flux, done):
    done(flux)
    with pytest.raises(ValueError, match=f"FluxTransformer2DModel cannot be a CUDA graph: .*{REFUSED[done]}"):
        fluxq.capture(flux)
    assert not isinstance(vars(flux.transformer).get("forward"), graphs._Step)


def test_refused_because_of_what_is_asked(flux):
    with pytest.raises(ValueError, match="max_graphs is 0, expected at least 1"):
        fluxq.capture(flux, max_graphs=0)
    with pytest.raises(ValueError, match="SimpleNamespace has no transformer"):
        fluxq.capture(SimpleNamespace(components={"vae": flux.vae}))
    with fluxq.capture(flux), pytest.raises(ValueError, match="captured already"):
        fluxq.capture(flux)


def test_on_the_cpu_it_says_what_is_needed(flux, monkeypatch):
    monkeypatch.setattr(Recorder, "kind", "cuda")
    with pytest.raises(ValueError, match="it is on cpu, and graphs need a CUDA device"):
        fluxq.capture(flux)


def undone(pipe, done) -> None:
    {
        offloaded: lambda: remove_hook_from_submodules(pipe.transformer),
        cached: pipe.transformer.disable_cache,
        hooked: pipe.transformer.proj_out._forward_hooks.clear,
    }[done]()


@pytest.mark.often(1)
@pytest.mark.parametrize("done", [offloaded, cached, hooked], ids=lambda done: done.__name__)
def test_what_is_done_later_makes_calls_plain_until_it_is_undone(flux, done, caplog):
    want = latents(flux)
    with fluxq.capture(flux) as captured:
        latents(flux)
        done(flux)
        if done is not cached:
            assert torch.equal(latents(flux), want)
        else:
            latents(flux)
        assert captured.captured == () and caplog.text.count("computed without a CUDA graph") == 1
        assert REFUSED[done] in caplog.text
        undone(flux, done)
        assert torch.equal(latents(flux), want)
        assert captured.captures == 2


def test_what_surrounds_the_whole_step_stays(flux):
    seen = []
    with fluxq.capture(flux) as captured:
        handle = flux.transformer.register_forward_hook(lambda *_: seen.append(1))
        latents(flux)
        handle.remove()
        latents(flux)
        assert len(seen) == STEPS and captured.captures == 1


def test_calls_that_are_plain(flux, caplog):
    model = flux.transformer
    given = arguments(model)
    with fluxq.capture(model) as captured:
        with torch.enable_grad():
            assert model(**given).sample.requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            velocity(model)
        velocity(model, joint_attention_kwargs={"odd": object()})
        with pytest.raises((RuntimeError, NotImplementedError)):
            velocity(model, guidance=None, controlnet_block_samples=[torch.zeros(1, device="meta")])
        assert captured.captures == 0
    reasons = ("gradients are on", "autocast", "an argument is a object", "is on meta, the model on cpu")
    assert [caplog.text.count(reason) for reason in reasons] == [1] * 4


def test_an_error_of_the_model_is_the_models_own(flux):
    with fluxq.capture(flux) as captured:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            flux.transformer(**arguments(flux.transformer) | {"hidden_states": torch.zeros(2, 16, 8).bfloat16()})
        assert_plain(flux.transformer)
        assert captured.captures == 1


def test_a_recording_that_fails_leaves_the_model_plain(flux, caplog, monkeypatch):
    tried = []

    def fails(recorder, call, beside):
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Recorder, "record", fails)
    want = latents(flux)
    with fluxq.capture(flux) as captured:
        assert torch.equal(latents(flux), want)
        assert_plain(flux.transformer, tokens=9)
        assert captured.captures == 0 and len(tried) == 1
    assert caplog.text.count("operation not permitted when stream is capturing") == 1 and "more" not in caplog.text


def test_a_step_that_waits_for_the_device_is_found_out_before_it_is_recorded(flux, caplog, monkeypatch):
    tried = []

    def waits(recorder, call):
        tried.append(1)
        return False

    monkeypatch.setattr(Recorder, "rehearse", waits)
    want = latents(flux)
    with fluxq.capture(flux) as captured:
        assert torch.equal(latents(flux), want) and captured.captures == 0
    assert len(tried) == 1  # of two steps
    assert caplog.text.count("it waits for the device in the middle of a step") == 1


def test_on_another_gpu_it_is_to_be_captured_anew(flux, caplog):
    with fluxq.capture(flux) as captured:
        want = velocity(flux.transformer)
        (step,) = captured._put
        step.device.device = torch.device("cuda", 1)
        flux.transformer.proj_out.bias = nn.Parameter(flux.transformer.proj_out.bias.float())
        flux.transformer.proj_out.bfloat16()
        assert torch.equal(velocity(flux.transformer), want) and captured.captures == 1
        flux.transformer.proj_out.bias = None
        velocity(flux.transformer)
        assert "it was moved from cuda:1 to cpu: remove() and capture it there" in caplog.text
        assert captured.captured == () and step._forms == []


def test_what_the_device_said_first_is_what_counts(flux, caplog, monkeypatch):
    def fails(recorder, call, beside):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(Recorder, "record", fails)
    with fluxq.capture(flux):
        velocity(flux.transformer)
    assert "not permitted" in caplog.text and "previous error" not in caplog.text


def test_with_and_without_inference_mode(flux):
    model, layer = flux.transformer, flux.transformer.proj_out
    with fluxq.capture(model) as captured:
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                assert_plain(model)
                layer.weight.data = layer.weight.data * 2
                assert velocity(model).is_inference() == (mode is torch.inference_mode)
                assert_plain(model)
        assert captured.captures == 1


class Unpinned(TorchFunctionMode):
    """Without a GPU nothing is pinned."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def test_an_answer_stands_on_the_cpu_and_can_be_written_in_every_mode(monkeypatch):
    """Also where it was made in inference mode, under a default device of torch."""
    monkeypatch.setattr(torch.cuda, "Event", lambda external: SimpleNamespace(synchronize=lambda: None))
    with torch.inference_mode(), Unpinned(), torch.device("meta"):
        answer = graphs.Answer(torch.device("cpu"))
    answer.expect()
    answer._value.fill_(1)
    assert answer.read()


class Changing(nn.Module):
    """Does with its weight, or its argument, what `how` says, and returns a sum."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.how, self.calls = how, 0

    def forward(self, x: Tensor, options: dict) -> Tensor:
        if self.how == "moves its weight":
            self.weight.data = self.weight.data.clone()
        if self.how == "counts its calls":
            self.calls += 1
        if self.how == "writes to its argument":
            x += 1
        if self.how == "settles" and not self.calls:
            self.calls, self.weight.data = 1, self.weight.data * 2
        options.pop("once")
        return x + self.weight


@pytest.mark.parametrize("how", ["moves its weight", "counts its calls", "writes to its argument", "settles"])
def test_models_that_change_something_in_a_call(how, caplog):
    model, x = Changing(how), torch.zeros(3)
    with fluxq.capture(model) as captured:
        model(x, {"once": 1})
        model.calls = 5
        model(x, {"once": 1})
        assert captured.captures == 2 * (how == "settles") and bool(caplog.text) == (how != "settles")
        if how == "counts its calls":
            assert model.calls == 6  # not warmed up again
        if how == "writes to its argument":
            assert x.tolist() == [2, 2, 2]


# --- copies, compiled models, several denoisers


def test_a_copy_computes_plainly(flux):
    want = velocity(flux.transformer)
    with fluxq.capture(flux) as captured:
        velocity(flux.transformer)
        copied = copy.deepcopy(flux.transformer)
        copied.proj_out.weight.zero_()
        copied.proj_out.bias.zero_()
        assert not velocity(copied).any() and torch.equal(velocity(flux.transformer), want)
        assert captured.captures == 1 and captured.captured[0].replays == 2


def test_a_shallow_copy_has_its_own(flux):
    """Check that a copy is captured and the original is not, so that a benchmark can have both at once."""
    other = copy.copy(flux.transformer)
    with fluxq.capture(other) as captured:
        assert torch.equal(velocity(other), velocity(flux.transformer))
        assert captured.captured[0].replays == 1 and "forward" not in vars(flux.transformer)


class Small(nn.Sequential):
    """Small denoiser with a forward pass like those of diffusers, for compilers to be quick with."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (super().forward(x),)


@pytest.fixture
def kept_as_recorded(monkeypatch) -> None:
    """A compiled model cannot be copied: here replays keep what recording computed."""
    monkeypatch.setattr(Recorder, "record", lambda self, call, beside: (None, call(), None))
    monkeypatch.setattr(Recorder, "replay", lambda self, graph: None)
    torch._dynamo.reset()


@pytest.mark.parametrize("order", ["around", "in place", "parts", "afterwards"])
def test_compiled_models(order, kept_as_recorded):
    model, x = Small(), torch.ones(2, 3)
    (want,) = model(x)
    if order == "around":
        model = torch.compile(model, backend="eager")
    elif order == "in place":
        model.compile(backend="eager")
    elif order == "parts":
        model[0].compile(backend="eager")
    with fluxq.capture(model) as captured:
        called = torch.compile(model, backend="eager") if order == "afterwards" else model
        assert torch.equal(called(x)[0], want) and torch.equal(called(x)[0], want)
        assert captured.captures == (order != "afterwards")
        assert sum(graph.replays for graph in captured.captured) == 2 * captured.captures
    assert torch.equal(model(x)[0], want)


def test_restore_takes_out_the_step_around_a_compiled_model(kept_as_recorded):
    model = torch.compile(Small(), backend="eager")
    fluxq.capture(model).tie_to_optimize()
    assert graphs.step_of(model) is not None
    fluxq.restore(model)
    assert graphs.step_of(model) is None


@pytest.mark.often(1)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "default"])
def test_compiled_with_graphs_of_its_own(mode, in_place):
    model = Small()
    if in_place:
        model.compile(mode=mode)
    else:
        model = torch.compile(model, mode=mode)
    refused = mode in ("reduce-overhead", "max-autotune")
    with pytest.raises(ValueError, match="compiled with CUDA graphs of its own") if refused else nullcontext():
        fluxq.capture(model).remove()


def test_all_denoisers_of_a_pipeline(flux):
    pipe = SimpleNamespace(components={"transformer": flux.transformer, "transformer_2": tiny.load().transformer})
    with fluxq.capture(pipe) as captured:
        for model in pipe.components.values():
            velocity(model)
        assert [graph.model for graph in captured.captured] == ["transformer", "transformer_2"]


# --- on a GPU


@pytest.fixture
def on_gpu(quantized) -> Callable[..., diffusers.FluxPipeline]:
    def load(recipe: str, then: str = "") -> diffusers.FluxPipeline:
        pipe = quantized(recipe).to("cuda")
        if then:
            fluxq.prepare(pipe)
            fluxq.optimize(pipe)
        return pipe

    return load


@pytest.mark.gpu
@pytest.mark.parametrize("then", ["", "prepared and optimized"])
@pytest.mark.parametrize("recipe", ["16 bit", "int8", "fp8", "nvfp4"])
def test_on_a_gpu_images_are_the_same(on_gpu, recipe, then):
    pipe = on_gpu(recipe, then)
    two = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    calls = [{}, {"height": 32}, {"prompt": ["a red circle", "a star"]}, two, {}]
    want = [latents(pipe, **call) for call in calls]
    with fluxq.capture(pipe) as captured:
        for call, image in zip(calls, want, strict=True):
            assert torch.equal(latents(pipe, **call), image), call
        assert captured.captures == 3 and all(graph.bytes is not None for graph in captured.captured)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["16 bit", "fp8"])
def test_on_a_gpu_adapters_are_swapped(on_gpu, lora_file, recipe):
    pipe = on_gpu(recipe)
    one = lora_file("one.safetensors", ADAPTED)
    two = lora_file("two.safetensors", ADAPTED, rank=8, alpha=4, seed=1)
    pipe.enable_lora_hotswap(target_rank=8)
    pipe.load_lora_weights(one, adapter_name="style")
    with fluxq.capture(pipe) as captured:
        assert_plain(pipe.transformer)
        pipe.load_lora_weights(two, adapter_name="style", hotswap=True)
        assert_plain(pipe.transformer)
        pipe.transformer._apply(torch.clone)
        assert_plain(pipe.transformer)
        assert captured.captures == 1
        pipe.set_adapters("style", 0.5)
        assert_plain(pipe.transformer)
        pipe.unload_lora_weights()
        assert_plain(pipe.transformer)
        assert captured.captures == 3


@pytest.mark.gpu
def test_on_a_gpu_graphs_share_memory_and_give_it_back(on_gpu):
    pipe = on_gpu("16 bit")
    with fluxq.capture(pipe, max_graphs=1) as captured:
        for tokens in (16, 64, 16, 64):
            assert_plain(pipe.transformer, tokens=tokens)
        assert captured.captures == 4
        kept = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < kept


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_waits_for_the_device_is_computed_plainly(on_gpu, caplog):
    pipe = on_gpu("16 bit")
    embed = type(pipe.transformer.time_text_embed)
    plain = embed.forward

    def waits(module, timestep, *more):
        return plain(module, timestep, *more) * (1 if timestep.max().item() >= 0 else 2)

    want = latents(pipe)
    with pytest.MonkeyPatch.context() as patch, fluxq.capture(pipe) as captured:
        patch.setattr(embed, "forward", waits)
        assert torch.equal(latents(pipe), want) and captured.captures == 0
    assert caplog.text.count("it waits for the device") == 1
    assert torch.equal(latents(pipe), want)


@pytest.mark.gpu
def test_on_a_gpu_compiled_steps_are_recorded_too(on_gpu):
    pipe = on_gpu("fp8")
    pipe.transformer.compile_repeated_blocks()
    want = latents(pipe)
    with fluxq.capture(pipe) as captured:
        assert torch.equal(latents(pipe), want) and captured.captures == 1
