"""Quantizing from disk to disk: what is in memory, what is shared out among threads, and processes killed anywhere."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import watched
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from fluxq.base import console
from fluxq.base.files import atomic_path
from fluxq.base.model import resolve_model
from fluxq.base.output import sole_writer
from fluxq.base.tensors import TensorFile
from fluxq.jobs import making
from fluxq.jobs.job import _size, _space_needed, with_digests
from fluxq.quantize import run
from fluxq.quantize.checkpoint import SourceWeights, write_component
from fluxq.quantize.nearest import in_order, round_units, units_of
from fluxq.quantize.record import Record, read_record
from fluxq.quantize.run import Outcome, blocks_of, quantize_component

QUANTIZE = ("quantize", "tiny", "--recipe", "nvfp4", "--profile", "rtn", "--no-check", "-o", "out")
PLAN = "fluxq_plan.json"  # says how long it took
FITTED = """
version: 1
components:
  transformer:
    weights: {format: nvfp4}
    activations: {format: nvfp4}
    rounding: {method: gptq, scales: amax}
    modulation: {format: fp8}
calibration: {prompts: default, count: 3, steps: 2, seed: 0}
gate: {db_per_percent: 0.0}
"""
linux = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux says what a process read and held")


# What tests use


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict[str, bytes], float]:
    """(files of a checkpoint that nothing interrupted, seconds)."""
    folder = tmp_path_factory.mktemp("whole")
    watched.run(folder, "--version")  # whatever is imported once
    start = time.monotonic()
    assert watched.run(folder, *QUANTIZE)["code"] == 0
    return files_of(folder / "out"), time.monotonic() - start


@pytest.fixture(scope="module")
def model_of(full_size) -> Callable[[Path, int, int, int], Path]:
    """model_of(folder, hidden, double, single) writes a random FLUX, see benchmarks/full_size.py."""

    def make(folder: Path, *shape: int) -> Path:
        full_size.write_model(folder, *shape, runs=False)
        return folder

    return make


@pytest.fixture(scope="module")
def full_size() -> Any:
    import importlib.util

    path = Path(__file__).parents[2] / "benchmarks" / "full_size.py"
    spec = importlib.util.spec_from_file_location("full_size_for_streaming", path)
    assert spec and spec.loader
    module, before = importlib.util.module_from_spec(spec), list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def files_of(folder: Path) -> dict[str, bytes]:
    """All of a checkpoint's files, but for the seconds that it took."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {**found, PLAN: re.sub(rb'"seconds": [0-9.]+', b"", found[PLAN])}


def blocks_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Finished blocks: which file each is, and when it was written."""
    found = folder.glob(".out.*.work/transformer/*.safetensors")
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix not in (".txt", ".json"))


def tiny_plan(recipe: str = "nvfp4") -> Any:
    options = making.JobOptions(model="tiny", recipe=recipe, profile="rtn")
    return making.job_of(options, writes=False).plans[0]


# A process that is killed

FINISH = ("fluxq.quantize.run", "finish")
POINTS = {  # where a process is killed -> blocks that are done by then
    "before the first block": (*FINISH, 1, 0),
    "before the fourth block": (*FINISH, 4, 3),
    "in the middle of writing one": ("fluxq.base.files", "sync", 11, None),
    "before a shard": ("fluxq.quantize.checkpoint", "join_weights", 1, 10),
    "before the check of files": ("fluxq.jobs.making", "hash_files", 1, 10),
    "before it is put in place": ("fluxq.jobs.making", "write_text", 1, 10),
}


@pytest.mark.slow
@linux
@pytest.mark.parametrize("point", POINTS)
def test_killed_somewhere_the_same_command_goes_on_there(whole, tmp_path, point):
    module, name, call, done = POINTS[point]
    killed = watched.run(tmp_path, *QUANTIZE, die_at=(module, name, call))
    assert killed["code"] == -signal.SIGKILL and not (tmp_path / "out").exists()
    there = blocks_in(tmp_path)
    assert done is None or len(there) == done
    again = watched.run(tmp_path, *QUANTIZE, die_at=(*FINISH, 0))
    assert again["code"] == 0 and again["calls"] == 10 - len(there)
    assert "going on with what an interrupted run left in" in again["err"]
    assert files_of(tmp_path / "out") == whole[0] and beside(tmp_path) == ["out"]


@pytest.mark.slow
@linux
@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_at_random_times_in_a_row_it_still_ends_with_the_same_bytes(whole, tmp_path, count):
    draw = random.Random(count)
    for _ in range(count):
        before = blocks_in(tmp_path)
        ended = watched.run(tmp_path, *QUANTIZE, kill_after=draw.random() * whole[1])
        if ended["code"] == 0:
            assert files_of(tmp_path / "out") == whole[0] and beside(tmp_path) == ["out"]
            shutil.rmtree(tmp_path / "out")
        elif not (tmp_path / "out").exists():
            assert before.items() <= blocks_in(tmp_path).items()  # nothing is done twice
        else:
            assert files_of(tmp_path / "out") == whole[0]
    assert watched.run(tmp_path, *QUANTIZE)["code"] == 0
    assert files_of(tmp_path / "out") == whole[0] and beside(tmp_path) == ["out"]


STAGES = {  # of a fitted job: the files that are written in each
    "capture": r"calls/",
    "noise levels": r"\.?levels\.json",
    "outputs of blocks": r"transformer-outputs",
    "finished blocks": r"transformer/",
    "checkpoint": r"new/",
    "the end": r"new$|.*(?<!/)$",
}


def stage_of(name: str) -> str:
    return next(stage for stage, pattern in STAGES.items() if re.match(pattern, name))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> tuple[tuple[str, ...], dict[str, bytes], list[str]]:
    """(a command, the files that it gives, the changes of files it makes) of a job with every stage."""
    folder = tmp_path_factory.mktemp("fitted")
    (folder / "fitted.yaml").write_text(FITTED)
    recipe = ("--recipe", str(folder / "fitted.yaml"), "--num-inference-steps", "3", "--no-check")
    command = ("quantize", "tiny", *recipe, "-o", "out")
    done = watched.run(folder, *command, die_at_write=(0, 0))
    assert done["code"] == 0 and {stage_of(name) for name in done["written"]} == set(STAGES)
    return command, files_of(folder / "out"), done["written"]


@linux
@pytest.mark.long
def test_a_fitted_job_that_is_killed_at_any_write_ends_with_the_same_bytes(fitted, tmp_path):
    """At random ones of each stage; every second one is killed again before it ends, some in the middle of a write."""
    command, expected, written = fitted
    draw, stages = random.Random(8), list(STAGES)
    draw.shuffle(stages)
    for turn in range(8):
        stage, folder = stages[turn % len(stages)], tmp_path / str(turn)
        at = draw.choice([index for index, name in enumerate(written) if stage_of(name) == stage]) + 1
        delays = [draw.choice((0, 0.002 * draw.random())) for _ in range(2)]
        killed = watched.run(folder, *command, die_at_write=(at, delays[0]))
        assert killed["code"] == -signal.SIGKILL, (turn, stage, at)
        there = blocks_in(folder)
        if turn % 2:
            watched.run(folder, *command, die_at_write=(draw.randrange(1, 40), delays[1]))
            assert (folder / "out").exists() or there.items() <= blocks_in(folder).items(), (turn, stage, at)
            there = blocks_in(folder)
        standing = (folder / "out").exists()
        again = watched.run(folder, *command, die_at=(*FINISH, 0))
        assert again["code"] == 0, (turn, stage, at, again["err"])
        assert standing or again["calls"] == 10 - len(there), (turn, stage, at)
        assert files_of(folder / "out") == expected and beside(folder) == ["out"], (turn, stage, at)
        shutil.rmtree(folder)


REPLACING = {  # where a process is killed -> what then stands at the output
    "before the old one is moved": ("os", "rename", 1, "old"),
    "before the new one is moved": ("os", "rename", 2, "nothing"),
    "before the old one is removed": ("shutil", "rmtree", 1, "new"),
}


@pytest.mark.slow
@linux
@pytest.mark.parametrize("point", REPLACING)
def test_killed_while_it_replaces_a_checkpoint_the_old_one_is_not_lost(whole, tmp_path, point):
    module, name, call, expected = REPLACING[point]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    (tmp_path / "out" / PLAN).write_text(json.dumps({"files": {"old": hashlib.sha256(b"old").hexdigest()}}))
    command = (*QUANTIZE, "--overwrite")
    assert watched.run(tmp_path, *command, die_at=(module, name, call))["code"] == -signal.SIGKILL
    standing = [path.name for path in (tmp_path / "out").iterdir()] if (tmp_path / "out").exists() else []
    assert expected == ("nothing" if not standing else "old" if "old" in standing else "new")
    assert len([*tmp_path.glob("out/old"), *tmp_path.glob(".out.*.work/old/out/old")]) == 1
    assert watched.run(tmp_path, *command)["code"] == 0
    assert files_of(tmp_path / "out") == whole[0] and beside(tmp_path) == ["out"]


def test_a_block_that_was_damaged_since_is_made_again(tmp_path, caplog):
    plan, source = tiny_plan(), SourceWeights(resolve_model("tiny"), "transformer")
    make = partial(quantize_component, plan, source, None, torch.bfloat16, tmp_path)
    files = make()
    before = [path.read_bytes() for path in files]
    os.truncate(files[3], 1000)
    kept = [path.stat().st_ino for path in files]
    assert make() == files and [path.read_bytes() for path in files] == before
    assert [path.stat().st_ino == old for path, old in zip(files, kept, strict=True)] == [i != 3 for i in range(10)]
    assert "0003.safetensors: truncated or damaged" in caplog.text and "this block is made again" in caplog.text


# Whose work is gone on with


@pytest.fixture
def interrupted(tmp_path, monkeypatch) -> Callable[..., Path]:
    """interrupted(model, recipe) is the work folder that a run into tmp_path/out left."""

    def begin(model: str, recipe: str) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(making, "hash_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                quantize(tmp_path, model, recipe)
        (work,) = tmp_path.glob(".out.*.work")
        return work

    return begin


def quantize(folder: Path, model: str = "tiny", recipe: str = "fp8", **changes: Any) -> Record:
    how = {"profile": "rtn", "check": False, **changes}
    return making.quantize(making.job_of(making.JobOptions(model, recipe, output=str(folder / "out"), **how)))


@pytest.mark.slow
def test_work_of_an_output_whose_name_goes_on_is_left_alone(tmp_path, interrupted):
    """`out` is no reason to touch what was begun for `out.v2`."""
    work = interrupted("tiny", "int8")
    other = work.rename(tmp_path / work.name.replace(".out.", ".out.v2."))
    before = files_below(other)
    quantize(tmp_path)
    quantize(tmp_path, recipe="int4", overwrite=True)
    assert files_below(other) == before


def files_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_another_recipe_is_refused_by_name_and_the_work_stays(tmp_path, interrupted, caplog):
    work = interrupted("tiny", "fp8")
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    with pytest.raises(ValueError, match=r"out: an interrupted run that differs in plans, recipe is kept in .*work; "):
        quantize(tmp_path, recipe="int4")
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == [work.name]
    quantize(tmp_path)
    assert f"going on with what an interrupted run left in {work}" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_overwrite_removes_what_another_job_had_done(tmp_path, interrupted, caplog):
    work = interrupted("tiny", "fp8")
    quantize(tmp_path, recipe="int4", overwrite=True)
    assert f"that differs in plans, recipe had done is removed: {work}" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def change(folder: Path, component: str) -> None:
    if component == "scheduler":
        path = folder / component / "scheduler_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "shift": config["shift"] + 0.25}))
        return
    (path,) = (folder / component).glob("*.safetensors")
    tensors = load_file(path)
    tensors[min(tensors)] += 1
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("component", ["transformer", "text_encoder", "scheduler"])
def test_a_changed_model_is_refused_by_name(tmp_path, tiny_folder, interrupted, component):
    """Of a finished job, and of an interrupted one but for its weights, which the blocks tell."""
    interrupted(str(tiny_folder), "fp8")
    change(tiny_folder, component)
    named = rf"{'model' if component == 'transformer' else 'copied'} \({component}\)"
    if component != "transformer":
        with pytest.raises(ValueError, match=f"an interrupted run that differs in {named} is kept in "):
            quantize(tmp_path, str(tiny_folder))
    quantize(tmp_path, str(tiny_folder), overwrite=component != "transformer")
    change(tiny_folder, component)
    with pytest.raises(ValueError, match=f"holds a checkpoint that differs in {named}; give another --output, or"):
        quantize(tmp_path, str(tiny_folder))


@pytest.mark.slow
def test_the_manifest_of_an_interrupted_job_says_what_decides_its_bytes(tmp_path, interrupted):
    manifest = json.loads((interrupted("tiny", "fp8") / "job.json").read_text())
    prepared = making.job_of(making.JobOptions("tiny", "fp8", "rtn", str(tmp_path / "x"), check=False))
    assert manifest["recipe"] == prepared.recipe.digest and manifest["prompts"] == prepared.prompts.digest
    assert manifest["model"] == {"transformer": prepared.folder.stamp("transformer")}
    (work,) = tmp_path.glob(".out.*.work")
    hashed = Outcome.read((work / "transformer").glob("*.safetensors")).fingerprints
    assert prepared.folder.digest("transformer", hashed) == prepared.folder.digest("transformer")
    assert len(hashed) == len(SourceWeights(prepared.folder, "transformer").names)
    assert {"text_encoder", "scheduler", "vae", "model_index.json"} <= manifest["copied"].keys()
    assert manifest["calibration"].keys() >= {"count", "steps", "seed"} and manifest["call"] == prepared.call


@pytest.mark.slow
def test_what_a_kill_after_the_end_left_is_cleared_away(tmp_path, interrupted):
    """A process that is killed when the checkpoint stands, but its work folder and lock do too."""
    work = interrupted("tiny", "fp8")
    left = tmp_path / "left"
    work.rename(left)
    record = quantize(tmp_path)
    left.rename(work)
    (tmp_path / ".out.lock").touch()
    assert quantize(tmp_path) == record and beside(tmp_path) == ["out"]


@pytest.mark.slow
def test_another_shard_size_goes_on_with_the_same_blocks(tmp_path, interrupted, monkeypatch):
    interrupted("tiny", "fp8")
    monkeypatch.setattr(run, "finish", lambda *_: pytest.fail("made again"))
    quantize(tmp_path, max_shard_bytes=400_000)
    assert len(list((tmp_path / "out" / "transformer").glob("*-of-*.safetensors"))) > 2


@pytest.mark.slow
def test_statistics_that_were_gathered_are_not_gathered_again(tmp_path, quick_recipe, monkeypatch):
    recipe = str(quick_recipe("nvfp4", fitted=False))
    with monkeypatch.context() as patch:
        patch.setattr(run, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize(tmp_path, recipe=recipe, profile=None)
    monkeypatch.setattr(making, "capture_statistics", lambda *_, **__: pytest.fail("gathered again"))
    record = quantize(tmp_path, recipe=recipe, profile=None)
    assert record.statistics_digest and record.trajectory


@pytest.mark.slow
@linux
def test_the_second_writer_is_refused_with_the_first_one_s_number(tmp_path):
    with sole_writer(tmp_path / "out"):
        second = watched.run(tmp_path, *QUANTIZE)
        assert second["code"] == 1 and not (tmp_path / "out").exists()
        assert f"out is being written by process {os.getpid()} on " in second["err"]
        assert "wait for it, or end it" in second["err"]
    assert not [name for name in beside(tmp_path) if name.startswith(".out")]
    assert watched.run(tmp_path, *QUANTIZE)["code"] == 0


@pytest.mark.slow
def test_a_checkpoint_that_another_process_finished_meanwhile_is_taken(tmp_path, monkeypatch):
    prepared = making.job_of(making.JobOptions("tiny", "fp8", "rtn", str(tmp_path / "out"), check=False))
    first = quantize(tmp_path)
    monkeypatch.setattr(making, "_quantize", lambda *_: pytest.fail("quantized again"))
    assert making.quantize(prepared) == first == read_record(tmp_path / "out")
    assert first.identity.model_dump() == with_digests(prepared)


# Memory and cost


@pytest.mark.slow
def test_what_is_hashed_as_it_is_rounded_has_the_digest_of_the_model(tmp_path, tiny_folder, monkeypatch):
    """However its tensors are cut into files; only the first of these runs may read the model before it begins."""
    folder = resolve_model(str(tiny_folder))
    digest = folder.digest("transformer")
    fitted = making.job_of(making.JobOptions(str(tiny_folder), "fp8", "fast", str(tmp_path / "fitted"), check=False))
    assert fitted.identity["model"] == {"transformer": digest}
    fingerprint = TensorFile.fingerprint

    def of_output(file: TensorFile, name: str) -> str:
        assert not file.path.is_relative_to(tiny_folder / "transformer"), "read to be hashed"
        return fingerprint(file, name)

    monkeypatch.setattr(TensorFile, "fingerprint", of_output)
    assert quantize(tmp_path, str(tiny_folder)).model.digests == {"transformer": digest}
    monkeypatch.undo()
    (whole,) = folder.weight_files("transformer")
    tensors = load_file(whole)
    whole.unlink()
    parts = [dict(list(tensors.items())[index::2]) for index in range(2)]
    for index, part in enumerate(parts):
        save_file(part, whole.with_name(f"part-{index}.safetensors"))
    weight_map = {name: f"part-{index}.safetensors" for index, part in enumerate(parts) for name in part}
    whole.with_name(f"{whole.name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert resolve_model(str(tiny_folder)).digest("transformer") == digest
    name = next(iter(parts[0]))
    save_file({**parts[0], name: parts[0][name] + 1}, whole.with_name("part-0.safetensors"))
    assert resolve_model(str(tiny_folder)).digest("transformer") != digest


@linux
@pytest.mark.slow
def test_memory_does_not_grow_with_the_model_and_cost_grows_as_it_does(model_of, tmp_path):
    """Of 4 blocks and of 12: what is held over what the process held before is a few blocks, the same for both."""
    used, sizes = [], []
    for single in (2, 10):
        model = model_of(tmp_path / f"model {single}", 768, 2, single)
        sizes.append(sum(path.stat().st_size for path in model.rglob("*.safetensors")))
        arguments = ("--recipe", "fp8", "--profile", "rtn", "--no-check", "-o", "out")
        used.append(watched.run(tmp_path / f"run {single}", "quantize", str(model), *arguments))
        assert used[-1]["code"] == 0, used[-1]["err"]
    small, large = used
    block = 21_000_000  # bytes of a double block
    assert sizes[1] - sizes[0] > 5 * block
    # Allocator arenas of threads make either vary by two blocks from run to run; the models differ by over five.
    assert small["peak"] < 10 * block and large["peak"] < small["peak"] + 2.5 * block
    ratio = sizes[1] / sizes[0]
    assert ratio * 0.9 < large["read"] / small["read"] < ratio * 1.02
    assert large["read"] < 2.2 * sizes[1]  # hashed as it is rounded; what is written is read to be joined and hashed
    assert large["cpu"] < 1.7 * ratio * small["cpu"]


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-max", "int4"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path, recipe):
    plan, source = tiny_plan(recipe), SourceWeights(resolve_model("tiny"), "transformer")
    made = [
        quantize_component(plan, source, None, torch.bfloat16, tmp_path / str(workers), workers=workers)
        for workers in (1, 2, 5)
    ]
    first, *others = [[path.read_bytes() for path in files] for files in made]
    assert others == [first, first]
    assert Outcome.read(made[0]) == Outcome.read(made[2])


def test_items_come_in_order_whatever_takes_long_and_only_a_few_are_under_way():
    under_way, most, lock = 0, 0, threading.Lock()

    def read(item: int) -> int:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        return 10 * item

    def work(item: int, found: int) -> tuple[int, int]:
        time.sleep(0.002 * (5 - item % 5))
        assert torch.get_num_threads() == 1
        return item, found

    before, done = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for result in in_order(range(30), read, work, workers=3):
            done.append(result)
            with lock:
                under_way -= 1
        assert done == [(item, 10 * item) for item in range(30)] and 3 < most <= 8
        in_new_thread = []
        other = threading.Thread(target=lambda: in_new_thread.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert torch.get_num_threads() == 2 and in_new_thread == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("where", ["read", "work", "caller"])
def test_a_failure_anywhere_ends_all_threads(where):
    seen = []

    def at(place: str, item: int) -> int:
        seen.append((place, item))
        if place == where and item == 4:
            raise ValueError(f"{place} {item}")
        return item

    before = threading.active_count()
    with pytest.raises(ValueError, match=f"{where} 4"):
        with closing(in_order(range(1000), partial(at, "read"), lambda item, _: at("work", item), 2)) as done:
            for item in done:
                at("caller", item)
    assert threading.active_count() == before and max(item for _, item in seen) < 15


@pytest.mark.slow
def test_a_weight_with_nan_or_of_another_shape_is_named(tmp_path, tiny_folder):
    path = tiny_folder / "transformer" / "diffusion_pytorch_model.safetensors"
    own = load_file(path)
    for recipe in ("fp8", "nvfp4"):
        for name in ("transformer_blocks.0.attn.to_k.weight", "proj_out.bias", "transformer_blocks.0.ff.net.2.weight"):
            tensors = {key: tensor.clone() for key, tensor in own.items()}
            tensors[name].view(-1)[-1] = torch.inf
            save_file(tensors, path)
            (place := tmp_path / f"{recipe} {name}").mkdir()
            with pytest.raises(ValueError, match=rf"^{name.removesuffix('.weight')}.*holds NaN or infinity"):
                quantize(place, str(tiny_folder), recipe)
            assert not (place / "out").exists()
    tensors = {**own, name: own[name][:-1].contiguous()}
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"ff\.net\.2: weight has shape .*, config.json implies"):
        quantize(tmp_path, str(tiny_folder))
    save_file({key: tensor for key, tensor in own.items() if not key.startswith("single_transformer_blocks.2.")}, path)
    with pytest.raises(ValueError, match=r"the weights lack 'single_transformer_blocks\.2\."):
        quantize(tmp_path, str(tiny_folder))
    assert not (tmp_path / "out").exists()


def test_every_tensor_is_in_one_block_and_what_shares_a_scale_in_one_piece():
    source = SourceWeights(resolve_model("tiny"), "transformer")
    plan = tiny_plan()
    blocks = blocks_of(plan, source, Path(), ("single_transformer_blocks.1", "transformer_blocks.0"))
    assert [block.path for block in blocks[:3]] == [
        "single_transformer_blocks.1", "transformer_blocks.0", "single_transformer_blocks.0"
    ]  # fmt: skip
    assert sorted(name for block in blocks for name in block.names) == source.names
    assert {layer.name for block in blocks for layer in block.layers} == {layer.name for layer in plan.quantized}
    assert sum(block.nbytes for block in blocks) == source.nbytes
    units = units_of(blocks[0].layers, blocks[0].names)
    assert sorted(name for unit in units for name in unit.names) == sorted(blocks[0].names)
    shared = [[layer.name.split(".", 2)[2] for layer in unit.layers] for unit in units if len(unit.layers) > 1]
    assert shared == [["proj_mlp", "attn.to_q", "attn.to_k", "attn.to_v"]]
    rounded = next(round_units([units[0]], source, torch.bfloat16, {}))
    assert rounded.tensors.keys() and len(rounded.weight_sqnr) == len(units[0].layers)


# Shards, space, progress


@pytest.mark.slow
def test_shards_are_what_safetensors_would_write(tmp_path):
    folder, plan = resolve_model("tiny"), tiny_plan()
    source = SourceWeights(folder, "transformer")
    files = quantize_component(plan, source, None, torch.bfloat16, tmp_path / "work")
    total = write_component(tmp_path / "many", folder, plan, files, 300_000)
    write_component(tmp_path / "one", folder, plan, files)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert 4 < len(shards) and sum(sum(t.nbytes for t in load_file(path).values()) for path in shards) == total
    for path in [*shards, tmp_path / "one" / "diffusion_pytorch_model.safetensors"]:
        tensors = load_file(path)
        assert sum(t.nbytes for t in tensors.values()) <= 300_000 or len(tensors) == 1 or path.parent.name == "one"
        save_file(tensors, tmp_path / "theirs", {"format": "pt"})
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
    one, many = (
        FluxTransformer2DModel.from_pretrained(tmp_path / name, dtype=torch.bfloat16).state_dict()
        for name in ("one", "many")
    )
    assert all(torch.equal(tensor.view(torch.uint8), many[name].view(torch.uint8)) for name, tensor in one.items()
               if tensor.ndim)  # fmt: skip


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("recipe", "slack"), [("fp8", 1.01), ("nvfp4", 1.01), pytest.param("nvfp4-max", 1.6, marks=pytest.mark.slow)]
)
def test_the_space_that_is_asked_for_is_what_is_taken(tmp_path, monkeypatch, quick_recipe, recipe, slack):
    """And a little more where it depends on the data what is stored."""
    most, half = 0, []

    def measured(part: Path, *_: object) -> dict[str, str]:
        nonlocal most
        (blocks,) = tmp_path.glob(".out.*.work/transformer")
        most = _size(part) + _size(blocks)
        half.append(_space_needed(prepared, blocks.parent))
        return {}

    if slack < 1.1:
        options = making.JobOptions("tiny", recipe, "rtn", str(tmp_path / "out"), check=False)
    else:
        options = making.JobOptions("tiny", str(quick_recipe(recipe)), output=str(tmp_path / "out"), check=False)
    prepared = making.job_of(options)
    needed = _space_needed(prepared, tmp_path / "nothing")
    monkeypatch.setattr(making, "hash_files", measured)
    making.quantize(prepared)
    headers = 100_000  # and the small files
    assert most < needed + headers and needed < slack * most + headers
    assert half[0] < 0.75 * needed  # with all blocks done


def test_what_a_writer_left_that_was_killed_at_its_lock_is_removed(tmp_path):
    left = {}
    for name in ("out", "other"):
        with atomic_path(tmp_path / f".{name}.pid") as left[name]:
            left[name].write_text("1 on here")
        (tmp_path / f".{name}.pid").rename(left[name])  # as if killed before it had its name
    with sole_writer(tmp_path / "out"):
        assert sorted(path.name for path in tmp_path.iterdir()) == [left["other"].name, ".out.lock", ".out.pid"]
    assert list(tmp_path.iterdir()) == [left["other"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_in_blocks_bytes_and_time_left(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(logging.getLogger("fluxq"), "level", logging.WARNING)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with console.blocks_progress("Quantizing", 10, 10**10, 4, 4 * 10**9) as advance:
        advance(10**9)
        time.sleep(0.2)
        advance(10**9)
        time.sleep(0.2)
    shown = terminal.getvalue()
    assert "Quantizing" in shown and "6/10 blocks" in shown and "GB/s" in shown and "0:00:0" in shown


def test_without_a_terminal_there_is_no_bar(capsys):
    with console.blocks_progress("Quantizing", 1, 1) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")
