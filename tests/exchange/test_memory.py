"""Tests of memory in `fluxq export` and `fluxq inspect --base`: some copies of the largest layer, of any model.

A model of 24 GB has layers of 130 MB. Here it is one of 12 blocks and one of 4, whose layers are the same, and the
embedded model, of which nothing but the code takes memory.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watched

from tests.quantize.test_streaming import full_size, linux, model_of  # noqa: F401

WIDTH = 768
LARGEST = 4 * 7 * WIDTH * WIDTH  # bytes in fp32 of what a ComfyUI file joins: q, k, v and the feed-forward's first
COMMANDS = {
    "modelopt": ("export", "fp8", "--format", "modelopt", "-o", "modelopt"),
    "comfy": ("export", "fp8", "--format", "comfy", "--requantize", "-o", "comfy.safetensors"),
    "inspect a folder": ("inspect", "modelopt", "--base", "model"),
    "inspect a file": ("inspect", "comfy.safetensors", "--base", "model"),
}
# Times the largest layer in fp32; a folder took 5.9 to 6.1 of them, by the CPU.
MOST = {"modelopt": 4, "comfy": 6, "inspect a folder": 6.5, "inspect a file": 8}


@pytest.fixture(scope="module", autouse=True)
def exact_allocator() -> Iterator[None]:
    """Give freed memory back at once, so that a peak is what was held, and not what the allocator kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        yield


def process(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run `fluxq` as `watched.run` does, but in a fresh interpreter: a fork's allocator heeds no environment."""
    command = [sys.executable, watched.__file__, "{}", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return {"code": done.returncode, "err": done.stderr, **json.loads((folder / "report.json").read_text())}


@linux
@pytest.mark.long
def test_memory_is_that_of_the_largest_layer_whatever_the_model(model_of, tmp_path) -> None:  # noqa: F811
    peaks: dict[str, list[float]] = {name: [] for name in COMMANDS}
    sizes = []
    for single in (0, 2, 10):
        folder = tmp_path / str(single)
        folder.mkdir()
        if single:
            model_of(folder / "model", WIDTH, 2, single)
        model = "model" if single else "tiny"
        made = process(folder, "quantize", model, "--recipe", "fp8", "--profile", "rtn", "--no-check", "-o", "fp8")
        assert made["code"] == 0, made["err"]
        for name, arguments in COMMANDS.items():
            used = process(folder, *(model if argument == "model" else argument for argument in arguments))
            assert used["code"] == 0, (name, used["err"])
            peaks[name].append(used["peak"] / LARGEST)
        sizes.append(sum(file.stat().st_size for file in folder.glob("model/**/*.safetensors")) / LARGEST)
    for name, (code, small, large) in peaks.items():
        assert 0.5 < large - code < MOST[name], (name, peaks[name])
        assert large - small < 0.5, (name, peaks[name])
    assert sizes[2] - sizes[1] > 8, sizes  # what a growth with the model would be a part of
