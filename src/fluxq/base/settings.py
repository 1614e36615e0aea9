"""The one setting of a process: whether anything but a kernel of a scheme's own arithmetic is an error on a GPU."""

from __future__ import annotations

import os

_set: dict[str, bool] = {}


def configure(*, strict: bool) -> None:
    """strict: raise where a GPU has no kernel for a scheme as it is written, instead of falling back with a warning,
    be it to another arithmetic or to the slow torch reference.

    `FLUXQ_STRICT=1` in the environment says the same where nothing was configured.
    """
    _set["strict"] = bool(strict)


def is_strict() -> bool:
    """Tell whether strict mode is on: as `configure` said last, else as the environment says."""
    return _set.get("strict", os.environ.get("FLUXQ_STRICT", "") not in ("", "0"))
