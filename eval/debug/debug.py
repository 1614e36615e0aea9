"""Diagnosis of a quantized model: the questions of `fluxq debug`, in the order in which it asks them.

    stored.py    is each stored weight its source, rounded?                        a damaged file, a wrong scale
    trace.py     does each kernel compute what the torch reference does?           a fault of a kernel, not of rounding
                 NaN, values beyond the codes, values lost, at each step           a scale that does not fit
                 error of each layer, fed with 16-bit input and running free       where it begins
    damage.py    what is each layer's share of the error of the final latents?     what to keep in a better format
    patch.py     and what does that gain?

Two pipelines lie in memory, one of them at a time on the device. A first divergence is measured against the noise
floor: a second 16-bit run whose attention is computed another way, with another number of images in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluxq.base.console import progress
from fluxq.calibrate.capture import frames_in, images_per_batch, noise_levels, number_of_steps, spread
from fluxq.calibrate.stand_ins import module_of, moved, replaced
from fluxq.eval.debug.arithmetic import KERNEL_TOLERANCE, multiplies_integers
from fluxq.eval.debug.damage import Damages, Unit, blocks_of, locate, measure_damage, placed, squared_error
from fluxq.eval.debug.findings import findings, listed
from fluxq.eval.debug.patch import make_patch
from fluxq.eval.debug.stored import stored_fault
from fluxq.eval.debug.trace import Health, Local, Outputs, Powers, decibels, watch
from fluxq.eval.images.sides import Side, quantized_layers
from fluxq.eval.metrics.schema import Debug, LayerDamage, number
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.checkpoint import read_plan_file
from fluxq.quantize.structure import model_family
from fluxq.recipes.recipe import Recipe

NOISE_FACTOR = 3.0  # times the noise floor's error: above it a divergence begins
_CLIPPED = 1e-3  # share of a layer's input that is worth a finding


@dataclass(frozen=True)
class Search:
    """Extent of the search for faults.

    steps: number of denoising steps whose layers are looked at.
    budget: runs of the items for the damages, see `measure_damage`.
    growth: bits that a recipe may add, as a share of all that is stored.
    """

    steps: int = 4
    budget: int = 256
    growth: float = 0.05


def debug(
    reference: Side,
    quantized: Side,
    items: Sequence[tuple[str, int]],
    call: Mapping[str, Any],
    search: Search = Search(),
    *,
    device: str = "cpu",
    batch_size: int | None = None,
) -> Debug:
    """Find out which layers of `quantized` make it differ from `reference`, and why.

    items: (prompt, seed), a few. call: pipeline arguments. Raises ValueError for a side with a step cache, one without
    quantized layers, and a 16-bit model whose latents are not finite.
    """
    if quantized.cache is not None or reference.cache is not None:
        raise ValueError("layers that a step cache passes over cannot be followed: leave out the cache")
    record = read_plan_file(Path(quantized.folder))
    recipe = None
    if record is not None and "imported" not in record:  # no recipe made an imported one
        fields = dict(record["recipe"])
        recipe = str(fields.pop("name")), Recipe.model_validate(fields)
    pipes = reference.open(), quantized.open(skips=False)
    return debug_pipelines(*pipes, items, call, search, device=device, batch_size=batch_size, recipe=recipe)


def debug_pipelines(
    reference: Any,
    quantized: Any,
    items: Sequence[tuple[str, int]],
    call: Mapping[str, Any],
    search: Search = Search(),
    *,
    device: str = "cpu",
    batch_size: int | None = None,
    recipe: tuple[str, Recipe] | None = None,
) -> Debug:
    """Diagnose open pipelines on the CPU, as `debug`. recipe: name and content; without it there is no patch."""
    all_layers = quantized_layers(quantized)
    kinds = {name: model_family(getattr(quantized, name.partition(".")[0])).kind for name in all_layers}
    layers = {name: layer for name, layer in all_layers.items() if kinds[name] != "vae"}
    if not layers:
        raise ValueError("no layer that makes the latents is quantized: there is nothing to look for")
    steps = spread(search.steps, number_of_steps(reference, call))
    size = min(batch_size or images_per_batch(call), len(items))
    traces = _trace(reference, quantized, layers, items, call, steps, size, device)

    def run(pipe: Any) -> Tensor:
        return watch(pipe, (), items, call, (), size)

    blocks = blocks_of(quantized, traces.order)
    faults = _faults(reference, layers, traces, steps, device)
    damages = measure_damage(
        reference, quantized, blocks, run, traces.latents, floor=traces.floor_error, device=device, budget=search.budget
    )
    patch, why_not = None, ""
    if recipe is not None:

        def error(kept: Mapping[str, nn.Linear | nn.Conv2d]) -> float:
            with placed(quantized, device), replaced(quantized, kept):
                return squared_error(run(quantized), traces.latents)

        try:
            patch = make_patch(reference, quantized, layers, damages, recipe, search.growth, error)
        except ValueError as refused:
            why_not = str(refused)
    rows = [
        _row(name, locate(quantized, name)[0], (name,), layers, damages, **_traced(name, traces, steps, faults))
        for name in traces.order
    ]
    rows = _ranked(rows, list(faults))
    divergence = _first_divergence(traces, steps)
    sentences = findings(rows, faults, damages, steps, divergence, patch)
    sentences += [f"no patch: {why_not}"] * bool(why_not) + _not_looked_at(
        layers, all_layers, traces, blocks, damages, device
    )
    return Debug(
        prompts=len(items),
        steps=steps,
        sigmas=tuple(traces.sigmas[step] for step in steps),
        blocks=tuple(_row(block, "block", unit, layers, damages) for block, unit in blocks.items()),
        layers=tuple(rows),
        first_divergence=divergence,
        additivity=damages.sum_of_damages if math.isfinite(damages.above_floor) and damages.above_floor else None,
        findings=tuple(sentences),
        sqnr_db=decibels(damages.total / damages.signal),
        floor_sqnr_db=decibels(traces.floor_error / damages.signal),
        patch=patch,
    )


@dataclass
class _Traces:
    """Results of three watched runs.

    order: layers as they ran.
    floor_error: squared error of the second 16-bit run.
    resolution: squared relative error of rounding a result once.
    local, free, floor: outputs with 16-bit input, in the quantized run, and in the second 16-bit run.
    """

    latents: Tensor
    order: tuple[str, ...]
    sigmas: tuple[float, ...]
    floor_error: float
    resolution: float
    local: Local
    free: Powers
    floor: Powers
    health: Health


def _trace(
    reference: Any,
    quantized: Any,
    layers: Mapping[str, QuantLinear],
    items: Sequence[tuple[str, int]],
    call: Mapping[str, Any],
    steps: Sequence[int],
    size: int,
    device: str,
) -> _Traces:
    names, outputs, again, ours = list(layers), Outputs(), Outputs(), Outputs()
    local, health = Local(layers), Health()
    with placed(reference, device):
        latents = watch(reference, names, items, call, steps, size, outputs, local)
        if not torch.isfinite(latents).all():
            raise ValueError("the latents of the 16-bit model hold NaN or infinity: choose another --dtype")
        sigmas = noise_levels(reference)
        others = 2 if size == 1 and frames_in(call) == 1 else 1  # two videos may be more than there is room for
        with sdpa_kernel(_other_attention(device), set_priority=True):
            other = watch(reference, names, items, call, steps, others, again)
    with placed(quantized, device):
        watch(quantized, names, items, call, steps, size, ours, health)
    return _Traces(
        latents=latents,
        order=outputs.order,
        sigmas=sigmas,
        floor_error=squared_error(other, latents),
        resolution=(torch.finfo(reference.dtype).eps / 4) ** 2,  # about what rounding a result once adds
        local=local,
        free=ours.against(outputs),
        floor=again.against(outputs),
        health=health,
    )


def _other_attention(device: str) -> list[SDPBackend]:
    """Return another attention than PyTorch's default, for the second 16-bit run; on a GPU it has room for videos."""
    is_gpu = torch.device(device).type == "cuda"
    return [*([SDPBackend.EFFICIENT_ATTENTION] if is_gpu else []), SDPBackend.MATH]


def _faults(
    reference: Any, layers: Mapping[str, QuantLinear], traces: _Traces, steps: Sequence[int], device: str
) -> dict[str, str]:
    """Return layer -> its faults beyond rounding: NaN first, then kernels, stored weights, static scales."""
    faults: dict[str, str] = {}

    def add(name: str, fault: str) -> None:
        faults[name] = f"{faults[name]}; {fault}" if name in faults else fault

    for name, step in _first_not_finite(traces, steps):
        add(name, f"at step {step} NaN or infinity comes out of it, from an input that is finite")
    for name, error in traces.local.kernel_errors.items():
        if not error <= KERNEL_TOLERANCE:
            off = f"{error:.1%} off" if math.isfinite(error) else "not finite like"
            add(name, f"its kernel is {off} the torch reference on the same input, which is no quantization error")
    for name in progress(traces.order, "Comparing stored weights"):
        with moved(layers[name], torch.device(device)) as layer:
            fault = stored_fault(layer, module_of(reference, name).weight.detach().flatten(1).to(device))
        if fault:
            add(name, fault)
    for name in traces.order:
        counts = traces.health.of(name, steps)
        used, clipped = max(counts.get("range", (0.0,))), max(counts.get("clipped", (0.0,)))
        if used > 1 and clipped > _CLIPPED:
            add(
                name,
                f"its input is up to {used:.2f} times what its static input scale reaches, {clipped:.1%} is clipped",
            )
    return faults


def _first_not_finite(traces: _Traces, steps: Sequence[int]) -> list[tuple[str, int]]:
    """Return each layer that makes NaN or infinity of a finite input, with its first such step."""
    first_steps: dict[str, int] = {}
    for step in steps:
        for name in traces.order:
            counts = traces.health.counts.get((name, step), {})
            if counts.get("not_finite") and not counts.get("input_not_finite"):
                first_steps.setdefault(name, step)
    return list(first_steps.items())


def _first_divergence(traces: _Traces, steps: Sequence[int]) -> str | None:
    """Return the place, by step and then by running order, where an error first leaves the noise floor."""
    for step in steps:
        for name in traces.order:
            noise, floor = traces.free.noise(name, step), traces.floor.noise(name, step)
            if noise is None or floor is None:
                continue
            floor = max(floor, traces.resolution)
            if not noise <= NOISE_FACTOR**2 * floor:
                error = "is not finite" if math.isnan(noise) else f"has an SQNR of {decibels(noise):.1f} dB"
                return (
                    f"step {step}, {name}: its output {error}, two 16-bit runs agree to {decibels(floor):.1f} dB there"
                )
    return None


def _traced(name: str, traces: _Traces, steps: Sequence[int], faults: Mapping[str, str]) -> dict[str, Any]:
    return {
        "local_sqnr_db": traces.local.powers.sqnr_db(name, steps),
        "free_sqnr_db": traces.free.sqnr_db(name, steps),
        "kernel_error": number(traces.local.kernel_errors.get(name)),
        "health": traces.health.of(name, steps),
        "fault": faults.get(name, ""),
    }


def _row(
    name: str, role: str, unit: Unit, layers: Mapping[str, QuantLinear], damages: Damages, **traced: Any
) -> LayerDamage:
    return LayerDamage(
        name=name,
        role=role,
        scheme=", ".join(dict.fromkeys(str(layers[each].scheme) for each in unit)),
        weights=sum(layers[each].in_features * layers[each].out_features for each in unit),
        damage=damages.damage(unit),
        gain=damages.gain(unit),
        **traced,
    )


def _ranked(rows: Sequence[LayerDamage], faults: Sequence[str]) -> list[LayerDamage]:
    """Sort layers: faulty ones first, then by damage; those that were not measured follow, by local error."""

    def place(row: LayerDamage) -> tuple[int, float, float]:
        fault = faults.index(row.name) if row.name in faults else len(faults)
        local = min((value for value in row.local_sqnr_db if value is not None), default=math.inf)
        return fault, 1.0 if row.damage is None else -row.damage, local

    return sorted(rows, key=place)


def _not_looked_at(
    layers: Mapping[str, QuantLinear],
    all_layers: Mapping[str, QuantLinear],
    traces: _Traces,
    blocks: Mapping[str, Unit],
    damages: Damages,
    device: str,
) -> list[str]:
    """Return sentences about what the findings do not cover."""
    sentences = []
    if torch.device(device).type == "cpu":
        integers = any(map(multiplies_integers, layers.values()))
        sentences.append("kernels were not run, a CPU has none" + "; its int8 products were checked" * integers)
    reencoded = [
        layer for layer in layers.values() if layer.prepared is not None and layer.prepared.kind == "re-encoded"
    ]
    if reencoded:
        sentences.append(
            f"stored weights of {len(reencoded)} layers were not compared with their source: they are re-encoded"
        )
    closed = [block for block, unit in blocks.items() if any((name,) not in damages.only for name in unit)]
    if closed:
        sentences.append(
            f"layers of {len(closed)} of {len(blocks)} blocks were not measured one by one: the budget is used"
        )
    silent = sorted(layers.keys() - set(traces.order))
    if silent:
        sentences.append(f"{listed(silent)}: did not run at the steps that were looked at")
    later = sorted({name.partition(".")[0] for name in all_layers.keys() - layers.keys()})
    if later:
        sentences.append(f"{', '.join(later)}: not looked at, it runs after the final latents")
    return sentences
