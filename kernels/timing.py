"""Timing of calls: on a GPU by replays of CUDA graphs, elsewhere, for a dry run, by the clock on the wall.

A graph holds many launches over several sets of operands, more of them than the L2 cache holds, each launch with an
output of its own: as in a model, operands come from memory and results go there. All graphs of a comparison are
replayed in turns, in a rotating order, so that whatever slows the GPU for a while slows all of them. The median of the
replays is reported with its quartiles. Operands should be random numbers: constant ones draw less power, run faster.
"""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Call = Callable[[], Any]
LAUNCHES = 10  # in a graph, at least
REPLAY_US = 200.0  # that a replay lasts, at least: what starts it must not count
REPEATS = 30


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median and quartiles of `repeats`."""

    us: float
    low: float
    high: float
    repeats: int


def sets_of_operands(size: int, device: torch.device) -> int:
    """Return how many sets of operands of `size` bytes fill twice the L2 cache, two at least; on a CPU one."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, math.ceil(2 * cache / max(size, 1)))


def measure(calls: Mapping[str, Sequence[Call]], device: torch.device, repeats: int = REPEATS) -> dict[str, Times]:
    """Times of each name's calls, which do the same work on one set of operands each."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    replays = {name: (_graph(turns) if device.type == "cuda" else turns) for name, turns in calls.items()}
    names = list(replays)
    for repeat in range(repeats):
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        one_round = _replay_graphs if device.type == "cuda" else _call_each
        for name, us in one_round([(name, replays[name]) for name in order]):
            samples[name].append(us)
    return {name: summarize(values) for name, values in samples.items()}


def summarize(samples: Sequence[float]) -> Times:
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Times(middle, low, high, len(samples))


class _Graph:
    """A captured sequence of launches."""

    def __init__(self, calls: Sequence[Call], launches: int) -> None:
        self.launches = math.ceil(launches / len(calls)) * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        outputs: collections.deque[Any] = collections.deque(maxlen=len(calls))  # so that none is written over at once
        with torch.cuda.graph(self.graph):
            for launch in range(self.launches):
                outputs.append(calls[launch % len(calls)]())

    def replay(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        return start, end


def _graph(calls: Sequence[Call]) -> _Graph:
    """A graph of those calls that lasts REPLAY_US or more."""
    for call in calls:
        call()  # compiles, and lets libraries make up their minds
    torch.cuda.synchronize()
    graph = _Graph(calls, LAUNCHES)
    graph.replay()
    ((_, us),) = _replay_graphs([("", graph)])
    short = REPLAY_US / (us * graph.launches)
    return graph if short <= 1 else _Graph(calls, math.ceil(short * graph.launches))


def _replay_graphs(order: Iterable[tuple[str, Any]]) -> list[tuple[str, float]]:
    order = list(order)
    order[0][1].graph.replay()  # not timed: keeps the GPU busy while the next ones are queued
    events = [(name, graph.launches, graph.replay()) for name, graph in order]
    torch.cuda.synchronize()
    return [(name, 1e3 * start.elapsed_time(end) / launches) for name, launches, (start, end) in events]


def _call_each(order: Iterable[tuple[str, Any]]) -> list[tuple[str, float]]:
    times = []
    for name, calls in order:
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((name, 1e6 * (time.perf_counter() - start) / len(calls)))
    return times


@torch.inference_mode()
def peaks(device: torch.device, repeats: int = REPEATS) -> dict[str, float]:
    """Return what this GPU attains now: TFLOP/s of library products by the type they multiply, and "copy" in GB/s.

    A type that the library cannot multiply here is left out.
    """
    size, numbers = (8192, 2**28) if device.type == "cuda" else (64, 2**12)
    rates = {}
    for name, make in (("bf16", _bf16_product), ("fp8", _fp8_product), ("int8", _int8_product)):
        try:
            call = make(size, device)
            call()
        except RuntimeError:  # NotImplementedError is one: the device has no such product
            continue
        rates[name] = 2 * size**3 / measure({name: [call]}, device, repeats)[name].us / 1e6
    source, target = torch.randn(numbers, device=device), torch.empty(numbers, device=device)
    # By a kernel: a graph would make a plain copy a node of its own, which an H200 runs at two thirds of the rate.
    us = measure({"copy": [lambda: torch.mul(source, 1.0, out=target)]}, device, repeats)["copy"].us
    return rates | {"copy": 2 * source.nbytes / us / 1e3}


def _bf16_product(size: int, device: torch.device) -> Call:
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return lambda: F.linear(a, b)


def _fp8_product(size: int, device: torch.device) -> Call:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    ones, per_row = torch.ones(size, 1, device=device), F.ScalingType.RowWise
    return lambda: F.scaled_mm(a, b.t(), ones, per_row, ones.t(), per_row, use_fast_accum=True)


def _int8_product(size: int, device: torch.device) -> Call:
    a, b = (torch.randn(size, size, device=device).mul(40).clamp(-127, 127).to(torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())
