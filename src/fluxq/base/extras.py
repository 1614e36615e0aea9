"""Packages beyond what running a checkpoint needs: extras of pyproject.toml, and newer versions of libraries.

`fluxq` alone stands beside an engine that has pins of its own. There every command starts, and one that needs a package
of an extra says so before it works.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

CURE = 'pip install "fluxq[all]"'
CURE_OF_SERVE = 'pip install "fluxq[serve]"'
CURE_OF_DEMO = 'pip install "fluxq[demo]"'
CURE_OF_REDIS = 'pip install "fluxq[serve,redis]"'
CURE_OF_RAY = 'pip install "fluxq[ray]"'


def require_for(command: str) -> None:
    """Raise RuntimeError, with the cure, where a package is absent that this command cannot do without."""
    if absent := [name for name in NEEDED.get(command, ()) if find_spec(name) is None]:
        packages = ", ".join({**ALL, **SERVE, **DEMO}[name] for name in absent)
        cure = CURE_OF_DEMO if {*absent} & DEMO.keys() else CURE_OF_SERVE if {*absent} <= SERVE.keys() else CURE
        raise RuntimeError(f"`fluxq {command}` needs packages that are not installed ({packages}): {cure}")


def missing_of_all() -> str:
    """Return, with the cure, which packages of the extra are not installed; "" if none."""
    needless = {"pynvml"} if sys.platform == "darwin" else set()
    absent = [package for name, package in ALL.items() if name not in needless and find_spec(name) is None]
    return f"without {', '.join(absent)} not every command works: {CURE}" if absent else ""


def cure_of(error: ModuleNotFoundError) -> str:
    """Return a message with the cure for a package of an extra that was not found; "" for any other module."""
    name = (error.name or "").partition(".")[0]
    cures = ((ALL, CURE), (SERVE, CURE_OF_SERVE), (DEMO, CURE_OF_DEMO))
    messages = [f"the package {extra[name]} is not installed: {cure}" for extra, cure in cures if name in extra]
    return messages[0] if messages else ""


def too_old_for(feature: str) -> str:
    """Return, with the cure, that the library here is too old for a row of NEWER; "" where it is not, or for no row."""
    if feature not in NEWER:
        return ""
    from fluxq.base.devices import is_older, package_version

    package, first = NEWER[feature]
    if not is_older(package, first):
        return ""
    present = package_version(package)
    return f'{feature} needs {package} >= {first}, and {present} is installed: pip install "{package}>={first}"'


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
# The same of the extra `serve`.
SERVE = {
    "fastapi": "fastapi",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
    "uvicorn": "uvicorn",
}
# What the extra `demo` has beside that.
DEMO = {"gradio": "gradio"}
_REPORT = ("altair", "jinja2", "vl_convert")
_JUDGE = ("scipy", "torchmetrics", "torchvision", *_REPORT)
# Command -> modules that it needs with its usual options; what others need is looked for when they are given.
NEEDED: dict[str, tuple[str, ...]] = {
    "auto": ("scipy",),
    "steps": ("scipy",),
    "quantize": ("scipy",),
    "eval": _JUDGE,
    "gate": ("scipy", "torchmetrics", "torchvision"),
    "verify --passport": ("scipy", "torchmetrics", "torchvision"),
    "bench": _JUDGE,
    "debug": _JUDGE,
    "report": _JUDGE,
    "history": ("scipy", *_REPORT),
    "serve": (*SERVE,),
    "demo": (*DEMO, *SERVE),
}
TEXT_ENCODERS = "a quantized text encoder"
# Feature -> the library, and its first version that has it.
NEWER = {"SeaCache": ("diffusers", "0.41"), TEXT_ENCODERS: ("transformers", "5.21")}
