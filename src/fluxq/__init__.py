"""fluxq: post-training quantization for diffusion transformers.

Importing this module loads nothing heavy. Public names load on first use, and once diffusers or transformers is
imported it is told how to read a fluxq checkpoint, so that `FluxPipeline.from_pretrained(folder)` just works.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fluxq.base import FLUXQ_VERSION as __version__
from fluxq.integrations import register

if TYPE_CHECKING:
    from fluxq import tiny
    from fluxq.base.settings import configure
    from fluxq.integrations.loading import FluxqConfig
    from fluxq.kernels.linear import QuantLinear
    from fluxq.kernels.tensor import QuantizedTensor
    from fluxq.quantize.run import quantize_linear
    from fluxq.recipes.all_families import FAMILIES
    from fluxq.recipes.formats import FORMATS
    from fluxq.runtime.attention_choice import set_attention
    from fluxq.runtime.graphs import capture
    from fluxq.runtime.modulation import hoist_modulation
    from fluxq.runtime.optimize import optimize, restore
    from fluxq.runtime.place import place
    from fluxq.runtime.prepare import prepare
    from fluxq.runtime.skip import skip_steps
    from fluxq.runtime.steps import keep_steps
    from fluxq.verbs import Checkpoint, auto, calibrate_pipeline, choose_steps, evaluate_pipeline, quantize_pipeline

__all__ = [
    "FAMILIES",
    "FORMATS",
    "Checkpoint",
    "FluxqConfig",
    "QuantLinear",
    "QuantizedTensor",
    "__version__",
    "auto",
    "calibrate_pipeline",
    "capture",
    "choose_steps",
    "configure",
    "evaluate_pipeline",
    "hoist_modulation",
    "keep_steps",
    "optimize",
    "place",
    "prepare",
    "quantize_linear",
    "quantize_pipeline",
    "restore",
    "set_attention",
    "skip_steps",
    "tiny",
]

_HOMES = {
    "Checkpoint": "fluxq.verbs",
    "FAMILIES": "fluxq.recipes.all_families",
    "FORMATS": "fluxq.recipes.formats",
    "FluxqConfig": "fluxq.integrations.loading",
    "QuantLinear": "fluxq.kernels.linear",
    "QuantizedTensor": "fluxq.kernels.tensor",
    "auto": "fluxq.verbs",
    "calibrate_pipeline": "fluxq.verbs",
    "capture": "fluxq.runtime.graphs",
    "choose_steps": "fluxq.verbs",
    "configure": "fluxq.base.settings",
    "evaluate_pipeline": "fluxq.verbs",
    "hoist_modulation": "fluxq.runtime.modulation",
    "keep_steps": "fluxq.runtime.steps",
    "optimize": "fluxq.runtime.optimize",
    "place": "fluxq.runtime.place",
    "prepare": "fluxq.runtime.prepare",
    "quantize_linear": "fluxq.quantize.run",
    "quantize_pipeline": "fluxq.verbs",
    "restore": "fluxq.runtime.optimize",
    "set_attention": "fluxq.runtime.attention_choice",
    "skip_steps": "fluxq.runtime.skip",
}


def __getattr__(name: str) -> Any:
    if name == "tiny":
        return importlib.import_module("fluxq.tiny")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fluxq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register()
