"""Modelled time of a step of FLUX.1-dev: the passes over memory of its blocks, in every way that they can be run.

    eager              one kernel for each operator of diffusers' blocks; every quantized layer rounds its own input
    compiled           elementwise operators join each other and a norm before them, as Inductor does; ops stay whole
    optimized          the blocks of `fluxq.optimize`
    both               these, compiled
    every fusion       what products could take or write at their ends: q/k norm, rotation, GELU, gates, joined tokens

Products and attention are priced by recipes/cost.py, and so are rates: a pass takes its bytes over what a GPU attains,
or, of a kernel of ours, its instructions (recipes/devices.py) over what the GPU's schedulers begin, if that is longer.
tests/benchmarks/test_flux_step.py runs a block of each kind and finds the bytes of "eager" and "optimized" in its
operators. Left out are launches and what is read for all tokens: vectors, tables of angles, weights of norms.

An image with a list of steps computes the list's; its text encoders, its VAE and its one product for the modulation of
all steps stay. What stands for the output of a skipped step is left out: it moves a few MB.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.kernels.workloads import FLUX_STEP
from benchmarks.pages import between
from fluxq.kernels.library import LIBRARY
from fluxq.kernels.tiles import tuned_rows
from fluxq.recipes.cost import (
    QUERY_AND_KEY,
    STREAMS,
    ForwardPass,
    Prefer,
    Step,
    code_bytes,
    forward_pass,
    in_16_bit,
    resident_bytes,
    route,
    steps,
)
from fluxq.recipes.devices import INSTRUCTIONS, Device, Efficiency, find_device
from fluxq.recipes.formats import Format
from fluxq.recipes.plan import MODULATION_ROLE, LayerPlan, Plan
from fluxq.recipes.workloads import CallSize

STATES = ("eager", "compiled", "optimized", "both", "every fusion")
GPUS, RECIPES, SIZES = ("h200", "b200", "rtx5090"), ("16 bit", "fp8", "int8", "nvfp4"), (512, 1024, 2048)
SMALL = {"rtx3060": 31.5, "rtx4070": 31.5, "rtx5070": 63.0}  # GB/s of their link to the host: PCIe 4 and 5, 16 lanes
LINK = 0.8  # of its data sheet that copies out of pinned memory reach; assumed
MANY = 4096  # tokens
DENOISING_STEPS = 28  # of an image, which share one product for their modulation once it is hoisted
RMS, ROTATION = 2, 26  # of q's or k's bytes, eager: one kernel; and float, negate, stack, 2 products, sum, to 16 bit


@dataclass(frozen=True)
class Pass:
    """Passes over memory of one group of layers.

    bytes: by state.
    instructions: that all threads of our kernel execute, where the blocks are those of `fluxq.optimize`.
    alone: bytes and instructions of our kernel that only rounds, among a pass of the blocks that are diffusers'.
    """

    kind: str
    bytes: Mapping[str, float]
    instructions: float = 0
    alone: tuple[float, float] = 0, 0

    def seconds(self, device: Device, state: str) -> float:
        """Return the attainable time: of bytes, or of our kernel's instructions where that is longer."""
        whole = self.bytes[state]
        ours, instructions = self.alone if state in ("eager", "compiled") else (whole, self.instructions)
        counted = 0 if state == "every fusion" else instructions / device.instructions_per_second
        return (whole - ours) / device.bytes_per_second + max(ours / device.bytes_per_second, counted)


def _instructions(kind: str, rounded_to: Format | None, elements: float, chip: str) -> float:
    """Return the instructions of the pass that makes the input of a group in an optimized block.

    None are counted for a gated residual before a second norm, whose bytes hide them.
    """
    count = INSTRUCTIONS.get((COUNTED_AS[kind], "16bit" if rounded_to is None else rounded_to.name))
    return elements * count[chip] if count else 0


def passes(plan: Plan, forward: ForwardPass, chip: str, prefer: Prefer = "speed") -> Iterator[Pass]:
    """All passes of one step of FLUX.1 but those within products and attention.

    ValueError for a plan whose groups mix formats, or with more than rounding before a product: such are not modelled.
    """
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        if layer.role not in ("kept", MODULATION_ROLE):
            groups.setdefault(layer.group or layer.name, []).append(layer)
    for layers in groups.values():
        yield from _group(layers, forward, chip, prefer)


def _group(layers: list[LayerPlan], forward: ForwardPass, chip: str, prefer: Prefer) -> Iterator[Pass]:
    """Yield the passes that make the input of a group, and those that follow its layers."""
    first, found = layers[0], {route(layer.scheme, chip, prefer).activations for layer in layers}
    if len(found) > 1 or any(layer.scheme and (layer.scheme.is_transformed or layer.scheme.rank) for layer in layers):
        raise ValueError(f"{first.name}: its group mixes formats, or does more than round: not modelled here")
    (rounded_to,) = found
    m = forward.batch * forward.tokens(STREAMS.get(first.role, "image"))
    x, v = 2 * m * first.k, 2 * m * first.n
    code = code_bytes(rounded_to.name, m, first.k) if rounded_to else 0.0
    rounding = x + code if rounded_to else 0.0  # of one layer's input, in a pass of its own
    has_block_scales = bool(rounded_to and rounded_to.group_size)
    counted = functools.partial(_instructions, rounded_to=rounded_to, elements=m * first.k, chip=chip)
    alone = rounding, counted(ALONE)
    if first.made_by == "norm":
        each, fused = len(layers) * rounding, rounding or 2 * x
        count = counted(NORM) if first.role in ("qkv", "text_qkv", "single_in") else 0
        sizes = 6 * x + each, 2 * x + each, fused, fused, fused
        yield _pass(NORM, *sizes, instructions=count, alone=(each, len(layers) * alone[1]))
        for layer in layers:
            if layer.name.endswith(QUERY_AND_KEY):
                y = 2 * m * layer.n
                yield _pass("q/k norm and rotation", (RMS + ROTATION) * y, 2 * y, 2 * y, 2 * y, 0)
    if first.role in ("qkv", "single_in"):
        both = 2 * forward.batch * forward.tokens("both") * first.k  # text and image, side by side
        # q, k and v; where those are rotated, two come free. Optimized blocks see that the one before split its output.
        copies = (6, 2, 2, 2) if first.role == "qkv" else (2, 2, 2 * (".0." in first.name), 2)
        yield _pass("text and image joined", *(count * both for count in copies), 0)
    if first.role in ("attn_out", "text_attn_out"):
        yield _pass(ALONE, *[rounding] * 5, instructions=alone[1], alone=alone)
        yield _pass("gate and residual, the first", 5 * v, 2 * v, 2 * v, 2 * v, v)
    if first.role in ("ff_down", "text_ff_down"):
        in_product = 0 if has_block_scales else rounding  # a row's scale waits for all of the row
        fused = rounding or 2 * x
        kind = "GELU, codes"
        sizes = 2 * x + rounding, 2 * x + rounding, fused, fused, in_product
        yield _pass(kind, *sizes, instructions=counted(kind), alone=alone)
    if first.role == "mixed_out":
        made = _concatenated(x, first.n / first.k, code, has_block_scales)
        yield replace(made, instructions=counted(CONCATENATED), alone=alone)
    if first.role in ("ff_down", "text_ff_down", "mixed_out"):
        passes_of = (5, 3) if rounded_to is None else (_behind_product(rounded_to, chip),) * 2
        yield _pass("gate and residual, the last", 5 * v, 3 * v, *(count * v for count in passes_of), v)


def _behind_product(codes: Format, chip: str) -> int:
    """Return how often a gate and a residual take the bytes of a product of codes.

    Our kernel adds while it writes, where its tile leaves registers for that.
    """
    library = LIBRARY.get(codes.name)
    alone = any(row.plain and row.fits(codes.name, chip, MANY, True) for row in tuned_rows("scaled_matmul"))
    return 3 if alone or (library is not None and library.comes_first and chip in library.chips) else 1


def _concatenated(x: float, attended: float, code: float, has_block_scales: bool) -> Pass:
    """GELU, the concatenation with what attention made (that share of x) and the codes of both."""
    rounding = x + code if code else 0.0
    eager = 2 * x * (1 - attended) + 2 * x + rounding
    compiled = 2 * x + rounding
    optimized, both = (rounding, rounding) if code else (eager, compiled)
    every = attended * rounding if has_block_scales else rounding
    return _pass(CONCATENATED, eager, compiled, optimized, both, every)


def _pass(kind: str, *sizes: float, instructions: float = 0, alone: tuple[float, float] = (0, 0)) -> Pass:
    return Pass(kind, dict(zip(STATES, sizes, strict=True)), instructions, alone)


# --- steps


@dataclass(frozen=True)
class Work:
    """Work of a step on a chip: products, attention and its codes; and all passes."""

    steps: tuple[Step, ...]
    passes: tuple[Pass, ...]


def work_of(plan: Plan, forward: ForwardPass, chip: str, prefer: Prefer = "speed") -> Work:
    counted = ("matmul", "attention", "quantize q, k and v")
    return Work(
        tuple(step for step in steps(plan, forward, chip, prefer) if step.kind in counted),
        tuple(passes(plan, forward, chip, prefer)),
    )


def parts_of_step(work: Work, device: Device, state: str, *, hoisted: bool = False) -> dict[str, float]:
    """ms of products, modulation, attention and passes over memory."""
    spent = dict.fromkeys(("products", "modulation", "attention", "passes"), 0.0)
    for step in work.steps:
        is_modulation = step.part == "modulation"
        part = "modulation" if is_modulation else "products" if step.kind == "matmul" else "attention"
        seconds = step.seconds(device, "ideal" if state == "every fusion" else "fused")
        spent[part] += seconds / (DENOISING_STEPS if is_modulation and hoisted else 1)
    spent["passes"] = sum(each.seconds(device, state) for each in work.passes)
    return {part: 1e3 * seconds for part, seconds in spent.items()}


def modelled(plans: Mapping[str, Plan], config: Mapping[str, Any]) -> dict[str, Any]:
    """ms of a step by GPU, size and recipe; at 1024² of its passes, of what can be switched on, and of all its parts.

    plans: by recipe, of RECIPES. config: of the transformer.
    """
    found: dict[str, Any] = {"modelled": True, "text": 512, "batch": 1}
    found |= {"steps": [], "passes": [], "switches": [], "parts": [], "images": []}
    found["small"] = [_on_a_small_card(gpu, plans["nvfp4"], config) for gpu in SMALL]
    for gpu, pixels, recipe in itertools.product(GPUS, SIZES, RECIPES):
        plan, device, place = plans[recipe], find_device(gpu), {"gpu": gpu, "recipe": recipe}
        forward = forward_pass("flux", config, CallSize(1, pixels, pixels, text=512))
        work = work_of(plan, forward, device.chip)
        in_fp8 = work_of(replace(plan, attention="fp8"), forward, device.chip)
        found["steps"].append({**place, "pixels": pixels, **_rounded(_times(work, in_fp8, device))})
        if pixels == 1024:
            found["passes"] += [place | row for row in _kinds(plan, forward, device)]
            found["switches"] += [place | row for row in _switches(work, in_fp8, device)]
            today = parts_of_step(work, device, "optimized", hoisted=True)
            floor = parts_of_step(work, at_peak(device), "every fusion", hoisted=True)
            found["parts"].append(place | {"today": _rounded(today), "data sheet": _rounded(floor)})
            found["images"].append(place | _rounded(_images(today, device)))
    return found | {"goals": _goals(found["steps"])}


def _times(work: Work, in_fp8: Work, device: Device) -> dict[str, float]:
    """ms of a step as STATES has it, and then with more and more switched on, attention in fp8 from some point on.

    With "attention alone" and by a "package" that is all that was switched on in an optimized step.
    """
    times = {state: _sum(parts_of_step(work, device, state)) for state in STATES[:4]}
    times["hoisted"] = _sum(parts_of_step(work, device, "optimized", hoisted=True))
    times["fp8 attention"] = _sum(parts_of_step(in_fp8, device, "optimized", hoisted=True))
    times["attention alone"] = _sum(parts_of_step(in_fp8, device, "optimized"))
    if device.name in PACKAGE:
        quicker = replace(device, attention_fp8=PACKAGE[device.name])
        times["package"] = _sum(parts_of_step(in_fp8, quicker, "optimized"))
    times["every fusion"] = _sum(parts_of_step(in_fp8, device, "every fusion", hoisted=True))
    times["data sheet"] = _sum(parts_of_step(in_fp8, at_peak(device), "every fusion", hoisted=True))
    return times


def _images(step: Mapping[str, float], device: Device) -> dict[str, float]:
    """ms of an image by the number of computed steps, and of that of what runs once.

    step: ms of the parts of a step, with its share of the modulation that is made once.
    """
    once = sum(flops / device.flops("bf16") + size / device.bytes_per_second for flops, size in ONCE.values())
    once = 1e3 * once + DENOISING_STEPS * step["modulation"]
    each = _sum(step) - step["modulation"]
    return {"once": once, **{str(count): once + count * each for count in LISTS}}


def _on_a_small_card(gpu: str, plan: Plan, config: Mapping[str, Any]) -> dict[str, Any]:
    """ms of a step at 1024² in 4 bits that stay on the card, and in 16 bit, for which the link brings all weights."""
    device, forward = find_device(gpu), forward_pass("flux", config, CallSize(1, 1024, 1024, text=512))
    plain = in_16_bit(plan)
    parts = parts_of_step(work_of(plan, forward, device.chip, "memory"), device, "optimized")
    computed = _sum(parts_of_step(work_of(plain, forward, device.chip), device, "compiled"))
    weights = sum(resident_bytes(layer, device.chip) for layer in plain.layers)
    held = sum(resident_bytes(layer, device.chip, "memory") for layer in plan.layers)
    brought = weights / (1e6 * LINK * SMALL[gpu])
    times = _rounded({"16 bit computed": computed, "16 bit brought": brought, "nvfp4": _sum(parts)})
    return {"gpu": gpu, "held_gb": round(held / 1e9, 2), "weights_gb": round(weights / 1e9, 2), **times}


def at_peak(device: Device) -> Device:
    """The device at its data sheet's rates."""
    whole = Efficiency(1.0, "data sheet")
    matmul = dict.fromkeys(device.matmul, whole)
    return replace(device, matmul=matmul, attention=whole, attention_fp8=whole, streaming=whole, scalar=whole)


def _kinds(plan: Plan, forward: ForwardPass, device: Device) -> Iterator[dict[str, Any]]:
    """ms of each kind of passes by state."""
    spent: dict[str, dict[str, float]] = {}
    for each in passes(plan, forward, device.chip):
        kind = spent.setdefault(each.kind, dict.fromkeys(STATES, 0.0))
        for state in STATES:
            kind[state] += 1e3 * each.seconds(device, state)
    return ({"kind": kind, **_rounded(times)} for kind, times in spent.items())


def _switches(work: Work, in_fp8: Work, device: Device) -> Iterator[dict[str, Any]]:
    """ms of what two calls of fluxq change besides passes, before and after."""
    plain, changed = (parts_of_step(each, device, "optimized") for each in (work, in_fp8))
    once = parts_of_step(work, device, "optimized", hoisted=True)
    for switch, part, after in (
        ("modulation once per image", "modulation", once),
        ("attention in fp8", "attention", changed),
    ):
        yield {"switch": switch, **_rounded({"before": plain[part], "after": after[part]})}


def _goals(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """GOALS by the model, of what is optimized; modulation is in the step, as in those that flux_step.py measures."""
    rows = {row["recipe"]: row for row in found if (row["gpu"], row["pixels"]) == (GOALS_GPU, 1024)}
    goals = []
    for goal, (attention, at_least) in GOALS.items():
        for by, state in BY_ATTENTION[attention].items():
            ratio = rows["16 bit"]["compiled"] / rows["fp8"][state]
            met = ratio >= at_least
            goals.append({"goal": goal + by, "at_least": at_least, "modelled": round(ratio, 2), "met": met})
    return goals


def _sum(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(time, 3) for name, time in times.items()}


# --- tables of a page


def with_tables(page: str, found: Mapping[str, Any]) -> str:
    """A page with the tables of what `modelled` found between their marks."""
    for mark, rows in _tables(found).items():
        header, *body = rows
        table = "\n".join([_line(header), "|---" * len(header) + "|", *map(_line, body)])
        page = between(page, f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->", table)
    return page


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _tables(found: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Mark -> rows of cells, the first of which is the header."""
    steps_of = {(row["gpu"], row["pixels"], row["recipe"]): row for row in found["steps"]}
    return {
        "steps": _steps_table(steps_of),
        "sizes": _sizes_table(steps_of),
        "without a compiler": _kinds_table(found, steps_of, "eager", "optimized"),
        "with a compiler": _kinds_table(found, steps_of, "compiled", "both"),
        "left": _kinds_table(found, steps_of, "optimized", "every fusion"),
        "switches": _switches_table(found, steps_of),
        "parts": _parts_table(found),
        "goals": _goals_table(found),
        "small cards": _small_table(found),
        "lists": _lists_table(found),
        "rates": _rates_table(),
        "measured": _measured_table(steps_of),
    }


@functools.cache
def rates_of_a_step() -> dict[tuple[str, str], float]:
    """Return what an H200 reached at the shapes of a step: (scheme, implementation) -> TFLOP/s; passes: GB/s.

    Of products the FLOPs of all with more than 512 tokens over their time; of attention those of its one shape; of
    passes the bytes of a step's.
    """
    timed = json.loads(RATES_FILE.read_text(encoding="utf-8"))["results"]
    products = [row for row in timed if row["op"] in ("linear", "matmul")]
    us = {(row["scheme"], row["implementation"], row["m"], row["n"], row["k"]): row["us"] for row in products}
    shapes = [(count, shape) for count, shape in FLUX_STEP if shape[0] > 512]
    flops = sum(2.0 * count * m * n * k for count, (m, n, k) in shapes)
    found = {(row["scheme"], row["implementation"]): row["tflops"] for row in timed if row["op"] == "attention"}
    for key in dict.fromkeys((row["scheme"], row["implementation"]) for row in products):
        found[key] = flops / sum(count * us[*key, *shape] for count, shape in shapes) / 1e6
    moved, spent = 0.0, 0.0
    for row in timed:
        count = PASSES_OF_A_STEP.get((row["op"], row["scheme"]), 0)
        moved, spent = moved + count * row["mb"], spent + count * row["us"]
    return found | {("passes", "fp8"): 1e3 * moved / spent}


def _rates_table() -> list[list[str]]:
    rows = [["", "TFLOP/s", "of the data sheet's"]]
    device, found = find_device(GOALS_GPU), rates_of_a_step()
    for key, (what, arithmetic) in RATED.items():
        rows.append([what, f"{found[key]:.0f}", f"{found[key] / device.peaks[arithmetic]:.2f}"])
    passes = found["passes", "fp8"]
    return [
        *rows,
        ["our passes of an optimized step in fp8, GB/s", f"{passes:.0f}", f"{passes / device.bandwidth:.2f}"],
    ]


def _measured_table(steps_of: Steps) -> list[list[str]]:
    rows = [["", "ms", "over compiled 16 bit", "products", "attention", "passes", "in none of these", "modelled"]]
    for row in json.loads(STEP_FILE.read_text(encoding="utf-8"))["rows"]:
        low, ms, high = (1e3 * seconds for seconds in row["seconds"])
        ratio = "{1:.2f}x ({0:.2f} to {2:.2f})".format(*row["over_compiled_16bit"])
        parts = (f"{ms * row['parts'][part]:.1f}" for part in ("products", "attention", "passes", "gaps"))
        state = ("both" if row["mode"] == "compiled" else "optimized") if row["optimized"] else row["mode"]
        state = "attention alone" if row["attention"] == "fp8" else state
        modelled = steps_of[GOALS_GPU, row["pixels"], row["recipe"]][state]
        rows.append([row["row"], f"{ms:.1f} ({low:.1f} to {high:.1f})", ratio, *parts, f"{modelled:.1f}"])
    return rows


Steps = Mapping[tuple[str, int, str], Mapping[str, Any]]


def _steps_table(steps_of: Steps) -> list[list[str]]:
    rows = [["", *COLUMNS.values()]]
    for gpu, recipe in itertools.product(GPUS, RECIPES):
        row, baseline = steps_of[gpu, 1024, recipe], steps_of[gpu, 1024, "16 bit"]["compiled"]
        rows.append([f"{gpu}, {recipe}", *(f"{row[state]:.1f} ({baseline / row[state]:.2f}x)" for state in COLUMNS)])
    return rows


def _sizes_table(steps_of: Steps) -> list[list[str]]:
    shown = ("hoisted", "fp8 attention")
    places = [(pixels, state) for pixels in (512, 2048) for state in shown]
    rows = [["", *(f"{pixels}², {COLUMNS[state]}" for pixels, state in places)]]
    for gpu, recipe in itertools.product(GPUS, RECIPES):
        cells = [
            (steps_of[gpu, pixels, recipe][state], steps_of[gpu, pixels, "16 bit"]["compiled"])
            for pixels, state in places
        ]
        rows.append([f"{gpu}, {recipe}", *(f"{ms:.1f} ({baseline / ms:.2f}x)" for ms, baseline in cells)])
    return rows


def _kinds_table(found: Mapping[str, Any], steps_of: Steps, before: str, after: str) -> list[list[str]]:
    """ms of passes in two states, and how much of the step before goes."""
    rows = {(row["gpu"], row["recipe"], row["kind"]): row for row in found["passes"]}
    table = [["", *(f"{gpu}, {recipe}" for gpu, recipe in SHOWN)]]
    for kind in dict.fromkeys(row["kind"] for row in found["passes"]):
        cells = [(rows[gpu, recipe, kind], steps_of[gpu, 1024, recipe][before]) for gpu, recipe in SHOWN]
        table.append([kind, *(_change(row[before], row[after], step) for row, step in cells)])
    return table


def _switches_table(found: Mapping[str, Any], steps_of: Steps) -> list[list[str]]:
    rows = {(row["gpu"], row["recipe"], row["switch"]): row for row in found["switches"]}
    table = [["", *(f"{gpu}, {recipe}" for gpu, recipe in SHOWN)]]
    for switch in dict.fromkeys(row["switch"] for row in found["switches"]):
        cells = [(rows[gpu, recipe, switch], steps_of[gpu, 1024, recipe]["optimized"]) for gpu, recipe in SHOWN]
        table.append([switch, *(_change(row["before"], row["after"], step) for row, step in cells)])
    return table


def _change(before: float, after: float, step: float) -> str:
    if before == after:
        return f"{before:.2f}"
    return f"{before:.2f} → {after:.2f} ({100 * (after - before) / step:+.1f} %)"


def _parts_table(found: Mapping[str, Any]) -> list[list[str]]:
    kept = ("products", "attention", "passes")
    table = [["", *(f"{part}, {when}" for when in ("today", "data sheet") for part in kept)]]
    for row in found["parts"]:
        cells = []
        for when in ("today", "data sheet"):
            whole = _sum(row[when])
            cells += [f"{row[when][part]:.1f} ({100 * row[when][part] / whole:.0f} %)" for part in kept]
        table.append([f"{row['gpu']}, {row['recipe']}", *cells])
    return table


def _goals_table(found: Mapping[str, Any]) -> list[list[str]]:
    table = [["over compiled 16 bit", "goal", "modelled", ""]]
    for row in found["goals"]:
        met = "met" if row["met"] else "not met"
        table.append([row["goal"], f"{row['at_least']:.1f}x", f"{row['modelled']:.2f}x", met])
    return table


def _small_table(found: Mapping[str, Any]) -> list[list[str]]:
    header = (
        "16 bit, computed, ms",
        "its weights, GB",
        "brought, ms",
        "nvfp4, GB that stay",
        "ms",
        "over offloaded 16 bit",
    )
    table = [["", *header]]
    for row in found["small"]:
        offloaded = max(row["16 bit computed"], row["16 bit brought"])
        cells = (f"{row['16 bit computed']:.0f}", f"{row['weights_gb']:.1f}", f"{row['16 bit brought']:.0f}")
        held = f"{row['held_gb']:.1f}", f"{row['nvfp4']:.0f}", f"{offloaded / row['nvfp4']:.2f}x"
        table.append([row["gpu"], *cells, *held])
    return table


def _lists_table(found: Mapping[str, Any]) -> list[list[str]]:
    table = [["", "once, ms", *(f"{count} of {DENOISING_STEPS} steps" for count in LISTS)]]
    for row in found["images"]:
        whole = row[str(DENOISING_STEPS)]
        cells = (f"{row[str(count)]:.0f} ({whole / row[str(count)]:.2f}x)" for count in LISTS)
        table.append([f"{row['gpu']}, {row['recipe']}", f"{row['once']:.0f}", *cells])
    return table


# Computed steps of an image: all, and lists.
LISTS = (DENOISING_STEPS, 15, 11, 9)
# What runs once for an image of 1024² in 16 bit -> FLOPs of its products and convolutions, and bytes that its other
# operators move, as diffusers and transformers run it with 512 and 77 tokens; a test counts them.
ONCE = {"T5-XXL": (4.845e12, 33.4e9), "CLIP-L": (0.0133e12, 0.106e9), "FLUX.1 VAE": (10.47e12, 27.5e9)}
# Kind of pass of a kernel of ours -> its name in INSTRUCTIONS.
NORM, ALONE, CONCATENATED = "norm, modulation, codes", "codes of the attention", "GELU, concatenation, codes"
COUNTED_AS = {NORM: "norm", ALONE: "quantize", "GELU, codes": "activation", CONCATENATED: "concatenation"}

# What the tables show of `_times`, and what they call it.
COLUMNS = {
    "eager": "eager",
    "compiled": "compiled",
    "optimized": "optimized",
    "both": "optimized, compiled",
    "hoisted": "optimized, modulation once",
    "fp8 attention": "and attention in fp8",
    "every fusion": "and every fusion",
    "data sheet": "all that, at the data sheet's rates",
}
# Left out are int8, whose passes are those of fp8, and 4 bits on the H200, which become fp8.
SHOWN = (("h200", "fp8"), ("b200", "fp8"), ("b200", "nvfp4"), ("rtx5090", "fp8"), ("rtx5090", "nvfp4"))

# In fp8 on this GPU at 1024 x 1024, over 16 bit in compiled blocks: goal -> (attention, at least).
GOALS_GPU = "h200"
GOALS = {"fp8": ("16bit", 1.6), "fp8, attention too": ("fp8", 1.8)}
# Attention -> words for a goal -> the column of its step.
BY_ATTENTION = {"16bit": {"": "optimized"}, "fp8": {"": "attention alone", ", by FlashAttention-3": "package"}}
# What a package reaches in fp8 that computes our op where `fluxq doctor` proved and timed it.
PACKAGE = {"H200 SXM": Efficiency(0.46, "FlashAttention-3, 4k tokens, heads of 128 on an H100: its paper")}

# What one call measured on an H200, and what the table of it shows: (scheme, implementation) -> words, arithmetic.
RATES_FILE = Path(__file__).with_name("h200_rates.json")
STEP_FILE = Path(__file__).with_name("h200_flux_step.json")  # what `flux_step.py` measured there
SDPA = "F.scaled_dot_product_attention"
RATED = {
    ("16bit", "F.linear"): ("products in bf16, the library", "bf16"),
    ("fp8-fp8", "F.scaled_mm"): ("in fp8, the library, fast accumulation", "fp8"),
    ("fp8-fp8", "F.scaled_mm exact"): ("in fp8, the library, exact accumulation", "fp8"),
    ("fp8-fp8", "scaled_matmul"): ("in fp8, our kernel", "fp8"),
    ("int8-int8", "scaled_matmul"): ("in int8, our kernel", "int8"),
    ("int8-int8", "torch._int_mm"): ("in int8, the library, without scales and bias", "int8"),
    ("16bit", f"{SDPA} cudnn"): ("attention in 16 bit, cuDNN", "bf16"),
    ("16bit", f"{SDPA} flash"): ("attention in 16 bit, FlashAttention-2 of torch", "bf16"),
    ("fp8", "attention_fp8"): ("attention in fp8, our kernel, with its codes", "fp8"),
    ("fp8", "attention_fp8 warps apart"): ("attention in fp8, our kernel of warps apart, with its codes", "fp8"),
}
# (op, scheme) of a row of the file -> how often an optimized step in fp8 does as much.
PASSES_OF_A_STEP = {
    ("adaln_quantize", "fp8"): 76,
    ("act_quantize", "fp8"): 19 * 4608 / 4096,
    ("act_quantize", "fp8 beside"): 38,
    ("qk_norm_rope", "16bit"): 57,
}
