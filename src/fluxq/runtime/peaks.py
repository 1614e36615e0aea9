"""Most bytes that a whole call of a pipeline takes beside its weights, stage by stage, counted without weights.

A stage is a component while it runs, with what the pipeline's own code does until the next one runs:

    peak[stage] = max over its operations of Σ bytes of the storages alive that are no weights

so embeddings of prompts, latents and the scheduler's tensors count in every stage in which they are alive. One counter
watches a real call, or that of a twin with its weights on the meta device: there an operation on what a weight has
touched makes shapes alone, and all others (on tokens, masks, timesteps, positions) compute values, which code may
branch on. Outputs of a component become zeros for the pipeline.

Attention counts as fused kernels compute it: inputs, output and a number for each query, no matrix of scores. Memory
that a kernel takes for itself is not seen, nor what an allocator loses between pieces.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fluxq.base.console import first_line
from fluxq.runtime.placed import Placed, models_of

_ENTRIES = ("forward", "encode", "decode")  # methods by which pipelines call components
_STEPS = 2  # of a call: from the second on each is like the one before
_TEXT = 512  # tokens of a prompt, where the call does not say; what a tokenizer reads of them counts
_CPU = torch.device("cpu")


def peaks(pipe: Any, call: Mapping[str, Any]) -> dict[str, int]:
    """Return component -> most bytes alive beside weights while it runs, in a call of a pipeline.

    pipe: loaded on the CPU, which then computes, or made by `on_meta`.
    call: arguments of the pipeline; steps beyond the second are left out, and a prompt where it brings embeddings.
    Raises ValueError where the call fails.
    """
    with torch.no_grad(), _CPU, _quiet(), _watched(models_of(pipe)) as alive, _Attention(), alive:
        try:
            length = call.get("max_sequence_length")
            prompt = " ".join(["a"] * (_TEXT if length is None else length))
            prompt = None if call.get("prompt_embeds") is not None else prompt
            usual = inspect.signature(type(pipe).__call__).parameters.get("strength")
            strength = call.get("strength", 1 if usual is None else usual.default) or 1
            strength = strength if isinstance(strength, (int, float)) else 1  # LTX has one for each condition
            steps = math.ceil(_STEPS / min(1, strength))  # those that begin at an image leave out the first ones
            pipe(**{"prompt": prompt, "output_type": "pt", **call, "num_inference_steps": steps})
        except Exception as error:
            given = ", ".join(f"{name}={str(value)[:40]}" for name, value in call.items())
            raise ValueError(
                f"{type(pipe).__name__}: a call with {given or 'its defaults'} cannot be counted "
                f"({type(error).__name__}: {first_line(error)}); give the arguments that it needs"
            ) from error
    return {name: most for name, most in alive.peaks.items() if name}


def on_meta(pipe: Any) -> Any:
    """Return a twin of a pipeline, without weights, for `peaks`; the pipeline stays as and where it is."""
    twin = copy.copy(pipe)
    twin.__class__ = type(type(pipe).__name__, (type(pipe),), {"_execution_device": _CPU, "device": _CPU})
    vars(twin)["scheduler"] = copy.deepcopy(getattr(pipe, "scheduler", None))
    for name, model in models_of(pipe).items():
        instead: dict[int, Any] = {id(buffer): buffer.to(_CPU, copy=True) for buffer in model.buffers()}
        instead |= {id(tensor): _without_values(tensor) for tensor in model.parameters()}
        vars(twin)[name] = copy.deepcopy(model, instead)
    return twin


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


class Alive(TorchDispatchMode):
    """Counter of the bytes of storages that operators make: the most alive at once by stage.

    weights: tensors that do not count.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self.stage = ""
        self._now = 0
        self._weights = [*weights]  # they stay, so that their addresses become nothing else's
        self._known = {tensor.untyped_storage()._cdata for tensor in self._weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = args, kwargs or {}
        if any(isinstance(each, Tensor) and each.is_meta for each in tree_leaves(given)):
            if func is torch.ops.aten._local_scalar_dense.default:
                return 0
            if func._schema.is_mutable and isinstance(args[0], Tensor) and not args[0].is_meta:
                return args[0]  # its values become none that anything depends on
            given = tree_map_only((Tensor, torch.device), _to_meta, given)
        elif torch.device("meta") in given[1].values():
            if func is torch.ops.aten._to_copy.default and given[1].get("dtype", args[0].dtype) == args[0].dtype:
                return args[0]  # as no move is one where weights and all else are on one device
            given = args, given[1] | {"device": _CPU}
        out = func(*given[0], **given[1])
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), self._now)
        return out

    def with_values(self, out: Any) -> Any:
        """Return what a component returned with zeros in place of what has no values, in storages of the same size."""
        zeros: dict[int, Tensor] = {}

        def real(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if not tensor.is_meta:
                return tensor
            if storage._cdata not in zeros:
                zeros[storage._cdata] = torch.zeros(storage.nbytes(), dtype=torch.uint8)
                self._add(zeros[storage._cdata].untyped_storage())
            numbers = zeros[storage._cdata].view(tensor.dtype)
            return numbers.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

        with _disable_current_modes():
            return tree_map_only(Tensor, real, out)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self._now += storage.nbytes()
            weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


def _to_meta(each: Tensor | torch.device) -> Tensor | torch.device:
    return each.to("meta") if isinstance(each, Tensor) else torch.device("meta")


@contextmanager
def _quiet() -> Iterator[None]:
    """Let libraries not warn of the prompt, which CLIP cuts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _watched(models: Mapping[str, nn.Module]) -> Iterator[Alive]:
    """Yield a counter that the models tell when they run."""
    alive = Alive(tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers()))
    entries = [
        _Entry(alive, name, model, entry)
        for name, model in models.items()
        for entry in _ENTRIES
        if callable(getattr(model, entry, None))
    ]
    try:
        yield alive
    finally:
        for entry in reversed(entries):
            entry.remove()


class _Entry(Placed):
    """Method of a component by which the pipeline calls it; inside of that it passes calls on."""

    inside = False

    def __init__(self, alive: Alive, name: str, model: nn.Module, place: str) -> None:
        super().__init__(model, place)
        self.alive, self.name = alive, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _Entry.inside:
            return self.plain(*args, **kwargs)
        self.alive.stage, _Entry.inside = self.name, True
        try:
            return self.alive.with_values(self.plain(*args, **kwargs))
        finally:
            _Entry.inside = False


class _Attention(TorchFunctionMode):
    """Attention of tensors without values as fused kernels lay it out; torch's own has scores for those."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and (*args, *kwargs.values())[0].is_meta:
            return _attended(*args, **kwargs)
        return func(*args, **kwargs)


def _attended(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the output (…, H, L, E) for queries (…, H, L, K), heads side by side in memory."""
    mask = attn_mask.to(query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else None
    sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    *batch, heads, length, _width = query.shape
    out = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-2, -3)
    del mask, sums
    return out
