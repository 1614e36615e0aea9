"""The denoiser step as a CUDA graph: one launch a step where there were thousands, and no Python between them.

A graph is a recording of kernels and of the addresses that they read and write:

    first call of a kind    three calls on a side stream, so that kernels are compiled and chosen; then one is recorded
    later ones              arguments are copied to the recorded addresses, one launch, outputs are copied out

The kind of a call is all that Python would decide by: shape, strides, dtype and device of each tensor argument, the
value of every other one, and the settings of the process that choose kernels. Outputs are copies because the next
replay writes over the originals, and pipelines keep the outputs of the call before.

A replay does not look at the model, so two things are compared before it, at every call:

    form      the modules, their classes, and all their attributes beside weights: adapters and their scalings,
              processors, hooks. Another form has graphs of its own.
    memory    every parameter and buffer lies where it lay. If one has moved and looks as before, its values are copied
              to the recorded address, and that becomes its memory again, so that swapping a LoRA records nothing.

Where no graph can stand for a call the model computes plainly, and the log says once why. Addresses that a graph reads
are given to nothing else as long as the graph is kept.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from fluxq.base.console import first_line, logger
from fluxq.base.settings import accumulation
from fluxq.kernels.quantize_activation.op import Rounding
from fluxq.recipes.formats import Scheme
from fluxq.runtime.modulation import HoistedModulation
from fluxq.runtime.placed import Handle, Placed
from fluxq.runtime.steps import is_captured, why_not_captured

WARM_UPS = 3


def capture(pipe: Any, *, max_graphs: int = 4) -> CapturedSteps:
    """Let a pipeline's denoiser, or a denoiser by itself, replay its step as a CUDA graph.

    Stays until `remove()` of what is returned, or the end of its `with` block. A graph is recorded when a call of its
    kind first comes: another size, batch, attention processor, or set of adapters is another kind, other values in the
    same tensors are not. Compile, optimize, prepare and quantize first. One call at a time, as pipelines are.

    max_graphs: that each denoiser may keep; the least recently used one goes. Each holds its intermediate tensors'
    memory, which graphs of one denoiser share.

    Raises ValueError for a model whose weights move between calls (offloading), that is not on one CUDA device, that
    decides at each call what to compute (a step cache), that is hoisted, hooked, context parallel or captured already,
    and for one compiled with CUDA graphs.
    """
    denoisers = dict(_denoisers(pipe))
    if not denoisers:
        raise ValueError(f"{type(pipe).__name__} has no transformer, and nothing else whose step could be captured")
    if max_graphs < 1:
        raise ValueError(f"max_graphs is {max_graphs}, expected at least 1")
    for model in denoisers.values():
        if is_captured(model):
            raise ValueError(f"the step of this {type(model).__name__} is captured already: remove() that first")
        why = why_not(model)
        if why:
            raise ValueError(f"the step of this {type(model).__name__} cannot be a CUDA graph: {why}")
    return CapturedSteps([_Step(name, model, max_graphs) for name, model in denoisers.items()])


@dataclass(frozen=True)
class CapturedStep:
    """A graph that is kept.

    model: name of the denoiser.
    arguments: its tensor arguments, with shape and dtype.
    bytes: memory that recording it took.
    """

    model: str
    arguments: tuple[str, ...]
    replays: int
    bytes: int | None


class CapturedSteps(Handle):
    """Handle of what `capture` put into a pipeline; `remove()`, or leaving its `with` block, takes it out."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps

    @property
    def captured(self) -> tuple[CapturedStep, ...]:
        """The graphs that are kept, the least recently used first."""
        return tuple(
            CapturedStep(step.name, graph.arguments, graph.replays, graph.bytes)
            for step in self._steps
            for graph in step.graphs.values()
        )

    @property
    def captures(self) -> int:
        """Number of graphs recorded so far, those included that are gone."""
        return sum(step.captures for step in self._steps)

    def remove(self) -> None:
        """Give each denoiser its own forward again, and all graphs' memory back."""
        for step in self._steps:
            step.remove()


class CudaGraphs:
    """The device's part of capturing: calls on a side stream, and recording."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Call once where recording will happen: libraries keep workspaces for each stream."""
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                call()
            torch.cuda.current_stream().wait_stream(self.stream)

    def rehearse(self, call: Callable[[], Any]) -> bool:
        """Warm up once more, and tell whether nothing waited for the device, which would break a recording."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # as an error it would also be one in other threads
            try:
                self.warm_up(call)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        return not any("called a synchronizing" in str(each.message) for each in caught)

    def record(self, call: Callable[[], Any], beside: Any) -> tuple[Any, Any, int]:
        """Record the graph of a call; return it, the call's outputs, and the bytes that the device's memory grew by.

        beside: a graph to share memory with, or None. Other threads may use the device meanwhile.
        """
        # A recording that is broken off leaves its stream in place of the current one, which the second block undoes.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            pool = beside.pool() if beside else None
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                outputs = call()
            return graph, outputs, torch.cuda.memory_reserved() - before

    def replay(self, graph: Any) -> None:
        """Replay a graph on the current stream."""
        with torch.cuda.device(self.device):
            graph.replay()


class _Plain(Exception):
    """Reason why a call is computed without a graph."""


@dataclass
class _Graph:
    """A recorded call.

    inputs: its tensor arguments, None in the place of others.
    outputs: its flat outputs.
    returns: their structure.
    """

    graph: Any
    inputs: list[Tensor | None]
    outputs: list[Any]
    returns: TreeSpec
    arguments: tuple[str, ...]
    bytes: int | None
    replays: int = 0


class _Step(Placed):
    """Callable that stands in the place of a denoiser's forward."""

    def __init__(self, name: str, model: nn.Module, max_graphs: int) -> None:
        self.name, self.max_graphs = name, max_graphs
        self.device = CudaGraphs(next(_tensors(model)).device)
        self.graphs: dict[tuple[_Form, tuple], _Graph] = {}
        self.captures = 0
        self._on = True
        self._failed = ""
        self._refused: dict[tuple, str] = {}
        self._forms: list[_Form] = []
        self._logged: set[str] = set()
        super().__init__(model, _place(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._on or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        try:
            recording = self._find(leaves, spec)
        except _Plain as why:
            self._say(str(why))
            recording = None
        return self.plain(*args, **kwargs) if recording is None else self._replayed(recording, leaves)

    @property
    def is_replayed(self) -> bool:
        return self._on

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the plain forward: a copy of the model has no graphs."""
        return copy.deepcopy(self.plain, memo)

    def remove(self) -> None:
        """Take it out; where something has been put around it since, it stays and passes everything on."""
        self._on = False
        self._drop()
        super().remove()

    def _replayed(self, recording: _Graph, leaves: list[Any]) -> Any:
        _fill(recording.inputs, leaves)
        self.device.replay(recording.graph)
        recording.replays += 1
        outputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in recording.outputs]
        return tree_unflatten(outputs, recording.returns)

    def _find(self, leaves: list[Any], spec: TreeSpec) -> _Graph:
        """Return the graph for a call, recorded now if there is none. Raises _Plain if there can be none."""
        if self._failed:
            raise _Plain(self._failed)
        if torch.is_grad_enabled():
            raise _Plain("gradients are on: call it under torch.no_grad()")
        if torch.is_autocast_enabled(self.device.kind):
            raise _Plain("autocast casts weights for a while, which a graph would outlive: load it in that dtype")
        form = self._form()
        kind = (spec, tuple(_described(leaf, form.device) for leaf in leaves), _settings())
        if kind in self._refused:
            raise _Plain(self._refused[kind])
        recording = self.graphs.pop((form, kind), None)
        if recording is None:
            form, recording = self._record(leaves, spec, kind)
        self.graphs[form, kind] = recording  # the last one is the one that was used last
        return recording

    def _form(self) -> _Form:
        """Return the model's present form: a known one, with its weights back in their memory, or a new one.

        Raises _Plain for a form that no graph can stand for.
        """
        form = next((other for other in reversed(self._forms) if other.is_present()), None)
        if form is None:
            why = why_not(self.module)
            if why:
                self._drop()  # an offloaded model is to give memory back
                raise _Plain(why)
            form = _Form(self.module, self.place)
            if form.device != self.device.device:
                self._drop()
                raise _Plain(f"it was moved from {self.device.device} to {form.device}: remove() and capture it there")
        if self._forms and form is not self._forms[-1]:
            present = {*map(id, form.modules)}
            for other in self._forms:
                if not present.issuperset(map(id, other.modules)):  # an adapter's, which was unloaded: never back
                    self._drop(other)
        used = {id(other) for other, _ in self.graphs}
        self._forms = [other for other in self._forms if id(other) in used and other is not form] + [form]
        return form

    def _record(self, leaves: list[Any], spec: TreeSpec, kind: tuple) -> tuple[_Form, _Graph]:
        while len(self.graphs) >= self.max_graphs:
            del self.graphs[next(iter(self.graphs))]
        inputs = [_like(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        _fill(inputs, leaves)
        versions = [tensor._version for tensor in inputs if tensor is not None]
        filled = [leaf if tensor is None else tensor for tensor, leaf in zip(inputs, leaves, strict=True)]
        call = partial(_call, self.plain, filled, spec)
        for _ in range(WARM_UPS - 1):
            self.device.warm_up(call)
        form = self._form()  # the first call may have put something into place
        if not self.device.rehearse(call):
            self._refused[kind] = "it waits for the device in the middle of a step, as .item() does"
        elif not form.is_unchanged():
            self._refused[kind] = "each call of it changes the model itself"
        elif versions != [tensor._version for tensor in inputs if tensor is not None]:
            self._refused[kind] = "it writes to its arguments"
        if kind in self._refused:
            raise _Plain(self._refused[kind])
        beside = next((other.graph for other in self.graphs.values()), None)
        try:
            graph, returned, grown = self.device.record(call, beside)
        except Exception as problem:
            # What is raised last only says that the recording had failed before. Another one is not tried: what a
            # broken one leaves behind is not defined.
            first = problem.__context__ or problem
            self._failed = f"recording it failed ({type(first).__name__}: {first_line(first)})"
            self._drop()
            raise _Plain(self._failed) from problem
        self.captures += 1
        outputs, returns = tree_flatten(returned)
        return form, _Graph(graph, inputs, outputs, returns, _arguments(filled, spec), grown)

    def _drop(self, form: _Form | None = None) -> None:
        """Drop the graphs of a form; or all, and the weights that were kept for them."""
        if form is None:
            self._forms = []
        self.graphs = {key: graph for key, graph in self.graphs.items() if form is not None and key[0] is not form}

    def _say(self, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            logger.warning("steps of %s are computed without a CUDA graph: %s", self.name, why)


class _Form:
    """Snapshot of everything that a model's forward reads beside its arguments."""

    def __init__(self, model: nn.Module, place: str) -> None:
        self.modules = [*model.modules()]
        self.device = next(_tensors(model)).device
        self._classes = [*map(type, self.modules)]
        # A processor is no module, and set_attention_backend() writes to it.
        processors = [vars(module).get("processor") for module in self.modules]
        states = [vars(each) for each in processors if hasattr(each, "__dict__") and not isinstance(each, nn.Module)]
        self._attributes = [*map(vars, self.modules[1:]), *states]
        self._aside = _NOTES + (_HOOKS if place == "forward" else ())
        self._kept = [_kept(each, self.device) for each in (self._model_vars(), *self._attributes)]
        self._owners = [*chain.from_iterable((module._parameters, module._buffers) for module in self.modules)]
        self._names = [[*owner] for owner in self._owners]
        self._seen = self._now()
        self._recorded = [None if tensor is None else tensor.data for tensor in self._seen]
        self._lies = _where(self._recorded)

    def is_unchanged(self) -> bool:
        """Tell whether modules, attributes and the addresses of weights are all the same."""
        return self._is_alike() and self._lies_there(self._now())

    def is_present(self) -> bool:
        """Tell whether the model has this form; weights that have moved are taken back to where they lay."""
        if not self._is_alike():
            return False
        now = self._now()
        return self._lies_there(now) or self._taken_back(now)

    def _is_alike(self) -> bool:
        try:
            return self._classes == [*map(type, self.modules)] and self._kept == [
                self._model_vars(),
                *self._attributes,
            ]
        except RuntimeError:  # a tensor stands where a number was, and is neither true nor false
            return False

    def _model_vars(self) -> dict[str, Any]:
        """Return the attributes of the model itself, without those that matter to no graph."""
        return {name: value for name, value in vars(self.modules[0]).items() if name not in self._aside}

    def _now(self) -> list[Tensor | None]:
        return [*chain.from_iterable(map(dict.values, self._owners))]

    def _lies_there(self, now: list[Tensor | None]) -> bool:
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            return False
        return self._lies == _where(now)

    def _taken_back(self, now: list[Tensor | None]) -> bool:
        """Copy weights that have moved back to where they lay, and tell whether that was possible.

        It is possible where all of them have the layout that they had.
        """
        if self._names != [[*owner] for owner in self._owners]:
            return False
        if [tensor is None for tensor in now] != [recorded is None for recorded in self._recorded]:
            return False
        both = zip(now, self._recorded, strict=True)
        pairs = [(tensor, recorded) for tensor, recorded in both if tensor is not None and recorded is not None]
        if any(_layout(tensor) != _layout(recorded) for tensor, recorded in pairs):
            return False
        lie = {(tensor.data_ptr(), recorded.data_ptr()) for tensor, recorded in pairs}
        if len(lie) != len({place for _, place in lie}):
            return False  # what was one tensor in two places is two by now
        moved = [(tensor, recorded) for tensor, recorded in pairs if tensor.data_ptr() != recorded.data_ptr()]
        for tensor, recorded in moved:
            recorded.copy_(tensor)
            tensor.data = recorded
        self._seen = now
        return True


class _Same:
    """Equal to that very object. A tensor on another device, whose value a recording takes for good, also by value."""

    __array_ufunc__ = None  # or an array would compare its elements

    def __init__(self, value: Any, value_matters: bool = False) -> None:
        self.value = value
        self.copy = value.clone() if value_matters else None

    def __eq__(self, other: object) -> bool:
        return other is self.value and (self.copy is None or torch.equal(self.copy, self.value))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def why_not(model: nn.Module) -> str:
    """Return the reason why no graph can stand for a call of this model, with the cure; empty if one can."""
    around = _place(model) == "forward"  # hooks of the model itself then run before and after a graph
    modules = dict(model.named_modules())
    hoisted = [getattr(vars(module).get("forward"), "hoisted", None) for module in modules.values()]
    if any(isinstance(each, HoistedModulation) and each.on for each in hoisted):
        return "its modulation is hoisted, and looking a step up waits for the device: have one or the other"
    kept = why_not_captured(model)
    if kept:
        return kept
    for path, module in modules.items():
        if hasattr(module, "_hf_hook"):
            return (
                "accelerate moves its weights between calls (offloading, or a map of devices): load it without, and "
                "move the pipeline to one GPU"
            )
        for name in getattr(getattr(module, "_diffusers_hook", None), "hooks", ()):
            reasons = (why for start, why in DIFFUSERS_HOOKS.items() if name.startswith(start))
            return next(reasons, f"diffusers' hook {name} decides at each call what to compute: disable_cache() first")
        placed = vars(module).get("forward")
        if path and placed is not None and getattr(placed, "__self__", None) is not module:
            return f"the forward of {path} was replaced, and a graph would not run it: take that out first"
        if (path or not around) and any(vars(module).get(name) for name in _HOOKS):
            return f"{path or 'it'} has a hook, which a graph would not run: remove it first"
        if _compiled_with_graphs(module):
            return "it was compiled with CUDA graphs of its own: use mode='default' or 'max-autotune-no-cudagraphs'"
    tensors = [*_tensors(model)]
    odd = next((tensor for tensor in tensors if is_traceable_wrapper_subclass(tensor)), None)
    if odd is not None:
        return f"it has weights of class {type(odd).__name__}, whose memory cannot be followed"
    places = sorted({str(tensor.device) for tensor in tensors})
    if len(places) != 1:
        return f"its weights lie on {', '.join(places) or 'no device'}: move it to one GPU"
    if tensors[0].device.type != CudaGraphs.kind:
        return f"it is on {places[0]}, and graphs need a CUDA device: pipe.to('cuda') first"
    return ""


def _denoisers(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    parts = {type(pipe).__name__: pipe} if isinstance(pipe, nn.Module) else getattr(pipe, "components", {})
    for name, part in parts.items():
        if isinstance(part, nn.Module) and (part is pipe or name == "unet" or name.startswith("transformer")):
            yield name, part


def _place(model: nn.Module) -> str:
    """Return the attribute that a call of the model runs: `compile()` puts one in front of `forward`."""
    return "forward" if model._compiled_call_impl is None else "_compiled_call_impl"


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _compiled_with_graphs(module: nn.Module) -> bool:
    compiled = (vars(module), getattr(module._compiled_call_impl, "__dict__", {}))
    configs = [attributes["get_compiler_config"]() for attributes in compiled if "get_compiler_config" in attributes]
    return any(config and config.get("triton.cudagraphs") for config in configs)


def _call(plain: Callable[..., Any], leaves: list[Any], spec: TreeSpec) -> Any:
    """Call with new containers: models take things out of dictionaries that they are given."""
    args, kwargs = tree_unflatten(leaves, spec)
    return plain(*args, **kwargs)


def _described(leaf: Any, device: torch.device) -> tuple:
    """Return an argument's part of the kind of a call. Raises _Plain for one that cannot be compared or copied to."""
    if type(leaf) in (Tensor, nn.Parameter):
        if leaf.device != device:
            raise _Plain(f"an argument {(*leaf.shape,)} is on {leaf.device}, the model on {device}: move it there")
        return _layout(leaf)
    if not isinstance(leaf, _VALUES):
        raise _Plain(f"an argument is a {type(leaf).__name__}, which is neither a tensor nor a plain value")
    return type(leaf), leaf


def _layout(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _where(tensors: Sequence[Tensor | None]) -> tuple[list[int], list[torch.Size]]:
    present = [tensor for tensor in tensors if tensor is not None]
    return [tensor.data_ptr() for tensor in present], [tensor.shape for tensor in present]


def _like(tensor: Tensor) -> Tensor:
    """Make an uninitialized tensor with the same strides, since kernels may be chosen by them."""
    with torch.inference_mode(False):  # such tensors can only be written to in that mode
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _fill(inputs: list[Tensor | None], leaves: list[Any]) -> None:
    for tensor, leaf in zip(inputs, leaves, strict=True):
        if tensor is not None:
            _once(tensor).copy_(_once(leaf))


def _once(tensor: Tensor) -> Tensor:
    """View each element of an expanded tensor once."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _kept(value: Any, device: torch.device) -> Any:
    """Copy attributes, or a value of one, for later comparison: containers as they are now, tensors by identity."""
    if isinstance(value, Tensor):
        return _Same(value, value.device != device)
    if isinstance(value, dict):
        return {key: each if key in _UNREAD else _kept(each, device) for key, each in value.items()}
    if isinstance(value, list):
        return [_kept(each, device) for each in value]
    if isinstance(value, tuple):
        return tuple(_kept(each, device) for each in value)
    if isinstance(value, set):
        return set(value)
    by_value = isinstance(value, (*_VALUES, Scheme, Rounding)) or type(value).__eq__ is object.__eq__
    return value if by_value else _Same(value)


def _settings() -> tuple:
    """Return the settings of the process that choose kernels."""
    return _AttentionBackendRegistry.get_active_backend()[0], *(setting() for setting in _SETTINGS)


def _arguments(leaves: Sequence[Any], spec: TreeSpec) -> tuple[str, ...]:
    named, _ = tree_flatten_with_path(tree_unflatten(leaves, spec))
    return tuple(
        f"{keystr(path[1:]).strip('[]').replace(chr(39), '')} {(*leaf.shape,)} {str(leaf.dtype).removeprefix('torch.')}"
        for path, leaf in named
        if isinstance(leaf, Tensor)
    )


_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_NOTES = ("_hf_peft_config_loaded", "peft_config", "lora_scale", "_safe_fusing")  # a loader's own, read by no forward
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Registries that every module has, and that a forward does not read; parameters and buffers are compared by memory.
_UNREAD = frozenset(vars(nn.Module())) - {"training", "_modules", *_HOOKS}
_SETTINGS: tuple[Callable[[], Any], ...] = (
    accumulation,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)

# How a hook's name in diffusers starts -> why no graph can stand for a model that has it. The rest are step caches.
DIFFUSERS_HOOKS = {
    "group_offloading": "group offloading moves its weights between calls: load it without, onto one GPU",
    "lazy_prefetch_group_offloading": "group offloading moves its weights between calls: load it without, onto one GPU",
    "layerwise_casting": "layerwise casting makes each layer's weights anew at every call: load it without",
    "peft_autocast_disable": "layerwise casting makes each layer's weights anew at every call: load it without",
    "cp_": "context parallelism sends tensors between processes in the middle of a step: capture it without",
}
