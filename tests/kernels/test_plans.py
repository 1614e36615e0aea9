"""Launch plans: a second call does what the first did, with other operands, and nothing of what it need not."""

import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton
from rounding import norm_packed
from rounding import packed as packed_steps
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.jit import JITFunction

from fluxq.base import settings
from fluxq.kernels import dispatch, launch, op, ops, plans
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.op import untraced
from fluxq.kernels.products import ProductTensors
from fluxq.kernels.qk_norm_rope import op as rope
from fluxq.kernels.tensor import QuantizedTensor, pack_named
from fluxq.recipes.formats import find_format

N, K, M = 96, 256, 20


@pytest.fixture(autouse=True)
def no_plans(monkeypatch) -> None:
    monkeypatch.setattr(launch, "PLANS", {})
    monkeypatch.setattr(launch, "chip_of", lambda device: "sm_90")


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (M, K)), generator=torch.Generator().manual_seed(seed)).bfloat16()


def norm(seed: int) -> tuple:
    scale, shift, gate = (tokens(seed + i, 2, K) for i in range(3))
    return (
        tokens(seed),
        *norm_packed("fp8", scale=scale, shift=shift, branch=tokens(seed + 3), gate=gate),
        "layer",
        1e-6,
    )


def product(kind: str, **how: Any) -> Callable[[int], tuple]:
    def arguments(seed: int) -> tuple:
        x = ops.quantize_activation(tokens(seed).float(), find_format(kind))
        w = QuantizedTensor.quantize(tokens(seed + 1, N, K).float(), kind)
        given = ProductTensors(w.codes, w.scale, x.scale, w.global_scale, x.global_scale, bias=tokens(seed + 2, N))
        return x.codes, *pack_named(given, kind), how.get("gelu", False), torch.bfloat16

    return arguments


def layer(scheme: str) -> Callable[[int], tuple]:
    def arguments(seed: int) -> tuple:
        w = QuantizedTensor.quantize(tokens(seed + 1, N, K).float(), scheme.split("-")[0])
        return tokens(seed).view(1, M, K), *pack_named(ops.LinearTensors(w.codes, w.scale, w.global_scale), scheme)

    return arguments


def heads(seed: int) -> tuple:
    """Two streams, of 5 and 3 tokens."""
    cos, sin = torch.randn(8, 64), torch.randn(8, 64)
    (q, k, v), second = (
        [tokens(seed + number, 1, count, h, 64) for number, h in enumerate((3, 2, 2), first)]
        for first, count in ((0, 5), (3, 3))
    )
    weights = [tokens(seed + number, 64) for number in range(6, 10)]
    given = rope.RopeTensors(cos, sin, *weights[:2], v, *second, *weights[2:])
    return q, k, *pack_named(given), 1e-6, True, False


def gradient(formats: str) -> Callable[[int], tuple]:
    def arguments(seed: int) -> tuple:
        w = QuantizedTensor.quantize(tokens(seed + 1, N, K).float(), formats.partition("-")[0])
        return tokens(seed, M, N), w.codes, w.scale, w.global_scale, formats, torch.bfloat16

    return arguments


CALLS: dict[str, tuple[str, Callable[[int], tuple]]] = {
    "codes": ("quantize_activation", lambda seed: (tokens(seed), *packed_steps("fp8", act="gelu_tanh"))),
    "blocks": ("quantize_activation", lambda seed: (tokens(seed), *packed_steps("nvfp4", swizzled=True))),
    "norm": ("adaln_quantize", norm),
    "heads": ("qk_norm_rope", heads),
    "library's product": ("scaled_matmul", product("fp8")),
    "product by descriptors": ("scaled_matmul", product("fp8", gelu=True)),
    "integers": ("scaled_matmul", product("int8")),
    "layer": ("quantized_linear", layer("fp8-fp8")),
    "16-bit activations": ("quantized_linear", layer("nvfp4-16bit")),
    "gradient": ("input_gradient", gradient("fp8")),
    "gradient as codes": ("input_gradient", gradient("fp8-fp8")),
}


def run_unplanned(name: str, arguments: tuple) -> Any:
    return launch.launcher(name)(*arguments, chip="sm_90")


def assert_same(found: Any, expected: Any) -> None:
    together = (found, expected) if isinstance(found, tuple) else ((found,), (expected,))
    for left, right in zip(*together, strict=True):
        assert (left.shape, left.dtype, left.stride()) == (right.shape, right.dtype, right.stride())
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_planned_call_gives_what_the_op_gives(call: str, monkeypatch) -> None:
    name, arguments = CALLS[call]
    first, second = arguments(1), arguments(11)
    with interpreting():
        assert_same(launch.run(name, *first), run_unplanned(name, first))
        (plan,) = launch.PLANS.values()
        assert plan is not None
        expected = run_unplanned(name, second)
        untouched = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, second)
        monkeypatch.setattr(launch, "launcher", lambda name: lambda *a, **k: pytest.fail("it was not planned"))
        assert_same(launch.run(name, *second), expected)
        assert_same(launch.run(name, *second), expected)
    for value, before in zip(tree_leaves(second), tree_leaves(untouched), strict=True):
        if isinstance(value, Tensor):
            assert_same(value, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[: M - 4],
        lambda x: x.half(),
        lambda x: torch.stack([x, x], 1)[:, 0],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(M, K),
    ],
    ids=["shape", "dtype", "stride", "address"],
)
def test_operands_of_another_kind_have_a_plan_of_their_own(other: Callable[[Tensor], Tensor]) -> None:
    steps = packed_steps("fp8")
    with interpreting():
        launch.run("quantize_activation", tokens(1), *steps)
        x = other(tokens(2))
        assert_same(launch.run("quantize_activation", x, *steps), run_unplanned("quantize_activation", (x, *steps)))
    assert len(launch.PLANS) == 2


def test_after_a_change_of_settings_calls_are_planned_anew(monkeypatch) -> None:
    monkeypatch.setattr(settings, "_set", {})
    given = product("fp8")(1)
    for accumulate in ("fast", "exact", "fast"):
        settings.configure(accumulate=accumulate)
        launch.run("scaled_matmul", *given)
        launch.run("scaled_matmul", *given)
    assert len(launch.PLANS) == 3


@pytest.mark.slow
def test_one_tensor_for_two_operands_makes_no_plan() -> None:
    first, second = norm(1), norm(11)
    scale, _, *rest = first[1]
    with interpreting():
        launch.run("adaln_quantize", first[0], [scale, scale, *rest], *first[2:])
        assert not launch.PLANS
        launch.run("adaln_quantize", *first)
        twice = second[0], [second[1][0], second[1][0], *second[1][2:]], *second[2:]
        assert_same(launch.run("adaln_quantize", *twice), run_unplanned("adaln_quantize", twice))
    assert len(launch.PLANS) == 1


def test_one_tensor_for_two_has_the_reference_where_the_kernel_was_wrong(monkeypatch) -> None:
    x, (scale, _, *rest), *how = norm(1)
    given = x, [scale, scale, *rest], *how

    def withdrawn(name: str) -> Any:
        raise dispatch.NoKernel("it was wrong", was_wrong=True)

    monkeypatch.setattr(launch, "launcher", withdrawn)
    assert_same(launch.run("adaln_quantize", *given), op.REFERENCES["adaln_quantize"](*given))


def test_operands_on_another_device_are_of_another_kind() -> None:
    x = tokens(1)
    here = op.kind_of([[x]], [])
    with mock.patch.object(Tensor, "get_device", lambda tensor: 1):
        assert op.kind_of([[x]], []) != here


def test_a_plan_lets_go_of_what_is_read_no_more_and_makes_nothing_in_vain() -> None:
    """No more is held at once than by the call itself."""

    def chain(x: Tensor) -> Tensor:
        x.new_empty(7)
        for _ in range(5):
            x = x + 1
        return x

    x = torch.zeros(1 << 16)
    (first, plan), in_watch = held_by(lambda: plans.watched(lambda: chain(x), [x]))
    planned, in_plan = held_by(lambda: plan([x]))
    assert torch.equal(first, planned) and torch.equal(first, chain(x))
    assert len(plan.steps) == 5 and in_watch == in_plan == held_by(lambda: chain(x))[1] == 2 * x.nbytes


def held_by(call: Callable[[], Any]) -> tuple[Any, int]:
    """(result, the most bytes of new tensors that were alive at once; small ones not counted)."""
    alive: dict[int, int] = {}
    most = 0

    class Held(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            result = func(*args, **(kwargs or {}))
            if result.nbytes > 1000:
                alive[id(result)] = result.nbytes
                weakref.finalize(result, alive.pop, id(result))
            most = max(most, sum(alive.values()))
            return result

    with Held():
        return call(), most


def test_dynamo_does_not_trace_the_launch(monkeypatch) -> None:
    """It would go on inside a call by a frame that it gave up on."""
    monkeypatch.setattr(launch, "run", lambda name, x: x + 1)
    seen = []

    def model(x: Tensor) -> Tensor:
        for _ in range(2):
            try:
                torch._dynamo.graph_break()
                x = untraced(partial(op._launch, "test"))(x)
            finally:
                pass
        return x

    compiled = torch.compile(model, backend=lambda graph, inputs: seen.append(graph) or graph)
    assert torch.equal(compiled(torch.zeros(3)), torch.full((3,), 2.0)) and not seen


def test_under_autocast_nothing_is_planned() -> None:
    given = layer("fp8-fp8")(1)
    with interpreting(), torch.autocast("cpu", torch.bfloat16):
        launch.run("quantized_linear", *given)
    assert not launch.PLANS


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + float(x.sum()),  # a value
        lambda x: x + OUTSIDE,
        lambda x: x + x[x > 0].numel(),  # a size that depends on values
        lambda x: torch.nn.functional.dropout(x, 0.0) + torch.rand_like(x) * 0,
        lambda x: torch.from_numpy(x.float().numpy() * 2),  # what another library computes
        lambda x: x.as_strided((2,), (1,), 3).clone(),
        lambda x: x + x.to("meta").numel(),
    ],
    ids=["value", "outside", "size", "random", "unseen", "address", "device"],
)
def test_what_a_plan_cannot_do_again_has_none(call: Callable[[Tensor], Tensor]) -> None:
    x = tokens(1)
    result, plan = plans.watched(lambda: call(x), [x])
    assert torch.equal(result, call(x)) and plan is None


class Pair(NamedTuple):
    a: Tensor
    b: Tensor | None


def test_several_results_and_tensors_in_tuples_are_done_again(monkeypatch) -> None:
    """Of which some are never read, and some are written to."""

    def run(kernel: Any, pair: Pair, rest: tuple, **options: Any) -> None:
        pair.a.mul_(rest[0][0])
        options["also"][0].add_(1)

    @triton.jit
    def kernel(pair, rest, also):
        pass

    def call(x: Tensor, y: Tensor) -> tuple[Tensor, tuple]:
        a, b, _ = x.split([4, 8, 8])
        whole = torch.empty_like(y)
        whole.copy_(y)
        kernel[(1,)](Pair(whole, None), ([a.sum()], 3), also=(b,))
        return whole, (b, x.unbind(0)[1])

    monkeypatch.setattr(JITFunction, "run", run)
    first, second = (tokens(1), tokens(2)), (tokens(3), tokens(4))
    expected = call(*map(torch.clone, second))
    _, plan = plans.watched(lambda: call(*first), first)
    assert plan is not None
    found = plan(second)
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))


@pytest.mark.slow
@pytest.mark.parametrize("call", ["codes", "layer"])
def test_in_a_wider_watch_an_ops_own_launches_are_noted(call: str) -> None:
    """They are made with the operands of the call around it."""
    name, arguments = CALLS[call]

    def around(x: Tensor, rest: tuple) -> Any:
        return tree_map(lambda y: y.clone(), launch.run(name, x * 2, *rest))

    given = [arguments(seed) for seed in (1, 11)]
    operands = [[each for each in tree_leaves(one) if isinstance(each, Tensor)] for one in given]
    with interpreting():
        expected = around(given[1][0], given[1][1:])
        launch.PLANS.clear()
        _, plan = plans.watched(lambda: around(given[0][0], given[0][1:]), operands[0])
        assert plan is not None and not launch.PLANS
        assert sum(not step.makes for step in plan.steps) and plans.watching() is None
        assert_same(plan(operands[1]), expected)


def test_a_bad_input_is_named_each_time() -> None:
    x = tokens(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="act is 'none'"):
            launch.run("quantize_activation", x, [], "fp8/none/0/0/0 ")
    assert not launch.PLANS


def test_plans_are_not_kept_without_end(monkeypatch) -> None:
    monkeypatch.setattr(launch, "MOST_PLANS", 2)
    with interpreting():
        for m in (1, 2, 3):
            launch.run("quantize_activation", tokens(1, m, K), *packed_steps("fp8"))
    assert len(launch.PLANS) == 1


@pytest.mark.slow
def test_a_plan_holds_no_tensor() -> None:
    import gc

    with interpreting():
        arguments = product("fp8", gelu=True)(1)
        alive = [weakref.ref(value) for value in (arguments[0], *arguments[1])]
        result = launch.run("scaled_matmul", *arguments)
        alive.append(weakref.ref(result))
    del arguments, result
    gc.collect()
    assert launch.PLANS and not any(reference() is not None for reference in alive)


def test_threads_do_not_see_each_others_launches() -> None:
    """Four are watched at about the same time; afterwards the launcher is what it was."""

    def run(kernel: Any, *arguments: Any, **options: Any) -> None:
        time.sleep(0.01)

    kinds = [(tokens(1, m, K), *packed_steps("fp8")) for m in (4, 8, 12, 16)]
    with mock.patch.object(JITFunction, "run", run), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda given: launch.run("quantize_activation", *given), kinds))
        assert JITFunction.run is run
    assert len(launch.PLANS) == 4
    assert all(sum(not step.makes for step in plan.steps) == 1 for plan in launch.PLANS.values())


def test_an_interpreter_that_comes_later_is_the_one_that_launches() -> None:
    arguments = CALLS["codes"][1](1)
    with interpreting():
        launch.run("quantize_activation", *arguments)
    with mock.patch("triton.runtime.jit.JITFunction.run") as run:
        launch.run("quantize_activation", *arguments)
    assert run.call_count == 1


OUTSIDE = torch.ones(())
