"""fluxq: post-training quantization for diffusion transformers.

Importing this module loads nothing heavy. Public names load on first use, and once diffusers is imported it is told
how to read a fluxq checkpoint, so that `FluxPipeline.from_pretrained(folder)` just works.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fluxq.integrations.hook import when_imported

if TYPE_CHECKING:
    from fluxq import tiny
    from fluxq.quantize.linear import QuantLinear
    from fluxq.quantize.run import quantize_linear
    from fluxq.quantize.tensor import QuantizedTensor
    from fluxq.recipes.families import FAMILIES
    from fluxq.recipes.formats import FORMATS

__version__ = "0.1.0"

__all__ = ["FAMILIES", "FORMATS", "QuantLinear", "QuantizedTensor", "__version__", "quantize_linear", "tiny"]

_HOMES = {
    "FAMILIES": "fluxq.recipes.families",
    "FORMATS": "fluxq.recipes.formats",
    "QuantLinear": "fluxq.quantize.linear",
    "QuantizedTensor": "fluxq.quantize.tensor",
    "quantize_linear": "fluxq.quantize.run",
}


def __getattr__(name: str) -> Any:
    if name == "tiny":
        return importlib.import_module("fluxq.tiny")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fluxq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_with_diffusers() -> None:
    from fluxq.integrations import diffusers

    diffusers.register()


when_imported("diffusers.quantizers.auto", _register_with_diffusers)
