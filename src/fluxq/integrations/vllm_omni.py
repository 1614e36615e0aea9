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

ADAPTER = "vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter"


def plug_in() -> None:
    """Arrange that its modules are told of fluxq; called again, it changes nothing."""
    if VLLM_OMNI.is_tried():
        call_after_import({ADAPTER: ("vllm_omni:register_with_adapter",)})


def register_with_adapter() -> None:
    """Make the back end that runs diffusers' pipelines prepare those of fluxq once it has loaded them."""
    try:
        adapter = importlib.import_module(ADAPTER).DiffusersAdapterPipeline
        load = adapter.load_weights
    except AttributeError as error:
        logger.warning("fluxq finds no way into %s of vLLM-Omni %s: %s", ADAPTER, VLLM_OMNI.present, error)
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
