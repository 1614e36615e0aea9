"""List of the steps of a call that a denoiser computes; at the others its output is extrapolated.

    v̂_t = Σ_i W[t, i] v_i          i: all computed steps up to t

W is fitted to the outputs of a model (calibrate/paths.py). At a computed step it also puts right what the steps before
were extrapolated wrong by. Without a fit, and in calls of other noise levels, computed steps return their output, and
the others

    v̂_t = Σ_i c_i(x_t) v_i        i: the last order + 1 computed steps

x_t is the noise level of step t. Order 0 repeats the last output, order 1 goes on in a straight line, and order 2 in
between that and the parabola, with half of its curvature: on the embedded pipeline that is nearer to the outputs than
either. The first and the last step of a call are always computed.

A list is of one scheduler class, of one shift, and of a number of steps. In a call of another number, or one that
begins at an image, those steps are computed whose noise levels are nearest to the list's: what is extrapolated over
stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

ORDERS = (0, 1, 2)
MOST_STEPS = 1000  # of a call: no schedule of diffusers has more
_KINDS = {str: "a text", dict: "an object", list: "a list", int: "a whole number"}
# Settings of a scheduler that place its noise levels, or say what outputs do there.
_PLACING = (
    "shift",
    "flow_shift",
    "shift_terminal",
    "use_dynamic_shifting",
    "time_shift_type",
    "base_shift",
    "max_shift",
    "base_image_seq_len",
    "max_image_seq_len",
    "invert_sigmas",
    "stochastic_sampling",
    "use_flow_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "timestep_spacing",
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "rescale_betas_zero_snr",
    "final_sigmas_type",
    "prediction_type",
    "algorithm_type",
    "solver_order",
    "solver_type",
)
_MOST_FACTOR = 1e30  # that an output is multiplied by: fp32 ends at 3e38
_ALIKE = 1e-3  # of the first noise level: levels that differ by less are the same


@dataclass(frozen=True)
class StepList:
    """Steps that are computed.

    computed: their indices, in order; the first and the last step of the call are among them.
    order: of what stands for the others' outputs.
    levels: noise level of each step of the call, falling.
    scheduler: class. settings: those of it that place noise levels.
    models: component -> digest of class and configuration of each denoiser; empty for a list by hand.
    fitted: of each step, what the outputs of the computed steps up to it are multiplied by; empty without a fit.
    """

    computed: tuple[int, ...]
    order: int
    levels: tuple[float, ...]
    scheduler: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    fitted: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        steps, last = list(self.computed), len(self.levels) - 1
        if not 0 <= last < MOST_STEPS:
            raise ValueError(f"a list of steps is of a call of 1 to {MOST_STEPS} steps, this one's has {last + 1}")
        if not all(type(step) is int for step in steps) or steps != sorted(set(steps)):
            raise ValueError(f"steps {str(steps)[:80]}: expected whole numbers, rising, each once")
        if not steps or (steps[0], steps[-1]) != (0, last):
            raise ValueError(f"steps {str(steps)[:80]}: the first and the last step, 0 and {last}, have to be computed")
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r}: expected one of {', '.join(map(str, ORDERS))}")
        require_falling(self.levels, self.scheduler)
        if self.fitted:
            _require_whole(self.fitted, [len([each for each in steps if each <= step]) for step in range(last + 1)])

    @property
    def total(self) -> int:
        """Steps of the call."""
        return len(self.levels)

    @property
    def share(self) -> float:
        """Computed steps by all steps."""
        return len(self.computed) / self.total

    def __str__(self) -> str:
        fit = ", fitted" if self.fitted else ""
        return f"{len(self.computed)} of {self.total} steps computed, order {self.order}{fit}"

    def at(self, levels: Sequence[float]) -> frozenset[int]:
        """Return the steps to compute of a call with these noise levels."""
        begins_alike = levels[0] >= fmean(self.levels[:2])
        if len(levels) == self.total and begins_alike:
            return frozenset(self.computed)
        steps = range(len(levels))
        nearest = {min(steps, key=lambda s: abs(levels[s] - self.levels[step])) for step in self.computed}
        return frozenset(nearest | {0, len(levels) - 1})

    def factors(self, levels: Sequence[float], computed: Collection[int]) -> tuple[dict[int, float], ...]:
        """Return, of each step, computed step -> what its output is multiplied by; nothing where no fit is for these.

        levels: noise levels of the call. computed: its steps.
        """
        same = len(levels) == self.total and {*computed} == {*self.computed}
        most = _ALIKE * self.levels[0]
        if not same or any(abs(a - b) > most for a, b in zip(levels, self.levels, strict=True)):
            return ()
        rows = (zip(self.computed, row, strict=False) for row in self.fitted)
        return tuple({step: factor for step, factor in row if factor} for row in rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "scheduler": self.scheduler,
            "settings": dict(self.settings),
            "steps": self.total,
            "compute": list(self.computed),
            "order": self.order,
            "levels": list(self.levels),
            "models": dict(self.models),
            **({"fitted": [list(row) for row in self.fitted]} if self.fitted else {}),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> StepList:
        """Read and check the JSON form; ValueError for one that is malformed."""
        kinds = {"scheduler": str, "settings": dict, "compute": list, "order": int, "levels": list, "models": dict}
        for name, kind in kinds.items():
            if type(value.get(name)) is not kind:
                raise ValueError(f"a list of steps has {name}: {str(value.get(name))[:40]}, expected {_KINDS[kind]}")
        rows = value.get("fitted", [])
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise ValueError(f"a list of steps has fitted: {str(rows)[:40]}, expected a list of lists")
        levels = _numbers(value["levels"], "noise levels")
        fitted = tuple(_numbers(row, "fitted factors") for row in rows)
        given = tuple(value[name] for name in ("order", "scheduler", "settings", "models"))
        order, scheduler, settings, models = given
        return cls(tuple(value["compute"]), order, levels, scheduler, settings, models, fitted)


def nearest_list(lists: Iterable[StepList], total: int) -> StepList:
    """Return the list, of several, for a call of `total` steps: that of the nearest number."""
    return min(lists, key=lambda each: abs(each.total - total))


def extrapolation(nodes: Sequence[float], x: float) -> list[float]:
    """Return c_i(x): what the values at one to three nodes are multiplied by for the value at x."""
    curve = _lagrange(nodes, x)
    if len(nodes) < 3:
        return curve
    line = [0.0, *_lagrange(nodes[1:], x)]
    return [(a + b) / 2 for a, b in zip(curve, line, strict=True)]


def _lagrange(nodes: Sequence[float], x: float) -> list[float]:
    return [math.prod((x - b) / (a - b) for j, b in enumerate(nodes) if j != i) for i, a in enumerate(nodes)]


def require_falling(levels: Sequence[float], scheduler: str) -> None:
    """Raise ValueError for noise levels, of a scheduler class, that nothing can be extrapolated over."""
    if not all(map(math.isfinite, levels)) or any(x <= y for x, y in itertools.pairwise(levels)):
        raise ValueError(
            f"noise levels of a {scheduler} do not fall from step to step, so nothing can be extrapolated over them; "
            "take another scheduler"
        )


def _numbers(values: Sequence[Any], what: str) -> tuple[float, ...]:
    if not all(type(each) in (int, float) for each in values):
        raise ValueError(f"a list of steps has {what} that are no numbers")
    try:
        return tuple(map(float, values))
    except OverflowError:
        raise ValueError(f"a list of steps has {what} that are too large") from None


def _require_whole(rows: Sequence[Sequence[float]], lengths: Sequence[int]) -> None:
    """Raise ValueError for fitted factors that are not of all computed steps up to each, or that no sum is left of."""
    wrong = [factor for factor in itertools.chain(*rows) if not abs(factor) <= _MOST_FACTOR]
    if [len(row) for row in rows] != [*lengths] or wrong:
        raise ValueError(
            f"a list of {len(lengths)} steps has fitted factors of {[len(row) for row in rows]} computed steps"
            f"{f', {wrong[0]:g} among them' if wrong else ''}, expected finite ones of {[*lengths]}, each of at most "
            f"{_MOST_FACTOR:g}: make it again with `fluxq steps`"
        )


def placing(scheduler: Any) -> dict[str, Any]:
    """Return the settings of a scheduler that place its noise levels."""
    return {name: scheduler.config[name] for name in _PLACING if scheduler.config.get(name) is not None}
