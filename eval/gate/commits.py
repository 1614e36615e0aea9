"""Commits of a project as sources of images: `git:REV` or `git:PATH@REV`, each in a worktree of its own.

A command makes the images. It gets `{prompts}`, a JSONL file with a prompt and a seed in each line, and `{out}`, a
folder to write images and `prompts.jsonl` into (see `pictures`). It runs in the project's folder of the worktree. Its
images are kept by commit, command and items, and so is the worktree.

The setup runs before the first command in a worktree, in each process, and again where another commit's ran since: both
may install into one environment, and commands of the first would then run the code of the second. Another process, or
one with another `--work`, may have done so too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from fluxq.base.console import visible
from fluxq.base.files import sha256_json, write_text
from fluxq.base.git import environment, git
from fluxq.base.output import remove, sole_writer
from fluxq.eval.gate.pictures import PROMPTS_FILE, Pictures, read_pictures

PREFIX = "git:"
_LINES, _TAIL = 8, 1 << 14  # of a failed command's output that an error shows; bytes that are read for them
_LONGEST = 24 * 3600.0  # seconds of a setup or command
_ID = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # of SHA-1 or SHA-256
_last_set_up: list[Path] = []  # the project's folder, in a worktree, whose setup ran last in this process


@dataclass(frozen=True)
class CommitSource:
    """A commit of the project in a folder.

    project: folder in a repository. rev: as given. commit: its full id. prefix: project in the repository, "" for its
    top. setup: command that is run in the worktree before, or None. command: one with `{prompts}` and `{out}`.
    run: 0; another number for another run, kept apart. has_latents, items, machine: see `sources`.
    """

    project: Path = field(compare=False)  # its folder is the commit's, whatever it is called
    rev: str = field(compare=False)
    commit: str
    prefix: str
    setup: str | None
    command: str
    root: Path
    run: int = 0
    has_latents: bool = False
    items: None = None
    machine: None = None

    @property
    def name(self) -> str:
        return f"{self.rev} ({self.commit[:10]}){f', run {self.run + 1}' if self.run else ''}"

    def again(self) -> CommitSource:
        """Return it run once more."""
        return replace(self, run=1)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "commit",
            "rev": self.rev,
            "project": self.project.resolve().name,
            "commit": self.commit,
            "setup": self.setup,
            "command": self.command,
        }

    @property
    def folder(self) -> Path:
        """Folder of the worktree and of what its commands made."""
        return (self.root / f"git-{self.commit[:16]}").resolve()

    def make(self, items: Sequence[tuple[str, int]]) -> Pictures:
        """Run the command for the items that were not made yet; RuntimeError with the end of its output if it fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with sole_writer(self.folder / "work"):
            made = [read_pictures(part) for part in sorted(self.folder.glob(f"{self._key}-*")) if part.is_dir()]
            known = {item for pictures in made for item in pictures.items}
            missing = [item for item in items if item not in known]
            if missing:
                made.append(self._made(missing))
        rows = tuple(
            row.model_copy(update={"image": f"{pictures.folder.name}/{row.image}"})
            for pictures in made
            for row in pictures.rows
        )
        return Pictures(self.folder, rows).make(items)

    @property
    def _key(self) -> str:
        return sha256_json([self.prefix, self.setup, self.command, self.run])[:16]

    def _made(self, items: Sequence[tuple[str, int]]) -> Pictures:
        tree = self._worktree()
        name = f"{self._key}-{sha256_json(items)[:16]}"
        part, prompts = self.folder / f".{name}.part", self.folder / f"{name}.jsonl"
        remove(part)
        part.mkdir()
        lines = (json.dumps({"prompt": prompt, "seed": seed}, ensure_ascii=False) + "\n" for prompt, seed in items)
        write_text(prompts, "".join(lines))
        words = {"prompts": shlex.quote(str(prompts)), "out": shlex.quote(str(part))}
        self._run(self.command.replace("{prompts}", words["prompts"]).replace("{out}", words["out"]), tree)
        try:
            if not (part / PROMPTS_FILE).is_file():
                raise FileNotFoundError(f"wrote no {PROMPTS_FILE} into {{out}}")
            read_pictures(part).make(items)
        except (ValueError, FileNotFoundError) as error:
            raise RuntimeError(f"{self.name}: `{self.command}` ended well, but {self._with_tail(error)}") from None
        os.replace(part, self.folder / name)
        return read_pictures(self.folder / name)

    @property
    def _tree(self) -> Path:
        return self.folder / f"tree-{sha256_json(self.setup)[:16]}"

    def _worktree(self) -> Path:
        """Return the project's folder in the worktree, made, and set up last of all."""
        tree = self._tree
        place, ready = tree / self.prefix, tree.with_name(f"{tree.name}.ready")
        if not (ready.is_file() and place.is_dir()):
            ready.unlink(missing_ok=True)
            remove(tree)  # what a kill, which leaves it locked, or a failed setup left
            git(self.project, "worktree", "add", "--detach", "--force", "--force", str(tree), self.commit)
        if self.setup and not (ready.is_file() and _last_set_up == [place]):
            _last_set_up.clear()
            self._run(self.setup, place)
            _last_set_up.append(place)
        write_text(ready, "")
        return place

    @property
    def _log(self) -> Path:
        return self.folder / "output.txt"

    def _run(self, command: str, place: Path) -> None:
        with self._log.open("wb") as out:
            try:
                code = _code_of(command, place, out)
            except subprocess.TimeoutExpired:
                problem = f"`{command}` was ended after {_LONGEST / 3600:.0f} h; ask for fewer --images"
                raise RuntimeError(f"{self.name}: {self._with_tail(problem)}") from None
        if code:
            raise RuntimeError(f"{self.name}: {self._with_tail(f'`{command}` ended with {code}')}")

    def _with_tail(self, problem: object) -> str:
        """Return a problem with the last lines of the command's output."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()[-_LINES:]
        if not lines:
            return f"{problem}; it printed nothing"
        return "\n".join([f"{problem}; the end of {self._log}:", *map(visible, lines)])


def _code_of(command: str, place: Path, out: BinaryIO) -> int:
    """Run a command in a folder and return its exit status; whatever ends the wait ends all that it started too.

    Raises subprocess.TimeoutExpired after _LONGEST seconds.
    """
    words: dict[str, Any] = {"cwd": place, "env": environment(), "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, shell=True, stdout=out, stderr=out, start_new_session=True, **words) as process:
        try:
            return process.wait(_LONGEST)
        except BaseException:
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the shell and its children
            process.kill()
            raise


def commit_of(text: str, setup: str | None, command: str | None, root: Path) -> CommitSource:
    """Return the source of `git:REV` of the project in the current folder, or of `git:PATH@REV`.

    Raises ValueError without a command, outside of a repository, and for a revision that it does not have.
    """
    if not command or "{out}" not in command or "{prompts}" not in command:
        raise ValueError(
            f"{text}: give the command that makes images, as --command 'python make.py {{prompts}} {{out}}'"
        )
    rev, project = text.removeprefix(PREFIX), Path.cwd()
    for at in (index for index in range(len(rev) - 1, 0, -1) if rev[index] == "@"):  # a revision may have one too
        if (folder := Path(rev[:at]).expanduser()).is_dir():
            rev, project = rev[at + 1 :], folder.resolve()
            break
    if not rev or rev.startswith("-") or not rev.isprintable():
        raise ValueError(f"{visible(text)}: write a branch, tag or commit, as in git:main or git:../project@main")
    try:
        commit = git(project, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}").strip()
        if not _ID.fullmatch(commit):  # ^main is a revision too, of all that is not in it
            raise RuntimeError(f"{rev} names no single commit")
        prefix = git(project, "rev-parse", "--show-prefix").rstrip("\n")
        if prefix:
            git(project, "cat-file", "-e", f"{commit}:{prefix.rstrip('/')}")
    except RuntimeError as error:
        raise ValueError(f"{text}: no commit of the project in {project} ({error})") from None
    return CommitSource(project, rev, commit, prefix, setup, command, root)
