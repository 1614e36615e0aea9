"""`fluxq auto` in several processes: they write what one writes, go on alike, and end together.

This file is also a program: torchrun starts it, and it runs `fluxq` with a fault in one process, see `main`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
from click.testing import CliRunner

from fluxq.calibrate import errors
from fluxq.cli import cli

RECIPE = """
extends: nvfp4
components:
  transformer: {exclude: ['**.to_add_out', '**.net.**', 'single_transformer_blocks.**']}
"""
WORDS = "auto tiny --recipe mine.yaml --bits 6 --menu nvfp4,fp8 --num-inference-steps 1 -o out.yaml --count".split()


def main(fault: str, *words: str) -> None:
    """Run `fluxq`; in the process and measure of "1 velocity kill" the first part ends it, or is refused."""
    rank, measure, how = fault.split()

    def fails(*_: Any) -> Any:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planted; measure otherwise")

    if os.environ["RANK"] == rank:
        errors.MEASURES[measure].part = fails
    cli.main(list(words), standalone_mode=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A folder in which one process searched."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "mine.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert CliRunner().invoke(cli, [*WORDS, "2"]).exit_code == 0
    return folder


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


def together(folder: Path, fault: str = "9 velocity kill", count: int = 2) -> subprocess.CompletedProcess[str]:
    return ranks.run(2, __file__, fault, *WORDS, count, cwd=folder)


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".yaml", ".safetensors")}


@pytest.mark.slow
def test_two_processes_write_what_one_writes(alone, here):
    done = together(here)
    assert done.returncode == 0, done.stderr
    assert len(written(here)) == 4 and written(here) == written(alone) and not list(here.glob(".*"))
    assert done.stdout.count("recipe: out.yaml") == 1


@pytest.mark.slow
def test_formats_and_steps_are_chosen_alike(here, monkeypatch):
    words = "auto tiny --recipe mine.yaml --ms 0.0015 --gpu rtx5090 --steps --menu fp8,16bit --measure velocity"
    words = [*words.split(), *"--num-inference-steps 5 --count 2 -o out.yaml".split()]
    done = ranks.run(2, __file__, "9 velocity kill", *words, cwd=here)
    assert done.returncode == 0 and "steps: {compute: " in (here / "out.yaml").read_text(), done.stderr
    twice = written(here)
    monkeypatch.chdir(here)
    assert CliRunner().invoke(cli, [*words, "--overwrite"]).exit_code == 0
    assert written(here) == twice and not list(here.glob(".*"))


@pytest.mark.slow
def test_a_killed_process_ends_all_and_one_alone_goes_on(alone, here, monkeypatch):
    done = together(here, "1 velocity kill")
    assert done.returncode != 0 and "Signal 9 (SIGKILL)" in done.stderr
    assert sorted(written(here)) == ["mine.yaml", "tiny-adjoint-errors.safetensors"] and list(here.glob(".*.work"))
    monkeypatch.chdir(here)
    assert CliRunner().invoke(cli, [*WORDS, "2"]).exit_code == 0
    assert written(here) == written(alone) and not list(here.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_measure_that_one_process_cannot_take_is_left_by_all(here, count):
    """Of one image the other process has no part."""
    done = together(here, f"{count - 1} adjoint refuse", count)
    assert done.returncode == 0, done.stderr
    assert "planted; velocity is measured alone" in done.stderr
    assert sorted(written(here)) == ["mine.yaml", "out.yaml", "tiny-velocity-errors.safetensors"]


if __name__ == "__main__":
    main(*sys.argv[1:])
