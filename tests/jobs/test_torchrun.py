"""Several processes at one job: they write what one process writes, take up what killed ones left, and share the work.

This file is also a program: torchrun starts it, and it runs a list of commands, see `serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file

from fluxq.base.output import PASSPORT_FILE
from fluxq.base.ranks import ALONE, Ranks, launched, ranks_of_launch
from fluxq.calibrate import calls, capture
from fluxq.cli import cli
from fluxq.jobs import making
from fluxq.quantize import run
from fluxq.recipes.plan import LayerPlan, Method

RECIPE = """
version: 1
components:
  transformer:
    weights: {format: nvfp4}
    activations: {format: nvfp4}
    rounding: {method: gptq, scales: amax}
    modulation: {format: fp8}
calibration: {count: 6, steps: 2, seed: 0}
gate: {db_per_percent: 0.0}
"""
ROUNDED = RECIPE.replace("method: gptq", "method: rtn")
PROMPTS = [{"prompt": name, "height": (64, 48)[i % 2]} for i, name in enumerate("cat dog house tree sun ship".split())]
PLAN = "fluxq_plan.json"
JOBS = {  # name -> arguments; every stage that processes share is in one of them
    "fitted": ("quantize", "tiny", "--recipe", "fitted.yaml", "--no-check"),
    "parallel": ("quantize", "tiny", "--recipe", "fitted.yaml", "--no-check", "--parallel-blocks"),
    "scales": ("quantize", "tiny", "--recipe", "rounded.yaml"),
    "rtn": ("quantize", "tiny", "--recipe", "fitted.yaml", "--no-check", "--profile", "rtn"),
    "statistics": ("calibrate", "tiny", "--recipe", "fitted.yaml"),
}
HOW = ("--prompts", "prompts.jsonl", "--num-inference-steps", "2")


# The program


def serve(orders: str) -> None:
    """Run commands of `fluxq` one after the other, in processes that stay connected; each says what it did.

    An order is (name, arguments, whom to kill): (rank, "at" or "after", the n-th block or seconds).
    """
    from fluxq.base import ranks as module

    torch.set_num_threads(1)
    with ranks_of_launch() as ranks:
        module.ranks_of_launch = lambda: contextlib.nullcontext(ranks)
        for name, arguments, kill in json.loads(orders):
            made = obey(ranks.rank, name, arguments, kill)
            Path(f"{name}.{ranks.rank}.json").write_text(json.dumps(made))


def obey(rank: int, name: str, arguments: list[str], kill: Any) -> dict[str, list[str]]:
    """Run a command; what this process made of each kind."""
    made: dict[str, list[str]] = {"blocks": [], "batches": [], "shares": []}
    victim, how, when = kill or (None, None, None)
    if victim == rank and how == "after":
        threading.Timer(when, die).start()

    def finished(file: Path, *_: Any) -> str | None:
        last = victim == rank and how == "at" and len(made["blocks"]) + 1 == when
        return die() if last else file.name

    with pytest.MonkeyPatch.context() as patch, Path(f"{name}.{rank}.out").open("w") as said:
        note(patch, made, run, "finish", "blocks", finished)
        note(patch, made, calls, "_capture_batch", "batches", lambda *given: given[4].name)
        note(patch, made, capture, "_gathered", "shares", lambda share, *_: str(len(share)))
        with contextlib.redirect_stdout(said):
            cli.main(list(arguments), standalone_mode=False)
    return made


def note(patch: pytest.MonkeyPatch, made: dict, owner: Any, name: str, kind: str, what: Callable[..., Any]) -> None:
    own = getattr(owner, name)

    def noted(*given: Any) -> Any:
        made[kind].append(what(*given))
        return own(*given)

    patch.setattr(owner, name, noted)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# What tests use


def write_inputs(folder: Path) -> Path:
    (folder / "fitted.yaml").write_text(RECIPE)
    (folder / "rounded.yaml").write_text(ROUNDED)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


def arguments(name: str) -> list[str]:
    given = HOW if name != "rtn" else HOW[2:]
    return [*JOBS[name], *given, "-o", name]


def together(folder: Path, orders: list[Any], count: int = 2) -> subprocess.CompletedProcess[str]:
    """Two processes, as torchrun starts them, run the orders in `folder`."""
    return ranks.run(count, __file__, json.dumps(orders), cwd=folder)


def alone(folder: Path, name: str) -> Path:
    """The same command in this process."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(None):
        cli.main(arguments(name), standalone_mode=False)
    return folder / name


def files_of(folder: Path) -> dict[str, bytes]:
    """A checkpoint's files, but for the seconds that it took and the time of its passport; or a file."""
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if PASSPORT_FILE in found:
        found[PASSPORT_FILE] = re.sub(rb'"(created|sha256)": "[^"]*",?\n(?=}|  "by")', b"", found[PASSPORT_FILE])
    return {**found, PLAN: re.sub(rb'"seconds": [0-9.]+', b"", found[PLAN])}


def blocks_in(folder: Path) -> dict[str, tuple[int, int]]:
    found = folder.glob(".*.work/transformer/*.safetensors")
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
    """single("fitted") are the files that one process writes."""
    folder, made = write_inputs(tmp_path_factory.mktemp("single")), {}

    def of(name: str) -> dict[str, bytes]:
        if name not in made:
            made[name] = files_of(alone(folder, name))
        return made[name]

    return of


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Return the folder where two processes did all jobs, and one was killed at the first block it wrote of another."""
    folder = write_inputs(tmp_path_factory.mktemp("shared"))
    orders = [(name, arguments(name), None) for name in JOBS]
    killed = ("killed", [*arguments("parallel")[:-1], "killed"], (1, "at", 2))
    ended = together(folder, [*orders, killed])
    assert (folder / "statistics.1.json").is_file(), ended.stderr
    assert ended.returncode != 0
    (folder / "killed.err").write_text(ended.stderr)
    return folder


# Two processes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ("fitted", "parallel") else name for name in JOBS]
)
def test_two_processes_write_what_one_writes(shared, single, name):
    assert files_of(shared / name) == single(name)
    said = [(shared / f"{name}.{rank}.out").read_text() for rank in (0, 1)]
    assert name in said[0] and not said[1]  # one of them speaks


@pytest.mark.slow
def test_the_work_is_shared(shared):
    def did(name: str, what: str) -> list[list[str]]:
        return [json.loads((shared / f"{name}.{rank}.json").read_text())[what] for rank in (0, 1)]

    for name in ("fitted", "parallel"):
        first, second = did(name, "batches")
        assert (first, second) == (["batch-0000", "batch-0002"], ["batch-0001"])
    for name in ("scales", "statistics"):
        first, second = did(name, "shares")
        assert first == second == ["1"]
    first, second = did("rtn", "blocks")
    assert len(first) == len(second) == 5 and not set(first) & set(second)
    first, second = did("parallel", "blocks")  # five that are fitted, and five others
    assert [name for name in first + second if name < "0005"] == [f"000{i}.safetensors" for i in (0, 2, 4, 1, 3)]
    first, second = did("fitted", "blocks")
    assert second[:5] == [f".000{i}.safetensors.1.part" for i in range(5)]  # some groups of each block
    assert first[:3] == [".0000.safetensors.0.part", "0000.safetensors", ".0001.safetensors.0.part"]
    assert [name for name in second if not name.startswith(".")] == ["0006.safetensors", "0008.safetensors"]


@pytest.mark.slow
def test_a_killed_process_ends_all_and_one_alone_goes_on(shared, single, tmp_path):
    folder = shutil.copytree(shared, tmp_path / "copy")
    assert not (folder / "killed").exists() and "Signal 9 (SIGKILL)" in (folder / "killed.err").read_text()
    there = blocks_in(folder)
    assert {"0000.safetensors", "0001.safetensors"} <= there.keys() and "0003.safetensors" not in there
    made: dict[str, list[str]] = {"blocks": []}
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), contextlib.redirect_stdout(None):
        note(patch, made, run, "finish", "blocks", lambda file, *_: file.name)
        (work,) = folder.glob(".killed.*.work")
        patch.setattr(making, "capture_calls", without_a_pipeline(making.capture_calls))
        cli.main([*arguments("parallel")[:-1], "killed"], standalone_mode=False)
    assert sorted(made["blocks"]) == [f"{i:04}.safetensors" for i in range(10) if f"{i:04}.safetensors" not in there]
    assert files_of(folder / "killed") == single("parallel") and not work.exists()


def without_a_pipeline(capture_calls: Callable) -> Callable:
    """Captured calls are read; nothing may run."""
    return lambda pipe, *given, **how: capture_calls(Unrunnable(pipe), *given, **how)


class Unrunnable:
    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __call__(self, *, num_inference_steps: int) -> None:
        raise AssertionError("it ran")


# More, with processes of their own


@pytest.mark.long
@pytest.mark.parametrize("name", ["fitted", "parallel"])
def test_processes_killed_at_random_times_in_a_row_end_with_the_same_bytes(single, tmp_path, name):
    """Each time another number of them."""
    folder, draw = write_inputs(tmp_path), random.Random(name)
    for count in (2, 3, 2, 1):
        before = blocks_in(folder)
        kill = (draw.randrange(count), "after", 0.5 + 2.5 * draw.random())
        together(folder, [(name, arguments(name), kill)], count)
        assert (folder / name).exists() or before.items() <= blocks_in(folder).items()
    if not (folder / name).exists():
        ended = together(folder, [(name, arguments(name), None)], 3)
        assert ended.returncode == 0, ended.stderr
    assert files_of(folder / name) == single(name)
    assert not list(folder.glob(".*"))


@pytest.mark.long
@pytest.mark.parametrize("start", [("-m", "fluxq"), (str(Path(sys.executable).with_name("fluxq")),)])
def test_the_command_line_under_torchrun(single, tmp_path, start):
    folder = write_inputs(tmp_path)
    torchrun = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2", *start]
    command = [*torchrun, *arguments("fitted")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.count("checkpoint: fitted") == 1, done.stderr
    assert files_of(folder / "fitted") == single("fitted")
    again = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0 and again.stdout.count("checkpoint: fitted") == 1, again.stderr
    command[command.index("fitted.yaml")] = "rounded.yaml"
    refused = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert refused.returncode != 0 and not refused.stdout.count("checkpoint:")
    assert refused.stderr.count("holds a checkpoint that differs in") == 1  # the first says it, the others that it did


@pytest.mark.slow
def test_an_error_of_any_process_is_named_with_its_number(tmp_path, tiny_folder):
    """The second of two rounds every second block."""
    path = tiny_folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["single_transformer_blocks.0.proj_out.weight"][3, 3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    order = ["quantize", str(tiny_folder), "--recipe", "fp8", "--profile", "rtn", "--no-check", "-o", "out"]
    ended = ranks.run(2, "-m", "fluxq", *order, cwd=tmp_path)
    assert ended.returncode != 0 and not (tmp_path / "out").exists()
    assert "Error: process 1: single_transformer_blocks.0.proj_out: holds NaN or infinity" in ended.stderr


# The parts


def test_only_torchrun_makes_one_process_of_several(monkeypatch):
    """A scheduler's RANK and WORLD_SIZE belong to a whole allocation, and nobody may be there to wait for."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not launched()
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    with ranks_of_launch() as ranks:
        assert ranks is ALONE and ranks.leads
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launched()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not launched()


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert Ranks(7, 8, 3).device("cuda") == "cuda:3" and taken == [3]
    assert Ranks(7, 8, 3).device("cpu") == "cpu" and ALONE.device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match="process 4 of this machine has no GPU of its own: start at most 4 processes"):
        Ranks(4, 8, 4).device("cuda")


def test_every_group_has_one_owner_and_none_has_much_more_to_do():
    def layers(k: int, *sizes: int, method: Method = Method(gptq=True)) -> tuple[LayerPlan, ...]:  # noqa: B008
        return tuple(LayerPlan(f"{n}", n, k, "", "g", False, None, "", method=method) for n in sizes)

    flux = {"qkv": layers(3072, 3072, 3072, 3072), "add": layers(3072, 3072, 3072, 3072), "out": layers(3072, 3072),
            "add_out": layers(3072, 3072), "up": layers(3072, 12288), "down": layers(12288, 3072),
            "add_up": layers(3072, 12288), "add_down": layers(12288, 3072)}  # fmt: skip
    owners = run._owners(flux, 2)
    assert owners.keys() == flux.keys() and owners["down"] != owners["add_down"]
    assert sorted(owners.values()) == [0] * 4 + [1] * 4
    assert set(run._owners(flux, 1).values()) == {0} and len(set(run._owners(flux, 16).values())) == 8
    together = {name: tuple(replace(layer, together="out") for layer in flux[name]) for name in ("out", "add_out")}
    owners = run._owners({**flux, **together}, 8)
    assert owners["out"] == owners["add_out"] and len(set(owners.values())) == 7
    rounded = {name: layers(k, 64, method=Method()) for name, k in (("a", 128), ("b", 128), ("c", 256))}
    assert run._owners(rounded, 2) == {"c": 0, "a": 1, "b": 1}


if __name__ == "__main__":
    serve(sys.argv[1])
