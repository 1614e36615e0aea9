"""Cost of one denoising step of a FLUX.1-dev-shaped transformer on this device, in 16 bit and quantized.

    python benchmarks/flux_step.py --out flux_step.json                        19+38 blocks on a GPU, random weights
    python benchmarks/flux_step.py --device cpu --hidden 256 --blocks 1+1 --pixels 128 --text 32       that it runs
    python benchmarks/flux_step.py --modelled                flux_step_modelled.json and the tables of docs/speed.md

Every row of ROWS is timed in turn with compiled 16 bit, so that clocks and neighbours are the same for both; a speed-up
is the ratio of such rounds, with their quartiles. A round is several steps one behind the other, of which the first,
that finds an idle device, is not counted. Shapes are compiled one by one, none as a variable. On a GPU a step is also
taken apart: device time of products, attention and passes over memory by the names of the kernels that ran, and what is
left of the step is launch gaps. Weights are what the class starts with, rounded to nearest; input scales come from one
pass in 16 bit. Attention in 16 bit is pinned, for the baseline and for rows: to cuDNN's where torch has that for the
GPU, else to flash. The result file is written again after each row, before it is taken apart and after: a row that
cannot be measured says why, and the goals of flux_modelled.py whether they are met. A ratio counts for a goal only on
that goal's GPU, and if the profiler saw the attention kernels of both, and they are what they should be. `--resume`
measures what the file lacks, `--minutes` ends in time.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]  # fluxq need not be installed

import click  # noqa: E402
import flux_modelled  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from full_size import random_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention import sdpa_kernel  # noqa: E402

import fluxq  # noqa: E402
from benchmarks.kernels import workloads  # noqa: E402
from benchmarks.kernels.apart import apart  # noqa: E402
from benchmarks.kernels.same_bits import not_proven  # noqa: E402
from benchmarks.kernels.tune import DRY_CHIP  # noqa: E402
from benchmarks.sources import sources  # noqa: E402
from fluxq.base.console import first_line  # noqa: E402
from fluxq.base.devices import commit, cpu_name  # noqa: E402
from fluxq.base.files import write_json, write_text  # noqa: E402
from fluxq.eval.speed.machine import Machine, describe, machine_of  # noqa: E402
from fluxq.eval.speed.speed import device_row  # noqa: E402
from fluxq.kernels import dispatch, findings  # noqa: E402
from fluxq.kernels.encode import global_scale_for  # noqa: E402
from fluxq.kernels.linear import QuantLinear  # noqa: E402
from fluxq.kernels.tensor import QuantizedTensor  # noqa: E402
from fluxq.kernels.tiles import chip_of  # noqa: E402
from fluxq.recipes.all_families import FAMILIES  # noqa: E402
from fluxq.recipes.cost import forward_pass, in_16_bit, route  # noqa: E402
from fluxq.recipes.formats import Scheme  # noqa: E402
from fluxq.recipes.plan import (  # noqa: E402
    MODULATION_ROLE,
    LinearShape,
    Plan,
    make_plan,
)
from fluxq.recipes.recipe import load_recipe  # noqa: E402
from fluxq.recipes.workloads import CallSize  # noqa: E402

FAMILY = FAMILIES["flux"]
Mode = Literal["eager", "compiled"]


@dataclass(frozen=True)
class Row:
    """One way to compute a step. recipe: None is 16 bit. prefer: as `fluxq.prepare` takes it. peer: of PEERS.

    attention: as `fluxq.set_attention` takes it. graph: whether `fluxq.capture` replays it, which needs a GPU.
    """

    name: str
    mode: Mode
    recipe: str | None = None
    prefer: Literal["speed", "memory"] = "speed"
    optimized: bool = False
    attention: Literal["16bit", "fp8"] = "16bit"
    graph: bool = False
    peer: str | None = None


@click.command()
@click.option("--device", default="cuda", show_default=True, help="Torch device that computes.")
@click.option("--hidden", default=3072, show_default=True, help="Channels; a multiple of 128.")
@click.option("--blocks", default="19+38", show_default=True, help="Double and single blocks.")
@click.option("--pixels", "sizes", multiple=True, type=int, default=(512, 1024, 2048), show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4), show_default=True)
@click.option("--text", default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--rounds", default=10, show_default=True, help="Times that each is timed.")
@click.option("--modelled", is_flag=True, help="Run nothing: what a step should take by flux_modelled.py.")
@click.option("--row", "only", multiple=True, help="Only these rows (repeatable).")
@click.option("--uncompiled", is_flag=True, help="Compile nothing, the baseline neither: only that everything runs.")
@click.option("--minutes", type=float, help="Begin nothing that would probably not be done by then.")
@click.option("--proofs", type=click.Path(exists=True, path_type=Path), help="Only rows that `same_bits first` proved.")
@click.option("--resume", is_flag=True, help="Keep what --out holds of the same sources, machine and options.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("flux_step.json"))
def main(
    device: str,
    hidden: int,
    blocks: str,
    sizes: tuple[int, ...],
    batches: tuple[int, ...],
    text: int,
    rounds: int,
    modelled: bool,
    only: tuple[str, ...],
    uncompiled: bool,
    minutes: float | None,
    proofs: Path | None,
    resume: bool,
    out: Path,
) -> None:
    """Time one denoising step in 16 bit and quantized, and say where its time goes."""
    if modelled:
        found = modelled_steps()
        write_json(MODELLED_FILE, found)
        write_text(PAGE, flux_modelled.with_tables(PAGE.read_text(encoding="utf-8"), found))
        click.echo(f"results in {MODELLED_FILE} and {PAGE}")
        return
    deadline = time.monotonic() + 60 * minutes if minutes else math.inf
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA device; --device cpu with a small --hidden needs none")
    unknown = set(only) - {row.name for row in ROWS}
    if unknown:
        raise click.UsageError(f"no row is called {unknown.pop()!r}; there are: {', '.join(row.name for row in ROWS)}")
    double, _, single = blocks.partition("+")
    shape = {"hidden": hidden, "blocks": [int(double), int(single)], "text": text}
    about = {"commit": commit(), "sources": sources(), "machine": cpu_name(), **describe(where), **shape}
    about |= {"rounds": rounds, "uncompiled": uncompiled, "attention": pinned_attention(where)}
    bench = Bench(where, shape, rounds, out, about, proofs)
    if resume:
        bench.resume()
    settings = [(pixels, batch) for pixels in sizes for batch in batches]
    rows = [row for row in ROWS if row.name != BASELINE and (not only or row.name in only)]
    # By PyTorch's switches, not as a backend of diffusers, which copies q, k and v for cuDNN.
    backend = about["attention"]["backend"]
    click.echo(f"attention in 16 bit: {backend or 'not pinned'} ({about['attention']['why']})")
    with sdpa_kernel(workloads.SDPA[backend]) if backend else nullcontext():
        bench.run(rows, settings, deadline)
    click.echo(f"results in {out}")


class Bench:
    """The 16-bit baseline, which stays, and one more model, which rows share that differ in calls of fluxq."""

    def __init__(
        self,
        device: torch.device,
        shape: dict[str, Any],
        rounds: int,
        out: Path,
        about: dict[str, Any],
        proofs: Path | None = None,
    ) -> None:
        self.device, self.shape, self.rounds, self.out, self.proofs = device, shape, rounds, out, proofs
        self.machine = machine_of(str(device))
        self.found: dict[str, Any] = {**about, "complete": False, "baseline": [], "rows": [], "goals": []}
        self.plain: Any = random_model(shape, device)
        self.baseline = self._in_mode(self.plain, "compiled")
        self.held: tuple[tuple, nn.Module] | None = None  # what a model was made for, and it
        self.longest = 0.0  # seconds of timing a row at one size, without what is done but once

    def resume(self) -> None:
        """Take over the rows with a ratio that an earlier run of the same sources, machine and options left."""
        earlier = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}
        changes = ("complete", "baseline", "rows", "goals", "unseen", *VARYING)
        about = {key: value for key, value in self.found.items() if key not in changes}
        if {key: earlier.get(key) for key in about} == about:
            self.found["rows"] = [row for row in earlier["rows"] if row.get("over_compiled_16bit")]

    def run(self, rows: Sequence[Row], settings: Sequence[tuple[int, int]], deadline: float) -> None:
        """Measure what is not there yet; it ends when the longest timing so far would not be done by the deadline.

        Models are made, kernels compiled and graphs recorded but once: how long the first row takes with all that says
        nothing of the others. Complete is what lacks nothing but rows of packages that are not installed.
        """
        done = {(row["row"], row["pixels"], row["batch"]) for row in self.found["rows"]}
        todo = [(row, [place for place in settings if (row.name, *place) not in done]) for row in rows]
        # Each shape is compiled by itself, as pipelines of one size are: many of one block's, over all rows.
        with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED, accumulated_recompile_limit=MOST_COMPILED):
            if any(left for _, left in todo):
                self._begin(settings)
            for row, left in todo:
                if left and time.monotonic() + self.longest * len(left) > deadline:
                    return
                if left:
                    self.measure(row, left)
        missing = [row for row in (*self.found["rows"], *self.found["baseline"]) if "missing" in row]
        self.found["complete"] = all(NOT_INSTALLED in row["missing"] for row in missing)
        write_json(self.out, self.found)

    @torch.inference_mode()
    def _begin(self, settings: Sequence[tuple[int, int]]) -> None:
        """Compile the baseline at every size, and meanwhile try the profiler; rows do without one that fails."""
        self.found["baseline"] = []
        with ThreadPoolExecutor(1) as beside:
            unseen = beside.submit(why_unseen, self.device)
            for pixels, batch in settings:
                try:
                    self.baseline(**step_inputs(self.plain, pixels, batch, self.shape["text"], self.device))
                except Exception as error:
                    traceback.print_exc()
                    self.found["baseline"].append({"pixels": pixels, "batch": batch, "missing": first_line(error)})
            self.found["unseen"] = unseen.result()

    @torch.inference_mode()
    def measure(self, row: Row, settings: Sequence[tuple[int, int]]) -> None:
        """Time a row at every size, in turn with the baseline; what cannot be made or run is said."""
        try:
            package = (row.peer or "").partition(" ")[0]
            if package and find_spec(package) is None:
                raise ValueError(f"{package} {NOT_INSTALLED}")
            self._require_proof(row)
            with self._ready(row) as (model, graphs, unfused):
                for place in settings:
                    facts: dict[str, Any] = dict(zip(("pixels", "batch"), place, strict=True))
                    try:
                        self._measure_at(row, model, graphs, facts | ({"unfused": unfused} if unfused else {}))
                    except Exception as error:  # out of memory is one; the next size is tried all the same
                        traceback.print_exc()
                        self._keep(row, **facts, missing=first_line(error))
        except Exception as error:  # whatever a row raises is its result
            traceback.print_exc()
            self._keep(row, missing=first_line(error))
        self.machine.release()

    def _measure_at(self, row: Row, model: Callable[..., Any], graphs: Any, facts: dict[str, Any]) -> None:
        """Time a row at one size, and keep that; then take its step apart, which may fail or never end."""
        pixels, batch = facts["pixels"], facts["batch"]
        inputs = step_inputs(self.plain, pixels, batch, self.shape["text"], self.device)
        calls = {"row": lambda: model(**inputs), "baseline": lambda: self.baseline(**inputs)}
        if any((pixels, batch) == (lacking["pixels"], lacking["batch"]) for lacking in self.found["baseline"]):
            del calls["baseline"]
        for call in calls.values():  # compiles, chooses, records
            call()
        self.machine.wait()
        begun = time.monotonic()
        facts |= self._time(calls, graphs)
        if self.device.type == "cuda":
            facts["modelled"] = self._modelled(row, pixels, batch)
        withdrawn = [" ".join(cell) for cell in findings.withdrawn()]
        facts |= {"withdrawn": withdrawn} if withdrawn else {}
        self._keep(row, **facts)
        if not self.found["unseen"]:
            spent = {name: facts[key][1] for name, key in SECONDS.items() if name in calls}
            self.found["rows"][-1] |= taken_apart(calls, spent)
            self._write()
        self.longest = max(self.longest, time.monotonic() - begun)

    def _require_proof(self, row: Row) -> None:
        """Raise ValueError for a row with a kernel that was not proven right, where proofs are asked for."""
        if self.proofs is None or row.peer is not None:
            return
        on_cpu = self.device.type == "cpu"
        sweep, chip = workloads.tiny_sweep(), DRY_CHIP
        if not on_cpu:
            sweep, chip = workloads.first_sweep(), chip_of(self.device)
        products = products_of(row, plan_of(self.plain, row.recipe), chip)
        cases = [case for _, group in sweep for case in group if is_part(case, row, products)]
        if why := not_proven(cases, self.proofs, chip):
            raise ValueError(why)

    @contextmanager
    def _ready(self, row: Row) -> Iterator[tuple[Callable[..., Any], Any, list[str]]]:
        """Yield the row's model, its graphs (None without) and why parts are not fused; graphs are taken out again."""
        made_for = row.recipe, row.prefer, row.peer
        if self.held is None or self.held[0] != made_for:
            self.held = None  # before the next one is made
            self.held = made_for, self._made(row)
        model, unfused = self.held[1], []
        if row.peer is None:
            fluxq.set_attention(model, row.attention)
            if row.optimized:
                parts = fluxq.optimize(model, device=self.device)
                unfused = sorted({f"{part.part}: {part.why_not}" for part in parts if part.why_not})
            else:
                fluxq.restore(model)
        with fluxq.capture(model, max_graphs=1) if row.graph else nullcontext() as graphs:
            try:
                yield self._in_mode(model, row.mode), graphs, unfused
            finally:
                if row.mode == "compiled":  # which cannot be taken back
                    self.held = None

    def _in_mode(self, model: Any, mode: Mode) -> Callable[..., Any]:
        """The model as it is, or its repeated blocks compiled, which takes minutes less than all of it."""
        if mode == "compiled" and not self.found["uncompiled"]:
            model.compile_repeated_blocks(fullgraph=True, dynamic=False)
        return model

    def _made(self, row: Row) -> nn.Module:
        if row.peer is not None:
            return PEERS[row.peer](random_model(self.shape, self.device))
        if row.recipe is None:
            return random_model(self.shape, self.device)
        model = quantized(self.shape, row.recipe, self.device)
        fluxq.prepare(model, prefer=row.prefer, device=self.device)
        return model

    def _time(self, calls: Mapping[str, Callable[[], Any]], graphs: Any) -> dict[str, Any]:
        """Seconds of a step and what the GPU was like meanwhile. graphs: of the row, which have to serve every call."""
        before = replays(graphs)
        seconds, conditions = in_turn(calls, self.rounds, self.machine)
        asked = (self.rounds + UNCOUNTED) * (1 + STEPS)
        if graphs is not None and replays(graphs) - before != asked:
            raise RuntimeError(
                f"{replays(graphs) - before} of {asked} calls were replays of a graph: fluxq's log says why"
            )
        found: dict[str, Any] = {key: quartiles(seconds[name]) for name, key in SECONDS.items() if name in calls}
        if "baseline" in calls:
            pairs = zip(seconds["row"], seconds["baseline"], strict=True)
            found["over_compiled_16bit"] = quartiles([b / a for a, b in pairs])
        return found | conditions

    def _modelled(self, row: Row, pixels: int, batch: int) -> dict[str, float] | None:
        """Seconds of a step's PARTS and passes by flux_modelled.py, modulation one of its products, as in a row's step.

        None for a GPU or a way to compute that it does not know.
        """
        device = device_row(torch.cuda.get_device_name(self.device))
        if device is None or row.peer is not None or row.prefer == "memory":
            return None
        forward = forward_pass(
            FAMILY.name, dict(self.plain.config), CallSize(batch, pixels, pixels, text=self.shape["text"])
        )
        compiled = row.mode == "compiled"
        state = ("both" if compiled else "optimized") if row.optimized else row.mode
        plan = replace(plan_of(self.plain, row.recipe), attention=row.attention)
        work = flux_modelled.work_of(plan, forward, device.chip)
        parts = flux_modelled.parts_of_step(work, device, state)
        parts["products"] += parts.pop("modulation")
        return {part: ms / 1e3 for part, ms in parts.items()}

    def _keep(self, row: Row, **facts: Any) -> None:
        about = {"mode": row.mode, "optimized": row.optimized, "attention": row.attention, "graph": row.graph}
        self.found["rows"].append({"row": row.name, "recipe": row.recipe, **about, **facts})
        self._write()
        ratio = facts.get("over_compiled_16bit", [None, math.nan])[1]
        said = facts.get("missing") or f"{1e3 * facts['seconds'][1]:9.2f} ms, {ratio:.2f} x"
        size = f"{facts['pixels']} x {facts['batch']}" if "pixels" in facts else ""
        click.echo(f"{row.name:50} {size:9} {said}")

    def _write(self) -> None:
        self.found["goals"] = goals(self.found["rows"], self.found["attention"], self.found.get("gpu", "none"))
        write_json(self.out, self.found)


def goals(rows: Sequence[Mapping[str, Any]], attention: Mapping[str, Any], gpu: str) -> list[dict[str, Any]]:
    """The goals of flux_modelled.py: for each the best row that counts at 1024², and whether it is met.

    Where none counts, the best of the others is "refused", which says why. attention: of `pinned_attention`. gpu: name.
    """
    found = []
    for goal, (computed, at_least) in flux_modelled.GOALS.items():
        asked = {"recipe": "fp8", "attention": computed, "pixels": 1024, "batch": 1}
        timed = [row for row in rows if row.get("over_compiled_16bit") and asked.items() <= row.items()]
        counts = [row for row in timed if not refusal(row, attention, gpu)]
        best = max(counts or timed, key=lambda row: row["over_compiled_16bit"][1], default=None)
        row: dict[str, Any] = {"goal": goal, "at_least": at_least, "measured": None, "row": None, "met": None}
        if best:
            row["row"] = best["row"]
        if counts and best:
            row["measured"] = best["over_compiled_16bit"][1]
            row["met"] = row["measured"] >= at_least
        elif best:
            row["refused"] = refusal(best, attention, gpu)
        found.append(row)
    return found


def refusal(row: Mapping[str, Any], attention: Mapping[str, Any], gpu: str) -> str:
    """Return why a row's ratio does not count for a goal; empty if it does.

    Its GPU is another than the goals', or attention of one side is not known to be what it should.
    """
    device = flux_modelled.find_device(flux_modelled.GOALS_GPU)
    if device_row(gpu) != device:
        return f"the goals are those of the {device.name}, this is {gpu}"
    if attention["backend"] is None:
        return f"the baseline's attention is not pinned: {attention['why']}"
    in_16_bit = SDPA_KERNELS[attention["backend"]]
    expected = {"baseline": in_16_bit, "row": OWN_ATTENTION if row["attention"] == "fp8" else in_16_bit}
    for side, words in expected.items():
        kernels = row.get("attention_kernels", {}).get(side, [])
        others = [name for name in kernels if not any(word in name.lower() for word in words)]
        if not kernels:
            return f"the profiler saw no kernel of the {side} that is attention by its name"
        if others:
            return f"the {side}'s attention should be {words[0]}, and {others[0]} ran"
    return ""


def pinned_attention(device: torch.device) -> dict[str, Any]:
    """Return the backend, of workloads.SDPA, that computes attention in 16 bit: the first that takes FLUX's heads.

    With it comes cuDNN's version. On a CPU there is none, and "why" says so. Raises RuntimeError for a GPU without any.
    """
    if device.type != "cuda":
        return ON_CPU
    q = torch.zeros(1, 256, 2, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
    problems = []
    for name, backend in workloads.SDPA.items():
        try:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, q, q)
            return {"backend": name, "why": "; ".join(problems), "cudnn": torch.backends.cudnn.version()}
        except RuntimeError as problem:
            problems.append(f"not {name}: {first_line(problem)}")
    raise RuntimeError(f"no attention in 16 bit that the baseline could be pinned to: {'; '.join(problems)}")


def products_of(row: Row, plan: Plan, chip: str) -> set[tuple[str, str]]:
    """Return the (scheme, implementation) that the layers of a row have on a chip, once `fluxq.prepare` is done.

    Layers that it encodes anew may be int8 or fp8, since loading looks at the errors: both count.
    """
    found: set[tuple[str, str]] = set()
    for layer in plan.layers:
        if layer.scheme is None:
            continue
        way = route(layer.scheme, chip, row.prefer)
        made = ("fp8", "int8") if way.activations else ("16bit",)
        if way.activations and way.activations == layer.scheme.activations:
            made = (way.activations.name,)
        for name in made:
            weights = name if way.is_collapsed else layer.scheme.weights.name
            layout = "" if name in ("16bit", weights) else dispatch.ROW_SCALE
            scheme = Scheme.parse(f"{weights}-{name}")
            tokens = 1 if layer.role == MODULATION_ROLE else MANY
            choice = dispatch.choose(scheme, chip, tokens, layer.n, layer.k, torch.bfloat16, layout)
            found.add((f"{weights}-{name}", choice.implementation))
    return found


def is_part(case: workloads.Case, row: Row, products: Collection[tuple[str, str]]) -> bool:
    """Tell whether a row's step may launch what a case launches. products: of `products_of`."""
    if case.op in ("linear", "matmul"):
        return (case.scheme, case.implementation) in products
    if case.op == "attention":
        return case.scheme == row.attention
    if case.op not in ("quantize_activation", *FUSED_OPS) or (case.op in FUSED_OPS and not row.optimized):
        return False
    if case.op == "gated":
        return case.scheme in {scheme for scheme, _ in products}
    made = {scheme.partition("-")[2] for scheme, _ in products}
    return {*case.scheme.split()} <= {"16bit", "static", "beside", *made}


def step_inputs(model: Any, pixels: int, batch: int, text: int, device: torch.device) -> dict[str, Any]:
    """Arguments of one forward pass at an image size: 16 x 16 pixels are a token."""
    noise = torch.Generator(device).manual_seed(0)
    side, config = pixels // 16, model.config

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, device=device, dtype=torch.bfloat16)

    rows = torch.arange(side, device=device, dtype=torch.bfloat16)
    places = torch.stack([torch.zeros(side, side, device=device), *torch.meshgrid(rows, rows, indexing="ij")], -1)
    return {
        "hidden_states": draw(batch, side * side, config.in_channels),
        "encoder_hidden_states": draw(batch, text, config.joint_attention_dim),
        "pooled_projections": draw(batch, config.pooled_projection_dim),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=torch.bfloat16),
        "guidance": torch.full((batch,), 3.5, device=device, dtype=torch.float32),
        "img_ids": places.reshape(-1, 3).bfloat16(),
        "txt_ids": torch.zeros(text, 3, device=device, dtype=torch.bfloat16),
        "return_dict": False,
    }


def plan_of(model: nn.Module, recipe: str | None) -> Plan:
    """Return the plan of a recipe for the model's Linears, rounded to nearest; without one they stay in 16 bit."""
    linears = [
        LinearShape(name, part.out_features, part.in_features)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
    ]
    loaded = load_recipe(recipe or "fp8", profile="rtn")[1]
    entry = loaded.components["transformer"]
    plan = make_plan(FAMILY, "transformer", entry, linears, static_inputs=True, profile="rtn", compat=loaded.compat)
    return plan if recipe else in_16_bit(plan)


@torch.inference_mode()
def quantized(shape: dict[str, Any], recipe: str, device: torch.device) -> nn.Module:
    """The model with its weights rounded to nearest; calibrated input scales come from one pass in 16 bit."""
    model = random_model(shape, device)
    plan = plan_of(model, recipe)
    static = [layer.name for layer in plan.quantized if layer.scheme and layer.scheme.static_input]
    largest = input_amax(model, static, step_inputs(model, 256, 1, shape["text"], device))
    for layer in plan.quantized:
        linear, scheme = model.get_submodule(layer.name), layer.scheme
        if scheme is None or not isinstance(linear, nn.Linear):
            continue
        weight = QuantizedTensor.quantize(linear.weight.detach(), scheme.weights)
        scale = None
        if scheme.static_input and scheme.activations is not None:
            scale = global_scale_for(largest[layer.name], scheme.activations, scheme.four_over_six)
        model.set_submodule(layer.name, QuantLinear.from_quantized(weight, linear.bias, scheme, scale))
    return model


def input_amax(model: nn.Module, names: list[str], inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Largest |input| of each layer in one pass."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found[name] = args[0].abs().amax().float()

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in names]
    try:
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def replays(graphs: Any) -> int:
    """Return how often the graphs that `fluxq.capture` keeps were replayed; 0 for None."""
    return sum(step.replays for step in graphs.captured) if graphs is not None else 0


def in_turn(
    calls: Mapping[str, Callable[[], Any]], rounds: int, machine: Machine
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return seconds of a step of each call, every round begun by another one, and the conditions; some do not count.

    Conditions are of the GPU while it computes: its clock, reasons for a lower one, mean power with what lies between.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names, slowdowns, clocks = list(calls), set(), []
    begun, joules = time.monotonic(), machine.joules()
    for turn in range(rounds + UNCOUNTED):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent, reasons, clock = seconds_of(calls[name], machine)
            slowdowns |= reasons
            if turn >= UNCOUNTED:
                seconds[name].append(spent)
                clocks += [clock] if clock else []
    used, took = machine.joules(), time.monotonic() - begun
    watts = None if used is None or joules is None else round((used - joules) / took, 1)
    megahertz = quartiles(clocks) if len(clocks) > 1 else None
    return seconds, {"slowdowns": sorted(slowdowns), "megahertz": megahertz, "watts": watts}


def seconds_of(call: Callable[[], Any], machine: Machine) -> tuple[float, frozenset[str], float | None]:
    """Return the seconds of one of STEPS calls behind another one; meanwhile, reasons for a lower clock, and MHz."""
    machine.wait()
    call()  # on an idle device: what the host takes before its first kernel would count
    start = machine.mark()
    for _ in range(STEPS):
        call()
    end = machine.mark()
    reasons, clock = machine.slowdowns(), machine.megahertz()
    machine.wait()
    return machine.seconds(start, end) / STEPS, reasons, clock


def taken_apart(calls: Mapping[str, Callable[[], Any]], spent: Mapping[str, float]) -> dict[str, Any]:
    """Return the shares of steps of so many seconds, and the attention kernels of each call by name.

    calls: "row" and "baseline". Where the profiler fails, or sees no kernel, "parts" is None and "unseen" says why.
    """
    try:
        kernels = {name: kernels_of(call) for name, call in calls.items()}
        if not all(kernels.values()):
            raise RuntimeError("the profiler saw no kernel")
    except Exception as problem:  # of another library, which the times do not hang on
        return {"parts": None, "attention_kernels": {}, "unseen": first_line(problem)}
    shares = {PARTS_OF[name]: shares_of(kernels[name], spent[name]) for name in calls}
    return shares | {"attention_kernels": {name: attentions(seen) for name, seen in kernels.items()}}


def why_unseen(device: torch.device) -> str:
    """Return why the profiler cannot be used here, empty if it can: in a process of its own, as it may hang."""
    if device.type != "cuda":
        return "it is for a GPU"
    try:
        return "" if apart(_a_kernel, seconds=PROFILING) else "the profiler saw no kernel"
    except RuntimeError as problem:
        return first_line(problem)


def _a_kernel() -> dict[str, float]:
    x = torch.ones(256, 256, device="cuda")
    return kernels_of(lambda: x @ x)


def kernels_of(call: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds that each kernel of a call took, by its name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return {event.key: event.self_device_time_total / 1e6 for event in seen.key_averages()}


def attentions(spent: Mapping[str, float]) -> list[str]:
    """Return the kernels that are attention by their names."""
    return sorted(name for name in spent if part_of(name) == "attention")


def shares_of(spent: Mapping[str, float], step: float) -> dict[str, float]:
    """Return the share of a step of so many seconds in products, in attention, in passes over memory, and in none."""
    parts = dict.fromkeys((*PARTS, "passes"), 0.0)
    for name, seconds in spent.items():
        parts[part_of(name)] += seconds
    shares = {part: seconds / step for part, seconds in parts.items()}
    return shares | {"gaps": max(0.0, 1.0 - sum(shares.values()))}


def part_of(kernel: str) -> str:
    """Return the part of a step that a kernel belongs to, by its name.

    Inductor names its passes by the operators around them, attention too.
    """
    name = kernel.lower()
    if name.startswith(("triton_poi_", "triton_per_", "triton_red_")):
        return "passes"
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), "passes")


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def modelled_steps() -> dict[str, Any]:
    """Return the figures of flux_modelled.py for FLUX.1-dev."""
    model: Any = random_model({"hidden": 3072, "blocks": [19, 38]}, torch.device("meta"))
    plans = {recipe: plan_of(model, None if recipe == "16 bit" else recipe) for recipe in flux_modelled.RECIPES}
    return {"commit": commit(), **flux_modelled.modelled(plans, dict(model.config))}


def torchao_fp8(model: nn.Module) -> nn.Module:
    """torchao's dynamic fp8, a scale per row, in every block."""
    from torchao.quantization import (  # pyright: ignore[reportMissingImports]
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        quantize_,
    )

    quantize_(
        model,
        Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        filter_fn=lambda part, name: isinstance(part, nn.Linear) and "transformer_blocks" in name,
    )
    return model


OWN_ATTENTION = ("attention_fp8", "quantize_tokens", "quantize_values", "key_statistics")  # its passes too
PARTS = {  # words in a kernel's name, of the parts that are modelled; attention first: its kernels are products too
    "attention": ("flash", "attention", "fmha", "sdpa", "cudnn_generated_fort_native_sdpa", *OWN_ATTENTION),
    "products": ("gemm", "gemv", "matmul", "cutlass", "nvjet", "cublas", "wgmma"),
}
ON_CPU = {"backend": None, "why": "a CPU has one way to compute it"}
SDPA_KERNELS = {"cudnn": ("cudnn",), "flash": ("flash_fwd",)}  # what the names of a backend's kernels hold
FUSED_OPS = ("gated", "adaln_quantize", "qk_norm_rope", "act_quantize")  # that optimized blocks alone launch
MANY = 4096  # tokens
VARYING = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")  # facts of a GPU that change from run to run
SECONDS = {"row": "seconds", "baseline": "baseline_seconds"}  # of a row in the file
PARTS_OF = {"row": "parts", "baseline": "baseline_parts"}
STEPS = 2  # that are timed one behind the other
UNCOUNTED = 2  # rounds
PROFILING = 90.0  # seconds that trying the profiler may take
MOST_COMPILED = 256  # forms of one block
NOT_INSTALLED = "is not installed"
PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {"torchao fp8": torchao_fp8}
BASELINE = "16 bit, compiled"
MODELLED_FILE, PAGE = ROOT / "benchmarks" / "flux_step_modelled.json", ROOT / "docs" / "speed.md"


def _rows() -> Iterator[Row]:
    """In the order of what is to be known first: a run may end before the last."""
    first, *others = (_ways(name, Row(name, "eager", name)) for name in ("fp8", "int8", "nvfp4"))
    fp8 = {row.name: row for row in first}
    yield Row(BASELINE, "compiled")
    yield from (fp8.pop(name) for name in GOAL_ROWS)
    yield from fp8.values()
    yield Row("torchao fp8, compiled", "compiled", peer="torchao fp8")
    for rows in others:
        yield from rows
    yield from _ways("nvfp4 in 4 bits", Row("nvfp4 in 4 bits", "eager", "nvfp4", prefer="memory"))
    yield from _ways("16 bit", Row("16 bit", "eager"))


def _ways(name: str, plain: Row) -> Iterator[Row]:
    """Compiled comes last: what is compiled stays so."""
    optimized = replace(plain, name=f"{name}, optimized", optimized=True)
    yield plain
    yield optimized
    yield replace(optimized, name=f"{optimized.name}, attention in fp8", attention="fp8")
    yield replace(optimized, name=f"{optimized.name}, graph", graph=True)
    yield replace(optimized, name=f"{optimized.name}, attention in fp8, graph", attention="fp8", graph=True)
    yield replace(optimized, name=f"{optimized.name}, compiled", mode="compiled")


GOAL_ROWS = ("fp8, optimized, graph", "fp8, optimized, attention in fp8, graph")  # as the goals are served
ROWS = tuple(_rows())


if __name__ == "__main__":
    main()
