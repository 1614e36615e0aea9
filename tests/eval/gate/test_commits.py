"""Commits as sources of a gate: a real repository, worktrees and commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from fluxq.eval.gate.commits import commit_of

MAKE = """import json, sys
from pathlib import Path
from PIL import Image
prompts, out = Path(sys.argv[1]), Path(sys.argv[2])
rows = [json.loads(line) for line in prompts.read_text().splitlines()]
for index, row in enumerate(rows):
    Image.new("RGB", (4, 4), (COLOUR, row["seed"], 0)).save(out / f"{index}.png")
lines = [json.dumps(row | {"image": f"{index}.png"}) for index, row in enumerate(rows)]
(out / "prompts.jsonl").write_text("\\n".join(lines) + "\\n")
print("made", len(rows), file=open(Path(__file__).parent / "calls.txt", "a"))
"""
COMMAND = f"{sys.executable} make.py {{prompts}} {{out}}"


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


def test_each_commit_makes_its_images_once_in_a_worktree_of_its_own(project: Path, tmp_path: Path) -> None:
    before, after = (commit_of(f"git:{rev}", "touch ready", COMMAND, tmp_path / "w") for rev in ("main~1", "main"))
    assert before.make([("a", 7)]).images[0][:, 0, 0].tolist() == [1, 7, 0]
    images = after.make([("a", 7)]), after.make([("a", 7), ("b", 9)]), after.again().make([("a", 7)])
    assert [each.images[-1][:, 0, 0].tolist() for each in images] == [[2, 7, 0], [2, 9, 0], [2, 7, 0]]
    calls = (after.folder / "tree" / "calls.txt").read_text(encoding="utf-8")
    assert calls.split("\n") == ["made 1", "made 1", "made 1", ""] and (after.folder / "tree" / "ready").is_file()
    assert (project / "make.py").read_text(encoding="utf-8") == "not committed"


@pytest.mark.parametrize(
    ("setup", "command", "message"),
    [
        ("echo why; exit 3", COMMAND, "`echo why; exit 3` ended with 3.*why"),
        (None, "echo {prompts} {out}", "wrote no prompts.jsonl"),
        (None, f"{COMMAND} && sed -i s/7/8/ {{out}}/prompts.jsonl", "no image of 'a' with seed 7"),
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
