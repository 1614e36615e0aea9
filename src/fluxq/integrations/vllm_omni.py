"""fluxq in vLLM-Omni: its diffusers back end (`--diffusion-load-format diffusers`), and its own models.

vLLM-Omni calls `plug_in` in every process. It has no hooks of its own: its modules are changed once they are imported,
if ever.
"""

from __future__ import annotations

import functools
import importlib
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
    loader: Any = importlib.import_module(LOADER)
    try:
        choose = loader.get_checkpoint_adapter
    except AttributeError as error:
        _no_way_in(LOADER, error)
        return
    if getattr(choose, "is_fluxqs", False):
        return

    @functools.wraps(choose)
    def get_checkpoint_adapter(*args: Any, model: Any, source: Any, quant_config: Any, **kwargs: Any) -> Any:
        if getattr(quant_config, "get_name", str)() != QUANT_METHOD:
            return choose(*args, model=model, source=source, quant_config=quant_config, **kwargs)
        from fluxq.integrations.vllm_omni_layers import FluxqCheckpointAdapter

        return FluxqCheckpointAdapter(model, quant_config, getattr(source, "prefix", ""))

    vars(get_checkpoint_adapter)["is_fluxqs"] = True
    loader.get_checkpoint_adapter = get_checkpoint_adapter


def register_with_adapter() -> None:
    """Make the back end that runs diffusers' pipelines prepare those of fluxq once it has loaded them."""
    try:
        adapter = importlib.import_module(ADAPTER).DiffusersAdapterPipeline
        load = adapter.load_weights
    except AttributeError as error:
        _no_way_in(ADAPTER, error)
        return
    if getattr(load, "is_fluxqs", False):
        return

    @functools.wraps(load)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        after_loading(getattr(self, "_pipeline", None), VLLM_OMNI)
        return result

    vars(load_weights)["is_fluxqs"] = True
    adapter.load_weights = load_weights


def _no_way_in(module: str, error: Exception) -> None:
    logger.warning("fluxq finds no way into %s of vLLM-Omni %s: %s", module, VLLM_OMNI.present, error)
