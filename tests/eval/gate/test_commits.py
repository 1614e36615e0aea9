"""Commits as sources of a gate: a real repository, worktrees and commands."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fluxq.eval.gate import commits
from fluxq.eval.gate.commits import commit_of

MAKE = """import json, sys
from pathlib import Path
prompts, out = Path(sys.argv[1]), Path(sys.argv[2])
rows = [json.loads(line) for line in prompts.read_text().splitlines()]
for index, row in enumerate(rows):
    (out / f"{index}.ppm").write_bytes(b"P6 4 4 255 " + bytes([COLOUR, row["seed"], 0]) * 16)
lines = [json.dumps(row | {"image": f"{index}.ppm"}) for index, row in enumerate(rows)]
(out / "prompts.jsonl").write_text("\\n".join(lines) + "\\n")
print("made", len(rows), file=open(Path(__file__).parent / "calls.txt", "a"))
"""
COMMAND = f"{sys.executable} -S make.py {{prompts}} {{out}}"


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "pro ject"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for colour in ("1", "2"):
        (folder / "make.py").write_text(MAKE.replace("COLOUR", colour), encoding="utf-8")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", colour)
    (folder / "make.py").write_text("not committed", encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
def test_each_commit_makes_its_images_once_in_a_worktree_of_its_own(project: Path, tmp_path: Path) -> None:
    after, before = (
        commit_of(f"git:{rev}", "echo set up >> ready", COMMAND, tmp_path / "w") for rev in ("main", "main~1")
    )
    assert before.make([("a", 7)]).images[0][:, 0, 0].tolist() == [1, 7, 0]
    images = after.make([("a", 7)]), after.make([("a", 7), ("b", 9)]), after.again().make([("a", 7)])
    assert [each.images[-1][:, 0, 0].tolist() for each in images] == [[2, 7, 0], [2, 9, 0], [2, 7, 0]]
    (tree,) = (path for path in after.folder.glob("tree-*") if path.is_dir())
    assert (tree / "calls.txt").read_text(encoding="utf-8") == "made 1\n" * 3
    assert (tree / "ready").read_text(encoding="utf-8") == "set up\n"
    assert (project / "make.py").read_text(encoding="utf-8") == "not committed"
    assert after.again() != after and after.again().again() == after.again()


@pytest.mark.slow
def test_a_setup_into_a_common_environment_is_repeated_where_another_commit_was_set_up(
    project: Path, tmp_path: Path, monkeypatch
) -> None:
    shared = tmp_path / "installed.py"
    command = f"{sys.executable} -S {shared} {{prompts}} {{out}}"
    before, after, elsewhere = (
        commit_of(f"git:{rev}", f"cp make.py {shared}", command, tmp_path / work)
        for rev, work in (("@~1", "w"), ("@", "w"), ("@", "another"))
    )
    made = [source.make([("a", seed)]) for seed in (1, 2) for source in (before, after, elsewhere)] + [
        before.again().make([("a", 1)])
    ]
    assert [int(each.images[0][0, 0, 0]) for each in made] == [1, 2, 2, 1, 2, 2, 1]
    shared.write_text(MAKE.replace("COLOUR", "9"), encoding="utf-8")  # by another process
    monkeypatch.setattr(commits, "_last_set_up", [])
    assert int(before.make([("a", 3)]).images[0][0, 0, 0]) == 1


def test_a_project_elsewhere_and_one_that_is_a_folder_of_its_repository(
    project: Path, tmp_path: Path, monkeypatch
) -> None:
    (project / "part").mkdir()
    (project / "part" / "make.py").write_text(MAKE.replace("COLOUR", "3"), encoding="utf-8")
    git(project, "add", "part")
    git(project, "commit", "-qm", "3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))  # as in a hook
    source = commit_of("git:pro ject/part@main", "git rev-parse HEAD", COMMAND, Path("w"))
    assert source.make([("a", 7)]).images[0][:, 0, 0].tolist() == [3, 7, 0]
    assert commit_of("git:pro ject/part@main@{0}", None, COMMAND, Path("w")).commit == source.commit
    with pytest.raises(ValueError, match="no commit of the project"):
        commit_of("git:pro ject/part@main~1", None, COMMAND, Path("w"))


def test_what_a_kill_or_a_failed_setup_left_of_a_worktree_is_made_again(project: Path, tmp_path: Path) -> None:
    source = commit_of("git:main", "test -e ../fail || exit 3", COMMAND, tmp_path / "w")
    with pytest.raises(RuntimeError, match="ended with 3"):
        source.make([("a", 7)])
    (tree,) = (path for path in source.folder.glob("tree-*") if path.is_dir())
    (tree / "make.py").unlink()
    (source.folder / "fail").touch()
    assert source.make([("a", 7)]).images[0][:, 0, 0].tolist() == [2, 7, 0]


@pytest.mark.parametrize("is_ready", [True, False], ids=["removed by hand", "killed"])
def test_a_worktree_that_is_gone_is_made_again(project: Path, tmp_path: Path, is_ready: bool) -> None:
    source = commit_of("git:main", None, COMMAND, tmp_path / "w")
    source.make([("a", 7)])
    (tree,) = (path for path in source.folder.glob("tree-*") if path.is_dir())
    if not is_ready:  # as a killed `git worktree add` leaves it
        tree.with_name(f"{tree.name}.ready").unlink()
        git(project, "worktree", "lock", str(tree))
    shutil.rmtree(tree)
    assert source.make([("b", 8)]).images[0][:, 0, 0].tolist() == [2, 8, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("also", "longest", "error", "message"),
    [
        ("sleep 0.2; kill -TERM $PPID", 60.0, KeyboardInterrupt, None),
        ("true", 0.3, RuntimeError, "(?s)while .*was ended after 0 h"),
    ],
    ids=["signal", "too long"],
)
def test_a_command_that_is_given_up_ends_with_all_that_it_started(
    project: Path, tmp_path: Path, monkeypatch, also: str, longest: float, error: type, message: str | None
) -> None:
    monkeypatch.setattr(commits, "_LONGEST", longest)
    beat = tmp_path / "beat"
    beat.touch()
    command = f"(while sleep 0.02; do date >> {beat}; done) & {also}; wait; true {{prompts}} {{out}}"
    source = commit_of("git:main", None, command, tmp_path / "w")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the program has it
    try:
        with pytest.raises(error, match=message):
            source.make([("a", 7)])
    finally:
        signal.signal(signal.SIGTERM, before)
    size = beat.stat().st_size
    time.sleep(0.1)
    assert size == beat.stat().st_size


@pytest.mark.parametrize(
    ("setup", "command", "message"),
    [
        ("echo why; exit 3", COMMAND, "`echo why; exit 3` ended with 3.*why"),
        (None, "echo {prompts} {out}", "wrote no prompts.jsonl.*the end of"),
        (None, f"{COMMAND} && sed -i s/7/8/ {{out}}/prompts.jsonl", "no image of 'a' with seed 7.*printed nothing"),
        (None, f"{COMMAND} && echo gone; rm {{out}}/0.ppm", "0.ppm is missing.*\ngone"),
    ],
)
def test_a_worktree_that_does_not_work_is_named_with_its_words(
    project: Path, tmp_path: Path, setup: str | None, command: str, message: str
) -> None:
    source = commit_of("git:main", setup, command, tmp_path / "w")
    with pytest.raises((RuntimeError, ValueError), match=f"(?s){message}"):
        source.make([("a", 7)])
    assert not list(source.folder.glob("[!.]*/prompts.jsonl"))


@pytest.mark.parametrize(
    ("text", "command", "message"),
    [
        ("git:main", None, "give the command"),
        ("git:main", "make {out}", "give the command"),
        ("git:no", COMMAND, "no commit of the project"),
        ("git:^main", COMMAND, "no commit of the project.*names no single commit"),
        ("git:main..main~1", COMMAND, "no commit of the project"),
        ("git:", COMMAND, "write a branch"),
        ("git:--output=x", COMMAND, "write a branch"),
    ],
)
def test_what_is_no_commit_is_refused(project: Path, tmp_path: Path, text: str, command: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        commit_of(text, None, command, tmp_path)


def test_outside_of_a_repository_there_is_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="no commit of the project"):
        commit_of("git:main", None, COMMAND, tmp_path)
