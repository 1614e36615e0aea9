"""Some denoising steps in 16 bit: `fluxq.keep_steps(pipe)`, and a recipe's `steps`.

An error of the first steps changes the subject of an image, and no later step washes out one of the last steps. In the
steps that are kept a quantized layer computes with its original weight on its input as it comes, and self-attention in
16 bit: the denoiser is then the 16-bit model, bit for bit where that was loaded in the same dtype. With
`components="a16"` the layer multiplies its input, as it comes, with its own codes: the denoiser is then the weight-only
model, bit for bit, and nothing is read or held beside the codes.

The scheduler says which step a call of the denoiser belongs to, so guidance with two calls a step, two denoisers in one
run, image-to-image and step caches need nothing. A step is one of those that users ask for: two evaluations of a
scheduler of second order. Steps count from where the call begins; where a pipeline ends before its schedule does
(`denoising_end`), the last ones are those of the schedule.

A scheduler without `step_index` (DDIM, DDPM) is followed by the timestep of the denoiser's call. That waits for the
device at each call; a pipeline that gives another number, or timesteps that repeat (PNDM), are refused.

Between calls of the denoiser the model is the quantized one, so saving, copying and comparing it know nothing of this.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.base.modules import path_in_file, uncompiled
from fluxq.base.residence import residence_of
from fluxq.kernels.linear import QuantLinear, quant_layers
from fluxq.quantize.checkpoint import PLAN_FILE, SourceWeights
from fluxq.quantize.lora import FusedWeights, recorded_loras, updates_of
from fluxq.quantize.record import read_record
from fluxq.quantize.structure import denoisers_in
from fluxq.recipes.computing import QuantizationConfig, Steps, attention_by
from fluxq.recipes.formats import Scheme
from fluxq.recipes.step_list import StepList
from fluxq.runtime.originals import Held, Originals, Streamed, codes_of, resident
from fluxq.runtime.placed import Handle, is_grouped

Placing = Literal["auto", "resident", "streamed"]
Components = Literal["16bit", "a16"]


def keep_steps(
    pipe: Any,
    *,
    first: int | None = None,
    last: int | None = None,
    components: Components | None = None,
    source: str | Path | None = None,
    weights: Placing = "auto",
) -> KeptSteps:
    """Let a pipeline's quantized denoisers compute some steps of each call in 16 bit.

    Stays until `remove()` of the handle, or the end of its `with` block. Works with adapters, `fluxq.optimize`,
    `fluxq.prepare`, `hoist_modulation`, offloading, and with `fluxq.capture` and torch.compile where weights are
    resident; compile and, where the whole denoiser is compiled, capture first.

    first, last: how many steps; by default those of the checkpoint's recipe.
    components: "16bit" computes them with 16-bit weights, "a16" with the codes and 16-bit activations, for which source
    and weights say nothing; by default as in the checkpoint's recipe, else "16bit".
    source: folder or hub id of the 16-bit model, by default as in `fluxq_plan.json`, which also names fused LoRA files.
    weights: "resident" keeps 16-bit weights of all quantized layers beside their codes, "streamed" reads them block by
    block in each of these steps, "auto" decides by the free memory, and again where the pipeline is moved or offloaded.

    Raises ValueError for a pipeline without scheduler or quantized denoiser, or whose steps are kept already, for a
    scheduler that cannot be followed, for a source that is not the model that was quantized (by its SHA-256, or where
    none is recorded by its weights), and for resident weights of an offloaded model or streamed ones of a captured or
    compiled one.
    """
    denoisers = _quantized_denoisers(pipe)
    if getattr(pipe, "scheduler", None) is None or not denoisers:
        raise ValueError(
            f"keep_steps needs a pipeline with a scheduler and a quantized denoiser, got {type(pipe).__name__}"
        )
    steps = _steps_to_keep(denoisers.values(), first, last, components)
    if steps.components == "a16":
        if source is not None or weights != "auto":
            raise ValueError(
                "steps at 16-bit activations (a16) compute with the checkpoint's own codes and read no 16-bit weights: "
                "leave out source= and weights=, or say components='16bit'"
            )
        return KeptSteps(pipe, steps)
    weights_of, recorded = _sources(pipe, denoisers, source)
    return KeptSteps(pipe, steps, weights_of, recorded, weights)


def require_followed(scheduler: Any) -> None:
    """Raise ValueError for a scheduler without `step_index` whose timesteps repeat or are not known beforehand."""
    if hasattr(scheduler, "step_index"):
        return
    probe = copy.deepcopy(scheduler)
    try:
        probe.set_timesteps(4)
        are_unique = len(probe.timesteps.unique()) == len(probe.timesteps)
    except Exception as problem:  # whatever other kinds of scheduler make of it
        raise _not_followed(scheduler, "it has no schedule of timesteps") from problem
    if not are_unique:
        raise _not_followed(scheduler, "its timesteps repeat")


class KeptSteps(Handle):
    """Handle of what `keep_steps` put into a pipeline; `remove()`, or leaving its `with` block, takes it out.

    steps: that are kept. calls, calls_in_16_bit: of denoisers, since it was put in.
    """

    def __init__(
        self,
        pipe: Any,
        steps: Steps,
        weights_of: Callable[[str], SourceWeights] | None = None,
        recorded: Mapping[str, Mapping[str, int]] | None = None,
        weights: Placing = "auto",
    ) -> None:
        """Switch steps of all quantized denoisers in a pipeline.

        weights_of: component -> its 16-bit weights, which steps at 16-bit activations do not read.
        recorded: component -> layer -> rank that it was quantized with; None if nothing is known of the checkpoint, and
        weights are to be compared with the codes.
        """
        if weights not in ("auto", "resident", "streamed"):
            raise ValueError(f"weights is {weights!r}, expected 'auto', 'resident' or 'streamed'")
        self.steps, self.weights = steps, weights
        self.calls = self.calls_in_16_bit = 0
        follower = Follower(lambda: pipe.scheduler)
        require_followed(pipe.scheduler)
        self._put: list[StepSwitch] = []
        for name, outer in _quantized_denoisers(pipe).items():
            model = uncompiled(outer)
            if any(True for _ in _switches_of(outer)):
                raise ValueError(f"steps of this {type(model).__name__} are kept already: remove() that first")
            originals = None
            if steps.components == "16bit":
                if weights_of is None:
                    raise ValueError("steps in 16 bit need weights_of, from where their weights are read")
                originals = _originals_of(model, weights_of(name), None if recorded is None else recorded.get(name, {}))
            self._put.append(StepSwitch(self, follower, outer, originals))
        for switch in self._put:
            switch.choose()  # what cannot be is refused before anything is put in place
        for switch in self._put:
            switch.place()

    @property
    def placed(self) -> tuple[str, ...]:
        """Of each denoiser, where its 16-bit weights are: "resident" or "streamed"; () where none are read."""
        return tuple("streamed" if each.is_streamed else "resident" for each in self._put if each.originals)

    @property
    def nbytes(self) -> int:
        """Bytes of 16-bit weights that are held now."""
        return sum(switch.store.nbytes for switch in self._put if switch.store)


class StepSwitch:
    """Switch between quantized and 16-bit steps: hooks before and after each call of a denoiser.

    outer: the module that the pipeline calls, in which the model is, where torch.compile has put something around it.
    originals: None for steps at 16-bit activations.
    """

    def __init__(self, kept: KeptSteps, follower: Follower, outer: nn.Module, originals: Originals | None) -> None:
        self.kept, self.follower, self.outer, self.originals = kept, follower, outer, originals
        self.model = uncompiled(outer)
        self.store: Held | None = None
        self._chosen_for: tuple[object, ...] = ()
        self._coded: list[tuple[Any, Any]] = []  # attention processors and their backends
        self._handles: list[Any] = []
        self._compiled: Callable[..., Any] | None = None
        self._on = True

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.store, Streamed)

    def place(self) -> None:
        """Register the hooks, or put a function in front of a compiled call, whose graph would take in the hooks."""
        if self.outer._compiled_call_impl is None:
            before = self.outer.register_forward_pre_hook(self.before, with_kwargs=True)
            self._handles = [before, self.outer.register_forward_hook(self.after, always_call=True)]
        else:
            self._compiled = self.outer._compiled_call_impl
            vars(self.outer)["_compiled_call_impl"] = self

    def remove(self) -> None:
        self._on = False
        for handle in self._handles:
            handle.remove()
        if self._compiled is not None and vars(self.outer).get("_compiled_call_impl") is self:
            vars(self.outer)["_compiled_call_impl"] = self._compiled
        self._leave()
        self._close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of a compiled call."""
        call: Any = self._compiled
        self.before(self.outer, args, kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self._leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepSwitch:
        """Copy it switched off: a copy of the model is quantized at every step."""
        twin = StepSwitch(self.kept, self.follower, self.outer, self.originals)
        twin._on = False
        return twin

    @torch.compiler.disable(reason="which step it is is found out before a graph runs: compile, then fluxq.keep_steps")
    def before(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._on:
            return
        step, total = self.follower.step(self.model, args, kwargs)
        steps = self.kept.steps
        self.kept.calls += 1
        if step >= steps.first and not total - steps.last <= step < total:
            return
        self.kept.calls_in_16_bit += 1
        store = self.choose()
        store.enter()
        self._set_attention()

    @torch.compiler.disable(reason="see before")
    def after(self, *_: Any) -> None:
        if self._on:
            self._leave()

    def choose(self) -> Held:
        """Return the store of the steps' weights; a new one where those in 16 bit were moved or offloaded since.

        Raises ValueError where the weights can be neither resident nor streamed, or not in the way that was asked for.
        """
        if self.originals is None:
            self.store = self.store or codes_of(_layers_of(self.model))
            return self.store
        layers, offloaded = self.originals.layers, _is_offloaded(self.model)
        situation = (offloaded, *(layer.weight.device for layer in layers.values()))
        stays = self.is_streamed and (offloaded or self.kept.weights == "streamed")
        if self.store is not None and (situation == self._chosen_for or stays):
            return self.store
        self._close()
        placing, name = self.kept.weights, type(self.model).__name__
        why_not_streamed = _why_not_streamed(self.outer, self.model)
        if placing == "resident" and offloaded:
            raise ValueError(f"this {name} is offloaded, and resident weights would not be: say weights='streamed'")
        if placing == "streamed" and why_not_streamed:
            raise ValueError(f"16-bit weights of this {name} cannot be streamed: {why_not_streamed}")
        fits = not offloaded and (placing == "resident" or (placing == "auto" and self.originals.fits()))
        if not fits and why_not_streamed:
            raise ValueError(
                f"16-bit weights of this {name} have no room beside the codes, and cannot be streamed: "
                f"{why_not_streamed}"
            )
        self._chosen_for = situation
        self.store = resident(self.originals) if fits else Streamed(self.originals)
        if placing == "auto":
            logger.info("16-bit weights of this %s are %s", name, "streamed" if self.is_streamed else "resident")
        return self.store

    def _set_attention(self) -> None:
        """Compute self-attention in 16 bit meanwhile, where it is in fp8 or int8."""
        from fluxq.runtime.attention_choice import backend_of  # which few checkpoints need

        processors = (getattr(module, "processor", None) for module in self.model.modules())
        self._coded = [(each, each._attention_backend) for each in processors if each and attention_by(each)]
        for processor, _ in self._coded:
            processor._attention_backend = backend_of("16bit")

    def _close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _leave(self) -> None:
        if self.store is not None:
            self.store.leave()
        for processor, backend in self._coded:
            processor._attention_backend = backend
        self._coded = []


class Follower:
    """Counter of a call's steps, which asks the scheduler; users may exchange that at any time.

    schedule: timesteps of the present call; every call of a pipeline makes new ones.
    begin: index of the call's first evaluation, once it is known.
    """

    def __init__(self, scheduler: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self.schedule: Tensor | None = None
        self.begin: int | None = None
        self._is_first = False
        self._before_first: list[Any] = []  # timesteps of calls before the scheduler's first step

    def step(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
        """Return (step, steps) of this call of a denoiser, counted from where the pipeline's call began."""
        scheduler = self._scheduler()
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None:
            raise _not_followed(scheduler, "it has no schedule of timesteps")
        if timesteps is not self.schedule:
            self.schedule, self.begin, self._is_first, self._before_first = timesteps, None, False, []
        if hasattr(scheduler, "step_index"):
            index = self._index(scheduler)
            if scheduler.step_index is None:
                self._require_one_step(model, timestep_of(model, args, kwargs))
        else:
            index = self._position(scheduler, timesteps, first_timestep(timestep_of(model, args, kwargs)))
        if self.begin is None:
            self.begin = index
        order = getattr(scheduler, "order", 1)
        evaluations = len(timesteps) - self.begin - _BEHIND_THE_LAST.get(type(scheduler).__name__, 0)
        return (index - self.begin) // order, -(-evaluations // order)

    def _index(self, scheduler: Any) -> int:
        """Return the index of the evaluation; at the first one a scheduler knows at most the index where to begin."""
        index, begin = scheduler.step_index, getattr(scheduler, "begin_index", None)
        if index is None:
            self._is_first = True
            return begin or 0
        if begin is not None:
            self.begin = begin
        elif self._is_first:
            self.begin = index - 1
        self._is_first = False
        return index

    def _require_one_step(self, model: nn.Module, timestep: Any) -> None:
        """Raise ValueError where calls are of several steps though the scheduler, another pipeline's, makes none.

        One step may have two timesteps: what is read into a cache for all of them may have one of its own.
        """
        self._before_first.append(timestep)
        if len(self._before_first) > 2 and len({first_timestep(each) for each in self._before_first}) > 2:
            raise ValueError(
                f"this {type(model).__name__} is called at several timesteps, and the scheduler that says which step "
                "it is makes none: give other pipelines of it that scheduler, or remove() what follows its steps"
            )

    def _position(self, scheduler: Any, timesteps: Tensor, timestep: float) -> int:
        indices = (timesteps == timestep).nonzero().flatten().tolist()
        if len(indices) != 1:
            unknown = f"the denoiser is given {timestep:g}, which is none of its timesteps"
            raise _not_followed(scheduler, "its timesteps repeat" if indices else unknown)
        return indices[0]


def timestep_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the timestep that a denoiser is called with, or its timesteps."""
    arguments = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
    timestep = next((arguments[name] for name in ("timestep", "timesteps", "t") if name in arguments), None)
    if timestep is None:
        raise ValueError(f"this {type(model).__name__} is called without a timestep, so its steps cannot be followed")
    return timestep


def first_timestep(timestep: Any) -> float:
    """Return the first of a call's timesteps as a number, for which a GPU is waited for."""
    return float(timestep.flatten()[0]) if isinstance(timestep, Tensor) else float(timestep)


def _not_followed(scheduler: Any, why: str) -> ValueError:
    return ValueError(
        f"the steps of a {type(scheduler).__name__} cannot be followed: it does not say at which it is, and {why}; "
        "take one that has `step_index`, as DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)"
    )


# --- the pipeline


def _quantized_denoisers(pipe: Any) -> dict[str, nn.Module]:
    """Return component -> module that the pipeline calls, of quantized models that run at every step."""
    return {name: outer for name, outer in denoisers_in(pipe) if quant_layers(outer)}


def _layers_of(model: nn.Module) -> dict[str, QuantLinear]:
    """Return every QuantLinear by its path in the files, without modules of adapters and torch.compile around it."""
    return {path_in_file(path): layer for path, layer in quant_layers(model)}


def _originals_of(model: nn.Module, source: SourceWeights, recorded: Mapping[str, int] | None) -> Originals:
    """Return the reader of a model's 16-bit weights.

    recorded: layer -> rank that it was quantized with; None if nothing is known, and weights are to be like the codes.
    """
    layers = _layers_of(model)
    ranks = {path: (recorded or {}).get(path, _own_rank(model, path, layer)) for path, layer in layers.items()}
    originals = Originals(layers, source, ranks)
    if recorded is None:
        originals.require_alike()
    return originals


def _own_rank(model: nn.Module, path: str, layer: QuantLinear) -> int:
    """Return the ranks of a layer's branch without adapters that are fused now."""
    return layer.stored_scheme.rank - sum(getattr(model.get_submodule(path), "merged_ranks", ()))


def _steps_to_keep(
    models: Iterable[nn.Module], first: int | None, last: int | None, components: Components | None
) -> Steps:
    """Return the steps that were asked for, else those of the checkpoint."""
    all_recorded = [recorded_steps(model) for model in models]
    if components is None:
        kinds: set[Components] = {each.components for each in all_recorded if each}
        components = kinds.pop() if len(kinds) == 1 else "16bit"
    recorded = all_recorded[0] if all_recorded.count(all_recorded[0]) == len(all_recorded) else None
    if recorded is None and first is None and last is None:
        raise ValueError(
            "this checkpoint's recipe keeps no steps in 16 bit: say how many, as in fluxq.keep_steps(pipe, first=1)"
            if not any(all_recorded)
            else "the pipeline's denoisers are of recipes that keep other steps: say first= and last="
        )
    defaults = (recorded.first, recorded.last) if recorded else (0, 0)
    first, last = defaults[0] if first is None else first, defaults[1] if last is None else last
    return Steps(first=first, last=last, components=components)


def keep_recorded_steps(pipe: Any, source: str | None = None) -> KeptSteps | None:
    """Call `keep_steps` as the pipeline's checkpoint says; None where it says nothing."""
    recorded = [steps for outer in _quantized_denoisers(pipe).values() if (steps := recorded_steps(outer))]
    if not recorded:
        return None
    return keep_steps(pipe, source=source if any(steps.components == "16bit" for steps in recorded) else None)


@contextmanager
def about_to_keep() -> Iterator[None]:
    """Load models without a hint to keep or skip their steps: the caller will."""
    token = _ABOUT_TO_KEEP.set(True)
    try:
        yield
    finally:
        _ABOUT_TO_KEEP.reset(token)


def tell(steps: Steps | None, lists: Collection[StepList]) -> None:
    """Log, once, how to keep and to skip steps of a model that was loaded: it does not know its pipeline."""
    if _ABOUT_TO_KEEP.get():
        return
    if steps is not None:
        _tell_once(
            f"this checkpoint's recipe keeps {steps} of every call {steps.how}, which takes `fluxq.keep_steps(pipe)` "
            "once the pipeline is loaded; without it they are quantized as the others are"
        )
    for each in lists:
        _tell_once(
            f"this checkpoint has a list of steps ({each}), which takes `fluxq.skip_steps(pipe)` once the pipeline is "
            "loaded; without it every step is computed"
        )


@functools.cache
def _tell_once(hint: str) -> None:
    logger.warning(hint)


def recorded_steps(model: Any) -> Steps | None:
    """Return the steps that a model's checkpoint keeps."""
    stored = recorded_in(model)
    return stored.steps if stored else None


def recorded_in(model: Any) -> QuantizationConfig | None:
    """Return what a model's checkpoint says of it; None for a model that fluxq did not quantize."""
    config = getattr(getattr(uncompiled(model), "config", None), "quantization_config", None)
    return getattr(config, "stored", None)


def _is_offloaded(model: nn.Module) -> bool:
    """Tell whether anything moves a model's weights between calls."""
    if residence_of(model) is not None or is_grouped(model):
        return True
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if type(each).__name__ == "CpuOffload" or getattr(each, "offload", False):
                return True
    return False


def _why_not_streamed(outer: nn.Module, model: nn.Module) -> str:
    """Return the reason why a model's weights have to stay where they are, with the cure; empty if they need not."""
    if is_captured(outer) or is_captured(model):
        return "its step is captured, and a graph reads where weights lay: weights='resident', or remove() the capture"
    if outer is not model or any(module._compiled_call_impl is not None for module in model.modules()):
        return "it is compiled, and a graph does not wait for files: weights='resident', or leave it uncompiled"
    return ""


def is_captured(model: nn.Module) -> bool:
    """Tell whether a denoiser's step is replayed: graphs.py puts its own call in the place of the model's."""
    placed = (vars(model).get(name) for name in ("forward", "_compiled_call_impl"))
    return any(getattr(call, "is_replayed", False) for call in placed)


def _switches_of(outer: nn.Module) -> Iterator[StepSwitch]:
    """Yield the switches in place before a denoiser's calls."""
    placed = [getattr(hook, "__self__", None) for hook in outer._forward_pre_hooks.values()]
    call = vars(outer).get("_compiled_call_impl")
    placed += [call, getattr(call, "plain", None)]  # a list of steps stands before it
    yield from (each for each in placed if isinstance(each, StepSwitch) and each._on)


def kept_steps_of(outer: nn.Module) -> Steps | None:
    """Return the steps that are kept of a denoiser, as its pipeline calls it, by now."""
    return next((switch.kept.steps for switch in _switches_of(outer)), None)


def why_not_captured(model: nn.Module) -> str:
    """Return the reason why a denoiser's kept steps rule out capturing it now, with the cure; empty if they do not."""
    switches = [*_switches_of(model)]
    if any(switch.is_streamed for switch in switches):
        return "its steps in 16 bit read weights that are streamed: fluxq.keep_steps(pipe, weights='resident')"
    if switches and model._compiled_call_impl is not None:
        return (
            "steps of it are kept in 16 bit, which is decided before each call, and a graph would be in front of that: "
            "remove() that, capture, and keep steps again"
        )
    return ""


# --- the 16-bit model


def _sources(
    pipe: Any, denoisers: Mapping[str, nn.Module], source: str | Path | None
) -> tuple[Callable[[str], SourceWeights], dict[str, dict[str, int]] | None]:
    """Return (component -> its 16-bit weights; component -> layer -> rank, or None if nothing is recorded).

    The source is compared with the recorded digests, if there are any.
    """
    homes = list(_homes(pipe, map(uncompiled, denoisers.values())))
    home = next((folder for folder in homes if (folder / PLAN_FILE).is_file()), None)
    record = read_record(home) if home else None
    if source is not None:
        folder = resolve_model(str(source))
    elif record is not None and record.model.source:
        folder = resolve_model(record.model.source, revision=record.model.revision)
    else:  # quantized while it was loaded: from there
        origin = next((folder for folder in homes if all(_is_16_bit(folder, name) for name in denoisers)), None)
        if origin is None:
            raise ValueError(
                f"what 16-bit model this {type(pipe).__name__} was quantized from is not known, because it was not "
                f"loaded from a folder with a {PLAN_FILE} that says so: name that model's folder or hub id as source="
            )
        folder = resolve_model(str(origin))
    for name in denoisers:
        if "quantization_config" in folder.config(name):
            raise ValueError(f"{folder.path / name} is quantized itself; name the 16-bit model as source=")
    if record is None:
        return lambda name: SourceWeights(folder, name), None
    digests = record.model.digests
    for name in denoisers if digests or record.imported is None else ():  # none where there was no base
        digest, wanted = folder.digest(name), digests.get(name)
        if digest != wanted:
            raise ValueError(
                f"{folder.name}: its {name} is not what this checkpoint was made from (SHA-256 {digest[:16]}…, "
                f"recorded is {str(wanted)[:16]}…); name the model that was as source="
            )
    updates = updates_of(recorded_loras(record.loras), folder)
    ranks = {
        part.component: {layer.name: Scheme.parse(layer.scheme).rank for layer in part.quantized}
        for part in record.components
    }

    def weights_of(name: str) -> SourceWeights:
        return FusedWeights(folder, name, updates[name]) if name in updates else SourceWeights(folder, name)

    return weights_of, ranks


def _homes(pipe: Any, models: Iterable[nn.Module]) -> Iterator[Path]:
    """Yield folders that a pipeline may have been loaded from, its own before those around its models."""
    for part in (pipe, *models):
        name = str(getattr(getattr(part, "config", None), "_name_or_path", "") or "")
        if not name:
            continue
        if Path(name).is_dir():
            yield from (Path(name), Path(name).resolve().parent)
        elif part is pipe:
            yield from _hub_home(name)


def _hub_home(repository: str) -> Iterator[Path]:
    """Yield the folder in the hub's cache with a repository's plan file, which diffusers does not download."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield Path(hf_hub_download(repository, PLAN_FILE)).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return


def _is_16_bit(folder: Path, component: str) -> bool:
    model = ModelFolder(folder.name, folder)
    has_files = (folder / "model_index.json").is_file() and (folder / component / "config.json").is_file()
    return has_files and "quantization_config" not in model.config(component)


# Timesteps that a schedule has behind that of the last step.
_BEHIND_THE_LAST = {"SCMScheduler": 1}
_ABOUT_TO_KEEP = ContextVar("about to keep", default=False)
