"""Commits of a project as sources of images: `git:REV`, in a worktree of its own, by a command that makes images.

The command gets `{prompts}`, a JSONL file with a prompt and a seed in each line, and `{out}`, a folder to write images
and `prompts.jsonl` into (see `pictures`). It runs in the worktree. What it made is kept by commit, command and items.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxq.base.console import visible
from fluxq.base.files import sha256_json, write_text
from fluxq.base.output import remove, sole_writer
from fluxq.eval.gate.pictures import PROMPTS_FILE, Pictures, read_pictures

PREFIX = "git:"
_LINES = 8  # of a failed command's output that an error shows


@dataclass(frozen=True)
class CommitSource:
    """A commit of the project in a folder.

    rev: as given; commit: its full id. setup: command that is run once in the worktree, or None. command: one with
    `{prompts}` and `{out}`. run: 0, or 1 for the floor. has_latents, items, machine: as `Source` has them.
    """

    project: Path
    rev: str
    commit: str
    setup: str | None
    command: str
    root: Path
    run: int = 0
    has_latents: bool = False
    items: None = None
    machine: None = None

    @property
    def name(self) -> str:
        return f"{self.rev} ({self.commit[:10]}){' again' * self.run}"

    def again(self) -> CommitSource:
        """Return it run once more."""
        return replace(self, run=1)

    def describe(self) -> dict[str, Any]:
        return {"kind": "commit", "commit": self.commit, "setup": self.setup, "command": self.command}

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
        return Pictures(self.folder, rows).of(items)

    @property
    def _key(self) -> str:
        return sha256_json([self.setup, self.command, self.run])[:16]

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
        if not (part / PROMPTS_FILE).is_file():
            raise RuntimeError(f"{self.name}: the command wrote no {PROMPTS_FILE} into {{out}}")
        read_pictures(part).of(items)
        os.replace(part, self.folder / name)
        return read_pictures(self.folder / name)

    def _worktree(self) -> Path:
        """Return the worktree, made and set up once."""
        tree, ready = self.folder / "tree", self.folder / f"ready-{sha256_json(self.setup)[:16]}"
        if not tree.is_dir():
            _git(self.project, "worktree", "prune")
            _git(self.project, "worktree", "add", "--detach", "--force", str(tree), self.commit)
        if self.setup and not ready.is_file():
            self._run(self.setup, tree)
            write_text(ready, "")
        return tree

    def _run(self, command: str, tree: Path) -> None:
        log = self.folder / "output.txt"
        with log.open("w", encoding="utf-8") as out:
            done = subprocess.run(command, shell=True, cwd=tree, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if done.returncode:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
            said = visible("\n".join(lines)) or "no output"
            raise RuntimeError(f"{self.name}: `{command}` ended with {done.returncode}; the end of {log}:\n{said}")


def commit_of(text: str, setup: str | None, command: str | None, root: Path) -> CommitSource:
    """Return the source of `git:REV` of the project in the current folder.

    Raises ValueError without a command, outside of a repository, and for a revision that it does not have.
    """
    rev, project = text.removeprefix(PREFIX), Path.cwd()
    if not command or "{out}" not in command or "{prompts}" not in command:
        raise ValueError(
            f"{text}: give the command that makes images, as --command 'python make.py {{prompts}} {{out}}'"
        )
    if not rev or rev.startswith("-"):
        raise ValueError(f"{text}: write a branch, tag or commit, as in git:main")
    try:
        commit = _git(project, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}").strip()
    except RuntimeError as error:
        raise ValueError(f"{text}: no commit of the project in {project} ({error})") from None
    return CommitSource(project, rev, commit, setup, command, root)


def _git(project: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(project), *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("git is not installed") from None
    if done.returncode:
        raise RuntimeError(visible(done.stderr.strip()) or f"git {words[0]} ended with {done.returncode}")
    return done.stdout
