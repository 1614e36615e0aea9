"""One way to write: what may be replaced, the swap and its way back, what is on the disk when, what a kill leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from click.testing import CliRunner
from example_report import example
from filelock import FileLock
from shared import copy_of

from fluxq import tiny
from fluxq.base import files
from fluxq.base import output as module
from fluxq.base.files import atomic_path, clear_parts, sha256_file
from fluxq.base.output import (
    BESIDE,
    EXPORT_FILE,
    PLAN_FILE,
    Output,
    job_digest,
    plain_path,
    put,
    put_back,
    remove,
    seal,
    sole_writer,
    writing,
)
from fluxq.base.tensors import save_weights
from fluxq.cli import cli
from fluxq.jobs import judge, making

REPORT = '{"kind": "fluxq report"'
A_JOB = job_digest(["a job"])


def checkpoint(folder: Path, *names: str) -> Path:
    """A folder that its record says fluxq wrote."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("ours")
    (folder / PLAN_FILE).write_text(json.dumps({"files": {name: sha256_file(folder / name) for name in names}}))
    return folder


def written(text: str, suffix: str, job: str = "") -> str:
    """A text as a report has it: sealed, or of JSON with its kind."""
    return f'{REPORT}, "text": "{text}"}}' if suffix == ".json" else seal(text, suffix, job)


def tree(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


# Before any work


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("model", "output model is the model"),
        ("model/vae", "output model/vae lies in the model, which would be changed"),
        (".", "output . holds the "),
        ("holds", "output holds holds the LoRA file"),
        ("link", "output link is the model"),
        ("mounted", "is a mount point, which cannot be replaced as a whole; give a folder in it"),
        ("file", "output file is a file; give another --output"),
        ("file/out", "is no folder one may write to"),
        ("kept", "output kept is read-only; `chmod u\\+w` it"),
        ("n" * 240, "has too long a name"),
        ("ours", "output ours exists; give another --output, or --overwrite to replace it"),
        ("theirs", "output theirs exists; give another --output \\(nothing marks photos/one as fluxq's\\)$"),
    ],
)
def test_an_output_that_cannot_or_must_not_be_written_is_refused(tmp_path, monkeypatch, target, words):
    for folder in ("model/vae", "holds/a", "mounted", "theirs/photos", "kept"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("file", "holds/a/lora", "theirs/photos/one"):
        (tmp_path / file).write_text("mine")
    checkpoint(tmp_path / "ours", "weights")
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    writable = os.access  # root may write to all
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "kept" and writable(path, mode))
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=words):
        Output(Path(target)).require({"the model": "model", "the LoRA file": "holds/a/lora"}, overwrite=False)
    assert tree(tmp_path) == before


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    (checkpoint(tmp_path / "out", "weights") / "eval").mkdir()
    monkeypatch.chdir(tmp_path / "out" / "eval")
    with pytest.raises(ValueError, match="holds the current folder"):
        Output(tmp_path / "out").require({}, overwrite=True)


def test_overwriting_replaces_what_fluxq_wrote_and_nothing_else(tmp_path):
    out = checkpoint(tmp_path / "out", "weights")
    for name in ("README.md", "eval/report.json", ".eval_results/one.yaml"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(written("of eval", Path(name).suffix))
    Output(out).require({}, overwrite=True)
    for folder in ("vae", "eval"):
        (out / folder).mkdir(exist_ok=True)
        (out / folder / "notes.txt").write_text("mine")
        with pytest.raises(
            ValueError, match=rf"not replaced: nothing marks {folder}/notes\.txt as fluxq's; remove it yourself, or"
        ):
            Output(out).require({}, overwrite=True)
        (out / folder / "notes.txt").unlink()
    (out / PLAN_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"fluxq_plan\.json, its record, is damaged; remove it yourself"):
        Output(out).require({}, overwrite=True)
    (tmp_path / "empty").mkdir()
    Output(tmp_path / "empty").require({}, overwrite=False)
    (export := tmp_path / "export").mkdir()
    (export / EXPORT_FILE).write_text(json.dumps({"files": {}}))
    Output(export).require({}, overwrite=True)
    (export / "README.md").write_text("mine, since exports come without one")
    with pytest.raises(ValueError, match=r"nothing marks README\.md as fluxq's"):
        Output(export).require({}, overwrite=True)


@pytest.mark.parametrize("name", ["x.safetensors", "x.html"])
def test_files_beside_are_the_output_too(tmp_path, name):
    output, beside = Output(tmp_path / name, True, (".json",)), tmp_path / "x.json"
    output.require({}, overwrite=False)
    beside.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"x\.json"):
            output.require({}, overwrite=overwrite)
    with pytest.raises(ValueError, match="is the report of run"):
        output.require({"the report of run": beside}, overwrite=True)
    if name.endswith("html"):
        (tmp_path / name).write_text(written("<html>", ".html"))
    else:
        save_weights({"a": torch.ones(2)}, tmp_path / name, {"fluxq_version": "1"})
    with pytest.raises(ValueError, match=r"nothing marks x\.json as fluxq's"):
        output.require({}, overwrite=True)
    beside.unlink()
    beside.symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"nothing marks x\.json as fluxq's"):
        output.require({}, overwrite=True)
    beside.unlink()
    if name.endswith("html"):
        beside.write_text(written("old", ".json"))
    else:
        beside.write_text("{}")
        named = {"fluxq_version": "1", BESIDE: json.dumps({".json": sha256_file(beside)})}
        save_weights({"a": torch.ones(2)}, tmp_path / name, named)
    output.require({}, overwrite=True)
    if name.endswith("html"):
        (tmp_path / name).write_text("<html>")
    else:
        save_weights({"a": torch.ones(2)}, tmp_path / name, {"format": "pt"})
    with pytest.raises(ValueError, match=r"nothing marks x\.\w+ as fluxq's"):
        output.require({}, overwrite=True)


# The swap


def made_and_old(folder: Path) -> list[tuple[Path, Path]]:
    (folder / "new").mkdir()
    pairs = []
    for name in ("side", "main"):
        (folder / "new" / name).write_text("new")
        (folder / name).write_text("old")
        pairs.append((folder / "new" / name, folder / name))
    return pairs


@pytest.mark.parametrize("moves", range(4))
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_swap_that_fails_at_any_move_changes_nothing(tmp_path, monkeypatch, moves, error):
    pairs, rename, left = made_and_old(tmp_path), Path.rename, [moves]
    before = tree(tmp_path)

    def failing(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] == -1:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(error):
        put(pairs, tmp_path / "aside")
    assert tree(tmp_path) == before and not (tmp_path / "aside").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("ends", ["whole", "undone"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_middle_of_a_swap_waits_for_its_end(tmp_path, monkeypatch, number, ends):
    """It comes at each move, also at those of the way back."""
    pairs, rename, moves = made_and_old(tmp_path), Path.rename, []
    before = tree(tmp_path)

    def signalled(path: Path, target: Path) -> Path:
        moves.append(target)
        os.kill(os.getpid(), number)
        if ends == "undone" and len(moves) == 3:
            raise OSError("full")
        return rename(path, target)

    kept = signal.signal(number, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "rename", signalled)
            put(pairs, tmp_path / "aside")
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, kept)
    after = {"side": "new", "main": "new", "aside/side": "old", "aside/main": "old"}
    assert len(moves) > 3 and tree(tmp_path) == (after if ends == "whole" else before)
    assert (tmp_path / "aside").exists() == (ends == "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions")
def test_a_new_file_has_the_permissions_of_one_and_no_thread_sees_another_umask(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda _: pytest.fail("other threads make files too"))
            files.write_text(tmp_path / "a", "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


@pytest.mark.parametrize("is_file", [False, True])
def test_what_even_the_way_back_could_not_put_back_is_there_for_the_next_run(tmp_path, monkeypatch, is_file):
    """The disk fails from the second move on, for good; then it is mended."""
    output = Output(tmp_path / "x.html", is_file=True, beside=(".json",)) if is_file else Output(tmp_path / "out")
    if is_file:
        for place in output.places:
            place.write_text(written("old", place.suffix))
    else:
        checkpoint(output.target, "weights")
    before, rename, left = tree(tmp_path), Path.rename, [1]

    def failing(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "failing")
        return rename(path, target)

    def write(overwrite: bool) -> None:
        with writing(output, A_JOB, overwrite=overwrite) as new:
            for place in output.places if is_file and new else ():
                (new / place.name).write_text("new")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="failing"):
        patch.setattr(Path, "rename", failing)
        write(True)
    assert before != tree(tmp_path)
    with pytest.raises(ValueError, match="exists; give another --output"):
        write(False)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_traces_that_cannot_be_removed_do_not_let_foreign_files_be_replaced(tmp_path, monkeypatch, overwrite):
    output, photo = Output(tmp_path / "out"), tmp_path / "out" / "photo.png"
    (tmp_path / f".out.{A_JOB[:16]}.old" / "out").mkdir(parents=True)
    photo.parent.mkdir()
    photo.write_text("theirs")
    monkeypatch.setattr(module, "remove", lambda _: None)
    with (
        pytest.raises(ValueError, match=r"photo\.png as fluxq's"),
        writing(output, job_digest(["another"]), overwrite=overwrite),
    ):
        pass
    assert photo.read_text() == "theirs"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", ["file in a folder", "file", "pipe", "link", "beside"])
def test_what_is_put_there_while_all_is_brought_to_the_disk_is_not_replaced(tmp_path, monkeypatch, what, overwrite):
    """A checkpoint of many GB is synced for minutes."""
    is_file = what == "beside"
    output = Output(tmp_path / "out", is_file, (".json",) if is_file else ())
    theirs = tmp_path / ("out.json" if is_file else "out/photo.png" if what == "file in a folder" else "out")
    if overwrite and what == "file in a folder":
        checkpoint(tmp_path / "out", "ours")
    before = tree(tmp_path)

    def put_theirs(path, **_):
        if not os.path.lexists(theirs):
            theirs.parent.mkdir(exist_ok=True)
            made = {"pipe": os.mkfifo, "link": lambda path: os.symlink("nowhere", path)}
            made.get(what, lambda path: Path(path).write_text("theirs"))(theirs)

    monkeypatch.setattr(module, "sync", put_theirs)
    with (
        pytest.raises(RuntimeError, match=r"is not replaced: .*\(it was put there meanwhile\)"),
        writing(output, A_JOB, overwrite=overwrite) as new,
    ):
        (new / "out").write_text("new") if new else None
    mode = os.lstat(theirs).st_mode
    assert stat.S_ISFIFO(mode) == (what == "pipe") and stat.S_ISLNK(mode) == (what == "link")
    left = tree(tmp_path)
    assert what in ("pipe", "link") or left.pop(theirs.relative_to(tmp_path).as_posix()) == "theirs"
    assert left == before and not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_is_put_there_while_the_old_is_judged_is_not_replaced(tmp_path, monkeypatch):
    """Between the look at its place and the move: it is looked at again where nobody finds it."""
    photo, foreign = checkpoint(tmp_path / "out", "ours") / "photo.png", module._foreign

    def judged(output: Output) -> str:
        what = foreign(output)
        if output.place == photo.parent:
            photo.write_text("theirs")
        return what

    with (
        pytest.raises(RuntimeError, match=r"photo\.png as fluxq's \(it was put there meanwhile\)"),
        writing(Output(tmp_path / "out"), A_JOB, overwrite=True),
    ):
        monkeypatch.setattr(module, "_foreign", judged)
    assert photo.read_text() == "theirs" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_in_place_of_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "out").write_text("theirs")
    with (
        pytest.raises(ValueError, match=r"nothing marks out as fluxq's"),
        writing(Output(tmp_path / "out"), A_JOB, overwrite=True),
    ):
        pytest.fail("begun")
    assert (tmp_path / "out").read_text() == "theirs"


def test_an_output_means_the_same_before_and_after_it_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Output(Path("no/../x")).place == plain_path("no/../x") == tmp_path / "x"
    assert Output(Path("~/x")).place == plain_path("~/x") == tmp_path / "home" / "x"
    assert Output(Path("~nobody-of-this-name/x")).place == tmp_path / "~nobody-of-this-name" / "x"
    (tmp_path / "link").symlink_to("x")
    assert plain_path("link") == Path("link")


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_put_there_while_a_file_is_made_is_not_replaced(tmp_path, overwrite):
    output = Output(tmp_path / "x.html", True, (".json",))
    with (
        pytest.raises(RuntimeError, match=r"x\.(html|json).*\(it was put there meanwhile\)"),
        writing(output, A_JOB, overwrite=overwrite) as new,
    ):
        for place in output.places if new else ():
            (new / place.name).write_text("new")
        output.places[0].write_text("theirs")
    assert tree(tmp_path) == {"x.json": "theirs"}


def test_what_was_moved_aside_comes_back_where_the_new_files_were_removed(tmp_path):
    """By somebody who cleared away, after a kill in the middle of a swap."""
    old = tmp_path / f".out.{A_JOB[:16]}.old"
    checkpoint(old / "out", "ours")
    with pytest.raises(ValueError, match="exists"), writing(Output(tmp_path / "out"), A_JOB, overwrite=False):
        pytest.fail("begun")
    assert (tmp_path / "out" / "ours").is_file() and not old.exists()


def test_a_side_file_does_not_make_a_swap_whole(tmp_path):
    """It was in its place, the file itself was not yet; then somebody removed the new files."""
    output, old = Output(tmp_path / "x.html", True, (".json",)), tmp_path / f".x.html.{A_JOB[:16]}.old"
    old.mkdir()
    for path, text in ((old / "x.html", "old"), (old / "x.json", "old"), (tmp_path / "x.json", "new")):
        path.write_text(written(text, path.suffix))
    output.settle()
    assert tree(tmp_path) == {
        **{f"x{suffix}": written("old", suffix) for suffix in (".html", ".json")},
        f"{old.with_suffix('.new').name}/x.json": written("new", ".json"),
    }


def test_an_empty_folder_in_place_of_a_file_that_a_kill_left_is_nothing(tmp_path, monkeypatch):
    output = Output(tmp_path / "x.yaml", True)

    def killed(path: Path) -> None:
        raise SystemExit

    def write() -> None:
        with writing(output, A_JOB, overwrite=True) as new:
            (new / "x.yaml").write_text(written("new", ".yaml", A_JOB)) if new else None

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(module, "sync", lambda *_, **__: os.path.lexists(output.place) or output.place.mkdir())
        patch.setattr(module, "remove", killed)  # behind the swap
        write()
    assert output.place.is_file()
    write()
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


def test_judging_an_old_output_again_reads_nothing_again(tmp_path, monkeypatch):
    """While signals are held back, that is: an old checkpoint's files may be large, and touched since."""
    checkpoint(tmp_path / "out", "a", "b")
    hashed: list[Path] = []
    monkeypatch.setattr(module, "sha256_file", lambda path: hashed.append(path) or sha256_file(path))
    with writing(Output(tmp_path / "out"), A_JOB, overwrite=True) as new:
        (new / "new").write_text("new") if new else None
    assert len(hashed) == 2 and [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_what_was_put_there_after_a_kill_is_not_replaced(tmp_path):
    target, aside = tmp_path / "x.html", tmp_path / "aside"
    aside.mkdir()
    (tmp_path / "new").mkdir()
    for path, text in ((tmp_path / "new" / "x.html", "new"), (aside / "x.html", "old"), (target, "theirs")):
        path.write_text(text)
    before = tree(tmp_path)
    with pytest.raises(RuntimeError, match="was put there meanwhile"):
        put_back([(tmp_path / "new" / "x.html", target)], aside)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("moves", range(5))
def test_a_swap_that_a_kill_ends_is_undone_by_the_next_run_unless_it_was_whole(tmp_path, monkeypatch, moves):
    pairs, rename, left = made_and_old(tmp_path), Path.rename, [moves]
    before = tree(tmp_path)

    def killed(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise SystemExit
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr(module, "_undo", lambda *_: None)
        patch.setattr(Path, "rmdir", lambda _: None)
        if moves < 4:
            with pytest.raises(SystemExit):
                put(pairs, tmp_path / "aside")
        else:
            put(pairs, tmp_path / "aside")
    put_back(pairs, tmp_path / "aside")
    after = {"side": "new", "main": "new", "aside/side": "old", "aside/main": "old"}
    assert tree(tmp_path) == (before if moves < 4 else after)


def test_all_is_on_the_disk_before_the_swap_and_the_swap_before_the_old_is_removed(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        files.os, "fsync", lambda h: done.append(os.readlink(f"/proc/self/fd/{h}").rpartition("/")[2]) or fsync(h)
    )
    monkeypatch.setattr(Path, "rename", lambda p, t: done.append(f"{p.name}>{t.name}") or rename(p, t))
    monkeypatch.setattr(module, "remove", lambda path: done.append(f"-{path.suffix or path.name}"))
    output = Output(checkpoint(tmp_path / "out", "weights"))
    with writing(output, A_JOB, overwrite=True) as new:
        assert new is not None
        (new / "vae").mkdir()
        (new / "vae" / "a").write_text("new")
    stem = new.name.removesuffix(".new")
    assert done[-9:-7] == ["a", "vae"] or done[-10:-8] == ["a", "vae"]
    assert done[-7:] == ["out>out", f"{stem}.new>out", tmp_path.name, "-.new", "-.old", "-.pid", "-.lock"]


def test_a_file_is_on_the_disk_before_it_has_its_name_unless_the_caller_sees_to_that(tmp_path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync", lambda path, deep=True: synced.append(path))
    with atomic_path(tmp_path / "a") as part:
        part.write_text("a")
    assert synced == [part, tmp_path]
    with atomic_path(tmp_path / "b", durable=False) as part:
        part.write_text("b")
    assert len(synced) == 2 and tree(tmp_path) == {"a": "a", "b": "b"}


# A command from beginning to end


@pytest.mark.parametrize("is_file", [False, True])
def test_what_is_made_stands_in_its_place_and_nothing_else_is_left(tmp_path, is_file):
    output = Output(tmp_path / "x.html", is_file, (".json",) if is_file else ())
    for text, overwrite in (("first", False), ("second", True)):
        with writing(output, A_JOB, overwrite=overwrite) as new:
            for name in ("x.json", "x.html") if is_file else ("a", PLAN_FILE):
                if is_file:
                    content = written(text, Path(name).suffix)
                else:
                    plan = {"files": {"a": sha256_file(new / "a")}, "text": text} if name == PLAN_FILE else text
                    content = json.dumps(plan)
                (new / name).write_text(content)
        names = ["x.html", "x.json"] if is_file else ["x.html"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert all(text in content for content in tree(tmp_path).values())
    with (
        pytest.raises(ValueError, match="exists; give another --output, or --overwrite"),
        writing(output, A_JOB, overwrite=False),
    ):
        pytest.fail("began")


def test_an_error_leaves_the_old_output_and_nothing_else(tmp_path):
    before = tree(checkpoint(tmp_path / "out", "weights"))
    with pytest.raises(OSError, match="full"), writing(Output(tmp_path / "out"), A_JOB, overwrite=True) as new:
        (new / "half").write_text("half")
        raise OSError("full")
    assert tree(tmp_path / "out") == before and [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import json, os, signal, sys
from pathlib import Path
from fluxq.base import output as module
from fluxq.base.files import sha256_file
from fluxq.base.output import Output, job_digest, seal, writing
left, is_file, overwrite = int(sys.argv[1]), sys.argv[2] == "file", sys.argv[3] == "overwrite"

def watch(event, arguments):  # all that changes the file system goes by here
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree") or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
    ):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

output = Output(Path("x.html"), is_file, (".json",) if is_file else ())
names = ("x.json", "x.html") if is_file else ("a", "fluxq_plan.json")
job = job_digest(["job"])
def text(new, name):
    if is_file:
        return '{"kind": "fluxq report"}' if name == "x.json" else seal("new", ".html", job)
    plan = {"files": {"a": sha256_file(new / "a")}, "identity": {"job": job}} if name != "a" else "new"
    return json.dumps(plan)
sys.addaudithook(watch)
try:
    output.require({}, overwrite=overwrite, exists_ok=True)
    output.require_free(overwrite=overwrite, job=job)
    with writing(output, job, overwrite=overwrite) as new:
        for name in names if new else ():
            (new / name).write_text(text(new, name))
except ValueError as error:
    sys.exit(str(error))
print("finished" if new is None else "made", left)
"""


@pytest.mark.often(1)
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overwrite", ["", "overwrite"])
@pytest.mark.parametrize("is_file", ["file", "folder"])
def test_killed_at_any_call_the_same_command_ends_as_undisturbed(tmp_path, is_file, overwrite, every):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)

    def run(folder: Path, calls: int) -> subprocess.CompletedProcess[str]:
        return forked.run(script, calls, is_file, overwrite, cwd=folder)

    def begin(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if overwrite and is_file == "file":
            for name in ("x.html", "x.json"):
                (folder / name).write_text(written("old", Path(name).suffix))
        elif overwrite:
            checkpoint(folder / "x.html", "weights")
        return folder

    undisturbed = begin("undisturbed")
    most = 10_000
    calls = most - int(run(undisturbed, most).stdout.split()[1])
    expected, finished = tree(undisturbed), 0
    assert calls > 8 and expected
    for at in range(calls - 1, -1, -every):
        folder = begin(str(at))
        old = tree(folder)
        assert run(folder, at).returncode == -signal.SIGKILL
        visible = {name: text for name, text in tree(folder).items() if not name.startswith(".")}
        again = run(folder, most)
        assert again.returncode == 0, (at, again.stderr)
        finished += again.stdout.startswith("finished")
        assert tree(folder) == expected, at
        assert old == {} or visible in (old, expected) or is_file == "file" or visible == {}, at
    assert finished or overwrite or every > 1


def test_what_was_moved_aside_by_another_job_is_put_back_before_anything_else(tmp_path):
    (tmp_path / ".out.0123456789abcdef.new").mkdir()
    checkpoint(tmp_path / ".out.0123456789abcdef.old" / "out", "weights")
    checkpoint(tmp_path / ".out.more.0123456789abcdef.old" / "0", "weights")  # of another output, out.more
    with (
        pytest.raises(ValueError, match="out exists; give another --output, or --overwrite"),
        writing(Output(tmp_path / "out"), A_JOB, overwrite=False),
    ):
        pytest.fail("began")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.more.0123456789abcdef.old", "out"]
    assert tree(tmp_path / "out")["weights"] == "ours"


def test_a_link_to_another_disk_stays_and_its_target_is_replaced(tmp_path):
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system at /dev/shm")
    place = shm / f"fluxq-test-{os.getpid()}"
    place.mkdir()
    try:
        (tmp_path / "out").symlink_to(place / "out")
        with writing(Output(tmp_path / "out"), A_JOB, overwrite=False) as new:
            (new / "a").write_text("new")
        assert (tmp_path / "out").is_symlink() and tree(place) == {"out/a": "new"}
    finally:
        shutil.rmtree(place)


# Locks and leftovers


def test_what_cannot_be_removed_is_named_and_costs_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    monkeypatch.setattr(module.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "I/O error")))
    remove(tmp_path / "old")
    assert f"{tmp_path / 'old'} could not be removed (I/O error); it is of no more use" in caplog.text
    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda p, **k: unlink(p, **k) if p.suffix != ".pid" else (_ for _ in ()).throw(OSError(5, "x"))
    )
    with sole_writer(tmp_path / "out"):
        pass
    assert not (tmp_path / ".out.lock").exists()
    assert f"{tmp_path / '.out.pid'} could not be removed" in caplog.text


@pytest.mark.slow
def test_a_report_appears_with_its_json_and_markdown_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text(example().model_dump_json())
    with monkeypatch.context() as patch:
        patch.setattr("fluxq.eval.report.report.render", lambda _: (_ for _ in ()).throw(OSError("full")))
        done = CliRunner().invoke(cli, ["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "x.html")])
        assert done.exit_code == 1 and "full" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    judge.report([tmp_path / "run.json"], tmp_path / "x.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "x.html", "x.json", "x.md"]


@pytest.mark.parametrize("kind", ["lock", "pid"])
@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("elsewhere")], ids=["folder", "link"])
def test_what_lies_where_the_lock_goes_is_named_and_stays(tmp_path, kind, make):
    made = tmp_path / f".out.{kind}"
    make(made)
    with pytest.raises(ValueError, match=f"{made} is in the way"), sole_writer(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [made.name]


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_locks_is_named_and_no_other_process_blamed(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    message = f"{tmp_path} takes no lock file \\(Function not implemented\\); give another --output"
    with pytest.raises(ValueError, match=message), sole_writer(tmp_path / "out"):
        pass
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_removed_leaves_the_rights_of_the_folder_around_it(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    tmp_path.chmod(0o755)
    real, failing = os.rmdir, [True]

    def rmdir(name, *args, **how):
        if failing and str(name).endswith("work"):
            failing.pop()
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)
        real(name, *args, **how)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove(work)
    assert not failing and stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.skipif(sys.platform == "win32", reason="there a file that is open cannot be removed")
def test_a_lock_on_a_file_that_is_gone_is_taken_again(tmp_path, monkeypatch):
    """R21d: whoever ends removes the file that another may have opened; the lower bound of filelock is for that."""
    import fcntl

    real, gone = fcntl.flock, []

    def flock(descriptor, operation):
        if not gone:
            gone.append((tmp_path / "x.lock").unlink())
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with FileLock(tmp_path / "x.lock"):
        assert gone and (tmp_path / "x.lock").exists()


def test_an_output_in_a_pipelines_folder_is_refused_and_a_damaged_record_is_named(tmp_path):
    (tmp_path / "model" / "eval").mkdir(parents=True)
    (tmp_path / "model" / "model_index.json").write_text("{}")
    for name in ("s.safetensors", "eval/other.html"):
        with pytest.raises(ValueError, match=r"lies in the pipeline's folder .*model; give another"):
            Output(tmp_path / "model" / name, is_file=True).require({}, overwrite=True)
    (tmp_path / "model" / "fluxq_plan.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"fluxq_plan\.json, its record, is damaged; remove it yourself"):
        Output(tmp_path / "model").require({}, overwrite=True)


def test_what_is_not_replaced_beside_a_file_is_named(tmp_path):
    page = Output(tmp_path / "r.html", is_file=True, beside=(".md",))
    (tmp_path / "r.html").write_text(seal("x", ".html"))
    (tmp_path / "r.md").write_text(seal("x", ".md") + "more")
    with pytest.raises(ValueError, match=r"r\.html exists; give another --output \(nothing marks r\.md as fluxq's\)"):
        page.require({}, overwrite=False)


def test_a_folder_that_was_copied_read_only_is_removed(tmp_path):
    folder = tmp_path / "old" / "in"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    remove(tmp_path / "old")
    assert not (tmp_path / "old").exists()


def test_what_a_killed_process_left_of_a_file_is_cleared(tmp_path):
    """Files of a user's own with a like name stay."""
    for name in (".report.json.0123abcd.part", "report.json", "a.part", ".thesis.part", ".a.chapters.part"):
        (tmp_path / name).touch()
    (tmp_path / ".a.0123abcd.part").mkdir()
    clear_parts(tmp_path)
    left = [".a.0123abcd.part", ".a.chapters.part", ".thesis.part", "a.part", "report.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


# The commands


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_a_command_as_ctrl_c_does(tmp_path, number):
    program = f"""
import os, signal, fluxq.cli, fluxq.jobs.making as making
making.job_of = lambda *a, **k: os.kill(os.getpid(), {number})
plain = signal.default_int_handler if {number} == signal.SIGINT else signal.SIG_DFL
signal.signal({number}, plain)  # below nohup, or in the background, it is ignored, which a command leaves so
fluxq.cli.main()
"""
    done = forked.run("-c", program, *"quantize --recipe fp8 --no-check -o out".split(), cwd=tmp_path)
    assert done.returncode == 128 + number and list(tmp_path.iterdir()) == []
    assert (
        done.stderr.splitlines()[-1]
        == "interrupted; every output, and what interrupted runs had done before, is as it was or whole"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export d/ck --format torchao -o d --overwrite", "output d holds the checkpoint"),
        ("export d/ck --format torchao -o d/ck --overwrite", "output d/ck is the checkpoint"),
        ("export d/ck --format bfl -o x.safetensors", "x.config.json exists; give another --output"),
        ("export d/ck --format bfl -o x.safetensors --overwrite", "nothing marks x.config.json as fluxq's"),
        ("import d/ck --base m -o m --overwrite", "output m is the 16-bit model"),
        ("import d/file.safetensors -o d --overwrite", "output d holds what is imported"),
        ("quantize m --recipe fp8 --no-check -o m/transformer --overwrite", "output m/transformer lies in the model"),
        ("quantize --prompts d/p.txt --no-check -o d --overwrite", "output d holds the prompts"),
        ("quantize --recipe d/r.yaml --no-check -o d --overwrite", "output d holds the recipe"),
        ("quantize --no-check -o d --overwrite", "output d is not replaced: nothing marks file.safetensors as"),
        ("report d/ck -o d/ck/eval/report.html", "output d/ck/eval/report.html is the report of d/ck"),
        ("report d/ck -o x.html", "x.json exists; give another --output"),
    ],
)
def test_no_command_replaces_what_it_reads_or_what_is_not_its_own(place, monkeypatch, words, said):
    monkeypatch.chdir(place)
    before = {path: path.stat().st_mtime_ns for path in sorted(place.rglob("*")) if path.is_file()}
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2 and said in done.output, done.output
    assert {path: path.stat().st_mtime_ns for path in sorted(place.rglob("*")) if path.is_file()} == before


@pytest.fixture
def place(plain_checkpoint, tmp_path) -> Path:
    copy_of(plain_checkpoint("fp8"), tmp_path / "d" / "ck")
    copy_of(tiny.path(), tmp_path / "m")
    (tmp_path / "d" / "ck" / "eval").mkdir(exist_ok=True)
    for name in ("d/ck/eval/report.json", "d/p.txt", "d/file.safetensors", "x.config.json", "x.json"):
        (tmp_path / name).write_text("a red three\n")
    (tmp_path / "d" / "r.yaml").write_text("extends: fp8\n")
    return tmp_path


def test_control_characters_of_a_strangers_file_are_shown_and_not_obeyed(tmp_path):
    name = "\x1b]0;PWNED\x07\x1b[2Jx\u202e"
    tensors = {f"{name}.weight": torch.ones(16, 16).to(torch.float8_e4m3fn), f"{name}.weight_scale": torch.tensor(1.0)}
    save_weights(tensors, tmp_path / "x.safetensors", {})
    said = CliRunner().invoke(cli, ["inspect", str(tmp_path / "x.safetensors"), "--layers"]).output
    assert r"\x1b]0;PWNED\x07\x1b[2Jx\u202e" in said
    assert not any(char in said for char in "\x1b\x07\u202e")
    (tmp_path / name).mkdir()
    refused = CliRunner().invoke(cli, ["verify", str(tmp_path / name)]).output
    assert r"\x1b]0;PWNED" in refused and "\x1b" not in refused


@pytest.mark.often(1)
@pytest.mark.parametrize("encoding", ["cp437", "latin-1"])
def test_a_sign_that_the_terminal_lacks_ends_no_command(tmp_path, encoding):
    """R21o: × and … of a plan, and what a command warns of."""
    command, environment = ("-m", "fluxq", "plan", "--recipe", "nvfp4"), {**os.environ, "PYTHONIOENCODING": encoding}
    done = forked.run(*command, cwd=tmp_path, env=environment, encoding=encoding)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "768×128".encode(encoding, errors="replace").decode(encoding) in done.stdout


def test_the_root_of_the_file_system_is_no_output(tmp_path, monkeypatch):
    """R18: it has no folder around it."""
    monkeypatch.chdir(tmp_path)
    for words in ("quantize --recipe fp8 --no-check -o /", "calibrate --recipe nvfp4 -o / --overwrite"):
        done = CliRunner().invoke(cli, words.split())
        assert done.exit_code == 2 and "output / cannot be made" in done.output, done.output
    for is_file in (False, True):
        with pytest.raises(ValueError, match="output / cannot be made: / is no folder one may write to; give another"):
            Output(Path("/"), is_file).require({}, overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("modes", [(0o444, 0o555), (0o600, 0o700)], ids=["read-only", "private"])
def test_a_checkpoint_has_the_modes_of_new_files_whatever_the_models_are(tmp_path, umask, modes):
    """R15, R21h: of a read-only model it can be overwritten, and others may read that of a private one."""
    source, out = copy_of(tiny.path(), tmp_path / "m"), tmp_path / "out"
    for path in source.rglob("*"):
        path.chmod(modes[path.is_dir()])
    source.chmod(modes[1])
    before = os.umask(umask)
    try:
        for overwrite in (False, True):
            asked = making.JobOptions(str(source), "fp8", "rtn", str(out), check=False, overwrite=overwrite)
            making.quantize(making.job_of(asked))
            for path in (out, *out.rglob("*")):
                expected = (0o777 if path.is_dir() else 0o666) & ~umask
                assert stat.S_IMODE(path.stat().st_mode) == expected, path
    finally:
        os.umask(before)
        for path in (source, *source.rglob("*")):
            path.chmod(0o700)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


def test_a_strangers_file_begins_no_line_of_its_own(tmp_path):
    """Neither by a tensor's name, nor by text in its header, nor by the class that its configuration names."""
    layer = {"a.weight": torch.ones(16, 16).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(1.0)}
    for name, tensors, metadata in (
        ("named", {**layer, "a.x\nnothing is wrong": torch.ones(1)}, {}),
        ("told", layer, {"by": "x\nnothing is wrong"}),
    ):
        save_weights(tensors, tmp_path / f"{name}.safetensors", metadata)
        said = CliRunner().invoke(cli, ["inspect", str(tmp_path / f"{name}.safetensors")]).output
        assert "nothing is wrong" in said.replace("as far as", "") and "\nnothing is wrong\n" not in said
        assert not [line for line in said.splitlines() if line.strip() == "nothing is wrong"]
    save_weights(layer, tmp_path / "classed.safetensors", {})
    (tmp_path / "classed.config.json").write_text('{"_class_name": "Flux\\nnothing is wrong"}')
    refused = CliRunner().invoke(cli, ["inspect", str(tmp_path / "classed.safetensors")])
    assert refused.exit_code == 2 and "is no name of a class" in refused.output
