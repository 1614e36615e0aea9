"""Times of quantized Linears against `nn.Linear`, measured in interleaved pairs.

    python -m fluxq.kernels.bench --cpu --json bench.json

Other work on a shared machine slows both halves of a pair about equally, so their ratio (baseline over ours:
above 1 we are faster) is steadier than either time. Its median is reported with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import nn

from fluxq.base.files import write_json
from fluxq.base.provenance import commit, versions
from fluxq.quantize.linear import QuantLinear
from fluxq.quantize.tensor import QuantizedTensor
from fluxq.recipes.formats import Scheme


@dataclass(frozen=True)
class Comparison:
    """Ours against a baseline on one shape: median milliseconds, and the quartiles of the pairs' ratios."""

    name: str
    baseline: str
    shape: tuple[int, int, int]  # (M, K, N)
    pairs: int
    ours_ms: float
    baseline_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float


@click.command()
@click.option("--cpu", is_flag=True, required=True, help="int8 against bf16 on one CPU thread.")
@click.option("--size", type=(int, int, int), default=(1024, 3072, 3072), show_default=True, help="M, K and N.")
@click.option("--pairs", type=click.IntRange(min=2), default=15, show_default=True, help="Timed pairs.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write JSON here.")
def main(cpu: bool, size: tuple[int, int, int], pairs: int, json_file: Path | None) -> None:
    """Time quantized Linears, with quantization of the activations and bias included."""
    results = [cpu_int8(*size, pairs)]
    click.echo(table(results))
    if json_file:
        found = {"commit": commit(), "versions": versions(), "threads": 1, "results": [asdict(r) for r in results]}
        write_json(json_file, found)


@torch.inference_mode()
def cpu_int8(m: int, k: int, n: int, pairs: int) -> Comparison:
    """int8 weights and activations against bf16, (M, K) by (N, K), on one thread."""
    baseline = nn.Linear(k, n, dtype=torch.bfloat16)
    weight = QuantizedTensor.quantize(baseline.weight, "int8")
    ours = QuantLinear.from_quantized(weight, baseline.bias, Scheme.parse("int8-int8"))
    x = torch.randn(m, k, dtype=torch.bfloat16)  # (M, K)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = time_pairs(lambda: ours(x), lambda: baseline(x), pairs)
    finally:
        torch.set_num_threads(threads)
    return summarize("int8-int8", "bf16", (m, k, n), times)


def time_pairs(ours: Callable[[], object], baseline: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """(ours, baseline) in seconds, `pairs` times, after an untimed call of each; the order alternates."""

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    ours()
    baseline()
    times = []
    for pair in range(pairs):
        if pair % 2:
            late = seconds(baseline)
            times.append((seconds(ours), late))
        else:
            times.append((seconds(ours), seconds(baseline)))
    return times


def summarize(name: str, baseline: str, shape: tuple[int, int, int], times: list[tuple[float, float]]) -> Comparison:
    """Medians and quartiles of pairs of (ours, baseline) seconds."""
    low, ratio, high = statistics.quantiles([theirs / ours for ours, theirs in times], n=4, method="inclusive")
    ours_ms, baseline_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return Comparison(name, baseline, shape, len(times), ours_ms, baseline_ms, ratio, low, high)


def table(results: list[Comparison]) -> str:
    """Results as lines of text, one per comparison, under a heading."""
    lines = [f"{'scheme':<12} {'M x K x N':<18} {'ours ms':>9} {'baseline ms':>18} {'speedup (quartiles)':>22}"]
    for r in results:
        shape = " x ".join(map(str, r.shape))
        baseline = f"{r.baseline} {r.baseline_ms:.2f}"
        speedup = f"{r.ratio:.2f} ({r.ratio_low:.2f} to {r.ratio_high:.2f})"
        lines.append(f"{r.name:<12} {shape:<18} {r.ours_ms:>9.2f} {baseline:>18} {speedup:>22}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
