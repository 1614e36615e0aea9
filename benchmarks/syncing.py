"""Cost of waiting for the disk in writing a checkpoint: as it is, and with files.sync taken away, in turn.

On a shared disk the two differ by less than rounds among themselves: the figure is what was spent waiting in it.

    python benchmarks/syncing.py [--gb 2] [--rounds 4] [--json benchmarks/syncing.json]

Blocks of random fp8 codes are finished one by one in a work folder, joined to one file, and the checkpoint put in its
place, by the functions that `fluxq quantize` calls; nothing is computed, so that the share of a whole run is smaller.
Streams of large files go to the disk as they are written either way (`base/tensors.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from fluxq import tiny
from fluxq.base import files, output
from fluxq.base.devices import commit, versions
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder
from fluxq.base.output import Output, atomic_output
from fluxq.base.tensors import TensorFile
from fluxq.quantize.checkpoint import copy_rest, join_shards
from fluxq.quantize.run import Outcome, finish

BLOCKS = 57  # of FLUX.1-dev
WHOLE_RUN = Path(__file__).parent / "full_size_rtn.json"  # the shortest: rounding to nearest


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> float:
    """Seconds of writing a checkpoint of BLOCKS times these tensors."""
    work, began = folder / "work", time.perf_counter()
    (work / "transformer").mkdir(parents=True)
    parts = {}
    for index in range(BLOCKS):
        file = work / "transformer" / f"{index:04}.safetensors"
        named = {f"blocks.{index}.{name}": tensor for name, tensor in tensors.items()}
        finish(file, named, Outcome())
        parts |= {name: (file, TensorFile(file).stored[name]) for name in named}
    with atomic_output(Output(folder / "out"), work) as part:
        (part / "transformer").mkdir()
        join_shards(part / "transformer", "diffusers", parts, {"format": "pt"})
        copy_rest(part, ModelFolder("tiny", Path(tiny.path())), ["transformer"])
        write_json(part / "fluxq_plan.json", {})
    return time.perf_counter() - began


class Watched:
    """files.sync, with the number of files and folders that it has waited for and the seconds that it took."""

    def __init__(self, sync: Callable[..., None]) -> None:
        self.sync, self.calls, self.seconds, self.depth = sync, 0, 0.0, 0

    def __call__(self, path: Path, *, deep: bool = True) -> None:
        self.calls += 1
        self.depth += 1
        began = time.perf_counter()
        self.sync(path, deep=deep)
        self.depth -= 1
        self.seconds += time.perf_counter() - began if not self.depth else 0.0


def timed(tensors: dict[str, torch.Tensor], sync: Callable[..., None], root: Path) -> float:
    with tempfile.TemporaryDirectory(dir=root) as folder:
        before = files.sync, output.sync
        files.sync = output.sync = sync
        try:
            return write(Path(folder), tensors)
        finally:
            files.sync, output.sync = before
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()  # what is still on its way does not count for the next


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    asked = parser.parse_args()
    side = int((asked.gb * 1e9 / BLOCKS / 4) ** 0.5)
    codes = {f"{n}.weight": torch.randint(0, 120, (side, side), dtype=torch.uint8) for n in ("q", "k", "v", "out")}
    tensors = {name: tensor.view(torch.float8_e4m3fn) for name, tensor in codes.items()}
    found: dict[str, list[float]] = {"with": [], "of it waiting": [], "without": []}
    watched = Watched(files.sync)
    timed(tensors, watched, asked.folder)  # once to warm up
    for index in range(asked.rounds):
        for name in ("with", "without") if index % 2 else ("without", "with"):
            watched.calls, watched.seconds = 0, 0.0
            sync = watched if name == "with" else lambda *_, **__: None
            found[name].append(round(timed(tensors, sync, asked.folder), 2))
            if name == "with":
                found["of it waiting"].append(round(watched.seconds, 3))
            print(index, name, found[name][-1], round(watched.seconds, 3), flush=True)
    waiting = statistics.median(found["of it waiting"])
    whole = json.loads(WHOLE_RUN.read_text(encoding="utf-8"))["recipes"]["fp8"]
    scaled = waiting * max(1, whole["bytes"] / (asked.gb * 1e9))
    result = {
        "commit": commit(),
        "date": date.today().isoformat(),
        "versions": versions(),
        "bytes": round(asked.gb * 1e9),
        "blocks": BLOCKS,
        "files and folders waited for": watched.calls,
        "seconds": found,
        "seconds waiting": waiting,
        "share of writing": round(waiting / statistics.median(found["with"]), 4),
        "of a 12 B checkpoint": {
            "how": "seconds waiting, as many times as fp8's checkpoint has the bytes (a bound: as many files), "
            "of the seconds of its whole run in full_size_rtn.json",
            "seconds waiting": round(scaled, 2),
            "seconds of the whole run": whole["seconds"]["quantize"],
            "share": round(scaled / whole["seconds"]["quantize"], 4),
        },
    }
    print(json.dumps(result, indent=2))
    if asked.json:
        write_json(asked.json, result)


if __name__ == "__main__":
    main()
