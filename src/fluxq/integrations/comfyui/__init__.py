"""fluxq as two nodes of ComfyUI: *fluxq load* runs a checkpoint that ComfyUI cannot read, *fluxq compare* judges one.

    python -m fluxq.integrations.comfyui --install COMFYUI

writes COMFYUI/custom_nodes/fluxq/__init__.py, which imports this module. ComfyUI itself is imported where a node runs,
so that this can be imported without it.
"""

from __future__ import annotations

from fluxq.integrations.comfyui.compare import FluxqCompare
from fluxq.integrations.comfyui.load import FluxqLoad

NODE_CLASS_MAPPINGS = {"FluxqLoad": FluxqLoad, "FluxqCompare": FluxqCompare}
NODE_DISPLAY_NAME_MAPPINGS = {"FluxqLoad": "fluxq load", "FluxqCompare": "fluxq compare"}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "FluxqCompare", "FluxqLoad"]
