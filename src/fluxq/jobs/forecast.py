"""Forecast of a job's time, printed before it starts: its forward passes, from shapes, over this device's speed.

    forward pass   FLOPs / rate, and a fixed time for each Linear
    fitting        of each input group (M tokens, K channels, N rows): (2 M K² + 4 K³ + 4 N K²) / rate, and a fixed time
    rate           speed of one product, measured on this device just now, times the share that a whole model reaches

The Gram takes 2 M K² FLOPs, factoring it and feeding errors back the rest. It is for people: right within a
factor of three, and nothing is decided by it.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from fluxq.base.console import amount
from fluxq.base.model import ModelFolder
from fluxq.calibrate.capture import batches, images_per_batch, number_of_steps, steps_to_see
from fluxq.calibrate.sensitivity import IMAGES as LEVEL_IMAGES
from fluxq.jobs import memory
from fluxq.jobs.job import Job
from fluxq.jobs.listing import passes_of_list
from fluxq.jobs.making import MOST_CALLS
from fluxq.jobs.passports import floor_images
from fluxq.jobs.planning import demand
from fluxq.quantize.checkpoint import is_model
from fluxq.quantize.structure import component_family, denoisers_of, list_linears
from fluxq.recipes.cost import steps
from fluxq.recipes.plan import Plan, component_recipe, make_plan
from fluxq.recipes.recipe import load_recipe
from fluxq.runtime.step_trials import IMAGES

_ANY_CHIP = "sm_90"  # FLOPs are the same on all
_PROGRAM = 700_000_000  # bytes of torch, diffusers and the libraries that they load
_SHARE = 0.6  # of a large product's speed, reached by a model's products, attention and passes together
_PER_LINEAR = 1e-4  # seconds of host time and launches
_PER_GROUP = 0.4  # seconds of fitting, whatever the size: a few dozen trials
QUANTIZED = 2.0  # times a 16-bit pass: every layer decodes codes, or rounds to them


@dataclass(frozen=True)
class Forecast:
    """Forecast of a job.

    parts: name of each part -> seconds, in the order in which they run.
    memory_bytes: bytes that the job takes on its device at most.
    """

    parts: Mapping[str, float]
    memory_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the whole job."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        if self.seconds < 60:
            return "under a minute"
        longer = {name: seconds for name, seconds in self.parts.items() if seconds >= 0.05 * self.seconds}
        parts = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in longer.items())
        return f"about {in_words(self.seconds)}" + (f" ({parts})" if len(longer) > 1 else "")


def in_words(seconds: float) -> str:
    """Return a time as people say it, rounded: an estimate has no second digit."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 1.5 * size or (unit == "minute" and seconds >= 45):
            count = max(1, round(seconds / size))
            return f"{count} {unit}{'s' * (count > 1)}"
    return "under a minute"


def of_quantizing(job: Job) -> Forecast:
    """Return the time of `fluxq quantize`, finished blocks of an interrupted run included."""
    static = any(plan.static_groups() and plan.component not in job.fitted for plan in job.plans)
    calibrates = bool(job.fitted) or (static and job.statistics is None)
    if not (calibrates or job.options.check or job.is_listed):
        return Forecast({}, _memory(job, writes=True))
    forward, items = _forward(job), job.calibration_items
    seen = steps_to_see(job.calibration.steps, forward.steps)
    parts = {}
    if calibrates:
        again = seen * forward.steps / 2 if job.fitted else 0  # images that tell the effect of each step's error
        parts["calibrating"] = forward.seconds(items, forward.steps) + forward.seconds(items[:LEVEL_IMAGES], again)
    if job.is_listed:
        parts["list of steps"] = IMAGES * passes_of_list(job, forward.steps) * forward.seconds_of_step(1)
    if job.fitted:
        parts["fitting"] = sum(_fitting(plan, forward, items, seen) for plan in job.fitted.values())
    if job.options.check:
        check = forward.seconds(job.check_items, forward.steps)
        frames = memory.call_size(job.check_call).frames
        again = forward.seconds(job.check_items[: floor_images(job, images_per_batch(job.check_call))], forward.steps)
        parts[f"closing check of {amount(len(job.check_items), frames)}"] = (1 + QUANTIZED) * check + QUANTIZED * again
    return Forecast(parts, _memory(job, writes=True))


def of_calibrating(job: Job) -> Forecast:
    """Return the time of `fluxq calibrate`."""
    forward = _forward(job)
    seconds = forward.seconds(job.calibration_items, forward.steps)
    return Forecast({"calibrating": seconds}, _memory(job, writes=False))


def of_choosing(job: Job, passes: Mapping[str, int]) -> Forecast:
    """Return the time of `fluxq auto`. passes: name of a part -> forward passes of one image."""
    forward = _forward(job)
    weights = memory.weight_bytes(job.folder, job.options.dtype)
    return Forecast({name: count * forward.seconds_of_step(1) for name, count in passes.items()}, _PROGRAM + weights)


def of_images(
    folder: ModelFolder,
    call: Mapping[str, Any],
    device: str,
    dtype: str,
    runs: Mapping[str, tuple[Sequence[Any], float]],
    sides: int = 1,
) -> Forecast:
    """Return the time of making images.

    runs: name -> (items, how often each is made, in units of a 16-bit run).
    sides: number of pipelines in memory together, each counted as the 16-bit one.
    """
    forward = _Forward(folder, call, device, dtype)
    parts = {name: times * forward.seconds(items, forward.steps) for name, (items, times) in runs.items()}
    called = memory.sizes_of(next(iter(runs.values()))[0], call)
    itemsize = getattr(torch, dtype).itemsize
    models = [name for name in folder.components if is_model(folder, name)]
    working = max(memory.activations(folder, name, size, itemsize) for name in models for size in called)
    return Forecast(parts, _PROGRAM + sides * memory.weight_bytes(folder, dtype) + working)


def _memory(job: Job, *, writes: bool) -> int:
    needs = demand(job, job.run.device, writes=writes)
    if needs is None:
        return _PROGRAM
    weights = memory.weight_bytes(job.folder, job.options.dtype)
    return _PROGRAM + (job.run.limit or needs.unbounded(weights))


def _forward(job: Job) -> _Forward:
    return _Forward(job.folder, job.call, job.run.device, job.options.dtype)


class _Forward:
    """Forward passes of a pipeline's denoisers on one device, guidance's second half included."""

    def __init__(self, folder: ModelFolder, call: Mapping[str, Any], device: str, dtype: str) -> None:
        self.folder, self.call = folder, call
        self.rate, self.exact_rate = rate(device, dtype), rate(device, "float32")
        self.steps = number_of_steps(folder.pipeline_class, call)
        self.linears = {name: list_linears(folder, name) for name in denoisers_of(folder)}
        self.parameters = inspect.signature(folder.pipeline_class.__call__).parameters if folder.pipeline_class else {}

    def seconds(self, items: Sequence[Any], steps: float) -> float:
        """Return the seconds of all images of `items`, made in their batches with so many steps."""
        return steps * sum(self.seconds_of_step(len(batch)) for batch in batches(items, None, self.call))

    def seconds_of_step(self, images: int) -> float:
        """Return the seconds of one step of a batch; of several denoisers, which take turns, the mean."""
        each = [
            self.flops(name, images) / self.rate + len(linears) * _PER_LINEAR for name, linears in self.linears.items()
        ]
        return sum(each) / max(1, len(each))

    def tokens(self, component: str, images: int) -> int:
        """Return the tokens that a denoiser sees in one step of a batch."""
        return memory.tokens(self.folder, component, memory.call_size(self.call, images))

    def flops(self, component: str, images: int) -> float:
        """Return the FLOPs of a denoiser's forward pass; 2 · weights · tokens where its family is not modelled."""
        tokens = self.tokens(component, images)
        try:
            forward = memory.forward_pass_of(self.folder, component, memory.call_size(self.call, images))
            plan = self._plan(component)
        except ValueError:
            return 2.0 * tokens * sum(linear.n * linear.k for linear in self.linears[component])
        batch = images * (2 if self._is_guided(component) else 1)
        return sum(step.flops for step in steps(plan, replace(forward, batch=batch), _ANY_CHIP))

    def _is_guided(self, component: str) -> bool:
        """Tell whether a step runs the denoiser with and without the prompt."""
        if "true_cfg_scale" in self.parameters:  # guidance proper, beside a scale that the model reads
            return "negative_prompt" in self.call and self._argument("true_cfg_scale") > 1
        embeds = self.folder.config(component).get("guidance_embeds")
        return not embeds and self._argument("guidance_scale") > 1

    def _argument(self, name: str) -> float:
        default = self.parameters[name].default if name in self.parameters else None
        value = self.call.get(name, default)
        return value if isinstance(value, (int, float)) else 0.0

    def _plan(self, component: str) -> Plan:
        """Return the plan of a denoiser under `fp8`: FLOPs are those of any recipe."""
        family = component_family(self.folder, component)
        entry = component_recipe(load_recipe("fp8")[1], None, family)
        return make_plan(family, component, entry, self.linears[component], static_inputs=False, profile="rtn")


def _fitting(plan: Plan, forward: _Forward, items: Sequence[Any], seen: int) -> float:
    """Return the seconds of fitting a component: two passes of its calls through every block, and its groups."""
    kept = [len(batch) for batch in batches(items, None, forward.call)]
    calls = min(MOST_CALLS, seen * len(kept))
    images = kept[0] if kept else 1
    groups = [members for members in plan.statistics_groups().values() if not all(m.method.is_plain for m in members)]
    seconds = calls * (1 + QUANTIZED) * forward.seconds_of_step(images)
    for members in groups:
        k, n = members[0].k, sum(layer.n for layer in members)
        flops = 2 * calls * forward.tokens(plan.component, images) * k**2 + 4 * k**3 + 4 * n * k**2
        seconds += flops / forward.exact_rate + _PER_GROUP
    return seconds


@cache
def rate(device: str, dtype: str) -> float:
    """Return the FLOP/s that a whole model may reach on a device, from one product of a few milliseconds."""
    place = torch.device(device)
    m, n, k = (4096, 4096, 4096) if place.type == "cuda" else (256, 1024, 1024)
    x, w = (torch.ones(shape, dtype=getattr(torch, dtype), device=place) for shape in ((m, k), (n, k)))
    best = math.inf
    for _ in range(4):
        started = time.perf_counter()
        torch.nn.functional.linear(x, w)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        best = min(best, time.perf_counter() - started)
    return _SHARE * 2 * m * n * k / best
