"""Provenance of a result, all that it depends on besides its inputs: commit, versions, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fluxq.base.processor import cpu_name, instructions

_PACKAGES = ("torch", "diffusers", "transformers", "safetensors")
_version = cache(version)  # what is imported stays as it is, whatever is installed meanwhile


def versions(*more: str) -> dict[str, str]:
    """Versions of Python, of the packages that compute and of those named, and the kind of machine."""
    machine = f"{cpu_name()}, {os.cpu_count()} cores, {instructions()}"
    packages = {name: _version(name) for name in (*_PACKAGES, *more)}
    return {"python": platform.python_version(), **packages, "machine": machine}


def commit() -> str:
    """The checkout's commit, "-dirty" if files differ from it; "unknown" outside one."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
