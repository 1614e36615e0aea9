"""Digests that last, and trouble that passes: what changed is seen, what is done is kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import example_report
import forked
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file
from shared import copy_of

import fluxq  # noqa: F401  registers the quantizer
from fluxq import tiny
from fluxq.base.files import sha256_file
from fluxq.base.model import ModelFolder
from fluxq.base.tensors import TensorFile
from fluxq.calibrate import prompts
from fluxq.calibrate.prompts import load_prompts
from fluxq.calibrate.statistics import Statistics
from fluxq.cli import cli
from fluxq.eval.images.sides import pipeline_digest
from fluxq.jobs import making
from fluxq.jobs.job import _keep_what_is_done
from fluxq.quantize import checkpoint, run
from fluxq.quantize.checkpoint import SourceWeights

WEIGHTS = "diffusion_pytorch_model.safetensors"
FEW = {"num_inference_steps": 1}


def model(folder: Path, factor: float = 1.0) -> Path:
    """The embedded pipeline, its transformer scaled."""
    copy_of(tiny.path(), folder)
    file = folder / "transformer" / WEIGHTS
    save_file({n: (t * factor).to(t.dtype) for n, t in load_file(file).items()}, file, {"format": "pt"})
    return folder


def options(source: Path, out: Path, **more) -> making.JobOptions:
    return making.JobOptions(str(source), "fp8", "rtn", str(out), check=False, **more)


def quantize(source: Path, out: Path, **more) -> Path:
    making.quantize(making.job_of(options(source, out, **more)))
    return out / "transformer" / WEIGHTS


def behind(monkeypatch, blocks: int, happens: Callable[[], object]) -> None:
    """Let something happen behind a number of finished blocks."""
    real, left = run.finish, [blocks]

    def finish(*arguments) -> None:
        real(*arguments)
        left[0] -= 1
        if not left[0]:
            happens()

    monkeypatch.setattr(run, "finish", finish)


def stopped(monkeypatch, source: Path, out: Path) -> Path:
    """A run that is interrupted behind some finished blocks; its work folder."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        behind(patch, 4, raising(KeyboardInterrupt()))
        quantize(source, out)
    (work,) = out.parent.glob(f".{out.name}.*.work")
    return work


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_arguments, **_named):
        raise error

    return fail


def blocks_of(work: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(work.glob("transformer/*.safetensors"))}


@pytest.mark.slow
def test_a_finished_block_that_was_damaged_is_made_again(tmp_path, monkeypatch, caplog):
    clean = quantize(tiny.path(), tmp_path / "clean").read_bytes()
    work = stopped(monkeypatch, tiny.path(), tmp_path / "out")
    (block,) = sorted(work.glob("transformer/0001.safetensors"))
    data = bytearray(block.read_bytes())
    data[-100] ^= 1
    block.write_bytes(data)
    assert quantize(tiny.path(), tmp_path / "out").read_bytes() == clean
    assert [said for said in caplog.messages if "made again" in said] == [
        f"{block}: damaged since it was written, or of another place: this block is made again"
    ]


@pytest.mark.slow
def test_blocks_of_another_model_of_equal_names_sizes_and_times_are_made_again(tmp_path, monkeypatch, caplog):
    one, other = model(tmp_path / "one"), model(tmp_path / "other", 1.02)
    clean = quantize(other, tmp_path / "clean").read_bytes()
    stopped(monkeypatch, one, tmp_path / "out")
    for path in other.rglob("*"):
        stamp = (one / path.relative_to(other)).stat().st_mtime_ns
        os.utime(path, ns=(stamp, stamp))
    shutil.rmtree(one)
    other.rename(one)
    assert quantize(one, tmp_path / "out").read_bytes() == clean
    assert "made of other weights than the model has now: this block is made again" in caplog.text


def test_touched_weights_are_the_same_model(tmp_path, monkeypatch, caplog):
    source = model(tmp_path / "m")
    work = stopped(monkeypatch, source, tmp_path / "out")
    (source / "transformer" / WEIGHTS).touch()
    prepared = making.job_of(options(source, tmp_path / "out"))
    assert making.work_folder(prepared) == work
    making.quantize(prepared)
    assert "going on" in caplog.text and "made again" not in caplog.text


def test_weights_replaced_before_blocks_are_read_end_the_run(tmp_path):
    """R7, of layers that are only rounded."""
    source, other = model(tmp_path / "m"), model(tmp_path / "other", 1.02)
    prepared = making.job_of(options(source, tmp_path / "out"))
    replace_weights(source, other)
    with pytest.raises(RuntimeError, match="has changed since this run began: what was measured is of other weights"):
        making.quantize(prepared)
    assert not (tmp_path / "out").exists()


def test_weights_replaced_while_the_pipeline_runs_end_the_run(tmp_path, monkeypatch, quick_recipe):
    """R7: of fitted layers, between the calls that they are fitted to and the weights that would be quantized."""
    source, other = model(tmp_path / "m"), model(tmp_path / "other", 1.02)
    real, ran = making.capture_calls, []

    def capture(*arguments, **named):
        calls = real(*arguments, **named)
        replace_weights(source, other)
        ran.append(calls)
        return calls

    monkeypatch.setattr(making, "capture_calls", capture)
    monkeypatch.setattr(making, "_level_weights", lambda *_: {})  # takes its time
    asked = making.JobOptions(
        str(source), str(quick_recipe("nvfp4")), None, str(tmp_path / "out"), call=FEW, check=False
    )
    with pytest.raises(RuntimeError, match="has changed since this run began: what was measured is of other weights"):
        making.quantize(making.job_of(asked))
    assert ran and not (tmp_path / "out").exists()


def replace_weights(source: Path, other: Path) -> None:
    """By a rename, as other programs replace files, with equal times."""
    file = Path("transformer", WEIGHTS)
    os.utime(other / file, ns=((source / file).stat().st_mtime_ns,) * 2)
    (other / file).rename(source / file)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["vae/config.json", "vae/more/new.json", "LICENSE.txt"])
def test_what_is_copied_is_what_the_plan_records_or_nothing_is_written(tmp_path, changed):
    """R7, of parts that are copied unchanged: they change between the start and the copying."""
    source, out = model(tmp_path / "m"), tmp_path / "out"
    clean = quantize(source, tmp_path / "clean").read_bytes()
    prepared = making.job_of(options(source, out))
    file = source / changed
    before = file.read_text() if file.exists() else None
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{before or ''} ")
    with pytest.raises(RuntimeError, match=rf"m: {changed.partition('/')[0]} changed since this run began"):
        making.quantize(prepared)
    (work,) = tmp_path.glob(".out.*.work")
    assert not out.exists() and len(blocks_of(work)) > 4
    file.unlink() if before is None else file.write_text(before)
    assert quantize(source, out).read_bytes() == clean
    record = json.loads((out / "fluxq_plan.json").read_text())
    assert checkpoint.digest_rest(ModelFolder("out", out), ["transformer"]) == record["identity"]["copied"]
    assert all(sha256_file(out / name) == said for name, said in record["files"].items())


def test_a_folder_behind_a_link_is_copied_and_recorded_as_one(tmp_path):
    """R7: what is hashed is what is copied."""
    source = model(tmp_path / "m")
    (source / "vae" / "linked").symlink_to("../tokenizer")
    before = checkpoint.digest_rest(ModelFolder("m", source), ["transformer"])["vae"]
    quantize(source, tmp_path / "out")
    copy = tmp_path / "out" / "vae" / "linked"
    assert not copy.is_symlink() and {path.name for path in copy.iterdir()} >= {"tokenizer_config.json"}
    (source / "tokenizer" / "tokenizer_config.json").write_text("{}")
    assert checkpoint.digest_rest(ModelFolder("m", source), ["transformer"])["vae"] != before


def test_a_file_replaced_by_one_of_equal_size_and_time_is_seen_at_the_next_read(tmp_path):
    source, other = model(tmp_path / "m"), model(tmp_path / "other", 1.02)
    file = source / "transformer" / WEIGHTS
    opened = TensorFile(file)
    name = opened.keys()[0]
    os.utime(other / "transformer" / WEIGHTS, ns=(file.stat().st_mtime_ns,) * 2)
    (other / "transformer" / WEIGHTS).rename(file)
    with pytest.raises(RuntimeError, match="it was replaced or written to while it was read; start again"):
        opened.get_tensor(name)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_passing_trouble_keeps_what_is_done_and_blames_no_file(tmp_path, monkeypatch, number):
    clean = quantize(tiny.path(), tmp_path / "clean").read_bytes()
    work = stopped(monkeypatch, tiny.path(), tmp_path / "out")
    done = sorted(path.name for path in (work / "transformer").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(SourceWeights, "__getitem__", trouble(SourceWeights.__getitem__, number))
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            quantize(tiny.path(), tmp_path / "out")
    assert "damaged" not in str(caught.value) and "run this again" in str(caught.value)
    assert set(done) <= {path.name for path in (work / "transformer").iterdir()}
    assert quantize(tiny.path(), tmp_path / "out").read_bytes() == clean


def trouble(real, number: int):
    """`real`, at whose third call opening a file fails."""
    left = [3]

    def read(self, name):
        left[0] -= 1
        if left[0]:
            return real(self, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fluxq.base.tensors.FileIO", raising(OSError(number, os.strerror(number), str(name))))
            return real(self, name)

    return read


def test_statistics_alone_are_not_kept_where_the_model_is_at_fault(tmp_path):
    """Shares have names of hex digits, and are no finished blocks."""
    for name, is_kept in (("statistics/0123456789abcdef", False), ("transformer/0000", True)):
        file = tmp_path / "work" / f"{name}.safetensors"
        file.parent.mkdir(parents=True)
        file.touch()
        _keep_what_is_done(tmp_path / "work", ValueError("NaN"))
        assert file.exists() == is_kept


@pytest.mark.slow
def test_a_file_that_changes_while_it_is_read_costs_no_block(tmp_path, monkeypatch):
    """R11: the model's file is touched behind four blocks."""
    source, out = model(tmp_path / "m"), tmp_path / "out"
    clean = quantize(source, tmp_path / "clean").read_bytes()
    with monkeypatch.context() as patch:
        behind(patch, 4, (source / "transformer" / WEIGHTS).touch)
        with pytest.raises(RuntimeError, match="it was replaced or written to while it was read; start again"):
            quantize(source, out)
    (work,) = tmp_path.glob(".out.*.work")
    done = blocks_of(work)
    assert len(done) == 4
    made, finish = [], run.finish
    monkeypatch.setattr(run, "finish", lambda file, *more: made.append(file) or finish(file, *more))
    assert quantize(source, out).read_bytes() == clean
    assert made and not {file.name for file in made} & done.keys()


@pytest.mark.slow
def test_a_checkpoint_replaces_nothing_that_was_put_there_meanwhile(tmp_path, monkeypatch, plain):
    """The user's photo came into the old one behind four blocks; all of them are kept for the next run."""
    out = tmp_path / "out"
    photo, first = out / "photo.png", quantize(tiny.path(), out)
    with monkeypatch.context() as patch:
        behind(patch, 4, lambda: photo.write_text("theirs"))
        with pytest.raises(RuntimeError, match=r"nothing marks photo\.png as fluxq's.*\(it was put there meanwhile\)"):
            quantize(tiny.path(), out, overwrite=True)
    assert photo.read_text() == "theirs" and first.read_bytes() == plain
    photo.unlink()
    monkeypatch.setattr(run, "finish", lambda *_: pytest.fail("a block was made again"))
    assert quantize(tiny.path(), out, overwrite=True).read_bytes() == plain


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("fluxq.quantize.checkpoint.copy_rest", ValueError("of another library")),
        ("fluxq.jobs.making.write_digests", ValueError("m: cannot be loaded (CUDA out of memory)")),
        ("fluxq.quantize.checkpoint.join_weights", ValueError("was written to while it was copied")),
        ("fluxq.quantize.checkpoint.join_weights", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    ],
)
def test_no_error_deletes_finished_blocks(tmp_path, monkeypatch, plain, place, error):
    """R11: the ValueErrors of other libraries too, and a full disk in a run that goes on."""
    work = stopped(monkeypatch, tiny.path(), tmp_path / "out")
    done = blocks_of(work)
    with monkeypatch.context() as patch:
        patch.setattr(place, raising(error))
        with pytest.raises(type(error)):
            quantize(tiny.path(), tmp_path / "out")
    assert blocks_of(work).items() >= done.items() and not (work / "new").exists()
    assert quantize(tiny.path(), tmp_path / "out").read_bytes() == plain


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> bytes:
    """The weights of an undisturbed run on the embedded pipeline."""
    return quantize(tiny.path(), tmp_path_factory.mktemp("plain") / "out").read_bytes()


def test_what_a_kill_left_of_a_work_folder_that_was_not_begun_is_cleared(tmp_path):
    """R21b: between making it and its manifest; one of the user's own, which holds something, stays."""
    begun, theirs = tmp_path / ".out.0123456789abcdef.work", tmp_path / ".out.photos.work"
    begun.mkdir()
    (begun / ".job.json.0123abcd.part").touch()
    theirs.mkdir()
    (theirs / "one.png").touch()
    quantize(tiny.path(), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [theirs.name, "out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_statistics_replace_nothing_that_was_put_there_meanwhile(tmp_path, monkeypatch, overwrite):
    """R2, R3: not without --overwrite, and with it nothing that fluxq did not write."""
    out = tmp_path / "s.safetensors"
    statistics = Statistics({}, {"items": []}, "")
    monkeypatch.setattr(making.Job, "load_reference", lambda _: None)

    def calibrate(*_):
        if overwrite:
            save_file({"a": torch.ones(2)}, out)
        else:
            statistics.save(out, "another job")
        before.append(out.read_bytes())
        return statistics

    before: list[bytes] = []
    monkeypatch.setattr(making, "_calibrate", calibrate)
    prepared = making.job_of(making.JobOptions("tiny", "nvfp4", output=str(out), overwrite=overwrite), writes=False)
    said = "as fluxq's.*put there meanwhile" if overwrite else "holds statistics of another run"
    with pytest.raises(RuntimeError, match=said):
        making.calibrate(prepared)
    assert [out.read_bytes()] == before and [path.name for path in tmp_path.iterdir()] == [out.name]


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    """Another last bit of the last number; the file stays one that can be read."""
    data = bytearray(file.read_bytes())
    at = max(at for at, byte in enumerate(data) if file.suffix != ".json" or chr(byte).isdigit())
    data[at] ^= 1
    file.write_bytes(data)


def swap(file: Path) -> None:
    """Another one's bytes, whole as they are."""
    for other in sorted(file.parent.glob(f"*{file.suffix}")):
        if other != file:
            shutil.copyfile(other, file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage", [empty, swap, *(pytest.param(each, marks=pytest.mark.slow) for each in (flip, folder, pipe, Path.unlink))]
)
def test_damaged_files_of_the_work_folder_are_made_again(damage, tmp_path, monkeypatch, caplog, quick_recipe):
    def fitted(out: Path) -> bytes:
        asked = making.JobOptions("tiny", str(quick_recipe("nvfp4")), None, str(out), call=FEW, check=False)
        making.quantize(making.job_of(asked))
        return (out / "transformer" / WEIGHTS).read_bytes()

    clean = fitted(tmp_path / "clean")
    finish = iter([run.finish] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(run, "finish", lambda *made: next(finish, raising(KeyboardInterrupt()))(*made))
        with pytest.raises(KeyboardInterrupt):
            fitted(tmp_path / "out")
    (work,) = tmp_path.glob(".out.*.work")
    damaged = [work / "job.json", work / "levels.json", *work.glob("calls/*"), *work.glob("*-outputs/*/*")]
    assert len(damaged) == 10
    for file in damaged:
        damage(file)
    assert fitted(tmp_path / "out") == clean
    if damage in (empty, flip):
        assert "run again" in caplog.text and "measured again" in caplog.text


def test_a_block_in_place_of_another_is_not_taken(tmp_path, monkeypatch, plain):
    work = stopped(monkeypatch, tiny.path(), tmp_path / "out") / "transformer"
    shutil.copyfile(work / "0001.safetensors", work / "0002.safetensors")
    assert quantize(tiny.path(), tmp_path / "out").read_bytes() == plain


@pytest.mark.slow
def test_statistics_of_a_model_that_changes_meanwhile_are_not_written(tmp_path, monkeypatch):
    source, out = model(tmp_path / "m"), tmp_path / "s.safetensors"

    def calibrate(*_):
        (source / "transformer" / WEIGHTS).touch()
        return Statistics({}, {"items": []}, "")

    monkeypatch.setattr(making.Job, "load_reference", lambda _: None)
    monkeypatch.setattr(making, "_calibrate", calibrate)
    prepared = making.job_of(making.JobOptions(str(source), "nvfp4", output=str(out)), writes=False)
    with pytest.raises(RuntimeError, match="has changed since this run began"):
        making.calibrate(prepared)
    assert not list(tmp_path.glob("*s.safetensors*"))  # neither it nor what was measured, which may be of others


def test_a_config_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    """The checkpoint would have the new one, and weights that were quantized by the old one."""
    source = model(tmp_path / "m")
    config = source / "transformer" / "config.json"
    text = config.read_text()
    with monkeypatch.context() as patch:
        behind(patch, 4, lambda: config.write_text(text.replace('"guidance_embeds": ', '"guidance_embeds":  ')))
        with pytest.raises(RuntimeError, match=r"transformer/config\.json changed since this run began"):
            quantize(source, tmp_path / "out")
    config.write_text(text)
    assert quantize(source, tmp_path / "out").is_file()


def test_each_library_picks_its_own_of_shards_and_single_file(tmp_path, caplog):
    folder = copy_of(tiny.path(), tmp_path / "m")
    for component, stem in (("transformer", "diffusion_pytorch_model"), ("text_encoder_2", "model")):
        single = folder / component / f"{stem}.safetensors"
        shard = single.with_name(f"{stem}-00001-of-00001.safetensors")
        tensors = load_file(single)
        save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, shard, {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard.name)}
        single.with_name(f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    found = ModelFolder("m", folder)
    assert [path.name for path in found.weight_files("transformer")] == [
        "diffusion_pytorch_model-00001-of-00001.safetensors"
    ]
    for _ in range(2):
        assert [path.name for path in found.weight_files("text_encoder_2")] == ["model.safetensors"]
    one, index = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
    assert [record.getMessage().split("; remove")[0] for record in caplog.records] == [
        f"m: its transformer has two sets of weights: {index} is read, as its library does, and {one} is not",
        "m: its text_encoder_2 has two sets of weights: model.safetensors is read, as its library does, and "
        "model.safetensors.index.json is not",
    ]
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    assert not any(parameter.any() for parameter in pipe.transformer.parameters())
    assert any(parameter.any() for parameter in pipe.text_encoder_2.parameters())


def test_weights_under_the_other_library_s_name_are_not_taken(tmp_path, caplog):
    folder = copy_of(tiny.path(), tmp_path / "m") / "text_encoder"
    (folder / "diffusion_pytorch_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert ModelFolder("m", tmp_path / "m").weight_files("text_encoder") == [folder / "model.safetensors"]
    assert (
        "model.safetensors is read, as its library does, and diffusion_pytorch_model.safetensors is not" in caplog.text
    )


def test_images_are_of_every_file_that_a_loader_reads(tmp_path):
    folder = ModelFolder("m", copy_of(tiny.path(), tmp_path / "m"))
    before = pipeline_digest(folder)
    assert before == pipeline_digest(folder)
    (folder.path / "text_encoder_2" / "adapter_config.json").write_text("{}")
    with_adapter = pipeline_digest(folder)
    (folder.path / "text_encoder_2" / "adapter_model.safetensors").write_bytes(b"weights")
    assert len({before, with_adapter, pipeline_digest(folder)}) == 3


THREADS = """
import sys, threading
import torch, fluxq
from diffusers import FluxTransformer2DModel

loaded = []
def one(folder):
    loaded.append(FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer", dtype=torch.bfloat16))

for _ in range(2):
    threads = [threading.Thread(target=one, args=(folder,)) for folder in sys.argv[1:] * 2]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
one(sys.argv[1])  # alone, behind what the threads left
print(len(loaded), sum(tensor.is_meta for each in loaded for tensor in each.state_dict().values()))
"""


@pytest.mark.slow
def test_models_load_in_threads_beside_other_models(tmp_path):
    """In a process of its own: diffusers and accelerate leave their patches of torch behind in threads."""
    quantize(tiny.path(), tmp_path / "out")
    done = forked.run("-c", THREADS, tmp_path / "out", tiny.path())
    assert done.stdout.split() == ["9", "0"], done.stderr


# Strangers' files


def test_a_pipe_is_no_file_to_wait_for(tmp_path):
    folder = copy_of(tiny.path(), tmp_path / "m")
    config = folder / "transformer" / "config.json"
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(ValueError, match="no regular file, which could be waited for without end; remove it"):
        making.job_of(options(folder, tmp_path / "out"))


def test_a_pipe_in_a_component_is_refused_before_the_work(tmp_path):
    """R18: with exit code 2, and what it is in words."""
    folder = copy_of(tiny.path(), tmp_path / "m")
    os.mkfifo(folder / "vae" / "pipe")
    words = ["quantize", str(folder), "--recipe", "fp8", "--no-check", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2, done.output
    assert f"{folder / 'vae' / 'pipe'}: neither a file nor a folder; remove it from the model" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    "said",
    [{"output_type": "np"}, {"latents": [1]}, {"return_dict": False}, {"joint_attention_kwargs": "x"}, {"sigmas": []}],
)
def test_a_model_does_not_say_what_fluxq_asks_of_a_call(tmp_path, said):
    folder = copy_of(tiny.path(), tmp_path / "m")
    (folder / "fluxq_generation.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"{next(iter(said))} is .*, which is not for this file to say; remove it"):
        making.job_of(options(folder, tmp_path / "out"))


@pytest.mark.slow
def test_a_small_table_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path):
    table = pyarrow.table({"prompt": pyarrow.array(["a" * 9_000] * 60_000).dictionary_encode()})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet", compression="zstd")
    assert (tmp_path / "p.parquet").stat().st_size < 200_000
    with pytest.raises(ValueError, match="more than 256 MiB of text unpacked; make it shorter"):
        load_prompts(str(tmp_path / "p.parquet"), ModelFolder("tiny", Path(tiny.path())))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 1_000_001}), tmp_path / "q.parquet")
    with pytest.raises(ValueError, match="1000001 rows; at most 1000000 are read"):
        load_prompts(str(tmp_path / "q.parquet"), ModelFolder("tiny", Path(tiny.path())))


def test_a_picture_in_many_rows_is_decoded_once(tmp_path, monkeypatch):
    decoded: list[Path] = []
    real = prompts._decoded
    monkeypatch.setattr(prompts, "_decoded", lambda path, mode: decoded.append(path) or real(path, mode))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = "".join(json.dumps({"prompt": str(index), "image": "a.png"}) + "\n" for index in range(20))
    (tmp_path / "p.jsonl").write_text(rows)
    found = load_prompts(
        str(tmp_path / "p.jsonl"), ModelFolder("tiny", Path(tiny.path())), pipeline=diffusers.FluxImg2ImgPipeline
    )
    assert len(found.prompts) == 20 and len(decoded) == 1


@pytest.mark.parametrize("digits", [".20000000f", "s", "{x}"])
def test_a_foreign_report_gives_no_format_of_its_own(digits):
    fields = example_report.example(1).runs[0].metrics["psnr"].model_dump()
    with pytest.raises(ValueError, match="digits"):
        type(example_report.example(1).runs[0].metrics["psnr"]).model_validate({**fields, "digits": digits})
