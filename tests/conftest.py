"""What the tests share: offline, one thread, the embedded pipeline to damage, and checkpoints made once."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported: before torch and diffusers

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fluxq import jobs, tiny
from fluxq.recipes.recipe import load_recipe

torch.set_num_threads(1)  # tiny tensors: on shared cores a second thread made the suite several times slower


@pytest.fixture
def tiny_folder(tmp_path) -> Path:
    """A copy of the embedded pipeline's folder that a test may damage."""
    return copy_of(tiny.path(), tmp_path / "model")


@pytest.fixture
def quick_recipe(tmp_path) -> Callable[[str], Path]:
    """quick_recipe("nvfp4") writes nvfp4.yaml, the shipped recipe with little calibration, and returns its path."""
    (tmp_path / "recipes").mkdir()
    return lambda recipe: quick(recipe, tmp_path / "recipes")


@pytest.fixture(scope="session")
def pipe():
    """The embedded pipeline in bfloat16, loaded once; tests must leave it as it was."""
    return tiny.load()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """checkpoint("nvfp4") is a folder with the embedded pipeline under that shipped recipe, made once a session.

    Calibration is cut to 8 images at 2 steps and there is no closing check. Copy the folder before damaging it.
    """
    root = tmp_path_factory.mktemp("checkpoints")

    def make(recipe: str) -> Path:
        folder = root / f"tiny-{recipe}"
        if not folder.exists():
            options = jobs.Options(model="tiny", recipe=str(quick(recipe, root)), output=str(folder), check=False)
            jobs.quantize(jobs.prepare(options))
        return folder

    return make


@pytest.fixture(scope="session")
def statistics_file(tmp_path_factory) -> Path:
    """What `fluxq calibrate tiny --recipe nvfp4` writes, of 8 images at 2 steps."""
    folder = tmp_path_factory.mktemp("statistics")
    options = jobs.Options(model="tiny", recipe=str(quick("nvfp4", folder)), output=str(folder / "s.safetensors"))
    return jobs.calibrate(jobs.prepare(options, writes=False))


def quick(recipe: str, folder: Path) -> Path:
    """A recipe file in `folder` that extends a shipped one and calibrates on 8 images at 2 steps, if at all."""
    file = folder / f"{recipe}.yaml"
    calibrated = load_recipe(recipe)[1].calibration is not None
    file.write_text(f"extends: {recipe}\n" + ("calibration: {count: 8, steps: 2}\n" if calibrated else ""))
    return file


def copy_of(source: Path, target: Path) -> Path:
    """Copy a folder tree and let its owner write to it."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason printed, what was not asked for (slow) or cannot run here (gpu)."""
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow: `pytest --run-slow` or `.ci/run --full` runs it"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
