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

Two things that depend on values are decided by the host, from a yes or no that the graph writes early in the step, so
that the host reads it while the device computes the rest:

    has_row   with modulation hoisted (modulation.py), whether the tables have this step's rows. If not they are made,
              and the step is replayed anew.
    suffices  with a first block cache (first_block.py), whether the last computed step is near enough. That graph is
              first, and short; if the answer is no the graph that computes all blocks is replayed after it.

Where no graph can stand for a call the model computes plainly, and the log says once why. Addresses that a graph reads
are given to nothing else as long as the graph is kept. Graphs of one denoiser share the memory of what lies between, so
what the next call reads is copied out of it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from fluxq.base.console import first_line, logger
from fluxq.kernels.quantize_activation.op import Rounding
from fluxq.quantize.structure import denoisers_in
from fluxq.recipes.formats import Scheme
from fluxq.runtime.block_plans import attributes_of, kernel_settings
from fluxq.runtime.first_block import FirstBlock, first_block_of
from fluxq.runtime.modulation import Choice, HoistedModulation, Rows, hoisted_in
from fluxq.runtime.placed import Handle, Placed, diffusers_hooks
from fluxq.runtime.skipped import place_of, skipped_in
from fluxq.runtime.steps import is_captured, why_not_captured

WARM_UPS = 3


def capture(pipe: Any, *, max_graphs: int = 4) -> CapturedSteps:
    """Let a pipeline's denoiser, or a denoiser by itself, replay its step as a CUDA graph.

    Stays until `remove()` of what is returned, or the end of its `with` block. A graph is recorded when a call of its
    kind first comes: another size, batch, attention processor, or set of adapters is another kind, other values in the
    same tensors are not. Compile, optimize, prepare and quantize first. One call at a time, as pipelines are.

    max_graphs: that each denoiser may keep; the least recently used one goes. Each holds its intermediate tensors'
    memory, which graphs of one denoiser share. With a first block cache a graph is two: one for each decision.

    Raises ValueError for a model whose weights move between calls (offloading), that is not on one CUDA device, that
    decides at each call what to compute (a step cache other than the first block's), that is hooked, context parallel
    or captured already, and for one compiled with CUDA graphs.
    """
    if max_graphs < 1:
        raise ValueError(f"max_graphs is {max_graphs}, expected at least 1")
    require_capturable(pipe)
    steps = [_Step(name, model, max_graphs) for name, model in _denoisers(pipe)]
    return CapturedSteps(steps)


def require_capturable(pipe: Any) -> None:
    """Raise ValueError for what `capture` refuses; what `optimize` captured counts as taken out, as it does first."""
    denoisers = dict(_denoisers(pipe))
    if not denoisers:
        raise ValueError(f"{type(pipe).__name__} has no transformer, and nothing else whose step could be captured")
    for model in denoisers.values():
        step = step_of(model)
        if is_captured(model) and not (step and step.by_optimize):
            raise ValueError(f"the step of this {type(model).__name__} is captured already: remove() that first")
        why = why_not(model)
        if why:
            raise ValueError(f"the step of this {type(model).__name__} cannot be a CUDA graph: {why}")


@dataclass(frozen=True)
class CapturedStep:
    """A graph that is kept.

    model: name of the denoiser.
    arguments: its tensor arguments, with shape and dtype.
    bytes: memory that recording it took.
    from_cache: whether it adds what the last computed step did, instead of computing.
    """

    model: str
    arguments: tuple[str, ...]
    replays: int
    bytes: int | None
    from_cache: bool = False


class CapturedSteps(Handle):
    """Handle of what `capture` put into a pipeline; `remove()`, or leaving its `with` block, takes it out."""

    def __init__(self, steps: list[_Step]) -> None:
        self._put = steps

    @property
    def captured(self) -> tuple[CapturedStep, ...]:
        """The graphs that are kept, the least recently used first."""
        return tuple(
            CapturedStep(step.name, graph.arguments, each.replays, each.bytes, each is graph.from_cache)
            for step in self._put
            for graph in step.graphs.values()
            for each in (graph, graph.from_cache)
            if each is not None
        )

    def tie_to_optimize(self) -> None:
        """Let `fluxq.restore` take it out, as what `fluxq.optimize` did."""
        for step in self._put:
            step.by_optimize = True

    @property
    def captures(self) -> int:
        """Number of graphs recorded so far, those included that are gone."""
        return sum(step.captures for step in self._put)


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

    def answer(self) -> Answer:
        """Make an answer for a graph to write."""
        with torch.cuda.device(self.device):
            return Answer(self.device)


class Answer:
    """A yes or no that a graph writes, and that the host reads as soon as it is written."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.inference_mode(False):  # or it could only be written to in that mode
            self._value = torch.empty(1, dtype=torch.int8, device="cpu", pin_memory=True)
        self._written = torch.cuda.Event(external=True)  # which a graph records behind it, at each replay

    def write(self, yes: Tensor) -> None:
        """Write the answer, a bool (); to be recorded."""
        self._value.copy_(yes.to(torch.int8).view(1), non_blocking=True)
        self._written.record()

    def expect(self) -> None:
        """Forget the answer of the replay before."""
        self._value.fill_(_NOT_YET)

    def read(self) -> bool:
        """Wait until the replay has written the answer, and return it."""
        self._written.synchronize()
        if int(self._value) == _NOT_YET:  # should the event be that of a replay before
            torch.cuda.synchronize(self._device)
        return int(self._value) == 1


class _Plain(Exception):
    """Reason why a call is computed without a graph."""


@dataclass
class _Graph:
    """A recorded call.

    inputs: its tensor arguments, None in the place of others.
    outputs: its flat outputs.
    returns: their structure.
    has_row: whether `rows`, of hoisted modulation, had this step's; None where it is not looked up.
    suffices: whether the last computed step stands for this one; None in a graph that computes.
    kept: what steps that are taken from a cache read of this one.
    from_cache: the graph of such steps.
    """

    graph: Any
    inputs: list[Tensor | None]
    outputs: list[Any]
    returns: TreeSpec
    arguments: tuple[str, ...]
    bytes: int | None
    rows: Rows | None = None
    has_row: Answer | None = None
    suffices: Answer | None = None
    kept: list[Tensor] = field(default_factory=list)
    from_cache: _Graph | None = None
    replays: int = 0


class _Step(Placed):
    """Callable that stands in the place of a denoiser's forward."""

    def __init__(self, name: str, model: nn.Module, max_graphs: int) -> None:
        self.name, self.max_graphs = name, max_graphs
        self.device = CudaGraphs(next(_tensors(model)).device)
        self.graphs: dict[tuple[_Form, tuple], _Graph] = {}
        self.captures = 0
        self.by_optimize = False  # then fluxq.restore takes it out
        self._on = True
        self._failed = ""
        self._not_looked_up: object = self  # the scheduler's timesteps for which there are no rows of modulation
        self._refused: dict[tuple, str] = {}
        self._forms: list[_Form] = []
        self._logged: set[str] = set()
        super().__init__(model, place_of(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._on or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        try:
            recording = self._find(leaves, spec)
            outputs = self._replayed(recording, leaves)
            if outputs is None:  # another prompt's rows, or a timestep that is none of the scheduler's
                recording = self._find(leaves, spec, were_found=False)
                outputs = self._replayed(recording, leaves)
            if outputs is None:
                raise _Plain("the rows of its modulation change between two calls with the same arguments")
        except _Plain as why:
            self._say(str(why))
            recording = outputs = None
        if recording is None or outputs is None:
            return self.plain(*args, **kwargs)
        return tree_unflatten(outputs, recording.returns)

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

    def _replayed(self, recording: _Graph, leaves: list[Any]) -> list[Any] | None:
        """Replay a call, and copy its flat outputs; None where its modulation's rows were not found."""
        _fill(recording.inputs, leaves)
        cache = self._forms[-1].cache
        if recording.from_cache is not None and cache is not None and cache.holds(recording.kept):
            has_row, suffices = self._launch(recording.from_cache)
            if not has_row:
                return None
            if suffices:
                return _cloned(recording.from_cache.outputs)
        has_row, _ = self._launch(recording)
        if not has_row:
            return None
        if cache is not None:
            cache.put(recording.kept)
        return _cloned(recording.outputs)

    def _launch(self, graph: _Graph) -> list[bool]:
        """Launch a graph; return whether it found what it looked up and whether it suffices, while it computes on."""
        answers = graph.has_row, graph.suffices
        for answer in answers:
            if answer is not None:
                answer.expect()
        self.device.replay(graph.graph)
        graph.replays += 1
        return [answer is None or answer.read() for answer in answers]

    def _find(self, leaves: list[Any], spec: TreeSpec, were_found: bool = True) -> _Graph:
        """Return the graph for a call, recorded now if there is none. Raises _Plain if there can be none.

        were_found: False after its graph found no rows of modulation; it gets them now, or is one that needs none.
        """
        if self._failed:
            raise _Plain(self._failed)
        if torch.is_grad_enabled():
            raise _Plain("gradients are on: call it under torch.no_grad()")
        if torch.is_autocast_enabled(self.device.kind):
            raise _Plain("autocast casts weights for a while, which a graph would outlive: load it in that dtype")
        form = self._form()
        hoisted, cache = form.hoisted, form.cache
        looks_up = hoisted is not None and hoisted.schedule is not self._not_looked_up
        described = tuple(_described(leaf, form.device) for leaf in leaves)
        kind = (spec, described, kernel_settings(), looks_up, _context_of(cache))
        if kind in self._refused:
            raise _Plain(self._refused[kind])
        recording, rows = self.graphs.pop((form, kind), None), None
        if hoisted is not None and looks_up:
            rows = recording.rows if recording else None
            if rows is None or not were_found or not rows.are_current:
                rows = hoisted.rows_of(partial(_call, self.plain, leaves, spec), rows)
            if rows is None:
                self._not_looked_up = hoisted.schedule
                return self._find(leaves, spec)
            if recording is not None and rows is not recording.rows:
                recording = None
        if recording is None:
            form, recording = self._record(form, leaves, spec, kind, rows)
        elif cache is not None and recording.from_cache is None and cache.holds(recording.kept):
            _, recording.from_cache = self._record(form, leaves, spec, kind, rows, recording)
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

    def _record(
        self,
        form: _Form,
        leaves: list[Any],
        spec: TreeSpec,
        kind: tuple,
        rows: Rows | None,
        computed: _Graph | None = None,
    ) -> tuple[_Form, _Graph]:
        """Record a call; return the model's form then, and the graph.

        rows: to look its modulation up in, or None. computed: where a step cache stands for all blocks, the graph of
        the call that computes them.
        """
        while len(self.graphs) >= self.max_graphs:
            del self.graphs[next(iter(self.graphs))]
        inputs = computed.inputs if computed else [_like(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        _fill(inputs, leaves)
        versions = [tensor._version for tensor in inputs if tensor is not None]
        filled = [leaf if tensor is None else tensor for tensor, leaf in zip(inputs, leaves, strict=True)]
        call = partial(_call, self.plain, filled, spec)
        has_row = self.device.answer() if rows else None
        suffices = self.device.answer() if computed else None
        cache, kept = form.cache, []
        with ExitStack() as decided:
            if form.hoisted is not None:
                decided.enter_context(form.hoisted.choosing(_choice(rows, has_row)))
            if cache is not None:
                decided.enter_context(cache.deciding(_decision(cache, suffices)))
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
            if cache is not None and computed is None:
                kept = [_like(tensor) for tensor in cache.read()]
                call = partial(_keep, call, cache, kept)
            beside = next((other.graph for other in (computed, *self.graphs.values()) if other), None)
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
        arguments = _arguments(filled, spec)
        return form, _Graph(graph, inputs, outputs, returns, arguments, grown, rows, has_row, suffices, kept)

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
        self.hoisted = hoisted_in(self.modules)
        self.cache = first_block_of(model)
        self._classes = [*map(type, self.modules)]
        self._attributes = attributes_of(self.modules)[1:]  # the model's own first ones are `_model_vars`
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
    around = place_of(model) == "forward"  # hooks of the model itself then run before and after a graph
    modules = dict(model.named_modules())
    hoisted, cache = hoisted_in(modules.values()), first_block_of(model)
    if hoisted is not None and hoisted.offload:
        return "the weights of its modulation were hoisted to the CPU: hoist_modulation(pipe, offload=False)"
    if cache is not None and any(module._compiled_call_impl is not None for module in modules.values()):
        return "it is compiled, and a step cache decides in the middle of a step: disable_cache(), or do not compile it"
    skipped = skipped_in(model)
    if skipped and not isinstance(skipped.plain, _Step):
        return "steps of it are skipped, and a graph would be in front of that: remove() that, capture, and skip again"
    kept = why_not_captured(model)
    if kept:
        return kept
    for path, module in modules.items():
        if hasattr(module, "_hf_hook"):
            return (
                "accelerate moves its weights between calls (offloading, or a map of devices): load it without, and "
                "move the pipeline to one GPU"
            )
        names = diffusers_hooks(module)
        for name in names:
            reasons = (why for start, why in DIFFUSERS_HOOKS.items() if name.startswith(start))
            why = next(
                reasons,
                f"diffusers' hook {name} decides at each call what to compute: disable_cache(), "
                "or enable FirstBlockCacheConfig, whose decisions have graphs",
            )
            if why:
                return why
        if path and not names and not _is_own(module):
            return f"the forward of {path} was replaced, and a graph would not run it: take that out first"
        if (path or not around) and any(_strangers(module)):
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


def step_of(model: nn.Module) -> _Step | None:
    """Return what stands in the place of a denoiser's forward, if its step is captured."""
    skipped = skipped_in(model)
    placed = skipped.plain if skipped else vars(model).get(place_of(model))
    return placed if isinstance(placed, _Step) and placed.is_replayed else None


def _is_own(module: nn.Module) -> bool:
    """Tell whether a module's forward is its own, or what hoists its modulation in the place of that."""
    placed = vars(module).get("forward")
    if isinstance(placed, Placed) and isinstance(getattr(placed, "hoisted", None), HoistedModulation):
        placed = placed.plain
    return placed is None or getattr(placed, "__self__", None) is module


def _strangers(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module, without what hoists modulation."""
    hooks = chain.from_iterable((vars(module).get(name) or {}).values() for name in _HOOKS)
    return (hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), HoistedModulation))


def _choice(rows: Rows | None, has_row: Answer | None) -> Choice:
    """Return the function that chooses the step of modulation while a call is recorded."""
    if rows is None or has_row is None:
        return lambda *_: None
    return lambda _args, _kwargs, temb: rows.step(temb, has_row.write)


def _decision(cache: FirstBlock, suffices: Answer | None) -> Callable[[Tensor], bool]:
    """Return the function that decides for a step cache while a call is recorded."""

    if suffices is None:
        return lambda added: True

    def take(added: Tensor) -> bool:
        suffices.write(cache.suffices(added))
        return False

    return take


def _keep(call: Callable[[], Any], cache: FirstBlock, kept: list[Tensor]) -> Any:
    """Call, and copy what later steps read of it to where no other graph writes."""
    outputs = call()
    for mine, made in zip(kept, cache.read(), strict=True):
        mine.copy_(made)
    return outputs


def _context_of(cache: FirstBlock | None) -> tuple:
    """Return a step cache's part of the kind of a call. Raises _Plain outside of a context, where diffusers refuses."""
    try:
        return cache.kind if cache else ()
    except ValueError as problem:
        raise _Plain(first_line(problem)) from problem


def _denoisers(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    yield from [(type(pipe).__name__, pipe)] if isinstance(pipe, nn.Module) else denoisers_in(pipe)


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


def _cloned(outputs: list[Any]) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in outputs]


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


def _arguments(leaves: Sequence[Any], spec: TreeSpec) -> tuple[str, ...]:
    named, _ = tree_flatten_with_path(tree_unflatten(leaves, spec))
    return tuple(
        f"{keystr(path[1:]).strip('[]').replace(chr(39), '')} {(*leaf.shape,)} {str(leaf.dtype).removeprefix('torch.')}"
        for path, leaf in named
        if isinstance(leaf, Tensor)
    )


_NOT_YET = -1
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_NOTES = ("_hf_peft_config_loaded", "peft_config", "lora_scale", "_safe_fusing")  # a loader's own, read by no forward
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Registries that every module has, and that a forward does not read; parameters and buffers are compared by memory.
_UNREAD = frozenset(vars(nn.Module())) - {"training", "_modules", *_HOOKS}

# How a hook's name in diffusers starts -> why no graph can stand for a model that has it, or empty. The rest are step
# caches whose decisions are not known.
DIFFUSERS_HOOKS = {
    "fbc_": "",
    "group_offloading": "group offloading moves its weights between calls: load it without, onto one GPU",
    "lazy_prefetch_group_offloading": "group offloading moves its weights between calls: load it without, onto one GPU",
    "layerwise_casting": "layerwise casting makes each layer's weights anew at every call: load it without",
    "peft_autocast_disable": "layerwise casting makes each layer's weights anew at every call: load it without",
    "cp_": "context parallelism sends tensors between processes in the middle of a step: capture it without",
}
