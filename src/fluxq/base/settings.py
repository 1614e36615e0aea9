"""Settings of a process: strict mode, and how fp8 products accumulate on Hopper."""

from __future__ import annotations

import os

ACCUMULATIONS = ("fast", "exact")
_set: dict[str, bool | str] = {}
_changes = 0


def configure(*, strict: bool | None = None, accumulate: str | None = None) -> None:
    """Set how kernels are chosen in this process; an argument left out stays as it is.

    strict: whether a GPU without a kernel for a scheme as it is written raises an error. Without strict it falls back
    with a warning, to another arithmetic or to the slow torch reference.
    accumulate: how fp8 products add up on Hopper. "fast", the default, keeps sums in the matrix unit, with 13 bits;
    "exact" moves partial sums to fp32 on the way. kernels/README.md has the error of both.

    Where nothing was configured, FLUXQ_STRICT=1 and FLUXQ_ACCUMULATE=exact in the environment do the same, as they are
    when a kernel is first launched. Raises ValueError for another accumulation.
    """
    global _changes
    if accumulate is not None:
        _set["accumulate"] = _checked(accumulate, "accumulate")
    if strict is not None:
        _set["strict"] = bool(strict)
    _changes += 1  # last: what is chosen until now is not to be taken for a choice by the new settings


def changes() -> int:
    """Count the calls of `configure`: what was chosen by settings is chosen anew after one."""
    return _changes


def is_strict() -> bool:
    """Tell whether strict mode is on: by the last `configure`, else by the environment."""
    return bool(_set.get("strict", os.environ.get("FLUXQ_STRICT", "") not in ("", "0")))


def accumulation() -> str:
    """Return "fast" or "exact": by the last `configure`, else by the environment."""
    return str(_set.get("accumulate") or _checked(os.environ.get("FLUXQ_ACCUMULATE") or "fast", "FLUXQ_ACCUMULATE"))


def _checked(accumulate: str, name: str) -> str:
    if accumulate not in ACCUMULATIONS:
        raise ValueError(f"{name} is {accumulate!r}, expected one of {', '.join(ACCUMULATIONS)}")
    return accumulate
