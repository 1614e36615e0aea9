"""Times of a quantized pipeline beside the 16-bit one, stage by stage, and the memory and energy that it needs.

    speed-up = mean over rounds of (16-bit time / quantized time), with an interval over rounds

All sides and modes that are compared lie on the device at once and run in turns, in a rotating order, so that whatever
slows the machine for a while slows all of them; sides that do not fit together change places with the CPU's memory
between turns. Warm-up and compiling are not timed. A speed-up is over the fastest mode of the unquantized side, and is
refused where either spread (interquartile range over median) is above SPREAD or the GPU lowered its clocks for heat or
a hardware slowdown. At the power limit is where large matrix products usually run: that is only noted.

On a CPU fp32 is timed beside 16 bit: without instructions for bf16 it may be several times as fast. A speed-up is over
the faster of both there; over fp32, with 16 bit beside it, where the CPU multiplies bf16 by itself.

Sides are opened in reverse order, the 16-bit one last: what only the first one pays (libraries that start up) is not
counted in the quantized one's favour; classes are imported before. Files may come from the operating system's cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fluxq.base.console import first_line, progress
from fluxq.base.devices import instructions
from fluxq.base.model import ModelFolder
from fluxq.calibrate.capture import frames_argument, run_pipeline
from fluxq.eval.images.denoiser import denoisers, hooked, prediction, with_prediction
from fluxq.eval.images.generate import pictures
from fluxq.eval.images.protocols import items_of
from fluxq.eval.metrics.figures import plain_shape
from fluxq.eval.metrics.schema import SPREAD, Card, Estimate, Served, Speed, SpeedRow, Speedup, Times
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.eval.speed.machine import POWER_LIMIT, Machine, machine_of
from fluxq.eval.speed.served import model_bytes, served
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.structure import attention_of, convolutions_of, model_family, shapes_of
from fluxq.recipes.cards import CONTEXT, GIB
from fluxq.recipes.cost import forward_pass, steps
from fluxq.recipes.devices import DEVICES, Device, Efficiency
from fluxq.recipes.plan import Plan, make_plan
from fluxq.recipes.recipe import load_recipe
from fluxq.recipes.workloads import CallSize
from fluxq.runtime.graphs import capture
from fluxq.runtime.placed import Placed
from fluxq.runtime.skip import skip_recorded_steps

CARDS = (8, 12, 16, 24)  # GB
_VARIANTS = frozenset("pcie nvl laptop mobile max ti super d xt xtx gre".split())  # after a name: another card
_OUT_OF_MEMORY = "out of memory"
_GRAPHS_STAY = "the sides change places on the device, and captured graphs keep their weights there"
_ALLOCATORS_SAY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # of PyTorch on a CPU, and of cuBLAS
LENGTH = "max_sequence_length"  # the argument of pipelines
TEXT, STEP, VAE, WHOLE = "text encoders", "denoiser step", "VAE", "end to end"


@dataclass(frozen=True)
class Timing:
    """Settings to time, and numbers of rounds.

    modes: keys of MODES.
    batches: numbers of images in a call.
    sizes: (height, width) in pixels, of videos with frames too; none for the pipeline's own.
    lengths: of the text, in tokens (`max_sequence_length`); none for the pipeline's own.
    warmup, rounds: at least 1 that is not timed, and 3 that are, to know how much they spread.
    """

    modes: Sequence[str] = ("eager",)
    batches: Sequence[int] = (1,)
    sizes: Sequence[tuple[int, ...]] = ()
    lengths: Sequence[int] = ()
    warmup: int = 2
    rounds: int = 10


def measure_speed(
    sides: Sequence[Any],
    prompts: Sequence[str],
    call: Mapping[str, Any],
    timing: Timing = Timing(),
    *,
    device: str = "cpu",
    machine: Machine | None = None,
    references: int = 1,
) -> Speed:
    """Time the unquantized sides, of which the 16-bit one comes first, and the quantized ones.

    sides: objects with a `name` and `open(device)`, which returns the pipeline; see images/sides.py.
    machine: clock and sensors in place of the device's own.
    references: number of unquantized sides; one may have `dtype` "float32".

    A side or mode that runs out of memory, or cannot be compiled, gets a row that says so. Raises ValueError for two
    sides of one name, and RuntimeError if no side runs at all.
    """
    names = [side.name for side in sides]
    if len({*names}) != len(names):
        raise ValueError(f"sides to time are {', '.join(names)}: give at least one, each with its own name")
    sizes = timing.sizes
    machine = machine or machine_of(device)
    before = machine.conditions()
    bench = _Bench(machine, device, call, prompts)
    bench.open(sides, sizes[0] if sizes else None, references)
    over_fp32 = machine.device.type == "cpu" and instructions().multiply_bf16
    rows: list[SpeedRow] = []
    speedups: list[Speedup] = []
    lengths = timing.lengths or [None]
    for size, length, batch in product(sizes or [bench.own_size()], lengths, timing.batches):
        entries = bench.compare(replace(Setting(batch, *size), length=length), timing)
        rows += [_row(entry, bench) for entry in entries]
        speedups += compare(entries, over_fp32)
    return Speed(
        device=device,
        measured_on=machine.about,
        load_seconds={each.name: each.load_seconds for each in bench.opened if each.pipe is not None},
        first_image_seconds={each.name: each.first_seconds for each in bench.opened if each.pipe is not None},
        rows=tuple(rows),
        speedups=tuple(speedups),
        cards=tuple(card for each in bench.opened if not each.is_fp32 for card in _cards(each, rows)),
        conditions=_conditions(before, machine.conditions()) | _baseline(bench.opened, over_fp32),
        warnings=tuple(_warnings(rows, bench)),
        served=next((each.served for each in bench.opened if each.served is not None), None),
    )


def time_pairs(
    a: Any,
    b: Any,
    prompts: Sequence[str],
    call: Mapping[str, Any],
    pairs: int,
    *,
    warmup: int,
    device: str = "cpu",
    machine: Machine | None = None,
) -> tuple[list[Round], list[Round]]:
    """Time calls of two sides as A B B A A B B A …, and return those of each.

    a, b, machine: as `measure_speed` takes them, but the sides may have one name. Raises RuntimeError, with the
    reason, for a side that does not run.
    """
    machine = machine or machine_of(device)
    bench = _Bench(machine, device, call, prompts)
    bench.open([a, b], None, 1)
    entries = bench.compare(Setting(1, *bench.own_size()), Timing(warmup=warmup, rounds=pairs))
    for entry in entries:
        if entry.missing is not None:
            raise RuntimeError(f"{entry.opened.name} cannot be timed: {entry.missing}")
    first, second = entries
    return first.rounds, second.rounds


@dataclass(frozen=True)
class Setting:
    """Shape of a call of a pipeline: number of images or videos, their pixels, frames and length of text where said."""

    batch: int
    height: int
    width: int
    frames: int | None = None
    length: int | None = None

    def arguments(self, pipe: Any) -> dict[str, int]:
        """Return arguments of a call of the pipeline; ValueError for frames of one that makes images."""
        size = {"height": self.height, "width": self.width}
        if self.length is not None:
            size[LENGTH] = self.length
        if self.frames is None:
            return size
        name = frames_argument(type(pipe))
        if name is None:
            raise ValueError(f"a {type(pipe).__name__} takes no number of frames: write its size as HEIGHTxWIDTH")
        return {**size, name: self.frames}


@dataclass
class Opened:
    """A side, opened. pipe: None where that failed, then `missing` says why."""

    name: str
    is_reference: bool
    is_fp32: bool = False
    pipe: Any = None
    missing: str | None = None
    load_seconds: float = 0.0
    first_seconds: float = 0.0
    resident_bytes: int = 0
    served: Served | None = None
    size: tuple[int, ...] = (0, 0)


@dataclass(frozen=True)
class Round:
    """One call of a pipeline: seconds by stage. sequences: batch of the denoiser in a step. joules: of the call.

    megahertz: the device's clock at the end of the call.
    """

    stages: Mapping[str, float]
    sequences: int = 1
    joules: float | None = None
    slowdowns: frozenset[str] = frozenset()
    megahertz: float | None = None


@dataclass
class Entry:
    """A side in a mode at a setting, and its rounds.

    models: what runs as its denoisers, by component. computed: share of the steps that its checkpoint's list computes.
    """

    opened: Opened
    mode: str
    setting: Setting
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    missing: str | None = None
    rounds: list[Round] = field(default_factory=list)
    warm_seconds: float = 0.0
    peak_bytes: int | None = None
    computed: float = 1.0

    def times(self, stage: str) -> Times:
        """Return the times of a stage."""
        return summarize([each.stages[stage] for each in self.rounds])

    @property
    def slowdowns(self) -> frozenset[str]:
        return frozenset(reason for each in self.rounds for reason in each.slowdowns)


def summarize(values: Sequence[float]) -> Times:
    """Return percentiles of times by linear interpolation."""
    ordered = torch.tensor(values, dtype=torch.float64)
    at = torch.tensor([0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    low, middle, high, late = torch.quantile(ordered, at).tolist()
    return Times(n=len(values), p50=middle, p95=late, iqr=high - low, values=tuple(values))


def compare(entries: Sequence[Entry], over_fp32: bool = False) -> list[Speedup]:
    """Return speed-ups of every quantized entry over the fastest unquantized one, for a step and end to end.

    over_fp32: the fastest in fp32 where that was timed; the fastest of the others then stands beside it.
    """
    plain = [entry for entry in entries if entry.opened.is_reference and entry.rounds]
    quantized = [entry for entry in entries if not entry.opened.is_reference and entry.rounds]
    return [
        _speedup(entry, best, stage)
        for entry in quantized
        for stage in (STEP, WHOLE)
        for best in _baselines(plain, stage, over_fp32)
    ]


def _baselines(plain: Sequence[Entry], stage: str, over_fp32: bool) -> list[Entry | None]:
    """Return the entry that a speed-up is over, then the one beside it."""
    in_fp32 = [entry for entry in plain if entry.opened.is_fp32]
    others = [entry for entry in plain if not entry.opened.is_fp32]
    groups = (in_fp32, others) if over_fp32 and in_fp32 and others else (plain,)
    return [min(group, key=lambda each: each.times(stage).p50, default=None) for group in groups]


def _speedup(entry: Entry, best: Entry | None, stage: str) -> Speedup:
    fields: dict[str, Any] = {"side": entry.opened.name, "stage": stage, "mode": entry.mode, **asdict(entry.setting)}
    if best is None:
        return Speedup(**fields, refused="the 16-bit side was not timed: its rows say why")
    fields |= {"over": best.opened.name, "against": best.mode}
    refused = _why_not(entry, best, stage)
    if refused:
        return Speedup(**fields, refused=refused)
    pairs = zip(best.times(stage).values, entry.times(stage).values, strict=True)
    return Speedup(**fields, ratio=Estimate.of(paired_interval([theirs / ours for theirs, ours in pairs])))


def _why_not(entry: Entry, best: Entry, stage: str) -> str | None:
    """Return the reason why no speed-up is given, or None."""
    for each in (best, entry):
        times = each.times(stage)
        if not times.iqr <= SPREAD * times.p50:
            return f"{each.opened.name}, {each.mode}: rounds spread by {times.iqr / times.p50:.1%}, over {SPREAD:.0%}"
        heat = sorted(each.slowdowns - {POWER_LIMIT})
        if heat:
            return f"{each.opened.name}, {each.mode}: the GPU lowered its clocks because of {' and '.join(heat)}"
    return None


def _is_offloaded(pipe: Any) -> bool:
    """Tell whether the parts of a pipeline come to the device by themselves, one at a time."""
    return bool(getattr(pipe, "_all_hooks", None))


def _move(pipe: Any, device: str) -> None:
    """Put a pipeline on a device; of an offloaded one only take the parts off."""
    if _is_offloaded(pipe):
        pipe.maybe_free_model_hooks()
    else:
        pipe.to(device)


class _Bench:
    """Pipelines to time, and their device. apart: whether they do not fit on it together."""

    def __init__(self, machine: Machine, device: str, call: Mapping[str, Any], prompts: Sequence[str]) -> None:
        self.machine, self.device, self.call, self.prompts = machine, device, dict(call), prompts
        self.opened: list[Opened] = []
        self.apart = False
        self.present: Opened | None = None  # the side that lies on the device where they are apart

    def open(self, sides: Sequence[Any], size: tuple[int, ...] | None, references: int) -> None:
        """Load each side and make a first image with it. RuntimeError if that fails for all.

        references: how many of them, which come first, are unquantized.
        """
        for side in sides:
            _import_classes(side)
        for index in reversed(range(len(sides))):
            side = sides[index]
            is_fp32 = 0 < index < references and getattr(side, "dtype", None) == "float32"
            opened = Opened(side.name, index < references, is_fp32)
            if not self._load(opened, side, size) and self._make_room(opened):
                self._load(opened, side, size)
            self.opened.insert(0, opened)
        if all(each.pipe is None for each in self.opened):
            raise RuntimeError(f"no side runs on {self.device}: {self.opened[0].missing}")

    def own_size(self) -> tuple[int, ...]:
        """Return height and width that the pipeline makes by itself, and frames of a video."""
        return next(each.size for each in self.opened if each.pipe is not None)

    def compare(self, setting: Setting, timing: Timing) -> list[Entry]:
        """Run every side in every mode, in turns."""
        modes, warmup, rounds = timing.modes, timing.warmup, timing.rounds
        if set(modes) != {"eager"}:
            torch.compiler.reset()  # graphs of another size must not slow this one or use up a limit
        entries = [Entry(opened, mode, setting, missing=opened.missing) for opened in self.opened for mode in modes]
        for entry in entries:
            if entry.missing is None:
                self._attempt(entry, lambda entry=entry: self._warm_up(entry, warmup))
                if (entry.missing or "").startswith(_OUT_OF_MEMORY) and self._make_room(entry.opened):
                    for captured in [other for other in entries if other.mode == "captured" and other.models]:
                        captured.missing, captured.models = _GRAPHS_STAY, {}
                    self.machine.release()
                    entry.missing = None
                    self._attempt(entry, lambda entry=entry: self._warm_up(entry, warmup))
        for number in progress(range(rounds), "Timing", rounds):
            left = [entry for entry in entries if entry.missing is None]
            first = number % max(1, len(left))
            for entry in (*left[first:], *left[:first]):
                self._attempt(entry, lambda entry=entry: entry.rounds.append(self._turn(entry)))
        return entries

    def _load(self, opened: Opened, side: Any, size: tuple[int, ...] | None) -> bool:
        """Load and run it; return False, with the reason in `missing`, if memory ran out."""
        self._bring(None)
        start = self.machine.mark()
        try:
            pipe = side.open(self.device)
            loaded = self.machine.mark()
            arguments = Setting(1, *size).arguments(pipe) if size else {}
            with skip_recorded_steps(pipe) or nullcontext():
                ((output, _),) = run_pipeline(
                    pipe, items_of(self.prompts, 1), self.call | arguments, output_type="pt", batch_size=1
                )
            end = self.machine.mark()
            self.machine.wait()
        except Exception as problem:
            opened.missing = _out_of_memory(problem)
            if opened.missing is None:
                raise
        else:
            opened.pipe, opened.missing, self.present = pipe, None, opened
            opened.load_seconds = self.machine.seconds(start, loaded)
            opened.first_seconds = self.machine.seconds(start, end)
            opened.resident_bytes, opened.served = model_bytes(pipe.components), served(pipe, self.device)
            first = pictures(output)[0]
            opened.size = (*first.shape[-2:], *first.shape[:-3])
        self.machine.release()
        return opened.missing is None

    def _make_room(self, wanted: Opened) -> bool:
        """Move opened sides to the CPU's memory, but for one at a time; tell whether that can help `wanted`."""
        opened = [each for each in self.opened if each.pipe is not None]
        if self.apart or self.machine.device.type == "cpu" or all(each is wanted for each in opened):
            return False
        self.apart, self.present = True, None
        for each in opened:
            _move(each.pipe, "cpu")
        self.machine.release()
        return True

    def _bring(self, opened: Opened | None) -> bool:
        """Put this side on the device in place of the one there, if sides are apart; tell whether anything moved."""
        if not self.apart or self.present is opened:
            return False
        if self.present is not None:
            _move(self.present.pipe, "cpu")
            self.machine.release()
        if opened is not None:
            _move(opened.pipe, self.device)
        self.present = opened
        return True

    def _attempt(self, entry: Entry, work: Callable[[], None]) -> None:
        """Do the work; leave an entry out from then on if it runs out of memory or its mode does not work."""
        try:
            work()
            return
        except Exception as problem:
            entry.missing = _out_of_memory(problem)
            if entry.missing is None:
                if entry.mode == "eager":
                    raise
                entry.missing = f"{type(problem).__name__}: {first_line(problem)}"
        entry.rounds, entry.models = [], {}
        self.machine.release()

    def _warm_up(self, entry: Entry, rounds: int) -> None:
        self._bring(entry.opened)
        if entry.mode in ("cuda graph", "captured") and self.machine.device.type != "cuda":
            entry.missing = "CUDA graphs need a CUDA device"
            return
        if entry.mode == "captured" and self.apart:
            entry.missing = _GRAPHS_STAY
            return
        before = self.machine.allocated()
        self.machine.reset_peak()
        entry.models = {name: MODES[entry.mode](model) for name, model in denoisers(entry.opened.pipe).items()}
        entry.warm_seconds = self._run(entry).stages[WHOLE]
        for _ in range(rounds - 1):
            self._run(entry)
        peak = self.machine.peak()
        if peak is not None and before is not None:
            was_there = 0 if _is_offloaded(entry.opened.pipe) else entry.opened.resident_bytes
            entry.peak_bytes = was_there + peak - before

    def _turn(self, entry: Entry) -> Round:
        if self._bring(entry.opened):
            self._run(entry)  # the first one after a move is slower
        return self._run(entry)

    def _run(self, entry: Entry) -> Round:
        """Run one call of the pipeline, from prompts to pixels in the device's memory."""
        machine, setting, pipe = self.machine, entry.setting, entry.opened.pipe
        call = self.call | setting.arguments(pipe)
        timer = _StageTimer(machine)
        with (
            _installed(pipe, entry.models),
            skip_recorded_steps(pipe) or nullcontext() as skipped,  # in front of graphs, so for each run
            watched(pipe, timer.begin, timer.end),
            hooked(denoisers(pipe).values(), after=timer.count_rows),
        ):
            machine.wait()
            joules, start = machine.joules(), machine.mark()
            items = items_of(self.prompts, setting.batch)
            for _ in run_pipeline(
                pipe, items, call, output_type="pt", batch_size=setting.batch, on_latents=timer.count_step
            ):
                pass
            timer.marks[WHOLE] = [(start, machine.mark())]
            slowdowns, megahertz = machine.slowdowns(), machine.megahertz()  # while the device is still busy
            machine.wait()
        after = machine.joules()
        if skipped is not None:
            entry.computed = skipped.computed / skipped.calls
        return Round(
            stages=timer.seconds(),
            sequences=max(1, timer.rows // max(1, timer.steps)),
            joules=None if joules is None or after is None else after - joules,
            slowdowns=slowdowns,
            megahertz=megahertz,
        )


class _StageTimer:
    """Marks of one call by stage, and the denoiser's rows and steps."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.marks: dict[str, list[tuple[Any, Any]]] = {}
        self.begun: Any = None
        self.rows = self.steps = 0

    def begin(self, _stage: str) -> None:
        self.begun = self.machine.mark()

    def end(self, stage: str) -> None:
        self.marks.setdefault(stage, []).append((self.begun, self.machine.mark()))

    def count_rows(self, model: nn.Module, _args: Any, output: Any) -> None:
        self.rows += len(prediction(output, model))

    def count_step(self, _step: int, _latents: Any) -> None:
        self.steps += 1

    def seconds(self) -> dict[str, float]:
        """Return seconds by stage, the whole last; of the denoiser the mean over steps."""
        seconds = {
            stage: sum(self.machine.seconds(*pair) for pair in self.marks[stage])
            for stage in (TEXT, STEP, VAE, WHOLE)
            if stage in self.marks
        }
        return seconds | ({STEP: seconds[STEP] / self.steps} if STEP in seconds else {})


@contextmanager
def watched(pipe: Any, begin: Callable[[str], None], end: Callable[[str], None]) -> Iterator[None]:
    """Call both with the stage, one before and one after it: text encoders, a call of a denoiser, VAE."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    encoders = [part for name, part in parts.items() if name.startswith(("text_encoder", "image_encoder"))]
    with ExitStack() as stack:
        for stage, models in ((TEXT, encoders), (STEP, denoisers(pipe).values())):
            before, after = (lambda *_, stage=stage, call=call: call(stage) for call in (begin, end))
            stack.enter_context(hooked(models, before=before, after=after))
        if "vae" in parts:
            stack.callback(_Decoding(parts["vae"], begin, end).remove)
        yield


class _Decoding(Placed):
    """A VAE's `decode`, which no hook sees, as it is no forward pass, between calls of `begin` and `end`."""

    def __init__(self, vae: nn.Module, begin: Callable[[str], None], end: Callable[[str], None]) -> None:
        super().__init__(vae, "decode")
        self.begin, self.end = begin, end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begin(VAE)
        result = self.plain(*args, **kwargs)
        self.end(VAE)
        return result


@contextmanager
def _installed(pipe: Any, models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put other denoisers into the pipeline for a while."""
    originals = denoisers(pipe)
    try:
        for name, model in models.items():
            setattr(pipe, name, model)
        yield
    finally:
        for name, model in originals.items():
            setattr(pipe, name, model)


def _graphed(model: nn.Module) -> Any:
    """Return a model that replays a graph; it copies the output, over which the next replay writes."""
    graphed: Any = torch.compile(model, mode="reduce-overhead", dynamic=False)
    graphed.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    graphed.register_forward_hook(lambda _, _args, out: with_prediction(out, prediction(out, model).clone()))
    return graphed


def _captured(model: nn.Module) -> nn.Module:
    """Return a copy that shares its weights, so that the model itself goes on without graphs."""
    replaying = copy.copy(model)
    capture(replaying)
    return replaying


def device_row(name: str) -> Device | None:
    """Return the row of DEVICES of a GPU by its driver's name ("NVIDIA GeForce RTX 4090"); None if it has none."""
    words = name.lower().replace("-", " ").split()
    runs = {"".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2)}
    key = max((key for key, row in DEVICES.items() if key in runs and row.chip != "apple"), key=len, default="")
    return None if any(not key.endswith(word) for word in _VARIANTS.intersection(words)) else DEVICES.get(key)


def step_at_peak(
    pipe: Any, setting: Setting, call: Mapping[str, Any], sequences: int, device: Device
) -> tuple[float, float] | None:
    """Return the FLOPs of one denoiser step, and its seconds at the data sheet's peaks; see recipes/cost.py.

    sequences: that the denoiser sees at once. Every product, attention and pass over memory takes what its FLOPs or its
    bytes need, whichever is longer, fused as far as can be thought. None for a model that is not modelled.
    """
    component, model = next(iter(denoisers(pipe).items()))
    config: Any = model.config
    try:
        family = model_family(model)
        forward = forward_pass(
            family.name,
            dict(config),
            CallSize(sequences, setting.height, setting.width, setting.frames, setting.length or call.get(LENGTH)),
            vae=dict(pipe.vae.config) if "vae" in pipe.components else None,
            convolutions=convolutions_of(model),
        )
    except ValueError:
        return None
    whole = Efficiency(1.0, measured="the peak itself")
    others = dict.fromkeys(("attention", "attention_fp8", "streaming", "scalar"), whole)
    peak = replace(device, matmul=dict.fromkeys(device.peaks, whole), **others)
    costs = list(steps(plan_in_memory(component, model), forward, device.chip))
    return sum(each.flops for each in costs), sum(each.seconds(peak, "ideal") for each in costs)


def plan_in_memory(component: str, model: nn.Module) -> Plan:
    """Return the plan of a model in memory: roles from its family, schemes from its layers."""
    any_recipe = load_recipe("fp8")[1].components["transformer"]  # its formats are replaced
    plan = make_plan(model_family(model), component, any_recipe, shapes_of(model), static_inputs=False)
    schemes = {name: layer.scheme for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    layers = tuple(replace(layer, scheme=schemes.get(layer.name)) for layer in plan.layers)
    return replace(plan, layers=layers, attention=attention_of(model))


def _row(entry: Entry, bench: _Bench) -> SpeedRow:
    opened = entry.opened
    fields: dict[str, Any] = {
        "side": opened.name,
        "is_reference": opened.is_reference,
        "mode": entry.mode,
        **asdict(entry.setting),
        "resident_bytes": opened.resident_bytes or None,
        "missing": entry.missing,
    }
    if not entry.rounds:
        return SpeedRow(**fields)
    stages = {stage: entry.times(stage) for stage in entry.rounds[0].stages}
    joules = [each.joules for each in entry.rounds if each.joules]
    device = device_row(bench.machine.about) if bench.machine.device.type == "cuda" else None
    sequences = entry.rounds[0].sequences
    peak = step_at_peak(opened.pipe, entry.setting, bench.call, sequences, device) if device else None
    return SpeedRow(
        **fields,
        stages=stages,
        peak_bytes=entry.peak_bytes,
        compile_seconds=max(0.0, entry.warm_seconds - stages[WHOLE].p50) if entry.mode != "eager" else None,
        energy_joules=sum(joules) / (len(entry.rounds) * entry.setting.batch) if joules else None,
        flops=peak[0] * entry.computed if peak else None,
        roofline_share=peak[1] * entry.computed / stages[STEP].p50 if peak else None,
        slowed_by=tuple(sorted(entry.slowdowns)),
    )


def _cards(opened: Opened, rows: Sequence[SpeedRow]) -> list[Card]:
    """Judge cards by the least peak that was seen; on a CPU by the weights alone."""
    peaks = [row for row in rows if row.side == opened.name and row.peak_bytes is not None]
    needed, basis = opened.resident_bytes, "weights alone; what computing takes comes on top"
    if peaks:
        row = min(peaks, key=lambda each: each.peak_bytes or 0)
        needed, basis = row.peak_bytes or 0, f"peak of {plain_shape(row)}, {row.mode}"
    return [
        Card(side=opened.name, gigabytes=each, needed=needed, fits=needed + CONTEXT <= each * GIB, basis=basis)
        for each in CARDS
        if needed
    ]


def _warnings(rows: Sequence[SpeedRow], bench: _Bench) -> Iterator[str]:
    reasons = sorted({reason for row in rows for reason in row.slowed_by})
    if POWER_LIMIT in reasons:
        yield "the GPU ran at its power limit in some rounds, as it does in large matrix products"
    for reason in reasons:
        if reason != POWER_LIMIT:
            yield f"the GPU lowered its clocks because of {reason}"
    if bench.apart:
        yield "the sides do not fit on the device together: they changed places with the CPU's memory between turns"


def _conditions(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the conditions at both ends: one value where it did not change, else the first and the last."""
    ends = {name: (before.get(name, "unknown"), after.get(name, "unknown")) for name in {**before, **after}}
    return {name: a if a == b else f"{a} before, {b} after" for name, (a, b) in ends.items()}


def _baseline(opened: Sequence[Opened], over_fp32: bool) -> dict[str, str]:
    """Return what speed-ups are over, where more than one side is unquantized; else empty."""
    references = [each for each in opened if each.is_reference]
    timed = [each for each in references if each.pipe is not None]
    if len(references) < 2 or not timed:
        return {}
    if len(timed) < 2:
        return {"baseline": f"{timed[0].name}, the only one that could be timed"}
    if over_fp32:
        return {"baseline": f"fp32, with 16 bit beside it: {instructions()} multiplies bf16 by itself"}
    return {"baseline": f"the faster of fp32 and 16 bit on {instructions()}"}


def _import_classes(side: Any) -> None:
    """Import the classes that loading would import, as the folder's model_index.json names them.

    Do nothing for a side without a folder.
    """
    folder = getattr(side, "folder", None)
    entries = ModelFolder(side.name, Path(folder)).index.values() if folder else ()
    for entry in entries:
        if isinstance(entry, list) and entry[0] in ("diffusers", "transformers"):
            getattr(import_module(entry[0]), entry[1])


def _out_of_memory(problem: BaseException) -> str | None:
    """Return the text of a row for an exception that means that memory ran out; None for any other."""
    message = first_line(problem)
    is_it = isinstance(problem, (torch.OutOfMemoryError, MemoryError)) or any(
        each in message for each in _ALLOCATORS_SAY
    )
    return f"{_OUT_OF_MEMORY}: {message}" if is_it else None


# mode -> function from a transformer to the one that runs.
MODES: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, dynamic=False),
    "cuda graph": _graphed,
    "captured": _captured,
}
