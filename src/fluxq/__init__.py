"""fluxq: post-training quantization for diffusion transformers.

Importing this module loads nothing heavy. Public names load on first use, and once diffusers or transformers is
imported it is told how to read a fluxq checkpoint, so that `FluxPipeline.from_pretrained(folder)` just works.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from fluxq.integrations.gpu import OPS
from fluxq.integrations.gpu import register as register_kernels
from fluxq.integrations.hook import when_imported

if TYPE_CHECKING:
    from fluxq import tiny
    from fluxq.base.settings import configure
    from fluxq.integrations.attention import set_attention
    from fluxq.integrations.config import FluxqConfig
    from fluxq.integrations.optimize import optimize, restore
    from fluxq.integrations.prepare import prepare
    from fluxq.quantize.graphs import capture
    from fluxq.quantize.linear import QuantLinear
    from fluxq.quantize.modulation import hoist_modulation
    from fluxq.quantize.run import quantize_linear
    from fluxq.quantize.steps import keep_steps
    from fluxq.quantize.tensor import QuantizedTensor
    from fluxq.recipes.families import FAMILIES
    from fluxq.recipes.formats import FORMATS

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "FORMATS",
    "FluxqConfig",
    "QuantLinear",
    "QuantizedTensor",
    "__version__",
    "capture",
    "configure",
    "hoist_modulation",
    "keep_steps",
    "optimize",
    "prepare",
    "quantize_linear",
    "restore",
    "set_attention",
    "tiny",
]

_HOMES = {
    "FAMILIES": "fluxq.recipes.families",
    "FORMATS": "fluxq.recipes.formats",
    "FluxqConfig": "fluxq.integrations.config",
    "QuantLinear": "fluxq.quantize.linear",
    "QuantizedTensor": "fluxq.quantize.tensor",
    "capture": "fluxq.quantize.graphs",
    "configure": "fluxq.base.settings",
    "hoist_modulation": "fluxq.quantize.modulation",
    "keep_steps": "fluxq.quantize.steps",
    "optimize": "fluxq.integrations.optimize",
    "prepare": "fluxq.integrations.prepare",
    "quantize_linear": "fluxq.quantize.run",
    "restore": "fluxq.integrations.optimize",
    "set_attention": "fluxq.integrations.attention",
}


def __getattr__(name: str) -> Any:
    if name == "tiny":
        return importlib.import_module("fluxq.tiny")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fluxq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _register(function: str) -> None:
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)()


# What is told about fluxq, and by which function, once a library's module is imported.
_REGISTRATIONS = {
    "diffusers.models.attention_dispatch": "fluxq.integrations.attention:register",
    "diffusers.models.modeling_utils": "fluxq.integrations.whole:register_with_diffusers",
    "diffusers.quantizers.auto": "fluxq.integrations.diffusers:register",
    "diffusers.pipelines.pipeline_utils": "fluxq.integrations.dtypes:register",
    "diffusers.loaders.lora_pipeline": "fluxq.integrations.peft:register_with_lora_loader",
    "peft.tuners.lora.model": "fluxq.integrations.peft:register_with_peft",
    "transformers.modeling_utils": "fluxq.integrations.whole:register_with_transformers",
    "transformers.quantizers.auto": "fluxq.integrations.transformers:register",
}
for _module, _function in _REGISTRATIONS.items():
    when_imported(_module, functools.partial(_register, _function))
for _module in OPS:
    when_imported(_module, functools.partial(register_kernels, _module))
