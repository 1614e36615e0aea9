"""Lists of steps as other programs have them: a mask of cache-dit, or settings of TaylorSeer in diffusers.

cache-dit takes a number for each step, 1 where it is computed. TaylorSeer, which counts, takes regular lists alone:

    step t is computed    ⟺    t < b  or  t ≥ a  or  (t − b − 1) mod k = 0

Both programs predict the steps between in ways of their own: over equal distances, not over noise levels. cache-dit
computes the first block of every step and predicts what the other blocks add.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from fluxq.base.untrusted_yaml import require_modest
from fluxq.recipes.step_list import MOST_STEPS, StepList


def cache_dit(steps: StepList) -> dict[str, Any]:
    """Return a configuration of cache-dit with the list as its mask."""
    computed = {*steps.computed}
    goes_on = {"enable_taylorseer": True, "taylorseer_order": steps.order} if steps.order else {}
    mask = [int(step in computed) for step in range(steps.total)]
    config = {"num_inference_steps": steps.total, "steps_computation_mask": mask, "steps_computation_policy": "static"}
    return {"cache_config": {**config, "Fn_compute_blocks": 1, **goes_on}}


def taylorseer(steps: StepList) -> dict[str, Any]:
    """Return arguments of TaylorSeerCacheConfig that compute the list's steps; ValueError if none do."""
    total, listed = steps.total, {*steps.computed}
    skipped = [step for step in range(total) if step not in listed]
    if not skipped:
        raise ValueError(f"all {total} steps are computed: leave TaylorSeer off")
    begin, end = skipped[0], skipped[-1] + 1
    for interval in range(2, total + 1):
        if all((step in listed) == ((step - begin - 1) % interval == 0) for step in range(begin, end)):
            return {
                "cache_interval": interval,
                "disable_cache_before_step": begin,
                "disable_cache_after_step": end,
                "max_order": steps.order,
                "use_lite_mode": True,
            }
    raise ValueError(
        f"the list computes {', '.join(map(str, steps.computed))}, and TaylorSeer in diffusers can only compute "
        "steps at equal distances; export it for cache-dit, or apply it by fluxq.skip_steps"
    )


def read_mask(given: str | PathLike[str] | Sequence[int]) -> tuple[int, ...]:
    """Return a mask, 1 for each step that is computed: numbers, text as "1,1,0,1", or a file of cache-dit.

    Raises ValueError, or FileNotFoundError, for what is none.
    """
    numbers: Any
    shown = str(given)[:80]
    if isinstance(given, str) and re.fullmatch(r"[\d, ]*", given):
        numbers = [int(digit) for digit in re.findall(r"\d", given)]
    elif isinstance(given, str | PathLike):
        numbers, shown = _mask_in(Path(given).expanduser()), str(given)
    else:
        numbers = [*given]
    if not isinstance(numbers, list) or not 2 <= len(numbers) <= MOST_STEPS:
        raise ValueError(f"mask {shown}: expected 1 or 0 for each of 2 to {MOST_STEPS} steps, as in 1,1,0,1, or a file")
    if any(number not in (0, 1) for number in numbers):
        raise ValueError(f"mask {shown}: expected 1 for each step that is computed, and 0 for the others")
    if not numbers[0] or not numbers[-1]:
        raise ValueError(f"mask {shown}: a list computes the first and the last step: set their numbers to 1")
    return tuple(map(int, numbers))


def _mask_in(file: Path) -> Any:
    """Return the mask of a file of cache-dit, whose keys may stand under `cache_config`."""
    if not file.is_file():
        raise FileNotFoundError(f"mask {file}: no such file; numbers are written as 1,1,0,1")
    try:
        text = file.read_text(encoding="utf-8")
        require_modest(text, 20 * MOST_STEPS, 8)
        value = yaml.safe_load(text)
        return value.get("cache_config", value)["steps_computation_mask"]
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        raise ValueError(
            f"mask {file}: no file of cache-dit with steps_computation_mask as a list of 1 and 0"
        ) from None


# option of `fluxq export --format` -> what the program reads, and lines of Python that read it from FILE
STEP_EXPORTS: dict[str, tuple[Callable[[StepList], dict[str, Any]], tuple[str, ...]]] = {
    "cache-dit": (cache_dit, ('cache_dit.enable_cache(pipe, **cache_dit.load_configs("FILE"))',)),
    "taylorseer": (
        taylorseer,
        (
            'config = diffusers.TaylorSeerCacheConfig(**yaml.safe_load(open("FILE")))',
            "pipe.transformer.enable_cache(config)",
        ),
    ),
}
