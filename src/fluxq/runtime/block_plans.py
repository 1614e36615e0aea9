"""Plans of whole fused blocks: a later call does the steps of an earlier one, and none of the Python between them.

The first call of a kind runs plainly, and what it launches is compiled and compared; the second is watched as
kernels/plans.py watches an op, with all weights of the block as operands, and its steps are done once more beside it:
if they give other bytes, or fail, there is no plan. From the third on they are done in its place:

    kind     shapes, strides, dtypes, device, alignment and shared memory of the arguments, other arguments by value,
             and the settings of the process that choose kernels
    state    what the forward reads beside them: modules, their classes and attributes, the places and layouts of
             weights. Another state has plans of its own. The last four are kept; at a change of the block those go
             that have no plans, or whose modules the block holds no more.

A plan holds no tensor: weights are looked up at each call. A block with tensors or modules in plain attributes, or with
a layer in 16 bit at this step, has neither plans nor a state. After `MOST_MISSES` changes in a row a block is let alone
for `REST` calls. Where something could be computed that a watch does not see, no plan is made (`_is_seen`), and calls
with gradients, autocast, verify="always", under a mode of torch (a default device is one) or in one of its transforms,
with torch's attention replaced or on another GPU than the current one are computed plainly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_leaves

from fluxq.base import settings
from fluxq.base.console import first_line, logger
from fluxq.kernels import findings
from fluxq.kernels.op import kind_of, untraced
from fluxq.recipes import computing


def are_planned(device: str) -> bool:
    """Tell whether blocks on a type of device have plans: where Python takes longer than what it launches."""
    return device in DEVICES and _HAS_TRITON


class BlockPlans:
    """Plans of one block's calls. A copy of it has none."""

    def __init__(self) -> None:
        self._states: list[_State] = []  # the one that was found last first
        self._misses = 0  # changes in a row; from MOST_MISSES on, calls of the rest are added

    def __reduce__(self) -> tuple[type[BlockPlans], tuple[()]]:
        return BlockPlans, ()

    @untraced  # Dynamo would trace the steps, where a frame that it gave up on comes here
    def run(
        self,
        block: nn.Module,
        computed: Callable[..., tuple[Any, bool]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a call of the block by its plan, or by `computed`, which also tells whether by the fused form."""
        tensors: list[Tensor] = []
        kind = None if self._rests() else _kind(args, kwargs, tensors)
        match = None if kind is None else self._find(block)
        if match is None or not match[0].is_seen:
            return computed(*args, **kwargs)[0]
        plans, operands = match[0].plans, [*tensors, *match[1]]
        plan = plans.get(kind, UNSEEN)
        if plan is UNSEEN:
            if len(plans) >= MOST_KINDS:
                oldest, *_ = plans
                plans.pop(oldest, None)  # another thread may do so too
            plans[kind] = ONCE
        elif plan is ONCE and not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            result, plans[kind] = _planned(lambda: computed(*args, **kwargs), operands)
            return result
        return plan(operands) if callable(plan) else computed(*args, **kwargs)[0]

    def _rests(self) -> bool:
        """Tell whether this call is not looked at, as the state changed too often."""
        if self._misses < MOST_MISSES:
            return False
        self._states = []
        self._misses += 1
        if self._misses == MOST_MISSES + REST:
            self._misses = MOST_MISSES - 2  # two calls tell whether it stays
        return True

    def _find(self, block: nn.Module) -> tuple[_State, list[Tensor]] | None:
        """Return the block's present state, a known one or a new one, and its weights; None where it has no plans."""
        states = self._states  # other threads put another list there
        for state in states:
            weights = state.weights_if_present(block)
            if weights is not None:
                if state is not states[0]:
                    self._put_first(state, block)
                self._misses = 0
                return state, weights
        if _is_not_kept(block):
            return None
        state = _State(block)
        self._put_first(state, block)
        self._misses += 1
        return state, state.weights()

    def _put_first(self, state: _State, block: nn.Module) -> None:
        """Put the present state first; let go those without plans, and of modules that the block holds no more."""
        present = {*map(id, block.modules())}
        others = [
            other
            for other in self._states
            if other is not state and other.is_seen and present.issuperset(map(id, other.modules))
        ]
        self._states = [state, *others[: MOST_STATES - 1]]


class _State:
    """State of all that a block's forward reads beside its arguments, and the plans of calls in it, by their kind.

    A shallow copy of a block has the same `BlockPlans`, and finds a state only while its registries are the same too.
    The block's own attributes are looked up in it at each comparison: kept here, they would keep the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self.plans: dict[Any, Any] = {}
        self.modules = [*block.modules()][1:]
        self._plain = _plain(block)
        self._registries = _registries(block)
        self._classes = [*map(type, self.modules)]
        self._kinds = [*dict.fromkeys(self._classes)]
        self._processors = [*filter(None, map(_processor_of, self.modules))]
        self._code = self._present_code()
        self._hooks = [
            *(getattr(module, name) for module in self.modules for name in ("_forward_hooks", "_forward_pre_hooks")),
            torch_modules._global_forward_hooks,
            torch_modules._global_forward_pre_hooks,
        ]
        self._is_hooked = any(self._hooks)  # a hook may decide at each call what to do
        attributes = attributes_of(self.modules)
        children = [module._modules for module in (block, *self.modules) if module._modules]
        self._read = [*children, *chain.from_iterable(map(_containers, attributes))]
        self._copies = [each if isinstance(each, tuple) else each.copy() for each in self._read]
        self._owners = [owner for module in (block, *self.modules) for owner in _owned(module) if owner]
        self._names = [*chain.from_iterable(self._owners)]
        self._types = [*map(type, self._slots())]
        weights = self.weights()
        self._layouts = _layouts(weights)
        are_plain = self._layouts is not None and {*self._types} <= {*PLAIN, type(None)}
        self.is_seen = are_plain and not self._is_hooked and all(map(_is_seen, self.modules))
        self._scales = [number for number, weight in enumerate(weights) if weight.ndim == 0]
        self._versions = self._versions_of(weights)

    def weights_if_present(self, block: nn.Module) -> list[Tensor] | None:
        """Return the weights if the block is in this state, else None."""
        if any(self._hooks) != self._is_hooked or self._classes != [*map(type, self.modules)]:
            return None
        if [*map(id, self._registries)] != [*map(id, _registries(block))] or self._code != self._present_code():
            return None
        try:
            is_alike = self._plain == _plain(block) and self._read == self._copies
        except (RuntimeError, ValueError):  # a tensor stands where a number was, and is neither true nor false
            return None
        weights = self.weights()
        if not is_alike or self._names != [*chain.from_iterable(self._owners)]:
            return None
        if self._types != [*map(type, self._slots())] or self._layouts != _layouts(weights):
            return None
        return weights if self._versions == self._versions_of(weights) else None

    def weights(self) -> list[Tensor]:
        """Return the block's weights as they are now."""
        return [weight for weight in self._slots() if weight is not None]

    def _slots(self) -> Iterator[Tensor | None]:
        """Return what stands under the names of weights."""
        return chain.from_iterable(map(dict.values, self._owners))

    def _present_code(self) -> list[Any]:
        """Return what the classes of modules and processors say, whose own attributes do not show it."""
        classes = [*map(type, self._processors)]
        names = ("__call__", "_attention_backend", "_parallel_config")
        attributes = [getattr(kind, name, None) for kind in classes for name in names]
        return [*map(attrgetter("forward", "__call__"), self._kinds), *classes, *attributes]

    def _versions_of(self, weights: list[Tensor]) -> list[int]:
        """Return how often numbers were written, which side_by_side.py compares."""
        return [0 if weights[number].is_inference() else weights[number]._version for number in self._scales]


def _planned(call: Callable[[], tuple[Any, bool]], operands: list[Tensor]) -> tuple[Any, Any]:
    """Return the result of a call and its plan; None without one."""
    watched = importlib.import_module("fluxq.kernels.plans").watched  # which needs Triton
    (result, is_fused), plan = watched(call, operands)
    plan = None if plan is None or not is_fused else plan._replace(result=plan.result.values[0])
    return result, plan if plan is not None and _repeats(plan, operands, result) else None


def _repeats(plan: Any, operands: list[Tensor], result: Any) -> bool:
    """Tell whether a plan gives the result of the call that it was made of, byte for byte; warn if it does not."""
    if settings.verification() == "off":
        return True
    try:
        pairs = zip(tree_leaves(plan(operands)), tree_leaves(result), strict=True)
        if all(a is b or torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (a, b))) for a, b in pairs):
            return True
        why = "gave other bytes; please report this"
    except Exception as error:  # as out of memory, where the call itself was not
        why = f"raised {type(error).__name__}: {first_line(error)}"
    logger.warning("a fused block has no plan: its steps, done again, %s", why)
    return False


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Return the kind of a call, hashable, and add its tensors to `tensors`; None for a call without a plan."""
    if torch.is_grad_enabled() or settings.verification() == "always":
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None
    chosen = kernel_settings()
    if chosen[0] not in WATCHABLE_BACKENDS or type(chosen[1]) is not BuiltinFunctionType:
        return None
    try:
        kinds = kind_of((*args, *kwargs, *kwargs.values()), tensors)
    except (TypeError, RuntimeError):  # what cannot be compared, and tensors without memory of their own
        return None
    device = tensors[0].device if tensors else torch.device("meta")
    if not are_planned(device.type) or len({*map(id, tensors)}) < len(tensors) or any(map(_is_unusual, tensors)):
        return None
    if torch.is_autocast_enabled(device.type) or (
        device.type == "cuda" and device.index != torch.cuda.current_device()
    ):
        return None
    storages: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        kinds += (storages.setdefault(tensor.untyped_storage()._cdata, number), tensor.storage_offset())
    return *kinds, torch.is_inference_mode_enabled(), settings.changes(), findings.withdrawals(), *chosen


def kernel_settings() -> tuple[Any, ...]:
    """Return the settings of the process that choose kernels: first diffusers' attention backend, and torch's own."""
    backend = _AttentionBackendRegistry.get_active_backend()[0]
    return backend, F.scaled_dot_product_attention, *(setting() for setting in _SETTINGS)


def _is_unusual(tensor: Tensor) -> bool:
    """Tell whether a tensor is of a subclass, or more than its memory shows: negated, or part of a transform."""
    return type(tensor) not in PLAIN or bool(torch._C._dispatch_keys(tensor).raw_repr() & UNUSUAL)


def _is_not_kept(block: nn.Module) -> bool:
    """Tell whether attributes hold what a state would keep in memory: tensors, modules, weights of a step in 16 bit."""
    modules = [*block.modules()][1:]
    if any("instead" in vars(module) for module in modules):
        return True
    read = chain(_containers(_plain(block)), chain.from_iterable(map(_containers, attributes_of(modules))))
    return any(isinstance(value, (Tensor, nn.Module)) for each in read for value in _values(each))


def _is_seen(module: nn.Module) -> bool:
    """Tell whether a watch sees all that a module computes: it is of a package that calls torch, and launch.py."""
    kind, processor = type(module), _processor_of(module)
    return (
        all(str(each.__module__).split(".")[0] in WATCHABLE_PACKAGES for each in (kind, kind.forward, kind.__call__))
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and getattr(processor, "_attention_backend", None) in (None, *WATCHABLE_BACKENDS)
        and getattr(processor, "_parallel_config", None) is None
    )


def _processor_of(module: nn.Module) -> Any:
    return vars(module).get("processor")


def attributes_of(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """Return the attributes of modules, then those of their processors; set_attention_backend() writes to these."""
    return [vars(each) for each in (*modules, *map(_processor_of, modules)) if hasattr(each, "__dict__")]


def _containers(attributes: dict[str, Any]) -> Iterator[Any]:
    """Yield a module's attributes, without torch's own registries, and the containers in them that may be changed."""
    yield attributes
    waiting = [value for name, value in attributes.items() if name not in UNREAD]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, dict, set, tuple)):
            yield value
            waiting += _values(value)


def _values(container: Any) -> Iterator[Any]:
    yield from container.values() if isinstance(container, dict) else container


def _plain(block: nn.Module) -> dict[str, Any]:
    """Return a block's attributes, without torch's registries and what fused.py keeps there."""
    return {name: value for name, value in vars(block).items() if name not in UNREAD and name != FUSION_ATTRIBUTE}


def _registries(block: nn.Module) -> tuple[dict[str, Any], ...]:
    return block._modules, *_owned(block)


def _owned(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _layouts(weights: list[Tensor]) -> list[list[Any]] | None:
    """Return where weights lie and how, and at what place of their storage: by that, neighbours are one tensor.

    None where one has no memory of its own.
    """
    try:
        return [[*map(part, weights)] for part in LAYOUT]
    except RuntimeError:
        return None


FUSION_ATTRIBUTE = "fluxq_fusion"  # of a fused block: its `Fusion`
DEVICES = ("cuda",)
LAYOUT: Any = (Tensor.data_ptr, Tensor.storage_offset, Tensor.stride, attrgetter("shape", "dtype"))
MOST_STATES, MOST_KINDS = 4, 8
MOST_MISSES, REST = 16, 64  # of a block whose state is another at each call, as that of one which is offloaded
PLAIN = (Tensor, nn.Parameter)
_KEYS = torch._C.DispatchKey
UNUSUAL = sum(
    torch._C.DispatchKeySet(key).raw_repr()
    for key in (_KEYS.Negative, _KEYS.Conjugate, _KEYS.ZeroTensor, _KEYS.Functionalize)
)
UNREAD = frozenset(vars(nn.Module())) - {"training"}  # torch's registries; the weights in them are compared by layout
WATCHABLE_PACKAGES = ("torch", "diffusers", "fluxq", "peft")
WATCHABLE_BACKENDS = (  # of diffusers' attention: those of torch and ours
    *("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"),
    *computing.BACKENDS.values(),
)
UNSEEN: Any = object()
ONCE: Any = object()  # in the place of the plan of a kind that came once
_HAS_TRITON = find_spec("triton") is not None
_SETTINGS: tuple[Callable[[], Any], ...] = (
    settings.accumulation,
    lambda: torch.backends.cuda.matmul.fp32_precision,  # the older getter raises after this was set
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    lambda: tuple(torch._C._get_sdp_priority_order()),
)
