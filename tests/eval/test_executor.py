"""Every image exactly once, whatever makes it and whenever that is killed.

This file is also a program: two ranks and a test that kills a process run it, see `main`.
"""

import errno
import itertools
import json
import logging
import os
import shutil
import signal
import stat
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import ranks
import torch
from PIL import Image

from fluxq import tiny
from fluxq.base.model import load_pipeline, resolve_model
from fluxq.base.output import sole_writer
from fluxq.eval.images import executor
from fluxq.eval.images.executor import WORK_FILE, Work, audit, ensure_images, open_engine
from fluxq.eval.images.generate import generate, images_digest
from fluxq.eval.images.protocols import items_of
from fluxq.eval.images.sides import Side
from fluxq.runtime.step_caches import cache_of

COUNT, BATCH = 11, 2
CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 2}
TINY = Side("tiny", str(tiny.path()), "digest", dtype="float32")


class FakePipeline:
    """Images of 8 x 8 that depend on the noise and, as real ones do, on what shares their batch."""

    device = torch.device("cpu")

    def __init__(self, calls, bad=()):
        self.calls, self.bad = calls, bad

    def __call__(self, prompt, generator, output_type, callback_on_step_end, **call):
        self.calls.append(list(prompt))
        latents = torch.stack([torch.randn(2, 6, generator=each) for each in generator])
        latents = latents + latents.mean() + len(prompt)
        callback_on_step_end(self, 0, 0, {"latents": latents})
        images = latents.sigmoid().mean((1, 2)).reshape(-1, 1, 1, 1) * torch.rand(1, 3, 8, 8, generator=generator[0])
        for index, text in enumerate(prompt):
            if text in self.bad:
                images[index, 0, 0, 0] = torch.nan
        return SimpleNamespace(images=images)


@dataclass(frozen=True)
class FakeSide(Side):
    """A side without files; what it is asked to make is appended to `calls`."""

    calls: tuple = ()
    bad: tuple = ()

    def describe(self):
        return {"fake": True}

    def open(self, device="cpu"):
        return FakePipeline(CALLS, self.bad)


CALLS = []  # of the fake pipeline, batch by batch


FAKE = FakeSide("fake", "", "")
SIDES = {"fake": FAKE, "tiny": TINY}


@pytest.fixture
def work(tmp_path) -> Work:
    CALLS.clear()
    return Work(FAKE, tuple(items_of(["a", "b", "c"], COUNT, first_seed=3)), {}, BATCH, tmp_path)


@pytest.fixture(params=["fake", pytest.param("tiny", marks=pytest.mark.slow)])
def side(request) -> str:
    """Return whose images are made: processes that have to import diffusers take three times as long."""
    return request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole("tiny") is the work of that side, made by this process in one go."""
    root, made = tmp_path_factory.mktemp("whole"), {}

    def make(name) -> Work:
        if name not in made:
            made[name] = work_in(root / name, SIDES[name])
            ensure_images(made[name])
        return made[name]

    return make


def work_in(root, side) -> Work:
    return Work(side, tuple(items_of(tiny.PROMPTS, COUNT, first_seed=5)), CALL, BATCH, root)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".png", ".safetensors")}


def rows(folder):
    return [json.loads(line) for path in sorted(folder.glob("manifest-*")) for line in path.read_text().splitlines()]


def require_same(made: Work, whole: Work, workers: int = 1):
    """Byte for byte what one process makes, every item in one row."""
    assert made.key == whole.key and contents(made.folder) == contents(whole.folder)
    counted = Counter(row["item"] for row in rows(made.folder))
    assert len(counted) == COUNT and set(counted.values()) == {1}
    plain = [{**row, "seconds": 0} for row in rows(made.folder)]
    expected = [{**row, "seconds": 0} for row in rows(whole.folder)]
    assert sorted(plain, key=lambda row: row["seed"]) == expected
    assert len([path for path in made.folder.glob("manifest-*") if path.stat().st_size]) >= workers


# What a set of images is


@pytest.mark.slow
def test_images_on_disk_are_those_of_generate(whole):
    work = whole("tiny")
    made = ensure_images(work)
    pipe = load_pipeline(resolve_model("tiny"), "float32")
    expected = generate(pipe, work.items, CALL, batch_size=BATCH)
    assert made.items == expected.items == work.items
    assert len(made.images) == len(made.latents) == COUNT
    assert torch.equal(torch.stack(list(made.images)), expected.images) and made.images[0].dtype == torch.uint8
    assert torch.equal(torch.stack(list(made.latents)), expected.latents) and made.latents[0].dtype == torch.float32
    assert torch.equal(made.finite, expected.finite) and made.device == "cpu"
    assert made.digest == images_digest(expected.images)
    assert made.head(3).items == work.items[:3] and made.head(3).digest == images_digest(expected.images[:3])
    assert torch.equal(made.images[2:4][1], expected.images[3])


def test_files_are_ordinary_ones(work):
    ensure_images(work)
    assert len(contents(work.folder)) == 2 * COUNT
    others = {path.name for path in work.folder.iterdir()} - contents(work.folder).keys()
    assert others - {".lock"} == {"manifest-local.jsonl", "work.json"}
    umask = os.umask(0)
    os.umask(umask)
    for name, data in contents(work.folder).items():
        assert len(name.partition(".")[0]) == 16
        assert stat.S_IMODE((work.folder / name).stat().st_mode) == 0o666 & ~umask
        if name.endswith(".safetensors"):
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            assert len(header["__metadata__"]) == 1


def test_what_decides_bits_decides_the_key(tmp_path):
    work = work_in(tmp_path, TINY)
    same = [replace(work, root=tmp_path / "x"), replace(work, side=replace(TINY, name="other", folder="/elsewhere"))]
    same += [replace(work, items=work.items[:3]), replace(work, device="cpu:0")]
    assert {each.key for each in same} == {work.key}
    other = [
        replace(work, call={**CALL, "num_inference_steps": 3}),
        replace(work, batch_size=3),
        replace(work, device="cuda"),
        *(replace(work, side=replace(TINY, **change)) for change in ({"dtype": "bfloat16"}, {"backend": "int8"})),
        *(replace(work, side=replace(TINY, **change)) for change in ({"digest": "x"}, {"cache": cache_of("0.1")})),
    ]
    assert len({work.key, *(each.key for each in other)}) == 1 + len(other)
    assert replace(work, device="cuda").key == replace(work, device="cuda:1").key


def test_versions_decide_bits(work, monkeypatch):
    key = work.key
    monkeypatch.setattr(executor, "version", lambda name: "0")
    assert replace(work).key != key
    with pytest.raises(RuntimeError, match="versions differ"):
        executor.Worker(work, "x", "cpu")


def test_a_broken_image_is_kept_as_broken(work):
    made = ensure_images(replace(work, side=FakeSide("fake", "", "", bad=("b",))))
    assert made.finite.tolist() == [prompt != "b" for prompt, _ in work.items]
    assert made.images[1][0, 0, 0] == 0


# Videos


class FakeVideoPipeline(FakePipeline):
    """Videos of three frames, or as many as a call says; no two are alike."""

    def __call__(self, prompt, generator, output_type, callback_on_step_end, **call):
        images = super().__call__(prompt, generator, output_type, callback_on_step_end).images
        brightness = torch.linspace(0.1, 1, call.get("num_frames", 3)).reshape(1, -1, 1, 1, 1)
        return SimpleNamespace(frames=images[:, None] * brightness)


@dataclass(frozen=True)
class FakeVideoSide(FakeSide):
    def open(self, device="cpu"):
        return FakeVideoPipeline(CALLS, self.bad)


@pytest.fixture
def films(tmp_path) -> Work:
    CALLS.clear()
    return Work(FakeVideoSide("fake", "", ""), tuple(items_of(["a", "b", "c"], 5, first_seed=3)), {}, BATCH, tmp_path)


def test_a_video_is_a_folder_of_frames_in_their_order(films):
    made = ensure_images(films)
    expected = generate(FakeVideoPipeline([]), films.items, {}, batch_size=BATCH)
    assert made.frames == 3 and torch.equal(torch.stack(list(made.images)), expected.images)
    assert made.digest == images_digest(expected.images) and made.images[0].shape == (3, 3, 8, 8)
    folder = films.folder / films.chunks[1].names[0]
    assert [path.name for path in sorted(folder.iterdir())] == ["00000.png", "00001.png", "00002.png"]
    assert torch.equal(executor.read_image(folder / "00002.png"), expected.images[2, 2])
    assert not list(films.folder.glob(".*.part"))


def test_a_video_is_read_alone(films, monkeypatch):
    made, read = ensure_images(films), []
    plain = executor.read_image
    monkeypatch.setattr(executor, "read_image", lambda path: read.append(path.parent.name) or plain(path))
    images = made.images
    assert read == []
    _ = images[3]
    assert read == [made.rows[3].item] * 3


def test_finished_videos_are_not_made_again_and_half_written_ones_are(films):
    ensure_images(replace(films, items=films.items[:2]))
    name = films.chunks[1].names[0]
    for left in (name, "of-another-batch"):  # killed among the frames
        (films.folder / f".{left}.part" / "new").mkdir(parents=True)
    (films.folder / name).mkdir()
    (films.folder / name / "00000.png").write_bytes(b"written, but its row is not")
    CALLS.clear()
    first = ensure_images(films)
    assert len(CALLS) == 2 and not list(films.folder.glob(".*.part"))
    assert ensure_images(films) == first and len(CALLS) == 2
    assert first.digest == ensure_images(replace(films, root=films.root / "undisturbed")).digest


@pytest.mark.parametrize("what", ["changed", "missing", "extra", "swapped"])
def test_the_audit_sees_every_frame(films, what):
    ensure_images(films)
    folder = films.folder / films.chunks[1].names[0]
    first, second = folder / "00000.png", folder / "00001.png"
    if what == "changed":
        Image.new("RGB", (8, 8)).save(second)
    elif what == "missing":
        second.unlink()
    elif what == "extra":
        shutil.copy(first, folder / "00003.png")
    else:
        first.rename(folder / "x"), second.rename(first), (folder / "x").rename(second)
    with pytest.raises(RuntimeError, match=f"{folder.name} .* is not what was written"):
        ensure_images(films)


def test_videos_of_another_length_are_not_one_set(films):
    ensure_images(films)
    manifest, folder = films.folder / "manifest-local.jsonl", films.folder / films.chunks[1].names[0]
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    (folder / "00002.png").unlink()
    lines[2] |= {"frames": 2, "image": executor._digest(folder)}
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RuntimeError, match=r"images differ in size: .*1 of 8 x 8, 2 frames"):
        ensure_images(films)


def test_a_disk_that_is_too_small_for_the_frames_is_seen_before_the_first(films, monkeypatch):
    free = 5 * (4 * 64 * 100 + 8192) - 1
    monkeypatch.setattr(executor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(OSError, match="not enough space"):
        ensure_images(replace(films, call={"height": 8, "width": 8, "num_frames": 100}))
    assert CALLS == []
    ensure_images(replace(films, call={"height": 8, "width": 8, "num_frames": 99}))


@pytest.mark.parametrize("what", ["*.png", "*.safetensors", "manifest-*.jsonl"])
def test_a_pipe_among_the_images_is_not_waited_for(work, what):
    ensure_images(work)
    file = min(work.folder.glob(what))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises((ValueError, RuntimeError), match=rf"{file.name}.*(is missing|no regular file)"):
        ensure_images(work)


def test_nothing_and_twice_the_same_are_refused(work):
    with pytest.raises(ValueError, match=r"list of .* is empty"):
        replace(work, items=())
    with pytest.raises(ValueError, match="'a' with seed 3 is asked for 2 times"):
        replace(work, items=(*work.items, work.items[0]))


# Once, and the same again


def test_what_is_there_is_not_made_again(work):
    first = ensure_images(work)
    assert len(CALLS) == 6
    assert ensure_images(work) == first and len(CALLS) == 6


@pytest.mark.parametrize("cut", [1, 40, 700, 1400, -60, -1])
def test_a_torn_manifest_costs_the_chunks_that_it_lost(work, cut):
    ensure_images(work)
    before, manifest = contents(work.folder), work.folder / "manifest-local.jsonl"
    text = manifest.read_bytes()
    manifest.write_bytes(text[:cut])
    kept = text[:cut].count(b"\n") // BATCH
    CALLS.clear()
    ensure_images(work)
    assert contents(work.folder) == before and len(CALLS) == 6 - kept
    assert max(Counter(row["item"] for row in rows(work.folder)).values()) == 1


def test_leftovers_of_a_killed_worker_are_cleared_away(work):
    ensure_images(replace(work, items=work.items[:4]))
    name = work.chunks[2].names[0]
    (work.folder / f".{name}.png.x.part").write_bytes(b"half")
    (work.folder / f"{name}.png").write_bytes(b"written, but its row is not")
    ensure_images(work)
    assert len(CALLS) == 6 and not list(work.folder.glob("*.part")) and not list(work.folder.glob(".*.part"))


@pytest.mark.parametrize("suffix", [".png", ".safetensors"])
def test_a_file_that_is_gone_costs_its_chunk(work, suffix):
    ensure_images(work)
    before = contents(work.folder)
    (work.folder / f"{work.chunks[1].names[0]}{suffix}").unlink()
    CALLS.clear()
    ensure_images(work)
    assert len(CALLS) == 1 and contents(work.folder) == before and len(rows(work.folder)) == COUNT


def test_a_video_that_is_gone_is_made_again(films):
    before = ensure_images(films).digest
    shutil.rmtree(films.folder / films.chunks[1].names[0])
    assert ensure_images(films).digest == before


def test_a_longer_list_keeps_the_chunks_that_are_the_same(work):
    ensure_images(work)
    longer = replace(work, items=tuple(items_of(["a", "b", "c"], 14, first_seed=3)))
    CALLS.clear()
    ensure_images(longer)
    assert [len(call) for call in CALLS] == [2, 2]  # the eleventh image has company now
    fresh = replace(longer, root=work.root / "fresh")
    assert ensure_images(fresh).digest == ensure_images(longer).digest
    assert len(ensure_images(work).items) == COUNT


def test_a_row_that_is_deleted_is_made_again(work):
    ensure_images(work)
    before, manifest = contents(work.folder), work.folder / "manifest-local.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(lines[:4] + lines[5:]))
    CALLS.clear()
    ensure_images(work)
    assert len(CALLS) == 1 and contents(work.folder) == before and len(rows(work.folder)) == COUNT


def test_a_work_takes_one_thread(work, monkeypatch):
    seen = []
    plain = executor.generate_batch
    monkeypatch.setattr(executor, "generate_batch", lambda *args: seen.append(torch.get_num_threads()) or plain(*args))
    torch.set_num_threads(2)
    try:
        ensure_images(work)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {1}


# What is not as it should be


def plant(work, what):
    """Damage a finished folder; returns what the error has to name."""
    folder, name = work.folder, work.chunks[1].names[0]
    manifest = folder / "manifest-local.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    image = folder / f"{name}.png"
    if what == "duplicate":
        (folder / "manifest-other.jsonl").write_text(lines[2])
        return f"{name}.*made more than once.*manifest-local.jsonl and manifest-other.jsonl"
    if what == "changed image":
        data = bytearray(image.read_bytes())
        data[-20] ^= 1
        image.write_bytes(data)
        return f"{name}.png .* is not what was written"
    if what == "changed latents":
        (folder / f"{name}.safetensors").write_bytes(b"x")
        return f"{name}.safetensors .* is not what was written"
    if what == "foreign":
        shutil.copy(image, folder / "0123456789abcdef.png")
        return "0123456789abcdef.png was not made by this run"
    if what == "another size":
        Image.new("RGB", (9, 8)).save(image)
        row = {**json.loads(lines[2]), "image": executor.sha256_file(image)}
        manifest.write_text("".join([*lines[:2], json.dumps(row) + "\n", *lines[3:]]))
        return "images differ in size: .*9 x 8"
    raise KeyError(what)


FAULTS = ("duplicate", "changed image", "changed latents", "foreign", "another size")


@pytest.mark.parametrize("what", FAULTS)
def test_the_audit_names_what_is_wrong(work, what):
    ensure_images(work)
    message = plant(work, what)
    CALLS.clear()
    with pytest.raises(RuntimeError, match=message):
        ensure_images(work)
    longer = replace(work, items=(*work.items, ("later", 0)))
    with pytest.raises(RuntimeError, match=message):
        ensure_images(longer)
    assert CALLS == []  # seen before anything was made


def test_the_audit_names_what_nobody_made(work):
    ensure_images(work)
    with pytest.raises(RuntimeError, match=r"'later' with seed 0 \([0-9a-f]{16}\) has no row"):
        audit(replace(work, items=(*work.items, ("later", 0))))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "should be an object"),
        ('{"item": "x"}', "Field required"),
        ("", "Invalid JSON"),
        ('{"item": 1, "chunk": "x"}', "valid string"),
    ],
)
def test_a_corrupted_manifest_is_named_by_line(work, line, says):
    ensure_images(work)
    manifest = work.folder / "manifest-local.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join([*lines[:3], line + "\n", *lines[3:]]))
    with pytest.raises(ValueError, match=rf"manifest-local.jsonl:4: corrupted manifest .*{says}"):
        ensure_images(work)


def test_a_row_of_another_run_is_refused(work):
    ensure_images(work)
    other = replace(work, call={"guidance_scale": 2.0})
    other.folder.mkdir(parents=True)
    shutil.copy(work.folder / "manifest-local.jsonl", other.folder)
    with pytest.raises(ValueError, match=r"manifest-local.jsonl:1: .* is not of this run"):
        ensure_images(other)


def test_an_unreadable_image_is_named(work):
    made = ensure_images(work)
    path = made.folder / f"{made.rows[0].item}.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=rf"{path.name}: unreadable image"):
        made.images[0]
    Image.new("L", (8, 8)).save(path)
    with pytest.raises(ValueError, match=rf"{path.name}: a picture of 1 channels"):
        made.images[0]


@pytest.mark.parametrize("where", ["image", "manifest"])
def test_a_full_disk_loses_nothing(work, monkeypatch, where):
    full = OSError(errno.ENOSPC, "No space left on device")
    calls = itertools.count(1)

    def save(image, path, format):
        if next(calls) == 5:
            Path(path).write_bytes(b"half a file")
            raise full
        plain_save(image, path, format)

    def fsync(handle):
        if next(calls) == 15:  # 4 files and a manifest of each chunk: the third one's rows
            raise full
        plain_sync(handle)

    plain_save, plain_sync = Image.Image.save, os.fsync
    with monkeypatch.context() as patched:
        patched.setattr(Image.Image, "save", save) if where == "image" else patched.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match=rf"cannot write to {work.folder} .*No space left.* GB are free"):
            ensure_images(work)
    assert len(rows(work.folder)) == 4 and not list(work.folder.glob(".*.part"))
    CALLS.clear()
    ensure_images(work)
    assert len(CALLS) == 4


def test_too_small_a_disk_is_seen_before_the_start(work, monkeypatch):
    monkeypatch.setattr(executor.shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    with pytest.raises(OSError, match=r"not enough space .* 11 images may need 0\.05 GB, 0\.01 GB are free"):
        ensure_images(work)
    assert CALLS == []
    ensure_images(replace(work, call={"height": 64, "width": 64}))


def test_two_processes_do_not_make_the_same_images(work):
    work.folder.mkdir(parents=True)
    with sole_writer(work.folder / WORK_FILE), pytest.raises(RuntimeError, match="is being written by process"):
        ensure_images(work)
    ensure_images(work)


def test_a_worker_that_does_not_see_the_folder_says_so(work):
    with pytest.raises(RuntimeError, match="use a folder that every worker can see"):
        executor.Worker(work, "x", "cpu")


def test_engines_that_cannot_be_had_are_refused(work, monkeypatch):
    with pytest.raises(ValueError, match="for engine ray, not for local"):
        open_engine("local", workers=2)
    with pytest.raises(ValueError, match="RANK is not set: `torchrun --nproc-per-node 2"):
        open_engine("torchrun").__enter__()
    fake = SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None)
    with (
        monkeypatch.context() as patched,
        pytest.raises(ConnectionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"),
    ):
        patched.setitem(sys.modules, "ray", fake)
        open_engine("ray", address="127.0.0.1:1").__enter__()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeError, match=r"pip install 'fluxq\[distributed\]'"):
        open_engine("ray").__enter__()
    assert CALLS == [] and not work.folder.exists()


# Killed in the middle


@dataclass(frozen=True)
class Dying:
    """The same images, but the process that opens it is killed at its `at`-th chunk, once for each of `deaths`.

    torn: half of the rows are in the manifest by then. after: all are, but nobody has been told. always: before any.
    """

    side: Side
    flags: Path
    deaths: tuple[str, ...]
    at: int = 2
    name = "dying"
    cache = None

    def describe(self):
        return self.side.describe()

    def open(self, device="cpu"):
        plain, calls = executor._append, itertools.count(1)

        def append(manifest, rows):
            death = self.claim() if next(calls) == self.at else None
            if death == "torn":
                text = "".join(row.model_dump_json() + "\n" for row in rows)
                manifest.open("a").write(text[: 3 * len(text) // 4])
            if death == "after":
                plain(manifest, rows)
            if death is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(manifest, rows)

        executor._append = append
        return self.side.open(device)

    def claim(self):
        for death in self.deaths:
            try:
                (self.flags / death).touch(exist_ok=death == "always")
            except FileExistsError:
                continue
            return death
        return None


def dying(root, side, *deaths, at=2):
    root.joinpath("flags").mkdir(exist_ok=True)
    return work_in(root / "images", Dying(side, root / "flags", deaths, at))


def main(engine, root, side, *deaths):
    """Do two works, one after the other, in a process that a test starts; a death is of the first."""
    engine, _, address = engine.partition("@")
    root, side = Path(root), SIDES[side]
    first = dying(root, side, *deaths) if deaths else work_in(root / "images", side)
    with open_engine(engine, address=address or None) as opened:
        made = ensure_images(first, opened)
        again = ensure_images(replace(first, items=first.items[:4]), opened)
    assert (made is None) == (again is None) == (os.environ.get("RANK", "0") != "0")


@pytest.mark.slow
def test_a_process_that_is_killed_is_taken_up_where_it_was(tmp_path, side, whole):
    killed = forked.run(__file__, "local", tmp_path, side, "torn")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    made = work_in(tmp_path / "images", SIDES[side])
    assert len(complete_lines(made.folder)) == 3 and len(contents(made.folder)) == 8
    ensure_images(made)
    require_same(made, whole(side))


def complete_lines(folder):
    return [line for path in folder.glob("manifest-*") for line in path.read_text().split("\n")[:-1]]


@pytest.mark.slow
def test_two_ranks_make_what_one_process_makes(tmp_path, side, whole):
    done = ranks.run(2, __file__, "torchrun", tmp_path, side)
    assert done.returncode == 0, done.stderr
    require_same(work_in(tmp_path / "images", SIDES[side]), whole(side), workers=2)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_taken_up_where_it_was(tmp_path, side, whole):
    killed = ranks.run(2, __file__, "torchrun", tmp_path, side, "torn")
    assert killed.returncode != 0
    made = work_in(tmp_path / "images", SIDES[side])
    assert 0 < len(complete_lines(made.folder)) < COUNT
    ensure_images(made)
    require_same(made, whole(side), workers=2)


@pytest.fixture(scope="module")
def ray_engine():
    ray = pytest.importorskip("ray", reason="engine ray needs the extra `distributed`")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file
    with open_engine("ray", workers=2) as engine:
        yield engine


@dataclass(frozen=True)
class Meeting:
    """The same images; opening waits until two have opened."""

    side: Side
    flags: Path
    name = "meeting"
    cache = None

    def describe(self):
        return self.side.describe()

    def open(self, device="cpu"):
        pipe = self.side.open(device)
        (self.flags / f"open-{os.getpid()}").touch()
        deadline = time.monotonic() + 600
        while len(list(self.flags.glob("open-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        return pipe


@pytest.mark.long
def test_two_actors_make_what_one_process_makes(tmp_path, side, whole, ray_engine):
    made = work_in(tmp_path / "images", Meeting(SIDES[side], tmp_path))
    images = ensure_images(made, ray_engine)
    assert images.digest == ensure_images(whole(side)).digest
    require_same(made, whole(side), workers=2)


@pytest.mark.long
def test_actors_that_die_are_replaced_and_nothing_is_made_twice(tmp_path, side, whole, ray_engine, caplog):
    made = dying(tmp_path, SIDES[side], "torn", "after")
    with caplog.at_level(logging.WARNING, logger="fluxq"):
        ensure_images(made, ray_engine)
    require_same(made, whole(side))
    assert sorted(path.name for path in (tmp_path / "flags").iterdir()) == ["after", "torn"]
    assert "died making the batch of" in caplog.text


@dataclass(frozen=True)
class Broken(FakeSide):
    """Cannot be opened."""

    def open(self, device="cpu"):
        raise ValueError(f"backend {self.backend!r} is unknown")


@pytest.mark.long
def test_an_error_of_an_actor_arrives_as_what_it_is(tmp_path, ray_engine):
    broken = replace(work_in(tmp_path, Broken("fake", "", "", backend="abacus")), items=(("one", 1),))
    with pytest.raises(ValueError, match=r"^backend 'abacus' is unknown"):
        ensure_images(broken, ray_engine)


@pytest.mark.slow
def test_a_cluster_is_joined_once(ray_engine):
    with pytest.raises(ValueError, match="joined a Ray cluster already"), open_engine("ray", address="10.0.0.1:6379"):
        pass


@pytest.mark.long
def test_a_cluster_that_runs_is_joined_and_left_running(tmp_path, whole, ray_engine):
    import ray

    address = ray.get_runtime_context().gcs_address
    done = forked.run(__file__, f"ray@{address}", tmp_path, "fake")
    assert done.returncode == 0, done.stderr
    require_same(work_in(tmp_path / "images", FAKE), whole("fake"))
    assert ray.cluster_resources()["CPU"] == 2


@pytest.mark.long
def test_a_chunk_that_kills_every_actor_is_given_up_by_name(tmp_path, ray_engine):
    with pytest.raises(RuntimeError, match="4 workers died making the batch of"):
        ensure_images(dying(tmp_path, FAKE, "always", at=1), ray_engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
