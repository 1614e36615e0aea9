"""Plans of fused blocks: from the third call on the bits of an unplanned call, and none where anything may differ.

Here blocks on the CPU have plans, whose ops are the torch references; with `launching` they take the way to a GPU's
kernels, on the interpreter. Every comparison is byte for byte.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from fused_models import BLOCKS, FULL, FUSABLE, LARGE, adapt, fused_calls, ops, output, quantized
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import fluxq
from fluxq.kernels import findings
from fluxq.kernels.linear import QuantLinear
from fluxq.runtime import block_plans, fused_forms
from fluxq.runtime.graphs import hoisted_in
from fluxq.runtime.side_by_side import lay_side_by_side

pytest.importorskip("triton")

from fluxq.kernels import launch, plans
from fluxq.kernels.all_ops import OPS
from fluxq.kernels.interpreter import interpreting

FLUX = BLOCKS["flux"]
ATTENTION = "transformer_blocks.0.attn"


@pytest.fixture(autouse=True)
def replays(monkeypatch) -> list[int]:
    """Blocks on the CPU have plans; one element for each that was replayed."""
    monkeypatch.setattr(block_plans, "DEVICES", ("cpu",))
    monkeypatch.setattr(block_plans, "_repeats", lambda *_: True)  # which would count too
    counted: list[int] = []
    run = plans.Plan.__call__
    monkeypatch.setattr(plans.Plan, "__call__", lambda plan, given: counted.append(1) or run(plan, given))
    return counted


def optimized(scheme: str = "fp8-fp8", family: str = "flux", **config) -> Any:
    model = quantized(scheme, family=family, **config)
    fluxq.optimize(model)
    return model


def unplanned(model: Any, **call) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_plans, "DEVICES", ())
        return output(model, **call)


def planned(model: Any, **call) -> Any:
    for _ in range(2):
        output(model, **call)
    return model


@pytest.mark.often(1)
@pytest.mark.parametrize("scheme", ["fp8-fp8", FULL, "16 bit", "int8-int8", "int4-16bit"])
@pytest.mark.parametrize("family", FUSABLE)
def test_from_the_third_call_on_the_steps_are_replayed(family: str, scheme: str, replays: list[int]) -> None:
    model = optimized(scheme, family)
    calls: list[dict[str, Any]] = [{}, {"prompt": 2}, {"prompt": 3}, {"size": LARGE, "images": 2}]
    want = [unplanned(model, **call) for call in calls]
    for number, call in enumerate(calls):
        assert torch.equal(output(model, **call), want[number])
    assert len(replays) == BLOCKS[family]
    with torch.inference_mode():
        assert all(torch.equal(output(model), want[0]) for _ in range(3))
    assert len(replays) == 2 * BLOCKS[family]


@contextmanager
def launching(chip: str) -> Iterator[None]:
    """Ops of tensors on the CPU take the way to a GPU's kernels, which the interpreter runs."""
    with interpreting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "PLANS", {})
        patch.setattr(launch, "chip_of", lambda device: chip)
        library = torch.library.Library("fluxq", "IMPL")
        for name in ("quantized_linear", *OPS):
            library.impl(name, lambda *given, _name=name: launch.run(_name, *given), "CPU", allow_override=True)
        try:
            yield
        finally:
            library._destroy()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("scheme", ["fp8-fp8", "nvfp4-nvfp4-static-smooth-r4"])
def test_a_plan_launches_the_kernels_of_all_ops(scheme: str, replays: list[int]) -> None:
    model = optimized(scheme, num_single_layers=1)
    for first in ("attn.to_q", "attn.add_q_proj"):
        block, prefix = model.transformer_blocks[0], first.removesuffix("_proj")[:-1]
        names = [f"{prefix}{each}{'_proj' if 'add' in first else ''}" for each in "qkv"]
        assert lay_side_by_side([block.get_submodule(name) for name in names])
    with launching("sm_120"):
        want = [unplanned(model, prompt=prompt) for prompt in (1, 2)]
        replays.clear()
        planned(model)
        launch.PLANS.clear()
        replays.clear()
        assert [torch.equal(output(model, prompt=prompt), each) for prompt, each in enumerate(want, 1)] == [True, True]
    (double,) = [plan for state in plans_of(model.transformer_blocks[0])._states for plan in state.plans.values()]
    assert len(replays) == 2 * 2 + 2 * len(launch.PLANS)  # the rest are of layers outside of blocks
    assert any("_launch" in str(step.function) for step in double.steps)
    assert not any("fluxq" in str(step.function).split(".")[0] for step in double.steps)


def plans_of(block: nn.Module) -> block_plans.BlockPlans:
    return vars(block)["fluxq_fusion"].plans


# --- changes between calls: what is done after one is what the block's own steps do


def another_weight(model: Any) -> None:
    layer = model.get_submodule(f"{ATTENTION}.to_q")
    layer.weight = nn.Parameter(layer.weight.flip(0), requires_grad=False)


def another_layer(model: Any) -> None:
    model.set_submodule(f"{ATTENTION}.to_q", copy.deepcopy(model.get_submodule(f"{ATTENTION}.to_k")))


def another_place(model: Any) -> None:
    weight = model.get_submodule(f"{ATTENTION}.to_q").weight
    weight.data = weight.data.flip(0).clone()


def another_scheme(model: Any) -> None:
    layer = model.get_submodule("transformer_blocks.0.ff.net.2")
    other = QuantLinear.from_quantized(layer.quantized_weight, layer.bias.data * 2, layer.scheme)
    model.set_submodule("transformer_blocks.0.ff.net.2", other)


def an_eps(model: Any) -> None:
    model.get_submodule(ATTENTION).norm_q.eps = 0.5


def a_step_in_16_bit(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.instead = lambda layer, x: 2 * torch.nn.functional.linear(x, layer.dequantized(x.dtype).weight)


def an_adapter(model: Any) -> None:
    adapt(model, ["attn.to_q", "proj_mlp", "ff.net.2", "norm1.linear"])


def a_hook(model: Any) -> None:
    model.get_submodule("transformer_blocks.0.ff.net.2").register_forward_hook(lambda module, given, y: 2 * y)


def a_hook_of_a_block(model: Any) -> None:
    model.transformer_blocks[0].register_forward_hook(lambda module, given, y: (y[0], 2 * y[1]))


def a_forward(model: Any) -> None:
    layer = model.get_submodule("transformer_blocks.0.ff.net.2")
    layer.forward = lambda x: 2 * QuantLinear.forward(layer, x)


def a_backend(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = "_native_math"


CHANGES = {each.__name__: each for each in (
    another_weight, another_layer, another_place, another_scheme, an_eps, a_step_in_16_bit, an_adapter, a_hook,
    a_hook_of_a_block, a_forward, a_backend,
)}  # fmt: skip
STAY = ("a_hook_of_a_block", "a_step_in_16_bit", "another_layer", "another_scheme")
# the first is around the forward, the second has no state, and the others' states are let go


@pytest.mark.often(2)
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_of_the_block_no_earlier_plan_is_replayed(change: str, replays: list[int]) -> None:
    model = planned(optimized())
    before = output(model)
    assert len(replays) == FLUX
    CHANGES[change](model)
    want = unplanned(model)
    assert change == "a_backend" or not torch.equal(before, want)
    double = len(plans_of(model.transformer_blocks[0])._states)
    for _ in range(3):
        assert torch.equal(output(model), want)
    assert len(plans_of(model.transformer_blocks[0])._states) == double + (change not in STAY)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scaled", "merged", "taken out"])
def test_adapters_are_replayed_as_they_are_now(how: str, replays: list[int]) -> None:
    model = optimized()
    plain = unplanned(model)
    an_adapter(model)
    planned(model)
    output(model)
    assert len(replays) == FLUX
    {
        "scaled": lambda: model.set_adapters("a", 0.5),
        "merged": model.fuse_lora,
        "taken out": lambda: model.delete_adapters("a"),
    }[how]()
    want = unplanned(model)
    assert torch.equal(want, plain) == (how == "taken out")
    for _ in range(3):
        assert torch.equal(output(model), want)
    assert len(replays) == 2 * FLUX


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a backend", "a processor", "a forward"])
def test_changes_of_classes_are_seen(what: str, replays: list[int], monkeypatch) -> None:
    model = planned(optimized("int4-16bit"))
    before, forward = output(model), QuantLinear.forward
    place, name, value = {
        "a backend": (FluxAttnProcessor, "_attention_backend", "_native_math"),
        "a processor": (FluxAttnProcessor, "__call__", lambda *given: None),
        "a forward": (QuantLinear, "forward", lambda layer, x: 2 * forward(layer, x)),
    }[what]
    monkeypatch.setattr(place, name, value)
    want = unplanned(model)
    assert torch.equal(want, before) == (what == "a processor")
    replays.clear()
    assert torch.equal(output(model), want) and len(replays) == 0
    for _ in range(2):
        assert torch.equal(output(model), want)
    assert bool(replays) == (what != "a forward")  # of which nothing is known


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a copy", "the block"])
def test_other_registries_of_a_block_are_seen(what: str, replays: list[int]) -> None:
    model = planned(optimized())
    block = model.transformer_blocks[0]
    other = copy.copy(block) if what == "a copy" else block
    other._modules = {**block._modules, "ff": copy.deepcopy(block.ff)}
    other.ff.net[2].bias.mul_(2)
    model.transformer_blocks[0] = other
    want = unplanned(model)
    for _ in range(3):
        assert torch.equal(output(model), want)
    model.transformer_blocks[0] = block
    want = unplanned(model)
    assert torch.equal(output(model), want)


class Doubling(nn.Parameter):
    """A weight of which F.linear makes twice what it would."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return 2 * result if func is torch.nn.functional.linear else result


@pytest.mark.often(1)
@pytest.mark.parametrize("what", ["another class", "no memory", "another name", "called otherwise"])
def test_weights_that_are_not_what_they_were_are_seen(what: str, monkeypatch) -> None:
    model = optimized("16 bit").float()
    block = model.transformer_blocks[0]
    layer, norm = block.ff.net[2], block.norm2
    norm.bias = nn.Parameter(2 * torch.ones(model.inner_dim), requires_grad=False)
    output(planned(model))
    if what == "another class":
        layer.weight = Doubling(layer.weight.data, requires_grad=False)
    elif what == "no memory":
        layer.weight = nn.Parameter((2 * layer.weight.data).to_sparse(), requires_grad=False)
    elif what == "another name":
        norm.weight, norm.bias = norm.bias, None
    else:
        call = nn.Linear.__call__
        monkeypatch.setattr(nn.Linear, "__call__", lambda layer, x: 2 * call(layer, x))
    want = unplanned(model)
    for _ in range(3):
        assert torch.equal(output(model), want)


def test_weights_written_in_place_are_read(replays: list[int]) -> None:
    model = planned(optimized())
    model.get_submodule(f"{ATTENTION}.to_out.0").bias.mul_(2)
    want = unplanned(model)
    assert torch.equal(output(model), want) and len(replays) == FLUX


@pytest.mark.slow
def test_a_global_scale_written_in_place_takes_layers_apart(replays: list[int]) -> None:
    model = optimized("nvfp4-nvfp4-static")
    layers = [model.get_submodule(f"{ATTENTION}.to_{each}") for each in "qkv"]
    for layer in layers:
        layer.weight_scale_2.data = layers[0].weight_scale_2.data.clone()
    assert lay_side_by_side(layers)
    planned(model)
    layers[1].weight_scale_2.mul_(2)
    want = unplanned(model)
    assert torch.equal(output(model), want) and len(replays) == FLUX - 1


def test_weights_at_their_places_that_are_no_longer_one_memory_are_seen(replays: list[int]) -> None:
    """As when they come back to a GPU: their product was one."""
    model = optimized("int8-int8")
    layers = [model.get_submodule(f"{ATTENTION}.to_{each}") for each in "qkv"]
    assert lay_side_by_side(layers)
    planned(model)
    for weight in (weight for layer in layers for weight in layer.parameters()):
        weight.data = torch.from_numpy(weight.data.view(torch.uint8).numpy()).view(weight.dtype)
    want = unplanned(model)
    assert torch.equal(output(model), want) and len(replays) == FLUX - 1


@pytest.mark.parametrize("backend", ["native", "_native_math"])
def test_attention_that_a_context_chooses_is_planned_as_chosen(backend: str, replays: list[int]) -> None:
    """In inference mode torch chooses behind a watch, by settings that diffusers makes for this call alone."""
    model = optimized()
    model.get_submodule(ATTENTION).processor._attention_backend = backend
    with torch.inference_mode():
        want = unplanned(model)
        assert all(torch.equal(output(model), want) for _ in range(3))
    (plan,) = plans_of(model.transformer_blocks[0])._states[0].plans.values()
    names = [step.function._schema.name for step in plan.steps if hasattr(step.function, "_schema")]
    is_fused = "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert is_fused == (backend == "native") and "aten::scaled_dot_product_attention" not in names


@pytest.mark.slow
def test_steps_in_16_bit_between_others_leave_their_plans(replays: list[int]) -> None:
    model = planned(optimized())
    want = output(model)
    a_step_in_16_bit(model)
    for _ in range(block_plans.MOST_MISSES + 1):
        output(model)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            del module.instead
    replays.clear()
    assert torch.equal(output(model), want) and len(replays) == FLUX


# --- calls that have no plan


@pytest.mark.often(2)
@pytest.mark.parametrize("why", ["gradients", "autocast", "settings", "always", "withdrawn", "sdpa", "mode", "masked"])
def test_a_call_of_another_kind_is_not_replayed(why: str, replays: list[int], monkeypatch) -> None:
    monkeypatch.setattr(findings, "_withdrawn", {})
    monkeypatch.setattr("fluxq.base.settings._set", {})
    monkeypatch.setattr("fluxq.base.settings._changes", 0)
    model = planned(optimized())
    how: dict[str, Any] = {}
    around: Any = nullcontext()
    if why == "gradients":
        how = {"grad": True}
    elif why == "autocast":
        around = torch.autocast("cpu", torch.bfloat16)
    elif why == "settings":
        fluxq.configure(accumulate="exact")
    elif why == "always":
        monkeypatch.setenv("FLUXQ_VERIFY", "always")
    elif why == "withdrawn":
        findings.withdraw("scaled_matmul", "fp8", "sm_90", "off by 3")
    elif why == "sdpa":
        around = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    elif why == "masked":
        how = {"joint_attention_kwargs": {"attention_mask": torch.ones(1, 1, 1, 12, dtype=torch.bool)}}
    with around:
        want = unplanned(model, **how)
        if why == "mode":
            assert ops(model) == ops(model)
        else:
            assert torch.equal(output(model, **how), want)
    assert not replays


@pytest.fixture
def float32_settings() -> Iterator[None]:
    """Set torch's precision of fp32 products back behind a test that sets it in the newer way."""
    yield
    everything: Any = torch.backends
    everything.fp32_precision = everything.cuda.matmul.fp32_precision = "none"


@pytest.mark.often(1)
@pytest.mark.usefixtures("float32_settings")
@pytest.mark.parametrize("place", [torch.backends, torch.backends.cuda.matmul], ids=["all", "products"])
def test_a_precision_of_fp32_products_set_in_the_newer_way_is_a_kind(place: Any, replays: list[int]) -> None:
    model = planned(optimized())
    place.fp32_precision = "tf32"
    planned(model)
    assert not replays
    output(model)
    assert len(replays) == FLUX


@pytest.mark.parametrize("setting", ["order", "reduction"])
def test_settings_of_attention_that_choose_its_kernel_are_seen(setting: str) -> None:
    before, order = block_plans.kernel_settings(), torch._C._get_sdp_priority_order()
    try:
        if setting == "order":
            torch._C._set_sdp_priority_order([*reversed(order)])
        else:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        assert block_plans.kernel_settings() != before
    finally:
        torch._C._set_sdp_priority_order(order)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    assert block_plans.kernel_settings() == before


@pytest.mark.slow
def test_what_a_mode_would_count_is_not_hidden_from_it(replays: list[int]) -> None:
    model = optimized()
    want = ops(model)
    planned(model)
    assert ops(model) == want and want["adaln_quantize"] and not replays


@pytest.mark.slow
def test_a_mode_of_functions_is_not_passed_by(replays: list[int]) -> None:
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return 2 * result if func is torch.nn.functional.scaled_dot_product_attention else result

    model = planned(optimized())
    plain = unplanned(model)
    with Doubling():
        want = unplanned(model)
        assert not torch.equal(want, plain)
        for _ in range(3):
            assert torch.equal(output(model), want)
    assert not replays


@pytest.mark.often(1)
@pytest.mark.parametrize("how", ["negated", "functionalized", "differentiated"])
def test_tensors_that_are_more_than_their_memory_have_no_plan(how: str, replays: list[int]) -> None:
    model = planned(optimized("16 bit", "qwen_image"))
    x = torch.randn(1, 7, 16).bfloat16()
    call = partial(output, model, hidden_states=x)
    if how == "negated":
        negated = lambda given: given | {"temb": torch._neg_view(given["temb"])}  # noqa: E731
        for block in model.transformer_blocks:
            block.register_forward_pre_hook(lambda block, args, given: (args, negated(given)), with_kwargs=True)
    elif how == "functionalized":
        call = partial(torch.func.functionalize(lambda x: output(model, hidden_states=x)), x)
    else:
        call = partial(torch.func.jvp, lambda x: output(model, hidden_states=x), (x,), (x,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_plans, "DEVICES", ())
        want = call()
    for _ in range(3):
        assert all(map(torch.equal, call(), want))
    assert not replays


@pytest.mark.parametrize("planned_before", [True, False])
def test_attention_that_was_replaced_has_no_plan(planned_before: bool, replays: list[int], monkeypatch) -> None:
    own = torch.nn.functional.scaled_dot_product_attention

    def attend(*given: Any, **how: Any) -> Tensor:
        found = torch.empty_like(own(*given, **how))
        found.view(torch.int16).numpy()[:] = 1  # unseen
        return found

    model = optimized()
    if planned_before:
        planned(model)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    want = unplanned(model)
    for _ in range(3):
        assert torch.equal(output(model), want)
    assert not replays


@pytest.mark.parametrize("backend", ["sage", "flex", "_native_npu"])
def test_attention_of_other_packages_has_no_plan(backend: str, replays: list[int], monkeypatch) -> None:
    """Its launches are not torch's: what they wrote would be left out."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        found = torch.empty_like(query)
        found.detach().numpy()[:] = 1  # unseen
        return found

    model = optimized("16 bit").float()
    monkeypatch.setattr(fused_forms, "dispatch_attention_fn", attend)
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = backend
    want = unplanned(model)
    for _ in range(3):
        assert torch.equal(output(model), want)
    assert not replays


@pytest.mark.often(1)
@pytest.mark.parametrize("reads", [lambda x: x * float(x.sum() > 0), lambda x: x[x > -9].view(x.shape), nn.Dropout()])
def test_values_and_random_numbers_have_no_plan(reads: Callable, replays: list[int], monkeypatch) -> None:
    model = optimized()
    attend = fused_forms.dispatch_attention_fn
    monkeypatch.setattr(fused_forms, "dispatch_attention_fn", lambda *given, **how: reads(attend(*given, **how)))
    for _ in range(3):
        output(model)
    assert not replays and fused_calls(model) == FLUX


def test_a_block_that_runs_its_own_forward_has_none(replays: list[int]) -> None:
    class Custom(FluxAttnProcessor):
        pass

    model = optimized()
    model.get_submodule(ATTENTION).set_processor(Custom())
    for _ in range(3):
        output(model)
    assert len(replays) == FLUX - 1


@pytest.mark.slow
def test_hoisted_modulation_is_looked_up(pipe, replays: list[int]) -> None:
    pipe = copy.deepcopy(pipe)
    call = {"prompt": "a red circle", "height": 16, "width": 16, "num_inference_steps": 4, "output_type": "latent"}
    fluxq.optimize(pipe)

    def images(plan: bool) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_plans, "DEVICES", ("cpu",) if plan else ())
            return pipe(**call, generator=torch.Generator().manual_seed(0)).images

    want = images(plan=False)
    assert torch.equal(images(plan=True), want) and replays
    with fluxq.hoist_modulation(pipe):
        assert hoisted_in(pipe.transformer.modules()) is not None
        want = images(plan=False)
        replays.clear()
        assert torch.equal(images(plan=True), want) and not replays
    assert torch.equal(images(plan=True), images(plan=False))


def test_a_step_cache_decides_around_planned_blocks(replays: list[int]) -> None:
    model = optimized()
    model.enable_cache(FirstBlockCacheConfig(threshold=1e-6))
    with model.cache_context("a"):
        want = [unplanned(model, prompt=prompt) for prompt in (1, 2, 3, 4)]
    with model.cache_context("b"):
        got = [output(model, prompt=prompt) for prompt in (1, 2, 3, 4)]
    assert all(map(torch.equal, got, want)) and len(replays) == 2 * FLUX


# --- copies, threads, memory


def test_copies_begin_without_plans(replays: list[int]) -> None:
    model = planned(optimized("int8-int8"))
    want = unplanned(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not plans_of(other.transformer_blocks[0])._states
        assert torch.equal(output(other), want) and not replays


@pytest.mark.slow
def test_a_plan_keeps_neither_activations_nor_weights(replays: list[int]) -> None:
    model = planned(optimized())
    kept: list[weakref.ref] = []
    put = plans._Watch.put

    def noting(watch: Any, tensor: Tensor, place: Any) -> None:
        kept.append(weakref.ref(tensor))
        put(watch, tensor, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans._Watch, "put", noting)
        planned(model, prompt=2, size=LARGE)
    weight = weakref.ref(model.get_submodule(f"{ATTENTION}.to_q").weight)
    another_weight(model)
    gc.collect()
    assert kept and not any(each() is not None for each in (*kept, weight))
    gc.disable()
    try:
        block = weakref.ref(model.transformer_blocks[0])
        del model
        assert block() is None  # it was in no cycle
    finally:
        gc.enable()


@pytest.mark.slow
def test_what_a_block_no_longer_has_is_let_go_at_its_next_call() -> None:
    model = planned(optimized())
    layer = weakref.ref(model.get_submodule(f"{ATTENTION}.to_q"))
    another_layer(model)
    output(model)
    gc.collect()
    assert layer() is None


@pytest.mark.slow
def test_two_models_in_two_threads(replays: list[int]) -> None:
    models = [optimized(), optimized("int8-int8")]
    want = [unplanned(model) for model in models]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(4):
            assert all(map(torch.equal, pool.map(output, models), want))
    assert len(replays) == 2 * 2 * FLUX


def test_another_thread_may_let_go_of_the_states(replays: list[int], monkeypatch) -> None:
    model = planned(optimized())
    want, compare = output(model), block_plans._State.weights_if_present

    def interrupted(state: Any, block: nn.Module) -> Any:
        plans_of(block)._states = []
        return compare(state, block)

    monkeypatch.setattr(block_plans._State, "weights_if_present", interrupted)
    assert torch.equal(output(model), want)


@pytest.mark.slow
def test_a_block_that_always_changes_rests_and_is_looked_at_again(replays: list[int]) -> None:
    model = optimized()
    block, before = model.transformer_blocks[0], []
    for _ in range(block_plans.MOST_MISSES):
        before.append(model.get_submodule(f"{ATTENTION}.to_q").weight)  # or another would get its place
        another_weight(model)
        output(model)
    assert 0 < len(plans_of(block)._states) <= block_plans.MOST_STATES
    for _ in range(block_plans.REST):
        output(model)
        assert not plans_of(block)._states
    planned(model)
    replays.clear()
    output(model)
    assert len(replays) == FLUX


@pytest.mark.slow
def test_adapters_that_were_taken_out_are_let_go() -> None:
    model = planned(optimized())
    an_adapter(model)
    planned(model)
    kept = [weakref.ref(each) for name, each in model.named_parameters() if "lora" in name and "transformer_b" in name]
    model.delete_adapters("a")
    model.unload_lora()
    output(model)
    gc.collect()
    assert kept and not any(each() is not None for each in kept)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["a step", "a list", "a tuple", "a block"])
def test_what_attributes_hold_is_not_kept(of: str, replays: list[int]) -> None:
    """No later call has to see that it was taken out."""
    model = planned(optimized())
    layer = model.get_submodule(f"{ATTENTION}.to_q")
    held = nn.Linear(layer.in_features, layer.out_features, dtype=torch.bfloat16)
    place, name, value = {
        "a step": (layer, "instead", partial(lambda held, layer, x: held(x), held)),
        "a list": (layer, "others", [held]),
        "a tuple": (layer, "others", (held.weight,)),
        "a block": (model.transformer_blocks[0], "others", {"a": held}),
    }[of]
    setattr(place, name, value)
    replays.clear()
    for _ in range(3):
        output(model)
    assert len(replays) == 3 * (FLUX - 1)
    gone = weakref.ref(held.weight)
    delattr(place, name)
    del held, value
    gc.collect()
    assert gone() is None
    output(model)
    assert len(replays) == 3 * (FLUX - 1) + FLUX


@pytest.mark.slow
def test_a_state_without_plans_is_let_go_at_the_next_change() -> None:
    model = planned(optimized())
    a_forward(model)
    output(model)
    layer = model.get_submodule("transformer_blocks.0.ff.net.2")
    gone = weakref.ref(layer.forward)
    del layer.forward
    output(model)
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_torch_compile_does_not_see_plans(replays: list[int]) -> None:
    model = planned(optimized("16 bit"))
    want = unplanned(model)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(output(compiled), want) and not replays


@pytest.mark.parametrize("how", ["gave other bytes", "raised OutOfMemoryError"])
def test_steps_that_do_not_give_the_same_are_no_plan(how: str, monkeypatch, caplog) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(block_plans, "DEVICES", ("cpu",))
    run = plans.Plan.__call__

    def again(plan: plans.Plan, given: Any) -> Any:
        if "raised" in how:
            raise torch.OutOfMemoryError("for the second time")
        return tree_map(torch.zeros_like, run(plan, given))

    monkeypatch.setattr(plans.Plan, "__call__", again)
    model = optimized()
    want = unplanned(model)
    for _ in range(3):
        assert torch.equal(output(model), want)
    assert f"its steps, done again, {how}" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_a_captured_step_is_the_same(flux, replays: list[int]) -> None:
    fluxq.optimize(flux)
    call = {"prompt": "a red circle", "height": 16, "width": 16, "num_inference_steps": 4, "output_type": "latent"}
    images = lambda: flux(**call, generator=torch.Generator().manual_seed(0)).images  # noqa: E731
    want = images()
    assert replays
    with fluxq.capture(flux) as captured:
        assert torch.equal(images(), want) and torch.equal(images(), want)
        assert captured.captures == 1
    assert torch.equal(images(), want)
