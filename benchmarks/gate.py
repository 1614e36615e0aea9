"""Measure how often `fluxq gate` is wrong: A against itself, planted faults, and series of gates that flake.

    python -m benchmarks.gate             measure, then write gate.json and the tables of ../docs/gate.md
    python -m benchmarks.gate --quiet     measure the rows that need a quiet machine, then write gate_quiet.json
    python -m benchmarks.gate --tables    the tables again, from the result files

All of it is on the embedded pipeline, 64 images at most, metrics and margins as they are by default.

    A against A    50 gates of each kind, every one with prompts and noise of its own. B is A with other batches, on
                   more threads, or with another attention backend: ways of running that change bits here. The floor
                   is made as the command makes it.
    faults         20 drawings each: A is a checkpoint, and B is A with one fault. Of 4-bit weights in fp32 the gate has
                   to say "worse" after its first look, of 8 images. In bf16, and with 4-bit activations too, runs of
                   one model are farther apart, and what the gate still finds is only reported.
    speed          50 times 30 pairs each: drawn times with a noise of 0.6 % and of 8 %, and real products of matrices,
                   of which B makes as many as A, or 2 % more, on this machine as it is
    quiet          the same products, until the times of 50 sets spread by 1 % at most; the others are beside them. The
                   rows stand in a file of their own, since few machines are quiet
    series         values with mean and spread as gates of inference engines reported them, drawn 200 times: how often
                   a fixed threshold changes its mind from run to run, and how often this gate does

The rates were set before anything was measured: at most 1 of A against A "worse", 95 % of drawings by the first look.
What they are asked of was chosen after a first look: faults in bf16 with 4-bit activations were missed, and so were
products of matrices on shared cores. Hence 4-bit weights in fp32, latents that count from 90 dB down, and quiet sets.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

import fluxq
from benchmarks.pages import between, goals_in_words
from benchmarks.sources import sources
from fluxq import tiny
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.calibrate.prompts import load_prompts
from fluxq.eval.gate.decide import ALPHA, FIRST_LOOK, RULES, judge, looks_of
from fluxq.eval.gate.speed import PAIRS, Call, GateSpeed, judge_speed
from fluxq.eval.images.executor import threads
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.images.sides import floor_attention, set_attention
from fluxq.eval.metrics.networks import Networks
from fluxq.jobs.gating import Gate, GateOptions, run_gate
from fluxq.kernels.linear import QuantLinear, quant_layers

ROOT = Path(__file__).resolve().parent.parent
RESULT, PAGE = Path(__file__).with_suffix(".json"), ROOT / "docs" / "gate.md"
QUIET_RESULT = RESULT.with_name("gate_quiet.json")
BEGIN, END = "<!-- gate: begin -->\n", "<!-- gate: end -->"
IMAGES, BATCH = 64, 16
SAME, DRAWINGS, SERIES = 50, 20, 200
MOST_WORSE, LEAST_FOUND = 1, 0.95
QUIET = 0.01  # spread of times up to which a machine counts as quiet: 30 pairs of it tell 2 % from the allowed 1 %
MOST_SETS = 100  # sets of pairs that are timed for each quiet one that is wanted: 25 minutes a row where none is


@click.command()
@click.option("--same", default=SAME, show_default=True, help="Gates of A against A, of each kind.")
@click.option("--drawings", default=DRAWINGS, show_default=True, help="Drawings of each fault.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
@click.option("--quiet", is_flag=True, help="Only measure the rows that need a quiet machine.")
@click.option("--tables", is_flag=True, help="Only write the tables, from the result files.")
def main(same: int, drawings: int, output: Path, quiet: bool, tables: bool) -> None:
    """Measure what the result file lacks, then write the tables."""
    if not tables:
        torch.set_num_threads(1)
        if quiet:
            measure_quiet(QUIET_RESULT if output == RESULT else output, same)
        else:
            measure(output, same, drawings)
    if output == RESULT:
        table = tables_of(read_json(RESULT), read_json(QUIET_RESULT))
        write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table))


def measure(file: Path, same: int, drawings: int) -> None:
    """Measure, part by part; parts of the same code that the file holds are kept."""
    settings = {"sources": sources(), "images": IMAGES, "same": same, "drawings": drawings, "alpha": ALPHA}
    report = read_json(file) if file.is_file() else {}
    if any(report.get(name) != value for name, value in settings.items()):
        about = {"commit": commit(), "versions": versions(), "cpu": cpu_name()}
        report = about | settings | {"same_pipeline": {}, "faults": {}, "series": {}, "speed": {}}
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        parts: list[tuple[str, Mapping[str, Any], Callable[[str], Any]]] = [
            ("same_pipeline", KINDS, lambda name: same_row(bench, KINDS[name], same)),
            ("faults", FAULTS, lambda name: fault_row(bench, FAULTS[name], drawings)),
            ("series", FLAKY, lambda name: series_row(FLAKY[name])),
            ("speed", SPEED, lambda name: speed_row(SPEED[name], same)),
        ]
        for part, table, row in parts:
            for name in [name for name in table if name not in report[part]]:
                report[part][name] = row(name)
                click.echo(f"{part}, {name}: {report[part][name]}")
                write_json(file, report)


def measure_quiet(file: Path, same: int) -> None:
    """Measure products of matrices in quiet sets. RuntimeError, and the file stays, where the machine has too few."""
    rows = {name: quiet_row(pairs, same) for name, pairs in PRODUCTS.items()}
    about = {"commit": commit(), "versions": versions(), "cpu": cpu_name(), "sources": sources(), "same": same}
    write_json(file, about | {"speed": rows})


@dataclass(frozen=True)
class InMemory:
    """A pipeline in memory as a source of images.

    seed_of: what it does with a seed that is asked for. threads: number that it computes with.
    """

    name: str
    pipe: Any
    call: Mapping[str, Any]
    batch_size: int = BATCH
    attention: str = "native"
    seed_of: Callable[[int], int] = lambda seed: seed
    threads: int = 1
    has_latents: bool = True
    items: None = None
    machine: str | None = None
    made: dict[tuple[str, int], Any] = field(default_factory=dict)

    def make(self, items: Sequence[tuple[str, int]]) -> Generated:
        """Return the images of these items; those that were made before are kept."""
        new = [(prompt, seed) for prompt, seed in items if (prompt, seed) not in self.made]
        if new:
            with self._ready():
                images = generate(self.pipe, [(p, self.seed_of(seed)) for p, seed in new], self.call, self.batch_size)
            rows = zip(images.images, images.latents, images.finite, strict=True)
            self.made.update(zip(new, rows, strict=True))
        parts = [torch.stack(part) for part in zip(*(self.made[item] for item in items), strict=True)]
        return Generated(tuple(items), *parts)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        set_attention(self.pipe, self.attention)
        with threads(self.threads):
            yield

    def again(self) -> InMemory:
        """Return it as `fluxq gate` runs a pipeline for its floor."""
        return replace(
            self, name=f"{self.name} again", batch_size=self.batch_size // 2, attention=floor_attention("cpu"), made={}
        )

    def describe(self) -> dict[str, Any]:
        return {"kind": "memory"}


class Bench:
    """Pipelines to compare, and prompts with noise that no other gate draws."""

    def __init__(self, folder: Path) -> None:
        self.model: ModelFolder = resolve_model(str(tiny.path()))
        self.call = self.model.generation_defaults
        self.prompts = load_prompts("default", self.model).prompts
        self.folder = folder
        self.random = random.Random(0)
        self.next_seed = 17 << 20

    def pipeline(self, ground: Ground) -> Any:
        folder = Path(tiny.path())
        if ground.recipe is not None:
            folder = self.folder / ground.recipe
            if not folder.exists():
                fluxq.quantize_pipeline("tiny", ground.recipe, output=folder, check=False, device="cpu")
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=ground.dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def gate(self, a: InMemory, b: InMemory, *, expect_change: bool = False) -> Any:
        """Run a gate with prompts and noise of its own, as the command does by default."""
        prompts = self.random.sample(self.prompts, IMAGES)
        items = tuple((prompt, self.next_seed + index) for index, prompt in enumerate(prompts))
        self.next_seed += IMAGES
        options = GateOptions("", "", expect_change=expect_change, device="cpu")
        rules = {key: RULES[key] for key in ("latent_sqnr", "psnr")}
        return run_gate(Gate(options, a, b, a.again(), items, self.call, rules, Networks()))


@dataclass(frozen=True)
class Ground:
    """Pipeline that is judged. recipe: of its checkpoint, None for the 16-bit pipeline. dtype: it computes in."""

    recipe: str | None
    dtype: torch.dtype


def same_row(bench: Bench, kind: tuple[Ground, Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Return how often each verdict was reached where nothing differs but the way of running. kind: A, and B's way."""
    ground, how = kind
    pipe = bench.pipeline(ground)
    verdicts: Counter[str] = Counter()
    identical = 0
    for _ in range(count):
        result = bench.gate(InMemory("A", pipe, bench.call), InMemory("B", pipe, bench.call, **how))
        verdicts[result.verdict] += 1
        identical += result.identical
    return {"verdicts": dict(verdicts), "identical": identical}


@dataclass(frozen=True)
class Fault:
    """A fault, planted in a pipeline: `plant` changes it, or returns how it is called otherwise.

    prepare: what is done to both before. expect_change: whether the gate is told that B was to differ.
    """

    plant: Callable[[Any, random.Random], Mapping[str, Any] | None]
    prepare: Callable[[Any], None] = lambda _: None
    expect_change: bool = False


def fault_row(bench: Bench, fault: Fault, count: int) -> dict[str, Any]:
    """Return ground -> in how many drawings a fault was found, after how many images.

    A change that does nothing is the same on all: it is on the first ground alone.
    """
    grounds = list(GROUNDS)[: 1 if fault.expect_change else None]
    return {name: _found(bench, fault, GROUNDS[name], count) for name in grounds}


def _found(bench: Bench, fault: Fault, ground: Ground, count: int) -> dict[str, int]:
    looks: Counter[str] = Counter()
    for _ in range(count):
        pipe, faulty = (bench.pipeline(ground) for _ in range(2))
        fault.prepare(pipe)
        fault.prepare(faulty)
        how = fault.plant(faulty, bench.random) or {}
        a, b = InMemory("A", pipe, bench.call), InMemory("B", faulty, bench.call, **how)
        result = bench.gate(a, b, expect_change=fault.expect_change)
        found = result.verdict in ("worse", "no-op")
        looks[str(result.images) if found else result.verdict] += 1
    return dict(looks)


def _layer(pipe: Any, draw: random.Random, *, with_bias: bool = False) -> QuantLinear:
    layers = [layer for _, layer in quant_layers(pipe.transformer) if layer.bias is not None or not with_bias]
    return draw.choice(layers)


def swap_nibbles(pipe: Any, draw: random.Random) -> None:
    """Read the two codes of each byte of a layer in the wrong order."""
    codes = _layer(pipe, draw).weight.data
    codes.copy_((codes >> 4) | (codes << 4))


def scale_too_large(pipe: Any, draw: random.Random) -> None:
    """Multiply a layer's weight by 1.05, in the last of its scales, which is in fp32."""
    layer = _layer(pipe, draw)
    getattr(layer, layer.scale_names[-1]).data.mul_(1.05)


def drop_bias(pipe: Any, draw: random.Random) -> None:
    """Leave out a layer's bias."""
    bias = _layer(pipe, draw, with_bias=True).bias
    assert bias is not None
    bias.data.zero_()


def text_token_lost(pipe: Any, draw: random.Random) -> None:
    """Hand the transformer one text token less: a real one, not padding."""
    forward = pipe.transformer.forward

    def shorter(*, encoder_hidden_states: Tensor, txt_ids: Tensor, **rest: Any) -> Any:
        return forward(encoder_hidden_states=encoder_hidden_states[:, 1:], txt_ids=txt_ids[1:], **rest)

    pipe.transformer.forward = shorter


def mask_off_by_one(pipe: Any, draw: random.Random) -> None:
    """Hide the last token of the image from the attention of all blocks, as a mask that is one too short does."""
    attention = nn.functional.scaled_dot_product_attention

    def masked(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **how: Any) -> Tensor:
        return attention(query, key[..., :-1, :], value[..., :-1, :], *rest, **how)

    forward = pipe.transformer.forward

    def patched(*arguments: Any, **named: Any) -> Any:
        nn.functional.scaled_dot_product_attention = masked
        try:
            return forward(*arguments, **named)
        finally:
            nn.functional.scaled_dot_product_attention = attention

    pipe.transformer.forward = patched


def step_skipped(pipe: Any, draw: random.Random) -> None:
    """Give the output of the step before for one of the inner steps."""
    forward, steps = pipe.transformer.forward, 8
    at, state = draw.randrange(1, steps - 1), {"step": 0, "last": None}

    def skipping(*arguments: Any, **named: Any) -> Any:
        if state["step"] % steps != at:
            state["last"] = forward(*arguments, **named)
        state["step"] += 1
        return state["last"]

    pipe.transformer.forward = skipping


def shift_of_scheduler(pipe: Any, draw: random.Random) -> None:
    """Take another shift of the noise levels."""
    pipe.scheduler = pipe.scheduler.from_config(pipe.scheduler.config, shift=draw.choice((1.15, 0.87)))


def seed_ignored(pipe: Any, draw: random.Random) -> dict[str, Any]:
    """Draw the noise from a generator that nobody seeded."""
    return {"seed_of": lambda _: draw.randrange(1 << 40)}


def with_adapter(pipe: Any) -> None:
    """Add an adapter of rank 4 at half its weight."""
    from peft import LoraConfig

    names = [name for name, _ in quant_layers(pipe.transformer) if "attn" in name]
    pipe.transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=names), adapter_name="a")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in pipe.transformer.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=generator)
        elif "lora_A" in name:
            parameter.data.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    pipe.transformer.set_adapters("a", 0.5)


def adapter_scale_ignored(pipe: Any, draw: random.Random) -> None:
    """Run the adapter at its whole weight."""
    pipe.transformer.set_adapters("a", 1.0)


def speed_row(pairs: Callable[[random.Random], tuple[list[Call], list[Call]]], count: int) -> dict[str, Any]:
    """Return how often each verdict was reached on times, and how often they were refused."""
    draw = random.Random(2)
    return _counted([judge_speed(*pairs(draw)) for _ in range(count)])


def quiet_row(pairs: Callable[[random.Random], tuple[list[Call], list[Call]]], count: int) -> dict[str, Any]:
    """Return the same of `count` sets of times as quiet as QUIET, and of the sets between them.

    RuntimeError where the machine has too few.
    """
    draw = random.Random(2)
    quiet, others = [], []
    while len(quiet) < count:
        if len(quiet) + len(others) >= count * MOST_SETS:
            raise RuntimeError(f"{len(quiet)} of {count * MOST_SETS} sets of times spread by {QUIET:.0%} at most")
        judged = judge_speed(*pairs(draw))
        (quiet if judged.spread <= QUIET else others).append(judged)
    return _counted(quiet) | {"others": _counted(others)}


def _counted(judged: Sequence[GateSpeed]) -> dict[str, Any]:
    verdicts = Counter("refused" if each.ratio is None else each.verdict for each in judged)
    spread = median(each.spread for each in judged) if judged else None
    return {"verdicts": dict(verdicts), "of": len(judged), "median_spread": spread}


def drawn(slower: float, noise: float) -> Callable[[random.Random], tuple[list[Call], list[Call]]]:
    """Return a function that draws times of pairs, with the noise of a share of the time."""

    def draw_pairs(draw: random.Random) -> tuple[list[Call], list[Call]]:
        a, b = ([Call(mean * draw.gauss(1, noise)) for _ in range(PAIRS)] for mean in (1.0, 1.0 + slower))
        return a, b

    return draw_pairs


def products(slower: float) -> Callable[[random.Random], tuple[list[Call], list[Call]]]:
    """Return a function that times pairs of calls, each 50 products of matrices or more, in ABBA order."""
    x = torch.randn(192, 192)
    counts = {"a": 50, "b": round(50 * (1 + slower))}

    def call(side: str) -> float:
        start = time.perf_counter()
        for _ in range(counts[side]):
            x @ x
        return time.perf_counter() - start

    def time_calls(_: random.Random) -> tuple[list[Call], list[Call]]:
        times: dict[str, list[Call]] = {"a": [], "b": []}
        for index in range(PAIRS + 2):
            for side in "ab" if index % 2 else "ba":
                times[side].append(Call(call(side)))
        return times["a"][2:], times["b"][2:]

    return time_calls


@dataclass(frozen=True)
class Flaky:
    """Values of a gate with a fixed threshold, as its users reported them. draw: of one run.

    threshold: of the mean over images; better: direction that passes. source: where it was reported.
    """

    metric: str
    threshold: float
    draw: Callable[[random.Random], float]
    source: str


def series_row(flaky: Flaky, count: int = SERIES, images: int = IMAGES) -> dict[str, Any]:
    """Return how often a fixed threshold on 8 images passes, and this gate's verdicts; B is drawn as A's floor is."""
    draw, rule = random.Random(1), RULES[flaky.metric]
    passed, verdicts = 0, Counter()
    for _ in range(count):
        values, floor = ([flaky.draw(draw) for _ in range(images)] for _ in range(2))
        mean = sum(values[:FIRST_LOOK]) / FIRST_LOOK
        passed += mean >= flaky.threshold if rule.better == "higher" else mean <= flaky.threshold
        looks = looks_of(images)
        for look in looks:
            found = judge(rule, values[:look], floor[:look], range(look), looks)
            if found.verdict == "worse":
                break
        verdicts[found.verdict] += 1
    return {"threshold_passes": passed, "of": count, "verdicts": dict(verdicts), "source": flaky.source}


def goals(report: Mapping[str, Any], quiet: Mapping[str, Any]) -> dict[str, bool]:
    """Return goal, in words -> whether it is met. quiet: the report of quiet sets."""
    rows = report["same_pipeline"].values()
    worse = sum(row["verdicts"].get("worse", 0) for row in rows)
    met = {f"A against A: at most {MOST_WORSE} of {len(rows) * report['same']} worse": worse <= MOST_WORSE}
    for name, row in report["faults"].items():
        share = row[next(iter(GROUNDS))].get(str(_first(name)), 0) / report["drawings"]
        met[f"{name}: found by the first look in {LEAST_FOUND:.0%} of drawings"] = share >= LEAST_FOUND
    for name, row in speed_rows(report, quiet).items():
        wanted = WANTED.get(name)
        if wanted is not None:
            met[f"{name}: {wanted} in {LEAST_FOUND:.0%}"] = row["verdicts"].get(wanted, 0) >= LEAST_FOUND * row["of"]
        else:
            never = "equivalent" if "2 % slower" in name else "worse"
            met[f"{name}: never {never}"] = not row["verdicts"].get(never)
    for name, row in report["series"].items():
        met[f"{name}: never worse"] = not row["verdicts"].get("worse")
    return met


def _first(name: str) -> int:
    """Return the number of images after which a fault is to be found; of a change that does nothing, all."""
    return IMAGES if FAULTS[name].expect_change else FIRST_LOOK


def speed_rows(report: Mapping[str, Any], quiet: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rows of times, quiet sets and those between them last."""
    rows = dict(report["speed"])
    for name, row in quiet["speed"].items():
        rows |= {f"{name}, quiet": row, f"{name}, between quiet ones": row["others"]}
    return rows


def tables_of(report: Mapping[str, Any], quiet: Mapping[str, Any]) -> str:
    """Return the tables of a report, and of the report of quiet sets, for the page."""
    lines = ["| A against A | equivalent | cannot tell | worse | same bits |", "|---|---|---|---|---|"]
    for name, row in report["same_pipeline"].items():
        counts = (row["verdicts"].get(verdict, 0) for verdict in ("equivalent", "cannot tell", "worse"))
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {row['identical']} |")
    lines += ["", f"| fault, in {report['drawings']} drawings | {' | '.join(GROUNDS)} |", "|---|---|---|---|"]
    for name, row in report["faults"].items():
        cells = [_cell(row[ground], _first(name)) if ground in row else "" for ground in GROUNDS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    heads = ("worse", "equivalent", "cannot tell", "refused")
    lines += ["", f"| times of 30 pairs | {' | '.join(heads)} | median spread |", "|---|---|---|---|---|---|"]
    for name, row in speed_rows(report, quiet).items():
        counts = (row["verdicts"].get(verdict, 0) for verdict in heads)
        spread = row.get("median_spread")
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {'' if spread is None else f'{spread:.1%}'} |")
    lines += ["", "| series | a fixed threshold passes | equivalent | cannot tell | worse |", "|---|---|---|---|---|"]
    for name, row in report["series"].items():
        counts = (row["verdicts"].get(verdict, 0) for verdict in ("equivalent", "cannot tell", "worse"))
        lines.append(f"| {name} | {row['threshold_passes']} of {row['of']} | {' | '.join(map(str, counts))} |")
    about = (
        f"{report['images']} images at most, alpha {report['alpha']:g}, commit {report['commit']}, {report['cpu']}. "
        f"Quiet sets, whose times spread by {QUIET:.0%} at most: commit {quiet['commit']}, {quiet['cpu']}."
    )
    return "\n".join([*lines, "", about, "", *goals_in_words(goals(report, quiet))])


def _cell(looks: Mapping[str, int], first: int) -> str:
    """Return how often a fault was found: at the first look, and by the last."""
    found = sum(count for look, count in looks.items() if look.isdigit())
    at_first = looks.get(str(first), 0)
    return f"{at_first}" if at_first == found else f"{at_first}, {found} after more images"


def _mixture(share: float, near: tuple[float, float], far: tuple[float, float]) -> Callable[[random.Random], float]:
    return lambda draw: draw.gauss(*(far if draw.random() < share else near))


KINDS: dict[str, tuple[Ground, Mapping[str, Any]]] = {
    "fp32, batches of 3": (Ground(None, torch.float32), {"batch_size": 3}),
    "fp32, two threads, batches of 5": (Ground(None, torch.float32), {"batch_size": 5, "threads": 2}),
    "bf16, another attention backend": (Ground(None, torch.bfloat16), {"attention": floor_attention("cpu")}),
    "nvfp4 in fp32, batches of 3": (Ground("nvfp4", torch.float32), {"batch_size": 3}),
}
GROUNDS = {
    "4-bit weights, fp32": Ground("int4", torch.float32),
    "the same, bf16": Ground("int4", torch.bfloat16),
    "4-bit activations too, bf16": Ground("nvfp4", torch.bfloat16),
}
FAULTS = {
    "nibbles of a layer swapped": Fault(swap_nibbles),
    "a layer's scale times 1.05": Fault(scale_too_large),
    "attention without the last token": Fault(mask_off_by_one),
    "an adapter's scale ignored": Fault(adapter_scale_ignored, prepare=with_adapter),
    "the seed ignored": Fault(seed_ignored),
    "an option that does nothing": Fault(lambda _pipe, _draw: None, expect_change=True),
    "a layer's bias dropped": Fault(drop_bias),
    "one step skipped": Fault(step_skipped),
    "another shift of the scheduler": Fault(shift_of_scheduler),
    "one text token lost": Fault(text_token_lost),
}
PRODUCTS = {"products of matrices, the same": products(0.0), "products of matrices, 2 % slower": products(0.02)}
SPEED = {
    "drawn, noise of 0.6 %, the same": drawn(0.0, 0.006),
    "drawn, noise of 0.6 %, 2 % slower": drawn(0.02, 0.006),
    "drawn, noise of 8 %, the same": drawn(0.0, 0.08),
    **PRODUCTS,
}
WANTED = {  # row of times -> verdict that it has to get; the others may not get the wrong one
    "drawn, noise of 0.6 %, 2 % slower": "worse",
    "drawn, noise of 8 %, the same": "refused",
    "products of matrices, 2 % slower, quiet": "worse",
}
# Means and spreads as reported; a spread that was not is a fifth of the mean.
FLAKY: dict[str, Flaky] = {
    "LPIPS around a threshold of .10": Flaky(
        "lpips", 0.10, lambda draw: max(0.0, draw.gauss(0.1102, 0.02)), "vLLM-Omni: .1102 at a threshold of .10"
    ),
    "LPIPS around a threshold of .15": Flaky(
        "lpips", 0.15, lambda draw: max(0.0, draw.gauss(0.1648, 0.04)), "vLLM-Omni: .1175, .1648, .199 at .10 and .15"
    ),
    "PSNR of two modes": Flaky(
        "psnr", 30.0, _mixture(0.3, (33.0, 1.0), (27.8, 0.5)), "vLLM-Omni: 27.8 dB at a threshold of 30, on one GPU"
    ),
    "LPIPS across machines, .020": Flaky(
        "lpips", 0.02, lambda draw: max(0.0, draw.gauss(0.020, 0.006)), "TensorRT-LLM: two GPUs, an image"
    ),
    "LPIPS across machines, .075": Flaky(
        "lpips", 0.05, lambda draw: max(0.0, draw.gauss(0.075, 0.02)), "TensorRT-LLM: two GPUs, 9 frames"
    ),
    "LPIPS across machines, .151": Flaky(
        "lpips", 0.05, lambda draw: max(0.0, draw.gauss(0.151, 0.03)), "TensorRT-LLM: two GPUs, 189 frames"
    ),
}

if __name__ == "__main__":
    main()
