"""Every command that writes, killed or failing at calls that change files, then run again: see crash/harness.py.

A few trials of the quickest commands here, one in ten of all by `.ci/run --full`, all by `.ci/run --crash`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HARNESS = Path(__file__).parents[1] / "crash" / "harness.py"
QUICK = ("quantize, replacing", "export to a file and one beside")
PLANTED = """
from fluxq.base import output
def put(pairs, aside, *_, **__):  # what stands there is gone before the new is in its place
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


@pytest.fixture
def harness(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(HARNESS.parent)
    return importlib.import_module("harness")


@pytest.mark.parametrize(
    ("how", "code", "said", "left", "fault"),
    [
        ("EIO", 2, "Error: out cannot be made", {}, "exit code 2"),
        ("ENOSPC", 1, "Error: full", {}, ""),
        ("kill", 1, "Error: it ended before", {}, "exit code 1"),
        ("SIGTERM", 0, "", {}, "exit 0, and its output differs"),
        ("EIO", 0, "report: out/eval/report.html", {"out/eval/.x.*.part": "-rw-r--r-- 1"}, "left without a word"),
        ("EIO", 0, "/tmp/.out.old could not be removed", {".out.old": "drwxr-xr-x ", ".out.old/a": "-rw-r--r-- 1"}, ""),
        ("EIO", 0, ".out.lock.more could not be removed", {".out.lock": "-rw-r--r-- 1"}, "left without a word"),
        ("EIO", 0, "", {"out/a": "-rw------- new"}, "neither the old output nor the new one"),
    ],
)
def test_what_a_disturbed_run_leaves_and_says_is_held_strictly(harness, how, code, said, left, fault) -> None:
    after = {"out": "drwxr-xr-x ", "out/a": "-rw-r--r-- new"}
    has_finished = code == 0 and not how.startswith("SIG")
    before = {"out": "drwxr-xr-x ", "out/a": "-rw-r--r-- old"}
    ended = harness.Ended(code, said, 0.0)
    found = [
        *harness._at_once(harness.Command(""), how, ended, before, (after if has_finished else before) | left, after)
    ]
    assert (any(fault in each for each in found) and found) if fault else found == []


def test_permissions_are_part_of_what_is_compared_and_a_finished_run_is_run_again(harness, tmp_path) -> None:
    (tmp_path / "a").touch()
    before = harness.tree(tmp_path)
    (tmp_path / "a").chmod(0o600)
    assert harness.differing(before, harness.tree(tmp_path)) == "a"
    place = SimpleNamespace(folder=tmp_path, run=lambda: harness.Ended(2, "it exists", 0.0))
    assert ["ends with 2" in each for each in harness._again(place, harness.tree(tmp_path))] == [True]
    place.run = lambda: harness.Ended(0, "out/0.safetensors: made of other weights: this block is made again", 0.0)
    assert ["finished work" in each for each in harness._again(place, harness.tree(tmp_path))] == [True]


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


@pytest.mark.long
def test_no_kill_and_no_failing_call_loses_anything(tmp_path):
    done, found = run(tmp_path / "found.json", *only(*QUICK), "--every", "60", "--jobs", "1")
    assert found["faults"] == 0 and done.returncode == 0, done.stdout
    assert found["trials"] > 10
    assert all(row["trials"] for row in found["commands"].values())


@pytest.mark.long
def test_a_planted_defect_is_found_with_a_compiler_and_without(tmp_path):
    words = [*only("quantize, replacing"), "--every", "8", "--how", "kill", "--how", "SIGTERM", "--plant", PLANTED]
    for path in (os.environ["PATH"], str(tmp_path)):
        done, found = run(tmp_path / "found.json", *words, PATH=path, FLUXQ_COMMIT="planted")
        assert done.returncode == 1 and found["faults"], done.stdout
        assert ("interposer" in found["disturbed by"]) == (path != str(tmp_path))
        (row,) = found["commands"].values()
        assert any("neither the old output nor the new" in fault["fault"] for fault in row["found"])
