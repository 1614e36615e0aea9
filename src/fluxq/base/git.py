"""Questions to git about the project in a folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fluxq.base.console import visible


def git(folder: Path | None, *words: str, timeout: float | None = None) -> str:
    """Return what git says in a folder, by default the current one.

    Raises RuntimeError with git's own words where it fails, is not installed, or takes longer than `timeout` seconds.
    """
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(), timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        missing = isinstance(error, FileNotFoundError) and (folder is None or folder.is_dir())
        raise RuntimeError("git is not installed" if missing else f"git {words[0]}: {error}") from None
    if done.returncode:
        raise RuntimeError(visible(done.stderr.strip()) or f"git {words[0]} ended with {done.returncode}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return the environment without what git sets in its hooks, which points every git at the hook's own project."""
    return {name: value for name, value in os.environ.items() if name not in _LOCAL}


# git rev-parse --local-env-vars
_LOCAL = {
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_CONFIG",
    "GIT_CONFIG_COUNT",
    "GIT_CONFIG_PARAMETERS",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_INTERNAL_SUPER_PREFIX",
    "GIT_NO_REPLACE_OBJECTS",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
}
