"""action.yml: what its steps run, run here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from picture_folders import picture_folder

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


def step(name: str) -> dict[str, Any]:
    return next(each for each in ACTION["runs"]["steps"] if each.get("id") == name)


def run(folder: Path, **inputs: str) -> subprocess.CompletedProcess:
    """Run the gate's step as a runner would, its inputs in the environment."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "python").unlink(missing_ok=True)
    (commands / "python").symlink_to(sys.executable)
    (commands / "fluxq").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fluxq "$@"\n', encoding="utf-8")
    (commands / "fluxq").chmod(0o755)
    values = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | inputs
    environment = {name: values[name.lower()] for name in step("gate")["env"]}
    files = {name: str(folder / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step("gate")["run"]],
        cwd=folder,
        env=os.environ | environment | files | {"PATH": path},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bash") is None, reason="an action's steps are bash, which is not installed")
def test_the_action_writes_a_summary_and_ends_as_the_gate_does(tmp_path: Path) -> None:
    for name, shift in (("a", 0), ("b c", 40)):
        picture_folder(tmp_path / name, shift)
    done = run(tmp_path, a="a", b="b c", arguments="--margin 'psnr=3' --metric psnr")
    assert done.returncode == 1, done.stderr
    assert "worse after 8 images" in (tmp_path / "github_step_summary").read_text(encoding="utf-8")
    assert (tmp_path / "github_output").read_text(encoding="utf-8") == "verdict=worse\n"
    assert json.loads((tmp_path / "fluxq-gate-report" / "gate.json").read_text(encoding="utf-8"))["images"] == 8
    done = run(tmp_path, a="a", b="a", arguments="--margin psnr=3", images="4")
    assert done.returncode == 0, done.stderr
    summary = (tmp_path / "github_step_summary").read_text(encoding="utf-8")
    assert run(tmp_path, a="a", b="nowhere").returncode == 2  # and the table of the gate before is not shown again
    assert (tmp_path / "github_step_summary").read_text(encoding="utf-8") == summary
    done = run(tmp_path, a="a", b="a", arguments="--margin 'psnr=3")
    assert done.returncode == 1 and "No closing quotation" in done.stderr


def test_inputs_reach_scripts_through_the_environment_alone() -> None:
    for each in ACTION["runs"]["steps"]:
        assert "${{" not in each.get("run", "")
