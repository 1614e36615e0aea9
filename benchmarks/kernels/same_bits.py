"""Checks of kernels on a GPU: right ones first, then the interpreter's bytes, and in each run the same ones.

    python -m benchmarks.kernels.same_bits first --json found.0.json --shard 0/8
    python -m benchmarks.kernels.same_bits interpreter --json found.0.json --shard 0/8
    python -m benchmarks.kernels.same_bits runs --json found.0.json --shard 0/8
    python -m benchmarks.kernels.same_bits once       every kernel once, for a checker of memory and races to watch

`first` launches every kernel once at shapes of FLUX.1-dev and compares with torch, each in a process of its own: one
that crashes or hangs says nothing of the others. Inputs of `interpreter` are awkward: among them is every bfloat16
number, alone and beside NaN and infinity. Where a block decodes to NaN its codes may be any, and a NaN any NaN: what is
compared has those made alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.kernels import workloads
from benchmarks.kernels.apart import apart
from benchmarks.kernels.on_gpu import launching_on
from benchmarks.kernels.tune import DRY_CHIP
from fluxq.base.console import first_line
from fluxq.base.files import write_json
from fluxq.kernels import ops
from fluxq.kernels.attention import kernel as attention
from fluxq.kernels.dequantize.kernel import dequantize
from fluxq.kernels.epilogue import Epilogue
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.quantize_activation.kernel import quantize_tuned
from fluxq.kernels.quantize_activation.op import PRODUCED, Rounding, RoundingTensors
from fluxq.kernels.scaled_matmul.kernel import scaled_matmul
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import NoTile, chip_of, find_tile
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS

RUNS = 10
LONGEST = 60.0  # seconds that a kernel of `first` has, compiling included


@dataclass(frozen=True)
class Exact:
    """A call whose bytes are promised: of tensors that are made on the CPU, at the tiles of a chip."""

    name: str
    call: Callable[[str], Any]


@click.group()
def main() -> None:
    """Compare bytes."""


def _options(command: Callable) -> Callable:
    for option in (
        click.option("--json", "file", type=click.Path(path_type=Path), help="Where the outcomes go."),
        click.option("--shard", default="0/1", help="I/N: every N'th case, from the I'th."),
        click.option("--dry-run", is_flag=True, help="The interpreter in the GPU's place, little input."),
    ):
        command = option(command)
    return command


@main.command("first")
@_options
def first_command(file: Path | None, shard: str, dry_run: bool) -> None:
    """Every kernel once at FLUX.1-dev's shapes, against torch."""
    device, chip = _device_and_chip(dry_run)
    sweep = workloads.tiny_sweep() if dry_run else workloads.first_sweep()
    cases = [(case, shape) for shape, group in sweep for case in group]
    _each(cases, partial(apart, _once, device, chip, seconds=LONGEST), file, shard)


@main.command("interpreter")
@_options
def interpreter_command(file: Path | None, shard: str, dry_run: bool) -> None:
    """Bytes of the interpreter and of the GPU."""
    device, chip = _device_and_chip(dry_run)
    cases = list(exact_calls(awkward()[30:, :256]))[::6] if dry_run else list(exact_calls(awkward()))
    _each(cases, partial(against_interpreter, device=device, chip=chip), file, shard)


@main.command("runs")
@_options
def runs_command(file: Path | None, shard: str, dry_run: bool) -> None:
    """The same bytes in ten runs, and right ones."""
    device, chip = _device_and_chip(dry_run)
    cases = [(case, shape) for shape, group in _shapes(dry_run) for case in group if not workloads.is_library(case)]
    with interpreting() if dry_run else contextlib.nullcontext(), torch.inference_mode():
        _each(cases, partial(run_to_run, device=device, chip=chip, runs=2 if dry_run else RUNS), file, shard)


@main.command("once")
@_options
def once_command(file: Path | None, shard: str, dry_run: bool) -> None:
    """One case of each kind once, where no tile is full."""
    device, chip = _device_and_chip(dry_run)
    sweep = workloads.tiny_sweep() if dry_run else workloads.ragged_sweep()
    cases = [(case, shape) for shape, group in sweep for case in group if not workloads.is_library(case)]
    with interpreting() if dry_run else contextlib.nullcontext(), torch.inference_mode():
        _each(cases, partial(run_to_run, device=device, chip=chip, runs=1), file, shard)


def _once(device: torch.device, chip: str, case_and_shape: tuple[workloads.Case, workloads.Shape]) -> dict[str, Any]:
    with interpreting() if device.type == "cpu" else contextlib.nullcontext(), torch.inference_mode():
        return run_to_run(case_and_shape, device, chip, runs=1)


def not_proven(cases: Iterable[workloads.Case], folder: Path, chip: str) -> str:
    """Return the first case that a chip is offered and `first` did not find right, and why; empty if there is none.

    folder: where `first` left its files.
    """
    files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("first.*.json"))]
    found = {row["case"]: "" for file in files for row in file["cases"]}
    found |= {name: "it was not reached" for file in files for name in file["left"]}
    for row in (row for file in files for row in file["cases"] if not row["ok"] or "left_out" in row):
        found[row["case"]] = row.get("reason") or row.get("left_out") or f"relative error {row['error']:.2g}"
    for case in cases:
        why = found.get(case.name, "it was not tried")
        if why and not workloads.why_not(case, chip):
            return f"{case.name} is not proven right: {why}"
    return ""


def against_interpreter(exact: Exact, device: torch.device, chip: str) -> dict[str, Any]:
    """Hashes of both, and of how many bytes differ."""
    told = chip if chip.startswith("sm_") else "sm_80"  # AMD's chips keep values of attention in the order of that one
    with interpreting(told):
        expected = canonical(exact.call(chip))
    with interpreting(told) if device.type == "cpu" else contextlib.nullcontext(), launching_on(device):
        actual = canonical(exact.call(chip))
    differ = sum(int((a != b).sum()) for a, b in zip(actual, expected, strict=True))
    hashes = {"interpreter": _hash(expected), "device": _hash(actual)}
    return {"case": exact.name, "ok": differ == 0, "bytes": sum(map(len, actual)), "differ": differ, **hashes}


def run_to_run(
    case_and_shape: tuple[workloads.Case, workloads.Shape], device: torch.device, chip: str, runs: int
) -> dict:
    """Return a row that tells whether runs agree in every byte, and the first is right."""
    case, shape = case_and_shape
    row: dict[str, Any] = {"case": case.name, "shape": shape}
    why_not = "" if device.type == "cpu" else workloads.why_not(case, chip)
    if why_not:
        return row | {"ok": True, "left_out": why_not}
    torch.manual_seed(0)
    try:
        work = workloads.prepare(case, shape, device, chip)
        error = workloads.error(work)
    except (NoTile, torch.OutOfMemoryError) as problem:
        return row | {"ok": True, "left_out": first_line(problem)}
    hashes = {_hash(as_bytes(work.call())) for _ in range(runs)}
    return row | {"ok": len(hashes) == 1 and error <= workloads.TOLERANCE, "different": len(hashes), "error": error}


def exact_calls(x: Tensor) -> Iterator[Exact]:
    """Quantizers of x, and what decodes and multiplies without rounding. x: in rows of a multiple of 128."""
    k = x.shape[1]
    noise = torch.Generator().manual_seed(1)
    mean, smooth = torch.randn(k, generator=noise), torch.randn(k, generator=noise).exp()
    for name in PRODUCED:
        row = FORMATS[name]
        of = torch.nan_to_num(x, 0.0, 0.0, 0.0) if name == "fp8_tensor" else x  # one NaN would be everything
        steps: dict[str, dict[str, Any]] = {"": {}, " steps": {"mean": mean, "smooth": smooth, "hadamard": 128}}
        if not row.two_level and row.block == (1, 0):
            steps[" given"] = {"input_scale": torch.ones(len(x), 1)}
        if row.two_level:
            global_scale = torch.tensor(0.37)
            steps |= {" given": {"input_scale": global_scale}, " 4 over 6": {"four_over_six": True}}
        if row.has_byte_scales:
            steps[" swizzled"] = {"swizzled": True}
        steps[" beside"] = {"beside": of[:, :128]}
        for what, options in steps.items():
            yield Exact(f"quantize_activation {name}{what}", partial(_quantize, of, name, options))
    weights = torch.randn(len(x), min(k, 512), generator=noise) * torch.logspace(-4, 2, len(x))[:, None]
    for name in KERNEL_FORMATS:
        w = QuantizedTensor.quantize(weights, name)
        yield Exact(f"dequantize {name}", partial(_dequantize, w))
    yield Exact("attention_fp8 codes", partial(_attention_codes, torch.nan_to_num(x, 0.0, 0.0, 0.0)))
    yield Exact("scaled_matmul int8", partial(_int8, ops.quantize_activation(weights, FORMATS["int8"])))


def awkward() -> Tensor:
    """(32, 4096) bfloat16: every number in order, then again with zeros for NaN and infinity."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(16, 4096)
    return torch.cat([numbers, torch.nan_to_num(numbers, 0.0, 0.0, 0.0)])


def _quantize(x: Tensor, name: str, options: dict[str, Any], chip: str) -> QuantizedTensor:
    operands = RoundingTensors(**{key: value for key, value in options.items() if key in RoundingTensors._fields})
    how = Rounding(name, **{key: value for key, value in options.items() if key not in RoundingTensors._fields})
    return quantize_tuned(x, operands, how, chip)[0]


def _dequantize(w: QuantizedTensor, chip: str) -> Tensor:
    return dequantize(w, tile=find_tile("dequantize", w.format.name, chip, w.shape[0]))  # pyright: ignore


def _attention_codes(x: Tensor, chip: str) -> tuple[Tensor, ...]:
    """Those of q and v; those of k depend on the order in which its mean is summed."""
    heads = x.reshape(1, -1, 2, 64)
    tile = find_tile("attention", "quantize 64", chip, heads.shape[1])
    operands = attention.quantize_operands(heads, heads, heads, tile=tile)  # pyright: ignore[reportArgumentType]
    return operands.q.view(torch.uint8), operands.q_scale, operands.v.view(torch.uint8), operands.v_scale


def _int8(q: QuantizedTensor, chip: str) -> Tensor:
    """Integer sums are exact, and what follows them is in a fixed order."""
    tile = find_tile("scaled_matmul", "int8", chip, q.shape[0])
    bias = torch.linspace(-1, 1, q.shape[0])
    return scaled_matmul(q, q, epilogue=Epilogue(bias=bias, dtype=torch.float32), tile=tile)  # pyright: ignore


def canonical(result: Any) -> list[Tensor]:
    """The bytes of a result, codes of blocks of NaN and the bits of NaN made alike."""
    if isinstance(result, Tensor):
        return as_bytes(torch.where(result.isnan(), torch.nan, result))
    if isinstance(result, tuple):
        return [part for tensor in result for part in canonical(tensor)]
    plain = result.unswizzled()
    unspecified = plain.dequantize().isnan().reshape(*result.codes.shape, -1).any(-1)
    codes = torch.where(unspecified, 0, result.codes.view(torch.uint8))
    scales = [scale.float() for scale in (result.scale, result.global_scale) if scale is not None]
    return [codes.flatten(), *(part for scale in scales for part in canonical(scale))]


def as_bytes(result: Any) -> list[Tensor]:
    """Every tensor of a result, flat, as bytes."""
    if isinstance(result, Tensor):
        return [result.contiguous().view(-1).view(torch.uint8)]
    parts = result.tensors().values() if isinstance(result, QuantizedTensor) else result
    return [tensor for part in parts if part is not None for tensor in as_bytes(part)]


def _hash(parts: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def _each(cases: list[Any], outcome_of: Callable[[Any], dict[str, Any]], file: Path | None, shard: str) -> None:
    """The outcome of each case of a shard; one that raises is not ok. Written after each: the next may end this."""
    first, step = map(int, shard.split("/"))
    outcomes: list[dict[str, Any]] = []
    left = cases[first::step]
    _write(file, outcomes, left)
    while left:
        case, *left = left
        try:
            outcomes.append(outcome_of(case))
        except Exception as problem:  # whatever a kernel raises is its result
            reason = f"{type(problem).__name__}: {first_line(problem)}"
            outcomes.append({"case": _name(case), "ok": False, "reason": reason})
        _write(file, outcomes, left)
    failed = [row for row in outcomes if not row["ok"]]
    click.echo("\n".join(f"not ok: {row}" for row in failed) or f"{len(outcomes)} ok")
    if failed:
        raise click.exceptions.Exit(1)


def _write(file: Path | None, outcomes: list[dict[str, Any]], left: list[Any]) -> None:
    if file:
        write_json(file, {"cases": outcomes, "left": [*map(_name, left)], "complete": not left})


def _name(case: Any) -> str:
    return case.name if isinstance(case, Exact) else case[0].name


def _shapes(dry_run: bool) -> Iterator[tuple[workloads.Shape, tuple[workloads.Case, ...]]]:
    """Yield the shapes at which runs are compared, with their cases.

    The benchmark needs kernels at these shapes too, so that they are compiled by then.
    """
    if dry_run:
        yield from workloads.tiny_sweep()
        return
    for m in (4096, 1, 16, 512):
        yield (m, 9216, 3072), workloads.LINEARS
        for k in (3072, 12288):
            yield (m, k, k), (*workloads.QUANTIZERS, *workloads.ACTS)
        yield (m, 15360, 15360), workloads.BESIDE
        yield (m, 3072, 3072), (*workloads.NORMS, *workloads.ATTENTIONS)
    yield (4096, 3072, 15360), workloads.LINEARS
    yield (1, 18432, 3072), workloads.DECODERS


def _device_and_chip(dry_run: bool) -> tuple[torch.device, str]:
    if dry_run:
        return torch.device("cpu"), DRY_CHIP
    if not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA device: only --dry-run works without")
    return torch.device("cuda"), chip_of(torch.device("cuda"))


if __name__ == "__main__":
    main()
