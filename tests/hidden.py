"""Packages that are installed, hidden from a fresh interpreter: as if nobody had installed them.

    python -c "import hidden; hidden.hide('triton'); import fluxq"

A finder that raised would not do: libraries ask `find_spec` whether a package is there.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class _Hiding:
    """A finder without some modules."""

    def __init__(self, finder: Any, names: frozenset[str]) -> None:
        self.finder, self.names = finder, names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.names:
            return None
        find_spec = getattr(self.finder, "find_spec", None)
        return find_spec(fullname, path, target) if find_spec else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def hide(*names: str) -> None:
    """Let this interpreter find no module of these top-level names, and no version of a package so called."""
    if loaded := [name for name in names if name in sys.modules]:
        raise RuntimeError(f"{', '.join(loaded)} was imported before it was to be hidden")
    sys.meta_path[:] = [_Hiding(finder, frozenset(names)) for finder in sys.meta_path]
    find = importlib.metadata.version

    def version(name: str) -> str:
        if name.replace("-", "_").lower() in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return find(name)

    importlib.metadata.version = version


def run(code: str, *arguments: str, without: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter that lacks these packages; a failure is in its return code."""
    first = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import hidden; hidden.hide(*{tuple(without)!r})"
    return subprocess.run(
        [sys.executable, "-c", f"{first}\n{code}", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), *sys.path]))},
    )
