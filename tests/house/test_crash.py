"""Every command that writes, killed or failing at calls that change files, then run again: see crash/harness.py.

A few trials of the quickest commands here, one in ten of all with `--run-slow`, all by `.ci/run --crash`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[1] / "crash" / "harness.py"
QUICK = ("quantize, replacing", "export to a file and one beside")
PLANTED = """
from fluxq.base import output
def put(pairs, aside):  # what stands there is gone before the new is in its place
    for made, place in pairs:
        output.remove(place)
        made.rename(place)
    aside.mkdir(parents=True)
output.put = put
"""


def run(result: Path, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    command = [sys.executable, str(HARNESS), *words, "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert result.is_file(), done.stdout + done.stderr
    return done, json.loads(result.read_text(encoding="utf-8"))


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


@pytest.mark.parametrize("every", [60, pytest.param(10, marks=pytest.mark.slow)])
def test_no_kill_and_no_failing_call_loses_anything(tmp_path, every):
    chosen = only(*QUICK) if every > 10 else []
    done, found = run(tmp_path / "found.json", *chosen, "--every", str(every), "--jobs", "1" if chosen else "2")
    print(done.stdout)
    assert found["faults"] == 0 and done.returncode == 0, done.stdout
    assert found["trials"] > (10 if chosen else 500)
    assert all(row["trials"] for row in found["commands"].values())


@pytest.mark.slow
def test_a_planted_defect_is_found_with_a_compiler_and_without(tmp_path):
    words = [*only("quantize, replacing"), "--every", "8", "--how", "kill", "--how", "SIGTERM", "--plant", PLANTED]
    for path in (os.environ["PATH"], str(tmp_path)):
        done, found = run(tmp_path / "found.json", *words, PATH=path, FLUXQ_COMMIT="planted")
        assert done.returncode == 1 and found["faults"], done.stdout
        assert ("interposer" in found["disturbed by"]) == (path != str(tmp_path))
        (row,) = found["commands"].values()
        assert any("neither the old output nor the new" in fault["fault"] for fault in row["found"])
