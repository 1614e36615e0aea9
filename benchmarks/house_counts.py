"""Counts of the house that no test holds: lines of the package, and files that a quantization passes.

    python benchmarks/house_counts.py

Lines are those of every Python file in the wheel, blank ones included. A file is passed if one of its functions or
methods is called by `fluxq quantize --recipe nvfp4 --profile rtn` on the embedded model; what runs while a file is
imported does not count. Arrows between rooms, circles, widths of signatures and first words of docstrings are counted
by `tests/house/test_house.py`, the files that name an op, a family, a dialect or a format by tests beside their tables.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import fluxq
from fluxq.cli import main as command

PACKAGE = Path(fluxq.__file__).parent
COMMAND = ["quantize", "--recipe", "nvfp4", "--profile", "rtn"]


def main() -> None:
    """Print the counts as JSON."""
    files = _python_files(PACKAGE)
    passed = files_passed(files)
    lines = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files)
    print(json.dumps({"lines": lines, "files": len(files), "files passed": len(passed)}))


def _python_files(folder: Path) -> set[str]:
    """Return every Python file below a folder, behind links to folders too, by its real path."""
    found = os.walk(folder, followlinks=True)
    return {
        os.path.realpath(os.path.join(at, name)) for at, _, names in found for name in names if name.endswith(".py")
    }


def files_passed(files: set[str]) -> set[str]:
    """Run the command and return those of the files that it passes."""
    passed: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>":
            return
        file = os.path.realpath(code.co_filename)
        if file in files and file not in passed and not _is_imported_now(frame):
            passed.add(file)

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["fluxq", *COMMAND, "--output", f"{scratch}/out"]
        sys.setprofile(look)
        try:
            command()
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.setprofile(None)
    return passed


def _is_imported_now(frame: FrameType | None) -> bool:
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    main()
