"""Fixtures and helpers of all tests: one thread, the embedded pipeline to damage, checkpoints made once."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import diffusers
import forked
import pytest
import torch
from filelock import FileLock
from peft import LoraConfig
from torch import nn

from fluxq import tiny
from fluxq.base import devices
from fluxq.base.console import logger
from fluxq.base.residence import Residence
from fluxq.jobs import making, memory
from fluxq.recipes.family import Family, matches
from fluxq.recipes.recipe import load_recipe, shipped_recipes

forked.do_not_sync()
torch.set_num_threads(1)  # tiny tensors: on shared cores a second thread made the suite several times slower

T = TypeVar("T")

SIXTEEN_BIT = "16 bit"
# Columns of the table of docs/diffusers.md; what is not there stores the same kinds of tensor.
COLUMNS = (SIXTEEN_BIT, "fp8", "int4", "int8", "mxfp8", "nvfp4", "nvfp4-max")
# Whose checkpoints tests of every run use: a fitted one takes seconds to make.
QUICK = (None, SIXTEEN_BIT, "int8", "nvfp4", "nvfp4-max")


def quantization_of(model: Path) -> dict | None:
    """`quantization_config` of a model's folder without its digests, of which a model that was saved alone has one."""
    said = json.loads((model / "config.json").read_text()).get("quantization_config")
    return said and {
        key: value for key, value in said.items() if key not in ("digest", "digests", "config_digest", "config_digests")
    }


@pytest.fixture
def tiny_folder(tmp_path) -> Path:
    """A copy of the embedded pipeline's folder that a test may damage."""
    return copy_of(tiny.path(), tmp_path / "model")


@pytest.fixture
def quick_recipe(tmp_path) -> Callable[..., Path]:
    """quick_recipe("nvfp4") writes nvfp4.yaml, the shipped recipe with little calibration, and returns its path.

    fitted=False: its input scales are calibrated, its weights rounded to nearest.
    """
    (tmp_path / "recipes").mkdir()
    return lambda recipe, fitted=True: quick(recipe, tmp_path / "recipes", fitted)


@pytest.fixture(scope="session")
def pipe():
    """The embedded pipeline in bfloat16, loaded once; tests must leave it as it was."""
    return tiny.load()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """checkpoint("nvfp4") is a folder with the embedded pipeline under that shipped recipe, made once a session.

    Calibration is cut to 8 images and there is no closing check. Copy the folder before damaging it: the other
    process that runs tests may read it too. checkpoint("16 bit") is the embedded pipeline itself.
    """
    return _maker(tmp_path_factory, "checkpoints", fitted=True)


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """The same with weights rounded to nearest, for tests of formats and files: fitting has tests of its own."""
    return _maker(tmp_path_factory, "plain", fitted=False)


def _maker(factory: pytest.TempPathFactory, name: str, fitted: bool) -> Callable[[str], Path]:
    """Of several processes that run tests, the first that asks for a checkpoint makes it, for all of them."""
    base = factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    root.mkdir(exist_ok=True)

    def make(recipe: str) -> Path:
        if recipe == SIXTEEN_BIT:
            return Path(tiny.path())
        folder = root / f"tiny-{recipe}"
        with FileLock(root / f"{recipe}.lock"):
            if not folder.exists():
                path = quick(recipe, root, fitted)
                asked = making.JobOptions(model="tiny", recipe=str(path), output=str(folder), check=False)
                making.quantize(making.job_of(asked))
        return folder

    return make


@pytest.fixture(scope="session")
def tested_recipes(request) -> list[str]:
    """The shipped recipes whose checkpoints this run tests: a few, some with --run-slow, or all with --run-all."""
    running = {recipe_of(item) for item in request.session.items if not item.get_closest_marker("skip")}
    return [name for name in shipped_recipes() if name in running]


@pytest.fixture(scope="session")
def statistics_file(tmp_path_factory) -> Path:
    """Return the file that `fluxq calibrate tiny --recipe nvfp4` writes, of 8 images."""
    folder = tmp_path_factory.mktemp("statistics")
    options = making.JobOptions(model="tiny", recipe=str(quick("nvfp4", folder)), output=str(folder / "s.safetensors"))
    return making.calibrate(making.job_of(options, writes=False))


@pytest.fixture
def lora_file(tmp_path, pipe) -> Callable[..., Path]:
    """lora_file(name, layers, rank=4, alpha=None, seed=0) writes a LoRA as trainers do and returns its path.

    layers: how the names of the embedded transformer's Linears that it changes end.
    """
    return lambda name, layers, **how: write_lora(tmp_path / name, pipe.transformer, layers, **how)


@pytest.fixture(scope="session")
def family_inputs() -> Callable[[Family], dict]:
    """family_inputs(row) are arguments of a small forward pass of the row's tiny configuration, fp32."""
    return _inputs


def _inputs(family: Family) -> dict:
    if family.library == "transformers":
        return {"input_ids": torch.tensor([[1, 5, 9, 2]])}
    text, time = torch.randn(1, 5, 64), torch.tensor([500.0])
    return {
        "FluxTransformer2DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 16),
            "encoder_hidden_states": text,
            "pooled_projections": torch.randn(1, 64),
            "timestep": time,
            "img_ids": torch.zeros(4, 3),
            "txt_ids": torch.zeros(5, 3),
        },
        "Flux2Transformer2DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 16),
            "encoder_hidden_states": text,
            "timestep": torch.tensor([0.5]),
            "guidance": torch.tensor([4.0]),
            "img_ids": torch.zeros(4, 4),
            "txt_ids": torch.zeros(5, 4),
        },
        "SD3Transformer2DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "encoder_hidden_states": text,
            "pooled_projections": torch.randn(1, 64),
            "timestep": time,
        },
        "QwenImageTransformer2DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 16),
            "encoder_hidden_states": text,
            "encoder_hidden_states_mask": torch.ones(1, 5, dtype=torch.bool),
            "timestep": time,
            "img_shapes": [[(1, 2, 2)]],
        },
        "WanTransformer3DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 1, 4, 4),
            "encoder_hidden_states": torch.randn(1, 512, 64),
            "encoder_hidden_states_image": torch.randn(1, 6, 64),
            "timestep": time,
        },
        "ChromaTransformer2DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 16),
            "encoder_hidden_states": text,
            "timestep": torch.tensor([0.5]),
            "img_ids": torch.zeros(4, 3),
            "txt_ids": torch.zeros(5, 3),
        },
        "ZImageTransformer2DModel": lambda: {
            "x": [torch.randn(4, 1, 4, 4)],
            "t": torch.tensor([0.5]),
            "cap_feats": [text[0]],
        },
        "PixArtTransformer2DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "encoder_hidden_states": text,
            "timestep": time,
        },
        "LTXVideoTransformer3DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 16),
            "encoder_hidden_states": text,
            "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
            "timestep": time,
            "num_frames": 1,
            "height": 2,
            "width": 2,
        },
        "HunyuanVideoTransformer3DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 1, 4, 4),
            "encoder_hidden_states": text,
            "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
            "pooled_projections": torch.randn(1, 64),
            "timestep": time,
            "guidance": torch.tensor([6000.0]),
        },
        "SanaTransformer2DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 4, 4),
            "encoder_hidden_states": text,
            "timestep": time,
        },
        "HiDreamImageTransformer2DModel": lambda: {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "timesteps": time,
            "encoder_hidden_states_t5": text,
            "encoder_hidden_states_llama3": torch.randn(2, 1, 5, 64),
            "pooled_embeds": torch.randn(1, 64),
        },
        "UNet2DConditionModel": lambda: {
            "sample": torch.randn(1, 4, 8, 8),
            "timestep": time,
            "encoder_hidden_states": torch.randn(1, 5, 256),
            "added_cond_kwargs": {"text_embeds": torch.randn(1, 128), "time_ids": torch.ones(1, 6)},
        },
        "AutoencoderKL": lambda: {"sample": torch.randn(1, 3, 8, 8)},
    }[family.model]()


def write_lora(path: Path, model: nn.Module, layers: tuple[str, ...], rank: int = 4, alpha=None, seed: int = 0) -> Path:
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(matches(f"**.{end}", name) for end in layers):
            size = module.weight.float().norm() / (module.in_features * module.out_features) ** 0.5
            a = torch.randn(rank, module.in_features, generator=noise) / module.in_features**0.5
            b = torch.randn(module.out_features, rank, generator=noise) * size * module.in_features**0.5 / rank**0.5
            tensors[f"{name}.lora_A.weight"] = a.bfloat16()
            tensors[f"{name}.lora_B.weight"] = (0.2 * b).bfloat16()
    targets = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    config = LoraConfig(r=rank, lora_alpha=alpha or rank, target_modules=targets).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    diffusers.FluxPipeline.save_lora_weights(
        path.parent, tensors, weight_name=path.name, transformer_lora_adapter_metadata=config
    )
    return path


def quick(recipe: str, folder: Path, fitted: bool = True) -> Path:
    """A recipe file in `folder` that extends a shipped one and calibrates on 8 images, if at all."""
    file = folder / f"{recipe}.yaml"
    calibrated = load_recipe(recipe)[1].calibration is not None
    text = f"extends: {recipe}\n" + ("calibration: {count: 8, steps: 2}\n" if calibrated else "")
    if not fitted:
        # Keys that a recipe's main formats have are merged, so 4-over-6 has to be said too.
        main = load_recipe(recipe)[1].components["transformer"]
        operands = {"weights": main.weights, "activations": main.activations}
        plain = "".join(f", {name}: {{four_over_six: false}}" for name, operand in operands.items() if operand)
        plain += ", transforms: [], low_rank: null, rounding: {method: rtn, scales: amax}"
        text += f"components: {{transformer: {{{plain.removeprefix(', ')}}}}}\n"
    file.write_text(text)
    return file


def said_by(command: list[str], folder: Path) -> str:
    """Return what a program prints that runs in `folder`, in a process that finds no fluxq but an installed one."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def copy_of(source: Path, target: Path) -> Path:
    """Copy a folder tree and let its owner write to it."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


@pytest.fixture(autouse=True)
def _a_gpu_only_for_tests_that_ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device auto` is the CPU in tests that are not marked gpu, in processes that they start too."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(devices, "there_is_a_gpu", lambda: False)
        if torch.cuda.is_available():
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def _a_quiet_command_of_an_earlier_test_silences_no_other() -> None:
    logger.setLevel(logging.NOTSET)


# Few tests each, that wait for processes of their own: as the last file of a run one of these would be waited for.
FIRST = (
    "test_executor",
    "test_max_memory",
    "test_notebooks",
    "test_package",
    "test_shard",
    "test_streaming",
    "test_torchrun",
)


SLOW_SETS = 2  # of each slow test, with --run-slow: the first and one in the middle


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; leave out slow tests that were not asked for, and skip those of a GPU where there is none."""
    items.sort(key=lambda item: item.path.stem not in FIRST)
    sets: Counter[str] = Counter()
    slow: dict[str, list[pytest.Item]] = {}
    for item in items:
        costs = "checkpoint" in item.fixturenames or item.get_closest_marker("feature")
        if item.get_closest_marker("long") or (costs and recipe_of(item) not in QUICK):
            item.add_marker(pytest.mark.slow)
        test = item.nodeid.partition("[")[0]
        if (often := item.get_closest_marker("often")) and not item.get_closest_marker("slow"):
            sets[test] += 1
            if sets[test] > often.args[0]:
                item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            slow.setdefault(test, []).append(item)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.getoption("--run-all"):
        return
    option = "--run-all" if config.getoption("--run-slow") else "--run-slow"
    counts = Counter(item.nodeid.partition("[")[0] for item in items)
    by_name = {argument.removeprefix("./").partition("[")[0] for argument in config.args if "::" in argument}
    left = list[pytest.Item]()
    for test, of_test in slow.items():
        if option == "--run-all" and not of_test[0].get_closest_marker("long"):
            left += without_spread(of_test, SLOW_SETS)
        elif test not in by_name or len(of_test) < counts[test]:  # slow in all its sets, it runs if called by name
            left += of_test
    config.hook.pytest_deselected(items=left)  # not skipped: that would take seconds for thousands of them
    left_out = set(left)
    items[:] = [item for item in items if item not in left_out]
    output = vars(config).setdefault("workeroutput", {})  # what xdist takes to the process that started this one
    if left:
        output["left out"] = f"{len(left)} slow tests are left out: `pytest {option}` or `.ci/run --full` runs them"


def without_spread(items: Sequence[T], most: int) -> list[T]:
    """Return the items without those that run: `most` of them, the first one and then at equal distances."""
    runs = {index * len(items) // most for index in range(most)}
    return [item for index, item in enumerate(items) if index not in runs]


def pytest_collection_finish() -> None:
    """A million objects that stay from here on: no garbage collection is to look at them again, for a second each."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some packages say at the end what was never freed


def recipe_of(item: pytest.Item) -> str | None:
    """The recipe, or "16 bit", that a test is parametrized with; None if with neither."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    known = (SIXTEEN_BIT, *shipped_recipes())
    return next((value for value in given if isinstance(value, str) and value in known), None)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Tell conftest.py what a test found for a cell: "yes" unless it recorded another word, for example "refused"."""
    report = (yield).get_result()
    marker = item.get_closest_marker("feature")
    if marker and report.when == "call" and report.passed and recipe_of(item) in COLUMNS:
        word = dict(item.user_properties).get("cell", "yes")
        report.user_properties.append(("feature", [marker.args[0], recipe_of(item), str(word)]))


@pytest.fixture
def tight(monkeypatch) -> list[Residence]:
    """Every weight is read each time, whatever the bound: the residences that were made."""
    made = []

    def make(device: str, _limit: int) -> Residence:
        made.append(Residence(device, 1000))
        return made[-1]

    monkeypatch.setattr(memory, "Residence", make)
    return made
