"""Search for the fastest tile on the GPU at hand: candidates that compile well are tried and timed, the best kept.

    python -m benchmarks.kernels.tune try  --json tried.0.json --shard 0/8     compile candidates, launch them once
    python -m benchmarks.kernels.tune time --json timed.json tried.*.json      time those that are fit
    python -m benchmarks.kernels.tune write --folder tuned timed.json         the best of them in front of kernels/tuned

SEARCHES are the candidates. One is tried only on chips where its kernel is offered. It is fit if its results are right
and every cell of it, but those that are not offered with any tile, is `ok` as aot.py judges: no spills, shared
memory and registers within the chip's, the right matrix instruction. Trying needs no GPU to itself: many processes
share one, and one that fails takes no other with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.kernels import aot, workloads
from benchmarks.kernels.apart import apart
from benchmarks.kernels.workloads import Case, Shape
from benchmarks.sources import sources
from fluxq.base.console import first_line
from fluxq.base.files import write_json, write_text
from fluxq.eval.speed.machine import describe
from fluxq.kernels import launch, tiles, timing
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.tiles import MatmulTile, NoTile, Tile, chip_of, find_tile, tuned_rows

DRY_CHIP = "sm_90"  # that a dry run takes the tiles of
TUNE_REPEATS = 10
COMPILING = 120.0  # seconds, at most, of a candidate and of each of its cells


@dataclass(frozen=True)
class Search:
    """The tile of a kernel for a format and up to max_m tokens, judged by a case at some shapes.

    tiles: what each candidate changes in the tile that is there; that one is a candidate too. also: formats for which
    the same tile is taken. plain: whether it is only for products that nothing but a bias follows.
    """

    kernel: str
    format: str
    case: Case
    shapes: tuple[Shape, ...]
    tiles: tuple[dict[str, Any], ...]
    max_m: int | None = None
    also: tuple[str, ...] = ()
    plain: bool = False


@click.group()
def main() -> None:
    """Find the fastest tiles on the GPU at hand."""


@main.command("try")
@click.option("--json", "file", type=click.Path(path_type=Path), required=True, help="Where the outcomes go.")
@click.option("--shard", default="0/1", help="I/N: every N'th candidate, from the I'th.")
@click.option("--seconds", type=float, default=600.0, help="Begin no candidate after this long.")
@click.option("--dry-run", is_flag=True, help="On the interpreter, a few candidates.")
def try_command(file: Path, shard: str, seconds: float, dry_run: bool) -> None:
    """Compile candidates ahead of time and check one launch of each."""
    begun = time.monotonic()
    device, chip = _device_and_chip(dry_run)
    first, step = map(int, shard.split("/"))
    outcomes: list[dict[str, Any]] = []
    write_json(file, {"chip": chip, "candidates": outcomes, "complete": False})
    for candidate in list(candidates(chip, dry_run))[first::step]:
        if time.monotonic() - begun > seconds:
            return
        outcomes.append(try_candidate(candidate, device, chip))
        write_json(file, {"chip": chip, "candidates": outcomes, "complete": False})
    write_json(file, {"chip": chip, "candidates": outcomes, "complete": True})


@main.command("time")
@click.argument("tried", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--json", "file", type=click.Path(path_type=Path), required=True, help="Where the timings go, and stay.")
@click.option("--seconds", type=float, default=600.0, help="Begin no search after this long.")
@click.option("--dry-run", is_flag=True, help="On the interpreter; the timings mean nothing.")
def time_command(tried: tuple[Path, ...], file: Path, seconds: float, dry_run: bool) -> None:
    """Time the candidates that are fit; searches that the file has of the same sources and candidates are kept.

    One that fails is named under "failed", and the next begins.
    """
    begun = time.monotonic()
    device, chip = _device_and_chip(dry_run)
    outcomes = [row for path in tried for row in json.loads(path.read_text(encoding="utf-8"))["candidates"]]
    fit = {
        number: list(dict.fromkeys(tile_of(r["tile"]) for r in outcomes if r["search"] == number and r["fit"]))
        for number, _ in enumerate(searches(dry_run))
    }
    report: dict[str, Any] = {"chip": chip, "dry_run": dry_run, "sources": sources(), "device": describe(device)}
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    same = all(earlier.get(key) == report[key] for key in ("chip", "dry_run", "sources"))
    kept = [row for row in earlier["searches"] if _tiles(row) == fit[row["search"]]] if same else []
    report |= {"complete": False, "searches": kept, "failed": []}
    write_json(file, report)
    done = {row["search"] for row in kept}
    with interpreting() if dry_run else contextlib.nullcontext():
        for number, search in enumerate(searches(dry_run)):
            if not fit[number] or number in done:
                continue
            if time.monotonic() - begun > seconds:
                return
            try:
                timed = time_search(search, fit[number], device, chip, 2 if dry_run else TUNE_REPEATS)
                report["searches"].append({"search": number, **timed})
            except Exception as problem:  # out of memory is one
                reason = f"{type(problem).__name__}: {first_line(problem)}"
                report["failed"].append({"search": number, "reason": reason})
            write_json(file, report)
    write_json(file, report | {"complete": not report["failed"]})


def _tiles(search: dict[str, Any]) -> list[Tile | MatmulTile]:
    """Return the tiles that an earlier call timed in a search."""
    return [tile_of(row["tile"]) for row in search["tiles"]]


@main.command("write")
@click.argument("timed", type=click.Path(exists=True, path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where the tables go.")
def write_command(timed: Path, folder: Path) -> None:
    """Write tables with the best candidates in front."""
    write_tuned(json.loads(timed.read_text(encoding="utf-8")), folder)


@contextlib.contextmanager
def tuned_from(folder: Path | None) -> Iterator[None]:
    """Inside the block `find_tile` reads the tables in `folder` instead of kernels/tuned; None changes nothing."""
    before = tiles.TUNED
    tiles.TUNED = folder or before
    tuned_rows.cache_clear()
    launch.PLANS.clear()
    try:
        yield
    finally:
        tiles.TUNED = before
        tuned_rows.cache_clear()
        launch.PLANS.clear()


def searches(dry_run: bool) -> tuple[Search, ...]:
    """All, or for a dry run one that compiles fast, at a tiny shape with one candidate."""
    if not dry_run:
        return SEARCHES
    one = next(search for search in SEARCHES if search.kernel == "dequantize")
    return (dataclasses.replace(one, shapes=((3, 4, 64),), tiles=one.tiles[:1]),)


def candidates(chip: str, dry_run: bool = False) -> Iterator[tuple[int, Search, Tile | MatmulTile]]:
    """(number of the search, search, tile) where the chip can run the kernel; the tile in use comes first."""
    for number, search in enumerate(searches(dry_run)):
        try:
            base = _base(search, chip)
        except NoTile:
            continue
        if dry_run or not workloads.why_not(search.case, chip):
            for tile in dict.fromkeys([base, *(_changed(base, changes) for changes in search.tiles)]):
                yield number, search, tile


def _base(search: Search, chip: str) -> Tile | MatmulTile:
    """The tile in use."""
    return find_tile(search.kernel, search.format, chip, search.max_m or search.shapes[0][0], plain=search.plain)


def _changed(base: Tile | MatmulTile, changes: dict[str, Any]) -> Tile | MatmulTile:
    """The tile with these changes; sums that move to fp32 after several steps of K do so after each without copies."""
    tile = dataclasses.replace(base, **changes)
    if isinstance(tile, MatmulTile) and tile.acc_split > tile.k and not tile.descriptors:
        tile = dataclasses.replace(tile, acc_split=tile.k)
    return tile


def try_candidate(candidate: tuple[int, Search, Tile | MatmulTile], device: torch.device, chip: str) -> dict[str, Any]:
    """Try a tile; return a row that tells whether it is fit, and if not, why."""
    number, search, tile = candidate
    verdict: dict[str, Any] = {"search": number, "kernel": search.kernel, "format": search.format, "tile": asdict(tile)}
    try:
        # Compiling forks, and this process holds a CUDA context once a candidate was launched.
        if bad := apart(why_unfit, search, tile, chip, seconds=COMPILING):
            return verdict | {"fit": False, "reason": bad}
        with (
            tempfile.TemporaryDirectory() as folder,
            _only(search, tile, chip, Path(folder)),
            interpreting() if device.type == "cpu" else contextlib.nullcontext(),
        ):
            errors = [workloads.error(workloads.prepare(search.case, s, device, chip)) for s in search.shapes]
    except Exception as problem:  # whatever a launch raises says that this tile cannot be used
        return verdict | {"fit": False, "reason": f"{type(problem).__name__}: {first_line(problem)}"}
    fit = all(error <= workloads.TOLERANCE for error in errors)
    return verdict | {"fit": fit, "reason": "" if fit else f"relative errors {errors}", "errors": errors}


def why_unfit(search: Search, tile: Tile | MatmulTile, chip: str) -> str:
    """Compile the cells of a tile ahead of time; return why they cannot be used, empty if they can."""
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / f"{search.kernel}.json", [_row(search, tile, chip, everything=True)])
        with tuned_from(Path(name)):
            refused = {place for place, row in aot.accepted_rows(aot.triton.__version__).items() if not row.ok}
            offered = [cell for cell in _cells(search.kernel) if (cell.name, cell.format, chip) not in refused]
            rows = [aot.compile_cell(cell, chip, COMPILING) for cell in offered]
    if not rows:
        return "no cell is made of it"
    return "; ".join(f"{row.format}: {row.reason}" for row in rows if not row.ok)


def _cells(kernel: str) -> tuple[aot.Cell, ...]:
    """A kernel's cells with the tiles of now, from a copy: the module that others use keeps its own."""
    spec = find_spec(f"benchmarks.kernels.cells.{kernel}")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"benchmarks.kernels.cells.{kernel}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CELLS


@torch.inference_mode()
def time_search(
    search: Search, fit: Sequence[Tile | MatmulTile], device: torch.device, chip: str, repeats: int
) -> dict[str, Any]:
    """us of each fit tile at each shape, all timed in turns; `best` has the least geometric mean."""
    us: dict[Tile | MatmulTile, list[float]] = {tile: [] for tile in fit}
    with tempfile.TemporaryDirectory() as name:
        for shape in search.shapes:
            calls = {}
            for number, tile in enumerate(fit):
                folder = Path(name) / str(number)
                with _only(search, tile, chip, folder):
                    first = workloads.prepare(search.case, shape, device, chip)
                    more = timing.sets_of_operands(first.bytes, device) - 1
                    sets = [first, *(workloads.prepare(search.case, shape, device, chip) for _ in range(more))]
                calls[str(number)] = [partial(_called_with, folder, work.call) for work in sets]
            for number, timed in timing.measure(calls, device, repeats).items():
                us[fit[int(number)]].append(timed.us)
    best = min(us, key=lambda tile: math.prod(us[tile]))
    return {
        "kernel": search.kernel,
        "format": search.format,
        "shapes": search.shapes,
        "tiles": [{"tile": _plain(tile), "us": times} for tile, times in us.items()],
        "best": _plain(best),
    }


def _called_with(folder: Path, call: timing.Call) -> Any:
    """Call with the tables in `folder`: some kernels look their tile up at each call. A graph's replay has no call."""
    with tuned_from(folder):
        return call()


def write_tuned(timed: dict[str, Any], folder: Path) -> None:
    """kernels/tuned again, in `folder`, with the best tiles of a GPU in front; what they replace is gone for that chip.

    Raises ValueError for timings of a dry run.
    """
    if timed["dry_run"]:
        raise ValueError("these are timings of a dry run, no tile can be chosen by them: run it on a GPU")
    chip, gpu = timed["chip"], timed["device"]["gpu"]
    best = [(SEARCHES[row["search"]], tile_of(row["best"])) for row in timed["searches"]]
    for file in sorted(tiles.TUNED.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        front = [
            _row(search, tile, chip) | {"format": name, "measured": gpu}
            for search, tile in best
            if search.kernel == file.stem
            for name in (search.format, *search.also)
        ]
        front.sort(key=lambda row: (row["format"], row.get("max_m", math.inf), "plain" not in row))
        write_rows(folder / file.name, front + [row for row in map(_without(front, chip), rows) if row])


def _without(front: list[dict], chip: str) -> Any:
    """Return a function that gives what is left of a row for other chips, None if nothing.

    A row loses this chip where rows in front replace it there.
    """

    def left(row: dict[str, Any]) -> dict[str, Any] | None:
        replaced = any(
            (new["format"], new.get("plain")) == (row["format"], row.get("plain"))
            and new.get("max_m", math.inf) >= row.get("max_m", math.inf)
            for new in front
        )
        if not replaced or chip not in row.get("chips", ()):
            return row
        others = [name for name in row["chips"] if name != chip]
        return row | {"chips": others} if others else None

    return left


@contextlib.contextmanager
def _only(search: Search, tile: Tile | MatmulTile, chip: str, folder: Path) -> Iterator[None]:
    """Inside the block the tables hold this tile before all others."""
    for file in sorted(_TUNED.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        mine = [_row(search, tile, chip, everything=True)] if file.stem == search.kernel else []
        write_rows(folder / file.name, mine + rows)
    with tuned_from(folder):
        yield


def _row(search: Search, tile: Tile | MatmulTile, chip: str, *, everything: bool = False) -> dict[str, Any]:
    """A row of kernels/tuned; everything: for any number of tokens."""
    row: dict[str, Any] = {"format": search.format, "chips": [chip]}
    if search.max_m is not None and not everything:
        row["max_m"] = search.max_m
    if search.plain:
        row["plain"] = True
    return row | {"tile": _plain(tile)}


def _plain(tile: Tile | MatmulTile) -> dict[str, Any]:
    """As kernels/tuned spells it: defaults left out."""
    return {
        field.name: value for field in dataclasses.fields(tile) if (value := getattr(tile, field.name)) != field.default
    }


def tile_of(fields: dict[str, Any]) -> Tile | MatmulTile:
    return (Tile if "rows" in fields else MatmulTile)(**fields)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """A file of kernels/tuned, a row to a line."""
    write_text(file, "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")


def _device_and_chip(dry_run: bool) -> tuple[torch.device, str]:
    if dry_run:
        return torch.device("cpu"), DRY_CHIP
    if not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA device: only --dry-run works without")
    device = torch.device("cuda")
    return device, chip_of(device)


def _blocks(*sizes: tuple[int, int, int, int, int], **more: Any) -> tuple[dict[str, Any], ...]:
    """Changes of a MatmulTile from (m, n, k, warps, stages)."""
    return tuple(dict(zip(("m", "n", "k", "warps", "stages"), size, strict=True)) | more for size in sizes)


def _rows(*sizes: tuple[int, int, int]) -> tuple[dict[str, Any], ...]:
    """Changes of a Tile from (rows, columns, warps)."""
    return tuple(dict(zip(("rows", "columns", "warps"), size, strict=True)) for size in sizes)


_TUNED = tiles.TUNED
BIG: tuple[Shape, ...] = ((4096, 12288, 3072), (4608, 3072, 15360))
FEW: tuple[Shape, ...] = ((16, 12288, 3072), (16, 3072, 12288))
ONE: tuple[Shape, ...] = ((1, 18432, 3072),)
SEQUENCES: tuple[Shape, ...] = ((4608, 3072, 3072), (4096, 3072, 3072))
COPIED = {"descriptors": True, "halves": True}
LARGE_8_BIT = (
    *_blocks((128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (128, 128, 128, 8, 4), **COPIED),
    *_blocks((128, 128, 128, 8, 4), (128, 128, 64, 8, 5), (64, 256, 128, 8, 4), descriptors=True, halves=False),
    *_blocks((128, 128, 128, 8, 3), (128, 128, 64, 8, 4), descriptors=False, halves=False),
)
SMALL_8_BIT = _blocks((16, 64, 256, 4, 4), (16, 128, 128, 4, 4), (32, 64, 128, 4, 5), (64, 128, 128, 4, 4))
DECODED = _blocks((128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (64, 128, 128, 4, 3), (128, 64, 128, 4, 3))
SMALL_DECODED = _blocks((16, 64, 128, 4, 4), (16, 128, 128, 4, 3), (32, 64, 128, 4, 3))
SMALL_16_BIT = _blocks((16, 32, 128, 4, 4), (16, 128, 64, 4, 4), (16, 64, 64, 4, 5))
ONE_TOKEN = _rows((4, 1024, 4), (4, 2048, 8), (8, 512, 4), (16, 512, 4), (2, 1024, 2))
BLOCK_ROWS = _rows((1, 1024, 4), (2, 512, 4), (8, 512, 8), (16, 256, 8))
SEARCHES = (
    Search("scaled_matmul", "fp8", Case("matmul", "fp8-fp8", "scaled_matmul"), BIG, LARGE_8_BIT, also=("fp8_tensor",)),
    *(
        Search("scaled_matmul", "int8", Case("matmul", "int8-int8", "scaled_matmul"), BIG, LARGE_8_BIT, plain=plain)
        for plain in (True, False)
    ),
    *(
        Search("w4a8_matmul", f"nvfp4-{name}", Case("matmul", f"nvfp4-{name}", "w4a8_matmul"), BIG, DECODED)
        for name in ("fp8", "int8")
    ),
    *(
        Search(
            "weight_only_matmul",
            name,
            Case("matmul", f"{name}-16bit", "weight_only_matmul"),
            ONE,
            ONE_TOKEN,
            max_m=1,
        )
        for name in ("nvfp4", "int4", "fp8")
    ),
    *(
        Search("quantize_activation", name, Case("quantize_activation", name, "quantize_activation"), shapes, changes)
        for shapes in (((4608, 3072, 3072), (4608, 12288, 12288)),)
        for name, changes in (("mxfp8", BLOCK_ROWS), ("mxfp4", BLOCK_ROWS))
    ),
    Search(
        "quantize_activation",
        "nvfp4",
        Case("quantize_activation", "nvfp4 static", "quantize_activation"),
        ((4608, 3072, 3072), (4608, 12288, 12288)),
        BLOCK_ROWS,
    ),
    *(
        Search(
            "dequantize", name, Case("dequantize", name, "dequantize"), ((4096, 18432, 3072),), BLOCK_ROWS, also=also
        )
        for name, also in (("nvfp4", ()), ("fp8", ("fp8_tensor",)), ("int8", ()), ("mxfp4", ()))
    ),
    *(
        Search("input_gradient", name, Case("gradient", name, "input_gradient"), BIG, DECODED, also=also)
        for name, also in (("nvfp4", ("mxfp4",)), ("fp8", ("int8", "fp8_tensor", "mxfp8")), ("int4", ()))
    ),
    Search(
        "scaled_matmul",
        "fp8",
        Case("matmul", "fp8-fp8", "scaled_matmul"),
        FEW,
        SMALL_8_BIT,
        max_m=64,
        also=("fp8_tensor",),
    ),
    Search("scaled_matmul", "int8", Case("matmul", "int8-int8", "scaled_matmul"), FEW, SMALL_8_BIT, max_m=64),
    *(
        Search(
            "w4a8_matmul", f"nvfp4-{name}", Case("matmul", f"nvfp4-{name}", "w4a8_matmul"), FEW, SMALL_DECODED, max_m=64
        )
        for name in ("fp8", "int8")
    ),
    *(
        Search(
            "weight_only_matmul",
            name,
            Case("matmul", f"{name}-16bit", "weight_only_matmul"),
            FEW,
            SMALL_16_BIT,
            max_m=16,
        )
        for name in ("nvfp4", "int4", "fp8")
    ),
    Search(
        "qk_norm_rope",
        "128",
        Case("qk_norm_rope", "16bit", "qk_norm_rope"),
        ((4608, 3072, 3072),),
        _rows((8, 128, 4), (16, 128, 4), (32, 128, 4)),
    ),
    Search(
        "attention",
        "128",
        Case("attention", "fp8", "attention_fp8"),
        SEQUENCES,
        _blocks((128, 128, 128, 8, 3), (64, 128, 128, 4, 2), (64, 128, 128, 4, 3), (128, 128, 128, 4, 2)),
    ),
    Search(
        "attention",
        "quantize 128",
        Case("attention", "fp8", "attention_fp8"),
        SEQUENCES,
        _rows((32, 128, 4), (64, 128, 4), (128, 128, 8)),
    ),
    *(
        Search(
            "block_scaled_matmul",
            name,
            Case("matmul", f"{name}-{name}", "block_scaled_matmul"),
            BIG,
            _blocks((128, 128, 128, 8, 3), (128, 256, 128, 8, 3), (128, 128, 256, 8, 4)),
        )
        for name in ("nvfp4", "mxfp8", "mxfp4")
    ),
)

if __name__ == "__main__":
    main()
