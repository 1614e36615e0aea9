"""Cost of a quantized layer on a CPU beside fp32 and bf16: every shipped recipe at FLUX.1-dev's shapes, one thread.

    python benchmarks/cpu_layers.py                      cpu_layers.json and the tables of docs/gpu.md
    python benchmarks/cpu_layers.py --small --out FILE   that it runs

Of one set of instructions everything is timed in turns in one process, in an order that rotates; a ratio is the median
over rounds of the times of one turn, with its quartiles. Seconds are those of the processor, which a neighbour on a
shared machine lengthens less than those of the clock. A recipe's layer has its main formats and every step that the
recipe may try, which is the dearest form: steps that do not pay for themselves are left out when a model is quantized.
Where a rank may be spent on deflation half of it is. It is timed as it is loaded ("codes"), and after
`fluxq.prepare(prefer="speed")` and `prefer="decoded"`; x is bf16 where the CPU multiplies that by itself, else fp32.
What a decoded layer takes longer than the fp32 product is rounding x, its steps and its 16-bit branches.

A CPU with fewer instructions is imitated by variables that libraries read, and for one without oneDNN's product of int8
that is left out: the file says which, and what the machine has.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # fluxq need not be installed

import click  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import fluxq  # noqa: E402
from fluxq.base.console import logger  # noqa: E402
from fluxq.base.devices import commit, flags, instructions, versions  # noqa: E402
from fluxq.base.files import read_json, write_json, write_text  # noqa: E402
from fluxq.kernels import ops  # noqa: E402
from fluxq.kernels.linear import QuantLinear, branch_shapes  # noqa: E402
from fluxq.kernels.tensor import QuantizedTensor  # noqa: E402
from fluxq.recipes.formats import Scheme  # noqa: E402
from fluxq.recipes.recipe import load_recipe, shipped_recipes  # noqa: E402
from fluxq.runtime.prepare import Prefer  # noqa: E402


@dataclass(frozen=True)
class Isa:
    """Instructions to time. variables: that libraries read; onednn: whether torch may use it. needs: a flag."""

    name: str
    variables: Mapping[str, str]
    onednn: bool = True
    needs: str = ""


@dataclass(frozen=True)
class Goal:
    """Of rows of a layout, of one recipe or ("") all: the ratio called `ratio` is at most `most`.

    only: names of instructions of which the CPU must have one for this to be asked; NONE: it must not have any.
    """

    goal: str
    layout: str
    recipe: str
    ratio: str
    most: float
    only: tuple[str, ...] = ()


@click.command()
@click.option("--small", is_flag=True, help="Small layers, few rounds and this CPU alone: that it runs.")
@click.option("--rounds", default=9, show_default=True, help="Turns of everything; twice as many at one token.")
@click.option("--isa", "only", multiple=True, help="Only these of ISAS (repeatable).")
@click.option("--in-process", "here", help="Time this one of ISAS here, and nothing else.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Result file; without it tables too.")
def main(small: bool, rounds: int, only: tuple[str, ...], here: str | None, out: Path | None) -> None:
    """Time layers of every recipe beside fp32 and bf16."""
    known = {isa.name: isa for isa in ISAS}
    unknown = {*only, *([here] if here else [])} - known.keys()
    if unknown:
        raise click.UsageError(f"no instructions are called {unknown.pop()!r}; there are: {', '.join(known)}")
    if here or small:
        write_json(out or Path("cpu_layers.json"), timed(known[here or NATIVE], SMALL if small else SHAPES, rounds))
        return
    chosen = [isa for isa in ISAS if (not only or isa.name in only) and (not isa.needs or isa.needs in flags())]
    found = [_in_another_process(isa, rounds) for isa in chosen]
    about = {"commit": commit(), "versions": versions(), "flags": flags(), "threads": 1}
    write_json(out or RESULT, about | {"measured": found})
    if out is None:
        write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), read_json(RESULT)))
    for part in found:
        for goal in part["goals"]:
            click.echo(f"{part['instructions']}: {goal['goal']}: {goal['measured']}, {goal['verdict']}")
    click.echo(f"results in {out or RESULT}")


def _in_another_process(isa: Isa, rounds: int) -> dict[str, Any]:
    """Return what another process measured: variables that libraries read when they start must be set before."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, __file__, "--in-process", isa.name, "--rounds", str(rounds), "--out", str(out)]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | isa.variables, check=True)
        return read_json(out)


def timed(isa: Isa, shapes: Sequence[tuple[int, int, int]], rounds: int) -> dict[str, Any]:
    """Everything under one set of instructions, in this process."""
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(isa.onednn)
    level = logger.level
    logger.setLevel(logging.ERROR)  # layers that stay as they are are meant to
    found = [row for shape in shapes for row in time_shape(*shape, rounds)]
    logger.setLevel(level)
    way, why = ops.implementation(Scheme.parse("int8-int8"), "cpu")
    used = instructions()
    return {
        "isa": isa.name,
        "instructions": str(used) + ("" if isa.onednn else ", without oneDNN"),
        "limited_by": dict(isa.variables) | ({} if isa.onednn else {"torch": "oneDNN is switched off"}),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "baseline": "fp32, bf16 stands beside it" if used.multiply_bf16 else "the faster of fp32 and bf16",
        "int8 by": f"{way}: {why}",
        "goals": [_judged(goal, found, used.products) for goal in GOALS],
        "rows": found,
    }


def time_shape(m: int, n: int, k: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of an (n, k) layer on m tokens: fp32, bf16, and every recipe in every layout."""
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(shape, generator=generator) for shape in ((m, k), (n, k), (n,)))
    w /= k**0.5
    half = tuple(tensor.bfloat16() for tensor in (x, w, bias))
    works: dict[Any, Callable[[], Tensor]] = {"fp32": partial(F.linear, x, w, bias), "bf16": partial(F.linear, *half)}
    dtype = torch.bfloat16 if instructions().multiply_bf16 else torch.float32
    layers: dict[tuple[str, str], QuantLinear] = {}
    for recipe, (layout, prefer) in product(shipped_recipes(), LAYOUTS.items()):
        layer = layer_of(scheme_of(recipe, n, k), w, bias, dtype)
        if prefer and not fluxq.prepare(nn.Sequential(layer), device="cpu", prefer=prefer):
            continue  # that is the layer as it was loaded
        layers[recipe, layout] = layer
        works[recipe, layout] = partial(layer, x.to(dtype))
        if layout == "codes":
            works[recipe, ALONE] = _alone(layer, x)
    times = _in_turns(works, rounds if m > 1 else 2 * rounds)
    shape = {"m": m, "n": n, "k": k, "x": str(dtype).removeprefix("torch.")}
    baseline = "fp32" if instructions().multiply_bf16 else min(("fp32", "bf16"), key=lambda name: min(times[name]))
    plain = [shape | {"layer": name, "ms": _milliseconds(times[name])} for name in ("fp32", "bf16")]
    rows = []
    for (recipe, layout), layer in layers.items():
        took = times[recipe, layout]
        row = {"layer": recipe, "layout": layout, "scheme": str(layer.scheme), "ms": _milliseconds(took)}
        row |= {"bytes": sum(tensor.nbytes for tensor in layer.parameters())}
        row |= {name: _ratio(took, times[over]) for name, over in (("fp32", "fp32"), ("bf16", "bf16"))}
        row |= {"baseline": row[baseline] | {"is": baseline}}
        if layout == "codes" and ops.multiplies_codes(layer.scheme.weights, layer.scheme.activations):
            row |= {"product of codes alone over bf16": _ratio(times[recipe, ALONE], times["bf16"])}
        elif layout == "codes":
            row |= {"decoding over fp32": _ratio(times[recipe, ALONE], times["fp32"])}
        rows.append(shape | row)
    return plain + rows


def _alone(layer: QuantLinear, x: Tensor) -> Callable[[], Tensor]:
    """Return the part of a layer's work that is neither the fp32 product nor about x.

    That is decoding its codes, or of int8 the product of codes.
    """
    if ops.multiplies_codes(layer.scheme.weights, layer.scheme.activations):
        codes = ops.quantize_activation(x, layer.scheme.weights).codes
        return partial(ops.int8_product, codes, layer.quantized_weight.codes)
    return layer.quantized_weight.operand


def scheme_of(recipe: str, n: int, k: int) -> Scheme:
    """A recipe's main formats, with every step that it may try."""
    _, whole = load_recipe(recipe)
    entry = whole.components["transformer"]
    weights, activations = entry.weights, entry.activations
    row = activations.row if activations else None
    rank = entry.low_rank.rank_of(n, k) if entry.low_rank else 0
    deflated = rank // 2 if entry.low_rank and entry.low_rank.deflate else 0
    return Scheme(
        weights.row,
        row,
        static_input=bool(row and row.two_level and whole.has_static_scales(entry)),
        rank=rank - deflated,
        center="center" in entry.transforms,
        smooth="smooth" in entry.transforms,
        deflate=deflated,
        hadamard=128 if "hadamard" in entry.transforms else 0,
        four_over_six=bool(activations and activations.four_over_six),
    )


def layer_of(scheme: Scheme, w: Tensor, bias: Tensor, dtype: torch.dtype) -> QuantLinear:
    """A layer that computes in `dtype`; what stands beside its weight is drawn, which changes no time."""
    n, k = w.shape
    generator = torch.Generator().manual_seed(1)
    branches = {name: torch.randn(shape, generator=generator) for name, shape in branch_shapes(scheme, n, k).items()}
    branches = {name: (tensor / k**0.5 if tensor.ndim == 2 else tensor).to(dtype) for name, tensor in branches.items()}
    if scheme.smooth:
        branches["pre_quant_scale"] = branches["pre_quant_scale"].abs() + 0.5
    static = torch.tensor(0.01) if scheme.static_input else None
    return QuantLinear.from_quantized(
        QuantizedTensor.quantize(w, scheme.weights), bias.to(dtype), scheme, static, branches
    )


def _in_turns(works: Mapping[Any, Callable[[], Tensor]], rounds: int) -> dict[Any, list[float]]:
    """Seconds of each, of every round; in another order each time, after a first one that is not counted."""
    order = [*works]
    times: dict[Any, list[float]] = {name: [] for name in order}
    with torch.inference_mode():
        for number in range(-1, rounds):
            start = number % len(order)
            for name in order[start:] + order[:start]:
                seconds = _seconds(works[name])
                if number >= 0:
                    times[name].append(seconds)
    return times


def _seconds(work: Callable[[], Tensor]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of the times of each round: median and quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return {"ratio": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def _milliseconds(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def _judged(goal: Goal, rows: Sequence[Mapping[str, Any]], products: tuple[str, ...]) -> dict[str, Any]:
    """Return a goal's text, the worst of its rows by their median, and how many of them are within it."""
    is_asked = not goal.only or (not products if goal.only == NONE else not {*goal.only}.isdisjoint(products))
    meant = [row for row in rows if is_asked and row["m"] > 1 and row.get("layout") == goal.layout]
    meant = [row for row in meant if goal.recipe in ("", row["layer"]) and goal.ratio in row]
    if not meant:
        return {"goal": goal.goal, "measured": "", "verdict": "not asked of this CPU"}
    worst = max(meant, key=lambda row: row[goal.ratio]["ratio"])
    found = worst[goal.ratio]
    where = f"{worst['layer']} at {worst['n']} x {worst['k']}"
    within = sum(row[goal.ratio]["ratio"] <= goal.most for row in meant)
    return {
        "goal": goal.goal,
        "measured": f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f}), {where}",
        "verdict": "met" if within == len(meant) else f"met by {within} of {len(meant)} layers",
    }


def with_tables(page: str, found: Mapping[str, Any]) -> str:
    """A page with the tables of what was measured between their marks."""
    for mark, rows in (("cpu layers", _layers_table(found)), ("cpu goals", _goals_table(found))):
        before, begin, rest = page.partition(f"<!-- {mark}: begin -->\n")
        _, end, after = rest.partition(f"<!-- {mark}: end -->")
        if not begin or not end:
            raise ValueError(f"the page has no marks <!-- {mark}: begin --> and <!-- {mark}: end -->")
        header, *body = (f"| {' | '.join(cells)} |" for cells in rows)
        page = before + begin + "\n".join([header, "|---" * len(rows[0]) + "|", *body]) + "\n" + end + after
    return page


def _layers_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Layers of the first of SHAPES: a row for each recipe, its layouts side by side for each set of instructions."""
    m, n, k = SHAPES[0]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for part in found["measured"]:
        rows = [row for row in part["rows"] if (row["m"], row["n"], row["k"]) == (m, n, k)]
        bf16, fp32 = (next(row["ms"] for row in rows if row["layer"] == name) for name in ("bf16", "fp32"))
        baseline = next(row["baseline"]["is"] for row in rows if "baseline" in row)
        cells["bf16", part["instructions"]] = {"": f"{bf16 / {'fp32': fp32, 'bf16': bf16}[baseline]:.2f}"}
        for row in rows:
            if "layout" in row:
                ratios = cells.setdefault((row["layer"], part["instructions"]), {})
                ratios[row["layout"]] = f"{row['baseline']['ratio']:.2f}"
    names = [part["instructions"] for part in found["measured"]]
    layers = dict.fromkeys(layer for layer, _ in cells)
    body = [
        [f"`{layer}`" if layer != "bf16" else layer, *(_side_by_side(cells[layer, name]) for name in names)]
        for layer in layers
    ]
    return [["", *names], *body]


def _side_by_side(ratios: Mapping[str, str]) -> str:
    return ratios[""] if "" in ratios else " / ".join(ratios.get(layout, "–") for layout in LAYOUTS)


def _goals_table(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "", "worst layer (quartiles)", ""]]
    for part in found["measured"]:
        asked = [goal for goal in part["goals"] if goal["measured"]]
        rows += [[part["instructions"], goal["goal"], goal["measured"], goal["verdict"]] for goal in asked]
    return rows


RESULT, PAGE = ROOT / "benchmarks" / "cpu_layers.json", ROOT / "docs" / "gpu.md"
NATIVE = "native"
NONE = ("none",)
_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
ISAS = (
    Isa(NATIVE, {}),
    Isa("vnni", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, needs="avx512_bf16"),
    Isa("avx2", _AVX2, needs="avx512f"),
    Isa("avx2 without onednn", _AVX2, onednn=False, needs="avx2"),
)
# How `fluxq.prepare` is asked for each layout, None where it is not.
LAYOUTS: dict[str, Prefer | None] = {"codes": None, "speed": "speed", "decoded": "decoded"}
ALONE = "alone"  # the name of a work
SHAPES = ((320, 12288, 3072), (320, 3072, 12288), (320, 3072, 3072), (1, 12288, 3072))  # M, N, K
SMALL = ((8, 256, 384), (1, 256, 384))
GOALS = (
    Goal("every recipe from its codes: at most 1.5 times the baseline", "codes", "", "baseline", 1.5),
    Goal("every recipe decoded ahead: at most 1.15 times the baseline", "decoded", "", "baseline", 1.15),
    Goal("decoding alone: at most half of the fp32 product", "codes", "", "decoding over fp32", 0.5),
    Goal("int8 without VNNI: at most 1.3 times fp32", "codes", "int8", "fp32", 1.3, NONE),
    Goal("int8 with VNNI: at most 0.6 times bf16", "codes", "int8", "bf16", 0.6, ("VNNI",)),
)


if __name__ == "__main__":
    main()
