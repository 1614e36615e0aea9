"""The extra `all` of pyproject.toml: packages that making and judging checkpoints need, and running them does not.

`fluxq` alone stands beside an engine that has pins of its own. There every command starts, and one that needs a package
of the extra says so before it works.
"""

from __future__ import annotations

from importlib.util import find_spec

CURE = 'pip install "fluxq[all]"'


def require_for(command: str) -> None:
    """Raise RuntimeError, with the cure, where a package is absent that this command cannot do without."""
    if absent := [name for name in NEEDED.get(command, ()) if find_spec(name) is None]:
        packages = ", ".join(ALL[name] for name in absent)
        raise RuntimeError(f"`fluxq {command}` needs packages that are not installed ({packages}): {CURE}")


def cure_of(error: ModuleNotFoundError) -> str:
    """Return a message with the cure for a package of the extra that was not found; "" for any other module."""
    package = ALL.get((error.name or "").partition(".")[0])
    return f"the package {package} is not installed: {CURE}" if package else ""


# Module -> package of the extra.
ALL = {
    "altair": "altair",
    "datasets": "datasets",
    "jinja2": "jinja2",
    "open_clip": "open-clip-torch",
    "peft": "peft",
    "pynvml": "nvidia-ml-py",
    "rich": "rich",
    "scipy": "scipy",
    "torchmetrics": "torchmetrics",
    "torchvision": "torchvision",
    "vl_convert": "vl-convert-python",
}
_REPORT = ("altair", "jinja2", "vl_convert")
_JUDGE = ("scipy", "torchmetrics", "torchvision", *_REPORT)
# Command -> modules that it needs whatever its options are; others it looks for when an option wants them.
NEEDED: dict[str, tuple[str, ...]] = {
    "auto": ("scipy",),
    "steps": ("scipy",),
    "quantize": ("scipy",),
    "eval": _JUDGE,
    "bench": _JUDGE,
    "debug": _JUDGE,
    "report": _JUDGE,
}
