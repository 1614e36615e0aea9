"""Modelled time of a step of FLUX.1-dev: the passes over memory of its blocks, in every way that they can be run.

    eager              one kernel for each operator of diffusers' blocks; every quantized layer rounds its own input
    compiled           elementwise operators join each other and a norm before them, as Inductor does; ops stay whole
    optimized          the blocks of `fluxq.optimize`
    both               these, compiled
    every fusion       what products could take or write at their ends: q/k norm, rotation, GELU, gates, joined tokens

Products and attention are priced by recipes/cost.py, and so are rates: a pass takes its bytes over what a GPU attains.
tests/benchmarks/test_flux_step.py runs a block of each kind and finds the bytes of "eager" and "optimized" in its
operators. Left out are launches and what is read for all tokens: vectors, tables of angles, weights of norms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.pages import between
from fluxq.recipes.cost import QUERY_AND_KEY, STREAMS, ForwardPass, Step, code_bytes, forward_pass, route, steps
from fluxq.recipes.devices import Device, Efficiency, find_device
from fluxq.recipes.plan import MODULATION_ROLE, LayerPlan, Plan
from fluxq.recipes.workloads import CallSize

STATES = ("eager", "compiled", "optimized", "both", "every fusion")
GPUS, RECIPES, SIZES = ("h200", "b200", "rtx5090"), ("16 bit", "fp8", "int8", "nvfp4"), (512, 1024, 2048)
DENOISING_STEPS = 28  # of an image, which share one product for their modulation once it is hoisted
RMS, ROTATION = 2, 26  # of q's or k's bytes, eager: one kernel; and float, negate, stack, 2 products, sum, to 16 bit


@dataclass(frozen=True)
class Pass:
    """Passes over memory of one group of layers. bytes: by state."""

    kind: str
    bytes: Mapping[str, float]


def passes(plan: Plan, forward: ForwardPass, chip: str) -> Iterator[Pass]:
    """All passes of one step of FLUX.1 but those within products and attention.

    ValueError for a plan whose groups mix formats, or with more than rounding before a product: such are not modelled.
    """
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        if layer.role not in ("kept", MODULATION_ROLE):
            groups.setdefault(layer.group or layer.name, []).append(layer)
    for layers in groups.values():
        yield from _group(layers, forward, chip)


def _group(layers: list[LayerPlan], forward: ForwardPass, chip: str) -> Iterator[Pass]:
    """Yield the passes that make the input of a group, and those that follow its layers."""
    first, found = layers[0], {route(layer.scheme, chip).activations for layer in layers}
    if len(found) > 1 or any(layer.scheme and (layer.scheme.is_transformed or layer.scheme.rank) for layer in layers):
        raise ValueError(f"{first.name}: its group mixes formats, or does more than round: not modelled here")
    (rounded_to,) = found
    m = forward.batch * forward.tokens(STREAMS.get(first.role, "image"))
    x, v = 2 * m * first.k, 2 * m * first.n
    code = code_bytes(rounded_to.name, m, first.k) if rounded_to else 0.0
    rounding = x + code if rounded_to else 0.0  # of one layer's input, in a pass of its own
    has_block_scales = bool(rounded_to and rounded_to.group_size)
    if first.made_by == "norm":
        alone, fused = len(layers) * rounding, rounding or 2 * x
        yield _pass("norm, modulation, codes", 6 * x + alone, 2 * x + alone, fused, fused, fused)
        for layer in layers:
            if layer.name.endswith(QUERY_AND_KEY):
                y = 2 * m * layer.n
                yield _pass("q/k norm and rotation", (RMS + ROTATION) * y, 2 * y, 2 * y, 2 * y, 0)
    if first.role in ("qkv", "single_in"):
        both = 2 * forward.batch * forward.tokens("both") * first.k  # text and image, side by side
        copies = (6, 2, 6, 6) if first.role == "qkv" else (2, 2, 2, 2)  # q, k and v; where it is rotated, two come free
        yield _pass("text and image joined", *(count * both for count in copies), 0)
    if first.role in ("attn_out", "text_attn_out"):
        yield _pass("codes of the attention", *[rounding] * 5)
        yield _pass("gate and residual, the first", 5 * v, 2 * v, 2 * v, 2 * v, v)
    if first.role in ("ff_down", "text_ff_down"):
        in_product = 0 if has_block_scales else rounding  # a row's scale waits for all of the row
        fused = rounding or 2 * x
        yield _pass("GELU, codes", 2 * x + rounding, 2 * x + rounding, fused, fused, in_product)
    if first.role == "mixed_out":
        yield _concatenated(x, first.n / first.k, code, has_block_scales)
    if first.role in ("ff_down", "text_ff_down", "mixed_out"):
        yield _pass("gate and residual, the last", 5 * v, 3 * v, 5 * v, 3 * v, v)


def _concatenated(x: float, attended: float, code: float, has_block_scales: bool) -> Pass:
    """GELU, the concatenation with what attention made (that share of x) and the codes of both."""
    rounding = x + code if code else 0.0
    eager = 2 * x * (1 - attended) + 2 * x + rounding
    compiled = 2 * x + rounding
    optimized, both = (rounding, rounding) if code else (eager, compiled)
    every = attended * rounding if has_block_scales else rounding
    return _pass("GELU, concatenation, codes", eager, compiled, optimized, both, every)


def _pass(kind: str, *sizes: float) -> Pass:
    return Pass(kind, dict(zip(STATES, sizes, strict=True)))


# --- steps


@dataclass(frozen=True)
class Work:
    """Work of a step on a chip: products, attention and its codes; and the bytes of all passes, by state."""

    steps: tuple[Step, ...]
    bytes: Mapping[str, float]


def work_of(plan: Plan, forward: ForwardPass, chip: str) -> Work:
    counted = ("matmul", "attention", "quantize q, k and v")
    kinds = list(passes(plan, forward, chip))
    return Work(
        tuple(step for step in steps(plan, forward, chip) if step.kind in counted),
        {state: sum(each.bytes[state] for each in kinds) for state in STATES},
    )


def parts_of_step(work: Work, device: Device, state: str, *, hoisted: bool = False) -> dict[str, float]:
    """ms of products, modulation, attention and passes over memory."""
    spent = dict.fromkeys(("products", "modulation", "attention", "passes"), 0.0)
    for step in work.steps:
        is_modulation = step.part == "modulation"
        part = "modulation" if is_modulation else "products" if step.kind == "matmul" else "attention"
        seconds = step.seconds(device, "ideal" if state == "every fusion" else "fused")
        spent[part] += seconds / (DENOISING_STEPS if is_modulation and hoisted else 1)
    spent["passes"] = work.bytes[state] / device.bytes_per_second
    return {part: 1e3 * seconds for part, seconds in spent.items()}


def modelled(plans: Mapping[str, Plan], config: Mapping[str, Any]) -> dict[str, Any]:
    """ms of a step by GPU, size and recipe; at 1024² of its passes, of what can be switched on, and of all its parts.

    plans: by recipe, of RECIPES. config: of the transformer.
    """
    found: dict[str, Any] = {"modelled": True, "text": 512, "batch": 1}
    found |= {"steps": [], "passes": [], "switches": [], "parts": []}
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
    return found | {"goals": _goals(found["steps"])}


def _times(work: Work, in_fp8: Work, device: Device) -> dict[str, float]:
    """ms of a step as STATES has it, and then with more and more switched on, attention in fp8 from some point on."""
    times = {state: _sum(parts_of_step(work, device, state)) for state in STATES[:4]}
    times["hoisted"] = _sum(parts_of_step(work, device, "optimized", hoisted=True))
    times["fp8 attention"] = _sum(parts_of_step(in_fp8, device, "optimized", hoisted=True))
    times["every fusion"] = _sum(parts_of_step(in_fp8, device, "every fusion", hoisted=True))
    times["data sheet"] = _sum(parts_of_step(in_fp8, at_peak(device), "every fusion", hoisted=True))
    return times


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
            kind[state] += 1e3 * each.bytes[state] / device.bytes_per_second
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
    """GOALS by the model, of what is optimized and takes its modulation out of the step."""
    rows = {row["recipe"]: row for row in found if (row["gpu"], row["pixels"]) == ("h200", 1024)}
    goals = []
    for goal, (attention, at_least) in GOALS.items():
        ratio = rows["16 bit"]["compiled"] / rows["fp8"]["hoisted" if attention == "16bit" else "fp8 attention"]
        goals.append({"goal": goal, "at_least": at_least, "modelled": round(ratio, 2), "met": ratio >= at_least})
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
    }


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

# In fp8 on the H200 at 1024 x 1024, over 16 bit in compiled blocks: goal -> (attention, at least).
GOALS = {"fp8": ("16bit", 1.5), "fp8, attention too": ("fp8", 1.8)}
