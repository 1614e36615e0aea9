"""Lists of steps for other programs, and back: what these compute is what the list says."""

import itertools
import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import yaml
from diffusers import CacheMixin, TaylorSeerCacheConfig
from torch import Tensor, nn

from fluxq.commands.exchanging import OF_LISTS
from fluxq.recipes.step_exports import STEP_EXPORTS, cache_dit, read_mask, taylorseer
from fluxq.recipes.step_list import StepList

MASK = [1, 1, 0, 1, 0, 0, 1, 1]


def listed(mask: list[int], order: int = 1) -> StepList:
    steps = [step for step, number in enumerate(mask) if number]
    levels = [1 - step / len(mask) for step in range(len(mask))]
    return StepList(tuple(steps), order, tuple(levels), "FlowMatchEulerDiscreteScheduler")


def computed_by(settings: dict[str, Any], total: int) -> list[int]:
    """Steps at which a projection of a model with TaylorSeer runs."""

    class Projection(nn.Module):
        def forward(self, step: Tensor) -> Tensor:
            ran.append(int(step))
            return step

    class Model(nn.Module, CacheMixin):
        def __init__(self) -> None:
            super().__init__()
            self.proj_out = Projection()

    ran, model = [], Model()
    model.enable_cache(TaylorSeerCacheConfig(**settings))
    with model.cache_context("own"):
        for step in range(total):
            model.proj_out(torch.tensor([float(step)]))
    return ran


def regular(total: int, interval: int, begin: int, end: int) -> list[int]:
    return [int(t < begin or t >= end or (t - begin - 1) % interval == 0) for t in range(total)]


def test_taylorseer_computes_the_steps_of_a_regular_list() -> None:
    for total, interval, begin in itertools.product((9, 12), (2, 3, 4), (1, 3)):
        for end in (total - 1, total - 3):
            steps = listed(regular(total, interval, begin, end))
            settings = taylorseer(steps)
            assert computed_by(settings, total) == [*steps.computed]
    assert taylorseer(listed(MASK[:4], order=2))["max_order"] == 2


def test_taylorseer_takes_no_other_list() -> None:
    with pytest.raises(ValueError, match=r"the list computes 0, 2, 3, 6, and TaylorSeer.*export it for cache-dit"):
        taylorseer(listed([1, 0, 1, 1, 0, 0, 1]))
    with pytest.raises(ValueError, match="all 4 steps are computed: leave TaylorSeer off"):
        taylorseer(listed([1] * 4))


def test_a_mask_comes_back_from_what_is_written(tmp_path) -> None:
    whole = cache_dit(listed(MASK))
    files = {"whole.yaml": whole, "flat.yaml": whole["cache_config"], "whole.json": whole}
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value) if name.endswith("json") else yaml.safe_dump(value))
        assert read_mask(tmp_path / name) == read_mask(str(tmp_path / name)) == (*MASK,)
    for given in ("1,1,0,1,0,0,1,1", "1 1 0 1 0 0 1 1", "11010011", MASK, torch.tensor(MASK).numpy()):
        assert read_mask(given) == (*MASK,)  # pyright: ignore[reportArgumentType]
    assert "enable_taylorseer" in whole["cache_config"]
    assert "enable_taylorseer" not in cache_dit(listed(MASK, order=0))["cache_config"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1,1,2,1", "expected 1 for each step that is computed, and 0 for the others"),
        ([1, 0.5, 1], "expected 1 for each step"),
        ("1,0,0", "computes the first and the last step: set their numbers to 1"),
        ("0,1,1", "computes the first and the last step"),
        ("", r"expected 1 or 0 for each of 2 to 1000 steps, as in 1,1,0,1, or a file"),
        ("1" * 1001, "of 2 to 1000 steps"),
    ],
)
def test_what_is_no_mask_is_refused(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_mask(given)


@pytest.mark.parametrize(
    "text",
    ["steps_computation_mask: medium", "- 1", "cache_config: 3", "a: [", "x: 1", '{"cache_config": {"a": 1}}', "\x00"],
)
def test_a_file_without_a_mask_is_refused(tmp_path, text) -> None:
    file = tmp_path / "mask.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"mask .*mask\.yaml"):
        read_mask(file)
    with pytest.raises(FileNotFoundError, match=r"no such file; numbers are written as 1,1,0,1"):
        read_mask(tmp_path / "none.yaml")


def test_the_command_names_the_programs_that_there_are() -> None:
    assert (*STEP_EXPORTS,) == OF_LISTS


@pytest.mark.slow
@pytest.mark.skipif(find_spec("cache_dit") is None, reason="cache-dit is not installed")
def test_cache_dit_computes_the_steps_of_the_list(tmp_path) -> None:
    """In a process of its own: importing it changes diffusers."""
    (tmp_path / "mask.yaml").write_text(yaml.safe_dump(cache_dit(listed(MASK))))
    process = subprocess.run([sys.executable, "-c", _RUN, str(tmp_path / "mask.yaml")], capture_output=True, check=True)
    per_block = json.loads(process.stdout.splitlines()[-1])
    assert per_block == [len(MASK), *[sum(MASK)] * (len(per_block) - 1)]


_RUN = """
import sys, json, cache_dit
from fluxq import tiny

pipe = tiny.load("float32")
blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
ran = [0] * len(blocks)
def counted(index):
    return lambda *_: ran.__setitem__(index, ran[index] + 1)
for index, block in enumerate(blocks):
    block.register_forward_hook(counted(index))
cache_dit.enable_cache(pipe, **cache_dit.load_configs(sys.argv[1]))
pipe("a red three on black", **{**tiny.CALL_KWARGS, "num_inference_steps": 8})
print(json.dumps(ran))
"""
