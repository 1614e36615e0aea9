"""The one setting of a process: whether a GPU without a kernel for a scheme's own arithmetic raises an error."""

from __future__ import annotations

import os

_set: dict[str, bool] = {}


def configure(*, strict: bool) -> None:
    """Set whether a GPU without a kernel for a scheme as it is written raises an error.

    Without strict it falls back with a warning, to another arithmetic or to the slow torch reference. Where nothing was
    configured, `FLUXQ_STRICT=1` in the environment does the same as strict=True.
    """
    _set["strict"] = bool(strict)


def is_strict() -> bool:
    """Tell whether strict mode is on: by the last `configure`, else by the environment."""
    return _set.get("strict", os.environ.get("FLUXQ_STRICT", "") not in ("", "0"))
