"""fluxq in vLLM-Omni: its diffusers back end (`--diffusion-load-format diffusers`), and its own models.

vLLM-Omni calls `plug_in` in every process. It has no hooks of its own: its modules are changed once they are imported,
if ever.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from fluxq.base.console import logger
from fluxq.integrations import call_after_import
from fluxq.integrations.engine import VLLM_OMNI, after_loading

QUANT_METHOD = "fluxq"  # of recipes/computing.py, which imports pydantic
FACTORY = "vllm_omni.quantization.factory"
LOADER = "vllm_omni.diffusion.model_loader.diffusers_loader"
ADAPTER = "vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter"


def plug_in() -> None:
    """Arrange that its modules are told of fluxq; called again, it changes nothing."""
    if VLLM_OMNI.is_tried():
        names = {FACTORY: "register_with_factory", LOADER: "register_with_loader", ADAPTER: "register_with_adapter"}
        call_after_import({module: (f"vllm_omni:{name}",) for module, name in names.items()})


def register_with_factory() -> None:
    """Make vLLM-Omni's own models find `quant_method: fluxq` in config.json."""
    try:
        importlib.import_module(FACTORY).register_quantization_override(QUANT_METHOD, build_config)
    except AttributeError as error:
        _no_way_in(FACTORY, error)


def build_config(**config: Any) -> Any:
    """Make the configuration of vLLM-Omni's own models of a checkpoint's `quantization_config`."""
    from fluxq.integrations.vllm_omni_layers import FluxqVllmConfig

    return FluxqVllmConfig.from_config(config)


def register_with_loader() -> None:
    """Make the loader of vLLM-Omni's own models pass a checkpoint of fluxq through an adapter."""
    _wrap(LOADER, "get_checkpoint_adapter", _adapter_of_ours)


def register_with_adapter() -> None:
    """Make the back end that runs diffusers' pipelines prepare those of fluxq once it has loaded them."""
    _wrap(ADAPTER, "DiffusersAdapterPipeline.load_weights", _preparing)


def _adapter_of_ours(stock: Callable[..., Any]) -> Callable[..., Any]:
    def get_checkpoint_adapter(*args: Any, model: Any, source: Any, quant_config: Any, **kwargs: Any) -> Any:
        layers = sys.modules.get("fluxq.integrations.vllm_omni_layers")  # imported once a model has layers of fluxq
        ours = layers and layers.adapter_of(model, source, quant_config)
        return ours or stock(*args, model=model, source=source, quant_config=quant_config, **kwargs)

    return get_checkpoint_adapter


def _preparing(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        after_loading(getattr(self, "_pipeline", None), VLLM_OMNI)
        return result

    return load_weights


def _wrap(module: str, path: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put fluxq's function around a function or method of vLLM-Omni, once. path: in the module."""
    *owners, name = path.split(".")
    try:
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        stock = getattr(owner, name)
    except AttributeError as error:
        _no_way_in(module, error)
        return
    if not getattr(stock, "is_fluxqs", False):
        replacement = functools.wraps(stock)(wrapped(stock))
        vars(replacement)["is_fluxqs"] = True
        setattr(owner, name, replacement)


def _no_way_in(module: str, error: Exception) -> None:
    logger.warning("fluxq finds no way into %s of vLLM-Omni %s: %s", module, VLLM_OMNI.present, error)
